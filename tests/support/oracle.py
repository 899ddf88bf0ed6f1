"""A reference of FP8 state in plain Python, which shares no code with the library.

Numbers are Python floats that hold float32 values. Each operation runs in float64 and is rounded to float32 once. The
result is exact IEEE float32 arithmetic: products of two float32 fit into a float64, and rounding a float64 quotient of
two float32 once more cannot change the result, because 53 >= 2 * 24 + 2 (Figueroa, "When is double rounding
innocuous?", 1995).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127
FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
ROUNDS_TO_MAX = {448.0: 464.0, 57344.0: 61440.0}
"""For the largest number of each format: half a step above it. Larger values saturate instead of rounding down."""

SlotName = tuple[str, str]


def float32(x: float) -> float:
    """Round ``x`` to the nearest float32, ties to even; too large values become Inf."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def bits_of(x: float) -> int:
    """Return the bits of a float32 value, as a signed 32-bit integer."""
    return struct.unpack("<i", struct.pack("<f", x))[0]


def of_bits(bits: int) -> float:
    """Return the float32 value with these 32 bits. (A NaN loses its payload.)"""
    return struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0]


def divide(a: float, b: float) -> float:
    """Return a / b in float32, for a > 0 and b >= 0."""
    return float32(a / b) if b != 0 else math.inf


def amax_of(values: Iterable[float]) -> float | None:
    """Return the largest magnitude; NaN beats Inf beats finite. None if there are no values."""
    magnitudes = [abs(v) for v in values]
    if not magnitudes:
        return None
    return math.nan if any(map(math.isnan, magnitudes)) else max(magnitudes)


def merged(amaxes: Iterable[float | None]) -> float | None:
    """Merge the amaxes of all ranks or microbatches; None means "did not run"."""
    return amax_of(a for a in amaxes if a is not None)


def scale_for(amax: float, previous: float, fp8_max: float, margin: int = 0, power_of_two: bool = False) -> float:
    """Return ``(fp8_max / amax) / 2**margin``; for an amax of 0, Inf or NaN, return ``previous``."""
    if not 0 < amax < math.inf:
        return previous
    scale = float32(divide(fp8_max, amax) / 2.0**margin)
    scale = min(scale, FLOAT32_MAX)
    if power_of_two:
        _, exponent = math.frexp(scale)
        scale = math.ldexp(0.5, exponent)
    return scale


@dataclass(frozen=True)
class Rules:
    """The settings of a recipe that affect state."""

    history_len: int
    amax_algo: str | Callable[[Sequence[float]], float] = "max"
    margin: int = 0
    power_of_two: bool = False
    warmup: str = "current"


@dataclass
class SlotOracle:
    """The state of one slot after the commits so far."""

    fp8_max: float
    rules: Rules
    history: list[float] = field(default_factory=list)  # Oldest first.
    scale: float = 1.0
    amax: float = 0.0
    cold: bool = True
    commits: int = 0
    nonfinite: int = 0
    saturated: int = 0

    def __post_init__(self) -> None:
        self.history = self.history or [0.0] * self.rules.history_len

    def commit(self, amax: float | None) -> None:
        """Commit the synced amax of one step."""
        if amax is None:
            return
        if math.isnan(amax) or math.isinf(amax):
            self.nonfinite += 1
            return
        self.commits += 1
        just_in_time = self.cold and self.rules.warmup == "current"
        self.saturated += not just_in_time and float32(amax * self.scale) > ROUNDS_TO_MAX[self.fp8_max]
        self.amax = amax
        self.history = [*self.history[1:], amax]
        if amax > 0:
            self.cold = False
        self.scale = self._scale(self._window())

    def derive(self, amax: float | None) -> None:
        """Derive the scale from a weight's amax at attach, without a step."""
        if amax is None or not 0 < amax < math.inf or not self.cold:
            return
        self.scale, self.cold = self._scale(amax), False

    def resized(self, rules: Rules) -> SlotOracle:
        """Return the slot as a job with another history length loads it: the newest entries stay."""
        missing = max(0, rules.history_len - len(self.history))
        history = [0.0] * missing + self.history[-rules.history_len :]
        kept = {name: getattr(self, name) for name in ("scale", "amax", "cold", "commits", "nonfinite", "saturated")}
        return SlotOracle(self.fp8_max, rules, history, **kept)

    def _window(self) -> float:
        algorithm = self.rules.amax_algo
        if algorithm == "max":
            return max(self.history)
        if algorithm == "most_recent":
            return self.history[-1]
        assert callable(algorithm)
        return algorithm(self.history)

    def _scale(self, amax: float) -> float:
        return scale_for(amax, self.scale, self.fp8_max, self.rules.margin, self.rules.power_of_two)

    def state(self) -> dict[str, Any]:
        """Return everything that is defined bitwise, with floats as bits."""
        return {
            "history": [bits_of(a) for a in self.history],
            "scale": bits_of(self.scale),
            "inv_scale": bits_of(divide(1.0, self.scale)),
            "amax": bits_of(self.amax),
            "cold": self.cold,
            "counters": [self.commits, self.nonfinite],
            "saturated": self.saturated,
        }


class Oracle:
    """The state of all slots of a model."""

    def __init__(self, formats: Mapping[SlotName, str], rules: Rules) -> None:
        self.slots = {slot: SlotOracle(FP8_MAX[name], rules) for slot, name in formats.items()}

    def step(self, *ranks: Mapping[SlotName, float | None]) -> None:
        """Step once. Takes each rank's local amaxes; an absent slot did not run there."""
        for name, slot in self.slots.items():
            slot.commit(merged(rank.get(name) for rank in ranks))

    def derive(self, *ranks: Mapping[SlotName, float | None]) -> None:
        """Derive scales from weight amaxes at attach, merged over ranks."""
        for name, slot in self.slots.items():
            slot.derive(merged(rank.get(name) for rank in ranks))

    def state(self) -> dict[SlotName, dict[str, Any]]:
        """Return the state in the form of ``states.state_of``."""
        return {name: slot.state() for name, slot in self.slots.items()}
