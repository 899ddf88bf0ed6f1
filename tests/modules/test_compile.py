"""torch.compile, opcheck, and the default dtype."""

from __future__ import annotations

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fp8dist
from fp8dist import DelayedScaling, StateManager
from fp8dist_kernels import ops
from fp8dist_kernels.arrays import StateArrays, UpdateRule
from fp8dist_kernels.reference.rings import RingShape
from tests.support.linear import BACKENDS, E4M3, E5M2, NONE, inputs
from tests.support.training import bits, parameter_bits, state_bits

WITHOUT_FP8_COMPARISON = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
"""test_schema compares arguments with allclose, which does not support FP8."""


class Block(nn.Module):
    """Two Linears with something between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Tied(nn.Module):
    """Two Linears of one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.relu(self.first(x)))
        return y


STEPS = 6
WARM = 3
"""Steps after which nothing may be compiled again."""

BOUNDARIES: dict[str, Callable[[StateManager, nn.Module, torch.optim.Optimizer], Any]] = {
    "optimizer": lambda manager, model, optimizer: manager.attach(model, optimizer=optimizer),
    "manager.step()": lambda manager, model, optimizer: manager.attach(model),
    "manual": lambda manager, model, optimizer: manager.attach(model, optimizer=optimizer, boundary="manual"),
}


def _save_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is ops.matmul else CheckpointPolicy.PREFER_RECOMPUTE


def _plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def _checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def _selective(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(
        block, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, _save_products)
    )


def _train(
    compiler: str | None,
    make: Callable[[], nn.Module] = Block,
    run: Callable[[nn.Module, Tensor], Tensor] = _plain,
    *,
    update: Any = "same_step",
    boundary: str = "optimizer",
    backend: str = "auto",
    evaluate: bool = False,
    compiled_from: int = 0,
) -> Any:
    """Return the losses and evaluations, the state and the parameters after steps of two microbatches each.

    The blocks of an nn.Sequential are compiled one by one, other models whole.
    """
    model = make()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4, update=update), backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    BOUNDARIES[boundary](manager, model, optimizer)
    eager: list[Callable[[Tensor], Tensor]] = [
        partial(run, part) for part in (model if isinstance(model, nn.Sequential) else [model])
    ]
    compiled = [torch.compile(each, fullgraph=True, backend=compiler) for each in eager] if compiler else eager
    losses = []
    for step in range(STEPS):
        parts = compiled if step >= compiled_from else eager
        with torch._dynamo.config.patch(error_on_recompile=step >= compiled_from + WARM):
            for micro in range(2):
                x = inputs(6, 32, seed=20 + 2 * step + micro) * (1 + step % 5)
                for part in parts:
                    x = part(x)
                loss = x.square().mean()
                loss.backward()
                losses.append(bits(loss))
            optimizer.step()
            if boundary != "optimizer":
                manager.step()
            optimizer.zero_grad()
            if evaluate:
                model.eval()
                with torch.no_grad():
                    losses.append(bits(parts[0](inputs(6, 32, seed=50 + step))))
                model.train()
    torch._dynamo.reset()
    return losses, state_bits(manager), parameter_bits(model)


dynamo = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it itself.


@pytest.mark.parametrize(
    ("update", "boundary"), [("same_step", "optimizer"), ("next_step", "manager.step()"), ("next_step", "manual")]
)
@dynamo
@pytest.mark.slow
def test_compiled_in_one_graph_it_trains_as_in_eager_mode_and_is_not_compiled_again(update: str, boundary: str) -> None:
    """With evaluations in between."""
    compiled = _train("aot_eager", update=update, boundary=boundary, evaluate=True)
    assert compiled == _train(None, update=update, boundary=boundary, evaluate=True)


@pytest.mark.parametrize("run", [_checkpointed, _selective])
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.long)])
@dynamo
@pytest.mark.slow
def test_compiled_with_checkpointing_it_is_not_compiled_again(backend: str, run: Any) -> None:
    assert _train("aot_eager", run=run, backend=backend) == _train(None, backend=backend)


@dynamo
@pytest.mark.slow
def test_compiled_linears_may_share_a_weight() -> None:
    assert _train("aot_eager", Tied) == _train(None, Tied)


def _three_blocks() -> nn.Module:
    return nn.Sequential(Block(), Block(), Block())


