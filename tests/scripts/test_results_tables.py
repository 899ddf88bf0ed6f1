"""Tables of measured figures come only from kernels/results."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from scripts import results_files
from scripts.benchmarks.gpu import results
from scripts.benchmarks.gpu.tables import GOALS, TABLES, goals, verdict
from scripts.benchmarks.markdown import NOT_YET
from scripts.pages.__main__ import main
from scripts.pages.runs import hardware, versions

ROOT = Path(__file__).resolve().parents[2]


STAMP = MappingProxyType({"commit": "0123456789abcdef", "dirty": False, "date": "2026-01-31T12:00:00Z"})


def _timing(median: float) -> dict[str, float]:
    return {"median_us": median, "low_us": 0.9 * median, "high_us": 1.1 * median, "count": 20}


def _part(cases: list[dict[str, Any]], figures: dict[str, Any], **changes: Any) -> dict[str, Any]:
    part = {"status": "done", "seconds": 1.0, "problem": None, "cases": cases, "figures": figures}
    return {**part, **STAMP, **changes}


def measured(**parts: Any) -> dict[str, Any]:
    """Return the results of a fictional device."""

    def summary(ratio: float, name: str, shapes: int = 1) -> dict[str, Any]:
        return {"geomean": [ratio, ratio - 0.02, ratio + 0.01], "lowest": ratio, "lowest_case": name, "shapes": shapes}

    product = {"name": "70b down wgrad", "timings": {"auto": _timing(100.0)}, "tflops": {"auto": 1234.4}}
    cast = {
        "name": "cast 8x16",
        "kernel": "cast",
        "rows": 8,
        "columns": 16,
        "tensors": 1,
        "reference": "copy",
        "ratios": {"fp8dist": [0.93, 0.91, 0.94]},
        "gb_per_s": {"fp8dist": 3900.0, "copy": 4200.0},
        "timings": {"fp8dist": _timing(31.5), "copy": _timing(29.3)},
    }
    commit = {"name": "commit", "update": "commit", "slots": 1000, "history": 1024}
    linear = {
        "name": "8b qkv, 8192 tokens",
        "ratios": {"fp8dist": [1.63, 1.6, 1.65], "fp8dist, eager": [1.5, 1.4, 1.6]},
    }
    mixture = {"name": "4 x 8 x 8", "ratios": {"fp8dist": [1.25, 1.2, 1.3], "fp8dist, triton": [1.2, 1.1, 1.3]}}
    run = {"name": "fprop", "seconds": 30.0, "tflops": {"cold": 1300.0, "sustained": 1111.0}}
    crossing = {"name": "64 x 64", "crossover": 2048, "ratios": {"2048": [1.2, 1.1, 1.3]}}
    step = {"name": "delayed, graph", "recipe": "delayed", "mode": "graph", "tokens_per_s": 123456.7}
    kept = {
        "matmul_tensorwise": _part(
            [product],
            {"auto": {**summary(0.98, "70b down wgrad", 40), "fprop": [0.97, 0.9, 1.0], "dgrad": None, "wgrad": None}},
        ),
        "linears": _part(
            [{**linear, "timings": {"fp8dist": _timing(1000.0), "bf16": _timing(1630.0)}}],
            {"delayed: fp8dist": summary(1.63, "8b qkv, 8192 tokens")},
        ),
        "experts": _part(
            [{**mixture, "timings": {"fp8dist": _timing(4000.0), "bf16": _timing(5000.0)}}],
            {"delayed: fp8dist": summary(1.25, "4 x 8 x 8")},
        ),
        "memory": _part([cast], {"cast": summary(0.93, "c")}),
        "update": _part(
            [{**commit, "timings": {"graph": _timing(3.2), "graph_cold": _timing(5.1), "eager": _timing(14.0)}}],
            {"commit_1000": summary(1.01, "commit")},
        ),
        "crossover": _part([{**crossing, "timings": {"bf16, 2048": _timing(1.0)}}], {"64 x 64": 2048}),
        "sustained": _part(
            [
                {
                    **run,
                    "ratios": {"cold": [1.7, 1.6, 1.8]},
                    "timings": {"cold": _timing(1.0), "sustained": _timing(1.2)},
                }
            ],
            {},
        ),
        "job": _part(
            [{**step, "peak_bytes": 3 << 30, "timings": {"step": _timing(1.0), "sync": _timing(42.0)}}],
            {"delayed, graph": [1.31, 1.3, 1.32]},
        ),
    }
    return {
        **results.empty(None, False, "test"),
        **STAMP,
        "device": {"name": "Imaginary 9000", "capability": [9, 9], "driver": "1.2", "memory_gib": 1, "processors": 1},
        "versions": {"python": "3.12.3", "torch": "2.11.0", "triton": "3.6.0", "torchao": None},
        "tests": {"passed": 100, "failed": 0, "skipped": 2, "seconds": 60.0, "failures": [], "cut_off": False, **STAMP},
        "parts": {**kept, **parts},
    }


def _line(table: str, start: str) -> str:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {start} ")]
    return line


def test_without_results_nothing_is_claimed() -> None:
    table = goals([])
    assert len(table.splitlines()) == 2 + len(GOALS)
    assert all(line.endswith(f"| {NOT_YET} |") for line in table.splitlines()[2:])
    for name, make in TABLES.items():
        assert NOT_YET in make([]), name


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
        "linears": "| 8b qkv, 8192 tokens | 1.00 | 1.63 | 1.63 (1.60 to 1.65) | - | 1.50 (1.40 to 1.60) |",
        "experts": "| 4 x 8 x 8 | 4.00 | 5.00 | 1.25 (1.20 to 1.30) | 1.20 (1.10 to 1.30) | - |",
        "crossover": "| 64 x 64 | 2048 | 2048: 1.20 (1.10 to 1.30) |",
        "sustained": "| fprop | 30 | 1300 | 1111 | 1.70 (1.60 to 1.80) | - |",
        "jobs": "| delayed | graph | 123,457 | 1.31 (1.30 to 1.32) | 3.0 | 42 |",
    }.items():
        assert line in TABLES[name](loaded), name
    machines = TABLES["machines"](loaded)
    for text in ("0123456789", "torch 2.11.0, Triton 3.6.0", "2026-01-31", "100 passed, 0 failed, 2 skipped"):
        assert text in machines


def test_a_wrong_result_gives_no_figure_but_its_reason() -> None:
    problem = "wrong: relative error 1.4, at most 0.004 is right"
    case = {"name": "8b qkv", "problem": problem}
    table = goals([measured(matmul_tensorwise=_part([case], {}, problem=problem))])
    assert _line(table, 'GEMM, "auto", tensorwise,').endswith(f"| no figure: {problem} |")
    refused = _part([], {"refused_by_torch": "no such kernel (96 shapes)"})
    loaded = [measured(matmul_blockwise=refused)]
    assert _line(goals(loaded), "the same, block-scaled").endswith("| no figure: no such kernel (96 shapes) |")
    assert "blockwise" not in TABLES["matmuls"](loaded)


@pytest.mark.parametrize(
    ("low", "high", "judged"),
    [(1.0, 1.1, "reached"), (0.99, 1.0, "undecided"), (0.9, 0.99, "missed"), (0.5, 2.0, "undecided")],
)
def test_a_goal_is_reached_if_its_whole_interval_is(low: float, high: float, judged: str) -> None:
    assert verdict([(low + high) / 2, low, high], 1.0) == judged


def test_a_part_that_was_cut_off_says_so() -> None:
    figures = {"auto": {"geomean": [1.0, 0.9, 1.1], "lowest": 0.9, "lowest_case": "x", "shapes": 10}}
    part = _part([], figures, status="cut off", problem="out of time after 10 of 96 cases")
    assert "out of time after 10 of 96" in _line(goals([measured(matmul_rowwise=part)]), "the same, row-wise")


def test_smoke_runs_are_no_figures(tmp_path: Path) -> None:
    results_files.write(tmp_path / "x86-64.json", {**measured(), "smoke": True})
    assert results.load_all(tmp_path) == []


def test_every_table_is_on_a_page() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    assert [name for name in TABLES if f"<!-- made: {name} -->" not in pages] == []


def test_summary_for_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results_files.write(tmp_path / "imaginary-9000.json", measured())
    assert main(["--summary", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["what", "against", "goal"]
    assert "missed: 0.98 (0.96 to 0.99)" in next(line for line in lines if line.startswith('GEMM, "auto", tensorwise'))
    results_files.write(tmp_path / "imaginary-9000.json", {**measured(), "smoke": True})
    assert main(["--summary", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("figures of smoke runs mean nothing\n")


ROW = MappingProxyType({"python": "3.10.13", "torch": "2.13.0+cpu", "passed": 7, "failed": 0, "date": "2026-01-31"})


def test_versions_are_a_table_of_python_and_torch() -> None:
    rows = [ROW, {**ROW, "python": "3.9.1", "torch": "2.9.1", "failed": 2}]
    assert versions(rows).splitlines() == [
        "| Python | torch 2.9.1 | torch 2.13.0 |",
        "| --- | --- | --- |",
        "| 3.9.1 | 7 passed, 2 failed, 2026-01-31 | - |",
        "| 3.10.13 | - | 7 passed, 2026-01-31 |",
    ]


def test_hardware_claims_what_was_recorded() -> None:
    assert hardware([], None, []).startswith("- **GPU: nothing has run on one yet,** nor with NCCL.")
    runs = {"machine": "an abacus", "steps": 20, "date": "2026-01-31T12:00:00Z"}
    said = hardware([measured()], runs, [ROW, {**ROW, "python": "3.9.1"}])
    assert said.splitlines() == [
        "- **GPU:** Imaginary 9000: 100 tests passed, 0 failed; 8 of 8 benchmarks are complete (2026-01-31).",
        "- **CPU:** all tests, with gloo; convergence over 20 steps (an abacus).",
        "- **Versions:** Python 3.9 to 3.10 and torch 2.13, 2 pairs of them.",
    ]


def test_the_kept_results_are_right() -> None:
    for path in (ROOT / "kernels" / "results").glob("*.json"):
        data = results.read(path)
        assert not data["smoke"]
        assert path == results.file_of(path.parent, data["device"]["name"])


def _without(key: str) -> dict[str, Any]:
    data = measured()
    del data[key]
    return data


def test_what_is_no_results_file_is_refused(tmp_path: Path) -> None:
    for data, problem in [
        ([], "not an object"),
        (_without("device"), "device is missing"),
        (_without("commit"), "no commit"),
        ({**measured(), "schema": 99}, "schema 99"),
        (measured(other=_part([], {})), "unknown part 'other'"),
        (measured(memory=_part([], {}, status="fine")), "unknown status 'fine'"),
        (measured(memory=_part([{}], {})), "a case has no name"),
        (measured(memory=_part([{"name": "c"}], {})), "neither timings nor a problem"),
        (measured(memory=_part([{"name": "c", "timings": {"a": {"count": 3}}}], {})), "a has no median_us"),
    ]:
        path = tmp_path / "device.json"
        path.write_text(json.dumps(data))
        with pytest.raises(ValueError, match=problem):
            results.read(path)
        assert results.problems_of(measured()) == []


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


def test_figures_of_another_commit_say_so() -> None:
    table = goals([{**measured(), "commit": "fedcba9876543210"}])
    assert _line(table, "cast only").endswith("0.93 (0.91 to 0.94) (commit 0123456789) |")
    assert "(commit" not in goals([measured()])
