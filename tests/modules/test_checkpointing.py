"""Activation checkpointing of every kind: losses, gradients, parameters and FP8 state are bitwise those of a plain
run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, NVFP4Scaling, Recipe, RowwiseScaling
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


def offloaded(inner: Run) -> Run:
    """What a backward needs is elsewhere until then, as with torch's ``save_on_cpu``, which copies nothing on a CPU."""

    def run(block: nn.Module, h: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda x: x.detach().clone(), torch.clone):
            return inner(block, h)

    return run


def selective(*saved: Any) -> Run:
    """Selective checkpointing that keeps the results of these ops and recomputes all others."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy))


KINDS: dict[str, Run] = {
    "plain": plain,
    "reentrant": partial(checkpoint, use_reentrant=True),
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant in reentrant": within(True, True),
    "reentrant in non-reentrant": within(False, True),
    "non-reentrant in reentrant": within(True, False),
    "non-reentrant in non-reentrant": within(False, False),
    "selective, nothing saved": selective(),
    "non-reentrant, offloaded": offloaded(partial(checkpoint, use_reentrant=False)),
    "offloaded": offloaded(plain),
    "selective, FP8 products saved": selective(ops.matmul),
    "selective, FP8 casts saved": selective(ops.quantize),
}
BOTH = ["reentrant", "non-reentrant"]
REPEATING = list(KINDS)[1:9]


class Block(nn.Module):
    """Linears with values in between that must be kept or recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Mixing(nn.Module):
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


def high_last(linear: nn.Linear, no_fp8: Any, x: Tensor) -> Tensor:
    h = torch.tanh(linear(x))
    with no_fp8():
        return torch.tanh(linear(h))


def high_first(linear: nn.Linear, no_fp8: Any, x: Tensor) -> Tensor:
    with no_fp8():
        h = torch.tanh(linear(x))
    return linear(torch.tanh(linear(h)))


def eval_first(linear: nn.Linear, no_fp8: Any, x: Tensor) -> Tensor:
    """As with a mean teacher."""
    linear.eval()
    with torch.no_grad():
        target = linear(3 * x)
    h = torch.tanh(linear(20 * x))
    linear.train()
    return linear(h) - target


def in_part(linear: nn.Linear, no_fp8: Any, x: Tensor) -> Tensor:
    """Checkpoints its calls one by one."""
    h = torch.tanh(KINDS["reentrant"](linear, x) if x.requires_grad else linear(x))
    with no_fp8():
        h = KINDS["non-reentrant"](linear, h)
    return linear(torch.tanh(h))


def often(linear: nn.Linear, no_fp8: Any, h: Tensor) -> Tensor:
    """Calls it more often than calls are kept of each mode."""
    for _ in range(20):
        h = torch.tanh(linear(h))
    return h


BLOCKS = {calls.__name__: partial(Calling, calls) for calls in (high_last, high_first, eval_first, in_part, often)}


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


STEPS = {
    "accumulated": "forward backward evaluate:eval,no_grad forward backward evaluate:eval,no_grad",
    # As in scheduled sampling: each forward follows one without gradients, and the backwards come last.
    "sampled": f"{'evaluate:no_grad forward ' * 17}{'backward0 ' * 17}",
    "high_backward": "forward backward:no_fp8",
    "eval_in_backward": "forward backward:eval",
    "trained_in_eval": "forward:eval backward",  # Records nothing, though the backward runs in train().
    # The last forward is that of the evaluation, and the first of two microbatches is in high precision.
    "evaluated_before": "forward:no_fp8 backward forward evaluate:eval,no_fp8,no_grad backward",
    "validated_with_grad": "forward evaluate:eval evaluate:no_fp8 backward",
    # As in a pipeline: three forwards of two modes, then their backwards.
    "in_flight": "forward forward:no_fp8 forward backward1 backward0 backward0",
    "retained": "forward:no_fp8 backward forward again backward:no_fp8",  # Two backwards repeat one forward twice.
    "recorded_in_eval": "forward:eval,recording backward",
    "changed_precision": "forward precision backward",
}
"""What a step does, each in its contexts. ``backward1``: of the second of the forwards in flight."""

