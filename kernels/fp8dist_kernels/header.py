"""The header of a sync message: four words, then their bitwise complements.

A message is int32[8 + n]: the header, then the recorded amaxes of n slots as bits. The header lets one all-reduce also
check that ranks agree. After an integer MAX over ranks, the reduced word is the largest ``w``, and the complement of
the reduced complement is the smallest. So the two are equal if and only if all ranks sent the same ``w``.
"""

from __future__ import annotations

from torch import Tensor

WORDS = 4
HEADER = 2 * WORDS
WORD_MANIFEST, WORD_STEP, WORD_SCALE_LOW, WORD_SCALE_HIGH = range(WORDS)
"""Places of the words: a digest of the settings that ranks agreed on, the step counter, and a 64-bit digest of the
scales in two halves."""


def header_agreement(reduced: Tensor) -> Tensor:
    """Return bool[4]: for each header word, True if all ranks sent the same. ``reduced``: int32[8 + n]."""
    return reduced[:WORDS] == reduced[WORDS:HEADER].bitwise_not()
