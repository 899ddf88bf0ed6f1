"""The operands that each recipe multiplies, bit for bit, and their products up to the rounding of float32 sums.

So a product is off by what casts and sums round: the largest errors follow from the formats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, Recipe, RowwiseScaling, StateManager
from tests.support import fp8_oracle
from tests.support.casting import hard_values
from tests.support.devices import DEVICE
from tests.support.fp8_oracle import E4M3, E5M2, Operand
from tests.support.gemms import Gemms, assert_gemm, numbers
from tests.support.linear import assert_product
from tests.support.suite import NIGHTLY

KINDS: Sequence[type[Recipe]] = (DelayedScaling, CurrentScaling, RowwiseScaling, BlockScaling)

RECIPES = [
    *(kind() for kind in KINDS),
    *(kind(format="e4m3" if kind().format == "hybrid" else "hybrid", power_of_two=True) for kind in KINDS),
    *(MXFP8Scaling(), MXFP8Scaling(scale_rounding="up")),
]
"""Each kind in each format, one of them with powers of two; MX with both roundings."""

SHAPES = [  # (tokens, in_features, out_features, dtype)
    (131, 272, 144, torch.float32),
    (131, 144, 272, torch.bfloat16),
    (128, 128, 256, torch.float32),
    (33, 80, 48, torch.float32),
    (5, 48, 400, torch.float16),
    (1, 16, 32, torch.float32),
]


def spread(lines: int, width: int, seed: int) -> Tensor:
    """Magnitudes from 2**-24 to 2**12, -0.0, and halves of FP8's smallest steps."""
    return hard_values(lines, width, seed, finite=True)


def extremes(lines: int, width: int, seed: int) -> Tensor:
    """Lines of the largest and smallest float32, of zeros of both signs, and combinations."""
    x = torch.randn(lines, width, generator=torch.Generator().manual_seed(seed))
    kinds = [3e38, 1e-30, 1e-38, 1e-45, 0.0, -0.0, 1.0]
    factors = torch.tensor([kinds[(line + seed) % len(kinds)] for line in range(lines)])
    x = (x * factors[:, None]).clamp(-3.4028234e38, 3.4028234e38)
    x[:, ::7] *= 1e-6
    return x.to(DEVICE)


def zeros(lines: int, width: int, seed: int) -> Tensor:
    return torch.zeros(lines, width, device=DEVICE) * torch.sign(spread(lines, width, seed))


def not_finite(lines: int, width: int, seed: int) -> Tensor:
    """One line has a NaN, one an Inf, one a -Inf, if there are enough lines."""
    x = spread(lines, width, seed)
    for line, value in enumerate((math.nan, math.inf, -math.inf)):
        x[(line * 3) % lines, (line * 5 + 1) % width] = value
    return x


def module(recipe: Recipe, weight: Tensor, backend: str | None = None) -> tuple[nn.Linear, StateManager]:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype, device=DEVICE)
    manager = fp8dist.prepare(linear, recipe, backend=backend)
    with torch.no_grad():
        linear.weight.copy_(weight)
    return linear, manager


def assert_computes(
    linear: nn.Linear, x: Tensor, grad: Tensor, expected: Mapping[str, tuple[Operand, Operand]], what: object = ""
) -> None:
    """Run a forward and a backward. Compare all operands, and where they are finite the results."""
    x = x.detach().requires_grad_()
    linear.weight.grad = None
    with Gemms() as gemms:
        y = linear(x)
        y.backward(grad)
    results = {"fprop": y, "dgrad": x.grad, "wgrad": linear.weight.grad}
    for gemm, (name, result) in zip(gemms.seen, results.items(), strict=True):
        assert_gemm(gemm, expected[name], f"{what} {name}")
        assert result is not None
        assert result.dtype == x.dtype
        if all((each.codes & 0x7F <= each.format.largest).all() for each in expected[name]):
            a, b = (torch.from_numpy(each.dequantised()).to(DEVICE) for each in expected[name])
            magnitudes = torch.cat([a.flatten(), b.flatten(), (a.abs() @ b.abs().t()).flatten()]).abs()
            tiny = ((magnitudes > 0) & (magnitudes < 2.0**-60)).any()  # Float32 has less precision there.
            if magnitudes.max() < min(2.0**60, torch.finfo(x.dtype).max) and not tiny:
                assert_product(result, a, b)


def oracle(
    recipe: Recipe, x: Tensor, weight: Tensor, grad: Tensor, scales: Mapping[str, Any] | None = None
) -> dict[str, tuple[Operand, Operand]]:
    tensors = (numbers(x), numbers(weight), numbers(grad))
    by: Any = f"mx {recipe.scale_rounding}" if isinstance(recipe, MXFP8Scaling) else recipe.by
    return fp8_oracle.operands(*tensors, by, recipe.format, recipe.power_of_two, scales)


def test_the_oracle_knows_the_formats() -> None:
    """Values in the specification's tables 1 and 2; a tie; saturation."""
    assert (E4M3.max, E4M3.smallest, E4M3.decode(0x08), E4M3.decode(0x88)) == (448, 2.0**-9, 2.0**-6, -(2.0**-6))
    assert (E5M2.max, E5M2.smallest, E5M2.decode(0x04), E5M2.decode(0x7B)) == (57344, 2.0**-16, 2.0**-14, 57344)
    for format in (E4M3, E5M2):
        finite = np.array([code for code in range(256) if code & 0x7F <= format.largest], np.uint8)
        assert format.encode(format.decoded(finite).astype(np.float32)).tolist() == finite.tolist()
    x = np.array([17, 19, -17, 1e9, -1e9, 2.0**-10, 3 * 2.0**-10, -1e-9, np.nan], np.float32)
    assert E4M3.encode(x).tolist() == [0x58, 0x5A, 0xD8, 0x7E, 0xFE, 0x00, 0x02, 0x80, 0x7F]


