"""Casts of rows sorted by expert: the layout, each expert against a cast of its own, and Triton against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fp8dist_kernels.reference import blocks, casts
from fp8dist_kernels.reference import grouped_casts as plain
from fp8dist_kernels.reference.groups import cut
from fp8dist_kernels.triton import grouped_casts as fused
from tests.support import fp8_oracle
from tests.support.casting import FORMATS, LAYOUTS, assert_same, hard_values, poison
from tests.support.devices import DEVICE
from tests.support.gemms import assert_operand, numbers
from tests.support.grouped import COUNTS, WRONG, ends, poisoned_rows, slots_of
from tests.support.suite import few

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # From the interpreter's numpy.

VERSIONS = pytest.mark.parametrize("version", [plain, fused], ids=["plain", "fused"])
OPTIONS: dict[str, Any] = {
    "record": True, "just_in_time": True, "margin": 0, "power_of_two": False, "rows": True, "columns": True,
}  # fmt: skip


def run(version: Any, x: Tensor, offsets: Tensor | None, dtype: torch.dtype, apart: int = 1, **changes: Any) -> Any:
    """Return the results of one call, and ``pending``."""
    slots = slots_of(len(x) if offsets is None else len(offsets), apart)
    return (*version.quantize_grouped(x, offsets, *slots, dtype, **{**OPTIONS, **changes}), slots[2])


def compare(x: Tensor, offsets: Tensor | None, dtype: torch.dtype, **options: Any) -> None:
    assert_same(run(fused, x, offsets, dtype, **options), run(plain, x, offsets, dtype, **options))


def test_layout() -> None:
    """Each expert starts at a multiple of 16 in the transposed copy. What belongs to nobody is 0."""
    x = torch.arange(1.0, 23.0)[:, None].expand(22, 16).to(DEVICE).clone()
    x[20:] = torch.nan
    slots = torch.ones(4, device=DEVICE), torch.zeros(4, dtype=torch.bool, device=DEVICE), torch.full((4,), -1.0)
    slots = (*slots[:2], slots[2].to(DEVICE))
    rows, columns, inv_scale = plain.quantize_grouped(x, ends((2, 0, 17, 1)), *slots, FORMATS[0], **OPTIONS)
    assert rows.float()[:, 3].tolist() == [*x[:20, 0].to(FORMATS[0]).float().tolist(), 0, 0]
    expected = torch.zeros(80)
    expected[:2], expected[16:33], expected[48] = torch.arange(1, 3), torch.arange(3, 20), 20
    assert columns.float()[5].tolist() == expected.to(FORMATS[0]).float().tolist()
    assert columns.shape == (16, 80)
    assert inv_scale.tolist() == [1.0] * 4
    assert slots[2].tolist() == [2.0, -1.0, 19.0, 20.0]


@VERSIONS
def test_each_expert_is_cast_as_alone(version: Any) -> None:
    x, offsets = poisoned_rows(COUNTS[0], 48, 7).bfloat16(), ends(COUNTS[0])
    rows, columns, inv_scale, pending = run(version, x, offsets, FORMATS[0])
    start = column = 0
    for index, count in enumerate(COUNTS[0]):
        slot = tuple(values[index] for values in slots_of(len(COUNTS[0])))
        part = x[start : start + count]
        alone = (*casts.quantize(part, *slot, FORMATS[0], **OPTIONS), slot[2])
        wide = alone[1].shape[1]
        found = rows[start : start + count], columns[:, column : column + wide].contiguous(), inv_scale[index]
        assert_same((*found, pending[index]), alone)
        start, column = start + count, column + wide
    assert not rows[start:].float().any()
    assert not columns[:, column:].float().any()


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_a_cast_is_the_twins(counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    for beyond in (0, 21):
        compare(poisoned_rows(counts, 80, beyond).bfloat16(), ends(counts), FORMATS[0], apart=3)


@pytest.mark.slow
@pytest.mark.parametrize("outgrown", few([None, 0.9], 0.9))
def test_all_options(outgrown: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    x, offsets = poisoned_rows((3, 0, 40, 2), 48, 9, finite=True).bfloat16(), ends((3, 0, 40, 2))
    for index in range(16):
        record, just_in_time, rows, columns = (bool(index >> bit & 1) for bit in range(4))
        compare(
            x, offsets, FORMATS[1], record=record, just_in_time=just_in_time, rows=rows, columns=columns,
            outgrown=outgrown,
        )  # fmt: skip


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "every second"])
def test_weights(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of one size, a slot each. gpt-oss keeps them transposed."""
    poison(monkeypatch)
    x = torch.stack([LAYOUTS["contiguous"](hard_values(40, 48, index)) for index in range(5)]).bfloat16()
    x = {"contiguous": x, "transposed": x.mT.contiguous().mT, "every second": x.repeat_interleave(2, 0)[::2]}[layout]
    compare(x, None, FORMATS[0], outgrown=1.25)
    compare(x, None, FORMATS[0], columns=False)
    compare(x, None, FORMATS[0], rows=False)


