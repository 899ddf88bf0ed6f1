"""Which part of a whole tensor a rank holds. Residues of parameters are distinct, so a part is found by its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["WHOLE", "HeldPart", "cut_dim", "displaced", "is_distinct", "part_of", "runs_text"]


class HeldPart(NamedTuple):
    """A part of a whole tensor: the slices ``places`` along ``dim``. The whole tensor has no dim: None."""

    dim: int | None
    places: tuple[int, ...] = ()

    def of(self, whole: Tensor) -> Tensor:
        """Return this part of a tensor."""
        return whole if self.dim is None else whole.index_select(self.dim, torch.tensor(self.places, dtype=torch.int64))

    def __str__(self) -> str:
        return "all" if self.dim is None else f"{runs_text(self.places)} of dim {self.dim}"


WHOLE = HeldPart(None)


def cut_dim(local: Sequence[int], whole: Sequence[int]) -> int | None:
    """Return the one dim along which a shape is smaller than another; None if there is none, or if others differ."""
    if len(local) != len(whole):
        return None
    cut = [dim for dim, (mine, all_) in enumerate(zip(local, whole)) if mine != all_]
    return cut[0] if len(cut) == 1 and local[cut[0]] < whole[cut[0]] else None


def part_of(local: Tensor, whole: Tensor, dim: int, others: Sequence[HeldPart] = ()) -> HeldPart | None:
    """Return the part of ``whole`` that ``local`` is, cut along ``dim``; None if it has slices that ``whole`` has not.

    Args:
        others: parts of other tensors that this rank holds. If slices of ``whole`` are equal, so that values do not
            show the part (biases begin as zeros), the first of them that fits decides.
    """
    known = _places(whole, dim)
    found = [known.get(key, []) for key in _keys(local, dim)]
    if all(len(places) == 1 for places in found):
        return HeldPart(dim, tuple(places[0] for places in found))
    if not all(found):
        return None
    sizes = local.shape[dim], whole.shape[dim]
    for part in [*others, *_chunks(*sizes, others)]:
        same = len(part.places) == sizes[0] and max(part.places, default=-1) < sizes[1]
        if same and bool((whole.index_select(dim, torch.tensor(part.places)) == local).all()):
            return HeldPart(dim, part.places)
    return None


def is_distinct(whole: Tensor, dim: int | None) -> bool:
    """True if no two slices along ``dim`` are equal, so that values show which part a rank holds. None: not cut."""
    return dim is None or len(_places(whole, dim)) == whole.shape[dim]


def _chunks(size: int, whole: int, others: Sequence[HeldPart]) -> list[HeldPart]:
    """Return the contiguous parts of this size, the one that a rank's other parts suggest first."""
    chunks = [HeldPart(0, tuple(range(start, start + size))) for start in range(0, whole - size + 1, max(size, 1))]
    firsts = [part.places[0] // len(part.places) for part in others if part.places]
    return sorted(chunks, key=lambda chunk: chunk.places[0] // size != (firsts[0] if firsts else 0))


def displaced(tensor: Tensor, whole: Tensor, part: HeldPart) -> str | None:
    """Return which slices of ``whole`` stand in ``tensor`` where other slices belong, as text; None if ``tensor`` has
    slices that ``whole`` has not. ``part``: the part of ``whole`` that ``tensor`` should be."""
    for dim in range(tensor.dim()) if part.dim is None else [part.dim]:
        known = _places(whole, dim)
        found = [known.get(key, []) for key in _keys(tensor, dim)]
        own = part.places or range(tensor.shape[dim])
        moved = [(place, places[0]) for place, places in zip(own, found) if places and place not in places]
        if moved and all(found) and bool(whole.select(dim, moved[0][1]).any()):
            mine, theirs = runs_text([place for place, _ in moved]), runs_text([place for _, place in moved])
            return f"in place of slices {mine} of dim {dim} are the reference's slices {theirs}"
    return None


def runs_text(places: Sequence[int]) -> str:
    """Return places as text, runs shortened: "0 to 3, 8 to 11"."""
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][1] + 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    shown = [str(first) if first == last else f"{first} to {last}" for first, last in runs[:4]]
    return ", ".join(shown) + (f" and {len(runs) - 4} more runs" if len(runs) > 4 else "")


def _keys(tensor: Tensor, dim: int) -> list[bytes]:
    rows = tensor.movedim(dim, 0).to(torch.int32).contiguous()
    return [row.numpy().tobytes() for row in rows]


def _places(whole: Tensor, dim: int) -> Mapping[bytes, list[int]]:
    places: dict[bytes, list[int]] = {}
    for place, key in enumerate(_keys(whole, dim)):
        places.setdefault(key, []).append(place)
    return places
