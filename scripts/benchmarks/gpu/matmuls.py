"""FP8 products of Llama 3's layers, as FP8Linear runs them in training: ``matmul`` with "auto" and with "triton",
against ``torch._scaled_mm`` and against bf16.

Before timing, sampled rows of all results are compared with float64, and complete results with torch's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fp8dist_kernels import BLOCK, GEMMS, MX_BLOCK, direct
from fp8dist_kernels.reference.matmuls import Scaling, column_major
from fp8dist_kernels.reference.torch_matmuls import block_scales_for_torch, mx_scales_for_torch
from scripts.benchmarks.gpu.lab import Case, Lab, geomean, poison, summary_of
from scripts.benchmarks.gpu.stopwatch import Ratio, compare
from scripts.benchmarks.llama_shapes import KINDS, LINEARS, Layer, Product, fast_everywhere, products_of

AUTO, TRITON, TORCH, BF16 = "auto", "triton", "torch._scaled_mm", "bf16"
OURS = (AUTO, TRITON)
SMOKE = Layer("smoke", 256, 144)
SAMPLED_ROWS = 64
COLUMNS_AT_ONCE = 8192
ELEMENTS_AT_ONCE = 1 << 26

WORSE_THAN_TORCH = 2.0
"""The relative error of fp8dist against float64 may be this many times torch's, plus ``SLACK``: the order of summation
differs, and tensor cores keep about 14 bits of a partial sum."""
SLACK = 2e-3

FURTHEST = 0.25
"""Largest distance of an element from torch's, as a share of the result's RMS. A wrong tile differs by more than 1."""


def planned_products(kind: str, steps: Sequence[tuple[str, int]]) -> list[Product]:
    """Return the products that the recipe of ``kind`` runs by default, and those with fast accumulation everywhere.

    Args:
        kind: one of ``KINDS``.
        steps: (model, tokens), most important first.
    """
    recipe = KINDS[kind]
    products: dict[Product, None] = {}
    for fast in (None, GEMMS) if fast_everywhere(recipe) else (None,):
        for model, tokens in steps:
            layers = [layer for layer in LINEARS if layer.name.startswith(model)]
            products |= dict.fromkeys(one for layer in layers for one in products_of(recipe, layer, tokens, fast))
    return list(products)


@dataclass(frozen=True)
class Operands:
    """FP8 [m, k] and [n, k] with inverse scales: 0-d, or [m, 1] and [n, 1], or one per 1 x 128 block and
    one per 128 x 128 block, or one per 1 x 128 block of either, or E8M0 per 1 x 32 block of either."""

    a: Tensor
    b: Tensor
    inv_scale_a: Tensor
    inv_scale_b: Tensor

    @staticmethod
    def random(product: Product, device: torch.device) -> Operands:
        """Return random operands of a product."""
        m, n, k, scaling = product.m, product.n, product.k, product.scaling
        blocks = -(-k // BLOCK)
        shapes: dict[Scaling, tuple[tuple[int, ...], tuple[int, ...]]] = {
            Scaling.TENSORWISE: ((), ()),
            Scaling.ROWWISE: ((m, 1), (n, 1)),
            Scaling.BLOCKWISE: ((m, blocks), (-(-n // BLOCK), blocks)),
            Scaling.BLOCKWISE_1D: ((m, blocks), (n, blocks)),
            Scaling.MX: ((m, k // MX_BLOCK), (n, k // MX_BLOCK)),
        }
        of_a, of_b = shapes[scaling]
        inv_scale_a, inv_scale_b = (torch.rand(shape, device=device).add_(0.5) for shape in (of_a, of_b))
        if scaling is Scaling.MX:
            inv_scale_a, inv_scale_b = (one.to(torch.float8_e8m0fnu) for one in (inv_scale_a, inv_scale_b))
        if scaling.in_blocks:  # As casts lay them out.
            inv_scale_a = column_major(inv_scale_a)
        if scaling is Scaling.BLOCKWISE_1D:
            inv_scale_b = column_major(inv_scale_b)
        # Power draw, and so the clock, depends on the data: use random numbers, not zeros.
        a, b = (torch.randn(rows, k, dtype=torch.bfloat16, device=device) for rows in (m, n))
        return Operands(a.to(product.a_dtype), b.to(product.b_dtype), inv_scale_a, inv_scale_b)

    def exactly(self, rows: Tensor) -> Tensor:
        """Return float64 [len(rows), n]: these rows of the exact product."""
        (m, k), n = self.a.shape, self.b.shape[0]
        a = self.a[rows].double() * _of_elements(self.inv_scale_a, m, k)[rows]
        scales_b = _of_elements(self.inv_scale_b, n, k)
        parts = []
        for start in range(0, n, COLUMNS_AT_ONCE):
            piece = slice(start, start + COLUMNS_AT_ONCE)
            parts.append(a @ (self.b[piece].double() * scales_b[piece]).t())
        return torch.cat(parts, 1)


def _of_elements(inv_scale: Tensor, height: int, width: int) -> Tensor:
    """Return [height, width]: the scale of each element."""
    if inv_scale.dtype == torch.float8_e8m0fnu:
        return inv_scale.double().repeat_interleave(MX_BLOCK, 1)
    if inv_scale.ndim and inv_scale.shape != (height, 1):
        inv_scale = inv_scale.repeat_interleave(BLOCK, 1)[:, :width]
        if len(inv_scale) != height:
            inv_scale = inv_scale.repeat_interleave(BLOCK, 0)[:height]
    return inv_scale.expand(height, width)


class Matmuls:
    """The products of one kind of recipes."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def plan(self, lab: Lab) -> list[Product]:
        """See ``Part``."""
        if lab.smoke:
            return products_of(KINDS[self.kind], SMOKE, 48)
        return planned_products(self.kind, (("8B", 8192), ("70B", 8192)))

    def measure(self, lab: Lab, planned: Product) -> Case:
        """See ``Part``. "ratios": torch's time over ours by side; "… vs bf16": the time of bf16 over ours."""
        operands = Operands.random(planned, lab.device)
        default = planned.fast == (planned.gemm in KINDS[self.kind].fast_accumulation)
        case: Case = {"name": planned.name, "gemm": planned.gemm, "fast": planned.fast, "default": default}
        sides = {side: ours(planned, operands, side) for side in OURS}
        theirs, refusal = _theirs(planned, operands)
        case |= _examined(lab, operands, sides, theirs)
        if "problem" in case:
            return case
        if theirs is None:
            case["refused_by_torch"] = refusal
        else:
            sides[TORCH] = theirs
        a, b = (torch.randn(one.shape, dtype=torch.bfloat16, device=lab.device) for one in (operands.a, operands.b))
        sides[BF16] = functools.partial(torch.matmul, a, b.t())
        comparison = compare(lab.stopwatch, sides, lab.seconds)
        case["timings"] = comparison.timings()
        operations = 2 * planned.m * planned.n * planned.k
        case["tflops"] = {side: operations / 1e6 / case["timings"][side]["median_us"] for side in sides}
        case["ratios"] = {f"{side} vs bf16": comparison.ratio(BF16, side) for side in OURS}
        if theirs is not None:
            case["ratios"] |= {side: comparison.ratio(TORCH, side) for side in OURS}
        return case

    def figures(self, cases: Sequence[Case]) -> dict[str, Any]:
        """See ``Part``: by side, for the default accumulation and for fast accumulation everywhere."""
        refused = [case["refused_by_torch"] for case in cases if "refused_by_torch" in case]
        figures: dict[str, Any] = {"refused_by_torch": f"{refused[0]} ({len(refused)} shapes)"} if refused else {}
        failed = [case for case in cases if case.get("problem")]
        default = [case for case in cases if case.get("default")]
        fast = [case for case in cases if case.get("fast")]
        for name, chosen in (("", default), *((", fast", fast),) * any(not case["default"] for case in fast)):
            for side in OURS:
                summary = summary_of([*chosen, *failed], side)
                by_gemm = {gemm: _mean([case for case in chosen if case["gemm"] == gemm], side) for gemm in GEMMS}
                if summary:
                    figures[side + name] = {**summary, **by_gemm, BF16: _mean(chosen, f"{side} vs bf16")}
        return figures


