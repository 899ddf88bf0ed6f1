"""GroupedSlots: gives a grouped product its FP8 state, one slot per expert and tensor, and casts its weights.

A *grouped product* multiplies the rows of each of E experts with that expert's weight.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fp8dist.modules.casters import Cast, ExpertMask, Request, record_experts
from fp8dist.modules.fp8_weight import FP8Weight
from fp8dist.modules.job_state import JobState
from fp8dist.modules.linear_slots import LinearSlots, States
from fp8dist.modules.modes import ByGemm, Choice
from fp8dist.modules.outgrown import Outgrown
from fp8dist.state.arena import SlotViews
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.recipe import Recipe
from fp8dist.state.slots import Slot
from fp8dist_kernels import GEMMS
from fp8dist_kernels.formats import Role


def slot_names(fqn: str, experts: int) -> tuple[dict[Role, Slot], ...]:
    """Return the slots of each expert of the grouped product ``fqn``. Expert 3 of ``"experts.gate_up"`` has the slots
    of ``"experts.gate_up.3"``."""
    return tuple({role: Slot(f"{fqn}.{expert}", role.value) for role in Role} for expert in range(experts))


class GroupedSlots(LinearSlots):
    """The FP8 state of one grouped product: the slots of its E experts.

    ``slots`` are names of the product itself. The arena has no such slots, only those in ``experts``.
    """

    grouped = True

    def __init__(self, sync: ArenaSync, job: JobState, recipe: Recipe, fqn: str, name: str, experts: int) -> None:
        slots = {role: Slot(fqn, role.value) for role in Role}
        super().__init__(sync, sync, job, recipe, slots, name, slot_names(fqn, experts))
        sync.experts[fqn] = self.precisions

    def _begin(self) -> None:
        super()._begin()
        self.owner: weakref.ref[nn.Module] | None = None
        self._choice: tuple[int, torch.device, Choice] | None = None

    def belong_to(self, owner: nn.Module) -> None:
        """See ``LinearSlots``. Also registers a listener, so that each change of precision renews ``choice``."""
        super().belong_to(owner)
        self.owner = weakref.ref(owner)
        self.job.listeners = (*self.job.listeners, functools.partial(_renew_choice, weakref.ref(self)))

    @property
    def weight_place(self) -> slice:
        """See ``LinearSlots``."""
        return self.weight_sync.arena.run_of(self.weight_slots)

    def weights_of(self, weight: Tensor, first: int = 0) -> Iterator[tuple[Slot, Tensor]]:
        """See ``LinearSlots``: one matrix [n, k] for each expert from ``first`` on."""
        return zip(self.weight_slots[first:], weight)

    def states(self, device: torch.device) -> States:
        """See ``LinearSlots``. The first call also makes the first choice, because compiled code cannot."""
        states = super().states(device)
        if self._choice is None:
            self.choice(device)
        return states

    def _state_of(self, role: Role, sync: ArenaSync) -> SlotViews:
        return sync.arena.state_of_run([slots[role] for slots in self.experts])

    def choice(self, device: torch.device) -> Choice:
        """Return which experts' products are in high precision now, and whose amaxes are recorded. The masks are on
        ``device``. They are built again only after ``set_precision`` or a fallback changed a precision."""
        changes = self.precisions[0].changes.count
        if self._choice is None or self._choice[:2] != (changes, device):
            high = ByGemm(*(_mask([gemm in each.high for each in self.precisions], device) for gemm in GEMMS))
            seen = [each.recorded for each in self.precisions]
            of_input, weight, grad_output = (_mask([role in roles for roles in seen], device) for role in Role)
            all_high = all(of is True for of in high)
            self._choice = changes, device, Choice(high, (of_input, weight, grad_output), all_high)
        return self._choice[2]

    # Casts -----------------------------------------------------------------------------------------

    def record_weight(
        self, weight: Tensor, cast: Cast | None, offsets: Tensor, state: SlotViews, recorded: ExpertMask
    ) -> None:
        """Record the amaxes of a weight in its slots, for the experts that have rows. Experts without rows did not run.

        Args:
            weight: [E, n, k], any strides.
            cast: the weight's cast. Its amaxes are used if it has any. None: there is no cast.
            offsets: int32[E], the ends of the experts' rows.
            state: the state of the weight's slots.
            recorded: the experts to record.
        """
        if recorded is False or isinstance(weight, FP8Weight):  # FSDP's gather records its shards.
            return
        used = torch.diff(offsets, prepend=offsets.new_zeros(1)) > 0
        self._record(weight.detach(), cast, state, state.pending, used if recorded is True else used & recorded)

    def _record(self, weight: Tensor, cast: Cast | None, state: SlotViews, place: Tensor, recorded: ExpertMask) -> None:
        """Record the amaxes of a weight in ``place`` [E], and the shares of its cast, if measured, in the state."""
        amaxes = None if cast is None else cast.amaxes
        record_experts(self.caster.amaxes(weight, None, state) if amaxes is None else amaxes, place, recorded)
        if cast is not None and cast.shares is not None:
            record_experts(cast.shares[0], state.saturated, recorded)
            record_experts(cast.shares[1], state.underflow, recorded)

    def shard_cast(
        self,
        shard: Tensor,
        first: int,
        amax: Tensor,
        record: bool,
        scale: Tensor,
        tapped: bool = False,
        copies: tuple[bool, bool] = (True, False),
    ) -> Cast:
        """See ``LinearSlots``. ``shard``: [experts on this rank, n, k], which are those from ``first`` on. With a
        recipe by tensor, the result has the inverse scales of all E experts: the gathered weight needs these."""
        every = self.states(self.weight_sync.arena.device)[1]
        by_tensor, nothing = self.recipe.by == "tensor", shard.new_empty(0)
        inv_scales = torch.reciprocal(scale) if by_tensor else shard.new_empty(0, dtype=torch.float32)
        if not len(shard):  # More ranks than experts.
            return Cast(shard.to(every.format.dtype), inv_scales, nothing, nothing)
        own = slice(first, first + len(shard))
        state = self.weight_sync.arena.state_of_run(self.weight_slots[own])
        limits = Outgrown(None, scale=scale[own] if by_tensor else None)
        request = Request(state, Role.WEIGHT, *copies, record, limits, tapped=tapped)
        cast = self.caster.cast(shard, request)
        if record:
            self._record(shard, cast, state, amax[own], True)
        return cast._replace(rows_inv_scale=inv_scales) if by_tensor else cast


def _renew_choice(reference: weakref.ref[GroupedSlots]) -> None:
    """Make the choice again if there is one. Compiled forwards cannot make it: it is not traceable."""
    slots = reference()
    if slots is not None and slots._choice is not None:
        slots.choice(slots._choice[1])


def _mask(flags: list[bool], device: torch.device) -> ExpertMask:
    if all(flags) or not any(flags):
        return flags[0]
    return torch.tensor(flags, device=device)
