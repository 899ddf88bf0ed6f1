"""Emulated NVFP4 casts and products against an oracle in plain Python. ``tests/parallel/test_nvfp4.py`` has parts."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8dist_kernels import direct, ops
from fp8dist_kernels.reference import nvfp4 as plain
from fp8dist_kernels.reference.matmuls import Scaling, matmul_reference, scaling_of
from tests.support import fp8_oracle
from tests.support.answers import GOLDEN, MASK, mixed
from tests.support.casting import DTYPES, LAYOUTS, hard_values
from tests.support.devices import DEVICE

E4M3 = torch.float8_e4m3fn
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
KEY = 0x1234_5678_9ABC
OPTIONS: dict[str, Any] = {"key": KEY, "square": False, "hadamard": False, "stochastic": False}

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # The oracle's infinities.


def draw(step: int = 3, backward: int = 0, token: int = 0, feature: int = 0, features: int = 64) -> Tensor:
    return torch.tensor([step, backward, token, feature, features], device=DEVICE)


def encode_of(x: Tensor, margin: int = 0) -> Tensor:
    """The tensor's scale as published: the reciprocal of amax / (6 * 448)."""
    return torch.full((), 2688.0, device=x.device) / x.float().abs().amax() / 2**margin


# The oracle ------------------------------------------------------------------------------------------


def stream(*counters: int, state: int = KEY) -> int:
    for counter in counters:
        state = mixed((state + (counter + 1) * GOLDEN) & MASK)
    return state


def rounded(magnitude: float, random: float | None) -> float:
    """To nearest, ties to the even code; or up with the probability of the distance from below."""
    if magnitude >= 6:
        return 6.0
    low = max(code for code, value in enumerate(E2M1) if value <= magnitude)
    share = (magnitude - E2M1[low]) / (E2M1[low + 1] - E2M1[low])
    up = share > 0.5 or (share == 0.5 and low % 2 == 1) if random is None else random < share
    return E2M1[low + up]


def block_by_hand(
    block: list[float], amax: float, encode: float, random: list[float] | None
) -> tuple[list[float], float]:
    """Return (elements, what they are multiplied with). ``amax``: of the block, or of its square."""
    f32 = np.float32
    scale = f32(f32(amax) / f32(6)) * f32(encode)
    code = fp8_oracle.E4M3.encode(np.array([np.minimum(scale, f32(448))], dtype=f32))
    if not math.isfinite(amax):
        return [0.0] * len(block), math.nan
    inv_scale = f32(fp8_oracle.E4M3.decoded(code)[0]) * f32(1 / f32(encode))
    factor = f32(1) / inv_scale if inv_scale >= 2.0**-126 else f32(0)
    scaled = [float(f32(x) * factor) for x in block]
    parts = [rounded(abs(x), None if random is None else random[i]) for i, x in enumerate(scaled)]
    return [math.copysign(part, x) for part, x in zip(parts, scaled)], float(inv_scale)


