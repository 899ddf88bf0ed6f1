"""Forward and backward of a mixture's experts, with sorting and casts: FP8Experts against torch's grouped_mm in bf16.

As in ``linears``, each run is the first of a step. Routes are random, so experts have about equally many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from scripts.benchmarks.gpu.lab import Case, Lab, by_recipe
from scripts.benchmarks.gpu.linears import BF16, OURS, TRITON, Bench, measured, prepared
from scripts.benchmarks.llama_shapes import RECIPES


class Size(NamedTuple):
    """A mixture: a token goes to ``top_k`` of ``experts``, whose up and gate products have ``inner`` features each."""

    name: str
    experts: int
    hidden: int
    inner: int
    top_k: int


SIZES = (Size("8 x 4096 x 14336, top 2", 8, 4096, 14336, 2), Size("64 x 2048 x 1408, top 6", 64, 2048, 1408, 6))
"""The sizes of Mixtral 8x7B and of DeepSeek-V2-Lite."""


class Planned(NamedTuple):
    """A mixture in training."""

    size: Size
    tokens: int
    recipe: str

    @property
    def name(self) -> str:
        """The name in a results file."""
        return f"{self.size.name}, {self.tokens} tokens, {self.recipe}"


class Experts:
    """FP8Experts with each recipe."""

    def plan(self, lab: Lab) -> list[Planned]:
        """Return both sizes, the default recipe first."""
        if lab.smoke:
            return [Planned(Size("smoke", 2, 16, 16, 1), 16, "delayed")]
        return [Planned(size, 8192, recipe) for recipe in RECIPES for size in SIZES]

    def measure(self, lab: Lab, planned: Planned) -> Case:
        """See ``Part``. "ratios": the time of bf16 over each side's, on the device; "…, eager": by the host's clock."""
        shape = planned.tokens, planned.size.hidden
        bench = Bench.of(shape, shape, lab.device)
        plain = _Mixture(planned.size, planned.tokens, lab.device)
        sides = {OURS: "auto"} if lab.smoke else {OURS: "auto", TRITON: "triton"}
        recipe = RECIPES[planned.recipe]
        models = {side: prepared(plain, bench, recipe, backend) for side, backend in sides.items()}
        return measured(lab, planned, bench, models, {BF16: plain})

    def figures(self, cases: Sequence[Case]) -> dict[str, Any]:
        """See ``Part``: by recipe and side."""
        return by_recipe(cases, RECIPES, [key for side in (OURS, TRITON) for key in (side, f"{side}, eager")])


class _Mixture(nn.Module):
    """Experts with given routes."""

    def __init__(self, size: Size, tokens: int, device: torch.device) -> None:
        super().__init__()
        self.experts = _Plain(size, device)
        scores = torch.rand(tokens, size.experts, device=device)
        self.weights, self.index = scores.softmax(1).to(torch.bfloat16).topk(size.top_k, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.experts(x, self.index, self.weights)
        return output


class _Plain(nn.Module):
    """The experts in bf16, computed as FP8Experts do, with the attributes of Transformers' experts interface."""

    has_gate, has_bias, is_transposed = True, False, False

    def __init__(self, size: Size, device: torch.device) -> None:
        super().__init__()
        shapes = {
            "gate_up_proj": (size.experts, 2 * size.inner, size.hidden),
            "down_proj": (size.experts, size.hidden, size.inner),
        }
        for name, shape in shapes.items():
            weight = torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(shape[2] ** -0.5)
            self.register_parameter(name, nn.Parameter(weight))
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        tokens, k = index.shape
        chosen, order = index.reshape(-1).sort(stable=True)
        experts = torch.arange(len(self.down_proj), device=x.device)
        offsets = torch.searchsorted(chosen, experts, right=True, out_int32=True)
        gate, up = functional.grouped_mm(x[order // k], self.gate_up_proj.mT, offs=offsets).chunk(2, -1)
        rows = functional.grouped_mm(self.act_fn(gate) * up, self.down_proj.mT, offs=offsets)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        return (rows * weights.reshape(-1)[order, None])[back].view(tokens, k, -1).sum(1)
