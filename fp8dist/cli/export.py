"""``fp8dist export``: its flags, and the model of a checkpoint as its job would export it."""

from __future__ import annotations

import argparse
import glob
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

import fp8dist
from fp8dist.common.text import first_few, shortened
from fp8dist.errors import CheckpointError, ConfigurationError
from fp8dist.files.certificate import Origin
from fp8dist.files.entries import Source
from fp8dist.files.export import Export, listed, write_folder
from fp8dist.files.export_casts import Stored
from fp8dist.files.export_experts import expert_names, mixtures_of, require_served
from fp8dist.files.export_formats import FORMATS, require_e4m3
from fp8dist.files.sources import open_source
from fp8dist.modules.expert_layouts import mixture_of, read_layouts
from fp8dist.modules.foreign import expert_products
from fp8dist.state.recipe import Recipe
from fp8dist.state.slots import clean_fqn, plain_fqn
from fp8dist.state.storage import to_bytes, validated_slots
from fp8dist_kernels.formats import Role

_DTYPES = ("float32", "bfloat16", "float16")

Shapes = Mapping[str, tuple[int, tuple[int, ...]]]
"""By name of a parameter: place in the source, shape."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="DCP folder or torch.save file with FP8 state")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="the folder to write; it must be new")
    parser.add_argument(
        "--format", choices=tuple(FORMATS), default="compressed-tensors", help="how servers read weights and scales"
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="the model's config.json, to which quantization_config is added; "
        "its model_type says how experts are named",
    )
    add_model_flags(parser)
    parser.add_argument(
        "--shard-bytes",
        type=int,
        default=5_000_000_000,
        metavar="BYTES",
        help="size of a file, unless a tensor is larger",
    )
    parser.add_argument("--run", dest="name", metavar="NAME", help="a name of the run for the certificate, any text")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what the model of a checkpoint is."""
    parser.add_argument("--model", metavar="KEY", default="model", help="the checkpoint's key of the model")
    parser.add_argument(
        "--gathered-in",
        choices=_DTYPES,
        help="param_dtype of FSDP's mixed precision, from which weights are cast; default: the checkpoint's "
        "run.gathered_in, else the stored dtype",
    )


def export(options: argparse.Namespace) -> str:
    """Write the folder, and return a line that says what is in it.

    Raises:
        CheckpointError: the checkpoint cannot be read, or has no FP8 state that all ranks share.
        ConfigurationError: the format does not fit, or the folder cannot be written.
    """
    if options.shard_bytes < 1:
        raise ConfigurationError(f"--shard-bytes must be above 0, got {options.shard_bytes}")
    config = {} if options.config is None else read_config(options.config)
    found, step = exported(options.checkpoint, options.format, options, config)
    write_folder(options.out, found, config, True, None, options.shard_bytes, Origin(step, options.name))
    fp8 = sum(tensor.role == "weight" for tensor in found.tensors)
    return f"{options.out}: {len(found.tensors)} tensors, {fp8} weights in FP8, after step {step}"


def exported(path: str, format: str, options: argparse.Namespace, config: Mapping[str, Any]) -> tuple[Export, int]:
    """Return what the job of a checkpoint would export, and the steps of its FP8 state.

    Args:
        options: the flags that say what the model is.
        config: of the model. Its ``model_type`` gives experts their names; without one, that of the job's model does.

    Raises:
        CheckpointError: the checkpoint cannot be read, or has no FP8 state that all ranks share.
        ConfigurationError: the format does not fit.
    """
    source = open_source(path)
    state, info = _shared_state(source)
    shapes = _parameters(source, options.model)
    kind, layouts = read_layouts(info, path)
    skeleton = _with_mixtures(config.get("model_type", kind), layouts, shapes)
    registered = _registered(state)
    _add_linears(skeleton, source, state, shapes, registered)
    manager = _restored(skeleton, state, to_bytes(state, info), registered)
    settings = _settings(info, path)
    names = expert_names(skeleton)
    mixtures = dict(mixtures_of(skeleton, names))
    modules = {name: each for name, each in skeleton.named_modules() if isinstance(each, nn.Linear)}
    matrices = [name for name, (_, shape) in shapes.items() if name.endswith(".weight") and len(shape) == 2]
    others: dict[str, nn.Module] = {name.removesuffix(".weight"): nn.Identity() for name in matrices}
    dtype = options.gathered_in or _noted(source)
    stored = _stored(source, shapes, f"{options.model}.", bool(settings.get("fp8_all_gather")), dtype)
    return listed(format, stored, {**others, **modules}, mixtures, names), manager.steps


