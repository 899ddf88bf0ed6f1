"""FP8 state in dicts and files: matched by slot name, versioned, checksummed, without pickle."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fp8dist.errors import CheckpointError
from fp8dist.state.arena import Arena
from fp8dist.state.slots import Slot

__all__ = ["FORMAT_VERSION", "collect", "read_file", "restore", "validated_slots", "write_file"]

logger = logging.getLogger("fp8dist")

FORMAT_VERSION = 1
_FILE_FORMAT = "fp8dist-state"
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


def collect(arenas: Sequence[Arena]) -> dict[str, Any]:
    """The state of all slots as a dict of CPU tensors in slot order, plus names and version."""
    slots = [slot for arena in arenas for slot in arena.index]
    order = sorted(range(len(slots)), key=slots.__getitem__)

    def merged(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
        whole = torch.cat([t.detach().cpu() for t in tensors], dim)
        return whole.index_select(dim, torch.tensor(order, dtype=torch.int64, device="cpu"))

    return {
        "version": FORMAT_VERSION,
        "slots": [list(slots[i]) for i in order],
        "step": arenas[0].step.detach().cpu().to(torch.int64).clone(),
        "scale": merged([a.scale for a in arenas]),
        "amax": merged([a.amax for a in arenas]),
        "cold": merged([a.cold for a in arenas]),
        "counters": merged([a.counters for a in arenas], 1),
        "history": merged([a.ordered_history() for a in arenas]),
    }


def restore(arenas: Sequence[Arena], saved: Mapping[str, Any], strict: bool) -> None:
    """Put a collected state into arenas, slot by slot name. Nothing is changed if it does not fit.

    A longer history keeps its newest entries; a shorter one is older than nothing (zeros in front).

    Raises:
        CheckpointError: version, shapes or dtypes are off; with ``strict``, other slots.
    """
    names = validated_slots(saved)
    places = {name: i for i, name in enumerate(names)}
    ours = {slot for arena in arenas for slot in arena.index}
    missing, unexpected = sorted(ours - places.keys()), sorted(places.keys() - ours)
    if missing or unexpected:
        text = f"missing slots: {_some(missing)}; unexpected slots: {_some(unexpected)}"
        if strict:
            raise CheckpointError(f"the saved FP8 state is of another model. {text}")
        logger.warning("fp8dist: loading FP8 state non-strictly. %s", text)
    for arena in arenas:
        _restore_arena(arena, places, saved)


def _restore_arena(arena: Arena, places: Mapping[Slot, int], saved: Mapping[str, Any]) -> None:
    found = [(i, places[slot]) for slot, i in arena.index.items() if slot in places]
    mine = torch.tensor([i for i, _ in found], dtype=torch.int64, device=arena.device)
    theirs = torch.tensor([i for _, i in found], dtype=torch.int64, device="cpu")

    def rows(name: str, dim: int = 0) -> Tensor:
        values: Tensor = saved[name].cpu()
        return values.index_select(dim, theirs).to(arena.device)

    arena.scale[mine] = rows("scale")
    torch.reciprocal(arena.scale, out=arena.inv_scale)
    arena.amax[mine] = rows("amax")
    arena.cold[mine] = rows("cold")
    arena.counters[:, mine] = rows("counters", 1)  # These say where in its ring a window starts.
    arena.write_history(_fitted(rows("history"), arena.ring.length), mine)
    arena.step.copy_(saved["step"])


def validated_slots(saved: Mapping[str, Any], values: bool = True) -> list[Slot]:
    """The slots of a collected state, in order.

    Args:
        values: False: a state with impossible values, which one may want to look at, will do.

    Raises:
        CheckpointError: version, names, shapes, dtypes or values are not those of a state.
    """
    version = saved.get("version")
    if version != FORMAT_VERSION:
        raise CheckpointError(f"FP8 state has version {version!r}, this library reads version {FORMAT_VERSION}")
    absent = [name for name in (*_TENSORS, "slots") if name not in saved]
    if absent:
        raise CheckpointError(f"FP8 state lacks {', '.join(absent)}")
    try:
        names = [Slot(*map(str, pair)) for pair in saved["slots"]]
    except TypeError:
        raise CheckpointError("FP8 state has a malformed list of slots") from None
    n = len(names)
    if len(set(names)) != n:
        raise CheckpointError("FP8 state names a slot twice")
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
    if not values:
        return names
    if not bool(((saved["scale"] > 0) & saved["scale"].isfinite()).all()):
        raise CheckpointError("FP8 state holds a scale that is not positive and finite")
    for name in ("amax", "history"):
        if not bool(((saved[name] >= 0) & saved[name].isfinite()).all()):
            raise CheckpointError(f"FP8 state: {name} holds a value that is negative or not finite")
    return names


def _fitted(history: Tensor, length: int) -> Tensor:
    missing = length - history.shape[1]
    if missing <= 0:
        return history[:, -length:]
    return torch.nn.functional.pad(history, (missing, 0))


def _some(names: Sequence[Slot]) -> str:
    if not names:
        return "none"
    shown = ", ".join(map(str, names[:4]))
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def write_file(path: str | os.PathLike[str], state: Mapping[str, Any], info: Mapping[str, Any]) -> None:
    """Write a collected state as safetensors, atomically. ``info``: JSON values, kept as metadata."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: state[name].contiguous() for name in _TENSORS}
    header = {"version": state["version"], "slots": state["slots"], "info": dict(info)}
    text = json.dumps(header, sort_keys=True, separators=(",", ":"))
    metadata = {"format": _FILE_FORMAT, "header": text, "sha256": _checksum(text, tensors)}
    handle, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    try:
        save_file(tensors, partial, metadata)
        os.replace(partial, target)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def read_file(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(collected state, info) of a file that ``write_file`` made.

    Raises:
        CheckpointError: not such a file, truncated, changed, or of another version. Names the file.
    """
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FILE_FORMAT:
                raise CheckpointError(f"{path}: not an fp8dist state file")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        if _checksum(metadata.get("header", ""), tensors) != metadata.get("sha256"):
            raise CheckpointError(f"{path}: checksum does not match: the file was damaged")
        header = json.loads(metadata["header"])
        return {"version": header["version"], "slots": header["slots"], **tensors}, header["info"]
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read as FP8 state: {error}") from None


def _checksum(header: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
