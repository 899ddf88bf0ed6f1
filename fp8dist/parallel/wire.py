"""Gradients that ranks add up in FP8: each rank casts a shard for every rank, and adds up the shards that it receives
in float32. DDP then gathers the sums, cast again; FSDP2 keeps its own. See docs/design/wire.md."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8dist.errors import ConfigurationError
from fp8dist.state.received import Received
from fp8dist_kernels import BLOCK
from fp8dist_kernels.ops import version_of_backend
from fp8dist_kernels.reference import wire


class Reduced(NamedTuple):
    """What all ranks have received of a bucket. ``rows``: uint8[parts, bytes], for ``unpack``. ``length``: numbers of a
    part. ``damaged``: from which ranks of the all-to-all this rank has received other bytes than they had sent,
    bool[ranks]."""

    rows: Tensor
    length: int
    damaged: Tensor


Phases = Generator[dist.Work, None, Reduced]
"""What yields collectives that have started. The caller waits for each, and goes on."""

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
    return numbers >= max(1, LEAST * group.size())


def encode(x: Tensor, count: int, length: int) -> Tensor:
    """See ``reference/wire.py``. Local."""
    messages: Tensor = version_of_backend("auto", x.device, wire).encode(x, count, length)
    return messages


def decode(messages: Tensor, length: int, out: Tensor, factor: float = 1.0) -> None:
    """See ``reference/wire.py``. Local."""
    version_of_backend("auto", out.device, wire).decode(messages, length, out, factor)


def all_reduce(
    flat: Tensor, exact: Tensor, group: dist.ProcessGroup, number: int, factor: float | None = None
) -> Phases:
    """Start to average flat tensors over the ranks of a group. COLLECTIVE: an all-to-all, then an all-gather.

    Args:
        flat: [n], contiguous, travels in FP8.
        exact: [m], travels in its own dtype in the same messages, and is added up in float64.
        number: of this bucket of this backward, the same on all ranks: see ``_sign``.
        factor: by what the terms of a sum are multiplied. None: one over the size of the group.
    """
    count = group.size()
    length = -(-flat.numel() // (count * BLOCK)) * BLOCK
    sent = _sealed([encode(flat, count, length), _pieces(exact, count)], group, number)
    received = torch.empty_like(sent)
    yield dist.all_to_all_single(received, sent, group=group, async_op=True)
    rows, damaged = _opened(received, group, number)
    numbers, pieces = _divided(rows, length, exact.dtype)
    mean, factor = torch.empty(length, device=flat.device), 1.0 / count if factor is None else factor
    decode(numbers.unsqueeze(0), length, mean, factor)
    of_exact = pieces.double().sum(0, keepdim=True).mul_(factor).to(exact.dtype)
    mine = torch.cat([encode(mean, 1, length), of_exact.view(torch.uint8)], 1)
    gathered = mine.new_empty(count, mine.shape[1])
    yield _all_gather(gathered, mine, group=group, async_op=True)
    return Reduced(gathered, length, damaged)


def unpack(reduced: Reduced, flat: Tensor, exact: Tensor) -> None:
    """Write the means of ``all_reduce`` to tensors like those that were given to it. Local."""
    numbers, pieces = _divided(reduced.rows, reduced.length, exact.dtype)
    decode(numbers.unsqueeze(1), reduced.length, flat)
    exact.copy_(pieces.view(-1)[: exact.numel()])


def _pieces(exact: Tensor, count: int) -> Tensor:
    """Return a flat tensor as bytes, cut for so many ranks: uint8[count, a multiple of 8]."""
    size = -(-exact.numel() // (count * 4)) * 4
    return nn.functional.pad(exact, (0, count * size - exact.numel())).view(count, size).view(torch.uint8)


def _divided(rows: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the messages in FP8 of ``rows``, and the numbers in full precision after them, both contiguous."""
    size = wire.message_bytes(length)
    return rows[:, :size].contiguous(), rows[:, size:].contiguous().view(dtype)


def _sealed(parts: Sequence[Tensor], group: dist.ProcessGroup, number: int) -> Tensor:
    """Return messages uint8[ranks, bytes] to the ranks of a group: their parts side by side, then a checksum. Local."""
    ranks = torch.arange(group.size(), device=parts[0].device)
    sums = _sign(number, group.rank(), ranks)
    for part in parts:
        if part.numel():
            sums += part.view(torch.int32).sum(1)
    return torch.cat([*parts, sums.unsqueeze(1).view(torch.uint8)], 1)


def _opened(rows: Tensor, group: dist.ProcessGroup, number: int) -> tuple[Tensor, Tensor]:
    """Return the messages that were received from the ranks of a group, a view, and from whom other bytes came than
    were sent, bool[ranks]. Local."""
    sums = rows[:, -8:].contiguous().view(torch.int64)[:, 0]
    expected = rows.view(torch.int32)[:, :-2].sum(1)
    ranks = torch.arange(group.size(), device=rows.device)
    return rows[:, :-8], sums != expected + _sign(number, ranks, group.rank())


def _sign(number: int, sender: Any, receiver: Any) -> Any:
    """Return what is added to the 32-bit words of a message in its checksum, so that a message of another step or
    bucket, or for another rank, is not taken for this one. Ranks are numbers, or int64."""
    return (number * MOST_RANKS + sender) * MOST_RANKS + receiver


def all_reduce_by_nodes(
    flat: Tensor, exact: Tensor, within: dist.ProcessGroup, between: dist.ProcessGroup, number: int
) -> Phases:
    """The same over a mesh: in bf16 within a node, and in FP8 between nodes, of each rank's part. COLLECTIVE: a
    reduce-scatter and an all-gather within, and those of ``all_reduce`` between. ``exact`` has a reduce-scatter of its
    own.

    Args:
        within: the ranks of this node. ``between``: those that have this rank's place in their nodes.
    """
    ranks = within.size() * between.size()
    parts: list[Tensor] = []
    for tensor, dtype, unit in ((flat, torch.bfloat16, BLOCK), (exact, exact.dtype, 4)):
        length = -(-tensor.numel() // (ranks * unit)) * unit
        sent = tensor.new_zeros(ranks * length, dtype=dtype)
        sent[: tensor.numel()] = tensor / ranks  # Before the sums, which then stay finite, as in DDP.
        parts.append(sent.new_empty(between.size() * length))
        if length:
            yield _reduce_scatter(parts[-1], sent, group=within, async_op=True)
    rows, length, damaged = yield from all_reduce(parts[0], parts[1], between, number, 1.0)
    everyone = rows.new_empty(within.size() * len(rows), rows.shape[1])
    yield _all_gather(everyone, rows, group=within, async_op=True)
    return Reduced(everyone, length, damaged)


class FP8ReduceScatter:
    """What FSDP2's ``set_custom_reduce_scatter`` takes: reduces gradients in FP8. COLLECTIVE over the group of a call:
    an all-to-all, or the plain reduce-scatter of fewer than ``LEAST`` numbers for each rank.

    Args:
        name: of the module.
        received: is given the messages that were damaged.
        started: called before an exchange.
    """

    def __init__(self, name: str, received: Received, started: Callable[[], None]) -> None:
        self._names, self._received, self._started = (name or "the model",), received, started
        self._calls = 0

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
        self._started()
        self._calls += 1
        sent = _sealed([encode(input_tensor, group.size(), output_tensor.numel())], group, self._calls)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        rows, damaged = _opened(received, group, self._calls)
        self._received.add_damaged(self._names, damaged, tuple(dist.get_process_group_ranks(group)))
        decode(rows.contiguous().unsqueeze(0), output_tensor.numel(), output_tensor, factor)
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
