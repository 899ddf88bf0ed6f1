"""Captures the library's log."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def captured_log(level: int = logging.WARNING) -> Iterator[list[tuple[int, str]]]:
    """Yield the (level, message) pairs that the library logs inside, from ``level`` up. Nothing goes to stderr."""
    records: list[tuple[int, str]] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: records.append((record.levelno, record.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("fp8dist")
    propagate, before = logger.propagate, logger.level
    logger.setLevel(min(level, logger.getEffectiveLevel()))
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        logger.setLevel(before)
