"""FP8 kernels. Each has a plain-torch version, which is the reference for the fused Triton version.

All functions take and return plain tensors and know nothing about slots, groups or modules.

This file does not import torch: code that checks flags reads these names before anything heavy is loaded.
"""

from __future__ import annotations

from typing import Literal

__all__ = ["BACKENDS", "BLOCK", "GEMMS", "Gemm"]

BACKENDS = ("auto", "triton", "torch", "reference")

BLOCK = 128
"""Block size of block scaling: elements of a row that share a scale and, in square blocks, rows that share one."""

Gemm = Literal["fprop", "dgrad", "wgrad"]
GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")
"""The GEMMs of a Linear: ``y = x Wᵀ``, ``dx = dy W``, ``dW = dyᵀ x``."""
