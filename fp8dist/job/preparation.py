"""prepare(): convert a model's Linears to FP8Linears, and create their manager. restore() undoes it."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from fp8dist.common.names import check_keywords, require_bool
from fp8dist.common.patterns import Skip, shadowed, unmatched
from fp8dist.common.text import first_few
from fp8dist.errors import ConfigurationError
from fp8dist.job.agreement import require_groups as require_sync_groups
from fp8dist.job.arguments import require_groups, require_model
from fp8dist.job.coverage import Selection, Survey, survey
from fp8dist.job.manager import ATTRIBUTE, StateManager, get_manager, managers_in
from fp8dist.modules.foreign import expert_products
from fp8dist.modules.fp8_experts import convert_experts
from fp8dist.modules.fp8_linear import convert
from fp8dist.modules.grouped_slots import GroupedSlots, slot_names
from fp8dist.modules.job_state import JobState
from fp8dist.modules.linear_slots import LinearSlots
from fp8dist.modules.model_state import ModelState
from fp8dist.modules.overrides import High, Overrides
from fp8dist.state.arena import Arena
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.fallback import Fallback
from fp8dist.state.groups import GroupLike, SyncGroup
from fp8dist.state.precision import Precisions
from fp8dist.state.recipe import DelayedScaling, Recipe, require_recipe
from fp8dist.state.settings import AUDIT_BYTES, Settings, unknown_variables
from fp8dist.state.slots import Slot, SlotSpec
from fp8dist_kernels import grouped_ops, ops
from fp8dist_kernels.formats import Role

__all__ = ["prepare", "restore"]

logger = logging.getLogger("fp8dist")

_LOW_SHARE = 0.9
"""Share of matmul parameters in FP8 below which ``prepare`` warns."""

_EXPERTS_HISTORY = 16
"""Longest history of experts for which no override gives a recipe. 92,160 slots of 1024 steps take 377 MB."""

_MUCH_STATE = 4_000_000
"""Bytes of FP8 state from which the log says what it takes."""


@check_keywords("prepare")
def prepare(
    model: nn.Module,
    recipe: Recipe | None = None,
    *,
    group: GroupLike | None = None,
    groups: Mapping[str, GroupLike] | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    skip: str | Iterable[str] | None = (),
    enabled: bool | None = None,
    amax_sync: bool | None = None,
    check_every: int | None = None,
    check_policy: str | None = None,
    backend: str | None = None,
    eval_precision: str = "fp8",
    fp8_all_gather: bool = False,
    overrides: Mapping[str, Recipe | High] | None = None,
    fallback: Fallback | None = None,
    audit_every: int | None = None,
    audit_bytes: int = AUDIT_BYTES,
    strict: bool = False,
    max_repairs: int | None = None,
    share_group: bool = False,
) -> StateManager:
    """Convert the eligible nn.Linears of ``model`` to FP8Linears, in place, and return their manager. Local.

    Parameters and state_dict keys stay the same. A module is eligible if it is an nn.Linear, or of a subclass without a
    forward of its own, or transformers' ``Conv1D``, or one of Megatron-Core's parallel Linears; its weight is a plain
    floating-point Parameter, both dims are multiples of 16, no ``skip`` pattern matches its fqn, and
    ``filter_fn(module, fqn)`` is true. So are the experts of a mixture, if the module has the attributes of
    Transformers' experts interface: they become FP8Experts. Other modules with matmul weights stay in high precision,
    and the log says why; so does an nn.Linear that is taken for the output head, because it shares the weight of an
    nn.Embedding, or is the model's last one and alone has an output for each of its rows. If less than 90 % of the
    matmul parameters are in FP8, the lowest rank of the group logs a warning, or an info if you named everything that
    is left out. ``manager.coverage()`` returns the whole table. After ``prepare``, wrap, shard and load the model, then
    call ``manager.attach(…)``.

    Args:
        recipe: ``DelayedScaling()`` (the default), ``CurrentScaling()``, ``RowwiseScaling()`` or ``BlockScaling()``.
        group: the ranks that share FP8 state: a ProcessGroup, or a DeviceMesh (all axes flattened). None is allowed on
            one rank only, or with ``amax_sync=False``.
        groups: other groups for modules whose fqn matches a pattern, such as ``{"*.experts.*": expert_group}``. Each
            group has its own arena. The first match counts. For experts, a pattern may match the module or a product.
        filter_fn: called as ``filter_fn(module, fqn)`` for eligible Linears. False: high precision.
        skip: fqn patterns (fnmatch) that stay in high precision, one or several, in addition to the defaults
            ``"*lm_head"`` and ``"*lora_*"``, and to output heads of other names. A pattern that begins with "!"
            includes its matches again: "!*lm_head" puts a head into FP8. The last match counts, and the defaults come
            first. None: no defaults.
        enabled: False: high precision throughout, same keys. ``FP8DIST_ENABLED=0`` overrides True.
        amax_sync: False: each rank keeps its own amaxes, without a collective.
        check_every: compare FP8 state and parameters every so many steps (see ``StateManager.check``). 0: never. Every
            sync compares manifest, step and scales as well, in 32 bytes of its own all-reduce.
        check_policy: what to do if ranks differ: "raise", "warn", or "repair" (copy from the majority, raise if there
            is none).
        backend: "triton" (kernels of this package), "torch" (``torch._scaled_mm``, eager casts), "reference"
            (dequantised float32 products), or "auto". On a GPU with FP8, "auto" uses Triton, except for products that
            the shipped table for this GPU does not show to be faster in Triton; these use ``torch._scaled_mm``. On a
            CPU, "auto" is "reference".
        eval_precision: precision in ``eval()``: "fp8" or "high".
        fp8_all_gather: FSDP2 (``fully_shard``) gathers the weights of FP8Linears as FP8 bytes, half the bytes of bf16.
            Needs ``amax_sync``. Not with ``RowwiseScaling``. Inside ``no_fp8()`` and ``calibrate()`` activations are
            in high precision, and weights are the gathered bytes, dequantised.
        overrides: recipes of single modules by fqn pattern: ``{"lm_head": "high", "blocks.0.*": CurrentScaling()}``.
            "high" means high precision. The first match counts. A recipe overrides ``skip``. A ``DelayedScaling``
            that differs from ``recipe`` has its own arena and collective. See also ``first_and_last``.
        fallback: when to put modules into high precision automatically. None: never.
        audit_every: every so many steps, another rank repeats one cast or product of this rank, and must get the same
            bits. 0: never. A rank that computed otherwise is named, and ``check_policy`` decides what follows; nothing
            can be repaired. One audit visits one site of one module; successive audits visit all.
        audit_bytes: bytes of operands that an audit sends. Of a larger product it repeats a block.
        strict: True: raise ConfigurationError if a module would be left out that neither a pattern (``skip`` and its
            defaults, ``overrides``) nor ``filter_fn`` names. Nothing is changed then.
        max_repairs: for ``check_policy="repair"``: the number of checks in a row that may repair the same tensor. The
            next one raises. None: any number; from the third on the report says that the cause persists.
        share_group: False: ``attach`` makes a communicator for the ranks of ``group`` (and one for each of ``groups``),
            with its backend and time-out, if the manager has collectives while it trains. A rank that skips a step is
            then missed by name. True: collectives use ``group`` itself, where the next collective of that rank, such as
            a bucket of DDP, is taken for the missing one: gloo aborts, and NCCL may mix the values.

    If ``enabled``, ``amax_sync``, ``check_every``, ``check_policy``, ``audit_every`` or ``backend`` is None, the
    environment variable (FP8DIST_ENABLED, FP8DIST_AMAX_SYNC, FP8DIST_CHECK_EVERY, FP8DIST_CHECK_POLICY,
    FP8DIST_AUDIT_EVERY, FP8DIST_BACKEND) decides, else the default (on, synced, 0, "raise", 0, "auto").
    FP8DIST_REPORT_DIR is the folder for evidence of a divergence.

    Raises:
        ConfigurationError: there are several ranks and no group, the model is prepared, wrapped or sharded already, or
            an argument has a wrong type or value. After any error the model is as it was.
    """
    require_model(model)
    recipe = DelayedScaling() if recipe is None else require_recipe("recipe", recipe)
    groups = {} if groups is None else groups
    require_groups(groups)
    require_bool("strict", strict)
    settings = Settings.resolve(
        enabled=enabled,
        amax_sync=amax_sync,
        check_every=check_every,
        check_policy=check_policy,
        backend=backend,
        eval_precision=eval_precision,
        fp8_all_gather=fp8_all_gather,
        fallback=fallback,
        audit_every=audit_every,
        audit_bytes=audit_bytes,
        max_repairs=max_repairs,
        share_group=share_group,
    )
    if managers_in(model):
        raise ConfigurationError("the model, or a part of it, is prepared already: call fp8dist.restore() first")
    each, skipped = Overrides({} if overrides is None else overrides), Skip(skip)
    selection = Selection(each, skipped, filter_fn)
    surveyed = survey(model, selection)
    if strict:
        surveyed.require_named()
    linears, experts = surveyed.chosen, surveyed.experts
    recipes = {fqn: each.recipe(fqn, recipe) or recipe for fqn in linears}
    products = [
        _Product(fqn, name, module, each.recipe(fqn, _of_experts(recipe)) or recipe)
        for fqn, module in experts.items()
        for name in expert_products(module) or ()
    ]
    _require_gatherable(settings, recipes | {product.owner: product.recipe for product in products})
    plan = _Plan(linears, products, group, groups, recipe, recipes, settings)
    job = JobState(settings.enabled, settings.backend, settings.eval_precision, settings.fp8_all_gather, plan.shared)
    slots = {fqn: plan.slots_of(fqn, linear, job) for fqn, linear in linears.items()}
    grouped = [(product, plan.grouped_slots(product, job)) for product in products]
    precisions = Precisions(
        {
            precision.slots[Role.INPUT].fqn: precision
            for of in (*slots.values(), *(of for _, of in grouped))
            for precision in of.precisions
        }
    )
    found = surveyed.coverage(True)
    require_sync_groups(settings, plan.sync_groups)
    pairs = sorted(zip(plan.syncs, plan.sync_groups), key=lambda pair: tuple(sorted(pair[1].ranks)) if pair[1] else ())
    state = ModelState(settings, job, precisions, tuple(s for s, _ in pairs), tuple(group for _, group in pairs))
    manager = StateManager(model, recipe, state, plan.syncs[0], plan.aliases, found, selection)
    ops.register_flops()
    grouped_ops.register_flops()
    with _undone_if_it_fails([*linears.values(), *experts.values(), model]):
        for fqn, linear in linears.items():
            convert(linear, slots[fqn])
        for module in experts.values():
            convert_experts(module, {product.name: of for product, of in grouped if product.module is module})
        model.__dict__[ATTRIBUTE] = manager
        _tell(model, surveyed, settings.enabled, plan)
        if (strangers := unknown_variables()) and plan.speaks:
            named = ", ".join(f"{variable}{hint}" for variable, hint in strangers.items())
            logger.warning("fp8dist: environment: there is no setting %s", named)
        _warn_of_patterns(surveyed.fqns, [product.fqn for product in products], skipped.given, groups, each.given)
    return manager


@contextlib.contextmanager
def _undone_if_it_fails(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Give the modules back their classes, and take the attributes that were added, if the block raises: a model is
    prepared, or as it was. Modules may refuse attributes, and Ctrl-C may come at any time."""
    before = [(module, type(module), frozenset(vars(module))) for module in modules]
    try:
        yield
    except BaseException:
        for module, original, names in before:
            if type(module) is not original:
                module.__class__ = original
            for name in vars(module).keys() - names:
                del vars(module)[name]
        raise


