"""The public names of this room."""

from __future__ import annotations

from fp8dist.runs.exporter import Exporter
from fp8dist.runs.loss_guard import LossGuard
from fp8dist.runs.monitor import Monitor
from fp8dist.runs.recorder import Recorder
from fp8dist.runs.watching import describe, take_waits, watch

__all__ = ["Exporter", "LossGuard", "Monitor", "Recorder", "describe", "take_waits", "watch"]
