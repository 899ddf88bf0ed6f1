"""Training gives the same bits as before the modules moved.

The modules moved into rooms, and some API names changed. Neither affects numerics, so 20 steps must give the same
losses, FP8 state and parameters, bit for bit. Commit 9a36b9e, the last one before the move, produced the digests in
``tests/data/same_as_before.json``: of five golden cases, from 19 with which the move was made. To recreate the file
after an intended change of numerics, commit the code, and then

    .venv/bin/python -m tests.test_same_as_before

Another CPU or torch version may compute other bits. The canary detects this: it runs the same nets in plain torch, in a
process that never imports fp8dist, so no change in fp8dist can affect it. If its digest differs from the stored one,
the tests skip. Failing ranks are a failure on any machine.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import BlockScaling, DelayedScaling, Recipe, RowwiseScaling, StateManager
from tests.support.parallel import whole
from tests.support.ranks import RankPool
from tests.support.reference_nets import OPTIMIZERS, STEPS, Block, batch, digest, loss_of, make_net

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "data" / "same_as_before.json"

FIXED = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""Makes torch, MKL and oneDNN use instructions that every x86-64 CPU has, and sum in a fixed order."""

LEFT_OUT = ("FP8DIST_", "TRITON_", "ATEN_", "MKL_", "DNNL_", "ONEDNN_", "OMP_", "KMP_", "TORCH")
"""Environment variables that change arithmetic or settings: these programs do not get them."""

Digests = dict[str, str]


@dataclass(frozen=True)
class Case:
    """One training run; the same on all ranks."""

    recipe: Recipe
    layout: str = "ddp"  # or "fsdp2", or "tp": tensor parallelism × FSDP2
    net: str = "net"
    optimizer: str = "sgd"
    fp8_all_gather: bool = False
    resume: bool = False  # Save after 10 steps, and resume in new objects.

    @property
    def ranks(self) -> int:
        return 4 if self.layout == "tp" else 2


def delayed(history_len: int = 32, **settings: Any) -> DelayedScaling:
    """Delayed scaling whose history (32 entries) holds the amaxes of all steps."""
    return DelayedScaling(history_len=history_len, **settings)


CASES: dict[str, Case] = {
    "ddp, next step": Case(delayed(update="next_step"), optimizer="adamw"),
    "tp x fsdp2, fp8 gather": Case(delayed(5), "tp", "tower", fp8_all_gather=True),
    "resume, fsdp2, fp8 gather": Case(delayed(), "fsdp2", optimizer="adamw", fp8_all_gather=True, resume=True),
    "rowwise scaling": Case(RowwiseScaling(), optimizer="adamw"),
    "block scaling, fp8 gather": Case(BlockScaling(), "fsdp2", "wide", fp8_all_gather=True),
}


@dataclass
class Run:
    """A model in its layout, attached."""

    case: Case
    model: nn.Module
    called: Any  # The object that the loop calls.
    manager: StateManager
    optimizer: torch.optim.Optimizer
    data: int  # Index of the batches that this rank gets.
    part: int | None = None  # This rank's part of each sequence; None: the whole.
    group: Any = None  # The ranks that share a sequence.

    def backward(self, index: int) -> float:
        """Return the loss of one batch."""
        x, target = batch(self.case.net, self.data, index)
        if self.part is None:
            loss = loss_of(self.called(x), target)
            loss.backward()
            return float(loss.detach())
        x, target = (t.chunk(2, 1)[self.part] for t in (x, target))
        loss = loss_of(self.called(x), target) / 2
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.group)
        return float(total)

    def steps(self, first: int, last: int) -> list[float]:
        """Train. Return the losses of all batches."""
        losses = []
        for step in range(first, last):
            losses.append(self.backward(step))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses


def build(case: Case, seed: int = 0) -> Run:
    """Prepare, wrap or shard, attach. COLLECTIVE."""
    rank = dist.get_rank()
    model = make_net(case.net, seed)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")) if case.layout == "tp" else None
    manager = fp8dist.prepare(
        model, case.recipe, group=dist.group.WORLD if mesh is None else mesh, fp8_all_gather=case.fp8_all_gather
    )
    called: nn.Module = model
    if mesh is not None:
        _parallelize(model, mesh["tp"])
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh["dp"])
        called = fully_shard(model, mesh=mesh["dp"])
    elif case.layout == "fsdp2":
        for module in list(model.modules()):
            if isinstance(module, Block):
                fully_shard(module)
        called = fully_shard(model)
    else:
        called = DistributedDataParallel(model)
    optimizer = OPTIMIZERS[case.optimizer](called.parameters())
    manager.attach(called, optimizer=optimizer)
    if mesh is None:
        return Run(case, model, called, manager, optimizer, rank)
    return Run(case, model, called, manager, optimizer, rank // 2, rank % 2, mesh.get_group("tp"))


def _parallelize(model: nn.Module, tp: Any) -> None:
    plan: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, Block):
            plan[f"{name}.norm"] = SequenceParallel()
            plan[f"{name}.up"] = ColwiseParallel(input_layouts=Shard(1))
            plan[f"{name}.down"] = RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(model, tp, plan)


