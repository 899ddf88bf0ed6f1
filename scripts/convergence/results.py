"""The results file: format, reading and validation.

::

    {"schema": 1, "date": "2026-01-31T12:00:00Z", "commits": ["…"], "machine": "…", "versions": {"torch", …},
     "steps": 300, "flags": ["--width", "128"],
     "runs": {"fp32": {"0": {"losses": [one per step], "validation_loss": …, "tokens_per_s": …}, …}, …},
     "gradients": null or {"seed", "points": [{"step", "cases": [{"recipe", "fp8": ["fprop", …],
                   "weights": {fqn: cosine}, "inputs": {fqn: cosine}, "overall"}]}]}}

``commits``: the commits of the runs; a trailing "+" marks uncommitted changes. Numbers that are not finite are text:
"nan", "inf".
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from scripts.convergence.variants import VARIANTS

__all__ = ["FILE", "MIXTURE", "SCHEMA", "commit_of", "folder_of", "load", "problems_of"]

SCHEMA = 1
FILE, MIXTURE = "convergence.json", "mixture.json"
"""The results, and published ones of mixtures of experts."""

_TOP = {
    **{"date": str, "machine": str, "steps": int},
    **{"commits": list, "flags": list, "versions": dict, "runs": dict},
}


def folder_of(root: Path) -> Path:
    """Return the folder of the published results, from which the pages are made."""
    return root / "scripts" / "results"


def commit_of(root: Path) -> str:
    """Return the commit of a checkout, with a trailing "+" if it has uncommitted changes."""
    commit, changes = (
        subprocess.run(["git", *command], cwd=root, capture_output=True, text=True, check=False).stdout.strip()
        for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
    )
    return (commit or "not known") + ("+" if changes else "")


def load(root: Path, name: str = FILE) -> dict[str, Any] | None:
    """Return the published results; None if there are none.

    Raises:
        ValueError: the file is not a results file. The message says why.
    """
    path = folder_of(root) / name
    if not path.exists():
        return None
    data = json.loads(path.read_text())
    problems = problems_of(data)
    if problems:
        raise ValueError(f"{path}: {'; '.join(problems)}")
    return data


def problems_of(data: Any) -> list[str]:
    """Return the problems of a results file's content; empty if the content is valid."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        return [f"not results of schema {SCHEMA}"]
    found = [
        f"{key} is missing or of another type" for key, kind in _TOP.items() if not isinstance(data.get(key), kind)
    ]
    if found:
        return found
    found += [f"unknown variant {name!r}" for name in data["runs"] if name not in VARIANTS]
    for name, seeds in data["runs"].items():
        for seed, run in seeds.items():
            if len(run.get("losses", ())) != data["steps"] or "validation_loss" not in run:
                found.append(f"{name}, seed {seed}: needs {data['steps']} losses and a validation_loss")
    return found
