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
from fp8dist import DelayedScaling
from tests.support.collectives import counted_collectives
from tests.support.oracle import Oracle, Rules, amax_of, of_bits
from tests.support.ranks import RankPool, on_ranks
from tests.support.states import state_of
from tests.support.training import AmaxRecorder

Slot = tuple[str, str]
Plan = list[list[dict[Slot, list[list[int]]]]]
"""By step, rank and slot: tensors that the rank records, as the bits of float32 numbers."""

A = ("a", "input")
FOREIGN: dict[Slot, str] = {("a", "grad_output"): "e5m2", A: "e4m3", ("a", "weight"): "e4m3", ("b", "input"): "e5m2"}
HIDDEN = 32


def _record_plan(plan: Plan) -> list[Any]:
    """Return the states of this rank after each step of the plan."""
    model = nn.Module()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=3), group=dist.group.WORLD)
    for slot, format in FOREIGN.items():
        manager.register(*slot, format)
    manager.attach()
    states = []
    for step in plan:
        for slot, tensors in step[dist.get_rank()].items():
            for words in tensors:
                memory = bytearray(struct.pack(f"<{len(words)}I", *words))
                manager.slot(*slot).record(torch.frombuffer(memory, dtype=torch.float32))
        manager.step()
        states.append(state_of(manager))
    return states


def _word(rng: random.Random) -> int:
    kinds = (
        lambda: rng.choice([0x7FC00000, 0xFFC00000, 0xFFFFFFFF, 0x7F800001]),  # NaN of both signs.
        lambda: rng.choice([0x7F800000, 0xFF800000]),  # Inf.
        lambda: rng.choice([0, 0x80000000]),
        lambda: rng.randrange(1, 0x00800000),  # Subnormal.
        lambda: rng.randrange(0x7F000000, 0x7F800000),  # Huge.
        *[lambda: rng.randrange(0x3F000000, 0x41000000) | rng.choice([0, 1 << 31])] * 7,
    )
    return rng.choice(kinds)()


@pytest.mark.slow
def test_recorded_amaxes_give_the_oracles_state(three_ranks: RankPool) -> None:
    """At random, with several tensors per slot, and slots that only some ranks run; then nobody runs any, then zeros
    fill a window. ``test_whole_job.py`` has both timings."""
    rng = random.Random(0)

    def tensors() -> list[list[int]]:
        return [[_word(rng) for _ in range(rng.randrange(1, 3))] for _ in range(rng.randrange(1, 3))]

    plan: Plan = [[{s: tensors() for s in FOREIGN if rng.random() < 0.6} for _ in range(3)] for _ in range(40)]
    plan += [[{}] * 3] * 2 + [[{A: [[0, 0x80000000]]}, {A: [[0x80000000]]}, {}]] * 4
    oracle, expected = Oracle(FOREIGN, Rules(3)), []
    for step in plan:
        oracle.step(*({s: amax_of(of_bits(w) for each in of for w in each) for s, of in rank.items()} for rank in step))
        expected.append(oracle.state())
    assert three_ranks.run(_record_plan, plan) == [expected] * 3


class _Branches(nn.Module):
    """Layers that run in the order that the caller gives. The last one's weight is zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleDict({name: nn.Linear(HIDDEN, HIDDEN, bias=False) for name in "pqrst"})
        nn.init.zeros_(self.layers["t"].weight)

    def forward(self, x: Tensor, order: str) -> Tensor:
        """Add the layers named in ``order``."""
        for name in order:
            x = x + self.layers[name](x)
        return x


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
    model.eval()
    with torch.no_grad():
        counted("eval", lambda: model(x, "pqr"))
    model.train()
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


def _several_arenas() -> dict[str, Any]:
    rank = dist.get_rank()
    pair_01, pair_12, only_0, only_2 = (dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0], [2]))
    mine = {"layers.[pq]": only_2 if rank == 2 else pair_01, "layers.r": only_0 if rank == 0 else pair_12}
    model = _Branches()
    recipe = DelayedScaling(history_len=3, update="next_step")
    manager = fp8dist.prepare(model, recipe, group=dist.group.WORLD, groups=mine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.attach(optimizer=optimizer)
    weights = {(f"layers.{name}", "weight"): float(of.weight.abs().max()) for name, of in model.layers.items()}
    recorder, states, calls = AmaxRecorder(model), [], []
    for step in range(3):
        x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(7 + 3 * step + rank))
        model(x, ["pqrst", "rqpps", "trp"][(rank + step) % 3]).sum().backward()
        with counted_collectives() as seen:
            optimizer.step()
        optimizer.zero_grad()
        recorder.end_step()
        calls.append(sorted(zip(seen.names, seen.sizes)))
        states.append(state_of(manager))
    return {"weights": weights, "local": recorder.steps, "states": states, "calls": calls}


def test_several_arenas_sync_with_their_own_groups(three_ranks: RankPool) -> None:
    """Modules run in another order on each rank, twice, or not at all."""
    results = three_ranks.run(_several_arenas)
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
def test_a_model_without_slots_still_steps_and_is_saved(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    manager = fp8dist.prepare(model, group=dist.group.WORLD)
    manager.attach()
    with counted_collectives() as calls:
        manager.step()
        manager.step()
    assert (manager.slots, list(zip(calls.names, calls.sizes)), manager.steps) == ((), [("all_reduce", 32)] * 2, 2)
    manager.save(f"{tmp_path}/{{rank}}")
    manager.step()
    manager.load(f"{tmp_path}/{{rank}}")
    assert manager.steps == 2


def test_the_oracle_itself() -> None:
    """By hand: max over a window of 3 with margin 1, NaN not taken, zero taken, absent skipped; 8 x 112 saturates."""
    oracle = Oracle({A: "e4m3"}, Rules(3, margin=1))
    amaxes = [7.0, None, math.nan, 0.0, 14.0, 1.0, 1.0, 1.0, 2.0, 8.0]
    scales = []
    for amax in amaxes:
        oracle.step({A: amax}, {A: None})
        scales.append(oracle.slots[A].scale)
    assert scales == [32.0, 32.0, 32.0, 32.0, 16.0, 16.0, 16.0, 224.0, 112.0, 28.0]
    assert oracle.slots[A].history == [1.0, 2.0, 8.0]
    assert (oracle.slots[A].commits, oracle.slots[A].nonfinite, oracle.slots[A].saturated) == (8, 1, 1)
