"""FP8 kernels. Each has a plain-torch version, which is the reference for the fused Triton version.

All functions take and return plain tensors. Only the caller knows about modules and process groups. A *slot* here is
one place in the arrays of FP8 state: the scale and the recorded amax of one tensor.

This file does not import torch, so that a command line can check its options before anything slow is loaded.
"""

from __future__ import annotations

from typing import Literal

__all__ = ["BACKENDS", "BLOCK", "GEMMS", "MX_BLOCK", "NVFP4_BLOCK", "Gemm"]

BACKENDS = ("auto", "triton", "torch", "reference")
"""Names of the implementations. "auto" casts with Triton on GPUs with FP8, else with torch (``backends.runs_fused``);
see ``ops.py`` for products."""

BLOCK = 128
"""Block size of block scaling: 128 consecutive elements of a row share a scale; in square blocks, of 128 rows."""

MX_BLOCK = 32
"""Block size of MX: 32 consecutive elements of a row share a power of two."""

NVFP4_BLOCK = 16
"""Block size of NVFP4: 16 consecutive elements of a row share a scale; in square blocks, of 16 rows."""

Gemm = Literal["fprop", "dgrad", "wgrad"]
GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")
"""The GEMMs of a Linear: ``y = x Wᵀ``, ``dx = dy W``, ``dW = dyᵀ x``."""
