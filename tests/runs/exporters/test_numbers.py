"""Names, units and kinds of numbers, and what becomes of slots."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import fp8dist
from fp8dist import Exporter, Slot, SlotStatistics, exporters
from fp8dist.errors import ConfigurationError
from fp8dist.runs.exporters.opentelemetry import instrument_name
from fp8dist.runs.exporters.prometheus import metric_name
from fp8dist.runs.exporters.slots import by_role, headroom
from fp8dist.runs.run_numbers import KNOWN, UNITS, Kind, Number, number_of
from tests.support.exported import E4M3, INF, NAN, slots

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("tensorboard", "torch.utils.tensorboard", "wandb", "mlflow", "prometheus_client", "opentelemetry")


def test_every_number_of_a_manager_is_known() -> None:
    manager = fp8dist.prepare(nn.Sequential(nn.Linear(16, 16)))
    for name in manager.metrics():
        assert number_of(name) is KNOWN[name.removeprefix("fp8/")]


def test_names_are_unique_and_by_the_conventions() -> None:
    for name_of in (metric_name, instrument_name):
        names = [name_of(number) for number in dict.fromkeys(KNOWN.values())]
        assert len(set(names)) == len(names)
    for number in KNOWN.values():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", number.name)
        assert (number.kind is not Kind.GAUGE) == metric_name(number).endswith("_total")
        assert "_ms" not in metric_name(number)
    assert metric_name(KNOWN["step_ms"]) == "fp8dist_step_seconds"
    assert metric_name(KNOWN["sync_wait_ms"]) == "fp8dist_sync_wait_seconds_total"


def test_a_number_of_the_user_is_never_taken_for_ours() -> None:
    assert number_of("eval/top-1") == Number("user_eval_top_1", "A number that the training program logs")
    assert number_of("load_ms")[::2] == ("user_load", "ms")
    assert metric_name(number_of("fp8dist_loss")) == "fp8dist_user_fp8dist_loss"
    assert len(number_of("x" * 10_000).name) < 250
    assert {number.unit for number in KNOWN.values()} <= set(UNITS)


def one(amax: float, scale: float, fp8_max: float | None = E4M3) -> SlotStatistics:
    return SlotStatistics(Slot("a", "input"), amax, scale, fp8_max=fp8_max)


@pytest.mark.parametrize(
    ("statistics", "expected"),
    [
        (one(1.0, 448.0), 0.0),
        (one(3.5, 16.0), 3.0),
        (one(14.0, 64.0), -1.0),
        (one(0.0, 1.0), INF),
        (one(INF, 1.0), -INF),
        (one(1e300, 1e300), -INF),
        (one(5e-324, 1e-300), INF),
        (one(1.0, NAN), None),
        (one(NAN, 1.0), None),
        (one(1.0, -1.0), None),
        (one(1.0, 1.0, None), None),
    ],
)
def test_headroom_is_the_number_of_doublings_that_are_left(statistics: SlotStatistics, expected: float | None) -> None:
    assert repr(headroom(statistics)) == repr(expected)  # 0.0 is not -0.0.


def test_a_role_shows_its_worst_slot() -> None:
    found = by_role(slots(0.25, 14.0))
    assert found == {
        "grad_output": (0.0, 0.125, 5.0, (5.0,)),
        "input": (0.25, 1 / 3, -1.0, (3.0, -1.0)),
        "weight": (0.0, 0.0, None, ()),
    }
    assert by_role(slots(1.0, INF))["input"] == (1.0, 1 / 3, -INF, (3.0,))
    assert by_role([one(1.0, 1.0)._replace(saturated=math.nan)])["input"].saturated is None
    assert by_role([]) == {}


@pytest.mark.slow
def test_importing_the_library_imports_no_tool() -> None:
    program = f"import sys, fp8dist, fp8dist.exporters; print([name for name in {TOOLS} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


MADE = {
    "TensorBoard": ("torch.utils.tensorboard", "tensorboard", {"folder": "x"}),
    "Wandb": ("wandb", "wandb", {}),
    "MLflow": ("mlflow", "mlflow", {}),
    "Prometheus": ("prometheus_client", "prometheus", {"port": 0}),
    "PrometheusTextfile": ("prometheus_client", "prometheus", {"path": "x.prom"}),
    "OpenTelemetry": ("opentelemetry.metrics", "opentelemetry", {}),
}


@pytest.mark.parametrize("name", exporters.__all__)
def test_a_tool_that_is_missing_is_named_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, extra, arguments = MADE[name]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigurationError) as caught:
        getattr(exporters, name)(**arguments)
    assert f"this exporter needs {module}: pip install 'fp8dist[{extra}]'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["TensorBoard", "Prometheus", "PrometheusTextfile", "OpenTelemetry"])
def test_an_exporter_that_is_only_made_leaves_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs make exporters on every rank, and one rank calls them."""
    monkeypatch.chdir(tmp_path)
    made = getattr(exporters, name)(**MADE[name][2])
    assert isinstance(made, Exporter)
    made.close()
    assert [*tmp_path.iterdir()] == []
