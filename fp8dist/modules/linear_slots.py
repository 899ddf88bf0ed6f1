"""LinearSlots: an FP8Linear's access to the FP8 state, and the casts of its tensors by the recipe."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8dist.errors import ConfigurationError
from fp8dist.modules.casters import SITES, Cast, Request, caster_for
from fp8dist.modules.fp8_weight import FP8Weight
from fp8dist.modules.job_state import JobState
from fp8dist.modules.modes import Mode, Modes
from fp8dist.modules.outgrown import (
    OUTGROWN,
    Growth,
    Outgrown,
    amax_of,
    either,
    limits_of,
    scale_for,
)
from fp8dist.modules.unsupported import require_eager
from fp8dist.modules.weight_notes import SAMPLED_WEIGHTS, WeightNote, sample_of, stored_parameters
from fp8dist.state.arena import SlotState
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.groups import is_dtensor, largest_of_parts, local_part
from fp8dist.state.precision import Precision
from fp8dist.state.recipe import Gemm, Recipe
from fp8dist.state.slots import Slot
from fp8dist_kernels import direct, ops
from fp8dist_kernels.formats import Role
from fp8dist_kernels.graphs import capturing
from fp8dist_kernels.multipliers import ProductError

__all__ = ["SITES", "Cast", "LinearSlots", "States", "refusal"]

logger = logging.getLogger("fp8dist")

FIRST_LOOK = 64
"""Number of backwards without a boundary after which a module's weight is first compared, with its value half as many
backwards ago."""


States = tuple[SlotState, SlotState, SlotState]
"""The states of a module's input, weight and grad_output slots."""


@dataclass(frozen=True)
class WeightCast:
    """A cached cast of a weight."""

    cast: Cast
    weight: weakref.ref[Tensor]
    key: tuple[int, int, int]
    recorded: bool

    def serves(self, weight: Tensor, key: tuple[int, int, int], record: bool) -> bool:
        """True if it can replace a cast of ``weight`` now. Compares the object: another tensor may have the same
        address, such as a temporary of functional_call or of a parametrization."""
        return self.weight() is weight and self.key == key and (self.recorded or not record)


