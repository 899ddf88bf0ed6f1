"""Eval, no_fp8, recording, calibration, inference mode, and the off switch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling, StateManager
from tests.support.linear import (
    E4M3,
    NONE,
    amax,
    assert_product,
    dequantised,
    inputs,
    linear,
    roles,
)
from tests.support.training import bits, gradient_bits, state_bits


def stepped() -> tuple[nn.Linear, StateManager]:
    """Return a module that has trained for a step."""
    module, manager = linear(bias=True)
    module(inputs(8, 48).requires_grad_()).sum().backward()
    manager.step()
    module.zero_grad()
    return module, manager


@contextlib.contextmanager
def evaluating(module: nn.Module, mode: str) -> Iterator[None]:
    if "eval" in mode:
        module.eval()
    with torch.no_grad() if "no_grad" in mode else contextlib.nullcontext():
        yield
    module.train()


def test_evaluation_records_nothing() -> None:
    for cold in (False, True):
        for mode in ("eval", "no_grad", "eval, no_grad"):
            module, manager = linear(bias=True) if cold else stepped()
            before = state_bits(manager)
            with evaluating(module, mode):
                y = module(inputs(8, 48, seed=4).mul(100).requires_grad_())
                if y.requires_grad:
                    y.sum().backward()  # The forward's mode counts: this records nothing either.
            assert roles(manager) == dict.fromkeys(("input", "weight", "grad_output"), NONE)
            assert state_bits(manager) == before


def test_backward_in_eval_of_a_forward_in_train_records() -> None:
    module, manager = linear()
    y = module(inputs(8, 48))
    module.eval()
    y.sum().backward()
    assert roles(manager)["grad_output"] == 1.0


def test_eval_precision_high_equals_nn_linear_bitwise() -> None:
    torch.manual_seed(1)
    module = nn.Linear(48, 32)
    manager = fp8dist.prepare(module, eval_precision="high")
    x = inputs(8, 48)
    plain = F.linear(x, module.weight, module.bias)
    assert not torch.equal(module(x), plain)
    module.eval()
    assert bits(module(x)) == bits(plain)
    module.train()
    manager.reset()
    assert not torch.equal(module(x), plain)


def test_eval_in_fp8_is_the_default_and_uses_the_same_scales() -> None:
    module, _ = stepped()
    x = inputs(8, 48)
    expected = module(x)
    module.eval()
    assert bits(module(x)) == bits(expected)
    assert not torch.equal(expected, F.linear(x, module.weight, module.bias))


def test_no_fp8_equals_nn_linear_bitwise_and_records_nothing() -> None:
    module, manager = stepped()
    plain = nn.Linear(48, 32)
    plain.load_state_dict(module.state_dict())
    before = state_bits(manager)
    mine, theirs = inputs(8, 48).requires_grad_(), inputs(8, 48).requires_grad_()
    with manager.no_fp8():
        y = module(mine)
        with manager.no_fp8():
            assert bits(module(inputs(8, 48))) == bits(y)
        assert bits(module(inputs(8, 48))) == bits(y)
    expected = plain(theirs)
    y.square().sum().backward()
    expected.square().sum().backward()
    assert bits(y) == bits(expected)
    assert torch.equal(mine.grad, theirs.grad)
    assert gradient_bits(module) == gradient_bits(plain)
    assert set(roles(manager).values()) == {NONE}
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
    assert set(roles(manager).values()) == {NONE}


def test_recording_records_whatever_the_mode() -> None:
    for mode in ("train", "eval", "eval, no_grad"):
        for fp8 in (False, True):
            module, manager = linear(bias=True)
            x = inputs(8, 48).requires_grad_()
            with evaluating(module, mode), contextlib.nullcontext() if fp8 else manager.no_fp8(), manager.recording():
                y = module(x)
                if not fp8:
                    assert bits(y) == bits(F.linear(x, module.weight, module.bias))
                if y.requires_grad:
                    y.backward(torch.full((8, 32), -3.0))
            gradient = NONE if "no_grad" in mode else 3.0
            assert roles(manager) == {"input": amax(x), "weight": amax(module.weight), "grad_output": gradient}
            assert manager.steps == 0


@pytest.mark.parametrize("update", ["same_step", "next_step"])
def test_calibrate_commits_on_exit(update: str) -> None:
    module, manager = linear(update=update)
    module.eval()
    with manager.calibrate():
        for seed in (1, 2, 3):
            x = inputs(8, 48, seed=seed) * seed
            y = module(x)
            assert bits(y) == bits(F.linear(x, module.weight))
            y.backward(torch.full((8, 32), float(seed)))
        assert manager.steps == 0
    assert manager.steps == 1
    largest = max(amax(inputs(8, 48, seed=seed) * seed) for seed in (1, 2, 3))
    assert float(manager.slot("", "input").amax) == largest
    assert float(manager.slot("", "input").scale) == float(torch.tensor(448.0) / torch.tensor(largest))
    assert float(manager.slot("", "grad_output").amax) == 3.0
    assert float(manager.slot("", "weight").amax) == amax(module.weight)
    assert manager.metrics()["fp8/cold_slots"] == 0


def test_calibrate_that_raises_commits_nothing_and_forgets() -> None:
    module, manager = stepped()
    module(inputs(8, 48, seed=5).requires_grad_()).sum().backward()
    recorded, state = roles(manager), state_bits(manager)

    def interrupted() -> None:
        with manager.calibrate():
            module(inputs(8, 48) * 1e6)
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert roles(manager) == recorded
    assert state_bits(manager) == state
    module(inputs(8, 48, seed=6))
    assert roles(manager)["input"] == max(amax(inputs(8, 48, seed=5)), amax(inputs(8, 48, seed=6)))


def test_calibration_starts_hot() -> None:
    """After calibration, FP8 uses the calibrated scale, not the tensor's own."""
    module, manager = linear("reference")
    with manager.calibrate():
        module(inputs(8, 48) * 2)
    x = inputs(8, 48, seed=9)
    scale = torch.tensor(448.0) / (inputs(8, 48) * 2).abs().max()
    assert_product(module(x), dequantised(x, E4M3, scale), dequantised(module.weight, E4M3))


