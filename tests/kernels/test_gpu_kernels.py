"""Kernels on a GPU: products against float64; casts, amaxes, updates and digests, bit for bit, against plain torch.

compute-sanitizer runs the tests named small (``scripts/gpu sanitize``).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8dist import DelayedScaling
from fp8dist.state.arena import Arena
from fp8dist.state.slots import Slot, SlotSpec
from fp8dist_kernels import Gemm
from fp8dist_kernels.formats import E4M3, E5M2
from fp8dist_kernels.reference import blocks, casts
from fp8dist_kernels.reference.content import ContentDigest
from fp8dist_kernels.reference.matmuls import FLOAT32_SCALINGS, Scaling
from scripts.benchmarks.gpu.lab import poison, same_bits
from scripts.benchmarks.gpu.matmuls import Operands
from scripts.benchmarks.llama_shapes import Product
from tests.support.devices import DEVICE, needs_gpu

pytestmark = needs_gpu

PRODUCTS = {
    "small": (40, 48, 160),
    "small-of-many-tiles": (300, 272, 128),
    "medium": (1000, 1040, 2048),
    "medium-deep": (512, 256, 8192),
}
SHAPES = {"small": (37, 48), "small-wide": (16, 272), "medium": (1000, 1536)}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

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


def _tensor(shape: tuple[int, int], dtype: torch.dtype, layout: str) -> Tensor:
    """Return a CPU tensor with subnormal to saturating magnitudes and both zeros; "special" adds Inf and NaN."""
    generator = torch.Generator().manual_seed(7)
    rows, columns = shape if layout != "flipped" else shape[::-1]
    x = torch.randn(rows, 2 * columns if layout == "sliced" else columns, generator=generator)
    x *= torch.exp2(torch.randint(-20, 12, x.shape, generator=generator))
    x.view(-1)[:4] = torch.tensor([0.0, -0.0, 448.0, -448.0])
    if layout == "special":
        x.view(-1)[4:9] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30, -1e30])
    x = x.to(dtype)
    return {"flipped": x.t(), "sliced": x[:, ::2]}.get(layout, x)


@pytest.mark.parametrize("layout", ["plain", "special", "flipped", "sliced"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_casts(shape: str, dtype: torch.dtype, layout: str) -> None:
    from fp8dist_kernels.triton import casts as fused

    x = _tensor(SHAPES[shape], dtype, layout)
    for fp8, cold, just_in_time, outgrown in (
        (torch.float8_e4m3fn, False, True, None),
        (torch.float8_e5m2, True, True, None),
        (torch.float8_e4m3fn, False, True, 1.25),
        (torch.float8_e5m2, False, False, 2.0),
    ):
        results = []
        for device, version in ((DEVICE, fused), ("cpu", casts)):
            pending = torch.tensor(0.5, device=device)
            place = (torch.tensor(1.7, device=device), torch.tensor(cold, device=device), pending)
            poison(x.shape, fp8, torch.device(device))
            options: dict[str, Any] = {"record": True, "just_in_time": just_in_time, "outgrown": outgrown}
            options |= {"margin": 1, "power_of_two": False}
            there = x.to(device) if layout in ("plain", "special") else _there(x, device)
            options["sums"] = sums = torch.full((x.shape[1],), torch.nan, dtype=dtype, device=device)
            rows, *others = version.quantize(there, *place, fp8, rows=True, columns=True, **options)
            results.append((rows, *others, pending, sums, version.transpose(rows)))
        for name, mine, theirs in zip(("rows", "columns", "inv_scale", "pending", "sums", "transposed"), *results):
            assert same_bits(mine.cpu(), theirs), name


def _there(x: Tensor, device: str) -> Tensor:
    """Return a copy on ``device`` with the same strides."""
    storage = torch.empty(x.untyped_storage().nbytes() // x.element_size(), dtype=x.dtype, device=device)
    there = storage.as_strided(x.shape, x.stride(), x.storage_offset())
    return there.copy_(x)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("kind", ["rowwise", "1x128", "128x128"])
@pytest.mark.parametrize("shape", SHAPES)
def test_casts_with_many_scales(shape: str, kind: str, power_of_two: bool) -> None:
    from fp8dist_kernels.triton import blocks as fused

    x = _tensor(SHAPES[shape], torch.bfloat16, "plain")
    results = []
    for device, version in ((DEVICE, fused), ("cpu", blocks)):
        options: dict[str, Any] = {"power_of_two": power_of_two, "rows": True, "columns": True}
        if kind == "rowwise":
            results.append(version.quantize_rowwise(x.to(device), torch.float8_e4m3fn, **options))
        else:
            block = (1, 128) if kind == "1x128" else (128, 128)
            results.append(version.quantize_blocks(x.to(device), torch.float8_e4m3fn, block=block, **options))
    for name, mine, theirs in zip(("rows", "inv_scale", "columns", "inv_scale of columns"), *results):
        assert same_bits(mine.cpu(), theirs), name


@pytest.mark.parametrize("layout", ["plain", "special", "flipped", "sliced"])
@pytest.mark.parametrize("shape", SHAPES)
def test_amax(shape: str, layout: str) -> None:
    from fp8dist_kernels.triton.magnitude import observe

    x = _tensor(SHAPES[shape], torch.bfloat16, layout)
    pending = torch.tensor(-1.0, device=DEVICE)
    observe(_there(x, DEVICE), pending)
    expected = float("nan") if x.isnan().any() else float(x.float().abs().max())
    assert same_bits(pending.cpu(), torch.tensor(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", ["small", "medium"])
def test_digests(shape: str, dtype: torch.dtype) -> None:
    sizes = (0, 1, 7, 1000, 40_000) if shape == "small" else (3, 5_000_000, 131_072)
    generator = torch.Generator().manual_seed(9)
    tensors = [torch.randint(0, 200, (size,), generator=generator).to(dtype) for size in sizes]
    there = [x.to(DEVICE) for x in tensors]
    mine, counts = ContentDigest(torch.device(DEVICE), "triton").many_leaves(there)
    theirs, expected = ContentDigest(torch.device("cpu"), "torch").many_leaves(tensors)
    assert counts == expected
    assert torch.equal(mine.cpu(), theirs)
    assert torch.equal(ContentDigest(torch.device(DEVICE), "triton").many_leaves(there)[0], mine)


def _arena(recipe: DelayedScaling, slots: int, device: str) -> Arena:
    roles = (("input", E4M3), ("weight", E4M3), ("grad_output", E5M2))
    specs = [SlotSpec(Slot(f"layers.{i // 3:04d}", roles[i % 3][0]), roles[i % 3][1]) for i in range(slots)]
    arena = Arena(specs, recipe, "torch" if device == "cpu" else "triton")
    arena.place(torch.device(device))
    return arena


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("slots", "history"), [(7, 5), (1000, 1024)], ids=["small", "medium"])
def test_updates(slots: int, history: int, algorithm: Any, power_of_two: bool) -> None:
    recipe = DelayedScaling(history_len=history, amax_algo=algorithm, power_of_two=power_of_two, margin=1)
    there, here = _arena(recipe, slots, DEVICE), _arena(recipe, slots, "cpu")
    generator = torch.Generator().manual_seed(11)
    for _ in range(12):
        amaxes = torch.rand(slots, generator=generator).mul_(40).sub_(20).exp2_()
        chosen = torch.rand(slots, generator=generator) < 0.3
        special = torch.tensor([-1.0, 0.0, torch.inf, torch.nan, 1e-45, 3e38])
        amaxes[chosen] = special[torch.randint(6, (int(chosen.sum()),), generator=generator)]
        outcomes = []
        for arena in (there, here):
            arena.pending.copy_(amaxes)
            arena.launch()
            outcomes.append(arena.commit(arena.send.clone()).tolist())
        assert outcomes[0] == outcomes[1]
        assert same_bits(there.send.cpu(), here.send)
        mine = there.copied_state()
        for name, theirs in here.copied_state().items():
            assert same_bits(mine[name].cpu(), theirs), name
