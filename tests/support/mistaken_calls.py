"""Mistakes with patterns, groups and the argument of ``prepare``, and models that FP8 covers in part.

Wrong arguments are in ``tests/test_arguments.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import CurrentScaling
from tests.support.mistakes import STEPS, Case, Net, adamw, make_net
from tests.support.scenarios import NOT_SILENT, RAISED, RIGHT, SAID, WARNED, Scenarios

SCENARIOS = Scenarios()
scenario = SCENARIOS.scenario


# What FP8 does not cover -----------------------------------------------------------------------------------


class Experts(nn.Module):
    """Like Mixtral's in transformers: all experts in 3-D parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 32, 64) * 0.1)
        self.down_proj = nn.Parameter(torch.randn(4, 32, 32) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("ti,eio->teo", x, self.gate_up_proj)
        gate, up = h.chunk(2, -1)
        return torch.einsum("teo,eoi->ti", torch.relu(gate) * up, self.down_proj)


class Conv1D(nn.Module):
    """Like GPT-2's in transformers: a Linear with a transposed weight."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.1)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class Attention(nn.Module):
    """Wraps torch's MultiheadAttention."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x[None], x[None], x[None])[0]
        return y[0]


class Both(nn.Module):
    """Uses one tensor for both factors of a bilinear form."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(32, 32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x)


def _covered(name: str, make: Callable[[], nn.Module], strict: bool) -> Callable[[Case], None]:
    def program(case: Case) -> None:
        model = nn.ModuleDict({"proj": nn.Linear(32, 32), name: make()})
        options = {"strict": True} if strict else {}
        manager = case.prepare(model, **options)
        optimizer = adamw(model)
        manager.attach(optimizer=optimizer)
        for _ in range(3):
            model[name](model["proj"](torch.randn(8, 32))).square().mean().backward()
            optimizer.step()

    return program


PARTS: dict[str, Callable[[], nn.Module]] = {
    "experts": Experts,
    "c_attn": lambda: Conv1D(32, 32),
    "attention": Attention,
    "mixing": Both,
}
for _name, _make in PARTS.items():
    SCENARIOS.add(f"FP8 leaves out {_name}", _covered(_name, _make, False), WARNED, _name, "%", once=True)
    SCENARIOS.add(f"FP8 leaves out {_name}, strict", _covered(_name, _make, True), RAISED, _name)


@scenario("strict, and all is FP8", RIGHT)
def strict(case: Case) -> None:
    called, manager = case.build(strict=True)
    optimizer = adamw(called)
    manager.attach(optimizer=optimizer)
    case.train(called, optimizer)
    case.judge(called, STEPS)


@scenario("no Linear is eligible", SAID, "eligible|FP8")
def none_eligible(case: Case) -> None:
    case.prepare(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)))


# Patterns -----------------------------------------------------------------------------------------------------


class Named(nn.Module):
    """A model with q_proj, k_proj and lm_head."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(32, 32), nn.Linear(32, 64)
        self.lm_head = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.k_proj(self.q_proj(x)))


def _kept(case: Case, model: Named, expected: dict[str, bool], **options: Any) -> None:
    case.prepare(model, **options)
    found = {name: type(child) is nn.Linear for name, child in model.named_children()}
    case.expect(found == expected, f"in high precision: {found}, expected {expected}")


@scenario("skip keeps its defaults", frozenset({RIGHT, WARNED}), "%")
def skip_adds(case: Case) -> None:
    _kept(case, Named(), {"q_proj": True, "k_proj": False, "lm_head": True}, skip=("*q_proj",))


@scenario("skip that matches nothing", WARNED, "q_porj", "q_proj", once=True)
def skip_typo(case: Case) -> None:
    case.prepare(Named(), skip=("q_porj",))


@scenario("groups that match nothing", WARNED, "q_porj", "q_proj", ranks=2, once=True)
def groups_typo(case: Case) -> None:
    case.prepare(Named(), groups={"q_porj": case.group})


@scenario("overrides that match nothing", WARNED, "q_porj", "q_proj", once=True)
def overrides_typo(case: Case) -> None:
    case.prepare(Named(), overrides={"q_porj": CurrentScaling()})


@scenario("set_precision of what there is not", RAISED, "q_porj", "q_proj")
def set_precision_typo(case: Case) -> None:
    model = Named()
    manager = case.prepare(model)
    manager.attach(optimizer=adamw(model))
    manager.set_precision("q_porj", "high")


