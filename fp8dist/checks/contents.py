"""Contents: things to compare, with names and digests. A *thing* is a named tensor, or a slot of FP8 state.

A digest is two 64-bit numbers that depend on all bytes of a thing, on its name, shape and dtype. It is made from
*leaves*: the digests of the thing's blocks of 256 KiB. If two digests differ, the leaves show the block that differs.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fp8dist.checks.differences import unravel
from fp8dist.common.text import dtype_name
from fp8dist.state.arena import Arena
from fp8dist_kernels.reference.content import ContentDigest, block_count

FINDING_KINDS: Mapping[str, str] = MappingProxyType(
    {"slot": "scale", "inv_scale": "scale", "cold": "scale", "amax": "history", "counters": "history"}
)
"""The kind of a finding, by the kind of the thing or field that differs, if the two kinds have different names."""

_SLOTS_AT_ONCE = 256
"""Slots whose state is copied into one buffer at a time."""
_BYTES_AT_ONCE_ON_GPU = 1 << 26
"""Bytes of such a buffer on a GPU, if they hold more slots: 256 slots are too little work for a kernel launch."""

_NEIGHBOURS = 16
"""Elements on either side of a difference that an evidence file shows."""


class Key(NamedTuple):
    """Name and layout of a thing. Ranks compare things with equal keys. ``kind``: "parameter", "slot", …"""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str


class Field(NamedTuple):
    """A tensor that belongs to a thing. A parameter has one field, a slot has several."""

    name: str  # "" if the thing has one field.
    kind: str  # Kind of findings about it.
    tensor: Tensor
    locate: Callable[[int], tuple[int, ...]] | None = None  # See ``at``; None: the tensor's own index.
    store: Callable[[Tensor], None] | None = None  # Writes back a repaired value that is not stored as a tensor.

    def at(self, place: int) -> tuple[int, ...]:
        """Return the index that reports show for position ``place`` of the flattened tensor."""
        return unravel(place, tuple(self.tensor.shape)) if self.locate is None else self.locate(place)


class NamedTensor(NamedTuple):
    """A tensor with its name. ``store``: see ``Field``."""

    name: str
    tensor: Tensor
    store: Callable[[Tensor], None] | None = None


def word_of(value: Hashable) -> int:
    """Return 64 bits that are equal for equal values, as an int64 for a message."""
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which ``device``, if it is a GPU, is CUDA's current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


class Digester:
    """Computes digests of tensors, each on its own device. Makes the constants for it once per device. Local."""

    def __init__(self) -> None:
        self._by_device: dict[torch.device, ContentDigest] = {}

    def on(self, device: torch.device) -> ContentDigest:
        """Return the ``ContentDigest`` of a device."""
        if device not in self._by_device:
            self._by_device[device] = ContentDigest(device)
        return self._by_device[device]

    def many_leaves(self, tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
        """Return the leaves of all tensors below one another, int64[blocks, 2], and each tensor's number of blocks.

        Args:
            tensors: at least one, all on the same device.

        Raises:
            ValueError: they are on the meta device.
        """
        device = tensors[0].device
        if device.type == "meta":
            raise ValueError("it is on the meta device: materialise it first")
        return self.on(device).many_leaves(tensors)

    def leaves(self, tensor: Tensor) -> Tensor:
        """Return the leaves of a tensor: int64[blocks, 2] on its device."""
        return self.many_leaves([tensor])[0]


class Content(ABC):
    """A part of what one rank or one file holds. ``keys``: of its things. ``device``: where most of them are."""

    def __init__(self, keys: Sequence[Key], device: torch.device) -> None:
        self.keys = tuple(keys)
        self.device = device

    @abstractmethod
    def digests(self, digester: Digester) -> Tensor:
        """Return the digest of each thing, int64[len(keys), 2] on the CPU. Waits for the device."""

    @abstractmethod
    def fields(self, index: int) -> list[Field]:
        """Return the tensors of the thing at ``index`` in ``keys``, as views of its memory: a repair writes to them."""

    @property
    def sizes(self) -> dict[tuple[str, str], int]:
        """Bytes of the things by kind and name, of which one name may stand for all. Unknown sizes are left out."""
        return {(key.kind, key.name): math.prod(key.shape) * getattr(torch, key.dtype).itemsize for key in self.keys}

    @property
    def seeds(self) -> Tensor:
        """The part of the digests that comes from the keys: int64[len(keys), 2] on the CPU."""
        hashes = b"".join(hashlib.blake2b(repr(tuple(key)).encode(), digest_size=16).digest() for key in self.keys)
        return torch.from_numpy(np.frombuffer(hashes, dtype="<i8").copy()).view(-1, 2)


class TensorContent(Content):
    """Tensors of one kind. They may be on several devices."""

    def __init__(self, kind: str, tensors: Sequence[NamedTensor]) -> None:
        device = tensors[0].tensor.device if tensors else torch.device("cpu")
        self._tensors = [named.tensor.detach() for named in tensors]
        looks = [(tuple(tensor.shape), dtype_name(tensor.dtype)) for tensor in self._tensors]
        super().__init__([Key(named.name, kind, *look) for named, look in zip(tensors, looks)], device)
        self._stores = [named.store for named in tensors]

    def digests(self, digester: Digester) -> Tensor:
        """See ``Content``."""
        result = torch.empty(len(self.keys), 2, dtype=torch.int64, device="cpu")
        seeds = self.seeds
        by_device: dict[torch.device, list[int]] = {}
        for i, tensor in enumerate(self._tensors):
            by_device.setdefault(tensor.device, []).append(i)
        for device, places in by_device.items():
            leaves, counts = self._leaves(digester, places)
            result[places] = digester.on(device).digests(leaves, counts, seeds[places]).cpu()
        return result

    def _leaves(self, digester: Digester, places: list[int]) -> tuple[Tensor, list[int]]:
        """Return ``Digester.many_leaves`` of the tensors at ``places``. An error names the tensor."""
        try:
            return digester.many_leaves([self._tensors[i] for i in places])
        except Exception:
            for i in places:  # One tensor at a time, to find the one that cannot be read.
                try:
                    digester.leaves(self._tensors[i])
                except Exception as error:
                    # Keep the type of the error, if its constructor is known to take one message.
                    kind = (
                        type(error) if type(error) in (RuntimeError, ValueError, NotImplementedError) else RuntimeError
                    )
                    raise kind(f"{self.keys[i].kind} '{self.keys[i].name}': {error}") from error
            raise

    def fields(self, index: int) -> list[Field]:
        """See ``Content``."""
        return [Field("", self.keys[index].kind, self._tensors[index], store=self._stores[index])]


class ArenaContent(Content):
    """The slots of an arena, each with all state that must be equal on the ranks that share the arena."""

    def __init__(self, arena: Arena, within: str = "") -> None:
        """``within``: what the names of slots begin with."""
        names, shape = [f"{within}{spec.slot}" for spec in arena.specs], (arena.ring.length,)
        keys = [Key(name, "slot", shape, spec.format.name) for name, spec in zip(names, arena.specs)]
        super().__init__(keys, arena.device)
        self._arena = arena

    @property
    def sizes(self) -> dict[tuple[str, str], int]:
        """See ``Content``."""
        return {("slot", key.name): sum(part.nbytes for part in self._columns()) for key in self.keys[:1]}

    def _columns(self) -> list[Tensor]:
        """Return all arrays that are compared, as bits: int32[slots, …] each."""
        arena = self._arena
        return [
            *(row[:, None].view(torch.int32) for row in (arena.scale, arena.inv_scale, arena.amax)),
            arena.cold[:, None].int(),
            arena.counters.T.contiguous().view(torch.int32),
            arena.history.view(torch.int32),
            arena.block_max.view(torch.int32),
        ]

    def digests(self, digester: Digester) -> Tensor:
        """See ``Content``."""
        arena = self._arena
        digest = digester.on(arena.device)
        columns = self._columns()
        width = sum(part.shape[1] for part in columns)
        if width % 2:  # Digests read 64-bit words.
            columns.append(torch.zeros(len(arena), 1, dtype=torch.int32, device=arena.device))
            width += 1
        at_once = _SLOTS_AT_ONCE
        if arena.device.type != "cpu":
            at_once = max(at_once, _BYTES_AT_ONCE_ON_GPU // (4 * width))
        leaves = [
            digest.row_leaves(torch.cat([part[start : start + at_once] for part in columns], 1).view(torch.int64))
            for start in range(0, len(arena), at_once)
        ]
        counts = [block_count(4 * width)] * len(arena)
        return digest.digests(torch.cat(leaves), counts, self.seeds).cpu()

    def fields(self, index: int) -> list[Field]:
        """See ``Content``. The index of a history element counts from the oldest amax, as in ``manager.amax_history``;
        the arena has a ring."""
        arena = self._arena
        arena.cold_written()  # Because a repair may write to the fields.

        def by_age(place: int) -> tuple[int, ...]:
            length = arena.ring.length
            return ((place - int(arena.taken[index])) % length if place < length else place,)

        return [
            Field("scale", "scale", arena.scale[index]),
            Field("inv_scale", "scale", arena.inv_scale[index]),
            Field("cold", "scale", arena.cold[index]),
            Field("amax", "history", arena.amax[index]),
            Field("history", "history", arena.history[index], by_age),
            Field("counters", "history", arena.counters[:, index]),
            Field("block_max", "history", arena.block_max[index]),
        ]


def values_near(field: Field, place: int | None) -> dict[str, Any]:
    """Return the elements of a field around position ``place`` (None: all elements), as JSON values for an evidence
    file. "from" is the position of the first of them, "values" are texts."""
    flat = field.tensor.detach().reshape(-1)
    start = 0 if place is None else max(0, place - _NEIGHBOURS)
    if place is not None:
        flat = flat[start : place + _NEIGHBOURS + 1]
    try:
        values = flat.to(torch.float64) if flat.is_floating_point() else flat
    except (RuntimeError, NotImplementedError):  # A packed format with two numbers in a byte: show bytes.
        values = flat.view(torch.uint8)
    return {"field": field.name, "from": start, "values": list(map(repr, values.tolist()))}
