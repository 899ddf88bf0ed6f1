"""What ``attach`` requires of a model as it is wrapped and sharded now, and of its optimizers; and what it warns of.
Everything here is local, and changes nothing.

``model``: the prepared model. ``whole``: the model as the training loop calls it, such as the DDP or FSDP module.
``resharded``: the modules whose weights FSDP or ZeRO frees after their forward.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fp8dist.checks.replication import ddp_parameters, zero_groups
from fp8dist.common.text import first_few, ranks_text
from fp8dist.errors import ConfigurationError
from fp8dist.job.cycle import StepCycle
from fp8dist.modules.fp8_experts import fp8_experts
from fp8dist.modules.fp8_linear import fp8_linears
from fp8dist.modules.parts import Part, fp8_parts
from fp8dist.modules.weight_notes import stored_parameters
from fp8dist.parallel.fsdp2 import require_whole_blocks
from fp8dist.parallel.partitioned import is_partitioned
from fp8dist.parallel.torch_internals import require_checkable
from fp8dist.parallel.wrappers import fsdp2_cut, managed_from_outside, mesh_ranks, multiplied_shape
from fp8dist.state.groups import has_base, is_dtensor
from fp8dist.state.slots import clean_fqn
from fp8dist_kernels import BLOCK
from fp8dist_kernels.formats import Role
from fp8dist_kernels.reference.matmuls import ALIGNMENT

logger = logging.getLogger("fp8dist")


def require_fitting(
    model: nn.Module,
    whole: nn.Module,
    resharded: set[nn.Module],
    axes: Mapping[int, int],
    optimizers: Sequence[Optimizer],
    cycle: StepCycle,
) -> None:
    """Raise ConfigurationError if the model as it is wrapped now, or an optimizer, does not fit the state. Local.
    ``axes``: ``fsdp2_axes`` of ``whole``."""
    settings = cycle.settings
    _require_own(model, cycle)
    if settings.enabled and optimizers and has_base(whole, "DeepSpeedEngine"):
        raise ConfigurationError(
            "attach(optimizer=…): DeepSpeed steps an optimizer once for each group of parameters, and each would count "
            "as an FP8 step: call fp8dist.integrations.deepspeed.attach(manager, engine)"
        )
    if settings.check_every:
        require_checkable(whole)
    _require_products(model, whole, resharded, axes)
    if settings.enabled and settings.fp8_all_gather:
        require_whole_blocks(model, whole, axes)
    _require_groups(model, whole, cycle)
    _require_current(model, whole, optimizers)


def _require_own(model: nn.Module, cycle: StepCycle) -> None:
    """Raise ConfigurationError for a converted module that was copied after ``prepare``: it has slots of its own."""
    for part in fp8_parts(model):
        if part.slots.job is not cycle.job:
            fqn = next(clean_fqn(raw) for raw, module in model.named_modules() if module is part.module)
            raise ConfigurationError(
                f"{fqn} is a copy of a converted module ({part.fqn}), with FP8 state that no step would update: copy "
                "modules before prepare(), or call fp8dist.restore(model) and prepare() again"
            )


def _require_products(model: nn.Module, whole: nn.Module, resharded: set[nn.Module], axes: Mapping[int, int]) -> None:
    for linear in managed_from_outside(model, resharded, whole):
        raise ConfigurationError(
            f"{linear.fp8_slots.fqn}: fully_shard() was called on a module around the prepared model: pass it as "
            "attach(module=…)"
        )
    for linear in fp8_linears(model):
        fqn = linear.fp8_slots.slots[Role.WEIGHT].fqn
        if linear in resharded and "weight" not in linear._parameters:
            if stored_parameters(linear):
                raise ConfigurationError(
                    f"{fqn}: its weight is no Parameter, and FSDP shards what it is computed from (a parametrization, "
                    "pruning): put that on before prepare(), which then leaves the module in high precision"
                )
            raise ConfigurationError(f"{fqn}: FSDP1 has flattened its weight: wrap with use_orig_params=True")
        shape = multiplied_shape(linear, axes)
        if len(shape) != 2 or any(size % ALIGNMENT for size in shape):
            raise ConfigurationError(
                f"{fqn}: local weight shape {shape}, expected two dims in multiples of {ALIGNMENT}"
            )
        uncut = (linear.out_features, linear.in_features)
        by_block = linear.fp8_slots.recipe.by == "block"
        if by_block and any(size != of and size % BLOCK for size, of in zip(shape, uncut)):
            raise ConfigurationError(
                f"{fqn}: local weight shape {shape} of {uncut}: tensor parallelism cuts blocks of {BLOCK} x {BLOCK}: "
                f"split it into multiples of {BLOCK}, or give it another recipe (overrides)"
            )
    for module in fp8_experts(model):
        for name, grouped in module.fp8_products.items():
            _require_experts(module, name, grouped.fqn, module in resharded)


def _require_experts(module: nn.Module, name: str, fqn: str, resharded: bool) -> None:
    """Raise ConfigurationError unless this rank multiplies with whole experts."""
    skip = f"leave them in high precision: prepare(skip={fqn.rpartition('.')[0]!r})"
    instead, weight = f"shard them with FSDP2, or {skip}", module._parameters.get(name)
    if weight is None:
        raise ConfigurationError(
            f"{fqn}: its {name} is no Parameter of the module any more, as after a parametrization: undo it, or {skip}"
        )
    if is_partitioned(weight) or (weight.ndim != 3 and not is_dtensor(weight)):
        raise ConfigurationError(
            f"{fqn}: FSDP1 or ZeRO has flattened its experts, which FP8 does not support: {instead}"
        )
    if is_dtensor(weight) and not resharded:
        raise ConfigurationError(f"{fqn}: tensor and expert parallelism are not supported for FP8 experts: {instead}")


def _require_groups(model: nn.Module, whole: nn.Module, cycle: StepCycle) -> None:
    """Raise ConfigurationError unless shards of one weight, and its replicas under DDP or DeepSpeed, share a scale."""
    replicas = {key: ddp.process_group for key, ddp in ddp_parameters(whole).items()} | zero_groups(whole)
    covered: set[tuple[int, int]] = set()  # Checked (holder, group) pairs: few, where weights are many.
    for part in fp8_parts(model):
        sync, weight = part.slots.weight_sync, part.weight
        group, holders = cycle.state.group_of(sync), replicas.get(id(weight))
        holder = holders if holders is not None else weight.device_mesh if is_dtensor(weight) else None
        if holder is None or group is None or not cycle.settings.amax_sync or (id(holder), id(group)) in covered:
            continue
        ranks = mesh_ranks(weight) if holders is None else {*dist.get_process_group_ranks(holders)}
        if not ranks <= {*group.ranks}:
            raise ConfigurationError(
                f"{part.slots.slots[Role.WEIGHT].fqn}: its weight is shared or sharded by ranks "
                f"{ranks_text(sorted(ranks))}, but its FP8 state "
                f"only by ranks {ranks_text(group.ranks)}: pass prepare(group=…) all of them (the whole mesh, or the "
                "group of DDP or DeepSpeed)"
            )
        covered.add((id(holder), id(group)))


def _require_current(model: nn.Module, whole: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Raise ConfigurationError for an optimizer that holds former parameters of the model, or weights that FSDP2 had
    gathered as the optimizer was made: ``model.parameters()`` gives these after a forward without a backward."""
    current = _own(model, whole)
    known = [(p, part) for part in fp8_parts(model) for p in part.slots.note.remembered]  # Keeps the parameters alive.
    former = {id(p): part.slots.slots[Role.WEIGHT].fqn for p, part in known if id(p) not in current}
    for optimizer in optimizers:
        fqn = next((former[key] for key in _held([optimizer]) if key in former), None)
        if fqn is not None:
            raise ConfigurationError(
                f"{type(optimizer).__name__} holds what was the weight of {fqn} before the model was sharded, "
                "materialised or given new parameters: it trains nothing that the model uses. Make the optimizer after "
                "that, then call attach(optimizer=…)"
            )
        if any(map(_is_freed, _held([optimizer]).values())):
            raise ConfigurationError(
                f"{type(optimizer).__name__} was made while FSDP2 had gathered the weights for a forward: it trains "
                "nothing. Call reshard() of the FSDP module first, or make the optimizer before evaluations"
            )


