"""Selects the tile of a product: from the shipped table of the device (``tables.py``), else by a formula.

Nothing is tuned at run time: timings differ from rank to rank, so the choice of a tile could differ too, and with it
the bits of the result. Table and formula depend only on the problem and the kind of device.

The formula: at the speed of FP8 wgmma (4096 multiply-adds per clock and multiprocessor), a tile of 128 x 256 reads 48
bytes per clock and multiprocessor from L2. The fastest published products read about 30. So reading, not multiplying,
is the bottleneck, more so for smaller tiles. The time of a tile is then proportional to the bytes that it reads, and
the best tile minimises the bytes read by the busiest program.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import MappingProxyType

import torch

from fp8dist_kernels.formats import E4M3, E5M2
from fp8dist_kernels.reference.matmuls import Scaling
from fp8dist_kernels.triton.launching import processors
from fp8dist_kernels.triton.tables import Entry, Key, Tile, TileTable, bucket

_WIDE = Tile(rows=128, columns=256, depth=128, warps=8, stages=4, group=16)
_WIDE_BLOCKS = Tile(rows=128, columns=256, depth=128, warps=8, stages=3, group=16)
_TALL = Tile(rows=256, columns=128, depth=128, warps=8, stages=4, group=8)
_SQUARE = Tile(rows=128, columns=128, depth=128, warps=8, stages=5, group=8)
_LOW = Tile(rows=64, columns=128, depth=128, warps=4, stages=4, group=16)
_SMALL = Tile(rows=64, columns=64, depth=128, warps=4, stages=4, group=8)

# Fifth-generation tensor cores keep accumulators outside of registers, and Triton buffers one more stage.
_WIDE_BLACKWELL = Tile(rows=128, columns=256, depth=128, warps=8, stages=3, group=16)
_LOW_BLACKWELL = Tile(rows=64, columns=128, depth=128, warps=4, stages=3, group=16)

_NAMES = MappingProxyType({format.dtype: format.name for format in (E4M3, E5M2)} | {torch.bfloat16: "bfloat16"})
_HOPPER = 9
_BLACKWELL = 10
_STEPS_TO_WRITE = 2
"""Time to write a tile to memory, as a number of steps of ``depth``. Meanwhile nothing is multiplied."""


@dataclass(frozen=True)
class Problem:
    """The properties of a product of a [m, k] and b [n, k] that decide its speed."""

    m: int
    n: int
    k: int
    scaling: Scaling
    fast_accumulation: bool
    a_dtype: torch.dtype
    b_dtype: torch.dtype
    out_dtype: torch.dtype


@functools.lru_cache(maxsize=1 << 12)
def tile_for(problem: Problem, device: torch.device) -> Tile:
    """Return the tile for a product on ``device``: the measured one if there is one, else the formula's. The same on
    every call, and on all devices of one kind."""
    tiles = candidates(problem, capability_of(device))
    entry = _measured(problem, device)
    if entry is not None and entry.tile in tiles:
        return entry.tile
    return best_of(tiles, problem, processors(device))


@functools.lru_cache(maxsize=1 << 12)
def faster_than_torch(problem: Problem, device: torch.device) -> bool:
    """True if the shipped table shows that Triton is faster than torch's product. False without a measurement."""
    entry = _measured(problem, device)
    return entry is not None and entry.faster and entry.tile in candidates(problem, capability_of(device))


def key_of(problem: Problem) -> Key:
    """Return the problem's key in a table."""
    # Block-scaled products always accumulate in float32.
    fast = problem.fast_accumulation and not problem.scaling.in_blocks
    a, b, out = (_NAMES.get(dtype, str(dtype)) for dtype in (problem.a_dtype, problem.b_dtype, problem.out_dtype))
    return problem.scaling.value, fast, a, b, out, bucket(problem.m), problem.n, problem.k


def _measured(problem: Problem, device: torch.device) -> Entry | None:
    return TileTable.of(_name(device)).entry(key_of(problem))


def candidates(problem: Problem, capability: tuple[int, int]) -> tuple[Tile, ...]:
    """Return the allowed tiles for ``problem`` on a GPU of this compute capability, the best for large problems first.

    ``tests/kernels/test_compiled.py`` compiles each tile for all its uses and checks that no register spills.
    """
    if capability[0] == _HOPPER:
        return (*_large_for_hopper(problem), _SQUARE, _LOW, _SMALL)
    if capability[0] == _BLACKWELL:
        return (*(() if problem.scaling.in_blocks else (_WIDE_BLACKWELL,)), _SQUARE, _LOW_BLACKWELL, _SMALL)
    return (_SMALL,)  # Ada and consumer Blackwell have 99 KB of shared memory.


def _large_for_hopper(problem: Problem) -> tuple[Tile, ...]:
    if problem.scaling is Scaling.BLOCKWISE_1D:
        return ()  # Registers do not hold a scale per column beside the accumulator of a wide tile.
    if problem.scaling is Scaling.BLOCKWISE:
        return (_WIDE_BLOCKS,)
    return (_WIDE, _TALL) if problem.fast_accumulation else (_WIDE,)


def best_of(tiles: tuple[Tile, ...], problem: Problem, processors: int) -> Tile:
    """Return the tile with the lowest ``cost_of``; of equal ones the first."""
    return min(tiles, key=lambda tile: cost_of(tile, problem, processors))


def cost_of(tile: Tile, problem: Problem, processors: int) -> int:
    """Return the modelled cost of a tile: the bytes of FP8 that the busiest of ``processors`` programs reads, with a
    surcharge for writing the result."""
    count = _ceil(problem.m, tile.rows) * _ceil(problem.n, tile.columns)
    steps = _ceil(problem.k, tile.depth) + _STEPS_TO_WRITE
    return _ceil(count, processors) * steps * (tile.rows + tile.columns) * tile.depth


def _ceil(size: int, by: int) -> int:
    return -(-size // by)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability. Under the interpreter, Hopper's: tests then cover the tiles of a training GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (_HOPPER, 0)
