"""The programs of "A DDP job, complete" and "An FSDP2 job, complete": killed, resumed, and compared bit for bit."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import fp8dist
from fp8dist.cli.main import main
from tests.support import forked
from tests.support.pages import blocks, pages
from tests.support.suite import few

SAVED, KILLED, LAST = 5, 9, 10
"""Steps: the first save; the one that ends with SIGKILL; the last save. The recorder watches one after the kill."""
POISONED = 3, 2, 4
"""Steps of a shorter run: the one after which a weight is NaN; the first and the last save."""


def _program(page: str, saved: int = SAVED, last: int = LAST) -> str:
    """Return the program of a page, with fewer steps. The page shows no output."""
    (block,) = [block for block in blocks(page, pages()[page]) if block.language == "python"]
    steps = "STEPS, SAVE_EVERY, MICROBATCHES, RUN = "
    assert f"{steps}40, 20, 2, " in block.text
    assert block.output is None
    return block.text.replace(f"{steps}40, 20, 2, ", f"{steps}{last}, {saved}, 2, ")


def _run_program(words: list[str]) -> int:
    """Run ``words[0]`` in its folder. "kill": SIGKILL after a step; "nan": a weight becomes NaN after a step; "probe":
    save once more what was loaded."""
    script, actions = Path(words[0]), words[1:]
    os.chdir(script.parent)
    space = sys.modules["__main__"].__dict__
    if "kill" in actions or "nan" in actions:
        log = fp8dist.Recorder.log

        def log_and_harm(self: fp8dist.Recorder, step: int, **numbers: Any) -> None:
            log(self, step, **numbers)
            if step == KILLED and "kill" in actions:
                os.kill(os.getpid(), signal.SIGKILL)
            elif step == POISONED[0] and "nan" in actions:
                with torch.no_grad():
                    space["model"][0].weight.fill_(math.nan)

        fp8dist.Recorder.log = log_and_harm  # type: ignore[method-assign]
    if "probe" in actions:
        attach = fp8dist.StateManager.attach

        def attach_and_save(self: fp8dist.StateManager, *args: Any, **kwargs: Any) -> fp8dist.StateManager:
            attach(self, *args, **kwargs)
            dcp.save(space["state"](space["done"]), checkpoint_id="loaded")
            return self

        fp8dist.StateManager.attach = attach_and_save  # type: ignore[method-assign]
    exec(compile(script.read_text(), words[0], "exec"), space)
    return 0


def _run(program: str, folder: Path, ranks: int, *actions: str) -> str:
    """Run the program to its end, or until an action ends it. It prints nothing but the error that is returned."""
    folder.mkdir(exist_ok=True)
    script = folder / "train.py"
    script.write_text(program)
    done = forked.run([str(script), *actions], ranks, {}, main=_run_program)
    if "nan" in actions:
        assert done.returncode != 0
        return done.stderr
    assert done.returncode == (-signal.SIGKILL if "kill" in actions else 0), done.stdout + done.stderr
    assert "kill" in actions or done.stdout + done.stderr == ""
    return ""


@pytest.mark.slow
@pytest.mark.parametrize("job", few(["ddp", "fsdp2"], "ddp"))
def test_a_job_whose_weights_are_nan_on_all_ranks_saves_no_more(tmp_path: Path, job: str) -> None:
    _, saved, last = POISONED
    error = _run(_program(f"docs/{job}-complete.md", saved, last), tmp_path, 2, "nan")
    assert f"step {last} is not saved" in error
    assert [path.name for path in (tmp_path / "runs" / job).glob("step-*")] == [f"step-{saved:06d}"]


def _contents(checkpoint: Path) -> dict[str, Any]:
    """Return what a checkpoint holds, by path."""
    dcp_to_torch_save(checkpoint, checkpoint.with_suffix(".pt"))
    return dict(_leaves(torch.load(checkpoint.with_suffix(".pt"), weights_only=False), ""))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in pairs:
            yield from _leaves(part, f"{path}{key}/")
    else:
        yield path, value


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert one.keys() == other.keys()
    return [path for path, value in one.items() if not _same_bits(value, other[path])]


def _same_bits(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor):
        return type(one) is type(other) and one == other
    bits = [value.contiguous().reshape(-1).view(torch.uint8) for value in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)


def _losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def _counters(contents: dict[str, Any]) -> list[torch.Tensor]:
    """Return the steps of the FP8 state, and of each slot."""
    state = load(contents["fp8/shared/"])
    return [state["step"], state["counters"][0]]


@pytest.mark.long
def test_a_ddp_job_resumes_bit_for_bit(tmp_path: Path) -> None:
    """On three ranks, where the order of sums counts."""
    ranks = 3
    program = _program("docs/ddp-complete.md")
    _run(program, tmp_path / "whole", ranks)
    _run(program, tmp_path / "killed", ranks, "kill")
    whole, killed = (tmp_path / name / "runs" / "ddp" for name in ("whole", "killed"))
    assert [path.name for path in killed.glob("step-*")] == [f"step-{SAVED:06d}"]
    _run(program, tmp_path / "killed", ranks)
    folders = [run / f"step-{LAST:06d}" for run in (whole, killed)]
    one, other = map(_contents, folders)
    assert {path.split("/")[0] for path in one} == {"model", "optim", "lr", "fp8", "step"}
    assert _differing(one, other) == []
    assert main(["check", *map(str, folders)]) == 0
    assert _losses(whole) == _losses(killed)
    assert len(_losses(whole)) == LAST
    assert load(one["fp8/shared/"])["history"].any()
    page = tmp_path / "report.html"
    assert main(["report", str(killed), "--out", str(page)]) == 0
    assert f"step-{LAST:06d}" in page.read_text()


@pytest.mark.long
def test_an_fsdp2_job_resumes_bit_for_bit_and_on_other_ranks(tmp_path: Path) -> None:
    program = _program("docs/fsdp2-complete.md")
    _run(program, tmp_path / "whole", 2)
    _run(program, tmp_path / "killed", 2, "kill")
    shutil.copytree(tmp_path / "killed", tmp_path / "three")
    _run(program, tmp_path / "killed", 2)
    _run(program, tmp_path / "three", 3, "probe")
    whole, killed, three = (tmp_path / name / "runs" / "fsdp2" for name in ("whole", "killed", "three"))
    saved, last = (whole / f"step-{step:06d}" for step in (SAVED, LAST))
    assert main(["check", str(last), str(killed / last.name)]) == 0
    one, other, of_three = (_contents(run / last.name) for run in (whole, killed, three))
    assert _differing(one, other) == []
    assert _losses(whole) == _losses(killed)
    assert load(one["fp8/shared/"])["history"].any()

    # On three ranks: what is loaded has the saved bits, and what follows differs by rounding.
    loaded = _contents(tmp_path / "three" / "loaded")
    assert _differing(_contents(saved), loaded) == []
    for step, loss in _losses(whole).items():
        assert _losses(three)[step] == (pytest.approx(loss, rel=1e-2) if step > SAVED else loss)
    assert [path for path in _differing(one, of_three) if not path.startswith(("model", "optim/state", "fp8"))] == []
    assert all(map(torch.equal, _counters(one), _counters(of_three)))
