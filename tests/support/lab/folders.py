"""Checkpoint folders: find, complete and remove them. Does not import torch.

A complete ("whole") checkpoint is named ``step-`` and its step. It is written under another name and renamed at the
end, and renamed again before it is removed. So a killed process never leaves an incomplete folder with such a name.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = [
    "finish",
    "is_whole",
    "newest",
    "of",
    "partial",
    "prune",
    "put_back",
    "remove_leftovers",
    "set_aside",
    "step_of",
    "whole",
]

_WHOLE = re.compile(r"step-(\d{8,})")
_PARTIAL, _ABANDONED = "partial-", "abandoned-"


def of(out: Path) -> Path:
    """Return the folder of checkpoints for this ``--out``."""
    return out / "checkpoints"


def partial(parent: Path, step: int) -> Path:
    """Return the folder in which the checkpoint of this step is written."""
    return parent / f"{_PARTIAL}{_name(step)}"


def is_whole(folder: Path) -> bool:
    """Return True if the folder is a complete checkpoint."""
    return bool(_WHOLE.fullmatch(folder.name)) and (folder / ".metadata").is_file()


def step_of(folder: Path) -> int:
    """Return the step of a complete checkpoint. Raise ValueError if the name is not that of one."""
    match = _WHOLE.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"{folder} is not the name of a complete checkpoint")
    return int(match[1])


def whole(parent: Path) -> list[Path]:
    """Return all complete checkpoints, oldest first."""
    return sorted(filter(is_whole, _children(parent)), key=step_of)


def newest(parent: Path) -> Path | None:
    """Return the newest complete checkpoint, or None."""
    return max(whole(parent), key=step_of, default=None)


def finish(parent: Path, step: int) -> Path:
    """Rename a checkpoint that all ranks have written to its final name, and sync it to disk. Return the new path."""
    written, final = partial(parent, step), parent / _name(step)
    if final.exists():  # Left by an earlier run, if this one resumed from an older checkpoint.
        _remove(final)
    _to_disk(written)
    written.rename(final)
    _to_disk(parent)
    return final


def prune(parent: Path, keep: int) -> None:
    """Remove all complete checkpoints but the newest ``keep``."""
    for folder in whole(parent)[:-keep]:
        _remove(folder)


def remove_leftovers(parent: Path) -> list[Path]:
    """Remove incomplete and partly removed checkpoints. Return their folders."""
    leftovers = [folder for folder in _children(parent) if folder.name.startswith(_PARTIAL)]
    for folder in leftovers:
        shutil.rmtree(folder)
    return leftovers


def set_aside(parent: Path, after: int) -> list[Path]:
    """Rename complete checkpoints of steps after ``after``, so that a run resumed from ``after`` does not find them.

    Return the new paths. Checkpoints set aside earlier stay.
    """
    later = [folder for folder in whole(parent) if step_of(folder) > after]
    return [folder.rename(_unused(parent / f"{_ABANDONED}{folder.name}")) for folder in later]


def put_back(aside: Iterable[Path]) -> None:
    """Undo ``set_aside``."""
    for folder in aside:
        match = _WHOLE.search(folder.name)
        assert match is not None
        folder.rename(folder.with_name(match[0]))


def _unused(folder: Path) -> Path:
    """Return this path, or the first unused one of ``…-2``, ``…-3`` and so on."""
    names = itertools.chain([folder], (folder.with_name(f"{folder.name}-{i}") for i in itertools.count(2)))
    return next(name for name in names if not name.exists())


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _children(parent: Path) -> Iterator[Path]:
    return iter(sorted(parent.iterdir())) if parent.is_dir() else iter(())


def _remove(folder: Path) -> None:
    doomed = folder.with_name(f"{_PARTIAL}removed-{folder.name}")
    if doomed.exists():
        shutil.rmtree(doomed)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def _to_disk(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
