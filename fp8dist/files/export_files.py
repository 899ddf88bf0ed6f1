"""The folder of an exported model: sharded safetensors, their index, config.json, and the certificate.

Files are written tensor by tensor into ``NAME.partial``, a folder beside ``NAME``; index, config and certificate last.
The folder is renamed to ``NAME`` at the very end, so a folder of this name is complete. A second export to ``NAME``
removes the partial folder of the first one, which then fails. The first one never writes into the second one's folder,
because it opens files relative to its own folder, not by path.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from fp8dist.errors import ConfigurationError
from fp8dist.files.certificate import CERTIFICATE
from fp8dist.files.export_formats import ExportedTensor
from fp8dist.files.safetensor_files import dtype_text
from fp8dist.files.served import CONFIG, INDEX
from fp8dist.files.value_comparison import is_power_of_two
from fp8dist_kernels.reference.content import as_bytes

_SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")


def destination(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a folder to write, with symbolic links resolved.

    Raises:
        ConfigurationError: ``path`` is not the name of a folder.
    """
    try:
        name = os.fsdecode(path)
        whole = Path(os.path.realpath(name))
    except (TypeError, ValueError):
        name, whole = "", Path()
    if not whole.name or os.path.normpath(name) == os.curdir:
        raise ConfigurationError(f"expected the name of a new folder, got {path!r}")
    return whole


