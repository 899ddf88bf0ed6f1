"""``--export``: what the example job makes of it, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8dist.exporters import OpenTelemetry, Prometheus, PrometheusTextfile, TensorBoard
from launch.train_gpt.data import BadInput
from tests.support.exported import FIRST, play
from tests.support.exporting import PYTHON, needs_tools, run
from tests.support.lab.exporting import exporters_of
from tests.support.lab.options import parse


def test_each_flag_makes_an_exporter_in_order(tmp_path: Path) -> None:
    names = ["tensorboard", "prometheus:0", f"textfile:{tmp_path / 'run.prom'}", "opentelemetry", "tensorboard:other"]
    options = parse([part for name in names for part in ("--export", name)])
    made = exporters_of(options)
    assert [type(one) for one in made] == [TensorBoard, Prometheus, PrometheusTextfile, OpenTelemetry, TensorBoard]
    for one in made:
        one.close()
    assert [*tmp_path.iterdir()] == []
    assert exporters_of(parse([])) == []


def test_the_textfile_is_written_where_the_flag_says(tmp_path: Path) -> None:
    path = tmp_path / "run.prom"
    (made,) = exporters_of(parse(["--export", f"textfile:{path}"]))
    play(made, FIRST)
    assert "fp8dist_last_step 4.0" in path.read_text()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("graphite", "NAME must be one of tensorboard, wandb, mlflow, opentelemetry, prometheus, textfile, got"),
        ("prometheus", "expected prometheus:PORT, got 'prometheus'"),
        ("prometheus:", "expected prometheus:PORT, got 'prometheus:'"),
        ("prometheus:66000", "PORT must be 0 to 65535, got 'prometheus:66000'"),
        ("prometheus:-1", "PORT must be 0 to 65535, got 'prometheus:-1'"),
        ("textfile", "expected textfile:FILE, got 'textfile'"),
        ("wandb:", "expected wandb:PROJECT, got 'wandb:'"),
        ("opentelemetry:x", "opentelemetry takes no argument, got 'opentelemetry:x'"),
    ],
)
def test_a_wrong_flag_is_refused(flag: str, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        parse(["--export", flag])
    assert message in str(caught.value)


def test_an_argument_that_the_exporter_refuses_is_named() -> None:
    with pytest.raises(BadInput, match=r"--export textfile: node_exporter reads files that end in .prom, got 'x'"):
        exporters_of(parse(["--export", "textfile:x"]))


PROGRAM = """
from tests.support.lab.exporting import exporters_of
from tests.support.lab.options import parse
from tests.support.exported import FIRST, play
flags = ["--out", "run", "--export", "wandb:mine", "--export", "mlflow:sqlite:///runs.db"]
for made in exporters_of(parse(flags)):
    play(made, FIRST)
"""


@pytest.mark.long
@needs_tools
def test_a_run_of_other_tools_is_where_the_flags_say(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run(PYTHON, "-c", PROGRAM, cwd=tmp_path, WANDB_MODE="offline")
    assert len([*(tmp_path / "run").glob("wandb/offline-run-*/*.wandb")]) == 1
    assert (tmp_path / "runs.db").exists()
