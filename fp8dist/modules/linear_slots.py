"""LinearSlots: an FP8Linear's access to the FP8 state, the casts of its weight, and its products.

What belongs to one module is kept beside: its caster (``casters.py``), the policy of written weights
(``write_policy.py``), the cache of its weight's cast (``weight_cache.py``), the monitor of its backwards
(``loop_monitor.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fp8dist.errors import ConfigurationError
from fp8dist.modules.casters import SITES, Cast, Request, caster_for
from fp8dist.modules.fp8_weight import FP8Weight
from fp8dist.modules.job_state import JobState
from fp8dist.modules.loop_monitor import LoopMonitor
from fp8dist.modules.modes import Choice, Mode, Modes
from fp8dist.modules.outgrown import Outgrown
from fp8dist.modules.unsupported import require_eager
from fp8dist.modules.weight_cache import WeightCache
from fp8dist.modules.weight_notes import WeightNote
from fp8dist.modules.write_policy import WritePolicy
from fp8dist.state.arena import SlotViews
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.groups import local_part
from fp8dist.state.microbatches import Microbatches
from fp8dist.state.precision import Changes, Precision
from fp8dist.state.recipe import Gemm, Recipe
from fp8dist.state.slots import Slot
from fp8dist_kernels import direct, ops
from fp8dist_kernels.formats import Role
from fp8dist_kernels.graphs import capturing
from fp8dist_kernels.multipliers import ProductError

__all__ = ["SITES", "Cast", "LinearSlots", "States", "refusal"]

States = tuple[SlotViews, SlotViews, SlotViews]
"""The states of a module's input, weight and grad_output slots."""

Operand = tuple[Tensor, Tensor]
"""A factor of a product: FP8, and its inverse scales."""


