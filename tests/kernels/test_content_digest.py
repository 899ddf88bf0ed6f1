"""The content digest equals its formula, ignores strides, and sees every other change."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fp8dist.checks.contents import Digester, Key, NamedTensor, TensorContent
from fp8dist_kernels.reference.content import BLOCK_BYTES, BLOCK_WORDS, ContentDigest, as_bytes, block_count
from tests.support.elements import flip

MASK = (1 << 64) - 1
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
]
CPU = torch.device("cpu")


class SplitMix64:
    """The generator of Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014."""

    def __init__(self) -> None:
        self.state = 0

    def next(self) -> int:
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        return mixed(self.state)


FOLD = 0xD6E8FEB86659FD93


def mixed(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


@cache
def keys() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the keys of lane 0 and lane 1: odd numbers from one stream."""
    generator = SplitMix64()
    stream = [generator.next() | 1 for _ in range(2 * BLOCK_WORDS)]
    return tuple(stream[:BLOCK_WORDS]), tuple(stream[BLOCK_WORDS:])


def digest_in_python(content: bytes, seed: tuple[int, int]) -> tuple[int, int]:
    """Return the digest in Python integers, as the docstring of reference/content.py defines it."""
    lanes = []
    for lane in range(2):
        total = 0
        for block, start in enumerate(range(0, len(content), 8 * BLOCK_WORDS)):
            part = content[start : start + 8 * BLOCK_WORDS]
            part += bytes(-len(part) % 8)
            leaf = 0
            for j, (word,) in enumerate(struct.iter_unpack("<Q", part)):
                z = (word * FOLD) & MASK
                leaf += (z ^ (z >> 32)) * keys()[lane][j]
            total += mixed((((leaf & MASK) ^ keys()[lane][block % BLOCK_WORDS]) + block) & MASK)
        lanes.append(mixed((total + seed[lane]) & MASK))
    return lanes[0], lanes[1]


