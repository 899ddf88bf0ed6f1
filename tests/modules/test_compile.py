"""One training, several ways to reach the kernels, the same bits: directly, through the ops, compiled.

Steps that are captured are in ``tests/job/test_graphs.py``."""

from __future__ import annotations

import math
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
from tests.support.linear import inputs
from tests.support.suite import few
from tests.support.training import bits, parameter_bits, state_bits

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
selective: Run = partial(checkpointed, context_fn=partial(create_selective_checkpoint_contexts, _save_products))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.up = nn.Linear(32, 144)
        self.down = nn.Linear(144, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def tied() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    model[2].weight = model[0].weight
    return model


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
        dynamic: compile for any number of tokens from the start.
        high: before this step, ``up`` goes to high precision for two steps.
        factors: of the inputs, by step. None: from 1 to 5. Slots are cold while they are 0.
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
    dynamic: bool = False
    high: int | None = None
    factors: Sequence[float] | None = None


def train(case: Case, compiler: str | None = None) -> Any:
    """Return the losses and evaluations, the state and the parameters."""
    model = case.model()
    manager = fp8dist.prepare(model, case.recipe, overrides=case.overrides, backend=case.backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    attached = {} if case.boundary == "manager.step()" else {"optimizer": optimizer}
    manager.attach(model, **attached, **({"boundary": "manual"} if case.boundary == "manual" else {}))
    eager = [partial(case.run, part) for part in (model if case.parts else [model])]
    compiled = [torch.compile(each, fullgraph=True, backend=compiler) for each in eager] if compiler else eager
    losses = []
    for step, tokens in enumerate(case.sizes):
        if step == case.high:
            manager.set_precision("*up", "high", steps=2)
        parts = compiled if step >= case.compiled_from else eager
        settled = case.warm is not None and step >= case.compiled_from + case.warm
        with torch._dynamo.config.patch(error_on_recompile=settled):
            for micro in range(2):
                factor = 1 + step % 5 if case.factors is None else case.factors[step]
                x = inputs(tokens, 32, seed=20 + 2 * step + micro) * (factor if math.isfinite(factor) else 1)
                x[:, 0] += 0 if math.isfinite(factor) else factor
                if case.dynamic:
                    torch._dynamo.mark_dynamic(x, 0)
                for part in parts:
                    x = part(x)
                loss = x.square().sum() / 1000
                loss.backward()
                losses.append(bits(loss.nan_to_num(nan=-1.0)))  # A NaN may have either sign.
            for parameter in model.parameters():
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
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
ANY_SIZE: dict[str, Any] = {"sizes": (17, 16, 0, 1), "warm": None}
"""With and without padding. The second size makes the graph dynamic."""
CASES = {
    "cold, hot, not finite": Case(sizes=(35,) * 6, warm=None, factors=(0, 1, 5, math.inf, 2, 3)),
    "next step, manager.step()": Case(NEXT, boundary="manager.step()", evaluate=True, sizes=(35,) * 5, warm=3),
    "next step, manual": Case(NEXT, boundary="manual", evaluate=True, sizes=(35,) * 5, warm=3),
    "after eager steps": Case(NEXT, compiled_from=2, sizes=(35,) * 4),
    "row-wise": Case(RowwiseScaling(format="hybrid")),
    "blocks, fprop and wgrad high": Case(BlockScaling(power_of_two=True, high_precision=("fprop", "wgrad"))),
    "current, dgrad high": Case(CurrentScaling(high_precision=("dgrad",))),
    "a Linear left high": Case(CurrentScaling(), {"up": "high"}),
    "two in one, checkpointed": Case(**MIXED, run=checkpointed),
    "tied": Case(model=tied),
    "selective": Case(run=selective, backend="torch"),
    "one by one, checkpointed": Case(model=blocks, parts=True, run=checkpointed),
    "row-wise, two sizes": Case(RowwiseScaling(), sizes=(17, 16), dynamic=True),
    "row-wise, any size": Case(RowwiseScaling(), **ANY_SIZE),
    "changed precision": Case(high=2, warm=None, sizes=(35,) * 6),
    "one by one, selective": Case(model=blocks, parts=True, run=selective),
    "blocks, any size": Case(BlockScaling(), **ANY_SIZE),
    "mx, any size": Case(MXFP8Scaling(), **ANY_SIZE),
    **{f"{run.func.__name__} on Triton": Case(run=run, backend="triton") for run in (checkpointed, selective)},
}
KEPT = ("next step, manual", "two in one, checkpointed", "row-wise, two sizes")


@pytest.mark.slow
@pytest.mark.parametrize("name", few(CASES, *KEPT))
def test_compiled_in_one_graph_it_trains_as_in_eager_mode(name: str) -> None:
    """And where sizes and precision stay the same, it is not compiled again."""
    case = CASES[name]
    assert train(case, "aot_eager") == train(replace(case, run=plain))


@pytest.mark.slow
def test_a_compiled_function_that_calls_backward_trains_as_in_eager_mode() -> None:
    """torch compiles the backward inside it, and tells listeners under a lock: none may be compiled itself."""

    def losses(compiler: str | None) -> Any:
        model = Block()
        manager = fp8dist.prepare(model, NEXT)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        manager.attach(model, optimizer=optimizer)

        def backward(x: Tensor) -> Tensor:
            loss = model(x).square().sum() / 1000
            loss.backward()
            return loss.detach()

        run = torch.compile(backward, backend=compiler) if compiler else backward
        found = []
        for step in range(3):
            found.append(bits(run(inputs(35, 32, seed=step))))
            optimizer.step()
            optimizer.zero_grad()
        return found, state_bits(manager), parameter_bits(model)

    assert losses("aot_eager") == losses(None)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.long
def test_compiled_by_inductor_it_trains_as_in_eager_mode() -> None:
    """Up to rounding: Inductor fuses the operations around the ops."""
    case = Case(backend="torch")
    mine, theirs = (
        torch.frombuffer(bytearray(b"".join(train(case, by)[0])), dtype=torch.float32) for by in ("inductor", None)
    )
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=0)


THROUGH_OPS: dict[str, Recipe] = {
    "same_step": DelayedScaling(history_len=4),
    "next_step": DelayedScaling(history_len=4, update="next_step", warmup="unit"),
    "most_recent": DelayedScaling(history_len=1, amax_algo="most_recent", margin=1),
    "current": CurrentScaling(),
    "row": RowwiseScaling(format="hybrid"),
    "block": BlockScaling(),
    "mx": MXFP8Scaling(),
}


@pytest.mark.parametrize("recipe", THROUGH_OPS)
def test_eager_steps_skip_the_ops_and_have_their_bits(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are cold at first; hot ones see an Inf once."""
    case = Case(THROUGH_OPS[recipe], sizes=(35,) * 6, factors=(0, 1, 5, 2, math.inf, 3))
    direct_calls: list[bool] = []
    is_plain = direct.is_plain
    with monkeypatch.context() as patch:
        patch.setattr(direct, "is_plain", lambda x: direct_calls.append(is_plain(x)) or direct_calls[-1])
        expected = train(case)
    assert direct_calls
    assert all(direct_calls)
    monkeypatch.setattr(direct, "is_eager", lambda: False)
    assert train(case) == expected


@pytest.mark.slow
def test_sizes_that_only_data_decide() -> None:
    """As the tokens of an expert."""
    linear = nn.Linear(32, 48)
    fp8dist.prepare(linear, DelayedScaling(history_len=4)).attach(boundary="manual")

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
