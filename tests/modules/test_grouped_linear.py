"""Grouped products against an FP8Linear for each expert: bit for bit in outputs, gradients and state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, Recipe, RowwiseScaling
from fp8dist.errors import ConfigurationError
from tests.support.experts import Experts, LoopedExperts, Mixture, routes, rows
from tests.support.states import state_of
from tests.support.suite import crossed, few
from tests.support.training import bits

STEPS = 6
RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(history_len=4),
    "delayed-unit": DelayedScaling(history_len=3, warmup="unit", margin=1, power_of_two=True),
    "delayed-next": DelayedScaling(history_len=4, update="next_step", format="e4m3"),
    "delayed-wgrad": DelayedScaling(history_len=4, high_precision=("wgrad",)),
    "current": CurrentScaling(),
    "current-dgrad": CurrentScaling(high_precision=("fprop", "dgrad")),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
    "mx": MXFP8Scaling(),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {"gate": False},
    "gpt-oss": {"bias": True, "transposed": True, "interleaved": True},
    "wide": {"hidden": 144, "inner": 80},
}


class Pair:
    """The same mixture twice: with grouped products, and with an FP8Linear for each expert."""

    def __init__(self, recipe: Recipe, layout: dict[str, Any], observers: Sequence[Any] = ()) -> None:
        grouped = Mixture(Experts(**layout))
        linears = Mixture(LoopedExperts(grouped.experts))
        self.models = (grouped, linears)
        self.managers = [fp8dist.prepare(model, recipe) for model in self.models]
        # Momentum moves experts that do not run: their weights' scales stand still, until they run again.
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in self.models]
        for manager, observer in zip(self.managers, observers):
            fp8dist.watch(manager, every=1, observer=observer)
        for manager, model, optimizer in zip(self.managers, self.models, self.optimizers):
            manager.attach(model, optimizer=optimizer)

    def micro(self, seed: int, among: tuple[int, ...], tokens: int = 23) -> None:
        seen = [_run(model, seed, among, tokens) for model in self.models]
        for name, ours, theirs in zip(("output", "input gradient", "route gradient"), *seen):
            assert bits(ours) == bits(theirs), f"{name} of microbatch {seed}"
        self.compare_gradients()

    def compare_gradients(self) -> None:
        """Compare weight gradients, and bias gradients within a rounding error of their sum."""
        grouped, linears = self.models
        experts: Any = grouped.experts
        for name in (experts.up_name, "down_proj"):
            for expert, linear in enumerate(getattr(linears.experts, name.removesuffix("_proj"))):
                ours = getattr(experts, name).grad[expert]
                ours = ours.t() if experts.is_transposed else ours
                theirs = torch.zeros_like(ours) if linear.weight.grad is None else linear.weight.grad
                assert bits(ours.contiguous()) == bits(theirs), f"weight gradient of {name} {expert}"
                if experts.has_bias:
                    ours = getattr(experts, f"{name}_bias").grad[expert]
                    theirs = torch.zeros_like(ours) if linear.bias.grad is None else linear.bias.grad
                    torch.testing.assert_close(ours, theirs)  # Sums of up to 46 float32 in another order.

    def step(self) -> None:
        """End a step on both, and compare the whole state. Biases are made equal again."""
        for parameter in self.models[1].parameters():
            if parameter.grad is None:  # The slice of a 3-D gradient is zeros.
                parameter.grad = torch.zeros_like(parameter)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        grouped, linears = self.models
        for name, bias in grouped.experts.named_parameters():
            if name.endswith("_bias"):
                for expert, linear in enumerate(getattr(linears.experts, name.removesuffix("_proj_bias"))):
                    linear.bias.data.copy_(bias[expert])
        self.compare_state()

    def compare_state(self) -> None:
        ours, theirs = map(state_of, self.managers)
        assert ours.keys() == theirs.keys()
        for slot in ours:
            assert ours[slot] == theirs[slot], slot


def _run(model: Mixture, seed: int, among: tuple[int, ...], tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    experts: Any = model.experts
    if hasattr(experts, "down"):
        hidden = experts.down[0].out_features
    else:
        hidden = experts.down_proj.shape[2 if experts.is_transposed else 1]
    x = rows(tokens, hidden, seed).requires_grad_()
    index, weights = routes(tokens, min(2, len(among)), among, seed)
    weights.requires_grad_()
    out = model(x, index, weights)
    out.backward(rows(tokens, hidden, seed + 1000) * 1e-2)
    assert x.grad is not None
    assert weights.grad is not None
    return out, x.grad, weights.grad


@pytest.mark.slow
@pytest.mark.parametrize("name", few(RECIPES, "delayed-unit", "delayed-next", "current-dgrad", "rowwise", "block"))
def test_equal_an_fp8_linear_for_each_expert(name: str) -> None:
    """Over 6 steps of two microbatches, in which experts see no token, or one, or all."""
    pair = Pair(RECIPES[name], {})
    for step in range(STEPS):
        among = ((0, 1, 2, 3), (1, 3), (2,), (0, 1))[step % 4]
        pair.micro(2 * step, among)
        pair.micro(2 * step + 1, (3,) if step == STEPS - 1 else among, tokens=1 + 3 * (step % 6))
        pair.step()


@crossed(layout=LAYOUTS, recipe=["delayed", "rowwise", "mx"])
def test_every_layout_computes_the_same(layout: str, recipe: str) -> None:
    pair = Pair(RECIPES[recipe], LAYOUTS[layout])
    for step in range(3):
        pair.micro(step, (0, 2, 3))
        pair.step()


@pytest.mark.slow
@crossed(recipe=["delayed", "current", "block"], gemms=[("fprop",), ("dgrad", "wgrad"), ("fprop", "dgrad", "wgrad")])
def test_precision_of_single_experts(recipe: str, gemms: tuple[Any, ...]) -> None:
    """Some experts in high precision, then some for a number of steps, then all."""
    pair = Pair(RECIPES[recipe], {"bias": True})
    for step in range(20):
        for manager in pair.managers:
            if step == 1:
                manager.set_precision("experts.gate_up.[13]", "high", gemms)
            elif step == 2:
                manager.set_precision("experts.down.2", "high", gemms, steps=17)
            elif step == 4:
                manager.set_precision("experts.gate_up.1", "fp8")
            elif step == 7:
                manager.set_precision("*", "high", gemms, steps=3)
        pair.micro(step, (0, 1, 2, 3) if step % 3 else (1, 2))
        pair.step()


@pytest.mark.parametrize("high", ["*", "experts.gate_up.[13]"])
def test_float64_experts_in_high_precision(high: str) -> None:
    """Which torch's grouped product does not compute."""
    models = Mixture(Experts(bias=True).double()), Mixture(Experts(bias=True).double())
    manager = fp8dist.prepare(models[0])
    manager.set_precision(high, "high")
    index, weights = routes(23, 2, (0, 1, 3), 5)
    seen = []
    for model in models:
        x = rows(23, 32, 4).double().requires_grad_()
        output = model(x, index, weights.double())
        output.square().sum().backward()
        seen.append([output, x.grad, *(parameter.grad for parameter in model.parameters())])
    for ours, theirs in zip(*seen):
        assert ours.dtype == torch.float64
        if high == "*":
            torch.testing.assert_close(ours, theirs)
        else:
            assert (ours - theirs).norm() < 0.2 * theirs.norm()


