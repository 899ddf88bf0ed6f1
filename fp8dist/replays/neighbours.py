"""Exchange batches between ranks: each rank of a group gets a copy of the next rank's batch."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fp8dist.errors import ConfigurationError
from fp8dist.state.groups import SyncGroup, is_dtensor

_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.Size)


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
    """Return a copy of a pytree, so that a step may write to its tensors. The copies are detached from autograd's graph
    but keep ``requires_grad``. Other leaves are not copied."""

    def copied(tensor: Tensor) -> Tensor:
        plain = tensor.detach().resolve_conj().resolve_neg()
        return plain.clone().requires_grad_(tensor.requires_grad)

    return tree_map_only(Tensor, copied, batch)


def from_next(given: Any, group: SyncGroup, device: torch.device) -> Any:
    """Return a copy of the next rank's ``given``, as ``copy_of`` makes it. The last rank gets the first rank's.

    COLLECTIVE over the group: an all-gather of sizes, and an all-to-all in which each rank sends to one other.

    Args:
        given: a pytree of tensors and plain values; see ``require_sendable``.
        device: where to put received tensors that were not on the sender's CPU.
    """
    packed = io.BytesIO()
    torch.save(copy_of(given), packed)
    message = torch.frombuffer(packed.getbuffer(), dtype=torch.uint8).to(group.device)
    pg = group.process_group
    sizes: list[Any] = [None] * group.size
    dist.all_gather_object(sizes, len(message), group=pg)
    place = dist.get_rank(pg)
    before, after = (place - 1) % group.size, (place + 1) % group.size
    sends, gets = [0] * group.size, [0] * group.size
    sends[before], gets[after] = len(message), sizes[after]
    received = torch.empty(sizes[after], dtype=torch.uint8, device=group.device)
    dist.all_to_all_single(received, message, gets, sends, group=pg)

    def placed(storage: Any, location: str) -> Any:
        return torch.serialization.default_restore_location(storage, location if location == "cpu" else str(device))

    # ``weights_only`` is not needed: the data come from a rank of this job, which is trusted as in all_gather_object.
    return torch.load(io.BytesIO(received.cpu().numpy().tobytes()), placed, weights_only=False)
