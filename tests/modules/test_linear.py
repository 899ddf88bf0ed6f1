"""FP8Linear: autocast, shapes, strides, what is not computed, bad values, and refusals. Which bytes it multiplies is in
``test_recipe_values.py``."""

from __future__ import annotations

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
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from fp8dist.errors import ConfigurationError
from fp8dist_kernels import direct, ops
from fp8dist_kernels.backends import why_not_triton
from fp8dist_kernels.reference.casts import add_up
from fp8dist_kernels.reference.torch_matmuls import matmul_torch
from tests.support.linear import BACKENDS, E4M3, E5M2, NONE, amax, assert_product, dequantised, inputs, linear, roles
from tests.support.states import saved_of
from tests.support.training import bits, gradient_bits

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("tokens", "dtype"), [(1, torch.float32), (16, torch.float16), (17, torch.bfloat16), (17, torch.float32)]
)
def test_three_products_of_a_cold_module(backend: str, tokens: int, dtype: torch.dtype) -> None:
    module, _ = linear(backend, dtype=dtype)
    x = inputs(tokens, 48).to(dtype).requires_grad_()
    dy = (inputs(tokens, 32, seed=3) * 1e-3).to(dtype)
    y = module(x)
    y.backward(dy)
    assert x.grad is not None
    assert y.dtype == x.grad.dtype == module.weight.grad.dtype == dtype  # type: ignore[union-attr]
    qx, qw, qdy = dequantised(x, E4M3), dequantised(module.weight, E4M3), dequantised(dy, E5M2)
    assert_product(y, qx, qw)
    assert_product(x.grad, qdy, qw.t())
    assert_product(module.weight.grad, qdy.t(), qx.t())  # type: ignore[arg-type]


@pytest.mark.parametrize("fast", [None, (), ("fprop",), ("dgrad",), ("wgrad",), ("fprop", "dgrad", "wgrad")])
@pytest.mark.parametrize("kind", [DelayedScaling, CurrentScaling, RowwiseScaling, BlockScaling])
def test_format_accumulation_and_backend_reach_each_product(kind: Any, fast: tuple[str, ...] | None) -> None:
    """``fast``: of the recipe's GEMMs; None: the default. Blocks have no choice: never."""
    if kind is BlockScaling and fast is not None:
        return
    recipe = kind() if fast is None else kind(fast_accumulation=fast, format="hybrid" if "dgrad" in fast else "e4m3")
    module = nn.Linear(48, 32)
    fp8dist.prepare(module, recipe, backend="reference")
    with mock.patch.object(direct, "matmul", wraps=direct.matmul) as spy:
        module(inputs(8, 48).requires_grad_()).sum().backward()
    expected = {"fprop": (8, 32), "dgrad": (8, 48), "wgrad": (32, 48)}
    gradient = E5M2 if recipe.format == "hybrid" else E4M3
    default = () if kind is BlockScaling else ("fprop",)
    for call, (gemm, shape) in zip(spy.mock_calls, expected.items(), strict=True):
        a, b = call.args[:2]
        assert (a.shape[0], b.shape[0]) == shape
        assert (a.dtype, b.dtype) == (E4M3 if gemm == "fprop" else gradient, E4M3)
        assert call.kwargs["fast_accumulation"] == (gemm in (default if fast is None else fast))
        assert call.kwargs["backend"] == "reference"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias(dtype: torch.dtype) -> None:
    with_bias, _ = linear(bias=True, dtype=dtype)
    without, _ = linear()
    without.weight.data.copy_(with_bias.weight)
    x, dy = inputs(5, 48).to(dtype), inputs(5, 32, seed=3).to(dtype)
    y = with_bias(x)
    y.backward(dy)
    assert torch.equal(y, (without(x.float()) + with_bias.bias).to(dtype)), "it is added before the result is rounded"
    assert with_bias.bias.grad is not None
    assert torch.equal(with_bias.bias.grad, add_up(dy, dtype)), "rounded once"
    torch.testing.assert_close(with_bias.bias.grad, dy.double().sum(0).to(dtype))


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
    assert torch.equal(shaped.grad.reshape(-1, 48), x.grad)  # type: ignore[arg-type]
    assert gradient_bits(module) == gradient_bits(flat)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inside", [False, True])
def test_torch_autocast(backend: str, inside: bool) -> None:
    """Same numbers as with a manually cast input; gradients have their tensors' dtypes. ``inside``: the backward is
    called inside the context, as some users do."""
    module, manager = linear(backend, bias=True)
    by_hand, hand_manager = linear(backend, bias=True)
    x, dy = inputs(7, 48).requires_grad_(), inputs(7, 32, seed=3).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
        if inside:
            y.backward(dy)
    if not inside:
        y.backward(dy)
    cast = x.detach().bfloat16().requires_grad_()
    expected = by_hand(cast)
    expected.backward(dy)
    assert y.dtype == torch.bfloat16
    assert bits(y) == bits(expected)
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert torch.equal(x.grad, cast.grad.float())  # type: ignore[union-attr]
    assert module.weight.grad.dtype == module.bias.grad.dtype == torch.float32  # type: ignore[union-attr]
    assert gradient_bits(module) == gradient_bits(by_hand)
    # In the weight's precision, without rounding to bfloat16 first.
    assert_product(module.weight.grad, dequantised(dy, E5M2).t(), dequantised(cast, E4M3).t())  # type: ignore[arg-type]
    assert roles(manager) == roles(hand_manager)
    assert roles(manager)["input"] == amax(cast)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 48), (2, 0, 48)])
