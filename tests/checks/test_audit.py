"""Audits: a cast or product of training, of experts too, that another rank repeats. Faulty devices are found."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard

import fp8dist
from fp8dist.checks import audit
from fp8dist.checks.audit import Round, judge
from fp8dist.checks.works import Work, _unpacked
from fp8dist.errors import DivergenceError, SyncError
from fp8dist.modules.casters import SITES
from fp8dist.state.groups import local_part
from tests.support.audited import RECIPES as RECIPES_OF_EXPERTS
from tests.support.audited import bad_casts, bad_grouped_products, bad_products
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.parallel import mesh_of, same_on_all_ranks
from tests.support.ranks import RankPool, on_ranks, run_apart, short_grace
from tests.support.sharded_experts import Job, Routed, build, routed_batch
from tests.support.suite import NIGHTLY, few
from tests.support.training import SmallJob, batch, make_net, parameter_bits, state_bits, unwrapped

RECIPES = {
    "delayed": fp8dist.DelayedScaling(),
    "current": fp8dist.CurrentScaling(),
    "row": fp8dist.RowwiseScaling(),
    "block": fp8dist.BlockScaling(),
    "mx": fp8dist.MXFP8Scaling(),
    "nvfp4": fp8dist.NVFP4Scaling(),
}
SITES_OF_NET = 3 * len(SITES)

PARTS = ("inlet", "experts.gate_up", "experts.down")
"""Of a Linear and a mixture of experts."""
EXPERTS = {
    "experts, ddp": Job(parallel="ddp"),
    "experts, gather": Job(),
    "experts, rows": Job(dim=1),
}
"""How experts are distributed: the last two gather them in FP8, cut along experts and along rows."""


class Trained:
    """A net that trains with audits, or a Linear and a mixture, on other numbers of rows on each rank."""

    def __init__(self, layout: str = "ddp", recipe: str = "delayed", audit_every: int = 1, **settings: Any) -> None:
        settings = {"check_policy": "warn", "audit_every": audit_every, **settings}
        self.layout = layout
        if layout in EXPERTS:
            job = replace(EXPERTS[layout], recipe=RECIPES_OF_EXPERTS[recipe], settings=settings)
            self.net, self.whole, self.manager, self.optimizer = build(job)
        else:
            self._build(layout, recipe, settings)
        self.findings: list[Any] = []
        self.manager.on_event(
            lambda event: self.findings.extend(event.report.findings) if event.kind == "diverged" else None
        )

    def _build(self, layout: str, recipe: str, settings: dict[str, Any]) -> None:
        self.net, world = make_net(), dist.get_world_size()
        self.manager = fp8dist.prepare(self.net, RECIPES[recipe], group=dist.group.WORLD, **settings)
        self.whole: Any = nn.parallel.DistributedDataParallel(self.net) if layout == "ddp" else self.net
        if layout == "fsdp2":
            mesh = mesh_of((world,), ("dp",))
            for part in (self.net.first, self.net.branch, self.net.last, self.net):
                fully_shard(part, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.manager.attach(self.whole, optimizer=self.optimizer)

    def step(self, index: int) -> Tensor:
        """Experts get 1 to 12 rows, and some of them none."""
        if self.layout in EXPERTS:
            x = routed_batch(dist.get_rank(), index, 4)[: 1 + (5 * index + 7 * dist.get_rank()) % 12]
            y = x[:, :32]
        else:
            x, y = batch(dist.get_rank() if self.layout == "ddp" else 0, index)
        loss = (self.whole(x) - y).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    @property
    def audited(self) -> int:
        """Number of this rank's works that were audited."""
        audits = self.manager._cycle.audits
        return 0 if audits is None else audits.done


GOOD, BAD, WORSE = [1, 1], [2, 2], [3, 3]


@pytest.mark.parametrize(
    ("found", "odd", "words"),
    [
        (Round(BAD, GOOD, BAD, GOOD, GOOD), 4, "rank 4 computes wrong repeatedly; ranks 5 and 6 agree"),
        (Round(BAD, GOOD, GOOD, GOOD, GOOD), 4, "rank 4 computes wrong once (transient)"),
        (Round(BAD, GOOD, WORSE, GOOD, GOOD), 4, "rank 4 computes wrong once (transient)"),
        (Round(GOOD, BAD, GOOD, BAD, GOOD), 5, "rank 5, which audits rank 4, computes wrong repeatedly"),
        (Round(GOOD, BAD, GOOD, GOOD, GOOD), 5, "rank 5, which audits rank 4, computes wrong once (transient)"),
        (Round(GOOD, BAD, GOOD, BAD, WORSE), None, "ranks 4, 5 and 6 have three results"),
        (Round(BAD, GOOD, GOOD, GOOD, None), 4, "transient on rank 4: repeated, it gets what rank 5 gets"),
        (Round(GOOD, BAD, GOOD, GOOD, None), 5, "transient on rank 5, which audits"),
        (Round(BAD, GOOD, BAD, GOOD, None), None, "differ repeatedly; of two ranks, none can be blamed"),
        (Round(BAD, GOOD, WORSE, GOOD, None), 4, "rank 4 gets another result each time, and rank 5 the same"),
        (Round(GOOD, BAD, GOOD, WORSE, None), 5, "rank 5 gets another result each time, and rank 4 the same"),
        (Round(BAD, GOOD, WORSE, [4, 4], None), None, "ranks 4 and 5 get other results each time"),
    ],
)
def test_who_is_wrong(found: Round, odd: int | None, words: str) -> None:
    named, text = judge(found, 4, 5, 6)
    assert named == odd
    assert words in text


