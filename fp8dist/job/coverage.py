"""Coverage: which of a model's matmul weights are in FP8, and why the others are not."""

from __future__ import annotations

import collections
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from fp8dist.common.patterns import Skip
from fp8dist.common.text import aligned, first_few
from fp8dist.errors import ConfigurationError
from fp8dist.modules.foreign import expert_products, gate_fits, is_parallel, linear_base
from fp8dist.modules.fp8_experts import FP8Experts
from fp8dist.modules.fp8_linear import FP8Linear
from fp8dist.modules.job_state import JobState
from fp8dist.modules.linear_slots import LinearSlots
from fp8dist.modules.overrides import Overrides
from fp8dist.parallel.wrappers import is_sharded
from fp8dist.state.groups import has_base, is_dtensor, local_part
from fp8dist.state.recipe import GEMMS, Gemm
from fp8dist.state.slots import clean_fqn
from fp8dist_kernels.reference.matmuls import ALIGNMENT

__all__ = ["Coverage", "CoverageRow", "Selection", "Survey", "survey", "survey_again"]

Filter = Callable[[nn.Module, str], bool]

_LISTED = 20
"""Number of modules that the error of strict=True names."""

_GROUPS = 6
"""Number of kinds of modules that the summary names."""

_LATER = "not prepared"
_LATER_REASON = "it came after prepare(): call fp8dist.restore(model), then prepare() again"

_IN_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_BITSANDBYTES = ("Linear8bitLt", "Linear4bit")


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
        said = [text for text in (self.reason, self.tied_to and f"tied to {self.tied_to}") if text]
        return f"{'FP8' if self.fp8 else 'high'}{': ' if said else ''}{'; '.join(said)}"


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


class LeftOut(NamedTuple):
    """Why a module stays in high precision.

    ``label``: one or two words for the summary. ``reason``: a phrase for the table. ``named``: "caller" if a pattern or
    filter_fn of the caller names the module, "default" if a default pattern does, else None.
    """

    label: str
    reason: str
    named: Literal["caller", "default"] | None = None


@dataclass(frozen=True)
class Selection:
    """What the caller of ``prepare`` has selected. Copies have no ``filter_fn``: pickle refuses local functions."""

    overrides: Overrides
    skip: Skip
    filter_fn: Filter | None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "filter_fn": None}

    def decides(self, fqn: str) -> bool:
        """True if a pattern says whether a module is converted."""
        return self.overrides.pattern_of(fqn) is not None or self.skip.decides(fqn)


class _Found(NamedTuple):
    """A module with matmul weights. ``high``: if it is converted already, its GEMMs in high precision, or those of each
    of its experts."""

    fqn: str
    module: nn.Module
    kind: str
    parameters: int
    tied_to: str
    left_out: LeftOut | None
    high: Sequence[Sequence[Gemm]] = ()


