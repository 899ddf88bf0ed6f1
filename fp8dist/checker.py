"""Whether the ranks of one manager agree: acts on what syncs have proved, and compares everything else when asked."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from fp8dist.consistency.conclusion import conclude, save_evidence
from fp8dist.consistency.contents import ArenaContent, values_near
from fp8dist.consistency.headers import localise
from fp8dist.consistency.holdings import Holdings, ReplicaSet
from fp8dist.consistency.inventory import Inventory
from fp8dist.consistency.protocol import check_replicas
from fp8dist.consistency.repair import repair
from fp8dist.consistency.report import DivergenceReport, Finding, ranks_text
from fp8dist.ddp import find_ddp
from fp8dist.groups import SyncGroup, world_size
from fp8dist.kernels.update import WORD_MANIFEST
from fp8dist.nn import Mode
from fp8dist.settings import Settings
from fp8dist.state.arena import NONFINITE, SATURATED, Arena
from fp8dist.state.slots import Slot
from fp8dist.sync import ArenaSync, Evidence

__all__ = ["Checker", "Event", "Policy", "Scope", "add_arenas", "add_module", "holdings", "run_check"]

logger = logging.getLogger("fp8dist")

Policy = Literal["raise", "warn", "repair"]


@dataclass(frozen=True)
class Event:
    """Something that a monitor or a policy may want to hear of.

    ``kind`` is "nonfinite" (``slots`` saw a NaN or Inf amax; their scales stayed) or "diverged"
    (``report`` says what). Events are told at boundaries and in ``check()``, the same ones on every rank.
    """

    kind: Literal["nonfinite", "diverged"]
    step: int
    slots: tuple[Slot, ...] = ()
    report: DivergenceReport | None = None


@dataclass(frozen=True)
class Scope:
    """What a check compares beside FP8 state."""

    parameters: bool = True
    gradients: bool = False
    optimizer: torch.optim.Optimizer | None = None


class Checker:
    """Of one manager. ``callbacks`` hear of events."""

    def __init__(
        self,
        syncs: Sequence[ArenaSync],
        groups: Sequence[SyncGroup | None],
        settings: Settings,
        mode: Mode,
    ) -> None:
        self.callbacks: list[Callable[[Event], None]] = []
        self.checks = 0
        self.seconds = 0.0
        self._syncs, self._groups = syncs, groups
        self._settings, self._mode = settings, mode
        self._default = next((i for i, sync in enumerate(syncs) if not sync.patterns), 0)
        self._module: weakref.ref[nn.Module] | None = None
        self._last_good: int | None = None

    def watch(self, module: nn.Module) -> None:
        """``module``: what tells how parameters are replicated (DDP around the model, say)."""
        self._module = weakref.ref(module)

    # What syncs have proved ------------------------------------------------------------------------

    def act_on_verdicts(self, joins: bool, only_immediate: bool = False) -> None:
        """Read what the last syncs proved and act on it. COLLECTIVE when they found a difference.

        Called at boundaries only, so that all ranks come here together.

        Args:
            joins: ranks without data would not come: nothing is localised.
        """
        differing = self.read_verdicts(joins, only_immediate)
        if differing:
            self._conclude_verdicts(differing, joins)

    def read_verdicts(
        self, joins: bool = False, only_immediate: bool = False
    ) -> list[tuple[ArenaSync, DivergenceReport]]:
        """What the last syncs proved to differ. COLLECTIVE when they found a difference."""
        differing: list[tuple[ArenaSync, DivergenceReport]] = []
        for sync in self._syncs:
            if sync.verdict is None or (only_immediate and not sync.verdict.immediate):
                continue
            differs, nonfinite = sync.verdict.read()
            evidence, sync.verdict = sync.verdict.evidence, None
            step = int(sync.arena.step) if differs or nonfinite else 0
            if nonfinite:
                self._tell(Event("nonfinite", step, _slots_where(sync.arena, sync.arena.flags[NONFINITE])))
            if differs and joins:
                detail = "not localised inside a Join context"
                ranks = sync.group.ranks if sync.group is not None else ()
                findings = [Finding(step, kind, kind, ranks, None, detail=detail) for kind in differs]
                differing.append((sync, DivergenceReport(tuple(findings))))
            elif differs:
                differing.append((sync, self._localise(sync, evidence, differs)))
        return differing

    def _localise(self, sync: ArenaSync, evidence: Evidence | None, differs: tuple[str, ...]) -> DivergenceReport:
        with _on_device_of(sync):
            found = localise(sync, evidence, differs)
        arena = sync.arena
        sent = arena.sent if evidence is None else evidence.scales
        save_evidence(found.report, self._settings.report_dir, lambda finding: _slot_evidence(arena, sent, finding))
        # All ranks go on from one state. Else every later sync would be refused for its step, and a scale that
        # the commit did not touch, because its slot did not run, would be reported for ever.
        arena.step.fill_(found.step)
        if found.reference is not None:
            arena.adopt_untaken_scales(found.reference.scales)
            arena.counters[SATURATED] = found.reference.saturated
            self._mode.invalidate_casts()
        return found.report

    def _conclude_verdicts(self, differing: Sequence[tuple[ArenaSync, DivergenceReport]], joins: bool) -> None:
        raises = self._settings.check_policy != "warn"
        left: list[Finding] = []
        for sync, report in differing:
            assert sync.group is not None
            if self._settings.check_policy == "repair" and not joins:
                report = self._mend_arena(sync, sync.group, report)
            step = max(f.step for f in report.findings)
            self._tell(Event("diverged", step, report=report))
            if not joins:
                conclude(report, sync.group, raises=False)
            elif sync.group.rank == report.speaker:
                logger.warning("%s", report)
            left += () if report.consistent else report.findings
        if raises:
            DivergenceReport(tuple(left)).raise_if_diverged()

    def _mend_arena(self, sync: ArenaSync, group: SyncGroup, report: DivergenceReport) -> DivergenceReport:
        """COLLECTIVE. The commit, and ``_localise``, have made the scales equal already: compare everything else."""
        if any(f.kind != "scale" or f.reference_rank is None for f in report.findings):
            return report
        after = run_check(group, lambda: _arena_holdings(sync, group), "repair", None, speaks=False)
        mended = tuple(f"{f.kind} {f.name} of {ranks_text(f.ranks)} from {f.reference_rank}" for f in report.findings)
        return replace(report, repaired=mended + after.repaired) if after.consistent else after

    # Comparing -------------------------------------------------------------------------------------

    def check(self, step: int, scope: Scope, policy: Policy | None) -> DivergenceReport:
        """Compare the FP8 state, and what ``scope`` says, across the ranks. COLLECTIVE.

        Args:
            policy: "raise", "warn", "repair"; None: as "warn".

        Raises:
            DivergenceError: ranks differ, and the policy says so.
        """
        start = time.perf_counter()
        module = None if self._module is None else self._module()
        default = self._syncs[self._default]
        anchor = self._anchor(module)
        if anchor is None:
            return DivergenceReport(skipped=("there is one rank, or no process group",))
        known = [f for _, found in self.read_verdicts() for f in found.findings]

        def build() -> Holdings:
            inventory = Inventory(anchor, groups={pattern: None for sync in self._syncs for pattern in sync.patterns})
            add_arenas(inventory, self._syncs)
            if module is not None:
                add_module(inventory, module, scope)
            manifest = str(int(default.arena.words[WORD_MANIFEST])) if default.communicates else ""
            return holdings(inventory, step, manifest, self._last_good)

        with _on_device_of(default):
            try:
                report = run_check(anchor, build, policy, self._settings.report_dir, known, self._tell_report)
            finally:
                self.checks += 1
                self.seconds += time.perf_counter() - start
                self._mode.invalidate_casts()
        if report.consistent:
            self._last_good = step
        return report

    def _anchor(self, module: nn.Module | None) -> SyncGroup | None:
        """The ranks that check together: the default group; without one DDP's, or the whole job."""
        group = self._groups[self._default]
        if group is not None:
            return group
        if world_size() == 1:
            return None
        ddp = None if module is None else find_ddp(module)
        return SyncGroup(dist.group.WORLD if ddp is None else ddp.process_group)  # type: ignore[arg-type]

    def _tell_report(self, report: DivergenceReport) -> None:
        self._tell(Event("diverged", max(f.step for f in report.findings), report=report))

    def _tell(self, event: Event) -> None:
        for callback in self.callbacks:
            callback(event)


