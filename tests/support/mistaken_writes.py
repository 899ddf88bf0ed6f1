"""Writes to weights after attach, and loading of states.

Writes in one process are in ``tests/modules/test_written_weights.py``, and those that compiled forwards see in
``test_compile.py`` beside it. Those that torch counts, to weights that are gathered in
FP8, are in ``tests/parallel/test_fsdp2_weights.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fp8dist import CurrentScaling
from tests.support.mistakes import LAYOUTS, STEPS, Case, batch, larger, load, make_net, plain, ranks_of, weights_of
from tests.support.scenarios import RAISED, RIGHT, WARNED, Scenarios
from tests.support.training import bits, state_bits

SCENARIOS = Scenarios()
scenario, add = SCENARIOS.scenario, SCENARIOS.add

MAY_WARN = frozenset({RIGHT, WARNED})

Write = Callable[[nn.Module, float, str], None]
"""Multiplies the weights whose names end with the given text."""

LAST = "down.weight"
"""The last layer: activations stay the same, so only the weights' scales matter."""


def _weights(called: nn.Module, of: str) -> list[nn.Parameter]:
    return [p for name, p in called.named_parameters() if name.endswith(of)]


def load_state_dict(called: nn.Module, factor: float, of: str) -> None:
    load(called, {n: w * (factor if n.endswith(of) else 1) for n, w in weights_of(called).items()})


@torch.no_grad()
def mul(called: nn.Module, factor: float, of: str) -> None:
    for weight in _weights(called, of):
        weight.mul_(factor)


@torch.no_grad()
def to_local(called: nn.Module, factor: float, of: str) -> None:
    for weight in _weights(called, of):
        weight.to_local().mul_(factor)  # type: ignore[attr-defined]


def summoned(called: nn.Module, factor: float, of: str) -> None:
    with FullyShardedDataParallel.summon_full_params(called):
        mul(called, factor, of)


WRITES: dict[str, tuple[Write, tuple[str, ...]]] = {
    "load_state_dict": (load_state_dict, tuple(layout for layout in LAYOUTS if layout != "gather")),
    "mul_": (mul, ("ddp", "fsdp1")),
    "to_local().mul_": (to_local, ("gather", "tp")),
    "summon_full_params": (summoned, ("fsdp1",)),
}


def _written(write: Write, layout: str, of: str) -> Callable[[Case], None]:
    def program(case: Case) -> None:
        case.attached(layout).train(2)
        write(case.called, 8.0, of)
        case.output("eval forward after the write", train=False).train(1)
        write(case.called, 8.0, of)
        case.output("training forward after the write").called.zero_grad()
        case.train(2).output("two steps later")
        if layout not in ("one", "tp"):
            states: list[Any] = [None] * case.ranks
            dist.all_gather_object(states, state_bits(case.manager), group=case.group)
            case.expect(states[0] == states[1], "the ranks' FP8 states differ")

    return program


for _name, (_write, _layouts) in WRITES.items():
    for _layout in _layouts:
        # torch counts no write to a local tensor.
        _outcome = MAY_WARN if _layout == "gather" else RIGHT
        add(f"{_name} by 8, {_layout}", _written(_write, _layout, LAST), _outcome, ranks=ranks_of(_layout))
add("load_state_dict of all layers by 8", _written(load_state_dict, "one", "weight"), RIGHT)  # Activations grow.


@scenario("weights that stay after swapped_weights()", WARNED, r"swapped_weights\(\)", "put them back inside it")
def not_swapped_back(case: Case) -> None:
    called = case.attached().train(2).called
    with case.manager.swapped_weights():
        load(called, larger())
    case.train(2)


@scenario("weights that stay after swapped_weights(), without scales that stay", RIGHT)
def not_swapped_back_without_scales(case: Case) -> None:
    called = case.attached(recipe=CurrentScaling()).train(2).called
    with case.manager.swapped_weights():
        load(called, larger())
    case.train(2)


@scenario("weights that swapped_weights() gets back but for rounding", RIGHT)
def merged_for_a_while(case: Case) -> None:
    """As a LoRA that is merged, and taken out again."""
    parameters = list(case.attached().train(2).called.parameters())
    with case.manager.swapped_weights(), torch.no_grad():
        for p in parameters:
            p.add_(0.3)
        for p in parameters:
            p.sub_(0.3)
    case.train().judge(STEPS)


@scenario("a check after steps that enlarge a weight from zero, gather", WARNED, "optimizer step has enlarged", ranks=2)
def checked_from_zero(case: Case) -> None:
    """No other code writes to it."""
    net = make_net()
    nn.init.zeros_(net.down.weight)
    case.attached("gather", net=net).train(2).manager.check(parameters=False)
    case.output()


def _shrunk(layout: str) -> Callable[[Case], None]:
    """Weights shrink after ``attach``, as when ``attach`` came before initialisation."""

    def program(case: Case) -> None:
        mul(case.build(layout).called, 2.0**20, LAST)
        mul(case.attach().called, 2.0**-20, LAST)
        case.output("eval forward", train=False).output("training forward")

    return program


