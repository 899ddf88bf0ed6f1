"""Precisions: boundaries of modules in high precision for a number of steps."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fp8dist.modules.grouped_slots import slot_names
from fp8dist.state.precision import OBSERVED_STEPS, Precision, Precisions
from fp8dist.state.recipe import GEMMS


def made() -> Precisions:
    each = [Precision(slots, ()) for slots in slot_names("experts.down", 4)]
    return Precisions({f"experts.down.{number}": precision for number, precision in enumerate(each)})


class _Plain(Precision):
    def count_down(self) -> bool:
        return False


@pytest.mark.parametrize("seed", range(20))
def test_counting_down_equals_an_end_step_of_each_expert(seed: int) -> None:
    """Over random changes, long enough to see the last observed steps."""
    ours, theirs = made(), made()
    for precision in theirs.by_fqn.values():
        precision.__class__ = _Plain
    draw = random.Random(seed)
    for _ in range(120):
        if draw.random() < 0.15:
            fqns = draw.sample(sorted(ours.by_fqn), 2)
            gemms = tuple(gemm for gemm in GEMMS if draw.random() < 0.6) or GEMMS
            how: tuple[Any, ...] = gemms, draw.random() < 0.7, draw.choice([None, 1, 3, 17, 18, 30])
            assert ours.change(fqns, *how) == theirs.change(fqns, *how)
        if draw.random() < 0.03:
            assert ours.restore(theirs.describe()) == theirs.restore(theirs.describe())
        assert ours.end_step() == theirs.end_step()
        assert ours.describe() == theirs.describe()
        for fqn, precision in ours.by_fqn.items():
            other = theirs.by_fqn[fqn]
            assert (precision.high, precision.observing, precision.recorded) == (
                other.high,
                other.observing,
                other.recorded,
            )
        assert ours.version == theirs.version


def test_only_steps_that_change_something_visit_each_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 92,160 slots, a visit of all of them took 0.4 s."""
    precisions, visits = made(), []
    end_step = Precision.end_step
    monkeypatch.setattr(Precision, "end_step", lambda self: (visits.append(self), end_step(self))[1])
    precisions.change(precisions.by_fqn, GEMMS, True, 50)
    per_step = []
    for _ in range(52):
        visits.clear()
        precisions.end_step()
        per_step.append(len(visits))
    begin, observed = 50 - OBSERVED_STEPS - 1, 50 - 1
    assert [step for step, count in enumerate(per_step) if count] == [0, begin, begin + 1, observed]
    assert not any(precision.high for precision in precisions.by_fqn.values())
