"""The monitor: its records of slots, and its detection of scale jumps."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8dist import ConfigurationError, Monitor, ScaleJump, Slot, SlotStatistics
from fp8dist.runs.run_files import keep_lines
from fp8dist.state.statistics import JumpAlarm
from tests.support.logs import captured_log

pytestmark = pytest.mark.filterwarnings("ignore:fp8dist.Monitor is now:FutureWarning")

NAN, INF = math.nan, math.inf
A, B = Slot("layers.0.a", "input"), Slot("layers.0.b", "weight")


def scales(a: float, b: float = 1.0) -> list[SlotStatistics]:
    return [SlotStatistics(A, 1.0, a), SlotStatistics(B, 1.0, b)]


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the parsed lines. Reject NaN and Infinity, which Python's JSON reader accepts and others do not."""
    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_line_per_slot_and_observation(tmp_path: Path) -> None:
    path = tmp_path / "made" / "slots.jsonl"
    with Monitor(path) as monitor:
        monitor.observe(
            7, [SlotStatistics(A, 2.5, 128.0, 0.25, 0.0, 1, 0, 3, 4, 2, age=6), SlotStatistics(B, 0.5, 4.0)]
        )
        monitor.observe(9, [])
        monitor.observe(11, [SlotStatistics(B, 0.5, 4.0)])
    first = {"amax": 2.5, "scale": 128.0, "saturated": 0.25, "underflow": 0.0}
    first |= {"amax_rank": 1, "saturated_rank": 0, "underflow_rank": 3}
    first |= {"amax_microbatch": 4, "saturated_microbatch": 2, "underflow_microbatch": None, "age": 6}
    second = dict.fromkeys(first) | {"amax": 0.5, "scale": 4.0}
    assert read(path) == [
        {"step": 7, "slot": "layers.0.a:input", **first},
        {"step": 7, "slot": "layers.0.b:weight", **second},
        {"step": 11, "slot": "layers.0.b:weight", **second},
    ]


def test_lines_are_json_whatever_the_numbers(tmp_path: Path) -> None:
    path = tmp_path / "slots.jsonl"
    odd = Slot('naïve "\n\u2028', "input")
    with Monitor(path) as monitor:
        monitor.observe(1, [SlotStatistics(odd, INF, NAN, NAN, 5e-324), SlotStatistics(A, NAN, -INF)])
        monitor.observe(2, [SlotStatistics(A, None, NAN)])
    first, second, third = read(path)
    assert first["slot"] == f"{odd.fqn}:input"
    assert (first["amax"], first["scale"], first["saturated"], first["underflow"]) == ("Infinity", None, None, 5e-324)
    assert (second["amax"], second["scale"]) == ("NaN", "-Infinity")
    assert (third["amax"], third["scale"]) == (None, None)
    assert float(first["amax"]) == INF


def test_an_observation_is_in_the_file_before_the_next(tmp_path: Path) -> None:
    with Monitor(tmp_path / "slots.jsonl") as monitor:
        monitor.observe(1, scales(1.0))
        assert len(read(tmp_path / "slots.jsonl")) == 2


def test_a_new_run_replaces_the_file(tmp_path: Path) -> None:
    for step in (1, 2):
        with Monitor(tmp_path / "slots.jsonl") as monitor:
            monitor.observe(step, scales(1.0))
    assert {line["step"] for line in read(tmp_path / "slots.jsonl")} == {2}


@pytest.mark.parametrize("torn", [b'{"step": 30, "slot": "layers', b'{"step": 20, "sc', b"\0" * 9, b"\xff\xfe", b"17"])
def test_a_resumed_run_drops_later_lines_and_a_torn_one(tmp_path: Path, torn: bytes) -> None:
    unbroken, broken = tmp_path / "unbroken.jsonl", tmp_path / "broken.jsonl"
    with Monitor(unbroken) as monitor:
        for step in (10, 20, 30, 40):
            monitor.observe(step, scales(float(step)))
    with Monitor(broken) as monitor:
        for step in (10, 20, 30):
            monitor.observe(step, scales(float(step)))
    with broken.open("ab") as file:
        file.write(torn)
    with Monitor(broken, resume_after=20) as monitor:
        for step in (30, 40):
            monitor.observe(step, scales(float(step)))
    assert broken.read_bytes() == unbroken.read_bytes()
    assert sorted(tmp_path.iterdir()) == [broken, unbroken]


def test_a_last_line_that_lacks_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    keep_lines(path, 2)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_resuming_without_a_file_begins_one(tmp_path: Path) -> None:
    with Monitor(tmp_path / "slots.jsonl", resume_after=5) as monitor:
        monitor.observe(6, scales(1.0))
    assert len(read(tmp_path / "slots.jsonl")) == 2


# Scales that jump --------------------------------------------------------------------------------------


def test_a_scale_jumps_up_or_down_by_the_factor_or_more() -> None:
    alarm = JumpAlarm(4.0, logs=False)
    assert alarm.jumps(1, scales(1.0)) == []
    assert alarm.jumps(2, scales(3.9)) == []
    assert alarm.jumps(3, scales(15.6)) == [ScaleJump(A, 3, 3.9, 15.6, 4.0)]
    assert alarm.jumps(4, scales(4.0)) == []
    assert alarm.jumps(5, scales(0.5)) == [ScaleJump(A, 5, 4.0, 0.5, 8.0)]
    assert alarm.jumps(6, scales(0.5)) == []


