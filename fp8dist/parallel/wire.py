"""Gradients that ranks add up in FP8: each rank casts a shard for every rank, and adds up the shards that it receives
in float32. DDP then gathers the sums, cast again; FSDP2 keeps its own. See docs/design/wire.md."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8dist.errors import ConfigurationError
from fp8dist_kernels.ops import version_of_backend
from fp8dist_kernels.reference import wire

__all__ = ["LEAST", "MOST_RANKS", "Exchange", "FP8ReduceScatter", "decode", "encode", "travels_in_fp8"]

LEAST = 1 << 16
"""Fewest numbers that travel in FP8. Of fewer, the time does not depend on the bytes."""

MOST_RANKS = 128
"""Most ranks that exchange shards directly: see docs/design/wire.md."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# torch 2.13 has renamed them, and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def travels_in_fp8(numbers: int, dtype: torch.dtype, group: dist.ProcessGroup) -> bool:
    """True if the ranks of ``group`` add up so many numbers in FP8; False: in their own dtype, as without fp8dist.

    Raises:
        ConfigurationError: the group has too many ranks.
    """
    if numbers < LEAST or dtype not in _DTYPES or group.size() == 1:
        return False
    if group.size() > MOST_RANKS:
        raise ConfigurationError(
            f"gradients in FP8 travel from each rank to each other one, which is slower than an all-reduce in bf16 "
            f"above {MOST_RANKS} ranks: this group has {group.size()}. Leave gradients in FP8 out"
        )
    return True


def encode(x: Tensor, count: int, length: int) -> Tensor:
    """See ``reference/wire.py``. Local."""
    messages: Tensor = version_of_backend("auto", x.device, wire).encode(x, count, length)
    return messages


def decode(messages: Tensor, length: int, out: Tensor, factor: float = 1.0) -> None:
    """See ``reference/wire.py``. Local."""
    version_of_backend("auto", out.device, wire).decode(messages, length, out, factor)


class Exchange:
    """Shards of a flat tensor on their way to the ranks that add them up. COLLECTIVE over ``group``: an all-to-all.

    Args:
        flat: [n], contiguous; rank i of the group adds up flat[i * length : (i + 1) * length].
    """

    def __init__(self, flat: Tensor, length: int, group: dist.ProcessGroup) -> None:
        self.length, self._group = length, group
        self._sent = encode(flat, group.size(), length)
        self._received = torch.empty_like(self._sent)
        self._work = dist.all_to_all_single(self._received, self._sent, group=group, async_op=True)

    def add_up(self, out: Tensor, factor: float) -> None:
        """Wait for the shards, and write ``factor`` times their sum to ``out``, [length] or shorter. Local."""
        self._work.wait()
        decode(self._received.unsqueeze(0), self.length, out, factor)

    def gather_means(self) -> tuple[dist.Work, Tensor]:
        """Wait for the shards, and start to gather their means, cast again. COLLECTIVE: an all-gather.

        Returns:
            The all-gather, and its result: a message for each rank, uint8[ranks, bytes].
        """
        mean = torch.empty(self.length, device=self._received.device)
        self.add_up(mean, 1.0 / self._group.size())
        mine = encode(mean, 1, self.length)
        messages = mine.new_empty(self._group.size(), mine.shape[1])
        return _all_gather(messages, mine, group=self._group, async_op=True), messages


class FP8ReduceScatter:
    """What FSDP2's ``set_custom_reduce_scatter`` takes: reduces gradients in FP8. COLLECTIVE over the group of a call:
    an all-to-all, or the plain reduce-scatter of fewer than ``LEAST`` numbers."""

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
        Exchange(input_tensor, output_tensor.numel(), group).add_up(output_tensor, factor)
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
