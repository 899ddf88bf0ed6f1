"""Verdicts: what the syncs of one manager prove of its ranks, and what follows from it.

The *sync* is the all-reduce of amaxes that ends each step. Its header compares the ranks' manifests (set-ups), step
counters and scales, for each *arena* (the slots that one group of ranks shares). The result is the sync's *verdict*.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from fp8dist.checks.audit import Audits
from fp8dist.checks.contents import ArenaContent, on_device, values_near
from fp8dist.checks.events import Event, EventQueue
from fp8dist.checks.headers import localise
from fp8dist.checks.inventory import Holdings, Inventory
from fp8dist.checks.protocol import check_replicas
from fp8dist.checks.repair import Repairs, mended_texts, repair
from fp8dist.checks.report import DivergenceReport, announce, save_evidence
from fp8dist.checks.standing import HEADER_KINDS, Standing, log_changes
from fp8dist.common.divergence import Finding
from fp8dist.common.text import first_few
from fp8dist.modules.model_state import ModelState
from fp8dist.modules.outgrown import limits_of
from fp8dist.modules.precision_control import PrecisionControl
from fp8dist.state import overwrites
from fp8dist.state.arena import Arena
from fp8dist.state.arena_sync import ArenaSync, Evidence, Proof
from fp8dist.state.cause import Cause
from fp8dist.state.groups import SyncGroup
from fp8dist.state.roll_call import failing_by_name
from fp8dist.state.slots import Slot
from fp8dist.state.watch import Watch
from fp8dist_kernels.arrays import NONFINITE, SATURATED, TAKEN
from fp8dist_kernels.header import WORD_STEP

logger = logging.getLogger("fp8dist")

FAR_BEYOND = 2.0
"""Overflow ratio above which a warning is logged: no ordinary optimizer step enlarges a weight so much."""


class _Outcome(NamedTuple):
    """What one sync proved.

    ``place``: index of the sync in ``ModelState.syncs``. ``evidence``: what this rank sent; None: the arena still holds
    it. ``proves``: False if no collective made the verdict. ``fitted``: see ``Verdicts._handle_saturated``.
    """

    place: int
    sync: ArenaSync
    proof: Proof
    evidence: Evidence | None
    proves: bool
    fitted: bool


class Verdicts:
    """Reads the verdicts of one manager's syncs at boundaries, and acts on them: counts proven steps, queues events,
    switches modules to high precision, finds the ranks and slots behind a difference, repairs.

    ``amaxes``: the watch that knows which cast recorded the first bad amax; None: nothing is watched.
    """

    def __init__(self, state: ModelState, control: PrecisionControl, events: EventQueue) -> None:
        self.amaxes: Watch | None = None
        self.state, self._control, self.events = state, control, events
        self._proven: dict[int, int] = {}  # The newest proven step, by index in ``syncs``.
        self._unequal: dict[int, int] = {}  # Commits since then, by index in ``syncs``.
        # A check and a sync each know only their own findings, so each has its own memory of them.
        self._standing_of = {id(sync): Standing() for sync in state.syncs}
        self._repairs_of = {id(sync): Repairs() for sync in state.syncs}
        self._warned_saturated = self._warned_nonfinite = False

    @property
    def proven(self) -> int | None:
        """The newest step at which the syncs of all arenas found equal manifests, steps and scales; None: there was
        none."""
        shared = [i for i, sync in enumerate(self.state.syncs) if sync.communicates and sync.every_step]
        return min((self._proven.get(i, 0) for i in shared), default=0) or None

    def forget_steps(self) -> None:
        """Forget which steps were proven. For callers that start to count steps anew."""
        self._proven.clear()
        self._unequal.clear()

    def act(self, joins: bool, only_immediate: bool = False, raises: bool = True) -> None:
        """Read the verdicts of the last syncs and act on them. COLLECTIVE when a sync found a difference.

        Call only at boundaries, which all ranks reach together.

        Args:
            joins: True inside a Join context. Ranks without data take no part there, so a difference is reported
                without a search for the ranks and slots that differ.
            only_immediate: skip verdicts that are still on a GPU, and recipes that do not update in the same step.
            raises: False: only log and notify, whatever ``check_policy`` is.

        Raises:
            DivergenceError: on all ranks of the group, if ranks differ, ``raises``, and ``check_policy`` is not "warn".
        """
        outcomes = self._read_verdicts(only_immediate)
        differing = self._handle(outcomes, joins) if outcomes else []
        reports = [self._conclude(sync, report, joins) for sync, report in differing]
        self.events.run()
        left = [report for report in reports if report.diverged]
        if left and raises and self.state.settings.check_policy != "warn":
            notes = dict.fromkeys(note for report in left for note in report.notes)
            DivergenceReport(tuple(f for report in left for f in report.findings), notes=(*notes,)).raise_if_diverged()

    def known_findings(self) -> list[Finding]:
        """Return the differences that the last syncs found, so that a check reports them too. COLLECTIVE when a sync
        found a difference."""
        differing = self._handle(self._read_verdicts(), joins=False)
        return [finding for _, report in differing for finding in report.findings]

    def _read_verdicts(self, only_immediate: bool = False) -> list[_Outcome]:
        """Return what the last syncs proved, and clear their verdicts. Local. ``only_immediate``: see
        ``act``."""
        outcomes = []
        for place, sync in enumerate(self.state.syncs):
            verdict = sync.verdict
            if verdict is None:
                continue
            if only_immediate and not (verdict.immediate and sync.arena.recipe.update == "same_step"):
                continue
            proof, evidence = sync.read_verdict()
            outcomes.append(_Outcome(place, sync, proof, evidence, verdict.proves, verdict.fitted))
        return outcomes

    def _handle(self, outcomes: Sequence[_Outcome], joins: bool) -> list[tuple[ArenaSync, DivergenceReport]]:
        """Handle what syncs proved: count proven steps, queue events, switch slots to high precision, and localise
        differences.

        COLLECTIVE over the group of each sync that found a difference, unless ``joins``.

        Returns:
            The syncs that found a difference, each with its report.
        """
        differing: list[tuple[ArenaSync, DivergenceReport]] = []
        before = self.state.job.step
        for outcome in outcomes:
            sync, proof = outcome.sync, outcome.proof
            self.state.job.step = max(self.state.job.step, before + proof.replays)
            if outcome.proves and not proof.differs:
                self._proven[outcome.place] = before + proof.replays
                self._unequal[outcome.place] = 0
                equal = DivergenceReport()
                # What an earlier header reported, and this one does not, is over.
                log_changes(sync.group, self._standing_of[id(sync)], equal, HEADER_KINDS)
                self._repairs_of[id(sync)].observe(equal, HEADER_KINDS)
            if not (proof.differs or proof.nonfinite or proof.saturated or proof.tripped):
                continue
            evidence = outcome.evidence or sync.evidence()
            step = int(evidence.words[WORD_STEP])
            if proof.saturated:
                self._handle_saturated(sync, step, evidence, outcome.fitted)
            if proof.nonfinite:
                self._handle_nonfinite(sync, step, _slots_where(sync.arena, evidence.flags[NONFINITE]))
            if proof.tripped:
                self._fall_back(sync, step)
            if proof.differs and joins:
                differing.append((sync, _not_localised(sync, step, proof.differs)))
            elif proof.differs:
                good = self._last_good_before(outcome.place, step, proof.replays)
                report = self._localise(sync, evidence, proof.differs, good)
                if report.diverged:  # It was not reported before.
                    differing.append((sync, report))
        return differing

    def _handle_saturated(self, sync: ArenaSync, step: int, evidence: Evidence, fitted: bool) -> None:
        """Queue a "saturated" event for weights that FSDP2 gathered in FP8. One rank warns once if a weight exceeds its
        scale by far.

        Args:
            fitted: True if the step cast each weight that had outgrown its slot's scale with a fitting scale instead.
                Then only weights just beyond their scale, which kept it, were cut off.
        """
        arena = sync.arena
        places = arena.shard_slots[evidence.flags[SATURATED][arena.shard_slots]]
        used = arena.amax * evidence.scales[0] / arena.fp8_max  # Above 1: values were cut off.
        if fitted:
            limit, _ = limits_of(arena.recipe)
            places = places[used[places] <= (0 if limit is None else limit)]
        slots = tuple(arena.specs[place].slot for place in places.tolist())
        if not slots:
            return
        self.events.queue(Event("saturated", step, slots))
        if not self._warned_saturated and bool((used[places] > FAR_BEYOND).any()):
            self._warned_saturated = True
            if sync.logs:
                logger.warning(
                    "fp8dist: step %d: %d weight(s) were cast to FP8 far beyond their scale, '%s' first: either other "
                    "code has written to them in a way that torch does not report (.data, to_local()), and should "
                    "call manager.refresh_weights() after such writes, or one optimizer step has enlarged them so much",
                    step,
                    len(slots),
                    slots[0].fqn,
                )

    def _handle_nonfinite(self, sync: ArenaSync, step: int, slots: tuple[Slot, ...]) -> None:
        """Queue a "nonfinite" event. One rank warns once, because the user may have forgotten ``attach(scaler=…)``."""
        cause = self.cause_of_nonfinite()
        self.events.queue(Event("nonfinite", step, slots, cause=cause))
        if not self._warned_nonfinite and sync.logs:
            self._warned_nonfinite = True
            logger.warning(
                "fp8dist: step %d: the amaxes of %s were not finite%s: their scales stay as they are. If a loss scaler "
                "skips such steps, attach(scaler=…) keeps them out of the FP8 state",
                step,
                first_few(slots),
                "" if cause is None else f", first in {cause}",
            )

    def cause_of_nonfinite(self) -> Cause | None:
        """Return which cast recorded the first non-finite amax of the step that ended last. None: no watch observed it.
        Local."""
        return None if self.amaxes is None else self.amaxes.nonfinite(self.state.job.step)[0]

    def _fall_back(self, sync: ArenaSync, step: int) -> None:
        """Switch the modules of slots that triggered a fallback to high precision, and queue an event. Local: the sync
        gave all ranks the same slots."""
        slots = _slots_where(sync.arena, sync.take_tripped())
        modules = self._control.fall_back(slots)
        if not modules:
            return
        self.events.queue(Event("fallback", step, slots))
        assert self.state.settings.fallback is not None
        if sync.logs:
            logger.warning(
                "fp8dist: step %d: %d module(s) go to high precision for %d steps, '%s' first (%s)",
                step,
                len(modules),
                self.state.settings.fallback.steps,
                modules[0],
                ", ".join(map(str, slots[:4])),
            )

    def _last_good_before(self, place: int, step: int, replays: int) -> int | None:
        """Return the last step after which the state was equal on all ranks, for a sync that found a difference at
        ``step``; None: no sync since ``attach``, or since a load, has found it equal. ``replays``: of its poll."""
        if place not in self._unequal:
            return None
        self._unequal[place] += max(1, replays)
        # A sync compares the state before its update: that after the step before.
        return max(0, step - 1 - self._unequal[place])  # A step that a loss scaler skips does not count.

    def _localise(
        self, sync: ArenaSync, evidence: Evidence, differs: tuple[str, ...], good: int | None
    ) -> DivergenceReport:
        """Find the ranks and slots behind a failed header, and make the ranks' scales and steps equal again. COLLECTIVE
        over the sync's group. ``good``: see ``localise``."""
        with on_device(sync.arena.device):
            found = localise(sync, evidence, differs, good)
        arena, sent = sync.arena, evidence.scales
        save_evidence(
            found.report, self.state.settings.report_dir, lambda finding: _slot_evidence(arena, sent, finding)
        )
        # The commit has made the scales of slots that ran equal. The step, and scales of slots that did not run, are
        # made equal here. Otherwise every later sync would report the same differences.
        arena.step.fill_(found.step)
        if found.reference is not None:
            scales, saturated = found.reference
            overwrites.adopt_untaken_scales(arena, scales, evidence.flags[TAKEN])
            # Ranks with a damaged scale judged saturation by it, so their counters are wrong, too.
            arena.counters[SATURATED] = saturated
            self.state.job.invalidate_casts()
        return found.report

    def _conclude(self, sync: ArenaSync, report: DivergenceReport, joins: bool) -> DivergenceReport:
        """Finish the report of a sync that found a difference: repair if the policy is "repair", log on one rank, and
        queue an event. COLLECTIVE unless ``joins``.

        Returns:
            The report, with what was repaired and what remains.
        """
        assert sync.group is not None
        standing = self._standing_of[id(sync)]
        if not joins:
            log_changes(sync.group, standing, report, HEADER_KINDS)
            if self.state.settings.check_policy == "repair":
                repairs, mend = self._repairs_of[id(sync)], partial(self._mend_arena, sync, sync.group, report)
                repairs.observe(report, HEADER_KINDS)
                report = repairs.repair(report, self.state.settings.max_repairs, mend, sync.group)
        texts = standing.texts(report) if self.state.settings.check_policy == "warn" else None
        announce(report, sync.group, raises=False, texts=texts, waits=not joins)
        self.events.queue_diverged(report)
        return report

    def _mend_arena(self, sync: ArenaSync, group: SyncGroup, report: DivergenceReport) -> DivergenceReport:
        """Compare the whole state of the arena, whose scales are equal by now, and repair what differs. COLLECTIVE.

        Returns:
            ``report``, if a copy cannot repair all of it. Else the same findings as repaired, or what differs after the
            repair.
        """
        if any(f.kind != "scale" or f.reference_rank is None for f in report.findings):
            return report

        def build() -> Holdings:
            inventory = Inventory(group)
            inventory.add_arena(sync)
            return inventory.holdings(int(sync.arena.step))

        compared = check_replicas(group, build, everything=True)
        after = repair(group, build, compared) if compared.report.diverged else compared.report
        if after.diverged:
            return after
        return replace(after, findings=report.findings, repaired=mended_texts(report) + after.repaired)

    def settle_audits(self, audits: Audits) -> None:
        """If this step is audited, repeat casts and products of other ranks, and log results that were wrong.
        COLLECTIVE over the group of each audited arena.

        Raises:
            DivergenceError: on all ranks, unless the policy is "warn".
        """
        for place in audits.due:
            sync = self.state.syncs[place]
            ranks = sync.group.ranks if sync.group is not None else ()
            with failing_by_name(sync.owner, lambda: f"the audit of step {self.state.job.step + 1}", ranks):
                report = audits.settle(place, sync)
            if report.diverged:
                save_evidence(report, self.state.settings.report_dir, lambda finding: None)
                raises = self.state.settings.check_policy != "warn"
                announce(report, sync.group, raises=raises, notify=self.events.notify_diverged)


