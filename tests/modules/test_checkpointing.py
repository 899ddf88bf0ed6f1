"""Activation checkpointing of every kind: losses, gradients, parameters and FP8 state are bitwise those of a plain
run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling
from fp8dist_kernels import ops
from fp8dist_kernels.formats import Role
from tests.support.experts import Experts
from tests.support.linear import watched_casts
from tests.support.suite import crossed, few
from tests.support.training import batch, bits, gradient_bits, histories, parameter_bits, state_bits

# Reentrant, with grad off.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

Run = Callable[[nn.Module, Tensor], Tensor]


def plain(block: nn.Module, h: Tensor) -> Tensor:
    return block(h)


def within(outer: bool, inner: bool) -> Run:
    """A checkpoint within a checkpoint recomputes twice. True: reentrant."""

    def run(block: nn.Module, h: Tensor) -> Tensor:
        return checkpoint(lambda h: checkpoint(block, h, use_reentrant=inner), h, use_reentrant=outer)

    return run


def selective(*saved: Any) -> Run:
    """Selective checkpointing that keeps the results of these ops and recomputes all others."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy))


WHOLE: dict[str, Run] = {
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant in reentrant": within(True, True),
    "reentrant in non-reentrant": within(False, True),
    "non-reentrant in reentrant": within(True, False),
}
REPEATING = {
    **WHOLE,
    "non-reentrant in non-reentrant": within(False, False),
    "selective, tanh saved": selective(torch.ops.aten.tanh.default),
    "selective, nothing saved": selective(),
}
KINDS = {
    **REPEATING,
    "plain": plain,
    "selective, FP8 products saved": selective(ops.matmul),
    "selective, FP8 casts saved": selective(ops.quantize),
    "selective, both saved": selective(ops.quantize, ops.matmul),
}


class Block(nn.Module):
    """Linears with values in between that must be kept or recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Mixing(nn.Module):
    """A block with experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts(hidden=32, inner=32)

    def forward(self, x: Tensor) -> Tensor:
        index = torch.arange(2 * len(x)).view(len(x), 2) % 4
        return x + self.experts(x, index, torch.full((len(x), 2), 0.5))


