"""Whether the ranks of one manager agree: acts on what syncs have proved, and compares everything else when asked."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from fp8dist.consistency.contents import ArenaContent, values_near
from fp8dist.consistency.headers import localise
from fp8dist.consistency.inventory import Holdings, Inventory, Scope
from fp8dist.consistency.protocol import check_replicas
from fp8dist.consistency.repair import mended_texts, repair
from fp8dist.consistency.report import DivergenceReport, announce, save_evidence
from fp8dist.divergence import Finding
from fp8dist.errors import ConfigurationError
from fp8dist.modules.job_state import JobState
from fp8dist.modules.precision_control import PrecisionControl
from fp8dist.parallel.ddp import find_ddp
from fp8dist.settings import Policy, Settings
from fp8dist.state.arena import NONFINITE, SATURATED, TAKEN, Arena
from fp8dist.state.slots import Slot
from fp8dist.sync.arena_sync import ArenaSync, Evidence
from fp8dist.sync.groups import GroupLike, SyncGroup, world_size
from fp8dist.text import first_few
from fp8dist_kernels.header import WORD_MANIFEST, WORD_STEP

__all__ = ["Checker", "Event", "run_check"]

logger = logging.getLogger("fp8dist")


@dataclass(frozen=True)
class Event:
    """Something that a monitor or a policy may want to hear of.

    ``kind`` is "nonfinite" (``slots`` saw a NaN or Inf amax; their scales stayed), "saturated" (weights that are
    gathered in FP8 were cast beyond the scales of ``slots``), "fallback" (the modules that cast ``slots`` are in high
    precision for a while), "jump" (the scales of ``slots`` jumped since they were last watched) or "diverged"
    (``report`` says what). Events are told at boundaries and in ``check()``, the same ones on every rank.
    """

    kind: Literal["nonfinite", "saturated", "fallback", "jump", "diverged"]
    step: int
    slots: tuple[Slot, ...] = ()
    report: DivergenceReport | None = None


_NOTHING_TO_COMPARE = (
    "give attach() the module that DDP made, or name the ranks that hold the same by prepare(group=…) with amax_sync, "
    "or by fp8dist.check(module, group=…); else leave check() and check_every out"
)

MUCH = 2.0
"""Overflow ratio above which we assume an external write."""


class Checker:
    """Of one manager. ``callbacks`` hear of events."""

    def __init__(
        self,
        syncs: Sequence[ArenaSync],
        groups: Sequence[SyncGroup | None],
        settings: Settings,
        job: JobState,
        control: PrecisionControl,
    ) -> None:
        self.callbacks: list[Callable[[Event], None]] = []
        self.checks = 0
        self.seconds = 0.0
        self.syncs, self._groups = syncs, groups
        self.settings, self.job = settings, job
        self._control = control
        self._default = next((i for i, sync in enumerate(syncs) if not sync.patterns), 0)
        self._module: weakref.ref[nn.Module] | None = None
        self._last_good: int | None = None
        self._untold: list[Event] = []
        self._said_skipped = self._said_saturated = self._said_nonfinite = False

    def watch(self, module: nn.Module) -> None:
        """``module``: what tells how parameters are replicated (DDP around the model, say)."""
        self._module = weakref.ref(module)

    # What syncs have proved ------------------------------------------------------------------------

    def act_on_verdicts(self, joins: bool, only_immediate: bool = False, raises: bool = True) -> None:
        """Read what the last syncs proved and act on it. COLLECTIVE when they found a difference.

        Called at boundaries only, so that all ranks come here together.

        Args:
            joins: ranks without data would not come: nothing is localised.
            raises: whether the policy may raise.
        """
        differing = self._read_verdicts(joins, only_immediate)
        left = [finding for sync, report in differing for finding in self._conclude(sync, report, joins)]
        self._tell_all()
        if raises and self.settings.check_policy != "warn":
            DivergenceReport(tuple(left)).raise_if_diverged()

    def known_findings(self) -> list[Finding]:
        """What the last syncs proved to differ, for a check to report. COLLECTIVE when they found a difference."""
        return [finding for _, report in self._read_verdicts() for finding in report.findings]

    def _read_verdicts(
        self, joins: bool = False, only_immediate: bool = False
    ) -> list[tuple[ArenaSync, DivergenceReport]]:
        differing: list[tuple[ArenaSync, DivergenceReport]] = []
        for sync in self.syncs:
            if sync.verdict is None:
                continue
            if only_immediate and not (sync.verdict.immediate and sync.arena.recipe.update == "same_step"):
                continue
            verdict, kept = sync.read_verdict()
            if not (verdict.differs or verdict.nonfinite or verdict.saturated or verdict.tripped):
                continue
            evidence = kept or sync.evidence()
            step = int(evidence.words[WORD_STEP])
            if verdict.saturated:
                self._tell_saturated(sync, step, evidence)
            if verdict.nonfinite:
                self._tell_nonfinite(sync, step, _slots_where(sync.arena, evidence.flags[NONFINITE]))
            if verdict.tripped:
                self._tell_fallback(sync, step)
            if verdict.differs and joins:
                detail = "not localised inside a Join context"
                ranks = tuple(sync.group.ranks) if sync.group is not None else ()
                findings = [Finding(step, kind, kind, ranks, None, detail=detail) for kind in verdict.differs]
                differing.append((sync, DivergenceReport(tuple(findings))))
            elif verdict.differs:
                differing.append((sync, self._localise(sync, evidence, verdict.differs)))
        return differing

    def _tell_saturated(self, sync: ArenaSync, step: int, evidence: Evidence) -> None:
        """Sharded weights outgrew their scale: by little in training, if ever; by much if somebody wrote to them. Then
        one rank says so."""
        arena = sync.arena
        places = arena.shard_slots[evidence.flags[SATURATED][arena.shard_slots]]
        slots = tuple(arena.specs[place].slot for place in places.tolist())
        self._untold.append(Event("saturated", step, slots))
        used = arena.amax * evidence.scales[0] / arena.fp8_max  # By a step of training it grows by little.
        if not self._said_saturated and bool((used[places] > MUCH).any()):
            self._said_saturated = True
            if sync.speaks:
                logger.warning(
                    "fp8dist: step %d: %d weight(s) were cast to FP8 far beyond their scale, %s first: they were "
                    "written to in a way that torch does not tell of (.data, to_local()). Call "
                    "manager.refresh_weights() after it",
                    step,
                    len(slots),
                    slots[0].fqn,
                )

    def _tell_nonfinite(self, sync: ArenaSync, step: int, slots: tuple[Slot, ...]) -> None:
        """The same on all ranks. One rank says it once: a loss scaler that ``attach`` does not know may be at work."""
        self._untold.append(Event("nonfinite", step, slots))
        if not self._said_nonfinite and sync.speaks:
            self._said_nonfinite = True
            logger.warning(
                "fp8dist: step %d: the amaxes of %s were not finite: their scales stay as they are. If a loss scaler "
                "skips such steps, attach(scaler=…) keeps them out of the FP8 state",
                step,
                first_few(slots),
            )

    def _tell_fallback(self, sync: ArenaSync, step: int) -> None:
        """The same on all ranks: what tripped is what their sync says."""
        slots = _slots_where(sync.arena, sync.take_tripped())
        modules = self._control.fall_back(slots)
        if not modules:
            return
        self._untold.append(Event("fallback", step, slots))
        assert self.settings.fallback is not None
        if sync.speaks:
            logger.warning(
                "fp8dist: step %d: %d module(s) go to high precision for %d steps, %s first (%s)",
                step,
                len(modules),
                self.settings.fallback.steps,
                modules[0],
                ", ".join(map(str, slots[:4])),
            )

    def _localise(self, sync: ArenaSync, evidence: Evidence, differs: tuple[str, ...]) -> DivergenceReport:
        with _on_device(sync.arena.device):
            found = localise(sync, evidence, differs)
        arena, sent = sync.arena, evidence.scales
        save_evidence(found.report, self.settings.report_dir, lambda finding: _slot_evidence(arena, sent, finding))
        # All ranks go on from one state. Else every later sync would be refused for its step, and a scale that
        # the commit did not touch, because its slot did not run, would be reported for ever.
        arena.step.fill_(found.step)
        if found.reference is not None:
            arena.adopt_untaken_scales(found.reference.scales, evidence.flags[TAKEN])
            arena.counters[SATURATED] = found.reference.saturated
            self.job.invalidate_casts()
        return found.report

    def _conclude(self, sync: ArenaSync, report: DivergenceReport, joins: bool) -> tuple[Finding, ...]:
        """Mend it if that is the policy, and say it; the findings that are left. COLLECTIVE unless ``joins``."""
        assert sync.group is not None
        if joins:
            if sync.group.rank == report.reporting_rank:
                logger.warning("%s", report)
        else:
            if self.settings.check_policy == "repair":
                report = self._mend_arena(sync, sync.group, report)
            announce(report, sync.group, raises=False)
        self._untold.append(_diverged(report))
        return () if report.consistent else report.findings

    def _mend_arena(self, sync: ArenaSync, group: SyncGroup, report: DivergenceReport) -> DivergenceReport:
        """COLLECTIVE. The commit, and ``_localise``, have made the scales equal already: compare everything else."""
        if any(f.kind != "scale" or f.reference_rank is None for f in report.findings):
            return report

        def build() -> Holdings:
            inventory = Inventory(group)
            inventory.add_arena(sync)
            return inventory.holdings(int(sync.arena.step))

        compared = check_replicas(group, build, everything=True)
        after = compared.report if compared.report.consistent else repair(group, build, compared)
        return replace(report, repaired=mended_texts(report) + after.repaired) if after.consistent else after

    # Comparing -------------------------------------------------------------------------------------

    def check(self, step: int, scope: Scope, policy: Policy) -> DivergenceReport:
        """Compare the FP8 state, and what ``scope`` says, across the ranks. COLLECTIVE.

        Raises:
            DivergenceError: ranks differ, and the policy says so.
            ConfigurationError: there are several ranks, FP8 is not switched off, and there is nothing to compare.
        """
        start = time.perf_counter()
        module = None if self._module is None else self._module()
        default = self.syncs[self._default]
        anchor = self._anchor(module)
        if anchor is None:
            return DivergenceReport(skipped=("there is one rank, or no process group",))
        try:
            report = run_check(
                anchor,
                [self],
                module,
                scope,
                policy,
                _NOTHING_TO_COMPARE,
                default.arena.device,
                self.settings.report_dir,
                step=step,
                last_good=self._last_good,
                manifest=str(int(default.arena.words[WORD_MANIFEST])) if default.communicates else "",
            )
        finally:
            self.checks += 1
            self.seconds += time.perf_counter() - start
        self._tell_all()
        if report.consistent:
            self._last_good = step
        self.say_what_is_skipped(report, anchor, scope)
        return report

    def say_what_is_skipped(self, report: DivergenceReport, anchor: SyncGroup, scope: Scope) -> None:
        """Warn once if parameters should be compared and none are. Local."""
        skipped = [text for text in report.skipped if "parameters" in text]
        if scope.parameters and skipped and "parameter" not in report.compared and not self._said_skipped:
            self._said_skipped = True
            if anchor.rank == min(anchor.ranks):
                logger.warning("fp8dist: no parameters are compared: %s", "; ".join(skipped))

    def _anchor(self, module: nn.Module | None) -> SyncGroup | None:
        """The ranks that check together: the default group; without one DDP's, or the whole job."""
        group = self._groups[self._default]
        if group is not None:
            return group
        if world_size() == 1:
            return None
        ddp = None if module is None else find_ddp(module)
        return SyncGroup(dist.group.WORLD if ddp is None else ddp.process_group)  # type: ignore[arg-type]

    def tell(self, event: Event) -> None:
        """Tell the callbacks of something at the end of this boundary. Local."""
        self._untold.append(event)

    def tell_report(self, report: DivergenceReport) -> None:
        """Tell the callbacks of a check's report. Local."""
        self._untold.append(_diverged(report))
        self._tell_all()

    def _tell_all(self) -> None:
        """Outside of any exchange: what a callback raises leaves nobody waiting in one."""
        events, self._untold = self._untold, []
        for event in events:
            for callback in self.callbacks:
                callback(event)


