"""Turn the results of ``scripts/benchmark`` into Markdown."""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch


def machine() -> str:
    """What the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return f"{cpu}, {os.cpu_count()} cores, torch {torch.__version__}, gloo, 2 ranks, one thread each"


def main(folder: Path) -> None:
    """Print the tables."""
    sync: list[dict[str, Any]] = json.loads((folder / "sync.json").read_text())
    torchao: list[dict[str, Any]] = json.loads((folder / "torchao.json").read_text())
    print(f"Machine: {machine()}.\n")
    print(
        "| whole step: launch, sync, commit | history | ms | bare all-reduce, ms | ratio | back to back | torch ops |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in sync:
        print(
            f"| fp8dist, {row['slots']:,} slots | {row['history']} | {row['step_ms']:.2f} | {row['bare_ms']:.2f} "
            f"| {row['ratio']:.2f} | {row['back_to_back_ratio']:.2f} | {row['torch_ops']} |"
        )
    for row in torchao:
        print(
            f"| torchao 0.9.0, 672 slots | {row['history']} | {row['torchao_ms']:.2f} | {row['bare_ms']:.2f} "
            f"| {row['ratio']:.2f} | | |"
        )
    print("\n| main job | exposed sync, ms per step | tokens/s |\n|---|---|---|")
    for update in ("same_step", "next_step"):
        summary = json.loads((folder / update / "summary.json").read_text())
        print(f"| {update} | {summary['exposed_sync_ms_per_step']:.3f} | {summary['tokens_per_s']:.0f} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
