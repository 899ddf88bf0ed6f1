"""Which ranks are compared: replicas under tensor parallelism and HSDP, subgroups; and the cost of a check."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import fp8dist
from fp8dist import DelayedScaling, DivergenceReport, StateManager
from fp8dist.errors import ConfigurationError, DivergenceError
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.parallel import Block, same_on_all_ranks
from tests.support.ranks import RankPool, on_ranks
from tests.support.training import SmallJob, batch, make_net, unwrapped

HANG = 30.0
"""Seconds after which ranks count as hung. Some import DTensor here for the first time."""


HISTORY = DelayedScaling(history_len=3)


def _block() -> Block:
    torch.manual_seed(0)
    return Block()


def _nudge(p: nn.Parameter, place: int = 0) -> None:
    """Change one element of this rank's part of a parameter."""
    local = p.to_local() if isinstance(p, DTensor) else p.detach()
    with torch.no_grad():
        local.view(-1)[place] += 0.5


def _names(report: DivergenceReport) -> list[Any]:
    return [(f.kind, f.name, f.ranks, f.reference_rank, f.index) for f in report.findings]


@pytest.mark.parametrize(
    ("shape", "damaged", "named", "reference", "places"),
    [
        ((4,), [], [], None, []),
        ((4,), [0], [(0,)], 1, [0]),
        ((2, 2), [], [], None, []),
        ((2, 2), [3], [(2, 3)], None, [0, 1]),  # Only the odd tensor-parallel group.
    ],
)
@on_ranks(4, timeout=60)
def test_a_norm_that_drifts_under_tensor_parallelism_is_found(
    shape: tuple[int, ...],
    damaged: list[int],
    named: list[tuple[int, ...]],
    reference: int | None,
    places: list[int],
) -> None:
    """Norms drift on some ranks, in a model whose Linears are split over the last axis of a mesh."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])
    model = _block()
    plan: Any = {"norm": SequenceParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"] if len(shape) > 1 else mesh, plan)
    if dist.get_rank() in damaged:
        _nudge(model.norm.weight, 3)
    with captured_log():
        report = fp8dist.check(model, policy="warn")
    assert _names(report) == [("parameter", "norm.weight", ranks, reference, (3,)) for ranks in named]
    coords = [dict(c or {}) for f in report.findings for c in f.mesh_coords]
    assert coords == [{"tp": place} for place in places]
    same_on_all_ranks(repr(report.findings))
    assert report.compared == {"parameter": 3}  # The norm's two, and the bias of the row-wise Linear.
    assert report.skipped == ("3 parameters that are DTensors without a Replicate axis: each rank has its own",)


def _pair() -> dist.ProcessGroup:
    """Return the group of ranks 0 and 1, or of 2 and 3. COLLECTIVE."""
    return [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]  # type: ignore[return-value]


@pytest.mark.parametrize(("damaged", "found"), [([], []), ([0, 3], [(0, 1), (2, 3)])])
@on_ranks(4, timeout=HANG)
def test_plain_norms_are_compared_over_the_group_that_is_named(
    damaged: list[int], found: list[tuple[int, ...]]
) -> None:
    """Megatron's layout: plain norms, replicated over the tensor-parallel group that the caller names."""
    tp = _pair()
    model = _block()
    with torch.no_grad():  # Shards: other values on each rank of the pair.
        model.up.weight.add_(dist.get_rank())
        model.down.weight.add_(dist.get_rank())
    if dist.get_rank() in damaged:
        _nudge(model.norm.bias, 7)
    start = time.monotonic()
    with captured_log(), counted_collectives() as calls:
        report = fp8dist.check(model, groups={"norm.*": tp, "*.bias": tp}, policy="warn")
    assert time.monotonic() - start < 5
    assert _names(report) == [("parameter", "norm.bias", ranks, None, (7,)) for ranks in found]
    same_on_all_ranks(repr(report.findings))
    assert report.compared == {"parameter": 4}
    assert report.skipped == (
        "2 parameters not known to be replicated: name their group or axes, as in fp8dist.check(model, group=…)",
    )
    if not damaged:  # The anchor's, the exchange of groups, the two labels', the verdict.
        assert calls.names == ["all_reduce"] * 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "damaged", "named", "reference", "places"),
    [
        ((2, 2), [], [], None, []),
        ((2, 2), [3], [(1, 3)], None, [(0, 1), (1, 1)]),
        ((2, 2), [1, 2], [(0, 2), (1, 3)], None, [(0, 0), (1, 0), (0, 1), (1, 1)]),
        ((4, 1), [0], [(0,)], 1, [(0, 0)]),
    ],
)
@on_ranks(4, timeout=60)
def test_hsdp_replicas_that_differ_are_found_in_the_right_replica_group(
    shape: tuple[int, int],
    damaged: list[int],
    named: list[tuple[int, ...]],
    reference: int | None,
    places: list[tuple[int, int]],
) -> None:
    """``places``: coordinates (replicate, shard) of the ranks that are named."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    model = _block()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    if dist.get_rank() in damaged:
        _nudge(model.up.weight, 33)
    with captured_log(), counted_collectives() as calls:
        report = fp8dist.check(model, gradients=True, optimizer=optimizer, policy="warn")
    assert _names(report) == [("parameter", "up.weight", ranks, reference, (1, 1)) for ranks in named]
    coords = [c for f in report.findings for c in f.mesh_coords]
    assert coords == [{"replicate": replicate, "shard": shard} for replicate, shard in places]
    same_on_all_ranks(repr(report.findings))
    if not damaged:
        assert dict(report.compared) == {"parameter": 6, "gradient": 6, "optimizer": 18}
        assert calls.names == ["all_reduce"] * 4  # Number of further replica sets + 3.
    else:
        assert report.reporting_rank == (reference if reference else min(map(min, named)))


@pytest.mark.parametrize(("view", "odd"), [("none", 0), ("mesh", 3), ("placements", 0), ("replicated", 3)])
@on_ranks(4, timeout=60)
def test_a_rank_with_another_view_of_the_mesh_is_reported_and_not_waited_for(view: str, odd: int) -> None:
    """All ranks create both meshes and take part in both; one rank places its DTensor on the other mesh or
    differently."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp", "tp"))
    placements: Any = [Replicate(), Shard(0)]
    if dist.get_rank() == odd:
        mesh = other if view == "mesh" else mesh
        own = {"placements": [Shard(0), Replicate()], "replicated": [Replicate(), Replicate()]}
        placements = own.get(view, placements)
    model = nn.Module()
    model.weight = nn.Parameter(DTensor.from_local(torch.arange(8.0), mesh, placements, run_check=False))
    model.plain = nn.Parameter(torch.ones(3))
    start = time.monotonic()
    with captured_log():
        report = fp8dist.check(model, group=dist.group.WORLD, policy="warn")
    assert time.monotonic() - start < 5
    found = [(f.kind, f.ranks, f.reference_rank) for f in report.findings]
    if view == "none":
        assert found == []
    else:
        assert ("layout", (odd,), 1 if odd == 0 else 0) in found
        assert {kind for kind, *_ in found} == {"layout"}
    same_on_all_ranks(repr(report.findings))


