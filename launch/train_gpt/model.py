"""A small GPT over bytes: pre-norm blocks, learned positions, no dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from launch.train_gpt.mixture import Mixture

__all__ = ["GPT", "VOCABULARY", "Block"]

VOCABULARY = 256

BALANCE = 0.01
"""Weight of a mixture's imbalance, as in Switch Transformer (arXiv 2101.03961)."""


class Block(nn.Module):
    """Attention, then an MLP with four times the width, each added to the residual stream. With ``experts``, the MLP is
    a mixture of so many, of which each token visits ``top_k``."""

    def __init__(self, width: int, heads: int, experts: int = 0, top_k: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        if experts:
            self.mlp = Mixture(width, experts, top_k)
        else:
            self.mlp_in = nn.Linear(width, 4 * width)
            self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, width] -> the same
        x = x + self.attention_out(self._attend(self.attention_norm(x)))
        return x + self._multiply(self.mlp_norm(x))

    def _multiply(self, x: Tensor) -> Tensor:
        if hasattr(self, "mlp"):
            mixed: Tensor = self.mlp(x)
            return mixed
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

    def __init__(self, layers: int, width: int, heads: int, context: int, experts: int = 0, top_k: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.ModuleList(Block(width, heads, experts, top_k) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """Initialize as GPT-2 does: std 0.02, scaled down for layers that write to the residual stream."""
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                writes_residual = name.endswith(("attention_out.weight", "mlp_out.weight", "down_proj"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if writes_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy in nats per byte. Both arguments: int64 [batch, time].

        In training, the gradient of mixtures is also that of BALANCE times their imbalance, which the loss leaves out.
        """
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        for mixture in self.modules() if self.training else ():
            if isinstance(mixture, Mixture):
                loss = loss + BALANCE * (mixture.imbalance - mixture.imbalance.detach())  # Adds zero.
        return loss
