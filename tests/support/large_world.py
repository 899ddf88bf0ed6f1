"""One process acts as one rank of many, on torch's "fake" backend: collectives return at once with their input."""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fp8dist.state.groups import SyncGroup
from fp8dist.state.publications import Publication, _agree, _publish_outcome, publish_manifest

SIZE = 16_384
RANKS = (0, 1, 8_191, 16_383)
AXES = (2_048, 8)


@contextlib.contextmanager
def world(rank: int, size: int = SIZE, store: dist.Store | None = None) -> Iterator[None]:
    """Make this process rank ``rank`` of ``size``. Other ranks do not exist, unless processes share ``store``."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  Registers the backend.

    dist.init_process_group("fake", store=store or dist.HashStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        if "torch.distributed.tensor" in sys.modules:  # DTensor caches equal meshes, also of a destroyed world.
            importlib.import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()


@contextlib.contextmanager
def nobody_answers() -> Iterator[None]:
    """Make ``attach`` assume that all other ranks have published the same manifest."""
    with mock.patch("fp8dist.job.agreement.agree_on_manifests"):
        yield


def mesh_of(names: tuple[str, str], axes: tuple[int, int] = AXES) -> DeviceMesh:
    """Return a mesh of all ranks."""
    return init_device_mesh("cpu", axes, mesh_dim_names=names)


def group_of(ranks: Sequence[int]) -> SyncGroup:
    """Return a group of these ranks, without a communicator."""
    return SyncGroup(DeviceMesh("cpu", list(ranks), _init_backend=False))


class Member(SyncGroup):
    """A group as seen by the rank ``rank``."""

    def __init__(self, group: SyncGroup, rank: int) -> None:
        group.identity  # noqa: B018  Made once for all members.
        self.__dict__.update(group.__dict__, rank=rank)


class CountingStore(dist.Store):
    """A store in this process that counts its calls. Does not count a wait that returns at once."""

    def __init__(self) -> None:
        super().__init__()
        self._inner = dist.HashStore()
        self.operations: Counter[str] = Counter()
        self.bytes = 0

    @property
    def total(self) -> int:
        return self.operations.total()

    def _note(self, name: str, *texts: Any) -> None:
        self.operations[name] += 1
        self.bytes += sum(map(len, texts))

    def set(self, key: str, value: Any) -> None:
        self._note("set", key, value)
        self._inner.set(key, bytes(value).decode())

    def get(self, key: str) -> bytes:
        value = self._inner.get(key)
        self._note("get", key, value)
        return value

    def add(self, key: str, amount: int) -> int:
        self._note("add", key)
        return self._inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self._note("check", *keys)
        return self._inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(minutes=1)) -> None:
        self._note("wait", *keys)
        self._inner.wait(keys, timeout)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self._note("compare_set", key, desired)
        return self._inner.compare_set(key, bytes(expected).decode(), bytes(desired).decode())

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._inner.multi_get(keys)
        self._note("multi_get", *keys, *values)
        return values


class Crowd:
    """All ranks except those in ``RANKS``: performs their store operations at attach, one rank after the other."""

    def __init__(self) -> None:
        self._published: list[Publication] = []

    @contextlib.contextmanager
    def attaching(self) -> Iterator[None]:
        """Make ``attach`` of this process stand for all of these ranks."""
        with (
            mock.patch("fp8dist.job.agreement.publish_manifest", self._publish),
            mock.patch("fp8dist.job.agreement.agree_on_manifests", self._agree),
        ):
            yield

    def _publish(self, group: SyncGroup, manifest: Mapping[str, Any]) -> Publication:
        """Publish for the groups of ranks in ``RANKS``: this group, shifted along the last axis."""
        first = group.ranks[0]
        starts = [0] if group.size == SIZE else sorted({rank % AXES[1] for rank in RANKS})
        for start in starts:
            moved = group_of([rank - first + start for rank in group.ranks])
            members = (Member(moved, rank) for rank in moved.ranks if rank not in RANKS)
            self._published += [publish_manifest(member, manifest) for member in members]
        return self._published[-1]._replace(group=group)

    def _agree(self, publications: Sequence[Any], rounds: int, timeout: timedelta) -> None:
        for publication in self._published:
            if publication.group.rank == min(publication.group.ranks):
                assert _agree(publication, timeout, time.monotonic() + timeout.total_seconds()) is None
        for round_ in range(rounds):
            for publication in self._published:
                _publish_outcome(publication, round_, [])
