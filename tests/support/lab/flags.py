"""Values of the lab's flags, and the functions that read them. Nothing here imports torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from fp8dist_kernels import GEMMS, Gemm
from launch.train_gpt.options import RECIPES

__all__ = [
    "BAD_DEVICE",
    "EXPORTS",
    "FAULTS",
    "HIDDEN_STATE",
    "HIGH",
    "NAN_SAMPLE",
    "NONDETERMINISM",
    "PRODUCT",
    "RANKED",
    "REPLAYS",
    "SLOW",
    "Export",
    "Fault",
    "Override",
    "export",
    "fault",
    "gemms",
    "gemms_or_none",
    "override",
    "replays",
]

HIGH = "high"
"""The value of ``--override`` for high precision, in place of a recipe."""

EXPORTS: Mapping[str, str | None] = MappingProxyType(
    {
        "tensorboard": "FOLDER",
        "wandb": "PROJECT",
        "mlflow": "URI",
        "opentelemetry": None,
        "prometheus": "PORT",
        "textfile": "FILE",
    }
)
"""The names of ``--export``, and what their argument is."""

NEED_ARGUMENTS = ("prometheus", "textfile")
"""Those whose argument has no default."""

REPLAYS = ("nonfinite", "jump", "spike")
"""The values of ``--replay-on``."""

NONE = "none"
"""The value of ``--fast-gemms`` for no GEMM at all."""


PRODUCT, BAD_DEVICE = "product", "bad-device"
DAMAGES = ("scale", "weight", "nan", "skip", "outlier", "spike", "gradient", PRODUCT, BAD_DEVICE)
DEATHS = ("kill-forward", "kill-backward", "kill-sync", "kill-save", "hang")
SLOW = "slow"
NONDETERMINISM, HIDDEN_STATE, NAN_SAMPLE = "nondeterminism", "hidden-state", "nan-sample"
RANKED = (NONDETERMINISM, HIDDEN_STATE)
"""The kinds of ``--inject`` that last for the whole run: they have a rank and no step."""

STOPS = ("stop-update", "stop-sync", "stop-step")
FAULTS = (*DAMAGES, *DEATHS, *STOPS, SLOW, *RANKED, NAN_SAMPLE)
"""The kinds of ``--inject``: damage the state, kill or hang a rank, stop it temporarily, or slow it down."""


class Override(NamedTuple):
    """One ``--override``: a pattern of module names, and a recipe or HIGH for these modules."""

    pattern: str
    recipe: str


class Export(NamedTuple):
    """One ``--export``: a key of EXPORTS, and its argument, "" if none was given."""

    name: str
    argument: str


class Fault(NamedTuple):
    """One ``--inject``: the kind of fault, its rank, and its step (counted from 1). For SLOW, ``step`` is the delay of
    each forward in milliseconds, for BAD_DEVICE and RANKED it is 0. ``gemm``: of PRODUCT. ``probability``: of
    BAD_DEVICE."""

    kind: str
    rank: int
    step: int
    gemm: Gemm = "wgrad"
    probability: float = 0.01

    def __str__(self) -> str:
        if self.kind in RANKED:
            return f"{self.kind}:{self.rank}"
        last = {PRODUCT: f"{self.step}:{self.gemm}", BAD_DEVICE: f"{self.probability:g}"}
        return f"{self.kind}:{self.rank}:{last.get(self.kind, self.step)}"


def fault(text: str) -> Fault:
    """Read KIND:RANK:STEP, or what the kind has in place of the step. Raise ArgumentTypeError if it is malformed."""
    kind, *place = text.split(":")
    if kind not in FAULTS:
        raise argparse.ArgumentTypeError(f"KIND must be one of {', '.join(FAULTS)}, got {text!r}")
    if kind == BAD_DEVICE:
        return _bad_device(place, text)
    if kind in RANKED:
        if len(place) != 1 or not place[0].isdecimal():
            raise argparse.ArgumentTypeError(f"expected {kind}:RANK, got {text!r}")
        return Fault(kind, int(place[0]), 0)
    named = place.pop() if kind == PRODUCT and len(place) == 3 else "wgrad"
    gemm = next((gemm for gemm in GEMMS if gemm == named), None)
    if gemm is None:
        raise argparse.ArgumentTypeError(f"GEMM must be one of {', '.join(GEMMS)}, got {text!r}")
    if len(place) != 2 or not all(number.isdecimal() for number in place):
        last = {SLOW: "MILLISECONDS", PRODUCT: "STEP[:GEMM]"}.get(kind, "STEP")
        raise argparse.ArgumentTypeError(f"expected {kind}:RANK:{last}, got {text!r}")
    return Fault(kind, int(place[0]), int(place[1]), gemm)


def _bad_device(place: list[str], text: str) -> Fault:
    """Read RANK or RANK:P."""
    if not (1 <= len(place) <= 2 and place[0].isdecimal()):
        raise argparse.ArgumentTypeError(f"expected {BAD_DEVICE}:RANK or {BAD_DEVICE}:RANK:P, got {text!r}")
    device = Fault(BAD_DEVICE, int(place[0]), 0)
    try:
        probability = float(place[1]) if len(place) == 2 else device.probability
    except ValueError:
        probability = -1.0
    if not 0 <= probability <= 1:
        raise argparse.ArgumentTypeError(f"P must be a probability from 0 to 1, got {text!r}")
    return device._replace(probability=probability)


def export(text: str) -> Export:
    """Read NAME or NAME:ARGUMENT. Raise ArgumentTypeError if it is malformed."""
    name, colon, argument = text.partition(":")
    if name not in EXPORTS:
        raise argparse.ArgumentTypeError(f"NAME must be one of {', '.join(EXPORTS)}, got {text!r}")
    what = EXPORTS[name]
    if what is None and colon:
        raise argparse.ArgumentTypeError(f"{name} takes no argument, got {text!r}")
    if not argument and (colon or name in NEED_ARGUMENTS):
        raise argparse.ArgumentTypeError(f"expected {name}:{what}, got {text!r}")
    if name == "prometheus" and not (argument.isdecimal() and int(argument) < 1 << 16):
        raise argparse.ArgumentTypeError(f"PORT must be 0 to 65535, got {text!r}")
    return Export(name, argument)


def override(text: str) -> Override:
    """Read PATTERN=RECIPE. Raise ArgumentTypeError if it is malformed."""
    pattern, _, recipe = text.rpartition("=")
    if not pattern or recipe not in (*RECIPES, HIGH):
        kinds = ", ".join((*RECIPES, HIGH))
        raise argparse.ArgumentTypeError(f"expected PATTERN=RECIPE, where RECIPE is one of {kinds}, got {text!r}")
    return Override(pattern, recipe)


def replays(text: str) -> tuple[str, ...]:
    """Read events, separated by commas. Raise ArgumentTypeError if one is unknown."""
    named = text.split(",")
    if not set(named) <= set(REPLAYS):
        raise argparse.ArgumentTypeError(f"expected any of {', '.join(REPLAYS)}, separated by commas, got {text!r}")
    return tuple(event for event in REPLAYS if event in named)


def gemms(text: str) -> tuple[str, ...]:
    """Read GEMMs, separated by commas. Raise ArgumentTypeError if one is unknown."""
    named = text.split(",")
    if not set(named) <= set(GEMMS):
        raise argparse.ArgumentTypeError(f"expected any of {', '.join(GEMMS)}, separated by commas, got {text!r}")
    return tuple(gemm for gemm in GEMMS if gemm in named)


def gemms_or_none(text: str) -> tuple[str, ...]:
    """Likewise, or NONE."""
    return () if text == NONE else gemms(text)
