"""Named axes: plain tensors that are equal at the start are copies, in jobs with parallelism written by hand."""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist.errors import ConfigurationError, DivergenceError
from tests.support import parallel
from tests.support.by_hand import WIDTH, ByHand, add_up
from tests.support.collectives import counted_collectives
from tests.support.large_world import AXES, mesh_of, world
from tests.support.large_world import SIZE as MANY
from tests.support.logs import captured_log
from tests.support.ranks import RankPool, on_ranks
from tests.support.suite import few


def _step(model: ByHand, optimizer: torch.optim.Optimizer, step: int, forgotten: str = "") -> None:
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    (model(x) * torch.arange(WIDTH)).sum().backward()
    add_up(model, forgotten)
    optimizer.step()


def _found(error: DivergenceError) -> list[Any]:
    return [(f.kind, f.name, f.step) for f in error.report.findings]


def _forgets(forgotten: str, names: bool, gradients: bool) -> Any:
    """Train four steps with checks. Return what was found, and where. From step 2 on a gradient is not added up."""
    model, axes = ByHand(dist.group.WORLD), {"tp": dist.group.WORLD} if names else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    report = fp8dist.check(model, axes=axes, step=0)
    try:
        for step in range(1, 5):
            _step(model, optimizer, step, forgotten if step > 1 else "")
            report = fp8dist.check(model, axes=axes, optimizer=optimizer, gradients=gradients, step=step)
    except DivergenceError as error:
        return sorted(set(_found(error))), str(error)
    return report.compared, report.skipped


@pytest.mark.parametrize("forgotten", few(["q_norm.weight", "out_bias", "gate.bias"], "q_norm.weight"))
def test_a_gradient_that_is_not_added_up_is_named_in_its_step(forgotten: str, four_ranks: RankPool) -> None:
    for found, text in four_ranks.run(_forgets, forgotten, True, True):
        assert found == [
            (kind, forgotten + suffix, 2)
            for kind, suffix in [
                ("gradient", ""),
                ("optimizer", ".exp_avg"),
                ("optimizer", ".exp_avg_sq"),
                ("parameter", ""),
            ]
        ]
        assert "tp=1" in text
        assert f"{forgotten}: compared along axis tp" in " ".join(text.split())


@on_ranks(2)
def test_a_job_that_adds_all_up_is_consistent_and_without_axes_nothing_is_compared() -> None:
    compared, skipped = _forgets("", True, True)
    assert compared["parameter"] == compared["gradient"] == 9
    assert compared["optimizer"] == 27
    assert "2 parameters not known to be copies along axis tp" in skipped
    with pytest.raises(ConfigurationError, match="nothing here is known to be the same on several ranks"):
        _forgets("norm.weight", False, True)


