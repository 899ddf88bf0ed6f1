"""The collective: histories and scales on every rank equal those of an oracle that saw all ranks."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8dist
from fp8dist import DelayedScaling, StateManager
from tests.support.collectives import counted_collectives
from tests.support.oracle import Oracle, Rules, amax_of
from tests.support.ranks import RankPool, on_ranks
from tests.support.states import state_of

Slot = tuple[str, str]

UPDATES = pytest.mark.parametrize("update", ["same_step", "next_step"])
FOREIGN: dict[Slot, str] = {
    ("a", "grad_output"): "e5m2",
    ("a", "input"): "e4m3",
    ("a", "weight"): "e4m3",
    ("b", "input"): "e5m2",
}
HIDDEN = 32


def _tensor(words: list[int]) -> Tensor:
    """Return a float32 tensor with exactly these bits."""
    return torch.frombuffer(bytearray(struct.pack(f"<{len(words)}I", *words)), dtype=torch.float32)


def _foreign_manager(update: str, **settings: Any) -> tuple[nn.Module, StateManager]:
    model = nn.Module()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=3, update=update), group=dist.group.WORLD, **settings)
    for (fqn, role), format in FOREIGN.items():
        manager.register(fqn, role, format)
    return model, manager


def _record_plan(plan: list[list[dict[Slot, list[list[int]]]]], update: str) -> list[Any]:
    """Follow ``plan[step][rank][slot]``: a list of tensors, as bits, that this rank records in this step."""
    _model, manager = _foreign_manager(update)
    manager.attach()
    states = []
    for step in plan:
        for (fqn, role), tensors in step[dist.get_rank()].items():
            for words in tensors:
                manager.slot(fqn, role).record(_tensor(words))
        manager.step()
        states.append(state_of(manager))
    return states


def _word(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def _expected(plan: list[list[dict[Slot, list[list[int]]]]]) -> list[Any]:
    oracle = Oracle(FOREIGN, Rules(3))
    states = []
    for step in plan:
        local = [
            {
                slot: amax_of(struct.unpack("<f", struct.pack("<I", w))[0] for words in tensors for w in words)
                for slot, tensors in rank.items()
            }
            for rank in step
        ]
        oracle.step(*local)
        states.append(oracle.state())
    return states


NAN, NEGATIVE_NAN, ALL_ONES, INF, NEGATIVE_INF = 0x7FC00000, 0xFFC00000, 0xFFFFFFFF, 0x7F800000, 0xFF800000
A, B = ("a", "input"), ("b", "input")
ONE, TWO, FIVE = (_word(v) for v in (1.0, -2.0, 5.0))

NAMED_PLANS: dict[str, list[list[dict[Slot, list[list[int]]]]]] = {
    "nobody runs anything": [[{A: [[ONE]]}, {}], [{}, {}], [{}, {A: [[TWO]]}]],
    "zero is an amax": [[{A: [[FIVE]]}, {A: [[ONE]]}], *[[{A: [[0, 0x80000000]]}, {A: [[0]]}]] * 4],
    "zero first": [[{A: [[0]]}, {A: [[0]]}], [{A: [[ONE]]}, {A: [[0]]}]],
    "NaN of both signs": [
        [{A: [[ONE, NAN]]}, {A: [[FIVE]]}],
        [{A: [[NEGATIVE_NAN, ONE]]}, {A: [[FIVE]]}],
        [{A: [[FIVE]]}, {A: [[ALL_ONES, FIVE]]}],
        [{A: [[TWO]]}, {A: [[ONE]]}],
    ],
    "NaN on one, Inf on another": [
        [{A: [[NAN]], B: [[ONE]]}, {A: [[INF]], B: [[NEGATIVE_INF, ONE]]}],
        [{A: [[NEGATIVE_INF]]}, {A: [[ALL_ONES]]}],
        [{A: [[TWO]]}, {}],
    ],
    "subnormal and huge": [[{A: [[1]]}, {A: [[2]]}], [{A: [[0x7F7FFFFF]]}, {A: [[1]]}], [{A: [[3]]}, {A: [[4]]}]],
}
"""More, at random, below: ranks that skip, and several tensors in a step."""


def test_recorded_amaxes_give_the_oracles_state(two_ranks: RankPool) -> None:
    for i, plan in enumerate(NAMED_PLANS.values()):
        assert two_ranks.run(_record_plan, plan, ("same_step", "next_step")[i % 2]) == [_expected(plan)] * 2


def _random_plan(seed: int, world_size: int, steps: int) -> list[list[dict[Slot, list[list[int]]]]]:
    rng = random.Random(seed)

    def word() -> int:
        kind = rng.randrange(12)
        if kind == 0:
            return rng.choice([NAN, NEGATIVE_NAN, ALL_ONES, 0x7F800001])
        if kind == 1:
            return rng.choice([INF, NEGATIVE_INF])
        if kind == 2:
            return rng.choice([0, 0x80000000])
        if kind == 3:
            return rng.randrange(1, 0x00800000)
        if kind == 4:
            return rng.randrange(0x7F000000, 0x7F800000)
        return rng.randrange(0x3F000000, 0x41000000) | rng.choice([0, 1 << 31])

    def tensors() -> list[list[int]]:
        return [[word() for _ in range(rng.randrange(1, 3))] for _ in range(rng.randrange(1, 3))]

    return [
        [{slot: tensors() for slot in FOREIGN if rng.random() < 0.6} for _ in range(world_size)] for _ in range(steps)
    ]


@pytest.mark.slow
@UPDATES
def test_random_amaxes_give_the_oracles_state(three_ranks: RankPool, update: str) -> None:
    plan = _random_plan(("same_step", "next_step").index(update), 3, 40)
    assert three_ranks.run(_record_plan, plan, update) == [_expected(plan)] * 3


class _Branches(nn.Module):
    """Layers that run in the order that the caller gives."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.layers = nn.ModuleDict({name: nn.Linear(HIDDEN, HIDDEN, bias=False) for name in "pqrst"})
        for parameter in self.parameters():
            parameter.data.normal_(0, 0.2, generator=generator)
        self.layers["t"].weight.data.zero_()

    def forward(self, x: Tensor, order: str) -> Tensor:
        """Return the sum of the layers named in ``order``."""
        for name in order:
            x = x + self.layers[name](x)
        return x


