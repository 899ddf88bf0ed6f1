"""A real run on two ranks, with an outlier, a NaN, a fallback, a resume and a divergence: every sink has the numbers
of the state."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fp8dist
from fp8dist.common.numbers import from_json
from fp8dist.exporters import OpenTelemetry, PrometheusTextfile, TensorBoard
from tests.support.exported import bits, float32
from tests.support.ranks import RankPool
from tests.support.training import batch, make_net

OUTLIER, NAN, RESUMED, DAMAGED, LAST = 3, 5, 6, 8, 10
"""Steps in which something happens. After ``RESUMED`` another manager goes on from the saved state."""

State = dict[str, dict[str, float]]  # By step, as text, and slot: what the state says.


def _half(folder: Path, first: int, last: int, saved: Mapping[str, bytes] | None) -> tuple[Any, State, Any]:
    """Train some steps, and return the manager's state, its amaxes by step and slot, and OpenTelemetry's reader."""
    net, rank, seen = make_net(), dist.get_rank(), {}
    manager = fp8dist.prepare(
        net, fp8dist.DelayedScaling(history_len=4), group=dist.group.WORLD, check_policy="warn",
        fallback=fp8dist.Fallback(nonfinite=True, steps=1),
    )  # fmt: skip
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader], shutdown_on_exit=False).get_meter("mine")
    after = first - 1 or None
    exporters = [
        TensorBoard(folder / "board", resume_after=after),
        PrometheusTextfile(folder / "run.prom"),
        OpenTelemetry(meter),
    ]
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-30)
    if saved is not None:
        manager.load_state_dict(saved)
    with fp8dist.Recorder(folder, manager, every=1, resume_after=after, exporters=exporters) as recorder:
        manager.attach(optimizer=optimizer)
        for step in range(first, last + 1):
            x, y = batch(rank, step)
            if rank == 1 and step in (OUTLIER, NAN):
                x[1, 2] = 3e4 if step == OUTLIER else math.nan
            loss = (net(x) - y).square().mean()
            loss.backward()
            for parameter in net.parameters():  # A NaN stays in its step.
                assert parameter.grad is not None
                parameter.grad.nan_to_num_(0, 0, 0)
            if step == DAMAGED and rank == 1:
                manager._syncs[0].arena.scale[0].mul_(2)
            optimizer.step()
            optimizer.zero_grad()
            recorder.log(step, loss=loss.detach(), tokens=64)
            seen[str(step)] = {str(slot): manager.slot(*slot).amax.item() for slot in manager.slots}
    return manager.state_dict(), seen, reader if rank == 0 else None


def _whole(folder: str) -> tuple[State, dict[str, Any]]:
    saved, seen, _ = _half(Path(folder), 1, RESUMED, None)
    _, later, reader = _half(Path(folder), RESUMED + 1, LAST, saved)
    return seen | later, json.loads(reader.get_metrics_data().to_json()) if reader is not None else {}


@pytest.fixture(scope="module")
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State, Any]:
    pool: RankPool = request.getfixturevalue("two_ranks")
    folder = tmp_path_factory.mktemp("run")
    (state, opened), _ = pool.run(_whole, str(folder))
    return folder, state, opened


def _lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


pytestmark = pytest.mark.slow


def test_the_folder_has_the_amaxes_of_the_state(recorded: tuple[Path, State, Any]) -> None:
    folder, state, _ = recorded
    lines = _lines(folder, "scales")
    assert [line["step"] for line in lines[:: len(state["1"])]] == list(range(1, LAST + 1))
    finite = [line for line in lines if not isinstance(line["amax"], str)]
    for line in finite:
        if line["amax"] is not None and line["step"] != NAN:  # A fallback empties histories.
            assert line["amax"] == state[str(line["step"])][line["slot"]]
    beyond = [line for line in lines if isinstance(line["amax"], str)]
    assert {(line["step"], line["amax"], line["amax_rank"], line["amax_microbatch"]) for line in beyond} == {
        (NAN, "NaN", 1, 0)
    }
    kinds = [(line["kind"], line["step"]) for line in _lines(folder, "events") if line["kind"] != "saturated"]
    assert [one for one in kinds if one[0] in ("start", "nonfinite", "fallback", "diverged", "end")] == [
        ("start", 0), ("nonfinite", NAN), ("fallback", NAN), ("end", RESUMED), ("start", RESUMED),
        ("diverged", DAMAGED), ("end", LAST),
    ]  # fmt: skip


def test_tensorboard_has_them_as_float32(recorded: tuple[Path, State, Any]) -> None:
    folder, _, _ = recorded
    board = EventAccumulator(str(folder / "board"), {"scalars": 0})
    board.Reload()
    wanted = [(line["step"], bits(float32(from_json(line["loss"])))) for line in _lines(folder, "metrics")]
    assert [(one.step, bits(one.value)) for one in board.Scalars("loss")] == wanted
    for role in ("input", "weight", "grad_output"):
        for field in ("saturated", "underflow"):
            largest: dict[int, float] = {}
            for line in _lines(folder, "scales"):
                if line["slot"].endswith(f":{role}") and line[field] is not None:
                    largest[line["step"]] = max(largest.get(line["step"], 0.0), line[field])
            found = [(one.step, bits(one.value)) for one in board.Scalars(f"fp8/{role}/{field}")]
            assert found == [(step, bits(float32(value))) for step, value in sorted(largest.items())]


def test_prometheus_and_opentelemetry_have_the_newest_of_this_process(recorded: tuple[Path, State, Any]) -> None:
    folder, _, opened = recorded
    newest = _lines(folder, "metrics")[-1]
    families = text_string_to_metric_families((folder / "run.prom").read_text())
    samples = {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}
    assert samples["fp8dist_loss",] == newest["loss"]
    assert samples["fp8dist_last_step",] == LAST
    assert samples["fp8dist_tokens_total",] == 64 * (LAST - RESUMED)
    assert samples["fp8dist_nonfinite_amaxes_total",] == newest["nonfinite_amaxes"]
    assert samples["fp8dist_events_total", "diverged"] == 1
    (scope,) = opened["resource_metrics"][0]["scope_metrics"]
    points = {one["name"]: one["data"]["data_points"] for one in scope["metrics"]}
    assert points["fp8dist.loss"][0]["value"] == newest["loss"]
    counts = {point["attributes"]["kind"]: point["value"] for point in points["fp8dist.events"]}
    assert (counts["diverged"], counts["start"], counts["end"]) == (1, 1, 1)
