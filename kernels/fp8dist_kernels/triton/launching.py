"""Helpers for launches: integer arithmetic, the size of the device, and the current device.

The arguments of a launch, except addresses, follow from shapes, strides and options. Functions that compute them (as a
*plan*) are cached, so a repeated launch costs the host little.
"""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager

import torch
from torch import Tensor

PLANS = 512
"""Plans that each cached function keeps. More than a model has kinds of tensors; limited, because batches of ever new
sizes would fill memory."""

_HERE = contextlib.nullcontext()


def ceil_div(size: int, by: int) -> int:
    """Return ``size / by``, rounded up. On the host much cheaper than ``triton.cdiv``, which kernels can call too."""
    return -(-size // by)


def ceil_power_of_two(size: int) -> int:
    """Return the smallest power of two >= ``size``, for ``size`` >= 1."""
    return 1 << (size - 1).bit_length()


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU. 4 elsewhere: the interpreter runs programs one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which the tensor's CUDA device is current: Triton launches on the current device, not on that
    of its arguments."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)  # type: ignore[no-untyped-call, unused-ignore]
    return _HERE


def scale_strides(scales: Tensor) -> tuple[int, int]:
    """Return the strides of scales from line to line and from block to block; zeros for a copy that is not requested.
    Local."""
    return (scales.stride(-2), scales.stride(-1)) if scales.ndim > 1 else (0, 0)
