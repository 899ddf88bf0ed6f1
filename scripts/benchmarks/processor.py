"""What this machine computes with when it has no GPU."""

from __future__ import annotations

import os
import platform
from pathlib import Path

__all__ = ["name"]


def name() -> str:
    """Model and cores."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {os.cpu_count()} cores"
