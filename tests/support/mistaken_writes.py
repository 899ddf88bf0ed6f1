"""Writes to weights after attach, and loading of states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fp8dist import CurrentScaling, DelayedScaling, Recipe
from tests.support.mistaken_steps import attached
from tests.support.mistakes import (
    LAYOUTS,
    OUTPUT,
    STEPS,
    Case,
    adamw,
    batch,
    larger,
    load,
    make_net,
    plain,
    ranks_of,
    weights_of,
)
from tests.support.scenarios import RIGHT, WARNED, Scenarios
from tests.support.training import bits, state_bits

SCENARIOS = Scenarios()
scenario = SCENARIOS.scenario

Write = Callable[[nn.Module, float, str], None]
"""Multiplies the weights whose names end with the given text."""

LAST = "down.weight"
"""The last layer: activations stay the same, so only the weights' scales matter."""


def _weights(called: nn.Module, of: str) -> list[nn.Parameter]:
    return [p for name, p in called.named_parameters() if name.endswith(of)]


def load_state_dict(called: nn.Module, factor: float, of: str) -> None:
    load(called, {n: w * (factor if n.endswith(of) else 1) for n, w in weights_of(called).items()})


def mul(called: nn.Module, factor: float, of: str) -> None:
    with torch.no_grad():
        for weight in _weights(called, of):
            weight.mul_(factor)


def data_mul(called: nn.Module, factor: float, of: str) -> None:
    for weight in _weights(called, of):
        weight.data.mul_(factor)


def data_replaced(called: nn.Module, factor: float, of: str) -> None:
    for weight in _weights(called, of):
        weight.data = weight.data * factor


def copy(called: nn.Module, factor: float, of: str) -> None:
    with torch.no_grad():
        for weight in _weights(called, of):
            weight.copy_(weight * factor)


def to_local(called: nn.Module, factor: float, of: str) -> None:
    with torch.no_grad():
        for weight in _weights(called, of):
            weight.to_local().mul_(factor)  # type: ignore[attr-defined]


def replaced(called: nn.Module, factor: float, of: str) -> None:
    for name, module in called.named_modules():
        if f"{name}.weight".endswith(of) and isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.detach() * factor)


def vector(called: nn.Module, factor: float, of: str) -> None:
    weights = _weights(called, of)
    vector_to_parameters(parameters_to_vector(weights).detach() * factor, weights)


def summoned(called: nn.Module, factor: float, of: str) -> None:
    with FullyShardedDataParallel.summon_full_params(called):
        mul(called, factor, of)


def foreach(called: nn.Module, factor: float, of: str) -> None:
    with torch.no_grad():
        torch._foreach_mul_(_weights(called, of), factor)


WRITES: dict[str, tuple[Write, tuple[str, ...]]] = {
    "load_state_dict": (load_state_dict, LAYOUTS),
    "mul_": (mul, ("one", "fsdp1", "fsdp2", "gather")),
    "data.mul_": (data_mul, ("one", "ddp", "fsdp2", "gather")),
    "data =": (data_replaced, ("one",)),
    "copy_": (copy, ("one",)),
    "to_local().mul_": (to_local, ("gather", "tp")),
    "new nn.Parameter": (replaced, ("one",)),
    "vector_to_parameters": (vector, ("one",)),
    "summon_full_params": (summoned, ("fsdp1",)),
    "_foreach_mul_": (foreach, ("one", "gather")),
}


def _program(write: Write, layout: str, of: str) -> Callable[[Case], None]:
    def program(case: Case) -> None:
        called, _, optimizer = attached(case, layout)
        case.train(called, optimizer, 2, layout=layout)
        write(called, 8.0, of)
        case.output(called, "eval forward after the write", train=False)
        case.train(called, optimizer, 1, 2, layout=layout)
        write(called, 8.0, of)
        case.output(called, "training forward after the write")
        called.zero_grad()
        case.train(called, optimizer, 2, 3, layout=layout)
        case.output(called, "two steps later")

    return program


