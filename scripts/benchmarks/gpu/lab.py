"""Types and helpers shared by the parts of the benchmark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from scripts.benchmarks.gpu.stopwatch import Stopwatch

__all__ = ["Case", "Lab", "Part", "geomean", "joined_problems", "poison", "ratios_of", "same_bits"]

Case = dict[str, Any]
"""Measurement of one shape: "name"; "timings" of each side, or a "problem"; and the part's own figures."""


@dataclass
class Lab:
    """A device, its stopwatch, and the time limit of the next case.

    ``smoke``: tiny sizes, to check that everything runs. Such figures mean nothing, and are never published.
    """

    stopwatch: Stopwatch
    smoke: bool = False
    seconds: float = 1.0

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.stopwatch.device


class Part(Protocol):
    """One part of the benchmark."""

    name: str

    def plan(self, lab: Lab) -> Sequence[Any]:
        """Return the cases to measure, most important first."""
        ...

    def measure(self, lab: Lab, planned: Any) -> Case:
        """Measure one case. A wrong result gives a case with a "problem" and no timings."""
        ...

    def figures(self, cases: Sequence[Case]) -> dict[str, Any]:
        """Return the summary figures of all cases. Leaves out every figure that depends on a wrong result."""
        ...


def geomean(ratios: Iterable[float]) -> float:
    """Return the geometric mean of at least one positive number."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs))


def ratios_of(cases: Sequence[Case], key: str = "ratio") -> dict[str, float]:
    """Return the ratios by case name, for the cases that have one."""
    return {case["name"]: case[key] for case in cases if key in case}


def joined_problems(cases: Sequence[Case]) -> str | None:
    """Return one line about all cases that could not be measured; None if there are none."""
    named = [f"{case['name']}: {case['problem']}" for case in cases if case.get("problem")]
    if not named:
        return None
    return named[0] if len(named) == 1 else f"{named[0]} (and {len(named) - 1} more)"


def poison(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Leave NaN in the memory that the allocator will probably reuse for the next result of this size."""
    size = math.prod(shape) * dtype.itemsize
    torch.full((max(size, 1),), 0xFF, dtype=torch.uint8, device=device)  # NaN in every float format.


def same_bits(mine: Tensor, theirs: Tensor) -> bool:
    """True if two tensors hold the same numbers, bit for bit except for NaN codes. Any dtype."""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    if not mine.is_floating_point():
        return torch.equal(mine, theirs.to(mine.device))
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[mine.element_size()]
    theirs = theirs.to(mine.device)
    rows = max(1, (1 << 26) // max(1, mine[0].numel())) if mine.ndim > 1 else 1 << 26
    if mine.ndim == 0:
        mine, theirs = mine.reshape(1), theirs.reshape(1)
    for ours, other in zip(mine.split(rows), theirs.split(rows)):
        equal = ours.view(words) == other.view(words)
        if not bool((equal | (ours.float().isnan() & other.float().isnan())).all()):
            return False
    return True
