"""Modes: how the forwards of a module computed, so that a backward that repeats one computes as it did.

Activation checkpointing calls modules again inside the backward. By then the loop may have left ``no_fp8()`` or called
``eval()``. As with autocast, the mode belongs to the forward that is repeated, and autograd's numbers of nodes find it:
each thread numbers its nodes in the order in which it creates them.

- A reentrant checkpoint is one node, created before its forward runs, with grad off.
- A non-reentrant one repeats a forward when a node of that forward asks for a saved tensor, so all of the forward's
  calls of modules before that node have numbers up to the node's.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fp8dist.modules.outgrown import Outgrown

__all__ = ["Mode", "Modes"]

_MOST = 16
"""Number of runs of forwards in one mode that are kept for each module."""

_UNPACKING = ("unpack_hook", "checkpoint_unpack")
"""Functions of torch and of DeepSpeed that repeat a forward to get at a saved tensor."""


class Mode(NamedTuple):
    """How a forward of a module computes.

    ``casts``: True if at least one product is in FP8. ``observes``: True if a forward in training also records amaxes
    of tensors that are not cast. ``recording``: True inside ``recording()``. ``training``: the module's flag. ``high``:
    the GEMMs in high precision; of a grouped product, its ``Choice``. ``outgrown``: which tensors are cast just in
    time.
    """

    casts: bool
    observes: bool
    recording: bool
    training: bool
    high: Any
    outgrown: Outgrown = Outgrown(None)

    def equals(self, other: Mode) -> bool:
        """True if both are the same. Compares tensors by identity: their values are on the device."""
        if self[:4] != other[:4] or self.high is not other.high:
            return False
        return self.outgrown[:3] == other.outgrown[:3] and self.outgrown.upstream is other.outgrown.upstream


@dataclass
class _Run:
    """Consecutive forwards in one mode. ``first``, ``last``: the number of the next node when they began."""

    first: int
    last: int
    grad: bool
    mode: Mode


class Modes:
    """The modes of the last forwards of one module."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._recent: Mode | None = None

    def add(self, mode: Mode) -> None:
        """Note a forward that repeats no other."""
        number, grad = torch._C._autograd._get_sequence_nr(), torch.is_grad_enabled()
        run = self._runs[-1] if self._runs else None
        if run is not None and run.grad == grad and run.mode.equals(mode):
            run.last = number
        else:
            self._runs.append(_Run(number, number, grad, mode))
            del self._runs[:-_MOST]
        self._recent = mode

    def repeated(self) -> Mode | None:
        """Return the mode of the forward that a backward repeats now. None: no backward runs on this thread, or no
        forward was noted."""
        if torch._C._current_graph_task_id() == -1:
            return None
        if len(self._runs) > 1:
            self._recent = self._found() or self._recent
        return self._recent

    def _found(self) -> Mode | None:
        node = torch._C._current_autograd_node()
        unpacks, nested = _place()
        if node is None or nested:  # The outer repetition has just called the module.
            return None
        number, grad = node._sequence_nr(), torch.is_grad_enabled()
        if unpacks:
            return next((run.mode for run in reversed(self._runs) if run.grad == grad and run.first <= number), None)
        return next((run.mode for run in self._runs if not run.grad and run.last > number), None)


def _place() -> tuple[bool, bool]:
    """Return two bools: False if the innermost repetition on the call stack is that of a checkpoint's own node, True if
    it is for a saved tensor of any node; True if a node of an outer repetition runs the backward that it belongs to."""
    unpacks: bool | None = None
    engine = False
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        of_node = code.co_name == "backward" and code.co_varnames[:1] == ("ctx",)
        if of_node and engine:
            return bool(unpacks), True
        engine = engine or code.co_name == "_engine_run_backward"
        if unpacks is None and (of_node or engine or code.co_name in _UNPACKING):
            unpacks = not of_node  # A node in C++ has no frame.
        frame = frame.f_back
    return unpacks is not False, False
