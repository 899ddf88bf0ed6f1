"""Device and versions of a measurement."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import fp8dist


def facts(device: torch.device) -> dict[str, Any]:
    """Return the fields "device" and "versions" of a results file."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    versions |= {"triton": _version("triton"), "torchao": _version("torchao"), "fp8dist": fp8dist.__version__}
    return {"device": _device(device), "versions": versions}


def _device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": _processor(), "capability": None, "driver": None, "memory_gib": None, "processors": None}
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "capability": [found.major, found.minor],
        "driver": _driver(),
        "memory_gib": round(found.total_memory / 2**30, 1),
        "processors": found.multi_processor_count,
    }


def _processor() -> str:
    """Return the model of the CPU and its number of cores as text."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{named[0] if named else model}, {os.cpu_count()} cores"


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
