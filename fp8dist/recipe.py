"""Recipes: how tensors are cast to FP8, and how scales follow from amaxes. Frozen; checked when one is made.

A recipe compares, hashes and prints by its values, and comes back from ``describe`` by ``Recipe.from_description``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch

from fp8dist.errors import ConfigurationError
from fp8dist.names import check_fields, nearest, require_bool, require_choice, require_int
from fp8dist_kernels import GEMMS, Gemm
from fp8dist_kernels.formats import Format, Role, formats_by_role

__all__ = [
    "GEMMS",
    "AmaxAlgorithm",
    "BlockScaling",
    "CurrentScaling",
    "DelayedScaling",
    "Gemm",
    "Recipe",
    "RowwiseScaling",
    "gemms_in_order",
    "require_recipe",
]

AmaxAlgorithm = Literal["max", "most_recent"] | Callable[[torch.Tensor], torch.Tensor]


class Recipe:
    """What all recipes have. Not used itself: take one of its subclasses.

    ``delayed``: scales come from earlier steps, and so are state that ranks synchronise at every step. Else each tensor
    is cast with scales of its own amaxes, just in time: nothing is kept, and nothing is synchronised but what ranks
    share as FP8 bytes. ``by``: what has a scale of its own.
    """

    delayed: ClassVar[bool] = False
    by: ClassVar[Literal["tensor", "row", "block"]] = "tensor"
    # What an arena keeps of slots whose scales are not delayed: the newest amax, if anybody asks for it.
    history_len: int = 1
    amax_algo: AmaxAlgorithm = "most_recent"
    margin: int = 0
    format: Literal["hybrid", "e4m3"]
    update: Literal["same_step", "next_step"] = "same_step"
    warmup: Literal["current", "unit"] = "current"
    power_of_two: bool
    high_precision: tuple[Gemm, ...]

    def __init__(self) -> None:  # Dataclasses have one of their own.
        raise ConfigurationError("Recipe is what recipes have in common: take DelayedScaling(), say")

    def __post_init__(self) -> None:
        require_choice("format", self.format, ("hybrid", "e4m3"))
        require_bool("power_of_two", self.power_of_two)
        object.__setattr__(self, "high_precision", gemms_in_order("high_precision", self.high_precision))

    def format_of(self, role: Role) -> Format:
        """The FP8 format that tensors of ``role`` are cast to."""
        return formats_by_role(self.format)[role]

    def describe(self) -> dict[str, Any]:
        """What must be the same on all ranks, as plain JSON values. A callable goes by its name."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        if callable(self.amax_algo):
            function = self.amax_algo
            fields["amax_algo"] = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"
        return {"recipe": type(self).__name__, **fields, "high_precision": list(self.high_precision)}

    @staticmethod
    def from_description(description: Mapping[str, Any]) -> Recipe:
        """The recipe that describes itself so: one from a checkpoint, say.

        Raises:
            ConfigurationError: it is none of this library's, or has a callable ``amax_algo``, of which there is only
                the name.
        """
        values = dict(description)
        name = values.pop("recipe", None)
        known = {recipe.__name__: recipe for recipe in (DelayedScaling, CurrentScaling, RowwiseScaling, BlockScaling)}
        if not isinstance(name, str) or name not in known:
            raise ConfigurationError(f"there is no recipe {name!r}; there are {', '.join(known)}")
        recipe = known[name]
        strange = sorted(map(str, values.keys() - {f.name for f in dataclasses.fields(recipe)}))
        if strange:
            raise ConfigurationError(f"{name} has no {strange[0]}")
        made: Recipe = recipe(**values)
        return made


