"""Reference runs: 20 training steps in many layouts and recipes, and digests of the results.

``tests/test_same_as_before.py`` compares the digests with those in ``tests/data/same_as_before.json``. That file was
created before fp8dist's modules moved. To recreate it after an intended change of numerics:

    .venv/bin/python -m tests.support.reference_runs --write

Commit the code first: both the file and the test name the commit.

The ranks use only public names of fp8dist, and no helper that uses others, so this file does not change when modules
move. ``run_all`` restarts this program with an environment that fixes the arithmetic. The new process imports torch
once, and forks six ranks: two for most cases, and four for tensor parallelism.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import math
import multiprocessing
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from safetensors.torch import load
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import BlockScaling, DelayedScaling, Recipe, RowwiseScaling, StateManager
from tests.support.reference_nets import (
    OPTIMIZERS,
    STEPS,
    Block,
    batch,
    digest,
    digest_of_losses,
    loss_of,
    make_net,
)

ROOT = Path(__file__).resolve().parents[2]
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
"""The spawner removes these environment variables, because they change arithmetic or settings."""

Digests = dict[str, str]

# Cases ----------------------------------------------------------------------------------------------------


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


# One rank -------------------------------------------------------------------------------------------------


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

    def saved(self) -> dict[str, Any]:
        """Return a checkpoint, as copies: the run may continue."""
        model = {name: value.clone() for name, value in self.model.state_dict().items()}
        optimizer = self.optimizer.state_dict()
        return {"model": model, "optimizer": optimizer, "fp8": self.manager.state_dict()}

    def load(self, saved: dict[str, Any]) -> None:
        """Load a checkpoint."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.manager.load_state_dict(saved["fp8"])

    def digests(self, losses: list[float]) -> Digests:
        """Return the digests of this run's results. COLLECTIVE under FSDP2."""
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}", end=" ")
        assert all(map(math.isfinite, losses)), losses
        parameters = [(name, _whole(parameter)) for name, parameter in self.model.named_parameters()]
        return {
            "losses": digest_of_losses(losses),
            "state": digest(_state(self.manager)),
            "parameters": digest(parameters),
        }


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


