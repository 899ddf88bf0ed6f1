"""Held-out text: a server with an export computes what the training model does; one that quantises again does not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.benchmarks import serving
from scripts.benchmarks.serving import CONTEXT, measure
from scripts.pages import runs
from tests.support import forked

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is")]


@pytest.mark.long
def test_a_server_has_the_trainers_loss_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With scales of powers of two, x * s and x / (1 / s) are the same number, and so is all that follows. The trainer
    is forked, and 20 windows of text are held out."""

    def run(words: list[str], **_: Any) -> None:
        assert words[1:3] == ["-m", "tests.support.lab"]
        done = forked.run(words[3:], None, {})
        assert done.returncode == 0, done.stderr

    read = serving.read_text
    text = SimpleNamespace(validation=read(None, CONTEXT).validation[: 20 * (CONTEXT + 1)])
    monkeypatch.setattr(serving.subprocess, "run", run)
    monkeypatch.setattr(serving, "read_text", lambda *_: text)
    row = measure("delayed", 12, tmp_path, power_of_two=True)
    assert row["exported"] == {"loss": row["loss"], "divergence": 0.0}
    assert row["again"]["divergence"] > 1e-7
    assert row["changed"] > 0
    assert f"{row['changed']:.1%} |" in runs.serving({"rows": [row]})
