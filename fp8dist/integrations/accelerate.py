"""Accelerate: ``prepare`` in place of ``accelerator.prepare``."""

from __future__ import annotations

from typing import Any

import fp8dist
from fp8dist.errors import ConfigurationError
from fp8dist.integrations.stacks import RunLog, RunTarget, install, state_of_all_ranks, world
from fp8dist.state.groups import has_base
from fp8dist.state.recipe import Recipe

try:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker
except ImportError as error:
    raise ImportError(install("Accelerate", "accelerate")) from error

__all__ = ["prepare"]


def prepare(
    accelerator: Accelerator,
    model: Any,
    optimizer: Any,
    *rest: Any,
    recipe: Recipe | None = None,
    run: RunTarget | None = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Prepare a model for FP8, pass everything to ``accelerator.prepare``, and attach. COLLECTIVE.

    ``accelerator.save_state`` and ``load_state`` contain the FP8 state. With ``accelerator.accumulate``, an FP8 step
    ends when the optimizer really steps.

    Args:
        accelerator: with ``mixed_precision`` "no", "bf16" or "fp16", because FP8 is this library's part.
        model, optimizer: one of each. Call this once per model.
        rest: dataloaders, schedulers and other things for ``accelerator.prepare``, in any order.
        recipe, options: as for ``fp8dist.prepare``. ``group``: by default, all ranks.
        run: the folder of the run for ``fp8dist report``, or a function that returns the Recorder of a manager. It gets
            what ``accelerator.log`` gets after each step, until ``accelerator.end_training``.
            ``accelerator.get_tracker("fp8dist", unwrap=True)`` is the Recorder. None: nothing is recorded.

    Returns:
        (manager, model, optimizer, *rest), prepared.

    Raises:
        ConfigurationError: ``mixed_precision`` is "fp8", or the model is wrapped already.
    """
    if accelerator.mixed_precision == "fp8":
        raise ConfigurationError('mixed_precision="fp8" converts the model to another FP8 library: use "bf16"')
    manager = fp8dist.prepare(model, recipe, **{"group": world(), **options})
    model, optimizer, *others = accelerator.prepare(model, optimizer, *rest)
    if run is not None:
        accelerator.trackers.append(_Tracker(RunLog(run, manager)))
    if has_base(model, "DeepSpeedEngine"):
        from fp8dist.integrations import deepspeed

        deepspeed.attach(manager, model)  # Its checkpoints, which ``save_state`` makes, have the FP8 state.
    else:
        manager.attach(model, optimizer=optimizer, scaler=accelerator.scaler)
        accelerator.register_for_checkpointing(_State(manager))
    return manager, model, optimizer, *others


class _State:
    """The FP8 state in Accelerate's checkpoints, which rank 0 writes."""

    def __init__(self, manager: fp8dist.StateManager) -> None:
        self._manager = manager

    def state_dict(self) -> dict[str, bytes]:
        """Return the state of all ranks. COLLECTIVE unless all ranks share it: many programs save on rank 0 alone."""
        return state_of_all_ranks(self._manager)

    def load_state_dict(self, state_dict: dict[str, bytes]) -> None:
        """Load this rank's state. Local."""
        self._manager.load_state_dict(state_dict)


class _Tracker(GeneralTracker):
    """Passes on what ``accelerator.log`` is given."""

    name = "fp8dist"
    requires_logging_directory = False

    def __init__(self, log: RunLog) -> None:
        super().__init__()
        self._log = log

    @property
    def tracker(self) -> fp8dist.Recorder:
        """The Recorder."""
        return self._log.recorder

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Record numbers. Local."""
        self._log.log(values, step or 0)

    def finish(self) -> None:
        """End the run. Local."""
        self._log.close()