def run_check(
    anchor: SyncGroup,
    build: Callable[[], Holdings],
    policy: Policy | None,
    report_dir: str | None,
    known: Sequence[Finding] = (),
    tell: Callable[[DivergenceReport], None] | None = None,
    speaks: bool = True,
) -> DivergenceReport:
    """Compare, keep the evidence, mend if that is the policy, say it once, raise if that is. COLLECTIVE.

    Args:
        anchor: the ranks that call.
        known: what this rank knows already to differ.
        tell: is called with a report of differences.
        speaks: False: the caller says it, or raises.
    """
    held: list[ReplicaSet] = []

    def building() -> Holdings:
        built = build()
        held[:] = built.sets
        return built

    def evidence(finding: Finding) -> dict[str, Any] | None:
        return next((found for s in held if (found := s.evidence(finding)) is not None), None)

    compared = check_replicas(anchor, building, known)
    report = compared.report
    if not report.consistent:
        save_evidence(report, report_dir, evidence)
        if policy == "repair":
            report = repair(anchor, building, compared)
        if tell is not None:
            tell(report)
        if speaks:
            conclude(report, anchor, raises=policy in ("raise", "repair"))
    return report


def add_arenas(inventory: Inventory, syncs: Sequence[ArenaSync]) -> None:
    """The FP8 state that ranks share. What each has of its own is not compared."""
    for sync in syncs:
        if sync.communicates:
            assert sync.group is not None
            inventory.add_content(
                f"FP8 state of {', '.join(sync.patterns) or 'all modules'}", sync.group, ArenaContent(sync.arena)
            )


