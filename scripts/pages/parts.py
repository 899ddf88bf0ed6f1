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
from scripts.pages import audits, exit_codes, exported, flags, messages, runs, screens, silent_bugs, variables
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
    load = partial(results_files.load, root=root)
    convergence, mixture, accumulation = map(load, (CONVERGENCE, MIXTURE, ACCUMULATION))
    versions, audited, bugs = load("versions") or [], load("audits") or {}, load("silent_bugs") or {"rows": []}
    return {
        **{name: partial(table, measured) for name, table in TABLES.items()},
        **{name: partial(table, convergence) for name, table in CONVERGENCE_TABLES.items()},
        **{name: partial(table, mixture) for name, table in MIXTURE_TABLES.items()},
        **{name: partial(table, accumulation) for name, table in ACCUMULATION_TABLES.items()},
        "versions": partial(runs.versions, versions),
        "stacks": partial(runs.stacks, load("stacks") or []),
        "hardware": partial(runs.hardware, measured, convergence, versions),
        "front": partial(runs.front, load("front"), convergence, measured, silent_bugs.front(bugs)),
        "serving": partial(runs.serving, load("serving")),
        "audit-faults": partial(audits.faults, audited.get("faults", [])),
        "audit-cost": partial(audits.cost_of, audited.get("cost")),
        "audit-sizes": audits.sizes,
        "silent-bugs": partial(silent_bugs.of_bugs, bugs),
        "silent-bugs-afterwards": partial(silent_bugs.of_bugs, bugs, afterwards=True),
        "silent-counts": partial(silent_bugs.of_counts, bugs),
        "silent-alike": partial(silent_bugs.of_alike, bugs),
        **REFERENCE,
    }
