"""Measured tiles, shipped as ``tables/<device>.json`` and written by ``scripts/gpu tune``.

A file holds the measurements for one kind of device::

    {"format": 2, "device": "NVIDIA H200", "measured": "2025-01-31", "commit": "…", "versions": {…},
     "entries": [{"scaling": "tensorwise", "fast_accumulation": true, "a": "e4m3", "b": "e4m3", "out": "bfloat16",
                  "m": 4096, "n": 4096, "k": 4096, "tile": {"rows": 128, …},
                  "vs_torch": 1.04, "low": 1.03, "high": 1.05}, …]}

Only products for which ``Entry.faster`` is true have an entry. n and k are exact. m is a bucket, the smallest power of
two at or above the real m: numbers of tokens vary, but within a bucket the best tile hardly does. If nothing was
measured, ``measured`` and ``commit`` are null, and ``entries`` is empty.
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

FORMAT = 2
Key = tuple[str, bool, str, str, str, int, int, int]
"""(scaling, fast accumulation, dtype of a, of b, of the result, bucket of m, n, k)."""

FASTER = 1.02
"""Smallest ``vs_torch`` of an entry. A smaller gain does not justify results whose bits differ from torch's."""


@dataclass(frozen=True)
class Tile:
    """The work of one program: ``rows`` x ``columns`` of the result, ``depth`` of the contracted dim per step.

    ``warps``: per program. ``stages``: steps whose operands are in shared memory at a time (Triton's ``num_stages``).
    ``group``: rows of tiles that are computed column by column (see ``products.tile_at``).
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int


@dataclass(frozen=True)
class Entry:
    """One measurement. ``m`` is a bucket; ``a``, ``b``, ``out`` name dtypes.

    ``vs_torch`` is torch's time divided by ours; ``low`` to ``high`` is its 95 % confidence interval.
    """

    scaling: str
    fast_accumulation: bool
    a: str
    b: str
    out: str
    m: int
    n: int
    k: int
    tile: Tile
    vs_torch: float
    low: float
    high: float

    @property
    def key(self) -> Key:
        return self.scaling, self.fast_accumulation, self.a, self.b, self.out, self.m, self.n, self.k

    @property
    def faster(self) -> bool:
        """True if Triton is faster than torch by at least ``FASTER``, and the interval excludes equal speed."""
        return self.vs_torch >= FASTER and self.low > 1.0

    def described(self) -> dict[str, Any]:
        """Return the entry as JSON values."""
        return asdict(self)


class TileTable:
    """The measured tiles for one kind of device."""

    def __init__(self, entries: Mapping[Key, Entry]) -> None:
        self._entries = MappingProxyType(dict(entries))

    @staticmethod
    @functools.cache
    def of(device: str) -> TileTable:
        """Return the shipped table for the device with this name, or an empty one."""
        file = importlib.resources.files(__package__) / "tables" / file_name(device)
        return TileTable.from_json(file.read_text()) if file.is_file() else TileTable({})

    @staticmethod
    def from_json(text: str) -> TileTable:
        """Parse a file. Raise ValueError for another format or a bad entry."""
        content = json.loads(text)
        if content.get("format") != FORMAT:
            raise ValueError(f"expected a tile table of format {FORMAT}, found {content.get('format')}")
        try:
            entries = [Entry(**{**one, "tile": Tile(**one["tile"])}) for one in content["entries"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"bad entry in a tile table: {error}") from error
        return TileTable({entry.key: entry for entry in entries})

    def entry(self, key: Key) -> Entry | None:
        """Return the measurement with this key, or None."""
        return self._entries.get(key)


def bucket(m: int) -> int:
    """Return the smallest power of two >= ``m``."""
    return 1 << max(m - 1, 0).bit_length()


def file_name(device: str) -> str:
    """Return the file name of a device's table, such as nvidia-h200.json for "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"
