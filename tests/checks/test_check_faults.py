"""When ranks differ: one message, a table once and then lines; all ranks raise together; events, and report files."""

from __future__ import annotations

import contextlib
import copy
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
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import DelayedScaling, DivergenceReport, StateManager
from fp8dist.checks.standing import Standing, kinds_of
from fp8dist.common.divergence import COHERENCE, MORE, Finding
from fp8dist.errors import DivergenceError
from tests.support.collectives import counted_collectives
from tests.support.elements import flip
from tests.support.logs import captured_log
from tests.support.parallel import same_on_all_ranks
from tests.support.ranks import RankPool, on_ranks
from tests.support.suite import NIGHTLY
from tests.support.training import batch, make_net

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

    def emit(*_: Any) -> None:
        time.sleep(0.5)
        logged.append(time.monotonic())

    with mock.patch.object(logging.Logger, "handle", emit), pytest.raises(DivergenceError):
        fp8dist.check(model, group=dist.group.WORLD, policy="raise")
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


def test_the_report_and_both_sides_are_in_files_from_before_a_repair(four_ranks: RankPool, tmp_path: Path) -> None:
    odd, reference = 0, 1
    folder = tmp_path / "made" / "by the check"
    results = four_ranks.run(_with_evidence, str(folder), "repair", "check", [odd])
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
    for rank in (odd, reference):
        (near,) = held[rank]["parameter", "weight"]
        place = 2 * 10 + 3
        assert float(near["values"][place - near["from"]]) == results[rank]["value"]
        assert len(near["values"]) == 2 * 16 + 1
        slot = {field["field"]: field["values"] for field in held[rank]["history", "a:input"]}
        assert set(slot) == {"scale", "inv_scale", "cold", "amax", "history", "counters", "block_max"}
        assert list(map(float, slot["amax"])) == [99.0 if rank == odd else 3.5]
        assert sorted(map(float, slot["history"])) == [0.0, 1.5, 2.5, 3.5]


def test_without_a_majority_both_sides_leave_evidence_which_is_not_overwritten(
    two_ranks: RankPool, tmp_path: Path
) -> None:
    two_ranks.run(_with_evidence, str(tmp_path), "raise", "check", [1])
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert {"step00000012-rank0.json", "step00000012-rank1.json"} <= before.keys()
    two_ranks.run(_with_evidence, str(tmp_path), "warn", "check", [1])
    after = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert {name: after[name] for name in before} == before
    assert len(after) == 2 * len(before)


def test_a_sync_that_fails_leaves_what_was_sent_in_files_and_a_folder_that_cannot_be_written_only_warns(
    three_ranks: RankPool, tmp_path: Path
) -> None:
    odd, reference = 1, 0
    results = three_ranks.run(_with_evidence, str(tmp_path), "raise", "sync", [odd])
    assert results[odd]["scale"] == 2 * results[reference]["scale"]
    for rank in (odd, reference):
        (entry,) = _strict((tmp_path / f"step00000004-rank{rank}.json").read_text())
        assert (entry["kind"], entry["name"]) == ("scale", "a:input")
        assert float(entry["sent"]["scale"]) == results[rank]["scale"]
        fields = {field["field"]: field["values"] for field in entry["fields"]}
        assert sorted(map(float, fields["history"])) == sorted(results[rank]["history"])
    blocked = tmp_path / "a file"
    blocked.write_text("")
    for entry in ("check", "sync"):
        results = three_ranks.run(_with_evidence, str(blocked / "below"), "raise", entry, [odd])
        warned = [sum("no evidence written" in text for _, text in result["log"]) for result in results]
        assert warned == [1, 1, 0]
        assert sum("differ" in text for result in results for _, text in result["log"]) == 1


