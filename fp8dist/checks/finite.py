"""Find tensors with NaN or infinity. Ranks may hold the same ones: then nothing differs, and the model is lost."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["not_finite"]


@torch.no_grad()
def not_finite(tensors: Iterable[tuple[str, Tensor, bool]]) -> tuple[str, ...]:
    """Return the names of tensors with values that no sound training leaves there. Reads each tensor once.

    Args:
        tensors: (name, tensor, True if an infinity counts, too). A buffer may be a mask of infinities.
    """
    found: dict[tuple[torch.device, torch.dtype], list[tuple[str, bool, tuple[Tensor, Tensor]]]] = {}
    for name, tensor, infinities in tensors:
        # No kernel of torch reads FP8 or sparse tensors. Their NaNs, if any, come from a tensor that is read.
        readable = tensor.is_floating_point() and tensor.dtype.itemsize > 1 and tensor.layout is torch.strided
        if readable and tensor.numel() and not tensor.is_meta:
            # Faster than isfinite(), which writes a mask. A NaN anywhere is both the minimum and the maximum.
            place = found.setdefault((tensor.device, tensor.dtype), [])
            place.append((name, infinities, torch.aminmax(tensor)))
    return tuple(
        name
        for things in found.values()
        for (name, infinities, _), pair in zip(things, _values([pair for *_, pair in things]))
        if any(math.isnan(value) or (infinities and math.isinf(value)) for value in pair)
    )


def _values(pairs: list[tuple[Tensor, Tensor]]) -> list[list[float]]:
    """Return the numbers of pairs of one dtype and device. Waits for the device once."""
    flat: list[float] = torch.stack([one for pair in pairs for one in pair]).tolist()
    return [flat[i : i + 2] for i in range(0, len(flat), 2)]