MODES = tuple(STEPS)[2:]
SOME = ("evaluated_before", "in_flight", "retained")


class Flight:
    """A stack in training. ``apart``: each backward runs in a thread of its own, as on a GPU."""

    def __init__(
        self, kind: str, block: Callable[[], nn.Module], reuse: bool = True, apart: bool = False, **options: Any
    ) -> None:
        self.model, self.apart = Stack(KINDS[kind], block), apart
        recipe = options.pop("recipe", DelayedScaling(history_len=3))
        self.manager = fp8dist.prepare(self.model, recipe, skip=(), **options)
        # It changes weights without bumping their versions.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.manager.attach(self.model, optimizer=self.optimizer)
        self.manager._job.reuse_casts &= reuse
        self.contexts = {
            **{"no_fp8": self.manager.no_fp8, "recording": self.manager.recording},
            **{"no_grad": torch.no_grad, "eval": self._evaluating},
        }
        for each in self.model.blocks:
            if isinstance(each, Calling):
                each.no_fp8 = self.manager.no_fp8
        self.seen: list[bytes] = []

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.model.eval()
        yield
        self.model.train()

    def loss(self, index: int) -> Tensor:
        x, y = batch(0, index)
        loss = nn.functional.mse_loss(self.model(x), y)
        self.seen.append(bits(loss))
        return loss

    def backward(self, loss: Tensor, again: bool) -> None:
        if not self.apart:
            return loss.backward(retain_graph=again)
        thread = threading.Thread(target=loss.backward, kwargs={"retain_graph": again})
        thread.start()
        return thread.join()

    def step(self, name: str, step: int) -> None:
        losses: list[Tensor] = []
        for number, word in enumerate(STEPS[name].split()):
            what, _, contexts = word.partition(":")
            with contextlib.ExitStack() as stack:
                for context in filter(None, contexts.split(",")):
                    stack.enter_context(self.contexts[context]())
                if what == "forward":
                    losses.append(self.loss(10 * step + number))
                elif what == "evaluate":
                    self.seen.append(bits(self.model(30 * batch(1, step)[0])))
                elif what == "precision":
                    self.manager.set_precision("*", "high" if step % 2 else "fp8", gemms=("fprop", "wgrad"))
                elif what == "again":
                    self.backward(losses[0], again=True)
                else:
                    self.backward(losses.pop(int(what.removeprefix("backward") or 0)), again=False)


@cache
def fly(name: str, kind: str, block: Any = Block, reads: bool = True, steps: int = 2, **options: Any) -> Any:
    """Train. Return losses, gradients, FP8 state and parameters.

    Args:
        reads: read the FP8 state between steps, which commits what is pending.
        options: of ``Flight``; overrides as items, because calls are cached.
    """
    flight = Flight(kind, block, **{key: dict(of) if key == "overrides" else of for key, of in options.items()})
    found = []
    for step in range(steps):
        flight.step(name, step)
        found.append((gradient_bits(flight.model), histories(flight.manager) if reads else None))
        flight.optimizer.step()
        flight.optimizer.zero_grad()
    return flight.seen, found, state_bits(flight.manager), parameter_bits(flight.model)


def assert_repeated(kind: str, names: tuple[str, ...], block: Callable[[], nn.Module] = Block, **options: Any) -> None:
    of_plain = {key: of for key, of in options.items() if key not in ("apart", "reuse")}
    for name in names:
        if name == "retained" and "selective" in kind:
            continue  # torch refuses a second backward of a selective checkpoint.
        assert fly(name, kind, block, **options) == fly(name, "plain", block, **of_plain), name


@pytest.mark.parametrize("kind", few(list(KINDS)[1:], *BOTH, *list(KINDS)[-4:]))
def test_microbatches_and_evaluations(kind: str) -> None:
    """Also in each way to save some results, and with weights that are cast anew each time."""
    assert_repeated(kind, ("accumulated",))
    assert_repeated(kind, ("accumulated",), reuse=False)


