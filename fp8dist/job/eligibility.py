"""Eligibility: which modules of a model have matmul weights, and the rules that keep some of them in high precision."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from fp8dist.common.patterns import Skip
from fp8dist.common.text import dtype_name
from fp8dist.errors import ConfigurationError
from fp8dist.modules.foreign import expert_products, gate_fits, is_parallel, linear_base
from fp8dist.modules.overrides import Overrides
from fp8dist.parallel.wrappers import is_sharded
from fp8dist.state.groups import has_base, local_part
from fp8dist.state.slots import clean_fqn
from fp8dist_kernels.reference.matmuls import ALIGNMENT

_IN_PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_BITSANDBYTES = ("Linear8bitLt", "Linear4bit")


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
    """What the caller of ``prepare`` has selected. Copies have no ``filter_fn``: pickle refuses local functions.

    Raises:
        ConfigurationError: ``filter_fn`` does not take (module, fqn).
    """

    overrides: Overrides
    skip: Skip
    filter_fn: Callable[[nn.Module, str], bool] | None

    def __post_init__(self) -> None:
        _require_filter(self.filter_fn)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "filter_fn": None}

    def decides(self, fqn: str) -> bool:
        """True if a pattern says whether a module is converted."""
        return self.overrides.pattern_of(fqn) is not None or self.skip.decides(fqn)


class ModelFacts:
    """What the rules need to know of the whole model, from one walk over its modules, and of the caller's selection.

    Iterates over the modules, each once, in the order of ``named_modules``.
    """

    def __init__(self, model: nn.Module, selection: Selection) -> None:
        self.selection = selection
        modules = [(clean_fqn(raw), module) for raw, module in model.named_modules()]
        bases = [linear_base(type(module)) for _, module in modules]
        mixtures = [expert_products(module) if base is None else None for (_, module), base in zip(modules, bases)]
        self._modules = [(*named, base, products) for named, base, products in zip(modules, bases, mixtures)]
        self.heads = _heads(modules)
        self.inner = set()  # Linears that nn.MultiheadAttention uses without calling them.
        self.uses: collections.Counter[int] = collections.Counter()  # Of each parameter, by its id.
        self.has_fast_path = False  # torch may compute an nn.TransformerEncoderLayer without calling its Linears.
        self._owners: dict[int, str] = {}  # First module with a weight, by the weight's id.
        for fqn, module in modules:
            self.uses.update(map(id, module._parameters.values()))
            self.has_fast_path |= isinstance(module, nn.TransformerEncoderLayer)
            if isinstance(module, nn.Embedding):
                self._owners.setdefault(id(module.weight), fqn)
            elif isinstance(module, nn.MultiheadAttention):
                self.inner.add(id(module.out_proj))

    def __iter__(self) -> Iterator[Candidate]:
        return (Candidate(*each, self) for each in self._modules)

    def owner(self, module: nn.Module, fqn: str) -> str:
        """Return the embedding or earlier module with the same weight, or "". Ask in the order of the modules."""
        weight = module._parameters.get("weight")
        first = fqn if weight is None else self._owners.setdefault(id(weight), fqn)
        return first if first != fqn else ""


class Candidate(NamedTuple):
    """A module of the model, as the rules see it.

    ``base``: the class whose product an FP8Linear can stand for; None: the module is no Linear. ``products``: the names
    of a mixture's weights; None: the module is no mixture of experts.
    """

    fqn: str
    module: Any
    base: type[nn.Module] | None
    products: tuple[str, str] | None
    model: ModelFacts

    @property
    def kind(self) -> str:
        """Name of the module's class."""
        return type(self.module).__name__

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The weights of a Linear or of a mixture, by name; none if FSDP1 has removed them."""
        names = self.products or () if self.base is None else ("weight",)
        own = {name: self.module._parameters.get(name) for name in names}
        return {name: weight for name, weight in own.items() if weight is not None}

    @property
    def parameters(self) -> int | None:
        """Number of elements in the matmul weights of the module itself; None: it has none."""
        module = self.module
        if isinstance(module, nn.Linear):
            return module.in_features * module.out_features  # A quantised weight has another shape.
        own = {name: p for name, p in module._parameters.items() if p is not None and not is_lazy(p)}
        if isinstance(module, nn.MultiheadAttention):
            own = {name: own[name] for name in _IN_PROJECTIONS if name in own}
        elif _named_linear(module) or self.base is not None:
            own = {name: p for name, p in own.items() if name.startswith("weight") and p.ndim > 1}
        elif self.products is not None:
            own = {name: own[name] for name in self.products if name in own}
        elif not isinstance(module, nn.Bilinear):
            own = _expert_parameters(module)
        return sum(p.numel() for name, p in own.items() if name != "bias") if own else None

    @property
    def experts(self) -> int:
        """Number of experts of a mixture; 0 for other modules."""
        return 0 if self.products is None else len(self.module._parameters[self.products[0]])


def _heads(modules: Sequence[tuple[str, nn.Module]]) -> dict[int, str]:
    """Return the nn.Linears that are taken for output heads, by id, each with the reason: those that share the weight
    of an nn.Embedding, and the model's last one, if it has an output for each row of an nn.Embedding.

    Equal sizes may be chance: an MLP or a projection may be as wide as there are positions, classes or bytes. So by its
    sizes only the last Linear is a head, if it is not square, and no other has its shape or takes as many inputs as it
    gives outputs. Heads may be missed so that no other Linear is taken for one.
    """
    embeddings = [(fqn, of) for fqn, of in modules if isinstance(of, nn.Embedding)]
    linears = [module for _, module in modules if isinstance(module, nn.Linear)]
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


def _require_filter(filter_fn: object) -> None:
    """Raise ConfigurationError unless ``filter_fn`` is None, or takes (module, fqn)."""
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


# Rules ---------------------------------------------------------------------------------------------


def why_not(of: Candidate) -> LeftOut | None:
    """Return why a module with matmul weights stays in high precision, or None. Calls ``filter_fn`` for eligible
    modules."""
    return next((left_out for rule in _RULES if (left_out := rule(of)) is not None), None)


def _named(of: Candidate) -> LeftOut | None:
    overrides, skip = of.model.selection.overrides, of.model.selection.skip
    pattern = overrides.pattern_of(of.fqn)
    if pattern is not None:
        recipe = overrides.given[pattern]
        return LeftOut("overrides", f"overrides say so ({pattern!r})", "caller") if recipe == "high" else None
    pattern = skip.pattern_of(of.fqn)
    if pattern is None:
        return None
    if pattern in skip.given:
        return LeftOut("skip", f"it matches skip {pattern!r}", "caller")
    return LeftOut("skip", f"it matches skip {pattern!r}, a default", "default")


def _other_kind(of: Candidate) -> LeftOut | None:
    """Neither a Linear nor experts."""
    if of.base is not None or of.products is not None:
        return None
    if isinstance(of.module, nn.MultiheadAttention):
        return LeftOut("not nn.Linear", "nn.MultiheadAttention multiplies with its input projections itself")
    if of.kind == "Conv1D":
        return LeftOut("not nn.Linear", "it is a Conv1D, whose weight is [in, out]: make it an nn.Linear")
    if isinstance(of.module, nn.Bilinear) or _named_linear(of.module):
        return LeftOut("not nn.Linear", f"it is a {of.kind}, not an nn.Linear")
    experts = _expert_parameters(of.module)
    dims = f"{max(p.ndim for p in experts.values())}-D parameters"
    return LeftOut(dims, f"{', '.join(experts)}: {dims}, not an nn.Linear")


def _odd_class(of: Candidate) -> LeftOut | None:
    """A Linear that nobody calls, or that computes its output or its weight in another way than FP8Linear would."""
    if of.base is None:
        return None
    if id(of.module) in of.model.inner:
        text = "nn.MultiheadAttention multiplies with its weight itself and never calls it"
        return LeftOut("in nn.MultiheadAttention", text)
    if any(has_base(of.module, known) for known in _BITSANDBYTES):
        return LeftOut("quantised", f"it is a {of.kind} of bitsandbytes: its weight is quantised")
    if isinstance(of.module, nn.LazyLinear):
        return LeftOut("not initialised", "it is a LazyLinear: run a forward first, then prepare")
    known = f"it is a {of.kind}, not exactly {'nn.Linear' if of.base is nn.Linear else of.base.__name__}"
    if not _calls(type(of.module), of.base):
        return LeftOut("own forward", f"{known}: it has a forward of its own")
    if hasattr(type(of.module), "weight"):  # A property, as parametrizations make.
        return LeftOut("own weight", f"{known}: it computes its weight")
    return None


def _replaced_forward(of: Candidate) -> LeftOut | None:
    if "forward" not in of.module.__dict__:
        return None
    return LeftOut("forward replaced", "its forward was replaced (module.forward = …, as accelerate's hooks do)")


def _no_plain_weight(of: Candidate) -> LeftOut | None:
    """FSDP1 removes weights, too: ``survey`` raises an error for these."""
    if of.base is None or isinstance(of.weights.get("weight"), nn.Parameter) or is_sharded(of.module):
        return None
    return LeftOut("no plain weight", "its weight is not a plain Parameter (an old-style weight_norm or spectral_norm)")


def _quantised(of: Candidate) -> LeftOut | None:
    for name, weight in of.weights.items():
        subclass = _tensor_subclass(weight)
        if subclass is not None:
            return LeftOut("quantised weight", f"its {name} is a {subclass}, a tensor subclass (quantised?)")
        if not weight.is_floating_point() or weight.element_size() < 2:
            return LeftOut("quantised weight", f"its {name} is {dtype_name(weight.dtype)}")
    return None


def _odd_dims(of: Candidate) -> LeftOut | None:
    whole: dict[str, Sequence[int]] = {f"{name}: dims of ": weight.shape for name, weight in of.weights.items()}
    if of.base is not None:
        linear = isinstance(of.module, nn.Linear)
        whole = {"": (of.module.in_features, of.module.out_features) if linear else of.module.weight.shape}
    for what, shape in whole.items():
        if any(size == 0 or size % ALIGNMENT for size in shape[-2:]):
            text = f"{what}{' x '.join(map(str, shape))} are not multiples of {ALIGNMENT}{', or 0' * (0 in shape)}"
            return LeftOut(f"dims not multiples of {ALIGNMENT}", text)
    return None


def _odd_experts(of: Candidate) -> LeftOut | None:
    if of.products is None:
        return None
    if (unfit := _unfit_shapes(of.module, of.products)) is not None:
        return LeftOut("shapes that do not fit", unfit)
    if getattr(of.module, "_is_expert_parallel", False):
        return LeftOut("expert parallel", "it holds a part of the experts: expert parallelism is not supported yet")
    return None


def _filtered(of: Candidate) -> LeftOut | None:
    filter_fn = of.model.selection.filter_fn
    if filter_fn is None or filter_fn(of.module, of.fqn):
        return None
    return LeftOut("filter_fn", "filter_fn said no", "caller")


def _shared_experts(of: Candidate) -> LeftOut | None:
    if of.products is None or all(of.model.uses[id(weight)] == 1 for weight in of.weights.values()):
        return None
    return LeftOut("shared weight", "another module uses its weights, too")


def _output_head(of: Candidate) -> LeftOut | None:
    head = of.model.heads.get(id(of.module))
    if head is None or of.model.selection.decides(of.fqn):
        return None
    reason = f"{head}, so it is taken for the output head: skip='!{of.fqn}' puts it into FP8"
    return LeftOut("output head", reason, "default")


_RULES: tuple[Callable[[Candidate], LeftOut | None], ...] = (
    _named,
    _other_kind,
    _odd_class,
    _replaced_forward,
    _no_plain_weight,
    _quantised,
    _odd_dims,
    _odd_experts,
    _filtered,
    _shared_experts,
    _output_head,
)
"""The first that gives a reason counts. Each may rely on those before it: ``filter_fn`` sees eligible modules only."""


def _unfit_shapes(module: nn.Module, products: tuple[str, str]) -> str | None:
    """Return what is wrong if the shapes of a mixture's weights and biases contradict each other, or its attributes.
    ``products``: the names of its weights."""
    gated, transposed = bool(module.has_gate), bool(module.is_transposed)
    first, second = products
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
