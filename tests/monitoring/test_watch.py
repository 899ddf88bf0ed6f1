"""watch(): statistics of the slots on all ranks, every n steps, in one collective."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fp8dist
from fp8dist import (
    BlockScaling,
    CurrentScaling,
    DelayedScaling,
    Event,
    Fallback,
    Recipe,
    RowwiseScaling,
    SlotStatistics,
)
from fp8dist.errors import ConfigurationError, ManifestMismatchError
from fp8dist.runs.exporters.slots import headroom
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.ranks import RankPool
from tests.support.training import Net, batch, make_net, state_bits
from tests.support.watched import lines_into

SLOTS = 9


def trained(path: Path | None, recipe: Recipe, steps: int = 6, rank: int = 0, **options: Any) -> Any:
    """Train a net with a watch every third step; return (lines, manager, net)."""
    prepared = {name: options.pop(name) for name in ("group", "overrides", "fallback", "amax_sync") if name in options}
    net = make_net()
    manager = fp8dist.prepare(net, recipe, **prepared)
    fp8dist.watch(manager, 3, observer=lines_into(path and Path(str(path).format(rank=rank))), **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    manager.attach(optimizer=optimizer)
    for step in range(steps):
        train(net, optimizer, rank, step)
    return read(path and Path(str(path).format(rank=rank))), manager, net


def train(net: Net, optimizer: Any, rank: int, step: int) -> None:
    x, y = batch(rank, step)
    (net(x) - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def read(path: Path | None) -> list[dict[str, Any]]:
    return [] if path is None else [json.loads(line) for line in path.read_text().splitlines()]


def test_every_third_step_all_slots(tmp_path: Path) -> None:
    lines, manager, _ = trained(tmp_path / "scales.jsonl", DelayedScaling(history_len=8))
    assert [line["step"] for line in lines] == [3] * SLOTS + [6] * SLOTS
    assert [line["slot"] for line in lines] == [str(slot) for slot in manager.slots] * 2
    assert all(line["amax_rank"] is None for line in lines)
    for line, slot in zip(lines[SLOTS:], manager.slots):
        assert line["amax"] == manager.slot(*slot).amax.item()
        assert 0 <= line["saturated"] <= 1
        assert 0 <= line["underflow"] <= 1


def test_statistics_know_the_range_of_their_format() -> None:
    """A scale of current scaling makes the amax the largest value: no doubling is left, up to the scale's rounding."""
    seen: list[SlotStatistics] = []
    manager = fp8dist.prepare(net := make_net(), CurrentScaling())
    fp8dist.watch(manager, 1, observer=lambda observation: seen.extend(observation.slots))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    manager.attach(optimizer=optimizer)
    train(net, optimizer, 0, 0)
    assert {(one.slot.role, one.fp8_max) for one in seen} == {
        ("input", 448.0),
        ("weight", 448.0),
        ("grad_output", 57344.0),
    }
    assert all(abs(headroom(one) or 0.0) < 2**-22 for one in seen)
    assert None not in map(headroom, seen)


