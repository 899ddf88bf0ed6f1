"""``fp8dist.check``: check any model, prepared or not, for differences between ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fp8dist.checks.axes import Adopted, Axes
from fp8dist.checks.coherence import Asked, ties_of
from fp8dist.checks.comparison import Comparison, check_alone, run_check
from fp8dist.checks.inventory import Scope
from fp8dist.checks.repair import Repairs
from fp8dist.checks.report import DivergenceReport
from fp8dist.checks.standing import Standing
from fp8dist.common.names import require_choice, require_int
from fp8dist.common.optimizer_hooks import unwrap_optimizers
from fp8dist.errors import ConfigurationError
from fp8dist.job.manager import ATTRIBUTE, WHOLE, Internals, StateManager, managers_in
from fp8dist.parallel.ddp import in_join
from fp8dist.parallel.torch_internals import require_checkable
from fp8dist.state.accord import meet
from fp8dist.state.groups import GroupLike, group_of_this_rank, world_size
from fp8dist.state.roll_call import enrol
from fp8dist.state.settings import Policy, report_dir
from fp8dist.state.slots import clean_fqn

_INSTEAD = (
    "pass group= (the ranks that hold the same plain parameters), or groups= for parts of the module. If all "
    "parameters are sharded without replicas, leave the check out"
)

LAST_GOOD_STEPS = "_fp8dist_last_good_steps"
"""Attribute of a checked module that holds the step of its last good check, by what was compared."""

ALONG_AXES = "_fp8dist_along_axes"
"""Attribute of a checked module that holds what the first comparison along each axis found."""

TIES = "_fp8dist_ties"
"""Attribute of a checked module that was not attached: which names were tied in the first check of coherence."""

REPAIRS = "_fp8dist_repairs"
"""Attribute of a checked module that is not prepared: which tensors the last checks repaired."""


def check(
    module: nn.Module,
    group: GroupLike | None = None,
    *,
    groups: Mapping[str, GroupLike | None] | None = None,
    gradients: bool = False,
    optimizer: Any = None,
    step: int | None = None,
    policy: Policy = "raise",
    buffers: bool = False,
    max_repairs: int | None = None,
    axes: Axes | Mapping[str, GroupLike] | DeviceMesh | None = None,
    coherence: bool = False,
) -> DivergenceReport:
    """Check that all ranks hold the same parameters. If not, report what differs, where, and on which ranks.
    COLLECTIVE.

    Works on any model: plain, in DDP, FSDP or tensor parallel, prepared by this library or another. It compares
    DTensors across their Replicate axes, parameters that DDP keeps equal across its group, those of Megatron-Core
    across the ranks that hold copies, the FP8 state of prepared models, and, with ``group``, all other plain parameters
    across that group. Shards of FSDP1 are compared only with their copies (``HYBRID_SHARD``): others differ by design.
    If nothing differs, the check costs a pass over the parameters and one all-reduce of 120 bytes. With further sets of
    ranks, as on meshes, it is one for each set and two more. ``report.compared`` counts what was compared, by kind.
    ``report.skipped`` says what was not compared, and why.

    The report is ``consistent`` only if everything that was to be compared was compared on some ranks, and is equal:
    not if all parameters are shards that no other rank holds, and not on one rank. Then ``report.unverified`` or
    ``report.skipped`` says why, and nothing is raised.

    Args:
        group: the ranks that call this and hold the same plain parameters: a ProcessGroup, or a DeviceMesh (all axes
            flattened). None: all ranks of the job call it, and plain parameters outside of DDP are not compared. A
            prepared model, or a part of it, that was attached with a wrapper counts as wrapped.
        groups: fqn patterns of plain parameters that are replicated over other ranks, or over none (None), such as
            ``{"*.experts.*": None}``. The first match counts.
        gradients: also compare gradients. Call ``check`` after they are reduced and before they are zeroed.
        optimizer: also compare the state of this optimizer, or of a list of optimizers.
        step: number of optimizer steps done, for the report. The module remembers the last step at which each kind of
            tensor was good.
        policy: what to do if ranks differ. "raise"; "warn": one rank logs the differences, and the report has them;
            "repair": copy from the majority, raise if there is none.
        buffers: compare buffers, which are replicated like plain parameters. If a forward changes buffers, as BatchNorm
            does, ranks differ by design until the next forward: DDP then copies the buffers of its first rank.
        max_repairs: as for ``StateManager.check``. The module remembers which tensors were repaired.
        axes: also compare plain parameters that were equal on the ranks of these axes in the first check with them, see
            ``fp8dist.Axes``: ``{"tp": group}``, or a DeviceMesh with names. The same names on all ranks. None: those of
            ``prepare``. The module remembers what was equal.
        coherence: also compare tensors of each rank with one another, bit for bit, also if there is one rank: weights
            with their master copies, in ``optimizer`` (Megatron-Core's, DeepSpeed's for BF16 and ZeRO 1 and 2,
            Transformer Engine's) or set as ``parameter.main_param``; weights that FSDP2 keeps gathered with their
            shards; kept FP8 casts with their weights; and names that were tied at ``attach``, or in the first such
            check. ``report.skipped`` names optimizers that no rule can read. A finding has the kind "coherence", and
            no repair.

    Returns:
        A report with the same findings on all ranks.

    Raises:
        DivergenceError: on all ranks, if the policy says so.
        ConfigurationError: on all ranks, if there are several and nothing is known to be the same on any two of them
            (all is sharded, or plain and without ``group``). The message says what to pass. If FP8 is switched off, one
            rank warns once instead. Also raised inside a Join context.
        SyncError: a rank did not take part, and the collective timed out. The message names the missing ranks.
    """
    given = Axes.of(axes)
    require_choice("policy", policy, ("raise", "warn", "repair"))
    if max_repairs is not None:
        require_int("max_repairs", max_repairs, 1, what="None or a number of checks")
    optimizers = () if optimizer is None else tuple(unwrap_optimizers(optimizer))
    scope = Scope(True, gradients, buffers, optimizers, coherence=_asked(module, optimizer) if coherence else None)
    if group is None and world_size() == 1:
        return check_alone(module, scope, Standing(), policy, step or 0)
    if in_join(module):
        raise ConfigurationError("check() is collective: ranks without data do not reach it inside a Join context")
    require_checkable(module)
    if LAST_GOOD_STEPS not in module.__dict__:
        module.__dict__[LAST_GOOD_STEPS] = {}
        enrol()  # So that an error can name the host of a missing rank.
    anchor = group_of_this_rank(dist.group.WORLD if group is None else group)  # type: ignore[arg-type]
    managers = managers_in(module)
    cycles = [Internals(manager).settled() for manager in managers]
    checkers = [cycle.checker for cycle in cycles]
    within = _names_in(module, managers) if len(managers) > 1 else ()  # Their slots may have equal names.
    meet(anchor, "fp8dist.check()")
    last_good = module.__dict__[LAST_GOOD_STEPS]
    for of in [of for of, at in last_good.items() if step is not None and at > step]:
        del last_good[of]  # The run has gone back to an earlier step since.
    device, vouched = _device_of(module), group is not None
    adopted = next((checker.adopted for checker in checkers if checker.adopted is not None), None)
    if given is not None:
        memory = checkers[0].along if checkers else module.__dict__.setdefault(ALONG_AXES, {})
        adopted = Adopted(given, memory)
    compared = Comparison(
        anchor, [cycle.verdicts for cycle in cycles], module, scope, device, step or 0, step, last_good,
        vouched=vouched, groups=groups, adopted=adopted, within=within,
    )  # fmt: skip
    repairs = checkers[0].repairs if checkers else module.__dict__.setdefault(REPAIRS, Repairs())
    standing = checkers[0].standing if checkers else Standing()  # Without a manager, each check starts anew.
    report = run_check(compared, policy, _INSTEAD, report_dir(), standing, repairs, max_repairs)
    if not compared.enabled:
        checkers[0].warn_of_skipped(report, anchor)
    return report


def _asked(module: nn.Module, optimizer: Any) -> Asked:
    """Return what a check of coherence compares. A model remembers which names were tied, unless ``attach`` was given
    it, and knows that."""
    checkers = [Internals(manager).cycle.checker for manager in managers_in(module)]
    names = _named(module)
    # The names of a part, or of a model around the attached one, mean other parameters.
    known = [of.asked.ties for of in checkers if (whole := of.state.job.whole) is not None and _named(whole) == names]
    ties = next(filter(None, known), None) or module.__dict__.setdefault(TIES, ties_of(module))
    return Asked([one for of in checkers for one in of.asked.optimizers], ties).also(optimizer)


def _named(module: nn.Module) -> dict[str, int]:
    """Return the id of each parameter by its name without the components of wrappers."""
    return {clean_fqn(name): id(one) for name, one in module.named_parameters(remove_duplicate=False)}


def _names_in(module: nn.Module, managers: Sequence[StateManager]) -> list[str]:
    """Return where in ``module`` the model of each manager is, as the beginning of names: "" or "actor."."""
    found: dict[Any, str] = {}
    for path, part in module.named_modules():
        manager, name = part.__dict__.get(WHOLE, part).__dict__.get(ATTRIBUTE), clean_fqn(path)
        found.setdefault(manager, f"{name}." if name else "")
    return [found[manager] for manager in managers]


def _device_of(module: nn.Module) -> torch.device:
    with contextlib.suppress(Exception):  # The check itself reports unreadable modules, on all ranks.
        return next(parameter.device for parameter in module.parameters())
    return torch.device("cpu")