class LinearSlots:
    """An FP8Linear's access to the FP8 state: its three slots and how it may use them.

    ``precision``: which GEMMs run in high precision. ``caster``: casts its tensors. ``note``: of the weight. If the
    note says that FSDP frees the weight between forward and backward, its casts are not cached, because they would take
    the memory that sharding saves.
    """

    def __init__(
        self,
        sync: ArenaSync,
        weight_sync: ArenaSync,
        job: JobState,
        recipe: Recipe,
        slots: dict[Role, Slot],
        name: str = "weight",
    ) -> None:
        """``name``: of the module's parameter."""
        self.sync = sync
        self.weight_sync = weight_sync
        self.job = job
        self.recipe = recipe
        self.slots = slots
        self.precision = Precision(slots, recipe.high_precision)
        self.caster = caster_for(recipe, job, sync, self.precision)
        self.name = name
        self.note = WeightNote(name)
        self._backwards = self._boundary = self._changes = 0
        self._look_at = FIRST_LOOK // 2
        self._sample: Tensor | None = None
        self._modes = Modes(self.fqn)
        self.limit: float | None
        self.eval_limit: float | None
        self.limit, self.eval_limit = limits_of(recipe)
        self._states: States | None = None
        self._cast: WeightCast | None = None

    def __getstate__(self) -> dict[str, Any]:
        fresh = {"_states": None, "_cast": None, "_sample": None, "_modes": Modes(self.fqn)}
        return {**self.__dict__, **fresh, "note": self.note.copied()}

    @property
    def fqn(self) -> str:
        """The module's fqn in its model. Of a grouped product, the fqn that the fqns of its experts begin with."""
        return self.slots[Role.INPUT].fqn

    @property
    def fqns(self) -> tuple[str, ...]:
        """The fqns of the module's input slots: one, or one for each expert."""
        return (self.fqn,)

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """What ``set_precision`` changes: one for the module, or one for each expert."""
        return (self.precision,)

    @property
    def weight_slots(self) -> tuple[Slot, ...]:
        """The slots of the weight: one, or one for each expert."""
        return (self.slots[Role.WEIGHT],)

    @property
    def weight_casts(self) -> int:
        """How many calls of ops cast the weight, if both copies are made."""
        return 1

    @property
    def weight_place(self) -> int | slice:
        """The place of the weight's slot in its arena, or the places of those of the experts."""
        return self.weight_sync.arena.index[self.slots[Role.WEIGHT]]

    def weights_of(self, weight: Tensor, first: int = 0) -> Iterator[tuple[Slot, Tensor]]:
        """Iterate over the parts of this rank's weight that have slots of their own, and these slots.

        Args:
            first: of the experts that this rank holds.
        """
        yield self.slots[Role.WEIGHT], weight

    def settle(self) -> None:
        """Commit a pending sync, before a scale is read. Graphs cannot; for them the optimizer's post-hook commits (see
        ``StepCycle.weights_changed``)."""
        if torch.compiler.is_compiling():
            return
        if capturing(self.sync.arena.device):
            self.job.graphed = True
        self.sync.settle()
        self.weight_sync.settle()

    def states(self, device: torch.device) -> States:
        """Return the states of (input, weight, grad_output), after a pending commit. Places the arenas on first use.

        Raises:
            ConfigurationError: the backend does not run on ``device``.
        """
        self.settle()
        syncs = (self.sync, self.weight_sync, self.sync)
        for sync in syncs[:2]:
            if sync.arena.device != device or not sync.arena.placed:
                sync.arena.place(device)
        if self._states is None:
            try:
                ops.require_backend(self.job.backend, device)
            except ValueError as error:
                raise ConfigurationError(str(error)) from None
            input_, weight, grad = map(self._state_of, (Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT), syncs)
            self._states = (input_, weight, grad)
        return self._states

    def _state_of(self, role: Role, sync: ArenaSync) -> SlotState:
        return sync.arena.state_of(self.slots[role])

    def forget_views(self) -> None:
        """Drop the views of an arena that was rebuilt. The next use creates new ones."""
        self._states = self._cast = None

    @property
    def wanted(self) -> bool:
        """True if this step's sync or a watch needs amaxes."""
        return self.sync.every_step or self.job.measuring

    @property
    def observing(self) -> bool:
        """True if forwards in high precision record amaxes in training. Compiled forwards guard on it: read it late."""
        return self.precision.observing

    def mode(self, module: nn.Module, x: Tensor, weight: Tensor, high: Any, all_high: bool) -> tuple[Mode, bool]:
        """Return how this forward of ``module`` computes, and True if it records amaxes. Takes the notes of it. A
        forward that a backward repeats computes as it did before, whatever has changed since: see ``Modes``. Compiled
        forwards read the mode anew.

        Args:
            high: the GEMMs that are in high precision now, as in ``Mode``.
            all_high: True if these are all.

        Raises:
            ConfigurationError: FP8 supports neither ``x`` nor the transform that calls the module. No note was taken.
        """
        job, training = self.job, module.training
        in_fp8, recording = job.in_fp8, job.recording
        casts = in_fp8 and not all_high and (training or job.eval_precision == "fp8")
        observes = in_fp8 and not casts and self.observing
        compiling, grad = torch.compiler.is_compiling(), torch.is_grad_enabled()
        repeated = None if compiling else self._modes.repeated(grad)
        if repeated is not None:
            casts, _, recording, training, *_ = repeated
        record = self.wanted and (recording or (training and grad))
        if compiling:
            limit = self.limit if training else self.eval_limit
            return Mode(casts, observes, recording, training, high, Outgrown(limit)), record
        if casts or recording or (observes and record):
            require_eager(x, weight, module, self.fqn)
        if job.microbatches is not None:
            if record:
                job.microbatches.forward(*self.fqns)
            elif training and repeated is None:
                job.microbatches.unrecorded_forward()
        if casts:
            outgrown = self.outgrown(module, record, training)
        else:
            outgrown = Outgrown(None)
            self.note.idle_in(job.boundaries)
        if repeated is not None:
            return repeated, record
        mode = Mode(casts, observes, recording, training, high, outgrown)
        self._modes.calls.add(mode, grad)
        return mode, record

    def observe(self, x: Tensor, state: SlotState) -> None:
        """Record the amax of a tensor that is not cast."""
        self.caster.observe(x.detach(), state)

    def matmul(
        self,
        a: Tensor,
        b: Tensor,
        inv_scale_a: Tensor,
        inv_scale_b: Tensor,
        dtype: torch.dtype,
        gemm: Gemm,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Call ``ops.matmul`` with this manager's backend, and the accumulation that the recipe has for ``gemm``.

        Raises:
            ConfigurationError: torch refuses the product. In compiled code the ``ProductError`` itself.
        """
        fast = gemm in self.recipe.fast_accumulation
        try:
            return direct.matmul(
                a,
                b,
                inv_scale_a,
                inv_scale_b,
                dtype,
                bias=bias,
                fast_accumulation=fast,
                backend=self.job.backend,
                **({} if self.job.tap is None else self.caster.tap_of(gemm)),
            )
        except ProductError as error:
            raise refusal(self.fqn, gemm, error) from error

    def matmul_into(
        self, a: Tensor, b: Tensor, inv_scale_a: Tensor, inv_scale_b: Tensor, total: Tensor, gemm: Gemm
    ) -> None:
        """Call ``ops.matmul_into``, as ``matmul`` does ``ops.matmul``: add the product to ``total``."""
        try:
            direct.matmul_into(
                a,
                b,
                inv_scale_a,
                inv_scale_b,
                total,
                fast_accumulation=gemm in self.recipe.fast_accumulation,
                backend=self.job.backend,
                **({} if self.job.tap is None else self.caster.tap_of(gemm)),
            )
        except ProductError as error:
            raise refusal(self.fqn, gemm, error) from error

    def outgrown(self, linear: nn.Module, record: bool, training: bool) -> Outgrown:
        """Return the overflow ratios above which a forward's tensors are cast with their own amaxes. Notes that the
        weight is used.

        The result is the same on each shard of a weight, and on one rank alone. Captured forwards do not look for
        writes, nor do compiled ones: a version counter would become a constant of the graph, or a guard.

        Args:
            record: True if this forward records amaxes. Loaded FP8 state is right for the weight that such a
                forward finds. A reentrant checkpoint records when it repeats its forward.
            training: False in eval mode.
        """
        if not self.recipe.delayed or capturing(self.weight_sync.arena.device):
            return Outgrown(self.limit if training else self.eval_limit)
        note = self.note
        note.cast_at(self.job.boundaries)
        if record and note.awaited:
            note.take(linear)
        limits = self._limits(linear, training)
        if record:
            note.was_recorded()
        return limits

    def _limits(self, linear: nn.Module, training: bool) -> Outgrown:
        limit, written = self.limit, self.note.written(linear) or self.note.written_in_place
        others = limit if written and self.note.copy_written else None
        return Outgrown(
            limit if training else self.eval_limit, others, written, self._upstream(not training), not training
        )

    def _upstream(self, in_eval: bool) -> Tensor | None:
        """Return 0-d bool: True if another module's weight has outgrown its scale; see ``Growth``. None: nobody looked.
        What eval forwards found is for eval forwards: an evaluation leaves no trace in training."""
        found: Tensor | None = None
        for growth in (self.job.growth, self.job.eval_growth if in_eval else None):
            if growth is not None and growth.boundaries == self.job.boundaries:
                of_others = growth.of_others(id(self))
                found = found if of_others is None else either(found, of_others)
        return found

    def _tell_of_growth(self, cast: Cast, state: SlotState, outgrown: Outgrown) -> None:
        """Report to other modules whether a weight, which was just cast, has outgrown its scale."""
        inv_scale = cast.rows_inv_scale if cast.rows.numel() else cast.columns_inv_scale
        self._add_growth((inv_scale * state.scale > OUTGROWN) & ~state.cold, in_eval=not outgrown.written)

    def note_load(self, module: nn.Module) -> None:
        """Keep a sample of the weight as it is before other values are loaded into it, for ``StepWatch``. Local."""
        loads, stored = self.job.loads, stored_parameters(module, self.name)
        if len(loads) < SAMPLED_WEIGHTS and stored and not stored[0].is_meta:
            loads.setdefault(self.note, sample_of(stored[0]))

    def weight_scale(self) -> Tensor:
        """Return a float32 copy of the weight's scale, 0-d, or of those of the experts, [E]; NaN while a slot is
        cold."""
        arena, place = self.weight_sync.arena, self.weight_place
        return torch.where(arena.cold[place], torch.nan, arena.scale[place])

    def tell_of_new_scale(self, before: Tensor, scale: Tensor) -> None:
        """Report to other modules whether the weight has outgrown the scale ``before``, and so gets this scale."""
        if self.recipe.delayed:
            self._add_growth(before > OUTGROWN * scale)

    def _add_growth(self, grown: Tensor, in_eval: bool = False) -> None:
        """Report ``grown``, 0-d bool, to all forwards until the next boundary, or to eval forwards only."""
        job = self.job
        growth = job.eval_growth if in_eval else job.growth
        if growth is None or growth.boundaries != job.boundaries:
            growth = Growth(job.boundaries)
            if in_eval:
                job.eval_growth = growth
            else:
                job.growth = growth
        growth.add(id(self), grown)

    def gradient_cast(
        self,
        gradient: Tensor,
        state: SlotState,
        record: bool,
        rows: bool,
        columns: bool,
        outgrown: Outgrown,
        sums: Tensor | None,
    ) -> Cast:
        """Cast a gradient; see ``Request``. ``outgrown``: the forward's."""
        limits = self._limits_now(outgrown)
        return self.caster.cast(gradient, Request(state, Role.GRAD_OUTPUT, rows, columns, record, limits, sums=sums))

    def _limits_now(self, outgrown: Outgrown) -> Outgrown:
        """Return the limits for a gradient from those of the forward: by now, later modules have cast their weights,
        too."""
        if torch.compiler.is_compiling():
            return outgrown
        upstream = self._upstream(outgrown.once)
        return outgrown if upstream is outgrown.upstream else outgrown._replace(upstream=upstream)

    @property
    def adds_in_cast(self) -> bool:
        """True if ``gradient_cast`` can add up columns. Otherwise ``bias_gradient`` reads the gradient again: for
        scales by parts, and in compiled graphs, where Inductor makes the casts."""
        return self.recipe.by == "tensor" and not torch.compiler.is_compiling()

    def bias_gradient(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the gradient of a bias [out_features]. The order of the additions is the same on all backends."""
        total: Tensor = direct.add_up(gradient, dtype, backend=self.job.backend)
        return total

    def weight_cast(
        self,
        weight: Tensor,
        parameter: Tensor,
        state: SlotState,
        record: bool,
        rows: bool,
        columns: bool,
        outgrown: Outgrown,
    ) -> Cast:
        """Return the weight in FP8: as gathered, cast now, or cached from an earlier microbatch of this step. Columns
        are empty if ``backward_cast`` will compute them.

        Casts are not reused for weights that FSDP frees, with grad disabled (an eval may swap weights unnoticed), or if
        ``_reuse_key`` returns None.

        Args:
            rows, columns: True if fprop and dgrad run in FP8.
            outgrown: the ``outgrown`` of this forward.
        """
        if isinstance(weight, FP8Weight):
            return self._gathered_cast(weight, state, outgrown)
        for_backward = torch.is_grad_enabled() and not self.note.resharded
        columns = columns and for_backward
        owner = local_part(parameter)  # Not ``weight``: DTensor.to_local() returns a new view at each call.
        key = self._reuse_key(weight, parameter) if for_backward else None
        if key is not None and self._cast is not None and self._cast.serves(owner, key, record):
            return self._cast.cast
        cast = self._cast_weight(weight, state, record, rows, columns, outgrown)
        if (outgrown.written or outgrown.once) and (rows or columns):
            self._tell_of_growth(cast, state, outgrown)
        if key is not None:
            self._cast = WeightCast(cast, weakref.ref(owner), key, record)
        return cast

    def _gathered_cast(self, weight: FP8Weight, state: SlotState, outgrown: Outgrown) -> Cast:
        """Return the weight as it was gathered in FP8."""
        if outgrown.written:  # A scale that did not fit was derived anew, without a history.
            self._add_growth((self.weight_sync.arena.amax[self.weight_place] == 0) & ~state.cold)
        if outgrown.once:
            self._add_growth((weight.inv_scale * state.scale > OUTGROWN) & ~state.cold, in_eval=True)
        nothing = weight.rows.new_empty(0)
        return Cast(weight.rows.contiguous(), weight.inv_scale.contiguous(), nothing, nothing)

    def of_parts(self, limits: Outgrown, weight: Tensor, parameter: Tensor) -> Outgrown:
        """In eval mode, let all ranks that tensor parallelism gives a part of the weight cast with one scale, as an
        export does. COLLECTIVE over these ranks: they all run this forward.

        Args:
            weight: this rank's part.
            parameter: the weight; a DTensor if it has parts.
        """
        if not (limits.once and is_dtensor(parameter)) or isinstance(weight, FP8Weight):
            return limits
        cuts = [(parameter.device_mesh, axis) for axis, each in enumerate(parameter.placements) if each.is_shard()]
        if not cuts:
            return limits
        amax = largest_of_parts(amax_of(weight), cuts)
        state = self.states(weight.device)[1]
        return limits._replace(scale=scale_for(amax, state, self.recipe, limits.weight))

    def eval_cast(self, linear: nn.Module, weight: Tensor, parameter: Tensor | None = None) -> Cast:
        """Return the row-major cast with which an eval forward of ``linear`` multiplies now. Local, but see
        ``of_parts``; commits a pending sync. Records nothing, and leaves no note of a forward.

        Args:
            weight: as the forward multiplies with it: [out_features, in_features] on this rank.
            parameter: see ``of_parts``. None: the weight has no parts.
        """
        state = self.states(weight.device)[1]
        limits = self._limits(linear, training=False) if self.recipe.delayed else Outgrown(None)
        limits = limits if parameter is None else self.of_parts(limits, weight, parameter)
        return self._cast_weight(weight, state, False, True, False, limits, role=None)

    def shard_cast(
        self, shard: Tensor, first: int, amax: Tensor, record: bool, scale: Tensor, role: Role | None = None
    ) -> Cast:
        """Return this rank's shard of the weight in FP8, row-major, with the scale that all ranks share. Local; commits
        a pending sync.

        Args:
            scale: 0-d float32, or [E] of all experts.
            first: of the experts that have a part in the shard.
            amax: where to record: 0-d float32, or [E] of all experts.
            role: of the cast whose tap is told.
        """
        state, limits = self.states(self.weight_sync.arena.device)[1], Outgrown(None, scale=scale)
        return self.caster.cast(
            shard, Request(state, Role.WEIGHT, True, False, record, limits, place=amax, tapped=role is not None)
        )

    def _reuse_key(self, weight: Tensor, parameter: Tensor) -> tuple[int, int, int] | None:
        """Return a key that stays equal while a cast can be reused. None under torch.compile (a guard on the cast would
        break), under a dispatch mode (selective checkpointing counts ops by position), during capture (the graph must
        contain the cast), for a weight made under inference_mode, whose writes torch does not count, and where torch
        swaps the contents of parameters to move them: it refuses those that have weak references, as a cast has."""
        if (
            not self.job.reuse_casts
            or torch.compiler.is_compiling()
            or torch._C._len_torch_dispatch_stack() > 0
            or capturing(weight.device)
            or parameter.is_inference()
            or torch.__future__.get_swap_module_params_on_conversion()
        ):
            return None
        return self.job.generation, weight.data_ptr(), parameter._version

    def casts_in_backward(self, weight: Tensor) -> bool:
        """True if the backward makes its own FP8 copy of the weight."""
        return self.note.resharded or isinstance(weight, FP8Weight)

    def backward_cast(self, weight: Tensor, state: SlotState, outgrown: Outgrown) -> tuple[Tensor, Tensor]:
        """Return (FP8 [in_features, out_features], inverse scales) of a weight that FSDP has just gathered again.
        Scales change at commits only, so within a step the bytes are the forward's. ``outgrown``: the forward's."""
        if isinstance(weight, FP8Weight):
            inv_scale = weight.inv_scale if weight.inv_scale.ndim < 2 else weight.inv_scale.mT.contiguous()
            rows = weight.rows
            turned = rows.mT  # Contiguous if the weights are stored as [E, in_features, out_features].
            for_matmul = rows.ndim == 2 and rows.is_contiguous()  # It transposes them where the device needs it.
            if not (for_matmul or turned.is_contiguous()):
                turned = direct.transpose(rows, backend=self.job.backend)
            return turned, inv_scale
        # Not the slot's own element: a compiled backward must not save a tensor that the forward has written to.
        nowhere = torch.empty_like(state.scale)
        cast = self._cast_weight(weight, state, False, False, True, outgrown, nowhere)
        return cast.columns, cast.columns_inv_scale

    def _cast_weight(
        self,
        weight: Tensor,
        state: SlotState,
        record: bool,
        rows: bool,
        columns: bool,
        outgrown: Outgrown,
        pending: Tensor | None = None,
        role: Role | None = Role.WEIGHT,
    ) -> Cast:
        stored, transposed = weight.detach(), not weight.is_contiguous() and weight.mT.is_contiguous()
        if transposed:  # Cast the weight as it lies in memory: its rows are the columns of the product's weight.
            stored, rows, columns = stored.mT, columns, rows
        tapped = role is not None
        request = Request(state, Role.WEIGHT, rows, columns, record, outgrown, place=pending, tapped=tapped)
        cast = self.caster.cast(stored, request)
        return cast.transposed() if transposed else cast

    def count_backward(self, recorded: bool) -> None:
        """Warn once if the weight changes between backwards without a boundary. Raise if ``attach`` is missing.

        ``StepWatch`` checks torch optimizers at their steps; this check is for updates without such a step. Version
        counters show most of these at the second change. For the others, the weight itself is compared after 64, 128,
        256, … recorded backwards, which waits for the device.
        """
        if torch.compiler.is_compiling():
            return
        if not recorded:
            if self.sync.every_step:
                self.note.backward_at = self.job.boundaries
            return
        self.note.backward_at = self.note.recorded_at = self.job.boundaries
        if self.job.microbatches is not None:
            self.job.microbatches.backward()
        if self.job.unsynced:
            self.job.said_unsynced = True
            logger.warning(
                "%s is trained, but attach() was not called: FP8 state is not synchronised, and scales do not follow",
                self.slots[Role.INPUT].fqn,
            )
        if self._boundary != self.job.boundaries:
            self._boundary, self._backwards, self._changes, self._sample = self.job.boundaries, 0, 0, None
        if self.job.shared and not self.job.attached:
            self._require_attached()
            return
        self._backwards += 1
        if self.job.said_unbounded or self.job.stepping or not self.sync.every_step:
            return
        self._changes += self.note.changed_between_backwards()
        look = self._backwards == self._look_at
        self._look_at *= 2 if look else 1
        if self._changes > 1 or (look and self._changed_unseen()):
            self.job.said_unbounded = True
            logger.warning(
                "fp8dist: the weight of %s changes from backward to backward, but no step of FP8 state ends: its scale "
                "stands still. It is not updated by a torch optimizer that attach(optimizer=…) knows: call "
                "manager.step() once per optimizer step",
                self.slots[Role.INPUT].fqn,
            )

    def _require_attached(self) -> None:
        """Raise ConfigurationError if the weight has changed twice. For models that await ``attach``, and whose
        optimizer steps copies of their weights, as ZeRO's does: ``StepWatch`` sees the others. Waits for the device."""
        self._changes += self._changed_unseen()
        if self._changes > 1:
            raise ConfigurationError(
                f"{self.slots[Role.INPUT].fqn} is trained, but attach() was not called: FP8 state is not synchronised, "
                "and scales do not follow: call manager.attach(…) before the training (with DeepSpeed, "
                "fp8dist.integrations.deepspeed.attach(manager, engine))"
            )

    def note_backward(self) -> None:
        """Tell the microbatches of a measured step that this module runs a backward. Local."""
        if not torch.compiler.is_compiling() and self.job.microbatches is not None:
            self.job.microbatches.backward()

    def _changed_unseen(self) -> bool:
        """True if the weight differs from its last sample, taken since the last boundary. Waits for the device."""
        stored = self.note.stored
        if not stored or capturing(self.sync.arena.device):
            return False
        before, self._sample = self._sample, sample_of(stored[0])
        return before is not None and before.shape == self._sample.shape and not torch.equal(before, self._sample)


def refusal(fqn: str, gemm: Gemm, error: ProductError) -> ConfigurationError:
    """Return the error of a user whose machine cannot compute a product of this module."""
    return ConfigurationError(f"{fqn}: {gemm}: {error}")
