"""StateManager: the object that owns a model's FP8 state. ``prepare`` returns it to the user."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Literal, NamedTuple

from torch import nn

from fp8dist.checks.checked import Checked
from fp8dist.checks.coherence import lost_ties, ties_of
from fp8dist.checks.events import Event
from fp8dist.checks.inventory import Scope
from fp8dist.checks.report import DivergenceReport
from fp8dist.common.names import check_keywords, require_bool, require_choice, require_int
from fp8dist.common.optimizer_hooks import unwrap_optimizers
from fp8dist.common.text import first_few
from fp8dist.errors import ConfigurationError
from fp8dist.job.agreement import require_groups
from fp8dist.job.arguments import hooked, meant, require_attachable, require_match
from fp8dist.job.attachment import Attachment, local_weights
from fp8dist.job.calibration import calibration
from fp8dist.job.checkpoint import Checkpoint
from fp8dist.job.coverage import Coverage, Survey, survey_again
from fp8dist.job.cycle import StepCycle
from fp8dist.job.eligibility import Selection
from fp8dist.job.graph_polling import GraphPolling
from fp8dist.job.joined_manager import JoinedManager
from fp8dist.job.moved import FormerNames
from fp8dist.job.slot_state import SlotState
from fp8dist.job.step_watch import StepWatch
from fp8dist.modules.job_state import Tie
from fp8dist.modules.model_state import ModelState
from fp8dist.modules.parts import Part, fp8_parts
from fp8dist.parallel.torch_internals import fsdp2_modules
from fp8dist.parallel.wrappers import reshard
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.recipe import Recipe, gemms_in_order
from fp8dist.state.settings import Policy, Start
from fp8dist.state.slots import Slot, SlotSpec, parse_role
from fp8dist_kernels import GEMMS, Gemm
from fp8dist_kernels.arrays import NONFINITE
from fp8dist_kernels.formats import FORMATS, Role

logger = logging.getLogger("fp8dist")


class Verified(NamedTuple):
    """What the ranks have proven. Steps are those of ``run_step``.

    ``proven_step``: the newest step at which the sync has proven that all ranks cast with equal FP8 state; None: none
    since ``attach``, or nothing is shared. ``checked_step``: the newest step after which a check compared all
    parameters and found them equal and finite; None: none since ``attach``, as where each rank holds shards of its own,
    of some weights or all. ``last_check``: what the newest check of parameters that found no difference has compared:
    kinds, numbers and bytes, and what it could not compare; None: none since ``attach``.
    """

    proven_step: int | None
    checked_step: int | None
    last_check: Checked | None


ATTRIBUTE = "_fp8dist_manager"
"""Attribute of a prepared model that holds its manager. The manager has only a weak reference to the model."""

WHOLE = "_fp8dist_whole"
"""Attribute of one chunk of a prepared model (Megatron-Core hands a list of them around): the module of all chunks."""


class StateManager(FormerNames, JoinedManager):
    """The FP8 state of one model. ``fp8dist.prepare`` creates it, and ``attach`` ties it to a training job.

    Methods marked COLLECTIVE must be called by all ranks of the groups. All other methods are local. Local methods
    that read state first commit a pending sync. They may wait for a collective in flight, but never start one, so
    rank 0 may call them alone.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        state: ModelState,
        default: ArenaSync,
        aliases: Mapping[Slot, Slot],
        found: Coverage,
        selection: Selection,
    ) -> None:
        self.recipe = recipe
        self.settings = state.settings
        self._model = weakref.ref(model)
        self._default = default  # The arena of slots that ``register`` adds.
        for sync in state.syncs:
            sync.owner = f"StateManager of {type(model).__name__}"
        self._aliases = dict(aliases)
        self._found, self._selection = found, selection  # As ``prepare`` found the model, before its conversion.
        self._ties = ties_of(model)  # At ``prepare``; from then on, at the last ``attach``.
        self._cycle = StepCycle(state)
        self._init_transient()
        super().__init__()

    def _init_transient(self) -> None:
        """Job-specific state. Not copied or pickled."""
        self._job = self._cycle.job
        self._syncs = self._cycle.syncs
        model = self._model()
        if model is not None:
            self._cycle.checker.watch(model)
        self._attachment = Attachment(self._cycle)
        self._graphs = GraphPolling(self._cycle)
        self._changes: tuple[list[str], list[str]] = ([], [])  # Modules that came after ``prepare``, and that are gone.
        cycle = self._cycle
        cycle.steps = StepWatch(cycle.state, cycle.checker, cycle.scales, cycle.at_rest, self._model)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("recipe", "settings", "_default", "_aliases", "_found", "_selection", "_ties", "_cycle")
        # The model last: pickling it may fail with a less helpful error than that of a process group.
        return {**{name: getattr(self, name) for name in kept}, "model": self._model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._model = weakref.ref(state.pop("model"))
        self.__dict__.update(state)
        self._init_transient()

    def __repr__(self) -> str:
        where = "attached" if self._job.attached else "not attached"
        state = f"{len(self.slots)} slots in {len(self._syncs)} arena(s)"
        return f"StateManager({state}, {self.recipe}, {where}, FP8: {self.coverage().summary})"

    # Attach and detach ---------------------------------------------------------------------------

    @check_keywords("manager.attach")
    def attach(
        self,
        module: nn.Module | None = None,
        optimizer: Any = None,
        scaler: Any = None,
        boundary: Literal["optimizer", "manual"] = "optimizer",
        timeout: timedelta = timedelta(minutes=5),
        compute: bool | None = None,
        start: Start | None = "raise",
        data_rank: int = 0,
    ) -> StateManager:
        """Place the state, agree with the other ranks, compare what they start with, derive weight scales and install
        hooks. COLLECTIVE.

        The FP8 state gets a communicator of its own for each group, unless ``prepare(share_group=True)``. Call this
        after the model is wrapped, sharded, materialised and loaded. You may call it again, for example with a
        new optimizer. One rank logs which modules came after ``prepare``, and which are gone.

        Args:
            module: the model as the training loop calls it, such as the DDP or FSDP module. None: the prepared model.
            optimizer: an optimizer, or a list of optimizers. The step of the last one is the boundary. None: the loop
                calls ``manager.step()``.
            scaler: the GradScaler, if you use one. Non-finite amaxes of steps that it skips are dropped.
            boundary: ``"optimizer"``, or ``"manual"``: the loop calls ``manager.step()``, and the optimizers only
                signal that weights have changed.
            timeout: how long to wait for the other ranks.
            compute: at the end, compare known casts and products across the ranks, as ``check(compute=True)`` does. A
                difference is handled by the ``check_policy`` of ``prepare``. None: on GPUs, not on a CPU, which takes
                long to emulate FP8.
            start: compare what the ranks start with, once: the parameters that ``check`` compares. Until this process
                has passed a boundary also the parameters of a model that nothing wraps: they count as shared by the
                ranks of ``prepare(group=…)``, unless they match ``groups`` or are marked as shards or experts. Before
                the first step also buffers, except those in DDP and statistics of normalisation layers. This is one
                all-reduce, on meshes as many as ``check`` has; none with ``amax_sync=False``. "raise"; "warn": one rank
                logs the differences; None: compare nothing, for ranks that are meant to differ.
            data_rank: number of this rank among those with other data, such as its rank in the data-parallel axis.
                ``NVFP4Scaling`` (emulated: no GPU path) rounds by it: ranks with the same number round equal gradients
                alike, as tensor-parallel ranks must.

        Raises:
            ManifestMismatchError: on all ranks, if they were prepared differently or a rank does not come in time.
            DivergenceError: on all ranks, if they start with other values (``start``): the manager is not attached, and
                you may call ``attach`` again once they are equal. Or a device computes otherwise (``compute``): the
                manager is attached.
            ConfigurationError: the call cannot work. The message says what to do.
        """
        require_choice("boundary", boundary, ("optimizer", "manual"), '"optimizer" or "manual"')
        if compute is not None:
            require_bool("compute", compute)
        if start is not None:
            require_choice("start", start, ("raise", "warn"), '"raise", "warn" or None')
        require_int("data_rank", data_rank, 0, 2**31 - 1)
        require_attachable(module, optimizer, scaler, timeout)
        self._cycle.require("attach()")
        require_groups(self.settings, self._cycle.groups)
        optimizers = hooked(optimizer, self.settings.enabled)
        model = _existing(self._model)
        if module is not None:
            require_held(self, module, "attach(module)")
        whole = module if module is not None else model
        by_optimizer = boundary == "optimizer" and bool(optimizers)
        self._cycle.job.data_rank = data_rank
        computes = self._attachment.tie(model, whole, optimizers, scaler, by_optimizer, timeout, compute, start)
        self._cycle.checker.attached(whole, optimizer)
        if self.settings.enabled:
            _log_changes(self, model)
            _log_lost_ties(self, model)
        if computes:
            self._cycle.checks.run_computations()
        return self

    def detach(self) -> None:
        """Undo ``attach``. COLLECTIVE only if the last sync found that ranks differ: call it on all ranks, between two
        optimizer steps. Does nothing if the manager is not attached.

        All hooks on optimizers, loss scaler and DDP are removed, and this rank no longer shares its FP8 state. The
        model keeps its FP8Linears, and the manager its state, bit for bit. The model is then as between ``prepare`` and
        ``attach``: nothing is synchronised, and no optimizer step is a boundary. So scales do not change, and the
        second optimizer step without a boundary raises ConfigurationError (not inside ``no_fp8()``). You may call
        ``attach`` again, also with another wrapper or optimizer. ``fp8dist.restore(model)`` undoes ``prepare``.

        A fallback that the last sync triggered starts now. With ``next_step`` this is one step earlier than without
        ``detach``.

        A DDP hook of ``fp8dist.ddp.comm_hook`` stays registered, because DDP cannot remove it, but does nothing. Do not
        replay a CUDA graph that holds a step: its sync is in the graph.

        Raises:
            ConfigurationError: FSDP2 gathers weights in FP8, into buffers that it keeps; or the call is inside a Join
                context, or between the start of a sync and the optimizer step that ends it. Nothing was changed.
            DivergenceError: with policy "raise", if the last sync proved that ranks differ. Nothing was detached.
        """
        model = _existing(self._model)
        if self._job.tie in (Tie.ATTACHED, Tie.RESTORED):
            self._cycle.require("detach()")
            self._attachment.untie()
            self._cycle.checker.watch(model)

    # The step ------------------------------------------------------------------------------------

    def step(self) -> None:
        """End a step. COLLECTIVE. Call it once per optimizer step if no attached optimizer is the boundary.

        Raises:
            ConfigurationError: an attached optimizer is the boundary, or ranks share state and ``attach()`` was not
                called.
            DivergenceError: with policy "raise", if the sync proved that ranks differ.
        """
        if self._job.by_optimizer:
            raise ConfigurationError(
                'the attached optimizer\'s step is the boundary already: use attach(…, boundary="manual") to call '
                "step() yourself"
            )
        self._cycle.boundary()
        self._cycle.steps.take_notes(after_step=True)

    def poll(self) -> None:
        """Do the host's part of steps that were replayed in a CUDA graph. Call it after replays, and once before the
        capture. COLLECTIVE: on all ranks, after the same steps.

        The graph contains the step counter, the sync and the commit. ``poll`` waits for the last replay, reads what the
        replays since the last poll proved, and acts on it. It also runs the check that is due (``check_every``), and
        ends the reuse of weight casts. If you poll after each replay, the report names the rank and slot behind a
        difference. Polling less often costs less, but may only report that there was a difference.

        Raises:
            DivergenceError: with policy "raise", if a sync proved that ranks differ.
        """
        self._graphs.poll()

    def on_event(self, callback: Callable[[Event], None]) -> None:
        """Register a function that is called with each Event. Local."""
        if not callable(callback):
            raise ConfigurationError(f"callback must be a function of an Event, got {callback!r}")
        self._cycle.events.callbacks.append(callback)

    def check(
        self,
        parameters: bool = True,
        gradients: bool = False,
        optimizer: Any = None,
        policy: Policy = "raise",
        *,
        buffers: bool = False,
        compute: bool = False,
        max_repairs: int | None = None,
        coherence: bool = False,
    ) -> DivergenceReport:
        """Compare the whole FP8 state, and everything else that is known to be replicated, across ranks. COLLECTIVE.

        The ranks meet through the job's store, so that a rank that calls this alone gets SyncError. Then there is one
        all-reduce of 120 bytes. With further sets of ranks, as on meshes, it is one for each set and two
        more. If ranks differ, further collectives find out what differs, where, and on which ranks.

        Compared are the FP8 state across the ranks that share it, parameters that DDP keeps equal (if ``attach`` was
        given the DDP module), and DTensors across their Replicate axes. To compare other parameters, use
        ``fp8dist.check(module, group=…)``. ``report.compared`` counts what was compared, by kind. ``report.skipped``
        says what was not compared, and why.

        The report is ``consistent`` only if everything that was to be compared was compared on some ranks, and is
        equal: not if all parameters are shards that no other rank holds, and not on one rank. Then
        ``report.unverified`` or ``report.skipped`` says why, and nothing is raised.

        Args:
            parameters: compare parameters.
            gradients: compare gradients. Call ``check`` after they are reduced and before they are zeroed.
            optimizer: compare the state of this optimizer, or of a list of optimizers.
            policy: what to do if ranks differ. "raise"; "warn": one rank logs the differences, and the report has them;
                "repair": copy from the majority and check again, raise if there is no majority or ranks still differ.
                With "warn", a finding that an earlier check has logged gets one line while it stands.
            buffers: compare the buffers of DDP modules. If a forward changes buffers, as BatchNorm does, ranks differ
                by design until the next forward: DDP then copies the buffers of its first rank to the others.
            compute: also let each rank compute the FP8 casts and products of the model's own shapes, on operands that
                are the same everywhere, and compare the results with those of ranks with equal hardware and versions.
                Finds a device that computes otherwise. One more all-reduce of 72 bytes, and the time of the products,
                with 256 tokens and at most 8,192 features.
            max_repairs: for "repair": the number of checks in a row that may repair the same tensor. The next one
                copies nothing, and raises. None: as given to ``prepare``, by default any number. From the third repair
                on the report says that the cause persists. Pass the same on all ranks.
            coherence: also compare tensors of each rank with one another, see ``fp8dist.check``; with attached
                optimizers, too. Checks of ``check_every`` always do, but when they run no FP8 cast is kept any longer.

        Returns:
            A report with the same findings on all ranks.

        Raises:
            DivergenceError: on all ranks, if the policy says so.
            ConfigurationError: there are several ranks, and nothing is known to be the same on any two of them. The
                message says what to pass. (If FP8 is switched off, one rank warns once instead.) Also raised inside a
                Join context, because ranks without data would not take part.
        """
        require_choice("policy", policy, ("raise", "warn", "repair"))
        if max_repairs is not None:
            require_int("max_repairs", max_repairs, 1, what="None or a number of checks")
        optimizers = () if optimizer is None else tuple(unwrap_optimizers(optimizer))
        within = self._cycle.checker.asked.also(optimizer) if coherence else None
        scope = Scope(parameters, gradients, buffers, optimizers, compute=compute, coherence=within)
        self._cycle.require("check()", switched_off=True)
        return self._cycle.checks.run(scope, policy, max_repairs)

    # Modes ---------------------------------------------------------------------------------------

    def no_fp8(self) -> AbstractContextManager[None]:
        """Context manager that runs all forwards in high precision. Local: on all ranks alike, or on one rank for an
        evaluation.

        After ``prepare`` FP8 is on without any context manager. A backward has the mode of its forward, also where
        activation checkpointing repeats the forward. Amaxes are not recorded inside, unless ``recording`` is
        active. Unrelated to ``torch.autocast``. If FSDP2 gathers weights in FP8, inputs and gradients are in high
        precision, and weights are the gathered FP8 bytes, dequantised.
        """
        return self._job.switched(in_fp8=False)

    def recording(self) -> AbstractContextManager[None]:
        """Context manager that records amaxes in all forwards, in any mode: in ``eval()``, without grad, in high
        precision. Local: on all ranks alike. The amaxes count at the next boundary. ``calibrate`` ends with a boundary
        of its own, and does not train. Inside ``no_fp8()`` and ``recording()`` steps train in high precision, and
        record amaxes."""
        return self._job.switched(recording=True)

    def calibrate(self) -> AbstractContextManager[None]:
        """Context manager that runs in high precision, records amaxes and commits them on exit. COLLECTIVE on a clean
        exit.

        Run any number of batches inside, forward and backward. Afterwards every slot that ran has a scale, and the next
        forward may be in FP8. Run backwards too, otherwise gradients get no scales. Nothing else changes: gradients,
        buffers and torch's random number generators (of the CPU and of the model's GPU) are restored. After an
        exception nothing is committed, and the amaxes recorded inside are dropped.

        Raises:
            ConfigurationError: an attached optimizer steps inside, or FSDP2 holds gradients that it has not reduced.
        """
        return calibration(self._cycle, self._attachment.module or _existing(self._model))

    @contextlib.contextmanager
    def swapped_weights(self) -> Iterator[None]:
        """Context manager for weights that you swap in and out again, such as an EMA's. Training then continues as if
        they had never been swapped. Local: on all ranks alike.

        Without it results are right as well. But weights that were written to are cast with their own amaxes if they
        exceed their scales by a quarter, and weights that FSDP2 gathers in FP8 get new scales. So later losses may
        differ in their bits from a run without the evaluation.

            with manager.swapped_weights():
                ema.store_and_copy_to(model)
                evaluate(model)
                ema.restore(model)
        """
        self._cycle.require("swapped_weights()")
        module = self._attachment.module or _existing(self._model)
        self._cycle.state.settle()
        reshard(fsdp2_modules(module))  # Gathered weights would keep the old values.
        with self._cycle.weights_swapped():
            try:
                yield
            finally:
                reshard(fsdp2_modules(module))

    @check_keywords("manager.set_precision")
    def set_precision(
        self,
        pattern: str,
        precision: Literal["high", "fp8"],
        gemms: Sequence[Gemm] = GEMMS,
        steps: int | None = None,
    ) -> tuple[str, ...]:
        """Put modules, or single GEMMs of them, into high precision or back into FP8. Local: on all ranks alike. Each
        sync proves that all ranks did.

        Modules that return to FP8 after ``steps`` record amaxes in the last 16 of these steps, so they return with
        scales. Modules that return otherwise are cold. Under torch.compile, a compiled region is compiled again for
        each new set of modules in high precision, up to ``torch._dynamo.config.recompile_limit`` times. After that it
        runs eagerly, or raises with ``fullgraph=True``. Captured CUDA graphs keep their precision, and their steps are
        not counted. Weights gathered in FP8 (``fp8_all_gather``) are dequantised.

        Args:
            pattern: fnmatch pattern of fqns. "*" matches all.
            precision: "high" or "fp8".
            gemms: the GEMMs to change, of "fprop", "dgrad" and "wgrad".
            steps: number of optimizer steps, beginning with the next, after which the change is undone. None: until
                further notice.

        Returns:
            The fqns that matched.

        Raises:
            ConfigurationError: no FP8Linear matches, ``precision`` or ``gemms`` is invalid, or ``steps`` is not a
                positive int.
        """
        self._cycle.require("set_precision()")
        require_choice("precision", precision, ("high", "fp8"), '"high" or "fp8"')
        require_match(pattern, self._cycle.precisions, self.coverage)
        if steps is not None:
            require_int("steps", steps, 1, what="None or a number of optimizer steps")
        chosen = gemms_in_order("gemms", gemms)
        self._cycle.state.settle()
        return tuple(self._cycle.control.change(pattern, chosen, precision == "high", steps))

    def coverage(self) -> Coverage:
        """Return which of the model's matmul weights are in FP8 now, and why the others are not. Local.

        The result prints as a table and iterates over ``CoverageRow``s. It has the weights that the model has now. A
        module counts as high precision if ``set_precision``, a fallback or its recipe keeps all its GEMMs there now, or
        if it came after ``prepare``. The slots of converted modules that are gone stay, and take no part in a step. If
        the model itself is gone, the result has what ``prepare`` found.
        """
        return self._found if self._model() is None else Internals(self).survey().coverage(self.settings.enabled)

    # Slots of other modules ----------------------------------------------------------------------

    def register(self, fqn: str, role: str, format: str) -> Slot:
        """Add a slot for a module that is not an FP8Linear. Local: on all ranks alike, before ``attach`` and the first
        forward.

        Args:
            fqn: a name that has no slot of this role yet.
            role: "input", "weight" or "grad_output".
            format: "e4m3" or "e5m2".
        """
        require_choice("format", format, ("e4m3", "e5m2"))
        if not isinstance(fqn, str):
            raise ConfigurationError(f"fqn must be a string, got {fqn!r}")
        if not self._default.arena.recipe.delayed:
            raise ConfigurationError("register() is for delayed scaling: other recipes keep no scales")
        slot = Slot(fqn, parse_role(role).value)
        if slot in self._aliases or slot in self.slots:
            raise ConfigurationError(f"there is a slot {slot} already")
        sync = self._default
        sync.arena = sync.arena.extended([SlotSpec(slot, FORMATS[format])])
        for part in fp8_parts(_existing(self._model)):
            part.slots.forget_views()
        return slot

    # Reading and writing state -------------------------------------------------------------------

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All slots, sorted. Modules that share a weight share its slot."""
        return tuple(sorted(slot for sync in self._syncs for slot in sync.arena.index))

    @property
    def steps(self) -> int:
        """Number of steps committed so far. Local. Reads from the device."""
        self._cycle.state.settle()
        return max(int(sync.arena.step) for sync in self._syncs)

    def slot(self, fqn: str, role: str) -> SlotState:
        """Return the state of a slot: its scale, amax and history, to read or to set by hand. Local.

        Args:
            fqn: name of the module.
            role: "input", "weight" or "grad_output".

        Raises:
            ConfigurationError: there is no such slot.
        """
        slot = Slot(str(fqn), parse_role(role).value)
        slot = self._aliases.get(slot, slot)
        for sync in self._syncs:
            if slot in sync.arena.index:
                return SlotState(self._cycle, sync, slot, fqn)
        hint = meant(fqn, self.slots, self.coverage)
        raise ConfigurationError(f"there is no slot {slot}{hint}; manager.slots lists them")

    @property
    def verified(self) -> Verified:
        """What syncs and checks have proven since ``attach``. Local. Does not read the device."""
        checker = self._cycle.checker
        return Verified(self._cycle.verdicts.proven, checker.checked, checker.last)

    def metrics(self) -> dict[str, float]:
        """Return numbers for any logger: slots, cold slots, non-finite and saturated amaxes, modules in high precision,
        fallbacks, and the cost of this rank's syncs and checks. Local. Reads from the device."""
        self._cycle.state.settle()
        arenas = [sync.arena for sync in self._syncs]
        counters = [sync.counters for sync in self._syncs]
        verified = self.verified
        last = verified.last_check
        compared = (None if last is None else last.compared) or {}
        return {
            "fp8/step": float(self.steps),
            "fp8/slots": float(sum(len(arena) for arena in arenas)),
            "fp8/cold_slots": float(sum(int(arena.cold.sum()) for arena in arenas if arena.recipe.delayed)),
            "fp8/nonfinite_amaxes": float(sum(int(arena.counters[NONFINITE].sum()) for arena in arenas)),
            "fp8/saturated_amaxes": float(sum(arena.saturated_amaxes for arena in arenas)),
            "fp8/high_precision_modules": float(self._cycle.precisions.high),
            "fp8/fallbacks": float(self._cycle.precisions.fallbacks),
            "fp8/collectives": float(sum(c.collectives for c in counters)),
            "fp8/sync_bytes": float(sum(c.bytes for c in counters)),
            "fp8/sync_wait_ms": 1e3 * sum(c.wait_s for c in counters),
            "fp8/checks": float(self._cycle.checker.checks),
            "fp8/check_ms": 1e3 * self._cycle.checker.seconds,
            "fp8/proven_step": float(verified.proven_step or 0),
            "fp8/checked_step": float(verified.checked_step or 0),
            "fp8/compared_parameters": float(compared.get("parameter", 0)),
            "fp8/compared_slots": float(compared.get("slot", 0)),
            "fp8/compared_bytes": float(0 if last is None else sum(last.compared_bytes.values())),
        }

    @property
    def run_step(self) -> int:
        """Number of training steps that have ended, as the run counts them: ``steps`` at ``attach`` or after a load, or
        ``watch(resume_after=…)``, and all boundaries since. Local. Does not read the device."""
        return self._job.step

    def refresh_weights(self) -> None:
        """Derive all weight scales again, after something other than an optimizer wrote to weights. COLLECTIVE: the
        ranks meet through the job's store first.

        The histories of the weights are cleared, because they describe other weights. Call it if FSDP2 gathers weights
        in FP8 and they were written to through ``.data``. Otherwise casts notice most writes by themselves (see
        docs/mistakes.md), and this call gives the slots new scales at once. Until the step ends, inputs and gradients
        that outgrow their scales because weights have grown are cast with their own amaxes.
        """
        self._cycle.require("refresh_weights()", switched_off=True)
        self._cycle.state.settle()
        self._cycle.checks.meet("refresh_weights()")
        self._job.invalidate_casts()
        if not self.settings.enabled:
            return
        sharded = self._cycle.scales.sharded
        if sharded is not None:
            sharded.reshard()
        model = _existing(self._model)
        before = [(part.slots, part.slots.weight_scale()) for part in fp8_parts(model)]
        self._cycle.scales.derive(local_weights(model), "all")
        for slots, scale in before:  # Inputs of later modules may grow as much, but have old scales.
            slots.policy.report_new_scale(scale, slots.weight_scale())
        if sharded is not None:
            sharded.accept()
        self._cycle.steps.take_notes()

    # Saving and loading --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, bytes]:
        """Return this rank's whole FP8 state as opaque bytes, by key. Local.

        A key says which ranks share the state: "shared" (all ranks), "ranks<first>-<identity>" (a smaller group), or
        "rank<r>" (``amax_sync=False``). So a checkpoint that merges equal keys of several ranks keeps different states
        apart, and "shared" state can be loaded on any number of ranks.

        With torch.distributed.checkpoint, save and load the manager itself:
        ``dcp.save({"model": model, "optim": …, "fp8": manager})``. If a checkpoint lacks one of these keys,
        ``dcp.load`` raises an error of its own.
        """
        return Checkpoint(self._cycle, self._model()).state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, convert: bool = False) -> None:
        """Load a saved state. Slots are matched by name. Local: load the same state on all ranks.

        Amaxes that wait for a boundary are dropped. ``history_len``, ``update`` and ``warmup`` may differ from the
        saved ones: a longer history keeps its newest entries, a shorter one gets zeros in front.

        Args:
            strict: False: missing or unexpected keys and slots are logged, and the others are loaded. ``dcp.load`` is
                always strict if it is given the manager. Give it the dict instead:
                ``state = {"fp8": manager.state_dict()}; dcp.load(state, …); manager.load_state_dict(state["fp8"], …)``.
            convert: True: accept a state that was saved with another format, margin, power_of_two, amax_algo or seed.
                The scales of these slots are derived from their histories. Where a history is all zeros (weights whose
                scale comes from ``attach``), they are derived from the amax that the old scale stands for,
                ``(old_fp8_max / 2**old_margin) / old_scale``. Cold slots stay cold.

        Raises:
            CheckpointError: the state does not fit. Nothing was changed.
        """
        Checkpoint(self._cycle, self._model()).load_state_dict(state_dict, strict, convert)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a safetensors file, atomically. Local. ``{rank}`` in the path is replaced by the rank."""
        Checkpoint(self._cycle, self._model()).save(path)

    def load(self, path: str | os.PathLike[str], strict: bool = True, convert: bool = False) -> None:
        """Load a file that ``save`` wrote. See ``load_state_dict``. Local: on all ranks alike.

        Raises:
            CheckpointError: the file is missing, damaged or of another kind, or does not fit. Nothing was changed.
        """
        Checkpoint(self._cycle, self._model()).load(path, strict, convert)

    def reset(self) -> None:
        """Forget all FP8 state, but not the precision of modules (``set_precision``, a fallback). Local: on all ranks
        alike. Not needed for a new model, which has its own state."""
        self._cycle.require("loading state")
        for sync in self._syncs:
            sync.arena.reset()
            sync.abandon()
        self._cycle.state_loaded(self.slots, self.run_step)


class Internals:
    """What other files of this package use of a manager beside its public calls: the only way in. Not for users: it
    changes without notice.

    ``cycle``: its steps, with ``job``, ``syncs`` and ``checker``. ``attachment``: what ``attach`` was given.
    """

    def __init__(self, manager: StateManager) -> None:
        self._manager = manager
        self.cycle, self.attachment = manager._cycle, manager._attachment

    @property
    def model(self) -> nn.Module:
        """The prepared model.

        Raises:
            ConfigurationError: it no longer exists.
        """
        return _existing(self._manager._model)

    @property
    def called_module(self) -> nn.Module:
        """The model as the training loop calls it, which ``attach`` was given; before, the prepared model."""
        return self.attachment.module or self.model

    def parts(self) -> Iterable[Part]:
        """Return the FP8Linears and experts of the prepared model; none if it no longer exists."""
        model = self._manager._model()
        return () if model is None else fp8_parts(model)

    def settled(self) -> StepCycle:
        """Return ``cycle``, with any pending sync committed. Local."""
        self.cycle.state.settle()
        return self.cycle

    def survey(self) -> Survey:
        """Return which of the model's matmul weights are in FP8 now, with their precision; nothing if the model no
        longer exists."""
        manager, model = self._manager, self._manager._model()
        if model is None:
            return Survey(())
        return survey_again(model, manager._selection, manager._found, self.cycle.job)


def managers_in(model: nn.Module) -> list[StateManager]:
    """Return the managers of the prepared models that ``model`` is, holds, or has parts of. Local."""
    wholes = (module.__dict__.get(WHOLE, module) for module in model.modules())
    return list(dict.fromkeys(whole.__dict__[ATTRIBUTE] for whole in wholes if ATTRIBUTE in whole.__dict__))


def get_manager(model: nn.Module) -> StateManager:
    """Return the manager of a prepared model, also through wrappers such as DDP. Local.

    Raises:
        ConfigurationError: the model holds no prepared model, or several.
    """
    found = managers_in(model)
    if len(found) != 1:
        what = "was not prepared" if not found else f"holds {len(found)} prepared models: pass one of them"
        raise ConfigurationError(f"the model {what}")
    return found[0]


def require_held(manager: StateManager, model: nn.Module, call: str) -> None:
    """Raise ConfigurationError unless the only prepared model that ``model`` is or holds is the manager's. Local.

    Args:
        call: the call and its argument, for the error.
    """
    if not managers_in(model) or get_manager(model) is not manager:
        raise ConfigurationError(
            f"{call}: that module does not hold the model that was prepared: pass the model that prepare() got, with "
            "its wrapper"
        )


def _existing(model: weakref.ref[nn.Module]) -> nn.Module:
    """Return the prepared model of a manager.

    Raises:
        ConfigurationError: it no longer exists.
    """
    found = model()
    if found is None:
        raise ConfigurationError("the model of this StateManager no longer exists")
    return found


def _log_changes(manager: StateManager, model: nn.Module) -> None:
    """Log which modules came after ``prepare`` or are gone, unless the last ``attach`` logged the same. One rank
    logs."""
    cycle = manager._cycle
    survey = Internals(manager).survey()
    new = survey.unprepared
    here = {of.slots[Role.INPUT] for part in fp8_parts(model) for of in part.slots.precisions}
    gone = [fqn for fqn, of in cycle.precisions.by_fqn.items() if of.slots[Role.INPUT] not in here]
    before, manager._changes = manager._changes, (new, gone)
    if before == (new, gone) or not (new or gone) or not cycle.state.logs:
        return
    texts = []
    if new:
        advice = "To convert them, call fp8dist.restore(model), then prepare() again"
        texts.append(f"modules that came after prepare() stay in high precision: {first_few(new)}. {advice}")
    replaced = [f"{fqn} ({why.reason})" for fqn, why in survey.left_out if fqn in gone and fqn not in new]
    if replaced:
        texts.append(f"modules that replaced converted ones stay in high precision: {first_few(replaced)}")
    if gone:
        texts.append(f"modules that prepare() converted are gone, and their slots stay unused: {first_few(gone)}")
    logger.log(logging.WARNING if new or replaced else logging.INFO, "fp8dist: attach(): %s", "; ".join(texts))


def _log_lost_ties(manager: StateManager, model: nn.Module) -> None:
    """Log which weights were tied at ``prepare``, or at an earlier ``attach``, and are not now. One rank logs."""
    before, manager._ties = manager._ties, ties_of(model)
    lost = [f"{name} to {kept}" for name, kept in lost_ties(model, before)]
    if lost and manager._cycle.state.logs:
        logger.warning(
            "fp8dist: attach(): weights are no longer tied as they were at prepare(), so each is trained apart: %s. "
            "parallelize_module(), fully_shard() of one of them alone, to_empty() and load_state_dict(…, assign=True) "
            "give each module a tensor of its own: tie them again, and then make the optimizer",
            first_few(lost),
        )
