"""Recipes: how tensors are cast to FP8, and how scales are computed from amaxes. Frozen; checked when created.

A recipe compares, hashes and prints by its values. ``describe`` and ``Recipe.from_description`` convert it to plain
values and back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from fp8dist.common.names import check_fields, nearest, require_bool, require_choice, require_int
from fp8dist.errors import ConfigurationError
from fp8dist_kernels import GEMMS, Gemm
from fp8dist_kernels.formats import NVFP4, Format, Role, formats_by_role

By = Literal["tensor", "row", "block", "mx", "nvfp4"]
AmaxAlgorithm = Literal["max", "most_recent"] | Callable[[torch.Tensor], torch.Tensor]


class ShareLimits(NamedTuple):
    """From which share of a tensor's elements on, saturated or flushed to zero, its slot is in trouble: more than the
    casts of a sound run lose. Delayed scaling cuts off single elements of one."""

    saturated: float = 1e-3
    underflow: float = 1e-2


class Recipe:
    """Base class of all recipes. Not instantiated itself: use a subclass.

    ``delayed``: True if scales come from earlier steps. They are then state that ranks synchronise at every step.
    Otherwise each tensor is cast just in time, with scales from its own amaxes: nothing is kept, and only weights that
    ranks share as FP8 bytes are synchronised. ``by``: the part of a tensor that has a scale of its own. ``ungathered``:
    why FSDP2 cannot gather weights in FP8; empty if it can. ``casts_experts``: there are kernels for experts.
    """

    delayed: ClassVar[bool] = False
    by: ClassVar[By] = "tensor"
    ungathered: ClassVar[str] = ""
    casts_experts: ClassVar[bool] = True
    # Defaults for recipes that are not delayed: their arenas keep only the newest amax.
    history_len: int = 1
    amax_algo: AmaxAlgorithm = "most_recent"
    margin: int = 0
    format: Literal["hybrid", "e4m3"]
    update: Literal["same_step", "next_step"] = "same_step"
    warmup: Literal["current", "unit"] = "current"
    power_of_two: bool
    high_precision: tuple[Gemm, ...]
    # No field of recipes by block: their products are added in float32 after each block in any case.
    fast_accumulation: tuple[Gemm, ...] = ()

    def __init__(self) -> None:  # The dataclasses below define their own.
        raise ConfigurationError("Recipe is the base class of all recipes: use a subclass, such as DelayedScaling()")

    def __post_init__(self) -> None:
        require_choice("format", self.format, ("hybrid", "e4m3"))
        require_bool("power_of_two", self.power_of_two)
        for name in ("high_precision", "fast_accumulation"):
            object.__setattr__(self, name, gemms_in_order(name, getattr(self, name)))

    def format_of(self, role: Role) -> Format:
        """Return the FP8 format that tensors of ``role`` are cast to."""
        return formats_by_role(self.format)[role]

    @property
    def share_limits(self) -> ShareLimits:
        """From which shares of saturated and flushed elements on a slot of this recipe is in trouble."""
        return ShareLimits()

    def describe(self) -> dict[str, Any]:
        """Return all fields as plain JSON values, for the manifest. A callable is described by its name."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        fields = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
        if callable(self.amax_algo):
            function = self.amax_algo
            fields["amax_algo"] = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"
        return {"recipe": type(self).__name__, **fields}

    @staticmethod
    def from_description(description: Mapping[str, Any]) -> Recipe:
        """Return the recipe that ``describe`` described, for example in a checkpoint. Fields that it lacks get their
        defaults, because recipes had fewer fields before.

        Raises:
            ConfigurationError: the description is not of a recipe of this library, or has a callable ``amax_algo``, of
                which only the name is known.
        """
        values = dict(description)
        name = values.pop("recipe", None)
        kinds = (DelayedScaling, CurrentScaling, RowwiseScaling, BlockScaling, MXFP8Scaling, NVFP4Scaling)
        known = {recipe.__name__: recipe for recipe in kinds}
        if not isinstance(name, str) or name not in known:
            raise ConfigurationError(f"there is no recipe {name!r}; the recipes are {', '.join(known)}")
        recipe = known[name]
        strange = sorted(map(str, values.keys() - {f.name for f in dataclasses.fields(recipe)}))
        if strange:
            raise ConfigurationError(f"{name} has no field {strange[0]}")
        made: Recipe = recipe(**values)
        return made


