"""What libtorch refuses to multiply on a GPU, and with which words. Written from its source, not from our table.

Sources, read in PyTorch's repository: aten/src/ATen/native/cuda/ScaledBlas.cpp (``_scaled_mm_out_cuda``,
``_scaled_rowwise_rowwise``, ``_check_deepseek_support``) and RowwiseScaledMM.cu (``check_inputs``,
``dispatch_fp8_rowwise_kernel_on_bias_dtype``), before and after pull request 187569. The text about float32 in rows is
that of 2.10 and later; the tests of that pull request's parent expect it. cuBLASLt's own refusals are known by the
asserts of TransformerEngine's cublaslt_gemm.cu, and reach the user as CUBLAS_STATUS_NOT_SUPPORTED. So are layouts
(``nvte_is_non_tn_fp8_gemm_supported``: from 10.0 on, but not 12.x), of which libtorch itself refuses some on Hopper
(``_scaled_gemm``), and CUTLASS all but one (``check_inputs``). Scales of MX are those of ``_scaled_mxfp8_mxfp8``, and
of ``scaled_gemm`` in CUDABlas.cpp; their layout is that of cuBLAS's documentation, "1D block scaling factors layout".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CUBLAS = "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic`"
E5M2, HALF = torch.float8_e5m2, torch.float16


class Stand:
    """Stands for ``torch._scaled_mm`` and ``torch._scaled_mm_v2`` of a GPU: refuses as libtorch, or computes in
    float64. Where libtorch would write wrong numbers, raises AssertionError."""

    def __init__(self, capability: tuple[int, int], cuda: tuple[int, int], version: tuple[int, int]) -> None:
        self.capability, self.cuda, self.version = capability, cuda, version
        self.calls: list[str] = []

    def scaled_mm(
        self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None,
        scale_result: None = None, out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
    ) -> Tensor:  # fmt: skip
        (m, k), n = a.shape, b.shape[1]
        kind = "tensor" if scale_a.numel() == scale_b.numel() == 1 else "row"
        if kind == "row":
            assert (scale_a.shape, scale_b.shape) == ((m, 1), (1, n))
        self._check(kind, m, n, k, a, b, bias, out_dtype)
        self.calls.append(kind)
        return self._rounded(a.double() @ b.double() * scale_a.double() * scale_b.double(), bias, out_dtype)

    def scaled_mm_v2(
        self, a: Tensor, b: Tensor, scale_a: list[Tensor], recipe_a: list[int], _a: Any, scale_b: list[Tensor],
        recipe_b: list[int], _b: Any, bias: Tensor | None, out_dtype: torch.dtype, *_: Any, **__: Any,
    ) -> Tensor:  # fmt: skip
        (m, k), n, lines = a.shape, b.shape[1], [functional.ScalingType.BlockWise1x128.value]
        if recipe_a == recipe_b == [functional.ScalingType.BlockWise1x32.value]:
            return self._mx(a, b, *scale_a, *scale_b, (_a, _b), bias, out_dtype)
        assert recipe_a == lines
        self._check("block", m, n, k, a, b, bias, out_dtype)
        self.calls.append("block")
        (of_a,), (of_b,) = scale_a, scale_b
        assert of_a.stride()[0] == 1
        left = a.double() * of_a.double().repeat_interleave(128, 1)[:, :k]
        if recipe_b == lines:
            right = b.double() * of_b.t().double().repeat_interleave(128, 0)[:k]
        else:
            assert of_b.shape == ((k + 511) // 512 * 4, (n + 127) // 128)
            right = b.double() * of_b.double().repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n]
        return self._rounded(left @ right, bias, out_dtype)

    def _mx(
        self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, swizzles: Any, bias: Tensor | None, out: Any
    ) -> Tensor:
        (m, k), n = a.shape, b.shape[1]
        assert swizzles == ([functional.SwizzleType.SWIZZLE_32_4_4.value],) * 2
        self._check("mx", m, n, k, a, b, bias, out)
        self.calls.append("mx")
        left = a.double() * _swizzled(scale_a, m, k // 32).repeat_interleave(32, 1)
        right = b.double() * _swizzled(scale_b, n, k // 32).repeat_interleave(32, 1).t()
        return self._rounded(left @ right, bias, out)

    def _rounded(self, exact: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
        return (exact if bias is None else exact + bias.double()).float().to(out_dtype)  # type: ignore[arg-type]

    def _check(
        self, kind: str, m: int, n: int, k: int, a: Tensor, b: Tensor, bias: Tensor | None, out: torch.dtype | None
    ) -> None:
        if self.capability < (8, 9):
            raise RuntimeError(
                "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm "
                "MI300+"
            )
        if k % 16:
            raise RuntimeError(f"Expected trailing dimension of mat1 to be divisible by 16 but got shape: ({m}x{k}).")
        if n % 16:
            raise RuntimeError(f"mat2 shape ({k}x{n}) must be divisible by 16")
        if a.dtype == b.dtype == E5M2:
            raise ValueError("Multiplication of two Float8_e5m2 matrices is not supported")
        if kind == "block":
            if self.capability[0] != 9:
                raise NotImplementedError("DeepSeek style (1x128, 128x128) scaling only supported in CUDA for SM90")
            if self.cuda < (12, 9):
                raise NotImplementedError("DeepSeek style (1x128, 128x128) scaling requires cublasLt >= 12.9")
        if kind == "mx":  # cuBLASLt's documentation: block scales of 32 are for compute capability 10.0 and above.
            if self.cuda < (12, 8):
                raise RuntimeError(
                    "scaled_gemm with `torch.float8_e8m0fnu` scales is only supported for CUDA 12.8 and above"
                )
            if self.capability < (10, 0):
                raise RuntimeError(CUBLAS)
        cutlass = kind == "row" and (self.capability[0] != 9 or self.cuda < (12, 9))
        if b.stride(0) != 1:
            if self.capability[0] == 9 and not cutlass:
                raise RuntimeError(
                    "Only multiplication of row-major and column-major matrices is supported by cuBLASLt"
                )
            if cutlass:
                raise RuntimeError("Expected XQ.stride(1) == 1 && WQ.stride(0) == 1")
            if self.capability[0] != 10 or self.cuda < (12, 8):
                raise RuntimeError(CUBLAS)
        if bias is not None:
            if out == torch.float32:
                raise RuntimeError("Bias is not supported when out_dtype is set to Float32")
            if bias.dtype not in (torch.bfloat16, HALF):
                raise RuntimeError(f"Bias must be BFloat16 or Half, but got {bias.dtype}")
            if bias.dtype != out:
                raise RuntimeError(f"Bias must be {out} to compute {out} output, but got {bias.dtype}")
        if cutlass:
            if self.version < (2, 15):  # CUTLASS, before pull request 187569
                if out == torch.float32:
                    raise ValueError(
                        "Only bf16 and fp16 high precision output types are supported for row-wise scaling."
                    )
                assert out != HALF or bias is not None, "its no-bias kernel writes bfloat16 into float16"
            if b.dtype == E5M2:
                raise RuntimeError("Expected b.dtype() == at::kFloat8_e4m3fn to be true, but got false.")
        if kind == "block" and m % 8:
            raise RuntimeError(CUBLAS)


def _swizzled(scales: Tensor, lines: int, blocks: int) -> Tensor:
    """Return scales [lines, blocks], float64, read from the layout of cuBLAS."""
    across = (blocks + 3) // 4
    assert scales.shape == ((lines + 127) // 128 * across * 512,)
    line, block = torch.arange(lines)[:, None], torch.arange(blocks)[None, :]
    tile = line // 128 * across + block // 4
    return scales.double()[tile * 512 + line % 32 * 16 + line % 128 // 32 * 4 + block % 4]
