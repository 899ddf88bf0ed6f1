"""Traces: the digests of one step in execution order, as a file of JSON lines (specified in docs/design/formats.md)."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from fp8dist.checks.outputs import Place, Taken
from fp8dist.errors import CheckpointError
from fp8dist.files.failures import reading
from fp8dist.files.slices import FileSlice

FORMAT, VERSION = "fp8dist trace", 1
BEGIN = f'{{"format":"{FORMAT}",'.encode()
_LONGEST_LINE = 1 << 20
_MOST_DIMS = 64
_MOST_FACTS = 256

Plain: TypeAlias = "str | int | bool | None"


class Head(NamedTuple):
    """The first line of a trace: facts about the rank and the start of the step.

    Attributes:
        rank, ranks: the global rank, and the number of ranks of the job.
        host: the machine's name.
        likeness: hardware, versions and settings as text, from ``fp8dist/checks/likeness.py``.
        settings: further flags of torch that select kernels, by name.
        start: digests of everything that the step started from, by name; None: there is none, or it is not known.
    """

    rank: int
    ranks: int
    host: str
    likeness: str
    settings: Mapping[str, Plain]
    start: Mapping[str, Plain]


class TraceRow(NamedTuple):
    """A line of a trace: a tensor of the step. ``digest``: 32 hexadecimal digits. ``nonfinite``: True if the tensor has
    a NaN or an infinity."""

    place: Place
    digest: str
    nonfinite: bool


def trace_bytes(head: Head, taken: Taken) -> bytes:
    """Return the content of a trace file. The same arguments give the same bytes."""
    lines = [{"format": FORMAT, "version": VERSION, **head._asdict()}]
    for place, digest, nonfinite in zip(taken.places, taken.digests.numpy(), taken.nonfinite.tolist()):
        lines.append({**place._asdict(), "digest": digest.astype("<i8").tobytes().hex(), "nonfinite": nonfinite})
    data = b"".join(_line(line) for line in lines)
    return data + _line({"places": len(taken.places), "sha256": hashlib.sha256(data).hexdigest()})


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def is_trace(path: str) -> bool:
    """Return True if ``path`` is a file that begins like a trace.

    Raises:
        CheckpointError: nothing has this path, or it cannot be read.
    """
    with reading(path):
        try:
            file = FileSlice.of(path)
        except CheckpointError:  # A folder, a pipe or a device.
            return False
        return file.bytes_at(0, min(len(BEGIN), file.length)).numpy().tobytes() == BEGIN


def open_trace(path: str) -> tuple[Head, Iterator[TraceRow]]:
    """Return the head of a trace and an iterator over its rows, which reads them one by one.

    The checksum is in the last line, so only an iteration to the end verifies the file. Nothing from the file is
    executed.

    Raises:
        CheckpointError: the file cannot be read, is damaged or has another version. Raised by this call or by the
            iterator. The message is one line that names the file.
    """
    with reading(path):
        lines = _lines(path)
        head = _head(next(lines))
    return head, _rows(path, lines)


def _lines(path: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file but the last, which has their number and checksum. Raise CheckpointError if these do
    not match."""
    checksum, places = hashlib.sha256(), -1  # The head is not a place.
    file = io.BufferedReader(FileSlice.of(path), 1 << 20)
    while line := file.readline(_LONGEST_LINE):
        if not line.endswith(b"\n"):
            raise CheckpointError("is truncated or damaged: a line does not end")
        value = json.loads(line)
        if not isinstance(value, dict):
            raise CheckpointError("is damaged: a line is not an object")
        if "sha256" in value:
            if value["sha256"] != checksum.hexdigest() or value.get("places") != places or file.read(1):
                raise CheckpointError("checksum does not match: the trace is damaged")
            return
        checksum.update(line)
        places += 1
        yield value
    raise CheckpointError("is truncated: its last line is missing")


def _head(line: Mapping[str, Any]) -> Head:
    if line.get("version") != VERSION:
        raise CheckpointError(f"trace has version {line.get('version')!r}, this library reads version {VERSION} only")
    return _checked(Head, line, _HEAD, "head")


def _rows(path: str, lines: Iterator[dict[str, Any]]) -> Iterator[TraceRow]:
    with reading(path):
        for line in lines:
            place = _checked(Place, line, _PLACE, "row")
            row = _checked(TraceRow, {**line, "place": place}, _ROW, "row")
            yield row._replace(place=place._replace(shape=tuple(place.shape)))


def _checked(kind: Any, line: Mapping[str, Any], fields: Mapping[str, Callable[[Any], bool]], name: str) -> Any:
    """Return a ``kind`` of the line's fields. Raise CheckpointError if one is missing, or fails its check."""
    for field, fits in fields.items():
        if field not in line or not fits(line[field]):
            raise CheckpointError(f"is damaged: a {name} has a malformed {field}")
    return kind(**{field: line[field] for field in kind._fields})


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flat(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and len(value) <= _MOST_FACTS
        and all(one is None or isinstance(one, (str, int)) for one in value.values())
    )


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 32 and set(value) <= set("0123456789abcdef")


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= _MOST_DIMS and all(map(_is_count, value))


_HEAD = MappingProxyType(
    {"rank": _is_count, "ranks": _is_count, "host": _is_text, "likeness": _is_text}
    | {"settings": _is_flat, "start": _is_flat}
)
_PLACE = MappingProxyType(
    {"module": _is_text, "what": lambda value: value in ("output", "gradient"), "call": _is_count, "part": _is_count}
    | {"shape": _is_shape, "dtype": _is_text}
)
_ROW = MappingProxyType({"digest": _is_digest, "nonfinite": lambda value: isinstance(value, bool)})