@pytest.mark.parametrize(("axis", "pair"), [("dp", (1, 3)), ("tp", (2, 3)), ("", (0, 3))])
@on_ranks(4, timeout=60)
def test_a_tensor_replicated_over_two_axes_is_checked_over_either(axis: str, pair: tuple[int, int]) -> None:
    """A DTensor replicated on all four ranks, checked over the pairs of one mesh axis, or over the diagonals."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Module()
    model.weight = nn.Parameter(DTensor.from_local(torch.arange(8.0), mesh, [Replicate(), Replicate()]))
    if dist.get_rank() == 3:
        _nudge(model.weight, 5)
    diagonals = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    group = mesh.get_group(axis) if axis else diagonals[dist.get_rank() in (1, 2)]
    with captured_log():
        report = fp8dist.check(model, group=group, policy="warn")
    assert _names(report) == ([("parameter", "weight", pair, None, (5,))] if dist.get_rank() in pair else [])
    assert report.compared == {"parameter": 1}


@pytest.mark.parametrize(("vouched", "damaged"), [(True, 2), (False, None), (False, 2)])
@on_ranks(4, timeout=HANG)
def test_groups_of_different_sizes_with_one_rank_alone_are_not_left_waiting(vouched: bool, damaged: int | None) -> None:
    """Three ranks share, one is alone. ``vouched``: all four also share another parameter."""
    trio, alone = dist.new_group([0, 1, 2]), dist.new_group([3])
    model = _block()
    if dist.get_rank() == 3:
        _nudge(model.norm.weight, 1)
    if dist.get_rank() == damaged:
        _nudge(model.norm.bias, 2)
    pattern = "norm.*" if vouched else "*"
    with captured_log():
        report = fp8dist.check(
            model,
            group=dist.group.WORLD if vouched else None,
            groups={pattern: alone if dist.get_rank() == 3 else trio},
            policy="warn",
        )
    expected = [] if damaged is None else [("parameter", "norm.bias", (2,), 0, (2,))]
    assert _names(report) == expected


@on_ranks(4, timeout=HANG)
def test_two_groups_of_the_same_ranks_meet_in_the_same_order_everywhere() -> None:
    """Two communicators of the same ranks, whose parameters are in different orders."""
    first, second = _pair(), _pair()
    model = nn.Module()
    for name in ("ab", "ba")[dist.get_rank() % 2]:
        model.register_parameter(name, nn.Parameter(torch.full((3,), float(ord(name)))))
    assert _names(fp8dist.check(model, groups={"a": first, "b": second}, policy="warn")) == []


@on_ranks(4, timeout=HANG)
def test_stages_of_a_pipeline_are_compared_each_for_itself() -> None:
    """Pipeline stages hold different modules; two ranks share each stage."""
    pair = _pair()
    stage = dist.get_rank() // 2
    model = nn.ModuleDict({f"stage{stage}": _block()})
    if stage:
        model["head"] = nn.Linear(16, 16)
        nn.init.ones_(model["head"].weight), nn.init.ones_(model["head"].bias)
    if dist.get_rank() == 3:
        _nudge(model["head"].weight, 5)
    with captured_log():
        report = fp8dist.check(model, groups={"*": pair}, policy="warn")
    assert _names(report) == [("parameter", "head.weight", (2, 3), None, (0, 5))]
    same_on_all_ranks(repr(report.findings))


@on_ranks(4, timeout=HANG)
def test_a_subgroup_checks_by_itself_and_ranks_are_global() -> None:
    """Ranks 1, 2 and 3 run a check without rank 0."""
    group = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        return
    model = _block()
    assert _names(fp8dist.check(model, group=group, policy="warn")) == []
    if dist.get_rank() == 2:
        _nudge(model.down.bias, 4)
    with captured_log() as log:
        report = fp8dist.check(model, group=group, policy="warn")
    assert _names(report) == [("parameter", "down.bias", (2,), 1, (4,))]
    assert report.reporting_rank == 1
    assert len(log) == (dist.get_rank() == 1)


@on_ranks(4, timeout=HANG)
def test_a_part_of_the_replicas_may_check() -> None:
    """Two of four replicas check. The others do not take part."""
    pair = _pair()
    model = nn.parallel.DistributedDataParallel(make_net())
    if dist.get_rank() == 1:
        _nudge(model.module.last.bias, 2)
    with captured_log():
        report = fp8dist.check(model, group=pair, policy="warn")
    found = [("parameter", "last.bias", (0, 1), None, (2,))]
    assert _names(report) == (found if dist.get_rank() < 2 else [])
    assert report.compared["parameter"] == len(list(model.parameters()))
    assert report.skipped == ()


@on_ranks(4, timeout=HANG)
def test_ddp_over_subgroups_is_compared_within_each() -> None:
    """DDP keeps pairs equal, and the pairs train separately."""
    pair = _pair()
    net = make_net(seed=dist.get_rank() // 2)
    model = nn.parallel.DistributedDataParallel(net, process_group=pair)
    with counted_collectives() as calls:
        clean = fp8dist.check(model, policy="warn")
    if dist.get_rank() == 1:
        _nudge(net.last.bias, 2)
    with captured_log():
        report = fp8dist.check(model, policy="warn")
    found = [("parameter", "last.bias", (0, 1), None, (2,))]
    assert (_names(clean), calls.names, _names(report)) == ([], ["all_reduce"] * 4, found)


@on_ranks(4, timeout=HANG)
def test_a_set_that_only_some_of_its_ranks_fill_is_reported_and_not_waited_for() -> None:
    """DDP keeps pairs equal. Rank 1 has zeroed its gradients, and rank 0 has not."""
    pair = _pair()
    net = make_net(seed=dist.get_rank() // 2)
    manager = fp8dist.prepare(net, group=dist.group.WORLD, amax_sync=False)
    model = nn.parallel.DistributedDataParallel(net, process_group=pair)
    manager.attach(model, boundary="manual")
    model(batch(0, 0)[0]).sum().backward()
    if dist.get_rank() == 1:
        model.zero_grad()
    with captured_log():
        report = manager.check(parameters=False, gradients=True, policy="warn")
    found = [("layout", "DDP", (0, 1), "rank 1: nothing to compare; rank 0: something to compare")]
    assert [(f.kind, f.name, f.ranks, f.detail) for f in report.findings] == found


@on_ranks(4, timeout=HANG)
def test_two_ddps_over_other_groups_are_not_mixed_up() -> None:
    """Two modules, each in a DDP over different pairs."""
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    first = nn.parallel.DistributedDataParallel(make_net(seed=rank // 2), process_group=rows[rank // 2])
    second = nn.parallel.DistributedDataParallel(make_net(seed=rank % 2), process_group=columns[rank % 2])
    model = nn.ModuleDict({"first": first, "second": second})
    with captured_log():
        clean = fp8dist.check(model, policy="warn")
        if rank == 3:
            _nudge(second.module.last.bias, 2)
        report = fp8dist.check(model, policy="warn")
    assert _names(clean) == []
    assert _names(report) == [("parameter", "second.last.bias", (1, 3), None, (2,))]
    same_on_all_ranks(repr(report.findings))


@pytest.mark.parametrize("odd", [0, 2])
@on_ranks(3)
def test_ranks_of_a_mesh_in_any_order_are_named_rightly(odd: int) -> None:
    """A mesh whose order of ranks differs from its process group's, which is sorted."""
    mesh = DeviceMesh("cpu", [2, 0, 1], mesh_dim_names=("dp",))
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight), nn.init.ones_(model.bias)
    if dist.get_rank() == odd:
        _nudge(model.weight, 6)
    with captured_log():
        report = fp8dist.check(model, group=mesh, policy="repair")
    reference = 1 if odd == 0 else 0
    assert (_names(report), report.consistent, model.weight.detach().view(-1)[6].item()) == (
        [("parameter", "weight", (odd,), reference, (1, 2))],
        True,
        1.0,
    )


