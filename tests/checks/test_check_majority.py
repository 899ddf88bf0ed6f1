"""A check names the ranks that differ from a majority, or none, and ranks that hold other tensors or none to read."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import ConfigurationError, DelayedScaling, DivergenceReport
from tests.support.checked import SLOTS, prepared, whole_world
from tests.support.logs import captured_log
from tests.support.parallel import same_on_all_ranks
from tests.support.ranks import RankPool, on_ranks
from tests.support.suite import few


def _disagreeing(values: list[float], where: str) -> Any:
    """Give one tensor the value ``values[rank]``. Return (kind, name, ranks, reference, sides, value, expected) of
    findings."""
    mine = values[dist.get_rank()]
    model, manager = prepared(check_policy="warn")
    reports = []
    with torch.no_grad(), captured_log():
        if where == "parameter":
            model.p_float32[1, 2] = mine
        else:
            manager.slot(*SLOTS[2]).scale.fill_(mine)
        if where == "sync":
            manager.on_event(lambda event: reports.append(event.report))
            manager.step()
        else:
            reports.append(whole_world(model))
    (report,) = reports
    assert report is not None
    findings = [(f.ranks, f.reference_rank, f.sides, f.value, f.expected) for f in report.findings]
    for f in report.findings:
        known = tuple(values[side[0]] for side in f.sides)
        assert f.values == (known if f.reference_rank is None else ())
    assert {(f.kind, f.name) for f in report.findings} == {
        ("parameter", "p_float32") if where == "parameter" else ("scale", "b:grad_output")
    }
    assert [len(f.hosts) for f in report.findings] == [len(f.ranks) for f in report.findings]
    return findings, report.reporting_rank, str(report)


Findings = list[tuple[tuple[int, ...], "int | None", tuple[tuple[int, ...], ...], float, float]]

CASES: list[tuple[str, list[float], Findings, int]] = [
    ("sync", [1, 2], [((0, 1), None, ((0,), (1,)), 2, 1)], 0),
    ("slot", [2, 1, 1], [((0,), 1, ((1, 2), (0,)), 2, 1)], 1),
    ("parameter", [1, 2, 4], [((0, 1, 2), None, ((0,), (1,), (2,)), 2, 1)], 0),
    ("sync", [1, 1, 2, 2], [((0, 1, 2, 3), None, ((0, 1), (2, 3)), 2, 1)], 0),
    ("slot", [1, 2, 4, 4], [((0, 1, 2, 3), None, ((2, 3), (0,), (1,)), 1, 4)], 0),
    ("parameter", [1, 1, 1, 2], [((3,), 0, ((0, 1, 2), (3,)), 2, 1)], 0),
]
"""What differs, its values by rank, findings, and the rank that reports. Of two ranks nobody is the culprit, of three
the odd one is named, of four the majority decides, and two against two is none."""


@pytest.mark.slow
@pytest.mark.parametrize(("where", "values", "expected", "speaker"), few(CASES, *CASES[:4]))
def test_the_majority_names_the_odd_ranks(
    where: str,
    values: list[float],
    expected: Findings,
    speaker: int,
    two_ranks: RankPool,
    three_ranks: RankPool,
    four_ranks: RankPool,
) -> None:
    results = {2: two_ranks, 3: three_ranks, 4: four_ranks}[len(values)].run(_disagreeing, values, where)
    for findings, who, text in results:
        assert (findings, who) == (expected, speaker)
        assert ("no majority" in text) == (expected[0][1] is None)
        assert (findings, who, text) == results[0]


@on_ranks(4)
def test_the_values_of_all_sides_are_of_one_element() -> None:
    """Ranks 1 and 2 differ from ranks 0 and 3, each first in another element and another field."""
    model, manager = prepared()
    rank = dist.get_rank()
    usual = manager.slot(*SLOTS[2]).scale.item()
    with torch.no_grad(), captured_log():
        model.p_float32[1] = 7.0
        model.p_float32[1, rank if rank in (1, 2) else 6] = {1: 2.0, 2: 4.0}.get(rank, 7.0)
        if rank == 1:
            manager.slot(*SLOTS[2]).inv_scale.fill_(0.25)
        if rank == 2:
            manager.slot(*SLOTS[2]).scale.fill_(8.0)
        report = whole_world(model)
    assert [(f.name, f.field, f.index, f.value, f.expected, f.values) for f in report.findings] == [
        ("b:grad_output", "scale", (), 8.0, usual, (usual, usual, 8.0)),
        ("p_float32", "", (1, 1), 2.0, 7.0, (7.0, 2.0, 7.0)),
    ]
    lines = str(report).splitlines()
    assert ["2", "8.0"] in [line.split()[:2] for line in lines]
    assert all(any(line.startswith(f"  rank {r}: host ") for line in lines) for r in range(4))


@on_ranks(3)
def test_a_sync_does_not_accuse_the_wrong_rank_of_a_slot_that_another_did_not_tell_of() -> None:
    """Of 40 slots, rank 1 has 16 wrong ones; in a later slot only rank 0 is wrong."""
    model = nn.Module()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=2), group=dist.group.WORLD, check_policy="warn")
    for place in range(40):
        manager.register(f"m{place:02d}", "input", "e4m3")
    manager.attach()
    if dist.get_rank() == 1:
        for place in range(16):
            manager.slot(f"m{place:02d}", "input").scale.mul_(2)
    if dist.get_rank() == 0:
        manager.slot("m30", "input").scale.mul_(4)
    reports: list[DivergenceReport] = []
    manager.on_event(lambda event: reports.append(event.report))  # type: ignore[arg-type]
    with captured_log():
        manager.step()
    found = [(f.ranks, f.reference_rank) for f in reports[0].findings if f.name == "m30:input"]
    assert found in ([], [((0,), 1)])
    same_on_all_ranks(found)


@on_ranks(3)
def test_the_reference_sends_one_block_of_a_large_tensor() -> None:
    """Of 4 MiB, one element is wrong on rank 1. Return what each rank broadcasts, in bytes."""
    weight, original, sent = torch.zeros(1 << 20), dist.broadcast_object_list, []
    model = nn.ParameterList([nn.Parameter(weight)])
    if dist.get_rank() == 1:
        with torch.no_grad():
            model[0][700_000] = 1

    def broadcast(box: list[Any], **options: Any) -> None:
        sent.append(len(pickle.dumps(box)))
        original(box, **options)

    with captured_log(), mock.patch.object(dist, "broadcast_object_list", broadcast):
        (finding,) = fp8dist.check(model, group=dist.group.WORLD, policy="warn").findings
    block = 1 << 18
    assert (finding.index, finding.ranks) == ((700_000,), (1,))
    assert len(sent) == 2
    assert max(sent) < 2000 if dist.get_rank() else block < max(sent) < block + 2000


class _Stack(nn.Module):
    """Twenty blocks and a head, more than are explained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(20))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.head(x)
        return out


