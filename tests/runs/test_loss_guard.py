"""Losses that raise an alarm, the action that follows, and the agreement of all ranks on the step."""

from __future__ import annotations

import json
import math
import pickle
import random
import statistics
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fp8dist
from fp8dist import ConfigurationError, LossAlarm, LossDiverged, LossGuard
from fp8dist.errors import CheckpointError
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.ranks import RankPool

NAN, INF = math.nan, math.inf


def silent(alarm: LossAlarm) -> None:
    """An action that does nothing."""


def guard_after(losses: list[float], **options: Any) -> LossGuard:
    guard = LossGuard(**{"action": silent, **options})
    for loss in losses:
        assert guard.observe(loss) is None
    return guard


def noisy(level: float, deviation: float, count: int, seed: int = 0) -> list[float]:
    generator = random.Random(seed)
    return [generator.gauss(level, deviation) for _ in range(count)]


# Spikes ------------------------------------------------------------------------------------------------


def test_a_spike_lies_above_factor_times_the_median() -> None:
    guard = guard_after([2.0, 2.1, 1.9, 2.0, 2.05, 1.95, 2.0, 2.0, 2.1, 1.9])
    assert guard.observe(4.0) is None
    alarm = guard.observe(4.01)
    assert alarm == LossAlarm(step=12, loss=4.01, median=2.0, kind="spike", streak=1)
    assert guard.alarms == 1


def test_below_the_median_nothing_is_a_spike() -> None:
    guard_after([*noisy(5.0, 0.1, 50), 0.1, 0.0, -30.0])


def test_no_spike_is_seen_before_min_history() -> None:
    guard_after([1.0, 1.0, 50.0], min_history=3)
    assert guard_after([1.0, 1.0, 1.0], min_history=3).observe(50.0) is not None


def test_the_median_is_of_the_window_only() -> None:
    guard = guard_after([*[8.0] * 20, *[1.0] * 5], window=5, min_history=5)
    assert guard.observe(2.5) is not None


def test_the_median_is_that_of_the_good_losses() -> None:
    """The guard's median equals that of the standard library over the last good losses."""
    guard, good = LossGuard(action=silent, window=20, min_history=5), cast(list[float], [])
    spikes = 0
    for i, loss in enumerate(noisy(3.0, 0.3, 300)):
        seen = 9.0 if i % 17 == 16 else loss
        alarm = guard.observe(seen)
        if seen == 9.0:
            assert alarm is not None
            assert alarm.median == statistics.median(good[-20:])
            spikes += 1
        else:
            assert alarm is None
            good.append(loss)
    assert guard.alarms == spikes == 17


def test_losses_of_any_sign_and_size() -> None:
    """At any level, usual noise raises no alarm; a rise by three times the level does."""
    for level in (-3.0, 0.0, 1e-6, 1e30, -1e30):
        size = abs(level) or 1e-12
        guard = guard_after(noisy(level, size / 10, 2000))
        assert guard.observe(level + 3 * size) is not None


def test_a_negative_loss_may_rise_by_its_magnitude() -> None:
    """From -3 to -2.7 is no spike, although -2.7 > 2 * -3."""
    guard = guard_after([-3.0] * 20 + [-2.7, -0.1])
    assert guard.observe(0.1) is not None


def test_near_zero_the_usual_noise_counts() -> None:
    """One in six absolute values of normal noise exceeds twice the median, so the noise term must prevent alarms."""
    losses = [abs(loss) for loss in noisy(0.0, 1e-4, 2000)]
    guard_after(losses)
    strict = LossGuard(action=silent, noise=0.0)
    assert sum(strict.observe(loss) is not None for loss in losses) > 100
    assert guard_after(losses).observe(2e-3) is not None


def test_factor_one_leaves_only_the_noise() -> None:
    losses = noisy(2.5, 0.02, 200)
    assert guard_after(losses).observe(3.0) is None
    assert guard_after(losses, factor=1.0).observe(3.0) is not None
    assert guard_after(losses, factor=1.0).observe(2.55) is None


def test_a_falling_loss_raises_no_alarm() -> None:
    noise = noisy(0.0, 0.05, 1000)
    guard_after([11 * math.exp(-i / 100) + 2 + noise[i] for i in range(1000)], factor=1.3)


def test_spikes_do_not_raise_the_bar_for_others() -> None:
    guard = guard_after([1.0] * 20, window=20)
    for _ in range(30):
        assert guard.observe(5.0) is not None
        assert guard.observe(1.0) is None
    assert guard.alarms == 30


