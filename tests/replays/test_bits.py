"""Training with ``replay_on`` is bitwise that without it, with everything that could confuse a replay."""

from __future__ import annotations

from typing import Any

import pytest

import fp8dist
from fp8dist import Event, LossGuard, ReplayBuffer
from tests.support.logs import captured_log
from tests.support.ranks import RankPool
from tests.support.replayed import Training

pytestmark = pytest.mark.slow

KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"kind": "ddp"},
    "ddp, plain": {"kind": "ddp", "fp8": False},
    "fsdp2, fp8 gather": {"kind": "fsdp2", "gathers": True},
    "fsdp2, plain": {"kind": "fsdp2", "fp8": False},
    "tp": {"kind": "tp"},
}


def trained(options: dict[str, Any], replays: bool) -> Any:
    """Train ten steps, with a spike of the loss in the sixth. Return all bits, and what was replayed."""
    training = Training(**options)
    buffer, guard = ReplayBuffer(training.manager or training.model), LossGuard(min_history=3)
    told: list[Event] = []
    if replays:
        own = {"group": training.group} if training.kind == "tp" else {}
        more = {"guard": guard, "callback": told.append, **own}
        fp8dist.replay_on(training.manager or training.model, buffer, training.step, ("spike",), **more)
    data = training.data

    def kept(index: int) -> Any:
        given = data(index)
        buffer.keep(given, None if training.fp8 else training.steps + 1)
        return given

    training.data = kept  # type: ignore[method-assign]
    with captured_log():
        training.train(10, lambda step: guard.observe(99.0 if step == 5 else 1.0) and None)
    found = [(event.step, event.replay[:3], event.replay.report.sentence) for event in told if event.replay is not None]
    return training.everything(), found


@pytest.mark.parametrize("kind", KINDS)
def test_training_with_replay_on_has_the_bits_of_one_without(
    kind: str, two_ranks: RankPool, four_ranks: RankPool
) -> None:
    ranks = four_ranks if kind == "tp" else two_ranks
    without, replayed = (ranks.run(trained, KINDS[kind], on) for on in (False, True))
    # Without FP8 the replay comes as the guard looks, after the first of two microbatches.
    microbatch = 1 if KINDS[kind].get("fp8", True) else 0
    for (expected, none), (everything, found) in zip(without, replayed):
        ((step, place, sentence),) = found
        assert (step, place, none) == (6, ("spike", 6, microbatch), [])
        assert sentence.startswith("reproducible: ")
        assert {name for name in expected if expected[name] != everything.get(name)} == set()
        assert expected.keys() == everything.keys()
