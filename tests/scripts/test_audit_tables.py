"""Tables about audits say what the runs found, and nothing before there were any."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.benchmarks.markdown import NOT_YET
from scripts.pages.audits import parts_of
from scripts.results_files import path_of, write


def test_without_results_nothing_is_claimed(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    for name in ("audit-faults", "audit-cost"):
        (row,) = parts[name]().splitlines()[2:]
        assert row.startswith(f"| {NOT_YET} |")


def test_sizes_are_those_of_the_operands(tmp_path: Path) -> None:
    """8,192 tokens: bytes of FP8 activations and weights, by hand."""
    rows = [re.findall(r"(\w+) \| (\d+) MB", line)[0] for line in parts_of(tmp_path)["audit-sizes"]().splitlines()[2:]]
    x, y, w = 8192 * 4096, 8192 * 14336, 4096 * 14336
    small = [("fprop", x + w), ("dgrad", y + w), ("wgrad", y + x)]
    large = [("fprop", 2 * x + 4 * w), ("dgrad", 2 * y + 4 * w), ("wgrad", 2 * y + 2 * x)]  # Both sizes doubled.
    assert rows == [(gemm, str(round(size / 1e6))) for gemm, size in (*small, *large)]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ([None], "not found"),
        ([0], "in its step"),
        ([1], "1 step later"),
        ([7], "7 steps later"),
        ([9, 2], "2, 9 steps later"),
        ([3, None], "in 1 of 2 runs"),
    ],
)
def test_how_late_a_fault_is_found(found: list[int | None], text: str, tmp_path: Path) -> None:
    row = {"fault": "a bit", "inject": "weight:1:5", "header": [None], "check": [None], "audit": found}
    write(path_of("audits", tmp_path), {"faults": [row, {**row, "header": [0]}]})
    cells, known = parts_of(tmp_path)["audit-faults"]().splitlines()[2:]
    assert cells == f"| a bit | `weight:1:5` | not found | not found | {text} |"
    assert known.endswith("| in its step | - | - |")  # The sync has found it first.
