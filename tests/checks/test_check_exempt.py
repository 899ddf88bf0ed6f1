"""What is compared, buffers and an optimizer's number of steps too, and what is left out because it differs by design.
A check that can compare nothing raises."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import ConfigurationError, DelayedScaling, DivergenceReport
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.parallel import mesh_of, part_of
from tests.support.ranks import on_ranks
from tests.support.suite import NIGHTLY
from tests.support.training import SmallJob, batch, make_net


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(2)
def test_shards_of_fsdp1_are_not_compared(use_orig_params: bool) -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16))
    options = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
    net[0] = FullyShardedDataParallel(net[0], **options)
    sharded = FullyShardedDataParallel(net, **options)
    model = nn.Sequential(sharded, nn.Linear(16, 16))  # Next to a module that the caller declares as replicated.
    optimizer = torch.optim.AdamW(sharded.parameters())
    nn.init.ones_(model[1].weight), nn.init.ones_(model[1].bias)
    sharded(torch.randn(4, 16)).sum().backward()
    reports = [fp8dist.check(model, group=dist.group.WORLD, gradients=True, optimizer=optimizer, policy="warn")]
    optimizer.step()
    reports.append(fp8dist.check(model, group=dist.group.WORLD, optimizer=optimizer, policy="warn"))
    reports = [(report.findings, report.compared, report.skipped) for report in reports]
    for findings, compared, skipped in reports:
        assert findings == ()
        assert compared == {"parameter": 2}
        assert any("parameters sharded by FSDP1" in text for text in skipped)
    assert any("gradients sharded by FSDP1" in text for text in reports[0][2])
    assert any("optimizer states sharded by FSDP1" in text for text in reports[1][2])


class _Experts(nn.Module):
    """A dense layer shared by all ranks, and an expert that exists on one rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.block = nn.Module()
        torch.manual_seed(dist.get_rank() + 1)
        self.block.experts = nn.ModuleList([nn.Linear(16, 16)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block.experts[0](self.norm(self.dense(x)))
        return out


@on_ranks(2)
def test_experts_and_batch_statistics_of_each_rank_raise_no_alarm() -> None:
    """The shared part is still compared."""
    inner: Any = _Experts()
    manager = fp8dist.prepare(inner, group=dist.group.WORLD, groups={"*.experts.*": part_of((0,), (1,))})
    own = [name for name, _ in inner.named_parameters() if "experts" in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, own)
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager.attach(model, optimizer=optimizer)
    for step in range(2):
        x, _ = batch(dist.get_rank(), step)  # Each rank has other data and other BatchNorm statistics.
        model(x[:, :16]).sum().backward()
        optimizer.step()
    for check in (manager.check, partial(fp8dist.check, model)):
        report = check(gradients=True, optimizer=optimizer, policy="warn")
        assert report.findings == ()
        # Weight and bias of dense and norm; exp_avg, exp_avg_sq and step of each.
        assert report.compared == {"parameter": 4, "gradient": 4, "optimizer": 12, "slot": 3}
        reasons = ("matching *.experts.*", "that DDP was told to ignore")
        assert any(f"2 parameters {why}" in text for why in reasons for text in report.skipped)
    if dist.get_rank() == 1:
        inner.norm.weight.data[3] += 1
    with captured_log():
        report = fp8dist.check(model, policy="warn")
    assert [(f.name, f.ranks, f.index) for f in report.findings] == [("norm.weight", (0, 1), (3,))]


@on_ranks(2)
def test_state_that_is_not_synced_is_not_compared() -> None:
    job = SmallJob(DelayedScaling(history_len=3), amax_sync=False)
    for step in range(3):
        job.step(step)
    scales: list[Any] = [None] * 2
    dist.all_gather_object(scales, job.manager.slot("first", "input").scale.item())
    assert scales[0] != scales[1]
    for report in (job.manager.check(policy="warn"), fp8dist.check(job.called, policy="warn")):
        assert (report.findings, report.compared) == ((), {"parameter": 6})


@pytest.mark.slow
@on_ranks(2)
def test_the_state_of_a_zero_redundancy_optimizer_is_not_compared() -> None:
    import warnings

    warnings.simplefilter("ignore")
    from torch.distributed.optim import ZeroRedundancyOptimizer

    job = SmallJob(optimizer=lambda p: ZeroRedundancyOptimizer(p, torch.optim.AdamW, lr=0.01), enabled=False)
    for step in range(2):
        job.step(step)
    optimizer, saved = job.optimizer, [None]
    report = fp8dist.check(job.called, optimizer=optimizer, policy="warn")
    assert "of a ZeroRedundancyOptimizer" in report.unverified["optimizer"]
    assert not report.consistent
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        saved = [optimizer.state_dict()]
    dist.broadcast_object_list(saved, src=0)
    optimizer.load_state_dict(saved[0])  # Like a resumed job: it then shows the state of its own part.
    assert max(len(state or ()) for state in optimizer.state.values()) == 3
    report = fp8dist.check(job.called, optimizer=optimizer, policy="warn")
    assert report.findings == ()
    assert dict(report.compared) == {"parameter": 6}
    assert any("states of a ZeroRedundancyOptimizer" in text for text in report.skipped)


# Checks that verify nothing --------------------------------------------------------------------------


def _refused(call: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        call()
    return str(caught.value)


@on_ranks(2)
def test_a_check_that_has_nothing_to_compare_says_what_to_pass() -> None:
    sharded = FullyShardedDataParallel(nn.Linear(16, 16), device_id=torch.device("cpu"), use_orig_params=True)
    unshared = make_net()
    manager = fp8dist.prepare(unshared, amax_sync=False).attach()
    switched_off = make_net()
    off = fp8dist.prepare(switched_off, group=dist.group.WORLD, enabled=False)
    never_attached = make_net()
    fp8dist.prepare(never_attached, group=dist.group.WORLD, enabled=False)
    checked = make_net()
    every = fp8dist.prepare(checked, amax_sync=False, check_every=1).attach()
    every.step()
    with captured_log() as log:
        reports = [off.attach().check(), off.check()]
        reports += [fp8dist.check(never_attached), fp8dist.check(never_attached)]
    assert [(report.consistent, dict(report.compared)) for report in reports] == [(False, {})] * 4
    assert len(log) == (2 if dist.get_rank() == 0 else 0)
    world, unnamed = dist.group.WORLD, "name their group or axes, as in fp8dist.check(model, group=…)): pass "
    own = "9 slots that this rank shares with no other"
    refused: list[tuple[Any, ...]] = [
        (lambda: fp8dist.check(nn.Linear(4, 4)), f"2 parameters not known to be replicated: {unnamed}"),
        (lambda: fp8dist.check(nn.ReLU(), group=world), "it has no parameters"),
        (lambda: fp8dist.check(sharded), "parameters sharded by FSDP1", "leave the check out"),
        (lambda: fp8dist.check(nn.Linear(4, 4), group=world, groups={"*": None}), "2 parameters matching *: left out"),
        (manager.check, own, "pass the DDP module to attach()"),
        (every.step, "otherwise do not use check() and check_every"),
        (lambda: fp8dist.check(unshared), own),
    ]
    for call, *texts in refused:
        said = _refused(call)
        assert all(text in said for text in texts), said
    assert "parameters" not in _refused(lambda: manager.check(parameters=False)).split(":")[0]


@on_ranks(4)
def test_one_rank_with_replicas_is_enough_for_all() -> None:
    """Two of four ranks hold replicas, so no rank gets the error, and none is told that all is consistent."""
    rank = dist.get_rank()
    report = fp8dist.check(make_net(), groups={"*": part_of((0, 1), (2,), (3,))})
    assert (report.consistent, report.compared) == (False, {"parameter": 6} if rank < 2 else {})
    alone = part_of((0,), (1,), (2,), (3,))
    assert "shared with no other rank" in _refused(lambda: fp8dist.check(make_net(), groups={"*": alone}))


@on_ranks(2)
def test_a_kind_of_which_nothing_is_compared_is_not_consistent() -> None:
    world = dist.group.WORLD
    net, ignored, sharded = make_net(), make_net(), make_net()
    reports = [fp8dist.check(net, group=world, gradients=True)]
    optimizer = torch.optim.SGD(ignored.parameters(), lr=0.1, momentum=0.9)
    ignored(torch.ones(2, 32)).sum().backward()
    optimizer.step()
    reports.append(fp8dist.check(net, group=world, optimizer=optimizer))
    frozen = ignored.first.weight.requires_grad_(False)
    others = [name for name, parameter in ignored.named_parameters() if parameter is not frozen]
    reports.append(fp8dist.check(ignored, group=world, groups=dict.fromkeys(others)))
    manager = fp8dist.prepare(sharded, group=world)
    fully_shard(sharded)
    reports.append(manager.attach(sharded).check())
    gradients, states, frozen, shards = [
        (report.consistent, report.diverged, report.compared, dict(report.unverified)) for report in reports
    ]
    reason = "0 gradients exist now (there are none between zero_grad() and backward)"
    assert gradients == (False, False, {"parameter": 6}, {"gradient": reason})
    assert states[:2] == (False, False)
    assert "of parameters that are not the module's" in states[3]["optimizer"]
    assert frozen[:3] == (False, False, {"parameter": 1})  # The only one that is not trained.
    assert list(frozen[3]) == ["parameter"]
    assert shards[:3] == (False, False, {"slot": 9})
    assert "6 parameters that are DTensors without a Replicate axis" in shards[3]["parameter"]
    embedding = DistributedDataParallel(nn.Embedding(8, 4, sparse=True))
    embedding(torch.tensor([1, 2])).sum().backward()
    sparse = fp8dist.check(embedding, gradients=True)
    assert (sparse.consistent, sparse.compared) == (False, {"parameter": 1})
    assert sparse.unverified == {"gradient": "1 gradients with layout torch.sparse_coo"}


@on_ranks(4)
def test_some_parameters_do_not_stand_for_all() -> None:
    """Ranks 0 and 1 hold all parameters alike, ranks 2 and 3 all but two. Then a check of the manager's."""
    rank, groups = dist.get_rank(), {"first.*": part_of((0, 1), (2,), (3,)), "*": part_of((0, 1), (2, 3))}
    reports = [fp8dist.check(make_net(), groups=groups)]
    frozen = make_net()
    frozen.last.requires_grad_(False)
    reports.append(fp8dist.check(frozen, group=dist.group.WORLD, groups={"first.*": None}))
    net = make_net()
    manager = fp8dist.prepare(net, group=dist.group.WORLD)
    fully_shard(net.first)
    fully_shard(net.branch)
    net.last = DistributedDataParallel(net.last)
    reports.append(manager.attach(net, boundary="manual").check())
    assert manager.verified.last_check is not None
    assert "compared only 2 of 6 parameters" in manager.verified.last_check.text
    assert manager.verified.checked_step is None
    lone = "4 of 6 parameters" if rank >= 2 else "not all parameters on another rank"
    expected = [lone, "2 of 4 trainable parameters", "2 of 6 parameters"]
    assert [report.partial.get("parameter") for report in reports] == expected
    assert len([line for report in reports for line in str(report).splitlines() if "compared only" in line]) == 3


@pytest.mark.parametrize("reshard", [None, 2])
@on_ranks(4)
def test_what_a_forward_has_gathered_does_not_stand_for_its_shards(reshard: int | None) -> None:
    """As after an evaluation. A gathered copy is equal on all ranks, whatever their shards are."""
    net = make_net()
    manager = fp8dist.prepare(net, group=dist.group.WORLD)
    for part in (net.first, net):
        fully_shard(part, reshard_after_forward=reshard)
    manager.attach(net)
    with torch.no_grad():
        net(torch.ones(4, 32))
    for report in (manager.check(), fp8dist.check(net, group=dist.group.WORLD)):
        assert (report.consistent, report.diverged, report.compared) == (False, False, {"slot": 9})
        assert "6 parameters that are DTensors without a Replicate axis" in report.unverified["parameter"]


@on_ranks(4)
def test_replicas_of_shards_are_compared_while_these_are_gathered() -> None:
    """As after an evaluation, under HSDP."""
    net = make_net()
    fully_shard(net, mesh=mesh_of((2, 2), ("replicate", "shard")))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(4, 32)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        net(torch.ones(4, 32))
    report = fp8dist.check(net, optimizer=optimizer, coherence=True)
    assert (report.consistent, report.skipped) == (True, ())
    if dist.get_rank() == 3:
        optimizer.param_groups[0]["params"][0].to_local().data[0] += 1
    report = fp8dist.check(net, optimizer=optimizer, policy="warn")
    assert report.compared == {"parameter": 6, "optimizer": 6}
    assert [finding.name for finding in report.findings] == ["first.weight"]


@on_ranks(2)
def test_an_attached_model_and_its_parts_are_compared_as_they_are_wrapped() -> None:
    job = SmallJob()
    net = job.net
    for checked, compared in ((net, {"parameter": 6, "slot": 9}), (net.first, {"parameter": 2})):
        clean = fp8dist.check(checked)
        assert (clean.consistent, clean.compared) == (True, compared)
    with torch.no_grad():
        net.first.weight[0, 0] += 5.0 * dist.get_rank()
    with captured_log():
        found = [fp8dist.check(checked, policy="warn").findings for checked in (net, net.first)]
    assert [[(f.kind, f.name) for f in of] for of in found] == [
        [("parameter", "first.weight")],
        [("parameter", "weight")],
    ]


@pytest.mark.parametrize("again", [False, True])
@on_ranks(2)
def test_a_wrapper_that_is_gone_is_not_taken_for_equal_parameters(again: bool) -> None:
    model = make_net()
    manager = fp8dist.prepare(model, group=dist.group.WORLD)
    manager.attach(DistributedDataParallel(model))  # Nobody keeps it.
    gc.collect()
    if again:
        wrapper = DistributedDataParallel(model)
        manager.attach(wrapper)
    with torch.no_grad():
        model.first.weight[3, 5] += dist.get_rank()
    with captured_log() as log:
        report, state = manager.check(policy="warn", buffers=True), manager.check(parameters=False)
    found = [(f.kind, f.name, f.index) for f in report.findings]
    assert found == ([("parameter", "first.weight", (3, 5))] if again else [])
    assert (report.consistent, state.consistent) == (False, True)
    gone = "can be found: the module that attach() was given is gone. Keep it, or call attach() with another one"
    unverified = {} if again else {"buffer": f"0 buffers {gone}", "parameter": f"0 parameters {gone}"}
    assert dict(report.unverified) == unverified
    logged = [f"fp8dist: no parameters are compared: 0 parameters {gone}"] if dist.get_rank() == 0 else []
    assert again or [text for _, text in log] == logged


# Buffers --------------------------------------------------------------------------------------------

LEFT_OUT = "3 buffers that buffers=True would compare"


def _net() -> nn.Sequential:
    """Return a net with three buffers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))


def _batch() -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(dist.get_rank()))


def _shown(report: DivergenceReport) -> Any:
    findings = [(f.kind, f.name, f.ranks, f.last_good_step) for f in report.findings]
    return findings, dict(report.compared), report.skipped


@pytest.mark.parametrize("how", ["manager", "DDP"])
@on_ranks(3)
def test_buffers_are_compared_on_request(how: str) -> None:
    """Check a net whose buffers are equal, then damage them on rank 1."""
    net = _net()
    ddp = nn.parallel.DistributedDataParallel(net)
    manager = fp8dist.prepare(net, DelayedScaling(history_len=2), group=dist.group.WORLD) if how == "manager" else None
    if manager is not None:
        manager.attach(ddp)

    def check(**more: Any) -> DivergenceReport:
        if manager is not None:
            return manager.check(policy="warn", **more)
        return fp8dist.check(ddp, policy="warn", step=3, **more)

    results = {}
    with captured_log(), counted_collectives() as calls:
        results["without"] = _shown(check())
        results["with"] = _shown(check(buffers=True))
    results["calls"] = calls.names
    if dist.get_rank() == 1:
        net[1].running_var[4] = 9.0
    with captured_log():
        results["unseen"] = _shown(check())
        results["seen"] = _shown(check(buffers=True))
    slots = {"slot": 3} if how == "manager" else {}
    assert results["without"] == ([], {"parameter": 4, **slots}, (LEFT_OUT,))
    assert results["with"] == ([], {"buffer": 3, "parameter": 4, **slots}, ())
    assert results["calls"] == ["all_reduce"] * 2
    assert results["unseen"][0] == []
    assert results["seen"][0] == [("buffer", "1.running_var", (1,), 0 if how == "manager" else 3)]
    with captured_log():
        repaired = fp8dist.check(ddp, policy="repair", buffers=True).repaired
    assert repaired == ("buffer '1.running_var' on rank 1, from rank 0",)
    assert float(net[1].running_var[4]) == 1.0


@on_ranks(2)
def test_buffers_that_are_not_known_to_be_replicated_are_skipped() -> None:
    reports = {"plain, beside DDP": nn.ModuleList([nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), _net()])}
    told = _net()
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(told, ["1.running_mean"])
    reports["ignored by DDP"] = nn.ModuleList([nn.parallel.DistributedDataParallel(told)])
    results = {name: _shown(fp8dist.check(model, buffers=True)) for name, model in reports.items()}
    groups = {"*.running_*": dist.group.WORLD, "*": None}
    results["by pattern"] = _shown(fp8dist.check(_net(), groups=groups, buffers=True))
    unknown = ("3 buffers not known to be replicated: name their group or axes, as in fp8dist.check(model, group=…)",)
    assert results["plain, beside DDP"][1:] == ({"parameter": 2}, (*unknown, "4 parameters" + unknown[0][9:]))
    assert results["ignored by DDP"][1:] == ({"buffer": 2, "parameter": 4}, ("1 buffers that DDP was told to ignore",))
    assert results["by pattern"][1:] == (
        {"buffer": 2},
        ("1 buffers matching *: left out", "4 parameters matching *: left out"),
    )


@on_ranks(4)
def test_dtensors_are_compared_along_their_replicate_axes() -> None:
    """A DTensor among the buffers, replicated along one axis of four ranks."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    net = nn.Linear(4, 4)
    for name in ("weight", "bias"):
        value = distribute_tensor(torch.ones_like(getattr(net, name)), mesh, [Replicate(), Shard(0)])
        setattr(net, name, nn.Parameter(value))
    net.register_buffer("table", distribute_tensor(torch.arange(8.0), mesh, [Replicate(), Shard(0)]))
    if dist.get_rank() == 3:
        net.table.to_local()[1] = 99.0  # type: ignore[operator]
    with captured_log():
        report = fp8dist.check(net, policy="warn", buffers=True)
    assert [(f.kind, f.name, f.ranks, f.index, f.values) for f in report.findings] == [
        ("buffer", "table", (1, 3), (1,), (5.0, 99.0))
    ]
    assert dict(report.compared) == {"buffer": 1, "parameter": 2}


# The optimizer's number of steps ---------------------------------------------------------------------


def _stepped(model: nn.Module, without: str = "") -> torch.optim.AdamW:
    """Return an optimizer that has done a step, except with the parameter ``without``, which has no gradient."""
    optimizer = torch.optim.AdamW(model.parameters())
    for name, parameter in model.named_parameters():
        parameter.grad = None if name == without else torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def _checked(model: nn.Module, optimizer: torch.optim.Optimizer) -> DivergenceReport:
    with captured_log():
        return fp8dist.check(model, group=dist.group.WORLD, optimizer=optimizer, policy="warn")


@pytest.mark.parametrize(
    ("shape", "wrapped", "named"),
    [
        pytest.param((2, 2), True, [(2,)], marks=NIGHTLY),
        ((2, 1, 2), True, [(0, 2)]),  # The ranks of the tensor-parallel axis may have other experts.
        ((2, 2), False, [(0, 2)]),  # Along the axis of the copies only.
    ],
)
@on_ranks(4, timeout=60)
def test_a_rank_that_is_a_step_behind_is_named(
    shape: tuple[int, ...], wrapped: bool, named: list[tuple[int, ...]]
) -> None:
    torch.manual_seed(0)
    mesh, model = mesh_of(shape, ("replicate", "shard", "tp")[: len(shape)]), nn.Linear(8, 8)
    if len(shape) == 3 or not wrapped:
        inner = mesh["tp"] if wrapped else mesh
        for name in ("weight", "bias"):
            value = distribute_tensor(
                torch.ones_like(getattr(model, name)), inner, [Replicate(), Shard(0)][-inner.ndim :]
            )
            setattr(model, name, nn.Parameter(value))
    if wrapped:
        fully_shard(model, mesh=mesh if len(shape) < 3 else mesh["replicate", "shard"])
    optimizer = _stepped(model)
    assert _checked(model, optimizer).findings == ()
    if dist.get_rank() == 2:
        optimizer.state[model.weight]["step"] -= 1
    found = [(f.kind, f.name, f.ranks) for f in _checked(model, optimizer).findings]
    assert found == [("optimizer", "weight.step", ranks) for ranks in named]


@on_ranks(4)
def test_equal_counts_verify_no_moments() -> None:
    """Shards of FSDP2 without replicas: the moments exist once. Of eight experts, each rank has two, whose gradient it
    gets alone: no tokens on one rank are no difference."""
    mesh, model = mesh_of((4,), ("shard",)), nn.Module()
    model.dense = nn.Linear(8, 8)
    fully_shard(model.dense, mesh=mesh)
    with counted_collectives() as calls:
        report = _checked(model, _stepped(model))
    assert dict(report.compared) == {"optimizer": 2}
    assert set(report.unverified) == {"optimizer", "parameter"}
    assert not report.consistent
    assert calls.names == ["all_reduce"]
    model.experts = nn.Parameter(distribute_tensor(torch.ones(8, 4, 4), mesh, [Shard(0)]))
    optimizer = _stepped(model, "experts" if dist.get_rank() == 1 else "")
    assert len(optimizer.state) == (2 if dist.get_rank() == 1 else 3)
    assert _checked(model, optimizer).findings == ()


@on_ranks(3)
def test_a_rank_without_a_part_has_no_count() -> None:
    """Four rows on three ranks: the last one has none of them. An optimizer may keep no state for it."""
    fully_shard(model := nn.Linear(8, 4), mesh=mesh_of((3,), ("shard",)))
    optimizer = _stepped(model)
    if dist.get_rank() == 2:
        optimizer.state.clear()
    beside = nn.Linear(2, 2)  # Else there is nothing to compare.
    nn.init.ones_(beside.weight), nn.init.ones_(beside.bias)
    assert _checked(nn.ModuleList([model, beside]), optimizer).findings == ()
