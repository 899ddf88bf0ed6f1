"""DDP under all recipes: the contents and size of the sync, and the proof that ranks are equal."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, Fallback, MXFP8Scaling, Recipe, RowwiseScaling
from fp8dist.errors import DivergenceError, ManifestMismatchError
from fp8dist.modules.overrides import High
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.ranks import RankPool, on_ranks
from tests.support.running import Running
from tests.support.sharded import HISTORY, Job, build, full
from tests.support.training import batch, bits, make_net

STEPS = 4
SLOTS = 3 * 3  # Slots of Net.

RECIPES: dict[str, tuple[Recipe, dict[str, Recipe | High], list[int]]] = {
    # (recipe, overrides, bytes of each all-reduce of a step)
    "delayed": (DelayedScaling(history_len=HISTORY), {}, [4 * (8 + SLOTS)]),
    "current": (CurrentScaling(), {}, []),
    "rowwise": (RowwiseScaling(), {}, []),
    "block": (BlockScaling(), {}, []),
    "mx": (MXFP8Scaling(), {}, []),
    "two delayed": (
        DelayedScaling(history_len=HISTORY),
        {"last": DelayedScaling(history_len=2, format="e4m3")},
        [4 * (8 + 6), 4 * (8 + 3)],
    ),
    "delayed, current, high": (
        DelayedScaling(history_len=HISTORY),
        {"first": CurrentScaling(), "branch": "high"},
        [4 * (8 + 3)],
    ),
    "current, one delayed": (CurrentScaling(), {"branch": DelayedScaling(history_len=1)}, [4 * (8 + 3)]),
}


def _trained(name: str) -> tuple[list[float], dict[str, bytes], dict[str, str], int]:
    """Counts collectives: forward and backward have none, and a step has only those in RECIPES."""
    recipe, overrides, reduced = RECIPES[name]
    model, called, manager, optimizer = build(Job("ddp", recipe=recipe, overrides=overrides))
    assert manager is not None
    losses = []
    for step in range(STEPS):
        with counted_collectives() as calls:
            x, y = batch(dist.get_rank(), step)
            loss = nn.functional.mse_loss(called(x, skip=step == 1 and dist.get_rank() == 0), y)
            (loss + 0 * sum(p.sum() for p in model.parameters())).backward()  # type: ignore[arg-type]
            assert not calls.names
            optimizer.step()
            assert list(zip(calls.names, calls.sizes)) == [("all_reduce", size) for size in reduced]
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        assert manager.steps == step + 1
        assert manager.metrics()["fp8/collectives"] == (step + 1) * len(reduced) + _of_attach(recipe, overrides)
    report = manager.check(parameters=True, policy="warn")
    assert report.consistent, str(report)
    recipes = {fqn: type(manager.slot(fqn, "weight").recipe).__name__ for fqn in {slot.fqn for slot in manager.slots}}
    return losses, {name: bits(value) for name, value in full(model).items()}, recipes, manager.steps


def _of_attach(recipe: Recipe, overrides: dict[str, Recipe | High]) -> int:
    """Attach derives delayed scales of weights, once per arena."""
    return sum(each != "high" and each.delayed for each in {recipe, *overrides.values()})


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_under_ddp(two_ranks: RankPool, name: str) -> None:
    first, second = two_ranks.run(_trained, name)
    assert first[1] == second[1]
    assert first[0] != second[0]
    assert first[0][0] != first[0][-1]
    recipe, overrides, _ = RECIPES[name]
    expected = {fqn: overrides.get(fqn, recipe) for fqn in ("first", "branch", "last")}
    assert first[2] == {fqn: type(each).__name__ for fqn, each in expected.items() if each != "high"}
    assert first[3] == STEPS


@pytest.mark.parametrize("recipe", [CurrentScaling(), BlockScaling()], ids=["current", "block"])
@on_ranks(2)
def test_check_every_where_no_step_communicates(recipe: Recipe) -> None:
    settings = {"check_every": 2, "check_policy": "raise"}
    run, found = Running(Job("ddp", optimizer="sgd", recipe=recipe, settings=settings)), []
    for step in range(6):
        loss = run.loss()
        loss.backward()
        if step == 3 and dist.get_rank() == 1:
            with torch.no_grad():
                next(run.model.parameters()).view(-1)[3] += 0.5
        try:
            with captured_log():
                run.update(loss)
        except DivergenceError as error:
            found = [(finding.kind, finding.name) for finding in error.report.findings]
            break
    assert (step, int(run.manager.metrics()["fp8/checks"]), found) == (4, 2, [("parameter", "first.weight")])


def _joined(name: str) -> tuple[int, dict[str, bytes], bool]:
    recipe, overrides, _ = RECIPES[name]
    settings = {"check_every": 2}
    run = Running(Job("ddp", optimizer="plain sgd", recipe=recipe, overrides=overrides, settings=settings))
    run.manager.set_precision("first", "high", steps=4)
    with Join([run.called, run.manager]):  # type: ignore[list-item]
        for _ in range(2 + 3 * dist.get_rank()):
            run.step()
    assert run.manager.slot("first", "input").high_precision == ()  # On the rank without data too.
    for _ in range(2):  # All ranks train again.
        run.step()
    report = run.manager.check(parameters=True, policy="warn")
    assert report.consistent, str(report)
    return run.manager.steps, {name: bits(value) for name, value in full(run.model).items()}, report.consistent


@pytest.mark.parametrize("name", ["block", "two delayed", "current, one delayed"])
def test_uneven_data(two_ranks: RankPool, name: str) -> None:
    first, second = two_ranks.run(_joined, name)
    assert first == second
    assert first[0] == 2 + 3 + 2


OTHERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "recipe": ({"recipe": CurrentScaling()}, ("recipe", "CurrentScaling")),
    "format of the same recipe": ({"recipe": DelayedScaling(format="e4m3")}, ("format", "e4m3")),
    "gemms": ({"recipe": DelayedScaling(high_precision=("wgrad",))}, ("high_precision", "wgrad")),
    "accumulation": ({"recipe": DelayedScaling(fast_accumulation=())}, ("fast_accumulation", "fprop")),
    "one module's recipe": ({"overrides": {"last": CurrentScaling()}}, ("last",)),
    "one module in high precision": ({"overrides": {"last": "high"}}, ("last",)),
    "fallback": ({"fallback": Fallback(steps=7)}, ("fallback",)),
}


@pytest.mark.parametrize(("other", "odd"), [(other, 2 * (i % 2)) for i, other in enumerate(OTHERS)])
@on_ranks(3)
def test_a_rank_with_other_recipes_is_named(other: str, odd: int) -> None:
    def attach(settings: dict[str, Any]) -> str:
        model = make_net()
        manager = fp8dist.prepare(model, group=dist.group.WORLD, **settings)
        try:
            manager.attach(model, timeout=timedelta(seconds=4))
        except ManifestMismatchError as error:
            return str(error)
        return ""

    start = time.monotonic()
    text = attach(OTHERS[other][0] if dist.get_rank() == odd else {})
    seconds = time.monotonic() - start
    for word in OTHERS[other][1]:
        assert word in text
    assert seconds < 4  # No rank timed out.
    assert attach({}) == ""
    assert ("against rank(s) 2 " if odd else "against rank(s) 1, 2 ") in text


@pytest.mark.parametrize(("name", "found_in"), [("current, one delayed", 2), ("current", 4)])
@on_ranks(2)
def test_a_rank_that_alone_changes_precision_is_found(name: str, found_in: int) -> None:
    """At the next sync; by the next check if steps have no sync."""
    recipe, overrides, _ = RECIPES[name]
    run = Running(Job("ddp", recipe=recipe, overrides=overrides))
    report, step = None, 0
    with captured_log():
        for step in range(4):
            if step == 2 and dist.get_rank() == 1:
                run.manager.set_precision("last", "high")
            try:
                run.step()
            except DivergenceError as error:
                report = error.report
                break
        else:
            report, step = run.manager.check(policy="warn"), 4
    assert report is not None
    assert (step, {finding.kind for finding in report.findings}) == (found_in, {"manifest"})
