"""Losses that raise an alarm, the action that follows, updates that are skipped, and the agreement of all ranks."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import math
import pickle
import random
import statistics
import weakref
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import fp8dist
from fp8dist import ConfigurationError, LossAlarm, LossDiverged, LossGuard
from fp8dist.errors import CheckpointError
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.parallel import same_on_all_ranks
from tests.support.ranks import on_ranks
from tests.support.training import batch, bits, gradient_bits, histories, make_net

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


STEADY = [2.0, 2.1, 1.9, 2.0, 2.05, 1.95, 2.0, 2.0, 2.1, 1.9]
NEAR_ZERO = [abs(loss) for loss in noisy(0.0, 1e-4, 2000)]
"""One in six absolute values of normal noise exceeds twice the median, so the noise term must prevent alarms."""
FALLING = [11 * math.exp(-i / 100) + 2 + noise for i, noise in enumerate(noisy(0.0, 0.05, 1000))]


@pytest.mark.parametrize(
    ("options", "losses", "alarms"),
    [
        pytest.param({}, [*STEADY, 4.0, 4.01], [12], id="above twice the median"),
        pytest.param({}, [*noisy(5.0, 0.1, 50), 0.1, 0.0, -30.0], [], id="below the median"),
        pytest.param({"min_history": 3}, [1.0, 1.0, 50.0], [], id="before min_history"),
        pytest.param({"min_history": 3}, [1.0, 1.0, 1.0, 50.0], [4], id="from min_history on"),
        pytest.param({"window": 5, "min_history": 5}, [*[8.0] * 20, *[1.0] * 5, 2.5], [26], id="of the window only"),
        # Although -2.7 > 2 * -3.
        pytest.param({}, [*[-3.0] * 20, -2.7, -0.1, 0.1], [23], id="a negative loss may rise by its magnitude"),
        pytest.param({}, [*NEAR_ZERO, 2e-3], [2001], id="usual noise near zero"),
        pytest.param({"min_history": 3}, [1.0, 2.0, 3.0, 4.5], [], id="noise counts"),
        pytest.param({"min_history": 3, "noise": 0.0}, [1.0, 2.0, 3.0, 4.5], [4], id="only the factor counts"),
        pytest.param({}, [*noisy(2.5, 0.02, 200), 3.0], [], id="less than twice"),
        pytest.param({"factor": 1.0}, [*noisy(2.5, 0.02, 200), 2.55, 3.0], [202], id="only the noise counts"),
        pytest.param({"factor": 1.3}, FALLING, [], id="a falling loss"),
        pytest.param({"window": 20}, [1.0] * 20 + [5.0, 1.0] * 30, [*range(21, 80, 2)], id="spikes leave the bar"),
        pytest.param({}, [*[1.0] * 100, *noisy(5.0, 0.1, 200), 11.0, 1.0], [*range(101, 111), 301],
                     id="a new level, accepted after min_history spikes in a row"),
        pytest.param({}, [NAN, 2.0, INF, -INF, 2.0], [1, 3, 4], id="non-finite losses from the first"),
        pytest.param({}, [*[2.0] * 20, *[NAN] * 200, 2.1, 5.0], [*range(21, 221), 222], id="NaN is no new level"),
        *(
            pytest.param({}, [*noisy(level, size / 10, 500), level + 3 * size], [501], id=f"at the level {level}")
            for level, size in ((-3.0, 3.0), (0.0, 1e-12), (1e-6, 1e-6), (1e30, 1e30), (-1e30, 1e30))
        ),
    ],
)  # fmt: skip
def test_losses_that_raise_an_alarm(options: dict[str, Any], losses: list[float], alarms: list[int]) -> None:
    guard = LossGuard(action=silent, **options)
    found = [guard.observe(loss) for loss in losses]
    assert [alarm.step for alarm in found if alarm is not None] == alarms
    assert guard.alarms == len(alarms)
    for alarm in found:
        if alarm is not None:
            assert alarm.kind == ("spike" if math.isfinite(alarm.loss) else "nonfinite")


def test_an_alarm_has_its_step_and_the_median_of_the_last_good_losses() -> None:
    guard, good = LossGuard(action=silent, window=20, min_history=5), list[float]()
    for i, loss in enumerate(noisy(3.0, 0.3, 100)):
        alarm = guard.observe(9.0 if i % 17 == 16 else loss)
        if i % 17 == 16:
            assert alarm == LossAlarm(step=i + 1, loss=9.0, median=statistics.median(good[-20:]), kind="spike")
        else:
            assert alarm is None
            good.append(loss)
    guard = LossGuard(action=silent)
    steps = [guard.observe(NAN, step) for step in (None, 40, None)]  # The caller's, or one more than the last.
    assert [alarm and (alarm.step, alarm.median) for alarm in steps] == [(1, None), (40, None), (41, None)]


def test_numbers_and_tensors_are_losses() -> None:
    made: list[Callable[[float], Any]] = [
        *(lambda value, dtype=dtype: torch.tensor(value, dtype=dtype) for dtype in (torch.float64, torch.bfloat16)),
        lambda value: torch.tensor([value], requires_grad=True),
        lambda value: torch.tensor(int(value)),
        *(lambda value, kind=kind: kind(value) for kind in (np.float32, np.float64, np.int64, int)),
    ]
    for loss in made:
        guard = guard_after([loss(3.0)], min_history=1)
        alarm = guard.observe(loss(9.0))
        assert alarm == LossAlarm(2, 9.0, 3.0, "spike")
        assert isinstance(alarm.loss, float)
    for other in (torch.ones(2), torch.ones(0), torch.tensor(1j), None, "2.0", True):
        with pytest.raises(ConfigurationError, match="the loss must be"):
            LossGuard().observe(other)  # type: ignore[arg-type]


def test_an_action_runs_once_for_alarms_of_one_kind_in_a_row() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    seen: list[LossAlarm] = []

    def lower(alarm: LossAlarm) -> None:
        seen.append(alarm)
        optimizer.param_groups[0]["lr"] /= 2

    texts = [
        "step 21: the loss 7.5 is a spike, the running median is 2",
        "step 27: the loss 8.5 is a spike, the running median is 2",
        "step 28: the loss nan is not finite, the running median is 2",
    ]
    for action, more in (("warn", ""), (lower, "lower is called")):
        guard = guard_after([2.0] * 20, action=action)
        with captured_log() as log:
            for loss in [*[7.5] * 5, 2.0, 8.5, NAN]:
                guard.observe(loss)
        assert guard.alarms == 7
        assert [message.partition("; ")[0] for _, message in log] == [f"fp8dist: {text}" for text in texts]
        assert all(more in message for _, message in log)
    assert seen[0] == LossAlarm(21, 7.5, 2.0, "spike")
    assert (list(map(str, seen)), optimizer.param_groups[0]["lr"]) == (texts, 1 / 8)
    guard = guard_after([1.0] * 10, action=lower, min_history=5)
    for loss in [5.0] * 5 + [50.0] * 10:  # What rises on after a new level is an alarm of its own.
        guard.observe(loss)
    assert ([alarm.step for alarm in seen[3:]], guard.alarms) == ([11, 16], 10)


def test_stop_raises_at_each_alarm() -> None:
    guard = guard_after([2.0] * 20, action="stop")
    for streak in (1, 2):
        with pytest.raises(LossDiverged, match=r"the loss 7\.5 is a spike") as caught:
            guard.observe(7.5)
        assert caught.value.alarm.streak == streak
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.alarm, str(copy)) == (caught.value.alarm, str(caught.value))


def test_fallback_is_high_precision_for_some_steps() -> None:
    net = nn.Linear(16, 16)
    manager = fp8dist.prepare(net, fp8dist.DelayedScaling(history_len=4)).attach()
    guard, high = LossGuard("fallback", manager=manager, steps=2), []
    for loss in (1.0, NAN, 1.0, 1.0, 1.0):
        net(torch.ones(4, 16)).sum().backward()
        guard.observe(loss)
        manager.step()
        high.append(bool(manager.slot("", "input").high_precision))
    assert high == [False, True, True, False, False]  # Read after each step: steps 3 and 4 are in high precision.


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


def test_states_that_are_loaded() -> None:
    guard = guard_after([1.0] * 90 + [1.5] * 10)
    state = guard.state_dict()
    guard.observe(1.0)
    assert state["losses"] == [1.0] * 90 + [1.5] * 10  # A copy.
    short = LossGuard(action=silent, window=10)
    short.load_state_dict(state)
    before = short.state_dict()
    assert before["losses"] == [1.5] * 10  # The newest.
    damaged: list[dict[str, Any]] = [{"losses": None}, {"losses": [NAN]}, {"spikes": ["a"]}, {"step": "a"}]
    damaged += [{"streak": ["quiet", 1]}, {"streak": ["spike"]}, {"step": math.inf}, {"losses": [10**400]}]
    for wrong in [{}, *({**before, **damage} for damage in damaged)]:
        with pytest.raises(CheckpointError, match="not the state of a LossGuard"):
            short.load_state_dict(wrong)
        assert short.state_dict() == before


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
        ({"action": "skip"}, "needs optimizer="),
        ({"action": "skip", "optimizer": 3}, "optimizer= must be one torch optimizer or several, got int"),
        ({"action": "skip", "optimizer": []}, "optimizer= must be one torch optimizer or several, got list"),
        ({"action": "warn", "optimizer": "adam"}, "optimizer= must be one torch optimizer or several, got str"),
    ]
    for options, message in cases:
        with pytest.raises(ConfigurationError, match=message):
            LossGuard(**options)


@pytest.mark.parametrize(
    ("odd", "mesh", "text"),
    [
        (NAN, False, "step 13: the loss nan is not finite, the running median is 2.5"),
        (20.0, True, "step 13: the loss 11 is a spike, the running median is 2.5"),
    ],
)
@on_ranks(2)
def test_what_one_rank_meets_all_ranks_act_on(odd: float, mesh: bool, text: str) -> None:
    """Rank 1 alone observes the loss ``odd`` at steps 13 and 14."""
    group: Any = init_device_mesh("cpu", (2,)) if mesh else dist.group.WORLD
    called: list[LossAlarm] = []
    switch = mock.Mock()
    guards: dict[str, LossGuard] = {
        "warn": LossGuard("warn", mean_over=group),
        "call": LossGuard(called.append, mean_over=group),
        "fallback": LossGuard("fallback", mean_over=group, manager=switch),
        "stop": LossGuard("stop", mean_over=group),
    }
    first, stopped = dict[str, str](), 0
    with captured_log() as log, counted_collectives() as calls:
        for step in range(1, 16):
            loss = odd if dist.get_rank() == 1 and step in (13, 14) else 2.0 + dist.get_rank()
            for name, guard in guards.items():
                try:
                    alarm = guard.observe(torch.tensor(loss))
                except LossDiverged as error:
                    alarm = error.alarm
                    stopped += 1
                if alarm is not None:
                    first.setdefault(name, str(alarm))
    assert first == dict.fromkeys(guards, text)
    assert stopped == 2  # At each alarm; the others act once for alarms in a row.
    assert [str(alarm) for alarm in called] == [text]
    switch.set_precision.assert_called_once_with("*", "high", steps=101)
    assert (set(calls.names), len(calls.names), set(calls.sizes)) == ({"all_reduce"}, 15 * 4, {8})
    same_on_all_ranks(repr(guards["warn"].state_dict()))
    ends = ("", "; list.append is called", "; 100 steps follow in high precision")
    assert [message for _, message in log] == [f"fp8dist: {text}{end}" for end in ends if dist.get_rank() == 0]


@on_ranks(2)
def test_losses_of_ranks() -> None:
    """Losses that are reduced need no collective. Local ones are averaged in float64, and left alone."""
    reduced, local = LossGuard(), LossGuard(min_history=1, mean_over=dist.group.WORLD)
    with captured_log() as log, counted_collectives() as calls:
        alarms = [reduced.observe(loss) is not None for loss in [1.0] * 12 + [NAN]]
    assert alarms == [False] * 12 + [True]
    assert (len(log), calls.names) == (int(dist.get_rank() == 0), [])
    mine = 2.0**25 if dist.get_rank() == 0 else 1.0  # float32 cannot represent the mean.
    loss = torch.tensor(mine, dtype=torch.float64)
    local.observe(loss)
    assert local.state_dict()["losses"] == [(2.0**25 + 1) / 2]
    assert float(loss) == mine
    with pytest.raises(ConfigurationError, match=r"loss\.full_tensor\(\)"):
        reduced.observe(distribute_tensor(torch.tensor(1.0), init_device_mesh("cpu", (2,)), [Replicate()]))


Make = Callable[[list[nn.Parameter]], Any]


def muon_and_adamw(parameters: list[nn.Parameter]) -> list[Optimizer]:
    matrices, others = ([p for p in parameters if (p.ndim == 2) == wanted] for wanted in (True, False))
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1, nesterov=True),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=0.01, weight_decay=0.1),
    "several": muon_and_adamw,
}
FOUR_LOSSES = {"step": 4, "alarms": 0, "losses": [1.0] * 4, "spikes": [], "streak": None}
USUAL = "forward backward observe step zero"
LATE = r"observe\(\) came after optimizer\.step\(\)"


def loss_of(net: Any, x: Tensor, y: Tensor) -> Tensor:
    return (net(x) - y).square().mean()


def local_bits(value: Any) -> Any:
    """Return the bits of this rank's part of a tensor; another value as it is."""
    return bits(value.to_local() if isinstance(value, DTensor) else value) if isinstance(value, Tensor) else value


