"""``replay_on`` under tensor parallelism: each data-parallel group has its own report, and the training one event."""

from __future__ import annotations

import math
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

import fp8dist
from fp8dist.replays import triggers
from tests.support.logs import captured_log
from tests.support.ranks import RankPool
from tests.support.replayed import Training

pytestmark = pytest.mark.slow


def _replayed(cause: str) -> Any:
    """An event in the second of three steps, and a cause in its replay that the part of rank 1 alone sees. Return (the
    sentences that the callback gets, what is logged, the steps done)."""
    training = Training(kind="tp", accumulates=1)
    buffer = fp8dist.ReplayBuffer(training.manager)
    told: list[Any] = []
    replaying = False

    def other_gradient(gradient: Tensor) -> Tensor:
        return gradient * 2 if replaying and cause == "finding" and dist.get_rank() == 1 else gradient

    def step(batch: Any) -> None:
        nonlocal replaying
        replaying = True
        training.step(batch)
        replaying = False
        if cause == "error" and dist.get_rank() == 1:
            raise ValueError("no loss")

    training.net.norm.register_forward_hook(lambda module, args, y: y.register_hook(other_gradient) and None)
    fp8dist.replay_on(training.manager, buffer, step, ("nonfinite",), group=training.group, callback=told.append)

    patient = partial(triggers.replay, timeout=timedelta(seconds=15))
    with captured_log() as log, mock.patch.object(triggers, "replay", patient):
        for index in range(3):
            batch = training.data(index)
            buffer.keep(batch)
            training.step(dict(batch))
            if index == 1:
                training.manager._syncs[0].arena.pending[0] = math.inf
            training.end_step()
    sentences = [event.replay.report.sentence for event in told]
    return sentences, [text for _, text in log if "replay" in text], training.steps


def test_a_finding_of_one_part_is_told_by_all_ranks_and_logged_by_one(four_ranks: RankPool) -> None:
    results = four_ranks.run(_replayed, "finding", timeout=60)
    for (sentence,), _, steps in results:
        assert sentence.startswith("ranks 1, 3 differ on the same data, first in module 'norm', gradient")
        assert steps == 3
    assert [len(log) for _, log, _ in results] == [1, 0, 0, 0]
    assert results[0][0][0] in results[0][1][0]


def test_an_error_in_one_part_ends_the_replay_on_all_ranks(four_ranks: RankPool) -> None:
    results = four_ranks.run(_replayed, "error", timeout=60)
    assert [(told, steps) for told, _, steps in results] == [([], 3)] * 4
    assert [len(log) for _, log, _ in results] == [1, 0, 0, 0]
    assert results[0][1][0].endswith(
        "failed: Fp8DistError: replay(): rank 1 raised in the first run: ValueError: no loss"
    )