def train(name: str) -> Digests:
    """Train one case on this rank. COLLECTIVE."""
    case = CASES[name]
    run = build(case)
    losses = run.steps(0, STEPS // 2)
    if case.resume:
        saved = run.model.state_dict(), run.optimizer.state_dict(), run.manager.state_dict()
        run = build(case, seed=1)
        for part, state in zip((run.model, run.optimizer, run.manager), saved):
            part.load_state_dict(state)  # type: ignore[attr-defined]
    losses += run.steps(STEPS // 2, STEPS)
    assert all(map(math.isfinite, losses)), losses
    return {
        "losses": digest((str(i), loss) for i, loss in enumerate(losses)),
        "state": digest(_state(run.manager)),
        "parameters": digest((name, whole(parameter)) for name, parameter in run.model.named_parameters()),
    }


def _state(manager: StateManager) -> list[tuple[str, Any]]:
    """Return the manager's scales and histories, and its complete saved state: counters, cold slots, the step."""
    found: list[tuple[str, Any]] = []
    for fqn, role in manager.slots:
        found.append((f"{fqn} {role} scale", manager.slot(fqn, role).scale))
        found.append((f"{fqn} {role} inv_scale", manager.slot(fqn, role).inv_scale))
        found.append((f"{fqn} {role} history", manager.slot(fqn, role).amax_history))
    for blob in manager.state_dict().values():
        tensors = load(blob)
        end = 8 + int.from_bytes(blob[:8], "little")
        slots = json.loads(json.loads(blob[8:end])["__metadata__"]["header"])["slots"]
        order = sorted(range(len(slots)), key=slots.__getitem__)
        found.append(("slots", [slots[i] for i in order]))
        found.append(("step", tensors["step"]))
        found += [(f"saved {name}", tensors[name][order]) for name in ("scale", "amax", "cold", "history")]
        found.append(("saved counters", tensors["counters"][:, order]))
    return found


def all_cases() -> None:
    """Print the digests of all cases as JSON: a list by rank."""
    cases: dict[str, list[Digests]] = {}
    for ranks in (2, 4):
        pool = RankPool(ranks)
        cases |= {name: pool.run(train, name, timeout=150) for name, case in CASES.items() if case.ranks == ranks}
        pool.close()
    print(json.dumps({name: cases[name] for name in CASES}))


def _printed(program: str) -> str:
    """Return what a program prints, in a process of its own: the environment fixes the arithmetic."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(LEFT_OUT)}
    variables |= {"CUDA_VISIBLE_DEVICES": "", **FIXED}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def run_all() -> dict[str, Any]:
    """Return what the data file says, of this machine and the current code."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "torch": torch.__version__,
        "cpu": cpu,
        "canary": _printed("from tests.support import reference_nets; reference_nets.main()"),
        "cases": json.loads(_printed("from tests import test_same_as_before; test_same_as_before.all_cases()")),
    }


@pytest.mark.long
def test_same_as_before() -> None:
    before = json.loads(DATA.read_text())
    assert before["commit"] == "9a36b9e"
    assert list(before["cases"]) == list(CASES)
    now = run_all()
    if now["canary"] != before["canary"]:
        places = [f"canary {p['canary'][:16]} (torch {p['torch']}, {p['cpu']})" for p in (now, before)]
        pytest.skip(f"plain torch computes other bits here: {places[0]}, stored {places[1]}")
    differ = [
        f"{case}, rank {rank}: {name}"
        for case in CASES
        for rank, (stored, found) in enumerate(zip(before["cases"][case], now["cases"][case], strict=True))
        for name in ("losses", "state", "parameters")
        if found[name] != stored[name]
    ]
    assert not differ, f"not as in commit {before['commit']}:\n" + "\n".join(differ)


if __name__ == "__main__":
    words = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    described = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    DATA.write_text(json.dumps({"commit": described, **run_all()}, indent=1) + "\n")
