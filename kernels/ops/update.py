"""The two state updates of a step: launch (snapshot for the collective) and commit.

``send`` is int32[8 + n]: header, then the bits of ``pending``. The header is four words followed by
their complements. After an integer MAX over ranks, ``reduced(w) == ~reduced(~w)`` iff all ranks sent
the same ``w``: the first gives the largest w, the second the complement of the smallest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8dist.kernels.digest import digest_words
from fp8dist.kernels.magnitude import DID_NOT_RUN, INFINITY_BITS

__all__ = [
    "HEADER",
    "WORD_MANIFEST",
    "WORD_SCALE_HIGH",
    "WORD_SCALE_LOW",
    "WORD_STEP",
    "WORDS",
    "header_agreement",
    "snapshot",
]

WORDS = 4
HEADER = 2 * WORDS
WORD_MANIFEST, WORD_STEP, WORD_SCALE_LOW, WORD_SCALE_HIGH = range(WORDS)


def snapshot(
    pending: Tensor,
    scales: Tensor,
    words: Tensor,
    keys: Tensor,
    send: Tensor,
    sent_scales: Tensor,
    hold: Tensor | None,
    drop_nonfinite: bool,
) -> None:
    """Fill ``send`` and ``sent_scales`` from the live state and set ``pending`` to "did not run".

    Args:
        pending: float32[n], changed in place.
        scales: float32[2, n]: scale and inv_scale. Digested from live memory.
        words: int32[4]: manifest digest, step counter, and room for the scale digest.
        keys: int64[n] of ``digest.position_keys``.
        send: int32[8 + n], written. ``sent_scales``: float32[2, n], written.
        hold: 0-d tensor or None. Where it is non-zero (a loss scaler skipped this optimizer step)
            nothing is sent, and ``pending`` stays as it is. Decided on the device.
        drop_nonfinite: while holding, set non-finite ``pending`` to "did not run".
    """
    digest = digest_words(scales.view(-1).view(torch.int64), keys)
    words[WORD_SCALE_LOW:] = digest.view(1).view(torch.int32)
    send[:WORDS] = words
    torch.bitwise_not(words, out=send[WORDS:HEADER])
    sent_scales.copy_(scales)
    bits = pending.view(torch.int32)
    if hold is None:
        send[HEADER:] = bits
        pending.fill_(DID_NOT_RUN)
        return
    held = hold.reshape(()).bool()
    nothing = torch.full_like(pending, DID_NOT_RUN).view(torch.int32)
    send[HEADER:] = torch.where(held, nothing, bits)
    dropped = (bits >= INFINITY_BITS) if drop_nonfinite else torch.zeros_like(bits, dtype=torch.bool)
    bits.copy_(torch.where(held & ~dropped, bits, nothing))


def header_agreement(reduced: Tensor) -> Tensor:
    """bool[4]: for each header word, whether all ranks sent the same. ``reduced``: int32[8 + n]."""
    return reduced[:WORDS] == reduced[WORDS:HEADER].bitwise_not()
