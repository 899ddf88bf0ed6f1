"""StateManager: the one owner of a model's FP8 state, and what a user holds."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable, _JoinConfig
from torch.optim import Optimizer

from fp8dist.arguments import is_module_name, require_attachable
from fp8dist.checkpoint.state import Checkpoint, with_rank
from fp8dist.checkpoint.transformer_engine import ImportReport, NameMap, import_state
from fp8dist.consistency.checker import Event
from fp8dist.consistency.inventory import Scope
from fp8dist.consistency.report import DivergenceReport
from fp8dist.coverage import Coverage
from fp8dist.errors import ConfigurationError, NotAModelError
from fp8dist.modules.fp8_linear import fp8_linears
from fp8dist.modules.job_state import JobState, Tie
from fp8dist.monitoring.monitor import Monitor
from fp8dist.monitoring.watch import Watch
from fp8dist.names import check_keywords, did_you_mean, require_choice, require_int
from fp8dist.optimizer_hooks import hooked_optimizers, unwrap_optimizers
from fp8dist.parallel.ddp import ManagerJoinHook
from fp8dist.parallel.torch_internals import fsdp2_modules
from fp8dist.parallel.wrappers import reshard
from fp8dist.patterns import unmatched
from fp8dist.recipe import GEMMS, Gemm, Recipe, gemms_in_order
from fp8dist.settings import Policy, Settings
from fp8dist.state.arena import NONFINITE
from fp8dist.state.precision import Precisions
from fp8dist.state.slots import Slot, SlotSpec, clean_fqn, parse_role
from fp8dist.step.agreement import require_groups
from fp8dist.step.attachment import Attachment, local_weights
from fp8dist.step.calibration import calibration
from fp8dist.step.cycle import StepCycle
from fp8dist.step.step_watch import StepWatch
from fp8dist.sync.arena_sync import ArenaSync
from fp8dist.sync.groups import SyncGroup
from fp8dist_kernels import ops
from fp8dist_kernels.formats import FORMATS, Role

__all__ = ["ATTRIBUTE", "StateManager", "get_manager"]

ATTRIBUTE = "_fp8dist_manager"
"""Where a prepared model keeps its manager. The model owns the manager; the manager knows the model
only weakly."""


class StateManager(Joinable):
    """FP8 state of one model: made by ``fp8dist.prepare``, tied to its job by ``attach``.

    Methods marked COLLECTIVE must be called by all ranks of the groups. All others are local; those that
    read state first commit what is due, which may wait for a collective that was started earlier
    but never starts one, so they are safe on rank 0 alone.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        settings: Settings,
        job: JobState,
        precisions: Precisions,
        syncs: Sequence[ArenaSync],
        groups: Sequence[SyncGroup | None],
        aliases: Mapping[Slot, Slot],
        coverage: Coverage,
    ) -> None:
        self.recipe = recipe
        self.settings = settings
        self._model = weakref.ref(model)
        self._default = syncs[0]
        for sync in syncs:
            sync.owner = f"StateManager of {type(model).__name__}"
        self._aliases = dict(aliases)
        self._coverage = coverage
        self._cycle = StepCycle(settings, job, precisions, syncs, groups)
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
        self._cycle.steps = StepWatch(self._cycle, self._model)

    def __getstate__(self) -> dict[str, Any]:
        kept = ("recipe", "settings", "_default", "_aliases", "_coverage", "_cycle")
        return {"model": self._model(), **{name: getattr(self, name) for name in kept}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._model = weakref.ref(state.pop("model"))
        self.__dict__.update(state)
        self._init_transient()

    def __repr__(self) -> str:
        where = "attached" if self._job.attached else "not attached"
        state = f"{len(self.slots)} slots in {len(self._syncs)} arena(s)"
        return f"StateManager({state}, {self.recipe}, {where}, FP8: {self.coverage().summary})"

    if not TYPE_CHECKING:  # For type checkers, unknown attributes stay errors.

        def __getattr__(self, name: str) -> NoReturn:
            if is_module_name(name):
                raise NotAModelError(
                    f"a StateManager has no {name!r}: prepare() changes the model in place and returns its manager: "
                    "keep using the model"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ConfigurationError: the model is what is called."""
        raise NotAModelError(
            "a StateManager cannot be called: prepare() changes the model in place and returns its manager: keep using "
            "the model"
        )

    # Tying to a job ------------------------------------------------------------------------------

    @check_keywords("manager.attach")
    def attach(
        self,
        module: nn.Module | None = None,
        optimizer: Any = None,
        scaler: Any = None,
        boundary: Literal["optimizer", "manual"] = "optimizer",
        timeout: timedelta = timedelta(minutes=5),
    ) -> StateManager:
        """Place the state, agree with the other ranks, take weight amaxes, install hooks. COLLECTIVE.

        Call it after wrapping, sharding, materialising and loading the model. May be called again,
        for a new optimizer say.

        Args:
            module: the model as the loop calls it (DDP or FSDP around it, say). None: the prepared model.
            optimizer: one, or several: the boundary is the last one's step. None: the loop calls
                ``manager.step()``.
            scaler: the GradScaler, if there is one: the non-finite amaxes of steps that it skips are dropped.
            boundary: ``"manual"``: the optimizers only tell that weights have changed; the loop calls
                ``manager.step()``.
            timeout: how long to wait for the other ranks.

        Raises:
            ManifestMismatchError: on all ranks, when they were prepared differently.
            ConfigurationError: the call cannot work; says what to do.
        """
        require_choice("boundary", boundary, ("optimizer", "manual"), '"optimizer" or "manual"')
        require_attachable(module, optimizer, scaler, timeout)
        self._cycle.require("attach()")
        require_groups(self.settings, self._cycle.groups)
        optimizers = [] if optimizer is None else self._hookable(optimizer)
        model = self._require_model()
        if module is not None and get_manager(module) is not self:
            raise ConfigurationError("attach(module): that module does not hold the model that was prepared")
        whole = module if module is not None else model
        by_optimizer = boundary == "optimizer" and bool(optimizers)
        self._attachment.tie(model, whole, optimizers, scaler, by_optimizer, timeout)
        self._cycle.checker.watch(whole)
        return self

    def _hookable(self, optimizer: Any) -> list[Optimizer]:
        try:
            return hooked_optimizers(optimizer)
        except ConfigurationError:
            if self.settings.enabled:
                raise
            return []  # Nothing needs a boundary.

    def detach(self) -> None:
        """Undo ``attach``. COLLECTIVE only where the last sync found ranks to differ: call it on all ranks, between two
        optimizer steps. Does nothing where nothing is attached.

        All hooks on optimizers, loss scaler and DDP are taken off, and this rank shares its FP8 state with no other.
        The model keeps its FP8Linears, and this manager its state, bit for bit. The model then trains as between
        ``prepare`` and ``attach``: nothing is synchronised, no optimizer's step is a boundary, and so scales stand
        still and the second optimizer step without a boundary is refused (not inside ``no_fp8()``). ``attach`` may be
        called again, also with another wrapper or optimizer. ``fp8dist.restore(model)`` undoes ``prepare``.

        A fallback that the last sync asked for begins now; with ``next_step`` that is a step earlier than without
        ``detach``.

        A DDP hook of ``fp8dist.ddp.comm_hook`` does nothing meanwhile, because DDP cannot take one off. A CUDA graph
        that holds a step must not be replayed: its sync is in the graph.

        Raises:
            ConfigurationError: FSDP2 gathers weights in FP8, into buffers that it keeps; or this is inside a Join
                context, or between the start of a sync and the optimizer's step that ends it. Nothing was changed.
            DivergenceError: with policy "raise", when the last sync proved that ranks differ. Nothing was detached.
        """
        model = self._require_model()
        if self._job.tie in (Tie.ATTACHED, Tie.RESTORED):
            self._cycle.require("detach()")
            self._attachment.untie()
            self._cycle.checker.watch(model)

    def _restore(self) -> None:
        """See ``fp8dist.restore``."""
        model = self._require_model()
        self._attachment.restore(model)
        delattr(model, ATTRIBUTE)

    def _require_model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise ConfigurationError("the model of this StateManager no longer exists")
        return model

    # The step ------------------------------------------------------------------------------------

    def step(self) -> None:
        """The boundary, for loops without ``attach(optimizer=…)``: once per optimizer step. COLLECTIVE.

        Raises:
            ConfigurationError: an attached optimizer is the boundary, or ranks share state and
                ``attach()`` was not called.
            DivergenceError: with policy "raise", when the sync proved that ranks differ.
        """
        if self._job.by_optimizer:
            raise ConfigurationError(
                'the attached optimizer\'s step is the boundary already: use attach(…, boundary="manual") to call '
                "step() yourself"
            )
        self._cycle.boundary()
        if self._cycle.steps is not None:
            self._cycle.steps.take_notes(after_step=True)

    def poll(self) -> None:
        """After replays of a CUDA graph that holds steps, and once before it is captured: what the host does at a
        boundary. COLLECTIVE like one: on all ranks, after the same steps.

        The graph has the step counter, the sync and the commit. This waits for the last replay, reads what the replays
        since the last poll proved, acts on it, does the check that is due (``check_every``), and ends the reuse of
        weight casts. After each replay it names the rank and slot behind a difference; after every few replays it costs
        less, and tells that there was one.

        Raises:
            DivergenceError: with policy "raise", when a sync proved that ranks differ.
        """
        self._cycle.poll()

    @check_keywords("manager.watch")
    def watch(
        self,
        every: int,
        path: str | os.PathLike[str] | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
        jump: float | None = None,
        ranks: bool = False,
        resume_after: int | None = None,
    ) -> None:
        """Have each slot's amax, scale, saturation and underflow share written every so many steps. Local: on all ranks
        alike, before ``attach``. Each such step then has one all-reduce more, for the whole model, and one more pass
        over each tensor that is cast.

        One rank writes: a JSON object per slot and step (see ``Monitor``); with ``amax_sync=False`` each one does, of
        its own. Steps inside ``Join``, and in CUDA graphs, are left out.

        Args:
            path: of the JSON lines; ``{rank}`` is substituted. None: none.
            tensorboard: TensorBoard's log folder, if it is installed. None: none.
            jump: a scale that has changed by this factor or more since it was last looked at is logged, and an Event
                "jump". None: no alarm.
            ranks: tell which rank held each maximum: twice the bytes.
            resume_after: the step that the run goes on from: the next one is counted from there, and what ``path`` has
                of later ones is dropped. None: it is replaced.

        Raises:
            ConfigurationError: it is attached already, or ``every`` is not a positive int.
        """
        require_int("every", every, 1, what="a number of steps")
        self._cycle.require("watch()")
        lines, folder = (None if given is None else with_rank(given) for given in (path, tensorboard))
        writes = self._cycle.control.speaks or not self.settings.amax_sync
        monitor = Monitor(lines, folder, jump=jump, writes=writes, resume_after=resume_after)
        if self._cycle.watch is not None:
            self._cycle.watch.close()
        self._cycle.watch = Watch(every, ranks, monitor, resume_after)

    def on_event(self, callback: Callable[[Event], None]) -> None:
        """Have ``callback`` called with each Event. Local."""
        if not callable(callback):
            raise ConfigurationError(f"callback must be a function of an Event, got {callback!r}")
        self._cycle.checker.callbacks.append(callback)

    def check(
        self,
        parameters: bool = True,
        gradients: bool = False,
        optimizer: Any = None,
        policy: Policy = "raise",
    ) -> DivergenceReport:
        """Compare the whole FP8 state, and what else is known to be replicated, across the ranks. COLLECTIVE.

        One all-reduce of 104 bytes; with further sets of ranks (on meshes, say) one for each and two more. If something
        differs, more, to say what, where and on which ranks. Compared are FP8 state across the ranks that share it,
        parameters that DDP keeps equal (when ``attach`` was given the DDP module), and DTensors across their Replicate
        axes; ``fp8dist.check(module, group=…)`` compares whatever the caller vouches for. ``report.compared`` counts
        what was compared, by kind, and ``report.skipped`` says what was not, and why.

        On one rank there is nothing to compare with, and the report is consistent.

        Args:
            parameters: compare parameters.
            gradients: compare gradients: after they are reduced, before they are zeroed.
            optimizer: compare the state of this one, or of several.
            policy: what to do when ranks differ: "raise", "warn" (one rank logs what differs, and the report has it),
                or "repair" (copy from the majority, check again, raise where there is none or it differs still).

        Returns:
            The same findings on all ranks.

        Raises:
            DivergenceError: on all ranks, if the policy says so.
            ConfigurationError: there are several ranks, and nothing of all this is known to be the same on any two of
                them: says what to pass (not where FP8 is switched off: then one rank warns, once). Or inside a Join
                context: ranks without data would not come.
        """
        require_choice("policy", policy, ("raise", "warn", "repair"))
        optimizers = () if optimizer is None else tuple(unwrap_optimizers(optimizer))
        return self._cycle.check(Scope(parameters, gradients, optimizers), policy)

    def _checkable(self) -> StepCycle:
        """For ``fp8dist.check``: the arenas, committed as far as due. Local."""
        self._cycle.settle()
        return self._cycle

    # DDP: the early launch and Join (see fp8dist.ddp) ----------------------------------------------

    def _early_launcher(self, frozen_weights: bool = False) -> StepCycle:
        """For ``fp8dist.ddp.comm_hook`` and ``fp8dist.fsdp.comm_hook``: what launches before the boundary. Local.

        Args:
            frozen_weights: the launch comes late enough for the amaxes of frozen layers' gradients.

        Raises:
            ConfigurationError: a converted weight is frozen.
        """
        self._cycle.require("comm_hook(manager)")
        for linear in fp8_linears(self._require_model()):
            if not linear.weight.requires_grad and not frozen_weights:
                raise ConfigurationError(
                    f"{linear.fp8_slots.slots[Role.WEIGHT].fqn}.weight is frozen: its gradient amax comes after DDP's "
                    "last bucket. Leave fp8dist.ddp.comm_hook out; the sync then runs at the optimizer's step"
                )
        self._job.launches_early = True
        return self._cycle

    @property
    def _join_config(self) -> _JoinConfig:
        return self._job.join_config

    @_join_config.setter
    def _join_config(self, config: _JoinConfig) -> None:
        self._job.join_config = config

    def join_hook(self, **kwargs: Any) -> ManagerJoinHook:
        """For ``Join([ddp, manager])``, DDP first. Local."""
        ddp = self._attachment.ddp
        if ddp is None:
            raise ConfigurationError("Join([ddp, manager]) needs attach(ddp, …) first, with the DDP module")
        if self._job.launches_early:
            raise ConfigurationError("Join with comm_hook: ranks without data do not launch: leave the hook out")
        hook = ManagerJoinHook(self._cycle, ddp)
        self._job.join_hook = weakref.ref(hook)
        return hook

    @property
    def join_device(self) -> torch.device:
        """Device of the collectives."""
        return self._default.arena.device

    @property
    def join_process_group(self) -> Any:
        """Group of the first arena that has one."""
        return next((group.process_group for group in self._cycle.groups if group is not None), None)

    # Modes ---------------------------------------------------------------------------------------

    def no_fp8(self) -> AbstractContextManager[None]:
        """High precision in all forwards inside. Local: on all ranks alike, or for an evaluation on one.

        After ``prepare`` FP8 is on without any context. Amaxes are not recorded inside, unless ``recording`` says so.
        Unrelated to ``torch.autocast``. Where FSDP2 gathers weights in FP8, inputs and gradients are in high precision,
        and weights are what was gathered, dequantised.
        """
        return self._job.switched(in_fp8=False)

    def recording(self) -> AbstractContextManager[None]:
        """Record amaxes in all forwards inside, whatever the mode: in ``eval()``, with grad off, in high precision.
        Local: on all ranks alike. They count at the next boundary; ``calibrate`` makes one."""
        return self._job.switched(recording=True)

    def calibrate(self) -> AbstractContextManager[None]:
        """High precision inside, amaxes recorded, committed on exit. COLLECTIVE on a clean exit.

        Run any number of batches inside, forward and backward: from then on every slot that ran has a scale, and the
        next forward may be in FP8. Nothing else changes: gradients, buffers and the states of torch's random number
        generators (the CPU's, and that of the model's GPU) are those of before. An exception commits nothing and
        forgets what was recorded inside. For scales of gradients, run backwards too.

        Raises:
            ConfigurationError: an attached optimizer steps inside, or FSDP2 holds gradients that it has not reduced.
        """
        return calibration(self._cycle, self._attachment.module or self._require_model())

    @contextlib.contextmanager
    def swapped_weights(self) -> Iterator[None]:
        """For weights that are put in and taken out inside, an EMA's say: afterwards training goes on as if nobody had.
        Local, on all ranks alike.

        Without it nothing goes wrong either, but weights that were written to back and forth are cast with their own
        amaxes as soon as they are a quarter beyond their scales, and those that FSDP2 gathers in FP8 get new scales. So
        a run would not be bitwise the one without the evaluation.

            with manager.swapped_weights():
                ema.store_and_copy_to(model)
                evaluate(model)
                ema.restore(model)
        """
        self._cycle.require("swapped_weights()")
        module = self._attachment.module or self._require_model()
        self._cycle.settle()
        reshard(fsdp2_modules(module))  # What is held gathered is of the weights before.
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
        """Put modules, or single GEMMs of theirs, into high precision or back into FP8. Local: on all ranks alike (each
        sync proves that it was).

        Modules that come back into FP8 after ``steps`` have their amaxes recorded in the last 16 steps before, and so
        have scales; those that come back otherwise are cold. Under torch.compile they are compiled anew: what is
        compiled as a whole once for each set of modules in high precision, and no more than
        ``torch._dynamo.config.recompile_limit`` times (then eager; with ``fullgraph=True`` an error). Graphs that were
        captured stay as they are, and steps in them are not counted. What is gathered in FP8 (``fp8_all_gather``) is
        dequantised.

        Args:
            pattern: of fqns (fnmatch): "*" is all.
            precision: "high" or "fp8".
            gemms: of "fprop", "dgrad", "wgrad" those that are concerned.
            steps: for so many optimizer steps, beginning with the next; then everything is as before. None: until
                further notice.

        Returns:
            The fqns that matched.

        Raises:
            ConfigurationError: no FP8Linear matches, ``precision`` or ``gemms`` is none of those above, or ``steps`` is
                not a positive int.
        """
        self._cycle.require("set_precision()")
        require_choice("precision", precision, ("high", "fp8"), '"high" or "fp8"')
        self._require_match(pattern)
        if steps is not None:
            require_int("steps", steps, 1, what="None or a number of optimizer steps")
        chosen = gemms_in_order("gemms", gemms)
        return tuple(self._cycle.set_precision(pattern, chosen, precision == "high", steps))

    def _require_match(self, pattern: object) -> None:
        """Raise ConfigurationError unless a pattern matches an FP8Linear."""
        if not isinstance(pattern, str):
            raise ConfigurationError(f'pattern must be a string such as "blocks.0.*", got {pattern!r}')
        fqns = list(self._cycle.precisions.by_fqn)
        if any(fnmatch.fnmatchcase(fqn, pattern) for fqn in fqns):
            return
        others = [row for row in self._coverage if fnmatch.fnmatchcase(row.fqn, pattern)]
        if others:
            raise ConfigurationError(
                f"no FP8Linear matches {pattern!r}: {others[0].fqn} stays in high precision, {others[0].reason}"
            )
        raise ConfigurationError(f"no FP8Linear matches {unmatched([pattern], fqns)[0]}; there are {len(fqns)}")

    def coverage(self) -> Coverage:
        """Which of the model's matmul weights are in FP8 now, and why the others are not. Local.

        Prints as a table, and iterates ``CoverageRow``s. Weights are those that ``prepare`` found; what is in high
        precision now, by ``set_precision`` or a fallback, is left out of the sum.
        """
        return self._coverage.with_precisions(
            {fqn: precision.high for fqn, precision in self._cycle.precisions.by_fqn.items()}
        )

    def high_precision(self, fqn: str) -> tuple[Gemm, ...]:
        """The GEMMs of an FP8Linear that are in high precision now. Local."""
        precision = self._cycle.precisions.by_fqn.get(fqn) if isinstance(fqn, str) else None
        if precision is None:
            raise ConfigurationError(f"there is no FP8Linear {fqn!r}{self._meant(fqn)}")
        return precision.high

    def recipe_of(self, fqn: str) -> Recipe:
        """The recipe of an FP8Linear, or of the module that a slot was registered for. Local."""
        for sync in self._syncs:
            if any(slot.fqn == fqn for slot in sync.arena.index):
                return sync.arena.recipe
        raise ConfigurationError(f"there is no slot of {fqn!r}{self._meant(fqn)}; manager.slots lists them")

    # Foreign modules -----------------------------------------------------------------------------

    def register(self, fqn: str, role: str, format: str) -> Slot:
        """Add a slot for a module that is not an FP8Linear. Before ``attach`` and the first forward. Local.

        Args:
            fqn: a name that no slot of this role has.
            role: "input", "weight" or "grad_output".
            format: "e4m3" or "e5m2".
        """
        require_choice("format", format, tuple(FORMATS))
        if not isinstance(fqn, str):
            raise ConfigurationError(f"fqn must be a string, got {fqn!r}")
        if not self._default.arena.recipe.delayed:
            raise ConfigurationError("register() is for delayed scaling: other recipes keep no scales")
        slot = Slot(fqn, parse_role(role).value)
        if slot in self._aliases or slot in self.slots:
            raise ConfigurationError(f"there is a slot {slot} already")
        sync = self._default
        sync.arena = sync.arena.extended([SlotSpec(slot, FORMATS[format])])
        for linear in fp8_linears(self._require_model()):
            linear.fp8_slots.forget_views()
        return slot

    def record(self, fqn: str, role: str, x: Tensor) -> None:
        """Record the amax of ``x`` (any shape) for a slot. Local; counts at the next boundary.

        Records whenever it is called: whether this is training is the caller's to know. Cast with
        ``manager.scale(fqn, role)``.
        """
        sync, index = self._find(fqn, role)
        if not isinstance(x, Tensor):
            raise ConfigurationError(f"record() takes a tensor, got {x!r}")
        if self._job.enabled:
            sync.arena.place(x.device)
            ops.observe(x.detach(), sync.arena.pending[index], backend=self.settings.backend)

    # Reading and writing state -------------------------------------------------------------------

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All slots, sorted. A weight shared by several modules has one."""
        return tuple(sorted(slot for sync in self._syncs for slot in sync.arena.index))

    @property
    def steps(self) -> int:
        """Boundaries committed so far. Local; reads the device."""
        self._cycle.settle()
        return max(int(sync.arena.step) for sync in self._syncs)

    def _find(self, fqn: str, role: str) -> tuple[ArenaSync, int]:
        slot = Slot(str(fqn), parse_role(role).value)
        slot = self._aliases.get(slot, slot)
        for sync in self._syncs:
            index = sync.arena.index.get(slot)
            if index is not None:
                sync.settle()
                return sync, index
        raise ConfigurationError(f"there is no slot {slot}{self._meant(fqn)}; manager.slots lists them")

    def _meant(self, fqn: object) -> str:
        """For a message: the nearest names of modules, and what there is of this one."""
        known = sorted({slot.fqn for slot in self.slots})
        clean = clean_fqn(str(fqn))
        if fqn in known:
            return f" (of {fqn!r} there is {', '.join(slot.role for slot in self.slots if slot.fqn == fqn)})"
        reason = next((row.reason for row in self._coverage if row.fqn == fqn), "")
        if reason:
            return f" ({reason})"
        return f" (did you mean {clean!r}?)" if clean in known else did_you_mean(clean, known)

    def amax(self, fqn: str, role: str) -> Tensor:
        """The newest amax in the slot's history: 0-d float32 view into the state. Local."""
        sync, index = self._find(fqn, role)
        return sync.arena.amax[index]

    def scale(self, fqn: str, role: str) -> Tensor:
        """What the slot is multiplied by to cast to FP8: 0-d float32 view. Local. 1 until committed; a cold slot is
        cast with its own amax instead, unless ``warmup="unit"``. Of delayed scaling: other recipes leave it alone, but
        for weights that are gathered in FP8 under ``CurrentScaling``."""
        sync, index = self._find(fqn, role)
        return sync.arena.scale[index]

    def inv_scale(self, fqn: str, role: str) -> Tensor:
        """1 / scale: 0-d float32 view. Local."""
        sync, index = self._find(fqn, role)
        return sync.arena.inv_scale[index]

    def set_scale(self, fqn: str, role: str, scale: float) -> None:
        """Set a scale by hand; the slot is no longer cold. Local: do it on all ranks alike."""
        self._cycle.require("set_scale()")
        try:
            rounded = torch.tensor(float(scale), dtype=torch.float64).float()
        except (TypeError, ValueError, OverflowError):
            raise ConfigurationError(f"scale must be a number, got {scale!r}") from None
        if not (rounded > 0 and rounded.reciprocal().isfinite() and rounded.isfinite()):
            raise ConfigurationError(f"a scale and its inverse must be positive and finite in float32, got {scale!r}")
        sync, index = self._find(fqn, role)
        if not sync.arena.recipe.delayed:
            raise ConfigurationError(f"{fqn}: a scale is made from each tensor by {type(sync.arena.recipe).__name__}")
        sync.arena.set_scale(index, scale)
        self._job.invalidate_casts()

    def amax_history(self, fqn: str, role: str) -> Tensor:
        """float32[history_len] copy: oldest first, newest last, zeros where not yet filled. Local."""
        sync, index = self._find(fqn, role)
        return sync.arena.window(index)

    def metrics(self) -> dict[str, float]:
        """Numbers for any logger: slots, cold ones, non-finite and saturated amaxes, modules in high precision, how
        often one fell back, and what the syncs and checks of this rank cost. Local; reads the device."""
        self._cycle.settle()
        arenas = [sync.arena for sync in self._syncs]
        counters = [sync.counters for sync in self._syncs]
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
        }

    def take_waits(self) -> list[float]:
        """How long this rank waited in its syncs, in milliseconds: a number for each step that has ended since the last
        call, over all arenas. Local; on CUDA it waits for the device.

        A step counts what was waited for between the end of the last one and its own: under ``update="next_step"``, and
        with DDP's hook, that is the wait for the previous sync. On CUDA it is time in which the stream stood still, by
        events; the host's is ``metrics()["fp8/sync_wait_ms"]``. A rank that waits little is the one for which the
        others wait; where gradients are reduced first, they wait there. Steps in CUDA graphs are left out, and NaN
        stands for all but the newest 4,096.
        """
        return self._cycle.waits.take()

    def refresh_weights(self) -> None:
        """Derive weight scales anew, after weights were written to by anything but an optimizer. COLLECTIVE.

        Their histories are emptied: they told of other weights. Needed where FSDP2 gathers weights in FP8 and they were
        written to through ``.data``. Elsewhere casts notice by themselves (see README, "Mistakes"); this gives the
        slots their new scales at once. Until the step ends, later inputs and gradients that no longer fit their scales,
        because weights have grown, are cast with their own amaxes.
        """
        self._cycle.require("refresh_weights()", switched_off=True)
        self._cycle.settle()
        self._job.invalidate_casts()
        if not self.settings.enabled:
            return
        sharded = self._cycle.sharded
        if sharded is not None:
            sharded.reshard()
        model = self._require_model()
        before = [(linear.fp8_slots, linear.fp8_slots.weight_scale()) for linear in fp8_linears(model)]
        self._cycle.derive_weight_scales(local_weights(model), "all")
        for slots, scale in before:  # Later inputs, whose scales are of the old weights, may be as much larger.
            slots.tell_of_new_scale(scale)
        if sharded is not None:
            sharded.accept()
        if self._cycle.steps is not None:
            self._cycle.steps.take_notes()

    # Saving and loading --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, bytes]:
        """This rank's whole FP8 state as opaque bytes, by key. Local.

        Keys say which ranks share the state: "shared" (all of them, or there is one), "ranks<first>-<identity>" (those
        of a smaller group), "rank<r>" (``amax_sync=False``). So checkpoints that merge equal keys of several ranks keep
        apart what differs, and "shared" state can be loaded on any number of ranks.

        With torch.distributed.checkpoint put the manager itself into what is saved and loaded:
        ``dcp.save({"model": model, "optim": …, "fp8": manager})``. A checkpoint that lacks one of these keys is then an
        error of its own, before anything of ours is asked.
        """
        return Checkpoint(self._cycle).state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, convert: bool = False) -> None:
        """Take over a saved state, matched by slot name. Local: load the same on all ranks.

        Amaxes that wait for a boundary are thrown away. ``history_len``, ``update`` and ``warmup`` may be others than
        when it was saved: a longer history keeps its newest entries, a shorter one gets zeros in front.

        Args:
            strict: False: a key or slots that are missing here or there are logged, and what is there is taken.
                ``dcp.load`` is always strict when it is given the manager; give it the dict instead:
                ``state = {"fp8": manager.state_dict()}; dcp.load(state, …); manager.load_state_dict(state["fp8"], …)``.
            convert: the state may be that of a recipe with another format, margin, power_of_two or amax_algo. Scales of
                the slots concerned are derived anew from their windows; where a window gives none (weights whose scale
                came from ``attach``: all zeros), from the amax that the old scale stands for,
                ``(old_fp8_max / 2**old_margin) / old_scale``. Cold slots stay cold.

        Raises:
            CheckpointError: it does not fit; nothing was changed.
        """
        Checkpoint(self._cycle).load_state_dict(state_dict, strict, convert)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a safetensors file, atomically. Local. ``{rank}`` in the path is substituted."""
        Checkpoint(self._cycle).save(path)

    def load(self, path: str | os.PathLike[str], strict: bool = True, convert: bool = False) -> None:
        """Read what ``save`` wrote; see ``load_state_dict``. Local.

        Raises:
            CheckpointError: missing, damaged or foreign file, or it does not fit; nothing was changed.
        """
        Checkpoint(self._cycle).load(path, strict, convert)

    def load_transformer_engine(
        self, state_dict: Mapping[str, object], name_map: NameMap | None = None
    ) -> ImportReport:
        """Take over the FP8 state of TransformerEngine's modules: the ``_extra_state`` entries of their state_dict.

        Local: do it on all ranks alike. Nothing of a pickle is imported or called. Amaxes that wait for a boundary are
        thrown away. ``fp8dist.checkpoint.transformer_engine.import_state`` says what becomes of scales and histories.

        Args:
            name_map: what modules are called there: a mapping from the fqn here, or a function of it. A name, or (name,
                GEMM) for a module with two, as LayerNormMLP: ``{"mlp.fc2": ("layernorm_mlp", 1)}``. None: as here.

        Returns:
            What matched, and what did not.

        Raises:
            ConfigurationError: ``name_map`` names what there is not; nothing was changed.
            CheckpointError: an entry is damaged, or more than data; nothing was changed.
        """
        self._cycle.require("loading state")
        self._cycle.settle()
        report = import_state([sync.arena for sync in self._syncs if sync.arena.recipe.delayed], state_dict, name_map)
        for sync in self._syncs:
            sync.abandon()
        self._cycle.state_loaded([slot for slot, _ in report.matched])
        return report

    def reset(self) -> None:
        """Forget all FP8 state. Local: do it on all ranks alike. Never needed between models."""
        self._cycle.require("loading state")
        for sync in self._syncs:
            sync.abandon()
            sync.arena.reset()
        self._cycle.state_loaded(self.slots)


def get_manager(model: nn.Module) -> StateManager:
    """The manager of a prepared model, also through wrappers such as DDP. Local.

    Raises:
        ConfigurationError: none, or several, of its modules are prepared models.
    """
    found = [m.__dict__[ATTRIBUTE] for m in model.modules() if ATTRIBUTE in m.__dict__]
    if len(found) != 1:
        what = "was not prepared" if not found else f"holds {len(found)} prepared models: ask for one of them"
        raise ConfigurationError(f"the model {what}")
    manager: StateManager = found[0]
    return manager
