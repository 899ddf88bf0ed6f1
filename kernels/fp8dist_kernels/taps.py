"""Taps: each cast or product calls a listener with its arguments and results.

A tap is an empty tensor with the listener as an attribute. It is a tensor because a graph of torch.compile can pass
only tensors and constants to an op. The *site* is a constant number of the caller's choice; it identifies the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Listener = Callable[[str, int, tuple[Any, ...], dict[str, Any], tuple[Tensor, ...]], None]
"""Called with the op's name, the site, the positional and the named arguments, and the results. It may change the
results, and must copy what it keeps: callers free operands and results, or overwrite them."""


def tap_on(device: torch.device, listener: Listener) -> Tensor:
    """Return a tap for ops on ``device``, which calls ``listener``."""
    tap = torch.empty(0, device=device)
    tap.listener = listener  # type: ignore[attr-defined]
    return tap


def listener_of(tap: Tensor) -> Listener:
    """Return the listener of a tap."""
    listener: Listener = tap.listener  # type: ignore[attr-defined]
    return listener


def notify(tap: Tensor, op: str, site: int, args: tuple[Any, ...], options: dict[str, Any], *results: Tensor) -> None:
    """Call the tap's listener. See ``Listener`` for the arguments."""
    listener_of(tap)(op, site, args, options, results)