def test_scales_are_those_that_the_step_used_and_shares_those_of_its_casts(tmp_path: Path) -> None:
    """Compare with an independent count on the tensors."""
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=8))
    fp8dist.watch(manager, 3, observer=lines_into(tmp_path / "s"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    manager.attach(optimizer=optimizer)
    seen: dict[str, torch.Tensor] = {}
    net.branch.register_forward_pre_hook(lambda m, args: seen.update(input=args[0].detach().clone()))
    for step in range(3):
        scale = manager.slot("branch", "input").scale.item()
        x, y = batch(0, 0 if step < 2 else 4)  # The third input exceeds the range of its scale.
        (net(3 * x if step == 2 else x) - y).square().mean().backward()
        optimizer.step()
    (line,) = [line for line in read(tmp_path / "s") if line["slot"] == "branch:input"]
    scaled = seen["input"].double().abs() * scale
    assert line["scale"] == scale
    assert line["saturated"] == pytest.approx((scaled > 464).double().mean().item(), abs=1e-7)
    assert line["underflow"] == pytest.approx(((scaled > 0) & (scaled <= 2**-10)).double().mean().item(), abs=1e-7)
    assert line["saturated"] > 0


@pytest.mark.parametrize("recipe", [CurrentScaling(), RowwiseScaling(), BlockScaling()], ids=lambda r: type(r).__name__)
def test_recipes_without_state_are_watched_as_well(tmp_path: Path, recipe: Recipe) -> None:
    lines, manager, _ = trained(tmp_path / "s", recipe)
    assert len(lines) == 2 * SLOTS
    for line in lines:
        assert line["amax"] > 0
        assert line["saturated"] == 0
        if recipe.by == "tensor":
            largest = 57344.0 if line["slot"].endswith("grad_output") else 448.0
            assert line["scale"] == (torch.tensor(largest) / torch.tensor(line["amax"])).item()
        else:
            assert line["scale"] is None  # Each row or block has a scale of its own.
    assert manager.steps == 6


def test_watching_changes_no_number(tmp_path: Path) -> None:
    for recipe in (DelayedScaling(history_len=8), DelayedScaling(history_len=8, update="next_step")):
        _, watched, net = trained(tmp_path / recipe.update, recipe)
        plain = make_net()
        manager = fp8dist.prepare(plain, recipe)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
        manager.attach(optimizer=optimizer)
        for step in range(6):
            train(plain, optimizer, 0, step)
        assert state_bits(watched) == state_bits(manager)
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), plain.parameters()))


def test_what_a_calibration_sees_is_not_of_the_step_that_is_watched(tmp_path: Path) -> None:
    seen = []
    for calibrates in (False, True):
        net = make_net()
        manager = fp8dist.prepare(net, DelayedScaling(history_len=8))
        fp8dist.watch(manager, 1, observer=lines_into(tmp_path / "s"))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        manager.attach(optimizer=optimizer)
        if calibrates:
            with manager.calibrate():
                net(100 * batch(0, 0)[0]).mean().backward()
        train(net, optimizer, 0, 0)
        (line,) = [line for line in read(tmp_path / "s") if line["slot"] == "first:input"]
        seen.append(line["amax"])
    assert seen[0] == seen[1]


def test_steps_between_measure_nothing(tmp_path: Path) -> None:
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=8))
    fp8dist.watch(manager, 3, observer=lines_into(tmp_path / "s"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    manager.attach(optimizer=optimizer)
    measured = []
    for step in range(6):
        with torch.profiler.profile() as profile:
            train(net, optimizer, 0, step)
        measured.append(sum(event.count for event in profile.key_averages() if event.key == "fp8dist::measure"))
    assert measured == [0, 0, SLOTS, 0, 0, SLOTS]


def test_a_jump_is_told_once() -> None:
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=1))
    fp8dist.watch(manager, 1, jump=8)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-30)  # Changes no weight; with lr=0 the step would not count.
    manager.attach(optimizer=optimizer)
    events: list[Event] = []
    manager.on_event(events.append)
    with captured_log() as log:
        for step in range(6):
            x, _ = batch(0, 0)
            net(x * (100 if step == 2 else 1)).mean().backward()
            optimizer.step()
    steps = [event.step for event in events if event.kind == "jump"]
    assert steps == [4, 5]  # Step 4 casts with the scale that step 3 computes.
    assert {slot.fqn for slot in events[0].slots} >= {"first"}
    assert len(log) == 2


@pytest.mark.parametrize("steps", [5, 6])
def test_a_resume_goes_on_in_the_same_file(tmp_path: Path, steps: int) -> None:
    whole, _, _ = trained(tmp_path / "whole", DelayedScaling(history_len=8), steps=9)
    _, manager, net = trained(tmp_path / "part", DelayedScaling(history_len=8), steps=steps)
    resumed = make_net()
    resumed.load_state_dict(net.state_dict())
    again = fp8dist.prepare(resumed, DelayedScaling(history_len=8))
    with pytest.warns(FutureWarning, match=r"watch\(path=…\) is now fp8dist.Recorder"):
        fp8dist.watch(again, 3, tmp_path / "part", resume_after=steps)
    optimizer = torch.optim.SGD(resumed.parameters(), lr=0.05)
    again.attach(optimizer=optimizer)
    again.load_state_dict(manager.state_dict())
    for step in range(steps, 9):
        train(resumed, optimizer, 0, step)
    assert read(tmp_path / "part") == whole


