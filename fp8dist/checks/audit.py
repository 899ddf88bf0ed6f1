"""Audits: another rank repeats a cast or a product of a training step. If its bits differ, one of the two is wrong.

A comparison of replicas does not find a wrong product, because the all-reduce of gradients spreads it to all of them. A
product has two FP8 operands and their scales, so any rank with equal hardware and versions can repeat it.

A *site* is a number for one kind of cast or product (``SITES``) of one module. A *work* is one call at a site, recorded
with all that a repetition needs. The rank that made the call is its *owner*; the *auditor* repeats it first.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8dist.checks.contents import Digester, on_device, word_of
from fp8dist.checks.likeness import likeness
from fp8dist.checks.report import DivergenceReport, this_rank
from fp8dist.checks.works import Work, aligned, describe_work, digest_of, hash_of, repeat_work, work_of_call
from fp8dist.common.divergence import Finding
from fp8dist.modules.casters import SITES
from fp8dist.modules.linear_slots import LinearSlots
from fp8dist.modules.model_state import ModelState
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.groups import SyncGroup, own_rank
from fp8dist_kernels.formats import Role
from fp8dist_kernels.graphs import capturing
from fp8dist_kernels.taps import tap_on

KIND = "audit"
"""The ``kind`` of the findings of audits, and of the compared works in a report."""

Digest = list[int]
"""The two 64-bit halves of the digest of a work's results; [0, 0] if there is no work."""

_GOLDEN = 0.618
"""Audits step through a list by about this share of its length, so that successive ones visit distant modules."""


class Round(NamedTuple):
    """The digests of one work's results.

    ``own``: of the original call. ``auditor``: of the auditor's repetition. ``again``: of the owner's repetition.
    ``auditors_again``: of the auditor's second repetition. ``third``: of a third rank's; None: no third rank is like
    them.
    """

    own: Digest
    auditor: Digest
    again: Digest
    auditors_again: Digest
    third: Digest | None


