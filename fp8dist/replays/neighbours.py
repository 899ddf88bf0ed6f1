"""Exchange batches: each rank of a group gets what the next one has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fp8dist.checks.work_parts import message_of
from fp8dist.errors import ConfigurationError
from fp8dist.state.groups import SyncGroup, is_dtensor
from fp8dist_kernels.reference.content import as_bytes

__all__ = ["copy_of", "from_next", "require_sendable"]

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.Size)
_ALIGNMENT = 16


@dataclass(frozen=True)
class _Described:
    """A tensor as described to the rank that gets it. ``strides``: of a copy, because kernels are chosen by them.
    ``moves``: it lies on the device that computes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    moves: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def room(self) -> int:
        """Bytes in a message: each tensor starts aligned."""
        return -(-self.nbytes // _ALIGNMENT) * _ALIGNMENT


def require_sendable(batch: Any) -> None:
    """Raise ConfigurationError unless ``batch`` is a pytree of tensors and plain values. Local."""
    for leaf in tree_leaves(batch):
        plain = isinstance(leaf, Tensor) and not is_dtensor(leaf) and leaf.layout is torch.strided
        if not plain and not isinstance(leaf, _PLAIN):
            raise ConfigurationError(
                f"replay(): the batch holds a {type(leaf).__name__}, which cannot be sent to another rank: pass dense "
                "tensors, numbers and strings, in tuples, lists and dicts"
            )


def copy_of(batch: Any) -> Any:
    """Return new containers and tensors, so that a step may write to them. The tensors have no graph."""

    def copied(tensor: Tensor) -> Tensor:
        plain = tensor.detach().resolve_conj().resolve_neg()
        return plain.clone().requires_grad_(tensor.requires_grad)

    return tree_map_only(Tensor, copied, batch)


def from_next(given: Any, group: SyncGroup, device: torch.device) -> Any:
    """Return a copy of the next rank's ``given``, as ``copy_of`` makes it: a pytree of tensors and plain values. The
    last rank gets the first one's.
    COLLECTIVE: an all-gather of descriptions, and an all-to-all in which each rank sends its tensors to one other.

    Args:
        device: where tensors go that are not on the CPU.
    """
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    pg = group.process_group
    everyone: list[Any] = [None] * group.size
    dist.all_gather_object(everyone, tree_map_only(Tensor, _described, given), group=pg)
    place = dist.get_rank(pg)
    theirs = everyone[(place + 1) % group.size]
    message = _packed(tensors, group.device)
    size = sum(leaf.room for leaf in tree_leaves(theirs) if isinstance(leaf, _Described))
    received = message_of(size, group.device)
    sends, gets = [0] * group.size, [0] * group.size
    sends[(place - 1) % group.size] = len(message)
    gets[(place + 1) % group.size] = size
    dist.all_to_all_single(received, message, gets, sends, group=pg)
    start = 0

    def made(one: _Described) -> Tensor:
        nonlocal start
        part = received[start : start + one.nbytes].to(device if one.moves else "cpu").clone()
        start += one.room
        tensor = torch.empty_strided(one.shape, one.strides, dtype=one.dtype, device=part.device)
        return tensor.copy_(part.view(one.dtype).view(one.shape)).requires_grad_(one.requires_grad)

    return tree_map_only(_Described, made, theirs)


def _described(tensor: Tensor) -> _Described:
    strides = torch.empty_like(tensor, device="meta").stride()
    return _Described(tuple(tensor.shape), strides, tensor.dtype, tensor.requires_grad, tensor.device.type != "cpu")


def _packed(tensors: list[Tensor], device: torch.device) -> Tensor:
    message = message_of(sum(_described(tensor).room for tensor in tensors), device)
    start = 0
    for tensor in tensors:
        raw = as_bytes(tensor)
        message[start : start + len(raw)] = raw.to(device)
        start += _described(tensor).room
    return message
