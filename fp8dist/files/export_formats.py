"""The formats of exported models: their tensors, the scales that each can hold, its layouts, the
``quantization_config``, and names that safetensors or servers misread.

==========================  =====================================================================================
compressed-tensors          ``float-quantized`` of the library compressed-tensors. ``weight_scale``: [1] per tensor,
                            or [out_features, 1] per row. ``input_scale``: [1], if the recipe has delayed scales
compressed-tensors-channel  the same, always with one ``weight_scale`` per row; a scale per tensor is repeated
compressed-tensors-mxfp8    ``mxfp8-quantized`` of compressed-tensors. ``weight_scale``: E8M0 as uint8, one per 1 x 32
block                       the format of DeepSeek-V3. ``weight_scale_inv``: one per block of 128 x 128
==========================  =====================================================================================

Other scales are float32 factors by which a server multiplies FP8 values: the inverse scales of this library. No format
rounds or recomputes anything. A scale is only repeated, so a recipe with finer scales than the format's is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fp8dist.common.text import dtype_name
from fp8dist.errors import ConfigurationError
from fp8dist.files.safetensor_files import DTYPES
from fp8dist.state.recipe import By, Recipe
from fp8dist_kernels import BLOCK, MX_BLOCK
from fp8dist_kernels.reference.blocks import blocks_along

Strategy = Literal["tensor", "channel", "block", "group"]
"""The part of a weight that has a scale of its own: the whole weight, a row, a block of 128 x 128, or of 1 x 32."""

Inputs = Literal["static", "tensor", "token", "group"]
"""How a server casts inputs: with the fixed scale of the export, or with a scale from the amax of each tensor, each
token, or each 1 x 32 elements. In the format "block", servers always take a scale per 1 x 128 elements."""


class Scheme(NamedTuple):
    """How a server multiplies with a module's weight."""

    strategy: Strategy
    inputs: Inputs


@dataclass(frozen=True)
class ExportedTensor:
    """One tensor of an exported model.

    Attributes:
        role: "weight" (FP8), "weight_scale" or "input_scale" (factors by which a server multiplies the FP8 numbers:
            float32, or E8M0 as uint8), or "high" (any other tensor, exported as the model stores it).
        module: name of the module that the tensor belongs to.
        dtype, shape: those of the exported, whole tensor.
    """

    name: str
    role: Literal["weight", "weight_scale", "input_scale", "high"]
    module: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class ExportPart:
    """Tensors that come from one cast.

    Args:
        tensors: the tensors, without their data.
        read: returns their data in the same order. COLLECTIVE if they are sharded.
        linears: names of the modules whose weights are among the tensors, if these are in FP8 or belong to experts.
        scheme, recipe: those of these modules. None: the modules are in high precision.
    """

    tensors: tuple[ExportedTensor, ...]
    read: Callable[[], Sequence[Tensor]]
    linears: tuple[str, ...] = ()
    scheme: Scheme | None = None
    recipe: Recipe | None = None


FORMATS: Mapping[str, tuple[Strategy, ...]] = MappingProxyType(
    {
        "compressed-tensors": ("tensor", "channel"),
        "compressed-tensors-channel": ("channel",),
        "compressed-tensors-mxfp8": ("group",),
        "block": ("block",),
    }
)
"""By format, its layouts of scales. The first one that fits a weight is used."""

SCALE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "compressed-tensors": "weight_scale",
        "compressed-tensors-channel": "weight_scale",
        "compressed-tensors-mxfp8": "weight_scale",
        "block": "weight_scale_inv",
    }
)
"""By format, the last part of the name of a weight's scales, after the name of the module."""


_CLASSES = frozenset(base.__name__ for base in nn.Linear.__mro__)

_OF_INPUTS: Mapping[Inputs, Strategy | Literal["token"]] = MappingProxyType({"token": "token", "group": "group"})
"""By how inputs are cast, the name in compressed-tensors; others are "tensor"."""


class Grid(NamedTuple):
    """Rows and columns of the parts of a weight that have one scale each. Parts at the edges may be smaller."""

    height: int
    width: int

    def text(self, shape: Sequence[int]) -> str:
        """Return a phrase for messages: the number or size of the parts of a weight of ``shape``."""
        return "one scale" if self == tuple(shape) else f"one scale for each {self.height} x {self.width} elements"


