"""StepCycle: the boundaries, launches and commits of one manager."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from fp8dist.checks.audit import Audits
from fp8dist.checks.checked import Checked
from fp8dist.checks.checker import Checker, Event
from fp8dist.checks.inventory import Scope
from fp8dist.checks.report import DivergenceReport
from fp8dist.errors import ConfigurationError, SyncError
from fp8dist.job.agreement import agree, require_groups
from fp8dist.job.joining import take_furthest
from fp8dist.job.order import require_order
from fp8dist.job.step_watch import StepWatch
from fp8dist.job.weight_scales import derive_weight_scales
from fp8dist.modules.job_state import Activity, JobState
from fp8dist.modules.linear_slots import SITES, LinearSlots
from fp8dist.modules.precision_control import PrecisionControl
from fp8dist.parallel.fsdp2 import ShardedWeights
from fp8dist.parallel.sharded_weight import ShardedWeight
from fp8dist.state.accord import meet
from fp8dist.state.arena_sync import ArenaSync, Phase
from fp8dist.state.groups import SyncGroup
from fp8dist.state.manifest import WeightDescription
from fp8dist.state.microbatches import Microbatches
from fp8dist.state.precision import Precisions
from fp8dist.state.recipe import Gemm
from fp8dist.state.roll_call import failing_by_name, leave_word
from fp8dist.state.settings import Policy, Settings, Start
from fp8dist.state.slots import Slot
from fp8dist.state.waits import Waits
from fp8dist.state.watch import Watch
from fp8dist_kernels.formats import Role
from fp8dist_kernels.graphs import capturing, compiled_any
from fp8dist_kernels.taps import tap_on

__all__ = ["StepCycle"]

logger = logging.getLogger("fp8dist")


class StepCycle:
    """Drives all arenas of one manager through their steps.

    Methods that communicate handle the arenas in one order, which is the same on all ranks, also for ranks of several
    groups. They are called at points of the program that all ranks reach.

    ``job``: the manager's current state, which this object owns.
    """

    def __init__(
        self,
        settings: Settings,
        job: JobState,
        precisions: Precisions,
        syncs: Sequence[ArenaSync],
        groups: Sequence[SyncGroup | None],
    ) -> None:
        require_groups(settings, groups)
        self.precisions = precisions
        self.settings = settings
        self.job = job
        pairs = sorted(zip(syncs, groups), key=lambda pair: tuple(sorted(pair[1].ranks)) if pair[1] else ())
        self.syncs = tuple(sync for sync, _ in pairs)
        self.groups = tuple(group for _, group in pairs)
        self._init_transient()

    def _init_transient(self) -> None:
        """Job-specific state. Not copied or pickled."""
        self.sharded: ShardedWeights | None = None
        self.steps: StepWatch | None = None  # Set by the manager, which knows the model.
        self.watch: Watch | None = None
        self.audits: Audits | None = None
        self.waits = Waits()
        for sync in self.syncs:
            sync.waits = self.waits
        self.control = PrecisionControl(self.precisions, self.settings, self.job, self.syncs, self.groups)
        self.checker = Checker(self.syncs, self.groups, self.settings, self.job, self.control)
        self.listeners: list[Callable[[bool], None]] = []  # Called as a training step ends; False: it was skipped.
        self._failure: SyncError | None = None  # Of a commit during a compilation; the next boundary raises it.
        self._renews = False  # An attached optimizer has stepped: gathered weights need new scales.
        self._since = self.job.boundaries  # Boundaries passed before attach().
        self._checked = 0  # Boundaries passed between attach() and the last check that was due.
        self._replays = 0
        self._polled: int | None = None  # Boundaries at the last poll without a graph.
        self._said_polled = False
        self.job.warned_unsynced = False

    def __getstate__(self) -> dict[str, Any]:
        kept = ("precisions", "settings", "job", "syncs", "groups")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._init_transient()

    def group_of(self, sync: ArenaSync) -> SyncGroup | None:
        """Return the group that an arena was prepared for, attached or not."""
        return self.groups[self.syncs.index(sync)]

    # The phase -------------------------------------------------------------------------------------

    @property
    def activities(self) -> tuple[Activity, ...]:
        """Activities in progress besides plain training."""
        found = (
            (Activity.CAPTURING, self.captures),
            (Activity.REPLAYING, self.job.replaying),
            (Activity.CALIBRATING, self.job.calibrating),
            (Activity.JOINED, self.job.joined),
            (Activity.IN_STEP, any(sync.phase is Phase.IN_FLIGHT for sync in self.syncs)),
        )
        return tuple([activity for activity, under_way in found if under_way])

    @property
    def captures(self) -> bool:
        """True if this step is being captured into a CUDA graph."""
        return any(capturing(sync.arena.device) for sync in self.syncs)

    @property
    def speaks(self) -> bool:
        """True on the one rank that logs for all ranks."""
        return self.control.speaks

    def require(self, call: str, switched_off: bool = False) -> None:
        """Raise ConfigurationError if the current phase refuses a call (``job/order.py``). Local.

        Args:
            switched_off: True if the call needs ``attach`` even with FP8 switched off.
        """
        shared = self.job.shared and (self.job.enabled or switched_off)
        require_order(call, self.job.tie, self.activities, shared)

    # Agreement -----------------------------------------------------------------------------------

    def agree(
        self,
        boundary: str,
        weights: Mapping[Slot, WeightDescription],
        timeout: timedelta,
        compute: bool,
        start: Start | None,
    ) -> None:
        """Agree with the other ranks on everything that must be equal. COLLECTIVE, through the store.

        Args:
            weights: by weight slot, the description of the whole weight: the same on all ranks, however it is sharded.
            compute: True if the ranks compare known answers next.
            start: None: the ranks do not compare what they start with.
        """
        watch = None if self.watch is None else self.watch.describe()
        also = {"boundary": boundary, "watch": watch, "start": start, **({"compute": True} if compute else {})}
        self.settle()  # In the communicator that the last attach() made.
        self._drop_communicators()
        manifests = agree(self.settings, also, self.syncs, self.groups, weights, timeout)
        for place, (sync, group) in enumerate(zip(self.syncs, self.groups)):
            place = sum(of is group for of in self.groups[:place])  # Ranks may differ in their other groups.
            sync.share(group if self.settings.amax_sync and self.settings.enabled else None, place)
        self.control.tie(manifests)
        self._since, self._checked = self.job.boundaries, 0
        self._count_from_state()

    def untie(self) -> None:
        """Undo ``agree``: this rank shares no state until it agrees again. Keeps the state. Local."""
        for sync in self.syncs:
            sync.share(None)
            sync.watch(False)
        self._drop_communicators()
        self.control.untie()
        self._renews = False
        self.audits = None
        self.job.detach()
        if self.steps is not None:
            self.steps.detached()
        self.job.invalidate_casts()

    def _drop_communicators(self) -> None:
        captured = self.job.captured or any(sync.graphed for sync in self.syncs)
        for group in self.groups:
            if group is not None:
                group.drop_own(captured)

    def derive_weight_scales(
        self, weights: Iterable[tuple[ArenaSync, Slot, Tensor]], which: Literal["cold", "all"]
    ) -> None:
        """Set weight scales from the weights as they are now; see ``derive_weight_scales``. COLLECTIVE."""
        derive_weight_scales([sync for sync in self.syncs if self._scales_weights(sync)], weights, which)

    def fit_weight_scales(self, weights: Sequence[ShardedWeight]) -> None:
        """Derive the scales of sharded weights that are cold or no longer fit. COLLECTIVE over their arenas only: the
        ranks of other arenas may have no reason to call it."""
        parts = [part for weight in weights for part in weight.parts()]
        # Not those of the parts: with fewer experts than ranks, some ranks have none.
        concerned = {id(weight.slots.weight_sync) for weight in weights}
        syncs = [sync for sync in self.syncs if id(sync) in concerned and self._scales_weights(sync)]
        derive_weight_scales(syncs, parts, "unfit")

    def _scales_weights(self, sync: ArenaSync) -> bool:
        """True if weights are cast with their slots' scales, which are delayed or shared by all shards of a weight."""
        recipe = sync.arena.recipe
        return recipe.delayed or (self.sharded is not None and recipe.by == "tensor")

    # The step ------------------------------------------------------------------------------------

    def boundary(self, hold: Tensor | None = None, calibrated: bool = False) -> None:
        """End a step. COLLECTIVE: one all-reduce per arena, except for syncs that were launched early.

        Args:
            hold: non-zero if the loss scaler skips this step, which then does not count. Read on the device.
            calibrated: True at the end of a calibration, which is not a training step.
        """
        in_graph = self._begin_boundary()
        if not in_graph:
            self._act(calibrated)
        if self.settings.enabled:
            self._launch(hold, calibrated)
            self._look(calibrated, in_graph)
            self._commit(hold, in_graph)
            self._end_boundary(calibrated, in_graph)
            if not (calibrated or in_graph or self.job.joined):
                self._tell_listeners(True)

    def _tell_listeners(self, took_place: bool) -> None:
        for listener in self.listeners:
            listener(took_place)

    def _begin_boundary(self) -> bool:
        """Refuse a step out of order, and commit the last step. Return True if a CUDA graph captures this step."""
        self.require("a step")
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        in_graph = self.captures
        if in_graph and (self.sharded is not None or self.job.joined):
            raise ConfigurationError("a step with fp8_all_gather, or inside Join, cannot be captured into a CUDA graph")
        self.job.captured |= in_graph
        self.job.invalidate_casts()
        if self.settings.enabled:
            self.settle()
        return in_graph

    def _act(self, calibrated: bool) -> None:
        """Act on the verdicts of the last syncs, and run a check if one is due. COLLECTIVE in these cases."""
        passed = self.job.boundaries
        self.job.boundaries += 1  # First, because the rest may raise, and a loop may catch the error and go on.
        if self.settings.enabled:
            if not calibrated:
                self.control.end_step()
            self.checker.act_on_verdicts(self.job.joined)
        if not (calibrated or self.job.joined):
            self._audit()
        self._check_if_due(passed, in_step=True)

    def _audit(self) -> None:
        """Let other ranks repeat what this step has computed, if it is audited. COLLECTIVE then."""
        if self.audits is None:
            return
        for place in self.audits.due:
            sync = self.syncs[place]
            ranks = sync.group.ranks if sync.group is not None else ()
            with failing_by_name(sync.owner, lambda: f"the audit of step {self.job.step + 1}", ranks):
                report = self.audits.settle(place, sync)
            self.checker.conclude_audit(report, sync.group)

    def audit(self, modules: Sequence[LinearSlots]) -> None:
        """Number the sites of all modules, and begin audits, if the settings ask for them. Local.

        Args:
            modules: in the order of their fqns.
        """
        if not (self.settings.enabled and self.settings.audit_every and modules):
            return
        sites: dict[int, list[tuple[str, int]]] = {}
        for number, slots in enumerate(modules):
            slots.caster.site = number * len(SITES)
            sites.setdefault(self.syncs.index(slots.sync), []).append((slots.fqn, slots.caster.site))
        weights = SITES.index(Role.WEIGHT)
        calls = {slots.caster.site + weights: slots.caster.calls_per_weight for slots in modules}
        self.audits = Audits(sites, self.settings.audit_every, self.settings.audit_bytes, calls)
        self.job.tap = tap_on(modules[0].sync.arena.device, self.audits.hear)
        self._audit_next()

    def _audit_next(self) -> None:
        """Choose what the next step takes down for an audit. Steps are counted on the host since ``attach``."""
        if self.audits is not None:
            due = (self.job.boundaries - self._since + 1) % self.settings.audit_every == 0
            self.audits.begin(self.job.step + 1, due)

    def _launch(self, hold: Tensor | None, calibrated: bool) -> None:
        """Launch the sync of each arena, unless it was launched early. In a Join context, backwards launch syncs."""
        for sync in self.syncs:
            if not sync.every_step:
                sync.step_alone(hold)
            elif not self.job.joined and (calibrated or sync.phase is Phase.IDLE):
                sync.launch(hold, self.job.scaled)

    def _look(self, calibrated: bool, in_graph: bool) -> None:
        """Collect the watch's statistics, if this step is measured. COLLECTIVE then."""
        if not self.job.measuring:
            return
        if calibrated:
            self._measure(True)  # Restart, because a calibration is not the step to be measured.
        elif not (self.job.joined or in_graph):
            assert self.watch is not None
            step, synced = self.job.step + 1, any(sync.every_step for sync in self.syncs)
            waited = self.waits.mean() if synced and self.waits.averaged else math.nan
            jumps = self.watch.collect(step, self.syncs, waited, self._microbatches_known())
            if jumps:
                cause = self.watch.outlier(jumps, self.syncs)
                self.checker.tell(Event("jump", step, tuple(jump.slot for jump in jumps), cause=cause))
            self._tell_nonfinite(step)

    def _tell_nonfinite(self, step: int) -> None:
        """Send an event for non-finite amaxes of recipes without a sync, which would find them. Local."""
        assert self.watch is not None
        cause, slots = self.watch.nonfinite(step)
        unsynced = {slot for sync in self.syncs if not sync.every_step for slot in sync.arena.index}
        bad = tuple(slot for slot in slots if slot in unsynced)
        if bad:
            self.checker.tell(Event("nonfinite", step, bad, cause=cause))

    def found_nonfinite(self) -> bool:
        """True if the sync of the step that has just ended saw a non-finite amax, and no event has told so yet. Local.
        Commits that sync now, and waits for the device."""
        self.settle()
        return any(sync.verdict is not None and sync.verdict.read().nonfinite for sync in self.syncs)

    def _microbatches_known(self) -> bool:
        """True if this rank knows which microbatch recorded what: every FP8Linear that recorded an amax did so in
        Python, and not in a graph of torch.compile or CUDA."""
        noted = self.job.microbatches
        if noted is None or not noted.known:
            return False
        inputs = (slot.fqn for sync in self.syncs for slot in sync.recorded() if slot.role == Role.INPUT)
        return all(fqn in noted.called or fqn not in self.precisions.by_fqn for fqn in inputs)

    def _commit(self, hold: Tensor | None, in_graph: bool) -> None:
        """Make launched syncs due. Commit them now if ``update`` is "same_step", or if no reader can commit. Local."""
        for sync in self.syncs:
            sync.pass_boundary(hold, self.job.scaled)
        at_once = in_graph or (self._unseen_forwards() and not self.job.by_optimizer)
        for sync in self.syncs:
            if at_once or sync.arena.recipe.update == "same_step":
                sync.settle()

    def _end_boundary(self, calibrated: bool, in_graph: bool) -> None:
        """Count the step, and act on its immediate verdicts. COLLECTIVE if they show a difference."""
        if calibrated:
            self.waits.drop()
        elif not in_graph:
            self.waits.end_step()
            self.job.step += 1
            if self.watch is not None:
                self.watch.resume_after = None
            self._measure_next()
            self._audit_next()
        if not in_graph:
            self.checker.act_on_verdicts(self.job.joined, only_immediate=True)

    def settle(self) -> None:
        """Commit pending syncs. Local."""
        for sync in self.syncs:
            sync.settle()

    def set_precision(self, pattern: str, gemms: tuple[Gemm, ...], to_high: bool, steps: int | None) -> list[str]:
        """See ``StateManager.set_precision``. Local: call it on all ranks alike."""
        self.settle()
        return self.control.change(pattern, gemms, to_high, steps)

    def _count_from_state(self, step: int | None = None) -> None:
        if step is not None:
            self.job.step = step
        elif self.watch is not None and self.watch.resume_after is not None:
            self.job.step = self.watch.resume_after
        else:
            self.job.step = max((int(sync.arena.step) for sync in self.syncs), default=0)
        self.job.began = self.job.step
        self.checker.forget_steps()
        self.waits.averaged = self.watch is not None and self.watch.ranks
        if self.watch is not None:
            self.watch.start(self.job.step)
        self._measure_next()
        self._audit_next()  # After Join, ranks have counted other numbers of steps.

    def _measure_next(self) -> None:
        """Set whether the casts of the next step are measured. Compiled forwards are compiled for both cases."""
        due = self.settings.enabled and self.watch is not None and self.watch.is_due(self.job.step + 1)
        if due or self.job.measuring:
            self._measure(due)

    def _measure(self, on: bool) -> None:
        self.job.measuring = on
        self.job.microbatches = Microbatches(self.syncs) if on else None
        for sync in self.syncs:
            sync.watch(on)

    def _unseen_forwards(self) -> bool:
        """True if the next forward may bypass Python (torch.compile, CUDA graph), so cannot commit a pending sync."""
        return self.job.graphed or self.job.compiled or compiled_any()

    # CUDA graphs and checks ------------------------------------------------------------------------

    def poll(self) -> None:
        """Do the host's work for replayed steps, and pending commits and checks. COLLECTIVE where ``boundary`` is."""
        self.require("poll()")
        self._warn_of_idle_poll()
        self.settle()
        self.job.invalidate_casts()
        if self.settings.enabled:
            self.checker.act_on_verdicts(self.job.joined)
        for sync in self.syncs:
            sync.poll()
        try:
            self.checker.act_on_verdicts(self.job.joined)
        finally:
            replays = max((sync.replays for sync in self.syncs), default=0)
            new, self._replays = replays - self._replays, replays
            self.job.boundaries += new
        self._check_if_due(self.job.boundaries, in_step=False)

    def _warn_of_idle_poll(self) -> None:
        """Warn once about polls without a graph. No error, because a loop may skip a step, and all ranks must poll."""
        if self.job.captured or self.job.graphed or not self.settings.enabled or self._said_polled:
            return
        idle, self._polled = self._polled == self.job.boundaries, self.job.boundaries
        if idle and self.control.speaks:
            self._said_polled = True
            logger.warning(
                "fp8dist: poll() without a graph: no step was captured into a CUDA graph, and none has ended since the "
                "last poll(). It is for replays; a step that is taken eagerly ends with the attached optimizer's step, "
                "or with manager.step()"
            )

    def _check_if_due(self, boundaries: int, in_step: bool) -> None:
        """Run a check every ``check_every`` steps, before the next step ends: by then each rank has committed the last
        step. COLLECTIVE if due.

        Steps are counted on the host since ``attach``, so all ranks check together. Never checks inside a Join context,
        where ranks without data would not take part.

        Args:
            boundaries: number passed when the last step had ended.
            in_step: True if the next step is in progress.
        """
        every, finished = self.settings.check_every, boundaries - self._since
        due = every and finished // every > self._checked // every
        if due and self.job.attached and not self.job.joined:
            self._checked = finished
            self._check(Scope(), self.settings.check_policy, in_step)

    def check(self, scope: Scope, policy: Policy, max_repairs: int | None) -> DivergenceReport:
        """Compare FP8 state, and everything that ``scope`` selects, across the ranks. COLLECTIVE."""
        self.require("check()", switched_off=True)
        self.meet("check()")
        return self._check(scope, policy, False, max_repairs)

    def meet(self, call: str) -> None:
        """Wait until all ranks that check together have come to this call. COLLECTIVE, through the store."""
        anchor = self.checker.anchor()
        if anchor is not None:
            meet(anchor, call)

    def check_computations(self) -> DivergenceReport:
        """Compare known casts and products across the ranks, and follow ``check_policy``. COLLECTIVE."""
        return self._check(Scope(parameters=False, state=False, compute=True), self.settings.check_policy, False)

    def _check(self, scope: Scope, policy: Policy, in_step: bool, max_repairs: int | None = None) -> DivergenceReport:
        """Run a check. ``in_step``: True if another step is in progress, so that a difference may come from it."""
        self.settle()
        self._tell_of_outgrown()
        if self.settings.enabled:
            done = max(int(sync.arena.step) for sync in self.syncs)
        else:
            done = self.job.boundaries - in_step
        report = self.checker.check(done, done + in_step, scope, policy, max_repairs)
        if scope.parameters and report.compared and not report.diverged:
            self.checker.last = Checked.of(self.job.step if self.settings.enabled else done, report)
            if self.checker.last.verified:
                self.checker.checked = self.checker.last.step
        return report

    def _tell_of_outgrown(self) -> None:
        """Warn of gathered weights that were written to without a trace. COLLECTIVE if there are gathered weights."""
        found = [] if self.sharded is None or self.job.joined else self.sharded.outgrown()
        if found and found[0].slots.weight_sync.speaks:
            logger.warning(
                "fp8dist: %d weight(s) have outgrown their FP8 scales, '%s' first: other code has written to them in a "
                "way that torch does not report (.data, to_local(), dcp.load). The next forward casts them with scales "
                "that fit; manager.refresh_weights() gives them new ones at once",
                len(found),
                found[0].slots.fqn,
            )

    # What hooks tell -------------------------------------------------------------------------------

    def compilation_begins(self) -> None:
        """Commit pending syncs, because torch.compile is about to trace, maybe a forward. Local."""
        self.job.compiled = True
        try:
            self.settle()
        except SyncError as error:  # Raised later: Dynamo would wrap it in an error of its own.
            self._failure = error

    def before_step(self, optimizer: Optimizer) -> None:
        """Handle the start of any optimizer's step in the process. Local."""
        if self.sharded is not None:
            self.sharded.before_step(optimizer)

    def after_step(self, optimizer: Optimizer, real: bool) -> None:
        """Handle the end of any optimizer's step: FP8 casts of weights are stale. Local. After an attached optimizer,
        COLLECTIVE if scales of gathered weights follow at once.

        Args:
            real: True if the step may have changed parameters.
        """
        self.job.invalidate_casts()
        if self.sharded is not None:
            self.sharded.after_step(optimizer, real)
            if self._renews:
                self._renews = False
                self.sharded.renew()

    def tell_others(self, text: str) -> None:
        """Publish the text of this rank's error. Ranks that miss this rank in a collective quote the text. Local."""
        if self.job.attached and self.job.shared:
            leave_word(text)

    def scaler_found(self) -> None:
        """Treat a loss scaler that ``attach`` was not given as if it had been. Local."""
        self.job.scaled = True
        self.step_skipped()  # Earlier steps may have been skipped unnoticed.

    def state_loaded(self, slots: Collection[Slot], step: int | None = None) -> None:
        """Handle loaded or reset state of these slots: FP8 casts are stale, and slots may be cold. Local.

        Args:
            step: the run's step, which goes on. None: that of the loaded state.
        """
        self.job.invalidate_casts()
        self._count_from_state(step)
        if self.steps is not None:
            self.steps.state_loaded(slots)
        if self.sharded is not None:
            self.sharded.state_loaded(slots)

    @contextlib.contextmanager
    def weights_swapped(self) -> Iterator[None]:
        """Context in which the caller swaps weights and puts them back: restores notes and scales at exit. Local."""
        notes = self.steps.kept_notes() if self.steps is not None else contextlib.nullcontext()
        scales = self.sharded.kept_scales() if self.sharded is not None else contextlib.nullcontext()
        growth = self.job.growth, self.job.eval_growth
        self.job.invalidate_casts()
        try:
            with notes, scales:
                yield
        finally:
            self.job.growth, self.job.eval_growth = growth
            self.job.invalidate_casts()

    def weights_changed(self) -> None:
        """Handle the end of an attached optimizer's step. Local."""
        self.job.invalidate_casts()
        if self._unseen_forwards():
            self.settle()
        self._renews = self.sharded is not None  # Read by ``after_step``, which runs after the optimizer's own hooks.

    def reuse_casts(self, allowed: bool) -> None:
        """Allow or forbid reuse of weight casts until the next call. Local."""
        self.job.reuse_casts = allowed
        self.job.invalidate_casts()

    def optimizer_loaded(self, stepped: bool) -> None:
        """Handle loaded state of an attached optimizer. Local. ``stepped``: True if it has stepped before."""
        if self.job.boundaries == self._since:
            self.control.training_resumes(stepped)
        if self.steps is not None:
            self.steps.optimizer_loaded()

    def step_skipped(self) -> None:
        """Drop non-finite amaxes, but no others, because the loss scaler skipped the optimizer. Local."""
        self.settle()
        for sync in self.syncs:
            sync.drop_nonfinite()
        self._tell_listeners(False)

    # Launches of communication hooks and of Join -----------------------------------------------------

    def launch_early(self) -> None:
        """Launch syncs before the boundary. The results of several launches merge. COLLECTIVE.

        Launches nothing while calibrating, which commits on a clean exit only, or after ``detach``.
        """
        if self.settings.enabled and not self.job.recording and not self.job.untied:
            for sync in self.syncs:
                if sync.every_step:
                    sync.launch()

    def launch_from_hook(self) -> None:
        """Call ``launch_early`` for a communication hook, which may have outlived a ``detach``. COLLECTIVE.

        Raises:
            ConfigurationError: the call comes out of order.
        """
        if not self.job.untied:
            self.job.launches_early = True
            if self.job.joined or (self.settings.enabled and not self.job.recording):
                self.require("comm_hook")
                self.launch_early()

    @property
    def communicates(self) -> bool:
        """True if steps end with a collective."""
        return any(sync.communicates and sync.every_step for sync in self.syncs)

    def launch_idle(self) -> None:
        """Shadow the other ranks' launch, on a rank without data. COLLECTIVE."""
        for sync in self.syncs:
            if sync.communicates and sync.every_step:
                sync.launch_idle()
        self.waits.drop()

    def resync_after_join(self) -> None:
        """Take over the state of the rank that is furthest ahead, and end the Join context. COLLECTIVE."""
        self.settle()
        # Ranks without data have no verdicts. Act on those of the other ranks before taking over their state.
        self.checker.act_on_verdicts(True, raises=False)
        for sync in self.syncs:
            take_furthest(sync, self.precisions, self.control)
            if sync.phase is not Phase.IDLE:
                sync.abandon()
        self.job.invalidate_casts()
        # A rank without data has counted fewer steps. These counts decide when ranks check, so make them equal.
        self._since, self._checked = self.job.boundaries, 0
        self._count_from_state()
        self.waits.drop()
        self.job.leave_join()