@on_ranks(2)
def test_a_parameter_that_came_after_ddp_explains_the_others() -> None:
    torch.manual_seed(0)
    model = _Stack()
    wrapper = DistributedDataParallel(model)
    model.head = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    wrapper(x).square().sum().backward()  # Its bucket waits for the old head: DDP reduces nothing.
    optimizer.step()
    with captured_log():
        report = fp8dist.check(wrapper, step=1, policy="warn")
    late = [finding.name for finding in report.findings if "DDP was made before this parameter" in finding.detail]
    names = [finding.name for finding in report.findings]
    assert names[:2] == late == ["head.bias", "head.weight"]
    assert names[2:4] == ["blocks.0.bias", "blocks.0.weight"]
    assert "and does not reduce its gradient" in " ".join(str(report).split())
    same_on_all_ranks(str(report))


# Ranks that hold other tensors, or fail to read theirs -----------------------------------------------


def _plain(**parameters: Tensor) -> nn.Module:
    model = nn.Module()
    for name, value in parameters.items():
        model.register_parameter(name, nn.Parameter(value, requires_grad=False))
    return model


ones = torch.ones

DIFFERENT: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], set[str]]] = {
    "one more": (lambda: _plain(a=ones(3)), lambda: _plain(a=ones(3), b=ones(2)), {"b"}),
    "none at all": (lambda: _plain(a=ones(3)), lambda: _plain(), {"a"}),
    "another name": (lambda: _plain(a=ones(3)), lambda: _plain(b=ones(3)), {"a", "b"}),
    "another dtype": (lambda: _plain(a=ones(3)), lambda: _plain(a=ones(3, dtype=torch.bfloat16)), {"a"}),
    "another shape": (lambda: _plain(a=ones(3, 2)), lambda: _plain(a=ones(2, 3)), {"a"}),
}


