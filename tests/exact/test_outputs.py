"""Where a forward leaves the reference: on residues made here."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8dist.exact.field import P
from fp8dist.exact.outputs import judge_outputs
from tests.exact.test_solver import residues

REFERENCE = {
    "norm": list(residues(2, 3, 4, 8, seed=1)),  # Two calls, 3 x 4 tokens.
    "qkv": list(residues(2, 3, 4, 12, seed=2)),
    "out": list(residues(2, 3, 4, 8, seed=3)),
    "mlp": list(residues(2, 3, 4, 8, seed=4)),
    "loss": list(residues(2, seed=5)),
}


def split(outputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return two summands of each output."""
    first = [residues(*output.shape, seed=9) for output in outputs]
    return first, [(output - each) % P for output, each in zip(outputs, first)]


def right() -> list[dict[str, list[Tensor]]]:
    """Return what two ranks compute under tensor parallelism: parts of rows, of columns, and summands."""
    summands = split(REFERENCE["out"])
    fused = torch.arange(12).reshape(3, 2, 2)  # Of q, k and v, two columns each.
    return [
        {
            "norm": [call[:, 2 * rank : 2 * rank + 2] for call in REFERENCE["norm"]],
            "qkv": [call[..., fused[:, rank].flatten()] for call in REFERENCE["qkv"]],
            "out": summands[rank],
            "mlp": [call[..., 4 * rank : 4 * rank + 4].reshape(12, 4) for call in REFERENCE["mlp"]],
            "loss": REFERENCE["loss"],
            "unknown": [residues(3)],
        }
        for rank in range(2)
    ]


def sentence(*ranks: dict[str, list[Tensor]]) -> str:
    """Return the sentence about the first wrong output."""
    finding = judge_outputs(REFERENCE, ranks)
    assert finding is not None
    return finding.sentence


def test_parts_are_right_and_so_is_a_first_call_that_learns_shapes() -> None:
    first, second = right()
    assert judge_outputs(REFERENCE, [first, second]) is None
    second["mlp"] = [residues(3, 4, 8, seed=6), *REFERENCE["mlp"]]
    assert judge_outputs(REFERENCE, [first, second]) is None


def test_the_first_wrong_output_is_compared_with_the_nearest_call() -> None:
    """Summands, factors and biases are in test_planted_bugs.py."""
    first, second = right()
    assert sentence(first, second | {"loss": [REFERENCE["loss"][0] + 1]}).startswith("loss: the first wrong output")
    second["qkv"] = [residues(3, 4, 6, seed=8)] * 2
    second["mlp"] = second["qkv"]
    assert sentence(first, second) == (
        "qkv: the first wrong output, on rank 1. All outputs before it are the reference's"
    )
    second["norm"] = [call.clone() for call in REFERENCE["norm"]]
    second["norm"][1][2, 1] = residues(8, seed=8)
    assert sentence(first, second) == (
        "norm: the first wrong output, on rank 1 (8 of 96 elements differ: [2, 1, 0], [2, 1, 1], [2, 1, 2] and 5 more; "
        "all in slice 1 of dim 1). All outputs before it are the reference's"
    )
