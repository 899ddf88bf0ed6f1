"""Stragglers of the lab: statistics of the ranks' times, computed by hand, and slow ranks that are named.

That measured waits change no bit is part of test_train_gpt.py: the example job has none."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.lab import skew
from tests.support.lab.waiting import Waiting
from tests.support.main_job import RANKS, TINY, Run, Runs

SLOW_MS = 200
"""Far more than any other delay of a rank in a step on a busy machine."""

Steps = list[list[tuple[float, float, float]]]
"""[rank][step]: ms (in the sync, in other collectives, in total)."""


def measured(steps: Steps) -> Any:
    """Return the times as the recorder delivers them: [ranks, 3, steps]."""
    return np.array(steps, dtype=np.float64).transpose(0, 2, 1)


def with_own(own: Sequence[Sequence[float]], step: float) -> Any:
    """Return times of ranks that wait for each other: own time plus wait is ``step``."""
    return measured([[(0.0, step - ms, step) for ms in of_rank] for of_rank in own])


def kinds_of(times: Sequence[tuple[float, float, float]]) -> dict[str, list[float]]:
    """Return the values that quantiles are of, by the start of their names."""
    return {
        "sync_wait": [sync for sync, _, _ in times],
        "wait": [sync + other for sync, other, _ in times],
        "own": [whole - sync - other for sync, other, whole in times],
    }


def require_quantiles(found: dict[str, Any], name: str, values: Sequence[float]) -> None:
    """Compare with linear interpolation between the two nearest values."""
    hundredths = statistics.quantiles(values, n=100, method="inclusive")
    assert found[f"{name}_p50_ms"] == pytest.approx(hundredths[49], abs=1e-4)
    assert found[f"{name}_p99_ms"] == pytest.approx(hundredths[98], abs=1e-4)


def test_lines_are_over_the_ranks_and_the_summary_over_the_steps() -> None:
    numbers = random.Random(0)
    one = lambda: (numbers.random(), 10 * numbers.random(), 20 + 10 * numbers.random())  # noqa: E731
    steps: Steps = [[one() for _ in range(30)] for _ in range(5)]
    seen, lines = skew.Skew(5), []
    for start in range(0, 30, 7):  # One interval at a time, as in the job.
        lines += seen.add(measured([of_rank[start : start + 7] for of_rank in steps]))
    for index, line in enumerate(lines):
        kinds = kinds_of([of_rank[index] for of_rank in steps])
        own = kinds.pop("own")
        for name, values in kinds.items():
            require_quantiles(line, name, values)
            assert line[f"{name}_max_ms"] == pytest.approx(max(values), abs=1e-4)
        assert line["skew_ms"] == pytest.approx(max(own) - min(own), abs=1e-4)
        assert line["last_rank"] == own.index(max(own))
    summary = seen.summary([*"abcde"])
    assert (len(lines), summary["steps"]) == (30, 30)
    assert [(rank["rank"], rank["host"]) for rank in summary["ranks"]] == [*enumerate("abcde")]
    for rank, told in zip(steps, summary["ranks"], strict=True):
        for name, values in kinds_of(rank).items():
            require_quantiles(told, name, values)
    assert json.loads(json.dumps(summary)) == summary


def test_only_steps_that_ended_with_several_ranks_count_and_without_fp8_the_other_waits() -> None:
    none = math.nan
    seen, alone = skew.Skew(2), skew.Skew(1)
    *lines, last = seen.add(
        measured([[(none, 5.0, 30.0)] * 9 + [(none,) * 3], [(none, 25.0, 30.0)] * 9 + [(none,) * 3]])
    )
    assert (lines[0]["last_rank"], lines[0]["wait_max_ms"], last) == (0, 25, {})
    assert not [name for name in lines[0] if name.startswith("sync")]
    summary = seen.summary(["a", "b"])
    assert (summary["steps"], summary["straggler"]) == (9, {"rank": 0, "host": "a", "behind_ms": 20.0})
    assert [rank["sync_wait_p50_ms"] for rank in summary["ranks"]] == [None, None]
    assert "-" in skew.lines_of(summary)[-1]
    assert alone.add(measured([[(0.0, 0.0, 9.0)] * 2])) == [{}, {}]
    assert alone.summary(["a"]) is skew.Skew(2).summary(["a", "b"]) is None


def test_a_rank_that_is_slow_in_most_steps_is_named_and_noise_is_not() -> None:
    numbers = random.Random(0)
    for ranks in [2, 3, 16]:
        for late, noise, named in [(15, 4.0, ranks - 1), (0, 60.0, None)]:
            own = [
                [50 + (late if rank == ranks - 1 else 0) + noise * numbers.random() for _ in range(24)]
                for rank in range(ranks)
            ]
            seen = skew.Skew(ranks)
            assert {line["straggler"] for line in seen.add(with_own(own, 120))} == {named}
            summary = seen.summary([f"host{rank}" for rank in range(ranks)])
            (first, *_) = skew.lines_of(summary)
            if named is None:
                assert (summary["straggler"], first.split()) == (None, ["straggler:", "none"])
            else:
                assert summary["straggler"]["behind_ms"] == pytest.approx(late, abs=4)
                assert first.startswith("straggler: ")
                assert f"rank {named} on host{named}, " in first
    for few, step in [
        ([[50.0] * 20, [53.0] * 20], 120),  # 2.5% of the step.
        ([[2.0] * 20, [2.9] * 20], 4),  # A large part of it, but less than a millisecond.
        ([[50.0] * 20, [50.0] * 12 + [500.0] * 8], 600),  # Late in less than half of the steps, however late.
        ([[50.0] * 7, [500.0] * 7], 600),  # Too few steps.
    ]:
        seen = skew.Skew(2)
        seen.add(with_own(few, step))
        assert seen.summary(["a", "b"])["straggler"] is None


def test_lines_are_about_the_newest_steps_and_of_several_stragglers_the_worst_is_named() -> None:
    seen = skew.Skew(8)
    for slow, steps in [(0, 20), (5, 20)]:
        own = [[50.0 + (30 if rank == slow else 20 if rank in (4, 6) else 0)] * steps for rank in range(8)]
        assert seen.add(with_own(own, 120))[0]["straggler"] == slow


def test_what_raises_is_no_step() -> None:
    waiting = Waiting(torch.device("cpu"))

    def fail() -> None:
        with waiting.step():
            raise RuntimeError("the loss jumped")

    with waiting.step():
        pass
    with pytest.raises(RuntimeError, match="jumped"):
        fail()
    sync, others, whole = waiting.take(None, 2)
    assert sync.isnan().all()
    assert others.isnan().tolist() == whole.isnan().tolist() == [False, True]


def assert_named(run: Run, rank: int, ranks: int) -> None:
    waiting = run.summary["waiting"]
    straggler = waiting["straggler"]
    assert straggler["rank"] == rank, waiting
    assert straggler["behind_ms"] > SLOW_MS / 2
    assert waiting["skew_p50_ms"] > SLOW_MS / 2
    assert f"rank {rank} on {straggler['host']}, " in run.output
    own = [of_rank["own_p50_ms"] for of_rank in waiting["ranks"]]
    waits = [of_rank["wait_p50_ms"] for of_rank in waiting["ranks"]]
    assert len(own) == len(waits) == ranks
    assert own.index(max(own)) == waits.index(min(waits)) == rank
    for line in run.lines:
        assert {"sync_wait_p50_ms", "sync_wait_p99_ms", "sync_wait_max_ms", "wait_p50_ms", "wait_max_ms"} <= line.keys()
    assert sum(line["last_rank"] == rank for line in run.lines) > len(run.lines) * 2 / 3
    assert run.lines[-1]["straggler"] == rank


@pytest.mark.slow
def test_the_slow_rank_is_named_and_trains_the_same(runs: Runs) -> None:
    slow = runs(RANKS, *TINY, "--inject", f"slow:1:{SLOW_MS}")
    assert f"[rank 1] --inject slow: {SLOW_MS} ms in each forward" in slow.output
    assert_named(slow, 1, 2)
    # DDP and FSDP have already waited for the slow rank, so little of the delay is left for the sync.
    assert slow.summary["waiting"]["ranks"][0]["sync_wait_p50_ms"] < SLOW_MS / 4
    even = runs(RANKS, *TINY)
    assert even.losses == slow.losses
    assert even.summary["parameters_sha256"] == slow.summary["parameters_sha256"]


@pytest.mark.long
@pytest.mark.alone
def test_one_slow_rank_of_four(runs: Runs) -> None:
    flags = ["--parallel", "fsdp2", "--update", "next_step", "--inject", f"slow:2:{2 * SLOW_MS}"]
    assert_named(runs(RANKS, *TINY, *flags, NPROC="4"), 2, 4)
