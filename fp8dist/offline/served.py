"""The folder of an exported model as a server finds it: config.json, the index, and the tensors of its files.

Nothing in the folder is trusted. The files are parsed here, more strictly than by safetensors' own reader: a name that is
there twice, bytes that belong to no tensor, and an index that names files outside of the folder are errors, because
servers may read such a folder in other ways.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fp8dist.errors import CheckpointError
from fp8dist.offline.failures import reading
from fp8dist.offline.json_files import LARGEST_TEXT, json_object, read_text
from fp8dist.offline.safetensor_files import DTYPES, SUFFIX
from fp8dist.offline.slices import FileSlice

__all__ = ["CONFIG", "INDEX", "Mismatch", "Served", "ServedTensor", "served_model"]

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_SINGLE = "model.safetensors"
_MOST_DIMENSIONS = 64


@dataclass(frozen=True)
class Mismatch:
    """One thing that differs. ``kind``: "bytes", "layout" (dtype or shape), "missing", "extra", "renamed", "file",
    "config" or "certificate".

    ``index``, ``value``, ``expected``, ``ulp``: the first element that differs, if both sides were read. ``ulp`` is None
    if it is undefined (NaN).
    """

    kind: str
    name: str
    detail: str
    index: tuple[int, ...] | None = None
    value: Any = None
    expected: Any = None
    ulp: int | None = None


class ServedTensor(NamedTuple):
    """A tensor of a folder. ``dtype``: as safetensors names it."""

    dtype: str
    shape: tuple[int, ...]
    data: FileSlice


@dataclass
class Served:
    """An exported model. ``faults``: what is wrong with the folder, whatever it should hold."""

    path: str
    config: dict[str, Any]
    tensors: dict[str, ServedTensor] = field(default_factory=dict)
    faults: list[Mismatch] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.data.length for tensor in self.tensors.values())


def served_model(path: str) -> Served:
    """List the tensors of a folder by its index, without reading their bytes.

    Raises:
        CheckpointError: the folder has no index or no config.json, or a file cannot be read. The message names it.
    """
    with reading(path):
        files = sorted(os.listdir(path))
    config = os.path.join(path, CONFIG)
    served = Served(path, json_object(read_text(config), config))
    places = _weight_map(path)
    for name in [name for name in files if name.endswith(SUFFIX) and name not in places.values()]:
        served.faults.append(Mismatch("file", name, f"is in the folder, but not in {INDEX}"))
    homes: dict[str, str] = {}
    for name in sorted(set(places.values())):
        file = os.path.join(path, name)
        if not os.path.lexists(file):
            count = sum(home == name for home in places.values())
            served.faults.append(Mismatch("file", name, f"is missing, with {count} tensors"))
            continue
        for tensor, found in _tensors(file):
            if tensor in homes:
                raise CheckpointError(f"{file}: {tensor} is in {homes[tensor]} as well")
            homes[tensor], served.tensors[tensor] = name, found
    served.faults += _misplaced(places, homes, served)
    return served


def _weight_map(path: str) -> Mapping[str, str]:
    """Return the file of each tensor."""
    index = os.path.join(path, INDEX)
    if not os.path.lexists(index) and os.path.lexists(os.path.join(path, _SINGLE)):
        return {name: _SINGLE for name, _ in _tensors(os.path.join(path, _SINGLE))}
    places = json_object(read_text(index), index).get("weight_map")
    with reading(index):
        if not isinstance(places, dict):
            raise CheckpointError("has no weight_map")
        for name in set(map(str, places.values())):
            if os.path.basename(name) != name or "\\" in name or not name.endswith(SUFFIX) or not name.isprintable():
                raise CheckpointError(f"names {name!r}, expected the name of a {SUFFIX} file in the folder")
        if not all(isinstance(name, str) for name in places.values()):
            raise CheckpointError("has a weight_map with other values than names of files")
        return places


def _misplaced(places: Mapping[str, str], homes: Mapping[str, str], served: Served) -> Iterator[Mismatch]:
    missing = {fault.name for fault in served.faults}
    for name in sorted(places.keys() | homes.keys()):
        there, said = homes.get(name), places.get(name)
        if said is None:
            yield Mismatch("file", str(there), f"has {name}, which is not in {INDEX}")
        elif there != said and said not in missing:
            yield Mismatch("file", said, f"should have {name}: it is {f'in {there}' if there else 'not there'}")


def _tensors(path: str) -> Iterator[tuple[str, ServedTensor]]:
    """Yield the tensors of a safetensors file (https://github.com/huggingface/safetensors, section Format).

    Raises:
        CheckpointError: the file breaks a rule of the format.
    """
    with reading(path):
        file = FileSlice.of(path)
        if file.length < 8:
            raise CheckpointError("is too short for a safetensors file")
        length = int.from_bytes(file.bytes_at(0, 8).numpy().tobytes(), "little")
        if length > min(LARGEST_TEXT, file.length - 8):
            raise CheckpointError(f"has a header of {length} bytes in a file of {file.length}, at most {LARGEST_TEXT}")
        header = json_object(file.bytes_at(8, length).numpy().tobytes(), path)
        header.pop("__metadata__", None)
        data, place = file.part(8 + length, file.length - 8 - length), 0
        described = sorted((_described(name, header[name]) for name in header), key=lambda one: (one[3], one[4]))
        for name, dtype, shape, begin, end in described:
            if begin != place:
                raise CheckpointError(f"has bytes at {min(place, begin)} that belong to no tensor, or to two")
            place = end
            yield name, ServedTensor(dtype, shape, data.part(begin, end - begin))
        if place != data.length:
            raise CheckpointError(f"has bytes at {place} that belong to no tensor")


def _described(name: str, described: Any) -> tuple[str, str, tuple[int, ...], int, int]:
    """Return (name, dtype, shape, begin, end) of an entry of a header."""
    fields = [described.get(key) for key in ("dtype", "shape", "data_offsets")] if isinstance(described, dict) else []
    if len(fields) != 3 or not all(isinstance(field, list) and _are_sizes(field) for field in fields[1:]):
        raise CheckpointError(f"{name} is described by {str(described)[:100]}")
    dtype, shape, offsets = fields
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{name} is of dtype {str(dtype)[:20]}, expected one of {', '.join(DTYPES)}")
    nbytes = math.prod(shape) * getattr(torch, DTYPES[dtype]).itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(f"{name} is {dtype}{shape}, of {nbytes} bytes, but is at {offsets}")
    return name, dtype, tuple(shape), offsets[0], offsets[1]


def _are_sizes(values: list[Any]) -> bool:
    return len(values) <= _MOST_DIMENSIONS and all(type(value) is int and 0 <= value < 1 << 63 for value in values)
