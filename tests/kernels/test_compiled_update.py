"""Machine code of the launch and commit kernels for GPUs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.ahead_of_time import SHARED_MEMORY_LIMIT, compiled, table


@pytest.mark.long
@pytest.mark.compiled
@pytest.mark.parametrize("capability", [90, 100])
def test_state_kernels(capability: int, record_property: Callable[[str, object], None]) -> None:
    """Divisions are IEEE, as on the CPU; one atomic addition per kernel; no spills."""
    kernels = compiled("tests.kernels.compiled.update", capability)
    record_property("compiled", table(kernels))
    assert len(kernels) == 8
    for kernel in kernels:
        assert kernel.stack == 0, kernel.case
        assert kernel.shared <= SHARED_MEMORY_LIMIT, kernel.case
        assert kernel.count(r"\b(STL|LDL)") == 0, kernel.case
        assert kernel.count(r"div\.full|div\.approx|rcp\.approx", "ptx") == 0, kernel.case
        assert kernel.count(r"\bATOMG\.E\.ADD\.64") == 1, "a ticket"
    commits = [kernel for kernel in kernels if kernel.kernel == "commit_kernel"]
    assert all(kernel.count(r"div\.rn\.f32", "ptx") > 0 for kernel in commits)
