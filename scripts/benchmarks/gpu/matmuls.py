"""FP8 products of Llama 3's layers: ``fp8dist_kernels.triton`` against ``torch._scaled_mm``, with one kind of scales.

Before timing, sampled rows of both results are compared with float64, and the complete results with each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fp8dist_kernels.reference.matmuls import SCALE_BLOCK, Scaling, block_scales_for_torch, column_major
from scripts.benchmarks.gpu.lab import Case, Lab, geomean, joined_problems, poison, ratios_of
from scripts.benchmarks.gpu.stopwatch import compare, issue_time
from scripts.benchmarks.llama_shapes import PASSES, shapes_of

__all__ = ["KINDS", "Matmuls", "Operands", "Planned"]

KINDS = tuple(scaling.value for scaling in Scaling)
ONLY_WGRAD = Scaling.BLOCKWISE_1D.value
"""1 x 128 scales for both operands: products of two activations."""
OURS, THEIRS = "fp8dist", "torch._scaled_mm"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MIDDLE_FIRST = (8192, 16384, 4096, 32768)
SAMPLED_ROWS = 64
COLUMNS_AT_ONCE = 8192
ELEMENTS_AT_ONCE = 1 << 26

WORSE_THAN_TORCH = 2.0
"""Our error against float64 may be this many times torch's, plus ``SLACK``: the order of summation differs, and tensor
cores keep about 14 bits of a partial sum."""
SLACK = 2e-3

FURTHEST = 0.25
"""Largest distance of an element from torch's, as a share of the result's RMS. A wrong tile differs by more than 1."""


@dataclass(frozen=True)
class Planned:
    """One product: a[m, k] times b[n, k] transposed. ``use``: fprop, dgrad or wgrad."""

    name: str
    use: str
    m: int
    n: int
    k: int


@dataclass(frozen=True)
class Operands:
    """FP8 [m, k] and [n, k] with inverse scales: 0-d, or [m, 1] and [n, 1], or one per 1 x 128 block and
    one per 128 x 128 block, or one per 1 x 128 block of either."""

    a: Tensor
    b: Tensor
    inv_scale_a: Tensor
    inv_scale_b: Tensor

    @staticmethod
    def random(planned: Planned, kind: str, device: torch.device) -> Operands:
        """Return random operands in the formats of a training step: gradients are E5M2 under tensorwise scaling
        only."""
        m, n, k = planned.m, planned.n, planned.k
        gradients = kind == "tensorwise" and planned.use != "fprop"
        blocks = -(-k // SCALE_BLOCK)
        shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
            "tensorwise": ((), ()),
            "rowwise": ((m, 1), (n, 1)),
            "blockwise": ((m, blocks), (-(-n // SCALE_BLOCK), blocks)),
            "blockwise_1d": ((m, blocks), (n, blocks)),
        }
        of_a, of_b = shapes[kind]
        inv_scale_a, inv_scale_b = (torch.rand(shape, device=device).add_(0.5) for shape in (of_a, of_b))
        if Scaling(kind).in_blocks:  # As casts lay them out.
            inv_scale_a = column_major(inv_scale_a)
        if kind == "blockwise_1d":
            inv_scale_b = column_major(inv_scale_b)
        return Operands(
            torch.randn(m, k, dtype=torch.bfloat16, device=device).to(E5M2 if gradients else E4M3),
            torch.randn(n, k, dtype=torch.bfloat16, device=device).to(E4M3),
            inv_scale_a,
            inv_scale_b,
        )

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
    if inv_scale.ndim and inv_scale.shape != (height, 1):
        inv_scale = inv_scale.repeat_interleave(SCALE_BLOCK, 1)[:, :width]
        if len(inv_scale) != height:
            inv_scale = inv_scale.repeat_interleave(SCALE_BLOCK, 0)[:height]
    return inv_scale.expand(height, width)


class Matmuls:
    """One recipe's products."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.name = f"matmul_{kind}"

    def plan(self, lab: Lab) -> list[Planned]:
        """Return all layers, numbers of tokens and uses; the middle number of tokens first."""
        if lab.smoke:
            products = [Planned("smoke fprop", "fprop", 48, 256, 128), Planned("smoke wgrad", "wgrad", 32, 128, 256)]
        else:
            products = llama_products()
        return [one for one in products if self.kind != ONLY_WGRAD or one.use == "wgrad"]

    def measure(self, lab: Lab, planned: Planned) -> Case:
        """See ``Part``. "ratio" is torch's time over ours."""
        matmul = _ours()
        operands = Operands.random(planned, self.kind, lab.device)
        arguments = (operands.a, operands.b, operands.inv_scale_a, operands.inv_scale_b, torch.bfloat16, True)
        case: Case = {"name": planned.name, "use": planned.use, "m": planned.m, "n": planned.n, "k": planned.k}
        theirs, refusal = _theirs(operands, self.kind)

        def ours() -> Tensor:
            return matmul(*arguments)

        case |= _examined(lab, operands, ours, theirs)
        if "problem" in case:
            return case
        actions = {OURS: ours} if theirs is None else {OURS: ours, THEIRS: theirs}
        comparison = compare(lab.stopwatch, actions, lab.seconds, issue_time(lab.stopwatch, ours))
        case["timings"] = comparison.timings()
        operations = 2 * planned.m * planned.n * planned.k
        case["tflops"] = {side: operations / 1e6 / case["timings"][side]["median_us"] for side in actions}
        if theirs is None:
            case["refused_by_torch"] = refusal
        else:
            case["ratio"] = comparison.ratio(THEIRS, OURS)
        return case

    def figures(self, cases: Sequence[Case]) -> dict[str, Any]:
        """See ``Part``."""
        ratios = ratios_of(cases)
        refused = [case["refused_by_torch"] for case in cases if "refused_by_torch" in case]
        figures: dict[str, Any] = {"shapes": len(ratios)}
        if refused:
            figures["refused_by_torch"] = f"{refused[0]} ({len(refused)} shapes)"
        if joined_problems(cases) or not ratios:
            return figures
        lowest = min(ratios, key=ratios.__getitem__)
        figures |= {"geomean": geomean(ratios.values()), "lowest": ratios[lowest], "lowest_case": lowest}
        for use in PASSES:
            of_use = [case["ratio"] for case in cases if case["use"] == use and "ratio" in case]
            if of_use:
                figures[use] = geomean(of_use)
        return figures


