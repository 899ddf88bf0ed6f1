"""Updates that a loss guard skips, and its error for a loss that is observed after its update."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import fp8dist
from fp8dist import ConfigurationError, LossAlarm, LossDiverged, LossGuard
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.ranks import RankPool
from tests.support.training import Net, batch, bits, gradient_bits, histories, make_net, parameter_bits

Make = Callable[[list[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1, nesterov=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=0.01, weight_decay=0.1),
}
LATE = r"observe\(\) came after optimizer\.step\(\)"


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = (net(x) - y).square().mean()
    return loss


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_of(optimizer: Optimizer) -> list[tuple[str, object]]:
    """Return the optimizer's whole state, tensors as bits."""
    states = optimizer.state_dict()
    return [
        (f"{index}.{name}", bits(local(value)) if isinstance(value, Tensor) else value)
        for index, state in sorted(states["state"].items())
        for name, value in sorted(state.items())
    ] + [(f"group {i}", repr(group)) for i, group in enumerate(states["param_groups"])]


def skipping(optimizer: Any, **options: Any) -> LossGuard:
    """Return a guard that has seen four losses of 1.0."""
    guard = LossGuard("skip", min_history=2, optimizer=optimizer, **options)
    guard.load_state_dict({"step": 4, "alarms": 0, "losses": [1.0] * 4, "spikes": [], "streak": None})
    return guard


# Nothing is touched --------------------------------------------------------------------------------------


def test_a_skipped_step_leaves_parameters_and_state_alone() -> None:
    cases = [
        *((name, False, 50.0) for name in OPTIMIZERS),
        *((name, True, math.nan) for name in OPTIMIZERS),
        ("adamw", False, math.inf),
    ]
    for name, first, bad in cases:
        net = make_net()
        optimizer = OPTIMIZERS[name](list(net.parameters()))
        guard = skipping(optimizer)
        for index in range(0 if first else 3):
            loss_of(net, *batch(0, index)).backward()
            assert guard.observe(1.0) is None
            before = parameter_bits(net)
            optimizer.step()
            assert parameter_bits(net) != before
            net.zero_grad()
        loss_of(net, *batch(0, 7)).backward()
        before, state, gradients = parameter_bits(net), state_of(optimizer), gradient_bits(net)
        with captured_log() as log:
            for _ in range(2):  # Every alarm skips, not only the first of a streak.
                assert guard.observe(bad) is not None
                optimizer.step()
                assert (parameter_bits(net), state_of(optimizer), gradient_bits(net)) == (before, state, gradients)
                net.zero_grad()
                loss_of(net, *batch(0, 7)).backward()
        assert guard.alarms == 2
        assert [message.split("; ")[1] for _, message in log] == ["this step's update is skipped"]
        assert guard.observe(1.0) is None
        optimizer.step()
        assert parameter_bits(net) != before


def test_an_alarm_is_for_one_step() -> None:
    """A step without an observed loss runs. So does a step after an alarm whose own step the loop never ran."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    guard = skipping(optimizer)
    loss_of(net, *batch(0, 0)).backward()
    before = parameter_bits(net)
    with captured_log():
        assert guard.observe(50.0) is not None
    gradients = [p.grad for p in net.parameters()]
    optimizer.step()
    assert parameter_bits(net) == before
    # The same tensor objects are restored, because a CUDA graph may write to them again.
    assert all(p.grad is gradient for p, gradient in zip(net.parameters(), gradients))
    optimizer.step()
    assert parameter_bits(net) != before
    loss_of(net, *batch(0, 0)).backward()
    before = parameter_bits(net)
    with captured_log():
        assert guard.observe(50.0) is not None  # The loop takes no step for this loss.
    optimizer.zero_grad()
    loss_of(net, *batch(0, 1)).backward()
    assert guard.observe(1.0) is None
    optimizer.step()
    assert parameter_bits(net) != before


def test_all_of_several_optimizers_skip() -> None:
    net = make_net()
    muon = torch.optim.Muon([p for p in net.parameters() if p.ndim == 2], lr=0.01)
    adamw = torch.optim.AdamW([p for p in net.parameters() if p.ndim == 1], lr=0.01)
    guard = skipping([muon, adamw])
    changed = []
    for index, loss in enumerate([1.0, 50.0, 1.0]):
        loss_of(net, *batch(0, index)).backward()
        before = parameter_bits(net)
        with captured_log():
            guard.observe(loss)
        for optimizer in (muon, adamw):
            optimizer.step()
        changed.append([name for name, value in parameter_bits(net).items() if value != before[name]])
        net.zero_grad()
    everything = [name for name, _ in net.named_parameters()]
    assert changed == [everything, [], everything]


def test_observe_before_backward_skips_too() -> None:
    """The guard drops the gradients inside step(), so it does not matter when backward() ran."""
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    guard = skipping(optimizer)
    for index, value in enumerate([1.0, 1.0, 50.0, 1.0]):
        before, state = parameter_bits(net), state_of(optimizer)
        with captured_log():
            guard.observe(value)
        optimizer.zero_grad()
        loss_of(net, *batch(0, index)).backward()
        optimizer.step()
        assert (parameter_bits(net) == before) is (state_of(optimizer) == state) is (value == 50.0)


class Wrapped:
    """Wraps an optimizer as Accelerate does."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


