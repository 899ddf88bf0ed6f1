"""Safetensors files, alone or as the parts of a model in one folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any

from safetensors import safe_open

from fp8dist.errors import CheckpointError
from fp8dist.offline.entries import PARAMETERS, Entry, Item, Source
from fp8dist.offline.failures import reading
from fp8dist.offline.slices import FileSlice

__all__ = ["SUFFIX", "is_state", "safetensors_source"]

SUFFIX = ".safetensors"
_STATE_FORMAT = "fp8dist-state"
_SHARDED = "DCP_SHARDING_INFO"
_DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
        "BOOL": "bool",
        "C64": "complex64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu",
    }
)


def is_state(path: str) -> bool:
    """Whether a safetensors file says that it is fp8dist state."""
    with safe_open(path, framework="pt") as file:
        return (file.metadata() or {}).get("format") == _STATE_FORMAT


def safetensors_source(path: str, files: list[str]) -> Source:
    """The tensors of all ``files``, which are one checkpoint called ``path``.

    Raises:
        CheckpointError: a file is not readable, or a name is in two of them.
    """
    items: dict[str, Item] = {}
    homes: dict[str, str] = {}
    with ExitStack() as resources:
        for name in files:
            with reading(name):
                FileSlice.of(name)
                file = resources.enter_context(safe_open(name, framework="pt", device="cpu"))
                metadata = file.metadata() or {}
                if metadata.get("format") == _STATE_FORMAT:
                    raise CheckpointError("is fp8dist state among other files of a folder: name the file itself")
                for key in file.keys():  # noqa: SIM118  (not a dict)
                    if key in items:
                        sharded = " (shards of DCP that were not consolidated)" if _SHARDED in metadata else ""
                        raise CheckpointError(f"{key} is in {os.path.basename(homes[key])} as well{sharded}")
                    items[key], homes[key] = _item(file, key), name
        return Source(path, PARAMETERS, items.values(), resources.pop_all())


def _item(file: Any, name: str) -> Item:
    described = file.get_slice(name)
    dtype = described.get_dtype()
    if dtype not in _DTYPES:
        raise CheckpointError(f"{name} is of dtype {dtype}, expected one of {', '.join(_DTYPES)}")
    return Entry(name, "parameter", tuple(described.get_shape()), _DTYPES[dtype]), partial(file.get_tensor, name)
