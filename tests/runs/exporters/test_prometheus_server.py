"""A real Prometheus server scrapes an endpoint; promtool judges metrics and alerts; the dashboard's queries answer."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8dist.exporters import Prometheus, PrometheusTextfile
from fp8dist.runs.run_numbers import KNOWN
from tests.support.exported import FIRST, RESUMED, slots
from tests.support.exporting import ROOT, found, needs_prometheus, run
from tests.support.main_job import TORCHRUN

pytestmark = [pytest.mark.long, needs_prometheus]

ALERTS = ROOT / "docs/grafana/alerts.yml"
DASHBOARD = json.loads((ROOT / "docs/grafana/fp8dist.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
DEADLINE = 60.0


def promtool(*arguments: str | Path, cwd: Path) -> str:
    return run(str(found("promtool")), *arguments, cwd=cwd)


def test_metrics_follow_the_conventions(tmp_path: Path) -> None:
    path = tmp_path / "run.prom"
    exporter = PrometheusTextfile(path, slots=10)
    for call in (*FIRST, *RESUMED):
        call(exporter)
    exporter.write(6, dict.fromkeys(KNOWN, 1.0), slots(0.5, 1.0))
    exporter.close()
    with path.open() as text:
        checked = subprocess.run(
            [str(found("promtool")), "check", "metrics"], stdin=text, capture_output=True, text=True
        )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


ACTIVE = {"fp8dist_run_active": "1x60"}
EVENTS = 'fp8dist_events_total{kind="%s"}'
RATIO = 'fp8dist_saturated_ratio{role="input"}'
NO_STEP = {"fp8dist_last_step_timestamp_seconds": "0 60 120 180x60"}

CASES: dict[str, tuple[str, dict[str, str], list[int], list[int]]] = {
    "a divergence": ("Fp8distRanksDiffer", {EVENTS % "diverged": "0x5 1x60"}, [6, 20], [5, 25]),
    "a divergence before the first scrape": ("Fp8distRanksDiffer", {EVENTS % "diverged": "1x60"}, [0, 10], [20]),
    "no divergence": ("Fp8distRanksDiffer", {EVENTS % "diverged": "0x60", EVENTS % "saved": "0+1x60"}, [], [0, 10, 40]),
    "a NaN amax": ("Fp8distNonFinite", {EVENTS % "nonfinite": "2x5 3x60"}, [6, 20], [30]),
    "a NaN loss": ("Fp8distNonFinite", {EVENTS % "nonfinite_loss": "0x5 1x60"}, [6], [5, 25]),
    "finite numbers": ("Fp8distNonFinite", {EVENTS % "nonfinite": "0x60", EVENTS % "spike": "0+1x60"}, [], [0, 40]),
    "saturation": ("Fp8distSaturation", {RATIO: "0x5 0.02x60", **ACTIVE}, [16, 30], [5, 10]),
    "saturation once": ("Fp8distSaturation", {RATIO: "0x5 0.5 0x60", **ACTIVE}, [], [6, 16, 30]),
    "little saturation": ("Fp8distSaturation", {RATIO: "0.005x60", **ACTIVE}, [], [0, 20, 40]),
    "saturation of a run that has ended": ("Fp8distSaturation", {RATIO: "0.5x60", "fp8dist_run_active": "0x60"}, [],
                                           [20]),
    "saturation where nobody says when it ends": ("Fp8distSaturation", {RATIO: "0.5x60"}, [20], []),
    "a straggler": ("Fp8distStraggler", {"fp8dist_skew_seconds": "0.3x60", "fp8dist_step_seconds": "1x60", **ACTIVE},
                    [11, 30], [0, 9]),
    "no straggler": ("Fp8distStraggler", {"fp8dist_skew_seconds": "0.1x60", "fp8dist_step_seconds": "1x60"}, [], [20]),
    "no step": ("Fp8distNoStep", {**NO_STEP, **ACTIVE}, [14, 30], [5, 12]),
    "no step after the end": ("Fp8distNoStep", {**NO_STEP, "fp8dist_run_active": "1 1 1 0x60"}, [], [5, 14, 30]),
    "steps": ("Fp8distNoStep", {"fp8dist_last_step_timestamp_seconds": "0+60x60", **ACTIVE}, [], [14, 30]),
}  # fmt: skip
"""By case: the alert, the series with one value per minute, minutes in which it fires, and in which it does not."""


def test_every_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    tests = []
    for name, (alert, series, fires, silent) in CASES.items():
        expected = [(minute, True) for minute in fires] + [(minute, False) for minute in silent]
        tests.append(
            {
                "name": name,
                "interval": "1m",
                "input_series": [{"series": one, "values": values} for one, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})',
                        "eval_time": f"{minute}m",
                        "exp_samples": [{"value": 1, "labels": "{}"}] if expects else [],
                    }
                    for minute, expects in expected
                ],
            }
        )
    (tmp_path / "tests.yml").write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": tests}))
    assert "5 rules found" in promtool("check", "rules", ALERTS, cwd=tmp_path)
    assert "SUCCESS" in promtool("test", "rules", "tests.yml", cwd=tmp_path)
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    assert {alert for alert, _, fires, _ in CASES.values() if fires} == {rule["alert"] for rule in rules}


class Server:
    """A Prometheus server that scrapes one endpoint each second."""

    def __init__(self, folder: Path, target: int) -> None:
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [{"job_name": "fp8dist", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._log = folder / "log"
        command = [str(found("prometheus")), "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
        command += ["--web.listen-address=127.0.0.1:0"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            self._port = self._wait(
                lambda: re.search(r"Listening on.*address=127\.0\.0\.1:(\d+)", self._log.read_text())
            )[1]
            self._wait(lambda: "ready to receive" in self._log.read_text())
        except BaseException:
            self.stop()
            raise

    def _wait(self, ready: Any) -> Any:
        deadline = time.monotonic() + DEADLINE
        while not (answer := ready()):
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, self._log.read_text()
            time.sleep(0.1)
        return answer

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an instant query."""
        return self._get("query?" + urllib.parse.urlencode({"query": expression}))["result"]  # type: ignore[no-any-return]

    def wait_for(self, expression: str) -> list[dict[str, Any]]:
        """Return the series as soon as there are any."""
        return self._wait(lambda: self.query(expression))  # type: ignore[no-any-return]

    def wait_for_alert(self, name: str) -> dict[str, Any]:
        """Return the alert as soon as it fires."""

        def firing() -> list[dict[str, Any]]:
            alerts = self._get("alerts")["alerts"]
            return [one for one in alerts if one["labels"]["alertname"] == name and one["state"] == "firing"]

        return self._wait(firing)[0]  # type: ignore[no-any-return]

    def _get(self, what: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api/v1/{what}", timeout=10) as answer:
            return json.load(answer)["data"]  # type: ignore[no-any-return]

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, Server]]:
    exporter = Prometheus(0)
    for call in FIRST:
        call(exporter)
    exporter.write(4, dict.fromkeys(KNOWN, 0.5), ())
    server = Server(tmp_path_factory.mktemp("server"), exporter.port)
    yield exporter, server
    server.stop()
    exporter.close()


