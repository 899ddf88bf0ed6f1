"""Tables of GPU measurements, made from kernels/results/*.json only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fp8dist_kernels import GEMMS
from scripts.benchmarks.gpu import results
from scripts.benchmarks.markdown import NOT_YET
from scripts.benchmarks.markdown import table as _table

Results = Mapping[str, Any]


class Goal(NamedTuple):
    """A line of the table of goals. ``least``: the ratio to reach; None: measured for information only.

    ``figure``: the name of the part's figure, whose geometric mean is judged.
    """

    what: str
    against: str
    least: float | None
    part: str
    figure: str


_SCALED_MM, _COPY, _READ = "`torch._scaled_mm`", "copy of as many bytes", "read of as many bytes"
_BF16 = "bf16 `nn.Linear`"
GOALS = (
    Goal('GEMM, "auto", tensorwise, as FP8Linear runs it', _SCALED_MM, 1.0, "matmul_tensorwise", "auto"),
    Goal("the same, row-wise", _SCALED_MM, 1.0, "matmul_rowwise", "auto"),
    Goal("the same, block-scaled", _SCALED_MM, 1.0, "matmul_blockwise", "auto"),
    Goal("GEMM, Triton, tensorwise", _SCALED_MM, None, "matmul_tensorwise", "triton"),
    Goal("cast + transpose + amax", _COPY, 0.92, "memory", "cast_transpose_amax"),
    Goal("cast only", _COPY, 0.92, "memory", "cast"),
    Goal("amax only", _READ, 0.95, "memory", "amax"),
    Goal("digest", _READ, 0.95, "memory", "digest"),
    Goal("commit, 1000 slots, history 1024", "launch of the smallest op", 1.0, "update", "commit_1000"),
    Goal("FP8Linear forward + backward, 8B, delayed", _BF16, 1.5, "linears", "delayed: fp8dist"),
    Goal("the same, fast accumulation everywhere", _BF16, 1.75, "linears", "delayed: fp8dist, fast"),
    Goal("FP8Linear, current scaling", "torchao tensorwise, compiled", 1.0, "torchao", "tensorwise"),
    Goal("FP8Linear, row-wise", "torchao row-wise, compiled", 1.0, "torchao", "rowwise"),
)


def verdict(ratio: Sequence[float], least: float) -> str:
    """Judge a ratio and its interval."""
    _, low, high = ratio
    return "reached" if low >= least else "missed" if high < least else "undecided"


def goals(measured: Sequence[Results]) -> str:
    """Return the table of goals and results, with a column for each device."""
    names = [data["device"]["name"] for data in measured] or ["measured"]
    rows = []
    for goal in GOALS:
        figures = [_reached(goal, data) for data in measured] or [NOT_YET]
        rows.append([goal.what, goal.against, "-" if goal.least is None else f"{goal.least:.2f}", *figures])
    return _table(["what", "against", "goal", *names], rows)


def machines(measured: Sequence[Results]) -> str:
    """Return the table of devices, versions, dates and test counts."""
    rows = [_machine(data) for data in measured] or [["none", *[NOT_YET] * 5]]
    return _table(["device", "driver", "versions", "commit", "date", "tests on it"], rows)


def matmuls(measured: Sequence[Results]) -> str:
    """Return the table of products by kind and side: torch's time over ours."""
    head = ["device", "scaling", "side", "shapes", "geometric mean", *GEMMS, "lowest", "against bf16"]
    rows = []
    for data in measured:
        for kind in ("tensorwise", "rowwise", "blockwise"):
            figures = data["parts"].get(f"matmul_{kind}", {"figures": {}})["figures"]
            for side, found in figures.items():
                if side == "refused_by_torch":
                    continue
                ratios = [_ratio(found.get(key)) for key in ("geomean", *GEMMS)]
                lowest = f"{found['lowest']:.2f} ({found['lowest_case']})"
                about = [data["device"]["name"], kind, side, str(found["shapes"])]
                rows.append([*about, *ratios, lowest, _ratio(found.get("bf16"))])
    return _table(head, rows or [["-", NOT_YET, *["-"] * 8]])


def sustained(measured: Sequence[Results]) -> str:
    """Return the table of long runs: cold, and after half a minute."""
    head = ["device", "product", "s", "TFLOP/s, cold", "sustained", "bf16 / ours, cold", "sustained"]
    rows = []
    for data, case in _cases(measured, "sustained"):
        speeds = [f"{case['tflops'][state]:.0f}" for state in ("cold", "sustained")]
        ratios = [_ratio(case.get("ratios", {}).get(state)) for state in ("cold", "sustained")]
        rows.append([data["device"]["name"], case["name"], f"{case['seconds']:.0f}", *speeds, *ratios])
    return _table(head, rows or [["-", NOT_YET, *["-"] * 5]])


def memory(measured: Sequence[Results]) -> str:
    """Return the table of memory-bound kernels, at each size."""
    head = ["device", "kernel", "bf16 tensors", "µs", "GB/s", "reference", "reference's time / ours"]
    rows = []
    for data, case in _cases(measured, "memory"):
        rows.append(
            [
                data["device"]["name"],
                case["kernel"].replace("_", " + "),
                f"{case['tensors']} of {case['rows']} x {case['columns']}",
                f"{case['timings']['fp8dist']['median_us']:.1f}",
                f"{case['gb_per_s']['fp8dist']:.0f}",
                f"{case['reference']}, {case['gb_per_s'][case['reference']]:.0f} GB/s",
                _ratio(case["ratios"]["fp8dist"]),
            ]
        )
    return _table(head, rows or [["-", NOT_YET, *["-"] * 5]])