class Survey:
    """All matmul weights of a model, and which of them are converted. Changes nothing."""

    def __init__(self, found: Sequence[_Found]) -> None:
        self._found = found

    @property
    def chosen(self) -> dict[str, nn.Module]:
        """The Linears to convert, by fqn."""
        return {fqn: module for fqn, module in self._converted.items() if expert_products(module) is None}

    @property
    def experts(self) -> dict[str, nn.Module]:
        """The experts of mixtures to convert, by fqn."""
        return {fqn: module for fqn, module in self._converted.items() if expert_products(module) is not None}

    @property
    def _converted(self) -> dict[str, nn.Module]:
        return {one.fqn: one.module for one in self._found if one.left_out is None}

    @property
    def fqns(self) -> list[str]:
        """All modules with matmul weights. Patterns are matched with these names."""
        return [one.fqn for one in self._found]

    @property
    def left_out(self) -> list[tuple[str, LeftOut]]:
        """(fqn, why) of the modules that are not converted."""
        return [(one.fqn, one.left_out) for one in self._found if one.left_out is not None]

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
            share, experts = one.parameters / total, _experts_of(one.module)
            row = CoverageRow(one.fqn, one.kind, one.parameters, share, fp8, reason, one.tied_to, experts)
            rows.append(_with_precisions(row, one.high) if fp8 else row)
        return Coverage(tuple(rows))

    def summary(self) -> str:
        """Return what is left out, largest first, such as "4 MixtralExperts (3-D parameters), lm_head (skip)"."""
        groups: dict[tuple[str, str], list[_Found]] = {}
        for one in self._found:
            if one.left_out is not None:
                groups.setdefault((type(one.module).__name__, one.left_out.label), []).append(one)
        ordered = sorted(groups.items(), key=lambda item: -sum(one.parameters for one in item[1]))
        said = [
            f"{f'{len(same)} {kind}' if len(same) > 1 else same[0].fqn or 'the model'} ({label})"
            for (kind, label), same in ordered[:_GROUPS]
        ]
        rest = sum(len(same) for _, same in ordered[_GROUPS:])
        return ", ".join(said) + (f" and {rest} more" if rest else "")

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
        ConfigurationError: a Linear to convert is already prepared, or sharded by FSDP; or filter_fn does not take
            (module, fqn).
    """
    _require_filter(selection.filter_fn)
    judge, found = _Judge(model, selection), []
    for raw, module in model.named_modules():
        parameters = _matmul_parameters(module)
        if parameters is None:
            continue
        fqn = clean_fqn(raw)
        if isinstance(module, (FP8Linear, FP8Experts)):
            raise ConfigurationError(f"{fqn or 'the model'} is prepared already: call fp8dist.restore(model) first")
        left_out = judge.why_not(module, fqn)
        if left_out is None:
            _require_unsharded(module, fqn)
        found.append(_Found(fqn, module, type(module).__name__, parameters, judge.owner(module, fqn), left_out))
    return Survey(found)


def survey_again(model: nn.Module, selection: Selection, before: Coverage, job: JobState) -> Survey:
    """Find all matmul weights of a prepared model, as it is now. Nothing that came after ``prepare`` is converted.

    Args:
        before: what ``prepare`` found. Sharding may hide shapes and reasons, so those of modules that are still there
            are taken from it.
        job: of the model's manager.
    """
    known, judge, found = {row.fqn: row for row in before}, _Judge(model, selection), []
    for raw, module in model.named_modules():
        fqn = clean_fqn(raw)
        row = known.get(fqn)
        converted = _slots_of(module)
        kind = (module.converted_from if isinstance(module, (FP8Linear, FP8Experts)) else type(module)).__name__
        parameters = _matmul_parameters(module)
        left_out = None
        if row is not None and (bool(converted) or not row.fp8) and _is_still(module, row, kind, parameters):
            kind, parameters, tied_to = row.kind, row.parameters, row.tied_to
            left_out = None if converted else LeftOut("", row.reason)
        elif parameters is None:
            continue
        else:
            tied_to = judge.owner(module, fqn)
            left_out = None if converted else judge.why_not(module, fqn) or LeftOut(_LATER, _LATER_REASON)
        if any(slots.job is not job for slots in converted):
            left_out = LeftOut("copy", "it is a copy of a converted module: no step updates its FP8 state")
        high = [precision.high for slots in converted for precision in slots.precisions]
        found.append(_Found(fqn, module, kind, parameters, tied_to, left_out, high))
    return Survey(found)


def _slots_of(module: nn.Module) -> tuple[LinearSlots, ...]:
    """Return the slots of a converted module; () for other modules."""
    if isinstance(module, FP8Linear):
        return (module.fp8_slots,)
    return tuple(module.fp8_products.values()) if isinstance(module, FP8Experts) else ()


def _is_still(module: nn.Module, row: CoverageRow, kind: str, parameters: int | None) -> bool:
    """True if a module is, by class and size, the one that had this row. ``fully_shard`` derives a class."""
    same = row.kind == kind or row.kind in (base.__name__ for base in type(module).__mro__)
    return same and (not isinstance(module, nn.Linear) or parameters == row.parameters)


class _Judge:
    """Decides which modules of a model are left out."""

    def __init__(self, model: nn.Module, selection: Selection) -> None:
        self._selection = selection
        self._heads = _heads(model)
        self._owners: dict[int, str] = {}  # First module with a weight, by the weight's id.
        self._inner = set()  # Linears that nn.MultiheadAttention uses without calling them.
        for raw, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                self._owners.setdefault(id(module.weight), clean_fqn(raw))
            elif isinstance(module, nn.MultiheadAttention):
                self._inner.add(id(module.out_proj))
        each = (parameter for module in model.modules() for parameter in module._parameters.values())
        self._uses = collections.Counter(id(parameter) for parameter in each)

    def owner(self, module: nn.Module, fqn: str) -> str:
        """Return the embedding or earlier module with the same weight, or ""."""
        weight = module._parameters.get("weight")
        first = fqn if weight is None else self._owners.setdefault(id(weight), fqn)
        return first if first != fqn else ""

    def why_not(self, module: nn.Module, fqn: str) -> LeftOut | None:
        """Return why a module stays in high precision, or None. Calls ``filter_fn`` for eligible modules."""
        chosen = self._selection
        left_out = _named(fqn, chosen.overrides, chosen.skip)
        if left_out is None:
            left_out = _why_not(module, fqn, id(module) in self._inner, chosen.filter_fn)
        names = expert_products(module) or () if left_out is None else ()
        if any(self._uses[id(module._parameters[name])] > 1 for name in names):
            left_out = LeftOut("shared weight", "another module uses its weights, too")
        if left_out is None and id(module) in self._heads and not chosen.decides(fqn):
            reason = f"{self._heads[id(module)]}, so it is taken for the output head: skip='!{fqn}' puts it into FP8"
            left_out = LeftOut("output head", reason, "default")
        return left_out


def _heads(model: nn.Module) -> dict[int, str]:
    """Return the nn.Linears that share the weight of an nn.Embedding, by id, each with the reason; of others the
    model's last one, if it gives a number for each row of an nn.Embedding.

    Equal sizes may be chance: an MLP or a projection may be as wide as there are positions, classes or bytes. So by its
    sizes only the last Linear is a head, if it is not square, and no other has its shape or takes as many inputs as it
    gives outputs. Heads may be missed so that no other Linear is taken for one.
    """
    embeddings = [(clean_fqn(raw), of) for raw, of in model.named_modules() if isinstance(of, nn.Embedding)]
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not embeddings or not linears:
        return {}
    tied = {id(of.weight): fqn for fqn, of in embeddings}
    sized = {(of.num_embeddings, of.embedding_dim): fqn for fqn, of in reversed(embeddings)}
    owners = ((linear, tied.get(id(linear._parameters.get("weight")))) for linear in linears)
    heads = {id(linear): f"it shares the weight of {owner}" for linear, owner in owners if owner is not None}
    *others, last = linears
    shape = last.out_features, last.in_features
    chance = any(shape[0] == other.in_features or shape == (other.out_features, other.in_features) for other in others)
    if shape in sized and shape[0] != shape[1] and not chance:
        heads.setdefault(id(last), f"it has an output for each row of {sized[shape]}")
    return heads


def _require_unsharded(module: nn.Module, fqn: str) -> None:
    """Raise ConfigurationError if a module to convert is sharded."""
    weights = (module._parameters[name] for name in expert_products(module) or ())
    if is_sharded(module) or any(is_dtensor(weight) for weight in weights if weight is not None):
        raise ConfigurationError(
            f"{fqn or 'the model'} is managed by FSDP or ZeRO already: call prepare(model) first, then wrap or shard "
            "it. Name modules that stay in high precision in skip="
        )


def _require_filter(filter_fn: object) -> None:
    if filter_fn is None:
        return
    if not callable(filter_fn):
        raise ConfigurationError(f"filter_fn must be a function of (module, fqn), got {filter_fn!r}")
    try:
        signature = inspect.signature(filter_fn)
    except (TypeError, ValueError):  # Some built-in functions have no signature.
        return
    try:
        signature.bind(None, "")
    except TypeError as error:
        raise ConfigurationError(
            f"filter_fn is called as filter_fn(module, fqn), got one that takes {signature}: {error}"
        ) from None


def _named(fqn: str, overrides: Overrides, skip: Skip) -> LeftOut | None:
    """Return why a pattern keeps this module in high precision, or None."""
    pattern = overrides.pattern_of(fqn)
    if pattern is not None:
        recipe = overrides.given[pattern]
        return LeftOut("overrides", f"overrides say so ({pattern!r})", "caller") if recipe == "high" else None
    pattern = skip.pattern_of(fqn)
    if pattern is None:
        return None
    if pattern in skip.given:
        return LeftOut("skip", f"it matches skip {pattern!r}", "caller")
    return LeftOut("skip", f"it matches skip {pattern!r}, a default", "default")


# Matmul weights ------------------------------------------------------------------------------------


def _matmul_parameters(module: nn.Module) -> int | None:
    """Return the number of matmul parameters of the module itself, or None if it is not a matmul."""
    if isinstance(module, nn.Linear):
        return module.in_features * module.out_features  # A quantised weight has another shape.
    own = {name: p for name, p in module._parameters.items() if p is not None and not is_lazy(p)}
    if isinstance(module, nn.MultiheadAttention):
        own = {name: own[name] for name in _IN_PROJECTIONS if name in own}
    elif _named_linear(module) or linear_base(type(module)) is not None:
        own = {name: p for name, p in own.items() if name.startswith("weight") and p.ndim > 1}
    elif products := expert_products(module):
        own = {name: own[name] for name in products if name in own}
    elif not isinstance(module, nn.Bilinear):
        own = _expert_parameters(module)
    return sum(p.numel() for name, p in own.items() if name != "bias") if own else None


def _experts_of(module: nn.Module) -> int:
    """Return the number of experts of a mixture; 0 for other modules."""
    products = expert_products(module)
    weight = None if products is None else module._parameters[products[0]]
    return 0 if weight is None else len(weight)


def _named_linear(module: nn.Module) -> bool:
    name = type(module).__name__
    return "Linear" in name or name in ("Conv1D", "GroupedMLP")


def _expert_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters of shape [experts, …, a, b], by name. A first dim of 1 is taken for a batch dim (position
    embeddings), a last dim of 1 for a scale."""
    name = type(module).__name__.lower()
    if isinstance(module, ParametrizationList) or any(word in name for word in ("conv", "norm", "embed")):
        return {}
    if isinstance(module, (nn.modules.conv._ConvNd, nn.RNNBase)):
        return {}
    own = {key: p for key, p in module._parameters.items() if p is not None and not is_lazy(p) and p.ndim >= 3}
    return {key: p for key, p in own.items() if min(p.shape[0], p.shape[-2], p.shape[-1]) > 1}


