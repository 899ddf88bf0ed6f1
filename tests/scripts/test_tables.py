"""Tables of measured figures, of convergence, GPUs and audits: they come only from results, and say what those are."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from scripts import results_files
from scripts.benchmarks.gpu import results
from scripts.benchmarks.gpu.tables import GOALS, TABLES, goals, verdict
from scripts.benchmarks.markdown import NOT_YET
from scripts.convergence import accumulation_tables, fast_accumulation
from scripts.convergence.__main__ import main as convergence_main
from scripts.convergence.comparison import Comparison, Spread, compare, spread_of
from scripts.convergence.tables import (
    CONVERGENCE_TABLES,
    MIXTURE_TABLES,
)
from scripts.convergence.variants import VARIANTS
from scripts.pages import audits
from scripts.pages.__main__ import main
from scripts.pages.runs import hardware, versions

ROOT = Path(__file__).resolve().parents[2]

OF_ONE = {
    **CONVERGENCE_TABLES,
    **MIXTURE_TABLES,
    **accumulation_tables.ACCUMULATION_TABLES,
    "audit-cost": audits.cost_of,
}
OF_MANY = {**TABLES, "audit-faults": audits.faults}
EMPTY: dict[str, Callable[[], str]] = {
    **{name: partial(make, None) for name, make in OF_ONE.items()},
    **{name: partial(make, []) for name, make in OF_MANY.items()},
}
"""The tables, made without results."""

ROWS = {"convergence": len(VARIANTS), "mixture": len(VARIANTS), "goals": len(GOALS)}
"""Of tables that have a row for each thing that can be measured. Others have one."""


@pytest.mark.parametrize("name", EMPTY)
def test_without_results_nothing_is_claimed(name: str) -> None:
    rows = EMPTY[name]().splitlines()[2:]
    assert all(NOT_YET in row for row in rows)
    assert len(rows) == ROWS.get(name, 1)
    if name not in ROWS:
        assert not any(character.isdecimal() for character in rows[0])


def test_every_table_is_on_a_page() -> None:
    """docs/ compares the published ones with their results, numbers included."""
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    assert [name for name in EMPTY if f"<!-- made: {name} -->" not in pages] == []


def test_results_of_another_schema_are_refused(tmp_path: Path) -> None:
    assert results_files.load("convergence", tmp_path) is None
    path = results_files.path_of("convergence", tmp_path)
    results_files.write(path, {"schema": 1, "runs": {}})
    assert results_files.load("convergence", tmp_path) == {"schema": 1, "runs": {}}
    results_files.write(path, {"schema": 9})
    with pytest.raises(ValueError, match="not results of schema 1"):
        results_files.load("convergence", tmp_path)
    another = json.dumps({**measured(), "schema": 99})
    for text, problem in (("{", "not JSON"), ("[]", "schema 2"), (another, "schema 2")):
        path.write_text(text)
        with pytest.raises(ValueError, match=problem):
            results.read(path)


@pytest.mark.parametrize(
    ("start", "flags", "message"),
    [
        (convergence_main, "--seed 3", "--seed is not for this program"),
        (convergence_main, "--width many", "invalid integer value: 'many'"),
        (convergence_main, "--seeds 0", "must be at least 1"),
        (convergence_main, "--experts 4", "--experts needs --no-gradients"),
        (fast_accumulation.main, "--points 0", "must be at least 1"),
        (fast_accumulation.main, "--width many", "invalid integer value: 'many'"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], start: Any, flags: str, message: str
) -> None:
    variants = ["--variants", "fp32"] if start is convergence_main else []
    try:
        status: object = start(["--out", str(tmp_path), *variants, *flags.split()])
    except SystemExit as left:
        status = left.code
    assert (status, list(tmp_path.iterdir())) == (2, [])
    assert message in capsys.readouterr().err


def _line(table: str, start: str) -> str:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {start} ")]
    return line


def run(*last: Any, validation: Any = 2.0) -> dict[str, Any]:
    """Return a run of 20 steps. Only the last two losses count."""
    return {"losses": [*18 * [9.0], *last], "validation_loss": validation, "tokens_per_s": 1.0}


def test_whether_a_goal_was_reached() -> None:
    """By its whole interval, or by each seed."""
    for low, high, judged in [
        *((1.0, 1.1, "reached"), (0.99, 1.0, "undecided")),
        *((0.9, 0.99, "missed"), (0.5, 2.0, "undecided")),
    ]:
        assert verdict([(low + high) / 2, low, high], 1.0) == judged
    for gaps, reached in [
        ([0.5, -0.5], "yes, with every seed"),
        ([0.6, -0.2], "yes, on average"),
        ([-0.6, -0.5], "no"),
        ([math.nan, 0.1], "no"),
    ]:
        gap = spread_of(gaps)
        assert Comparison((0, 1), gap, gap, gap, gap, 0.5).reached == reached
    plain = {"0": run(1.5, 2.5), "1": run(3.5, 4.5)}
    blown_up = {"0": run(1.5, 2.5), "1": run("nan", "nan", validation="nan")}
    found = compare({"fp32": plain, "block": blown_up, "current": {"0": plain["1"]}, "rowwise": {"2": plain["0"]}})
    assert found["block"].reached == "no"
    assert found["current"].training_gap == Spread(100.0, None, 100.0, 100.0), "in %, of the same seed of FP32"
    assert (found["rowwise"].training_gap, found["rowwise"].reached) == (None, "-")


STAMP = MappingProxyType({"commit": "0123456789abcdef", "dirty": False, "date": "2026-01-31T12:00:00Z"})


def _timing(median: float) -> dict[str, float]:
    return {"median_us": median, "low_us": 0.9 * median, "high_us": 1.1 * median, "count": 20}


def _part(cases: list[dict[str, Any]], figures: dict[str, Any], **changes: Any) -> dict[str, Any]:
    part = {"status": "done", "seconds": 1.0, "problem": None, "cases": cases, "figures": figures}
    return {**part, **STAMP, **changes}


def _listed(name: str, times: dict[str, float], figures: dict[str, Any], **case: Any) -> dict[str, Any]:
    """Return a part with one case."""
    return _part([{"name": name, **case, "timings": {side: _timing(us) for side, us in times.items()}}], figures)


def measured(**parts: Any) -> dict[str, Any]:
    """Return the results of a fictional device."""

    def summary(ratio: float, name: str, shapes: int = 1) -> dict[str, Any]:
        return {"geomean": [ratio, ratio - 0.02, ratio + 0.01], "lowest": ratio, "lowest_case": name, "shapes": shapes}

    by_gemm = {"fprop": [0.97, 0.9, 1.0], "dgrad": None, "wgrad": None}
    cast = {"kernel": "cast", "rows": 8, "columns": 16, "tensors": 1, "reference": "copy"}
    cast |= {"ratios": {"fp8dist": [0.93, 0.91, 0.94]}, "gb_per_s": {"fp8dist": 3900.0, "copy": 4200.0}}
    both_ways = {"fp8dist": [1.63, 1.6, 1.65], "fp8dist, eager": [1.5, 1.4, 1.6]}
    mixture = {"fp8dist": [1.25, 1.2, 1.3], "fp8dist, triton": [1.2, 1.1, 1.3]}
    commit = {"update": "commit", "slots": 1000, "history": 1024}
    crossing = {"crossover": 2048, "ratios": {"2048": [1.2, 1.1, 1.3]}}
    run = {"seconds": 30.0, "tflops": {"cold": 1300.0, "sustained": 1111.0}, "ratios": {"cold": [1.7, 1.6, 1.8]}}
    step = {"recipe": "delayed", "mode": "graph", "tokens_per_s": 123456.7, "peak_bytes": 3 << 30}
    kept = {
        "matmul_tensorwise": _listed(
            "x", {"auto": 100.0}, {"auto": {**summary(0.98, "70b down wgrad", 40), **by_gemm}}
        ),
        "linears": _listed(
            "8b qkv", {"fp8dist": 1000.0, "bf16": 1630.0}, {"delayed: fp8dist": summary(1.63, "x")}, ratios=both_ways
        ),
        "experts": _listed("4 x 8 x 8", {"fp8dist": 4000.0, "bf16": 5000.0}, {}, ratios=mixture),
        "memory": _listed("cast 8x16", {"fp8dist": 31.5, "copy": 29.3}, {"cast": summary(0.93, "c")}, **cast),
        "update": _listed(
            "x", {"graph": 3.2, "graph_cold": 5.1, "eager": 14.0}, {"commit_1000": summary(1.01, "x")}, **commit
        ),
        "crossover": _listed("64 x 64", {"bf16, 2048": 1.0}, {"64 x 64": 2048}, **crossing),
        "sustained": _listed("fprop", {"cold": 1.0, "sustained": 1.2}, {}, **run),
        "job": _listed("delayed, graph", {"step": 1.0, "sync": 42.0}, {"delayed, graph": [1.31, 1.3, 1.32]}, **step),
    }
    return {
        **results.empty(None, False, "test"),
        **STAMP,
        "device": {"name": "Imaginary 9000", "capability": [9, 9], "driver": "1.2", "memory_gib": 1, "processors": 1},
        "versions": {"python": "3.12.3", "torch": "2.11.0", "triton": "3.6.0", "torchao": None},
        "tests": {"passed": 100, "failed": 0, "skipped": 2, "seconds": 60.0, "failures": [], "cut_off": False, **STAMP},
        "parts": {**kept, **parts},
    }


def test_figures_are_those_of_the_file(tmp_path: Path) -> None:
    results_files.write(tmp_path / "imaginary-9000.json", measured())
    loaded = results.load_all(tmp_path)
    table = goals(loaded)
    assert "Imaginary 9000" in table.splitlines()[0]
    assert _line(table, 'GEMM, "auto", tensorwise,').endswith(
        "| 1.00 | missed: 0.98 (0.96 to 0.99); lowest 0.98: 70b down wgrad |"
    )
    assert _line(table, "the same, row-wise").endswith(f"| {NOT_YET} |")
    assert _line(table, "cast only").endswith("| 0.92 | undecided: 0.93 (0.91 to 0.94) |")
    assert _line(table, "digest").endswith(f"| {NOT_YET} |")
    assert _line(table, "commit,").endswith("| undecided: 1.01 (0.99 to 1.02) |")
    assert _line(table, "FP8Linear forward").endswith("| 1.50 | reached: 1.63 (1.61 to 1.64) |")
    for name, line in {
        "matmuls": "auto | 40 | 0.98 (0.96 to 0.99) | 0.97 (0.90 to 1.00) | - | - | 0.98 (70b down wgrad) | - |",
        "memory": "| cast | 1 of 8 x 16 | 31.5 | 3900 | copy, 4200 GB/s | 0.93 (0.91 to 0.94) |",
        "updates": "| commit | 1,000 | 1024 | 3.2 warm, 5.1 cold | 14.0 warm |",
        "linears": "| 8b qkv | 1.00 | 1.63 | 1.63 (1.60 to 1.65) | - | 1.50 (1.40 to 1.60) |",
        "experts": "| 4 x 8 x 8 | 4.00 | 5.00 | 1.25 (1.20 to 1.30) | 1.20 (1.10 to 1.30) | - |",
        "crossover": "| 64 x 64 | 2048 | 2048: 1.20 (1.10 to 1.30) |",
        "sustained": "| fprop | 30 | 1300 | 1111 | 1.70 (1.60 to 1.80) | - |",
        "jobs": "| delayed | graph | 123,457 | 1.31 (1.30 to 1.32) | 3.0 | 42 |",
    }.items():
        assert line in TABLES[name](loaded), name
    machines = TABLES["machines"](loaded)
    for text in ("0123456789", "torch 2.11.0, Triton 3.6.0", "2026-01-31", "100 passed, 0 failed, 2 skipped"):
        assert text in machines


def test_what_has_no_figure_says_why() -> None:
    problem = "wrong: relative error 1.4, at most 0.004 is right"
    wrong = _part([{"name": "8b qkv", "problem": problem}], {}, problem=problem)
    refused = _part([], {"refused_by_torch": "no such kernel (96 shapes)"})
    ten = {"auto": {"geomean": [1.0, 0.9, 1.1], "lowest": 0.9, "lowest_case": "x", "shapes": 10}}
    late = _part([], ten, status="cut off", problem="out of time after 10 of 96 cases")
    loaded = [measured(matmul_tensorwise=wrong, matmul_blockwise=refused, matmul_rowwise=late)]
    table = goals(loaded)
    assert _line(table, 'GEMM, "auto", tensorwise,').endswith(f"| no figure: {problem} |")
    assert _line(table, "the same, block-scaled").endswith("| no figure: no such kernel (96 shapes) |")
    assert "out of time after 10 of 96" in _line(table, "the same, row-wise")
    assert "blockwise" not in TABLES["matmuls"](loaded)
    table = goals([{**measured(), "commit": "fedcba9876543210"}])
    assert _line(table, "cast only").endswith("0.93 (0.91 to 0.94) (commit 0123456789) |")
    assert "(commit" not in goals([measured()])


def test_summary_for_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results_files.write(tmp_path / "imaginary-9000.json", measured())
    assert main(["--summary", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| what | against | goal ")
    assert "missed: 0.98 (0.96 to 0.99)" in _line("\n".join(lines), 'GEMM, "auto", tensorwise,')
    results_files.write(tmp_path / "imaginary-9000.json", {**measured(), "smoke": True})
    assert main(["--summary", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("figures of smoke runs mean nothing\n")
    assert results.load_all(tmp_path) == []


ROW = MappingProxyType({"python": "3.10.13", "torch": "2.13.0+cpu", "passed": 7, "failed": 0, "date": "2026-01-31"})


def test_hardware_claims_what_was_recorded() -> None:
    assert hardware([], None, []).startswith("- **GPU: nothing has run on a GPU or with NCCL yet,**")
    runs = {"machine": "an abacus", "steps": 20, "date": "2026-01-31T12:00:00Z"}
    said = hardware([measured()], runs, [ROW, {**ROW, "python": "3.9.1"}])
    assert said.splitlines() == [
        "- **GPU:** Imaginary 9000: 100 tests passed, 0 failed; 8 of 8 benchmarks are complete (2026-01-31).",
        "- **CPU:** all tests, with gloo; losses were compared with FP32 over 20 steps",
        "  (an abacus).",
        "- **Versions:** Python 3.9 to 3.10 and torch 2.13, tested in 2 combinations.",
    ]


def test_what_was_not_measured_again_is_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tests = {**measured(), "parts": {}}
    benchmark = {**measured(), "tests": None}
    both = results.merged(tests, benchmark)
    assert (both["tests"], both["parts"]) == (tests["tests"], benchmark["parts"])
    later = {**benchmark, "run": "later", "commit": "fedcba9876543210", "parts": {"linears": _part([], {})}}
    assert list(results.merged(both, later)["parts"]) == list(benchmark["parts"])
    assert results.merged(both, later)["parts"]["linears"]["cases"] == []
    for change in ({"versions": {}}, {"smoke": True}, {"device": {}}):
        assert results.merged(both, {**later, **change})["parts"] == later["parts"], change
    for change in ({"commit": None}, {"dirty": True}):
        assert results.merged({**both, **change}, later)["parts"] == later["parts"], "of which code, nobody knows"
        same_run = results.merged({**both, **change}, {**later, "run": both["run"]})
        assert list(same_run["parts"]) == list(benchmark["parts"])
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    assert results.earlier(broken) is None
    assert "no results" in capsys.readouterr().err
    assert results.earlier(tmp_path / "none.json") is None


def test_what_no_published_row_shows() -> None:
    """Pages show the other rows of these tables, and are compared with them."""
    rows = [ROW, {**ROW, "python": "3.9.1", "torch": "2.9.1", "failed": 2}]
    assert versions(rows).splitlines()[2:] == [
        "| 3.9.1 | 7 passed, 2 failed, 2026-01-31 | - |",
        "| 3.10.13 | - | 7 passed, 2026-01-31 |",
    ]
    row = {"fault": "a bit", "inject": "weight:1:5", "header": [None], "check": [7], "audit": [3, None]}
    assert audits.faults([row]).endswith("| not found | 7 steps later | in 1 of 2 runs |\n")
