"""Weights' gradients that Megatron-Core's parallel Linears add to ``main_grad`` (``gradient_accumulation_fusion``), on
one rank. Megatron itself is in tests/integrations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fp8dist
from fp8dist.checks.computations import computations_of
from fp8dist.checks.known_calls import ProductOf
from fp8dist_kernels.taps import tap_on
from tests.modules.test_foreign_linears import IN, OUT, TOKENS, ColumnParallelLinear
from tests.support import interpreter  # noqa: F401 - Triton's interpreter stands for a GPU's kernels.
from tests.support.linear import RECIPES
from tests.support.suite import NIGHTLY

MICROBATCHES = 3
FLOAT, BF16 = torch.float32, torch.bfloat16


class Unfused(ColumnParallelLinear):
    gradient_accumulation_fusion = False


Unfused.__name__, Unfused.__module__ = "ColumnParallelLinear", ColumnParallelLinear.__module__


class Job:
    """A model in FP8 inside what Megatron-Core's DDP does: buffers, marks, and hooks where gradients arrive."""

    def __init__(
        self, recipe: Any = None, fused: bool = True, dtype: torch.dtype = FLOAT, buffer: torch.dtype = FLOAT,
        backend: str = "auto",
    ) -> None:  # fmt: skip
        torch.manual_seed(1)
        self.linear = (ColumnParallelLinear if fused else Unfused)(IN, OUT).to(dtype)
        self.model = nn.Sequential(self.linear)
        self.manager = fp8dist.prepare(self.model, recipe, backend=backend)
        self.manager.attach(self.model, boundary="manual")
        self.ready: list[Tensor] = []
        self._kept = []
        for parameter in self.model.parameters():
            parameter.main_grad = torch.zeros(parameter.shape, dtype=buffer)
            accumulator = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            accumulator.register_hook(self._hook(parameter))
            self._kept.append(accumulator)
        self.begin()

    def _hook(self, parameter: Any) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            """As DistributedDataParallel._make_backward_post_hook of Megatron-Core 0.16.1."""
            assert parameter.grad is not None
            if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
                parameter.main_grad.add_(parameter.grad)
            parameter.grad = None
            self.ready.append(parameter)

        return hook

    def begin(self) -> None:
        """As zero_grad_buffer."""
        for parameter in self.model.parameters():
            parameter.main_grad.zero_()
            parameter.grad_added_to_main_grad = False

    def batch(self, number: int) -> Tensor:
        x = torch.randn(TOKENS, IN, generator=torch.Generator().manual_seed(number))
        return x.to(self.linear.weight.dtype).requires_grad_()

    def backward(self, y: Tensor, number: int = 0) -> None:
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(100 + number)).to(y.dtype))

    def step(self, *contexts: Any, run: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
        """Run microbatches, each in a context, and end the step. Return gradients of inputs, and of parameters."""
        self.begin()
        found, run = [], run or self.model
        for number, context in enumerate(contexts or [nullcontext()] * MICROBATCHES):
            x = self.batch(number)
            with context:
                y = run(x)
                self.backward(y, number)
            found += [y.detach(), x.grad]
        self.manager.step()
        return [*found, *(parameter.main_grad.clone() for parameter in self.model.parameters())]


def _assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        *((recipe, "reference") for recipe in RECIPES),
        pytest.param(RECIPES[0], "triton", marks=pytest.mark.slow),
        pytest.param(RECIPES[2], "triton", marks=NIGHTLY),
        *((recipe, "torch") for recipe in RECIPES[:3]),  # torch has no products of blocks on a CPU.
    ],
)
def test_the_sum_has_the_bits_of_a_gradient_that_ddp_adds(recipe: fp8dist.Recipe, backend: str) -> None:
    fused, plain = Job(recipe, backend=backend), Job(recipe, fused=False, backend=backend)
    for _ in range(2):
        _assert_equal(fused.step(), plain.step())
    assert fused.linear.weight.grad_added_to_main_grad is True
    assert plain.linear.weight.grad_added_to_main_grad is False
    assert fused.linear.bias.grad_added_to_main_grad is False
    assert len(fused.ready) == len(plain.ready) == 2 * 2 * MICROBATCHES, "hooks run for each parameter"
    assert fused.linear.weight.grad is None


