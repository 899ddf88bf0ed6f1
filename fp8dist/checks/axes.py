"""Axes: which plain tensors the ranks of a named axis hold as copies.

A plain tensor does not show whether ranks hold copies of it or parts: with tensor parallelism written by hand, the
weight of a LayerNorm looks like a shard of a Linear. But copies start equal, and shards seldom do. So a tensor that is
equal on the ranks of an axis when it is first compared there is *adopted*: it counts as a copy from then on.
"""

from __future__ import annotations

import fnmatch
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from fp8dist.checks.contents import word_of
from fp8dist.common.patterns import require_patterns
from fp8dist.common.text import first_few
from fp8dist.errors import ConfigurationError
from fp8dist.state.groups import GroupLike, SyncGroup, group_of_this_rank, maximum

logger = logging.getLogger("fp8dist")


@dataclass(frozen=True)
class Axes:
    """The axes of a job, such as tensor parallelism, for ``prepare(axes=…)`` and ``fp8dist.check(axes=…)``.

    A plain parameter that is equal on the ranks of an axis when it is first compared there, at ``attach`` or in the
    first check, is a copy: later checks compare it, its gradient and its optimizer state; with ``buffers=True`` also
    buffers that were equal. Make the first comparison before the first step. Also compares the local parts of DTensors
    along axes that are not in their mesh. Name axes whose ranks run the same modules. If ranks have parameters of other
    names, as the stages of a pipeline have, only ``copies`` are compared along the axis. All ranks of an axis must take
    part in a check.

    Args:
        groups: the group of this rank on each axis, by name; or a DeviceMesh, each of whose axes has a name. The same
            names on all ranks that check.
        copies: parameters that some ranks of an axis hold under another name: ``{"embed.weight": "head.weight"}``. They
            are compared from the start, on each axis where one rank has the first name only and another one the second.
        distinct: one fqn pattern or several, of parameters that each rank of an axis has for itself although they start
            equal, such as the shards of a bias that starts as zeros.

    Raises:
        ConfigurationError: an argument has another type, or the mesh has no names.
    """

    groups: Mapping[str, GroupLike] | DeviceMesh
    copies: Mapping[str, str] = field(default_factory=dict)
    distinct: str | Iterable[str] = ()

    def __post_init__(self) -> None:
        given = self.groups
        if isinstance(given, DeviceMesh):
            if given.mesh_dim_names is None:
                raise ConfigurationError("axes: the DeviceMesh has no names: make it with mesh_dim_names")
            given = {name: given.get_group(name) for name in given.mesh_dim_names}
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise ConfigurationError(
                f'axes must map names to groups, such as {{"tp": group}}, or be a DeviceMesh with names; got {given!r}'
            )
        if not isinstance(self.copies, Mapping) or not all(
            isinstance(n, str) for of in self.copies.items() for n in of
        ):
            raise ConfigurationError(
                f'copies must map names to names, such as {{"embed.weight": "head.weight"}}, got {self.copies!r}'
            )
        distinct = (self.distinct,) if isinstance(self.distinct, str) else self.distinct
        object.__setattr__(self, "distinct", require_patterns("distinct", distinct))
        object.__setattr__(self, "groups", MappingProxyType({name: given[name] for name in sorted(given)}))

    def describe(self) -> dict[str, list[str]]:
        """Return what must be the same on all ranks, as JSON values: names of the axes, and ``copies``."""
        return {"names": list(self.groups), "copies": [f"{a}={b}" for a, b in sorted(self.copies.items())]}  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, object]) -> Axes:
        return self  # Groups are not copied.

    @classmethod
    def of(cls, given: Axes | Mapping[str, GroupLike] | DeviceMesh | None) -> Axes | None:
        """Return what a caller gave as ``axes``; None: nothing."""
        axes = given if given is None or isinstance(given, Axes) else cls(given)
        return axes if axes is not None and axes.groups else None