# What is no copy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("distinct", ["qkv.bias", ("none.*", "*.bi?s"), ()])
@on_ranks(2)
def test_a_shard_that_starts_as_zeros_is_distinct_or_reported_with_what_to_pass(distinct: Any) -> None:
    model = ByHand(dist.group.WORLD, bias_shard=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    axes = fp8dist.Axes({"tp": dist.group.WORLD}, distinct=distinct)

    def train() -> Any:
        for step in range(3):
            report = fp8dist.check(model, axes=axes, step=step)
            _step(model, optimizer, step)
        return report.compared

    with captured_log() as log:
        if not distinct:
            with pytest.raises(DivergenceError) as caught:
                train()
            assert _found(caught.value) == [("parameter", "qkv.bias", 1)]
            text = " ".join(str(caught.value).split())
            assert "pass axes=fp8dist.Axes(…, distinct='qkv.bias')" in text
            return
        # The second leaves out all biases of modules.
        assert train() == {"parameter": 9 if isinstance(distinct, str) else 6}
    unmatched = ["fp8dist: axis tp: distinct=none.* matches no parameter"]
    told = isinstance(distinct, tuple) and dist.get_rank() == 0
    assert [text for _, text in log] == (unmatched if told else [])


@pytest.mark.parametrize("later", [False, True])
@on_ranks(2)
def test_what_has_parted_before_is_not_compared_and_stands_out_from_its_kin(later: bool) -> None:
    """Four norms, of which one has parted before the first comparison, or after it: the module remembers what was
    equal."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.LayerNorm(WIDTH) for _ in range(4)))
    axes = {"tp": dist.group.WORLD}
    with captured_log(logging.INFO) as log:
        if later:
            fp8dist.check(model, axes=axes)
        with torch.no_grad():
            model[2].weight[5] += dist.get_rank()
        report = fp8dist.check(model, axes=axes, policy="warn", step=7)
    assert [(f.name, f.index) for f in report.findings] == ([("2.weight", (5,))] if later else [])
    assert report.compared == {"parameter": 8 if later else 7}
    texts = [
        "fp8dist: axis tp: 7 of 8 tensors are equal on its ranks, and compared from now on; not compared: *.weight (1)",
        "fp8dist: axis tp: 3 of 4 tensors *.weight are equal on its ranks, but not 2.weight: if these are copies, "
        "they have parted already, and are not compared",
    ]
    if not later:
        assert [text for _, text in log if "axis tp" in text] == ([] if dist.get_rank() else texts)


# Pipelines ---------------------------------------------------------------------------------------------


class _Stage(nn.Module):
    """One of four stages of a pipeline: the first has an embedding, the last one a head with the same weight. All have
    a norm of the same name, which is another one on each stage."""

    def __init__(self) -> None:
        super().__init__()
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        self.norm = nn.LayerNorm(8)
        weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
        if rank == 0:
            self.embed = nn.Embedding.from_pretrained(weight, freeze=False)
        if rank == last:
            self.head = nn.Linear(8, 6, bias=False)
            self.head.weight = nn.Parameter(weight)
        if 0 < rank < last:
            self.middle = nn.Linear(8, 8)


def _tied(wrong: int | None, named: bool = True) -> Any:
    """Train with equal gradients of the embedding on both stages, and other gradients of all other parameters.

    ``wrong``: the step in which the last stage misses the gradient of the first one. ``named``: the caller names the
    copies.
    """
    model = _Stage()
    copies = {"embed.weight": "head.weight"} if named else {}
    axes = fp8dist.Axes({"pp": dist.group.WORLD}, copies=copies)
    optimizer = torch.optim.Adam(model.parameters())
    reports = [fp8dist.check(model, axes=axes, step=0, optimizer=optimizer)]
    with captured_log() as log:
        try:
            for step in range(1, 4):
                for name, parameter in model.named_parameters():
                    tied = name in ("embed.weight", "head.weight")
                    parameter.grad = torch.full_like(parameter, step if tied else dist.get_rank() + 1.0)
                    if tied and step == wrong and name == "head.weight":
                        parameter.grad[3] = -9.0
                optimizer.step()
                reports.append(fp8dist.check(model, axes=axes, step=step, optimizer=optimizer))
        except DivergenceError as error:
            return [(f.kind, f.name, f.step, f.ranks, f.index) for f in error.report.findings]
    assert not log
    return reports[-1].compared, reports[-1].skipped


def test_an_embedding_that_two_stages_share_is_compared_and_named_if_it_parts(four_ranks: RankPool) -> None:
    first, *middle, last = four_ranks.run(_tied, None)
    assert first == last
    assert first[0] == {"parameter": 1, "optimizer": 3}
    assert "2 parameters not known to be copies along axis pp" in first[1]
    assert [compared for compared, _ in middle] == [{}, {}]
    for found in four_ranks.run(_tied, 2):
        assert [of for of in found if of[0] == "parameter"] == [("parameter", "head.weight", 2, (0, 3), (3, 0))]
        assert {of[1] for of in found} == {"head.weight", "head.weight.exp_avg", "head.weight.exp_avg_sq"}


@on_ranks(4)
def test_stages_have_norms_of_their_own() -> None:
    with pytest.raises(ConfigurationError, match="nothing here is known to be the same on several ranks"):
        _tied(None, False)
    axes = fp8dist.Axes({"pp": dist.group.WORLD}, copies={"embedding.weight": "head.weight"})
    text = r"copies=\{'embedding\.weight': 'head\.weight'\}: no axis \(pp\) has ranks that hold both names"
    with pytest.raises(ConfigurationError, match=text):
        fp8dist.check(_Stage(), axes=axes)


# With DDP, FSDP2 and prepared models ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrapper", "damaged", "sides", "compared"),
    [
        ("ddp", (1, 3), [(0, 1), (2, 3)], 11),  # DDP's replicas stay equal, and only the axis shows it.
        ("mesh", (1,), [(0, 1), (1, 3)], 11),  # Along both axes, and counted once.
        ("fsdp2", (2,), [(2, 3)], 9),  # Nothing else compares the shard of one rank.
    ],
)
@on_ranks(4)
def test_axes_beside_a_wrapper(wrapper: str, damaged: tuple[int, ...], sides: list[Any], compared: int) -> None:
    """Two replicas of a block that two ranks share. Damage a norm on some ranks."""
    mesh = parallel.mesh_of((2, 2), ("dp", "tp"))
    model: Any = ByHand(mesh.get_group("tp"))
    norm, called = model.final_norm, model
    if wrapper == "ddp":
        called = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    if wrapper == "fsdp2":
        fully_shard(model, mesh=mesh["dp"])
    axes = mesh if wrapper == "mesh" else {"tp": mesh.get_group("tp")}
    assert fp8dist.check(called, axes=axes).compared == {"parameter": compared}
    if dist.get_rank() in damaged:
        local = norm.weight.detach()
        local = local.to_local() if wrapper == "fsdp2" else local
        with torch.no_grad():
            local[1] += 1
    with captured_log():
        findings = fp8dist.check(called, axes=axes, policy="warn").findings
    assert sorted((f.name, f.ranks) for f in findings) == [("final_norm.weight", ranks) for ranks in sides]
    assert all({"dp", "tp"} >= set(f.mesh_coords[0] or {}) >= {"tp"} for f in findings)


def _prepared(forgotten: str) -> Any:
    torch.manual_seed(0)
    model = ByHand(dist.group.WORLD)
    axes = {"tp": dist.group.WORLD}
    manager = fp8dist.prepare(
        model, fp8dist.CurrentScaling(), group=dist.group.WORLD, check_every=2, axes=axes, skip=["router", "gate"]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with captured_log(logging.INFO) as log:
        manager.attach(model, optimizer=optimizer)
    try:
        for step in range(1, 7):
            _step(model, optimizer, step, forgotten if step == 3 else "")
    except DivergenceError as error:
        return sorted(set(_found(error))), [text for _, text in log if "axis" in text]
    return manager.check().compared["parameter"], [text for _, text in log if "axis" in text]


@pytest.mark.slow
def test_a_prepared_model_adopts_at_attach_and_checks_every_so_often(two_ranks: RankPool) -> None:
    (found, texts), _ = two_ranks.run(_prepared, "norm.weight")
    assert found == [("parameter", "norm.weight", 5)]
    assert texts == [
        "fp8dist: axis tp: 9 of 11 tensors are equal on its ranks, and compared from now on; not compared: "
        "qkv.weight (1), out.weight (1)"
    ]
    assert [found for found, _ in two_ranks.run(_prepared, "")] == [9, 9]


@on_ranks(2)
def test_a_rank_that_cannot_read_its_model_delays_the_first_comparison() -> None:
    model, axes = ByHand(dist.group.WORLD), {"tp": dist.group.WORLD}
    if dist.get_rank() == 1:
        model.norm.weight = nn.Parameter(model.norm.weight.detach().to("meta"))
    with captured_log():
        report = fp8dist.check(model, axes=axes, policy="warn")
    if dist.get_rank() == 1:
        model.norm.weight = nn.Parameter(torch.ones(WIDTH))
    assert [(f.kind, f.ranks) for f in report.findings] == [("error", (1,))]
    assert fp8dist.check(model, axes=axes).compared == {"parameter": 9}


def _listed(named: bool) -> list[str]:
    """Attach a block of two ranks, of which DDP keeps replicas on the other two. Return what is logged of axes."""
    mesh = parallel.mesh_of((2, 2), ("dp", "tp"))
    model = nn.ModuleDict({"blocks": nn.ModuleList(ByHand(mesh.get_group("tp")) for _ in range(2))})
    axes = {"tp": mesh.get_group("tp")} if named else None
    manager = fp8dist.prepare(model, group=mesh, axes=axes, skip=["*router", "*gate"])
    with captured_log(logging.INFO) as log:
        manager.attach(DistributedDataParallel(model, process_group=mesh.get_group("dp")))
    return [text for _, text in log if "equal on" in text]


def test_without_axes_attach_lists_what_is_equal_and_not_compared(four_ranks: RankPool) -> None:
    (text,), *others = four_ranks.run(_listed, False)
    assert text == (
        "fp8dist: attach(): equal on all 4 ranks, but not compared over all of them: blocks.*.out_bias (2), "
        "blocks.*.norm.weight (2), blocks.*.norm.bias (2), blocks.*.q_norm.weight (2), blocks.*.router.weight (2), "
        "blocks.*.gate.weight (2), blocks.*.gate.bias (2), blocks.*.final_norm.weight (2) and 1 more. If they are "
        "copies, name an axis: prepare(axes=…)"
    )
    assert others == [[]] * 3
    assert "18 of 22 tensors are equal on its ranks" in four_ranks.run(_listed, True)[0][0]


# Ranks that disagree, and axes that cannot be compared --------------------------------------------------


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("axes", "axis tp, compared for the first time"),
        ("copies", "axis tp: b"),
        ("memory", "axis tp, compared for the first time"),
        ("groups", "group must be a ProcessGroup or a DeviceMesh"),
    ],
)
@on_ranks(2, timeout=30)
def test_ranks_that_disagree_are_reported_and_do_not_hang(how: str, text: str) -> None:
    """Rank 1 has other axes, or an argument that is wrong."""
    rank, world = dist.get_rank(), dist.group.WORLD
    model = ByHand(world)
    given: dict[str, Any] = {
        "axes": {"axes": {"tp": world} if rank else None},
        "copies": {"axes": fp8dist.Axes({"tp": world}, copies={"a": "b"} if rank else {"a": "c"})},
        "memory": {"axes": {"tp": world}},
        "groups": {"groups": {"*": "wrong"} if rank else None},
    }[how]
    if how == "memory":
        fp8dist.check(model, **given)
        model = ByHand(world) if rank else model
    with captured_log():
        try:
            said = repr(fp8dist.check(model, policy="warn", **given).findings)
        except ConfigurationError as error:
            said = str(error)
    assert text in said


@on_ranks(4, timeout=30)
def test_all_ranks_of_an_axis_must_take_part() -> None:
    """The two ranks of a part check along an axis of all four."""
    mesh = parallel.mesh_of((2, 2), ("dp", "tp"))
    torch.manual_seed(0)
    model, given = nn.Sequential(nn.Linear(16, 16)), {"group": mesh["tp"], "axes": {"all": dist.group.WORLD}}
    manager = fp8dist.prepare(model, **given)  # type: ignore[arg-type]
    with captured_log():
        manager.attach(model)
    text = "axis all has ranks that do not take part: all ranks of an axis must check"
    for check in (manager.check, partial(fp8dist.check, nn.Linear(16, 16), **given)):  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=text):
            check()


@pytest.mark.parametrize("how", ["axes", "values"])
@on_ranks(2, timeout=30)
def test_attach_names_what_ranks_were_prepared_with(how: str) -> None:
    rank, world = dist.get_rank(), dist.group.WORLD
    model = nn.Sequential(nn.Linear(16, 16))
    options: dict[str, Any] = {"axes": {"axes": {"tp": world}}, "values": {"values": dict}}[how] if rank else {}
    manager = fp8dist.prepare(model, group=world, check_every=1, **options)
    with pytest.raises(fp8dist.ManifestMismatchError, match=how):
        manager.attach(model, start=None)


@pytest.mark.parametrize(
    "how",
    [
        *("ddp of one rank", "start=None", "no sync", "a deep copy"),
        "attached again in a wrapper",
    ],
)
@on_ranks(2)
def test_a_copy_that_parts_is_found(how: str) -> None:
    """A norm on one rank parts after it was adopted."""
    mesh = parallel.mesh_of((1, 2), ("dp", "tp"))
    tp, dp = mesh.get_group("tp"), mesh.get_group("dp")
    model: Any = ByHand(tp)
    axes, prefix = {"tp": tp}, ""
    called = DistributedDataParallel(model, process_group=dp) if how == "ddp of one rank" else model
    with captured_log():
        if how == "ddp of one rank":
            fp8dist.check(called, axes=axes)
        else:
            sync, skip = how != "no sync", ["*router", "*gate"]
            manager = fp8dist.prepare(model, group=mesh, axes=axes, amax_sync=sync, skip=skip)
            if how == "a deep copy":
                del model.group  # torch cannot copy it.
                model = called = copy.deepcopy(model)
                manager = fp8dist.get_manager(model)
            manager.attach(called, start=None if how == "start=None" else "raise")
            if how == "attached again in a wrapper":
                manager.detach()
                called, prefix = nn.ModuleDict({"inner": model}), "inner."
                manager.attach(called)
        if dist.get_rank():
            with torch.no_grad():
                model.norm.weight[3] += 1
        report = fp8dist.check(called, axes=axes, policy="warn")
    assert [f.name for f in report.findings if f.kind == "parameter"] == [f"{prefix}norm.weight"]


class _Holds(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        weight = nn.Parameter(torch.ones(4, 4))
        for name in (*names, "other"):
            self.register_module(name, nn.Linear(4, 4, bias=False))
            getattr(self, name).weight = weight if name != "other" else nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("holds", "compared"),
    [
        ([["embed", "head"], []], None),  # A V-shaped schedule: the first rank has both ends, tied.
        ([["embed", "head"], ["head"]], 1),
        ([["embed"], ["head"]], 1),
        ([["embed", "head"], ["embed", "head"]], 2),  # As along tensor parallelism: equal, and of one name.
    ],
)
@on_ranks(2)
def test_which_ranks_hold_copies(holds: list[list[str]], compared: int | None) -> None:
    model = _Holds(*holds[dist.get_rank()])
    axes = fp8dist.Axes({"pp": dist.group.WORLD}, copies={"embed.weight": "head.weight"})
    if compared is None:  # Nothing else is compared here.
        with pytest.raises(ConfigurationError, match="nothing here is known to be the same"):
            fp8dist.check(model, axes=axes)
    else:
        assert fp8dist.check(model, axes=axes).compared == {"parameter": compared}


@pytest.mark.filterwarnings("ignore")
@on_ranks(2)
def test_buffers_are_compared_along_an_axis_without_other_copies() -> None:
    """Shards of a weight, and a buffer that the ranks hold alike until rank 1 changes it, checked three times. Buffers
    without plain bytes are left out."""
    model, axes = nn.Linear(4, 4, bias=False), {"tp": dist.group.WORLD}
    nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(dist.get_rank()))
    model.register_buffer("scale", torch.ones(4))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("meta", torch.empty(3, device="meta"))
    model.register_buffer("quantized", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
    for step in range(3):
        if step and dist.get_rank() == 1:
            model.scale[2] += 1
        with captured_log():
            report = fp8dist.check(model, axes=axes, buffers=True, step=step, policy="warn")
        differs = [("buffer", "scale", (0, 1))] if step else []
        assert [(f.kind, f.name, f.ranks) for f in report.findings] == differs


@pytest.mark.parametrize("tied", [False, True])
@on_ranks(4)
def test_a_majority_of_replicas_repairs_what_has_none_along_an_axis_but_no_copies_of_other_names(tied: bool) -> None:
    """Three replicas of one rank, which has a copy along an axis on a fourth rank; or a tied weight of three ranks."""
    rank, world = dist.get_rank(), dist.group.WORLD
    replicas, copies = parallel.part_of((0, 1, 2), (3,)), parallel.part_of((0, 3), (1,), (2,))
    if tied:
        model: nn.Module = _Holds("embed") if rank == 0 else _Holds("head") if rank < 3 else _Holds()
        axes = fp8dist.Axes({"pp": world}, copies={"embed.weight": "head.weight"}, distinct="other*")
    else:
        model = nn.LayerNorm(4)
        axes = fp8dist.Axes({"tp": copies})
        model = DistributedDataParallel(model, process_group=replicas)
    with captured_log():
        fp8dist.check(model, axes=axes, policy="warn")
        if rank == (2 if tied else 0):
            with torch.no_grad():
                next(model.parameters())[0].add_(1)
        if tied:
            with pytest.raises(DivergenceError, match="nothing was copied: not all findings have a majority"):
                fp8dist.check(model, axes=axes, policy="repair")
        else:
            repaired = fp8dist.check(model, axes=axes, policy="repair").repaired
            assert repaired == ("parameter 'weight' on rank 0, from rank 1",)


# Arguments and cost ----------------------------------------------------------------------------------------


@on_ranks(2)
def test_arguments_of_another_type_are_refused() -> None:
    refused: list[tuple[Any, str]] = [
        ([("tp", 1)], "axes must map names to groups"),
        ({1: None}, "axes must map names to groups"),
        ({"tp": "group"}, "group must be a ProcessGroup or a DeviceMesh"),
    ]
    for given, text in refused:
        with pytest.raises(ConfigurationError, match=text):
            fp8dist.check(ByHand(dist.group.WORLD), axes=given)
    with pytest.raises(ConfigurationError, match="copies must map names to names"):
        fp8dist.Axes({}, copies=["embed"])  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="distinct must hold patterns"):
        fp8dist.Axes({}, distinct=3)  # type: ignore[arg-type]
    assert fp8dist.Axes.of({}) is None


def _messages(rank: int, size: int, shape: tuple[int, int], norms: int = 50) -> list[tuple[str, int]]:
    """Return the collectives of a first check and a later one, as (name, bytes), of one rank of a job."""
    # On the fake backend, which adds nothing up, ranks would seem to mean other sets. (That is one sum of 8 bytes.)
    agree = mock.patch("fp8dist.checks.protocol._disputed_memberships", return_value=[])
    with world(rank, size), agree, counted_collectives() as calls:
        mesh, model = mesh_of(("dp", "tp"), shape), nn.Sequential(*(nn.LayerNorm(4) for _ in range(norms)))
        for _ in range(2):
            assert not fp8dist.check(model, axes=mesh).findings
    return list(zip(calls.names, calls.sizes))


def test_16_384_ranks_send_the_same_messages_as_four() -> None:
    of_four = _messages(3, 4, (2, 2))
    assert [of for of in of_four if of[0] == "all_reduce"] == of_four
    assert _messages(MANY - 1, MANY, AXES) == of_four
    # Along an axis, a first check sends 16 bytes more for each tensor more, and later ones nothing more.
    more = [many - few for (_, many), (_, few) in zip(of_four, _messages(3, 4, (2, 2), 40), strict=True)]
    assert [size for size in more if size] == [16 * 20] * 2
