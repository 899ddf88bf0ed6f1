"""Kernels on a GPU: products against float64; all other ops, launches and commits, bit for bit, against plain torch on
the CPU.

compute-sanitizer runs the tests named small (``scripts/gpu sanitize``).
"""

from __future__ import annotations

import random
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8dist_kernels import Gemm
from fp8dist_kernels.arrays import UpdateRule
from fp8dist_kernels.formats import E4M3, E5M2
from fp8dist_kernels.reference.matmuls import FLOAT32_SCALINGS, Scaling
from scripts.benchmarks.gpu.lab import poison, same_bits
from scripts.benchmarks.gpu.matmuls import Operands
from scripts.benchmarks.llama_shapes import Product
from tests.kernels.test_twins import OPS, Op
from tests.support.casting import FORMATS, LAYOUTS, assert_same
from tests.support.devices import DEVICE, needs_gpu
from tests.support.updates import BothVersions, random_arrays

pytestmark = needs_gpu

PRODUCTS = {
    "small": (40, 48, 160),
    "small-of-many-tiles": (300, 272, 128),
    "medium": (1000, 1040, 2048),
    "medium-deep": (512, 256, 8192),
}
SHAPES = {"small": (37, 48), "small-wide": (16, 272), "medium": (1000, 1536)}

NORM, ELEMENT = MappingProxyType({True: 2e-2, False: 5e-3}), 0.2
"""Tolerances. NORM: error relative to the norm, by ``fast`` (tensor cores accumulate alone, with about 14 bits).
ELEMENT: error of an element relative to the root mean square. Rounding to bf16 gives 2e-3, a wrong tile about 1."""


def _product(operands: Operands, fast: bool, bias: Tensor | None = None) -> Tensor:
    from fp8dist_kernels.triton.matmuls import matmul

    return matmul(operands.a, operands.b, operands.inv_scale_a, operands.inv_scale_b, torch.bfloat16, fast, bias)


@pytest.mark.parametrize("use", ["fprop", "dgrad"])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("kind", [scaling.value for scaling in FLOAT32_SCALINGS])
@pytest.mark.parametrize("shape", PRODUCTS)
def test_products(shape: str, kind: str, fast: bool, use: Gemm) -> None:
    torch.manual_seed(3)
    m, n, k = PRODUCTS[shape]
    gradient = E5M2 if kind == "tensorwise" and use == "dgrad" else E4M3
    product = Product("", use, m, n, k, Scaling(kind), fast, gradient.dtype, E4M3.dtype)
    operands = Operands.random(product, torch.device(DEVICE))
    bias = torch.randn(n, dtype=torch.bfloat16, device=DEVICE) if fast else None
    exact = operands.exactly(torch.arange(m, device=DEVICE))
    if bias is not None:
        exact += bias.double()
    poison((m, n), torch.bfloat16, torch.device(DEVICE))
    mine = _product(operands, fast, bias)
    error = mine.double() - exact
    assert float(error.norm() / exact.norm()) <= NORM[fast]
    assert float(error.abs().max() / exact.square().mean().sqrt()) <= ELEMENT
    for _ in range(3):
        assert same_bits(_product(operands, fast, bias), mine), "two runs differ"


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_ops(shape: str, op: Op) -> None:
    """With four kinds of strides, and the dtypes in turn."""
    for turn, layout in enumerate(("contiguous", "transposed", "every second", "shifted")):
        source, dtype = op.sources[turn % len(op.sources)], FORMATS[turn // 2]
        x = LAYOUTS[layout](op.make(*SHAPES[shape], turn, turn % 2 == 0).to(source))
        poison(x.shape, source, x.device)
        mine = op.run(True, x, dtype, turn)
        assert_same(tuple(one.cpu() for one in mine), op.run(False, x.cpu(), dtype, turn))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("slots", "history"), [(7, 5), (1000, 1024)], ids=["small", "medium"])
def test_updates(slots: int, history: int, algorithm: Any, power_of_two: bool) -> None:
    rng = random.Random(slots)
    both = BothVersions("triton", random_arrays(rng, slots, history, shards=3))
    for _ in range(12):
        both.step(UpdateRule(history, 1, power_of_two, True, algorithm), rng)
