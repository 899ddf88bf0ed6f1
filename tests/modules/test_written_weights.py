"""Weights that change after ``attach`` other than by the optimizer are cast with a fitting scale, at once.

The rule: just in time beyond 1.25 times the scale, whether torch counts the write or not. Weights of wrapped models
are in ``tests/support/mistaken_writes.py``.
"""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import fp8dist
from fp8dist import DelayedScaling, StateManager
from fp8dist.errors import ConfigurationError
from tests.support.linear import watched_casts
from tests.support.serving import watched_products
from tests.support.training import bits, make_net, parameter_bits, state_bits

FP8_MAX = 448.0
BOUND = 0.08
"""Relative error of three consecutive Linears. E4M3 changes each element by up to 6 %. Saturation causes 28 % and
more."""


def error_of(net: Callable[[Tensor], Tensor], reference: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Return the relative error of the output."""
    with torch.no_grad():
        expected = reference(x)
        return float((net(x) - expected).norm() / expected.norm())


def attached(recipe: DelayedScaling | None = None) -> tuple[nn.Sequential, StateManager, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 48))
    manager = fp8dist.prepare(net, recipe)
    manager.attach(net)
    return net, manager, torch.randn(8, 32)


@pytest.mark.parametrize(
    ("write", "factor", "just_in_time"),
    [
        ("mul_", 1.2, False),
        ("mul_", 1.3, True),
        ("mul_", 8.0, True),
        ("mul_", 0.01, False),
        ("mul_", 1e-4, False),
        ("mul_", 1e-6, True),  # E4M3 would flush it to zero.
        (".data", 1.2, False),
        (".data", 1.3, True),
        (".data", 1.9, True),
        (".data", 1e-6, False),  # torch counts no write.
        ("new memory", 1.3, True),
        ("new parameter", 1.3, True),
        ("load_state_dict", 1.3, True),
        ("load_state_dict, assign", 1.3, True),
    ],
)
def test_a_weight_is_cast_with_its_own_amax_where_it_has_outgrown_its_scale(
    write: str, factor: float, just_in_time: bool
) -> None:
    net, manager, x = attached()
    weight, scale = net[0].weight, float(manager.slot("0", "weight").scale)
    grown = weight.detach() * factor
    if write == "mul_":
        with torch.no_grad():
            weight.mul_(factor)
    elif write == ".data":
        weight.data.mul_(factor)
    elif write == "new memory":
        weight.data = grown
    elif write == "new parameter":
        net[0].weight = nn.Parameter(grown)
    else:
        net.load_state_dict({**net.state_dict(), "0.weight": grown}, assign="assign" in write)
    amax = float(net[0].weight.detach().abs().max())
    own = float(torch.tensor(FP8_MAX) / torch.tensor(amax))
    with watched_casts() as casts:
        net(x).sum().backward()
    (inv_scale,) = casts
    assert inv_scale == float(torch.reciprocal(torch.tensor(own if just_in_time else scale)))
    # No slot has become cold or has a flag: the scale follows at the boundary.
    assert float(manager.slot("0", "weight").scale) == scale
    manager.step()
    assert float(manager.slot("0", "weight").scale) == own


@pytest.mark.parametrize("factor", [1.03, 1.2, 1.9, 8.0])
@pytest.mark.parametrize("write", ["mul_", ".data", "load_state_dict"])
def test_an_evaluation_saturates_no_weight(write: str, factor: float) -> None:
    """Only values that round to the largest FP8 number may lie beyond it: in eval no later step corrects a scale."""
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=4))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    manager.attach(net, optimizer=optimizer)
    x = torch.randn(8, 32)
    for _ in range(2):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    grown = {name: value * (factor if "weight" in name else 1) for name, value in net.state_dict().items()}
    if write == "load_state_dict":
        net.load_state_dict(grown)
    else:
        for name, parameter in net.named_parameters():
            with torch.no_grad():
                (parameter.data if write == ".data" else parameter).copy_(grown[name])
    plain = make_net()
    plain.load_state_dict(grown)
    with watched_products() as products:
        assert error_of(net.eval(), plain, x) < BOUND
    for name, (b, inv_scale) in products.items():
        weight, value = grown[f"{name}.weight"], b.float() * inv_scale
        # Half a step of E4M3 at the top. Of uniform weights, those from 432 to 464 are there.
        assert float((value - weight).abs().max() / weight.abs().max()) < 0.0358
        assert float((b.float().abs() == FP8_MAX).float().mean()) < 0.08


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("layer", "margin"), [("all", 0), ("first", 0), ("all", 2)])
def test_what_written_weights_make_of_later_inputs_fits_at_once(training: bool, layer: str, margin: int) -> None:
    """After steps that gave every slot a scale."""
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(margin=margin))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    manager.attach(net, optimizer=optimizer)
    x = torch.randn(8, 32)
    for _ in range(3):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    net.train(training)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "weight" in name and (layer == "all" or name.startswith(layer)):
                parameter.mul_(10)
    plain = make_net()
    plain.load_state_dict(net.state_dict())
    assert error_of(net, plain, x) < BOUND
    net(x).square().mean().backward()
    plain(x).square().mean().backward()
    for (name, ours), expected in zip(net.named_parameters(), plain.parameters()):
        if layer == "first" and name.startswith("first"):
            continue  # Its own growth returns only through the loss: it saturates for one step.
        assert ours.grad is not None
        assert expected.grad is not None
        # E5M2, and ReLUs that flip: a model without history has the same error. Saturation causes 0.95 and more.
        assert float((ours.grad - expected.grad).norm() / expected.grad.norm()) < 0.4


@pytest.mark.parametrize("forgets", ["step", "lr 0", "manual step"])
def test_a_write_that_no_forward_has_recorded_is_not_forgotten(forgets: str) -> None:
    """An optimizer step or a boundary comes between the write and the next forward."""
    net = make_net()
    manager = fp8dist.prepare(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    manager.attach(net, optimizer=optimizer, boundary="manual")
    x = torch.randn(8, 32)

    def step() -> None:
        net(x).square().mean().backward()
        optimizer.step()
        manager.step()
        optimizer.zero_grad()

    step()
    step()
    net(x).square().mean().backward()
    if forgets == "manual step":
        optimizer.step()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "weight" in name:
                parameter.mul_(1.9)
    if forgets == "lr 0":
        optimizer.param_groups[0]["lr"] = 0.0
    if forgets != "manual step":
        optimizer.step()
    manager.step()
    plain = make_net()
    plain.load_state_dict(net.state_dict())
    assert error_of(net, plain, x) < BOUND


def test_pruned_weights_are_watched() -> None:
    net = nn.Sequential(nn.Linear(32, 48))
    manager = fp8dist.prepare(net)
    prune.l1_unstructured(net[0], "weight", amount=0.2)
    manager.attach(net)
    with torch.no_grad():
        net[0].weight_orig.mul_(1.5)  # type: ignore[operator,union-attr]
    assert net[0].fp8_slots.note.written(net[0])  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(torch.randn(8, 32)).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigurationError, match="a second time"):
        optimizer.step()
    assert manager.steps == 0


def test_a_model_that_was_written_to_dies_without_the_garbage_collector() -> None:
    net = make_net()
    manager = fp8dist.prepare(net)
    manager.attach(net, optimizer=torch.optim.SGD(net.parameters(), lr=1e-3))
    with torch.no_grad():
        net.first.weight.mul_(3)
    net(torch.randn(8, 32)).sum().backward()
    arena = weakref.ref(manager._syncs[0].arena)
    gc.disable()
    try:
        del manager, net
        assert arena() is None
    finally:
        gc.enable()


def test_a_copys_weights_are_watched_from_its_making_on() -> None:
    """For example an EMA's weights, without attach."""
    net, manager, x = attached()
    ema = torch.optim.swa_utils.AveragedModel(net, avg_fn=lambda average, new, count: new)
    with watched_casts() as casts:
        for each in (ema, net):
            each(x).sum().backward()
    assert casts[0] == casts[1]
    with torch.no_grad():
        net[0].weight.mul_(1.5)
    for _ in range(2):  # The first forward only notes the versions.
        ema.update_parameters(net)
    assert error_of(ema.eval(), net, x) < BOUND
    assert ema.module[0].fp8_slots.note.written(ema.module[0])  # type: ignore[union-attr,index]
    assert manager.steps == 0


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "AveragedModel": lambda net: torch.optim.swa_utils.AveragedModel(net).module,
    "pickle": lambda net: pickle.loads(pickle.dumps(net)),  # As torch.save does.
}


