"""Coherence: tensors of one rank that must belong together, such as a weight and its float32 master copy. Local.

A comparison of replicas cannot see that a load has changed all weights and none of their masters: all ranks are alike,
and the next step undoes the load. So each rule here says what one tensor must be, given another, bit for bit. An
optimizer that no rule can read is named, and not compared. There is no rule for stochastic rounding, and none for
masters that are stored as the remainder of a weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8dist.checks.differences import unravel
from fp8dist.common.divergence import COHERENCE, MORE, Finding, word_for
from fp8dist.common.text import dtype_name
from fp8dist.modules.casters import Cast
from fp8dist.modules.parts import fp8_parts
from fp8dist.parallel.torch_internals import fsdp2_gathered, fsdp2_shards
from fp8dist.state.groups import has_base, is_dtensor, local_part, own_rank
from fp8dist.state.slots import clean_fqn

_MOST = 16
"""The most findings of one rank. The rest is counted."""

_FLAT = "a part of the model's flat weights"

_AT_ONCE = 1 << 24
"""Elements that are compared at once: DeepSpeed keeps all weights in one tensor, and a comparison makes copies."""

_SHARDS = (("shard_float16_groups", "shard_fp32_from_float16_groups"), ("float16_groups", "fp32_from_float16_groups"))
"""Attributes of Megatron's optimizers: lists of lists of weights, or of this rank's parts of them, and of masters."""

_PARTITIONS = (
    ("bf16_partitioned_groups", "fp32_groups_flat_partition"),
    ("parallel_partitioned_bit16_groups", "single_partition_of_fp32_groups"),
)
"""Attributes of DeepSpeed's BF16 optimizer, and of that of ZeRO's stages 1 and 2: for each group of parameters the
parts of its flat weights, one per rank, and this rank's flat master."""


@dataclass(frozen=True)
class Asked:
    """What a check of coherence needs beside the model.

    ``optimizers``: as the program has them, with the wrappers that hold master weights. ``ties``: see ``ties_of``.
    ``suffices``: True if the check may have nothing else to compare.
    """

    optimizers: Sequence[Any] = ()
    ties: Sequence[Sequence[str]] = ()
    suffices: bool = False

    def also(self, optimizer: Any) -> Asked:
        """Return this for a call that asks for coherence, with the optimizer, or list of optimizers, that it gives."""
        given = optimizer if isinstance(optimizer, Sequence) else () if optimizer is None else (optimizer,)
        return replace(self, optimizers=(*self.optimizers, *given), suffices=True)


@dataclass(frozen=True)
class Inside:
    """What was compared inside this rank. ``size``: bytes. ``unread``: what no rule can read, as text. ``suffices``: as
    in ``Asked``. ``things``: (name, "coherence") of all that findings may be about."""

    findings: tuple[Finding, ...] = ()
    size: int = 0
    unread: tuple[str, ...] = ()
    suffices: bool = False
    things: frozenset[tuple[str, str]] = frozenset()


class _Fit(NamedTuple):
    """A tensor, and what it must be. ``wanted`` returns that, with as many elements, before its conversion to the
    tensor's dtype. ``rule``: as text."""

    name: str
    tensor: Tensor
    wanted: Callable[[], Tensor]
    rule: str


def inside_of(module: nn.Module, asked: Asked, step: int) -> Inside:
    """Compare the tensors of this rank that must belong together. Local; waits for the device. Reads each of them once.

    Args:
        module: the model as the training loop calls it.
        step: for the findings.
    """
    masters = _Masters(module, asked.optimizers)
    pairs = [*masters.pairs, *_gathered(module), *_casts(module)]
    differing, untied = _differing(pairs), list(_untied(module, asked.ties, step))
    # Only what is shown is located: a load may have left thousands of masters behind.
    findings = [*(_finding(pair, module, step) for pair in differing[:_MOST]), *untied][:_MOST]
    if further := len(differing) + len(untied) - len(findings):
        more = f"{further} further tensors that do not fit together"
        findings.append(Finding(step, COHERENCE, MORE, (own_rank(),), None, detail=more))
    size = sum(pair.tensor.numel() * pair.tensor.element_size() for pair in pairs)
    names = {clean_fqn(name) for name, _ in module.named_parameters(remove_duplicate=False)}
    names |= {_FLAT, *(part.fqn for part in fp8_parts(module))}
    things = frozenset((name, COHERENCE) for name in names)
    return Inside(tuple(findings), size, masters.unread, asked.suffices, things)


