"""The content digest, in plain torch and in Triton: it equals its formula, ignores strides, and sees every other
change."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8dist.checks.contents import Digester, Key, NamedTensor, TensorContent
from fp8dist_kernels.reference.content import BLOCK_BYTES, BLOCK_WORDS, ContentDigest, as_bytes, block_count
from fp8dist_kernels.triton import content as fused
from tests.support.answers import MASK, mixed, word
from tests.support.counted import Operations
from tests.support.devices import DEVICE
from tests.support.elements import flip

TILE_BYTES = BLOCK_BYTES // 16
BACKENDS = pytest.mark.parametrize("backend", ["torch", "triton"])
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
SMALL = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
DTYPES = [
    *FLOATS, *(getattr(torch, f"float8_{name}") for name in SMALL), torch.bool,
    *(getattr(torch, name) for name in INTEGERS),
]  # fmt: skip


FOLD = 0xD6E8FEB86659FD93
Pair = tuple[int, int]


@cache
def keys() -> Any:
    """Return the keys of lane 0 and lane 1, uint64[2, BLOCK_WORDS]: odd numbers from one stream."""
    stream = [word(place, seed=0) | 1 for place in range(2 * BLOCK_WORDS)]
    return np.array(stream, dtype=np.uint64).reshape(2, BLOCK_WORDS)


def digest_of_leaves(leaves: Sequence[int], lane: int, seed: int) -> int:
    key = keys()[lane].tolist()
    return mixed((sum(mixed((leaf ^ key[b % BLOCK_WORDS]) + b & MASK) for b, leaf in enumerate(leaves)) + seed) & MASK)


def digest_in_python(content: bytes, seed: Pair) -> Pair:
    """Return the digest as the docstring of reference/content.py defines it. numpy's sums wrap around."""
    words = np.frombuffer(content + bytes(-len(content) % 8), dtype="<u8") * np.uint64(FOLD)
    folded, lanes = words ^ (words >> np.uint64(32)), []
    for lane, key in enumerate(keys()):
        parts = [folded[start : start + BLOCK_WORDS] for start in range(0, len(folded), BLOCK_WORDS)]
        leaves = [int(np.sum(part * key[: len(part)], dtype=np.uint64)) for part in parts]
        lanes.append(digest_of_leaves(leaves, lane, seed[lane]))
    return lanes[0], lanes[1]


@cache
def digester(backend: str = "torch") -> ContentDigest:
    return ContentDigest(torch.device("cpu" if backend == "torch" else DEVICE), backend)


def unsigned(pair: Tensor) -> Pair:
    first, second = (x & MASK for x in pair.tolist())
    return first, second


def digests_of(tensors: Sequence[Tensor], seed: Pair = (0, 0), by: ContentDigest | None = None) -> list[Pair]:
    """Return the digests of tensors that are given at once."""
    by = by or digester()
    leaves, counts = by.many_leaves([tensor.to(by.device) for tensor in tensors])
    assert counts == [block_count(tensor.nbytes) for tensor in tensors]
    seeds = torch.tensor([[s - (1 << 64) if s >> 63 else s for s in seed]] * len(counts)).view(-1, 2)
    return [unsigned(pair) for pair in by.digests(leaves, counts, seeds).cpu()]


def digest_of(tensor: Tensor) -> Pair:
    return digests_of([tensor])[0]


