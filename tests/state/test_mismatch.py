"""Planted mismatches are reported by name and rank on every rank, never hang, and allow recovery."""

from __future__ import annotations

import ast
import os
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fp8dist
from fp8dist import DelayedScaling, StateManager
from fp8dist.errors import ConfigurationError, DivergenceError, Fp8DistError, ManifestMismatchError
from tests.support.collectives import counted_collectives
from tests.support.oracle import Oracle, Rules, float32
from tests.support.ranks import RankPool, on_ranks
from tests.support.states import state_of, without

A, B = ("a", "input"), ("b", "weight")
FORMATS = {A: "e4m3", B: "e5m2"}


def _attach_differently(change: dict[int, str], seconds: float) -> Any:
    """Attach, with other settings on the ranks in ``change``. Return (error name, text, seconds)."""
    mine = change.get(dist.get_rank(), "")
    kind: Any = fp8dist.CurrentScaling if mine == "current" else DelayedScaling
    recipe: dict[str, Any] = {"history_len": 4} if kind is DelayedScaling else {}
    settings: dict[str, Any] = {"group": dist.group.WORLD}
    torch.manual_seed(0)
    layers = {"first": nn.Linear(32, 32), "second": nn.Linear(32, 32)}
    name, _, value = mine.partition("=")
    if name.startswith("FP8DIST_"):
        os.environ[name] = value
    elif name == "slot":
        del layers["first"]
    elif name == "more":
        layers["third"] = nn.Linear(32, 32)
    elif name in ("eval_precision", "fallback"):
        settings[name] = value if name == "eval_precision" else fp8dist.Fallback(steps=int(value))
    elif name not in ("", "no optimizer", "current"):
        recipe[name] = ast.literal_eval(value)
    start = time.monotonic()
    try:
        model = nn.ModuleDict(layers)
        manager = fp8dist.prepare(model, kind(**recipe), **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        manager.attach(optimizer=None if name == "no optimizer" else optimizer, timeout=timedelta(seconds=seconds))
    except Fp8DistError as error:
        return type(error).__name__, str(error), time.monotonic() - start
    finally:
        os.environ.pop(name, None)
    return None


DIFFERENT = [
    ("FP8DIST_ENABLED=0", "settings.enabled: True here, False there"),
    ("FP8DIST_AMAX_SYNC=0", "settings.amax_sync: True here, False there"),
    ("FP8DIST_CHECK_POLICY=warn", "settings.check_policy: 'raise' here, 'warn' there"),
    ("FP8DIST_BACKEND=reference", "settings.backend: 'auto' here, 'reference' there"),
    ("eval_precision=high", "settings.eval_precision: 'fp8' here, 'high' there"),
    ("fallback=10", "settings.fallback: "),
    ("no optimizer", "settings.boundary: 'optimizer' here, 'manual' there"),
    ("history_len=8", "recipe.history_len: 4 here, 8 there"),
    ("margin=1", "recipe.margin: 0 here, 1 there"),
    ("amax_algo='most_recent'", "recipe.amax_algo: 'max' here, 'most_recent' there"),
    ("update='next_step'", "recipe.update: 'same_step' here, 'next_step' there"),
    ("warmup='unit'", "recipe.warmup: 'current' here, 'unit' there"),
    ("power_of_two=True", "recipe.power_of_two: False here, True there"),
    ("format='e4m3'", "recipe.format: 'hybrid' here, 'e4m3' there"),
    ("high_precision=('wgrad',)", "recipe.high_precision: "),
    ("fast_accumulation=()", "recipe.fast_accumulation: "),
    ("current", "CurrentScaling"),
    ("slot", "slot first:grad_output: present here, missing there"),
    ("more", "slot third:grad_output: missing here, present there"),
]


def test_ranks_prepared_differently_are_named_at_attach(three_ranks: RankPool) -> None:
    """The leader too, and two ranks that differ in two ways. Afterwards, attach works."""
    cases = [
        *(({2: change}, ["rank 0 ", "against rank(s) 2 ", text]) for change, text in DIFFERENT),
        ({0: "margin=1"}, ["against rank(s) 1, 2 ", "recipe.margin: 1 here, 0 there"]),
        (
            {1: "margin=1", 2: "FP8DIST_ENABLED=0"},
            [f"against rank(s) {rank} " for rank in (1, 2)]
            + ["recipe.margin: 0 here, 1 there", "settings.enabled: True here, False there"],
        ),
    ]
    for change, texts in cases:
        results = three_ranks.run(_attach_differently, change, 60.0)
        assert all(result is not None for result in results), (change, results)
        assert {kind for kind, *_ in results} == {"ManifestMismatchError"}
        (message,) = {message for _, message, _ in results}
        assert [text for text in texts if text not in message] == []
        assert max(seconds for *_, seconds in results) < 10
    assert three_ranks.run(_attach_differently, {}, 60.0) == [None] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("late", "attaches_late"), [(0, True), (2, False)])
