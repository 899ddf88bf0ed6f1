"""Counts of calls: a cost that no busy machine changes."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any


def counted_calls(call: Callable[[], Any]) -> Counter[str]:
    """Count the calls of Python's functions, "call", and of those written in C, "c_call", of this thread.

    A garbage collection would add the finalizers of whatever earlier tests left, and the hooks of their managers, so
    what they left goes first and nothing is collected meanwhile."""
    counted: Counter[str] = Counter()

    def count(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            counted[event] += 1

    gc.collect()
    gc.disable()
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counted
