"""The live check finds and names every damaged bit, the ranks that differ from a majority, and ranks that hold other
tensors or none to read. It does not accuse healthy ranks."""

from __future__ import annotations

import math
import pickle
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import ConfigurationError, DelayedScaling, DivergenceReport, StateManager
from tests.support.elements import element, flip, raw, same_value, ulp_between, value_of
from tests.support.logs import captured_log
from tests.support.parallel import same_on_all_ranks
from tests.support.ranks import RankPool, on_ranks
from tests.support.suite import NIGHTLY

HISTORY = 5
SLOTS = (("a", "input"), ("a", "weight"), ("b", "grad_output"), ("b.c", "input"))
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.uint8,
    torch.complex64,
    torch.bool,
)


def _name_of(dtype: torch.dtype) -> str:
    """Return the name of the parameter of this dtype."""
    return f"p_{str(dtype).removeprefix('torch.')}"


def _random_bytes(dtype: torch.dtype, shape: Sequence[int], seed: int) -> Tensor:
    """Return random bits, including NaN and Inf; the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    data = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(*shape)


def _prepared(**settings: Any) -> tuple[nn.Module, StateManager]:
    """Return a model with parameters of many types and a few slots after seven steps, and its manager."""
    model = nn.Module()
    for i, dtype in enumerate(DTYPES):
        value = _random_bytes(dtype, (5, 7), i)
        model.register_parameter(_name_of(dtype), nn.Parameter(value, requires_grad=False))
    # More than two digest blocks.
    model.large = nn.Parameter(_random_bytes(torch.bfloat16, (3, 100_003), 99), requires_grad=False)
    model.scalar = nn.Parameter(torch.tensor(0.1))
    manager = fp8dist.prepare(model, DelayedScaling(history_len=HISTORY), group=dist.group.WORLD, **settings)
    for i, slot in enumerate(SLOTS):
        manager.register(*slot, ("e4m3", "e5m2")[i % 2])
    manager.attach()
    for step in range(7):
        for i, slot in enumerate(SLOTS):
            manager.slot(*slot).record(torch.tensor([0.3 + step * 0.7 + i]))
        manager.step()
    return model, manager


def _whole_world(model: nn.Module) -> DivergenceReport:
    """Check everything over all ranks, as a user would."""
    return fp8dist.check(model, group=dist.group.WORLD, policy="warn")


class Target(NamedTuple):
    """Memory to damage, and the names of its elements in findings."""

    name: str
    kind: str
    field: str
    tensor: Tensor
    index_of: Callable[[int], tuple[int, ...]]


def _shaped(shape: Sequence[int]) -> Callable[[int], tuple[int, ...]]:
    return lambda place: tuple(int(i) for i in np.unravel_index(place, tuple(shape))) if shape else ()


def _places_in_window(manager: StateManager, slot: tuple[str, str], ring: Tensor) -> list[tuple[int, ...]]:
    """Return where each index of the ring shows in ``manager.amax_history``, found by writing there."""
    places = []
    for place in range(len(ring)):
        kept = ring[place].item()
        ring[place] = 12345.0
        shown = (manager.slot(*slot).amax_history == 12345.0).nonzero().flatten().tolist()
        places.append(tuple(shown) if shown else (place,))  # Outside the window, an index is its own name.
        ring[place] = kept
    return places


def _targets(model: nn.Module, manager: StateManager) -> tuple[list[Target], list[Target]]:
    """Return the targets (of slots, of parameters)."""
    arena = manager._syncs[0].arena
    of_slots = []
    for slot in SLOTS:
        place = arena.index[fp8dist.Slot(*slot)]
        name = f"{slot[0]}:{slot[1]}"
        counters = arena.counters
        of_slots += [
            Target(name, "scale", "scale", manager.slot(*slot).scale, lambda _: ()),
            Target(name, "scale", "inv_scale", manager.slot(*slot).inv_scale, lambda _: ()),
            Target(name, "scale", "cold", arena.cold[place], lambda _: ()),
            Target(name, "history", "amax", manager.slot(*slot).amax, lambda _: ()),
            Target(
                name,
                "history",
                "history",
                arena.history[place],
                _places_in_window(manager, slot, arena.history[place]).__getitem__,
            ),
            Target(name, "history", "block_max", arena.block_max[place], lambda i: (i,)),
            *(
                Target(name, "history", "counters", counters[row, place], lambda _, row=row: (row,))  # type: ignore[misc]
                for row in range(3)
            ),
        ]
    of_parameters = [
        Target(name, "parameter", "", p.detach(), _shaped(p.shape)) for name, p in model.named_parameters()
    ]
    return of_slots, of_parameters


def _wrong(report: DivergenceReport, target: Target, odd: int, place: int, was: bytes, bad: bytes) -> str:
    """Return what a report of one flipped bit got wrong; "" if nothing."""
    if len(report.findings) != 1:
        return f"{len(report.findings)} findings"
    (f,) = report.findings
    dtype = target.tensor.dtype
    expected = {
        "kind": target.kind,
        "name": target.name,
        "field": target.field,
        "ranks": (odd,),
        "reference_rank": 1 if odd == 0 else 0,
        "sides": (tuple(r for r in range(4) if r != odd), (odd,)),
        "index": target.index_of(place),
        "ulp": ulp_between(was, bad, dtype),
        "local_ranks": (odd,),
        "devices": ("cpu",),
    }
    wrong = [
        f"{name}: {getattr(f, name)!r}, not {value!r}" for name, value in expected.items() if getattr(f, name) != value
    ]
    for name, data in (("value", bad), ("expected", was)):
        if not same_value(getattr(f, name), value_of(data, dtype)):
            wrong.append(f"{name}: {getattr(f, name)!r}, not {value_of(data, dtype)!r}")
    if target.kind == "parameter":
        wrong += [f"{d.hex()} not in {f.detail}" for d in (was[::-1], bad[::-1]) if f"0x{d.hex()}" not in f.detail]
    return "; ".join(wrong)


def _flips(seed: int, count: int) -> tuple[list[str], Counter[str]]:
    """Flip random bits, one at a time, each on a random rank. Return (wrong reports, the kinds that were hit)."""
    model, manager = _prepared()
    pools = _targets(model, manager)
    chance = random.Random(seed)
    wrong, hit = [], Counter[str]()
    with captured_log():
        for i in range(count):
            odd, pool = chance.randrange(4), chance.randrange(2)
            target = chance.choice(pools[pool])
            nbytes = raw(target.tensor).numel()
            is_bool = target.tensor.dtype is torch.bool  # Only one bit of a bool's byte is significant.
            bit = 8 * chance.randrange(nbytes) if is_bool else chance.randrange(8 * nbytes)
            place = bit // 8 // target.tensor.dtype.itemsize
            was = element(target.tensor, place)
            flip(target.tensor, bit)
            bad = element(target.tensor, place)
            if dist.get_rank() != odd:
                flip(target.tensor, bit)
            report = manager.check(policy="warn") if pool == 0 and i % 2 else _whole_world(model)
            if dist.get_rank() == odd:
                flip(target.tensor, bit)
            text = _wrong(report, target, odd, place, was, bad)
            if text:
                wrong.append(f"{target.name} {target.field} bit {bit} on rank {odd}: {text}")
            hit[f"{target.kind} {target.field or target.name}"] += 1
    # Equal NaN, Inf and -0.0 are no difference. Parameters of random bytes have some already.
    manager.slot(*SLOTS[0]).scale.fill_(math.nan)
    manager.slot(*SLOTS[1]).amax.fill_(-0.0)
    manager._syncs[0].arena.history[2, 1:4] = torch.tensor([math.nan, math.inf, -math.inf])
    for report in (manager.check(policy="warn"), _whole_world(model)):
        assert report.findings == ()
    assert report.compared == {"parameter": len(DTYPES) + 2, "slot": len(SLOTS)}
    return wrong, hit


KINDS_OF_FLIPS = {
    *(f"scale {field}" for field in ("scale", "inv_scale", "cold")),
    *(f"history {field}" for field in ("amax", "history", "counters", "block_max")),
    *(f"parameter {_name_of(dtype)}" for dtype in DTYPES),
    "parameter large",
    "parameter scalar",
}


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "count"), [(11618, 24), pytest.param(1, 1000, marks=NIGHTLY)])
def test_a_flipped_bit_is_found_and_named_wherever_it_is(seed: int, count: int, four_ranks: RankPool) -> None:
    """The seeds hit each kind."""
    for wrong, hit in four_ranks.run(_flips, seed, count, timeout=180):
        assert wrong == []
        assert hit.total() == count
        assert set(hit) == KINDS_OF_FLIPS


@pytest.mark.parametrize(("word", "kind", "odd"), [(0, "manifest", 0), (1, "step", 3)])
@on_ranks(4)
def test_a_damaged_manifest_or_step_word_is_named(word: int, kind: str, odd: int) -> None:
    _model, manager = _prepared()
    words = manager._syncs[0].arena.words
    if dist.get_rank() == odd:
        words[word] ^= 4
    with captured_log():
        report = manager.check(policy="warn")
    others = tuple(r for r in range(4) if r != odd)
    expected = [(kind, kind, (odd,), others[0], (others, (odd,)))]
    assert [(f.kind, f.name, f.ranks, f.reference_rank, f.sides) for f in report.findings] == expected


@on_ranks(4)
def test_a_sign_of_zero_and_the_payload_of_a_nan_are_differences() -> None:
    """What plain sums of bytes would miss: tests/kernels/test_content_digest.py."""
    zeros, nans = torch.zeros(4, 6), torch.full((4, 6), math.nan)
    if dist.get_rank() == 2:
        zeros[2, 3] = -0.0
        nans.view(torch.int32)[1, 1] += 1
    with captured_log():
        findings = _whole_world(nn.ParameterList([zeros, nans])).findings
    assert [(f.name, f.ranks, f.reference_rank, f.index, f.detail.rpartition(", ")[2]) for f in findings] == [
        ("0", (2,), 0, (2, 3), "0x80000000 against 0x00000000"),
        ("1", (2,), 0, (1, 1), "0x7fc00001 against 0x7fc00000"),
    ]


# Majorities --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("where", ["parameter", "sync"])
@on_ranks(4)
def test_two_against_two_name_nobody(where: str) -> None:
    mine = (1.0, 1.0, 2.0, 2.0)[dist.get_rank()]
    model, manager = _prepared(check_policy="warn")
    reports: list[Any] = []
    manager.on_event(lambda event: reports.append(event.report))
    with torch.no_grad(), captured_log():
        if where == "sync":
            manager.slot(*SLOTS[2]).scale.fill_(mine)
            manager.step()
        else:
            model.p_float32[1, 2] = mine
            _whole_world(model)
    (report,) = reports
    (f,) = report.findings
    assert (f.kind, f.name) == (("scale", "b:grad_output") if where == "sync" else ("parameter", "p_float32"))
    assert (f.ranks, f.reference_rank, f.sides, len(f.hosts)) == ((0, 1, 2, 3), None, ((0, 1), (2, 3)), 4)
    assert (f.value, f.expected, f.values, report.reporting_rank) == (2, 1, (1, 2), 0)
    assert "no majority" in str(report)
    same_on_all_ranks(str(report))


@on_ranks(4)
def test_the_values_of_all_sides_are_of_one_element() -> None:
    """Ranks 1 and 2 differ from ranks 0 and 3, each first in another element and another field."""
    model, manager = _prepared()
    rank = dist.get_rank()
    usual = manager.slot(*SLOTS[2]).scale.item()
    with torch.no_grad(), captured_log():
        model.p_float32[1] = 7.0
        model.p_float32[1, rank if rank in (1, 2) else 6] = {1: 2.0, 2: 4.0}.get(rank, 7.0)
        if rank == 1:
            manager.slot(*SLOTS[2]).inv_scale.fill_(0.25)
        if rank == 2:
            manager.slot(*SLOTS[2]).scale.fill_(8.0)
        report = _whole_world(model)
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
        report = _whole_world(model)
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
    assert _whole_world(_plain(**{name: torch.full((3,), float(ord(name))) for name in names})).findings == ()


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
        report = _whole_world(make() if dist.get_rank() in odd else _plain(a=ones(3)))
    assert not report.consistent
    assert [(f.kind, f.ranks) for f in report.findings] == [("error", (rank,)) for rank in odd]
    assert all(text in f.detail for f in report.findings)
    same_on_all_ranks([(f.kind, f.ranks, f.detail) for f in report.findings])
    with captured_log() as log, pytest.raises(ConfigurationError) as caught:
        _whole_world(make())
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
        report = _whole_world(model)
    assert {(f.kind, f.ranks, f.reference_rank) for f in report.findings} == {("parameter", (1,), 0)}