def run_check(
    anchor: SyncGroup,
    checkers: Sequence[Checker],
    module: nn.Module | None,
    scope: Scope,
    policy: Policy,
    instead: str,
    device: torch.device,
    report_dir: str | None,
    step: int,
    last_good: int | None,
    manifest: str = "",
    vouched: bool = False,
    groups: Mapping[str, GroupLike | None] | None = None,
) -> DivergenceReport:
    """A check from beginning to end: compare, keep the evidence, mend, say it once, raise. COLLECTIVE over ``anchor``.

    Args:
        checkers: whose FP8 state is compared, and who tell their callbacks.
        instead: what to do where no rank has anything to compare, for the error.
        device: collectives go through this GPU, if it is one.
        vouched: see ``Inventory``, as ``groups``.

    Raises:
        DivergenceError: on all ranks, if ranks differ and the policy says so.
        ConfigurationError: on all ranks, if there are several, FP8 is not switched off, and nothing is to be compared.
    """
    held: list[Holdings] = []

    def build() -> Holdings:
        inventory = Inventory(anchor, vouched, groups)
        for checker in checkers:
            for sync in checker.syncs:
                inventory.add_arena(sync)
        if module is not None:
            inventory.add_module(module, scope)
        held[:] = [inventory.holdings(step, manifest, last_good)]
        return held[0]

    def evidence(finding: Finding) -> dict[str, Any] | None:
        sets = held[0].sets if held else ()
        return next((found for s in sets if (found := s.evidence(finding)) is not None), None)

    def tell(report: DivergenceReport) -> None:
        for checker in checkers:
            checker.tell_report(report)

    with _on_device(device):
        known = [finding for checker in checkers for finding in checker.known_findings()]
        try:
            compared = check_replicas(anchor, build, known, everything=policy == "repair")
            report = compared.report
            # Who switches FP8 off for a job that checks its FP8 state must not end it by that.
            if compared.nothing and (not checkers or any(checker.settings.enabled for checker in checkers)):
                why = "; ".join(report.skipped) or "it has no parameters"
                raise ConfigurationError(
                    "check() has nothing to compare, because nothing here is known to be the same on several ranks "
                    f"({why}): {instead}"
                )
            if not report.consistent:
                save_evidence(report, report_dir, evidence)
                if policy == "repair":
                    report = repair(anchor, build, compared)
                announce(report, anchor, raises=policy in ("raise", "repair"), tell=tell)
            return report
        finally:  # A repair writes weights behind their casts' back.
            for checker in checkers:
                checker.job.invalidate_casts()


def _on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _diverged(report: DivergenceReport) -> Event:
    return Event("diverged", max(f.step for f in report.findings), report=report)


def _slot_evidence(arena: Arena, sent: torch.Tensor, finding: Finding) -> dict[str, Any] | None:
    """The slot as it is after the commit, and the scales that it had at the launch."""
    content = ArenaContent(arena)
    index = next((i for i, key in enumerate(content.keys) if key.name == finding.name), None)
    if index is None:
        return None
    scales = {"scale": repr(sent[0, index].item()), "inv_scale": repr(sent[1, index].item())}
    return {"sent": scales, "fields": [values_near(field, None) for field in content.fields(index)]}


def _slots_where(arena: Arena, mask: torch.Tensor) -> tuple[Slot, ...]:
    return tuple(arena.specs[i].slot for i in mask.nonzero().flatten().tolist())
