"""Casts, scales, rings, the digest of scales and the header, against plain Python."""

from __future__ import annotations

import itertools
import math
import random
import struct

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8dist_kernels.arrays import StateArrays
from fp8dist_kernels.backends import runs_fused
from fp8dist_kernels.formats import E4M3, E5M2, Format
from fp8dist_kernels.header import HEADER, WORDS, header_agreement
from fp8dist_kernels.reference.casts import CPU_BLOCK, dequantize, saturating_cast
from fp8dist_kernels.reference.digest import digest_words, position_keys
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN_BITS, INFINITY_BITS
from fp8dist_kernels.reference.rings import RingShape, ordered_window, write, write_window
from fp8dist_kernels.reference.update import launch
from fp8dist_kernels.scaling import FLOAT32_MAX, scale_from_amax
from tests.support import oracle
from tests.support.casting import FORMAT_OF, FORMATS, rounded
from tests.support.oracle import bits_of, float32, of_bits
from tests.support.states import bits

FP8 = pytest.mark.parametrize("dtype", FORMATS, ids=["e4m3", "e5m2"])


def test_a_cpu_runs_triton_only_when_it_is_asked_to() -> None:
    fused = [name for name in ("triton", "auto", "torch", "reference") if runs_fused(name, torch.device("cpu"))]
    assert fused == ["triton"]


def _check(result: Tensor, values: list[float], scale: float, dtype: torch.dtype) -> None:
    """Finite values saturate even if their product with the scale overflows; Inf and NaN become NaN."""
    products = np.array([float32(value * scale) for value in values])
    finite = np.isfinite(values)
    expected = rounded(np.where(finite, products.clip(-oracle.FLOAT32_MAX, oracle.FLOAT32_MAX), np.nan), dtype).tolist()
    for found, right, value in zip(result.float().flatten().tolist(), expected, values, strict=True):
        assert repr(found) == repr(right), f"{value!r} * {scale!r}"