def read_config(path: Path) -> dict[str, Any]:
    """Return the content of a model's config.json.

    Raises:
        ConfigurationError: it cannot be read.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--config {path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"--config {path} is not a JSON object")
    return config


def _shared_state(source: Source) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the FP8 state that all ranks share, and its notes."""
    if [key.rpartition(".")[2] for key in source.states] == ["shared"]:
        return next(iter(source.states.values()))
    found = first_few(list(source.states)) if source.states else "none"
    raise CheckpointError(f"{source.path}: expected one FP8 state that all ranks share, found {found}")


def _parameters(source: Source, key: str) -> Shapes:
    """Return (place in the source, shape) of the model's tensors, by the names that the FP8 state has for modules."""
    prefix = f"{key}."
    found: dict[str, tuple[int, tuple[int, ...]]] = {}
    mine = [entry.name.removeprefix(prefix) for entry in source.entries if entry.name.startswith(prefix)]
    count = Counter(map(clean_fqn, mine))
    for place, entry in enumerate(source.entries):
        if entry.kind != "parameter" or not entry.name.startswith(prefix):
            continue
        name = clean_fqn(entry.name.removeprefix(prefix))
        if count[name] > 1 and len(entry.shape) < 2:  # Not in FP8: a part that is called "module" may tell them apart.
            name = plain_fqn(entry.name.removeprefix(prefix))
        if _EXTRA_STATE_KEY_SUFFIX in name.split("."):
            continue
        if name in found:
            raise CheckpointError(f"{source.path}: has {name} twice, also under {entry.name}")
        found[name] = place, entry.shape
    if not found:
        keys = dict.fromkeys(e.name.partition(".")[0] for e in source.entries if e.kind == "parameter")
        there = first_few([repr(shortened(key)) for key in keys], 8)
        raise CheckpointError(
            f"{source.path}: has no tensors of {key!r}, its keys are {there}: --model names the key of the model"
        )
    return found


