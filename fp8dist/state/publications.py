"""Publications: how the ranks of a group agree on their manifests at ``attach``, through the job's store.

Each rank publishes the digest of its manifest. The lowest rank of the group, its leader, counts equal digests and
writes the verdict, which is final for all. Only if digests differ does it ask for the manifests themselves.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fp8dist.common.text import ranks_text
from fp8dist.errors import ManifestMismatchError
from fp8dist.state.groups import SyncGroup, absent
from fp8dist.state.manifest import first_difference, manifest_digest

_AGREED = "agreed"
_COMPLETE, _ASKED, _VERDICT = "complete", "asked", "verdict"

_SHOWN_MANIFESTS = 8
"""Number of manifests whose difference is reported. For further manifests only the ranks are named."""


class Publication(NamedTuple):
    """This rank's manifest as published in the store, before the ranks have agreed.

    ``store``: the part of the job's store for this round of the group. ``round``: its number, the same on all ranks.
    """

    store: Any
    group: SyncGroup
    manifest: dict[str, Any]
    round: int

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest, as hex."""
        return manifest_digest(self.manifest)

    def write_once(self, key: str, text: str) -> str:
        """Write the text unless there is one, and return the text that is stored."""
        stored: str = self.store.compare_set(key, "", text).decode()
        return stored

    def read(self, key: str, timeout: timedelta) -> str | None:
        """Return the text; None: it does not come in time."""
        try:
            self.store.wait([key], timeout)
        except (dist.DistStoreError, RuntimeError):
            return None
        text: str = self.store.get(key).decode()
        return text

    def read_until(self, key: str, deadline: float) -> str | None:
        """Return the text; None: it does not come before a deadline of ``time.monotonic``. Waits 0.1 s at least, so
        that a text that is already there is seen."""
        return self.read(key, timedelta(seconds=max(0.1, deadline - time.monotonic())))


def publish_manifest(group: SyncGroup, manifest: Mapping[str, Any]) -> Publication:
    """Put the digest of this rank's manifest into the job's store. Does not wait.

    The n-th publication of a rank belongs to the n-th of every other rank of the group. The store counts them, so no
    process-wide state is needed.
    """
    rounds = distributed_c10d.PrefixStore(f"fp8dist/{group.identity}", distributed_c10d._get_default_store())
    while True:
        number = rounds.add(f"count/{group.rank}", 1)
        published = Publication(distributed_c10d.PrefixStore(str(number), rounds), group, dict(manifest), number)
        if not published.store.check([_VERDICT]):  # Else the others have ended that round without this rank.
            break
    store, digest = published.store, published.digest
    store.set(f"digest/{group.rank}", f"{digest} {socket.gethostname()}")
    store.add(f"same/{digest}", 1)
    if store.add("came", 1) == group.size:
        store.set(_COMPLETE, "")
    return published


