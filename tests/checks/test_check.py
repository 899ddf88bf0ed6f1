"""The live check finds and names every damaged bit, and does not accuse healthy ranks."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8dist
from fp8dist import DivergenceReport, StateManager
from tests.support.checked import DTYPES, SLOTS, name_of, prepared, whole_world
from tests.support.elements import element, flip, raw, same_value, ulp_between, value_of
from tests.support.logs import captured_log
from tests.support.ranks import RankPool, on_ranks


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
    model, manager = prepared()
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
            report = manager.check(policy="warn") if pool == 0 and i % 2 else whole_world(model)
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
    for report in (manager.check(policy="warn"), whole_world(model)):
        assert report.findings == ()
    assert report.compared == {"parameter": len(DTYPES) + 2, "slot": len(SLOTS)}
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
    _assert_all_found(four_ranks, 11618, 24)  # This seed hits each kind.


@pytest.mark.long
@pytest.mark.nightly
def test_a_thousand_flipped_bits_are_all_found_and_named(four_ranks: RankPool) -> None:
    _assert_all_found(four_ranks, 1, 1000)


@pytest.mark.parametrize(("word", "kind", "odd"), [(0, "manifest", 0), (1, "step", 3)])
@on_ranks(4)
def test_a_damaged_manifest_or_step_word_is_named(word: int, kind: str, odd: int) -> None:
    _model, manager = prepared()
    words = manager._syncs[0].arena.words
    if dist.get_rank() == odd:
        words[word] ^= 4
    with captured_log():
        report = manager.check(policy="warn")
    others = tuple(r for r in range(4) if r != odd)
    expected = [(kind, kind, (odd,), others[0], (others, (odd,)))]
    assert [(f.kind, f.name, f.ranks, f.reference_rank, f.sides) for f in report.findings] == expected


class Two(nn.Module):
    """Two parameters of one shape, and a third with several digest blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(4, 6))
        self.second = nn.Parameter(torch.randn(4, 6))
        self.long = nn.Parameter(torch.randn(3 * (1 << 16)))  # 768 KiB: three blocks.


def _swap_blocks(m: Two) -> None:
    blocks = m.long.view(3, -1)
    blocks[[0, 2]] = blocks[[2, 0]]


def _flip_two_signs(m: Two) -> None:
    """In different blocks."""
    for place in (3, 3 + (1 << 16)):
        flip(m.long, 32 * place + 31)


def _swap_tensors(m: Two) -> None:
    m.first, m.second = m.second, m.first


def _change_sign_of_zero(m: Two) -> None:
    m.first[2, 3] = -m.first[2, 3]


def _change_nan_payload(m: Two) -> None:
    m.second.view(torch.int32)[1, 1] += 1


SEVERAL: dict[Callable[[Two], None], list[tuple[str, tuple[int, ...], str]]] = {
    _swap_blocks: [("long", (0,), "")],
    _flip_two_signs: [("long", (3,), "")],
    _swap_tensors: [("first", (0, 0), ""), ("second", (0, 0), "")],
    _change_sign_of_zero: [("first", (2, 3), "0x80000000 against 0x00000000")],
    _change_nan_payload: [("second", (1, 1), "0x7fc00001 against 0x7fc00000")],
}
"""Damage, and the name, index and a part of the detail of each finding."""


@pytest.mark.slow
@on_ranks(4)
def test_damage_that_a_plain_sum_would_miss_is_found() -> None:
    for damage, expected in SEVERAL.items():
        model = Two()
        with torch.no_grad(), captured_log():
            model.first[2, 3] = 0.0
            model.second[1, 1] = math.nan
            if dist.get_rank() == 2:
                damage(model)
            findings = whole_world(model).findings
        assert [(f.name, f.ranks, f.reference_rank, f.index) for f in findings] == [
            (name, (2,), 0, index) for name, index, _ in expected
        ]
        assert all(detail in finding.detail for finding, (*_, detail) in zip(findings, expected))
