"""GroupedSlots: a grouped product's access to the FP8 state of its experts, and the casts of its tensors."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8dist.modules.fp8_weight import FP8Weight
from fp8dist.modules.job_state import JobState
from fp8dist.modules.linear_slots import Cast, LinearSlots, States, refusal
from fp8dist.modules.outgrown import Outgrown, shrunk, unfit_for
from fp8dist.state.arena import SlotState
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.precision import Changes, Precision
from fp8dist.state.recipe import GEMMS, Gemm, Recipe
from fp8dist.state.slots import Slot
from fp8dist_kernels import direct
from fp8dist_kernels.formats import Role
from fp8dist_kernels.multipliers import ProductError
from fp8dist_kernels.reference.blocks import BLOCK
from fp8dist_kernels.reference.grouped_shares import expert_of_rows, measure_grouped
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN, DID_NOT_RUN_BITS

__all__ = ["Choice", "GroupedSlots", "Some", "slot_names"]

Some = bool | Tensor
"""True: all experts. False: none. A bool[E] on the device: these."""


class Choice(NamedTuple):
    """Which experts compute in high precision now, and the tensors of which experts are recorded."""

    high: Mapping[Gemm, Some]
    records: Mapping[Role, Some]

    @property
    def all_high(self) -> bool:
        """True if no expert computes anything in FP8."""
        return all(of is True for of in self.high.values())


def slot_names(fqn: str, experts: int) -> tuple[dict[Role, Slot], ...]:
    """Return the slots of each expert of a grouped product: ``"….experts.gate_up.3"`` for ``"….experts.gate_up"``."""
    return tuple({role: Slot(f"{fqn}.{expert}", role.value) for role in Role} for expert in range(experts))


class GroupedSlots(LinearSlots):
    """A grouped product's access to the FP8 state: the slots of its E experts, and how it may use them.

    ``experts``: the slots of each expert. ``slots`` names the product itself and has no place in an arena.
    """

    def __init__(self, sync: ArenaSync, job: JobState, recipe: Recipe, fqn: str, name: str, experts: int) -> None:
        super().__init__(sync, sync, job, recipe, {role: Slot(fqn, role.value) for role in Role}, name)
        self.experts = slot_names(fqn, experts)
        self.owner: weakref.ref[nn.Module] | None = None
        self._precision_changes = Changes()
        self._precisions = tuple(
            Precision(slots, recipe.high_precision, self._precision_changes) for slots in self.experts
        )
        sync.experts[fqn] = self._precisions
        self._choice: tuple[int, torch.device, Choice] | None = None
        self._found: tuple[Tensor, Tensor] | None = None  # Inverse scales of the last recorded cast, and its amaxes.
        self._measured: tuple[Tensor, Tensor] | None = None  # Shares of the last cast of the weight that was measured.

    def belong_to(self, owner: nn.Module) -> None:
        """Set the module that has the weight, and hear of changes of precision. Copies call it, too."""
        self.owner = weakref.ref(owner)
        self.job.listeners = (*self.job.listeners, functools.partial(_renew_choice, weakref.ref(self)))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "owner": None, "_choice": None, "_found": None, "_measured": None}

    @property
    def fqns(self) -> tuple[str, ...]:
        """See ``LinearSlots``."""
        return tuple([slots[Role.INPUT].fqn for slots in self.experts])

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """See ``LinearSlots``: one for each expert."""
        return self._precisions

    @property
    def observing(self) -> bool:
        """See ``LinearSlots``. The ``Choice`` has the experts."""
        return True

    @property
    def weight_slots(self) -> tuple[Slot, ...]:
        """See ``LinearSlots``."""
        return tuple(slots[Role.WEIGHT] for slots in self.experts)

    @property
    def weight_casts(self) -> int:
        """See ``LinearSlots`` and ``_weight_by_parts``."""
        return 2 if self.recipe.by == "row" else 1

    @property
    def weight_place(self) -> slice:
        """See ``LinearSlots``."""
        return self.weight_sync.arena.run_of(self.weight_slots)

    def weights_of(self, weight: Tensor, first: int = 0) -> Iterator[tuple[Slot, Tensor]]:
        """See ``LinearSlots``: a slice for each expert."""
        return ((slots[Role.WEIGHT], part) for slots, part in zip(self.experts[first:], weight))

    def states(self, device: torch.device) -> States:
        """See ``LinearSlots``. The first call also makes the first choice."""
        states = super().states(device)
        if self._choice is None:
            self.choice(device)
        return states

    def _state_of(self, role: Role, sync: ArenaSync) -> SlotState:
        return sync.arena.state_of_run([slots[role] for slots in self.experts])

    def choice(self, device: torch.device) -> Choice:
        """Return what ``set_precision`` and fallbacks say now. Made anew only when they change something."""
        changes = self._precision_changes.count
        if self._choice is None or self._choice[:2] != (changes, device):
            high = {gemm: _some([gemm in each.high for each in self._precisions], device) for gemm in GEMMS}
            seen = [each.recorded for each in self._precisions]
            records = {role: _some([role in roles for roles in seen], device) for role in Role}
            self._choice = changes, device, Choice(high, records)
        return self._choice[2]

    # Casts -----------------------------------------------------------------------------------------

    def rows_cast(
        self,
        x: Tensor,
        offsets: Tensor,
        state: SlotState,
        record: bool,
        recorded: Some,
        rows: bool,
        columns: bool,
        outgrown: Outgrown,
        role: Role,
    ) -> Cast:
        """Cast x [tokens, features], sorted by expert, by the recipe. If neither copy is requested, only record the
        amaxes, and only of experts that are observed.

        Args:
            record: True if this forward records amaxes.
            recorded: of these experts.
            outgrown: the ``outgrown`` of this forward.
        """
        x = x.detach()
        if record and role is Role.GRAD_OUTPUT:
            self.count_tokens(offsets, state)
        upstream = self._upstream(outgrown.once) if role is Role.GRAD_OUTPUT else outgrown.upstream
        if not (rows or columns):
            self.observe_rows(x, offsets, state, recorded)
            nothing = x.new_empty(0)
            return Cast(nothing, nothing, nothing, nothing)
        if self.recipe.by == "tensor":
            amaxes = functools.partial(self._amaxes, x, offsets, state)
            unfit = unfit_for(amaxes, state, self.recipe, upstream)
            cast = self._grouped_by_tensor(x, offsets, state, recorded, rows, columns, outgrown.others, unfit, role)
        else:
            self.observe_rows(x, offsets, state, recorded)
            in_blocks, exact = self.recipe.by == "block", self.recipe.power_of_two
            cast = Cast(
                *direct.quantize_grouped_lines(
                    x,
                    offsets,
                    state.format.dtype,
                    in_blocks=in_blocks,
                    power_of_two=exact,
                    rows=rows,
                    columns=columns,
                    backend=self.job.backend,
                    **({} if self.job.tap is None else self._tap_of(role)),
                )
            )
        if record and self._measures:
            each = self._spread(x, offsets, cast, rows)
            measure_grouped(x, offsets, each, state.format.dtype, state.saturated, state.underflow)
        return cast

    def count_tokens(self, offsets: Tensor, state: SlotState) -> None:
        """Count the tokens of the experts in a backward, which recomputation does not repeat. ``state``: of the output
        gradients. Only in a measured step."""
        if self.job.measuring:
            state.tokens.add_(torch.diff(offsets, prepend=offsets.new_zeros(1)))

    def observe_rows(self, x: Tensor, offsets: Tensor, state: SlotState, recorded: Some) -> None:
        """Record the amaxes of x [tokens, features] of these experts."""
        if recorded is not False:
            _record(self._amaxes(x.detach(), offsets, state), state.pending, recorded)

    def record_weight(
        self, weight: Tensor, cast: Cast | None, offsets: Tensor, state: SlotState, recorded: Some
    ) -> None:
        """Record the amaxes of a weight [E, n, k], any strides, of these experts, if they have rows: the others have
        not run.

        Args:
            cast: of the weight, which may have found the amaxes. None: there is none.
        """
        if recorded is False or isinstance(weight, FP8Weight):  # FSDP's gather records its shards.
            return
        known, amaxes = self._found or (None, None)
        if amaxes is None or cast is None or known is not cast.rows_inv_scale:
            amaxes = self.weight_amaxes(weight, state)
        if torch.compiler.is_compiling():  # Nothing reuses the cast, and the graph need not return its tensors.
            self._found = None
        used = torch.diff(offsets, prepend=offsets.new_zeros(1)) > 0
        used = used if recorded is True else used & recorded
        _record(amaxes, state.pending, used)
        if self._measures and cast is not None and self._measured is not None:
            for shares, place in zip(self._measured, (state.saturated, state.underflow)):
                _record(shares, place, used)

    def weight_amaxes(self, weight: Tensor, state: SlotState) -> Tensor:
        """Return the amaxes of a weight [E, n, k], any strides: float32[E]."""
        return self._amaxes(weight.detach(), None, state)

    def _amaxes(self, x: Tensor, offsets: Tensor | None, state: SlotState) -> Tensor:
        """Return float32[E]: the amaxes of the experts' parts, -1 for experts without rows."""
        place = torch.full_like(state.pending, DID_NOT_RUN)
        self._call(x, offsets, state, state.cold, place, True, False, False, False, None)
        return place

    def _grouped_by_tensor(
        self,
        x: Tensor,
        offsets: Tensor | None,
        state: SlotState,
        recorded: Some,
        rows: bool,
        columns: bool,
        outgrown: float | None,
        unfit: Tensor | None,
        role: Role | None,
    ) -> Cast:
        """Cast x with one scale for each expert: the slot's, or one from its own amax. Records the amaxes."""
        recipe = self.recipe
        cold = state.cold if recipe.delayed else state.always
        warm_up = recipe.warmup == "current" and not self._known_hot(state)
        if unfit is not None:  # Rare. Treat the slots as cold.
            cold, warm_up = (cold & warm_up) | unfit, True
        apart = offsets is None or isinstance(recorded, Tensor)
        place = torch.full_like(state.pending, DID_NOT_RUN) if apart else state.pending
        fp8, fp8_t, inv_scale = self._call(
            x, offsets, state, cold, place, recorded is not False, warm_up, rows, columns, outgrown, role
        )
        if offsets is None:  # ``record_weight`` records which experts have run.
            self._found = (inv_scale, place) if recorded is not False else None
            return Cast(fp8, inv_scale, fp8_t, inv_scale)
        if apart:
            _record(place, state.pending, recorded)
        return Cast(fp8, inv_scale, fp8_t, inv_scale)

    def _call(
        self,
        x: Tensor,
        offsets: Tensor | None,
        state: SlotState,
        cold: Tensor,
        place: Tensor,
        record: bool,
        just_in_time: bool,
        rows: bool,
        columns: bool,
        outgrown: float | None,
        role: Role | None = None,
        scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Call ``quantize_grouped``. ``role``: of the cast whose tap is told. ``scale``: [E] in place of the slots'."""
        copies: tuple[Tensor, Tensor, Tensor] = direct.quantize_grouped(
            x,
            offsets,
            state.scale if scale is None else scale,
            cold,
            place,
            state.format.dtype,
            record=record,
            just_in_time=just_in_time,
            margin=self.recipe.margin,
            power_of_two=self.recipe.power_of_two,
            rows=rows,
            columns=columns,
            outgrown=outgrown,
            backend=self.job.backend,
            **({} if self.job.tap is None else self._tap_of(role)),
        )
        return copies

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
        """See ``LinearSlots``. weight: [E, out_features, in_features]. Records nothing: ``record_weight`` does
        that, with the amaxes that a cast with ``record`` may find. ``pending`` is not used."""
        stored, transposed = weight.detach(), not weight.is_contiguous() and weight.mT.is_contiguous()
        if transposed:  # Cast the weights as they lie in memory.
            stored, rows, columns = stored.mT, columns, rows
        if not (rows or columns):
            nothing = weight.new_empty(0)
            return Cast(nothing, nothing, nothing, nothing)
        if self.recipe.by == "tensor":
            unfit = shrunk(self.weight_amaxes(stored, state), state, self.recipe) if outgrown.written else None
            cast = self._grouped_by_tensor(stored, None, state, record, rows, columns, outgrown.weight, unfit, role)
        else:
            cast = self._weight_by_parts(stored, state.format.dtype, rows, columns, role)
        if record and self._measures:
            self._measured = self._measure_weight(stored, cast, state, rows)
        return Cast(*cast[2:], *cast[:2]) if transposed else cast

    def _weight_by_parts(
        self, weight: Tensor, dtype: torch.dtype, rows: bool, columns: bool, role: Role | None
    ) -> Cast:
        """Cast a weight [E, n, k] with scales for each row, or each block of 128 x 128."""
        (experts, n, k), nothing = weight.shape, weight.new_empty(0)
        options: dict[str, Any] = {"power_of_two": self.recipe.power_of_two, "backend": self.job.backend}
        if self.job.tap is not None:
            options |= self._tap_of(role)
        if self.recipe.by == "row":  # The experts' rows, one below the other; likewise their columns.
            made = [nothing] * 4
            if rows:
                flat = direct.quantize_rowwise(weight.reshape(-1, k), dtype, rows=True, columns=False, **options)
                made[:2] = flat[0].view(experts, n, k), flat[1].view(experts, n, 1)
            if columns:
                flat = direct.quantize_rowwise(weight.mT.reshape(-1, n), dtype, rows=True, columns=False, **options)
                made[2:] = flat[0].view(experts, k, n), flat[1].view(experts, k, 1)
            return Cast(*made)
        return Cast(*direct.quantize_blocks(weight, dtype, block=[BLOCK, BLOCK], rows=rows, columns=columns, **options))

    def backward_cast(self, weight: Tensor, state: SlotState, outgrown: Outgrown) -> tuple[Tensor, Tensor]:
        """See ``LinearSlots``."""
        if isinstance(weight, FP8Weight):
            return super().backward_cast(weight, state, outgrown)
        cast = self._cast_weight(weight, state, False, False, True, outgrown)
        return cast.columns, cast.columns_inv_scale

    def shard_cast(
        self, shard: Tensor, first: int, amax: Tensor, record: bool, scale: Tensor, role: Role | None = None
    ) -> Cast:
        """See ``LinearSlots``: shard [experts from ``first`` on, n, k]. The inverse scales of a recipe by tensor are
        those of all E experts."""
        every = self.states(self.weight_sync.arena.device)[1]
        by_tensor = self.recipe.by == "tensor"
        inv_scales = torch.reciprocal(scale) if by_tensor else shard.new_empty(0, dtype=torch.float32)
        nothing = shard.new_empty(0)
        if not len(shard):  # More ranks than experts.
            return Cast(shard.to(every.format.dtype), inv_scales, nothing, nothing)
        own = slice(first, first + len(shard))
        state = self.weight_sync.arena.state_of_run(self.weight_slots[own])
        place = torch.full_like(state.pending, DID_NOT_RUN)
        if by_tensor:
            rows, _, inv_scale = self._call(
                shard, None, state, state.cold, place, record, False, True, False, None, role, scale[own]
            )
            cast = Cast(rows, inv_scale, nothing, nothing)
        else:
            place = self._amaxes(shard, None, state) if record else place
            cast = self._weight_by_parts(shard, state.format.dtype, True, False, role)
        if record:
            _record(place, amax[own], True)
            if self._measures:
                shares = self._measure_weight(shard, cast, state, True)
                _record(shares[0], state.saturated, True)
                _record(shares[1], state.underflow, True)
        return cast._replace(rows_inv_scale=inv_scales) if by_tensor else cast

    # Products --------------------------------------------------------------------------------------

    def grouped_matmul(
        self,
        a: Tensor,
        b: Tensor,
        inv_scale_a: Tensor,
        inv_scale_b: Tensor,
        offsets: Tensor,
        dtype: torch.dtype,
        gemm: Gemm,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return the product of each expert's rows, or for wgrad, of their transposed copies. See the kernels."""
        how: dict[str, Any] = {"fast_accumulation": gemm in self.recipe.fast_accumulation, "backend": self.job.backend}
        if self.job.tap is not None:
            how |= self._tap_of(gemm)
        if gemm == "wgrad":
            product: Tensor = direct.matmul_grouped_columns(a, b, inv_scale_a, inv_scale_b, offsets, dtype, **how)
            return product
        try:
            product = direct.matmul_grouped(a, b, inv_scale_a, inv_scale_b, offsets, dtype, bias=bias, **how)
        except ProductError as error:
            raise refusal(self.fqn, gemm, error) from error
        return product

    # Measuring -------------------------------------------------------------------------------------

    @property
    def _measures(self) -> bool:
        """True if shares of saturated and flushed elements are wanted."""
        return self.job.measuring or self.sync.arena.lanes > 0

    def _spread(self, x: Tensor, offsets: Tensor, cast: Cast, rows: bool) -> Tensor:
        """Return the inverse scales of a cast in a shape that broadcasts to x [tokens, features]."""
        inv_scale, features = cast.rows_inv_scale if rows else cast.columns_inv_scale, x.shape[1]
        if rows and self.recipe.by == "row":
            return inv_scale
        if rows and self.recipe.by == "block":
            return inv_scale.repeat_interleave(BLOCK, 1)[:, :features]
        # Scales by expert, or by expert and feature. Rows of nobody do not count: they may have any expert's.
        expert = expert_of_rows(len(x), offsets).clamp_(max=len(offsets) - 1)
        if self.recipe.by != "block":
            return inv_scale.reshape(len(inv_scale), -1)[expert]
        ends = offsets.long()
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        blocks = (counts + BLOCK - 1) // BLOCK
        within = torch.arange(len(x), device=x.device) - (ends - counts)[expert]
        block = (blocks.cumsum(0) - blocks)[expert] + within // BLOCK
        return inv_scale.t()[block.clamp_(max=inv_scale.shape[1] - 1)]

    def _measure_weight(self, weight: Tensor, cast: Cast, state: SlotState, rows: bool) -> tuple[Tensor, Tensor]:
        """Return the shares of saturated and of flushed elements of the experts' weights, float32[E] each."""
        inv_scale = cast.rows_inv_scale if rows else cast.columns_inv_scale
        if self.recipe.by == "tensor":
            each = inv_scale[:, None, None]
        elif self.recipe.by == "row":
            each = inv_scale if rows else inv_scale.mT
        else:
            of_rows = inv_scale if rows else inv_scale.mT
            each = of_rows.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
            each = each.repeat_interleave(BLOCK, 2)[:, :, : weight.shape[2]]
        measured = torch.full_like(state.saturated, DID_NOT_RUN), torch.full_like(state.underflow, DID_NOT_RUN)
        measure_grouped(weight, None, each, state.format.dtype, *measured)
        return measured

    # Writes to the weight --------------------------------------------------------------------------

    def _add_growth(self, grown: Tensor, in_eval: bool = False) -> None:
        super()._add_growth(grown.any(), in_eval)


def _renew_choice(reference: weakref.ref[GroupedSlots]) -> None:
    """Make a choice anew that is in use: a compiled forward must find it, because making it is not traceable."""
    slots = reference()
    if slots is not None and slots._choice is not None:
        slots.choice(slots._choice[1])


def _some(flags: list[bool], device: torch.device) -> Some:
    if all(flags) or not any(flags):
        return flags[0]
    return torch.tensor(flags, device=device)


def _record(values: Tensor, place: Tensor, recorded: Some) -> None:
    """Record amaxes or shares (float32[E], -1: none) of these experts as running maxima."""
    bits, into = values.view(torch.int32), place.view(torch.int32)
    if isinstance(recorded, Tensor):
        bits = torch.where(recorded, bits, DID_NOT_RUN_BITS)
    into.copy_(torch.maximum(into, bits))
