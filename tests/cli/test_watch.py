"""``fp8dist watch`` on a pseudo-terminal of tmux, in pipes, and with a job that writes."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp8dist.cli import watch as module
from fp8dist.cli.main import main
from tests.support.forked import ROOT
from tests.support.suite import NIGHTLY

ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}
Capture = pytest.CaptureFixture[str]
HOSTILE = "\x1b[2J\x1b]0;owned\x07[bold red]evil[/bold red]\r\n" + "x" * 10_000 + ":input"


def write(path: Path, *lines: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def start(run: Path) -> Path:
    """Write the folder of a run with three steps."""
    run.mkdir()
    header = {"format": "fp8dist run", "version": 1, "ranks": 2, "precision": "fp8", "recipe": "[bold]Delayed[/bold]"}
    slots = [{"slot": f"model.blocks.{i}.fc:input", "format": "e4m3", "max": 448.0} for i in range(12)]
    (run / "run.json").write_text(json.dumps({**header, "slots": slots}))
    for step in (1, 2, 3):
        write(run / "metrics.jsonl", {"step": step, "time": 1e9, "loss": 3.0 - step / 4, "step_ms": 120.5})
    for i in range(12):
        slot = {"step": 3, "slot": f"model.blocks.{i}.fc:input", "amax": 5.0 + i, "scale": 200.0, "saturated": 0.0}
        write(run / "scales.jsonl", {**slot, "underflow": 0.0, "amax_rank": 1, "amax_microbatch": 0})
    write(run / "ranks.jsonl", {"step": 3, "ranks": [0, 1], "sync_wait_ms": [0.5, 2.5], "step_ms": [1, 2]})
    return run


class Terminal:
    """A shell in a tmux session of its own server."""

    def __init__(self, folder: Path, columns: int, lines: int) -> None:
        self._tmux = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        size = ["-x", str(columns), "-y", str(lines)]
        shell = ["env", "PS1=$ ", "bash", "--norc", "--noprofile"]
        subprocess.run([*self._tmux, "new-session", "-d", *size, *shell], env=ENVIRONMENT, check=True)

    def ask(self, *command: str) -> str:
        return subprocess.run([*self._tmux, *command], capture_output=True, text=True, check=True).stdout

    def type(self, *keys: str) -> None:
        self.ask("send-keys", *keys)

    def shows(self, condition: Callable[[str], bool]) -> str:
        """Wait until the terminal shows something. Return what it shows."""
        end = time.monotonic() + 30
        while not condition(text := self.ask("capture-pane", "-p")):
            assert time.monotonic() < end, text
            time.sleep(0.05)
        return text

    def modes(self) -> str:
        """Return if the terminal is in its alternate screen, and if its cursor is shown."""
        return self.ask("display-message", "-p", "#{alternate_on} #{cursor_flag}").strip()

    def close(self) -> None:
        """End the session's server."""
        subprocess.run([*self._tmux, "kill-server"], check=False)


@pytest.fixture
def terminal(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    found = Terminal(tmp_path, *getattr(request, "param", (80, 24)))
    yield found
    found.close()


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [(44, 16), pytest.param((160, 50), marks=NIGHTLY)], indirect=True)
def test_a_terminal_follows_a_job_and_is_restored_by_ctrl_c_and_sigterm(terminal: Terminal, tmp_path: Path) -> None:
    run, pid = start(tmp_path / "run"), tmp_path / "pid"
    command = f"{sys.executable} -m fp8dist watch {run} --every 0.1"
    terminal.type(f"{command}; echo status $?", "Enter")
    text = terminal.shows(lambda text: "loss 2.25" in text)
    assert terminal.modes() == "1 0"
    lines = text.splitlines()
    title = f"{tmp_path.name}/run  fp8  [bold]Delayed[/bold]  2 ranks"
    assert title.startswith(lines[0].rstrip("…"))
    assert len(lines[0]) >= min(len(title), 40)
    assert "in model.blocks" in text
    names = [line.split()[0] for line in lines if "% of 448" in line]
    assert names == [f"{i}.fc" for i in range(11, 1, -1)][: max(3, len(text.splitlines()) - 12)]
    bad = {"step": 4, "slot": "model.blocks.7.fc:input", "amax": "Infinity", "scale": 20.0}
    write(run / "scales.jsonl", {**bad, "amax_rank": 1, "amax_microbatch": 3})
    write(run / "metrics.jsonl", {"step": 4, "loss": "NaN", "step_ms": 99.0, "proven": 3})
    text = terminal.shows(lambda text: "amax is inf" in text and "loss nan" in text and "proven to step 3" in text)
    finding = {"kind": "scale", "name": "a:input", "ranks": [1]}
    report = {"consistent": False, "findings": [finding]}
    write(run / "events.jsonl", {"step": 5, "kind": "diverged", "report": report})
    write(run / "scales.jsonl", {"step": 5, "slot": HOSTILE, "amax": "NaN", "scale": 1.0})
    text = terminal.shows(lambda text: "DIVERGED in step 5" in text and "x1b[2J" in text)
    assert all(len(line) <= 160 for line in text.splitlines())
    assert "owned" not in terminal.ask("display-message", "-p", "#{pane_title}")
    terminal.type("C-c")
    text = terminal.shows(lambda text: "status" in text.splitlines()[-1] or "status 0" in text)
    assert "status 0" in text
    assert "Traceback" not in text
    assert terminal.modes() == "0 1"
    terminal.type(f"{command} & echo $! > {pid}; fg", "Enter")
    terminal.shows(lambda text: "loss nan" in text)
    os.kill(int(pid.read_text()), signal.SIGTERM)
    text = terminal.shows(lambda text: "loss nan" not in text)
    assert "Traceback" not in text
    assert terminal.modes() == "0 1"


