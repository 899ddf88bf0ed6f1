"""Checker: compares what the ranks of one manager must hold alike, and acts on differences.

There are two kinds of comparisons. The *sync* is the all-reduce of amaxes that ends each step. Its header compares the
ranks' manifests (set-ups), step counters and scales, for each *arena* (the slots that one group of ranks shares). The
result is the sync's *verdict*. A *check* compares everything else on request: FP8 state, parameters, optimizer state.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from fp8dist.checks.audit import Audits
from fp8dist.checks.axes import Adopted, Axes, Memory, log_equal
from fp8dist.checks.checked import Checked
from fp8dist.checks.coherence import Asked, inside_of, optimizers_in, ties_of
from fp8dist.checks.contents import ArenaContent, on_device, values_near
from fp8dist.checks.headers import localise
from fp8dist.checks.inferred import Inferred
from fp8dist.checks.inventory import Holdings, Inventory, Scope, not_finite_in
from fp8dist.checks.protocol import Compared, check_replicas
from fp8dist.checks.repair import Repairs, mended_texts, repair
from fp8dist.checks.replication import around, is_plain
from fp8dist.checks.report import DivergenceReport, announce, conclude, log_on_one_rank, save_evidence
from fp8dist.checks.standing import HEADER_KINDS, Standing, kinds_of
from fp8dist.common.divergence import COHERENCE, MORE, Finding, compared_text
from fp8dist.common.text import first_few
from fp8dist.errors import ConfigurationError
from fp8dist.modules.model_state import ModelState
from fp8dist.modules.outgrown import limits_of
from fp8dist.modules.precision_control import PrecisionControl
from fp8dist.parallel.ddp import find_ddp
from fp8dist.parallel.torch_internals import fsdp2_modules, unknown
from fp8dist.parallel.wrappers import reshard
from fp8dist.state import overwrites
from fp8dist.state.arena import Arena
from fp8dist.state.arena_sync import ArenaSync, Evidence, Proof
from fp8dist.state.cause import Cause
from fp8dist.state.groups import GroupLike, SyncGroup, world_size
from fp8dist.state.roll_call import failing_by_name
from fp8dist.state.settings import Policy, Start
from fp8dist.state.slots import Slot
from fp8dist.state.watch import Watch
from fp8dist_kernels.arrays import NONFINITE, SATURATED, TAKEN
from fp8dist_kernels.header import WORD_MANIFEST, WORD_STEP

logger = logging.getLogger("fp8dist")


class ReplayFacts(Protocol):
    """The part of ``fp8dist.Replayed`` that an event needs. A Protocol, because this room may not import replays."""

    def fields(self) -> dict[str, Any]:
        """Return the fields of the event's line in events.jsonl, as JSON values."""


@dataclass(frozen=True)
class Event:
    """Something that happened in step ``step``, for the callbacks of ``manager.on_event``.

    ``kind`` is one of these:

    - "nonfinite": ``slots`` had a NaN or Inf amax; their scales did not change.
    - "saturated": weights that FSDP2 gathers in FP8 exceeded the range of their scale; ``slots`` are theirs.
    - "fallback": the modules that cast ``slots`` run in high precision for some steps.
    - "jump": the scales of ``slots`` jumped since the last watched step.
    - "diverged": ranks differ, see ``report``.
    - "replayed": a kept batch was replayed; ``replay`` is an ``fp8dist.Replayed``.

    Callbacks get events at boundaries (the end of a step) and in ``check()``, the same ones on all ranks.

    ``cause``, for "nonfinite" and "jump": the cast that recorded the first bad amax, with its step, rank, microbatch,
    module and role. None: no watch (``fp8dist.watch``) observed it.
    """

    kind: Literal["nonfinite", "saturated", "fallback", "jump", "diverged", "replayed"]
    step: int
    slots: tuple[Slot, ...] = ()
    report: DivergenceReport | None = None
    cause: Cause | None = None
    replay: ReplayFacts | None = None


_NOTHING_TO_COMPARE = (
    "pass the DDP module to attach(), or name the ranks that hold the same values, with prepare(group=…) and amax_sync "
    "or with fp8dist.check(module, group=…); otherwise do not use check() and check_every"
)

