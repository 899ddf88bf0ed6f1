"""FP8Linear: autocast, shapes, strides, what is not computed, bad values, and refusals. Which bytes it multiplies is in
``test_recipe_values.py``."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from fp8dist.errors import ConfigurationError
from fp8dist_kernels import direct
from fp8dist_kernels.backends import why_not_triton
from fp8dist_kernels.reference.casts import add_up
from tests.support.linear import BACKENDS, E4M3, E5M2, NONE, amax, assert_product, dequantised, inputs, linear, roles
from tests.support.states import saved_of
from tests.support.training import bits, gradient_bits


@pytest.mark.parametrize(
    ("kind", "fast"),
    [
        *((kind, None) for kind in (DelayedScaling, CurrentScaling, RowwiseScaling, BlockScaling)),
        *((kind, fast) for kind in (DelayedScaling, RowwiseScaling) for fast in ((), ("dgrad",), ("fprop", "wgrad"))),
    ],
)
def test_format_accumulation_and_backend_reach_each_product(kind: Any, fast: tuple[str, ...] | None) -> None:
    """``fast``: of the recipe's GEMMs; None: the default, which blocks do not have."""
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


@pytest.mark.parametrize(
    ("shape", "backend"),
    [
        *((shape, "torch") for shape in ((48,), (6, 48), (2, 3, 48), (1, 2, 3, 48), (2, 0, 48))),
        *(((0, 48), backend) for backend in BACKENDS),
    ],
)
def test_shapes_are_nn_linears(shape: tuple[int, ...], backend: str) -> None:
    module, manager = linear(backend, bias=True)
    flat, _ = linear(backend, bias=True)
    x = inputs(6, 48)[: math.prod(shape[:-1])].requires_grad_()
    shaped = x.detach().reshape(shape).requires_grad_()
    y, expected = module(shaped), flat(x)
    assert y.shape == (*shape[:-1], 32)
    (y * 2).sum().backward()
    (expected * 2).sum().backward()
    assert torch.equal(y.reshape(-1, 32), expected)
    assert shaped.grad.shape == shape
    assert torch.equal(shaped.grad.reshape(-1, 48), x.grad)
    assert gradient_bits(module) == gradient_bits(flat)
    if x.numel() == 0:
        assert not any(parameter.grad.any() for parameter in module.parameters())
        assert roles(manager) == {"input": NONE, "weight": amax(module.weight), "grad_output": NONE}
        manager.step()
        commits = dict(zip((s.role for s in manager.slots), saved_of(manager)["counters"][0].tolist()))
        assert commits == {"input": 0, "weight": 1, "grad_output": 0}


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
    assert torch.equal(x.grad, cast.grad.float())
    assert module.weight.grad.dtype == module.bias.grad.dtype == torch.float32
    assert gradient_bits(module) == gradient_bits(by_hand)
    # In the weight's precision, without rounding to bfloat16 first.
    assert_product(module.weight.grad, dequantised(dy, E5M2).t(), dequantised(cast, E4M3).t())
    assert roles(manager) == roles(hand_manager)
    assert roles(manager)["input"] == amax(cast)


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
        assert found[name] is None or torch.equal(found[name], expected)
    torch.testing.assert_close(module.bias.grad, whole.bias.grad)
    gradient = amax(dy) if recorded else NONE
    assert roles(manager) == {"input": amax(x), "weight": amax(module.weight), "grad_output": gradient}


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(()).expand(16, 32),
        lambda: inputs(1, 32, seed=7).expand(16, 32),
        lambda: inputs(32, 16, seed=7).t(),
        lambda: inputs(16, 64, seed=7)[:, ::2],
    ],
    ids=["expanded scalar", "expanded row", "transposed", "strided"],
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


def test_a_scale_that_changes_after_the_forward_changes_no_gradient() -> None:
    """FP8 bytes carry the inv_scale of their cast, not a view of the current one."""
    results = []
    for later in (2.0, 1.0):
        module, manager = linear()
        slots = [manager.slot("", role) for role in ("input", "weight")]
        for slot in slots:
            slot.set_scale(2.0)
        y = module(x := inputs(16, 48).requires_grad_())
        for slot in slots:
            slot.set_scale(later)
        y.backward(inputs(16, 32, seed=3))
        results.append((bits(x.grad), gradient_bits(module)))
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
    saved: list[torch.dtype] = []
    with saved_tensors_hooks(lambda x: saved.append(x.dtype) or x, lambda x: x):
        y = module(inputs(5, 48).requires_grad_())
    assert y.requires_grad
    assert made[-1]() is None
    assert saved.count(E4M3) == 2, "the input's and the weight's copy, which save_on_cpu may move"


@pytest.mark.parametrize(
    ("backend", "bad", "hot"),
    [
        *(("torch", bad, hot) for bad, hot in ((math.inf, True), (-math.inf, False), (math.nan, False))),
        *(("reference", math.nan, True), ("triton", -math.inf, False), ("triton", math.nan, True)),
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
