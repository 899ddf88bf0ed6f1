"""Casters convert tensors to FP8. There is one class per granularity of scales: by tensor, by row, by block, by MX
block, and for NVFP4.

A *slot* is the FP8 state of one tensor: its scale, its recorded amax, and a flag that it is *cold* (it has no scale
yet). A tensor of a Linear has one slot. A tensor of a grouped product (the rows or weights of E experts) has one slot
per expert; its state has the shape [E].
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fp8dist.errors import ConfigurationError
from fp8dist.modules.fp8_weight import spread
from fp8dist.modules.job_state import JobState
from fp8dist.modules.outgrown import Outgrown, amax_of, scale_for, shrunk, unfit_for
from fp8dist.state.arena import SlotViews
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.groups import first_local_row, is_dtensor
from fp8dist.state.precision import Precision
from fp8dist.state.recipe import MXFP8Scaling, NVFP4Scaling, Recipe
from fp8dist_kernels import BLOCK, GEMMS, MX_BLOCK, NVFP4_BLOCK, Gemm, direct, ops
from fp8dist_kernels.formats import Role
from fp8dist_kernels.graphs import capturing
from fp8dist_kernels.reference.grouped_shares import expert_of_rows, measure_grouped
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN, DID_NOT_RUN_BITS
from fp8dist_kernels.reference.nvfp4 import COUNTERS

SITES: tuple[Role | Gemm, ...] = (Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT, *GEMMS)
"""The casts and products of a module that a tap can observe. A site's number is the module's first plus its place."""

ExpertMask = bool | Tensor
"""Selects experts. True: all. False: none. bool[E] on the device: those that are True. For a Linear: True or False."""


class Cast(NamedTuple):
    """A tensor in FP8, as up to two copies with their inverse scales (float32). A copy not requested is empty.

    Attributes:
        rows: the tensor, row-major.
        columns: its transpose, row-major.
        rows_inv_scale, columns_inv_scale: shaped as ``ops.matmul`` takes them: one element, one per row of the copy, or
            one per block. E8M0 for MX.
        amaxes: for experts' weights, float32[E], if the cast computed them. The cast does not record these: only
            experts that have rows may be recorded. All other casts record their amaxes themselves.
        shares: for experts' weights, the shares of saturated and of flushed elements, float32[E] each, if measured.
        tensor_inv_scale: of NVFP4, the inverse of the tensor's scale, 0-d.
    """

    rows: Tensor
    rows_inv_scale: Tensor
    columns: Tensor
    columns_inv_scale: Tensor
    amaxes: Tensor | None = None
    shares: tuple[Tensor, Tensor] | None = None
    tensor_inv_scale: Tensor | None = None

    def transposed(self) -> Cast:
        """Return the cast of the transposed tensor."""
        return Cast(*self[2:4], *self[:2], self.amaxes, self.shares, self.tensor_inv_scale)


@dataclass(eq=False)  # Not frozen: that would cost a call for each field.
class Request:
    """Which copies a cast makes of a tensor, and what it records.

    Attributes:
        state: the state of the tensor's slot, or of its E slots.
        role: the tensor's role. It decides the shape of blocks, and which of the limits apply.
        rows, columns: which copies to make. If neither is requested, the amax of a Linear's tensor is recorded only
            inside ``recording()``, or if the module returns to FP8 soon.
        record: for which experts to record the amax.
        limits: conditions under which the tensor is cast with a scale of its own amax. Only casts by tensor use them.
        offsets: int32[E], the ends of the experts' rows in an input or gradient. None: for all other tensors.
        place: where to record the amax of a Linear's tensor, 0-d float32. None: in the slot.
        sums: [features], filled by the cast with the column sums of a Linear's gradient. None: do not compute them.
        tapped: False if the cast is not shown to the tap.
        step: the training step for which the cast draws random numbers, int64 0-d. None: it draws none, or step 0.
        number: of a gradient, ``NVFP4Caster.next_backward`` of its backward.
    """

    state: SlotViews
    role: Role
    rows: bool
    columns: bool
    record: ExpertMask
    limits: Outgrown
    offsets: Tensor | None = None
    place: Tensor | None = None
    sums: Tensor | None = None
    tapped: bool = True
    step: Tensor | None = None
    number: int = 0


class Caster(ABC):
    """Casts the tensors of one module as its recipe says, and records their amaxes.

    Args:
        sync: the sync of the arena that holds the module's input slots.
        precision: which GEMMs of a Linear are in high precision. None: the module is a grouped product, and each
            request selects the experts to record.
    """

    records_in_cast: ClassVar[bool] = False
    """True if the kernel that casts also records the amax."""
    draws: ClassVar[bool] = False
    """True if casts draw random numbers: see ``NVFP4Caster.counted_step``."""

    def __init__(self, recipe: Recipe, job: JobState, sync: ArenaSync, precision: Precision | None) -> None:
        self.recipe, self.job, self.sync, self.precision = recipe, job, sync, precision
        self.grouped = precision is None
        self.site = 0
        """Number of the module's first site; see ``SITES``."""

    @property
    def calls_per_weight(self) -> int:
        """How many calls of ops cast the weight, if both copies are made."""
        return 1

    def cast(self, x: Tensor, request: Request) -> Cast:
        """Return x in FP8, and record its amax. Local.

        Args:
            x: an input or gradient [tokens, features], a Linear's weight [m, n], or experts' weights [E, m, n].
        """
        rows, columns, record = request.rows, request.columns, request.record
        if not (rows or columns):
            if self.precision is None or self.precision.observing or self.job.recording:
                self.observe(x, request.state, record, request.offsets, request.place)
            nothing = x.new_empty(0)
            return Cast(nothing, nothing, nothing, nothing)
        if not self.records_in_cast and record is not False:
            self.observe(x, request.state, record, request.offsets, request.place)
        how: dict[str, Any] = {
            "power_of_two": self.recipe.power_of_two,
            "rows": rows,
            "columns": columns,
            "backend": self.job.backend,
        }
        if self.job.tap is not None and request.tapped:
            how |= self.tap_of(request.role)
        cast = self._copies(x, request, how)
        if record is not False and (self.job.measuring or self.sync.arena.lanes):
            return self._measured(x, request, cast)
        return cast

    @abstractmethod
    def _copies(self, x: Tensor, request: Request, how: dict[str, Any]) -> Cast:
        """Call the op that casts. ``how``: keyword arguments that all these ops have."""

    def observe(
        self,
        x: Tensor,
        state: SlotViews,
        record: ExpertMask = True,
        offsets: Tensor | None = None,
        place: Tensor | None = None,
    ) -> None:
        """Record the amax of x (shaped as in ``cast``) without a cast. Does nothing for experts' weights:
        ``GroupedSlots.record_weight`` records them, because it knows which experts have rows. For the other arguments
        see ``Request``. Local."""
        if not self.grouped:
            if record is not False:
                direct.observe(x, state.pending if place is None else place, backend=self.job.backend)
        elif offsets is not None and record is not False:
            record_experts(self.amaxes(x, offsets, state), state.pending, record)

    def amaxes(self, x: Tensor, offsets: Tensor | None, state: SlotViews) -> Tensor:
        """Return the amaxes of the experts' rows, or of their weights [E, m, n]: float32[E], -1 for experts without
        rows."""
        place = torch.full_like(state.pending, DID_NOT_RUN)
        direct.quantize_grouped(
            x,
            offsets,
            state.scale,
            state.cold,
            place,
            state.format.dtype,
            record=True,
            just_in_time=False,
            margin=self.recipe.margin,
            power_of_two=self.recipe.power_of_two,
            rows=False,
            columns=False,
            outgrown=None,
            backend=self.job.backend,
        )
        return place

    def tap_of(self, work: Role | Gemm) -> dict[str, Any]:
        """Return the keyword arguments with which an op shows its operands to the job's tap. Call it only if there is
        one: most jobs have none, and callers save the call."""
        # An exported or traced program outlives the tap's memory.
        if torch.compiler.is_exporting() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return {}
        return {"site": self.site + SITES.index(work), "tap": self.job.tap}

    # Shares of saturated and flushed elements ------------------------------------------------------

    def _measured(self, x: Tensor, request: Request, cast: Cast) -> Cast:
        """Record the shares of saturated and of flushed elements. For experts' weights, return them in the cast
        instead: only experts that have rows may be recorded."""
        state, offsets, rows = request.state, request.offsets, request.rows
        inv_scale = (cast.rows_inv_scale if rows else cast.columns_inv_scale).float()  # MX has E8M0.
        dtype, shares = state.format.dtype, (state.saturated, state.underflow)
        if not self.grouped:
            stored, backend = x if rows else x.t(), self.job.backend
            block = self._block(stored, request.role)
            direct.measure(stored, inv_scale, dtype, *shares, block=block, backend=backend)
        elif offsets is not None:
            measure_grouped(x, offsets, self._spread(x, offsets, inv_scale, rows), dtype, *shares)
        else:
            shares = torch.full_like(shares[0], DID_NOT_RUN), torch.full_like(shares[1], DID_NOT_RUN)
            stored = x if rows else x.mT
            each = spread(inv_scale, stored.shape)
            each = each if rows else each.mT
            measure_grouped(x, None, each, dtype, *shares)
            return cast._replace(shares=shares)
        return cast

    @abstractmethod
    def _block(self, stored: Tensor, role: Role) -> list[int]:
        """Return the shape of a block of elements that share a scale. [0, 0]: the whole tensor."""

    def _spread(self, x: Tensor, offsets: Tensor, inv_scale: Tensor, rows: bool) -> Tensor:
        """Return the inverse scales in a shape that broadcasts to x [tokens, features].

        Args:
            inv_scale: one per expert, or one per expert and feature. Subclasses take their own shapes, too.
            rows: True if they belong to the row-major copy, False for the transposed one.
        """
        return inv_scale.reshape(len(inv_scale), -1)[_experts_of(x, offsets)]


