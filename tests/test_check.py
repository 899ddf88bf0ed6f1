"""The live check: every damaged bit is found and named, healthy ranks are not accused, and nobody is left waiting."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8dist
from fp8dist import DelayedScaling, DivergenceReport, StateManager
from tests.support.collectives import counted_collectives
from tests.support.elements import element, flip, raw, same_value, ulp_between, value_of
from tests.support.logs import captured_log
from tests.support.ranks import RankPool
from tests.support.training import batch, fp8_count, make_net

pytestmark = pytest.mark.xdist_group("four_ranks")
"""Four processes are enough."""

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


def name_of(dtype: torch.dtype) -> str:
    """Of the parameter of that type."""
    return f"p_{str(dtype).removeprefix('torch.')}"


def random_bytes(dtype: torch.dtype, shape: Sequence[int], seed: int) -> Tensor:
    """Any bits at all, NaN and Inf among them; the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    data = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(*shape)


def prepared(**settings: Any) -> tuple[nn.Module, StateManager]:
    """A model with parameters of many types, and a few slots that have seen seven steps."""
    model = nn.Module()
    for i, dtype in enumerate(DTYPES):
        value = random_bytes(dtype, (5, 7), i)
        model.register_parameter(name_of(dtype), nn.Parameter(value, requires_grad=False))
    # More than two blocks of the digest.
    model.large = nn.Parameter(random_bytes(torch.bfloat16, (3, 100_003), 99), requires_grad=False)
    model.scalar = nn.Parameter(torch.tensor(0.1))
    manager = fp8dist.prepare(model, DelayedScaling(history_len=HISTORY), group=dist.group.WORLD, **settings)
    for i, slot in enumerate(SLOTS):
        manager.register(*slot, ("e4m3", "e5m2")[i % 2])
    manager.attach()
    for step in range(7):
        for i, slot in enumerate(SLOTS):
            manager.record(*slot, torch.tensor([0.3 + step * 0.7 + i]))
        manager.step()
    return model, manager


def whole_world(model: nn.Module) -> DivergenceReport:
    """The user's line: everything, over all ranks."""
    return fp8dist.check(model, group=dist.group.WORLD)


# Single bits -----------------------------------------------------------------------------------------


class Target(NamedTuple):
    """Memory to damage, and how a finding will call its elements."""

    name: str
    kind: str
    field: str
    tensor: Tensor
    index_of: Callable[[int], tuple[int, ...]]


def _shaped(shape: Sequence[int]) -> Callable[[int], tuple[int, ...]]:
    return lambda place: tuple(int(i) for i in np.unravel_index(place, tuple(shape))) if shape else ()


def _places_in_window(manager: StateManager, slot: tuple[str, str], ring: Tensor) -> list[tuple[int, ...]]:
    """Where each place of a ring shows in ``manager.amax_history``: found out by writing there."""
    places = []
    for place in range(len(ring)):
        kept = ring[place].item()
        ring[place] = 12345.0
        shown = (manager.amax_history(*slot) == 12345.0).nonzero().flatten().tolist()
        places.append(tuple(shown) if shown else (place,))  # Beyond the window there is only the place itself.
        ring[place] = kept
    return places


