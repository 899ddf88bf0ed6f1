"""The two state updates of a step, launch and commit, of an arena with many slots.

``scripts/gpu check`` compares their results with the CPU's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fp8dist.state.arena import Arena
from fp8dist.state.recipe import DelayedScaling
from fp8dist.state.slots import Slot, SlotSpec
from fp8dist_kernels.formats import E4M3, E5M2
from scripts.benchmarks.gpu.lab import Case, Lab, summary_of
from scripts.benchmarks.gpu.stopwatch import Action, compare, compare_in_a_row, repeated

IN_A_ROW = 100
SMALLEST = "smallest op"
"""The smallest operation that torch can launch. An update that takes no longer on the device is bound by its launch."""
LAUNCH_BOUND = f"{SMALLEST} / graph"


@dataclass(frozen=True)
class Planned:
    """``update``: "commit" or "launch"."""

    update: str
    slots: int
    history: int

    @property
    def name(self) -> str:
        """The name in a results file."""
        return f"{self.update}, {self.slots} slots, history {self.history}"


class Updates:
    """Launch (the snapshot that the collective sends) and commit."""

    def plan(self, lab: Lab) -> list[Planned]:
        """Return a typical size first, then a large one."""
        sizes = ((6, 10),) if lab.smoke else ((1000, 1024), (100_000, 1024))
        return [Planned(update, *size) for size in sizes for update in ("commit", "launch")]

    def measure(self, lab: Lab, planned: Planned) -> Case:
        """See ``Part``. Timings: "graph" (one of many in a CUDA graph), "eager" (one of many separate launches) and
        ``SMALLEST``, all with a warm cache; "graph_cold" (a graph with one launch) with a cold cache. "ratios": the
        time of ``SMALLEST`` over "graph"."""
        case: Case = {"name": planned.name, **asdict(planned)}
        arena = _arena(planned, lab.device)
        arena.pending.fill_(1.0)
        arena.launch()
        reduced = arena.send.clone()

        action: Action = functools.partial(arena.commit, reduced) if planned.update == "commit" else arena.launch
        repeats = 2 if lab.smoke else IN_A_ROW
        adding = functools.partial(torch.zeros((), device=lab.device).add_, 1)
        actions: dict[str, Action] = {"eager": repeated(action, repeats), SMALLEST: repeated(adding, repeats)}
        actions["graph"] = lab.stopwatch.replay(action, repeats)
        cold = compare(lab.stopwatch, {"graph_cold": lab.stopwatch.replay(action, 1)}, lab.seconds / 2)
        warm = compare_in_a_row(lab.stopwatch, actions, lab.seconds / 2, repeats)
        case["ratios"] = {LAUNCH_BOUND: warm.ratio(SMALLEST, "graph")}
        return {**case, "timings": {**warm.timings(), **cold.timings()}}

    def figures(self, cases: Sequence[Case]) -> dict[str, Any]:
        """Return, by update and number of slots, the µs of each timing, and the ratio of ``SMALLEST`` to the update."""
        figures: dict[str, Any] = {}
        for case in cases:
            name = f"{case['update']}_{case['slots']}" if "timings" in case else ""
            figures |= {f"{name}_{way}_us": timing["median_us"] for way, timing in case.get("timings", {}).items()}
            if summary := summary_of([case], LAUNCH_BOUND):
                figures[name] = summary
        return figures


def _arena(planned: Planned, device: torch.device) -> Arena:
    roles = (("input", E4M3), ("weight", E4M3), ("grad_output", E5M2))
    specs = [SlotSpec(Slot(f"layers.{i // 3:06d}", roles[i % 3][0]), roles[i % 3][1]) for i in range(planned.slots)]
    arena = Arena(specs, DelayedScaling(history_len=planned.history), "triton")
    arena.place(device)
    return arena
