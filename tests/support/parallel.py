"""Helpers for ranks on meshes: observed communication, and FP8 training in plain torch, for all layouts.

``PlainFP8`` shares no code with the library: it computes what one process with the batches of all ranks would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.support.linear import E4M3, E5M2, LIMIT, assert_product, dequantised

ROLES = ("input", "weight", "grad_output")


@cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh, created once per shape and process, because communicators are expensive."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@cache
def part_of(*parts: tuple[int, ...]) -> Any:
    """Return the group of the part that has this rank, of a partition of all ranks; created once per process, as a
    mesh. COLLECTIVE."""
    groups = {part: dist.new_group(list(part)) for part in parts}
    return next(group for part, group in groups.items() if dist.get_rank() in part)


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a DTensor, detached; other tensors unchanged."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same_on_all_ranks(value: Any) -> None:
    """Fail unless all ranks of the job call this with an equal value."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    assert gathered == [value] * len(gathered)


def assert_affine(actual: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
    """Assert that ``actual`` is ``a @ b.T + bias``, as in ``assert_product``. The bias adds one term to each sum."""
    a, b = a.reshape(-1, a.shape[-1]).double(), b.double()
    if bias is not None:
        a = torch.cat([a, torch.ones(a.shape[0], 1, dtype=a.dtype)], 1)
        b = torch.cat([b, bias.detach().double()[:, None]], 1)
    assert_product(actual.reshape(-1, actual.shape[-1]), a, b)


def assert_sum_of_tokens(actual: Tensor, gradient: Tensor) -> None:
    """Assert that ``actual`` is a bias's gradient."""
    rows = gradient.reshape(-1, gradient.shape[-1])
    assert_affine(actual[None], torch.ones(1, rows.shape[0]), rows.t())


class _Product(torch.autograd.Function):
    """y = x Wᵀ of dequantised operands, computed in float64 and rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: PlainFP8Linear) -> Tensor:
        layer.saw("input", x)
        layer.saw("weight", weight)
        ctx.layer = layer
        ctx.a, ctx.b = dequantised(x, E4M3, layer.scale["input"]), dequantised(weight, E4M3, layer.scale["weight"])
        return (ctx.a @ ctx.b.t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        layer = ctx.layer
        layer.saw("grad_output", gradient)
        g = dequantised(gradient, E5M2, layer.scale["grad_output"])
        a = ctx.a.reshape(-1, ctx.a.shape[-1])
        return (g @ ctx.b).to(gradient.dtype), (g.reshape(-1, g.shape[-1]).t() @ a).to(gradient.dtype), None


class PlainFP8Linear(nn.Module):
    """A Linear with delayed scaling. Scales start at 1, the weight's scale at its current amax."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.windows: dict[str, list[float]] = {role: [] for role in ROLES}
        self._open: dict[str, float] = {}
        one = torch.tensor(1.0)
        self.scale = {"input": one, "grad_output": one, "weight": LIMIT[E4M3] / linear.weight.detach().abs().max()}

    def saw(self, role: str, x: Tensor) -> None:
        self._open[role] = max(self._open.get(role, 0.0), float(x.detach().abs().max()))

    def end_step(self) -> None:
        """End the step: the amaxes of all ranks give the next scales."""
        for role, amax in self._open.items():
            self.windows[role].append(amax)
            limit = torch.tensor(LIMIT[E5M2 if role == "grad_output" else E4M3])
            self.scale[role] = limit / torch.tensor(max(self.windows[role]))
        self._open = {}

    def forward(self, x: Tensor) -> Tensor:
        y = _Product.apply(x, self.weight, self)
        return y if self.bias is None else y + self.bias


def make_plain(model: nn.Module, names: Sequence[str]) -> dict[str, PlainFP8Linear]:
    """Replace these Linears, keeping their parameters."""
    layers = {}
    for name in names:
        parent, _, child = name.rpartition(".")
        layers[name] = PlainFP8Linear(model.get_submodule(name))  # type: ignore[arg-type]
        setattr(model.get_submodule(parent), child, layers[name])
    return layers


class Block(nn.Module):
    """x + down(relu(up(norm(x)))) on [batch, sequence, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


LINEARS = tuple(f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down"))


def make_blocks(seed: int = 0) -> Blocks:
    """Return the same blocks for the same seed."""
    torch.manual_seed(seed)
    return Blocks()


def tokens(replica: int, index: int) -> tuple[Tensor, Tensor]:
    """Return (x, target), both [2, 8, 32]: batch ``index`` of the data-parallel replica ``replica``."""
    generator = torch.Generator().manual_seed(1000 * replica + index)
    x = torch.randn(2, 8, 32, generator=generator) * (1 + 0.3 * ((7 * index + 3 * replica) % 5))
    return x, torch.randn(2, 8, 32, generator=generator)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss large enough that gradients survive E5M2 at scale 1."""
    return 16 * nn.functional.mse_loss(output, target)


@dataclass
class PlainRun:
    """Results of the reference training."""

    losses: list[list[float]]
    windows: dict[tuple[str, str], list[float]]
    parameters: dict[str, Tensor]


def train_plain(replicas: int, steps: int, make_optimizer: Any) -> PlainRun:
    """Train in one process with the batches of all replicas: losses[step][replica]."""
    model = make_blocks()
    layers = make_plain(model, LINEARS)
    optimizer = make_optimizer(model.parameters())
    losses = []
    for step in range(steps):
        losses.append([])
        for replica in range(replicas):
            x, target = tokens(replica, step)
            loss = loss_of(model(x), target)
            loss.backward()  # Not the loss's mean over replicas: each rank's FP8 gradients are those of its own loss.
            losses[-1].append(float(loss.detach()))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= replicas
        optimizer.step()
        optimizer.zero_grad()
        for layer in layers.values():
            layer.end_step()
    windows = {(name, role): layer.windows[role] for name, layer in layers.items() for role in ROLES}
    return PlainRun(losses, windows, {n: p.detach().clone() for n, p in model.named_parameters()})
