"""Derivation of weight scales from the weights themselves, if slots have no scale or weights were written to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from fp8dist.state.arena_sync import ArenaSync, all_reduce_max
from fp8dist.state.slots import Slot
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN, INFINITY_BITS, amax_bits, record_amax

__all__ = ["derive_weight_scales"]

_WHAT = "deriving FP8 scales of weights"


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
    arena.derive_scales(amax, where)
    if which != "cold":
        sync.forget(forget)
