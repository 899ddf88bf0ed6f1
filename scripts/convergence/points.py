"""Compare gradients in FP8 with those in FP32, at a few points of an FP32 training of the example job's model.

    python -m scripts.convergence.points --points 1 50 150 300 --steps 300 --seed 0 --out DIR

``--points`` are numbers of steps; the other flags are the example job's. Writes DIR/gradients.json. At each point,
copies of the model compute one batch that training never draws, with each recipe and in BF16. With a recipe everything
but the GEMMs of Linears is in FP32, so that only FP8 makes a difference. Delayed scaling takes its scales from the next
batches of training.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from fp8dist.recipe import GEMMS, Gemm
from launch.train_gpt import recipes
from launch.train_gpt.data import BadInput
from launch.train_gpt.exits import exit_with
from launch.train_gpt.faults.failures import Watch
from launch.train_gpt.job import Job, build, gradients, learning_rate_at, training_batch, update
from launch.train_gpt.options.flags import RECIPES
from launch.train_gpt.options.options import parse, prepare_input
from launch.train_gpt.ranks import joined_ranks
from scripts.benchmarks.gpu import results
from scripts.convergence.gradients import Gradients, Loss, compare, fp8_gradients, gradients_of

__all__ = ["FILE", "main"]

FILE = "gradients.json"

MEASURED = 2
"""The random stream of the measured batches: other windows than those of training, which is stream 0."""

CALIBRATED_ON = 4
"""Number of batches from which delayed scaling takes its scales."""


def main(arguments: Sequence[str]) -> int:
    """Run it. A mistake in the flags prints one line and exits with status 2."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--points", type=int, nargs="+", required=True)
    own, others = parser.parse_known_args(arguments)
    try:
        options = parse([*others, "--precision", "fp32", "--parallel", "none"])
        text = prepare_input(options)
    except BadInput as error:
        exit_with(error)
    found = []
    with joined_ranks("none", timedelta(minutes=10), ()) as ranks:
        job = build(options, ranks, text, Watch(0, 1, "GPT"))
        for step in range(1, options.steps + 1):
            for group in job.optimizer.param_groups:
                group["lr"] = learning_rate_at(step, options)
            gradients(job, step)
            update(job, step)
            if step in own.points:
                print(f"step {step}", file=sys.stderr, flush=True)
                found.append({"step": step, "cases": list(_cases(job, step))})
    results.write(options.out / FILE, {"seed": options.seed, "points": found})
    return 0


def _cases(job: Job, step: int) -> Iterator[dict[str, Any]]:
    """The cases of one point: each recipe with all GEMMs in FP8, and with each of them alone."""
    linears = [name for name, module in job.model.named_modules() if isinstance(module, nn.Linear)]
    linears.remove("lm_head")
    streams = [f"blocks.{number}" for number in range(job.options.layers)]
    measured = _loss(training_batch(job, step, 0, MEASURED))
    following = [_loss(training_batch(job, step + later, 0)) for later in range(1, CALIBRATED_ON + 1)]
    twin = _twin(job)
    expected = gradients_of(twin, measured, linears, streams)
    autocast = torch.autocast(job.ranks.device.type, torch.bfloat16)
    yield _case("bf16", (), gradients_of(twin, measured, linears, streams, autocast), expected)
    for kind in RECIPES:
        recipe = recipes.recipe_of(dataclasses.replace(job.options, recipe=kind))  # type: ignore[arg-type]
        for gemms in _sets_of_gemms(kind):
            high = tuple(gemm for gemm in GEMMS if gemm not in gemms)
            single = dataclasses.replace(recipe, high_precision=high)  # type: ignore[type-var]
            found = fp8_gradients(twin, single, measured, linears, streams, following)
            yield _case(kind, gemms, found, expected)


def _sets_of_gemms(kind: str) -> list[tuple[Gemm, ...]]:
    """Which GEMMs are in FP8: all of them, each alone, and the example job's run with dgrad in high precision."""
    sets: list[tuple[Gemm, ...]] = [GEMMS, *((gemm,) for gemm in GEMMS)]
    return [*sets, ("fprop", "wgrad")] if kind == "delayed" else sets


def _twin(job: Job) -> nn.Module:
    """The model, without gradients: training does not notice what is measured."""
    return copy.deepcopy(job.model)


def _loss(batch: tuple[Tensor, Tensor]) -> Loss:
    return lambda model: model(*batch)


def _case(name: str, gemms: Sequence[str], found: Gradients, expected: Gradients) -> dict[str, Any]:
    return {"recipe": name, "fp8": list(gemms), **compare(found, expected)._asdict()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