for _name, (_write, _layouts) in WRITES.items():
    for _layout in _layouts:
        _hidden = _layout == "gather" and _name in ("data.mul_", "to_local().mul_", "_foreach_mul_")
        SCENARIOS.add(
            f"{_name} by 8, {_layout}",
            _program(_write, _layout, LAST),
            frozenset({RIGHT, WARNED}) if _hidden else RIGHT,
            *(("refresh_weights|saturat|scale",) if _hidden else ()),
            ranks=ranks_of(_layout),
        )
for _layout in ("one", "gather"):  # These make activations grow.
    SCENARIOS.add(
        f"load_state_dict of all layers by 8, {_layout}",
        _program(load_state_dict, _layout, "weight"),
        RIGHT,
        ranks=ranks_of(_layout),
    )


def _shrunk(layout: str) -> Callable[[Case], None]:
    """Weights shrink after ``attach``, as when ``attach`` came before initialisation."""

    def program(case: Case) -> None:
        called, manager = case.build(layout)
        mul(called, 2.0**20, LAST)
        manager.attach(called, optimizer=adamw(called))
        mul(called, 2.0**-20, LAST)
        case.output(called, "eval forward", train=False)
        case.output(called, "training forward")

    return program


def _grown(layout: str) -> Callable[[Case], None]:
    """Weights grow a little."""

    def program(case: Case) -> None:
        called, _, optimizer = attached(case, layout)
        case.train(called, optimizer, 6, layout=layout)
        mul(called, 1.9, LAST)
        case.output(called, "eval forward", train=False)
        case.output(called, "training forward")

    return program


def _swapped_by_hand(layout: str) -> Callable[[Case], None]:
    """Evaluate an EMA by swapping weights by hand, without the context manager."""

    def program(case: Case) -> None:
        called, _, optimizer = attached(case, layout)
        case.train(called, optimizer, 4, layout=layout)
        for index in range(4, 8):
            case.train(called, optimizer, 1, index, layout=layout)
            mine = weights_of(called)
            load(called, larger(8.0 if index % 2 else 0.01, LAST))
            case.output(called, f"EMA {index}", train=False)
            load(called, mine)
            case.output(called, f"own weights {index}")
            optimizer.zero_grad()
        case.judge(called)

    return program


def _swapped(layout: str) -> Callable[[Case], None]:
    """Training after the evaluation is bitwise equal to training without it."""

    def program(case: Case) -> None:
        outcomes = []
        for evaluate in (False, True):
            called, manager, optimizer = attached(case, layout)
            losses = []
            for index in range(6):
                losses.append(case.backward(called, index, layout))
                case.step(optimizer, called)
                optimizer.zero_grad()
                if not evaluate or index % 2:
                    continue
                context: Any = manager.swapped_weights()  # type: ignore[attr-defined]
                mine = weights_of(called)
                with context:
                    load(called, larger(8.0, LAST))
                    case.output(called, f"EMA {index}", train=False)
                    load(called, mine)
            called.train()
            weights = {name: bits(value) for name, value in weights_of(called).items()}
            outcomes.append((torch.stack(losses).tolist(), weights, state_bits(manager)))
        for what, without, with_ in zip(("losses", "weights", "FP8 state"), *outcomes):
            case.expect(without == with_, f"{what} are not bitwise those without an evaluation")

    return program


for _layout in ("one", "fsdp1", "gather"):
    SCENARIOS.add(f"mul_ by 2**-20, {_layout}", _shrunk(_layout), RIGHT, ranks=ranks_of(_layout))
    SCENARIOS.add(f"mul_ by 1.9, {_layout}", _grown(_layout), RIGHT, ranks=ranks_of(_layout))
for _layout in ("one", "gather"):
    SCENARIOS.add(f"EMA swapped by hand, {_layout}", _swapped_by_hand(_layout), RIGHT, ranks=ranks_of(_layout))
for _layout in ("one", "fsdp1", "gather", "tp"):
    SCENARIOS.add(f"EMA in swapped_weights(), {_layout}", _swapped(_layout), RIGHT, ranks=ranks_of(_layout))


# Other recipes, and torch.compile ---------------------------------------------------------------------------

NEXT_STEP = DelayedScaling(update="next_step")


