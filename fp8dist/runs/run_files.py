"""RunFiles: the files of a run, which one process at a time appends to."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8dist.common.numbers import to_json
from fp8dist.errors import ConfigurationError
from fp8dist.runs.run_format import EVENTS, HEADER
from fp8dist.state.statistics import SlotStatistics

logger = logging.getLogger("fp8dist")

_START = re.compile(rb'\{"step": (\d{1,18})[,}]')


class RunFiles:
    """Appends lines to the files of a run's folder, one system call for each write. Local.

    So a killed process loses at most the line that it was writing. A full disk or a deleted folder does not end the
    training: one warning, then no more writes. ``events.jsonl`` is locked while this object lives: a killed process
    releases the lock.

    Args:
        folder: created if it does not exist. It is locked at once; no line is dropped before ``begin``.

    Raises:
        ConfigurationError: another process writes there, or the folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}
        weakref.finalize(self, _close, self._files)
        with self._usable():
            folder.mkdir(parents=True, exist_ok=True)
            self._files[EVENTS] = _opened(folder / EVENTS)
            self._lock()

    def begin(self, resume_after: int | None, names: Iterable[str], dropped: Iterable[str]) -> None:
        """Open the files beside ``events.jsonl`` for a run.

        Args:
            resume_after: lines of later steps are dropped, except from ``events.jsonl``. None: all lines are.
            names: of the files that are opened.
            dropped: of the files that this run does not write: removed if ``resume_after`` is None.

        Raises:
            ConfigurationError: the folder cannot be written to.
        """
        with self._usable():
            for name in names:
                self._files[name] = opened_lines(self._folder / name, resume_after)
            for name in dropped:
                if resume_after is None:
                    (self._folder / name).unlink(missing_ok=True)
                else:
                    keep_lines(self._folder / name, resume_after)
            self._end_torn_line()

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except ConfigurationError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise ConfigurationError(
                f"{self._folder}: cannot record there: {error.strerror}: give a folder that can be written to"
            ) from None

    def _lock(self) -> None:
        try:
            fcntl.flock(self._files[EVENTS], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"{self._folder}: another process records a run there: end it, or give another folder"
            ) from None
        except OSError as error:  # Some network file systems have no locks.
            logger.info("fp8dist: %s is not locked: %s", self._folder / EVENTS, error)
        reopen = weakref.WeakMethod(self._reopen)
        os.register_at_fork(after_in_child=lambda: (method := reopen()) and method())

    def _reopen(self) -> None:
        """Leave the lock to the process that has forked this one, such as a DataLoader's worker: as long as a process
        has the same opening of the file, the file stays locked, also when the locking process was killed."""
        with contextlib.suppress(OSError, KeyError):
            own = os.open(f"/dev/fd/{self._files[EVENTS]}", os.O_RDWR | os.O_APPEND)
            os.dup2(own, self._files[EVENTS], inheritable=False)
            os.close(own)

    def _end_torn_line(self) -> None:
        file = self._files[EVENTS]
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            os.write(file, b"\n")

    def add(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append a line for each mapping to the file. Numbers that are not finite become strings."""
        if name in self._files:
            try:
                # Looking for a file takes long on a network file system: only for one that seems deleted.
                if os.fstat(self._files[name]).st_nlink == 0:
                    (self._folder / name).stat()
                append_lines(self._files[name], lines)
            except OSError as error:
                self._stop(name, error)

    def describe(self, header: Mapping[str, Any]) -> None:
        """Replace ``run.json``, atomically."""
        if not self._files:
            return
        new = self._folder / f"{HEADER}.new"
        try:
            new.write_text(json.dumps(_plain(header), indent=1) + "\n", encoding="utf-8")
            new.replace(self._folder / HEADER)
        except OSError as error:
            with contextlib.suppress(OSError):
                new.unlink()
            self._stop(HEADER, error)

    def close(self) -> None:
        """Close the files, and release the lock. Later lines are not written."""
        _close(self._files)

    def _stop(self, name: str, error: OSError) -> None:
        logger.warning("fp8dist: nothing more is recorded: %s: %s", self._folder / name, error.strerror)
        self.close()


def opened_lines(path: Path, resume_after: int | None) -> int:
    """Open a file of JSON lines, to append to it. Return its descriptor.

    ``resume_after``: lines of later steps are dropped, and a torn last line. None: all lines are.
    """
    if resume_after is not None:
        keep_lines(path, resume_after)
    elif path.is_file() and not path.is_symlink():  # A new file: a reader takes one that has grown again for the old.
        new = path.with_name(path.name + ".new")
        new.write_bytes(b"")
        new.replace(path)
    return _opened(path, os.O_TRUNC if resume_after is None else 0)


def _opened(path: Path, flags: int = 0) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | flags, 0o666)


def append_lines(file: int, lines: Iterable[Mapping[str, Any]]) -> None:
    """Append a line for each mapping to an open file. Numbers that are not finite become strings."""
    text = "".join(json.dumps(_plain(line)) + "\n" for line in lines).encode()
    while text:  # Of a long text, one call may write a part.
        text = text[os.write(file, text) :]


def slot_lines(step: int, slots: Sequence[SlotStatistics]) -> Iterator[dict[str, Any]]:
    """Yield the lines of scales.jsonl."""
    return ({"step": step, "slot": str(one.slot), **dict(one.numbers())} for one in slots)


def _close(files: dict[str, int]) -> None:
    while files:
        with contextlib.suppress(OSError):
            os.close(files.popitem()[1])


def _plain(value: Any) -> Any:
    """Return the value with non-finite numbers as strings, at any depth."""
    if isinstance(value, float):  # Numbers first: most values are, and a test for Mapping takes longer than all others.
        return to_json(value)
    if value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def keep_lines(path: Path, last_step: int) -> None:
    """Keep only the lines of steps up to ``last_step`` in the file, which need not exist.

    Lines that are not JSON objects with a step, such as the torn last line of a killed process, are dropped. Writes a
    new file and renames it, so that a process killed here loses nothing. Works line by line, because such files grow
    large.
    """
    if not path.exists():
        return
    new = path.with_name(path.name + ".new")
    try:
        with path.open("rb") as lines, new.open("wb") as kept:
            for text in lines:
                step = _step_of(text)
                if step is not None and step <= last_step:
                    kept.write(text.rstrip(b"\n") + b"\n")
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()  # A part of a large file would keep a disk full.
        raise


def _step_of(text: bytes) -> int | None:
    """Return the step of a line; None if it is no JSON object with a step."""
    start = _START.match(text)
    if start is not None and text.endswith(b"}\n") and text.count(b"{") == 1:
        return int(start[1])  # As ``append_lines`` writes it. JSON takes ten times as long, and other ranks wait.
    try:
        line = json.loads(text)
    except ValueError:
        return None
    step = line.get("step") if isinstance(line, dict) else None
    return step if isinstance(step, int) else None
