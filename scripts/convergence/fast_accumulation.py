"""Measure what fast accumulation costs in accuracy, in emulation of Hopper's tensor cores: see accumulation.py.

    python -m scripts.convergence.fast_accumulation --layers 3 --width 128

    --points N …    steps of an FP32 training of the example job's model; it ends with the last one (50 300)
    --batches N     at the last point, also measure N batches as one (8)
    --out DIR       writes DIR/accumulation.json (runs/accumulation)
    --keep          copy the results to scripts/results, and update the pages

Other flags are the fault lab's.

Single products: random data, cast to FP8 with one scale per tensor, for several lengths of the contracted dim.
Products of the job: the same errors for each GEMM, on the tensors of a step whose sums are in float32.
Gradients: as in gradients.py, with the GEMMs of each case in fast accumulation and all others promoted every 128
elements. The first case of each recipe adds in float32, as a CPU does.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fp8dist.state.recipe import GEMMS, Gemm
from fp8dist_kernels.formats import E4M3, E5M2, Format
from launch.train_gpt.data import BadInput
from launch.train_gpt.exits import exit_with
from scripts import results_files
from scripts.convergence import accumulation_tables as tables
from scripts.convergence import results
from scripts.convergence.accumulation import (
    FRACTION_BITS,
    PROMOTED_EVERY,
    STEP,
    compared,
    emulated,
    errors_of,
    relative_error,
)
from scripts.convergence.gradients import (
    MEASURED,
    Gradients,
    calibration_of,
    compare,
    fp8_gradients,
    gradients_of,
    loss_of,
    names_of,
    trained,
)
from tests.support.lab import recipes
from tests.support.lab.job import Job
from tests.support.lab.options import parse, prepare_input

RECIPES = ("delayed", "rowwise")

CASES: tuple[tuple[Gemm, ...] | None, ...] = (None, (), ("fprop",), ("dgrad",), ("wgrad",), GEMMS)
"""The GEMMs in fast accumulation. None: all sums in float32, not emulated."""

LENGTHS = (128, 1024, 4096, 16384)
"""Lengths of the contracted dim of single products."""

_SIZE = 64
"""Rows and columns of single products."""


def main(arguments: Sequence[str]) -> int:
    """Measure and write the results. For wrong flags, print one line and exit with status 2."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--points", type=int, nargs="+", default=[50, 300])
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--out", default="runs/accumulation")
    parser.add_argument("--keep", action="store_true")
    own, others = parser.parse_known_args(arguments)
    if min(*own.points, own.batches) < 1:
        parser.error("--points and --batches must be at least 1")
    flags = ["--steps", str(max(own.points)), *others]
    try:
        options = parse([*flags, "--out", own.out, "--precision", "fp32", "--parallel", "none"])
        text = prepare_input(options)
    except BadInput as error:
        exit_with(error)
    about = {  # Before the measurement: the checkout may change meanwhile.
        "schema": tables.SCHEMA,
        "commit": results_files.commit_of(),
        **results.about(flags),
        "emulation": {"fraction_bits": FRACTION_BITS, "step": STEP, "promoted_every": PROMOTED_EVERY},
    }
    points = []
    for step, job in trained(options, text, own.points):
        for batches in sorted({1, own.batches}) if step == max(own.points) else [1]:
            points.append(_Point(job, step, batches).measure())
    data = {**about, "products": products(), "seed": options.seed, "points": points}
    results_files.write(options.out / f"{tables.NAME}.json", data)
    if own.keep:
        results_files.publish(tables.NAME, data)
    return 0


def products(lengths: Sequence[int] = LENGTHS) -> list[dict[str, Any]]:
    """Return relative errors of products of random numbers, by data, formats and length of the contracted dim."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for data, left, right in (("normal", E4M3, E4M3), ("normal", E5M2, E4M3), ("positive", E4M3, E4M3)):
        for k in lengths:
            x, y = (torch.randn(_SIZE, k, generator=generator) for _ in range(2))
            if data == "positive":
                x, y = x.abs(), y.abs()
            found.append({"data": data, "formats": f"{left.name} x {right.name}", "k": k, **_errors(x, y, left, right)})
    return found


def _errors(x: Tensor, y: Tensor, left: Format, right: Format) -> dict[str, float]:
    """Return relative errors: of the cast alone, and of each accumulation alone."""
    (a, inv_a), (b, inv_b) = _cast(x, left), _cast(y, right)
    exact = (a.double() * inv_a) @ (b.double() * inv_b).t()
    found = errors_of(a, b, inv_a, inv_b)
    return {"cast": relative_error(exact, x.double() @ y.double().t()), "slow": found.slow, "fast": found.fast}


def _cast(x: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    scale = format.max / x.abs().max()
    return (x * scale).clamp(-format.max, format.max).to(format.dtype), scale.reciprocal()


class _Point:
    """One point of the training: a batch, and what is compared on it."""

    def __init__(self, job: Job, step: int, batches: int) -> None:
        options = job.options
        parts = [job.batch(step, number, MEASURED) for number in range(batches)]
        self._measured = loss_of((torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])))
        self._calibration = calibration_of(job, step)
        self._names = names_of(job)
        self._twin = copy.deepcopy(job.model)  # A copy, so that measuring does not affect training.
        self._recipes = {kind: recipes.recipe_of(dataclasses.replace(options, recipe=kind)) for kind in RECIPES}
        self._place = {"step": step, "tokens": batches * options.batch_size * options.context}

    def measure(self) -> dict[str, Any]:
        """Return the results of this point."""
        return {**self._place, "gemms": list(self._gemms()), "cases": list(self._cases())}

    def _gemms(self) -> Iterator[dict[str, Any]]:
        """Yield the errors of each recipe's GEMMs, on the tensors of a step whose sums are in float32."""
        for kind in RECIPES:
            for gemm in GEMMS:
                with compared() as found:
                    self._gradients(kind, (gemm,))
                sides = {name: [getattr(errors, name) for errors in found] for name in ("slow", "fast")}
                lengths = [errors.k for errors in found]
                yield {
                    **{"recipe": kind, "gemm": gemm, "lowest_k": min(lengths), "highest_k": max(lengths)},
                    **{name: {"mean": fmean(errors), "highest": max(errors)} for name, errors in sides.items()},
                }

    def _cases(self) -> Iterator[dict[str, Any]]:
        """Yield the cosines of each recipe with each of ``CASES``."""
        expected = gradients_of(self._twin, self._measured, *self._names)
        for kind in RECIPES:
            for fast in CASES:
                with nullcontext() if fast is None else emulated():
                    cosines = compare(self._gradients(kind, fast or ()), expected)
                lowest, bottom = min(cosines.weights.values()), next(iter(cosines.inputs.values()))
                yield {"recipe": kind, "fast": fast, "overall": cosines.overall, "lowest": lowest, "bottom": bottom}

    def _gradients(self, kind: str, fast: tuple[Gemm, ...]) -> Gradients:
        recipe = dataclasses.replace(self._recipes[kind], fast_accumulation=fast)  # type: ignore[type-var]
        return fp8_gradients(self._twin, recipe, self._measured, *self._names, self._calibration)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