class Around(Optimizer):
    """Steps another optimizer inside its own step, as Lookahead does, and then changes the parameters itself."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.mul_(0.5)


class Loop:
    """A training loop whose order of calls each test chooses.

    Args:
        action: of the guard; None: no guard.
        make: makes the optimizer, or several, from the parameters.
        given: makes what the guard gets from the optimizers.
        shown: losses to observe in place of its own. The guard has then seen four losses of 1.0.
        wrap: makes what the loop calls from the net.
        scale: of a GradScaler; None: without one.
        fp8: prepare the net. The batch of step 2 is a thousand times as large.
    """

    def __init__(
        self,
        action: Any = "skip",
        make: Make = OPTIMIZERS["adamw"],
        given: Callable[[Any], Any] = lambda optimizer: optimizer,
        shown: list[float] | None = None,
        wrap: Callable[[nn.Module], Any] | None = None,
        scale: float | None = None,
        fp8: bool = False,
        mean_over: Any = None,
    ) -> None:
        self.net = make_net()
        self.called: Any = self.net if wrap is None else wrap(self.net)
        self._keeps_gradients = wrap is None and scale is None
        made = make(list(self.called.parameters()))
        self.optimizers: list[Optimizer] = made if isinstance(made, list) else [made]
        self.scaler = GradScaler("cpu", init_scale=scale or 1.0, growth_interval=2, enabled=scale is not None)
        self.manager: Any = None
        if fp8 or action == "fallback":
            self.manager = fp8dist.prepare(self.net, fp8dist.DelayedScaling(history_len=4))
            self.manager.attach(optimizer=made, scaler=self.scaler if scale is not None else None)
        self.guard: Any = None
        if action is not None:
            history = 10 if shown is None else 2
            self.guard = LossGuard(
                action, min_history=history, optimizer=given(made), manager=self.manager, mean_over=mean_over
            )
            if shown is not None:
                self.guard.load_state_dict(FOUR_LOSSES)
        self.take_step: Callable[[], Any] = self._step_all
        self._shown = iter(shown or ())
        self.indices = count()
        self._fp8 = fp8
        self.loss = torch.tensor(0.0)

    def forward(self) -> None:
        index = next(self.indices)
        x, y = batch(dist.get_rank() if dist.is_initialized() else 0, index)
        self.loss = loss_of(self.called, x * (1000 if self._fp8 and index == 2 else 1), y)

    def overflow(self) -> None:
        self.loss = self.loss * math.inf

    def backward(self) -> None:
        self.scaler.scale(self.loss).backward()

    def observe(self) -> None:
        if self.guard is not None:
            self.guard.observe(next(self._shown, self.loss))

    def observe_detached(self) -> None:
        self.guard.observe(float(self.loss.detach()))

    def unscale(self) -> None:
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)

    def clip(self) -> None:
        if isinstance(self.called, FullyShardedDataParallel):
            self.called.clip_grad_norm_(0.1)
        else:
            nn.utils.clip_grad_norm_(self.called.parameters(), 0.1)

    def step(self) -> None:
        """A skipped step, too, keeps the gradients: the same tensors, because a CUDA graph may write to them again."""
        if not self._keeps_gradients:
            self.take_step()
            return
        before = [(p.grad, g) for p, g in zip(self.net.parameters(), gradient_bits(self.net).values())]
        self.take_step()
        after = zip(self.net.parameters(), gradient_bits(self.net).values())
        assert all(p.grad is grad and bits == kept for (p, bits), (grad, kept) in zip(after, before))

    def _step_all(self) -> None:
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()

    def zero(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def zero_in_place(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=False)

    def accumulate(self) -> None:
        for _ in range(3):
            self.forward()
            self.backward()

    def resume(self) -> None:
        state = self.guard.state_dict()
        self.guard = LossGuard(self.guard._action, optimizer=self.optimizers)
        self.guard.load_state_dict(state)

    def parameters(self) -> list[bytes]:
        return [local_bits(parameter) for parameter in self.called.parameters()]

    def state(self) -> list[Any]:
        """Return the whole state of the optimizers."""
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        return [
            [{name: local_bits(value) for name, value in state["state"][i].items()} for i in sorted(state["state"])]
            for state in states
        ] + [repr(state["param_groups"]) for state in states]

    def run(self, order: str, times: int = 4) -> list[bool]:
        """Return which of ``times`` repetitions changed parameters, and optimizers' states with them."""
        changed = []
        for _ in range(times):
            before = self.parameters(), self.state()
            for name in order.split():
                getattr(self, name)()
            after = self.parameters(), self.state()
            changed.append(before != after)
            assert (before[0] == after[0]) is (before[1] == after[1])
        return changed


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_leaves_parameters_and_state_alone(name: str) -> None:
    losses = [1.0, 1.0, 50.0, 50.0, 1.0, NAN, INF, 1.0]
    loop = Loop(make=OPTIMIZERS[name], shown=losses)
    with captured_log() as log:
        # Every alarm skips, not only the first of a streak.
        assert loop.run(USUAL, len(losses)) == [loss == 1.0 for loss in losses]
    assert loop.guard.alarms == 4
    assert [message.split("; ")[1] for _, message in log] == ["this step's update is skipped"] * 2


