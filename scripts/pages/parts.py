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
from scripts.convergence import accumulation_tables
from scripts.convergence import results as convergence_results
from scripts.convergence.accumulation_tables import ACCUMULATION_TABLES
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
    convergence, versions = convergence_results.load(root), results_files.load("versions", root) or []
    accumulation = accumulation_tables.load(root)
    mixture = convergence_results.load(root, convergence_results.MIXTURE)
    return {
        **{name: partial(table, measured) for name, table in TABLES.items()},
        **{name: partial(table, convergence) for name, table in CONVERGENCE_TABLES.items()},
        **{name: partial(table, mixture) for name, table in MIXTURE_TABLES.items()},
        **{name: partial(table, accumulation) for name, table in ACCUMULATION_TABLES.items()},
        "versions": partial(runs.versions, versions),
        "stacks": partial(runs.stacks, results_files.load("stacks", root) or []),
        "hardware": partial(runs.hardware, measured, convergence, versions),
        "front": partial(runs.front, results_files.load("front", root), convergence, measured, silent_bugs.front(root)),
        **audits.parts_of(root),
        **serving.parts_of(root),
        **silent_bugs.parts_of(root),
        **REFERENCE,
    }
