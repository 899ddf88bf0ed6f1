"""The cost of the checks of steps and weights, and how often they change a cast in an ordinary run.

Runs the same training step with and without the checks, interleaved, and counts torch operations, Python calls and
time. "Without" disables the process-wide optimizer hooks and the check that a weight still fits its scale. It uses one
process and prints Markdown. Run it on an idle machine: ``.venv/bin/python -m scripts.benchmarks.watch``.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import fp8dist
from fp8dist.job.step_watch import StepWatch
from fp8dist.modules.linear_slots import Cast, LinearSlots
from fp8dist.modules.outgrown import Outgrown
from fp8dist.modules.weight_notes import WeightNote
from fp8dist_kernels.formats import Role
from launch.train_gpt.model import GPT, VOCABULARY
from scripts.benchmarks.sync import CountOps

ROUNDS = 15
"""Pairs of steps that are timed."""

STEPS = 60
"""Steps of the runs whose casts are counted."""


def _nothing(*_: object) -> None:  # A Mock would add calls of its own.
    return None


def _never(*_: object) -> Outgrown:
    return Outgrown(None)


def _no(*_: object) -> bool:
    return False


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Disable the checks inside the context."""
    with (
        mock.patch.object(StepWatch, "_before", _nothing),
        mock.patch.object(StepWatch, "_after", _nothing),
        mock.patch.object(LinearSlots, "outgrown", _never),
        mock.patch.object(WeightNote, "changed_between_backwards", _no),
    ):
        yield


def python_calls(action: Callable[[], object]) -> int:
    """Return the number of Python function calls."""
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def torch_ops(action: Callable[[], object]) -> int:
    with CountOps() as counter:
        action()
    return counter.count


def stepper(layers: int, width: int, tokens: int) -> Callable[[], None]:
    """Return a function that runs one training step of a model with ``layers`` Linears of this width."""
    net = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    manager = fp8dist.prepare(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    manager.attach(net, optimizer=optimizer)
    x = torch.randn(tokens, width)

    def step() -> None:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step.manager = manager  # type: ignore[attr-defined]  # It must live as long as the step.
    return step


def compare(layers: int, width: int, tokens: int) -> dict[str, float]:
    """Return operations, Python calls and ms of a step, with and without the checks. Local."""
    step = stepper(layers, width, tokens)
    for _ in range(3):
        step()
    row: dict[str, float] = {"ops": torch_ops(step), "calls": python_calls(step)}
    with unchecked():
        step()
        row |= {"ops_without": torch_ops(step), "calls_without": python_calls(step)}
    checked, bare = [], []
    for _ in range(ROUNDS):
        for times, context in ((checked, contextlib.nullcontext()), (bare, unchecked())):
            with context:
                start = time.perf_counter()
                step()
                times.append(1e3 * (time.perf_counter() - start))
            step.manager._cycle.steps.take_notes()  # type: ignore[attr-defined]  # Else that step looks like a write.
    ratios = [a / b for a, b in zip(checked, bare)]
    return row | {
        "ms": statistics.median(checked),
        "ms_without": statistics.median(bare),
        "ratio": statistics.median(ratios),
    }


def changed_casts(learning_rate: float, zeros: bool) -> tuple[int, int]:
    """Train a small GPT. Return (casts of weights that had a scale but were cast with their own amax, all weight
    casts).

    Args:
        zeros: zero-initialise the projections into the residual stream.
    """
    torch.manual_seed(0)
    model = GPT(layers=3, width=128, heads=4, context=64)
    if zeros:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name.endswith(("attention_out", "mlp_out")):
                nn.init.zeros_(module.weight)
    manager = fp8dist.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    manager.attach(model, optimizer=optimizer)
    quantize = LinearSlots.quantize
    casts = changed = 0

    def counting(self: LinearSlots, x: Tensor, state: Any, *args: Any, **kwargs: Any) -> Cast:
        nonlocal casts, changed
        cast = quantize(self, x, state, *args, **kwargs)
        if kwargs.get("outgrown") is not None:
            place = self.weight_sync.arena.index[self.slots[Role.WEIGHT]]
            casts += 1
            changed += bool(~state.cold) and not torch.equal(
                cast.rows_inv_scale, self.weight_sync.arena.inv_scale[place]
            )
        return cast

    with mock.patch.object(LinearSlots, "quantize", counting):
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, 64, (8, 65), generator=generator).cumsum(1) % VOCABULARY
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return changed, casts


def main() -> None:
    torch.set_num_threads(1)
    print("| Linears | width | tokens | torch operations (without) | Python calls | ms a step | ratio |")
    print("|---|---|---|---|---|---|---|")
    for layers, width, tokens in ((32, 64, 64), (224, 64, 64), (32, 512, 512)):
        row = compare(layers, width, tokens)
        print(
            f"| {layers} | {width} | {tokens} | {row['ops']} ({row['ops_without']}) | {row['calls']} "
            f"({row['calls_without']}) | {row['ms']:.1f} ({row['ms_without']:.1f}) | {row['ratio']:.3f} |"
        )
    print("\n| run | casts of weights that changed | of |\n|---|---|---|")
    for what, rate, zeros in (
        ("learning rate 3e-4", 3e-4, False),
        ("learning rate 3e-3", 3e-3, False),
        ("learning rate 3e-4, zero-initialised projections", 3e-4, True),
    ):
        changed, casts = changed_casts(rate, zeros)
        print(f"| {what} | {changed} | {casts} |")


if __name__ == "__main__":
    main()
