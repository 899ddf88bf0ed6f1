"""watch(): tokens of experts over all ranks, experts without tokens, and the age of scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, Observation, Recipe, RowwiseScaling
from fp8dist.state.expert_loads import ExpertLoad, idle_numbers
from tests.support.experts import Experts, Mixture, routes, rows
from tests.support.ranks import RankPool

AMONG = {1: (0, 1, 2), 2: (0, 1, 2), 3: (0, 1), 4: (0, 1), 5: (0, 1), 6: (0, 1, 2), 7: (0, 1), 8: (0, 1), 9: (1, 2)}
"""The experts that have tokens in each step. Expert 3 never has one."""

TOKENS = 12


def trained(
    recipe: Recipe,
    rank: int = 0,
    microbatches: int = 1,
    recomputes: bool = False,
    compiles: bool = False,
    every: int = 1,
    high: str = "",
    steps: int | None = None,
    **prepared: Any,
) -> list[Observation]:
    """Train a mixture of four experts over the steps of AMONG; return what the watch observed."""
    seen: list[Observation] = []
    dtype = torch.bfloat16 if compiles else torch.float32  # torch compiles grouped_mm in bfloat16 only.
    model = Mixture(Experts()).to(dtype)
    manager = fp8dist.prepare(model, recipe, **prepared)
    fp8dist.watch(manager, every, observer=seen.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    manager.attach(optimizer=optimizer)
    if high:
        manager.set_precision(high, "high", steps=steps)
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else model
    for step, among in AMONG.items():
        for microbatch in range(microbatches):
            seed = 100 * rank + 10 * microbatch + step
            index, weights = routes(TOKENS, 2, among, seed)
            inputs = rows(TOKENS, 32, seed).to(dtype).requires_grad_(), index, weights.to(dtype)
            out = checkpoint(model, *inputs, use_reentrant=False) if recomputes else call(*inputs)
            out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen


def expected(step: int, ranks: int = 1, microbatches: int = 1) -> list[int]:
    """Count the routes."""
    counts = torch.zeros(4, dtype=torch.int64)
    for rank in range(ranks):
        for microbatch in range(microbatches):
            index, _ = routes(TOKENS, 2, AMONG[step], 100 * rank + 10 * microbatch + step)
            counts += torch.bincount(index.flatten(), minlength=4)
    return counts.tolist()


@pytest.mark.parametrize("recipe", [DelayedScaling(history_len=4), CurrentScaling()], ids=lambda r: type(r).__name__)
@pytest.mark.parametrize(("microbatches", "recomputes"), [(1, False), (3, False), (1, True)])
def test_tokens_are_those_of_all_backwards(recipe: Recipe, microbatches: int, recomputes: bool) -> None:
    seen = trained(recipe, microbatches=microbatches, recomputes=recomputes)
    for one in seen:
        (load,) = one.experts  # Both products have the same tokens.
        assert load.module == "experts"
        assert load.tokens == expected(one.step, microbatches=microbatches)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it itself.
def test_compiled_experts_count_alike() -> None:
    seen = trained(DelayedScaling(history_len=4), compiles=True, every=3)
    assert [(one.step, one.experts[0].tokens) for one in seen] == [(step, expected(step)) for step in (3, 6, 9)]


def test_idle_experts_and_ages_observed_in_each_step() -> None:
    seen = trained(DelayedScaling(history_len=4))
    idle = [0, 0, 1, 2, 3, 0, 1, 2, 0]
    assert [one.experts[0].idle[2] for one in seen] == idle
    assert [one.experts[0].idle[3] for one in seen] == list(range(1, 10))
    assert [one.experts[0].idle[1] for one in seen] == [0] * 9
    # The age tells which earlier steps have not renewed the scale: one less than the idle steps, or all before now.
    ages = [0, 0, 0, 1, 2, 3, 0, 1, 2]
    assert [one.experts[0].age for one in seen] == [[0, 0, age, step - 1] for step, age in enumerate(ages, 1)]
    slots = [[slot for slot in one.slots if slot.slot.fqn == "experts.gate_up.2"] for one in seen]
    assert [[slot.age for slot in of_expert] for of_expert in slots] == [[age] * 3 for age in ages]


def test_idle_steps_between_observations_are_a_lower_bound() -> None:
    seen = trained(DelayedScaling(history_len=4), every=4)
    assert [one.step for one in seen] == [4, 8]
    assert [one.experts[0].idle for one in seen] == [[0, 0, 1, 4], [0, 0, 1, 8]]  # In truth 2 steps, both times.
    seen = trained(CurrentScaling(), every=4)
    assert [one.experts[0].idle for one in seen] == [[0, 0, 1, 1], [0, 0, 5, 5]]  # Of observed steps alone.
    assert all(one.experts[0].age is None for one in seen)
    assert all(slot.age is None for one in seen for slot in one.slots)


def _two_ranks(synced: bool) -> list[tuple[int, list[int]]]:
    seen = trained(DelayedScaling(history_len=4), dist.get_rank(), group=dist.group.WORLD, amax_sync=synced)
    assert {load.ranks for one in seen for load in one.experts} == {2 if synced else 1}
    return [(one.step, one.experts[0].tokens) for one in seen]


@pytest.mark.slow
def test_tokens_are_sums_over_the_ranks_that_share_the_state(two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_two_ranks, True)
    assert first == second == [(step, expected(step, ranks=2)) for step in AMONG]
    first, second = two_ranks.run(_two_ranks, False)
    assert first == [(step, expected(step)) for step in AMONG]
    assert second != first


def test_experts_in_high_precision_are_not_called_idle() -> None:
    seen = trained(CurrentScaling(), overrides={"experts*": "high"})
    assert all(one.experts == () for one in seen)


def test_an_expert_in_high_precision_is_called_idle_in_observed_steps_only() -> None:
    """Its gradients are not recorded, so its counters do not tell whether it had tokens in the other steps."""
    seen = trained(DelayedScaling(history_len=4), every=4, high="*.2")
    assert [one.experts[0].idle for one in seen] == [[0, 0, 1, 4], [0, 0, 1, 8]]  # It had tokens in steps 1, 2 and 6.
    seen = trained(DelayedScaling(history_len=4), every=4, high="*.2", steps=2)
    assert [one.experts[0].idle for one in seen] == [[0, 0, 1, 4], [0, 0, 1, 8]]


@pytest.mark.slow
def test_a_mixture_whose_products_have_groups_of_their_own_is_told_once(two_ranks: RankPool) -> None:
    for modules in two_ranks.run(_with_groups):
        assert modules == ["experts"] * len(AMONG)


def _with_groups() -> list[str]:
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    groups = {"experts.gate_up": own}
    seen = trained(DelayedScaling(history_len=4), dist.get_rank(), group=dist.group.WORLD, groups=groups)
    return [load.module for one in seen for load in one.experts]


@pytest.mark.parametrize("recipe", [DelayedScaling(), CurrentScaling(), RowwiseScaling(), BlockScaling()], ids=str)
def test_a_rank_without_tokens_is_observed(recipe: Recipe) -> None:
    seen: list[Observation] = []
    model = Mixture(Experts())
    manager = fp8dist.prepare(model, recipe)
    fp8dist.watch(manager, 1, observer=seen.append)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    manager.attach(optimizer=optimizer)
    index, weights = routes(TOKENS, 2, (0, 1), 0)
    x = rows(TOKENS, 32, 0)
    for part in (slice(0, 0), slice(None)):  # A batch that is empty, and one that is not.
        model(x[part].requires_grad_(), index[part], weights[part]).sum().backward()
    optimizer.step()
    assert seen[0].experts[0].tokens == [TOKENS, TOKENS, 0, 0]


def test_numbers_of_idle_experts() -> None:
    loads = [ExpertLoad("a", [0, 3], [7, 0], [6, 0]), ExpertLoad("b", [0, 0], [2, 1], None)]
    assert idle_numbers(loads) == {"idle_experts": 3, "longest_idle_steps": 7}
    assert idle_numbers([]) == {}