def _mean(cases: Sequence[Case], key: str) -> Ratio | None:
    ratios = [Ratio(*case["ratios"][key]) for case in cases if key in case.get("ratios", {})]
    return geomean(ratios) if ratios else None


def ours(product: Product, operands: Operands, backend: str) -> Callable[[], Tensor]:
    """Return the product as FP8Linear calls it."""
    return functools.partial(
        direct.matmul,
        operands.a,
        operands.b,
        operands.inv_scale_a,
        operands.inv_scale_b,
        torch.bfloat16,
        fast_accumulation=product.fast,
        backend=backend,
    )


def _theirs(product: Product, operands: Operands) -> tuple[Callable[[], Tensor] | None, str]:
    """Return torch's product as a call without arguments, with scales in its layout; or None and the reason."""
    a, b, inv_scale_a, inv_scale_b = operands.a, operands.b.t(), operands.inv_scale_a, operands.inv_scale_b
    call: Callable[[], Tensor]
    if product.scaling is Scaling.MX:
        blocks, swizzle = functional.ScalingType.BlockWise1x32, functional.SwizzleType.SWIZZLE_32_4_4
        laid_out = [mx_scales_for_torch(scale) for scale in (inv_scale_a, inv_scale_b)]
        scales = (laid_out[0], blocks, laid_out[1], blocks, swizzle, swizzle)
        call = functools.partial(functional.scaled_mm, a, b, *scales, output_dtype=torch.bfloat16)
    elif product.scaling.in_blocks:
        inv_scale_a, inv_scale_b = block_scales_for_torch(inv_scale_a, inv_scale_b, product.scaling)
        lines, squares = functional.ScalingType.BlockWise1x128, functional.ScalingType.BlockWise128x128
        of_b = squares if product.scaling is Scaling.BLOCKWISE else lines
        call = functools.partial(
            functional.scaled_mm, a, b, inv_scale_a, lines, inv_scale_b, of_b, output_dtype=torch.bfloat16
        )
    else:
        call = functools.partial(
            torch._scaled_mm,
            a,
            b,
            scale_a=inv_scale_a,
            scale_b=inv_scale_b.t() if inv_scale_b.ndim else inv_scale_b,
            out_dtype=torch.bfloat16,
            use_fast_accum=product.fast,
        )
    try:
        call()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return None, str(error).strip().splitlines()[0][:160]
    return call, ""


