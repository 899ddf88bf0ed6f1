"""Checkpoints that the lab resumes from: they may lack FP8 state, and have that of the loss guard."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict
from torch.optim import Optimizer

from fp8dist import StateManager
from tests.support.lab.options import Options
from tests.support.lab.ranks import Ranks


class Loaded(NamedTuple):
    """The loaded checkpoint. ``step``: the step after which it was saved, 0 without a checkpoint. ``fp8``: True if it
    has FP8 state. ``guard``: the state of the loss guard at that step, as JSON."""

    step: int = 0
    fp8: bool = False
    guard: str | None = None


def load(
    folder: Path, options: Options, ranks: Ranks, module: nn.Module, optimizer: Optimizer, manager: StateManager | None
) -> Loaded:
    """Load a checkpoint. Call it before ``manager.attach``. COLLECTIVE."""
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    model_state, optimizer_state = get_state_dict(module, optimizer)
    run = {key.removeprefix("run."): None for key in saved if key.startswith("run.")}
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "run": run}
    fp8 = any(key.startswith("fp8.") for key in saved)
    if manager is not None and fp8:
        state["fp8"] = manager
    elif manager is not None and ranks.first:
        then = "scales come from --calibrate-steps" if options.calibrate_steps else "scales start cold"
        print(f"{folder} has no FP8 state: {then}", file=sys.stderr)
    load_state_dict(state, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    run = state["run"]
    if ranks.first:
        print(f"resumed from {folder}, after step {run['step']}", file=sys.stderr)
    return Loaded(int(run["step"]), fp8, run.get("guard"))
