"""Prometheus: the endpoint and the textfile, read back by prometheus_client's parser."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fp8dist.errors import ConfigurationError
from fp8dist.exporters import Prometheus, PrometheusTextfile
from fp8dist.runs.exporters import prometheus as module
from fp8dist.runs.exporters.prometheus import OWN_LABELS
from fp8dist.runs.exporters.samples import KINDS
from tests.support.exported import END, FIRST, INF, NAN, RESUMED, bits, play, slots

pytestmark = pytest.mark.slow  # Closing an endpoint takes half a second.

Series = dict[tuple[str, ...], float]


def parsed(text: str) -> Series:
    """Return the value of each series, by its name and the values of its labels."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            found[(sample.name, *sample.labels.values())] = sample.value
    return found


def scraped(exporter: Prometheus) -> Series:
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=10) as answer:
        return parsed(answer.read().decode())


@pytest.fixture
def make() -> Iterator[Callable[..., Prometheus]]:
    """Make endpoints, and close them after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(contextlib.closing(Prometheus(*arguments, **options)))


@pytest.fixture
def endpoint(make: Callable[..., Prometheus]) -> Prometheus:
    return make(0)


def test_a_scrape_finds_the_numbers(endpoint: Prometheus) -> None:
    before = time.time()
    for call in FIRST[:4]:
        call(endpoint)
    found = scraped(endpoint)
    assert found["fp8dist_loss",] == 2.5
    assert found["fp8dist_grad_norm",] == 1e30
    assert found["fp8dist_user_eval_top_1",] == 0.1
    assert found["fp8dist_step_seconds",] == 12.7 / 1000
    assert found["fp8dist_tokens_total",] == 1024
    assert found["fp8dist_last_step",] == 2
    assert before <= found["fp8dist_last_step_timestamp_seconds",] <= time.time()
    assert found["fp8dist_saturated_ratio", "input"] == 0.25
    assert found["fp8dist_underflow_ratio", "input"] == 1 / 3
    assert found["fp8dist_headroom_doublings", "input"] == -1.0
    assert found["fp8dist_headroom_doublings", "grad_output"] == 5.0
    assert found["fp8dist_proven_step",] == 2
    assert {found["fp8dist_events_total", kind] for kind in (*KINDS, "other")} == {0, 1}
    for call in FIRST[4:]:
        call(endpoint)
    found = scraped(endpoint)
    endpoint.close()
    assert (found["fp8dist_loss",], found["fp8dist_headroom_doublings", "input"]) == (-INF, -INF)
    assert bits(found["fp8dist_step_seconds",]) == bits(10.0)
    assert found["fp8dist_nonfinite_amaxes_total",] == 3
    assert found["fp8dist_skew_seconds",] == 0.0035
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=10)


def test_a_gauge_can_be_nan_and_a_counter_cannot(endpoint: Prometheus) -> None:
    endpoint.write(1, {"loss": 1.0, "fallbacks": 2, "tokens": 8}, ())
    endpoint.write(2, {"loss": NAN, "fallbacks": NAN, "tokens": INF, "grad_norm": None}, ())  # type: ignore[dict-item]
    found = scraped(endpoint)
    assert bits(found["fp8dist_loss",]) == bits(NAN)
    assert (found["fp8dist_fallbacks_total",], found["fp8dist_tokens_total",]) == (2, 8)
    assert ("fp8dist_grad_norm",) not in found


def test_events_count_by_kind_and_the_end_is_seen(endpoint: Prometheus) -> None:
    for call in (*FIRST, *RESUMED):
        call(endpoint)
    found = scraped(endpoint)
    counted = {"start": 2, "diverged": 1, "fallback": 1, "nonfinite": 1, "saved": 1, "other": 1}
    assert {kind: found["fp8dist_events_total", kind] for kind in counted} == counted
    assert found["fp8dist_run_active",] == 1
    for call in END:
        call(endpoint)
    assert scraped(endpoint)["fp8dist_run_active",] == 0


def test_only_this_host_can_read_it_unless_told_otherwise(
    endpoint: Prometheus, make: Callable[..., Prometheus]
) -> None:
    """All of 127.0.0.0/8 is this host's, so an endpoint on all addresses would answer on 127.0.0.2."""
    assert scraped(endpoint)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", endpoint.port), timeout=10)
    socket.create_connection(("127.0.0.2", make(0, host="0.0.0.0").port), timeout=10).close()


def test_slots_have_series_only_if_asked_for_and_so_many(make: Callable[..., Prometheus]) -> None:
    silent, telling = make(0), make(0, slots=2)
    for exporter in (silent, telling):
        exporter.write(1, {}, slots(0.25, 14.0))
    assert not [name for name, *_ in scraped(silent) if "_slot_" in name]
    assert {key: value for key, value in scraped(telling).items() if "_slot_" in key[0]} == {
        ("fp8dist_slot_amax", "blocks.0.up:grad_output"): 0.25,
        ("fp8dist_slot_amax", "blocks.0.up:input"): 3.5,
        ("fp8dist_slot_scale", "blocks.0.up:grad_output"): 7168.0,
        ("fp8dist_slot_scale", "blocks.0.up:input"): 16.0,
        ("fp8dist_slot_saturated_ratio", "blocks.0.up:grad_output"): 0.0,
        ("fp8dist_slot_saturated_ratio", "blocks.0.up:input"): 0.0,
        ("fp8dist_slot_underflow_ratio", "blocks.0.up:grad_output"): 0.125,
        ("fp8dist_slot_underflow_ratio", "blocks.0.up:input"): 1 / 3,
        ("fp8dist_slot_headroom_doublings", "blocks.0.up:grad_output"): 5.0,
        ("fp8dist_slot_headroom_doublings", "blocks.0.up:input"): 3.0,
    }


