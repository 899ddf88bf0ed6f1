"""Results as Markdown."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from scripts.benchmarks.markdown import NOT_YET, table
from scripts.convergence.comparison import Spread, compare, final_steps
from scripts.convergence.results import SETTING, setting_of
from scripts.convergence.variants import VARIANTS

Results = Mapping[str, Any]
Case = Mapping[str, Any]


def setting(data: Results | None) -> str:
    """Return the table of settings: steps, flags, machine, versions, commits and date."""
    rows = []
    if data is not None:
        last = f"{final_steps(data['steps'])} steps"
        rows = [[str(data["steps"]), last, *setting_of(data, data["commits"])]]
    return table(["steps", "final training loss: mean over the last", *SETTING], rows)


def gaps(data: Results | None) -> str:
    """Return the table of final losses and gaps to FP32."""
    head = [
        *("variant", "seeds", "final training loss", "gap to FP32", "lowest to highest seed"),
        *("validation loss", "gap to FP32", "goal", "reached"),
    ]
    compared = {} if data is None else compare(data["runs"])
    rows = []
    for name, variant in VARIANTS.items():
        goal = "-" if variant.goal is None else f"within {variant.goal:.2f} %"
        if found := compared.get(name):
            gap = found.training_gap
            ends = "-" if gap is None else f"{gap.low:+.3f} to {gap.high:+.3f} %"
            losses = [_spread(found.training, ".4f"), _spread(gap, "+.3f", " %"), ends]
            losses += [_spread(found.validation, ".4f"), _spread(found.validation_gap, "+.3f", " %")]
            rows.append([variant.title, str(len(found.seeds)), *losses, goal, found.reached])
        else:
            rows.append([variant.title, NOT_YET, *["-"] * 5, goal, "-" if variant.goal is None else NOT_YET])
    return table(head, rows)


def against_bf16(data: Results | None) -> str:
    """Return the table of gaps to FP32 with the same seed, over the standard deviation of BF16's gaps."""
    head = ["variant", "seeds", "final training loss", "gap to FP32", "over BF16's spread"]
    head += ["validation loss", "gap to FP32", "over BF16's spread"]
    compared = {} if data is None else compare(data["runs"])
    bf16 = compared.get("bf16")
    rows = []
    for name, variant in VARIANTS.items():
        if found := compared.get(name):
            row = [variant.title, str(len(found.seeds))]
            for loss, gap, unit in (
                (found.training, found.training_gap, bf16 and bf16.training_gap),
                (found.validation, found.validation_gap, bf16 and bf16.validation_gap),
            ):
                over = f"{gap.mean / unit.deviation:+.1f}" if gap and unit and unit.deviation else "-"
                row += [_spread(loss, ".4f"), _spread(gap, "+.3f", " %"), over]
            rows.append(row)
        else:
            rows.append([variant.title, NOT_YET, *["-"] * 6])
    return table(head, rows)


def _spread(spread: Spread | None, form: str, unit: str = "") -> str:
    """Format mean and standard deviation."""
    if spread is None:
        return "-"
    deviation = "" if spread.deviation is None else f" ± {format(spread.deviation, form.lstrip('+'))}"
    return f"{format(spread.mean, form)}{deviation}{unit}"


def gradients(data: Results | None) -> str:
    """Return the table of cosines to FP32's gradients by recipe and by GEMMs in FP8: means over Linears, at each
    point."""
    points = _points(data)
    steps = [point["step"] for point in points] or ["N"]
    head = [
        *("recipe", "GEMMs in FP8", *(f"step {step}" for step in steps), "lowest of any Linear"),
        *(f"all weights as one vector, step {steps[-1]}", f"gradient at the bottom, step {steps[-1]}"),
    ]
    rows = []
    for number, last in enumerate(points[-1]["cases"] if points else ()):
        cases = [point["cases"][number] for point in points]
        lowest, name, step = min(
            (_number(value), name, point["step"])
            for point, case in zip(points, cases)
            for name, value in case["weights"].items()
        )
        bottom = next(iter(last["inputs"].values()))
        rows.append(
            [
                last["recipe"],
                ", ".join(last["fp8"]) or "none",
                *(_cosine(statistics.fmean(map(_number, case["weights"].values()))) for case in cases),
                f"{_cosine(lowest)} ({name}, step {step})",
                _cosine(last["overall"]),
                _cosine(bottom),
            ]
        )
    return table(head, rows)


def layers(data: Results | None) -> str:
    """Return the table of cosines to FP32's gradients at the last point, by Linear, then by input of each block."""
    points = _points(data)
    if not points:
        return table(["gradient of", "recipe"], [])
    cases = [case for case in points[-1]["cases"] if len(case["fp8"]) != 1]
    names = [f"{case['recipe']}{_without(case)}" for case in cases]
    rows = [[f"{fqn}.weight", *(_cosine(case["weights"][fqn]) for case in cases)] for fqn in cases[0]["weights"]]
    rows += [[f"input of {fqn}", *(_cosine(case["inputs"][fqn]) for case in cases)] for fqn in cases[0]["inputs"]]
    return table([f"gradient of, step {points[-1]['step']}", *names], rows)


def _without(case: Case) -> str:
    return ", dgrad high" if case["fp8"] and "dgrad" not in case["fp8"] else ""


def _points(data: Results | None) -> Sequence[Results]:
    return [] if data is None or data.get("gradients") is None else data["gradients"]["points"]


def _number(value: float | str) -> float:
    """Read a number of the results file. NaN, stored as text, counts as -Inf, so that a minimum finds it."""
    return -math.inf if isinstance(value, str) or math.isnan(value) else value


def _cosine(value: float | str) -> str:
    return f"{number:.5f}" if math.isfinite(number := _number(value)) else "NaN"


CONVERGENCE_TABLES = MappingProxyType(
    {
        "convergence": gaps,
        "convergence-setting": setting,
        "gradients": gradients,
        "gradient-layers": layers,
    }
)

MIXTURE_TABLES = MappingProxyType({"mixture": against_bf16, "mixture-setting": setting})
"""Of the published results of mixtures."""
