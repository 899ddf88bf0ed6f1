"""Relations between a job's gradient and the reference: which equation holds modulo P, and its sentence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fp8dist.common.text import first_few
from fp8dist.exact.field import P
from fp8dist.exact.placement import HeldPart, displaced
from fp8dist.exact.solver import combined, fraction_text, small_fraction, solve

__all__ = ["Factor", "OfRanks", "OfShards", "Relation", "Remark", "Sides", "explain", "on"]


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

    @property
    def equal(self) -> bool:
        """True if every rank has the reference's gradient."""
        return all(bool((tensor == self.whole).all()) for tensor in self.ranks.values())

    def classes(self) -> list[tuple[int | str, ...]]:
        """Return the ranks, sorted into those with equal gradients, in the order of the first rank of each."""
        found: list[list[int | str]] = []
        for rank, tensor in self.ranks.items():
            alike = next((ranks for ranks in found if bool((self.ranks[ranks[0]] == tensor).all())), None)
            found.append([rank]) if alike is None else alike.append(rank)
        return [tuple(ranks) for ranks in found]


@dataclass(frozen=True)
class Factor:
    """Every rank has the reference times ``factor``, a residue."""

    factor: int
    kind = "factor"

    def holds(self, sides: Sides) -> bool:
        """True if the equation fits these tensors."""
        return all(bool((self.factor * sides.whole % P == tensor).all()) for tensor in sides.ranks.values())

    def __str__(self) -> str:
        fraction = small_fraction(self.factor)
        shown = fraction_text(self.factor) if fraction is None else f"{fraction.numerator}/{fraction.denominator}"
        return f"{shown} of the reference"


@dataclass(frozen=True)
class OfRanks:
    """The reference is a sum of ``coefficients``, residues, times the gradients of classes of ranks."""

    coefficients: tuple[int, ...]
    classes: tuple[tuple[int | str, ...], ...]
    kind = "ranks"

    def holds(self, sides: Sides) -> bool:
        """True if the equation fits these tensors, on these ranks or, for another part of a tensor, on others."""
        classes = sides.classes()
        if len(classes) != len(self.classes):
            return False
        tensors = [sides.ranks[ranks[0]] for ranks in classes]
        return bool((combined(self.coefficients, tensors) == sides.whole).all())

    def __str__(self) -> str:
        terms = [f"{fraction_text(c)} x rank {ranks[0]}" for c, ranks in zip(self.coefficients, self.classes)]
        alike = [f"rank {r[0]} stands for ranks {first_few(r, 8)}" for r in self.classes if len(r) > 1]
        missing = {1: "sum", pow(len(self.classes), -1, P): "mean"}
        what = missing.get(self.coefficients[0]) if len(set(self.coefficients)) == 1 else "weighted sum"
        return (
            f"the reference is {' + '.join(terms)}: the {what or 'scaled sum'} over these ranks is missing"
            f"{' (' + ', '.join(alike) + ')' if alike else ''}"
        )


@dataclass(frozen=True)
class OfShards:
    """The gradient of a class of ranks is a sum of coefficients, residues, times the shards' contributions."""

    coefficients: tuple[tuple[int, ...], ...]
    classes: tuple[tuple[int | str, ...], ...]

    @property
    def kind(self) -> str:
        """What the coefficients mean: "local tokens", "shards" if shards are missing or repeated, or "weights"."""
        kinds = {_kind_of(coefficients) for coefficients in self.coefficients}
        return kinds.pop() if len(kinds) == 1 else "shards" if kinds == {"shards", "equal"} else "weights"

    def holds(self, sides: Sides) -> bool:
        """True if the equation fits these tensors."""
        classes = sides.classes()
        return len(classes) == len(self.classes) and all(
            bool((combined(coefficients, sides.shards) == sides.ranks[ranks[0]]).all())
            for coefficients, ranks in zip(self.coefficients, classes)
        )

    def __str__(self) -> str:
        if len(self.classes) == 1:
            return _sentence(self.coefficients[0])
        each = zip(self.classes, self.coefficients)
        return "; ".join(f"{on(ranks)}: {_sentence(coefficients)}" for ranks, coefficients in each)