class Calling(nn.Module):
    """A block that calls its Linear several times. ``no_fp8``: the manager's."""

    def __init__(self, calls: Callable[[Any, Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.both, self.calls = nn.Linear(32, 32), calls
        self.no_fp8: Callable[[], Any] = contextlib.nullcontext

    def forward(self, x: Tensor) -> Tensor:
        return x + self.calls(self.both, self.no_fp8, x)


def twice(linear: nn.Linear, no_fp8: Any, x: Tensor) -> Tensor:
    return linear(torch.tanh(linear(x)))


def high_last(linear: nn.Linear, no_fp8: Any, x: Tensor) -> Tensor:
    h = torch.tanh(linear(x))
    with no_fp8():
        return torch.tanh(linear(h))


def high_first(linear: nn.Linear, no_fp8: Any, x: Tensor) -> Tensor:
    with no_fp8():
        h = torch.tanh(linear(x))
    return linear(torch.tanh(linear(h)))


def teaching(linear: nn.Linear, no_fp8: Any, x: Tensor) -> Tensor:
    """Learns from itself, as with a mean teacher."""
    linear.eval()
    with torch.no_grad():
        target = linear(3 * x)
    linear.train()
    return linear(x) - target


def eval_first(linear: nn.Linear, no_fp8: Any, x: Tensor) -> Tensor:
    linear.eval()
    h = torch.tanh(linear(20 * x))
    linear.train()
    return linear(h)


def in_part(linear: nn.Linear, no_fp8: Any, x: Tensor) -> Tensor:
    """Checkpoints its calls one by one."""
    h = torch.tanh(WHOLE["reentrant"](linear, x) if x.requires_grad else linear(x))
    with no_fp8():
        h = WHOLE["non-reentrant"](linear, h)
    return linear(torch.tanh(h))


CALLS = (twice, high_last, high_first, teaching, eval_first, in_part)


class Stack(nn.Module):
    """A Linear, two blocks that ``run`` may checkpoint, and another Linear."""

    def __init__(self, run: Run, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.last = nn.Linear(32, 16)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = self.run(block, h)
        return self.last(h)


# Steps: forwards and backwards in many orders. The mode belongs to the forward ------------------------


class Flight:
    """A stack in training."""

    def __init__(self, kind: str, block: Callable[[], nn.Module], reuse: bool = True, **options: Any) -> None:
        self.model = Stack(KINDS[kind], block)
        recipe = options.pop("recipe", DelayedScaling(history_len=3))
        self.manager = fp8dist.prepare(self.model, recipe, skip=(), **options)
        # It changes weights without bumping their versions.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.manager.attach(self.model, optimizer=self.optimizer)
        self.manager._job.reuse_casts &= reuse
        self.no_fp8 = self.manager.no_fp8
        for each in self.model.blocks:
            if isinstance(each, Calling):
                each.no_fp8 = self.no_fp8
        self.seen: list[bytes] = []

    def loss(self, index: int) -> Tensor:
        x, y = batch(0, index)
        loss = nn.functional.mse_loss(self.model(x), y)
        self.seen.append(bits(loss))
        return loss

    def evaluate(self, index: int, training: bool = False) -> None:
        self.model.train(training)
        self.seen.append(bits(self.model(30 * batch(1, index)[0])))
        self.model.train()

    def accumulated(self, step: int) -> None:
        for micro in range(2):
            self.loss(2 * step + micro).backward()
            with torch.no_grad():
                self.evaluate(step)

    def high_forward(self, step: int) -> None:
        with self.no_fp8():
            loss = self.loss(step)
        loss.backward()

    def high_backward(self, step: int) -> None:
        loss = self.loss(step)
        with self.no_fp8():
            loss.backward()

    def eval_in_backward(self, step: int) -> None:
        loss = self.loss(step)
        self.model.eval()
        loss.backward()
        self.model.train()

    def trained_in_eval(self, step: int) -> None:
        """Records nothing, though the backward runs in train()."""
        self.model.eval()
        loss = self.loss(step)
        self.model.train()
        loss.backward()

    def evaluated_before(self, step: int) -> None:
        """The last forward is that of the evaluation, and the first of two microbatches is in high precision."""
        self.high_forward(step)
        loss = self.loss(step + 100)
        with self.no_fp8(), torch.no_grad():
            self.evaluate(step)
        loss.backward()

    def validated_with_grad(self, step: int) -> None:
        loss = self.loss(step)
        self.evaluate(step)
        with self.no_fp8():
            self.evaluate(step, training=True)
        loss.backward()

    def in_flight(self, step: int) -> None:
        """As in a pipeline: three forwards of two modes, then their backwards."""
        losses = []
        for i in range(3):
            with self.no_fp8() if i == 1 else contextlib.nullcontext():
                losses.append(self.loss(3 * step + i))
        for i in (1, 0, 2):
            losses[i].backward()

    def retained(self, step: int) -> None:
        """Two backwards repeat one forward twice."""
        self.high_forward(step)
        loss = self.loss(step + 100)
        loss.backward(retain_graph=True)
        with self.no_fp8():
            loss.backward()

    def recorded_in_eval(self, step: int) -> None:
        self.model.eval()
        with self.manager.recording():
            loss = self.loss(step)
        loss.backward()
        self.model.train()

    def changed_precision(self, step: int) -> None:
        loss = self.loss(step)
        self.manager.set_precision("*", "high" if step % 2 else "fp8", gemms=("fprop", "wgrad"))
        loss.backward()


MODES = (
    *("high_forward", "high_backward", "eval_in_backward", "trained_in_eval", "evaluated_before"),
    *("validated_with_grad", "in_flight", "retained", "recorded_in_eval", "changed_precision"),
)


@cache
def fly(
    name: str, kind: str, block: Any = Block, apart: bool = False, reads: bool = True, steps: int = 2, **options: Any
) -> Any:
    """Train. Return losses, gradients, FP8 state and parameters.

    Args:
        apart: run backwards in a thread of their own, as on a GPU.
        reads: read the FP8 state between steps, which commits what is pending.
        options: of ``Flight``; overrides as items.
    """
    flight = Flight(kind, block, **{key: dict(of) if key == "overrides" else of for key, of in options.items()})
    found = []
    with _threaded_backwards() if apart else contextlib.nullcontext():
        for step in range(steps):
            getattr(flight, name)(step)
            found.append((gradient_bits(flight.model), histories(flight.manager) if reads else None))
            flight.optimizer.step()
            flight.optimizer.zero_grad()
    return flight.seen, found, state_bits(flight.manager), parameter_bits(flight.model)


@contextlib.contextmanager
def _threaded_backwards() -> Iterator[None]:
    original = Tensor.backward

    def backward(self: Tensor, **options: Any) -> None:
        thread = threading.Thread(target=original, args=(self,), kwargs=options)
        thread.start()
        thread.join()

    with mock.patch.object(Tensor, "backward", backward):
        yield


KEPT = ("reentrant", "non-reentrant", "selective, FP8 products saved", "selective, FP8 casts saved")


def assert_repeated(kind: str, names: tuple[str, ...], block: Callable[[], nn.Module] = Block, **options: Any) -> None:
    for name in names:
        if name == "retained" and "selective" in kind:
            continue  # torch refuses a second backward of a selective checkpoint.
        expected = fly(
            name, "plain", block, **{key: of for key, of in options.items() if key not in ("apart", "reuse")}
        )
        assert fly(name, kind, block, **options) == expected, name


@pytest.mark.parametrize("kind", few([kind for kind in KINDS if kind != "plain"], *KEPT))
def test_microbatches_and_evaluations(kind: str) -> None:
    """Also in each way to save some results, and with weights that are cast anew each time."""
    assert_repeated(kind, ("accumulated",))
    assert_repeated(kind, ("accumulated",), reuse=False)


@crossed(kind=["reentrant", "non-reentrant", "selective, FP8 products saved"], warmup=["current", "unit"])
def test_scales_that_lag(kind: str, warmup: str) -> None:
    """next_step without reads: the commit happens in a forward, and the recomputation uses the same scales."""
    recipe = DelayedScaling(history_len=3, update="next_step", warmup=warmup, amax_algo="most_recent")
    assert_repeated(kind, ("accumulated",), reads=False, recipe=recipe, steps=3)


@crossed(
    kind=["reentrant", "non-reentrant"],
    changed=[
        (CurrentScaling(), (("first", "high"), ("blocks.1.down", "high"))),
        (RowwiseScaling(high_precision=("fprop",)), ()),
        (BlockScaling(high_precision=("fprop", "wgrad")), ()),
        (DelayedScaling(history_len=3), (("blocks.0.up", BlockScaling()), ("*.1.*", RowwiseScaling()))),
    ],
)
def test_every_recipe(kind: str, changed: tuple[Recipe, Any]) -> None:
    recipe, overrides = changed
    assert_repeated(kind, ("accumulated", "in_flight"), recipe=recipe, overrides=overrides)


@pytest.mark.slow
@pytest.mark.parametrize("kind", few(REPEATING, "reentrant", "non-reentrant", "selective, nothing saved"))
def test_a_repeated_forward_computes_as_it_did(kind: str) -> None:
    assert_repeated(kind, MODES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", few(["reentrant", "non-reentrant"], "reentrant"))
def test_experts_compute_as_they_did(kind: str) -> None:
    assert_repeated(kind, MODES, Mixing)


BLOCKS = {calls.__name__: partial(Calling, calls) for calls in CALLS}


@crossed(block=BLOCKS, kind=REPEATING)
def test_a_forward_in_several_modes(block: str, kind: str) -> None:
    """Each call of a module computes as it did."""
    more = ("high_backward", "retained") if kind in ("reentrant", "non-reentrant") else ()
    assert_repeated(kind, ("in_flight", "evaluated_before", *more), BLOCKS[block])


@pytest.mark.slow
@pytest.mark.parametrize("kind", few(WHOLE, "reentrant", "non-reentrant"))
def test_backwards_in_a_thread_of_their_own(kind: str) -> None:
    """As on a GPU. Each thread counts its nodes."""
    assert_repeated(kind, ("in_flight", "evaluated_before"), apart=True)
    for block in BLOCKS.values():
        assert_repeated(kind, ("in_flight",), block, apart=True)


@pytest.mark.parametrize("kind", few(WHOLE, "reentrant", "non-reentrant in reentrant"))
def test_evaluations_in_high_precision(kind: str) -> None:
    assert_repeated(kind, ("in_flight", "evaluated_before", "validated_with_grad"), eval_precision="high")


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant", "selective, nothing saved"])
def test_these_tests_do_recompute(kind: str) -> None:
    """Four checkpointed Linears cast their inputs again. Otherwise the tests above would prove nothing."""
    counts = []
    for each in ("plain", kind):
        flight = Flight(each, Block)
        with watched_casts(Role.INPUT) as casts:
            flight.loss(0).backward()
        counts.append(len(casts))
    assert counts == [6, 10]


def test_reentrant_records_in_its_recomputation_only() -> None:
    """Its first forward runs with grad off; the amaxes of a checkpointed module still enter the history."""
    flight = Flight("reentrant", Block)
    arena = flight.manager._syncs[0].arena
    place = arena.index[next(s for s in flight.manager.slots if (s.fqn, s.role) == ("blocks.0.up", "input"))]
    loss = flight.loss(0)
    assert float(arena.pending[place]) == -1.0
    loss.backward()
    assert float(arena.pending[place]) > 0


@pytest.mark.parametrize("kind", few(WHOLE, "reentrant", "non-reentrant in reentrant"))
def test_a_forward_whose_mode_is_forgotten_is_not_repeated_in_another(kind: str) -> None:
    flight = Flight(kind, Block)
    losses = []
    for i in range(40):
        with flight.no_fp8() if i % 2 else contextlib.nullcontext():
            losses.append(flight.loss(i))
    losses[-30].backward()
    with pytest.raises(fp8dist.ConfigurationError, match=r"blocks.1.*mode is no longer known"):
        losses[0].backward()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_many_calls_of_a_module_in_one_checkpoint(kind: str) -> None:
    """More than are kept of each mode."""

    def often(linear: nn.Linear, no_fp8: Any, h: Tensor) -> Tensor:
        for _ in range(40):
            h = torch.tanh(linear(h))
        return h

    assert_repeated(kind, ("in_flight",), partial(Calling, often), steps=1)
