"""Read files of torch.save, zip archives and the legacy format, without ``torch.load``.

Errors are CheckpointErrors whose text continues the name of a file ("is truncated …"). ``failures.reading`` puts the
name in front.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from fp8dist.common.text import dtype_name
from fp8dist.errors import CheckpointError
from fp8dist.files.entries import Item, SavedEntry, States
from fp8dist.files.pickles import Unpickler
from fp8dist.files.safetensor_files import slot_items
from fp8dist.files.slices import FileSlice
from fp8dist.files.values import TORCH_SAVE, Storage, StoredTensor, flatten, plain_tensor, storage_of
from fp8dist.state.storage import from_bytes, looks_like_state

LEGACY_MAGIC = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # ``torch.serialization.MAGIC_NUMBER``, pickled, without PROTO.
_LEGACY_VERSION = 1001
_LARGEST_PICKLE = 1 << 32  # FP8 state is in the pickle: 410 MB of history at 100,000 slots, 615 MB if text-encoded.
_HOUSEKEEPING = ("version", "byteorder", ".format_version", ".storage_alignment", ".data/serialization_id")

Locate = Callable[[Storage], tuple[int, int]]


class Archive:
    """A zip archive as torch.save writes it: uncompressed records in one folder. Opening it verifies all checksums.

    Raises:
        CheckpointError: the archive is another kind of zip, truncated, damaged, or has compressed or encrypted records.
    """

    def __init__(self, file: FileSlice) -> None:
        self._file = file
        try:
            self._zip = zipfile.ZipFile(cast(BinaryIO, file))
        except zipfile.BadZipFile as error:
            raise CheckpointError(f"is truncated or damaged: {error}") from None
        names = [info.filename for info in self._zip.infolist()]
        folders = [name.partition("/")[0] for name in names if name.partition("/")[2] == "data.pkl"]
        if not folders:
            npz = names and all(name.endswith(".npy") for name in names)
            raise CheckpointError(
                f"is {'a NumPy .npz file' if npz else 'a foreign zip archive'}, not one of torch.save"
            )
        if f"{folders[0]}/constants.pkl" in names:
            raise CheckpointError("is a TorchScript archive, expected a file of torch.save")
        self._records = {info.filename.partition("/")[2]: info for info in self._zip.infolist()}
        if len(folders) > 1 or len(self._records) != len(names):
            raise CheckpointError("has two records of one name")
        self._require_whole()

    def _require_whole(self) -> None:
        """Raise CheckpointError unless all records are uncompressed and have the right checksum."""
        if sum(info.file_size for info in self._records.values()) > self._file.length:
            raise CheckpointError("has records that are larger than the file")
        for name, info in self._records.items():
            if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size or info.flag_bits & 1:
                raise CheckpointError(f"record {name} is compressed or encrypted, torch.save does neither")
        damaged = self._zip.testzip()
        if damaged is not None:
            raise CheckpointError(
                f"record {damaged.partition('/')[2]} is damaged: its CRC or header does not match (or it was written "
                "without checksums, under torch.serialization.set_crc32_options(False))"
            )

    def content(self) -> tuple[Any, int]:
        """Return (the saved value, with a ``StoredTensor`` for each tensor; size of the pickle in bytes)."""
        order = self._bytes("byteorder") if "byteorder" in self._records else b"little"
        if order != b"little":
            raise CheckpointError("was written on a big-endian machine, expected little-endian")
        data = self._bytes("data.pkl")
        return Unpickler(io.BytesIO(data), len(data), TORCH_SAVE, storage_of).load(), len(data)

    def storage(self, storage: Storage) -> tuple[int, int]:
        """Return (place in the file, size in bytes) of a storage's record."""
        info = self._records.get(f"data/{storage.key}")
        if info is None:
            raise CheckpointError(f"has no record data/{storage.key}")
        # The record is after its own header: 30 bytes, which end with the lengths of the name and the extra field.
        header = self._file.bytes_at(info.header_offset, 30).numpy().tobytes()
        name, extra = struct.unpack("<HH", header[26:])
        return info.header_offset + len(header) + name + extra, info.file_size

    def payload(self) -> Tensor:
        """Return the bytes of all records but those that describe the archive (version, byte order, …), as uint8[n],
        in the order of their names."""
        data = b"".join(self._bytes(name) for name in sorted(self._records) if name not in _HOUSEKEEPING)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def payload_size(self) -> int:
        """Return the size of ``payload`` in bytes."""
        return sum(info.file_size for name, info in self._records.items() if name not in _HOUSEKEEPING)

    def _bytes(self, name: str) -> bytes:
        if name == "data.pkl" and self._records[name].file_size > _LARGEST_PICKLE:
            raise CheckpointError(f"has a pickle of more than {_LARGEST_PICKLE} bytes")
        return self._zip.read(self._records[name])


