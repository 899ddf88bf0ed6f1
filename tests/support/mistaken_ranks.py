"""Mistakes in which ranks do not do the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling
from tests.support.mistaken_steps import attached
from tests.support.mistakes import STEPS, Case, adamw, make_net
from tests.support.scenarios import NOT_SILENT, RAISED, RIGHT, Scenarios

SCENARIOS = Scenarios()
scenario = SCENARIOS.scenario

MISMATCH: dict[str, Any] = {"ranks": 2, "everywhere": True, "errors": ("ManifestMismatchError",)}
SOON = timedelta(seconds=4)


def _models(make: Callable[[int], nn.Module]) -> Callable[[Case], None]:
    """Each rank makes its own model."""

    def program(case: Case) -> None:
        net = make(case.rank)
        manager = case.prepare(net)
        manager.attach(optimizer=adamw(net), timeout=SOON)

    return program


def _settings(make: Callable[[int], dict[str, Any]]) -> Callable[[Case], None]:
    """Each rank prepares with its own settings."""

    def program(case: Case) -> None:
        net = make_net()
        manager = case.prepare(net, **make(case.rank))
        manager.attach(optimizer=adamw(net), timeout=SOON)

    return program


def _widths(*sizes: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def _tied(tie: bool) -> nn.Module:
    net = _widths(32, 32, 32)
    if tie:
        net[1].weight = net[0].weight  # type: ignore[index, union-attr]
    return net


SCENARIOS.add(
    "ranks have other widths", _models(lambda r: _widths(32, 64, 64 + 16 * r, 32)), RAISED, r"\b1\b", **MISMATCH
)
SCENARIOS.add("ranks have more layers", _models(lambda r: _widths(*[32] * (3 + r))), RAISED, r"\b2\b", **MISMATCH)
SCENARIOS.add(
    "ranks have other dtypes",
    _models(lambda r: make_net(dtype=(torch.float32, torch.bfloat16)[r])),
    RAISED,
    r"\bup\b|\bdown\b",
    "bfloat16",
    **MISMATCH,
)
SCENARIOS.add("ranks tie other weights", _models(lambda r: _tied(r == 1)), RAISED, r"\b1\b", **MISMATCH)
SCENARIOS.add(
    "ranks skip others", _settings(lambda r: {"skip": ("down",) if r else ()}), RAISED, r"\bdown\b", **MISMATCH
)
SCENARIOS.add(
    "ranks have other histories",
    _settings(lambda r: {"recipe": DelayedScaling(history_len=16 * (1 + r))}),
    RAISED,
    "history_len",
    **MISMATCH,
)
SCENARIOS.add(
    "ranks have other recipes",
    _settings(lambda r: {"recipe": (DelayedScaling(), CurrentScaling())[r]}),
    RAISED,
    "recipe|scaling",
    **MISMATCH,
)
SCENARIOS.add(
    "one rank overrides a module",
    _settings(lambda r: {"overrides": {"down": CurrentScaling()} if r else {}}),
    RAISED,
    r"\bdown\b",
    **MISMATCH,
)
SCENARIOS.add(
    "one rank evaluates in high precision",
    _settings(lambda r: {"eval_precision": ("fp8", "high")[r]}),
    RAISED,
    "eval_precision",
    **MISMATCH,
)


def _flag(name: str) -> Callable[[Case], None]:
    def program(case: Case) -> None:
        if case.rank == 1:
            case.environ(name, "0")
        net, manager = case.build()
        manager.attach(optimizer=adamw(net), timeout=SOON)

    return program


for _name in ("FP8DIST_AMAX_SYNC", "FP8DIST_ENABLED"):
    SCENARIOS.add(f"{_name}=0 on one rank", _flag(_name), RAISED, _name.removeprefix("FP8DIST_"), **MISMATCH)


@scenario('boundary="manual" on one rank', RAISED, "boundary", **MISMATCH)
def boundary_on_one(case: Case) -> None:
    net, manager = case.build()
    manager.attach(optimizer=adamw(net), boundary="manual" if case.rank else "optimizer", timeout=SOON)  # type: ignore[arg-type]


@scenario("attach(optimizer=…) on one rank, attach() on the other", RAISED, "boundary|optimizer", **MISMATCH)
def optimizer_on_one(case: Case) -> None:
    net, manager = case.build()
    manager.attach(optimizer=adamw(net) if case.rank else None, timeout=SOON)


@scenario("one rank does not call attach", RAISED, r"rank\S* 1\b", ranks=2, loses=True)
def one_without_attach(case: Case) -> None:
    net, manager = case.build()
    if case.rank == 0:
        manager.attach(optimizer=adamw(net), timeout=timedelta(seconds=1))


@scenario("one rank attaches again", RAISED, "attach", r"rank\S* 0\b", ranks=2, loses=True)
def one_attaches_again(case: Case) -> None:
    net, manager, optimizer = attached(case)
    case.train(net, optimizer, 3)
    if case.rank == 1:
        manager.attach(net, optimizer=adamw(net), timeout=timedelta(seconds=1))


@scenario("the group lacks a rank", RAISED, "group", ranks=2)
def group_lacks_a_rank(case: Case) -> None:
    group = dist.new_group([0])
    called = DistributedDataParallel(make_net(), process_group=case.group)
    manager = fp8dist.prepare(called.module, group=group)  # type: ignore[arg-type]
    manager.attach(called, optimizer=adamw(called), timeout=SOON)


@scenario("the group is smaller than DDP's", RAISED, r"prepare\(group=", ranks=2, everywhere=True)
def smaller_than_ddp(case: Case) -> None:
    group = [dist.new_group([rank]) for rank in range(2)][case.rank]
    net = make_net()
    manager = fp8dist.prepare(net, group=group)  # type: ignore[arg-type]
    called = DistributedDataParallel(net, process_group=case.group)
    manager.attach(called, optimizer=adamw(called), timeout=SOON)


@scenario("the group is smaller than FSDP2's mesh", RAISED, r"prepare\(group=", ranks=2, everywhere=True)
def smaller_than_mesh(case: Case) -> None:
    group = [dist.new_group([rank]) for rank in range(2)][case.rank]
    net = make_net()
    manager = fp8dist.prepare(net, group=group)  # type: ignore[arg-type]
    called = case.wrap(net, "fsdp2")
    manager.attach(called, optimizer=adamw(called), timeout=SOON)


@scenario("the group is smaller than FSDP1's", NOT_SILENT, r"group=", ranks=2)
def smaller_than_fsdp1(case: Case) -> None:
    group = [dist.new_group([rank]) for rank in range(2)][case.rank]
    net = make_net()
    manager = fp8dist.prepare(net, group=group)  # type: ignore[arg-type]
    called = case.wrap(net, "fsdp1")
    optimizer = adamw(called)
    manager.attach(called, optimizer=optimizer, timeout=SOON)
    case.train(called, optimizer)
    case.judge(called)


@scenario("amax_sync=False under DDP", NOT_SILENT, "amax_sync", ranks=2)
def unsynced(case: Case) -> None:
    called, manager = case.build("ddp", amax_sync=False)
    optimizer = adamw(called)
    manager.attach(called, optimizer=optimizer)
    case.train(called, optimizer)
    case.judge(called, STEPS)


def _seeds(layout: str, early: bool = False) -> Callable[[Case], None]:
    """``early``: attach before wrapping."""

    def program(case: Case) -> None:
        net = make_net(case.rank)
        if case.rank == 1:
            with torch.no_grad():
                net.up.weight.mul_(0.01)
        manager = case.prepare(net, layout=layout)
        optimizer = adamw(net)
        if early:
            manager.attach(net, optimizer=optimizer)
        called = case.wrap(net, layout)
        if not early:
            optimizer = adamw(called)
            manager.attach(called, optimizer=optimizer)
        case.output(called, "first forward")
        optimizer.zero_grad()
        case.train(called, optimizer, 6, layout=layout)
        case.judge(called)

    return program


for _layout in ("ddp", "fsdp1", "gather", "tp"):
    SCENARIOS.add(f"ranks have other seeds, {_layout}", _seeds(_layout), RIGHT, ranks=2)
SCENARIOS.add("ranks have other seeds, attached before DDP", _seeds("ddp", True), NOT_SILENT, ranks=2)


@scenario("one rank loads other weights, DDP", NOT_SILENT, ranks=2)
def one_rank_loads(case: Case) -> None:
    """No rank's output shows this mistake. FP8 makes it no worse than it is in float32."""
    called, _, optimizer = attached(case, "ddp")
    case.train(called, optimizer, 2)
    if case.rank == 1:
        with torch.no_grad():
            called.module.down.weight.mul_(8)  # type: ignore[operator, union-attr]
    case.output(called)
    optimizer.zero_grad()
    case.train(called, optimizer, 4, 2)
    case.judge(called)


