"""Each kernel against a plain-Python twin: amaxes, casts, rings, digests, the header."""

from __future__ import annotations

import itertools
import math
import random
import struct

import pytest
import torch
from torch import Tensor

from fp8dist_kernels.arrays import StateArrays
from fp8dist_kernels.backends import runs_fused
from fp8dist_kernels.header import HEADER, WORDS, header_agreement
from fp8dist_kernels.reference.casts import CPU_BLOCK, dequantize, saturating_cast
from fp8dist_kernels.reference.digest import digest_words, position_keys
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN, DID_NOT_RUN_BITS, INFINITY_BITS, amax_bits, record_amax
from fp8dist_kernels.reference.rings import RingShape, ordered_window, write, write_window
from fp8dist_kernels.reference.update import launch
from tests.support.casting import FORMATS, numbers_of, rounded
from tests.support.oracle import FLOAT32_MAX, amax_of, bits_of, float32, of_bits
from tests.support.states import bits


def _tensor(words: list[int]) -> Tensor:
    packed = struct.pack(f"<{len(words)}I", *(w & 0xFFFFFFFF for w in words))
    return torch.frombuffer(bytearray(packed), dtype=torch.float32)


def test_a_cpu_runs_triton_only_when_it_is_asked_to() -> None:
    assert [runs_fused(name, torch.device("cpu")) for name in ("triton", "auto", "torch", "reference")] == [
        *(True, False, False, False)
    ]


NAN_WORDS = [0x7FC00000, 0xFFC00000, 0xFFFFFFFF, 0x7F800001, 0xFF800001]


def test_amax_bits_of_numbers() -> None:
    for words in (
        [0], [0x80000000], [0x80000000, 0], [1], [0x80000001, 0], [0x007FFFFF, 0x80000001], [0x3F800000, 0xC0000000],
        [0xC0000000, 0x3F800000], [0x7F7FFFFF], [0xFF7FFFFF, 0x3F800000], [0x7F800000, 0x3F800000],
        [0xFF800000, 0x7F7FFFFF],
    ):  # fmt: skip
        amax = amax_of(of_bits(w) for w in words)
        assert amax is not None
        result = amax_bits(_tensor(words))
        assert result.dtype == torch.int32
        assert result.shape == ()
        assert result.item() == bits_of(amax), list(map(hex, words))


