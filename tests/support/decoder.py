"""A small decoder for tests of exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Block(nn.Module):
    """Grouped-query attention with rotary embeddings, and a gated MLP. ``attention``: how it masks."""

    def __init__(self, width: int, attention: str, dropout: float, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.attention, self.dropout, self.activation = attention, dropout, activation
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.RMSNorm(width, 1e-6)
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.key, self.value = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width // 2)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width)
        angles = torch.arange(16)[:, None] / 10000 ** (torch.arange(0, 6, 2) / 6)
        self.cos, self.sin = (torch.cat((table, table), -1) for table in (angles.cos(), angles.sin()))
        self.register_buffer("causal", torch.tril(torch.ones(16, 16)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.out(self.attend(self.norm(x))), self.dropout)
        hidden = self.mlp_norm(x)
        return x + F.dropout(self.down(self.activation(self.gate(hidden)) * self.up(hidden)), self.dropout)

    def attend(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = (f(x).unflatten(-1, (-1, 6)).transpose(1, 2) for f in (self.query, self.key, self.value))
        q, k = (rotated(y, self.cos[:length], self.sin[:length]) for y in (q, k))
        mask, causal = None, self.causal[:length, :length]
        if self.attention == "mask":
            mask = causal.bool()
        elif self.attention == "float mask":
            mask = (1 - causal) * torch.finfo(x.dtype).min
        if self.attention in ("by hand", "where"):
            k, v = (y.repeat_interleave(2, 1) for y in (k, v))
            scores = q @ k.transpose(-2, -1) / math.sqrt(6)
            if self.attention == "where":
                scores = torch.where(causal == 0, torch.finfo(x.dtype).min, scores)
            else:
                scores = scores.masked_fill(causal == 0, -math.inf)
            found = F.softmax(scores, -1, dtype=torch.float32).type_as(v) @ v
        else:
            found = F.scaled_dot_product_attention(
                q, k, v, mask, self.dropout, is_causal=self.attention == "causal", enable_gqa=True
            )
        return found.transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    """Two blocks of width 24 with 4 heads, a vocabulary of 36, and a head that is tied to the embedding."""

    def __init__(
        self,
        attention: str = "causal",
        dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = F.silu,
        width: int = 24,
        layers: int = 2,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(36, width)
        self.blocks = nn.ModuleList(Block(width, attention, dropout, activation) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 36, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * math.sqrt(24)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
