"""FP8 kernels: the plain-torch version of each, which is also the oracle of the fused ones.

Everything here takes and returns plain tensors. Nothing knows of slots, groups or modules.

This file imports no torch: who checks flags asks it for names before anything heavy is loaded.
"""

from __future__ import annotations

from typing import Literal

__all__ = ["BACKENDS", "BLOCK", "GEMMS", "Gemm"]

BACKENDS = ("auto", "triton", "torch", "reference")

BLOCK = 128
"""Rows of a weight, and elements of a row, that share a scale where blocks have scales."""

Gemm = Literal["fprop", "dgrad", "wgrad"]
GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")
"""The products of a Linear: ``y = x Wᵀ``, ``dx = dy W``, ``dW = dyᵀ x``."""
