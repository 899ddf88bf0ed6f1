"""RunFiles: the files of a run, which one process at a time appends to."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8dist.common.numbers import to_json
from fp8dist.errors import ConfigurationError
from fp8dist.runs.monitor import keep_lines
from fp8dist.runs.run_format import EVENTS, HEADER

__all__ = ["RunFiles"]

logger = logging.getLogger("fp8dist")


class RunFiles:
    """Appends lines to the files of a run's folder, one system call for each write. Local.

    So a killed process loses at most the line that it was writing. A full disk does not end the training: one warning,
    then no more writes. ``events.jsonl`` is locked while this object lives: a killed process releases the lock.

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
            self._open(EVENTS)
            self._lock()

    def begin(self, resume_after: int | None, names: Iterable[str], dropped: Iterable[str]) -> None:
        """Open the files beside ``events.jsonl`` for a run.

        Args:
            resume_after: lines of later steps are dropped, except from ``events.jsonl``. None: all lines are.
            names: of the files that are opened.
            dropped: of the files that are removed if ``resume_after`` is None.

        Raises:
            ConfigurationError: the folder cannot be written to.
        """
        with self._usable():
            for name in names:
                if resume_after is not None:
                    keep_lines(self._folder / name, resume_after)
                self._open(name)
                if resume_after is None:
                    os.ftruncate(self._files[name], 0)
            for name in dropped if resume_after is None else ():
                (self._folder / name).unlink(missing_ok=True)
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

    def _open(self, name: str) -> None:
        self._files[name] = os.open(self._folder / name, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._files[EVENTS], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"{self._folder}: another process records a run there: end it, or give another folder"
            ) from None
        except OSError as error:  # Some network file systems have no locks.
            logger.info("fp8dist: %s is not locked: %s", self._folder / EVENTS, error)

    def _end_torn_line(self) -> None:
        file = self._files[EVENTS]
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            self._write(EVENTS, b"\n")

    def add(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append a line for each mapping to the file. Numbers that are not finite become strings."""
        if name in self._files:
            self._write(name, "".join(json.dumps(_plain(line)) + "\n" for line in lines).encode())

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

    def _write(self, name: str, text: bytes) -> None:
        try:
            while text:  # Of a long text, one call may write a part.
                text = text[os.write(self._files[name], text) :]
        except OSError as error:
            self._stop(name, error)

    def _stop(self, name: str, error: OSError) -> None:
        logger.warning("fp8dist: nothing more is recorded: %s: %s", self._folder / name, error.strerror)
        self.close()


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