def test_an_alarm_is_for_one_step() -> None:
    """A step without an observed loss runs. So does a step after an alarm whose own step the loop never ran."""
    loop = Loop(make=OPTIMIZERS["sgd momentum"], shown=[50.0, 50.0, 1.0])
    around = Loop(make=lambda p: [inner := OPTIMIZERS["sgd momentum"](p), Around(inner)], shown=[50.0])
    around.take_step = around.optimizers[1].step
    with captured_log():
        assert loop.run("forward backward observe step", 1) == [False]
        assert loop.run("step", 1) == [True]
        assert loop.run("forward backward observe", 1) == [False]
        assert loop.run("zero forward backward observe step", 1) == [True]
        assert around.run("forward backward observe step", 1) == [False]
    assert loop.guard.alarms == 2
    assert around.run("step", 1) == [True]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # Raised by torch itself.
@pytest.mark.parametrize(
    ("options", "order"),
    [
        pytest.param({}, "forward observe zero backward step", id="observe before backward"),
        # As Accelerate does.
        pytest.param({"given": lambda of: SimpleNamespace(optimizer=of)}, USUAL, id="a wrapped optimizer"),
        pytest.param({"compiled": True}, USUAL, id="compiled", marks=pytest.mark.slow),
        pytest.param({"fp8": True}, USUAL, id="FP8"),
        pytest.param({"fp8": True, "scale": 64.0}, USUAL, id="FP8 with GradScaler"),
    ],
)
def test_a_loop_skips_the_update_of_an_alarm(options: dict[str, Any], order: str) -> None:
    compiled = options.pop("compiled", False)
    loop = Loop(shown=[1.0, 1.0, 50.0, 1.0], **options)
    if compiled:
        loop.take_step = torch.compile(loop.optimizers[0].step, backend="eager")
    with captured_log():
        assert loop.run(order) == [True, True, False, True]
    if loop.manager is not None:  # Its FP8 step ends as usual.
        assert loop.manager.steps == 4
        inputs = [float((batch(0, i)[0] * (1000 if i == 2 else 1)).abs().max()) for i in range(4)]
        assert histories(loop.manager)["first", "input"] == inputs


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("adamw", USUAL),
        ("adamw", "forward backward unscale observe step zero"),
        ("adamw fused", USUAL),
        ("several", "forward backward observe unscale clip step zero"),
    ],
)
def test_grad_scaler(name: str, order: str) -> None:
    """GradScaler still checks the dropped gradients for Inf, so step() and update() both work. A step that it skips is
    no step."""
    loop = Loop(scale=1024.0, make=OPTIMIZERS[name], shown=[1.0, 50.0, NAN, 1.0, 1.0, 1.0])
    scales = []
    with captured_log() as log:
        for index in range(6):
            overflows = "forward overflow" if index in (2, 4) else "forward"
            assert loop.run(order.replace("forward", overflows), 1) == [index not in (1, 2, 4)]
            scales.append(loop.scaler.get_scale())
    assert scales == [1024.0, 2048.0, 1024.0, 1024.0, 512.0, 512.0]  # The same scales as without a guard.
    assert len(log) == 2  # The two alarms: no observe() counts as late.


