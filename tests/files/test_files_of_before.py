"""Files that an older version wrote still load: FP8 state, DCP checkpoint, export with its certificate, run folder.

``tests/data/before`` was written by commit 9a36b9e: six steps of ``_model()`` with SGD, recorded in each step."""

from __future__ import annotations

import contextlib
import io
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


def _command(*arguments: str) -> tuple[int, str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = main(list(arguments))
    return code, printed.getvalue()


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


def test_certificate_of_an_export() -> None:
    code, text = _command(
        "verify", "--certificate", str(BEFORE / "exported" / "fp8dist-certificate.json"), str(BEFORE / "exported")
    )
    assert code == 0, text


def test_run_folder() -> None:
    code, text = _command("watch", "--once", str(BEFORE / "run"))
    assert code == 0, text
    assert "step 6" in text