# Reasons -------------------------------------------------------------------------------------------


def _why_not(module: nn.Module, fqn: str, inner: bool, filter_fn: Filter | None) -> LeftOut | None:
    base = linear_base(type(module))
    if base is None and expert_products(module) is not None:
        return _odd_experts(module, fqn, filter_fn)
    reason = _not_linear(module) if base is None else _odd_linear(module, base, inner)
    if reason is not None:
        return reason
    linear = isinstance(module, nn.Linear)
    features: Any = (module.in_features, module.out_features) if linear else module.weight.shape
    if any(size % ALIGNMENT for size in features):
        shape = " x ".join(map(str, features))
        return LeftOut(f"dims not multiples of {ALIGNMENT}", f"{shape} are not multiples of {ALIGNMENT}")
    if filter_fn is not None and not filter_fn(module, fqn):
        return LeftOut("filter_fn", "filter_fn said no", "caller")
    return None


def _odd_experts(module: nn.Module, fqn: str, filter_fn: Filter | None) -> LeftOut | None:
    """Return why the experts of a mixture cannot be converted, or None."""
    weights = {name: module._parameters[name] for name in expert_products(module) or ()}
    for name, weight in weights.items():
        assert weight is not None
        subclass = _tensor_subclass(weight)
        if subclass is not None or not weight.is_floating_point() or weight.element_size() < 2:
            kind = subclass or str(weight.dtype).removeprefix("torch.")
            return LeftOut("quantised weight", f"its {name} is {kind}")
        if any(size % ALIGNMENT for size in weight.shape[1:]):
            shape = " x ".join(map(str, weight.shape))
            return LeftOut(
                f"dims not multiples of {ALIGNMENT}", f"{name}: dims of {shape} are not multiples of {ALIGNMENT}"
            )
    if (unfit := _unfit_shapes(module)) is not None:
        return LeftOut("shapes that do not fit", unfit)
    if "forward" in module.__dict__:
        return LeftOut("forward replaced", "its forward was replaced (module.forward = …, as accelerate's hooks do)")
    if getattr(module, "_is_expert_parallel", False):
        return LeftOut("expert parallel", "it holds a part of the experts: expert parallelism is not supported yet")
    if filter_fn is not None and not filter_fn(module, fqn):
        return LeftOut("filter_fn", "filter_fn said no", "caller")
    return None


