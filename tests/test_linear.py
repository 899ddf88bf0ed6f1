"""FP8Linear: its three products against an independent computation, its modes, and what prepare leaves alone."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8dist
from fp8dist import DelayedScaling, StateManager, ops
from fp8dist.errors import ConfigurationError
from fp8dist.kernels.matmuls import matmul_torch
from fp8dist.nn import FP8Linear
from tests.support.training import bits, gradient_bits, parameter_bits, state_bits

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LIMIT = {E4M3: 448.0, E5M2: 57344.0}
BACKENDS = ["torch", "reference"]
NONE = -1.0  # What ``pending`` holds for a slot that saw nothing.


def linear(
    backend: str | None = None, bias: bool = False, dtype: torch.dtype = torch.float32, **recipe: Any
) -> tuple[nn.Linear, StateManager]:
    """A prepared Linear(48, 32) with weights that are always the same."""
    torch.manual_seed(1)
    module = nn.Linear(48, 32, bias=bias, dtype=dtype)
    return module, fp8dist.prepare(module, DelayedScaling(history_len=4, **recipe), backend=backend)


def inputs(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pending(manager: StateManager) -> dict[tuple[str, str], float]:
    """Amaxes recorded since the last boundary, by slot."""
    (sync,) = manager._syncs
    return {(s.fqn, s.role): float(sync.arena.pending[i]) for s, i in sync.arena.index.items()}


def roles(manager: StateManager) -> dict[str, float]:
    """``pending`` of a model that is one Linear."""
    return {role: amax for (_, role), amax in pending(manager).items()}


def amax(x: Tensor) -> float:
    return float(x.detach().float().abs().max())


def dequantised(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """x as FP8 represents it, in float64: written from the formula, with torch's casts alone."""
    if scale is None:
        scale = torch.tensor(LIMIT[dtype]) / x.detach().float().abs().max()
    fp8 = (x.detach().float() * scale).clamp(-LIMIT[dtype], LIMIT[dtype]).to(dtype)
    return fp8.double() * torch.reciprocal(scale).double()


def assert_product(actual: Tensor, a: Tensor, b: Tensor) -> None:
    """``actual`` is ``a @ b.T`` (float64 operands), up to float32 accumulation in any order and one rounding.

    Summing k products in float32 is off by at most k·2⁻²⁴ of the sum of magnitudes (Higham, "Accuracy and Stability of
    Numerical Algorithms", 3.1); 4 more for dequantising; the result is rounded once, maybe to a subnormal.
    """
    exact = a @ b.t()
    terms = a.shape[1] + 4
    info = torch.finfo(actual.dtype)
    bound = terms * 2.0**-24 * (a.abs() @ b.abs().t()) + info.eps / 2 * exact.abs().clamp_min(info.tiny)
    error = (actual.detach().double() - exact).abs()
    worst = int((error - bound).argmax())
    assert bool((error <= bound).all()), f"flat index {worst}: {actual.flatten()[worst]} for {exact.flatten()[worst]}"


# The three products --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 16, 17])
@pytest.mark.parametrize("backend", BACKENDS)
def test_three_products_of_a_cold_module(backend: str, tokens: int, dtype: torch.dtype) -> None:
    module, _ = linear(backend, dtype=dtype)
    x = inputs(tokens, 48).to(dtype).requires_grad_()
    dy = (inputs(tokens, 32, seed=3) * 1e-3).to(dtype)
    y = module(x)
    y.backward(dy)
    assert x.grad is not None
    assert module.weight.grad is not None
    assert y.dtype == x.grad.dtype == module.weight.grad.dtype == dtype
    qx, qw, qdy = dequantised(x, E4M3), dequantised(module.weight, E4M3), dequantised(dy, E5M2)
    assert_product(y, qx, qw)
    assert_product(x.grad, qdy, qw.t())
    assert_product(module.weight.grad, qdy.t(), qx.t())