class Found(NamedTuple):
    """What the first comparison along an axis found.

    ``equal``: names of the tensors that were equal; None: the ranks hold tensors of other names. ``held``: originals of
    ``copies`` of which both names are held on this axis. ``shared``: those of ``held`` that are compared along it.
    """

    equal: frozenset[str] | None = frozenset()
    held: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()


Memory = dict[tuple[str, str], Found]
"""What the first comparisons of a model have found, by axis and identity of its ranks."""


class OpenTensor(NamedTuple):
    """A local tensor that may be a copy along ``axes``, with a digest of its name, shape, dtype and values."""

    name: str
    digest: int
    axes: Sequence[str]


class Adopted:
    """What one model holds as copies along its axes.

    Args:
        axes: as the caller named them.
        memory: ``adopt`` adds to it.
        log: called on one rank of each axis, as ``log(axis, ranks, found, names of the tensors)``.

    Attributes:
        error: why this rank could not read its tensors for the last ``adopt``; None: it could.
    """

    def __init__(
        self,
        axes: Axes,
        memory: Memory,
        log: Callable[[str, int, Found, Sequence[str]], None] | None = None,
    ) -> None:
        assert isinstance(axes.groups, Mapping)
        self.axes, self._memory, self._log = axes, memory, log or _log_adopted
        self.groups = {name: group_of_this_rank(group) for name, group in axes.groups.items()}
        self.error: Exception | None = None

    def pending(self, names: Collection[str]) -> list[str]:
        """Return the axes that were not compared before, or for a model with other names, such as one inside another
        module. ``names``: of the model's tensors."""
        return [
            axis
            for axis in self.groups
            if self._key(axis) not in self._memory or ((of := self.found(axis).equal) and of.isdisjoint(names))
        ]

    def _key(self, axis: str) -> tuple[str, str]:
        return axis, self.groups[axis].identity

    def found(self, axis: str) -> Found:
        """Return what the first comparison along an axis found: nothing, if there was none."""
        return self._memory.get(self._key(axis), Found())

    def is_copy(self, name: str, axis: str) -> bool:
        """True if the ranks of an axis hold copies of the tensor under this name."""
        return name in (self.found(axis).equal or ()) and not self.is_distinct(name)

    def is_distinct(self, name: str) -> bool:
        """True if the caller says that each rank has the tensor for itself."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.axes.distinct)

    def adopt(self, among: Sequence[str], tensors: Sequence[OpenTensor] | None, names: Collection[str]) -> None:
        """Compare tensors along axes that were not compared before, and remember which are equal. COLLECTIVE over each
        of these axes: one MAX, and one more with 16 bytes for each tensor.

        Args:
            among: the axes to compare, the same on all ranks.
            tensors: of this rank. None: it could not read them, and nothing is remembered along its axes.
            names: of all parameters of this rank; a tied one has several.
        """
        copies = sorted(self.axes.copies.items())
        flags = [flag for a, b in copies for flag in (a in names, b in names, (a in names) != (b in names))]
        for axis in among:
            group = self.groups[axis]
            if not group.communicates:
                self._memory[self._key(axis)] = Found()
                continue
            mine = {one.name: one.digest for one in tensors or () if axis in one.axes}
            word = word_of(tuple(sorted(mine)))
            word_max, inverse, failed, *some = maximum(group, [word, ~word, int(tensors is None), *map(int, flags)])
            if failed:
                continue
            held = [(b, some[3 * i : 3 * i + 3]) for i, (_, b) in enumerate(copies)]
            found = Found(
                _equal_along(group, mine) if word_max == ~inverse else None,
                frozenset(b for b, (first, second, _) in held if first and second),
                frozenset(b for b, of in held if all(of)),
            )
            self._memory[self._key(axis)] = found
            if group.rank == min(group.ranks):
                self._log(axis, group.size, found, list(mine))
                # Ranks that hold other names may have what the pattern means.
                unused = [of for of in self.axes.distinct if not fnmatch.filter(names, of)] if found.equal else []
                if unused:
                    logger.warning("fp8dist: axis %s: distinct=%s matches no parameter", axis, first_few(unused))

    def require_copies(self, names: Collection[str]) -> None:
        """Raise ConfigurationError if on no axis both names of an entry of ``copies`` are held. ``names``: of this
        rank's parameters. Local."""
        for a, b in self.axes.copies.items():
            if not ({a, b} <= set(names) or any(b in self.found(axis).held for axis in self.groups)):
                raise ConfigurationError(
                    f"copies={{{a!r}: {b!r}}}: no axis ({', '.join(self.groups)}) has ranks that hold both names"
                )

    def advice(self, names: Iterable[str]) -> str:
        """Return a note for a report on these tensors: how to say that they are no copies; "" if none was adopted.
        ``names``: also those of optimizer state."""
        parameters = dict.fromkeys(of for name in names for of in (name, name.rpartition(".")[0]))
        found = {name: axis for name in parameters for axis in self.groups if self.is_copy(name, axis)}
        if not found:
            return ""
        name, axis = next(iter(found.items()))
        return (
            f"{first_few(list(found), 3)}: compared along axis {axis}, because its ranks held equal values at first. "
            "Look for a gradient that is not summed over the axis. If each of its ranks is to have its own values, "
            f"pass axes=fp8dist.Axes(…, distinct={pattern_of(name)!r})"
        )


