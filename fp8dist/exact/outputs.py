"""Where the forward of a job leaves the reference: compare the outputs of its modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

from torch import Tensor

from fp8dist.exact.field import P
from fp8dist.exact.placement import difference_text, keys
from fp8dist.exact.solver import factor_text, solve
from fp8dist.exact.verdict import ExactFinding

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
        is_part = _test_of(calls)
        wrong = {rank: found for rank, outputs in holders.items() if (found := _wrong(outputs, is_part)) is not None}
        if not wrong:
            before = None if holders else before
            continue
        together = _summed(is_part, {rank: holders[rank] for rank in wrong})
        if together:
            before = module, " + ".join(f"1 x rank {rank}" for rank in together)
            continue
        rank, output = next((rank, output.long()) for rank, output in wrong.items())
        alike = [call for call in calls if output.dim() and call.shape == output.shape]
        text = _difference(output, alike)
        if text is not None:
            return ExactFinding("output", (module,), f"{module}: the output on rank {rank} is {text}")
        if before is not None:
            text = f"{before[0]}: its output in the reference is {before[1]}, and {module} after it is wrong"
            return ExactFinding("output", (before[0], module), f"{text}: their sum is missing, or wrong")
        nearest = min(alike, key=lambda call: int((call != output).sum()), default=None)
        where = "" if nearest is None else f" ({difference_text(output, nearest)})"
        text = f"{module}: the first wrong output, on rank {rank}{where}. All outputs before it are the reference's"
        return ExactFinding("output", (module,), text)
    return None


def _wrong(outputs: Sequence[Tensor], is_part: Callable[[Tensor], bool]) -> Tensor | None:
    """Return the last output that is no part of the reference's; None if all are. A pipeline runs a stage once before
    its step, to learn shapes: that the first output alone is wrong is no fault."""
    wrong = [place for place, output in enumerate(outputs) if not is_part(output)]
    return outputs[wrong[-1]] if wrong and (wrong != [0] or len(outputs) == 1) else None


def _difference(output: Tensor, calls: Sequence[Tensor]) -> str | None:
    for call in calls:
        factor, difference = solve([call], output), (output - call) % P
        if factor is not None:
            return factor_text(factor[0])
        if call.dim() > 1 and bool((difference == difference.flatten(0, -2)[0]).all()):
            return "the reference's plus the same vector in each row, as of a bias"
    return None


def _test_of(calls: Sequence[Tensor]) -> Callable[[Tensor], bool]:
    """Return a function that is True for parts of a module's outputs in the reference: rows of any calls, with all
    columns or a chunk of them; or any columns of one call, as a rank has of a fused q, k and v."""
    whole = max((call.shape[-1] for call in calls if call.dim()), default=0)

    @functools.cache
    def rows(start: int, width: int) -> set[bytes]:
        chunks = [call[..., start : start + width].reshape(-1, width) for call in calls if call.dim()]
        return {key for chunk in chunks for key in keys(chunk, 0)}

    def is_part(output: Tensor) -> bool:
        if not output.dim():
            return any(bool((call == output).all()) for call in calls if not call.dim())
        width = output.shape[-1]
        if not width or whole % width:
            return False
        mine, columns = set(keys(output.reshape(-1, width), 0)), set(keys(output, -1))
        alike = [call for call in calls if call.dim() and call.numel() // whole == output.numel() // width]
        chunks = range(0, whole, width)
        return any(mine <= rows(start, width) for start in chunks) or any(columns <= {*keys(c, -1)} for c in alike)

    return is_part


def _summed(is_part: Callable[[Tensor], bool], holders: Mapping[int, Sequence[Tensor]]) -> tuple[int, ...] | None:
    """Return the first ranks whose outputs add up to the reference's, if each of ``holders`` is among such ranks."""
    found = []
    left = list(holders)[:_MOST_RANKS]
    for count in range(2, len(left) + 1):
        for ranks in combinations(left, count):
            outputs = [holders[rank] for rank in ranks]
            alike = len({tuple(each.shape for each in calls) for calls in outputs}) == 1
            if alike and all(is_part(sum(each.long() for each in call) % P) for call in zip(*outputs)):
                found.append(ranks)
    covered = {rank for ranks in found for rank in ranks}
    return found[0] if covered == set(holders) else None
