"""Leaves of the checker's digest, for many tensors, in one launch that reads each byte once.

A leaf is the sum of a block's words, each times two 8-byte keys, which are the same in all blocks: see
``reference.content``. To load keys rarely, a program keeps those of one tile of a block (2048 words, 8 per thread) in
registers, and reads this tile in all blocks of a *strip*. ``_TILES`` programs read a strip, one for each tile of a
block. Strips consist of whole blocks at 16-byte-aligned addresses. The rest (what is after a tensor's last whole block,
and tensors at other addresses) is divided into *shares*, one per program. A share is read tile by tile with masks, and
so are its keys.

Atomics add up the parts of a leaf. Integers wrap, so their order does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8dist_kernels.reference.content import BLOCK_BYTES, BLOCK_WORDS, FOLD, as_bytes, block_count
from fp8dist_kernels.triton.launching import on_device_of, processors

Integers = npt.NDArray[np.int64]

_WARPS = 8
_TILE_WORDS = 4 * _WARPS * 64  # A thread has 4 loads of 16 bytes in flight.
_TILE_BYTES = 8 * _TILE_WORDS
_TILES = BLOCK_WORDS // _TILE_WORDS
_PROGRAMS_PER_PROCESSOR = 3
_REGISTERS = 80  # Per thread, so that three programs fit on a multiprocessor. With the compiler's choice, only two do.
_COPIED_AT_ONCE = 1 << 28
"""Bytes of copies of non-contiguous tensors after which a batch is launched and its copies are freed."""

_UNSIGNED_FOLD = tl.constexpr(FOLD & 0xFFFFFFFFFFFFFFFF)


@triton.jit
def _tile(pointer, WARPS: tl.constexpr):
    """Return pointers to the words of a tile, [4, 64 * WARPS]. A warp reads 512 bytes at once, 16 per thread.

    Two axes: the first enumerates the loads of a thread. Triton 3.6 lays out three axes badly.
    """
    return pointer + tl.arange(0, 64 * WARPS)[None, :] + tl.arange(0, 4)[:, None] * (64 * WARPS)


@triton.jit
def _sum(products, WARPS: tl.constexpr):
    """Return int64[WARPS, 1]: one sum per warp. A sum over all warps would go through shared memory, with a barrier."""
    return tl.sum(tl.reshape(tl.sum(products, 0), (WARPS, 64)), 1, keep_dims=True)


@triton.jit
def _add(words, key_0, key_1, leaf, WARPS: tl.constexpr):
    """Add the sums of a tile's folded words, times each of their two keys, to int64[2] at ``leaf``."""
    spread = words.to(tl.uint64, bitcast=True) * _UNSIGNED_FOLD
    folded = (spread ^ (spread >> 32)).to(tl.int64, bitcast=True)
    # The first thread of each warp adds both sums. 64 lanes, as in the thread layout of a row of words.
    lane = tl.arange(0, 64)[None, :]
    sums = tl.where(lane == 0, _sum(folded * key_0, WARPS), _sum(folded * key_1, WARPS))
    here = leaf + tl.broadcast_to(lane, (WARPS, 64))
    tl.atomic_add(here, sums, mask=tl.broadcast_to(lane < 2, (WARPS, 64)), sem="relaxed")


