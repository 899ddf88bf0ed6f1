"""A check from beginning to end: compare, keep the evidence, mend, say it once, raise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from fp8dist.consistency.conclusion import conclude, save_evidence
from fp8dist.consistency.contents import ArenaContent
from fp8dist.consistency.holdings import Holdings
from fp8dist.consistency.inventory import Inventory
from fp8dist.consistency.protocol import check_replicas
from fp8dist.consistency.repair import repair
from fp8dist.consistency.replication import Excuse
from fp8dist.consistency.report import DivergenceReport
from fp8dist.divergence import Finding
from fp8dist.errors import ConfigurationError
from fp8dist.sync.arena_sync import ArenaSync
from fp8dist.sync.groups import SyncGroup

__all__ = ["Policy", "Scope", "add_arenas", "add_module", "on_device", "run_check"]

Policy = Literal["raise", "warn", "repair"]


@dataclass(frozen=True)
class Scope:
    """What a check compares beside FP8 state."""

    parameters: bool = True
    gradients: bool = False
    optimizers: tuple[torch.optim.Optimizer, ...] = ()


def run_check(
    anchor: SyncGroup,
    build: Callable[[], Holdings],
    policy: Policy,
    report_dir: str | None,
    known: Sequence[Finding] = (),
    tell: Callable[[DivergenceReport], None] | None = None,
    instead: str | None = None,
) -> DivergenceReport:
    """The same report on all ranks. COLLECTIVE over ``anchor``.

    Args:
        known: what this rank knows already to differ, from a failed sync.
        tell: is called with a report of differences, once the message is out and before anybody raises.
        instead: what to do where no rank has anything to compare, for the error. None: it is no error.

    Raises:
        DivergenceError: on all ranks, if ranks differ and the policy says so.
        ConfigurationError: on all ranks, if there are several, and none has anything to compare.
    """
    held: list[Holdings] = []

    def building() -> Holdings:
        held[:] = [build()]
        return held[0]

    def evidence(finding: Finding) -> dict[str, Any] | None:
        sets = held[0].sets if held else ()
        return next((found for s in sets if (found := s.evidence(finding)) is not None), None)

    compared = check_replicas(anchor, building, known, everything=policy == "repair")
    report = compared.report
    if compared.nothing and instead is not None:
        why = "; ".join(report.skipped) or "it has no parameters"
        raise ConfigurationError(
            f"check() has nothing to compare, because nothing here is known to be the same on several ranks ({why}): "
            f"{instead}"
        )
    if report.consistent:
        return report
    save_evidence(report, report_dir, evidence)
    if policy == "repair":
        report = repair(anchor, building, compared)
    conclude(report, anchor, raises=policy in ("raise", "repair"), tell=tell)
    return report


def add_arenas(inventory: Inventory, syncs: Sequence[ArenaSync]) -> None:
    """The FP8 state that ranks share."""
    for sync in syncs:
        if sync.communicates:
            assert sync.group is not None
            label = f"FP8 state of {', '.join(sync.patterns) or 'all modules'}"
            inventory.add_content(label, sync.group, ArenaContent(sync.arena))
        else:
            inventory.skip("slot", Excuse("that this rank shares with no other"), len(sync.arena))


def add_module(inventory: Inventory, module: nn.Module, scope: Scope) -> None:
    """What ``scope`` says of a module."""
    if scope.parameters or scope.gradients:
        inventory.add_parameters(module, scope.parameters, scope.gradients)
    for optimizer in scope.optimizers:
        inventory.add_optimizer(module, optimizer)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Collectives go through this GPU, if it is one."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
