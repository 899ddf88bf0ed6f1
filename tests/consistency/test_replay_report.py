"""Which ranks a replay blames, from what each has told."""

from __future__ import annotations

import pytest

from fp8dist.consistency.outputs import Place
from fp8dist.consistency.replay_report import ReplayReport, Told, judge

PLACE = Place("blocks.1", "output", 0, 0, (4,), "float32")


def _judged(faults: list[str], unsteady: tuple[int, ...] = ()) -> ReplayReport:
    """Return the report of ranks in a ring, each with the name of its fault."""
    size = len(faults)
    return judge(
        [
            Told(
                rank,
                (rank + 1) % size,
                unsteady=(1, PLACE) if rank in unsteady else None,
                differs=(2, PLACE) if fault != faults[(rank + 1) % size] else None,
            )
            for rank, fault in enumerate(faults)
        ]
    )


@pytest.mark.parametrize(
    ("faults", "blamed", "pairs"),
    [
        ("a.", set(), {(0, 1)}),
        (".a.", {1}, set()),
        ("...a", {3}, set()),
        ("ab..", {0, 1}, set()),
        ("a.b..", {0, 2}, set()),  # Rank 1 is well, between two that are not.
        ("aa..", set(), {(0, 3), (1, 2)}),
        ("a.b.", set(), {(0, 1), (1, 2), (2, 3), (0, 3)}),
        ("....", set(), set()),
    ],
)
def test_ranks_to_blame(faults: str, blamed: set[int], pairs: set[tuple[int, int]]) -> None:
    found = _judged(list(faults)).findings
    assert {f.ranks[0] for f in found if f.reference_rank is not None} == blamed
    assert {f.ranks for f in found if f.reference_rank is None} == pairs
    for finding in found:
        if finding.reference_rank is not None:
            assert faults[finding.reference_rank] == ".", finding.sentence


def test_ranks_that_do_not_repeat_themselves_vouch_for_none() -> None:
    found = _judged(["a", "b", "."], unsteady=(0,)).findings
    assert [(f.kind, f.ranks, f.reference_rank) for f in found] == [
        ("not deterministic", (0,), None),
        ("ranks differ", (1, 2), None),
    ]
