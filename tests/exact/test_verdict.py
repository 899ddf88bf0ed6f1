"""The verdict on residues made here: which equation is found, its sentence, and what comes first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from fp8dist.exact.field import P
from fp8dist.exact.placement import HeldPart
from fp8dist.exact.solver import combined
from fp8dist.exact.verdict import ExactReport, Holding, judge_gradients
from tests.exact.test_solver import residue, residues

NAMES = ["head", "norm", "first"]  # In the order of the backward.
SHAPES = {"head": (6, 4), "norm": (4,), "first": (4, 4)}
WHOLE = HeldPart(None)


def shards_of(count: int) -> dict[str, Tensor]:
    """Return the shards' contributions to each parameter."""
    return {name: residues(count, *SHAPES[name], seed=place) for place, name in enumerate(NAMES)}


def weighted(shards: Tensor, *coefficients: str) -> Tensor:
    """Return the sum of coefficient times shard."""
    return combined([residue(Fraction(text)) for text in coefficients], list(shards))


def judged(shards: Mapping[str, Tensor], changed: Mapping[str, Sequence[Tensor | None]], ranks: int = 2) -> ExactReport:
    """Return the verdict on ranks that have the reference's gradients, but for those in ``changed``."""
    right = {name: [shards[name].sum(0) % P] * ranks for name in NAMES}
    held = {
        name: [Holding(rank, WHOLE, gradient) for rank, gradient in enumerate(gradients)]
        for name, gradients in {**right, **changed}.items()
    }
    return judge_gradients(NAMES, shards, held)


EQUATIONS: dict[str, tuple[list[str], list[tuple[str, ...]], str, str]] = {
    "a factor": (NAMES, [("2", "2", "2")] * 2, "factor", "every gradient is 2/1 of the reference"),
    "a factor of some": (NAMES[1:], [("1/2",) * 3] * 2, "factor", "norm, first are 1/2 of the reference"),
    "a factor on one rank": (
        *(NAMES[:1], [("2", "2"), ("1", "1")], "factor"),
        "head: rank 0: 2/1 of the reference; rank 1: equals the reference",
    ),
    "other weights": (NAMES[:1], [("1", "1/3")] * 2, "weights", "head: 1 and 1/3 of the shards' contributions"),
    "one rank that differs": (
        *(NAMES[:1], [("1", "1", "1"), ("1", "1", "0")], "shards"),
        "head: rank 0: equals the reference; rank 1: shard 2 is missing",
    ),
}
"""Names of the gradients, the coefficients of the shards on each rank, the kind of the finding, and the report. Further
equations, of all gradients, are in test_planted_bugs.py."""


@pytest.mark.parametrize("name", EQUATIONS)
def test_an_equation_is_found(name: str) -> None:
    names, ranks, kind, text = EQUATIONS[name]
    shards = shards_of(len(ranks[0]))
    report = judged(shards, {of: [weighted(shards[of], *each) for each in ranks] for of in names}, len(ranks))
    assert (report.findings[0].kind, str(report), report.downstream) == (kind, text, ())


def test_equal_gradients_and_a_missing_sum_of_any_summands() -> None:
    shards = shards_of(2)
    report = judged(shards, {})
    assert report.equal
    assert str(report) == "all 3 gradients equal the reference"
    parts = list(residues(1, 4, seed=9)) * 2
    parts[1] = (shards["norm"].sum(0) - parts[0]) % P
    assert str(judged(shards, {"norm": parts})) == (
        "norm: the reference is 1 x rank 0 + 1 x rank 1: the sum over these ranks is missing"
    )


def test_rows_in_other_places_and_parts_with_one_equation() -> None:
    shards = shards_of(2)
    whole = weighted(shards["head"], "1", "1")
    report = judged(shards, {"head": [whole[torch.tensor([3, 4, 5, 0, 1, 2])]] * 2})
    assert report.findings[0].kind == "moved"
    assert str(report) == (
        "head: ranks 0, 1: in place of slices 0 to 5 of dim 0 are the reference's slices 3 to 5, 0 to 2"
    )
    rows, columns = (
        [HeldPart(dim, of) for of in cut] for dim, cut in enumerate([((0, 1, 2), (3, 4, 5)), ((0, 1), (2, 3))])
    )
    for parts, order, factor, text in [
        (rows, (0, 1), 1, "all 1 gradients equal the reference"),
        (
            *(rows, (1, 0), 1),
            "head: rank 0: in place of slices 0 to 2 of dim 0 are the reference's slices 3 to 5; "
            "rank 1: in place of slices 3 to 5 of dim 0 are the reference's slices 0 to 2",
        ),
        (columns, (0, 1), 3, "head is 3/1 of the reference"),
    ]:
        held = [Holding(rank, parts[rank], factor * parts[order[rank]].of(whole) % P) for rank in range(2)]
        assert str(judge_gradients(["head"], shards, {"head": held})) == text


