"""Who held a maximum: watch(ranks=True) tells the rank and the microbatch, also of a NaN."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fp8dist
from fp8dist import DelayedScaling
from tests.support.parallel import mesh_of
from tests.support.ranks import RankPool
from tests.support.training import Net, batch, make_net
from tests.support.watched import lines_into

MICROBATCHES = 4
STEP, MICROBATCH = 2, 2
"""Where the tests plant a value."""

OUTLIER = 1e4


class Recomputing(Net):
    """Recomputes two of its modules in the backward, as one checkpoint or as two."""

    reentrant = False

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        recomputed: Callable[..., Tensor] = functools.partial(checkpoint, use_reentrant=self.reentrant)
        h = recomputed(self.branch, torch.relu(self.first(x)))
        return recomputed(self.last, h)


class Reentrant(Recomputing):
    """The same with reentrant checkpoints, whose backwards are autograd tasks of their own."""

    reentrant = True


class Whole(Net):
    """Recomputes everything, so that no forward before the backward records."""

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=True)


class Twice(Net):
    """Calls a module twice."""

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        return super().forward(x) + super().forward(x.flip(0))


def planted(rank: int, step: int, microbatch: int, value: float, on: int) -> tuple[Tensor, Tensor]:
    """Return a batch, with ``value`` in one place of it on one rank, in one microbatch."""
    x, y = batch(rank, 10 * step + microbatch)
    if (rank, step, microbatch) == (on, STEP, MICROBATCH):
        x[3, 5] = value
    return x, y


def lines_of(path: Path) -> dict[tuple[int, str], dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {(line["step"], line["slot"]): line for line in lines}


def train(
    manager: fp8dist.StateManager, module: Any, value: float, rank: int = 0, on: int = 0, no_sync: bool = False
) -> None:
    """Run three steps with a value planted in the second."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    manager.attach(module, optimizer=optimizer)
    for step in range(1, 4):
        for microbatch in range(MICROBATCHES):
            x, y = planted(rank, step, microbatch, value, on)
            if no_sync:
                module.require_backward_grad_sync = microbatch == MICROBATCHES - 1
            (module(x) - y).square().mean().backward()
        for parameter in module.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad.nan_to_num(0, 0, 0)
        optimizer.step()
        optimizer.zero_grad()


def make(kind: type[Net] = Net) -> Net:
    net = make_net()
    net.__class__ = kind
    return net


@pytest.mark.parametrize("kind", [Net, Recomputing, Reentrant, Whole, Twice], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("value", [OUTLIER, torch.nan, -torch.inf])
def test_a_planted_value_is_told_with_its_microbatch(tmp_path: Path, kind: type[Net], value: float) -> None:
    net = make(kind)
    manager = fp8dist.prepare(net, DelayedScaling(history_len=8))
    fp8dist.watch(manager, 1, observer=lines_into(tmp_path / "s"), ranks=True)
    train(manager, net, value)
    lines = lines_of(tmp_path / "s")
    line = lines[STEP, "first:input"]
    assert (line["amax_rank"], line["amax_microbatch"]) == (0, MICROBATCH)
    assert line["amax"] == {OUTLIER: OUTLIER, torch.nan: "NaN"}.get(value, "NaN" if value != value else "Infinity")
    assert line["saturated_microbatch"] == (MICROBATCH if value == OUTLIER else 0)
    assert lines[STEP, "first:weight"]["amax_microbatch"] == 0  # The same in each: the first counts.
    for step in (1, 3):  # Another step starts at 0 again.
        amaxes = [planted(0, step, i, 0.0, -1)[0].abs().max().item() for i in range(MICROBATCHES)]
        assert lines[step, "first:input"]["amax"] == max(amaxes)
        assert lines[step, "first:input"]["amax_microbatch"] == amaxes.index(max(amaxes))


def _on_ranks(path: str, wrapper: str, value: float) -> None:
    rank = dist.get_rank()
    net: nn.Module = make(Recomputing if wrapper == "fsdp2" else Net)
    mesh = mesh_of((2,), ("dp",))
    manager = fp8dist.prepare(net, DelayedScaling(history_len=8), group=mesh, fp8_all_gather=wrapper == "fsdp2")
    fp8dist.watch(manager, 1, observer=lines_into(path if rank == 0 else None), ranks=True)
    module: Any = fully_shard(net, mesh=mesh) if wrapper == "fsdp2" else DistributedDataParallel(net)
    if wrapper == "ddp with the hook":
        module.register_comm_hook(None, fp8dist.ddp.comm_hook(manager))
    train(manager, module, value, rank, on=1, no_sync=wrapper != "fsdp2")


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["ddp", "ddp with the hook", "fsdp2"])
@pytest.mark.parametrize("value", [OUTLIER, torch.nan])
def test_rank_and_microbatch_under_a_wrapper(two_ranks: RankPool, tmp_path: Path, wrapper: str, value: float) -> None:
    two_ranks.run(_on_ranks, str(tmp_path / "s"), wrapper, value)
    line = lines_of(tmp_path / "s")[STEP, "first:input"]
    assert (line["amax_rank"], line["amax_microbatch"]) == (1, MICROBATCH)
    assert line["amax"] == (OUTLIER if value == OUTLIER else "NaN")


