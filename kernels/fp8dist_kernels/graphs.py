"""Checks for CUDA graph capture and torch.compile, whose forwards bypass Python.

Python code runs once, when a CUDA graph is captured; a replay repeats only operations on tensors. So code must not
read values from the device during capture, and the work that the host does at the end of each step is done later, by
``StateManager.poll``. A compiled forward cannot commit a pending sync either.
"""

from __future__ import annotations

import sys

import torch


def capturing(device: torch.device) -> bool:
    """True if ``device`` is a CUDA device and the current stream is capturing a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def compiled_any() -> bool:
    """True if torch.compile has made a graph in this process.

    A compiled module cannot report itself: Dynamo allows no side effects inside activation checkpointing. So read
    Dynamo's counters and treat any graph as ours. A wrong True only makes a commit happen earlier than necessary.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["stats"]["unique_graphs"] > 0