def _settings(info: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the settings that a job notes with its FP8 state. None are known of a state without notes.

    Raises:
        CheckpointError: they are malformed.
        ConfigurationError: the job evaluates in high precision.
    """
    settings = info.get("settings", {})
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path}: the FP8 state has malformed settings")
    for name, off in (("eval_precision", "high"), ("enabled", False)):
        if settings.get(name) == off:
            raise ConfigurationError(f"nothing to export in FP8: the job evaluates in high precision ({name}={off!r})")
    return settings


def _with_mixtures(kind: Any, layouts: Mapping[str, Mapping[str, bool]], shapes: Shapes) -> nn.Module:
    """Return a model of type ``kind`` without memory that has the mixtures of a checkpoint, under their names."""
    whole = nn.Module()
    whole.config = SimpleNamespace(model_type=kind)  # type: ignore[assignment]
    for name, layout in layouts.items():
        require_served(name, whole, False)
        mixture = mixture_of(layout, lambda each: shapes.get(f"{name}.{each}", (0, ()))[1])  # noqa: B023
        if mixture is not None:
            _place(whole, name, mixture)
    return whole


def _place(whole: nn.Module, name: str, module: nn.Module) -> None:
    """Add a module under its name, with modules above it."""
    *above, last = name.split(".")
    for part in above:
        if part not in whole._modules:
            whole._modules[part] = nn.Module()  # add_module() refuses names such as "type", which work in a model.
        whole = whole._modules[part]  # type: ignore[assignment]
    whole._modules[last] = module


def _registered(state: Mapping[str, Any]) -> set[str]:
    """Return the names of the FP8 state that are no Linear's, and no expert's: ``manager.register`` takes any roles."""
    roles: dict[str, set[str]] = {}
    for slot in validated_slots(state):
        roles.setdefault(slot.fqn, set()).add(slot.role)
    return {name for name, of in roles.items() if not {Role.INPUT.value, Role.GRAD_OUTPUT.value} <= of}


def _add_linears(
    skeleton: nn.Module, source: Source, state: Mapping[str, Any], shapes: Shapes, registered: Set[str]
) -> None:
    """Add the Linears of the FP8 state to a model without memory, under their names.

    Args:
        registered: names that are left out.

    Raises:
        CheckpointError: the checkpoint lacks a weight.
        ConfigurationError: a weight is cast to E5M2, shared by two Linears, stored transposed, as its bias shows, or
            of experts of which the state does not say how they are stored, or as ``require_served`` refuses them.
    """
    slots = validated_slots(state)
    weights = {slot.fqn: format for slot, format in zip(slots, state["formats"]) if slot.role == Role.WEIGHT.value}
    mixtures = _products(skeleton)
    for name in sorted({slot.fqn for slot in slots} - registered):
        if name not in weights:
            raise ConfigurationError(
                f"{name} shares its weight with another module: use fp8dist.export(manager) in the job"
            )
        require_e4m3(name, weights[name])
        holder, _, expert = name.rpartition(".")
        if expert.isdecimal() and holder in mixtures:
            require_served(mixtures[holder], skeleton.get_submodule(mixtures[holder]), True)
            continue
        if expert.isdecimal() and len(shapes.get(f"{holder}_proj", (0, ()))[1]) == 3:
            raise ConfigurationError(
                f"{holder}_proj holds the weights of experts, but its FP8 state does not say in which layout: load "
                "it into a job, and save it again or use fp8dist.export(manager)"
            )
        place, shape = shapes.get(f"{name}.weight", (0, ()))
        if len(shape) != 2 or source.entries[place].dtype not in (*_DTYPES, "float64"):
            raise CheckpointError(f"{source.path}: has FP8 state of {name}, but no floating-point weight of it")
        if shapes.get(f"{name}.bias", (0, (shape[0],)))[1] != (shape[0],):
            raise ConfigurationError(f"{name}: its weight is stored as [in_features, out_features]: no format has that")
        _place(skeleton, name, nn.Linear(shape[1], shape[0], bias=False, device="meta"))


def _products(skeleton: nn.Module) -> dict[str, str]:
    """Return the fqn of the mixture of experts by the fqn of each product, which is the prefix of its slots' fqns."""
    mixtures = ((name, expert_products(module) or ()) for name, module in skeleton.named_modules())
    return {f"{name}.{product.removesuffix('_proj')}": name for name, products in mixtures for product in products}


def _restored(skeleton: nn.Module, state: Mapping[str, Any], data: bytes, registered: Set[str]) -> fp8dist.StateManager:
    """Prepare the skeleton as the job prepared its model, and load its state, without the slots that were registered
    under other names."""
    recipes = [Recipe.from_description(described) for described in state["recipes"]]
    products = _products(skeleton)
    of: dict[str, Any] = dict.fromkeys(products.values(), "high")  # Mixtures without slots.
    for slot, number in zip(validated_slots(state), state["recipe_of"]):
        of[products.get(slot.fqn.rpartition(".")[0], slot.fqn)] = recipes[number]
    overrides = {glob.escape(name): recipe for name, recipe in of.items() if name not in registered}
    manager = fp8dist.prepare(skeleton, recipes[0], skip=None, overrides=overrides, amax_sync=False, check_every=0)
    manager.load_state_dict({next(iter(manager.state_dict())): data}, strict=not registered)
    return manager


def _noted(source: Source) -> str | None:
    """Return the dtype in which FSDP gathers weights, if the job has noted it, as the example job does."""
    place = next((i for i, entry in enumerate(source.entries) if entry.name == "run.gathered_in"), None)
    text = "" if place is None else bytes(source.read(place).tolist()).decode(errors="replace")
    return text if text in _DTYPES else None


def _stored(source: Source, shapes: Shapes, prefix: str, gathered: bool, dtype: str | None) -> Iterator[Stored]:
    for name, (place, shape) in shapes.items():
        own = getattr(torch, source.entries[place].dtype)
        computed = own if dtype is None or not own.is_floating_point else getattr(torch, dtype)
        value = torch.empty(shape, dtype=own, device="meta")
        plain = plain_fqn(source.entries[place].name.removeprefix(prefix))
        device = torch.device("cpu")
        yield Stored(name, value, partial(source.read, place), device, computed, gathered=gathered, plain=plain)