@check_fields
@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """One scale per tensor, from the amaxes of earlier steps.

    Args:
        history_len: length of the history in optimizer steps.
        amax_algo: ``"max"`` of the history, its ``"most_recent"`` entry, or a callable that takes the histories of all
            slots, float32[n, history_len], oldest first, and returns float32[n]. A callable must be deterministic: it
            runs on every rank and must return the same bits.
        margin: scales are divided by ``2**margin``.
        format: ``"hybrid"`` (E4M3 forward, E5M2 gradients) or ``"e4m3"``.
        update: ``"same_step"``: sync and commit at the boundary. ``"next_step"``: launch at the boundary, commit before
            a scale is read next. Both give the same losses bit for bit.
        warmup: how a cold slot is cast: ``"current"``: with its own amax, just in time. ``"unit"``: with scale 1.
        power_of_two: round scales down to powers of two.
        high_precision: the GEMMs that stay in high precision, of "fprop", "dgrad" and "wgrad".
        fast_accumulation: the FP8 GEMMs whose partial sums stay in Hopper's tensor cores, with about 14 bits. The
            others add them in float32 after every 128 elements: slower, and more precise.
    """

    delayed: ClassVar[bool] = True

    history_len: int = 1024
    amax_algo: AmaxAlgorithm = "max"
    margin: int = 0
    format: Literal["hybrid", "e4m3"] = "hybrid"
    update: Literal["same_step", "next_step"] = "same_step"
    warmup: Literal["current", "unit"] = "current"
    power_of_two: bool = False
    high_precision: tuple[Gemm, ...] = ()
    fast_accumulation: tuple[Gemm, ...] = ("fprop",)

    def __post_init__(self) -> None:
        require_int("history_len", self.history_len, 1, 1_000_000)
        require_int("margin", self.margin, -64, 64)
        require_choice("update", self.update, ("same_step", "next_step"))
        require_choice("warmup", self.warmup, ("current", "unit"))
        if not callable(self.amax_algo):
            require_choice("amax_algo", self.amax_algo, ("max", "most_recent"))
        super().__post_init__()


@check_fields
@dataclass(frozen=True)
class CurrentScaling(Recipe):
    """One scale per tensor, from its own amax: ``fp8_max / amax``.

    Each rank casts its activations and gradients with its own scales. They are dequantised before anything is summed,
    so ranks need not share scales. Weights, and so their scales, are equal on all ranks. If FSDP2 gathers weights as
    FP8 (``fp8_all_gather``), the parts on all ranks must have one scale: one collective reduces the amaxes of all
    weights after each optimizer step.

    Args:
        format: ``"hybrid"`` (E4M3 forward, E5M2 gradients) or ``"e4m3"``.
        power_of_two: round scales down to powers of two.
        high_precision: the GEMMs that stay in high precision, of "fprop", "dgrad" and "wgrad".
        fast_accumulation: the FP8 GEMMs whose partial sums stay in Hopper's tensor cores, with about 14 bits. The
            others add them in float32 after every 128 elements: slower, and more precise.
    """

    format: Literal["hybrid", "e4m3"] = "hybrid"
    power_of_two: bool = False
    high_precision: tuple[Gemm, ...] = ()
    fast_accumulation: tuple[Gemm, ...] = ("fprop",)


@check_fields
@dataclass(frozen=True)
class RowwiseScaling(Recipe):
    """One scale per row of an operand, from the row's own amax: per token of an input or gradient, per output channel
    of a weight.

    A GEMM sums over the elements of a row. So dgrad casts the weight again with a scale per input channel, and wgrad
    casts input and gradient with a scale per feature. Under tensor parallelism a row is the part of it on this rank.

    Args:
        format: ``"e4m3"`` (rows have a small range) or ``"hybrid"`` (E5M2 gradients).
        power_of_two: round scales down to powers of two.
        high_precision: the GEMMs that stay in high precision, of "fprop", "dgrad" and "wgrad".
        fast_accumulation: the FP8 GEMMs whose partial sums stay in Hopper's tensor cores, with about 14 bits. The
            others add them in float32 after every 128 elements: slower, and more precise.
    """

    by: ClassVar[By] = "row"
    ungathered: ClassVar[str] = "dgrad needs a scale per column, from the rows of all shards"

    format: Literal["hybrid", "e4m3"] = "e4m3"
    power_of_two: bool = False
    high_precision: tuple[Gemm, ...] = ()
    fast_accumulation: tuple[Gemm, ...] = ("fprop",)


