"""Grouped products: Triton against plain torch, and against products of one expert each, bitwise.
``tests/modules/test_grouped_linear.py`` compares plain torch with products of one expert each."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8dist_kernels.reference import blocks
from fp8dist_kernels.reference import grouped_casts as plain_casts
from fp8dist_kernels.reference import grouped_matmuls as plain
from fp8dist_kernels.reference.groups import columns_bound, cut, rows_of
from fp8dist_kernels.reference.matmuls import FLOAT32_SCALINGS, Scaling
from fp8dist_kernels.triton import grouped_casts as fused_casts
from fp8dist_kernels.triton import grouped_matmuls as fused
from fp8dist_kernels.triton.matmuls import matmul_with
from fp8dist_kernels.triton.tables import Tile
from tests.support.devices import DEVICE
from tests.support.grouped import COUNTS, WRONG, ends
from tests.support.products import E4M3, PAIRS

VERSIONS = pytest.mark.parametrize("version", [plain, fused], ids=["plain", "fused"])
OF_EXPERTS = [scaling for scaling in Scaling if scaling is not Scaling.NVFP4]  # It has no experts.
SCALINGS = pytest.mark.parametrize("scaling", OF_EXPERTS, ids=lambda scaling: scaling.value)
TILES = (
    Tile(rows=64, columns=64, depth=128, warps=4, stages=3, group=2),
    Tile(rows=128, columns=128, depth=128, warps=8, stages=3, group=1),
)
WIDE = Tile(rows=128, columns=256, depth=128, warps=8, stages=3, group=2)
BEYOND = 9
"""Rows of NaN that belong to no expert."""


def cast_rows(x: Tensor, offsets: Tensor, scaling: Scaling, exact: bool, dtype: torch.dtype, casts: Any) -> Any:
    """Return (rows, inverse scales, transposed copy, its inverse scales)."""
    both = {"rows": True, "columns": True}
    if scaling is Scaling.MX:
        return casts.quantize_grouped_mx(x, offsets, dtype, round_up=False, **both)
    if scaling is not Scaling.TENSORWISE:
        options = {"in_blocks": scaling.in_blocks, "power_of_two": exact, **both}
        return casts.quantize_grouped_lines(x, offsets, dtype, **options)
    one = torch.ones(len(offsets), device=DEVICE)
    options = {"record": False, "just_in_time": True, "margin": 0, "power_of_two": exact, **both}
    rows, columns, inv_scale = casts.quantize_grouped(x, offsets, one, one > 0, -one, dtype, **options)
    return rows, inv_scale, columns, inv_scale


def cast_weights(weight: Tensor, scaling: Scaling, exact: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if scaling is Scaling.BLOCKWISE:
        options = {"block": (128, 128), "power_of_two": exact, "rows": True, "columns": False}
        return blocks.quantize_blocks(weight, dtype, **options)[:2]
    groups, n, _ = weight.shape
    fp8, scales, *_ = cast_rows(weight.flatten(0, 1), ends((n,) * groups), scaling, exact, dtype, plain_casts)
    return fp8.view(weight.shape), scales if scales.ndim == 1 else scales.reshape(groups, n, -1)


class Case:
    """Operands of fprop and of wgrad, as casts make them: of integers up to 2, with scales that are powers of two, so
    that sums are exact in any order; or of random numbers. ``offsets``: in place of those of ``counts``."""

    def __init__(
        self, counts: tuple[int, ...], scaling: Scaling, pair: tuple[torch.dtype, torch.dtype] = PAIRS[0],
        exact: bool = True, n: int = 144, k: int = 272, offsets: Tensor | None = None,
    ) -> None:  # fmt: skip
        multiple = 32 if scaling is Scaling.MX else 16
        k, used = -(-k // multiple) * multiple, sum(counts)
        generator = torch.Generator().manual_seed(len(counts) + n + k)
        self.scaling, self.counts, self.offsets = scaling, counts, ends(counts) if offsets is None else offsets

        def numbers(*shape: int) -> Tensor:
            made = torch.randint(-2, 3, shape, generator=generator).float() if exact else torch.randn(shape)
            return made.to(DEVICE)

        self.x, dy = numbers(used + BEYOND, k), numbers(used + BEYOND, n)
        self.a, of_a, *_ = cast_rows(self.x, self.offsets, scaling, exact, pair[0], plain_casts)
        self.b, of_b = cast_weights(numbers(len(counts), n, k), scaling, exact, pair[1])
        self.bias = numbers(len(counts), n).bfloat16()
        *_, self.left, of_left = cast_rows(dy, self.offsets, scaling, exact, pair[0], plain_casts)
        *_, self.right, of_right = cast_rows(self.x, self.offsets, scaling, exact, pair[1], plain_casts)
        self.scales = of_a, of_b
        self.line_scales = None if scaling is Scaling.BLOCKWISE else (of_left, of_right)
        if offsets is None:  # What belongs to nobody is never read.
            self.a[used:] = torch.nan
            if scaling is Scaling.MX:
                of_a.view(torch.uint8)[used:] = 255
            elif scaling is not Scaling.TENSORWISE:
                of_a[used:] = torch.nan
            taken = sum(-(-count // multiple) * multiple for count in counts)
            self.left[:, taken:] = self.right[:, taken:] = torch.nan

    def rows(self, version: Any, out: torch.dtype, fast: bool = True, bias: bool = True, **options: Any) -> Tensor:
        added = self.bias if bias else None
        return version.matmul_grouped(self.a, self.b, *self.scales, self.offsets, out, fast, added, **options)

    def columns(self, version: Any, out_dtype: torch.dtype, fast: bool = False, **options: Any) -> Tensor:
        assert self.line_scales is not None
        sides = self.left, self.right, *self.line_scales
        return version.matmul_grouped_columns(*sides, self.offsets, out_dtype, fast, **options)

    def assert_exact(self, out_dtype: torch.dtype, fast: bool = True, bias: bool = True, **options: Any) -> None:
        """Compare Triton's products with the twin's, of rows and of columns."""
        assert_equal(self.rows(fused, out_dtype, fast, bias, **options), self.rows(plain, out_dtype, bias=bias))
        if self.line_scales is not None:
            assert_equal(self.columns(fused, out_dtype, fast, **options), self.columns(plain, out_dtype))

    def of_expert(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the operands of one expert's forward product."""
        group = rows_of(self.offsets)[index][0]
        scale = self.scales[0][index] if self.scaling is Scaling.TENSORWISE else self.scales[0][group]
        return self.a[group], self.b[index], scale, self.scales[1][index]


