"""The two updates of the FP8 state in a step. ``launch`` prepares the message that ranks all-reduce. ``commit`` takes
the reduced amaxes into the history and computes new scales."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8dist_kernels.arrays import NONFINITE, SATURATED, TAKEN, StateArrays, UpdateRule
from fp8dist_kernels.header import HEADER, WORD_STEP, WORDS, header_agreement
from fp8dist_kernels.reference.digest import digest_words
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN, DID_NOT_RUN_BITS, INFINITY_BITS
from fp8dist_kernels.reference.rings import RingShape, write
from fp8dist_kernels.scaling import scale_from_amax

OUTCOME = WORDS + 3
"""Length of the result of ``commit``: a disagreement flag per header word, two alarms, and True. The last element
counts the outcomes when they are summed."""


def launch(arrays: StateArrays, hold: Tensor | None, drop_nonfinite: bool) -> None:
    """Fill ``send`` from the live state: the header, then the amaxes since the last launch. Reset ``pending`` to -1.

    The scale digest of the header is computed here, from live memory, so it also reveals scales damaged after their
    commit. The amaxes of sharded weights come from ``shards``.

    Args:
        hold: 0-d or one element, read on the device. Non-zero: a loss scaler skips this optimizer step, so no amax is
            sent, and ``pending`` keeps its values.
        drop_nonfinite: drop held amaxes that are not finite.
    """
    pending = arrays.pending.view(torch.int32)
    send, words = arrays.send, arrays.words
    if len(arrays.shards):
        pending.index_copy_(0, arrays.shard_slots, arrays.shards.view(torch.int32))
    digest_words(arrays.scales.view(-1).view(torch.int32), arrays.keys, words.view(torch.int64)[1:])
    send[:WORDS].copy_(words)
    torch.bitwise_not(words, out=send[WORDS:HEADER])
    send[HEADER:].copy_(pending)
    arrays.sent.copy_(arrays.scales)
    arrays.pending.fill_(DID_NOT_RUN)
    if hold is not None:
        give_back(send, pending, hold, drop_nonfinite)
        send[HEADER:].masked_fill_(hold.reshape(()).bool(), DID_NOT_RUN_BITS)


def give_back(message: Tensor, pending_bits: Tensor, hold: Tensor, drop_nonfinite: bool) -> None:
    """Where ``hold`` is non-zero, merge a message's amaxes back into ``pending_bits`` (int32[n]) for the next launch.

    ``message``: int32[8 + n], reduced or not. Other arguments as in ``launch``.
    """
    bits = message[HEADER:]
    keep = hold.reshape(()).bool()
    if drop_nonfinite:
        keep = keep & (bits < INFINITY_BITS)
    torch.maximum(pending_bits, torch.where(keep, bits, DID_NOT_RUN_BITS), out=pending_bits)


def commit(arrays: StateArrays, rule: UpdateRule, reduced: Tensor, hold: Tensor | None) -> Tensor:
    """Put the reduced amaxes into the history, recompute the scales and increment the step counter, in place.

    If the ranks disagree about the manifest or the step, no amax is taken, because the amaxes may belong to another
    model or step. If they disagree only about scales, the amaxes are taken, and the commit makes the scales equal
    again. A sharded weight takes its amax if any rank ran one of its users.

    Args:
        reduced: int32[8 + n], ``send`` after the collective.
        hold: if non-zero, no amax is taken and the step counter stays.

    Returns:
        bool[7]: for each of the four header words, True if the ranks disagree; True if a slot saw a non-finite amax;
        True if a sharded weight was cast beyond its scale; True.
    """
    agreement, trusted = _judge(reduced, hold)
    bits = reduced[HEADER:]
    if len(arrays.shards):
        ran = bits[arrays.shard_users].amax(1) >= 0
        amaxes = torch.where(ran, bits[arrays.shard_slots], DID_NOT_RUN_BITS)
        bits = bits.index_copy(0, arrays.shard_slots, amaxes)
    if trusted is not True:
        bits = torch.where(torch.as_tensor(trusted, device=bits.device), bits, DID_NOT_RUN_BITS)
    amax = bits.view(torch.float32)
    taken, nonfinite, saturated = arrays.flags[TAKEN], arrays.flags[NONFINITE], arrays.flags[SATURATED]
    torch.ge(bits, INFINITY_BITS, out=nonfinite)
    torch.ge(bits, 0, out=taken).bitwise_xor_(nonfinite)
    scale, inv_scale = arrays.scales
    torch.gt(amax * scale, arrays.rounds_to_max, out=saturated).bitwise_and_(taken)
    if rule.just_in_time:
        # A tensor cast just in time cannot exceed its own scale: ``saturated and not cold``.
        torch.gt(saturated, arrays.cold, out=saturated)
    ring, count = RingShape(rule.length), arrays.counters[TAKEN]
    window_max = write(arrays.history, arrays.block_max, count, arrays.row_start, ring, amax, taken)
    arrays.counters.add_(arrays.flags)
    torch.where(taken, amax, arrays.amax, out=arrays.amax)
    arrays.cold.bitwise_and_(arrays.amax <= 0)
    if rule.algorithm != "none":
        largest = window_max if rule.algorithm == "max" else arrays.amax
        scale_from_amax(largest, scale, arrays.fp8_max, rule.margin, rule.power_of_two, taken, out=scale)
        torch.reciprocal(scale, out=inv_scale)
    arrays.words[WORD_STEP].add_(1 if hold is None else hold.reshape(()) == 0)
    beyond = saturated[arrays.shard_slots].any() if len(arrays.shards) else None
    return _outcome(agreement, nonfinite.any(), beyond)


def _judge(reduced: Tensor, hold: Tensor | None) -> tuple[Tensor | list[bool], Tensor | bool]:
    """Return (agreement of the header words, True if the amaxes may be taken): tensors on CUDA, which are not waited
    for. On a CPU plain values, because comparing eight ints in Python is faster than calling torch."""
    if reduced.is_cuda:
        agreement = header_agreement(reduced)
        same_step = agreement[: WORD_STEP + 1].all()
        return agreement, same_step if hold is None else same_step & (hold.reshape(()) == 0)
    numbers = reduced[:HEADER].tolist()
    agree = [word == ~complement for word, complement in zip(numbers[:WORDS], numbers[WORDS:])]
    return agree, all(agree[: WORD_STEP + 1]) and not (hold is not None and bool(hold))


def _outcome(agreement: Tensor | list[bool], nonfinite: Tensor, saturated: Tensor | None) -> Tensor:
    if isinstance(agreement, list):
        alarms = [bool(nonfinite), saturated is not None and bool(saturated)]
        return torch.tensor([*(not agree for agree in agreement), *alarms, True], device="cpu")
    none, always = torch.zeros_like(nonfinite), torch.ones_like(nonfinite)
    return torch.cat([~agreement, torch.stack([nonfinite, none if saturated is None else saturated, always])])
