"""A table of programs and their outcomes: the right result, a warning, an error, or the right result in silence.

``mistaken_*.py`` have programs with a mistake, and ``quiet_*.py`` programs without one, which must be silent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

SILENT, RIGHT, WARNED, RAISED = "silent", "right", "warned", "raised"
"""SILENT: right, and nothing is logged or warned of; see ``quiet.py``."""
SAID = frozenset({WARNED, RAISED})
NOT_SILENT = SAID | {RIGHT}
"""Allows any outcome except a silent wrong result."""


@dataclass(frozen=True)
class Scenario:
    """``program`` gets a ``Case`` of mistakes.py, or nothing if it is SILENT.

    ``words``: regular expressions that must all match one error or warning. ``loses``: the program loses a rank, so its
    groups are not reused and time out soon. ``everywhere``: all ranks must raise. ``once``: no rank may repeat the
    text.
    """

    name: str
    program: Callable[..., Any]
    ranks: int
    outcomes: frozenset[str]
    words: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    loses: bool = False
    everywhere: bool = False
    once: bool = False


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Scenarios(dict[str, Scenario]):
    """A table of scenarios by name. ``ranks``: of those that ``program``, ``variants`` and ``table`` add."""

    def __init__(self, ranks: int = 1) -> None:
        super().__init__()
        self._ranks = ranks

    def scenario(self, name: str, outcomes: str | frozenset[str], *words: str, **options: Any) -> Decorator:
        """Add the decorated program."""

        def add(program: Callable[..., Any]) -> Callable[..., Any]:
            self.add(name, program, outcomes, *words, **options)
            return program

        return add

    def add(
        self,
        name: str,
        program: Callable[..., Any],
        outcomes: str | frozenset[str],
        *words: str,
        ranks: int = 1,
        **options: Any,
    ) -> None:
        assert name not in self, name
        allowed = frozenset({outcomes}) if isinstance(outcomes, str) else outcomes
        self[name] = Scenario(name, program, ranks, allowed, words, **options)

    def program(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Add a SILENT program, named as the function."""
        return self.variants()(function)

    def variants(self, **arguments: Sequence[Any]) -> Decorator:
        """Add a SILENT program once for each combination of arguments."""

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            for values in itertools.product(*arguments.values()):
                named = dict(zip(arguments, values))
                label = ", ".join(f"{key} {getattr(value, '__name__', value)}" for key, value in named.items())
                name = f"{function.__name__.replace('_', ' ').strip()}: {label}".removesuffix(": ")
                self.add(name, partial(function, **named), SILENT, ranks=self._ranks)
            return function

        return add

    def table(self, programs: Mapping[str, Callable[..., Any]]) -> None:
        """Add SILENT programs by name."""
        for name, program in programs.items():
            self.add(name, program, SILENT, ranks=self._ranks)
