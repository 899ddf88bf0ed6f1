"""Whether boxes fill a box exactly, each place once."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence

__all__ = ["tiles"]

Box = tuple[Sequence[int], Sequence[int]]


def tiles(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Whether ``boxes`` (offsets, sizes) fill ``shape`` without gap or overlap. Linear in their number.

    Each dim is given a random length for every interval between two cuts. Then the volumes of an exact tiling add up,
    and those of another do so with a chance below 1 in 2**50: an overlap makes up for a gap in one metric, not in a
    random one.
    """
    chance = random.Random()
    marks: list[defaultdict[int, int]] = [defaultdict(lambda: chance.getrandbits(64)) for _ in shape]

    def volume(offsets: Sequence[int], extents: Sequence[int]) -> int:
        ends = zip(marks, offsets, extents)
        return math.prod(mark[start + extent] - mark[start] for mark, start, extent in ends)

    whole = volume([0] * len(shape), shape)
    return whole == sum(volume(offsets, extents) for offsets, extents in boxes)
