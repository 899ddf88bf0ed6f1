"""The example job with --experts: mixtures instead of MLPs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from launch.train_gpt.mixture import Experts
from tests.support.main_job import ALONE, CHECK, RANKS, STEPS, TINY, Run, assert_refused, finish, start

MIXED = [*TINY, "--experts", "4", "--top-k", "2"]
EXPERTS = "blocks.0.mlp.experts"


def test_experts_add_up_what_each_computes_alone() -> None:
    torch.manual_seed(0)
    experts = Experts(16, 4)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x, weights = torch.randn(5, 16), torch.rand(5, 2)
    chosen = torch.tensor([[0, 3], [3, 0], [1, 0], [0, 1], [3, 1]])  # No token for expert 2.
    expected = [
        sum(
            weight * (experts.down_proj[e] @ F.gelu(experts.up_proj[e] @ row, approximate="tanh"))
            for weight, e in zip(of, which.tolist())
        )
        for row, of, which in zip(x, weights, chosen)
    ]
    torch.testing.assert_close(experts(x, chosen, weights), torch.stack(expected))


def test_mistakes() -> None:
    mistakes = {
        "--top-k needs --experts": ["--top-k", "2"],
        "--top-k 3 is more than the --experts 2": ["--experts", "2", "--top-k", "3"],
        "--experts in FP8 is not for --parallel fsdp1": ["--experts", "2", "--parallel", "fsdp1"],
    }
    for message, flags in mistakes.items():
        assert_refused(start(CHECK, *flags), message)


@pytest.fixture(scope="module")
def delayed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on two ranks that saves checkpoints, compares its ranks and watches its slots."""
    flags = ["--save-every", "5", "--keep", "9", "--check-every", "4", "--watch-every", "4", "--watch-ranks"]
    return finish(tmp_path_factory.mktemp("run"), RANKS, *MIXED, *flags)


@pytest.mark.slow
def test_two_ranks_share_the_state_of_their_experts(delayed: Run) -> None:
    slots = 3 * 2 + 3 * 2 * 4  # qkv and attention_out; two products of four experts. Routers are not in FP8.
    assert delayed.summary["fp8_slots"] == slots
    assert delayed.summary["fp8_collectives_per_step"] == 2  # The histories of experts are shorter: an arena of theirs.
    assert delayed.summary["fp8_state_identical"] is True
    assert delayed.summary["parameters_identical"] is True
    assert delayed.summary["checks"] == 4
    assert delayed.losses[-1] < delayed.losses[0]
