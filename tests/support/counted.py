"""Counts of calls: a cost that no busy machine changes."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed.tensor  # noqa: F401 - Jobs have it, and is_dtensor() looks only at what was imported.
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Lists the torch ops that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


@contextmanager
def no_garbage() -> Iterator[None]:
    """Collect what earlier tests left, and collect nothing inside: finalizers, and hooks of managers that are not used
    any more, would count."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def counted_calls(call: Callable[[], Any]) -> Counter[str]:
    """Count the calls of Python's functions, "call", and of those written in C, "c_call", of this thread."""
    counted: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            counted[event] += 1

    with no_garbage():
        sys.setprofile(count)
        try:
            call()
        finally:
            sys.setprofile(None)
    return counted
