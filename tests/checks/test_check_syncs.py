"""Tier 0: damage that a sync proves is reported with rank and slot, although its commit has repaired it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

import fp8dist
from fp8dist import DelayedScaling, DivergenceReport
from tests.support.collectives import counted_collectives
from tests.support.elements import flip
from tests.support.logs import captured_log
from tests.support.parallel import same_on_all_ranks
from tests.support.ranks import RankPool, on_ranks
from tests.support.training import SmallJob, batch, fp8_count, make_net, unwrapped


class _LateVerdict(fp8dist.state.arena_sync.Verdict):
    """Available at the next boundary, as on CUDA."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.immediate = False
        self._event = mock.Mock()


def _job(ddp: bool, update: Any, late: bool, odd: int) -> dict[str, Any]:
    """Run six steps; before the fourth, flip one scale on rank ``odd``. Return reports, their times and their cost."""
    job = SmallJob(
        DelayedScaling(history_len=4, update=update),
        wrap=nn.parallel.DistributedDataParallel if ddp else unwrapped,
        check_policy="warn",
    )
    manager = job.manager
    events: list[tuple[int, DivergenceReport]] = []
    calls_of_steps: list[tuple[list[str], int]] = []
    damaged: tuple[float, float] | None = None
    step = 0
    manager.on_event(lambda event: events.append((step, event.report)) if event.kind == "diverged" else None)  # type: ignore[arg-type]
    verdict = _LateVerdict if late else fp8dist.state.arena_sync.Verdict
    with mock.patch("fp8dist.state.arena_sync.Verdict", verdict), captured_log():
        for step in range(6):
            job.backward(step)
            if step == 3:
                manager.steps  # noqa: B018 (commits what is due)
                was = manager.slot("branch", "weight").scale.item()
                if dist.get_rank() == odd:
                    flip(manager.slot("branch", "weight").scale, 20)
                damaged = (was, manager.slot("branch", "weight").scale.item())
            with counted_collectives() as calls:
                job.optimizer.step()
            job.optimizer.zero_grad()
            calls_of_steps.append((calls.names, fp8_count(calls, manager)))
    scales = [manager.slot(*slot).scale.item() for slot in manager.slots]
    return {"events": events, "calls": calls_of_steps, "scales": scales, "damaged": damaged}


@pytest.mark.parametrize(
    ("ddp", "update", "late"), [(True, "same_step", False), (False, "same_step", True), (True, "next_step", True)]
)
def test_a_flipped_scale_is_reported_at_the_next_sync_without_a_collective_before_it(
    three_ranks: RankPool, ddp: bool, update: str, late: bool
) -> None:
    results = three_ranks.run(_job, ddp, update, late, 1)
    read_in = 4 if late or update == "next_step" else 3
    was, bad = results[0]["damaged"][0], results[1]["damaged"][1]
    assert was != bad
    for result in results:
        ((step, report),) = result["events"]
        assert step == read_in
        ((finding),) = report.findings
        assert (finding.kind, finding.name, finding.ranks, finding.reference_rank) == (
            "scale",
            "branch:weight",
            (1,),
            0,
        )
        assert (finding.field, finding.index, finding.value, finding.expected) == ("scale", (), bad, was)
        assert finding.ulp == 1 << 20
        assert (finding.step, finding.last_good_step) == (4, 2)
        assert result["scales"] == results[0]["scales"], "the commit has made them equal again"
        for i, (names, syncs) in enumerate(result["calls"]):
            if i != read_in:
                assert names == ["all_reduce"], "nothing but the sync itself"
            assert syncs == 1
        # The sync with the damage is the first collective of its step; localisation follows in it, or one step later.
        assert len(result["calls"][read_in][0]) > 1


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