def digest_in_numpy(content: bytes, seed: tuple[int, int]) -> tuple[int, int]:
    """Return the same digest, faster, for more than a few words."""
    lanes = []
    words = np.frombuffer(content + bytes(-len(content) % 8), dtype="<u8")
    for lane in range(2):
        spread = words * np.uint64(FOLD)
        folded = spread ^ (spread >> np.uint64(32))
        key = np.array(keys()[lane], dtype=np.uint64)
        total = 0
        for block in range(-(-len(words) // BLOCK_WORDS)):
            part = folded[block * BLOCK_WORDS : (block + 1) * BLOCK_WORDS]
            leaf = int(np.sum(part * key[: len(part)], dtype=np.uint64))
            total += mixed(((leaf ^ keys()[lane][block % BLOCK_WORDS]) + block) & MASK)
        lanes.append(mixed((total + seed[lane]) & MASK))
    return lanes[0], lanes[1]


@cache
def digester() -> ContentDigest:
    return ContentDigest(CPU)


def unsigned(pair: Tensor) -> tuple[int, int]:
    first, second = (x & MASK for x in pair.tolist())
    return first, second


def digest_of(tensor: Tensor, seed: tuple[int, int] = (0, 0), by: ContentDigest | None = None) -> tuple[int, int]:
    by = by or digester()
    leaves = by.leaves(tensor)
    seeds = torch.tensor([[s - (1 << 64) if s >> 63 else s for s in seed]])
    return unsigned(by.digests(leaves, [len(leaves)], seeds)[0].cpu())


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
    """Return the bytes of a contiguous tensor."""
    assert tensor.is_contiguous()
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def test_the_generator_of_keys_is_splitmix64() -> None:
    generator = SplitMix64()  # Seed 0. The reference implementation publishes its first numbers.
    assert [generator.next() for _ in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_small_tensors_equal_the_formula_in_pythons_integers() -> None:
    seed = (0x0123456789ABCDEF, 0xFEDCBA9876543210)
    for dtype in DTYPES:
        for shape in ((), (0,), (3, 0, 2), (1,), (7,), (5, 3), (2, 3, 4, 5)):
            tensor = any_tensor(dtype, shape, 5)
            assert digest_of(tensor, seed) == digest_in_python(content_of(tensor), seed), (dtype, shape)


@pytest.mark.parametrize("blocks", [1, 3])
def test_blocks_with_and_without_a_ragged_tail_equal_the_formula(blocks: int) -> None:
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.complex128):
        for extra in (-1, 0, 1, 5):
            numel = blocks * BLOCK_BYTES // dtype.itemsize + extra
            tensor = any_tensor(dtype, (numel,), blocks)
            assert digest_of(tensor, (1, 2)) == digest_in_numpy(content_of(tensor), (1, 2)), extra
            assert block_count(numel * dtype.itemsize) == len(digester().leaves(tensor)) == blocks + (extra > 0)


def test_a_whole_block_equals_the_formula_in_pythons_integers() -> None:
    tensor = any_bytes(BLOCK_BYTES + 13, 3)
    assert (
        digest_of(tensor) == digest_in_python(content_of(tensor), (0, 0)) == digest_in_numpy(content_of(tensor), (0, 0))
    )


def test_more_blocks_than_keys_equal_the_formula() -> None:
    """Tensors from 8 GiB have more blocks than keys. The test makes leaves directly, to save memory."""
    count = BLOCK_WORDS + 5
    leaves = any_bytes(16 * count, 9).view(torch.int64).view(count, 2)
    (found,) = digester().digests(leaves, [count], torch.tensor([[3, 4]]))
    expected = []
    for lane in range(2):
        total = sum(
            mixed((((leaf & MASK) ^ keys()[lane][b % BLOCK_WORDS]) + b) & MASK)
            for b, leaf in enumerate(leaves[:, lane].tolist())
        )
        expected.append(mixed((total + 3 + lane) & MASK))
    assert unsigned(found) == tuple(expected)


def test_many_tensors_at_once_give_what_each_gives_alone() -> None:
    tensors = [any_bytes(n, i) for i, n in enumerate((0, 1, BLOCK_BYTES, 0, 3 * BLOCK_BYTES + 8, 17, 0))]
    leaves = [digester().leaves(t) for t in tensors]
    seeds = torch.arange(14).view(7, 2)
    together = digester().digests(torch.cat(leaves), [len(part) for part in leaves], seeds)
    alone = [digest_of(t, (2 * i, 2 * i + 1)) for i, t in enumerate(tensors)]
    assert [unsigned(row) for row in together] == alone


def test_leaves_of_many_tensors_follow_one_another() -> None:
    tensors = [any_bytes(n, i) for i, n in enumerate((0, 1, BLOCK_BYTES, 0, 2 * BLOCK_BYTES + 8))]
    leaves, counts = digester().many_leaves(tensors)
    assert counts == [0, 1, 1, 0, 3]
    assert torch.equal(leaves, torch.cat([digester().leaves(tensor) for tensor in tensors]))
    none, no_counts = digester().many_leaves([])
    assert (none.shape, none.dtype, no_counts) == ((0, 2), torch.int64, [])


def test_rows_have_the_leaves_of_tensors() -> None:
    for width in (1, 9, BLOCK_WORDS, BLOCK_WORDS + 1):
        words = any_bytes(8 * 3 * width, 2).view(torch.int64).view(3, width)
        assert torch.equal(digester().row_leaves(words), digester().many_leaves(list(words))[0])


def test_blocks_may_be_done_several_at_a_time_as_on_a_gpu() -> None:
    several = ContentDigest(CPU)
    several._folded = torch.empty(3, BLOCK_WORDS, dtype=torch.int64)
    several._product = torch.empty_like(several._folded)
    for nbytes in (BLOCK_BYTES, 2 * BLOCK_BYTES + 1, 3 * BLOCK_BYTES, 7 * BLOCK_BYTES + 9):
        tensor = any_bytes(nbytes, nbytes)
        assert digest_of(tensor, by=several) == digest_of(tensor)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t(),
    "every third column": lambda x: x[:, ::3],
    "rows from the second on": lambda x: x[1:],
    "from the second element on": lambda x: x.reshape(-1)[1:],
    "one element": lambda x: x[3, 4],
    "expanded": lambda x: x[0].expand(6, -1),
    "broadcast from one element": lambda x: x[2, 2].expand(3, 5),
    "permuted": lambda x: x.reshape(2, 4, -1).permute(2, 0, 1),
    "channels last": lambda x: x.reshape(2, 2, 2, -1).to(memory_format=torch.channels_last),
    "a window": lambda x: x.reshape(-1).as_strided((4, 3), (2, 1), 5),
    "every second row, transposed": lambda x: x[::2].t(),
}


def test_any_strides_give_the_digest_of_the_contiguous_copy() -> None:
    of_each_type = [(dtype, "transposed") for dtype in DTYPES]
    for dtype, layout in [*of_each_type, *itertools.product((torch.bfloat16, torch.int8), LAYOUTS)]:
        view = LAYOUTS[layout](any_tensor(dtype, (8, 13), 4))
        copy = torch.empty(view.shape, dtype=dtype)
        copy.copy_(view)
        assert content_of(copy) != b""
        assert digest_of(view) == digest_of(copy) == digest_in_python(content_of(copy), (0, 0)), (dtype, layout)


def test_unaligned_memory_gives_the_same() -> None:
    for nbytes in (1, 7, 64, BLOCK_BYTES + 8, 2 * BLOCK_BYTES + 3):
        memory = any_bytes(nbytes + 32, 8)
        for offset in (1, 2, 4, 7, 8, 13):
            view = memory[offset : offset + nbytes]
            assert digest_of(view) == digest_in_numpy(content_of(view.clone()), (0, 0)), offset
            as_numpy = memory.numpy()[offset : offset + nbytes]  # Unaligned, although the tensor's storage offset is 0.
            assert digest_of(torch.from_numpy(as_numpy)) == digest_of(view.clone()), offset


def test_pending_conjugation_and_negation_are_content() -> None:
    x = any_tensor(torch.complex64, (4, 5), 2).nan_to_num(1.0)
    assert x.conj().is_conj()
    assert digest_of(x.conj()) == digest_of(x.conj().resolve_conj().clone()) != digest_of(x)
    imaginary = x.conj().imag
    assert imaginary.is_neg()
    assert digest_of(imaginary) == digest_of(imaginary.resolve_neg().clone()) != digest_of(x.imag)


def test_the_digest_leaves_the_tensor_alone_and_needs_no_graph() -> None:
    x = torch.randn(300, 300, requires_grad=True)
    before, version = x.detach().clone(), x._version
    first = digest_of(x)
    assert torch.equal(x, before)
    assert x._version == version
    assert digest_of(x) == first
    assert as_bytes(x).data_ptr() == x.data_ptr()


def flipped(tensor: Tensor, *bits: int) -> tuple[int, int]:
    """Return the digest with these bits flipped. The tensor stays as it was."""
    for bit in bits:
        flip(tensor, bit)
    found = digest_of(tensor)
    for bit in bits:
        flip(tensor, bit)
    return found


@pytest.mark.slow
def test_every_single_flipped_bit_is_seen() -> None:
    """Flip 500 random bits of two blocks and a partial one: each flip changes both lanes."""
    tensor = any_tensor(torch.bfloat16, (BLOCK_BYTES + 13,), 6)
    before = digest_of(tensor)
    chance = random.Random(0)
    for _ in range(500):
        bit = chance.randrange(8 * tensor.nbytes)
        after = flipped(tensor, bit)
        assert after[0] != before[0], bit
        assert after[1] != before[1], bit
    assert digest_of(tensor) == before


@pytest.mark.long
@pytest.mark.nightly
def test_every_bit_of_a_small_tensor_and_every_pair_of_bits_is_seen() -> None:
    tensor = any_bytes(24, 1)
    bits = range(8 * 24)
    pairs = itertools.combinations(bits, 2)
    seen = {digest_of(tensor), *(flipped(tensor, i) for i in bits), *(flipped(tensor, *pair) for pair in pairs)}
    assert len(seen) == 1 + 192 + 192 * 191 // 2


@settings(max_examples=80, deadline=None)
@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_single_flipped_bit_of_any_bytes_is_seen(content: bytes, data: st.DataObject) -> None:
    tensor = torch.tensor(list(content), dtype=torch.uint8)
    before = digest_of(tensor)
    assert before == digest_in_python(content, (0, 0))
    flip(tensor, data.draw(st.integers(0, 8 * len(content) - 1)))
    after = digest_of(tensor)
    assert after[0] != before[0]
    assert after[1] != before[1]


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, MASK), min_size=1, max_size=40), st.data())
def test_one_changed_word_is_seen_in_both_lanes(words: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(words) - 1))
    other = data.draw(st.integers(0, MASK).filter(lambda w: w != words[place]))
    changed = [*words[:place], other, *words[place + 1 :]]
    before, after = (digest_of(torch.from_numpy(np.array(w, dtype=np.uint64))) for w in (words, changed))
    assert before[0] != after[0]
    assert before[1] != after[1]


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


