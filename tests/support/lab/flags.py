"""Values of the lab's flags, and the functions that read them. Nothing here imports torch."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from fp8dist_kernels import GEMMS, Gemm
from launch.train_gpt.options import RECIPES

Word = TypeVar("Word", bound=str)

HIGH = "high"
"""The value of ``--override`` for high precision, in place of a recipe."""

REPLAYS = ("nonfinite", "jump", "spike")
"""The values of ``--replay-on``."""

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
    """Read KIND:RANK:STEP, or what the kind has in place of the step. Raise ValueError if it is malformed."""
    kind, rank, *rest = text.split(":")
    least, most = {BAD_DEVICE: (0, 1), PRODUCT: (1, 2), **dict.fromkeys(RANKED, (0, 0))}.get(kind, (1, 1))
    if kind not in FAULTS or not least <= len(rest) <= most:
        raise ValueError(text)
    if kind == BAD_DEVICE:
        return Fault(kind, int(rank), 0, probability=float((rest or ["0.01"])[0]))
    (gemm,) = gemms((rest[1:] or ["wgrad"])[0])
    return Fault(kind, int(rank), int((rest or ["0"])[0]), gemm)


def override(text: str) -> Override:
    """Read PATTERN=RECIPE. Raise ValueError if it is malformed."""
    pattern, _, recipe = text.rpartition("=")
    if not pattern or recipe not in (*RECIPES, HIGH):
        raise ValueError(text)
    return Override(pattern, recipe)


def replays(text: str) -> tuple[str, ...]:
    """Read events, separated by commas. Raise ValueError if one is unknown."""
    return _of(REPLAYS, text)


def gemms(text: str) -> tuple[Gemm, ...]:
    """Read GEMMs, separated by commas. Raise ValueError if one is unknown."""
    return _of(GEMMS, text)


def gemms_or_none(text: str) -> tuple[Gemm, ...]:
    """Likewise, or "none"."""
    return () if text == "none" else gemms(text)


def _of(known: tuple[Word, ...], text: str) -> tuple[Word, ...]:
    named = text.split(",")
    if not set(named) <= set(known):
        raise ValueError(text)
    return tuple(word for word in known if word in named)