class TensorCaster(Caster):
    """Casts a tensor, or each expert's part, with one scale: its slot's, or one derived from its current amax."""

    records_in_cast = True

    def _copies(self, x: Tensor, request: Request, how: dict[str, Any]) -> Cast:
        recipe, state, limits, offsets, record = (
            self.recipe, request.state, request.limits, request.offsets, request.record
        )  # fmt: skip
        of_weight = request.role is Role.WEIGHT
        scale = limits.scale if of_weight else None
        cold, warm_up, outgrown = state.cold, False, None
        if scale is None:
            scale, outgrown = state.scale, limits.weight if of_weight else limits.others
            cold = state.cold if recipe.delayed else state.always
            warm_up = recipe.warmup == "current" and not self._known_hot(state)
            if limits.written if of_weight else limits.upstream is not None:
                unfit = self._unfit(x, request)
                if unfit is not None:  # Rare. A cast of a cold slot uses the current amax, so declare the slot cold.
                    cold, warm_up = (cold & warm_up) | unfit, True
        place = state.pending if request.place is None else request.place
        how |= {"record": record is not False, "just_in_time": warm_up, "margin": recipe.margin, "outgrown": outgrown}
        if self.grouped:
            # The kernel records all experts. Where only some may be recorded, let it write apart, and filter after.
            apart = offsets is None or isinstance(record, Tensor)
            place = torch.full_like(state.pending, DID_NOT_RUN) if apart else place
            rows, columns, inv_scale = direct.quantize_grouped(
                x, offsets, scale, cold, place, state.format.dtype, **how
            )
            if offsets is None:
                return Cast(rows, inv_scale, columns, inv_scale, None if record is False else place)
            if apart:
                record_experts(place, state.pending, record)
            return Cast(rows, inv_scale, columns, inv_scale)
        if request.sums is not None:
            how["sums"] = request.sums
        if warm_up and recipe.delayed and outgrown is None and direct.is_eager():
            # Few slots are cold. With this buffer, the cast itself checks for that, and needs no launch before it.
            how["scratch"] = state.arena.scratch()
        # A compiled graph casts weights with one op: nothing in it computes them that the cast could fuse with.
        caller = ops if of_weight and torch.compiler.is_compiling() else direct
        rows, columns, inv_scale = caller.quantize(x, scale, cold, place, state.format.dtype, **how)
        return Cast(rows, inv_scale, columns, inv_scale)

    def _unfit(self, x: Tensor, request: Request) -> Tensor | None:
        """Return bool, 0-d or [E]: True if x does not fit its scale, so that it is cast with its own amax."""
        if not self.recipe.delayed:
            return None
        state, limits = request.state, request.limits
        amax = self.amaxes(x, request.offsets, state) if self.grouped else amax_of(x)
        if request.role is Role.WEIGHT:
            return shrunk(amax, state, self.recipe)
        assert limits.upstream is not None
        return unfit_for(amax, state, self.recipe, limits.upstream)

    def _known_hot(self, state: SlotViews) -> bool:
        """True if the host knows that the slot has a scale, so that the cast need not check it on the device. Always
        False in compiled and captured graphs: they may run again after other state was loaded."""
        if not direct.is_eager():  # First: torch.compile must not guard on the rest.
            return False
        return state.arena.known_hot and self.recipe.delayed and not capturing(state.arena.device)

    def _block(self, stored: Tensor, role: Role) -> list[int]:
        return [0, 0]


