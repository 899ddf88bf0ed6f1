"""PeriodicChecks: the checks that are due every so many steps, and those that a program asks for."""

from __future__ import annotations

from dataclasses import replace

from fp8dist.checks.at_rest import AtRest
from fp8dist.checks.checked import Checked
from fp8dist.checks.checker import Checker
from fp8dist.checks.headers import findings_of_gradients
from fp8dist.checks.inventory import Scope
from fp8dist.checks.report import DivergenceReport, announce
from fp8dist.checks.values import compare_values
from fp8dist.job.weight_scales import WeightScales
from fp8dist.modules.model_state import ModelState
from fp8dist.state.accord import meet
from fp8dist.state.roll_call import failing_by_name
from fp8dist.state.settings import Policy


class PeriodicChecks:
    """Runs the checks of one manager. Steps are counted on the host since ``attach``, so all ranks check at the same
    steps.

    ``since``: boundaries that had passed when the count began.
    """

    def __init__(self, state: ModelState, checker: Checker, scales: WeightScales, at_rest: AtRest) -> None:
        self._state, self._checker, self._scales, self._at_rest = state, checker, scales, at_rest
        self.restart()

    def restart(self) -> None:
        """Count steps from now on. Local: on all ranks at the same point of the program."""
        self.since = self._state.job.boundaries
        self._checked = 0  # Boundaries passed between ``since`` and the last check that was due.

    def run_if_due(self, boundaries: int, in_step: bool) -> None:
        """Run a check every ``check_every`` steps, before the next step ends: by then each rank has committed the last
        step. COLLECTIVE if due.

        Never checks inside a Join context, where ranks without data would not take part.

        Args:
            boundaries: number passed when the last step had ended.
            in_step: True if the next step is in progress.
        """
        every, finished = self._state.settings.check_every, boundaries - self.since
        due = every and finished // every > self._checked // every
        if due and self._state.job.attached and not self._state.job.joined:
            self._checked, policy = finished, self._state.settings.check_policy
            self._run(Scope(coherence=self._checker.asked), policy, in_step)
            whole = self._state.job.whole
            if self._checker.inferred is not None and whole is not None:
                self._checker.inferred.look(whole, finished)
            anchor, values = self._checker.anchor(), self._state.values
            if values is not None and anchor is not None and anchor.communicates:
                compare_values(values, anchor, False, finished, policy != "warn", self._checker.events.notify_diverged)

    def run(self, scope: Scope, policy: Policy, max_repairs: int | None) -> DivergenceReport:
        """Compare FP8 state, and everything that ``scope`` selects, across the ranks. COLLECTIVE."""
        self.meet("check()")
        return self._run(scope, policy, False, max_repairs)

    def run_computations(self) -> DivergenceReport:
        """Compare known casts and products across the ranks, and follow ``check_policy``. COLLECTIVE."""
        return self._run(Scope(parameters=False, state=False, compute=True), self._state.settings.check_policy, False)

    def meet(self, call: str) -> None:
        """Wait until all ranks of ``Checker.anchor`` have come to this call. COLLECTIVE, through the job's store.

        Raises:
            SyncError: a rank did not come within the time-out of the group.
        """
        anchor = self._checker.anchor()
        if anchor is not None:
            meet(anchor, call)

    def _run(self, scope: Scope, policy: Policy, in_step: bool, max_repairs: int | None = None) -> DivergenceReport:
        """Run a check. ``in_step``: True if another step is in progress, so that a difference may come from it."""
        self._state.settle()
        self._scales.warn_of_outgrown()
        job, enabled = self._state.job, self._state.settings.enabled
        done = max(int(sync.arena.step) for sync in self._state.syncs) if enabled else job.boundaries - in_step
        inferred = self._checker.inferred.size if self._checker.inferred is not None and scope.parameters else 0
        also = (("at rest", self._at_rest.size), ("inferred", inferred), ("not compared", -inferred))
        scope = replace(scope, also={way: size for way, size in also if size})
        report = self._checker.check(done, done + in_step, scope, policy, max_repairs)
        if scope.state and job.received:  # Before the step counts as checked.
            report = self._with_received(report, done, policy)
        if scope.parameters and report.compared and not report.diverged:
            self._checker.last = Checked.of(job.step if enabled else done, report)
            if self._checker.last.verified:
                self._checker.checked = self._checker.last.step
            for listener in self._checker.on_checked:
                listener()
        return report

    def _with_received(self, report: DivergenceReport, step: int, policy: Policy) -> DivergenceReport:
        """Compare the gradients that came in FP8, which no sync may have done: if DDP has other ranks than the arenas,
        or the recipe no sync. COLLECTIVE."""
        anchor = self._checker.anchor()
        if anchor is None or not anchor.communicates:
            return report
        with failing_by_name("fp8dist.check", lambda: f"the check of step {step}", anchor.ranks):
            found = [replace(one, step=step) for one in findings_of_gradients(self._state.job.received, anchor)]
        announce(DivergenceReport(tuple(found)), anchor, policy != "warn", self._checker.events.notify_diverged)
        return replace(report, findings=(*report.findings, *found))