WRITES: dict[str, Callable[[nn.Linear], Any]] = {
    "loaded larger": lambda linear: linear.load_state_dict({n: 8 * p for n, p in linear.state_dict().items()}),
    "loaded tiny": lambda linear: linear.load_state_dict({n: 1e-6 * p for n, p in linear.state_dict().items()}),
    "in place": lambda linear: linear.weight.mul_(8),
    "replaced": lambda linear: setattr(linear, "weight", nn.Parameter(8 * linear.weight)),
    "other memory": lambda linear: setattr(linear.weight, "data", 8 * linear.weight),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("write", WRITES)
def test_a_copy_computes_as_its_original_that_was_written_to(way: str, write: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 32), nn.Linear(32, 16))
    manager = fp8dist.prepare(net)
    optimizer, x = torch.optim.SGD(net.parameters(), lr=1e-6), torch.randn(8, 32)
    manager.attach(net, optimizer=optimizer)
    net(x).sum().backward()
    optimizer.step()
    with torch.no_grad():
        WRITES[write](net[0])  # type: ignore[arg-type]
    twin = COPIES[way](net)
    again = COPIES[way](twin)  # Nobody has written to the first copy.
    for training in (True, False):
        for factor in (1, 2):  # With 2, inputs exceed their scales, too.
            expected = bits(net.train(training)(factor * x))
            assert bits(twin.train(training)(factor * x)) == bits(again.train(training)(factor * x)) == expected
        exact: Any = functools.partial(F.linear, weight=net[0].weight)
        assert error_of(twin[0], exact, x) < BOUND  # type: ignore[index]


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("part", [False, True])
def test_a_copy_computes_as_its_original(way: str, part: bool) -> None:
    """Its weight has outgrown its scale by a training step, and nobody has written to it since."""
    net, manager, x = attached(DelayedScaling(history_len=4))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    manager.attach(net, optimizer=optimizer)
    net(x).sum().backward()
    with torch.no_grad():
        net[0].weight.mul_(1.15)
    net[0].fp8_slots.note.take(net[0], False)  # type: ignore[union-attr]  # As an optimizer's step leaves it.
    original = net[0] if part else net
    with manager.no_fp8(), manager.recording():  # The copy is made inside, and lives outside.
        twin = COPIES[way](original)
    for training in (True, False):
        assert bits(twin.train(training)(x)) == bits(original.train(training)(x))
    linear: Any = twin if part else twin[0]  # type: ignore[index]
    assert not linear.fp8_slots.note.written(linear)
    assert linear.fp8_slots.job.in_fp8
    assert not linear.fp8_slots.job.recording
    if not part:
        theirs = dict(fp8dist.exported(fp8dist.get_manager(twin), twin))
        assert {n: bits(t) for n, t in theirs.items()} == {n: bits(t) for n, t in fp8dist.exported(manager, net)}
    with torch.no_grad():
        linear.weight.mul_(1.5)
    assert linear.fp8_slots.note.written(linear)


