"""Tables about audits: what is found, what it costs, and how much is sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fp8dist import DelayedScaling
from fp8dist.checks.works import part_of_product
from fp8dist.state.settings import AUDIT_BYTES
from scripts.benchmarks.llama_shapes import Layer, products_of
from scripts.benchmarks.markdown import table

LAYERS = (Layer("8B", 4096, 14336), Layer("70B", 8192, 28672))
"""Gate, or up, of Llama 3's MLPs."""

TOKENS = 8192


def faults(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of which faults are found, and how many steps later."""
    head = ["fault", "`--inject`", "sync", "check", "audit"]
    lines = []
    for row in rows:
        cells = ["-" if row["header"] != [None] and mode != "header" else _later(row[mode]) for mode in MODES]
        lines.append([row["fault"], f"`{row['inject']}`", *cells])
    return table(head, lines)


MODES = ("header", "check", "audit")


def _later(found: Sequence[int | None]) -> str:
    """Return how many steps later a fault was found, as text."""
    known = [one for one in found if one is not None]
    if not known:
        return "not found"
    if len(known) < len(found):
        return f"in {len(known)} of {len(found)} runs"
    if len(known) > 1:
        return f"{', '.join(map(str, sorted(known)))} steps later"
    return {0: "in its step", 1: "1 step later"}.get(known[0], f"{known[0]} steps later")


def cost_of(cost: dict[str, Any] | None) -> str:
    """Return the table of what audits cost."""
    if cost is None:
        return table(["example job", "cost"], [])
    low, _, high = cost["quartiles"]
    rows = [
        ["step without audits", f"{cost['step_ms']:.1f} ms"],
        ["one audit: copies, digests, the repeated work, collectives", f"{cost['audit_ms']:.2f} ms"],
        ["in each step: the hooks on casts and products", f"{1e3 * cost['listening_ms']:.0f} µs"],
        [f"share of the step with `audit_every={cost['every']}`", f"{cost['share']:.3%}"],
        [
            "step with an audit in each, against one without",
            f"{cost['ratio_every_step']:.3f} ({low:.3f} to {high:.3f})",
        ],
        ["sent by a rank in an audit", f"{cost['bytes_mean'] / 1e3:,.0f} kB in {cost['calls']:g} collectives"],
    ]
    machine = f"{cost['machine']}, torch {cost['torch']}, gloo, 2 ranks, one thread each; CPU times"
    what = f"means of {cost['audits']} audits, one of each site of {cost['linears']} Linears"
    return table(["example job", f"{machine}; {what}"], rows)


def sizes() -> str:
    """Return the table of how much an audit sends of the products of large layers."""
    head = [f"{TOKENS:,} tokens", "product", "whole", f"block in {AUDIT_BYTES >> 20} MiB: share of the result"]
    rows = []
    for layer in LAYERS:
        for product in products_of(DelayedScaling(), layer, TOKENS):
            a, b = (torch.empty(size, product.k, dtype=torch.int8, device="meta") for size in (product.m, product.n))
            parts = part_of_product(a, b, AUDIT_BYTES, 0)
            share = math.prod(end - first for first, end in parts) / (product.m * product.n)
            rows.append(
                [f"gate or up of {layer.name}", product.gemm, f"{(a.nbytes + b.nbytes) / 1e6:.0f} MB", f"{share:.0%}"]
            )
    return table(head, rows)