@pytest.mark.parametrize(
    ("recipe", "make", "shapes"),
    [
        *(pytest.param(recipe, spread, SHAPES, marks=NIGHTLY) for recipe in RECIPES),
        *((recipe, spread, [SHAPES[i // len(KINDS) % 2], *SHAPES[2:]]) for i, recipe in enumerate(RECIPES)),
        *((recipe, extremes, SHAPES[3:5]) for recipe in RECIPES),
        *((recipe, make, SHAPES[4:]) for recipe in RECIPES for make in (zeros, not_finite)),
    ],
)
def test_what_is_multiplied_is_what_the_oracle_says(recipe: Recipe, make: Any, shapes: Any) -> None:
    """Compares all operands of all products and their inverse scales. The first step with delayed scaling uses the
    tensors' own amaxes."""
    for shape in shapes:
        tokens, in_features, out_features, dtype = shape
        x, weight, grad = (
            make(*size, seed).to(dtype)
            for seed, size in enumerate([(tokens, in_features), (out_features, in_features), (tokens, out_features)])
        )
        linear, _ = module(recipe, weight)
        assert_computes(linear, x, grad, oracle(recipe, x, weight, grad), shape)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [RECIPES[i] for i in (0, 2, 5, 7)])
def test_what_is_multiplied_by_the_triton_backend(recipe: Recipe) -> None:
    x, weight, grad = spread(37, 144, 1), spread(32, 144, 2), spread(37, 32, 3)
    linear, _ = module(recipe, weight, backend="triton")
    assert_computes(linear, x, grad, oracle(recipe, x, weight, grad))


def _lower_median(windows: Tensor) -> Tensor:
    return windows.median(1).values


WINDOWS: Mapping[str, tuple[Any, Any]] = {
    "max": ("max", max),
    "most_recent": ("most_recent", lambda window: window[-1]),
    "callable": (_lower_median, lambda window: sorted(window)[(len(window) - 1) // 2]),
}

STEPS = (1.0, 40.0, 1e-3, 0.0, math.inf, 3.0, 1.0)
"""Factors of the tensors in successive steps; Inf: one element is Inf."""


def _of_step(factor: float, step: int) -> Iterator[Tensor]:
    for seed, size in enumerate([(19, 48), (32, 48), (19, 32)]):
        x = torch.randn(*size, generator=torch.Generator().manual_seed(10 * step + seed)).to(DEVICE)
        x *= factor if math.isfinite(factor) else 1.0
        if math.isinf(factor):
            x[1, 2] = math.inf
        yield x


@pytest.mark.parametrize(
    ("algorithm", "margin", "power_of_two", "format", "update"),
    [
        ("max", 0, False, "hybrid", "same_step"),
        ("max", 2, True, "e4m3", "next_step"),
        ("most_recent", 0, True, "hybrid", "next_step"),
        ("most_recent", 2, False, "e4m3", "same_step"),
        ("callable", 0, False, "e4m3", "next_step"),
        ("callable", 2, True, "hybrid", "same_step"),
    ],
)
def test_delayed_scales_are_those_of_the_steps_before(
    algorithm: str, margin: int, power_of_two: bool, format: Any, update: Any
) -> None:
    """Steps that saturate, underflow, are all zeros, or contain an Inf, which the window ignores. If the window gives
    0, the scale stays as it was: 1 at first. Each step writes to the weight: beyond 1.25 times its scale, it is cast
    with its own."""
    given, choose = WINDOWS[algorithm]
    recipe = DelayedScaling(
        history_len=3, amax_algo=given, margin=margin, power_of_two=power_of_two, format=format, update=update
    )
    by_role = fp8_oracle.formats(format)
    windows = {role: [0.0] * 3 for role in by_role}
    scales: dict[str, Any] = dict.fromkeys(by_role, np.float32(1))
    linear, manager = module(recipe, torch.zeros(32, 48))
    for step, factor in enumerate(STEPS):
        x, weight, grad = _of_step(factor, step)
        with torch.no_grad():
            linear.weight.copy_(weight)
        amaxes = {role: np.abs(numbers(t)).max() for role, t in zip(by_role, (x, weight, grad))}
        own = {role: fp8_oracle.current_scale(amaxes[role], by_role[role], power_of_two, margin) for role in by_role}
        used = dict(own if step == 0 else scales)
        if np.isfinite(amaxes["weight"]) and amaxes["weight"] * used["weight"] > np.float32(1.25 * 448):
            used["weight"] = own["weight"]
        assert_computes(linear, x, grad, oracle(recipe, x, weight, grad, used), step)
        manager.step()
        for role, amax in amaxes.items():
            if np.isfinite(amax):
                windows[role] = [*windows[role][1:], amax]
            chosen = np.float32(choose(windows[role]))
            if chosen > 0:
                scales[role] = fp8_oracle.current_scale(chosen, by_role[role], power_of_two, margin)


def test_a_cold_slot_may_be_cast_with_scale_1() -> None:
    for format in ("hybrid", "e4m3"):
        recipe = DelayedScaling(format=format, warmup="unit")
        x, weight, grad = spread(19, 48, 1), spread(32, 48, 2), spread(19, 32, 3)
        ones = dict.fromkeys(fp8_oracle.formats(format), np.float32(1))
        assert_computes(module(recipe, weight)[0], x, grad, oracle(recipe, x, weight, grad, ones))