def _swapped(layout: str) -> Callable[[Case], None]:
    """Training after the evaluation is bitwise equal to training without it."""

    def program(case: Case) -> None:
        outcomes = []
        for evaluate in (False, True):
            case.attached(layout).index = 0
            losses = []
            for index in range(6):
                losses.append(case.backward())
                case.step()
                case.optimizer.zero_grad()
                if not evaluate or index % 2:
                    continue
                mine = weights_of(case.called)
                with case.manager.swapped_weights():
                    load(case.called, larger(8.0, LAST))
                    case.output(f"EMA {index}", train=False)
                    load(case.called, mine)
            weights = {name: bits(value) for name, value in weights_of(case.called).items()}
            outcomes.append((torch.stack(losses).tolist(), weights, state_bits(case.manager)))
        for what, without, with_ in zip(("losses", "weights", "FP8 state"), *outcomes):
            case.expect(without == with_, f"{what} are not bitwise those without an evaluation")

    return program


for _layout in ("fsdp1", "gather"):
    add(f"mul_ by 2**-20, {_layout}", _shrunk(_layout), RIGHT, ranks=2)
    add(f"EMA in swapped_weights(), {_layout}", _swapped(_layout), RIGHT, ranks=2)


@scenario("a tied weight is written to", RIGHT)
def tied(case: Case) -> None:
    net = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    net[1].weight = net[0].weight
    case.attached(net=net).train(3)
    mul(net.eval(), 8, "weight")
    x, _ = batch(0, 9)
    case.measure("first", net[0](x), x @ net[0].weight.detach().t())


@scenario("model.bfloat16() after attach", MAY_WARN)
def converted(case: Case) -> None:
    """Optimizers with state would keep it in the former dtype."""
    case.attached(make=lambda net: torch.optim.SGD(net.parameters(), lr=0.01)).train(2).called.bfloat16()
    case.output("eval", train=False)
    for index in range(2, 6):
        x, y = batch(case.rank, index)
        output = case.called(x.bfloat16())
        case.measure(f"output {index}", output, plain(weights_of(case.called), x))
        (output.float() - y).square().mean().backward()
        case.step()
        case.optimizer.zero_grad()


@scenario("model.bfloat16() after attach, with larger weights", MAY_WARN)
def converted_and_loaded(case: Case) -> None:
    load(case.attached().train(2).called.bfloat16(), larger(8.0, LAST))
    case.output("eval", train=False).output()


@scenario("FP8 state of a model with other modules", RAISED, "up|down|slot")
def state_of_other_modules(case: Case) -> None:
    other = case.build(net=nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))).manager.state_dict()
    case.attached().manager.load_state_dict(other)


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
        called = case.build().called
        masters = [p.detach().clone().requires_grad_() for p in called.parameters()]
        if kind == "of the loop":
            case.optimizer = torch.optim.SGD(masters, lr=0.001)
        elif kind != "none":
            case.optimizer = Masters(called.parameters())
        for index in range(6):
            if index == 0 and when == "after":
                case.attach()
            if index == (0 if when == "before" else 3):
                load(called, larger(factor))
                if kind == "loaded, too":
                    case.optimizer.load_state_dict(Masters(called.parameters()).state_dict())
            if index == 0 and when == "before":
                case.attach()
            case.backward()
            if kind == "of the loop":
                for master, p in zip(masters, called.parameters()):
                    master.grad, p.grad = p.grad, None
            case.optimizer.step()
            case.optimizer.zero_grad()
            if kind == "of the loop":
                with torch.no_grad():
                    for master, p in zip(masters, called.parameters()):
                        p.copy_(master)

    return program


UNDONE = ("has undone the load", "master weights")
for _kind in ("of the loop", "of the optimizer", "loaded, too", "none"):
    for _factor, _when in ((0.1, "after"), (8.0, "before")):
        _name = f"weights times {_factor:g} are loaded {_when} attach, master copies: {_kind}"
        if _kind.startswith("of"):
            add(_name, _loaded(_kind, _factor, _when), WARNED, *UNDONE, once=True)
        else:
            add(_name, _loaded(_kind, _factor, _when), RIGHT)


@scenario("weights are loaded to go back: an evaluation of others, and a rollback by a step", RIGHT)
def loaded_back(case: Case) -> None:
    called = case.attached(make=lambda net: torch.optim.SGD(net.parameters(), lr=0.3)).called

    def copied() -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in called.state_dict().items()}

    def step() -> None:
        case.backward()
        case.optimizer.step()
        case.optimizer.zero_grad()

    for index in range(STEPS):
        before = copied()
        step()
        mine = copied()
        load(called, larger())
        case.output("others", train=False)
        load(called, mine)
        if index % 3 == 2:  # The same step once more.
            load(called, before)
            case.index -= 1
            step()
    case.output()
