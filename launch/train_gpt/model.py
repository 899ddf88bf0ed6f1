"""A small GPT over bytes: pre-norm blocks, learned positions, no dropout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


class Block(nn.Module):
    """Attention, then an MLP with four times the width, each added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, width] -> the same
        x = x + self.attention_out(self._attend(self.attention_norm(x)))
        return x + self.multiply(self.mlp_norm(x))

    def multiply(self, x: Tensor) -> Tensor:
        """Return the output of the MLP. The same shape."""
        made: Tensor = self.mlp_out(F.gelu(self.mlp_in(x), approximate="tanh"))
        return made

    def _attend(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, time, width of a head]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, time, width)


class GPT(nn.Module):
    """Predicts each next byte. ``forward`` returns the loss, so that DDP sees the whole computation."""

    writes_residual: tuple[str, ...] = ("attention_out.weight", "mlp_out.weight")
    """Ends of the names of weights whose products are added to the residual stream."""

    def __init__(self, layers: int, width: int, heads: int, context: int, block: Any = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.ModuleList(block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """Initialize as GPT-2 does: std 0.02, scaled down for layers that write to the residual stream."""
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                depth = 2 * layers if name.endswith(self.writes_residual) else 1
                nn.init.normal_(parameter, std=0.02 / depth**0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy in nats per byte. Both arguments: int64 [batch, time]."""
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
