"""Checkpoints of the job: model, optimizer, FP8 state and progress, with torch.distributed.checkpoint.

Tensors are saved under the model's own names and by place, so a job may go on with another ``--parallel`` and another
number of ranks.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.optim import Optimizer

import folders
from fp8dist import StateManager
from fp8dist.errors import ConfigurationError
from options import Options
from ranks import Ranks

__all__ = ["Checkpoints"]

SHAPE = ("layers", "width", "heads", "context")
"""What a checkpoint's model and this job's must have in common."""

COURSE = ("steps", "learning_rate", "batch_size", "accumulate", "seed", "precision")
"""What a resumed job may change, and then learns something else than the first would have."""


class Checkpoints:
    """Saves every ``--save-every`` steps into ``OUT/checkpoints``, and finds what to go on from. COLLECTIVE."""

    def __init__(self, options: Options, ranks: Ranks) -> None:
        self.written: Callable[[int], None] | None = None
        """Called with the step when this rank has written its file, before the checkpoint is whole."""
        self._options, self._ranks = options, ranks
        self._parent = folders.of(options.out)
        self._group: dist.ProcessGroup | None = None
        self._pending: tuple[int, Future[Any]] | None = None
        if ranks.backend is not None and (options.save_every or options.resumes):
            # Its own, so that what is saved in the background meets nothing of a step; and for CPU objects.
            timeout = timedelta(seconds=options.timeout)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        if ranks.first and options.save_every:
            self._parent.mkdir(exist_ok=True)
            for folder in folders.remove_leftovers(self._parent):
                print(f"removed {folder}, which an earlier run did not finish", file=sys.stderr)

    # Saving ---------------------------------------------------------------------------------------

    def save(self, step: int, module: nn.Module, optimizer: Optimizer, manager: StateManager | None) -> None:
        """Save the state after this step. COLLECTIVE.

        Returns when the checkpoint is whole; with ``--async-save`` when its tensors were copied.
        """
        self.wait()
        model_state, optimizer_state = get_state_dict(module, optimizer)
        course = {name: getattr(self._options, name) for name in (*SHAPE, *COURSE, "parallel")}
        state = {
            "model": model_state,
            "optimizer": optimizer_state,
            "run": {"step": step, "ranks": self._ranks.size, **course},
        }
        if manager is not None:
            state["fp8"] = manager
        writer = _Writer(folders.partial(self._parent, step), lambda: self._tell_written(step))
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
        """If a save in the background is done, make its checkpoint whole. Local."""
        if self._pending is not None and self._pending[1].done():
            self.wait()

    def wait(self) -> None:
        """Until nothing is being saved in the background. Local."""
        if self._pending is not None:
            (step, future), self._pending = self._pending, None
            future.result()
            self._finish(step)

    def _tell_written(self, step: int) -> None:
        if self.written is not None:
            self.written(step)

    def _finish(self, step: int) -> None:
        """Local: a save returns, on the first rank, only after all ranks have written."""
        if self._ranks.first:
            folders.finish(self._parent, step)
            folders.prune(self._parent, self._options.keep)

    # Resuming -------------------------------------------------------------------------------------

    def find(self) -> Path | None:
        """What to go on from; the first rank decides for all. COLLECTIVE."""
        options = self._options
        if not options.resumes:
            return None
        found: list[Path | None] = [None]
        if self._ranks.first:
            given = None if options.resume in (None, "auto") else Path(str(options.resume))
            of_this_job = folders.newest(self._parent)
            # A job that was restarted goes on from where it was, not from where it began.
            found = [of_this_job if given is None else given]
            if options.restarts and of_this_job is not None and options.save_every:
                found = [of_this_job]
        if self._group is not None:
            dist.broadcast_object_list(found, src=0, group=self._group)
        return found[0]

    def load(self, folder: Path, module: nn.Module, optimizer: Optimizer, manager: StateManager | None) -> int:
        """Take over a checkpoint, before ``manager.attach``; the step that it was saved after. COLLECTIVE.

        Raises:
            ConfigurationError: it is of another model.
        """
        saved = FileSystemReader(folder).read_metadata().state_dict_metadata
        run = self._load_run(folder, saved)
        model_state, optimizer_state = get_state_dict(module, optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
        if manager is not None and any(key.startswith("fp8.") for key in saved):
            state["fp8"] = manager
        elif manager is not None and self._ranks.first:
            print(f"{folder} has no FP8 state: scales start cold", file=sys.stderr)
        self._read(state, folder)
        set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        step = int(run["step"])
        if self._ranks.first:
            self._report(folder, run)
            if self._options.save_every:
                for aside in folders.set_aside(self._parent, step):
                    print(f"set aside, as it is of a later step: {aside}", file=sys.stderr)
        return step

    def _load_run(self, folder: Path, saved: Mapping[str, Any]) -> dict[str, Any]:
        run: dict[str, Any] = {key.removeprefix("run."): None for key in saved if key.startswith("run.")}
        missing = {"step", *SHAPE} - set(run)
        if missing:
            raise ConfigurationError(f"--resume {folder}: no checkpoint of train_gpt.py, without {sorted(missing)}")
        state = {"run": run}
        self._read(state, folder)
        run = state["run"]
        for name in SHAPE:
            if run[name] != getattr(self._options, name):
                raise ConfigurationError(
                    f"--resume {folder}: saved with --{name} {run[name]}, and this is {getattr(self._options, name)}"
                )
        if run["step"] > self._options.last_step:
            raise ConfigurationError(f"--resume {folder}: step {run['step']} is beyond {self._options.last_step}")
        return run

    def _read(self, state: dict[str, Any], folder: Path) -> None:
        with _no_warning_of_one_process():
            load(state, checkpoint_id=folder, process_group=self._group, no_dist=self._group is None)

    def _report(self, folder: Path, run: Mapping[str, Any]) -> None:
        print(f"resumed from {folder}, after step {run['step']}", file=sys.stderr)
        now = {"ranks": self._ranks.size, **{name: getattr(self._options, name) for name in (*COURSE, "parallel")}}
        for name, value in now.items():
            if name in run and run[name] != value:
                print(f"resumed with another {name}: {value} in place of {run[name]}", file=sys.stderr)


class _Writer(FileSystemWriter):
    """One file per rank, on the disk (fsync) before it counts as written."""

    def __init__(self, folder: Path, written: Callable[[], None]) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True)
        self._written = written

    def write_data(self, plan: Any, planner: Any) -> Any:
        results = super().write_data(plan, planner)
        self._written()
        return results


@contextlib.contextmanager
def _no_warning_of_one_process() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield
