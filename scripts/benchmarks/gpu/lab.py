"""Types and helpers shared by the parts of the benchmark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from scripts.benchmarks.gpu.stopwatch import Ratio, Stopwatch

Case = dict[str, Any]
"""Measurement of one shape: "name"; "timings" of each side, or a "problem"; "ratios"; and the part's own figures."""


@dataclass
class Lab:
    """A device with its stopwatch, and the time limits of the next case.

    Attributes:
        smoke: use tiny sizes, to check that everything runs. Such figures mean nothing, and are never published.
        seconds: limit of each comparison.
        share: seconds for the whole case, if all cases of the part that are left get the same.
    """

    stopwatch: Stopwatch
    smoke: bool = False
    seconds: float = 1.0
    share: float = 5.0

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.stopwatch.device


class Part(Protocol):
    """One part of the benchmark."""

    def plan(self, lab: Lab) -> Sequence[Any]:
        """Return the cases to measure, most important first."""
        ...

    def measure(self, lab: Lab, planned: Any) -> Case:
        """Measure one case. A wrong result gives a case with a "problem" and no timings."""
        ...

    def figures(self, cases: Sequence[Case]) -> dict[str, Any]:
        """Return the summary figures of all cases. Leaves out every figure that depends on a wrong result."""
        ...


def geomean(ratios: Sequence[Ratio]) -> Ratio:
    """Return the geometric mean of at least one ratio. Its interval assumes that the ratios' errors are independent."""
    logs = [(math.log(middle), math.log(low), math.log(high)) for middle, low, high in ratios]
    mean = sum(middle for middle, _, _ in logs) / len(logs)
    down = math.hypot(*(middle - low for middle, low, _ in logs)) / len(logs)
    up = math.hypot(*(high - middle for middle, _, high in logs)) / len(logs)
    return Ratio(math.exp(mean), math.exp(mean - down), math.exp(mean + up))


def summary_of(cases: Sequence[Case], key: str) -> dict[str, Any]:
    """Return mean, lowest and number of the cases' ratios ``key``; {} if there are none, or a result was wrong."""
    ratios = {case["name"]: Ratio(*case["ratios"][key]) for case in cases if key in case.get("ratios", {})}
    if not ratios or any(case.get("problem") for case in cases):
        return {}
    lowest = min(ratios, key=ratios.__getitem__)
    return {
        "geomean": geomean(list(ratios.values())),
        "lowest": ratios[lowest].ratio,
        "lowest_case": lowest,
        "shapes": len(ratios),
    }


def by_field(cases: Sequence[Case], field: str, values: Iterable[str], key: str) -> dict[str, Any]:
    """Return the summary of the ratios ``key`` by the value of a field of the cases. A case without the field has
    failed, and is counted as a failure of every value."""
    chosen = {value: [case for case in cases if case.get(field, value) == value] for value in values}
    return {value: summary for value, mine in chosen.items() if (summary := summary_of(mine, key))}


def by_recipe(cases: Sequence[Case], recipes: Iterable[str], keys: Sequence[str]) -> dict[str, Any]:
    """Return the summaries of all ratios by recipe and key."""
    found = {key: by_field(cases, "recipe", recipes, key) for key in keys}
    return {f"{recipe}: {key}": summary for key, mine in found.items() for recipe, summary in mine.items()}


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
    pieces = (x.to(mine.device).reshape(-1).split(1 << 26) for x in (mine, theirs))
    for ours, other in zip(*pieces):
        equal = ours.view(words) == other.view(words)
        if not bool((equal | (ours.float().isnan() & other.float().isnan())).all()):
            return False
    return True
