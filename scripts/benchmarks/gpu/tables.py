"""Tables of GPU measurements, made from kernels/results/*.json only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fp8dist_kernels import GEMMS
from scripts.benchmarks.gpu import results
from scripts.benchmarks.markdown import NOT_YET
from scripts.benchmarks.markdown import table as _table

Results = Mapping[str, Any]


class Goal(NamedTuple):
    """A line of the table of goals.

    Attributes:
        what: the operation that is measured, as the table names it.
        against: the operation with whose time it is compared.
        least: the ratio to reach; None: measured for information only.
        part, figure: names of the part and of its figure, whose geometric mean is judged.
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
    Goal("the same, MX, on Blackwell", _SCALED_MM, 1.0, "matmul_mx", "auto"),
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
    """Return "reached" or "missed" if the whole interval of a ratio [median, low, high] is on one side of ``least``,
    else "undecided"."""
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
    names = (("Python", "python"), ("torch", "torch"), ("Triton", "triton"), ("torchao", "torchao"))
    rows = []
    for data in measured:
        device, versions, tests = data["device"], data["versions"], data["tests"]
        said = ", ".join(f"{name} {versions[key]}" for name, key in names if versions.get(key))
        row = [device["name"], str(device["driver"] or "-"), said, _commit(data), data["date"][:10]]
        rows.append([*row, _tests(tests) if tests else NOT_YET])
    return _table(["device", "driver", "versions", "commit", "date", "tests on it"], rows)


def matmuls(measured: Sequence[Results]) -> str:
    """Return the table of products by kind and backend: torch's time over that of fp8dist."""
    head = ["device", "scaling", "side", "shapes", "geometric mean", *GEMMS, "lowest", "against bf16"]
    rows = []
    for data in measured:
        for kind in ("tensorwise", "rowwise", "blockwise", "mx"):
            figures = data["parts"].get(f"matmul_{kind}", {"figures": {}})["figures"]
            for side, found in figures.items():
                if side == "refused_by_torch":
                    continue
                ratios = [_ratio(found.get(key)) for key in ("geomean", *GEMMS)]
                lowest = f"{found['lowest']:.2f} ({found['lowest_case']})"
                about = [data["device"]["name"], kind, side, str(found["shapes"])]
                rows.append([*about, *ratios, lowest, _ratio(found.get("bf16"))])
    return _table(head, rows)


Table = Callable[[Sequence[Results]], str]
"""Makes a table of the results of devices."""


def _listed(part: str, head: Sequence[str], row: Callable[[Results, Results], list[str]]) -> Table:
    """Return a table with a row for each case of a part.

    ``row``: a function of a case and the figures of its part that returns the cells after the name of the device.
    """

    def made(measured: Sequence[Results]) -> str:
        rows = []
        for data in measured:
            found = data["parts"].get(part, {"cases": (), "figures": {}})
            cases = [case for case in found["cases"] if case.get("timings")]
            rows += [[data["device"]["name"], *row(case, found["figures"])] for case in cases]
        return _table(["device", *head], rows)

    return made


def _sustained(case: Results, _: Results) -> list[str]:
    states, ratios = ("cold", "sustained"), case.get("ratios", {})
    speeds = (f"{case['tflops'][state]:.0f}" for state in states)
    return [case["name"], f"{case['seconds']:.0f}", *speeds, *(_ratio(ratios.get(state)) for state in states)]


def _memory(case: Results, _: Results) -> list[str]:
    reference, speeds = case["reference"], case["gb_per_s"]
    return [
        case["kernel"].replace("_", " + "),
        f"{case['tensors']} of {case['rows']} x {case['columns']}",
        f"{case['timings']['fp8dist']['median_us']:.1f}",
        f"{speeds['fp8dist']:.0f}",
        f"{reference}, {speeds[reference]:.0f} GB/s",
        _ratio(case["ratios"]["fp8dist"]),
    ]


def _update(case: Results, _: Results) -> list[str]:
    """Return a row of the table of updates. "warm": timed many in a row, so that their data are in the cache."""
    ways = ({"graph": "warm", "graph_cold": "cold"}, {"eager": "warm", "smallest op": "the smallest op"})
    times = {way: timing["median_us"] for way, timing in case["timings"].items()}
    texts = (", ".join(f"{times[way]:.1f} {text}" for way, text in states.items() if way in times) for states in ways)
    return [case["update"], f"{case['slots']:,}", str(case["history"]), *(text or "-" for text in texts)]