def stale_weights(module: nn.Module, optimizers: Sequence[Any]) -> list[str]:
    """Return the names of weights that are not what the master weights of optimizers say. Local; waits for the
    device."""
    return [one.name or _finding(one, module, 0).name for one in _differing(_Masters(module, optimizers).pairs)]


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings of all ranks with one for all ranks where the same tensor breaks the same rule: that of the
    lowest rank. ``findings``: in the order of ranks."""
    kept: dict[tuple[Any, ...], Finding] = {}
    for one in findings:
        key = (one.name, one.detail.partition(":")[0]) if one.kind == COHERENCE else (len(kept),)
        first = kept.setdefault(key, one)
        if first is not one:
            joined = {name: getattr(first, name) + getattr(one, name) for name in ("ranks", *_OF_RANKS)}
            of = f" (rank {first.ranks[0]})"
            same = one.detail == first.detail or first.detail.endswith(of)
            kept[key] = replace(first, detail=first.detail if same else first.detail + of, **joined)
    return list(kept.values())


_OF_RANKS = ("hosts", "mesh_coords", "local_ranks", "devices")


def _differing(pairs: Sequence[_Fit]) -> list[_Fit]:
    """Return the pairs that differ. NaNs count as equal."""
    flags = [torch.stack([differs.any() for differs in _differences(pair)]).any() for pair in pairs]
    together = torch.stack([flag.to(flags[0].device) for flag in flags]) if flags else torch.empty(0)  # One wait.
    return [pair for pair, differs in zip(pairs, together.tolist()) if differs]


def _finding(pair: _Fit, module: nn.Module, step: int) -> Finding:
    """Return a finding for a pair that differs, with its first such element."""
    count, first, passed = 0, 0, 0
    for differs in _differences(pair):
        here = int(differs.sum())
        if here and not count:
            first = passed + int(differs.nonzero()[0])
        count, passed = count + here, passed + differs.numel()
    name, index = pair.name, unravel(first, tuple(pair.tensor.shape))
    if not name:
        name, index = _place_of(pair, first, module)
    both = pair.tensor, pair.wanted()
    value, expected = (x.reshape(-1)[first].to(pair.tensor.dtype).to(torch.float64).item() for x in both)
    at = f" at [{', '.join(map(str, index))}]" if index else ""
    detail = f"{pair.rule}: {word_for(value)} against {word_for(expected)}{at}, {count} of {passed} elements"
    return Finding(step, COHERENCE, name, (own_rank(),), None, detail=detail)


def _differences(pair: _Fit) -> Iterator[Tensor]:
    """Yield bools for one piece of the flat tensor after the other: where the bits differ, and not both are NaN."""
    pieces = (one.reshape(-1).split(_AT_ONCE) for one in (pair.tensor, pair.wanted()))
    for tensor, wanted in ((one, other.to(one)) for one, other in zip(*pieces)):
        if tensor.element_size() == 1:
            yield tensor.view(torch.uint8) != wanted.view(torch.uint8)
        else:
            both_nan = tensor.isnan() & wanted.isnan()
            yield ((tensor != wanted) | (tensor.signbit() != wanted.signbit())) & ~both_nan


def _place_of(pair: _Fit, first: int, module: nn.Module) -> tuple[str, tuple[int, ...]]:
    """Return name and index of the parameter that has element ``first`` of a flat tensor in its memory."""
    address = pair.tensor.data_ptr() + first * pair.tensor.element_size()
    for name, parameter in module.named_parameters():
        offset = (address - parameter.data_ptr()) // parameter.element_size()
        if 0 <= offset < parameter.numel() and parameter.is_contiguous():
            return clean_fqn(name), unravel(offset, tuple(parameter.shape))
    return _FLAT, (first,)


class _Masters:
    """The float32 master copies of weights that optimizers hold, by the rules that are known.

    ``pairs``: each weight, or this rank's part of it, and its master in the weight's dtype.
    """

    def __init__(self, module: nn.Module, optimizers: Sequence[Any]) -> None:
        self.pairs: list[_Fit] = []
        shards = fsdp2_shards(module)  # Optimizers hold these, also while the module has gathered copies.
        named = [(clean_fqn(name), one) for name, one in module.named_parameters()]
        self._names = {id(tensor): name for name, one in named for tensor in (one, shards.get(id(one), one))}
        self._read: set[int] = set()
        engines = [part for part in module.modules() if has_base(part, "DeepSpeedEngine")]
        self._optimizers = optimizers_in([*optimizers, *engines])
        for parameter in module.parameters():
            if not getattr(parameter, "main_param_sharded", False):
                self._add(parameter, getattr(parameter, "main_param", None), "main_param")
        for optimizer in self._optimizers:
            of = type(optimizer).__name__
            for weights, masters in _SHARDS:
                for weight_group, master_group in zip(_items(optimizer, weights), _items(optimizer, masters)):
                    for weight, master in zip(weight_group, master_group):
                        self._add(weight, master, of)
            for parts, masters in _PARTITIONS:
                groups = _items(optimizer, "real_dp_process_group")
                for own, master, group in zip(_items(optimizer, parts), _items(optimizer, masters), groups):
                    self._add(own[dist.get_rank(group)], master, of)
            for parameter, master in _in_state(optimizer):
                self._add(parameter, master, of)

    def _add(self, weight: Any, master: Any, of: str) -> None:
        """Add a pair, unless the master is known, or no rule says what the weight must be."""
        if not (isinstance(weight, Tensor) and isinstance(master, Tensor)) or id(master) in self._read:
            return
        name, known = self._names.get(id(weight), ""), id(master)
        weight, master = local_part(weight).detach(), local_part(master).detach()
        plain = type(weight) is type(master) is Tensor and weight.is_floating_point() and not weight.is_meta
        if plain and master.dtype == torch.float32 and weight.numel() == master.numel() > 0:
            self._read.add(known)
            rule = f"not its master weight ({of}) in {dtype_name(weight.dtype)}"
            self.pairs.append(_Fit(name, weight, master.detach, rule))

    @property
    def unread(self) -> tuple[str, ...]:
        """How many tensors of each optimizer may be masters that no rule can read."""
        texts = []
        for optimizer in self._optimizers:
            if _get(optimizer, "optimizer") is not None:
                continue
            held = [one for group in _items(optimizer, "param_groups") for one in group["params"]]
            known = self._names.keys() | self._read
            count = sum(id(one) not in known for one in held)
            if count := count or sum(id(master) not in known for _, master in _in_state(optimizer)):
                texts.append(f"{count} tensors of {type(optimizer).__name__} that are not the model's parameters")
        return tuple(texts)


def _in_state(optimizer: Any) -> list[tuple[Any, Tensor]]:
    """Return (parameter, master) for the masters that Transformer Engine's FusedAdam has in its state."""
    state = _get(optimizer, "state")
    held = state.items() if isinstance(state, Mapping) else ()
    found = [(of, values.get("master_param")) for of, values in held if isinstance(values, Mapping)]
    return [(of, master) for of, master in found if isinstance(master, Tensor)]