@pytest.mark.parametrize(
    ("backend", "buffer"),
    [pytest.param("triton", BF16, marks=pytest.mark.slow), ("reference", FLOAT), ("reference", BF16)],
)
def test_a_gradient_of_bfloat16_weights_is_not_rounded_before_it_is_added(buffer: torch.dtype, backend: str) -> None:
    """Weights of bfloat16 give the sums of the same weights in float32, rounded once per microbatch."""
    narrow = Job(dtype=BF16, buffer=buffer, backend=backend)
    wide = Job(fused=False, backend=backend)
    wide.linear.load_state_dict({name: x.float() for name, x in narrow.linear.state_dict().items()})
    total = torch.zeros(OUT, IN, dtype=buffer)
    narrow.begin()
    for number in range(MICROBATCHES):
        wide.begin()
        with torch.autocast("cpu", BF16):  # The same FP8 operands.
            wide.backward(wide.model(narrow.batch(number)), number)
        narrow.backward(narrow.model(narrow.batch(number)), number)
        total = (total.float() + wide.linear.weight.main_grad).to(buffer)
        assert torch.equal(narrow.linear.weight.main_grad, total)
    assert narrow.linear.weight.grad is None


def test_gradients_of_high_precision_are_added_as_well() -> None:
    """DDP takes the mark for all gradients of a step. Those that it would miss are added by the module."""
    fused, plain = Job(), Job(fused=False)

    @contextmanager
    def wgrad_in_high(manager: fp8dist.StateManager) -> Iterator[None]:
        manager.set_precision("*", "high", gemms=("wgrad",))
        yield
        manager.set_precision("*", "fp8", gemms=("wgrad",))

    def contexts(job: Job) -> Iterator[Any]:
        manager = job.manager
        yield from (manager.no_fp8(), nullcontext(), manager.no_fp8(), nullcontext(), wgrad_in_high(manager))

    for _ in range(2):
        _assert_equal(fused.step(*contexts(fused)), plain.step(*contexts(plain)))
    assert len(fused.ready) == len(plain.ready) == 2 * 2 * 5


def test_a_weight_that_is_used_twice_in_a_forward() -> None:
    def both(job: Job, first: bool) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            with job.manager.no_fp8() if first else nullcontext():
                y = job.model(x)
            with nullcontext() if first else job.manager.no_fp8():
                return y + job.model(2 * x)

        return run

    for first in (True, False):
        fused, plain = Job(), Job(fused=False)
        *found, _, bias = fused.step(run=both(fused, first))
        *expected, weight, of_bias = plain.step(run=both(plain, first))
        _assert_equal([*found, bias], [*expected, of_bias])
        torch.testing.assert_close(fused.linear.weight.main_grad, weight)  # The order of the additions differs.
        assert len(fused.ready) == 2 * MICROBATCHES


def test_a_weight_with_another_gradient_gets_zeros_beside_it() -> None:
    """Megatron sets zero_out_wgrad on word embeddings, which get a gradient of autograd's, too."""
    fused, plain = Job(), Job(fused=False)
    fused.linear.weight.zero_out_wgrad = True
    for job in (fused, plain):
        job.step(run=lambda x, job=job: job.model(x) + job.linear.weight.sum())
    torch.testing.assert_close(fused.linear.weight.main_grad, plain.linear.weight.main_grad)


