"""Compare the tensors of a served model with a reference, a certificate or another export, each read once."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8dist.checks.contents import Digester
from fp8dist.checks.differences import Difference, first_difference, unravel
from fp8dist.common.divergence import Finding
from fp8dist.common.text import dtype_name, printable
from fp8dist.files.certificate import Certified
from fp8dist.files.safetensor_files import DTYPES
from fp8dist.files.served import mismatch
from fp8dist.files.value_comparison import ValueDifference, compare_values, have_values, is_rounded_up
from fp8dist_kernels.reference.content import as_bytes

_Look = tuple[str | None, tuple[int, ...], str]
"""Dtype, shape and SHA-256 of a tensor: all but its name."""

_SUFFIXES = ("_scale", "_scale_inv")
"""What the name of a weight's scales has after that of the weight."""

_MOST_KEPT = 8
"""Most differing tensors that are kept at a time: weights whose scales have not come yet, and scales likewise."""


def sha256_of(tensor: Tensor) -> str:
    """Return the SHA-256 of the bytes of a tensor on the CPU, row by row, little-endian; hexadecimal."""
    return hashlib.sha256(as_bytes(tensor).numpy().data).hexdigest()


class _Pair(NamedTuple):
    """A served tensor, and the one that was expected."""

    served: Tensor
    expected: Tensor


class _Differing(NamedTuple):
    """A tensor with other bytes. ``first``: its first other element; None: the expected values are not known."""

    certified: Certified
    digest: str
    first: Difference | None


