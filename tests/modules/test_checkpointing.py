"""Activation checkpointing of every kind: losses, gradients, parameters and FP8 state are bitwise those of a plain
run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fp8dist
from fp8dist import DelayedScaling
from fp8dist.modules.casters import Caster
from fp8dist_kernels import ops
from tests.support.experts import Experts
from tests.support.training import batch, bits, gradient_bits, histories, parameter_bits, state_bits

# Reentrant, with grad off.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


class Block(nn.Module):
    """Linears with values in between that must be kept or recomputed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


Run = Callable[[nn.Module, Tensor], Tensor]


class Stack(nn.Module):
    """A Linear, two blocks that ``run`` may checkpoint, and another Linear."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Block(32) for _ in range(2))
        self.last = nn.Linear(32, 16)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = self.run(block, h)
        return self.last(h)


def plain(block: nn.Module, h: Tensor) -> Tensor:
    return block(h)


def reentrant(block: nn.Module, h: Tensor) -> Tensor:
    return checkpoint(block, h, use_reentrant=True)


def non_reentrant(block: nn.Module, h: Tensor) -> Tensor:
    return checkpoint(block, h, use_reentrant=False)


def nested(block: nn.Module, h: Tensor) -> Tensor:
    """A checkpoint within a checkpoint recomputes twice."""
    return checkpoint(non_reentrant, block, h, use_reentrant=False)


def _policy(saved: tuple[Any, ...], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE


def selective(*saved: Any) -> Run:
    """Selective checkpointing that keeps the results of these ops and recomputes all others."""
    context = partial(create_selective_checkpoint_contexts, partial(_policy, saved))

    def run(block: nn.Module, h: Tensor) -> Tensor:
        return checkpoint(block, h, use_reentrant=False, context_fn=context)

    return run


KINDS = {
    "reentrant": reentrant,
    "non-reentrant": non_reentrant,
    "nested": nested,
    "selective, FP8 products saved": selective(ops.matmul),
    "selective, FP8 casts saved": selective(ops.quantize),
    "selective, both saved": selective(ops.quantize, ops.matmul),
    "selective, tanh saved": selective(torch.ops.aten.tanh.default),
    "selective, nothing saved": selective(),
}


@dataclass
class Log:
    """Everything in a run that must not depend on checkpointing."""

    losses: list[bytes] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)
    states: list[dict[str, bytes]] = field(default_factory=list)
    parameters: dict[str, bytes] = field(default_factory=dict)


def train(
    run: Run,
    accumulate: int = 1,
    read_each_step: bool = True,
    evaluate: bool = False,
    fused: bool = False,
    reuse: bool = True,
    **recipe: Any,
) -> Log:
    stack = Stack(run)
    manager = fp8dist.prepare(stack, DelayedScaling(history_len=4, **recipe))
    optimizer = torch.optim.AdamW(stack.parameters(), lr=0.01, fused=fused)
    manager.attach(stack, optimizer=optimizer)
    if not reuse:
        manager._job.reuse_casts = False
    log = Log()
    for step in range(4):
        for micro in range(accumulate):
            x, y = batch(0, accumulate * step + micro)
            loss = nn.functional.mse_loss(stack(x), y)
            log.losses.append(bits(loss))
            loss.backward()
            if evaluate:
                stack.eval()
                with torch.no_grad():
                    log.losses.append(bits(stack(batch(1, step)[0] * 10)))
                stack.train()
        log.gradients.append(gradient_bits(stack))
        optimizer.step()
        optimizer.zero_grad()
        if read_each_step:
            log.states.append(state_bits(manager))
    log.states.append(state_bits(manager))
    assert manager.steps == 4
    assert all(window.count(0.0) == 0 for window in histories(manager).values())  # Every slot ran in every step.
    log.parameters = parameter_bits(stack)
    return log


@cache
def _plain_run(accumulate: int, evaluate: bool = False) -> Log:
    return train(plain, accumulate, evaluate=evaluate)


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_plain_run(kind: str) -> None:
    """With microbatches."""
    assert train(KINDS[kind], 2) == _plain_run(2)


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_equals_the_plain_run_without_microbatches(kind: str) -> None:
    assert train(KINDS[kind], 1) == _plain_run(1)


@pytest.mark.parametrize(
    ("kind", "warmup"),
    [("reentrant", "current"), ("non-reentrant", "unit"), ("selective, FP8 products saved", "current")],
)
def test_equals_the_plain_run_with_scales_that_lag(kind: str, warmup: str) -> None:
    """next_step without reads: the commit happens in a forward, and the recomputation uses the same scales."""
    recipe = {"update": "next_step", "warmup": warmup, "amax_algo": "most_recent"}
    checkpointed = train(KINDS[kind], 2, read_each_step=False, **recipe)
    assert checkpointed == train(plain, 2, read_each_step=False, **recipe)


@pytest.mark.parametrize("kind", ["reentrant", "nested", "selective, both saved"])
def test_evaluation_in_between_changes_nothing(kind: str) -> None:
    assert train(KINDS[kind], 2, evaluate=True) == _plain_run(2, True)


@pytest.mark.parametrize("kind", ["reentrant", "selective, FP8 casts saved"])
def test_reused_weight_casts_equal_fresh_ones(kind: str) -> None:
    """AdamW(fused=True) changes weights without bumping their version."""
    reused = train(KINDS[kind], 2, fused=True)
    assert reused == train(KINDS[kind], 2, fused=True, reuse=False)


def _run_that_must_recompute(kind: str, monkeypatch: pytest.MonkeyPatch) -> int:
    stack = Stack(KINDS.get(kind, plain))
    manager = fp8dist.prepare(stack)
    manager.attach(stack)
    casts = 0
    original = Caster.cast

    def counting(self: Caster, *args: Any, **kwargs: Any) -> Any:
        nonlocal casts
        casts += 1
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Caster, "cast", counting)
    stack(batch(0, 0)[0]).sum().backward()
    return casts


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant", "selective, nothing saved"])
def test_these_tests_do_recompute(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four checkpointed Linears cast input and weight again. Otherwise the tests above would prove nothing."""
    with monkeypatch.context() as patch:
        once = _run_that_must_recompute("plain", patch)
    with monkeypatch.context() as patch:
        assert _run_that_must_recompute(kind, patch) == once + 8


