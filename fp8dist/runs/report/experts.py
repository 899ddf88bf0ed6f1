"""What experts.jsonl says about each mixture: how its tokens are spread, and which experts have none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fp8dist.runs.report.columns import Floats
from fp8dist.runs.report.folder import Lines
from fp8dist.runs.report.records import LARGEST

MOST_MIXTURES, MOST_EXPERTS = 1 << 10, 1 << 12
"""Mixtures, and experts of one, that are read."""


class MixtureTokens(NamedTuple):
    """``step``: the newest observation, of which ``idle`` and ``age`` are (see ``fp8dist.state.expert_loads``).
    ``shares``: float64[E], share of the mixture's tokens, mean over ``observations``, like ``tokens``, their number.
    ``ranks``: how many ranks' tokens these are; None: not known."""

    module: str
    step: int
    shares: Floats
    observations: int
    idle: Sequence[int]
    age: Sequence[int] | None
    tokens: float = float("nan")
    ranks: int | None = None


class Idle(NamedTuple):
    """An expert without a token in the newest observation of its mixture."""

    module: str
    expert: int
    step: int
    steps: int
    age: int | None
    share: float

    def __str__(self) -> str:
        """Without counters of each step, only observed steps are known."""
        of = f"expert {self.expert} of {self.module}"
        if self.steps == 1:
            return f"{of} has no token in step {self.step:,}"
        if self.age is None:
            return f"{of} has had no token in any observed step of the last {self.steps:,}"
        return f"{of} has had no token for {self.steps:,} steps"


def mixtures_of(lines: Lines) -> tuple[MixtureTokens, ...]:
    """Return the mixtures in the order of the file."""
    found: dict[str, MixtureTokens] = {}
    for line in lines.new():
        one = _parsed(line)
        if one is None or len({*found, one.module}) > MOST_MIXTURES:
            lines.left_out += 1
            continue
        before = found.get(one.module)
        if before is not None and len(before.shares) == len(one.shares):
            count = before.observations + 1
            one = one._replace(
                shares=before.shares + (one.shares - before.shares) / count,
                tokens=before.tokens + (one.tokens - before.tokens) / count,
                observations=count,
            )
        found[one.module] = one
    return tuple(found.values())


def _parsed(line: dict[str, Any]) -> MixtureTokens | None:
    module, age = line.get("module"), line.get("age")
    tokens, idle = _numbers(line.get("tokens")), _numbers(line.get("idle"))
    ages = None if age is None else _numbers(age)
    if not isinstance(module, str) or not tokens or not idle or len(tokens) != len(idle) or sum(tokens) == 0:
        return None
    if (age is not None and (ages is None or len(ages) != len(idle))) or abs(line["step"]) >= LARGEST:
        return None
    shares, (ranks,) = np.array(tokens) / sum(tokens), _numbers([line.get("ranks")]) or (None,)
    return MixtureTokens(module, line["step"], shares, 1, idle, ages, float(sum(tokens)), ranks)


def _numbers(values: Any) -> list[int] | None:
    """Return a list of whole numbers from 0; None if it is something else."""
    if not isinstance(values, list) or len(values) > MOST_EXPERTS:
        return None
    return values if all(type(value) is int and 0 <= value < LARGEST for value in values) else None


def idle_experts(mixtures: Sequence[MixtureTokens]) -> list[Idle]:
    """Return the experts without tokens, the longest first."""
    found = [
        Idle(one.module, expert, one.step, steps, None if one.age is None else one.age[expert], one.shares[expert])
        for one in mixtures
        for expert, steps in enumerate(one.idle)
        if steps > 0
    ]
    return sorted(found, key=lambda idle: -idle.steps)


def relative_loads(mixtures: Sequence[MixtureTokens], most: int) -> tuple[Floats, list[str]]:
    """Return (float64[mixtures, columns], names of the columns): the tokens of each expert over those of an even
    spread. With more than ``most`` experts, columns have the means of several. NaN: the mixture has no such expert."""
    widest = max(len(one.shares) for one in mixtures)
    each = -(-widest // most)
    loads = np.full((len(mixtures), -(-widest // each) * each), np.nan)
    for row, one in zip(loads, mixtures):
        row[: len(one.shares)] = one.shares * len(one.shares)
    parts = loads.reshape(len(mixtures), -1, each)
    known = np.sum(~np.isnan(parts), axis=2)
    means = np.where(known > 0, np.nansum(parts, axis=2) / np.maximum(known, 1), np.nan)
    firsts = range(0, widest, each)
    return means, [str(first) if each == 1 else f"{first} to {min(first + each, widest) - 1}" for first in firsts]
