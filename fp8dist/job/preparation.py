"""prepare(): convert a model's Linears to FP8Linears, and create their manager. restore() undoes it."""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fp8dist.checks.axes import Axes
from fp8dist.common.names import check_keywords, require_bool
from fp8dist.common.patterns import Skip, shadowed, unmatched
from fp8dist.common.text import first_few
from fp8dist.errors import ConfigurationError
from fp8dist.job.agreement import require_groups
from fp8dist.job.arenas import Assignment, ExpertProduct, assign, given_groups, products_of, specs_of, syncs_of
from fp8dist.job.arguments import require_model
from fp8dist.job.coverage import Survey, survey
from fp8dist.job.eligibility import Selection
from fp8dist.job.manager import ATTRIBUTE, Internals, StateManager, get_manager, managers_in
from fp8dist.modules.foreign import expert_products
from fp8dist.modules.fp8_experts import convert_experts
from fp8dist.modules.fp8_linear import convert
from fp8dist.modules.grouped_slots import GroupedSlots
from fp8dist.modules.job_state import JobState
from fp8dist.modules.linear_slots import LinearSlots
from fp8dist.modules.model_state import ModelState
from fp8dist.modules.overrides import High, Overrides
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.fallback import Fallback
from fp8dist.state.groups import GroupLike, SyncGroup
from fp8dist.state.precision import Precisions
from fp8dist.state.recipe import DelayedScaling, Recipe, require_recipe
from fp8dist.state.settings import AUDIT_BYTES, Settings, unknown_variables
from fp8dist.state.slots import Slot
from fp8dist_kernels import grouped_ops, ops
from fp8dist_kernels.formats import Role

logger = logging.getLogger("fp8dist")

