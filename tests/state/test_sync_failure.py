"""A sync that cannot complete reports its manager, step and ranks, and does not change state."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

import fp8dist
from fp8dist import DelayedScaling
from fp8dist.errors import Fp8DistError, SyncError
from fp8dist.state.roll_call import failing_by_name
from tests.support.ranks import run_apart
from tests.support.training import batch, make_net


def _absent(update: str) -> Any:
    """Two steps together, then rank 1 misses the third. Return rank 0's error, and its state after the error."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=4, update=update), group=group)  # type: ignore[arg-type]
    manager.attach(net)
    for step in range(3):
        net(batch(dist.get_rank(), step)[0]).sum().backward()
        before = manager.state_dict()
        if step == 2 and dist.get_rank() == 1:
            time.sleep(8)  # A rank that drops its model is noticed at once: its communicator goes with it.
            return None
        try:
            manager.step()
            if step == 2:
                manager.metrics()  # Under next_step the commit is pending.
        except SyncError as error:
            both = isinstance(error, Fp8DistError) and isinstance(error, RuntimeError)
            return str(error), type(error.__cause__), both, manager.steps, manager.state_dict() == before
    return "no error"


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_a_sync_error() -> None:
    (text, cause, both, steps, unchanged), absent = run_apart(2, _absent, "next_step")
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


def _not_checked(policy: Any, late: bool) -> str:
    """Rank 1 does not call the check, or leaves it for good where a repair begins."""
    group: Any = dist.new_group(timeout=timedelta(seconds=2))
    net = nn.Linear(16, 16)
    if dist.get_rank() == 1:
        if late:
            with mock.patch("fp8dist.checks.checker.repair", side_effect=KeyError), pytest.raises(KeyError):
                fp8dist.check(net, group=group, policy=policy)
        return ""
    with pytest.raises(SyncError) as caught:
        fp8dist.check(net, group=group, step=7, policy=policy)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "late"), [("warn", False), ("repair", True)])
def test_a_rank_that_does_not_call_a_check_is_named(policy: str, late: bool) -> None:
    text, _, other = run_apart(3, _not_checked, policy, late)
    failed = (
        ": the check of step 7 with ranks 0, 1, 2 failed after " if late else "() was not reached by all ranks within"
    )
    for rank, said in ((0, text), (2, other)):
        assert said.startswith(f"rank {rank}: fp8dist.check{failed}")
        assert "Missing of 3 ranks: rank 1" in said


def test_an_error_of_this_rank_says_nothing_of_others() -> None:
    for error in (NotImplementedError("x"), RecursionError("timed out"), RuntimeError("shapes differ")):
        with pytest.raises(type(error)) as caught, failing_by_name("a", lambda: "b", [0, 1]):
            raise error
        assert caught.value is error
