"""State of experts against an oracle in plain Python: random programs on four ranks, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fp8dist
from fp8dist import DelayedScaling
from tests.support.experts import Experts, Mixture
from tests.support.oracle import FP8_MAX, Rules, SlotOracle, bits_of, float32, merged
from tests.support.ranks import on_ranks
from tests.support.states import state_of

RANKS, EXPERTS, FEATURES = 4, 16, 16
SPECIAL = (0.0, float("inf"), float("nan"), 1e-44, 3e38)
FORMATS = {"input": "e4m3", "weight": "e4m3", "grad_output": "e5m2"}

Routes = dict[int, tuple[int, float, float]]
"""By expert: number of rows, largest magnitude of the input, and of the gradient."""


@dataclass(frozen=True)
class Program:
    """What happens: the routes of each microbatch of each step, on each rank."""

    rules: Rules
    update: str
    steps: list[list[list[Routes]]]


_values = st.one_of(st.sampled_from(SPECIAL), st.floats(2.0**-20, 2.0**20, width=32))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Draw a program in which a few experts are popular, some die and come back, and some never run."""
    rules = Rules(
        draw(st.integers(1, 5)),
        draw(st.sampled_from(["max", "most_recent"])),
        draw(st.integers(-1, 2)),
        draw(st.booleans()),
        draw(st.sampled_from(["current", "unit"])),
    )
    steps = []
    for _ in range(draw(st.integers(1, 6))):
        alive = draw(st.lists(st.integers(0, EXPERTS - 1), max_size=5, unique=True))
        steps.append([[_routes(draw, alive) for _ in range(RANKS)] for _ in range(draw(st.integers(1, 2)))])
    return Program(rules, draw(st.sampled_from(["same_step", "next_step"])), steps)


def _routes(draw: st.DrawFn, alive: list[int]) -> Routes:
    chosen = [expert for expert in alive if draw(st.integers(0, 2))]
    return {expert: (draw(st.integers(1, 3)), draw(_values), draw(_values)) for expert in chosen}


def _rows(count: int, largest: float) -> torch.Tensor:
    made = torch.full((count, FEATURES), -largest / 2)
    made[-1, 3] = largest
    return made


def _expected(program: Program) -> dict[Any, SlotOracle]:
    weights = Experts(EXPERTS, FEATURES, FEATURES, gate=False).up_proj.detach().abs().flatten(1).amax(1).tolist()
    slots = {(e, role): SlotOracle(FP8_MAX[of], program.rules) for e in range(EXPERTS) for role, of in FORMATS.items()}
    for expert, weight in enumerate(weights):
        slots[expert, "weight"].derive(weight)
    for step in program.steps:
        for expert in range(EXPERTS):
            ran = [routes[expert] for micro in step for routes in micro if expert in routes]
            slots[expert, "input"].commit(merged(float32(each[1]) for each in ran))
            slots[expert, "weight"].commit(merged(weights[expert] for _ in ran))
            slots[expert, "grad_output"].commit(merged(float32(each[2]) for each in ran))
    return {(f"experts.up.{expert}", role): slot for (expert, role), slot in slots.items()}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.nightly
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(program=programs())
@on_ranks(4)
def test_random_programs(program: Program) -> None:
    """Histories, scales, cold flags and counters of all experts on all ranks."""
    model = Mixture(Experts(EXPERTS, FEATURES, FEATURES, gate=False))
    rules = program.rules
    recipe = DelayedScaling(
        history_len=rules.history_len,
        amax_algo=rules.amax_algo,  # type: ignore[arg-type]
        margin=rules.margin,
        power_of_two=rules.power_of_two,
        warmup=rules.warmup,  # type: ignore[arg-type]
        update=program.update,  # type: ignore[arg-type]
    )
    manager = fp8dist.prepare(model, recipe, group=dist.group.WORLD)
    manager.attach(model)
    experts: Any = model.experts
    slots = experts.fp8_products["up_proj"]
    for step in program.steps:
        for micro in step:
            routes = micro[dist.get_rank()]
            counts = [routes[expert][0] if expert in routes else 0 for expert in range(EXPERTS)]
            x, gradient = (
                torch.cat([torch.zeros(0, FEATURES), *(_rows(*routes[e][:1], routes[e][i]) for e in sorted(routes))])
                for i in (1, 2)
            )
            ends = torch.tensor(counts).cumsum(0).int()
            x.requires_grad_()
            fp8dist.grouped_linear(x, experts.up_proj, ends, slots).backward(gradient)
        manager.step()
    expected = _expected(program)
    state = state_of(manager)
    for slot, oracle in expected.items():
        entry = state[slot]
        assert entry["history"] == [bits_of(value) for value in oracle.history], slot
        assert entry["scale"] == bits_of(oracle.scale), slot
        assert entry["amax"] == bits_of(oracle.amax), slot
        assert entry["cold"] is oracle.cold, slot
        assert entry["counters"] == [oracle.commits, oracle.nonfinite], slot
        assert entry["saturated"] == oracle.saturated, slot
