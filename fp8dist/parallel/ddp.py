"""Queries about DDP: the DDP module of a model, and whether it is in a ``Join`` context. The communication hook for DDP
is in ``fp8dist.ddp``; syncs inside Join are in ``fp8dist.job.joining``."""

from __future__ import annotations

import gc
from collections.abc import Iterator

from torch import nn
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel


def find_ddp(module: nn.Module) -> DistributedDataParallel | None:
    """Return the first DDP module that ``module`` is or holds; None: there is none."""
    found: Iterator[DistributedDataParallel] = (m for m in module.modules() if isinstance(m, DistributedDataParallel))
    return next(found, None)


def in_join(module: nn.Module) -> bool:
    """True inside a Join context of a DDP module that ``module`` is or holds. Slow: walks over all objects in memory.

    torch does not clear a DDP module's flag when the context ends. But the context's hook exists only inside it.
    """
    flagged = [m for m in module.modules() if isinstance(m, DistributedDataParallel) and m._join_config.enable]
    hooks = [thing for thing in gc.get_objects() if issubclass(type(thing), JoinHook)] if flagged else []
    return any(hook.ddp is ddp for hook in hooks for ddp in flagged if hasattr(hook, "ddp"))
