"""The solver modulo P, and where parts of a tensor are found."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from fp8dist.exact.field import P
from fp8dist.exact.placement import HeldPart, displaced, part_of
from fp8dist.exact.reference import Reference
from fp8dist.exact.shards import cut_dim, judge_parameters
from fp8dist.exact.solver import combined, fraction_text, small_fraction, solve


def residues(*shape: int, seed: int = 0) -> Tensor:
    """Return random canonical residues, int64."""
    return torch.randint(P, shape, generator=torch.Generator().manual_seed(seed))


def residue(fraction: Fraction) -> int:
    """Return the residue of a fraction."""
    return fraction.numerator * pow(fraction.denominator, -1, P) % P


def test_a_residue_shows_its_fraction_or_itself() -> None:
    for text in ["0", "1", "-1", "2", "1/2", "5/6", "-3/7", "91/89", "-90/7", "1/128"]:
        assert small_fraction(residue(Fraction(text))) == Fraction(text)
        assert fraction_text(residue(Fraction(text))) == text
    for numerator in range(-40, 41):  # No two of them have the same residue.
        for denominator in range(1, 41):
            fraction = Fraction(numerator, denominator)
            assert small_fraction(residue(fraction)) == fraction
    assert small_fraction(residue(Fraction(95, 86))) == Fraction(95, 86)  # 95 * 86 is the limit,
    assert small_fraction(8171) is None  # and this is one more.
    shown = [small_fraction(each) for each in residues(1000).tolist()]
    assert sum(each is not None for each in shown) < 130
    assert fraction_text(residues(1000).tolist()[shown.index(None)]).startswith("the residue ")


def test_solve_refuses_what_has_no_answer_or_several() -> None:
    first, second, other = residues(3, 20)
    assert solve([first, second], other) is None
    assert solve([first, 3 * first % P], 2 * first % P) is None
    assert solve([first[:2], second[:2]], other[:2]) is None  # Two equations would always have an answer.
    assert solve([first * 0], first) is None


def test_zeros_are_no_evidence_and_need_no_coefficient() -> None:
    first, second = residues(2, 20)
    first[3:] = second[3:] = 0
    assert solve([first, second], combined([2, 3], [first, second])) is None  # Three equations for two unknowns.
    assert solve([second, first * 0], 5 * second % P) == [5, 1]


def test_a_part_is_found_by_its_values() -> None:
    whole = residues(12, 6)
    fused = torch.tensor([0, 1, 4, 5, 8, 9])  # As in a fused q, k and v of two ranks.
    assert part_of(whole[fused], whole, 0) == HeldPart(0, tuple(fused.tolist()))
    assert part_of(whole[:, 3:], whole, 1) == HeldPart(1, (3, 4, 5))
    assert part_of(residues(6, 6, seed=3), whole, 0) is None
    assert bool((HeldPart(1, (3, 4, 5)).of(whole) == whole[:, 3:]).all())
    assert HeldPart(None).of(whole) is whole


def test_equal_slices_follow_the_other_parts_of_the_rank() -> None:
    zeros = torch.zeros(12, dtype=torch.int64)
    fused = HeldPart(0, (2, 3, 6, 7, 10, 11))
    assert part_of(zeros[:6], zeros, 0, [fused]) == fused
    assert part_of(zeros[:4], zeros, 0, [fused]) == HeldPart(0, (0, 1, 2, 3))
    assert part_of(zeros[:4], zeros, 0, [HeldPart(1, (2, 3))]) == HeldPart(0, (4, 5, 6, 7))


def test_zeros_follow_the_weight_of_their_module() -> None:
    weights = {"a.weight": residues(8, 4), "b.weight": residues(8, 4, seed=1)}
    whole = {"a.bias": torch.zeros(8, dtype=torch.int64), **weights}
    halves = [{name: tensor.chunk(2)[rank ^ (name == "b.weight")] for name, tensor in whole.items()} for rank in (0, 1)]
    findings, (parts, _) = judge_parameters(Reference(whole, {}, {}, {}, []), halves)
    assert findings == []
    first, last = HeldPart(0, (0, 1, 2, 3)), HeldPart(0, (4, 5, 6, 7))
    assert parts == {"a.bias": first, "a.weight": first, "b.weight": last}


def test_the_cut_dim_follows_from_the_shapes() -> None:
    shapes = [(4, 6), (8, 3), (8, 6), (4, 3), (9, 6), (8,)]
    assert [cut_dim(part, (8, 6)) for part in shapes] == [0, 1, None, None, None, None]


def test_slices_in_other_places() -> None:
    whole = residues(8, 4)
    found = displaced(whole[torch.tensor([0, 1, 6, 7, 4, 5, 2, 3])], whole, HeldPart(None))
    assert found == "in place of slices 2 to 3, 6 to 7 of dim 0 are the reference's slices 6 to 7, 2 to 3"
    found = displaced(whole[4:], whole, HeldPart(0, (0, 1, 2, 3)))
    assert found == "in place of slices 0 to 3 of dim 0 are the reference's slices 4 to 7"
    assert [displaced(of, whole, HeldPart(None)) for of in (whole, residues(8, 4, seed=5), whole * 0)] == [None] * 3