def test_switched_off_it_is_nn_linear() -> None:
    torch.manual_seed(1)
    module = nn.Linear(48, 32)
    manager = fp8dist.prepare(module, enabled=False)
    manager.attach(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    x = inputs(8, 48)
    with manager.calibrate():
        assert bits(module(x)) == bits(F.linear(x, module.weight, module.bias))
    assert bits(module(x)) == bits(F.linear(x, module.weight, module.bias))
    assert len(manager.slots) == 3
    assert set(roles(manager).values()) == {NONE}
    assert manager.steps == 0


def test_first_forward_in_inference_mode_then_training() -> None:
    """No tensor of the state or of a weight cast may be an inference tensor."""
    module, manager = linear("auto", update="next_step")
    twin, twin_manager = linear("auto", update="next_step")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, twin)]
    x = inputs(16, 48)
    with torch.inference_mode():
        module(x)
    with torch.no_grad():
        twin(x)
    assert not any(tensor.is_inference() for tensor in manager._syncs[0].arena.shared_state())
    for each, owner, optimizer in zip((module, twin), (manager, twin_manager), optimizers):
        owner.attach(optimizer=optimizer)
        for _ in range(3):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.inference_mode():
            each(x)  # Commits a pending sync.
    assert torch.equal(module.weight, twin.weight)
    for role in ("input", "weight", "grad_output"):
        assert torch.equal(manager.slot("", role).scale, twin_manager.slot("", role).scale)


@pytest.mark.parametrize(
    "recipe",
    [DelayedScaling(update="next_step"), CurrentScaling(), RowwiseScaling(), BlockScaling()],
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


def test_a_copied_model_trains_on_its_own() -> None:
    module, manager = stepped()
    before = state_bits(manager)
    twin = copy.deepcopy(module)
    other = fp8dist.get_manager(twin)
    assert other is not manager
    assert state_bits(other) == before
    assert not twin.fp8_slots.note.written(twin)  # It has not run its own forward yet.
    twin(inputs(8, 48) * 9).sum().backward()
    other.step()
    assert state_bits(manager) == before
    assert other.steps == manager.steps + 1
