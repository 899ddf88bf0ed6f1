"""Reference tables of exit statuses, from the code that defines them."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from types import ModuleType

from fp8dist.cli import main as command_line
from launch.train_gpt import exits
from scripts.benchmarks.markdown import table
from tests.support.lab import exits as lab_exits


def of_job() -> str:
    """Return the table of the example job, from ``launch/train_gpt/exits.py``."""
    return _table({0: "The run is done.", **statuses_of(exits)})


def of_lab() -> str:
    """Return the table of what the fault lab returns as well."""
    return _table(statuses_of(lab_exits))


def statuses_of(module: ModuleType) -> dict[int, str]:
    """Return {status: meaning}, from a module's constants. A meaning is the first sentence below the constant."""
    body = ast.parse(inspect.getsource(module)).body
    found = {}
    for before, node in itertools.pairwise(body):
        if isinstance(before, ast.Assign) and isinstance(before.value, ast.Constant) and isinstance(node, ast.Expr):
            text = " ".join(str(ast.literal_eval(node.value)).split())
            found[int(str(before.value.value))] = re.split(r"(?<=\.) ", text)[0].replace("``", "`")
    return found


def of_cli() -> str:
    """Return the table of ``fp8dist check``, ``inspect``, ``doctor`` and ``watch``, from their help."""
    said = " ".join(command_line._EPILOG.split("exit codes: ")[1].split(";")[0].split())
    return _table({int(number): text for number, text in re.findall(r"(\d+) ([^,]+)", said)})


def _table(statuses: dict[int, str]) -> str:
    rows = [[str(number), f"{text[0].upper()}{text[1:].rstrip('.')}."] for number, text in statuses.items()]
    return table(["status", "meaning"], rows)
