"""TensorBoard: scalars, histograms of headroom, and heat maps of slot and step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fp8dist.errors import ConfigurationError
from fp8dist.runs.exporters.extras import imported
from fp8dist.runs.exporters.samples import event_text, flat_numbers, kind_of
from fp8dist.runs.exporters.slots import by_role
from fp8dist.runs.report.raster import NOT_FINITE, PALETTE, levels
from fp8dist.state.slots import Slot
from fp8dist.state.statistics import SlotStatistics

COLUMNS = 512
"""Observations in a heat map: the newest."""

LONGEST_EVENT = 10_000
"""Characters of an event's text."""

LEAST_SHARE = 1e-6
"""Share that the heat map draws in its first colour. The last colour is a share of 1, and the scale is logarithmic."""

COLOURS = np.array([*PALETTE, NOT_FINITE, (128, 128, 128)], dtype=np.uint8)
"""Colours of the report's heat maps, uint8 [256, 3]. Grey: not known."""


class TensorBoard:
    """Event files for TensorBoard.

    Scalars are float32 there, and NaN and infinities stay what they are. For each role there are the scalars
    ``fp8/<role>/saturated``, ``/underflow`` (largest share of a slot) and ``/headroom`` (least, in doublings), and a
    histogram of the finite headrooms of its slots. Two images, ``fp8/saturated`` and ``fp8/underflow``, show all slots
    (rows) over the last 512 observations (columns). Events are texts.

    Args:
        folder: the log folder; it is created.
        resume_after: the step that the run resumes from. TensorBoard hides what was written for later steps.
        images: observations between two images; each closing writes them too. 0: no images.
        slots: also write the numbers of each slot, as scalars ``fp8/<slot>/<field>`` with the fields of scales.jsonl.

    Raises:
        ConfigurationError: tensorboard is not installed, or an argument is wrong.
    """

    def __init__(
        self, folder: str | Path, *, resume_after: int | None = None, images: int = 100, slots: bool = False
    ) -> None:
        if images < 0:
            raise ConfigurationError(f"images must be 0 or a number of observations, got {images}")
        self._made = imported("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._folder, self._images, self._each = str(folder), images, slots
        self._purge_step = None if resume_after is None else resume_after + 1
        self._opened = False
        # Step, slots, and their shares [slots, 2]: saturated, underflow.
        self._observed: deque[tuple[int, tuple[Slot, ...], npt.NDArray[np.float32]]] = deque(maxlen=COLUMNS)
        self._not_drawn = 0

    @cached_property
    def _writer(self) -> Any:
        self._opened = True
        return self._made(self._folder, purge_step=self._purge_step, flush_secs=10)

    def write(self, step: int, numbers: Mapping[str, float], slots: Sequence[SlotStatistics]) -> None:
        """Write the numbers of a step. ``Exporter`` describes the arguments."""
        for name, value in flat_numbers(numbers, slots).items():
            self._writer.add_scalar(name, value, step)
        for role, of_role in by_role(slots).items():
            if of_role.headrooms:
                self._writer.add_histogram(f"fp8/{role}/headrooms", np.array(of_role.headrooms), step)
        if slots and self._each:
            for one in slots:
                for field, number in one.numbers():
                    if number is not None:
                        self._writer.add_scalar(f"fp8/{one.slot}/{field}", number, step)
            self._writer.flush()
        if slots and self._images:
            shares = [(_share(one.saturated), _share(one.underflow)) for one in slots]
            self._observed.append((step, tuple(one.slot for one in slots), np.array(shares, dtype=np.float32)))
            self._not_drawn += 1
            if self._not_drawn >= self._images:
                self._draw()

    def event(self, event: Mapping[str, Any]) -> None:
        """Write an event as text, and flush."""
        self._writer.add_text(f"events/{kind_of(event)}", event_text(event, LONGEST_EVENT), event.get("step"))
        self._writer.flush()

    def close(self) -> None:
        """Draw what is not yet drawn, and close the file."""
        if self._not_drawn:
            self._draw()
        if self._opened:
            self._opened = False
            self._writer.close()

    def _draw(self) -> None:
        self._not_drawn = 0
        step = self._observed[-1][0]
        rows = {slot: row for row, slot in enumerate(sorted({slot for _, seen, _ in self._observed for slot in seen}))}
        shares = np.full((len(rows), len(self._observed), 2), math.nan, dtype=np.float32)
        for column, (_, seen, measured) in enumerate(self._observed):
            shares[[rows[slot] for slot in seen], column] = measured
        for i, name in enumerate(("saturated", "underflow")):
            self._writer.add_image(f"fp8/{name}", _raster(shares[:, :, i]), step, dataformats="HWC")


def _share(value: float | None) -> float:
    return math.nan if value is None else value


def _raster(shares: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.uint8]:
    """Return an image, uint8 [height, width, 3] in RGB, of shares [slots, observations]. NaN is grey."""
    image = COLOURS[levels(shares, LEAST_SHARE, 1.0, log=True)]
    tall, wide = (max(1, 256 // size) for size in shares.shape)  # Few slots and steps would be a few pixels.
    return image.repeat(tall, axis=0).repeat(wide, axis=1)