def test_a_wrapped_optimizer_and_a_scheduler() -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    guard = skipping(Wrapped(optimizer))
    loss_of(net, *batch(0, 0)).backward()
    before = parameter_bits(net)
    with captured_log():
        guard.observe(50.0)
    optimizer.step()
    scheduler.step()
    assert parameter_bits(net) == before
    assert optimizer.param_groups[0]["lr"] == 0.05


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


def test_an_optimizer_inside_another() -> None:
    net = make_net()
    inner = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    outer = Around(inner)
    guard = skipping([inner, outer])
    loss_of(net, *batch(0, 0)).backward()
    before, state, gradients = parameter_bits(net), state_of(inner), gradient_bits(net)
    with captured_log():
        guard.observe(50.0)
    outer.step()
    assert (parameter_bits(net), state_of(inner), gradient_bits(net)) == (before, state, gradients)
    outer.step()
    assert parameter_bits(net) != before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # Raised by torch itself.
def test_a_compiled_step_skips() -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    guard = skipping(optimizer)
    step = torch.compile(optimizer.step, backend="eager")
    changed = []
    for index, loss in enumerate([1.0, 1.0, 50.0, 1.0]):
        loss_of(net, *batch(0, index)).backward()
        before = parameter_bits(net)
        with captured_log():
            guard.observe(loss)
        step()
        changed.append(parameter_bits(net) != before)
        optimizer.zero_grad()
    assert changed == [True, True, False, True]


# GradScaler ----------------------------------------------------------------------------------------------


def test_grad_scaler() -> None:
    """GradScaler still checks the dropped gradients for Inf, so step() and update() both work."""
    cases = [
        ("adamw", ""),
        ("adamw", "before observe"),
        ("adamw", "after observe"),
        ("adamw fused", ""),
        ("adamw fused", "before observe"),
        ("adamw fused", "after observe"),
        ("muon", "after observe"),
    ]
    for name, unscale in cases:
        net = make_net()
        optimizer = OPTIMIZERS[name](list(net.parameters()))
        guard = skipping(optimizer)
        scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        changed, scales = [], []
        for index, loss in enumerate([1.0, 50.0, math.nan, 1.0, 1.0]):
            net.zero_grad()
            scaled = scaler.scale(loss_of(net, *batch(0, index)))
            (scaled * math.inf if math.isnan(loss) else scaled).backward()
            before, state = parameter_bits(net), state_of(optimizer)
            if unscale == "before observe":
                scaler.unscale_(optimizer)
            with captured_log():
                guard.observe(loss)
            if unscale == "after observe":
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            assert (parameter_bits(net) == before) is (state_of(optimizer) == state)
            changed.append(parameter_bits(net) != before)
            scales.append(scaler.get_scale())
        assert changed == [True, False, False, True, True]
        assert scales == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]  # The same scales as without a guard.


