"""What exact arithmetic costs, by width: a step of a small transformer modulo P against float64: ``scripts/benchmark
exact``. Prints CPU times of this process, the best of three."""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fp8dist import exact
from scripts.benchmarks.markdown import table
from scripts.benchmarks.timing import timed

TOKENS, VOCABULARY, LAYERS = (2, 64), 256, 2


class _Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, batch_first=True, norm_first=True)
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embed(tokens)))
        return logits


def times(width: int) -> tuple[float, float]:
    """Return the ms of a step, forward and backward: in float64, and modulo P in float32 storage."""
    tokens = torch.randint(VOCABULARY, TOKENS, generator=torch.Generator().manual_seed(0))
    found = []
    for precise in (True, False):
        model = _Model(width).double() if precise else _Model(width)
        if not precise:
            exact.to_residues(model)

        def step(model: nn.Module = model, precise: bool = precise) -> None:
            with nullcontext() if precise else exact.arithmetic():
                cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()

        found.append(min(timed(step, time.process_time) for _ in range(3)))
    return found[0], found[1]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256, 1024], help="multiples of 32")
    rows = []
    for width in parser.parse_args().widths:
        plain, modular = times(width)
        rows.append([str(width), f"{plain:,.0f} ms", f"{modular:,.0f} ms", f"{modular / plain:.1f}"])
    print(table(["width", "float64", "modulo P", "ratio"], rows))


if __name__ == "__main__":
    main()
