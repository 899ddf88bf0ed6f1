"""The table about exported models on held-out text."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

from scripts import results_files
from scripts.benchmarks.markdown import table
from scripts.pages.filling import Parts


def parts_of(root: Path = results_files.ROOT) -> Parts:
    """Return the part."""
    return {"serving": partial(_serving, results_files.load("serving", root))}


def _serving(results: dict[str, Any] | None) -> str:
    head = ["recipe", "perplexity in eval()", "exported", "KL", "quantised again", "KL", "weights that differ"]
    lines = []
    for row in (results or {"rows": ()})["rows"]:
        cells = [f"`{row['recipe']}`", f"{math.exp(row['loss']):.5f}"]
        for name in ("exported", "again"):
            cells += [f"{math.exp(row[name]['loss']):.5f}", f"{max(0.0, row[name]['divergence']):.1e}"]
        lines.append([*cells, f"{row['changed']:.1%}"])
    return table(head, lines)
