"""Which arena holds which slot: the four steps of ``prepare`` from a model's Linears and experts to their arenas.

Groups, then the assignment of modules to arenas, then the slots of each arena, then the arenas with their syncs. Each
step is a function of the one before, and changes nothing.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from fp8dist.errors import ConfigurationError
from fp8dist.job.arguments import require_mapping_of_groups
from fp8dist.modules.foreign import expert_products
from fp8dist.modules.grouped_slots import slot_names
from fp8dist.modules.overrides import Overrides
from fp8dist.state.arena import Arena
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.groups import GroupLike, SyncGroup, group_of_this_rank
from fp8dist.state.recipe import DelayedScaling, Recipe
from fp8dist.state.settings import Settings
from fp8dist.state.slots import Slot, SlotSpec
from fp8dist_kernels.formats import Role

_EXPERTS_HISTORY = 16
"""Longest history of experts for which no override gives a recipe. 92,160 slots of 1024 steps take 377 MB."""

Key = tuple[int, Recipe]
"""What the slots of one arena have in common: the place of their group in ``GivenGroups.groups``, and their recipe."""


class ExpertProduct(NamedTuple):
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


def products_of(experts: Mapping[str, nn.Module], overrides: Overrides, recipe: Recipe) -> list[ExpertProduct]:
    """Return the products of these experts. Without an override their histories are short, because experts have most of
    the slots."""
    default = recipe
    if isinstance(recipe, DelayedScaling):
        default = dataclasses.replace(recipe, history_len=min(recipe.history_len, _EXPERTS_HISTORY))
    return [
        ExpertProduct(fqn, name, module, overrides.recipe(fqn, default) or recipe)
        for fqn, module in experts.items()
        for name in expert_products(module) or ()
    ]


@dataclass(frozen=True)
class GivenGroups:
    """The groups that ``prepare`` was given, each once. ``groups``: first that of ``group=``, then those of
    ``groups=``. ``places``: by pattern, the index of its group in ``groups``. The first pattern that matches counts."""

    groups: tuple[GroupLike | None, ...]
    places: Mapping[str, int]

    def place_of(self, *fqns: str) -> int:
        """Return the place of the group of the first pattern that matches one of these fqns; 0, the default group, if
        none does."""
        matching = (at for pattern, at in self.places.items() if any(fnmatch.fnmatchcase(fqn, pattern) for fqn in fqns))
        return next(matching, 0)

    def patterns(self, place: int) -> tuple[str, ...]:
        """Return the patterns of a group."""
        return tuple(pattern for pattern, at in self.places.items() if at == place)


def given_groups(group: GroupLike | None, groups: Mapping[str, GroupLike] | None) -> GivenGroups:
    """First step: number the groups. Two patterns with the same group object share a place.

    Raises:
        ConfigurationError: ``groups`` is no mapping of patterns.
    """
    groups = {} if groups is None else groups
    require_mapping_of_groups(groups)
    distinct: list[GroupLike | None] = [group]
    places: dict[str, int] = {}
    for pattern, given in groups.items():
        if not any(other is given for other in distinct):
            distinct.append(given)
        places[pattern] = next(place for place, other in enumerate(distinct) if other is given)
    return GivenGroups(tuple(distinct), places)


@dataclass(frozen=True)
class Assignment:
    """The arenas of modules. ``keys``: of each Linear, and of each product, by fqn. ``owners``: by fqn of a Linear, the
    first one with its weight, whose arena holds the weight's slot."""

    keys: Mapping[str, Key]
    owners: Mapping[str, str]

    @property
    def aliases(self) -> dict[Slot, Slot]:
        """The weight slots of Linears that share the weight of another one, with that one's slot."""
        role = Role.WEIGHT.value
        return {Slot(fqn, role): Slot(owner, role) for fqn, owner in self.owners.items() if owner != fqn}


def assign(
    linears: Mapping[str, nn.Module],
    products: Sequence[ExpertProduct],
    overrides: Overrides,
    recipe: Recipe,
    groups: GivenGroups,
) -> Assignment:
    """Second step: choose the arena of each module. For experts, a pattern may match the product's fqn, or that of its
    module.

    Raises:
        ConfigurationError: Linears with one weight have several recipes.
    """
    keys = {fqn: (groups.place_of(fqn), overrides.recipe(fqn, recipe) or recipe) for fqn in linears}
    owners: dict[str, str] = {}
    by_weight: dict[int, str] = {}
    for fqn in sorted(linears):
        owner = owners[fqn] = by_weight.setdefault(id(linears[fqn].weight), fqn)
        if keys[owner][1] != keys[fqn][1]:
            raise ConfigurationError(f"{owner} and {fqn} share a weight: overrides must give both the same recipe")
    keys |= {product.fqn: (groups.place_of(product.fqn, product.owner), product.recipe) for product in products}
    return Assignment(keys, {fqn: owners[fqn] for fqn in linears})


def specs_of(
    assignment: Assignment, products: Iterable[ExpertProduct], groups: GivenGroups, recipe: Recipe
) -> dict[Key, list[SlotSpec]]:
    """Third step: list the slots of each arena. A group without modules has one empty arena, of the default recipe."""
    specs: dict[Key, list[SlotSpec]] = {(place, recipe): [] for place in range(len(groups.groups))}
    for fqn, owner in sorted(assignment.owners.items()):
        key = assignment.keys[fqn]
        roles = [role for role in Role if role is not Role.WEIGHT or owner == fqn]
        specs.setdefault(key, []).extend(SlotSpec(Slot(fqn, role.value), key[1].format_of(role)) for role in roles)
    for product in products:
        part = specs.setdefault(assignment.keys[product.fqn], [])
        for expert, slots in enumerate(slot_names(product.fqn, product.experts)):
            part += [SlotSpec(slot, product.recipe.format_of(role), expert) for role, slot in slots.items()]
    used = {place for (place, _), part in specs.items() if part}
    return {key: part for key, part in specs.items() if part or key[0] not in used}  # Drop empty arenas.


def syncs_of(
    specs: Mapping[Key, list[SlotSpec]], groups: GivenGroups, settings: Settings
) -> dict[Key, tuple[ArenaSync, SyncGroup | None]]:
    """Fourth step: make the arenas, each with its sync and group. The first is that of the default group, if there are
    slots for it."""
    fallback = settings.fallback if settings.enabled else None
    made = [None if group is None else group_of_this_rank(group) for group in groups.groups]
    return {
        (at, each): (ArenaSync(Arena(part, each, settings.backend, fallback), patterns=groups.patterns(at)), made[at])
        for (at, each), part in specs.items()
    }