def test_no_tokens(backend: str, shape: tuple[int, ...]) -> None:
    module, manager = linear(backend, bias=True)
    x = torch.zeros(shape, requires_grad=True)
    y = module(x)
    assert y.shape == (*shape[:-1], 32)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape
    assert torch.equal(module.weight.grad, torch.zeros(32, 48))  # type: ignore[arg-type]
    assert torch.equal(module.bias.grad, torch.zeros(32))  # type: ignore[arg-type]
    assert roles(manager) == {"input": NONE, "weight": amax(module.weight), "grad_output": NONE}
    manager.step()
    commits = dict(zip((s.role for s in manager.slots), saved_of(manager)["counters"][0].tolist()))
    assert commits == {"input": 0, "weight": 1, "grad_output": 0}


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33])
def test_padding_changes_no_amax_and_no_gradient(tokens: int) -> None:
    """The transposed copies are padded to 16 tokens; a module that receives the zeros explicitly must agree."""
    short, manager = linear("reference")
    padded, _ = linear("reference")
    x, dy = inputs(tokens, 48), inputs(tokens, 32, seed=3)
    rest = (0, 0, 0, -tokens % 16)
    short(x).backward(dy)
    padded(F.pad(x, rest)).backward(F.pad(dy, rest))
    assert gradient_bits(short) == gradient_bits(padded)
    assert roles(manager) == {"input": amax(x), "weight": amax(short.weight), "grad_output": amax(dy)}


@pytest.mark.parametrize(
    ("trained", "matmuls", "recorded"),
    [(("weight",), 1, True), (("input",), 1, True), (("input", "weight"), 2, True), (("bias",), 0, False)],
)
def test_gradients_that_nobody_needs_cost_nothing(trained: tuple[str, ...], matmuls: int, recorded: bool) -> None:
    """``matmuls`` in the backward. ``recorded``: the gradient is cast."""
    module, manager = linear(bias=True)
    whole, _ = linear(bias=True)
    x, again = inputs(8, 48).requires_grad_("input" in trained), inputs(8, 48).requires_grad_()
    module.weight.requires_grad_("weight" in trained)
    y, dy = module(x), inputs(8, 32, seed=3)
    with mock.patch.object(direct, "matmul", wraps=direct.matmul) as spy:
        y.backward(dy)
    assert spy.call_count == matmuls
    whole(again).backward(dy)
    found = {"input": x.grad, "weight": module.weight.grad}
    for name, expected in (("input", again.grad), ("weight", whole.weight.grad)):
        assert (found[name] is None) == (name not in trained)
        assert found[name] is None or torch.equal(found[name], expected)  # type: ignore[arg-type]
    torch.testing.assert_close(module.bias.grad, whole.bias.grad)
    gradient = amax(dy) if recorded else NONE
    assert roles(manager) == {"input": amax(x), "weight": amax(module.weight), "grad_output": gradient}


def test_several_forwards_before_one_backward() -> None:
    """Each graph keeps its own bytes; amaxes are the maximum of all calls; gradients add up."""
    module, manager = linear()
    xs = [inputs(8, 48, seed=s) * s for s in (3, 1, 2)]
    dys = [inputs(8, 32, seed=10 + s) for s in (3, 1, 2)]
    expected = torch.zeros(32, 48)
    for x, dy in zip(xs, dys):
        alone, _ = linear()
        alone(x).backward(dy)
        expected += alone.weight.grad
    torch.autograd.backward([module(x) for x in xs], dys)
    # Autograd may add the three in another order: float32 addition of three terms, with two roundings.
    torch.testing.assert_close(module.weight.grad, expected, rtol=1e-6, atol=1e-6)
    assert roles(manager)["input"] == max(map(amax, xs))
    assert roles(manager)["grad_output"] == max(map(amax, dys))


def test_gradients_of_tied_weights_add() -> None:
    model = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(2))
    model[1].weight = model[0].weight
    manager = fp8dist.prepare(model)
    x, z = inputs(16, 32), inputs(16, 32, seed=5) * 4
    (model[0](x).sum() + 2 * model[1](z).sum()).backward()
    ones = torch.ones(16, 32, dtype=torch.float64)
    exact = ones.t() @ dequantised(x, E4M3) + 2 * ones.t() @ dequantised(z, E4M3)
    torch.testing.assert_close(model[0].weight.grad.double(), exact, rtol=1e-5, atol=1e-4)
    manager.slot("1", "weight").set_scale(3.0)
    assert float(manager.slot("0", "weight").scale) == 3.0


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
    for layout in (Tensor.contiguous, lambda x: x):
        dy, x = layout(make()), layout(inputs(96, 16, seed=8).t()[:, ::2])
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
        results.append((bits(x.grad), gradient_bits(module)))  # type: ignore[arg-type]
    assert results[0] == results[1]


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