@pytest.mark.parametrize("backend", BACKENDS)
def test_three_products_of_a_hot_module(backend: str) -> None:
    """Scales come from earlier steps, so today's larger values saturate."""
    module, manager = linear(backend)
    first, dy_first = inputs(16, 48), inputs(16, 32, seed=3)
    module(first.requires_grad_()).backward(dy_first)
    manager.step()
    module.weight.grad = None
    weight_scale = 448.0 / module.weight.detach().abs().max()
    x = (inputs(16, 48, seed=4) * 3).requires_grad_()
    dy = inputs(16, 32, seed=5) * 5
    y = module(x)
    y.backward(dy)
    assert x.grad is not None
    assert module.weight.grad is not None
    qx = dequantised(x, E4M3, torch.tensor(448.0) / first.detach().abs().max())
    qdy = dequantised(dy, E5M2, torch.tensor(57344.0) / dy_first.abs().max())
    qw = dequantised(module.weight, E4M3, weight_scale)
    assert amax(qx) < amax(x)
    assert amax(qdy) < amax(dy)
    assert_product(y, qx, qw)
    assert_product(x.grad, qdy, qw.t())
    assert_product(module.weight.grad, qdy.t(), qx.t())


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_fp8_can_represent_is_exact(backend: str) -> None:
    """Small integers under power-of-two scales: every product and sum is exact, so FP8 equals nn.Linear bitwise."""
    generator = torch.Generator().manual_seed(6)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape, generator=generator).float()

    module, _ = linear(backend, power_of_two=True)
    with torch.no_grad():
        module.weight.copy_(integers(32, 48))
    plain = nn.Linear(48, 32, bias=False)
    plain.load_state_dict(module.state_dict())
    x, dy = integers(19, 48), integers(19, 32)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = module(mine), plain(theirs)
    y.backward(dy)
    expected.backward(dy)
    assert bits(y) == bits(expected)
    assert torch.equal(mine.grad, theirs.grad)
    assert torch.equal(module.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("format", ["hybrid", "e4m3"])
def test_formats_backends_and_accumulation_that_reach_the_products(format: str) -> None:
    module, _ = linear("reference", format=format)
    seen = []

    def spy(a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append((a.dtype, b.dtype, kwargs["fast_accumulation"], kwargs["backend"]))
        return original(a, b, *args, **kwargs)

    original = ops.matmul
    with mock.patch.object(ops, "matmul", spy):
        module(inputs(8, 48).requires_grad_()).sum().backward()
    gradient = E5M2 if format == "hybrid" else E4M3
    assert seen == [
        (E4M3, E4M3, True, "reference"),
        (gradient, E4M3, False, "reference"),
        (gradient, E4M3, False, "reference"),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias(dtype: torch.dtype) -> None:
    with_bias, _ = linear(bias=True, dtype=dtype)
    without, _ = linear(dtype=dtype)
    without.weight.data.copy_(with_bias.weight)
    x = inputs(5, 48).to(dtype)
    y = with_bias(x)
    dy = inputs(5, 32, seed=3).to(dtype)
    y.backward(dy)
    assert torch.equal(y, without(x) + with_bias.bias)
    assert with_bias.bias.grad is not None
    assert torch.equal(with_bias.bias.grad, dy.sum(0))


@pytest.mark.parametrize("shape", [(48,), (6, 48), (2, 3, 48), (1, 2, 3, 48)])
def test_shapes_are_nn_linears(shape: tuple[int, ...]) -> None:
    module, _ = linear(bias=True)
    flat, _ = linear(bias=True)
    x = inputs(6, 48)[: inputs(*shape).numel() // 48].requires_grad_()
    shaped = x.detach().reshape(shape).requires_grad_()
    y, expected = module(shaped), flat(x)
    assert y.shape == (*shape[:-1], 32)
    (y * 2).sum().backward()
    (expected * 2).sum().backward()
    assert torch.equal(y.reshape(-1, 32), expected)
    assert shaped.grad is not None
    assert shaped.grad.shape == shape
    assert torch.equal(shaped.grad.reshape(-1, 48), x.grad)
    assert gradient_bits(module) == gradient_bits(flat)


def test_a_wrong_number_of_features_is_refused() -> None:
    module, _ = linear()
    for shape in [(4, 96), (4, 24), (2, 2, 16)]:
        with pytest.raises((RuntimeError, ValueError)):
            module(inputs(*shape))


@pytest.mark.parametrize("backend", BACKENDS)
def test_torch_autocast(backend: str) -> None:
    """Same numbers as with an input that was cast by hand; gradients in the dtypes of what they belong to."""
    module, manager = linear(backend, bias=True)
    by_hand, hand_manager = linear(backend, bias=True)
    x = inputs(7, 48).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    cast = x.detach().bfloat16().requires_grad_()
    expected = by_hand(cast)
    assert y.dtype == torch.bfloat16
    assert bits(y) == bits(expected)
    dy = inputs(7, 32, seed=3).bfloat16()
    y.backward(dy)
    expected.backward(dy)
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert torch.equal(x.grad, cast.grad.float())
    assert module.weight.grad.dtype == module.bias.grad.dtype == torch.float32
    assert gradient_bits(module) == gradient_bits(by_hand)
    # In the weight's precision, not rounded to bfloat16 on the way.
    assert_product(module.weight.grad, dequantised(dy, E5M2).t(), dequantised(cast, E4M3).t())
    assert roles(manager) == roles(hand_manager)
    assert roles(manager)["input"] == amax(cast)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_inside_torch_autocast(backend: str) -> None:
    """People do call backward inside the context: the products are the same."""
    gradients = []
    for inside in (False, True):
        module, _ = linear(backend)
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(inputs(7, 48)).float().square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        gradients.append(gradient_bits(module))
    assert gradients[0] == gradients[1]


# Tokens, gradients and graphs ----------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 48), (2, 0, 48)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend: str, shape: tuple[int, ...]) -> None:
    module, manager = linear(backend, bias=True)
    x = torch.zeros(shape, requires_grad=True)
    y = module(x)
    assert y.shape == (*shape[:-1], 32)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape
    assert torch.equal(module.weight.grad, torch.zeros(32, 48))
    assert torch.equal(module.bias.grad, torch.zeros(32))
    assert roles(manager) == {"input": NONE, "weight": amax(module.weight), "grad_output": NONE}
    manager.step()
    commits = dict(zip((s.role for s in manager.slots), manager.state_dict()["counters"][0].tolist()))
    assert commits == {"input": 0, "weight": 1, "grad_output": 0}


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33])
def test_padding_changes_no_amax_and_no_gradient(tokens: int) -> None:
    """The transposed copies are padded to 16 tokens; a module that gets the zeros itself must agree."""
    short, manager = linear("reference")
    padded, _ = linear("reference")
    x, dy = inputs(tokens, 48), inputs(tokens, 32, seed=3)
    rest = -tokens % 16
    short(x).backward(dy)
    padded(F.pad(x, (0, 0, 0, rest))).backward(F.pad(dy, (0, 0, 0, rest)))
    assert gradient_bits(short) == gradient_bits(padded)
    assert roles(manager) == {"input": amax(x), "weight": amax(short.weight), "grad_output": amax(dy)}


def counted_matmuls(function: Callable[[], None]) -> int:
    with mock.patch.object(ops, "matmul", wraps=ops.matmul) as spy:
        function()
    return spy.call_count


def test_input_that_needs_no_gradient_costs_no_dgrad() -> None:
    module, manager = linear()
    y = module(inputs(8, 48))
    assert counted_matmuls(lambda: y.sum().backward()) == 1
    assert module.weight.grad is not None
    assert roles(manager)["grad_output"] == 1.0


def test_frozen_weight_costs_no_wgrad() -> None:
    module, manager = linear()
    trained, _ = linear()
    module.weight.requires_grad_(False)
    x, again = inputs(8, 48).requires_grad_(), inputs(8, 48).requires_grad_()
    y = module(x)
    dy = inputs(8, 32, seed=3)
    assert counted_matmuls(lambda: y.backward(dy)) == 1
    trained(again).backward(dy)
    assert module.weight.grad is None
    assert torch.equal(x.grad, again.grad)
    assert roles(manager) == {"input": amax(x), "weight": amax(module.weight), "grad_output": amax(dy)}


def test_only_the_bias_is_trained() -> None:
    module, _ = linear(bias=True)
    module.weight.requires_grad_(False)
    y = module(inputs(8, 48))
    assert counted_matmuls(lambda: y.sum().backward()) == 0
    assert torch.equal(module.bias.grad, torch.full((32,), 8.0))


def test_several_forwards_before_one_backward() -> None:
    """Each graph keeps its own bytes; amaxes are the largest of all calls; gradients add."""
    module, manager = linear()
    xs = [inputs(8, 48, seed=s) * s for s in (3, 1, 2)]
    dys = [inputs(8, 32, seed=10 + s) for s in (3, 1, 2)]
    single = []
    for x, dy in zip(xs, dys):
        alone, _ = linear()
        alone(x).backward(dy)
        single.append(alone.weight.grad)
    ys = [module(x) for x in xs]
    torch.autograd.backward(ys, dys)
    # Autograd may add the three in another order: float32 addition of three terms, each rounding once.
    assert single[0] is not None
    torch.testing.assert_close(module.weight.grad, single[0] + single[1] + single[2], rtol=1e-6, atol=1e-6)
    assert roles(manager)["input"] == max(map(amax, xs))
    assert roles(manager)["grad_output"] == max(map(amax, dys))


class Tied(nn.Module):
    """Two Linears, one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one = nn.Linear(32, 32, bias=False)
        self.two = nn.Linear(32, 32, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.two(z)


def test_tied_weights_have_one_slot_and_their_gradients_add() -> None:
    model = Tied()
    weight = model.one.weight
    manager = fp8dist.prepare(model)
    assert sorted((s.fqn, s.role) for s in manager.slots if s.role == "weight") == [("one", "weight")]
    assert len(manager.slots) == 5
    assert model.two.weight is weight
    x, z = inputs(16, 32), inputs(16, 32, seed=5) * 4
    y1, y2 = model(x, z)
    (y1.sum() + 2 * y2.sum()).backward()
    ones = torch.ones(16, 32, dtype=torch.float64)
    exact = ones.t() @ dequantised(x, E4M3) + 2 * ones.t() @ dequantised(z, E4M3)
    torch.testing.assert_close(weight.grad.double(), exact, rtol=1e-5, atol=1e-4)
    manager.step()
    assert torch.equal(manager.scale("one", "weight"), manager.scale("two", "weight"))
    manager.set_scale("two", "weight", 3.0)
    assert float(manager.scale("one", "weight")) == 3.0
    assert float(manager.scale("one", "input")) != float(manager.scale("two", "input"))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: torch.ones(()).expand(16, 32), id="expanded scalar"),
        pytest.param(lambda: inputs(1, 32, seed=7).expand(16, 32), id="expanded row"),
        pytest.param(lambda: inputs(32, 16, seed=7).t(), id="transposed"),
        pytest.param(lambda: inputs(16, 64, seed=7)[:, ::2], id="strided"),
    ],
)
def test_strides_of_gradients_and_inputs_do_not_matter(make: Callable[[], Tensor]) -> None:
    results = []
    for contiguous in (False, True):
        dy = make()
        x = inputs(96, 16, seed=8).t()[:, ::2]
        if contiguous:
            dy, x = dy.contiguous(), x.contiguous()
        assert dy.is_contiguous() == x.is_contiguous() == contiguous
        module, _ = linear()
        x.requires_grad_()
        y = module(x)
        y.backward(dy)
        results.append((bits(y), bits(x.grad), gradient_bits(module)))
    assert results[0] == results[1]


def test_double_backward_is_refused() -> None:
    module, _ = linear()
    x = inputs(4, 48).requires_grad_()
    (gradient,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_commit_between_forward_and_backward_does_not_change_the_gradients() -> None:
    """FP8 bytes carry the inv_scale that they were cast with, not a view of the live one."""
    results = []
    for commit_between in (False, True):
        module, manager = linear()
        module(inputs(16, 48).requires_grad_()).backward(inputs(16, 32, seed=3))
        manager.step()
        module.weight.grad = None
        x = (inputs(16, 48, seed=4) * 30).requires_grad_()
        with torch.no_grad():
            module.weight.mul_(7)
        y = module(x)
        before = [float(manager.scale("", role)) for role in ("input", "weight")]
        if commit_between:
            manager.step()
            assert all(float(manager.scale("", r)) != b for r, b in zip(("input", "weight"), before))
        y.backward(inputs(16, 32, seed=5))
        results.append((bits(x.grad), gradient_bits(module)))
    assert results[0] == results[1]


# Values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hot", [False, True], ids=["cold", "hot"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bad_input_stays_visible_where_it_belongs(backend: str, bad: float, hot: bool) -> None:
    module, manager = linear(backend)
    if hot:
        module(inputs(8, 48).requires_grad_()).sum().backward()
        manager.step()
        module.weight.grad = None
    x = inputs(8, 48, seed=4)
    x[2, 5] = bad
    x.requires_grad_()
    y = module(x)
    assert not y[2].isfinite().any()
    assert y[[0, 1, *range(3, 8)]].isfinite().all()
    y.backward(torch.ones(8, 32))
    assert not module.weight.grad[:, 5].isfinite().any()
    others = [c for c in range(48) if c != 5]
    assert module.weight.grad[:, others].isfinite().all()
    assert x.grad.isfinite().all()
    assert not torch.tensor(roles(manager)["input"]).isfinite()


@pytest.mark.parametrize("hot", [False, True], ids=["cold", "hot"])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bad_gradient_stays_visible_where_it_belongs(backend: str, bad: float, hot: bool) -> None:
    module, manager = linear(backend)
    if hot:
        module(inputs(8, 48).requires_grad_()).sum().backward()
        manager.step()
        module.weight.grad = None
    x = inputs(8, 48, seed=4).requires_grad_()
    dy = inputs(8, 32, seed=5)
    dy[2, 7] = bad
    module(x).backward(dy)
    assert not x.grad[2].isfinite().any()
    assert x.grad[[0, 1, *range(3, 8)]].isfinite().all()
    assert not module.weight.grad[7].isfinite().any()
    assert module.weight.grad[[r for r in range(32) if r != 7]].isfinite().all()
    assert not torch.tensor(roles(manager)["grad_output"]).isfinite()


@pytest.mark.parametrize("backend", BACKENDS)
def test_finite_values_beyond_the_format_saturate(backend: str) -> None:
    module, manager = linear(backend)
    for role, scale in (("input", 1.0), ("weight", 1.0), ("grad_output", 1.0)):
        manager.set_scale("", role, scale)
    with torch.no_grad():
        module.weight.fill_(1.0)
    x = torch.zeros(1, 48)
    x[0, 0], x[0, 1] = 1e6, -3e38
    x.requires_grad_()
    y = module(x)
    assert torch.equal(y, torch.zeros(1, 32))  # 448 - 448
    y.backward(torch.full((1, 32), 1e30))
    assert torch.equal(x.grad, torch.full((1, 48), 32 * 57344.0))
    assert torch.equal(module.weight.grad[:, :2], torch.tensor([[57344.0 * 448, -57344.0 * 448]]).expand(32, 2))
    assert roles(manager)["input"] == amax(x)


def test_warmup_unit_casts_a_cold_module_with_scale_one() -> None:
    module, _ = linear("reference", warmup="unit")
    x = inputs(4, 48) * 1000
    one = torch.tensor(1.0)
    assert_product(module(x), dequantised(x, E4M3, one), dequantised(module.weight, E4M3, one))


# Alignment -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "k", "n"), [(16, 24, 16), (16, 16, 24), (17, 8, 32), (16, 1, 16)], ids=["k", "n", "small k", "one"]
)
def test_alignment_that_cuda_refuses_is_refused_on_the_cpu(m: int, k: int, n: int) -> None:
    a, b, one = torch.zeros(m, k).to(E4M3), torch.zeros(n, k).to(E4M3), torch.tensor(1.0)
    with pytest.raises(ValueError, match="multiples of 16"):
        matmul_torch(a, b, one, one, torch.float32, False)
    for backend in ("torch", "auto"):
        with pytest.raises(ValueError, match="multiples of 16"):
            ops.matmul(a, b, one, one, torch.float32, fast_accumulation=False, backend=backend)


def test_layout_that_cuda_refuses_is_refused_on_the_cpu() -> None:
    one = torch.tensor(1.0)
    good, bad = torch.zeros(32, 32).to(E4M3), torch.zeros(32, 32).to(E4M3).t()
    matmul_torch(good, good, one, one, torch.float32, False)
    for a, b in ((good, bad), (bad, good)):
        with pytest.raises(ValueError, match="contiguous"):
            matmul_torch(a, b, one, one, torch.float32, False)


def test_unknown_backend_is_refused() -> None:
    one, a = torch.tensor(1.0), torch.zeros(16, 16).to(E4M3)
    with pytest.raises(ConfigurationError, match="cutlass"):
        ops.matmul(a, a, one, one, torch.float32, fast_accumulation=False, backend="cutlass")


# What prepare takes and leaves ---------------------------------------------------------------------


class MyLinear(nn.Linear):
    """Not exactly nn.Linear."""


class Zoo(nn.Module):
    """One Linear to convert among many to leave."""

    def __init__(self) -> None:
        super().__init__()
        self.good = nn.Linear(32, 48)
        self.narrow = nn.Linear(24, 32)
        self.odd = nn.Linear(32, 33)
        self.mine = MyLinear(32, 32)
        self.attention = nn.MultiheadAttention(32, 4)
        self.spectral = torch.nn.utils.spectral_norm(nn.Linear(32, 32))
        self.parametrized = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32))
        self.lm_head = nn.Linear(32, 64)
        self.lora_down = nn.Linear(32, 16)
        self.unwanted = nn.Linear(32, 32)


def test_ineligible_modules_are_left_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    zoo = Zoo()
    with caplog.at_level(logging.INFO, "fp8dist"):
        manager = fp8dist.prepare(zoo, filter_fn=lambda module, fqn: fqn != "unwanted")
    converted = [name for name, module in zoo.named_modules() if isinstance(module, FP8Linear)]
    assert converted == ["good"]
    assert {slot.fqn for slot in manager.slots} == {"good"}
    said = {record.getMessage().split()[1]: record.getMessage() for record in caplog.records}
    for name, reason in {
        "narrow": "24 x 32 are not multiples of 16",
        "odd": "32 x 33 are not multiples of 16",
        "mine": "MyLinear",
        "attention.out_proj": "NonDynamicallyQuantizableLinear",
        "spectral": "spectral_norm",
        "parametrized": "ParametrizedLinear",
        "lm_head": "skip",
        "lora_down": "skip",
        "unwanted": "filter_fn",
    }.items():
        assert reason in said.pop(name)
    assert not said


def test_skip_replaces_the_default_patterns() -> None:
    zoo = Zoo()
    fp8dist.prepare(zoo, skip=("g*", "unwanted"))
    converted = [name for name, module in zoo.named_modules() if isinstance(module, FP8Linear)]
    assert converted == ["lm_head", "lora_down"]


def test_filter_fn_is_asked_about_eligible_modules_only() -> None:
    asked = []

    def filter_fn(module: nn.Module, fqn: str) -> bool:
        asked.append((type(module), fqn))
        return True

    fp8dist.prepare(Zoo(), filter_fn=filter_fn)
    assert asked == [(nn.Linear, "good"), (nn.Linear, "unwanted")]


def test_prepare_changes_neither_keys_nor_parameters_nor_hooks() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16, bias=False))
    keys = list(model.state_dict())
    parameters = dict(model.named_parameters())
    modules = list(model.modules())
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    before = parameter_bits(model)
    manager = fp8dist.prepare(model)
    assert list(model.state_dict()) == keys
    assert list(model.modules()) == modules
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert not list(model.buffers())
    model(inputs(4, 32))
    assert calls == [1]
    assert parameter_bits(model) == before
    assert isinstance(model[0], nn.Linear)
    manager.detach()
    assert type(model[0]) is type(model[2]) is nn.Linear
    assert list(model.state_dict()) == keys
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())


def test_a_model_is_prepared_once() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    fp8dist.prepare(model)
    for again in (model, nn.Sequential(model), model[0]):
        with pytest.raises(ConfigurationError, match="prepared already"):
            fp8dist.prepare(again)


def test_moving_a_model_after_its_state_was_placed_is_refused() -> None:
    module, manager = linear()
    module(inputs(4, 48))
    module.to("meta")
    with pytest.raises(ConfigurationError, match="meta"):
        module(inputs(4, 48).to("meta"))
    with pytest.raises(ConfigurationError, match="the model moved from cpu to cuda"):
        manager._syncs[0].arena.place(torch.device("cuda", 0))


def test_a_model_may_change_its_dtype_after_its_state_was_placed() -> None:
    module, manager = linear()
    module(inputs(4, 48).requires_grad_()).sum().backward()
    manager.step()
    scale = float(manager.scale("", "input"))
    module.bfloat16()
    assert module(inputs(4, 48).bfloat16()).dtype == torch.bfloat16
    assert manager.scale("", "input").dtype == torch.float32
    assert float(manager.scale("", "input")) == scale


# Modes ---------------------------------------------------------------------------------------------


def stepped() -> tuple[nn.Linear, StateManager]:
    """A module that has trained for a step."""
    module, manager = linear(bias=True)
    module(inputs(8, 48).requires_grad_()).sum().backward()
    manager.step()
    module.zero_grad()
    return module, manager


@contextlib.contextmanager
def evaluating(module: nn.Module, mode: str) -> Iterator[None]:
    if "eval" in mode:
        module.eval()
    with torch.no_grad() if "no_grad" in mode else contextlib.nullcontext():
        yield
    module.train()


@pytest.mark.parametrize("mode", ["eval", "no_grad", "eval, no_grad"])
@pytest.mark.parametrize("cold", [False, True], ids=["hot", "cold"])
def test_evaluation_records_nothing(mode: str, cold: bool) -> None:
    module, manager = linear(bias=True) if cold else stepped()
    before = state_bits(manager)
    with evaluating(module, mode):
        y = module(inputs(8, 48, seed=4).mul(100).requires_grad_())
        if y.requires_grad:
            y.sum().backward()  # The mode is the forward's: this records nothing either.
    assert roles(manager) == dict.fromkeys(("input", "weight", "grad_output"), NONE)
    assert state_bits(manager) == before


def test_backward_in_eval_of_a_forward_in_train_records() -> None:
    module, manager = linear()
    y = module(inputs(8, 48))
    module.eval()
    y.sum().backward()
    assert roles(manager)["grad_output"] == 1.0


def test_eval_precision_high_equals_nn_linear_bitwise() -> None:
    torch.manual_seed(1)
    module = nn.Linear(48, 32)
    manager = fp8dist.prepare(module, eval_precision="high")
    x = inputs(8, 48)
    plain = F.linear(x, module.weight, module.bias)
    assert not torch.equal(module(x), plain)
    module.eval()
    assert bits(module(x)) == bits(plain)
    module.train()
    manager.reset()
    assert not torch.equal(module(x), plain)


def test_eval_in_fp8_is_the_default_and_uses_the_same_scales() -> None:
    module, _ = stepped()
    x = inputs(8, 48)
    expected = module(x)
    module.eval()
    assert bits(module(x)) == bits(expected)
    assert not torch.equal(expected, F.linear(x, module.weight, module.bias))


def test_autocast_off_equals_nn_linear_bitwise_and_records_nothing() -> None:
    module, manager = stepped()
    plain = nn.Linear(48, 32)
    plain.load_state_dict(module.state_dict())
    before = state_bits(manager)
    mine, theirs = inputs(8, 48).requires_grad_(), inputs(8, 48).requires_grad_()
    with manager.autocast(enabled=False):
        y = module(mine)
        with manager.autocast(enabled=True):
            assert not torch.equal(module(inputs(8, 48)), y)
            manager.step()
        assert bits(module(inputs(8, 48))) == bits(y)
    before = state_bits(manager)
    expected = plain(theirs)
    y.square().sum().backward()
    expected.square().sum().backward()
    assert bits(y) == bits(expected)
    assert torch.equal(mine.grad, theirs.grad)
    assert gradient_bits(module) == gradient_bits(plain)
    assert set(roles(manager).values()) == {NONE}
    assert state_bits(manager) == before
    assert not torch.equal(module(mine), y)  # On again.


def test_autocast_is_restored_after_an_exception() -> None:
    module, manager = stepped()
    expected = module(inputs(8, 48))
    with pytest.raises(KeyError), manager.autocast(enabled=False, calibrating=True):
        raise KeyError
    manager._syncs[0].abandon()
    with torch.no_grad():
        assert torch.equal(module(inputs(8, 48)), expected)
    assert set(roles(manager).values()) == {NONE}


@pytest.mark.parametrize("fp8", [False, True], ids=["high precision", "fp8"])
@pytest.mark.parametrize("mode", ["train", "eval", "eval, no_grad"])
def test_calibrating_records_whatever_the_mode(mode: str, fp8: bool) -> None:
    module, manager = linear(bias=True)
    x = inputs(8, 48).requires_grad_()
    with evaluating(module, mode), manager.autocast(enabled=fp8, calibrating=True):
        y = module(x)
        if not fp8:
            assert bits(y) == bits(F.linear(x, module.weight, module.bias))
        if y.requires_grad:
            y.backward(torch.full((8, 32), -3.0))
    gradient = NONE if "no_grad" in mode else 3.0
    assert roles(manager) == {"input": amax(x), "weight": amax(module.weight), "grad_output": gradient}
    assert manager.steps == 0


@pytest.mark.parametrize("update", ["same_step", "next_step"])
def test_calibrate_commits_on_exit(update: str) -> None:
    module, manager = linear(update=update)
    module.eval()
    with manager.calibrate():
        for seed in (1, 2, 3):
            x = inputs(8, 48, seed=seed) * seed
            y = module(x)
            assert bits(y) == bits(F.linear(x, module.weight))
            y.backward(torch.full((8, 32), float(seed)))
        assert manager.steps == 0
    assert manager.steps == 1
    largest = max(amax(inputs(8, 48, seed=seed) * seed) for seed in (1, 2, 3))
    assert float(manager.amax("", "input")) == largest
    assert float(manager.scale("", "input")) == float(torch.tensor(448.0) / torch.tensor(largest))
    assert float(manager.amax("", "grad_output")) == 3.0
    assert float(manager.amax("", "weight")) == amax(module.weight)
    assert manager.metrics()["fp8/cold_slots"] == 0


def test_calibrate_that_raises_commits_nothing_and_forgets() -> None:
    module, manager = stepped()
    module(inputs(8, 48, seed=5).requires_grad_()).sum().backward()
    recorded, state = roles(manager), state_bits(manager)

    def interrupted() -> None:
        with manager.calibrate():
            module(inputs(8, 48) * 1e6)
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert roles(manager) == recorded
    assert state_bits(manager) == state
    module(inputs(8, 48, seed=6))
    assert roles(manager)["input"] == max(amax(inputs(8, 48, seed=5)), amax(inputs(8, 48, seed=6)))


def test_calibration_starts_hot() -> None:
    """After calibrating, FP8 uses the calibrated scale, not the tensor's own."""
    module, manager = linear("reference")
    with manager.calibrate():
        module(inputs(8, 48) * 2)
    x = inputs(8, 48, seed=9)
    scale = torch.tensor(448.0) / (inputs(8, 48) * 2).abs().max()
    assert_product(module(x), dequantised(x, E4M3, scale), dequantised(module.weight, E4M3))


def test_switched_off_it_is_nn_linear() -> None:
    torch.manual_seed(1)
    module = nn.Linear(48, 32)
    manager = fp8dist.prepare(module, enabled=False)
    manager.attach(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    x = inputs(8, 48)
    with manager.calibrate():
        assert bits(module(x)) == bits(F.linear(x, module.weight, module.bias))
    assert bits(module(x)) == bits(F.linear(x, module.weight, module.bias))
    assert len(manager.slots) == 3
    assert set(roles(manager).values()) == {NONE}
    assert manager.steps == 0


# Compilation and the ops ---------------------------------------------------------------------------


class Block(nn.Module):
    """Two Linears with something between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def _train_block(compiled: bool, update: str) -> tuple[list[bytes], dict[str, bytes], dict[str, bytes]]:
    block = Block()
    manager = fp8dist.prepare(block, DelayedScaling(history_len=4, update=update))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(block.parameters(), lr=0.05)
    manager.attach(block, optimizer=optimizer)
    forward = torch.compile(block, fullgraph=True, backend="aot_eager") if compiled else block
    losses = []
    for step in range(4):
        for micro in range(2):
            x = inputs(6, 32, seed=20 + 2 * step + micro) * (1 + step)
            loss = forward(x).square().mean()
            loss.backward()
            losses.append(bits(loss))
        optimizer.step()
        optimizer.zero_grad()
        block.eval()
        with torch.no_grad():
            losses.append(bits(forward(inputs(6, 32, seed=50 + step))))
        block.train()
    torch._dynamo.reset()
    return losses, state_bits(manager), parameter_bits(block)


@pytest.mark.parametrize("update", ["same_step", "next_step"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it itself.
@pytest.mark.slow
def test_compiled_in_one_graph_it_trains_as_in_eager_mode(update: str) -> None:
    assert _train_block(True, update) == _train_block(False, update)


LONG = 12
WARM = 3
BOUNDARIES: dict[str, Callable[[StateManager, nn.Module, torch.optim.Optimizer], Any]] = {
    "optimizer": lambda manager, block, optimizer: manager.attach(block, optimizer=optimizer),
    "manager.step()": lambda manager, block, optimizer: manager.attach(block),
    "manual": lambda manager, block, optimizer: manager.attach(block, optimizer=optimizer, boundary="manual"),
}


def _train_long(compiled: bool, update: str, boundary: str) -> Any:
    block = Block()
    manager = fp8dist.prepare(block, DelayedScaling(history_len=4, update=update))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(block.parameters(), lr=0.05)
    BOUNDARIES[boundary](manager, block, optimizer)
    forward = torch.compile(block, fullgraph=True, backend="aot_eager") if compiled else block
    losses = []
    for step in range(LONG):
        with torch._dynamo.config.patch(error_on_recompile=step >= WARM):
            loss = forward(inputs(6, 32, seed=20 + step) * (1 + step % 5)).square().mean()
            loss.backward()
        losses.append(bits(loss))
        optimizer.step()
        if boundary != "optimizer":
            manager.step()
        optimizer.zero_grad()
    torch._dynamo.reset()
    return losses, state_bits(manager), parameter_bits(block)


@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("update", ["same_step", "next_step"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it itself.
@pytest.mark.slow
def test_compiled_in_one_graph_it_is_not_compiled_again(update: str, boundary: str) -> None:
    assert _train_long(True, update, boundary) == _train_long(False, update, boundary)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """``torch.set_default_dtype``, for a while."""
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
        manager.set_scale("up", "input", 0.3)
        for slot in manager.slots:
            values = [read(*slot) for read in (manager.scale, manager.inv_scale, manager.amax, manager.amax_history)]
            assert [value.dtype for value in values] == [torch.float32] * 4
        twin = Block()
        other = fp8dist.prepare(twin, recipe)
        other.load_state_dict(manager.state_dict())
        assert state_bits(other) == state_bits(manager)
    return state_bits(manager), parameter_bits(block)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_dtype_does_not_matter(dtype: torch.dtype, power_of_two: bool) -> None:
    assert _train_under(dtype, power_of_two) == _train_under(torch.float32, power_of_two)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
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


def test_opcheck_observe() -> None:
    torch.library.opcheck(ops.observe, (inputs(5, 32), torch.tensor(NONE)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck_matmul(backend: str) -> None:
    one = torch.tensor(1.0)
    torch.library.opcheck(
        ops.matmul,
        (inputs(5, 32).to(E5M2), inputs(16, 32).to(E4M3), one, one, torch.bfloat16),
        {"fast_accumulation": False, "backend": backend},
        # test_schema compares arguments with allclose, which FP8 does not have.
        test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_a_copied_model_trains_on_its_own() -> None:
    module, manager = stepped()
    before = state_bits(manager)
    twin = copy.deepcopy(module)
    other = fp8dist.get_manager(twin)
    assert other is not manager
    assert state_bits(other) == before
    twin(inputs(8, 48) * 9).sum().backward()
    other.step()
    assert state_bits(manager) == before
    assert other.steps == manager.steps + 1


def test_first_forward_in_inference_mode_then_training() -> None:
    """Nothing that the state or a weight cast is made of may be an inference tensor."""
    module, manager = linear("auto", update="next_step")
    twin, twin_manager = linear("auto", update="next_step")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, twin)]
    x = inputs(16, 48)
    with torch.inference_mode():
        module(x)
    with torch.no_grad():
        twin(x)
    assert not any(tensor.is_inference() for tensor in manager._syncs[0].arena.shared_state())
    for each, owner, optimizer in zip((module, twin), (manager, twin_manager), optimizers):
        owner.attach(optimizer=optimizer)
        for _ in range(3):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.inference_mode():
            each(x)  # Commits what is due.
    assert torch.equal(module.weight, twin.weight)
    for role in ("input", "weight", "grad_output"):
        assert torch.equal(manager.scale("", role), twin_manager.scale("", role))


def test_input_of_another_width_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(48, 32))
    fp8dist.prepare(model)
    for shape in ((4, 96), (2, 24), ()):
        with pytest.raises(ConfigurationError, match=r"0: expected \[\.\.\., 48\]"):
            model(torch.zeros(shape))
