"""A check: compares what ranks must hold alike, on request, and acts on differences."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from fp8dist.checks.axes import Adopted
from fp8dist.checks.coherence import inside_of
from fp8dist.checks.contents import on_device
from fp8dist.checks.inventory import Holdings, Inventory, Scope, not_finite_in
from fp8dist.checks.protocol import Compared, check_replicas
from fp8dist.checks.repair import Repairs, repair
from fp8dist.checks.replication import around
from fp8dist.checks.report import DivergenceReport, announce, conclude, log_on_one_rank, save_evidence
from fp8dist.checks.standing import Standing, kinds_of, log_changes
from fp8dist.checks.verdicts import Verdicts
from fp8dist.common.divergence import COHERENCE, MORE
from fp8dist.errors import ConfigurationError
from fp8dist.parallel.torch_internals import fsdp2_modules
from fp8dist.parallel.wrappers import reshard
from fp8dist.state.groups import GroupLike, SyncGroup
from fp8dist.state.roll_call import failing_by_name
from fp8dist.state.settings import Policy


@dataclass(frozen=True)
class Comparison:
    """What a check compares, and across which ranks.

    Attributes:
        anchor: the ranks that call the check.
        managers: whose FP8 state is compared, and whose callbacks are called, by their verdicts. Empty without FP8.
        module: the model as the training loop calls it; None: compare FP8 state only.
        scope: what of them is compared.
        device: if it is a GPU, the current CUDA device during the check.
        step: number of the step in progress, or of the last one; 0: unknown.
        done: number of steps that the state is the result of; None: unknown.
        last_good: the newest step at which all ranks were equal, by ``Holdings.scopes``. ``run_check`` adds to it.
        manifest: a text that must be equal on all ranks, such as the digest of the manifest; "": none.
        vouched: True if the caller says that plain tensors are replicated over ``anchor``.
        groups: fqn patterns of tensors that other groups replicate; None as a group: do not compare.
        adopted: what is known to be copies along axes; None: the caller names no axes.
        within: of each manager, what the names of its slots begin with; empty if there is one.
    """

    anchor: SyncGroup
    managers: Sequence[Verdicts]
    module: nn.Module | None
    scope: Scope
    device: torch.device
    step: int
    done: int | None
    last_good: dict[tuple[str, int], int]
    manifest: str = ""
    vouched: bool = False
    groups: Mapping[str, GroupLike | None] | None = None
    adopted: Adopted | None = None
    within: Sequence[str] = ()

    def noted(self, report: DivergenceReport) -> DivergenceReport:
        """Return a report with a note on tensors that are compared because they were equal along an axis. Local."""
        note = "" if self.adopted is None else self.adopted.advice(f.name for f in report.findings)
        return replace(report, notes=(*report.notes, note)) if note else report

    def holdings(self) -> Holdings:
        """Return what this rank brings to the check. Local."""
        inventory = Inventory(self.anchor, self.vouched, self.groups, adopted=self.adopted)
        for manager, within in self.named_managers:
            for sync in manager.state.syncs if self.scope.state else ():
                inventory.add_arena(sync, within)
        if self.module is not None:
            inventory.add_module(self.module, self.scope)
        elif any(manager.state.job.called is not None for manager in self.managers):
            inventory.add_gone(self.scope)
        if self.module is not None and self.scope.coherence is not None:
            inventory.add_inside(self.module, self.scope.coherence, self.step)
        if self.module is not None and self.scope.compute:
            inventory.add_computations(self.module)
        return inventory.holdings(self.step, self.manifest, self.last_good)

    @property
    def named_managers(self) -> list[tuple[Verdicts, str]]:
        """The managers, each with what the names of its slots begin with."""
        return list(zip(self.managers, self.within or ("",)))

    @property
    def enabled(self) -> bool:
        """False if all managers of this check are switched off (``enabled=False``)."""
        return not self.managers or any(manager.state.settings.enabled for manager in self.managers)

    def notify(self, report: DivergenceReport) -> None:
        """Call the callbacks of the managers with a report. Local."""
        for manager in self.managers:
            manager.events.notify_diverged(report)


def run_check(
    of: Comparison,
    policy: Policy,
    instead: str,
    report_dir: str | None,
    standing: Standing,
    repairs: Repairs,
    max_repairs: int | None,
) -> DivergenceReport:
    """Run a whole check: compare, save evidence, repair, log once, raise. COLLECTIVE over ``of.anchor``.

    Args:
        policy: "warn", "raise" or "repair".
        instead: advice for the error that says that there is nothing to compare.
        report_dir: folder for evidence. None: it is not saved.
        standing: findings of earlier checks. ``repairs``: counts of their repairs.
        max_repairs: number of consecutive checks that may repair the same tensor; None: any number.

    Raises:
        DivergenceError: on all ranks, if ranks differ and ``policy`` is "raise", or "repair" and the repair failed.
        ConfigurationError: on all ranks, if there is nothing to compare although FP8 is on, or if no rank could read
            what it compares.
        SyncError: a collective failed or timed out. The message names the missing ranks.
    """
    anchor, managers = of.anchor, of.managers
    owner = managers[0].state.syncs[0].owner if managers and managers[0].state.syncs else "fp8dist.check"
    with (
        on_device(of.device),
        failing_by_name(owner, lambda: f"the check of step {of.step}" if of.step else "the check", anchor.ranks),
    ):
        found = [(within, f) for manager, within in of.named_managers for f in manager.known_findings()]
        known = [f if f.name in (f.kind, MORE) else replace(f, name=within + f.name) for within, f in found]
        try:
            compared = check_replicas(anchor, of.holdings, known, everything=policy == "repair")
            if of.module is not None and may_adopt(compared):
                Inventory(anchor, of.vouched, of.groups, adopted=of.adopted).adopt(of.module)
                compared = check_replicas(anchor, of.holdings, known, everything=policy == "repair")
            report = of.noted(_require_compared(of, compared, instead))
            also = () if of.scope.coherence is None else (COHERENCE,)
            kinds, inside = kinds_of((*report.compared, *also)), compared.holdings.inside
            things = compared.holdings.things | (inside.things if inside is not None else set())
            log_changes(anchor, standing, report, kinds, compared.nonfinite_rank, things)
            repairs.observe(report, of.scope.kinds)
            agreed = not any(f.kind in ("layout", "error") for f in report.findings)
            if policy == "repair" and of.module is not None and agreed:  # Else not all ranks may be asked to repair.
                # FSDP2 may keep what it has gathered before a repair. Ranks gather together, so all of them reshard,
                # also those that check over another group, and find no difference.
                reshard(fsdp2_modules(around(of.module)))
            if report.diverged:
                save_evidence(report, report_dir, compared.holdings.evidence)
                if policy == "repair":
                    mend = partial(repair, anchor, of.holdings, compared)
                    report = repairs.repair(report, max_repairs, mend, anchor) if agreed else mend()  # Only a note.
                texts = standing.texts(report) if policy == "warn" else None
                log_on_one_rank(report, anchor, policy != "warn", texts)
        finally:  # A repair writes to weights, so their casts are stale.
            for manager in managers:
                manager.state.job.invalidate_casts()
    conclude(report, policy != "warn", of.notify)
    if of.done is not None and not (report.diverged or report.nonfinite):
        of.last_good.update(dict.fromkeys(compared.holdings.scopes.values(), of.done))
    return report


def may_adopt(compared: Compared) -> bool:
    """True if the first comparison along an axis is due, and ranks agree on it; the same on all ranks."""
    return bool(compared.holdings.pending) and not any(f.kind in ("layout", "error") for f in compared.report.findings)


def check_alone(
    module: nn.Module | None,
    scope: Scope,
    standing: Standing,
    policy: Policy = "raise",
    step: int = 0,
    notify: Callable[[DivergenceReport], None] | None = None,
) -> DivergenceReport:
    """Return the report of a check without other ranks. It compares tensors of this rank with one another, if ``scope``
    has ``coherence``, and looks for values that are not finite. Logs what is new. Local.

    Raises:
        DivergenceError: tensors do not belong together, and ``policy`` is not "warn".
    """
    alone = DivergenceReport(skipped=("there is one rank, or no process group",), compared_by=scope.also)
    kinds: Collection[str] = ()
    things: Collection[tuple[str, str]] = ()
    if module is not None:
        alone = replace(alone, nonfinite=not_finite_in(module, scope))
        if scope.coherence is not None:
            inside, kinds = inside_of(module, scope.coherence, step), (COHERENCE,)
            things = inside.things
            alone = replace(
                alone,
                findings=inside.findings,
                skipped=(*alone.skipped, *inside.unread),
                compared_by={"inside the rank": inside.size, **scope.also},
            )
    log_changes(None, standing, alone, kinds, things=things)
    texts = standing.texts(alone) if policy == "warn" else None
    announce(alone, None, raises=policy != "warn", notify=notify, texts=texts)
    return alone


def _require_compared(of: Comparison, compared: Compared, instead: str) -> DivergenceReport:
    """Return the report of ``compared``.

    Raises:
        ConfigurationError: on all ranks, if no rank could read what it compares (if only some could not, ranks differ,
            and the report says so); or if FP8 state was asked for and there was nothing to compare. Not if FP8 is
            switched off: that must not end a job that checks its FP8 state.
    """
    report = compared.report
    failures = {rank: f.detail for f in report.findings if f.kind == "error" for rank in f.ranks}
    if failures.keys() >= set(of.anchor.ranks):
        texts = list(dict.fromkeys(failures.values()))
        raise ConfigurationError(f"check() could not read what it compares, on any rank: {'; '.join(texts[:3])}")
    inside = of.scope.coherence is not None and of.scope.coherence.suffices
    if of.scope.state and compared.nothing and of.enabled and not inside:
        why = "; ".join(report.skipped) or "it has no parameters"
        raise ConfigurationError(
            "check() has nothing to compare, because nothing here is known to be the same on several ranks "
            f"({why}): {instead}"
        )
    return report