class Audits:
    """The audits of one manager. An audited step records and compares one work of each arena.

    Args:
        sites: by index of the arena's sync in ``ModelState.syncs``: (fqn, first site) of each of its FP8 modules. The
            ranks of an arena give the same fqns in the same order.
        every: every so many steps, a step is audited.
        limit: the most bytes of tensors that an audit sends.
        calls: by site, the number of calls in which one forward does its work, for sites with several. An audit records
            one of them.
    """

    def __init__(
        self,
        sites: Mapping[int, Sequence[tuple[str, int]]],
        every: int,
        limit: int,
        calls: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.done = 0
        """Number of this rank's works that were audited."""
        self._sites = {place: tuple(of) for place, of in sites.items()}
        self._every, self._limit, self._calls = every, limit, calls
        # Of the current step. An arena is given by its index, as in ``sites``.
        self._wanted: dict[int, int] = {}  # Arena by site that is to be recorded.
        self._skip: dict[int, int] = {}  # Calls to let pass, by site.
        self._recorded: dict[int, Work] = {}  # By arena.
        self._names: dict[int, str] = {}  # Of the chosen work for reports, by arena.
        self._step = 0
        self._digester = Digester()
        self._likeness_word: int | None = None

    def begin(self, step: int, passed: int) -> None:
        """Choose the sites to record in the step that begins, if it is audited. Local.

        Args:
            step: number of the step, which decides the sites. If ranks count differently, they only have different
                sites audited.
            passed: boundaries since ``attach``. Decides whether the step is audited, so it is the same on all ranks.
        """
        self._wanted, self._skip, self._recorded, self._step = {}, {}, {}, step
        if (passed + 1) % self._every:
            return
        for place, modules in self._sites.items():
            fqn, work, site = _chosen(modules, step // self._every)
            self._wanted[site] = place
            self._skip[site] = hash_of(step, "call") % self._calls.get(site, 1)
            kind = SITES[work]
            self._names[place] = f"{fqn}: {f'cast of {kind.value}' if isinstance(kind, Role) else kind}"

    def record(self, op: str, site: int, args: tuple[Any, ...], options: Mapping[str, Any], results: Any) -> None:
        """Record a call at a chosen site: the first, or the chosen one of several. Local; not in a CUDA graph's
        capture. The arguments are those of a listener of ``fp8dist_kernels.taps``."""
        place = self._wanted.get(site)
        if place is None or place in self._recorded or capturing(results[0].device):
            return
        if self._skip[site]:
            self._skip[site] -= 1
            return
        work = work_of_call(op, site, args, options, results, self._limit, self._step, self._digester)
        if work is not None:
            self._recorded[place] = work

    def kept(self) -> Callable[[], None]:
        """Return a function that forgets all that is recorded between this call and its own. Local."""
        recorded, skip = dict(self._recorded), dict(self._skip)

        def put_back() -> None:
            self._recorded, self._skip = dict(recorded), dict(skip)

        return put_back

    def settle(self, place: int, sync: ArenaSync) -> DivergenceReport:
        """Repeat the recorded works of an arena on other ranks, and compare the results. COLLECTIVE over the sync's
        group, if it has one: an all-gather of sizes, an all-to-all, an all-gather of digests; the last two once more if
        any differ.

        A rank without a group, or with no other that is like it, repeats its own work. That finds errors that do not
        repeat.

        Args:
            place: index of the arena, one of ``due``. ``sync``: the arena's.
        """
        with on_device(sync.arena.device), torch.no_grad():
            return self._settle(self._recorded.pop(place, None), self._names[place], sync.arena.device, sync.group)

    @property
    def due(self) -> tuple[int, ...]:
        """Indices of the arenas that are audited at the end of this step. The same on the ranks of an arena."""
        return tuple(sorted(self._wanted.values()))

    def _settle(self, work: Work | None, name: str, device: torch.device, group: SyncGroup | None) -> DivergenceReport:
        # A rank whose module did not run has no work, but takes part in the collectives.
        ring = _Ring(group, 0 if work is None else len(work.message), self._likeness(device), device)
        own = _pair(None if work is None else work.digest)
        to_audit = ring.exchange(work, 1, ring.ran)
        audited = self._repeat(to_audit)
        gathered = ring.gather([*own, *audited])
        self.done += work is not None
        differ = [i for i in ring.ran if gathered[i][:2] != gathered[ring.next(i, 1)][2:]]
        if not differ:
            return DivergenceReport(compared={KIND: len(ring.ran)})
        rounds = self._repeat_again(ring, work, to_audit, gathered, differ)
        me = (
            this_rank(device, None if group is None else group.mesh_coordinates()),
            "" if work is None else describe_work(work),
        )
        everyone = [me] if group is None else group.gather(me)
        what = {participant.rank: text for participant, text in everyone}  # The owner's call in words.
        findings = []
        for i, found in rounds.items():
            owner, auditor, third = (ring.ranks[place] for place in (i, ring.next(i, 1), ring.next(i, 2)))
            odd, text = judge(found, owner, auditor, third)
            named, reference = tuple(sorted({owner, auditor})), None
            if odd is not None:
                named = (odd,)
                reference = next((rank for rank in (auditor, owner) if rank != odd), None)
            finding = Finding(self._step, KIND, name, named, reference, detail=f"{text} ({what[owner]})")
            findings.append(finding.located([participant for participant, _ in everyone]))
        return DivergenceReport(tuple(findings), {KIND: len(ring.ran)})

    def _repeat_again(
        self, ring: _Ring, work: Work | None, to_audit: Tensor | None, gathered: list[list[int]], differ: list[int]
    ) -> dict[int, Round]:
        """Repeat the works whose results differed, on the owner, the auditor and a third rank. COLLECTIVE: an
        all-to-all and an all-gather.

        Args:
            to_audit: the message of the work that this rank has audited.
            gathered: by place in the group, the digest of the rank's own work and of the one that it has audited.
            differ: the places of the owners.

        Returns:
            All digests of each of these works, by the owner's place.
        """
        third = ring.exchange(work, 2, [i for i in differ if ring.next(i, 2) != i])
        mine = [work.message if work is not None and ring.place in differ else None, to_audit, third]
        settled = ring.gather([number for message in mine for number in self._repeat(message)])
        return {
            i: Round(
                own=gathered[i][:2],
                auditor=gathered[ring.next(i, 1)][2:],
                again=settled[i][:2],
                auditors_again=settled[ring.next(i, 1)][2:4],
                third=settled[ring.next(i, 2)][4:] if ring.next(i, 2) != i else None,
            )
            for i in differ
        }

    def _repeat(self, message: Tensor | None) -> Digest:
        return _pair(None if message is None else digest_of(repeat_work(message), self._digester))

    def _likeness(self, device: torch.device) -> int:
        """Return a hash that is equal on ranks that must compute the same bits."""
        if self._likeness_word is None:
            self._likeness_word = word_of(likeness(device))
        return self._likeness_word


def audits_of(state: ModelState, modules: Sequence[LinearSlots]) -> Audits | None:
    """Number the sites of these modules, and make a job's casts and products notify its audits. Local.

    Args:
        modules: in the order of their fqns, so that ranks with the same modules number their sites alike.

    Returns:
        The audits; None if ``audit_every`` is 0, FP8 is switched off, or there are no modules.
    """
    settings = state.settings
    if not (settings.enabled and settings.audit_every and modules):
        return None
    sites: dict[int, list[tuple[str, int]]] = {}
    for number, slots in enumerate(modules):
        slots.caster.site = number * len(SITES)
        sites.setdefault(state.syncs.index(slots.sync), []).append((slots.fqn, slots.caster.site))
    weights = SITES.index(Role.WEIGHT)
    calls = {slots.caster.site + weights: slots.caster.calls_per_weight for slots in modules}
    audits = Audits(sites, settings.audit_every, settings.audit_bytes, calls)
    state.job.tap = tap_on(modules[0].sync.arena.device, audits.record)
    return audits


def judge(found: Round, owner: int, auditor: int, third: int) -> tuple[int | None, str]:
    """Decide which rank computed a work wrongly, when the owner and the auditor had different results. Pure.

    Args:
        owner, auditor, third: global ranks. If no other rank is like the owner, all three are the owner. With two ranks
            that are alike, ``found.third`` is None.

    Returns:
        The rank that computed wrongly, None if nobody can know; and the verdict in words.
    """
    # Steady: the rank's second result equals its first.
    steady, auditor_steady = found.again == found.own, found.auditors_again == found.auditor
    if auditor == owner:
        return owner, f"transient on rank {owner}, which repeated its own work: another result"
    if found.third is not None and found.third == found.auditor:
        how = "repeatedly" if steady else "once (transient)"
        return owner, f"rank {owner} computes wrong {how}; ranks {auditor} and {third} agree"
    if found.third is not None and found.third == found.own:
        how = "repeatedly" if auditor_steady else "once (transient)"
        return auditor, f"rank {auditor}, which audits rank {owner}, computes wrong {how}; {owner} and {third} agree"
    if found.third is not None:
        return None, f"ranks {owner}, {auditor} and {third} have three results: this work does not repeat"
    if not steady and found.again == found.auditor:
        return owner, f"transient on rank {owner}: repeated, it gets what rank {auditor} gets"
    if not auditor_steady and found.auditors_again == found.own:
        return auditor, f"transient on rank {auditor}, which audits: repeated, it gets what rank {owner} got"
    if steady and auditor_steady:
        return None, f"ranks {owner} and {auditor} differ repeatedly; of two ranks, none can be blamed"
    if steady != auditor_steady:
        odd, good = (auditor, owner) if steady else (owner, auditor)
        return odd, f"rank {odd} gets another result each time, and rank {good} the same"
    return None, f"ranks {owner} and {auditor} get other results each time: this work does not repeat"


def _chosen(modules: Sequence[tuple[str, int]], number: int) -> tuple[str, int, int]:
    """Return (fqn, index in ``SITES``, site) of the audit with this number. Successive audits visit all sites of all
    modules, distant ones first."""
    count = len(modules) * len(SITES)
    # With a stride that has no common divisor with ``count``, all are visited before one comes again.
    stride = next(s for s in range(round(count * _GOLDEN), 2 * count + 2) if math.gcd(s, count) == 1)
    module, work = divmod(number * stride % count, len(SITES))
    fqn, first = modules[module]
    return fqn, work, first + work


def _pair(digest: Tensor | None) -> Digest:
    """Return the halves of a digest, int64[2], as ints; zeros for None. Waits for the device."""
    low, high = [0, 0] if digest is None else digest.tolist()
    return [low, high]


class _Ring:
    """The ranks of an arena, by their places in its group. Each rank's work goes to the next rank that is like it.

    ``place``: this rank's. ``ranks``: global, by place. ``ran``: the places of ranks that have a work.
    """

    def __init__(self, group: SyncGroup | None, size: int, likeness: int, device: torch.device) -> None:
        """COLLECTIVE: one all-gather, if there are several ranks.

        Args:
            size: bytes of this rank's message; 0: it has no work.
            likeness: a hash that is equal on ranks that must compute the same bits.
            device: of the arena. Messages travel on the group's device, which may be another one (gloo: the CPU).
        """
        self._group = None if group is None or not group.communicates else group.process_group
        self._arena_device = device
        self._device = device if group is None else group.device
        self.place = 0 if self._group is None else dist.get_rank(self._group)
        self.ranks: Sequence[int] = (own_rank(),) if self._group is None else dist.get_process_group_ranks(self._group)
        gathered = self.gather([size, likeness])
        self._sizes = [size for size, _ in gathered]
        self._alike: dict[int, list[int]] = {}
        for place, (_, kind) in enumerate(gathered):
            self._alike.setdefault(kind, []).append(place)
        self._kinds = [kind for _, kind in gathered]
        self.ran = [place for place, size in enumerate(self._sizes) if size]

    def gather(self, numbers: list[int]) -> list[list[int]]:
        """Return the numbers of all ranks, by place. COLLECTIVE."""
        if self._group is None:
            return [numbers]
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        everyone = list(mine.new_empty(len(self.ranks), len(numbers)))
        dist.all_gather(everyone, mine, group=self._group)
        return [theirs.tolist() for theirs in everyone]

    def next(self, place: int, steps: int) -> int:
        """Return the place that is ``steps`` further in the ring of ranks that are like the one at ``place``."""
        alike = self._alike[self._kinds[place]]
        return alike[(bisect.bisect_left(alike, place) + steps) % len(alike)]

    def exchange(self, work: Work | None, steps: int, owners: Sequence[int]) -> Tensor | None:
        """Send the messages of the ranks at the places ``owners`` to the ranks ``steps`` further. COLLECTIVE: one
        all-to-all, unless there is one rank.

        Returns:
            The message for this rank, uint8[bytes] on the arena's device, or None.
        """
        if self._group is None:
            return None if work is None else work.message
        sends, gets = [0] * len(self.ranks), [0] * len(self.ranks)
        for i in owners:
            target = self.next(i, steps)
            if i == self.place:
                sends[target] = self._sizes[i]
            if target == self.place:
                gets[i] = self._sizes[i]
        nothing = torch.empty(0, dtype=torch.uint8, device=self._device)
        message = work.message.to(self._device) if work is not None and any(sends) else nothing
        received = aligned(sum(gets), 0, self._device)
        dist.all_to_all_single(received, message, gets, sends, group=self._group)
        if not any(gets):
            return None
        if self._device == self._arena_device:
            return received
        return aligned(sum(gets), 0, self._arena_device).copy_(received)
