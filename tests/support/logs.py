"""What the library logs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def captured_log() -> Iterator[list[tuple[int, str]]]:
    """(level, message) of what the library logs meanwhile, from WARNING up; nothing goes to stderr."""
    records: list[tuple[int, str]] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append((record.levelno, record.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("fp8dist")
    propagate = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
