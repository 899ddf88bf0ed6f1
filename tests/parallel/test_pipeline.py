"""Pipeline parallelism: each stage has its own manager, and stages share no FP8 state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import DelayedScaling, StateManager
from tests.support.parallel import mesh_of, watched_reductions
from tests.support.ranks import RankPool
from tests.support.training import Amaxes, AmaxRecorder, SlotName, expected_histories, histories, state_bits

pytestmark = [pytest.mark.slow]

STEPS, HISTORY, MICROBATCHES = 4, 8, 4
STAGES = {0: (0, 1), 1: (2, 3)}


class FirstStage(nn.Module):
    """Two Linears."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(32, 64)
        self.middle = nn.Linear(64, 48)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.middle(torch.relu(self.up(x))))


class LastStage(nn.Module):
    """One FP8 Linear, and one that stays in high precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.down = nn.Linear(48, 16)
        self.lm_head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.down(x))


def _batch(replica: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * replica + step)
    x = torch.randn(16, 32, generator=generator) * (1 + (step + replica) % 3)
    return x, torch.randn(16, 16, generator=generator)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


@dataclass
class Outcome:
    """The results of one rank."""

    losses: list[list[float]]
    histories: dict[SlotName, list[float]]
    amaxes: list[Amaxes]
    reductions: list[tuple[tuple[int, ...], int]]
    keys: list[str]
    state: dict[str, bytes]
    agree: bool
    compared: Any


def _wrapped(model: nn.Module, wrapper: str) -> nn.Module:
    mesh = mesh_of((2, 2), ("pp", "dp"))
    if wrapper == "ddp":
        return DistributedDataParallel(model, process_group=mesh.get_group("dp"))
    if wrapper == "none":
        return model
    return fully_shard(model, mesh=mesh["dp"])


def _stage(module: nn.Module, stage: int) -> PipelineStage:
    """Pass the shapes. Otherwise the stage infers them with a forward and backward of uninitialised memory and ones,
    which would be recorded (and in which DDP's reducer fails, even without fp8dist; torch 2.13)."""
    group = mesh_of((2, 2), ("pp", "dp")).get_group("pp")
    sizes = [(32, 48), (48, 16)][stage]
    x, y = (torch.empty(16 // MICROBATCHES, size) for size in sizes)
    shapes: dict[str, Any] = {"input_args": (x.requires_grad_(stage == 1),), "output_args": (y.requires_grad_(),)}
    return PipelineStage(module, stage, 2, torch.device("cpu"), group=group, **shapes)


def _train(schedule: str, wrapper: str, update: str) -> Outcome:
    mesh = mesh_of((2, 2), ("pp", "dp"))
    stage, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    model: nn.Module = FirstStage() if stage == 0 else LastStage()
    recipe = DelayedScaling(history_len=HISTORY, update=update)  # type: ignore[arg-type]
    manager = fp8dist.prepare(model, recipe, group=mesh["dp"], fp8_all_gather=wrapper == "fsdp2")
    recorder = AmaxRecorder(model)
    module = _wrapped(model, wrapper)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    manager.attach(module, optimizer=optimizer)
    pipe = _stage(module, stage)
    kind = ScheduleGPipe if schedule == "gpipe" else Schedule1F1B
    runner = kind(pipe, n_microbatches=MICROBATCHES, loss_fn=_loss)
    losses: list[list[float]] = []
    with watched_reductions() as reductions:
        for step in range(STEPS):
            x, target = _batch(replica, step)
            of_step: list[Tensor] = []
            if stage == 0:
                runner.step(x)
            else:
                runner.step(target=target, losses=of_step)
            losses.append([float(loss.detach()) for loss in of_step])
            optimizer.step()
            optimizer.zero_grad()
            recorder.end_step()
        state = state_bits(manager)
        seen = list(reductions.seen)
        report = manager.check(parameters=True, policy="warn")
    return Outcome(
        losses,
        histories(manager),
        recorder.steps,
        seen,
        list(manager.state_dict()),
        state,
        not report.diverged,
        report.compared,
    )


def _assert_separate(outcomes: list[Outcome], weights_seen: bool) -> None:
    for stage, ranks in STAGES.items():
        of_stage = [outcomes[rank] for rank in ranks]
        first = of_stage[0]
        slots = 6 if stage == 0 else 3
        assert len(first.histories) == slots
        expected = expected_histories(list(first.histories), [o.amaxes for o in of_stage], HISTORY)
        for outcome in of_stage:
            # One sync per step, over the stage's two ranks, with the size of this stage's slots.
            assert outcome.reductions == [(ranks, 4 * (8 + slots))] * STEPS
            assert outcome.state == first.state
            assert outcome.agree
            for slot, window in expected.items():
                if weights_seen or slot[1] != "weight":  # FSDP2's gathered weights are FP8 when a module's hook runs.
                    assert outcome.histories[slot] == window, slot
            assert min(outcome.histories["up" if stage == 0 else "down", "weight"][-STEPS:]) > 0
        # The amaxes of the two ranks differ, so a maximum cannot come from one rank alone.
        assert of_stage[0].amaxes != of_stage[1].amaxes
        assert first.keys == of_stage[1].keys
        assert all(key.startswith("ranks") for key in first.keys)
    assert set(outcomes[0].keys).isdisjoint(outcomes[2].keys)
    assert outcomes[2].losses[0] != outcomes[3].losses[0]
    assert all(len(step) == MICROBATCHES for step in outcomes[2].losses)


def test_stages_do_not_share_state_and_the_schedule_changes_no_number(four_ranks: RankPool) -> None:
    gpipe, alternating = (four_ranks.run(_train, schedule, "ddp", "next_step") for schedule in ("gpipe", "1f1b"))
    _assert_separate(gpipe, True)
    _assert_separate(alternating, True)
    for mine, theirs in zip(gpipe, alternating):
        assert mine.state == theirs.state
        assert mine.losses == theirs.losses


def test_stages_under_fsdp2_with_fp8_all_gather(four_ranks: RankPool) -> None:
    outcomes = four_ranks.run(_train, "gpipe", "fsdp2", "same_step")
    _assert_separate(outcomes, False)


def _one_stage_alone() -> tuple[int, dict[SlotName, list[float]]]:
    """The first stage takes an additional step and checks itself, while the last stage is idle."""
    mesh = mesh_of((2, 2), ("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    model: nn.Module = FirstStage() if stage == 0 else LastStage()
    manager: StateManager = fp8dist.prepare(model, DelayedScaling(history_len=HISTORY), group=mesh["dp"])
    manager.attach(model)
    for step in range(2 - stage):
        model(torch.full((4, 48 if stage else 32), 1.0 + step + dist.get_rank())).sum().backward()
        manager.step()
    if stage == 0:
        assert not manager.check().diverged
    return manager.steps, histories(manager)


def test_stages_need_not_step_together(four_ranks: RankPool) -> None:
    results = four_ranks.run(_one_stage_alone, timeout=30)
    assert [steps for steps, _ in results] == [2, 2, 1, 1]
    for rank, (_, windows) in enumerate(results):
        name, expected = ("up", [2.0, 3.0]) if rank < 2 else ("down", [0.0, 4.0])
        assert windows[name, "input"][-2:] == expected