def restore(model: nn.Module) -> nn.Module:
    """Undo ``prepare``: remove all hooks, and turn the FP8Linears back into plain nn.Linears, in place. Local. May wait
    for a sync in flight. Call it on every rank: a restored rank takes part in no further sync.

    The FP8 state is lost with its manager. Save it before if you need it. ``manager.detach()`` undoes only ``attach``.

    Args:
        model: the prepared model, or a wrapper around it, such as DDP's.

    Returns:
        The same object.

    Raises:
        ConfigurationError: the model was not prepared; FSDP2 gathers weights in FP8, into buffers that it keeps; the
            call is inside a Join context; or an FP8Linear has another class now, as after ``fully_shard`` on the Linear
            itself. Nothing was changed.
    """
    get_manager(model)._restore()
    return model


def _tell(model: nn.Module, surveyed: Survey, enabled: bool, plan: _Plan) -> None:
    """Log which modules are in FP8 and which are not, and what their state takes if that is much. One rank warns about
    a low share."""
    speaks = plan.speaks
    for fqn, why in surveyed.left_out:
        logger.info("fp8dist: %s stays in high precision: %s", fqn or "the model", why.reason)
    logger.info("fp8dist: %d Linears are FP8Linears now", len(surveyed.chosen))
    if surveyed.experts:
        logger.info("fp8dist: the experts of %d mixtures are FP8Experts now", len(surveyed.experts))
    taken = sum(array.nbytes for sync in plan.syncs for array in sync.arena.arrays)
    if taken >= _MUCH_STATE:
        slots = sum(len(sync.arena) for sync in plan.syncs)
        logger.info("fp8dist: the FP8 state of %d slots takes %d MB on each rank", slots, taken // 1_000_000)
    if any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules()):
        logger.warning(
            "fp8dist: torch's fast path of nn.TransformerEncoderLayer in eval() does not call its Linears, so "
            "it is not FP8; torch.backends.mha.set_fastpath_enabled(False) turns it off"
        )
    _warn_of_routers(surveyed, speaks)
    coverage = surveyed.coverage(True)
    if not enabled:
        off = len(surveyed.chosen) + len(surveyed.experts)
        logger.warning("fp8dist is switched off: %d modules stay in high precision", off)
    elif not coverage.rows:
        logger.warning("fp8dist: no Linear of this model is eligible: it has no matmul weights")
    elif not surveyed.chosen and not surveyed.experts:
        logger.log(
            logging.WARNING if speaks else logging.INFO,
            "fp8dist: no Linear of this model is eligible: FP8: %s; left out: %s",
            coverage.summary,
            surveyed.summary(),
        )
    elif coverage.share < _LOW_SHARE:
        named = all(why.named == "caller" for _, why in surveyed.left_out)
        level = logging.WARNING if speaks and not named else logging.INFO
        logger.log(level, "fp8dist: FP8: %s; left out: %s", coverage.summary, surveyed.summary())


