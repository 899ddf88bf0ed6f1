"""An observer of a watch that writes JSON lines, as scales.jsonl has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fp8dist import Observation
from fp8dist.runs.run_files import append_lines, slot_lines

__all__ = ["lines_into"]


def lines_into(path: str | Path | None) -> Callable[[Observation], None] | None:
    """Return an observer that appends to a new file; None for None."""
    if path is None:
        return None
    Path(path).write_bytes(b"")

    def write(seen: Observation) -> None:
        with Path(path).open("ab") as file:
            append_lines(file.fileno(), slot_lines(seen.step, seen.slots))

    return write
