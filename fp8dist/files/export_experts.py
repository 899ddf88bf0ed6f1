"""Export of experts: a weight [E, out_features, in_features] becomes E tensors, under the names of checkpoints.

Servers read checkpoints in which each expert has Linears of its own. Transformers stacks their weights when it loads a
model (its module ``transformers.conversion_mapping``, version 5), and joins gate and up into one weight. An export
splits this weight again. Gate and up both keep the scales of the joined weight, so nothing is rounded.

A *mixture* is a module with the stacked weights of experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8dist.common.text import first_few
from fp8dist.errors import ConfigurationError
from fp8dist.files.export_casts import Stored, experts_cast_of, whole
from fp8dist.files.export_formats import (
    ExportedTensor,
    ExportPart,
    Scheme,
    grid_by,
    inputs_of,
    laid_out,
    require_e4m3,
    strategy_of,
    tensors_of,
)
from fp8dist.modules.expert_layouts import model_type_of
from fp8dist.modules.foreign import expert_products, gate_fits
from fp8dist.modules.fp8_experts import FP8Experts
from fp8dist.modules.fp8_weight import FP8Weight, Gathered
from fp8dist.modules.grouped_slots import GroupedSlots
from fp8dist_kernels import BLOCK
from fp8dist_kernels.formats import Role


class ExpertNames(NamedTuple):
    """Names of an expert's Linears in checkpoints. ``renames``: pairs of (part of a name in the model, what replaces it
    in the checkpoint)."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    renames: tuple[tuple[str, str], ...] = ()

    def served(self, name: str) -> str:
        """Return the name that a checkpoint has for a tensor or module of the model."""
        for ours, theirs in self.renames:
            name = name.replace(ours, theirs)
        return name