def _tied(path: str) -> None:
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=8), group=dist.group.WORLD)
    fp8dist.watch(manager, 1, observer=lines_into(path if dist.get_rank() == 0 else None), ranks=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    manager.attach(optimizer=optimizer)
    small, _ = batch(0, 0)
    for factor in (1, 2, 2) if dist.get_rank() == 0 else (2, 2, 2):
        net(factor * small).sum().backward()
    optimizer.step()


def test_of_equals_the_lowest_rank_and_its_first_microbatch(two_ranks: RankPool, tmp_path: Path) -> None:
    two_ranks.run(_tied, str(tmp_path / "s"))
    line = lines_of(tmp_path / "s")[1, "first:input"]
    assert (line["amax_rank"], line["amax_microbatch"]) == (0, 1)


def watched(tmp_path: Path, step: Callable[[Any], None], prepared: Callable[[Net], Any] = lambda net: net) -> Any:
    """Run one watched step, and return the microbatch of the first module's input."""
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=8))
    fp8dist.watch(manager, 1, observer=lines_into(tmp_path / "s"), ranks=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    manager.attach(optimizer=optimizer)
    step(prepared(net))
    optimizer.step()
    return lines_of(tmp_path / "s")[1, "first:input"]["amax_microbatch"]


def test_evaluations_between_do_not_count(tmp_path: Path) -> None:
    def step(net: Net) -> None:
        for factor in (1, 2):
            net(factor * batch(0, 0)[0]).sum().backward()
            with torch.no_grad():
                net(batch(0, 0)[0])
            net.eval()
            net(100 * batch(0, 0)[0])
            net.train()

    assert watched(tmp_path, step) == 1


def test_forwards_ahead_of_their_backwards_are_not_told_apart(tmp_path: Path) -> None:
    def pipeline(net: Net) -> None:
        for output in [net(factor * batch(0, 0)[0]) for factor in (1, 2)]:
            output.sum().backward()

    assert watched(tmp_path, pipeline) is None


def test_without_a_backward_nothing_is_told_apart(tmp_path: Path) -> None:
    assert watched(tmp_path, lambda net: net(batch(0, 0)[0])) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own call.
def test_compiled_forwards_are_not_told_apart_and_compile_no_more(tmp_path: Path) -> None:
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=8))
    fp8dist.watch(manager, 2, observer=lines_into(tmp_path / "s"), ranks=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    manager.attach(optimizer=optimizer)
    compiled = torch.compile(net, backend="aot_eager")
    for step in range(6):
        with torch._dynamo.config.patch(
            error_on_recompile=step >= 4
        ):  # Compiled for both kinds of steps, cold and hot.
            compiled(batch(0, step)[0]).sum().backward()
        optimizer.step()
    lines = lines_of(tmp_path / "s")
    assert {line["amax_microbatch"] for line in lines.values()} == {None}
    assert {line["amax_rank"] for line in lines.values()} == {0}


def test_more_microbatches_than_fit_are_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8dist.state.watch._FOR_MICROBATCH", 2)
    monkeypatch.setattr("fp8dist.state.watch._UNKNOWN", 3)

    def step(net: Net) -> None:
        for factor in range(1, 6):
            net(factor * batch(0, 0)[0]).sum().backward()

    assert watched(tmp_path, step) is None
