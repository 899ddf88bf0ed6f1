"""Count the parameter bytes that a rank receives in FSDP's all-gathers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

WAYS = ("all_gather", "all_gather_single", "all_gather_into_tensor")
"""Functions of torch.distributed that FSDP1 gathers with. They depend on the device and the torch version."""


@contextlib.contextmanager
def replaced(names: Sequence[str], by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace these functions of torch.distributed by ``by(function)`` within the context. Skip missing names."""
    before = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    for name, function in before.items():
        setattr(dist, name, by(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


class GatheredBytes:
    """Counts the bytes that this rank receives from other ranks in all-gathers of parameters, within ``counting``."""

    def __init__(self) -> None:
        self.total = 0
        self._counting = False

    def add(self, whole: int, own: int) -> None:
        """Count one all-gather: bytes of the result, and those that this rank contributed."""
        if self._counting:
            self.total += whole - own

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count all-gathers within the context."""
        self._counting = True
        try:
            yield
        finally:
            self._counting = False

    def watch(self, module: FSDPModule) -> None:
        """Count the all-gathers of this FSDP2 module."""
        module.set_custom_all_gather(_CountedAllGather(self))

    @contextlib.contextmanager
    def watch_calls(self) -> Iterator[None]:
        """Count all all-gathers within the context, by patching torch.distributed, because FSDP1 has no hook."""

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(result: Tensor | list[Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                self.add(sum(map(_size, result)) if isinstance(result, list) else _size(result), _size(tensor))
                return function(result, tensor, *args, **kwargs)

            return call

        with replaced(WAYS, counted), self.counting():
            yield


class _CountedAllGather(AllGather):
    """FSDP2's default all-gather, counted."""

    def __init__(self, bytes_: GatheredBytes) -> None:
        self._bytes = bytes_

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._bytes.add(_size(output_tensor), _size(input_tensor))
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # The newer name, from torch 2.13.
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