@on_ranks(2)
def test_a_pattern_beats_what_ddp_says() -> None:
    model = nn.parallel.DistributedDataParallel(make_net())
    if dist.get_rank() == 1:
        _nudge(model.module.last.bias)
    with captured_log():
        found = fp8dist.check(model, policy="warn")
        left_out = fp8dist.check(model, groups={"last.*": None}, policy="warn")
    assert _names(found) == [("parameter", "last.bias", (0, 1), None, (0,))]
    assert _names(left_out) == []
    assert left_out.skipped == ("2 parameters matching last.*: left out",)


@pytest.mark.parametrize(
    ("damaged", "found"),
    [
        ("block.experts.0", ("history", "block.experts.0:input", (2, 3), None, ())),
        ("dense", ("history", "dense:input", (3,), 0, ())),
    ],
)
@on_ranks(4, timeout=HANG)
def test_state_of_several_groups_is_compared_within_each(damaged: str, found: Any) -> None:
    """Pairs share the FP8 state of experts; all ranks share the rest."""
    pair = _pair()
    model = nn.Module()
    model.block = nn.Module()
    torch.manual_seed(0)
    model.block.experts = nn.ModuleList([nn.Linear(16, 16)])
    model.dense = nn.Linear(16, 16)
    manager = fp8dist.prepare(
        model, DelayedScaling(history_len=3), group=dist.group.WORLD, groups={"*.experts.*": pair}
    )
    manager.attach()
    if dist.get_rank() == 3:
        manager.slot(damaged, "input").amax.fill_(3.0)
    with captured_log():
        report = manager.check(policy="warn")
    assert _names(report) == [found]
    same_on_all_ranks(repr(report.findings))
    assert dict(report.compared) == {"slot": 6}


