"""Casts of rows sorted by expert: the layout, and Triton against plain torch. ``tests/modules/test_grouped_linear.py``
compares plain torch with casts of one expert each."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8dist_kernels.reference import grouped_casts as plain
from fp8dist_kernels.reference.groups import cut
from fp8dist_kernels.triton import grouped_casts as fused
from tests.support.casting import FORMATS, assert_same, hard_values, poison
from tests.support.devices import DEVICE
from tests.support.grouped import COUNTS, WRONG, ends, poisoned_rows, slots_of
from tests.support.suite import few

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # From the interpreter's numpy.

VERSIONS = pytest.mark.parametrize("version", [plain, fused], ids=["plain", "fused"])
E4M3 = FORMATS[0]
BOTH: dict[str, Any] = {"rows": True, "columns": True}
OPTIONS: dict[str, Any] = {"record": True, "just_in_time": True, "margin": 0, "power_of_two": False, **BOTH}


def slots(version: Any, x: Tensor, offsets: Tensor | None, apart: int = 1, **changes: Any) -> tuple[Tensor, ...]:
    """Return the results of a cast with a slot per expert, and ``pending``."""
    of = slots_of(len(x) if offsets is None else len(offsets), apart=apart)
    return (*version.quantize_grouped(x, offsets, *of, E4M3, **{**OPTIONS, **changes}), of[2])


def lines(in_blocks: bool) -> Any:
    def run(version: Any, x: Tensor, offsets: Tensor, **changes: Any) -> tuple[Tensor, ...]:
        options = {"in_blocks": in_blocks, "power_of_two": False, **BOTH, **changes}
        return version.quantize_grouped_lines(x, offsets, E4M3, **options)

    return run


def to_mx(version: Any, x: Tensor, offsets: Tensor, **changes: Any) -> tuple[Tensor, ...]:
    """Return the results of an MX cast, with the scales as bytes."""
    made = version.quantize_grouped_mx(x, offsets, E4M3, **{"round_up": False, **BOTH, **changes})
    return tuple(one.view(torch.uint8) if one.dtype == torch.float8_e8m0fnu else one for one in made)


CASTS: dict[str, Any] = {"slots": slots, "row-wise": lines(False), "1x128": lines(True), "MX": to_mx}
KINDS = pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)


def test_layout() -> None:
    """Each expert starts at a multiple of 16 in the transposed copy. What belongs to nobody is 0."""
    x = torch.arange(1.0, 23.0)[:, None].expand(22, 16).to(DEVICE).clone()
    x[20:] = torch.nan
    of = [one.to(DEVICE) for one in (torch.ones(4), torch.zeros(4, dtype=torch.bool), torch.full((4,), -1.0))]
    rows, columns, inv_scale = plain.quantize_grouped(x, ends((2, 0, 17, 1)), *of, E4M3, **OPTIONS)
    assert rows.float()[:, 3].tolist() == [*x[:20, 0].to(E4M3).float().tolist(), 0, 0]
    expected = torch.zeros(80)
    expected[:2], expected[16:33], expected[48] = torch.arange(1, 3), torch.arange(3, 20), 20
    assert columns.float()[5].tolist() == expected.to(E4M3).float().tolist()
    assert columns.shape == (16, 80)
    assert inv_scale.tolist() == [1.0] * 4
    assert of[2].tolist() == [2.0, -1.0, 19.0, 20.0]


@pytest.mark.slow
@KINDS
def test_all_counts_are_the_twins(cast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    for index, counts in enumerate(COUNTS):
        features = 16 if sum(counts) > 99 else 144  # test_twins.py has many rows of many features.
        x, offsets = poisoned_rows(counts, features, (0, 21)[index % 3 > 0]).bfloat16(), ends(counts)
        options = {"rows": index != 3, "columns": index != 4, **({"apart": 3} if cast is slots else {})}
        assert_same(cast(fused, x, offsets, **options), cast(plain, x, offsets, **options))


@pytest.mark.slow
@pytest.mark.parametrize("outgrown", few([None, 0.9], 0.9))
def test_all_options(outgrown: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    x, offsets = poisoned_rows((3, 0, 18, 2), 16, 9, finite=True).bfloat16(), ends((3, 0, 18, 2))
    for record, just_in_time, rows in itertools.product((False, True), repeat=3):
        columns = record ^ just_in_time ^ rows  # All triples of options.
        options = {"record": record, "just_in_time": just_in_time, "rows": rows, "columns": columns}
        assert_same(*(slots(version, x, offsets, outgrown=outgrown, **options) for version in (fused, plain)))


@VERSIONS
def test_a_limit_is_not_outgrown(version: Any) -> None:
    """Of three experts, the second one's amax times scale is the limit itself; the third one's is above it."""
    scale, cold, pending = (one.to(DEVICE) for one in (torch.tensor([279.0, 280.0, 281.0]), *slots_of(3)[1:]))
    x, options = torch.full((3, 16), 2.0, device=DEVICE), {**OPTIONS, "outgrown": 1.25, "just_in_time": False}
    inv_scale = version.quantize_grouped(x, ends((1, 1, 1)), scale, cold, pending, E4M3, **options)[2]
    assert torch.equal(inv_scale, torch.reciprocal(scale.new_tensor([279.0, 280.0, 224.0])))


@KINDS
def test_kernels_cut_offsets(cast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read or written beyond the rows, and no row twice."""
    poison(monkeypatch)
    x, options = hard_values(50, 16).bfloat16(), {"outgrown": 0.9} if cast is slots else {}
    for given, expected in zip(WRONG, ([40, 40, 50], [0, 20, 50], [0, 49, 49], [50, 50, 50])):
        offsets = torch.tensor(given, dtype=torch.int32, device=DEVICE)
        fitting = cut(offsets, 50)
        assert (fitting.tolist(), fitting.dtype) == (expected, torch.int32)
        assert torch.equal(cut(fitting, 50), fitting)
        assert_same(cast(fused, x, offsets, **options), cast(plain, x, fitting, **options))


@VERSIONS
def test_slots_that_do_not_fit_are_refused(version: Any) -> None:
    x, of = torch.ones(4, 16, device=DEVICE), slots_of(2)
    for offsets, given, problem in (
        (ends((2, 2)).long(), of, "int32"),
        (ends((2, 2)).repeat_interleave(2)[::2], of, "contiguous"),
        (ends((2, 1, 1)), of, r"slots \[3\]"),
        (ends((2, 2)), (of[0].repeat_interleave(2)[::2], *of[1:]), "one stride"),
        (None, of, "weight"),
    ):
        with pytest.raises(ValueError, match=problem):
            version.quantize_grouped(x, offsets, *given, E4M3, **OPTIONS)


@pytest.mark.parametrize("given", [(4, 2, 4), (2, 2, 5), (-1, 2, 4)])
def test_offsets_that_decrease_or_exceed_the_rows_are_refused_by_the_twin(given: tuple[int, ...]) -> None:
    """Which reads them anyway."""
    offsets = torch.tensor(given, dtype=torch.int32)
    with pytest.raises(ValueError, match="must not decrease, nor exceed"):
        plain.quantize_grouped(torch.ones(4, 16), offsets, *slots_of(3, "cpu"), E4M3, **OPTIONS)
