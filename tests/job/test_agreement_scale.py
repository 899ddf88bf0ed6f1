"""Agreement at attach: the work per rank is constant in the number of ranks. Ranks are threads, or run in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import get_ident
from typing import Any

import pytest
import torch.distributed as dist

from fp8dist.errors import ManifestMismatchError
from fp8dist.state.groups import SyncGroup
from fp8dist.state.publications import agree_on_manifests, publish_manifest
from tests.support.large_world import CountingStore, Member, group_of, world

MANIFEST: dict[str, Any] = {"numerics_version": 1, "settings": {"margin": 0}, "arenas": []}
SECOND = timedelta(seconds=1)
LIMIT = timedelta(seconds=30)
MANY = 4_096


def other(value: int) -> dict[str, Any]:
    """Return a manifest with a different margin from all others."""
    return {**MANIFEST, "settings": {"margin": value}}


class CountingByThread(CountingStore):
    """Counts the calls of each thread."""

    def __init__(self) -> None:
        super().__init__()
        self.by_thread: dict[int, int] = {}

    def _note(self, name: str, *texts: Any) -> None:
        super()._note(name, *texts)
        self.by_thread[get_ident()] = self.by_thread.get(get_ident(), 0) + 1


def _attach_all(
    store: CountingByThread,
    groups: Callable[[int], Sequence[SyncGroup]],
    manifest: Callable[[int, int], dict[str, Any]],
    size: int,
) -> tuple[list[str], list[int]]:
    """Return (the result of each rank, its number of store calls). ``groups``: of a rank; ``manifest``: of its i-th."""
    everyone = [[Member(group, rank) for group in groups(rank)] for rank in range(size)]

    def attach(rank: int) -> tuple[str, int]:
        store.by_thread[get_ident()] = 0
        told = "agreed"
        try:
            published = [publish_manifest(group, manifest(rank, i)) for i, group in enumerate(everyone[rank])]
            agree_on_manifests(published, len(everyone[rank]) - 1, LIMIT)
        except ManifestMismatchError as error:
            told = str(error)
        return told, store.by_thread[get_ident()]

    with ThreadPoolExecutor(size) as threads:
        results = list(threads.map(attach, range(size)))
    return [told for told, _ in results], [asked for _, asked in results]


def _with_experts(size: int) -> Callable[[int], Sequence[SyncGroup]]:
    """Return the groups of a rank: all ranks, and the four ranks with the same experts."""
    everyone = group_of(range(size))
    experts = [group_of(range(start, start + 4)) for start in range(0, size, 4)]
    return lambda rank: (everyone, experts[rank // 4])


def test_a_rank_asks_the_store_as_often_whatever_the_number_of_ranks() -> None:
    """In two groups. In one group: test_thousands_of_ranks_agree."""
    most = []
    for size in (8, 64):
        store = CountingByThread()
        with world(0, size, store):
            of = _with_experts(size)
            told, asked = _attach_all(store, of, lambda rank, i: MANIFEST, size)
            assert told == ["agreed"] * size
            again, _ = _attach_all(store, of, lambda rank, i: other(1), size)
            assert again == ["agreed"] * size
            most.append(max(asked))
    # Per group: count, verdict?, digest, same, came (and the last: complete); then the lowest waits (2), counts, asks
    # and writes, or the others wait for two keys (4). With several groups: well (and the last: told), told (2). One
    # more per group where the last rank to come is the lowest, too.
    assert max(most) <= 2 * (11 + 4)


def test_a_failure_in_one_group_reaches_all_ranks_of_the_others() -> None:
    size = 32
    store = CountingByThread()
    with world(0, size, store):
        told, asked = _attach_all(store, _with_experts(size), lambda rank, i: other(i * (rank == 21)), size)
    assert len(set(told)) == 1
    assert "rank 20 " in told[0]
    assert "against rank(s) 21 " in told[0]
    assert "settings.margin: 0 here, 1 there" in told[0]
    assert max(asked) <= 40


@pytest.mark.slow
def test_a_rank_that_waits_in_another_group_is_not_missed() -> None:
    """Rank 0 does not come, and rank 1 waits for it, in the group that rank 1 does not lead."""
    store, groups = CountingByThread(), [(0, 1), (1, 2)]
    with world(0, 3, store):
        members = {rank: [Member(group_of(group), rank) for group in groups if rank in group] for rank in (1, 2)}

        def attach(rank: int) -> str:
            published = [publish_manifest(member, MANIFEST) for member in members[rank]]
            with pytest.raises(ManifestMismatchError) as raised:
                agree_on_manifests(published, 1, SECOND / 2)
            return str(raised.value)

        with ThreadPoolExecutor(2) as threads:
            told = list(threads.map(attach, (1, 2)))
    assert told[0] == told[1]
    assert "by rank(s) 0 of 2" in told[0]


def _publish_all(manifest: Callable[[int], dict[str, Any] | None]) -> dict[int, Any]:
    """Publish every rank's manifest. None: this rank does not come."""
    everyone = SyncGroup(dist.group.WORLD)  # type: ignore[arg-type]
    made = ((rank, manifest(rank)) for rank in range(MANY))
    return {rank: publish_manifest(Member(everyone, rank), m) for rank, m in made if m is not None}


