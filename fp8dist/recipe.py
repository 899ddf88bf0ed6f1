"""Recipes: how scales follow from amaxes. Frozen; defaults are resolved when one is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fp8dist.errors import ConfigurationError
from fp8dist.formats import Format, Role, formats_by_role

__all__ = ["AmaxAlgorithm", "DelayedScaling"]

AmaxAlgorithm = Literal["max", "most_recent"] | Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class DelayedScaling:
    """One scale per tensor, from the amaxes of earlier steps.

    Args:
        history_len: window length in optimizer steps (TransformerEngine counts microbatches when
            each has an autocast of its own).
        amax_algo: ``"max"`` of the window, its ``"most_recent"`` entry, or a callable that takes the
            windows of all slots, float32[n, history_len], oldest first, and returns float32[n]. A
            callable must be deterministic: it runs on every rank and must give the same bits.
        margin: scales are divided by ``2**margin``.
        format: ``"hybrid"`` (E4M3 forward, E5M2 gradients) or ``"e4m3"``.
        update: ``"same_step"``: synced and committed at the boundary. ``"next_step"``: launched at the
            boundary, committed before the next read of a scale. Same losses bit for bit.
        warmup: what a cold slot is cast with: ``"current"``, its own just-in-time amax, or ``"unit"``,
            scale 1.
        power_of_two: round scales down to powers of two.
    """

    history_len: int = 1024
    amax_algo: AmaxAlgorithm = "max"
    margin: int = 0
    format: Literal["hybrid", "e4m3"] = "hybrid"
    update: Literal["same_step", "next_step"] = "same_step"
    warmup: Literal["current", "unit"] = "current"
    power_of_two: bool = False

    def __post_init__(self) -> None:
        _require_int("history_len", self.history_len, 1, 1_000_000)
        _require_int("margin", self.margin, -64, 64)
        _require_choice("format", self.format, ("hybrid", "e4m3"))
        _require_choice("update", self.update, ("same_step", "next_step"))
        _require_choice("warmup", self.warmup, ("current", "unit"))
        if not callable(self.amax_algo):
            _require_choice("amax_algo", self.amax_algo, ("max", "most_recent"))
        if not isinstance(self.power_of_two, bool):
            raise ConfigurationError(f"power_of_two must be True or False, got {self.power_of_two!r}")

    def format_of(self, role: Role) -> Format:
        """The FP8 format that tensors of ``role`` are cast to."""
        return formats_by_role(self.format)[role]

    def describe(self) -> dict[str, Any]:
        """What must be the same on all ranks, as plain JSON values. A callable goes by its name."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if callable(self.amax_algo):
            function = self.amax_algo
            fields["amax_algo"] = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"
        return {"recipe": type(self).__name__, **fields}


def _require_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigurationError(f"{name} must be an integer from {low} to {high}, got {value!r}")


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