def add_module(inventory: Inventory, module: nn.Module, scope: Scope) -> None:
    if scope.parameters or scope.gradients:
        inventory.add_parameters(module, scope.parameters, scope.gradients)
    if scope.optimizer is not None:
        inventory.add_optimizer(module, scope.optimizer)


def holdings(inventory: Inventory, step: int, manifest: str = "", last_good: int | None = None) -> Holdings:
    sets = inventory.sets()
    return Holdings(sets, step, manifest, last_good, inventory.coords, inventory.skipped, inventory.labels)


def _arena_holdings(sync: ArenaSync, group: SyncGroup) -> Holdings:
    inventory = Inventory(group)
    add_arenas(inventory, [sync])
    return holdings(inventory, int(sync.arena.step))


def _slot_evidence(arena: Arena, sent: torch.Tensor, finding: Finding) -> dict[str, Any] | None:
    """The slot as it is after the commit, and the scales that it had at the launch."""
    content = ArenaContent(arena)
    for index, key in enumerate(content.keys):
        if key.name == finding.name:
            fields = [values_near(field, None) for field in content.fields(index)]
            return {
                "sent": {"scale": repr(sent[0, index].item()), "inv_scale": repr(sent[1, index].item())},
                "fields": fields,
            }
    return None


def _on_device_of(sync: ArenaSync) -> contextlib.AbstractContextManager[Any]:
    device = sync.arena.device
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _slots_where(arena: Arena, mask: torch.Tensor) -> tuple[Slot, ...]:
    return tuple(arena.specs[i].slot for i in mask.nonzero().flatten().tolist())
