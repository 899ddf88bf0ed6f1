"""LoopMonitor: notices training loops in which no step of FP8 state ends."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from fp8dist.errors import ConfigurationError
from fp8dist.modules.job_state import JobState
from fp8dist.modules.weight_notes import WeightNote, sample_of
from fp8dist.state.arena_sync import ArenaSync
from fp8dist_kernels.graphs import capturing

__all__ = ["FIRST_LOOK", "LoopMonitor"]

logger = logging.getLogger("fp8dist")

FIRST_LOOK = 64
"""Number of backwards without a boundary after which a module's weight is first compared, with its value half as many
backwards ago."""


class LoopMonitor:
    """Counts the backwards of one module since the last boundary, and looks whether its weight changes meanwhile."""

    def __init__(self, sync: ArenaSync, job: JobState, note: WeightNote, fqn: str) -> None:
        """``sync``: of the arena of the module's inputs. ``note``: of its weight."""
        self._sync, self._job, self._note, self._fqn = sync, job, note, fqn
        self._backwards = self._boundary = self._changes = 0
        self._look_at = FIRST_LOOK // 2
        self._sample: Tensor | None = None

    def count_backward(self, recorded: bool) -> None:
        """Warn once if the weight changes between backwards without a boundary. Raise if ``attach`` is missing.

        ``StepWatch`` checks torch optimizers at their steps; this check is for updates without such a step. Version
        counters show most of these at the second change. For the others, the weight itself is compared after 64, 128,
        256, … recorded backwards, which waits for the device.
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
        """Raise ConfigurationError if the weight has changed twice. For models that await ``attach``, and whose
        optimizer steps copies of their weights, as ZeRO's does: ``StepWatch`` sees the others. Waits for the device."""
        self._changes += self._changed_unseen()
        if self._changes > 1:
            raise ConfigurationError(
                f"{self._fqn} is trained, but attach() was not called: FP8 state is not synchronised, "
                "and scales do not follow: call manager.attach(…) before the training (with DeepSpeed, "
                "fp8dist.integrations.deepspeed.attach(manager, engine))"
            )

    def _changed_unseen(self) -> bool:
        """True if the weight differs from its last sample, taken since the last boundary. Waits for the device."""
        stored = self._note.stored
        if not stored or capturing(self._sync.arena.device):
            return False
        before, self._sample = self._sample, sample_of(stored[0])
        return before is not None and before.shape == self._sample.shape and not torch.equal(before, self._sample)
