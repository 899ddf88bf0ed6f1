"""A sync that cannot complete says whose it is, which step, and with whom; and what it could not reduce is no state."""

from __future__ import annotations

import socket
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
    """Two steps together, then rank 1 does not come to the third: what rank 0 is told, and its state after that."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=4, update=update), group=group)  # type: ignore[arg-type]
    manager.attach(net)
    for step in range(3):
        net(batch(dist.get_rank(), step)[0]).sum().backward()
        before = manager.state_dict()
        if step == 2 and dist.get_rank() == 1:
            return None
        try:
            manager.step()
            if step == 2:
                manager.metrics()  # Under next_step the commit waits.
        except SyncError as error:
            both = isinstance(error, Fp8DistError) and isinstance(error, RuntimeError)
            return str(error), type(error.__cause__), both, manager.steps, manager.state_dict() == before
    return "no error"


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_a_sync_error() -> None:
    pool = RankPool(2)  # Of its own: a connection that timed out is of no use to others.
    try:
        (text, cause, both, steps, unchanged), absent = pool.run(_absent, "next_step")
    finally:
        pool.close()
    assert absent is None
    assert both
    assert cause is not SyncError
    assert text.startswith("rank 0: StateManager of Net: the FP8 sync of step 3 with ranks 0, 1 failed after ")
    missing = (
        f"Missing of 2 ranks: rank 1 ({socket.gethostname()}): gone, hung, or out of reach, or this host is cut off ("
    )
    assert missing in text
    assert "\n" not in text
    assert steps == 2
    assert unchanged
