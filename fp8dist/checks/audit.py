"""Audits: another rank repeats a cast or a product of a training step, and gets the same bits, or one of them is wrong.

Replicas cannot show a wrong product: the gradient all-reduce gives it to all of them alike. A product is two FP8
operands and their scales, so any rank with equal hardware and versions can repeat it.
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

from fp8dist.checks.contents import Digester, on_device
from fp8dist.checks.likeness import likeness
from fp8dist.checks.protocol import word_of
from fp8dist.checks.report import DivergenceReport, this_rank
from fp8dist.checks.work_parts import hash_of, message_of
from fp8dist.checks.works import Work, described, digest_of, repeated, taken
from fp8dist.common.divergence import Finding
from fp8dist.modules.linear_slots import SITES, LinearSlots
from fp8dist.modules.model_state import ModelState
from fp8dist.state.arena_sync import ArenaSync
from fp8dist.state.groups import SyncGroup, own_rank
from fp8dist_kernels.formats import Role
from fp8dist_kernels.graphs import capturing
from fp8dist_kernels.taps import tap_on

__all__ = ["KIND", "Audits", "audits_of", "judge"]

KIND = "audit"
"""Kind of the findings."""

Digest = list[int]
"""The two halves of a digest."""

_GOLDEN = 0.618


class Round(NamedTuple):
    """Digests of one work. ``own``: when it was computed. ``again``: repeated by its owner. ``auditor`` repeated it
    first, and a second time in ``auditors_again``. ``third``: by a third rank, None if there is none."""

    own: Digest
    auditor: Digest
    again: Digest
    auditors_again: Digest
    third: Digest | None


class Audits:
    """The audits of one manager.

    Args:
        sites: by place of the arena, (fqn, first site) of its FP8 modules. The same fqns on the ranks of an arena.
        every: one step of so many is audited.
        limit: bytes of tensors that an audit sends.
        calls: by site, in how many calls a forward does its work, if more than one. An audit looks at one of them.
    """

    def __init__(
        self,
        sites: Mapping[int, Sequence[tuple[str, int]]],
        every: int,
        limit: int,
        calls: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.done = 0
        """Number of casts and products of this rank that were audited."""
        self._sites = {place: tuple(of) for place, of in sites.items()}
        self._every, self._limit, self._calls = every, limit, calls
        self._wanted: dict[int, int] = {}  # Place of the arena by site.
        self._skip: dict[int, int] = {}  # By site, how many calls to let pass.
        self._taken: dict[int, Work] = {}  # By place of the arena.
        self._names: dict[int, str] = {}
        self._step = 0
        self._digester = Digester()
        self._alike: int | None = None

    def begin(self, step: int, passed: int) -> None:
        """Choose the sites of the step that begins, if it is audited. Local.

        Args:
            step: chooses the sites. It may differ between ranks: each then has another site audited.
            passed: boundaries since ``attach``, the same on all ranks. They decide which step is audited.
        """
        self._wanted, self._skip, self._taken, self._step = {}, {}, {}, step
        if (passed + 1) % self._every:
            return
        for place, modules in self._sites.items():
            fqn, work, site = _chosen(modules, step // self._every)
            self._wanted[site] = place
            self._skip[site] = hash_of(step, "call") % self._calls.get(site, 1)
            kind = SITES[work]
            self._names[place] = f"{fqn}: {f'cast of {kind.value}' if isinstance(kind, Role) else kind}"

    def take_down(self, op: str, site: int, args: tuple[Any, ...], options: Mapping[str, Any], results: Any) -> None:
        """Take down a call at a wanted site: the first, or the chosen one of several. Local; a listener of
        ``fp8dist_kernels.taps``."""
        place = self._wanted.get(site)
        if place is None or place in self._taken or capturing(results[0].device):
            return
        if self._skip[site]:
            self._skip[site] -= 1
            return
        work = taken(op, site, args, options, results, self._limit, self._step, self._digester)
        if work is not None:
            self._taken[place] = work

    def kept(self) -> Callable[[], None]:
        """Return a function that forgets what is taken down from now on. Local."""
        taken_down, skip = dict(self._taken), dict(self._skip)

        def put_back() -> None:
            self._taken, self._skip = dict(taken_down), dict(skip)

        return put_back

    def settle(self, place: int, sync: ArenaSync) -> DivergenceReport:
        """Compare the work of an arena's ranks with what others get. COLLECTIVE over the sync's group, if it has one:
        an all-gather of sizes, an all-to-all, an all-gather of digests; the last two once more if any differ.

        Without a group, or alone, this rank repeats its own work, which shows errors that do not repeat.
        """
        with on_device(sync.arena.device), torch.no_grad():
            return self._settle(self._taken.pop(place, None), self._names[place], sync.arena.device, sync.group)

    @property
    def due(self) -> tuple[int, ...]:
        """Places of the arenas that are audited at the end of this step. The same on the ranks of an arena."""
        return tuple(sorted(self._wanted.values()))

    def _settle(self, work: Work | None, name: str, device: torch.device, group: SyncGroup | None) -> DivergenceReport:
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
            "" if work is None else described(work),
        )
        everyone = [me] if group is None else group.gather(me)
        what = {participant.rank: text for participant, text in everyone}
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
        """Return the digests of the works that differ, by the place of their owner, repeated by the owner, the auditor
        and a third rank. COLLECTIVE: an all-to-all and an all-gather.

        Args:
            gathered: by place, the digest of the rank's own work, and of the one that it has audited.
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
        return _pair(None if message is None else digest_of(repeated(message), self._digester))

    def _likeness(self, device: torch.device) -> int:
        if self._alike is None:
            self._alike = word_of(likeness(device))
        return self._alike


