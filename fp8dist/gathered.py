"""FP8Weight: a weight that arrived in FP8, as FSDP's modules see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fp8dist.errors import ConfigurationError
from fp8dist.kernels.casts import dequantize

__all__ = ["FP8Weight"]

_aten = torch.ops.aten
_SAME_TENSOR = frozenset(
    {
        _aten.alias.default,
        _aten.as_strided.default,
        _aten.detach.default,
        _aten.view.default,
    }
)


class FP8Weight(Tensor):
    """Stands for a weight [out_features, in_features] in high precision; holds FP8 bytes and what they mean.

    An FP8Linear takes the bytes. Any other operation works on the dequantised weight, a new tensor in ``dtype``;
    writing to it is an error, for the bytes are a copy that the next gather overwrites.
    """

    rows: Tensor
    """FP8 [out_features, in_features], a view of FSDP's buffer, which is freed and filled again."""

    inv_scale: Tensor
    """0-d float32: what these bytes were cast with."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, rows: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> FP8Weight:
        made: FP8Weight = Tensor._make_wrapper_subclass(cls, rows.shape, dtype=dtype, device=rows.device)
        return made

    def __init__(self, rows: Tensor, inv_scale: Tensor, dtype: torch.dtype) -> None:
        self.rows, self.inv_scale = rows, inv_scale

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FP8Weight({tuple(self.shape)}, {self.rows.dtype}, stands for {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["rows", "inv_scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, Tensor], dtype: torch.dtype, outer_size: Any, outer_stride: Any
    ) -> FP8Weight:
        return FP8Weight(inner["rows"], inner["inv_scale"], dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in _SAME_TENSOR and _keeps_shape(function, args):
            weight: FP8Weight = args[0]
            return FP8Weight(weight.rows, weight.inv_scale, weight.dtype)
        if function._schema.is_mutable and any(  # type: ignore[attr-defined]
            isinstance(value, FP8Weight) and argument.alias_info is not None and argument.alias_info.is_write
            for argument, value in zip(function._schema.arguments, args)  # type: ignore[attr-defined]
        ):
            raise ConfigurationError(
                "a weight that FSDP gathered in FP8 is a copy and cannot be written to: write to the sharded "
                "parameter, outside of forward and backward"
            )
        args, kwargs = tree_map_only(FP8Weight, FP8Weight.high_precision, (args, dict(kwargs or {})))
        return function(*args, **kwargs)

    def high_precision(self) -> Tensor:
        """What the bytes stand for, as a new tensor in ``dtype``. Not differentiable."""
        with torch.no_grad():
            return dequantize(self.rows, self.inv_scale).to(self.dtype)


def _keeps_shape(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    weight = args[0]
    if function is _aten.as_strided.default:
        offset = args[3] if len(args) > 3 else 0
        return tuple(args[1]) == tuple(weight.shape) and tuple(args[2]) == weight.stride() and not offset
    return len(args) < 2 or tuple(args[1]) == tuple(weight.shape)
