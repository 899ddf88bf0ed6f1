"""GroupedSlots: a grouped product's access to the FP8 state of its experts, and the casts of its tensors."""

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
from fp8dist.state.recipe import GEMMS, Recipe
from fp8dist.state.slots import Slot
from fp8dist_kernels.formats import Role

__all__ = ["GroupedSlots", "slot_names"]


def slot_names(fqn: str, experts: int) -> tuple[dict[Role, Slot], ...]:
    """Return the slots of each expert of a grouped product: ``"….experts.gate_up.3"`` for ``"….experts.gate_up"``."""
    return tuple({role: Slot(f"{fqn}.{expert}", role.value) for role in Role} for expert in range(experts))


class GroupedSlots(LinearSlots):
    """A grouped product's access to the FP8 state: the slots of its E experts, and how it may use them.

    ``slots`` names the product itself and has no place in an arena.
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
        """See ``LinearSlots``. From now on, a change of precision renews the choice."""
        super().belong_to(owner)
        self.owner = weakref.ref(owner)
        self.job.listeners = (*self.job.listeners, functools.partial(_renew_choice, weakref.ref(self)))

    @property
    def weight_place(self) -> slice:
        """See ``LinearSlots``."""
        return self.weight_sync.arena.run_of(self.weight_slots)

    def weights_of(self, weight: Tensor, first: int = 0) -> Iterator[tuple[Slot, Tensor]]:
        """See ``LinearSlots``: a slice for each expert."""
        return zip(self.weight_slots[first:], weight)

    def states(self, device: torch.device) -> States:
        """See ``LinearSlots``. The first call also makes the first choice."""
        states = super().states(device)
        if self._choice is None:
            self.choice(device)
        return states

    def _state_of(self, role: Role, sync: ArenaSync) -> SlotViews:
        return sync.arena.state_of_run([slots[role] for slots in self.experts])

    def choice(self, device: torch.device) -> Choice:
        """Return what ``set_precision`` and fallbacks say now. Made anew only when they change something."""
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
        """Record the amaxes of a weight [E, n, k], any strides, of these experts, if they have rows: the others have
        not run.

        Args:
            cast: of the weight, which may have found the amaxes. None: there is none.
        """
        if recorded is False or isinstance(weight, FP8Weight):  # FSDP's gather records its shards.
            return
        used = torch.diff(offsets, prepend=offsets.new_zeros(1)) > 0
        self._record(weight.detach(), cast, state, state.pending, used if recorded is True else used & recorded)

    def _record(self, weight: Tensor, cast: Cast | None, state: SlotViews, place: Tensor, recorded: ExpertMask) -> None:
        """Record the amaxes of a weight at ``place``, and the shares of its cast if it has any."""
        amaxes = None if cast is None else cast.amaxes
        record_experts(self.caster.amaxes(weight, None, state) if amaxes is None else amaxes, place, recorded)
        if cast is not None and cast.shares is not None:
            record_experts(cast.shares[0], state.saturated, recorded)
            record_experts(cast.shares[1], state.underflow, recorded)

    def shard_cast(
        self, shard: Tensor, first: int, amax: Tensor, record: bool, scale: Tensor, tapped: bool = False
    ) -> Cast:
        """See ``LinearSlots``: shard [experts from ``first`` on, n, k]. The inverse scales of a recipe by tensor are
        those of all E experts."""
        every = self.states(self.weight_sync.arena.device)[1]
        by_tensor, nothing = self.recipe.by == "tensor", shard.new_empty(0)
        inv_scales = torch.reciprocal(scale) if by_tensor else shard.new_empty(0, dtype=torch.float32)
        if not len(shard):  # More ranks than experts.
            return Cast(shard.to(every.format.dtype), inv_scales, nothing, nothing)
        own = slice(first, first + len(shard))
        state = self.weight_sync.arena.state_of_run(self.weight_slots[own])
        limits = Outgrown(None, scale=scale[own] if by_tensor else None)
        request = Request(state, Role.WEIGHT, True, False, record, limits, tapped=tapped)
        cast = self.caster.cast(shard, request)
        if record:
            self._record(shard, cast, state, amax[own], True)
        return cast._replace(rows_inv_scale=inv_scales) if by_tensor else cast


def _renew_choice(reference: weakref.ref[GroupedSlots]) -> None:
    """Make a choice anew that is in use: a compiled forward must find it, because making it is not traceable."""
    slots = reference()
    if slots is not None and slots._choice is not None:
        slots.choice(slots._choice[1])


def _mask(flags: list[bool], device: torch.device) -> ExpertMask:
    if all(flags) or not any(flags):
        return flags[0]
    return torch.tensor(flags, device=device)