def test_a_resumed_run_counts_its_own_steps(tmp_path: Path) -> None:
    """The step count of the state may differ: one more after a calibration, fewer if FP8 starts late."""
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=8))
    fp8dist.watch(manager, 3, observer=lines_into(tmp_path / "scales"), resume_after=100)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    manager.attach(optimizer=optimizer)
    with manager.calibrate():
        net(batch(0, 0)[0]).sum().backward()
    for step in range(5):
        train(net, optimizer, 0, step)
    assert sorted({line["step"] for line in read(tmp_path / "scales")}) == [102, 105]


def test_each_of_two_watches_has_its_steps(tmp_path: Path) -> None:
    """The second has an alarm, an observer, and a step to count from, which is that of both."""
    alone, _, _ = trained(tmp_path / "alone", DelayedScaling(history_len=8))
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=8))
    seen: list[Any] = []
    events: list[Event] = []
    manager.on_event(events.append)
    fp8dist.watch(manager, 3, observer=lines_into(tmp_path / "first"))
    with pytest.warns(FutureWarning, match="path"):
        fp8dist.watch(manager, 2, tmp_path / "second", jump=1.0001, resume_after=0, observer=seen.append)
    (outputs,) = (weakref.ref(one) for one in manager._cycle.measurement.watch.observers if hasattr(one, "path"))  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    manager.attach(optimizer=optimizer)
    for step in range(6):
        train(net, optimizer, 0, step)
    assert read(tmp_path / "first") == alone
    lines = read(tmp_path / "second")
    assert sorted({line["step"] for line in lines}) == [one.step for one in seen] == [2, 4, 6]
    assert lines[-SLOTS:] == alone[-SLOTS:]
    jumps = [event for event in events if event.kind == "jump"]
    assert {event.step for event in jumps} <= {4, 6}
    assert all(len(set(event.slots)) == len(event.slots) > 0 for event in jumps)
    assert jumps
    with captured_log():
        fp8dist.restore(net)
    assert outputs() is None  # Its file is closed.


def test_mistakes(tmp_path: Path) -> None:
    net = make_net()
    manager = fp8dist.prepare(net)
    for every in (0, True, 2.5):
        with pytest.raises(ConfigurationError, match="every must be a number of steps from 1"):
            fp8dist.watch(manager, every)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="jump must be a factor"):
        fp8dist.watch(manager, 3, tmp_path / "s", jump=0.5)
    with pytest.warns(FutureWarning, match="path"):
        fp8dist.watch(manager, 3, tmp_path / "s", resume_after=4)
    (tmp_path / "s").write_text("kept")
    with (
        pytest.raises(ConfigurationError, match="an earlier watch writes there"),
        pytest.warns(FutureWarning, match="path"),
    ):
        fp8dist.watch(manager, 5, tmp_path / "s")
    with pytest.raises(ConfigurationError, match="continues after step 4: give both the same step"):
        fp8dist.watch(manager, 5, tmp_path / "t", resume_after=3)
    assert (tmp_path / "s").read_text() == "kept"
    assert not (tmp_path / "t").exists()
    manager.attach()
    with pytest.raises(ConfigurationError, match=r"before attach\(\)"):
        fp8dist.watch(manager, 3, tmp_path / "s")


# Ranks -------------------------------------------------------------------------------------------


def _watched(path: str, recipe: Recipe, ranks: bool, options: dict[str, Any]) -> tuple[Any, list[int], Any]:
    rank = dist.get_rank()
    with counted_collectives() as calls:
        lines, _, _ = trained(
            Path(path) if rank == 0 else None, recipe, rank=rank, group=dist.group.WORLD, ranks=ranks, **options
        )
    own, _, _ = trained(Path(f"{path}.{{rank}}"), recipe, rank=rank, group=dist.group.WORLD, amax_sync=False, **options)
    return lines, calls.sizes, own