@on_ranks(3)
def test_evidence_of_any_type_is_json_and_healthy_ranks_write_none(tmp_path: Path) -> None:
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
    with _evidence_in(str(tmp_path)), captured_log() as log:
        assert fp8dist.check(model, group=dist.group.WORLD).consistent
        assert list(tmp_path.iterdir()) == []
        dist.barrier()
        for value in values.values():
            if dist.get_rank() == 1 and value.numel():
                value.view(torch.uint8)[0] ^= 1
        report = fp8dist.check(model, group=dist.group.WORLD, policy="warn")
    assert not any("no evidence" in text for _, text in log)
    assert len(report.findings) == 5
    dist.barrier()
    files = sorted(tmp_path.glob("*.json"))
    assert len(files) == 3
    for path in files:
        _strict(path.read_text())


@pytest.mark.parametrize("entry", ["sync", "check", "attach"])
@on_ranks(3, timeout=30)
def test_a_callback_that_raises_leaves_nobody_waiting(entry: str) -> None:
    """An exception in a callback on one rank affects only that rank: the message is logged, and no rank waits. It is
    not taken for that of a collective, whatever its text."""
    first = dist.get_rank() == 0
    _, manager = _prepared(check_policy="warn")
    if dist.get_rank() == 1:
        manager.slot(*A).scale.mul_(2)

    def heard(event: fp8dist.Event) -> None:
        if first:
            raise RuntimeError("no connection to the logger")

    raised: Any = pytest.raises(DivergenceError) if entry == "attach" else contextlib.nullcontext()
    if first:
        raised = pytest.raises(RuntimeError, match=r"^no connection to the logger$")
    manager.on_event(heard)
    with captured_log() as log, raised:
        if entry == "sync":
            manager.slot(*A).record(torch.tensor([2.0]))
            manager.step()
        elif entry == "check":
            manager.check(policy="warn")
        else:
            net = make_net(dist.get_rank())
            manager = fp8dist.prepare(net, group=dist.group.WORLD)
            manager.on_event(heard)
            manager.attach()
    dist.barrier()
    assert len([text for _, text in log if "differ" in text]) == first


@on_ranks(3)
def test_the_state_of_several_optimizers_is_compared() -> None:
    model, manager = _prepared()
    model.weight.grad, model.bias.grad = torch.ones_like(model.weight), torch.ones_like(model.bias)
    optimizers = [torch.optim.AdamW([model.weight]), torch.optim.AdamW([model.bias]), torch.optim.AdamW([model.bias])]
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
        torch.set_default_device(None)
    slot = ("scale", "a:input")
    assert [(f.kind, f.name) for f in checked.findings] == [slot]
    assert [(f.kind, f.name) for f in everything.findings] == [slot, ("parameter", "weight")]


# A difference that stands: one table, then a line for each report ----------------------------------------


def _model(**settings: Any) -> tuple[nn.Module, StateManager]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4), group=dist.group.WORLD, **settings)
    parallel = nn.parallel.DistributedDataParallel(model)
    return parallel, manager.attach(parallel)


def _damage_slot(manager: StateManager, rank: int) -> None:
    if dist.get_rank() == rank:
        manager.slot("0", "input").amax.fill_(99.0)


def _checks(odd: int) -> Any:
    """Check: clean, damaged (with another policy first), the same, with another thing damaged, without the first, and
    clean; then without a majority, and last with another policy."""
    model, manager = _model()
    bias = model.module[1].bias
    reports: list[int] = []
    manager.on_event(lambda event: reports.append(len(event.report.findings)))  # type: ignore[union-attr]
    texts, calls = [], []

    def check(policy: Any = "warn") -> DivergenceReport:
        with captured_log() as log, counted_collectives() as counted:
            try:
                report = manager.check(policy=policy)
            except fp8dist.DivergenceError as error:
                report = error.report
        texts.append([text for _, text in log])
        calls.append(len(counted.names))
        return report

    check()
    was = manager.slot("0", "input").amax.clone()
    _damage_slot(manager, odd)
    check("raise")
    first = check()
    second = check()
    assert first.findings == second.findings
    if dist.get_rank() == odd:
        bias.data[2] = 5.0
    check()
    manager.slot("0", "input").amax.copy_(was)
    check()
    bias.data[2] = 0.0
    check()
    manager.slot("0", "input").amax.fill_(1.0 + dist.get_rank())
    check()
    check("raise")
    return texts, reports, calls


