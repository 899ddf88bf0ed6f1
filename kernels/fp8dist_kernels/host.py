"""``launch`` and ``commit`` of a sync on a CPU: the functions of ``reference/update.py``, in numpy on the same memory.

A launch fills the message that ranks all-reduce; a commit computes new scales from the result. With a few hundred
slots most of the time goes into calls, and a numpy call costs a fraction of a torch call. ``reference/update.py``
defines the results; tests compare all bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fp8dist_kernels.arrays import NONFINITE, SATURATED, TAKEN, StateArrays, UpdateRule
from fp8dist_kernels.header import HEADER, WORD_STEP, WORDS
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN_BITS, INFINITY_BITS
from fp8dist_kernels.scaling import FLOAT32_MAX, SMALLEST_NORMAL

Array = npt.NDArray[Any]


class HostArrays:
    """numpy views of a ``StateArrays`` in CPU memory, of the same names. Comments say where dtype or shape differ."""

    def __init__(self, arrays: StateArrays) -> None:
        self.pending = _bits(arrays.pending)  # int32
        self.send_words, self.send_complements, self.send_amaxes = np.split(arrays.send.numpy(), [WORDS, HEADER])
        self.scales, self.sent = _bits(arrays.scales), _bits(arrays.sent)  # int32[2n]
        self.scale, self.inv_scale = arrays.scales.numpy()
        self.history, self.block_max = arrays.history.numpy().reshape(-1), arrays.block_max.numpy().reshape(-1)
        self.amax, self.cold = arrays.amax.numpy(), arrays.cold.numpy()
        self.counters, self.flags = arrays.counters.numpy(), arrays.flags.numpy()
        self.taken, self.nonfinite, self.saturated = (self.flags[i] for i in (TAKEN, NONFINITE, SATURATED))
        self.words = arrays.words.numpy()
        self.digest = self.words.view(np.int64)[1:].reshape(())  # The two words of the scale digest.
        self.shards = _bits(arrays.shards)  # int32
        self.shard_slots, self.shard_users = arrays.shard_slots.numpy(), arrays.shard_users.numpy()
        self.fp8_max, self.rounds_to_max = arrays.fp8_max.numpy(), arrays.rounds_to_max.numpy()
        self.keys, self.row_start = arrays.keys.numpy(), arrays.row_start.numpy()

        slots, blocks = arrays.block_max.shape
        self.block = arrays.history.shape[1] // blocks  # Length of a block.
        self.nothing = np.full(slots, DID_NOT_RUN_BITS, dtype=np.int32)
        # torch tensors, because torch computes the maxima of short rows eight times faster than numpy.
        self.row_maxima = arrays.block_max
        # Scratch: each slot's block that a commit writes to.
        self.entries = torch.empty(slots, self.block, dtype=torch.float32)


def _bits(tensor: Tensor) -> Array:
    return tensor.numpy().view(np.int32).reshape(-1)


def launch(arrays: HostArrays, hold: Tensor | None, drop_nonfinite: bool) -> None:
    """See ``reference.update.launch``."""
    a = arrays
    if a.shards.size:
        a.pending[a.shard_slots] = a.shards
    np.dot(a.scales, a.keys, out=a.digest)  # Integers: the sum wraps.
    np.copyto(a.send_words, a.words)
    np.invert(a.words, out=a.send_complements)
    np.copyto(a.send_amaxes, a.pending)
    np.copyto(a.sent, a.scales)
    a.pending.fill(DID_NOT_RUN_BITS)
    if hold is not None and bool(hold):
        kept = np.where(a.send_amaxes < INFINITY_BITS, a.send_amaxes, DID_NOT_RUN_BITS)
        np.maximum(kept if drop_nonfinite else a.send_amaxes, DID_NOT_RUN_BITS, out=a.pending)
        a.send_amaxes.fill(DID_NOT_RUN_BITS)


def commit(arrays: HostArrays, rule: UpdateRule, reduced: Tensor, hold: Tensor | None) -> Tensor:
    """See ``reference.update.commit``. ``reduced``, the all-reduced message, may have more elements after it."""
    a, message = arrays, reduced.numpy()
    header = message[:HEADER].tolist()
    differ = [word != ~complement for word, complement in zip(header[:WORDS], header[WORDS:])]
    held = hold is not None and bool(hold)
    bits = a.nothing
    if not any(differ[: WORD_STEP + 1]) and not held:
        bits = _amax_bits(a, message[HEADER : HEADER + len(a.pending)])
    with np.errstate(all="ignore"):  # As in torch, x / 0 is Inf, and integers wrap.
        _update(a, rule, bits)
        if not held:
            a.words[WORD_STEP] += 1
    nonfinite = np.count_nonzero(a.nonfinite) > 0  # Faster than any(), which is written in Python.
    saturated = a.shards.size > 0 and np.count_nonzero(a.saturated[a.shard_slots]) > 0
    return torch.from_numpy(np.array([*differ, nonfinite, saturated, True]))


def _amax_bits(a: HostArrays, bits: Array) -> Array:
    """Return the amaxes of a message, int32 bits [n]. A sharded weight's amax counts only if a module that uses the
    weight ran on some rank."""
    if a.shards.size:
        bits = bits.copy()
        ran = bits[a.shard_users].max(1) >= 0
        bits[a.shard_slots] = np.where(ran, bits[a.shard_slots], DID_NOT_RUN_BITS)
    return bits


def _update(a: HostArrays, rule: UpdateRule, bits: Array) -> None:
    """Update flags, histories, counters and scales in place. ``bits``: the amaxes of all ranks, float32 as int32[n]."""
    amax, taken, saturated = bits.view(np.float32), a.taken, a.saturated
    np.less(bits.view(np.uint32), INFINITY_BITS, out=taken)  # Unsigned, DID_NOT_RUN is larger.
    np.greater_equal(bits, INFINITY_BITS, out=a.nonfinite)
    np.greater(amax * a.scale, a.rounds_to_max, out=saturated)
    np.logical_and(saturated, taken, out=saturated)
    if rule.just_in_time:
        np.greater(saturated, a.cold, out=saturated)
    _write(a, rule.length, amax, taken)
    np.add(a.counters, a.flags, out=a.counters)
    np.copyto(a.amax, amax, where=taken)
    np.logical_and(a.cold, a.amax <= 0, out=a.cold)
    if rule.algorithm != "none":
        _rescale(a, rule, a.row_maxima.amax(1).numpy() if rule.algorithm == "max" else a.amax, taken)


def _write(a: HostArrays, length: int, amax: Array, taken: Array) -> None:
    """See ``reference.rings.write``."""
    place = np.remainder(a.counters[TAKEN], length)
    place += a.row_start
    entries = a.history.take(place)
    np.copyto(entries, amax, where=taken)
    a.history.put(place, entries)
    place //= a.block  # Rows are whole blocks long.
    a.history.reshape(-1, a.block).take(place, 0, out=a.entries.numpy(), mode="clip")  # "raise" would copy ``out``.
    a.block_max.put(place, a.entries.amax(1).numpy())


def _rescale(a: HostArrays, rule: UpdateRule, amax: Array, where: Array) -> None:
    """See ``scaling.scale_from_amax``."""
    scale = np.divide(a.fp8_max, amax)
    if rule.margin:
        scale /= np.float32(2.0**rule.margin)
    np.maximum(scale, SMALLEST_NORMAL, out=scale)
    np.minimum(scale, FLOAT32_MAX, out=scale)
    if rule.power_of_two:
        bits = scale.view(np.int32)
        np.bitwise_and(bits, 0x7F800000, out=bits)
    np.copyto(a.scale, scale, where=(amax > 0) & (amax < np.inf) & where)
    np.divide(np.float32(1), a.scale, out=a.inv_scale)
