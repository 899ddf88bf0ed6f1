"""Forward and backward of one Linear, including casts: FP8Linear, as ``fp8dist.prepare`` makes it, against bf16.

Each run is a step's first: its slots have recorded nothing yet, so all amaxes are new.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import fp8dist
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN
from scripts.benchmarks.gpu.lab import Case, Lab, geomean, joined_problems, ratios_of
from scripts.benchmarks.gpu.stopwatch import Action, back_to_back, compare, issue_time
from scripts.benchmarks.llama_shapes import LINEARS

__all__ = ["Linears", "Planned", "Torchao"]

OURS, ALL_OURS, BF16 = "fp8dist", "fp8dist, triton", "bf16"
"""Backend "auto", which uses torch's products unless the shipped table says that ours are as fast, and backend
"triton"."""

RECIPES = ("tensorwise", "rowwise")
FURTHEST = 0.15
"""Largest relative error against bf16. Rounding to E4M3 causes about 3 %, to E5M2 5 %; a wrong product over 100 %."""

IN_A_ROW, SAMPLES = 5, 5


@dataclass(frozen=True)
class Planned:
    """A layer and its number of tokens."""

    name: str
    tokens: int
    in_features: int
    out_features: int


@dataclass(frozen=True)
class Bench:
    """A Linear's data: input and output gradient."""

    x: Tensor
    gradient: Tensor

    @staticmethod
    def random(planned: Planned, device: torch.device) -> Bench:
        """Random bf16 data, with the magnitudes of a real step's gradients."""
        x = torch.randn(planned.tokens, planned.in_features, dtype=torch.bfloat16, device=device)
        gradient = torch.randn(planned.tokens, planned.out_features, dtype=torch.bfloat16, device=device)
        return Bench(x.requires_grad_(), gradient.mul_(1e-3))

    def both_ways(self, model: nn.Module) -> tuple[Tensor, ...]:
        """Run forward and backward. Return (output, gradient of x, gradient of the weight)."""
        (weight,) = model.parameters()
        output = model(self.x)
        return (output.detach(), *torch.autograd.grad(output, (self.x, weight), self.gradient))


@dataclass(frozen=True)
class Prepared:
    """An FP8 model, or a model to compare it with. ``pending``: the amaxes that its slots recorded."""

    model: nn.Module
    pending: Sequence[Tensor] = ()

    def forget(self) -> None:
        """Drop recorded amaxes, as at the end of a step."""
        for pending in self.pending:
            pending.fill_(DID_NOT_RUN)


class Linears:
    """FP8Linear against nn.Linear."""

    name = "linears"

    def plan(self, lab: Lab) -> list[Planned]:
        """Llama 3 8B's layers."""
        return _layers(lab, (8192, 16384))

    def measure(self, lab: Lab, planned: Planned) -> Case:
        """See ``Part``. "ratio" is bf16's time over ours, on the device; "eager_ratio" the same by the host's clock."""
        bench, plain = Bench.random(planned, lab.device), _linear(planned, lab.device)
        models = {OURS: _prepared(plain, bench, "auto"), ALL_OURS: _prepared(plain, bench, "triton")}
        for name, model in models.items():
            problem = _wrong(bench, model.model, plain)
            if problem:
                return {**_named(planned), "problem": f"{name}: {problem}"}
        return {**_named(planned), **_timed(lab, bench, {**models, BF16: Prepared(plain)}, BF16)}

    def figures(self, cases: Sequence[Case]) -> dict[str, Any]:
        """See ``Part``."""
        return _figures_against(cases, BF16)


class Torchao:
    """FP8Linear and torchao's dynamic scaling (compiled, as torchao recommends) against nn.Linear."""

    name = "torchao"

    def plan(self, lab: Lab) -> list[Any]:
        """Return few layers, because each is compiled."""
        if importlib.util.find_spec("torchao") is None:
            return []
        return [(layer, recipe) for layer in _layers(lab, (8192,))[:3] for recipe in RECIPES]

    def measure(self, lab: Lab, planned: Any) -> Case:
        """See ``Part``. "ratio" is torchao's time over ours."""
        layer, recipe = planned
        bench, plain = Bench.random(layer, lab.device), _linear(layer, lab.device)
        case = {**_named(layer), "name": f"{layer.name}, {recipe}", "recipe": recipe}
        theirs = _torchao(plain, recipe, compiled=not lab.smoke)
        model = _prepared(plain, bench, "auto")
        problem = _wrong(bench, model.model, plain)
        if problem:
            return {**case, "problem": problem}
        models = {OURS: model, "torchao": Prepared(theirs), BF16: Prepared(plain)}
        return {**case, **_timed(lab, bench, models, "torchao")}

    def figures(self, cases: Sequence[Case]) -> dict[str, Any]:
        """See ``Part``: by recipe."""
        figures = {}
        for recipe in RECIPES:
            mine = [case for case in cases if case.get("recipe") == recipe]
            if any("ratio" in case for case in mine):
                figures[recipe] = _figures_against(mine, "torchao")
        return figures


