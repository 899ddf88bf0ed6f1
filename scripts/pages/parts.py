"""The generated parts by name. Outputs of commands are in ``commands.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from scripts import results_files
from scripts.benchmarks import roofline
from scripts.benchmarks.gpu import results
from scripts.benchmarks.gpu.tables import TABLES
from scripts.convergence.accumulation_tables import ACCUMULATION_TABLES
from scripts.convergence.accumulation_tables import NAME as ACCUMULATION
from scripts.convergence.results import CONVERGENCE, MIXTURE
from scripts.convergence.tables import CONVERGENCE_TABLES, MIXTURE_TABLES
from scripts.pages import audits, exit_codes, exported, flags, messages, runs, screens, serving, silent_bugs, variables
from scripts.pages.filling import ROOT, Parts

REFERENCE: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        **{f"cli-{name}": partial(flags.command_help, name) for name in flags.COMMANDS},
        "flags": flags.of_job,
        "simulation-flags": flags.of_simulation,
        "arguments": flags.of_prepare,
        "recipe-fields": flags.of_recipes,
        "environment": variables.of_library,
        "launcher-environment": variables.of_launcher,
        "script-environment": variables.of_script,
        "exits-job": exit_codes.of_job,
        "exits-lab": exit_codes.of_lab,
        "exits-cli": exit_codes.of_cli,
        "errors": messages.errors,
        "exported-numbers": exported.of_numbers,
        "watch-screen": screens.watch_screen,
        "roofline": roofline.roofline,
        "launches": roofline.launches,
    }
)
"""Parts that are generated from the code."""


def parts_of(root: Path = ROOT) -> Parts:
    """Return all parts. Results come from files below ``root``."""
    measured = results.load_all(root / "kernels" / "results")
    names = (CONVERGENCE, MIXTURE, ACCUMULATION, "front")
    convergence, mixture, accumulation, front = (results_files.load(name, root) for name in names)
    versions, stacks = (results_files.load(name, root) or [] for name in ("versions", "stacks"))
    return {
        **{name: partial(table, measured) for name, table in TABLES.items()},
        **{name: partial(table, convergence) for name, table in CONVERGENCE_TABLES.items()},
        **{name: partial(table, mixture) for name, table in MIXTURE_TABLES.items()},
        **{name: partial(table, accumulation) for name, table in ACCUMULATION_TABLES.items()},
        "versions": partial(runs.versions, versions),
        "stacks": partial(runs.stacks, stacks),
        "hardware": partial(runs.hardware, measured, convergence, versions),
        "front": partial(runs.front, front, convergence, measured, silent_bugs.front(root)),
        **audits.parts_of(root),
        **serving.parts_of(root),
        **silent_bugs.parts_of(root),
        **REFERENCE,
    }
