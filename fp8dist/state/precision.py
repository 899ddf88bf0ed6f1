"""Which GEMMs of which module run in high precision now, and for how long.

This state is on the host and the same on all ranks: only calls that all ranks make, and results of a sync, change it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from fp8dist.errors import CheckpointError
from fp8dist.state.slots import Slot
from fp8dist_kernels import GEMMS, Gemm
from fp8dist_kernels.formats import Role

OBSERVED_STEPS = 16
"""A time-limited override records amaxes in its last steps, so that the module returns to FP8 with current scales."""

_USERS: Mapping[Role, frozenset[Gemm]] = MappingProxyType(
    {
        Role.INPUT: frozenset[Gemm](("fprop", "wgrad")),
        Role.WEIGHT: frozenset[Gemm](("fprop", "dgrad")),
        Role.GRAD_OUTPUT: frozenset[Gemm](("dgrad", "wgrad")),
    }
)
"""The GEMMs that use a tensor, by its role."""


class Changes:
    """A counter that several ``Precision`` objects share, such as those of a product's experts. A reader that keeps the
    last ``count`` sees in one comparison that none of them has changed."""

    def __init__(self) -> None:
        self.count = 0


class Precision:
    """The precision of one module, or of one expert of a grouped product.

    ``high``: the GEMMs that run in high precision now. ``observing``: True while amaxes are also recorded for tensors
    that are not cast. Compiled forwards read only these two, which change seldom, and not the number of steps left.
    ``turns``: how often the two changed. ``slots``: by role, the slot of the module's tensor.

    Methods that change the precision return the roles that are woken: those whose tensors are cast from now on, but
    were neither cast nor observed in the last step. Their scales are old.
    """

    def __init__(self, slots: Mapping[Role, Slot], lasting: tuple[Gemm, ...], changes: Changes | None = None) -> None:
        """``lasting``: the GEMMs in high precision until further notice. ``changes``: counts each change of ``high``
        or ``observing``; None: a counter of its own."""
        self.slots = dict(slots)
        self.changes = Changes() if changes is None else changes
        self.high = self._initial = self._lasting = lasting
        self.observing = False
        self.turns = 0
        self._clock = 0  # Boundaries counted; those with nothing to do are not.
        # Time-limited overrides, each with an end of its own: (True for high precision, ``_clock`` at its end).
        self._ends: dict[Gemm, tuple[bool, int]] = {}
        self._next = 0  # ``_clock`` when the next override ends, or begins to be observed.
        self._unseen: set[Role] = set()  # Roles neither cast nor observed in the last step.
        self._steady = False  # The last ``end_step`` changed nothing but the number of steps left.

    @property
    def passing(self) -> bool:
        """True while a time-limited override is active."""
        return bool(self._ends)

    def falls(self, steps: int, gemms: tuple[Gemm, ...] = GEMMS) -> bool:
        """True unless all of ``gemms`` are already in high precision, for ``steps`` or more."""
        return not all(self._stays(gemm, steps) for gemm in gemms)

    def _stays(self, gemm: Gemm, steps: int) -> bool:
        """True if a GEMM is in high precision already, for ``steps`` or more."""
        high, end = self._ends.get(gemm, (gemm in self._lasting, None))
        return high and (end is None or end - self._clock >= steps)

    def change(self, gemms: tuple[Gemm, ...], to_high: bool, steps: int | None) -> set[Role]:
        """Put GEMMs into high precision or into FP8, for ``steps`` boundaries, or without limit if None.

        GEMMs that are already in high precision for longer stay so. Return the woken roles.
        """
        if to_high and steps is not None and not self.falls(steps, gemms):
            return set()

        for gemm in gemms:
            if steps is None:
                self._ends.pop(gemm, None)
            elif not (to_high and self._stays(gemm, steps)):
                self._ends[gemm] = to_high, self._clock + steps
        if steps is None:
            before = self._lasting
            self._lasting = tuple(gemm for gemm in GEMMS if (to_high if gemm in gemms else gemm in before))
        return self._follow()

    @property
    def moving(self) -> bool:
        """True if ``end_step`` has anything to do."""
        idle = {role for role, users in _USERS.items() if users <= set(self.high)}
        return self.passing or self._unseen != idle

    def unseen(self, role: Role) -> bool:
        """True if the tensor of ``role`` was neither cast nor observed in the last step."""
        return role in self._unseen

    def count_down(self) -> bool:
        """Count a boundary that changes only the number of steps left. Return False if it is another: ``end_step``."""
        counts = self._steady and self.passing and self._clock + 1 != self._next
        self._clock += counts
        return counts

    def end_step(self) -> set[Role]:
        """Count a boundary. Return the woken roles."""
        for role, users in _USERS.items():
            if users <= set(self.high) and not self.observing:
                self._unseen.add(role)
            else:
                self._unseen.discard(role)
        turns = self.turns
        self._clock += 1
        woken = self._follow()
        self._steady = self.turns == turns
        return woken

    @property
    def recorded(self) -> frozenset[Role]:
        """The roles whose tensors are recorded: those that a GEMM in FP8 uses, or all while ``observing``."""
        return frozenset(role for role, users in _USERS.items() if self.observing or not users <= set(self.high))

    def _follow(self) -> set[Role]:
        before = self.high, self.observing
        now, ends = self._clock, self._ends.items()
        self._ends = {gemm: of for gemm, of in ends if of[1] > now and of[0] != (gemm in self._lasting)}
        self.high = tuple(gemm for gemm in GEMMS if (gemm in self._lasting) != (gemm in self._ends))
        left = [end - now for _, end in self._ends.values()]
        self.observing = any(steps <= OBSERVED_STEPS for steps in left)
        turns = (steps - OBSERVED_STEPS if steps > OBSERVED_STEPS else steps for steps in left)
        self._next = now + min(turns, default=0)
        if (self.high, self.observing) != before:
            self._steady = False
            self.turns += 1
            self.changes.count += 1
        woken = {role for role in self._unseen if not _USERS[role] <= set(self.high)}
        self._unseen -= woken
        return woken

    def describe(self) -> dict[str, Any] | None:
        """Return plain JSON values for ``restore``, or None for the initial state."""
        if self._lasting == self._initial and not self.passing and not self._unseen:
            return None
        left = {gemm: end - self._clock for gemm, (_, end) in self._ends.items()}
        alike = len(set(left.values())) < 2
        return {
            "lasting": None if self._lasting == self._initial else list(self._lasting),
            "passing": list(self.high) if self.passing else None,
            "left": max(left.values(), default=0) if alike else left,
            "unseen": sorted(role.value for role in self._unseen),
        }

    def restore(self, described: Mapping[str, Any] | None) -> set[Role]:
        """Adopt a state that another ``Precision`` described. None: the initial state of this one, which may differ.

        Returns:
            The woken roles: cast here, but neither cast nor observed there in the last step.

        Raises:
            CheckpointError: ``described`` is malformed. Nothing was changed.
        """
        if described is None:
            lasting, ends, unseen = self._initial, {}, set[Role]()
        else:
            try:
                lasting = self._initial if described["lasting"] is None else _gemms(described["lasting"])
                passing = None if described["passing"] is None else _gemms(described["passing"])
                left = described["left"]
                if not isinstance(left, Mapping):
                    left = dict.fromkeys(GEMMS, left) if left else {}
                ends = {gemm: (gemm in (passing or ()), self._clock + int(left[gemm])) for gemm in _gemms(left)}
                unseen = {Role(role) for role in described["unseen"]}
                if (passing is not None) != bool(ends) or any(end <= self._clock for _, end in ends.values()):
                    raise ValueError
            except (KeyError, TypeError, ValueError, OverflowError):
                raise CheckpointError(f"FP8 state has a malformed precision of {self.slots[Role.INPUT].fqn}") from None
        self._lasting, self._ends, self._unseen = lasting, ends, unseen
        self._steady = False
        return self._follow()


def _gemms(names: Iterable[str]) -> tuple[Gemm, ...]:
    named = set(names)
    if not named <= set(GEMMS):
        raise ValueError
    return tuple(gemm for gemm in GEMMS if gemm in named)


class Precisions:
    """The precision of all modules of one manager, by fqn. Everything is local, and the same on all ranks.

    ``fallbacks``: how often a module fell back. ``version``: incremented when ``end_step`` changes what a module
    computes or observes. Methods that change precisions return the slots that are woken: see ``Precision``. The slot of
    a tied weight is woken only if no other module has cast or observed it.
    """

    def __init__(self, by_fqn: Mapping[str, Precision]) -> None:
        self.by_fqn = {fqn: by_fqn[fqn] for fqn in sorted(by_fqn)}
        self.fallbacks = self.version = 0
        self._moving = {fqn for fqn, precision in by_fqn.items() if precision.moving}
        users: dict[Slot, list[tuple[Precision, Role]]] = {}
        for precision in self.by_fqn.values():
            for role, slot in precision.slots.items():
                users.setdefault(slot, []).append((precision, role))
        self._shared = {slot: of for slot, of in users.items() if len(of) > 1}

    @property
    def high(self) -> int:
        """Number of modules with a GEMM in high precision now."""
        return sum(bool(precision.high) for precision in self.by_fqn.values())

    @property
    def idle(self) -> bool:
        """True if there are modules, and none computes in FP8 now."""
        return bool(self.by_fqn) and all(precision.high == GEMMS for precision in self.by_fqn.values())

    @property
    def cast(self) -> set[Slot]:
        """The slots whose tensors at least one module casts now."""
        return {
            slot
            for precision in self.by_fqn.values()
            for role, slot in precision.slots.items()
            if not _USERS[role] <= set(precision.high)
        }

    def within(self, fqn: str) -> list[Precision]:
        """Return the precision of a module, or those of the experts of its products."""
        own = self.by_fqn.get(fqn)
        inside = f"{fqn}." if fqn else ""
        return [own] if own is not None else [of for name, of in self.by_fqn.items() if name.startswith(inside)]

    def matching(self, pattern: str) -> list[str]:
        """Return the fqns that match ``pattern`` (fnmatch)."""
        return [fqn for fqn in self.by_fqn if fnmatch.fnmatchcase(fqn, pattern)]

    def change(self, fqns: Iterable[str], gemms: tuple[Gemm, ...], to_high: bool, steps: int | None) -> set[Slot]:
        """Call ``Precision.change`` on these modules. Return the woken slots."""
        return self._woken({fqn: self.by_fqn[fqn].change(gemms, to_high, steps) for fqn in fqns})

    def end_step(self) -> set[Slot]:
        """Count a boundary. Return the woken slots."""
        if not self._moving:
            return set()
        changing = [fqn for fqn in self._moving if not self.by_fqn[fqn].count_down()]  # Few, of many experts.
        moving = [self.by_fqn[fqn] for fqn in changing]
        changes = sum(each.changes.count for each in moving)
        woken = {fqn: self.by_fqn[fqn].end_step() for fqn in changing}
        self.version += sum(each.changes.count for each in moving) != changes
        return self._woken(woken)

    def _woken(self, woken: Mapping[str, set[Role]]) -> set[Slot]:
        for fqn in woken:
            (self._moving.add if self.by_fqn[fqn].moving else self._moving.discard)(fqn)
        slots = {self.by_fqn[fqn].slots[role] for fqn, roles in woken.items() for role in roles}
        now = {id(self.by_fqn[fqn]): roles for fqn, roles in woken.items()}
        # Another user of a tied weight may have cast or observed it.
        return {
            slot
            for slot in slots
            if all(role in now.get(id(user), ()) or user.unseen(role) for user, role in self._shared.get(slot, ()))
        }

    def slots_of(self, fqns: Iterable[str]) -> set[Slot]:
        """Return the slots of these modules, except for slots that several modules share."""
        return {slot for fqn in fqns for slot in self.by_fqn[fqn].slots.values()} - self._shared.keys()

    def fall_back(self, slots: Iterable[Slot], steps: int) -> list[str]:
        """Put the modules that cast these tensors into high precision, with all their GEMMs. Return their fqns.

        Modules that are already in high precision for longer stay so.
        """
        wanted = set(slots)
        fallen = [fqn for fqn, of in self.by_fqn.items() if wanted & set(of.slots.values()) and of.falls(steps)]
        self.change(fallen, GEMMS, True, steps)
        self.fallbacks += len(fallen)
        return fallen

    def describe(self) -> dict[str, Any]:
        """Return plain JSON values for the modules that are not in their initial state."""
        described = {fqn: precision.describe() for fqn, precision in self.by_fqn.items()}
        return {fqn: value for fqn, value in described.items() if value is not None}

    def restore(self, described: Mapping[str, Any]) -> set[Slot]:
        """Adopt the output of ``describe``. Modules that it does not name return to their initial state. Return the
        woken slots.

        Raises:
            CheckpointError: the precision of a module is malformed.
        """
        return self._woken({fqn: each.restore(described.get(fqn)) for fqn, each in self.by_fqn.items()})