@pytest.mark.slow
@FP8
def test_all_bfloat16_values(dtype: torch.dtype) -> None:
    """NaN of all payloads and infinities of both signs are among them, and the scales are tiny and huge."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(256, 256)
    for scale in map(float32, (448.0 / 3.0, 1e-6, 3.0e38)):
        rows, _ = saturating_cast(x, torch.tensor(scale), dtype, True, False)
        _check(rows, x.flatten().tolist(), scale, dtype)


@FP8
def test_ties_and_their_neighbours(dtype: torch.dtype) -> None:
    """Midpoints of all neighbouring values and the adjacent float32 values, from subnormal to saturation."""
    values = [FORMAT_OF[dtype].decode(code) for code in range(FORMAT_OF[dtype].largest + 1)]
    points = [*((a + b) / 2 for a, b in itertools.pairwise(values)), *values]
    points += [values[-1] * f for f in (1.01, 1.03125, 1.0625, 1.125, 1.2, 2.0)]
    near = [of_bits(bits_of(p) + d) for p in points if p > 0 for d in (-1, 0, 1)]
    both = [*near, *(-v for v in near), 0.0, -0.0]
    x = torch.tensor([both])
    rows, _ = saturating_cast(x, torch.ones(()), dtype, True, False)
    _check(rows, both, 1.0, dtype)
    assert x.tolist() == [both], "the input is left alone"
    assert dequantize(rows, torch.tensor(0.5)).tolist() == [[number / 2 for number in rows.float()[0].tolist()]]


@FP8
def test_shapes_of_copies_and_large_tensors(dtype: torch.dtype) -> None:
    """Large tensors are cast in blocks of rows, the last one short. The result equals a cast of the whole tensor."""
    small = [((tokens, 48), torch.bfloat16) for tokens in (0, 1, 15, 16, 17, 33)]
    large = [((301, 1000), torch.float32), ((3, 200_000), torch.bfloat16), ((300_000, 1), torch.float16)]
    for (shape, source), transposed in itertools.product(small + large, (False, True)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).mul_(50).to(source)
        for place, value in enumerate((torch.inf, torch.nan, -0.0)):
            x.view(-1)[place::977] = value
        x = x.t() if transposed else x
        assert (shape[1] == 48) == (x.numel() <= CPU_BLOCK)
        tokens, limit = x.shape[0], torch.finfo(dtype).max
        expected = torch.where(x.isinf(), torch.nan, (x.float() * 7.0).clamp(-limit, limit)).to(dtype)
        rows, columns = (copy.view(torch.uint8) for copy in saturating_cast(x, torch.tensor(7.0), dtype, True, True))
        assert torch.equal(rows, expected.contiguous().view(torch.uint8))
        assert columns.shape == (x.shape[1], -(-tokens // 16) * 16)
        assert torch.equal(columns[:, :tokens], expected.t().contiguous().view(torch.uint8))
        assert not columns[:, tokens:].any()
        assert rows.is_contiguous()
        assert columns.is_contiguous()
        for wanted in ((True, False), (False, True)):
            alone = saturating_cast(x, torch.tensor(7.0), dtype, *wanted)
            for copy, each, there in zip(alone, (rows, columns), wanted):
                assert torch.equal(copy.view(torch.uint8), each) if there else not copy.numel()


OF_FORMATS = pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda f: f.name)
SPECIAL = [
    *(0, 1, 2, 0x007FFFFF, 0x00800000, 0x00800001, 0x04000000),  # 0, subnormal numbers, the smallest normal ones.
    *(0x05800000, 0x05E00000, 0x05E00001, 0x05DFFFFF),  # 448 / amax just overflows somewhere here.
    *(0x09600000, 0x09600001, 0x095FFFFF),  # The same for 57344.
    *(0x2D2FEBFF, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x40400000),  # 1e-11; around 1; 3.
    *(0x43E00000, 0x43E00001, 0x47600000, 0x7F000000, 0x7F7FFFFF),  # 448, 57344, the largest.
    *(0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF),  # Inf, NaN.
]


def _tensor(words: list[int]) -> torch.Tensor:
    return torch.frombuffer(bytearray(struct.pack(f"<{len(words)}I", *words)), dtype=torch.float32)


def _scales(words: list[int], format: Format, margin: int, power_of_two: bool, previous: float) -> list[int]:
    amax = _tensor(words)
    limit = torch.full_like(amax, format.max)
    scales: list[int] = bits(scale_from_amax(amax, torch.full_like(amax, previous), limit, margin, power_of_two))
    return scales


def _expected(words: list[int], format: Format, margin: int, power_of_two: bool, previous: float) -> list[int]:
    fp8_max = oracle.FP8_MAX[format.name]
    return [oracle.bits_of(oracle.scale_for(oracle.of_bits(w), previous, fp8_max, margin, power_of_two)) for w in words]


def test_formats() -> None:
    """The oracle's largest OCP FP8 values are those of torch's dtypes."""
    for format in (E4M3, E5M2):
        assert format.max == oracle.FP8_MAX[format.name] == torch.finfo(format.dtype).max
    assert FLOAT32_MAX == oracle.FLOAT32_MAX


@OF_FORMATS
@pytest.mark.parametrize("power_of_two", [False, True])
def test_amaxes(format: Format, power_of_two: bool) -> None:
    """Special ones, and 4,500 over all exponents. A reciprocal with a multiplication is off by one bit for many of
    them."""
    rng = random.Random(power_of_two)
    for margin, previous in itertools.product(range(-2, 4), map(oracle.float32, (1.0, 0.1, 3e38))):
        words = [*SPECIAL, *(rng.randrange(0x7F800000) for _ in range(250))]
        arguments = (words, format, margin, power_of_two, previous)
        assert _scales(*arguments) == _expected(*arguments), margin
    for margin in (-64, 64):  # No scale may become 0: its inverse would be Inf.
        scales = _scales([1, 0x00800000, 0x3F800000, 0x7F7FFFFF], format, margin, power_of_two, 1.0)
        assert all(0x00800000 <= scale < 0x7F800000 for scale in scales)
        assert scales[-1] <= _scales([0x7F7FFFFF], format, margin, False, 1.0)[0]


def test_zero_dimensional_and_short_inputs() -> None:
    """Vectorised and scalar code paths of torch give the same bits."""
    for lanes in (1, 3, 8, 33):
        words = [0x3F123456 + 7919 * i for i in range(lanes)]
        expected = _expected(words, E5M2, 1, False, 1.0)
        assert _scales(words, E5M2, 1, False, 1.0) == expected
        for word, scale in zip(words, expected):
            amax = _tensor([word])[0]
            assert bits(scale_from_amax(amax, torch.ones(()), torch.tensor(E5M2.max), 1, False)) == scale


def test_where_keeps_the_previous_scale() -> None:
    amax, previous = torch.tensor([2.0, 2.0, math.nan, 0.0]), torch.tensor([5.0, 6.0, 7.0, 8.0])
    where = torch.tensor([True, False, True, True])
    scale = scale_from_amax(amax, previous, torch.full((4,), 448.0), 0, False, where)
    assert scale.tolist() == [224.0, 6.0, 7.0, 8.0]
    assert amax[:2].tolist() == [2.0, 2.0]
    assert previous.tolist() == [5.0, 6.0, 7.0, 8.0]


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 3, 17, 1000])
def test_rings_against_lists(length: int) -> None:
    """Windows that are replaced, then written to over several laps, with random participation and magnitudes."""
    rng, n, shape = random.Random(length), 5, RingShape(length)
    assert shape.padded == shape.block * shape.blocks >= length
    history, block_max = torch.rand(n, shape.padded), torch.rand(n, shape.blocks)
    history[:, length:] = 0
    count, row_start = torch.tensor([0, 1, length - 1, length, 3 * length + 2]), torch.arange(n) * shape.padded
    rows = torch.rand(n, length)
    write_window(history, block_max, count, shape, rows)
    windows = rows.tolist()
    assert ordered_window(history, count, shape).tolist() == windows
    assert block_max.amax(1).tolist() == rows.amax(1).tolist()
    for step in range(min(4 * length + 7, 2100)):
        amax = [float32(rng.choice([0.0, rng.random(), 10.0 ** rng.uniform(-40, 38)])) for _ in range(n)]
        taken = [rng.random() < (0.2 + 0.2 * i) for i in range(n)]
        sent = torch.tensor([a if t else rng.choice([-1.0, math.nan, math.inf]) for a, t in zip(amax, taken)])
        maxima = write(history, block_max, count, row_start, shape, sent, torch.tensor(taken))
        count += torch.tensor(taken)
        for i in range(n):
            if taken[i]:
                windows[i] = [*windows[i][1:], amax[i]]
                assert maxima[i].item() == max(windows[i]), (step, i)
        if step % 97 == 0 or step < 10:
            assert ordered_window(history, count, shape).tolist() == windows
            assert block_max.amax(1).tolist() == [max(w) for w in windows]
            assert not history[:, length:].any()
    assert ordered_window(history, count, shape).tolist() == windows


def _digest(words: Tensor) -> int:
    out = torch.zeros(1, dtype=torch.int64)
    digest_words(words, position_keys(len(words), words.device), out)
    return int(out)


def _bit(words: Tensor, *places: int, bit: int) -> Tensor:
    """Return a copy with this bit flipped in these words."""
    changed = words.clone()
    for place in places:
        changed[place] ^= (1 << bit) - (1 << 32 if bit == 31 else 0)
    return changed


@pytest.mark.parametrize("constant", [False, True])
def test_the_digest_sees_what_an_xor_or_a_sum_would_miss(constant: bool) -> None:
    rng = random.Random(1)
    words = torch.randint(-(2**31), 2**31, (256,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    words = torch.full_like(words, 0x3F800000) if constant else words
    before = _digest(words)
    for _ in range(400):
        (first, second), bit = rng.sample(range(256), 2), rng.randrange(32)
        assert _digest(_bit(words, first, bit=bit)) != before, "one flip"
        assert _digest(_bit(words, first, second, bit=bit)) != before, "the same flip twice"
        swapped = words.clone()
        swapped[first], swapped[second] = words[second], words[first]
        assert constant or _digest(swapped) != before
    assert constant or all(_digest(words.roll(shift)) != before for shift in range(1, 256))
    assert _digest(words[:0]) == 0


def test_the_digest_is_a_sum_with_a_key_for_each_place() -> None:
    """In any order and in any parts. Keys are odd and distinct, and do not depend on the count: the digest's guarantees
    rely on this."""
    keys = position_keys(5000, torch.device("cpu"))
    assert bool((keys & 1).all())
    assert len(set(keys.tolist())) == 5000
    assert position_keys(7, torch.device("cpu")).equal(keys[:7])
    assert len((keys >> 32).unique()) > 4990, "the upper halves are random, too"
    words, out, total = torch.arange(1000, dtype=torch.int32) * 7919, torch.zeros(1, dtype=torch.int64), 0
    for part in torch.randperm(1000, generator=torch.Generator().manual_seed(0)).split(77):
        digest_words(words[part], keys[part], out)
        total += int(out)
    assert (total - _digest(words)) % (1 << 64) == 0


def test_header_agreement() -> None:
    """An integer MAX over ranks tells for each word if all ranks sent the same value."""
    for ranks in (2, 3, 5):
        rng = random.Random(ranks)
        edges = [-(2**31), -(2**31) + 1, -1, 0, 1, 2**31 - 2, 2**31 - 1]
        for _ in range(400):
            common = [rng.choice([*edges, rng.randrange(-(2**31), 2**31)]) for _ in range(WORDS)]
            all_words = [list(common) for _ in range(ranks)]
            for _ in range(rng.randrange(3)):
                all_words[rng.randrange(ranks)][rng.randrange(WORDS)] = rng.choice(edges)
            headers = torch.tensor(all_words, dtype=torch.int32)
            reduced = torch.cat([headers, headers.bitwise_not()], 1).amax(0)
            expected = [len({words[i] for words in all_words}) == 1 for i in range(WORDS)]
            assert header_agreement(reduced).tolist() == expected


def _arrays(amaxes: list[float]) -> StateArrays:
    n = len(amaxes)
    arrays = StateArrays.allocate([448.0] * n, [464.0] * n, RingShape(4), torch.device("cpu"))
    arrays.pending.copy_(torch.tensor(amaxes))
    return arrays


def test_launch_sends_header_and_amaxes() -> None:
    arrays = _arrays([-1.0, 5.0])
    arrays.words.copy_(torch.tensor([7, 3, 0, 0]))
    base, digests = torch.tensor([2.0, 3.0, 0.5, 1 / 3]).view(torch.int32), set()
    for scale_bits in (base, *(_bit(base, place, bit=0) for place in range(4))):
        arrays.scales.copy_(scale_bits.view(torch.float32).view(2, 2))
        arrays.pending.copy_(torch.tensor([-1.0, 5.0]))
        arrays.send.fill_(99)
        launch(arrays, None, False)
        assert arrays.send[:2].tolist() == [7, 3]
        assert arrays.send[:WORDS].equal(arrays.words)
        assert arrays.send[WORDS:HEADER].equal(arrays.words.bitwise_not())
        assert arrays.send[HEADER:].tolist() == [DID_NOT_RUN_BITS, bits_of(5.0)]
        assert arrays.pending.tolist() == [-1.0, -1.0]
        assert arrays.sent.equal(arrays.scales)
        assert struct.unpack("<q", struct.pack("<2i", *arrays.words[2:].tolist())) == (_digest(scale_bits),)
        digests.add(_digest(scale_bits))
    assert len(digests) == 5


def test_withhold() -> None:
    """A skipped optimizer step sends no amaxes and keeps the pending ones; ``drop`` discards non-finite ones."""
    amaxes = [-1.0, 0.0, 5.0, math.inf, math.nan]
    nothing, all_bits = [DID_NOT_RUN_BITS] * 5, [bits_of(a) for a in amaxes]
    for drop, held in itertools.product((False, True), repeat=2):
        arrays = _arrays(amaxes)
        launch(arrays, torch.tensor([float(held)]), drop)
        kept = [b if b < INFINITY_BITS or not drop else DID_NOT_RUN_BITS for b in all_bits]
        assert arrays.send[HEADER:].tolist() == (nothing if held else all_bits)
        assert bits(arrays.pending) == (kept if held else nothing)
