"""Audits of experts: grouped casts and products of training that another rank repeats."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp8dist
from fp8dist.checks.works import _unpacked
from fp8dist.modules.linear_slots import SITES
from tests.support.audited import RECIPES, bad_casts, bad_grouped_products
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.ranks import RankPool, on_ranks
from tests.support.sharded import full
from tests.support.sharded_experts import Job, Routed, build, routed_batch
from tests.support.states import state_of
from tests.support.suite import few
from tests.support.training import bits

PARTS = ("inlet", "experts.gate_up", "experts.down")
SITES_OF_MODEL = len(PARTS) * len(SITES)
LAYOUTS = {"ddp": Job(parallel="ddp"), "fsdp2": Job(fp8_all_gather=False), "gather": Job(), "rows": Job(dim=1)}
"""How the experts are distributed: the last two gather them in FP8, cut along experts and along rows."""


class Trained:
    """A Linear and a mixture that train with audits, on other numbers of rows on each rank."""

    def __init__(self, layout: str = "ddp", recipe: str = "delayed", audit_every: int = 1, **settings: Any) -> None:
        settings = {"check_policy": "warn", "audit_every": audit_every, **settings}
        job = replace(LAYOUTS[layout], recipe=RECIPES[recipe], settings=settings)
        self.model, self.called, self.manager, self.optimizer = build(job)
        self.findings: list[Any] = []
        self.manager.on_event(
            lambda event: self.findings.extend(event.report.findings) if event.kind == "diverged" else None
        )

    def step(self, index: int) -> float:
        """Train on 1 to 12 rows. Some experts have none of them."""
        x = routed_batch(dist.get_rank(), index, 4)[: 1 + (5 * index + 7 * dist.get_rank()) % 12]
        loss = (self.called(x) - x[:, :32]).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    @property
    def audited(self) -> int:
        """Number of this rank's works that were audited."""
        audits = self.manager._cycle.audits
        return 0 if audits is None else audits.done


def _with_faulty_rank(layout: str, recipe: str, what: str) -> Any:
    trained = Trained(layout, recipe)
    fault: Any = contextlib.nullcontext()
    if dist.get_rank() == 1:
        fault = bad_grouped_products() if what == "products" else bad_casts()
    with captured_log(), fault:
        for index in range(SITES_OF_MODEL):
            trained.step(index)
    return [(f.name, f.ranks, f.detail) for f in trained.findings], trained.audited


@pytest.mark.slow
@pytest.mark.parametrize("layout", few(["ddp", "gather"], "ddp"))
def test_grouped_products_of_a_faulty_device_are_found(layout: str, three_ranks: RankPool) -> None:
    for found, audited in three_ranks.run(_with_faulty_rank, layout, "delayed", "products"):
        assert audited >= SITES_OF_MODEL - 4  # The first Linear has no input gradient, and rank 2 no expert's weight.
        assert {ranks for _, ranks, _ in found} == {(1,)}
        assert {name for name, *_ in found} == {
            f"{part}: {gemm}" for part in PARTS[1:] for gemm in ("fprop", "dgrad", "wgrad")
        }
        texts = [detail for *_, detail in found]
        assert any(text.startswith("rank 1 computes wrong repeatedly; ranks 2 and 0 agree (matmul_g") for text in texts)
        assert any(text.startswith("rank 1, which audits rank 0, computes wrong repeatedly") for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", few(["delayed", "row", "block"], "block"))
def test_grouped_casts_of_a_faulty_device_are_found(recipe: str, three_ranks: RankPool) -> None:
    for found, _ in three_ranks.run(_with_faulty_rank, "ddp", recipe, "casts"):
        assert {ranks for _, ranks, _ in found} == {(1,)}
        roles = ("input", "weight", "grad_output")
        assert {name for name, *_ in found} == {f"{part}: cast of {role}" for part in PARTS for role in roles}


@pytest.mark.slow
@on_ranks(3)
def test_a_part_of_a_product_names_the_expert() -> None:
    """Rank 1 has a wrong last row, of expert 3, in each fprop and dgrad."""
    trained = Trained(audit_bytes=1)
    with captured_log(), bad_grouped_products(-1) if dist.get_rank() == 1 else contextlib.nullcontext():
        for _ in range(2 * SITES_OF_MODEL):
            x = torch.cat([routed_batch(0, 0, 4)[:, :32], torch.tensor([[0.0, 3.0]]).expand(12, 2)], 1)
            (trained.called(x) - x[:, :32]).square().mean().backward()
            trained.optimizer.step()
            trained.optimizer.zero_grad()
    found = {(f.name.partition(": ")[2], f.detail.rpartition(", ")[2]) for f in trained.findings}
    assert {expert for work, expert in found if work in ("fprop", "dgrad")} == {"expert 3)"}


def _bits(layout: str, recipe: str, audit_every: int) -> Any:
    trained = Trained(layout, recipe, audit_every)
    losses = [trained.step(index) for index in range(SITES_OF_MODEL)]
    parameters = {name: bits(parameter) for name, parameter in full(trained.model).items()}
    return (losses, parameters, state_of(trained.manager)), trained.findings, trained.audited


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "recipe"),
    few([("gather", "delayed"), ("rows", "delayed"), ("ddp", "row"), ("fsdp2", "block")], ("gather", "delayed")),
)
def test_sound_devices_have_no_finding_and_the_same_bits(layout: str, recipe: str, two_ranks: RankPool) -> None:
    """One step for each site, with experts that have no rows, and other numbers of rows on each rank."""
    with_audits = two_ranks.run(_bits, layout, recipe, 1)
    without = two_ranks.run(_bits, layout, recipe, 0)
    assert [results for results, *_ in with_audits] == [results for results, *_ in without]
    assert [findings for _, findings, _ in with_audits] == [[], []]
    assert all(audited >= SITES_OF_MODEL - 1 for *_, audited in with_audits)