def test_a_parametrizations_original_is_watched() -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 48))
    manager = fp8dist.prepare(net)
    parametrize.register_parametrization(net[0], "weight", Double())
    manager.attach(net)
    note = net[0].fp8_slots.note  # type: ignore[union-attr]
    assert not note.written(net[0])
    with torch.no_grad():
        net[0].parametrizations["weight"].original.mul_(1.5)  # type: ignore[index,union-attr]
    assert note.written(net[0])
    manager.step()
    assert not note.written(net[0])


def test_a_linear_with_another_dict_of_parameters_is_watched() -> None:
    """Wrappers such as DeepSpeed's ZeRO-3 replace the dict of each module."""
    net, manager, x = attached()
    note = net[0].fp8_slots.note
    net[0]._parameters = dict(net[0]._parameters)
    net[0].weight = nn.Parameter(8 * net[0].weight.detach())
    assert error_of(net, lambda x: F.linear(x, net[0].weight, net[0].bias), x) < BOUND
    net(x).sum().backward()
    manager.step()
    assert not note.written(net[0])  # The boundary has noted the new weight.
    net[0].weight.data = 8 * net[0].weight.data
    assert note.written(net[0])


def test_state_that_was_loaded_fits_the_weights_that_come_whatever_was_loaded_first() -> None:
    """A resumed run is bitwise equal, although its weights were written to."""

    def run(order: str) -> Any:
        net, manager, x = attached(DelayedScaling(history_len=4))
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        manager.attach(net, optimizer=optimizer)

        def step() -> None:
            net(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        with torch.no_grad():  # So small that it is cast differently if it counts as written to.
            net[0].weight.mul_(1e-6)
        net[0].fp8_slots.note.take(net[0], False)  # type: ignore[union-attr]  # As an optimizer's step leaves it.
        assert float(net[0].weight.detach().abs().max() * manager.slot("0", "weight").scale) / FP8_MAX < 2**-17
        saved = copy.deepcopy((net.state_dict(), manager.state_dict()))
        if order != "none":
            net, manager, x = attached(DelayedScaling(history_len=4))
            optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
            manager.attach(net, optimizer=optimizer)
            for what in order.split():
                if what == "steps":  # A rollback: the notes are of other weights.
                    step()
                    step()
                    continue
                net.load_state_dict(saved[0]) if what == "weights" else manager.load_state_dict(saved[1])
        net.eval()
        evaluated = bits(net(x))
        net.train()
        step()
        return evaluated, parameter_bits(net), state_bits(manager)

    assert run("none") == run("weights state") == run("state weights")
    assert run("none") == run("steps weights state") == run("steps state weights")


def test_swapped_weights_leave_training_as_it_was() -> None:
    def run(swap: bool) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 48))
        manager = fp8dist.prepare(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
        manager.attach(net, optimizer=optimizer)
        x = torch.randn(8, 32)
        own = net[0].weight.detach().clone()
        if swap:
            with manager.swapped_weights(), torch.no_grad():
                net[0].weight.copy_(30 * own)
                reference = nn.functional.linear(x, 30 * own, net[0].bias)
                assert error_of(net.eval(), lambda _: reference, x) < BOUND
                net[0].weight.copy_(own)
            net.train()
        net[0].weight.data.mul_(1e-6)  # Undetected: cast differently if the weight counted as written to.
        net(x).sum().backward()
        optimizer.step()
        return parameter_bits(net), state_bits(manager)

    assert run(True) == run(False)
    net, manager, _ = attached()
    with torch.no_grad():
        net[0].weight.mul_(1.6)
    with manager.swapped_weights():
        pass
    assert net[0].fp8_slots.note.written(net[0])  # type: ignore[union-attr]


@pytest.mark.parametrize(("write", "of", "calls"), [("mul_", 3, 1), (".data", 3, 1), ("mul_", 1, 2)])
def test_after_refresh_weights_the_inputs_of_later_modules_fit_too(write: str, of: int, calls: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    reference = copy.deepcopy(net)
    manager = fp8dist.prepare(net)
    manager.attach(net, boundary="manual")
    x = torch.randn(16, 64)
    for _ in range(2):
        net(x).sum().backward()
        manager.step()
    with torch.no_grad():
        for linear, twin in zip(net[:of], reference):
            for weight in (linear.weight, twin.weight):
                (weight.data if write == ".data" else weight).mul_(8)
    for _ in range(calls):
        manager.refresh_weights()
    assert error_of(net, reference, x) < BOUND