def test_reentrant_records_in_its_recomputation_only() -> None:
    """Its first forward runs with grad off; the amaxes of a checkpointed module still enter the history."""
    stack = Stack(reentrant)
    manager = fp8dist.prepare(stack)
    (sync,) = manager._syncs
    slot = next(s for s in manager.slots if (s.fqn, s.role) == ("blocks.0.up", "input"))
    place = sync.arena.index[slot]
    loss = stack(batch(0, 0)[0]).sum()
    assert float(sync.arena.pending[place]) == -1.0
    loss.backward()
    assert float(sync.arena.pending[place]) > 0


# The mode belongs to the forward -----------------------------------------------------------------


class Mixing(nn.Module):
    """A block with experts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = Experts(hidden=width, inner=32)

    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(2 * len(x)).view(len(x), 2) % 4
        return x + self.experts(x, index, torch.full((len(x), 2), 0.5))


class Sharing(nn.Module):
    """A block that calls its Linear twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.both = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.both(torch.tanh(self.both(x)))


class TwoModes(nn.Module):
    """A block that calls its Linear in two modes. ``no_fp8``: the manager's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.both = nn.Linear(width, width)
        self.no_fp8: Callable[[], Any] = contextlib.nullcontext

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.both(x))
        with self.no_fp8():
            h = torch.tanh(self.both(h))
        return x + h


class HighFirst(TwoModes):
    def forward(self, x: Tensor) -> Tensor:
        with self.no_fp8():
            h = torch.tanh(self.both(x))
        return x + self.both(torch.tanh(self.both(h)))


class Teaching(TwoModes):
    """Learns from itself, as with a mean teacher."""

    def forward(self, x: Tensor) -> Tensor:
        self.both.eval()
        with torch.no_grad():
            target = self.both(3 * x)
        self.both.train()
        return x + self.both(x) - target


class EvalFirst(TwoModes):
    def forward(self, x: Tensor) -> Tensor:
        self.both.eval()
        h = torch.tanh(self.both(20 * x))
        self.both.train()
        return x + self.both(h)


class InPart(TwoModes):
    """Checkpoints its calls one by one."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(reentrant(self.both, x) if x.requires_grad else self.both(x))
        with self.no_fp8():
            h = non_reentrant(self.both, h)
        return x + self.both(torch.tanh(h))


MIXED = (TwoModes, HighFirst, Teaching, EvalFirst, InPart)


def reentrant_within_reentrant(block: nn.Module, h: Tensor) -> Tensor:
    return checkpoint(reentrant, block, h, use_reentrant=True)


def other_within_reentrant(block: nn.Module, h: Tensor) -> Tensor:
    return checkpoint(non_reentrant, block, h, use_reentrant=True)


