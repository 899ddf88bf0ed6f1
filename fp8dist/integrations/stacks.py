"""What the integrations share."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch.distributed as dist

__all__ = ["TESTED", "install", "world"]

TESTED: Mapping[str, str] = MappingProxyType(
    {
        "transformers": "5.23.0",
        "accelerate": "1.15.0",
        "lightning": "2.6.6",
        "deepspeed": "0.19.0",
        "torchtitan": "0.3.0",
        "megatron-core": "0.16.1",
    }
)
"""By package, the version that ``scripts/test-stacks`` has passed."""


def install(stack: str, extra: str) -> str:
    """Return what to do if a stack is not installed."""
    return f"fp8dist.integrations.{extra} needs {stack}: pip install 'fp8dist[{extra}]'"


def world() -> dist.ProcessGroup | None:
    """Return the group of all ranks, or None for a single process. Local."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 else None
