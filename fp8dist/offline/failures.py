"""Whatever goes wrong with a file becomes one CheckpointError, on one line, that names the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fp8dist.errors import CheckpointError

__all__ = ["Named", "Unsupported", "one_line", "reading"]

_LONGEST = 1000


class Unsupported(CheckpointError):
    """Well formed, as far as one can tell, but it holds more than tensors, numbers and text."""


class Named(CheckpointError):
    """Already says which file it is about."""


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn every failure of the block into a CheckpointError about ``path``.

    A hostile file can make parsers fail in any way, RecursionError, MemoryError and Rust's panics
    (not an Exception) included. Only what the user or the interpreter raises passes through.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except CheckpointError as error:
        text = str(error)
        named = isinstance(error, Named) or text.startswith(f"{path}: ")
        raise Named(one_line(text if named else f"{path}: {text}")) from None
    except OSError as error:
        raise Named(one_line(f"{path}: {error.strerror or error}")) from None
    except BaseException as error:
        raise Named(one_line(f"{path}: cannot be read: {type(error).__name__}: {error}")) from None


def one_line(text: str) -> str:
    """Without line breaks, control characters or lone surrogates, and not endless: names come from the file."""
    line = " ".join(text.split())
    if not line.isprintable():
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"
