"""User mistakes give the right result, or an error or a warning that names the mistake and the remedy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import mistaken_calls, mistaken_orders, mistaken_ranks, mistaken_steps, mistaken_writes
from tests.support.mistakes import Bench, Rows, complaints, report, run_case
from tests.support.ranks import RankPool, RanksFailed

pytestmark = pytest.mark.xdist_group("mistakes")

ROWS = Rows()
for _rows in (mistaken_steps, mistaken_writes, mistaken_calls, mistaken_ranks, mistaken_orders):
    for _name, _row in _rows.ROWS.items():
        assert _name not in ROWS, _name
        ROWS[_name] = _row

ALONE = [
    pytest.param(name, marks=[pytest.mark.slow] if "compiled" in name or "torch.compile" in name else [])
    for name, row in ROWS.items()
    if row.ranks == 1
]
TOGETHER = [name for name, row in ROWS.items() if row.ranks == 2]


@pytest.fixture(scope="module")
def bench(two_ranks: RankPool) -> Iterator[Bench]:
    return Bench(two_ranks, __name__)


def _run(name: str, bench: Bench | None) -> None:
    row = ROWS[name]
    try:
        seen = [run_case(row)] if bench is None else bench.run(row)
    except RanksFailed as failed:
        pytest.fail(f"{name}: the ranks hang or died, expected {' or '.join(sorted(row.outcomes))}\n{failed}")
    if complaints(row, seen):
        pytest.fail(report(row, seen), pytrace=False)


@pytest.mark.parametrize("name", ALONE)
def test_in_one_process(name: str) -> None:
    _run(name, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOGETHER)
def test_on_two_ranks(bench: Bench, name: str) -> None:
    _run(name, bench)