def _layers(lab: Lab, tokens: Sequence[int]) -> list[Planned]:
    if lab.smoke:
        return [Planned("smoke", 32, 64, 48)]
    return llama_layers(tokens)


def llama_layers(tokens: Sequence[int]) -> list[Planned]:
    """Return Llama 3 8B's Linears at these numbers of tokens."""
    layers = [layer for layer in LINEARS if layer[0] == "8B"]
    return [
        Planned(f"{model} {layer}, {count} tokens", count, in_features, out_features)
        for count in tokens
        for model, layer, in_features, out_features in layers
    ]


def _named(planned: Planned) -> Case:
    return {
        "name": planned.name,
        "tokens": planned.tokens,
        "in_features": planned.in_features,
        "out_features": planned.out_features,
    }


def _linear(planned: Planned, device: torch.device) -> nn.Module:
    linear = nn.Linear(planned.in_features, planned.out_features, bias=False, device=device, dtype=torch.bfloat16)
    return nn.Sequential(linear)


def _prepared(plain: nn.Module, bench: Bench, backend: str) -> Prepared:
    """Return the model in FP8 after two steps, so that no slot is cold."""
    model = copy.deepcopy(plain)
    manager = fp8dist.prepare(model, fp8dist.DelayedScaling(), backend=backend)
    for _ in range(2):
        bench.both_ways(model)
        manager.step()
    return Prepared(model, [sync.arena.pending for sync in manager._syncs])


def _torchao(plain: nn.Module, recipe: str, compiled: bool) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    if not compiled:  # Uncompiled runs may have no GPU.
        object.__setattr__(config, "emulate", True)
    model = convert_to_float8_training(copy.deepcopy(plain), config=config)
    return torch.compile(model) if compiled else model  # type: ignore[return-value]


def _wrong(bench: Bench, model: nn.Module, plain: nn.Module) -> str | None:
    """Return a description of the first result that is too far from bf16's; None if all are close."""
    names = ("output", "gradient of the input", "gradient of the weight")
    for name, mine, expected in zip(names, bench.both_ways(model), bench.both_ways(plain)):
        error = float((mine.float() - expected.float()).norm() / expected.float().norm())
        if not error <= FURTHEST:
            return f"wrong: the {name} is off by {error:.3g}"
    return None


def _timed(lab: Lab, bench: Bench, models: Mapping[str, Prepared], against: str) -> Case:
    actions: dict[str, Action] = {name: _action(bench, one) for name, one in models.items()}
    # The host's clock cannot exclude anything, so our time includes ``forget``.
    steps: dict[str, Action] = {name: _action(bench, one, forget=True) for name, one in models.items()}

    def forget() -> None:
        for one in models.values():
            one.forget()

    repeats, samples = (1, 1) if lab.smoke else (IN_A_ROW, SAMPLES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for action in actions.values():
            action()
        head_start = max(issue_time(lab.stopwatch, action) for action in actions.values())
        comparison = compare(lab.stopwatch, actions, lab.seconds, head_start, forget)
        eager = {name: back_to_back(lab.stopwatch, step, repeats, samples) for name, step in steps.items()}
    return {
        "timings": {**comparison.timings(), **{f"{name}, eager": timing.as_dict() for name, timing in eager.items()}},
        "ratio": comparison.ratio(against, OURS),
        "eager_ratio": eager[against].median / eager[OURS].median,
        "times_as_fast_as_bf16": {name: comparison.ratio(BF16, name) for name in models},
        "issue_us": head_start,
    }


def _action(bench: Bench, one: Prepared, forget: bool = False) -> Callable[[], object]:
    def action() -> None:
        if forget:
            one.forget()
        bench.both_ways(one.model)

    return action


def _figures_against(cases: Sequence[Case], other: str) -> dict[str, Any]:
    ratios, figures = ratios_of(cases), {"against": other, "shapes": len(ratios_of(cases))}
    if not ratios or joined_problems(cases):
        return figures
    lowest = min(ratios, key=ratios.__getitem__)
    return {
        **figures,
        "geomean": geomean(ratios.values()),
        "lowest": ratios[lowest],
        "lowest_case": lowest,
        "eager_geomean": geomean(ratios_of(cases, "eager_ratio").values()),
    }
