"""Files that an older version wrote still load: FP8 state, DCP checkpoint, export with its certificate, run folder.

``tests/data/before`` was written by commit 9a36b9e: six steps of ``_model()`` with SGD, recorded in each step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import nn

import fp8dist
from fp8dist.cli.main import main

BEFORE = Path(__file__).parents[1] / "data" / "before"


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16))


def _manager() -> tuple[nn.Module, fp8dist.StateManager]:
    model = _model()
    return model, fp8dist.prepare(model, fp8dist.DelayedScaling(history_len=4), skip=None)


def test_fp8_state(tmp_path: Path) -> None:
    _unused, manager = _manager()
    manager.load(BEFORE / "fp8.safetensors")
    manager.save(tmp_path / "again.safetensors")
    found, stored = (safe_open(path, "numpy") for path in (tmp_path / "again.safetensors", BEFORE / "fp8.safetensors"))
    names = list(stored.keys())
    assert names
    assert list(found.keys()) == names
    assert all((found.get_tensor(name) == stored.get_tensor(name)).all() for name in names)
    assert found.metadata() == stored.metadata()


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_dcp_checkpoint() -> None:
    (_, by_file), (_, by_dcp) = _manager(), _manager()
    by_file.load(BEFORE / "fp8.safetensors")
    dcp.load({"fp8": by_dcp}, checkpoint_id=str(BEFORE / "dcp"))
    assert by_dcp.state_dict() == by_file.state_dict()


def test_certificate_of_an_export_and_run_folder(capsys: pytest.CaptureFixture[str]) -> None:
    folder = BEFORE / "exported"
    assert main(["verify", "--certificate", str(folder / "fp8dist-certificate.json"), str(folder)]) == 0
    assert main(["watch", "--once", str(BEFORE / "run")]) == 0
    assert "step 6" in capsys.readouterr().out
