"""``fp8dist.check``: the consistency check of any model, prepared or not."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from fp8dist.checker import Policy, Scope, add_arenas, add_module, holdings, run_check
from fp8dist.consistency.holdings import Holdings
from fp8dist.consistency.inventory import Inventory
from fp8dist.consistency.report import DivergenceReport
from fp8dist.errors import ConfigurationError
from fp8dist.groups import GroupLike, SyncGroup, world_size
from fp8dist.manager import ATTRIBUTE, StateManager
from fp8dist.settings import report_dir

__all__ = ["check"]


def check(
    module: nn.Module,
    group: GroupLike | None = None,
    *,
    groups: Mapping[str, GroupLike | None] | None = None,
    gradients: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    step: int = 0,
    policy: Policy | None = None,
) -> DivergenceReport:
    """Prove that all ranks hold the same parameters, or name what differs, where, and on which ranks. COLLECTIVE.

    Works on any model: plain, in DDP, FSDP or tensor parallel, prepared by this library or another. Compared are
    DTensors across their Replicate axes, parameters that DDP keeps equal across its group, the FP8 state of models
    that ``prepare`` made, and, with ``group``, all other plain parameters across it. FSDP1's shards are never
    compared: they differ by design. When all is well this is one all-reduce of 100 bytes per distinct set of ranks,
    and a pass over the parameters.

    Args:
        group: the ranks that call this, and that hold the same plain parameters. None: all ranks of the job call it,
            and plain parameters outside of DDP are not compared.
        groups: fqn patterns of plain parameters that are replicated over other ranks, or over none (None), such as
            ``{"*.experts.*": None}``. The first match counts.
        gradients: compare gradients too: after they are reduced, before they are zeroed.
        optimizer: compare its state too.
        step: for the report.
        policy: "raise", "warn", "repair" (copy from the majority; raise where there is none). None: as "warn": one rank
            logs what differs, and the report says it.

    Returns:
        The same report on all ranks.

    Raises:
        DivergenceError: on all ranks, if the policy says so.
        ConfigurationError: nothing here is known to be replicated.
    """
    if policy not in (None, "raise", "warn", "repair"):
        raise ConfigurationError(f"policy must be one of raise, warn, repair, or None, got {policy!r}")
    if group is None and world_size() == 1:
        return DivergenceReport(skipped=("there is one rank, or no process group",))
    anchor = SyncGroup(dist.group.WORLD if group is None else group)  # type: ignore[arg-type]
    managers: list[StateManager] = [m.__dict__[ATTRIBUTE] for m in module.modules() if ATTRIBUTE in m.__dict__]

    def build() -> Holdings:
        inventory = Inventory(anchor, vouched=group is not None, groups=groups)
        for manager in managers:
            add_arenas(inventory, manager.checkable().syncs)
        add_module(inventory, module, Scope(True, gradients, optimizer))
        return holdings(inventory, step)

    verdicts = [found for manager in managers for _, found in manager.checkable().checker.read_verdicts()]
    known = [finding for report in verdicts for finding in report.findings]
    report = run_check(anchor, build, policy, report_dir(), known)
    for manager in managers:  # A repair writes weights behind their casts' back.
        manager.checkable().mode.invalidate_casts()
    if report.consistent and not report.compared and anchor.size > 1:
        raise ConfigurationError(
            "nothing of this module is known to be replicated: pass group= the ranks that hold the same parameters "
            f"(not compared: {'; '.join(report.skipped) or 'it has no parameters'})"
        )
    return report