def audits_of(state: ModelState, modules: Sequence[LinearSlots]) -> Audits | None:
    """Number the sites of all modules, and return their audits; None if the settings ask for none. Local.

    Args:
        modules: in the order of their fqns.
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
    state.job.tap = tap_on(modules[0].sync.arena.device, audits.take_down)
    return audits


def judge(found: Round, owner: int, auditor: int, third: int) -> tuple[int | None, str]:
    """Return (the rank that computed wrongly, None if nobody knows; the verdict in words). Pure.

    Args:
        auditor: the owner itself, if no other rank is like it. Then ``third`` is the owner, too.
    """
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
    """Return (fqn, place in ``SITES``, site) of an audit. Successive audits visit all, distant ones first."""
    count = len(modules) * len(SITES)
    stride = next(s for s in range(round(count * _GOLDEN), 2 * count + 2) if math.gcd(s, count) == 1)
    module, work = divmod(number * stride % count, len(SITES))
    fqn, first = modules[module]
    return fqn, work, first + work


def _pair(digest: Tensor | None) -> Digest:
    """Return the halves of a digest, or zeros for none."""
    low, high = [0, 0] if digest is None else digest.tolist()
    return [low, high]


class _Ring:
    """The ranks of an arena, by their places in its group. Each one's work goes to the next one that is like it.

    COLLECTIVE: one all-gather. ``size``: bytes of this rank's message, 0 if its module did not run. ``ran``: the places
    where it did.
    """

    def __init__(self, group: SyncGroup | None, size: int, likeness: int, device: torch.device) -> None:
        self._group = None if group is None or not group.communicates else group.process_group
        self._at = device
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
        """Return the numbers of all ranks. COLLECTIVE."""
        if self._group is None:
            return [numbers]
        mine = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        everyone = list(mine.new_empty(len(self.ranks), len(numbers)))
        dist.all_gather(everyone, mine, group=self._group)
        return [theirs.tolist() for theirs in everyone]

    def next(self, place: int, steps: int) -> int:
        """Return the place that is ``steps`` further among those that are like it."""
        alike = self._alike[self._kinds[place]]
        return alike[(bisect.bisect_left(alike, place) + steps) % len(alike)]

    def exchange(self, work: Work | None, steps: int, owners: Sequence[int]) -> Tensor | None:
        """Send the messages of ``owners`` to the ranks ``steps`` further. Return the one for this rank, on its own
        device, or None. COLLECTIVE: one all-to-all, unless there is one rank."""
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
        received = message_of(sum(gets), self._device)
        dist.all_to_all_single(received, message, gets, sends, group=self._group)
        if not any(gets):
            return None
        return received if self._device == self._at else message_of(sum(gets), self._at).copy_(received)