def updates(measured: Sequence[Results]) -> str:
    """Return the table of launch and commit, with their data in the cache (warm: many in a row) or not (cold)."""
    head = ["device", "update", "slots", "history", "µs in a CUDA graph", "µs launched one by one"]
    rows = []
    for data, case in _cases(measured, "update"):
        ways = ({"graph": "warm", "graph_cold": "cold"}, {"eager": "warm", "smallest op": "the smallest op"})
        texts = [_warm_and_cold(case["timings"], states) for states in ways]
        rows.append([data["device"]["name"], case["update"], f"{case['slots']:,}", str(case["history"]), *texts])
    return _table(head, rows or [["-", NOT_YET, *["-"] * 4]])


def _warm_and_cold(timings: Results, states: Mapping[str, str]) -> str:
    texts = [f"{timings[way]['median_us']:.1f} {state}" for way, state in states.items() if way in timings]
    return ", ".join(texts) or "-"


def linears(measured: Sequence[Results]) -> str:
    """Return the table of forward and backward of Linears."""
    sides = {"by default": "fp8dist", "fast everywhere": "fp8dist, fast", "eager": "fp8dist, eager"}
    sides["weight's cast reused"] = "fp8dist, weight reused"
    return _both_ways(measured, "linears", "FP8Linear", sides)


def experts(measured: Sequence[Results]) -> str:
    """Return the table of forward and backward of the experts of mixtures."""
    sides = {"by default": "fp8dist", "only our kernels": "fp8dist, triton", "eager": "fp8dist, eager"}
    return _both_ways(measured, "experts", "FP8Experts", sides)


def _both_ways(measured: Sequence[Results], part: str, module: str, sides: Mapping[str, str]) -> str:
    """Return the table of a part. ``sides``: what the table calls a side of the measurement."""
    head = ["device", "layer", f"{module}, ms", "bf16, ms", *(f"bf16 / ours, {name}" for name in sides)]
    rows = []
    for data, case in _cases(measured, part):
        times = [f"{case['timings'][side]['median_us'] / 1e3:.2f}" for side in ("fp8dist", "bf16")]
        ratios = [_ratio(case["ratios"].get(side)) for side in sides.values()]
        rows.append([data["device"]["name"], case["name"], *times, *ratios])
    return _table(head, rows or [["-", NOT_YET, *["-"] * (len(head) - 2)]])


def crossover(measured: Sequence[Results]) -> str:
    """Return the table of the numbers of tokens from which on FP8 is faster."""
    rows = []
    for data, case in _cases(measured, "crossover"):
        tried = ", ".join(f"{tokens}: {_ratio(ratio)}" for tokens, ratio in case["ratios"].items())
        rows.append([data["device"]["name"], case["name"], str(case["crossover"] or "never"), tried])
    return _table(["device", "layer", "tokens", "bf16 / ours by tokens"], rows or [["-", NOT_YET, "-", "-"]])


def jobs(measured: Sequence[Results]) -> str:
    """Return the table of training steps, end to end."""
    head = ["device", "recipe", "mode", "tokens/s", "against bf16", "peak memory, GiB", "exposed sync, µs per step"]
    rows = []
    for data, case in _cases(measured, "job"):
        figures, sync = data["parts"]["job"]["figures"], case["timings"].get("sync")
        rows.append(
            [
                data["device"]["name"],
                case["recipe"],
                case["mode"],
                f"{case['tokens_per_s']:,.0f}",
                _ratio(figures.get(case["name"])),
                f"{case['peak_bytes'] / 2**30:.1f}",
                f"{sync['median_us']:.0f}" if sync else "-",
            ]
        )
    return _table(head, rows or [["-", NOT_YET, *["-"] * 5]])


TABLES = MappingProxyType(
    {
        "goals": goals,
        "machines": machines,
        "matmuls": matmuls,
        "sustained": sustained,
        "memory": memory,
        "updates": updates,
        "linears": linears,
        "experts": experts,
        "crossover": crossover,
        "jobs": jobs,
    }
)


def _reached(goal: Goal, data: Results) -> str:
    part = data["parts"].get(goal.part)
    if part is None:
        return NOT_YET
    figure = part["figures"].get(goal.figure)
    if figure is None:
        return _why_not(part)
    text = _ratio(figure["geomean"])
    if goal.least is not None:
        text = f"{verdict(figure['geomean'], goal.least)}: {text}"
    if figure["shapes"] > 1:
        text = f"{text}; lowest {figure['lowest']:.2f}: {figure['lowest_case']}"
    if part["status"] != "done":
        text = f"{text}; {part['problem']}"
    return text if part["commit"] == data["commit"] else f"{text} (commit {_commit(part)})"


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


def _cases(measured: Sequence[Results], name: str) -> list[tuple[Results, Results]]:
    parts = [(data, data["parts"][name]) for data in measured if name in data["parts"]]
    return [(data, case) for data, part in parts for case in part["cases"] if case.get("timings")]


def _ratio(ratio: Sequence[float] | None) -> str:
    return "-" if ratio is None else "{:.2f} ({:.2f} to {:.2f})".format(*ratio)


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