def train(case: Case) -> Digests:
    """Train one case on this rank. COLLECTIVE."""
    run = build(case)
    if case.resume:
        losses = run.steps(0, STEPS // 2)
        saved = run.saved()
        run = build(case, seed=1)
        run.load(saved)
        losses += run.steps(STEPS // 2, STEPS)
    else:
        losses = run.steps(0, STEPS)
    return run.digests(losses)


def _whole(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


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


# All ranks ------------------------------------------------------------------------------------------------


def _rank(folder: Path, rank: int, world: int, seconds: float) -> NoReturn:
    """Train all cases for this many ranks, one after another. Writes the digests to a file."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    log = os.open(folder / f"{world}-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        store = dist.FileStore(str(folder / f"store-{world}"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        found = {}
        for name, case in CASES.items():
            if case.ranks == world:
                started = time.monotonic()
                print(name, end=": ", flush=True)
                found[name] = train(case)
                print(f"{time.monotonic() - started:.2f} s", flush=True)
        (folder / f"{world}-{rank}.json").write_text(json.dumps(found))
        dist.barrier()
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # Gloo may abort a process that exits normally, after its work is done.


def run_ranks(folder: Path, seconds: float) -> str:
    """Fork two ranks and four ranks, and wait for them. Return the failures with each rank's output; "" if none.

    Args:
        seconds: the time limit, after which a rank prints its traceback and exits.
    """
    importlib.import_module("torch._dynamo")  # Import it here, so that each rank need not.
    torch.set_num_threads(1)
    places = [(world, rank) for world in (2, 4) for rank in range(world)]
    fork = multiprocessing.get_context("fork")
    ranks = {(w, r): fork.Process(target=_rank, args=(folder, r, w, seconds), daemon=True) for w, r in places}
    for process in ranks.values():
        process.start()
    waiting: dict[Any, Any] = {process.sentinel: process for process in ranks.values()}
    while waiting and not any(process.exitcode for process in ranks.values()):
        for sentinel in wait(list(waiting)):
            waiting.pop(sentinel).join()
    if waiting:
        time.sleep(1.0)  # Other ranks may be about to report the cause.
    statuses = {place: process.exitcode for place, process in ranks.items()}
    stuck = [process for process in waiting.values() if process.exitcode is None]
    for process in stuck:
        os.kill(process.pid, signal.SIGUSR1)  # Prints its traceback.
    time.sleep(0.3 if stuck else 0)
    for process in stuck:
        process.kill()
        process.join()
    if not any(statuses.values()):
        return ""
    titles = {0: "done", None: "was here"}
    lines = []
    for (world, rank), status in statuses.items():
        log = folder / f"{world}-{rank}.log"
        text = log.read_text(errors="replace") if log.exists() else ""
        lines.append(f"--- rank {rank} of {world}: {titles.get(status, f'ended with {status}')}\n{text}")
    return "\n".join(lines)


class ReferenceRunsFailed(AssertionError):
    """A rank failed or timed out. The message has each rank's output."""


@dataclass(frozen=True)
class Outcome:
    """The result of one call of ``run_all``."""

    canary: str
    cases: dict[str, list[Digests]]  # By case; one entry per rank.


def run_all(seconds: float = 150.0, fixed: Mapping[str, str] = FIXED) -> Outcome:
    """Start all ranks and the canary, and wait for them.

    Args:
        seconds: the time limit of the ranks.
        fixed: environment variables that fix the arithmetic.

    Raises:
        ReferenceRunsFailed: with each rank's output and traceback.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith(LEFT_OUT)}
    variables |= {"CUDA_VISIBLE_DEVICES": "", **fixed}
    with tempfile.TemporaryDirectory(prefix="fp8dist-reference-") as name:
        folder = Path(name)
        commands = {
            "ranks": ("tests.support.reference_runs", name, str(seconds)),
            "canary": ("tests.support.reference_nets", str(folder / "canary")),
        }
        options: dict[str, Any] = {"cwd": ROOT, "env": variables, "stdin": subprocess.DEVNULL}
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        with contextlib.ExitStack() as stack:
            processes = {}
            for title, command in commands.items():
                process = stack.enter_context(subprocess.Popen([sys.executable, "-m", *command], **options))
                stack.callback(process.kill)  # Before the stack waits for it.
                processes[title] = process
            for title, process in processes.items():
                try:
                    text, _ = process.communicate(timeout=seconds + 30)
                except subprocess.TimeoutExpired:
                    raise ReferenceRunsFailed(f"{title}: not done in {seconds + 30:.0f} s") from None
                if process.returncode:
                    raise ReferenceRunsFailed(f"{title} ended with {process.returncode}\n{text}")
        cases: dict[str, list[Digests]] = {}
        for title, case in CASES.items():
            files = [folder / f"{case.ranks}-{rank}.json" for rank in range(case.ranks)]
            cases[title] = [json.loads(file.read_text())[title] for file in files]
        return Outcome((folder / "canary").read_text(), cases)


def machine() -> dict[str, str]:
    """Return torch's version and the CPU's name."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return {"torch": torch.__version__, "cpu": name}


def write() -> None:
    """Write the data file from the current code."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    outcome = run_all()
    data = {"commit": commit, **machine(), "canary": outcome.canary, "cases": outcome.cases}
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_text(json.dumps(data, indent=1) + "\n")


def main(arguments: Sequence[str]) -> int:
    """Handle ``--write``, or the arguments that ``run_all`` passes: FOLDER SECONDS."""
    if list(arguments) == ["--write"]:
        write()
        return 0
    folder, seconds = arguments
    trouble = run_ranks(Path(folder), float(seconds))
    print(trouble)
    return 1 if trouble else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
