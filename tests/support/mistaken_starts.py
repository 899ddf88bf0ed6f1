"""Mistakes before the first step: what is prepared and attached, ranks that do not do the same, and every order of
prepare, wrap, materialise, load and attach.

Wrong arguments are in ``tests/test_arguments.py``, patterns in ``tests/job/test_prepare.py``, coverage in
``tests/job/test_coverage.py``, and settings that differ between ranks in ``tests/state/test_mismatch.py``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import BlockScaling, CurrentScaling
from tests.support.mistakes import LAYOUTS, STEPS, Case, adamw, larger, load, make_net, ranks_of
from tests.support.scenarios import NOT_SILENT, RAISED, RIGHT, WARNED, Scenarios

SCENARIOS = Scenarios()
scenario, add = SCENARIOS.scenario, SCENARIOS.add

SOON = timedelta(seconds=4)


class InPart(nn.Module):
    """Only ``proj`` can be in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.mixing = nn.Linear(32, 32), nn.Bilinear(32, 32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.proj(x)
        return self.mixing(h, h)


@scenario("FP8 leaves out a part", WARNED, "mixing", "%", once=True)
def covered_in_part(case: Case) -> None:
    case.attached(net=InPart()).train(3)


@scenario("DDP(prepare(model))", RAISED, "prepare", ranks=2)
def ddp_of_manager(case: Case) -> None:
    DistributedDataParallel(case.prepare(make_net()), process_group=case.group)  # type: ignore[arg-type]


@scenario("the group in the recipe's place", RAISED, "group=|recipe", ranks=2, everywhere=True)
def group_as_recipe(case: Case) -> None:
    fp8dist.prepare(make_net(), dist.group.WORLD)  # type: ignore[arg-type]


@scenario("prepare(ddp.module)", NOT_SILENT, "DistributedDataParallel|DDP", ranks=2)
def prepare_inside_ddp(case: Case) -> None:
    called = DistributedDataParallel(make_net(), process_group=case.group)
    case.build(net=called.module).called = called
    case.attach().train().judge(STEPS)


@scenario("prepared after it was compiled and run", NOT_SILENT, "compile")
def prepared_after_run(case: Case) -> None:
    case.called = net = make_net()
    case.compile().backward()
    compiled = case.called
    net.zero_grad()
    case.build(net=net).attach().called = compiled
    case.index = 0
    case.train().judge(STEPS)


@scenario("a part of the prepared model is attached", RAISED, "does not hold the model that was prepared")
def attach_part(case: Case) -> None:
    case.build().manager.attach(case.called.up, optimizer=case.optimizer)


ALL: dict[str, Any] = {"ranks": 2, "everywhere": True}
MISMATCH: dict[str, Any] = {**ALL, "errors": ("ManifestMismatchError",)}
DIVERGED: dict[str, Any] = {**MISMATCH, "errors": ("DivergenceError",)}


def _models(make: Callable[[int], nn.Module]) -> Callable[[Case], None]:
    """Each rank makes its own model."""
    return lambda case: case.build(net=make(case.rank)).attach(timeout=SOON)  # type: ignore[return-value]


def _wider(rank: int) -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 64 + 16 * rank), nn.Linear(64 + 16 * rank, 32))


def _narrower(rank: int) -> nn.Module:
    return make_net(dtype=(torch.float32, torch.bfloat16)[rank])


def _tied(rank: int) -> nn.Module:
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    if rank == 1:
        net[1].weight = net[0].weight
    return net


add("ranks have other widths", _models(_wider), RAISED, r"\b1\b", **MISMATCH)
add("ranks have other dtypes", _models(_narrower), RAISED, r"\bup\b|\bdown\b", "bfloat16", **MISMATCH)
add("ranks tie other weights", _models(_tied), RAISED, r"\b1\b", **MISMATCH)


@scenario("start= on one rank", RAISED, "start", **MISMATCH)
def start_on_one(case: Case) -> None:
    case.build().attach(start=None if case.rank else "raise", timeout=SOON)


@scenario("one rank attaches again", RAISED, "attach", r"rank\S* 0\b", ranks=2, loses=True)
def one_attaches_again(case: Case) -> None:
    case.attached().train(3)
    if case.rank == 1:
        case.attach(timeout=timedelta(seconds=1))


@scenario("the group lacks a rank", RAISED, "group", ranks=2)
def group_lacks_a_rank(case: Case) -> None:
    group = dist.new_group([0])
    called = DistributedDataParallel(make_net(), process_group=case.group)
    case.build(net=called.module, group=group).called = called
    case.attach(timeout=SOON)


def _smaller(layout: str) -> Callable[[Case], None]:
    """The group that is prepared has fewer ranks than that of the wrapper."""

    def program(case: Case) -> None:
        group = [dist.new_group([rank]) for rank in range(2)][case.rank]
        case.build(layout, group=group).attach(timeout=SOON).train().judge()

    return program


for _layout in ("ddp", "fsdp2"):
    add(f"the group is smaller than that of {_layout}", _smaller(_layout), RAISED, r"prepare\(group=", **ALL)
add("the group is smaller than that of fsdp1", _smaller("fsdp1"), NOT_SILENT, "group=", ranks=2)


@scenario("amax_sync=False under DDP", NOT_SILENT, "amax_sync", ranks=2)
def unsynced(case: Case) -> None:
    case.attached("ddp", amax_sync=False).train().judge(STEPS)


def _seeds(layout: str, early: bool = False) -> Callable[[Case], None]:
    """``early``: attach before wrapping."""

    def program(case: Case) -> None:
        net = make_net(case.rank)
        if case.rank == 1:
            with torch.no_grad():
                net.up.weight.mul_(0.01)
        if early:
            case.attached(net=net).layout = layout
            case.called = case.wrap(net)
        else:
            case.attached(layout, net=net)
        case.output("first forward").optimizer.zero_grad()
        case.train(6).judge()

    return program


