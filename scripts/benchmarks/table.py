"""Print the results of ``scripts/benchmark`` as Markdown: ``python -m scripts.benchmarks.table FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks.gpu import environment
from scripts.benchmarks.markdown import table


def main(folder: Path) -> None:
    """Print the tables."""
    sync: dict[str, Any] = json.loads((folder / "sync.json").read_text())
    processor = environment.facts(torch.device("cpu"))["device"]["name"]
    print(f"Machine: {processor}, torch {torch.__version__}, gloo, 2 ranks, one thread each.\n")
    _print_model(sync["model"])
    if not (folder / "torchao.json").exists():  # ``scripts/benchmark sync``
        return
    torchao: list[dict[str, Any]] = json.loads((folder / "torchao.json").read_text())
    managers: list[dict[str, Any]] = sync["managers"]
    head = ["whole step: launch, sync, commit", "history", "started from", "ms", "bare all-reduce, ms", "ratio"]
    rows = [
        [f"fp8dist, {row['slots']:,} slots", str(row["history"]), start, *_step(pair, "step_ms")]
        for row in managers
        for start, pair in row["starts"].items()
    ]
    for line, row in zip(rows[:: len(managers[0]["starts"])], managers):
        line += [f"{row['back_to_back_ratio']:.2f}", str(row["torch_ops"])]
    rows += [["torchao 0.9.0, 672 slots", str(row["history"]), "barrier", *_step(row, "torchao_ms")] for row in torchao]
    print(table([*head, "back to back", "torch ops"], [[*line, "", ""][: len(head) + 2] for line in rows]))
    rows = []
    for update in ("same_step", "next_step"):
        summary = json.loads((folder / update / "summary.json").read_text())
        rows.append([update, f"{summary['exposed_sync_ms_per_step']:.3f}", f"{summary['tokens_per_s']:.0f}"])
    print(table(["example job", "exposed sync, ms per step", "tokens/s"], rows))
    _print_fsdp(folder)
    _print_checks(json.loads((folder / "check.json").read_text()), folder)


def _print_model(starts: dict[str, dict[str, dict[str, float]]]) -> None:
    head = ["224 Linears", *(f"{what} after {start}, µs" for start in starts for what in ("CPU", "wall"))]
    names = next(iter(starts.values()))
    rows = [[n, *(f"{calls[n][key]:.0f}" for calls in starts.values() for key in ("cpu_us", "wall_us"))] for n in names]
    print(table(head, rows))


def _step(row: dict[str, Any], ms: str) -> list[str]:
    return [f"{row[ms]:.2f}", f"{row['bare_ms']:.2f}", f"{row['ratio']:.2f}"]


def _print_fsdp(folder: Path) -> None:
    sync = json.loads((folder / "fsdp-sync.json").read_text())
    faster = f"{sync['one_each_ms']:.1f} ({sync['one_each_ms'] / sync['step_ms']:.0f} times)"
    step = [f"fp8dist, whole step ({sync['slots']} slots)", str(sync["collectives"]), f"{sync['step_ms']:.2f}"]
    each = ["one all-reduce per weight, nothing else", str(sync["layers"]), faster]
    print(
        table([f"amaxes of {sync['layers']} sharded weights, and all other slots", "collectives", "ms"], [step, each])
    )
    rows = [json.loads(line) for line in (folder / "fsdp-train.jsonl").read_text().splitlines()]
    sizes = [
        [row["mode"], f"{row['gathered_bytes'] / 1e6:.1f}", f"{row['tensors_mib']:.1f}", f"{row['process_mib']:.0f}"]
        for row in rows
    ]
    print(table(["FSDP2", "gathered per step, MB", "peak of a rank's tensors, MiB", "peak of its process, MiB"], sizes))


def _print_checks(check: dict[str, Any], folder: Path) -> None:
    sides = {
        "fp8dist": check["digest_ms"],
        "SHA-1 over the float32 copy (Megatron-LM's way)": check["sha1_ms"],
        "a plain read of the memory (torch.sum over int64)": check["read_ms"],
    }
    rows = [[s, f"{ms:.0f}", f"{268 / ms:.1f}", f"{check['sha1_ms'] / ms:.1f} times"] for s, ms in sides.items()]
    print(table(["digest of 256 MB of bfloat16, one core", "ms", "GB/s", "against SHA-1"], rows))
    rows = [
        [
            f"{row['tensors']:,} tensors of 100 elements",
            f"{row['collectives']:g}",
            f"{row['bytes']:g}",
            f"{row['ms']:.1f}",
        ]
        for row in check["checks"]
    ]
    print(table(["clean `fp8dist.check`, 2 ranks", "collectives", "bytes", "ms"], rows))
    lines = (folder / "same_step" / "metrics.jsonl").read_text().splitlines()
    tokens = 8 * 128 * 2  # In one step of the example job: windows, bytes in each, ranks.
    step_ms = 1e3 * tokens / float(json.loads(lines[-1])["tokens_per_s"])
    header_ms = check["header_ms"]["48"]
    print(f"Tier 0 in the example job: {header_ms:.3f} ms of a step of {step_ms:.0f} ms, {header_ms / step_ms:.4%}.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
