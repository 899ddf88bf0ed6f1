"""The file of results: what it holds, and whether it is right.

::

    {"schema": 1, "date": "2026-01-31T12:00:00Z", "commits": ["…"], "machine": "…", "versions": {"torch", …},
     "steps": 300, "flags": ["--width", "128"], "plot": true,
     "runs": {"fp32": {"0": {"losses": [one per step], "validation_loss": …, "tokens_per_s": …}, …}, …},
     "gradients": null or {"seed", "points": [{"step", "cases": [{"recipe", "fp8": ["fprop", …],
                   "weights": {fqn: cosine}, "inputs": {fqn: cosine}, "overall"}]}]}}

``commits``: of which the runs are; one that ends with "+" had changes that are in none. ``plot``: whether there is one
beside the file. Numbers that are none are texts: "nan", "inf".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts.convergence.variants import VARIANTS

__all__ = ["FILE", "PLOT", "SCHEMA", "folder_of", "load", "problems_of"]

SCHEMA = 1
FILE = "convergence.json"
PLOT = "convergence.png"
_TOP = {
    **{"date": str, "machine": str, "steps": int, "plot": bool},
    **{"commits": list, "flags": list, "versions": dict, "runs": dict},
}


def folder_of(root: Path) -> Path:
    """Where results are kept that pages are made of."""
    return root / "scripts" / "results"


def load(root: Path) -> dict[str, Any] | None:
    """The results that are kept; None: there are none.

    Raises:
        ValueError: the file is not one of results; says why.
    """
    path = folder_of(root) / FILE
    if not path.exists():
        return None
    data = json.loads(path.read_text())
    problems = problems_of(data)
    if problems:
        raise ValueError(f"{path}: {'; '.join(problems)}")
    return data


def problems_of(data: Any) -> list[str]:
    """What is wrong with the content of a results file; nothing, if it is right."""
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
