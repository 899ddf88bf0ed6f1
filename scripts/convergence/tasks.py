"""Run programs in parallel. Skip the ones that are already finished."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOG = "log.txt"
_NOTE = "task.json"
_ROOT = Path(__file__).resolve().parents[2]


class TaskFailed(Exception):
    """A program failed; the message has the end of its log."""


@dataclass(frozen=True)
class Task:
    """A Python program that writes ``product`` into ``folder`` as its last act.

    ``stamp``: everything else that its results depend on. A product counts as finished only if the same program made it
    with the same stamp. Both are stored beside it, with ``about``, which may differ.
    """

    name: str
    folder: Path
    program: tuple[str, ...]
    product: str
    stamp: Mapping[str, Any]
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """True if the product exists and was made by this program with this stamp."""
        noted = self.noted()
        same = noted.get("program") == list(self.program) and noted.get("stamp") == dict(self.stamp)
        return same and (self.folder / self.product).exists()

    def noted(self) -> dict[str, Any]:
        """Return "program", "stamp" and "about" of the run that made the product; empty if there is none."""
        path = self.folder / _NOTE
        return json.loads(path.read_text()) if path.exists() else {}

    def start(self) -> subprocess.Popen[bytes]:
        """Start the program. Delete the product of an earlier run first."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / self.product).unlink(missing_ok=True)
        note = {"program": self.program, "stamp": dict(self.stamp), "about": dict(self.about)}
        (self.folder / _NOTE).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
        with (self.folder / LOG).open("wb") as log:
            return subprocess.Popen([sys.executable, *self.program], stdout=log, stderr=subprocess.STDOUT, cwd=_ROOT)


def run_all(tasks: Sequence[Task], jobs: int, say: Callable[[str], None]) -> int:
    """Run the tasks that are not finished, ``jobs`` at a time, in order. Return how many ran.

    On any exception, terminates the programs that are still running.

    Raises:
        TaskFailed: a task failed.
    """
    waiting = [task for task in tasks if not task.finished]
    total, done, start = len(waiting), 0, time.monotonic()
    if len(tasks) > total:
        say(f"{len(tasks) - total} of {len(tasks)} are finished already")
    running: list[tuple[Task, subprocess.Popen[bytes], float]] = []
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                task = waiting.pop(0)
                running.append((task, task.start(), time.monotonic()))
            time.sleep(0.1)
            for entry in list(running):
                task, process, since = entry
                status = process.poll()
                if status is None:
                    continue
                running.remove(entry)
                if status or not (task.folder / task.product).exists():
                    log = task.folder / LOG
                    end = "\n".join(log.read_text(errors="replace").strip().splitlines()[-3:])
                    raise TaskFailed(f"{task.name}: exit status {status}; {log} ends with:\n{end}")
                done += 1
                now = time.monotonic()
                left = (now - start) / done * (total - done)
                say(f"{done} of {total}: {task.name}: {now - since:.0f} s; about {left / 60:.0f} min left")
    finally:
        for _, process, _ in running:
            process.terminate()
        for _, process, _ in running:
            process.wait()
    return total
