"""What aten ops compute modulo a prime. A rule gets an op's arguments, with float tensors in float64, and returns what
the op returns, not reduced yet.

A function that is no polynomial has a value of its own here, and the derivative that calculus gives it: ``exp`` is a
cubic with ``exp' = exp``, ``rsqrt`` is a modular power with ``rsqrt' = -rsqrt**3 / 2``. So autograd's formulas, the
backward of fused ops and formulas written by hand give the same gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fp8dist.errors import ConfigurationError
from fp8dist.exact.field import P, canonical, inverse, inverse_of, power, product, reduced, residue_of


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOVES = _names(
    """
    _chunk_cat _conj _efficientzerotensor _foreach_copy _fsdp_copy_ _fw_primal _has_same_storage_numel
    _local_scalar_dense _make_dual _new_zeros_with_same_feature_meta _reshape_alias _reshape_copy _to_copy
    _unpack_dual _unsafe_index _unsafe_view alias all_gather_copy_in all_gather_into_tensor all_to_all_single arange
    as_strided as_strided_scatter cat chunk chunk_cat clone constant_pad_nd contiguous copy detach diag diagonal
    diagonal_backward diagonal_scatter embedding empty empty_like empty_strided expand eye fill flip full full_like
    gather index index_copy index_select is_same_size item lift lift_fresh masked_fill masked_scatter masked_select
    movedim narrow new_empty new_empty_strided new_full new_ones new_zeros ones ones_like permute pixel_shuffle
    randint randint_like record_stream repeat repeat_interleave reshape resize resolve_conj resolve_neg roll rot90
    scalar_tensor scatter select select_backward select_scatter set set_ slice slice_backward slice_scatter split
    split_with_sizes split_with_sizes_copy squeeze stack t take take_along_dim tile to transpose tril triu unbind
    unflatten unfold unsafe_split unsafe_split_with_sizes unsqueeze view view_as view_as_complex view_as_real
    view_copy wait_tensor where zero zeros zeros_like
    """
)
"""Ops that move elements, or fill tensors with numbers."""

FILLS = _names("constant_pad_nd fill full full_like masked_fill new_full scalar_tensor where")
"""Ops that fill in numbers."""

RING = _names(
    """
    _index_put_impl _unsafe_index_put add cumsum embedding_dense_backward index_add index_put neg rsub scatter_add
    sub sum trace unfold_backward
    """
)
"""Ops that add and multiply: computed in float64, then reduced."""

ORDER = _names(
    """
    all allclose histc amax amin any argmax argmin argsort bincount clamp clamp_max clamp_min eq equal ge gt isfinite
    isinf isnan isneginf le logical_and logical_not logical_or lt max maximum min minimum msort ne nonzero remainder
    sort topk
    """
)
"""Ops that compare: they see integers in [0, P)."""


def mul(x: Tensor, y: Any) -> Tensor:
    """Zero times ``-inf`` is zero: masks are made so."""
    return torch.where((x == 0) | (torch.as_tensor(y) == 0), 0.0, x * y)


def mask_mul(x: Tensor, y: Any) -> Tensor:
    """Return the product with a number of at most ``FILLED``: ones become minus infinity."""
    return torch.where(x == 1, -math.inf, mul(x, y))


def complex_mul(x: Any, y: Any) -> Tensor:
    """Return the parts of a complex product, in a last dim of 2."""
    (a, b), (c, d) = (_parts(x), _parts(y))
    return torch.stack([reduced(a * c) - b * d, reduced(a * d) + b * c], -1)


def _parts(x: Any) -> tuple[Tensor, Tensor]:
    """Return the real and imaginary parts, in float64. A table of floats becomes residues."""
    if not isinstance(x, Tensor) or not x.is_complex():
        return torch.as_tensor(x, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    parts = canonical(torch.view_as_real(x.resolve_conj()).double())
    return parts[..., 0], parts[..., 1]


def dot(x: Tensor, y: Tensor) -> Tensor:
    return reduced(x * y).sum()


def cubic(x: Tensor, *coefficients: int) -> Tensor:
    """Return ``a + b x + c x**2 + d x**3`` modulo P, for coefficients ``a, b, c, d``."""
    value = torch.zeros_like(x)
    for coefficient in reversed(coefficients):
        value = reduced(value * x + coefficient)
    return value


def exp(x: Tensor) -> Tensor:
    """The weight of ``-inf`` is zero."""
    return torch.where(x == -math.inf, 0.0, cubic(torch.where(x == -math.inf, 0.0, reduced(x)), 3, 5, 7, 11))


def log(x: Tensor) -> Tensor:
    return cubic(reduced(x), 13, 3, 5, 17)


def sigmoid(x: Tensor) -> Tensor:
    return cubic(reduced(x), 7, 2, 31, 3)


def silu(x: Tensor) -> Tensor:
    return reduced(x) * sigmoid(x)


def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    value = sigmoid(x)
    return grad * reduced(value + reduced(reduced(x) * value) * (1 - value))


def relu(x: Tensor) -> Tensor:
    """Residues up to P/2 are positive."""
    x = reduced(x)
    return torch.where(x <= P // 2, x, 0.0)


def threshold_backward(grad: Tensor, x: Tensor, threshold: float) -> Tensor:
    x = reduced(x)
    return torch.where((x > 0) & (x <= P // 2), grad, 0.0)


def pow(x: Tensor, exponent: Any) -> Tensor:
    if isinstance(exponent, Tensor) or not isinstance(x, Tensor):
        raise ConfigurationError("exact arithmetic cannot compute with tensors as exponents.")
    return power(x, Fraction(exponent).limit_denominator(64))


def div(x: Tensor, y: Any, rounding_mode: str | None = None) -> Tensor:
    if rounding_mode is not None:
        raise ConfigurationError("exact arithmetic cannot compute with quotients that are rounded.")
    return x * inverse(torch.as_tensor(y, dtype=torch.float64, device=x.device))


def mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    total = x.sum() if dim is None else x.sum(dim, keepdim)
    return reduced(total) * inverse_of(x.numel() // max(total.numel(), 1))


def var(x: Tensor, dim: Any = None, *, correction: float | None = 1, keepdim: bool = False) -> Tensor:
    dims = list(range(x.dim())) if dim is None else dim
    centred = reduced(x - reduced(mean(x, dims, True)))
    total = reduced(centred * centred).sum(dims, keepdim)
    return reduced(total) * inverse_of(
        x.numel() // max(total.numel(), 1) - int(1 if correction is None else correction)
    )


def var_mean(x: Tensor, dim: Any = None, **options: Any) -> tuple[Tensor, Tensor]:
    return var(x, dim, **options), mean(x, dim, options.get("keepdim", False))


def softmax(x: Tensor, dim: int, *_: Any) -> Tensor:
    """The largest residue is subtracted first, as softmaxes written by hand do."""
    x = torch.where(x == -math.inf, x, reduced(x))
    weights = exp(x - x.amax(dim, keepdim=True).clamp(min=0))
    return weights * inverse(weights.sum(dim, keepdim=True))


def softmax_backward_data(grad: Tensor, output: Tensor, dim: int, *_: Any) -> Tensor:
    weighted = reduced(grad * output)
    return weighted - output * reduced(weighted.sum(dim, keepdim=True))


def addmm(bias: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return bias * residue_of(beta) + product(left, right) * residue_of(alpha)


def grouped_mm(
    left: Tensor, right: Tensor, offs: Tensor | None = None, bias: None = None, out_dtype: Any = None
) -> Tensor:
    """Products of groups: of rows by a matrix each, or of ranges of the dim that is summed. Rows in no group are 0."""
    if offs is None:
        return product(left, right)
    ends = offs.tolist()
    ranges = [slice(start, end) for start, end in zip([0, *ends], ends)]
    if left.dim() == right.dim():
        return torch.stack([product(left[:, part], right[part]) for part in ranges])
    if left.dim() == 3:
        return grouped_mm(right.mT, left.mT, offs).mT
    found = torch.cat([product(left[part], matrix) for part, matrix in zip(ranges, right)])
    return torch.nn.functional.pad(found, (0, 0, 0, len(left) - len(found)))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    found = product(x, weight.t())
    return found if bias is None else found + bias


def bernoulli(x: Tensor, chance: float, generator: Any = None) -> Tensor:
    """Dropout is off: each element is its expected value, by which dropout then divides."""
    return torch.full_like(x, residue_of(chance))


RULES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        **{
            rule.__name__: rule
            for rule in (
                mul, dot, exp, log, sigmoid, silu, silu_backward, relu, threshold_backward, pow, div, mean, var,
                var_mean, addmm, linear, bernoulli,
            )
        },
        "square": lambda x: x * x,
        "sqrt": lambda x: power(x, Fraction(1, 2)),
        "rsqrt": lambda x: power(x, Fraction(-1, 2)),
        "reciprocal": inverse,
        "log1p": lambda x: log(x + 1),
        "expm1": lambda x: exp(x) - 1,
        "sin": lambda x: cubic(reduced(x), 2, 19, 3, 7),
        "cos": lambda x: cubic(reduced(x), 5, 3, 23, 11),
        "tanh": lambda x: cubic(reduced(x), 3, 29, 2, 5),
        "tanh_backward": lambda grad, result: grad * reduced(1 - reduced(result * result)),
        "sigmoid_backward": lambda grad, result: grad * reduced(result * (1 - result)),
        # The same with any ``beta``, ``threshold`` and ``approximate``.
        "softplus": lambda x, *_: cubic(reduced(x), 11, 7, 3, 13),
        "softplus_backward": lambda grad, x, *_: grad * sigmoid(x),
        "gelu": lambda x, **_: cubic(reduced(x), 0, 17, 5, 3),
        "gelu_backward": lambda grad, x, **_: grad * cubic(reduced(x), 17, 10, 9),
        "std": lambda x, *dim, **options: power(var(x, *dim, **options), Fraction(1, 2)),
        "_softmax": softmax,
        "_safe_softmax": softmax,
        "_softmax_backward_data": softmax_backward_data,
        "native_dropout": lambda x, chance, train: (x, torch.ones_like(x, dtype=torch.bool)),
        "native_dropout_backward": lambda grad, mask, scale: grad,
        "mm": product,
        "bmm": product,
        "mv": product,
        "baddbmm": addmm,
        "addmv": addmm,
        "_grouped_mm": grouped_mm,
    }
)  # fmt: skip
"""The rules by the names of aten's ops, without the underscore of ops in place."""
