"""FP8Linear: its three products against an independent computation, its modes, and modules that stay unchanged."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fp8dist
from fp8dist.errors import ConfigurationError
from fp8dist_kernels import direct, ops
from fp8dist_kernels.backends import why_not_triton
from fp8dist_kernels.reference.casts import add_up
from fp8dist_kernels.reference.torch_matmuls import matmul_torch
from tests.support.linear import (
    BACKENDS,
    E4M3,
    E5M2,
    NONE,
    amax,
    assert_product,
    dequantised,
    inputs,
    linear,
    roles,
)
from tests.support.states import saved_of
from tests.support.training import bits, gradient_bits

# The three products --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_three_products_of_a_cold_module(backend: str) -> None:
    for tokens, dtype in ((1, torch.float32), (16, torch.float16), (17, torch.bfloat16), (17, torch.float32)):
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
    """Scales come from earlier steps, so larger values saturate."""
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

    original = direct.matmul
    with mock.patch.object(direct, "matmul", spy):
        module(inputs(8, 48).requires_grad_()).sum().backward()
    gradient = E5M2 if format == "hybrid" else E4M3
    assert seen == [
        (E4M3, E4M3, True, "reference"),
        (gradient, E4M3, False, "reference"),
        (gradient, E4M3, False, "reference"),
    ]


@pytest.mark.parametrize("fast", [(), ("fprop",), ("dgrad",), ("wgrad",), ("fprop", "dgrad", "wgrad")])
@pytest.mark.parametrize("kind", [fp8dist.DelayedScaling, fp8dist.CurrentScaling, fp8dist.RowwiseScaling])
def test_the_accumulation_of_each_gemm_reaches_its_product(kind: Any, fast: tuple[str, ...]) -> None:
    module = nn.Linear(48, 32)
    fp8dist.prepare(nn.Sequential(module), kind(fast_accumulation=fast))
    with mock.patch.object(direct, "matmul", wraps=direct.matmul) as spy:
        module(inputs(8, 48).requires_grad_()).sum().backward()
    gemms = ("fprop", "dgrad", "wgrad")
    shapes = {(8, 32): "fprop", (8, 48): "dgrad", (32, 48): "wgrad"}
    products = [(shapes[c.args[0].shape[0], c.args[1].shape[0]], c.kwargs["fast_accumulation"]) for c in spy.mock_calls]
    assert products == [(gemm, gemm in fast) for gemm in gemms]


def test_products_by_block_never_ask_for_fast_accumulation() -> None:
    module = nn.Linear(128, 128)
    fp8dist.prepare(nn.Sequential(module), fp8dist.BlockScaling())
    with mock.patch.object(direct, "matmul", wraps=direct.matmul) as spy:
        module(inputs(8, 128).requires_grad_()).sum().backward()
    assert [call.kwargs["fast_accumulation"] for call in spy.mock_calls] == [False] * 3


def test_bias() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        with_bias, _ = linear(bias=True, dtype=dtype)
        without, _ = linear()
        without.weight.data.copy_(with_bias.weight)
        x = inputs(5, 48).to(dtype)
        y = with_bias(x)
        dy = inputs(5, 32, seed=3).to(dtype)
        y.backward(dy)
        assert torch.equal(y, (without(x.float()) + with_bias.bias).to(dtype)), (
            "it is added before the result is rounded"
        )
        assert with_bias.bias.grad is not None
        assert torch.equal(with_bias.bias.grad, add_up(dy, dtype)), "rounded once"
        torch.testing.assert_close(with_bias.bias.grad, dy.double().sum(0).to(dtype))


def test_shapes_are_nn_linears() -> None:
    for shape in ((48,), (6, 48), (2, 3, 48), (1, 2, 3, 48)):
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
    """Same numbers as with a manually cast input; gradients have their tensors' dtypes."""
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
    # In the weight's precision, without rounding to bfloat16 first.
    assert_product(module.weight.grad, dequantised(dy, E5M2).t(), dequantised(cast, E4M3).t())
    assert roles(manager) == roles(hand_manager)
    assert roles(manager)["input"] == amax(cast)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_inside_torch_autocast(backend: str) -> None:
    """Some users call backward inside the context: the products are the same."""
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend: str) -> None:
    for shape in ((0, 48), (2, 0, 48)):
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
        commits = dict(zip((s.role for s in manager.slots), saved_of(manager)["counters"][0].tolist()))
        assert commits == {"input": 0, "weight": 1, "grad_output": 0}


def test_padding_changes_no_amax_and_no_gradient() -> None:
    """The transposed copies are padded to 16 tokens; a module that receives the zeros explicitly must agree."""
    for tokens in (1, 15, 16, 17, 33):
        short, manager = linear("reference")
        padded, _ = linear("reference")
        x, dy = inputs(tokens, 48), inputs(tokens, 32, seed=3)
        rest = -tokens % 16
        short(x).backward(dy)
        padded(F.pad(x, (0, 0, 0, rest))).backward(F.pad(dy, (0, 0, 0, rest)))
        assert gradient_bits(short) == gradient_bits(padded)
        assert roles(manager) == {"input": amax(x), "weight": amax(short.weight), "grad_output": amax(dy)}