def _unfit_shapes(module: nn.Module) -> str | None:
    """Return what is wrong if the shapes of a mixture's weights and biases contradict each other, or its attributes."""
    gated, transposed = bool(module.has_gate), bool(module.is_transposed)
    first, second = expert_products(module) or ("", "")
    up, down = (tuple(module._parameters[name].shape) for name in (first, second))  # type: ignore[union-attr]
    own_gate = gated and hasattr(module, "_apply_gate")  # It may return any width.
    if up[0] != down[0] or not (own_gate or gate_fits(module)):
        return (
            f"{first} {up} and {second} {down} do not fit each other, with has_gate={gated}, is_transposed={transposed}"
        )
    for name, shape in ((first, up), (second, down)):
        bias, expected = module._parameters.get(f"{name}_bias"), (shape[0], shape[2 if transposed else 1])
        if module.has_bias and bias is not None and tuple(bias.shape) != expected:
            return f"{name}_bias {tuple(bias.shape)} does not fit {name} {shape}: expected {expected}"
    return None


def _not_linear(module: nn.Module) -> LeftOut:
    name = type(module).__name__
    if isinstance(module, nn.MultiheadAttention):
        return LeftOut("not nn.Linear", "nn.MultiheadAttention multiplies with its input projections itself")
    if name == "Conv1D":
        return LeftOut("not nn.Linear", "it is a Conv1D, whose weight is [in, out]: make it an nn.Linear")
    if isinstance(module, nn.Bilinear) or _named_linear(module):
        return LeftOut("not nn.Linear", f"it is a {name}, not an nn.Linear")
    experts = _expert_parameters(module)
    dims = f"{max(p.ndim for p in experts.values())}-D parameters"
    return LeftOut(dims, f"{', '.join(experts)}: {dims}, not an nn.Linear")


