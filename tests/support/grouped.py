"""Rows that are sorted by expert, for tests of grouped casts and products."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tests.support.casting import hard_values
from tests.support.devices import DEVICE

COUNTS = ((5, 0, 17, 0, 130, 1), (0, 0, 0), (1,), (33,), (0, 16, 0), (128, 129))
"""Rows of each expert."""

WRONG = ((40, 30, 60), (-3, 20, 1 << 30), (0, 49, 0), (2**31 - 1,) * 3)
"""Offsets of three experts that decrease, or that lie beyond or before all of 50 rows."""


def ends(counts: Sequence[int], device: torch.device | str = DEVICE) -> Tensor:
    """Return ``offsets`` of groups with these numbers of rows."""
    return torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=device)


def poisoned_rows(counts: Sequence[int], features: int, beyond: int, seed: int = 0, finite: bool = False) -> Tensor:
    """Return difficult rows of all groups, and ``beyond`` rows of NaN that belong to no group."""
    x = hard_values(sum(counts) + beyond, features, seed, finite)
    x[sum(counts) :] = torch.nan
    return x


def slots_of(groups: int, device: torch.device | str = DEVICE, apart: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return scales, cold flags and pendings of slots in an arena: every ``apart``-th is used, every third is cold."""
    scale = torch.linspace(0.2, 3.0, groups * apart, device=device)
    cold = torch.arange(groups * apart, device=device) % 3 == 0
    return scale[::apart], cold[::apart], torch.full_like(scale, -1.0)[::apart]
