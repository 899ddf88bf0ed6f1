"""Each function's derivative, its data flow, and laws that programs written by hand rely on."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from fp8dist.errors import ConfigurationError
from fp8dist.exact import arithmetic
from fp8dist.exact.field import P, reduced

Function = Callable[[Tensor], Tensor]

CLASSES = torch.tensor([1, 2, 0, -100])

MASK = torch.full((4, 4), torch.finfo(torch.float32).min).triu(1)

ELEMENTWISE: dict[str, Function] = {
    **{name: getattr(torch, name) for name in ("exp", "log", "log1p", "expm1", "sin", "cos", "tanh", "sigmoid")},
    **{name: getattr(F, name) for name in ("silu", "softplus", "gelu", "relu")},
    **{name: getattr(torch, name) for name in ("sqrt", "rsqrt", "reciprocal", "square", "neg")},
    "gelu of tanh": lambda x: F.gelu(x, approximate="tanh"),
    "third power": lambda x: x**3,
    "power -1.5": lambda x: x**-1.5,
    "difference": lambda x: 0.3 - x,
    "clamp": lambda x: x.clamp(min=1),
    "dropout": lambda x: F.dropout(x, 0.1) * 2,
}

REDUCING: dict[str, Function] = {
    "mean": lambda x: x.mean(-1),
    "mean of all": lambda x: x.mean(),
    "var": lambda x: x.var(-1),
    "std": lambda x: x.std(-1),
    "var_mean": lambda x: torch.var_mean(x, -1)[0],
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (6,), x[0], x[1]),
    "rms_norm": lambda x: F.rms_norm(x, (6,), x[0]),
    "cross_entropy": lambda x: F.cross_entropy(x, CLASSES),
    "cross_entropy with weights": lambda x: F.cross_entropy(x, CLASSES, torch.arange(1, 7).to(x), reduction="sum"),
    "cross_entropy, smoothed": lambda x: F.cross_entropy(x, CLASSES, label_smoothing=0.1),
    "cross_entropy of probabilities": lambda x: F.cross_entropy(x, torch.eye(6)[:4].to(x)),
    "cross_entropy by names": lambda x: F.cross_entropy(input=x, target=CLASSES, weight=torch.arange(1, 7).to(x)),
    "nll_loss": lambda x: F.nll_loss(x, CLASSES, reduction="none"),
    "mse_loss": lambda x: F.mse_loss(x, x.detach().flip(0)),
    "cumsum": lambda x: x.cumsum(-1),
    "quotient": lambda x: x / x.sum(-1, keepdim=True),
    "product": lambda x: x @ x.T,
    "linear": lambda x: F.linear(x, x, x[:, 0]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    "attention with a mask": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=MASK),
    "max": lambda x: x.max(-1).values,
    "embedding": lambda x: F.embedding(torch.tensor([0, 0, 3]), x),
    "index": lambda x: x[:, torch.tensor([0, 0, 1])],
}

FUNCTIONS = {**ELEMENTWISE, **REDUCING}


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randint(2, P, shape).to(dtype)


def inner(x: Tensor, y: Tensor) -> Tensor:
    return reduced(reduced(x * y).sum())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # Forward mode loads decompositions.
@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_mode_and_reverse_mode_agree(name: str) -> None:
    """Autograd has formulas of their own for both."""
    x, tangent = numbers(4, 6), numbers(4, 6)
    with arithmetic(), forward_ad.dual_level():
        out = forward_ad.unpack_dual(FUNCTIONS[name](forward_ad.make_dual(x, tangent)))
    cotangent = numbers(*out.primal.shape)
    x.requires_grad_()
    with arithmetic():
        (grad,) = torch.autograd.grad(FUNCTIONS[name](x), x, cotangent)
    assert grad.any()
    assert inner(out.tangent, cotangent) == inner(grad, tangent)


@pytest.mark.parametrize("name", sorted({*FUNCTIONS} - {"clamp", "max", "relu"}))
def test_the_same_elements_reach_the_same_elements(name: str) -> None:
    """Perturb each element, in numbers and in residues. (What compares depends on the values.)"""

    def flow(x: Tensor) -> Tensor:
        out = FUNCTIONS[name](x)
        reached = []
        for index in range(x.numel()):
            changed = x.clone()
            changed.view(-1)[index] += 1
            reached.append(FUNCTIONS[name](changed).flatten() != out.flatten())
        return torch.stack(reached)

    if name == "dropout":
        expected = torch.eye(24, dtype=torch.bool)
    else:
        expected = flow(torch.rand(4, 6, dtype=torch.float64) + 0.5)
    with arithmetic():
        found = flow(numbers(4, 6, dtype=torch.float32) % (P // 4))
    assert torch.equal(found, expected)


def test_the_derivative_of_gelu_is_that_of_its_cubic() -> None:
    """A cubic's derivative is a combination of its differences."""
    x = numbers(20).requires_grad_()
    with arithmetic():
        F.gelu(x).sum().backward()
        points = [F.gelu(x.detach() + step) for step in (-2, -1, 1, 2)]
        expected = (points[0] - 8 * points[1] + 8 * points[2] - points[3]) / 12
    assert torch.equal(x.grad, expected)


