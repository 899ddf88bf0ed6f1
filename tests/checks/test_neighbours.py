"""What a rank gets of its neighbour's batch, and what a run gets of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import fp8dist
from fp8dist.replays.neighbours import from_next
from fp8dist.state.groups import SyncGroup
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.slow


def _batch(rank: int) -> dict[str, Any]:
    """Strides, dtypes and structure differ by rank."""
    x = torch.arange(24.0).view(2, 3, 4) + rank
    tensors: list[Tensor] = [
        x.transpose(0, 2),
        x.double()[:, ::2],
        x.bfloat16().permute(1, 2, 0),
        torch.complex(x, -x).conj().mT,
        x.to(torch.float8_e4m3fn).mT,
        x[:0].mT,
        x.sum(),
        x[..., 0].expand(3, 2, 3),
        (x > 3).mT,
    ]
    return {"x": tensors[rank:], "rank": rank, "nothing": () if rank else None}


def _described(batch: Any) -> list[Any]:
    """Return what a kernel could see of a batch."""
    seen: list[Any] = []
    for leaf in tree_leaves(batch):
        if not isinstance(leaf, Tensor):
            seen.append(leaf)
            continue
        clone = leaf.resolve_conj().clone()
        seen.append((clone.shape, clone.stride(), str(clone.dtype), str(clone.tolist()), leaf.requires_grad))
    return seen


@on_ranks(3)
def test_a_neighbour_s_batch_has_its_strides_dtypes_and_structure() -> None:
    group = SyncGroup(dist.group.WORLD)
    got = from_next(_batch(dist.get_rank()), group, torch.device("cpu"))
    assert _described(got) == _described(_batch((dist.get_rank() + 1) % group.size))


def test_each_run_gets_the_batch_as_it_was() -> None:
    """A step may write to its batch and take it apart."""
    net = nn.Linear(8, 8)
    batch = {"x": torch.randn(4, 8), "y": [torch.randn(4, 8)]}
    x, before = batch["x"], batch["x"].clone()

    def step(given: dict[str, Any]) -> None:
        x = given.pop("x").mul_(2)
        nn.functional.mse_loss(net(x), given["y"].pop()).backward()

    report = fp8dist.replay(net, step, batch)
    assert report.reproducible, str(report)
    assert batch["x"] is x
    assert torch.equal(x, before)
    assert len(batch["y"]) == 1
