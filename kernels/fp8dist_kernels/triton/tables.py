"""Measured tiles, shipped as data: ``tables/<device>.json``, written by ``scripts/gpu tune``.

A file holds what was measured on one kind of device::

    {"format": 1, "device": "NVIDIA H200", "measured": "2025-01-31", "commit": "…", "versions": {…},
     "entries": [{"scaling": "tensorwise", "fast_accumulation": true, "m": 4096, "n": 4096, "k": 4096,
                  "tile": {"rows": 128, …}, "vs_torch": 1.01}, …]}

n and k are exact. m is a bucket, the power of two at or above the real one: tokens vary, and what they vary by within a
bucket matters little. ``vs_torch`` is torch's time by ours. ``measured`` and ``commit`` are null, and there are no
entries, where nothing was measured.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

__all__ = ["FORMAT", "Entry", "Tile", "TileTable", "bucket", "file_name"]

FORMAT = 1
Key = tuple[str, bool, int, int, int]


@dataclass(frozen=True)
class Tile:
    """How one program works: on ``rows`` x ``columns`` of the result, ``depth`` of the contracted dim at a time.

    ``stages``: how many steps of operands have room in shared memory. ``group``: rows of tiles walked together.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int


@dataclass(frozen=True)
class Entry:
    """One measurement. ``m``: a bucket."""

    scaling: str
    fast_accumulation: bool
    m: int
    n: int
    k: int
    tile: Tile
    vs_torch: float

    @property
    def key(self) -> Key:
        return self.scaling, self.fast_accumulation, self.m, self.n, self.k

    def described(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


class TileTable:
    """The entries of one kind of device."""

    def __init__(self, entries: Mapping[Key, Entry]) -> None:
        self._entries = MappingProxyType(dict(entries))

    @staticmethod
    @functools.cache
    def of(device: str) -> TileTable:
        """The shipped table of a device of this name; an empty one if there is none."""
        file = importlib.resources.files(__package__) / "tables" / file_name(device)
        return TileTable.from_json(file.read_text()) if file.is_file() else TileTable({})

    @staticmethod
    def from_json(text: str) -> TileTable:
        """Read a file. Raises ValueError for another format or a bad entry."""
        content = json.loads(text)
        if content.get("format") != FORMAT:
            raise ValueError(f"expected a table of tiles of format {FORMAT}, found {content.get('format')}")
        try:
            entries = [Entry(**{**one, "tile": Tile(**one["tile"])}) for one in content["entries"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"bad entry in a table of tiles: {error}") from error
        return TileTable({entry.key: entry for entry in entries})

    def entry(self, m: int, n: int, k: int, scaling: str, fast_accumulation: bool) -> Entry | None:
        """What was measured for a product of this shape."""
        return self._entries.get((scaling, fast_accumulation, bucket(m), n, k))


def bucket(m: int) -> int:
    """The power of two at or above ``m``."""
    return 1 << max(m - 1, 0).bit_length()


def file_name(device: str) -> str:
    """ "NVIDIA H200" → nvidia-h200.json"""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"