def any_bytes(nbytes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def any_tensor(dtype: torch.dtype, shape: Sequence[int], seed: int = 0) -> Tensor:
    """Return a tensor of random bits; a bool tensor has only True and False."""
    numel = int(np.prod(shape, dtype=np.int64))
    if dtype is torch.bool:
        return (any_bytes(numel, seed) % 2).bool().reshape(tuple(shape))
    return any_bytes(numel * dtype.itemsize, seed).view(dtype).reshape(tuple(shape))


def content_of(tensor: Tensor) -> bytes:
    """Return the bytes of a contiguous copy."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy.copy_(tensor)
    flat = copy.reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def test_keys_come_from_splitmix64() -> None:
    """The reference implementation publishes its first numbers."""
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [word(place, seed=0) for place in range(3)] == expected


SEED = (0x0123456789ABCDEF, 0xFEDCBA9876543210)
SHAPES = ((), (0,), (3, 0, 2), (1,), (7,), (5, 3), (2, 3, 4, 5))


@pytest.mark.slow
@BACKENDS
def test_every_type_equals_the_formula(backend: str) -> None:
    tensors = [any_tensor(dtype, shape, 5) for dtype in DTYPES for shape in SHAPES]
    expected = [digest_in_python(content_of(tensor), SEED) for tensor in tensors]
    assert digests_of(tensors, SEED, digester(backend)) == expected
    leaves, counts = digester(backend).many_leaves([])
    assert (leaves.shape, leaves.dtype, counts) == ((0, 2), torch.int64, [])


@pytest.mark.slow
@BACKENDS
@pytest.mark.parametrize("offset", [0, 3])
def test_blocks_and_edges_at_any_address(backend: str, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of one buffer, so that what lies around them must not enter; empty ones between them."""
    monkeypatch.setattr(fused, "processors", lambda device: 16)  # Three strips, 48 programs.
    sizes = [*(0, 1, 7, 8, 9, 16, 0, 4095, 4096), *(TILE_BYTES + more for more in (-1, 0, 1)), 3 * BLOCK_BYTES]
    sizes += [BLOCK_BYTES + more for more in (-1, 0, 1, 13, 3 * TILE_BYTES + 12)]
    starts = np.cumsum([0, *(64 * (size // 64 + 2) for size in sizes)]).tolist()
    memory = any_bytes(starts[-1] + 64, 1).to(digester(backend).device)
    first = offset - memory.data_ptr() % 64
    tensors = [memory[64 + first + start :][:size] for start, size in zip(starts, sizes)]
    expected = [digest_in_python(content_of(tensor.cpu()), (0, 0)) for tensor in tensors]
    assert digests_of(tensors, by=digester(backend)) == expected
    in_numpy = torch.from_numpy(memory.cpu().numpy()[3:4003])  # Unaligned, although the tensor's storage offset is 0.
    assert digest_of(in_numpy) == digest_in_python(content_of(in_numpy), (0, 0))


def test_more_blocks_than_keys_equal_the_formula() -> None:
    """Tensors from 8 GiB have more blocks than keys. The test makes leaves directly, to save memory."""
    leaves = any_bytes(16 * (BLOCK_WORDS + 5), 9).view(torch.int64).view(-1, 2)
    (found,) = digester().digests(leaves, [len(leaves)], torch.tensor([[3, 4]]))
    lanes = [[leaf & MASK for leaf in leaves[:, lane].tolist()] for lane in range(2)]
    assert unsigned(found) == tuple(digest_of_leaves(lanes[lane], lane, 3 + lane) for lane in range(2))


@pytest.mark.slow
@BACKENDS
def test_rows_have_the_leaves_of_tensors(backend: str) -> None:
    for width in (0, 9, BLOCK_WORDS + 6):
        words = any_bytes(8 * 3 * width, 2).view(torch.int64).view(3, width)
        for rows in (words, words[:, 1:], words[::2, :-1], words.t().contiguous().t()):
            expected = digester().many_leaves(list(rows))[0]
            by = digester(backend)
            assert torch.equal(by.row_leaves(rows.to(by.device)).cpu(), expected)


def test_blocks_may_be_done_several_at_a_time_as_on_a_gpu() -> None:
    several = ContentDigest(torch.device("cpu"))
    several._folded = torch.empty(3, BLOCK_WORDS, dtype=torch.int64)
    several._product = torch.empty_like(several._folded)
    tensors = [any_bytes(n, n) for n in (BLOCK_BYTES, 2 * BLOCK_BYTES + 1, 3 * BLOCK_BYTES, 7 * BLOCK_BYTES + 9)]
    assert digests_of(tensors, by=several) == digests_of(tensors)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t(),
    "every third column": lambda x: x[:, ::3],
    "rows from the second on": lambda x: x[1:],
    "from the second element on": lambda x: x.reshape(-1)[1:],
    "one element": lambda x: x[3, 4],
    "one element of a column": lambda x: x[:1, 0],  # torch calls it contiguous, whatever its stride.
    "expanded": lambda x: x[0].expand(6, -1),
    "broadcast from one element": lambda x: x[2, 2].expand(3, 5),
    "permuted": lambda x: x.reshape(2, 4, -1).permute(2, 0, 1),
    "channels last": lambda x: x.reshape(2, 2, 2, -1).to(memory_format=torch.channels_last),
    "a window": lambda x: x.reshape(-1).as_strided((4, 3), (2, 1), 5),
    "every second row, transposed": lambda x: x[::2].t(),
    "conjugated": lambda x: x.view(torch.uint8)[:, :8].contiguous().view(torch.complex64).nan_to_num(1.0).conj(),
    "negated": lambda x: x.view(torch.uint8)[:, :8].contiguous().view(torch.complex64).nan_to_num(1.0).conj().imag,
}


@BACKENDS
def test_any_strides_give_the_digest_of_the_contiguous_copy(backend: str) -> None:
    """Pending conjugation and negation are content."""
    cases = [*((dtype, "transposed") for dtype in DTYPES), *itertools.product((torch.bfloat16, torch.int8), LAYOUTS)]
    of = [any_tensor(dtype, (8, 13), 4).to(digester(backend).device) for dtype, _ in cases]
    views = [LAYOUTS[layout](x) for x, (_, layout) in zip(of, cases)]
    assert (views[-2].is_conj(), views[-1].is_neg()) == (True, True)
    expected = [digest_in_python(content_of(view.cpu()), (0, 0)) for view in views]
    assert digests_of(views, by=digester(backend)) == expected


def test_the_digest_leaves_the_tensor_alone_and_needs_no_graph() -> None:
    x = torch.randn(300, 300, requires_grad=True)
    before, version = x.detach().clone(), x._version
    first = digest_of(x)
    assert torch.equal(x, before)
    assert x._version == version
    assert digest_of(x) == first
    assert as_bytes(x).data_ptr() == x.data_ptr()


def flipped(tensor: Tensor, *bits: int) -> Pair:
    """Return the digest with these bits flipped. The tensor stays as it was."""
    for bit in bits:
        flip(tensor, bit)
    found = digest_of(tensor)
    for bit in bits:
        flip(tensor, bit)
    return found


@pytest.mark.slow
def test_every_single_flipped_bit_is_seen() -> None:
    """Flip 200 random bits of two blocks and a partial one: each flip changes both lanes. All of one word, too: the
    fold mixes bit i + 32 into the low half of the word, which must not cancel a flip of bit i."""
    tensor = any_tensor(torch.bfloat16, (BLOCK_BYTES + 13,), 6)
    before = digest_of(tensor)
    for bit in random.Random(0).sample(range(8 * tensor.nbytes), 200):
        after = flipped(tensor, bit)
        assert after[0] != before[0], bit
        assert after[1] != before[1], bit
    assert digest_of(tensor) == before
    word = torch.zeros(1, dtype=torch.int64)
    seen = {flipped(word, *bits) for i in range(32) for bits in ((i,), (i + 32,), (i, i + 32))}
    assert len({digest_of(word), *seen}) == 97


@pytest.mark.parametrize("value", ["zeros", "random"])
def test_two_equal_flips_are_seen(value: str) -> None:
    far = 2 * BLOCK_WORDS
    places = [(0, 1), (1, 2), (0, BLOCK_WORDS - 1), (5, BLOCK_WORDS + 5), (0, far), (7, far + 1)]
    words = any_bytes(8 * (2 * BLOCK_WORDS + 9), 2).view(torch.int64)
    if value == "zeros":
        words = torch.zeros_like(words)
    before = digest_of(words)
    for bit, (first, second) in itertools.product((0, 31, 32, 63), places):
        once, twice = flipped(words, 64 * first + bit), flipped(words, 64 * first + bit, 64 * second + bit)
        assert len({before, once, twice}) == 3, (bit, first, second)


@pytest.mark.slow
def test_changes_of_signs_are_seen() -> None:
    """Of pairs, and of all. Top bits are multiplied only by the lowest bits of the keys: the worst case of a keyed sum.
    Bits i and i + 32 of two words are, for example, the signs of two pairs of float32."""
    chance, words = random.Random(3), any_bytes(8 * BLOCK_WORDS, 32).view(torch.int64)
    before = digest_of(words)
    for width, _ in itertools.product((32, 64), range(200)):
        a, b = chance.sample(range(8 * BLOCK_BYTES // width), 2)
        assert flipped(words, width * a + width - 1, width * b + width - 1) != before, (a, b)
    few = words[:64].clone()
    before = digest_of(few)
    for high, second in itertools.product((32, 39, 48, 55, 62, 63), range(1, 64)):
        assert flipped(few, high, high - 32, 64 * second + high, 64 * second + high - 32) != before, second
    for dtype, numel in itertools.product((torch.float32, torch.bfloat16, torch.float64), (2, 4, 6, 8, 1000, 1 << 17)):
        tensor = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype)
        assert digest_of(-tensor) != digest_of(tensor), numel


def _swap(x: Tensor, a: slice | int, b: slice | int) -> Tensor:
    y = x.clone()
    y[a], y[b] = x[b].clone(), x[a].clone()
    return y


B = BLOCK_WORDS
SWAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "neighbouring words": lambda x: _swap(x, 10, 11),
    "distant words": lambda x: _swap(x, 3, 2 * B + 4),
    "the same place of two blocks": lambda x: _swap(x, 3, 2 * B + 3),
    "neighbouring blocks": lambda x: _swap(x, slice(0, B), slice(B, 2 * B)),
    "halves of a word": lambda x: _swap(x.view(torch.int32), 20, 21),
    "bytes of a word": lambda x: _swap(x.view(torch.uint8), 81, 86),
    "bytes of two words": lambda x: _swap(x.view(torch.uint8), 81, 89),
    "rotated by a word": lambda x: x.roll(1),
    "rotated by a block": lambda x: x.roll(B),
    "transposed": lambda x: x.view(3, B).t().reshape(-1),
}


def test_another_order_is_seen() -> None:
    words = any_bytes(8 * 3 * BLOCK_WORDS, 11).view(torch.int64)
    before, bytes_of_words = digest_of(words), words.view(torch.uint8).sort().values
    for name, swap in SWAPS.items():
        changed = swap(words)
        assert changed.view(torch.uint8).sort().values.equal(bytes_of_words)
        assert digest_of(changed) != before, name


def named_digest(name: str, tensor: Tensor, kind: str = "parameter") -> Pair:
    return unsigned(TensorContent(kind, [NamedTensor(name, tensor)]).digests(Digester())[0])


def test_equal_bytes_under_another_name_kind_shape_or_type_differ() -> None:
    x = torch.zeros(4, 6)
    shapes = [x.view(6, 4), x.view(24), x.view(4, 6, 1), torch.zeros(4, 7), torch.zeros(4, 0), torch.zeros(0, 4)]
    types = [x.view(dtype) for dtype in (torch.int32, torch.float64, torch.uint8)]
    others = [*shapes, *types, torch.zeros(0), torch.zeros(()), torch.zeros(1)]
    variants = [named_digest(name, x) for name in ("a", "b", "a.b")] + [named_digest("a", x, "gradient")]
    variants += [named_digest("a", other) for other in others]
    for lane in range(2):
        assert len({v[lane] for v in variants}) == len(variants)
    strided = x.t().contiguous().t()
    assert named_digest("a", strided) == variants[0], "strides are no content"


WHAT = st.tuples(
    st.text("ab.é", max_size=8), st.sampled_from(["parameter", "gradient"]), st.lists(st.integers(0, 3), max_size=3)
)


@settings(max_examples=50, deadline=None)
@given(WHAT, WHAT)
def test_seeds_are_equal_only_for_equal_keys(a: tuple[str, str, list[int]], b: tuple[str, str, list[int]]) -> None:
    contents = [TensorContent(kind, [NamedTensor(name, torch.zeros(shape))]) for name, kind, shape in (a, b)]
    assert torch.equal(contents[0].seeds, contents[1].seeds) == (a == b)
    assert contents[0].keys == (Key(a[0], a[1], tuple(a[2]), "float32"),)


def test_many_copies_are_launched_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [any_tensor(torch.float32, (6, 5), i).to(DEVICE).t() for i in range(5)]
    expected = digester("triton").many_leaves(tensors)[0]
    monkeypatch.setattr(fused, "_COPIED_AT_ONCE", 200)
    launches, launch = [], fused._launch
    monkeypatch.setattr(fused, "_launch", lambda *args: (launches.append(len(args[0])), launch(*args)))
    assert torch.equal(expected, digester("triton").many_leaves(tensors)[0])
    assert launches == [2, 2, 1]


@BACKENDS
def test_a_tensor_on_another_device_is_refused(backend: str) -> None:
    here, there = torch.ones(3, device=DEVICE), torch.ones(3, device="meta")
    with pytest.raises(ValueError, match="it is on meta, not on"):
        ContentDigest(torch.device(DEVICE), backend).many_leaves([here, there])
    content = TensorContent("gradient", [NamedTensor("a", here), NamedTensor("b", there)])
    with pytest.raises(ValueError, match="gradient 'b': it is on the meta device"):
        content.digests(Using(backend))


@pytest.mark.skipif(DEVICE == "cpu", reason="takes hours under the interpreter")
@pytest.mark.slow
def test_more_than_two_gibibytes() -> None:
    large = torch.arange((1 << 31) // 8 + BLOCK_WORDS + 7, device=DEVICE)
    assert torch.equal(digester("triton").leaves(large).cpu(), digester().leaves(large.cpu()))


PLANS: dict[str, list[tuple[int, int]]] = {  # (address, bytes)
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
        work = [int(rows[a:b, 2].sum()) for a, b in itertools.pairwise(bounds)]
        assert max(work) - min(work) <= 1
    assert len(rows) <= 2 * len(PLANS[plan]) + 17 * strips


class Using(Digester):
    """A digester with the same backend on every device."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend

    def on(self, device: torch.device) -> ContentDigest:
        return ContentDigest(device, self.backend)


def test_what_runs_does_not_depend_on_the_number_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []
    monkeypatch.setattr(fused, "_launch", lambda *args: launches.append(len(args[0])))
    seen = []
    for count in (2, 50):
        tensors = [NamedTensor(str(i), torch.ones(9, device=DEVICE)) for i in range(count)]
        content, using = TensorContent("parameter", tensors), Using("triton")
        with Operations() as ops:
            content.digests(using)
        seen.append(ops.seen)
    assert launches == [2, 50]
    assert seen[0] == seen[1]
