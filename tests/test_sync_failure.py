"""A sync that cannot complete says whose it is, which step, and with whom; not only what gloo says."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

import fp8dist
from fp8dist import DelayedScaling
from fp8dist.errors import Fp8DistError, SyncError
from tests.support.ranks import RankPool
from tests.support.training import batch, make_net


def _absent(update: str) -> Any:
    """Two steps together, then rank 1 does not come to the third."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=4, update=update), group=group)  # type: ignore[arg-type]
    manager.attach(net)
    for step in range(3):
        net(batch(dist.get_rank(), step)[0]).sum().backward()
        if step == 2 and dist.get_rank() == 1:
            return None
        try:
            manager.step()
            if step == 2:
                manager.metrics()  # Under next_step the commit waits.
        except SyncError as error:
            return str(error), type(error.__cause__).__name__, isinstance(error, (Fp8DistError, RuntimeError))
    return "no error"


@pytest.mark.slow
@pytest.mark.parametrize("update", ["same_step", "next_step"])
def test_a_rank_that_does_not_come_is_a_sync_error(update: str) -> None:
    pool = RankPool(2)  # Of its own: a connection that timed out is of no use to others.
    try:
        told, absent = pool.run(_absent, update)
    finally:
        pool.close()
    assert absent is None
    text, cause, is_both = told
    assert is_both
    assert cause != "SyncError"
    assert text.startswith("rank 0: StateManager of Net: the FP8 sync of step 3 with ranks 0, 1 failed after ")
    assert "A rank is gone, hangs, or did not come here" in text


def _state_after_a_failure(update: str) -> Any:
    """Whether what is read after the error is the state of the last step that all have committed."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=4, update=update), group=group)  # type: ignore[arg-type]
    manager.attach(net)
    for step in range(3):
        net(batch(dist.get_rank(), step)[0]).sum().backward()
        if step == 2:
            before = manager.state_dict()
            if dist.get_rank() == 1:
                return None
        try:
            manager.step()
            if step == 2:
                manager.metrics()
        except SyncError:
            return manager.steps, manager.state_dict() == before
    return "no error"


@pytest.mark.slow
@pytest.mark.parametrize("update", ["same_step", "next_step"])
def test_what_could_not_be_reduced_is_not_committed(update: str) -> None:
    pool = RankPool(2)
    try:
        assert pool.run(_state_after_a_failure, update) == [(2, True), None]
    finally:
        pool.close()
