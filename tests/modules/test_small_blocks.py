"""NVFP4Scaling (emulated: no GPU path) on one rank: products, random numbers, the ledger; and what it and MXFP8Scaling
refuse and measure. The products of MXFP8Scaling are in ``test_recipe_values.py``.

That recomputations and resumed runs repeat random numbers is in ``test_checkpointing.py`` and ``test_overrides.py``."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8dist
from fp8dist import CheckpointError, ConfigurationError, MXFP8Scaling, NVFP4Scaling, Recipe
from fp8dist_kernels.formats import Role
from fp8dist_kernels.reference.nvfp4 import quantize_nvfp4
from tests.support.devices import DEVICE
from tests.support.experts import Experts, Mixture
from tests.support.linear import assert_product
from tests.support.training import bits

E4M3 = torch.float8_e4m3fn
IN, OUT = 96, 48


KEY = int.from_bytes(hashlib.blake2b(b"0 0", digest_size=8).digest(), "little", signed=True)
"""Of seed 0 and the module named 0."""


def dequantised(x: Tensor, copy: str, draw: tuple[int, ...] = (0, 0, 0, 0, 1), **how: bool) -> Tensor:
    """Return the copy ("rows" or "columns") of x, float64, cut to its size. The scale is that of x, with margin 1."""
    encode = torch.full((), 2688.0, device=x.device) / x.detach().abs().amax() / 2
    options: dict[str, Any] = {"key": KEY, "square": False, "hadamard": False, "stochastic": False, **how}
    at = torch.tensor(draw, device=x.device)
    made = quantize_nvfp4(x.detach(), encode, at, E4M3, rows=copy == "rows", columns=copy == "columns", **options)
    fp8, scale = made[:2] if copy == "rows" else made[2:]
    return fp8.double() * scale.double().repeat_interleave(16, 1)


def test_settings() -> None:
    wrong: list[tuple[Any, str]] = [
        (lambda: NVFP4Scaling(seed=-1), "seed must be an integer from 0 to"),
        (lambda: NVFP4Scaling(hadamard="yes"), "hadamard must be True or False"),
        (lambda: MXFP8Scaling(scale_rounding="floor"), "scale_rounding must be one of down, up, got 'floor'"),
        (lambda: fp8dist.prepare(nn.Linear(32, 32), "nvfp4"), r"write fp8dist\.NVFP4Scaling\(\)"),
        (lambda: fp8dist.prepare(nn.Linear(32, 32), "mxfp8"), r"write fp8dist\.MXFP8Scaling\(\)"),
    ]
    for call, message in wrong:
        with pytest.raises(ConfigurationError, match=message):
            call()
    expected = {"hadamard": True, "stochastic_rounding": True, "seed": 0, "margin": 1, "high_precision": ()}
    assert dataclasses.asdict(NVFP4Scaling()) == expected
    assert dataclasses.asdict(MXFP8Scaling()) == {"scale_rounding": "down", "high_precision": ()}
    for recipe, format in ((NVFP4Scaling(), "nvfp4"), (MXFP8Scaling(), "e4m3")):
        assert {recipe.format_of(role).name for role in Role} == {format}


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("stochastic", [False, True])
def test_products_of_any_number_of_tokens(hadamard: bool, stochastic: bool) -> None:
    """In a cold step, in which each tensor has the scale of its own amax."""
    torch.manual_seed(3)
    for number, tokens in enumerate((1, 15, 16, 33)):
        net = nn.Sequential(nn.Linear(IN, OUT)).to(DEVICE)
        linear: Any = net[0]
        recipe = NVFP4Scaling(hadamard=hadamard, stochastic_rounding=stochastic)
        manager = fp8dist.prepare(net, recipe)
        manager.attach(net, data_rank=number)
        x = torch.randn(tokens, IN, device=DEVICE).mul_(torch.logspace(-3, 3, IN, device=DEVICE)).requires_grad_()
        g = torch.randn(tokens, OUT, device=DEVICE)
        y = net(x)
        y.backward(g)
        draw = (0, 0, number * tokens, 0, OUT)
        assert_product(y - linear.bias, dequantised(x, "rows"), dequantised(linear.weight, "rows", square=True))
        of_g = dequantised(g, "rows", draw, stochastic=stochastic)
        assert_product(x.grad, of_g, dequantised(linear.weight, "columns", square=True))
        of_g = dequantised(g, "columns", draw, stochastic=stochastic, hadamard=hadamard)
        assert_product(linear.weight.grad, of_g, dequantised(x, "columns", hadamard=hadamard))


def _net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 48), nn.GELU(), nn.Linear(48, 32))


def _prepared(recipe: Recipe) -> tuple[nn.Sequential, Any, torch.optim.Optimizer]:
    net = _net()
    manager = fp8dist.prepare(net, recipe, check_every=2, audit_every=2, check_policy="raise")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    manager.attach(net, optimizer=optimizer)
    return net, manager, optimizer


def _train(
    net: nn.Module, optimizer: torch.optim.Optimizer, steps: range, forward: Any = nn.Module.__call__
) -> list[Any]:
    """Return the bits of the gradients of every step, of two microbatches each."""
    seen = []
    for step in steps:
        for microbatch in range(2):
            x = torch.randn(7 + step, 64, generator=torch.Generator().manual_seed(2 * step + microbatch))
            forward(net, x).square().mean().backward()
        seen.append([bits(p.grad) for p in net.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return seen


def test_seeds_steps_and_microbatches_differ() -> None:
    """In steps without a change of weights or data."""

    def gradients(recipe: Recipe) -> list[Any]:
        net = _net()
        manager = fp8dist.prepare(net, recipe)
        manager.attach(net)
        seen, x = [], torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
        for step in range(3):
            for _ in range(2):
                net(x).square().mean().backward()
                seen.append(bits(net[0].weight.grad) if step else step)  # After the first step, scales stay.
                net.zero_grad()
            manager.step()
        return [str(one) for one in seen[2:]]

    assert len(set(gradients(NVFP4Scaling(stochastic_rounding=False, hadamard=False)))) == 1
    assert len(set(gradients(NVFP4Scaling(hadamard=False)))) == 4
    assert len(set(gradients(NVFP4Scaling(stochastic_rounding=False)))) == 2  # Signs are those of the step.
    assert len({*gradients(NVFP4Scaling()), *gradients(NVFP4Scaling(seed=1))}) == 8


@pytest.mark.parametrize("how", ["evaluated", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # At a break of the graph.
def test_training_is_not_changed_when_it_is(how: str) -> None:
    """An evaluation runs a backward between two microbatches. The compiler leaves these Linears out of its graphs."""
    seen = []
    for changes in ("", how):
        torch._dynamo.reset()
        net, _, optimizer = _prepared(NVFP4Scaling())
        called = torch.compile(net, backend="eager") if changes == "compiled" else net

        def forward(_: Any, x: Tensor, net: Any = net, called: Any = called, changes: str = changes) -> Any:
            if changes == "evaluated":
                torch.autograd.grad(net.eval()(x).sum(), list(net.parameters()))
            net.train()
            return called(x)

        seen.append(_train(net, optimizer, range(3), forward))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("recipe", [NVFP4Scaling(), MXFP8Scaling()], ids=repr)
def test_replays_repeat_a_step(recipe: Recipe) -> None:
    net, _, optimizer = _prepared(recipe)
    _train(net, optimizer, range(2))
    net(torch.randn(9, 64)).sum().backward()  # A microbatch before the replay.
    report = fp8dist.replay(net, lambda x: net(x).square().mean().backward(), torch.randn(9, 64))
    assert report.reproducible, str(report)


def test_the_ledger_is_saved_and_another_seed_is_refused() -> None:
    net, manager, optimizer = _prepared(NVFP4Scaling())
    _train(net, optimizer, range(3))
    saved = manager.state_dict()
    other = fp8dist.prepare(_net(), NVFP4Scaling(seed=1))
    with pytest.raises(CheckpointError, match="seed is 0 there and 1 here"):
        other.load_state_dict(saved)
    other.load_state_dict(saved, convert=True)
    same = fp8dist.prepare(_net(), NVFP4Scaling(hadamard=False))  # Which changes no random number.
    same.load_state_dict(saved)
    assert other.steps == same.steps == 3
    delayed = fp8dist.prepare(_net(), fp8dist.DelayedScaling())
    with pytest.raises(CheckpointError, match="recipe is 'NVFP4Scaling' there and 'DelayedScaling' here"):
        delayed.load_state_dict(saved)


def test_a_backward_after_the_step_has_the_signs_of_its_forward() -> None:
    net = _net()
    manager = fp8dist.prepare(net, NVFP4Scaling(stochastic_rounding=False))
    manager.attach(net)
    gradients = []
    for early in (False, False, True):
        loss = net(torch.randn(16, 64, generator=torch.Generator().manual_seed(9))).square().mean()
        if early:
            manager.step()
        loss.backward()
        if not early:
            manager.step()
        gradients.append(net[4].weight.grad)
        net.zero_grad()
    # With other signs in one of the operands, the sum is noise.
    assert (gradients[2] - gradients[1]).norm() < 0.3 * gradients[1].norm()


def test_weights_that_others_write_get_a_scale_that_fits() -> None:
    net, _, optimizer = _prepared(NVFP4Scaling(stochastic_rounding=False))
    _train(net, optimizer, range(3))
    x, linear = torch.randn(32, 64), net.eval()[0]
    with torch.no_grad():
        before = linear(x)
        linear.weight.mul_(64)
        linear.bias.mul_(64)
        assert (linear(x) / 64 - before).norm() < 0.02 * before.norm()


def _shares_of_inputs(recipe: Recipe, *inputs: Tensor) -> list[tuple[float, float]]:
    linear, seen = nn.Linear(64, 32), []
    manager = fp8dist.prepare(linear, recipe)
    fp8dist.watch(manager, 1, observer=seen.append)
    manager.attach(linear)
    for x in inputs:
        linear(x).sum().backward()
        manager.step()
    of_input = [next(one for one in each.slots if one.slot.role == "input") for each in seen]
    return [(one.saturated, one.underflow) for one in of_input]


def test_shares_that_saturate_are_measured() -> None:
    """With MX's own rounding, 500 saturates: 448 / 500 is not 1. Rounded up, nothing does. NVFP4's scale is delayed: a
    tensor that grows by 4 in a step saturates."""
    for rounding, expected in (("down", 0.5), ("up", 0.0)):
        recipe = MXFP8Scaling(scale_rounding=rounding)
        assert _shares_of_inputs(recipe, torch.tensor([500.0, 1.0]).repeat(4, 32)) == [(expected, 0.0)]
    growing = [torch.tensor([size, 1e-6]).repeat(4, 32) for size in (1.0, 2.0, 8.0)]
    assert _shares_of_inputs(NVFP4Scaling(), *growing) == [(0.0, 0.5), (0.0, 0.5), (0.5, 0.5)]


def test_what_is_refused_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nets = [nn.Sequential(nn.Linear(features, 128)) for features in (64, 64, 48)]
    net, linear = nets[0], nn.Linear(64, 32)
    manager = fp8dist.prepare(net, NVFP4Scaling())
    mx, narrow = (fp8dist.prepare(one, MXFP8Scaling()) for one in nets[1:])
    on_torch = fp8dist.prepare(linear, MXFP8Scaling(), backend="torch")
    refused: list[tuple[Any, str]] = [
        (lambda: fp8dist.prepare(_net(), NVFP4Scaling(), fp8_all_gather=True), "NVFP4Scaling: it is emulated: no GPU"),
        (
            lambda: fp8dist.prepare(Mixture(Experts()), NVFP4Scaling()),
            r"experts\.gate_up: NVFP4Scaling does not multiply",
        ),
        (lambda: fp8dist.export(manager, tmp_path), "its weight is cast to nvfp4, and servers read e4m3 only"),
        (lambda: manager.attach(net, data_rank=-1), "data_rank must be an integer from 0 to"),
        (lambda: on_torch.attach(linear), r"fprop: torch does not multiply .* MX: not a Blackwell GPU"),
        (
            lambda: fp8dist.export(narrow, tmp_path, format="compressed-tensors-mxfp8"),
            r"^0: rows of its weight have 48 elements, no multiple of 32",
        ),
        *(
            (
                lambda format=format: fp8dist.export(mx, tmp_path, format=format),
                r"1 x 32 elements .* formats that fit: compressed-tensors-mxfp8",
            )
            for format in ("block", "compressed-tensors", "compressed-tensors-channel")
        ),
    ]
    for call, message in refused:
        with pytest.raises(ConfigurationError, match=message):
            call()
    monkeypatch.setattr("fp8dist.modules.casters.capturing", lambda device: True)
    with pytest.raises(ConfigurationError, match="a CUDA graph would repeat the random numbers of one step"):
        net(torch.randn(4, 64))
