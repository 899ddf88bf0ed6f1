"""Made-up folders of runs, in the format of ``fp8dist.Recorder``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROLES = ("grad_output", "input", "weight")
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
GOOD = 300
"""The last good step of the planted divergence."""
EVERY, RANKS = 10, 4
"""Steps between observations; ranks of the job."""


def lines(path: Path, objects: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        for one in objects:
            file.write(json.dumps(one, allow_nan=False) + "\n")


def load(step: int, module: str, tokens: list[int], idle: list[int], age: Any = None) -> dict[str, Any]:
    """Return a line of experts.jsonl."""
    return {"step": step, "module": module, "tokens": tokens, "idle": idle, "age": age}


def module_names(layers: int) -> list[str]:
    """Return the names of the Linears of a small transformer."""
    return [f"blocks.{layer}.{part}" for layer in range(layers) for part in ("qkv", "attention_out", "up", "down")]


def _format(slot: str) -> str:
    return "e5m2" if slot.endswith("grad_output") else "e4m3"


def header(modules: list[str], /, **more: Any) -> dict[str, Any]:
    """Return run.json."""
    slots = [f"{module}:{role}" for module in modules for role in ROLES]
    gemms = dict.fromkeys(("fprop", "dgrad", "wgrad"), "fp8")
    listed: list[dict[str, Any]] = [{"module": name, "flops": 2e9, "gemms": gemms, "reason": ""} for name in modules]
    listed.append(
        {"module": "head", "flops": 4e9, "gemms": dict.fromkeys(gemms, "high"), "reason": "skipped by a pattern"}
    )
    return {
        "format": "fp8dist run",
        "version": 1,
        "started": 1.7e9,
        "ranks": RANKS,
        "hosts": [f"node{rank // 2}" for rank in range(RANKS)],
        "device": "NVIDIA H200",
        "precision": "fp8",
        "recipe": "DelayedScaling(history_len=16)",
        "every": 10,
        "versions": {"fp8dist": "0.1.0", "torch": "2.13.0", "triton": None, "python": "3.11.7"},
        "peaks": {"high": 989e12, "fp8": 1979e12},
        "modules": listed,
        "slots": [{"slot": slot, "format": _format(slot), "max": LARGEST[_format(slot)]} for slot in slots],
        **more,
    }


def made_run(
    folder: Path,
    *,
    steps: int = 400,
    layers: int = 3,
    change: Callable[[int, str, dict[str, Any]], Any] = lambda step, slot, line: None,
) -> Path:
    """Write a run with an outlier, a NaN, a fallback, a spike, a resume, checkpoints and a divergence. ``change``: gets
    (step, slot, line) of each line of scales.jsonl, and may change the line."""
    folder.mkdir(parents=True)
    modules = module_names(layers)
    (folder / "run.json").write_text(json.dumps(header(modules)))
    rng, due = np.random.default_rng(0), range(EVERY, steps + 1, EVERY)
    lines(folder / "metrics.jsonl", (_step(step, rng) for step in range(1, steps + 1)))
    lines(folder / "scales.jsonl", _observations(modules, due, rng, change))
    waits = (
        {
            "step": step,
            "time": 1.7e9 + step,
            "ranks": list(range(RANKS)),
            "sync_wait_ms": [0.3 if rank == 2 else float(rng.uniform(8, 12)) for rank in range(RANKS)],
            "step_ms": [float(rng.uniform(300, 310)) for _ in range(RANKS)],
        }
        for step in due
    )
    lines(folder / "ranks.jsonl", waits)
    lines(folder / "events.jsonl", _events(steps, modules))
    return folder


def _step(step: int, rng: Any) -> dict[str, Any]:
    loss = 2.5 + 3 * math.exp(-step / 80) + float(rng.normal(0, 0.02)) + (3.0 if step == 212 else 0.0)
    due: dict[str, Any] = {}
    if step % EVERY == 0:
        counts = {"cold_slots": 0, "nonfinite_amaxes": int(step >= 210), "fallbacks": int(step >= 211)}
        checked = step // 100 * 100 or None
        due = {"proven": min(step - 1, 349), "checked": None if checked is None else min(checked, GOOD), **counts}
    return {
        "step": step,
        "time": 1.7e9 + step / 3 - (600 if step > 250 else 0),  # The clock goes back.
        "loss": "NaN" if step == 213 else loss,
        "grad_norm": float(rng.uniform(0.5, 1.5)) * (20 if step == 211 else 1),
        "tokens": 8192,
        "step_ms": float(rng.uniform(300, 310)),
        **due,
    }


def _observations(modules: list[str], steps: Iterable[int], rng: Any, change: Any) -> Iterable[Any]:
    for step in steps:
        for place, (module, role) in enumerate((module, role) for module in modules for role in ROLES):
            slot = f"{module}:{role}"
            amax = float(
                np.float32(np.exp(rng.normal(0, 0.3)) * {"grad_output": 1e-3, "input": 3.0, "weight": 0.3}[role])
            )
            scale = float(np.float32(LARGEST[_format(slot)] / (amax * rng.uniform(1, 3))))
            outlier = slot == "blocks.1.down:input" and 150 <= step < 200
            lost = 0.02 * (place % 7) / 7 * (5 if module == "blocks.2.down" and step > 100 else 1)
            line = {
                "step": step,
                "slot": slot,
                "amax": amax * (64 if outlier else 1),
                "scale": scale,
                "saturated": 0.004 if outlier else 0.0,
                "underflow": float(np.float32(lost * rng.uniform(0.5, 1.0))),
                **{
                    f"{name}_rank": 0 if role == "weight" else 3 if place % 5 == 0 else int(rng.integers(RANKS))
                    for name in ("amax", "saturated", "underflow")
                },
                **{f"{name}_microbatch": int(rng.integers(4)) for name in ("amax", "saturated", "underflow")},
            }
            if (slot, step) == ("blocks.2.qkv:grad_output", 210):
                line |= {"amax": "NaN", "amax_rank": 3, "amax_microbatch": 1}
            if step == 10 and role == "grad_output":
                line |= {"scale": None, "amax": None, "amax_rank": None, "amax_microbatch": None}
            change(step, slot, line)
            yield line


def _events(steps: int, modules: list[str]) -> Iterable[dict[str, Any]]:
    where = {"slots": ["blocks.2.qkv:grad_output"], "rank": 3, "microbatch": 1}
    finding = {
        "step": 350,
        "kind": "scale",
        "name": "blocks.0.qkv:input",
        "ranks": [1],
        "reference_rank": 0,
        "hosts": ["node0"],
        "detail": "scale: 20.000001907348633 against 20.0",
        "last_good_step": GOOD,
        "sides": [[0, 2, 3], [1]],
        "field": "scale",
        "index": [5],
        "value": 20.000001907348633,
        "expected": 20.0,
        "ulp": 1,
    }
    report = {"consistent": False, "findings": [finding], "compared": [["scale", len(modules) * 3]], "repaired": []}
    found: list[dict[str, Any]] = [{"step": 0, "kind": "start", "resumed_after": None, "ranks": 4}]
    for step in range(100, steps, 100):
        if step <= GOOD:
            found.append({"step": step, "kind": "checked", "compared": {"parameter": 40, "slot": 3 * len(modules)}})
        found.append({"step": step, "kind": "saved", "path": f"checkpoints/step-{step:08d}", "digest": f"{step:064x}"})
    found += [
        {"step": 210, "kind": "nonfinite", **where},
        {"step": 211, "kind": "fallback", "slots": ["blocks.2.qkv:grad_output"]},
        {"step": 212, "kind": "spike", "loss": 5.8, "median": 2.7},
        {"step": 213, "kind": "nonfinite_loss", "loss": "NaN", "median": 2.7},
        {"step": 255, "kind": "jump", "slots": [f"{name}:input" for name in modules]},
        {"step": 250, "kind": "start", "resumed_after": 250, "ranks": 4},
        {"step": 260, "kind": "a kind of tomorrow"},
        {"step": 350, "kind": "diverged", "report": report},
    ]
    return ({"time": 1.7e9 + place, **one} for place, one in enumerate(found))
