"""The example job's statistics of its ranks' times: quantiles computed by hand, and stragglers."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.lab import skew

Steps = list[list[tuple[float, float, float]]]
"""[rank][step]: ms (in the sync, in other collectives, in total)."""


def measured(steps: Steps) -> Any:
    """Return the times as the recorder delivers them: [ranks, 3, steps]."""
    return np.array(steps, dtype=np.float64).transpose(0, 2, 1)


def made_up(ranks: int, steps: int) -> Steps:
    """Return random times."""
    numbers = random.Random(0)
    one = lambda: (numbers.random(), 10 * numbers.random(), 20 + 10 * numbers.random())  # noqa: E731
    return [[one() for _ in range(steps)] for _ in range(ranks)]


def kinds_of(times: Sequence[tuple[float, float, float]]) -> dict[str, list[float]]:
    """Return the values that quantiles are of, by the start of their names."""
    return {
        "sync_wait": [sync for sync, _, _ in times],
        "wait": [sync + other for sync, other, _ in times],
        "own": [whole - sync - other for sync, other, whole in times],
    }


def require_quantiles(found: dict[str, Any], name: str, values: Sequence[float]) -> None:
    """Compare with the median, and with linear interpolation between the two values nearest to 0.99."""
    ordered = sorted(values)
    place = 0.99 * (len(ordered) - 1)
    below = math.floor(place)
    p99 = ordered[below] + (place - below) * (ordered[below + 1] - ordered[below])
    assert found[f"{name}_p50_ms"] == pytest.approx(statistics.median(values), abs=1e-4)
    assert found[f"{name}_p99_ms"] == pytest.approx(p99, abs=1e-4)


def with_own(own: Sequence[Sequence[float]], step: float) -> Steps:
    """Return times of ranks that wait for each other: own time plus wait is ``step``."""
    return [[(0.0, step - ms, step) for ms in of_rank] for of_rank in own]


def test_lines_are_over_the_ranks_and_the_summary_over_the_steps() -> None:
    steps, seen, lines = made_up(5, 30), skew.Skew(5), []
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


def test_without_fp8_there_are_the_other_waits() -> None:
    seen = skew.Skew(2)
    (line, *_) = seen.add(measured([[(math.nan, 5.0, 30.0)] * 9, [(math.nan, 25.0, 30.0)] * 9]))
    assert line["wait_max_ms"] == 25
    assert not [name for name in line if name.startswith("sync")]
    summary = seen.summary(["a", "b"])
    assert summary["straggler"] == {"rank": 0, "host": "a", "behind_ms": 20.0}
    assert [rank["sync_wait_p50_ms"] for rank in summary["ranks"]] == [None, None]
    assert "-" in skew.lines_of(summary)[-1]


def test_only_steps_that_ended_with_several_ranks_count() -> None:
    cut = (math.nan, math.nan, math.nan)
    seen, alone = skew.Skew(2), skew.Skew(1)
    first, last = seen.add(measured([[(1.0, 2.0, 9.0), cut], [(2.0, 2.0, 9.0), cut]]))
    assert (first["last_rank"], last) == (0, {})
    assert seen.summary(["a", "b"])["steps"] == 1
    assert seen.add(measured([[cut], [cut]])) == [{}]
    assert alone.add(measured([[(0.0, 0.0, 9.0)] * 2])) == [{}, {}]
    assert alone.summary(["a"]) is skew.Skew(2).summary(["a", "b"]) is None


def noisy(ranks: int, steps: int, slow: dict[int, float], noise: float = 4.0) -> Steps:
    """Return times with about 50 ms of own time, plus ``slow[rank]`` ms on slow ranks."""
    numbers = random.Random(ranks)
    own = [[50 + slow.get(rank, 0) + noise * numbers.random() for _ in range(steps)] for rank in range(ranks)]
    return with_own(own, 120)


def test_a_rank_that_is_slow_in_each_step_is_named_and_noise_is_not() -> None:
    for ranks in [2, 3, 4, 16]:
        hosts = [f"host{rank}" for rank in range(ranks)]
        seen = skew.Skew(ranks)
        lines = seen.add(measured(noisy(ranks, 24, {ranks - 1: 15})))
        straggler = seen.summary(hosts)["straggler"]
        assert (straggler["rank"], straggler["host"]) == (ranks - 1, hosts[-1])
        assert straggler["behind_ms"] == pytest.approx(15, abs=4)
        assert {line["straggler"] for line in lines} == {ranks - 1}
        text = skew.lines_of(seen.summary(hosts))[0]
        assert text.startswith("straggler: ")
        assert f"rank {ranks - 1} on host{ranks - 1}, " in text
        assert "; and" not in text
        seen = skew.Skew(ranks)
        lines = seen.add(measured(noisy(ranks, 24, {}, noise=60)))
        summary = seen.summary(hosts)
        assert (summary["straggler"], summary["also_behind"]) == (None, [])
        assert {line["straggler"] for line in lines} == {None}
        assert skew.lines_of(summary)[0].split() == ["straggler:", "none"]
    seen = skew.Skew(8)
    seen.add(measured(noisy(8, 24, {4: 20, 5: 30, 6: 20, 7: 20})))  # Half of the ranks: a slow host.
    summary = seen.summary(["a"] * 4 + ["b"] * 4)
    assert (summary["straggler"]["rank"], summary["straggler"]["host"]) == (5, "b")
    assert sorted(other["rank"] for other in summary["also_behind"]) == [4, 6, 7]
    assert "rank 5 on b, " in skew.lines_of(summary)[0]


def test_what_is_no_straggler() -> None:
    for own, step in [
        ([[50.0] * 20, [53.0] * 20], 120),  # 2.5% of the step.
        ([[2.0] * 20, [2.9] * 20], 4),  # A large part of it, but less than a millisecond.
        ([[50.0] * 20, [50.0] * 12 + [500.0] * 8], 600),  # Late in less than half of the steps, however late.
        ([[50.0] * 7, [500.0] * 7], 600),  # Too few steps.
    ]:
        seen = skew.Skew(2)
        seen.add(measured(with_own(own, step)))
        assert seen.summary(["a", "b"])["straggler"] is None


def test_lines_tell_of_the_newest_steps_and_memory_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skew, "KEPT_STEPS", 40)
    seen = skew.Skew(3)
    named = []
    for slow in [0] * 10 + [2] * 30:
        lines = seen.add(measured(noisy(3, 4, {slow: 30})))
        named.append(lines[0]["straggler"])
    assert named[0] is None  # Too few steps.
    assert set(named[1:10]) == {0}
    assert set(named[16:]) == {2}
    summary = seen.summary(["a"] * 3)
    assert 40 <= summary["steps"] < 44
    assert summary["straggler"]["rank"] == 2


def test_of_many_ranks_the_summary_has_the_extremes() -> None:
    ranks = 100
    own = [[float(50 + rank)] * 10 for rank in range(ranks)]
    seen = skew.Skew(ranks)
    seen.add(measured(with_own(own, 200)))
    summary = seen.summary(["a"] * ranks)
    assert [rank["rank"] for rank in summary["ranks"]] == [*range(8), *range(92, 100)]
    assert summary["skew_p50_ms"] == 99
    assert len(summary["also_behind"]) == 15
