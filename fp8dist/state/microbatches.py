"""Microbatches: counts the microbatches of a step that a watch measures, and notifies the syncs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8dist.state.arena_sync import ArenaSync


class Microbatches:
    """The microbatches of one measured step on this rank, counted from 0.

    A microbatch is all forwards up to a backward, and that backward. So a module may be called several times in one,
    and an accumulation needs no hint. Recomputation (activation checkpointing) runs inside a backward and does not
    count. Only forwards and backwards in Python are seen. ``called``: fqns of the modules whose forwards were.
    """

    def __init__(self, syncs: Sequence[ArenaSync]) -> None:
        self.called: set[str] = set()
        self._syncs = syncs
        self._tasks: set[int] = set()  # Ids of the autograd tasks of this microbatch's backward.
        self._recomputed = False  # A forward ran inside the backward, and may have started a backward of its own.
        self._backward_seen = False
        self._mixed = False
        self._awaited = False  # A forward has recorded nothing, maybe because its recomputation will.

    @property
    def known(self) -> bool:
        """True if the noted calls show which microbatch recorded what. False if backwards followed each other without a
        forward, as in a pipeline that runs forwards ahead, or if no FP8 module ran a backward."""
        return self._backward_seen and not self._mixed

    def forward(self, *fqns: str) -> None:
        """Note that a module, or the experts of one, are about to record amaxes in a forward."""
        self.called.update(fqns)
        task = torch._C._current_graph_task_id()
        if task == -1 or (self._awaited and task not in self._tasks):
            self._begin()
        if task != -1:
            self._awaited = False
            self._join(task)
            self._recomputed = True

    def unrecorded_forward(self) -> None:
        """Note a forward in training with grad off. A reentrant checkpoint records when it recomputes it."""
        self._awaited = True

    def _begin(self) -> None:
        if self._tasks:
            for sync in self._syncs:
                if sync.measured is not None:
                    sync.measured.end_microbatch()
            self._tasks.clear()
            self._recomputed = False

    def backward(self) -> None:
        """Note that a module runs a backward whose forward recorded amaxes."""
        self._join(torch._C._current_graph_task_id())
        self._recomputed, self._backward_seen = False, True

    def _join(self, task: int) -> None:
        # Reentrant checkpointing runs its backward in a task of its own, right after the recomputation.
        if self._tasks and task not in self._tasks and not self._recomputed:
            self._mixed = True
        self._tasks.add(task)
