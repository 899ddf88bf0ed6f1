"""Results files: how they are written, read and checked, and those of ``scripts/results``, which the pages show."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = 1
"""Of the published results that say which they have."""


def path_of(name: str, root: Path = ROOT) -> Path:
    """Return the path of the published results with this name."""
    return root / "scripts" / "results" / f"{name}.json"


def load(name: str, root: Path = ROOT) -> Any:
    """Return published results; None if there are none.

    Raises:
        ValueError: they have another schema.
    """
    path = path_of(name, root)
    if not path.exists():
        return None
    data = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(data, dict) and data.get("schema", SCHEMA) != SCHEMA:
        raise ValueError(f"{path}: not results of schema {SCHEMA}")
    return data


def publish(name: str, data: Any) -> None:
    """Replace published results of this checkout, and update its pages."""
    write(path_of(name), data)
    subprocess.run([sys.executable, "-m", "scripts.pages"], cwd=ROOT, check=True)


def write(path: Path, data: Any) -> None:
    """Write a file atomically. Writes numbers that JSON lacks as text: "nan", "inf", "-inf"."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(_as_json(data), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(beside, path)


def _as_json(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _as_json(one) for key, one in value.items()}
    return [_as_json(one) for one in value] if isinstance(value, (list, tuple)) else value


def about() -> dict[str, Any]:
    """Return what published results say first."""
    return {"schema": SCHEMA, "commit": commit_of(), "date": now()}


def now() -> str:
    """Return the date and time in UTC."""
    return f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"


def commit_of(root: Path = ROOT) -> str:
    """Return the commit of a checkout, with a trailing "+" if it has uncommitted changes."""
    commit, changes = (
        subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=False).stdout.strip()
        for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    )
    return (commit or "not known") + ("+" if changes else "")
