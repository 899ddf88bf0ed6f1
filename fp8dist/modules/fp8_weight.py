"""FP8Weight: a weight that FSDP has gathered in FP8, as modules see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fp8dist.errors import ConfigurationError
from fp8dist_kernels import BLOCK, MX_BLOCK
from fp8dist_kernels.reference.blocks import blocks_along
from fp8dist_kernels.reference.casts import dequantize

_aten = torch.ops.aten
_TRANSPOSE = _aten.transpose.int
_SAME_TENSOR = frozenset(
    {
        _aten.alias.default,
        _aten.as_strided.default,
        _aten.detach.default,
        _aten.view.default,
    }
)


@dataclass
class Gathered:
    """The data of an FP8Weight and of all its views. Shared, because autograd may keep a view past the next gather,
    which must then show what was gathered last.

    All bytes lie as the weight is stored. ``rows`` is the copy that fprop multiplies with. MX has a second one for
    dgrad, ``columns``, with blocks along the other dim; None where the last gather, of a forward, did not bring it.
    """

    rows: Tensor
    inv_scale: Tensor
    columns: Tensor | None = None
    columns_inv_scale: Tensor | None = None


class FP8Weight(Tensor):
    """A weight [out_features, in_features], or E experts' weights [E, out_features, in_features], that looks like a
    tensor in high precision but is stored as FP8 bytes with an inverse scale.

    FP8Linear and FP8Experts read the bytes. Views of the same shape, and ``mT`` of experts' weights, are FP8Weights of
    the same bytes. Any other operation gets the dequantised weight, a new tensor in ``dtype``. Writing to an FP8Weight
    raises ConfigurationError, because the bytes are a copy that the next gather overwrites.
    """

    _gathered: Gathered
    _flipped: bool

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, gathered: Gathered, dtype: torch.dtype, flipped: bool = False) -> FP8Weight:
        rows = gathered.rows.mT if flipped else gathered.rows
        made: FP8Weight = Tensor._make_wrapper_subclass(
            cls, rows.shape, strides=rows.stride(), dtype=dtype, device=rows.device
        )
        return made

    def __init__(self, gathered: Gathered, dtype: torch.dtype, flipped: bool = False) -> None:
        """``flipped``: the last two dims of the gathered weight are transposed."""
        self._gathered, self._flipped = gathered, flipped

    @property
    def rows(self) -> Tensor:
        """FP8 [out_features, in_features] or [E, out_features, in_features], a view of FSDP's buffer, which FSDP frees
        and refills."""
        return self._gathered.rows.mT if self._flipped else self._gathered.rows

    @property
    def inv_scale(self) -> Tensor:
        """Inverse scales of the bytes, float32: 0-d, or one per block of 128 x 128 [⌈m/128⌉, ⌈k/128⌉], or of MX one per
        block of 1 x 32, E8M0 [m, k/32]; for experts with a leading dim E."""
        inv_scale = self._gathered.inv_scale
        return inv_scale.mT if self._flipped and inv_scale.ndim > 1 else inv_scale

    def refilled(self, gathered: Gathered) -> None:
        """Show what FSDP has gathered now, here and in all views."""
        vars(self._gathered).update(vars(gathered))

    def for_dgrad(self) -> tuple[Tensor, Tensor]:
        """Return what dgrad multiplies with: (FP8 [(E,) in_features, out_features], any strides; inverse scales).

        Raises:
            ConfigurationError: MX, and the last gather did not bring this copy.
        """
        held = self._gathered
        fp8, inv_scale = held.rows, held.inv_scale
        if is_mx(inv_scale):
            if held.columns is None or held.columns_inv_scale is None:
                raise ConfigurationError(
                    "MXFP8Scaling: this backward uses a weight as FSDP2 gathered it for a forward, without the copy "
                    "for dgrad, which the gather of a backward brings: leave set_unshard_in_backward() at True, or "
                    "leave fp8_all_gather out"
                )
            fp8, inv_scale = held.columns, held.columns_inv_scale
        if self._flipped:
            return fp8, inv_scale
        return fp8.mT, inv_scale.mT if inv_scale.ndim > 1 else inv_scale

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FP8Weight({tuple(self.shape)}, {self.rows.dtype}, stands for {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        if is_mx(self.inv_scale):  # A graph would keep the bytes of the forward for the backward.
            raise ConfigurationError(
                "torch.compile does not support weights that FSDP2 gathers in MXFP8: leave fp8_all_gather out"
            )
        return ["rows", "inv_scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], dtype: torch.dtype, outer_size: Any, outer_stride: Any
    ) -> FP8Weight:
        return FP8Weight(Gathered(inner["rows"], inner["inv_scale"]), dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in _SAME_TENSOR and _keeps_shape(function, args):
            weight: FP8Weight = args[0]
            return FP8Weight(weight._gathered, weight.dtype, weight._flipped)
        if function is _TRANSPOSE and args[0].ndim == 3 and {dim % 3 for dim in args[1:]} == {1, 2}:
            return FP8Weight(args[0]._gathered, args[0].dtype, not args[0]._flipped)
        if any(isinstance(tensor, FP8Weight) for tensor in _written(function, args, kwargs)):
            raise ConfigurationError(
                "a weight that FSDP gathered in FP8 is a copy and cannot be written to: write to the sharded "
                "parameter, outside of forward and backward"
            )
        args, kwargs = tree_map_only(FP8Weight, FP8Weight.high_precision, (args, kwargs))
        return function(*args, **kwargs)

    def high_precision(self) -> Tensor:
        """Return the dequantised weight, a new tensor in ``dtype``. Not differentiable."""
        with torch.no_grad():
            return dequantize(self.rows, spread(self.inv_scale.float(), self.rows.shape)).to(self.dtype)


class _Dequantise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: FP8Weight) -> Tensor:
        return weight.high_precision()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def dequantised(weight: FP8Weight) -> Tensor:
    """Return the dequantised weight in ``weight.dtype``. Differentiable: the gradient passes through unchanged."""
    made: Tensor = _Dequantise.apply(weight)
    return made


def is_mx(inv_scale: Tensor) -> bool:
    """True if these inverse scales belong to MX blocks."""
    return inv_scale.dtype == torch.float8_e8m0fnu


def spread(inv_scale: Tensor, shape: torch.Size) -> Tensor:
    """Return inverse scales in a shape that broadcasts to a weight of this shape.

    Args:
        inv_scale: of a weight, 0-d, or one per row, per block of 1 x 32, or per block of 128 x 128. Of E experts'
            weights, the same with a leading dim E.
        shape: [m, k], or [E, m, k].
    """
    if inv_scale.ndim < len(shape):
        return inv_scale if len(shape) == 2 else inv_scale[:, None, None]
    if inv_scale.shape[-2:] == (shape[-2], 1):
        return inv_scale
    for dim in (-2, -1):
        length, blocks = shape[dim], inv_scale.shape[dim]
        # Sizes that give the same number of blocks give the same blocks.
        size = next(size for size in (1, MX_BLOCK, BLOCK) if blocks_along(length, size) == blocks)
        inv_scale = inv_scale.repeat_interleave(size, dim).narrow(dim, 0, length)
    return inv_scale


def _written(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an op writes to."""
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from given if isinstance(given, (list, tuple)) else (given,)


def _keeps_shape(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """True if a view op returns the weight with its own shape (and, for as_strided, its own strides and offset)."""
    weight = args[0]
    if function is _aten.as_strided.default:
        offset = args[3] if len(args) > 3 else 0
        return tuple(args[1]) == tuple(weight.shape) and tuple(args[2]) == weight.stride() and not offset
    return len(args) < 2 or tuple(args[1]) == tuple(weight.shape)
