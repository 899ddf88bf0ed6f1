"""Copies that nobody declared: ranks keep them equal while all of them train them. Only a warning if they part."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist.checks import inferred
from fp8dist.state.groups import SyncGroup
from tests.support.collectives import counted_collectives
from tests.support.large_world import SIZE, world
from tests.support.logs import captured_log
from tests.support.ranks import RankPool, on_ranks
from tests.support.suite import few

WIDTH = 16


class Net(nn.Module):
    """A Linear that DDP keeps equal, and a norm, an adapter and experts that DDP ignores, with equal seeds on all
    ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)  # As LoRA.
        nn.init.zeros_(self.up.weight)
        self.expert = nn.Linear(WIDTH, WIDTH)
        own = [name for name, _ in self.named_parameters() if not name.startswith("body")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, own)

    def forward(self, x: Tensor, experts: float) -> Tensor:
        y = self.body(x)
        return self.norm(y + self.up(self.down(x))) + experts * self.expert(y)


ALL = ("norm.weight", "norm.bias", "down.weight", "up.weight", "expert.weight", "expert.bias")


def _train(
    damaged: str = "",
    at: int = 4,
    reduced: tuple[str, ...] = ALL,
    tokens: tuple[int, int] = (1, 1),
    every: int = 1,
    fails: bool = False,
    changes: str = "",
) -> Any:
    """Train eight steps. Return the warnings, the bytes by way, and the bytes of the all-reduces of the last step.

    Args:
        damaged: a parameter to which the last rank adds something in step ``at``.
        reduced: the parameters whose gradients the loop averages over the ranks.
        tokens: the first step in which the experts of rank 0 have tokens, and that of the others.
        fails: rank 1 cannot read its tensors in the second check.
        changes: what all ranks do to the norm before step 4: "freeze" it, or "wrap" it, after which its parameters have
            other names.
    """
    model, rank = Net(), dist.get_rank()
    options: Any = {"group": dist.group.WORLD, "amax_sync": True, "check_every": every, "skip": ["down", "up"]}
    manager = fp8dist.prepare(model, fp8dist.DelayedScaling(), **options)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    looked: list[int] = []

    def unreadable(*of: Any) -> Any:
        looked.append(1)
        if fails and rank == 1 and len(looked) == 2:
            raise RuntimeError("out of memory")
        return digests(*of)

    digests = inferred._digests
    with captured_log(logging.WARNING) as log, mock.patch.object(inferred, "_digests", unreadable):
        manager.attach(ddp, optimizer=optimizer)
        for step in range(1, 9):
            if step == 4 and changes == "freeze":
                model.norm.requires_grad_(False)
            if step == 4 and changes == "wrap":
                model.norm = nn.Sequential(model.norm)  # type: ignore[assignment]
            x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
            ddp(x, float(step >= tokens[min(rank, 1)])).square().mean().backward()
            for name, parameter in model.named_parameters():
                if name in reduced and parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
                if name == damaged and step == at and rank == dist.get_world_size() - 1:
                    parameter.data.view(-1)[3] += 0.5
            with counted_collectives() as calls:
                optimizer.step()
            optimizer.zero_grad()
    assert "inferred" not in manager.check(parameters=False).compared_by
    by = manager.check().compared_by
    return [text for _, text in log], dict(by), [n for n, c in zip(calls.sizes, calls.names) if c == "all_reduce"]


@pytest.mark.slow
def test_a_copy_that_parts_is_warned_of_once_and_the_last_check_counts_the_rest(three_ranks: RankPool) -> None:
    """The check of step n compares what step n - 1 has left, before its own step ends."""
    (texts, by, sizes), *others = three_ranks.run(_train, "norm.bias")
    assert texts == [
        "fp8dist: step 3: no longer equal on all ranks, although all had gradients for it and kept it equal until now: "
        "norm.bias (odd ranks: 2). If these are copies, say so, and checks raise: prepare(axes=…)"
    ]
    assert [texts for texts, *_ in others] == [[], []]
    # up.weight is a constant in the first check, and down.weight has no gradient then.
    left = WIDTH + 2 * 4 * WIDTH + WIDTH * WIDTH + WIDTH
    assert by["inferred"] == 4 * left
    assert by["not compared"] == 4 * WIDTH
    assert list(by) == ["copies", "inferred", "not compared"]
    assert 8 * (1 + 3 * 5) in sizes  # One flag, and three numbers for each of five parameters.


QUIET: dict[str, dict[str, Any]] = {
    "all is well": {},
    "parted in the first step": {"reduced": tuple(name for name in ALL if name != "norm.weight")},
    "experts and adapters of each rank": {"reduced": ("norm.weight", "norm.bias")},
    "alike without tokens, and then rank 0 has some": {"reduced": ALL[:4], "tokens": (5, 9)},
    "one rank never had tokens": {"reduced": ALL[:4], "tokens": (1, 9)},
    "parted after one check": {"damaged": "norm.bias", "at": 3},
    "frozen after it was adopted": {"changes": "freeze"},
    "renamed after it was adopted": {"changes": "wrap", "reduced": (*ALL, "norm.0.weight", "norm.0.bias")},
    "no checks": {"damaged": "norm.bias", "every": 0},
}


@pytest.mark.parametrize(
    "program",
    few(
        QUIET,
        "experts and adapters of each rank",
        "one rank never had tokens",
        "parted after one check",
        "renamed after it was adopted",
    ),
)
@on_ranks(2)
def test_what_may_part_is_silent(program: str) -> None:
    assert _train(**QUIET[program])[0] == []


@on_ranks(2)
def test_a_frozen_copy_that_parts_is_warned_of_and_a_rank_that_cannot_read_ends_it_on_all() -> None:
    texts, *_ = _train(changes="freeze", damaged="norm.bias", at=6)
    said = [] if dist.get_rank() else ["fp8dist: step 5:"]
    assert [text.partition(" no longer")[0] for text in texts] == said
    texts, ways, _ = _train(damaged="norm.bias", at=6, fails=True)
    said = ["fp8dist: rank 1: cannot look for copies, and no longer does: out of memory"]
    assert texts == said * dist.get_rank()
    assert "inferred" not in ways


def test_which_parameters_are_trained() -> None:
    values = {
        "empty": torch.zeros(0),
        "complex": torch.tensor([1j, 2]),
        "constant": torch.ones(2),
        "no gradient": torch.arange(2.0),
        "sparse": torch.arange(2.0),
    }
    parameters = {name: nn.Parameter(value) for name, value in values.items()}
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    parameters["no gradient"].grad = None
    parameters["sparse"].grad = torch.ones(2).to_sparse()
    assert inferred._trained(parameters) == {"complex", "sparse"}
    assert inferred._trained({}) == set()


def _messages(rank: int, size: int) -> list[tuple[str, int]]:
    with world(rank, size), counted_collectives() as calls:
        model = Net()
        looks = inferred.Inferred(SyncGroup(dist.group.WORLD), ALL)  # type: ignore[arg-type]
        for _ in range(3):
            looks.look(model, 1)
    return list(zip(calls.names, calls.sizes))


def test_16_384_ranks_send_the_same_messages_as_two() -> None:
    assert _messages(SIZE - 1, SIZE) == _messages(1, 2) == [("all_reduce", 8 * (1 + 3 * len(ALL)))] * 3
