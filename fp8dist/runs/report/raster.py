"""The colours of heat maps, and heat maps as PNG."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt

_VIRIDIS = (
    "440154 481567 482677 453781 404788 39568c 33638d 2d708e 287d8e 238a8d "
    "1f968b 20a387 29af7f 3cbb75 55c667 73d055 95d840 b8de29 dce319 fde725"
)


def _interpolated() -> tuple[tuple[int, int, int], ...]:
    fixed = np.array([list(bytes.fromhex(colour)) for colour in _VIRIDIS.split()], dtype=float)
    places = np.linspace(0, len(fixed) - 1, 254)
    channels = [np.interp(places, np.arange(len(fixed)), channel) for channel in fixed.T]
    return tuple((int(red), int(green), int(blue)) for red, green, blue in np.rint(np.transpose(channels)))


PALETTE = _interpolated()
"""Viridis in 254 colours (van der Walt and Smith 2015), which the colour-blind can tell apart."""

NOT_FINITE, NOTHING = (213, 94, 0), (255, 255, 255)
"""Colours of infinities (vermilion, of Okabe and Ito) and of NaN."""


def levels(values: npt.ArrayLike, low: float, high: float, log: bool = False) -> npt.NDArray[np.uint8]:
    """Return the place of each value in ``PALETTE``: 0 at ``low`` and below, 253 at ``high`` and above.

    254: an infinity; 255: NaN. With ``log`` the places between are logarithmic, and ``low`` must be above 0.
    """
    given = np.asarray(values, dtype=np.float64)
    inside = np.clip(np.nan_to_num(given, nan=low, posinf=high, neginf=low), low, high)
    if log:
        inside, low, high = np.log(inside), np.log(low), np.log(high)
    span = high - low if high > low else 1.0
    found = np.rint((inside - low) / span * (len(PALETTE) - 1)).astype(np.uint8)
    found[np.isinf(given)] = 254
    found[np.isnan(given)] = 255
    return found


def heat_map_png(
    values: npt.ArrayLike,
    low: float,
    high: float,
    *,
    log: bool = False,
    cell: tuple[int, int] = (1, 1),
    reverse: bool = False,
) -> bytes:
    """Return a heat map as PNG with a palette.

    Args:
        values: [rows, columns], the first row on top. NaN is white, an infinity vermilion.
        low, high: values of the first and the last colour.
        log: colours follow the logarithm; ``low`` must be above 0.
        cell: width and height of a value, in pixels.
        reverse: the first colour is that of ``high``.

    Raises:
        ValueError: there are no values, or they are not in rows and columns.
    """
    from PIL import Image  # Bokeh brings it. The colours are also for TensorBoard, which may be there alone.

    found = levels(values, low, high, log)
    if found.ndim != 2 or not found.size:
        raise ValueError(f"values must be [rows, columns] with at least one of each, got shape {list(found.shape)}")
    found = np.repeat(np.repeat(found, cell[0], axis=1), cell[1], axis=0)
    colours = (*(PALETTE[::-1] if reverse else PALETTE), NOT_FINITE, NOTHING)
    picture = Image.fromarray(found)
    picture.putpalette([channel for colour in colours for channel in colour])
    made = io.BytesIO()
    picture.save(made, "PNG", optimize=True)
    return made.getvalue()