@on_ranks(3, timeout=20)
def test_all_may_try_again_after_one_was_late(late: int, attaches_late: bool) -> None:
    """One rank is late for the first attach(), and named; then all ranks try again, with the same and with a fresh
    manager."""
    rank = dist.get_rank()
    managers, models = [], [nn.Linear(32, 32) for _ in range(2)]
    for model in models:
        nn.init.ones_(model.weight), nn.init.ones_(model.bias)
        managers.append(fp8dist.prepare(model, DelayedScaling(history_len=4), group=dist.group.WORLD))
    dist.barrier()  # The timeouts below exclude start-up.
    for attaches in (rank != late, rank == late and attaches_late):  # That rank is alone then.
        if attaches:
            # On a busy machine, others may not be there in time, too.
            with pytest.raises(ManifestMismatchError, match=r"by rank\(s\) 0\b" if rank and not late else None):
                managers[0].attach(timeout=timedelta(seconds=0.2))
        dist.barrier()
    for manager in managers:
        manager.attach(timeout=timedelta(seconds=10))
        dist.barrier()


@on_ranks(2)
def test_unequal_numbers_of_groups_are_named_at_once() -> None:
    """Only rank 1 gives one of the modules its own group."""
    rank = dist.get_rank()
    alone = [dist.new_group([r]) for r in range(2)]
    torch.manual_seed(0)
    model = nn.ModuleDict({"shared": nn.Linear(16, 16)})
    if rank == 1:
        model["expert"] = nn.Linear(16, 16)
    manager = fp8dist.prepare(model, group=dist.group.WORLD, groups={"expert": alone[rank]} if rank else None)
    dist.barrier()
    start = time.monotonic()
    with pytest.raises(ManifestMismatchError, match=r"settings\.groups: "):
        manager.attach(timeout=timedelta(seconds=5))
    assert time.monotonic() - start < 4


@pytest.mark.parametrize("outsider", [0, 2])
@on_ranks(3, timeout=20)
def test_a_mismatch_in_one_arena_leaves_nobody_hanging(outsider: int) -> None:
    """Two ranks share an arena without ``outsider``, and rank 1 has another slot in it. They fail; the third, which
    shares only the other arena with them, must get the error too."""
    rank = dist.get_rank()
    pair, alone = dist.new_group([r for r in range(3) if r != outsider]), dist.new_group([outsider])
    torch.manual_seed(0)
    layers = {"shared": nn.Linear(16, 16), "expert": nn.ModuleDict({"a": nn.Linear(16, 16)})}
    if rank == 1:
        layers["expert"].b = nn.Linear(16, 16)
    model = nn.ModuleDict(layers)
    groups = {"expert.*": alone if rank == outsider else pair}
    manager = fp8dist.prepare(model, group=dist.group.WORLD, groups=groups)
    dist.barrier()  # The timeout below excludes start-up.
    with pytest.raises(ManifestMismatchError, match=None if rank == outsider else r"slot expert\.b:grad_output: "):
        manager.attach(timeout=timedelta(seconds=2))
    assert _attach_differently({}, 60.0) is None


