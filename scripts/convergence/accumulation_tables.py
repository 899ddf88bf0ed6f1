"""Results of fast_accumulation.py: the file, and its tables.

::

    {"schema": 1, "date", "commit", "machine", "versions": {"torch", …}, "flags": ["--width", "128"], "seed": 0,
     "emulation": {"fraction_bits", "step", "promoted_every"},
     "products": [{"data", "formats", "k", "cast", "slow", "fast"}],
     "points": [{"step", "tokens",
                 "gemms": [{"recipe", "gemm", "lowest_k", "highest_k", "slow": {"mean", "highest"}, "fast": …}],
                 "cases": [{"recipe", "fast": ["fprop", …] or null, "overall", "lowest", "bottom"}]}]}

Errors are relative; mean and highest are over the Linears. The others are cosines. ``fast`` of a case is null where
sums are in float32 and nothing is emulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from scripts.benchmarks.markdown import table
from scripts.convergence.results import SETTING, setting_of

NAME = "accumulation"
Results = Mapping[str, Any]


def setting(data: Results | None) -> str:
    """Return the table of settings: what is emulated, flags, machine, versions, commit and date."""
    rows = []
    if data is not None:
        bits, every = data["emulation"]["fraction_bits"] + 1, f"{data['emulation']['promoted_every']} elements"
        rows = [[str(bits), every, *setting_of(data, [data["commit"]])]]
    return table(["bits of a sum", "float32 after", *SETTING], rows)


def products(data: Results | None) -> str:
    """Return the table of relative errors of single products, by data, formats and k."""
    head = ["data", "formats", "k", "error of the cast", "slow accumulation", "fast accumulation"]
    rows = [
        [row["data"], row["formats"], str(row["k"]), *(_percent(row[name]) for name in ("cast", "slow", "fast"))]
        for row in (data or {"products": ()})["products"]
    ]
    return table(head, rows)


def gemms(data: Results | None) -> str:
    """Return the table of relative errors of the job's products, by recipe and GEMM, at each point."""
    points: Sequence[Results] = [] if data is None else data["points"]
    head = ["recipe", "GEMM", "step", "tokens", "k", "slow accumulation", "fast accumulation", "highest of any Linear"]
    rows = []
    for point in points:
        for row in point["gemms"]:
            lengths = " to ".join(map(str, sorted({row["lowest_k"], row["highest_k"]})))
            errors = [row["slow"]["mean"], row["fast"]["mean"], row["fast"]["highest"]]
            place = [str(point["step"]), str(point["tokens"]), lengths]
            rows.append([row["recipe"], row["gemm"], *place, *map(_percent, errors)])
    return table(head, sorted(rows, key=lambda row: row[0]))


def gradients(data: Results | None) -> str:
    """Return the table of cosines between gradients and those of FP32, at each point."""
    points: Sequence[Results] = [] if data is None else data["points"]
    head = ["recipe", "fast accumulation in"]
    for point in points:
        place = f"step {point['step']}, {point['tokens']} tokens"
        head += [f"all weights as one vector, {place}", f"gradient at the bottom, {place}"]
    rows = []
    for cases in zip(*(point["cases"] for point in points), strict=True):
        fast = cases[0]["fast"]
        row = [cases[0]["recipe"], "none, and all sums in float32" if fast is None else ", ".join(fast) or "none"]
        for case in cases:
            row += [f"{case['overall']:.5f}", f"{case['bottom']:.5f}"]
        rows.append(row)
    return table(head, rows)


def _percent(share: float) -> str:
    """Format a share in percent, with two digits that count."""
    return f"{float(f'{100 * share:.2g}'):.10g} %"


ACCUMULATION_TABLES = MappingProxyType(
    {
        "accumulation": gradients,
        "accumulation-gemms": gemms,
        "accumulation-products": products,
        "accumulation-setting": setting,
    }
)
