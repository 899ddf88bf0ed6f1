"""A difference that stands gets one table, then a line for each report. What a sync proves is reported."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp8dist
from fp8dist import DelayedScaling, DivergenceReport, StateManager
from tests.support.collectives import counted_collectives
from tests.support.elements import flip
from tests.support.logs import captured_log
from tests.support.parallel import same_on_all_ranks
from tests.support.ranks import RankPool, on_ranks
from tests.support.training import SmallJob, batch, make_net, unwrapped


def _model(**settings: Any) -> tuple[nn.Module, StateManager]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4), group=dist.group.WORLD, **settings)
    parallel = nn.parallel.DistributedDataParallel(model)
    return parallel, manager.attach(parallel)


def _damage(manager: StateManager, rank: int) -> None:
    if dist.get_rank() == rank:
        manager.slot("0", "input").amax.fill_(99.0)


def _checks(odd: int, policy: str) -> Any:
    """Check five times: damaged, the same, with another thing damaged, without the first, and clean."""
    model, manager = _model()
    bias = model.module[1].bias
    reports: list[int] = []
    manager.on_event(lambda event: reports.append(len(event.report.findings)))  # type: ignore[union-attr]
    texts, calls = [], []

    def check() -> DivergenceReport:
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
    _damage(manager, odd)
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
    return texts, reports, calls


@pytest.mark.slow
@pytest.mark.parametrize("odd", [0, 2])
def test_a_check_logs_a_table_once_then_lines(three_ranks: RankPool, odd: int) -> None:
    results = three_ranks.run(_checks, odd, "warn")
    reference = 1 if odd == 0 else 0
    clean, first, second, third, fourth, *_ = results[reference][0]
    other = results[0][0][6]  # Without a majority.
    history = f"history of '0:input' on rank {odd}"
    assert clean == []
    assert len(first) == 1
    assert first[0].startswith("FP8 state differs between ranks\n")
    assert second == [f"fp8dist: still: {history}"]
    assert third[0].startswith("parameters differ between ranks\n")
    assert "(input)" not in third[0]
    assert third[1:] == [f"fp8dist: still: {history}"]
    assert "fp8dist: still: parameter '1.bias' on rank " + str(odd) in fourth
    assert len(other) == 1
    assert other[0].startswith("FP8 state differs")
    assert [text for r in results for text in r[0][4] if "again" in text] == [f"fp8dist: equal again: {history}"]
    healed = [text for r in results for text in r[0][5]]
    assert healed == [f"fp8dist: equal again: parameter '1.bias' on rank {odd}"]
    for rank, (texts, reports, calls) in enumerate(results):
        assert reports == [1, 1, 2, 1, 1], "events are complete"
        assert calls[0] == 1
        assert calls[5] == 1
        if rank != reference:
            assert sum(len(texts[i]) for i in (1, 2, 3)) == 0


@pytest.mark.slow
def test_other_policies_log_the_table_each_time(three_ranks: RankPool) -> None:
    texts = three_ranks.run(_checks, 1, "raise")[0][0]
    assert [len(part) for part in texts] == [0, 1, 1, 1, 1, 0, 1]
    assert not any("fp8dist: " in text for part in texts for text in part)


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
@pytest.mark.parametrize("pool", [2, 4])
def test_a_sync_logs_a_table_once_then_lines(pool: int, two_ranks: RankPool, four_ranks: RankPool) -> None:
    results = (two_ranks if pool == 2 else four_ranks).run(_syncs, [1])
    odd = (0, 1) if pool == 2 else (1,)
    who = "ranks 0, 1" if pool == 2 else "rank 1"
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


@on_ranks(2)
def test_a_check_without_a_manager_logs_tables() -> None:
    model = nn.Linear(3, 3)
    model.bias.data.fill_(dist.get_rank())
    model.weight.data.fill_(0)
    with captured_log() as log:
        for step in (1, 2):
            fp8dist.check(model, group=dist.group.WORLD, step=step, policy="warn")
    first = dist.get_rank() == 0
    assert [text.split("\n")[0] for _, text in log] == ["parameters differ between ranks"] * 2 * first


@on_ranks(3)
def test_each_manager_remembers_for_itself() -> None:
    """Two prepared models, and a copy of one: each manager remembers what it has logged itself."""
    first, manager = _model()
    _second, other = _model()
    for each in (manager, other):
        _damage(each, 1)
    with captured_log() as log:
        manager.check(policy="warn")
        manager.check(policy="warn")
        other.check(policy="warn")
        fp8dist.check(first, step=9, policy="warn")
        fp8dist.check(copy.deepcopy(first.module), group=dist.group.WORLD, step=9, policy="warn")
    table, line = "FP8 state differs between ranks", "still: history of '0:input' on rank 1"
    expected = [table, f"fp8dist: {line}", table, f"fp8dist: step 9: {line}", table]
    assert [text.split("\n")[0] for _, text in log] == ([] if dist.get_rank() else expected)


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
        assert texts[1][-1] == "fp8dist: still: 32 more"
        assert texts[2][-1] == "fp8dist: equal again: 32 more"


# Damage that a sync proves, although its commit has repaired it --------------------------------------


@pytest.mark.slow
@on_ranks(3)
def test_who_catches_what_a_check_raised_goes_on() -> None:
    """The step after a caught error gets no additional check."""
    job = SmallJob(DelayedScaling(history_len=4), wrap=unwrapped, check_every=3)
    checker, errors = job.manager._cycle.checker, 0
    with mock.patch.object(checker, "check", side_effect=fp8dist.DivergenceError(DivergenceReport())):
        for step in range(9):
            try:
                job.step(step)
            except fp8dist.DivergenceError:
                errors += 1
    assert (errors, job.manager.steps) == (2, 7)


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
    same_on_all_ranks(told)
    assert len(told) == 1
