"""``fp8dist.integrations.accelerate.prepare`` with a real Accelerator, against a loop by hand."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8dist
from fp8dist.errors import ConfigurationError, DivergenceError
from fp8dist.sync.groups import local_part
from tests.support.examples import run_example
from tests.support.ranks import RankPool

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


def _kept(prepared: tuple[Any, ...]) -> tuple[dict[str, bytes], list[Tensor]]:
    manager, model, _ = prepared
    return manager.state_dict(), [local_part(p.detach()).clone() for p in model.parameters()]


def _equal(a: tuple[dict[str, bytes], list[Tensor]], b: tuple[dict[str, bytes], list[Tensor]]) -> bool:
    return a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


def _as_by_hand(accumulate: int) -> None:
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
    assert _equal(_kept(prepared), _kept((manager, model, optimizer)))


@pytest.mark.parametrize("accumulate", [1, 4])
def test_it_trains_as_a_loop_by_hand(two_ranks: RankPool, accumulate: int) -> None:
    two_ranks.run(_as_by_hand, accumulate)


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
    assert _equal(_kept(whole), _kept(resumed))


def _plugin(sharded: bool) -> dict[str, Any]:
    from accelerate import FullyShardedDataParallelPlugin

    if not sharded:
        return {}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1000, state_dict_type="SHARDED_STATE_DICT"
    )
    return {"fsdp_plugin": plugin}


@pytest.mark.parametrize(
    ("sharded", "options"),
    [(False, {}), (True, {}), (True, {"fp8_all_gather": True})],
    ids=["ddp", "fsdp2", "fp8 gather"],
)
def test_a_resumed_run_has_the_same_bits(
    two_ranks: RankPool, tmp_path: Path, sharded: bool, options: dict[str, Any]
) -> None:
    two_ranks.run(_resumed, str(tmp_path), sharded, options)


def _diverged() -> str:
    accelerator = _accelerator()
    prepared = _prepared(accelerator, check_every=2)
    _train(accelerator, prepared, range(4))
    if dist.get_rank() == 1:
        with torch.no_grad():
            prepared[1].module[2].bias[3] += 1
    with pytest.raises(DivergenceError) as caught:
        _train(accelerator, prepared, range(4, 8))
    return str(caught.value)


def test_a_divergence_is_an_error_on_all_ranks(two_ranks: RankPool) -> None:
    for said in two_ranks.run(_diverged):
        assert "2.bias" in said


def _misused() -> None:
    from fp8dist.integrations.accelerate import prepare

    accelerator = _accelerator()
    accelerator.state._mixed_precision = "fp8"
    with pytest.raises(ConfigurationError, match='use "bf16"'):
        _prepared(accelerator)
    accelerator = _accelerator()
    _, model, optimizer = _prepared(accelerator)
    with pytest.raises(ConfigurationError, match="before the model is wrapped"):
        prepare(accelerator, model, optimizer)


def test_misuse_is_an_error(two_ranks: RankPool) -> None:
    two_ranks.run(_misused)


def _two_models() -> None:
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
    assert _equal(_kept(alone), _kept(first))


def test_two_models_are_isolated(two_ranks: RankPool) -> None:
    two_ranks.run(_two_models)


def test_the_example_trains() -> None:
    assert "FP8: " in run_example("accelerate", "--steps", "4")
