"""Checkpoints of the lab: those of the example job, with the loss guard's state, and with faults that a save meets."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from fp8dist import StateManager
from fp8dist.errors import CheckpointError
from launch.train_gpt import checkpoints as example
from tests.support.lab.failures import CheckpointFailed, cause_of, is_of_a_collective
from tests.support.lab.options import Options
from tests.support.lab.ranks import Ranks, digest_of_state


class Loaded(NamedTuple):
    """The loaded checkpoint. ``step``: the step after which it was saved, 0 without a checkpoint. ``fp8``: True if it
    has FP8 state. ``guard``: the state of the loss guard at that step, as JSON."""

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
        self._options, self._ranks = options, ranks
        self._parent = options.out / "checkpoints"

    def find(self) -> Path | None:
        """Return the checkpoint to resume from, or None. COLLECTIVE. Raises BadInput if ``--out`` has checkpoints of
        another run."""
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
        """Save the state after this step. ``guard``: the state of the loss guard. COLLECTIVE.

        Raises:
            CheckpointFailed: it could not be written.
        """
        run = {"step": step, "ranks": self._ranks.size, "gathered_in": self.gathered_in, "guard": guard}
        folder = self._parent / f"step-{step:08d}"
        partial = self._parent / f"partial-{folder.name}"
        try:
            model_state, optimizer_state = get_state_dict(module, optimizer)
            fp8 = {} if manager is None else {"fp8": manager}
            state = {"model": model_state, "optimizer": optimizer_state, "run": run, **fp8}
            save(state, storage_writer=_Writer(partial, lambda: self.written(step)))
            if self._ranks.first:  # Its save returns only after all ranks have written.
                shutil.rmtree(folder, ignore_errors=True)  # Of a run that resumed from an older checkpoint.
                partial.rename(folder)
                self.finished(step, folder, {} if manager is None else {"digest": digest_of_state(manager)})
                for old in sorted(self._parent.glob("step-*"))[: -self._options.keep]:
                    shutil.rmtree(old)
        except (CheckpointException, CheckpointError, OSError) as error:
            if is_of_a_collective(error):
                raise
            place = f"rank {self._ranks.rank}: checkpoint of step {step}"
            raise CheckpointFailed(f"{place} could not be written: {cause_of(error)}") from error


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
