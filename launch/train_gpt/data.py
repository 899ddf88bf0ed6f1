"""The training text: the bytes of a file, or of Python's help topics."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HELD_OUT = 0.1
"""Share of the text that is held out for validation, from its end."""


class BadInput(Exception):
    """A mistake of the user. The message is one line for the terminal."""


@dataclass(frozen=True)
class Text:
    """The training bytes and the held-out validation bytes."""

    training: bytes
    validation: bytes


def read_text(path: Path | None, context: int) -> Text:
    """Read and split the text.

    Args:
        path: a file, or None for the topics of Python's ``help()``, about 460,000 characters.

    Raises:
        BadInput: the file cannot be read, or is too short for windows of ``context`` bytes.
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
