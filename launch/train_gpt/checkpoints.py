"""Checkpoints of model, optimizer and FP8 state, with torch.distributed.checkpoint.

Tensors are saved under the model's own names, with their global offsets. So a job may resume with another
``--parallel`` and another number of ranks.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

from fp8dist import StateManager
from launch.train_gpt.data import BadInput
from launch.train_gpt.options import Options
from launch.train_gpt.ranks import Ranks


def find(options: Options, ranks: Ranks) -> Path | None:
    """Return the checkpoint to resume from, or None. COLLECTIVE.

    Raises:
        BadInput: ``--out`` has checkpoints of another run.
    """
    complete = [sorted(file.parent for file in _folder(options).glob("step-*/.metadata"))]
    dist.broadcast_object_list(complete, src=0)  # Rank 0 decides for all ranks.
    newest = complete[0][-1] if complete[0] else None
    if newest is not None and options.save_every and ranks.restarts > 0:
        return newest
    given = newest if options.resume == "auto" else options.resume and Path(options.resume)
    if newest is not None and options.save_every and given != newest:
        raise BadInput(f"--out {options.out} has checkpoints: resume with --resume auto, or use another --out")
    return given or None


def load(folder: Path, module: nn.Module, optimizer: Optimizer, manager: StateManager | None) -> int:
    """Load a checkpoint, and return its step. Call it before ``manager.attach``. COLLECTIVE."""
    state = _state({"step": 0}, module, optimizer, manager)
    state_dict_loader.load(state, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(state["run"]["step"])


def save(
    options: Options, run: dict[str, Any], module: nn.Module, optimizer: Optimizer, manager: StateManager | None
) -> Path:
    """Save a checkpoint, which has its name only once it is complete, and return its folder. COLLECTIVE.

    Args:
        run: what to note about the run; "step" is the step that has ended.
    """
    name = f"step-{run['step']:08d}"
    state = _state(run, module, optimizer, manager)
    state_dict_saver.save(state, checkpoint_id=_folder(options) / f"partial-{name}")
    if dist.get_rank() == 0:
        shutil.rmtree(_folder(options) / name, ignore_errors=True)  # Of a run that resumed from an older checkpoint.
        (_folder(options) / f"partial-{name}").rename(_folder(options) / name)
        for old in sorted(_folder(options).glob("step-*"))[: -options.keep]:
            shutil.rmtree(old)
    return _folder(options) / name


def _state(run: dict[str, Any], module: nn.Module, optimizer: Optimizer, manager: StateManager | None) -> Any:
    model_state, optimizer_state = get_state_dict(module, optimizer)
    fp8 = {} if manager is None else {"fp8": manager}
    return {"model": model_state, "optimizer": optimizer_state, "run": run, **fp8}


def _folder(options: Options) -> Path:
    return options.out / "checkpoints"