def items_of(value: Any, size: int, file: FileSlice, locate: Locate, prefix: str = "") -> tuple[list[Item], States]:
    """Return the entries of all leaves of a saved value, and by name the FP8 states among the leaves. The entries of an
    FP8 state are its slots.

    Args:
        value, size: as ``Archive.content`` returns them.
        locate: returns (place in ``file``, size in bytes) of a storage.
        prefix: name of ``value`` in the checkpoint, put before the names of leaves.

    Raises:
        CheckpointError: a tensor or an FP8 state is damaged.
        Unsupported: a leaf is no tensor, number or text.
    """
    items: list[Item] = []
    states: States = {}
    for name, leaf in flatten(value, size, prefix):
        if isinstance(leaf, bytes) and looks_like_state(leaf):
            states[name] = from_bytes(leaf, name)
            items += slot_items(states[name][0], f"{name}.")
            continue
        load: Callable[[], Tensor]
        if isinstance(leaf, Storage):
            leaf = StoredTensor.whole(leaf)
        if isinstance(leaf, StoredTensor):
            start, available = locate(leaf.storage)
            leaf.check(available, file.length)
            entry = SavedEntry(name, "parameter", leaf.shape, dtype_name(leaf.dtype))
            load = partial(leaf.read, file, start)
        else:
            load = partial(plain_tensor, leaf)
            found = load()
            entry = SavedEntry(name, "parameter", tuple(found.shape), dtype_name(found.dtype))
        items.append((entry, load))
    return items, states


def saved_content(file: FileSlice) -> tuple[Any, int, Locate] | None:
    """Return the content of a file of torch.save, as ``zip_content`` does. None if the first bytes are those of another
    kind of file."""
    head = file.bytes_at(0, min(16, file.length)).numpy().tobytes()
    if head.startswith(b"PK"):
        return zip_content(file)
    return legacy_content(file) if head[:1] == b"\x80" and head[2:].startswith(LEGACY_MAGIC) else None


def zip_content(file: FileSlice) -> tuple[Any, int, Locate]:
    """Read a zip file of torch.save. Return (the saved value, with a ``StoredTensor`` for each tensor; size of the
    pickle in bytes; function that returns the place of a storage in the file)."""
    archive = Archive(file)
    return *archive.content(), archive.storage


def legacy_content(file: FileSlice) -> tuple[Any, int, Locate]:
    """Like ``zip_content``, for files of ``torch.save(…, _use_new_zipfile_serialization=False)``. No checksums."""
    stream = io.BufferedReader(file)

    def pickled(with_storages: bool = False) -> Any:
        stored: list[Storage] = []

        def remember(identity: Any) -> Storage:
            stored.append(storage_of(identity))
            return stored[-1]

        value = Unpickler(stream, file.length, TORCH_SAVE, remember if with_storages else None).load()
        return (value, stored) if with_storages else value

    _magic, version, system = pickled(), pickled(), pickled()
    if version != _LEGACY_VERSION or not isinstance(system, dict) or not system.get("little_endian"):
        raise CheckpointError(f"is of another protocol or big-endian, expected {_LEGACY_VERSION}, little-endian")
    (value, stored), keys = pickled(with_storages=True), pickled()
    size = stream.tell()
    places = _legacy_places(keys, {storage.key: storage for storage in stored}, file, size)
    return value, size, lambda storage: places[storage.key]


def _legacy_places(keys: Any, storages: dict[str, Storage], file: FileSlice, start: int) -> dict[str, tuple[int, int]]:
    """Return by key (place, size in bytes) of each storage. From ``start`` on, the file has each storage's number of
    elements, int64, and then its bytes, in the order of ``keys``."""
    if not isinstance(keys, list) or not all(isinstance(k, str) for k in keys) or sorted(keys) != sorted(storages):
        raise CheckpointError("its list of storages is damaged")
    places: dict[str, tuple[int, int]] = {}
    for key in keys:
        (numel,) = struct.unpack("<q", file.bytes_at(start, 8).numpy().tobytes())
        storage = storages[key]
        if numel != storage.numel:
            raise CheckpointError(f"storage {key} has {numel} elements, expected {storage.numel}")
        if start + 8 + storage.nbytes > file.length:
            raise CheckpointError(f"is truncated in storage {key}")
        places[key] = (start + 8, storage.nbytes)
        start += 8 + storage.nbytes
    if start != file.length:
        raise CheckpointError(f"has {file.length - start} bytes after its last storage")
    return places
