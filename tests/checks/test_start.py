"""What ranks start with, compared once by ``attach``. Among the scenarios, ``mistaken_starts.py`` has the layouts in
which a difference is caught, and ``quiet_ranks.py`` programs in which ranks differ by design."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fp8dist
from fp8dist import ConfigurationError, DivergenceError
from fp8dist.checks.contents import Digester
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.parallel import mesh_of, part_of
from tests.support.ranks import on_ranks
from tests.support.states import state_of
from tests.support.training import batch, bits, make_net


@pytest.mark.parametrize(
    ("layout", "count", "said"),
    [
        ("switched off", 1, "compared 6 parameters of 18.9 kB over 4 ranks in "),
        # The last one lists parameters that are equal and not compared: there is none.
        ("fsdp2", 2, "had nothing to compare over 4 ranks: 6 parameters that are DTensors without a Replicate axis"),
        # That of all ranks, one for each axis, and two more, as a check.
        ("hsdp", 5, "compared 6 parameters of 9.44 kB over 4 ranks in "),
    ],
)
@on_ranks(4)
def test_it_is_one_collective_at_attach_and_none_in_a_step(layout: str, count: int, said: str) -> None:
    counts, logged = {}, []
    for start in ("raise", None):
        net, group = make_net(), dist.group.WORLD
        if layout == "hsdp":
            group = mesh_of((2, 2), ("replicate", "shard"))  # type: ignore[assignment]
        manager = fp8dist.prepare(net, group=group, enabled=layout != "switched off")
        called: Any = net
        if layout != "switched off":
            called = fully_shard(net, mesh=group if layout == "hsdp" else None)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(called.parameters(), lr=0.1)
        with counted_collectives() as calls, captured_log(logging.INFO) as log:
            manager.attach(called, optimizer=optimizer, start=start)  # type: ignore[arg-type]
        counts[start] = list(zip(calls.names, calls.sizes))
        logged += [text for _, text in log if "compare" in text]
        x, y = batch(dist.get_rank(), 0)
        nn.functional.mse_loss(called(x), y).backward()
        with counted_collectives() as calls:
            optimizer.step()
        assert calls.names == ([] if layout == "switched off" else ["all_reduce"])
    name, size = counts["raise"][0]
    assert name == "all_reduce"
    assert size <= 128
    assert counts["raise"][count:] == counts[None]
    assert len(logged) == (dist.get_rank() == 0)
    assert all(text.startswith(f"fp8dist: attach() {said}") for text in logged)


def _odd_net(rank: int) -> nn.Module:
    """Return a net in which one element differs on ``rank``."""
    net = make_net()
    if dist.get_rank() == rank:
        with torch.no_grad():
            next(net.parameters()).view(-1)[5] += 1
    return net


@pytest.mark.slow
@on_ranks(3)
def test_after_an_error_attach_begins_anew() -> None:
    """The model was attached before; attach fails, the ranks are made equal, and attach succeeds."""
    results = []
    for odd in (False, True):
        net = make_net()
        manager = fp8dist.prepare(net, group=dist.group.WORLD)
        manager.attach(optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
        right = {name: p.detach().clone() for name, p in net.named_parameters()}
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if odd:
            net.load_state_dict({**net.state_dict(), **_odd_net(1).state_dict()})
            with captured_log(), pytest.raises(DivergenceError) as caught:
                manager.attach(optimizer=optimizer)
            (finding,) = caught.value.report.findings
            assert (finding.kind, finding.ranks, finding.reference_rank) == ("parameter", (1,), 0)
            assert not fp8dist.describe(manager)["attached"]
            x, y = batch(0, 0)
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            with pytest.raises(ConfigurationError, match="attach"):  # Not trained on in silence.
                optimizer.step()
            optimizer.zero_grad()
            net.load_state_dict(right)
            manager.reset()
        manager.attach(optimizer=optimizer)
        for step in range(3):
            x, y = batch(dist.get_rank(), step)
            nn.functional.mse_loss(net(x), y).backward()
            for p in net.parameters():
                dist.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()
        results.append(({name: bits(p) for name, p in net.named_parameters()}, state_of(manager)))
    assert results[0] == results[1]


@on_ranks(3)
def test_warn_logs_once_none_compares_nothing_and_what_cannot_be_read_is_a_warning() -> None:
    seen: dict[str, Any] = {}
    for start in ("warn", None):
        net = _odd_net(1)
        manager = fp8dist.prepare(net, group=dist.group.WORLD)
        events: list[Any] = []
        manager.on_event(lambda event, events=events: events.append((event.kind, len(event.report.findings))))
        with captured_log() as log:
            manager.attach(start=start)  # type: ignore[arg-type]
        seen[str(start)] = len(log), events, fp8dist.describe(manager)["attached"]
    with pytest.raises(ConfigurationError, match="start must be"):
        manager.attach(start="repair")  # type: ignore[arg-type]
    with captured_log() as log, mock.patch.object(Digester, "many_leaves", side_effect=RuntimeError("unreadable")):
        manager.attach()
    assert fp8dist.describe(manager)["attached"]
    logged = [text for _, text in log if "unreadable" in text]
    assert len(logged) == (dist.get_rank() == 0)
    assert all(text.startswith("fp8dist: attach() cannot compare the ranks: ") for text in logged)
    assert seen["warn"] == (int(dist.get_rank() == 0), [("diverged", 1)], True)
    assert seen["None"] == (0, [], True)


@on_ranks(3)
def test_buffers_are_compared_but_no_statistics() -> None:
    found: list[Any] = []
    for name in ("table", "norm.running_var"):
        net = nn.Sequential(nn.Linear(16, 16))
        net.add_module("norm", nn.BatchNorm1d(16))
        net.register_buffer("table", torch.ones(4), persistent=False)
        net.get_buffer(name)[0] += dist.get_rank() == 1
        manager = fp8dist.prepare(net, group=dist.group.WORLD)
        try:
            with captured_log():
                manager.attach()
            found.append([])
        except DivergenceError as error:
            found.append([(f.kind, f.name, f.ranks, f.index) for f in error.report.findings])
    assert found == [[("buffer", "table", (1,), (0,))], []]


@pytest.mark.parametrize(
    ("loaded_by", "odd", "trained", "found"),
    [
        ((0, 1), 1, False, [("parameter", "first.weight")]),  # One rank has forgotten to load the weights.
        ((0, 1), None, False, []),
        ((1,), None, False, [("step", "step")]),
        ((0, 1), 1, True, []),  # Local SGD: in between each rank trains on its own.
    ],
)
@on_ranks(2)
def test_a_resumed_plain_model_is_compared(
    loaded_by: tuple[int, ...], odd: int | None, trained: bool, found: list[Any]
) -> None:
    """At attach after loaded FP8 state, with a buffer that each rank has of its own."""
    net = make_net()
    manager = fp8dist.prepare(net, group=dist.group.WORLD)
    manager.attach(boundary="manual")
    net(torch.ones(16, 32)).sum().backward()
    manager.step()
    state = manager.state_dict()
    net = make_net() if odd is None or trained else _odd_net(odd)
    net.register_buffer("position", torch.full((3,), dist.get_rank()))
    manager = fp8dist.prepare(net, group=dist.group.WORLD)
    if dist.get_rank() in loaded_by:
        manager.load_state_dict(state)
    seen: list[Any] = []
    with captured_log():
        if trained:
            manager.attach(boundary="manual")
            net(torch.ones(16, 32)).sum().backward()
            manager.step()
            net.load_state_dict(_odd_net(odd or 0).state_dict(), strict=False)
        try:
            manager.attach(boundary="manual")
        except DivergenceError as error:
            seen = [(f.kind, f.name) for f in error.report.findings if f.name != "position"]
    assert seen == found


@on_ranks(4, timeout=30)
def test_all_ranks_compare_though_each_module_has_a_pattern() -> None:
    """Two patterns name the group of all ranks, another one a pair: the pair's arena comes first on ranks 0 and 1."""
    net = make_net()
    if dist.get_rank() % 2:
        nn.init.ones_(net.branch.weight)
        nn.init.ones_(net.last.bias)
    groups = {"first": dist.group.WORLD, "last": dist.group.WORLD, "branch": part_of((0, 1), (2, 3))}
    manager = fp8dist.prepare(net, group=dist.group.WORLD, groups=groups)  # type: ignore[arg-type]
    with captured_log(), pytest.raises(DivergenceError) as caught:
        manager.attach()
    assert [f.name for f in caught.value.report.findings] == ["last.bias"]


@on_ranks(4, timeout=30)
def test_some_ranks_have_a_part_that_the_others_do_not_have() -> None:
    """Its ranks alone compare it. All ranks go through the same collectives, also where nothing else is left out."""
    half = part_of((0, 1), (2, 3))
    whole, rank = nn.Module(), dist.get_rank()
    manager = fp8dist.prepare(net := make_net(), group=dist.group.WORLD)
    whole.net = nn.parallel.DistributedDataParallel(net)
    if rank < 2:
        whole.judge = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), process_group=half)
    manager.attach(whole, optimizer=torch.optim.SGD(whole.parameters(), lr=0.1))
    report = manager.check()
    assert (report.consistent, report.compared["parameter"]) == (True, 8 if rank < 2 else 6)