def _examined(lab: Lab, operands: Operands, sides: Mapping[str, Any], theirs: Any) -> Case:
    """Return the errors of all results against float64, and a "problem" if one of ours is wrong."""
    m, n = operands.a.shape[0], operands.b.shape[0]
    generator = torch.Generator().manual_seed(m + n)
    rows = torch.cat([torch.tensor([0, m - 1]), torch.randint(m, (SAMPLED_ROWS,), generator=generator)]).unique()
    rows = rows.to(lab.device)
    exact = operands.exactly(rows)
    case: Case = {"error": {}}
    allowed, other = 10 * SLACK, None
    if theirs is not None:
        other = theirs()
        case["error"][TORCH] = _relative_error(other[rows], exact)
        allowed = WORSE_THAN_TORCH * case["error"][TORCH] + SLACK
    for side, product in sides.items():
        poison((m, n), torch.bfloat16, lab.device)
        mine = product()
        error = case["error"][side] = _relative_error(mine[rows], exact)
        furthest = 0.0 if other is None else _largest_difference(mine, other)
        if not error <= allowed:
            case["problem"] = f"wrong: {side}: relative error {error:.3g}, at most {allowed:.3g} is right"
        elif not furthest <= FURTHEST:
            case["problem"] = f"wrong: {side}: an element is {furthest:.3g} of the root mean square away from torch's"
        elif not torch.equal(mine.view(torch.int16), product().view(torch.int16)):
            case["problem"] = f"wrong: {side}: two runs differ"
    return case


def _relative_error(result: Tensor, exact: Tensor) -> float:
    """Return the relative error by norms. NaN and Inf count as wrong, since NaN compares false."""
    return float((result.double() - exact).norm() / exact.norm())


def _largest_difference(mine: Tensor, theirs: Tensor) -> float:
    """Return the largest difference of an element, as a share of the root mean square; NaN if an element is NaN."""
    rows = max(1, ELEMENTS_AT_ONCE // mine.shape[1])
    square = sum(part.float().square().sum(dtype=torch.float64) for part in theirs.split(rows))
    worst = [(a.float() - b.float()).abs().max() for a, b in zip(mine.split(rows), theirs.split(rows))]
    return float(torch.stack(worst).max() / (square / theirs.numel()).sqrt())
