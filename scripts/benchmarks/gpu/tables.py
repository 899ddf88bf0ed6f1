"""Tables of GPU measurements, made from kernels/results/*.json only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from scripts.benchmarks.gpu import results
from scripts.benchmarks.markdown import NOT_YET
from scripts.benchmarks.markdown import table as _table

__all__ = ["GOALS", "TABLES", "goals", "machines", "summary"]

Results = Mapping[str, Any]


class Goal(NamedTuple):
    """A line of the table of goals. ``figure``: the name of the part's figure; "": the part's overall figures."""

    what: str
    against: str
    must: str
    aim: str
    part: str
    figure: str


_SCALED_MM, _COPY = "`torch._scaled_mm`", "device copy of as many bytes"
GOALS = (
    Goal("GEMM, tensorwise, fast accumulation", _SCALED_MM, "0.95", "1.00, none below 0.93", "matmul_tensorwise", ""),
    Goal("GEMM, row-wise", _SCALED_MM, "0.92", "1.00", "matmul_rowwise", ""),
    Goal("GEMM, block-scaled", _SCALED_MM, "0.85", "1.00", "matmul_blockwise", ""),
    Goal("the same, 1 x 128 by 1 x 128, wgrad", _SCALED_MM, "-", "1.00", "matmul_blockwise_1d", ""),
    Goal("cast + transpose + amax", _COPY, "0.80", "0.92", "memory", "cast_transpose_amax"),
    Goal("amax only", _COPY, "0.90", "0.97", "memory", "amax"),
    Goal("cast only", _COPY, "0.90", "0.97", "memory", "cast"),
    Goal("digest", _COPY, "0.90", "0.97", "memory", "digest"),
    Goal("commit, 1000 slots, history 1024", "-", "20 µs", "launch-bound", "update", "commit_1000"),
    Goal("launch, 1000 slots", "-", "-", "-", "update", "launch_1000"),
    Goal("FP8Linear forward + backward with casts, Llama 3 8B", "bf16 `nn.Linear`", "1.5", "1.7", "linears", ""),
    Goal("the same", "torchao tensorwise", "-", "above 1", "torchao", "tensorwise"),
    Goal("the same", "torchao row-wise", "-", "above 1", "torchao", "rowwise"),
)


def goals(measured: Sequence[Results]) -> str:
    """Return the table of goals and results, with a column for each device."""
    names = [data["device"]["name"] for data in measured] or ["measured"]
    rows = []
    for goal in GOALS:
        figures = [_reached(goal, data) for data in measured] or [NOT_YET]
        rows.append([goal.what, goal.against, goal.must, goal.aim, *figures])
    return _table(["what", "against", "must reach", "aim", *names], rows)


def machines(measured: Sequence[Results]) -> str:
    """Return the table of devices, versions, dates and test counts."""
    rows = [_machine(data) for data in measured] or [["none", *[NOT_YET] * 5]]
    return _table(["device", "driver", "versions", "commit", "date", "tests on it"], rows)


def matmuls(measured: Sequence[Results]) -> str:
    """Return the table of products by recipe: torch's time over ours."""
    head = ["device", "scaling", "shapes", "geometric mean", "fprop", "dgrad", "wgrad", "lowest", "TFLOP/s, highest"]
    rows = []
    for data in measured:
        for kind in ("tensorwise", "rowwise", "blockwise", "blockwise_1d"):
            part = data["parts"].get(f"matmul_{kind}")
            if part is None:
                continue
            figures = part["figures"]
            means = [_number(figures.get(key)) for key in ("geomean", "fprop", "dgrad", "wgrad")]
            lowest = f"{figures['lowest']:.2f} ({figures['lowest_case']})" if "lowest" in figures else "-"
            best = max((case["tflops"]["fp8dist"] for case in part["cases"] if "tflops" in case), default=None)
            counts = str(figures.get("shapes", 0))
            rows.append([data["device"]["name"], kind, counts, *means, lowest, "-" if best is None else f"{best:.0f}"])
    return _table(head, rows or [["-", NOT_YET, *["-"] * 7]])


def memory(measured: Sequence[Results]) -> str:
    """Return the table of memory-bound kernels, at each size."""
    head = ["device", "kernel", "bf16 tensors", "µs", "GB/s", "of a copy of as many bytes", "of the fastest copy"]
    rows = []
    for data, case, figures in _cases(measured, "memory"):
        speed = case["gb_per_s"]["fp8dist"]
        rows.append(
            [
                data["device"]["name"],
                case["kernel"].replace("_", " + "),
                f"{case['tensors']} of {case['rows']} x {case['columns']}",
                f"{case['timings']['fp8dist']['median_us']:.1f}",
                f"{speed:.0f}",
                _number(case["ratio"]),
                _number(speed / figures["copy_gb_per_s"] if "copy_gb_per_s" in figures else None),
            ]
        )
    return _table(head, rows or [["-", NOT_YET, *["-"] * 5]])