for _layout in ("ddp", "tp"):
    add(f"ranks have other seeds, {_layout}", _seeds(_layout), RIGHT, ranks=2)
add("ranks have other seeds, attached before DDP", _seeds("ddp", True), NOT_SILENT, ranks=2)


@scenario("one rank loads other weights, DDP", NOT_SILENT, ranks=2)
def one_rank_loads(case: Case) -> None:
    """No rank's output shows this mistake. FP8 makes it no worse than it is in float32."""
    case.attached("ddp").train(2)
    if case.rank == 1:
        with torch.no_grad():
            case.called.module.down.weight.mul_(8)
    case.output().optimizer.zero_grad()
    case.train(4).judge()


def _unequal(layout: str, **settings: Any) -> Callable[[Case], None]:
    """Each rank begins with its own weights, which nothing makes equal."""

    def program(case: Case) -> None:
        net: nn.Module = make_net(case.rank)
        case.build(net=net, **settings)
        if layout == "ddp":
            case.called = DistributedDataParallel(net, process_group=case.group, init_sync=False)
        elif layout == "hsdp":
            assert case.mesh is not None
            ranks = case.mesh.mesh.reshape(2, 1)
            case.called = fully_shard(net, mesh=DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard")))
        case.attach(optimizer=adamw(case.called))

    return program


UNEQUAL = (
    r"parameter 'up\.(weight|bias)'.* rank 0 .* rank 1 ",
    r"broadcast them, before attach\(\)",
    r"attach\(start=None\)",
)
for _layout, _name, _options in (
    ("plain", "delayed", {}),
    ("plain", "switched off", {"enabled": False}),
    ("ddp", "current", {"recipe": CurrentScaling()}),
    ("hsdp", "block", {"recipe": BlockScaling()}),
):
    _program = _unequal(_layout, **_options)  # type: ignore[arg-type]
    add(f"ranks start with other weights, {_layout}, {_name}", _program, RAISED, *UNEQUAL, **DIVERGED)


BEFORE = (("prepare", "attach"), ("materialise", "load"), ("wrap", "materialise"))
"""(a, b): a must come before b. DDP and FSDP1 materialise what they wrap on their own."""

GARBAGE = 1e10
"""Uninitialised memory after to_empty, made deterministic."""


def orders(*what: str) -> list[tuple[str, ...]]:
    """Return all permutations that ``BEFORE`` allows."""
    return [
        order
        for order in itertools.permutations(what)
        if all(order.index(a) < order.index(b) for a, b in BEFORE if a in order and b in order)
    ]


def _ordered(order: Sequence[str], layout: str, meta: bool = False, early: bool = False) -> Callable[[Case], None]:
    """Load weights eight times as large as before, so that an outdated scale shows at once.

    ``early``: the optimizer is made first.
    """

    def program(case: Case) -> None:
        case.layout = layout
        case.called = net = make_net(device="meta" if meta else None)
        case.optimizer = adamw(net)
        for operation in order:
            if operation == "prepare":
                case.prepare(net)
            elif operation == "wrap":
                case.called = case.wrap(net)
            elif operation == "materialise":
                case.called.to_empty(device="cpu")
                with torch.no_grad():
                    for p in case.called.parameters():
                        p.fill_(GARBAGE)
            elif operation == "load":
                load(case.called, larger())
            elif operation == "attach":
                if not early:
                    case.optimizer = adamw(case.called)
                case.attach()
        held = {id(p) for group in case.optimizer.param_groups for p in group["params"]}
        if not early and any(id(p) not in held for p in case.called.parameters()):
            case.optimizer = adamw(case.called)
        case.output("first training forward").output("first eval forward", train=False).called.zero_grad()
        before = case.snapshot()
        case.train(4).judge()
        case.expect(case.snapshot() != before, "trains nothing, and says nothing")

    return program


MOST_TELLING = [
    ("prepare", "wrap", "attach", "load"),
    ("prepare", "attach", "wrap", "load"),
    ("load", "prepare", "wrap", "attach"),
    ("wrap", "prepare", "load", "attach"),
]
"""Loading last, attaching early, loading first, preparing late. An FP8 gather depends on all four calls, so more orders
are tested."""

USUAL = ("prepare", "wrap", "load", "attach")
ORDERS = {
    "one": orders("prepare", "load", "attach"),
    **dict.fromkeys(LAYOUTS[1:], MOST_TELLING[:2]),
    "fsdp2": MOST_TELLING,
    "gather": orders(*USUAL)[::2],
}
for _layout, _orders in ORDERS.items():
    _of = {"ranks": ranks_of(_layout)}
    for _order in _orders:
        add(f"{_layout}: {', '.join(_order)}", _ordered(_order, _layout), NOT_SILENT, **_of)
    if _layout in ("one", "ddp", "fsdp2"):
        _usual = tuple(name for name in USUAL if _layout != "one" or name != "wrap")
        add(f"{_layout}: optimizer, {', '.join(_usual)}", _ordered(_usual, _layout, early=True), NOT_SILENT, **_of)

for _order in orders("prepare", "materialise", "load", "attach")[::2]:
    add(f"one, meta: {', '.join(_order)}", _ordered(_order, "one", meta=True), NOT_SILENT | {"foreign"})
for _order in orders("prepare", "materialise", "load", "attach", "wrap")[::4]:
    _program = _ordered(_order, "fsdp2", meta=True)
    add(f"fsdp2, meta: {', '.join(_order)}", _program, NOT_SILENT | {"foreign"}, ranks=2)