_LOW_SHARE = 0.9
"""Share of matmul parameters in FP8 below which ``prepare`` warns."""

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
    at_rest_every: int | None = None,
    strict: bool = False,
    max_repairs: int | None = None,
    share_group: bool = False,
    axes: Axes | Mapping[str, GroupLike] | DeviceMesh | None = None,
    values: Callable[[], Mapping[str, Any]] | None = None,
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
        recipe: ``DelayedScaling()`` (the default), ``CurrentScaling()``, ``RowwiseScaling()``, ``BlockScaling()``,
            ``MXFP8Scaling()`` or ``NVFP4Scaling()`` (emulated: no GPU path).
        group: the ranks that share FP8 state: a ProcessGroup, or a DeviceMesh (all axes flattened). None is allowed on
            one rank only, or with ``amax_sync=False``.
        groups: other groups by pattern, such as ``{"*.experts.*": expert_group}``. A pattern matches the fqn of a
            module, or of a product of experts. The first match counts. Each group has its own arena.
        filter_fn: called as ``filter_fn(module, fqn)`` for eligible Linears. False: high precision.
        skip: fqn patterns (fnmatch) that stay in high precision, one or several, in addition to the defaults:
            ``"*lm_head"``, ``"*lora_*"`` and output heads of other names. The last match counts, and defaults come
            first: "!*lm_head" puts a head into FP8. None: no defaults.
        enabled: False: high precision throughout, same keys. ``FP8DIST_ENABLED=0`` overrides True.
        amax_sync: False: each rank keeps its own amaxes, without a collective.
        check_every: compare FP8 state and parameters every so many steps (see ``StateManager.check``). 0: never.
        check_policy: what to do if ranks differ: "raise", "warn", or "repair" (copy from the majority, else raise).
        backend: "triton" (kernels of this package), "torch" (``torch._scaled_mm``, eager casts), "reference"
            (dequantised float32 products), or "auto": "reference" on a CPU; on a GPU Triton, and
            ``torch._scaled_mm`` for products that the table for this GPU does not show to be faster in Triton.
        eval_precision: precision in ``eval()``: "fp8" or "high".
        fp8_all_gather: FSDP2 (``fully_shard``) gathers the weights of FP8Linears as FP8 bytes, half of bf16's (MXFP8:
            three quarters). Needs ``amax_sync``. Not with ``RowwiseScaling`` or ``NVFP4Scaling``. ``no_fp8()`` and
            ``calibrate()`` dequantise them.
        overrides: recipes, or "high" for high precision, by fqn pattern: ``{"blocks.0.*": CurrentScaling()}``. The
            first match counts. A recipe overrides ``skip``. A ``DelayedScaling`` that differs from ``recipe`` has its
            own arena and collective.
        fallback: when to put modules into high precision automatically. None: never.
        audit_every: every so many steps, another rank repeats one cast or product of this rank, and must get the same
            bits, else ``check_policy`` decides what follows; nothing can be repaired. 0: never.
        audit_bytes: bytes of operands that an audit sends. Of a larger product it repeats a block.
        at_rest_every: every so many steps, compare parameters and optimizer state after a step and before the next
            one. Warns about tensors that changed although torch counted no write. Local. 0: never.
        strict: True: raise ConfigurationError if a module would be left out that neither a pattern (``skip`` and its
            defaults, ``overrides``) nor ``filter_fn`` names. Nothing is changed then.
        max_repairs: for ``check_policy="repair"``: the number of checks in a row that may repair the same tensor; the
            next one raises. None: any number.
        share_group: False: ``attach`` makes a communicator for the ranks of each group, so that a rank that skips a
            step is missed by name. True: collectives use ``group`` itself, where the next collective of that rank, such
            as a bucket of DDP, is taken for the missing one: gloo aborts, and NCCL may mix the values.
        axes: checks also compare plain parameters that ``attach`` finds equal along these axes: ``{"tp": group}``, a
            DeviceMesh with names, or ``fp8dist.Axes``.
        values: a function whose values ``check_every`` also compares, as ``fp8dist.check_values`` does.

    If ``enabled``, ``amax_sync``, ``check_every``, ``check_policy``, ``audit_every``, ``at_rest_every`` or ``backend``
    is None, the environment variable (FP8DIST_ENABLED, FP8DIST_AMAX_SYNC, FP8DIST_CHECK_EVERY, FP8DIST_CHECK_POLICY,
    FP8DIST_AUDIT_EVERY, FP8DIST_AT_REST_EVERY, FP8DIST_BACKEND) decides, else the default (on, synced, 0, "raise", 0,
    0, "auto").
    FP8DIST_REPORT_DIR is the folder for evidence of a divergence.

    Raises:
        ConfigurationError: there are several ranks and no group, the model is prepared, wrapped or sharded already, or
            an argument has a wrong type or value. After any error the model is as it was.
    """
    require_model(model)
    recipe = DelayedScaling() if recipe is None else require_recipe("recipe", recipe)
    given = given_groups(group, groups)
    require_bool("strict", strict)
    along = Axes.of(axes)
    if values is not None and not callable(values):
        raise ConfigurationError(f"values must be a function that returns a mapping, got {type(values).__name__}")
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
        at_rest_every=at_rest_every,
        max_repairs=max_repairs,
        share_group=share_group,
    )
    if managers_in(model):
        raise ConfigurationError("the model, or a part of it, is prepared already: call fp8dist.restore() first")
    selection = Selection(Overrides({} if overrides is None else overrides), Skip(skip), filter_fn)
    surveyed = survey(model, selection)
    if strict:
        surveyed.require_named()
    linears, products = surveyed.chosen, products_of(surveyed.experts, selection.overrides, recipe)
    assignment = assign(linears, products, selection.overrides, recipe, given)
    arenas = syncs_of(specs_of(assignment, products, given, recipe), given, settings)
    state, slots, grouped = _build(assignment, products, arenas, settings)
    default, _ = next(iter(arenas.values()))
    state = replace(state, axes=along, values=values)
    manager = StateManager(model, recipe, state, default, assignment.aliases, surveyed.coverage(True), selection)
    with _undone_if_it_fails([*linears.values(), *surveyed.experts.values(), model]):
        _convert(surveyed, products, slots, grouped)
        model.__dict__[ATTRIBUTE] = manager
        _log_conversion(surveyed, state)
        _warn_of_patterns(surveyed.fqns, [product.fqn for product in products], selection, given.places)
    return manager


def _build(
    assignment: Assignment,
    products: Sequence[ExpertProduct],
    arenas: Mapping[tuple[int, Recipe], tuple[ArenaSync, SyncGroup | None]],
    settings: Settings,
) -> tuple[ModelState, dict[str, LinearSlots], dict[str, GroupedSlots]]:
    """Return the state of a model, and the slots of its Linears and products, by fqn.

    Raises:
        ConfigurationError: there are several ranks and no group, or a recipe excludes ``fp8_all_gather`` or experts.
    """
    for product in products:
        if not product.recipe.casts_experts:
            raise ConfigurationError(
                f"{product.fqn}: {type(product.recipe).__name__} does not multiply experts: give them another recipe "
                f'(overrides={{"{product.owner}": BlockScaling()}}), or "high" for high precision'
            )
    _require_gatherable(settings, assignment, products)
    pairs = sorted(arenas.values(), key=lambda pair: tuple(sorted(pair[1].ranks)) if pair[1] else ())
    syncs, groups = zip(*pairs)
    require_groups(settings, groups)
    shared = settings.amax_sync and any(group is not None and group.communicates for group in groups)
    job = JobState(settings.enabled, settings.backend, settings.eval_precision, settings.fp8_all_gather, shared)
    sync_of = {fqn: arenas[key][0] for fqn, key in assignment.keys.items()}
    linears = {}
    for fqn, owner in assignment.owners.items():
        slots = {role: Slot(owner if role is Role.WEIGHT else fqn, role.value) for role in Role}
        linears[fqn] = LinearSlots(sync_of[fqn], sync_of[owner], job, assignment.keys[fqn][1], slots)
    grouped = {of.fqn: GroupedSlots(sync_of[of.fqn], job, of.recipe, of.fqn, of.name, of.experts) for of in products}
    each = [precision for of in (*linears.values(), *grouped.values()) for precision in of.precisions]
    precisions = Precisions({precision.slots[Role.INPUT].fqn: precision for precision in each})
    return ModelState(settings, job, precisions, syncs, groups), linears, grouped


def _convert(
    surveyed: Survey,
    products: Sequence[ExpertProduct],
    slots: Mapping[str, LinearSlots],
    grouped: Mapping[str, GroupedSlots],
) -> None:
    ops.register_flops()
    grouped_ops.register_flops()
    for fqn, linear in surveyed.chosen.items():
        convert(linear, slots[fqn])
    of_module: dict[nn.Module, dict[str, GroupedSlots]] = defaultdict(dict)
    for of in products:
        of_module[of.module][of.name] = grouped[of.fqn]
    for module, its in of_module.items():
        convert_experts(module, its)


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
    inside = Internals(get_manager(model))
    prepared = inside.model
    inside.attachment.restore(prepared)
    delattr(prepared, ATTRIBUTE)
    return model


def _log_conversion(surveyed: Survey, state: ModelState) -> None:
    """Log which modules are in FP8 and which are not, and what their state takes if that is much. One rank warns about
    a low share."""
    for fqn, why in surveyed.left_out:
        logger.info("fp8dist: %s stays in high precision: %s", fqn or "the model", why.reason)
    logger.info("fp8dist: %d Linears are FP8Linears now", len(surveyed.chosen))
    if surveyed.experts:
        logger.info("fp8dist: the experts of %d mixtures are FP8Experts now", len(surveyed.experts))
    taken = sum(array.nbytes for sync in state.syncs for array in sync.arena.arrays)
    if taken >= _MUCH_STATE:
        slots = sum(len(sync.arena) for sync in state.syncs)
        logger.info("fp8dist: the FP8 state of %d slots takes %d MB on each rank", slots, taken // 1_000_000)
    if surveyed.has_fast_path:
        logger.warning(
            "fp8dist: torch's fast path of nn.TransformerEncoderLayer in eval() does not call its Linears, so "
            "it is not FP8; torch.backends.mha.set_fastpath_enabled(False) turns it off"
        )
    _warn_of_routers(surveyed, state.logs)
    _log_share(surveyed, state)
    if (strangers := unknown_variables()) and state.logs:
        named = ", ".join(f"{variable}{hint}" for variable, hint in strangers.items())
        logger.warning("fp8dist: environment: there is no setting %s", named)


def _log_share(surveyed: Survey, state: ModelState) -> None:
    """Log how much of the model is in FP8, if that is little."""
    coverage = surveyed.coverage(True)
    converted = len(surveyed.chosen) + len(surveyed.experts)
    level = logging.WARNING if state.logs else logging.INFO
    if not state.settings.enabled:
        logger.warning("fp8dist is switched off: %d modules stay in high precision", converted)
    elif not coverage.rows:
        logger.warning("fp8dist: no Linear of this model is eligible: it has no matmul weights")
    elif not converted:
        text = "fp8dist: no Linear of this model is eligible: FP8: %s; left out: %s"
        logger.log(level, text, coverage.summary, surveyed.summary())
    elif coverage.share < _LOW_SHARE:
        if all(why.named == "caller" for _, why in surveyed.left_out):
            level = logging.INFO
        logger.log(level, "fp8dist: FP8: %s; left out: %s", coverage.summary, surveyed.summary())


def _warn_of_routers(surveyed: Survey, logs: bool) -> None:
    """Warn about Linears beside a mixture that have an output per expert."""
    beside = set()
    for fqn, module in surveyed.experts.items():
        for name in expert_products(module) or ():
            beside.add((fqn.rpartition(".")[0], len(getattr(module, name))))
    linears = surveyed.chosen.items()
    routers = [fqn for fqn, of in linears if (fqn.rpartition(".")[0], getattr(of, "out_features", 0)) in beside]
    if routers:
        logger.log(
            logging.WARNING if logs else logging.INFO,
            "fp8dist: %s: as many outputs as the mixture has experts. If it is a router, its rounding in FP8 sends "
            "tokens to other experts: prepare(skip=%r)",
            first_few(routers, 3),
            f"*{routers[0].rpartition('.')[2]}",
        )


def _warn_of_patterns(
    fqns: Sequence[str], products: Sequence[str], selection: Selection, groups: Mapping[str, object]
) -> None:
    """Warn about patterns that match nothing. Those of ``groups`` may also match grouped products."""
    skip, overrides = selection.skip.given, selection.overrides.given
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


def _require_gatherable(settings: Settings, assignment: Assignment, products: Iterable[ExpertProduct]) -> None:
    recipes = {fqn: assignment.keys[fqn][1] for fqn in assignment.owners}
    recipes |= {product.owner: product.recipe for product in products}
    name = next((fqn for fqn, recipe in recipes.items() if recipe.ungathered), None)
    if settings.fp8_all_gather and name is not None:
        recipe = recipes[name]
        raise ConfigurationError(
            f"{name}: fp8_all_gather=True does not work with {type(recipe).__name__}: {recipe.ungathered}. Use another "
            "recipe for it, or leave fp8_all_gather out"
        )
