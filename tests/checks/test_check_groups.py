"""Which ranks are compared: replicas under tensor parallelism and HSDP, subgroups; and the cost of a check."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import DelayedScaling
from fp8dist.errors import ConfigurationError, DivergenceError
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.parallel import Block, mesh_of, part_of, same_on_all_ranks
from tests.support.ranks import RankPool, on_ranks
from tests.support.training import SmallJob, batch, make_net, unwrapped

HISTORY = DelayedScaling(history_len=3)


def _block() -> Block:
    torch.manual_seed(0)
    return Block()


def _nudge(p: nn.Parameter, place: int = 0) -> None:
    """Change one element of this rank's part of a parameter."""
    local = p.to_local() if isinstance(p, DTensor) else p.detach()
    with torch.no_grad():
        local.view(-1)[place] += 0.5


def _pair() -> Any:
    """Return the group of ranks 0 and 1, or of 2 and 3. COLLECTIVE."""
    return part_of((0, 1), (2, 3))


Given = tuple[nn.Module, dict[str, Any]]
"""A model, and options of ``fp8dist.check``."""


def _tensor_parallel() -> Given:
    """Linears that are split over the last axis of a mesh, and a norm."""
    mesh, model = mesh_of((2, 2), ("dp", "tp")), _block()
    plan: Any = {"norm": SequenceParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh["tp"], plan), {}


def _named_by_pattern() -> Given:
    """Megatron's layout: plain norms, replicated over the tensor-parallel group that the caller names."""
    tp, model = _pair(), _block()
    with torch.no_grad():  # Shards: other values on each rank of the pair.
        model.up.weight.add_(dist.get_rank())
        model.down.weight.add_(dist.get_rank())
    return model, {"groups": {"norm.*": tp, "*.bias": tp}}


def _hsdp() -> Given:
    model = _block()
    fully_shard(model, mesh=mesh_of((2, 2), ("replicate", "shard")))
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return model, {"gradients": True, "optimizer": optimizer}


def _over(axis: str) -> Given:
    """A DTensor replicated on all four ranks, checked over the pairs of one mesh axis, or over the diagonals."""
    mesh, model = mesh_of((2, 2), ("dp", "tp")), nn.Module()
    model.weight = nn.Parameter(DTensor.from_local(torch.arange(8.0), mesh, [Replicate(), Replicate()]))
    return model, {"group": mesh.get_group(axis) if axis else part_of((0, 3), (1, 2))}


def _three_and_one() -> Given:
    """Three ranks share a norm, of which the last has its own. All four share the rest."""
    model = _block()
    if dist.get_rank() == 3:
        _nudge(model.norm.weight, 1)
    return model, {"group": dist.group.WORLD, "groups": {"norm.*": part_of((0, 1, 2), (3,))}}


def _stages() -> Given:
    """Pipeline stages hold different modules; two ranks share each stage."""
    pair, stage = _pair(), dist.get_rank() // 2
    model = nn.ModuleDict({f"stage{stage}": _block()})
    if stage:
        model["head"] = nn.Linear(16, 16)
        nn.init.ones_(model["head"].weight), nn.init.ones_(model["head"].bias)
    return model, {"groups": {"*": pair}}


def _subgroup() -> Given:
    """Ranks 1, 2 and 3 check without rank 0."""
    return _block(), {"group": part_of((1, 2, 3), (0,))}


def _part_of_replicas() -> Given:
    """Two of four replicas check at a time."""
    return DistributedDataParallel(make_net()), {"group": _pair()}