class TensorComparison:
    """Compares a served model with a reference: ``add`` each served tensor, then ``finish``. Keeps at most 8 tensors:
    FP8 weights that differ until their scales have come, and scales that differ until their weight has come. Local.

    Args:
        certified: the tensors of the reference by name. May grow: an entry must be there when its tensor is added.
        value: returns the values of a tensor of the reference on the CPU; None: only its digest is known.
        tied: {name of a tensor: name of another}. The first may be missing on either side, if the bytes under both
            names are the same.
        copies: True: copy what is kept, because the caller may write to it.
    """

    def __init__(
        self,
        certified: Mapping[str, Certified],
        value: Callable[[str], Tensor | None],
        tied: Mapping[str, Any],
        copies: bool = False,
    ) -> None:
        self.rescaled: list[str] = []  # Weights with other bytes and scales, and the same values.
        self._certified = certified
        self._value = value
        self._tied = tied
        self._copies = copies
        self._digester = Digester()
        self._findings: list[Finding] = []
        self._seen: set[str] = set()
        self._equal: set[str] = set()
        self._differing: dict[str, _Differing] = {}
        self._kept: dict[str, _Pair] = {}
        self._by_value: dict[str, ValueDifference] = {}  # Of weights with other scales.
        self._rounded: set[str] = set()  # Scales that were rounded up to powers of two.
        self._strangers: dict[str, _Look] = {}

    def fault(self, name: str, detail: str, *covered: str) -> None:
        """Note what is wrong with a served tensor. ``covered``: tensors of the reference that are in it, and so do not
        count as missing."""
        self._seen.update((name, *covered))
        self._findings.append(mismatch("layout", name, detail))

    def add(self, name: str, tensor: Tensor) -> None:
        """Compare a served tensor, which must be on the CPU."""
        if name in self._seen:
            self._findings.append(mismatch("layout", name, "comes twice"))
            return
        self._seen.add(name)
        expected = self._certified.get(self._known_as(name))
        if expected is not None and expected.dtype == "F32" and tensor.dtype == torch.float8_e8m0fnu:
            tensor = tensor.float()  # UE8M0, which holds powers of two alone.
        look = dtype_name(tensor.dtype), tuple(tensor.shape)
        if expected is None:
            self._strangers[name] = (*look, sha256_of(tensor))
            return
        if look != (DTYPES.get(expected.dtype), expected.shape):
            wanted = f"{DTYPES.get(expected.dtype) or printable(expected.dtype)}{list(expected.shape)}"
            self.fault(name, f"is {look[0]}{list(look[1])}, expected {wanted}")
            return
        digest = sha256_of(tensor)
        if digest == expected.sha256:
            self._equal.add(name)
        else:
            self._note(expected._replace(name=name), digest, tensor)
        for weight, scale in _weights_and_scales(name):
            if all(each in self._equal or each in self._differing for each in (weight, scale)):
                self._compare_values(weight, scale)

    def _known_as(self, name: str) -> str:
        """Return the reference's name for a served tensor. Scales of a tied weight are those of its owner."""
        for suffix in ("", *_SUFFIXES) if name not in self._certified else ():
            if name.endswith(suffix) and (owner := self._tied.get(name.removesuffix(suffix))) is not None:
                return f"{owner}{suffix}"
        return name

    def _note(self, expected: Certified, digest: str, tensor: Tensor) -> None:
        """Note a tensor with other bytes. Keep it if it is an FP8 weight or its scales, to compare values later."""
        value = self._value(self._known_as(expected.name))
        first = None
        if value is not None:
            leaves = (self._digester.leaves(each) for each in (tensor, value))
            first = first_difference(tensor, value, *leaves)
            of_fp8 = expected.dtype in (("F8_E4M3",) if expected.name.endswith(".weight") else ("F32", "U8"))
            if of_fp8 and _weights_and_scales(expected.name):
                if len(self._kept) == _MOST_KEPT:
                    del self._kept[next(iter(self._kept))]
                self._kept[expected.name] = _Pair(tensor.clone() if self._copies else tensor, value)
        self._differing[expected.name] = _Differing(expected, digest, first)

    def _compare_values(self, weight: str, scale: str) -> None:
        """Compare the values of a weight, of which all tensors have come. Does nothing if some are not known."""
        if weight in self._equal and scale in self._equal:
            return
        weights, scales = self._pair(weight), self._pair(scale)
        if weights is None or scales is None or not have_values(weights.served, scales.served):
            return
        found = compare_values(weights.served, scales.served, weights.expected, scales.expected)
        if not found.differing and scale in self._differing:
            self._differing.pop(weight, None)
            self._differing.pop(scale, None)
            self.rescaled.append(weight)
        elif {weight, scale} <= self._differing.keys():
            self._by_value[weight] = found
        if is_rounded_up(*scales):
            self._rounded.add(scale)

    def _pair(self, name: str) -> _Pair | None:
        """Return a tensor that was added, with the expected one. None: the values are not known, or no longer kept."""
        if name in self._differing:
            return self._kept.pop(name, None)
        value = self._value(self._known_as(name))
        return None if value is None else _Pair(value, value)

    def finish(self) -> tuple[list[Finding], list[Certified]]:
        """Return (findings by name of the tensor, the reference's tensors that must be served)."""
        looks = {one.name: _look(one) for one in self._certified.values()}
        missing = [one for one in self._certified.values() if one.name not in self._seen]
        copies = {one for one in missing if self._is_copy(one, looks)}
        owners: dict[_Look, list[str]] = defaultdict(list)
        for name, look in looks.items():
            owners[look].append(name)
        findings = [*self._findings, *(self._differs(one, owners) for one in self._differing.values())]
        findings += _one_sided(self._strangers, [one for one in missing if one not in copies])
        listed = [one for one in self._certified.values() if one not in copies]
        return sorted(findings, key=lambda finding: finding.name), listed

    def _is_copy(self, certified: Certified, looks: Mapping[str, _Look]) -> bool:
        """True if a tensor may be missing: it is tied, and has the bytes of its owner."""
        owner = str(self._tied.get(certified.name))
        return owner not in self._tied and looks.get(owner) == _look(certified)

    def _differs(self, one: _Differing, owners: Mapping[_Look, list[str]]) -> Finding:
        """Return the finding about a tensor with other bytes. ``owners``: names of the reference's tensors by look."""
        certified, digest, first = one
        name, shape = certified.name, certified.shape
        others = owners.get((DTYPES.get(certified.dtype), shape, digest))
        remarks = [f"it has the bytes of '{printable(others[0])}'"] if others else []
        if name in self._rounded:
            remarks.append("rounded up to powers of two")
        if found := self._by_value.get(name):
            of = f"{found.differing} of {torch.Size(shape).numel()} values differ"
            beyond = f"{found.beyond} of them by more than the sum of both ULPs"
            remarks.insert(0, f"{of}, {beyond if found.beyond else 'as after quantising again with other scales'}")
            place = found.place or 0
            where = {"index": unravel(place, shape), "value": found.value, "expected": found.expected}
            return mismatch("parameter", name, "; ".join(remarks), **where)
        if first is None:
            return mismatch("parameter", name, "; ".join(remarks) or "its SHA-256 is another one")
        detail = "; ".join([f"{first.extent()} differ", *remarks])
        where = {"index": unravel(first.place, shape), "value": first.value, "expected": first.expected}
        return mismatch("parameter", name, detail, ulp=first.ulp, **where)


def _look(certified: Certified) -> _Look:
    return DTYPES.get(certified.dtype), certified.shape, certified.sha256


def _weights_and_scales(name: str) -> list[tuple[str, str]]:
    """Return the pairs (weight, its scales) in which an exported tensor may be."""
    weights = {suffix: name.removesuffix(suffix) for suffix in _SUFFIXES}
    pairs = [(weight, f"{weight}{suffix}") for suffix, weight in weights.items() if weight.endswith(".weight")]
    return [pair for pair in pairs if name in pair]


def _one_sided(strangers: Mapping[str, _Look], missing: Iterable[Certified]) -> list[Finding]:
    """Return findings about tensors that only one side has. If one of each side has the same dtype, shape and bytes,
    one finding says that the tensor has another name.

    Args:
        strangers: served tensors that the reference lacks.
        missing: the reference's tensors that are not served.
    """
    gone: dict[_Look, list[str]] = defaultdict(list)
    for certified in missing:
        gone[_look(certified)].append(certified.name)
    found = []
    for name, look in strangers.items():
        if names := gone.get(look):
            found.append(mismatch("layout", names.pop(0), f"is called '{printable(name)}'"))
        else:
            found.append(mismatch("layout", name, f"{look[0]}{list(look[1])} is served, and was not exported"))
    return found + [mismatch("layout", name, "is missing") for names in gone.values() for name in names]