@on_ranks(2)
def test_prepared_before_the_process_group_existed_and_without_a_group() -> None:
    model = nn.Linear(16, 16)
    with mock.patch("fp8dist.job.agreement.world_size", return_value=1):
        manager = fp8dist.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError) as caught, counted_collectives() as calls:
        manager.attach(optimizer=optimizer)
    assert "2 ranks and no group" in str(caught.value)
    assert len(calls.names) + len(optimizer._optimizer_step_pre_hooks) == 0


@on_ranks(2)
def test_a_mesh_of_two_axes_without_names_is_refused() -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    with pytest.raises(ConfigurationError, match="mesh_dim_names"):
        fp8dist.prepare(model, group=init_device_mesh("cpu", (1, 2)))
    fp8dist.prepare(model, group=init_device_mesh("cpu", (2,))).attach()  # One axis needs no name.


def _amax(step: int, rank: int, slot: tuple[str, str]) -> float:
    """Return what ``rank`` records in ``step``: different on each rank, in each step."""
    return float32(1.0 + ((step * 7 + rank * 3 + len(slot[1])) % 11) / 8)


def _manager(update: str, policy: str, history_len: int = 3) -> tuple[nn.Module, StateManager]:
    model = nn.Module()
    recipe = DelayedScaling(history_len=history_len, update=update)
    manager = fp8dist.prepare(model, recipe, group=dist.group.WORLD, check_policy=policy)
    for (fqn, role), format in FORMATS.items():
        manager.register(fqn, role, format)
    return model, manager.attach()


def _record(manager: StateManager, step: int, skipped: tuple[str, str] | None = None) -> None:
    for slot in FORMATS:
        if slot != skipped:
            manager.slot(*slot).record(torch.tensor([-_amax(step, dist.get_rank(), slot)]))


DAMAGED_BEFORE = 3
STEPS = 10


DAMAGES: dict[str, Callable[[StateManager], Any]] = {
    "scale": lambda manager: manager.slot(*A).scale.mul_(2),
    "one bit": lambda manager: manager.slot(*A).scale.view(torch.int32).bitwise_xor_(1),
    "inv_scale": lambda manager: manager.slot(*A).inv_scale.mul_(2),
}


def _damaged_run(
    kind: str, update: str, policy: str, odd: int, skipped: tuple[str, str] | None = None, late: bool = False
) -> dict[str, Any]:
    """Run ten steps; before the fourth, damage rank ``odd``. ``skipped``: does not run in step 4. ``late``: no verdict
    is available when a step ends, as on CUDA."""
    _model, manager = _manager(update, policy)
    found: dict[str, Any] = {"errors": [], "reports": [], "states": [], "calls": []}
    manager.on_event(lambda event: found["reports"].extend([event.report] if event.kind == "diverged" else []))
    verdict = mock.patch("fp8dist.state.arena_sync.Verdict.__init__", _late_verdict) if late else nullcontext()
    for step in range(STEPS):
        if step == DAMAGED_BEFORE and dist.get_rank() == odd:
            DAMAGES[kind](manager)
        if step == DAMAGED_BEFORE:
            found["scale"] = manager.slot(*A).scale.item()
        _record(manager, step, skipped if step == DAMAGED_BEFORE else None)
        with verdict, counted_collectives() as calls:
            try:
                manager.step()
            except DivergenceError as error:
                found["errors"].append((step, str(error)))
        found["calls"].append(calls.names)
        found["states"].append(state_of(manager))
    return {**found, "steps": manager.steps}


def _expected_state() -> Any:
    oracle = Oracle(FORMATS, Rules(3))
    for step in range(STEPS):
        oracle.step(*({slot: _amax(step, rank, slot) for slot in FORMATS} for rank in range(3)))
    return oracle.state()


def _names(report: fp8dist.DivergenceReport) -> list[Any]:
    return [(f.kind, f.name, f.ranks, f.reference_rank) for f in report.findings]


