"""One FP8Linear, its data, and reference products."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, RowwiseScaling, StateManager
from fp8dist.modules.casters import Cast, Caster, Request
from fp8dist_kernels.formats import Role

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LIMIT = {E4M3: 448.0, E5M2: 57344.0}
BACKENDS = ["torch", "reference", "triton"]
NONE = -1.0  # ``pending`` of a slot that recorded nothing.
RECIPES = (DelayedScaling(), CurrentScaling(), RowwiseScaling(), BlockScaling(), MXFP8Scaling())
"""One of each kind that GPUs compute. The first three have products in torch on a CPU."""


def linear(
    backend: str | None = None, bias: bool = False, dtype: torch.dtype = torch.float32, **recipe: Any
) -> tuple[nn.Linear, StateManager]:
    """Return a prepared Linear(48, 32) with fixed weights, and its manager."""
    torch.manual_seed(1)
    module = nn.Linear(48, 32, bias=bias, dtype=dtype)
    return module, fp8dist.prepare(module, DelayedScaling(history_len=4, **recipe), backend=backend)


def inputs(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pending(manager: StateManager) -> dict[tuple[str, str], float]:
    """Return the amaxes recorded since the last boundary, by slot."""
    (sync,) = manager._syncs
    return {(s.fqn, s.role): float(sync.arena.pending[i]) for s, i in sync.arena.index.items()}


def roles(manager: StateManager) -> dict[str, float]:
    """Return ``pending`` of a model that is one Linear, by role."""
    return {role: amax for (_, role), amax in pending(manager).items()}


@contextlib.contextmanager
def watched_casts(role: Role = Role.WEIGHT) -> Iterator[list[float]]:
    """Record the inverse scale (the first, of several) of each cast of a tensor of this role inside, in order."""
    seen: list[float] = []
    original = Caster.cast

    def watching(self: Caster, x: Tensor, request: Request) -> Cast:
        cast = original(self, x, request)
        if request.role is role:
            scales = cast.rows_inv_scale if cast.rows.numel() else cast.columns_inv_scale
            seen.append(float(scales.flatten()[0]))
        return cast

    with mock.patch.object(Caster, "cast", watching):
        yield seen


def amax(x: Tensor) -> float:
    return float(x.detach().float().abs().max())


def dequantised(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """Return x rounded to FP8, in float64: from the formula, using torch's casts only."""
    if scale is None:
        scale = torch.tensor(LIMIT[dtype]) / x.detach().float().abs().max()
    fp8 = (x.detach().float() * scale).clamp(-LIMIT[dtype], LIMIT[dtype]).to(dtype)
    return fp8.double() * torch.reciprocal(scale).double()


def assert_product(actual: Tensor, a: Tensor, b: Tensor) -> None:
    """Assert that ``actual`` is ``a @ b.T`` (float64 operands), up to float32 accumulation in any order and one
    rounding.

    The error of summing k products in float32 is at most k·2⁻²⁴ of the sum of magnitudes (Higham, "Accuracy and
    Stability of Numerical Algorithms", 3.1). Dequantising adds 4. The result is rounded once, possibly to a subnormal.
    """
    exact = a @ b.t()
    terms = a.shape[1] + 4
    info = torch.finfo(actual.dtype)
    bound = terms * 2.0**-24 * (a.abs() @ b.abs().t()) + info.eps / 2 * exact.abs().clamp_min(info.tiny)
    error = (actual.detach().double() - exact).abs()
    worst = int((error - bound).argmax())
    assert bool((error <= bound).all()), f"flat index {worst}: {actual.flatten()[worst]} for {exact.flatten()[worst]}"
