"""Triton's interpreter with correct number conversions.

Up to Triton 3.9 ``triton.runtime.interpreter._convert_float`` loses the carry of a mantissa that rounds up, and reads
FP8 NaN codes as numbers. Here torch converts between float types, and conversions to FP8 saturate, as
``cvt.rn.satfinite`` does on the GPU (there each format has one NaN code; here NaN keeps its sign).
``tests/kernels/test_twins.py`` fails once upstream's conversion is correct.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
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
    """Use ``convert_float`` from now on, and silence numpy's warnings about NaN and Inf in kernels.

    The rest makes kernels run three times as fast. Upstream computes each sum of integers again in 64 bits, for an
    assertion that it then leaves out, because ``debug`` is off.
    """
    np.seterr(all="ignore")
    builder = upstream.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    upstream._convert_float = convert_float
    upstream._get_np_dtype = np_dtype
    upstream.InterpreterBuilder.get_block_ty = lambda self, dtype, shape: block_type(dtype, tuple(shape))
    tl.block_type.with_element_ty = lambda self, dtype: block_type(dtype, tuple(self.shape))
    tl.tensor.__init__ = init_tensor
    upstream._patch_lang = _Patches().patch
    upstream._patch_builtin = patch_builtins
    upstream._patch_lang_tensor = patch_tensor
    upstream.ScanOps.generic_scan = generic_scan


_np_dtype_upstream = upstream._get_np_dtype
_np_dtype_named = cache(lambda name: _np_dtype_upstream(tl.dtype(name)))


def np_dtype(dtype: Any) -> Any:
    """Return upstream's numpy type of a type in Triton, found by name. Upstream makes a table of all at each call."""
    scalar = dtype.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else _np_dtype_named(scalar.name)


_block_types: dict[tuple[str, tuple[int, ...]], Any] = {}


def block_type(dtype: Any, shape: tuple[int, ...]) -> Any:
    """Return a type that is made once for all blocks. Upstream makes one for each result of an operation."""
    key = dtype.name, shape
    if key not in _block_types:
        _block_types[key] = tl.block_type(dtype, list(shape))
    return _block_types[key]


@cache
def _shape_and_numel(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    """Set what upstream sets, but share what follows from the shape."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape_and_numel(tuple(type.shape) if type.is_block() else ())


class _Patches:
    """Patches the language once per launch. Upstream does it again at each call of a function that a kernel calls."""

    def __init__(self) -> None:
        self._upstream = upstream._patch_lang
        self._done: frozenset[str] = frozenset()  # What this launch has patched.
        self._scope: Any = None

    def patch(self, fn: Any) -> _Patches:
        """Do upstream's patch of the modules that ``fn`` sees, unless this launch has. Only a launch calls
        ``restore``, and for what its own function sees, as upstream does."""
        if not _seen_by(fn) <= self._done:
            scope = self._upstream(fn)
            self._scope = self._scope or scope
            self._done |= _seen_by(fn)
        return self

    def restore(self) -> None:
        scope, self._scope, self._done = self._scope, None, frozenset()
        scope.restore()


@cache
def _seen_by(fn: Any) -> frozenset[str]:
    modules = filter(inspect.ismodule, fn.__globals__.values())
    return frozenset(module.__name__ for module in modules if module in (tl, tl.core))


@cache
def _builtins_of(module: Any) -> tuple[str, ...]:
    return tuple(name for name, member in inspect.getmembers(module) if tl.core.is_builtin(member))


def patch_builtins(module: Any, builder: Any, scope: Any) -> None:
    """Do upstream's patch, but list the members of a module or class once. Upstream lists them at each patch."""
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