GEMMS = ("fprop", "dgrad", "wgrad")
CASTS = ("cast of input", "cast of weight", "cast of grad_output")


def _with_faulty_rank(layout: str, recipe: str, faulty: int, works: tuple[str, ...]) -> Any:
    trained, checks = Trained(layout, recipe), []
    bad = bad_casts if works == CASTS else bad_grouped_products if layout in EXPERTS else bad_products
    with captured_log(), bad() if dist.get_rank() == faulty else contextlib.nullcontext():
        for index in range(SITES_OF_NET):
            trained.step(index)
        if layout not in EXPERTS:
            replicas = dist.group.WORLD if layout == "ddp" else None
            checks.append(fp8dist.check(trained.net, policy="warn", group=replicas).diverged)
    found = {(f.name, f.ranks, f.detail.partition(" (")[0]) for f in trained.findings}
    return found, trained.audited, any(checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "recipe", "faulty", "works"),
    [
        ("fsdp2", "delayed", 2, GEMMS),
        ("experts, ddp", "delayed", 1, GEMMS),
        ("experts, ddp", "row", 1, CASTS),
        pytest.param("ddp", "row", 1, CASTS, marks=NIGHTLY),
    ],
)
def test_a_faulty_device_is_found_in_each_work_and_nothing_else_sees_it(
    layout: str, recipe: str, faulty: int, works: tuple[str, ...], three_ranks: RankPool
) -> None:
    """Products of experts are wrong, not of the Linear before them; casts of both."""
    for found, audited, diverged in three_ranks.run(_with_faulty_rank, layout, recipe, faulty, works):
        # The first layer has no input gradient, and rank 2 no expert's weight.
        assert audited >= SITES_OF_NET - (4 if layout in EXPERTS else 2)
        assert {ranks for _, ranks, _ in found} == {(faulty,)}
        names = {name for name, *_ in found}
        assert {name.partition(": ")[2] for name in names} == {*works}
        if layout in EXPERTS:
            parts = PARTS if works == CASTS else PARTS[1:]
            assert names == {f"{part}: {work}" for part in parts for work in works}
        texts = {text for *_, text in found}
        assert any(text.startswith(f"rank {faulty} computes wrong repeatedly; ranks ") for text in texts)
        assert any(text.startswith(f"rank {faulty}, which audits") for text in texts)
        assert not diverged


@pytest.mark.slow
@on_ranks(3)
def test_a_fault_that_does_not_repeat_is_transient() -> None:
    """Products of the step are wrong, and those of the audit right."""
    trained = Trained()
    with captured_log():
        for index in range(len(SITES)):
            x, y = batch(dist.get_rank(), index)
            with bad_products() if dist.get_rank() == 1 else contextlib.nullcontext():
                (trained.whole(x) - y).square().mean().backward()
            trained.optimizer.step()
            trained.optimizer.zero_grad()
    found = {(f.ranks, f.detail.partition(" (")[0]) for f in trained.findings}
    assert found == {((1,), "rank 1 computes wrong once")}


@pytest.mark.parametrize("policy", ["raise", "repair"])
@on_ranks(3)
def test_the_policy_ends_the_job_on_all_ranks_with_one_message(policy: str) -> None:
    trained = Trained(check_policy=policy)
    done: list[int] = []

    def train() -> None:
        for index in range(SITES_OF_NET):
            trained.step(index)
            done.append(index)

    fault = bad_products() if dist.get_rank() == 1 else contextlib.nullcontext()
    text = "^repeated results differ between ranks: audit '"
    with captured_log() as log, fault, pytest.raises(DivergenceError, match=text) as caught:
        train()
    assert {f.ranks for f in caught.value.report.findings} == {(1,)}
    same_on_all_ranks((done, str(caught.value)))
    said = [0] * 3
    dist.all_gather_object(said, len(log))
    assert sum(said) == 1


