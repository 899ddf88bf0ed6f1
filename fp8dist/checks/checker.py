"""Checker: compares what the ranks of one manager must hold alike: FP8 state, parameters, optimizer state.

It does so at ``attach``, and in checks. The syncs of the steps compare less, but each time: see ``verdicts.py``.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from fp8dist.checks.axes import Adopted, Axes, Memory, log_equal
from fp8dist.checks.checked import Checked
from fp8dist.checks.coherence import Asked, optimizers_in, ties_of
from fp8dist.checks.comparison import Comparison, check_alone, may_adopt, run_check
from fp8dist.checks.contents import on_device
from fp8dist.checks.events import EventQueue
from fp8dist.checks.inferred import Inferred
from fp8dist.checks.inventory import Holdings, Inventory, Scope
from fp8dist.checks.protocol import Compared, check_replicas
from fp8dist.checks.repair import Repairs
from fp8dist.checks.replication import is_plain
from fp8dist.checks.report import DivergenceReport, conclude, log_on_one_rank, save_evidence
from fp8dist.checks.standing import Standing
from fp8dist.checks.verdicts import Verdicts
from fp8dist.common.divergence import compared_text
from fp8dist.modules.model_state import ModelState
from fp8dist.parallel.ddp import find_ddp
from fp8dist.parallel.torch_internals import unknown
from fp8dist.state.groups import SyncGroup, world_size
from fp8dist.state.roll_call import failing_by_name
from fp8dist.state.settings import Policy, Start
from fp8dist_kernels.header import WORD_MANIFEST

logger = logging.getLogger("fp8dist")

_NOTHING_TO_COMPARE = (
    "pass the DDP module to attach(), or name the ranks that hold the same values, with prepare(group=…) and amax_sync "
    "or with fp8dist.check(module, group=…); otherwise do not use check() and check_every"
)

_UNEQUAL_START = (
    "the ranks would train other models: load the same weights on all ranks, or broadcast them, before attach(); or "
    "attach(start=None) if these tensors are meant to differ"
)


class Checker:
    """The consistency checker of one manager.

    Attributes:
        checks: number of checks so far. ``seconds``: their time on the host.
        on_checked: called when ``last`` has a new value.
        adopted: what is known to be copies along the axes of ``prepare(axes=…)``; None: there are none. ``along``: its
            memory.
        inferred: what may be copies, and nobody has said so; None: there is nothing.
        last: what the newest check of parameters without a difference compared; None: there was no such check.
        checked: the newest step after which such a check compared all parameters, and all were finite
            (``Checked.verified``); None: there was none.
    """

    def __init__(self, state: ModelState, verdicts: Verdicts, events: EventQueue) -> None:
        self.on_checked: list[Callable[[], None]] = []
        self.checks = 0
        self.seconds = 0.0
        self.last: Checked | None = None
        self.checked: int | None = None
        self.inferred: Inferred | None = None
        self._optimizers: list[weakref.ref[Any]] = []
        self._ties: tuple[tuple[str, ...], ...] = ()
        self.state, self._verdicts, self.events = state, verdicts, events
        syncs, groups = state.syncs, state.groups
        # The default arena is the one of modules that no pattern of ``prepare(groups=…)`` matches: all ranks have it.
        # If patterns match all modules, it is the arena that most ranks share.
        widest = max(range(len(syncs)), key=lambda i: 0 if (group := groups[i]) is None else group.size, default=0)
        self.along: Memory = {}
        self.adopted = None if state.axes is None else Adopted(state.axes, self.along)
        self._default = next((i for i, sync in enumerate(syncs) if not sync.patterns), widest)
        self._last_good: dict[tuple[str, int], int] = {}  # See ``Comparison``.
        self.standing, self.repairs = Standing(), Repairs()
        self._warned_skipped = False

    def watch(self, module: nn.Module) -> None:
        """Set the model as the training loop calls it: its wrappers, such as DDP, show which ranks hold copies of a
        parameter. Keeps a weak reference."""
        self.state.job.called = weakref.ref(module)
        self._optimizers, self._ties = [], ()

    def attached(self, whole: nn.Module, optimizer: Any) -> None:
        """Watch the model that ``attach`` was given, and note which of its names are tied.

        Args:
            optimizer: that of the loop, or a list, with wrappers that may hold master weights; None: unknown. Kept as a
                weak reference.
        """
        self.watch(whole)
        for one in optimizers_in(Asked().also(optimizer).optimizers):
            with contextlib.suppress(TypeError):  # A class with __slots__ may take no weak references.
                self._optimizers.append(weakref.ref(one))
        self._ties = ties_of(whole)

    @property
    def asked(self) -> Asked:
        """What a check compares inside this rank: see ``fp8dist/checks/coherence.py``."""
        return Asked([one for of in self._optimizers if (one := of()) is not None], self._ties)

    def forget_steps(self) -> None:
        """Forget which steps were checked. For callers that start to count steps anew."""
        self.last = self.checked = None
        self._last_good.clear()

    def check(
        self, done: int, step: int, scope: Scope, policy: Policy, max_repairs: int | None = None
    ) -> DivergenceReport:
        """Compare the FP8 state, and what ``scope`` selects, across the ranks. COLLECTIVE over ``anchor()``. Without
        other ranks, it only looks for values that are not finite.

        Args:
            done: number of optimizer steps that the state is the result of.
            step: number of the step in progress, else ``done``.
            policy: "warn", "raise" or "repair".
            max_repairs: number of consecutive checks that may repair the same tensor. None: as in the settings.

        Raises:
            DivergenceError: on all ranks, if ranks differ and ``policy`` is "raise", or "repair" and the repair failed.
            ConfigurationError: on all ranks, if there is nothing to compare although FP8 is on.
            SyncError: a collective failed or timed out.
        """
        start = time.perf_counter()
        module = self.state.job.whole
        default = self.state.syncs[self._default]
        anchor = self.anchor()
        if anchor is None:
            return check_alone(module, scope, self.standing, policy, step, self.events.notify_diverged)
        try:
            manifest = str(int(default.arena.words[WORD_MANIFEST])) if default.communicates else ""
            compared = Comparison(
                anchor, [self._verdicts], module, scope, default.arena.device, step, done, self._last_good,
                manifest=manifest, adopted=self.adopted,
            )  # fmt: skip
            most = self.state.settings.max_repairs if max_repairs is None else max_repairs
            report_dir = self.state.settings.report_dir
            report = run_check(compared, policy, _NOTHING_TO_COMPARE, report_dir, self.standing, self.repairs, most)
        finally:
            self.checks += 1
            self.seconds += time.perf_counter() - start
        self.events.run()
        self.warn_of_skipped(report, anchor)
        return report

    def compare_start(self, model: nn.Module, whole: nn.Module, policy: Start | None) -> None:
        """Compare the parameters at ``attach``: ranks that start from other weights train other models. COLLECTIVE over
        the ranks that share FP8 state. Does nothing if there are none.

        Compares the parameters that ``check`` compares. Before the first boundary of this process it also compares
        models without any wrapper, and before the first step of a training also buffers. An error while reading is only
        logged: it must not keep a job from training. With ``prepare(axes=…)``, this is also the first comparison along
        the axes, for which ranks that share no FP8 state are compared, too.

        Args:
            model: the prepared model. ``whole``: the model as the training loop calls it, with its wrappers.
            policy: None: make only the first comparison along axes.

        Raises:
            DivergenceError: on all ranks, if ranks differ and ``policy`` is "raise".
        """
        self.inferred = None
        anchor = self.state.groups[self._default]
        if policy is None or anchor is None or not anchor.communicates or not self.state.settings.amax_sync:
            policy, anchor = None, self.anchor() if self.adopted is not None else None
        if anchor is None or not anchor.communicates:
            return
        start, default = time.perf_counter(), self.state.syncs[self._default]

        def build() -> Holdings:
            return self._held_at_start(anchor, model, whole, policy)

        with on_device(default.arena.device), failing_by_name(default.owner, lambda: "attach()", anchor.ranks):
            compared = check_replicas(anchor, build)
            if may_adopt(compared):
                self._inventory_at_start(anchor, whole, self.adopted)[0].adopt(whole)
                compared = check_replicas(anchor, build)
            found = self._log_comparison(anchor, compared, policy, time.perf_counter() - start)
            report = compared.report
            if policy is not None and self.adopted is None and not report.findings:
                everywhere = "parameter" not in {*report.partial, *report.unverified}
                if not everywhere or compared.further:
                    # Not all parameters are compared over all ranks: list those that an axis could be named for.
                    listing = Adopted(Axes({"all": anchor.process_group}), {}, log_equal)
                    self._inventory_at_start(anchor, whole, listing)[0].adopt(whole)
                    self.inferred = Inferred(anchor, listing.found("all").equal or ())
        conclude(found, policy == "raise", self.events.notify_diverged)

    def _inventory_at_start(
        self, anchor: SyncGroup, whole: nn.Module, adopted: Adopted | None
    ) -> tuple[Inventory, bool]:
        """Return an empty inventory for ``compare_start``, and True if all plain parameters count as replicated.
        Local."""
        # After the first boundary ranks may have trained on their own, as in local SGD. Axes name what is a copy.
        plain = not self.state.job.boundaries and self.adopted is None and is_plain(whole)
        # Modules with a group of their own, such as experts, may differ between the anchor's ranks: leave them out.
        others = [sync for sync, group in zip(self.state.syncs, self.state.groups) if plain and group is not anchor]
        left_out = {name: None for sync in others for of in sync.patterns for name in (of, f"{of}.*")}
        return Inventory(anchor, plain, left_out, at_start=True, adopted=adopted), plain

    def _held_at_start(self, anchor: SyncGroup, model: nn.Module, whole: nn.Module, policy: Start | None) -> Holdings:
        """Return what this rank brings to ``compare_start``. Local."""
        inventory, plain = self._inventory_at_start(anchor, whole, self.adopted)
        if policy is None:
            inventory.await_axes(whole)
        elif not unknown(whole):  # Else ``attach`` has warned that this torch does not show how FSDP shards the model.
            # A resumed rank may rightly have buffers of its own. That ranks resume from other steps is found by itself.
            buffers = not self.state.job.boundaries and not self.state.job.step
            # Without wrappers, only the prepared model is known to be replicated, not the modules around it.
            inventory.add_module(model if plain else whole, Scope(buffers=buffers))
        return inventory.holdings(self.state.job.step)

    def _log_comparison(
        self, anchor: SyncGroup, compared: Compared, policy: Start | None, seconds: float
    ) -> DivergenceReport:
        """Log what ``compare_start`` has found in so many seconds. Return the differences. COLLECTIVE if ranks
        differ."""
        report = compared.report
        if any(finding.kind == "error" for finding in report.findings):
            if anchor.rank == report.reporting_rank:
                logger.warning("fp8dist: attach() cannot compare the ranks: %s", report.summary())
        elif report.findings:
            report = replace(report, notes=(*report.notes, _UNEQUAL_START))
            save_evidence(report, self.state.settings.report_dir, compared.holdings.evidence)
            log_on_one_rank(report, anchor, policy == "raise")
            return report
        elif policy is not None and anchor.rank == min(anchor.ranks):
            _log_start(report, len(anchor.ranks), seconds)
        return DivergenceReport()

    def warn_of_skipped(self, report: DivergenceReport, anchor: SyncGroup) -> None:
        """Warn once, on one rank, if a check of parameters could compare none. Local."""
        why = report.unverified.get("parameter")
        if why is not None and not self._warned_skipped:
            self._warned_skipped = True
            if anchor.rank == min(anchor.ranks):
                logger.warning("fp8dist: no parameters are compared: %s", why)

    def anchor(self) -> SyncGroup | None:
        """Return the ranks that check together: the default arena's group, else DDP's, else the whole job. None: there
        is one rank. Local."""
        module = self.state.job.whole
        group = self.state.groups[self._default]
        if group is not None:
            return group
        if world_size() == 1:
            return None
        ddp = None if module is None else find_ddp(module)
        return SyncGroup(dist.group.WORLD if ddp is None else ddp.process_group)  # type: ignore[arg-type]


def _log_start(report: DivergenceReport, ranks: int, seconds: float) -> None:
    """Log what ``compare_start`` compared without a difference. ``ranks``: their number."""
    compared, left_out = compared_text(report.compared, report.compared_bytes), "; ".join(report.skipped)
    if not compared:
        why = left_out or "the model has no parameters"
        logger.info("fp8dist: attach() had nothing to compare over %d ranks: %s", ranks, why)
        return
    logger.info("fp8dist: attach() compared %s over %d ranks in %.1f ms: no difference", compared, ranks, 1e3 * seconds)
    logger.debug("fp8dist: attach() did not compare: %s", left_out or "nothing was left out")
