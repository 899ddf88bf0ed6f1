"""Which part of a whole tensor a rank holds. Residues of parameters are distinct, so a part is found by its values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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


def part_of(local: Tensor, whole: Tensor, dim: int, others: Sequence[HeldPart] = ()) -> HeldPart | None:
    """Return the part of ``whole`` that ``local`` is, cut along ``dim``; None if it has slices that ``whole`` has not.

    Args:
        others: parts of other tensors that this rank holds. If slices of ``whole`` are equal, so that values do not
            show the part (biases begin as zeros), the first of them that fits decides.
    """
    found = _places_of(local, whole, dim)
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
    return dim is None or len(set(keys(whole, dim))) == whole.shape[dim]


def _chunks(size: int, whole: int, others: Sequence[HeldPart]) -> list[HeldPart]:
    """Return the contiguous parts of this size, the one that a rank's other parts suggest first."""
    chunks = [HeldPart(0, tuple(range(start, start + size))) for start in range(0, whole - size + 1, max(size, 1))]
    firsts = [part.places[0] // len(part.places) for part in others if part.places]
    return sorted(chunks, key=lambda chunk: chunk.places[0] // size != (firsts[0] if firsts else 0))


def displaced(tensor: Tensor, whole: Tensor, part: HeldPart) -> str | None:
    """Return which slices of ``whole`` stand in ``tensor`` where other slices belong, as text; None if ``tensor`` has
    slices that ``whole`` has not. ``part``: the part of ``whole`` that ``tensor`` should be."""
    for dim in range(tensor.dim()) if part.dim is None else [part.dim]:
        found = _places_of(tensor, whole, dim)
        own = part.places or range(tensor.shape[dim])
        moved = [(place, places[0]) for place, places in zip(own, found) if places and place not in places]
        if moved and all(found) and bool(whole.select(dim, moved[0][1]).any()):
            mine, theirs = runs_text([place for place, _ in moved]), runs_text([place for _, place in moved])
            return f"in place of slices {mine} of dim {dim} are the reference's slices {theirs}"
    return None


def difference_text(tensor: Tensor, whole: Tensor, part: HeldPart = WHOLE) -> str | None:
    """Return how many elements differ between two tensors of one shape, where the first ones are, and the dim along
    which they lie in the fewest slices; None if all are equal. ``part``: what both are of a complete tensor, in which
    the places are."""
    wrong = tensor != whole
    found = wrong.nonzero()
    if not len(found):
        return None
    text = f"{len(found)} of {wrong.numel()} elements differ"
    if not wrong.dim():
        return text
    places = [list(part.places if dim == part.dim else range(size)) for dim, size in enumerate(wrong.shape)]
    first = [str([at[place] for at, place in zip(places, index)]) for index in found[:3].tolist()]
    text += f": {', '.join(first)}" + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    slices = [found[:, dim].unique().tolist() for dim in range(wrong.dim())]
    least = min(range(wrong.dim()), key=lambda dim: len(slices[dim]) / wrong.shape[dim])
    if len(found) == 1 or len(slices[least]) == wrong.shape[least]:
        return text
    shown = runs_text([places[least][place] for place in slices[least]])
    return f"{text}; all in slice{'s' * (len(slices[least]) > 1)} {shown} of dim {least}"


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


def keys(tensor: Tensor, dim: int) -> list[bytes]:
    """Return for each slice along a dim its bytes."""
    rows = tensor.movedim(dim, 0).to(torch.int32).contiguous()
    return [row.numpy().tobytes() for row in rows]


def _places_of(tensor: Tensor, whole: Tensor, dim: int) -> list[list[int]]:
    """Return for each slice of a tensor along a dim the places where ``whole`` has it."""
    places: dict[bytes, list[int]] = {}
    for place, key in enumerate(keys(whole, dim)):
        places.setdefault(key, []).append(place)
    return [places.get(key, []) for key in keys(tensor, dim)]
