"""``fp8dist.check``: the consistency check of any model, prepared or not."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable

from fp8dist.consistency.checker import run_check
from fp8dist.consistency.inventory import Scope
from fp8dist.consistency.report import DivergenceReport
from fp8dist.errors import ConfigurationError
from fp8dist.manager import ATTRIBUTE, StateManager
from fp8dist.names import require_choice
from fp8dist.optimizer_hooks import unwrap_optimizers
from fp8dist.parallel.torch_internals import require_checkable
from fp8dist.settings import Policy, report_dir
from fp8dist.sync.groups import GroupLike, SyncGroup, world_size

__all__ = ["check"]

_INSTEAD = (
    "pass group= the ranks that hold the same plain parameters, or groups= for parts of the module; shards have no "
    "replicas, so where all is sharded leave the check out"
)

LAST_GOOD_STEP = "_fp8dist_last_good_step"
"""Where a checked module keeps the step of its last good check."""


def check(
    module: nn.Module,
    group: GroupLike | None = None,
    *,
    groups: Mapping[str, GroupLike | None] | None = None,
    gradients: bool = False,
    optimizer: Any = None,
    step: int | None = None,
    policy: Policy = "raise",
) -> DivergenceReport:
    """Prove that all ranks hold the same parameters, or name what differs, where, and on which ranks. COLLECTIVE.

    Works on any model: plain, in DDP, FSDP or tensor parallel, prepared by this library or another. Compared are
    DTensors across their Replicate axes, parameters that DDP keeps equal across its group, the FP8 state of models
    that ``prepare`` made, and, with ``group``, all other plain parameters across it. FSDP1's shards are never
    compared: they differ by design. When all is well this is one all-reduce of 104 bytes (with further sets of ranks,
    as on meshes, one for each and two more) and a pass over the parameters. ``report.compared`` counts what was
    compared, by kind, and ``report.skipped`` says what was not, and why.

    On one rank there is nothing to compare with, and the report is consistent.

    Args:
        group: the ranks that call this, and that hold the same plain parameters: a ProcessGroup, or a DeviceMesh (all
            axes flattened). None: no ranks are named. Then all ranks of the job call it, and plain parameters outside
            of DDP are not compared.
        groups: fqn patterns of plain parameters that are replicated over other ranks, or over none (None), such as
            ``{"*.experts.*": None}``. The first match counts.
        gradients: compare gradients too: after they are reduced, before they are zeroed.
        optimizer: compare the state of this one, or of several, too.
        step: for the report. The module remembers the last one that was good.
        policy: what to do when ranks differ: "raise", "warn" (one rank logs what differs, and the report has it), or
            "repair" (copy from the majority; raise where there is none).

    Returns:
        The same findings on all ranks.

    Raises:
        DivergenceError: on all ranks, if the policy says so.
        ConfigurationError: on all ranks, when there are several, and nothing of all this is known to be the same on any
            two of them (all is sharded, or plain and no ``group`` was named): says what to pass. Where
            FP8 is switched off one rank warns, once.
    """
    require_choice("policy", policy, ("raise", "warn", "repair"))
    if group is None and world_size() == 1:
        return DivergenceReport(skipped=("there is one rank, or no process group",))
    if any(m._join_config.enable for m in module.modules() if isinstance(m, Joinable)):
        raise ConfigurationError("check() is collective: ranks without data do not reach it inside a Join context")
    require_checkable(module)
    anchor = SyncGroup(dist.group.WORLD if group is None else group)  # type: ignore[arg-type]
    managers: list[StateManager] = [m.__dict__[ATTRIBUTE] for m in module.modules() if ATTRIBUTE in m.__dict__]
    checkers = [manager._checkable().checker for manager in managers]
    scope = Scope(True, gradients, () if optimizer is None else tuple(unwrap_optimizers(optimizer)))
    report = run_check(
        anchor,
        checkers,
        module,
        scope,
        policy,
        _INSTEAD,
        _device_of(module),
        report_dir(),
        step=step or 0,
        last_good=module.__dict__.get(LAST_GOOD_STEP),
        vouched=group is not None,
        groups=groups,
    )
    if checkers and not any(checker.settings.enabled for checker in checkers):
        checkers[0].say_what_is_skipped(report, anchor, scope)
    if report.consistent and step is not None:
        module.__dict__[LAST_GOOD_STEP] = step
    return report


def _device_of(module: nn.Module) -> torch.device:
    with contextlib.suppress(Exception):  # A module that cannot be looked at is reported by all ranks, in the check.
        return next(parameter.device for parameter in module.parameters())
    return torch.device("cpu")
