"""Triton's interpreter with correct number conversions.

Up to Triton 3.9 ``triton.runtime.interpreter._convert_float`` loses the carry of a mantissa that rounds up, and reads
FP8 NaN codes as numbers. Here torch converts between float types, and conversions to FP8 saturate, as
``cvt.rn.satfinite`` does on the GPU (there each format has one NaN code; here NaN keeps its sign).
``test_interpreter.py`` fails once upstream's conversion is correct.
"""

from __future__ import annotations

import inspect
import os
from functools import cache
from typing import Any

import torch

# Set this before any kernel is imported: decorating a kernel reads it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as upstream

from fp8dist_kernels.triton.groups import larger

convert_float_upstream = upstream._convert_float

_DTYPES = (
    (tl.float8e4nv, torch.float8_e4m3fn),
    (tl.float8e5, torch.float8_e5m2),
    (tl.float16, torch.float16),
    (tl.bfloat16, torch.bfloat16),
    (tl.float32, torch.float32),
    (tl.float64, torch.float64),
)
_WORDS = (None, torch.uint8, torch.int16, None, torch.int32, None, None, None, torch.int64)


def install() -> None:
    """Use ``convert_float`` from now on, and silence numpy's warnings about NaN and Inf in kernels."""
    np.seterr(all="ignore")
    upstream._convert_float = convert_float
    upstream._patch_builtin = patch_builtins
    upstream._patch_lang_tensor = patch_tensor
    upstream.ScanOps.generic_scan = generic_scan


@cache
def _builtins_of(module: Any) -> tuple[str, ...]:
    return tuple(name for name, member in inspect.getmembers(module) if tl.core.is_builtin(member))


def patch_builtins(module: Any, builder: Any, scope: Any) -> None:
    """Do upstream's patch, but list the members of a module or class once. Upstream lists them at each call of a
    function that a kernel calls: half of the time of our kernels."""
    for name in _builtins_of(module):
        if tl.core.is_builtin(member := getattr(module, name)):  # Not yet patched in this launch.
            upstream._patch_attr(module, name, member, builder, scope)


_patch_upstream = upstream._patch_lang_tensor


def patch_tensor(tensor: Any, scope: Any) -> None:
    """Patch upstream's, so that numpy 2.4 accepts its scalars as indices: in Triton 3.6 they are arrays of one
    element."""
    _patch_upstream(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))


_scan_upstream = upstream.ScanOps.generic_scan


def generic_scan(self: Any, input: Any) -> Any:
    """Do upstream's scan, but a running maximum with numpy, as upstream does sums: calls per element take 20 seconds in
    a test of 512 experts."""
    if getattr(self.combine_fn, "fn", None) is not larger.fn:
        return _scan_upstream(self, input)
    (values,) = input
    return [self.to_tensor(np.maximum.accumulate(values.handle.data, axis=self.axis), dtype=values.dtype)]


def convert_float(input: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
    """Convert ``input`` (array of the bits of ``input_dtype``) to an unsigned array of the bits of ``output_dtype``."""
    source, target = _torch_dtype(input_dtype), _torch_dtype(output_dtype)
    words = torch.from_numpy(np.ascontiguousarray(input).view(f"i{source.itemsize}" if source.itemsize > 1 else "u1"))
    numbers = words.view(source)
    if target.itemsize == 1:
        limit = torch.finfo(target).max
        numbers = numbers.float().clamp(-limit, limit)
    converted = numbers.to(target).view(_WORDS[target.itemsize]).numpy()
    return converted.view(f"u{target.itemsize}").reshape(np.shape(input))


def _torch_dtype(dtype: Any) -> torch.dtype:
    return next(theirs for ours, theirs in _DTYPES if ours == dtype)
