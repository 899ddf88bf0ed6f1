"""A block that several nets of the tests are made of."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """x + down(relu(up(norm(x))))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))