@pytest.mark.slow
def test_a_check_logs_a_table_once_then_lines_and_other_policies_each_time(three_ranks: RankPool) -> None:
    odd, reference = 0, 1
    results = three_ranks.run(_checks, odd)
    clean, raised, first, second, third, fourth, *_ = results[reference][0]
    history = f"history of '0:input' on rank {odd}"
    assert clean == []
    assert raised == first
    assert len(first) == 1
    assert first[0].startswith("FP8 state differs between ranks\n")
    assert second == [f"fp8dist: still: {history}"]
    assert third[0].startswith("parameters differ between ranks\n")
    assert "(input)" not in third[0]
    assert third[1:] == [f"fp8dist: still: {history}"]
    assert "fp8dist: still: parameter '1.bias' on rank " + str(odd) in fourth
    for (table,) in results[0][0][7:]:
        assert table.startswith("FP8 state differs")
    assert [text for r in results for text in r[0][5] if "again" in text] == [f"fp8dist: equal again: {history}"]
    healed = [text for r in results for text in r[0][6]]
    assert healed == [f"fp8dist: equal again: parameter '1.bias' on rank {odd}"]
    for rank, (texts, reports, calls) in enumerate(results):
        assert reports == [1, 1, 1, 2, 1, 1, 1], "events are complete"
        assert calls[0] == 1
        assert calls[6] == 1
        if rank != reference:
            assert sum(len(texts[i]) for i in (1, 2, 3, 4)) == 0


def _syncs(ranks: list[int]) -> Any:
    """Damage the scale of a slot on some ranks before steps 3, 4, 5 and 7 of eight."""
    model = nn.Module()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=2), group=dist.group.WORLD, check_policy="warn")
    manager.register("blocks.0.fc", "input", "e4m3")
    manager.attach()
    findings = []
    manager.on_event(lambda event: findings.extend(event.report.findings))  # type: ignore[union-attr]
    logged = []
    for step in range(1, 9):
        manager.slot("blocks.0.fc", "input").record(torch.tensor([1.0 + step]))
        if step in (3, 4, 5, 7) and dist.get_rank() in ranks:
            manager.slot("blocks.0.fc", "input").scale.mul_(1 + dist.get_rank())
        with captured_log() as log:
            manager.step()
        logged.append([text for _, text in log])
    return logged, [(f.step, f.kind, f.name, f.ranks) for f in findings]


@pytest.mark.slow
def test_a_sync_logs_a_table_once_then_lines(two_ranks: RankPool) -> None:
    results = two_ranks.run(_syncs, [1])
    odd, who = (0, 1), "ranks 0, 1"
    scale = f"scale of 'blocks.0.fc:input' on {who}"
    logged, findings = results[0]
    assert findings == [(step, "scale", "blocks.0.fc:input", odd) for step in (3, 4, 5, 7)]
    assert [len(texts) for texts in logged] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert logged[2][0].startswith("FP8 state differs between ranks\n")
    assert logged[3] == [f"fp8dist: step 4: still: {scale}, since step 3"]
    assert logged[4] == [f"fp8dist: step 5: still: {scale}, since step 3"]
    assert logged[5] == [f"fp8dist: equal again: {scale}, different since step 3"]
    assert logged[6][0].startswith("FP8 state differs between ranks\n"), "a new difference"
    assert logged[7] == [f"fp8dist: equal again: {scale}, different since step 7"]
    for others, found in results[1:]:
        assert others == [[]] * 8
        assert found == findings


@on_ranks(3)
def test_each_manager_remembers_for_itself() -> None:
    """Two prepared models, and a copy of one: each manager remembers what it has logged itself."""
    first, manager = _model()
    _second, other = _model()
    for each in (manager, other):
        _damage_slot(each, 1)
    with captured_log() as log:
        manager.check(policy="warn")
        manager.check(policy="warn")
        other.check(policy="warn")
        fp8dist.check(first, step=9, policy="warn")
        for _ in range(2):  # Without a manager.
            fp8dist.check(copy.deepcopy(first.module), group=dist.group.WORLD, step=9, policy="warn")
    table, line = "FP8 state differs between ranks", "still: history of '0:input' on rank 1"
    expected = [table, f"fp8dist: {line}", table, f"fp8dist: step 9: {line}", table, table]
    assert [text.split("\n")[0] for _, text in log] == ([] if dist.get_rank() else expected)