@check_fields
@dataclass(frozen=True)
class BlockScaling(Recipe):
    """One scale per block: 1 x 128 elements of inputs and gradients, 128 x 128 of weights.

    Blocks of inputs and gradients lie along the dim that the GEMM sums over: features for fprop and dgrad, tokens for
    wgrad. (This is the layout of DeepSeek-V3, arXiv 2412.19437, section 3.3.2.) Products of blocks are scaled and added
    in float32. Sharding must not cut a block of a weight.

    Args:
        format: ``"e4m3"`` (blocks have a small range) or ``"hybrid"`` (E5M2 gradients).
        power_of_two: round scales down to powers of two.
        high_precision: the GEMMs that stay in high precision, of "fprop", "dgrad" and "wgrad".
    """

    by: ClassVar[By] = "block"

    format: Literal["hybrid", "e4m3"] = "e4m3"
    power_of_two: bool = False
    high_precision: tuple[Gemm, ...] = ()


@check_fields
@dataclass(frozen=True)
class MXFP8Scaling(Recipe):
    """MXFP8 of the OCP Microscaling Formats: E4M3 in blocks of 1 x 32, each with a power of two (E8M0) as its scale.

    Blocks lie along the dim that the GEMM sums over. So inputs, weights and gradients are cast twice, each copy from
    the tensor in high precision. Blackwell's tensor cores apply these scales; other devices emulate them. Under
    tensor parallelism a block is the part of it on this rank; a cut at a multiple of 32 cuts none. A block with an Inf
    or a NaN becomes NaN. The two roundings differ for amaxes with a mantissa above 1.75, in about one block of five.

    Args:
        scale_rounding: ``"down"``: ``amax / 256``, rounded down to a power of two, as the specification says: elements
            above 448 scales saturate. ``"up"``: ``amax / 448``, rounded up, as cuBLAS and TransformerEngine do: nothing
            saturates, small elements are lost sooner.
        high_precision: the GEMMs that stay in high precision, of "fprop", "dgrad" and "wgrad".
    """

    by: ClassVar[By] = "mx"
    format = "e4m3"
    power_of_two = True

    scale_rounding: Literal["down", "up"] = "down"
    high_precision: tuple[Gemm, ...] = ()

    def __post_init__(self) -> None:
        require_choice("scale_rounding", self.scale_rounding, ("down", "up"))
        super().__post_init__()

    @property
    def share_limits(self) -> ShareLimits:
        """See ``Recipe``. A scale that is rounded down cuts off elements by up to an eighth: 0.3 to 0.8 % of normally
        distributed ones, and 9.4 % of weights that are uniform up to a power of two, as ``nn.Linear`` makes them."""
        return ShareLimits(saturated=0.2) if self.scale_rounding == "down" else ShareLimits()


@check_fields
@dataclass(frozen=True)
class NVFP4Scaling(Recipe):
    """NVFP4, emulated: no GPU path. For what ranks must agree on, not for speed. Blocks of 1 x 16 elements (of weights
    16 x 16) in E2M1, with an E4M3 scale each, under one float32 scale per tensor.

    The tensor's scale is delayed by a step: its amax is that of all ranks of the group, from the one all-reduce of the
    step. (NVIDIA's training recipe, arXiv 2509.25149, takes the tensor's own.) Gradients are rounded at random, and
    both operands of wgrad get a random Hadamard transform of 16 tokens. Each random number is a hash of (``seed``,
    step, backward of the module in this step, module, copy, element), so that a recomputation, a replay, an audit, a
    resumed run and tensor-parallel copies get the same bits. ``attach(data_rank=…)`` gives ranks with other data other
    numbers. Elements of a shard count as in the whole tensor, if DTensor cuts the output features; otherwise from 0.

    For Linears only. Not with experts, ``fp8_all_gather``, exports or CUDA graphs; torch.compile leaves its Linears out
    of its graphs.

    Args:
        hadamard: transform both operands of wgrad.
        stochastic_rounding: round gradients up or down at random, so that the mean is the gradient.
        seed: of the random numbers. Equal on all ranks.
        margin: tensor scales are divided by ``2**margin``: room to grow in a step, at no cost in precision.
        high_precision: the GEMMs that stay in high precision, of "fprop", "dgrad" and "wgrad".
    """

    delayed: ClassVar[bool] = True
    by: ClassVar[By] = "nvfp4"
    ungathered: ClassVar[str] = "it is emulated: no GPU path"
    casts_experts: ClassVar[bool] = False
    format = "e4m3"  # Of the blocks' scales.
    power_of_two = False

    hadamard: bool = True
    stochastic_rounding: bool = True
    seed: int = 0
    margin: int = 1
    high_precision: tuple[Gemm, ...] = ()

    def __post_init__(self) -> None:
        require_bool("hadamard", self.hadamard)
        require_bool("stochastic_rounding", self.stochastic_rounding)
        require_int("seed", self.seed, 0, 2**31 - 1)
        require_int("margin", self.margin, 0, 64)
        super().__post_init__()

    def format_of(self, role: Role) -> Format:
        """See ``Recipe``."""
        return NVFP4

    @property
    def share_limits(self) -> ShareLimits:
        """See ``Recipe``. E2M1 has nothing below a twelfth of a block's amax: 4 to 7 % of normally distributed elements
        become zero, and 16 % of those behind a GELU."""
        return ShareLimits(underflow=0.5)


