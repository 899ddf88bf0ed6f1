"""MLflow with sqlite and with its file store, read back by its client."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.exported import NAN, bits
from tests.support.exporting import needs_tools, run_json

pytestmark = [pytest.mark.long, needs_tools]

LARGEST = sys.float_info.max

PROGRAM = """
import json
from mlflow import MlflowClient
from fp8dist import Exporter
from fp8dist.exporters import MLflow
from tests.support.exported import END, FIRST, RESUMED, bits, play
uri, names = "{uri}", {names}
first = MLflow(uri, experiment="mine", seconds=3600)
assert isinstance(first, Exporter)
play(first, FIRST)
client = MlflowClient(uri)
status = [client.get_run(first.run_id).info.status]
second = MLflow(uri, experiment="mine", run_id=first.run_id, seconds=0)
play(second, RESUMED, END)
status.append(client.get_run(first.run_id).info.status)
histories = {{name: client.get_metric_history(first.run_id, name) for name in names}}
series = {{name: [(one.step, bits(one.value)) for one in history] for name, history in histories.items()}}
runs = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
print(json.dumps({{"status": status, "series": series, "runs": len(runs), "tags": runs[0].data.tags}}))
"""

EXPECTED: dict[str, list[tuple[int, float]]] = {
    "loss": [(1, 0.1 + 0.2), (2, 2.5), (3, NAN), (4, -LARGEST), (3, 2.25), (4, 2.125), (5, 2.0)],
    "grad_norm": [(1, 1.5), (2, 1e30), (3, LARGEST), (4, 1.5), (3, 1.25), (4, 1.125)],
    "eval/top-1": [(1, 0.1)],
    "fp8/input/saturated": [(2, 0.25), (4, 1.0), (4, 0.0)],
    "fp8/input/underflow": [(2, 1 / 3), (4, 1 / 3), (4, 1 / 3)],
    "fp8/input/headroom": [(2, -1.0), (4, -LARGEST), (4, 0.0)],
    "events/diverged": [(5, 1.0)],
    "events/fallback": [(3, 1.0)],
}


@pytest.mark.parametrize("uri", ["sqlite:///runs.db", "file:./store"])
def test_its_client_finds_the_numbers_as_float64(uri: str, tmp_path: Path) -> None:
    program = PROGRAM.format(uri=uri, names=list(EXPECTED))
    found: dict[str, Any] = run_json(program, tmp_path, MLFLOW_ALLOW_FILE_STORE="true")
    assert found["status"] == ["FAILED", "FINISHED"]
    assert found["runs"] == 1
    for name, points in EXPECTED.items():
        assert sorted(map(tuple, found["series"][name])) == sorted((step, bits(value)) for step, value in points), name
    assert '"consistent": false' in found["tags"]["fp8dist.diverged"]
    assert len(found["tags"]["fp8dist.start"]) > 10


WAITING = """
import json, time
from mlflow import MlflowClient
from fp8dist.exporters import MLflow
exporter = MLflow("sqlite:///runs.db", seconds={seconds})
client = MlflowClient("sqlite:///runs.db")
sent = []
for step in range(3):
    exporter.write(step, {{"loss": float(step), "a" * 300 + "<": 1.0}}, ())
    sent.append(len(client.get_metric_history(exporter.run_id, "loss")))
exporter.write(3, {{f"number {{i}}": 1.0 for i in range(2_500)}}, ())
sent.append(len(client.get_metric_history(exporter.run_id, "loss")))
names = list(client.get_run(exporter.run_id).data.metrics)
exporter.close()
print(json.dumps([sent, len(names), max(map(len, names))]))
"""


@pytest.mark.parametrize(("seconds", "sent"), [(3600, [0, 0, 0, 3]), (0, [1, 2, 3, 3])])
def test_metrics_are_sent_in_batches(seconds: int, sent: list[int], tmp_path: Path) -> None:
    """A batch that is full is sent at once; MLflow refuses larger ones, longer names and other characters."""
    assert run_json(WAITING.format(seconds=seconds), tmp_path) == [sent, 2 + 2_500, 250]


def test_an_exporter_that_is_only_made_starts_no_run(tmp_path: Path) -> None:
    run_json("from fp8dist.exporters import MLflow\nMLflow('sqlite:///runs.db').close()\nprint(0)", tmp_path)
    assert [*tmp_path.iterdir()] == []
