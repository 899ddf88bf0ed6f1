"""RunFolder: the files of a run, read while the job writes them or afterwards."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from fp8dist.errors import ConfigurationError
from fp8dist.runs.report.records import numbers_in
from fp8dist.runs.run_format import FORMAT, HEADER, METRICS, VERSION

if TYPE_CHECKING:
    from fp8dist.state.recipe import ShareLimits
    from fp8dist_kernels.formats import Format

BLOCK = 1 << 22
"""Bytes that are read at once."""

LONGEST = 1 << 26
"""Bytes of the longest line that is read, and of the longest header. A longer line is left out."""


class RunFolder:
    """The folder of a run. Files may be missing, be torn at their end, and grow while they are read.

    Args:
        path: a folder that ``Recorder`` writes, or wrote.

    Raises:
        ConfigurationError: it is not a folder of this kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not os.path.isdir(path):  # Path.is_dir() raises for a name that is too long.
            raise ConfigurationError(f"{path} is not a folder: give the folder that fp8dist.Recorder writes")
        self.header = _header(path / HEADER)
        if not self.header and not (path / METRICS).is_file():
            raise ConfigurationError(f"{path} holds no run: neither {HEADER} nor {METRICS} is there")

    @property
    def name(self) -> str:
        """The folder and its parent: of "runs/a/fp8" and "runs/b/fp8" the folder alone says too little."""
        path = self.path.resolve()
        return str(Path(path.parent.name, path.name))

    def formats(self) -> dict[str, Format]:
        """Return the format of each slot that the header lists."""
        from fp8dist_kernels.formats import FORMATS  # Here, because it imports torch, which --help does not need.

        named = self._of_slots("format")
        return {slot: FORMATS[name] for slot, name in named.items() if isinstance(name, str) and name in FORMATS}

    def share_limits(self) -> tuple[dict[str, ShareLimits], ShareLimits]:
        """Return (by slot, the shares from which on it is in trouble, as far as the header says; those of others)."""
        from fp8dist.state.recipe import ShareLimits  # Here, because it imports torch.

        named = {slot: one for slot, one in self._of_slots("trouble").items() if isinstance(one, dict)}
        fields = ShareLimits._fields
        return {slot: ShareLimits(**numbers_in(one, fields)) for slot, one in named.items()}, ShareLimits()

    def _of_slots(self, field: str) -> dict[str, Any]:
        """Return a field of each slot that the header lists."""
        listed = self.header.get("slots")
        slots = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        return {one["slot"]: one.get(field) for one in slots if isinstance(one.get("slot"), str)}

    def lines(self, name: str) -> Lines:
        """Return a reader of one of its files."""
        return Lines(self.path / name)


class Lines:
    """Reads a file of JSON lines, and later what was added to it.

    Lines that are not JSON objects with an integer ``step`` are left out. A last line without its end is read when the
    rest of it is there.

    Args:
        path: the file. It may be missing.
        tail: bytes at the end of the file that the first call of ``new`` reads; None: all.
    """

    def __init__(self, path: Path, tail: int | None = None) -> None:
        self.path = path
        self._tail = tail
        self.left_out = 0  # Damaged lines so far.
        self._offset, self._inode = 0, -1

    def replaced(self) -> bool:
        """True if another file is there than the last call of ``new`` read, because the run was resumed or restarted.

        What was read before is void, and ``new`` starts from the beginning.
        """
        try:
            now = self.path.stat()
        except OSError:
            return False
        return self._inode not in (-1, now.st_ino) or now.st_size < self._offset

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the lines that were added since the last call; all of them at the first. A missing file has none."""
        for block in self.blocks():
            found, left_out = objects_in(block)
            self.left_out += left_out
            yield from found

    def blocks(self) -> Iterator[bytes]:
        """Yield the bytes that were added since the last call, cut at the ends of lines."""
        if self.replaced():
            self._offset = self.left_out = 0
        try:
            file = opened(self.path)
        except OSError:
            return
        with file:
            now = os.fstat(file.fileno())
            if self._offset == 0 and self._tail is not None and now.st_size > self._tail:
                file.seek(now.st_size - self._tail - 1)
                file.readline(LONGEST)  # The end of a line, or of the one before the first that is read.
                self._offset = file.tell()
            self._inode = now.st_ino
            file.seek(self._offset)
            rest, skipping = b"", False
            while block := file.read(BLOCK):
                block = rest + block
                end = block.rfind(b"\n") + 1
                whole, rest = block[:end], block[end:]
                self._offset += end
                if skipping and end:  # The end of a line that was too long.
                    whole = whole[whole.index(b"\n") + 1 :]
                    skipping = False
                if whole:
                    yield whole
                if len(rest) > LONGEST:
                    self._offset += len(rest)
                    self.left_out += not skipping
                    rest, skipping = b"", True

    def size(self) -> int:
        """Return the size of the file in bytes."""
        return self.path.stat().st_size if self.path.is_file() else 0


def objects_in(block: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the lines of a block that are JSON objects with an integer ``step``, and the number of other lines."""
    lines = block[:-1].split(b"\n")
    try:  # One call for many lines takes half the time.
        found = json.loads(b"[" + b",".join(lines) + b"]")
        if len(found) != len(lines):
            raise ValueError
    except (ValueError, RecursionError):
        found = [_parsed(line) for line in lines]
    objects = [one for one in found if isinstance(one, dict) and type(one.get("step")) is int]
    return objects, len(found) - len(objects)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def opened(path: Path) -> BinaryIO:
    """Open a regular file. Does not wait for a writer, as the opening of a pipe does.

    Raises:
        OSError: there is none, or it cannot be read.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(f"{path} is not a regular file")
    return os.fdopen(file, "rb")


def _whole_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object that is a file's content; None if it is something else, or too long.

    Raises:
        OSError: see ``opened``.
    """
    with opened(path) as file:
        text = file.read(LONGEST + 1)
    found = _parsed(text) if len(text) <= LONGEST else None
    return found if isinstance(found, dict) else None


def _header(path: Path) -> dict[str, Any]:
    """Return the header, or {} if there is none."""
    try:
        header = _whole_object(path)
    except OSError:
        return {}
    if header is None:
        raise ConfigurationError(f"{path} is no JSON object: it was not written by fp8dist, or is damaged")
    if header.get("format") != FORMAT:
        raise ConfigurationError(f"{path} is not the header of a run of fp8dist")
    if header.get("version") != VERSION:
        raise ConfigurationError(
            f"{path} has format version {header.get('version')!r:.40}, and this version of fp8dist reads {VERSION}"
        )
    return header
