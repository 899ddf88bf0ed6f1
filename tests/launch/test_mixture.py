"""The lab with --experts: mixtures instead of MLPs. Faults in them are in test_faults.py."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.support.lab import mixture as mixture_module
from tests.support.lab.mixture import Experts, MixtureGPT
from tests.support.main_job import RANKS, STEPS, TINY, Run, Runs
from tests.support.suite import few

MIXED = [*TINY, "--experts", "4", "--top-k", "2"]
WATCHED = [*MIXED, "--check-every", "4", "--watch-every", "4", "--watch-ranks"]
EXPERTS = "blocks.0.mlp.experts"

VISITS = 2 * 2 * 4 * 32
"""Visits of a token, ranks, sequences, bytes of each."""


def experts(run: Run) -> list[dict[str, Any]]:
    """Return the lines of a run's experts.jsonl."""
    return [json.loads(line) for line in (run.out / "experts.jsonl").read_text().splitlines()]


def test_experts_add_up_what_each_computes_alone() -> None:
    torch.manual_seed(0)
    made = Experts(16, 4)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    x, weights = torch.randn(5, 16), torch.rand(5, 2)
    chosen = torch.tensor([[0, 3], [3, 0], [1, 0], [0, 1], [3, 1]])  # No token for expert 2.
    expected = [
        sum(
            weight * (made.down_proj[e] @ F.gelu(made.up_proj[e] @ row, approximate="tanh"))
            for weight, e in zip(of, which.tolist())
        )
        for row, of, which in zip(x, weights, chosen)
    ]
    torch.testing.assert_close(made(x, chosen, weights), torch.stack(expected))


@pytest.mark.slow
def test_two_ranks_share_the_state_of_their_experts_and_record_their_tokens(runs: Runs) -> None:
    run = runs(RANKS, *WATCHED)
    slots = 3 * 2 + 3 * 2 * 4  # qkv and attention_out; two products of four experts. Routers are not in FP8.
    syncs = 2 * STEPS  # The histories of experts are shorter: they have an arena of their own.
    watched = 2 * (STEPS // 4)  # Maxima of slots, sums of tokens.
    assert run.summary["fp8_slots"] == slots
    assert run.summary["fp8_collectives_per_step"] == (syncs + watched) / STEPS
    assert run.summary["fp8_state_identical"] is run.summary["parameters_identical"] is True
    assert run.summary["checks"] == 3
    assert run.losses[-1] < run.losses[0]
    lines = experts(run)
    assert [(line["step"], line["module"]) for line in lines] == [(step, EXPERTS) for step in (4, 8, 12)]
    assert [sum(line["tokens"]) for line in lines] == [VISITS] * 3
    due = [(line["step"], line["idle_experts"]) for line in run.lines if "idle_experts" in line]
    assert due == [(line["step"], line["tokens"].count(0)) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("flags", few(["fsdp2 --save-every 6", "hsdp"]))
def test_sharded_mixtures_learn_what_ddp_learns(runs: Runs, flags: str) -> None:
    """``tests/parallel/test_fsdp2_experts.py`` has FSDP2's bits, for every change."""
    run = runs(RANKS, *WATCHED, "--parallel", *flags.split())
    assert run.losses == pytest.approx(runs(RANKS, *WATCHED).losses, rel=1e-5)
    assert run.summary["fp8_state_identical"] is run.summary["parameters_identical"] is True
    assert [sum(line["tokens"]) for line in experts(run)] == [VISITS] * 3


OTHERS = (
    f"--recipe block --override {EXPERTS}.up_proj=delayed",
    "--recipe rowwise",
    "--precision fp32 --parallel fsdp1",
)


@pytest.mark.slow
@pytest.mark.parametrize("flags", few(OTHERS, OTHERS[0]))
def test_every_precision_learns_like_fp8(runs: Runs, flags: str) -> None:
    run, delayed = runs(RANKS, *MIXED, *flags.split()), runs(RANKS, *WATCHED)
    assert run.losses == pytest.approx(delayed.losses, rel=5e-3)  # Another precision, so other roundings.
    assert run.losses != delayed.losses
    assert run.summary["parameters_identical"] is True


def test_the_imbalance_moves_routers_and_not_the_loss() -> None:
    torch.manual_seed(0)
    model = MixtureGPT(layers=1, width=16, heads=2, context=8, experts=4, top_k=1)
    tokens = torch.randint(256, (2, 8))
    router = model.blocks[0].mlp.router.weight
    gradients = []
    for balance in (0.0, mixture_module.BALANCE):
        with mock.patch.object(mixture_module, "BALANCE", balance):
            loss = model(tokens, tokens)
        (gradient,) = torch.autograd.grad(loss, router)
        gradients.append((loss.item(), gradient))
    (plain, without), (balanced, with_it) = gradients
    assert balanced == plain == model.eval()(tokens, tokens).item()
    mixture = model.train().blocks[0].mlp
    model(tokens, tokens)
    (expected,) = torch.autograd.grad(mixture_module.BALANCE * mixture.imbalance, router)
    torch.testing.assert_close(with_it - without, expected)
