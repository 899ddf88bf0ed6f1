"""FSDP2 with weights that travel as FP8, against DDP: the same numbers from less communication."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.ranks import RankPool
from tests.support.sharded import Job, assert_same, train

SAME = [
    pytest.param(Job(steps=20, model="deep"), id="same_step"),
    pytest.param(Job(steps=20, model="deep", update="next_step"), id="next_step"),
    pytest.param(Job(accumulate=3, no_sync=True), id="accumulation"),
    pytest.param(Job(accumulate=2, no_sync=True, update="next_step", model="deep"), id="accumulation, next_step"),
    pytest.param(Job(reshard=False, model="deep"), id="kept after forward"),
    pytest.param(Job(reshard="mixed", model="deep", accumulate=2, no_sync=True), id="kept by some"),
    pytest.param(Job(per_module=False), id="root only"),
    pytest.param(Job(per_module=False, reshard=False, accumulate=2, no_sync=True), id="root only, kept"),
    pytest.param(Job(optimizer="sgd"), id="sgd"),
    pytest.param(Job(optimizer="adamw_foreach"), id="foreach"),
    pytest.param(Job(optimizer="adamw_fused"), id="fused"),
    pytest.param(Job(optimizer="adamw_fused", update="next_step", reshard=False), id="fused, next_step, kept"),
    pytest.param(Job(fp8_all_gather=False, model="deep"), id="gathered in high precision"),
    pytest.param(
        Job(fp8_all_gather=False, accumulate=2, no_sync=True, update="next_step"), id="high precision, next_step"
    ),
    pytest.param(Job(fp8_all_gather=False, reshard=False), id="high precision, kept"),
]


@pytest.mark.slow
@pytest.mark.parametrize("job", SAME)
def test_two_ranks_are_bitwise_as_under_ddp(two_ranks: RankPool, job: Job) -> None:
    ours = two_ranks.run(train, job)
    theirs = two_ranks.run(train, replace(job, parallel="ddp"))
    assert_same(ours, theirs, job.steps)
    assert [mine.steps for mine in ours] == [job.steps] * 2
    assert ours[0].losses[0] != ours[0].losses[-1]