def assert_equal(got: Tensor, expected: Tensor) -> None:
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    wrong = (got != expected).nonzero()
    assert not len(wrong), f"first at {wrong[0].tolist()}, {len(wrong)} in all"


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new outputs with NaN, so that unwritten memory shows."""
    empty = torch.empty

    def nan(*args: Any, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(torch.nan) if made.dtype.is_floating_point and made.dtype.itemsize > 1 else made

    monkeypatch.setattr(torch, "empty", nan)


@SCALINGS
def test_products_are_exact_where_sums_are(scaling: Scaling) -> None:
    """Of all counts, with the tile that is chosen and with others."""
    kinds = product((None, *TILES), (torch.bfloat16, torch.float32))
    for counts, pair, (tile, out_dtype), fast in zip(COUNTS, PAIRS * 2, kinds, (True, False) * 3):
        many = sum(counts) > 99
        case = Case(counts, scaling, pair, n=16 if many else 144, k=144 if many else 272)
        case.assert_exact(out_dtype, fast, bias=counts != (33,), tile=tile)
    if scaling in (Scaling.TENSORWISE, Scaling.ROWWISE):
        Case((5, 0, 130), scaling, n=272, k=144).assert_exact(torch.bfloat16, tile=WIDE)


@pytest.mark.parametrize("scaling", FLOAT32_SCALINGS, ids=lambda scaling: scaling.value)
def test_an_expert_has_the_bits_of_a_product_of_its_own(scaling: Scaling) -> None:
    """With our own kernels, any scales and any numbers: the same steps, and the same order of scales."""
    case, tile = Case((5, 0, 140, 1), scaling, exact=False, n=48, k=144), TILES[0]
    for out_dtype, fast in ((torch.bfloat16, True), (torch.float32, False)):
        got = case.rows(fused, out_dtype, fast, bias=True, tile=tile)
        for index, (group, _, _) in enumerate(rows_of(case.offsets)):
            if case.counts[index]:
                alone = matmul_with(tile, *case.of_expert(index), out_dtype, fast, case.bias[index])
                assert_equal(got[group], alone)
        if case.line_scales is not None:  # wgrad, of the expert with two steps.
            _, column, block = rows_of(case.offsets)[2]
            sides = (side[:, column.start : column.start + 144].contiguous() for side in (case.left, case.right))
            scales = (of[:, block] if scaling.in_blocks else of[2] for of in case.line_scales)
            got = case.columns(fused, out_dtype, fast, tile=tile)[2]
            assert_equal(got, matmul_with(tile, *sides, *scales, out_dtype, fast))


@VERSIONS
@pytest.mark.parametrize("scaling", [Scaling.TENSORWISE, Scaling.MX], ids=str)
def test_a_nan_stays_with_its_expert(version: Any, scaling: Scaling) -> None:
    """Tiles reach into the next group: its NaN, or its scales of NaN, must not get into the sums."""
    case = Case((5, 40, 3), scaling)
    case.a[5] = torch.nan
    assert case.rows(version, torch.float32).isnan().any(1).nonzero().flatten().tolist() == [5]
    assert case.line_scales is not None
    for side, scales, line in zip((case.left, case.right), case.line_scales, (7, 9)):
        if scaling is Scaling.MX:
            scales.view(torch.uint8)[line, 1] = 255  # The second expert's first block.
        else:
            side[line, 16] = torch.nan  # Its first token.
    expected = torch.zeros(3, case.left.shape[0], case.right.shape[0], dtype=torch.bool)
    expected[1, 7] = True
    expected[1, :, 9] = True
    assert torch.equal(case.columns(version, torch.float32).isnan().cpu(), expected)


@pytest.mark.long
@pytest.mark.nightly
def test_512_experts() -> None:
    """Of products, and of casts."""
    counts = tuple(2 if group == 256 else int(group == 511) for group in range(512))
    case = Case(counts, Scaling.TENSORWISE, n=16, k=16)
    for fast in (True, False):
        case.assert_exact(torch.bfloat16, fast)
    args = case.x, case.offsets, Scaling.TENSORWISE, True, E4M3
    for mine, theirs in zip(*(cast_rows(*args, casts) for casts in (fused_casts, plain_casts))):
        assert torch.equal(mine.float(), theirs.float())


@pytest.mark.parametrize("scaling", [Scaling.TENSORWISE, Scaling.ROWWISE, Scaling.BLOCKWISE_1D, Scaling.MX], ids=str)
def test_kernels_cut_offsets(scaling: Scaling) -> None:
    """Nothing is read or written beyond the rows, and no row twice."""
    for given in WRONG:
        offsets = torch.tensor(given, dtype=torch.int32, device=DEVICE)
        case = Case((16, 16, 18 - BEYOND), scaling, n=48, k=160, offsets=cut(offsets, 50))
        products = case.rows, case.columns
        expected = [product_of(plain, torch.float32) for product_of in products]
        case.offsets = offsets
        for product_of, wanted in zip(products, expected):
            assert_equal(product_of(fused, torch.float32), wanted)


@VERSIONS
def test_products_of_nothing_and_what_is_refused(version: Any) -> None:
    one = torch.ones(2, device=DEVICE)
    a, b = torch.empty(0, 32, device=DEVICE).to(E4M3), torch.ones(2, 16, 32, device=DEVICE).to(E4M3)
    wide = torch.empty(16, columns_bound(0, 2), device=DEVICE).to(E4M3)
    assert version.matmul_grouped(a, b, one, one, ends((0, 0)), torch.bfloat16, True).shape == (0, 16)
    assert not version.matmul_grouped_columns(wide, wide, one, one, ends((0, 0)), torch.bfloat16, True).any()
    with pytest.raises(ValueError, match="int32"):
        version.matmul_grouped_columns(wide, wide, one, one, ends((0, 0)).long(), torch.bfloat16, True)
    case = Case((16, 16), Scaling.TENSORWISE, n=16, k=16)
    one = case.scales[0]
    for b, scale, offsets, problem in (
        (case.b[:1], one, case.offsets, "expected a"),
        (case.b.mT[:, :8].contiguous().mT, one, case.offsets, "expected a|contiguous"),
        (case.b[:, :8].contiguous(), one, case.offsets, "n and k in multiples of 16"),
        (case.b, one[:1], case.offsets, "inverse scales of shapes"),
        (case.b, one, case.offsets.long(), "int32"),
    ):
        with pytest.raises(ValueError, match=problem):
            version.matmul_grouped(case.a, b, scale, scale, offsets, torch.bfloat16, True)
