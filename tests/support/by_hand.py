"""A block with tensor and sequence parallelism written by hand, on plain tensors, as in Megatron-LM.

Ranks hold shards of the Linears' weights, and copies of everything else. Each rank computes norms, router, gate and the
output's bias on its part of the sequence, so the gradients of these copies are parts of a sum, which the loop must add
up over the ranks.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, HEAD, HEADS = 16, 4, 8

COPIES = ("norm.weight", "q_norm.weight", "out_bias", "router.weight", "gate.bias", "final_norm.weight")
"""One of each kind of parameter whose gradient the loop must add up over the ranks."""

SHARDS = ("qkv.weight", "out.weight")


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x.chunk(group.size())[group.rank()]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        parts = [torch.empty_like(grad) for _ in range(ctx.group.size())]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts), None


class ByHand(nn.Module):
    """``group``: the ranks of the tensor-parallel axis. ``bias_shard``: also give each rank a shard of a bias, zeros at
    first."""

    def __init__(self, group: Any, bias_shard: bool = False) -> None:
        super().__init__()
        self.group, size = group, group.size()
        whole = torch.Generator().manual_seed(1)
        own = torch.Generator().manual_seed(100 + group.rank())
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, HEAD * HEADS // size, bias=bias_shard)
        self.q_norm = nn.RMSNorm(HEAD)
        self.out = nn.Linear(HEAD * HEADS // size, WIDTH, bias=False)
        self.out_bias = nn.Parameter(torch.zeros(WIDTH))
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.gate = nn.Linear(WIDTH, 1)
        self.final_norm = nn.LayerNorm(WIDTH)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.3, generator=own if name in SHARDS else whole)
            self.gate.bias.zero_()
            if bias_shard:
                self.qkv.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """``x``: (tokens, WIDTH), the same on all ranks of the axis. Returns this rank's part of the tokens."""
        mine = x.chunk(self.group.size())[self.group.rank()]
        heads = self.qkv(_GatherRows.apply(self.norm(mine), self.group)).unflatten(-1, (-1, HEAD))
        out = _ScatterSum.apply(self.out(self.q_norm(heads).flatten(-2)), self.group) + self.out_bias
        routed = out * self.router(out).softmax(-1).amax(-1, keepdim=True) * self.gate(out).sigmoid()
        return self.final_norm(mine + routed)


def whole_by_hand(size: int, alone: Any) -> ByHand:
    """Return the block that ``size`` ranks share, on this rank, which is the group ``alone``. Local."""
    parts = [ByHand(SimpleNamespace(size=lambda: size, rank=lambda rank=rank: rank)) for rank in range(size)]
    whole = ByHand(alone)
    with torch.no_grad():
        for name, dim in zip(SHARDS, (0, 1)):
            whole.get_parameter(name).copy_(torch.cat([part.get_parameter(name) for part in parts], dim))
    return whole


def add_up(model: ByHand, forgotten: str = "") -> None:
    """Sum the gradients of the copies over the ranks, as the loop must after backward. COLLECTIVE.

    ``forgotten``: a parameter that the loop leaves out.
    """
    for name, parameter in model.named_parameters():
        if name not in (*SHARDS, "qkv.bias", forgotten) and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=model.group)