def _targets(model: nn.Module, manager: StateManager) -> tuple[list[Target], list[Target]]:
    """(of slots, of parameters)."""
    arena = manager._syncs[0].arena
    of_slots = []
    for slot in SLOTS:
        place = arena.index[fp8dist.Slot(*slot)]
        name = f"{slot[0]}:{slot[1]}"
        counters = arena.counters
        of_slots += [
            Target(name, "scale", "scale", manager.scale(*slot), lambda _: ()),
            Target(name, "scale", "inv_scale", manager.inv_scale(*slot), lambda _: ()),
            Target(name, "scale", "cold", arena.cold[place], lambda _: ()),
            Target(name, "history", "amax", manager.amax(*slot), lambda _: ()),
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
    """What a report of one flipped bit got wrong; "" if nothing."""
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
    """So many random bits flipped, one at a time, each on a random rank; (what was reported wrongly, what was hit)."""
    model, manager = prepared()
    pools = _targets(model, manager)
    chance = random.Random(seed)
    wrong, hit = [], Counter[str]()
    with captured_log():
        for i in range(count):
            odd, pool = chance.randrange(4), chance.randrange(2)
            target = chance.choice(pools[pool])
            nbytes = raw(target.tensor).numel()
            is_bool = target.tensor.dtype is torch.bool  # Only one bit of a bool's byte means anything.
            bit = 8 * chance.randrange(nbytes) if is_bool else chance.randrange(8 * nbytes)
            place = bit // 8 // target.tensor.dtype.itemsize
            was = element(target.tensor, place)
            flip(target.tensor, bit)
            bad = element(target.tensor, place)
            if dist.get_rank() != odd:
                flip(target.tensor, bit)
            report = manager.check() if pool == 0 and i % 2 else whole_world(model)
            if dist.get_rank() == odd:
                flip(target.tensor, bit)
            text = _wrong(report, target, odd, place, was, bad)
            if text:
                wrong.append(f"{target.name} {target.field} bit {bit} on rank {odd}: {text}")
            hit[f"{target.kind} {target.field or target.name}"] += 1
        assert whole_world(model).consistent
    return wrong, hit


KINDS_OF_FLIPS = {
    *(f"scale {field}" for field in ("scale", "inv_scale", "cold")),
    *(f"history {field}" for field in ("amax", "history", "counters", "block_max")),
    *(f"parameter {name_of(dtype)}" for dtype in DTYPES),
    "parameter large",
    "parameter scalar",
}


def _assert_all_found(pool: RankPool, seed: int, count: int) -> None:
    for wrong, hit in pool.run(_flips, seed, count, timeout=180):
        assert wrong == []
        assert hit.total() == count
        assert set(hit) == KINDS_OF_FLIPS


@pytest.mark.slow
def test_a_flipped_bit_is_found_and_named_wherever_it_is(four_ranks: RankPool) -> None:
    _assert_all_found(four_ranks, 0, 100)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_two_thousand_flipped_bits_are_all_found_and_named(four_ranks: RankPool, seed: int) -> None:
    _assert_all_found(four_ranks, seed, 500)


def _flipped_word(word: int, odd: int) -> Any:
    model, manager = prepared()
    words = manager._syncs[0].arena.words
    if dist.get_rank() == odd:
        words[word] ^= 4
    with captured_log():
        report = manager.check()
    assert model is not None
    return [(f.kind, f.name, f.ranks, f.reference_rank, f.sides) for f in report.findings]


@pytest.mark.slow
@pytest.mark.parametrize(("word", "kind"), [(0, "manifest"), (1, "step")])
@pytest.mark.parametrize("odd", [0, 3])
def test_a_damaged_manifest_or_step_word_is_named(four_ranks: RankPool, word: int, kind: str, odd: int) -> None:
    others = tuple(r for r in range(4) if r != odd)
    expected = [(kind, kind, (odd,), others[0], (others, (odd,)))]
    assert four_ranks.run(_flipped_word, word, odd) == [expected] * 4


# No false alarm ----------------------------------------------------------------------------------------


def _clean_checks(count: int) -> tuple[int, list[str], tuple[tuple[str, int], ...]]:
    """Checks of ranks that are alike, also in their NaN, Inf and -0.0; before each one some bits change on all."""
    model, manager = prepared()
    pools = _targets(model, manager)
    special = [math.nan, math.inf, -math.inf, -0.0]
    with torch.no_grad():
        for p in model.parameters():
            if p.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64) and p.ndim:
                p[0, :4] = torch.tensor(special, dtype=p.dtype)
    manager.scale(*SLOTS[0]).fill_(math.nan)
    manager.amax(*SLOTS[1]).fill_(-0.0)
    manager._syncs[0].arena.history[2, 1:4] = torch.tensor(special[:3])
    chance = random.Random(7)
    alarms = []
    compared: tuple[tuple[str, int], ...] = ()
    for i in range(count):
        target = chance.choice(chance.choice(pools))
        if target.tensor.dtype is not torch.bool:
            flip(target.tensor, chance.randrange(8 * raw(target.tensor).numel()))
        report = manager.check() if i % 2 else whole_world(model)
        if not report.consistent or report.findings:
            alarms.append(str(report))
        compared = compared if i % 2 else report.compared
    return count, alarms, compared


@pytest.mark.parametrize(
    "checks", [pytest.param(200, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.long)]
)
def test_clean_checks_raise_no_alarm_with_nan_inf_and_negative_zero(four_ranks: RankPool, checks: int) -> None:
    for count, alarms, compared in four_ranks.run(_clean_checks, checks, timeout=200):
        assert alarms == []
        assert count == checks
        assert compared == (("parameter", len(DTYPES) + 2), ("slot", len(SLOTS)))


# Damage of more than one bit ---------------------------------------------------------------------------


