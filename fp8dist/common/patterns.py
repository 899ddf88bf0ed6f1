"""Patterns of module names, as fnmatch has them: what ``prepare(skip=…)`` means, and which patterns match nothing."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Sequence

from fp8dist.common.names import nearest
from fp8dist.errors import ConfigurationError

DEFAULT_SKIP = ("*lm_head", "*lora_*")
"""Modules that stay in high precision unless the caller includes them."""


class Skip:
    """The patterns of ``prepare(skip=…)``: the defaults, then the caller's. The last one that matches a module counts.

    A pattern that begins with "!" includes its matches again.

    Args:
        given: one pattern or several; None: skip nothing, not even the defaults.

    Raises:
        ConfigurationError: ``given`` is something else.
    """

    def __init__(self, given: str | Iterable[str] | None) -> None:
        if isinstance(given, str):
            given = (given,)
        self.given: tuple[str, ...] = () if given is None else require_patterns("skip", given)
        self._patterns = () if given is None else (*DEFAULT_SKIP, *self.given)

    def pattern_of(self, fqn: str) -> str | None:
        """Return the pattern that skips the module; None: it is not skipped."""
        last = self._last(fqn)
        return None if last is None or last.startswith("!") else last

    def decides(self, fqn: str) -> bool:
        """True if a pattern, skipping or including, matches the module, or if there are no patterns at all. Else the
        caller has not thought of it."""
        return not self._patterns or self._last(fqn) is not None

    def _last(self, fqn: str) -> str | None:
        matching = (p for p in reversed(self._patterns) if fnmatch.fnmatchcase(fqn, p.removeprefix("!")))
        return next(matching, None)


def require_patterns(name: str, given: object) -> tuple[str, ...]:
    """Return ``given`` as a tuple of patterns. ``name``: of the argument, for the message.

    Raises:
        ConfigurationError: it is not an iterable of strings.
    """
    patterns = tuple(given) if isinstance(given, Iterable) else (given,)
    wrong = next((pattern for pattern in patterns if not isinstance(pattern, str)), None)
    if wrong is not None or not isinstance(given, Iterable):
        got = f"got {given!r}" if not isinstance(given, Iterable) else f"got {wrong!r} among them"
        raise ConfigurationError(
            f'{name} must hold patterns of module names, such as ("*.router", "blocks.0.*"), {got}'
        )
    return patterns


def matching(name: str, given: str | Iterable[str], fqns: Collection[str]) -> set[str]:
    """Return the names among ``fqns`` that a pattern in ``given`` matches, and after it none that begins with "!".
    ``name``: of the argument, for the message.

    Raises:
        ConfigurationError: ``given`` is something else, or a pattern matches nothing.
    """
    patterns = require_patterns(name, (given,) if isinstance(given, str) else given)
    if wrong := unmatched(patterns, list(fqns)):
        raise ConfigurationError(f"{name}: nothing has a name like {', '.join(wrong)}")
    included = ((fqn, [p for p in patterns if fnmatch.fnmatchcase(fqn, p.removeprefix("!"))]) for fqn in fqns)
    return {fqn for fqn, found in included if found and not found[-1].startswith("!")}


def unmatched(patterns: Iterable[str], fqns: Sequence[str]) -> list[str]:
    """Return the patterns that match none of these modules, each as text with the nearest names, for a message."""
    return [
        f"{pattern!r}{_instead(pattern.removeprefix('!'), fqns)}"
        for pattern in patterns
        if not any(fnmatch.fnmatchcase(fqn, pattern.removeprefix("!")) for fqn in fqns)
    ]


def _instead(pattern: str, fqns: Sequence[str]) -> str:
    """Return what the caller may have meant, in brackets; "": nothing is similar."""
    if any(fnmatch.fnmatchcase(fqn, f"{pattern}.*") for fqn in fqns):  # The pattern names a block, not its Linears.
        return f" (its modules are {f'{pattern}.*'!r})"
    found = nearest(pattern, fqns)
    return f" (nearest: {', '.join(map(repr, found))})" if found else ""


def shadowed(patterns: Iterable[str], fqns: Iterable[str]) -> list[str]:
    """Return the patterns that never apply, where the first match counts: earlier patterns match all their modules."""
    left = set(fqns)
    everything, hidden = frozenset(left), []
    for pattern in patterns:
        mine = {fqn for fqn in left if fnmatch.fnmatchcase(fqn, pattern)}
        if not mine and any(fnmatch.fnmatchcase(fqn, pattern) for fqn in everything):
            hidden.append(pattern)
        left -= mine
    return hidden