def test_a_new_level_is_accepted_after_min_history_spikes_in_a_row() -> None:
    guard = guard_after([1.0] * 100, min_history=10)
    told = [guard.observe(loss) is not None for loss in noisy(5.0, 0.1, 200)]
    assert told == [True] * 10 + [False] * 190
    assert guard.observe(11.0) is not None
    assert guard.observe(1.0) is None


def test_what_rises_on_is_an_alarm_of_its_own() -> None:
    calls: list[int] = []
    guard = LossGuard(action=lambda alarm: calls.append(alarm.step), min_history=5)
    for loss in [1.0] * 10 + [5.0] * 5 + [50.0] * 5 + [50.0] * 5:
        guard.observe(loss)
    assert calls == [11, 16]
    assert guard.alarms == 10


# Losses that are not finite ------------------------------------------------------------------------------


def test_non_finite_losses_are_seen_from_the_first() -> None:
    for before in (0, 20):
        for loss in (NAN, INF, -INF):
            guard = guard_after([2.0] * before)
            alarm = guard.observe(loss)
            assert alarm is not None
            assert (alarm.kind, alarm.step, alarm.median) == ("nonfinite", before + 1, 2.0 if before else None)
            assert guard.observe(2.0) is None
            assert len(guard.state_dict()["losses"]) == before + 1


def test_non_finite_losses_are_never_a_new_level() -> None:
    guard = guard_after([2.0] * 20)
    assert all(guard.observe(NAN) is not None for _ in range(200))
    assert guard.observe(2.1) is None
    assert guard.observe(5.0) is not None


# Kinds of loss -------------------------------------------------------------------------------------------


def test_tensors() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        guard = LossGuard(action=silent, min_history=1)
        loss = torch.tensor(3, dtype=dtype, requires_grad=dtype.is_floating_point)
        assert guard.observe(loss) is None
        assert guard.observe(loss.reshape(1)) is None
        alarm = guard.observe(3 * loss)
        assert alarm is not None
        assert alarm.loss == 9.0
        assert isinstance(alarm.loss, float)


def test_what_is_no_loss() -> None:
    for loss in (torch.ones(2), torch.ones(0), torch.tensor(1j), None, "2.0", True):
        guard = LossGuard()
        with pytest.raises(ConfigurationError, match="the loss must be"):
            guard.observe(loss)


def test_numpy_numbers() -> None:
    guard = LossGuard()
    assert all(guard.observe(loss) is None for loss in (np.float32(2), np.float64(2), np.int64(2)))


def test_steps_are_the_callers_or_counted() -> None:
    guard = LossGuard(action=silent)
    steps = [guard.observe(NAN, step) for step in (None, 40, None)]
    assert [alarm and alarm.step for alarm in steps] == [1, 40, 41]


# Actions -------------------------------------------------------------------------------------------------


def test_warn_logs_one_line_for_alarms_in_a_row() -> None:
    guard = guard_after([2.0] * 20, action="warn")
    with captured_log() as log:
        for _ in range(5):
            guard.observe(7.5)
        guard.observe(2.0)
        guard.observe(8.5)
        guard.observe(NAN)
    assert [message for _, message in log] == [
        "fp8dist: step 21: the loss 7.5 is a spike, the running median is 2",
        "fp8dist: step 27: the loss 8.5 is a spike, the running median is 2",
        "fp8dist: step 28: the loss nan is not finite, the running median is 2",
    ]
    assert guard.alarms == 7


def test_stop_raises_at_each_alarm() -> None:
    guard = guard_after([2.0] * 20, action="stop")
    for streak in (1, 2):
        with pytest.raises(LossDiverged, match=r"the loss 7\.5 is a spike") as caught:
            guard.observe(7.5)
        assert caught.value.alarm.streak == streak
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.alarm, str(copy)) == (caught.value.alarm, str(caught.value))