@pytest.mark.parametrize("how", ["plain", "ddp", pytest.param("slots", marks=pytest.mark.slow)])
@on_ranks(2, timeout=120)
def test_a_clean_check_is_one_small_all_reduce_whatever_the_number_of_tensors(how: str) -> None:
    sizes = set()
    for count in (3, 300) if how == "slots" else (10, 1_000):
        model = nn.Module()
        manager = fp8dist.prepare(model, DelayedScaling(history_len=4), group=dist.group.WORLD)
        for i in range(count):
            if how == "slots":
                manager.register(f"m{i}", "input", "e4m3")
            else:
                model.register_parameter(f"p{i}", nn.Parameter(torch.full((3,), float(i))))
        called = nn.parallel.DistributedDataParallel(model) if how == "ddp" else model
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
@pytest.mark.parametrize(
    ("every", "boundary", "ddp"), [(0, "optimizer", True), (1, "manual", False), (3, "optimizer", True)]
)
@on_ranks(2)
def test_check_every_fires_after_so_many_steps_and_costs_nothing_in_between(
    every: int, boundary: str, ddp: bool
) -> None:
    job = SmallJob(
        HISTORY,
        wrap=nn.parallel.DistributedDataParallel if ddp else unwrapped,
        attach={"boundary": boundary},
        check_every=every,
    )
    counts = []
    for step in range(8):
        job.backward(step)
        for p in () if ddp else job.net.parameters():
            dist.all_reduce(p.grad)
        with counted_collectives() as calls:
            job.optimizer.step()
            if boundary == "manual":
                job.manager.step()
        job.optimizer.zero_grad()
        counts.append(len(calls.names))
    # The check after step n runs when step n + 1 ends: by then each rank has committed step n.
    assert counts == [1 + bool(every and step and step % every == 0) for step in range(8)]
    assert job.manager._cycle.checker.checks == sum(counts) - 8