def optimizers_in(given: Iterable[Any]) -> list[Any]:
    """Return optimizers, and those inside them, each once."""
    found: dict[int, Any] = {}
    left = list(given)
    while left:
        one = left.pop(0)
        if one is not None and id(one) not in found:
            found[id(one)] = one
            left += [*_items(one, "chained_optimizers"), _get(one, "optimizer")]
    return list(found.values())


def _get(of: Any, name: str) -> Any:
    """Return an attribute; None if it cannot be read: other code's properties may raise anything."""
    with contextlib.suppress(Exception):
        return getattr(of, name)
    return None


def _items(of: Any, name: str) -> list[Any]:
    """Return what is in an attribute; nothing if it is no list or tuple."""
    value = _get(of, name)
    return list(value) if isinstance(value, Sequence) else []


def _gathered(module: nn.Module) -> Iterator[_Fit]:
    """Yield this rank's part of each weight that FSDP2 keeps gathered, and the shard that it must be."""
    names = {id(one): clean_fqn(name) for name, one in module.named_parameters()}
    for whole, part, shard in fsdp2_gathered(module):
        if type(part) is type(shard) is Tensor and part.shape == shard.shape and part.numel():
            yield _Fit(names.get(id(whole), ""), part, shard.detach, "gathered before its shard changed")


