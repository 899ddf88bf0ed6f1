"""prepare(): from a model to FP8Linears and the manager of their state."""

from __future__ import annotations

import fnmatch
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from fp8dist.errors import ConfigurationError
from fp8dist.formats import Role
from fp8dist.groups import GroupLike, SyncGroup
from fp8dist.manager import ATTRIBUTE, StateManager
from fp8dist.nn import SHARDED_ALREADY, LinearSlots, Mode, convert, eligible_linears
from fp8dist.recipe import DelayedScaling
from fp8dist.settings import Settings
from fp8dist.state.arena import Arena
from fp8dist.state.slots import Slot, SlotSpec
from fp8dist.sync import ArenaSync

__all__ = ["prepare"]

logger = logging.getLogger("fp8dist")

DEFAULT_SKIP = ("*lm_head", "*lora_*")


def prepare(
    model: nn.Module,
    recipe: DelayedScaling | None = None,
    group: GroupLike | None = None,
    groups: Mapping[str, GroupLike] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    skip: Sequence[str] = DEFAULT_SKIP,
    enabled: bool | None = None,
    amax_sync: bool | None = None,
    check_every: int | None = None,
    check_policy: str | None = None,
    backend: str | None = None,
    eval_precision: str = "fp8",
    fp8_all_gather: bool = False,
) -> StateManager:
    """Turn the eligible nn.Linears of ``model`` into FP8Linears, in place, and make their manager. Local.

    Parameters and state_dict keys stay as they are. Eligible: exactly nn.Linear, with a Parameter as
    weight, both dims multiples of 16, not matching ``skip``, and ``filter_fn(module, fqn)``. What is
    skipped is logged with its reason. Afterwards wrap, shard and load the model, then call
    ``manager.attach(…)``.

    Args:
        recipe: None: ``DelayedScaling()``.
        group: the ranks that share FP8 state: a ProcessGroup, or a DeviceMesh (all axes flattened).
        groups: an arena of its own, and so a group of its own, for modules whose fqn matches a pattern,
            such as ``{"*.experts.*": expert_group}``. The first match counts.
        skip: fqn patterns (fnmatch) that stay in high precision.
        enabled: False: high precision throughout, same keys. ``FP8DIST_ENABLED=0`` beats True.
        amax_sync: False: every rank keeps amaxes of its own, and there is no collective.
        check_every: compare FP8 state and parameters after every so many steps (see ``StateManager.check``); 0: never.
            Every sync compares manifest, step and scales anyway, at no cost.
        check_policy: what to do when ranks differ: "raise", "warn", or "repair" (copy from the majority, raise without
            one).
        backend: "triton" (this package's kernels), "torch" (``torch._scaled_mm``, eager casts), "reference"
            (dequantised float32 products), or "auto": on a GPU with FP8 Triton, but ``torch._scaled_mm`` for products
            that the shipped table of the GPU does not show Triton to be faster at; on a CPU reference.
        eval_precision: "fp8" or "high": what ``eval()`` computes in.
        fp8_all_gather: FSDP2 (``fully_shard``) gathers the weights of FP8Linears as FP8 bytes: half of bf16's. Needs
            ``amax_sync``. Inside ``autocast(enabled=False)`` and ``calibrate()`` activations are in high precision, and
            weights are what was gathered, dequantised.

    For ``enabled``, ``amax_sync``, ``check_every``, ``check_policy`` and ``backend`` None means the environment
    variable (FP8DIST_ENABLED, FP8DIST_AMAX_SYNC, FP8DIST_CHECK_EVERY, FP8DIST_CHECK_POLICY, FP8DIST_BACKEND), else the
    default (on, synced, 0, "raise", "auto"). FP8DIST_REPORT_DIR: where evidence of a divergence is written.

    Raises:
        ConfigurationError: more than one rank and no group, a model that is prepared already, or an
            argument that cannot be.
    """
    recipe = DelayedScaling() if recipe is None else recipe
    settings = Settings.resolve(
        enabled=enabled,
        amax_sync=amax_sync,
        check_every=check_every,
        check_policy=check_policy,
        backend=backend,
        eval_precision=eval_precision,
        fp8_all_gather=fp8_all_gather,
    )
    if any(ATTRIBUTE in module.__dict__ for module in model.modules()):
        raise ConfigurationError("the model, or a part of it, is prepared already: detach() its manager first")
    linears = _choose(model, skip, filter_fn)
    plan = _Plan(linears, group, groups or {}, recipe, settings.backend)
    mode = Mode(settings.enabled, settings.backend, settings.eval_precision, settings.fp8_all_gather)
    manager = StateManager(model, recipe, settings, mode, plan.syncs, plan.sync_groups, plan.aliases)
    for fqn, linear in linears.items():
        convert(linear, plan.slots_of(fqn, linear, mode))
    model.__dict__[ATTRIBUTE] = manager
    logger.info("fp8dist: %d Linears are FP8Linears now", len(linears))
    if not settings.enabled:
        logger.warning("fp8dist is switched off: %d Linears stay in high precision", len(linears))
    return manager