@crossed(kind=[*BOTH, "selective, FP8 products saved"], warmup=["current", "unit"])
def test_scales_that_lag(kind: str, warmup: str) -> None:
    """next_step without reads: the commit happens in a forward, and the recomputation uses the same scales."""
    recipe = DelayedScaling(history_len=3, update="next_step", warmup=warmup, amax_algo="most_recent")
    assert_repeated(kind, ("accumulated",), reads=False, recipe=recipe, steps=3)


@crossed(
    kind=BOTH,
    changed=[
        (CurrentScaling(), (("first", "high"), ("blocks.1.down", "high"))),
        (RowwiseScaling(high_precision=("fprop",)), ()),
        (BlockScaling(high_precision=("fprop", "wgrad")), ()),
        (DelayedScaling(history_len=3), (("blocks.0.up", MXFP8Scaling()), ("*.1.*", RowwiseScaling()))),
        (NVFP4Scaling(), ()),
        (NVFP4Scaling(hadamard=False), ()),
    ],
)
def test_every_recipe(kind: str, changed: tuple[Recipe, Any]) -> None:
    recipe, overrides = changed
    assert_repeated(kind, ("accumulated", "in_flight"), recipe=recipe, overrides=overrides)


@pytest.mark.slow
@pytest.mark.parametrize("kind", few(REPEATING, *BOTH, REPEATING[-1]))
def test_a_repeated_forward_computes_as_it_did(kind: str) -> None:
    assert_repeated(kind, MODES)
    assert_repeated(kind, ("in_flight", "evaluated_before", "validated_with_grad"), eval_precision="high")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "modes"), few([(kind, MODES) for kind in BOTH] + [("reentrant", SOME)], ("reentrant", SOME))
)
def test_experts_compute_as_they_did(kind: str, modes: tuple[str, ...]) -> None:
    assert_repeated(kind, modes, Mixing)


@crossed(block=list(BLOCKS)[:-1], kind=REPEATING)
def test_a_forward_in_several_modes(block: str, kind: str) -> None:
    more = ("high_backward", "retained") if kind in BOTH else ()
    assert_repeated(kind, ("in_flight", "evaluated_before", *more), BLOCKS[block])


@pytest.mark.slow
@crossed(block=["", *BLOCKS], kind=list(KINDS)[1:6])
def test_backwards_in_a_thread_of_their_own(block: str, kind: str) -> None:
    """As on a GPU. Each thread counts its nodes."""
    if block:
        assert_repeated(kind, ("in_flight",), BLOCKS[block], apart=True)
    else:
        assert_repeated(kind, ("in_flight", "evaluated_before"), apart=True)


@pytest.mark.parametrize("kind", [*BOTH, *REPEATING[-2:]])
def test_these_tests_do_recompute(kind: str) -> None:
    """Four checkpointed Linears cast their inputs again. Otherwise the tests above would prove nothing."""
    counts = []
    for each in ("plain", kind):
        flight = Flight(each, Block)
        with watched_casts(Role.INPUT) as casts:
            flight.loss(0).backward()
        counts.append(len(casts))
    assert counts == [6, 10]


@pytest.mark.parametrize("kind", BOTH)
def test_a_forward_is_repeated_after_many_others_in_its_mode(kind: str) -> None:
    assert_repeated(kind, ("sampled",))


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant in reentrant"])
def test_a_forward_whose_mode_is_forgotten_is_not_repeated_in_another(kind: str) -> None:
    flight = Flight(kind, Block)
    losses = []
    for i in range(40):
        with flight.manager.no_fp8() if i % 2 else contextlib.nullcontext():
            losses.append(flight.loss(i))
    losses[-30].backward()
    with pytest.raises(fp8dist.ConfigurationError, match=r"blocks.1.*mode is no longer known"):
        losses[0].backward()
