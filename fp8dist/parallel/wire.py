"""Gradients that ranks add up in FP8: each rank casts a shard for every rank, and adds up the shards that it receives
in float32. DDP then gathers the sums, cast again; FSDP2 keeps its own. See docs/design/wire.md."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8dist.errors import ConfigurationError
from fp8dist_kernels import BLOCK
from fp8dist_kernels.ops import version_of_backend
from fp8dist_kernels.reference import wire

__all__ = [
    "LEAST",
    "MOST_RANKS",
    "FP8ReduceScatter",
    "Phases",
    "all_reduce",
    "all_reduce_by_nodes",
    "decode",
    "travels_in_fp8",
]

Phases = Generator[dist.Work, None, tuple[Tensor, int, Tensor]]
"""What yields collectives, and returns messages, their length, and from which ranks of the all-to-all this rank has
received other bytes than they had sent, bool[ranks]."""

LEAST = 1 << 15
"""Fewest numbers of a message, in which each rank sends a shard to another one: of fewer, the time does not depend on
the bytes. See docs/design/wire-speed.md."""

MOST_RANKS = 128
"""Most ranks that exchange shards directly: beyond, messages of a bucket of 25 MB have about ``LEAST`` numbers."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# torch 2.13 has renamed them, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def travels_in_fp8(numbers: int, dtype: torch.dtype, group: dist.ProcessGroup) -> bool:
    """True if the ranks of ``group`` add up so many numbers in FP8; False: in their own dtype, as without fp8dist.

    Raises:
        ConfigurationError: the group has too many ranks.
    """
    if group.size() == 1 or dtype not in _DTYPES:
        return False
    if group.size() > MOST_RANKS:
        raise ConfigurationError(
            f"gradients in FP8 travel from each rank to each other one, which is slower than an all-reduce in bf16 "
            f"above {MOST_RANKS} ranks: this group has {group.size()}. Leave gradients in FP8 out, or register DDP's "
            "hook with a DeviceMesh of nodes and GPUs as its state"
        )
    return numbers >= LEAST * group.size()


def encode(x: Tensor, count: int, length: int) -> Tensor:
    """See ``reference/wire.py``. Local."""
    messages: Tensor = version_of_backend("auto", x.device, wire).encode(x, count, length)
    return messages


def decode(messages: Tensor, length: int, out: Tensor, factor: float = 1.0) -> None:
    """See ``reference/wire.py``. Local."""
    version_of_backend("auto", out.device, wire).decode(messages, length, out, factor)


def all_reduce(flat: Tensor, group: dist.ProcessGroup, factor: float | None = None) -> Phases:
    """Start to add up a flat tensor over the ranks of a group. COLLECTIVE: an all-to-all, then an all-gather.

    Yields each collective when it has started. The caller waits for it, and goes on.

    Args:
        flat: [n], contiguous.
        factor: by what the terms of the sum are multiplied. None: one over the size of the group.

    Returns:
        The mean as messages, uint8[parts, bytes], and the ``length`` of a part, for ``decode``; and which senders'
        messages were damaged: the all-gather carries checksums of what each rank has sent to each.
    """
    count = group.size()
    length = -(-flat.numel() // (count * BLOCK)) * BLOCK
    sent = encode(flat, count, length)
    received = torch.empty_like(sent)
    yield dist.all_to_all_single(received, sent, group=group, async_op=True)
    mean = torch.empty(length, device=flat.device)
    decode(received.unsqueeze(0), length, mean, 1.0 / count if factor is None else factor)
    mine = torch.cat([encode(mean, 1, length), _checksums(sent).view(torch.uint8).unsqueeze(0)], 1)
    gathered = mine.new_empty(count, mine.shape[1])
    yield _all_gather(gathered, mine, group=group, async_op=True)
    messages, sums = gathered.split([sent.shape[1], 8 * count], 1)
    damaged = sums.contiguous().view(torch.int64)[:, group.rank()] != _checksums(received)
    return messages.contiguous(), length, damaged


def _checksums(messages: Tensor) -> Tensor:
    """Return the sum of the 32-bit words of each message, int64[count]."""
    return messages.view(torch.int32).sum(1)


def all_reduce_by_nodes(flat: Tensor, within: dist.ProcessGroup, between: dist.ProcessGroup) -> Phases:
    """The same over a mesh: in bf16 within a node, and in FP8 between nodes, of each rank's part. COLLECTIVE: a
    reduce-scatter and an all-gather within, and those of ``all_reduce`` between.

    Args:
        within: the ranks of this node. ``between``: those that have this rank's place in their nodes.
    """
    ranks = within.size() * between.size()
    length = -(-flat.numel() // (ranks * BLOCK)) * BLOCK
    sent = flat.new_zeros(ranks * length, dtype=torch.bfloat16)
    sent[: flat.numel()] = flat / ranks  # Before the sums, which then stay finite, as in DDP.
    part = sent.new_empty(between.size() * length)
    yield _reduce_scatter(part, sent, group=within, async_op=True)
    messages, length, damaged = yield from all_reduce(part, between, 1.0)
    everyone = messages.new_empty(within.size() * len(messages), messages.shape[1])
    yield _all_gather(everyone, messages, group=within, async_op=True)
    return everyone, length, damaged


class FP8ReduceScatter:
    """What FSDP2's ``set_custom_reduce_scatter`` takes: reduces gradients in FP8. COLLECTIVE over the group of a call:
    an all-to-all, or the plain reduce-scatter of fewer than ``LEAST`` numbers for each rank."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialised memory. Local."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Write the reduced shard of this rank to ``output_tensor``. ``async_op`` is ignored: the result is there, or
        on the current stream."""
        if not travels_in_fp8(input_tensor.numel(), input_tensor.dtype, group):
            return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        factor = _factor_of(op, group)
        sent = encode(input_tensor, group.size(), output_tensor.numel())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        decode(received.unsqueeze(0), output_tensor.numel(), output_tensor, factor)
        return None


def _factor_of(op: Any, group: dist.ProcessGroup) -> float:
    """Return by what a sum is multiplied to have the result of a reduction.

    Raises:
        ConfigurationError: not known.
    """
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / group.size()
    if op == dist.ReduceOp.PREMUL_SUM and hasattr(op, "factor"):
        return float(op.factor)
    raise ConfigurationError(
        f"gradients in FP8 cannot be reduced by {op}, or this torch does not show its factor. Call "
        "set_force_sum_reduction_for_comms(True) of the FSDP module"
    )
