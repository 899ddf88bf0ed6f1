"""Graphs: forwards that Python does not see. Whether CUDA captures one now, and whether torch.compile has made one.

What runs on the host runs once, when the graph is made; a replay repeats only what was done on tensors. So while
capturing nothing may be read from the device, and what the host does at the end of a step waits for
``StateManager.poll``. And a compiled forward cannot commit.
"""

from __future__ import annotations

import sys

import torch

__all__ = ["capturing", "compiled_any"]


def capturing(device: torch.device) -> bool:
    """Whether work for ``device`` goes into a CUDA graph now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def compiled_any() -> bool:
    """Whether torch.compile has made a graph in this process.

    A module that is compiled cannot say so: Dynamo allows it no side effect inside activation checkpointing. So ask
    Dynamo, and take any graph for one of ours: it makes a commit earlier than need be, never later.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and dynamo.counters["stats"]["unique_graphs"] > 0