def reentrant_within_other(block: nn.Module, h: Tensor) -> Tensor:
    return checkpoint(reentrant, block, h, use_reentrant=False)


NESTED = {
    "reentrant in reentrant": reentrant_within_reentrant,
    "reentrant in non-reentrant": reentrant_within_other,
    "non-reentrant in reentrant": other_within_reentrant,
}

Flight = Callable[[nn.Module, fp8dist.StateManager, int, list[bytes]], None]


def _loss(model: nn.Module, index: int, seen: list[bytes]) -> Tensor:
    x, y = batch(0, index)
    loss = nn.functional.mse_loss(model(x), y)
    seen.append(bits(loss))
    return loss


def _evaluate(model: nn.Module, index: int, seen: list[bytes], training: bool = False) -> None:
    model.train(training)
    seen.append(bits(model(30 * batch(1, index)[0])))
    model.train()


def high_forward(model: nn.Module, manager: fp8dist.StateManager, step: int, seen: list[bytes]) -> None:
    with manager.no_fp8():
        loss = _loss(model, step, seen)
    loss.backward()


def high_backward(model: nn.Module, manager: fp8dist.StateManager, step: int, seen: list[bytes]) -> None:
    loss = _loss(model, step, seen)
    with manager.no_fp8():
        loss.backward()


def eval_in_backward(model: nn.Module, manager: fp8dist.StateManager, step: int, seen: list[bytes]) -> None:
    loss = _loss(model, step, seen)
    model.eval()
    loss.backward()
    model.train()


def trained_in_eval(model: nn.Module, manager: fp8dist.StateManager, step: int, seen: list[bytes]) -> None:
    """Records nothing, though the backward runs in train()."""
    model.eval()
    loss = _loss(model, step, seen)
    model.train()
    loss.backward()


def evaluated_before(model: nn.Module, manager: fp8dist.StateManager, step: int, seen: list[bytes]) -> None:
    """The last forward is that of the evaluation, and the first of two microbatches is in high precision."""
    high_forward(model, manager, step, seen)
    loss = _loss(model, step + 100, seen)
    with manager.no_fp8(), torch.no_grad():
        _evaluate(model, step, seen)
    loss.backward()


def validated_with_grad(model: nn.Module, manager: fp8dist.StateManager, step: int, seen: list[bytes]) -> None:
    loss = _loss(model, step, seen)
    _evaluate(model, step, seen)
    with manager.no_fp8():
        _evaluate(model, step, seen, training=True)
    loss.backward()


def in_flight(model: nn.Module, manager: fp8dist.StateManager, step: int, seen: list[bytes]) -> None:
    """As in a pipeline: three forwards of two modes, then their backwards."""
    losses = []
    for i in range(3):
        if i == 1:
            with manager.no_fp8():
                losses.append(_loss(model, 3 * step + i, seen))
        else:
            losses.append(_loss(model, 3 * step + i, seen))
    for i in (1, 0, 2):
        losses[i].backward()


def retained(model: nn.Module, manager: fp8dist.StateManager, step: int, seen: list[bytes]) -> None:
    """Two backwards repeat one forward twice."""
    high_forward(model, manager, step, seen)
    loss = _loss(model, step + 100, seen)
    loss.backward(retain_graph=True)
    with manager.no_fp8():
        loss.backward()


def recorded_in_eval(model: nn.Module, manager: fp8dist.StateManager, step: int, seen: list[bytes]) -> None:
    model.eval()
    with manager.recording():
        loss = _loss(model, step, seen)
    loss.backward()
    model.train()


def changed_precision(model: nn.Module, manager: fp8dist.StateManager, step: int, seen: list[bytes]) -> None:
    loss = _loss(model, step, seen)
    manager.set_precision("*", "high" if step % 2 else "fp8", gemms=("fprop", "wgrad"))
    loss.backward()


FLIGHTS: dict[str, Flight] = {
    flight.__name__: flight
    for flight in (
        *(high_forward, high_backward, eval_in_backward, trained_in_eval, evaluated_before, validated_with_grad),
        *(in_flight, retained, recorded_in_eval, changed_precision),
    )
}


