"""Triton's leaves of the digest against plain torch, and the digest against its formula in Python integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fp8dist
from fp8dist import DelayedScaling
from fp8dist.checks.contents import ArenaContent, Digester, NamedTensor, TensorContent
from fp8dist_kernels.backends import why_not_triton
from fp8dist_kernels.reference.content import BLOCK_BYTES, BLOCK_WORDS, ContentDigest, block_count

if why_not_triton(torch.device("cuda" if torch.cuda.is_available() else "cpu")):
    pytest.skip("Triton does not run here", allow_module_level=True)

from fp8dist_kernels.triton import content as fused
from tests.kernels.test_content_digest import (
    DTYPES,
    LAYOUTS,
    any_bytes,
    any_tensor,
    content_of,
    digest_in_numpy,
    digest_in_python,
    unsigned,
)
from tests.support.counted import Operations
from tests.support.devices import DEVICE

TILE_BYTES = BLOCK_BYTES // 16
EDGES = (0, 1, 7, 8, 9, 16, 4095, 4096, TILE_BYTES - 1, TILE_BYTES, TILE_BYTES + 1)
BLOCKS = (BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, BLOCK_BYTES + 3 * TILE_BYTES + 12, 3 * BLOCK_BYTES)


@cache
def twin() -> ContentDigest:
    return ContentDigest(torch.device("cpu"), "torch")


@cache
def triton() -> ContentDigest:
    return ContentDigest(torch.device(DEVICE), "triton")


def leaves_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves of each tensor, on the CPU, from one launch."""
    leaves, counts = triton().many_leaves(tensors)
    assert counts == [block_count(tensor.nbytes) for tensor in tensors]
    return list(leaves.cpu().split(counts))


def agree(tensors: Sequence[Tensor]) -> None:
    """Assert that Triton's leaves, from one launch on the device, equal plain torch's leaves on the CPU."""
    found = leaves_of([tensor.to(DEVICE) for tensor in tensors])
    for i, (tensor, leaves) in enumerate(zip(tensors, found)):
        assert torch.equal(leaves, twin().leaves(tensor)), i


