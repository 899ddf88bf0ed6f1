"""The cost of the checks of steps and weights, and how often they change a cast in an ordinary run.

Runs the same training step with and without the checks, interleaved, and counts torch operations, Python calls and
time. "Without" disables the process-wide optimizer hooks and the check that a weight still fits its scale. It uses one
process and prints Markdown. Run it on an idle machine: ``.venv/bin/python -m scripts.benchmarks.watch``.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor, nn

import fp8dist
from fp8dist.job.step_watch import StepWatch
from fp8dist.modules.casters import Cast, Caster, Request
from fp8dist.modules.outgrown import Outgrown
from fp8dist.modules.weight_notes import WeightNote
from fp8dist.modules.write_policy import WritePolicy
from fp8dist_kernels.formats import Role
from launch.train_gpt.model import GPT, VOCABULARY
from scripts.benchmarks.markdown import table
from scripts.benchmarks.sync import CountOps
from scripts.benchmarks.timing import in_turn, medians
from tests.support.counted import counted_calls

ROUNDS = 15
"""Pairs of steps that are timed."""

STEPS = 60
"""Steps of the runs whose casts are counted."""


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Disable the checks inside the context."""
    patched = mock.patch.object
    with (  # Functions: a Mock would add calls of its own.
        patched(StepWatch, "_before", lambda *_: None),
        patched(StepWatch, "_after", lambda *_: None),
        patched(WritePolicy, "limits", lambda *_: Outgrown(None)),
        patched(WeightNote, "changed_between_backwards", lambda *_: False),
    ):
        yield


def counts(action: Callable[[], object]) -> list[int]:
    """Return the number of torch operations, and of calls of Python functions."""
    with CountOps() as counter:
        action()
    return [counter.count, counted_calls(action)["call"]]


def compare(layers: int, width: int, tokens: int) -> list[str]:
    """Return a row of the table: a step of a model with ``layers`` Linears of this width, with and without checks."""
    net = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    manager = fp8dist.prepare(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    manager.attach(net, optimizer=optimizer)
    x = torch.randn(tokens, width)

    def step() -> None:
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def step_unchecked() -> None:
        with unchecked():
            step()

    for _ in range(3):
        step()
    with_checks = counts(step)
    with unchecked():
        step()
        without = counts(step)
    # Without the notes of the step before, an unchecked one would look like a write to the weights.
    take_notes = manager._cycle.steps.take_notes
    times = in_turn({"checked": step, "unchecked": step_unchecked}, ROUNDS, take_notes)
    ratio = statistics.median(a / b for a, b in zip(times["checked"], times["unchecked"]))
    found = [f"{mine} ({other})" for mine, other in zip(with_checks, without)]
    ms = "{checked:.1f} ({unchecked:.1f})".format(**medians(times))
    return [str(layers), str(width), str(tokens), *found, ms, f"{ratio:.3f}"]


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
    original = Caster.cast
    casts = changed = 0

    def counting(self: Caster, x: Tensor, request: Request) -> Cast:
        nonlocal casts, changed
        state, cast = request.state, original(self, x, request)
        if request.role is Role.WEIGHT:
            casts += 1
            changed += bool(~state.cold) and not torch.equal(cast.rows_inv_scale, 1 / state.scale)
        return cast

    with mock.patch.object(Caster, "cast", counting):
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, 64, (8, 65), generator=generator).cumsum(1) % VOCABULARY
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return changed, casts


def main() -> None:
    torch.set_num_threads(1)
    rows = [compare(*size) for size in ((32, 64, 64), (224, 64, 64), (32, 512, 512))]
    head = ["Linears", "width", "tokens", "torch operations (without)", "Python calls", "ms a step", "ratio"]
    print(table(head, rows))
    runs = (
        ("learning rate 3e-4", 3e-4, False),
        ("learning rate 3e-3", 3e-3, False),
        ("learning rate 3e-4, zero-initialised projections", 3e-4, True),
    )
    rows = [[what, *map(str, changed_casts(rate, zeros))] for what, rate, zeros in runs]
    print(table(["run", "casts of weights that changed", "of"], rows))


if __name__ == "__main__":
    main()