def agree_on_manifests(publications: Sequence[Publication], rounds: int, timeout: timedelta) -> None:
    """Wait until all ranks of these groups have published and agree. COLLECTIVE, through the store.

    In each group the lowest rank compares, and the others wait for its verdict. The first verdict in the store is final
    for all ranks, so no rank continues alone. The lowest rank writes it, or a rank whose wait has timed out. With
    several groups, a failure in one is passed on to the others.

    If all agree, each rank needs about ten store operations per group, whatever the number of ranks: equal digests are
    counted, not read. Only after a failure does the lowest rank read single digests and ask for full manifests.

    Args:
        rounds: the number of groups that a failure may have to pass through to reach all ranks. The same on all ranks.
        timeout: how long to wait for the other ranks, for all groups together. Verdicts may take twice as long.

    Raises:
        ManifestMismatchError: on every rank, if ranks differ or one did not come in time.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    # Groups that this rank leads come first, so that their members need not wait for its other groups.
    in_order = sorted(publications, key=lambda p: min(p.group.ranks) != p.group.rank)
    failures = [text for p in in_order if (text := _agree(p, timeout, deadline)) is not None]
    for round_ in range(rounds):
        for publication in publications:
            _publish_outcome(publication, round_, failures)
        for publication in publications:
            if not failures:  # One failure is enough.
                failures += _read_outcome(publication, round_, timeout * 3)
    if failures:
        raise ManifestMismatchError(failures[0])


def _publish_outcome(publication: Publication, round_: int, failures: Sequence[str]) -> None:
    """Publish a failure to the group, or that this rank knows of none. The last rank without a failure writes that all
    agree."""
    if failures:
        publication.write_once(f"outcome-{round_}", failures[0])
    elif publication.store.add(f"well-{round_}", 1) == publication.group.size:
        publication.write_once(f"outcome-{round_}", _AGREED)


def _read_outcome(publication: Publication, round_: int, timeout: timedelta) -> list[str]:
    """Return the failure that a rank of the group has published, in a list; nothing if all agree."""
    outcome = publication.read(f"outcome-{round_}", timeout)
    if outcome is None:
        size, seconds = publication.group.size, timeout.total_seconds()
        gone = f"the end of attach() was not reached within {seconds:.0f} s by all of {size} ranks"
        outcome = publication.write_once(f"outcome-{round_}", gone)
    return [] if outcome == _AGREED else [outcome]


def _agree(publication: Publication, timeout: timedelta, deadline: float) -> str | None:
    """Return what is wrong in this group, or None. Members must come before the deadline. After it, the leader has up
    to the same time again to find out what differs."""
    leader, patience = min(publication.group.ranks), timeout.total_seconds()
    if publication.group.rank == leader:
        found = _compare(publication, timeout, deadline, deadline + patience / 2)
        verdict = publication.write_once(_VERDICT, found)
    else:
        verdict = _follow(publication, leader, timeout * 2, deadline + patience)
    return None if verdict == _AGREED else verdict


def _follow(publication: Publication, leader: int, timeout: timedelta, deadline: float) -> str:
    """Wait for the leader's verdict, and show it this rank's manifest on request."""
    store, rank = publication.store, publication.group.rank
    asked = publication.read_until(_ASKED, deadline)
    if asked is not None and rank in json.loads(asked):
        store.set(f"manifest/{rank}", json.dumps(publication.manifest))
    verdict = None if asked is None else publication.read_until(_VERDICT, deadline)
    if verdict is None:
        return publication.write_once(_VERDICT, _absent([leader], publication.group.size, timeout))
    return verdict


def _compare(publication: Publication, timeout: timedelta, deadline: float, later: float) -> str:
    """Return the leader's verdict. ``deadline``: for the other ranks to come. ``later``: for them to show their
    manifests."""
    group, store = publication.group, publication.store
    complete = publication.read_until(_COMPLETE, deadline) is not None
    if complete and store.add(f"same/{publication.digest}", 0) == group.size:
        store.set(_ASKED, "[]")
        return _AGREED
    missing = [] if complete else absent(store, group.ranks, lambda rank: f"digest/{rank}")
    if missing:
        store.set(_ASKED, "[]")
        return _absent(missing, group.size, timeout)
    return _differences(publication, later)


def _differences(publication: Publication, deadline: float) -> str:
    """Return which ranks differ from this one, and in what, after all have published."""
    group, store, mine = publication.group, publication.store, publication.digest
    published = store.multi_get([f"digest/{rank}" for rank in group.ranks])
    hosts: dict[int, str] = {}
    odd: dict[str, list[int]] = {}
    for rank, text in zip(group.ranks, published):
        digest, _, hosts[rank] = text.decode().partition(" ")
        if digest != mine:
            odd.setdefault(digest, []).append(rank)
    # One rank per distinct manifest is enough.
    shown = list(odd.values())[:_SHOWN_MANIFESTS]
    store.set(_ASKED, json.dumps([ranks[0] for ranks in shown]))
    lines = []
    for ranks in shown:
        theirs = publication.read_until(f"manifest/{ranks[0]}", deadline)
        difference = "gone before it could be compared"
        if theirs is not None:
            difference = first_difference(publication.manifest, json.loads(theirs))
        sides = f"rank {group.rank} ({hosts[group.rank]}) against rank(s) {ranks_text(ranks)} ({hosts[ranks[0]]})"
        lines.append(f"{sides}: {difference}")
    if len(odd) > len(shown):
        others = [rank for ranks in list(odd.values())[len(shown) :] for rank in ranks]
        lines.append(f"rank(s) {ranks_text(others)} have {len(odd) - len(shown)} other manifests")
    return "ranks were prepared differently; " + "; ".join(lines) if lines else _AGREED


def _absent(ranks: list[int], size: int, timeout: timedelta) -> str:
    return (
        f"attach() was not reached within {timeout.total_seconds():.0f} s by rank(s) {ranks_text(ranks)} of {size}: "
        "it is collective over the group"
    )
