"""A mixture of experts: a router, and MLPs of which each token visits a few."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launch.train_gpt.model import GPT, Block

BALANCE = 0.01
"""Weight of a mixture's imbalance, as in Switch Transformer (arXiv 2101.03961)."""


class Experts(nn.Module):
    """E MLPs with four times the width, in two 3-D parameters.

    Attributes and the signature of ``forward`` are those of Transformers' experts interface, by which
    ``fp8dist.prepare`` recognises experts.
    """

    has_gate = has_bias = is_transposed = False

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.empty(experts, 4 * width, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, 4 * width))
        self.act_fn = nn.GELU(approximate="tanh")

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs, [tokens, width], as ``hidden_states``.
        ``top_k_index``: int64 [tokens, k], the experts of each token; ``top_k_weights``: likewise."""
        chosen, order = top_k_index.flatten().sort(stable=True)
        experts = torch.arange(len(self.up_proj), device=chosen.device)
        ends = torch.searchsorted(chosen, experts, right=True, out_int32=True)
        rows = hidden_states[order // top_k_index.shape[1]]
        rows = _product(self.act_fn(_product(rows, self.up_proj, ends)), self.down_proj, ends)
        weighted = rows * top_k_weights.flatten()[order, None]
        return weighted[order.argsort()].view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)


class Mixture(nn.Module):
    """A router in high precision, and experts. Weights are the router's softmax over all experts, not renormalised over
    the chosen ones: so the router also learns if k is 1 (Switch Transformer, arXiv 2101.03961).

    ``imbalance``: of the last forward in training, 0-d: experts times the sum over experts of share of tokens times
    mean weight (the same paper, equation 4). k if all experts have equally many tokens, at most k times the experts.
    Without it in the loss, 6 of 8 experts had no token after 50 steps.
    """

    imbalance: Tensor

    def __init__(self, width: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(width, experts)

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, width] -> the same
        rows = x.flatten(0, 1)
        with torch.autocast(x.device.type, enabled=False):
            logits = self.router(rows.to(self.router.weight.dtype))
        shares = logits.float().softmax(-1)
        weights, chosen = shares.topk(self.top_k)
        if self.training:
            visited = torch.zeros_like(shares).scatter_(1, chosen, 1.0)
            self.imbalance = shares.shape[1] * (visited.mean(0) * shares.mean(0)).sum()
        mixed: Tensor = self.experts(rows, chosen, weights)
        return mixed.view_as(x)


class MixtureBlock(Block):
    """A block with a mixture in place of the MLP."""

    def __init__(self, width: int, heads: int, experts: int, top_k: int) -> None:
        nn.Module.__init__(self)  # Not Block's own, which makes an MLP.
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = Mixture(width, experts, top_k)

    def multiply(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.mlp(x)
        return mixed


class MixtureGPT(GPT):
    """A GPT whose blocks have mixtures of ``experts``, of which each token visits ``top_k``."""

    writes_residual = (*GPT.writes_residual, "down_proj")

    def __init__(self, layers: int, width: int, heads: int, context: int, experts: int, top_k: int) -> None:
        super().__init__(layers, width, heads, context, lambda width, heads: MixtureBlock(width, heads, experts, top_k))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy. In training, its gradient is also that of BALANCE times the imbalances."""
        loss = super().forward(tokens, targets)
        for mixture in self.modules() if self.training else ():
            if isinstance(mixture, Mixture):
                loss = loss + BALANCE * (mixture.imbalance - mixture.imbalance.detach())  # Adds zero.
        return loss


def _product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return the rows of each expert times its weight, in autocast's dtype or that of the rows."""
    kind = rows.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
    return F.grouped_mm(rows.to(dtype), weight.to(dtype).mT, offs=ends)
