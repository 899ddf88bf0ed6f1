"""The two state updates of a step, launch and commit, of an arena with many slots."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8dist.recipe import DelayedScaling
from fp8dist.state.arena import Arena
from fp8dist.state.slots import Slot, SlotSpec
from fp8dist_kernels.formats import E4M3, E5M2
from scripts.benchmarks.gpu.lab import Case, Lab, same_bits
from scripts.benchmarks.gpu.stopwatch import Action, Timing, back_to_back

__all__ = ["Planned", "Updates"]

IN_A_ROW = 20
SAMPLES = 20
CHECKED_STEPS = 5


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

    name = "update"

    def plan(self, lab: Lab) -> list[Planned]:
        """Return a typical size first, then a large one."""
        sizes = ((6, 10),) if lab.smoke else ((1000, 1024), (100_000, 1024))
        return [Planned(update, *size) for size in sizes for update in ("commit", "launch")]

    def measure(self, lab: Lab, planned: Planned) -> Case:
        """See ``Part``. Timings: "graph" (one of many in a CUDA graph) and "eager" (one of many separate launches),
        both with a warm cache; "graph_cold" (a graph with one launch) with a cold cache."""
        case: Case = {
            "name": planned.name,
            "update": planned.update,
            "slots": planned.slots,
            "history": planned.history,
        }
        arena = _arena(planned, lab.device, "triton")
        problem = _wrong_after_steps(arena, _arena(planned, torch.device("cpu"), "torch"))
        if problem:
            return {**case, "problem": f"wrong: {problem}"}
        arena.pending.fill_(1.0)
        arena.launch()
        reduced = arena.send.clone()

        action: Action = functools.partial(arena.commit, reduced) if planned.update == "commit" else arena.launch

        repeats, samples = (2, 2) if lab.smoke else (IN_A_ROW, SAMPLES)
        timings = {"eager": back_to_back(lab.stopwatch, action, repeats, samples).as_dict()}
        try:
            timings["graph"] = _replayed(lab, action, repeats, samples).as_dict()
            timings["graph_cold"] = _replayed(lab, action, 1, samples).as_dict()
        except RuntimeError as error:
            case["not_captured"] = str(error).strip().splitlines()[0][:160]
        return {**case, "timings": timings}

    def figures(self, cases: Sequence[Case]) -> dict[str, Any]:
        """Return µs by update and number of slots."""
        return {
            f"{case['update']}_{case['slots']}_{way}_us": timing["median_us"]
            for case in cases
            for way, timing in case.get("timings", {}).items()
        }


def _arena(planned: Planned, device: torch.device, backend: str) -> Arena:
    roles = (("input", E4M3), ("weight", E4M3), ("grad_output", E5M2))
    specs = [SlotSpec(Slot(f"layers.{i // 3:06d}", roles[i % 3][0]), roles[i % 3][1]) for i in range(planned.slots)]
    arena = Arena(specs, DelayedScaling(history_len=planned.history), backend)
    arena.place(device)
    return arena


def _wrong_after_steps(mine: Arena, theirs: Arena) -> str | None:
    """Return the names of arrays that differ after the same random steps on both devices; None if all are equal."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(CHECKED_STEPS):
        amaxes = torch.rand(len(mine), generator=generator).exp2() * 10
        special = torch.tensor([-1.0, 0.0, torch.inf, torch.nan])
        chosen = torch.rand(len(mine), generator=generator) < 0.2
        amaxes[chosen] = special[torch.randint(4, (int(chosen.sum()),), generator=generator)]
        for arena in (mine, theirs):
            arena.pending.copy_(amaxes)
            arena.launch()
            arena.commit(arena.send)
    state, expected = mine.copied_state(), theirs.copied_state()
    differing = [name for name in expected if not same_bits(state[name].cpu(), expected[name])]
    if not same_bits(mine.send.cpu(), theirs.send):
        differing.append("send")
    return f"{', '.join(differing)} differ from the CPU's" if differing else None


def _replayed(lab: Lab, action: Action, repeats: int, samples: int) -> Timing:
    replay = lab.stopwatch.replay(action, repeats)
    (times,) = lab.stopwatch.rounds([replay], samples)
    return Timing.of([time / repeats for time in times])
