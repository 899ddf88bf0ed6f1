"""Relations between a job's gradient and the reference: which equation holds modulo P, and its sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fp8dist.common.text import first_few
from fp8dist.exact.field import P
from fp8dist.exact.placement import HeldPart, difference_text, displaced
from fp8dist.exact.solver import combined, factor_text, fraction_text, small_fraction, solve

UNEXPLAINED = "unexplained"
"""The kind where no equation holds."""


class Sides(NamedTuple):
    """What is compared: all tensors canonical residues, int64, of one shape.

    ``whole``: the reference's gradient. ``shards``: each data shard's contribution to it. ``ranks``: the job's gradient
    on each rank that holds this part. ``part``: which part of ``complete``, the reference's whole gradient, this is.
    """

    whole: Tensor
    shards: Sequence[Tensor]
    ranks: Mapping[int | str, Tensor]
    part: HeldPart
    complete: Tensor

    def classes(self) -> list[tuple[int | str, ...]]:
        """Return the ranks, sorted into those with equal gradients, in the order of the first rank of each."""
        found: list[list[int | str]] = []
        for rank, tensor in self.ranks.items():
            alike = next((ranks for ranks in found if torch.equal(self.ranks[ranks[0]], tensor)), None)
            found.append([rank]) if alike is None else alike.append(rank)
        return [tuple(ranks) for ranks in found]


@dataclass(frozen=True)
class Relation:
    """An equation between the gradients of classes of ranks and the reference, or a remark about one tensor.

    ``kind``: see docs/design/exact.md. ``text``: for people. ``coefficients``: residues. Of the kind "ranks" they are
    one row, and the reference is their sum with the classes' gradients. Else there is a row for each class, and its
    gradient is their sum with the shards' contributions. A remark has none.
    """

    kind: str
    text: str
    coefficients: tuple[tuple[int, ...], ...] = ()

    @property
    def key(self) -> object:
        """What tensors with one finding have in common: the coefficients, not the ranks."""
        return self.kind, self.coefficients or ("" if self.kind == UNEXPLAINED else self.text)

    def holds(self, sides: Sides) -> bool:
        """True if the equation fits these tensors, on these ranks or, for another part of a tensor, on others."""
        tensors = [sides.ranks[ranks[0]] for ranks in sides.classes()]
        if self.kind == "ranks":
            (row,) = self.coefficients
            return len(row) == len(tensors) and torch.equal(combined(row, tensors), sides.whole)
        return len(self.coefficients) == len(tensors) and all(
            torch.equal(combined(row, sides.shards), tensor) for row, tensor in zip(self.coefficients, tensors)
        )


def explain(sides: Sides, known: Iterable[Relation] = ()) -> Relation:
    """Return the equation that holds between unequal sides, the simplest first; else a remark on what differs.

    Args:
        known: equations of other tensors. They are tried first, and prove tensors that are too small for a system.
    """
    found = next((relation for relation in known if relation.holds(sides)), None)
    if found is not None:
        return found
    classes = sides.classes()
    tensors = [sides.ranks[ranks[0]] for ranks in classes]
    factor = solve([sides.whole], tensors[0]) if len(classes) == 1 else None
    if factor is not None:
        return _of_shards([factor * len(sides.shards)], classes)
    weights = _weights(sides.whole, tensors)
    if weights is not None and len(set(weights)) == 1:
        return _of_ranks(weights, classes)
    rows = [row for row in (_coefficients(sides.shards, tensor) for tensor in tensors) if row is not None]
    if len(rows) == len(tensors):
        return _of_shards(rows, classes)
    if weights is not None:
        return _of_ranks(weights, classes)
    remarks = {
        "moved": [displaced(tensor, sides.complete, sides.part) for tensor in tensors],
        UNEXPLAINED: [difference_text(tensor, sides.whole, sides.part) for tensor in tensors],
    }
    kind = "moved" if any(remarks["moved"]) else UNEXPLAINED
    shown = [f"{on(ranks)}: {text}" for ranks, text in zip(classes, remarks[kind]) if text]
    return Relation(kind, "; ".join([*shown[:3], *([f"{len(shown) - 3} more such"] if len(shown) > 3 else [])]))


def _weights(whole: Tensor, tensors: Sequence[Tensor]) -> list[int] | None:
    """Return the coefficients with which gradients that all differ from the reference's add up to it, none of them 0.
    All ones also prove tensors that are too small for a system."""
    if len(tensors) == 1 or any(torch.equal(tensor, whole) for tensor in tensors):
        return None
    ones = [1] * len(tensors)
    solved = ones if whole.numel() > 1 and torch.equal(combined(ones, tensors), whole) else solve(tensors, whole)
    return None if solved is None or 0 in solved else solved


def _of_ranks(weights: Sequence[int], classes: Sequence[Sequence[int | str]]) -> Relation:
    terms = [f"{fraction_text(c)} x rank {ranks[0]}" for c, ranks in zip(weights, classes)]
    alike = [f"rank {r[0]} stands for ranks {first_few(r, 8)}" for r in classes if len(r) > 1]
    missing = {1: "sum", pow(len(classes), -1, P): "mean"}
    what = missing.get(weights[0], "scaled sum") if len(set(weights)) == 1 else "weighted sum"
    text = f"the reference is {' + '.join(terms)}: the {what} over these ranks is missing"
    return Relation("ranks", text + (f" ({', '.join(alike)})" if alike else ""), (tuple(weights),))


def _of_shards(rows: Sequence[Sequence[int]], classes: Sequence[Sequence[int | str]]) -> Relation:
    """The kind is what the coefficients mean, but of ranks that are right: "factor", "local tokens", "shards" if shards
    are missing or repeated, or "weights", also for several of them."""
    kinds = {_kind_of(row) for row in rows} - {"equal"}
    each = [f"{on(ranks)}: {_sentence(row)}" for ranks, row in zip(classes, rows)]
    text = "; ".join(each) if len(rows) > 1 else _sentence(rows[0])
    return Relation(kinds.pop() if len(kinds) == 1 else "weights", text, tuple(map(tuple, rows)))


def _coefficients(shards: Sequence[Tensor], tensor: Tensor) -> list[int] | None:
    """Return the shards' coefficients in a tensor. Where shards depend on each other, the shares of one rank that is
    missing or doubled are tried."""
    solved = solve(shards, tensor)
    if solved is not None or len(shards) < 2 or tensor.numel() < 2:
        return solved
    count = len(shards)
    simple = [[times if i == j else 1 for j in range(count)] for i in range(count) for times in (0, 2)]
    return next((each for each in simple if torch.equal(combined(each, shards), tensor)), None)


def on(ranks: Sequence[int | str]) -> str:
    """Return "rank 3", or "ranks 0, 1"."""
    return f"rank{'s' * (len(ranks) > 1)} {first_few(ranks, 8)}"


def _kind_of(coefficients: Sequence[int]) -> str:
    fractions = [small_fraction(each) for each in coefficients]
    if len(set(coefficients)) == 1:
        return "equal" if coefficients[0] == 1 else "factor"
    if all(each is not None and each.denominator == 1 and 0 <= each <= len(coefficients) for each in fractions):
        return "shards"
    # Of T tokens a shard has t: in a mean of the S shards' means it counts T / (S t) times, so the inverses add up to
    # S; to a divisor of S where the means are added.
    whole = sum(pow(each, -1, P) for each in coefficients) % P if all(coefficients) else 0
    return "local tokens" if whole and len(coefficients) % whole == 0 else "weights"


def _sentence(coefficients: Sequence[int]) -> str:
    kind = _kind_of(coefficients)
    if kind in ("equal", "factor"):
        return factor_text(coefficients[0]) if kind == "factor" else "equals the reference"
    if kind == "shards":
        missing = [shard for shard, times in enumerate(coefficients) if times == 0]
        repeated = [(shard, times) for shard, times in enumerate(coefficients) if times > 1]
        return ", ".join(
            [f"shard {shard} is counted {times} times" for shard, times in repeated]
            + [f"shard {shard} is missing" for shard in missing]
        )
    shown = [fraction_text(each) for each in coefficients]
    listed = f"{', '.join(shown[:-1])} and {shown[-1]} of the shards' contributions"
    return f"{listed}: the loss is divided by local tokens" if kind == "local tokens" else listed
