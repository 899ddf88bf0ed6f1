"""Which ranks a replay blames, from what each has told."""

from __future__ import annotations

import pytest

from fp8dist.checks.outputs import Place
from fp8dist.replays.replay_report import RankResult, ReplayReport, judge

PLACE = Place("blocks.1", "output", 0, 0, (4,), "float32")


def _judged(faults: list[str], unsteady: tuple[int, ...] = ()) -> ReplayReport:
    """Return the report of ranks in a ring, each with the name of its fault."""
    size = len(faults)
    return judge(
        [
            RankResult(
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


FIRST = "the first non-finite value in module 'blocks.1', output"


@pytest.mark.parametrize(
    ("places", "spoilt", "sentences"),
    [
        ([None, 3], "", [f"the data of rank 1 gives {FIRST}"]),
        ([3], "", [f"the data of rank 0 gives {FIRST}"]),
        ([3, 3], "", [f"the data of ranks 0, 1 gives {FIRST} (on all ranks, so the model may be the cause)"]),
        ([3, 3], "w", [f"a parameter gives ranks 0, 1 {FIRST} (the parameter w is not finite)"]),
        ([None, 3], "w", [f"a parameter gives rank 1 {FIRST} (the parameter w is not finite)"]),
        ([9, 3], "w",
         [f"the data of rank 1 gives {FIRST}", f"a parameter gives rank 0 {FIRST} (the parameter w is not finite)"]),
    ],
)  # fmt: skip
def test_data_or_parameter(places: list[int | None], spoilt: str, sentences: list[str]) -> None:
    """``places``: of each rank's first non-finite value; None: it has none."""
    found = [{} if at is None else {"nonfinite": (at, PLACE), "spoilt": spoilt} for at in places]
    results = [RankResult(rank, (rank + 1) % len(places), **found[rank]) for rank in range(len(places))]  # type: ignore[arg-type]
    assert [finding.sentence for finding in judge(results).findings] == sentences