def test_calibration_and_modes() -> None:
    pair = Pair(DelayedScaling(history_len=4), {})
    for mode in ("calibrate", "no_fp8"):
        for manager, model in zip(pair.managers, pair.models):
            with getattr(manager, mode)():
                _run(model, 1, (0, 1, 3), 9)
            for parameter in model.parameters():
                parameter.grad = None
        pair.compare_state()
    pair.micro(3, (0, 1, 2))
    pair.step()
    index, weights = routes(9, 2, (0, 1, 2, 3), 4)
    with torch.no_grad():
        first, second = (model.eval()(rows(9, 32, 4), index, weights) for model in pair.models)
    assert bits(first) == bits(second)
    pair.compare_state()


@crossed(high=[(), ("fprop",)], recipe=["delayed", "current", "rowwise", "block"])
def test_shares_of_saturated_and_flushed_elements(recipe: str, high: tuple[Any, ...]) -> None:
    observed: list[list[Any]] = [[], []]
    pair = Pair(replace(RECIPES[recipe], high_precision=high), {}, observers=[into.append for into in observed])
    for step in range(5):
        # Every fourth batch is smaller than those before, and the next one larger.
        pair.micro(step, (0, 1, 2, 3) if step < 3 else (1, 2))
        pair.micro(step, (1, 3))
        pair.step()
    ours, theirs = ([_numbers(each) for each in of] for of in observed)
    assert ours == theirs
    shares = {slot[2:4] for seen in ours for slot in seen.values()}
    assert len(shares) > (8 if recipe == "delayed" else 1)