@pytest.mark.parametrize(
    ("backend", "bad", "hot"),
    [
        *(("torch", bad, hot) for bad in (INF, -INF, NAN) for hot in (False, True)),
        *(("reference", NAN, True), ("triton", -INF, False), ("triton", NAN, True)),
    ],
)
@pytest.mark.parametrize("where", ["input", "grad_output"])
def test_a_bad_value_stays_visible_where_it_belongs(backend: str, bad: float, hot: bool, where: str) -> None:
    module, manager = linear(backend)
    if hot:
        module(inputs(8, 48).requires_grad_()).sum().backward()
        manager.step()
        module.weight.grad = None
    x, dy = inputs(8, 48, seed=4), inputs(8, 32, seed=5)
    (x if where == "input" else dy)[2, 5] = bad
    x.requires_grad_()
    y = module(x)
    y.backward(dy)
    assert x.grad is not None
    assert module.weight.grad is not None
    token, wgrad = (y, module.weight.grad.t()) if where == "input" else (x.grad, module.weight.grad)
    for affected, line in ((token, 2), (wgrad, 5)):
        finite = affected.isfinite()
        assert not finite[line].any()
        assert finite[torch.arange(len(finite)) != line].all()
    assert (x.grad if where == "input" else y).isfinite().all()
    assert not torch.tensor(roles(manager)[where]).isfinite()


@pytest.mark.parametrize("backend", BACKENDS)
def test_finite_values_beyond_the_format_saturate(backend: str) -> None:
    module, manager = linear(backend)
    for role in ("input", "weight", "grad_output"):
        manager.slot("", role).set_scale(1.0)
    with torch.no_grad():
        module.weight.fill_(1.0)
    x = torch.zeros(1, 48)
    x[0, 0], x[0, 1] = 1e6, -3e38
    x.requires_grad_()
    y = module(x)
    assert torch.equal(y, torch.zeros(1, 32))  # 448 - 448
    y.backward(torch.full((1, 32), 1e30))
    assert torch.equal(x.grad, torch.full((1, 48), 32 * 57344.0))  # type: ignore[arg-type]
    expected = torch.tensor([[57344.0 * 448, -57344.0 * 448]]).expand(32, 2)
    assert torch.equal(module.weight.grad[:, :2], expected)  # type: ignore[index]
    assert roles(manager)["input"] == amax(x)


def test_what_cuda_refuses_is_refused_on_the_cpu() -> None:
    one, good = torch.tensor(1.0), torch.zeros(32, 32).to(E4M3)

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        return matmul_torch(a, b, one, one, torch.float32, False)

    for m, k, n in ((16, 24, 16), (16, 16, 24), (17, 8, 32), (16, 1, 16)):
        a, b = torch.zeros(m, k).to(E4M3), torch.zeros(n, k).to(E4M3)
        with pytest.raises(ValueError, match="multiples of 16"):
            multiply(a, b)
        for backend in ("torch", "auto"):
            with pytest.raises(ValueError, match="multiples of 16"):
                ops.matmul(a, b, one, one, torch.float32, fast_accumulation=False, backend=backend)
    # b may lie sideways; a view that skips columns may not.
    for a, b in ((good.t(), good), (good, torch.zeros(32, 64).to(E4M3)[:, :32])):
        with pytest.raises(ValueError, match="contiguous"):
            multiply(a, b)
    a, b = torch.randn(32, 32).to(E4M3), torch.randn(32, 32).to(E4M3)
    assert torch.equal(multiply(a, b), multiply(a, b.t().contiguous().t()))
    with pytest.raises(ValueError, match="cutlass"):
        ops.matmul(good, good, one, one, torch.float32, fast_accumulation=False, backend="cutlass")


@pytest.mark.parametrize("shape", [(4, 96), (2, 24), (2, 2, 16), ()])
def test_input_of_another_width_is_refused_by_name(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Linear(48, 32))
    fp8dist.prepare(model)
    with pytest.raises(ConfigurationError, match=r"0: expected \[\.\.\., 48\]"):
        model(torch.zeros(shape))


@pytest.mark.parametrize("attached", [True, False])
def test_a_backend_that_cannot_be_is_refused_at_first_use(monkeypatch: pytest.MonkeyPatch, attached: bool) -> None:
    module, manager = linear("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    why_not_triton.cache_clear()
    with pytest.raises(ConfigurationError, match="it needs a GPU"):
        manager.attach() if attached else module(inputs(5, 48))
    why_not_triton.cache_clear()