def _bits(audit_every: int, layout: str, recipe: str) -> Any:
    trained = Trained(layout, recipe, audit_every)
    losses = [trained.step(index).item() for index in range(SITES_OF_NET)]
    local = nn.ParameterDict({n.replace(".", "_"): local_part(p.detach()) for n, p in trained.net.named_parameters()})
    return (losses, parameter_bits(local), state_bits(trained.manager)), trained.findings, trained.audited


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "recipe"),
    few(
        [
            ("ddp", "row"),
            ("ddp", "nvfp4"),
            ("fsdp2", "block"),
            ("experts, gather", "delayed"),
            ("experts, rows", "delayed"),
        ],
        *(("ddp", "row"), ("experts, gather", "delayed")),
    ),
)
def test_audits_change_no_bit_and_find_nothing_on_sound_devices(layout: str, recipe: str, two_ranks: RankPool) -> None:
    """One step for each site, with experts that have no rows, and other numbers of rows on each rank."""
    with_audits = two_ranks.run(_bits, 1, layout, recipe)
    without = two_ranks.run(_bits, 0, layout, recipe)
    assert [results for results, *_ in with_audits] == [results for results, *_ in without]
    assert [findings for _, findings, _ in with_audits] == [[], []]
    assert all(audited >= SITES_OF_NET - 2 for *_, audited in with_audits)


@pytest.mark.parametrize(("layout", "most"), [("ddp", 20_000), ("experts, ddp", 60_000)])
@on_ranks(2)
def test_an_audit_is_three_collectives(layout: str, most: int) -> None:
    """``most``: bytes of a message. Experts have 24,576 weights in float32, and there is a header."""
    trained, got, record = Trained(layout, audit_every=2), [], audit.work_of_call
    sent: list[int] = []

    def recorded(*args: Any) -> Work | None:
        if (work := record(*args)) is not None:
            sent.append(len(work.message))
        return work

    for index in range(12):
        sent.clear()
        with counted_collectives() as counted, mock.patch.object(audit, "work_of_call", recorded):
            trained.step(index)
        of_both: list[Any] = [None, None]
        dist.all_gather_object(of_both, sum(sent))
        calls = [(name, size) for name, size in zip(counted.names, counted.sizes) if name != "all_reduce"]
        if index % 2 == 0:
            assert calls == []
            continue
        (gather, sizes), (exchange, received), (digests, of_digests) = calls
        assert (gather, exchange, digests) == ("all_gather", "all_to_all_single", "all_gather")
        assert (sizes, of_digests) == (16, 32)
        assert received == of_both[1 - dist.get_rank()] < most
        got.append(received > 0)
    assert sum(got) >= len(got) - 1


def _without_the_module() -> Any:
    """Rank 1 never runs the branch, and rank 0 sees no tokens in some steps."""
    trained = Trained()
    for index in range(SITES_OF_NET):
        x, y = batch(dist.get_rank(), index)
        if dist.get_rank() == 0 and index % 4 == 0:
            x, y = x[:0], y[:0]
        loss = (trained.net(x[: 1 + index % 7], skip=dist.get_rank() == 1) - y[: 1 + index % 7]).square().sum()
        loss.backward()
        trained.optimizer.step()
    return trained.findings, trained.audited


@pytest.mark.slow
def test_a_rank_that_does_not_run_the_module_takes_part(three_ranks: RankPool) -> None:
    results = three_ranks.run(_without_the_module)
    assert [findings for findings, _ in results] == [[]] * 3
    audited = [count for _, count in results]
    assert audited[1] < audited[0] < audited[2]


@pytest.mark.slow
@on_ranks(2, timeout=30)
def test_after_join_ranks_audit_the_same_steps() -> None:
    """Rank 1 runs out of data, then all ranks have some. Otherwise the rank that has counted fewer steps enters an
    audit alone, and hangs."""
    trained = Trained(audit_every=4)
    with Join([trained.whole, trained.manager]):
        for index in range((5, 3)[dist.get_rank()]):
            trained.step(index)
    for index in range(8):
        trained.step(index)
    assert trained.audited == 2