@on_ranks(2)
def test_what_a_check_did_not_compare_is_not_equal_again() -> None:
    """A parameter of the second of two models differs. Checks of the first one, and without it, do not mend it."""
    nets = [nn.Sequential(nn.Linear(16, 16)) for _ in range(2)]
    managers = [fp8dist.prepare(net, group=dist.group.WORLD) for net in nets]
    both = nn.ModuleList([DistributedDataParallel(net) for net in nets])
    for manager, module in zip(managers, both):
        manager.attach(module)
    bias: Any = nets[1][0].bias
    was = bias.detach().clone()
    bias.data[2] += dist.get_rank()
    with captured_log() as log:
        fp8dist.check(both, policy="warn")
        managers[0].check(policy="warn")
        fp8dist.check(both, groups={"1.*": None}, policy="warn")
        fp8dist.check(both, policy="warn")
        bias.data.copy_(was)
        fp8dist.check(both, policy="warn")
    name = "parameter '1.0.bias' on ranks 0, 1"
    expected = ["parameters differ between ranks", f"fp8dist: still: {name}", f"fp8dist: equal again: {name}"]
    assert [text.split("\n")[0] for _, text in log] == ([] if dist.get_rank() else expected)


@on_ranks(2)
def test_what_the_sync_of_one_of_several_models_has_found_is_named_as_what_a_check_finds() -> None:
    """Else it would never be equal again: a scale of the second model differs twice, and is equal in between."""
    nets = [nn.Sequential(nn.Linear(16, 16)) for _ in range(2)]
    recipe = DelayedScaling(history_len=2, update="next_step")
    managers = [fp8dist.prepare(net, recipe, group=dist.group.WORLD, check_policy="warn") for net in nets]
    both = nn.ModuleList([DistributedDataParallel(net) for net in nets])
    for manager, module in zip(managers, both):
        manager.attach(module)
    with captured_log() as log:
        for damaged in (False, False, True, *[False] * 4, True):
            if damaged:
                managers[1].slot("0", "weight").scale.mul_(1 + dist.get_rank())
            for manager, net in zip(managers, both):
                net(torch.ones(4, 16)).sum().backward()
                manager.step()
                net.zero_grad()
            fp8dist.check(both, policy="warn")
    scale = "scale of '1.0:weight' on ranks 0, 1"
    table = "FP8 state differs between ranks"
    texts = [text.split("\n")[0].partition(", different since")[0] for _, text in log]
    assert texts == ([] if dist.get_rank() else [table, f"fp8dist: equal again: {scale}", table])


def test_what_differs_on_other_ranks_is_not_equal_again() -> None:
    """Of three ranks rank 1 differs, then rank 2, then none. Ranks 3 and 4 hold another tensor of that name."""
    one, two = (Finding(odd, "parameter", "a", (odd,), 0, sides=((0, 3 - odd), (odd,))) for odd in (1, 2))
    other = Finding(1, "parameter", "a", (4,), 3, sides=((3,), (4,)))
    standing = Standing()
    texts = []
    for findings in ((one, other), (two,), ()):
        report = DivergenceReport(findings)
        for rank in (3, 0):
            of_rank = copy.deepcopy(standing) if rank else standing
            texts += of_rank.gone(report, {"parameter"}, rank)
        texts += standing.texts(report) if findings else []
    assert [text.split("\n")[0] for text in texts] == [
        "parameters differ between ranks",
        "fp8dist: equal again: parameter 'a' on rank 4, different since step 1",
        "parameters differ between ranks",
        "fp8dist: equal again: parameter 'a' on rank 2, different since step 2",
    ]


