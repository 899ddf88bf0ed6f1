"""The consistency checks of a run, their cost and their findings."""

from __future__ import annotations

import time

from torch import nn

import fp8dist
from fp8dist.state.settings import Settings
from tests.support.lab.options import Options
from tests.support.lab.ranks import Ranks


class Checks:
    """Compares the ranks every ``--check-every`` steps and at the end of the run. Raises DivergenceError if they differ
    and the policy does not let the run continue.

    In an FP8 job the manager runs the periodic checks, at the boundary of the next step. In other jobs ``after`` runs
    them. Both follow the same flags and environment variables.
    """

    def __init__(self, options: Options, ranks: Ranks, module: nn.Module, manager: fp8dist.StateManager | None) -> None:
        self.divergences = 0  # Logged or repaired divergences. With "raise", the first one ends the run.
        self._module, self._manager, self._ranks = module, manager, ranks
        self._count, self._seconds = 0, 0.0
        if manager is not None:
            self._settings = manager.settings
            manager.on_event(self._hear)
        else:  # Without a manager, only the check settings matter.
            self._settings = Settings.resolve(
                amax_sync=False, backend="auto", check_every=options.check_every, check_policy=options.check_policy
            )

    @property
    def cost(self) -> tuple[int, float]:
        """(number of checks so far, milliseconds that they took on this rank)."""
        if self._manager is None:
            return self._count, 1e3 * self._seconds
        metrics = self._manager.metrics()
        return int(metrics["fp8/checks"]), metrics["fp8/check_ms"]

    def after(self, step: int) -> None:
        """Run the check that is due after this step, if the job has no manager. COLLECTIVE if a check is due."""
        every = self._settings.check_every
        if self._manager is None and every and step % every == 0:
            self._check(step)

    def at_the_end(self, step: int) -> None:
        """Check the state after the last step, unless a periodic check has covered it. COLLECTIVE."""
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
