"""Nets, batches and digests of the reference runs, and the canary: a digest of this machine's arithmetic.

The canary is plain torch: neither this file nor its process may import fp8dist. So no change in fp8dist can change it.

Weights and batches are small integers over powers of two, so they are the same on every machine. They use no random
normal numbers, logarithms or cosines.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

STEPS = 20


class Block(nn.Module):
    """x + down(relu(up(norm(x))))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """A block between two Linears. Takes 32 features."""

    def __init__(self, width: int = 48, inner: int = 64, out: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(32, width)
        self.block = Block(width, inner)
        self.last = nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.first(x)))


class Tower(nn.Module):
    """Two blocks of 32 features, for tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(32, 64), Block(32, 64)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


NETS: dict[str, Callable[[], nn.Module]] = {"net": Net, "wide": lambda: Net(256, 256, 256), "tower": Tower}
"""In the wide net, the shards of two ranks are whole blocks of 128 x 128."""

SHAPES = {"net": ((16, 32), (16, 16)), "wide": ((16, 32), (16, 256)), "tower": ((2, 8, 32), (2, 8, 32))}
"""Shapes of (x, target)."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=2**-8, momentum=0.875, foreach=False),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=2**-7, foreach=False),
}


def integers(generator: torch.Generator, *shape: int) -> Tensor:
    """Return float32 numbers of this shape: integers from -64 to 64, divided by 64."""
    return torch.randint(-64, 65, shape, generator=generator).float() / 64


def make_net(name: str, seed: int = 0) -> nn.Module:
    """Return the net of this seed; the same on every machine."""
    net = NETS[name]()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(integers(generator, *module.weight.shape) / (4 if module.in_features <= 64 else 16))
                if module.bias is not None:
                    module.bias.copy_(integers(generator, module.out_features) / 8)
    return net


def batch(name: str, rank: int, index: int) -> tuple[Tensor, Tensor]:
    """Return (x, target) for a net. Magnitudes change from batch to batch and from rank to rank."""
    generator = torch.Generator().manual_seed(1000 * rank + index + 1)
    x, target = (integers(generator, *shape) for shape in SHAPES[name])
    return x * (1 + (7 * index + 3 * rank) % 5), target


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss large enough that gradients do not vanish in FP8."""
    return 16 * nn.functional.mse_loss(output, target)


def digest(items: Iterable[tuple[str, Any]]) -> str:
    """Return the SHA-256 of names and values: of tensors dtype, shape and every bit, of floats every bit."""
    taken = hashlib.sha256()
    for name, value in items:
        if isinstance(value, Tensor):
            value = value.detach().contiguous()
            what = f"{value.dtype} {tuple(value.shape)}".encode()
            content = value.reshape(-1).view(torch.uint8).numpy().tobytes()
        else:
            what = type(value).__name__.encode()
            content = (value.hex() if isinstance(value, float) else str(value)).encode()
        taken.update(b"%s\n%s\n%d\n" % (name.encode(), what, len(content)) + content)
    return taken.hexdigest()


def canary() -> str:
    """Return the digest of 20 steps of each net with each optimizer in float32, and of products of FP8 numbers."""
    parts = [part for net in NETS for optimizer in OPTIMIZERS for part in _trained(net, optimizer)]
    return digest([*parts, *_products()])


def _trained(name: str, optimizer_name: str) -> list[tuple[str, str]]:
    net = make_net(name)
    optimizer = OPTIMIZERS[optimizer_name](net.parameters())
    losses = []
    for index in range(STEPS):
        loss = loss_of(net(batch(name, 0, index)[0]), batch(name, 0, index)[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert all(map(math.isfinite, losses)), losses
    return [
        (f"{name} {optimizer_name} losses", digest((str(i), loss) for i, loss in enumerate(losses))),
        (f"{name} {optimizer_name} parameters", digest(net.named_parameters())),
    ]


def _products() -> list[tuple[str, Tensor]]:
    """Multiply dequantised operands as FP8 Linears on a CPU do: in every Linear's shape, whole and halved.

    Does not use ``torch._scaled_mm``: fp8dist does not call it on a CPU by default, so it could skip tests needlessly.
    """
    linears = {
        tuple(module.weight.shape)
        for name in NETS
        for module in make_net(name).modules()
        if isinstance(module, nn.Linear)
    }
    halves = {
        (n // a, k // b) for n, k in linears for a, b in ((1, 1), (2, 1), (1, 2)) if n // a >= 16 and k // b >= 16
    }
    found = []
    for n, k in sorted(halves):
        generator = torch.Generator().manual_seed(n * k)
        x, weight, gradient = (_in_fp8(integers(generator, *shape)) for shape in ((16, k), (n, k), (16, n)))
        found.append((f"y {n} {k}", x @ weight.t()))
        found.append((f"dx {n} {k}", gradient @ weight.t().contiguous().t()))
        found.append((f"dw {n} {k}", gradient.t().contiguous() @ x.t().contiguous().t()))
    return found


def _in_fp8(x: Tensor) -> Tensor:
    """Cast to E4M3 and back, with a scale that is not a power of two."""
    scale = 448 / x.abs().max() / 3
    return (x * scale).to(torch.float8_e4m3fn).float() * scale.reciprocal()


def main() -> None:
    """Print the canary's digest."""
    torch.set_num_threads(1)
    found = canary()
    assert "fp8dist" not in sys.modules
    print(found)