def grid_by(recipe: Recipe, shape: Sequence[int]) -> Grid:
    """Return the parts of a weight of ``shape`` [out_features, in_features] that share a scale under a recipe."""
    rows, columns = shape
    grids = {
        "tensor": (rows, columns),
        "row": (1, columns),
        "block": (BLOCK, BLOCK),
        "mx": (1, MX_BLOCK),
        "nvfp4": (16, 16),
    }
    return Grid(*grids[recipe.by])


def inputs_of(recipe: Recipe, cold: bool) -> Inputs:
    """Return how a server casts inputs. ``cold``: no amax of inputs is known yet, so there is no scale to export."""
    if recipe.by in ("row", "mx"):
        return "token" if recipe.by == "row" else "group"
    return "static" if recipe.delayed and not cold else "tensor"


def require_e4m3(name: str, weights: str) -> None:
    """Raise ConfigurationError unless ``weights``, the FP8 format of the weights of module ``name``, is "e4m3"."""
    if weights != "e4m3":
        raise ConfigurationError(f"{name}: its weight is cast to {weights}, and servers read e4m3 only")


def strategy_of(format: str, grid: Grid, shape: Sequence[int], by: By) -> Strategy | None:
    """Return the first layout of a format that can hold the scales of a weight of ``shape`` [out_features,
    in_features] with the parts ``grid``, of a recipe ``by``. None: no layout can."""
    rows, columns = shape
    if by == "mx":  # Its casts pad rows to whole blocks, and readers know no padding.
        return "group" if columns % MX_BLOCK == 0 and "group" in FORMATS[format] else None
    whole_blocks = all(part >= size or part % BLOCK == 0 for part, size in zip(grid, shape))
    fits = {"tensor": grid == (rows, columns), "channel": grid.width >= columns, "block": whole_blocks, "group": False}
    return next((strategy for strategy in FORMATS[format] if fits[strategy]), None)


