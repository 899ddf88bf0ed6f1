"""Checkpoints of the lab: model, optimizer, FP8 state and progress, with torch.distributed.checkpoint.

Tensors are saved under the model's own names, with their global offsets. So a job may resume with another
``--parallel`` and another number of ranks.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.optim import Optimizer

from fp8dist import StateManager
from fp8dist.common.text import first_few
from fp8dist.errors import CheckpointError, ConfigurationError
from launch.train_gpt.data import BadInput
from tests.support.lab import folders
from tests.support.lab.failures import CheckpointFailed, cause_of, is_of_a_collective
from tests.support.lab.options import Options, require_usable_checkpoints
from tests.support.lab.ranks import Ranks, digest_of_state

__all__ = ["Checkpoints", "Loaded"]

SHAPE = ("layers", "width", "heads", "context")
"""Options of the model. A resumed job must have the same values."""

MIXTURE = ("experts", "top_k")
"""Likewise. A checkpoint without them is of a model without experts."""

COURSE = ("steps", "learning_rate", "batch_size", "accumulate", "seed", "precision", "loss_guard")
"""Options that a resumed job may change, which changes its results."""


class Loaded(NamedTuple):
    """The loaded checkpoint. ``step``: the step after which it was saved, 0 without a checkpoint. ``fp8``: True if it
    has FP8 state. ``guard``: the result of ``Guard.describe`` at that step."""

    step: int = 0
    fp8: bool = False
    guard: str | None = None


class Checkpoints:
    """Saves checkpoints to ``OUT/checkpoints``, and finds and loads the checkpoint to resume from. COLLECTIVE."""

    def __init__(self, options: Options, ranks: Ranks) -> None:
        self.written: Callable[[int], None] = lambda step: None
        """Callback with the step: this rank has written its file, but the checkpoint is not complete yet."""
        self.finished: Callable[[int, Path, dict[str, str]], None] = lambda step, folder, digest: None
        """Callback with step, folder and ``digest`` (of the FP8 state, if any) of a complete checkpoint, on rank 0."""
        self.gathered_in: str | None = None
        """Dtype in which FSDP gathers weights, if not in their own: ``fp8dist export`` must know it."""
        self._digest: dict[str, str] = {}
        self._options, self._ranks = options, ranks
        self._parent = folders.of(options.out)
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[int, Future[Any]] | None = None
        self._aside: list[Path] = []

    # Saving ---------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        module: nn.Module,
        optimizer: Optimizer,
        manager: StateManager | None,
        guard: str | None = None,
    ) -> None:
        """Save the state after this step. COLLECTIVE.

        Returns when the checkpoint is complete, or with ``--async-save`` when its tensors are copied.

        Args:
            guard: the result of ``Guard.describe``.

        Raises:
            CheckpointFailed: this checkpoint, or the previous asynchronous one, could not be written.
        """
        self.wait()
        with self._telling_why(step):
            self._save(step, module, optimizer, manager, guard)

    def _save(
        self, step: int, module: nn.Module, optimizer: Optimizer, manager: StateManager | None, guard: str | None
    ) -> None:
        model_state, optimizer_state = get_state_dict(module, optimizer)
        course = {name: getattr(self._options, name) for name in (*SHAPE, *MIXTURE, *COURSE, "parallel")}
        state: dict[str, Any] = {
            "model": model_state,
            "optimizer": optimizer_state,
            "run": {"step": step, "ranks": self._ranks.size, **course},
        }
        if guard is not None:
            state["run"]["guard"] = guard
        if self.gathered_in is not None:
            state["run"]["gathered_in"] = self.gathered_in
        if manager is not None:
            state["fp8"] = manager
            self._digest = {"digest": digest_of_state(manager)} if self._ranks.first else {}
        writer = _Writer(folders.partial(self._parent, step), lambda: self.written(step))
        with _no_warning_of_one_process():
            how: dict[str, Any] = {"process_group": self._group, "no_dist": self._group is None}
            if self._options.async_save:
                future = async_save(state, storage_writer=writer, **how)
                assert isinstance(future, Future)
                self._pending = step, future
            else:
                save(state, storage_writer=writer, **how)
                self._finish(step)

    def poll(self) -> None:
        """If a background save is done, complete its checkpoint. Local.

        Raises:
            CheckpointFailed: it could not be written.
        """
        if self._pending is not None and self._pending[1].done():
            self.wait()

    def wait(self) -> None:
        """Wait for the background save and complete its checkpoint. Local.

        Raises:
            CheckpointFailed: it could not be written.
        """
        if self._pending is not None:
            (step, future), self._pending = self._pending, None
            with self._telling_why(step):
                future.result()
                self._finish(step)

    @contextlib.contextmanager
    def _telling_why(self, step: int) -> Iterator[None]:
        try:
            yield
        except (CheckpointException, CheckpointError, OSError) as error:
            if is_of_a_collective(error):
                raise
            place = f"rank {self._ranks.rank}: checkpoint of step {step}"
            raise CheckpointFailed(f"{place} could not be written: {cause_of(error)}") from error

    def _finish(self, step: int) -> None:
        """Rename the checkpoint and prune old ones. Local: rank 0's save returns only after all ranks have written."""
        if self._ranks.first:
            self.finished(step, folders.finish(self._parent, step), self._digest)
            folders.prune(self._parent, self._options.keep)

    # Resuming -------------------------------------------------------------------------------------

    def find(self) -> Path | None:
        """Return the checkpoint to resume from, or None. Rank 0 decides for all ranks.

        COLLECTIVE. Call it before ``save`` and ``load``.

        Raises:
            BadInput: on all ranks, if the existing checkpoints do not fit the flags.
        """
        found: list[Path | BadInput | None] = [None]
        if self._ranks.first:
            try:
                found = [self._find()]
            except BadInput as error:
                found = [error]
            except OSError as error:
                found = [BadInput(f"{self._parent}: {error.strerror or error}")]
        if self._ranks.size > 1:
            dist.broadcast_object_list(found, src=0)
        if isinstance(found[0], BadInput):
            raise found[0]
        if self._ranks.size > 1 and (self._options.save_every or found[0] is not None):
            # Checkpoints use their own gloo group: background saves must not mix with the collectives of a step, and
            # they send CPU objects.
            timeout = timedelta(seconds=self._options.timeout)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        return found[0]

    def _find(self) -> Path | None:
        """Choose the checkpoint, on rank 0."""
        options, restarted = self._options, self._ranks.restarts > 0
        if not restarted:
            require_usable_checkpoints(options)
        if options.save_every:
            self._parent.mkdir(exist_ok=True)
            for folder in folders.remove_leftovers(self._parent):
                print(f"removed incomplete checkpoint {folder} of an earlier run", file=sys.stderr)
        of_this_job = folders.newest(self._parent)
        if restarted and options.save_every and of_this_job is not None:
            return of_this_job  # Progress of the job itself counts more than --resume.
        if options.resume in (None, "auto"):
            return of_this_job if options.resume == "auto" else None
        given = Path(str(options.resume))
        if options.save_every and not restarted:
            # Before loading: if a rank dies first, the restarted job must not find the later checkpoints.
            self._aside = folders.set_aside(self._parent, folders.step_of(given))
            for aside in self._aside:
                print(f"renamed a checkpoint of a later step to {aside}", file=sys.stderr)
        return given

    def load(self, folder: Path, module: nn.Module, optimizer: Optimizer, manager: StateManager | None) -> Loaded:
        """Load a checkpoint. Call it before ``manager.attach``. COLLECTIVE.

        Raises:
            ConfigurationError: the checkpoint is of another model, or cannot be read.
            CheckpointError: its FP8 state does not fit this model.
        """
        try:
            return self._load(folder, module, optimizer, manager)
        except (ConfigurationError, CheckpointError):
            folders.put_back(self._aside)  # A mistake in the flags must not change the folder.
            raise

    def _load(self, folder: Path, module: nn.Module, optimizer: Optimizer, manager: StateManager | None) -> Loaded:
        saved = self._metadata(folder)
        run = self._load_run(folder, saved)
        model_state, optimizer_state = get_state_dict(module, optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
        there = {key.removeprefix("fp8.") for key in saved if key.startswith("fp8.")}
        if manager is not None and there:
            self._require_state_of_all(folder, run, there, manager)
            state["fp8"] = manager
            self._digest = {"digest": digest_of_state(manager)} if self._ranks.first else {}
        elif manager is not None and self._ranks.first:
            then = "scales come from --calibrate-steps" if self._options.calibrate_steps else "scales start cold"
            print(f"{folder} has no FP8 state: {then}", file=sys.stderr)
        self._read(state, folder)
        set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        if self._ranks.first:
            self._report(folder, run)
        return Loaded(int(run["step"]), bool(there), run.get("guard"))

    def _metadata(self, folder: Path) -> Mapping[str, Any]:
        try:
            return FileSystemReader(folder).read_metadata().state_dict_metadata
        except Exception as error:  # Reading and unpickling may raise anything.
            raise ConfigurationError(f"--resume {folder}: it cannot be read: {cause_of(error)}") from error

    def _require_state_of_all(
        self, folder: Path, run: Mapping[str, Any], there: set[str], manager: StateManager
    ) -> None:
        """Raise ConfigurationError on all ranks if FP8 state of any rank is missing, so that no rank waits alone.

        COLLECTIVE.
        """
        needed: list[list[str]] = [list(manager.state_dict())] * self._ranks.size
        if self._group is not None:
            dist.all_gather_object(needed, needed[0], group=self._group)
        missing = {key for keys in needed for key in keys} - there
        if missing:
            raise ConfigurationError(
                f"--resume {folder}: has FP8 state {first_few(sorted(there))}, of {run.get('ranks')} rank(s), but this "
                f"job needs {first_few(sorted(missing))}, on {self._ranks.size}: 'shared' comes from --amax-sync and "
                "'rank<N>' from rank N with --no-amax-sync; resume with the flag and the ranks of the first run"
            )

    def _load_run(self, folder: Path, saved: Mapping[str, Any]) -> dict[str, Any]:
        run: dict[str, Any] = {key.removeprefix("run."): None for key in saved if key.startswith("run.")}
        missing = {"step", *SHAPE} - set(run)
        if missing:
            raise ConfigurationError(f"--resume {folder}: not a checkpoint of train_gpt, lacks {sorted(missing)}")
        state = {"run": run}
        self._read(state, folder)
        run = state["run"]
        run = {**dict.fromkeys(MIXTURE, 0), **run}
        for name in (*SHAPE, *MIXTURE):
            if run[name] != getattr(self._options, name):
                flag = name.replace("_", "-")
                raise ConfigurationError(
                    f"--resume {folder}: saved with --{flag} {run[name]}, got {getattr(self._options, name)}"
                )
        if run["step"] > self._options.last_step:
            raise ConfigurationError(
                f"--resume {folder}: step {run['step']} is beyond the last step, {self._options.last_step}"
            )
        return run

    def _read(self, state: dict[str, Any], folder: Path) -> None:
        with _no_warning_of_one_process():
            try:
                load(state, checkpoint_id=folder, process_group=self._group, no_dist=self._group is None)
            except CheckpointException as error:
                if is_of_a_collective(error):
                    raise
                raise ConfigurationError(f"--resume {folder}: it cannot be read: {cause_of(error)}") from error

    def _report(self, folder: Path, run: Mapping[str, Any]) -> None:
        print(f"resumed from {folder}, after step {run['step']}", file=sys.stderr)
        now = {"ranks": self._ranks.size, **{name: getattr(self._options, name) for name in (*COURSE, "parallel")}}
        for name, value in now.items():
            if name in run and run[name] != value:
                print(f"resumed with another {name}: {value} instead of {run[name]}", file=sys.stderr)


class _Writer(FileSystemWriter):
    """Writes one file per rank, and syncs it to disk (fsync) before it counts as written."""

    def __init__(self, folder: Path, written: Callable[[], None]) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True)
        self._written = written

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            results = super().write_data(plan, planner)
        except RuntimeError as error:
            # After a failed write, closing torch.save's archive raises another error. Raise the original one.
            origin = error.__context__
            if isinstance(origin, OSError):
                raise origin from None
            raise
        self._written()
        return results


@contextlib.contextmanager
def _no_warning_of_one_process() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield
