"""Host memory of an export of 1 GB, and of its comparison: a few times its largest tensor, also under FSDP2."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

import fp8dist
from fp8dist.cli.main import main
from tests.support import forked
from tests.support.ranks import RankPool
from tests.support.serving import NATIVE, RECIPES
from tests.support.suite import few

pytestmark = [pytest.mark.long, pytest.mark.alone]

WIDTH, LAYERS = 4096, 16
LARGEST = 4 * WIDTH * WIDTH


def _status(name: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def above_the_start(act: Any) -> int:
    """Return by how many bytes the resident set grew at most during ``act()``."""
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # Sets VmHWM to VmRSS.
    act()
    return _status("VmHWM") - before


def measured(recipe: str, out: str, parallel: str) -> float:
    """Return the growth during an export, in largest tensors. The second export: the first allocates what stays."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    gather = parallel == "gather"
    group = None if parallel == "none" else dist.group.WORLD
    manager = fp8dist.prepare(model, RECIPES[recipe], group=group, fp8_all_gather=gather)
    if parallel != "none":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    manager.attach(model)
    grown = above_the_start(lambda: fp8dist.export(manager, Path(out), model, format=NATIVE[recipe]))
    return grown / LARGEST


def _alone(words: list[str]) -> int:
    recipe, out = words
    print(measured(recipe, out, "none"))
    return 0


@pytest.mark.parametrize("recipe", few(["delayed", "current", "rowwise", "block"], "block"))
def test_a_model_of_1_gb_takes_three_tensors_at_most(tmp_path: Path, recipe: str) -> None:
    done = forked.run([recipe, str(tmp_path / "out")], None, {}, main=_alone)
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout) <= 3


def _make(words: list[str]) -> int:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    manager = fp8dist.prepare(model, RECIPES["delayed"])
    manager.attach(model)
    dcp.save({"model": model, "fp8": manager}, checkpoint_id=Path(words[0], "checkpoint"))
    fp8dist.export(manager, Path(words[0], "served"), model)
    return 0


def _verify(words: list[str]) -> int:
    codes = []
    with contextlib.redirect_stdout(io.StringIO()):
        main(["verify", *words])  # It imports what stays.
        grown = above_the_start(lambda: codes.append(main(["verify", *words])))
    print(grown / LARGEST)
    return codes[0]


def test_verifying_1_gb_takes_three_tensors_at_most(tmp_path: Path) -> None:
    checkpoint, out = str(tmp_path / "checkpoint"), tmp_path / "served"
    made = forked.run([str(tmp_path)], None, {}, main=_make)
    assert made.returncode == 0, made.stderr
    certificate = ["--certificate", str(out / "fp8dist-certificate.json"), str(out)]
    for words, least in (([checkpoint, str(out)], 1), (certificate, -0.1)):  # A digest is of a part at a time.
        done = forked.run(words, None, {}, main=_verify)
        assert done.returncode == 0, done.stderr
        assert least < float(done.stdout) <= 3


@pytest.mark.parametrize(
    ("recipe", "parallel"),
    few([("delayed", "fsdp2"), ("delayed", "gather"), ("rowwise", "fsdp2")], ("delayed", "gather")),
)
def test_under_fsdp2_each_rank_takes_three_tensors_at_most(
    two_ranks: RankPool, tmp_path: Path, recipe: str, parallel: str
) -> None:
    two_ranks.close()  # A process that has run other tests has memory to reuse.
    grown = two_ranks.run(measured, recipe, str(tmp_path / "out"), parallel)
    assert 0 < max(grown) <= 3, grown