def test_without_a_buffer_a_mark_or_a_gradient() -> None:
    plain = Job(fused=False)
    y = plain.model(x := plain.batch(0))
    (expected,) = torch.autograd.grad(y.sum(), plain.linear.weight)
    job = Job()
    weight = job.linear.weight
    del weight.grad_added_to_main_grad
    assert torch.autograd.grad(job.model(x).sum(), weight, allow_unused=True) == (None,)
    assert torch.equal(weight.main_grad, expected)
    weight.requires_grad_(False)
    job.backward(job.model(x))
    assert torch.equal(weight.main_grad, expected)
    job = Job()
    del job.linear.weight.main_grad
    (found,) = torch.autograd.grad(job.model(x).sum(), job.linear.weight)
    assert torch.equal(found, expected)


def test_known_answers_add_as_the_module_does() -> None:
    """In the checks of a training, and in the trial at attach."""
    job = Job()
    for fused in (False, True):
        job.linear.gradient_accumulation_fusion = fused
        (found,) = computations_of(job.linear).values()
        assert [one.into for one in found if isinstance(one, ProductOf)] == [False, False, fused]


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant", pytest.param("listened to", marks=pytest.mark.slow)])
def test_recomputed_forwards_and_listeners_change_no_bit(how: str) -> None:
    backend = "triton" if how == "listened to" else "auto"
    fused, plain, calls = Job(backend=backend), Job(fused=False, backend=backend), []
    run: Any = fused.model
    if how == "listened to":
        fused.manager._job.tap = tap_on(torch.device("cpu"), lambda op, *_: calls.append(op))
    else:
        run = partial(checkpoint, fused.model, use_reentrant=how == "reentrant")
    for _ in range(2):
        _assert_equal(fused.step(run=run), plain.step())
    assert calls.count("matmul") == (2 * 3 * MICROBATCHES if how == "listened to" else 0)


def test_a_split_backward_adds_once() -> None:
    whole, split = Job(), Job()
    for number in range(2):
        whole.backward(whole.model(whole.batch(number)), number)
        x = split.batch(number)
        y = split.model(x)
        gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(100 + number))
        before = split.linear.weight.main_grad.clone()
        _, groups = stage_backward_input([y], [gradient], [x], split.model.parameters())
        assert torch.equal(split.linear.weight.main_grad, before)
        stage_backward_weight(split.model.parameters(), groups)
        assert torch.equal(split.linear.weight.main_grad, whole.linear.weight.main_grad)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning", "ignore:The .grad attribute")
def test_compiled_and_eager_forwards_of_one_step() -> None:
    """The compiler leaves the module out of its graphs."""
    torch._dynamo.reset()
    fused, plain = Job(), Job(fused=False)
    compiled = torch.compile(lambda x: torch.relu(fused.model(x)), backend="aot_eager")
    runs = iter((compiled, lambda x: torch.relu(fused.model(x)), compiled) * 2)
    for _ in range(2):
        found = fused.step(run=lambda x: next(runs)(x))
        _assert_equal(found, plain.step(run=lambda x: torch.relu(plain.model(x))))
    assert len(fused.ready) == 2 * 2 * MICROBATCHES


class Passes(TorchDispatchMode):
    """Counts operations on matrices of the weight's shape, and the bytes of such that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.moved = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.partition("::")[2]
        written = {"matmul": [result], "matmul_into": [args[-1]], "add_": [args[0]]}.get(name, [])
        if written and written[0].shape == (OUT, IN):
            read = [x for x in args if isinstance(x, Tensor) and x.shape == (OUT, IN)]
            self.names.append(name)
            self.moved += sum(x.numel() * x.itemsize for x in (*read, *written))
        return result


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "before", "after"), [(BF16, 12, 8), (FLOAT, 16, 8)])
def test_a_microbatch_takes_no_pass_over_the_gradient(dtype: torch.dtype, before: int, after: int) -> None:
    """Bytes per element of the weight's gradient: docs/megatron.md has them."""
    for fused, names, each in ((False, ["matmul", "add_"], before), (True, ["matmul_into"], after)):
        job = Job(fused=fused, dtype=dtype, backend="triton")
        y = job.model(job.batch(0))
        with Passes() as passes:
            job.backward(y)
        assert (passes.names, passes.moved) == (names, each * OUT * IN)
