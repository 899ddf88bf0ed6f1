"""The results file: its format, and what it says of the setting.

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
from typing import Any

import torch

from scripts import results_files
from scripts.benchmarks.gpu import environment

CONVERGENCE, MIXTURE = "convergence", "mixture"
"""Names of the published results, and of those of mixtures of experts."""


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
