"""Overwrite the state of slots outside a step: loads, resets, conversions, repairs. All local.

``n``: number of slots in the arena. ``where``: bool[n], the slots to change. ``index``: int64[m], their rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fp8dist.state.arena import Arena, fitted
from fp8dist_kernels.arrays import TAKEN
from fp8dist_kernels.reference.rings import write_window


def derive_scales(arena: Arena, amax: Tensor, where: Tensor) -> None:
    """Set scales from ``amax`` (float32[n]) alone, where ``where`` (bool[n]) is True and the amax is positive and
    finite. These slots are no longer cold. Changes neither history nor step."""
    usable = where & (amax > 0) & (amax < torch.inf)
    arena.rescale(amax, usable)
    arena.cold.bitwise_and_(~usable)


def adopt_untaken_scales(arena: Arena, scales: Tensor, taken: Tensor) -> None:
    """Take scale and inv_scale (float32[2, n]) for the slots that took an amax neither in the last commit nor in
    ``taken`` (bool[n], the flags of another commit)."""
    torch.where(taken | arena.flags[TAKEN], arena.scales, scales, out=arena.scales)


def make_cold(arena: Arena, places: Sequence[int]) -> None:
    """Reset the scales and windows of these slots to cold. Counters stay: they give the position in a ring."""
    where = arena.mask(places)
    arena.forget_history(where)
    arena.scales.masked_fill_(where, 1)
    arena.cold.logical_or_(where)
    arena.cold_written()


def set_scale(arena: Arena, index: int | slice, scale: float) -> None:
    """Set the scale of one slot or of several, which are then no longer cold."""
    arena.scale[index] = scale
    torch.reciprocal(arena.scale, out=arena.inv_scale)
    arena.cold[index] = False


def load_slots(
    arena: Arena, index: Tensor, scale: Tensor, amax: Tensor, cold: Tensor, counters: Tensor, history: Tensor
) -> None:
    """Replace the state of the slots ``index`` (int64[m]).

    Args:
        scale: float32[m].
        amax: float32[m], the newest.
        cold: bool[m].
        counters: int64[3, m]. They determine where a window starts in its ring.
        history: float32[m, any length], oldest first. The newest ``history_len`` entries are kept; a shorter one
            gets zeros in front.
    """
    arena.scale[index] = scale
    torch.reciprocal(arena.scale, out=arena.inv_scale)
    arena.amax[index] = amax
    arena.cold[index] = cold
    arena.cold_written()
    arena.counters[:, index] = counters
    windows = arena.ordered_history()
    windows[index] = fitted(history, arena.ring.length)
    write_window(arena.history, arena.block_max, arena.taken, arena.ring, windows)


def convert_scales(arena: Arena, where: Tensor, stood_for: Tensor) -> None:
    """Recompute scales by this recipe from ``window_amax``, where ``where`` (bool[n]) is True.

    If the window gives no scale (a weight whose scale came from ``attach``, or a window of zeros), use
    ``stood_for`` (float32[n]), the amax that the old scale stands for. Cold slots, which have no scale of their
    own, are skipped.
    """
    amax = arena.window_amax()
    usable = (amax > 0) & (amax < torch.inf)
    derive_scales(arena, torch.where(usable, amax, stood_for), where & ~arena.cold)


def put_back_slots(arena: Arena, state: Mapping[str, Tensor], index: Tensor) -> None:
    """Restore scales and windows of the slots ``index`` (int64[m]) from a ``copied_state``, in place."""
    for name in ("history", "block_max", "amax", "cold"):
        getattr(arena, name)[index] = state[name][index]
    arena.scales[:, index] = state["scales"][:, index]
    arena.cold_written()
