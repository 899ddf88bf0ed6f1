"""Inputs and transforms that FP8 does not support: one error that names the module and ``no_fp8()``, inside of which
they work as in plain torch. Inputs that plain torch refuses are refused everywhere."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import fp8dist
from fp8dist import ConfigurationError
from tests.support.experts import Experts, Mixture
from tests.support.linear import RECIPES

Call = Callable[[nn.Module], Any]


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))


def _x(*shape: int) -> Tensor:
    return torch.randn(*shape, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def prototypes_are_quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of torch: nested and sparse tensors, create_graph, torch.jit in forward AD.
        yield


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_what_nn_linear_refuses_is_refused_in_every_mode(dtype: torch.dtype) -> None:
    plain, net = nn.Linear(32, 32), nn.Linear(32, 32)
    manager = fp8dist.prepare(net)
    x = (4 * _x(4)).to(dtype)
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    for mode in (contextlib.nullcontext, manager.recording, manager.no_fp8, autocast):
        for training in (True, False):
            net.train(training)
            with mode():
                try:
                    expected = plain(x)
                except RuntimeError:
                    with pytest.raises(ConfigurationError, match=f"expected an input in .*{str(dtype)[6:]}"):
                        net(x)
                else:
                    assert mode is autocast, "it alone converts float8"
                    assert net(x).dtype == expected.dtype


def test_grouped_products_have_the_same_limits() -> None:
    for enabled in (True, False):
        model = Mixture(Experts())
        manager = fp8dist.prepare(model, enabled=enabled)
        slots = next(iter(model.experts.fp8_products.values()))
        weight: Any = getattr(model.experts, slots.name)
        offsets = torch.full((len(weight),), 4, dtype=torch.int32)
        product = partial(fp8dist.grouped_linear, weight=weight, offsets=offsets, slots=slots)
        for mode in (contextlib.nullcontext(), manager.no_fp8(), manager.recording()):
            with mode, pytest.raises(ConfigurationError, match=rf"{slots.fqn}: expected an input in .*int64"):
                product(torch.ones(4, weight.shape[2], dtype=torch.int64))
        if not enabled:
            continue
        x = torch.randn(4, weight.shape[2], requires_grad=True)
        calls: list[tuple[Callable[[], Any], str]] = [
            (lambda x=x, of=product: torch.func.jvp(of, (x.detach(),), (x.detach(),)), "torch.func"),
            (lambda x=x, of=product: torch.autograd.grad(of(x).sum(), x, create_graph=True), "create_graph=True"),
        ]
        for call, limit in calls:
            with pytest.raises(ConfigurationError, match=rf"^{slots.fqn}: FP8 .*{limit}.*no_fp8\(\)"):
                call()


def _parameters(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in net.named_parameters()}


def _forward_ad(net: nn.Module) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(net(forward_ad.make_dual(_x(4), _x(4)))).tangent


def _forward_ad_of(net: nn.Module, *names: str) -> Any:
    with forward_ad.dual_level():
        duals = _parameters(net)
        duals |= {name: forward_ad.make_dual(duals[name], torch.ones_like(duals[name])) for name in names}
        return forward_ad.unpack_dual(torch.func.functional_call(net, duals, (_x(4),))).tangent


def _batched(net: nn.Module) -> Any:
    x = _x(4).requires_grad_()
    y = net(x)
    return torch.autograd.grad(y, x, torch.eye(32).unsqueeze(1).expand(32, 4, 32), is_grads_batched=True)


def _vmap_of_a_backward(net: nn.Module) -> Any:
    x = _x(4).requires_grad_()
    y = net(x)
    return torch.vmap(lambda v: torch.autograd.grad(y, x, v)[0])(torch.eye(32).unsqueeze(1).expand(32, 4, 32))


def _penalty(net: nn.Module, squared: bool) -> Any:
    x = _x(4).requires_grad_()
    y = net(x).square() if squared else net(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), list(net.parameters()), allow_unused=True)


def _jagged(net: nn.Module) -> Any:
    nested = torch.nested.nested_tensor([_x(3), _x(5)], layout=torch.jagged)
    return net(nested).values()


CALLS: dict[str, tuple[Call, str]] = {
    "jagged": (_jagged, "layout nested"),
    "nested": (lambda net: net(torch.nested.nested_tensor([_x(3), _x(5)])).to_padded_tensor(0.0), "layout nested"),
    "sparse": (lambda net: net[0](_x(4).to_sparse()), "layout sparse_coo"),
    "vmap": (lambda net: torch.vmap(net)(_x(4, 8)), "vmap"),
    "func.grad": (
        lambda net: torch.func.grad(lambda p: torch.func.functional_call(net, p, (_x(4),)).sum())(_parameters(net)),
        "torch.func",
    ),
    "func.jvp": (lambda net: torch.func.jvp(net, (_x(4),), (_x(4),)), "torch.func"),
    "forward AD": (_forward_ad, "forward-mode"),
    "forward AD of weights": (lambda net: _forward_ad_of(net, "0.weight", "2.weight"), "forward-mode"),
    "forward AD of a bias": (lambda net: _forward_ad_of(net, "2.bias"), "forward-mode"),
    "is_grads_batched": (_batched, "is_grads_batched=True"),
    "vmap of a backward": (_vmap_of_a_backward, "is_grads_batched=True"),
    "vectorised jacobian": (
        lambda net: torch.autograd.functional.jacobian(lambda x: net(x).sum(0), _x(1), vectorize=True),
        "vectorize=True",
    ),
    "gradient penalty": (lambda net: _penalty(net, True), "create_graph=True"),
    # The last layer's incoming gradient is constant: torch's once_differentiable returned None for its weight.
    "gradient penalty of a sum": (lambda net: _penalty(net, False), "create_graph=True"),
    "hessian": (lambda net: torch.autograd.functional.hessian(lambda x: net(x).sum(), _x(1)), "create_graph=True"),
}


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value or ()
    return [tensor for item in items if item is not None for tensor in _tensors(item)]


SLOW = ("jagged", "func.jvp")
"""Calls for which torch imports much."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CALLS])
def test_what_fp8_does_not_support_is_one_error_and_works_in_no_fp8(name: str) -> None:
    call, limit = CALLS[name]
    plain = _net()
    expected = _tensors(call(plain))
    assert expected
    for recipe in RECIPES:
        net = _net()
        manager = fp8dist.prepare(net, recipe)
        for training in (True, False):
            with pytest.raises(ConfigurationError) as caught:
                call(net.train(training))
            text = str(caught.value)
            assert text.startswith(("0: FP8", "2: FP8"))
            assert limit in text
            assert "no_fp8()" in text
        with manager.no_fp8():
            made = _tensors(call(net))
        assert len(made) == len(expected)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(made, expected))


def test_a_level_of_forward_ad_without_tangents_is_none() -> None:
    net = _net()
    fp8dist.prepare(net)
    expected = net(_x(4))
    with forward_ad.dual_level():
        assert torch.equal(net(_x(4)), expected)
