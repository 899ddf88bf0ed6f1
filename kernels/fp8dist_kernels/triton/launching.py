"""Helpers for launches: the size of the device, and the current device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["on_device_of", "processors"]


@functools.cache
def processors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU. 4 elsewhere: Triton's interpreter runs programs one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@contextlib.contextmanager
def on_device_of(tensor: Tensor) -> Iterator[None]:
    """Make the tensor's CUDA device current: Triton launches on the current device, not on that of its arguments."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        with torch.cuda.device(tensor.device):
            yield
    else:
        yield
