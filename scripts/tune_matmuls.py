"""Measure tiles of FP8 products on this GPU, and write the table that is shipped for it.

    python scripts/tune_matmuls.py [--tokens 4096 8192] [--scalings tensorwise …] [--out FILE]

Times every tile that may be chosen, and torch's own product, taking turns, with a cold L2, and keeps the fastest. By
default of all products in the layers of Llama 3 8B and 70B at 4k to 32k tokens; shapes that are not measured stay as
they are in the file. Without a GPU it says so, and exits with status 2.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from llama_shapes import TOKENS, Shape, shapes_of
from torch import Tensor

from fp8dist.kernels.matmuls import Scaling, matmul_torch

REPOSITORY = Path(__file__).resolve().parents[1]
TABLES = REPOSITORY / "kernels" / "ops" / "fused" / "tables"
OUT_DTYPE = torch.bfloat16
FLUSH_BYTES = 1 << 30
"""More than any L2, and enough to keep the device busy until the launch that is timed has been enqueued."""
BACKWARD = ("dgrad", "wgrad")

Timed = dict[str, float]


def flushed(action: Callable[[], object], flush: Tensor) -> float:
    """ms of one call on the device, with an L2 that holds nothing of use."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    start.record()
    action()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def medians(sides: dict[str, Callable[[], object]], repeats: int, flush: Tensor) -> Timed:
    """Median ms of each. They take turns, so that clocks and temperature are the same for all."""
    for action in sides.values():  # Compiles, and fills caches of algorithms.
        action()
        action()
    runs: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, action in sides.items():
            runs[name].append(flushed(action, flush))
    return {name: statistics.median(times) for name, times in runs.items()}


def scales(shape: Shape, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """Ones, as casts lay them out."""
    blocks = math.ceil(shape.k / 128)
    if scaling is Scaling.TENSORWISE:
        return torch.ones((), device="cuda"), torch.ones((), device="cuda")
    if scaling is Scaling.ROWWISE:
        return torch.ones(shape.m, 1, device="cuda"), torch.ones(shape.n, 1, device="cuda")
    return torch.ones(blocks, shape.m, device="cuda").t(), torch.ones(math.ceil(shape.n / 128), blocks, device="cuda")


def measured(shape: Shape, scaling: Scaling, fast: bool, repeats: int, flush: Tensor) -> dict[str, Any]:
    """The table's entry of one product: the fastest tile, and torch's time by its time."""
    from fp8dist.kernels.fused.matmuls import matmul_with
    from fp8dist.kernels.fused.tables import Entry, bucket
    from fp8dist.kernels.fused.tiles import Problem, candidates

    # Power and so clocks depend on what is multiplied: numbers as training has them, not zeros.
    a, b = (
        torch.randn(rows, shape.k, device="cuda", dtype=torch.bfloat16).to(dtype)
        for rows, dtype in ((shape.m, shape.a_dtype), (shape.n, shape.b_dtype))
    )
    arguments = (a, b, *scales(shape, scaling), OUT_DTYPE, fast)
    problem = Problem(shape.m, shape.n, shape.k, scaling, fast)
    tiles = {f"tile {i}": tile for i, tile in enumerate(candidates(problem, torch.cuda.get_device_capability()))}
    sides: dict[str, Callable[[], object]] = {"torch": functools.partial(matmul_torch, *arguments)}
    for name, tile in tiles.items():
        sides[name] = functools.partial(matmul_with, tile, *arguments)
    times = medians(sides, repeats, flush)
    best = min(tiles, key=times.__getitem__)
    ratio = times["torch"] / times[best]
    speed = f"{ratio:6.3f} {2 * shape.m * shape.n * shape.k / times[best] / 1e9:6.0f} TFLOP/s"
    print(f"{shape.name:32} {scaling.value:10} {'fast' if fast else 'slow'} {speed} {tiles[best]}", flush=True)
    fast = fast and scaling is not Scaling.BLOCKWISE
    return Entry(scaling.value, fast, bucket(shape.m), shape.n, shape.k, tiles[best], ratio).described()


def versions() -> dict[str, str]:
    """Of what decides about speed."""
    import triton

    return {"torch": torch.__version__, "triton": triton.__version__, "cuda": str(torch.version.cuda)}


def commit() -> str | None:
    """Of this tree, marked if it was changed since; None outside a repository."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=REPOSITORY, capture_output=True, text=True
    )
    return done.stdout.strip() or None


def problems(options: argparse.Namespace) -> Iterator[tuple[Shape, Scaling, bool]]:
    """What is to be measured. Backward products are often accumulated slowly, so those are measured both ways."""
    for tokens in options.tokens:
        for shape in shapes_of(tokens):
            for name in options.scalings:
                scaling = Scaling(name)
                yield shape, scaling, True
                if scaling is not Scaling.BLOCKWISE and shape.name.endswith(BACKWARD):
                    yield shape, scaling, False


def key_of(entry: dict[str, Any]) -> tuple[object, ...]:
    """What an entry is about."""
    return tuple(entry[name] for name in ("scaling", "fast_accumulation", "m", "n", "k"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--scalings", nargs="+", default=[s.value for s in Scaling], choices=[s.value for s in Scaling])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, help="default: the shipped table of this device")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("tune_matmuls: no GPU here, and nothing is written without measuring", file=sys.stderr)
        return 2
    from fp8dist.kernels.fused.tables import FORMAT, TileTable, file_name

    device = torch.cuda.get_device_name()
    out = options.out or TABLES / file_name(device)
    before = json.loads(out.read_text())["entries"] if out.is_file() else []
    entries = {key_of(entry): entry for entry in before}
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    ratios = []
    for shape, scaling, fast in problems(options):
        try:
            entry = measured(shape, scaling, fast, options.repeats, flush)
        except (RuntimeError, ValueError) as error:  # Not every torch has every product.
            print(f"{shape.name:32} {scaling.value:10} skipped: {str(error).splitlines()[0]}", flush=True)
            continue
        entries[key_of(entry)] = entry
        ratios.append(float(entry["vs_torch"]))
    table = {
        "format": FORMAT,
        "device": device,
        "measured": datetime.date.today().isoformat(),
        "commit": commit(),
        "versions": versions(),
        "entries": [entries[key] for key in sorted(entries, key=str)],
    }
    text = json.dumps(table, indent=1) + "\n"
    TileTable.from_json(text)
    out.write_text(text)
    print(f"geometric mean {statistics.geometric_mean(ratios):.3f} of {len(ratios)}, worst {min(ratios):.3f}: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
