"""Measure tiles of FP8 GEMMs on this GPU, and write the table that is shipped for it.

    python -m scripts.benchmarks.gpu.tune_matmuls [--tokens 4096 8192] [--scalings tensorwise …] [--out FILE]
        [--commit ID] [--run ID] [--seconds N] [--smoke]

Times every candidate tile and torch's own GEMM, interleaved, with a cold L2 cache, and keeps the fastest tile. By
default it measures all GEMMs in the layers of Llama 3 8B and 70B at 4k to 32k tokens, one scaling after the other. It
writes the table after each GEMM, so you can stop it at any time. It keeps entries of an earlier table with the same
commit and versions, does not measure them again, and drops other entries: a table belongs to one commit. Where the
commit is not known, or has changes, it keeps the entries of the same run.
Exit status: 0 success; 1 nothing could be measured; 2 no GPU; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8dist_kernels.reference.matmuls import Scaling, matmul_torch
from scripts.benchmarks.gpu import results
from scripts.benchmarks.gpu.stopwatch import Stopwatch, Timing, stopwatch_of
from scripts.benchmarks.llama_shapes import TOKENS, Shape, shapes_of

REPOSITORY = Path(__file__).resolve().parents[3]
TABLES = REPOSITORY / "kernels" / "fp8dist_kernels" / "triton" / "tables"
OUT_DTYPE = torch.bfloat16
WGRAD = "wgrad"
BACKWARD = ("dgrad", WGRAD)
DIRTY = "-dirty"
SMOKE = (
    Shape("smoke fprop", 48, 64, 128, *[torch.float8_e4m3fn] * 2),
    Shape("smoke wgrad", 64, 48, 128, *[torch.float8_e4m3fn] * 2),
)


def medians(sides: dict[str, Callable[[], object]], repeats: int, stopwatch: Stopwatch) -> dict[str, float]:
    """Return the median µs of each action. The actions take turns, so that clock and temperature drift affect all
    alike."""
    for action in sides.values():  # Compiles, and fills algorithm caches.
        action()
        action()
    times = stopwatch.rounds(list(sides.values()), repeats)
    return {name: Timing.of(samples).median for name, samples in zip(sides, times)}


def scales(shape: Shape, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """Return scales of ones, as casts lay them out."""
    blocks = math.ceil(shape.k / 128)
    if scaling is Scaling.TENSORWISE:
        return torch.ones((), device="cuda"), torch.ones((), device="cuda")
    if scaling is Scaling.ROWWISE:
        return torch.ones(shape.m, 1, device="cuda"), torch.ones(shape.n, 1, device="cuda")
    of_a = torch.ones(blocks, shape.m, device="cuda").t()
    if scaling is Scaling.BLOCKWISE_1D:
        return of_a, torch.ones(blocks, shape.n, device="cuda").t()
    return of_a, torch.ones(math.ceil(shape.n / 128), blocks, device="cuda")


def measured(shape: Shape, scaling: Scaling, fast: bool, repeats: int, stopwatch: Stopwatch) -> dict[str, Any]:
    """Return the table entry of one product: the fastest tile, and torch's time over its time."""
    from fp8dist_kernels.triton.matmuls import matmul_with
    from fp8dist_kernels.triton.tables import Entry, bucket
    from fp8dist_kernels.triton.tiles import Problem, candidates

    # Power draw, and so the clock, depends on the data: use random numbers, not zeros.
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
    times = medians(sides, repeats, stopwatch)
    best = min(tiles, key=times.__getitem__)
    ratio = times["torch"] / times[best]
    speed = f"{ratio:6.3f} {2 * shape.m * shape.n * shape.k / times[best] / 1e6:6.0f} TFLOP/s"
    print(f"{shape.name:32} {scaling.value:10} {'fast' if fast else 'slow'} {speed} {tiles[best]}", flush=True)
    fast = fast and not scaling.in_blocks
    return Entry(scaling.value, fast, bucket(shape.m), shape.n, shape.k, tiles[best], ratio).described()


def versions() -> dict[str, str]:
    """Return the versions that affect speed."""
    import triton

    return {"torch": torch.__version__, "triton": triton.__version__, "cuda": str(torch.version.cuda)}


