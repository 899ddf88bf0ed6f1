"""What launches have in common: the device's size, and which device a launch goes to."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["on_device_of", "processors"]


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU. 4 elsewhere: under the interpreter, programs run one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@contextlib.contextmanager
def on_device_of(tensor: Tensor) -> Iterator[None]:
    """Triton launches on the current CUDA device, wherever its arguments are."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        with torch.cuda.device(tensor.device):
            yield
    else:
        yield
