"""ReplayReport: the findings of a replay, as data and as text; and ``judge``, which derives them from all ranks."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from fp8dist.checks.differences import Difference, unravel
from fp8dist.checks.outputs import Place
from fp8dist.common.divergence import plain_values, word_for
from fp8dist.common.text import aligned, ranks_text

Kind = Literal["not deterministic", "ranks differ", "nonfinite"]

_EVERYWHERE = "on all ranks, so the model may be the cause"


@dataclass(frozen=True)
class ReplayFinding:
    """One finding of a replay. All ranks are global.

    Attributes:
        kind: "not deterministic": the second run of their own batch gave ``ranks`` another result. "ranks differ":
            ``ranks`` got another result than ``reference_rank`` from the same batch. "nonfinite": the data of ``ranks``
            gives a NaN or an infinity, also on the rank that repeated the batch.
        ranks: the ranks concerned. For "ranks differ" without a reference, the two ranks that differ.
        module: name of the first module in execution order that shows the finding; "" for the model itself.
        what: "output" or "gradient" (of its output) of this module, or "gradient of NAME", one of its parameters.
        call: number of the module's call, from 0.
        place: index of this output or gradient among all of the step, in execution order.
        reference_rank: the rank that is taken to be right. None: not "ranks differ", or it is not known who is right.
        index, value, expected, ulp: the first element that differs, if known: its index, its value on the first of
            ``ranks``, its value on the other rank, and the distance of the values in units in the last place.
        detail: further facts as text. Of "nonfinite": "", "on all ranks, …", or the parameter that is not finite.
    """

    kind: Kind
    ranks: tuple[int, ...]
    module: str
    what: str
    call: int
    place: int
    reference_rank: int | None = None
    index: tuple[int, ...] | None = None
    value: Any = None
    expected: Any = None
    ulp: int | None = None
    detail: str = ""

    @property
    def sentence(self) -> str:
        """The finding in one sentence."""
        again = f", call {self.call + 1}" if self.call else ""
        where = f"{self._module}, {self.what}{again}"
        who = f"rank{'s' * (len(self.ranks) > 1)} {ranks_text(self.ranks)}"
        detail = f" ({self.detail})" if self.detail else ""
        if self.kind == "not deterministic":
            return f"not deterministic on {who}, first in {where}{detail}"
        if self.kind == "nonfinite":  # Any other detail names a parameter that is not finite.
            source = f"the data of {who} gives" if self.detail in ("", _EVERYWHERE) else f"a parameter gives {who}"
            return f"{source} the first non-finite value in {where}{detail}"
        against = "" if self.reference_rank is None else f" from rank {self.reference_rank}"
        verb = "differs" if len(self.ranks) == 1 else "differ"
        return f"{who} {verb}{against} on the same data, first in {where}{self._element}{detail}"

    @property
    def _module(self) -> str:
        return f"module '{self.module}'" if self.module else "the model's own forward"

    @property
    def _element(self) -> str:
        """The first element that differs, as the end of a sentence; "" if it is not known."""
        if self.index is None:
            return ""
        ulp = "" if self.ulp is None else f", {self.ulp} ULP"
        values = f"{word_for(self.value)} against {word_for(self.expected)}"
        if self.reference_rank is None:
            values = (
                f"{word_for(self.value)} on rank {self.ranks[0]}, {word_for(self.expected)} on rank {self.ranks[1]}"
            )
        return f", element [{', '.join(map(str, self.index))}]: {values}{ulp}"


@dataclass(frozen=True)
class ReplayReport:
    """The result of ``fp8dist.replay``, the same on all ranks. ``str()`` is a sentence and a table.

    Attributes:
        findings: results that are not deterministic, then ranks that differ, then values that are not finite; each kind
            in execution order.
        ranks: the global ranks that took part.
        compared: number of outputs and gradients that the first rank of the group compared.
        skipped: comparisons that were not made, and why, as text.
    """

    findings: tuple[ReplayFinding, ...] = ()
    ranks: tuple[int, ...] = (0,)
    compared: int = 0
    skipped: tuple[str, ...] = ()

    @property
    def reproducible(self) -> bool:
        """True if equal data gave equal results: on each rank twice, and, if not ``skipped``, on the next rank."""
        return all(finding.kind == "nonfinite" for finding in self.findings)

    @property
    def sentence(self) -> str:
        """The first finding in one sentence; without findings, a sentence that says so."""
        if self.findings:
            return self.findings[0].sentence
        runs = "two runs"
        if len(self.ranks) > 1 and not self.skipped:
            runs = "two runs on each rank and one on the next"
        return f"reproducible: {self.compared} outputs and gradients are the same in {runs}, bit for bit, and finite"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        data: dict[str, Any] = plain_values({**asdict(self), "sentence": self.sentence})
        return {"reproducible": self.reproducible, **data}

    def __str__(self) -> str:
        lines = [self.sentence]
        if self.findings:
            rows = [_row(finding) for finding in self.findings]
            lines += aligned([[*rows[0]], *([*row.values()] for row in rows)])
        return "\n".join([*lines, *(f"not compared: {text}" for text in self.skipped)])


class Replayed(NamedTuple):
    """A replay of a kept batch. ``trigger``: kind of the event that caused it. ``step``, ``microbatch``: of the batch;
    the microbatches of a step are counted from 0."""

    trigger: str
    step: int
    microbatch: int
    report: ReplayReport

    def fields(self) -> dict[str, Any]:
        """Return the fields of the replay in a line of events.jsonl, as JSON values."""
        place = {"trigger": self.trigger, "replayed_step": self.step, "microbatch": self.microbatch}
        who = {}
        if self.report.findings:
            first = self.report.findings[0]
            who = {"rank": first.ranks[0], "module": first.module, "what": first.what}
        return {**place, **who, "sentence": self.report.sentence, "replay": self.report.to_json()}


def _row(f: ReplayFinding) -> dict[str, str]:
    """Return a row of the table, by column."""
    located = f.index is not None
    return {
        "kind": f.kind,
        "ranks": ranks_text(f.ranks),
        "reference": "-" if f.reference_rank is None else str(f.reference_rank),
        "module": f.module or "(the model)",
        "what": f.what,
        "call": str(f.call + 1),
        "place": str(f.place),
        "index": ", ".join(map(str, f.index or ())),
        "value": word_for(f.value) if located else "",
        "expected": word_for(f.expected) if located else "",
        "ULP": "" if f.ulp is None else str(f.ulp),
    }


@dataclass(frozen=True)
class RankResult:
    """The observations of one rank. A place is an output or a gradient, given as (its index in the step, ``Place``).

    Attributes:
        rank: this rank, global.
        next: the rank whose batch this rank repeated.
        unsteady: the first place at which this rank's second run of its own batch gave another result.
        ops: names of operations just before the place of ``unsteady`` that torch knows as non-deterministic.
        differs: the first place at which this rank got another result from the batch of ``next`` than ``next`` did.
        here: the place with the index of ``differs`` in this rank's run of that batch; None if the run was shorter.
        difference: the first differing element at ``differs``. None if other modules ran, shapes differ, or the runs
            that were repeated to find it did not differ.
        note: more about the difference, as text.
        nonfinite: the first place in the run of this rank's own batch with a NaN or an infinity.
        spoilt: name of the first parameter of which this rank holds a value that is not finite; "" if none.
        compared: number of outputs and gradients that this rank compared.
    """

    rank: int
    next: int
    unsteady: tuple[int, Place] | None = None
    ops: tuple[str, ...] = ()
    differs: tuple[int, Place] | None = None
    here: Place | None = None
    difference: Difference | None = None
    note: str = ""
    nonfinite: tuple[int, Place] | None = None
    spoilt: str = ""
    compared: int = 0


def judge(everyone: Sequence[RankResult], skipped: Sequence[str] = ()) -> ReplayReport:
    """Return the report from the results of all ranks, in the order of the group. ``skipped``: see ``ReplayReport``.
    Local, and the same on all ranks."""
    unsteady = [_unsteady(result) for result in everyone if result.unsteady is not None]
    odd = {result.rank for result in everyone if result.unsteady is not None}
    from_data = [result for result in everyone if result.nonfinite is not None and _is_of_data(result, everyone)]
    findings = [*sorted(unsteady, key=_order), *sorted(_differing(everyone, odd), key=_order)]
    findings += _nonfinite(from_data, len(everyone))
    return ReplayReport(
        tuple(findings), tuple(sorted(result.rank for result in everyone)), everyone[0].compared, tuple(skipped)
    )


def _order(finding: ReplayFinding) -> tuple[int, tuple[int, ...]]:
    return finding.place, finding.ranks


def _unsteady(result: RankResult) -> ReplayFinding:
    """Return the finding about a rank whose two runs differ."""
    assert result.unsteady is not None
    index, place = result.unsteady
    detail = (
        "no op there is known to torch as non-deterministic; a module with state in Python, or another thread that "
        "draws random numbers, looks the same"
    )
    if result.ops:
        detail = f"torch.use_deterministic_algorithms(True) would forbid {', '.join(result.ops)}"
    return ReplayFinding(
        "not deterministic", (result.rank,), place.module, place.what, place.call, index, detail=detail
    )


def _is_of_data(result: RankResult, everyone: Sequence[RankResult]) -> bool:
    """True if the rank's first non-finite value occurred again in its second run, and on the rank that repeated its
    batch: if neither run differs before or at this place."""
    assert result.nonfinite is not None
    repeated = [result.unsteady, *(other.differs for other in everyone if other.next == result.rank)]
    return all(found is None or found[0] > result.nonfinite[0] for found in repeated)


def _nonfinite(results: Sequence[RankResult], ranks: int) -> list[ReplayFinding]:
    """Return one finding per place that is the first non-finite one of some ranks, the earliest place first.

    Args:
        results: those of ranks with a non-finite value that comes from their data.
        ranks: number of ranks that took part.
    """
    by_place: dict[tuple[int, Place], list[int]] = {}
    for one in results:
        assert one.nonfinite is not None
        index, place = one.nonfinite
        by_place.setdefault((index, place._replace(shape=())), []).append(one.rank)
    spoilt = next((one.spoilt for one in results if one.spoilt), "")
    found = []
    for (index, place), at in sorted(by_place.items(), key=lambda item: item[0][0]):
        # A non-finite parameter shows on all ranks at the same place. Non-finite data of a rank may show earlier.
        of_data = len(results) == ranks and index < max(one.nonfinite[0] for one in results if one.nonfinite)
        detail = _EVERYWHERE if len(at) == ranks > 1 else ""
        if spoilt and not of_data:
            detail = f"the parameter {spoilt} is not finite"
        found.append(ReplayFinding("nonfinite", tuple(at), place.module, place.what, place.call, index, detail=detail))
    return found


def _differing(everyone: Sequence[RankResult], odd: Set[int]) -> list[ReplayFinding]:
    """Return findings from the pairs of neighbours (a rank and its ``next``) that differ on one batch.

    A rank is blamed if it differs from both its neighbours, and one of them agrees with its neighbour on the other
    side. Pairs without a blamed rank give a finding without a reference.

    Args:
        odd: ranks that are not deterministic. Their pairs are left out, because such a rank differs from any other.
    """
    pairs = [result for result in everyone if result.differs is not None and not {result.rank, result.next} & odd]
    agreeing = {rank for result in everyone if result.differs is None for rank in (result.rank, result.next)} - odd
    both = {result.rank for result in pairs} & {result.next for result in pairs}
    found: dict[tuple[int, ...], ReplayFinding] = {}
    blamed: set[int] = set()
    for result in pairs:
        for rank, other in ((result.rank, result.next), (result.next, result.rank)):
            # A blamed rank is in two pairs. The finding is from the one in which it repeated its neighbour's batch.
            if rank in both and other in agreeing and (rank == result.rank or rank not in blamed):
                blamed.add(rank)
                found[(rank,)] = _difference(result, rank)
    for result in pairs:
        if not {result.rank, result.next} & blamed:
            finding = _difference(result, None)
            earlier = found.get(finding.ranks)
            if earlier is None or finding.place < earlier.place:
                found[finding.ranks] = finding
    return list(found.values())


def _difference(result: RankResult, blamed: int | None) -> ReplayFinding:
    """Return the finding of a pair that differs. ``blamed``: the rank of it that is wrong; None: not known."""
    assert result.differs is not None
    index, place = result.differs
    reference = None if blamed is None else result.next if blamed == result.rank else result.rank
    both = tuple(sorted((result.rank, result.next))) if blamed is None else (blamed,)
    finding = ReplayFinding("ranks differ", both, place.module, place.what, place.call, index, reference)
    finding = replace(finding, detail=result.note)
    if result.difference is None:
        return finding
    values = result.difference.value, result.difference.expected
    value, expected = values if both[0] == result.rank else values[::-1]
    at = unravel(result.difference.place, place.shape)
    return replace(finding, index=at, value=value, expected=expected, ulp=result.difference.ulp)
