"""Prometheus: the endpoint and the textfile, read back by prometheus_client's parser."""

from __future__ import annotations

import contextlib
import itertools
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
    types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(set(types)) == len(types)  # Two families of one name are invalid; the parser takes them.
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
        yield lambda **options: stack.enter_context(contextlib.closing(Prometheus(0, **options)))


def test_a_scrape_finds_the_numbers(make: Callable[..., Prometheus]) -> None:
    endpoint, before = make(), time.time()
    for call in FIRST[:4]:
        call(endpoint)
    found = scraped(endpoint)
    names = ("loss", "grad_norm", "user_eval_top_1", "step_seconds", "tokens_total", "last_step", "proven_step")
    assert [found[f"fp8dist_{name}",] for name in names] == [2.5, 1e30, 0.1, 12.7 / 1000, 1024, 2, 2]
    assert before <= found["fp8dist_last_step_timestamp_seconds",] <= time.time()
    assert (found["fp8dist_saturated_ratio", "input"], found["fp8dist_underflow_ratio", "input"]) == (0.25, 1 / 3)
    headrooms = [found["fp8dist_headroom_doublings", role] for role in ("input", "grad_output")]
    assert headrooms == [-1.0, 5.0]
    assert {found["fp8dist_events_total", kind] for kind in (*KINDS, "other")} == {0, 1}
    for call in FIRST[4:]:
        call(endpoint)
    found = scraped(endpoint)
    assert (found["fp8dist_loss",], found["fp8dist_headroom_doublings", "input"]) == (-INF, -INF)
    assert bits(found["fp8dist_step_seconds",]) == bits(10.0)
    assert (found["fp8dist_nonfinite_amaxes_total",], found["fp8dist_skew_seconds",]) == (3, 0.0035)
    for call in RESUMED:
        call(endpoint)
    found = scraped(endpoint)
    counted = dict.fromkeys(("diverged", "fallback", "nonfinite", "saved", "other"), 1) | {"start": 2}
    assert {kind: found["fp8dist_events_total", kind] for kind in counted} == counted
    assert found["fp8dist_run_active",] == 1
    END[0](endpoint)
    assert scraped(endpoint)["fp8dist_run_active",] == 0
    # A gauge can be NaN, and a counter cannot.
    counters = ("fp8dist_fallbacks_total", "fp8dist_tokens_total")
    counted_before = [found[name,] for name in counters]
    endpoint.write(6, {"loss": NAN, "fallbacks": NAN, "tokens": INF, "new": None}, ())  # type: ignore[dict-item]
    found = scraped(endpoint)
    assert bits(found["fp8dist_loss",]) == bits(NAN)
    assert [found[name,] for name in counters] == counted_before
    assert ("fp8dist_user_new",) not in found
    endpoint.write(7, {"data_ms": 7.0, "data_seconds": 2.0}, ())
    assert scraped(endpoint)["fp8dist_user_data_seconds",] == 2.0
    endpoint.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=10)


def test_two_endpoints_share_nothing_and_only_this_host_can_read_them_unless_told_otherwise(
    make: Callable[..., Prometheus],
) -> None:
    """All of 127.0.0.0/8 is this host's, so an endpoint on all addresses would answer on 127.0.0.2."""
    own, open_to_all = make(), make(host="0.0.0.0")
    own.write(1, {"loss": 1.0}, ())
    assert ("fp8dist_loss",) in scraped(own)
    assert ("fp8dist_loss",) not in scraped(open_to_all)
    assert not [family.name for family in prometheus_client.REGISTRY.collect() if "fp8dist" in family.name]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", own.port), timeout=10)
    socket.create_connection(("127.0.0.2", open_to_all.port), timeout=10).close()


def test_slots_have_series_only_if_asked_for_and_their_number_is_bounded(
    make: Callable[..., Prometheus], monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, some = make(), make(slots=2)
    for exporter in (silent, some):
        for call in FIRST:
            call(exporter)
        exporter.write(5, {}, slots(0.25, 14.0))
    assert not [name for name, *_ in scraped(silent) if "_slot_" in name]
    expected = {
        "grad_output": {"amax": 0.25, "scale": 7168.0, "saturated_ratio": 0.0, "underflow_ratio": 0.125},
        "input": {"amax": 3.5, "scale": 16.0, "saturated_ratio": 0.0, "underflow_ratio": 1 / 3},
    }
    expected["grad_output"]["headroom_doublings"], expected["input"]["headroom_doublings"] = 5.0, 3.0
    assert {key: value for key, value in scraped(some).items() if "_slot_" in key[0]} == {
        (f"fp8dist_slot_{name}", f"blocks.0.up:{role}"): value
        for role, numbers in expected.items()
        for name, value in numbers.items()
    }
    assert {label[0] for of in some._families._series.values() for label in of if label} == set(OWN_LABELS)
    # A program that logs a new name in each step must not fill the monitoring system.
    monkeypatch.setattr(module, "MOST_SERIES", 20)
    endpoint = make()
    for step in range(50):
        endpoint.write(step, {f"loss_of_step_{step}": 1.0, "loss": float(step)}, ())
    found = scraped(endpoint)
    assert len(found) == 20
    assert (found["fp8dist_last_step",], found["fp8dist_loss",]) == (49, 49)


@contextlib.contextmanager
def beside(work: Callable[[], object]) -> Iterator[None]:
    """Call ``work`` again and again in another thread."""
    done = threading.Event()

    def again() -> None:
        while not done.is_set():
            work()

    thread = threading.Thread(target=again)
    thread.start()
    yield
    done.set()
    thread.join()


def test_scrapes_during_writes_are_whole(make: Callable[..., Prometheus]) -> None:
    endpoint, steps = make(), itertools.count(1)

    def write() -> None:
        step = next(steps)
        endpoint.write(step, {"loss": float(step), f"new_{step % 100}": 1.0}, slots(0.5, 1.0))

    with beside(write):
        losses = [scraped(endpoint).get(("fp8dist_loss",), 0.0) for _ in range(20)]
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


def test_the_textfile_is_written_whole_at_intervals_and_for_events(tmp_path: Path) -> None:
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
    exporter, last_lines = PrometheusTextfile(path, seconds=0.0), set()
    exporter.write(0, {}, ())
    with beside(lambda: last_lines.add(path.read_text().splitlines()[-1].split(" ")[0])):
        for step in range(200):
            exporter.write(step, {}, ())
    assert len(last_lines) == 1  # A reader never sees half of it.


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.prom"
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: Prometheus(65536), "port must be 0 to 65535, got 65536"),
        (lambda: Prometheus("80"), "port must be 0 to 65535, got '80'"),  # type: ignore[arg-type]
        (lambda: Prometheus(0, slots=-1), "slots must be a number of slots from 0, got -1"),
        (lambda: PrometheusTextfile(tmp_path / "run.txt"),
         "node_exporter reads files that end in .prom, got 'run.txt'"),
        (lambda: PrometheusTextfile(file, slots=-1), "slots must be a number of slots from 0, got -1"),
        *((lambda name=name: PrometheusTextfile(file, labels={name: "a"}), f"labels: '{name}' is no name of a label")
          for name in ("run-id", "__a", "")),
        *((lambda name=name: PrometheusTextfile(file, labels={name: "a"}),
           f"labels: '{name}' is a label of fp8dist's own") for name in OWN_LABELS),
    ]  # fmt: skip
    for call, message in calls:
        with pytest.raises(ConfigurationError, match=re.escape(message)):
            call()
