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
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from fp8dist.state.recipe import GEMMS, Gemm
from fp8dist_kernels.formats import E4M3, E5M2, Format
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
from scripts.convergence.gradients import Point, compare, ready, trained

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
    options, text = ready([*flags, "--out", own.out])
    about = {  # Before the measurement: the checkout may change meanwhile.
        "schema": results_files.SCHEMA,
        "commit": results_files.commit_of(),
        **results.about(flags),
        "emulation": {"fraction_bits": FRACTION_BITS, "step": STEP, "promoted_every": PROMOTED_EVERY},
    }
    points = []
    for step, job in trained(options, text, own.points):
        for batches in sorted({1, own.batches}) if step == max(own.points) else [1]:
            point = Point(job, step, batches)
            tokens = batches * options.batch_size * options.context
            points.append({"step": step, "tokens": tokens, "gemms": list(gemms(point)), "cases": list(cases(point))})
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


def gemms(point: Point) -> Iterator[dict[str, Any]]:
    """Yield the errors of each recipe's GEMMs, on the tensors of a step whose sums are in float32."""
    for kind in RECIPES:
        for gemm in GEMMS:
            with compared() as found:
                point.fp8(kind, fast_accumulation=(gemm,))
            sides = {name: [getattr(errors, name) for errors in found] for name in ("slow", "fast")}
            lengths = [errors.k for errors in found]
            yield {
                **{"recipe": kind, "gemm": gemm, "lowest_k": min(lengths), "highest_k": max(lengths)},
                **{name: {"mean": fmean(errors), "highest": max(errors)} for name, errors in sides.items()},
            }


def cases(point: Point) -> Iterator[dict[str, Any]]:
    """Yield the cosines of each recipe with each of ``CASES``."""
    expected = point.plain()
    for kind in RECIPES:
        for fast in CASES:
            with nullcontext() if fast is None else emulated():
                cosines = compare(point.fp8(kind, fast_accumulation=fast or ()), expected)
            lowest, bottom = min(cosines.weights.values()), next(iter(cosines.inputs.values()))
            yield {"recipe": kind, "fast": fast, "overall": cosines.overall, "lowest": lowest, "bottom": bottom}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
