"""Recorder: the folder of a run, written by any loop."""

from __future__ import annotations

import errno
import gc
import json
import math
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import DelayedScaling, Fallback, Recorder, SlotStatistics
from fp8dist.common.numbers import from_json
from fp8dist.errors import ConfigurationError, UnknownArgumentError
from fp8dist.runs import run_files
from fp8dist.runs.report.checkpoints import GOOD, saved_checkpoints
from fp8dist.runs.report.facts import verdict
from fp8dist.runs.report.folder import RunFolder
from fp8dist.runs.report.live import LiveRun
from fp8dist.runs.report.numbers import read_run
from fp8dist.runs.run_header import peaks_of
from tests.support.collectives import counted_collectives
from tests.support.forked import context
from tests.support.logs import captured_log
from tests.support.parallel import same_on_all_ranks
from tests.support.ranks import on_ranks
from tests.support.training import batch, make_net

SLOTS = 9


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def steps(folder: Path, name: str = "metrics") -> list[int]:
    return [line["step"] for line in read(folder, name)]


def kinds(folder: Path) -> list[str]:
    return [line["kind"] for line in read(folder, "events")]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def nothing(manager: Any) -> None:
    """Do nothing."""


class Job:
    """A net that is prepared, recorded and attached.

    Args:
        lr: by default, the optimizer changes no weight; with 0 the step would not count.
        prepared: options of ``prepare``. In a world of ranks, its group is always that of all.
        before, after: called before and after the recorder is made.
        made: options of the recorder.
    """

    def __init__(
        self,
        folder: Path,
        wrap: Callable[[Any], Any] = lambda net: net,
        lr: float = 1e-30,
        prepared: dict[str, Any] | None = None,
        scaler: Any = None,
        before: Callable[[fp8dist.StateManager], object] = nothing,
        after: Callable[[fp8dist.StateManager], object] = nothing,
        **made: Any,
    ) -> None:
        net = make_net()
        ranks = dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if ranks else (0, 1)
        shared = {"group": dist.group.WORLD} if ranks else {}
        self.manager = fp8dist.prepare(net, DelayedScaling(history_len=4), **shared, **(prepared or {}))
        before(self.manager)
        self.recorder = Recorder(folder, self.manager, **{"every": 3, **made})
        after(self.manager)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=lr)
        self.net = wrap(net)
        self.manager.attach(self.net, optimizer=self.optimizer, scaler=scaler)

    def step(self, index: int, planted: float | None = None) -> float:
        """Run a step, and return its loss. ``planted``: a number for one input element on the last rank."""
        x, y = batch(self.rank, index)
        if planted is not None and self.rank == self.size - 1:
            x[1, 2] = planted
        loss = (self.net(x) - y).square().mean()
        loss.backward()
        for parameter in self.net.parameters():  # A NaN stays in its step.
            parameter.grad.nan_to_num_(0, 0, 0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def train(self, steps: Iterable[int], planted: Mapping[int, float] | None = None) -> fp8dist.StateManager:
        """Run and log steps, and close the recorder."""
        with self.recorder:
            for step in steps:
                loss = torch.tensor(self.step(step, (planted or {}).get(step)))
                tokens = 8 * self.size
                self.recorder.log(step, loss=loss, grad_norm=torch.tensor(0.5 * step), tokens=tokens, mine=step / 4)
        return self.manager


def train(folder: Path, steps: int, after: int = 0, **options: Any) -> fp8dist.StateManager:
    """Train and record ``steps`` steps after a step."""
    return Job(folder, **{"resume_after": after or None, **options}).train(range(after + 1, after + steps + 1))


def test_a_run_without_fp8_is_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with Recorder(folder, peaks={"high": 2e12, "fp8": 4e12}) as recorder:
        for step in range(1, 4):
            recorder.log(step, loss=torch.tensor(math.nan if step == 2 else 1.5 / step), tokens=64, tries=step)
        recorder.event("saved", 3, path=Path("somewhere"))
    lines = read(folder, "metrics")
    assert [line["loss"] for line in lines] == [1.5, "NaN", 0.5]
    assert [(line["step"], line["tokens"], line["tries"]) for line in lines] == [(1, 64, 1), (2, 64, 2), (3, 64, 3)]
    assert [line.get("step_ms", 0.0) > 0 for line in lines] == [False, True, True]
    assert all(abs(line["time"] - time.time()) < 60 for line in lines)
    first, saved, last = read(folder, "events")
    assert first | {"time": 0} == {"step": 0, "time": 0, "kind": "start", "resumed_after": None, "ranks": 1}
    assert (saved["kind"], saved["step"], saved["path"]) == ("saved", 3, "somewhere")
    assert (last["kind"], last["step"]) == ("end", 3)
    header = RunFolder(folder).header
    assert (header["precision"], header["peaks"]) == ("float32", {"high": 2e12, "fp8": 4e12})
    assert (header["ranks"], header["hosts"], header["every"]) == (1, [socket.gethostname()], 10)
    assert header["versions"]["torch"] == torch.__version__
    assert header["modules"] == header["slots"] == []
    with pytest.raises(ZeroDivisionError), Recorder(folder):  # A new run, which an error ends.
        raise ZeroDivisionError
    assert read(folder, "events")[-1]["error"] == "ZeroDivisionError"


@pytest.mark.parametrize(
    "recipe", [DelayedScaling(), fp8dist.BlockScaling(), fp8dist.MXFP8Scaling(), fp8dist.NVFP4Scaling()], ids=repr
)
def test_no_slot_of_a_sound_run_is_in_trouble(recipe: fp8dist.Recipe, tmp_path: Path) -> None:
    """Scales that are rounded down cut off a tenth of a weight as ``nn.Linear`` makes it, and E2M1 has few numbers."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    manager = fp8dist.prepare(net, recipe)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-30)
    with Recorder(tmp_path, manager, every=1) as recorder:
        manager.attach(net, optimizer=optimizer)
        for step in (1, 2):
            net(torch.randn(256, 64)).backward(torch.randn(256, 64))
            optimizer.step()
            recorder.log(step)
    run = LiveRun(tmp_path)
    run.read()
    assert len(run.observed()) == 6
    assert [(slot.name, slot.what) for slot in run.troubled(6)] == []


def test_numbers_of_a_due_step_are_those_of_the_state(tmp_path: Path) -> None:
    manager = Job(tmp_path).train(range(1, 7), {6: 3e4})
    lines, metrics = read(tmp_path, "metrics"), manager.metrics()
    due = [line for line in lines if "cold_slots" in line]
    assert [line["step"] for line in due] == [3, 6]
    for name in ("cold_slots", "nonfinite_amaxes", "saturated_amaxes", "high_precision_modules", "fallbacks"):
        assert due[1][name] == metrics[f"fp8/{name}"]
    assert due[1]["saturated_amaxes"] > due[0]["saturated_amaxes"]
    assert (due[1]["proven"], due[1]["checked"]) == (None, None)  # One rank proves nothing.
    assert [(line["grad_norm"], line["mine"]) for line in lines] == [(0.5 * i, i / 4) for i in range(1, 7)]
    for line in read(tmp_path, "scales")[SLOTS:]:
        assert line["amax"] == manager.slot(*line["slot"].rsplit(":", 1)).amax.item()
    assert read(tmp_path, "ranks")[1]["ranks"] == [0]
    header = RunFolder(tmp_path).header
    assert [slot["slot"] for slot in header["slots"]] == [str(slot) for slot in manager.slots]
    gemms = dict.fromkeys(("fprop", "dgrad", "wgrad"), "fp8")
    assert header["modules"][0] == {"module": "first", "flops": 2 * 32 * 48, "gemms": gemms, "reason": ""}
    assert (header["device"], header["precision"], header["every"]) == ("cpu", "fp8", 3)
    assert peaks_of("NVIDIA H100 80GB HBM3") == {"high": 989.5e12, "fp8": 1979e12}
    assert peaks_of("NVIDIA H100 PCIe") == {"high": 756e12, "fp8": 1513e12}
    assert peaks_of("NVIDIA GB200") == {"high": 2.5e15, "fp8": 5e15}
    assert peaks_of("NVIDIA A100-SXM4-80GB") is peaks_of("cpu") is None
    for part in ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU"):
        assert peaks_of(part) is None


def test_events_are_the_managers_and_name_who_held_a_nan(tmp_path: Path) -> None:
    prepared = {"fallback": Fallback(steps=1)}
    job = Job(tmp_path, prepared=prepared, before=lambda manager: fp8dist.watch(manager, 3, jump=2.0))
    manager = job.train(range(1, 7), {3: math.nan, 4: 1e4, 5: math.nan})
    events = read(tmp_path, "events")
    nonfinite = [event for event in events if event["kind"] == "nonfinite"]
    assert [event["step"] for event in nonfinite] == [3, 5]
    who = {"rank": 0, "microbatch": 0, "module": "first", "role": "input"}
    assert who.items() <= nonfinite[0].items()  # A step that the watch saw.
    assert not who.keys() & nonfinite[1].keys()
    assert "first:input" in nonfinite[1]["slots"]
    fallback = next(event for event in events if event["kind"] == "fallback")
    assert (fallback["step"], fallback["slots"]) == (3, nonfinite[0]["slots"])
    assert {str(slot) for slot in manager.slots} >= set(fallback["slots"])
    assert [event["step"] for event in events if event["kind"] == "jump"] == [6]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_watch_of_the_users_own_goes_on_and_a_reset_of_the_state_is_none_of_the_run(
    when: str, tmp_path: Path
) -> None:
    seen: list[int] = []
    own = {when: lambda manager: fp8dist.watch(manager, 2, observer=lambda one: seen.append(one.step))}
    job = Job(tmp_path, **own)
    for step in range(1, 7):
        job.step(step)
        if step == 4:
            job.manager.reset()
    job.recorder.close()
    before = files(tmp_path)
    job.step(7)
    job.step(8)
    job.step(9)
    assert (seen, job.manager.run_step) == ([2, 4, 6, 8], 9)
    assert steps(tmp_path, "scales") == [3] * SLOTS + [6] * SLOTS
    assert files(tmp_path) == before  # After the end nothing is written: another job may have the folder by now.


def test_a_resume_drops_later_numbers_and_a_new_run_all(tmp_path: Path) -> None:
    train(tmp_path, 5)
    for name in ("metrics", "events"):  # As if killed in the middle of a line.
        with (tmp_path / f"{name}.jsonl").open("a") as file:
            file.write('{"step": 5, "lo')
    assert train(tmp_path, 3, after=3).run_step == 6
    assert (steps(tmp_path), steps(tmp_path, "ranks")) == ([1, 2, 3, 4, 5, 6], [3, 6])
    assert steps(tmp_path, "scales") == [3] * SLOTS + [6] * SLOTS
    events = list(RunFolder(tmp_path).lines("events.jsonl").new())
    assert [(event["kind"], event["step"]) for event in events] == [("start", 0), ("end", 5), ("start", 3), ("end", 6)]
    assert events[2]["resumed_after"] == 3
    Job(tmp_path, every=0, resume_after=4).recorder.close()  # What it does not write, it drops as well.
    assert steps(tmp_path, "scales") == [3] * SLOTS
    with Recorder(tmp_path, fp8dist.prepare(make_net(), enabled=False), resume_after="state") as recorder:
        recorder.log(4, loss=0.0)  # With FP8 switched off, the first step that is logged is known.
    assert steps(tmp_path) == [1, 2, 3, 4]
    with Recorder(tmp_path) as recorder:
        recorder.log(1, loss=2.0)
    assert (steps(tmp_path), steps(tmp_path, "ranks")) == ([1], [])
    assert not (tmp_path / "scales.jsonl").exists()
    assert len(list(RunFolder(tmp_path).lines("events.jsonl").new())) == 10  # Events stay.


@pytest.mark.parametrize("early", [True, False])
def test_a_run_continues_from_the_state_that_is_loaded(tmp_path: Path, early: bool) -> None:
    """Until a step after it, the folder is left alone, also by a check. That step is observed before it is logged."""
    state = train(tmp_path, 3).state_dict()
    train(tmp_path, 5)
    before = files(tmp_path)
    load = {"before": lambda manager: manager.load_state_dict(state)} if early else {}
    job = Job(tmp_path, every=1, resume_after="state", **load)
    job.manager.check(policy="warn")
    if not early:
        job.manager.load_state_dict(state)
    assert files(tmp_path) == before
    job.train((4, 5, 6))
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert steps(tmp_path, "scales") == [step for step in (3, 4, 5, 6) for _ in range(SLOTS)]
    before = files(tmp_path)
    Recorder(tmp_path, fp8dist.prepare(make_net()), resume_after="state").close()
    assert files(tmp_path) == before
    train(tmp_path, 2, resume_after="state")  # Without a loaded state a run is a new one as soon as it steps.
    assert steps(tmp_path) == [1, 2]
    starts = [event["resumed_after"] for event in read(tmp_path, "events") if event["kind"] == "start"]
    assert starts == [None, None, 3, None]


def test_what_happens_before_the_first_step_drops_no_line(tmp_path: Path) -> None:
    """A note of the program, a check that finds a difference: the state may be loaded after it."""
    state = train(tmp_path, 3).state_dict()
    train(tmp_path, 5)
    before = files(tmp_path)
    for loads in (False, True):  # It ends before it has loaded the state, or after that.
        job = Job(tmp_path, resume_after="state")
        if loads:
            job.manager.load_state_dict(state)
        with job.recorder as recorder:
            recorder.event("note", 0)
        assert files(tmp_path) == before
    sink = Sink()
    job = Job(tmp_path, resume_after="state", exporters=[sink])
    job.recorder.event("note", 0, text="no state yet")
    job.manager.load_state_dict(state)
    assert files(tmp_path) == before
    job.step(4)
    assert kinds(tmp_path)[-2:] == ["start", "note"]
    assert sink.of("event") == read(tmp_path, "events")[-2:]
    job.train((5, 6))
    assert steps(tmp_path) == [1, 2, 3, 5, 6]
    assert read(tmp_path, "events")[-3]["resumed_after"] == 3
    with Job(tmp_path / "new", resume_after="state").recorder as recorder:
        recorder.event("note", 0)
    assert kinds(tmp_path / "new") == ["start", "note", "end"]


def test_a_folder_that_cannot_be_written_to_ends_no_step(tmp_path: Path) -> None:
    """The run begins inside its first step, on one rank: an error would leave the others in their next collective."""
    state = train(tmp_path, 3).state_dict()
    (tmp_path / "ranks.jsonl").unlink()
    (tmp_path / "ranks.jsonl").mkdir()
    before, sink = files(tmp_path), Sink()
    job = Job(tmp_path, every=1, resume_after="state", exporters=[sink])
    job.manager.load_state_dict(state)
    with captured_log() as log:
        assert job.train((4, 5)).run_step == 5
    ((_, text),) = [line for line in log if "record" in line[1]]
    assert text.startswith(f"fp8dist: nothing is recorded: {tmp_path}: cannot record there: Is a directory")
    assert files(tmp_path) == before
    assert [step for step, _, slots in sink.of("numbers")] == [4, 5]


def test_lines_that_a_resume_keeps_are_whole_and_of_no_later_step(tmp_path: Path) -> None:
    good = ['{"step": 1, "x": 1}', '{"x": {"y": 1}, "step": 2}', '{"step": 3}', '{"step": 2, "x": "}{"}']
    bad = ['{"step": 4}', '{"step": 1, "x": {"step": 2, "x": 1}', '{"step": "1"}', "[]", "{", "", '{"step": 1, "x": 1']
    path = tmp_path / "scales.jsonl"
    run_files.keep_lines(path, 3)  # There is no file yet.
    for torn in (bad[-1].encode(), b'{"step": 2, "sc', b"\0" * 9, b"\xff\xfe", b"17"):
        path.write_text("\n".join(line for lines in zip(bad, [*good, *good]) for line in lines) + "\n")
        path.write_bytes(path.read_bytes() + torn)
        run_files.keep_lines(path, 3)
        assert path.read_text().splitlines() == [*good, *good[:3]]
    path.write_text(f"{good[0]}\n{good[2]}")  # A last line that lacks its newline is kept.
    run_files.keep_lines(path, 3)
    assert path.read_text() == f"{good[0]}\n{good[2]}\n"
    assert [*tmp_path.iterdir()] == [path]


def test_a_resume_on_a_full_disk_leaves_no_part_of_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path, 3)
    before = files(tmp_path)

    def full(text: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_files, "_step_of", full)
    with pytest.raises(ConfigurationError, match="cannot record there: No space left on device"):
        Recorder(tmp_path, resume_after=2)
    assert files(tmp_path) == before


@pytest.mark.filterwarnings("ignore:fp8dist.Recorder.jump=…. is now:FutureWarning")
def test_a_call_that_is_refused_leaves_an_earlier_run_as_it_is(tmp_path: Path) -> None:
    train(tmp_path, 6)
    before = files(tmp_path)
    net = make_net()
    attached = fp8dist.prepare(net).attach(optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    (tmp_path / "file").write_text("")
    calls: list[tuple[str, Any, dict[str, Any], str]] = [
        ("", attached, {}, "attach"),
        ("", fp8dist.prepare(make_net()), {"jump": 0.5}, "jump must be a factor"),
        ("", fp8dist.prepare(make_net()), {"resume_after": "6"}, "resume_after must be"),
        ("", fp8dist.prepare(make_net()), {"resume_after": True}, "resume_after must be"),
        ("", None, {"every": -1}, "every must be a number of steps"),
        ("", None, {"resume_after": "state"}, "needs the manager"),
        ("file/run", None, {}, r"file/run: cannot record there: Not a directory: give a folder"),
    ]
    for where, manager, made, message in calls:
        with pytest.raises(ConfigurationError, match=message) as caught:
            Recorder(tmp_path / where, manager, **made)
        assert "\n" not in str(caught.value)
    with pytest.raises(UnknownArgumentError):
        Recorder(tmp_path, evry=3)  # type: ignore[call-arg]
    (tmp_path / "file").unlink()
    assert files(tmp_path) == before
    first = Recorder(tmp_path, resume_after=6)  # All those have released the lock.
    before = files(tmp_path)
    with pytest.raises(ConfigurationError, match="another process records a run there"):
        Recorder(tmp_path)
    assert files(tmp_path) == before
    del first  # It is dropped, and releases the lock.
    gc.collect()
    with Recorder(tmp_path) as recorder:
        for value in ("1.5", [1.5], torch.zeros(2)):
            with pytest.raises(ConfigurationError, match=r"log\(loss=…\) takes a number or a tensor with one element"):
                recorder.log(1, loss=value)
        with pytest.raises(ConfigurationError, match="step must be"):
            recorder.log(1.5, loss=1.0)  # type: ignore[arg-type]
    recorder.log(2, loss=1.0)  # After the end: nothing.
    assert read(tmp_path, "metrics") == []


@on_ranks(2)
def test_what_one_rank_cannot_write_is_refused_on_all(tmp_path: Path) -> None:
    """A rank that raises alone leaves the others in their next collective."""
    mesh = init_device_mesh("cpu", (2,))
    part = DTensor.from_local(torch.ones(()), mesh, [Partial()])  # A read would be 1, this rank's part of 2.
    same = DTensor.from_local(part.full_tensor(), mesh, [Replicate()])
    texts = []
    with Recorder(tmp_path) as recorder:
        for number in (part, torch.tensor(1j), torch.ones((), device="meta")):
            with pytest.raises(ConfigurationError) as caught:
                recorder.log(1, grad_norm=number)
            texts.append(str(caught.value))
        fields: dict[str, Any]
        for step, fields in ((1, {"x": {(1, 2): 3}}), ("1", {})):
            with pytest.raises(ConfigurationError) as caught:
                recorder.event("mine", step, **fields)  # type: ignore[arg-type]
            texts.append(str(caught.value))
        recorder.log(1, grad_norm=same, mine=10**400)
    same_on_all_ranks(texts)
    assert "log grad_norm.full_tensor()" in texts[0]
    assert not any("\n" in text for text in texts)
    (line,) = read(tmp_path, "metrics")
    assert (line["grad_norm"], line["mine"]) == (2.0, "Infinity")


def _log_until_killed(folder: str) -> None:
    """Log until killed. A worker writes an event first, and lives until there is a file ``end``."""
    recorder = Recorder(folder)
    reads, writes = os.pipe()
    if not os.fork():
        recorder.event("worker", 0)
        os.write(writes, b"x")
        deadline = time.monotonic() + 60
        while not (Path(folder) / "end").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os._exit(0)
    os.read(reads, 1)
    for step in range(1, 10**6):
        recorder.log(step, loss=step / 3)


def test_killed_between_two_writes_it_loses_at_most_one_line_and_the_lock(tmp_path: Path) -> None:
    """A worker that outlives it does not keep the lock, as those of a DataLoader, which look for their parent every
    five seconds."""
    process = context().Process(target=_log_until_killed, args=(str(tmp_path),))
    process.start()
    metrics, deadline = tmp_path / "metrics.jsonl", time.monotonic() + 30
    while not (metrics.exists() and metrics.stat().st_size > 20_000):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    lines = RunFolder(tmp_path).lines("metrics.jsonl")
    found = [line["step"] for line in lines.new()]
    assert found == list(range(1, len(found) + 1))
    assert lines.left_out == 0
    try:
        with Recorder(tmp_path, resume_after=found[-1]) as recorder:
            recorder.log(found[-1] + 1, loss=0.0)
    finally:
        (tmp_path / "end").touch()
    assert steps(tmp_path) == [*found, found[-1] + 1]
    assert kinds(tmp_path) == ["start", "worker", "start", "end"]


def test_a_full_disk_or_a_deleted_folder_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, write = Recorder(tmp_path), os.write
    assert recorder._files is not None
    monkeypatch.setattr(run_files.os, "write", lambda file, text: write(file, text[:7]))
    recorder.log(1, loss=1.0)  # Writes that are cut short go on.
    assert read(tmp_path, "metrics")[0]["loss"] == 1.0
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, recorder._files._files["metrics.jsonl"])
    os.close(full)
    with captured_log() as log, recorder:
        for step in range(2, 4):
            recorder.log(step, loss=1.0)
    ((_, text),) = log
    assert text == f"fp8dist: nothing more is recorded: {tmp_path / 'metrics.jsonl'}: No space left on device"
    assert kinds(tmp_path) == ["start"]  # Not even an event.
    recorder = Recorder(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with captured_log() as log, recorder:
        for step in range(1, 4):
            recorder.log(step, loss=1.0)
    ((_, text),) = log
    assert text.endswith(f"recorded: {tmp_path / 'run/metrics.jsonl'}: No such file or directory")


class Sink:
    """An exporter that keeps what it gets, and may fail."""

    def __init__(self, fails: bool = False) -> None:
        self.got: list[tuple[str, Any]] = []
        self.fails = fails

    def write(self, step: int, numbers: Mapping[str, float], slots: Sequence[SlotStatistics]) -> None:
        if self.fails:
            raise RuntimeError("no\nroute")
        self.got.append(("slots" if slots else "numbers", (step, dict(numbers), list(slots))))

    def event(self, event: Mapping[str, Any]) -> None:
        self.got.append(("event", dict(event)))

    def close(self) -> None:
        self.got.append(("close", None))

    def of(self, kind: str) -> list[Any]:
        return [got for one, got in self.got if one == kind]


def test_exporters_get_what_the_files_get(tmp_path: Path) -> None:
    sink, broken = Sink(), Sink(fails=True)
    with captured_log() as log:
        train(tmp_path, 3, exporters=[broken, sink])
    assert [text for _, text in log if "exporter" in text] == [
        "fp8dist: an exporter is left out from now on: Sink.write: RuntimeError: no route"
    ]
    assert [kind for kind, _ in broken.got] == ["event"]
    assert [kind for kind, _ in sink.got] == ["event", "numbers", "numbers", "slots", "numbers", "event", "close"]
    for (step, numbers, _), line in zip(sink.of("numbers"), read(tmp_path, "metrics"), strict=True):
        assert step == line.pop("step")
        assert line.pop("time") > 0
        exact = {name: repr(float(from_json(value))) for name, value in line.items()}
        assert {name: repr(float(value)) for name, value in numbers.items()} == exact
    ((step, numbers, slots),) = sink.of("slots")
    assert (step, numbers) == (3, {})
    for one, line in zip(slots, read(tmp_path, "scales"), strict=True):
        assert {"step": 3, "slot": str(one.slot), **dict(one.numbers())} == line
    assert sink.of("event") == read(tmp_path, "events")


@pytest.mark.parametrize(("every", "ranks"), [(3, True), (3, False), (0, True)])
@on_ranks(2)
def test_collectives_are_the_watchs_and_no_others(tmp_path: Path, every: int, ranks: bool) -> None:
    with counted_collectives() as calls, captured_log() as log:
        manager = Job(tmp_path, every=every, ranks=ranks).train(range(1, 7), {6: math.nan})
    watch = 8 * (3 * SLOTS + 2 * 2) if ranks else 4 * 3 * SLOTS
    weights, sync = 4 * SLOTS, 4 * (8 + SLOTS)
    compared, *sizes = calls.sizes  # What the ranks start with.
    assert compared <= 128
    assert sorted(sizes) == sorted([weights] + [sync] * 6 + [watch] * (2 if every else 0))
    dist.barrier()
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "scales.jsonl").exists() == bool(every)
    header = RunFolder(tmp_path).header
    assert (header["ranks"], header["hosts"]) == (2, [socket.gethostname()] * 2)
    (event,) = [line for line in read(tmp_path, "events") if line["kind"] == "nonfinite"]
    assert event["step"] == 6
    assert event.get("module") == ("first" if every else None)
    assert (event.get("rank"), event.get("microbatch")) == ((1, 0) if every and ranks else (None, None))
    place = ", rank 1, microbatch 0" if ranks else ""
    culprit = f"not finite, first in first, input{place}: their" if every else "not finite: their"
    logged = [text for _, text in log if "were not finite" in text]
    assert [culprit in text for text in logged] == ([True] if dist.get_rank() == 0 else [])
    if every:
        due = next(line for line in read(tmp_path, "metrics") if line["step"] == 6)
        assert (due["proven"], due["nonfinite_amaxes"]) == (6, manager.metrics()["fp8/nonfinite_amaxes"])
        waited = [line["sync_ms"] for line in read(tmp_path, "metrics") if "sync_ms" in line]
        if dist.get_rank() == 0:  # Which has written its own. Each is the mean of 3 steps.
            assert 3 * sum(waited) == pytest.approx(manager.metrics()["fp8/sync_wait_ms"])
    observed = read(tmp_path, "ranks")
    assert [line["step"] for line in observed] == ([3, 6] if every and ranks else [])
    for line in observed:
        assert line["ranks"] == [0, 1]
        assert all(ms > 0 for ms in line["step_ms"])
        assert all(ms >= 0 for ms in line["sync_wait_ms"])


@pytest.mark.slow
@on_ranks(2)
def test_a_slow_rank_shows_in_the_waits_of_the_others(tmp_path: Path) -> None:
    job = Job(tmp_path, every=4)
    hook = job.net.register_forward_hook(lambda *_: time.sleep(0.2 * job.rank))
    for _ in range(4):
        job.step(0)
    hook.remove()
    taken = fp8dist.take_waits(job.manager)  # Its reader loses nothing to the recorder.
    assert len(taken) == 4
    job.recorder.close()
    dist.barrier()
    (line,) = read(tmp_path, "ranks")
    fast, slow = line["sync_wait_ms"]
    assert fast > slow + 100


@pytest.mark.parametrize("ddp", [True, False])
@on_ranks(2)
def test_proven_and_checked_steps(ddp: bool, tmp_path: Path) -> None:
    """Without DDP no parameter is known to be replicated: then no step is checked, and the events say why."""
    wrap: dict[str, Any] = {"wrap": DistributedDataParallel} if ddp else {}
    job = Job(tmp_path, prepared={"check_every": 2}, **wrap)
    with captured_log():
        manager = job.train(range(1, 7))
    metrics = manager.metrics()
    # The check after step 6 would come in the next step.
    assert (manager.verified.proven_step, manager.verified.checked_step) == (6, 4 if ddp else None)
    assert (metrics["fp8/proven_step"], metrics["fp8/checked_step"]) == (6.0, 4.0 if ddp else 0.0)
    assert (metrics["fp8/compared_parameters"], metrics["fp8/compared_slots"]) == (6.0 if ddp else 0.0, SLOTS)
    sizes = 4 * sum(parameter.numel() for parameter in make_net().parameters()) if ddp else 0
    assert metrics["fp8/compared_bytes"] > sizes
    dist.barrier()
    events = [event for event in read(tmp_path, "events") if event["kind"] == "checked"]
    assert [event["step"] for event in events] == [2, 4]
    compared = {"parameter": 6, "slot": SLOTS} if ddp else {"slot": SLOTS}
    why = "6 parameters not known to be replicated: name their group or axes, as in fp8dist.check(model, group=…)"
    for event in events:
        assert (event["compared"], event["nonfinite"]) == (compared, [])
        assert event["unverified"] == ({} if ddp else {"parameter": why})
        assert event["compared_bytes"].get("parameter", 0) == sizes


@pytest.mark.parametrize(
    ("logged", "warned", "undone"),
    [
        ((0, 1, 2), "", []),
        ((1, 2, 2, 3), "given step 2 after step 2", []),
        ((1, 5, 6, 3, 4, 5, 2), "given step 3 after step 6", [2, 1]),
        ((4, 0), "given step 0 after step 4", [-1]),
    ],
)
def test_steps_that_repeat_or_go_back_are_said_once(
    logged: Sequence[int], warned: str, undone: list[int], tmp_path: Path
) -> None:
    with captured_log() as log, Recorder(tmp_path) as recorder:
        for step in logged:
            recorder.log(step, loss=1.0)
    assert [warned in text for _, text in log] == ([True] if warned else [])
    assert steps(tmp_path) == list(logged)
    assert [e["resumed_after"] for e in read(tmp_path, "events") if e["kind"] == "start"] == [None, *undone]


def test_steps_that_run_ahead_of_the_optimizer_are_said_once(tmp_path: Path) -> None:
    """A loop may log before the optimizer's step. Steps that a GradScaler skips move it further ahead."""
    for ahead in (0, 1, 2):
        with captured_log() as log:
            job = Job(tmp_path, every=1)
            for step in (1, 2, 3):
                job.step(step)
                job.recorder.log(step + ahead)
            job.recorder.close()
        assert sum("Log manager.run_step" in text for _, text in log) == (ahead == 2)


@pytest.mark.parametrize(("skips", "given"), [((6, 7), True), ((1, 4), True), ((6, 7), False)])
def test_a_step_that_the_scaler_skips_leaves_the_numbers_of_the_one_before(
    skips: tuple[int, ...], given: bool, tmp_path: Path
) -> None:
    """The loop logs ``run_step``, which does not advance: no warning, and the lost loss is not that of a sound step."""
    sink, scaler = Sink(), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    job = Job(tmp_path, lr=1e-3, scaler=scaler if given else None, every=1, exporters=[sink])
    manager, recorder = job.manager, job.recorder
    logged = {}
    with captured_log() as log, recorder:
        for i in range(1, 10):
            job.optimizer.zero_grad()
            loss = job.net(batch(0, i)[0]).square().mean() * (math.inf if i in skips else 1.0)
            scaler.scale(loss).backward()
            scaler.step(job.optimizer)
            scaler.update()
            recorder.log(manager.run_step, loss=loss.detach())
            if i in skips:
                recorder.log(manager.run_step, grad_norm=math.inf)
            else:
                logged[manager.run_step] = loss.item()
    assert [text for _, text in log if "recorder" in text] == []
    lines = read(tmp_path, "metrics")
    assert {line["step"]: line["loss"] for line in lines if "loss" in line} == logged
    for name in ("skipped_loss", "skipped_grad_norm"):
        assert [line[name] for line in lines if name in line] == ["Infinity"] * len(skips)
    run, live = read_run(tmp_path), LiveRun(tmp_path)
    live.read()
    assert (run.metrics.bad_losses, run.metrics.bad_norms) == ((), ())
    assert run.metrics.newest("loss") == live.loss == logged[7]
    assert "not finite" not in verdict(run).text
    assert live.sound[0] is not False
    assert {step: got["loss"] for step, got, _ in sink.of("numbers") if "loss" in got} == logged


@on_ranks(2)
def test_a_divergence_and_a_load_that_goes_back_are_recorded(tmp_path: Path) -> None:
    """A check when it ends, not with the next line of the log: a job may save its checkpoint in between, and be killed.
    A program that goes back in a run loads, and may check before it logs: what it had saved later was not compared."""
    job = Job(tmp_path, wrap=DistributedDataParallel, prepared={"check_policy": "warn"}, every=2)
    with captured_log() as log, job.recorder as recorder:
        for step in range(1, 5):
            if step == 3 and job.rank == 1:
                job.manager.slot("first", "input").set_scale(3.0)
            if step == 4:
                assert job.manager.verified.proven_step == 2
            job.step(0)
            if step == 1:
                job.manager.check()
                recorder.event("saved", 1, path="here")
                state = job.manager.state_dict()
            recorder.log(step, loss=1.0)
        job.manager.load_state_dict(state)
        job.manager.check()
        job.step(0)
        recorder.log(2)
    assert sum("given step 2 after step 4" in text for _, text in log) == (job.rank == 0)
    dist.barrier()
    events = read(tmp_path, "events")
    assert [(event["kind"], event["step"]) for event in events] == [
        *(("start", 0), ("checked", 1), ("saved", 1), ("diverged", 3), ("start", 1), ("checked", 1), ("end", 2))
    ]
    assert events[3]["report"]["findings"][0]["name"] == "first:input"
    assert read(tmp_path, "metrics")[3]["proven"] == 4


@pytest.mark.parametrize("fp8", [False, True])
@on_ranks(3)
def test_checks_by_a_call_are_recorded(fp8: bool, tmp_path: Path) -> None:
    """Also the error that ends a run without one. What was saved before a repair may hold the difference. Each is
    written once, also if the manager tells of it."""
    plain = make_net()
    manager = fp8dist.prepare(plain, group=dist.group.WORLD) if fp8 else None
    net = DistributedDataParallel(plain)

    def run() -> None:
        with Recorder(tmp_path, manager) as recorder:
            for step, policy in ((1, "raise"), (3, "repair"), (4, "warn")):
                recorder.log_check(step, fp8dist.check(net, step=step, policy=policy))  # type: ignore[arg-type]
                recorder.event("saved", step, path=f"step-{step}")
                if step < 4 and dist.get_rank() == 1:
                    next(net.parameters()).data.view(-1)[0] += 1
                if step == 1:
                    recorder.event("saved", 2, path="step-2")
            fp8dist.check(net, step=5)

    with captured_log(), pytest.raises(fp8dist.DivergenceError):
        run()
    dist.barrier()
    repaired = ["start", "checked", "saved", "saved", "diverged", "checked", "saved"]
    assert kinds(tmp_path) == [*repaired, "diverged", "saved", "diverged", "end"]
    checked, *found = [line for line in read(tmp_path, "events") if line["kind"] in ("checked", "diverged")]
    assert checked["compared"] == {"parameter": sum(1 for _ in net.parameters())}
    told = [(line["step"], line["report"]["findings"][0]["last_good_step"]) for line in found if "report" in line]
    assert told == [(0 if fp8 else step, good) for step, good in ((3, 1), (4, 3), (5, 3))]  # FP8 has made no step.
    states = [one.state for one in saved_checkpoints(read_run(tmp_path))]
    assert states == [GOOD, "after a divergence", GOOD, "after a divergence"]


@on_ranks(2)
def test_groups_have_their_own_collectives_and_one_rank_writes(tmp_path: Path) -> None:
    alone = [dist.new_group([member]) for member in range(2)][dist.get_rank()]
    shared, apart = tmp_path / "shared", tmp_path / "apart"
    job = Job(shared, prepared={"groups": {"branch": alone}}, every=2)
    with counted_collectives() as calls, job.recorder:
        job.step(0)
        job.step(1)
    assert sorted(calls.sizes) == sorted([4 * (8 + 6)] * 2 + [8 * (3 * 6 + 2 * 2)])  # The other group has one rank.
    other = Job(apart, prepared={"amax_sync": False}, every=1)
    other.train([1])
    assert other.recorder.writes == (dist.get_rank() == 0)
    dist.barrier()
    assert [read(folder, "ranks")[0]["ranks"] for folder in (shared, apart)] == [[0, 1], [0]]
    held = {line["slot"]: line["amax_rank"] for line in read(shared, "scales")}
    assert {held[f"branch:{role}"] for role in ("input", "weight", "grad_output")} == {0}
    assert len(read(apart, "scales")) == SLOTS