class Two(nn.Module):
    """Two parameters of one shape, and more than one block of a third."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(4, 6))
        self.second = nn.Parameter(torch.randn(4, 6))
        self.long = nn.Parameter(torch.randn(3 * (1 << 16)))  # 768 KiB: three blocks.


def _swap_elements(m: Two) -> None:
    flat = m.first.view(-1)
    flat[[1, 20]] = flat[[20, 1]]


def _swap_distant(m: Two) -> None:
    m.long[[5, -5]] = m.long[[-5, 5]]


def _swap_blocks(m: Two) -> None:
    blocks = m.long.view(3, -1)
    blocks[[0, 2]] = blocks[[2, 0]]


def _flip_twice(bit: int, *places: int) -> Callable[[Two], None]:
    def damage(m: Two) -> None:
        for place in places:
            flip(m.long, 32 * place + bit)

    return damage


def _swap_tensors(m: Two) -> None:
    m.first, m.second = m.second, m.first


def _change_sign_of_zero(m: Two) -> None:
    m.first[2, 3] = -m.first[2, 3]


def _change_nan_payload(m: Two) -> None:
    m.second.view(torch.int32)[1, 1] += 1


def _rotate(m: Two) -> None:
    m.first.copy_(m.first.roll(1, 0))


SEVERAL: dict[str, tuple[Callable[[Two], object], list[tuple[str, tuple[int, ...]]]]] = {
    "two elements swapped": (_swap_elements, [("first", (0, 1))]),
    "two distant elements swapped": (_swap_distant, [("long", (5,))]),
    "two blocks swapped": (_swap_blocks, [("long", (0,))]),
    "two equal flips": (_flip_twice(11, 1000, 100_000), [("long", (1000,))]),
    "two equal flips in one word": (_flip_twice(11, 1000, 1001), [("long", (1000,))]),
    "two sign bits": (_flip_twice(31, 7, 9), [("long", (7,))]),
    "two sign bits, in low and high half": (_flip_twice(31, 8, 11), [("long", (8,))]),
    "two sign bits in different blocks": (_flip_twice(31, 3, 3 + (1 << 16)), [("long", (3,))]),
    "four sign bits": (_flip_twice(31, 2, 4, 6, 8), [("long", (2,))]),
    "two tensors swapped": (_swap_tensors, [("first", (0, 0)), ("second", (0, 0))]),
    "sign of zero": (_change_sign_of_zero, [("first", (2, 3))]),
    "NaN payload": (_change_nan_payload, [("second", (1, 1))]),
    "all signs": (lambda m: m.first.neg_(), [("first", (0, 0))]),
    "four neighbouring signs": (_flip_twice(31, 20, 21, 22, 23), [("long", (20,))]),
    "rows rotated": (_rotate, [("first", (0, 0))]),
}


def _damaged_in_several_places(what: str, odd: int) -> Any:
    model = Two()
    with torch.no_grad():
        model.first[2, 3] = 0.0
        model.second[1, 1] = math.nan
        if dist.get_rank() == odd:
            SEVERAL[what][0](model)
    with captured_log():
        report = whole_world(model)
    return [(f.name, f.ranks, f.reference_rank, f.index, f.ulp, f.detail) for f in report.findings]


@pytest.mark.parametrize("what", SEVERAL)
def test_damage_that_a_plain_sum_would_miss_is_found(four_ranks: RankPool, what: str) -> None:
    for findings in four_ranks.run(_damaged_in_several_places, what, 2):
        assert [(name, ranks, ref, index) for name, ranks, ref, index, *_ in findings] == [
            (name, (2,), 0, index) for name, index in SEVERAL[what][1]
        ]
        if what == "sign of zero":
            assert findings[0][4] == 0
            assert "0x80000000 against 0x00000000" in findings[0][5]
        if what == "NaN payload":
            assert findings[0][4] is None
            assert "0x7fc00001 against 0x7fc00000" in findings[0][5]


# Majority --------------------------------------------------------------------------------------------


def _disagreeing(values: list[float], where: str) -> Any:
    """One thing is ``values[rank]``; (kind, name, ranks, reference, sides, value, expected) of all findings."""
    mine = values[dist.get_rank()]
    model, manager = prepared(check_policy="warn")
    reports = []
    with torch.no_grad(), captured_log():
        if where == "parameter":
            model.p_float32[1, 2] = mine
        else:
            manager.scale(*SLOTS[2]).fill_(mine)
        if where == "sync":
            manager.on_event(lambda event: reports.append(event.report))
            manager.step()
        else:
            reports.append(whole_world(model))
    (report,) = reports
    assert report is not None
    findings = [(f.ranks, f.reference_rank, f.sides, f.value, f.expected) for f in report.findings]
    assert {(f.kind, f.name) for f in report.findings} == {
        ("parameter", "p_float32") if where == "parameter" else ("scale", "b:grad_output")
    }
    assert [len(f.hosts) for f in report.findings] == [len(f.ranks) for f in report.findings]
    return findings, report.speaker, str(report)


Findings = list[tuple[tuple[int, ...], "int | None", tuple[tuple[int, ...], ...], float, float]]

TWO_OF_TWO: list[tuple[list[float], Findings, int]] = [([1, 2], [((0, 1), None, ((0,), (1,)), 2, 1)], 0)]
OF_THREE: list[tuple[list[float], Findings, int]] = [
    ([1, 1, 2], [((2,), 0, ((0, 1), (2,)), 2, 1)], 0),
    ([1, 2, 1], [((1,), 0, ((0, 2), (1,)), 2, 1)], 0),
    ([2, 1, 1], [((0,), 1, ((1, 2), (0,)), 2, 1)], 1),
    ([1, 2, 4], [((0, 1, 2), None, ((0,), (1,), (2,)), 2, 1)], 0),
]
OF_FOUR: list[tuple[list[float], Findings, int]] = [
    ([2, 1, 1, 1], [((0,), 1, ((1, 2, 3), (0,)), 2, 1)], 1),
    ([1, 1, 1, 2], [((3,), 0, ((0, 1, 2), (3,)), 2, 1)], 0),
    ([1, 1, 2, 2], [((0, 1, 2, 3), None, ((0, 1), (2, 3)), 2, 1)], 0),
    ([1, 2, 2, 1], [((0, 1, 2, 3), None, ((0, 3), (1, 2)), 2, 1)], 0),
    ([1, 2, 4, 4], [((0, 1, 2, 3), None, ((2, 3), (0,), (1,)), 1, 4)], 0),
    ([1, 2, 4, 8], [((0, 1, 2, 3), None, ((0,), (1,), (2,), (3,)), 2, 1)], 0),
]
PLACES = pytest.mark.parametrize("where", ["parameter", "slot", "sync"])


def _assert_sides(pool: RankPool, values: list[float], where: str, expected: Findings, speaker: int) -> None:
    results = pool.run(_disagreeing, values, where)
    for findings, who, text in results:
        assert [f[:3] for f in findings] == [f[:3] for f in expected]
        if where != "sync" or expected[0][1] is not None:
            assert [f[3:] for f in findings] == [f[3:] for f in expected]
        assert who == speaker
        assert ("no majority" in text) == (expected[0][1] is None)
        assert (findings, who, text) == results[0]


@PLACES
@pytest.mark.parametrize(("values", "expected", "speaker"), TWO_OF_TWO)
def test_of_two_ranks_nobody_is_the_culprit(
    two_ranks: RankPool, values: list[float], expected: Findings, speaker: int, where: str
) -> None:
    _assert_sides(two_ranks, values, where, expected, speaker)


@pytest.mark.slow
@PLACES
@pytest.mark.parametrize(("values", "expected", "speaker"), OF_THREE)
def test_of_three_ranks_the_odd_one_is_named(
    three_ranks: RankPool, values: list[float], expected: Findings, speaker: int, where: str
) -> None:
    _assert_sides(three_ranks, values, where, expected, speaker)


@pytest.mark.slow
@PLACES
@pytest.mark.parametrize(("values", "expected", "speaker"), OF_FOUR)
def test_of_four_ranks_the_majority_decides_and_two_against_two_is_none(
    four_ranks: RankPool, values: list[float], expected: Findings, speaker: int, where: str
) -> None:
    _assert_sides(four_ranks, values, where, expected, speaker)


def _damaged_apart() -> Any:
    model, manager = prepared()
    with torch.no_grad(), captured_log():
        if dist.get_rank() == 1:
            model.p_float32[0, 0] = 7.0
            manager.amax(*SLOTS[0]).fill_(9.0)
        if dist.get_rank() == 2:
            model.p_float64[3, 3] = 8.0
            manager.amax(*SLOTS[1]).fill_(9.0)
        if dist.get_rank() == 0:
            model.scalar.fill_(3.0)
        return [(f.kind, f.name, f.ranks, f.reference_rank) for f in whole_world(model).findings]


def test_ranks_damaged_in_different_tensors_are_each_named(three_ranks: RankPool) -> None:
    expected = {
        ("parameter", "p_float32", (1,), 0),
        ("parameter", "p_float64", (2,), 0),
        ("parameter", "scalar", (0,), 1),
        ("history", "a:input", (1,), 0),
        ("history", "a:weight", (2,), 0),
    }
    for findings in three_ranks.run(_damaged_apart):
        assert set(findings) == expected
        assert len(findings) == len(expected)


def _hidden_behind_others() -> Any:
    """Of 40 slots, rank 1 has 16 wrong ones of its own; in a later one rank 0 alone is wrong."""
    model = nn.Module()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=2), group=dist.group.WORLD, check_policy="warn")
    for place in range(40):
        manager.register(f"m{place:02d}", "input", "e4m3")
    manager.attach()
    if dist.get_rank() == 1:
        for place in range(16):
            manager.scale(f"m{place:02d}", "input").mul_(2)
    if dist.get_rank() == 0:
        manager.scale("m30", "input").mul_(4)
    reports: list[DivergenceReport] = []
    manager.on_event(lambda event: reports.append(event.report))  # type: ignore[arg-type]
    with captured_log():
        manager.step()
    assert model is not None
    return [(f.ranks, f.reference_rank) for f in reports[0].findings if f.name == "m30:input"]


def test_a_sync_does_not_accuse_the_wrong_rank_of_a_slot_that_another_did_not_tell_of(three_ranks: RankPool) -> None:
    assert three_ranks.run(_hidden_behind_others) in ([[((0,), 1)]] * 3, [[]] * 3)


# Ranks that hold different things ------------------------------------------------------------------------


def _plain(**parameters: Tensor) -> nn.Module:
    model = nn.Module()
    for name, value in parameters.items():
        model.register_parameter(name, nn.Parameter(value, requires_grad=False))
    return model


ones = torch.ones

DIFFERENT: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], set[str]]] = {
    "one more": (lambda: _plain(a=ones(3)), lambda: _plain(a=ones(3), b=ones(2)), {"b"}),
    "one less": (lambda: _plain(a=ones(3), b=ones(2)), lambda: _plain(a=ones(3)), {"b"}),
    "none at all": (lambda: _plain(a=ones(3)), lambda: _plain(), {"a"}),
    "another name": (lambda: _plain(a=ones(3)), lambda: _plain(b=ones(3)), {"a", "b"}),
    "another dtype": (lambda: _plain(a=ones(3)), lambda: _plain(a=ones(3, dtype=torch.bfloat16)), {"a"}),
    "another shape": (lambda: _plain(a=ones(3, 2)), lambda: _plain(a=ones(2, 3)), {"a"}),
    "another size": (lambda: _plain(a=ones(3)), lambda: _plain(a=ones(4)), {"a"}),
}


def _holding_differently(what: str, odd: int, also_damaged: bool) -> Any:
    usual, other, _ = DIFFERENT[what]
    model = (other if dist.get_rank() == odd else usual)()
    model.same = nn.Parameter(torch.full((2, 2), 5.0))
    if also_damaged and dist.get_rank() == 2:
        model.same.data[1, 0] = 6.0
    start = time.monotonic()
    with captured_log():
        report = whole_world(model)
    findings = [(f.kind, f.name, f.ranks, f.reference_rank, f.detail) for f in report.findings]
    return findings, time.monotonic() - start


@pytest.mark.parametrize("also_damaged", [False, True])
@pytest.mark.parametrize("odd", [0, 3])
@pytest.mark.parametrize("what", DIFFERENT)
def test_a_rank_that_holds_other_tensors_is_reported(
    four_ranks: RankPool, what: str, odd: int, also_damaged: bool
) -> None:
    reference = 1 if odd == 0 else 0
    results = four_ranks.run(_holding_differently, what, odd, also_damaged, timeout=30)
    for findings, seconds in results:
        layout = [f for f in findings if f[0] == "layout"]
        assert {f[1] for f in layout} == DIFFERENT[what][2]
        assert {f[2:4] for f in layout} == {((odd,), reference)}
        assert all(f"rank {odd}: " in f[4] and f"rank {reference}: " in f[4] for f in layout)
        rest = [f[:4] for f in findings if f[0] != "layout"]
        assert rest == ([("parameter", "same", (2,), 0)] if also_damaged else [])
        assert findings == results[0][0]
        assert seconds < 5


def _in_another_order() -> Any:
    names = ["a", "b", "c"] if dist.get_rank() else ["c", "a", "b"]
    return whole_world(_plain(**{name: torch.full((3,), float(ord(name))) for name in names})).findings


def test_the_order_of_parameters_does_not_matter(four_ranks: RankPool) -> None:
    assert four_ranks.run(_in_another_order) == [()] * 4


class _Raises(nn.Module):
    """A model that cannot be looked at."""

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


def _one_cannot_build(what: str, odd: list[int]) -> Any:
    model = BROKEN[what][0]() if dist.get_rank() in odd else _plain(a=ones(3))
    start = time.monotonic()
    with captured_log():
        report = whole_world(model)
    assert not report.consistent
    return [(f.kind, f.ranks, f.detail) for f in report.findings], time.monotonic() - start


@pytest.mark.parametrize("odd", [[0], [3], [1, 2], [0, 1, 2, 3]])
@pytest.mark.parametrize("what", BROKEN)
def test_a_rank_that_cannot_build_its_part_is_reported_by_all(four_ranks: RankPool, what: str, odd: list[int]) -> None:
    results = four_ranks.run(_one_cannot_build, what, odd, timeout=30)
    for findings, seconds in results:
        assert [(kind, ranks) for kind, ranks, _ in findings] == [("error", (rank,)) for rank in odd]
        assert all(BROKEN[what][1] in detail for *_, detail in findings)
        assert findings == results[0][0]
        assert seconds < 5


def _same_name_twice(damage: bool) -> Any:
    """``module`` is a name that wrappers use, and that a model may use, too."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(4))
    model.module = nn.Module()
    model.module.weight = nn.Parameter(torch.ones(4))
    if dist.get_rank() == 1:
        if damage:
            model.weight.data[2] = 5.0
        else:
            model.weight, model.module.weight = model.module.weight, model.weight
    with captured_log():
        report = whole_world(model)
    return report.consistent, {(f.kind, f.ranks, f.reference_rank) for f in report.findings}