def _ddp_of_pairs() -> Given:
    """DDP keeps pairs equal, and the pairs train separately."""
    return DistributedDataParallel(make_net(seed=dist.get_rank() // 2), process_group=_pair()), {}


def _two_ddps() -> Given:
    """Two modules, each in a DDP over different pairs."""
    rank = dist.get_rank()
    first = DistributedDataParallel(make_net(seed=rank // 2), process_group=_pair())
    second = DistributedDataParallel(make_net(seed=rank % 2), process_group=part_of((0, 2), (1, 3)))
    return nn.ModuleDict({"first": first, "second": second}), {}


class GroupCase(NamedTuple):
    """``found``: ranks, reference rank and index of each finding after element 3 of ``name`` has changed on the
    ``damaged`` ranks. ``coords``: mesh coordinates of the ranks that are named. ``clean``: what a check before counts,
    skips and sends: numbers by kind, sentences, number of all-reduces. ``apart``: groups find only what is theirs."""

    build: Callable[[], Given]
    name: str
    damaged: tuple[int, ...]
    found: list[tuple[tuple[int, ...], int | None, tuple[int, ...]]]
    coords: list[dict[str, int]] = []  # noqa: RUF012
    clean: tuple[dict[str, int], tuple[str, ...], int | None] | None = None
    apart: bool = False


UNSHARED = "3 parameters that are DTensors without a Replicate axis: each rank has its own"
UNKNOWN = "2 parameters not known to be replicated: name their group or axes, as in fp8dist.check(model, group=…)"
OF_TP = ({"parameter": 3}, (UNSHARED,), None)  # The norm's two, and the bias of the row-wise Linear.
OF_HSDP = ({"parameter": 6, "gradient": 6, "optimizer": 18}, (), 4)  # Number of further replica sets + 3.
LAST = "module.last.bias"

LAYOUTS = {
    "tp": GroupCase(_tensor_parallel, "norm.weight", (3,), [((2, 3), None, (3,))], [{"tp": 0}, {"tp": 1}], OF_TP),
    "named by pattern": GroupCase(
        _named_by_pattern,
        "norm.bias",
        (0, 3),
        [((0, 1), None, (3,)), ((2, 3), None, (3,))],
        # The anchor's, the exchange of groups, the two labels', the verdict.
        clean=({"parameter": 4}, (UNKNOWN,), 5),
    ),
    "hsdp": GroupCase(
        _hsdp,
        "up.weight",
        (1, 2),
        [((0, 2), None, (0, 3)), ((1, 3), None, (0, 3))],
        [{"replicate": replicate, "shard": shard} for shard in (0, 1) for replicate in (0, 1)],
        OF_HSDP,
    ),
    **{
        f"two axes, over {axis or 'diagonals'}": GroupCase(
            partial(_over, axis), "weight", (3,), [(pair, None, (3,))], clean=({"parameter": 1}, (), None), apart=True
        )
        for axis, pair in (("dp", (1, 3)), ("tp", (2, 3)), ("", (0, 3)))
    },
    "three and one": GroupCase(_three_and_one, "norm.bias", (2,), [((2,), 0, (3,))]),
    "stages": GroupCase(_stages, "head.weight", (3,), [((2, 3), None, (0, 3))]),
    "subgroup": GroupCase(_subgroup, "down.bias", (2,), [((2,), 1, (3,))], apart=True),
    "part of the replicas": GroupCase(
        _part_of_replicas, LAST, (1,), [((0, 1), None, (3,))], clean=({"parameter": 6}, (), None), apart=True
    ),
    "ddp of pairs": GroupCase(_ddp_of_pairs, LAST, (1,), [((0, 1), None, (3,))], clean=({"parameter": 6}, (), 4)),
    "two ddps": GroupCase(_two_ddps, f"second.{LAST}", (3,), [((1, 3), None, (3,))]),
}


@pytest.mark.parametrize("name", LAYOUTS)
@on_ranks(4, timeout=60)
def test_ranks_that_hold_the_same_are_compared_and_no_others(name: str) -> None:
    layout, rank = LAYOUTS[name], dist.get_rank()
    model, options = layout.build()
    if name == "subgroup" and rank == 0:
        return
    with captured_log() as log, counted_collectives() as calls:
        report = fp8dist.check(model, policy="warn", **options)
    assert (report.findings, log) == ((), [])
    if layout.clean is not None:
        compared, skipped, count = layout.clean
        assert (dict(report.compared), report.skipped) == (compared, skipped)
        assert count is None or calls.names == ["all_reduce"] * count
    if rank in layout.damaged:
        _nudge(model.get_parameter(layout.name), 3)
    with captured_log() as log:
        report = fp8dist.check(model, policy="warn", **options)
    mine = [finding for finding in layout.found if not layout.apart or name == "subgroup" or rank in finding[0]]
    shown = layout.name.replace("module.", "")
    assert [(f.kind, f.name, f.ranks, f.reference_rank, f.index) for f in report.findings] == [
        ("parameter", shown, *finding) for finding in mine
    ]
    assert not layout.coords or [c for f in report.findings for c in f.mesh_coords] == layout.coords
    assert len(log) == (bool(mine) and rank == report.reporting_rank)  # Ranks are global in a subgroup, too.
    if not layout.apart:
        same_on_all_ranks(repr(report.findings))


@on_ranks(3)
def test_ranks_of_a_mesh_in_any_order_are_named_rightly() -> None:
    """A mesh whose order of ranks differs from its process group's, which is sorted."""
    mesh = DeviceMesh("cpu", [2, 0, 1], mesh_dim_names=("dp",))
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight), nn.init.ones_(model.bias)
    if dist.get_rank() == 0:
        _nudge(model.weight, 6)
    with captured_log():
        report = fp8dist.check(model, group=mesh, policy="repair")
    (finding,) = report.findings
    assert (finding.ranks, finding.reference_rank, finding.index) == ((0,), 1, (1, 2))
    assert (report.consistent, model.weight.detach().view(-1)[6].item()) == (True, 1.0)


@on_ranks(3, timeout=30)
def test_a_rank_outside_of_a_mesh_is_refused_and_not_waited_for() -> None:
    mesh, rank = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)), dist.get_rank()
    net = make_net()
    text, world = r"rank 2 is not in this DeviceMesh of ranks 0, 1\. Only members", dist.group.WORLD
    if rank == 2:
        with pytest.raises(ConfigurationError, match=text):
            fp8dist.check(net, group=mesh)
    else:
        assert fp8dist.check(net, group=mesh).consistent
    with captured_log(), pytest.raises(DivergenceError, match=text):
        fp8dist.check(net, group=world, groups={"last.*": mesh})
    groups = {"last.*": mesh if rank < 2 else None}
    assert fp8dist.check(net, group=world, groups=groups).compared == {"parameter": 6 if rank < 2 else 4}


@pytest.mark.parametrize(("view", "odd"), [("mesh", 3), ("placements", 0), ("replicated", 3)])
@on_ranks(4, timeout=60)
def test_a_rank_with_another_view_of_the_mesh_is_reported_and_not_waited_for(view: str, odd: int) -> None:
    """All ranks create both meshes; one rank places its DTensor on the other mesh, or differently."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    other = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp"))
    placements: Any = [Replicate(), Shard(0)]
    if dist.get_rank() == odd:
        mesh = other if view == "mesh" else mesh
        own = {"placements": [Shard(0), Replicate()], "replicated": [Replicate(), Replicate()]}
        placements = own.get(view, placements)
    model = nn.Module()
    model.weight = nn.Parameter(DTensor.from_local(torch.arange(8.0), mesh, placements, run_check=False))
    model.plain = nn.Parameter(torch.ones(3))
    with captured_log():
        report = fp8dist.check(model, group=dist.group.WORLD, policy="warn")
    found = [(f.kind, f.ranks, f.reference_rank) for f in report.findings]
    assert ("layout", (odd,), 1 if odd == 0 else 0) in found
    assert {kind for kind, *_ in found} == {"layout"}
    same_on_all_ranks(repr(report.findings))


@on_ranks(4, timeout=30)
def test_two_groups_of_the_same_ranks_meet_in_the_same_order_everywhere() -> None:
    """Two communicators of the same ranks, whose parameters are in different orders."""
    first, second = _pair(), [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    model = nn.Module()
    for name in ("ab", "ba")[dist.get_rank() % 2]:
        model.register_parameter(name, nn.Parameter(torch.full((3,), float(ord(name)))))
    assert fp8dist.check(model, groups={"a": first, "b": second}, policy="warn").findings == ()


@on_ranks(4, timeout=30)
def test_a_set_that_only_some_of_its_ranks_fill_is_reported_and_not_waited_for() -> None:
    """DDP keeps pairs equal. Rank 1 has zeroed its gradients, and rank 0 has not."""
    net = make_net(seed=dist.get_rank() // 2)
    manager = fp8dist.prepare(net, group=dist.group.WORLD, amax_sync=False)
    model = DistributedDataParallel(net, process_group=_pair())
    manager.attach(model, boundary="manual")
    model(batch(0, 0)[0]).sum().backward()
    if dist.get_rank() == 1:
        model.zero_grad()
    with captured_log():
        report = manager.check(parameters=False, gradients=True, policy="warn")
    found = [("layout", "DDP", (0, 1), "rank 1: nothing to compare; rank 0: something to compare")]
    assert [(f.kind, f.name, f.ranks, f.detail) for f in report.findings] == found


@pytest.mark.parametrize("first", ["ddp", "plain"])
@on_ranks(4, timeout=30)
def test_stages_of_a_pipeline_may_hold_other_kinds_of_things(first: str) -> None:
    """The first stage has no FP8, and perhaps no DDP. Of the second, rank 3 differs, or has no DDP."""
    pair, rank = _pair(), dist.get_rank()
    net = nn.Sequential(nn.Linear(16, 16))
    for parameter in net.parameters():
        nn.init.ones_(parameter)
    if rank > 1:
        manager = fp8dist.prepare(net, HISTORY, group=pair)
    stage = DistributedDataParallel(net, process_group=pair) if rank > 1 or first == "ddp" else net
    if rank > 1:
        manager.attach(stage)
    report = fp8dist.check(stage)
    slots = {"slot": 3} if rank > 1 else {}
    assert report.compared == ({} if stage is net else {"parameter": 2, **slots})
    assert (report.consistent, report.findings) == (first == "ddp", ())
    if rank == 3:
        _nudge(net[0].bias)
    with captured_log():
        found = [
            fp8dist.check(one, policy="warn").findings for one in (stage, copy.deepcopy(net) if rank == 3 else stage)
        ]
    assert [[(f.kind, f.name, f.ranks) for f in of] for of in found] == [
        [("parameter", "0.bias", (2, 3))],
        [("layout", "layout", (2, 3))],
    ]
    same_on_all_ranks(repr(found))


@pytest.mark.parametrize(
    ("damaged", "found"),
    [("block.experts.0", ("block.experts.0:input", (2, 3), None)), ("dense", ("dense:input", (3,), 0))],
)
@on_ranks(4, timeout=30)
def test_state_of_several_groups_is_compared_within_each(damaged: str, found: Any) -> None:
    """Pairs share the FP8 state of experts; all ranks share the rest."""
    pair, model = _pair(), nn.Module()
    model.block = nn.Module()
    torch.manual_seed(0)
    model.block.experts = nn.ModuleList([nn.Linear(16, 16)])
    model.dense = nn.Linear(16, 16)
    manager = fp8dist.prepare(model, HISTORY, group=dist.group.WORLD, groups={"*.experts.*": pair}).attach()
    if dist.get_rank() == 3:
        manager.slot(damaged, "input").amax.fill_(3.0)
    with captured_log():
        report = manager.check(policy="warn")
    assert [(f.kind, f.name, f.ranks, f.reference_rank) for f in report.findings] == [("history", *found)]
    same_on_all_ranks(repr(report.findings))
    assert dict(report.compared) == {"slot": 6}


@pytest.mark.parametrize("how", ["plain", "ddp", pytest.param("slots", marks=pytest.mark.slow)])
@on_ranks(2, timeout=120)
def test_a_clean_check_is_one_small_all_reduce_whatever_the_number_of_tensors(how: str) -> None:
    sizes = set()
    for count in (3, 100) if how == "slots" else (10, 300):
        model = nn.Module()
        manager = fp8dist.prepare(model, DelayedScaling(history_len=4), group=dist.group.WORLD)
        for i in range(count):
            if how == "slots":
                manager.register(f"m{i}", "input", "e4m3")
            else:
                model.register_parameter(f"p{i}", nn.Parameter(torch.full((3,), float(i))))
        called = DistributedDataParallel(model) if how == "ddp" else model
        if how == "slots":
            manager.attach()
        group = None if how == "ddp" else dist.group.WORLD
        with counted_collectives() as calls:
            report = manager.check() if how == "slots" else fp8dist.check(called, group=group)
        kind = "slot" if how == "slots" else "parameter"
        assert (report.findings, dict(report.compared), calls.names) == ((), {kind: count}, ["all_reduce"])
        sizes.update(calls.sizes)
    same_on_all_ranks(sizes)
    assert len(sizes) == 1
    assert max(sizes) <= 128


@pytest.mark.slow
@pytest.mark.parametrize(("every", "boundary"), [(1, "manual"), (3, "optimizer")])
@on_ranks(2)
def test_check_every_fires_after_so_many_steps_and_costs_nothing_in_between(every: int, boundary: str) -> None:
    job = SmallJob(HISTORY, attach={"boundary": boundary}, check_every=every)
    counts = []
    for step in range(8):
        job.backward(step)
        with counted_collectives() as calls:
            job.optimizer.step()
            if boundary == "manual":
                job.manager.step()
        job.optimizer.zero_grad()
        counts.append(len(calls.names))
    # The check after step n runs when step n + 1 ends: by then each rank has committed step n.
    assert counts == [1 + bool(step and step % every == 0) for step in range(8)]
    assert job.manager._cycle.checker.checks == sum(counts) - 8


@on_ranks(4, timeout=60)
def test_a_weight_that_drifts_is_found_by_all_ranks_at_the_next_check() -> None:
    """A weight drifts on rank 2 after the third step; checks run every second step. Who catches the error goes on, and
    the next step gets no additional check."""
    job = SmallJob(HISTORY, check_every=2, check_policy="raise")
    raised = []
    with captured_log() as log:
        for step in range(6):
            try:
                job.step(step)
            except DivergenceError as error:
                (finding,) = error.report.findings
                raised.append((step, finding.name, finding.ranks, finding.step, finding.last_good_step))
                job.optimizer.zero_grad()
            if step == 2 and dist.get_rank() == 2:
                _nudge(job.net.last.bias, 1)
    same_on_all_ranks(raised)
    # In the fifth step; the check before saw the second's update.
    assert (raised, job.manager.steps) == ([(4, "last.bias", (2,), 5, 2)], 5)
    assert len(log) == (len(raised) if dist.get_rank() == 0 else 0)


@on_ranks(4, timeout=60)
def test_the_last_good_step_is_one_that_was_good_on_all_ranks() -> None:
    """Ranks 0 and 1 have checked without the others since the last check of all ranks."""
    model, pair = _block(), _pair()
    fp8dist.check(model, group=dist.group.WORLD, step=3)
    if dist.get_rank() < 2:
        fp8dist.check(model, group=pair, step=5)
    if dist.get_rank() == 3:
        _nudge(model.norm.bias)
    with captured_log():
        report = fp8dist.check(model, group=dist.group.WORLD, step=7 + (dist.get_rank() == 1), policy="warn")
    assert [(f.kind, f.ranks, f.step, f.last_good_step) for f in report.findings] == [
        ("step", (1,), 8, 3),
        ("parameter", (3,), 8, 3),
    ]
    other = _block()  # Which ranks 2 and 3 have never checked.
    if dist.get_rank() < 2:
        fp8dist.check(other, group=pair, step=5)
    if dist.get_rank() == 2:
        _nudge(other.norm.bias)
    with captured_log():
        report = fp8dist.check(other, group=dist.group.WORLD, step=6, policy="warn")
    assert [(f.ranks, f.last_good_step) for f in report.findings] == [((2,), None)]


@on_ranks(4, timeout=60)
def test_the_last_good_step_is_that_of_the_same_kind_of_tensor() -> None:
    """Checks that do not compare the optimizer's state say nothing of it. A pickled model has the same record."""
    model = _block()
    optimizer = torch.optim.Adam(model.parameters())
    model.norm.bias.grad = torch.ones_like(model.norm.bias)
    optimizer.step()
    world: Any = dist.group.WORLD
    fp8dist.check(model, group=world, optimizer=optimizer, step=1)
    if dist.get_rank() == 2:
        optimizer.state[model.norm.bias]["exp_avg"][3] += 1
    model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    fp8dist.check(model, group=world, step=2)
    seen = []
    for damage in (lambda: None, optimizer.state.clear):
        if dist.get_rank() == 2:
            damage()
        with captured_log():
            report = fp8dist.check(model, group=world, optimizer=optimizer, step=3, policy="warn")
        seen += [(f.kind, f.ranks, f.step, f.last_good_step) for f in report.findings]
    assert {(ranks, step, good) for _, ranks, step, good in seen} == {((2,), 3, 1)}
    assert {kind for kind, *_ in seen} == {"optimizer", "layout"}


@on_ranks(4)
def test_the_last_good_step_is_that_of_a_check_of_the_same_tensors() -> None:
    """One that has left out what differs, or who, says nothing of it."""
    model, world = (
        nn.Sequential(*[nn.Linear(4, 4).requires_grad_(False).bfloat16() for _ in range(2)]),
        dist.group.WORLD,
    )
    for parameter in model.parameters():
        parameter.fill_(1)
    fp8dist.check(model, group=world, step=5)
    model[1].weight.add_(dist.get_rank() // 2)
    fp8dist.check(model, group=world, groups={"1.*": None}, step=10)
    fp8dist.check(model, group=_pair(), step=11)
    with captured_log():
        report = fp8dist.check(model, group=world, step=12, policy="warn")
    assert [(f.name, f.last_good_step) for f in report.findings] == [("1.weight", 5)]


@on_ranks(3)
def test_slots_of_two_prepared_models_are_told_apart_and_repaired() -> None:
    """They have the same names in their own models."""
    actor, critic = SmallJob(HISTORY), SmallJob(HISTORY, net=make_net(1))
    for job in (actor, critic):
        job.step(0)
    both = nn.ModuleDict({"actor": actor.called, "critic": critic.called})
    if dist.get_rank() == 1:
        actor.manager.slot("first", "input").scale.mul_(2)
    with captured_log():
        report = fp8dist.check(both, policy="repair")
    assert [(f.kind, f.name, f.ranks) for f in report.findings] == [("scale", "actor.first:input", (1,))]
    assert (report.consistent, report.compared) == (True, {"parameter": 12, "slot": 18})


@on_ranks(2)
def test_no_last_good_step_is_one_that_a_load_has_undone() -> None:
    job = SmallJob(HISTORY)
    job.step(0)
    early = job.manager.state_dict()
    job.step(1)
    job.manager.check()
    fp8dist.check(job.called, step=2)
    job.manager.load_state_dict(early)
    if dist.get_rank() == 1:
        _nudge(job.net.last.bias)
    with captured_log():
        reports = [job.manager.check(policy="warn"), fp8dist.check(job.called, step=1, policy="warn")]
    assert [(f.step, f.last_good_step) for report in reports for f in report.findings] == [(1, None)] * 2


@on_ranks(2)
def test_the_last_good_step_is_none_before_the_first_if_a_scaler_skips_steps() -> None:
    """A skipped step leaves the counter as it is."""
    found, scaler = list[tuple[int, int | None]](), torch.amp.GradScaler("cpu", init_scale=4.0)
    adamw, attach = partial(torch.optim.AdamW, fused=True), {"scaler": scaler}
    job = SmallJob(DelayedScaling(history_len=4), optimizer=adamw, attach=attach, check_policy="warn")
    job.manager.on_event(lambda e: e.report and found.extend((f.step, f.last_good_step) for f in e.report.findings))
    with captured_log():
        for step in range(3):
            loss = job.called(batch(dist.get_rank(), step)[0]).square().mean()
            scaler.scale(loss * torch.inf).backward()
            if step == 1 and dist.get_rank() == 1:
                job.manager.slot("first", "weight").scale.mul_(2)
            scaler.step(job.optimizer)
            scaler.update()
            job.optimizer.zero_grad()
    assert found == [(0, 0)]


@on_ranks(2, timeout=60)
def test_a_check_inside_join_is_refused_and_check_every_waits() -> None:
    job = SmallJob(HISTORY, check_every=1)
    before = job.manager._cycle.checker.checks
    with torch.distributed.algorithms.join.Join([job.called, job.manager]):
        for step in range(2 + dist.get_rank()):
            job.step(step)
            with pytest.raises(ConfigurationError, match="Join"):
                job.manager.check()
            if step == 0:  # Both ranks are here: a rank without an error returns.
                with pytest.raises(ConfigurationError, match="Join"):
                    fp8dist.check(job.called)
    assert job.manager._cycle.checker.checks == before
    assert job.manager.check().consistent


def test_a_single_process_verifies_nothing_and_raises_nothing() -> None:
    report = fp8dist.check(make_net())
    assert (report.consistent, report.diverged, report.compared) == (False, False, {})
    assert str(report) == "not verified: nothing was compared\nnot compared: there is one rank, or no process group"
    job = SmallJob(wrap=unwrapped, check_every=1, attach={"compute": True})
    for step in range(3):
        job.step(step)
    reports = [job.manager.check(gradients=True, optimizer=job.optimizer, policy="raise", compute=True)]
    reports += [fp8dist.check(job.net, policy="repair"), fp8dist.check_values({"lr": 0.1})]
    for report in reports:
        assert (report.consistent, report.diverged) == (False, False)
        assert report.skipped == ("there is one rank, or no process group",)
    with pytest.raises(ConfigurationError, match="policy must be one of raise, warn, repair"):
        fp8dist.check(make_net(), policy="mend")  # type: ignore[arg-type]


@on_ranks(2)
def test_a_group_of_one_rank_verifies_nothing() -> None:
    group: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    net = make_net(seed=dist.get_rank())
    reports = [fp8dist.check(net, group=group, policy="warn")]
    manager = fp8dist.prepare(net, group=group).attach()
    reports += [manager.check(policy="warn"), manager.check(parameters=False, compute=True)]
    reports += [fp8dist.check_values({"lr": 0.1}, group=group, distinct=distinct) for distinct in (False, True)]
    assert {(report.consistent, report.diverged, *report.compared) for report in reports} == {(False, False)}
    assert reports[0].unverified == {"parameter": "6 parameters that are shared with no other rank"}
    reason = "16 computations that no other rank repeats on equal hardware, versions and shapes"
    assert reports[2].unverified == {"computation": reason}


def _hybrid_fsdp1(seeds: str) -> Any:
    """Check under FSDP1 with two copies of two shards. ``seeds``: "copy" if each copy has its own."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    mesh = mesh_of((2, 2), ("replicate", "shard"))
    torch.manual_seed(mesh.get_local_rank("replicate") if seeds == "copy" else 0)
    net = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    manager = fp8dist.prepare(net, group=dist.group.WORLD)
    options: Any = {"device_mesh": mesh, "device_id": torch.device("cpu"), "use_orig_params": True}
    options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    net[0] = FullyShardedDataParallel(net[0], **options)
    sharded = FullyShardedDataParallel(net, **options)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.01)
    with captured_log():
        try:
            manager.attach(sharded, optimizer=optimizer)
        except DivergenceError as error:
            return sorted({f.kind for f in error.report.findings})
        sharded(torch.full((16, 16), 1.0 + dist.get_rank())).square().mean().backward()
        reports = [manager.check(gradients=True)]
        optimizer.step()
        reports.append(manager.check(optimizer=optimizer))
        assert all(report.consistent and not report.partial for report in reports)
        with torch.no_grad():
            next(one for one in sharded.parameters() if one.numel()).view(-1)[0] += dist.get_rank() == 3
        report = manager.check(policy="warn")
    return [(f.kind, f.ranks) for f in report.findings], manager.verified.checked_step


@pytest.mark.slow
def test_copies_of_fsdp1_shards_are_compared(four_ranks: RankPool) -> None:
    assert four_ranks.run(_hybrid_fsdp1, "all") == [([("parameter", (1, 3))], 1)] * 4
    assert four_ranks.run(_hybrid_fsdp1, "copy") == [["parameter"]] * 4


@on_ranks(2)
def test_what_ddp_trains_behind_dtensors_is_compared_after_a_forward_too() -> None:
    """Given a mesh, DDP replaces the parameters of tensor parallelism in the first forward."""
    mesh, model = mesh_of((2, 1), ("dp", "tp")), nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32))
    parallelize_module(model, mesh["tp"], {"1": ColwiseParallel()})
    ddp = DistributedDataParallel(model, device_mesh=mesh["dp"])
    weight = model[1].weight
    ddp(torch.ones(4, 16)).sum().backward()
    assert "weight" not in model[1]._parameters, "else nothing is tried"
    report = fp8dist.check(ddp, gradients=True)
    assert dict(report.compared) == {"gradient": 4, "parameter": 4}
    weight.data[2, 3] += 1 + dist.get_rank()
    with captured_log():
        report = fp8dist.check(ddp, policy="warn")
    assert [(f.name, f.ranks, f.index) for f in report.findings] == [("1.weight", (0, 1), (2, 3))]