class Switch:
    """Stands in for a manager and records the calls that set its precision."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int | None]] = []

    def set_precision(
        self,
        pattern: str,
        precision: str,
        gemms: tuple[str, ...] = ("fprop", "dgrad", "wgrad"),
        steps: int | None = None,
    ) -> None:
        self.calls.append((pattern, precision, steps))


def test_fallback_sets_high_precision_once_for_alarms_in_a_row() -> None:
    switch = Switch()
    guard = guard_after([2.0] * 20, action="fallback", manager=switch, steps=50)
    with captured_log() as log:
        for _ in range(3):
            guard.observe(7.5)
    assert switch.calls == [("*", "high", 51)]  # 50 steps, and the end of this step.
    ((_, message),) = log
    assert message.endswith("; 50 steps follow in high precision")


def test_a_callable_lowers_the_learning_rate() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    seen: list[LossAlarm] = []

    def lower(alarm: LossAlarm) -> None:
        seen.append(alarm)
        optimizer.param_groups[0]["lr"] /= 2

    guard = guard_after([2.0] * 20, action=lower)
    with captured_log() as log:
        for loss in (7.5, 7.5, 2.0, NAN):
            guard.observe(loss)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert seen[0] == LossAlarm(21, 7.5, 2.0, "spike")
    assert seen[1].kind == "nonfinite"
    assert len(log) == 2
    assert "lower is called" in log[0][1]


# Resuming ------------------------------------------------------------------------------------------------


def test_a_resumed_guard_decides_as_an_unbroken_one() -> None:
    generator = random.Random(3)
    losses = noisy(2.0, 0.1, 400, seed=3)
    for start in (60, 150, 300):  # Single spikes, a plateau, and NaNs.
        losses[start] = 6.0
    losses[200:215] = noisy(9.0, 0.1, 15, seed=4)
    losses[210] = losses[330] = losses[331] = NAN

    def observe(guard: LossGuard, part: list[float]) -> list[str]:
        return [repr(guard.observe(loss)) for loss in part]

    whole = observe(LossGuard(action=silent), losses)
    for cut in [205, 211, 331, *generator.sample(range(400), 10)]:
        first = LossGuard(action=silent)
        told = observe(first, losses[:cut])
        second = LossGuard(action=silent)
        second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        assert told + observe(second, losses[cut:]) == whole
        assert second.alarms == sum(line != "None" for line in whole)


def test_a_state_is_a_copy() -> None:
    guard = guard_after([1.0] * 3)
    state = guard.state_dict()
    guard.observe(1.0)
    assert len(state["losses"]) == 3


def test_a_shorter_window_takes_the_newest_losses() -> None:
    guard = LossGuard(action=silent, window=10)
    guard.load_state_dict(guard_after([1.0] * 90 + [1.5] * 10).state_dict())
    assert guard.state_dict()["losses"] == [1.5] * 10


def test_a_damaged_state_changes_nothing() -> None:
    cases = [
        {"losses": None},
        {"losses": [NAN]},
        {"spikes": ["a"]},
        {"streak": ["quiet", 1]},
        {"streak": ["spike"]},
        {"step": "a"},
    ]
    for damage in cases:
        guard = guard_after([1.0] * 3)
        before = guard.state_dict()
        with pytest.raises(CheckpointError, match="not the state of a LossGuard"):
            guard.load_state_dict({**before, **damage})
        with pytest.raises(CheckpointError, match="not the state of a LossGuard"):
            guard.load_state_dict({})
        assert guard.state_dict() == before


# Mistakes ------------------------------------------------------------------------------------------------


def test_mistakes() -> None:
    cases = [
        ({"action": "halt"}, "action must be"),
        ({"action": None}, "action must be"),
        ({"action": "fallback"}, "needs manager="),
        ({"window": 0}, "window must be"),
        ({"window": 10.0}, "window must be"),
        ({"min_history": 0}, "min_history must be"),
        ({"min_history": True}, "min_history must be"),
        ({"min_history": 101}, r"at most window \(100\)"),
        ({"steps": 0}, "steps must be"),
        ({"factor": 0.9}, "factor must be"),
        ({"factor": NAN}, "factor must be"),
        ({"factor": "2"}, "factor must be"),
        ({"noise": -1.0}, "noise must be"),
        ({"noise": INF}, "noise must be"),
        ({"mean_over": 3}, "group must be a ProcessGroup or a DeviceMesh"),
    ]
    for options, message in cases:
        with pytest.raises(ConfigurationError, match=message):
            LossGuard(**options)


# Ranks ---------------------------------------------------------------------------------------------------


def one_rank_differs(odd: float, mesh: bool) -> dict[str, Any]:
    """Rank 1 alone observes the loss ``odd`` at step 13."""
    group: Any = init_device_mesh("cpu", (2,)) if mesh else dist.group.WORLD
    called: list[LossAlarm] = []
    switch = Switch()
    guards: dict[str, LossGuard] = {
        "warn": LossGuard("warn", mean_over=group),
        "call": LossGuard(called.append, mean_over=group),
        "fallback": LossGuard("fallback", mean_over=group, manager=switch),
        "stop": LossGuard("stop", mean_over=group),
    }
    out: dict[str, Any] = {}
    with captured_log() as log, counted_collectives() as calls:
        for step in range(1, 15):
            loss = odd if dist.get_rank() == 1 and step == 13 else 2.0 + dist.get_rank()
            for name, guard in guards.items():
                try:
                    alarm = guard.observe(torch.tensor(loss))
                except LossDiverged as error:
                    alarm = error.alarm
                    out["stopped"] = step
                if alarm is not None:
                    out[name] = str(alarm)
    out["called"], out["switched"] = [str(alarm) for alarm in called], switch.calls
    out["state"] = repr(guards["warn"].state_dict())
    out["log"] = [message for _, message in log]
    out["collectives"] = (set(calls.names), len(calls.names), set(calls.sizes))
    return out


@pytest.mark.parametrize("mesh", [False, True], ids=["group", "mesh"])
@pytest.mark.parametrize(
    ("odd", "told"),
    [
        (NAN, "step 13: the loss nan is not finite, the running median is 2.5"),
        (INF, "step 13: the loss inf is not finite, the running median is 2.5"),
        (20.0, "step 13: the loss 11 is a spike, the running median is 2.5"),
    ],
)
def test_what_one_rank_meets_all_ranks_act_on(two_ranks: RankPool, odd: float, told: str, mesh: bool) -> None:
    first, second = two_ranks.run(one_rank_differs, odd, mesh)
    for rank in (first, second):
        assert [rank[name] for name in ("warn", "call", "fallback", "stop")] == [told] * 4
        assert rank["stopped"] == 13
        assert rank["called"] == [told]
        assert rank["switched"] == [("*", "high", 101)]
        assert rank["collectives"] == ({"all_reduce"}, 14 * 4, {8})
    assert first["state"] == second["state"]
    assert [line.split(";")[0] for line in first["log"]] == [f"fp8dist: {told}"] * 3
    assert second["log"] == []


def reduced_already() -> tuple[list[bool], int, int]:
    guard = LossGuard()
    with captured_log() as log, counted_collectives() as calls:
        told = [guard.observe(loss) is not None for loss in [1.0] * 12 + [NAN]]
    return told, len(log), len(calls.names)


def test_reduced_losses_need_no_collective(two_ranks: RankPool) -> None:
    expected = [False] * 12 + [True]
    assert two_ranks.run(reduced_already) == [(expected, 1, 0), (expected, 0, 0)]


def uneven_losses() -> tuple[str, float]:
    """Return the recorded mean and the local loss of a float64 loss whose mean float32 cannot represent."""
    guard = LossGuard(min_history=1, mean_over=dist.group.WORLD)
    loss = torch.tensor(2.0**25 if dist.get_rank() == 0 else 1.0, dtype=torch.float64)
    guard.observe(loss)
    return repr(guard.state_dict()["losses"]), float(loss)


def test_local_losses_are_averaged_in_float64_and_left_alone(two_ranks: RankPool) -> None:
    mean = repr([(2.0**25 + 1) / 2])
    assert two_ranks.run(uneven_losses) == [(mean, 2.0**25), (mean, 1.0)]


def dtensor_loss() -> str:
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ConfigurationError) as caught:
        LossGuard().observe(distribute_tensor(torch.tensor(1.0), mesh, [Replicate()]))
    return str(caught.value)


def test_a_dtensor_is_refused(two_ranks: RankPool) -> None:
    assert all("loss.full_tensor()" in text for text in two_ranks.run(dtensor_loss))


def test_fallback_of_a_real_manager() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    manager = fp8dist.prepare(net, fp8dist.DelayedScaling(history_len=4))
    manager.attach()
    guard = LossGuard("fallback", manager=manager, steps=2)
    high = []
    with captured_log():
        for loss in (1.0, math.nan, 1.0, 1.0, 1.0):
            net(torch.ones(4, 16)).sum().backward()
            guard.observe(loss)
            manager.step()
            high.append((manager.slot("0", "input").high_precision, manager.slot("1", "input").high_precision))
    everything = ("fprop", "dgrad", "wgrad")
    # Read after each step: steps 3 and 4 run in high precision.
    assert high == [((), ()), *[(everything, everything)] * 2, ((), ()), ((), ())]
