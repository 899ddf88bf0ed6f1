"""Heat maps as PNG: read back by another decoder."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from fp8dist.runs.report.raster import NOT_FINITE, NOTHING, PALETTE, heat_map_png, levels


def test_a_picture_has_the_colours_of_its_values() -> None:
    values = np.array([[0.0, 1.0, np.nan], [0.5, 99.0, np.inf]])
    picture = Image.open(io.BytesIO(heat_map_png(values, 0.0, 1.0, cell=(3, 2)))).convert("RGB")
    assert picture.size == (9, 4)
    middle = PALETTE[round(0.5 * (len(PALETTE) - 1))]
    expected = [[PALETTE[0], PALETTE[-1], NOTHING], [middle, PALETTE[-1], NOT_FINITE]]
    assert [[picture.getpixel((3 * x + 1, 2 * y + 1)) for x in range(3)] for y in range(2)] == expected
    turned = Image.open(io.BytesIO(heat_map_png(values, 0.0, 1.0, reverse=True))).convert("RGB")
    assert turned.getpixel((0, 0)) == PALETTE[-1]


def test_logarithmic_places() -> None:
    assert levels([[0.0, 1e-6, 1e-3, 1.0, 5.0]], 1e-6, 1.0, log=True).tolist() == [[0, 0, 126, 253, 253]]


def test_brightness_only_grows() -> None:
    """Also who sees no colours, or prints in grey, can read the map."""
    brightness = [0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in PALETTE]
    assert all(np.diff(brightness) > -0.5)


@pytest.mark.parametrize("shape", [(3,), (0, 4), (4, 0)])
def test_what_is_no_map_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="rows, columns"):
        heat_map_png(np.zeros(shape), 0.0, 1.0)
