"""Programs that run side by side, each once: one that is finished is not run again."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["LOG", "Task", "TaskFailed", "run_all"]

LOG = "log.txt"
_NOTE = "task.json"
_ROOT = Path(__file__).resolve().parents[2]


class TaskFailed(Exception):
    """A program ended with an error; the message has the end of what it said."""


@dataclass(frozen=True)
class Task:
    """A Python program that writes ``product`` into ``folder`` as its last act.

    ``stamp``: what else its results depend on. A product counts only if it was made by the same program with the same
    stamp: both are noted beside it, and ``about``, which may differ.
    """

    name: str
    folder: Path
    program: tuple[str, ...]
    product: str
    stamp: Mapping[str, Any]
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether what it makes is there."""
        noted = self._noted()
        same = noted.get("program") == list(self.program) and noted.get("stamp") == dict(self.stamp)
        return same and (self.folder / self.product).exists()

    @property
    def made_by(self) -> dict[str, Any]:
        """``about`` of the run that made what is there; empty if nothing is."""
        return self._noted().get("about", {})

    def _noted(self) -> dict[str, Any]:
        path = self.folder / _NOTE
        return json.loads(path.read_text()) if path.exists() else {}

    def start(self) -> subprocess.Popen[bytes]:
        """Start it anew; what an earlier run left is no product of this one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / self.product).unlink(missing_ok=True)
        note = {"program": self.program, "stamp": dict(self.stamp), "about": dict(self.about)}
        (self.folder / _NOTE).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
        with (self.folder / LOG).open("wb") as log:
            return subprocess.Popen([sys.executable, *self.program], stdout=log, stderr=subprocess.STDOUT, cwd=_ROOT)

    def require_success(self, status: int) -> None:
        """Do nothing.

        Raises:
            TaskFailed: it ended otherwise than it should.
        """
        if status or not (self.folder / self.product).exists():
            said = (self.folder / LOG).read_text(errors="replace").strip().splitlines()[-3:]
            raise TaskFailed(f"{self.name}: exit status {status}; {self.folder / LOG} ends with:\n" + "\n".join(said))


def run_all(tasks: Sequence[Task], jobs: int, say: Callable[[str], None]) -> int:
    """Run what is not finished, ``jobs`` at a time, in order. Returns how many were run.

    Those that run are ended before this returns by an exception.

    Raises:
        TaskFailed: one did; the others of this call are ended.
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
                task.require_success(status)
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