class LinearSlots:
    """An FP8Linear's access to the FP8 state: its three slots and how it may use them.

    ``experts``: the slots of each expert; of a Linear, its own. ``precisions``: which GEMMs of each run in high
    precision, as ``set_precision`` changes it; ``precision``: that of a Linear. ``caster``: casts its tensors.
    ``note``: of the weight. If the note says that FSDP frees the weight between forward and backward, its casts are not
    cached, because they would take the memory that sharding saves.
    """

    grouped: ClassVar[bool] = False
    """True if the module is a grouped product, with a slot for each expert."""

    def __init__(
        self,
        sync: ArenaSync,
        weight_sync: ArenaSync,
        job: JobState,
        recipe: Recipe,
        slots: dict[Role, Slot],
        name: str = "weight",
        experts: tuple[dict[Role, Slot], ...] = (),
    ) -> None:
        """``name``: of the module's parameter. ``experts``: the slots of each expert. Empty: the module is a Linear."""
        self.sync = sync
        self.weight_sync = weight_sync
        self.job = job
        self.recipe = recipe
        self.slots = slots
        self.experts = experts or (slots,)
        changes = Changes()
        self.precisions = tuple(Precision(each, recipe.high_precision, changes) for each in self.experts)
        self.precision = self.precisions[0]
        self.caster = caster_for(recipe, job, sync, None if self.grouped else self.precision)
        self.name = name
        self.note = WeightNote(name)
        self._begin()

    def _begin(self) -> None:
        """Set what a copy does not take over, and what refers to the note, of which a copy has its own."""
        self._states: States | None = None
        self._modes = Modes(self.fqn)
        self.policy = WritePolicy(self.recipe, self.job, self.note, self.weight_sync)
        self.cache = WeightCache(self.job)
        self.monitor = LoopMonitor(self.sync, self.job, self.note, self.fqn)

    def __getstate__(self) -> dict[str, Any]:
        fresh = ("_states", "_modes", "policy", "cache", "monitor", "owner", "_choice")
        kept = {name: value for name, value in self.__dict__.items() if name not in fresh}
        return {**kept, "note": self.note.copied()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    def belong_to(self, owner: nn.Module) -> None:
        """Note which module has the weight, a new one or a copy."""
        self.note.belong_to(owner)

    @property
    def fqn(self) -> str:
        """The module's fqn in its model. Of a grouped product, the fqn that the fqns of its experts begin with."""
        return self.slots[Role.INPUT].fqn

    @property
    def fqns(self) -> tuple[str, ...]:
        """The fqns of the module's input slots: one, or one for each expert."""
        return tuple([slots[Role.INPUT].fqn for slots in self.experts])

    @property
    def weight_slots(self) -> tuple[Slot, ...]:
        """The slots of the weight: one, or one for each expert."""
        return tuple([slots[Role.WEIGHT] for slots in self.experts])

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

    def _state_of(self, role: Role, sync: ArenaSync) -> SlotViews:
        return sync.arena.state_of(self.slots[role])

    def forget_views(self) -> None:
        """Drop the views of an arena that was rebuilt. The next use creates new ones."""
        self._states = None
        self.cache.clear()

    def mode(self, module: nn.Module, x: Tensor, weight: Tensor, choice: Choice) -> tuple[Mode, bool]:
        """Return how this forward of ``module`` computes, and True if it records amaxes. Takes the notes of it. A
        forward that a backward repeats computes as it did before, whatever has changed since: see ``Modes``. Compiled
        forwards read the mode anew.

        Args:
            choice: what is in high precision now.

        Raises:
            ConfigurationError: FP8 supports neither ``x`` nor the transform that calls the module. No note was taken.
        """
        job, training = self.job, module.training
        in_fp8, recording = job.in_fp8, job.recording
        casts = in_fp8 and not choice.all_high and (training or job.eval_precision == "fp8")
        # A compiled forward guards on what it reads here: read it late.
        observes = in_fp8 and not casts and (self.grouped or self.precision.observing)
        compiling, grad = torch.compiler.is_compiling(), torch.is_grad_enabled()
        repeated = None if compiling else self._modes.repeated(grad)
        if repeated is not None:
            casts, _, recording, training, *_ = repeated
        record = (self.sync.every_step or job.measuring) and (recording or (training and grad))
        if compiling:
            limit = self.policy.limit if training else self.policy.eval_limit
            return Mode(casts, observes, recording, training, choice, Outgrown(limit)), record
        if casts or recording or (observes and record):
            require_eager(x, weight, module, self.fqn)
        if job.microbatches is not None:
            self._count_forward(job.microbatches, record, training and repeated is None)
        if casts:
            outgrown = self.policy.limits(module, record, training)
        else:
            outgrown = Outgrown(None)
            self.note.idle_at = job.boundaries
        if repeated is not None:
            return repeated, record
        mode = Mode(casts, observes, recording, training, choice, outgrown)
        self._modes.calls.add(mode, grad)
        return mode, record

    def _count_forward(self, microbatches: Microbatches, record: bool, in_training: bool) -> None:
        if record:
            microbatches.forward(*self.fqns)
        elif in_training:
            microbatches.unrecorded_forward()

    def matmul(
        self,
        a: Operand,
        b: Operand,
        dtype: torch.dtype,
        gemm: Gemm,
        offsets: Tensor | None = None,
        bias: Tensor | None = None,
        into: Tensor | None = None,
    ) -> Tensor | None:
        """Return the product a bᵀ + bias in FP8, with this manager's backend, and the accumulation that the recipe has
        for ``gemm``. See the ops in ``fp8dist_kernels``.

        Args:
            offsets: int32[E], the ends of the experts' rows: the product of each. None: of a Linear.
            into: a buffer of the result's shape, to which a Linear's product is added. Then nothing is returned.

        Raises:
            ConfigurationError: torch refuses the product. In compiled code the ``ProductError`` itself.
        """
        operands = a[0], b[0], a[1], b[1]
        how: dict[str, Any] = {"fast_accumulation": gemm in self.recipe.fast_accumulation, "backend": self.job.backend}
        if self.job.tap is not None:
            how |= self.caster.tap_of(gemm)
        product: Tensor | None = None
        try:
            if into is not None:
                direct.matmul_into(*operands, into, **how)
            elif offsets is None:
                product = direct.matmul(*operands, dtype, bias=bias, **how)
            elif gemm == "wgrad":
                product = direct.matmul_grouped_columns(*operands, offsets, dtype, **how)
            else:
                product = direct.matmul_grouped(*operands, offsets, dtype, bias=bias, **how)
        except ProductError as error:
            raise refusal(self.fqn, gemm, error) from error
        return product

    def weight_scale(self) -> Tensor:
        """Return a float32 copy of the weight's scale, 0-d, or of those of the experts, [E]; NaN while a slot is
        cold."""
        arena, place = self.weight_sync.arena, self.weight_place
        return torch.where(arena.cold[place], torch.nan, arena.scale[place])

    @property
    def adds_in_cast(self) -> bool:
        """True if the cast of a gradient can add up its columns. Otherwise ``bias_gradient`` reads the gradient again:
        for experts, for scales by parts, and in compiled graphs, where Inductor makes the casts."""
        return self.recipe.by == "tensor" and not self.grouped and not torch.compiler.is_compiling()

    def bias_gradient(self, gradient: Tensor, dtype: torch.dtype, offsets: Tensor | None) -> Tensor:
        """Return the gradient of a bias [out_features], or [E, out_features]. The order of a Linear's additions is the
        same on all backends."""
        total: Tensor
        if offsets is None:
            total = direct.add_up(gradient, dtype, backend=self.job.backend)
        else:
            bounds = torch.cat([offsets.new_zeros(1), offsets]).long()
            total = torch.segment_reduce(gradient.float(), "sum", offsets=bounds, axis=0, unsafe=True).to(dtype)
        return total

    def weight_cast(self, weight: Tensor, parameter: Tensor, request: Request) -> Cast:
        """Return the weight in FP8: as gathered, cast now, or cached from an earlier microbatch of this step. Columns
        are empty if ``backward_cast`` will compute them.

        Casts are not reused for weights that FSDP frees, with grad disabled (an eval may swap weights unnoticed), or if
        ``WeightCache.key_of`` returns None.

        Args:
            weight: as the forward multiplies with it: [out_features, in_features] on this rank, or [E, …].
            parameter: the parameter of which ``weight`` is a view, or a part.
            request: with the copies that the forward and its backward need.
        """
        limits = request.limits
        if isinstance(weight, FP8Weight):
            return self._gathered_cast(weight, request.state, limits)
        for_backward = torch.is_grad_enabled() and not self.note.resharded
        owner = local_part(parameter)  # Not ``weight``: DTensor.to_local() returns a new view at each call.
        key = self.cache.key_of(weight, parameter) if for_backward else None
        found = None if key is None else self.cache.find(owner, key, request.record is not False)
        if found is not None:
            return found
        request.columns = request.columns and for_backward
        cast = self._cast_weight(weight, request)
        if (limits.written or limits.once) and (request.rows or request.columns):
            inv_scale = cast.rows_inv_scale if cast.rows.numel() else cast.columns_inv_scale
            self.policy.report_cast(inv_scale, request.state, in_eval=not limits.written)
        if key is not None:
            self.cache.keep(cast, owner, key, request.record is not False)
        return cast

    def _gathered_cast(self, weight: FP8Weight, state: SlotViews, limits: Outgrown) -> Cast:
        """Return the weight as it was gathered in FP8."""
        if limits.written:  # A scale that did not fit was derived anew, without a history.
            self.policy.report((self.weight_sync.arena.amax[self.weight_place] == 0) & ~state.cold)
        if limits.once:
            self.policy.report_cast(weight.inv_scale, state, in_eval=True)
        nothing = weight.rows.new_empty(0)
        return Cast(weight.rows.contiguous(), weight.inv_scale.contiguous(), nothing, nothing)

    def eval_cast(self, linear: nn.Module, weight: Tensor, parameter: Tensor | None = None) -> Cast:
        """Return the row-major cast with which an eval forward of ``linear`` multiplies now. Local, but see
        ``limits_of_parts``; commits a pending sync. Records nothing, and leaves no note of a forward.

        Args:
            weight: as the forward multiplies with it: [out_features, in_features] on this rank.
            parameter: see ``limits_of_parts``. None: the weight has no parts.
        """
        state = self.states(weight.device)[1]
        limits = self.policy.limits_now(linear, training=False) if self.recipe.delayed else Outgrown(None)
        if parameter is not None:
            limits = self.policy.limits_of_parts(limits, weight, parameter, state)
        return self._cast_weight(weight, Request(state, Role.WEIGHT, True, False, False, limits, tapped=False))

    def shard_cast(
        self, shard: Tensor, first: int, amax: Tensor, record: bool, scale: Tensor, tapped: bool = False
    ) -> Cast:
        """Return this rank's shard of the weight in FP8, row-major, with the scale that all ranks share. Local; commits
        a pending sync.

        Args:
            scale: 0-d float32, or [E] of all experts.
            first: of the experts that have a part in the shard.
            amax: where to record: 0-d float32, or [E] of all experts.
            tapped: True if the tap gets to see the cast.
        """
        state, limits = self.states(self.weight_sync.arena.device)[1], Outgrown(None, scale=scale)
        request = Request(state, Role.WEIGHT, True, False, record, limits, place=amax, tapped=tapped)
        return self.caster.cast(shard, request)

    def casts_in_backward(self, weight: Tensor) -> bool:
        """True if the backward makes its own FP8 copy of the weight."""
        return self.note.resharded or isinstance(weight, FP8Weight)

    def backward_cast(self, weight: Tensor, state: SlotViews, outgrown: Outgrown) -> Operand:
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
        nowhere = None if self.grouped else torch.empty_like(state.scale)
        cast = self._cast_weight(weight, Request(state, Role.WEIGHT, False, True, False, outgrown, place=nowhere))
        return cast.columns, cast.columns_inv_scale

    def _cast_weight(self, weight: Tensor, request: Request) -> Cast:
        """Cast the weight as it lies in memory. Changes the request."""
        stored = weight.detach()
        if weight.is_contiguous() or not weight.mT.is_contiguous():
            return self.caster.cast(stored, request)
        # The rows in memory are the columns of the product's weight.
        request.rows, request.columns = request.columns, request.rows
        return self.caster.cast(stored.mT, request).transposed()


def refusal(fqn: str, gemm: Gemm, error: ProductError) -> ConfigurationError:
    """Return the error of a user whose machine cannot compute a product of this module."""
    return ConfigurationError(f"{fqn}: {gemm}: {error}")
