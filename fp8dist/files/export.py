"""Export of a model in FP8: the tensors of a checkpoint for inference servers, as a stream or as a folder.

``Export`` lists the tensors of an exported model without reading them: ``Export.tensors`` has name, role, dtype and
shape of each, and ``Export.stream`` yields them with their values, in the same order on all ranks. ``write_folder``
and ``fp8dist.exported`` read this stream.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from fp8dist.common.names import require_choice
from fp8dist.errors import ConfigurationError
from fp8dist.files.certificate import Origin, certificate_of
from fp8dist.files.export_casts import Stored, cast_of, dequantised, grid_of, whole
from fp8dist.files.export_experts import ExpertNames, are_in_fp8, expert_names, list_experts, mixtures_of
from fp8dist.files.export_files import Folder
from fp8dist.files.export_formats import (
    FORMATS,
    ExportedTensor,
    ExportPart,
    Grid,
    Scheme,
    inputs_of,
    laid_out,
    quantization_config,
    require_e4m3,
    require_storable,
    strategy_of,
    tensors_of,
)
from fp8dist.job.cycle import StepCycle
from fp8dist.modules.foreign import expert_products, is_parallel, linear_base
from fp8dist.modules.fp8_linear import FP8Linear
from fp8dist.parallel.partitioned import is_partitioned
from fp8dist.parallel.torch_internals import fsdp1_modules, fsdp2_gathered_dtypes, fsdp2_modules
from fp8dist.parallel.wrappers import compute_devices, fsdp2_axes, reshard
from fp8dist.state.groups import has_base, is_dtensor
from fp8dist.state.recipe import By, Recipe
from fp8dist.state.slots import clean_fqn, plain_fqn

Known = tuple[Grid, torch.Size, By]
"""The parts of a weight that share a scale, its shape, and what has a scale under its recipe."""


@dataclass(frozen=True)
class Export:
    """All tensors of an exported model, in an order that is the same on all ranks. Names are those of the export.

    Args:
        format: a key of ``FORMATS``.
        parts: the tensors, grouped by the cast that they come from.
        ignored: names of modules with weights of two dimensions that are not in FP8.
        tied: {name of a tensor that is left out: name of the exported tensor that is the same}.
        sharded: True if a weight is a DTensor, so reading is COLLECTIVE.
        moment: returns a value that changes when an optimizer step ends.
    """

    format: str
    parts: Sequence[ExportPart]
    ignored: Sequence[str]
    tied: Mapping[str, str]
    sharded: bool
    moment: Callable[[], object]

    @property
    def schemes(self) -> dict[str, Scheme]:
        """By module name, how servers multiply with the weights in FP8."""
        return {name: part.scheme for part in self.parts if part.scheme for name in part.linears}

    @property
    def recipes(self) -> dict[str, Recipe]:
        """By module name, the recipes of the weights in FP8."""
        return {name: part.recipe for part in self.parts if part.recipe for name in part.linears}

    @property
    def tensors(self) -> list[ExportedTensor]:
        """All tensors, in the order of the stream."""
        return [tensor for part in self.parts for tensor in part.tensors]

    def stream(self) -> Iterator[tuple[ExportedTensor, Tensor]]:
        """Yield every tensor with its values, whole and on its own device. One module's weight and scales are in memory
        at a time. COLLECTIVE if weights are sharded: iterate to the end on all ranks.

        Raises:
            ConfigurationError: an optimizer step has ended since the iteration began, so later tensors would be those
                of another step.
        """
        moment = self.moment()
        for part in self.parts:
            if self.moment() != moment:
                raise ConfigurationError("a step ended while weights were exported: export between two steps")
            with torch.no_grad():
                values = part.read()
            yield from zip(part.tensors, values, strict=True)
            del values  # Before the next part is read.

    def quantization_config(self, powers_of_two: bool = False) -> dict[str, Any]:
        """Return the value of ``quantization_config`` in config.json. ``powers_of_two``: all scales of weights are."""
        schemes = dict(sorted(self.schemes.items()))
        return quantization_config(self.format, schemes, sorted(self.ignored), powers_of_two)


# What a model exports --------------------------------------------------------------------------------


def export_of(cycle: StepCycle, model: nn.Module, format: str) -> Export:
    """List the tensors that an export of ``model`` has now. COLLECTIVE if FSDP2 gathers weights in FP8, and some have
    no scale yet, or were written to by other code than an optimizer: their scales are computed first.

    Raises:
        ConfigurationError: the model cannot be exported, or its scales do not fit the format. The message says what to
            do.
    """
    cycle.require("export()")
    require_choice("format", format, tuple(FORMATS))
    job = cycle.job
    if job.awaits_attach:
        raise ConfigurationError("export() before attach(): with fp8_all_gather=True call attach() first")
    if not job.enabled or not job.in_fp8 or job.eval_precision != "fp8":
        off = 'eval_precision="high"' if job.enabled and job.in_fp8 else "no_fp8()" if job.enabled else "enabled=False"
        raise ConfigurationError(f"nothing to export in FP8: an eval forward is in high precision ({off})")
    inner = _unwrapped(model)
    _require_readable(inner)
    cycle.state.settle()
    reshard(fsdp2_modules(inner))  # The parameters that are read below must be the shards.
    if cycle.scales.sharded is not None:
        cycle.scales.sharded.fit_scales()
    names = expert_names(inner)
    mixtures = {clean_fqn(name): module for name, module in mixtures_of(inner, names)}
    every = [(clean_fqn(name), each) for name, each in inner.named_modules(remove_duplicate=False) if _has_matrix(each)]
    matrices = dict(sorted(every, key=lambda named: isinstance(named[1], FP8Linear)))  # Of two with one name, that one.
    return listed(format, _stored(inner, cycle), matrices, mixtures, names, lambda: job.boundaries)


def _has_matrix(module: nn.Module) -> bool:
    """Return True for a Linear, and for any other module with a weight of two dimensions, such as an embedding: in a
    checkpoint both look the same."""
    weight = module._parameters.get("weight")
    return isinstance(module, nn.Linear) or (weight is not None and weight.ndim == 2)


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DDP and torch.compile."""
    while True:
        if has_base(model, "DistributedDataParallel"):
            model = model.module  # type: ignore[assignment]
        elif has_base(model, "OptimizedModule"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def _require_readable(model: nn.Module) -> None:
    """Raise ConfigurationError if an export has no place for a weight as the model stores it."""
    if fsdp1_modules(model):
        raise ConfigurationError(
            "FSDP1 keeps weights in flat parameters, which export() does not read: export a checkpoint with fp8dist "
            "export, or use fully_shard"
        )
    if any(map(is_partitioned, model.parameters())):
        raise ConfigurationError("export() does not read weights that ZeRO's stage 3 partitions: export a checkpoint")
    for name, module in model.named_modules():
        if not isinstance(module, FP8Linear):
            continue
        base = linear_base(module.converted_from)
        why = ""
        if not name:
            why = "the model is a Linear itself, which has no name: put it into a module"
        elif module.transposed:
            why = "its weight is stored as [in_features, out_features], for which no format has a place"
        elif base is not None and is_parallel(base):
            why = "a parallel Linear of Megatron-Core holds this rank's part under names that no server reads"
        elif module._parameters.get("weight") is None:
            why = "its weight is computed by a parametrization: remove that first"
        if why:
            raise ConfigurationError(f"{clean_fqn(name) or 'the root'}: {why}")


def _stored(model: nn.Module, cycle: StepCycle) -> Iterator[Stored]:
    """Yield the tensors of the model's state_dict."""
    dtypes = fsdp2_gathered_dtypes(model)
    ddp = {plain_fqn(name) for name, module in model.named_modules() if has_base(module, "DistributedDataParallel")}
    sharded = (
        {}
        if cycle.scales.sharded is None
        else {id(weight.parameter): weight for weight in cycle.scales.sharded.weights}
    )
    device_of = compute_devices(model)
    axes = fsdp2_axes(model)
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and not name.endswith(_EXTRA_STATE_KEY_SUFFIX):
            if value.is_meta:
                raise ConfigurationError(f"{clean_fqn(name)} is on the meta device, which stores no values")
            key = id(value)
            yield Stored(
                clean_fqn(name),
                value,
                partial(_same, value),
                device_of(value),
                dtypes.get(key, value.dtype),
                fsdp_axes=axes.get(key, 0),
                sharded=sharded.get(key),
                plain=plain_fqn(name, ddp),
            )


def listed(
    format: str,
    tensors: Iterable[Stored],
    modules: Mapping[str, nn.Module],
    mixtures: Mapping[str, nn.Module],
    names: ExpertNames | None,
    moment: Callable[[], object] = lambda: None,
) -> Export:
    """List the tensors of an export, for tensors of a model or of a checkpoint.

    Args:
        tensors: the tensors as they are stored, under the model's names.
        modules: by name, all modules with weights of two dimensions.
        mixtures: by name, mixtures (of experts) that are exported expert by expert, under ``names``.
        names: names of an expert's Linears in the export. None: the usual ones.
        moment: see ``Export``.

    Raises:
        ConfigurationError: see ``export_of``.
    """
    in_fp8 = {name for name, module in modules.items() if isinstance(module, FP8Linear) and _in_fp8(module)}
    tensors = list(tensors)
    once, tied = _once(tensors, in_fp8)
    _require_distinct(once, {*in_fp8, *mixtures})
    grids = _grids(once, modules, in_fp8)
    names = names or ExpertNames()
    parts = [_part_of(format, stored, modules, mixtures, names, in_fp8, grids) for stored in once]
    _require_untied(tied, mixtures)
    _require_all(parts, once, tied, in_fp8, mixtures)
    plain = {one.name: one.plain for one in tensors}
    plain |= {module: one.served(module) for one in once if (module := _module_of(one))}
    renamed = [_renamed(part, partial(_served, names, stored)) for part, stored in zip(parts, once)]
    high = [name for part in renamed if part.scheme is None for name in part.linears]
    found = Export(
        format,
        renamed,
        [*(names.served(plain.get(name, name)) for name in modules if name not in in_fp8), *high],
        {names.served(plain[name]): names.served(plain[owner]) for name, owner in tied.items()},
        any(is_dtensor(stored.value) for stored in once),
        moment,
    )
    require_storable(found.tensors)
    found.quantization_config()  # Raises for names that servers misread, before anything is written.
    return found


def _part_of(
    format: str,
    stored: Stored,
    modules: Mapping[str, nn.Module],
    mixtures: Mapping[str, nn.Module],
    names: ExpertNames,
    in_fp8: Set[str],
    grids: Mapping[str, Known],
) -> ExportPart:
    """Return the exported tensors that one tensor of the model gives."""
    name, holder = _module_of(stored), stored.name.rpartition(".")[0]
    part = list_experts(format, names, holder, mixtures[holder], stored) if holder in mixtures else None
    if part is not None:
        return part
    linear = modules.get(name)
    if name not in grids or not isinstance(linear, FP8Linear):
        entry = ExportedTensor(stored.name, "high", holder, stored.value.dtype, tuple(stored.value.shape))
        return ExportPart((entry,), lambda: (whole(stored),))
    if name in in_fp8:
        return _of_linear(format, name, linear, stored, grids)
    return _dequantised(name, linear, stored, grids[name][0])


def _grids(once: Iterable[Stored], modules: Mapping[str, nn.Module], in_fp8: Set[str]) -> dict[str, Known]:
    """Return what is known of weights by name of a Linear. Only of Linears whose weight is in FP8, or is gathered in
    FP8."""
    grids: dict[str, Known] = {}
    for stored in once:
        linear = modules.get(_module_of(stored))
        if isinstance(linear, FP8Linear) and (_module_of(stored) in in_fp8 or stored.sharded or stored.gathered):
            grids[_module_of(stored)] = grid_of(linear, stored), stored.value.shape, linear.fp8_slots.recipe.by
    return grids


def _require_all(
    parts: Iterable[ExportPart],
    once: Iterable[Stored],
    tied: Iterable[str],
    in_fp8: Set[str],
    mixtures: Mapping[str, nn.Module],
) -> None:
    """Raise ConfigurationError if a weight in FP8 has no tensor, or nothing is in FP8."""
    found = {name for part in parts if part.scheme for name in part.linears}
    stored = {one.name for one in once}
    lost = [f"{name}.weight" for name in sorted(in_fp8 - found - {name.rpartition(".")[0] for name in tied})]
    for name, mixture in ((name, mixture) for name, mixture in mixtures.items() if are_in_fp8(name, mixture)):
        lost += sorted({f"{name}.{weight}" for weight in expert_products(mixture) or ()} - stored)
    if lost:
        module = lost[0].rpartition(".")[0]
        raise ConfigurationError(f"{module} is in FP8, but state_dict() has no {lost[0]}: a hook renames it")
    if not found:
        raise ConfigurationError("nothing to export in FP8: every module is in high precision")


def _require_distinct(once: Iterable[Stored], modules: Set[str]) -> None:
    """Raise ConfigurationError if two tensors have one name in the FP8 state, and one of ``modules`` has it."""
    first: dict[str, Stored] = {}
    for one in once:
        other = first.setdefault(one.name, one)
        if other is not one and one.name.rpartition(".")[0] in modules:
            raise ConfigurationError(
                f"{other.plain} and {one.plain} have one name in the FP8 state, {one.name}, because wrappers call a "
                'part "module", too: rename yours'
            )


def _require_untied(tied: Mapping[str, str], mixtures: Mapping[str, nn.Module]) -> None:
    """Raise ConfigurationError if experts share a weight with another module."""
    for name, owner in tied.items():
        if name.rpartition(".")[0] in mixtures or owner.rpartition(".")[0] in mixtures:
            raise ConfigurationError(
                f"{name} is the same tensor as {owner}: experts that share weights have no place in an export: give "
                "each mixture its own"
            )


def _served(names: ExpertNames, stored: Stored, name: str) -> str:
    """Return the exported name of a module or tensor that comes from a stored tensor."""
    return names.served(stored.served(name))


def _renamed(part: ExportPart, served: Callable[[str], str]) -> ExportPart:
    """Return the part with the names that ``served`` gives to its tensors and modules."""
    tensors = (replace(one, name=served(one.name), module=served(one.module)) for one in part.tensors)
    return replace(part, tensors=tuple(tensors), linears=tuple(map(served, part.linears)))


def _module_of(stored: Stored) -> str:
    """Return the name of the module of which the tensor is the ``weight``; "" for any other tensor."""
    module, _, kind = stored.name.rpartition(".")
    return module if kind == "weight" else ""


def _once(tensors: Iterable[Stored], in_fp8: Set[str]) -> tuple[list[Stored], dict[str, str]]:
    """Return each tensor once, under its first name, and {other name: first name} of tensors with several names."""
    first: dict[int, Stored] = {}
    tied: dict[str, str] = {}
    for stored in tensors:
        owner = first.setdefault(id(stored.value), stored)
        if owner is not stored:
            _require_one_precision(stored.name, owner.name, in_fp8)
            tied[stored.name] = owner.name
    return list(first.values()), tied


def _same(value: Tensor) -> Tensor:
    return value


def _in_fp8(linear: FP8Linear) -> bool:
    return "fprop" not in linear.fp8_slots.precision.high


def _require_one_precision(name: str, owner: str, in_fp8: Set[str]) -> None:
    """Raise ConfigurationError if only one of two modules with the same weight is in FP8."""
    users = [each.removesuffix(".weight") for each in (name, owner)]
    if len(in_fp8 & set(users)) == 1:
        fp8, high = sorted(users, key=lambda user: user not in in_fp8)
        raise ConfigurationError(
            f"{fp8} is in FP8 and shares its weight with {high}, which is not: a server has one copy of it. Name {fp8} "
            "in skip="
        )


def _of_linear(
    format: str,
    name: str,
    linear: FP8Linear,
    stored: Stored,
    grids: Mapping[str, Known],
) -> ExportPart:
    """Return the tensors of a Linear in FP8: the weight, its scales, and the scale of inputs if it is fixed."""
    slots = linear.fp8_slots
    state, input_state = slots.states(stored.device)[1::-1]  # Of weight and input, which come in the other order.
    require_e4m3(name, state.format.name)
    grid, shape, _ = grids[name]
    strategy = strategy_of(format, *grids[name])
    if strategy is None:
        raise ConfigurationError(_unfit(format, name, linear, grids))
    scheme = Scheme(strategy, inputs_of(slots.recipe, bool(input_state.cold)))
    entries = tensors_of(format, name, shape, scheme)

    def read() -> Sequence[Tensor]:
        rows, inv_scale = cast_of(linear, stored, grid)
        input_scale = torch.reciprocal(slots.states(stored.device)[0].scale).reshape(1)
        return [rows, laid_out(inv_scale, grid, strategy, shape), input_scale][: len(entries)]

    return ExportPart(tuple(entries), read, (name,), scheme, slots.recipe)


def _dequantised(name: str, linear: FP8Linear, stored: Stored, grid: Grid) -> ExportPart:
    """Return the weight of a Linear that computes in high precision, but whose weight FSDP2 gathers in FP8. Forwards
    multiply with the dequantised weight, so this is exported."""
    entry = ExportedTensor(stored.name, "high", name, stored.computed_in, tuple(stored.value.shape))
    return ExportPart((entry,), lambda: (dequantised(linear, stored, grid),))


def _unfit(format: str, name: str, linear: FP8Linear, grids: Mapping[str, Known]) -> str:
    """Return the error about a weight whose scales the format cannot hold. It names formats that hold all weights."""
    grid, shape, by = grids[name]
    if by == "mx" and shape[1] % grid.width:
        return (
            f"{name}: rows of its weight have {shape[1]} elements, no multiple of {grid.width}, and readers of MXFP8 "
            "know no padding: give it another recipe (overrides), or name it in skip="
        )
    fitting = [each for each in FORMATS if all(strategy_of(each, *known) for known in grids.values())]
    instead = f"formats that fit: {', '.join(fitting)}" if fitting else "no format fits"
    scales = f"{type(linear.fp8_slots.recipe).__name__} has {grid.text(shape)} of its weight {tuple(shape)}"
    return f"{name}: {scales}, which format {format!r} cannot hold; {instead}"


# Folders ---------------------------------------------------------------------------------------------


def write_folder(
    path: str | os.PathLike[str],
    found: Export,
    config: Mapping[str, Any],
    writes: bool,
    gather: Callable[[str], Sequence[str]] | None,
    shard_bytes: int,
    origin: Origin,
) -> None:
    """Write an export to a new folder, with a certificate. COLLECTIVE if ``gather`` is given.

    Args:
        found: the export.
        config: the content of config.json, without ``quantization_config``. The same on all ranks.
        writes: True on the rank that writes.
        gather: COLLECTIVE: gets this rank's text, returns those of all ranks. None: no other rank takes part.
        shard_bytes: see ``Folder``.
        origin: see ``certificate_of``.

    Raises:
        ConfigurationError: on all ranks, if the folder exists or cannot be written, or ``config`` is not JSON. Nothing
            then remains of the export.
    """

    try:
        json.dumps(config)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"the model's config cannot be written as JSON: {error}") from None

    def agree(failure: str) -> None:
        """Raise on all ranks if any of them has a failure. COLLECTIVE if ``gather`` is given."""
        failures = [text for text in ([failure] if gather is None else gather(failure)) if text]
        if failures:
            raise ConfigurationError(failures[0])

    if not writes and gather is None:
        return
    folder = Folder(path, found.tensors, found.tied, shard_bytes) if writes else None
    try:
        agree("" if folder is None else _failure_of(folder.begin))
        failure = ""
        for tensor, value in found.stream():
            if folder is not None and not failure:  # After a failure, the other ranks still gather.
                failure = _failure_of(lambda: folder.write(tensor, value))  # noqa: B023
        if folder is not None and not failure:
            served = {**config, "quantization_config": found.quantization_config(folder.powers_of_two)}
            layout = found.format, "power_of_two" if folder.powers_of_two else "float32"
            certificate = partial(certificate_of, layout, found.tensors, found.recipes, found.tied, served, origin)
            failure = _failure_of(lambda: folder.finish(served, certificate))
        agree(failure)
    finally:
        if folder is not None:
            folder.close()


def _failure_of(act: Callable[[], None]) -> str:
    """Run ``act``. Return why it failed, as text; "" if it did not."""
    try:
        act()
    except ConfigurationError as error:
        return str(error)
    except OSError as error:
        return f"{error.filename or 'the export'} cannot be written: {error.strerror or error}"
    return ""


def config_of(model: nn.Module) -> dict[str, Any]:
    """Return the content of config.json for a model: its ``config``, as Transformers writes it; {} if it has none."""
    inner = _unwrapped(model)
    described: Any = getattr(inner, "config", None)
    if not hasattr(described, "to_dict"):
        return {}
    config: dict[str, Any] = described.to_dict()
    if not config.get("architectures"):
        config["architectures"] = [type(inner).__name__]
    return config
