"""How a product is cut into tiles: by the shipped table of the device, else by a formula.

Nothing is tried out at run time: a choice that depends on timings may differ from rank to rank, and with it the bits of
the result. Both ways depend on the problem and on the kind of device only.

The formula. At the speed of FP8 wgmma (4096 multiply-adds a clock and multiprocessor) a tile of 128 x 256 reads 48
bytes a clock from L2. The fastest published products read at about 30 a clock: reading, not multiplying, is the
bottleneck, more so for smaller tiles. So a tile's time is its bytes, and the best tile is the one with which the
busiest program reads the fewest.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from fp8dist_kernels.reference.matmuls import Scaling
from fp8dist_kernels.triton.launching import processors
from fp8dist_kernels.triton.tables import Tile, TileTable

__all__ = ["Problem", "best_of", "candidates", "faster_than_torch", "tile_for"]

_WIDE = Tile(rows=128, columns=256, depth=128, warps=8, stages=4, group=16)
_WIDE_BLOCKS = Tile(rows=128, columns=256, depth=128, warps=8, stages=3, group=16)
_TALL = Tile(rows=256, columns=128, depth=128, warps=8, stages=4, group=8)
_SQUARE = Tile(rows=128, columns=128, depth=128, warps=8, stages=5, group=8)
_LOW = Tile(rows=64, columns=128, depth=128, warps=4, stages=4, group=16)
_SMALL = Tile(rows=64, columns=64, depth=128, warps=4, stages=4, group=8)

# The fifth generation of tensor cores keeps accumulators apart from registers, and Triton buffers one stage more.
_WIDE_BLACKWELL = Tile(rows=128, columns=256, depth=128, warps=8, stages=3, group=16)
_LOW_BLACKWELL = Tile(rows=64, columns=128, depth=128, warps=4, stages=3, group=16)

_HOPPER = 9
_BLACKWELL = 10
_STEPS_TO_WRITE = 2
"""Writing a tile takes about as long as so many steps of its contracted dim: the next tile's operands arrive meanwhile,
but nothing is multiplied."""


@dataclass(frozen=True)
class Problem:
    """What is multiplied: a [m, k] by b [n, k]."""

    m: int
    n: int
    k: int
    scaling: Scaling
    fast_accumulation: bool


@functools.lru_cache(maxsize=1 << 12)
def tile_for(problem: Problem, device: torch.device) -> Tile:
    """The tile of a product on ``device``: the measured one if there is one, else the formula's. The same on every
    call, and on all devices of the same kind."""
    tiles = candidates(problem, _capability(device))
    entry = TileTable.of(_name(device)).entry(problem.m, problem.n, problem.k, *_kind(problem))
    if entry is not None and entry.tile in tiles:
        return entry.tile
    return best_of(tiles, problem, processors(device))


@functools.lru_cache(maxsize=1 << 12)
def faster_than_torch(problem: Problem, device: torch.device) -> bool:
    """Whether the shipped table says that Triton is at least as fast as torch's own product. Never without a
    measurement."""
    entry = TileTable.of(_name(device)).entry(problem.m, problem.n, problem.k, *_kind(problem))
    return entry is not None and entry.vs_torch >= 1.0 and entry.tile in candidates(problem, _capability(device))


def candidates(problem: Problem, capability: tuple[int, int]) -> tuple[Tile, ...]:
    """The tiles that ``problem`` may be cut into on a GPU of this compute capability, the best for large ones first.

    ``tests/kernels/test_compiled_matmuls.py`` compiles each for all it may be chosen for, without a spilled register.
    """
    if capability[0] == _HOPPER:
        return (*_large_for_hopper(problem), _SQUARE, _LOW, _SMALL)
    if capability[0] == _BLACKWELL:
        return (*(() if problem.scaling.in_blocks else (_WIDE_BLACKWELL,)), _SQUARE, _LOW_BLACKWELL, _SMALL)
    return (_SMALL,)  # Ada and consumer Blackwell have 99 KB of shared memory.


def _large_for_hopper(problem: Problem) -> tuple[Tile, ...]:
    if problem.scaling is Scaling.BLOCKWISE_1D:
        return ()  # A scale for each column would not fit the registers beside the accumulator of a wide tile.
    if problem.scaling is Scaling.BLOCKWISE:
        return (_WIDE_BLOCKS,)
    return (_WIDE, _TALL) if problem.fast_accumulation else (_WIDE,)


def best_of(tiles: tuple[Tile, ...], problem: Problem, processors: int) -> Tile:
    """The tile with which the busiest of ``processors`` programs reads the fewest bytes; the first of equals."""

    def cost(tile: Tile) -> int:
        count = _ceil(problem.m, tile.rows) * _ceil(problem.n, tile.columns)
        steps = _ceil(problem.k, tile.depth) + _STEPS_TO_WRITE
        return _ceil(count, processors) * steps * (tile.rows + tile.columns) * tile.depth

    return min(tiles, key=cost)


def _kind(problem: Problem) -> tuple[str, bool]:
    # Block-scaled products add up in float32 whatever was asked for.
    return problem.scaling.value, problem.fast_accumulation and not problem.scaling.in_blocks


def _ceil(size: int, by: int) -> int:
    return -(-size // by)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _capability(device: torch.device) -> tuple[int, int]:
    """Elsewhere, that is under the interpreter, Hopper's: there the tiles of a training GPU are to be tested."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (_HOPPER, 0)
