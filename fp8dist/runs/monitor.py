"""Outputs of a watch by old names, ``watch(path=, tensorboard=)`` and ``Monitor``. They go with the next version."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8dist.common.names import warn_moved
from fp8dist.errors import ConfigurationError
from fp8dist.runs.exporter import Exporter, Exporters
from fp8dist.runs.exporters.tensorboard import TensorBoard
from fp8dist.runs.run_files import append_lines, opened_lines, slot_lines
from fp8dist.state.statistics import JumpAlarm, ScaleJump, SlotStatistics
from fp8dist.state.watch import Observation

logger = logging.getLogger("fp8dist")


class SlotOutputs:
    """Observer that writes the statistics of slots to a file of JSON lines and to TensorBoard. Local.

    Args:
        path: the file, replaced unless ``resume_after`` is given; its folder is created. None: no file.
        tensorboard: TensorBoard's log folder. None: none.
        resume_after: the step that the run resumes from. Lines of later steps, and a torn last line, are dropped.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | Path | None, tensorboard: str | Path | None, resume_after: int | None) -> None:
        self.path = None if path is None else Path(path).absolute()
        files = [] if self.path is None else [_LineFile(self.path, resume_after)]
        self._exporters = Exporters([*files, *boards(tensorboard, resume_after)])
        weakref.finalize(self, self._exporters.close)  # Close the files also when the model is dropped.

    def __call__(self, seen: Observation) -> None:
        self._exporters.call("write", seen.step, {}, seen.slots)

    def close(self) -> None:
        """Close the files. Later observations are not written."""
        self._exporters.close()


class Monitor(SlotOutputs):
    """Old: a ``Recorder`` writes the statistics of slots, and ``watch(jump=…)`` finds jumps of scales. Local.

    Args:
        path: the file of JSON lines to write; None: none.
        tensorboard: the folder of TensorBoard's files; None: none.
        jump: see ``fp8dist.watch``.
        writes: False on all ranks but one: return the same jumps, but write and log nothing.
        resume_after: the step that the run resumes from. Lines of later steps are dropped.

    Raises:
        ConfigurationError: ``jump`` is not a finite factor above 1.
        OSError: the file cannot be opened.
    """

    def __init__(
        self,
        path: str | Path | None,
        tensorboard: str | Path | None = None,
        jump: float | None = None,
        writes: bool = True,
        resume_after: int | None = None,
    ) -> None:
        warn_moved("fp8dist.Monitor", "fp8dist.Recorder(folder, manager), and for jumps fp8dist.watch(manager, jump=…)")
        self._alarm = None if jump is None else JumpAlarm(jump, writes)
        super().__init__(*((path, tensorboard) if writes else (None, None)), resume_after)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def observe(self, step: int, statistics: Sequence[SlotStatistics]) -> list[ScaleJump]:
        """Write the statistics of a step, and return the scales that jumped, largest factor first. Local."""
        self(Observation(step, tuple(statistics), {}))
        return [] if self._alarm is None else self._alarm.jumps(step, statistics)


class _LineFile:
    """Exporter into a file of JSON lines, one for each slot and observation."""

    def __init__(self, path: Path, resume_after: int | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = opened_lines(path, resume_after)

    def write(self, step: int, numbers: Mapping[str, float], slots: Sequence[SlotStatistics]) -> None:
        append_lines(self._file, slot_lines(step, slots))

    def event(self, event: Mapping[str, Any]) -> None:
        """Do nothing: a watch has no events."""

    def close(self) -> None:
        os.close(self._file)


def boards(folder: str | os.PathLike[str] | None, resume_after: int | None) -> list[Exporter]:
    """Return the exporter for the old option ``tensorboard=``; none without TensorBoard, after a warning."""
    if folder is None:
        return []
    try:
        return [TensorBoard(Path(folder), resume_after=resume_after, images=0, slots=True)]
    except ConfigurationError as error:
        logger.warning("fp8dist: nothing is written for TensorBoard: %s", error)
        return []