def cut(sizes: Sequence[int], offset: int, seed: int = 1) -> list[Tensor]:
    """Return slices of one device buffer, each at an address ``offset`` bytes past a multiple of 64."""
    starts = np.cumsum([0, *(64 * (size // 64 + 2) for size in sizes)]).tolist()
    memory = any_bytes(starts[-1], seed).to(DEVICE)
    assert memory.data_ptr() % 64 == 0
    return [memory[start + offset : start + offset + size] for start, size in zip(starts, sizes)]


@pytest.fixture
def more_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend 16 multiprocessors: three strips, 48 programs."""
    monkeypatch.setattr(fused, "processors", lambda device: 16)


@pytest.mark.parametrize("offset", [0, 3])
def test_small_tensors_give_the_digest_in_pythons_integers(offset: int) -> None:
    tensors = cut((*EDGES[:7], 100), offset)
    seeds = torch.arange(2 * len(tensors)).view(-1, 2)
    leaves, counts = triton().many_leaves(tensors)
    for tensor, found, seed in zip(tensors, triton().digests(leaves, counts, seeds).cpu(), seeds.tolist()):
        assert unsigned(found) == digest_in_python(content_of(tensor.cpu()), (seed[0], seed[1]))


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0, 7])
def test_blocks_and_edges_at_any_address(offset: int, more_strips: None) -> None:
    tensors = cut((*EDGES, *BLOCKS), offset)
    seeds = torch.zeros(len(tensors), 2, dtype=torch.int64)
    leaves, counts = triton().many_leaves(tensors)
    for tensor, found in zip(tensors, triton().digests(leaves, counts, seeds).cpu()):
        assert unsigned(found) == digest_in_numpy(content_of(tensor.cpu().clone()), (0, 0))
    for tensor, found in zip(tensors, leaves.cpu().split(counts)):
        assert torch.equal(found, twin().leaves(tensor.cpu()))


@pytest.mark.slow
def test_every_type_in_one_launch() -> None:
    agree([any_tensor(dtype, shape, 2) for dtype in DTYPES for shape in ((), (0, 3), (5, 3))])


def test_any_strides() -> None:
    x = any_tensor(torch.bfloat16, (8, 13), 4)
    on_device = x.to(DEVICE)
    found = leaves_of([layout(on_device) for layout in LAYOUTS.values()])
    for name, leaves in zip(LAYOUTS, found):
        assert torch.equal(leaves, twin().leaves(LAYOUTS[name](x))), name


def test_pending_conjugation_and_negation_are_content() -> None:
    x = any_tensor(torch.complex64, (4, 5), 2).nan_to_num(1.0)
    views: list[Callable[[Tensor], Tensor]] = [lambda x: x, lambda x: x.conj(), lambda x: x.conj().imag]
    found = leaves_of([view(x.to(DEVICE)) for view in views])
    assert [leaves.tolist() for leaves in found] == [twin().leaves(view(x)).tolist() for view in views]
    assert len({tuple(map(tuple, leaves.tolist())) for leaves in found}) == 3


def test_what_lies_around_a_tensor_does_not_enter() -> None:
    memory = any_bytes(4 * TILE_BYTES, 5).to(DEVICE)
    spans = [(start, start + size) for start, size in ((64, 9), (131, 6), (208, 40), (TILE_BYTES + 3, TILE_BYTES + 8))]
    before = leaves_of([memory[a:b] for a, b in spans])
    around = torch.ones_like(memory)
    for a, b in spans:
        around[a:b] = 0
    memory += 101 * around
    assert all(map(torch.equal, before, leaves_of([memory[a:b] for a, b in spans])))


@pytest.mark.slow
def test_tensors_in_any_order_with_empty_ones_between_them(more_strips: None) -> None:
    sizes = (0, BLOCK_BYTES + 17, 5, 0, 3 * TILE_BYTES, 0)
    tensors = cut(sizes, 0)
    straight = leaves_of(tensors)
    backwards = leaves_of(tensors[::-1])
    alone = [leaves_of([tensor])[0] for tensor in tensors]
    assert all(map(torch.equal, straight, backwards[::-1]))
    assert all(map(torch.equal, straight, alone))


def test_nothing() -> None:
    assert leaves_of([]) == []
    assert [tuple(leaves.shape) for leaves in leaves_of([torch.empty(0, device=DEVICE)] * 2)] == [(0, 2)] * 2
    assert triton().row_leaves(torch.empty(0, 3, dtype=torch.int64, device=DEVICE)).shape == (0, 2)


def test_many_copies_are_launched_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [any_tensor(torch.float32, (6, 5), i).to(DEVICE).t() for i in range(5)]
    expected = leaves_of(tensors)
    monkeypatch.setattr(fused, "_COPIED_AT_ONCE", 200)
    launches: list[int] = []
    launch = fused._launch
    monkeypatch.setattr(fused, "_launch", lambda *args: (launches.append(len(args[0])), launch(*args)))
    assert all(map(torch.equal, expected, leaves_of(tensors)))
    assert launches == [2, 2, 1]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_tensor_on_another_device_is_refused(backend: str) -> None:
    here = torch.ones(3, device=DEVICE)
    with pytest.raises(ValueError, match="it is on meta, not on"):
        ContentDigest(torch.device(DEVICE), backend).many_leaves([here, torch.empty(3, device="meta")])


@pytest.mark.skipif(DEVICE == "cpu", reason="takes hours under the interpreter")
@pytest.mark.slow
def test_more_than_two_gibibytes() -> None:
    large = torch.arange((1 << 31) // 8 + BLOCK_WORDS + 7, device=DEVICE)
    assert torch.equal(leaves_of([large])[0], twin().leaves(large.cpu()))


@pytest.mark.slow
def test_rows_are_tensors() -> None:
    words = any_bytes(8 * 5 * 7, 3).view(torch.int64).view(5, -1)
    for rows in (words, words[:, 1:], words[::2, :-1], words.t().contiguous().t()):
        expected = [twin().leaves(row) for row in rows]
        assert torch.equal(twin().row_leaves(rows), torch.cat(expected))
        assert torch.equal(triton().row_leaves(rows.to(DEVICE)).cpu(), torch.cat(expected))


def test_rows_of_several_blocks() -> None:
    words = any_bytes(8 * 2 * (BLOCK_WORDS + 6), 3).view(torch.int64).view(2, -1)
    expected = torch.cat([twin().leaves(row) for row in words])
    assert torch.equal(twin().row_leaves(words), expected)
    assert torch.equal(triton().row_leaves(words.to(DEVICE)).cpu(), expected)


PLANS: dict[str, list[tuple[int, int]]] = {  # (address, bytes)
    "one of 5 GiB": [(1 << 40, 5 << 30)],
    "one of 5 GiB and a byte, unaligned": [((1 << 40) + 1, (5 << 30) + 1)],
    "empty ones": [(0, 0), (4096, 10), (0, 0)],
    "many small ones": [(1 << 20 | i << 12, 100 + i) for i in range(1000)],
    "a mixture": [(i << 32 | (i % 5) * 8, (i * 977_777) % (9 * BLOCK_BYTES)) for i in range(100)],
}


@pytest.mark.parametrize(
    ("plan", "strips"), [*((plan, 3) for plan in PLANS), ("a mixture", 1), ("a mixture", 24), ("empty ones", 24)]
)
def test_each_tile_of_each_tensor_is_done_once(plan: str, strips: int) -> None:
    addresses, sizes = np.array(PLANS[plan], dtype=np.int64).T
    tables = fused._tables(addresses, sizes, strips)
    starts, rest = np.split(tables, [strips + 1])
    shares, rows = np.split(rest, [16 * strips + 1])
    rows = rows.reshape(-1, 4)
    assert (starts[0], starts[-1], shares[-1]) == (0, shares[0], len(rows))
    found = []
    for i, (address, place, count, left) in enumerate(rows):
        tiles = int(count) * (16 if i < shares[0] else 1)
        assert i >= shares[0] or (address % 16 == 0 and left >= tiles * TILE_BYTES and place % 16 == 0)
        found += [(place + t, address + t * TILE_BYTES, left - t * TILE_BYTES) for t in range(tiles)]
    expected, leaf = [], 0
    for address, size in PLANS[plan]:
        places = range(-(-size // TILE_BYTES))
        expected += [(16 * leaf + t, address + t * TILE_BYTES, size - t * TILE_BYTES) for t in places]
        leaf += block_count(size)
    assert sorted(found) == expected
    for bounds in (starts, shares):
        work = [int(rows[a:b, 2].sum()) for a, b in pairwise(bounds)]
        assert max(work) - min(work) <= 1
    assert len(rows) <= 2 * len(PLANS[plan]) + 17 * strips


class Using(Digester):
    """A digester with the same backend on every device."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend

    def on(self, device: torch.device) -> ContentDigest:
        return ContentDigest(device, self.backend)


def test_digests_of_named_tensors_are_those_of_plain_torch() -> None:
    shapes = [(3, 5), (), (0, 2), (7,)]
    tensors = [any_tensor(torch.float32, shape, i) for i, shape in enumerate(shapes)]
    names = "abcd"
    plain = TensorContent("parameter", [NamedTensor(n, t) for n, t in zip(names, tensors)])
    there = TensorContent("parameter", [NamedTensor(n, t.to(DEVICE)) for n, t in zip(names, tensors)])
    assert torch.equal(there.digests(Using("triton")), plain.digests(Using("torch")))


def test_what_runs_does_not_depend_on_the_number_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []
    monkeypatch.setattr(fused, "_launch", lambda *args: launches.append(len(args[0])))
    seen = []
    for count in (2, 50):
        tensors = [NamedTensor(str(i), torch.ones(9, device=DEVICE)) for i in range(count)]
        content = TensorContent("parameter", tensors)
        digester = Using("triton")
        with Operations() as ops:
            content.digests(digester)
        seen.append(ops.seen)
    assert launches == [2, 50]
    assert seen[0] == seen[1]


def test_the_tensor_that_cannot_be_read_is_named() -> None:
    tensors = [torch.ones(2), torch.ones(2, device="meta")]
    content = TensorContent("gradient", [NamedTensor(name, tensor) for name, tensor in zip("ab", tensors)])
    with pytest.raises(ValueError, match="gradient 'b': it is on the meta device"):
        content.digests(Using("triton"))


def test_digests_of_slots_are_those_of_plain_torch() -> None:
    model = nn.Identity()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=16))
    for i in range(5):
        manager.register(f"m{i}", "input", "e4m3")
    arena = manager._syncs[0].arena
    arena.place(torch.device(DEVICE))
    for part in (arena.scale, arena.inv_scale, arena.amax, arena.history, arena.block_max):
        part.normal_()
    content = ArenaContent(arena)
    assert torch.equal(content.digests(Using("triton")), content.digests(Using("torch")))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_one_element_with_any_stride(backend: str) -> None:
    """torch treats a tensor of one element as contiguous, whatever its stride."""
    digest = ContentDigest(torch.device(DEVICE), backend)
    column = torch.full((1, 4), 3.0, device=DEVICE)[:, 0]
    assert digest.leaves(column).tolist() == digest.leaves(torch.full((1,), 3.0, device=DEVICE)).tolist()
    assert len(digest.leaves(torch.ones(0, 4, device=DEVICE)[:, 0])) == 0
