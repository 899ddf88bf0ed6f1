"""The emulation of Hopper's accumulation against exact rational arithmetic, and what is made of it."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8dist
from fp8dist_kernels import direct
from scripts.convergence.accumulation import emulated, emulated_product
from scripts.convergence.fast_accumulation import RECIPES, main, products
from tests.support.linear import inputs
from tests.support.suite import crossed

ROOT = Path(__file__).resolve().parents[2]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ONE = torch.ones(())

# The oracle: one element of a product, in integers -------------------------------------------------------------


def decoded(byte: int, dtype: torch.dtype) -> tuple[Fraction, int]:
    """Return (value, exponent) of an FP8 byte. Subnormal numbers have the exponent of the smallest normal ones."""
    mantissa_bits, bias = (3, 7) if dtype is E4M3 else (2, 15)
    exponent, mantissa = (byte & 0x7F) >> mantissa_bits, byte & ((1 << mantissa_bits) - 1)
    if exponent:
        mantissa += 1 << mantissa_bits
    exponent = max(exponent, 1) - bias
    sign = -1 if byte & 0x80 else 1
    return sign * mantissa * Fraction(2) ** (exponent - mantissa_bits), exponent


def cut(value: Fraction, unit: Fraction) -> Fraction:
    """Round towards zero to a multiple of ``unit``."""
    return math.trunc(value / unit) * unit


def exponent_of(value: Fraction) -> int:
    exponent = 0
    while abs(value) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    return exponent


def oracle(a: Tensor, b: Tensor, promoted_every: int | None, bits: int = 13) -> float:
    """Return the sum of the products of a [k] and b [k]."""
    left, right = ([decoded(byte, x.dtype) for byte in x.contiguous().view(torch.uint8).tolist()] for x in (a, b))
    total, partial = torch.zeros(()), Fraction(0)
    for start in range(0, len(left), 32):
        step = range(start, min(start + 32, len(left)))
        terms = [(left[i][0] * right[i][0], left[i][1] + right[i][1]) for i in step]
        terms = [term for term in terms if term[0]] + ([(partial, exponent_of(partial))] if partial else [])
        if terms:
            unit = Fraction(2) ** (max(exponent for _, exponent in terms) - bits)
            partial = sum((cut(value, unit) for value, _ in terms), Fraction(0))
        if partial:
            partial = cut(partial, Fraction(2) ** (exponent_of(partial) - bits))
        if promoted_every is not None and (start + 32) % promoted_every == 0:
            total, partial = total + torch.tensor(float(partial)), Fraction(0)
    return float(total + torch.tensor(float(partial)))


def operands(kind: str, m: int, n: int, k: int, left: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """Return FP8 a [m, k] and b [n, k]."""
    generator = torch.Generator().manual_seed(k + m)
    if kind == "any bits":  # All finite values, subnormal ones and zeros too.
        largest = 0x7E if left is E4M3 else 0x7B
        a, b = (
            torch.randint(0, most + 1, (rows, k), generator=generator).byte()
            + 0x80 * torch.randint(0, 2, (rows, k), generator=generator).byte()
            for rows, most in ((m, largest), (n, 0x7E))
        )
        return a.view(left), b.view(E4M3)
    if kind == "subnormal":
        a, b = (torch.randint(0, 8, (rows, k), generator=generator).byte() for rows in (m, n))
        return (a & (3 if left is E5M2 else 7)).view(left), b.view(E4M3)
    x, y = (torch.randn(rows, k, generator=generator) for rows in (m, n))
    if kind == "positive":
        x, y = x.abs(), y.abs()
    if kind == "tiny":
        x, y = x / 256, y / 256
    if kind == "sparse":
        x[:, :-40] = 0
        y[:, -8:] = 0
    return (x * 30).to(left), (y * 30).to(E4M3)


@crossed(promoted_every=[None, 64, 128], kind=["normal", "positive", "tiny", "sparse", "subnormal", "any bits"])
def test_the_emulation_is_the_oracle_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, kind: str, promoted_every: int | None
) -> None:
    """Few bits also show what exponent a subnormal number has. Two tiles: rows 0 and 1, and row 2."""
    monkeypatch.setattr("scripts.convergence.accumulation._TILE", 8)
    for left, k, bits in ((E4M3, 400, 13), (E5M2, 256, 13), (E4M3, 16, 13), (E4M3, 160, 2), (E5M2, 160, 3)):
        a, b = operands(kind, 3, 4, k, left)
        found = emulated_product(a, b, ONE, ONE, promoted_every, bits)
        assert found.tolist() == [[oracle(x, y, promoted_every, bits) for y in b] for x in a], (left, k, bits)


def test_what_the_sources_say() -> None:
    """A sum keeps 13 bits behind the leading one, and what is below is cut off."""
    for small, kept in ((2.0**-4, 2.0**-4), (2.0**-5, 0.0), (-(2.0**-5), 0.0), (1.75 * 2.0**-4, 2.0**-4)):
        a, b = torch.zeros(16, 64), torch.zeros(16, 64)
        a[0, 0], b[0, 0] = 256, 2  # 2**9: the last bit is 2**-4.
        a[0, 33], b[0, 33] = small, 1.0  # In the next step.
        fast = emulated_product(a.to(E4M3), b.to(E4M3), ONE, ONE, None)
        assert float(fast[0, 0]) == 512 + kept
        assert fast.abs().sum() == fast[0, 0]
    assert all(row["fast"] > 2 * row["slow"] > 0 for row in products((1024,)))
    sums = emulated_product(*(torch.ones(16, 1 << 15).to(E4M3) for _ in "ab"), ONE, ONE, None)
    assert float(sums[0, 0]) == 1 << 14, "from there on, 1 is less than the last bit"


def test_scales_bias_and_bad_values() -> None:
    a, b = operands("normal", 6, 16, 32)
    rows, columns = torch.rand(6, 1) + 0.5, torch.rand(16, 1) + 0.5
    plain = emulated_product(a, b, ONE, ONE, None)
    torch.testing.assert_close(emulated_product(a, b, rows, columns, None), plain * rows * columns.t())
    for bad in (math.nan, math.inf):
        x = a.float().to(E5M2)
        x[2, 3] = bad
        found = emulated_product(x, b, ONE, ONE, None)
        assert not found[2].isfinite().any()
        assert found[[0, 1, 3, 4, 5]].isfinite().all()
    assert emulated_product(a[:0], b, ONE, ONE, None).shape == (0, 16)


@pytest.mark.parametrize("kind", [fp8dist.DelayedScaling, fp8dist.RowwiseScaling])
def test_only_the_gemms_of_the_recipe_are_fast(kind: Any) -> None:
    """256 tokens and features: promoted once on the way, or not."""
    found = {}
    for fast in ((), ("fprop",), ("dgrad",), ("wgrad",)):
        torch.manual_seed(0)
        module = torch.nn.Linear(256, 256)
        fp8dist.prepare(torch.nn.Sequential(module), kind(fast_accumulation=fast))
        x = inputs(256, 256).requires_grad_()
        with emulated():
            y = module(x)
            y.backward(inputs(256, 256, seed=3))
        found[fast] = [y, x.grad, module.weight.grad]
        plain = module(x)
        assert not torch.equal(plain, y)
        torch.testing.assert_close(plain, y, rtol=1e-3, atol=1e-3)
    slow = found.pop(())
    for number, results in enumerate(found.values()):
        same = [torch.equal(mine, theirs) for mine, theirs in zip(results, slow)]
        assert same == [place != number for place in range(3)]
    a, b = operands("positive", 4, 128, 512)
    by_block = a, b, torch.rand(4, 4), torch.rand(1, 4)  # Left alone.
    expected = direct.matmul(*by_block, torch.float32, fast_accumulation=True)
    with emulated():
        assert torch.equal(direct.matmul(*by_block, torch.float32, fast_accumulation=True), expected)


TINY = ("--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--batch-size", "4")


@pytest.mark.long
@pytest.mark.nightly
def test_from_end_to_end(tmp_path: Path) -> None:
    flags = ["--points", "1", "3", "--batches", "2", *TINY, "--out", str(tmp_path)]
    assert main(flags) == 0
    data = json.loads((tmp_path / "accumulation.json").read_text())
    assert data["flags"] == ["--steps", "3", *TINY]
    assert [(point["step"], point["tokens"]) for point in data["points"]] == [(1, 128), (3, 128), (3, 256)]
    for point in data["points"]:
        for row in point["gemms"]:
            assert (row["fast"] == row["slow"]) == (row["highest_k"] <= 128)
            assert 0 < row["slow"]["mean"] <= row["fast"]["mean"] < 1e-3
        for case in point["cases"]:
            assert 0.99 < case["overall"] < 1, case
        emulated = {(case["recipe"], case["fast"] is None): case["overall"] for case in point["cases"]}
        for recipe in RECIPES:
            assert emulated[recipe, True] != emulated[recipe, False]
