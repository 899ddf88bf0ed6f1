"""FP8 state as bytes and files: keyed by slot name, versioned, checksummed, without pickle."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fp8dist.errors import CheckpointError
from fp8dist.state.slots import Slot

FORMAT_VERSION = 3
"""Version 3 has the recipe of every slot, and the modules in high precision. 1 and 2 were never released."""

FILE_FORMAT = "fp8dist-state"
_NAMES = ("slots", "formats", "recipes", "recipe_of", "precision", "tripped")
_TENSORS: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "step": torch.int64,  # []
        "scale": torch.float32,  # [n]
        "amax": torch.float32,  # [n]
        "cold": torch.bool,  # [n]
        "counters": torch.int64,  # [3, n]
        "history": torch.float32,  # [n, history_len], oldest first
    }
)


def validated_slots(saved: Mapping[str, Any], values: bool = True) -> list[Slot]:
    """Return the slots of a saved state, in order, after checking the state.

    A saved state is a dict: ``version``, ``slots`` ([fqn, role] each), ``formats`` (their names, in the same order),
    ``recipes`` (their descriptions), ``recipe_of`` (for each slot, an index into ``recipes``), ``precision`` (by fqn,
    for modules whose precision deviates from their recipe), ``tripped`` (indices of slots that are about to send their
    modules to high precision), and the tensors above. A history that is shorter than the longest has zeros in front.

    Args:
        values: False: skip the check for impossible values, so that a caller can inspect them.

    Raises:
        CheckpointError: version, names, shapes, dtypes or values are not those of a state.
    """
    version = saved.get("version")
    if version != FORMAT_VERSION:
        raise CheckpointError(f"FP8 state has version {version!r}, this library reads version {FORMAT_VERSION} only")
    absent = [name for name in (*_TENSORS, *_NAMES) if name not in saved]
    if absent:
        raise CheckpointError(f"FP8 state lacks {', '.join(absent)}")
    try:
        names = [Slot(*map(str, pair)) for pair in saved["slots"]]
    except TypeError:
        raise CheckpointError("FP8 state has a malformed list of slots") from None
    n, recipes = len(names), saved["recipes"]
    if len(set(names)) != n:
        raise CheckpointError("FP8 state names a slot twice")
    if not _is_list(saved["formats"], lambda name: isinstance(name, str)) or len(saved["formats"]) != n:
        raise CheckpointError(f"FP8 state has malformed formats, expected a list of {n} format names")
    if not _is_list(recipes, lambda recipe: isinstance(recipe, dict)):
        raise CheckpointError("FP8 state has malformed recipes")
    if not _is_list(saved["recipe_of"], lambda i: _is_place(i, len(recipes))) or len(saved["recipe_of"]) != n:
        raise CheckpointError(f"FP8 state has a malformed recipe_of, expected a recipe index for each of {n} slots")
    if not _is_list(saved["tripped"], lambda i: _is_place(i, n)):
        raise CheckpointError("FP8 state has a malformed list of tripped slots")
    if not isinstance(saved["precision"], dict):
        raise CheckpointError("FP8 state has a malformed precision")
    _require_tensors(saved, n)
    if values:
        _require_values(saved)
    return names


def _is_list(value: object, fits: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(fits, value))


def _is_place(value: object, length: int) -> bool:
    return type(value) is int and 0 <= value < length


def _require_tensors(saved: Mapping[str, Any], n: int) -> None:
    history = saved["history"]
    length = history.shape[1] if isinstance(history, Tensor) and history.ndim == 2 else 0
    shapes = {"step": (), "scale": (n,), "amax": (n,), "cold": (n,), "counters": (3, n), "history": (n, length)}
    for name, dtype in _TENSORS.items():
        value = saved[name]
        if not isinstance(value, Tensor) or value.dtype != dtype or tuple(value.shape) != shapes[name]:
            found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise CheckpointError(f"FP8 state: {name} is {found}, expected {dtype} {shapes[name]}")
    if length == 0:
        raise CheckpointError("FP8 state has an empty history")


def _require_values(saved: Mapping[str, Any]) -> None:
    if not bool(((saved["scale"] > 0) & saved["scale"].isfinite()).all()):
        raise CheckpointError("FP8 state holds a scale that is not positive and finite")
    for name in ("amax", "history"):
        if not bool(((saved[name] >= 0) & saved[name].isfinite()).all()):
            raise CheckpointError(f"FP8 state: {name} holds a value that is negative or not finite")


def to_bytes(state: Mapping[str, Any], info: Mapping[str, Any]) -> bytes:
    """Return a saved state as safetensors, the same bytes for the same state. ``info``: JSON values, stored with it."""
    tensors = {name: state[name].contiguous() for name in _TENSORS}
    header = {"version": state["version"], **{name: state[name] for name in _NAMES}, "info": dict(info)}
    text = _json(header)
    metadata = {"format": FILE_FORMAT, "header": text, "sha256": _checksum(text, tensors)}
    data = save(tensors, metadata)
    # Safetensors writes metadata in an order that changes from call to call.
    end = _header_end(data)
    ordered = _json(json.loads(data[8:end])).encode()
    ordered += b" " * (-len(ordered) % 8)
    return b"".join((len(ordered).to_bytes(8, "little"), ordered, memoryview(data)[end:]))


def from_bytes(data: bytes, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (saved state, info) from the output of ``to_bytes``. ``validated_slots`` checks the state further.

    Raises:
        CheckpointError: the bytes are of another kind, truncated or changed. The message starts with ``name``.
    """
    try:
        tensors = load(data)
        metadata = json.loads(data[8 : _header_end(data)]).get("__metadata__") or {}
        if metadata.get("format") != FILE_FORMAT:
            raise CheckpointError(f"{name}: not an fp8dist state")
        if _checksum(metadata.get("header", ""), tensors) != metadata.get("sha256"):
            raise CheckpointError(f"{name}: checksum does not match: the data is damaged")
        header = json.loads(metadata["header"])
        info = header.pop("info", {})
        return {**header, **tensors}, info
    except (
        SafetensorError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        AssertionError,
        RecursionError,
    ) as error:
        raise CheckpointError(f"{name}: cannot be read as FP8 state: {error}") from None


def looks_like_state(data: bytes) -> bool:
    """True if ``to_bytes`` made these bytes, even if they were damaged later."""
    return f'"format":"{FILE_FORMAT}"'.encode() in data[:64]


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write ``data`` atomically: readers see either the old file or the new one."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and not target.is_file():  # Such as /dev/null: no file may take its place.
        target.write_bytes(data)
        return
    handle, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o666 & ~_umask())  # mkstemp lets only the owner read the file.
        os.replace(partial, target)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def _umask() -> int:
    """Return this process's umask. It can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (saved state, info) from a file with the output of ``to_bytes``.

    Raises:
        CheckpointError: as ``from_bytes``, or the file cannot be read. Names the file.
    """
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    return from_bytes(data, os.fspath(path))


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _header_end(data: bytes) -> int:
    """Return the offset where the header of safetensors ends. The first eight bytes hold its length."""
    return 8 + int.from_bytes(data[:8], "little")


def _checksum(header: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