def test_the_number_of_series_is_bounded(endpoint: Prometheus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that logs a new name in each step must not fill the monitoring system."""
    monkeypatch.setattr(module, "MOST_SERIES", 20)
    for step in range(50):
        endpoint.write(step, {f"loss_of_step_{step}": 1.0, "loss": float(step)}, ())
    found = scraped(endpoint)
    assert len(found) == 20
    assert (found["fp8dist_last_step",], found["fp8dist_loss",]) == (49, 49)


def test_two_exporters_share_nothing(endpoint: Prometheus, make: Callable[..., Prometheus]) -> None:
    endpoint.write(1, {"loss": 1.0}, ())
    assert ("fp8dist_loss",) not in scraped(make(0))
    assert not [family.name for family in prometheus_client.REGISTRY.collect() if "fp8dist" in family.name]


def test_scrapes_during_writes_are_whole(endpoint: Prometheus) -> None:
    done = threading.Event()

    def work() -> None:
        step = 0
        while not done.is_set():
            step += 1
            endpoint.write(step, {"loss": float(step), f"new_{step % 100}": 1.0}, slots(0.5, 1.0))

    thread = threading.Thread(target=work)
    thread.start()
    losses = [scraped(endpoint).get(("fp8dist_loss",), 0.0) for _ in range(20)]
    done.set()
    thread.join()
    assert losses == sorted(losses)
    assert losses[-1] > 0


def test_the_textfile_stays_after_the_end(tmp_path: Path) -> None:
    path = tmp_path / "made" / "run.prom"
    play(PrometheusTextfile(path, labels={"run": 3}), FIRST, RESUMED, END)  # type: ignore[dict-item]
    found = parsed(path.read_text())
    assert found["fp8dist_loss", "3"] == 2.0
    assert found["fp8dist_events_total", "diverged", "3"] == 1
    assert found["fp8dist_headroom_doublings", "input", "3"] == 0.0
    assert found["fp8dist_run_active", "3"] == 0
    assert [*path.parent.iterdir()] == [path]


def test_the_textfile_is_written_at_intervals_and_for_events(tmp_path: Path) -> None:
    path = tmp_path / "run.prom"

    def loss() -> float:
        return parsed(path.read_text())["fp8dist_loss",]

    exporter = PrometheusTextfile(path, seconds=3600)
    exporter.write(1, {"loss": 1.0}, ())
    exporter.write(2, {"loss": 2.0}, ())
    assert loss() == 1.0
    FIRST[6](exporter)  # An event.
    assert loss() == 2.0
    exporter.write(3, {"loss": 3.0}, ())
    assert loss() == 2.0
    exporter.close()
    assert loss() == 3.0


def test_a_reader_never_sees_half_a_textfile(tmp_path: Path) -> None:
    path = tmp_path / "run.prom"
    exporter = PrometheusTextfile(path, seconds=0.0)
    exporter.write(0, {}, ())
    done = threading.Event()
    last_lines = set()

    def work() -> None:
        while not done.is_set():
            last_lines.add(path.read_text().splitlines()[-1].split(" ")[0])

    thread = threading.Thread(target=work)
    thread.start()
    for step in range(200):
        exporter.write(step, {}, ())
    done.set()
    thread.join()
    assert len(last_lines) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: Prometheus(65536), "port must be 0 to 65535, got 65536"),
        (lambda path: Prometheus("80"), "port must be 0 to 65535, got '80'"),
        (lambda path: Prometheus(0, slots=-1), "slots must be a number of slots from 0, got -1"),
        (lambda path: PrometheusTextfile(path / "run.txt"),
         "node_exporter reads files that end in .prom, got 'run.txt'"),
        (lambda path: PrometheusTextfile(path / "a.prom", slots=-1), "slots must be a number of slots from 0, got -1"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(make: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        make(tmp_path)


@pytest.mark.parametrize("name", ["run-id", "__a", "", *OWN_LABELS])
def test_labels_that_would_vanish_are_refused(name: str, tmp_path: Path) -> None:
    message = "is a label of fp8dist's own" if name in OWN_LABELS else "is no name of a label"
    with pytest.raises(ConfigurationError, match=f"labels: '{name}' {message}"):
        PrometheusTextfile(tmp_path / "a.prom", labels={name: "a"})


def test_own_labels_are_those_of_the_series(make: Callable[..., Prometheus]) -> None:
    exporter = make(0, slots=2)
    for call in FIRST:
        call(exporter)
    assert {label[0] for of in exporter._families._series.values() for label in of if label} == set(OWN_LABELS)