RIGHT = {
    "usual": USUAL,
    "a number": "forward backward observe_detached step zero",
    "zero in place": "forward backward observe step zero_in_place",
    "zero first": "zero forward backward observe step",
    "zero in place first": "zero_in_place forward backward observe step",
    "zero before backward": "forward zero backward observe step",
    "never zero": "forward backward observe step",
    "accumulation": "accumulate observe step zero",
    "clip after": "forward backward observe clip step zero",
    "clip before": "forward backward clip observe step zero",
    "before backward": "forward observe backward step zero",
    "before backward, a number": "forward observe_detached backward step zero",
    "before zero": "forward observe zero backward step",
    "before zero, a number": "forward observe_detached zero backward step",
    "before zero in place": "forward observe_detached zero_in_place backward step",
    "two observes": "forward backward observe observe step zero",
    "not each step": "forward backward step zero forward backward observe step zero",
    "not each step, before backward": "forward backward step zero forward observe backward step zero",
    "resumed each step": "forward backward observe resume step zero",
    "resumed before forward": "resume forward backward observe step zero",
}
WRONG = {
    "usual": "forward backward step observe zero",
    "a number": "forward backward step observe_detached zero",
    "after zero": "forward backward step zero observe",
    "after zero, a number": "forward backward step zero observe_detached",
    "zero first": "zero forward backward step observe_detached",
    "zero in place first": "zero_in_place forward backward step observe_detached",
    "accumulation": "accumulate clip step zero observe_detached",
    "not each step": "forward backward step zero forward backward step zero observe_detached",
}