def test_amax_bits_of_nan() -> None:
    """As an integer, the bits of a NaN of either sign exceed those of Inf, so a NaN anywhere wins the MAX."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows: list[list[int]] = [[], [0x3F800000], [0x7F800000, 0xFF800000], [0x3F800000] * 64]
        for word, others in itertools.product(NAN_WORDS, rows):
            for place in {0, len(others) // 2, len(others)}:
                x = _tensor([*others[:place], word, *others[place:]])
                assert amax_bits(x.to(dtype)).item() > INFINITY_BITS, (hex(word), place)
                assert amax_bits(-x.to(dtype)).item() > INFINITY_BITS, (hex(word), place)


def test_amax_bits_over_dtypes_and_strides() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        generator = torch.Generator().manual_seed(0)
        for shape in [(1,), (7,), (5, 33), (2, 3, 64), (), (1024,)]:
            x = torch.randn(shape, generator=generator).to(dtype)
            assert amax_bits(x).item() == bits_of(amax_of(x.flatten().tolist()) or 0.0)
        x = torch.randn(16, 24, generator=generator).to(dtype)
        for view in (x.t(), x[::2, 1::3], x[:, 5], x.expand(3, 16, 24), x[3:4]):
            assert amax_bits(view).item() == bits_of(amax_of(view.flatten().tolist()) or 0.0)
        biggest = torch.tensor([torch.finfo(dtype).min, 1.0], dtype=dtype)
        assert amax_bits(biggest).item() == bits_of(torch.finfo(dtype).max)


def test_amax_bits_of_nothing() -> None:
    for shape in ((0,), (0, 5), (4, 0)):
        assert amax_bits(torch.empty(shape)).item() == DID_NOT_RUN_BITS == bits_of(DID_NOT_RUN)


def test_record_amax_is_a_maximum_that_keeps_nan() -> None:
    ordered = [DID_NOT_RUN, 0.0, of_bits(1), 1.0, 2.0, of_bits(0x7F7FFFFF), math.inf, math.nan]
    for before in range(len(ordered)):
        for new in range(len(ordered)):
            pending = torch.tensor([5.0, ordered[before], 5.0])
            bits_new = torch.tensor(bits_of(ordered[new]), dtype=torch.int32)
            record_amax(bits_new, pending[1])
            assert bits(pending) == [bits_of(5.0), bits_of(ordered[max(before, new)]), bits_of(5.0)]
            assert bits_new.item() == bits_of(ordered[new])


FP8 = pytest.mark.parametrize("dtype", FORMATS, ids=["e4m3", "e5m2"])


def _check(result: Tensor, values: list[float], scale: float, dtype: torch.dtype) -> None:
    """Finite values saturate even if their product with the scale overflows; Inf and NaN become NaN."""
    products = [float32(value * scale) if math.isfinite(value) else math.nan for value in values]
    expected = [rounded(math.copysign(min(abs(p), FLOAT32_MAX), p), dtype) for p in products]
    for found, right, value in zip(result.float().flatten().tolist(), expected, values, strict=True):
        assert repr(found) == repr(right), f"{value!r} * {scale!r}"


@pytest.mark.slow
@FP8
def test_all_bfloat16_values(dtype: torch.dtype) -> None:
    for scale in (1.0, 448.0 / 3.0, 1e-6, 3.0e38):
        x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(256, 256)
        scale = float32(scale)
        rows, nothing = saturating_cast(x, torch.tensor(scale), dtype, True, False)
        assert rows.shape == x.shape
        assert rows.dtype == dtype
        assert nothing.numel() == 0
        _check(rows, x.flatten().tolist(), scale, dtype)


@FP8
def test_ties_and_their_neighbours(dtype: torch.dtype) -> None:
    """Midpoints of all neighbouring values and the adjacent float32 values, from subnormal to saturation."""
    values = numbers_of(dtype)
    points = [*((a + b) / 2 for a, b in itertools.pairwise(values)), *values]
    points += [values[-1] * f for f in (1.01, 1.03125, 1.0625, 1.125, 1.2, 2.0)]
    near = [of_bits(bits_of(p) + d) for p in points if p > 0 for d in (-1, 0, 1)]
    both = [*near, *(-v for v in near), 0.0, -0.0]
    rows, _ = saturating_cast(torch.tensor([both]), torch.ones(()), dtype, True, False)
    _check(rows, both, 1.0, dtype)


@FP8
def test_inf_and_nan_become_nan(dtype: torch.dtype) -> None:
    """For tiny and huge scales, and for both signs."""
    x = _tensor([0x7F800000, 0xFF800000, *NAN_WORDS, 0x3F800000]).view(2, 4)
    for scale in (1.0, 1e-30, 1e30):
        rows, columns = saturating_cast(x, torch.tensor(scale), dtype, True, True)
        assert rows.float().isnan().flatten().tolist() == [True] * 7 + [False]
        assert bool(columns.float().t()[:2].isnan().eq(rows.float().isnan()).all())


@FP8
def test_what_is_cast_block_by_block(dtype: torch.dtype) -> None:
    """Large tensors are cast in blocks of rows, the last one short. The result equals a cast of the whole tensor."""
    for shape, source in (((301, 1000), torch.float32), ((3, 200_000), torch.bfloat16), ((300_000, 1), torch.bfloat16)):
        for transposed in (False, True):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).mul_(50).to(source)
            x.view(-1)[::977] = torch.inf
            x.view(-1)[1::977] = torch.nan
            x.view(-1)[2::977] = -0.0
            x = x.t() if transposed else x
            assert x.numel() > CPU_BLOCK
            rows, columns = saturating_cast(x, torch.tensor(7.0), dtype, True, True)
            limit = torch.finfo(dtype).max
            expected = torch.where(x.isinf(), torch.nan, (x.float() * 7.0).clamp(-limit, limit)).to(dtype)
            assert rows.is_contiguous()
            assert torch.equal(rows.view(torch.uint8), expected.contiguous().view(torch.uint8))
            assert torch.equal(columns[:, : x.shape[0]].view(torch.uint8), expected.t().contiguous().view(torch.uint8))


def test_transposed_copy() -> None:
    cases = [
        *zip((0, 1, 15, 16, 17, 32, 33), itertools.repeat(torch.bfloat16), itertools.cycle(FORMATS)),
        (17, torch.float32, torch.float8_e4m3fn),
        (17, torch.float16, torch.float8_e5m2),
    ]
    for tokens, source, dtype in cases:
        x = torch.randn(tokens, 48, generator=torch.Generator().manual_seed(tokens)).to(source)
        rows, columns = saturating_cast(x, torch.tensor(100.0), dtype, True, True)
        padded = (tokens + 15) // 16 * 16
        assert rows.shape == (tokens, 48)
        assert columns.shape == (48, padded)
        assert rows.is_contiguous()
        assert columns.is_contiguous()
        assert columns.dtype == dtype
        assert columns.view(torch.uint8)[:, :tokens].tolist() == rows.view(torch.uint8).t().tolist()
        assert columns.view(torch.uint8)[:, tokens:].eq(0).all()
        only_rows, nothing = saturating_cast(x, torch.tensor(100.0), dtype, True, False)
        assert nothing.numel() == 0
        assert only_rows.view(torch.uint8).tolist() == rows.view(torch.uint8).tolist()
        nothing, only_columns = saturating_cast(x, torch.tensor(100.0), dtype, False, True)
        assert nothing.numel() == 0
        assert only_columns.view(torch.uint8).tolist() == columns.view(torch.uint8).tolist()
        strided = x.t().contiguous().t()
        assert saturating_cast(strided, torch.tensor(100.0), dtype, True, False)[0].is_contiguous()
        _check(saturating_cast(strided, torch.tensor(100.0), dtype, True, False)[0], x.flatten().tolist(), 100.0, dtype)


@FP8
def test_the_input_is_left_alone_and_dequantized(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, -2.5, 1e9, 0.0]])
    rows, _ = saturating_cast(x, torch.tensor(2.0), dtype, True, False)
    assert x.tolist() == [[1.0, -2.5, 1e9, 0.0]]
    assert dequantize(rows, torch.tensor(0.5)).tolist() == [[1.0, -2.5, torch.finfo(dtype).max / 2, 0.0]]


@pytest.mark.slow
def test_rings_against_lists() -> None:
    """Random participation and magnitudes, over several laps of the ring."""
    for length in (1, 2, 3, 5, 16, 17, 1000):
        rng = random.Random(length)
        n, shape = 5, RingShape(length)
        assert shape.padded == shape.block * shape.blocks >= length
        history, block_max = torch.zeros(n, shape.padded), torch.zeros(n, shape.blocks)
        count, row_start = torch.zeros(n, dtype=torch.int64), torch.arange(n) * shape.padded
        windows = [[0.0] * length for _ in range(n)]
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


def test_windows_can_be_replaced() -> None:
    for length in (1, 2, 3, 17, 1000):
        rng = random.Random(length)
        n, shape = 4, RingShape(length)
        history, block_max = torch.rand(n, shape.padded), torch.rand(n, shape.blocks)
        history[:, length:] = 0
        count, row_start = torch.tensor([0, 1, length - 1, 3 * length + 2]), torch.arange(n) * shape.padded
        everyone = torch.ones(n, dtype=torch.bool)
        rows = torch.rand(n, length)
        write_window(history, block_max, count, shape, rows)
        assert ordered_window(history, count, shape).tolist() == rows.tolist()
        assert block_max.amax(1).tolist() == rows.amax(1).tolist()
        windows = rows.tolist()
        for _ in range(length + 2):
            amax = [float32(rng.random()) for _ in range(n)]
            maxima = write(history, block_max, count, row_start, shape, torch.tensor(amax), everyone)
            count += 1
            windows = [[*w[1:], a] for w, a in zip(windows, amax)]
            assert maxima.tolist() == [max(w) for w in windows]
        assert ordered_window(history, count, shape).tolist() == windows


def _digest(words: Tensor) -> int:
    out = torch.zeros(1, dtype=torch.int64)
    digest_words(words, position_keys(len(words), words.device), out)
    return int(out)


def _words(n: int, seed: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, (n,), generator=torch.Generator().manual_seed(seed)).to(torch.int32)


def test_every_single_bit_flip_is_seen() -> None:
    rng = random.Random(0)
    words = _words(1344, 0)
    before = _digest(words)
    for _ in range(500):
        place, bit = rng.randrange(len(words)), rng.randrange(32)
        flip = (1 << bit) - (1 << 32 if bit == 31 else 0)
        words[place] ^= flip
        assert _digest(words) != before
        words[place] ^= flip
    assert _digest(words) == before


@pytest.mark.parametrize("constant", [False, True])
def test_equal_flips_in_two_places_are_seen(constant: bool) -> None:
    """An XOR would miss the change."""
    rng = random.Random(1)
    words = torch.full((256,), 0x3F800000, dtype=torch.int32) if constant else _words(256, 1)
    before = _digest(words)
    for _ in range(500):
        first, second = rng.sample(range(len(words)), 2)
        bit = rng.randrange(32)
        flip = (1 << bit) - (1 << 32 if bit == 31 else 0)
        changed = words.clone()
        changed[first] ^= flip
        changed[second] ^= flip
        assert _digest(changed) != before


def test_swapped_words_are_seen() -> None:
    """A plain sum would miss the change."""
    rng = random.Random(2)
    words = _words(256, 2)
    before = _digest(words)
    for _ in range(300):
        first, second = rng.sample(range(len(words)), 2)
        changed = words.clone()
        changed[first], changed[second] = words[second], words[first]
        assert _digest(changed) != before
    for shift in range(1, 256):
        assert _digest(words.roll(shift)) != before


def test_the_digest_does_not_depend_on_the_order_of_summation() -> None:
    words, keys = _words(1000, 3), position_keys(1000, torch.device("cpu"))
    whole = torch.zeros(1, dtype=torch.int64)
    digest_words(words, keys, whole)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    out = torch.zeros(1, dtype=torch.int64)
    digest_words(words[order], keys[order], out)
    assert out.equal(whole)
    total = 0
    for part in range(0, 1000, 77):
        digest_words(words[part : part + 77], keys[part : part + 77], out)
        total += int(out)
    assert (total - int(whole)) % (1 << 64) == 0


def test_keys() -> None:
    """Keys are odd and distinct, and do not depend on the count. The digest's guarantees rely on this."""
    keys = position_keys(5000, torch.device("cpu"))
    assert bool((keys & 1).all())
    assert len(set(keys.tolist())) == 5000
    assert position_keys(7, torch.device("cpu")).equal(keys[:7])
    high = (keys >> 32).unique()
    assert len(high) > 4990  # The upper halves are random, too.


