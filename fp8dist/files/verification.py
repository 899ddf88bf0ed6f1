"""Compare a served model with a reference, a certificate or another export: tensor by tensor, and its config.json."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fp8dist.checks.contents import Digester
from fp8dist.checks.differences import Difference, first_difference, unravel
from fp8dist.common.divergence import Finding
from fp8dist.common.text import printable
from fp8dist.files.certificate_reading import Certified
from fp8dist.files.comparison import Progress
from fp8dist.files.safetensor_files import DTYPES
from fp8dist.files.served import CONFIG, Served, mismatch
from fp8dist_kernels.reference.content import as_bytes

__all__ = ["CertifiedValue", "compare_configs", "compare_tensors", "sha256_of"]

_Look = tuple[str | None, tuple[int, ...], str]
"""Dtype, shape and SHA-256 of a tensor: all but its name."""


class CertifiedValue(NamedTuple):
    """A tensor of the reference. ``value``: its values on the CPU; None if only the digest is known."""

    certified: Certified
    value: Tensor | None = None


def sha256_of(tensor: Tensor) -> str:
    """Return the SHA-256 of the bytes of a tensor on the CPU, row by row, little-endian; hexadecimal."""
    return hashlib.sha256(as_bytes(tensor).numpy().data).hexdigest()


def compare_tensors(
    served: Served, references: Iterable[CertifiedValue], tied: Mapping[str, Any], progress: Progress
) -> tuple[list[Finding], list[Certified]]:
    """Return (findings by name of the tensor, the reference's tensors that must be served). Holds two tensors in
    memory.

    Args:
        references: the tensors of the reference.
        tied: {name of a tensor: name of another}. The first may be missing in the served model, if the reference has
            the same bytes under both names.
        progress: called with the number of bytes of each tensor that was read.

    Raises:
        CheckpointError: a file of the served model cannot be read.
    """
    places = {entry.name: place for place, entry in enumerate(served.source.entries)}
    listed: list[Certified] = []
    missing: list[Certified] = []
    found: list[Finding] = []
    differing: list[tuple[Certified, str, Difference | None]] = []
    digester = Digester()
    for certified, value in references:
        name, dtype, shape, sha256 = certified
        listed.append(certified)
        if name not in places:
            missing.append(certified)
            continue
        entry = served.source.entries[places[name]]
        if (entry.dtype, entry.shape) != (DTYPES.get(dtype), shape):
            expected = f"{DTYPES.get(dtype) or printable(dtype)}{list(shape)}"
            found.append(mismatch("layout", name, f"is {entry.dtype}{list(entry.shape)}, expected {expected}"))
            continue
        tensor = served.source.read(places[name])
        digest = sha256_of(tensor)
        if digest != sha256:
            known = None
            if value is not None:
                known = first_difference(tensor, value, digester.leaves(tensor), digester.leaves(value))
            differing.append((certified, digest, known))
        progress(tensor.nbytes)
    looks = {one.name: _look(one) for one in listed}
    copies = {one for one in missing if _is_copy(one, tied, looks)}
    owners: dict[_Look, list[str]] = defaultdict(list)
    for name, look in looks.items():
        owners[look].append(name)
    found += [_differs(*one, owners) for one in differing]
    strangers = [place for name, place in places.items() if name not in looks]
    found += _one_sided(served, strangers, [one for one in missing if one not in copies])
    return sorted(found, key=lambda finding: finding.name), [one for one in listed if one not in copies]


def _is_copy(certified: Certified, tied: Mapping[str, Any], looks: Mapping[str, _Look]) -> bool:
    owner = str(tied.get(certified.name))
    return owner not in tied and looks.get(owner) == _look(certified)


def _look(certified: Certified) -> _Look:
    return DTYPES.get(certified.dtype), certified.shape, certified.sha256


def _differs(
    certified: Certified, digest: str, difference: Difference | None, owners: Mapping[_Look, list[str]]
) -> Finding:
    others = owners.get((DTYPES.get(certified.dtype), certified.shape, digest))
    swapped = f"it has the bytes of '{printable(others[0])}'" if others else ""
    if difference is None:
        return mismatch("parameter", certified.name, swapped or "its SHA-256 is another one")
    detail = f"{difference.extent()} differ"
    return mismatch(
        "parameter",
        certified.name,
        f"{detail}; {swapped}" if swapped else detail,
        index=unravel(difference.place, certified.shape),
        value=difference.value,
        expected=difference.expected,
        ulp=difference.ulp,
    )


def _one_sided(served: Served, strangers: Iterable[int], missing: Iterable[Certified]) -> Iterator[Finding]:
    """Yield findings about tensors that only one side has. If one of each side has the same dtype, shape and bytes, one
    finding says that the tensor has another name.

    Args:
        strangers: indices of the served entries that the reference lacks.
        missing: the reference's tensors that are not served.
    """
    gone: dict[_Look, list[str]] = defaultdict(list)
    for certified in missing:
        gone[_look(certified)].append(certified.name)
    shapes = {look[:2] for look in gone}
    for place in strangers:
        entry = served.source.entries[place]
        names: list[str] = []
        if (entry.dtype, entry.shape) in shapes:
            names = gone[entry.dtype, entry.shape, sha256_of(served.source.read(place))]
        if names:
            yield mismatch("layout", names.pop(0), f"is called '{printable(entry.name)}'")
        else:
            yield mismatch("layout", entry.name, f"{entry.dtype}{list(entry.shape)} is served, and was not exported")
    for names in gone.values():
        yield from (mismatch("layout", name, "is missing") for name in names)


# config.json -----------------------------------------------------------------------------------------

_ABSENT = object()


def compare_configs(expected: Mapping[str, Any], served: Mapping[str, Any], keys: Iterable[str]) -> Iterator[Finding]:
    """Yield a finding for each value that differs below ``keys`` of two config.json. A finding's name is the path of
    keys, joined by dots."""
    for key in sorted(keys):
        yield from _values(key, expected.get(key, _ABSENT), served.get(key, _ABSENT))


def _values(path: str, expected: Any, found: Any) -> Iterator[Finding]:
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted(expected.keys() | found.keys()):
            yield from _values(f"{path}.{key}", expected.get(key, _ABSENT), found.get(key, _ABSENT))
    elif (is_there := _text(found)) != (wanted := _text(expected)):
        yield mismatch("config", path, f"{CONFIG} has {printable(is_there)}, expected {printable(wanted)}")


def _text(value: Any) -> str:
    return "nothing" if value is _ABSENT else json.dumps(value, sort_keys=True)
