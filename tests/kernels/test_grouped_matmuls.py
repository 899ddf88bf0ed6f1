"""Grouped products: against products of one expert each, bitwise, and against float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8dist_kernels.reference import grouped_casts as plain_casts
from fp8dist_kernels.reference import grouped_matmuls as plain
from fp8dist_kernels.reference.groups import blocks_bound, columns_bound, cut, rows_of
from fp8dist_kernels.reference.matmuls import FLOAT32_SCALINGS, Scaling
from fp8dist_kernels.triton import grouped_matmuls as fused
from fp8dist_kernels.triton.matmuls import matmul_with
from fp8dist_kernels.triton.tables import Tile
from tests.support.devices import DEVICE
from tests.support.grouped import COUNTS, WRONG, ends
from tests.support.products import E4M3, PAIRS
from tests.support.suite import few

VERSIONS = pytest.mark.parametrize("version", [plain, fused], ids=["plain", "fused"])
OF_EXPERTS = [scaling for scaling in Scaling if scaling is not Scaling.NVFP4]  # It has no experts.
SCALINGS = pytest.mark.parametrize("scaling", OF_EXPERTS, ids=lambda scaling: scaling.value)
WIDE = Tile(rows=128, columns=256, depth=128, warps=8, stages=3, group=2)
TILES = (
    Tile(rows=64, columns=64, depth=128, warps=4, stages=3, group=2),
    Tile(rows=128, columns=128, depth=128, warps=8, stages=3, group=1),
)
ACCUMULATOR = 2.0**-10 if DEVICE == "cuda" else 2.0**-16
"""Error of a sum relative to the largest one: see ``test_fused_matmuls``."""

BEYOND = 9
"""Rows of NaN that belong to no expert."""


class Case:
    """Operands of fprop and of wgrad. Integers up to 2 with power-of-two scales, or random numbers."""

    def __init__(
        self,
        counts: tuple[int, ...],
        scaling: Scaling,
        pair: tuple[torch.dtype, torch.dtype] = PAIRS[0],
        exact: bool = True,
        n: int = 144,
        k: int = 272,
    ) -> None:
        multiple = 32 if scaling is Scaling.MX else 16
        k = -(-k // multiple) * multiple
        self.generator = torch.Generator().manual_seed(len(counts) + n + k)
        self.exact, self.scaling, self.counts, groups = exact, scaling, counts, len(counts)
        self.offsets, tokens, blocks = ends(counts), sum(counts) + BEYOND, -(-k // 128)
        self.a, self.b = self.numbers((tokens, k), pair[0]), self.numbers((groups, n, k), pair[1])
        self.a[sum(counts) :] = torch.nan
        shapes = {
            Scaling.TENSORWISE: ((groups,), (groups,)),
            Scaling.ROWWISE: ((tokens, 1), (groups, n, 1)),
            Scaling.BLOCKWISE: ((tokens, blocks), (groups, -(-n // 128), blocks)),
            Scaling.BLOCKWISE_1D: ((tokens, blocks), (groups, n, blocks)),
            Scaling.MX: ((tokens, k // 32), (groups, n, k // 32)),
        }[scaling]
        self.scales = self.inverses(shapes[0]), self.inverses(shapes[1])
        if scaling is Scaling.MX:
            self.scales[0].view(torch.uint8)[sum(counts) :] = 255
        elif scaling is not Scaling.TENSORWISE:
            self.scales[0][sum(counts) :] = torch.nan
        self.bias = self.numbers((groups, n), torch.bfloat16)
        width = columns_bound(tokens, groups, multiple)
        self.left, self.right = self.numbers((n, width), pair[0]), self.numbers((k, width), pair[1])
        columns = [column for _, column, _ in rows_of(self.offsets, None, multiple)]
        for side in (self.left, self.right):
            for column in columns:  # Padding is zeros; columns of nobody are never read.
                side[:, column.stop : -(-column.stop // multiple) * multiple] = 0
            side[:, -(-columns[-1].stop // multiple) * multiple :] = torch.nan
        lines = {
            Scaling.TENSORWISE: ((groups,), (groups,)),
            Scaling.ROWWISE: ((groups, n, 1), (groups, k, 1)),
            Scaling.BLOCKWISE_1D: tuple((size, blocks_bound(tokens, groups)) for size in (n, k)),
            Scaling.MX: ((n, width // 32), (k, width // 32)),
        }.get(scaling)
        self.line_scales = None if lines is None else (self.inverses(lines[0]), self.inverses(lines[1]))

    def numbers(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.exact:
            return torch.randint(-2, 3, shape, generator=self.generator).float().to(dtype).to(DEVICE)
        return torch.randn(shape, generator=self.generator).to(dtype).to(DEVICE)

    def inverses(self, shape: tuple[int, ...]) -> Tensor:
        if self.exact or self.scaling is Scaling.MX:
            powers = (2.0 ** torch.randint(-2, 2, shape, generator=self.generator)).to(DEVICE)
            return powers.to(torch.float8_e8m0fnu) if self.scaling is Scaling.MX else powers
        return (torch.rand(shape, generator=self.generator) + 0.01).to(DEVICE)

    def rows(
        self, version: Any, out_dtype: torch.dtype, fast: bool = True, bias: bool = True, **options: Any
    ) -> Tensor:
        added = self.bias if bias else None
        return version.matmul_grouped(self.a, self.b, *self.scales, self.offsets, out_dtype, fast, added, **options)

    def columns(self, version: Any, out_dtype: torch.dtype, fast: bool = False, **options: Any) -> Tensor:
        assert self.line_scales is not None
        return version.matmul_grouped_columns(
            self.left, self.right, *self.line_scales, self.offsets, out_dtype, fast, **options
        )

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
def test_rows_are_exact_where_sums_are(scaling: Scaling) -> None:
    case = Case((5, 0, 130, 1), scaling)
    for out_dtype, biased in ((torch.bfloat16, True), (torch.float32, False)):
        assert_equal(case.rows(fused, out_dtype, bias=biased), case.rows(plain, out_dtype, bias=biased))


@pytest.mark.parametrize("scaling", [Scaling.TENSORWISE, Scaling.ROWWISE, Scaling.BLOCKWISE_1D, Scaling.MX], ids=str)
def test_columns_are_exact_where_sums_are(scaling: Scaling) -> None:
    case = Case((5, 0, 130, 1), scaling)
    assert_equal(case.columns(fused, torch.float32), case.columns(plain, torch.float32))


@VERSIONS
def test_against_float64(version: Any) -> None:
    """An oracle without groups: one product of float64 numbers per row, and per expert."""
    case = Case((3, 0, 18), Scaling.ROWWISE)
    expert_of = [0] * 3 + [2] * 18
    a, b = case.a.double() * case.scales[0].double(), case.b.double() * case.scales[1].double()
    expected = torch.stack([b[e] @ a[i] + case.bias[e].double() for i, e in enumerate(expert_of)])
    got = case.rows(version, torch.float32)
    assert_equal(got[:21], expected.float())
    assert not got[21:].any()
    left, right = case.left.double(), case.right.double()
    sums = torch.stack([left[:, :3] @ right[:, :3].T, torch.zeros(144, 272), left[:, 16:34] @ right[:, 16:34].T])
    assert case.line_scales is not None
    of_left, of_right = case.line_scales
    assert_equal(case.columns(version, torch.float32), (sums * of_left.double() * of_right.double().mT).float())


@pytest.mark.slow
@SCALINGS
def test_all_counts_tiles_and_formats(scaling: Scaling) -> None:
    kinds = product(TILES, (torch.bfloat16, torch.float32))
    for counts, pair, (tile, out_dtype), fast in zip(COUNTS, PAIRS * 2, [*kinds] * 2, (True, False) * 3):
        case = Case(counts, scaling, pair, n=80, k=144)
        assert_equal(case.rows(fused, out_dtype, fast, tile=tile), case.rows(plain, out_dtype))
        if case.line_scales is not None:
            assert_equal(case.columns(fused, out_dtype, fast, tile=tile), case.columns(plain, out_dtype))


@pytest.mark.parametrize("scaling", [Scaling.TENSORWISE, Scaling.ROWWISE], ids=str)
def test_wide_tiles_are_exact_where_sums_are(scaling: Scaling) -> None:
    case = Case((5, 0, 130), scaling, n=272, k=272)
    assert_equal(case.rows(fused, torch.bfloat16, tile=WIDE), case.rows(plain, torch.bfloat16))
    assert_equal(case.columns(fused, torch.bfloat16, True, tile=WIDE), case.columns(plain, torch.bfloat16))


@pytest.mark.parametrize("scaling", FLOAT32_SCALINGS, ids=lambda scaling: scaling.value)
def test_an_expert_has_the_bits_of_a_product_of_its_own(scaling: Scaling) -> None:
    """With our own kernels, any scales and any numbers: the same steps, and the same order of scales."""
    case, tile = Case((5, 0, 70, 1), scaling, exact=False, n=48, k=144), TILES[0]
    for out_dtype, fast in ((torch.bfloat16, True), (torch.float32, False)):
        got = case.rows(fused, out_dtype, fast, bias=True, tile=tile)
        for index, (group, _, _) in enumerate(rows_of(case.offsets)):
            if case.counts[index]:
                alone = matmul_with(tile, *case.of_expert(index), out_dtype, fast, case.bias[index])
                assert_equal(got[group], alone)


@SCALINGS
def test_random_numbers_are_within_one_ulp_of_the_twin(scaling: Scaling) -> None:
    """In bfloat16. The twin scales the operands, the kernels the product, and (acc * a) * b is not acc * (a * b)."""
    case = Case((5, 0, 70, 1), scaling, PAIRS[1], exact=False, n=48, k=144)
    pairs = [(case.rows(fused, torch.bfloat16), case.rows(plain, torch.bfloat16))]
    if case.line_scales is not None:
        pairs.append((case.columns(fused, torch.bfloat16), case.columns(plain, torch.bfloat16)))
    for got, expected in pairs:
        # Codes of bfloat16 are in order for each sign. Sums that cancel keep the float32 error of their summands.
        apart = (got.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
        close = (got.float() - expected.float()).abs() <= ACCUMULATOR * expected.abs().max().float()
        assert ((apart <= 1) | close).all()


@VERSIONS
def test_an_mx_scale_of_nan_stays_with_its_expert(version: Any) -> None:
    """A step of a product of columns reaches into blocks of the next experts."""
    case = Case((5, 40, 3), Scaling.MX)
    assert case.line_scales is not None
    for scales, line in zip(case.line_scales, (7, 9)):
        scales.view(torch.uint8)[line, 1] = 255  # The second expert's first block.
    expected = torch.zeros(3, 144, 288, dtype=torch.bool)
    expected[1, 7] = True
    expected[1, :, 9] = True
    assert torch.equal(case.columns(version, torch.float32).isnan().cpu(), expected)


@VERSIONS
def test_a_nan_stays_with_its_expert(version: Any) -> None:
    """Tiles reach into the next group: its NaN must not get into the sums."""
    case = Case((5, 40, 3), Scaling.TENSORWISE)
    case.a[5] = torch.nan
    assert case.rows(version, torch.float32).isnan().any(1).nonzero().flatten().tolist() == [5]
    case.left[7, 16] = case.right[9, 16] = torch.nan  # The second expert's first token.
    expected = torch.zeros(3, 144, 272, dtype=torch.bool)
    expected[1, 7] = True
    expected[1, :, 9] = True
    assert torch.equal(case.columns(version, torch.float32).isnan().cpu(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("groups", few([1, 512], 1))
def test_many_experts(groups: int) -> None:
    counts = [0] * groups
    counts[groups // 2], counts[-1] = 2, 1
    case = Case(tuple(counts), Scaling.TENSORWISE, n=16, k=16)
    for fast in (True, False):
        assert_equal(case.rows(fused, torch.bfloat16, fast), case.rows(plain, torch.bfloat16))
        assert_equal(case.columns(fused, torch.bfloat16, fast), case.columns(plain, torch.bfloat16))


@pytest.mark.parametrize("given", WRONG, ids=str)
def test_kernels_cut_offsets(given: tuple[int, ...]) -> None:
    """Nothing is read or written beyond the rows, and no row twice."""
    offsets = torch.tensor(given, dtype=torch.int32, device=DEVICE)
    fitting = cut(offsets, 50)
    for scaling in (Scaling.TENSORWISE, Scaling.ROWWISE, Scaling.BLOCKWISE_1D, Scaling.MX):
        case = Case((16, 16, 18 - BEYOND), scaling, n=48, k=160)
        case.a = case.numbers((50, 160), E4M3)
        if scaling is not Scaling.TENSORWISE:
            case.scales = case.inverses(tuple(case.scales[0].shape)), case.scales[1]
        case.offsets = fitting
        expected = case.rows(plain, torch.float32)
        case.offsets = offsets
        assert_equal(case.rows(fused, torch.float32), expected)
        sides = [_columns_of(case.numbers((50, size), torch.float32), fitting, scaling) for size in (48, 160)]
        (left, of_left), (right, of_right) = sides
        both = [
            version.matmul_grouped_columns(left, right, of_left, of_right, ends_, torch.float32, False)
            for version, ends_ in ((fused, offsets), (plain, fitting))
        ]
        assert_equal(*both)


def _columns_of(x: Tensor, offsets: Tensor, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """Return the transposed copy of a cast, and its inverse scales."""
    if scaling is Scaling.TENSORWISE:
        one = torch.ones(len(offsets), device=DEVICE)
        _, columns, inv_scale = plain_casts.quantize_grouped(
            x, offsets, one, one < 0, -one, E4M3, record=False, just_in_time=False, margin=0, power_of_two=True,
            rows=True, columns=True,
        )  # fmt: skip
        return columns, inv_scale
    if scaling is Scaling.MX:
        return plain_casts.quantize_grouped_mx(x, offsets, E4M3, round_up=False, rows=True, columns=True)[2:]
    options: Any = {"in_blocks": scaling.in_blocks, "power_of_two": True, "rows": True, "columns": True}
    return plain_casts.quantize_grouped_lines(x, offsets, E4M3, **options)[2:]


def test_products_of_nothing() -> None:
    offsets = ends((0, 0))
    one = torch.ones(2, device=DEVICE)
    a, b = torch.empty(0, 32, device=DEVICE).to(E4M3), torch.ones(2, 16, 32, device=DEVICE).to(E4M3)
    wide = torch.empty(16, columns_bound(0, 2), device=DEVICE).to(E4M3)
    for version in (plain, fused):
        assert version.matmul_grouped(a, b, one, one, offsets, torch.bfloat16, True).shape == (0, 16)
        assert not version.matmul_grouped_columns(wide, wide, one, one, offsets, torch.bfloat16, True).any()


def test_what_does_not_fit_is_refused() -> None:
    case = Case((16, 16), Scaling.TENSORWISE, n=16, k=16)
    one = case.scales[0]
    for version in (plain, fused):
        for a, b, scale, offsets, problem in (
            (case.a, case.b[:1], one, case.offsets, "expected a"),
            (case.a, case.b.mT[:, :8].contiguous().mT, one, case.offsets, "expected a|contiguous"),
            (case.a, case.b, one[:1], case.offsets, "inverse scales of shapes"),
            (case.a, case.b, one, case.offsets.long(), "int32"),
        ):
            with pytest.raises(ValueError, match=problem):
                version.matmul_grouped(a, b, scale, scale, offsets, torch.bfloat16, True)
