"""Right programs of each kind of parallelism compute the reference's gradients, whatever the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import exact_programs
from tests.support.exact import random_kind
from tests.support.ranks import RankPool
from tests.support.suite import NIGHTLY

ZERO_BUBBLE = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
"""They run parts of the backward by themselves, which checkpoints and ties do not allow: these models have none."""


def pipelined(schedule: str, chunks: int, ranks: int) -> dict[str, Any]:
    """Return what a pipeline's schedule needs. Each stage has a layer, and the last rank's loss is its own."""
    fixed = {"layers": chunks * ranks, "tied": False, **({"checkpointed": False} if schedule in ZERO_BUBBLE else {})}
    return {"program": "pipeline", "fixed": fixed, "shards": 2 * ranks, "schedule": schedule, "chunks": chunks}


def programs(ranks: int) -> dict[str, dict[str, Any]]:
    """Return the arguments of each program that so many ranks can run: its options, and what its models must have."""
    found: dict[str, dict[str, Any]] = {
        "ddp": {"program": "ddp", "shards": 2 * ranks},
        "fsdp2": {"program": "fsdp2", "shards": 2 * ranks, "fixed": {"hidden": 26, "vocabulary": 50}},  # Uneven shards.
        "dtensor_tp": {"program": "dtensor_tp", "shards": 2},
        "hand_tp": {"program": "hand_tp", "shards": 2},
        "hand_sp": {"program": "hand_sp", "shards": 2},
        "expert_parallel": {"program": "expert_parallel", "shards": 2, "fixed": {"experts": 2 * ranks}},
        **{schedule: pipelined(schedule, 1, ranks) for schedule in ("ScheduleGPipe", "Schedule1F1B")},
    }
    if ranks > 1:
        found["tied pipeline"] = {
            "program": "pipeline", "shards": 2 * ranks, "fixed": {"layers": ranks, "tied": True}
        }  # fmt: skip
    if ranks in (2, 3):  # Four would need eight layers.
        interleaved = ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS", *ZERO_BUBBLE)
        found |= {schedule: pipelined(schedule, 2, ranks) for schedule in interleaved}
    if ranks == 4:
        found["hsdp"] = {"program": "hsdp", "shards": 4}
        found["fsdp2_tp"] = {"program": "fsdp2_tp", "shards": 4, "fixed": {"tied": False}}
    return found


ALL = [(ranks, name) for ranks in (1, 2, 3, 4) for name in programs(ranks)]
ALWAYS = [
    (4, "fsdp2_tp"),
    *((2, name) for name in ("hand_sp", "expert_parallel", "tied pipeline")),
]
"""The others are nightly."""


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankPool]:
    """A pool of one rank."""
    pool = RankPool(1)
    yield pool
    pool.close()


def difference(name: str, seeds: list[int], folder: Path) -> str:
    """Return the first difference that a rank finds, and the model's kind; "" if there is none."""
    import torch.distributed as dist

    options = dict(programs(dist.get_world_size())[name])
    fixed, program, shards = options.pop("fixed", {}), options.pop("program"), options.pop("shards")
    for seed in seeds:
        kind = random_kind(seed, **fixed)
        report = exact_programs.report_of(program, kind, shards, folder / f"{seed}", **options)
        if not report.equal or report.compared < 8:
            return f"{kind}: {report}"
    return ""


def run(request: pytest.FixtureRequest, ranks: int, *arguments: Any, timeout: int = 220) -> None:
    """Compare on so many ranks. ``timeout``: in s."""
    pool = request.getfixturevalue({1: "one_rank", 2: "two_ranks", 3: "three_ranks", 4: "four_ranks"}[ranks])
    assert pool.run(difference, *arguments, timeout=timeout) == [""] * ranks


@pytest.mark.parametrize(
    ("ranks", "name"),
    [pytest.param(*case, marks=pytest.mark.slow if case in ALWAYS else NIGHTLY) for case in ALL],
)
def test_a_right_program_is_equal(request: pytest.FixtureRequest, ranks: int, name: str, tmp_path: Path) -> None:
    run(request, ranks, name, [ALL.index((ranks, name))], tmp_path)


@pytest.mark.long
@pytest.mark.nightly
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("ranks", "name"), ALL)
def test_twenty_models(request: pytest.FixtureRequest, ranks: int, name: str, tmp_path: Path) -> None:
    run(request, ranks, name, list(range(100, 120)), tmp_path, timeout=900)