def _agree_of(publication: Any, timeout: timedelta = SECOND) -> str:
    try:
        agree_on_manifests([publication], 0, timeout)
    except ManifestMismatchError as error:
        return str(error)
    return "agreed"


@pytest.fixture
def store() -> Iterator[CountingStore]:
    """The store of thousands of ranks, one of which is this process."""
    made = CountingStore()
    with world(0, MANY, made):
        yield made


@pytest.mark.slow
def test_thousands_of_ranks_agree(store: CountingStore) -> None:
    publications = _publish_all(lambda rank: MANIFEST)
    assert store.total == 5 * MANY + 1
    for rank in (0, 1, 2_047, MANY - 1):
        before, moved = store.total, store.bytes
        assert _agree_of(publications[rank]) == "agreed"
        assert store.total - before <= 5
        assert store.bytes - moved < 1_000


@pytest.mark.slow
def test_one_of_thousands_that_never_comes_is_named(store: CountingStore) -> None:
    publications = _publish_all(lambda rank: None if rank == 2_047 else MANIFEST)
    before = store.total
    outcome = _agree_of(publications[0])
    assert f"within 1 s by rank(s) 2047 of {MANY}" in outcome
    assert store.total - before <= 2 * 12 + 5  # The missing rank is found by bisection,
    before = store.total
    assert _agree_of(publications[MANY - 1]) == outcome
    assert store.total - before <= 4  # and by the lowest rank only.


@pytest.mark.slow
def test_one_of_thousands_that_differs_is_named(store: CountingStore) -> None:
    publications = _publish_all(lambda rank: other(int(rank == 2_047)))
    with ThreadPoolExecutor(1) as thread:
        theirs = thread.submit(_agree_of, publications[2_047], LIMIT)
        outcome = _agree_of(publications[0])
        assert theirs.result() == outcome
    assert "against rank(s) 2047 " in outcome
    assert "settings.margin: 0 here, 1 there" in outcome
    assert store.operations["multi_get"] == 1


@pytest.mark.slow
def test_thousands_of_ranks_that_all_differ_are_told_in_a_few_lines(store: CountingStore) -> None:
    publications = _publish_all(other)
    for rank in range(1, 9):  # If they were here, they would show their manifests.
        store.set(f"fp8dist/{publications[0].group.identity}/1/manifest/{rank}", b'{"numerics_version": 2}')
    before = store.total
    outcome = _agree_of(publications[0], SECOND / 4)
    assert "against rank(s) 8 " in outcome
    assert f"rank(s) 9, 10, 11, 12, 13, 14, 15, 16 and {MANY - 17} more have {MANY - 9} other manifests" in outcome
    assert len(outcome) < 2_000
    assert store.total - before <= 2 * 8 + 6
