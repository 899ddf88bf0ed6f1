"""The header of a sync's message: four words, followed by their complements.

``send`` is int32[8 + n]: header, then the bits of ``pending``. After an integer MAX over ranks,
``reduced(w) == ~reduced(~w)`` iff all ranks sent the same ``w``: the first gives the largest w, the second the
complement of the smallest.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["HEADER", "WORDS", "WORD_MANIFEST", "WORD_SCALE_HIGH", "WORD_SCALE_LOW", "WORD_STEP", "header_agreement"]

WORDS = 4
HEADER = 2 * WORDS
WORD_MANIFEST, WORD_STEP, WORD_SCALE_LOW, WORD_SCALE_HIGH = range(WORDS)


def header_agreement(reduced: Tensor) -> Tensor:
    """bool[4]: for each header word, whether all ranks sent the same. ``reduced``: int32[8 + n]."""
    return reduced[:WORDS] == reduced[WORDS:HEADER].bitwise_not()
