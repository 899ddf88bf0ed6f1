"""Modes: how the forwards of a module computed, so that a backward that repeats one computes as it did.

Activation checkpointing calls modules again inside the backward. By then the loop may have left ``no_fp8()`` or called
``eval()``. As with autocast, the mode belongs to the forward that is repeated, and autograd's numbers of nodes find it:
each thread numbers its nodes in the order in which it creates them.

- A reentrant checkpoint is one node, created before its forward runs, with grad off.
- A non-reentrant one repeats a forward when a node of that forward asks for a saved tensor. Its hooks for saved tensors
  are there during the forward and during the repetition. Other hooks say nothing, but all of the forward's calls of
  modules before that node have numbers up to the node's.

A forward may call a module in several modes, so the k-th call of the repetition is matched with the k-th call of the
forward.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch._C import _autograd

from fp8dist.errors import ConfigurationError
from fp8dist.modules.casters import ExpertMask
from fp8dist.modules.outgrown import Outgrown
from fp8dist.state.recipe import GEMMS, Gemm

__all__ = ["CHOICES", "ByGemm", "Choice", "Mode", "Modes", "Records"]

_MOST = 32
"""Number of runs of calls in one mode that are kept for each module."""

_TAIL = 16
"""Number of last calls that are kept of each run."""

_UNPACKING = ("unpack_hook", "checkpoint_unpack")
"""Functions of torch and of DeepSpeed that repeat a forward to get at a saved tensor."""


class ByGemm(NamedTuple):
    """The experts that compute a GEMM in high precision. Of a Linear, which has no experts, True or False."""

    fprop: ExpertMask
    dgrad: ExpertMask
    wgrad: ExpertMask


Records = tuple[ExpertMask, ExpertMask, ExpertMask]
"""The experts whose (input, weight, grad_output) are recorded. Of a Linear, True or False."""


class Choice(NamedTuple):
    """What computes in high precision now, and which tensors are recorded. ``all_high``: True if nothing computes in
    FP8."""

    high: ByGemm
    records: Records
    all_high: bool


CHOICES: Mapping[tuple[Gemm, ...], Choice] = MappingProxyType(
    {
        high: Choice(ByGemm(*(gemm in high for gemm in GEMMS)), (True,) * 3, high == GEMMS)
        for count in range(len(GEMMS) + 1)
        for high in itertools.combinations(GEMMS, count)
    }
)
"""The choice of a Linear, by the GEMMs that run in high precision."""


class Mode(NamedTuple):
    """How a forward of a module computes.

    ``casts``: True if at least one product is in FP8. ``observes``: True if a forward in training also records amaxes
    of tensors that are not cast. ``recording``: True inside ``recording()``. ``training``: the module's flag.
    ``outgrown``: which tensors are cast just in time.
    """

    casts: bool
    observes: bool
    recording: bool
    training: bool
    choice: Choice
    outgrown: Outgrown = Outgrown(None)

    def equals(self, other: Mode) -> bool:
        """True if both are the same. Compares tensors by identity: their values are on the device."""
        if self[:4] != other[:4] or self.choice is not other.choice:
            return False
        return self.outgrown[:3] == other.outgrown[:3] and self.outgrown.upstream is other.outgrown.upstream


Regions = tuple[weakref.ref[Any], ...]
"""The non-reentrant checkpoints that a call was in."""

Call = tuple[int, Regions]
"""The number of the next node when a call of a module began, and the checkpoints that it was in."""


@dataclass
class _Run:
    """Consecutive calls of a module in one mode. ``first``: number of the next node when the first began. ``calls``:
    the last ones, which suffice to count where a forward goes from one run to the next."""

    first: int
    grad: bool
    mode: Mode
    calls: deque[Call] = field(default_factory=lambda: deque(maxlen=_TAIL))


class _Place(NamedTuple):
    """Where the innermost repetition on the call stack is.

    ``of_node``: True if a checkpoint's own node repeats its forward. ``unpacks``: True if it is repeated for a saved
    tensor of any node. ``region``: the checkpoint, if known. ``nested``: True if a node of an outer repetition runs the
    backward that it belongs to.
    """

    of_node: bool
    unpacks: bool
    region: weakref.ref[Any] | None
    nested: bool


class _Calls:
    """The last calls of a module that one kind of thread made, in order."""

    def __init__(self) -> None:
        self.runs: list[_Run] = []
        self._lost: Call | None = None

    def add(self, mode: Mode, grad: bool) -> None:
        number = _autograd._get_sequence_nr()
        regions = () if _autograd._top_saved_tensors_default_hooks(True) is None else _regions()
        run = self.runs[-1] if self.runs else None
        if run is None or run.grad != grad or not run.mode.equals(mode):
            run = _Run(number, grad, mode)
            self.runs.append(run)
            if len(self.runs) > _MOST:
                self._lost = self.runs.pop(0).calls[-1]
        run.mode = mode  # With the newest scale for the weight.
        run.calls.append((number, regions))

    def of(self, place: _Place, number: int) -> list[Mode]:
        """Return the modes of the calls of the forward that is repeated, in order, as far as they are known. More may
        follow. Empty: find them by number.

        Args:
            number: of the node that runs.
        """
        if place.region is not None:
            return [run.mode for run in self.runs for _, regions in run.calls if place.region in regions]
        found: list[Mode] = []
        for run in self.runs if place.of_node else ():
            later = [run.mode for at, _ in run.calls if at > number]
            found += later
            if len(later) == _TAIL:  # Nobody knows how many there were: stay in this mode.
                break
        return found

    def lacks(self, place: _Place, number: int) -> bool:
        """True if the forward that is repeated began so long ago that its modes are no longer kept."""
        if self._lost is None:
            return False
        last, regions = self._lost
        if place.of_node:
            return last > number
        return place.unpacks and (place.region in regions or number < self.runs[0].first)

    def by_number(self, number: int, grad: bool) -> Mode | None:
        return next((run.mode for run in reversed(self.runs) if run.grad == grad and run.first <= number), None)


class Modes:
    """The modes of the last forwards of one module.

    Args:
        fqn: of the module.
    """

    def __init__(self, fqn: str) -> None:
        self._fqn = fqn
        self.calls = _Calls()
        """Forwards that repeat no other. Whoever computes one adds it."""
        self._repeats = _Calls()
        """Calls that a repetition made, of which checkpoints within it repeat some."""
        self._running: dict[tuple[Any, ...], tuple[list[Mode], int]] = {}
        """Of each repetition: modes of the calls, and how many calls it has made."""

    def repeated(self, grad: bool) -> Mode | None:
        """Return the mode of the forward that a backward repeats now. None: no backward runs on this thread, or no
        forward was noted.

        Raises:
            ConfigurationError: too many forwards in other modes came after it.
        """
        task = torch._C._current_graph_task_id()
        if task == -1 or not self.calls.runs:
            return None
        if len(self.calls.runs) == 1:
            return self.calls.runs[0].mode
        mode = self._found(task, grad)
        self._repeats.add(mode, grad)
        return mode

    def _found(self, task: int, grad: bool) -> Mode:
        node = torch._C._current_autograd_node()
        if node is None:
            return self.calls.runs[-1].mode
        number, place = node._sequence_nr(), _place()
        key = (task, number, place)
        if key not in self._running and not place.nested:  # Those before have ended; this may be another thread.
            self._running.clear()
            self._repeats = _Calls()
        calls = self._repeats if place.nested else self.calls
        if key not in self._running:
            if calls.lacks(place, number):
                raise ConfigurationError(
                    f"{self._fqn}: a checkpoint repeats a forward that more than {_MOST} changes of mode followed, so "
                    "that its mode is no longer known; expected fewer. Run the backward earlier, or call the module in "
                    "fewer modes (no_fp8(), recording(), train(), eval(), set_precision) in between"
                )
            self._running[key] = (calls.of(place, number), 0)
        modes, made = self._running[key]
        self._running[key] = (modes, made + 1)
        if made < len(modes):
            return modes[made]
        if place.of_node and modes:
            return modes[-1]
        found = None if place.nested else calls.by_number(number, grad)
        return found or (calls.runs or self.calls.runs)[-1].mode


def _regions() -> Regions:
    """Return the non-reentrant checkpoints that run. Torch shows only the innermost hooks, so take them off and put
    them back."""
    if _autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        return ()
    taken: list[Any] = []
    found: list[weakref.ref[Any]] = []
    while (hooks := _autograd._top_saved_tensors_default_hooks(True)) is not None:
        _autograd._pop_saved_tensors_default_hooks()
        taken.append(hooks)
    for hooks in reversed(taken):
        _autograd._push_saved_tensors_default_hooks(*hooks)
        code = getattr(hooks[1], "__code__", None)
        if code is not None and code.co_name in _UNPACKING and code.co_freevars == ("frame",):
            found.append(weakref.ref(hooks[1].__closure__[0].cell_contents))
    return tuple(found)


def _place() -> _Place:
    innermost: tuple[bool, bool, weakref.ref[Any] | None] | None = None
    engine = False
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        of_node = code.co_name == "backward" and code.co_varnames[:1] == ("ctx",)
        if of_node and engine:
            return _Place(*(innermost or (False, False, None)), True)
        engine = engine or code.co_name == "_engine_run_backward"
        if innermost is None and (of_node or engine or code.co_name in _UNPACKING):
            unpacks = not of_node and not engine  # A node in C++ has no frame.
            region = frame.f_locals["frame"] if unpacks and code.co_freevars == ("frame",) else None
            innermost = (of_node, unpacks, None if region is None else weakref.ref(region))
        frame = frame.f_back
    return _Place(*(innermost or (False, False, None)), False)