@pytest.mark.parametrize(
    "policy", ["raise", *(pytest.param(name, marks=pytest.mark.slow) for name in ("warn", "repair"))]
)
@on_ranks(4, timeout=60)
def test_a_weight_that_drifts_is_found_by_all_ranks_at_the_next_check(policy: str) -> None:
    """A weight drifts on rank 2 after the third step; checks run every second step. One rank speaks."""
    job = SmallJob(HISTORY, check_every=2, check_policy=policy)
    told: list[Any] = []
    job.manager.on_event(lambda event: told.append((event.kind, event.step)))
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
    if policy == "raise":  # In the fifth step; the previous check saw the update of the second.
        assert raised[0] == (4, "last.bias", (2,), 5, 2)
        assert told[0] == ("diverged", 5)
    else:
        assert raised == []
        assert ("diverged", 5) in told
        assert policy == "warn" or len(told) == 1
    said = len(raised) if policy == "raise" else len(told)
    assert len(log) == (said if dist.get_rank() == 0 else 0)


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


@pytest.mark.parametrize("pickled", [False, True], ids=["", "pickled"])
@on_ranks(4, timeout=60)
def test_the_last_good_step_is_that_of_the_same_kind_of_tensor(pickled: bool) -> None:
    """Checks that do not compare the optimizer's state say nothing of it."""
    torch.manual_seed(0)
    model = _block()
    optimizer = torch.optim.Adam(model.parameters())
    model.norm.bias.grad = torch.ones_like(model.norm.bias)
    optimizer.step()
    world: Any = dist.group.WORLD
    fp8dist.check(model, group=world, optimizer=optimizer, step=1)
    if dist.get_rank() == 2:
        optimizer.state[model.norm.bias]["exp_avg"][3] += 1
    if pickled:
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


