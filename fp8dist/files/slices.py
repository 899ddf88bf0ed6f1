"""Parts of regular files, and bytes in memory, with one interface for reads at a position."""

from __future__ import annotations

import io
import os
import stat
from typing import Any

import torch
from torch import Tensor

from fp8dist.files.failures import FileError

_Stamp = tuple[int, int, int, int]


class FileSlice(io.RawIOBase):
    """Bytes ``[start, start + length)`` of a file, as a file object.

    The file is open only during reads, so a process can hold thousands of slices. A read raises CheckpointError if the
    file has changed since ``of``: its device, inode, size or time of modification.
    """

    def __init__(self, path: str, start: int, length: int, stamp: _Stamp) -> None:
        super().__init__()
        self.path, self.start, self.length = path, start, length
        self._stamp = stamp
        self._place = 0

    @classmethod
    def of(cls, path: str) -> FileSlice:
        """Return a slice of the whole file.

        Raises:
            CheckpointError: the path is a folder, a pipe, a device or a socket.
            OSError: the file does not exist.
        """
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
            raise FileError(f"{path}: is {kinds.get(stat.S_IFMT(status.st_mode), 'a device')}, expected a file")
        return cls(path, 0, status.st_size, _stamp(status))

    def part(self, offset: int, length: int) -> FileSlice:
        """Return the slice of ``length`` bytes that begins ``offset`` bytes after the start of this one.

        Raises:
            CheckpointError: this slice is too short.
        """
        self._require(offset, length)
        return FileSlice(self.path, self.start + offset, length, self._stamp)

    def _require(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.length:
            raise FileError(
                f"{self.path}: is truncated or damaged: {offset + length} bytes are wanted, there are {self.length}"
            )

    def bytes_at(self, offset: int, count: int) -> Tensor:
        """Return ``count`` bytes from ``offset`` on, uint8[count] on the CPU.

        Raises:
            CheckpointError: this slice is too short, or the file has changed.
            OSError: the file cannot be opened or read.
        """
        self._require(offset, count)
        found = torch.empty(count, dtype=torch.uint8, device="cpu")
        view, done = memoryview(found.numpy().data), 0
        # Without O_NONBLOCK, opening a pipe that has replaced the file would wait for a writer.
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if _stamp(os.fstat(descriptor)) != self._stamp:
                raise FileError(f"{self.path}: was changed while it was read")
            while done < count:
                step = os.preadv(descriptor, [view[done:]], self.start + offset + done)
                if step == 0:
                    raise FileError(f"{self.path}: became shorter while it was read")
                done += step
        finally:
            os.close(descriptor)
        return found

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self.length}[whence]
        if place < 0:
            raise OSError("seek to before the start")  # The type that zipfile expects.
        self._place = place
        return place

    def readinto(self, buffer: Any) -> int:
        count = min(len(buffer), max(0, self.length - self._place))
        if count:
            memoryview(buffer)[:count] = self.bytes_at(self._place, count).numpy().data
            self._place += count
        return count


class MemorySlice(FileSlice):
    """Bytes in memory, with the interface of a ``FileSlice``. ``path``: the name of the bytes in messages."""

    def __init__(self, path: str, data: bytes) -> None:
        super().__init__(path, 0, len(data), (0, 0, 0, 0))
        self._data = data

    def part(self, offset: int, length: int) -> MemorySlice:
        self._require(offset, length)
        return MemorySlice(self.path, self._data[offset : offset + length])

    def bytes_at(self, offset: int, count: int) -> Tensor:
        self._require(offset, count)
        found = torch.empty(count, dtype=torch.uint8, device="cpu")
        found.numpy()[:] = memoryview(self._data)[offset : offset + count]
        return found


def _stamp(status: os.stat_result) -> _Stamp:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
