"""When ranks differ: one message, all ranks raise together, events, and report files."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp8dist
from fp8dist import DelayedScaling, DivergenceReport, StateManager
from fp8dist.errors import DivergenceError
from tests.support.logs import captured_log
from tests.support.parallel import same_on_all_ranks
from tests.support.ranks import RankPool, on_ranks
from tests.support.suite import NIGHTLY

A = ("a", "input")


def _prepared(**settings: Any) -> tuple[nn.Module, StateManager]:
    """Return a model with two parameters and a slot with three steps of history."""
    torch.manual_seed(0)
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(6, 10))
    model.bias = nn.Parameter(torch.zeros(10))
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4), group=dist.group.WORLD, **settings)
    manager.register(*A, "e4m3")
    manager.register("b", "weight", "e4m3")
    manager.attach()
    for step in range(3):
        manager.slot(*A).record(torch.tensor([1.5 + step]))
        manager.step()
    return model, manager


def _damage(model: nn.Module, manager: StateManager, ranks: list[int]) -> None:
    if dist.get_rank() in ranks:
        with torch.no_grad():
            model.weight[2, 3] = 77.0
        manager.slot(*A).amax.fill_(99.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "entry", "odd"),
    [
        pytest.param(policy, entry, [2 * ((i + j) % 2)], marks=() if i == j else NIGHTLY)
        for i, policy in enumerate(("warn", "raise", "repair"))
        for j, entry in enumerate(("fp8dist.check", "manager.check", "sync"))
    ],
)
@on_ranks(4)
def test_one_rank_of_the_majority_says_it_once_and_all_do_as_the_policy_says(
    policy: Any, entry: str, odd: list[int]
) -> None:
    every = {"check_every": 1, "check_policy": policy} if entry == "sync" else {}
    model, manager = _prepared(**every)
    events: list[fp8dist.Event] = []
    manager.on_event(events.append)
    _damage(model, manager, odd)
    result: DivergenceReport | None = None
    raised = ""
    with captured_log() as log:
        try:
            if entry == "fp8dist.check":
                result = fp8dist.check(model, group=dist.group.WORLD, policy=policy)
            elif entry == "manager.check":
                result = manager.check(policy=policy)
            else:
                manager.step()  # check_every: the check after the third step runs when the fourth ends.
        except DivergenceError as error:
            result, raised = error.report, str(error)
    result = result or events[0].report
    assert result is not None
    assert raised == (result.summary() if policy == "raise" else "")
    speaker = 1 if odd == [0] else 0
    assert result.reporting_rank == speaker
    same_on_all_ranks(repr(result))
    level = logging.ERROR if policy == "raise" else logging.WARNING
    said = [(level, text) for level, text in log if "differ" in text]
    assert said == ([(level, str(result))] if dist.get_rank() == speaker else [])
    if entry != "fp8dist.check":
        assert [(event.kind, repr(event.report)) for event in events] == [("diverged", repr(result))]
    assert bool(result.repaired) == (policy == "repair")


@pytest.mark.slow
@on_ranks(4)
def test_no_rank_raises_before_the_message_is_out() -> None:
    """torchelastic kills all ranks as soon as one fails. Logging is slow on the reporting rank."""
    model, manager = _prepared()
    _damage(model, manager, [2])
    logged: list[float] = []

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            time.sleep(0.5)
            logged.append(time.monotonic())

    handler = Slow()
    logger = logging.getLogger("fp8dist")
    logger.addHandler(handler)
    try:
        with captured_log(), pytest.raises(DivergenceError):
            fp8dist.check(model, group=dist.group.WORLD, policy="raise")
    finally:
        logger.removeHandler(handler)
    raised, everyones = time.monotonic(), [None] * 4
    dist.all_gather_object(everyones, logged)
    (said,) = (times for of in everyones for times in of or ())
    assert raised >= said


def _evidence_in(folder: str) -> Any:
    return mock.patch.dict(os.environ, FP8DIST_REPORT_DIR=folder)


def _with_evidence(folder: str, policy: Any, entry: str, odd: list[int]) -> dict[str, Any]:
    text = ""
    with _evidence_in(folder), captured_log() as log:
        model, manager = _prepared()
        _damage(model, manager, odd)
        value = model.weight[2, 3].item()
        if entry == "sync" and dist.get_rank() in odd:
            manager.slot(*A).scale.mul_(2)
        scale = manager.slot(*A).scale.item()
        try:
            if entry == "sync":
                manager.slot(*A).record(torch.tensor([1.0]))
                manager.step()
            else:
                text = str(fp8dist.check(model, group=dist.group.WORLD, policy=policy, step=12))
        except DivergenceError as error:
            text = str(error.report)
    history = manager.slot(*A).amax_history.tolist()
    return {"value": value, "scale": scale, "text": text, "log": log, "history": history}


def _strict(text: str) -> Any:
    """Parse JSON without the extensions of Python's parser."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(("policy", "odd"), [("warn", 0), ("raise", 2), ("repair", 0)])
