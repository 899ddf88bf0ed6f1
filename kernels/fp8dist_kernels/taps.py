"""Taps: a cast or product tells a listener what it was called with, and what it has computed.

A tap is a tensor, because graphs of torch.compile hand tensors to an op, and nothing else that is not a constant. Its
listener is an attribute of it, and the place of the call is a constant number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Listener", "listener_of", "notify", "tap_on"]

Listener = Callable[[str, int, tuple[Any, ...], dict[str, Any], tuple[Tensor, ...]], None]
"""Called with the op's name, the site, the positional and the named arguments, and the results. It may change the
results, and must copy what it keeps: callers free operands and results, or overwrite them."""


def tap_on(device: torch.device, listener: Listener) -> Tensor:
    """Return a tap for ops on ``device``."""
    tap = torch.empty(0, device=device)
    tap.listener = listener  # type: ignore[attr-defined]
    return tap


def listener_of(tap: Tensor) -> Listener:
    """Return the listener of a tap."""
    listener: Listener = tap.listener  # type: ignore[attr-defined]
    return listener


def notify(tap: Tensor, op: str, site: int, args: tuple[Any, ...], options: dict[str, Any], *results: Tensor) -> None:
    """Call the tap's listener with a call of ``op``: its site, arguments, options and results."""
    listener_of(tap)(op, site, args, options, results)
