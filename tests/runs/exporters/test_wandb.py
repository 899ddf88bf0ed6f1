"""W&B offline, read back by ``wandb leet inspect``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.exporting import HOME, needs_tools, run

pytestmark = [pytest.mark.long, needs_tools]

PROGRAM = """
from fp8dist import Exporter
from fp8dist.exporters import Wandb
from tests.support.exported import END, FIRST, RESUMED, play
exporter = Wandb(run_id="{run_id}", project="mine")
assert isinstance(exporter, Exporter)
play(exporter, {parts})
"""


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the only run below the folder."""
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    printed = run(HOME / "bin" / "wandb", "leet", "inspect", "--json", file, cwd=folder)
    return [json.loads(line) for line in printed.splitlines()]


def played(folder: Path, parts: str, run_id: str = "abc") -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    run(HOME / "bin" / "python", "-c", PROGRAM.format(run_id=run_id, parts=parts), cwd=folder, WANDB_MODE="offline")
    return records(folder)


def of_type(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record[kind] for record in found if record["type"] == kind]


def series(found: list[dict[str, Any]], name: str) -> list[tuple[int, Any]]:
    items = [history["item"] for history in of_type(found, "history")]
    return [(item["step"], item[name]) for item in items if name in item]


def test_its_files_have_the_numbers_as_float64(tmp_path: Path) -> None:
    found = played(tmp_path, "FIRST")
    assert series(found, "loss") == [(1, 0.1 + 0.2), (2, 2.5), (3, "NaN"), (4, "-Infinity")]
    assert series(found, "grad_norm") == [(1, 1.5), (2, 1e30), (3, "Infinity"), (4, 1.5)]
    assert series(found, "eval/top-1") == [(1, 0.1)]
    assert series(found, "fp8/input/saturated") == [(2, 0.25), (4, 1)]
    assert series(found, "fp8/input/underflow") == [(2, 1 / 3), (4, 1 / 3)]
    assert series(found, "fp8/input/headroom") == [(2, -1), (4, "-Infinity")]
    assert series(found, "fp8/weight/headroom") == []
    assert series(found, "events/nonfinite") == [(3, 1)]
    histograms = [history["item"] for history in of_type(found, "history")]
    (first, _) = [item for item in histograms if "fp8/input/headrooms._type" in item]
    assert sum(first["fp8/input/headrooms.values"]) == 2
    assert (first["fp8/input/headrooms.bins"][0], first["fp8/input/headrooms.bins"][-1]) == (-1, 3)
    axes = {metric.get("name"): metric.get("step_metric") for metric in of_type(found, "metric")}
    assert (axes["loss"], axes["fp8/input/saturated"]) == ("step", "step")
    assert of_type(found, "exit")[0]["exit_code"] == 1  # No event ended it.


def test_a_resumed_run_continues_the_same_id_and_tells_of_the_divergence(tmp_path: Path) -> None:
    (first, *_) = of_type(played(tmp_path / "first", "FIRST"), "run")
    found = played(tmp_path / "second", "RESUMED, END")
    (second, *_) = of_type(found, "run")
    assert (first["run_id"], first["project"]) == (second["run_id"], second["project"]) == ("abc", "mine")
    assert second["resume"] is True
    assert series(found, "loss") == [(3, 2.25), (4, 2.125), (5, 2)]
    assert series(found, "events/diverged") == [(5, 1)]
    assert series(found, "events/other") == [(5, 1)]
    (alert,) = of_type(found, "alert")
    assert (alert["title"], alert["level"]) == ("fp8dist: ranks differ", "ERROR")
    assert json.loads(alert["text"])["report"] == {"consistent": False}
    assert not of_type(found, "exit")[0].get("exit_code")


GIVEN = """
import wandb
from fp8dist.exporters import Wandb
from tests.support.exported import FIRST, play
mine = wandb.init(project="mine", id="given")
play(Wandb(run=mine), FIRST[:2])
mine.log({"after": math.pi})
assert wandb.run is mine
"""


def test_a_run_that_was_given_stays_open(tmp_path: Path) -> None:
    run(HOME / "bin" / "python", "-c", "import math\n" + GIVEN, cwd=tmp_path, WANDB_MODE="offline")
    found = records(tmp_path)
    assert series(found, "loss") == [(1, 0.1 + 0.2)]
    assert [history["item"].get("after") for history in of_type(found, "history")][-1] == math.pi


def test_an_exporter_that_is_only_made_starts_no_run(tmp_path: Path) -> None:
    program = "from fp8dist.exporters import Wandb\nWandb().close()"
    run(HOME / "bin" / "python", "-c", program, cwd=tmp_path, WANDB_MODE="offline")
    assert [*tmp_path.iterdir()] == []
