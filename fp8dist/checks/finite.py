"""Find tensors with NaN or infinity. If all ranks hold the same NaN, nothing differs, and yet the model is lost."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def not_finite(tensors: Iterable[tuple[str, Tensor, bool]]) -> tuple[str, ...]:
    """Return the names of tensors with NaN, or with infinity where that counts. Local; reads each tensor once, and
    waits for each device.

    Args:
        tensors: (name, tensor, True if an infinity counts, too). A buffer may be a mask of infinities.
    """
    # By device and dtype, for one copy to the host each: (name, infinities count, (minimum, maximum)).
    found: dict[tuple[torch.device, torch.dtype], list[tuple[str, bool, tuple[Tensor, Tensor]]]] = {}
    for name, tensor, infinities in tensors:
        if tensor.is_complex() and tensor.layout is torch.strided:
            tensor = torch.view_as_real(tensor.resolve_conj())
        # torch finds no minimum of FP8 and sparse tensors. A NaN in them comes from a tensor that is read here.
        readable = tensor.is_floating_point() and tensor.dtype.itemsize > 1 and tensor.layout is torch.strided
        if readable and tensor.numel() and not tensor.is_meta:
            # Faster than isfinite(), which writes a mask. If any element is NaN, minimum and maximum are NaN.
            place = found.setdefault((tensor.device, tensor.dtype), [])
            place.append((name, infinities, torch.aminmax(tensor)))
    return tuple(
        name
        for things in found.values()
        for (name, infinities, _), pair in zip(things, _values([pair for *_, pair in things]))
        if any(math.isnan(value) or (infinities and math.isinf(value)) for value in pair)
    )


def _values(pairs: list[tuple[Tensor, Tensor]]) -> list[list[float]]:
    """Return pairs of 0-d tensors of one dtype and device as numbers. Waits for the device once."""
    flat: list[float] = torch.stack([one for pair in pairs for one in pair]).tolist()
    return [flat[i : i + 2] for i in range(0, len(flat), 2)]