def gemms_in_order(name: str, value: object) -> tuple[Gemm, ...]:
    """Return the GEMMs that ``value``, a collection of names, contains, in the order of ``GEMMS``.

    Raises:
        ConfigurationError: ``value`` is not a collection, or has another name. The message begins with ``name``.
    """
    if not isinstance(value, (tuple, list, set, frozenset)) or not all(gemm in GEMMS for gemm in value):
        given = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else []
        meant = [near for gemm in given for near in nearest(gemm, GEMMS, 1)]
        instead = f" (write {name}={tuple(meant)})" if meant and len(meant) == len(given) else ""
        raise ConfigurationError(f"{name} must be a tuple of {', '.join(GEMMS)}{instead}, got {value!r}")
    return tuple(gemm for gemm in GEMMS if gemm in value)


_CALLED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("delayed", "delayedscaling"), "DelayedScaling()"),
        **dict.fromkeys(("current", "currentscaling", "float8currentscaling"), "CurrentScaling()"),
        **dict.fromkeys(("dynamic", "tensorwise"), "CurrentScaling()"),
        "rowwisescaling": "RowwiseScaling()",
        # The row-wise recipes of torchao round scales to powers of two.
        "rowwise": "RowwiseScaling(power_of_two=True)",
        "rowwise_with_gw_hp": 'RowwiseScaling(power_of_two=True, high_precision=("wgrad",))',
        "float8linearconfig": "CurrentScaling() or RowwiseScaling(power_of_two=True)",
        **dict.fromkeys(("block", "blockwise", "blockscaling", "float8blockscaling"), "BlockScaling()"),
        **dict.fromkeys(("mx", "mxfp8", "mxfp8scaling", "mxlinearconfig"), "MXFP8Scaling()"),
        **dict.fromkeys(("nvfp4", "nvfp4scaling", "nvfp4blockscaling"), "NVFP4Scaling()"),
        "mxfp8blockscaling": 'MXFP8Scaling(scale_rounding="up")',
    }
)
"""Names of recipes in TransformerEngine, in torchao and here, in lower case: the recipe of fp8dist to write instead."""


def require_recipe(name: str, value: object, expected: str = "a recipe such as DelayedScaling()") -> Recipe:
    """Return ``value`` if it is a recipe of this library.

    Raises:
        ConfigurationError: it is not. The message suggests a recipe.
    """
    if isinstance(value, Recipe):
        return value
    got, instead = repr(value), ""
    if isinstance(value, type):
        got = f"the class {value.__name__}"
        instead = f": write {value.__name__}()" if issubclass(value, Recipe) else _instead(value)
    elif isinstance(value, str):
        near = nearest(value, _CALLED, 1)
        instead = f": write fp8dist.{_CALLED[near[0]]}" if near else ""
    elif isinstance(value, Mapping):
        instead = ": write DelayedScaling(**mapping), or the recipe that its values are for"
    elif value is not None:
        instead = _instead(type(value))
    raise ConfigurationError(f"{name} must be {expected}, got {got}{instead}")


def _instead(theirs: type) -> str:
    """Return a hint for a message about a class of another library."""
    library = theirs.__module__.split(".")[0]
    known = _CALLED.get(theirs.__name__.lower())
    return "" if known is None else f", {theirs.__name__} of {library}: use fp8dist.{known}"
