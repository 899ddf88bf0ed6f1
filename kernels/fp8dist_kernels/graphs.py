"""Checks for CUDA graph capture and torch.compile, whose forwards bypass Python.

Host code runs once, when the graph is made; a replay repeats only operations on tensors. So code must not read from
the device during capture, and the host's work at the end of a step waits for ``StateManager.poll``. A compiled forward
cannot commit.
"""

from __future__ import annotations

import sys

import torch

__all__ = ["capturing", "compiled_any"]


def capturing(device: torch.device) -> bool:
    """True if ``device`` is a CUDA device and the current stream is capturing a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def compiled_any() -> bool:
    """True if torch.compile has made a graph in this process.

    A compiled module cannot report itself: Dynamo allows no side effects inside activation checkpointing. So read
    Dynamo's counters and treat any graph as ours. A false positive makes a commit earlier than necessary, never later.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["stats"]["unique_graphs"] > 0
