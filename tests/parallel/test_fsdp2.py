"""FSDP2 with an FP8 all-gather gives DDP's numbers with less communication."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.ranks import RankPool
from tests.support.sharded import Job, assert_same, train

SAME = [
    pytest.param(Job(steps=8, model="deep", update="next_step"), id="next_step"),
    pytest.param(Job(accumulate=3, no_sync=True, steps=3), id="accumulation"),
    pytest.param(Job(reshard="mixed", model="deep", accumulate=2, no_sync=True, steps=2), id="kept by some"),
    pytest.param(
        Job(per_module=False, reshard=False, accumulate=2, no_sync=True, update="next_step", steps=3),
        id="root only, kept, next_step",
    ),
    pytest.param(Job(optimizer="adamw_foreach", steps=3), id="foreach"),
    pytest.param(Job(optimizer="adamw_fused", update="next_step", reshard=False, steps=3), id="fused, next_step, kept"),
    pytest.param(
        Job(fp8_all_gather=False, reshard=False, optimizer="sgd", update="next_step", steps=3),
        id="high precision, kept, next_step",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("job", SAME)
def test_two_ranks_are_bitwise_as_under_ddp(two_ranks: RankPool, job: Job) -> None:
    ours = two_ranks.run(train, job)
    theirs = two_ranks.run(train, replace(job, parallel="ddp"))
    assert_same(ours, theirs, job.steps)
    assert [mine.steps for mine in ours] == [job.steps] * 2
    assert ours[0].losses[0] != ours[0].losses[-1]
