"""torch.distributed's functions, replaced for a while, because FSDP has no place where one could ask for its calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

__all__ = ["replaced"]


@contextlib.contextmanager
def replaced(names: Sequence[str], by: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside, each of these functions is what ``by`` makes of it; names that this torch does not have are left out."""
    before = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    for name, function in before.items():
        setattr(dist, name, by(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(dist, name, function)