class _Watcher:
    """Records amaxes with plain hooks, without the library."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[Slot, float | None] = {}
        for fqn, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(self._hook(fqn))

    def _hook(self, fqn: str) -> Callable[..., None]:
        def after(module: nn.Linear, args: tuple[Tensor], output: Tensor) -> None:
            self._see((fqn, "input"), args[0])
            self._see((fqn, "weight"), module.weight)
            output.register_hook(lambda gradient: self._see((fqn, "grad_output"), gradient))

        return after

    def _see(self, slot: Slot, tensor: Tensor) -> None:
        values = tensor.detach().flatten().tolist()
        earlier = self.seen.get(slot)
        self.seen[slot] = amax_of(values if earlier is None else [*values, earlier])

    def take(self) -> dict[Slot, float | None]:
        """Return and clear the recorded amaxes."""
        seen, self.seen = self.seen, {}
        return seen


def _started(update: Any, lr: float = 0.1, **settings: Any) -> tuple[_Branches, StateManager, Any, Any]:
    """Return branches that are attached, their optimizer, and a watcher, whose ``weights`` are the amaxes so far."""
    model = _Branches()
    watcher: Any = _Watcher(model)
    manager = fp8dist.prepare(model, DelayedScaling(history_len=3, update=update), group=dist.group.WORLD, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    manager.attach(optimizer=optimizer)
    linears = ((fqn, m) for fqn, m in model.named_modules() if isinstance(m, nn.Linear))
    watcher.weights = {(fqn, "weight"): amax_of(m.weight.flatten().tolist()) for fqn, m in linears}
    return model, manager, optimizer, watcher


@pytest.mark.parametrize(("update", "amax_sync"), [("same_step", True), ("next_step", True), ("same_step", False)])
@on_ranks(2)
def test_one_collective_per_step_and_none_outside(update: Any, amax_sync: bool, tmp_path: Path) -> None:
    """Without a sync there is none at all."""
    counts: dict[str, Any] = {}

    def counted(name: str, function: Callable[[], Any]) -> Any:
        with counted_collectives() as calls:
            result = function()
        counts[name] = list(zip(calls.names, calls.sizes))
        return result

    model = _Branches()
    recipe = DelayedScaling(history_len=3, update=update)
    manager = counted("prepare", lambda: fp8dist.prepare(model, recipe, group=dist.group.WORLD, amax_sync=amax_sync))
    counted("register", lambda: manager.register("foreign", "input", "e4m3"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counted("attach", lambda: manager.attach(optimizer=optimizer))
    x = torch.ones(4, HIDDEN)
    for step in range(3):
        counted(f"forward and backward {step}", lambda: model(x, "pq").sum().backward())
        counted(f"step {step}", optimizer.step)

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            model(x, "pqr")
        model.train()

    counted("eval", evaluate)
    counted("step after eval", optimizer.step)
    counted("state", lambda: (state_of(manager), manager.metrics(), manager.steps))
    path = f"{tmp_path}/state-{{rank}}"
    counted("step before save", optimizer.step)
    counted("save", lambda: manager.save(path))
    counted("load", lambda: manager.load(path))
    counted("load_state_dict", lambda: manager.load_state_dict(manager.state_dict()))
    counted("set_scale", lambda: manager.slot("foreign", "input").set_scale(2.0))
    counted("refresh_weights", manager.refresh_weights)
    counted("detach", manager.detach)
    slots = 3 * 5 + 1
    assert len(manager.slots) == slots
    for name, calls in counts.items():
        if not amax_sync:
            assert calls == [], name
        elif name.startswith("step"):
            assert calls == [("all_reduce", 4 * (8 + slots))], name
        elif name == "attach":  # Compares parameters, then derives the scales of weights.
            assert [call for call, _ in calls] == ["all_reduce"] * 2
            assert calls[0][1] <= 128
            assert calls[1][1] == 4 * slots
        elif name == "refresh_weights":
            assert [call for call, _ in calls] == ["all_reduce"], name
        else:
            assert calls == [], name


def _several_arenas(update: str) -> dict[str, Any]:
    rank = dist.get_rank()
    pair_01, pair_12, only_0, only_2 = (dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0], [2]))
    mine = {"layers.[pq]": only_2 if rank == 2 else pair_01, "layers.r": only_0 if rank == 0 else pair_12}
    model, manager, optimizer, watcher = _started(update, groups=mine)
    generator = torch.Generator().manual_seed(7 + rank)
    local, states, calls = [], [], []
    for step in range(3):
        model(
            torch.randn(4, HIDDEN, generator=generator), ["pqrst", "rqpps", "trp"][(rank + step) % 3]
        ).sum().backward()
        with counted_collectives() as seen:
            optimizer.step()
        optimizer.zero_grad()
        calls.append(sorted(zip(seen.names, seen.sizes)))
        local.append(watcher.take())
        states.append(state_of(manager))
    return {"weights": watcher.weights, "local": local, "states": states, "calls": calls}


def test_several_arenas_sync_with_their_own_groups(three_ranks: RankPool) -> None:
    results = three_ranks.run(_several_arenas, "next_step")
    members = {"p": [(0, 1), (0, 1), (2,)], "r": [(0,), (1, 2), (1, 2)]}
    members["q"] = members["p"]
    for rank, result in enumerate(results):
        for slot in result["states"][0]:
            shared = members.get(slot[0][-1], [(0, 1, 2)] * 3)[rank]
            oracle = Oracle({slot: "e5m2" if slot[1] == "grad_output" else "e4m3"}, Rules(3))
            oracle.derive(*(results[r]["weights"] for r in shared))
            for step in range(3):
                oracle.step(*(results[r]["local"][step] for r in shared))
                assert result["states"][step][slot] == oracle.state()[slot], (rank, slot, step)
    sizes = {"p and q": 4 * (8 + 6), "r": 4 * (8 + 3), "others": 4 * (8 + 6)}
    expected = [["p and q", "others"], ["p and q", "r", "others"], ["r", "others"]]
    for result, names in zip(results, expected):
        assert result["calls"] == [sorted(("all_reduce", sizes[name]) for name in names)] * 3


@on_ranks(2)
def test_a_model_without_slots_still_steps() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    manager = fp8dist.prepare(model, group=dist.group.WORLD)
    manager.attach()
    with counted_collectives() as calls:
        manager.step()
        manager.step()
    assert (manager.slots, list(zip(calls.names, calls.sizes)), manager.steps) == ((), [("all_reduce", 32)] * 2, 2)


def test_the_oracle_itself() -> None:
    """By hand: max over a window of 3 with margin 1, NaN not taken, zero taken, absent skipped; 8 x 112 saturates."""
    oracle = Oracle({A: "e4m3"}, Rules(3, margin=1))
    for value, scale in [
        (7.0, 32.0),
        (None, 32.0),
        (math.nan, 32.0),
        (0.0, 32.0),
        (14.0, 16.0),
        (1.0, 16.0),
        (1.0, 16.0),
        (1.0, 224.0),
        (2.0, 112.0),
        (8.0, 28.0),
    ]:
        oracle.step({A: value}, {A: None})
        assert oracle.slots[A].scale == scale
    assert oracle.slots[A].history == [1.0, 2.0, 8.0]
    assert (oracle.slots[A].commits, oracle.slots[A].nonfinite, oracle.slots[A].saturated) == (8, 1, 1)