@pytest.mark.parametrize("damage", [True, False])
def test_parameters_whose_names_differ_by_a_wrapper_are_not_mixed_up(four_ranks: RankPool, damage: bool) -> None:
    for consistent, findings in four_ranks.run(_same_name_twice, damage):
        assert not consistent
        assert findings == {("parameter", (1,), 0)}


# At a sync, in a running job -----------------------------------------------------------------------------


class _LateVerdict(fp8dist.sync.Verdict):
    """Reads as on CUDA: at the next boundary, not at once."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.immediate = False
        self._event = mock.Mock()


def _job(ddp: bool, update: str, late: bool, odd: int) -> dict[str, Any]:
    """Six steps; before the fourth one scale is flipped on rank ``odd``. What was reported when, and what it cost."""
    rank = dist.get_rank()
    net = make_net()
    recipe = DelayedScaling(history_len=4, update=update)
    manager = fp8dist.prepare(net, recipe, group=dist.group.WORLD, check_policy="warn")
    model: nn.Module = nn.parallel.DistributedDataParallel(net) if ddp else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    manager.attach(model, optimizer=optimizer)
    events: list[tuple[int, DivergenceReport]] = []
    calls_of_steps: list[tuple[list[str], int]] = []
    damaged: tuple[float, float] | None = None
    step = 0
    manager.on_event(lambda event: events.append((step, event.report)) if event.kind == "diverged" else None)  # type: ignore[arg-type]
    with mock.patch("fp8dist.sync.Verdict", _LateVerdict if late else fp8dist.sync.Verdict), captured_log():
        for step in range(6):
            x, y = batch(rank, step)
            nn.functional.mse_loss(model(x), y).backward()
            if step == 3:
                manager.steps  # noqa: B018 (commits what is due)
                was = manager.scale("branch", "weight").item()
                if rank == odd:
                    flip(manager.scale("branch", "weight"), 20)
                damaged = (was, manager.scale("branch", "weight").item())
            with counted_collectives() as calls:
                optimizer.step()
            optimizer.zero_grad()
            calls_of_steps.append((calls.names, fp8_count(calls, manager)))
    scales = [manager.scale(*slot).item() for slot in manager.slots]
    return {"events": events, "calls": calls_of_steps, "scales": scales, "damaged": damaged}


@pytest.mark.parametrize("ddp", [False, True])
@pytest.mark.parametrize(
    ("update", "late"), [("same_step", False), ("same_step", True), ("next_step", False), ("next_step", True)]
)
def test_a_flipped_scale_is_reported_at_the_next_sync_without_a_collective_before_it(
    three_ranks: RankPool, ddp: bool, update: str, late: bool
) -> None:
    results = three_ranks.run(_job, ddp, update, late, 1)
    read_in = 4 if late or update == "next_step" else 3
    was, bad = results[0]["damaged"][0], results[1]["damaged"][1]
    assert was != bad
    for result in results:
        ((step, report),) = result["events"]
        assert step == read_in
        ((finding),) = report.findings
        assert (finding.kind, finding.name, finding.ranks, finding.reference_rank) == (
            "scale",
            "branch:weight",
            (1,),
            0,
        )
        assert (finding.field, finding.index, finding.value, finding.expected) == ("scale", (), bad, was)
        assert finding.ulp == 1 << 20
        assert (finding.step, finding.last_good_step) == (4, 3)
        assert result["scales"] == results[0]["scales"], "the commit has made them equal again"
        for i, (names, syncs) in enumerate(result["calls"]):
            if i != read_in:
                assert names == ["all_reduce"], "nothing but the sync itself"
            assert syncs == 1
        # The sync that carries the damage is the first thing in its step; what localises comes after it, or one later.
        assert len(result["calls"][read_in][0]) > 1


def _checked_before_the_verdict_is_read() -> Any:
    """Flip, sync, and check() before the next boundary: what the sync proved is known by then."""
    model = nn.Module()
    recipe = DelayedScaling(history_len=2, update="next_step")
    manager = fp8dist.prepare(model, recipe, group=dist.group.WORLD, check_policy="warn")
    manager.register("a", "input", "e4m3")
    manager.attach()
    events: list[str] = []
    manager.on_event(lambda event: events.append(event.kind))
    with captured_log():
        for step in range(3):
            manager.record("a", "input", torch.tensor([1.0 + step]))
            if step == 2 and dist.get_rank() == 1:
                manager.scale("a", "input").mul_(2)
            manager.step()
        report = manager.check()
    assert model is not None
    return events, report.consistent


def test_check_acts_on_what_the_last_sync_proved(three_ranks: RankPool) -> None:
    """DESIGN.md: a verdict is acted on "at boundaries and in check()"."""
    for events, _ in three_ranks.run(_checked_before_the_verdict_is_read):
        assert events == ["diverged"]


# What differs by design --------------------------------------------------------------------------------


def _seeded_differently(module: nn.Module) -> nn.Module:
    """Each rank has its own numbers."""
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(dist.get_rank() + 1)))
    return module


def _fsdp1(use_orig_params: bool) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16))
    options = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
    net[0] = FullyShardedDataParallel(net[0], **options)
    sharded = FullyShardedDataParallel(net, sharding_strategy=ShardingStrategy.FULL_SHARD, **options)
    model = nn.Sequential(sharded, nn.Linear(16, 16))  # Beside something that the caller vouches for.
    optimizer = torch.optim.AdamW(sharded.parameters())
    nn.init.ones_(model[1].weight), nn.init.ones_(model[1].bias)
    sharded(torch.randn(4, 16)).sum().backward()
    reports = [fp8dist.check(model, group=dist.group.WORLD, gradients=True, optimizer=optimizer)]
    optimizer.step()
    reports.append(fp8dist.check(model, group=dist.group.WORLD, optimizer=optimizer))
    return [(report.findings, report.compared, report.skipped) for report in reports]


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_shards_of_fsdp1_are_not_compared(two_ranks: RankPool, use_orig_params: bool) -> None:
    for reports in two_ranks.run(_fsdp1, use_orig_params):
        for findings, compared, skipped in reports:
            assert findings == ()
            assert compared == (("parameter", 2),)
            assert any("parameters sharded by FSDP1" in text for text in skipped)
        assert any("gradients sharded by FSDP1" in text for text in reports[0][2])
        assert any("optimizer states sharded by FSDP1" in text for text in reports[1][2])


def _fsdp2() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with pytest.raises(fp8dist.errors.ConfigurationError) as caught:
        fp8dist.check(model)
    beside = nn.Linear(16, 16)
    report = fp8dist.check(nn.Sequential(model, beside), group=dist.group.WORLD)
    return report.findings, report.compared, report.skipped, str(caught.value)


def test_shards_of_fsdp2_are_not_compared(two_ranks: RankPool) -> None:
    for findings, compared, skipped, alone in two_ranks.run(_fsdp2):
        assert findings == ()
        assert compared == (("parameter", 2),)
        assert "4 parameters that are DTensors without a Replicate axis" in alone
        assert skipped == ("4 parameters that are DTensors without a Replicate axis: each rank has its own",)


class _Experts(nn.Module):
    """A dense layer that all ranks share, and experts of which each rank has its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(16, 16)
        self.block = nn.Module()
        self.block.experts = _seeded_differently(nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)]))
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.dense(x))
        return self.block.experts[1](self.block.experts[0](h))


