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
from pathlib import Path
from types import MappingProxyType
from typing import Any

from scripts import results_files
from scripts.benchmarks.markdown import NOT_YET, table

SCHEMA = 1
NAME = "accumulation"
_TOP = {
    **{"date": str, "commit": str, "machine": str, "seed": int},
    **{"versions": dict, "flags": list, "emulation": dict, "products": list, "points": list},
}

Results = Mapping[str, Any]


def load(root: Path = results_files.ROOT) -> dict[str, Any] | None:
    """Return the published results; None if there are none.

    Raises:
        ValueError: the file is not a results file. The message says why.
    """
    return results_files.load(NAME, root, _problems_of)


def _problems_of(data: Any) -> list[str]:
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        return [f"not results of schema {SCHEMA}"]
    return results_files.mistyped(data, _TOP)


def setting(data: Results | None) -> str:
    """Return the table of settings: what is emulated, flags, machine, versions, commit and date."""
    head = ["bits of a sum", "float32 after", "flags", "machine", "versions", "commit", "date"]
    if data is None:
        return table(head, [[NOT_YET, *["-"] * (len(head) - 1)]])
    emulation, commit = data["emulation"], data["commit"]
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items() if version)
    bits, every = f"{emulation['fraction_bits'] + 1}", f"{emulation['promoted_every']} elements"
    text = commit[:10] + (" and changes" if commit.endswith("+") else "")
    flags = f"`{' '.join(data['flags'])}`"
    return table(head, [[bits, every, flags, data["machine"], versions, text, data["date"][:10]]])


def products(data: Results | None) -> str:
    """Return the table of relative errors of single products, by data, formats and k."""
    head = ["data", "formats", "k", "error of the cast", "slow accumulation", "fast accumulation"]
    if data is None:
        return table(head, [[NOT_YET, *["-"] * (len(head) - 1)]])
    rows = [
        [row["data"], row["formats"], str(row["k"]), *(_percent(row[name]) for name in ("cast", "slow", "fast"))]
        for row in data["products"]
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
    return table(head, sorted(rows, key=lambda row: row[0]) or [[NOT_YET, *["-"] * (len(head) - 1)]])


def gradients(data: Results | None) -> str:
    """Return the table of cosines between gradients and those of FP32, at each point."""
    points: Sequence[Results] = [] if data is None else data["points"]
    head = ["recipe", "fast accumulation in"]
    for point in points:
        place = f"step {point['step']}, {point['tokens']} tokens"
        head += [f"all weights as one vector, {place}", f"gradient at the bottom, {place}"]
    if not points:
        return table([*head, "cosine to FP32"], [[NOT_YET, "-", "-"]])
    rows = []
    for cases in zip(*(point["cases"] for point in points), strict=True):
        row = [cases[0]["recipe"], _named(cases[0]["fast"])]
        for case in cases:
            row += [f"{case['overall']:.5f}", f"{case['bottom']:.5f}"]
        rows.append(row)
    return table(head, rows)


def _named(fast: Sequence[str] | None) -> str:
    if fast is None:
        return "none, and all sums in float32"
    return ", ".join(fast) or "none"


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