def test_the_report_and_both_sides_are_in_files(four_ranks: RankPool, tmp_path: Path, policy: str, odd: int) -> None:
    folder = tmp_path / "made" / "by the check"
    results = four_ranks.run(_with_evidence, str(folder), policy, "check", [odd])
    reference = 1 if odd == 0 else 0
    names = ("report.txt", "report.json", f"rank{odd}.json", f"rank{reference}.json")
    assert {p.name for p in folder.iterdir()} == {f"step00000012-{name}" for name in names}
    report = _strict((folder / "step00000012-report.json").read_text())
    assert report["consistent"] is False
    assert {(f["kind"], f["name"]) for f in report["findings"]} == {("history", "a:input"), ("parameter", "weight")}
    assert {tuple(f["ranks"]) for f in report["findings"]} == {(odd,)}
    said = (folder / "step00000012-report.txt").read_text()
    assert "'a:input'" in said
    assert "77.0" in said
    held = {
        rank: {
            (e["kind"], e["name"]): e["fields"] for e in _strict((folder / f"step00000012-rank{rank}.json").read_text())
        }
        for rank in (odd, reference)
    }
    for rank in (odd, reference):  # The values from before any repair.
        (near,) = held[rank]["parameter", "weight"]
        place = 2 * 10 + 3
        assert float(near["values"][place - near["from"]]) == results[rank]["value"]
        assert len(near["values"]) == 2 * 16 + 1
        slot = {field["field"]: field["values"] for field in held[rank]["history", "a:input"]}
        assert set(slot) == {"scale", "inv_scale", "cold", "amax", "history", "counters", "block_max"}
        assert list(map(float, slot["amax"])) == [99.0 if rank == odd else 3.5]
        assert sorted(map(float, slot["history"])) == [0.0, 1.5, 2.5, 3.5]


def test_a_sync_that_fails_leaves_what_was_sent_in_files(four_ranks: RankPool, tmp_path: Path) -> None:
    odd, reference = 2, 0
    results = four_ranks.run(_with_evidence, str(tmp_path), "raise", "sync", [odd])
    names = ("report.txt", "report.json", f"rank{odd}.json", f"rank{reference}.json")
    assert {p.name for p in tmp_path.iterdir()} == {f"step00000004-{name}" for name in names}
    assert results[odd]["scale"] == 2 * results[reference]["scale"]
    for rank in (odd, reference):
        (entry,) = _strict((tmp_path / f"step00000004-rank{rank}.json").read_text())
        assert (entry["kind"], entry["name"]) == ("scale", "a:input")
        assert float(entry["sent"]["scale"]) == results[rank]["scale"]
        fields = {field["field"]: field["values"] for field in entry["fields"]}
        assert sorted(map(float, fields["history"])) == sorted(results[rank]["history"])