class RowCaster(Caster):
    """Casts each row with a scale of its own amax. In the transposed copy, each column is such a row."""

    @property
    def calls_per_weight(self) -> int:
        return 2 if self.grouped else 1

    def _copies(self, x: Tensor, request: Request, how: dict[str, Any]) -> Cast:
        dtype, of_weight = request.state.format.dtype, request.role is Role.WEIGHT
        if not self.grouped:
            caller = ops if of_weight and torch.compiler.is_compiling() else direct
            return Cast(*caller.quantize_rowwise(x, dtype, **how))
        if not of_weight:
            return Cast(*direct.quantize_grouped_lines(x, request.offsets, dtype, in_blocks=False, **how))
        return _as_one_matrix(direct.quantize_rowwise, x, dtype, request, how)

    def _block(self, stored: Tensor, role: Role) -> list[int]:
        return [1, max(1, stored.shape[1])]

    def _spread(self, x: Tensor, offsets: Tensor, inv_scale: Tensor, rows: bool) -> Tensor:
        return inv_scale if rows else super()._spread(x, offsets, inv_scale, rows)


class BlockCaster(Caster):
    """Casts each block with a scale of its own amax: 128 x 128 elements of a weight, 1 x 128 of other tensors."""

    width: ClassVar[int] = BLOCK

    def _copies(self, x: Tensor, request: Request, how: dict[str, Any]) -> Cast:
        dtype = request.state.format.dtype
        if request.offsets is not None:
            return Cast(*direct.quantize_grouped_lines(x, request.offsets, dtype, in_blocks=True, **how))
        return Cast(
            *direct.quantize_blocks(x, dtype, block=[BLOCK if request.role is Role.WEIGHT else 1, BLOCK], **how)
        )

    def _block(self, stored: Tensor, role: Role) -> list[int]:
        return [BLOCK if role is Role.WEIGHT else 1, BLOCK]

    def _spread(self, x: Tensor, offsets: Tensor, inv_scale: Tensor, rows: bool) -> Tensor:
        width = self.width
        if rows:
            return inv_scale.repeat_interleave(width, 1)[:, : x.shape[1]]
        # Blocks of the transposed copy run along tokens, and begin anew at each expert.
        expert, ends = _experts_of(x, offsets), offsets.long()
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        blocks = (counts + width - 1) // width
        within = torch.arange(len(x), device=x.device) - (ends - counts)[expert]
        block = (blocks.cumsum(0) - blocks)[expert] + within // width
        return inv_scale.t()[block.clamp_(max=inv_scale.shape[1] - 1)]


