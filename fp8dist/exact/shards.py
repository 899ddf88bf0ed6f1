"""Compare the parameters of a job with the reference's: which part of each a rank holds, and wrong parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from fp8dist.common.names import did_you_mean
from fp8dist.common.text import first_few
from fp8dist.errors import ConfigurationError
from fp8dist.exact.placement import WHOLE, HeldPart, difference_text, displaced, is_distinct, part_of, runs_text
from fp8dist.exact.reference import Reference
from fp8dist.exact.verdict import ExactFinding


def judge_parameters(
    reference: Reference, held: Sequence[Mapping[str, Tensor]]
) -> tuple[list[ExactFinding], list[dict[str, HeldPart]]]:
    """Return what is wrong with the parameters that each rank holds, and for each rank the part that each is. Local.

    Raises:
        ConfigurationError: a parameter has a name or a shape that the reference has not.
    """
    wrong: dict[str, list[str]] = {}
    parts: list[dict[str, HeldPart]] = []
    for rank, parameters in enumerate(held):
        mine: dict[str, HeldPart] = {}
        known = {name: (local.long(), *_whole_of(reference, name, local, rank)) for name, local in parameters.items()}
        # Parts that values show come first: they decide where values show none.
        for name in sorted(known, key=lambda name: not is_distinct(*known[name][1:])):
            mine[name], text = _placed(*known[name], _of_kin(name, mine))
            if text is not None:
                wrong.setdefault(reference.ties.get(name, name), []).append(f"rank {rank}: {text}")
        parts.append(mine)
    findings = [
        ExactFinding("parameter", (name,), f"the parameter {name} is not the reference's: {'; '.join(texts)}")
        for name, texts in wrong.items()
    ]
    findings += [] if findings else _uncovered(reference, parts)
    return findings, parts


def _whole_of(reference: Reference, name: str, local: Tensor, rank: int) -> tuple[Tensor, int | None]:
    """Return the parameter of the reference, and the dim along which a rank holds a part of it; None: all of it."""
    whole = reference.parameters.get(reference.ties.get(name, name))
    if whole is None:
        raise ConfigurationError(
            f"the reference has no parameter {name!r}, which rank {rank} holds"
            f"{did_you_mean(name, reference.parameters)}: pass rename= if the names of a stage differ"
        )
    dim = cut_dim(local.shape, whole.shape)
    if dim is None and local.shape != whole.shape:
        raise ConfigurationError(
            f"{name} has the shape {tuple(local.shape)} on rank {rank}: no part of {tuple(whole.shape)}, the shape in "
            f"the reference, cut along one dim"
        )
    return whole, dim


def cut_dim(local: Sequence[int], whole: Sequence[int]) -> int | None:
    """Return the one dim along which a shape is smaller than another; None if there is none, or if others differ."""
    if len(local) != len(whole):
        return None
    cut = [dim for dim, (mine, all_) in enumerate(zip(local, whole)) if mine != all_]
    return cut[0] if len(cut) == 1 and local[cut[0]] < whole[cut[0]] else None


def _placed(local: Tensor, whole: Tensor, dim: int | None, others: Sequence[HeldPart]) -> tuple[HeldPart, str | None]:
    """Return the part that a rank holds, and what is wrong with its values."""
    if dim is None:
        return WHOLE, displaced(local, whole, WHOLE) or difference_text(local, whole)
    part = part_of(local, whole, dim, others)
    return (part, None) if part else (WHOLE, f"it has slices of dim {dim} that the reference has not")


def _of_kin(name: str, parts: Mapping[str, HeldPart]) -> list[HeldPart]:
    """Return a rank's parts of other tensors, those of the same module first."""
    module = name.rpartition(".")[0]
    return [part for other, part in sorted(parts.items(), key=lambda each: each[0].rpartition(".")[0] != module)]


def _uncovered(reference: Reference, parts: Sequence[Mapping[str, HeldPart]]) -> list[ExactFinding]:
    """Return the parameters of which ranks hold no part, or not all."""
    findings = []
    for name, whole in reference.parameters.items():
        held = _held(reference, parts, name)
        if not held:
            findings.append(ExactFinding("parameter", (name,), f"no rank holds the parameter {name}"))
        elif None not in (dims := {part.dim for part in held.values()}) and is_distinct(whole, dim := dims.pop() or 0):
            places = {place for part in held.values() for place in part.places}
            if missing := [place for place in range(whole.shape[dim]) if place not in places]:
                text = f"no rank holds slices {runs_text(missing)} of dim {dim} of the parameter {name}: {_each(held)}"
                findings.append(ExactFinding("parameter", (name,), text))
    return findings


def swapped(reference: Reference, parts: Sequence[Mapping[str, HeldPart]]) -> ExactFinding | None:
    """Return the parameters whose parts lie on the ranks in another order than those of most others, if any do. Local.

    This is no fault by itself: a program is right if its gradients are.
    """
    ordered: dict[bool, dict[str, str]] = {True: {}, False: {}}
    for name, whole in reference.parameters.items():
        held = {rank: part for rank, part in _held(reference, parts, name).items() if part.places}
        firsts = list(dict.fromkeys(part.places[0] for part in held.values()))
        if len(firsts) > 1 and is_distinct(whole, next(iter(held.values())).dim or 0):
            ordered[firsts == sorted(firsts)][name] = _each(held)
    odd = min(ordered.values(), key=len)
    if not odd or len(odd) == len(ordered[True]) == len(ordered[False]):
        return None
    name, each = next(iter(odd.items()))
    text = f"{first_few(list(odd))}: the parts lie on other ranks than those of most parameters ({name}: {each})"
    return ExactFinding("swapped", tuple(odd), text)


def _each(held: Mapping[int, HeldPart]) -> str:
    return ", ".join(f"rank {rank} holds {part}" for rank, part in held.items())


def _held(reference: Reference, parts: Sequence[Mapping[str, HeldPart]], name: str) -> dict[int, HeldPart]:
    """Return what each rank holds of a parameter, by any of its names."""
    names = [name, *(other for other, first in reference.ties.items() if first == name)]
    return {rank: mine[each] for rank, mine in enumerate(parts) for each in names if each in mine}