def _numbers(observation: Any) -> dict[Any, Any]:
    return {each.slot: tuple(str(value) for _, value in each.numbers()) for each in observation.slots}


def product(model: Any, x: Tensor, ends: list[int], name: str = "gate_up_proj") -> Tensor:
    experts, offsets = model.experts, torch.tensor(ends, dtype=torch.int32)
    return fp8dist.grouped_linear(x, getattr(experts, name), offsets, experts.fp8_products[name])


def test_mistakes() -> None:
    model = Mixture(Experts())
    fp8dist.prepare(model)
    experts: Any = model.experts
    slots, weight = experts.fp8_products["down_proj"], experts.down_proj
    ends, x = torch.tensor([1, 2, 3, 4], dtype=torch.int32), torch.zeros(4, 48)
    wrong: list[tuple[Any, Any, Any, str]] = [
        (x[:, :32], weight, ends, "expected rows [tokens, 48]"),
        (x, weight[:3], ends, "4 experts"),
        (x, weight, ends.long(), "int32 [4]"),
        (x, weight, ends[:3], "int32 [4]"),
    ]
    for rows_, weight_, ends_, text in wrong:
        with pytest.raises(ConfigurationError) as raised:
            fp8dist.grouped_linear(rows_, weight_, ends_, slots)
        assert text in str(raised.value)
        assert "experts.down" in str(raised.value)
    assert fp8dist.grouped_linear(x, weight, ends, slots).shape == (4, 32)


def test_rows_of_nobody_are_neither_read_nor_recorded() -> None:
    """Under expert parallelism, other ranks' rows are uninitialised memory."""
    states = []
    for beyond in (0, 5):
        model = Mixture(Experts())
        manager = fp8dist.prepare(model, RECIPES["delayed"])
        experts: Any = model.experts
        x = torch.cat([rows(9, 32, 1), torch.full((beyond, 32), torch.nan)]).requires_grad_()
        out = product(model, x, [2, 2, 7, 9])
        assert bits(out[9:]) == bits(torch.zeros(beyond, 96))
        out.backward(torch.cat([rows(9, 96, 2), torch.full((beyond, 96), torch.nan)]))
        assert x.grad is not None
        assert bits(x.grad[9:]) == bits(torch.zeros(beyond, 32))
        manager.step()
        states.append((state_of(manager), bits(out[:9]), bits(x.grad[:9]), bits(experts.gate_up_proj.grad)))
    assert states[0] == states[1]


def test_expanded_and_strided_tensors_in_high_precision() -> None:
    """torch's grouped product refuses their strides."""
    seen = []
    for layout in (Tensor.contiguous, lambda x: x):
        model = Mixture(Experts())
        manager = fp8dist.prepare(model)
        manager.set_precision("experts.gate_up.1", "high")
        experts: Any = model.experts
        for x in (torch.ones(1, 32).expand(8, 32), rows(16, 64, 1)[::2, ::2]):
            leaf = layout(x).requires_grad_()
            out = product(model, leaf, [2, 4, 4, 8])
            out.sum().backward()
            seen.append((bits(out), bits(leaf.grad.contiguous()), bits(experts.gate_up_proj.grad)))
    assert seen[:2] == seen[2:]


@pytest.mark.slow
def test_kernels_give_the_bits_of_their_twins() -> None:
    """In the casts and observations as they are called here. Products of powers of two are exact in both."""
    outcomes = []
    for backend in ("reference", "triton"):
        model = Mixture(Experts(3, 16, 16, gate=False))
        recipe = DelayedScaling(history_len=2, power_of_two=True)
        manager = fp8dist.prepare(model, recipe, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
        manager.attach(model, optimizer=optimizer)
        experts: Any = model.experts
        experts.up_proj.data.copy_(experts.up_proj.detach().sign())
        manager.refresh_weights()
        seen = []
        for step in range(3):
            if step == 2:
                manager.set_precision("experts.up.1", "high", steps=2)
            x = torch.cat([rows(5, 16, step).round(), torch.full((2, 16), torch.nan)]).requires_grad_()
            ends = torch.tensor([2, 4, 5] if step else [0, 4, 5], dtype=torch.int32)
            out = fp8dist.grouped_linear(x, experts.up_proj, ends, experts.fp8_products["up_proj"])
            out.backward(rows(7, 16, step).round())
            assert x.grad is not None
            seen += [bits(out), bits(x.grad), bits(experts.up_proj.grad)]
            optimizer.step()
            optimizer.zero_grad()
        outcomes.append((seen, state_of(manager)))
    assert outcomes[0] == outcomes[1]
