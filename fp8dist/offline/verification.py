"""Compare a served model with what an export must hold: tensor by tensor, and its config.json."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8dist.consistency.differences import Difference, block_of, compare_block, unravel
from fp8dist.offline.certificates import Certified
from fp8dist.offline.failures import one_line
from fp8dist.offline.safetensor_files import DTYPES
from fp8dist.offline.served import CONFIG, Mismatch, Served, ServedTensor
from fp8dist_kernels.reference.content import BLOCK_BYTES

__all__ = ["Reference", "Verification", "compare_configs", "compare_tensors"]

_CHUNK = 64 * BLOCK_BYTES
"""Bytes of a served tensor that are in memory."""

_SHOWN = 32
"""Differences that are printed. JSON has all of them."""

_SHORT = 120

QUANTIZATION = "quantization_config"

_Look = tuple[str, tuple[int, ...], str]
"""Dtype, shape and SHA-256 of a tensor: all but its name."""


class Reference(NamedTuple):
    """A tensor that should be served. ``data``: uint8[nbytes] on the CPU, if it is known."""

    certified: Certified
    data: Tensor | None = None


@dataclass(frozen=True)
class Verification:
    """What was compared, and what differs.

    ``reference`` and ``served``: their paths. ``model``: the digest over all tensors of the reference. ``notes``: what
    could not be compared.
    """

    reference: str
    served: str
    step: int | None
    tensors: int
    in_fp8: int
    model: str
    mismatches: tuple[Mismatch, ...]
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """True if nothing differs."""
        return not self.mismatches

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {"same": self.same, **json.loads(json.dumps(asdict(self), default=str))}

    def __str__(self) -> str:
        what = f"{self.tensors} tensors, {self.in_fp8} of them in FP8, after step {self.step}; model {self.model}"
        if self.same:
            lines = [f"{self.served}: the same bytes as {self.reference}", what]
        else:
            count = len(self.mismatches)
            lines = [f"{self.served}: NOT what {self.reference} says, {count} difference{'s' * (count > 1)}"]
            lines += [f"{m.kind:<11}  {m.name}: {m.detail}" for m in self.mismatches[:_SHOWN]]
            lines += [f"and {count - _SHOWN} more"] if count > _SHOWN else []
        return "\n".join(one_line(line) if line else line for line in [*lines, *(f"note: {n}" for n in self.notes)])


# Tensors ---------------------------------------------------------------------------------------------


def compare_tensors(
    served: Served, references: Iterable[Reference], progress: Callable[[int], None]
) -> tuple[list[Mismatch], list[Certified]]:
    """Return (what differs, the reference's tensors). Beside the reference's own tensors, a few MiB are in memory.

    Args:
        progress: called with the number of served bytes that were read.

    Raises:
        CheckpointError: a file of the served model cannot be read.
    """
    listed: list[Certified] = []
    differing: list[tuple[Certified, str, Difference | None]] = []
    found: list[Mismatch] = []
    missing: list[Certified] = []
    for certified, data in references:
        listed.append(certified)
        tensor = served.tensors.get(certified.name)
        if tensor is None:
            missing.append(certified)
        elif (tensor.dtype, tensor.shape) != (certified.dtype, certified.shape):
            expected = f"expected {certified.dtype}{list(certified.shape)}"
            found.append(Mismatch("layout", certified.name, f"{tensor.dtype}{list(tensor.shape)}, {expected}"))
        else:
            digest, difference = _read(tensor, data, progress)
            if digest != certified.sha256:
                differing.append((certified, digest, difference))
        del data
    owners: dict[_Look, list[str]] = defaultdict(list)
    for certified in listed:
        owners[certified.dtype, certified.shape, certified.sha256].append(certified.name)
    found += [_differs(*one, owners) for one in differing]
    found += _strangers(served, listed, missing, progress)
    return sorted(found, key=lambda mismatch: mismatch.name), listed


def _read(
    tensor: ServedTensor, expected: Tensor | None, progress: Callable[[int], None]
) -> tuple[str, Difference | None]:
    """Return (SHA-256 of a served tensor, how it differs from the expected bytes, if these are given)."""
    digest = hashlib.sha256()
    size = tensor.data.length
    blocks: list[int] = []
    first: Tensor | None = None
    for place in range(0, size, _CHUNK):
        chunk = tensor.data.bytes_at(place, min(_CHUNK, size - place))
        digest.update(chunk.numpy().data)
        if expected is not None and not torch.equal(chunk, expected[place : place + len(chunk)]):
            begin = place // BLOCK_BYTES
            for block in range(begin, begin + -(-len(chunk) // BLOCK_BYTES)):
                mine = block_of(chunk, block - begin)
                if not torch.equal(mine, block_of(expected, block)):
                    blocks.append(block)
                    first = mine.clone() if first is None else first
        progress(len(chunk))
    if first is None or expected is None:
        return digest.hexdigest(), None
    dtype = getattr(torch, DTYPES[tensor.dtype])
    theirs = block_of(expected, blocks[0])
    of_blocks = -(-size // BLOCK_BYTES)
    return digest.hexdigest(), compare_block(first, theirs, dtype, blocks[0], len(blocks), of_blocks)


def _differs(
    certified: Certified, digest: str, difference: Difference | None, owners: Mapping[_Look, list[str]]
) -> Mismatch:
    name, dtype, shape, _ = certified
    others = owners.get((dtype, shape, digest), [])
    swapped = f"it has the bytes of {others[0]}" if others else ""
    if difference is None:
        return Mismatch("bytes", name, swapped or "its digest is another one")
    index = unravel(difference.place, shape)
    distance = "" if difference.ulp is None else f", {difference.ulp} ULP"
    detail = (
        f"{list(index)} is {difference.value!r} ({difference.bits[0]}), expected {difference.expected!r} "
        f"({difference.bits[1]}){distance}; {difference.extent()} differ"
    )
    return Mismatch(
        "bytes",
        name,
        f"{detail}; {swapped}" if swapped else detail,
        index,
        difference.value,
        difference.expected,
        difference.ulp,
    )


def _strangers(
    served: Served, listed: list[Certified], missing: list[Certified], progress: Callable[[int], None]
) -> Iterator[Mismatch]:
    """Yield the tensors that only one side has. Those with the same bytes are called renamed."""
    gone: dict[_Look, list[str]] = defaultdict(list)
    for certified in missing:
        gone[certified.dtype, certified.shape, certified.sha256].append(certified.name)
    looks = {(certified.dtype, certified.shape) for certified in missing}
    for name in sorted(served.tensors.keys() - {certified.name for certified in listed}):
        tensor = served.tensors[name]
        look = tensor.dtype, tensor.shape
        names = gone.get((*look, _read(tensor, None, progress)[0]), []) if look in looks else []
        if names:
            yield Mismatch("renamed", names.pop(0), f"is called {name}")
        else:
            yield Mismatch("extra", name, f"{tensor.dtype}{list(tensor.shape)}, of which the reference knows nothing")
    for names in gone.values():
        yield from (Mismatch("missing", name, "is not served") for name in names)


# config.json -----------------------------------------------------------------------------------------


def compare_configs(expected: Mapping[str, Any], served: Mapping[str, Any], keys: Iterable[str]) -> Iterator[Mismatch]:
    """Yield what differs between ``keys`` of two config.json, by the path of the key."""
    for key in sorted(keys):
        yield from _values(key, expected.get(key, _ABSENT), served.get(key, _ABSENT))


_ABSENT = object()


def _values(path: str, expected: Any, found: Any) -> Iterator[Mismatch]:
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted(expected.keys() | found.keys()):
            yield from _values(f"{path}.{key}", expected.get(key, _ABSENT), found.get(key, _ABSENT))
    elif (mine := _shown(found)) != (theirs := _shown(expected)):
        yield Mismatch("config", f"{CONFIG}: {path}", f"{_short(mine)}, expected {_short(theirs)}")


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else json.dumps(value, sort_keys=True)


def _short(text: str) -> str:
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}…"