def test_two_flips_of_different_bits_of_one_word_are_seen() -> None:
    """The fold mixes bit i + 32 into the low half of the word. It must not cancel a flip of bit i."""
    word = torch.zeros(1, dtype=torch.int64)
    seen = {flipped(word, *bits) for i in range(32) for bits in ((i,), (i + 32,), (i, i + 32))}
    assert len({digest_of(word), *seen}) == 97


@pytest.mark.slow
def test_hundreds_of_pairs_of_sign_bits_are_seen() -> None:
    """Top bits are multiplied only by the lowest bits of the keys: the worst case of a keyed sum."""
    chance = random.Random(3)
    for width in (32, 64):
        words = any_bytes(8 * BLOCK_WORDS, width).view(torch.int64)
        before = digest_of(words)
        for _ in range(400):
            a, b = chance.sample(range(8 * BLOCK_BYTES // width), 2)
            assert flipped(words, width * a + width - 1, width * b + width - 1) != before, (a, b)


def test_a_change_of_all_signs_is_seen() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn):
        for numel in (2, 4, 6, 8, 1000, 1 << 17):
            tensor = torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype)
            negative = tensor.clone()
            negative.view(torch.uint8).view(-1, dtype.itemsize)[:, -1] ^= 0x80
            assert digest_of(negative) != digest_of(tensor), numel


