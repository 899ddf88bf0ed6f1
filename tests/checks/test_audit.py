"""Audits: a cast or product of training that another rank repeats. Faulty devices are found, sound ones are not."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import fp8dist
from fp8dist.checks import audit
from fp8dist.checks.audit import Round, judge
from fp8dist.errors import DivergenceError, SyncError
from fp8dist.modules.linear_slots import SITES
from fp8dist.state.groups import local_part
from tests.support.audited import bad_casts, bad_products
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.parallel import mesh_of, same_on_all_ranks
from tests.support.ranks import RankPool, on_ranks
from tests.support.suite import few
from tests.support.training import batch, make_net, parameter_bits, state_bits

RECIPES = {
    "delayed": fp8dist.DelayedScaling(),
    "current": fp8dist.CurrentScaling(),
    "row": fp8dist.RowwiseScaling(),
    "block": fp8dist.BlockScaling(),
    "mx": fp8dist.MXFP8Scaling(),
}
LINEARS = 3
SITES_OF_NET = LINEARS * len(SITES)


class Trained:
    """A net that trains with audits."""

    def __init__(self, layout: str = "ddp", recipe: str = "delayed", audit_every: int = 1, **options: Any) -> None:
        net = make_net()
        world = dist.get_world_size()
        group: Any = dist.group.WORLD
        whole: nn.Module = net
        options = {"check_policy": "warn", "audit_every": audit_every, **options}
        self.manager = fp8dist.prepare(net, RECIPES[recipe], group=group, **options)
        if layout == "ddp":
            whole = nn.parallel.DistributedDataParallel(net)
        elif layout == "tp":
            mesh = mesh_of((world,), ("tp",))
            whole_output = ColwiseParallel(output_layouts=Replicate())
            parallelize_module(net, mesh, {"first": whole_output, "branch": whole_output})
        elif layout in ("fsdp2", "hsdp"):
            mesh = mesh_of((world,), ("dp",)) if layout == "fsdp2" else mesh_of((2, world // 2), ("replicate", "shard"))
            for part in (net.first, net.branch, net.last):
                fully_shard(part, mesh=mesh)
            fully_shard(net, mesh=mesh)
        self.net, self.whole = net, whole
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        self.manager.attach(whole, optimizer=self.optimizer)
        self.reports: list[Any] = []
        self.manager.on_event(lambda event: self.reports.append(event.report) if event.kind == "diverged" else None)

    def step(self, index: int) -> Tensor:
        x, y = batch(0 if self.same_data else dist.get_rank(), index)
        loss = (self.whole(x) - y).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    @property
    def same_data(self) -> bool:
        return not isinstance(self.whole, nn.parallel.DistributedDataParallel)

    @property
    def audited(self) -> int:
        audits = self.manager._cycle.audits
        assert audits is not None
        return audits.done


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


def test_alone_only_what_does_not_repeat_is_seen() -> None:
    assert judge(Round(BAD, GOOD, GOOD, GOOD, None), 4, 4, 4) == (
        4,
        "transient on rank 4, which repeated its own work: another result",
    )


@pytest.mark.parametrize("modules", [1, 2, 3, 7, 32, 224])
def test_all_sites_come_up(modules: int) -> None:
    named = [(f"layer{i:03}", 6 * i) for i in range(modules)]
    count = modules * len(SITES)
    chosen = [audit._chosen(named, number) for number in range(5, 5 + count)]
    assert sorted(site for *_, site in chosen) == list(range(count))
    assert all(first == dict(named)[fqn] + work for fqn, work, first in chosen)


def _with_faulty_rank(layout: str, recipe: str, faulty: int, what: str) -> Any:
    trained = Trained(layout, recipe)
    fault: Any = contextlib.nullcontext()
    if dist.get_rank() == faulty:
        fault = bad_products() if what == "products" else bad_casts()
    checks = []
    with captured_log(), fault:
        for index in range(SITES_OF_NET):
            trained.step(index)
            checks.append(fp8dist.check(trained.net, policy="warn", group=_replicas(layout)).diverged)
    found = {
        (finding.name.partition(": ")[2], finding.ranks, finding.reference_rank, finding.detail.partition(" (")[0])
        for report in trained.reports
        for finding in report.findings
    }
    return found, trained.audited, any(checks)


def _replicas(layout: str) -> Any:
    return dist.group.WORLD if layout == "ddp" else None


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "faulty"), few([("ddp", 0), ("fsdp2", 2), ("tp", 2)], ("fsdp2", 2)))
def test_products_of_a_faulty_device_are_found_and_nothing_else_sees_them(
    layout: str, faulty: int, three_ranks: RankPool
) -> None:
    for found, audited, diverged in three_ranks.run(_with_faulty_rank, layout, "delayed", faulty, "products"):
        assert audited >= SITES_OF_NET - 2  # The first layer has no input gradient.
        assert {rank for _, ranks, _, _ in found for rank in ranks} == {faulty}
        assert {name for name, *_ in found} == {"fprop", "dgrad", "wgrad"}
        texts = {text for *_, text in found}
        assert any(text.startswith(f"rank {faulty} computes wrong repeatedly") for text in texts)
        assert any(text.startswith(f"rank {faulty}, which audits") for text in texts)
        assert not diverged or layout == "tp"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", few(["delayed", "row", "block"], "row"))
def test_casts_of_a_faulty_device_are_found(recipe: str, three_ranks: RankPool) -> None:
    for found, *_ in three_ranks.run(_with_faulty_rank, "ddp", recipe, 1, "casts"):
        assert {rank for _, ranks, _, _ in found for rank in ranks} == {1}
        assert {name for name, *_ in found} == {"cast of input", "cast of weight", "cast of grad_output"}


@pytest.mark.long
@pytest.mark.nightly
def test_of_four_ranks_the_faulty_one_is_named(four_ranks: RankPool) -> None:
    for found, *_ in four_ranks.run(_with_faulty_rank, "hsdp", "block", 3, "products"):
        assert {(ranks, reference is not None) for _, ranks, reference, _ in found} == {((3,), True)}


@pytest.mark.slow
def test_of_two_ranks_nobody_is_named(two_ranks: RankPool) -> None:
    for found, *_ in two_ranks.run(_with_faulty_rank, "ddp", "delayed", 1, "products"):
        assert {(ranks, reference) for _, ranks, reference, _ in found} == {((0, 1), None)}
        assert {text.partition("; ")[2] for *_, text in found} == {"of two ranks, none can be blamed"}


def _transient() -> Any:
    """One wrong bit, in the first product of a step."""
    trained = Trained()
    with captured_log() as log:
        for index in range(SITES_OF_NET):
            with bad_products(1.0) if dist.get_rank() == 1 else contextlib.nullcontext():
                x, y = batch(dist.get_rank(), index)
                loss = (trained.whole(x) - y).square().mean()
                loss.backward()
            trained.optimizer.step()
            trained.optimizer.zero_grad()
    return {(f.ranks, f.detail.partition(" (")[0]) for r in trained.reports for f in r.findings}, len(log)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_a_fault_that_does_not_repeat_is_transient(world: int, two_ranks: RankPool, three_ranks: RankPool) -> None:
    results = (two_ranks if world == 2 else three_ranks).run(_transient)
    text = {2: "transient on rank 1: repeated, it gets what rank 0 gets", 3: "rank 1 computes wrong once"}[world]
    for found, _ in results:
        assert found == {((1,), text)}
    assert sum(logged > 0 for _, logged in results) == 1


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


TRIALS, WIDE = 200, 256


def _audits_until_found(p: float, limit: int) -> Any:
    """Train until a faulty device is found, again and again. Return the numbers of audited products, and the share."""
    torch.manual_seed(0)
    net = nn.Linear(WIDE, WIDE)
    manager = fp8dist.prepare(
        net, group=dist.group.WORLD, check_policy="warn", audit_every=1, audit_bytes=limit, skip=None
    )
    manager.attach(net)
    found, counts, heard = [], [], []
    manager.on_event(lambda event: found.append(event.kind))
    audits, tap = manager._cycle.audits, manager._job.tap
    assert audits is not None
    assert tap is not None
    original = audits.record

    def counting(op: str, *rest: Any) -> None:
        before = len(audits._recorded)
        original(op, *rest)
        if len(audits._recorded) > before and op == "matmul":
            heard.append(audits._recorded[0].share)

    tap.listener = counting
    x, index = torch.randn(WIDE, WIDE, requires_grad=True), 0
    with captured_log():
        for _ in range(TRIALS):
            heard.clear()
            found.clear()
            while not found:
                fault: Any = bad_products(p, seed=index, steady=False)
                with fault if dist.get_rank() == 0 else contextlib.nullcontext():
                    net(x).square().mean().backward()
                manager.step()
                index += 1
            counts.append(len(heard))
    return counts, sum(heard) / len(heard)


@pytest.mark.long
@pytest.mark.nightly
@pytest.mark.parametrize(("p", "limit", "share"), [(0.3, 1 << 26, 1.0), (0.8, 1, 0.25)], ids=["whole", "blocks"])
def test_the_number_of_audits_until_then_is_geometric(p: float, limit: int, share: float, two_ranks: RankPool) -> None:
    """Each product has one wrong element with probability p, and an audit looks at a share of the result. Mean and
    distribution of 200 trials, within bounds that a right implementation fails once in 10,000 seeds."""
    (counts, seen), _ = two_ranks.run(_audits_until_found, p, limit, timeout=200)
    assert seen == share
    chance = p * share
    deviation = math.sqrt(1 - chance) / chance
    assert abs(sum(counts) / TRIALS - 1 / chance) < 3.9 * deviation / math.sqrt(TRIALS)
    found = Counter(min(count, 6) for count in counts)
    expected = {k: TRIALS * chance * (1 - chance) ** (k - 1) for k in range(1, 6)} | {6: TRIALS * (1 - chance) ** 5}
    chi_square = sum((found[k] - expected[k]) ** 2 / expected[k] for k in expected)
    assert chi_square < 25.7  # 5 degrees of freedom: exceeded with a probability of 1e-4.


def _bits(audit_every: int, layout: str, recipe: str) -> Any:
    trained = Trained(layout, recipe, audit_every)
    losses = [trained.step(index).item() for index in range(SITES_OF_NET)]
    local = nn.ParameterDict({n.replace(".", "_"): local_part(p.detach()) for n, p in trained.net.named_parameters()})
    return losses, parameter_bits(local), state_bits(trained.manager), trained.reports


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "recipe"),
    few([("ddp", "current"), ("ddp", "row"), ("fsdp2", "delayed"), ("fsdp2", "block")], ("ddp", "row")),
)
def test_audits_change_no_bit(layout: str, recipe: str, two_ranks: RankPool) -> None:
    with_audits = two_ranks.run(_bits, 1, layout, recipe)
    assert with_audits == two_ranks.run(_bits, 0, layout, recipe)
    assert all(not reports for *_, reports in with_audits)


@on_ranks(2)
def test_an_audit_is_three_collectives() -> None:
    trained = Trained(audit_every=4, audit_bytes=1 << 26)
    for index in range(12):
        with counted_collectives() as counted:
            trained.step(index)
        calls = [(name, size) for name, size in zip(counted.names, counted.sizes) if name != "all_reduce"]
        if (index + 1) % 4:
            assert calls == []
            continue
        (gather, sizes), (exchange, received), (digests, of_digests) = calls
        assert (gather, exchange, digests) == ("all_gather", "all_to_all_single", "all_gather")
        assert (sizes, of_digests) == (16, 32)
        assert received == 0 or 1_000 < received < 20_000


def _without_the_module() -> Any:
    """Rank 1 never runs the branch, and rank 0 sees no tokens in some steps."""
    trained = Trained()
    for index in range(2 * SITES_OF_NET):
        x, y = batch(dist.get_rank(), index)
        if dist.get_rank() == 0 and index % 4 == 0:
            x, y = x[:0], y[:0]
        loss = (trained.net(x[: 1 + index % 7], skip=dist.get_rank() == 1) - y[: 1 + index % 7]).square().sum()
        loss.backward()
        trained.optimizer.step()
    return trained.reports, trained.audited


@pytest.mark.slow
def test_a_rank_that_does_not_run_the_module_takes_part(three_ranks: RankPool) -> None:
    results = three_ranks.run(_without_the_module)
    assert [reports for reports, _ in results] == [[]] * 3
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
            manager.step()
        except SyncError as error:
            return str(error)
    return "no error"


@pytest.mark.slow
def test_a_rank_that_is_gone_is_named() -> None:
    pool = RankPool(2)  # Its own pool: others cannot use a connection that timed out.
    try:
        text, absent = pool.run(_absent)
    finally:
        pool.close()
    assert absent is None
    assert text.startswith("rank 0: StateManager of Net: the audit of step 4 with ranks 0, 1 failed after ")
    assert "Missing of 2 ranks: rank 1 (" in text


@pytest.mark.slow
@pytest.mark.parametrize(("which", "found"), [(2, set()), (0, {(1, 2)})])
@on_ranks(3)
def test_only_ranks_that_are_alike_audit_each_other(which: int, found: set[tuple[int, ...]]) -> None:
    """Of three ranks, one is unlike the others, and one is faulty. A faulty rank that is alone repeats its own fault,
    so it is not found."""
    trained = Trained()
    audits = trained.manager._cycle.audits
    assert audits is not None
    audits._likeness_word = int(dist.get_rank() == which)
    with captured_log(), bad_products() if dist.get_rank() == 2 else contextlib.nullcontext():
        for index in range(SITES_OF_NET):
            trained.step(index)
    assert {f.ranks for report in trained.reports for f in report.findings} == found


def _until_it_raises(step: Callable[[], None], optimizer: torch.optim.Optimizer) -> None:
    for _ in range(SITES_OF_NET):
        with bad_products():
            step()
        optimizer.step()


def test_one_process_repeats_its_own_work() -> None:
    net = make_net()
    manager = fp8dist.prepare(net, audit_every=1, check_policy="raise")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    manager.attach(net, optimizer=optimizer)

    def step() -> None:
        net(batch(0, 0)[0]).square().mean().backward()

    for _ in range(SITES_OF_NET):
        step()
        optimizer.step()
    assert manager._cycle.audits is not None
    assert manager._cycle.audits.done >= SITES_OF_NET - 1
    with captured_log(), pytest.raises(DivergenceError, match="transient on rank 0, which repeated its own work"):
        _until_it_raises(step, optimizer)


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
    net = make_net()
    manager = fp8dist.prepare(net, audit_every=1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    manager.attach(net, optimizer=optimizer)
    manager.detach()
    assert (manager._job.tap, manager._cycle.audits) == (None, None)
    monkeypatch.setenv("FP8DIST_AUDIT_EVERY", "3")
    assert fp8dist.prepare(make_net()).settings.audit_every == 3
    switched_off = make_net()
    off = fp8dist.prepare(switched_off, audit_every=1, enabled=False)
    off.attach(switched_off, optimizer=torch.optim.SGD(switched_off.parameters(), lr=0.01))
    assert off._cycle.audits is None


@pytest.mark.parametrize(("name", "value"), [("audit_every", -1), ("audit_every", True), ("audit_bytes", 0)])
def test_settings_of_wrong_values_are_refused(name: str, value: Any) -> None:
    with pytest.raises(fp8dist.errors.ConfigurationError, match=name):
        fp8dist.prepare(make_net(), **{name: value})
