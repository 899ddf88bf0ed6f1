"""The training text: bytes of a file, or of Python's own language reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["BadInput", "Text", "read_text"]

HELD_OUT = 0.1
"""Share of the text that is kept for validation: its last bytes."""


class BadInput(Exception):
    """What the caller asked for cannot be done; the message is one line for the terminal."""


@dataclass(frozen=True)
class Text:
    """Bytes to learn from and bytes that training never sees."""

    training: bytes
    validation: bytes


def read_text(path: Path | None, context: int) -> Text:
    """Read and split the text. None: the topics of Python's ``help()``, about 460,000 characters.

    Raises:
        BadInput: no such file, or too little text for windows of ``context`` bytes.
    """
    if path is None:
        from pydoc_data.topics import topics

        name, text = "pydoc_data.topics", "\n".join(topics[key] for key in sorted(topics)).encode()
    else:
        name = str(path)
        try:
            text = path.read_bytes()
        except OSError as error:
            raise BadInput(f"--data {name}: {error.strerror or error}") from None
    held_out = int(len(text) * HELD_OUT)
    if held_out < context + 1:
        needed = int((context + 1) / HELD_OUT) + 1
        raise BadInput(f"--data {name}: {len(text)} bytes are too few, --context {context} needs at least {needed}")
    return Text(text[:-held_out], text[-held_out:])