def test_the_same_change_of_both_halves_of_two_words_is_seen() -> None:
    """Flip bits i and i + 32 in each of two words, for example the signs of two pairs of float32."""
    for high in (32, 39, 48, 55, 62, 63):
        words = any_bytes(8 * 64, 5).view(torch.int64)
        before = digest_of(words)
        for second in range(1, 64):
            assert flipped(words, high, high - 32, 64 * second + high, 64 * second + high - 32) != before, second


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
    "distant blocks": lambda x: _swap(x, slice(0, B), slice(2 * B, 3 * B)),
    "halves of a word": lambda x: _swap(x.view(torch.int32), 20, 21),
    "bytes of a word": lambda x: _swap(x.view(torch.uint8), 81, 86),
    "bytes of two words": lambda x: _swap(x.view(torch.uint8), 81, 89),
    "reversed": lambda x: x.flip(0),
    "rotated by a word": lambda x: x.roll(1),
    "rotated by a block": lambda x: x.roll(B),
    "transposed": lambda x: x.view(3, B).t().reshape(-1),
    "sorted": lambda x: x.sort().values,
}


def test_another_order_is_seen() -> None:
    words = any_bytes(8 * 3 * BLOCK_WORDS, 11).view(torch.int64)
    before, bytes_of_words = digest_of(words), words.view(torch.uint8).sort().values
    for name, swap in SWAPS.items():
        changed = swap(words)
        assert changed.view(torch.uint8).sort().values.equal(bytes_of_words)
        assert digest_of(changed) != before, name


