"""TensorBoard, read back by its own reader."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fp8dist import Slot, SlotStatistics
from fp8dist.errors import ConfigurationError
from fp8dist.exporters import TensorBoard
from fp8dist.runs.exporters import tensorboard as module
from fp8dist.runs.exporters.tensorboard import _raster
from tests.support.exported import END, FIRST, INF, NAN, RESUMED, bits, float32, play, slots, write


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), {"scalars": 0, "histograms": 0, "images": 0, "tensors": 0})
    events.Reload()
    return events


def scalars(folder: Path, tag: str) -> list[tuple[int, int]]:
    return [(one.step, bits(one.value)) for one in read(folder).Scalars(tag)]


def expected(*points: tuple[int, float]) -> list[tuple[int, int]]:
    return [(step, bits(float32(value))) for step, value in points]


@pytest.mark.slow
def test_its_reader_finds_the_numbers_as_float32(tmp_path: Path) -> None:
    play(TensorBoard(tmp_path), FIRST)
    assert scalars(tmp_path, "loss") == expected((1, 0.1 + 0.2), (2, 2.5), (3, NAN), (4, -INF))
    assert scalars(tmp_path, "grad_norm") == expected((1, 1.5), (2, 1e30), (3, INF), (4, 1.5))
    assert scalars(tmp_path, "eval/top-1") == expected((1, 0.1))
    assert scalars(tmp_path, "fp8/input/saturated") == expected((2, 0.25), (4, 1.0))
    assert scalars(tmp_path, "fp8/input/underflow") == expected((2, 1 / 3), (4, 1 / 3))
    assert scalars(tmp_path, "fp8/input/headroom") == expected((2, -1.0), (4, -INF))
    assert "fp8/weight/headroom" not in read(tmp_path).Tags()["scalars"]
    first, second = (one.histogram_value for one in read(tmp_path).Histograms("fp8/input/headrooms"))
    assert (first.num, first.min, first.max) == (2, -1.0, 3.0)
    assert (second.num, second.min, second.max) == (1, 3.0, 3.0)
    (nonfinite,) = read(tmp_path).Tensors("events/nonfinite/text_summary")
    assert b"blocks.1.up:input" in nonfinite.tensor_proto.string_val[0]


def test_with_slots_it_has_what_a_line_of_a_slot_has_except_null(tmp_path: Path) -> None:
    board, slot = TensorBoard(tmp_path, slots=True, images=0), Slot("a", "input")
    board.write(3, {}, [SlotStatistics(slot, 2.5, NAN, 0.25, None, 1)])
    found = read(tmp_path).Tags()["scalars"]  # Before it is closed.
    assert [tag for tag in found if ":" in tag] == [
        f"fp8/a:input/{name}" for name in ("amax", "saturated", "amax_rank")
    ]
    assert scalars(tmp_path, "fp8/a:input/amax") == expected((3, 2.5))
    board.close()


@pytest.mark.slow
def test_a_resumed_run_replaces_later_steps(tmp_path: Path) -> None:
    play(TensorBoard(tmp_path), FIRST)
    play(TensorBoard(tmp_path, resume_after=2), RESUMED, END)
    assert scalars(tmp_path, "loss") == expected((1, 0.1 + 0.2), (2, 2.5), (3, 2.25), (4, 2.125), (5, 2.0))
    assert scalars(tmp_path, "fp8/input/headroom") == expected((2, -1.0), (4, 0.0))
    assert {"events/diverged/text_summary", "events/other/text_summary"} <= set(read(tmp_path).Tags()["tensors"])


def image_of(folder: Path, tag: str) -> np.ndarray:
    *_, last = read(folder).Images(tag)
    return np.asarray(Image.open(io.BytesIO(last.encoded_image_string)))


def near(colour: list[int]) -> Any:
    """The palette has 254 colours, and the colour may lie between two of them."""
    return pytest.approx(colour, abs=3)


@pytest.mark.slow
def test_a_heat_map_shows_slots_over_steps(tmp_path: Path) -> None:
    observed = [write(step, {}, slots(share, 1.0)) for step, share in ((10, 0.0), (20, 1e-3), (30, 1.0))]
    play(TensorBoard(tmp_path, images=2), observed)
    assert [one.step for one in read(tmp_path).Images("fp8/saturated")] == [20, 30]
    image = image_of(tmp_path, "fp8/saturated")
    tall, wide = 256 // 5, 256 // 3
    assert image.shape == (5 * tall, 3 * wide, 3)
    row = image[3 * tall + 1]  # "blocks.1.up:input" is the fourth slot.
    assert [row[wide * i + 1].tolist() for i in range(3)] == [[68, 1, 84], near([33, 145, 140]), [253, 231, 37]]
    assert tuple(image[2 * tall + 1, 1]) == (128, 128, 128)  # The third slot is cold.


def test_the_scale_of_the_heat_map_is_logarithmic() -> None:
    shares = np.array([[0.0, 1e-9, 1e-6, 10**-4.5, 1e-3, 10**-1.5, 1.0, NAN]])
    wide = 256 // 8
    assert _raster(shares)[0, ::wide].tolist() == [
        *([[68, 1, 84]] * 3),
        *(near([59, 82, 139]), near([33, 145, 140]), near([94, 201, 98]), [253, 231, 37], [128, 128, 128]),
    ]


@pytest.mark.slow
def test_the_heat_map_keeps_the_newest_observations_and_slots_that_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COLUMNS", 4)
    later = slots(1.0, 1.0)
    observed = [write(step, {}, later[3:] if step < 5 else later) for step in range(6)]
    play(TensorBoard(tmp_path), observed)
    image = image_of(tmp_path, "fp8/saturated")
    tall, wide = 256 // 5, 256 // 4
    assert image.shape == (5 * tall, 4 * wide, 3)
    assert [tuple(one) for one in image[1, ::wide]] == [*([(128, 128, 128)] * 3), (68, 1, 84)]


def test_a_number_of_images_below_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="images must be 0 or a number of observations, got -1"):
        TensorBoard(tmp_path, images=-1)