def test_the_largest_jump_is_first() -> None:
    alarm = JumpAlarm(2.0, logs=False)
    alarm.jumps(1, scales(1.0, 1.0))
    assert [jump.slot for jump in alarm.jumps(2, scales(2.0, 0.25))] == [B, A]


def test_slots_that_are_new_or_cold_do_not_jump() -> None:
    alarm = JumpAlarm(2.0, logs=False)
    alarm.jumps(1, [SlotStatistics(A, 1.0, NAN)])
    assert alarm.jumps(2, scales(64.0, 64.0)) == []
    assert alarm.jumps(3, scales(NAN, NAN)) == []
    assert alarm.jumps(4, scales(1.0, 1.0)) == []
    # A slot that is not observed for a while is compared with its last observed scale.
    assert alarm.jumps(5, [SlotStatistics(A, 1.0, 1.0)]) == []
    assert [jump.slot for jump in alarm.jumps(6, scales(1.0, 2.0))] == [B]


def test_an_impossible_scale_is_nothing_to_compare_with() -> None:
    for impossible in (0.0, INF, -1.0):
        alarm = JumpAlarm(2.0, logs=False)
        for scale in (1.0, impossible, 8.0):
            assert alarm.jumps(1, scales(scale)) == []


def test_no_alarms_unless_asked_for() -> None:
    monitor = Monitor(None)
    monitor.observe(1, scales(1.0))
    with captured_log() as log:
        assert monitor.observe(2, scales(1e9)) == []
    assert log == []


def test_one_warning_names_the_first_few_slots() -> None:
    slots = [Slot(f"layers.{i}", "input") for i in range(8)]
    alarm = JumpAlarm(2.0, logs=True)
    alarm.jumps(1, [SlotStatistics(slot, 1.0, 1.0) for slot in slots])
    with captured_log() as log:
        alarm.jumps(50, [SlotStatistics(slot, 1.0, 16.0 + i) for i, slot in enumerate(slots)])
    ((_, message),) = log
    assert "step 50: 8 scale(s) jumped by a factor of 2 or more" in message
    assert "layers.7:input from 1 to 23" in message
    assert "layers.3:input" in message
    assert "layers.2:input" not in message
    assert message.endswith("and 3 more")


def test_other_ranks_see_the_same_jumps_in_silence(tmp_path: Path) -> None:
    monitor = Monitor(tmp_path / "slots.jsonl", tensorboard=tmp_path / "board", jump=2.0, writes=False)
    with captured_log() as log:
        monitor.observe(1, scales(1.0))
        assert len(monitor.observe(2, scales(2.0))) == 1
        monitor.close()
    assert log == []
    assert list(tmp_path.iterdir()) == []


def test_a_jump_is_a_factor_above_one() -> None:
    for jump in (1, 0.5, -2.0, NAN, INF, True):
        with pytest.raises(ConfigurationError, match="jump must be a factor above 1"):
            Monitor(None, jump=jump)


# Trouble -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full: Linux has one")
def test_a_full_disk_does_not_end_the_training() -> None:
    with captured_log() as log, Monitor("/dev/full", jump=2.0) as monitor:
        monitor.observe(1, scales(1.0))
        monitor.observe(2, scales(1.0))
        assert len(monitor.observe(3, scales(2.0))) == 1
    first, second = (message for _, message in log)
    assert "an exporter is left out from now on: _LineFile.write: OSError: [Errno 28] No space left" in first
    assert "jumped" in second


# TensorBoard -------------------------------------------------------------------------------------------


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars that TensorBoard reads from the folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_gets_what_is_a_number(tmp_path: Path) -> None:
    board = tmp_path / "board"
    with Monitor(tmp_path / "slots.jsonl", tensorboard=board) as monitor:
        monitor.observe(3, [SlotStatistics(A, 2.5, NAN, 0.25, None, 1)])
        assert scalars(board)["fp8/layers.0.a:input/amax"] == [(3, 2.5)]  # Written at once.
        monitor.observe(6, [SlotStatistics(A, 3.5, 64.0)])
    assert scalars(board) == {
        "fp8/layers.0.a:input/amax": [(3, 2.5), (6, 3.5)],
        "fp8/layers.0.a:input/scale": [(6, 64.0)],
        "fp8/layers.0.a:input/saturated": [(3, 0.25)],
        "fp8/layers.0.a:input/amax_rank": [(3, 1.0)],
        "fp8/input/saturated": [(3, 0.25)],
    }
    assert len(read(tmp_path / "slots.jsonl")) == 2


def test_tensorboard_forgets_what_a_resumed_run_makes_anew(tmp_path: Path) -> None:
    for resume_after, steps, amax in ((None, (1, 2, 3), 1.0), (1, (2, 3), 5.0)):
        with Monitor(None, tensorboard=tmp_path, resume_after=resume_after) as monitor:
            for step in steps:
                monitor.observe(step, [SlotStatistics(A, amax, 1.0)])
    assert scalars(tmp_path)["fp8/layers.0.a:input/amax"] == [(1, 1.0), (2, 5.0), (3, 5.0)]


def test_without_tensorboard_there_are_json_lines_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*sys.modules]:
        if name.split(".")[0] == "tensorboard" or name.startswith("torch.utils.tensorboard"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with captured_log() as log, Monitor(tmp_path / "slots.jsonl", tensorboard=tmp_path / "board") as monitor:
        monitor.observe(1, scales(1.0))
        monitor.observe(2, scales(1.0))
    assert len(read(tmp_path / "slots.jsonl")) == 4
    assert not (tmp_path / "board").exists()
    ((_, message),) = log
    assert "pip install 'fp8dist[tensorboard]'" in message