def test_functions_and_the_same_functions_by_hand_agree() -> None:
    """Values and gradients: a parallel job may fuse what one process computes op by op, and the reverse."""

    def norm(x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-5)

    def entropy(x: Tensor) -> Tensor:
        shifted = x - x.amax(-1, keepdim=True)
        losses = shifted.exp().sum(-1).log() - shifted.gather(1, CLASSES.clamp(min=0)[:, None]).squeeze(1)
        return (losses * (CLASSES >= 0)).sum() / 3

    def attend(x: Tensor) -> Tensor:
        scores = (x @ x.T / math.sqrt(6)).masked_fill(MASK < 0, -math.inf)
        weights = torch.exp(scores - scores.max(-1, keepdim=True).values)
        return weights / weights.sum(-1, keepdim=True) @ x

    pairs: list[tuple[Function, Function]] = [
        (lambda x: F.layer_norm(x, (6,)), norm),
        (lambda x: F.rms_norm(x, (6,), eps=1e-5), lambda x: x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()),
        (lambda x: F.cross_entropy(x, CLASSES), entropy),
        (lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True)[0], attend),
        (F.silu, lambda x: x * x.sigmoid()),
    ]
    for function, by_hand in pairs:
        x = numbers(4, 6, dtype=torch.float32).requires_grad_()
        with arithmetic():
            values, others = function(x), by_hand(x)
            assert torch.equal(values, others)
            cotangent = numbers(*values.shape, dtype=torch.float32)
            assert torch.equal(*(torch.autograd.grad(out, x, cotangent)[0] for out in (values, others)))


def test_complex_products_rotate() -> None:
    """As rotary embeddings with a complex table do; the table becomes residues at first use."""
    table = torch.polar(torch.ones(3), torch.rand(3))
    x = numbers(2, 6, dtype=torch.float32).requires_grad_()
    with arithmetic():
        out = torch.view_as_real(torch.view_as_complex(x.reshape(2, 3, 2)) * table)
        parts = torch.view_as_real(table * torch.ones(3, dtype=torch.complex64))
        a, b = x.reshape(2, 3, 2).unbind(-1)
        cos, sin = parts.unbind(-1)
        by_hand = torch.stack([a * cos - b * sin, a * sin + b * cos], -1)
        assert torch.equal(out, by_hand)
        cotangent = numbers(2, 3, 2, dtype=torch.float32)
        assert torch.equal(*(torch.autograd.grad(y, x, cotangent)[0] for y in (out, by_hand)))


def test_overlaps_add_up() -> None:
    """The backward of unfold adds where windows overlap; scatter with reduce is refused."""
    x = numbers(6).requires_grad_()
    cotangent = numbers(5, 2)
    with arithmetic():
        (grad,) = torch.autograd.grad(x.unfold(0, 2, 1), x, cotangent)
        with pytest.raises(ConfigurationError, match="no rule for it with reduce"):
            numbers(4).scatter_(0, torch.tensor([0, 0]), numbers(2), reduce="multiply")
    assert grad[1] == reduced(cotangent[0, 1] + cotangent[1, 0])


def test_grouped_products_are_those_of_each_group() -> None:
    x, weights = numbers(8, 16, dtype=torch.float32).requires_grad_(), numbers(3, 16, 16).float().requires_grad_()
    cotangent = numbers(8, 16, dtype=torch.float32)
    cotangent[7:] = 0  # A row of padding.
    with arithmetic():
        grouped = F.grouped_mm(x, weights, offs=torch.tensor([2, 2, 7], dtype=torch.int32))
        by_hand = torch.cat([x[:2] @ weights[0], x[2:7] @ weights[2], torch.zeros(1, 16)])
        grads = [torch.autograd.grad(y, (x, weights), cotangent) for y in (grouped, by_hand)]
    assert torch.equal(grouped, by_hand)
    assert all(map(torch.equal, *grads))