class MXCaster(BlockCaster):
    """Casts each 1 x 32 block of each copy with a power of two of its own amax."""

    width = MX_BLOCK

    @property
    def calls_per_weight(self) -> int:
        return 2 if self.grouped else 1

    def _copies(self, x: Tensor, request: Request, how: dict[str, Any]) -> Cast:
        assert isinstance(self.recipe, MXFP8Scaling)
        del how["power_of_two"]
        how["round_up"] = self.recipe.scale_rounding == "up"
        dtype = request.state.format.dtype
        if request.offsets is not None:
            return Cast(*direct.quantize_grouped_mx(x, request.offsets, dtype, **how))
        if self.grouped:
            return _as_one_matrix(direct.quantize_mx, x, dtype, request, how)
        return Cast(*direct.quantize_mx(x, dtype, **how))

    def _block(self, stored: Tensor, role: Role) -> list[int]:
        return [1, MX_BLOCK]


class NVFP4Caster(TensorCaster):
    """Casts to NVFP4, emulated: no GPU path. Each block of each copy has a scale of its own amax, under one scale for
    the tensor, which is the slot's. Of Linears only."""

    records_in_cast = False
    draws = True

    def __init__(self, recipe: Recipe, job: JobState, sync: ArenaSync, precision: Precision | None) -> None:
        super().__init__(recipe, job, sync, precision)
        assert isinstance(recipe, NVFP4Scaling)
        assert precision is not None
        self.nvfp4 = recipe
        name = f"{recipe.seed} {precision.slots[Role.INPUT].fqn}".encode()
        self._key = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)
        self._part = (0, 1)  # First output feature of this rank, and their number on all ranks.
        self._backwards = (-1, 0)  # Boundaries passed, and gradients since.

    def counted_step(self, parameter: Tensor, module: Any) -> Tensor:
        """Return the training step, int64 0-d. Autograd keeps it for the backward, which may run after the step's end.

        Args:
            parameter: the weight as the module holds it, whole or this rank's part.
            module: the FP8Linear.
        """
        if capturing(parameter.device):
            raise ConfigurationError(
                "NVFP4Scaling: a CUDA graph would repeat the random numbers of one step: capture with another recipe"
            )
        dim = 1 if module.transposed else 0
        self._part = first_local_row(parameter, dim) if is_dtensor(parameter) else 0, parameter.shape[dim]
        return self.sync.arena.step.to(torch.int64)

    def _copies(self, x: Tensor, request: Request, how: dict[str, Any]) -> Cast:
        del how["power_of_two"]
        role, recipe = request.role, self.nvfp4
        encode, draw = self._encode(x, request), torch.zeros(len(COUNTERS), dtype=torch.int64, device=x.device)
        if request.step is not None:
            draw[0] = request.step
        if role is Role.GRAD_OUTPUT:
            counters = (request.number, self.job.data_rank * len(x), *self._part)
            for place, counter in enumerate(counters, 1):  # Filled one by one: a copy would make the host wait.
                draw[place] = counter
        copies = direct.quantize_nvfp4(
            x,
            encode,
            draw,
            request.state.format.dtype,
            key=self._key,
            square=role is Role.WEIGHT,
            hadamard=recipe.hadamard and role is not Role.WEIGHT,
            stochastic=recipe.stochastic_rounding and role is Role.GRAD_OUTPUT,
            **how,
        )
        return Cast(*copies)._replace(tensor_inv_scale=torch.reciprocal(encode))

    def _encode(self, x: Tensor, request: Request) -> Tensor:
        """Return the tensor's scale, float32 0-d: the slot's, or one of its own amax where ``TensorCaster`` does so."""
        limits, of_weight = request.limits, request.role is Role.WEIGHT
        if of_weight and limits.scale is not None:
            return limits.scale
        amax, state, limit = amax_of(x), request.state, limits.weight if of_weight else limits.others
        encode = scale_for(amax, state, self.recipe, math.inf if limit is None else limit)
        unfit = self._unfit(x, request) if (limits.written if of_weight else limits.upstream is not None) else None
        return encode if unfit is None else torch.where(unfit, scale_for(amax, state, self.recipe, None), encode)

    def next_backward(self, recorded: bool) -> int:
        """Return how many gradients were cast and recorded since the last boundary, and count another one if it is
        ``recorded``. A recomputation casts none, and an evaluation records none."""
        boundaries, number = self._backwards
        number = number if boundaries == self.job.boundaries else 0
        self._backwards = self.job.boundaries, number + recorded
        return number

    def _measured(self, x: Tensor, request: Request, cast: Cast) -> Cast:
        """See ``Caster``. 7 is half a step above 6, the largest element. A block whose scale is 0 is flushed."""
        if x.numel() == 0:
            return cast
        rows = (cast.rows, cast.rows_inv_scale) if request.rows else (cast.columns, cast.columns_inv_scale)
        inv_scale = rows[1].repeat_interleave(NVFP4_BLOCK, 1)
        if request.rows or not (self.nvfp4.hadamard and request.role is not Role.WEIGHT):
            lines = (x if request.rows else x.t()).float().abs()
            inv_scale, elements = inv_scale[:, : lines.shape[1]], rows[0][:, : lines.shape[1]].float()
            for share, hit in (
                (request.state.saturated, (lines > 7 * inv_scale) & (inv_scale > 0)),
                (request.state.underflow, (lines > 0) & (elements == 0)),
            ):
                share.copy_(torch.maximum(share, hit.float().mean()))
        return cast