def _is_freed(parameter: Tensor) -> bool:
    """True for a gathered weight whose memory FSDP2 has released."""
    plain = type(parameter) is nn.Parameter and not parameter.is_meta  # Some subclasses have no storage.
    return plain and parameter.numel() > 0 and parameter.untyped_storage().size() == 0


def warn_of_padding(model: nn.Module, axes: Mapping[int, int], cycle: StepCycle) -> None:
    """Log which experts FSDP2 pads. Local. ``axes``: ``fsdp2_axes`` of the model."""
    if not cycle.settings.enabled or not cycle.state.logs:
        return
    for module in fp8_experts(model):
        for name, slots in module.fp8_products.items():
            weight: Any = module._parameters[name]
            dim, ranks = fsdp2_cut(weight, axes)
            if dim == 0 and ranks > len(weight):
                logger.warning(
                    "fp8dist: %s: FSDP2 shards %d experts along dim 0 over %d ranks, and gathers %d of them with "
                    "padding: shard their rows, fully_shard(shard_placement_fn=…) with Shard(1)",
                    slots.fqn,
                    len(weight),
                    ranks,
                    ranks,
                )
                return  # The others are sharded alike.


def warn_of_unheld(model: nn.Module, whole: nn.Module, optimizers: Sequence[Optimizer]) -> list[Part]:
    """Warn about trainable FP8 weights that no optimizer holds, and return those that must have master copies. Log
    parameters that are not the model's at info level: they may be master copies, or another part of the model."""
    if not optimizers:
        return []
    held, own = _held(optimizers), _own(model, whole)
    strangers = [parameter for key, parameter in held.items() if key not in own and not is_lazy(parameter)]
    if strangers:
        logger.info("fp8dist: attach(optimizer=…): %d of its parameters are not the model's", len(strangers))
    stored = ((part, weight) for part in fp8_parts(model) for weight in part.stored[:1])
    unheld = {part: weight for part, weight in stored if weight.requires_grad and id(weight) not in held}
    shapes = {parameter.shape for parameter in strangers}
    missing = {part.fqn: weight for part, weight in unheld.items() if weight.shape not in shapes}
    # Master copies may also be one flat tensor.
    if sum(weight.numel() for weight in missing.values()) > sum(parameter.numel() for parameter in strangers):
        logger.warning(
            "fp8dist: attach(optimizer=…): %d trainable FP8 weights are in none of the optimizers: %s. If another "
            "optimizer steps them, give it to attach as well: attach(optimizer=[…])",
            len(missing),
            first_few(sorted(missing)),
        )
        return []
    return list(unheld)


def _own(model: nn.Module, whole: nn.Module) -> set[int]:
    """Return the ids of the model's parameters, as it has them now."""
    return {id(parameter) for module in (model, whole) for parameter in module.parameters()}


def _held(optimizers: Sequence[Optimizer]) -> dict[int, Tensor]:
    """Return the parameters of optimizers, by id."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return {id(parameter): parameter for group in groups for parameter in group["params"]}