@pytest.mark.slow
def test_audits_reach_every_expert_of_a_weight_cast_by_block() -> None:
    """A weight [4, n, k] is cast in one call, of which an audit repeats one expert."""
    torch.manual_seed(0)
    model = Routed()
    manager = fp8dist.prepare(model, RECIPES["block"], audit_every=1)
    manager.attach(model)
    audits, experts = manager._cycle.audits, model.experts
    assert audits is not None
    found = set()
    for step in range(1, 24 * SITES_OF_MODEL):
        audits.begin(step, True)
        if audits._names[0] != "experts.down: cast of weight":
            continue
        model(routed_batch(0, 0, 4))
        (message,) = (work.message for work in audits._recorded.values())
        sent = _unpacked(message)[1]["x"]
        found |= {expert for expert in range(4) if torch.equal(sent, experts.down_proj[expert])}
    assert found == {0, 1, 2, 3}


@on_ranks(2)
def test_an_audit_is_three_collectives() -> None:
    trained = Trained(audit_every=2)
    steps = []
    for index in range(12):
        with counted_collectives() as calls:
            trained.step(index)
        steps.append([(name, size) for name, size in zip(calls.names, calls.sizes) if name != "all_reduce"])
    for index, calls in enumerate(steps):
        assert [name for name, _ in calls] == ["all_gather", "all_to_all_single", "all_gather"] * (index % 2)
    sizes = [[size for _, size in calls] for calls in steps[1::2]]
    assert all((first, last) == (16, 32) for first, _, last in sizes)
    assert all(received < 60_000 for _, received, _ in sizes)  # 24,576 weights in float32 and a header at most.
    assert sum(received > 0 for _, received, _ in sizes) >= len(sizes) - 1


def _operations(audit_every: int) -> Counter[str]:
    """Return how often a training step called each operation, inside of others, too."""
    torch.manual_seed(0)
    model: nn.Module = Routed()
    manager = fp8dist.prepare(model, audit_every=audit_every)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    manager.attach(model, optimizer=optimizer)
    x = routed_batch(0, 0, 4)
    for _ in range(2):
        with torch.autograd.profiler.profile() as seen:
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Counter({event.key: event.count for event in seen.key_averages()})


@pytest.mark.slow
def test_a_step_that_is_not_audited_runs_the_same_operations() -> None:
    off = _operations(0)
    assert off["fp8dist::matmul_grouped"] == 4
    assert _operations(100) == off
    assert sum(_operations(1).values()) > sum(off.values())


def test_attach_says_nothing_of_experts_that_it_audits() -> None:
    model = Routed()
    with captured_log() as log:
        fp8dist.prepare(model, audit_every=2).attach(model)
    assert log == []