def _experts(how: str) -> Any:
    model = _Experts()
    own = [name for name, _ in model.named_parameters() if "experts" in name]
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    manager = None
    if how == "prepared":
        manager = fp8dist.prepare(
            model,
            DelayedScaling(history_len=3),
            group=dist.group.WORLD,
            groups={"*.experts.*": groups[dist.get_rank()]},
        )
    if how != "named":
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
        model = nn.parallel.DistributedDataParallel(model)  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if manager is not None:
        manager.attach(model, optimizer=optimizer)
    if how != "named":
        for step in range(2):
            x, _ = batch(dist.get_rank(), step)  # Other data, other BatchNorm statistics on each rank.
            model(x[:, :16]).sum().backward()
            optimizer.step()
    reports = []
    if manager is not None:
        reports.append(manager.check(gradients=True, optimizer=optimizer))
    groups_given = {"*.experts.*": None} if how == "named" else None
    group = dist.group.WORLD if how == "named" else None
    reports.append(fp8dist.check(model, group=group, groups=groups_given, gradients=True, optimizer=optimizer))
    return [(report.findings, dict(report.compared), report.skipped) for report in reports]


@pytest.mark.parametrize("how", ["prepared", "ignored by DDP", "named"])
def test_experts_and_batch_statistics_of_each_rank_raise_no_alarm(two_ranks: RankPool, how: str) -> None:
    for reports in two_ranks.run(_experts, how):
        for findings, compared, skipped in reports:
            assert findings == ()
            assert compared["parameter"] == 4  # Weight and bias of dense and norm.
            assert compared.get("slot", 0) == (3 if how == "prepared" else 0)
            if how != "named":
                assert compared["gradient"] == 4
                assert compared["optimizer"] == 12  # exp_avg, exp_avg_sq and step of each.
            reason = "that DDP was told to ignore" if how == "ignored by DDP" else "matching *.experts.*"
            assert any(text.startswith(f"4 parameters {reason}") for text in skipped) or (
                how == "prepared" and "4 parameters that DDP was told to ignore" in skipped
            )


