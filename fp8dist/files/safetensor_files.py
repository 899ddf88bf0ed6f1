"""Read checkpoints in safetensors files, and fp8dist state files slot by slot."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from fp8dist.common.text import dtype_name
from fp8dist.errors import CheckpointError
from fp8dist.files.entries import PARAMETERS, STATE, Item, SavedEntry, Source
from fp8dist.files.failures import reading
from fp8dist.files.json_files import json_object
from fp8dist.files.slices import FileSlice
from fp8dist.state.storage import FILE_FORMAT, read_file, validated_slots

SUFFIX = ".safetensors"
_SHARDED = "DCP_SHARDING_INFO"
_LARGEST_HEADER = 100_000_000  # As in the safetensors library.
DTYPES: Mapping[str, str] = MappingProxyType(
    {
        **{f"F{bits}": f"float{bits}" for bits in (64, 32, 16)},
        "BF16": "bfloat16",
        **{f"I{bits}": f"int{bits}" for bits in (64, 32, 16, 8)},
        **{f"U{bits}": f"uint{bits}" for bits in (64, 32, 16, 8)},
        "BOOL": "bool",
        "C64": "complex64",
        **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"},
    }
)


def dtype_text(dtype: torch.dtype) -> str:
    """Return the name of a dtype in safetensors files. It must have one: see ``DTYPES``."""
    name = dtype_name(dtype)
    return next(text for text, known in DTYPES.items() if known == name)


class SafetensorsHeader(NamedTuple):
    """The header of a safetensors file, and the bytes after it. ``tensors``: by name, as the JSON describes them, not
    validated."""

    tensors: dict[str, Any]
    metadata: Mapping[str, Any]
    data: FileSlice


def header_of(path: str) -> SafetensorsHeader:
    """Read the header of a safetensors file. Shapes and offsets in it are not checked.

    Raises:
        CheckpointError: the file cannot be read, or the header is no JSON object, or has a name twice (safetensors' own
            reader would take the last one).
    """
    with reading(path):
        file = FileSlice.of(path)
        length = int.from_bytes(file.bytes_at(0, 8).numpy().tobytes(), "little")
        if length > _LARGEST_HEADER:
            raise CheckpointError(f"has a header of {length} bytes, expected at most {_LARGEST_HEADER}")
        tensors = json_object(file.bytes_at(8, length).numpy().tobytes(), path)
        metadata = tensors.pop("__metadata__", None)
        data = file.part(8 + length, file.length - 8 - length)
        return SafetensorsHeader(tensors, metadata if isinstance(metadata, dict) else {}, data)


def is_state(path: str) -> bool:
    """Return True if the metadata of a safetensors file says that it is fp8dist state. Errors as ``header_of``."""
    return header_of(path).metadata.get("format") == FILE_FORMAT


def safetensors_source(path: str, files: list[str]) -> Source:
    """List the tensors of ``files`` as one checkpoint with the path ``path``. Files are read, not mapped into memory:
    mapped pages stay in memory, and if a file becomes shorter, the process is killed.

    Raises:
        CheckpointError: a file cannot be read or is an fp8dist state file, or two files have a tensor of the same name.
    """
    items: dict[str, Item] = {}
    homes: dict[str, str] = {}
    for name in files:
        with reading(name):
            header = header_of(name)
            with safe_open(name, framework="pt"):  # Checks shapes and places.
                pass
            if header.metadata.get("format") == FILE_FORMAT:
                raise CheckpointError("is fp8dist state among other files of a folder: name the file itself")
            for key, described in header.tensors.items():
                if key in items:
                    sharded = " (shards of DCP that were not consolidated)" if _SHARDED in header.metadata else ""
                    raise CheckpointError(f"{key} is in {os.path.basename(homes[key])} as well{sharded}")
                items[key], homes[key] = _item(header.data, key, described), name
    return Source(path, PARAMETERS, items.values())


def _item(data: FileSlice, name: str, described: Mapping[str, Any]) -> Item:
    dtype, (begin, end) = described["dtype"], described["data_offsets"]
    if dtype not in DTYPES:
        raise CheckpointError(f"{name} is of dtype {dtype}, expected one of {', '.join(DTYPES)}")
    entry = SavedEntry(name, "parameter", tuple(described["shape"]), DTYPES[dtype])
    return entry, partial(_values, data.part(begin, end - begin), entry)


def _values(part: FileSlice, entry: SavedEntry) -> Tensor:
    return part.bytes_at(0, part.length).view(getattr(torch, entry.dtype)).reshape(entry.shape)


# fp8dist state -------------------------------------------------------------------------------------


def state_source(path: str) -> Source:
    """Open an fp8dist state file. Reads the whole file, because the checksum covers all of it.

    Raises:
        CheckpointError: the file cannot be read, or is damaged.
    """
    state, info = read_file(path)
    return Source(path, STATE, slot_items(state, ""), {"": (state, info)})


def slot_items(state: Mapping[str, Any], prefix: str) -> Iterator[Item]:
    """Yield the entries of an FP8 state, slot by slot. ``prefix`` comes before their names."""

    def item(name: str, kind: str, values: Tensor) -> Item:
        return SavedEntry(f"{prefix}{name}", kind, tuple(values.shape), dtype_name(values.dtype)), partial(values.clone)

    slots = validated_slots(state, values=False)  # A check must be able to read damaged values.
    yield item("step", "step", state["step"])
    by_slot = {kind: state[kind] for kind in ("scale", "amax", "cold", "history")}
    by_slot["counters"] = state["counters"].t()
    for number, slot in enumerate(slots):
        for kind, values in by_slot.items():
            yield item(str(slot), kind, values[number])
