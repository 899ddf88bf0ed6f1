"""Compare gradients in FP8 with those in FP32, at a few points of an FP32 training of the example job's model.

    python -m scripts.convergence.gradients --points 1 50 150 300 --steps 300 --seed 0 --out DIR

``--points`` are step numbers; the other flags are the fault lab's. Writes DIR/gradients.json. At each point, copies
of the model compute one batch that training never uses, with each recipe and in BF16. With a recipe, everything except
the GEMMs of Linears runs in FP32, so that all differences come from FP8. Delayed scaling takes its scales from the next
batches of training.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fp8dist
from fp8dist.state.recipe import GEMMS, Gemm
from launch.train_gpt.data import BadInput, Text
from launch.train_gpt.exits import exit_with
from launch.train_gpt.options import RECIPES
from scripts import results_files
from tests.support.lab import recipes
from tests.support.lab.failures import Whereabouts
from tests.support.lab.job import Job
from tests.support.lab.options import Options, parse, prepare_input
from tests.support.lab.ranks import joined_ranks

FILE = "gradients.json"

MEASURED = 2
"""The random stream of the measured batches. Training uses stream 0, so the batches differ."""

CALIBRATED_ON = 4
"""Number of batches from which delayed scaling takes its scales."""

Loss = Callable[[nn.Module], Tensor]
"""Computes the loss of one batch with a model."""


class Gradients(NamedTuple):
    """Gradients of one loss: of the weights of Linears, and of the inputs of modules on the residual stream."""

    weights: dict[str, Tensor]
    inputs: dict[str, Tensor]


class Cosines(NamedTuple):
    """Cosines between two sets of gradients. ``overall``: of all weights as one vector."""

    weights: dict[str, float]
    inputs: dict[str, float]
    overall: float


def gradients_of(
    model: nn.Module,
    loss: Loss,
    linears: Sequence[str],
    streams: Sequence[str],
    context: AbstractContextManager[object] | None = None,
) -> Gradients:
    """Return the gradients of a model as it is. Replaces the ``.grad`` of its parameters.

    Args:
        linears: fqns of the modules whose weight gradients to return.
        streams: fqns of the modules whose input gradients (of the first input) to return.
        context: the context manager around the forward, such as torch.autocast.
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
    """Return the gradients of a copy of the model that uses a recipe.

    Args:
        calibration: losses of other batches, from which delayed scaling takes its scales. If empty, its slots are cold.
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
    """Return the cosines, each computed in float64."""
    flat, right = (
        torch.cat([side.weights[name].flatten().double() for name in expected.weights]) for side in (found, expected)
    )
    weights, inputs = (
        {name: cosine(ours[name], theirs) for name, theirs in other.items()} for ours, other in zip(found, expected)
    )
    return Cosines(weights, inputs, cosine(flat, right))


def cosine(found: Tensor, expected: Tensor) -> float:
    """Return the cosine of the angle between two tensors; 0 if one of them is zero, NaN if one has a NaN or an Inf."""
    left, right = found.flatten().double(), expected.flatten().double()
    if not (left.isfinite().all() and right.isfinite().all()):
        return math.nan
    length = float(left.norm() * right.norm())
    return float(left @ right) / length if length else 0.0


def main(arguments: Sequence[str]) -> int:
    """Measure and write the results. For wrong flags, print one line and exit with status 2."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--points", type=int, nargs="+", required=True)
    own, others = parser.parse_known_args(arguments)
    options, text = ready(others)
    found = [
        {"step": step, "cases": list(_cases(Point(job, step)))} for step, job in trained(options, text, own.points)
    ]
    results_files.write(options.out / FILE, {"seed": options.seed, "points": found})
    return 0


def ready(flags: Sequence[str]) -> tuple[Options, Text]:
    """Return the options of an FP32 training, and its text. For wrong flags, print one line and exit with status 2."""
    try:
        options = parse([*flags, "--precision", "fp32", "--parallel", "none"])
        return options, prepare_input(options)
    except BadInput as error:
        exit_with(error)


def trained(options: Options, text: Text, points: Sequence[int]) -> Iterator[tuple[int, Job]]:
    """Train as the options say, and yield the job after each step in ``points``."""
    with joined_ranks(options.timeout) as ranks:
        job = Job(options, ranks, text, Whereabouts(0, 1, "GPT"))
        for step in range(1, options.steps + 1):
            job.step(step)
            if step in points:
                print(f"step {step}", file=sys.stderr, flush=True)
                yield step, job


class Point:
    """A point of a training: batches that training never uses, as one, and a copy of the model to measure with.

    Delayed scaling takes its scales from the batches after it.
    """

    def __init__(self, job: Job, step: int, batches: int = 1) -> None:
        self.options = job.options
        self.autocast = torch.autocast(job.ranks.device.type, torch.bfloat16)
        self._twin = copy.deepcopy(job.model)  # A copy, so that measuring does not affect training.
        self._loss = _loss_of([job.batch(step, number, MEASURED) for number in range(batches)])
        later = range(step + 1, step + 1 + CALIBRATED_ON)
        self._calibration = [_loss_of([job.batch(one, 0)]) for one in later]
        linears = [name for name, module in job.model.named_modules() if isinstance(module, nn.Linear)]
        linears.remove("lm_head")
        self._names = linears, [f"blocks.{number}" for number in range(job.options.layers)]

    def plain(self, context: AbstractContextManager[object] | None = None) -> Gradients:
        """Return the gradients of the model as it is."""
        return gradients_of(self._twin, self._loss, *self._names, context)

    def fp8(self, kind: str, **changes: Any) -> Gradients:
        """Return the gradients with a recipe of the lab, in which ``changes`` are other fields."""
        recipe = recipes.recipe_of(dataclasses.replace(self.options, recipe=kind))  # type: ignore[arg-type]
        recipe = dataclasses.replace(recipe, **changes)  # type: ignore[type-var]
        return fp8_gradients(self._twin, recipe, self._loss, *self._names, self._calibration)


def _loss_of(batches: Sequence[tuple[Tensor, Tensor]]) -> Loss:
    """Return the loss of batches of (tokens, targets), as one."""
    tokens, targets = (torch.cat(parts) for parts in zip(*batches))
    return lambda model: model(tokens, targets)


def _cases(point: Point) -> Iterator[dict[str, Any]]:
    """Yield the cases of one point: each recipe with all GEMMs in FP8, and with each GEMM alone in FP8."""
    expected = point.plain()

    def case(name: str, gemms: Sequence[str], found: Gradients) -> dict[str, Any]:
        return {"recipe": name, "fp8": list(gemms), **compare(found, expected)._asdict()}

    yield case("bf16", (), point.plain(point.autocast))
    for kind in RECIPES:
        for gemms in _sets_of_gemms(kind):
            high = tuple(gemm for gemm in GEMMS if gemm not in gemms)
            yield case(kind, gemms, point.fp8(kind, high_precision=high))


def _sets_of_gemms(kind: str) -> list[tuple[Gemm, ...]]:
    """Return the sets of GEMMs to run in FP8: all, each alone, and (delayed scaling) all but dgrad."""
    sets: list[tuple[Gemm, ...]] = [GEMMS, *((gemm,) for gemm in GEMMS)]
    return [*sets, ("fprop", "wgrad")] if kind == "delayed" else sets


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