def llama_products() -> list[Planned]:
    """Return the products of Llama 3 8B and 70B, at 4k to 32k tokens."""
    shapes = [shape for tokens in MIDDLE_FIRST for shape in shapes_of(tokens)]
    return [Planned(shape.name, shape.name.split()[-1], shape.m, shape.n, shape.k) for shape in shapes]


def _ours() -> Any:
    from fp8dist_kernels.triton.matmuls import matmul

    return matmul


def _theirs(operands: Operands, kind: str) -> tuple[Callable[[], Tensor] | None, str]:
    """Return torch's product as a call without arguments, with scales in its layout; or None and the reason."""
    a, b, inv_scale_a, inv_scale_b = operands.a, operands.b.t(), operands.inv_scale_a, operands.inv_scale_b
    if kind == "rowwise":
        inv_scale_b = inv_scale_b.t()
    elif Scaling(kind).in_blocks:
        inv_scale_a, laid_out = block_scales_for_torch(inv_scale_a, inv_scale_b, Scaling(kind))
        inv_scale_b = laid_out[: inv_scale_b.shape[1]] if kind == "blockwise" else laid_out.t()

    def product(fast: bool) -> Tensor:
        return torch._scaled_mm(
            a, b, scale_a=inv_scale_a, scale_b=inv_scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    def public_product() -> Tensor:
        lines, squares = functional.ScalingType.BlockWise1x128, functional.ScalingType.BlockWise128x128
        of_b = squares if kind == "blockwise" else lines
        return functional.scaled_mm(a, b, inv_scale_a, lines, laid_out, of_b, output_dtype=torch.bfloat16)

    attempts: list[Callable[[], Tensor]] = [functools.partial(product, True), functools.partial(product, False)]
    if Scaling(kind).in_blocks:
        attempts.append(public_product)
    refusals = []
    for attempt in attempts:
        try:
            attempt()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            refusals.append(str(error).strip().splitlines()[0][:160])
        else:
            return attempt, ""
    return None, refusals[0]


def _examined(lab: Lab, operands: Operands, ours: Any, theirs: Any) -> Case:
    """Return the errors of both results against float64, and a "problem" if ours is wrong."""
    m, n = operands.a.shape[0], operands.b.shape[0]
    generator = torch.Generator().manual_seed(m + n)
    rows = torch.cat([torch.tensor([0, m - 1]), torch.randint(m, (SAMPLED_ROWS,), generator=generator)]).unique()
    rows = rows.to(lab.device)
    exact = operands.exactly(rows)
    poison((m, n), torch.bfloat16, lab.device)
    mine = ours()
    error = _relative_error(mine[rows], exact)
    again = ours()
    case: Case = {"error": {OURS: error}}
    allowed = 10 * SLACK
    if theirs is not None:
        other = theirs()
        case["error"][THEIRS] = _relative_error(other[rows], exact)
        allowed = WORSE_THAN_TORCH * case["error"][THEIRS] + SLACK
        furthest = _largest_difference(mine, other)
        if not furthest <= FURTHEST:
            case["problem"] = f"wrong: an element is {furthest:.3g} of the root mean square away from torch's"
    if not error <= allowed:
        case["problem"] = f"wrong: relative error {error:.3g}, at most {allowed:.3g} is right"
    elif not torch.equal(mine.view(torch.int16), again.view(torch.int16)):
        case["problem"] = "wrong: two runs differ"
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
