"""How far gradients turn when a model computes in FP8."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

import fp8dist

__all__ = ["Cosines", "Gradients", "compare", "cosine", "fp8_gradients", "gradients_of"]

Loss = Callable[[nn.Module], Tensor]
"""The loss of one batch by a model."""


class Gradients(NamedTuple):
    """Of one loss: by the weights of Linears, and by what flows into modules of the residual stream."""

    weights: dict[str, Tensor]
    inputs: dict[str, Tensor]


class Cosines(NamedTuple):
    """Between two sets of gradients. ``overall``: of all weights as one vector. ``projection``: how long its part along
    the right gradient is, relative to that: 1 if an error only turns it."""

    weights: dict[str, float]
    inputs: dict[str, float]
    overall: float
    projection: float


def gradients_of(
    model: nn.Module,
    loss: Loss,
    linears: Sequence[str],
    streams: Sequence[str],
    context: AbstractContextManager[object] | None = None,
) -> Gradients:
    """Gradients of a model as it is; those that its parameters hold are replaced.

    Args:
        linears: fqns of the modules whose weights count.
        streams: fqns of modules whose first input counts.
        context: what the forward runs in, such as torch.autocast.
    """
    inputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            arguments[0].retain_grad()
            inputs[name] = arguments[0]

        return hook

    handles = [model.get_submodule(name).register_forward_pre_hook(keep(name)) for name in streams]
    model.zero_grad(set_to_none=True)
    with context or nullcontext():
        value = loss(model)
    value.backward()
    for handle in handles:
        handle.remove()
    weights = {name: _gradient(model.get_submodule(name).weight) for name in linears}
    return Gradients(weights, {name: _gradient(tensor) for name, tensor in inputs.items()})


def _gradient(of: Tensor | nn.Module) -> Tensor:
    assert isinstance(of, Tensor)
    return torch.zeros_like(of) if of.grad is None else of.grad.detach().clone()


def fp8_gradients(
    model: nn.Module,
    recipe: fp8dist.Recipe,
    loss: Loss,
    linears: Sequence[str],
    streams: Sequence[str],
    calibration: Sequence[Loss] = (),
) -> Gradients:
    """Gradients of a copy of the model that computes by a recipe.

    Args:
        calibration: losses of other batches, from which delayed scaling takes its scales; none: its slots are cold.
    """
    twin = copy.deepcopy(model)
    manager = fp8dist.prepare(twin, recipe)
    manager.attach(twin)
    if calibration and recipe.delayed:
        with manager.calibrate():
            for other in calibration:
                other(twin).backward()
    return gradients_of(twin, loss, linears, streams)


def compare(found: Gradients, expected: Gradients) -> Cosines:
    """Cosines, each in float64."""
    flat, right = (
        torch.cat([side.weights[name].flatten().double() for name in expected.weights]) for side in (found, expected)
    )
    return Cosines(
        _cosines(found.weights, expected.weights),
        _cosines(found.inputs, expected.inputs),
        cosine(flat, right),
        float(flat @ right / (right @ right)),
    )


def _cosines(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: cosine(found[name], right) for name, right in expected.items()}


def cosine(found: Tensor, expected: Tensor) -> float:
    """Of the angle between two tensors as vectors; 0 if one of them is zero, NaN if one has a NaN or an Inf."""
    left, right = found.flatten().double(), expected.flatten().double()
    if not (left.isfinite().all() and right.isfinite().all()):
        return math.nan
    length = float(left.norm() * right.norm())
    return float(left @ right) / length if length else 0.0