@pytest.mark.parametrize(
    ("kind", "policy", "update", "late"),
    [
        ("scale", "raise", "next_step", False),
        ("one bit", "warn", "same_step", True),
        ("inv_scale", "warn", "next_step", True),
    ],
)
def test_a_damaged_scale_is_found_at_the_next_sync(
    three_ranks: RankPool, kind: str, policy: str, update: str, late: bool
) -> None:
    odd = {"scale": 1, "one bit": 2, "inv_scale": 0}[kind]
    reference = 1 if odd == 0 else 0
    results = three_ranks.run(_damaged_run, kind, update, policy, odd, None, late)
    # same_step reports in the step that synced, next_step one boundary later, as where a verdict comes late.
    found_in = DAMAGED_BEFORE + (update == "next_step" or late)
    for result in results:
        (report,) = result["reports"]  # Once: the commit has made the scales equal again.
        assert report == results[0]["reports"][0]
        assert _names(report) == [("scale", "a:input", (odd,), reference)]
        (finding,) = report.findings
        assert (finding.step, finding.last_good_step, finding.index) == (DAMAGED_BEFORE + 1, DAMAGED_BEFORE - 1, ())
        if kind != "inv_scale":
            values = (results[odd]["scale"], results[reference]["scale"])
            assert (finding.field, finding.value, finding.expected) == ("scale", *values)
            assert finding.ulp == (1 if kind == "one bit" else 1 << 23)
        assert ("inv_scale" in finding.detail) == (kind == "inv_scale")
        assert result["errors"] == ([(found_in, report.summary())] if policy == "raise" else [])
        for step, names in enumerate(result["calls"]):
            assert step == found_in or names == ["all_reduce"]
        assert policy == "raise" or len(result["calls"][found_in]) > 1  # Localisation.
        assert result["states"][-1] == results[0]["states"][-1]
        if policy == "warn" or update == "same_step":
            assert result["states"][-1] == _expected_state()
            assert result["steps"] == STEPS
        # Otherwise the boundary that raised sent nothing, so two steps' amaxes merged.


@on_ranks(2)
def test_a_last_good_step_is_one_that_a_sync_has_found_equal() -> None:
    """Not the step before the last, if the sync that compared it found a difference, or a rank has loaded a state."""
    _model, manager = _manager("same_step", "warn")
    good: list[Any] = []
    manager.on_event(lambda event: good.append((event.step, event.report and event.report.findings[0].last_good_step)))
    for step in range(1, 11):
        if step == 6 or (step == 10 and dist.get_rank() == 1):
            manager.load_state_dict(manager.state_dict())
        if step in (3, 4, 6, 8, 10) and dist.get_rank() == 1:
            DAMAGES["scale"](manager)
        _record(manager, step)
        manager.step()
    assert good == [(3, 1), (4, 1), (6, None), (8, 6), (10, None)]


@pytest.mark.parametrize(("policy", "update"), [("raise", "same_step"), ("warn", "next_step")])
def test_damage_to_a_slot_that_does_not_run_then(three_ranks: RankPool, policy: str, update: str) -> None:
    """After the caught error all ranks have the same defined state, also where no commit rewrote the scale."""
    results = three_ranks.run(_damaged_run, "scale", update, policy, 1, A)
    found_in = DAMAGED_BEFORE + (update == "next_step")
    for result in results:
        assert _names(result["reports"][0]) == [("scale", "a:input", (1,), 0)]
        for step in (found_in, -1):
            assert without(result["states"][step], "saturated") == without(results[0]["states"][step], "saturated")


@on_ranks(3)
def test_many_damaged_slots_are_all_named() -> None:
    """The values of 16 of them are told."""
    model = nn.Module()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=2), group=dist.group.WORLD)
    for place in range(40):
        manager.register(f"m{place:02d}", "input", "e4m3")
    manager.attach()
    if dist.get_rank() == 2:
        for place in range(5, 36):
            manager.slot(f"m{place:02d}", "input").set_scale(2.0)
    for slot in manager.slots:
        manager.slot(*slot).record(torch.ones(1))
    with pytest.raises(DivergenceError) as caught:
        manager.step()
    findings = caught.value.report.findings
    assert [f.name for f in findings] == [f"m{place:02d}:input" for place in range(5, 36)]
    told = [re.findall(r"(\w+): rank 2: ([.\d]+)", f.detail) for f in findings]
    assert told == [[("scale", "2.0"), ("inv_scale", "0.5")]] * 16 + [[]] * 15
    assert "rank 0: 1.0" in findings[0].detail
    assert {f.ranks for f in findings} == {(2,)}


