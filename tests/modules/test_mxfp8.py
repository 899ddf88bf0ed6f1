"""MXFP8Scaling in modules and jobs: products of few tokens, training, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8dist
from fp8dist import ConfigurationError, MXFP8Scaling, Recipe
from fp8dist.modules.grouped_linear import grouped_linear
from fp8dist_kernels.reference.mx import quantize_mx
from tests.support import fp8_oracle
from tests.support.devices import DEVICE
from tests.support.experts import Experts, Mixture, rows
from tests.support.gemms import numbers
from tests.support.linear import assert_product
from tests.support.training import bits

E4M3 = torch.float8_e4m3fn
IN, OUT = 96, 48


def dequantised(x: Tensor, up: bool = False) -> Tensor:
    """Return x after a cast with blocks along its last dim, float64."""
    fp8, scale, *_ = quantize_mx(x.detach(), E4M3, round_up=up, rows=True, columns=False)
    return (fp8.double() * scale.double().repeat_interleave(32, 1))[:, : x.shape[1]]


def test_the_recipe() -> None:
    recipe = MXFP8Scaling(scale_rounding="up", high_precision=["wgrad"])  # type: ignore[arg-type]
    described = recipe.describe()
    assert described == {"recipe": "MXFP8Scaling", "scale_rounding": "up", "high_precision": ["wgrad"]}
    assert Recipe.from_description(described) == recipe
    assert dataclasses.asdict(MXFP8Scaling()) == {"scale_rounding": "down", "high_precision": ()}
    assert {recipe.format_of(role).name for role in ("input", "weight", "grad_output")} == {"e4m3"}  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="scale_rounding must be one of down, up, got 'floor'"):
        MXFP8Scaling(scale_rounding="floor")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"write fp8dist\.MXFP8Scaling\(\)"):
        fp8dist.prepare(nn.Linear(32, 32), "mxfp8")  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match=r'MXFP8Scaling\(scale_rounding="up"\)'):
        fp8dist.MXFP8BlockScaling  # noqa: B018


@pytest.mark.parametrize("up", [False, True], ids=["down", "up"])
def test_products_of_1_to_40_tokens(up: bool) -> None:
    """Tokens and features in no multiple of 32: each operand is cast from the tensor itself, along what is summed."""
    torch.manual_seed(3)
    linear = nn.Linear(IN, OUT).to(DEVICE)
    manager = fp8dist.prepare(linear, MXFP8Scaling(scale_rounding="up" if up else "down"))
    weight = linear.weight
    manager.attach(linear)
    for tokens in range(1, 41):
        x = torch.randn(tokens, IN, device=DEVICE).mul_(torch.logspace(-3, 3, IN, device=DEVICE)).requires_grad_()
        g = torch.randn(tokens, OUT, device=DEVICE)
        weight.grad = linear.bias.grad = None
        y = linear(x)
        y.backward(g)
        assert x.grad is not None
        assert weight.grad is not None
        assert_product(y - linear.bias, dequantised(x, up), dequantised(weight, up))
        assert_product(x.grad, dequantised(g, up), dequantised(weight.t(), up))
        assert_product(weight.grad, dequantised(g.t(), up), dequantised(x.t(), up))


def _net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 48), nn.GELU(), nn.Linear(48, 32))


def _train(net: nn.Module, manager: Any, optimizer: torch.optim.Optimizer, steps: range, again: bool = False) -> None:
    for step in steps:
        x = torch.randn(7 + step, 64, generator=torch.Generator().manual_seed(step))
        y = checkpoint(net, x.requires_grad_(), use_reentrant=False) if again else net(x)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_training_is_repeated_by_recomputation_and_by_a_checkpoint() -> None:
    ends = []
    for kind in ("plain", "recomputed", "resumed"):
        net = _net()
        manager = fp8dist.prepare(net, MXFP8Scaling(), check_every=2, audit_every=2, check_policy="raise")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        manager.attach(net, optimizer=optimizer)
        _train(net, manager, optimizer, range(3), kind == "recomputed")
        if kind == "resumed":
            saved = copy.deepcopy([net.state_dict(), manager.state_dict(), optimizer.state_dict()])
            net = _net()
            manager = fp8dist.prepare(net, MXFP8Scaling(), check_every=2)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            manager.attach(net, optimizer=optimizer)
            for one, state in zip((net, manager, optimizer), saved):
                one.load_state_dict(state)
        _train(net, manager, optimizer, range(3, 6), kind == "recomputed")
        assert manager.steps == 6
        assert not manager.check(parameters=True, coherence=True).diverged
        ends.append([bits(p) for p in net.parameters()])
    assert ends[0] == ends[1] == ends[2]


def test_replays_repeat_a_step() -> None:
    net = _net()
    manager = fp8dist.prepare(net, MXFP8Scaling())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    manager.attach(net, optimizer=optimizer)
    _train(net, manager, optimizer, range(2))
    report = fp8dist.replay(net, lambda x: net(x).square().mean().backward(), torch.randn(9, 64))
    assert report.reproducible, str(report)


def test_shares_that_saturate_are_measured() -> None:
    """With the specification's rounding, 500 saturates: 448 / 500 is not 1. Rounded up, nothing does."""
    for rounding, expected in (("down", 0.5), ("up", 0.0)):
        linear, seen = nn.Linear(64, 32), []
        manager = fp8dist.prepare(linear, MXFP8Scaling(scale_rounding=rounding))  # type: ignore[arg-type]
        fp8dist.watch(manager, 1, observer=seen.append)
        manager.attach(linear)
        x = torch.tensor([500.0, 1.0]).repeat(4, 32)
        linear(x).sum().backward()
        manager.step()
        (of_input,) = (one for one in seen[0].slots if one.slot.role == "input")
        assert (of_input.saturated, of_input.underflow, of_input.amax) == (expected, 0.0, 500.0)


