"""Checkpoints of the lab: those of the example job, also written in the background, with the loss guard's state."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
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
from fp8dist.errors import CheckpointError
from launch.train_gpt import checkpoints as example
from tests.support.lab.failures import CheckpointFailed, cause_of, is_of_a_collective
from tests.support.lab.options import Options
from tests.support.lab.ranks import Ranks, digest_of_state


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
        self._parent = options.out / "checkpoints"
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[int, Future[Any]] | None = None

    def find(self) -> Path | None:
        """Return the checkpoint to resume from, or None. COLLECTIVE. Call it before ``save`` and ``load``. Raises
        BadInput if ``--out`` has checkpoints of another run."""
        if self._options.async_save:  # Background saves must not mix with the collectives of a step.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._options.timeout))
        return example.find(self._options, self._ranks)

    def load(self, folder: Path, module: nn.Module, optimizer: Optimizer, manager: StateManager | None) -> Loaded:
        """Load a checkpoint. Call it before ``manager.attach``. COLLECTIVE."""
        saved = FileSystemReader(folder).read_metadata().state_dict_metadata
        model_state, optimizer_state = get_state_dict(module, optimizer)
        run = {key.removeprefix("run."): None for key in saved if key.startswith("run.")}
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "run": run}
        fp8 = any(key.startswith("fp8.") for key in saved)
        if manager is not None and fp8:
            state["fp8"] = manager
        elif manager is not None and self._ranks.first:
            then = "scales come from --calibrate-steps" if self._options.calibrate_steps else "scales start cold"
            print(f"{folder} has no FP8 state: {then}", file=sys.stderr)
        load(state, checkpoint_id=folder)
        set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        run = state["run"]
        if self._ranks.first:
            print(f"resumed from {folder}, after step {run['step']}", file=sys.stderr)
        return Loaded(int(run["step"]), fp8, run.get("guard"))

    def save(
        self, step: int, module: nn.Module, optimizer: Optimizer, manager: StateManager | None, guard: str | None = None
    ) -> None:
        """Save the state after this step. ``guard``: the result of ``Guard.describe``. COLLECTIVE.

        Returns when the checkpoint is complete, or with ``--async-save`` when its tensors are copied. Raises
        CheckpointFailed if this checkpoint, or the previous asynchronous one, could not be written.
        """
        self.wait()
        run = {"step": step, "ranks": self._ranks.size, "gathered_in": self.gathered_in, "guard": guard}
        with self._telling_why(step):
            model_state, optimizer_state = get_state_dict(module, optimizer)
            state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "run": run}
            if manager is not None:
                state["fp8"] = manager
                self._digest = {"digest": digest_of_state(manager)} if self._ranks.first else {}
            writer = _Writer(self._parent / f"partial-step-{step:08d}", lambda: self.written(step))
            if self._options.async_save:
                future = async_save(state, storage_writer=writer, process_group=self._group)
                assert isinstance(future, Future)
                self._pending = step, future
            else:
                save(state, storage_writer=writer)
                self._finish(step)

    def poll(self) -> None:
        """If a background save is done, complete its checkpoint, as ``wait`` does. Local."""
        if self._pending is not None and self._pending[1].done():
            self.wait()

    def wait(self) -> None:
        """Wait for the background save and complete its checkpoint. Raises CheckpointFailed if it cannot. Local."""
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
            folder = self._parent / f"step-{step:08d}"
            shutil.rmtree(folder, ignore_errors=True)  # Of a run that resumed from an older checkpoint.
            (self._parent / f"partial-{folder.name}").rename(folder)
            self.finished(step, folder, self._digest)
            for old in sorted(self._parent.glob("step-*"))[: -self._options.keep]:
                shutil.rmtree(old)


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
