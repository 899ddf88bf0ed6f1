"""What the integrations share."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from numbers import Real
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import Tensor

import fp8dist
from fp8dist.job.manager import Internals

__all__ = ["TESTED", "FP8Steps", "RunLog", "RunTarget", "caller", "install", "state_of_all_ranks", "world"]

logger = logging.getLogger("fp8dist")

RunTarget = str | os.PathLike[str] | Callable[[fp8dist.StateManager], fp8dist.Recorder]
"""Where a run is recorded: a folder, or a function that returns a Recorder of the manager."""

TESTED: Mapping[str, str] = MappingProxyType(
    {
        "transformers": "5.23.0",
        "accelerate": "1.15.0",
        "lightning": "2.6.6",
        "deepspeed": "0.19.0",
        "torchtitan": "0.3.0",
        "megatron-core": "0.16.1",
    }
)
"""By package, the version that ``scripts/test-stacks`` has passed."""

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "train_loss": "loss",
        "train/loss": "loss",
        "loss_metrics/global_avg_loss": "loss",
        "eval_loss": "validation_loss",
        "val_loss": "validation_loss",
        "val/loss": "validation_loss",
        "validation_metrics/loss": "validation_loss",
    }
)
"""By name in a trainer's logs, the name in the folder of a run, if it is another."""

TOKENS_SEEN = ("num_input_tokens_seen", "n_tokens_seen")
"""Names of the number of tokens since the training began, of all ranks."""


class RunLog:
    """Records what a trainer logs. Make it before ``attach``; the run continues from the FP8 state that is loaded.

    A trainer may log several times in a step: the last line of a step in metrics.jsonl, which counts, has all numbers.

    Args:
        run: a folder, which gets the FP8 numbers every 10 steps, or a function that returns the Recorder.
        manager: detached first if it is attached from an earlier training.
    """

    def __init__(self, run: RunTarget, manager: fp8dist.StateManager) -> None:
        manager.detach()  # Ranks agree on the watch in attach().
        self.recorder = run(manager) if callable(run) else fp8dist.Recorder(run, manager, resume_after="state")
        self._manager = manager
        self._step, self._numbers = 0, dict[str, Any]()
        self._seen: tuple[int, float] | None = None  # A step, and the tokens until its end.

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Record numbers of the step that ended last, and leave out what is no number. Local.

        Args:
            step: the trainer's. It counts if FP8 is switched off; otherwise the manager's does.
        """
        step = self._step_now(step)
        if step > self._step:
            self._step, self._numbers = step, self._tokens(metrics, step)
        known = {name: value for name, value in metrics.items() if name != "step" and not name.startswith("fp8/")}
        self._numbers |= {NAMES.get(name, name): value for name, value in known.items() if _is_number(value)}
        if step > 0:
            self.recorder.log(step, **self._numbers)

    def saved(self, path: str | os.PathLike[str], step: int) -> None:
        """Record that a checkpoint is complete. Local. ``step``: as for ``log``."""
        self.recorder.event("saved", self._step_now(step), path=os.fspath(path))

    def close(self) -> None:
        """End the run, with the name of the exception that is being handled, if there is one. Local."""
        kind, _, _ = sys.exc_info()
        self.recorder.close(None if kind is None else kind.__name__)

    def _step_now(self, step: int) -> int:
        return self._manager.run_step if self._manager.settings.enabled else step

    def _tokens(self, metrics: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Return the tokens of a step, the mean since the last line, if the trainer counts all tokens."""
        seen = next((metrics[name] for name in TOKENS_SEEN if name in metrics), None)
        if seen is None:
            return {}
        began = fp8dist.describe(self._manager)["began_after"]
        before, self._seen = (0, 0.0) if self._seen is None and began == 0 else self._seen, (step, seen)
        return {} if before is None else {"tokens": (seen - before[1]) / (step - before[0])}


class FP8Steps:
    """Added to the class of a trainer's engine or optimizer, whose steps drive ``fp8_manager``.

    A subclass that derives from a class of the trainer names that class first: Python lets an object change its class
    only if the first bases have one layout.
    """

    fp8_manager: fp8dist.StateManager

    @classmethod
    def add_to(cls, owner: Any, manager: fp8dist.StateManager) -> None:
        """Make the steps of ``owner`` drive the manager. Local."""
        owner.fp8_manager = manager
        if not isinstance(owner, cls):
            owner.__class__ = type(f"FP8{type(owner).__name__}", (cls, type(owner)), {})

    def end_fp8_step(self, updated: bool) -> None:
        """End the FP8 step, if the manager is attached. COLLECTIVE. ``updated``: False for a step that was skipped."""
        cycle = Internals(self.fp8_manager).cycle
        if cycle.job.attached:
            self.fp8_manager.step() if updated else cycle.step_skipped()

    def load_fp8(self, state: Any, source: object) -> None:
        """Load the FP8 state of a checkpoint. COLLECTIVE if it has none: scales begin anew."""
        if state:
            self.fp8_manager.load_state_dict(state)
        else:
            logger.warning("fp8dist: %s has no FP8 state: scales begin anew", source)
            self.fp8_manager.reset()
            self.fp8_manager.refresh_weights()


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)


def state_of_all_ranks(manager: fp8dist.StateManager) -> dict[str, bytes]:
    """Return the FP8 state with what other ranks do not share, for a checkpoint that one rank writes. COLLECTIVE if
    there is any (``amax_sync=False``, or groups of some ranks). Otherwise one rank may save alone."""
    state = manager.state_dict()
    own = {key: value for key, value in state.items() if key != "shared"}
    if not own:  # On no rank.
        return state
    gathered: list[Any] = [own] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return state | {key: value for theirs in gathered for key, value in theirs.items()}


def caller(kind: type) -> tuple[Any, dict[str, Any]]:
    """Return the object of this type whose method has called, directly or not, and that method's local variables.

    For hooks that are not given what they need.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), kind):
            return frame.f_locals["self"], frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]
    raise fp8dist.ConfigurationError(f"this must be called by a {kind.__module__.partition('.')[0]} {kind.__name__}")


def install(stack: str, extra: str) -> str:
    """Return what to do if a stack is not installed."""
    return f"fp8dist.integrations.{extra} needs {stack}: pip install 'fp8dist[{extra}]'"


def world() -> dist.ProcessGroup | None:
    """Return the group of all ranks, or None for a single process. Local."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 else None