def _expert_of_one_rank_diverges() -> Any:
    """With experts as above, damage to what is shared is still found."""
    model = _Experts()
    if dist.get_rank() == 2:
        model.norm.weight.data[3] += 1
    with captured_log():
        report = fp8dist.check(model, group=dist.group.WORLD, groups={"*.experts.*": None})
    return [(f.name, f.ranks, f.index) for f in report.findings]


def test_beside_experts_the_shared_part_is_still_compared(four_ranks: RankPool) -> None:
    assert four_ranks.run(_expert_of_one_rank_diverges) == [[("norm.weight", (2,), (3,))]] * 4


def _unsynced_state() -> Any:
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=3), amax_sync=False)
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    manager.attach(model, optimizer=optimizer)
    for step in range(3):
        x, y = batch(dist.get_rank(), step)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    scale = manager.scale("first", "input").item()
    reports = [manager.check(), fp8dist.check(model)]
    return scale, [(report.findings, report.compared) for report in reports]


def test_state_that_is_not_synced_is_not_compared(two_ranks: RankPool) -> None:
    results = two_ranks.run(_unsynced_state)
    assert results[0][0] != results[1][0]
    for _, reports in results:
        assert reports == [((), (("parameter", 6),))] * 2


def _zero_redundancy() -> Any:
    import warnings

    warnings.simplefilter("ignore")
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(make_net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    for step in range(2):
        x, y = batch(dist.get_rank(), step)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    saved: list[Any] = [None]
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        saved[0] = optimizer.state_dict()
    dist.broadcast_object_list(saved, src=0)
    optimizer.load_state_dict(saved[0])  # As a resumed job does: now it shows the state of its own part.
    owners = sorted(len(state or ()) for state in optimizer.state.values())
    report = fp8dist.check(model, optimizer=optimizer)
    return owners, report.findings, dict(report.compared), report.skipped


def test_the_state_of_a_zero_redundancy_optimizer_is_not_compared(two_ranks: RankPool) -> None:
    for owners, findings, compared, skipped in two_ranks.run(_zero_redundancy):
        assert owners[-1] == 3
        assert findings == ()
        assert compared == {"parameter": 6}
        assert any("states of a ZeroRedundancyOptimizer" in text for text in skipped)


def _nothing_known() -> str:
    with pytest.raises(fp8dist.errors.ConfigurationError) as caught:
        fp8dist.check(nn.Linear(4, 4))
    return str(caught.value)


def test_a_check_that_could_compare_nothing_says_so(two_ranks: RankPool) -> None:
    for text in two_ranks.run(_nothing_known):
        assert "pass group=" in text
        assert "2 parameters not known to be replicated" in text
