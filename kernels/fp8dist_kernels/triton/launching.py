"""Helpers for launches: integer arithmetic, the size of the device, and the current device.

What a launch needs beside addresses follows from shapes, strides and options. Functions that compute it are cached, so
a repeated launch costs the host little.
"""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager

import torch
from torch import Tensor

__all__ = ["PLANS", "ceil_div", "ceil_power_of_two", "on_device_of", "processors"]

PLANS = 512
"""Plans that each cached function keeps: more than a model has kinds of tensors, and few enough that batches of ever
new sizes cost no memory."""

_HERE = contextlib.nullcontext()


def ceil_div(size: int, by: int) -> int:
    """Return ``size / by``, rounded up. Much cheaper than ``triton.cdiv``, which serves kernels as well."""
    return -(-size // by)


def ceil_power_of_two(size: int) -> int:
    """Return the smallest power of two >= ``size``, for ``size`` >= 1."""
    return 1 << (size - 1).bit_length()


@functools.cache
def processors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU. 4 elsewhere: Triton's interpreter runs programs one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which the tensor's CUDA device is current: Triton launches on the current device, not on that
    of its arguments."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)  # type: ignore[no-untyped-call, unused-ignore]
    return _HERE
