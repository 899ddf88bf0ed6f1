"""The loss guard of a run: its action if the loss jumps, and its state in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

import fp8dist
from tests.support.lab.options import Options
from tests.support.lab.ranks import Ranks

FACTOR = 1.5
"""Default of ``--loss-factor``."""

STEPS = 100
"""Steps in high precision with ``--loss-guard fallback``, without ``--fallback-steps``."""


class Guard:
    """Applies ``--loss-guard`` to each step's loss. Does nothing with "off".

    ``learning_rate_factor``: the product of all halvings by "lower-lr" so far.
    """

    def __init__(
        self, options: Options, ranks: Ranks, optimizer: Optimizer, manager: fp8dist.StateManager | None
    ) -> None:
        self.learning_rate_factor = 1.0
        self._optimizer = optimizer
        self._guard: fp8dist.LossGuard | None = None
        if options.loss_guard != "off":
            action: Callable[[fp8dist.LossAlarm], object] | Any = options.loss_guard
            self._guard = fp8dist.LossGuard(
                self.halve_learning_rate if action == "lower-lr" else action,
                factor=FACTOR if options.loss_factor is None else options.loss_factor,
                mean_over=None if ranks.size == 1 else dist.group.WORLD,
                manager=manager,
                steps=options.fallback_steps or STEPS,
                optimizer=optimizer if action == "skip" else None,
            )

    @property
    def losses(self) -> fp8dist.LossGuard | None:
        """The library's guard, or None if it is off."""
        return self._guard

    @property
    def alarms(self) -> int:
        """Alarms so far, including those of the runs that this run resumed from."""
        return 0 if self._guard is None else self._guard.alarms

    def observe(self, step: int, loss: Tensor) -> fp8dist.LossAlarm | None:
        """Check this rank's mean loss of a step, and return the alarm, if any; with "stop", raise LossDiverged on all
        ranks. Call it between the backward and the update. COLLECTIVE, unless it is off."""
        return None if self._guard is None else self._guard.observe(loss, step)

    def halve_learning_rate(self, alarm: fp8dist.LossAlarm) -> None:
        """Halve the learning rate, from this step's update on."""
        self.learning_rate_factor /= 2
        for group in self._optimizer.param_groups:
            group["lr"] /= 2

    def describe(self) -> str | None:
        """Return the state for ``restore`` as JSON text, or None if the guard is off."""
        if self._guard is None:
            return None
        return json.dumps({"learning_rate_factor": self.learning_rate_factor, "losses": self._guard.state_dict()})

    def restore(self, described: str) -> None:
        """Load the result of ``describe``, unless the guard is off."""
        if self._guard is not None:
            state = json.loads(described)
            self.learning_rate_factor = float(state["learning_rate_factor"])
            self._guard.load_state_dict(state["losses"])
