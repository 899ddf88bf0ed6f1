"""Pipeline parallelism: each stage has its own manager, and stages share no FP8 state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import DelayedScaling
from tests.support.collectives import counted_collectives
from tests.support.parallel import mesh_of
from tests.support.ranks import RankPool
from tests.support.training import AmaxRecorder, expected_histories, histories, state_bits

pytestmark = [pytest.mark.slow]

STEPS, HISTORY, MICROBATCHES = 3, 8, 4
STAGES = ((0, 1), (2, 3))
"""The ranks of each stage."""


def _model(stage: int) -> nn.Sequential:
    """Two Linears, or one FP8 Linear and one that stays in high precision."""
    torch.manual_seed(stage)
    model = nn.Sequential()
    sizes = {"up": (32, 64), "middle": (64, 48)} if stage == 0 else {"down": (48, 16), "lm_head": (16, 16)}
    for name, (inputs, outputs) in sizes.items():
        model.add_module(name, nn.Linear(inputs, outputs))
        model.add_module(f"after_{name}", nn.ReLU())
    return model


def _batch(replica: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * replica + step)
    x = torch.randn(16, 32, generator=generator) * (1 + (step + replica) % 3)
    return x, torch.randn(16, 16, generator=generator)


def _stage(module: nn.Module, stage: int) -> PipelineStage:
    """Pass the shapes. Otherwise the stage infers them with a forward and backward of uninitialised memory and ones,
    which would be recorded (and in which DDP's reducer fails, even without fp8dist; torch 2.13)."""
    group = mesh_of((2, 2), ("pp", "dp")).get_group("pp")
    x, y = (torch.empty(16 // MICROBATCHES, size) for size in ((32, 48), (48, 16))[stage])
    shapes: dict[str, Any] = {"input_args": (x.requires_grad_(stage == 1),), "output_args": (y.requires_grad_(),)}
    return PipelineStage(module, stage, 2, torch.device("cpu"), group=group, **shapes)


def _train(schedule: Any, wrapper: str, update: Any) -> Any:
    """Train, assert what must hold of the stage, and return losses and state."""
    mesh = mesh_of((2, 2), ("pp", "dp"))
    stage, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    model = _model(stage)
    recipe = DelayedScaling(history_len=HISTORY, update=update)
    manager = fp8dist.prepare(model, recipe, group=mesh["dp"], fp8_all_gather=wrapper == "fsdp2")
    recorder = AmaxRecorder(model)
    module: Any = fully_shard(model, mesh=mesh["dp"]) if wrapper == "fsdp2" else None
    module = module or DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    manager.attach(module, optimizer=optimizer)
    runner = schedule(_stage(module, stage), n_microbatches=MICROBATCHES, loss_fn=nn.functional.mse_loss)
    losses: list[Tensor] = []
    with counted_collectives("all_reduce") as calls:  # torch compares its isend with the one that a schedule sends by.
        for step in range(STEPS):
            x, target = _batch(replica, step)
            runner.step(x) if stage == 0 else runner.step(target=target, losses=losses)
            optimizer.step()
            optimizer.zero_grad()
            recorder.end_step()
        state = state_bits(manager)
        slots = 6 if stage == 0 else 3
        # One sync per step, over the stage's two ranks, with the size of this stage's slots.
        assert calls.syncs(manager) == [STAGES[stage]] * STEPS
        assert [size for _, size in calls.reductions] == [4 * (8 + slots)] * STEPS
    assert not manager.check(parameters=True, policy="warn").diverged
    windows = histories(manager)
    assert len(windows) == slots
    everywhere: list[Any] = [None] * 4
    dist.all_gather_object(everywhere, (recorder.steps, state, list(manager.state_dict()), len(losses)))
    (amaxes, _, keys, _), (others, *_) = (everywhere[rank] for rank in STAGES[stage])
    assert amaxes != others  # So a maximum cannot come from one rank alone.
    for slot, window in expected_histories(list(windows), [amaxes, others], HISTORY).items():
        if wrapper == "ddp" or slot[1] != "weight":  # FSDP2's gathered weights are FP8 when a module's hook runs.
            assert windows[slot] == window, slot
        assert min(windows[slot][-STEPS:]) > 0
    assert all(everywhere[first][1:3] == everywhere[second][1:3] for first, second in STAGES)
    assert set(keys).isdisjoint(everywhere[STAGES[1 - stage][0]][2])
    assert all(key.startswith("ranks") for key in keys)
    assert stage == 0 or len(losses) % MICROBATCHES == 0 < len(losses)
    return [float(loss.detach()) for loss in losses], state


def test_stages_do_not_share_state_and_the_schedule_changes_no_number(four_ranks: RankPool) -> None:
    gpipe, alternating = (
        four_ranks.run(_train, schedule, "ddp", "next_step") for schedule in (ScheduleGPipe, Schedule1F1B)
    )
    assert gpipe == alternating
    assert gpipe[2][0] != gpipe[3][0]


def test_stages_under_fsdp2_with_fp8_all_gather(four_ranks: RankPool) -> None:
    four_ranks.run(_train, ScheduleGPipe, "fsdp2", "same_step")
