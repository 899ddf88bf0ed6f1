"""LoopMonitor: detects training loops that update weights without ending a step of the FP8 state.

A *boundary* is the end of such a step. Without boundaries, scales never change, and no longer fit the weights.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from fp8dist.errors import ConfigurationError
from fp8dist.modules.job_state import JobState
from fp8dist.modules.weight_notes import WeightNote, sample_of
from fp8dist.state.arena_sync import ArenaSync
from fp8dist_kernels.graphs import capturing

logger = logging.getLogger("fp8dist")

FIRST_LOOK = 64
"""After this many backwards without a boundary, a module's weight is first compared with its value at half of them."""


class LoopMonitor:
    """Counts the backwards of one module since the last boundary, and checks if its weight changes between them."""

    def __init__(self, sync: ArenaSync, job: JobState, note: WeightNote, fqn: str) -> None:
        """``sync``: the sync of the arena that has the module's input slot. ``note``: the note of its weight."""
        self._sync, self._job, self._note, self._fqn = sync, job, note, fqn
        self._backwards = self._boundary = self._changes = 0
        self._look_at = FIRST_LOOK // 2
        self._sample: Tensor | None = None

    def count_backward(self, recorded: bool) -> None:
        """Count a backward. Warn once if the weight changes between backwards without a boundary. Local.

        ``StepWatch`` checks torch optimizers at their steps; this check is for updates by other means. Version counters
        show most of them, and two changes are enough for the warning. For the others, the weight's values are compared
        after 64, 128, 256, … recorded backwards, which waits for the device.

        Args:
            recorded: True if the backward records amaxes.

        Raises:
            ConfigurationError: ranks should share FP8 state, ``attach`` is missing, and the weight changed twice.
        """
        if torch.compiler.is_compiling():
            return
        job, note = self._job, self._note
        if not recorded:
            if self._sync.every_step:
                note.unrecorded_at = job.unrecorded_at = job.boundaries
            return
        note.recorded_at = job.boundaries
        if job.microbatches is not None:
            job.microbatches.backward()
        if job.unsynced:
            job.warned_unsynced = True
            logger.warning(
                "%s is trained, but attach() was not called: FP8 state is not synchronised, and scales do not follow",
                self._fqn,
            )
        if self._boundary != job.boundaries:
            self._boundary, self._backwards, self._changes, self._sample = job.boundaries, 0, 0, None
        if job.shared and not job.attached:
            self._require_attached()
            return
        self._backwards += 1
        if job.warned_unbounded or job.stepping or not self._sync.every_step:
            return
        self._changes += note.changed_between_backwards()
        look = self._backwards == self._look_at
        self._look_at *= 2 if look else 1
        if self._changes > 1 or (look and self._changed_unseen()):
            job.warned_unbounded = True
            logger.warning(
                "fp8dist: the weight of %s changes from backward to backward, but no step of FP8 state ends: its scale "
                "stands still. It is not updated by a torch optimizer that attach(optimizer=…) knows: call "
                "manager.step() once per optimizer step",
                self._fqn,
            )

    def note_backward(self) -> None:
        """Count a backward in high precision for the microbatches of a measured step. Local."""
        if not torch.compiler.is_compiling() and self._job.microbatches is not None:
            self._job.microbatches.backward()

    def _require_attached(self) -> None:
        """Raise ConfigurationError if the weight has changed twice. For models without ``attach`` whose optimizer
        updates copies of the weights, as ZeRO's does; ``StepWatch`` covers all others. Waits for the device."""
        self._changes += self._changed_unseen()
        if self._changes > 1:
            raise ConfigurationError(
                f"{self._fqn} is trained, but attach() was not called: FP8 state is not synchronised, "
                "and scales do not follow: call manager.attach(…) before the training (with DeepSpeed, "
                "fp8dist.integrations.deepspeed.attach(manager, engine))"
            )

    def _changed_unseen(self) -> bool:
        """Take a sample of the weight, and return True if it differs from the last one since the last boundary. Waits
        for the device."""
        stored = self._note.stored
        if not stored or capturing(self._sync.arena.device):
            return False
        before, self._sample = self._sample, sample_of(stored[0])
        return before is not None and before.shape == self._sample.shape and not torch.equal(before, self._sample)
