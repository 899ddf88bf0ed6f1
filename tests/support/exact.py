"""A small transformer of many kinds, and the parallel programs that train it, for tests of exact arithmetic."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

IGNORED = -100


@dataclass(frozen=True)
class Kind:
    """What the model is made of. Widths are multiples of 12, so that 1 to 4 ranks cut them."""

    seed: int = 0
    layers: int = 2
    heads: int = 12
    head_dim: int = 2
    hidden: int = 24
    vocabulary: int = 48
    norm: str = "rms"
    activation: str = "silu"
    gated: bool = False
    bias: bool = True
    tied: bool = False
    checkpointed: bool = False
    written_out: bool = False
    """Attention as products and a softmax, not scaled_dot_product_attention."""
    experts: int = 0
    """In place of an MLP, so many of them and a router, whose softmax weighs them."""

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


def random_kind(seed: int, **fixed: Any) -> Kind:
    """Return a kind of model drawn with a seed."""
    draw = random.Random(seed)
    drawn = {
        "layers": draw.choice([1, 2, 3]),
        "head_dim": draw.choice([1, 2, 3]),
        "hidden": draw.choice([12, 24, 36]),
        "vocabulary": draw.choice([24, 48]),
        "norm": draw.choice(["rms", "layer"]),
        "activation": draw.choice(["silu", "gelu", "relu", "tanh"]),
        **{name: draw.random() < 0.5 for name in ("gated", "bias", "tied", "checkpointed", "written_out")},
    }
    return Kind(seed, **{**drawn, **fixed})


class Attention(nn.Module):
    """Causal self-attention. ``heads``: those of this rank, under tensor parallelism."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(kind.width, kind.width, bias=kind.bias) for _ in range(4))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """``x``: [batch, sequence, width]."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.kind.head_dim)).transpose(1, 2)
            for projection in (self.q, self.k, self.v)
        )
        if self.kind.written_out:
            scores = q @ k.transpose(-1, -2) / 2
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            mixed = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5)
        return self.o(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two or three Linears."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.up = nn.Linear(kind.width, kind.hidden, bias=kind.bias)
        self.gate = nn.Linear(kind.width, kind.hidden, bias=kind.bias) if kind.gated else None
        self.down = nn.Linear(kind.hidden, kind.width, bias=kind.bias)
        self.activation = torch.tanh if kind.activation == "tanh" else getattr(F, kind.activation)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.activation(self.up(x))
        return self.down(hidden if self.gate is None else hidden * self.gate(x))


class Mixture(nn.Module):
    """Experts, all of which see every token. ``experts``: those of this rank, under expert parallelism."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.router = nn.Linear(kind.width, kind.experts, bias=False)
        self.experts = nn.ModuleDict({str(place): MLP(kind) for place in range(kind.experts)})

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        outputs = [expert(x) * weights[..., int(place), None] for place, expert in self.experts.items()]
        return torch.stack(outputs).sum(0)


def norm_of(kind: Kind) -> nn.Module:
    return nn.RMSNorm(kind.width, eps=1e-5) if kind.norm == "rms" else nn.LayerNorm(kind.width)


class Layer(nn.Module):
    """A layer of the transformer."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = norm_of(kind), Attention(kind), norm_of(kind)
        self.mlp = Mixture(kind) if kind.experts else MLP(kind)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind.checkpointed and torch.is_grad_enabled():
            return checkpoint(self.computed, x, use_reentrant=False)
        return self.computed(x)

    def computed(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Embedding, layers, norm and head. A stage of a pipeline has None in place of what other stages have."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        torch.manual_seed(kind.seed)
        self.embed: nn.Embedding | None = nn.Embedding(kind.vocabulary, kind.width)
        self.layers = nn.ModuleDict({str(place): Layer(kind) for place in range(kind.layers)})
        self.norm: nn.Module | None = norm_of(kind)
        self.head: nn.Linear | None = nn.Linear(kind.width, kind.vocabulary, bias=False)
        if kind.tied:
            self.head.weight = self.embed.weight
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        """``x``: tokens, [batch, sequence], or the output of the stage before. Returns logits, or a stage's output."""
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


Shard = tuple[Tensor, Tensor]


def batch(kind: Kind, shards: int, rows: int = 2, length: int = 12, ragged: bool = True) -> list[Shard]:
    """Return tokens and targets of each shard, [rows, length]. ``ragged``: each shard has another number of targets."""
    draw = torch.Generator().manual_seed(kind.seed)
    found = []
    for place in range(shards):
        tokens, targets = torch.randint(kind.vocabulary, (2, rows, length), generator=draw)
        if ragged:
            targets.view(-1)[: 3 * place + int(torch.randint(3, (), generator=draw))] = IGNORED
        found.append((tokens, targets))
    return found


def count(shards: Sequence[Shard]) -> int:
    """Return the number of targets."""
    return sum(int((targets != IGNORED).sum()) for _, targets in shards)


def loss_of(logits: Tensor, targets: Tensor, tokens: int) -> Tensor:
    """Return the sum over the targets, divided by ``tokens``."""
    summed = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=IGNORED)
    return summed / tokens


def losses(model: nn.Module, shards: Sequence[Shard]) -> list[Tensor]:
    """Return what ``record`` needs: the loss of each shard."""
    return [loss_of(model(tokens), targets, count(shards)) for tokens, targets in shards]


def own(shards: Sequence[Shard], rank: int | None = None, ranks: int | None = None) -> list[Shard]:
    """Return the shards that a data-parallel rank reads."""
    rank, ranks = dist.get_rank() if rank is None else rank, ranks or dist.get_world_size()
    return list(shards[rank * len(shards) // ranks : (rank + 1) * len(shards) // ranks])
