"""Overrides: recipes for single modules, by fqn patterns."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from typing import Literal

from torch import nn

from fp8dist.common.patterns import require_patterns
from fp8dist.errors import ConfigurationError
from fp8dist.state.recipe import Recipe, require_recipe
from fp8dist.state.slots import clean_fqn

High = Literal["high"]
"""Stands for high precision in place of a recipe."""


class Overrides:
    """``{pattern: recipe, or "high" for high precision}``; the first pattern (fnmatch) that matches a fully qualified
    name applies. The constructor raises ConfigurationError for other values."""

    def __init__(self, given: Mapping[str, Recipe | High]) -> None:
        if not isinstance(given, Mapping):
            raise ConfigurationError(
                'overrides must be a mapping such as {"blocks.0.*": "high", "lm_head": CurrentScaling()}, '
                f"got {given!r}"
            )
        require_patterns("overrides", given)
        for pattern, recipe in given.items():
            if recipe != "high":
                require_recipe(f"overrides[{pattern!r}]", recipe, 'a recipe, or "high" for high precision')
        self.given: Mapping[str, Recipe | High] = dict(given)  # Not a MappingProxyType, which cannot be pickled.

    def pattern_of(self, fqn: str) -> str | None:
        """Return the pattern that applies to a module; None: it has no override."""
        return next((pattern for pattern in self.given if fnmatch.fnmatchcase(fqn, pattern)), None)

    def recipe(self, fqn: str, default: Recipe) -> Recipe | None:
        """Return the recipe of a module; None: high precision."""
        pattern = self.pattern_of(fqn)
        given: Recipe | High = default if pattern is None else self.given[pattern]
        return given if isinstance(given, Recipe) else None


def first_and_last(model: nn.Module, first: int = 1, last: int = 1) -> dict[str, Recipe | High]:
    """Return overrides that keep a model's first and last layers in high precision: ``{"blocks.0.*": "high", …}``.

    Layers are the entries of the model's outermost ``nn.ModuleList``s that hold Linears or, if it has none, of its
    outermost ``nn.Sequential``s.

    Raises:
        ConfigurationError: the model has no such layers, or fewer than ``first + last``.
    """
    overrides: dict[str, Recipe | High] = {}
    stacks = list(_stacks(model, "", nn.ModuleList)) or list(_stacks(model, "", nn.Sequential))
    if not stacks:
        raise ConfigurationError("first_and_last: the model has no nn.ModuleList or nn.Sequential of Linears")
    for layers in stacks:
        if first < 0 or last < 0 or first + last > len(layers):
            raise ConfigurationError(f"first_and_last: cannot take {first} and {last} of {len(layers)} layers")
        chosen = [*layers[:first], *layers[len(layers) - last :]]
        for fqn, layer in chosen:
            overrides[fqn if isinstance(layer, nn.Linear) else f"{fqn}.*"] = "high"
    return overrides


def _stacks(module: nn.Module, fqn: str, kind: type[nn.Module]) -> Iterator[list[tuple[str, nn.Module]]]:
    """Yield the layers that hold Linears, for each outermost module of type ``kind``."""
    children = [(clean_fqn(f"{fqn}.{name}" if fqn else name), child) for name, child in module.named_children()]
    if isinstance(module, kind):
        layers = [(name, child) for name, child in children if any(isinstance(m, nn.Linear) for m in child.modules())]
        if layers:
            yield layers
        return
    for name, child in children:
        yield from _stacks(child, name, kind)
