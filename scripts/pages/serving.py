"""The table about exported models on held-out text."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

from scripts.benchmarks.markdown import NOT_YET, table
from scripts.pages.filling import ROOT, Parts

__all__ = ["parts_of", "write_results"]


def write_results(results: dict[str, Any], root: Path = ROOT) -> None:
    """Replace the results."""
    _path(root).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _path(root: Path) -> Path:
    return root / "scripts" / "results" / "serving.json"


def parts_of(root: Path = ROOT) -> Parts:
    """Return the part."""
    path = _path(root)
    return {"serving": partial(_serving, json.loads(path.read_text(encoding="utf-8")) if path.exists() else None)}


def _serving(results: dict[str, Any] | None) -> str:
    if results is None:
        return f"{NOT_YET}\n"
    head = ["recipe", "perplexity in eval()", "exported", "KL", "quantised again", "KL", "weights that differ"]
    lines = []
    for row in results["rows"]:
        cells = [f"`{row['recipe']}`", f"{math.exp(row['loss']):.5f}"]
        for name in ("exported", "again"):
            cells += [f"{math.exp(row[name]['loss']):.5f}", f"{max(0.0, row[name]['divergence']):.1e}"]
        lines.append([*cells, f"{row['changed']:.1%}"])
    return table(head, lines)
