"""The old Monitor: lines of slots, TensorBoard; the alarm of scales that jump."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8dist import ConfigurationError, Monitor, ScaleJump, Slot, SlotStatistics
from fp8dist.state.statistics import JumpAlarm
from tests.support.logs import captured_log

pytestmark = pytest.mark.filterwarnings("ignore:fp8dist.Monitor is now:FutureWarning")

NAN, INF = math.nan, math.inf
A, B = Slot("layers.0.a", "input"), Slot('naïve "\n\u2028', "weight")


def scales(a: float, b: float = 1.0) -> list[SlotStatistics]:
    return [SlotStatistics(A, 1.0, a), SlotStatistics(B, 1.0, b)]


def read(path: Path) -> list[dict[str, Any]]:
    """Return the parsed lines. Reject NaN and Infinity, which Python's JSON reader accepts and others do not."""
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_a_line_per_slot_and_observation(tmp_path: Path) -> None:
    path = tmp_path / "newly" / "made" / "slots.jsonl"
    with Monitor(path) as monitor:
        monitor.observe(
            7, [SlotStatistics(A, 2.5, 128.0, 0.25, 0.0, 1, 0, 3, 4, 2, age=6), SlotStatistics(B, INF, NAN)]
        )
        monitor.observe(9, [])
        monitor.observe(11, [SlotStatistics(B, NAN, -INF, NAN, 5e-324)])
        first = {"amax": 2.5, "scale": 128.0, "saturated": 0.25, "underflow": 0.0}
        first |= {"amax_rank": 1, "saturated_rank": 0, "underflow_rank": 3}
        first |= {"amax_microbatch": 4, "saturated_microbatch": 2, "underflow_microbatch": None, "age": 6}
        nothing = dict.fromkeys(first)
        third = nothing | {"amax": "NaN", "scale": "-Infinity", "underflow": 5e-324}
        assert read(path) == [  # Before it is closed.
            {"step": 7, "slot": str(A), **first},
            {"step": 7, "slot": str(B), **nothing, "amax": "Infinity"},
            {"step": 11, "slot": str(B), **third},
        ]


@pytest.mark.parametrize(
    ("factor", "observed", "expected"),
    [
        pytest.param(
            4.0, [scales(1.0), scales(3.9), scales(15.6), scales(4.0), scales(0.5), scales(0.5)],
            [ScaleJump(A, 3, 3.9, 15.6, 4.0), ScaleJump(A, 5, 4.0, 0.5, 8.0)], id="up or down by the factor or more",
        ),
        pytest.param(2.0, [scales(1.0, 1.0), scales(2.0, 0.25)],
                     [ScaleJump(B, 2, 1.0, 0.25, 4.0), ScaleJump(A, 2, 1.0, 2.0, 2.0)], id="the largest first"),
        pytest.param(2.0, [[SlotStatistics(A, 1.0, NAN)], scales(64.0, 64.0), scales(NAN, NAN), scales(1.0, 1.0)], [],
                     id="new or cold slots"),
        pytest.param(2.0, [scales(1.0, 1.0), [SlotStatistics(A, 1.0, 1.0)], scales(1.0, 2.0)],
                     [ScaleJump(B, 3, 1.0, 2.0, 2.0)], id="compared with the last observed scale"),
        *(
            pytest.param(2.0, [scales(scale) for scale in (1.0, impossible, 8.0)], [], id=f"impossible {impossible}")
            for impossible in (0.0, INF, -1.0)
        ),
    ],
)  # fmt: skip
def test_scales_that_jump(
    factor: float, observed: list[list[SlotStatistics]], expected: list[ScaleJump], tmp_path: Path
) -> None:
    """Other ranks see the same, and write and log nothing."""
    alarm = JumpAlarm(factor, logs=False)
    monitor = Monitor(tmp_path / "slots.jsonl", tensorboard=tmp_path / "board", jump=factor, writes=False)
    with captured_log() as log:
        for step, statistics in enumerate(observed, 1):
            found = alarm.jumps(step, statistics)
            assert found == [jump for jump in expected if jump.step == step] == monitor.observe(step, statistics)
        monitor.close()
    assert log == []
    assert list(tmp_path.iterdir()) == []


def test_one_warning_names_the_first_few_slots() -> None:
    slots = [Slot(f"layers.{i}", "input") for i in range(8)]
    alarm = JumpAlarm(2.0, logs=True)
    alarm.jumps(1, [SlotStatistics(slot, 1.0, 1.0) for slot in slots])
    with captured_log() as log:
        alarm.jumps(50, [SlotStatistics(slot, 1.0, 16.0 + i) for i, slot in enumerate(slots)])
    ((_, message),) = log
    assert "step 50: 8 scale(s) jumped by a factor of 2 or more" in message
    assert [f"layers.{i}:input from 1 to {16 + i}" in message for i in range(8)] == [False] * 3 + [True] * 5
    assert message.endswith("and 3 more")
    for jump in (1, 0.5, -2.0, NAN, INF, True):
        with pytest.raises(ConfigurationError, match="jump must be a factor above 1"):
            Monitor(None, jump=jump)


def test_without_a_disk_or_tensorboard_there_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        if name.split(".")[0] == "tensorboard" or name.startswith("torch.utils.tensorboard"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with captured_log() as log:
        monitors = Monitor("/dev/full", jump=2.0), Monitor(tmp_path / "slots.jsonl", tensorboard=tmp_path / "board")
        jumps = [monitor.observe(step, scales(step)) for monitor in monitors for step in (1.0, 2.0)]  # type: ignore[arg-type]
    assert list(map(len, jumps)) == [0, 1, 0, 0]  # The alarm goes on.
    assert len(read(tmp_path / "slots.jsonl")) == 4
    assert not (tmp_path / "board").exists()
    board, full, jumped = (message for _, message in log)
    assert "pip install 'fp8dist[tensorboard]'" in board
    assert "an exporter is left out from now on: _LineFile.write: OSError: [Errno 28] No space left" in full
    assert "jumped" in jumped
