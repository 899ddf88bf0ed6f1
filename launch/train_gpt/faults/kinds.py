"""Faults that ``--inject`` asks for, by name."""

from __future__ import annotations

import argparse
from typing import NamedTuple

__all__ = ["FAULTS", "SLOW", "Fault", "fault_of"]

DAMAGES = ("scale", "weight", "nan", "skip", "outlier", "spike")
DEATHS = ("kill-forward", "kill-backward", "kill-sync", "kill-save", "hang")
SLOW = "slow"
STOPS = ("stop-update", "stop-sync", "stop-step")
FAULTS = (*DAMAGES, *DEATHS, *STOPS, SLOW)
"""The kinds of ``--inject``: what damages a rank, ends one or lets it hang, stops one for a while, and slows one."""


class Fault(NamedTuple):
    """One ``--inject``: what is damaged, on which rank, at which step (counted from 1). In place of the step SLOW has
    the milliseconds that it costs in each forward."""

    kind: str
    rank: int
    step: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.rank}:{self.step}"


def fault_of(text: str) -> Fault:
    """The fault that a flag names; argparse's error, if there is none."""
    kind, *place = text.split(":")
    if kind not in FAULTS:
        raise argparse.ArgumentTypeError(f"kinds are {', '.join(FAULTS)}, got {text!r}")
    if len(place) != 2 or not all(number.isdecimal() for number in place):
        last = "MILLISECONDS" if kind == SLOW else "STEP"
        raise argparse.ArgumentTypeError(f"expected {kind}:RANK:{last}, got {text!r}")
    return Fault(kind, int(place[0]), int(place[1]))
