"""The example job with --experts: mixtures instead of MLPs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from tests.support.lab import mixture as mixture_module
from tests.support.lab.mixture import Experts, Mixture, MixtureGPT
from tests.support.main_job import RANKS, STEPS, TINY, Run, Runs, stop
from tests.support.suite import NIGHTLY, few

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
def test_two_ranks_share_the_state_of_their_experts(runs: Runs) -> None:
    delayed = runs(RANKS, *WATCHED)
    slots = 3 * 2 + 3 * 2 * 4  # qkv and attention_out; two products of four experts. Routers are not in FP8.
    syncs = 2 * STEPS  # The histories of experts are shorter: they have an arena of their own.
    watched = 2 * (STEPS // 4)  # Maxima of slots, sums of tokens.
    assert delayed.summary["fp8_slots"] == slots
    assert delayed.summary["fp8_collectives_per_step"] == (syncs + watched) / STEPS
    assert delayed.summary["fp8_state_identical"] is True
    assert delayed.summary["parameters_identical"] is True
    assert delayed.summary["checks"] == 3
    assert delayed.losses[-1] < delayed.losses[0]


@pytest.mark.slow
def test_tokens_of_experts_are_recorded(runs: Runs) -> None:
    delayed = runs(RANKS, *WATCHED)
    lines = experts(delayed)
    assert [(line["step"], line["module"]) for line in lines] == [(step, EXPERTS) for step in (4, 8, 12)]
    for line in lines:
        assert sum(line["tokens"]) == VISITS
    due = [line for line in delayed.lines if "idle_experts" in line]
    assert [line["step"] for line in due] == [4, 8, 12]
    for line, seen in zip(due, lines):
        assert line["idle_experts"] == seen["tokens"].count(0)


@pytest.mark.slow
@pytest.mark.parametrize("flags", few(["fsdp2 --save-every 6", "hsdp"], "fsdp2 --save-every 6"))
def test_sharded_mixtures_learn_what_ddp_learns(runs: Runs, flags: str) -> None:
    run = runs(RANKS, *WATCHED, "--parallel", *flags.split())
    assert run.losses == pytest.approx(runs(RANKS, *WATCHED).losses, rel=1e-5)
    assert run.summary["fp8_state_identical"] is True
    assert run.summary["parameters_identical"] is True
    for line in experts(run):
        assert sum(line["tokens"]) == VISITS


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        *(pytest.param(flags.split(), marks=NIGHTLY) for flags in ("--precision bf16", "--recipe current")),
        pytest.param(["--precision", "fp32", "--parallel", "fsdp1"], marks=NIGHTLY),
        pytest.param(["--recipe", "rowwise"], marks=NIGHTLY),
        ["--recipe", "block", "--override", f"{EXPERTS}.up_proj=delayed"],
    ],
    ids=lambda flags: flags[1],
)
def test_every_precision_learns_like_fp8(runs: Runs, flags: list[str]) -> None:
    run, delayed = runs(RANKS, *MIXED, *flags), runs(RANKS, *WATCHED)
    assert run.losses == pytest.approx(delayed.losses, rel=5e-3)  # Another precision, so other roundings.
    assert run.losses != delayed.losses
    assert run.summary["parameters_identical"] is True


@pytest.mark.slow
def test_a_flipped_bit_of_an_expert_is_found(tmp_path: Path) -> None:
    stopped = stop(tmp_path, "--experts", "4", "--check-every", "4", "--inject", "weight:1:3")
    assert f"{EXPERTS}.up_proj" in {finding["name"] for finding in stopped.findings}


@pytest.mark.slow
@pytest.mark.parametrize(("step", "gemm"), few([(4, "dgrad"), (11, "wgrad")], (4, "dgrad")))
def test_a_wrong_product_of_experts_is_found_by_its_audit(step: int, gemm: str, tmp_path: Path) -> None:
    """Of the last experts, whose products are the first of a backward. Audits visit them in these steps."""
    flags = ["--experts", "4", "--steps", str(step + 1), "--audit-every", "1", "--inject", f"product:1:{step}:{gemm}"]
    (finding,) = stop(tmp_path, *flags, NPROC="3").findings
    assert (finding["step"], finding["name"], finding["ranks"]) == (step, f"{EXPERTS}.down: {gemm}", [1])
    assert finding["detail"].startswith("rank 1 computes wrong once (transient); ranks 2 and 0 agree (matmul_grouped")


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


def test_the_imbalance_is_least_if_all_experts_have_equally_many_tokens() -> None:
    mixture = Mixture(width=4, experts=4, top_k=1)
    torch.nn.init.zeros_(mixture.experts.up_proj)
    torch.nn.init.zeros_(mixture.experts.down_proj)
    torch.nn.init.eye_(mixture.router.weight).data.mul_(100)
    mixture(torch.eye(4)[None])
    assert mixture.imbalance.item() == pytest.approx(1.0)
    mixture(torch.eye(4)[[0, 0, 0, 0]][None])
    assert mixture.imbalance.item() == pytest.approx(4.0)