def test_what_is_in_time_is_in_time() -> None:
    cases = [*itertools.product(RIGHT, ("skip", "warn")), ("usual", "stop"), ("usual", silent)]
    for order, action in cases:
        loop = Loop(action)
        with captured_log() as log:
            loop.run(RIGHT[order], times=3)
        assert log == []
    # Optimizers that take turns: each step belongs to one; the other still has old gradients.
    net = make_net()
    both = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (net.first, net.last)]
    guard = LossGuard("skip", optimizer=both)
    for index in range(6):
        optimizer = both[index % 2]
        loss = loss_of(net, *batch(0, index))
        loss.backward(inputs=[p for group in optimizer.param_groups for p in group["params"]])
        guard.observe(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()


def test_what_is_late_is_an_error_or_a_warning() -> None:
    cases = [*itertools.product(WRONG, ("skip", "warn")), *(("usual", one) for one in ("stop", "fallback", silent))]
    for order, action in cases:
        loop = Loop(action)
        if action == "skip":
            for _ in range(2):  # The first wrong order raises, and so does the second.
                with pytest.raises(ConfigurationError, match=LATE):
                    loop.run(WRONG[order], times=1)
            continue
        with captured_log() as log:
            loop.run(WRONG[order])
            if action == "stop":  # A late loss is judged as any other.
                with pytest.raises(LossDiverged):
                    loop.guard.observe(NAN)
        ((_, message),) = log
        assert message == (
            "fp8dist: LossGuard: observe() came after optimizer.step(): the update with this loss's gradients is made "
            "already. Call it between loss.backward() and optimizer.step()"
        )
    with captured_log() as log:
        Loop("warn", given=lambda optimizer: None).run(WRONG["usual"])
    assert log == []  # Without an optimizer nothing is noticed.
    loop = Loop("skip")  # Where losses come before backward, one that is older than the step is late.
    loop.run("forward observe backward step zero")
    loop.run("forward backward step zero", times=1)
    with pytest.raises(ConfigurationError, match=LATE):
        loop.observe()


def test_a_closure_is_refused() -> None:
    loop = Loop()
    before = loop.parameters()
    for arguments, named in (((lambda: 1.0,), {}), ((), {"closure": lambda: 1.0})):
        with pytest.raises(ConfigurationError, match=r"not support optimizer\.step\(closure\)"):
            loop.optimizers[0].step(*arguments, **named)
        loop.guard.observe(1.0)
    assert loop.parameters() == before


@pytest.mark.slow
def test_hooks_go_with_the_guard_and_the_guard_keeps_nothing() -> None:
    loop = Loop(shown=[50.0])
    with captured_log():
        loop.run("forward backward observe step", times=1)
    gradient = weakref.ref(loop.net.first.weight.grad)  # type: ignore[arg-type]
    loop.zero()
    gc.collect()
    assert gradient() is None
    (optimizer,) = loop.optimizers
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    assert list(map(len, hooks)) == [1, 1]
    loop.guard = None
    gc.collect()
    assert list(map(len, hooks)) == [0, 0]
    guard = LossGuard("skip", optimizer=optimizer)
    gone = [weakref.ref(thing) for thing in (loop.net, optimizer, next(loop.net.parameters()))]
    del loop, optimizer
    gc.collect()
    assert [thing() for thing in gone] == [None] * 3
    with pytest.raises(ConfigurationError, match="no longer exists"):
        guard.observe(1.0)


def test_copies() -> None:
    """A guard with an optimizer has none, and the hooks stay with the optimizer that it was given."""
    for duplicate in (copy.copy, copy.deepcopy, lambda guard: pickle.loads(pickle.dumps(guard))):
        plain = LossGuard("warn")
        plain.observe(1.0)
        assert duplicate(plain).state_dict() == plain.state_dict()
        optimizer = torch.optim.SGD(make_net().parameters(), lr=0.1)
        guard = LossGuard("skip", optimizer=optimizer)
        with pytest.raises(ConfigurationError, match=r"save its state_dict\(\)"):
            duplicate(guard)
        copy.deepcopy(optimizer).step(lambda: 1.0)


def parallel(kind: str) -> Callable[[nn.Module], Any]:
    def wrap(net: Any) -> Any:
        if kind == "fsdp2":
            for module in (net.first, net.branch, net.last, net):
                fully_shard(module)
            return net
        if kind.startswith("fsdp1"):
            cpu = torch.device("cpu")
            return FullyShardedDataParallel(net, use_orig_params=kind == "fsdp1", device_id=cpu)
        return DistributedDataParallel(net, gradient_as_bucket_view=True)

    return wrap


@pytest.mark.parametrize(
    ("kind", "name", "clip"),
    [
        ("ddp", "sgd momentum", "clip "),
        pytest.param("fsdp2", "adamw", "clip ", marks=pytest.mark.slow),
        ("fsdp1", "adamw", ""),
        pytest.param("fsdp1 flat", "sgd momentum", "clip ", marks=pytest.mark.slow),
    ],
)
@on_ranks(2)
def test_a_skipped_batch_is_as_if_it_had_not_been(kind: str, name: str, clip: str) -> None:
    """The loss of step 2 spikes on rank 1."""
    shown = [1.0, 1.0, 50.0 if dist.get_rank() == 1 else 1.0, 1.0, 1.0]
    options: dict[str, Any] = {"make": OPTIMIZERS[name], "wrap": parallel(kind)}
    skipped = Loop(shown=shown, mean_over=dist.group.WORLD, **options)
    without = Loop(None, **options)
    without.indices = iter((0, 1, 3, 4))  # type: ignore[assignment]
    order = f"forward backward observe {clip}step zero"
    with captured_log() as log, counted_collectives() as calls:
        assert skipped.run(order, 5) == [True, True, False, True, True]
    assert without.run(order, 4) == [True] * 4
    assert (skipped.parameters(), skipped.state()) == (without.parameters(), without.state())
    assert calls.sizes.count(16) == 5  # Those of the guard: the loss, and if it is late.
    assert len(log) == 1 - dist.get_rank()
    if kind == "ddp":
        same_on_all_ranks(skipped.parameters())


@pytest.mark.parametrize(("kind", "action"), [("ddp", "warn"), ("fsdp1 flat", "skip")])
@on_ranks(2)
def test_late_on_all_ranks(kind: str, action: str) -> None:
    loop = Loop(action, wrap=parallel(kind), mean_over=dist.group.WORLD)
    with captured_log() as log:
        if action == "warn":
            loop.run(WRONG["usual"])
        for _ in range(2 if action == "skip" else 0):
            with pytest.raises(ConfigurationError, match=LATE):
                loop.run(WRONG["usual"], times=1)
            loop.zero()
    assert len(log) == (action == "warn" and dist.get_rank() == 0)


@on_ranks(2)
def test_a_rank_without_gradients_is_not_late() -> None:
    """On rank 1, every other step has no gradients."""
    loop = Loop(mean_over=dist.group.WORLD)
    with captured_log() as log:
        for index in range(6):
            if dist.get_rank() == 0 or index % 2 == 0:
                loop.run("forward backward", times=1)
            loop.guard.observe(1.0)
            loop.take_step()
            loop.zero()
    assert [message for _, message in log] == []