@pytest.mark.parametrize("run", [_checkpointed, pytest.param(_selective, marks=pytest.mark.long)])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo looks at each input's.
@dynamo
@pytest.mark.slow
def test_blocks_compiled_one_by_one_may_recompute(run: Any) -> None:
    """A block's graph saves where its recomputation records amaxes. Other blocks record beside that place."""
    assert _train("aot_eager", _three_blocks, run) == _train(None, _three_blocks)


@dynamo
@pytest.mark.slow
def test_compiled_after_eager_steps() -> None:
    """A pending commit runs before the first compiled forward."""
    assert _train("aot_eager", update="next_step", compiled_from=2) == _train(None, update="same_step")


@dynamo
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.long
def test_inductor_traces_the_ops() -> None:
    """Inductor fuses the operations around the ops, so losses are equal up to rounding; amaxes and scales follow."""
    mine, theirs = _train("inductor", backend="torch"), _train(None, backend="torch")
    for a, b in zip(mine[0], theirs[0]):
        assert torch.frombuffer(bytearray(a), dtype=torch.float32).item() == pytest.approx(
            torch.frombuffer(bytearray(b), dtype=torch.float32).item(), rel=1e-4
        )
    assert mine[1].keys() == theirs[1].keys()


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set ``torch.set_default_dtype`` inside the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _train_under(dtype: torch.dtype, power_of_two: bool) -> Any:
    block = Block()
    data = [inputs(6, 32, seed=30 + step) * (1 + step) for step in range(4)]
    recipe = DelayedScaling(history_len=3, power_of_two=power_of_two, margin=1)
    with default_dtype(dtype):
        manager = fp8dist.prepare(block, recipe)
        optimizer = torch.optim.SGD(block.parameters(), lr=0.05)
        manager.attach(block, optimizer=optimizer)
        for x in data:
            block(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        manager.slot("up", "input").set_scale(0.3)
        for slot in manager.slots:
            state = manager.slot(*slot)
            values = [state.scale, state.inv_scale, state.amax, state.amax_history]
            assert [value.dtype for value in values] == [torch.float32] * 4
        twin = Block()
        other = fp8dist.prepare(twin, recipe)
        other.load_state_dict(manager.state_dict())
        assert state_bits(other) == state_bits(manager)
    return state_bits(manager), parameter_bits(block)


@pytest.mark.parametrize(("dtype", "power_of_two"), [(torch.bfloat16, False), (torch.float64, True)])
def test_the_default_dtype_does_not_matter(dtype: torch.dtype, power_of_two: bool) -> None:
    assert _train_under(dtype, power_of_two) == _train_under(torch.float32, power_of_two)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "cold", "record", "columns"),
    [(E4M3, False, False, True), (E4M3, True, True, False), (E5M2, False, True, True), (E5M2, True, False, False)],
)
def test_opcheck_quantize(dtype: torch.dtype, cold: bool, record: bool, columns: bool) -> None:
    place = torch.tensor(NONE)
    torch.library.opcheck(
        ops.quantize,
        (inputs(5, 32), torch.tensor(2.0), torch.tensor(cold), place, dtype),
        {
            "record": record,
            "just_in_time": True,
            "margin": 0,
            "power_of_two": False,
            "rows": True,
            "columns": columns,
        },
    )


@pytest.mark.slow
def test_opcheck_choose_scale() -> None:
    options = {"record": True, "just_in_time": True, "margin": 0, "power_of_two": False}
    for amax in (torch.tensor(3.0), None):
        torch.library.opcheck(
            ops.choose_scale, (amax, torch.tensor(2.0), torch.tensor(True), torch.tensor(NONE), E4M3), options
        )


@pytest.mark.slow
@pytest.mark.parametrize(("just_in_time", "outgrown"), [(False, 1.25), (True, 2.0)])
def test_opcheck_quantize_with_a_limit(just_in_time: bool, outgrown: float) -> None:
    torch.library.opcheck(
        ops.quantize,
        (inputs(5, 32), torch.tensor(1e3), torch.tensor(False), torch.tensor(NONE), E4M3),
        {
            "record": True,
            "just_in_time": just_in_time,
            "margin": 0,
            "power_of_two": False,
            "rows": True,
            "columns": True,
            "outgrown": outgrown,
        },
    )


