"""Eval, no_fp8, recording, calibration that fails, inference mode, and torch's default dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, Recipe, RowwiseScaling, StateManager
from tests.support.linear import NONE, amax, inputs, linear, roles
from tests.support.training import bits, gradient_bits, state_bits

NOTHING = dict.fromkeys(("input", "weight", "grad_output"), NONE)


def stepped() -> tuple[nn.Linear, StateManager]:
    """Return a module that has trained for a step."""
    module, manager = linear(bias=True)
    module(inputs(8, 48).requires_grad_()).sum().backward()
    manager.step()
    module.zero_grad()
    return module, manager


def plain(module: nn.Linear) -> nn.Linear:
    """Return an nn.Linear with the same parameters."""
    twin = nn.Linear(48, 32, bias=module.bias is not None)
    twin.load_state_dict(module.state_dict())
    return twin


@contextlib.contextmanager
def evaluating(module: nn.Module, mode: str) -> Iterator[None]:
    if "eval" in mode:
        module.eval()
    with torch.no_grad() if "no_grad" in mode else contextlib.nullcontext():
        yield
    module.train()


@pytest.mark.parametrize("mode", ["eval", "no_grad", "eval, no_grad"])
@pytest.mark.parametrize("cold", [False, True])
def test_evaluation_is_in_fp8_and_records_nothing(mode: str, cold: bool) -> None:
    """With the scales of training."""
    module, manager = linear(bias=True) if cold else stepped()
    before, x = state_bits(manager), inputs(8, 48, seed=4).requires_grad_()
    with evaluating(module, mode):
        y = module(x)
        if y.requires_grad:
            y.sum().backward()  # The forward's mode counts: this records nothing either.
    assert roles(manager) == NOTHING
    assert state_bits(manager) == before
    assert bits(y) == bits(module(x)) != bits(plain(module)(x))
    manager.reset()
    y = module(x)
    module.eval()
    y.backward(torch.ones(8, 32))
    assert roles(manager)["grad_output"] == 1.0  # A forward in train().


def test_eval_precision_high_equals_nn_linear_bitwise() -> None:
    module = nn.Linear(48, 32)
    manager = fp8dist.prepare(module, eval_precision="high")
    x = inputs(8, 48)
    expected = bits(plain(module)(x))
    assert bits(module(x)) != expected
    assert bits(module.eval()(x)) == expected
    manager.reset()
    assert bits(module.train()(x)) != expected


def test_no_fp8_equals_nn_linear_bitwise_and_records_nothing() -> None:
    module, manager = stepped()
    twin, before = plain(module), state_bits(manager)
    mine, theirs = inputs(8, 48).requires_grad_(), inputs(8, 48).requires_grad_()
    with manager.no_fp8():
        y = module(mine)
        with manager.no_fp8():
            assert bits(module(mine)) == bits(y)
        assert bits(module(mine)) == bits(y)
    expected = twin(theirs)
    y.square().sum().backward()
    expected.square().sum().backward()
    assert bits(y) == bits(expected)
    assert torch.equal(mine.grad, theirs.grad)
    assert gradient_bits(module) == gradient_bits(twin)
    assert roles(manager) == NOTHING
    assert state_bits(manager) == before
    assert not torch.equal(module(mine), y)  # FP8 is on again.


def test_contexts_end_with_an_exception() -> None:
    module, manager = stepped()
    expected = module(inputs(8, 48))
    with pytest.raises(KeyError), manager.no_fp8(), manager.recording():
        raise KeyError
    manager._syncs[0].abandon()
    with torch.no_grad():
        assert torch.equal(module(inputs(8, 48)), expected)
    assert roles(manager) == NOTHING


@pytest.mark.parametrize("mode", ["train", "eval", "eval, no_grad"])
@pytest.mark.parametrize("fp8", [False, True])
def test_recording_records_whatever_the_mode(mode: str, fp8: bool) -> None:
    module, manager = linear(bias=True)
    x = inputs(8, 48).requires_grad_()
    with evaluating(module, mode), contextlib.nullcontext() if fp8 else manager.no_fp8(), manager.recording():
        y = module(x)
        assert (bits(y) == bits(plain(module)(x))) is not fp8
        if y.requires_grad:
            y.backward(torch.full((8, 32), -3.0))
    gradient = NONE if "no_grad" in mode else 3.0
    assert roles(manager) == {"input": amax(x), "weight": amax(module.weight), "grad_output": gradient}
    assert manager.steps == 0


def test_calibrate_that_raises_commits_nothing_and_forgets() -> None:
    module, manager = stepped()
    module(inputs(8, 48, seed=5).requires_grad_()).sum().backward()
    recorded, state = roles(manager), state_bits(manager)
    with contextlib.suppress(KeyError), manager.calibrate():
        module(inputs(8, 48) * 1e6)
        raise KeyError
    assert roles(manager) == recorded
    assert state_bits(manager) == state
    module(inputs(8, 48, seed=6))
    assert roles(manager)["input"] == max(amax(inputs(8, 48, seed=5)), amax(inputs(8, 48, seed=6)))


def test_first_forward_in_inference_mode_then_training() -> None:
    """No tensor of the state or of a weight cast may be an inference tensor."""
    outcomes = []
    for mode in (torch.inference_mode, torch.no_grad):
        module, manager = linear("auto", update="next_step")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        x = inputs(16, 48)
        with mode():
            module(x)
        assert not any(tensor.is_inference() for tensor in manager._syncs[0].arena.shared_state())
        manager.attach(optimizer=optimizer)
        for _ in range(3):
            module(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with mode():
            module(x)  # Commits a pending sync.
        outcomes.append((bits(module.weight), state_bits(manager)))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    "recipe",
    [DelayedScaling(update="next_step"), CurrentScaling(), RowwiseScaling(), BlockScaling(), MXFP8Scaling()],
    ids=lambda recipe: type(recipe).__name__,
)
def test_a_frozen_linear_made_in_inference_mode_is_one(recipe: Recipe) -> None:
    """torch counts no writes to its weight. As the first Linear: autograd saves no inference tensor."""
    losses: list[list[float]] = []
    for inference in (False, True):
        torch.manual_seed(0)
        with torch.inference_mode(inference):
            frozen = nn.Linear(32, 32).requires_grad_(False)
        model = nn.Sequential(frozen, nn.Linear(32, 32))
        manager = fp8dist.prepare(model, recipe)
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        manager.attach(optimizer=optimizer)
        losses.append([])
        for index in range(6):
            loss = model(inputs(8, 32, seed=index)).square().mean()
            loss.backward()
            losses[-1].append(loss.item())
            if index % 2:
                optimizer.step()
                optimizer.zero_grad()
        manager.check()
        manager.refresh_weights()
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("dtype", "power_of_two"), [(torch.bfloat16, False), (torch.float64, True)])
def test_the_default_dtype_does_not_matter(dtype: torch.dtype, power_of_two: bool) -> None:
    recipe = DelayedScaling(history_len=3, power_of_two=power_of_two, margin=1)
    outcomes = []
    for default in (torch.float32, dtype):
        model, twin = (nn.Sequential(plain(linear(bias=True)[0])) for _ in range(2))
        batches = [inputs(6, 48, seed=step) * (1 + step) for step in range(4)]
        torch.set_default_dtype(default)
        try:
            manager, other = (fp8dist.prepare(each, recipe) for each in (model, twin))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            manager.attach(model, optimizer=optimizer)
            for x in batches:
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            manager.slot("0", "input").set_scale(0.3)
            for slot in manager.slots:
                state = manager.slot(*slot)
                values = [state.scale, state.inv_scale, state.amax, state.amax_history]
                assert [value.dtype for value in values] == [torch.float32] * 4
            other.load_state_dict(manager.state_dict())
        finally:
            torch.set_default_dtype(torch.float32)
        assert state_bits(other) == state_bits(manager)
        outcomes.append((state_bits(manager), bits(model[0].weight)))
    assert outcomes[0] == outcomes[1]