@pytest.mark.parametrize("groups", [1, pytest.param(512, marks=pytest.mark.long)])
def test_many_experts(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    counts = [0] * groups
    counts[groups // 2], counts[-1] = 2, 1
    compare(poisoned_rows(counts, 16, 3).bfloat16(), ends(counts), FORMATS[0])


def test_no_rows() -> None:
    compare(torch.empty(0, 32, device=DEVICE), ends((0, 0)), FORMATS[0])


IN_BLOCKS = pytest.mark.parametrize("in_blocks", [False, True], ids=["rows", "blocks"])


def compare_lines(x: Tensor, offsets: Tensor, dtype: torch.dtype, **changes: Any) -> None:
    options = {"power_of_two": False, "rows": True, "columns": True, **changes}
    assert_same(
        fused.quantize_grouped_lines(x, offsets, dtype, **options),
        plain.quantize_grouped_lines(x, offsets, dtype, **options),
    )


@IN_BLOCKS
def test_lines_of_each_expert_are_cast_as_alone(in_blocks: bool) -> None:
    """In the transposed copy, scales are of one expert's rows: of all of them, or of a block of 128 of them."""
    counts, both = (3, 0, 130), {"power_of_two": False, "rows": True, "columns": True}
    x = poisoned_rows(counts, 48, 4).bfloat16()
    rows, of_rows, columns, of_columns = plain.quantize_grouped_lines(
        x, ends(counts), FORMATS[0], in_blocks=in_blocks, **both
    )
    for part, column, scales in ((slice(0, 3), 0, slice(0, 1)), (slice(3, 133), 16, slice(1, 3))):
        if in_blocks:
            alone = blocks.quantize_blocks(x[part], FORMATS[0], block=(1, 128), **both)
            found = of_columns[:, scales]
        else:
            alone = blocks.quantize_rowwise(x[part], FORMATS[0], **both)
            found = of_columns[0 if column == 0 else 2]
        wide = columns[:, column : column + alone[2].shape[1]]
        for got, expected in zip((rows[part], of_rows[part], wide, found), alone):
            assert_same((got.contiguous(),), (expected.contiguous(),))
    assert (of_rows[133:] == 1).all()
    assert (of_columns[:, 3:] == 1).all() if in_blocks else (of_columns[1] == 1).all()


@pytest.mark.slow
@IN_BLOCKS
@pytest.mark.parametrize("counts", [COUNTS[0], pytest.param(COUNTS[1]), pytest.param(COUNTS[5])], ids=str)
def test_lines_are_the_twins(in_blocks: bool, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    compare_lines(poisoned_rows(counts, 144, 5).bfloat16(), ends(counts), FORMATS[0], in_blocks=in_blocks)


def mx(version: Any, x: Tensor, offsets: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Return the results of an MX cast, with the scales as bytes."""
    made = version.quantize_grouped_mx(x, offsets, FORMATS[0], **options)
    return tuple(one.view(torch.uint8) if one.dtype == torch.float8_e8m0fnu else one for one in made)


@VERSIONS
@pytest.mark.parametrize("up", [False, True], ids=["ocp", "up"])
def test_mx_of_each_expert_is_what_the_specification_says(version: Any, up: bool) -> None:
    """Rows along features, columns along the rows of one expert, by an oracle in plain Python."""
    counts = (3, 0, 40, 32, 1)
    x = poisoned_rows(counts, 48, 4).bfloat16()
    by: Any = "mx up" if up else "mx down"
    rows, row_scales, columns, column_scales = version.quantize_grouped_mx(
        x, ends(counts), FORMATS[0], round_up=up, rows=True, columns=True
    )
    assert (rows.shape, columns.shape, column_scales.shape) == ((80, 64), (48, 224), (48, 7))
    start = column = 0
    for count in counts:
        if count:
            part, wide = numbers(x[start : start + count]), -(-count // 32) * 32
            mine = slice(start, start + count)
            assert_operand(
                rows[mine], row_scales[mine], fp8_oracle.cast(part, fp8_oracle.E4M3, (1, 32), False, by=by), "rows"
            )
            turned = fp8_oracle.cast(part.T, fp8_oracle.E4M3, (1, 32), False, by=by)
            scales = column_scales[:, column // 32 : (column + wide) // 32]
            assert_operand(columns[:, column : column + wide].contiguous(), scales.contiguous(), turned, "columns")
            start, column = start + count, column + wide
    assert not rows[start:].float().any()
    assert not columns[:, column:].float().any()


@pytest.mark.parametrize("counts", [COUNTS[0], COUNTS[1], COUNTS[5]], ids=str)
def test_mx_is_the_twins(counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    x = poisoned_rows(counts, 144, 5).bfloat16()
    for rows, columns in ((True, True), (True, False), (False, True)):
        options = {"round_up": False, "rows": rows, "columns": columns}
        assert_same(*(mx(each, x, ends(counts), **options) for each in (fused, plain)))


@pytest.mark.parametrize("given", WRONG, ids=str)
@pytest.mark.parametrize("in_blocks", [None, True, False], ids=["slots", "blocks", "rows"])
def test_kernels_cut_offsets(given: tuple[int, ...], in_blocks: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read or written beyond the rows, and no row twice."""
    poison(monkeypatch)
    x, offsets = hard_values(50, 16).bfloat16(), torch.tensor(given, dtype=torch.int32, device=DEVICE)
    fitting = cut(offsets, 50)
    if in_blocks is None:
        assert_same(run(fused, x, offsets, FORMATS[0], outgrown=0.9), run(plain, x, fitting, FORMATS[0], outgrown=0.9))
        return
    lines: dict[str, Any] = {"in_blocks": in_blocks, "power_of_two": False, "rows": True, "columns": True}
    found = fused.quantize_grouped_lines(x, offsets, FORMATS[0], **lines)
    assert_same(found, plain.quantize_grouped_lines(x, fitting, FORMATS[0], **lines))
    options: dict[str, Any] = {"round_up": in_blocks, "rows": True, "columns": True}
    assert_same(mx(fused, x, offsets, **options), mx(plain, x, fitting, **options))


def test_cut() -> None:
    for given, expected in zip(WRONG, ([40, 40, 50], [0, 20, 50], [0, 49, 49], [50, 50, 50])):
        assert cut(torch.tensor(given, dtype=torch.int32), 50).tolist() == expected
    fitting = ends((3, 0, 4))
    assert torch.equal(cut(fitting, 7), fitting)
    assert cut(fitting, 7).dtype == torch.int32


def test_slots_that_do_not_fit_are_refused() -> None:
    x, slots = torch.ones(4, 16, device=DEVICE), slots_of(2)
    for offsets, given, problem in (
        (ends((2, 2)).long(), slots, "int32"),
        (ends((2, 1, 1)), slots, r"slots \[3\]"),
        (ends((2, 2)), (slots[0].repeat_interleave(2)[::2], *slots[1:]), "one stride"),
        (None, slots, "weight"),
    ):
        for version in (plain, fused):
            with pytest.raises(ValueError, match=problem):
                version.quantize_grouped(x, offsets, *given, FORMATS[0], **OPTIONS)


@pytest.mark.parametrize("given", [(4, 2, 4), (2, 2, 5), (-1, 2, 4)])
def test_offsets_that_decrease_or_exceed_the_rows_are_refused_by_the_twin(given: tuple[int, ...]) -> None:
    """Which reads them anyway."""
    with pytest.raises(ValueError, match="must not decrease, nor exceed"):
        plain.quantize_grouped(
            torch.ones(4, 16),
            torch.tensor(given, dtype=torch.int32),
            *(x.cpu() for x in slots_of(3)),
            FORMATS[0],
            **OPTIONS,
        )