def _odd_linear(module: nn.Module, base: type[nn.Module], inner: bool) -> LeftOut | None:
    """Return why a module that derives from ``base`` cannot be converted, apart from its dims, or None."""
    name = type(module).__name__
    if inner:
        return LeftOut(
            "in nn.MultiheadAttention", "nn.MultiheadAttention multiplies with its weight itself and never calls it"
        )
    if any(has_base(module, known) for known in _BITSANDBYTES):
        return LeftOut("quantised", f"it is a {name} of bitsandbytes: its weight is quantised")
    if isinstance(module, nn.LazyLinear):
        return LeftOut("not initialised", "it is a LazyLinear: run a forward first, then prepare")
    known = "nn.Linear" if base is nn.Linear else base.__name__
    if not _calls(type(module), base):
        return LeftOut("own forward", f"it is a {name}, not exactly {known}: it has a forward of its own")
    if hasattr(type(module), "weight"):  # A property, as parametrizations make.
        return LeftOut("own weight", f"it is a {name}, not exactly {known}: it computes its weight")
    if "forward" in module.__dict__:
        return LeftOut("forward replaced", "its forward was replaced (module.forward = …, as accelerate's hooks do)")
    weight = module._parameters.get("weight")
    if not isinstance(weight, nn.Parameter):
        if is_sharded(module):
            return None  # FSDP1 removed the weight, for which _why_not raises an error.
        return LeftOut(
            "no plain weight", "its weight is not a plain Parameter (an old-style weight_norm or spectral_norm)"
        )
    subclass = _tensor_subclass(weight)
    if subclass is not None:
        return LeftOut("quantised weight", f"its weight is a {subclass}, a tensor subclass (quantised?)")
    if not weight.is_floating_point() or weight.element_size() < 2:
        return LeftOut("quantised weight", f"its weight is {str(weight.dtype).removeprefix('torch.')}")
    return None


def _calls(kind: type[nn.Module], base: type[nn.Module]) -> bool:
    """True if calling a module of class ``kind`` runs the forward of ``base``."""
    names = ("forward", "_forward_impl") if is_parallel(base) else ("forward",)
    return kind.__call__ is nn.Module.__call__ and all(getattr(kind, name) is getattr(base, name) for name in names)


def _tensor_subclass(weight: Tensor) -> str | None:
    """Return the class of a weight that overrides tensor operations, or None, as for DTensors and fake tensors."""
    kind = type(local_part(weight))
    # Subclasses of Parameter may only add attributes (Megatron, DeepSpeed). Other subclasses of Tensor are data types.
    plain = kind is torch.Tensor or issubclass(kind, nn.Parameter)
    plain = plain and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return None if plain or has_base(local_part(weight), "FakeTensor") else kind.__name__