def _choose(
    model: nn.Module, skip: Sequence[str], filter_fn: Callable[[nn.Module, str], bool] | None
) -> dict[str, nn.Linear]:
    chosen: dict[str, nn.Linear] = {}
    skipped: Counter[str] = Counter()
    for fqn, linear, reason in eligible_linears(model, skip, filter_fn):
        if reason is None:
            chosen[fqn] = linear
        else:
            skipped[reason] += 1
            level = logging.WARNING if reason == SHARDED_ALREADY else logging.INFO
            logger.log(level, "fp8dist: %s stays in high precision: %s", fqn or "the model", reason)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            logger.warning(
                "fp8dist: torch's fast path of nn.TransformerEncoderLayer in eval() does not call its Linears, so "
                "it is not FP8; torch.backends.mha.set_fastpath_enabled(False) turns it off"
            )
            break
    if not chosen:
        logger.warning("fp8dist: no Linear of this model is eligible: %s", dict(skipped) or "there is none")
    return chosen


class _Plan:
    """Which slot lives in which arena."""

    def __init__(
        self,
        linears: Mapping[str, nn.Linear],
        group: GroupLike | None,
        groups: Mapping[str, GroupLike],
        recipe: DelayedScaling,
        backend: str,
    ) -> None:
        self.recipe = recipe
        self.aliases: dict[Slot, Slot] = {}
        self._patterns = list(groups)
        distinct: list[GroupLike | None] = [group]
        self._place: list[int] = []
        for given in groups.values():
            known = next((i for i, other in enumerate(distinct) if other is given), None)
            if known is None:
                known = len(distinct)
                distinct.append(given)
            self._place.append(known)
        specs: list[list[SlotSpec]] = [[] for _ in distinct]
        patterns = [tuple(p for p, at in zip(self._patterns, self._place) if at == i) for i in range(len(distinct))]
        self._weight_owner: dict[int, str] = {}
        for fqn in sorted(linears):
            weight = linears[fqn].weight
            owner = self._weight_owner.setdefault(id(weight), fqn)
            for role in Role:
                slot = Slot(fqn, role.value)
                if role is Role.WEIGHT and owner != fqn:
                    self.aliases[slot] = Slot(owner, role.value)
                    continue
                specs[self._arena_of(fqn)].append(SlotSpec(slot, recipe.format_of(role)))
        self.syncs = [ArenaSync(Arena(part, recipe, backend), patterns=names) for part, names in zip(specs, patterns)]
        self.sync_groups = [None if g is None else SyncGroup(g) for g in distinct]

    def _arena_of(self, fqn: str) -> int:
        for pattern, place in zip(self._patterns, self._place):
            if fnmatch.fnmatchcase(fqn, pattern):
                return place
        return 0

    def slots_of(self, fqn: str, linear: nn.Linear, mode: Mode) -> LinearSlots:
        """What the converted module will know of its slots."""
        owner = self._weight_owner[id(linear.weight)]
        slots = {role: Slot(owner if role is Role.WEIGHT else fqn, role.value) for role in Role}
        return LinearSlots(self.syncs[self._arena_of(fqn)], self.syncs[self._arena_of(owner)], mode, self.recipe, slots)
