"""Machine code of grouped casts and products: no spills, wide accesses, tensor cores kept busy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tests.support.ahead_of_time import HOPPER, SHARED_MEMORY_LIMIT, compiled, table

pytestmark = [pytest.mark.long, pytest.mark.compiled]

COUNTS = {
    90: {"amax_kernel": 8, "cast_kernel": 10, "line_amax_kernel": 3, "lines_kernel": 6},
    100: {"amax_kernel": 3, "cast_kernel": 3, "line_amax_kernel": 2, "lines_kernel": 4},
}
PRODUCTS = {90: {"rows_kernel": 16, "columns_kernel": 15}, 100: {"rows_kernel": 12, "columns_kernel": 11}}


@pytest.mark.parametrize("capability", [90, 100])
def test_casts(capability: int, record_property: Callable[[str, object], None]) -> None:
    kernels = compiled("tests.kernels.compiled.grouped_casts", capability)
    record_property("compiled", table(kernels))
    assert Counter(kernel.kernel for kernel in kernels) == COUNTS[capability]
    for kernel in kernels:
        name = f"{kernel.kernel}, {kernel.case}"
        assert (kernel.stack, kernel.count(r"\b(STL|LDL)\b")) == (0, 0), name
        # As in ``test_compiled_casts``: exact divisions, and nothing that breaks adjacent FP8 stores.
        assert not kernel.count(r"div\.(full|approx)|(min|max)[a-z.]*\.NaN|\.ftz", of="ptx"), name
        assert kernel.count(r"LDG\.E\.128") >= 4, name
        assert not kernel.count(r"STG\.E\.(U8|U16)"), name
        if kernel.kernel == "cast_kernel":
            assert kernel.registers <= 64, name  # Four tiles at a time, as in ``test_compiled_casts``.
            assert kernel.count(r"STG\.E\.128") == (0 if kernel.case.endswith(": rows") else 2), name
            assert kernel.count(r"\b(atom|red)\.[a-z.]*max\.s32", of="ptx") == 1, name
        else:
            assert kernel.registers <= 96, name


def test_the_tail_of_torchs_product() -> None:
    (kernel,) = compiled("tests.kernels.compiled.scaled_grouped", HOPPER)
    assert (kernel.stack, kernel.count(r"\b(STL|LDL)\b")) == (0, 0)
    assert kernel.count(r"STG\.E\.128") >= 4


@pytest.mark.parametrize("capability", [90, 100])
def test_products(capability: int, record_property: Callable[[str, object], None]) -> None:
    kernels = compiled("tests.kernels.compiled.grouped_matmuls", capability)
    record_property("compiled", table(kernels))
    assert Counter(kernel.kernel for kernel in kernels) == PRODUCTS[capability]
    for kernel in kernels:
        name = f"{kernel.kernel}, {kernel.case}"
        assert (kernel.stack, kernel.count(r"\b(STL|LDL)\b")) == (0, 0), name
        assert kernel.shared <= SHARED_MEMORY_LIMIT, name
        assert kernel.count(r"\b(HMMA|QMMA|IMMA)\b") == 0, name
        assert kernel.count("UTMALDG") > 0, name
        assert kernel.count(r"STG\.E\.128") >= 4, name
        if capability != HOPPER:
            assert kernel.count(r"UTC\w*MMA") > 0, name  # tcgen05.
            continue
        # If ptxas serialises QGMMAs, all of a group end in gsb0 (see ``test_compiled_matmuls``).
        groups = kernel.count(r"wgmma\.commit_group", of="ptx")
        assert groups == (2 if kernel.kernel == "columns_kernel" else 1), name  # wgrad's last step is apart.
        assert kernel.count(r"QGMMA[^;]*gsb0") == groups, name
        assert kernel.count("QGMMA") >= 4 * groups, name
        if kernel.case.startswith("fast"):
            assert kernel.count(r"wgmma\.wait_group\.sync\.aligned\s+1", of="ptx") == 1, name
