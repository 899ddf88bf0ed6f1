"""The consistency checks of a run: when they are made, and what they came to."""

from __future__ import annotations

import time

from torch import nn

import fp8dist
from fp8dist.settings import Settings
from launch.train_gpt.options.options import Options
from launch.train_gpt.ranks import Ranks

__all__ = ["Checks"]


class Checks:
    """Compares the ranks every ``--check-every`` steps and at the end of the run.

    An FP8 job's manager makes the periodic checks itself, at the boundary of the step that follows. For others the loop
    calls ``after``. Either follows the same flags and environment variables.
    """

    def __init__(self, options: Options, ranks: Ranks, module: nn.Module, manager: fp8dist.StateManager | None) -> None:
        self.divergences = 0  # That were said or mended: under "raise" the first one ends the run.
        self._module, self._manager, self._ranks = module, manager, ranks
        self._count, self._seconds = 0, 0.0
        if manager is not None:
            self._settings = manager.settings
            manager.on_event(self._hear)
        else:  # Only the checker's matter then, from flags and environment.
            self._settings = Settings.resolve(
                amax_sync=False, backend="auto", check_every=options.check_every, check_policy=options.check_policy
            )

    @property
    def cost(self) -> tuple[int, float]:
        """(checks so far, the milliseconds that they took this rank)."""
        if self._manager is None:
            return self._count, 1e3 * self._seconds
        metrics = self._manager.metrics()
        return int(metrics["fp8/checks"]), metrics["fp8/check_ms"]

    def after(self, step: int) -> None:
        """A step is done. COLLECTIVE where a check is due.

        Raises:
            DivergenceError: ranks differ, and the policy says so.
        """
        every = self._settings.check_every
        if self._manager is None and every and step % every == 0:
            self._check(step)

    def at_the_end(self, step: int) -> None:
        """The last step is done: check what no periodic check has seen. COLLECTIVE.

        Raises:
            DivergenceError: ranks differ, and the policy says so.
        """
        every = self._settings.check_every
        if not every:
            return
        if self._manager is not None:
            self._manager.check(policy=self._settings.check_policy)
        elif step % every:
            self._check(step)

    def _check(self, step: int) -> None:
        start = time.perf_counter()
        report = fp8dist.check(self._module, step=step, policy=self._settings.check_policy)
        self._seconds += time.perf_counter() - start
        self._count += self._ranks.size > 1
        self.divergences += bool(report.findings)

    def _hear(self, event: fp8dist.Event) -> None:
        self.divergences += event.kind == "diverged"
