"""What a report says about the experts of mixtures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8dist.runs.report.experts import MixtureTokens, idle_experts, relative_loads
from fp8dist.runs.report.folder import Lines
from fp8dist.runs.report.numbers import read_run
from fp8dist.runs.report.page import page_of
from tests.support.runs import lines, made_run


def load(step: int, module: str, tokens: list[int], idle: list[int], age: Any = None) -> dict[str, Any]:
    return {"step": step, "module": module, "tokens": tokens, "idle": idle, "age": age}


MADE = [
    load(10, "blocks.0.mlp.experts", [6, 2, 0], [0, 0, 10], [0, 0, 9]),
    load(10, "blocks.1.mlp.experts", [5, 5], [0, 0], [0, 0]),
    load(20, "blocks.0.mlp.experts", [2, 6, 0], [0, 0, 20], [0, 0, 19]),
    load(20, "blocks.1.mlp.experts", [0, 10], [1, 0], [0, 0]),
]


def test_idle_experts_are_told_in_a_sentence(tmp_path: Path) -> None:
    found = _read(tmp_path, MADE)
    assert found[0].shares.tolist() == [0.5, 0.5, 0.0]
    assert [str(one) for one in idle_experts(found)] == [
        "expert 2 of blocks.0.mlp.experts has had no token for 20 steps",
        "expert 0 of blocks.1.mlp.experts has no token in step 20",
    ]
    (unknown,) = idle_experts(_read(tmp_path, [load(20, "m", [0, 3], [11, 0])]))
    assert str(unknown) == "expert 0 of m has had no token in any observed step of the last 11"


def _read(folder: Path, objects: list[dict[str, Any]]) -> tuple[MixtureTokens, ...]:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").touch()
    lines(folder / "experts.jsonl", objects)
    return read_run(folder).mixtures


def test_odd_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    odd = [
        load(1, "m", [1], [0, 0]),
        load(1, "m", [1, 2], [0, -1]),
        load(1, "m", [1, True], [0, 0]),
        load(1, "m", [0, 0], [1, 1]),
        load(1, "m", [1, 2], [0, 0], [0]),
        load(1, "m", [1, 2], [0, 0], "old"),
        {**load(1, "m", [1], [0]), "module": 7},
        {"step": 1, "module": "m"},
    ]
    good = load(2, "m", [1, 2], [0, 0])
    assert len(_read(tmp_path, [*odd, good])) == 1
    assert read_run(tmp_path).left_out == {"experts.jsonl": len(odd)}
    assert Lines(tmp_path / "experts.jsonl").left_out == 0


def test_loads_are_relative_to_an_even_spread() -> None:
    mixtures = [
        MixtureTokens("a", 1, np.array([0.5, 0.25, 0.25, 0.0]), 1, [0, 0, 0, 1], None),
        MixtureTokens("b", 1, np.array([0.25, 0.75]), 1, [0, 0], None),
    ]
    loads, columns = relative_loads(mixtures, 8)
    np.testing.assert_array_equal(loads, [[2, 1, 1, 0], [0.5, 1.5, np.nan, np.nan]])
    assert columns == ["0", "1", "2", "3"]
    loads, columns = relative_loads(mixtures, 2)
    np.testing.assert_array_equal(loads, [[1.5, 0.5], [1.0, np.nan]])
    assert columns == ["0 to 1", "2 to 3"]


@pytest.mark.slow
@pytest.mark.xdist_group("pages of reports")
def test_a_panel_for_runs_with_experts(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "made", steps=20, layers=1)
    assert "Do all experts get tokens?" not in page_of(read_run(folder))
    lines(folder / "experts.jsonl", MADE)
    page = page_of(read_run(folder))
    assert "Do all experts get tokens?" in page
    told = "<strong>expert 2 of blocks.0.mlp.experts has had no token for 20 steps</strong>"
    assert f"2 of 5 experts had no token when last observed: {told}." in page


@pytest.mark.slow
@pytest.mark.xdist_group("pages of reports")
def test_ten_thousand_idle_experts_stay_a_short_page(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "made", steps=20, layers=1)
    short = len(page_of(read_run(folder)))
    many = [
        load(10, f"layers.{layer}.{'x' * 300}.experts", [9, *[0] * 255], [0, *[7] * 255], [0] * 256)
        for layer in range(40)
    ]
    lines(folder / "experts.jsonl", many)
    page = page_of(read_run(folder))
    assert "10,200 of 10,240 experts had no token" in page
    assert "and 10,176 more." in page
    assert len(page) - short < 200_000
