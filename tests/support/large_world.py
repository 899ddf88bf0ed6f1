"""One process acts as one rank of many, on torch's "fake" backend: collectives return at once with their input."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fp8dist.state.groups import SyncGroup

SIZE = 16_384
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


def _text(value: Any) -> str:
    """Return a value as a HashStore takes it. C++ hands over bytes."""
    return value if isinstance(value, str) else bytes(value).decode()


class CountingStore(dist.Store):
    """A store in this process that counts its calls. Does not count a wait that returns at once.
    ``keys``: number of keys that were looked up."""

    def __init__(self) -> None:
        super().__init__()
        self._inner = dist.HashStore()
        self.operations: Counter[str] = Counter()
        self.keys = self.bytes = 0

    @property
    def total(self) -> int:
        return self.operations.total()

    def _note(self, name: str, *texts: Any) -> None:
        self.operations[name] += 1
        self.bytes += sum(map(len, texts))

    def set(self, key: str, value: Any) -> None:
        self._note("set", key, value)
        self._inner.set(key, _text(value))

    def get(self, key: str) -> bytes:
        value = self._inner.get(key)
        self._note("get", key, value)
        return value

    def add(self, key: str, amount: int) -> int:
        self._note("add", key)
        return self._inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        self._note("check", *keys)
        self.keys += len(keys)
        return self._inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(minutes=1)) -> None:
        self._note("wait", *keys)
        self._inner.wait(keys, timeout)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        self._note("compare_set", key, desired)
        return self._inner.compare_set(key, _text(expected), _text(desired))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._inner.multi_get(keys)
        self._note("multi_get", *keys, *values)
        self.keys += len(keys)
        return values