def _warn_of_routers(surveyed: Survey, speaks: bool) -> None:
    """Warn about Linears beside a mixture that have an output per expert."""
    beside = set()
    for fqn, module in surveyed.experts.items():
        for name in expert_products(module) or ():
            beside.add((fqn.rpartition(".")[0], len(getattr(module, name))))
    linears = surveyed.chosen.items()
    routers = [fqn for fqn, of in linears if (fqn.rpartition(".")[0], getattr(of, "out_features", 0)) in beside]
    if routers:
        logger.log(
            logging.WARNING if speaks else logging.INFO,
            "fp8dist: %s: as many outputs as the mixture has experts. If it is a router, its rounding in FP8 sends "
            "tokens to other experts: prepare(skip=%r)",
            first_few(routers, 3),
            f"*{routers[0].rpartition('.')[2]}",
        )


def _warn_of_patterns(
    fqns: Sequence[str],
    products: Sequence[str],
    skip: Iterable[str],
    groups: Mapping[str, object],
    overrides: Mapping[str, object],
) -> None:
    """Warn about patterns that match nothing. Those of ``groups`` may also match grouped products."""
    all_fqns = [*fqns, *products]
    for name, patterns, known in (("skip", skip, fqns), ("groups", groups, all_fqns), ("overrides", overrides, fqns)):
        if strangers := unmatched(patterns, known):
            logger.warning("fp8dist: %s: no module with a matmul weight matches %s", name, ", ".join(strangers))
    for name, mapping, known in (("groups", groups, all_fqns), ("overrides", overrides, fqns)):
        if hidden := shadowed(mapping, known):
            logger.warning(
                "fp8dist: %s: %s has no effect: an earlier pattern matches all its modules",
                name,
                ", ".join(map(repr, hidden)),
            )