def test_the_earliest_in_backward_is_the_culprit() -> None:
    shards = shards_of(2)
    report = judged(shards, {name: list(residues(2, *SHAPES[name], seed=7)) for name in ("first", "norm")})
    assert str(report) == (
        "norm: not the reference's, and no equation explains it. On rank 0: 4 of 4 elements differ: [0], [1], [2] and "
        "1 more; rank 1: 4 of 4 elements differ: [0], [1], [2] and 1 more. Gradients that backward computes "
        "before it are right, the last of them head\ndownstream, 1 more differ: first"
    )
    assert (report.findings[0].names, report.downstream) == (("norm",), ("first",))


@pytest.mark.parametrize(
    ("part", "place", "text"),
    [
        (
            WHOLE,
            (slice(2, 4),),
            "8 of 24 elements differ: [2, 0], [2, 1], [2, 2] and 5 more; all in slices 2 to 3 of dim 0",
        ),
        (WHOLE, (5, 3), "1 of 24 elements differ: [5, 3]"),
        (WHOLE, (slice(None),), "24 of 24 elements differ: [0, 0], [0, 1], [0, 2] and 21 more"),
        (
            HeldPart(1, (1, 3)),
            (slice(4), 1),
            "4 of 12 elements differ: [0, 3], [1, 3], [2, 3] and 1 more; all in slice 3 of dim 1",
        ),
    ],
)
def test_what_no_equation_explains_is_placed(part: HeldPart, place: tuple[int | slice, ...], text: str) -> None:
    """The places are those in the whole tensor."""
    shards = shards_of(2)
    right = part.of(weighted(shards["head"], "1", "1"))
    wrong = right.clone()
    wrong[place] = residues(*wrong[place].shape, seed=5)
    held = {"head": [Holding(rank, part, each) for rank, each in enumerate([right, wrong, wrong, right])]}
    assert str(judge_gradients(["head"], shards, held)) == (
        f"head: not the reference's, and no equation explains it. On ranks 1, 2: {text}"
    )


def test_a_scalar_that_no_equation_explains() -> None:
    held = {"scale": [Holding(0, WHOLE, torch.tensor(5))]}
    report = judge_gradients(["scale"], {"scale": torch.tensor([1, 2])}, held)
    assert report.findings[0].sentence.endswith("On rank 0: 1 of 1 elements differ")


def test_equations_come_in_the_order_of_the_backward() -> None:
    shards = shards_of(2)
    twice, half = weighted(shards["norm"], "2", "2"), weighted(shards["head"], "1/2", "1/2")
    noise = residues(4, 4, seed=8)
    report = judged(shards, {"first": [noise] * 2, "norm": [twice] * 2, "head": [half] * 2})
    assert str(report) == (
        "head is 1/2 of the reference\nnorm is 2/1 of the reference\ndownstream, 1 more differ: first"
    )


def test_a_tensor_too_small_for_a_system_takes_the_equation_of_others() -> None:
    shards = shards_of(2) | {"norm": residues(2, 1, seed=1)}
    report = judged(shards, {name: [weighted(shards[name], "5/6", "5/4")] * 2 for name in NAMES})
    assert report.findings[0].names == tuple(NAMES)
    alone = judged(shards, {"norm": [weighted(shards["norm"], "5/6", "5/4")] * 2})
    assert alone.findings[0].kind == "unexplained"


def test_a_gradient_that_a_rank_lacks() -> None:
    shards = shards_of(2) | {"norm": torch.zeros(2, 4, dtype=torch.int64)}
    report = judged(shards, {"norm": [None, None], "head": [None, weighted(shards["head"], "1", "1")]})
    assert str(report) == "head: no gradient on rank 0"