def _one_step_ahead(update: str, policy: str, odd: int) -> dict[str, Any]:
    _model, manager = _manager(update, policy)
    early: dict[str, Any] = {}
    for step in range(4):
        early = manager.state_dict()
        _record(manager, step)
        manager.step()
    manager.load_state_dict(manager.state_dict() if dist.get_rank() == odd else early)
    found: dict[str, Any] = {"before": state_of(manager), "states": [], "reports": [], "errors": []}
    manager.on_event(lambda event: found["reports"].extend([event.report] if event.kind == "diverged" else []))
    for step in range(4, 14):
        _record(manager, step)
        try:
            manager.step()
        except DivergenceError as error:
            found["errors"].append(error.report)
        found["states"].append(state_of(manager))
    return {**found, "steps": manager.steps}


@pytest.mark.parametrize(("update", "policy", "odd"), [("same_step", "raise", 0), ("next_step", "raise", 1)])
def test_a_rank_one_step_ahead(three_ranks: RankPool, update: str, policy: str, odd: int) -> None:
    results = three_ranks.run(_one_step_ahead, update, policy, odd)
    for result in results:
        first = result["reports"][0]
        kinds = {f.kind: f for f in first.findings}
        assert kinds["step"].ranks == (odd,)
        assert kinds["step"].reference_rank == (1 if odd == 0 else 0)
        assert first == results[0]["reports"][0]
        assert result["errors"] == (result["reports"] if policy == "raise" else [])
        # The masked sync mixed nothing in (the odd rank may only take over scales and saturation counts),
        own = ("scale", "inv_scale", "saturated") if result is results[odd] else ()
        assert without(result["states"][0], *own) == without(result["before"], *own)
        # the counters agree from then on,
        assert all(f.kind != "step" for report in result["reports"][1:] for f in report.findings)
        assert result["steps"] == results[0]["steps"]
        # and once the window is refilled, everything is equal and stays equal without further reports.
        for step in (-3, -2, -1):
            states = (without(of["states"][step], "counters", "saturated") for of in (result, results[0]))
            assert next(states) == next(states)
        assert len(result["reports"]) <= 4
    assert results[odd]["before"] != results[2]["before"]


def _late_verdict(self: Any, outcome: Any, *_: Any) -> None:
    """A verdict that is not available when the step ends, as on CUDA."""
    self.immediate, self.evidence, self.cold_writes = False, None, 0
    self._outcome, self._asked = outcome, [False, False]
    self._event = mock.Mock()


@pytest.mark.parametrize(("update", "on_gpu"), [("next_step", False), ("same_step", True)])
@on_ranks(3)
def test_a_check_acts_on_what_the_last_sync_proved(update: str, on_gpu: bool) -> None:
    """Without another boundary nothing else would act on it. No trace of the damage remains for a later check."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    manager = fp8dist.prepare(
        model, DelayedScaling(update=update, history_len=4), group=dist.group.WORLD, check_policy="warn"
    )
    manager.attach()
    for step in range(4):
        if step == 3:
            if on_gpu:
                mock.patch("fp8dist.state.arena_sync.Verdict.__init__", _late_verdict).start()
            if dist.get_rank() == 1:
                manager.slot("", "weight").scale.mul_(2)  # Twice, so that this rank's amax saturates.
        model(torch.full((2, 16), 1.0 + step)).sum().backward()
        manager.step()
    seen: list[Any] = []
    manager.on_event(lambda event: seen.append(event.report))
    mock.patch.stopall()
    report = manager.check(policy="warn")
    assert (_names(report) if report.findings else [_names(r) for r in seen]) == [("scale", ":weight", (1,), 0)]
    assert not manager.check().diverged
