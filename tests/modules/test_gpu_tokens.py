"""FP8Linear on a GPU: every recipe, backend and GEMM for token counts that are multiples of nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, Recipe, RowwiseScaling
from fp8dist.errors import ConfigurationError
from fp8dist_kernels.multipliers import machine_of
from tests.support.devices import DEVICE, needs_gpu

pytestmark = [needs_gpu, pytest.mark.slow]

ALL = (*range(1, 18), 1000, 1001)
FEW = (1, 7, 8, 13, 17)
KINDS = {
    "bf16 with bias": (torch.bfloat16, True),
    "float32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "float32 with bias": (torch.float32, True),
}
"""Weights, and a bias."""

IN, OUT = 144, 160
"""More than a block of scales, and no multiple of it."""

RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(history_len=4),
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "blocks": BlockScaling(),
    "mx": MXFP8Scaling(),
}
FAST, SLOW = 2e-2, 5e-3
"""Error relative to the norm. With fast accumulation, tensor cores keep about 14 bits. Rounding to bf16 gives 2e-3."""


def _linear(dtype: torch.dtype, bias: bool) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(IN, OUT, bias=bias, dtype=dtype)


def _step(linear: nn.Module, x: Tensor, gradient: Tensor, device: str) -> dict[str, Tensor]:
    """Return the results of the three GEMMs, and the bias gradient."""
    given = x.to(device).requires_grad_()
    out = linear(given)
    out.backward(gradient.to(device))
    found = {"fprop": out.detach(), "dgrad": given.grad, "wgrad": linear.weight.grad}
    if linear.bias is not None:
        found["bias"] = linear.bias.grad
    linear.zero_grad()
    return {name: tensor.float().cpu() for name, tensor in found.items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["auto", "triton", "torch"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_any_number_of_tokens(recipe: str, backend: str, kind: str) -> None:
    dtype, bias = KINDS[kind]
    # Of Triton's kernels a few counts: without a GPU its interpreter needs seconds for 1,000 tokens.
    counts = ALL if backend == "torch" or (backend, kind) == ("auto", "bf16 with bias") else FEW
    there, here = _linear(dtype, bias).to(DEVICE), _linear(dtype, bias)
    manager = fp8dist.prepare(there, RECIPES[recipe], backend=backend)
    twin = fp8dist.prepare(here, copy.deepcopy(RECIPES[recipe]), backend="reference")
    machine = machine_of(torch.device(DEVICE, 0))
    if recipe == "blocks" and backend == "torch" and not (machine.capability == (9, 0) and machine.cuda >= (12, 9)):
        with pytest.raises(ConfigurationError, match=r'fprop: torch does not multiply .* use backend="triton"'):
            manager.attach(there)
        return
    manager.attach(there)
    twin.attach(here)
    generator = torch.Generator().manual_seed(1)
    for tokens in counts:
        x = torch.randn(tokens, IN, generator=generator).to(dtype)
        gradient = torch.randn(tokens, OUT, generator=generator).to(dtype)
        mine, theirs = _step(there, x, gradient, DEVICE), _step(here, x, gradient, "cpu")
        for name, expected in theirs.items():
            error = float((mine[name] - expected).norm() / expected.norm())
            assert error <= (FAST if name in RECIPES[recipe].fast_accumulation else SLOW), (tokens, name)
        manager.step()
        twin.step()


def test_autocast_multiplies_in_bf16_with_float32_weights() -> None:
    """The dtypes of most jobs: results of fprop and dgrad in bf16, of wgrad in float32."""
    for backend in ("auto", "torch"):
        linear = _linear(torch.float32, True).to(DEVICE)
        fp8dist.prepare(linear, RowwiseScaling(), backend=backend).attach(linear)
        for tokens in (1, 13, 17):
            with torch.autocast("cuda", torch.bfloat16):
                out = linear(torch.ones(tokens, IN, device=DEVICE))
            out.sum().backward()
            assert out.dtype == torch.bfloat16
        assert linear.weight.grad is not None