@cache
def fly(flight: str, kind: str, block: type[nn.Module] = Block, apart: bool = False, **options: Any) -> Any:
    """Train for four steps. Return losses, gradients and FP8 state.

    Args:
        apart: True: run backwards in a thread of their own, as on a GPU.
    """
    model = Stack({**KINDS, **NESTED, "plain": plain}[kind])
    model.blocks = nn.ModuleList(block(32) for _ in range(2))
    manager = fp8dist.prepare(model, DelayedScaling(history_len=3), skip=(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager.attach(model, optimizer=optimizer)
    for each in model.blocks:
        if isinstance(each, TwoModes):
            each.no_fp8 = manager.no_fp8
    seen: list[bytes] = []
    found = []
    with _threaded_backwards() if apart else contextlib.nullcontext():
        for step in range(4):
            FLIGHTS[flight](model, manager, step, seen)
            found.append((gradient_bits(model), histories(manager)))
            optimizer.step()
            optimizer.zero_grad()
    return seen, found, state_bits(manager), parameter_bits(model)


@contextlib.contextmanager
def _threaded_backwards() -> Iterator[None]:
    original = Tensor.backward

    def backward(self: Tensor) -> None:
        thread = threading.Thread(target=original, args=(self,))
        thread.start()
        thread.join()

    with mock.patch.object(Tensor, "backward", backward):
        yield


REPEATING = (*(kind for kind in KINDS if "FP8" not in kind), *NESTED)


def _possible(flights: Iterable[str]) -> list[tuple[str, str]]:
    """Torch refuses a second backward of a selective checkpoint."""
    return [(f, kind) for kind in REPEATING for f in flights if f != "retained" or "selective" not in kind]


@pytest.mark.parametrize(("flight", "kind"), _possible(FLIGHTS))
def test_a_repeated_forward_computes_as_it_did(flight: str, kind: str) -> None:
    assert fly(flight, kind) == fly(flight, "plain")


@pytest.mark.parametrize("flight", FLIGHTS)
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_experts_compute_as_they_did(flight: str, kind: str) -> None:
    assert fly(flight, kind, Mixing) == fly(flight, "plain", Mixing)


@pytest.mark.parametrize("flight", ["in_flight", "evaluated_before", "validated_with_grad"])
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_a_module_that_is_called_twice(flight: str, kind: str) -> None:
    assert fly(flight, kind, Sharing) == fly(flight, "plain", Sharing)


@pytest.mark.parametrize("flight", ["in_flight", "evaluated_before"])
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant", *NESTED])
def test_backwards_in_a_thread_of_their_own(flight: str, kind: str) -> None:
    """As on a GPU. Each thread counts its nodes."""
    assert fly(flight, kind, apart=True) == fly(flight, "plain")
    assert fly(flight, kind, eval_precision="high") == fly(flight, "plain", eval_precision="high")


@pytest.mark.parametrize(("flight", "kind"), _possible(["high_backward", "in_flight", "evaluated_before", "retained"]))
@pytest.mark.parametrize("block", MIXED)
def test_a_forward_in_several_modes(flight: str, block: type[nn.Module], kind: str) -> None:
    """Each call of a module computes as it did."""
    assert fly(flight, kind, block) == fly(flight, "plain", block)


@pytest.mark.parametrize("block", MIXED)
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant", *NESTED])
def test_a_forward_in_several_modes_with_backwards_in_a_thread(block: type[nn.Module], kind: str) -> None:
    assert fly("in_flight", kind, block, apart=True) == fly("in_flight", "plain", block)


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant", *NESTED])
def test_a_forward_whose_mode_is_forgotten_is_not_repeated_in_another(kind: str) -> None:
    model = Stack({**KINDS, **NESTED}[kind])
    manager = fp8dist.prepare(model)
    manager.attach(model)
    losses = []
    for i in range(40):
        with manager.no_fp8() if i % 2 else contextlib.nullcontext():
            losses.append(_loss(model, i, []))
    losses[-30].backward()
    with pytest.raises(fp8dist.ConfigurationError, match=r"blocks.1.*mode is no longer known"):
        losses[0].backward()


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_many_calls_of_a_module_in_one_checkpoint(kind: str) -> None:
    """More than are kept of each mode."""

    def gradient(run: Any) -> bytes:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 32))
        manager = fp8dist.prepare(net, skip=())
        manager.attach(net)
        x = torch.randn(16, 32, requires_grad=True)

        def often(h: Tensor) -> Tensor:
            for _ in range(40):
                h = torch.tanh(net(h))
            return h

        losses = []
        for i in range(4):
            with manager.no_fp8() if i % 2 else contextlib.nullcontext():
                losses.append(run(often, x).square().sum())
            with torch.no_grad():
                net(x)
        for i in (1, 0, 3, 2):
            losses[i].backward()
        assert x.grad is not None
        return bits(x.grad)

    assert gradient(KINDS[kind]) == gradient(plain)