@scenario("skip is a string", NOT_SILENT, "skip")
def skip_is_a_string(case: Case) -> None:
    _kept(case, Named(), {"q_proj": True, "k_proj": False, "lm_head": True}, skip="*q_proj")


# Arguments ----------------------------------------------------------------------------------------------------


@scenario("DDP(prepare(model))", RAISED, "prepare", ranks=2)
def ddp_of_manager(case: Case) -> None:
    DistributedDataParallel(case.prepare(make_net()), process_group=case.group)  # type: ignore[arg-type]


@scenario("the group in the recipe's place", RAISED, "group=|recipe", ranks=2, everywhere=True)
def group_as_recipe(case: Case) -> None:
    fp8dist.prepare(make_net(), dist.group.WORLD)  # type: ignore[arg-type]


@scenario("several ranks and no group", RAISED, "group=", ranks=2, everywhere=True)
def no_group(case: Case) -> None:
    fp8dist.prepare(make_net()).attach()


# What is prepared ---------------------------------------------------------------------------------------------


@scenario("prepare(ddp)", NOT_SILENT, "DistributedDataParallel|DDP", ranks=2)
def prepare_ddp(case: Case) -> None:
    called = DistributedDataParallel(make_net(), process_group=case.group)
    manager = case.prepare(called)
    optimizer = adamw(called)
    manager.attach(called, optimizer=optimizer)
    case.train(called, optimizer)
    case.judge(called, STEPS)


@scenario("prepare(ddp.module)", NOT_SILENT, "DistributedDataParallel|DDP", ranks=2)
def prepare_inside_ddp(case: Case) -> None:
    called = DistributedDataParallel(make_net(), process_group=case.group)
    manager = case.prepare(called.module)
    optimizer = adamw(called)
    manager.attach(called, optimizer=optimizer)
    case.train(called, optimizer)
    case.judge(called, STEPS)


@scenario("prepare(ddp), attach without the module", NOT_SILENT, "DistributedDataParallel|DDP|module", ranks=2)
def prepare_ddp_attach_alone(case: Case) -> None:
    called = DistributedDataParallel(make_net(), process_group=case.group)
    optimizer = adamw(called)
    case.prepare(called.module).attach(optimizer=optimizer)
    case.train(called, optimizer)
    case.judge(called, STEPS)


@scenario("a compiled model is prepared", NOT_SILENT, "compile")
def prepare_compiled(case: Case) -> None:
    called = case.compile(make_net())
    manager = case.prepare(called)  # type: ignore[arg-type]
    optimizer = adamw(called)
    manager.attach(optimizer=optimizer)
    case.train(called, optimizer)  # type: ignore[arg-type]
    case.judge(called, STEPS)  # type: ignore[arg-type]


@scenario("prepared after it was compiled and run", NOT_SILENT, "compile")
def prepared_after_run(case: Case) -> None:
    net = make_net()
    called = case.compile(net)
    called(torch.randn(4, 32)).sum().backward()
    net.zero_grad()
    manager = case.prepare(net)
    optimizer = adamw(net)
    manager.attach(optimizer=optimizer)
    case.train(called, optimizer)  # type: ignore[arg-type]
    case.judge(called, STEPS)  # type: ignore[arg-type]


@scenario("prepared twice", RAISED, "prepared already")
def prepared_twice(case: Case) -> None:
    net = make_net()
    case.prepare(net)
    case.prepare(net)


@scenario("a part is prepared, then the whole", RAISED, "prepared already")
def nested_inside(case: Case) -> None:
    net = make_net()
    case.prepare(net.up)
    case.prepare(net)


@scenario("the whole is prepared, then a part", RAISED, "prepared already")
def nested_outside(case: Case) -> None:
    net = make_net()
    case.prepare(net)
    case.prepare(net.up)


@scenario("a module that is not the prepared one is attached", RAISED, "prepared")
def attach_stranger(case: Case) -> None:
    net, manager = case.build()
    manager.attach(make_net(), optimizer=adamw(net))


@scenario("a part of the prepared model is attached", RAISED, "prepared")
def attach_part(case: Case) -> None:
    net, manager = case.build()
    assert isinstance(net, Net)
    manager.attach(net.up, optimizer=adamw(net))


@scenario("attached after restore", RAISED, r"prepare\(")
def attach_restored(case: Case) -> None:
    net, manager = case.build()
    fp8dist.restore(net)
    manager.attach(optimizer=adamw(net))
