"""The screen of ``fp8dist watch`` as text, of a made-up run."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

from fp8dist.runs.report.live import LiveRun
from fp8dist.runs.report.screen import screen
from fp8dist.runs.run_format import EVENTS, FORMAT, HEADER, METRICS, RANKS, SCALES, VERSION

STEPS = 240


def watch_screen() -> str:
    """Return a code block with the screen at 80 columns and 24 lines."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs" / "run-17"
        _write_run(path)
        run = LiveRun(path)
        run.read()
        shown = "\n".join(line.plain for line in screen(run, 80, 24))
    return f"```text\n{shown}\n```"


def _write_run(path: Path) -> None:
    path.mkdir(parents=True)
    places = {
        "2.mlp.up:grad_output": {"amax": "Infinity", "amax_rank": 5, "amax_microbatch": 3},
        "3.mlp.down:weight": {"saturated": 0.0012, "saturated_rank": 1, "saturated_microbatch": 0},
        "0.attention.qkv:grad_output": {"underflow": 0.048, "underflow_rank": 2, "underflow_microbatch": 1},
    }
    modules = [f"{i}.{m}" for i in range(4) for m in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")]
    slots = [f"{module}:{role}" for module in modules for role in ("input", "weight", "grad_output")]
    largest = [{"slot": f"model.blocks.{s}", "format": "e4m3", "max": 448.0} for s in slots]
    header = {"format": FORMAT, "version": VERSION, "ranks": 8, "precision": "fp8", "recipe": "DelayedScaling"}
    (path / HEADER).write_text(json.dumps({**header, "device": "cpu", "slots": largest}))
    steps = [
        {"step": n, "loss": 8 * math.exp(-n / 80) + 0.4 + 0.3 * math.sin(1.7 * n), "step_ms": 812.4, "grad_norm": 1.25}
        for n in range(1, STEPS + 1)
    ]
    steps[-1] |= {"proven": STEPS - 1, "checked": 200}
    seen = [
        {"step": STEPS, "slot": f"model.blocks.{s}", "amax": 0.25 + 0.05 * (i % 31), "scale": 200.0}
        | {"saturated": 0.0, "underflow": 0.0, "amax_rank": i % 8, "amax_microbatch": i % 4, **places.get(s, {})}
        for i, s in enumerate(slots)
    ]
    compared = {"parameter": 196, "slot": len(slots)}
    waits = [2.1, 1.9, 2.4, 2.2, 0.1, 2.0, 2.3, 1.8]
    events = [
        {"step": 200, "kind": "checked", "compared": compared, "compared_bytes": {"parameter": 1_420_000_000}},
        {"step": 200, "kind": "saved", "path": "checkpoints/step200"},
        {"step": 236, "kind": "nonfinite", "slots": ["model.blocks.2.mlp.up:grad_output"], "rank": 5, "microbatch": 3},
    ]
    ranks = [{"step": STEPS, "ranks": list(range(8)), "sync_wait_ms": waits, "step_ms": [812.4] * 8}]
    for name, lines in ((METRICS, steps), (SCALES, seen), (RANKS, ranks), (EVENTS, events)):
        (path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
