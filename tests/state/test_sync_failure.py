"""A sync that cannot complete reports its manager, step and ranks, and does not change state."""

from __future__ import annotations

import gc
import logging
import socket
import threading
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

import fp8dist
from fp8dist import DelayedScaling
from fp8dist.errors import SyncError
from fp8dist.state.roll_call import failing_by_name
from tests.support.logs import captured_log
from tests.support.ranks import on_ranks, run_apart, short_grace
from tests.support.training import batch, make_net


def _absent() -> Any:
    """Two steps together, then rank 1 misses the third. Return rank 0's error, and its state after the error."""
    store = dist.distributed_c10d._get_default_store()
    group: Any = dist.new_group(timeout=timedelta(seconds=2))
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=4, update="next_step"), group=group)
    manager.attach(net)
    for step in range(3):
        net(batch(dist.get_rank(), step)[0]).sum().backward()
        before = manager.state_dict()
        if step == 2 and dist.get_rank() == 1:
            store.wait(["failed"])  # A rank that drops its model is noticed at once: its communicator goes with it.
            return None
        try:
            with short_grace(0.3):
                manager.step()
                if step == 2:
                    manager.metrics()  # Commits.
        except SyncError as error:
            store.set("failed", "")
            return str(error), type(error.__cause__), manager.steps, manager.state_dict() == before
    return "no error"


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_a_sync_error() -> None:
    (text, cause, steps, unchanged), _ = run_apart(2, _absent)
    assert cause is not SyncError
    assert text.startswith("rank 0: StateManager of Net: the FP8 sync of step 3 with ranks 0, 1 failed after ")
    assert f"Missing of 2 ranks: rank 1 ({socket.gethostname()}): gone, hung, or out of reach" in text
    assert steps == 2
    assert unchanged


def _not_checked(policy: Any, late: bool) -> str:
    """Rank 1 does not call the check, or leaves it for good where a repair begins."""
    group: Any = dist.new_group(timeout=timedelta(seconds=2 if late else 1))
    net = nn.Linear(16, 16)
    if dist.get_rank() == 1:
        if late:
            with mock.patch("fp8dist.checks.comparison.repair", side_effect=KeyError), pytest.raises(KeyError):
                fp8dist.check(net, group=group, policy=policy)
        return ""
    with pytest.raises(SyncError) as caught, short_grace(1.5):
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


@on_ranks(2)
def test_a_store_that_is_gone_is_named() -> None:
    gone = mock.patch.object(dist.PrefixStore, "add", side_effect=dist.DistNetworkError("Connection was closed"))
    text = r"^rank \d: %s with ranks 0, 1 failed .* job's store on FileStore cannot be"
    net, world = nn.Linear(16, 16), dist.group.WORLD
    with gone, pytest.raises(SyncError, match=text % r"fp8dist\.check\(\): the meeting"):
        fp8dist.check(net, group=world)
    with gone, pytest.raises(SyncError, match=text % r"StateManager of Linear: attach\(\)"):
        fp8dist.prepare(net, group=world).attach()


def test_an_error_of_this_rank_says_nothing_of_others() -> None:
    for error in (NotImplementedError("x"), RecursionError("timed out"), RuntimeError("shapes differ")):
        with pytest.raises(type(error)) as caught, failing_by_name("a", lambda: "b", [0, 1]):
            raise error
        assert caught.value is error


ON_DEVICE = "fp8dist.state.arena_sync.waits_on_the_device"


def _lookouts() -> int:
    return sum(thread.name == "fp8dist lookout" for thread in threading.enumerate())


def _soon(lookouts: int) -> bool:
    """True if there are this many within three seconds."""
    deadline = time.monotonic() + 3
    while _lookouts() != lookouts and time.monotonic() < deadline:
        time.sleep(0.05)
    return _lookouts() == lookouts


def _asleep() -> list[str]:
    """Rank 2 does not take the third step. The others never wait for it. Return what they log."""
    group: Any = dist.new_group(timeout=timedelta(seconds=3))
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(update="next_step"), group=group)
    with mock.patch(ON_DEVICE, return_value=True):
        manager.attach(net)
    with captured_log(logging.ERROR) as log, short_grace(1.5):
        for step in range(3):
            net(batch(rank, step)[0]).sum().backward()
            if step < 2 or rank < 2:
                manager.step()
            else:
                manager.metrics()  # Ends the second step, as the others do before their third.
        deadline = time.monotonic() + 15
        while rank < 2 and not log and time.monotonic() < deadline:
            time.sleep(0.05)
        store.set(f"logged/{rank}", "")
        store.wait([f"logged/{other}" for other in range(3)])
        time.sleep(0.5)  # The lookout looks four times. It must not report twice.
    return [text for _, text in log]


@pytest.mark.slow
def test_a_rank_that_sleeps_is_named_although_nobody_waits() -> None:
    *awake, asleep = run_apart(3, _asleep)
    for rank, texts in enumerate(awake):
        assert len(texts) == 1
        assert texts[0].startswith(
            f"fp8dist: rank {rank}: StateManager of Net: the FP8 sync of a step with ranks 0, 1, 2"
        )
        assert "Missing of 3 ranks: rank 2" in texts[0]
    assert asleep == []


@pytest.mark.slow
@on_ranks(2)
def test_no_thread_is_left() -> None:
    """Syncs that end in time are not reported. Threads come with attach(), once per arena, and go."""
    net = make_net()
    group: Any = dist.new_group(timeout=timedelta(seconds=2))
    manager = fp8dist.prepare(net, group=group)
    manager.attach(net)
    assert _lookouts() == 0  # The wait blocks the host.
    with mock.patch(ON_DEVICE, return_value=True):
        manager.attach(net)
        manager.attach(net)
    assert _soon(1)
    with captured_log(logging.ERROR) as log:
        for step in range(3):
            net(batch(dist.get_rank(), step)[0]).sum().backward()
            manager.step()
        time.sleep(1.8)  # No step ends meanwhile: the newest work is old, but done.
        manager.detach()
    assert log == []
    assert _soon(0)
    with mock.patch(ON_DEVICE, return_value=True):
        manager.attach(net)
    del net, manager
    gc.collect()
    assert _soon(0)