def _require_gatherable(settings: Settings, recipes: Mapping[str, Recipe]) -> None:
    rowwise = next((fqn for fqn, recipe in recipes.items() if recipe.by == "row"), None)
    if settings.fp8_all_gather and rowwise is not None:
        raise ConfigurationError(
            f"{rowwise}: fp8_all_gather=True does not work with RowwiseScaling: dgrad needs scales by columns, which "
            "cannot be computed from gathered FP8 rows. Use another recipe for it, or leave fp8_all_gather out"
        )


def _of_experts(recipe: Recipe) -> Recipe:
    """Return the recipe of experts for which no override gives one: its histories are short, because experts have most
    of the slots."""
    if not isinstance(recipe, DelayedScaling):
        return recipe
    return dataclasses.replace(recipe, history_len=min(recipe.history_len, _EXPERTS_HISTORY))


class _Product(NamedTuple):
    """A grouped product to convert. ``owner``, ``name``: the fqn of its module, and the name of its parameter."""

    owner: str
    name: str
    module: nn.Module
    recipe: Recipe

    @property
    def fqn(self) -> str:
        """What the fqns of its experts begin with."""
        short = self.name.removesuffix("_proj")
        return f"{self.owner}.{short}" if self.owner else short

    @property
    def experts(self) -> int:
        """Number of experts."""
        return len(getattr(self.module, self.name))


