"""What the integrations share."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["install", "world"]


def install(stack: str, extra: str) -> str:
    """Return what to do if a stack is not installed."""
    return f"fp8dist.integrations.{extra} needs {stack}: pip install 'fp8dist[{extra}]'"


def world() -> dist.ProcessGroup | None:
    """Return the group of all ranks, or None for a single process. Local."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 else None