def _not_localised(sync: ArenaSync, step: int, differs: Sequence[str]) -> DivergenceReport:
    """Return the report of a difference inside a Join context: it names no slot and no odd rank, because finding them
    is collective, and ranks without data take no part."""
    ranks = tuple(sync.group.ranks) if sync.group is not None else ()
    detail = "not localised inside a Join context"
    return DivergenceReport(tuple([Finding(step, kind, kind, ranks, None, detail=detail) for kind in differs]))


def _slot_evidence(arena: Arena, sent: torch.Tensor, finding: Finding) -> dict[str, Any] | None:
    """Return, as JSON values, the finding's slot as it is now, after the commit, and the scales that it had when this
    rank sent them. None: the finding is about no slot of this arena.

    ``sent``: float32[2, n], scale and inv_scale of each slot.
    """
    content = ArenaContent(arena)
    index = next((i for i, key in enumerate(content.keys) if key.name == finding.name), None)
    if index is None:
        return None
    scales = {"scale": repr(sent[0, index].item()), "inv_scale": repr(sent[1, index].item())}
    return {"sent": scales, "fields": [values_near(field, None) for field in content.fields(index)]}


def _slots_where(arena: Arena, mask: torch.Tensor) -> tuple[Slot, ...]:
    """Return the slots where ``mask``, bool[n], is True."""
    return tuple(arena.specs[i].slot for i in mask.nonzero().flatten().tolist())
