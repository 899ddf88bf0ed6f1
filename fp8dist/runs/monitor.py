"""Monitor: writes slot statistics as JSON lines and to TensorBoard, and reports jumps of scales."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fp8dist.common.names import is_number
from fp8dist.common.numbers import to_json
from fp8dist.common.text import first_few
from fp8dist.errors import ConfigurationError
from fp8dist.state.slots import Slot
from fp8dist.state.statistics import ScaleJump, SlotStatistics

__all__ = ["Monitor", "keep_lines"]

logger = logging.getLogger("fp8dist")

_NAMED = 5
"""Maximum number of slots that the log names."""


class Monitor:
    """Writes slot statistics, and reports jumps of scales. Local. As a context manager, it closes its files.

    ``path`` gets one JSON object per slot and observation: ``step``, ``slot`` ("fqn:role") and the fields of
    ``SlotStatistics``. Values that were not measured, and the scale of a cold slot, are null. An amax that is not
    finite, for which JSON has no number, is the string "NaN" or "Infinity" (Python's ``float()`` and JavaScript's
    ``Number()`` read them). TensorBoard gets the same values as scalars ``fp8/<slot>/<field>``, except null.

    A full disk does not end the training: the monitor logs one warning, and writes nothing more to that target.

    Args:
        path: the file, replaced unless ``resume_after`` is given; its folder is created. None: no file.
        tensorboard: TensorBoard's log folder. If TensorBoard is not installed, log one warning.
        jump: a factor above 1. A scale that changed by this factor or more, up or down, since the slot's last
            observation has jumped. None: no alarms.
        writes: False on all ranks but one: return the same jumps, but write and log nothing.
        resume_after: the step that the run resumes from. Lines of later steps, and a torn last line, are dropped.
            Scales are compared with observations of this object only.

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
        if jump is not None and not (is_number(jump) and 1 < jump < math.inf):
            raise ConfigurationError(f"jump must be a factor above 1, or None for no alarms, got {jump!r}")
        self._jump, self._writes = jump, writes
        self._scales: dict[Slot, float] = {}
        self._sinks: list[_JsonLines | _Scalars] = []
        if writes and path is not None:
            self._sinks.append(_JsonLines(Path(path), resume_after))
        if writes and tensorboard is not None and (writer := _summary_writer(tensorboard, resume_after)) is not None:
            self._sinks.append(_Scalars(writer))

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def observe(self, step: int, statistics: Sequence[SlotStatistics]) -> list[ScaleJump]:
        """Write the statistics of a step, and return the scales that jumped, largest factor first. Local.

        A slot that is cold, or is observed for the first time, has not jumped.
        """
        for sink in tuple(self._sinks):
            try:
                sink.write(step, statistics)
            except OSError as error:
                logger.warning("fp8dist: step %d: the monitor writes no more to %s: %s", step, sink, error)
                self._sinks.remove(sink)
                with contextlib.suppress(OSError):
                    sink.close()
        jumps = [] if self._jump is None else self._jumps(step, statistics, self._jump)
        if jumps and self._writes:
            shown = first_few([f"{jump.slot} from {jump.before:.4g} to {jump.after:.4g}" for jump in jumps], _NAMED)
            logger.warning(
                "fp8dist: step %d: %d scale(s) jumped by a factor of %g or more: %s",
                step,
                len(jumps),
                self._jump,
                shown,
            )
        return jumps

    def close(self) -> None:
        """Close the files. Later observations are not written."""
        while self._sinks:
            self._sinks.pop().close()

    def _jumps(self, step: int, statistics: Sequence[SlotStatistics], least: float) -> list[ScaleJump]:
        jumps = []
        for slot, _, after, *_ in statistics:
            before = self._scales.pop(slot, None)
            if not 0 < after < math.inf:  # Cold.
                continue
            self._scales[slot] = after
            if before is not None and (factor := max(after / before, before / after)) >= least:
                jumps.append(ScaleJump(slot, step, before, after, factor))
        return sorted(jumps, key=lambda jump: (-jump.factor, jump.slot))


class _JsonLines:
    def __init__(self, path: Path, resume_after: int | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume_after is not None:
            keep_lines(path, resume_after)
        self._file = path.open("w" if resume_after is None else "a", encoding="utf-8")
        weakref.finalize(self, self._file.close)  # Close the file also when the model is dropped.

    def __str__(self) -> str:
        return self._file.name

    def write(self, step: int, statistics: Sequence[SlotStatistics]) -> None:
        lines = []
        for one in statistics:
            line = {"step": step, "slot": str(one.slot)} | {name: to_json(value) for name, value in one.numbers()}
            lines.append(json.dumps(line, allow_nan=False) + "\n")
        self._file.write("".join(lines))  # One call: a killed process leaves at most one torn line.
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class _Scalars:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __str__(self) -> str:
        return str(self._writer.log_dir)

    def write(self, step: int, statistics: Sequence[SlotStatistics]) -> None:
        for one in statistics:
            for name, value in one.numbers():
                if value is not None:
                    self._writer.add_scalar(f"fp8/{one.slot}/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _summary_writer(folder: str | Path, resume_after: int | None) -> Any:
    """Return a SummaryWriter, or None without TensorBoard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except Exception as error:  # With an incompatible protobuf, the import raises TypeError.
        logger.warning("fp8dist: nothing is written for TensorBoard, pip install 'fp8dist[monitor]': %s", error)
        return None
    # purge_step hides events of this and later steps that were written before the resume.
    return SummaryWriter(str(folder), purge_step=None if resume_after is None else resume_after + 1)


def keep_lines(path: Path, last_step: int, keeps: Callable[[dict[str, Any]], bool] | None = None) -> None:
    """Keep only the lines of steps up to ``last_step`` in the file, which need not exist.

    Lines that are not JSON objects with a step, such as the torn last line of a killed process, are dropped. Writes a
    new file and renames it, so that a process killed here loses nothing. Works line by line, because such files grow
    large.

    Args:
        keeps: called for each line that would be kept; False drops the line.
    """
    if not path.exists():
        return
    new = path.with_name(path.name + ".new")
    with path.open("rb") as lines, new.open("wb") as kept:
        for text in lines:
            line = _object(text)
            if line is not None and line["step"] <= last_step and (keeps is None or keeps(line)):
                kept.write(text.rstrip(b"\n") + b"\n")
    new.replace(path)


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None