@dataclass(frozen=True)
class Remark:
    """What is no equation: slices in other places ("moved"), or "no gradient" on some ranks."""

    kind: str
    text: str

    def holds(self, sides: Sides) -> bool:
        """False: it is about one tensor."""
        return False

    def __str__(self) -> str:
        return self.text


Relation = Factor | OfRanks | OfShards | Remark


def explain(sides: Sides, known: Iterable[Relation] = ()) -> Relation | None:
    """Return the equation that holds between unequal sides, the simplest first; None if there is none.

    Args:
        known: equations of other tensors. They are tried first, and prove tensors that are too small for a system.
    """
    return next((relation for relation in known if relation.holds(sides)), None) or next(_explanations(sides), None)


def _explanations(sides: Sides) -> Iterator[Relation]:
    classes = tuple(sides.classes())
    tensors = [sides.ranks[ranks[0]] for ranks in classes]
    if len(classes) == 1:
        factor = solve([sides.whole], tensors[0])
        if factor is not None:
            yield Factor(factor[0])
    of_ranks = None
    if len(classes) > 1 and not any(bool((tensor == sides.whole).all()) for tensor in tensors):
        ones = OfRanks((1,) * len(classes), classes)
        if sides.whole.numel() > 1 and ones.holds(sides):
            yield ones
        solved = solve(tensors, sides.whole)
        of_ranks = None if solved is None or 0 in solved else OfRanks(tuple(solved), classes)
        if of_ranks is not None and len(set(of_ranks.coefficients)) == 1:
            yield of_ranks
    of_shards = [_coefficients(sides.shards, tensor) for tensor in tensors]
    if all(of_shards):
        yield OfShards(tuple(tuple(each) for each in of_shards if each), classes)
    if of_ranks is not None:
        yield of_ranks
    moved = [(ranks, displaced(sides.ranks[ranks[0]], sides.complete, sides.part)) for ranks in classes]
    if any(text for _, text in moved):
        yield Remark("moved", "; ".join(f"{on(ranks)}: {text}" for ranks, text in moved if text))


def _coefficients(shards: Sequence[Tensor], tensor: Tensor) -> list[int] | None:
    """Return the shards' coefficients in a tensor. Where shards depend on each other, the shares of one rank that is
    missing or doubled are tried."""
    solved = solve(shards, tensor)
    if solved is not None or len(shards) < 2 or tensor.numel() < 2:
        return solved
    count = len(shards)
    simple = [[times if i == j else 1 for j in range(count)] for i in range(count) for times in (0, 2)]
    return next((each for each in simple if bool((combined(each, shards) == tensor).all())), None)


def on(ranks: Sequence[int | str]) -> str:
    """Return "rank 3", or "ranks 0, 1"."""
    return f"rank{'s' * (len(ranks) > 1)} {first_few(ranks, 8)}"


def _kind_of(coefficients: Sequence[int]) -> str:
    fractions = [small_fraction(each) for each in coefficients]
    if len(set(coefficients)) == 1:
        return "equal"
    if all(each is not None and each.denominator == 1 and 0 <= each <= len(coefficients) for each in fractions):
        return "shards"
    # Of T tokens a shard has t: in a mean of the S shards' means it counts T / (S t) times, so the inverses add up to
    # S; to a divisor of S where the means are added.
    whole = sum(pow(each, -1, P) for each in coefficients) % P if all(coefficients) else 0
    return "local tokens" if whole and len(coefficients) % whole == 0 else "weights"


def _sentence(coefficients: Sequence[int]) -> str:
    kind = _kind_of(coefficients)
    if kind == "equal":
        return str(Factor(coefficients[0])) if coefficients[0] != 1 else "equals the reference"
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
