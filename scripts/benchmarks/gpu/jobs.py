"""Training steps of the example job's model at Llama 3 8B's width, end to end: bf16 and each recipe, in each mode.

There is one rank, so the sync has no collective: its exposed time is that of launch and commit.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import fp8dist
from launch.train_gpt.model import GPT, VOCABULARY
from scripts.benchmarks.gpu.lab import Case, Lab
from scripts.benchmarks.gpu.stopwatch import Comparison, Stopwatch, timing_of
from scripts.benchmarks.llama_shapes import RECIPES

BF16 = "bf16"
MODES = ("eager", "graph", "compiled")
WARM_UP, WINDOWS, STEPS = 3, 10, 3
"""Steps before the first timed one; windows that are timed; steps of a window."""


class Size(NamedTuple):
    """A model, and the tokens of a step."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int


LARGE, SMALL = Size(2, 4096, 32, 2048, 4), Size(1, 32, 2, 16, 2)


class Planned(NamedTuple):
    """A training run."""

    recipe: str
    mode: str

    @property
    def name(self) -> str:
        """The name in a results file."""
        return f"{self.recipe}, {self.mode}"


class Jobs:
    """Tokens per second, memory and exposed sync of training."""

    def plan(self, lab: Lab) -> list[Planned]:
        """See ``Part``. The cheapest modes come first: compiling takes most of the time."""
        if lab.smoke:
            return [Planned(BF16, "eager"), Planned("delayed", "eager"), Planned("delayed", "graph")]
        return [Planned(recipe, mode) for mode in MODES for recipe in (BF16, *RECIPES)]

    def measure(self, lab: Lab, planned: Planned) -> Case:
        """See ``Part``. "timings": "step", and "sync" (launch and commit) for FP8."""
        case = trained(planned, SMALL if lab.smoke else LARGE, lab.stopwatch)
        return {"name": planned.name, "recipe": planned.recipe, "mode": planned.mode, **case}

    def figures(self, cases: Sequence[Case]) -> dict[str, Any]:
        """Return by case: its tokens per second over those of bf16 in the same mode. The interval covers the variation
        of steps within these two runs; it may be larger between runs."""
        timed = [case for case in cases if "step_us" in case]
        plain = {case["mode"]: case["step_us"] for case in timed if case["recipe"] == BF16}
        return {
            case["name"]: Comparison({BF16: plain[case["mode"]], "": case["step_us"]}).ratio(BF16, "")
            for case in timed
            if case["recipe"] != BF16 and case["mode"] in plain
        }


def trained(planned: Planned, size: Size, stopwatch: Stopwatch) -> Case:
    """Train on random bytes, and return the case without its name."""
    torch.manual_seed(0)
    device = stopwatch.device
    on_gpu = device.type == "cuda"
    gc.collect()  # Of earlier cases.
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()  # By the stopwatch.
    with device:
        model = GPT(size.layers, size.width, size.heads, size.context).to(torch.bfloat16)
    manager = None if planned.recipe == BF16 else fp8dist.prepare(model, RECIPES[planned.recipe], skip=("lm_head",))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=on_gpu)
    if manager is not None:
        manager.attach(model, optimizer=optimizer, boundary="manual")
    module: Any = model
    if planned.mode == "compiled":
        torch._dynamo.reset()  # Each case compiles afresh, for its own sizes.
        module = torch.compile(model, fullgraph=True, backend="inductor" if on_gpu else "aot_eager")
    tokens, targets = torch.randint(VOCABULARY, (2, size.batch, size.context), device=device)
    # Only external events can be recorded in a CUDA graph and read outside.
    marks = [stopwatch.event(external=True) for _ in range(2)]

    def step() -> None:
        optimizer.zero_grad()
        module(tokens, targets).backward()
        optimizer.step()
        if manager is not None:
            marks[0].record()
            manager.step()
            marks[1].record()

    for _ in range(WARM_UP):
        step()
    run = captured(step, manager) if on_gpu and planned.mode == "graph" else step
    step_us, sync_us = [], []
    for _ in range(WINDOWS):
        start = stopwatch.now()
        for _ in range(STEPS):
            run()
            if manager is not None and planned.mode == "graph":
                manager.poll()
        step_us.append((stopwatch.now() - start) / STEPS)
        if manager is not None:
            sync_us.append(1e3 * marks[0].elapsed_time(marks[1]))
    peak = torch.cuda.max_memory_allocated() - held if on_gpu else 0
    timings = {name: timing_of(times) for name, times in (("step", step_us), ("sync", sync_us)) if times}
    return {
        "timings": timings,
        "step_us": step_us,
        "tokens_per_s": 1e6 * tokens.numel() / timings["step"]["median_us"],
        "peak_bytes": peak,
        "size": size._asdict(),
    }


def captured(step: Callable[[], None], manager: fp8dist.StateManager | None) -> Callable[[], None]:
    """Return a call that replays a step in a CUDA graph. Each replay needs a ``manager.poll`` after it."""
    if manager is not None:
        manager.poll()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
