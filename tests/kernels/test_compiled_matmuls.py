"""Every candidate tile, compiled for the GPUs that may use it: no spills, tensor cores kept busy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.ahead_of_time import SHARED_MEMORY_LIMIT, Compiled, compiled, table

pytestmark = [pytest.mark.long, pytest.mark.compiled]

MODULE, INTO = "tests.kernels.compiled.matmuls", "tests.kernels.compiled.matmuls_into"
ALL_FOR_HOPPER = 40

CONSUMER_SHARED_MEMORY_LIMIT = 101_376
"""Bytes of shared memory that a block may use on an Ada or consumer Blackwell GPU."""


def _assert_fits(one: Compiled, most_shared: int) -> None:
    assert one.stack == 0, one.case
    assert one.count(r"\b(STL|LDL)\b") == 0, one.case
    assert one.shared <= most_shared, one.case


@pytest.fixture(scope="module")
def hopper() -> list[Compiled]:
    return compiled(MODULE, 90)


def test_hopper(hopper: list[Compiled], record_property: Callable[[str, object], None]) -> None:
    record_property("compiled", table(hopper))
    assert len(hopper) == ALL_FOR_HOPPER
    for one in hopper:
        _assert_fits(one, SHARED_MEMORY_LIMIT)
        products = one.count(r"QGMMA")
        assert products > 0, one.case
        assert one.count(r"\b(HMMA|QMMA|IMMA)\b") == 0, one.case
        assert one.count(r"mma\.sync", of="ptx") == 0, one.case
        assert one.count("UTMALDG") > 0, one.case
        assert one.count("UTMASTG") > 0, one.case
        # If ptxas serialises QGMMAs, with a wait after each, all of a group end in gsb0; else only the last does.
        groups = one.count(r"wgmma\.commit_group", of="ptx")
        assert one.count(r"QGMMA[^;]*gsb0") == groups, one.case
        assert products >= 4 * groups, one.case
        if one.case.startswith("fast"):  # The products of a step overlap the wait for the operands of the next step.
            assert one.count(r"wgmma\.wait_group\.sync\.aligned\s+1", of="ptx") == 1, one.case


def test_operand_formats_on_hopper_are_in_the_instructions(hopper: list[Compiled]) -> None:
    for formats, pair in (("E5M2.E4M3", "e5m2 x e4m3fn"), ("E4M3.E5M2", "e4m3fn x e5m2")):
        ours = [found for found in hopper if found.case.endswith(pair)]
        assert len(ours) == 3, "fast and tensorwise, slow and row-wise, 1 x 128 by 1 x 128"
        for one in ours:
            assert one.count(rf"QGMMA\.64x\d+x32\.F32\.{formats}") == one.count("QGMMA")


def test_blackwell(record_property: Callable[[str, object], None]) -> None:
    kernels = compiled(MODULE, 100)
    record_property("compiled", table(kernels))
    assert len(kernels) == 33
    by_case = {one.case: one for one in kernels}
    for case, one in by_case.items():
        if case.endswith(" sideways"):  # The tensor cores read this layout: no tile is transposed on the way.
            upright = by_case[case.removesuffix(" sideways")]
            for moves in (r"UTC\w*MMA", "UTMALDG", r"\bLDS", r"\bSTS", r"\bSTSM", r"\bLDSM"):
                assert one.count(moves) == upright.count(moves), (case, moves)
    for one in kernels:
        _assert_fits(one, SHARED_MEMORY_LIMIT)
        assert one.count(r"UTC\w*MMA") > 0, one.case  # tcgen05.
        assert one.count("UTMALDG") > 0, one.case
        assert one.count(r"\b(HMMA|QMMA|IMMA)\b") == 0, one.case


@pytest.mark.parametrize("capability", [89, 120])
def test_consumer_gpus(capability: int, record_property: Callable[[str, object], None]) -> None:
    kernels = compiled(MODULE, capability)
    record_property("compiled", table(kernels))
    assert len(kernels) == 6
    for one in kernels:
        _assert_fits(one, CONSUMER_SHARED_MEMORY_LIMIT)
        assert one.count("QMMA") > 0, one.case


@pytest.mark.parametrize(("capability", "count"), [(90, 27), (100, 24), (89, 5), (120, 5)])
def test_sums_with_a_buffer(capability: int, count: int, record_property: Callable[[str, object], None]) -> None:
    """They spill nothing and keep the pipeline of the product. Scaling and addition are two roundings: no FFMA."""
    kernels = compiled(INTO, capability)
    record_property("compiled", table(kernels))
    assert len(kernels) == count
    for one in kernels:
        _assert_fits(one, SHARED_MEMORY_LIMIT if capability in (90, 100) else CONSUMER_SHARED_MEMORY_LIMIT)
        if "block" not in one.case:
            assert one.count(r"\bFFMA2?\b") == 0, one.case
            assert one.count(r"\bFADD2?\b") > 0, one.case
        if capability == 90:
            groups = one.count(r"wgmma\.commit_group", of="ptx")
            assert one.count(r"QGMMA[^;]*gsb0") == groups, one.case
            assert one.count("QGMMA") >= 4 * groups > 0, one.case
            assert one.count("UTMALDG") > 2, one.case
