"""How much of the matmuls runs in FP8, and the MFU. Attention's own products are in neither."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fp8dist.common.numbers import from_json
from fp8dist.runs.report.numbers import RunNumbers

GEMMS = ("fprop", "dgrad", "wgrad")

FORMULA = (
    "MFU = tokens per second * sum over modules and GEMMs of (FLOPs per token / peak of the GEMM's precision) / ranks: "
    "the time that the FLOPs would take at the device's peaks, FP8 GEMMs at the FP8 peak and the others at the bf16 "
    "peak, over the measured time. FLOPs are those of the Linears, and of the experts that a token visits. The "
    "products inside attention are not counted; the formula of PaLM (Chowdhery et al. 2022, appendix B) counts them. "
    "Recomputed activations are not counted either."
)


class Module(NamedTuple):
    """``flops``: per token and GEMM, of a mixture those of all experts. ``gemms``: "fp8" or "high" for each of GEMMS,
    "" if unknown. ``experts``: of a mixture; 0 of others."""

    name: str
    flops: float
    gemms: tuple[str, ...]
    reason: str
    experts: int = 0


class Use(NamedTuple):
    """``share``: of the FLOPs that run in FP8, 0 to 1. ``mfu``: None with the reason in ``why``."""

    share: float | None
    mfu: float | None
    why: str


def modules_of(header: Mapping[str, Any]) -> list[Module]:
    """Return the modules that the header lists, as far as they are readable."""
    listed = header.get("modules")
    found = []
    for one in listed if isinstance(listed, list) else ():
        if isinstance(one, dict) and isinstance(one.get("module"), str):
            given: Any = one.get("gemms")
            kinds = [given.get(gemm) if isinstance(given, dict) else None for gemm in GEMMS]
            gemms = tuple(kind if kind in ("fp8", "high") else "" for kind in kinds)
            flops = from_json(one.get("flops"))
            flops, experts = flops if 0 <= flops < math.inf else math.nan, one.get("experts")
            experts = experts if type(experts) is int and 0 < experts < 1 << 53 else 0
            found.append(Module(one["module"], flops, gemms, str(one.get("reason") or ""), experts))
    return found


def use_of(run: RunNumbers) -> Use:
    """Return the share of FLOPs in FP8 and the MFU."""
    modules, visited = modules_of(run.folder.header), _visited(run)
    unknown = next((one for one in modules if one.experts and one.name not in visited), None)
    if unknown is not None:
        known = "watch the run" if "fp8" in unknown.gemms else "they are in high precision, which counts no tokens"
        return Use(None, None, f"how many experts of {unknown.name} a token visits is not known: {known}")
    flops = _flops(modules, visited)
    total = sum(flops.values())
    if not 0 < total < math.inf or flops[""]:
        return Use(None, None, "run.json does not list the FLOPs and the precision of each module")
    share = flops["fp8"] / total
    peaks = run.folder.header.get("peaks")
    peak = {kind: from_json(peaks.get(kind)) if isinstance(peaks, dict) else math.nan for kind in ("high", "fp8")}
    device = str(run.folder.header.get("device", "unknown"))
    for kind, part in flops.items():
        if part and not 0 < peak[kind] < math.inf:
            return Use(
                share, None, f"the {'FP8' if kind == 'fp8' else 'bf16'} peak of the device ({device}) is not known"
            )
    ranks = run.folder.header.get("ranks")
    rate = _tokens_per_second(run)
    if rate is None or type(ranks) is not int or not 1 <= ranks < 1 << 53:
        return Use(share, None, "metrics.jsonl has no tokens and step_ms: log them, as in log(step, tokens=…)")
    seconds = sum(part / peak[kind] for kind, part in flops.items() if part)
    return Use(share, rate * seconds / ranks, "")


def _flops(modules: Sequence[Module], visited: Mapping[str, float]) -> dict[str, float]:
    """Return the FLOPs per token by precision: "fp8", "high", "" if it is unknown."""
    flops = dict.fromkeys(("fp8", "high", ""), 0.0)
    for module in modules:
        part = min(visited[module.name] / module.experts, 1) if module.experts else 1
        for gemm in module.gemms:
            flops[gemm] += module.flops * part
    return flops


def _visited(run: RunNumbers) -> dict[str, float]:
    """Return how many experts of each mixture a token visits."""
    tokens = run.metrics.columns["tokens"]
    known = tokens[np.isfinite(tokens) & (tokens > 0)]
    of_step = float(np.median(known)) if len(known) else math.nan
    ranks = run.folder.header.get("ranks")

    def part(counted: int | None) -> float:
        """Return the share of the step's tokens that ``counted`` ranks have: experts may have a group of their own."""
        return min(counted / ranks, 1) if counted and type(ranks) is int and ranks > 0 else 1

    return {one.module: one.tokens / (of_step * part(one.ranks)) for one in run.mixtures if len(known)}


def _tokens_per_second(run: RunNumbers) -> float | None:
    """Return the median over the steps, which leaves out the first steps and those that save."""
    columns = run.metrics.columns
    with np.errstate(invalid="ignore", divide="ignore"):
        rates = np.where(columns["step_ms"] > 0, columns["tokens"] / (columns["step_ms"] / 1e3), np.nan)
    for found in (rates, columns["tokens_per_s"]):
        known = found[np.isfinite(found)]
        if len(known):
            return float(np.median(known))
    return None
