"""The cycle of steps of one manager: boundaries, launches, commits."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import _JoinConfig
from torch.optim import Optimizer

from fp8dist.consistency.checker import Checker, Event
from fp8dist.consistency.inventory import Scope
from fp8dist.consistency.report import DivergenceReport
from fp8dist.errors import ConfigurationError, SyncError
from fp8dist.modules.linear_slots import Mode
from fp8dist.modules.precision_control import PrecisionControl
from fp8dist.monitoring.watch import Watch
from fp8dist.parallel.fsdp2 import ShardedWeight, ShardedWeights
from fp8dist.recipe import Gemm
from fp8dist.settings import Policy, Settings
from fp8dist.state.arena import Arena
from fp8dist.state.manifest import ArenaDescription, WeightDescription, build_manifest, manifest_digest
from fp8dist.state.precision import Precisions
from fp8dist.state.slots import Slot
from fp8dist.step.step_watch import StepWatch
from fp8dist.sync.arena_sync import ArenaSync, Phase, all_reduce_max
from fp8dist.sync.groups import SyncGroup, agree_on_manifests, publish_manifest, world_size
from fp8dist.sync.roll_call import enrol, leave_word
from fp8dist.sync.waits import Waits
from fp8dist_kernels.graphs import capturing, compiled_any
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN, INFINITY_BITS, amax_bits, record_amax

__all__ = ["StepCycle"]


class StepCycle:
    """Drives all arenas of one manager through their steps.

    Everything that communicates does so for all arenas in one order, which all ranks of any two groups
    share, and is called at points of the program that all ranks reach.
    """

    def __init__(
        self,
        settings: Settings,
        mode: Mode,
        precisions: Precisions,
        syncs: Sequence[ArenaSync],
        groups: Sequence[SyncGroup | None],
    ) -> None:
        self.precisions = precisions
        self.settings = settings
        self.mode = mode
        pairs = sorted(zip(syncs, groups), key=lambda pair: tuple(sorted(pair[1].ranks)) if pair[1] else ())
        self.syncs = tuple(sync for sync, _ in pairs)
        self.groups = tuple(group for _, group in pairs)
        self._init_transient()

    def _init_transient(self) -> None:
        """What a copy does not inherit: ties to a job."""
        self.attached = False
        self.detached = False
        """``detach`` was called, and ``attach`` not since."""
        self.mode.unsynced = self.shared
        self.hooked = False
        self.early = False
        self._compiles = False
        self.calibrates = False
        self._renews = False
        self._failure: SyncError | None = None
        self.drop_nonfinite = False
        self.join_config = _JoinConfig.construct_disabled_join_config()
        self.sharded: ShardedWeights | None = None
        self.steps: StepWatch | None = None  # Of the manager, which knows the model.
        self.watch: Watch | None = None
        self.waits = Waits()
        for sync in self.syncs:
            sync.waits = self.waits
        self._step = 0  # As the watch counts: the arenas' step, and the boundaries since.
        self.control = PrecisionControl(self.precisions, self.settings, self.mode, self.syncs, self.groups)
        self.checker = Checker(self.syncs, self.groups, self.settings, self.mode, self.control)
        self._boundaries = self._checked = self._replays = 0

    def __getstate__(self) -> dict[str, Any]:
        kept = ("precisions", "settings", "mode", "syncs", "groups")
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._init_transient()

    @property
    def joins(self) -> bool:
        """Whether a Join context is open."""
        return bool(self.join_config.enable)

    def group_of(self, sync: ArenaSync) -> SyncGroup | None:
        """The ranks that an arena was prepared for, attached or not."""
        return self.groups[self.syncs.index(sync)]

    # Agreement -----------------------------------------------------------------------------------

    def agree(self, boundary: str, weights: Mapping[Slot, WeightDescription], timeout: timedelta) -> None:
        """Publish all manifests, then wait for the others'. COLLECTIVE, through the store.

        Args:
            weights: by weight slot, what the weight is as a whole: the same on all ranks, however it is sharded.
        """
        watch = None if self.watch is None else self.watch.describe()
        groups = {id(group): group for group in self.groups}
        settings = {**self.settings.describe(), "boundary": boundary, "groups": len(groups), "watch": watch}
        publications = []
        for group in groups.values():  # One for all arenas of a group: ranks may have different numbers of them.
            arenas = [_described(sync, weights) for sync in self.syncs if self.group_of(sync) is group]
            if group is not None and group.size > 1:
                publications.append(publish_manifest(group, build_manifest(arenas, settings)))
        for sync, group in zip(self.syncs, self.groups):
            manifest = build_manifest([_described(sync, weights)], settings)
            self.control.manifests[id(sync)] = manifest_digest(manifest)
            sync.group = group if self.settings.amax_sync and self.settings.enabled else None
        if publications:
            enrol()
        agree_on_manifests(publications, len(groups) - 1, timeout)
        self.control.announce()
        self.attached, self.detached = True, False
        self.mode.unsynced = False
        self._boundaries = self._checked = 0
        self._count_from_state()

    def untie(self) -> None:
        """Undo ``agree``: this rank shares its state with no other until it agrees again. The state stays. Local."""
        for sync in self.syncs:
            sync.group = None
            sync.watch(False)
        self.control.manifests.clear()
        self.control.resumed = self.drop_nonfinite = self._renews = self.attached = self.mode.measuring = False
        self.detached, self.early = True, False
        self.mode.unsynced = self.shared
        if self.steps is not None:
            self.steps.detached()
        self.mode.invalidate_casts()

    @property
    def in_flight(self) -> bool:
        """True between the launch of a sync and the boundary that it is for."""
        return any(sync.phase is Phase.IN_FLIGHT for sync in self.syncs)

    @property
    def shared(self) -> bool:
        """Whether ranks are to share this state."""
        return self.settings.amax_sync and any(group is not None and group.size > 1 for group in self.groups)

    def require_groups(self) -> None:
        """Raise ConfigurationError where there are several ranks, but no group was named."""
        if self.settings.amax_sync and None in self.groups and world_size() > 1:
            raise ConfigurationError(
                f"{world_size()} ranks and no group: pass prepare(group=…) the ranks that share activations and "
                "weights (torch.distributed.group.WORLD for plain data parallelism, the whole DeviceMesh for DP x TP), "
                "or amax_sync=False"
            )

    def require_attached(self) -> None:
        """Raise ConfigurationError where ranks share state but nothing ties them yet."""
        if self.shared and not self.attached:
            raise ConfigurationError("attach() first: ranks share this state, and attach() is what ties them")

    def derive_weight_scales(
        self,
        weights: Iterable[tuple[ArenaSync, Slot, Tensor]],
        which: Literal["cold", "unfit", "all"],
        of: Sequence[ArenaSync] | None = None,
    ) -> None:
        """Set weight scales from the weights as they are now. COLLECTIVE: one all-reduce per arena.

        Args:
            weights: (sync, slot, this rank's weight or its part of it); several may name one slot.
            which: "cold": slots without a scale. "unfit": those, and where the weight has outgrown its scale or is less
                than half as large as when it was seen last. "all". Histories of the last two are emptied, except of
                cold slots: they told of other weights.
            of: the arenas that ``weights`` are in, where only their ranks call. None: all.
        """
        syncs = [sync for sync in (self.syncs if of is None else of) if self._scales_weights(sync)]
        amaxes = {id(sync): torch.full_like(sync.arena.pending, DID_NOT_RUN) for sync in syncs}
        for sync, slot, weight in weights:
            if id(sync) not in amaxes:
                continue
            bits = amax_bits(weight.detach()).to(sync.arena.device)
            record_amax(bits, amaxes[id(sync)][sync.arena.index[slot]])
        launched = []
        for sync in syncs:
            bits = amaxes[id(sync)].view(torch.int32)
            work = None
            if sync.communicates:
                assert sync.group is not None
                with sync.failing_by_name("deriving FP8 scales of weights"):
                    work = all_reduce_max(bits, sync.group, sync.counters)
            launched.append((sync, bits, work))
        for sync, bits, work in launched:
            if work is not None:
                with sync.failing_by_name("deriving FP8 scales of weights"):
                    work.wait()
            amax, where = bits.view(torch.float32), (bits >= 0) & (bits < INFINITY_BITS)
            if which == "unfit" and sync.arena.recipe.delayed:
                where &= sync.arena.cold | ~sync.arena.fits(amax)
            elif which == "cold":
                where &= sync.arena.cold
            forget = where & ~sync.arena.cold if which == "unfit" else where
            sync.arena.derive_scales(amax, where)
            if which != "cold":
                sync.forget(forget)

    def _scales_weights(self, sync: ArenaSync) -> bool:
        """Whether weights are cast with the scales of their slots: delayed ones, or those that all parts of a gathered
        weight must share."""
        recipe = sync.arena.recipe
        return recipe.delayed or (self.sharded is not None and recipe.by == "tensor")

    def fit_weight_scales(self, weights: Sequence[ShardedWeight]) -> None:
        """Derive the scales of sharded weights that are cold or no longer fit. COLLECTIVE over their arenas: the ranks
        of another one may see no reason."""
        parts = [weight.part() for weight in weights]
        concerned = {id(sync) for sync, _, _ in parts}
        self.derive_weight_scales(parts, "unfit", [sync for sync in self.syncs if id(sync) in concerned])

    # The step ------------------------------------------------------------------------------------

    def boundary(self, hold: Tensor | None = None, calibrated: bool = False) -> None:
        """A step ends here. COLLECTIVE: one all-reduce per arena, less those that were launched early.

        Args:
            hold: non-zero: the loss scaler skips this step, which is then none. Read on the device.
            calibrated: a calibration ends, which is no step of training.
        """
        if self.calibrates and not calibrated:
            raise ConfigurationError("a step ended inside calibrate(), which changes no parameter: step after it")
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        in_graph = self._captures()
        self.mode.invalidate_casts()
        if self.settings.enabled:
            self.require_attached()
            self.settle()
        if not in_graph:
            self.mode.boundaries += 1
            if self.settings.enabled:
                if not calibrated:
                    self.control.end_step()
                self.checker.act_on_verdicts(self.joins)
            # Counted before the check: who catches what it raises goes on with the next step.
            passed, self._boundaries = self._boundaries, self._boundaries + 1
            self._check_if_due(passed, in_step=True)
        if not self.settings.enabled:
            return
        for sync in self.syncs:
            if not sync.every_step:
                sync.step_alone(hold)
            elif not self.joins and sync.phase is Phase.IDLE:
                sync.launch(hold, self.drop_nonfinite)
        if self.mode.measuring and calibrated:
            for sync in self.syncs:
                sync.watch(True)  # Anew: this is not of the step that is watched.
        elif self.mode.measuring and not (self.joins or in_graph):
            self._look()
        for sync in self.syncs:
            sync.pass_boundary(hold, self.drop_nonfinite)
        at_once = in_graph or (self._unseen_forwards() and not self.hooked)
        for sync in self.syncs:
            if at_once or sync.arena.recipe.update == "same_step":
                sync.settle()
        if calibrated:
            self.waits.drop()
        elif not in_graph:
            self.waits.end_step()
            self._step += 1
            if self.watch is not None:
                self.watch.resume_after = None
            self._measure_next()
        if not in_graph:
            self.checker.act_on_verdicts(self.joins, only_immediate=True)

    def set_precision(self, pattern: str, gemms: tuple[Gemm, ...], to_high: bool, steps: int | None) -> list[str]:
        """See ``StateManager.set_precision``. Local: on all ranks alike."""
        self.settle()
        return self.control.change(pattern, gemms, to_high, steps)

    # Watching --------------------------------------------------------------------------------------

    def _look(self) -> None:
        """The numbers of the step that ends. COLLECTIVE."""
        assert self.watch is not None
        jumps = self.watch.collect(self._step + 1, self.syncs)
        if jumps:
            self.checker.tell(Event("jump", self._step + 1, tuple(jump.slot for jump in jumps)))

    def _count_from_state(self) -> None:
        self._step = 0
        if self.watch is not None and self.watch.resume_after is not None:
            self._step = self.watch.resume_after
        elif self.watch is not None:
            self._step = max((int(sync.arena.step) for sync in self.syncs), default=0)
        self._measure_next()

    def _measure_next(self) -> None:
        """Whether the casts of the next step are measured. Compiled forwards are compiled for both."""
        due = self.settings.enabled and self.watch is not None and self.watch.is_due(self._step + 1)
        if due or self.mode.measuring:
            self.mode.measuring = due
            for sync in self.syncs:
                sync.watch(due)

    def _captures(self) -> bool:
        """Whether this step goes into a CUDA graph, which has no place for an FP8 all-gather and a Join context."""
        captures = self.captures
        if captures and (self.sharded is not None or self.joins):
            raise ConfigurationError("a step with fp8_all_gather, or inside Join, cannot be captured into a CUDA graph")
        return captures

    def _unseen_forwards(self) -> bool:
        """Whether the next forward may be one that cannot commit what is due: compiled, or in a graph of its own."""
        return self.mode.graphed or self._compiles or compiled_any()

    def compilation_begins(self) -> None:
        """torch.compile is about to trace something, maybe a forward. Local."""
        self._compiles = True
        try:
            self.settle()
        except SyncError as error:  # Dynamo would make an error of its own of it.
            self._failure = error

    def poll(self) -> None:
        """The host's part of steps that were replayed, and what is due. COLLECTIVE where ``boundary`` is."""
        self.settle()
        self.mode.invalidate_casts()
        if self.settings.enabled:
            self.checker.act_on_verdicts(self.joins)
        for sync in self.syncs:
            sync.poll()
        try:
            self.checker.act_on_verdicts(self.joins)
        finally:
            replays = max((sync.replays for sync in self.syncs), default=0)
            new, self._replays = replays - self._replays, replays
            self._boundaries += new
            self.mode.boundaries += new
        self._check_if_due(self._boundaries, in_step=False)

    def _check_if_due(self, finished: int, in_step: bool) -> None:
        """Every ``check_every`` steps, before the next one ends: by then each rank has committed the last. COLLECTIVE
        then.

        Counted on the host since ``attach``, so that all ranks come here together. Not inside a Join context, where
        ranks without data would not come.

        Args:
            finished: steps since ``attach``.
            in_step: the next one is under way.
        """
        every = self.settings.check_every
        if every and finished // every > self._checked // every and self.attached and not self.joins:
            self._checked = finished
            self.check(Scope(), self.settings.check_policy, in_step)

    def check(self, scope: Scope, policy: Policy, in_step: bool = False) -> DivergenceReport:
        """Compare FP8 state, and what ``scope`` says, across the ranks. COLLECTIVE.

        ``in_step``: another step is under way, and what is found may have happened in it.
        """
        self.settle()
        if not self.settings.enabled:
            return self.checker.check(self.mode.boundaries, scope, policy)
        return self.checker.check(max(int(sync.arena.step) for sync in self.syncs) + in_step, scope, policy)

    def settle(self) -> None:
        """Commit what is due. Local."""
        for sync in self.syncs:
            sync.settle()

    @property
    def captures(self) -> bool:
        """Whether this step goes into a CUDA graph."""
        return any(capturing(sync.arena.device) for sync in self.syncs)

    def before_step(self, optimizer: Optimizer) -> None:
        """Some optimizer of the process is about to step. Local."""
        if self.sharded is not None:
            self.sharded.before_step(optimizer)

    def after_step(self, optimizer: Optimizer, real: bool) -> None:
        """It has stepped: FP8 casts of weights are stale. Local; after an attached one COLLECTIVE, where scales of
        gathered weights follow at once.

        Args:
            real: it may have changed parameters.
        """
        self.mode.invalidate_casts()
        if self.sharded is not None:
            self.sharded.after_step(optimizer, real)
            if self._renews:
                self._renews = False
                self.sharded.renew()

    def tell_others(self, text: str) -> None:
        """This rank raises an error: ranks that miss it in a collective quote this text. Local."""
        if self.attached and self.shared:
            leave_word(text)

    def scaler_found(self) -> None:
        """A loss scaler is at work that ``attach`` was not given: as if it had been. Local."""
        self.drop_nonfinite = True
        self.step_skipped()  # Earlier steps may have been, unseen.

    def state_loaded(self, slots: Collection[Slot]) -> None:
        """The state of these slots was loaded, or reset: FP8 casts are stale, and slots may be cold. Local."""
        self.mode.invalidate_casts()
        self._count_from_state()
        if self.steps is not None:
            self.steps.state_loaded(slots)
        if self.sharded is not None:
            self.sharded.state_loaded(slots)

    @contextlib.contextmanager
    def weights_swapped(self) -> Iterator[None]:
        """Weights are others inside, and those of before at the end. Local."""
        notes = self.steps.kept_notes() if self.steps is not None else contextlib.nullcontext()
        scales = self.sharded.kept_scales() if self.sharded is not None else contextlib.nullcontext()
        growth = self.mode.growth
        self.mode.invalidate_casts()
        try:
            with notes, scales:
                yield
        finally:
            self.mode.growth = growth
            self.mode.invalidate_casts()

    def weights_changed(self) -> None:
        """An attached optimizer has stepped. Local."""
        self.mode.invalidate_casts()
        if self._unseen_forwards():
            self.settle()
        self._renews = self.sharded is not None  # By ``after_step``, which torch calls after an optimizer's own hooks.

    def reuse_casts(self, allowed: bool) -> None:
        """Whether weights stand still until the next call. Local."""
        self.mode.reuse_casts = allowed
        self.mode.invalidate_casts()

    def step_skipped(self) -> None:
        """The loss scaler skipped the optimizer: drop non-finite amaxes, keep the others. Local."""
        self.settle()
        for sync in self.syncs:
            sync.drop_nonfinite()

    def launch_early(self) -> None:
        """Launch before the boundary; the results of several launches merge. COLLECTIVE.

        Not while calibrating, which commits on a clean exit only, and not after ``detach``.
        """
        if self.settings.enabled and not self.mode.calibrating and not self.detached:
            self.require_attached()
            if self._captures():
                raise ConfigurationError(
                    "fp8dist's comm_hook cannot be captured into a CUDA graph, which may end before the step does: "
                    "leave the hook out; the sync is then in the graph with the optimizer's step"
                )
            for sync in self.syncs:
                if sync.every_step:
                    sync.launch()

    def launch_from_hook(self) -> None:
        """``launch_early``, called by a communication hook, which may have outlived a ``detach``. COLLECTIVE.

        Raises:
            ConfigurationError: a Join context is open.
        """
        if not self.detached:
            self.early = True
            if self.joins:
                raise ConfigurationError("fp8dist.ddp.comm_hook cannot be used inside Join: leave the hook out")
            self.launch_early()

    def launch_idle(self) -> None:
        """Shadow the others' launch, for a rank without data. COLLECTIVE."""
        for sync in self.syncs:
            if sync.communicates and sync.every_step:
                sync.launch_idle()
        self.waits.drop()

    def resync_after_join(self) -> None:
        """Take over the state of the rank that is furthest, and end the Join context. COLLECTIVE."""
        self.settle()
        # Ranks without data have proved nothing: what the others know must be acted on before they part from them.
        self.checker.act_on_verdicts(True, raises=False)
        for sync in self.syncs:
            if sync.communicates:
                assert sync.group is not None
                source = _broadcast_furthest(sync.arena, sync.group)
                self._take_precisions(sync, sync.group, source)
            if sync.phase is not Phase.IDLE:
                sync.abandon()
        self.mode.invalidate_casts()
        # A rank without data has counted fewer steps, and decides by its counts when it takes part in what.
        self._boundaries = self._checked = 0
        self._count_from_state()
        self.waits.drop()
        self.join_config = _JoinConfig.construct_disabled_join_config()

    def _take_precisions(self, sync: ArenaSync, group: SyncGroup, source: int) -> None:
        """From the rank ``source``: which GEMMs of the arena's modules are in high precision, and how long.
        COLLECTIVE."""
        fqns = {slot.fqn for slot in sync.arena.index}
        described = self.precisions.describe()
        theirs = [{fqn: of for fqn, of in described.items() if fqn in fqns}]
        dist.broadcast_object_list(theirs, src=source, group=group.process_group, device=sync.arena.device)
        self.precisions.restore({**{fqn: of for fqn, of in described.items() if fqn not in fqns}, **theirs[0]})
        self.control.announce()


def _described(sync: ArenaSync, weights: Mapping[Slot, WeightDescription]) -> ArenaDescription:
    arena = sync.arena
    return ArenaDescription(
        arena.specs, arena.recipe.describe(), {s: w for s, w in weights.items() if s in arena.index}
    )


def _broadcast_furthest(arena: Arena, group: SyncGroup) -> int:
    """Everyone takes the state of the rank with the highest step counter; which one that is. COLLECTIVE."""
    me = group.ranks.index(group.rank)
    furthest = (arena.step.to(torch.int64) * group.size + me).view(1)
    dist.all_reduce(furthest, dist.ReduceOp.MAX, group=group.process_group)
    source = group.ranks[int(furthest) % group.size]
    for tensor in arena.shared_state():
        dist.broadcast(tensor, src=source, group=group.process_group)
    return source