def updates(measured: Sequence[Results]) -> str:
    """Return the table of launch and commit, with their data in the cache (warm: many in a row) or not (cold)."""
    head = ["device", "update", "slots", "history", "µs in a CUDA graph", "µs launched one by one"]
    rows = []
    for data, case, _ in _cases(measured, "update"):
        ways = ({"graph": "warm", "graph_cold": "cold"}, {"eager": "warm"})
        texts = [_warm_and_cold(case["timings"], states) for states in ways]
        rows.append([data["device"]["name"], case["update"], f"{case['slots']:,}", str(case["history"]), *texts])
    return _table(head, rows or [["-", NOT_YET, *["-"] * 4]])


def _warm_and_cold(timings: Results, states: Mapping[str, str]) -> str:
    texts = [f"{timings[way]['median_us']:.1f} {state}" for way, state in states.items() if way in timings]
    return ", ".join(texts) or "-"


def linears(measured: Sequence[Results]) -> str:
    """Return the table of forward and backward of Linears."""
    head = ["device", "layer", "FP8Linear, ms", "bf16, ms", "times as fast", "the same, by the host's clock"]
    rows = []
    for data, case, _ in _cases(measured, "linears"):
        times = [f"{case['timings'][side]['median_us'] / 1e3:.2f}" for side in ("fp8dist", "bf16")]
        ratios = [_number(case["ratio"]), _number(case["eager_ratio"])]
        rows.append([data["device"]["name"], case["name"], *times, *ratios])
    return _table(head, rows or [["-", NOT_YET, *["-"] * 4]])


TABLES = MappingProxyType(
    {
        "goals": goals,
        "machines": machines,
        "matmuls": matmuls,
        "memory": memory,
        "updates": updates,
        "linears": linears,
    }
)


def _reached(goal: Goal, data: Results) -> str:
    part = data["parts"].get(goal.part)
    if part is None:
        return NOT_YET
    text = _figure(goal, part["figures"])
    if text is None:
        return _why_not(part)
    if part["status"] != "done":
        text = f"{text}; {part['problem']}"
    return text if part["commit"] == data["commit"] else f"{text} (commit {_commit(part)})"


def _figure(goal: Goal, figures: Results) -> str | None:
    if goal.part == "update":
        ways = {"graph": "in a CUDA graph, warm", "graph_cold": "cold", "eager": "launched one by one, warm"}
        keys = {f"{goal.figure}_{way}_us": text for way, text in ways.items()}
        return "; ".join(f"{figures[key]:.1f} µs {text}" for key, text in keys.items() if key in figures) or None
    if goal.figure:
        figures = figures.get(goal.figure, {})
    if "geomean" not in figures:
        return None
    return f"{figures['geomean']:.2f} (lowest {figures['lowest']:.2f}: {figures['lowest_case']})"


def _commit(of: Results) -> str:
    return f"{of['commit'][:10]}{' and changes' if of['dirty'] else ''}" if of["commit"] else "not known"


def _why_not(part: Results) -> str:
    reason = part["problem"] or part["figures"].get("refused_by_torch")
    return f"no figure: {reason}" if reason else NOT_YET


def _machine(data: Results) -> list[str]:
    device, versions, tests = data["device"], data["versions"], data["tests"]
    names = (("Python", "python"), ("torch", "torch"), ("Triton", "triton"), ("torchao", "torchao"))
    return [
        device["name"],
        str(device["driver"] or "-"),
        ", ".join(f"{name} {versions[key]}" for name, key in names if versions.get(key)),
        _commit(data),
        data["date"][:10],
        _tests(tests) if tests else NOT_YET,
    ]


def _tests(tests: Results) -> str:
    counts = f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped"
    cut_off = "; cut off, not all were run" if tests["cut_off"] else ""
    return f"{counts}{cut_off} (commit {_commit(tests)})"


def _cases(measured: Sequence[Results], name: str) -> list[tuple[Results, Results, Results]]:
    parts = [(data, data["parts"][name]) for data in measured if name in data["parts"]]
    return [(data, case, part["figures"]) for data, part in parts for case in part["cases"] if case.get("timings")]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def summary(folder: Path) -> str:
    """Return goals and devices of the results in a folder, formatted for a terminal."""
    found = [results.earlier(path) for path in sorted(folder.glob("*.json"))]
    measured = [data for data in found if data is not None]
    smoke = "figures of smoke runs mean nothing\n" if any(data["smoke"] for data in measured) else ""
    return f"{smoke}{_aligned(goals(measured))}\n{_aligned(machines(measured))}"


def _aligned(markdown: str) -> str:
    """Align a Markdown table for a terminal."""
    lines = [line.strip("| \n").split(" | ") for line in markdown.splitlines()]
    lines = [[cell[:60] for cell in line] for line in lines if set(line[0]) != {"-"}]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)
