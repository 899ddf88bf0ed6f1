"""Print the results of ``scripts/benchmarks/run`` as Markdown: ``python -m scripts.benchmarks.table FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks import processor


def machine() -> str:
    """What the figures were measured on."""
    return f"{processor.name()}, torch {torch.__version__}, gloo, 2 ranks, one thread each"


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
    print("\n| example job | exposed sync, ms per step | tokens/s |\n|---|---|---|")
    for update in ("same_step", "next_step"):
        summary = json.loads((folder / update / "summary.json").read_text())
        print(f"| {update} | {summary['exposed_sync_ms_per_step']:.3f} | {summary['tokens_per_s']:.0f} |")
    _print_fsdp(folder)
    _print_checks(json.loads((folder / "check.json").read_text()), folder)


def _print_fsdp(folder: Path) -> None:
    sync = json.loads((folder / "fsdp-sync.json").read_text())
    print(f"\n| amaxes of {sync['layers']} sharded weights, and all other slots | collectives | ms |\n|---|---|---|")
    print(f"| fp8dist, whole step ({sync['slots']} slots) | {sync['collectives']} | {sync['step_ms']:.2f} |")
    faster = sync["one_each_ms"] / sync["step_ms"]
    each = f"{sync['layers']} | {sync['one_each_ms']:.1f} ({faster:.0f} times)"
    print(f"| one all-reduce per weight, nothing else | {each} |")
    rows = [json.loads(line) for line in (folder / "fsdp-train.jsonl").read_text().splitlines()]
    print("\n| FSDP2 | gathered per step, MB | peak of a rank's tensors, MiB | peak of its process, MiB |")
    print("|---|---|---|---|")
    for row in rows:
        sizes = f"{row['gathered_bytes'] / 1e6:.1f} | {row['tensors_mib']:.1f} | {row['process_mib']:.0f}"
        print(f"| {row['mode']} | {sizes} |")


def _print_checks(check: dict[str, Any], folder: Path) -> None:
    print("\n| digest of 256 MB of bfloat16, one core | ms | GB/s | against SHA-1 |\n|---|---|---|---|")
    sides = {
        "fp8dist": "digest_ms",
        "SHA-1 over the float32 copy (Megatron-LM's way)": "sha1_ms",
        "a plain read of the memory (torch.sum over int64)": "read_ms",
    }
    for name, key in sides.items():
        ms, faster = check[key], check["sha1_ms"] / check[key]
        print(f"| {name} | {ms:.0f} | {268 / ms:.1f} | {faster:.1f} times |")
    print("\n| clean `fp8dist.check`, 2 ranks | collectives | bytes | ms |\n|---|---|---|---|")
    for row in check["checks"]:
        counts = f"{row['collectives']:g} | {row['bytes']:g} | {row['ms']:.1f}"
        print(f"| {row['tensors']:,} tensors of 100 elements | {counts} |")
    lines = (folder / "same_step" / "metrics.jsonl").read_text().splitlines()
    tokens = 8 * 128 * 2  # In one step of the example job: windows, bytes in each, ranks.
    step_ms = 1e3 * tokens / float(json.loads(lines[-1])["tokens_per_s"])
    header_ms = check["header_ms"]["48"]
    print(f"\nTier 0 in the example job: {header_ms:.3f} ms of a step of {step_ms:.0f} ms, {header_ms / step_ms:.4%}.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