@pytest.mark.slow
@dynamo
def test_a_graph_decides_anew_whether_a_tensor_has_outgrown_its_scale() -> None:
    graphs = 0

    def quantize(x: Tensor, scale: Tensor, cold: Tensor, pending: Tensor, outgrown: float | None) -> tuple[Tensor, ...]:
        cast = ops.quantize(
            x, scale, cold, pending, E4M3, record=True, just_in_time=True, margin=0, power_of_two=False, rows=True,
            columns=True, outgrown=outgrown,
        )  # fmt: skip
        return (*cast, pending + 0)

    def count(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(quantize, fullgraph=True, backend="aot_eager")
    counted = torch.compile(quantize, fullgraph=True, backend=count)
    used = {}
    for outgrown, scale in itertools.product((None, 1.25, 2.0), (100.0, 150.0, 300.0)):
        x = inputs(5, 32).clamp(-4, 4)
        x[3, 3] = 4.5

        def arguments() -> tuple[Any, ...]:
            return x, torch.tensor(scale), torch.tensor(False), torch.tensor(NONE), outgrown  # noqa: B023

        cast, expected = compiled(*arguments()), quantize(*arguments())
        assert list(map(bits, cast)) == list(map(bits, expected))
        assert list(map(bits, counted(*arguments()))) == list(map(bits, expected))
        used[outgrown, scale] = 1 / cast[2].item()
    torch._dynamo.reset()
    assert graphs <= 3, "one for each limit, whatever it decides"
    own = 448 / 4.5
    assert used == pytest.approx(
        {
            (None, 100.0): 100, (None, 150.0): 150, (None, 300.0): 300, (1.25, 100.0): 100, (1.25, 150.0): own,
            (1.25, 300.0): own, (2.0, 100.0): 100, (2.0, 150.0): 150, (2.0, 300.0): own,
        }
    )  # fmt: skip


@pytest.mark.slow
def test_opcheck_observe() -> None:
    torch.library.opcheck(ops.observe, (inputs(5, 32), torch.tensor(NONE)))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck_matmul(backend: str) -> None:
    one = torch.tensor(1.0)
    torch.library.opcheck(
        ops.matmul,
        (inputs(5, 32).to(E5M2), inputs(16, 32).to(E4M3), one, one, torch.bfloat16),
        {"fast_accumulation": False, "backend": backend},
        test_utils=WITHOUT_FP8_COMPARISON,
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck_matmul_into(backend: str) -> None:
    one = torch.tensor(1.0)
    torch.library.opcheck(
        ops.matmul_into,
        (inputs(16, 32).to(E5M2), inputs(16, 32).to(E4M3), one, one, inputs(16, 16)),
        {"fast_accumulation": False, "backend": backend},
        test_utils=WITHOUT_FP8_COMPARISON,
    )


@pytest.mark.slow
def test_a_compiled_graph_adds_to_a_buffer() -> None:
    one, total = torch.tensor(1.0), inputs(16, 16)
    a, b = inputs(16, 32).to(E5M2), inputs(16, 32).to(E4M3)

    def added(total: Tensor) -> Tensor:
        ops.matmul_into(a, b, one, one, total, fast_accumulation=False)
        return 2 * total

    expected = total.clone()
    twice = added(expected)
    assert torch.equal(torch.compile(added, fullgraph=True, backend="aot_eager")(total), twice)
    assert torch.equal(total, expected)


@pytest.mark.slow
def test_opcheck_casts_with_many_scales() -> None:
    for columns in (False, True):
        keywords = {"power_of_two": False, "rows": True, "columns": columns}
        torch.library.opcheck(ops.quantize_rowwise, (inputs(5, 32), E4M3), keywords, test_utils=WITHOUT_FP8_COMPARISON)
        for block in ((1, 128), (128, 128)):
            torch.library.opcheck(
                ops.quantize_blocks,
                (inputs(5, 32), E4M3),
                {"block": block, **keywords},
                test_utils=WITHOUT_FP8_COMPARISON,
            )


@pytest.mark.slow
def test_opcheck_launch_and_commit() -> None:
    arrays = list(StateArrays.allocate([448.0] * 3, [464.0] * 3, RingShape(4), torch.device("cpu")))
    torch.library.opcheck(ops.launch, (arrays, None), {"drop_nonfinite": False})
    rule = UpdateRule(4, 0, False, True, "max")._asdict()
    torch.library.opcheck(ops.commit, (arrays, torch.zeros(11, dtype=torch.int32), None), rule)