class _Plan:
    """Assigns each slot to an arena."""

    def __init__(
        self,
        linears: Mapping[str, nn.Module],
        products: Sequence[_Product],
        group: GroupLike | None,
        groups: Mapping[str, GroupLike],
        recipe: Recipe,
        recipes: Mapping[str, Recipe],
        settings: Settings,
    ) -> None:
        self.recipes = recipes
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
        patterns = [tuple(p for p, at in zip(self._patterns, self._place) if at == i) for i in range(len(distinct))]
        specs: dict[tuple[int, Recipe], list[SlotSpec]] = {(i, recipe): [] for i in range(len(distinct))}
        self._weight_owner: dict[int, str] = {}
        for fqn in sorted(linears):
            weight = linears[fqn].weight
            owner = self._weight_owner.setdefault(id(weight), fqn)
            if recipes[owner] != recipes[fqn]:
                raise ConfigurationError(f"{owner} and {fqn} share a weight: overrides must give both the same recipe")
            for role in Role:
                slot = Slot(fqn, role.value)
                if role is Role.WEIGHT and owner != fqn:
                    self.aliases[slot] = Slot(owner, role.value)
                    continue
                specs.setdefault(self._arena_of(fqn), []).append(SlotSpec(slot, recipes[fqn].format_of(role)))
        for product in products:
            part = specs.setdefault(self._arena_of_product(product), [])
            for expert, slots in enumerate(slot_names(product.fqn, product.experts)):
                part += [SlotSpec(slot, product.recipe.format_of(role), expert) for role, slot in slots.items()]
        used = {place for (place, _), part in specs.items() if part}
        specs = {key: part for key, part in specs.items() if part or key[0] not in used}  # Drop empty arenas.
        self._syncs = {
            (place, each): ArenaSync(
                Arena(part, each, settings.backend, settings.fallback if settings.enabled else None),
                patterns=patterns[place],
            )
            for (place, each), part in specs.items()
        }
        sync_groups = [None if g is None else SyncGroup(g) for g in distinct]
        self.syncs = list(self._syncs.values())
        self.sync_groups = [sync_groups[place] for place, _ in self._syncs]
        self.shared = settings.amax_sync and any(group is not None and group.communicates for group in self.sync_groups)

    @property
    def speaks(self) -> bool:
        """True on the one rank of the first group that logs messages for all of its ranks."""
        group = next((group for group in self.sync_groups if group is not None), None)
        return group is None or group.rank == min(group.ranks)

    def _arena_of(self, fqn: str) -> tuple[int, Recipe]:
        """Return (index of the group, recipe): the key of the arena that holds the module's slots."""
        return self._group_of(fqn), self.recipes[fqn]

    def _arena_of_product(self, product: _Product) -> tuple[int, Recipe]:
        """Return the key of the arena of all experts of a product. A group's pattern matches the product's fqn, or that
        of its module."""
        return self._group_of(product.fqn, product.owner), product.recipe

    def _group_of(self, *fqns: str) -> int:
        """Return the index of the first group with a pattern that matches one of these fqns."""
        for pattern, place in zip(self._patterns, self._place):
            if any(fnmatch.fnmatchcase(fqn, pattern) for fqn in fqns):
                return place
        return 0

    def grouped_slots(self, product: _Product, job: JobState) -> GroupedSlots:
        """Return the slots of a grouped product, for the conversion of its module."""
        sync = self._syncs[self._arena_of_product(product)]
        return GroupedSlots(sync, job, product.recipe, product.fqn, product.name, product.experts)

    def slots_of(self, fqn: str, linear: nn.Module, job: JobState) -> LinearSlots:
        """Return the slots of a module, for its conversion."""
        owner = self._weight_owner[id(linear.weight)]
        slots = {role: Slot(owner if role is Role.WEIGHT else fqn, role.value) for role in Role}
        syncs = self._syncs[self._arena_of(fqn)], self._syncs[self._arena_of(owner)]
        return LinearSlots(*syncs, job, self.recipes[fqn], slots)