def _casts(module: nn.Module) -> Iterator[_Fit]:
    """Yield the FP8 casts that modules keep, and the casts that their weights give now."""
    last: dict[int, Cast] = {}  # The cast of one weight at a time, by its place: those of all need much memory.

    def cast_again(place: int, again: Callable[[], Cast], name: str) -> Tensor:
        if place not in last:
            last.clear()
            last[place] = again()
        return getattr(last[place], name)

    for place, part in enumerate(fp8_parts(module)):
        casts = part.slots.kept_casts(part.stored)
        if casts is not None:
            kept, again = casts
            rule = "cast to FP8 before the weight changed: other code has written to it, see refresh_weights()"
            for name in ("rows", "columns", "rows_inv_scale", "columns_inv_scale"):
                if (tensor := getattr(kept, name)).numel():
                    yield _Fit(f"{part.fqn} ({name})", tensor, partial(cast_again, place, again, name), rule)


def ties_of(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the names of each parameter that a module has under several. Local."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(clean_fqn(name))
    return tuple(tuple(of) for of in names.values() if len(of) > 1)


def lost_ties(module: nn.Module, ties: Sequence[Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Yield (name, the one that it was tied to) for each name of ``ties`` that now names another tensor. Local."""
    named: dict[str, list[Tensor]] = {}  # Without the components of wrappers, several may have the same name.
    for name, one in module.named_parameters(remove_duplicate=False):
        named.setdefault(clean_fqn(name), []).append(one)
    for kept, *others in ties:
        for name in others:
            if kept in named and name in named and not any(_is_same(a, b) for a in named[kept] for b in named[name]):
                yield name, kept


def _untied(module: nn.Module, ties: Sequence[Sequence[str]], step: int) -> Iterator[Finding]:
    """Yield a finding for each name that was tied to another one, and now names another tensor; and for a model of
    Transformers whose configuration says that its embeddings are tied, and they are not."""
    for name, kept in lost_ties(module, ties):
        detail = f"no longer tied to '{kept}', as at attach: another tensor"
        yield Finding(step, COHERENCE, name, (own_rank(),), None, detail=detail)
    parameters = module.named_parameters(remove_duplicate=False)
    names = {id(one): clean_fqn(name) for name, one in parameters}
    seen = {name for of in ties for name in of}
    for part in module.modules():
        first, other = _embeddings(part)
        head = names.get(id(other))
        if head is None or head in seen or not isinstance(first, Tensor) or is_dtensor(first):
            continue
        seen.add(head)
        if not _is_same(first, other):
            detail = f"not tied to '{names.get(id(first))}' as config.tie_word_embeddings says: another tensor"
            yield Finding(step, COHERENCE, head, (own_rank(),), None, detail=detail)


def _embeddings(part: Any) -> tuple[Any, Any]:
    """Return the weights of a model's embeddings, the input's and the output's, if it is one of Transformers whose
    configuration says that they are tied; else None for both."""
    with contextlib.suppress(Exception):  # Many models have no embeddings, and raise if they are asked for them.
        config = part.config
        if hasattr(config, "get_text_config"):  # That of a model of images and text decides, as in Transformers.
            config = config.get_text_config(decoder=True)
        if config.tie_word_embeddings:
            ends = part.get_input_embeddings(), part.get_output_embeddings()
            # Not those of a wrapper, such as PEFT's for modules that it trains as copies.
            return ends[0]._parameters.get("weight"), ends[1]._parameters.get("weight")
    return None, None


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() != 0)