def test_the_sign_of_zero_and_the_payload_of_nan_are_seen() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2):
        zeros = torch.zeros(9).to(dtype)
        negative = zeros.clone()
        negative[4] = torch.tensor(-0.0).to(dtype)
        assert digest_of(zeros) != digest_of(negative)
        nans = torch.full((9,), float("nan")).to(dtype)
        payload = nans.clone()
        flip(payload, 8 * dtype.itemsize * 4)  # The lowest mantissa bit: the value stays NaN.
        assert payload.float().isnan().all()
        assert digest_of(nans) != digest_of(payload)


def named_digest(name: str, tensor: Tensor, kind: str = "parameter") -> tuple[int, int]:
    return unsigned(TensorContent(kind, [NamedTensor(name, tensor)]).digests(Digester())[0])


def test_equal_bytes_under_another_name_kind_shape_or_type_differ() -> None:
    x = torch.zeros(4, 6)
    variants = [
        named_digest("a", x),
        named_digest("b", x),
        named_digest("a.b", x),
        named_digest("a", x, "gradient"),
        named_digest("a", x.view(6, 4)),
        named_digest("a", x.view(24)),
        named_digest("a", x.view(4, 6, 1)),
        named_digest("a", x.view(torch.int32)),
        named_digest("a", x.view(torch.float64)),
        named_digest("a", x.view(torch.uint8)),
        named_digest("a", torch.zeros(4, 7)),
        named_digest("a", torch.zeros(4, 0)),
        named_digest("a", torch.zeros(0, 4)),
        named_digest("a", torch.zeros(0)),
        named_digest("a", torch.zeros(())),
        named_digest("a", torch.zeros(1)),
    ]
    for lane in range(2):
        assert len({v[lane] for v in variants}) == len(variants)


def test_strides_do_not_enter_with_the_name() -> None:
    x = torch.randn(4, 6)
    assert named_digest("a", x.t().contiguous().t()) == named_digest("a", x)


@settings(max_examples=50, deadline=None)
@given(
    st.tuples(
        st.text("ab.é", max_size=8), st.sampled_from(["parameter", "gradient"]), st.lists(st.integers(0, 3), max_size=3)
    ),
    st.tuples(
        st.text("ab.é", max_size=8), st.sampled_from(["parameter", "gradient"]), st.lists(st.integers(0, 3), max_size=3)
    ),
)
def test_seeds_are_equal_only_for_equal_keys(a: tuple[str, str, list[int]], b: tuple[str, str, list[int]]) -> None:
    first, second = (TensorContent(kind, [NamedTensor(name, torch.zeros(shape))]).seeds for name, kind, shape in (a, b))
    assert torch.equal(first, second) == (a == b)


def test_keys_say_what_a_tensor_is() -> None:
    content = TensorContent(
        "gradient", [NamedTensor("w", torch.zeros(2, 3, dtype=torch.float8_e5m2)), NamedTensor("s", torch.tensor(1))]
    )
    assert content.keys == (Key("w", "gradient", (2, 3), "float8_e5m2"), Key("s", "gradient", (), "int64"))


def test_swapped_tensors_of_equal_shape_change_the_sum_over_all() -> None:
    """Tier 1 compares the sum of all digests. A swap of two tensors must change the sum."""
    a, b = torch.randn(5, 5), torch.randn(5, 5)
    straight = TensorContent("parameter", [NamedTensor("a", a), NamedTensor("b", b)]).digests(Digester()).sum(0)
    crossed = TensorContent("parameter", [NamedTensor("a", b), NamedTensor("b", a)]).digests(Digester()).sum(0)
    reordered = TensorContent("parameter", [NamedTensor("b", b), NamedTensor("a", a)]).digests(Digester()).sum(0)
    assert (straight != crossed).all()
    assert torch.equal(straight, reordered)
