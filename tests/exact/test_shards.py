"""Which parts of parameters ranks hold, and which parameters are wrong: on residues made here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fp8dist.errors import ConfigurationError
from fp8dist.exact.placement import HeldPart
from fp8dist.exact.reference import Reference
from fp8dist.exact.shards import judge_parameters, swapped
from tests.exact.test_solver import residues


def reference() -> Reference:
    """Return a reference of a tied embedding, two Linears, and biases of zeros."""
    parameters = {
        "embed.weight": residues(8, 4, seed=1),
        "up.weight": residues(8, 4, seed=2),
        "up.bias": torch.zeros(8, dtype=torch.int64),
        "down.weight": residues(4, 8, seed=3),
    }
    return Reference(parameters, {}, {}, {"head.weight": "embed.weight"}, [])


def cut(rank: int, ranks: int = 2) -> dict[str, Tensor]:
    """Return what a rank holds under tensor parallelism."""
    whole = reference().parameters
    parts = {
        "up.weight": whole["up.weight"].chunk(ranks)[rank],
        "up.bias": whole["up.bias"].chunk(ranks)[rank],
        "down.weight": whole["down.weight"].chunk(ranks, 1)[rank],
    }
    return {"embed.weight": whole["embed.weight"], **parts}


def sentences(*held: dict[str, Tensor]) -> list[str]:
    """Return what is wrong with what ranks hold."""
    return [finding.sentence for finding in judge_parameters(reference(), held)[0]]


def test_parts_of_two_ranks() -> None:
    findings, parts = judge_parameters(reference(), [cut(0), cut(1)])
    assert not findings
    assert parts[1] == {
        "embed.weight": HeldPart(None),
        "up.weight": HeldPart(0, (4, 5, 6, 7)),
        "up.bias": HeldPart(0, (4, 5, 6, 7)),  # As the weight of its module: zeros do not show it.
        "down.weight": HeldPart(1, (4, 5, 6, 7)),
    }
    assert swapped(reference(), parts) is None


def test_names_of_a_tie() -> None:
    tied = cut(1)
    tied["head.weight"] = tied.pop("embed.weight")
    assert sentences(cut(0), tied) == []
    assert sentences({"embed.weight": reference().parameters["embed.weight"]}, {}) == [
        "no rank holds the parameter up.weight",
        "no rank holds the parameter up.bias",
        "no rank holds the parameter down.weight",
    ]


def test_values_that_the_reference_has_not_and_those_in_other_places() -> None:
    other = cut(1)["up.weight"].clone()
    other[2, 1] += 1
    whole = reference().parameters["embed.weight"]
    rolled, changed = whole.roll(4, 0), whole.clone()
    changed[0, 0] += 1
    assert sentences(cut(0) | {"embed.weight": changed}, cut(1) | {"up.weight": other}) == [
        "the parameter embed.weight is not the reference's: rank 0: 1 of 32 elements differ: [0, 0]",
        "the parameter up.weight is not the reference's: rank 1: it has slices of dim 0 that the reference has not",
    ]
    assert sentences(cut(0), cut(1) | {"embed.weight": rolled}) == [
        "the parameter embed.weight is not the reference's: rank 1: in place of slices 0 to 7 of dim 0 are the "
        "reference's slices 4 to 7, 0 to 3"
    ]


def test_names_and_shapes_that_do_not_fit() -> None:
    for name, shape, words in [
        ("up.wieght", (4, 4), "has no parameter 'up.wieght', which rank 0 holds .did you mean 'up.weight'"),
        ("up.weight", (4, 2), r"up.weight has the shape \(4, 2\) on rank 0: no part of \(8, 4\)"),
    ]:
        with pytest.raises(ConfigurationError, match=words):
            judge_parameters(reference(), [{name: residues(*shape)}])