def _both_ways(part: str, module: str, sides: Mapping[str, str]) -> Table:
    """Return the table of forward and backward. ``sides``: {heading of a column: name of the ratio in the results}."""

    def row(case: Results, _: Results) -> list[str]:
        times = (f"{case['timings'][side]['median_us'] / 1e3:.2f}" for side in ("fp8dist", "bf16"))
        return [case["name"], *times, *(_ratio(case["ratios"].get(side)) for side in sides.values())]

    return _listed(part, ["layer", f"{module}, ms", "bf16, ms", *(f"bf16 / ours, {name}" for name in sides)], row)


def _crossover(case: Results, _: Results) -> list[str]:
    tried = ", ".join(f"{tokens}: {_ratio(ratio)}" for tokens, ratio in case["ratios"].items())
    return [case["name"], str(case["crossover"] or "never"), tried]


def _job(case: Results, figures: Results) -> list[str]:
    sync = case["timings"].get("sync")
    return [
        case["recipe"],
        case["mode"],
        f"{case['tokens_per_s']:,.0f}",
        _ratio(figures.get(case["name"])),
        f"{case['peak_bytes'] / 2**30:.1f}",
        f"{sync['median_us']:.0f}" if sync else "-",
    ]


_SPEEDS = ["TFLOP/s, cold", "sustained", "bf16 / ours, cold", "sustained"]
_UPDATES = ["update", "slots", "history", "µs in a CUDA graph", "µs launched one by one"]
_MEMORY = ["kernel", "bf16 tensors", "µs", "GB/s", "reference", "reference's time / ours"]
_JOBS = ["recipe", "mode", "tokens/s", "against bf16", "peak memory, GiB", "exposed sync, µs per step"]
_LINEARS = {
    "by default": "fp8dist",
    "fast everywhere": "fp8dist, fast",
    "eager": "fp8dist, eager",
    "weight's cast reused": "fp8dist, weight reused",
}
_EXPERTS = {"by default": "fp8dist", "only our kernels": "fp8dist, triton", "eager": "fp8dist, eager"}

TABLES: Mapping[str, Table] = MappingProxyType(
    {
        "goals": goals,
        "machines": machines,
        "matmuls": matmuls,
        "sustained": _listed("sustained", ["product", "s", *_SPEEDS], _sustained),
        "memory": _listed("memory", _MEMORY, _memory),
        "updates": _listed("update", _UPDATES, _update),
        "linears": _both_ways("linears", "FP8Linear", _LINEARS),
        "experts": _both_ways("experts", "FP8Experts", _EXPERTS),
        "crossover": _listed("crossover", ["layer", "tokens", "bf16 / ours by tokens"], _crossover),
        "jobs": _listed("job", _JOBS, _job),
    }
)


def _reached(goal: Goal, data: Results) -> str:
    part = data["parts"].get(goal.part)
    if part is None:
        return NOT_YET
    figure = part["figures"].get(goal.figure)
    if figure is None:
        reason = part["problem"] or part["figures"].get("refused_by_torch")
        return f"no figure: {reason}" if reason else NOT_YET
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


def _tests(tests: Results) -> str:
    counts = f"{tests['passed']} passed, {tests['failed']} failed, {tests['skipped']} skipped"
    cut_off = "; cut off, not all were run" if tests["cut_off"] else ""
    return f"{counts}{cut_off} (commit {_commit(tests)})"


def _ratio(ratio: Sequence[float] | None) -> str:
    return "-" if ratio is None else "{:.2f} ({:.2f} to {:.2f})".format(*ratio)


def summary(folder: Path) -> str:
    """Return goals and devices of the results in a folder."""
    found = [results.earlier(path) for path in sorted(folder.glob("*.json"))]
    measured = [data for data in found if data is not None]
    smoke = "figures of smoke runs mean nothing\n" if any(data["smoke"] for data in measured) else ""
    return f"{smoke}{goals(measured)}\n{machines(measured)}"
