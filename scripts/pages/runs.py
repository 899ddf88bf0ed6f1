"""Tested versions of Python, torch and trainers, tested hardware, and exported models, from the results files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.benchmarks.markdown import table
from scripts.convergence.comparison import compare

Results = Mapping[str, Any]

HEADER_BYTES = 32
"""Of the message of a sync, for which docs/design/protocol.md has the layout."""

SLOTS = 3
"""Of a Linear: input, weight and gradient."""


def versions(rows: Sequence[Results]) -> str:
    """Return a table of the passed tests for each pair of Python and torch."""
    pythons = sorted({row["python"] for row in rows}, key=_number)
    torches = sorted({_release(row["torch"]) for row in rows}, key=_number)
    cells = {(row["python"], _release(row["torch"])): _outcome(row) for row in rows}
    head = ["Python", *(f"torch {torch}" for torch in torches)]
    return table(head, [[python, *(cells.get((python, torch), "-") for torch in torches)] for python in pythons])


def stacks(rows: Sequence[Results]) -> str:
    """Return a table of the passed tests with each trainer. ``rows``: the results of ``scripts/test-stacks``."""
    known = ("stack", "python", "torch", "passed", "failed", "date")
    lines = []
    for row in rows:
        packages = ", ".join(f"{name} {version}" for name, version in row.items() if name not in known)
        lines.append([packages, _release(row["torch"]), row["python"], _outcome(row)])
    return table(["packages", "torch", "Python", "tests"], lines)


def hardware(measured: Sequence[Results], convergence: Results | None, rows: Sequence[Results]) -> str:
    """Return a Markdown list of tests and benchmarks by hardware.

    Args:
        measured: the results of GPUs.
        convergence: the results of ``scripts/convergence``, or None.
        rows: the results of ``scripts/test-versions``.
    """
    lines = [f"- **GPU:** {_gpu(data)}" for data in measured] or [
        "- **GPU: nothing has run on a GPU or with NCCL yet,** and no speed is known. Tests run the kernels",
        "  in Triton's interpreter, and compile them for Hopper and Blackwell.",
    ]
    cpu = "- **CPU:** all tests, with gloo"
    if convergence is not None:
        cpu += f"; losses were compared with FP32 over {convergence['steps']} steps\n  ({convergence['machine']})"
    lines.append(f"{cpu}.")
    if rows:
        pythons = _range([row["python"] for row in rows])
        torches = _range([row["torch"] for row in rows])
        lines.append(f"- **Versions:** Python {pythons} and torch {torches}, tested in {len(rows)} combinations.")
    return "\n".join(lines) + "\n"


def front(
    numbers: Results | None, convergence: Results | None, measured: Sequence[Results], bugs: str = "not counted yet"
) -> str:
    """Return README's table of numbers, each with the command that makes it.

    Args:
        numbers: the results of ``scripts.front``, or None.
        convergence: the results of ``scripts/convergence``, or None.
        measured: the results of GPUs.
        bugs: how many of the public silent bugs are found.
    """
    rows = [["public silent bugs found", bugs, "`scripts/silent-bugs`"]]
    if numbers is not None:
        linear = (numbers["bytes_per_sync"] - HEADER_BYTES) / numbers["slots"] * SLOTS
        syncs = (
            f"{numbers['collectives_per_step']:g} all-reduce: {HEADER_BYTES} bytes, and {linear:g} for each FP8 Linear"
        )
        gathered = [f"{numbers[name] / 1e6:.2f} MB" for name in ("gathered_fp8", "gathered_bf16")]
        rows.append(["communication per step for FP8 state, `DelayedScaling`", syncs, "`python -m scripts.front`"])
        what = "gathered per step by FSDP2 in the [example job](docs/example-job.md), 2 ranks"
        rows.append(
            [what, f"{gathered[0]} with the FP8 all-gather, {gathered[1]} in bf16", "`python -m scripts.front`"]
        )
    if convergence is not None:
        found = compare(convergence["runs"])
        gaps = {name: found[name].training_gap for name in ("delayed", "bf16") if name in found}
        texts = [f"{name}: {gap.mean:+.3f} ± {gap.deviation or 0:.3f} %" for name, gap in gaps.items() if gap]
        what = f"final training loss against FP32: small GPT, {convergence['steps']} steps, on a CPU"
        what += " (negative: lower; ±: deviation over seeds)"
        rows.append([what, ", ".join(texts), "`scripts/convergence/run --layers 3 --width 128`"])
    gpu = "; ".join(_gpu(data) for data in measured) or "nothing has run on one yet"
    return table(["what", "measured", "made by"], [*rows, ["on a GPU", gpu, "`scripts/gpu check`"]])


def serving(results: Results | None) -> str:
    """Return the table about exported models on held-out text."""
    head = ["recipe", "perplexity in eval()", "exported", "KL", "quantised again", "KL", "weights that differ"]
    lines = []
    for row in (results or {"rows": ()})["rows"]:
        cells = [f"`{row['recipe']}`", f"{math.exp(row['loss']):.5f}"]
        for name in ("exported", "again"):
            cells += [f"{math.exp(row[name]['loss']):.5f}", f"{max(0.0, row[name]['divergence']):.1e}"]
        lines.append([*cells, f"{row['changed']:.1%}"])
    return table(head, lines)


def _gpu(data: Results) -> str:
    tests, name = data["tests"], data["device"]["name"]
    said = f"{tests['passed']} tests passed, {tests['failed']} failed" if tests else "no test has run"
    done = sum(part["status"] == "done" for part in data["parts"].values())
    return f"{name}: {said}; {done} of {len(data['parts'])} benchmarks are complete ({data['date'][:10]})."


def _outcome(row: Results) -> str:
    failed = f", {row['failed']} failed" if row["failed"] else ""
    return f"{row['passed']} passed{failed}, {row['date']}"


def _release(version: str) -> str:
    return version.split("+")[0]


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def _range(found: Sequence[str]) -> str:
    """Return "lowest to highest" as major.minor versions."""
    minors = sorted({_number(_release(version))[:2] for version in found})
    ends = dict.fromkeys((minors[0], minors[-1]))
    return " to ".join(".".join(map(str, minor)) for minor in ends)