def test_what_is_over_is_over_on_all_ranks() -> None:
    """Ranks 1 and 2 hold "b", and find it equal again. Rank 0, which holds only "a", logs the next report."""
    b, a = (Finding(1, "parameter", name, ranks, None, sides=(ranks[:1], ranks[1:])) for name, ranks in OF_RANKS)
    standing = [Standing() for _ in range(3)]
    texts = []
    for findings in ((b,), (), (a, b)):
        report = DivergenceReport(findings)
        for rank, (one, name) in enumerate(zip(standing, "abb")):
            texts += one.gone(report, kinds_of(["parameter"]), rank, {(name, "parameter")})
        of_all = [one.texts(report) for one in standing]
        texts += of_all[report.reporting_rank] if findings else []
    assert [text.split("\n")[0] for text in texts] == [
        "parameters differ between ranks",
        "fp8dist: equal again: parameter 'b' on ranks 1, 2, different since step 1",
        "parameters differ between ranks",
    ]


OF_RANKS = (("b", (1, 2)), ("a", (0, 3)))


def test_a_difference_of_a_sync_that_no_slot_explains_is_over_with_a_check_of_slots() -> None:
    unexplained = Finding(1, "scale", "scale", (0, 1), None, detail="the header differed")
    standing = Standing()
    standing.texts(DivergenceReport((unexplained,)))
    assert standing.gone(DivergenceReport(), kinds_of(["parameter"]), 0, {("0.bias", "parameter")}) == []
    assert len(standing.gone(DivergenceReport(), kinds_of(["slot"]), 0, {("0:input", "slot")})) == 1


@pytest.mark.parametrize("kind", ["parameter", COHERENCE])
def test_what_is_counted_and_not_named_is_over_with_what_is_named(kind: str) -> None:
    """A check of another model compares neither."""
    named, more = Finding(1, kind, "1.bias", (0,), None), Finding(1, kind, MORE, (0,), None, detail="7 more")
    standing, equal = Standing(), DivergenceReport()
    standing.texts(DivergenceReport((named, more)))
    assert standing.gone(equal, [kind], 0, {("0.bias", kind)}) == []
    assert len(standing.gone(equal, [kind], 0, {("1.bias", kind)})) == 2


@on_ranks(3)
def test_many_lines_are_counted() -> None:
    """Of a model with 40 parameters, all differ; later all are equal again."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(40)])
    holder = nn.ModuleList([nn.Linear(2, 2), model])
    fp8dist.prepare(holder, DelayedScaling(history_len=2), group=dist.group.WORLD)
    texts = []
    for value in (1.0, 1.0, 0.0):
        for parameter in model:
            parameter.data.fill_(value * (dist.get_rank() == 1))
        with captured_log() as log:
            fp8dist.check(holder, group=dist.group.WORLD, policy="warn")
        texts.append([text for _, text in log])
    if dist.get_rank() == 0:
        assert [len(each) for each in texts] == [1, 9, 9]
        assert (texts[1][-1], texts[2][-1]) == ("fp8dist: still: 32 more", "fp8dist: equal again: 32 more")


@on_ranks(3, timeout=60)
def test_ranks_act_on_a_verdict_together_though_one_has_compiled() -> None:
    """Under next_step without hooks, where only rank 0 has compiled a function. It commits earlier, but must not read
    verdicts earlier than the others, or ranks would hang."""
    net = make_net()
    recipe = DelayedScaling(history_len=4, update="next_step")
    manager = fp8dist.prepare(net, recipe, group=dist.group.WORLD, check_policy="warn")
    manager.attach(boundary="manual")
    told: list[int] = []
    manager.on_event(lambda event: told.append(event.step) if event.kind == "diverged" else None)
    with mock.patch("fp8dist.job.cycle.compiled_any", return_value=dist.get_rank() == 0), captured_log():
        for step in range(5):
            x, y = batch(dist.get_rank(), step)
            nn.functional.mse_loss(net(x), y).backward()
            if step == 2 and dist.get_rank() == 1:
                manager.steps  # noqa: B018 (commits what is due)
                flip(manager.slot("branch", "weight").scale, 20)
            manager.step()
            dist.barrier()  # As DDP's all-reduces in the next backward.
    same_on_all_ranks(told)
    assert len(told) == 1