def test_digest_of_nothing() -> None:
    assert _digest(torch.zeros(0, dtype=torch.int32)) == 0


def _sent(words: list[int]) -> Tensor:
    header = torch.tensor(words, dtype=torch.int32)
    return torch.cat([header, header.bitwise_not()])


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
            reduced = torch.stack([_sent(words) for words in all_words]).amax(0)
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
    arrays.scales.copy_(torch.tensor([[2.0, 3.0], [0.5, 1 / 3]]))
    words, send = arrays.words, arrays.send
    scale_bits = arrays.scales.view(-1).view(torch.int32)

    def digest() -> int:
        arrays.pending.copy_(torch.tensor([-1.0, 5.0]))
        send.fill_(99)
        launch(arrays, None, False)
        assert send[:2].tolist() == [7, 3]
        assert send[:WORDS].equal(words)
        assert send[WORDS:HEADER].equal(words.bitwise_not())
        assert send[HEADER:].tolist() == [DID_NOT_RUN_BITS, bits_of(5.0)]
        assert arrays.pending.tolist() == [-1.0, -1.0]
        assert arrays.sent.equal(arrays.scales)
        whole = torch.zeros(1, dtype=torch.int64)
        digest_words(scale_bits, position_keys(4, torch.device("cpu")), whole)
        assert words[2:].equal(whole.view(torch.int32))
        return int(whole)

    before = digest()
    for place in range(4):
        scale_bits[place] ^= 1
        assert digest() != before
        scale_bits[place] ^= 1
    assert digest() == before


def test_withhold() -> None:
    """A skipped optimizer step sends no amaxes and keeps the pending ones; ``drop`` discards non-finite ones."""
    for drop in (False, True):
        for held in (False, True):
            amaxes = [-1.0, 0.0, 5.0, math.inf, math.nan]
            arrays = _arrays(amaxes)
            launch(arrays, torch.tensor([float(held)]), drop)
            nothing = [DID_NOT_RUN_BITS] * 5
            all_bits = [bits_of(a) for a in amaxes]
            kept = [b if b < INFINITY_BITS or not drop else DID_NOT_RUN_BITS for b in all_bits]
            assert arrays.send[HEADER:].tolist() == (nothing if held else all_bits)
            assert bits(arrays.pending) == (kept if held else nothing)
