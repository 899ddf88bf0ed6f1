"""scripts/convergence: the choice of runs to repeat, and the comparison of gradients."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8dist
from fp8dist.modules.fp8_linear import FP8Linear
from fp8dist.state.recipe import GEMMS
from launch.train_gpt.model import GPT
from scripts.convergence.__main__ import FILE
from scripts.convergence.gradients import Gradients, cosine, fp8_gradients, gradients_of
from scripts.convergence.gradients import compare as compare_gradients
from scripts.convergence.tables import gaps
from scripts.convergence.tasks import Task, TaskFailed, run_all

ROOT = Path(__file__).resolve().parents[2]

# Choice of runs to repeat


def _task(folder: Path, code: str = "", **stamp: Any) -> Task:
    """Return a task that counts its runs in the file ``count``."""
    program = f"import time, sys; from pathlib import Path; f = Path({str(folder)!r}); {code or 'pass'}\n"
    program += "with open(f / 'count', 'a') as c: c.write('x')\n(f / 'product').touch()"
    return Task(folder.name, folder, ("-c", program), "product", stamp, {"commit": stamp.get("version", "none")})


def _runs(task: Task) -> int:
    return len((task.folder / "count").read_text())


@pytest.mark.slow
def test_what_is_finished_is_not_run_again(tmp_path: Path) -> None:
    task, said = _task(tmp_path / "a"), []
    assert run_all([task], 1, said.append) == 1
    assert run_all([task], 1, said.append) == 0
    assert said[-1] == "1 of 1 are finished already"
    (task.folder / "product").unlink()
    assert run_all([task], 1, said.append) == 1, "an interrupted run has none"
    other = _task(tmp_path / "a", version="2")
    assert run_all([other], 1, said.append) == 1, "another stamp"
    assert other.noted()["about"] == {"commit": "2"}
    assert run_all([_task(tmp_path / "a", "time.sleep(0)", version="2")], 1, said.append) == 1, "another program"
    assert _runs(task) == 4


def test_runs_go_on_side_by_side_until_one_fails(tmp_path: Path) -> None:
    wait = "(f / 'here').touch()\nwhile not (f.parent / {!r} / 'here').exists(): time.sleep(0.02)"
    tasks = [_task(tmp_path / "a", wait.format("b")), _task(tmp_path / "b", wait.format("a"))]
    assert run_all(tasks, 2, lambda text: None) == 2
    bad, slow = _task(tmp_path / "bad", "sys.exit('no such luck')"), _task(tmp_path / "slow", "time.sleep(60)")
    start = time.monotonic()
    with pytest.raises(TaskFailed, match="no such luck"):
        run_all([bad, slow], 2, lambda text: None)
    assert time.monotonic() - start < 30
    assert not bad.finished
    assert not slow.finished


TINY = ("--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--batch-size", "4", "--steps", "4")


def _convergence(*flags: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "scripts.convergence", *flags]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.long
@pytest.mark.nightly
def test_from_end_to_end(tmp_path: Path) -> None:
    flags = [*TINY, "--seeds", "1", "--jobs", "2", "--out", str(tmp_path), "--variants", "fp32", "block"]
    done = _convergence(*flags)
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / FILE).read_text())
    losses = {name: data["runs"][name]["0"]["losses"] for name in ("fp32", "block")}
    assert losses["fp32"] != losses["block"]
    assert losses["fp32"] == pytest.approx(losses["block"], rel=0.01)
    assert [point["step"] for point in data["gradients"]["points"]] == [1, 2, 4]
    assert {case["recipe"] for case in data["gradients"]["points"][0]["cases"]} == {
        *("bf16", "delayed", "current", "rowwise", "block", "mxfp8", "nvfp4")
    }
    for case in data["gradients"]["points"][-1]["cases"]:
        assert (0.98 if case["recipe"] == "nvfp4" else 0.99) < case["overall"] < 1, case
    assert gaps(data) in done.stdout
    before = (tmp_path / "fp32/seed-0/metrics.jsonl").stat().st_mtime_ns
    again = _convergence(*flags)
    assert "3 of 3 are finished already" in again.stderr
    assert json.loads((tmp_path / FILE).read_text())["runs"] == data["runs"]
    assert (tmp_path / "fp32/seed-0/metrics.jsonl").stat().st_mtime_ns == before


# Gradients


LINEARS = tuple(f"blocks.{block}.{name}" for block in (0, 1) for name in ("qkv", "attention_out", "mlp_in", "mlp_out"))
STREAMS = ("blocks.0", "blocks.1")


@pytest.fixture
def model() -> nn.Module:
    """Return a small GPT of the example job, with weights so large that all blocks matter."""
    torch.manual_seed(0)
    made = GPT(layers=2, width=32, heads=2, context=16)
    for parameter in made.parameters():
        parameter.data.mul_(4) if parameter.ndim > 1 else None
    return made


def _loss(seed: int) -> Any:
    tokens = torch.randint(0, 256, (4, 17), generator=torch.Generator().manual_seed(seed))

    def loss(model: nn.Module) -> Tensor:
        return model(tokens[:, :-1], tokens[:, 1:])

    return loss


def _cosines(model: nn.Module, recipe: fp8dist.Recipe) -> Any:
    loss, others = _loss(0), [_loss(seed) for seed in (1, 2)]
    expected = gradients_of(model, loss, LINEARS, STREAMS)
    return compare_gradients(fp8_gradients(model, recipe, loss, LINEARS, STREAMS, others), expected)


def test_the_cosine_is_that_of_the_angle() -> None:
    assert cosine(torch.tensor([[3.0, 4.0]]), torch.tensor([[4.0, 3.0]])) == pytest.approx(24 / 25)
    assert cosine(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])) == 0
    assert cosine(torch.tensor([1e-30, 0.0]), torch.tensor([-7e30, 0.0])) == -1, "float32 would overflow"
    assert cosine(torch.zeros(2), torch.ones(2)) == 0
    assert math.isnan(cosine(torch.tensor([math.nan, 0.0]), torch.ones(2)))
    left = Gradients({"a": torch.tensor([3.0]), "b": torch.tensor([0.0, 4.0])}, {})
    right = Gradients({"a": torch.tensor([0.0]), "b": torch.tensor([0.0, 2.0])}, {})
    found = compare_gradients(left, right)
    assert (found.weights, found.overall) == ({"a": 0.0, "b": 1.0}, pytest.approx(0.8))


def test_gradients_are_those_of_autograd(model: nn.Module) -> None:
    loss = _loss(0)
    found = gradients_of(model, loss, LINEARS, STREAMS)
    parameters = [model.get_submodule(name).weight for name in LINEARS]
    for name, wanted in zip(LINEARS, torch.autograd.grad(loss(model), parameters)):
        assert torch.equal(found.weights[name], wanted)
    # The gradient of ``position`` is the gradient of the first block's input, summed over the windows.
    position = torch.autograd.grad(loss(model), [model.position])[0]
    torch.testing.assert_close(found.inputs["blocks.0"].sum(0), position)


def test_each_gemm_turns_what_it_makes(model: nn.Module) -> None:
    none = _cosines(model, fp8dist.DelayedScaling(high_precision=GEMMS))
    assert all(value == pytest.approx(1.0, abs=1e-12) for value in (*none.weights.values(), none.overall))
    every = _cosines(model, fp8dist.DelayedScaling())
    assert all(0.9 < value < 1 - 1e-6 for value in (*every.weights.values(), *every.inputs.values(), every.overall))
    only_wgrad = _cosines(model, fp8dist.CurrentScaling(high_precision=("fprop", "dgrad")))
    assert list(only_wgrad.inputs.values()) == [pytest.approx(1.0, abs=1e-12)] * 2
    assert all(value < 1 - 1e-6 for value in only_wgrad.weights.values())
    only_dgrad = _cosines(model, fp8dist.CurrentScaling(high_precision=("fprop", "wgrad")))
    assert only_dgrad.weights["blocks.1.mlp_out"] == pytest.approx(1.0, abs=1e-12), "nothing is above it"
    assert only_dgrad.inputs["blocks.0"] < only_dgrad.inputs["blocks.1"] < 1 - 1e-6, "errors add up"
    assert only_dgrad.weights["blocks.1.mlp_in"] < 1 - 1e-6


def test_a_measurement_leaves_the_model_alone(model: nn.Module) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fp8_gradients(model, fp8dist.DelayedScaling(), _loss(0), LINEARS, STREAMS, [_loss(1)])
    assert all(type(module) is not FP8Linear for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
