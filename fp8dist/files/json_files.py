"""Read JSON files that may be hostile. Large files, values other than an object, and duplicate keys are refused."""

from __future__ import annotations

import json
from typing import Any

from fp8dist.errors import CheckpointError
from fp8dist.files.failures import reading
from fp8dist.files.slices import FileSlice

LARGEST_TEXT = 1 << 25
"""Largest size of a JSON file, in bytes. The index of a model with 100,000 tensors has a third of this size."""


def read_text(path: str) -> bytes:
    """Return the bytes of a file of JSON.

    Raises:
        CheckpointError: it is not a regular file, or larger than ``LARGEST_TEXT``. The message names the file.
    """
    with reading(path):
        file = FileSlice.of(path)
        if file.length > LARGEST_TEXT:
            raise CheckpointError(f"has {file.length} bytes, expected at most {LARGEST_TEXT}")
        return file.bytes_at(0, file.length).numpy().tobytes()


def json_object(data: bytes, path: str) -> dict[str, Any]:
    """Return the object in ``data``, the JSON text of the file ``path``.

    Raises:
        CheckpointError: the text is not JSON in UTF-8, not an object, or an object has a key twice (JSON readers differ
            in which of the two values they take). The message names the file.
    """
    with reading(path):
        found = json.loads(data.decode(), object_pairs_hook=_without_duplicates)  # Servers read UTF-8 only.
        if not isinstance(found, dict):
            raise CheckpointError("is not a JSON object")
        return found


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise CheckpointError(f"has {key} twice")
        found[key] = value
    return found
