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

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from scripts import results_files
from scripts.benchmarks.gpu import environment
from scripts.convergence.variants import VARIANTS

CONVERGENCE, MIXTURE = "convergence", "mixture"
"""Names of the published results, and of those of mixtures of experts."""

_TOP = {
    **{"date": str, "machine": str, "steps": int},
    **{"commits": list, "flags": list, "versions": dict, "runs": dict},
}


def about(flags: Sequence[str], device: str = "cpu") -> dict[str, Any]:
    """Return what each results file says first: date, machine, versions and the flags of the example job."""
    facts = environment.facts(torch.device(device))
    versions = {name: facts["versions"][name] for name in ("python", "torch", "fp8dist")}
    return {"date": results_files.now(), "machine": facts["device"]["name"], "versions": versions, "flags": list(flags)}


SETTING = ("flags", "machine", "versions", "commit", "date")
"""The columns of ``setting_of``."""


def setting_of(data: Mapping[str, Any], commits: Sequence[str]) -> list[str]:
    """Return what a table says of the setting of results."""
    flags = " ".join(data["flags"])
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items() if version)
    named = (commit[:10] + (" and changes" if commit.endswith("+") else "") for commit in commits)
    flags = f"`{flags}`" if flags else "the example job's defaults"
    return [flags, data["machine"], versions, ", ".join(named), data["date"][:10]]


def load(root: Path = results_files.ROOT, name: str = CONVERGENCE) -> dict[str, Any] | None:
    """Return the published results; None if there are none.

    Raises:
        ValueError: the file is not a results file. The message says why.
    """
    return results_files.load(name, root, problems_of)


def problems_of(data: Any) -> list[str]:
    """Return the problems of a results file's content; empty if the content is valid."""
    found = results_files.problems_of(data, _TOP)
    if found:
        return found
    found += [f"unknown variant {name!r}" for name in data["runs"] if name not in VARIANTS]
    for name, seeds in data["runs"].items():
        for seed, run in seeds.items():
            if len(run.get("losses", ())) != data["steps"] or "validation_loss" not in run:
                found.append(f"{name}, seed {seed}: needs {data['steps']} losses and a validation_loss")
    return found
