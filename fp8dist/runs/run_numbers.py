"""The numbers of a run, in one table: name, unit, kind and source of each. All tools take them from here."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Kind(enum.Enum):
    """What a number says. All but GAUGE become counters."""

    GAUGE = enum.auto()  # The state now.
    TOTAL = enum.auto()  # How much there was so far.
    AMOUNT = enum.auto()  # How much there was in this step.


class NumberSource(enum.Enum):
    """Who measures a number."""

    JOB = enum.auto()  # The training program logs it.
    RECORDER = enum.auto()
    STATE = enum.auto()  # manager.metrics(), of which a due line of metrics.jsonl has these.
    MANAGER = enum.auto()  # manager.metrics() alone.


class Unit(NamedTuple):
    """A base unit. ``name``: at the end of a Prometheus name. ``ucum``: as OpenTelemetry writes it. ``divisor``: how
    many of the run's unit make one."""

    name: str
    ucum: str
    divisor: float = 1.0


UNITS: Mapping[str, Unit] = MappingProxyType(
    {
        "": Unit("", "1"),
        "ms": Unit("seconds", "s", 1000.0),
        "s": Unit("seconds", "s"),
        "bytes": Unit("bytes", "By"),
        "ratio": Unit("ratio", "1"),
        "doublings": Unit("doublings", "{doubling}"),
        "per_s": Unit("per_second", "1/s"),
    }
)
"""By the unit that the run's own files use."""


class Number(NamedTuple):
    """A number of a run. ``name``: without unit, lower case, in snake case. ``unit``: a key of UNITS."""

    name: str
    help: str
    unit: str = ""
    kind: Kind = Kind.GAUGE

    def in_base_unit(self, value: float) -> float:
        """Return the value in the base unit: seconds, not milliseconds."""
        return float(value) / UNITS[self.unit].divisor


def _waits(name: str, where: str) -> dict[str, Number]:
    kinds = {"p50": "Median", "p99": "99th percentile", "max": "Largest"}
    return {
        f"{name}_{kind}_ms": Number(f"{name}_{kind}", f"{text} over the ranks of a step's wait {where}", "ms")
        for kind, text in kinds.items()
    }


_PROVEN = Number("proven_step", "Newest step whose FP8 state the sync has proven equal on all ranks")
_CHECKED = Number("checked_step", "Newest step after which a check found parameters equal and finite")

TABLE: Mapping[NumberSource, Mapping[str, Number]] = MappingProxyType(
    {
        NumberSource.JOB: {
            "loss": Number("loss", "Training loss, as the loop logs it"),
            "loss_of_rank_0": Number("loss_of_rank_0", "Loss of rank 0 alone, in steps that could not be shared"),
            "validation_loss": Number("validation_loss", "Loss on held-out data"),
            "grad_norm": Number("grad_norm", "Norm of the gradient"),
            "skipped_loss": Number("skipped_loss", "Loss of a step that the loss scaler skipped"),
            "skipped_grad_norm": Number("skipped_grad_norm", "Gradient norm of a step that the loss scaler skipped"),
            "learning_rate": Number("learning_rate", "Learning rate"),
            "tokens": Number("tokens", "Tokens of all ranks", kind=Kind.AMOUNT),
            "tokens_per_s": Number("tokens", "Tokens per second, of all ranks", "per_s"),
            **_waits("sync_wait", "in FP8 syncs"),
            **_waits("wait", "in all collectives"),
            "skew_ms": Number("skew", "Largest minus smallest time of a rank in the step, less its waits", "ms"),
            "last_rank": Number("last_rank", "Rank that came last in the step"),
            "straggler": Number("straggler_rank", "Rank that the last steps waited for"),
        },
        NumberSource.RECORDER: {
            "step_ms": Number("step", "Duration of a step", "ms"),
            "sync_ms": Number("sync", "Time per step that the writing rank waited in syncs", "ms"),
            "idle_experts": Number("idle_experts", "Experts that had no token in the observed step"),
            "longest_idle_steps": Number(
                "longest_idle_steps", "Steps since the longest idle expert had a token, at least"
            ),
            "proven": _PROVEN,
            "checked": _CHECKED,
        },
        NumberSource.STATE: {
            "cold_slots": Number("cold_slots", "Slots of delayed scaling that have no scale yet"),
            "nonfinite_amaxes": Number("nonfinite_amaxes", "Amaxes that were NaN or infinite", kind=Kind.TOTAL),
            "saturated_amaxes": Number(
                "saturated_amaxes", "Amaxes that exceeded the scale of their cast", kind=Kind.TOTAL
            ),
            "high_precision_modules": Number("high_precision_modules", "Modules with a GEMM in high precision"),
            "fallbacks": Number("fallbacks", "How often a module fell back to high precision", kind=Kind.TOTAL),
            "compared_parameters": Number("compared_parameters", "Parameters that the last check compared"),
            "compared_slots": Number("compared_slots", "Slots that the last check compared"),
            "compared_bytes": Number("compared", "Bytes that the last check compared", "bytes"),
        },
        NumberSource.MANAGER: {
            "step": Number("fp8_step", "Steps of the FP8 state"),
            "slots": Number("slots", "Slots, one for each tensor that is cast"),
            "collectives": Number("collectives", "Collectives of the FP8 syncs", kind=Kind.TOTAL),
            "sync_bytes": Number("sync", "Bytes sent in FP8 syncs", "bytes", Kind.TOTAL),
            "sync_wait_ms": Number("sync_wait", "Time that the host waited in FP8 syncs", "ms", Kind.TOTAL),
            "checks": Number("checks", "Checks that compared the ranks", kind=Kind.TOTAL),
            "check_ms": Number("check", "Time that checks took", "ms", Kind.TOTAL),
            "proven_step": _PROVEN,
            "checked_step": _CHECKED,
        },
    }
)
"""By the name in metrics.jsonl; ``manager.metrics()`` puts "fp8/" before it."""

KNOWN: Mapping[str, Number] = MappingProxyType({k: v for numbers in TABLE.values() for k, v in numbers.items()})
"""All numbers by their names."""


def number_of(name: str) -> Number:
    """Return what is known about a number of this name.

    A number of the user is a gauge called ``user_…``, so that it is never taken for one of ours. Characters other than
    ASCII letters, digits and underscores become underscores.
    """
    known = KNOWN.get(name.removeprefix("fp8/"))
    if known is not None:
        return known
    unit = "ms" if name.endswith("_ms") else ""
    clean = re.sub(r"[^a-zA-Z0-9_]", "_", name.removesuffix("_ms"))[:200]
    return Number(f"user_{clean}", "A number that the training program logs", unit)
