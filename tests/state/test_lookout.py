"""Where the wait for a sync does not block the host, a thread names the rank that is missing."""

from __future__ import annotations

import gc
import logging
import threading
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import fp8dist
from fp8dist import DelayedScaling
from tests.support.ranks import on_ranks, run_apart
from tests.support.training import batch, make_net

ON_DEVICE = "fp8dist.state.arena_sync.waits_on_the_device"


def _lookouts() -> int:
    return sum(thread.name == "fp8dist lookout" for thread in threading.enumerate())


def _soon(lookouts: int) -> bool:
    """True if there are this many within three seconds."""
    deadline = time.monotonic() + 3
    while _lookouts() != lookouts and time.monotonic() < deadline:
        time.sleep(0.05)
    return _lookouts() == lookouts


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _asleep() -> list[str]:
    """Rank 2 does not take the third step. The others never wait for it. Return what they log in ten seconds."""
    group: Any = dist.new_group(timeout=timedelta(seconds=4))
    log, net = _Log(), make_net()
    logging.getLogger("fp8dist").addHandler(log)
    manager = fp8dist.prepare(net, DelayedScaling(update="next_step"), group=group)
    with mock.patch(ON_DEVICE, return_value=True):
        manager.attach(net)
    for step in range(3):
        net(batch(dist.get_rank(), step)[0]).sum().backward()
        if step < 2 or dist.get_rank() < 2:
            manager.step()
        else:
            manager.metrics()  # Ends the second step, as the others do before their third.
    time.sleep(10)
    logging.getLogger("fp8dist").removeHandler(log)
    return log.texts


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
    log, net = _Log(), make_net()
    logging.getLogger("fp8dist").addHandler(log)
    group: Any = dist.new_group(timeout=timedelta(seconds=2))
    manager = fp8dist.prepare(net, group=group)
    manager.attach(net)
    assert _lookouts() == 0  # The wait blocks the host.
    with mock.patch(ON_DEVICE, return_value=True):
        manager.attach(net)
        manager.attach(net)
    assert _soon(1)
    for step in range(3):
        net(batch(dist.get_rank(), step)[0]).sum().backward()
        manager.step()
    time.sleep(2.5)  # No step ends meanwhile: the newest work is old, but done.
    manager.detach()
    assert _soon(0)
    with mock.patch(ON_DEVICE, return_value=True):
        manager.attach(net)
    del net, manager
    gc.collect()
    assert _soon(0)
    logging.getLogger("fp8dist").removeHandler(log)
    assert log.texts == []
