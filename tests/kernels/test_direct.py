"""Where ops may be called directly, and where somebody else must see them; which version of a launch and a commit runs.
``test_update_twins.py`` compares the bits of these."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from fp8dist import DelayedScaling
from fp8dist.state.arena import Arena
from fp8dist.state.slots import Slot, SlotSpec
from fp8dist_kernels import direct, host
from fp8dist_kernels.arrays import StateArrays
from fp8dist_kernels.formats import E4M3
from tests.support.counted import Operations
from tests.support.updates import RULE, assert_equal, random_arrays


class Sub(Tensor):
    pass


SEEN_BY_NOBODY = (
    *(nullcontext, torch.no_grad, torch.inference_mode),
    *(lambda: torch.autocast("cpu", torch.bfloat16), lambda: torch.device("cpu")),
)
SEEN = (Operations, FakeTensorMode, lambda: FlopCounterMode(display=False), torch.autograd.profiler.profile)


@pytest.mark.parametrize("context", [*SEEN_BY_NOBODY, *SEEN])
def test_contexts(context: Callable[[], AbstractContextManager[Any]]) -> None:
    x = torch.ones(16, 16)
    with context():
        assert direct.is_plain(x) is (context in SEEN_BY_NOBODY)
    assert direct.is_plain(x)


def test_tensors() -> None:
    x, wanted = torch.ones(2, 2), torch.ones(2, requires_grad=True)
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    for plain in (x, torch.ones(2, 4)[:, ::2].t(), frozen, wanted.detach()):
        assert direct.is_plain(plain)
    for other in (wanted, x.as_subclass(Sub), x.to("meta"), torch._neg_view(x), torch._efficientzerotensor((2,))):
        assert not direct.is_plain(other)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch.func.jvp itself uses torch.jit.script.
def test_transforms_and_tracers() -> None:
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(direct.is_plain(x))
        return x * 2

    x = torch.ones(3, 4)
    torch.vmap(function)(x)
    torch.func.jvp(function, (x,), (x,))
    torch.func.functionalize(function)(x)
    make_fx(function)(x)
    make_fx(function, tracing_mode="fake", pre_dispatch=True)(x)
    torch.jit.trace(function, x, check_trace=False)
    assert not any(seen)
    assert len(seen) >= 6
    function(x)
    assert seen[-1]


def _updated(arrays: StateArrays, backend: str = "auto") -> tuple[Tensor, bool]:
    """Return the outcome of a commit after a launch, and whether numpy ran. It runs both or neither."""
    with (
        mock.patch.object(host, "launch", wraps=host.launch) as launch,
        mock.patch.object(host, "commit", wraps=host.commit) as commit,
    ):
        updates = direct.StateUpdates(arrays, RULE, backend)
        updates.launch(None, False)
        outcome = updates.commit(arrays.send, None)
    assert launch.called == commit.called
    return outcome, launch.called


def test_which_version_of_a_launch_and_a_commit_runs() -> None:
    """Numpy, unless the reference is asked for or a dispatch mode must see the ops. All give the same bits."""
    start = random_arrays(random.Random(0), 6, 4)
    made = {name: StateArrays(*(tensor.clone() for tensor in start)) for name in ("auto", "torch", "reference")}
    outcomes = {name: _updated(arrays, name) for name, arrays in made.items()}
    assert {name: numpy for name, (_, numpy) in outcomes.items()} == {"auto": True, "torch": True, "reference": False}
    with Operations() as seen:
        outcome, _ = _updated(start)
    names = [str(op) for op in seen.seen if "fp8dist" in str(op)]
    assert names == ["fp8dist.launch.default", "fp8dist.commit.default"]
    for name, arrays in made.items():
        assert_equal(arrays, start)
        assert outcomes[name][0].equal(outcome)
    with FakeTensorMode() as mode:
        assert not _updated(StateArrays(*map(mode.from_tensor, start)))[1]


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
