"""Logs with one JSON object per line and a ``step`` in each, that a resumed run goes on with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["keep_lines"]


def keep_lines(path: Path, last_step: int, keeps: Callable[[dict[str, Any]], bool] | None = None) -> None:
    """Leave only the lines of steps up to ``last_step`` in the file, which need not exist.

    What is no JSON object with a step, such as the last line of a killed process, is dropped. Written beside and
    renamed, so that a process killed here loses nothing; line by line, because such files grow large.

    Args:
        keeps: asked about each line that would be kept.
    """
    if not path.exists():
        return
    new = path.with_name(path.name + ".new")
    with path.open("rb") as lines, new.open("wb") as kept:
        for text in lines:
            line = _object(text)
            if line is not None and line["step"] <= last_step and (keeps is None or keeps(line)):
                kept.write(text.rstrip(b"\n") + b"\n")
    new.replace(path)


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None