def shape_of(strategy: Strategy, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the exported scales of a weight of ``shape`` [out_features, in_features]."""
    rows, columns = shape
    if strategy == "tensor":
        return (1,)
    if strategy == "group":
        return (rows, columns // MX_BLOCK)
    return (rows, 1) if strategy == "channel" else (blocks_along(rows, BLOCK), blocks_along(columns, BLOCK))


def tensors_of(format: str, name: str, shape: Sequence[int], scheme: Scheme) -> list[ExportedTensor]:
    """Return the tensors of an FP8 weight of ``shape`` [out_features, in_features]: the weight, its scales, and the
    scale of inputs if it is fixed and the format has a place for it.

    Args:
        name: name of the module.
    """
    scale, of_scale = shape_of(scheme.strategy, shape), torch.uint8 if scheme.strategy == "group" else torch.float32
    found = [
        ExportedTensor(f"{name}.weight", "weight", name, torch.float8_e4m3fn, tuple(shape)),
        ExportedTensor(f"{name}.{SCALE_NAMES[format]}", "weight_scale", name, of_scale, scale),
    ]
    if scheme.inputs == "static" and format != "block":
        found.append(ExportedTensor(f"{name}.input_scale", "input_scale", name, torch.float32, (1,)))
    return found


def laid_out(inv_scale: Tensor, grid: Grid, strategy: Strategy, shape: Sequence[int]) -> Tensor:
    """Return inverse scales, float32, in the layout ``strategy``, with the shape of ``shape_of``; as E8M0 bytes for
    "group". Scales are repeated if the parts of ``grid`` are larger than those of the layout.

    Args:
        inv_scale: float32, one for each part of ``grid``, row by row.
        shape: shape of the weight.
    """
    parts = inv_scale.reshape(blocks_along(shape[0], grid.height), blocks_along(shape[1], grid.width))
    if strategy == "tensor":
        return parts.reshape(1)
    if strategy == "group":
        return parts.to(torch.float8_e8m0fnu).view(torch.uint8)
    rows, columns = shape_of(strategy, shape)
    steps = (1, shape[1]) if strategy == "channel" else (BLOCK, BLOCK)
    at = [torch.arange(n, device=parts.device) * step // of for n, step, of in zip((rows, columns), steps, grid)]
    return parts[at[0]][:, at[1]].contiguous()


def quantization_config(
    format: str, schemes: Mapping[str, Scheme], ignored: Sequence[str], powers_of_two: bool
) -> dict[str, Any]:
    """Return the value of ``quantization_config`` in config.json.

    Args:
        schemes: by name of a module whose weight is in FP8, how servers multiply with it.
        ignored: names of the other modules with weights of two dimensions.
        powers_of_two: all scales of weights are powers of two. Servers with a GEMM for UE8M0 then take them as they are
            (``scale_fmt``, as in DeepSeek-V3.1: the scales themselves are stored as float32).

    Raises:
        ConfigurationError: servers would misread the name of a module (see ``require_names`` and ``require_distinct``).
    """
    if format == "block":
        require_distinct(schemes, ignored)
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
            **({"scale_fmt": "ue8m0"} if powers_of_two else {}),
            "activation_scheme": "dynamic",
            "modules_to_not_convert": list(ignored),
        }
    require_names([*schemes, *ignored])
    groups: dict[Scheme, list[str]] = {}
    for name, scheme in schemes.items():
        groups.setdefault(scheme, []).append(name)
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized" if format == "compressed-tensors-mxfp8" else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{number}": {
                # A class name is the usual target. Several groups need the names of modules, to be told apart.
                "targets": ["Linear"] if len(groups) == 1 else names,
                "weights": _arguments(scheme.strategy, False),
                "input_activations": _arguments(_OF_INPUTS.get(scheme.inputs, "tensor"), scheme.inputs),
                "output_activations": None,
            }
            for number, (scheme, names) in enumerate(groups.items())
        },
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _arguments(strategy: str, inputs: Inputs | Literal[False]) -> dict[str, Any]:
    """Return the ``QuantizationArgs`` of compressed-tensors for inputs, or, with ``inputs`` False, for weights."""
    dynamic = inputs not in (False, "static")
    of_group = {"group_size": MX_BLOCK, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    more = of_group if strategy == "group" else {}
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": dynamic, **more}


# Names ---------------------------------------------------------------------------------------------


def require_storable(tensors: Iterable[ExportedTensor]) -> None:
    """Refuse tensors that safetensors cannot hold.

    Raises:
        ConfigurationError: two tensors have one name, or a name or dtype has no place in a safetensors file.
    """
    seen = set()
    for tensor in tensors:
        why = ""
        if tensor.name in seen:
            why = "the model has a tensor of this name, which an export gives to a scale: rename yours"
        elif tensor.name == "__metadata__":
            why = "safetensors uses this name itself: rename the tensor"
        elif any("\ud800" <= letter <= "\udfff" for letter in tensor.name):  # Surrogates.
            why = "safetensors needs names in UTF-8: rename the tensor"
        elif dtype_name(tensor.dtype) not in DTYPES.values():
            why = f"safetensors has no {tensor.dtype}: convert the tensor"
        if why:
            raise ConfigurationError(f"{tensor.name!a}: {why}")
        seen.add(tensor.name)


def require_names(names: Iterable[str]) -> None:
    """Refuse module names that compressed-tensors 0.20 takes for the name of a class or for a regular expression
    (``match_class`` and ``match_name`` in ``compressed_tensors.utils.match``).

    Raises:
        ConfigurationError: there is such a name.
    """
    for name in names:
        if name in _CLASSES or name.startswith("re:"):
            kind = "a class" if name in _CLASSES else "a regular expression"
            raise ConfigurationError(f"compressed-tensors takes the name of module {name!r} for {kind}: rename it")


def require_distinct(in_fp8: Iterable[str], ignored: Sequence[str]) -> None:
    """Refuse names with which Transformers 5.23 would leave a module in FP8 unconverted, because of the list of ignored
    modules: a module's name that ends with an ignored name, or whose beginning, up to a dot, matches the ignored name
    as a regular expression (``transformers.quantizers.quantizers_utils.should_convert_module``).

    Raises:
        ConfigurationError: there is such a name, or an ignored name is no regular expression.
    """
    for other in ignored:
        try:
            pattern = re.compile(rf"(?:{other})(?:(?<=\.)|(?=\.|$))")
        except re.error as error:
            raise ConfigurationError(
                f"Transformers reads the names of ignored modules as regular expressions, and {other!r} is none "
                f"({error}): rename the module, or use compressed-tensors"
            ) from None
        for name in in_fp8:
            if name.endswith(other) or pattern.match(name):
                raise ConfigurationError(
                    f"{name} is in FP8 and {other} is not, but Transformers would ignore both in the block format: "
                    "use compressed-tensors, or put both into the same precision"
                )
