"""The emulation of Hopper's accumulation against exact rational arithmetic, and what is made of it."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import fp8dist
from fp8dist_kernels import direct
from fp8dist_kernels.reference.casts import dequantize
from scripts.convergence import accumulation_tables as tables
from scripts.convergence.accumulation import PROMOTED_EVERY, compared, emulated, emulated_product
from scripts.convergence.fast_accumulation import CASES, RECIPES, main, products
from tests.support.linear import inputs, linear
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
def test_the_emulation_is_the_oracle_bit_for_bit(kind: str, promoted_every: int | None) -> None:
    for left, k in ((E4M3, 400), (E5M2, 256), (E4M3, 16)):
        a, b = operands(kind, 3, 4, k, left)
        found = emulated_product(a, b, ONE, ONE, promoted_every)
        assert found.tolist() == [[oracle(x, y, promoted_every) for y in b] for x in a], (left, k)


@pytest.mark.slow
def test_other_widths_are_the_oracle_too() -> None:
    """Few bits also show what exponent a subnormal number has."""
    for kind, left in (("normal", E4M3), ("subnormal", E4M3), ("subnormal", E5M2)):
        a, b = operands(kind, 2, 3, 160, left)
        for bits in (2, 3, 10, 16):
            found = emulated_product(a, b, ONE, ONE, None, bits)
            assert found.tolist() == [[oracle(x, y, None, bits) for y in b] for x in a], (kind, left, bits)


def test_tiles_do_not_change_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operands("normal", 7, 5, 64)
    whole = emulated_product(a, b, ONE, ONE, None)
    monkeypatch.setattr("scripts.convergence.accumulation._TILE", 10)
    assert torch.equal(emulated_product(a, b, ONE, ONE, None), whole)


def test_a_wide_accumulator_is_a_float32_product() -> None:
    a, b = operands("normal", 16, 16, 1024)
    exact = a.double() @ b.double().t()
    found = emulated_product(a, b, ONE, ONE, None, 23)
    assert float((found - exact).norm() / exact.norm()) < 1e-6  # 24 bits, about 2**-23 for each of 32 steps.
    few = torch.randint(-3, 4, (16, 64)).float().to(E4M3)
    assert torch.equal(emulated_product(few, few, ONE, ONE, None).double(), few.double() @ few.double().t())


@pytest.mark.slow
def test_what_the_sources_say() -> None:
    """A sum keeps 13 bits behind the leading one, and what is below is cut off."""
    for small, kept in ((2.0**-4, 2.0**-4), (2.0**-5, 0.0), (-(2.0**-5), 0.0), (1.75 * 2.0**-4, 2.0**-4)):
        a, b = torch.zeros(16, 64), torch.zeros(16, 64)
        a[0, 0], b[0, 0] = 256, 2  # 2**9: the last bit is 2**-4.
        a[0, 33], b[0, 33] = small, 1.0  # In the next step.
        fast = emulated_product(a.to(E4M3), b.to(E4M3), ONE, ONE, None)
        assert float(fast[0, 0]) == 512 + kept
        assert fast.abs().sum() == fast[0, 0]
    sums = emulated_product(*(torch.ones(16, 1 << 16).to(E4M3) for _ in "ab"), ONE, ONE, None)
    assert float(sums[0, 0]) == 1 << 14, "from there on, 1 is less than the last bit"


def test_slow_accumulation_is_closer() -> None:
    found = {(row["data"], row["formats"], row["k"]): row for row in products((128, 1024))}
    assert len(found) == 6
    for (_, _, k), row in found.items():
        assert row["slow"] < 1e-3
        assert row["fast"] == row["slow"] if k == PROMOTED_EVERY else row["fast"] > 2 * row["slow"]
        assert 1e-3 < row["cast"] < 0.1


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
    with pytest.raises(ValueError, match="a multiple of 32, got 48"):
        emulated_product(a, b, ONE, ONE, 48)
    with pytest.raises(ValueError, match="from 1 to 23, got 24"):
        emulated_product(a, b, ONE, ONE, None, 24)


@pytest.mark.parametrize("kind", [fp8dist.CurrentScaling, fp8dist.DelayedScaling, fp8dist.RowwiseScaling])
def test_only_the_gemms_of_the_recipe_are_fast(kind: Any) -> None:
    """256 tokens and features: promoted once on the way, or not."""
    found = {}
    for fast in ((), ("fprop",), ("dgrad",), ("wgrad",)):
        torch.manual_seed(0)
        module = torch.nn.Linear(256, 256)
        fp8dist.prepare(torch.nn.Sequential(module), kind(fast_accumulation=fast))
        x = inputs(256, 256).requires_grad_()
        before = direct.matmul
        with emulated():
            y = module(x)
            y.backward(inputs(256, 256, seed=3))
        assert direct.matmul is before
        found[fast] = [y, x.grad, module.weight.grad]
    slow = found.pop(())
    for number, results in enumerate(found.values()):
        same = [torch.equal(mine, theirs) for mine, theirs in zip(results, slow)]
        assert same == [place != number for place in range(3)]


def test_a_product_is_promoted_unless_the_call_wants_fast_accumulation() -> None:
    a, b = operands("positive", 4, 16, 512)
    for fast, every in ((True, None), (False, 128)):
        with emulated():
            found = direct.matmul(a, b, ONE, ONE, torch.float32, fast_accumulation=fast)
        assert torch.equal(found, emulated_product(a, b, ONE, ONE, every))


def test_the_emulation_multiplies_what_the_linear_multiplies() -> None:
    results = []
    for within in (False, True):
        module, _ = linear("reference", bias=True)
        x = inputs(17, 48).requires_grad_()
        if within:
            with emulated():
                y = module(x)
        else:
            y = module(x)
        results.append(y)
    assert not torch.equal(*results)
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("gemm", "k"), [("fprop", 256), ("dgrad", 384), ("wgrad", 192)])
def test_errors_are_those_of_the_gemm_on_the_usual_operands(gemm: Any, k: int) -> None:
    module = torch.nn.Linear(256, 384)
    fp8dist.prepare(torch.nn.Sequential(module), fp8dist.RowwiseScaling(fast_accumulation=(gemm,)))
    seen, original = [], direct.matmul

    def spy(*operands: Any, **options: Any) -> Tensor:
        seen.append((options["fast_accumulation"], operands))
        return original(*operands, **options)

    def gradients() -> list[Tensor]:
        module.zero_grad()
        x = inputs(192, 256).requires_grad_()
        y = module(x)
        y.backward(inputs(192, 384, seed=3))
        return [y, x.grad, module.weight.grad]

    with mock.patch.object(direct, "matmul", spy):
        usual = gradients()
    with compared() as found:
        results = gradients()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(results, usual))
    (errors,) = found
    ((a, b, inv_scale_a, inv_scale_b),) = [operands[:4] for fast, operands in seen if fast]
    exact = (dequantize(a, inv_scale_a).double() @ dequantize(b, inv_scale_b).double().t()).norm()
    for every, error in ((None, errors.fast), (128, errors.slow)):
        difference = emulated_product(a, b, inv_scale_a, inv_scale_b, every) - original(
            a, b, inv_scale_a, inv_scale_b, torch.float32, fast_accumulation=False
        )
        # The latter is itself rounded to float32.
        assert error == pytest.approx(float(difference.norm() / exact), rel=1e-3)
    assert errors.k == k
    assert 0 < errors.slow < errors.fast < 0.01


def test_products_by_block_are_left_alone() -> None:
    a, b = operands("normal", 4, 128, 256)
    scales = torch.rand(4, 2), torch.rand(1, 2)
    expected = direct.matmul(a, b, *scales, torch.float32, fast_accumulation=True)
    with emulated():
        assert torch.equal(direct.matmul(a, b, *scales, torch.float32, fast_accumulation=True), expected)


def test_an_error_inside_restores_the_product() -> None:
    before = direct.matmul
    with pytest.raises(ValueError, match="contiguous"), emulated():
        direct.matmul(torch.zeros(16, 16).to(E4M3).t()[:, :8], ONE, ONE, ONE, torch.float32, fast_accumulation=True)
    assert direct.matmul is before


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


def test_the_published_results_are_complete_and_from_a_commit() -> None:
    data = tables.load(ROOT)
    assert data is not None
    assert not data["commit"].endswith("+")
    assert [(row["recipe"], row["fast"]) for row in data["points"][-1]["cases"]] == [
        (recipe, None if fast is None else list(fast)) for recipe in RECIPES for fast in CASES
    ]
    gemms = [(recipe, gemm) for recipe in RECIPES for gemm in ("fprop", "dgrad", "wgrad")]
    for point in data["points"]:
        assert [(row["recipe"], row["gemm"]) for row in point["gemms"]] == gemms
