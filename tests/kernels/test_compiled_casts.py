"""Machine code of casts and amaxes for Hopper and Blackwell: required and forbidden instructions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.support.ahead_of_time import SHARED_MEMORY_LIMIT, Compiled, compiled, table

pytestmark = [pytest.mark.long, pytest.mark.compiled]

REGISTERS = 64
"""Limit for 1024 threads on a multiprocessor. Fewer threads have too few loads in flight to saturate memory."""


def check_all(kernels: list[Compiled], names: dict[str, int], record_property: Callable[[str, object], None]) -> None:
    """Assert that no kernel spills or uses inexact instructions. ``names``: the expected count of each kernel."""
    record_property("compiled", table(kernels))
    assert Counter(kernel.kernel for kernel in kernels) == names
    for kernel in kernels:
        name = f"{kernel.kernel}, {kernel.case}"
        assert kernel.stack == 0, name
        assert not kernel.count(r"\b(STL|LDL)\b"), name
        assert kernel.shared <= SHARED_MEMORY_LIMIT, name
        # No inexact division, and no instructions that break adjacent FP8 stores (triton issue 11111).
        assert not kernel.count(r"div\.(full|approx)", of="ptx"), name
        assert not kernel.count(r"(min|max)[a-z.]*\.NaN|\.ftz", of="ptx"), name


@pytest.mark.parametrize("capability", [90, 100])
def test_casts(capability: int, record_property: Callable[[str, object], None]) -> None:
    kernels = compiled("tests.kernels.compiled.casts", capability)
    # A gradient that is transposed in memory is read again for its sums.
    counts = {"choose_kernel": 3, "transpose_kernel": 3, "sums_kernel": 4, "add_up_kernel": 8}
    counts |= {"cast_kernel": 34, "amax_kernel": 15} if capability == 90 else {"cast_kernel": 14, "amax_kernel": 6}
    check_all(kernels, counts, record_property)
    for kernel in kernels:
        if kernel.kernel == "transpose_kernel":  # 16-byte loads and stores, and no conversion.
            assert kernel.registers <= REGISTERS, kernel.case
            assert (kernel.count(r"LDG\.E\.128"), kernel.count(r"STG\.E\.128")) == (4, 4), kernel.case
            assert not kernel.count(r"\b(LDG|STG)\.E\.(U8|S8|U16|64)\b"), kernel.case
            assert not kernel.count(r"cvt\.[a-z.]*f32", of="ptx"), kernel.case
            continue
        if kernel.kernel in ("sums_kernel", "add_up_kernel"):
            assert kernel.registers <= REGISTERS, kernel.case
            assert not kernel.count(r"\bFFMA\b"), kernel.case
            continue
        if kernel.kernel == "choose_kernel":
            continue
        # All programs measure a tensor together only where its slot is cold: they take tiles, publish, and wait.
        jointly = "one launch" in kernel.case and kernel.kernel == "cast_kernel"
        for order in ("release", "acquire"):
            assert kernel.count(rf"\.gpu\.{order}\b", of="ptx") == jointly, kernel.case
        if kernel.kernel != "cast_kernel":
            if "outgrown" in kernel.case:  # This kernel reads whole weights.
                assert kernel.registers <= 80, kernel.case
                assert kernel.count(r"LDG\.E\.128") >= 4, kernel.case
            continue
        converts = kernel.count(r"cvt\.rn\.satfinite\.e(4m3|5m2)x2\.f32", of="ptx")
        assert converts, kernel.case
        assert converts == kernel.count(r"cvt\.rn\.[a-z.]*e(4m3|5m2)x2", of="ptx"), kernel.case
        assert bool(kernel.count(r"\b(atom|red)\.[a-z.]*max\.s32", of="ptx")) == ("amax" in kernel.case), kernel.case
        if any(name in kernel.case for name in ("odd", "one for all", "every second", "very far")):
            continue
        # With sums, ptxas takes 79 for Blackwell, which leaves three tiles at a time. With a limit of 64 it spills. It
        # takes 78 for Hopper if the tensor is float32 and its slot may be cold.
        more = capability != 90 or (jointly and kernel.case.startswith("fp32"))
        limit = 80 if "sums" in kernel.case and more else REGISTERS
        assert kernel.registers <= limit, kernel.case
        assert kernel.count(r"LDG\.E\.128") >= 4, kernel.case
        assert not kernel.count(r"LDG\.E\.(64|U16)"), kernel.case
        straight_only = ": rows" in kernel.case and "transposed" not in kernel.case
        straight_only |= ": columns" in kernel.case and "transposed" in kernel.case
        if not straight_only:
            assert kernel.count(r"STG\.E\.128") == 2, kernel.case
        if "both" in kernel.case or straight_only:  # A 16-byte load gives 8 values: a warp writes 256 in a row.
            assert kernel.count(r"STG\.E\.64") == 4, kernel.case
        assert not kernel.count(r"STG\.E\.(U8|U16)"), kernel.case


@pytest.mark.parametrize("capability", [90, 100])
def test_amaxes(capability: int, record_property: Callable[[str, object], None]) -> None:
    kernels = compiled("tests.kernels.compiled.magnitude", capability)
    check_all(kernels, {"amax_kernel": 12 if capability == 90 else 6}, record_property)
    for kernel in kernels:
        assert kernel.count(r"\b(atom|red)\.[a-z.]*max\.s32", of="ptx") == 1, kernel.case
        if "wide" in kernel.case:
            # Edges of odd sizes are read element by element, each with an address of its own.
            assert kernel.registers <= (96 if "odd" in kernel.case else 80), kernel.case
            assert kernel.count(r"LDG\.E\.128") >= 4, kernel.case


@pytest.mark.parametrize("capability", [90, 100])
def test_shares(capability: int, record_property: Callable[[str, object], None]) -> None:
    kernels = compiled("tests.kernels.compiled.shares", capability)
    check_all(kernels, {"shares_kernel": 19 if capability == 90 else 8}, record_property)
    for kernel in kernels:
        assert kernel.count(r"\b(atom|red)\.[a-z.]*max\.s32", of="ptx") == 2, kernel.case
        assert kernel.count(r"div\.rn\.f32", of="ptx") == 2, kernel.case
        if not kernel.case.startswith(("bf16 odd", "fp16 every second")):
            wide = "f32" in kernel.case
            assert kernel.registers <= (128 if wide else 80), kernel.case
            assert kernel.count(r"LDG\.E\.128") == (16 if wide else 8), kernel.case  # Whole tiles and edges.


@pytest.mark.parametrize("capability", [90, 100])
def test_casts_with_many_scales(capability: int, record_property: Callable[[str, object], None]) -> None:
    kernels = compiled("tests.kernels.compiled.blocks", capability)
    check_all(kernels, {"lines_kernel": 6, "amax_kernel": 2, "squares_kernel": 2}, record_property)
    for kernel in kernels:
        assert kernel.registers <= 80, kernel.case  # Three tiles at a time.
        # One read per tile, or one per copy where the two copies have separate scales.
        reads = 2 if kernel.kernel == "lines_kernel" and "rows" not in kernel.case.split(", ") else 1
        assert kernel.count(r"LDG\.E\.128") >= reads * (8 if "f32" in kernel.case else 4), kernel.case
        assert not kernel.count(r"LDG\.E\.(U8|U16|64)"), kernel.case
        assert kernel.count(r"LDG\.E\b(?!\.)") <= 9, kernel.case  # Scales.
        if kernel.kernel != "amax_kernel":
            assert kernel.count(r"cvt\.rn\.satfinite\.e(4m3|5m2)x2\.f32", of="ptx"), kernel.case
            assert kernel.count(r"div\.rn\.f32", of="ptx"), kernel.case
            assert kernel.count(r"STG\.E\.(128|64)") >= 4, kernel.case
            assert not kernel.count(r"STG\.E\.(U8|U16)"), kernel.case


def test_one_kernel_serves_all_slots() -> None:
    """The position of a slot in its arena and its ``outgrown`` limit must not trigger a recompilation, which would
    stall the first steps."""
    kernels = compiled("tests.kernels.compiled.slots")
    assert len(kernels) == 3 * 6
    # Two casts (with and without ``outgrown``), the amax kernel of each, a cast in one launch, and ``observe``.
    assert len({kernel.ptx for kernel in kernels}) == 6
