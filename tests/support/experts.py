"""Mixtures for tests: experts with the attributes of Transformers' interface, and the same with a Linear per expert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

PRODUCTS = ("gate_up", "down")


class Experts(nn.Module):
    """The weights of E experts as 3-D parameters. Its own forward is a loop over them."""

    def __init__(
        self,
        experts: int = 4,
        hidden: int = 32,
        inner: int = 48,
        gate: bool = True,
        bias: bool = False,
        transposed: bool = False,
        interleaved: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.num_experts, self.has_gate, self.has_bias, self.is_transposed = experts, gate, bias, transposed
        self.is_concatenated = not interleaved
        self.act_fn = nn.SiLU()
        generator = torch.Generator().manual_seed(seed)
        wide = 2 * inner if gate else inner
        self.up_name = "gate_up_proj" if gate else "up_proj"
        for name, out, into in ((self.up_name, wide, hidden), ("down_proj", hidden, inner)):
            shape = (experts, into, out) if transposed else (experts, out, into)
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator) / into**0.5))
            if bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(experts, out, generator=generator)))

    def linear(self, name: str, x: Tensor, expert: int) -> Tensor:
        """Return the product of one expert."""
        weight = getattr(self, name)[expert]
        bias = getattr(self, f"{name}_bias")[expert] if self.has_bias else None
        return nn.functional.linear(x, weight.t() if self.is_transposed else weight, bias)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs."""
        return looped(self, self.linear, hidden_states, top_k_index, top_k_weights)


def looped(module: Any, linear: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute experts one after the other, tokens in order. ``linear(name, rows, expert)`` is called with rows only."""
    rows = torch.zeros(index.numel(), x.shape[1], dtype=x.dtype)
    for expert in range(module.num_experts):
        places = (index.reshape(-1) == expert).nonzero().flatten()
        if len(places) == 0:
            continue
        inner = linear(module.up_name, x[places // index.shape[1]], expert)
        if module.has_gate:
            gate, up = inner.chunk(2, -1) if module.is_concatenated else (inner[:, ::2], inner[:, 1::2])
            inner = module.act_fn(gate) * up
        else:
            inner = module.act_fn(inner)
        out = linear("down_proj", inner, expert) * weights.reshape(-1)[places, None]
        rows = rows.index_put((places,), out)
    return rows.view(*index.shape, -1).sum(1)


class LoopedExperts(nn.Module):
    """The same experts with an nn.Linear for each expert and product: ``gate_up.3`` has the weight of expert 3."""

    def __init__(self, of: Experts) -> None:
        super().__init__()
        for name in ("num_experts", "has_gate", "is_concatenated", "up_name"):
            setattr(self, name, getattr(of, name))
        self.act_fn = nn.SiLU()
        for name in (of.up_name, "down_proj"):
            linears = nn.ModuleList()
            for expert, weight in enumerate(getattr(of, name)):
                matrix = (weight.t() if of.is_transposed else weight).detach().clone().contiguous()
                linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=of.has_bias)
                linear.weight = nn.Parameter(matrix)
                if of.has_bias:
                    linear.bias = nn.Parameter(getattr(of, f"{name}_bias")[expert].detach().clone())
                linears.append(linear)
            setattr(self, name.removesuffix("_proj"), linears)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs."""

        def linear(name: str, rows: Tensor, expert: int) -> Tensor:
            made: Tensor = getattr(self, name.removesuffix("_proj"))[expert](rows)
            return made

        return looped(self, linear, x, index, weights)


class Mixture(nn.Module):
    """A mixture with given routes: ``forward(x, index, weights)``."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the experts' outputs."""
        out: Tensor = self.experts(x, index, weights)
        return out


def routes(tokens: int, k: int, among: Sequence[int], seed: int) -> tuple[Tensor, Tensor]:
    """Return (index [tokens, k], weights [tokens, k]) of random routes to distinct experts ``among``."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(tokens, len(among), generator=generator).argsort(1)[:, :k]
    return torch.tensor(list(among))[order], torch.rand(tokens, k, generator=generator) + 0.1


def rows(tokens: int, hidden: int, seed: int) -> Tensor:
    """Return random rows whose magnitudes differ from seed to seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, hidden, generator=generator) * (1 + 0.4 * (seed % 4))