def _equal_along(group: SyncGroup, digests: Mapping[str, int]) -> frozenset[str]:
    """Return the names of the tensors that all ranks of a group hold alike. COLLECTIVE if there are any.

    ``digests``: by name. The names are the same on all ranks.
    """
    if not digests:
        return frozenset()
    names = sorted(digests)
    most = maximum(group, [*(digests[name] for name in names), *(~digests[name] for name in names)])
    return frozenset(name for i, name in enumerate(names) if most[i] == ~most[len(names) + i])


def pattern_of(name: str) -> str:
    """Return the name with "*" in place of each number that is a whole component: "blocks.*.norm.weight"."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _by_pattern(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the names by pattern."""
    kin: dict[str, list[str]] = {}
    for name in names:
        kin.setdefault(pattern_of(name), []).append(name)
    return kin


def _listed(kin: Mapping[str, Sequence[str]]) -> str:
    """Return patterns with the number of their names, as text."""
    return first_few([f"{pattern} ({len(of)})" for pattern, of in kin.items() if of], 8)


def log_equal(axis: str, ranks: int, found: Found, names: Sequence[str]) -> None:
    """Log which tensors are equal on all ranks of a job that names no axes, and are not compared over all of them."""
    if found.equal:
        logger.info(
            "fp8dist: attach(): equal on all %d ranks, but not compared over all of them: %s. If they are copies, name "
            "an axis: prepare(axes=…)",
            *(ranks, _listed(_by_pattern(name for name in names if name in found.equal))),
        )


def _log_adopted(axis: str, ranks: int, found: Found, names: Sequence[str]) -> None:
    """Log what is compared along an axis and what is not, by pattern. Warn if of tensors with the same pattern few
    differ: these may have parted before."""
    copies, equal = "".join(f"; copies of {name}" for name in sorted(found.shared)), found.equal
    if not names and not copies:
        return
    if equal is None:
        logger.info("fp8dist: axis %s: its ranks hold tensors of other names%s", axis, copies or ": none compared")
        return
    kin = _by_pattern(names)
    apart = {pattern: [n for n in of if n not in equal] for pattern, of in kin.items()}
    logger.info(
        "fp8dist: axis %s: %d of %d tensors are equal on its ranks, and compared from now on%s; not compared: %s",
        axis,
        len(equal),
        len(names),
        copies,
        _listed(apart),
    )
    for pattern, of in apart.items():
        if of and 2 * len(of) <= len(kin[pattern]):
            logger.warning(
                "fp8dist: axis %s: %d of %d tensors %s are equal on its ranks, but not %s: if these are copies, "
                "they have parted already, and are not compared",
                axis,
                len(kin[pattern]) - len(of),
                len(kin[pattern]),
                pattern,
                first_few(of),
            )