@triton.jit
def _words_of(address, nbytes, places, WARPS: tl.constexpr):
    """Load a tile's words, int64, from any address. Bytes from ``nbytes`` on are not read, and count as 0. ``places``:
    the index of each word."""
    content = address.to(tl.pointer_type(tl.uint8))
    words = tl.zeros_like(places).to(tl.int64)
    if (address & 7) == 0:
        words = tl.load(_tile(address.to(tl.pointer_type(tl.int64)), WARPS), mask=places < nbytes // 8, other=0)
        for i in tl.static_range(7):
            byte = tl.load(content + (nbytes & -8) + i, mask=i < (nbytes & 7), other=0).to(tl.int64)
            words |= tl.where(places == nbytes // 8, byte << (8 * i), 0)
    else:
        for i in range(tl.minimum(nbytes, 8)):  # Not a constant: the compiler would unroll, which takes more registers.
            place = places * 8 + i
            words |= tl.load(content + place, mask=place < nbytes, other=0).to(tl.int64) << (8 * i)
    return words


@triton.jit
def _add_strip(first, last, rows, tile, keys, leaves, TILES: tl.constexpr, WARPS: tl.constexpr):
    """Add tile number ``tile`` of each block of a strip: rows ``first`` to ``last`` (exclusive) of ``_tables``."""
    TILE: tl.constexpr = 256 * WARPS
    key = _tile(keys + tile * TILE, WARPS)
    key_0 = tl.load(key)
    key_1 = tl.load(key + TILES * TILE)
    for row in range(first, last):
        address = tl.load(rows + 4 * row) + tile * (8 * TILE)
        leaf = leaves + 2 * (tl.load(rows + 4 * row + 1) // TILES)
        content = tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)
        words = tl.load(_tile(content, WARPS))
        for left in range(tl.load(rows + 4 * row + 2).to(tl.int32) - 1, -1, -1):
            content = tl.multiple_of(content + TILES * TILE, 16)
            ahead = words
            if left > 0:
                ahead = tl.load(_tile(content, WARPS))  # Arrives while the current words are added.
            _add(words, key_0, key_1, leaf, WARPS)
            words = ahead
            leaf += 2


@triton.jit
def _add_share(first, last, rows, keys, leaves, TILES: tl.constexpr, WARPS: tl.constexpr):
    """Add all tiles of a share: rows ``first`` to ``last`` (exclusive) of ``_tables``."""
    TILE: tl.constexpr = 256 * WARPS
    places = _tile(0, WARPS)
    for row in range(first, last):
        address = tl.load(rows + 4 * row)
        place = tl.load(rows + 4 * row + 1)
        left = tl.load(rows + 4 * row + 3)
        for _ in range(tl.load(rows + 4 * row + 2)):
            nbytes = tl.minimum(left, 8 * TILE).to(tl.int32)
            words = _words_of(address, nbytes, places, WARPS)
            key = _tile(keys + (place % TILES) * TILE, WARPS)  # After the words, to save registers.
            key_0 = tl.load(key, mask=places * 8 < nbytes, other=0)
            key_1 = tl.load(key + TILES * TILE, mask=places * 8 < nbytes, other=0)
            _add(words, key_0, key_1, leaves + 2 * (place // TILES), WARPS)
            address += 8 * TILE
            place += 1
            left -= 8 * TILE


@triton.jit
def _leaves_kernel(
    tables,  # int64: see ``_tables``
    keys,  # int64[2, TILES * 256 * WARPS]
    leaves,  # int64[leaves, 2], zeros
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Add up the leaves: each program reads its tile of the blocks of a strip, then its share."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    strip = tables + program // TILES
    share = tables + programs // TILES + 1 + program
    rows = tables + programs // TILES + 1 + programs + 1
    _add_strip(tl.load(strip), tl.load(strip + 1), rows, program % TILES, keys, leaves, TILES, WARPS)
    _add_share(tl.load(share), tl.load(share + 1), rows, keys, leaves, TILES, WARPS)


def many_leaves(tensors: Sequence[Tensor], keys: Tensor) -> tuple[Tensor, list[int]]:
    """See ``reference.content.ContentDigest``. ``keys``: int64[2, BLOCK_WORDS], on the device of all tensors."""
    sizes = np.array([tensor.nbytes for tensor in tensors], dtype=np.int64)
    counts: list[int] = (-(-sizes // BLOCK_BYTES)).tolist()
    leaves = torch.zeros(sum(counts), 2, dtype=torch.int64, device=keys.device)
    start = leaf = 0
    for batch in _batches(tensors, keys.device):
        end = start + len(batch)
        next_leaf = leaf + sum(counts[start:end])
        addresses = np.array([tensor.data_ptr() for tensor in batch], dtype=np.int64)
        _launch(addresses, sizes[start:end], keys, leaves[leaf:next_leaf])
        start, leaf = end, next_leaf
    return leaves, counts


def row_leaves(words: Tensor, keys: Tensor) -> Tensor:
    """See ``reference.content.ContentDigest``. ``keys`` as in ``many_leaves``."""
    rows, width = words.shape
    if words.stride(1) != 1:
        words = words.contiguous()
    addresses = words.data_ptr() + 8 * words.stride(0) * np.arange(rows, dtype=np.int64)
    leaves = torch.zeros(rows * block_count(8 * width), 2, dtype=torch.int64, device=keys.device)
    _launch(addresses, np.full(rows, 8 * width, dtype=np.int64), keys, leaves)
    return leaves


def _batches(tensors: Sequence[Tensor], device: torch.device) -> Iterator[list[Tensor]]:
    """Yield the tensors, or contiguous copies of those that are not. One batch, unless there are many copies."""
    batch: list[Tensor] = []
    copied = 0
    for tensor in tensors:
        if tensor.device != device:
            raise ValueError(f"it is on {tensor.device}, not on {device}")
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            tensor = as_bytes(tensor)
            copied += tensor.nbytes
        batch.append(tensor)
        if copied >= _COPIED_AT_ONCE:
            yield batch
            batch, copied = [], 0
    yield batch


def _launch(addresses: Integers, sizes: Integers, keys: Tensor, leaves: Tensor) -> None:
    """Add the content of ``sizes`` bytes at each of ``addresses`` to ``leaves``, int64[leaves, 2], in this order."""
    if len(leaves) == 0:
        return
    strips = max(1, processors(keys.device) * _PROGRAMS_PER_PROCESSOR // _TILES)
    tables = torch.from_numpy(_tables(addresses, sizes, strips))
    if keys.is_cuda:  # Only a copy from pinned memory does not make the host wait.
        tables = tables.pin_memory().to(keys.device, non_blocking=True)
    with on_device_of(keys):
        _leaves_kernel[(strips * _TILES,)](
            tables, keys, leaves, TILES=_TILES, WARPS=_WARPS, num_warps=_WARPS, maxnreg=_REGISTERS
        )


def _tables(addresses: Integers, sizes: Integers, strips: int) -> Integers:
    """Return the programs' work as one int64 array: [strips + 1], the first row of each strip; [programs + 1], the
    first row of each program's share; then the rows. A row is a contiguous run of blocks (in a strip) or tiles (in a
    share), as four numbers: its address, its leaf times ``_TILES`` plus its tile, its number of blocks or tiles, and
    the number of bytes from the address to the end of the tensor.

    Strips are equally long to within a block, shares to within a tile. A row ends where a tensor, strip or share ends,
    so there are few rows, however large the tensors are.
    """
    blocks = -(-sizes // BLOCK_BYTES)
    places = (np.cumsum(blocks) - blocks) * _TILES
    whole = np.where(addresses % 16 == 0, sizes // BLOCK_BYTES, 0)
    rest = -(-(sizes - whole * BLOCK_BYTES) // _TILE_BYTES)
    runs, strip = _cut(whole, strips)
    parts, share = _cut(rest, strips * _TILES)
    owner = np.concatenate([runs[:, 0], parts[:, 0]])
    tile = np.concatenate([runs[:, 1] * _TILES, parts[:, 1] + whole[parts[:, 0]] * _TILES])
    rows = np.empty((len(owner), 4), dtype=np.int64)
    rows[:, 0] = addresses[owner] + tile * _TILE_BYTES
    rows[:, 1] = places[owner] + tile
    rows[:, 2] = np.concatenate([runs[:, 2], parts[:, 2]])
    rows[:, 3] = sizes[owner] - tile * _TILE_BYTES
    return np.concatenate([strip, share + len(runs), rows.reshape(-1)])


def _cut(counts: Integers, shares: int) -> tuple[Integers, Integers]:
    """Split a sequence of tensors, of ``counts`` units each, into ``shares`` parts of equal length to within a unit.

    Returns:
        int64[r, 3], a row per run of units: the tensor's index, the run's first unit in the tensor, its length.
        int64[shares + 1], the first row of each part.
    """
    ends = np.cumsum(counts)
    total = int(ends[-1])
    wanted = np.arange(shares + 1, dtype=np.int64) * total // shares
    cuts = np.unique(np.concatenate([ends, wanted]))
    starts = cuts[:-1]
    owner = np.searchsorted(ends, starts, side="right")
    return np.stack([owner, starts - (ends - counts)[owner], np.diff(cuts)], 1), np.searchsorted(cuts, wanted)
