"""The hook for DistributedDataParallel."""

from __future__ import annotations

from fp8dist.parallel.ddp import comm_hook

__all__ = ["comm_hook"]