def test_without_a_majority_both_sides_leave_evidence_which_is_not_overwritten(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    two_ranks.run(_with_evidence, str(tmp_path), "raise", "check", [1])
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert before.keys() == {
        f"step00000012-{name}" for name in ("report.txt", "report.json", "rank0.json", "rank1.json")
    }
    two_ranks.run(_with_evidence, str(tmp_path), "warn", "check", [1])
    after = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert {name: after[name] for name in before} == before
    assert len(after) == 2 * len(before)


@pytest.mark.parametrize("entry", ["check", "sync"])
def test_a_folder_that_cannot_be_written_only_warns(three_ranks: RankPool, tmp_path: Path, entry: str) -> None:
    blocked = tmp_path / "a file"
    blocked.write_text("")
    results = three_ranks.run(_with_evidence, str(blocked / "below"), "raise", entry, [1])
    for rank, result in enumerate(results):
        if entry == "check":
            assert "weight" in result["text"]
        warned = [text for _, text in result["log"] if "no evidence written" in text]
        assert len(warned) <= 1
        assert bool(warned) == (rank in (0, 1))
    assert sum("differ" in text for result in results for _, text in result["log"]) == 1


@on_ranks(2)
def test_healthy_ranks_write_nothing(tmp_path: Path) -> None:
    with _evidence_in(str(tmp_path / "folder")):
        model, manager = _prepared()
        assert not manager.check().diverged
        assert fp8dist.check(model, group=dist.group.WORLD).consistent
        manager.step()
    assert list(tmp_path.iterdir()) == []


@on_ranks(3)
def test_evidence_of_any_type_is_json(tmp_path: Path) -> None:
    model = nn.Module()
    values = {
        "nan": torch.tensor([1.0, math.nan]),
        "complex": torch.tensor([1j, complex(math.nan, math.inf)]),
        "bool": torch.tensor([True, False]),
        "fp8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "int": torch.tensor([1, 2**62]),
        "empty": torch.empty(0),
    }
    for name, value in values.items():
        model.register_parameter(f"p_{name}", nn.Parameter(value, requires_grad=False))
        if dist.get_rank() == 1 and value.numel():
            value.view(torch.uint8)[0] ^= 1
    with _evidence_in(str(tmp_path)), captured_log() as log:
        report = fp8dist.check(model, group=dist.group.WORLD, policy="warn")
    assert not any("no evidence" in text for _, text in log)
    assert len(report.findings) == 5
    dist.barrier()
    files = sorted(tmp_path.glob("*.json"))
    assert len(files) == 3
    for path in files:
        _strict(path.read_text())


@pytest.mark.parametrize("entry", ["sync", "manager.check", "fp8dist.check"])
@on_ranks(3, timeout=30)
def test_a_callback_that_raises_leaves_nobody_waiting(entry: str) -> None:
    """An exception in a callback on one rank affects only that rank: the message is logged, and no rank waits."""
    first = dist.get_rank() == 0
    model, manager = _prepared(check_policy="warn")
    if dist.get_rank() == 1:
        manager.slot(*A).scale.mul_(2)

    def heard(event: fp8dist.Event) -> None:
        if first:
            raise KeyError("the logger is down")

    manager.on_event(heard)
    with captured_log() as log, pytest.raises(KeyError) if first else contextlib.nullcontext():
        if entry == "sync":
            manager.slot(*A).record(torch.tensor([2.0]))
            manager.step()
        elif entry == "manager.check":
            manager.check(policy="warn")
        else:
            fp8dist.check(model, group=dist.group.WORLD, policy="warn")
    dist.barrier()
    assert len(log) == first


@on_ranks(3)
def test_the_state_of_several_optimizers_is_compared() -> None:
    model, manager = _prepared()
    model.weight.grad, model.bias.grad = torch.ones_like(model.weight), torch.ones_like(model.bias)
    optimizers = [torch.optim.AdamW([model.weight]), torch.optim.AdamW([model.bias])]
    for optimizer in optimizers:
        optimizer.step()
    if dist.get_rank() == 2:
        optimizers[1].state[model.bias]["exp_avg"][4] = 9.0
    with captured_log():
        local = fp8dist.check(model, group=dist.group.WORLD, optimizer=optimizers, policy="warn")
        ddp = nn.parallel.DistributedDataParallel(model)
        manager.attach(ddp)
        ours = manager.check(optimizer=optimizers, policy="warn")
    found = [("optimizer", "bias.exp_avg", (2,), (4,))]
    assert [[(f.kind, f.name, f.ranks, f.index) for f in report.findings] for report in (local, ours)] == [found, found]


@on_ranks(3)
def test_a_default_device_does_not_matter() -> None:
    """The default device differs from the model's, as cuda would."""
    model, manager = _prepared()
    torch.set_default_device("meta")
    try:
        if dist.get_rank() == 1:
            manager.slot(*A).scale.mul_(2)
            model.weight.data[0, 0] += 1
        with captured_log():
            checked = manager.check(policy="warn")
            everything = fp8dist.check(model, group=dist.group.WORLD, policy="repair")
    finally:
        torch.set_default_device("cpu")
    slot = ("scale", "a:input")
    assert [(f.kind, f.name) for f in checked.findings] == [slot]
    assert [(f.kind, f.name) for f in everything.findings] == [slot, ("parameter", "weight")]