class Folder:
    """A folder that is being written: ``begin``, ``write`` for each tensor, ``finish``, and always ``close``. These
    calls raise OSError if something cannot be written.

    Args:
        path: the folder to make.
        tensors: all tensors, in the order in which they will be written.
        tied: {name of a tensor that is left out: name of the tensor that is the same}. Written into the metadata of the
            files, as ``safetensors.torch.save_model`` does.
        shard_bytes: largest size of the tensors in a file, in bytes. A larger tensor has a file of its own.
    """

    def __init__(
        self, path: str | os.PathLike[str], tensors: Sequence[ExportedTensor], tied: Mapping[str, str], shard_bytes: int
    ) -> None:
        self._path = destination(path)
        self._partial = self._path.with_name(f"{self._path.name}.partial")
        self._handle: int | None = None  # File descriptor of the partial folder that ``begin`` made.
        self._old: Path | None = None  # Where ``begin`` has moved the partial folder of another export.
        self._shards = list(_shards(tensors, shard_bytes))
        self._tied = dict(tied)
        self._files = iter(self._shards)
        self._left: list[ExportedTensor] = []
        self._file: IO[bytes] | None = None
        self._number = 0
        self._places: dict[str, str] = {}
        self._digests: dict[str, str] = {}
        self.powers_of_two = True  # False once a written scale of weights is no power of two.

    def begin(self) -> None:
        """Make the partial folder.

        Raises:
            ConfigurationError: the folder exists and is not empty, or ``NAME.partial`` exists and is not of an export.
        """
        if self._path.exists() and (not self._path.is_dir() or any(self._path.iterdir())):
            raise ConfigurationError(f"{self._path} exists: export to a new folder")
        if self._partial.is_dir():
            names = {file.name for file in self._partial.iterdir()} - {INDEX, CONFIG, CERTIFICATE}
            if not all(map(_SHARD.fullmatch, names)):
                raise ConfigurationError(f"{self._partial} exists and is not of an export: move it away")
            # Probably left by an export that was killed. One that lives must lose the folder, not files in it.
            self._old = self._partial.with_name(f"{self._partial.name}.{os.getpid()}")
            if self._old.exists():  # In containers, a process that was killed had this id, too.
                shutil.rmtree(self._old, ignore_errors=True)
            self._partial.rename(self._old)
            shutil.rmtree(self._old, ignore_errors=True)
        self._partial.mkdir(parents=True)
        self._handle = os.open(self._partial, os.O_RDONLY)

    def write(self, tensor: ExportedTensor, value: Tensor) -> None:
        """Write the next tensor: any strides, any device.

        Raises:
            ConfigurationError: another export to this folder has begun.
        """
        if not self._left:
            self._open_next()
        expected = self._left.pop(0)
        assert self._file is not None
        assert (tensor.name, value.dtype, tuple(value.shape)) == (expected.name, expected.dtype, expected.shape)
        value = value.cpu()
        data = as_bytes(value).numpy().data
        self._file.write(data)
        if tensor.role == "weight_scale":
            self.powers_of_two &= is_power_of_two(value)
        self._digests[tensor.name] = hashlib.sha256(data).hexdigest()

    def finish(self, config: Mapping[str, Any], certificate: Callable[[Mapping[str, str]], bytes]) -> None:
        """Write index, config and certificate, and give the folder its name.

        Args:
            certificate: returns its bytes, from the SHA-256 of the bytes of each tensor, by name.

        Raises:
            ConfigurationError: another export to this folder has begun.
        """
        self._close_file()
        total = sum(tensor.nbytes for shard in self._shards for tensor in shard)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(self._places.items()))}
        for name, content in (
            (INDEX, _json(index)),
            (CONFIG, _json(config)),
            (CERTIFICATE, certificate(self._digests)),
        ):
            with self._created(name) as file:
                file.write(content)
                _sync(file)
        _sync_folder(self._partial)
        self._require_own()
        os.replace(self._partial, self._path)
        _sync_folder(self._path.parent)

    def close(self) -> None:
        """Remove the partial folder of an export that did not finish."""
        if self._old is not None:  # The other export may have written on while it was removed.
            shutil.rmtree(self._old, ignore_errors=True)
        if self._file is not None:
            with contextlib.suppress(OSError):  # On a full disk, what is left in its buffer cannot be written either.
                self._file.close()
        if self._handle is not None:
            if self._is_own():
                shutil.rmtree(self._partial, ignore_errors=True)
            os.close(self._handle)
            self._handle = None

    def _is_own(self) -> bool:
        """False if another export has removed the partial folder, and may have made its own."""
        assert self._handle is not None
        try:
            return os.path.samestat(os.stat(self._partial), os.fstat(self._handle))
        except OSError:
            return False

    def _require_own(self) -> None:
        if not self._is_own():
            raise ConfigurationError(f"{self._partial} was removed: does another export write to {self._path}?")

    def _created(self, name: str) -> IO[bytes]:
        self._require_own()
        return open(name, "wb", opener=lambda path, flags: os.open(path, flags, 0o666, dir_fd=self._handle))

    def _open_next(self) -> None:
        """Close the current file, and begin the next one with its header."""
        self._close_file()
        shard = next(self._files)
        self._number += 1
        name = f"model-{self._number:05d}-of-{len(self._shards):05d}.safetensors"
        self._file, self._left = self._created(name), list(shard)
        self._places.update((tensor.name, name) for tensor in shard)
        self._file.write(_header(shard, self._tied))

    def _close_file(self) -> None:
        if self._file is not None:
            _sync(self._file)
            self._file.close()


def _shards(tensors: Sequence[ExportedTensor], shard_bytes: int) -> Iterator[list[ExportedTensor]]:
    """Yield the tensors of each file, in order."""
    shard: list[ExportedTensor] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.nbytes
    yield shard


def _header(tensors: Sequence[ExportedTensor], tied: Mapping[str, str]) -> bytes:
    """Return the head of a safetensors file (https://github.com/huggingface/safetensors, section Format): its length,
    uint64, and JSON with dtype, shape and place of each tensor. Padded, so that data begins at a multiple of 8."""
    here = {tensor.name for tensor in tensors}
    described: dict[str, Any] = {"__metadata__": {"format": "pt", **{a: b for a, b in tied.items() if b in here}}}
    place = 0
    for tensor in tensors:
        described[tensor.name] = {
            "dtype": dtype_text(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [place, place + tensor.nbytes],
        }
        place += tensor.nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _sync(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
