"""The cache of runs of the example job and of its lab."""

from __future__ import annotations

import pytest

from tests.support.main_job import Runs


@pytest.fixture(scope="session")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The finished runs of this test run, which all workers of pytest-xdist share."""
    base = tmp_path_factory.getbasetemp()
    return Runs((base.parent if hasattr(request.config, "workerinput") else base) / "runs")
