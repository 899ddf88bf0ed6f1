"""The hook for FullyShardedDataParallel (FSDP1). FSDP2 needs none: ``attach`` sees it."""

from __future__ import annotations

from fp8dist.parallel.fsdp1 import comm_hook

__all__ = ["comm_hook"]
