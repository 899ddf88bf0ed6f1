"""Training steps of the example job's model at Llama 3 8B's width, end to end: bf16 and each recipe, in each mode.

Each case runs in its own process, so that one crash loses one case::

    python -m scripts.benchmarks.gpu.jobs RECIPE MODE --out FILE [--smoke]

There is one rank, so the sync has no collective: its exposed time is that of launch and commit.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fp8dist
from launch.train_gpt.model import GPT, VOCABULARY
from scripts.benchmarks.gpu.lab import Case, Lab
from scripts.benchmarks.gpu.stopwatch import Comparison, Timing
from scripts.benchmarks.llama_shapes import RECIPES
from scripts.results_files import write

BF16 = "bf16"
MODES = ("eager", "graph", "compiled")
WARM_UP, WINDOWS, STEPS = 3, 10, 3
"""Steps before the first timed one; windows that are timed; steps of a window."""

LONGEST, GRACE = 90.0, 15.0
"""Time limit of a case in seconds, and the seconds by which the last case may exceed the part's time."""


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

    name = "job"

    def plan(self, lab: Lab) -> list[Planned]:
        """See ``Part``. The cheapest modes come first: compiling takes most of the time."""
        if lab.smoke:
            return [Planned(BF16, "eager"), Planned("delayed", "eager"), Planned("delayed", "graph")]
        return [Planned(recipe, mode) for mode in MODES for recipe in (BF16, *RECIPES)]

    def measure(self, lab: Lab, planned: Planned) -> Case:
        """See ``Part``. "timings": "step", and "sync" (launch and commit) for FP8."""
        case: Case = {"name": planned.name, "recipe": planned.recipe, "mode": planned.mode}
        with tempfile.TemporaryDirectory(prefix="fp8dist-job-") as folder:
            out = Path(folder, "case.json")
            command = [sys.executable, "-m", "scripts.benchmarks.gpu.jobs", *planned, "--out", str(out)]
            command += ["--smoke"] if lab.smoke else []
            limit = min(LONGEST, lab.left + GRACE)
            try:
                done = subprocess.run(command, timeout=limit, stderr=subprocess.PIPE, text=True, check=False)
            except subprocess.TimeoutExpired:
                return {**case, "problem": f"{planned.name}: not done after {limit:.0f} s"}
            if done.returncode or not out.exists():
                print(done.stderr, file=sys.stderr, flush=True)
                *_, last = ["", *done.stderr.strip().splitlines()]
                # Not raised: a CUDA error of that process does not lose this one's device.
                return {**case, "problem": f"{planned.name}: status {done.returncode}: {last[:300]}"}
            return {**case, **json.loads(out.read_text())}

    def figures(self, cases: Sequence[Case]) -> dict[str, Any]:
        """Return by case: its tokens per second over those of bf16 in the same mode. The interval covers the variation
        of steps within these two processes; it may be larger between processes."""
        timed = [case for case in cases if "step_us" in case]
        plain = {case["mode"]: case["step_us"] for case in timed if case["recipe"] == BF16}
        return {
            case["name"]: Comparison({BF16: plain[case["mode"]], "": case["step_us"]}).ratio(BF16, "")
            for case in timed
            if case["recipe"] != BF16 and case["mode"] in plain
        }


def trained(planned: Planned, size: Size, device: torch.device) -> Case:
    """Train on random bytes, and return the case without its name."""
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    with device:
        model = GPT(size.layers, size.width, size.heads, size.context).to(torch.bfloat16)
    manager = None if planned.recipe == BF16 else fp8dist.prepare(model, RECIPES[planned.recipe], skip=("lm_head",))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=on_gpu)
    if manager is not None:
        manager.attach(model, optimizer=optimizer, boundary="manual")
    module: Any = model
    if planned.mode == "compiled":
        module = torch.compile(model, fullgraph=True, backend="inductor" if on_gpu else "aot_eager")
    tokens, targets = torch.randint(VOCABULARY, (2, size.batch, size.context), device=device)
    syncs = _Marks(on_gpu)

    def step() -> None:
        optimizer.zero_grad()
        module(tokens, targets).backward()
        optimizer.step()
        if manager is not None:
            syncs.start()
            manager.step()
            syncs.end()

    for _ in range(WARM_UP):
        step()
    run = step
    if planned.mode == "graph":
        run = _captured(step, manager) if on_gpu else step
    waits = torch.cuda.synchronize if on_gpu else lambda: None
    step_us, sync_us = [], []
    for _ in range(WINDOWS):
        waits()
        start = time.perf_counter()
        for _ in range(STEPS):
            run()
            if manager is not None and planned.mode == "graph":
                manager.poll()
        waits()
        step_us.append(1e6 * (time.perf_counter() - start) / STEPS)
        if manager is not None:
            sync_us.append(syncs.elapsed())
    peak = torch.cuda.max_memory_allocated() if on_gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step_time = Timing.of(step_us)
    return {
        "timings": {"step": step_time.as_dict(), **({"sync": Timing.of(sync_us).as_dict()} if sync_us else {})},
        "step_us": step_us,
        "tokens_per_s": 1e6 * tokens.numel() / step_time.median,
        "peak_bytes": peak,
        "size": size._asdict(),
    }


def _captured(step: Callable[[], None], manager: fp8dist.StateManager | None) -> Callable[[], None]:
    if manager is not None:
        manager.poll()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


class _Marks:
    """Measures the time between two points of a step on the device, including waits for the host; on a CPU by the
    host's clock."""

    def __init__(self, on_gpu: bool) -> None:
        # Only external events can be recorded in a CUDA graph and read outside.
        self._events = [torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)] if on_gpu else None
        self._times = [0.0, 0.0]

    def start(self) -> None:
        self._mark(0)

    def end(self) -> None:
        self._mark(1)

    def _mark(self, which: int) -> None:
        if self._events is None:
            self._times[which] = time.perf_counter()
        else:
            self._events[which].record()

    def elapsed(self) -> float:
        """Return the µs between the last ``start`` and ``end``. The device must have passed both."""
        if self._events is None:
            return 1e6 * (self._times[1] - self._times[0])
        return 1e3 * self._events[0].elapsed_time(self._events[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one case in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=(BF16, *RECIPES))
    parser.add_argument("mode", choices=MODES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args(arguments)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    size = SMALL if options.smoke else LARGE
    write(options.out, trained(Planned(options.recipe, options.mode), size, device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
