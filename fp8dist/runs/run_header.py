"""The header of a run's folder: what ran, where, and with which versions."""

from __future__ import annotations

import platform
import socket
import time
from collections.abc import Mapping
from typing import Any

import torch

from fp8dist.common.text import dtype_name
from fp8dist.common.versions import version_of
from fp8dist.runs.run_format import FORMAT, VERSION
from fp8dist.state.groups import world_size
from fp8dist.state.roll_call import known_hosts

# Dense FLOP/s of one GPU: bfloat16, and FP8 with accumulation in float32. The first name that the device's name
# contains counts. Vendors print sparse numbers, which are twice these. An A100 has no FP8.
_PEAKS = (
    ("GB200", 2.5e15, 5.0e15),  # NVIDIA GB200 NVL72 data sheet: 360 and 720 PFLOP/s for 72 GPUs, sparse.
    ("B200", 2.25e15, 4.5e15),  # NVIDIA HGX B200 data sheet: 36 and 72 PFLOP/s for 8 GPUs, sparse.
    ("H200 NVL", 835.5e12, 1670.5e12),  # NVIDIA H200 data sheet, as the next.
    ("H200", 989.5e12, 1979e12),  # Also GH200: NVIDIA Grace Hopper data sheet.
    ("H100 NVL", 835.5e12, 1670.5e12),  # NVIDIA H100 data sheet, 2024.
    ("H100 PCIe", 756e12, 1513e12),  # NVIDIA H100 data sheet, 2022.
    ("H100", 989.5e12, 1979e12),  # SXM: NVIDIA H100 data sheet.
    ("L40S", 362e12, 733e12),  # NVIDIA L40S data sheet.
    ("RTX 4090", 165.2e12, 330.3e12),  # NVIDIA Ada GPU architecture, version 2.0, appendix A.
)

_SMALLER = frozenset(("MIG", "Laptop", "D"))
"""Words after the name of a GPU that has less than its peak, such as "NVIDIA H100 80GB HBM3 MIG 1g.10gb"."""


def peaks_of(device: str) -> dict[str, float] | None:
    """Return the dense FLOP/s of a GPU by its name, "high" in bfloat16 and "fp8"; None if the name is not known, or is
    that of a part (MIG) or of a smaller chip."""
    if not _SMALLER.isdisjoint(device.split()):
        return None
    return next(({"high": high, "fp8": fp8} for name, high, fp8 in _PEAKS if name in device), None)


def header(
    described: Mapping[str, Any],
    every: int,
    precision: str | None = None,
    peaks: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the content of ``run.json``. Local; may read the job's store.

    Args:
        described: the result of ``fp8dist.describe``; {} for a run without a manager.
        precision: what the run computes in. None: "fp8", or the default dtype of a run without FP8.
        peaks: FLOP/s, as ``peaks_of`` returns them. None: those of the device's name.
    """
    device, ranks = _device_name(described.get("device")), world_size()
    in_fp8 = described.get("fp8", False)
    return {
        "format": FORMAT,
        "version": VERSION,
        "started": time.time(),
        "ranks": ranks,
        "hosts": [socket.gethostname()] if ranks == 1 else known_hosts(ranks),
        "device": device,
        "precision": precision or ("fp8" if in_fp8 else dtype_name(torch.get_default_dtype())),
        "recipe": described.get("recipe", ""),
        "every": every,
        "versions": {
            **{name: version_of(name) for name in ("fp8dist", "torch", "triton")},
            "python": platform.python_version(),
        },
        "peaks": peaks_of(device) if peaks is None else dict(peaks),
        "modules": described.get("modules", []),
        "slots": described.get("slots", []),
    }


def _device_name(device: str | None) -> str:
    """Return the GPU's name, or "cpu". ``device``: as text; None: the current GPU if the process uses one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu"
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device