_UNEQUAL_START = (
    "the ranks would train other models: load the same weights on all ranks, or broadcast them, before attach(); or "
    "attach(start=None) if these tensors are meant to differ"
)

FAR_BEYOND = 2.0
"""Overflow ratio above which a warning is logged: no ordinary optimizer step enlarges a weight so much."""


class _Outcome(NamedTuple):
    """What one sync proved.

    ``place``: index of the sync in ``ModelState.syncs``. ``evidence``: what this rank sent; None: the arena still holds
    it. ``proves``: False if no collective made the verdict. ``fitted``: see ``Checker._handle_saturated``.
    """

    place: int
    sync: ArenaSync
    proof: Proof
    evidence: Evidence | None
    proves: bool
    fitted: bool


class Checker:
    """The consistency checker of one manager.

    Attributes:
        callbacks: called with each ``Event``.
        amaxes: the watch that knows which cast recorded the first bad amax; None: nothing is watched.
        checks: number of checks so far. ``seconds``: their time on the host.
        on_checked: called when ``last`` has a new value.
        adopted: what is known to be copies along the axes of ``prepare(axes=…)``; None: there are none. ``along``: its
            memory.
        inferred: what may be copies, and nobody has said so; None: there is nothing.
        last: what the newest check of parameters without a difference compared; None: there was no such check.
        checked: the newest step after which such a check compared all parameters, and all were finite
            (``Checked.verified``); None: there was none.
    """

    def __init__(self, state: ModelState, control: PrecisionControl) -> None:
        self.callbacks: list[Callable[[Event], None]] = []
        self.on_checked: list[Callable[[], None]] = []
        self.amaxes: Watch | None = None
        self.checks = 0
        self.seconds = 0.0
        self.last: Checked | None = None
        self.checked: int | None = None
        self.inferred: Inferred | None = None
        self._optimizers: list[weakref.ref[Any]] = []
        self._ties: tuple[tuple[str, ...], ...] = ()
        self._proven: dict[int, int] = {}  # The newest proven step, by index in ``syncs``.
        self._unequal: dict[int, int] = {}  # Commits since then, by index in ``syncs``.
        self.state, self._control = state, control
        syncs, groups = state.syncs, state.groups
        # The default arena is the one of modules that no pattern of ``prepare(groups=…)`` matches: all ranks have it.
        # If patterns match all modules, it is the arena that most ranks share.
        widest = max(range(len(syncs)), key=lambda i: 0 if (group := groups[i]) is None else group.size, default=0)
        self.along: Memory = {}
        self.adopted = None if state.axes is None else Adopted(state.axes, self.along)
        self._default = next((i for i, sync in enumerate(syncs) if not sync.patterns), widest)
        self._last_good: dict[tuple[str, int], int] = {}  # See ``Comparison``.
        self._queued: list[Event] = []
        # A check and a sync each know only their own findings, so each has its own memory of them.
        self.standing, self.repairs = Standing(), Repairs()
        self._standing_of = {id(sync): Standing() for sync in syncs}
        self._repairs_of = {id(sync): Repairs() for sync in syncs}
        self._warned_skipped = self._warned_saturated = self._warned_nonfinite = False

    def watch(self, module: nn.Module) -> None:
        """Set the model as the training loop calls it: its wrappers, such as DDP, show which ranks hold copies of a
        parameter. Keeps a weak reference."""
        self.state.job.called = weakref.ref(module)
        self._optimizers, self._ties = [], ()

    def attached(self, whole: nn.Module, optimizer: Any) -> None:
        """Watch the model that ``attach`` was given, and note which of its names are tied.

        Args:
            optimizer: that of the loop, or a list, with wrappers that may hold master weights; None: unknown. Kept as a
                weak reference.
        """
        self.watch(whole)
        for one in optimizers_in(Asked().also(optimizer).optimizers):
            with contextlib.suppress(TypeError):  # A class with __slots__ may take no weak references.
                self._optimizers.append(weakref.ref(one))
        self._ties = ties_of(whole)

    @property
    def asked(self) -> Asked:
        """What a check compares inside this rank: see ``fp8dist/checks/coherence.py``."""
        return Asked([one for of in self._optimizers if (one := of()) is not None], self._ties)

    @property
    def proven(self) -> int | None:
        """The newest step at which the syncs of all arenas found equal manifests, steps and scales; None: there was
        none."""
        shared = [i for i, sync in enumerate(self.state.syncs) if sync.communicates and sync.every_step]
        return min((self._proven.get(i, 0) for i in shared), default=0) or None

    def forget_steps(self) -> None:
        """Forget which steps were proven and checked. For callers that start to count steps anew."""
        self.last = self.checked = None
        for steps in (self._proven, self._unequal, self._last_good):
            steps.clear()

    # Verdicts of syncs -----------------------------------------------------------------------------

    def act_on_verdicts(self, joins: bool, only_immediate: bool = False, raises: bool = True) -> None:
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
        self._run_callbacks()
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
        ``act_on_verdicts``."""
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
                _log_changes(sync.group, self._standing_of[id(sync)], equal, HEADER_KINDS)
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
        self._queued.append(Event("saturated", step, slots))
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
        self._queued.append(Event("nonfinite", step, slots, cause=cause))
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
        self._queued.append(Event("fallback", step, slots))
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
            _log_changes(sync.group, standing, report, HEADER_KINDS)
            if self.state.settings.check_policy == "repair":
                repairs, mend = self._repairs_of[id(sync)], partial(self._mend_arena, sync, sync.group, report)
                repairs.observe(report, HEADER_KINDS)
                report = repairs.repair(report, self.state.settings.max_repairs, mend, sync.group)
        texts = standing.texts(report) if self.state.settings.check_policy == "warn" else None
        announce(report, sync.group, raises=False, texts=texts, waits=not joins)
        self._queued.append(_diverged(report))
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
                announce(report, sync.group, raises=raises, notify=self.notify_diverged)

    # Comparing -------------------------------------------------------------------------------------

    def check(
        self, done: int, step: int, scope: Scope, policy: Policy, max_repairs: int | None = None
    ) -> DivergenceReport:
        """Compare the FP8 state, and what ``scope`` selects, across the ranks. COLLECTIVE over ``anchor()``. Without
        other ranks, it only looks for values that are not finite.

        Args:
            done: number of optimizer steps that the state is the result of.
            step: number of the step in progress, else ``done``.
            policy: "warn", "raise" or "repair".
            max_repairs: number of consecutive checks that may repair the same tensor. None: as in the settings.

        Raises:
            DivergenceError: on all ranks, if ranks differ and ``policy`` is "raise", or "repair" and the repair failed.
            ConfigurationError: on all ranks, if there is nothing to compare although FP8 is on.
            SyncError: a collective failed or timed out.
        """
        start = time.perf_counter()
        module = self.state.job.whole
        default = self.state.syncs[self._default]
        anchor = self.anchor()
        if anchor is None:
            return check_alone(module, scope, self.standing, policy, step, self.notify_diverged)
        try:
            manifest = str(int(default.arena.words[WORD_MANIFEST])) if default.communicates else ""
            compared = Comparison(
                anchor, [self], module, scope, default.arena.device, step, done, self._last_good, manifest=manifest,
                adopted=self.adopted,
            )  # fmt: skip
            most = self.state.settings.max_repairs if max_repairs is None else max_repairs
            report_dir = self.state.settings.report_dir
            report = run_check(compared, policy, _NOTHING_TO_COMPARE, report_dir, self.repairs, most)
        finally:
            self.checks += 1
            self.seconds += time.perf_counter() - start
        self._run_callbacks()
        self.warn_of_skipped(report, anchor)
        return report

    def compare_start(self, model: nn.Module, whole: nn.Module, policy: Start | None) -> None:
        """Compare the parameters at ``attach``: ranks that start from other weights train other models. COLLECTIVE over
        the ranks that share FP8 state. Does nothing if there are none.

        Compares the parameters that ``check`` compares. Before the first boundary of this process it also compares
        models without any wrapper, and before the first step of a training also buffers. An error while reading is only
        logged: it must not keep a job from training. With ``prepare(axes=…)``, this is also the first comparison along
        the axes, for which ranks that share no FP8 state are compared, too.

        Args:
            model: the prepared model. ``whole``: the model as the training loop calls it, with its wrappers.
            policy: None: make only the first comparison along axes.

        Raises:
            DivergenceError: on all ranks, if ranks differ and ``policy`` is "raise".
        """
        self.inferred = None
        anchor = self.state.groups[self._default]
        if policy is None or anchor is None or not anchor.communicates or not self.state.settings.amax_sync:
            policy, anchor = None, self.anchor() if self.adopted is not None else None
        if anchor is None or not anchor.communicates:
            return
        start, default = time.perf_counter(), self.state.syncs[self._default]

        def build() -> Holdings:
            return self._held_at_start(anchor, model, whole, policy)

        with on_device(default.arena.device), failing_by_name(default.owner, lambda: "attach()", anchor.ranks):
            compared = check_replicas(anchor, build)
            if _may_adopt(compared):
                self._inventory_at_start(anchor, whole, self.adopted)[0].adopt(whole)
                compared = check_replicas(anchor, build)
            found = self._log_comparison(anchor, compared, policy, time.perf_counter() - start)
            report = compared.report
            if policy is not None and self.adopted is None and not report.findings:
                everywhere = "parameter" not in {*report.partial, *report.unverified}
                if not everywhere or compared.holdings.memberships:
                    # Not all parameters are compared over all ranks: list those that an axis could be named for.
                    listing = Adopted(Axes({"all": anchor.process_group}), {}, log_equal)
                    self._inventory_at_start(anchor, whole, listing)[0].adopt(whole)
                    self.inferred = Inferred(anchor, listing.found("all").equal or ())
        conclude(found, policy == "raise", self.notify_diverged)

    def _inventory_at_start(
        self, anchor: SyncGroup, whole: nn.Module, adopted: Adopted | None
    ) -> tuple[Inventory, bool]:
        """Return an empty inventory for ``compare_start``, and True if all plain parameters count as replicated.
        Local."""
        # After the first boundary ranks may have trained on their own, as in local SGD. Axes name what is a copy.
        plain = not self.state.job.boundaries and self.adopted is None and is_plain(whole)
        # Modules with a group of their own, such as experts, may differ between the anchor's ranks: leave them out.
        others = [sync for sync, group in zip(self.state.syncs, self.state.groups) if plain and group is not anchor]
        left_out = {name: None for sync in others for of in sync.patterns for name in (of, f"{of}.*")}
        return Inventory(anchor, plain, left_out, at_start=True, adopted=adopted), plain

    def _held_at_start(self, anchor: SyncGroup, model: nn.Module, whole: nn.Module, policy: Start | None) -> Holdings:
        """Return what this rank brings to ``compare_start``. Local."""
        inventory, plain = self._inventory_at_start(anchor, whole, self.adopted)
        if policy is None:
            inventory.await_axes(whole)
        elif not unknown(whole):  # Else ``attach`` has warned that this torch does not show how FSDP shards the model.
            # A resumed rank may rightly have buffers of its own. That ranks resume from other steps is found by itself.
            buffers = not self.state.job.boundaries and not self.state.job.step
            # Without wrappers, only the prepared model is known to be replicated, not the modules around it.
            inventory.add_module(model if plain else whole, Scope(buffers=buffers))
        return inventory.holdings(self.state.job.step)

    def _log_comparison(
        self, anchor: SyncGroup, compared: Compared, policy: Start | None, seconds: float
    ) -> DivergenceReport:
        """Log what ``compare_start`` has found in so many seconds. Return the differences. COLLECTIVE if ranks
        differ."""
        report = compared.report
        if any(finding.kind == "error" for finding in report.findings):
            if anchor.rank == report.reporting_rank:
                logger.warning("fp8dist: attach() cannot compare the ranks: %s", report.summary())
        elif report.findings:
            report = replace(report, notes=(*report.notes, _UNEQUAL_START))
            save_evidence(report, self.state.settings.report_dir, compared.holdings.evidence)
            log_on_one_rank(report, anchor, policy == "raise")
            return report
        elif policy is not None and anchor.rank == min(anchor.ranks):
            _log_start(report, len(anchor.ranks), seconds)
        return DivergenceReport()

    def warn_of_skipped(self, report: DivergenceReport, anchor: SyncGroup) -> None:
        """Warn once, on one rank, if a check of parameters could compare none. Local."""
        why = report.unverified.get("parameter")
        if why is not None and not self._warned_skipped:
            self._warned_skipped = True
            if anchor.rank == min(anchor.ranks):
                logger.warning("fp8dist: no parameters are compared: %s", why)

    def anchor(self) -> SyncGroup | None:
        """Return the ranks that check together: the default arena's group, else DDP's, else the whole job. None: there
        is one rank. Local."""
        module = self.state.job.whole
        group = self.state.groups[self._default]
        if group is not None:
            return group
        if world_size() == 1:
            return None
        ddp = None if module is None else find_ddp(module)
        return SyncGroup(dist.group.WORLD if ddp is None else ddp.process_group)  # type: ignore[arg-type]

    def queue(self, event: Event) -> None:
        """Queue an event for the callbacks, which run at the end of this boundary. Local."""
        self._queued.append(event)

    def notify(self, event: Event) -> None:
        """Queue an event, and run the callbacks with all queued events. Local."""
        self.queue(event)
        self._run_callbacks()

    def notify_diverged(self, report: DivergenceReport) -> None:
        """Queue a report of a difference as an event, and run the callbacks. Local."""
        self.notify(_diverged(report))

    def _run_callbacks(self) -> None:
        """Run the callbacks with the queued events. Call it between collectives only: a callback may raise, and then no
        other rank may be waiting for this one."""
        events, self._queued = self._queued, []
        for event in events:
            for callback in self.callbacks:
                callback(event)


@dataclass(frozen=True)
class Comparison:
    """What a check compares, and across which ranks.

    Attributes:
        anchor: the ranks that call the check.
        checkers: of the managers whose FP8 state is compared, and whose callbacks are called. Empty without FP8.
        module: the model as the training loop calls it; None: compare FP8 state only.
        scope: what of them is compared.
        device: if it is a GPU, the current CUDA device during the check.
        step: number of the step in progress, or of the last one; 0: unknown.
        done: number of steps that the state is the result of; None: unknown.
        last_good: the newest step at which all ranks were equal, by ``Holdings.scopes``. ``run_check`` adds to it.
        manifest: a text that must be equal on all ranks, such as the digest of the manifest; "": none.
        vouched: True if the caller says that plain tensors are replicated over ``anchor``.
        groups: fqn patterns of tensors that other groups replicate; None as a group: do not compare.
        adopted: what is known to be copies along axes; None: the caller names no axes.
        within: of each checker, what the names of its slots begin with; empty if there is one.
    """

    anchor: SyncGroup
    checkers: Sequence[Checker]
    module: nn.Module | None
    scope: Scope
    device: torch.device
    step: int
    done: int | None
    last_good: dict[tuple[str, int], int]
    manifest: str = ""
    vouched: bool = False
    groups: Mapping[str, GroupLike | None] | None = None
    adopted: Adopted | None = None
    within: Sequence[str] = ()

    def noted(self, report: DivergenceReport) -> DivergenceReport:
        """Return a report with a note on tensors that are compared because they were equal along an axis. Local."""
        note = "" if self.adopted is None else self.adopted.advice(f.name for f in report.findings)
        return replace(report, notes=(*report.notes, note)) if note else report

    def holdings(self) -> Holdings:
        """Return what this rank brings to the check. Local."""
        inventory = Inventory(self.anchor, self.vouched, self.groups, adopted=self.adopted)
        for checker, within in self.named_checkers:
            for sync in checker.state.syncs if self.scope.state else ():
                inventory.add_arena(sync, within)
        if self.module is not None:
            inventory.add_module(self.module, self.scope)
        elif any(checker.state.job.called is not None for checker in self.checkers):
            inventory.add_gone(self.scope)
        if self.module is not None and self.scope.coherence is not None:
            inventory.add_inside(self.module, self.scope.coherence, self.step)
        if self.module is not None and self.scope.compute:
            inventory.add_computations(self.module)
        return inventory.holdings(self.step, self.manifest, self.last_good)

    @property
    def named_checkers(self) -> list[tuple[Checker, str]]:
        """The checkers, each with what the names of its slots begin with."""
        return list(zip(self.checkers, self.within or ("",)))

    @property
    def enabled(self) -> bool:
        """False if all managers of this check are switched off (``enabled=False``)."""
        return not self.checkers or any(checker.state.settings.enabled for checker in self.checkers)

    def notify(self, report: DivergenceReport) -> None:
        """Call the callbacks of the checkers with a report. Local."""
        for checker in self.checkers:
            checker.notify_diverged(report)


def run_check(
    of: Comparison,
    policy: Policy,
    instead: str,
    report_dir: str | None,
    repairs: Repairs,
    max_repairs: int | None,
) -> DivergenceReport:
    """Run a whole check: compare, save evidence, repair, log once, raise. COLLECTIVE over ``of.anchor``.

    Args:
        policy: "warn", "raise" or "repair".
        instead: advice for the error that says that there is nothing to compare.
        report_dir: folder for evidence. None: it is not saved.
        repairs: counts of the repairs of earlier checks.
        max_repairs: number of consecutive checks that may repair the same tensor; None: any number.

    Raises:
        DivergenceError: on all ranks, if ranks differ and ``policy`` is "raise", or "repair" and the repair failed.
        ConfigurationError: on all ranks, if there is nothing to compare although FP8 is on, or if no rank could read
            what it compares.
        SyncError: a collective failed or timed out. The message names the missing ranks.
    """
    anchor, checkers = of.anchor, of.checkers
    standing = checkers[0].standing if checkers else Standing()  # Without a manager, each check starts anew.
    owner = checkers[0].state.syncs[0].owner if checkers and checkers[0].state.syncs else "fp8dist.check"
    with (
        on_device(of.device),
        failing_by_name(owner, lambda: f"the check of step {of.step}" if of.step else "the check", anchor.ranks),
    ):
        found = [(within, f) for checker, within in of.named_checkers for f in checker.known_findings()]
        known = [f if f.name in (f.kind, MORE) else replace(f, name=within + f.name) for within, f in found]
        try:
            compared = check_replicas(anchor, of.holdings, known, everything=policy == "repair")
            if of.module is not None and _may_adopt(compared):
                Inventory(anchor, of.vouched, of.groups, adopted=of.adopted).adopt(of.module)
                compared = check_replicas(anchor, of.holdings, known, everything=policy == "repair")
            report = of.noted(_require_compared(of, compared, instead))
            also = () if of.scope.coherence is None else (COHERENCE,)
            kinds, inside = kinds_of((*report.compared, *also)), compared.holdings.inside
            things = compared.holdings.things | (inside.things if inside is not None else set())
            _log_changes(anchor, standing, report, kinds, compared.nonfinite_rank, things)
            repairs.observe(report, of.scope.kinds)
            agreed = not any(f.kind in ("layout", "error") for f in report.findings)
            if policy == "repair" and of.module is not None and agreed:  # Else not all ranks may be asked to repair.
                # FSDP2 may keep what it has gathered before a repair. Ranks gather together, so all of them reshard,
                # also those that check over another group, and find no difference.
                reshard(fsdp2_modules(around(of.module)))
            if report.diverged:
                save_evidence(report, report_dir, compared.holdings.evidence)
                if policy == "repair":
                    mend = partial(repair, anchor, of.holdings, compared)
                    report = repairs.repair(report, max_repairs, mend, anchor) if agreed else mend()  # Only a note.
                texts = standing.texts(report) if policy == "warn" else None
                log_on_one_rank(report, anchor, policy != "warn", texts)
        finally:  # A repair writes to weights, so their casts are stale.
            for checker in checkers:
                checker.state.job.invalidate_casts()
    conclude(report, policy != "warn", of.notify)
    if of.done is not None and not (report.diverged or report.nonfinite):
        of.last_good.update(dict.fromkeys(compared.holdings.scopes.values(), of.done))
    return report


def _may_adopt(compared: Compared) -> bool:
    """True if the first comparison along an axis is due, and ranks agree on it; the same on all ranks."""
    return bool(compared.holdings.pending) and not any(f.kind in ("layout", "error") for f in compared.report.findings)


def check_alone(
    module: nn.Module | None,
    scope: Scope,
    standing: Standing,
    policy: Policy = "raise",
    step: int = 0,
    notify: Callable[[DivergenceReport], None] | None = None,
) -> DivergenceReport:
    """Return the report of a check without other ranks. It compares tensors of this rank with one another, if ``scope``
    has ``coherence``, and looks for values that are not finite. Logs what is new. Local.

    Raises:
        DivergenceError: tensors do not belong together, and ``policy`` is not "warn".
    """
    alone = DivergenceReport(skipped=("there is one rank, or no process group",), compared_by=scope.also)
    kinds: Collection[str] = ()
    things: Collection[tuple[str, str]] = ()
    if module is not None:
        alone = replace(alone, nonfinite=not_finite_in(module, scope))
        if scope.coherence is not None:
            inside, kinds = inside_of(module, scope.coherence, step), (COHERENCE,)
            things = inside.things
            alone = replace(
                alone,
                findings=inside.findings,
                skipped=(*alone.skipped, *inside.unread),
                compared_by={"inside the rank": inside.size, **scope.also},
            )
    _log_changes(None, standing, alone, kinds, things=things)
    texts = standing.texts(alone) if policy == "warn" else None
    announce(alone, None, raises=policy != "warn", notify=notify, texts=texts)
    return alone


def _require_compared(of: Comparison, compared: Compared, instead: str) -> DivergenceReport:
    """Return the report of ``compared``.

    Raises:
        ConfigurationError: on all ranks, if no rank could read what it compares (if only some could not, ranks differ,
            and the report says so); or if FP8 state was asked for and there was nothing to compare. Not if FP8 is
            switched off: that must not end a job that checks its FP8 state.
    """
    report = compared.report
    failures = {rank: f.detail for f in report.findings if f.kind == "error" for rank in f.ranks}
    if failures.keys() >= set(of.anchor.ranks):
        texts = list(dict.fromkeys(failures.values()))
        raise ConfigurationError(f"check() could not read what it compares, on any rank: {'; '.join(texts[:3])}")
    inside = of.scope.coherence is not None and of.scope.coherence.suffices
    if of.scope.state and compared.nothing and of.enabled and not inside:
        why = "; ".join(report.skipped) or "it has no parameters"
        raise ConfigurationError(
            "check() has nothing to compare, because nothing here is known to be the same on several ranks "
            f"({why}): {instead}"
        )
    return report


def _log_start(report: DivergenceReport, ranks: int, seconds: float) -> None:
    """Log what ``compare_start`` compared without a difference. ``ranks``: their number."""
    compared, left_out = compared_text(report.compared, report.compared_bytes), "; ".join(report.skipped)
    if not compared:
        why = left_out or "the model has no parameters"
        logger.info("fp8dist: attach() had nothing to compare over %d ranks: %s", ranks, why)
        return
    logger.info("fp8dist: attach() compared %s over %d ranks in %.1f ms: no difference", compared, ranks, 1e3 * seconds)
    logger.debug("fp8dist: attach() did not compare: %s", left_out or "nothing was left out")


def _log_changes(
    group: SyncGroup | None,
    standing: Standing,
    report: DivergenceReport,
    kinds: Collection[str],
    nonfinite_rank: int | None = None,
    things: Collection[tuple[str, str]] | None = None,
) -> None:
    """Log what changed since the last report: earlier findings that are gone, and new values that are not finite.
    Local.

    Args:
        standing: the findings of earlier reports.
        kinds: of the findings that ``report`` would have if they were not gone.
        nonfinite_rank: the rank that logs values that are not finite; None: there is one rank, or no such value.
        things: see ``Standing.gone``.
    """
    rank = group.rank if group is not None else 0
    new = standing.not_finite(report, nonfinite_rank)
    for text in (*standing.gone(report, kinds, rank, things), *(new if nonfinite_rank in (None, rank) else ())):
        logger.warning("%s", text)


def _not_localised(sync: ArenaSync, step: int, differs: Sequence[str]) -> DivergenceReport:
    """Return the report of a difference inside a Join context: it names no slot and no odd rank, because finding them
    is collective, and ranks without data take no part."""
    ranks = tuple(sync.group.ranks) if sync.group is not None else ()
    detail = "not localised inside a Join context"
    return DivergenceReport(tuple([Finding(step, kind, kind, ranks, None, detail=detail) for kind in differs]))


def _diverged(report: DivergenceReport) -> Event:
    return Event("diverged", max(f.step for f in report.findings), report=report)


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
