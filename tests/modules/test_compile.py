"""One training, several ways to reach the kernels, the same bits: directly, through the ops, compiled, captured."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, Recipe, RowwiseScaling
from fp8dist.modules.overrides import High
from fp8dist_kernels import direct, ops
from tests.support.graphs import EmulatedGraph
from tests.support.linear import E4M3, NONE, inputs
from tests.support.suite import NIGHTLY, few
from tests.support.training import batch, bits, make_net, parameter_bits, state_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # Dynamo does it itself.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),  # Dynamo looks at each input's.
]


@pytest.fixture(autouse=True)
def _dynamo_begins_anew() -> None:
    torch._dynamo.reset()


Run = Callable[[nn.Module, Tensor], Tensor]


def _save_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is ops.matmul else CheckpointPolicy.PREFER_RECOMPUTE


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


checkpointed: Run = partial(checkpoint, use_reentrant=False)
selective: Run = partial(checkpointed, context_fn=partial(create_selective_checkpoint_contexts, _save_products))  # type: ignore[call-arg]


class Block(nn.Module):
    """Two Linears, with irregular sizes and an operation in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.up = nn.Linear(32, 144)
        self.down = nn.Linear(144, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Tied(nn.Module):
    """Two Linears of one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def blocks() -> nn.Module:
    return nn.Sequential(Block(), Block())


@dataclass(frozen=True)
class Case:
    """A training of some steps of two microbatches each.

    Attributes:
        boundary: who ends a step: "optimizer", "manager.step()", or "manual": that with an optimizer attached.
        parts: compile the children of the model one by one.
        warm: steps after which nothing may be compiled again.
        sizes: tokens of a batch, by step.
        high: before this step, ``up`` goes to high precision for two steps.
    """

    recipe: Recipe = field(default_factory=lambda: DelayedScaling(history_len=4))
    overrides: Mapping[str, Recipe | High] = field(default_factory=dict)
    model: Callable[[], nn.Module] = Block
    run: Run = plain
    backend: str = "auto"
    boundary: str = "optimizer"
    evaluate: bool = False
    parts: bool = False
    compiled_from: int = 0
    warm: int | None = 1
    sizes: Sequence[int] = (35,) * 4
    high: int | None = None


def train(case: Case, compiler: str | None) -> Any:
    """Return the losses and evaluations, the state and the parameters."""
    model = case.model()
    manager = fp8dist.prepare(model, case.recipe, overrides=case.overrides, backend=case.backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    attached = {} if case.boundary == "manager.step()" else {"optimizer": optimizer}
    manager.attach(model, **attached, **({"boundary": "manual"} if case.boundary == "manual" else {}))
    eager = [partial(case.run, part) for part in (model if case.parts else [model])]  # type: ignore[attr-defined]
    compiled = [torch.compile(each, fullgraph=True, backend=compiler) for each in eager] if compiler else eager
    losses = []
    for step, tokens in enumerate(case.sizes):
        if step == case.high:
            manager.set_precision("*up", "high", steps=2)
        parts = compiled if step >= case.compiled_from else eager
        settled = case.warm is not None and step >= case.compiled_from + case.warm
        with torch._dynamo.config.patch(error_on_recompile=settled):
            for micro in range(2):
                x = inputs(tokens, 32, seed=20 + 2 * step + micro) * (1 + step % 5)
                for part in parts:
                    x = part(x)
                loss = x.square().sum() / 1000
                loss.backward()
                losses.append(bits(loss))
            optimizer.step()
            if case.boundary != "optimizer":
                manager.step()
            optimizer.zero_grad()
            if case.evaluate:
                model.eval()
                with torch.no_grad():
                    losses.append(bits(parts[0](inputs(tokens, 32, seed=50 + step))))
                model.train()
    return losses, state_bits(manager), parameter_bits(model)


NEXT = DelayedScaling(history_len=4, update="next_step")
MIXED: dict[str, Any] = {"recipe": DelayedScaling(history_len=4), "overrides": {"up": BlockScaling()}}
ANY_SIZE: dict[str, Any] = {"sizes": (17, 16, 48, 0, 1, 33), "warm": None}
"""With and without padding. The second size makes the graph dynamic."""
CASES = {
    "delayed": Case(evaluate=True, sizes=(35,) * 5, warm=3),
    "next step, manager.step()": Case(NEXT, boundary="manager.step()", evaluate=True, sizes=(35,) * 5, warm=3),
    "next step, manual": Case(NEXT, boundary="manual", evaluate=True, sizes=(35,) * 5, warm=3),
    "after eager steps": Case(NEXT, compiled_from=2, sizes=(35,) * 4),
    "row-wise": Case(RowwiseScaling(format="hybrid")),
    "blocks, fprop and wgrad high": Case(BlockScaling(power_of_two=True, high_precision=("fprop", "wgrad"))),
    "current, dgrad high": Case(CurrentScaling(high_precision=("dgrad",))),
    "a Linear left high": Case(CurrentScaling(), {"up": "high"}),
    "two in one": Case(**MIXED),
    "two in one, checkpointed": Case(**MIXED, run=checkpointed),
    "tied": Case(model=Tied),
    "selective": Case(run=selective, backend="torch"),
    "one by one, checkpointed": Case(model=blocks, parts=True, run=checkpointed),
    "two in one, any size": Case(**MIXED, **ANY_SIZE),
    "row-wise, any size": Case(RowwiseScaling(), **ANY_SIZE),
    "changed precision": Case(high=2, warm=None, sizes=(35,) * 6),
    "one by one, selective": Case(model=blocks, parts=True, run=selective),
    "current, any size": Case(CurrentScaling(), **ANY_SIZE),
    "blocks, any size": Case(BlockScaling(), **ANY_SIZE),
    "mx, any size": Case(MXFP8Scaling(), **ANY_SIZE),
    **{f"{run.func.__name__} on Triton": Case(run=run, backend="triton") for run in (checkpointed, selective)},  # type: ignore[attr-defined]
}
KEPT = ("next step, manual", "two in one, checkpointed", "row-wise, any size")


@pytest.mark.slow
@pytest.mark.parametrize("name", few(CASES, *KEPT))
def test_compiled_in_one_graph_it_trains_as_in_eager_mode(name: str) -> None:
    """And where sizes and precision stay the same, it is not compiled again."""
    case = CASES[name]
    assert train(case, "aot_eager") == train(replace(case, run=plain), None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.long
def test_inductor_traces_the_ops() -> None:
    """Inductor fuses the operations around the ops, so losses are equal up to rounding; amaxes and scales follow."""
    case = Case(backend="torch")
    (mine, state, _), (theirs, expected, _) = train(case, "inductor"), train(case, None)
    losses = [torch.frombuffer(bytearray(b"".join(each)), dtype=torch.float32) for each in (mine, theirs)]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=0)
    assert state.keys() == expected.keys()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [DelayedScaling(history_len=4), RowwiseScaling()], ids=repr)
def test_sizes_that_only_data_decide(recipe: Recipe) -> None:
    """As the tokens of an expert."""
    linear = nn.Linear(32, 48)
    fp8dist.prepare(linear, recipe).attach(boundary="manual")

    def chosen(x: Tensor, where: Tensor) -> Tensor:
        return linear(x[where.nonzero().squeeze(1)])

    x = torch.randn(20, 32)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(chosen, backend="aot_eager", fullgraph=True)
        for count in (5, 16, 0):
            where = torch.arange(20) < count
            assert torch.equal(compiled(x, where), chosen(x, where))


@pytest.mark.slow
def test_compiled_forwards_see_weights_that_were_written_to_and_look_at_no_version() -> None:
    """Beyond 1.25 times its scale, a weight is cast with its own amax as in eager mode; in evaluations always."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 48))
    fp8dist.prepare(net).attach(net)
    compiled, x = torch.compile(net, backend="aot_eager", fullgraph=True), torch.randn(8, 32)

    def error() -> float:
        with torch.no_grad():
            expected = nn.functional.linear(x, net[0].weight, net[0].bias)
            return float((compiled(x) - expected).norm() / expected.norm())

    def write(factor: float) -> None:
        net[0].weight.data.mul_(factor)

    for training in (False, True):
        net.train(training)
        error()
    write(1.2)
    trained = error()
    assert net.eval()
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert error() < trained / 1.5
        net.train()
        for _ in range(3):
            write(1.3)
            assert error() < 0.08


@pytest.mark.slow
def test_a_graph_decides_anew_whether_a_tensor_has_outgrown_its_scale() -> None:
    graphs = 0

    def quantize(x: Tensor, scale: Tensor, cold: Tensor, pending: Tensor, outgrown: float | None) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"record": True, "just_in_time": True, "margin": 0, "power_of_two": False}
        cast = ops.quantize(x, scale, cold, pending, E4M3, rows=True, columns=True, outgrown=outgrown, **options)
        return (*cast, pending + 0)

    def count(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    compiled = torch.compile(quantize, fullgraph=True, backend="aot_eager")
    counted = torch.compile(quantize, fullgraph=True, backend=count)
    x = inputs(5, 32).clamp(-4, 4)
    x[3, 3] = 4.5
    for outgrown, scale in itertools.product((None, 1.25, 2.0), (100.0, 150.0, 300.0)):
        outcomes = [
            each(x, torch.tensor(scale), torch.tensor(False), torch.tensor(NONE), outgrown)
            for each in (quantize, compiled, counted)
        ]
        assert len({tuple(map(bits, outcome)) for outcome in outcomes}) == 1
        own = outgrown is not None and scale * 4.5 > outgrown * 448
        assert 1 / outcomes[0][2].item() == pytest.approx(448 / 4.5 if own else scale)
    assert graphs <= 3, "one for each limit, whatever it decides"


STEPS, NO_INPUT, NO_BRANCH, NOT_FINITE = 14, (0, 1), (0, 1, 2, 3, 8), 11
"""Slots are cold at first, some for longer; hot ones are skipped in places, and see an Inf once."""

RECIPES: dict[str, Recipe] = {
    "same_step": DelayedScaling(history_len=4),
    "next_step": DelayedScaling(history_len=4, update="next_step", warmup="unit"),
    "most_recent": DelayedScaling(history_len=1, amax_algo="most_recent", margin=1),
    "current": CurrentScaling(),
    "row": RowwiseScaling(format="hybrid"),
    "block": BlockScaling(),
    "mx": MXFP8Scaling(),
}


class Job:
    """A net with static inputs, as a capture needs them."""

    def __init__(self, recipe: Recipe, backend: str, compiled: bool = False) -> None:
        self.net = make_net()
        self.manager = fp8dist.prepare(self.net, recipe, backend=backend)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)
        self.manager.attach(optimizer=self.optimizer)
        self.forward: Any = torch.compile(self.net, backend="aot_eager", fullgraph=True) if compiled else self.net
        self.x, self.y = batch(0, 0)
        self.loss = torch.zeros(())

    def step(self, skip: bool) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(self.forward(self.x, skip), self.y)
        loss.backward()
        for parameter in self.net.parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        self.optimizer.step()
        self.loss = loss.detach()

    def run(self) -> Any:
        seen = []
        for step in range(STEPS):
            x, y = batch(0, step)
            self.x.copy_(x * (0 if step in NO_INPUT else 1 + step % 7))
            if step == NOT_FINITE:
                self.x[0, 0] = torch.inf
            self.y.copy_(y)
            self.take(step in NO_BRANCH)
            loss = self.loss.nan_to_num(nan=-1.0)  # A NaN may have either sign.
            seen.append((bits(loss), state_bits(self.manager)))
        return seen, parameter_bits(self.net)

    def take(self, skip: bool) -> None:
        self.step(skip)


