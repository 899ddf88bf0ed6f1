"""One product of each recipe, cold, and for half a minute without a pause: heat lowers the clock of a busy GPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from scripts.benchmarks.gpu.lab import Case, Lab
from scripts.benchmarks.gpu.matmuls import AUTO, BF16, SMOKE, Operands, ours
from scripts.benchmarks.gpu.stopwatch import FEWEST, Action, Comparison, compare, sustained, timing_of
from scripts.benchmarks.llama_shapes import KINDS, LINEARS, Product, products_of

SECONDS = 30.0
OTHERS = 2.0
"""Seconds of a case for all but the long run."""
LAST = 3
"""The sustained speed is the speed in the last 1 / LAST of a run."""


class Planned(NamedTuple):
    """A run of fprop: in FP8, or of the same shape in bf16."""

    kind: str
    product: Product

    @property
    def name(self) -> str:
        """The name in a results file."""
        return f"{self.kind}: {self.product.name}"


class Sustained:
    """Long runs, in turn: bf16, then each kind of products."""

    def __init__(self) -> None:
        self._plain: list[float] = []
        """µs per run in the last windows of bf16, with which the FP8 products are compared."""

    def plan(self, lab: Lab) -> list[Planned]:
        """See ``Part``."""
        layer, tokens = (SMOKE, 48) if lab.smoke else (LINEARS[2], 8192)
        products = {kind: products_of(recipe, layer, tokens)[0] for kind, recipe in KINDS.items()}
        return [Planned(BF16, products["tensorwise"]), *(Planned(kind, product) for kind, product in products.items())]

    def measure(self, lab: Lab, planned: Planned) -> Case:
        """See ``Part``. "ratios": the time of bf16 over ours, "cold" and "sustained"."""
        product = planned.product
        operands = Operands.random(product, lab.device)
        a, b = (torch.randn(one.shape, dtype=torch.bfloat16, device=lab.device) for one in (operands.a, operands.b))
        plain = functools.partial(torch.matmul, a, b.t())
        sides: dict[str, Action] = {AUTO: ours(product, operands, AUTO), BF16: plain}
        comparison = compare(lab.stopwatch, sides, lab.seconds / 4)
        side = BF16 if planned.kind == BF16 else AUTO
        seconds = 0.0 if lab.smoke else min(SECONDS, lab.share - OTHERS)
        windows = sustained(lab.stopwatch, sides[side], seconds)
        last = windows[-max(FEWEST, len(windows) // LAST) :]
        timings = {"cold": comparison.timings()[side], "sustained": timing_of(last)}
        case: Case = {"name": planned.name, "kind": planned.kind, "seconds": seconds, "timings": timings}
        operations = 2 * product.m * product.n * product.k
        case["tflops"] = {state: operations / 1e6 / timing["median_us"] for state, timing in timings.items()}
        if side == BF16:
            self._plain = last
        else:
            case["ratios"] = {"cold": comparison.ratio(BF16, AUTO)}
            if self._plain:
                runs = Comparison({BF16: self._plain[-len(last) :], AUTO: last[-len(self._plain) :]})
                case["ratios"]["sustained"] = runs.ratio(BF16, AUTO)
        return case

    def figures(self, cases: Sequence[Case]) -> dict[str, Any]:
        """See ``Part``: nothing beyond the cases."""
        return {}