def test_a_pipe_gets_a_line_per_update_until_the_end(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, slept = tmp_path / "run", []
    meanwhile = [
        lambda: start(run),
        lambda: None,  # Nothing is new, so nothing is printed.
        lambda: write(run / "metrics.jsonl", {"step": 4, "loss": 1.0, "step_ms": 7.0}),
        lambda: write(run / "events.jsonl", {"step": 4, "kind": "end"}),
    ]

    def sleep(seconds: float) -> None:
        meanwhile[len(slept)]()
        slept.append(seconds)

    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=sleep))
    assert main(["watch", str(run), "--every", "0.1", "--wait"]) == 0
    assert slept == [0.1] * 4
    first, second, last = capsys.readouterr().out.splitlines()
    assert "step 3  loss 2.25  120.5 ms  unproven: nothing has compared the ranks yet" in first
    assert "worst slot model.blocks.11.fc:input: 714 % of 448, rank 1, microbatch 0" in first
    assert second.startswith("step 4  loss 1  7 ms")
    assert last.endswith("end in step 4: the run ends  the run has ended")


class Interrupting(io.StringIO):
    """A pipe. Once a line is in it, the process gets a signal."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__()
        self._number = number

    def flush(self) -> None:
        signal.raise_signal(self._number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_a_pipe_without_a_traceback(
    number: signal.Signals, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = Interrupting(number)
    monkeypatch.setattr(sys, "stdout", pipe)
    # Workers of pytest-xdist ignore SIGINT.
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {each: signal.signal(each, handler) for each, handler in usual.items()}
    try:
        status: int | None = main(["watch", str(start(tmp_path / "run")), "--every", "0.1"])
    except KeyboardInterrupt:  # It would end pytest.
        status = None
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert (status, capsys.readouterr().err) == (0, "")
    assert pipe.getvalue().count("\n") == 1


def test_once_prints_the_present_state(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    run = start(tmp_path / "run")
    write(run / "scales.jsonl", {"step": 4, "slot": HOSTILE, "amax": 1.0, "saturated": 0.5})
    write(run / "events.jsonl", {"step": 4, "kind": HOSTILE}, {"step": 4, "kind": "saved", "path": HOSTILE})
    assert main(["watch", str(run), "--once"]) == 0
    text = capsys.readouterr().out
    assert "[bold]Delayed[/bold]" in text
    assert max(map(len, text.splitlines())) <= 80
    assert all(character == "\n" or character.isprintable() for character in text)
    assert "50 % saturated" in text
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    write(run / "events.jsonl", {"step": 4, "kind": "end"})
    for more in ([], ["--once"]):  # Without rich there are lines.
        assert main(["watch", str(run), *more]) == 0
        out, err = capsys.readouterr()
        assert out.startswith("step 3  loss 2.25  120.5 ms")
        assert out.count("\n") == 1
        assert err == "fp8dist watch: for a screen in place of lines: pip install 'fp8dist[live]'\n"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], "holds no run: neither run.json nor metrics.jsonl is there"),
        (["--every", "0"], "--every is 0: must be from 0.05 to 86400 seconds"),
        (["--every", "nan"], "--every is nan: must be"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, capsys: Capture, flags: list[str], text: str) -> None:
    assert main(["watch", str(tmp_path), *flags]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("fp8dist watch: ")
    assert text in told.err
    assert told.err.count("\n") == 1