@pytest.mark.parametrize("up", [False, True], ids=["ocp", "up"])
def test_products_of_experts_are_those_of_the_specification(up: bool) -> None:
    """Forward and backward of experts with 5, no, and 34 rows, against exact products of the oracle's operands."""
    experts = Experts(experts=3, hidden=48, inner=80)
    mixture: Any = Mixture(experts)
    fp8dist.prepare(mixture, MXFP8Scaling(scale_rounding="up" if up else "down"))
    slots = mixture.experts.fp8_products["down_proj"]
    by: Any = "mx up" if up else "mx down"
    x, gradient = rows(41, 80, 1).requires_grad_(), rows(41, 48, 2)
    ends, weight = torch.tensor([5, 5, 39], dtype=torch.int32), mixture.experts.down_proj
    output = grouped_linear(x, weight, ends, slots)
    output.backward(gradient)
    assert x.grad is not None
    assert weight.grad is not None
    assert not output[39:].any()
    assert not weight.grad[1].any()
    for expert, mine in ((0, slice(0, 5)), (2, slice(5, 39))):
        given = (numbers(each) for each in (x[mine], weight[expert], gradient[mine]))
        for gemm, (a, b) in fp8_oracle.operands(*given, by, "e4m3", True).items():
            found = {"fprop": output[mine], "dgrad": x.grad[mine], "wgrad": weight.grad[expert]}[gemm]
            exact = torch.from_numpy(a.dequantised() @ b.dequantised().T)
            # Sums in float32 of up to 80 products.
            torch.testing.assert_close(found.detach().double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))


def test_what_is_refused_says_so(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    manager = fp8dist.prepare(net, MXFP8Scaling())
    for format in ("block", "compressed-tensors", "compressed-tensors-channel"):
        with pytest.raises(ConfigurationError, match=r"1 x 32 elements .* formats that fit: compressed-tensors-mxfp8"):
            fp8dist.export(manager, tmp_path / "out", format=format)
    net = nn.Sequential(nn.Linear(48, 64))
    manager = fp8dist.prepare(net, MXFP8Scaling())
    with pytest.raises(ConfigurationError, match=r"^0: rows of its weight have 48 elements, no multiple of 32"):
        fp8dist.export(manager, tmp_path / "out", format="compressed-tensors-mxfp8")
    linear = nn.Linear(64, 32)
    with pytest.raises(ConfigurationError, match=r"fprop: torch does not multiply .* MX: not a Blackwell GPU"):
        fp8dist.prepare(linear, MXFP8Scaling(), backend="torch").attach(linear)
