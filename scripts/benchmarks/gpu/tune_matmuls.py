"""Measure tiles of FP8 GEMMs on this GPU, and write the table that is shipped for it.

    python -m scripts.benchmarks.gpu.tune_matmuls --out FILE [--tokens 8192 16384] [--kinds tensorwise …]
        [--seconds 200] [--commit ID] [--run ID] [--smoke]

Measures the GEMMs that FP8Linear runs in the layers of Llama 3 8B and 70B, with the dtypes and the accumulation of each
recipe, and with fast accumulation everywhere. First it times the tiles whose modelled cost is near the best, then, in
new rounds, the fastest of them against torch's GEMM. All runs are interleaved, with a cold L2 cache. Only a GEMM that
is surely faster than torch's gets an entry.

Writes the table after each GEMM, so you can stop it at any time. The table replaces an earlier one: it belongs to one
run.
Exit status: 0 success; 1 nothing could be measured; 2 no GPU; 130 interrupted.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fp8dist_kernels.reference.torch_matmuls import matmul_torch
from fp8dist_kernels.triton.launching import processors
from fp8dist_kernels.triton.tables import FORMAT, Entry, Key, Tile, TileTable
from fp8dist_kernels.triton.tiles import Problem, candidates, cost_of, key_of
from scripts import results_files
from scripts.benchmarks.gpu import results
from scripts.benchmarks.gpu.matmuls import SMOKE, Operands, planned_products
from scripts.benchmarks.gpu.stopwatch import Action, Stopwatch, compare, stopwatch_of
from scripts.benchmarks.llama_shapes import KINDS, Product, products_of

OUT_DTYPE = torch.bfloat16
NEAR = 1.3
"""Tiles are measured up to this many times the lowest modelled cost."""

SECONDS, LONGEST = 200.0, 2.0
"""Time limits in seconds, for all GEMMs and for one."""


def near_best(problem: Problem, device: torch.device) -> list[Tile]:
    """Return the tiles that could be the fastest, by their modelled cost."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    costs = {tile: cost_of(tile, problem, processors(device)) for tile in candidates(problem, capability)}
    return [tile for tile, cost in costs.items() if cost <= NEAR * min(costs.values())]


def measured(product: Product, seconds: float, stopwatch: Stopwatch) -> Entry:
    """Return the table entry of one product: the fastest tile, and torch's time over its time."""
    from fp8dist_kernels.triton.matmuls import matmul_with

    operands = Operands.random(product, stopwatch.device)
    arguments = (operands.a, operands.b, operands.inv_scale_a, operands.inv_scale_b, OUT_DTYPE, product.fast)
    shape, dtypes = (product.m, product.n, product.k), (product.a_dtype, product.b_dtype, OUT_DTYPE)
    problem = Problem(*shape, product.scaling, product.fast, *dtypes)
    tiles = {str(tile): tile for tile in near_best(problem, stopwatch.device)}
    ours: dict[str, Action] = {name: functools.partial(matmul_with, tile, *arguments) for name, tile in tiles.items()}
    theirs = functools.partial(matmul_torch, *arguments)
    theirs()
    best = next(iter(ours))
    if len(ours) > 1:
        timings = compare(stopwatch, ours, seconds / 3).timings()
        best = min(ours, key=lambda name: timings[name]["median_us"])
    # New rounds, because the fastest of several tiles was in part lucky in the first rounds.
    sides: dict[str, Action] = {"torch": theirs, "triton": ours[best]}
    comparison = compare(stopwatch, sides, seconds / 1.5)
    entry = Entry(*key_of(problem), tiles[best], *comparison.ratio("torch", "triton"))
    speed = 2e-6 * product.m * product.n * product.k / comparison.timings()["triton"]["median_us"]
    interval = f"{entry.vs_torch:6.3f} ({entry.low:.3f} to {entry.high:.3f})"
    print(f"{product.name:44} {product.scaling.value:12} {interval} {speed:6.0f} TFLOP/s {best}", flush=True)
    return entry


def products(options: argparse.Namespace) -> list[Product]:
    """Return the products to measure, most important first, the kinds in turn."""
    if options.smoke:
        return [product for kind in options.kinds for product in products_of(KINDS[kind], SMOKE, 48)]
    steps = [(model, tokens) for tokens in options.tokens for model in ("8B", "70B")]
    in_turn = itertools.zip_longest(*(planned_products(kind, steps) for kind in options.kinds))
    planned: dict[tuple[Any, ...], Product] = {}
    for product in itertools.chain.from_iterable(in_turn):
        if product is not None:  # With as many tokens as features, several GEMMs are the same product.
            planned.setdefault(product[2:], product)
    return list(planned.values())


def tuned(options: argparse.Namespace, table: dict[str, Any], stopwatch: Stopwatch) -> list[float]:
    """Measure each product, and write the table after each. Return torch's time over the best tile's, per product."""
    entries: dict[Key, Entry] = {}
    planned, end = products(options), time.monotonic() + min(SECONDS, options.seconds)
    for place, product in enumerate(planned):
        left = end - time.monotonic()
        if left <= 0:
            print(f"tune_matmuls: out of time after {place} of {len(planned)} products", flush=True)
            break
        seconds = 0.0 if options.smoke else min(LONGEST, 0.6 * left / (len(planned) - place))
        try:
            entry = measured(product, seconds, stopwatch)
        except Exception as error:  # Some versions of torch lack a product, and Triton may reject a tile.
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"{product.name:44} {product.scaling.value:12} skipped: {reason}", flush=True)
            continue
        entries[entry.key] = entry
        faster = [entries[key].described() for key in sorted(entries) if entries[key].faster]
        TileTable.from_json(json.dumps({**table, "entries": faster}))  # It can be read back.
        results_files.write(options.out, {**table, "entries": faster})
    return [entry.vs_torch for entry in entries.values()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line described at the top of this file."""
    import triton  # Not before a test has chosen its interpreter.

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384])
    tiled = [kind for kind in KINDS if kind != "mx"]  # Its kernel has one tile.
    parser.add_argument("--kinds", nargs="+", default=tiled, choices=tiled)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all products together, at most 200")
    parser.add_argument("--out", type=Path, required=True, help="the table of this device")
    results.add_flags(parser)
    parser.set_defaults(run=None)
    options = parser.parse_args(arguments)
    if not (torch.cuda.is_available() or options.smoke):
        print("tune_matmuls: no GPU found; nothing was measured or written", file=sys.stderr)
        return 2
    of = f"{options.commit}{'-dirty' if options.dirty else ''}" if options.commit else None
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    name, today = torch.cuda.get_device_name() if device.type == "cuda" else "cpu", datetime.date.today().isoformat()
    table = {"format": FORMAT, "device": name, "measured": today, "commit": of, "run": options.run}
    table["versions"] = {"torch": torch.__version__, "triton": triton.__version__, "cuda": str(torch.version.cuda)}
    try:
        ratios = tuned(options, table, stopwatch_of(device))
    except KeyboardInterrupt:
        print(f"tune_matmuls: interrupted; what was measured is in {options.out}", file=sys.stderr)
        return 130
    if not ratios:
        print("tune_matmuls: every product was skipped; nothing was written", file=sys.stderr)
        return 1
    mean = statistics.geometric_mean(ratios)
    print(f"geometric mean {mean:.3f} of {len(ratios)}, worst {min(ratios):.3f}: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
