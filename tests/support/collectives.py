"""Count collectives from outside the library."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from fp8dist import StateManager

_FUNCTIONS = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "scatter",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "send",
    "recv",
    "isend",
    "irecv",
)


@dataclass
class Calls:
    """The calls in order, with the bytes of their first tensors. ``reductions``: group and bytes of all-reduces of
    integers."""

    names: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    reductions: list[tuple[Any, int]] = field(default_factory=list)

    def syncs(self, manager: StateManager) -> list[tuple[int, ...]]:
        """Return the ranks of the reductions with the size of the manager's sync: 8 header words plus one per slot."""
        size = 4 * (8 + len(manager.slots))
        return [tuple(dist.get_process_group_ranks(group)) for group, bytes_ in self.reductions if bytes_ == size]


@contextlib.contextmanager
def counted_collectives(*names: str) -> Iterator[Calls]:
    """Record every Python call into torch.distributed's communicating functions.

    Does not see DDP's reducer, which communicates from C++. Counts what Python code asks for. ``names``: of the
    functions, if not all.
    """
    calls = Calls()

    def counting(name: str, original: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.names.append(name)
            tensor = next((a for a in args if isinstance(a, torch.Tensor)), None)
            calls.sizes.append(0 if tensor is None else tensor.numel() * tensor.element_size())
            if name == "all_reduce" and tensor is not None and tensor.dtype is torch.int32:
                calls.reductions.append((kwargs.get("group", args[2] if len(args) > 2 else None), calls.sizes[-1]))
            return original(*args, **kwargs)

        return wrapper

    with contextlib.ExitStack() as stack:
        for name in names or _FUNCTIONS:
            original = getattr(dist, name)
            stack.enter_context(mock.patch.object(dist, name, counting(name, original)))
        yield calls


class CountingAllGather:
    """Counts FSDP2's all-gathers."""

    def __init__(self, log: list[int]) -> None:
        self.log = log

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        """Log the bytes of the output: what all ranks send together."""
        self.log.append(output_tensor.numel() * output_tensor.element_size())
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
