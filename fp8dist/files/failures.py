"""Turn every failure to read a file into one CheckpointError, on one line, that names the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fp8dist.errors import CheckpointError

_LONGEST = 1000


class Unsupported(CheckpointError):
    """Raised for data that looks well formed, but holds more than tensors, numbers and text."""


class FileError(CheckpointError):
    """Raised with a message that already names the file."""


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn every failure of the block into a CheckpointError about ``path``.

    A hostile file can make parsers raise anything, including RecursionError, MemoryError and the panics of Rust code,
    which are BaseExceptions. Only KeyboardInterrupt, SystemExit and GeneratorExit pass through.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except CheckpointError as error:
        text = str(error)
        named = isinstance(error, FileError) or text.startswith(f"{path}: ")
        raise FileError(one_line(text if named else f"{path}: {text}")) from None
    except OSError as error:
        raise FileError(one_line(f"{path}: {error.strerror or error}")) from None
    except BaseException as error:
        raise FileError(one_line(f"{path}: cannot be read: {type(error).__name__}: {error}")) from None


def one_line(text: str) -> str:
    """Return text without line breaks, control characters or lone surrogates, cut if long: it may contain file data."""
    line = " ".join(text.split())
    if not line.isprintable():
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"
