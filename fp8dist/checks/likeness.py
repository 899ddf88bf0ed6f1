"""Likeness: what must be equal on two ranks for their devices to compute the same bits: hardware, versions, settings.

Ranks that are not alike are not compared: different results would be no fault.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8dist.checks.outputs import is_compiled
from fp8dist.state.groups import has_base
from fp8dist.state.manifest import NUMERICS_VERSION

_PACKAGES = ("triton", "nvidia-cublas", "nvidia-cublas-cu12")
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "NVIDIA_TF32_OVERRIDE",
    "TRITON_INTERPRET",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
)
"""Environment variables that choose kernels."""


def likeness(device: torch.device) -> str:
    """Return a text that is equal on two ranks if their devices must compute the same bits. Local.

    It holds the name of the GPU with its compute capability, or the CPU's model, instruction set and number of threads
    (which decides how sums are split); the versions of torch, CUDA, cuBLAS, Triton and of this library's numerics; and
    the settings of cuBLAS, MKL and torch that choose kernels.
    """
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        hardware = f"{found.name} {found.major}.{found.minor}, {found.multi_processor_count} SMs"
    else:
        hardware = f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    versions = [f"torch {torch.__version__}", f"CUDA {torch.version.cuda}", f"numerics {NUMERICS_VERSION}"]
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    settings = [f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ]
    of: Any = torch.backends  # Not get_float32_matmul_precision(), which raises if a program has set one of these.
    settings.append(f"float32 products {of.cuda.matmul.fp32_precision}, mkldnn {of.mkldnn.matmul.fp32_precision}")
    return "; ".join([hardware, *versions, *settings])


def kernel_flags() -> dict[str, bool | int | str | None]:
    """Return the flags that choose torch's own kernels (convolutions, attention), as JSON values by name. Local."""
    of: Any = torch.backends  # Some of its names are made as it is imported, which mypy does not see.
    return {
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "mkldnn": of.mkldnn.enabled,
        "mkldnn float32 products": of.mkldnn.matmul.fp32_precision,
        "cuDNN": of.cudnn.version() if of.cudnn.enabled else None,
        "cuDNN benchmark": of.cudnn.benchmark,
        "cuDNN deterministic": of.cudnn.deterministic,
        "cuDNN float32 convolutions": of.cudnn.conv.fp32_precision,
        "CUDA float32 products": of.cuda.matmul.fp32_precision,
        "bfloat16 reduction": str(of.cuda.matmul.allow_bf16_reduced_precision_reduction),
        "float16 reduction": str(of.cuda.matmul.allow_fp16_reduced_precision_reduction),
        "flash attention": of.cuda.flash_sdp_enabled(),
        "memory-efficient attention": of.cuda.mem_efficient_sdp_enabled(),
        "cuDNN attention": of.cuda.cudnn_sdp_enabled(),
    }


def unsteady_settings(device: torch.device, model: nn.Module) -> list[str]:
    """List the settings that make results differ legitimately between healthy ranks, one sentence each. Empty: results
    can be compared. Local."""
    found = []
    if device.type == "cuda" and torch.backends.cudnn.benchmark:
        found.append("torch.backends.cudnn.benchmark=True chooses kernels by their time, on each rank for itself")
    inductor = sys.modules.get("torch._inductor.config")
    if any(map(is_compiled, model.modules())) and inductor is not None and inductor.max_autotune:
        found.append("Inductor's max_autotune chooses kernels by their time, on each rank for itself")
    if any(has_base(module, "SyncBatchNorm") and module.training for module in model.modules()):
        found.append("SyncBatchNorm adds numbers of all ranks, in another order if each runs the next one's batch")
    return found


def _processor() -> str:
    """Return the model of the CPU. ``platform.processor()`` is empty on Linux."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
