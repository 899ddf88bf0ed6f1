"""The results file of one device: format, reading and writing.

::

    {"schema": 2, "smoke": false, "date": "2026-01-31T12:00:00Z", "run": "…", "commit": "…" or null, "dirty": false,
     "device":   {"name", "capability", "driver", "memory_gib", "processors"},
     "versions": {"python", "torch", "cuda", "triton", "torchao", "fp8dist"},
     "tests":    null or {"passed", "failed", "skipped", "seconds", "failures", "running", "cut_off"},
     "again":    likewise, of the tests that were run again after all had run; missing if none were,
     "parts":    {"matmul_tensorwise": {"status", "seconds", "problem", "cases": [{"name", …}], "figures": {…}}, …}}

A ratio is [median, low, high]: the time of what we compare with over the time of fp8dist, and the ends of the ratio's
95 % confidence interval. Numbers that are not finite are text: "nan", "inf", "-inf". Parts and tests have their own
"commit", "dirty" and "date", because they may come from different runs. A figure is missing if a result that it
depends on was wrong; the ``problem`` of the part or the case says why.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from scripts.results_files import now

SCHEMA = 2
STAMP = ("commit", "dirty", "date")
PARTS = MappingProxyType(
    {
        **{"matmul_tensorwise": 36, "linears": 45, "experts": 27, "memory": 20, "update": 6, "crossover": 16},
        **{"matmul_rowwise": 24, "matmul_blockwise": 20, "matmul_mx": 20},
        **{"sustained": 126, "torchao": 30, "job": 110},
    }
)
"""The parts of the benchmark in order, with their shares of the time limit; with the default limit, these are seconds.
Time that a part does not use goes to the parts after it."""


def file_of(folder: Path, device: str) -> Path:
    """Return the path of the results of a device, such as nvidia-h200.json."""
    return folder / (re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json")


def read(path: Path) -> dict[str, Any]:
    """Return the results in a file.

    Raises:
        ValueError: the file is not JSON, or has another schema. The message says which.
    """
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"{path}: not results of schema {SCHEMA}")
    return data


def load_all(folder: Path) -> list[dict[str, Any]]:
    """Return all devices' results, by file name. Leaves out smoke runs, whose figures mean nothing."""
    found = [read(path) for path in sorted(folder.glob("*.json"))]
    return [data for data in found if not data["smoke"]]


def earlier(path: Path) -> dict[str, Any] | None:
    """Return the results in a file; None if it is missing or, after printing why, invalid."""
    try:
        return read(path) if path.exists() else None
    except ValueError as error:
        print(f"no results: {error}", file=sys.stderr)
        return None


def empty(commit: str | None, dirty: bool, run: str, smoke: bool = False) -> dict[str, Any]:
    """Return results without device, versions and parts. The arguments are those of ``add_flags``."""
    about = {"schema": SCHEMA, "smoke": smoke, "date": now(), "run": run, "commit": commit, "dirty": dirty}
    return {**about, "tests": None, "parts": {}}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which code is measured, and how."""
    parser.add_argument("--commit", help="the measured commit, if there is no repository")
    parser.add_argument("--dirty", action="store_true", help="the tree has changes to this commit")
    parser.add_argument("--run", default="alone", help="ID of the run; results with the same ID belong together")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, also on a CPU; its figures mean nothing")


def stamped(content: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """Add commit, "dirty" and date to a part or to tests, because a file may hold results of several commits."""
    return {**content, **{key: results[key] for key in STAMP}}


def merged(old: Mapping[str, Any] | None, new: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``new``, plus the parts and tests of ``old`` that ``new`` lacks. ``old`` is ignored unless it has the same
    device and versions, and comes from the same run or from a clean, known commit."""
    if old is None or any(old.get(key) != new.get(key) for key in ("smoke", "versions", "device")):
        return dict(new)
    if old["run"] != new["run"] and (old["commit"] is None or old["dirty"]):
        return dict(new)
    parts = {**old["parts"], **new["parts"]}
    return {
        **new,
        "tests": new["tests"] or old["tests"],
        **({"again": again} if (again := new.get("again") or old.get("again")) else {}),
        "parts": {name: parts[name] for name in PARTS if name in parts},
    }