@pytest.mark.parametrize(
    ("what", "odd", "also_damaged"), [(what, 3 * (i % 2), i % 4 > 1) for i, what in enumerate(DIFFERENT)]
)
@on_ranks(4, timeout=30)
def test_a_rank_that_holds_other_tensors_is_reported(what: str, odd: int, also_damaged: bool) -> None:
    reference = 1 if odd == 0 else 0
    usual, other, different = DIFFERENT[what]
    model = (other if dist.get_rank() == odd else usual)()
    model.same = nn.Parameter(torch.full((2, 2), 5.0))
    if also_damaged and dist.get_rank() == 2:
        model.same.data[1, 0] = 6.0
    with captured_log():
        report = whole_world(model)
    layout = [f for f in report.findings if f.kind == "layout"]
    assert {f.name for f in layout} == different
    assert {(f.ranks, f.reference_rank) for f in layout} == {((odd,), reference)}
    assert all(f"rank {odd}: " in f.detail and f"rank {reference}: " in f.detail for f in layout)
    rest = [(f.kind, f.name, f.ranks, f.reference_rank) for f in report.findings if f.kind != "layout"]
    assert rest == ([("parameter", "same", (2,), 0)] if also_damaged else [])
    same_on_all_ranks([(f.kind, f.name, f.ranks, f.reference_rank, f.detail) for f in report.findings])


@on_ranks(4)
def test_the_order_of_parameters_does_not_matter() -> None:
    names = ["a", "b", "c"] if dist.get_rank() else ["c", "a", "b"]
    assert whole_world(_plain(**{name: torch.full((3,), float(ord(name))) for name in names})).findings == ()


class _Raises(nn.Module):
    """A model that raises when it is inspected."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        raise KeyError("broken property")


def _uninitialised() -> nn.Module:
    model = nn.Module()
    model.a = nn.UninitializedParameter()
    return model


BROKEN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "meta": (lambda: _plain(a=torch.ones(3, device="meta")), "meta device"),
    "raises": (_Raises, "broken property"),
    "uninitialised": (_uninitialised, "ninitialized"),
}


@pytest.mark.parametrize(("what", "odd"), [("meta", [0]), ("raises", [1, 2]), ("uninitialised", [3])])
@on_ranks(4, timeout=30)
def test_a_rank_that_cannot_build_its_part_is_reported_by_all(what: str, odd: list[int]) -> None:
    """The same mistake on all ranks is no divergence."""
    make, text = BROKEN[what]
    with captured_log():
        report = whole_world(make() if dist.get_rank() in odd else _plain(a=ones(3)))
    assert not report.consistent
    assert [(f.kind, f.ranks) for f in report.findings] == [("error", (rank,)) for rank in odd]
    assert all(text in f.detail for f in report.findings)
    same_on_all_ranks([(f.kind, f.ranks, f.detail) for f in report.findings])
    with captured_log() as log, pytest.raises(ConfigurationError) as caught:
        whole_world(make())
    assert log == []
    assert str(caught.value).startswith("check() could not read what it compares, on any rank: ")
    assert str(caught.value).count(text) == 1  # Once for all ranks.


@on_ranks(4)
def test_parameters_whose_names_differ_by_a_wrapper_are_not_mixed_up() -> None:
    """``module`` is a name that wrappers use, and that a model may use too. Rank 1 has swapped two such parameters."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(4))
    model.module = nn.Module()
    model.module.weight = nn.Parameter(torch.ones(4))
    if dist.get_rank() == 1:
        model.weight, model.module.weight = model.module.weight, model.weight
    with captured_log():
        report = whole_world(model)
    assert {(f.kind, f.ranks, f.reference_rank) for f in report.findings} == {("parameter", (1,), 0)}