def test_a_query_returns_the_divergences_and_the_alert_fires(scraped: tuple[Prometheus, Server]) -> None:
    exporter, server = scraped
    (before,) = server.wait_for('fp8dist_events_total{kind="diverged"}')
    assert before["value"][1] == "0"
    for call in RESUMED:
        call(exporter)
    (after,) = server.wait_for('fp8dist_events_total{kind="diverged"} > 0')
    assert after["value"][1] == "1"
    alert = server.wait_for_alert("Fp8distRanksDiffer")
    assert alert["annotations"]["summary"] == f"Ranks of the run on 127.0.0.1:{exporter.port} differ"
    (loss,) = server.query("fp8dist_loss")
    assert loss["metric"] == {
        "__name__": "fp8dist_loss", "instance": f"127.0.0.1:{exporter.port}", "job": "fp8dist"
    }  # fmt: skip
    assert float(loss["value"][1]) == 2.0
    (underflow,) = server.query('fp8dist_underflow_ratio{role="input"}')
    assert float(underflow["value"][1]) == 1 / 3


def test_the_example_job_is_scraped_and_its_divergence_found(tmp_path: Path) -> None:
    """Rank 0 of the job serves the endpoint, and rank 1 damages a scale in step 5."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = "--precision fp8 --layers 1 --width 32 --heads 2 --context 32 --batch-size 4 --steps 5000 --log-every 1"
    chosen = ["--check-policy", "warn", "--inject", "scale:1:5", "--prometheus", str(port)]
    environment = {**os.environ, "PYTHON": sys.executable, "NPROC": "2", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "job.log").open("w") as log:
        job = subprocess.Popen(
            [*TORCHRUN, *flags.split(), *chosen, "--out", str(tmp_path / "run")],
            cwd=tmp_path, env=environment, stdout=log, stderr=log,
        )  # fmt: skip
    server = Server(tmp_path, port)
    try:
        (found,) = server.wait_for('fp8dist_events_total{kind="diverged"} > 0')
        assert found["value"][1] == "1"
        assert server.wait_for("fp8dist_last_step > 5")
    finally:
        server.stop()
        job.terminate()  # The launcher ends its ranks, which are in sessions of their own.
        job.wait(60)


def test_each_panel_has_an_answer(scraped: tuple[Prometheus, Server]) -> None:
    _, server = scraped
    for target in (target for panel in PANELS for target in panel["targets"]):
        expression = target["expr"].replace("$instance", ".*").replace("$__rate_interval", "1m")
        assert "$" not in expression
        assert server.wait_for(expression), expression


def test_the_dashboard_has_the_form_of_one() -> None:
    """The names are those of Grafana's JSON schema of dashboards."""
    assert DASHBOARD["schemaVersion"] >= 36
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    variables = {one["name"]: one["type"] for one in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource": "datasource", "instance": "query"}
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not taken & cells
        taken |= cells
        assert place["x"] + place["w"] <= 24
    for panel in PANELS:
        assert panel["type"] in ("stat", "timeseries")
        assert panel["title"]
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        for target in (panel, *panel["targets"]):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
