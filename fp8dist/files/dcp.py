"""Read folders of torch.distributed.checkpoint (DCP): a pickled index, and files with pieces of tensors."""

from __future__ import annotations

import io
import math
import os
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fp8dist.common.text import dtype_name
from fp8dist.errors import CheckpointError
from fp8dist.files.archives import Archive, items_of, zip_content
from fp8dist.files.entries import PARAMETERS, Item, SavedEntry, Source, States
from fp8dist.files.failures import Unsupported, reading
from fp8dist.files.pickles import Builder, Record, Unpickler
from fp8dist.files.slices import FileSlice
from fp8dist.files.values import COMMON, StoredTensor, sizes

METADATA = ".metadata"
_LARGEST_INDEX = 1 << 30
_RECORDS = (
    *(f"torch.distributed.checkpoint.metadata.{name}" for name in ("Metadata", "TensorStorageMetadata")),
    *(f"torch.distributed.checkpoint.metadata.{name}" for name in ("BytesStorageMetadata", "ChunkStorageMetadata")),
    *(f"torch.distributed.checkpoint.metadata.{name}" for name in ("TensorProperties", "MetadataIndex", "StorageMeta")),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",  # torch before 2.3.
)
# Read and dropped: the path at save time, and the memory format of tensors.
_IGNORED = (
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    "pathlib._local.PosixPath",  # Python 3.13.
    "pathlib._local.WindowsPath",
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
)
_VOCABULARY: Mapping[str, object] = MappingProxyType(
    {
        **COMMON,
        **{name: Builder(name, partial(lambda name, *_: Record(name), name)) for name in _RECORDS},
        **{name: Builder(name, lambda *_: None) for name in _IGNORED},
    }
)
_WORDS = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128})

Key = tuple[str, tuple[int, ...] | None]
"""(name of a value in the index, offsets of a piece of it; None if it is not a tensor)."""