def commit() -> str | None:
    """Return the commit of this tree, marked if it has changes; None without a repository or without git."""
    ask = ["git", "describe", "--always", f"--dirty={DIRTY}", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(OSError):
        done = subprocess.run(ask, cwd=REPOSITORY, capture_output=True, text=True, check=False)
        return done.stdout.strip() or None
    return None


def problems(options: argparse.Namespace) -> Iterator[tuple[Shape, Scaling, bool]]:
    """Yield the products to measure. Backward products often use slow accumulation, so they are measured both ways. 1 x
    128 scales on both sides are for wgrad, whose operands are both activations."""
    for scaling in map(Scaling, options.scalings):
        for tokens in options.tokens[:1] if options.smoke else options.tokens:
            for shape in SMOKE if options.smoke else shapes_of(tokens):
                if scaling is Scaling.BLOCKWISE_1D and not shape.name.endswith(WGRAD):
                    continue
                yield shape, scaling, True
                if not scaling.in_blocks and shape.name.endswith(BACKWARD):
                    yield shape, scaling, False


def key_of(entry: dict[str, Any]) -> tuple[object, ...]:
    """Return the key of an entry."""
    return tuple(entry[name] for name in ("scaling", "fast_accumulation", "m", "n", "k"))


def kept(path: Path, table: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of an earlier table that can stay: same device, commit and versions.

    Drops entries of an unknown commit or a tree with changes, unless the run is the same: the code may have changed.
    """
    if not path.is_file():
        return []
    before: dict[str, Any] = json.loads(path.read_text())
    alike = all(before.get(key) == table[key] for key in ("device", "commit", "versions"))
    clean = table["commit"] is not None and not table["commit"].endswith(DIRTY)
    if alike and (clean or (table["run"] is not None and before.get("run") == table["run"])):
        return list(before["entries"])
    if before["entries"]:
        of = f"commit {before.get('commit')}, {before.get('versions')}"
        print(f"tune_matmuls: drops {len(before['entries'])} entries of {of}", file=sys.stderr)
    return []


def write(path: Path, table: dict[str, Any], entries: dict[tuple[object, ...], dict[str, Any]]) -> None:
    """Write the table atomically. Raise ValueError if the result could not be read back."""
    from fp8dist_kernels.triton.tables import TileTable

    whole = {**table, "entries": [entries[key] for key in sorted(entries, key=str)]}
    TileTable.from_json(json.dumps(whole))
    results.write(path, whole)


def tuned(options: argparse.Namespace, out: Path, table: dict[str, Any], stopwatch: Stopwatch) -> list[float]:
    """Measure each product, and write the table after each. Return torch's time over the best tile's, per product."""
    entries = {key_of(entry): entry for entry in kept(out, table)}
    ratios = []
    end = time.monotonic() + options.seconds
    for shape, scaling, fast in problems(options):
        if time.monotonic() >= end:
            print(f"tune_matmuls: out of time after {options.seconds:.0f} s", flush=True)
            break
        try:
            entry = measured(shape, scaling, fast, options.repeats, stopwatch)
        except Exception as error:  # Some versions of torch lack a product, and Triton may reject a tile.
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            print(f"{shape.name:32} {scaling.value:10} skipped: {reason}", flush=True)
            continue
        entries[key_of(entry)] = entry
        ratios.append(float(entry["vs_torch"]))
        write(out, table, entries)
    return ratios


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line described at the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--scalings", nargs="+", default=[s.value for s in Scaling], choices=[s.value for s in Scaling])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, help="default: the shipped table of this device")
    parser.add_argument("--seconds", type=float, default=480.0, help="measure no product after so many")
    parser.add_argument("--smoke", action="store_true", help="tiny products")
    parser.add_argument("--commit", help="the measured commit, if there is no repository")
    parser.add_argument("--dirty", action="store_true", help="the tree has changes to this commit")
    parser.add_argument("--run", help="ID of the run; entries of the same run belong together")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.repeats = 2
    if not torch.cuda.is_available():
        print("tune_matmuls: no GPU found; nothing was measured or written", file=sys.stderr)
        return 2
    from fp8dist_kernels.triton.tables import FORMAT, file_name

    device, today = torch.cuda.get_device_name(), datetime.date.today().isoformat()
    out = options.out or TABLES / file_name(device)
    of = f"{options.commit}{DIRTY if options.dirty else ''}" if options.commit else commit()
    about = {"commit": of, "run": options.run, "versions": versions()}
    table = {"format": FORMAT, "device": device, "measured": today, **about}
    try:
        ratios = tuned(options, out, table, stopwatch_of(torch.device("cuda", torch.cuda.current_device())))
    except KeyboardInterrupt:
        print(f"tune_matmuls: interrupted; what was measured is in {out}", file=sys.stderr)
        return 130
    if not ratios:
        print("tune_matmuls: every product was skipped; nothing was written", file=sys.stderr)
        return 1
    print(f"geometric mean {statistics.geometric_mean(ratios):.3f} of {len(ratios)}, worst {min(ratios):.3f}: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
