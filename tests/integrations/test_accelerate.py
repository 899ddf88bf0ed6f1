"""``fp8dist.integrations.accelerate.prepare`` with a real Accelerator, against a loop by hand."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8dist
from fp8dist.errors import ConfigurationError, DivergenceError
from fp8dist.state.groups import local_part
from tests.integrations.contract import Adapter, Kept, same
from tests.support.forked import ROOT
from tests.support.recorded import die, fingerprint, recorder, require_readable

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="Accelerate is not installed"),
    pytest.mark.slow,
]

STEPS, WIDTH = 20, 32


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))


def _batch(step: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def _accelerator(folder: str = ".", **options: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(dist.get_world_size()))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # The group exists: nobody connects.
    PartialState(cpu=True, backend="gloo")
    if "fsdp_plugin" in options:  # Accelerate offers FSDP on GPUs only.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return Accelerator(project_dir=folder, cpu=True, **options)


def _train(accelerator: Any, prepared: tuple[Any, ...], steps: range) -> None:
    _, model, optimizer = prepared
    for step in steps:
        with accelerator.accumulate(model):
            accelerator.backward(model(_batch(step)).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def _prepared(accelerator: Any, **options: Any) -> tuple[Any, ...]:
    from fp8dist.integrations.accelerate import prepare

    model = _model()
    return prepare(accelerator, model, torch.optim.AdamW(model.parameters(), lr=1e-3), **options)


def _kept(prepared: tuple[Any, ...]) -> Kept:
    manager, model, _ = prepared
    return manager.state_dict(), [local_part(p.detach()).clone() for p in model.parameters()]


def _as_by_hand(folder: str, accumulate: int) -> None:
    accelerator = _accelerator(gradient_accumulation_steps=accumulate)
    prepared = _prepared(accelerator)
    before = prepared[0].metrics()["fp8/collectives"]
    _train(accelerator, prepared, range(STEPS))
    assert prepared[0].metrics()["fp8/collectives"] - before == STEPS // accumulate

    model = _model()
    manager = fp8dist.prepare(model, group=dist.group.WORLD)
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager.attach(wrapped, optimizer=optimizer)
    for step in range(STEPS):
        wrapped.require_backward_grad_sync = (step + 1) % accumulate == 0
        (wrapped(_batch(step)).square().mean() / accumulate).backward()
        if wrapped.require_backward_grad_sync:
            optimizer.step()
            optimizer.zero_grad()
    assert same(_kept(prepared), _kept((manager, model, optimizer)))


def _resumed(folder: str, sharded: bool, options: dict[str, Any]) -> None:
    def start() -> tuple[Any, tuple[Any, ...]]:
        accelerator = _accelerator(folder, **_plugin(sharded))
        return accelerator, _prepared(accelerator, **options)

    accelerator, whole = start()
    _train(accelerator, whole, range(8))
    accelerator.save_state(f"{folder}/saved")
    _train(accelerator, whole, range(8, STEPS))
    accelerator, resumed = start()
    accelerator.load_state(f"{folder}/saved")
    _train(accelerator, resumed, range(8, STEPS))
    assert same(_kept(whole), _kept(resumed))


def _plugin(sharded: bool) -> dict[str, Any]:
    from accelerate import FullyShardedDataParallelPlugin

    if not sharded:
        return {}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1000, state_dict_type="SHARDED_STATE_DICT"
    )
    return {"fsdp_plugin": plugin}


def _diverged(folder: str) -> str:
    accelerator = _accelerator()
    prepared = _prepared(accelerator, check_every=2)
    _train(accelerator, prepared, range(4))
    if dist.get_rank() == 1:
        with torch.no_grad():
            prepared[1].module[2].bias[3] += 1
    with pytest.raises(DivergenceError) as caught:
        _train(accelerator, prepared, range(4, 8))
    return str(caught.value)


def _misused(folder: str) -> None:
    from fp8dist.integrations.accelerate import prepare

    accelerator = _accelerator()
    accelerator.state._mixed_precision = "fp8"
    with pytest.raises(ConfigurationError, match='use "bf16"'):
        _prepared(accelerator)
    accelerator = _accelerator()
    _, model, optimizer = _prepared(accelerator)
    with pytest.raises(ConfigurationError, match="before the model is wrapped"):
        prepare(accelerator, model, optimizer)
    with pytest.raises(ConfigurationError, match="prepared already"):
        prepare(accelerator, accelerator.unwrap_model(model), optimizer)
    unattached = _model()
    fp8dist.prepare(unattached, group=dist.group.WORLD)
    optimizer = torch.optim.AdamW(unattached.parameters(), lr=1e-3)
    with pytest.raises(ConfigurationError, match=r"attach\("):
        _train(accelerator, (None, *accelerator.prepare(unattached, optimizer)), range(2))


def _two_models(folder: str) -> None:
    """A second model in the process, trained by turns with the first, changes nothing in the first."""
    accelerator = _accelerator()
    alone = _prepared(accelerator)
    _train(accelerator, alone, range(6))
    accelerator = _accelerator()
    first, second = _prepared(accelerator), _prepared(accelerator)
    for step in range(6):
        _train(accelerator, first, range(step, step + 1))
        if step % 2:
            _train(accelerator, second, range(step, step + 1))
    assert same(_kept(alone), _kept(first))


def _gan(managers: list[Any], models: list[Any], optimizers: list[Any], backward: Any) -> Any:
    """Train a generator against a discriminator, evaluate now and then, and return what must be equal."""
    generator, judge = models
    for step in range(8):
        optimizers[1].zero_grad()
        fake = generator(_batch(step))
        backward(judge(fake.detach()).mean() - judge(_batch(100 + step)).mean())
        optimizers[1].step()
        optimizers[0].zero_grad()
        backward(-judge(fake).mean())
        optimizers[0].step()
    return [_kept((manager, model, None)) for manager, model in zip(managers, models)]


def _two_in_one_loop(folder: str) -> None:
    accelerator = _accelerator()
    one, other = _prepared(accelerator), _prepared(accelerator)
    found = _gan([one[0], other[0]], [one[1], other[1]], [one[2], other[2]], accelerator.backward)

    models = [_model(), _model()]
    managers = [fp8dist.prepare(model, group=dist.group.WORLD) for model in models]
    wrapped = [nn.parallel.DistributedDataParallel(model) for model in models]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    for manager, model, optimizer in zip(managers, wrapped, optimizers):
        manager.attach(model, optimizer=optimizer)
    for ours, theirs in zip(found, _gan(managers, wrapped, optimizers, torch.Tensor.backward), strict=True):
        assert same(ours, theirs)


def _interrupted(folder: str) -> None:
    """Evaluations, and an FP8 teacher in eval(), change nothing in the student, and the teacher stays as it is."""
    accelerator = _accelerator()
    alone = _prepared(accelerator)
    _train(accelerator, alone, range(6))
    accelerator = _accelerator()
    student, teacher = _prepared(accelerator), _prepared(accelerator)
    _train(accelerator, teacher, range(2))
    teacher[1].eval()
    before, outputs = _kept(teacher), []
    for step in range(6):
        with torch.no_grad():
            outputs.append(teacher[1](_batch(50)))
        _train(accelerator, student, range(step, step + 1))
        student[1].eval()
        with torch.no_grad():
            student[1](3 * _batch(100 + step))
        student[1].train()
    assert same(_kept(alone), _kept(student))
    assert same(_kept(teacher), before)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def _another_optimizer(folder: str) -> None:
    accelerator = _accelerator()
    manager, model, optimizer = _prepared(accelerator)
    _train(accelerator, (manager, model, optimizer), range(4))
    again = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
    with pytest.raises(ConfigurationError, match="optimizer"):
        _train(accelerator, (manager, model, again), range(4, 6))

    accelerator = _accelerator()
    manager, model, optimizer = _prepared(accelerator)
    by_hand = _model()
    theirs = fp8dist.prepare(by_hand, group=dist.group.WORLD)
    wrapped = nn.parallel.DistributedDataParallel(by_hand)
    for start in (0, 4):
        if start:
            optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
            manager.attach(model, optimizer=optimizer)
        _train(accelerator, (manager, model, optimizer), range(start, start + 4))
        new = torch.optim.AdamW(by_hand.parameters(), lr=1e-3)
        theirs.attach(wrapped, optimizer=new)
        for step in range(start, start + 4):
            wrapped(_batch(step)).square().mean().backward()
            new.step()
            new.zero_grad()
    assert same(_kept((manager, model, None)), _kept((theirs, by_hand, None)))


def _recorded(folder: str, name: str, end: str) -> tuple[str, dict[int, float], int]:
    """Train 20 steps of 2 micro-batches; or until step 14, where the ranks are killed; or from step 12."""
    accelerator = _accelerator(f"{folder}/{name}", gradient_accumulation_steps=2)
    manager, model, optimizer = _prepared(accelerator, run=recorder(f"{folder}/run-{name}"))
    if end == "resumed":
        accelerator.load_state(f"{folder}/{name}/12")
    losses = {}
    for step in range(13 if end == "resumed" else 1, STEPS + 1):
        for place in range(2):
            with accelerator.accumulate(model):
                loss = model(_batch(2 * step + place)).square().mean()
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
    return fingerprint(*_kept((manager, model, None))), losses, len(manager.slots)


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
    by_hand={"1": (_as_by_hand, 1), "4": (_as_by_hand, 4), "a GAN": (_two_in_one_loop,)},
    resumed={
        "ddp": (_resumed, False, {}),
        "fsdp2": (_resumed, True, {}),
        "fp8 gather": (_resumed, True, {"fp8_all_gather": True}),
    },
    diverged={"a parameter": ("2.bias", (_diverged,))},
    undisturbed={"two models": (_two_models,), "evaluations and a teacher": (_interrupted,)},
    refused={"misuse": (_misused,), "another optimizer": (_another_optimizer,)},
    recorded=_recorded,
    ends_group=True,  # By ``end_training``.
    saved=(6, 12, 18),
)
