"""A short run as exporters get it: an outlier, NaN, infinities, a fallback, a resume and a divergence."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

from fp8dist import Exporter, Slot, SlotStatistics

NAN, INF = math.nan, math.inf
E4M3, E5M2 = 448.0, 57344.0

Call = Callable[[Exporter], None]


def event(step: int, kind: str, **fields: Any) -> Call:
    line = {"step": step, "time": 1.75e9 + step, "kind": kind, **fields}
    return lambda exporter: exporter.event(line)


def write(step: int, numbers: dict[str, float], slots: Sequence[SlotStatistics] = ()) -> Call:
    return lambda exporter: exporter.write(step, numbers, slots)


def slots(saturated: float, amax: float) -> list[SlotStatistics]:
    """Return statistics whose worst share and headroom are in the last slots, beside a cold and an unknown slot."""
    return [
        SlotStatistics(Slot("blocks.0.up", "grad_output"), 0.25, 7168.0, 0.0, 0.125, fp8_max=E5M2),  # 5 doublings left
        SlotStatistics(Slot("blocks.0.up", "input"), 3.5, 16.0, 0.0, 1 / 3, fp8_max=E4M3),  # 3 doublings left
        SlotStatistics(Slot("blocks.0.up", "weight"), NAN, NAN, None, None, fp8_max=E4M3),
        SlotStatistics(Slot("blocks.1.up", "input"), amax, 64.0, saturated, 0.0, fp8_max=E4M3),
        SlotStatistics(Slot("blocks.1.up", "weight"), 1.75, 64.0, 0.0, 0.0),
    ]


FIRST: Sequence[Call] = (
    event(0, "start", resumed_after=None, ranks=2),
    write(1, {"loss": 0.1 + 0.2, "grad_norm": 1.5, "tokens": 512, "step_ms": 12.5, "eval/top-1": 0.1}),
    write(2, {"loss": 2.5, "grad_norm": 1e30, "tokens": 512, "step_ms": 12.7}, slots(0.25, 14.0)),  # -1 doubling
    write(2, {"nonfinite_amaxes": 0, "fallbacks": 0, "proven": 2}),
    event(2, "saved", path="step-2"),
    write(3, {"loss": NAN, "grad_norm": INF, "tokens": 512, "step_ms": NAN}),
    event(3, "nonfinite", slots=["blocks.1.up:input"], rank=1, microbatch=0),
    event(3, "fallback", modules=["blocks.1.up"]),
    write(4, {"loss": -INF, "grad_norm": 1.5, "tokens": 512, "step_ms": 1e4}, slots(1.0, INF)),
    write(4, {"nonfinite_amaxes": 3, "fallbacks": 1, "proven": 4, "skew_ms": 3.5}),
)
"""A run of four steps that is killed."""

RESUMED: Sequence[Call] = (
    event(2, "start", resumed_after=2, ranks=2),
    write(3, {"loss": 2.25, "grad_norm": 1.25, "tokens": 512, "step_ms": 12.25}),
    write(4, {"loss": 2.125, "grad_norm": 1.125, "tokens": 512, "step_ms": 12.0}, slots(0.0, 7.0)),  # none left
    write(4, {"nonfinite_amaxes": 1, "fallbacks": 0, "proven": 4}),
    event(5, "diverged", report={"consistent": False}),
    event(5, "a kind of another version"),
    write(5, {"loss": 2.0, "tokens": 512}),
)
"""The same run, resumed from step 2, until its ranks differ."""

END: Sequence[Call] = (event(5, "end"),)


def play(exporter: Exporter, *parts: Sequence[Call]) -> None:
    """Make all calls, and close."""
    for part in parts:
        for call in part:
            call(exporter)
    exporter.close()


def bits(value: float) -> int:
    """Return the bits of a float64, so that NaN equals itself."""
    return int.from_bytes(struct.pack(">d", value), "big")


def float32(value: float) -> float:
    """Return the nearest float32."""
    return float(struct.unpack(">f", struct.pack(">f", value))[0])