# FP8 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaled", [False, True], ids=["", "GradScaler"])
def test_the_fp8_step_ends_as_usual(scaled: bool) -> None:
    net = make_net()
    manager = fp8dist.prepare(net, fp8dist.DelayedScaling(history_len=4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scaler = GradScaler("cpu", init_scale=64.0, enabled=scaled)
    manager.attach(optimizer=optimizer, **({"scaler": scaler} if scaled else {}))
    guard = skipping(optimizer)
    changed = []
    for index, factor in enumerate([1.0, 1.0, 1000.0, 1.0]):
        x, y = batch(0, index)
        scaler.scale(loss_of(net, factor * x, y)).backward()
        before = parameter_bits(net)
        with captured_log():
            guard.observe(factor)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed.append(parameter_bits(net) != before)
    assert changed == [True, True, False, True]
    assert manager.steps == 4
    seen = histories(manager)["first", "input"]
    assert seen == [float((factor * batch(0, i)[0]).abs().max()) for i, factor in enumerate([1.0, 1.0, 1000.0, 1.0])]


# Correct orders ------------------------------------------------------------------------------------------


class Loop:
    """A training loop whose order of calls each test chooses."""

    def __init__(self, action: Any, **options: Any) -> None:
        self.net = make_net()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.guard = LossGuard(action, optimizer=self.optimizer, **options)
        self._indices = count()
        self.loss = torch.tensor(0.0)

    def forward(self) -> None:
        self.loss = loss_of(self.net, *batch(0, next(self._indices)))

    def backward(self) -> None:
        self.loss.backward()

    def observe(self) -> None:
        self.guard.observe(self.loss)

    def observe_detached(self) -> None:
        self.guard.observe(float(self.loss.detach()))

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.1)

    def step(self) -> None:
        self.optimizer.step()

    def zero(self) -> None:
        self.optimizer.zero_grad()

    def zero_in_place(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    def accumulate(self) -> None:
        for _ in range(3):
            self.forward()
            self.backward()

    def resume(self) -> None:
        state = self.guard.state_dict()
        self.guard = LossGuard(self.guard._action, optimizer=self.optimizer)  # type: ignore[arg-type]
        self.guard.load_state_dict(state)

    def run(self, order: str, times: int = 4) -> None:
        for name in order.split() * times:
            getattr(self, name)()


RIGHT = {
    "usual": "forward backward observe step zero",
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
ACTIONS: dict[str, Any] = {"warn": "warn", "skip": "skip", "stop": "stop", "callable": lambda alarm: None}


def test_what_is_in_time_is_in_time() -> None:
    cases = [
        *((order, "skip") for order in RIGHT),
        *((order, "warn") for order in RIGHT),
        ("usual", "stop"),
        ("usual", "callable"),
    ]
    for order, action in cases:
        loop = Loop(ACTIONS[action])
        with captured_log() as log:
            loop.run(RIGHT[order], times=3)
        assert log == []


def test_a_step_that_a_scaler_skips_is_no_step() -> None:
    for fused in (False, True):
        net = make_net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused)
        guard = LossGuard("skip", optimizer=optimizer)
        scaler = GradScaler("cpu", init_scale=2.0**127)  # The first steps overflow.
        with captured_log() as log:
            for index in range(6):
                loss = 100 * loss_of(net, *batch(0, index))
                scaler.scale(loss).backward()
                guard.observe(loss)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        assert log == []
        assert scaler.get_scale() < 2.0**127


def test_optimizers_that_take_turns() -> None:
    """Each step belongs to one optimizer; the other still has old gradients."""
    net = make_net()
    half = torch.optim.SGD(net.first.parameters(), lr=0.1)
    other = torch.optim.SGD(net.last.parameters(), lr=0.1)
    guard = LossGuard("skip", optimizer=[half, other])
    for index in range(6):
        optimizer = (half, other)[index % 2]
        inputs = [p for group in optimizer.param_groups for p in group["params"]]
        loss = loss_of(net, *batch(0, index))
        loss.backward(inputs=inputs)
        guard.observe(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()


# Wrong orders --------------------------------------------------------------------------------------------

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


def test_what_is_late_is_told() -> None:
    cases = [
        *((order, "skip") for order in WRONG),
        *((order, "warn") for order in WRONG),
        ("usual", "stop"),
        ("usual", "callable"),
    ]
    for order, action in cases:
        loop = Loop(ACTIONS[action])
        if action == "skip":
            for _ in range(2):  # The first wrong order raises, and so does the second.
                with pytest.raises(ConfigurationError, match=LATE):
                    loop.run(WRONG[order], times=1)
            continue
        with captured_log() as log:
            loop.run(WRONG[order])
        ((_, message),) = log
        assert message == (
            "fp8dist: LossGuard: observe() came after optimizer.step(): the update with this loss's gradients is made "
            "already. Call it between loss.backward() and optimizer.step()"
        )


def test_a_late_loss_is_still_judged() -> None:
    loop = Loop("stop")
    with captured_log() as log:
        loop.run("forward backward step")
        with pytest.raises(LossDiverged):
            loop.guard.observe(math.nan)
    assert len(log) == 1


def test_a_loss_older_than_the_step_is_late_even_where_losses_come_before_backward() -> None:
    loop = Loop("skip")
    loop.run("forward observe backward step zero")
    loop.run("forward backward step zero", times=1)
    with pytest.raises(ConfigurationError, match=LATE):
        loop.observe()


def test_fallback_is_told_too() -> None:
    net = make_net()
    manager = fp8dist.prepare(net, fp8dist.DelayedScaling(history_len=4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    manager.attach(optimizer=optimizer)
    guard = LossGuard("fallback", manager=manager, optimizer=optimizer)
    with captured_log() as log:
        loss_of(net, *batch(0, 0)).backward()
        optimizer.step()
        guard.observe(1.0)
    assert [LATE.replace("\\", "") in message for _, message in log] == [True]


def test_without_an_optimizer_nothing_is_noticed() -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    guard = LossGuard("warn")
    with captured_log() as log:
        loss_of(net, *batch(0, 0)).backward()
        optimizer.step()
        guard.observe(1.0)
    assert log == []


def test_a_closure_is_refused() -> None:
    for order in ("observe first", "step"):
        net = make_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        guard = LossGuard("skip", optimizer=optimizer)
        if order == "observe first":
            guard.observe(1.0)
        before = parameter_bits(net)
        with pytest.raises(ConfigurationError, match=r"not support optimizer\.step\(closure\)"):
            optimizer.step(lambda: 1.0)
        with pytest.raises(ConfigurationError, match=r"not support optimizer\.step\(closure\)"):
            optimizer.step(closure=lambda: 1.0)
        assert parameter_bits(net) == before


# Lifetimes -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_hooks_go_with_the_guard_and_the_guard_keeps_nothing() -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    guard = LossGuard("skip", optimizer=optimizer)
    loss = loss_of(net, *batch(0, 0))
    loss.backward()
    guard.observe(loss)
    optimizer.step()
    del loss
    assert (len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)) == (1, 1)
    del guard
    gc.collect()
    assert (len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)) == (0, 0)
    guard = LossGuard("skip", optimizer=optimizer)
    gone = [weakref.ref(thing) for thing in (net, optimizer, next(net.parameters()))]
    del net, optimizer
    gc.collect()
    assert [thing() for thing in gone] == [None] * 3
    with pytest.raises(ConfigurationError, match="no longer exists"):
        guard.observe(1.0)


def test_gradients_are_not_kept() -> None:
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    guard = skipping(optimizer)
    loss_of(net, *batch(0, 0)).backward()
    with captured_log():
        guard.observe(50.0)
    optimizer.step()
    gradient = weakref.ref(net.first.weight.grad)  # type: ignore[arg-type]
    optimizer.zero_grad()
    gc.collect()
    assert gradient() is None


def test_copies() -> None:
    for duplicate in (copy.copy, copy.deepcopy, lambda guard: pickle.loads(pickle.dumps(guard))):
        plain = LossGuard("warn")
        plain.observe(1.0)
        assert duplicate(plain).state_dict() == plain.state_dict()
        optimizer = torch.optim.SGD(make_net().parameters(), lr=0.1)
        with pytest.raises(ConfigurationError, match=r"save its state_dict\(\)"):
            duplicate(LossGuard("warn", optimizer=optimizer))


def test_a_copied_optimizer_has_no_hooks() -> None:
    optimizer = torch.optim.SGD(make_net().parameters(), lr=0.1)
    guard = LossGuard("skip", optimizer=optimizer)
    twin = copy.deepcopy(optimizer)
    twin.step(lambda: 1.0)
    del guard


def test_mistakes() -> None:
    cases = [
        ({"action": "skip"}, "needs optimizer="),
        ({"action": "skip", "optimizer": 3}, "optimizer= must be one torch optimizer or several, got int"),
        ({"action": "skip", "optimizer": []}, "optimizer= must be one torch optimizer or several, got list"),
        ({"action": "warn", "optimizer": "adam"}, "optimizer= must be one torch optimizer or several, got str"),
    ]
    for options, message in cases:
        with pytest.raises(ConfigurationError, match=message):
            LossGuard(**options)


# Ranks ---------------------------------------------------------------------------------------------------

BAD = 5
"""Index of the batch whose loss spikes on rank 1."""


def batches(leave_out: bool) -> Iterator[tuple[int, Tensor, Tensor]]:
    rank = dist.get_rank()
    for index in range(9):
        if index == BAD and leave_out:
            continue
        x, y = batch(rank, index)
        yield index, x, y + 300 * (index == BAD and rank == 1)


def parallel(kind: str) -> nn.Module:
    net = make_net()
    if kind == "fsdp2":
        for module in (net.first, net.branch, net.last, net):
            fully_shard(module)
        return net
    if kind == "fsdp1":
        return FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    if kind == "fsdp1 flat":
        return FullyShardedDataParallel(net, use_orig_params=False, device_id=torch.device("cpu"))
    return DistributedDataParallel(net, gradient_as_bucket_view=kind == "ddp view")


def trained(kind: str, name: str, leave_out: bool, clip: bool) -> dict[str, Any]:
    """Train with a guard that skips the bad batch, or, if ``leave_out``, without a guard and without the bad batch."""
    net = parallel(kind)
    optimizer = OPTIMIZERS[name](list(net.parameters()))
    guard = None if leave_out else LossGuard("skip", min_history=3, mean_over=dist.group.WORLD, optimizer=optimizer)
    alarms: list[LossAlarm] = []
    same = []
    with captured_log() as log, counted_collectives() as calls:
        for index, x, y in batches(leave_out):
            for half in (slice(0, 4), slice(4, 8)):
                loss = loss_of(net, x[half], y[half])
                (loss / 2).backward()
            before = local_bits(net), state_of(optimizer)
            alarm = None if guard is None else guard.observe(loss)
            if alarm is not None:
                alarms.append(alarm)
            if clip:
                if isinstance(net, FullyShardedDataParallel):
                    net.clip_grad_norm_(1.0)
                else:
                    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            if (local_bits(net), state_of(optimizer)) == before:
                same.append(index)
            optimizer.zero_grad()
    sizes = {size for name, size in zip(calls.names, calls.sizes) if (name, size) == ("all_reduce", 16)}
    return {
        "parameters": local_bits(net),
        "state": state_of(optimizer),
        "alarms": [alarm.kind for alarm in alarms],
        "same": same,
        "log": [message for _, message in log],
        "sizes": sizes,
    }


def local_bits(net: nn.Module) -> list[bytes]:
    return [bits(local(p)) for p in net.parameters()]


@pytest.mark.parametrize(
    ("kind", "name", "clip"),
    [
        ("ddp", "adamw", True),
        ("ddp view", "sgd momentum", True),
        pytest.param("fsdp2", "adamw", True, marks=pytest.mark.slow),
        ("fsdp1", "adamw", False),
        pytest.param("fsdp1 flat", "sgd momentum", True, marks=pytest.mark.slow),
    ],
)
def test_a_skipped_batch_is_as_if_it_had_not_been(two_ranks: RankPool, kind: str, name: str, clip: bool) -> None:
    skipped = two_ranks.run(trained, kind, name, False, clip)
    without = two_ranks.run(trained, kind, name, True, clip)
    for rank, (mine, expected) in enumerate(zip(skipped, without)):
        assert mine["alarms"] == ["spike"]
        assert mine["same"] == [BAD]
        assert expected["same"] == []
        assert mine["parameters"] == expected["parameters"]
        assert mine["state"] == expected["state"]
        assert mine["sizes"] == {16}
        assert len(mine["log"]) == 1 - rank
    if kind.startswith("ddp"):
        assert skipped[0]["parameters"] == skipped[1]["parameters"]


def late_on_ranks(kind: str, action: str) -> tuple[int, list[str]]:
    net = parallel(kind)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    guard: Any = LossGuard(action, mean_over=dist.group.WORLD, optimizer=optimizer)  # type: ignore[arg-type]
    raised = 0
    with captured_log() as log:
        for index in range(3):
            loss = loss_of(net, *batch(dist.get_rank(), index))
            loss.backward()
            optimizer.step()
            try:
                guard.observe(loss.detach())
            except ConfigurationError as error:
                raised += "came after" in str(error)
            optimizer.zero_grad()
    return raised, [message for _, message in log]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp1 flat"])
def test_late_on_all_ranks(two_ranks: RankPool, kind: str) -> None:
    assert two_ranks.run(late_on_ranks, kind, "skip") == [(3, []), (3, [])]
    (none, told), other = two_ranks.run(late_on_ranks, kind, "warn")
    assert (none, len(told), other) == (0, 1, (0, []))


def one_rank_is_idle() -> list[str]:
    """On rank 1, every other step has no gradients."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    guard = LossGuard("skip", mean_over=dist.group.WORLD, optimizer=optimizer)
    with captured_log() as log:
        for index in range(6):
            if dist.get_rank() == 0 or index % 2 == 0:
                loss_of(net, *batch(0, index)).backward()
            guard.observe(1.0)
            optimizer.step()
            optimizer.zero_grad()
    return [message for _, message in log]


def test_a_rank_without_gradients_is_not_late(two_ranks: RankPool) -> None:
    assert two_ranks.run(one_rank_is_idle) == [[], []]
