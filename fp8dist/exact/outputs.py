"""Where the forward of a job leaves the reference: compare the outputs of its modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from torch import Tensor

from fp8dist.exact.field import P
from fp8dist.exact.relations import Factor
from fp8dist.exact.solver import solve
from fp8dist.exact.verdict import ExactFinding

__all__ = ["judge_outputs"]

_MOST_RANKS = 8
"""Ranks whose outputs are added in search of a whole output: all subsets of them are tried."""


def judge_outputs(
    reference: Mapping[str, Sequence[Tensor]], ranks: Sequence[Mapping[str, Sequence[Tensor]]]
) -> ExactFinding | None:
    """Return the first module whose output is not the reference's, and why; None if there is none. Local.

    A rank may hold a part of an output: some rows (vectors along the last dim) of any call, or a chunk of their
    columns, or a summand, which with those of other ranks makes the reference's.

    Args:
        reference: for each module, in the order in which they end, the output of each call: canonical residues.
        ranks: the same of each rank, int32.
    """
    before: tuple[str, str] | None = None  # The last module whose output is a summand, and the sum.
    for module, calls in reference.items():
        holders = {rank: each[module] for rank, each in enumerate(ranks) if each.get(module)}
        rows = _Rows(calls)
        wrong = {rank: found for rank, outputs in holders.items() if (found := _wrong(outputs, rows)) is not None}
        if not wrong:
            before = None if holders else before
            continue
        together = _summed(rows, {rank: holders[rank] for rank in wrong})
        if together:
            before = module, " + ".join(f"1 x rank {rank}" for rank in together)
            continue
        rank, output = next(iter(wrong.items()))
        text = _difference(output.long(), calls)
        if text is not None:
            return ExactFinding("output", (module,), f"{module}: the output on rank {rank} is {text}")
        if before is not None:
            text = f"{before[0]}: its output in the reference is {before[1]}, and {module} after it is wrong"
            return ExactFinding("output", (before[0], module), f"{text}: their sum is missing, or wrong")
        text = f"{module}: the first wrong output, on rank {rank}. All outputs before it are the reference's"
        return ExactFinding("output", (module,), text)
    return None


def _wrong(outputs: Sequence[Tensor], rows: _Rows) -> Tensor | None:
    """Return the last output that is no part of the reference's; None if all are. A pipeline runs a stage once before
    its step, to learn shapes: that the first output alone is wrong is no fault."""
    wrong = [place for place, output in enumerate(outputs) if output not in rows]
    return outputs[wrong[-1]] if wrong and (wrong != [0] or len(outputs) == 1) else None


def _difference(output: Tensor, calls: Sequence[Tensor]) -> str | None:
    for call in calls:
        if call.shape == output.shape:
            factor, difference = solve([call], output), (output - call) % P
            if factor is not None:
                return str(Factor(factor[0]))
            if call.dim() > 1 and bool((difference == difference.flatten(0, -2)[0]).all()):
                return "the reference's plus the same vector in each row, as of a bias"
    return None


class _Rows:
    """The rows of a module's outputs in the reference, to look parts up."""

    def __init__(self, calls: Sequence[Tensor]) -> None:
        self._calls = calls
        self._known: dict[tuple[int, int], set[bytes]] = {}

    def __contains__(self, output: Tensor) -> bool:
        if not output.dim():
            return any(bool((call == output).all()) for call in self._calls if not call.dim())
        width = output.shape[-1]
        whole = max((call.shape[-1] for call in self._calls if call.dim()), default=0)
        if not width or whole % width:
            return False
        mine = _rows(output)
        if any(mine <= self._chunk(start, width) for start in range(0, whole, width)):
            return True
        columns = _rows(_columns(output))  # Of a fused q, k and v, a rank has columns from several places.
        alike = [call for call in self._calls if call.dim() and call.numel() // whole == output.numel() // width]
        return any(columns <= _rows(_columns(call)) for call in alike)

    def _chunk(self, start: int, width: int) -> set[bytes]:
        if (start, width) not in self._known:
            chunks = [call[..., start : start + width] for call in self._calls if call.dim()]
            self._known[start, width] = set().union(*map(_rows, chunks))
        return self._known[start, width]


def _rows(tensor: Tensor) -> set[bytes]:
    return {row.tobytes() for row in tensor.int().reshape(-1, tensor.shape[-1]).numpy()}


def _columns(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1]).T


def _summed(rows: _Rows, holders: Mapping[int, Sequence[Tensor]]) -> tuple[int, ...] | None:
    """Return the first ranks whose outputs add up to the reference's, if each of ``holders`` is among such ranks."""
    found = []
    left = list(holders)[:_MOST_RANKS]
    for count in range(2, len(left) + 1):
        for ranks in combinations(left, count):
            outputs = [holders[rank] for rank in ranks]
            alike = len({tuple(each.shape for each in calls) for calls in outputs}) == 1
            if alike and all(sum(each.long() for each in call) % P in rows for call in zip(*outputs)):
                found.append(ranks)
    covered = {rank for ranks in found for rank in ranks}
    return found[0] if covered == set(holders) else None
