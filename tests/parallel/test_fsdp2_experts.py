"""Experts under FSDP2: gathered in high precision and in FP8, by experts and by rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8dist import BlockScaling, CurrentScaling, DelayedScaling
from tests.support.ranks import RankPool
from tests.support.sharded_experts import Job, train

JOBS = {
    "high": Job(fp8_all_gather=False),
    "experts": Job(),
    "uneven": Job(experts=5),
    "rows": Job(dim=1),
    "columns": Job(dim=2),
    "rows, high": Job(dim=1, fp8_all_gather=False),
    "next_step": Job(recipe=DelayedScaling(history_len=3, update="next_step"), accumulate=2),
    "transposed": Job(options={"transposed": True, "bias": True, "interleaved": True}),
    "current": Job(recipe=CurrentScaling()),
    "current, rows": Job(recipe=CurrentScaling(), dim=1),
    "blocks": Job(recipe=BlockScaling()),
    "blocks, transposed": Job(recipe=BlockScaling(), options={"transposed": True}),
}


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_equals_ddp(two_ranks: RankPool, job: Job) -> None:
    """Bit for bit: losses, parameters and FP8 state."""
    ours = two_ranks.run(train, job)
    theirs = two_ranks.run(train, replace(job, parallel="ddp"))
    for mine, other in zip(ours, theirs):
        assert mine[0] == other[0]
        assert mine[2] == other[2]
        assert mine[1] == other[1]
        assert mine[3] == other[3]
