"""Host time of FP8Linear against nn.Linear: ``scripts/benchmark host``.

A chain of small layers runs forward and backward on a CPU, with our Triton launches and products replaced by functions
that compute nothing. What is left is the time that a GPU's host would spend between launches. The last line is the
ratio of both.
"""

from __future__ import annotations

import argparse
import cProfile
import logging
import os
import pstats
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import fp8dist
from fp8dist.job.manager import StateManager
from scripts.benchmarks.gpu.stopwatch import repeated
from scripts.benchmarks.markdown import table
from scripts.benchmarks.timing import in_turn, medians

LAYERS = 20
WIDTH = 16
TOKENS = 32
ROUNDS = 25
STEPS = 10
"""Steps per round."""


@dataclass
class Launched:
    """What was launched, in order: names of kernels. The names of products contain "scaled".

    ``moved``: bytes of the tensors that each launch reads and writes, without products. A tensor counts once, also if a
    kernel reads it again from L2.
    """

    names: list[str] = field(default_factory=list)
    sizes: bool = False
    """Whether ``moved`` is kept. The count of host calls must not include it."""
    moved: list[int] = field(default_factory=list)


class _NoKernel:
    """Stands for a Triton kernel: ``kernel[grid](…)`` computes nothing."""

    def __init__(self, name: str, launched: Launched) -> None:
        self._name, self._launched = name, launched

    def __getitem__(self, grid: tuple[int, ...]) -> _NoKernel:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._launched.names.append(self._name)
        if not self._launched.sizes:
            return
        tensors = {id(one): one for one in args if isinstance(one, Tensor)}.values()
        sizes = [one.numel() * one.element_size() for one in tensors]
        self._launched.moved.append(0 if "scaled" in self._name else sum(sizes))


@contextmanager
def without_launches(products: str = "torch") -> Iterator[Launched]:
    """Replace casts and products by functions that return the right shapes and compute nothing.

    ``products``: "torch": FP8Linear multiplies with ``torch._scaled_mm``, as "auto" does on a GPU without measured
    tiles; "triton": with our kernels. Needs TRITON_INTERPRET=1, and the backend "triton".
    """
    from fp8dist_kernels import ops
    from fp8dist_kernels.reference import torch_matmuls
    from fp8dist_kernels.triton import blocks, casts, magnitude, matmuls, mx

    launched = Launched()

    def scaled_mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, **_: Any) -> Tensor:
        launched.names.append("_scaled_mm")
        return torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype)

    def always_torch(*_: Any) -> Callable[..., Tensor]:
        return torch_matmuls.multiply_directly

    kernels = {
        casts: ("_cast_kernel", "_sums_kernel", "_add_up_kernel", "_transpose_kernel"),
        magnitude: ("_amax_kernel",),
        blocks: ("_amax_kernel", "_lines_kernel", "_squares_kernel"),
        mx: ("_mx_kernel", "_mx_scaled_kernel"),
        matmuls: ("scaled_kernel", "block_scaled_kernel", "wide_block_scaled_kernel"),
    }
    with ExitStack() as stack:
        for module, names in kernels.items():
            for name in names:
                stack.enter_context(mock.patch.object(module, name, _NoKernel(name, launched)))
        if products == "torch":
            stack.enter_context(mock.patch.object(torch, "_scaled_mm", scaled_mm))
            stack.enter_context(mock.patch.object(ops, "_multiplier", always_torch))
        matmuls._plan_for.cache_clear()  # Plans hold kernels.
        try:
            yield launched
        finally:
            matmuls._plan_for.cache_clear()


class Chain:
    """Layers in a row, in bf16 on a CPU: plain ones, or FP8Linears under a recipe. Use inside ``without_launches``."""

    def __init__(self, recipe: fp8dist.Recipe | None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(LAYERS)))
        self.x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        self.gradient = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16)
        self.manager: StateManager | None = None
        if recipe is not None:
            self.manager = fp8dist.prepare(self.model, recipe, backend="triton")
            self.manager.attach(self.model, boundary="manual")
            self._warm_up(self.manager)

    def _warm_up(self, manager: StateManager) -> None:
        """End two steps in which every slot has an amax: the host then knows that none is cold."""
        for _ in range(2):
            self.forward_backward()
            for sync in manager._syncs:
                sync.arena.pending.fill_(1.0)
            manager.step()

    def forward_backward(self) -> None:
        """Run forward and backward, with a cast of each weight."""
        self.model(self.x).backward(self.gradient)
        self.x.grad = None
        for parameter in self.model.parameters():
            parameter.grad = None


def main(arguments: list[str] | None = None) -> int:
    """Print host times, where they go, and their ratio. Return 0."""
    parser = argparse.ArgumentParser(prog="scripts/benchmark host", description=__doc__)
    parser.add_argument("--products", choices=("torch", "triton"), default="torch", help="who multiplies")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of both sides in turn; medians are printed")
    options = parser.parse_args(arguments)
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    logging.getLogger("fp8dist").setLevel(logging.ERROR)
    with without_launches(options.products) as launched:
        plain, ours = Chain(None), Chain(fp8dist.DelayedScaling())
        launched.names.clear()
        ours.forward_backward()
        rows = [[name, f"{launched.names.count(name) / LAYERS:g}"] for name in sorted(set(launched.names))]
        print(table(["launched per layer, forward and backward", "times"], rows))
        sides = {name: repeated(chain.forward_backward, STEPS) for name, chain in (("plain", plain), ("ours", ours))}
        times = in_turn(sides, options.rounds)
        profile = cProfile.Profile()  # Slows calls down.
        profile.runcall(sides["ours"])
        pstats.Stats(profile).sort_stats("tottime").print_stats(20)
    linear, fp8 = (1e3 * ms / STEPS / LAYERS for ms in medians(times).values())
    print(f"nn.Linear {linear:.0f} us, FP8Linear {fp8:.0f} us per layer, forward and backward")
    print(f"host ratio {statistics.median(b / a for a, b in zip(times['plain'], times['ours'])):.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