class CapturedJob(Job):
    def __init__(self, recipe: Recipe, backend: str) -> None:
        super().__init__(recipe, backend)
        self.graphs: dict[bool, tuple[EmulatedGraph, Tensor]] = {}
        for skip in (False, True):
            self.manager.poll()
            state = [tensor for sync in self.manager._syncs for tensor in sync.arena.arrays]
            before = [tensor.detach().clone() for tensor in (*self.net.parameters(), *state)]
            graph = EmulatedGraph()
            with graph.capture():
                self.step(skip)
            with torch.no_grad():
                for tensor, old in zip((*self.net.parameters(), *state), before):
                    tensor.copy_(old)
            self.graphs[skip] = graph, self.loss

    def take(self, skip: bool) -> None:
        graph, self.loss = self.graphs[skip]
        graph.replay()
        self.manager.poll()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend", "compiled"),
    [
        *((name, "auto", name == "same_step") for name in ("same_step", "mx")),
        *(
            pytest.param(name, "auto", False, marks=NIGHTLY)
            for name in ("next_step", "most_recent", "current", "row", "block")
        ),
        *(pytest.param(name, "auto", True, marks=NIGHTLY) for name in ("row", "next_step", "most_recent", "block")),
        pytest.param("same_step", "triton", True, marks=NIGHTLY),
    ],
)
def test_the_same_bits(name: str, backend: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPES[name]
    eager = Job(recipe, backend)
    direct_calls: list[bool] = []
    is_plain = direct.is_plain
    with monkeypatch.context() as patch:
        patch.setattr(direct, "is_plain", lambda x: direct_calls.append(is_plain(x)) or direct_calls[-1])
        expected = eager.run()
    assert direct_calls
    assert all(direct_calls)
    if recipe.delayed:  # Two reasons for a launch that looks for an amax: cold slots, and weights.
        assert eager.manager._syncs[0].arena.known_hot
    with monkeypatch.context() as patch:
        patch.setattr(direct, "is_eager", lambda: False)
        assert Job(recipe, backend).run() == expected, "through the ops"
    assert CapturedJob(recipe, backend).run() == expected, "captured"
    if compiled:
        assert Job(recipe, backend, compiled=True).run() == expected, "compiled"