@on_ranks(4, timeout=60)
def test_no_step_was_good_on_a_rank_that_has_not_checked() -> None:
    """Rank 2 has never checked before, and rank 3 never does."""
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(1.0)
    trio, pair = dist.new_group([0, 1, 2]), dist.new_group([0, 1])
    if dist.get_rank() < 2:
        fp8dist.check(model, group=pair, step=5)  # type: ignore[arg-type]
    if dist.get_rank() == 2:
        _nudge(model.bias)
    if dist.get_rank() < 3:
        with captured_log():
            report = fp8dist.check(model, group=trio, step=6, policy="warn")  # type: ignore[arg-type]
        assert [(f.ranks, f.last_good_step) for f in report.findings] == [((2,), None)]


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
    job = SmallJob(wrap=unwrapped, check_every=1)
    for step in range(3):
        job.step(step)
    assert not job.manager.check(gradients=True, optimizer=job.optimizer, policy="raise").diverged
    assert not fp8dist.check(job.net, policy="repair").diverged


def test_a_wrong_policy_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="policy must be one of raise, warn, repair"):
        fp8dist.check(make_net(), policy="mend")  # type: ignore[arg-type]


@on_ranks(2)
def test_a_group_of_one_rank_verifies_nothing() -> None:
    group = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    manager: StateManager
    net = make_net(seed=dist.get_rank())
    with counted_collectives() as calls:
        report = fp8dist.check(net, group=group, policy="warn")
        manager = fp8dist.prepare(net, group=group).attach()
        second = manager.check(policy="warn")
    assert {report.consistent, report.diverged, second.consistent, second.diverged} == {False}
    reason = "6 parameters that are shared with no other rank"
    assert report.compared == {}
    assert dict(report.unverified) == {"parameter": reason}
    assert second.compared == {}
    assert [name for name in calls.names if name != "all_reduce"] == []


def _hybrid_fsdp1(seeds: str, strategy: str) -> Any:
    """Train under FSDP1 with two copies of two shards. ``seeds``: "copy" if each copy has its own."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(mesh.get_local_rank("replicate") if seeds == "copy" else 0)
    net = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    manager = fp8dist.prepare(net, group=dist.group.WORLD)
    options: Any = {
        "sharding_strategy": ShardingStrategy[strategy],
        "device_mesh": mesh,
        "device_id": torch.device("cpu"),
        "use_orig_params": True,
    }
    net[0] = FullyShardedDataParallel(net[0], **options)
    sharded = FullyShardedDataParallel(net, **options)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.01)
    with captured_log():
        try:
            manager.attach(sharded, optimizer=optimizer)
        except fp8dist.DivergenceError as error:
            return sorted({f.kind for f in error.report.findings})
        for step in range(3):
            x = torch.randn(16, 16, generator=torch.Generator().manual_seed(4 * step + dist.get_rank()))
            sharded(x).square().mean().backward()
            reports = [manager.check(gradients=True)]
            optimizer.step()
            optimizer.zero_grad()
            reports.append(manager.check(optimizer=optimizer))
            assert all(report.consistent and not report.partial for report in reports)
        with torch.no_grad():
            next(one for one in sharded.parameters() if one.numel()).view(-1)[0] += dist.get_rank() == 3
        report = manager.check(policy="warn")
    return [(f.kind, f.ranks) for f in report.findings], manager.verified.checked_step


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_copies_of_fsdp1_shards_are_compared(four_ranks: RankPool, strategy: str) -> None:
    found = four_ranks.run(_hybrid_fsdp1, "all", strategy)
    assert found == [([("parameter", (1, 3))], 3)] * 4
    assert four_ranks.run(_hybrid_fsdp1, "copy", strategy) == [["parameter"]] * 4