_MIXTRAL = ExpertNames("w1", "w3", "w2", ((".mlp.", ".block_sparse_moe."),))
_PLAIN_TYPES = frozenset(
    (
        *("qwen2_moe", "qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "dots1", "flex_olmo", "glm4_moe"),
        *("glm4_moe_lite", "glm_moe_dsa", "olmoe"),
    )
)

_UNREAD = MappingProxyType(
    {
        "gpt_oss": (
            " (Transformers 5.23 reads no FP8 experts with biases, and vLLM 0.33 has a loader for those of gpt-oss in "
            "the format of AMD Quark only)"
        )
    }
)
"""By model type, the reason why no server reads its experts from an export in any format."""


class _Piece(NamedTuple):
    """A Linear of a checkpoint: its name, and its rows in the stacked weight of an expert."""

    name: str
    rows: slice


def expert_names(model: nn.Module) -> ExpertNames | None:
    """Return the names for the experts of a model, by the ``model_type`` of its config. None: they are not known."""
    kind = model_type_of(model)
    if kind in ("mixtral", "minimax"):
        return _MIXTRAL
    return ExpertNames() if kind is None or kind in _PLAIN_TYPES else None


def mixtures_of(model: nn.Module, names: ExpertNames | None) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over (name, module) of the mixtures that are exported expert by expert. Others are exported as they are
    stored.

    Args:
        names: those of ``expert_names``.

    Raises:
        ConfigurationError: experts are in FP8, and ``names`` is None; or ``require_served`` refuses a mixture.
    """
    for name, module in model.named_modules(remove_duplicate=False):
        if expert_products(module) is None:
            continue
        require_served(name, module, isinstance(module, FP8Experts) and are_in_fp8(name, module))
        if not gate_fits(module):
            continue
        if names is not None:
            yield name, module
        elif isinstance(module, FP8Experts) and are_in_fp8(name, module):
            kind = str(model_type_of(model))
            raise ConfigurationError(
                f"{name}: export() does not know which names servers read for the experts of {kind!r}"
                f"{_UNREAD.get(kind, '')}: leave them in high precision, prepare(skip={name!r})"
            )


def require_served(name: str, module: nn.Module, in_fp8: bool) -> None:
    """Raise ConfigurationError if no server has modules for such a mixture, whatever the names."""
    if not name:
        raise ConfigurationError("the model is a mixture itself, which has no name: put it into a module")
    if in_fp8 and not gate_fits(module):
        raise ConfigurationError(
            f"{name}: its first product is no gate and up of the width that its down_proj takes, so servers have no "
            f"Linears for it: leave it in high precision, prepare(skip={name!r})"
        )


def are_in_fp8(name: str, module: nn.Module) -> bool:
    """True if forwards multiply with all experts of a mixture in FP8.

    Raises:
        ConfigurationError: only with some of them.
    """
    if not isinstance(module, FP8Experts):
        return False
    precisions = [each for slots in module.fp8_products.values() for each in slots.precisions]
    high = [each.slots[Role.INPUT].fqn for each in precisions if "fprop" in each.high]
    if high and len(high) < len(precisions):
        raise ConfigurationError(
            f"{name}: of {len(precisions)} products of experts, {len(high)} are in high precision: {first_few(high)}. "
            "A server multiplies all experts of a mixture in one precision: set_precision for the others, or wait "
            "until a fallback ends"
        )
    return not high


def list_experts(format: str, names: ExpertNames, holder: str, module: Any, stored: Stored) -> ExportPart | None:
    """List the tensors that are exported for a parameter of the mixture ``module``. None: the parameter is no weight or
    bias of a product.

    Args:
        holder: name of the mixture.
        stored: the parameter: [E, out_features, in_features] (or transposed) or [E, out_features].

    Raises:
        ConfigurationError: the format does not hold the scales of the weight, or the weight is cast to E5M2.
    """
    products = expert_products(module)
    assert products is not None
    kind = stored.name.rpartition(".")[2]
    product = kind.removesuffix("_bias") if module.has_bias else kind
    if product not in products:
        return None
    with_bias = product != kind
    shape = tuple(stored.value.shape)
    if not with_bias and module.is_transposed:
        shape = (shape[0], shape[2], shape[1])
    pieces = _pieces(module, product == products[0], names, shape[1])
    linears = [(expert, f"{holder}.{expert}.{piece.name}", piece) for expert in range(shape[0]) for piece in pieces]
    in_fp8 = are_in_fp8(holder, module)
    if with_bias or not in_fp8:
        return _in_high_precision(module, product, stored, shape, linears, with_bias)
    return _in_fp8(format, module, product, stored, shape, linears)


def _pieces(module: Any, first: bool, names: ExpertNames, rows: int) -> tuple[_Piece, ...]:
    """Return the Linears that an expert's weight of a product becomes. ``first``: the product is gate and up, whose
    rows alternate unless the module ``is_concatenated``. ``rows``: number of rows of the weight."""
    if not first:
        return (_Piece(names.down, slice(0, rows)),)
    if not module.has_gate:
        return (_Piece(names.up, slice(0, rows)),)
    if getattr(module, "is_concatenated", True):
        return _Piece(names.gate, slice(0, rows // 2)), _Piece(names.up, slice(rows // 2, rows))
    return _Piece(names.gate, slice(0, rows, 2)), _Piece(names.up, slice(1, rows, 2))


def _in_high_precision(
    module: Any, product: str, stored: Stored, shape: tuple[int, ...], linears: Sequence[Any], with_bias: bool
) -> ExportPart:
    """Return the part of a bias, or of a weight in high precision. ``shape``: [E, out_features, …]. ``linears``: for
    each Linear (expert, exported name, ``_Piece``)."""
    as_fp8 = stored.gathered and isinstance(module, FP8Experts) and not with_bias
    gathered = as_fp8 or stored.sharded is not None
    dtype = stored.computed_in if gathered else stored.value.dtype
    kind = "bias" if with_bias else "weight"
    entries = [
        ExportedTensor(f"{name}.{kind}", "high", name, dtype, (_length(piece.rows, shape[1]), *shape[2:]))
        for _, name, piece in linears
    ]

    def read() -> Sequence[Tensor]:
        if gathered:  # Forwards multiply with what FSDP2 gathered in FP8, dequantised.
            rows, inv_scale = experts_cast_of(module, module.fp8_products[product], stored)
            every = FP8Weight(Gathered(rows, inv_scale), dtype).high_precision()
        else:
            every = whole(stored)
            every = every.mT if module.is_transposed and not with_bias else every
        return [every[expert, piece.rows].contiguous() for expert, _, piece in linears]

    return ExportPart(tuple(entries), read, () if with_bias else tuple(name for _, name, _ in linears))


def _in_fp8(
    format: str, module: FP8Experts, product: str, stored: Stored, shape: tuple[int, ...], linears: Sequence[Any]
) -> ExportPart:
    """Return the part of a weight in FP8. Arguments as in ``_in_high_precision``."""
    slots = module.fp8_products[product]
    state = slots.states(stored.device)[1]
    require_e4m3(slots.fqn, state.format.name)
    height = _length(linears[0][2].rows, shape[1])
    of_piece = (height, shape[2])
    grid = grid_by(slots.recipe, of_piece)
    if slots.recipe.by == "block" and any(piece.rows.step or piece.rows.start % BLOCK for _, _, piece in linears):
        raise ConfigurationError(
            f"{slots.fqn}: a block of {BLOCK} x {BLOCK} has rows of gate and of up, {height} each, which servers "
            "read apart: give it another recipe (overrides), or leave it in high precision"
        )
    strategy = strategy_of(format, grid, of_piece, slots.recipe.by)
    if strategy is None:
        raise ConfigurationError(
            f"{slots.fqn}: its weights have {grid.text(of_piece)}, for which format={format!r} has no place: choose "
            "another format, or give it another recipe (overrides)"
        )
    # A server casts the inputs of all experts of a mixture alike, so one cold slot makes all of them dynamic.
    cold = any(bool(each.states(stored.device)[0].cold.any()) for each in module.fp8_products.values())
    scheme = Scheme(strategy, inputs_of(slots.recipe, cold))
    entries = [tensors_of(format, name, of_piece, scheme) for _, name, _ in linears]

    def read() -> Sequence[Tensor]:
        rows, inv_scales = experts_cast_of(module, slots, stored)
        input_scales = torch.reciprocal(slots.states(stored.device)[0].scale)
        values: list[Tensor] = []
        for of_one, (expert, _, piece) in zip(entries, linears):
            scales = laid_out(_of_rows(slots, inv_scales[expert], piece.rows), grid, strategy, of_piece)
            one = [rows[expert, piece.rows].contiguous(), scales, input_scales[expert].reshape(1)]
            values += one[: len(of_one)]
        return values

    names = tuple(name for _, name, _ in linears)
    return ExportPart(tuple(itertools.chain(*entries)), read, names, scheme, slots.recipe)


def _of_rows(slots: GroupedSlots, inv_scale: Tensor, rows: slice) -> Tensor:
    """Return the inverse scales of these rows of one expert's weight."""
    if slots.recipe.by == "tensor":
        return inv_scale
    if slots.recipe.by in ("row", "mx"):
        return inv_scale[rows]
    return inv_scale[rows.start // BLOCK : -(-rows.stop // BLOCK)]


def _length(rows: slice, of: int) -> int:
    return len(range(*rows.indices(of)))
