"""Coverage: which of a model's matmul weights are in FP8, and why the others are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from fp8dist.common.text import aligned, first_few
from fp8dist.errors import ConfigurationError
from fp8dist.job.eligibility import Candidate, LeftOut, ModelFacts, Selection, why_not
from fp8dist.modules.fp8_module import FP8Module
from fp8dist.modules.job_state import JobState
from fp8dist.parallel.wrappers import is_sharded
from fp8dist.state.groups import is_dtensor
from fp8dist_kernels import GEMMS, Gemm

_LISTED = 20
"""Number of modules that the error of strict=True names."""

_GROUPS = 6
"""Number of kinds of modules that the summary names."""

_SAME_NAME = LeftOut(
    "same name", 'another module has its name, because wrappers call a part "module", too: rename yours'
)

_LATER = "not prepared"
_LATER_REASON = "it came after prepare(): call fp8dist.restore(model), then prepare() again"


@dataclass(frozen=True)
class CoverageRow:
    """The matmul weights of one module.

    Attributes:
        fqn: the module's name without wrapper prefixes. "" is the model itself.
        kind: the name of the module's class.
        parameters: number of elements in its matmul weights.
        flops: its share, 0 to 1, of the model's matmul FLOPs per token.
        fp8: True if at least one GEMM of the module is in FP8.
        reason: why the module is not in FP8, or which of its GEMMs are not. "" if all are.
        tied_to: the embedding or earlier Linear with the same weight. "" if there is none.
        experts: number of experts, of which a token visits some. 0 if the module has not the attributes of
            Transformers' experts interface.
    """

    fqn: str
    kind: str
    parameters: int
    flops: float
    fp8: bool
    reason: str = ""
    tied_to: str = ""
    experts: int = 0

    def __str__(self) -> str:
        notes = [text for text in (self.reason, self.tied_to and f"tied to {self.tied_to}") if text]
        return f"{'FP8' if self.fp8 else 'high'}{': ' if notes else ''}{'; '.join(notes)}"


@dataclass(frozen=True)
class Coverage:
    """The matmul weights of a model: a row for each module that has some. Iterates over its rows, prints as a table.

    Counted are the weights of ``nn.Linear`` and its subclasses, ``nn.Bilinear``, the input projections of
    ``nn.MultiheadAttention``, transformers' ``Conv1D``, other classes with "Linear" in their name, Megatron-Core's
    ``GroupedMLP``, and parameters of three or more dims (fused experts), except in convolutions, norms and embeddings.
    Convolutions, embeddings and RNNs are not counted.

    Each weight counts 2 x parameters FLOPs per token, so shares of FLOPs are shares of parameters. A weight that
    several modules use counts once for each. All experts count, because the number that a token visits is not known.
    """

    rows: tuple[CoverageRow, ...]

    def __iter__(self) -> Iterator[CoverageRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def parameters(self) -> int:
        """Number of matmul parameters."""
        return sum(row.parameters for row in self.rows)

    @property
    def fp8_parameters(self) -> int:
        """Number of matmul parameters in modules that compute in FP8."""
        return sum(row.parameters for row in self.rows if row.fp8)

    @property
    def share(self) -> float:
        """Share, 0 to 1, of matmul parameters in FP8. 0 if the model has none."""
        return self.fp8_parameters / max(self.parameters, 1)

    def __str__(self) -> str:
        header = ("module", "kind", "parameters", "FLOPs", "computes in")
        lines = [header] + [
            (row.fqn or "(model)", row.kind, f"{row.parameters:,}", f"{100 * row.flops:.1f} %", str(row))
            for row in self.rows
        ]
        return "\n".join([*aligned(lines, right=(2, 3)), f"FP8: {self.summary}"])

    @property
    def summary(self) -> str:
        """A phrase such as "98.2 % of matmul weights"."""
        return f"{100 * self.share:.1f} % of matmul weights" if self.rows else "no matmul weights"


def _with_precisions(row: CoverageRow, high: Sequence[Sequence[Gemm]]) -> CoverageRow:
    """Return the row of a converted module. ``high``: its GEMMs in high precision, or those of each of its experts."""
    whole, partly = sum(set(gemms) == set(GEMMS) for gemms in high), sum(bool(gemms) for gemms in high)
    if not partly:
        return row
    if len(high) > 1:
        reason = f"{whole or partly} of {len(high)} products of experts are {'' if whole else 'partly '}high"
    elif whole:
        reason = "set_precision, a fallback or its recipe says so"
    else:
        reason = f"{', '.join(high[0])} high"
    return dataclasses.replace(row, fp8=whole < len(high), reason=reason)


class _Found(NamedTuple):
    """A module with matmul weights: what its row of the table is made from.

    ``left_out``: why it stays in high precision; None: it is converted. ``high``: if it is converted already, its GEMMs
    in high precision now, or those of each of its experts.
    """

    of: Candidate
    kind: str
    parameters: int
    tied_to: str
    left_out: LeftOut | None
    high: Sequence[Sequence[Gemm]] = ()


class Survey:
    """All matmul weights of a model, and which of them are converted. Changes nothing.

    ``has_fast_path``: ``prepare`` has found an nn.TransformerEncoderLayer, which may compute without its Linears.
    """

    def __init__(self, found: Sequence[_Found], has_fast_path: bool = False) -> None:
        self._found = found
        self.has_fast_path = has_fast_path

    @property
    def chosen(self) -> dict[str, nn.Module]:
        """The Linears to convert, by fqn."""
        return {of.fqn: of.module for of in self._converted if of.products is None}

    @property
    def experts(self) -> dict[str, nn.Module]:
        """The experts of mixtures to convert, by fqn."""
        return {of.fqn: of.module for of in self._converted if of.products is not None}

    @property
    def _converted(self) -> list[Candidate]:
        return [one.of for one in self._found if one.left_out is None]

    @property
    def fqns(self) -> list[str]:
        """All modules with matmul weights. Patterns are matched with these names."""
        return [one.of.fqn for one in self._found]

    @property
    def left_out(self) -> list[tuple[str, LeftOut]]:
        """(fqn, why) of the modules that are not converted."""
        return [(one.of.fqn, one.left_out) for one in self._found if one.left_out is not None]

    @property
    def unprepared(self) -> list[str]:
        """The modules that ``prepare`` would convert now, and has not seen."""
        return [fqn for fqn, why in self.left_out if why.label == _LATER]

    @property
    def high(self) -> list[Sequence[Sequence[Gemm]]]:
        """For each row of the table, the GEMMs in high precision of the module, or of each of its experts."""
        return [one.high for one in self._found]

    def coverage(self, enabled: bool) -> Coverage:
        """Return the table. ``enabled=False``: FP8 is switched off for the whole model."""
        total = max(sum(one.parameters for one in self._found), 1)
        off = "" if enabled else "FP8 is switched off (enabled=False, or FP8DIST_ENABLED=0)"
        rows = []
        for one in self._found:
            fp8, reason = one.left_out is None and enabled, off if one.left_out is None else one.left_out.reason
            sizes = one.parameters, one.parameters / total
            row = CoverageRow(one.of.fqn, one.kind, *sizes, fp8, reason, one.tied_to, one.of.experts)
            rows.append(_with_precisions(row, one.high) if fp8 else row)
        return Coverage(tuple(rows))

    def summary(self) -> str:
        """Return what is left out, largest first, such as "4 MixtralExperts (3-D parameters), lm_head (skip)"."""
        groups: dict[tuple[str, str], list[_Found]] = {}
        for one in self._found:
            if one.left_out is not None:
                groups.setdefault((one.of.kind, one.left_out.label), []).append(one)
        ordered = sorted(groups.items(), key=lambda item: -sum(one.parameters for one in item[1]))
        parts = [
            f"{f'{len(same)} {kind}' if len(same) > 1 else same[0].of.fqn or 'the model'} ({label})"
            for (kind, label), same in ordered[:_GROUPS]
        ]
        rest = sum(len(same) for _, same in ordered[_GROUPS:])
        return ", ".join(parts) + (f" and {rest} more" if rest else "")

    def require_named(self) -> None:
        """Raise ConfigurationError if a module is left out that no pattern and no filter_fn names."""
        unnamed = [f"{fqn or 'the model'} ({why.reason})" for fqn, why in self.left_out if why.named is None]
        if unnamed:
            raise ConfigurationError(
                f"strict=True: {len(unnamed)} module(s) would stay in high precision, and no pattern names them: "
                f"{first_few(unnamed, _LISTED)}. Name them in skip= or overrides=, or make them eligible"
            )


def survey(model: nn.Module, selection: Selection) -> Survey:
    """Find all matmul weights of a model, and decide which go to FP8. Reads only shapes, so it works on the meta
    device.

    Raises:
        ConfigurationError: a Linear to convert is already prepared, or sharded by FSDP.
    """
    facts, found, names = ModelFacts(model, selection), [], set[str]()
    for of in facts:
        parameters = of.parameters
        if parameters is None:
            continue
        if isinstance(of.module, FP8Module):
            raise ConfigurationError(f"{of.fqn or 'the model'} is prepared already: call fp8dist.restore(model) first")
        left_out = why_not(of)
        if left_out is None:
            _require_unsharded(of)
            left_out = _SAME_NAME if of.fqn in names else None
            names.add(of.fqn)
        found.append(_Found(of, of.kind, parameters, facts.owner(of.module, of.fqn), left_out))
    return Survey(found, facts.has_fast_path)


def survey_again(model: nn.Module, selection: Selection, before: Coverage, job: JobState) -> Survey:
    """Find all matmul weights of a prepared model, as it is now. Nothing that came after ``prepare`` is converted.

    Args:
        before: what ``prepare`` found. Sharding may hide shapes and reasons, so those of modules that are still there
            are taken from it.
        job: of the model's manager.
    """
    known, found = {row.fqn: row for row in before}, []
    for of in ModelFacts(model, selection):
        converted = of.module.fp8_weights if isinstance(of.module, FP8Module) else ()
        one = _found_again(of, known.get(of.fqn), bool(converted))
        if one is not None:
            if any(slots.job is not job for slots in converted):
                copy = LeftOut("copy", "it is a copy of a converted module: no step updates its FP8 state")
                one = one._replace(left_out=copy)
            high = [precision.high for slots in converted for precision in slots.precisions]
            found.append(one._replace(high=high))
    return Survey(found)


def _found_again(of: Candidate, row: CoverageRow | None, converted: bool) -> _Found | None:
    """Return a module with matmul weights as it is now; None: it has none. ``row``: its row after ``prepare``."""
    kind = (of.module.converted_from if isinstance(of.module, FP8Module) else type(of.module)).__name__
    parameters, tied_to = of.parameters, of.model.owner(of.module, of.fqn)
    if row is not None and (converted or not row.fp8) and _is_still(of.module, row, kind, parameters):
        left_out = None if converted else LeftOut("", row.reason)
        hidden = of.module._parameters.get("weight") is None  # As in FSDP1's flat parameters.
        return _Found(of, row.kind, row.parameters, row.tied_to if hidden else tied_to, left_out)
    if parameters is None:
        return None
    left_out = None if converted else why_not(of) or LeftOut(_LATER, _LATER_REASON)
    return _Found(of, kind, parameters, tied_to, left_out)


def _is_still(module: nn.Module, row: CoverageRow, kind: str, parameters: int | None) -> bool:
    """True if a module is, by class and size, the one that had this row. ``fully_shard`` derives a class."""
    same = row.kind == kind or row.kind in (base.__name__ for base in type(module).__mro__)
    return same and (not isinstance(module, nn.Linear) or parameters == row.parameters)


def _require_unsharded(of: Candidate) -> None:
    """Raise ConfigurationError if a module to convert is sharded."""
    if is_sharded(of.module) or (of.products is not None and any(map(is_dtensor, of.weights.values()))):
        raise ConfigurationError(
            f"{of.fqn or 'the model'} is managed by FSDP or ZeRO already: call prepare(model) first, then wrap or "
            "shard it. Name modules that stay in high precision in skip="
        )
