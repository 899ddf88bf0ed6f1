"""The header of a sync message: four words, then their bitwise complements.

``send`` is int32[8 + n]: the header, then the bits of ``pending``. After an integer MAX over ranks,
``reduced(w) == ~reduced(~w)`` iff all ranks sent the same ``w``: the left side is the largest w, the right side the
smallest.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["HEADER", "WORDS", "WORD_MANIFEST", "WORD_SCALE_HIGH", "WORD_SCALE_LOW", "WORD_STEP", "header_agreement"]

WORDS = 4
HEADER = 2 * WORDS
WORD_MANIFEST, WORD_STEP, WORD_SCALE_LOW, WORD_SCALE_HIGH = range(WORDS)


def header_agreement(reduced: Tensor) -> Tensor:
    """Return bool[4]: for each header word, True if all ranks sent the same. ``reduced``: int32[8 + n]."""
    return reduced[:WORDS] == reduced[WORDS:HEADER].bitwise_not()
