"""Which version of a launch and a commit runs. ``test_update_twins.py`` compares their bits."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8dist import DelayedScaling
from fp8dist.state.arena import Arena
from fp8dist.state.slots import Slot, SlotSpec
from fp8dist_kernels import direct, host
from fp8dist_kernels.arrays import StateArrays
from fp8dist_kernels.formats import E4M3
from fp8dist_kernels.reference import update
from fp8dist_kernels.reference.rings import RingShape
from tests.support.counted import Operations
from tests.support.updates import RULE, assert_equal, random_arrays


def _runs_numpy(arrays: StateArrays, backend: str = "auto") -> bool:
    """Return if ``StateUpdates`` runs numpy for a launch and a commit. Both run it or neither."""
    before = host.launch, host.commit
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "launch", lambda *args: (calls.append("launch"), before[0](*args))[1])
        patch.setattr(host, "commit", lambda *args: (calls.append("commit"), before[1](*args))[1])
        updates = direct.StateUpdates(arrays, RULE, backend)
        updates.launch(None, False)
        assert updates.commit(arrays.send, None).shape == (update.OUTCOME,)
    assert calls in ([], ["launch", "commit"])
    return bool(calls)


def test_which_version_runs() -> None:
    arrays = StateArrays.allocate([448.0] * 3, [464.0] * 3, RingShape(4), torch.device("cpu"))
    assert {name: _runs_numpy(arrays, name) for name in ("auto", "torch", "reference")} == {
        "auto": True,
        "torch": True,
        "reference": False,
    }
    with FakeTensorMode() as mode:
        fake = StateArrays(*map(mode.from_tensor, arrays))
        assert not _runs_numpy(fake)


def test_modes_see_the_ops() -> None:
    """A dispatch mode sees one op per call. What runs inside gives the same bits as numpy."""
    arrays = random_arrays(random.Random(0), 6, 4)
    twin = StateArrays(*(tensor.clone() for tensor in arrays))
    updates = direct.StateUpdates(arrays, RULE, "auto")
    with Operations() as seen:
        updates.launch(None, False)
        outcome = updates.commit(arrays.send, None)
    names = [str(op) for op in seen.seen if "fp8dist" in str(op)]
    assert names == ["fp8dist.launch.default", "fp8dist.commit.default"]
    updates = direct.StateUpdates(twin, RULE, "auto")
    updates.launch(None, False)
    assert updates.commit(twin.send, None).equal(outcome)
    assert_equal(twin, arrays)


def test_an_arena_that_is_rebuilt_or_copied_has_its_own_views() -> None:
    """Slots that are registered, weights that become sharded and copies: all have new arrays."""
    recipe = DelayedScaling(history_len=4)
    specs = [SlotSpec(Slot(name, role), E4M3) for name in "ab" for role in ("input", "weight")]
    arena = Arena(specs[:2], recipe).extended(specs[2:])
    arena.hold_shards({1: [0]})
    twin = copy.deepcopy(arena)
    plain = Arena(specs, recipe, "reference")
    plain.hold_shards({1: [0]})
    for each in (arena, plain):
        each.pending.fill_(3.0)
        each.shards.fill_(5.0)
        each.launch()
        each.commit(each.message)
    assert arena.amax.tolist() == [3.0, 5.0, 3.0, 3.0]
    assert_equal(arena.arrays, plain.arrays)
    assert not twin.amax.any()
    twin.pending.fill_(2.0)
    twin.launch()
    twin.commit(twin.message)
    assert twin.amax.tolist() == [2.0] * 4
    assert_equal(arena.arrays, plain.arrays)