@check_fields
@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """One scale per tensor, from the amaxes of earlier steps.

    Args:
        history_len: window length in optimizer steps (TransformerEngine counts microbatches when
            each has an autocast of its own).
        amax_algo: ``"max"`` of the window, its ``"most_recent"`` entry, or a callable that takes the
            windows of all slots, float32[n, history_len], oldest first, and returns float32[n]. A
            callable must be deterministic: it runs on every rank and must give the same bits.
        margin: scales are divided by ``2**margin``.
        format: ``"hybrid"`` (E4M3 forward, E5M2 gradients) or ``"e4m3"``.
        update: ``"same_step"``: synced and committed at the boundary. ``"next_step"``: launched at the
            boundary, committed before the next read of a scale. Same losses bit for bit.
        warmup: what a cold slot is cast with: ``"current"``, its own just-in-time amax, or ``"unit"``,
            scale 1.
        power_of_two: round scales down to powers of two.
        high_precision: the GEMMs that stay in high precision, of "fprop", "dgrad" and "wgrad".
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

    Each rank casts its own activations and gradients with scales of its own; they are dequantised before anything is
    summed, so nothing need be shared. Weights are equal on all ranks, and so are their scales. Where FSDP2 gathers
    weights as FP8 (``fp8_all_gather``), all ranks' parts must have one scale: the amaxes of all weights are reduced in
    one collective after each optimizer step.

    Args:
        format: ``"hybrid"`` (E4M3 forward, E5M2 gradients) or ``"e4m3"``.
        power_of_two: round scales down to powers of two.
        high_precision: the GEMMs that stay in high precision, of "fprop", "dgrad" and "wgrad".
    """

    format: Literal["hybrid", "e4m3"] = "hybrid"
    power_of_two: bool = False
    high_precision: tuple[Gemm, ...] = ()


@check_fields
@dataclass(frozen=True)
class RowwiseScaling(Recipe):
    """A scale for each row of an operand: each token of an input or gradient, each output channel of a weight.

    A GEMM contracts over the rows' elements, so dgrad casts the weight once more with a scale for each input channel,
    and wgrad casts input and gradient with a scale for each feature. Scales are of a row's own amax. Under tensor
    parallelism a row is what this rank has of it.

    Args:
        format: ``"e4m3"`` (rows have little range) or ``"hybrid"`` (E5M2 gradients).
        power_of_two: round scales down to powers of two.
        high_precision: the GEMMs that stay in high precision, of "fprop", "dgrad" and "wgrad".
    """

    by: ClassVar[Literal["tensor", "row", "block"]] = "row"

    format: Literal["hybrid", "e4m3"] = "e4m3"
    power_of_two: bool = False
    high_precision: tuple[Gemm, ...] = ()


@check_fields
@dataclass(frozen=True)
class BlockScaling(Recipe):
    """A scale for each block: 1 x 128 elements of inputs and gradients, 128 x 128 of weights.

    Blocks of inputs and gradients lie along the dim that the GEMM contracts: features for fprop and dgrad, tokens for
    wgrad. (The layout is that of DeepSeek-V3, arXiv 2412.19437, section 3.3.2.) Products of blocks are scaled, and
    added in float32. A weight that is sharded must be cut between blocks.

    Args:
        format: ``"e4m3"`` (blocks have little range) or ``"hybrid"`` (E5M2 gradients).
        power_of_two: round scales down to powers of two.
        high_precision: the GEMMs that stay in high precision, of "fprop", "dgrad" and "wgrad".
    """

    by: ClassVar[Literal["tensor", "row", "block"]] = "block"

    format: Literal["hybrid", "e4m3"] = "e4m3"
    power_of_two: bool = False
    high_precision: tuple[Gemm, ...] = ()


def gemms_in_order(name: str, value: object) -> tuple[Gemm, ...]:
    """Those of GEMMS that a list or tuple names.

    Raises:
        ConfigurationError: it names something else, or is none; says that it is about ``name``.
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
        **dict.fromkeys(("rowwise", "rowwisescaling"), "RowwiseScaling()"),
        "rowwise_with_gw_hp": 'RowwiseScaling(high_precision=("wgrad",))',
        "float8linearconfig": "CurrentScaling() or RowwiseScaling()",
        **dict.fromkeys(("block", "blockwise", "blockscaling", "float8blockscaling"), "BlockScaling()"),
    }
)
"""What recipes are called in strings, in TransformerEngine and in torchao, in lower case."""


def require_recipe(name: str, value: object, expected: str = "a recipe such as DelayedScaling()") -> Recipe:
    """``value``, which must be a recipe of this library.

    Raises:
        ConfigurationError: it is something else; says which recipe it probably means.
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
        instead = ": write DelayedScaling(**it), or the recipe that it is for"
    elif value is not None:
        instead = _instead(type(value))
    raise ConfigurationError(f"{name} must be {expected}, got {got}{instead}")


def _instead(theirs: type) -> str:
    """For a class of another library."""
    library = theirs.__module__.split(".")[0]
    known = _CALLED.get(theirs.__name__.lower())
    return "" if known is None else f", {theirs.__name__} of {library}: use fp8dist.{known}"
