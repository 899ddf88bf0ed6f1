"""The two state updates of a step: launch (snapshot for the collective) and commit.

``send`` is int32[8 + n]: header, then the bits of ``pending``. The header is four words followed by
their complements. After an integer MAX over ranks, ``reduced(w) == ~reduced(~w)`` iff all ranks sent
the same ``w``: the first gives the largest w, the second the complement of the smallest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8dist.kernels.digest import digest_words
from fp8dist.kernels.magnitude import DID_NOT_RUN_BITS, INFINITY_BITS

__all__ = [
    "HEADER",
    "WORDS",
    "WORD_MANIFEST",
    "WORD_SCALE_HIGH",
    "WORD_SCALE_LOW",
    "WORD_STEP",
    "give_back",
    "header_agreement",
    "snapshot",
    "withhold",
]

WORDS = 4
HEADER = 2 * WORDS
WORD_MANIFEST, WORD_STEP, WORD_SCALE_LOW, WORD_SCALE_HIGH = range(WORDS)


def snapshot(words: Tensor, scale_bits: Tensor, keys: Tensor, pending_bits: Tensor, send: Tensor) -> None:
    """Fill ``send`` from the live state: header, then the amaxes seen since the last launch.

    Args:
        words: int32[4]: manifest digest, step counter, and room for the scale digest, which is taken
            here, from live memory: a scale that was damaged after its commit shows in this header.
        scale_bits: int32[2n]: bits of scale and inv_scale.
        keys: int64[2n] of ``digest.position_keys``.
        pending_bits: int32[n].
        send: int32[8 + n], written.
    """
    digest_words(scale_bits, keys, words.view(torch.int64)[1:])
    send[:WORDS].copy_(words)
    torch.bitwise_not(words, out=send[WORDS:HEADER])
    send[HEADER:].copy_(pending_bits)


def withhold(send: Tensor, pending_bits: Tensor, hold: Tensor, drop_nonfinite: bool) -> None:
    """Undo a snapshot's amaxes where ``hold`` is non-zero: a loss scaler skipped this optimizer step.

    Sets ``pending_bits`` (int32[n]) to "did not run", and gives back what is held. Decided on the device.

    Args:
        send: int32[8 + n] as ``snapshot`` left it, changed in place.
        hold: 0-d or one element.
        drop_nonfinite: forget held amaxes that are not finite.
    """
    pending_bits.fill_(DID_NOT_RUN_BITS)
    give_back(send, pending_bits, hold, drop_nonfinite)
    send[HEADER:].masked_fill_(hold.reshape(()).bool(), DID_NOT_RUN_BITS)


def give_back(message: Tensor, pending_bits: Tensor, hold: Tensor, drop_nonfinite: bool) -> None:
    """Where ``hold`` is non-zero, let ``pending_bits`` grow to a message's amaxes: they wait for the next
    launch. Arguments as of ``withhold``; ``message`` may have been reduced."""
    bits = message[HEADER:]
    keep = hold.reshape(()).bool()
    if drop_nonfinite:
        keep = keep & (bits < INFINITY_BITS)
    torch.maximum(pending_bits, torch.where(keep, bits, DID_NOT_RUN_BITS), out=pending_bits)


def header_agreement(reduced: Tensor) -> Tensor:
    """bool[4]: for each header word, whether all ranks sent the same. ``reduced``: int32[8 + n]."""
    return reduced[:WORDS] == reduced[WORDS:HEADER].bitwise_not()