def _recipe(recipe: Recipe, layout: str, write: Write, factor: float) -> Callable[[Case], None]:
    def program(case: Case) -> None:
        called, manager = case.build(layout, recipe=recipe)
        optimizer = adamw(called)
        manager.attach(called, optimizer=optimizer)
        for index in range(4):
            case.train(called, optimizer, 6 if index == 0 else 1, 6 * index, layout=layout)
            write(called, factor, LAST)
            case.output(called, f"after write {index}", train=index % 2 == 0)
            called.zero_grad()

    return program


for _layout in ("one", "gather"):
    for _what, _factor in (("load_state_dict", 8.0), ("mul_", 1.9)):
        SCENARIOS.add(
            f"{_what} by {_factor:g}, next_step, {_layout}",
            _recipe(NEXT_STEP, _layout, WRITES[_what][0], _factor),
            RIGHT,
            ranks=ranks_of(_layout),
        )
for _layout in ("one", "gather"):
    SCENARIOS.add(
        f"mul_ by 8, CurrentScaling, {_layout}",
        _recipe(CurrentScaling(), _layout, mul, 8.0),
        RIGHT,
        ranks=ranks_of(_layout),
    )


def _compiled(write: Write, factor: float) -> Callable[[Case], None]:
    def program(case: Case) -> None:
        net, manager = case.build()
        called = case.compile(net)
        optimizer = adamw(net)
        manager.attach(net, optimizer=optimizer)
        for index in range(3):
            case.train(called, optimizer, 6 if index == 0 else 1, 6 * index)  # type: ignore[arg-type]
            write(net, factor, LAST)
            case.output(called, f"after write {index}", train=index % 2 == 0)  # type: ignore[arg-type]
            net.zero_grad()

    return program


# Compiled forwards do not see versions. The limit is that of eager ones.
for _name, _write, _factor in (("mul_", mul, 1.9), ("data.mul_", data_mul, 8.0)):
    SCENARIOS.add(f"{_name} by {_factor:g}, compiled", _compiled(_write, _factor), RIGHT)


@scenario("a tied weight is written to", RIGHT)
def tied(case: Case) -> None:
    net = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    net[1].weight = net[0].weight
    manager = case.prepare(net)
    optimizer = adamw(net)
    manager.attach(net, optimizer=optimizer)
    for index in range(3):
        x, y = batch(0, index)
        (net(x) - y).square().mean().backward()
        case.step(optimizer, net)
        optimizer.zero_grad()
    with torch.no_grad():
        net[0].weight.mul_(8)
    net.eval()
    x, _ = batch(0, 9)
    w = net[0].weight.detach()
    case.measure("first", net[0](x), x @ w.t(), OUTPUT)


@scenario("a parametrized weight is written to", RIGHT)
def parametrized(case: Case) -> None:
    net = make_net()
    manager = case.prepare(net)
    nn.utils.parametrizations.weight_norm(net.down)
    optimizer = adamw(net)
    manager.attach(net, optimizer=optimizer)
    case.train(net, optimizer, 3)
    for factor in (8.0, 1.9):
        with torch.no_grad():
            net.down.parametrizations.weight.original0.mul_(factor)  # type: ignore[union-attr]
        x, _ = batch(0, 9)
        with torch.no_grad():
            weights = {name: getattr(net, name).weight for name in ("up", "down")}
            biases = {name: getattr(net, name).bias for name in ("up", "down")}
            expected = plain(
                {f"{n}.weight": w for n, w in weights.items()} | {f"{n}.bias": b for n, b in biases.items()}, x
            )
            case.measure(f"by {factor}", net.eval()(x), expected, OUTPUT)
        net.train()
        case.train(net, optimizer, 3)


# Other dtypes ------------------------------------------------------------------------------------------------


def _converted(convert: Callable[[nn.Module], Any], layout: str = "one") -> Callable[[Case], None]:
    def program(case: Case) -> None:
        called, manager = case.build(layout)
        optimizer = torch.optim.SGD(called.parameters(), lr=0.01)  # Other optimizers keep state in the former dtype.
        manager.attach(called, optimizer=optimizer)
        case.train(called, optimizer, 2)
        convert(called)
        case.output(called, "eval", train=False)
        for index in range(2, 6):
            x, y = batch(case.rank, index)
            output = called(x.to(next(called.parameters()).dtype))
            case.measure(f"output {index}", output, plain(weights_of(called), x), OUTPUT)
            (output.float() - y).square().mean().backward()
            case.step(optimizer, called)
            optimizer.zero_grad()

    return program


CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "half()": lambda model: model.half(),
    "to(torch.bfloat16)": lambda model: model.to(torch.bfloat16),
    "double()": lambda model: model.double(),
}
for _name, _convert in CONVERSIONS.items():
    SCENARIOS.add(f"model.{_name} after attach", _converted(_convert), frozenset({RIGHT, WARNED}))


@scenario("model.bfloat16() after attach, with larger weights", frozenset({RIGHT, WARNED}))
def converted_and_loaded(case: Case) -> None:
    called, _, optimizer = attached(case)
    case.train(called, optimizer, 2)
    called.bfloat16()
    load(called, larger(8.0, LAST))
    case.output(called, "eval", train=False)
    case.output(called)


# FP8 states --------------------------------------------------------------------------------------------------


@scenario("FP8 state of a model with other modules", "raised", "up|down|slot")
def state_of_other_modules(case: Case) -> None:
    called, manager, optimizer = attached(case)
    other = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    manager.load_state_dict(case.prepare(other).state_dict())
    case.train(called, optimizer)


# Weights loaded under master copies ------------------------------------------------------------------------


class Masters(torch.optim.SGD):
    """Steps copies of the parameters, which are part of its state, and writes them to the parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.001)
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p] = {"master": p.detach().clone(), "step": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None:
                p.copy_(self.state[p]["master"].add_(p.grad, alpha=-0.001))


def _loaded(kind: str, factor: float, when: str) -> Callable[[Case], None]:
    """Loads other weights into the model, before or after ``attach``. ``kind``: who has the master copies."""

    def program(case: Case) -> None:
        called, manager = case.build()
        masters = [p.detach().clone().requires_grad_() for p in called.parameters()]
        if kind == "of the loop":
            optimizer: Any = torch.optim.SGD(masters, lr=0.001)
        else:
            optimizer = adamw(called) if kind == "none" else Masters(called.parameters())
        for index in range(6):
            if index == 0 and when == "after":
                manager.attach(called, optimizer=optimizer)
            if index == (0 if when == "before" else 3):
                load(called, larger(factor))
                if kind == "loaded, too":
                    optimizer.load_state_dict(Masters(called.parameters()).state_dict())
            if index == 0 and when == "before":
                manager.attach(called, optimizer=optimizer)
            case.backward(called, index)
            if kind == "of the loop":
                for master, p in zip(masters, called.parameters()):
                    master.grad, p.grad = p.grad, None
            optimizer.step()
            optimizer.zero_grad()
            if kind == "of the loop":
                with torch.no_grad():
                    for master, p in zip(masters, called.parameters()):
                        p.copy_(master)

    return program


for _kind in ("of the loop", "of the optimizer", "loaded, too", "none"):
    _lost = _kind.startswith("of")
    for _factor, _when in ((8.0, "after"), (0.1, "after"), (8.0, "before")):
        SCENARIOS.add(
            f"weights times {_factor:g} are loaded {_when} attach, master copies: {_kind}",
            _loaded(_kind, _factor, _when),
            WARNED if _lost else RIGHT,
            *(("has undone the load", "master weights") if _lost else ()),
            once=True,
        )


@scenario("weights are loaded to go back: an evaluation of others, and a rollback by a step", RIGHT)
def loaded_back(case: Case) -> None:
    called, manager = case.build()
    optimizer = torch.optim.SGD(called.parameters(), lr=0.3)
    manager.attach(called, optimizer=optimizer)
    for index in range(STEPS):
        before = {name: value.clone() for name, value in called.state_dict().items()}
        case.backward(called, index)
        optimizer.step()
        optimizer.zero_grad()
        mine = {name: value.clone() for name, value in called.state_dict().items()}
        load(called, larger())
        case.output(called, "others", train=False)
        load(called, mine)
        if index % 3 == 2:  # The same step once more.
            load(called, before)
            case.backward(called, index)
            optimizer.step()
            optimizer.zero_grad()
    case.output(called)