@pytest.mark.parametrize(("kind", "ranks"), [("delayed", True), ("current", False), ("three", True), ("three", False)])
def test_one_collective_for_the_whole_model(two_ranks: RankPool, tmp_path: Path, kind: str, ranks: bool) -> None:
    """The lines hold the largest amax over ranks and the rank that had it."""
    options: dict[str, Any] = {}
    recipe: Recipe = CurrentScaling() if kind == "current" else DelayedScaling(history_len=8)
    if kind == "three":
        options = {"overrides": {"first": BlockScaling(), "last": CurrentScaling()}}
    (lines, sizes, own), (_, sizes_there, there) = two_ranks.run(_watched, str(tmp_path / "s"), recipe, ranks, options)
    size = 8 * (3 * SLOTS + 2 * 2) if ranks else 4 * 3 * SLOTS  # With ranks, also two times of each rank.
    assert sizes == sizes_there
    compared, *sizes = sizes  # What the ranks start with.
    assert compared <= 128
    assert sizes.count(size) == 2
    slots = {"delayed": SLOTS, "three": 3}.get(kind)
    syncs = [4 * (8 + slots)] * 6 if slots else []
    # The other collectives: weight amaxes at attach, and the syncs of delayed scaling.
    assert sorted(size_ for size_ in sizes if size_ != size) == sorted(syncs + ([4 * slots] if slots else []))
    for line, here, other in zip(lines, own, there):
        if kind == "current":  # Scales are local, so the group does not change the training.
            assert line["amax"] == max(here["amax"], other["amax"])
            if ranks:
                assert line["amax_rank"] == (0 if here["amax"] >= other["amax"] else 1)
        assert (line["amax_rank"] is not None) == ranks
        assert line["slot"] == here["slot"]


def _watched_twice(path: str) -> list[int]:
    manager = fp8dist.prepare(net := make_net(), CurrentScaling(), group=dist.group.WORLD)
    fp8dist.watch(manager, 3)
    fp8dist.watch(manager, 2, observer=lines_into(path if dist.get_rank() == 0 else None))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    manager.attach(optimizer=optimizer)
    with counted_collectives() as calls:
        for step in range(6):
            train(net, optimizer, dist.get_rank(), step)
    return calls.sizes


def test_two_watches_share_the_collective_of_a_step(two_ranks: RankPool, tmp_path: Path) -> None:
    assert two_ranks.run(_watched_twice, str(tmp_path / "s")) == [[4 * 3 * SLOTS] * 4] * 2  # Of steps 2, 3, 4 and 6.


def _tied_maxima(path: str) -> Any:
    return trained(Path(f"{path}{dist.get_rank()}"), CurrentScaling(), group=dist.group.WORLD, ranks=True, rank=0)[0]


def test_of_equals_the_lowest_rank_holds_it(two_ranks: RankPool, tmp_path: Path) -> None:
    lines, _ = two_ranks.run(_tied_maxima, str(tmp_path / "s"))
    assert {line["amax_rank"] for line in lines} == {0}


def _differently(path: str) -> str:
    net = make_net()
    manager = fp8dist.prepare(net, group=dist.group.WORLD)
    if dist.get_rank() == 0:
        fp8dist.watch(manager, 3, observer=lines_into(path))
    try:
        manager.attach()
    except ManifestMismatchError as error:
        return str(error)
    return ""


def test_a_rank_that_does_not_watch_is_told_at_attach(two_ranks: RankPool, tmp_path: Path) -> None:
    for text in two_ranks.run(_differently, str(tmp_path / "s")):
        assert "settings.watch" in text


def _with_a_policy(path: str) -> Any:
    """Train with a watch and a fallback, which read the same shares; return (lines, number of fallbacks)."""
    rank = dist.get_rank()
    fallback = Fallback(steps=2, saturated=1.0)
    lines, manager, _ = trained(
        Path(path) if rank == 0 else None, DelayedScaling(history_len=8), group=dist.group.WORLD, fallback=fallback,
        rank=rank,
    )  # fmt: skip
    return lines, manager.metrics()["fp8/fallbacks"]


def test_together_with_a_fallback(two_ranks: RankPool, tmp_path: Path) -> None:
    (lines, fallbacks), _ = two_ranks.run(_with_a_policy, str(tmp_path / "s"))
    assert len(lines) == 2 * SLOTS
    assert all(line["saturated"] is not None for line in lines)
    assert fallbacks == 0
