"""Derives scales of weights from the weights themselves: where slots have no scale yet, or weights were written to."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from fp8dist.modules.model_state import ModelState
from fp8dist.parallel.fsdp2 import ShardedWeights
from fp8dist.parallel.sharded_weight import ShardedWeight
from fp8dist.state import overwrites
from fp8dist.state.arena_sync import ArenaSync, all_reduce_max
from fp8dist.state.slots import Slot
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN, INFINITY_BITS, amax_bits, record_amax

logger = logging.getLogger("fp8dist")

_WHAT = "deriving FP8 scales of weights"


class WeightScales:
    """The scales of one manager's weights.

    ``sharded``: the weights that FSDP2 gathers in FP8; None: there are none. ``attach`` sets it.
    """

    def __init__(self, state: ModelState) -> None:
        self._state = state
        self.sharded: ShardedWeights | None = None

    def derive(self, weights: Iterable[tuple[ArenaSync, Slot, Tensor]], which: Literal["cold", "all"]) -> None:
        """Set the weight scales of all arenas that have some; see ``derive_weight_scales``. COLLECTIVE."""
        derive_weight_scales([sync for sync in self._state.syncs if self._scales_weights(sync)], weights, which)

    def fit(self, weights: Sequence[ShardedWeight]) -> None:
        """Derive the scales of sharded weights that are cold or no longer fit. COLLECTIVE over their arenas only: the
        ranks of other arenas may have no reason to call it."""
        parts = [part for weight in weights for part in weight.parts()]
        # Not those of the parts: with fewer experts than ranks, some ranks have none.
        concerned = {id(weight.slots.weight_sync) for weight in weights}
        syncs = [sync for sync in self._state.syncs if id(sync) in concerned and self._scales_weights(sync)]
        derive_weight_scales(syncs, parts, "unfit")

    def _scales_weights(self, sync: ArenaSync) -> bool:
        """True if weights are cast with their slots' scales, which are delayed or shared by all shards of a weight."""
        recipe = sync.arena.recipe
        return recipe.delayed or (self.sharded is not None and recipe.by == "tensor")

    def warn_of_outgrown(self) -> None:
        """Warn of gathered weights that were written to without a trace. COLLECTIVE if there are gathered weights."""
        found = [] if self.sharded is None or self._state.job.joined else self.sharded.outgrown()
        if found and found[0].slots.weight_sync.logs:
            logger.warning(
                "fp8dist: %d weight(s) have outgrown their FP8 scales, '%s' first: either the last optimizer step has "
                "enlarged them by more than a quarter, as happens soon after a start from zeros, or other code has "
                "written to them in a way that torch does not report (.data, to_local(), dcp.load). The next forward "
                "casts them with scales that fit; manager.refresh_weights() gives them new ones at once",
                len(found),
                found[0].slots.fqn,
            )


def derive_weight_scales(
    syncs: Sequence[ArenaSync],
    weights: Iterable[tuple[ArenaSync, Slot, Tensor]],
    which: Literal["cold", "unfit", "all"],
) -> None:
    """Set weight scales from the weights as they are now. COLLECTIVE: one all-reduce per arena.

    Args:
        syncs: the arenas' syncs, in the order that all ranks share.
        weights: (sync, slot, this rank's whole or local weight); several entries may name one slot. Entries whose sync
            is not in ``syncs`` are ignored.
        which: "cold": slots without a scale. "unfit": cold slots, and slots whose weight has outgrown its scale or is
            less than half as large as when last seen; all slots, if the recipe is not delayed. "all": all slots.
            "unfit" and "all" also clear the histories, which describe other weights; "unfit" keeps those of cold slots.
    """
    amaxes = {id(sync): torch.full_like(sync.arena.pending, DID_NOT_RUN) for sync in syncs}
    for sync, slot, weight in weights:
        if id(sync) in amaxes:
            bits = amax_bits(weight.detach()).to(sync.arena.device)
            record_amax(bits, amaxes[id(sync)][sync.arena.index[slot]])
    launched = []
    for sync in syncs:
        bits = amaxes[id(sync)].view(torch.int32)
        work = None
        if sync.communicates:
            assert sync.group is not None
            with sync.failing_by_name(_WHAT):
                work = all_reduce_max(bits, sync.group, sync.counters)
        launched.append((sync, bits, work))
    for sync, bits, work in launched:
        if work is not None:
            with sync.failing_by_name(_WHAT):
                work.wait()
        _set_scales(sync, bits, which)


def _set_scales(sync: ArenaSync, bits: Tensor, which: Literal["cold", "unfit", "all"]) -> None:
    """Set scales from the amaxes of all ranks, int32[n]."""
    arena = sync.arena
    amax, where = bits.view(torch.float32), (bits >= 0) & (bits < INFINITY_BITS)
    if which == "unfit" and arena.recipe.delayed:
        where &= arena.cold | ~arena.fits(amax)
    elif which == "cold":
        where &= arena.cold
    forget = where & ~arena.cold if which == "unfit" else where
    overwrites.derive_scales(arena, amax, where)
    if which != "cold":
        sync.forget(forget)