def _absent() -> Any:
    """Rank 1 is gone when the second audit begins."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    net = make_net()
    manager = fp8dist.prepare(net, group=group, audit_every=2)
    manager.attach(net)
    for step in range(4):
        net(batch(dist.get_rank(), step)[0]).sum().backward()
        if step == 3 and dist.get_rank() == 1:
            return None
        try:
            with short_grace(0.3):
                manager.step()
        except SyncError as error:
            return str(error)
    return "no error"


@pytest.mark.slow
def test_a_rank_that_is_gone_is_named() -> None:
    text, absent = run_apart(2, _absent)
    assert absent is None
    assert text.startswith("rank 0: StateManager of Net: the audit of step 4 with ranks 0, 1 failed after ")
    assert "Missing of 2 ranks: rank 1 (" in text


@pytest.mark.slow
@pytest.mark.parametrize(("which", "found"), [pytest.param(2, set(), marks=NIGHTLY), (0, {(1, 2)})])
@on_ranks(3)
def test_only_ranks_that_are_alike_audit_each_other(which: int, found: set[tuple[int, ...]]) -> None:
    """Of three ranks, one is unlike the others, and one is faulty. A faulty rank that is alone repeats its own fault,
    so it is not found."""
    trained = Trained()
    audits = trained.manager._cycle.audits
    assert audits is not None
    audits._likeness_word = int(dist.get_rank() == which)
    with captured_log(), bad_products() if dist.get_rank() == 2 else contextlib.nullcontext():
        for index in range(len(SITES)):
            trained.step(index)
    assert {f.ranks for f in trained.findings} == found


def test_one_process_repeats_its_own_work() -> None:
    job = SmallJob(wrap=unwrapped, audit_every=1, check_policy="raise")

    def train() -> None:
        for _ in range(SITES_OF_NET):
            job.step(0)

    train()
    assert job.manager._cycle.audits is not None
    assert job.manager._cycle.audits.done >= SITES_OF_NET - 1
    text = "transient on rank 0, which repeated its own work"
    with captured_log(), pytest.raises(DivergenceError, match=text), bad_products(steady=False):
        train()  # Each product has another wrong element.


@pytest.mark.slow
def test_an_evaluation_may_be_what_runs_first() -> None:
    """In inference mode, with results as large as the digest's work buffers."""
    net = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    manager = fp8dist.prepare(net, audit_every=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    manager.attach(net, optimizer=optimizer)
    x = torch.randn(256, 256)
    for _ in range(2 * len(SITES)):
        with torch.inference_mode():
            net(x)
        net(x).square().mean().backward()
        optimizer.step()
    assert manager._cycle.audits is not None
    assert manager._cycle.audits.done == 2 * len(SITES) - 1


def test_detached_and_switched_off_nothing_is_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    job = SmallJob(wrap=unwrapped, audit_every=1)
    job.manager.detach()
    assert (job.manager._job.tap, job.manager._cycle.audits) == (None, None)
    monkeypatch.setenv("FP8DIST_AUDIT_EVERY", "3")
    assert fp8dist.prepare(make_net()).settings.audit_every == 3
    assert SmallJob(wrap=unwrapped, audit_every=1, enabled=False).manager._cycle.audits is None


# Experts: grouped casts and products ---------------------------------------------------


@pytest.mark.slow
@on_ranks(2)
def test_of_two_ranks_nobody_is_named_and_a_part_of_a_product_names_the_expert() -> None:
    """Rank 1 has a wrong last row, of expert 3, in each fprop and dgrad."""
    trained = Trained("experts, ddp", audit_bytes=1)
    with captured_log(), bad_grouped_products(-1) if dist.get_rank() == 1 else contextlib.nullcontext():
        for _ in range(SITES_OF_NET):
            x = torch.cat([routed_batch(0, 0, 4)[:, :32], torch.tensor([[0.0, 3.0]]).expand(12, 2)], 1)
            (trained.whole(x) - x[:, :32]).square().mean().backward()
            trained.optimizer.step()
            trained.optimizer.zero_grad()
    found = {(f.name.partition(": ")[2], f.detail.rpartition(", ")[2]) for f in trained.findings}
    assert {expert for work, expert in found if work in ("fprop", "dgrad")} == {"expert 3)"}
    assert {(f.ranks, f.reference_rank) for f in trained.findings} == {((0, 1), None)}
    texts = {f.detail.partition(" (")[0].partition("; ")[2] for f in trained.findings}
    assert texts == {"of two ranks, none can be blamed"}


def test_audits_reach_every_expert_of_a_weight_cast_by_block() -> None:
    """A weight [4, n, k] is cast in one call, of which an audit repeats one expert."""
    torch.manual_seed(0)
    model = Routed()
    manager = fp8dist.prepare(model, RECIPES["block"], audit_every=1)
    manager.attach(model)
    audits, experts = manager._cycle.audits, model.experts
    assert audits is not None
    found = set()
    for step in range(1, 24 * SITES_OF_NET):
        audits.begin(step, True)
        if audits._names[0] != "experts.down: cast of weight":
            continue
        model(routed_batch(0, 0, 4))
        (message,) = (work.message for work in audits._recorded.values())
        sent = _unpacked(message)[1]["x"]
        found |= {expert for expert in range(4) if torch.equal(sent, experts.down_proj[expert])}
    assert found == {0, 1, 2, 3}


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


def test_a_step_that_is_not_audited_runs_the_same_operations() -> None:
    off = _operations(0)
    assert off["fp8dist::matmul_grouped"] == 4
    assert _operations(100) == off
    assert sum(_operations(1).values()) > sum(off.values())
