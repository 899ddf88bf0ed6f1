"""The verdict: which gradients of a job differ from the reference, which equation explains each, and the culprit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8dist.common.text import first_few
from fp8dist.exact.field import P
from fp8dist.exact.placement import HeldPart
from fp8dist.exact.relations import UNEXPLAINED, Relation, Sides, explain, on


@dataclass(frozen=True)
class ExactFinding:
    """One fault. ``kind``: of the equation, see docs/design/exact.md. ``names``: its tensors, the earliest in backward
    first. ``sentence``: for people."""

    kind: str
    names: tuple[str, ...]
    sentence: str


@dataclass(frozen=True)
class ExactReport:
    """What ``compare`` returns, the same on all ranks.

    ``findings``: the culprit first. ``downstream``: further gradients that differ and that no equation explains.
    ``compared``: the number of gradients. ``untested``: those that are zero in the reference.
    """

    findings: tuple[ExactFinding, ...]
    downstream: tuple[str, ...]
    compared: int
    untested: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """True if the job computes what the reference does."""
        return not self.findings

    def __str__(self) -> str:
        lines = [finding.sentence for finding in self.findings]
        if self.equal:
            lines.append(f"all {self.compared} gradients equal the reference")
            if self.untested:
                lines.append(f"not tested, because their gradients are zero: {first_few(self.untested)}")
        if self.downstream:
            lines.append(f"downstream, {len(self.downstream)} more differ: {first_few(self.downstream)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Holding:
    """What one rank holds of a parameter. ``rank``: with the name, if the rank holds a tie's weight twice.
    ``gradient``: canonical residues, int64; None: it got none."""

    rank: int | str
    part: HeldPart
    gradient: Tensor | None


def judge_gradients(
    order: Sequence[str], shards: Mapping[str, Tensor], held: Mapping[str, Sequence[Holding]]
) -> ExactReport:
    """Compare the gradients of a job with the reference's. Local.

    Args:
        order: the parameters in the order in which the reference's backward computes their gradients.
        shards: for each parameter the shards' contributions: canonical residues, int64, a shard per row.
        held: for each parameter what the ranks hold.
    """
    compared = [name for name in order if name in held]
    zero = {name for name in compared if not (shards[name].sum(0) % P).any()}
    found: dict[str, list[Relation]] = {}
    known: list[Relation] = []
    for name in sorted(compared, key=lambda name: -shards[name].numel()):
        without = [holding.rank for holding in held[name] if holding.gradient is None]
        if without and name not in zero:
            found[name] = [Relation("no gradient", f"no gradient on {on(without)}")]
        else:
            sides = [] if without else _parts(shards[name], held[name])
            wrong = [each for each in sides if any(not torch.equal(x, each.whole) for x in each.ranks.values())]
            found[name] = [explain(each, known) for each in wrong]
            known += [each for each in found[name] if each.coefficients and each not in known]
    return _report(compared, found, zero)


def _parts(shards: Tensor, held: Sequence[Holding]) -> list[Sides]:
    """Return what is compared, for each part of the tensor that ranks hold."""
    complete = shards.sum(0) % P
    ranks: dict[HeldPart, dict[int | str, Tensor]] = {}
    for holding in held:
        assert holding.gradient is not None
        ranks.setdefault(holding.part, {})[holding.rank] = holding.gradient
    return [
        Sides(part.of(complete), [part.of(shard) for shard in shards], tensors, part, complete)
        for part, tensors in ranks.items()
    ]


def _report(compared: Sequence[str], found: Mapping[str, Sequence[Relation]], zero: set[str]) -> ExactReport:
    """Return the report: names with the same equation share a finding, and findings follow the backward. ``zero``: the
    gradients that are zero, as those of a key's bias: every equation holds for them."""
    merged: dict[object, list[str]] = {}
    for name in compared:
        if found[name]:
            merged.setdefault(tuple(dict.fromkeys(each.key for each in found[name])), []).append(name)
    findings, downstream = [], []
    for names in merged.values():
        relations = found[names[0]]
        text = "; ".join({each.key: each.text for each in relations}.values())
        if all(each.kind != UNEXPLAINED for each in relations):
            every = len(zero.union(names)) == len(compared) > 1
            findings.append(ExactFinding(relations[0].kind, tuple(names), _sentence(names, text, every)))
        elif findings:
            downstream += names
        else:
            before = compared[compared.index(names[0]) - 1] if names[0] != compared[0] else None
            where = "; ".join(each.text for each in relations if each.kind == UNEXPLAINED)
            text = f"{names[0]}: not the reference's, and no equation explains it. On {where}"
            right = f". Gradients that backward computes before it are right, the last of them {before}"
            findings.append(ExactFinding(UNEXPLAINED, (names[0],), text + right * (before is not None)))
            downstream += names[1:]
    return ExactReport(tuple(findings), tuple(downstream), len(compared), tuple(x for x in compared if x in zero))


def _sentence(names: Sequence[str], text: str, every: bool) -> str:
    subject, verb = ("every gradient", "is") if every else (first_few(names), "are" if len(names) > 1 else "is")
    factor = text.endswith("of the reference") and ";" not in text
    return f"{subject} {verb} {text}" if factor else f"{subject}: {text}"
