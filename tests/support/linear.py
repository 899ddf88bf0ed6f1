"""One FP8Linear, its data, and its products computed another way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fp8dist
from fp8dist import DelayedScaling, StateManager

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LIMIT = {E4M3: 448.0, E5M2: 57344.0}
BACKENDS = ["torch", "reference", "triton"]
NONE = -1.0  # What ``pending`` holds for a slot that saw nothing.


def linear(
    backend: str | None = None, bias: bool = False, dtype: torch.dtype = torch.float32, **recipe: Any
) -> tuple[nn.Linear, StateManager]:
    """A prepared Linear(48, 32) with weights that are always the same."""
    torch.manual_seed(1)
    module = nn.Linear(48, 32, bias=bias, dtype=dtype)
    return module, fp8dist.prepare(module, DelayedScaling(history_len=4, **recipe), backend=backend)


def inputs(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pending(manager: StateManager) -> dict[tuple[str, str], float]:
    """Amaxes recorded since the last boundary, by slot."""
    (sync,) = manager._syncs
    return {(s.fqn, s.role): float(sync.arena.pending[i]) for s, i in sync.arena.index.items()}


def roles(manager: StateManager) -> dict[str, float]:
    """``pending`` of a model that is one Linear."""
    return {role: amax for (_, role), amax in pending(manager).items()}


def amax(x: Tensor) -> float:
    return float(x.detach().float().abs().max())


def dequantised(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """x as FP8 represents it, in float64: written from the formula, with torch's casts alone."""
    if scale is None:
        scale = torch.tensor(LIMIT[dtype]) / x.detach().float().abs().max()
    fp8 = (x.detach().float() * scale).clamp(-LIMIT[dtype], LIMIT[dtype]).to(dtype)
    return fp8.double() * torch.reciprocal(scale).double()


def assert_product(actual: Tensor, a: Tensor, b: Tensor) -> None:
    """``actual`` is ``a @ b.T`` (float64 operands), up to float32 accumulation in any order and one rounding.

    Summing k products in float32 is off by at most k·2⁻²⁴ of the sum of magnitudes (Higham, "Accuracy and Stability of
    Numerical Algorithms", 3.1); 4 more for dequantising; the result is rounded once, maybe to a subnormal.
    """
    exact = a @ b.t()
    terms = a.shape[1] + 4
    info = torch.finfo(actual.dtype)
    bound = terms * 2.0**-24 * (a.abs() @ b.abs().t()) + info.eps / 2 * exact.abs().clamp_min(info.tiny)
    error = (actual.detach().double() - exact).abs()
    worst = int((error - bound).argmax())
    assert bool((error <= bound).all()), f"flat index {worst}: {actual.flatten()[worst]} for {exact.flatten()[worst]}"