def _starts(layout: str, recipe: Any = None, **settings: Any) -> Callable[[Case], None]:
    """Each rank begins with its own weights, which nothing makes equal."""

    def program(case: Case) -> None:
        net = make_net(case.rank)
        manager = case.prepare(net, recipe, **settings)
        called: nn.Module = net
        if layout == "ddp":
            called = DistributedDataParallel(net, process_group=case.group, init_sync=False)
        elif layout == "hsdp":
            assert case.mesh is not None
            ranks = case.mesh.mesh.reshape(2, 1)
            called = fully_shard(net, mesh=DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard")))
        optimizer = adamw(called)
        manager.attach(called, optimizer=optimizer)
        case.train(called, optimizer, 5)

    return program


UNEQUAL: dict[str, Any] = {"ranks": 2, "everywhere": True, "errors": ("DivergenceError",)}
_OTHERS: dict[str, dict[str, Any]] = {
    "delayed": {},
    "current": {"recipe": CurrentScaling()},
    "block": {"recipe": BlockScaling()},
    "switched off": {"enabled": False},
}
for _layout, _name in itertools.product(("plain", "ddp", "hsdp"), _OTHERS):
    SCENARIOS.add(
        f"ranks start with other weights, {_layout}, {_name}",
        _starts(_layout, **_OTHERS[_name]),
        RAISED,
        r"parameter 'up\.(weight|bias)'.* rank 0 .* rank 1 ",
        r"broadcast them, before attach\(\)",
        r"attach\(start=None\)",
        **UNEQUAL,
    )


@scenario("start= on one rank", RAISED, "start", **MISMATCH)
def start_on_one(case: Case) -> None:
    net, manager = case.build()
    manager.attach(optimizer=adamw(net), start=None if case.rank else "raise", timeout=SOON)