def counted_matmuls(function: Callable[[], None]) -> int:
    with mock.patch.object(direct, "matmul", wraps=direct.matmul) as spy:
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
    """Each graph keeps its own bytes; amaxes are the maximum of all calls; gradients add up."""
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
    # Autograd may add the three in another order: float32 addition of three terms, with two roundings.
    assert single[0] is not None
    torch.testing.assert_close(module.weight.grad, single[0] + single[1] + single[2], rtol=1e-6, atol=1e-6)
    assert roles(manager)["input"] == max(map(amax, xs))
    assert roles(manager)["grad_output"] == max(map(amax, dys))


class Tied(nn.Module):
    """Two Linears that share a weight."""

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
    assert torch.equal(manager.slot("one", "weight").scale, manager.slot("two", "weight").scale)
    manager.slot("two", "weight").set_scale(3.0)
    assert float(manager.slot("one", "weight").scale) == 3.0
    assert float(manager.slot("one", "input").scale) != float(manager.slot("two", "input").scale)


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


def test_a_commit_between_forward_and_backward_does_not_change_the_gradients() -> None:
    """FP8 bytes carry the inv_scale of their cast, not a view of the current one."""
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
        before = [float(manager.slot("", role).scale) for role in ("input", "weight")]
        if commit_between:
            manager.step()
            assert all(float(manager.slot("", r).scale) != b for r, b in zip(("input", "weight"), before))
        y.backward(inputs(16, 32, seed=5))
        results.append((bits(x.grad), gradient_bits(module)))
    assert results[0] == results[1]


BAD = pytest.mark.parametrize(
    ("backend", "bad", "hot"),
    [
        *itertools.product(("torch",), (float("inf"), float("-inf"), float("nan")), (False, True)),
        ("reference", float("nan"), True),
        ("triton", float("-inf"), False),
        ("triton", float("nan"), True),
    ],
)


# Values --------------------------------------------------------------------------------------------


@BAD
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


@BAD
@pytest.mark.slow
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
        manager.slot("", role).set_scale(scale)
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


def test_alignment_that_cuda_refuses_is_refused_on_the_cpu() -> None:
    for m, k, n in ((16, 24, 16), (16, 16, 24), (17, 8, 32), (16, 1, 16)):
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
    with pytest.raises(ValueError, match="contiguous"):
        matmul_torch(bad, good, one, one, torch.float32, False)
    with pytest.raises(ValueError, match="contiguous"):  # A view that skips columns: sideways is allowed, for b only.
        matmul_torch(good, torch.zeros(32, 64).to(E4M3)[:, :32], one, one, torch.float32, False)
    b = torch.randn(32, 32).to(E4M3)
    sideways = b.t().contiguous().t()
    a = torch.randn(32, 32).to(E4M3)
    assert torch.equal(*(matmul_torch(a, each, one, one, torch.float32, False) for each in (b, sideways)))


def test_unknown_backend_is_refused() -> None:
    one, a = torch.tensor(1.0), torch.zeros(16, 16).to(E4M3)
    with pytest.raises(ValueError, match="cutlass"):
        ops.matmul(a, a, one, one, torch.float32, fast_accumulation=False, backend="cutlass")


def test_input_of_another_width_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(48, 32))
    fp8dist.prepare(model)
    for shape in ((4, 96), (2, 24), ()):
        with pytest.raises(ConfigurationError, match=r"0: expected \[\.\.\., 48\]"):
            model(torch.zeros(shape))


def test_a_layer_whose_bias_alone_trains_casts_no_gradient() -> None:
    module, manager = linear(bias=True)
    module.weight.requires_grad_(False)
    module(inputs(5, 48)).sum().backward()
    assert module.bias.grad is not None
    assert roles(manager)["grad_output"] == NONE


@pytest.mark.parametrize("attached", [True, False])
def test_a_backend_that_cannot_be_is_refused_at_first_use(monkeypatch: pytest.MonkeyPatch, attached: bool) -> None:
    module, manager = linear("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    why_not_triton.cache_clear()
    with pytest.raises(ConfigurationError, match="it needs a GPU"):
        manager.attach() if attached else module(inputs(5, 48))
    why_not_triton.cache_clear()


def test_gradients_come_in_the_order_of_nn_linear() -> None:
    """DDP orders its buckets accordingly: another order changes sums of three ranks between the first step and the
    next."""
    module, _ = linear(bias=True)
    order: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    module(inputs(5, 48).requires_grad_()).sum().backward()
    assert order == ["bias", "weight"]


def test_a_recomputed_weight_is_not_kept_for_the_backward() -> None:
    """The backward has its FP8 copy, which is smaller."""
    made: list[weakref.ref[Tensor]] = []

    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            doubled = 2 * weight
            made.append(weakref.ref(doubled))
            return doubled

    module, _ = linear()
    parametrize.register_parametrization(module, "weight", Doubled())
    y = module(inputs(5, 48).requires_grad_())
    assert y.requires_grad
    assert made[-1]() is None
