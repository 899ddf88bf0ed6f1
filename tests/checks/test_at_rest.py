"""Tensors at rest: what changes between two steps without a write that torch counts is named."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8dist
from fp8dist.checks.contents import TensorContent
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.ranks import RankPool


def _flip(tensor: Tensor, place: int = 5) -> None:
    """Flip one bit, as a faulty memory would: no version counter moves."""
    tensor.detach().data.view(torch.int32).view(-1)[place] ^= 1 << 3


def _train(
    between: Callable[[int, nn.Module, torch.optim.Optimizer], None],
    every: int | None = 1,
    enabled: bool = True,
    level: int = logging.WARNING,
    shard: bool = False,
    gather: bool = False,
) -> list[str]:
    """Train six steps, and call ``between(step, model, optimizer)`` after each. Return what is logged."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))
    model[2].bias.requires_grad_(False)
    group = dist.group.WORLD if dist.is_initialized() else None
    options: Any = {"group": group, "at_rest_every": every, "enabled": enabled, "fp8_all_gather": gather}
    manager = fp8dist.prepare(model, fp8dist.CurrentScaling(), **options)
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager.attach(model, optimizer=optimizer)
    with captured_log(level) as log:
        for step in range(1, 7):
            model(torch.randn(16, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            between(step, model, optimizer)
    return [text.removeprefix("fp8dist: ") for _, text in log if "between steps" in text]


FLIPPED: dict[str, tuple[str, Callable[[Any, Any], Tensor]]] = {
    "parameter": ("0.weight", lambda model, optimizer: model[0].weight),
    "frozen": ("2.bias", lambda model, optimizer: model[2].bias),
    "moment": ("1.weight.exp_avg_sq", lambda model, optimizer: optimizer.state[model[1].weight]["exp_avg_sq"]),
}


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("what", FLIPPED)
def test_a_flipped_bit_is_named_with_rank_tensor_and_step(what: str, enabled: bool) -> None:
    name, tensor_of = FLIPPED[what]
    texts = _train(lambda step, *of: _flip(tensor_of(*of)) if step == 3 else None, enabled=enabled)
    assert texts == [
        f"rank 0: changed between steps 3 and 4, and torch counted no write: {name}. Other code has written through "
        ".data, an address or a collective, or the memory is faulty. What changes so between all steps is reported once"
    ]


@pytest.mark.parametrize(("every", "found"), [(0, []), (2, [4]), (3, [3]), (None, [])])
def test_intervals_are_compared_every_so_many_steps(every: int | None, found: list[int]) -> None:
    texts = _train(lambda step, model, _: _flip(model[0].weight, step) if step in (1, 3, 4, 5) else None, every)
    assert [f"between steps {step} and" in text for text, step in zip(texts, found, strict=True)] == [True] * len(found)


def _shards(between: str) -> Any:
    def flip(step: int, model: Any, optimizer: Any) -> None:
        weight = model[0].weight
        if step == 4:
            with torch.no_grad():  # Counted in the DTensor, or in its local part.
                (weight if dist.get_rank() else weight.to_local()).mul_(0.9)
        if step == 2 and dist.get_rank() == 1:
            _flip((weight if between == "shard" else optimizer.state[weight]["exp_avg"]).to_local())

    return _train(flip, shard=True)


@pytest.mark.slow
@pytest.mark.parametrize(("between", "name"), [("shard", "0.weight"), ("moment", "0.weight.exp_avg")])
def test_a_bit_of_a_shard_that_exists_once_is_named_on_its_rank(two_ranks: RankPool, between: str, name: str) -> None:
    first, second = two_ranks.run(_shards, between)
    assert first == []
    assert len(second) == 1
    assert second[0].startswith(f"rank 1: changed between steps 2 and 3, and torch counted no write: {name}. ")


def _gathered() -> Any:
    """A bit of an FP8 weight's shard, which FSDP2 gathers as FP8 bytes."""

    def flip(step: int, model: Any, optimizer: Any) -> None:
        if step == 3:
            _flip(model[0].weight._local_tensor.as_subclass(Tensor))

    return _train(flip, shard=True, gather=True)


def test_shards_that_are_gathered_in_fp8_are_covered(two_ranks: RankPool) -> None:
    for (text,) in two_ranks.run(_gathered):
        assert "changed between steps 3 and 4, and torch counted no write: 0.weight" in text


def test_an_error_ends_the_comparisons_and_not_the_training() -> None:
    with captured_log() as log, mock.patch.object(TensorContent, "digests", side_effect=RuntimeError("out of memory")):
        assert _train(lambda step, model, _: _flip(model[0].weight)) == []
        (text,) = [text for _, text in log]
    assert (
        text == "fp8dist: rank 0: at_rest_every: cannot read the tensors, so they are compared no more: out of memory"
    )


# What is no fault --------------------------------------------------------------------------------------


def _clip(step: int, model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model[0].weight.clamp_(-0.1, 0.1)


def _load(step: int, model: Any, optimizer: Any) -> None:
    if step == 3:
        model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})


def _replace(step: int, model: Any, optimizer: Any) -> None:
    if step == 3:
        model[0].weight.data = model[0].weight.data * 2


def _offload(step: int, model: Any, optimizer: Any) -> None:
    """Move the state away and back, as jobs do that generate between steps."""
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].clone()


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (_clip, ["written to between steps 1 and 2: 0.weight"]),  # The same in each interval: once.
        (
            _load,
            ["written to between steps 3 and 4: 0.bias, 0.weight, 1.bias, 1.weight and 2 more"],
        ),
        (
            _replace,
            ["written to between steps 3 and 4: 0.weight"],
        ),
        (_offload, []),
    ],
)
def test_writes_that_torch_counts_are_information(write: Any, expected: list[str]) -> None:
    assert _train(write, level=logging.INFO) == [f"rank 0: {text}" for text in expected]


def test_fused_steps_of_two_optimizers_are_no_fault() -> None:
    """torch counts no write of a fused optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    manager = fp8dist.prepare(model, at_rest_every=1)
    optimizers = [torch.optim.AdamW(part.parameters(), fused=True) for part in model]
    manager.attach(model, optimizer=optimizers)
    with captured_log() as log:
        for _ in range(4):
            for trained in (0, 1):  # As a GAN does, whose other half is frozen.
                model[1 - trained].requires_grad_(False)
                model(torch.randn(8, 16, requires_grad=True)).sum().backward()
                optimizers[trained].step()
                model[1 - trained].requires_grad_(True)
    assert log == []


def test_a_habit_is_reported_once() -> None:
    def write(step: int, model: Any, optimizer: Any) -> None:
        model[0].weight.data.mul_(0.99)
        if step > 2:  # From then on.
            model[0].bias.data.mul_(0.99)
        if step in (2, 5):
            _flip(model[2].weight)

    texts = _train(write)
    assert [text.split(". Other")[0].split("between ")[1] for text in texts] == [
        f"steps {step} and {step + 1}, and torch counted no write: {name}"
        for step, name in [(1, "0.weight"), (2, "2.weight"), (3, "0.bias"), (5, "2.weight")]
    ]


def _collectives(every: int) -> list[str]:
    with counted_collectives() as calls:
        _train(lambda *_: None, every)
    return calls.names


def test_it_needs_no_collective(two_ranks: RankPool) -> None:
    assert two_ranks.run(_collectives, 1) == two_ranks.run(_collectives, 0)