def caster_for(recipe: Recipe, job: JobState, sync: ArenaSync, precision: Precision | None) -> Caster:
    """Return the caster of a recipe. See ``Caster`` for the arguments."""
    casters: dict[str, type[Caster]] = {
        "tensor": TensorCaster,
        "row": RowCaster,
        "block": BlockCaster,
        "mx": MXCaster,
        "nvfp4": NVFP4Caster,
    }
    return casters[recipe.by](recipe, job, sync, precision)


def _as_one_matrix(
    op: Callable[..., Any], x: Tensor, dtype: torch.dtype, request: Request, how: dict[str, Any]
) -> Cast:
    """Return a cast of weights [E, n, k] as one matrix [E n, k], and likewise of columns: no scale belongs to more than
    a row."""
    copies: list[Tensor] = []
    for wanted, stored in ((request.rows, x), (request.columns, x.mT)):
        experts, lines, width = stored.shape
        made: Iterable[Tensor] = (x.new_empty(0),) * 2
        if wanted:
            flat = op(stored.reshape(-1, width), dtype, **{**how, "rows": True, "columns": False})[:2]
            made = (one.view(experts, lines, -1) for one in flat)
        copies += made
    return Cast(copies[0], copies[1], copies[2], copies[3])


def record_experts(values: Tensor, place: Tensor, recorded: ExpertMask) -> None:
    """Raise ``place`` to the maximum of itself and ``values``, in place. Local.

    Args:
        values: amaxes or shares, float32[E]; -1 for an expert without a value.
        place: float32[E], the recorded maxima.
        recorded: the experts to record.
    """
    # As int32, because non-negative floats compare as their bits do, and NaN then counts as the largest.
    bits, into = values.view(torch.int32), place.view(torch.int32)
    if isinstance(recorded, Tensor):
        bits = torch.where(recorded, bits, DID_NOT_RUN_BITS)
    into.copy_(torch.maximum(into, bits))


def count_tokens(offsets: Tensor, state: SlotViews) -> None:
    """Add the number of each expert's tokens to ``state.tokens``. Called in backwards, because activation checkpointing
    repeats forwards, but not backwards.

    Args:
        offsets: int32[E], the ends of the experts' rows.
        state: the state of the grad_output slots.
    """
    state.tokens.add_(torch.diff(offsets, prepend=offsets.new_zeros(1)))


def _experts_of(x: Tensor, offsets: Tensor) -> Tensor:
    """Return the number of each row's expert. Rows without an expert get the last number; callers ignore them."""
    return expert_of_rows(len(x), offsets).clamp_(max=len(offsets) - 1)
