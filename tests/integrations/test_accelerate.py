"""``fp8dist.integrations.accelerate.prepare`` with a real Accelerator, against a loop by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fp8dist
from fp8dist.errors import ConfigurationError
from tests.integrations.contract import (
    STEPS,
    Adapter,
    ByHand,
    Trainee,
    as_torchrun_starts_it,
    batch,
    diverged,
    mlp,
    needs,
    play,
    resumed,
    same,
    undisturbed,
)
from tests.support.forked import ROOT
from tests.support.recorded import die, fingerprint, recorder, require_readable

pytestmark = needs("accelerate", pytest.mark.slow)


def _accelerator(folder: str = ".", **options: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import DistributedType, PartialState

    as_torchrun_starts_it()
    PartialState(cpu=True, backend="gloo")
    if "fsdp_plugin" in options:  # Accelerate offers FSDP on GPUs only.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return Accelerator(project_dir=folder, cpu=True, **options)


class Accelerated(Trainee):
    """A model that ``prepare`` has prepared."""

    def __init__(self, accelerator: Any, **options: Any) -> None:
        from fp8dist.integrations.accelerate import prepare

        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.accelerator = accelerator
        self.manager, self.model, self.optimizer = prepare(accelerator, model, optimizer, **options)

    def train(self, places: Iterable[int]) -> list[float]:
        losses = []
        for place in places:
            with self.accelerator.accumulate(self.model):
                loss = self.forward(place).square().mean()
                losses.append(loss.item())
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return losses


def _as_by_hand(folder: str, accumulate: int) -> None:
    ours = Accelerated(_accelerator(gradient_accumulation_steps=accumulate))
    before = ours.manager.metrics()["fp8/collectives"]
    losses = ours.train(range(8))
    assert ours.manager.metrics()["fp8/collectives"] - before == 8 // accumulate
    theirs = ByHand(accumulate)
    assert losses == theirs.train(range(8))
    assert same(ours.kept(), theirs.kept())


def _resumed(folder: str, sharded: bool, options: dict[str, Any]) -> None:
    from accelerate import FullyShardedDataParallelPlugin

    def start() -> Trainee:
        plugin = {}
        if sharded:
            sizes = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 1000}
            made = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", **sizes)
            plugin = {"fsdp_plugin": made}
        return Accelerated(_accelerator(folder, **plugin), **options)

    def save(trainee: Any) -> None:
        # What all ranks share, rank 0 may save alone, as the programs of Diffusers do.
        if sharded or options or dist.get_rank() == 0:
            trainee.accelerator.save_state(f"{folder}/saved")
        dist.barrier()

    def load(trainee: Any) -> None:
        trainee.accelerator.load_state(f"{folder}/saved")

    resumed(start, save, load)


def _damage(trainee: Trainee) -> None:
    trainee.model.module[2].bias[3] += 1


def _diverged(folder: str) -> str:
    return diverged(Accelerated(_accelerator(), check_every=2), _damage)


def _misused(folder: str) -> None:
    from fp8dist.integrations.accelerate import prepare

    accelerator = _accelerator()
    accelerator.state._mixed_precision = "fp8"
    with pytest.raises(ConfigurationError, match='use "bf16"'):
        Accelerated(accelerator)
    accelerator = _accelerator()
    ours = Accelerated(accelerator)
    with pytest.raises(ConfigurationError, match="before the model is wrapped"):
        prepare(accelerator, ours.model, ours.optimizer)
    with pytest.raises(ConfigurationError, match="prepared already"):
        prepare(accelerator, accelerator.unwrap_model(ours.model), ours.optimizer)
    unattached = mlp()
    fp8dist.prepare(unattached, group=dist.group.WORLD)
    optimizer = torch.optim.AdamW(unattached.parameters(), lr=1e-3)
    ours.model, ours.optimizer = accelerator.prepare(unattached, optimizer)
    with pytest.raises(ConfigurationError, match=r"attach\("):
        ours.train(range(2))


def _undisturbed(folder: str) -> None:
    accelerator = _accelerator()
    undisturbed(lambda: Accelerated(accelerator))


def _gan(folder: str) -> None:
    accelerator = _accelerator()
    ours, theirs = [Accelerated(accelerator), Accelerated(accelerator)], [ByHand(), ByHand()]
    for pair, backward in ((ours, accelerator.backward), (theirs, torch.Tensor.backward)):
        for step in range(8):
            optimizers = [one.optimizer for one in pair]
            play(pair[0].model, pair[1].model, optimizers, backward, batch(step), batch(100 + step))
    assert all(same(one.kept(), other.kept()) for one, other in zip(ours, theirs, strict=True))


def _another_optimizer(folder: str) -> None:
    accelerator = _accelerator()

    def renewed(trainee: Accelerated) -> Any:
        return accelerator.prepare(torch.optim.AdamW(trainee.model.parameters(), lr=1e-3))

    ours = Accelerated(accelerator)
    ours.train(range(4))
    ours.optimizer = renewed(ours)
    with pytest.raises(ConfigurationError, match="optimizer"):
        ours.train(range(4, 6))

    ours, theirs = Accelerated(accelerator), ByHand()
    for start in (0, 4):
        if start:
            ours.optimizer = renewed(ours)
            ours.manager.attach(ours.model, optimizer=ours.optimizer)
            theirs.begin()
        assert ours.train(range(start, start + 4)) == theirs.train(range(start, start + 4))
    assert same(ours.kept(), theirs.kept())


def _recorded(folder: str, name: str, end: str) -> tuple[str, dict[int, float], int]:
    """Train 20 steps of 2 micro-batches; or until step 14, where the ranks are killed; or from step 12."""
    accelerator = _accelerator(f"{folder}/{name}", gradient_accumulation_steps=2)
    ours = Accelerated(accelerator, run=recorder(f"{folder}/run-{name}"))
    model, optimizer = ours.model, ours.optimizer
    if end == "resumed":
        accelerator.load_state(f"{folder}/{name}/12")
    losses = {}
    for step in range(13 if end == "resumed" else 1, STEPS + 1):
        for place in range(2):
            with accelerator.accumulate(model):
                loss = ours.forward(2 * step + place).square().mean()
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0) if accelerator.sync_gradients else None
                optimizer.step()
                optimizer.zero_grad()
        losses[step] = loss.item()
        accelerator.log({"train_loss": loss.item(), "grad_norm": norm.item(), "note": "text"}, step=step)
        if step % 6 == 0 and end != "resumed":
            accelerator.save_state(f"{folder}/{name}/{step}")
            if accelerator.is_main_process:
                accelerator.get_tracker("fp8dist", unwrap=True).event("saved", step, path=f"{name}/{step}")
        if step == 14 and end == "killed":
            die()
    accelerator.end_training()
    return fingerprint(*ours.kept()), losses, len(ours.manager.slots)


@pytest.mark.long
def test_accelerate_launch_starts_the_example(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=2", "--num_machines=1"]
    launch += ["--main_process_port=0", "--mixed_precision=no", "--dynamo_backend=no"]
    program = [str(ROOT / "launch" / "examples" / "with_accelerate.py"), "--steps", "4", "--out", str(tmp_path)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run([*launch, *program], env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("FP8: ") == 1
    require_readable(tmp_path, 4)


ADAPTER = Adapter(
    by_hand={"1": (_as_by_hand, 1), "4": (_as_by_hand, 4), "a GAN": (_gan,)},
    resumed={
        "ddp": (_resumed, False, {}),
        "fp8 gather": (_resumed, True, {"fp8_all_gather": True}),
        "own state": (_resumed, False, {"amax_sync": False}),
    },
    diverged={"a parameter": ("2.bias", (_diverged,))},
    undisturbed={"evaluations, other models": (_undisturbed,)},
    refused={"misuse": (_misused,), "another optimizer": (_another_optimizer,)},
    recorded=_recorded,
    ends_group=True,  # By ``end_training``.
    saved=(6, 12, 18),
)