@dataclass(frozen=True)
class Chunk:
    """A piece of a tensor: its offsets and sizes in elements of the tensor, and the bytes in a file that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    piece: FileSlice


def dcp_source(folder: str) -> Source:
    """Open a DCP folder. Values other than tensors are entries too: see ``_value_items``.

    Raises:
        CheckpointError: the index or a file that it names cannot be read, or is damaged. The message names the file.
    """
    index = os.path.join(folder, METADATA)
    with reading(index):
        tensors, pieces = _load_index(index, folder)
    items: list[Item] = []
    states: States = {}
    for name, description in tensors.items():
        with reading(index):
            if _is_tensor(description):
                items.append(_tensor_item(name, description, pieces))
                continue
            piece = _piece(pieces, (name, None))
        of_value, inside = _value_items(name, piece)
        items += of_value
        states |= inside
    return Source(folder, PARAMETERS, items, states)


def _load_index(path: str, folder: str) -> tuple[dict[str, Record], dict[Key, FileSlice]]:
    """Return (descriptions of tensors and other values by name, the bytes of each piece)."""
    file = FileSlice.of(path)
    if file.length > _LARGEST_INDEX:
        raise CheckpointError(f"is larger than {_LARGEST_INDEX} bytes, which no index needs")
    data = file.bytes_at(0, file.length).numpy().tobytes()
    root = _fields(Unpickler(io.BytesIO(data), len(data), _VOCABULARY).load(), "Metadata")
    tensors, stored = root.get("state_dict_metadata"), root.get("storage_data")
    if not isinstance(tensors, dict) or not isinstance(stored, dict) or not all(isinstance(t, str) for t in tensors):
        raise CheckpointError("is no index of torch.distributed.checkpoint: names or places are missing")
    files: dict[str, FileSlice] = {}
    pieces: dict[Key, FileSlice] = {}
    for key, place in stored.items():
        where = _fields(key, "MetadataIndex")
        offset = where.get("offset")
        name = where.get("fqn")
        if not isinstance(name, str):
            raise CheckpointError("is no index of torch.distributed.checkpoint: a place has no name")
        pieces[name, None if offset is None else sizes(offset)] = _checked_piece(
            folder, _fields(place, "_StorageInfo"), files
        )
    return tensors, pieces


def _fields(record: Any, name: str) -> dict[str, Any]:
    """Return the fields of a pickled object of class ``name``. Raise CheckpointError if it is another object."""
    if not isinstance(record, Record) or not record.name.endswith(f".{name}") or not isinstance(record.state, dict):
        raise CheckpointError(f"is no index of torch.distributed.checkpoint: a {name} is missing")
    return record.state


def _checked_piece(folder: str, place: dict[str, Any], files: dict[str, FileSlice]) -> FileSlice:
    """Return the bytes at a place in the index. ``files``: by path, files that earlier calls opened; grows."""
    name = place.get("relative_path")
    offset, length = sizes((place.get("offset"), place.get("length")))
    if place.get("transform_descriptors"):
        raise CheckpointError("its pieces are transformed (compressed, say) by an extension, expected plain ones")
    if not isinstance(name, str) or not name or "\0" in name:
        raise CheckpointError("does not name the file of a piece, expected a relative path")
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts:
        raise CheckpointError(f"names the file {name!r}, which is outside the folder")
    path = os.path.join(folder, name)
    if path not in files:
        with reading(path):
            files[path] = FileSlice.of(path)
    return files[path].part(offset, length)


def _piece(pieces: Mapping[Key, FileSlice], key: Key) -> FileSlice:
    if key not in pieces:
        raise CheckpointError(f"does not say where {key[0]}{'' if key[1] is None else f' at {key[1]}'} is stored")
    return pieces[key]


def _is_tensor(description: Any) -> bool:
    name = description.name.rpartition(".")[2] if isinstance(description, Record) else type(description).__name__
    if name not in ("TensorStorageMetadata", "BytesStorageMetadata"):
        raise CheckpointError(f"describes a {name}, expected a tensor or bytes")
    return bool(name == "TensorStorageMetadata")


def _tensor_item(name: str, description: Record, pieces: Mapping[Key, FileSlice]) -> Item:
    """Return the entry of a tensor. Raise CheckpointError unless its pieces fill it, and have enough bytes."""
    fields = _fields(description, "TensorStorageMetadata")
    shape, properties = sizes(fields.get("size")), fields.get("properties")
    dtype = properties.state[0] if isinstance(properties, Record) and isinstance(properties.state, tuple) else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"does not say which dtype {name} has")
    found = [_fields(chunk, "ChunkStorageMetadata") for chunk in fields.get("chunks") or ()]
    boxes = {(sizes(chunk.get("offsets")), sizes(chunk.get("sizes"))) for chunk in found}
    if any(len(o) != len(shape) or len(s) != len(shape) for o, s in boxes) or not tiles(shape, boxes):
        raise CheckpointError(f"its pieces of {name} do not fill {shape} exactly")
    chunks = [Chunk(o, s, _piece(pieces, (name, o))) for o, s in sorted(boxes) if 0 not in s]
    for chunk in chunks:
        if torch.Size(chunk.sizes).numel() * dtype.itemsize > chunk.piece.length:
            raise CheckpointError(f"claims a piece of {name} of shape {chunk.sizes} in {chunk.piece.length} bytes")
    return SavedEntry(name, "parameter", shape, dtype_name(dtype)), partial(_assembled, name, shape, dtype, chunks)


def tiles(shape: Sequence[int], boxes: Iterable[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """True if ``boxes`` (offsets, sizes) fill ``shape`` without gap or overlap. Takes time linear in the number of
    boxes.

    Each coordinate at which a box begins or ends gets a random position, and volumes are computed from these. Volumes
    of an exact tiling add up to the whole. Those of other boxes do so with a probability below 1 in 2**50: with the
    real positions, an overlap could offset a gap of equal size.
    """
    chance = random.Random()
    marks: list[defaultdict[int, int]] = [defaultdict(lambda: chance.getrandbits(64)) for _ in shape]

    def volume(offsets: Sequence[int], extents: Sequence[int]) -> int:
        ends = zip(marks, offsets, extents)
        return math.prod(mark[start + extent] - mark[start] for mark, start, extent in ends)

    whole = volume([0] * len(shape), shape)
    return whole == sum(volume(offsets, extents) for offsets, extents in boxes)


def _assembled(name: str, shape: tuple[int, ...], dtype: torch.dtype, chunks: list[Chunk]) -> Tensor:
    """Return the whole tensor. Holds this tensor and one piece in memory."""
    if len(chunks) == 1:
        return _part(name, dtype, chunks[0])
    whole = torch.empty(shape, dtype=dtype, device="cpu")
    words = whole.view(_WORDS[dtype.itemsize])  # Some dtypes cannot be copied into a slice.
    for chunk in chunks:
        place = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes))
        words[place] = _part(name, dtype, chunk).view(words.dtype)
    return whole


def _part(name: str, dtype: torch.dtype, chunk: Chunk) -> Tensor:
    """Read a piece, which is a file of torch.save with one tensor."""
    file = chunk.piece
    with _naming(file, f"the piece of {name} at {chunk.offsets}"):
        value, _, locate = zip_content(file)
        if not isinstance(value, StoredTensor) or value.shape != chunk.sizes or value.dtype != dtype:
            found = f"{value.dtype} {value.shape}" if isinstance(value, StoredTensor) else "no tensor"
            raise CheckpointError(f"it is {found}, expected {dtype} {chunk.sizes}")
        start, available = locate(value.storage)
        value.check(available, file.length)
        return value.read(file, start)


def _value_items(name: str, file: FileSlice) -> tuple[list[Item], States]:
    """Return the entries of a value that is not a tensor, and the FP8 states in it.

    A value of tensors, numbers and text in the format of torch.save gives an entry per leaf. Any other value is one
    entry, its bytes. Leaves are better, because equal values may be stored as different bytes (a pickle distinguishes
    two equal objects from one object that occurs twice).
    """
    with _naming(file, f"the value {name}"):
        if file.bytes_at(0, min(4, file.length)).numpy().tobytes() != b"PK\x03\x04":
            entry = SavedEntry(name, "parameter", (file.length,), "uint8")
            return [(entry, partial(file.bytes_at, 0, file.length))], {}
        archive = Archive(file)
        try:
            value, size = archive.content()
            return items_of(value, size, file, archive.storage, name)
        except Unsupported:
            return [(SavedEntry(name, "parameter", (archive.payload_size(),), "uint8"), archive.payload)], {}


@contextmanager
def _naming(file: FileSlice, what: str) -> Iterator[None]:
    """Put the file, ``what`` and its place in the file in front of the errors of the block."""
    with reading(file.path):
        try:
            yield
        except CheckpointError as error:
            detail = str(error).removeprefix(f"{file.path}: ")
            raise CheckpointError(f"{what} (byte {file.start}): {detail}") from None
