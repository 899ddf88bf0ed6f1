"""Layouts of experts: the attributes of mixture-of-experts modules that a checkpoint's tensors do not show.

Saved FP8 state of a model with such modules ("mixtures") contains these attributes, and the ``model_type`` of the
model's config. From them and the shapes in the checkpoint, a reader can rebuild the modules on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fp8dist.errors import CheckpointError
from fp8dist.modules.foreign import expert_products
from fp8dist.state.slots import clean_fqn

_ATTRIBUTES = ("has_gate", "has_bias", "is_transposed", "is_concatenated")


def model_type_of(model: nn.Module) -> str | None:
    """Return ``model.config.model_type``, which Transformers' models have. None: there is no such string."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return kind if isinstance(kind, str) else None


def describe_experts(model: nn.Module | None) -> dict[str, Any]:
    """Return the model type and the layout of each mixture as JSON values, for ``read_layouts``. Empty if the model is
    None or has no mixtures."""
    if model is None:
        return {}
    layouts = {
        clean_fqn(name): {each: bool(getattr(module, each, True)) for each in _ATTRIBUTES}
        for name, module in model.named_modules(remove_duplicate=False)
        if expert_products(module) is not None
    }
    return {"experts": {"model_type": model_type_of(model), "layouts": layouts}} if layouts else {}


def read_layouts(info: Mapping[str, Any], path: str) -> tuple[str | None, dict[str, dict[str, bool]]]:
    """Return (model type, {name of a mixture: its attributes}). (None, {}) if ``info`` has no such values, as the state
    of a model without mixtures.

    Args:
        info: the values saved with an FP8 state.
        path: the file they come from, for the error.

    Raises:
        CheckpointError: the values are malformed.
    """
    described = info.get("experts", {"model_type": None, "layouts": {}})
    if isinstance(described, dict):
        kind, layouts = described.get("model_type"), described.get("layouts")
        if (kind is None or isinstance(kind, str)) and isinstance(layouts, dict) and all(map(_fits, layouts.values())):
            return kind, layouts
    raise CheckpointError(f"{path}: the FP8 state has malformed layouts of experts")


def _fits(layout: Any) -> bool:
    attributes = layout.items() if isinstance(layout, dict) else ()
    return {name for name, value in attributes if isinstance(value, bool)} == set(_ATTRIBUTES)


def mixture_of(layout: Mapping[str, bool], shape_of: Callable[[str], tuple[int, ...]]) -> nn.Module | None:
    """Return a mixture on the meta device that ``prepare`` can convert. None: the checkpoint lacks one of its weights.

    Args:
        layout: the mixture's attributes, as ``read_layouts`` returns them.
        shape_of: returns the shape of a parameter, given its name in the mixture; () if the checkpoint lacks it.
    """
    module = nn.Module()
    module.act_fn = nn.Identity()
    for name, value in layout.items():
        setattr(module, name, value)
    products = ("gate_up_proj" if layout["has_gate"] else "up_proj", "down_proj")
    for name in (*products, *(f"{product}_bias" for product in products if layout["has_bias"])):
        module.register_parameter(name, nn.Parameter(torch.empty(shape_of(name), device="meta")))
    return module if expert_products(module) is not None else None
