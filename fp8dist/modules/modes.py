"""Modes: remember how each forward of a module computed, so that activation checkpointing can repeat it exactly.

Activation checkpointing runs forwards again inside the backward. By then the loop may have left ``no_fp8()`` or called
``eval()``. The repetition must compute in the mode of the original forward. To find that forward, this file uses
autograd's sequence numbers: each thread numbers its autograd nodes in the order in which it creates them. Each call of
a module is stored with the number that the next node had when the call began.

- A reentrant checkpoint is a single node, created before its forward runs, with grad off. So all calls of its forward
  have numbers above the node's.
- A non-reentrant checkpoint repeats a forward when a node of that forward needs a saved tensor. Its hooks for saved
  tensors are active in the forward and in the repetition, and identify it. If the hooks are of another tool, the number
  decides: the forward's calls before that node have numbers up to the node's.

A forward may call a module several times in different modes, so the k-th call of the repetition gets the mode of the
k-th call of the forward.
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
from fp8dist_kernels import GEMMS, Gemm

_MOST = 32
"""How many runs (consecutive calls in one mode) are kept for each module."""

_TAIL = 16
"""How many of the last calls are kept of each run."""

_UNPACKING = ("unpack_hook", "checkpoint_unpack")
"""Names of the functions of torch and of DeepSpeed that repeat a forward because a saved tensor is needed."""


class ByGemm(NamedTuple):
    """The experts that compute a GEMM in high precision. Of a Linear, which has no experts, True or False."""

    fprop: ExpertMask
    dgrad: ExpertMask
    wgrad: ExpertMask


Records = tuple[ExpertMask, ExpertMask, ExpertMask]
"""The experts whose amaxes of (input, weight, grad_output) are recorded. Of a Linear, True or False."""


class Choice(NamedTuple):
    """Which products of a module run in high precision now, and which of its amaxes are recorded.

    ``all_high``: True if no product runs in FP8.
    """

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
"""The choice of a Linear, by the GEMMs that run in high precision. Made once, because every forward looks one up."""


class Mode(NamedTuple):
    """How a forward of a module computes.

    ``casts``: True if at least one product is in FP8. ``observes``: True if a forward in training also records amaxes
    of tensors that are not cast. ``recording``: True inside ``recording()``. ``training``: the module's flag.
    ``outgrown``: the conditions under which tensors are cast with scales of their current amaxes.
    """

    casts: bool
    observes: bool
    recording: bool
    training: bool
    choice: Choice
    outgrown: Outgrown = Outgrown(None)

    def equals(self, other: Mode) -> bool:
        """True if both are the same. Compares tensors by identity, because reading their values waits for the device.
        Ignores ``outgrown.scale``."""
        if self[:4] != other[:4] or self.choice is not other.choice:
            return False
        return self.outgrown[:3] == other.outgrown[:3] and self.outgrown.upstream is other.outgrown.upstream


Regions = tuple[weakref.ref[Any], ...]
"""The non-reentrant checkpoints that a call was in."""

Call = tuple[int, Regions]
"""The number of the next autograd node when a call of a module began, and the checkpoints that the call was in."""


@dataclass
class _Run:
    """Consecutive calls of a module in one mode.

    ``first``: number of the next node when the first call began. ``calls``: the last calls. These suffice: a forward
    that goes on into the next run made the last calls of this one.
    """

    first: int
    grad: bool
    mode: Mode
    calls: deque[Call] = field(default_factory=lambda: deque(maxlen=_TAIL))


class _Place(NamedTuple):
    """Which repetition of a forward runs, as the Python call stack shows it: the innermost one.

    ``of_node``: True if the node of a reentrant checkpoint repeats its forward. ``unpacks``: True if a forward is
    repeated because a node needs a saved tensor. ``region``: the non-reentrant checkpoint, if known. ``nested``: True
    if the backward around it runs inside the repetition of another checkpoint.
    """

    of_node: bool
    unpacks: bool
    region: weakref.ref[Any] | None
    nested: bool


class _Calls:
    """The last calls of a module, in order, as runs of calls in one mode."""

    def __init__(self) -> None:
        self.runs: list[_Run] = []
        # The last of the calls that are no longer kept, and of those of them that a call in another mode followed; each
        # with the number at which the next run began.
        self._lost: tuple[Call, int] | None = None
        self._changed: tuple[Call, int] | None = None

    def add(self, mode: Mode, grad: bool) -> None:
        number = _autograd._get_sequence_nr()
        regions = () if _autograd._top_saved_tensors_default_hooks(True) is None else _regions()
        run = self.runs[-1] if self.runs else None
        if run is None or run.grad != grad or not run.mode.equals(mode):
            run = _Run(number, grad, mode)
            self.runs.append(run)
            if len(self.runs) > _MOST:
                gone = self.runs.pop(0)
                self._lost = gone.calls[-1], self.runs[0].first
                if not gone.mode.equals(self.runs[0].mode):
                    self._changed = self._lost
        run.mode = mode  # An equal one, but with the newest ``outgrown.scale``.
        run.calls.append((number, regions))

    def of(self, place: _Place, number: int) -> list[Mode]:
        """Return the modes of the calls of the forward that is repeated, in order. The forward may have made more calls
        than are known. Empty: nothing identifies them; use ``by_number``.

        Args:
            number: sequence number of the autograd node that runs.
        """
        if place.region is not None:
            return [run.mode for run in self.runs for _, regions in run.calls if place.region in regions]
        found: list[Mode] = []
        for run in self.runs if place.of_node else ():
            later = [run.mode for at, _ in run.calls if at > number]
            found += later
            if len(later) == _TAIL:  # The run may have had more calls that are not kept: stay in its mode.
                break
        return found

    def lacks(self, place: _Place, number: int) -> bool:
        """True if the forward that is repeated is so old that its modes were dropped, unless all calls since then had
        the same mode. ``number``: see ``of``."""
        if not _reaches(self._lost, place, number):
            return False
        changed = any(not run.mode.equals(self.runs[0].mode) for run in self.runs)
        return changed or _reaches(self._changed, place, number)

    def by_number(self, number: int, grad: bool) -> Mode | None:
        """Return the mode of the last run with this ``grad`` that began before the node ``number`` was made. None:
        there is no such run."""
        return next((run.mode for run in reversed(self.runs) if run.grad == grad and run.first <= number), None)


class Modes:
    """The modes of the last forwards of one module.

    Args:
        fqn: fully qualified name of the module, for errors.
    """

    def __init__(self, fqn: str) -> None:
        self._fqn = fqn
        self.calls = _Calls()
        """Calls that do not repeat another. The caller of ``repeated`` adds a call for which that returned None."""
        self._repeats = _Calls()
        """Calls made by repetitions. With nested checkpoints, an inner checkpoint repeats some of these."""
        self._running: dict[tuple[Any, ...], tuple[list[Mode], int]] = {}
        """For each repetition, by (graph task, node, place): the modes of the forward's calls, and the number of calls
        repeated so far."""

    def repeated(self, grad: bool) -> Mode | None:
        """Return the mode of the forward that a backward repeats now, and count the repetition's call. None: no
        backward runs on this thread, or no forward was stored. Local.

        Args:
            grad: True if grad is enabled.

        Raises:
            ConfigurationError: too many forwards followed, in several modes.
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
        if (
            key not in self._running and not place.nested
        ):  # An outermost repetition begins: all earlier ones have ended.
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


def _reaches(lost: tuple[Call, int] | None, place: _Place, number: int) -> bool:
    """True if the forward that is repeated made this call or an earlier one. ``number``: see ``_Calls.of``."""
    if lost is None:
        return False
    (last, regions), first = lost
    if place.of_node:
        return last > number
    return place.unpacks and (place.region in regions or number < first)


def _regions() -> Regions:
    """Return the non-reentrant checkpoints that this code runs in. Torch shows only the innermost hooks for saved
    tensors, so pop all of them, and push them again."""
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
    """Find the innermost repetition on the call stack, from the names of its frames. torch has no API for it."""
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