def lines_by_hand(
    x: Tensor, encode: float, transposed: bool, square: bool, hadamard: bool, stochastic: bool, at: list[int]
) -> tuple[list[list[float]], list[list[float]]]:
    """Return (elements, inverse scales) of one copy. ``at``: the counters."""
    f32, whole = np.float32, (x.t() if transposed else x).float().cpu()
    count, width = whole.shape
    padded = np.zeros((-(-count // 16) * 16, -(-width // 16) * 16), dtype=f32)
    padded[:count, :width] = whole.numpy()
    elements, scales = [], []
    for line in range(count):
        elements.append([]), scales.append([])
        for first in range(0, padded.shape[1], 16):
            block = [f32(one) for one in padded[line, first : first + 16]]
            if hadamard and transposed:
                signs = stream(0, at[0])
                block = [-one if signs >> place & 1 else one for place, one in enumerate(block)]
                for half in (1, 2, 4, 8):
                    block = [
                        block[i] + block[i + half] if not i & half else block[i - half] - block[i] for i in range(16)
                    ]
                block = [one / f32(4) for one in block]
            tile = padded[line // 16 * 16 :][:16, first : first + 16] if square else np.array(block)
            random = None
            if stochastic:
                of_copy = stream(2 if transposed else 1, at[0], at[1])
                places = [(i, line) if transposed else (line, i) for i in range(first, first + 16)]
                numbers = [(at[2] + token) * at[4] + at[3] + feature for token, feature in places]
                random = [(stream(number, state=of_copy) >> 40) * 2.0**-24 for number in numbers]
            scale_of_copy = encode / 4 if hadamard and transposed else encode
            made, inv_scale = block_by_hand(
                [float(one) for one in block], float(np.abs(tile).max()), scale_of_copy, random
            )
            elements[-1] += made
            scales[-1].append(inv_scale)
    return elements, scales


def assert_by_hand(x: Tensor, encode: Tensor, at: Tensor, **options: Any) -> None:
    chosen = {**OPTIONS, **options}
    got = plain.quantize_nvfp4(x, encode, at, E4M3, rows=True, columns=True, **chosen)
    flags = [chosen[name] for name in ("square", "hadamard", "stochastic")]
    for place, transposed in enumerate((False, True)):
        elements, scales = lines_by_hand(x, float(encode), transposed, *flags, at.tolist())  # type: ignore[arg-type]
        for made, expected in zip(got[2 * place : 2 * place + 2], (elements, scales)):
            theirs = torch.tensor(expected, dtype=torch.float32)
            assert torch.equal(made.float().cpu().nan_to_num(7.5), theirs.nan_to_num(7.5)), (transposed, chosen)
            assert torch.equal(made.float().cpu().signbit(), theirs.signbit()) or made.isnan().any()


# Tests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"square": True}, {"hadamard": True}, {"stochastic": True}, {"hadamard": True, "stochastic": True}],
    ids=lambda options: " ".join(options) or "plain",
)
def test_casts_by_hand(options: dict[str, bool]) -> None:
    torch.manual_seed(1)
    for (tokens, features), dtype in zip(((40, 48), (1, 16), (16, 33)), itertools.cycle(DTYPES)):
        x = (torch.randn(tokens, features) * torch.logspace(-4, 2, features)).to(dtype).to(DEVICE)
        for margin in (0, 1):
            at = draw(7, 2, 1000, 32, features + 32)  # The random numbers depend on all of them.
            assert_by_hand(x, encode_of(x, margin), at, **options)


TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -5.0, 0.0, -0.0, 0.2500001, 5.0000005, 4.9999995, 1.0, 6.0)


@pytest.mark.parametrize("square", [False, True])
def test_hard_values_by_hand(square: bool) -> None:
    """Inf, NaN, zeros of both signs, subnormal numbers, and a tensor far beyond its scale; ties with the scale 1."""
    x = hard_values(32, 64)
    for encode in (encode_of(hard_values(32, 64, finite=True)), torch.tensor(1.0), torch.tensor(2.0**100)):
        assert_by_hand(x.to(DEVICE), encode.to(DEVICE), draw(), square=square)
    assert_by_hand(torch.tensor([TIES] * 2, device=DEVICE), torch.tensor(448.0), draw(), square=square)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ops_and_strides(layout: str) -> None:
    x = LAYOUTS[layout](hard_values(40, 48, finite=True))
    options: dict[str, Any] = {**OPTIONS, "hadamard": True, "stochastic": True, "rows": True, "columns": True}
    expected = plain.quantize_nvfp4(x.contiguous(), encode_of(x), draw(), E4M3, **options)
    for call in (direct.quantize_nvfp4, ops.quantize_nvfp4):
        for got, theirs in zip(call(x, encode_of(x), draw(), E4M3, **options), expected):
            assert torch.equal(got.float(), theirs.float())
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        shapes = [tuple(one.shape) for one in ops.quantize_nvfp4(x, encode_of(x), draw(), E4M3, **options)]
    assert shapes == [tuple(one.shape) for one in expected]


def test_products_are_exact_where_sums_are() -> None:
    torch.manual_seed(4)
    values = torch.tensor(E2M1)
    for m, n, k in ((1, 16, 32), (40, 48, 96), (33, 16, 272)):
        a, b = (values[torch.randint(8, (lines, k))].to(E4M3).to(DEVICE) for lines in (m, n))
        of_a, of_b = (torch.randint(1, 5, (lines, k // 16)).float().to(DEVICE) for lines in (m, n))
        assert scaling_of(a, b, of_a, of_b) is Scaling.NVFP4
        expected = (a.double() * of_a.double().repeat_interleave(16, 1)) @ (
            b.double() * of_b.double().repeat_interleave(16, 1)
        ).T
        assert torch.equal(matmul_reference(a, b, of_a, of_b, torch.float32).double(), expected)
        for backend in ("auto", "torch", "reference"):  # No backend has a path of its own.
            got = direct.matmul(a, b, of_a, of_b, torch.float32, fast_accumulation=False, backend=backend)
            assert torch.equal(got.double(), expected)
