"""Megatron-Core: ``prepare`` before its DistributedDataParallel, ``attach`` to its optimizer."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

import fp8dist
from fp8dist.errors import ConfigurationError
from fp8dist.integrations.stacks import FP8Steps, install
from fp8dist.job.manager import WHOLE, Internals
from fp8dist.state.groups import has_base
from fp8dist.state.recipe import Recipe

try:
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.optimizer.optimizer import MegatronOptimizer
except ImportError as error:
    raise ImportError(install("Megatron-Core", "megatron")) from error

__all__ = ["attach", "prepare"]

logger = logging.getLogger("fp8dist")

KEY = "fp8dist"
"""The FP8 state in the optimizer's part of a checkpoint."""

HEAD, EXPERTS = "*output_layer", "*.experts.*"


def prepare(
    model: nn.Module | Sequence[nn.Module], recipe: Recipe | None = None, **options: Any
) -> fp8dist.StateManager:
    """Convert the Column- and RowParallelLinears of a model to FP8, in place, and return their manager. Local.

    Call it after ``initialize_model_parallel``, before Megatron's DistributedDataParallel wraps the model. The ranks of
    this pipeline stage share FP8 state: those of tensor, data and context parallelism. Those of an expert share the
    expert's. An output layer with a weight of its own stays in high precision, unless ``skip`` has "!*output_layer".

    Args:
        model: this rank's model, or the list of its chunks (virtual pipeline stages).
        recipe, options: as for ``fp8dist.prepare``. ``group`` and ``groups``: by default, as above.

    Raises:
        ConfigurationError: see ``fp8dist.prepare``; or the model's configuration has something that is not supported.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    for chunk in chunks:
        _require_supported(getattr(chunk, "config", None))
    whole = chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks)
    manager = fp8dist.prepare(whole, recipe, **_with_defaults(options, whole))
    if len(chunks) > 1:
        for chunk in chunks:  # The manager does not keep the list alive.
            chunk.__dict__[WHOLE] = whole
    return manager


def _with_defaults(options: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return the options of ``fp8dist.prepare`` with the groups of ranks, and what stays in high precision."""
    if "group" not in options:
        if not parallel_state.is_initialized():
            raise ConfigurationError("call Megatron-Core's initialize_model_parallel() before prepare()")
        options["group"] = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    names = [name for name, module in model.named_modules() if getattr(module, "weight", None) is not None]
    skip = options.get("skip", ())
    if skip is not None:
        skip = [skip] if isinstance(skip, str) else [*skip]
        heads = [HEAD] if any(name.endswith("output_layer") for name in names) else []
        options["skip"] = [*heads, *skip]
    if any(".experts." in name for name in names) and "groups" not in options and EXPERTS not in (skip or ()):
        options["groups"] = _expert_groups()
    return options


def attach(manager: fp8dist.StateManager, optimizer: Any) -> None:
    """Tie the manager of a prepared model to the optimizer that trains it. COLLECTIVE.

    From now on an FP8 step ends with each ``optimizer.step()`` that updates parameters. Steps that Megatron skips
    because gradients are not finite do not count. ``optimizer.sharded_state_dict`` and ``load_state_dict`` include the
    FP8 state.

    Args:
        manager: of ``prepare``.
        optimizer: what ``get_megatron_optimizer`` returned.

    Raises:
        ConfigurationError: the optimizer trains another model, or something is attached already.
        ManifestMismatchError: see ``StateManager.attach``.
    """
    if not isinstance(optimizer, MegatronOptimizer):
        raise ConfigurationError(
            "attach(manager, optimizer) needs the optimizer that get_megatron_optimizer() returns, "
            f"got {type(optimizer).__name__}"
        )
    if Internals(manager).cycle.job.attached or (
        isinstance(optimizer, FP8Steps) and Internals(optimizer.fp8_manager).cycle.job.attached
    ):
        raise ConfigurationError(
            "the manager or the optimizer is attached already: leave out manager.attach(), and attach an optimizer once"
        )
    _require_trained(Internals(manager).model, optimizer)
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    if any(one.optimizer.state for one in chained if getattr(one, "optimizer", None) is not None):
        logger.warning("fp8dist: the optimizer has a state before attach(): if it was loaded, FP8 state was left out")
    # Without the comparison of what ranks start with: programs load their checkpoint after they have an optimizer,
    # maybe into uninitialised memory (perform_initialization=False).
    manager.attach(boundary="manual", start=None)
    # Weights change in the optimizer's step, and where modules load a state_dict.
    Internals(manager).cycle.reuse_casts(True)
    # Checks ask Megatron's DDP what the distributed optimizer gathers late or reduces in parts.
    optimizer.fp8_watched = nn.ModuleList(getattr(optimizer, "model_chunks", []))
    if len(optimizer.fp8_watched):
        Internals(manager).cycle.checker.attached(optimizer.fp8_watched, optimizer)
    _OptimizerSteps.add_to(optimizer, manager)


class _OptimizerSteps(MegatronOptimizer, FP8Steps):
    """Added to the class of an optimizer. ``fp8_watched``: the wrapped model that its checks compare; empty unless the
    optimizer is distributed."""

    fp8_watched: nn.ModuleList

    def step(self: Any) -> Any:
        """Take a step, and end the FP8 step if parameters were updated. COLLECTIVE."""
        updated, *others = super().step()
        self.end_fp8_step(updated)
        return (updated, *others)

    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the optimizer's state with the FP8 state. As Megatron's, COLLECTIVE for some optimizers."""
        state = super().sharded_state_dict(*args, **kwargs)
        return {**state, KEY: {key: _shard(key, value) for key, value in self.fp8_manager.state_dict().items()}}

    def load_state_dict(self: Any, state_dict: Any) -> None:
        """Load the optimizer's state, and the FP8 state. COLLECTIVE if the checkpoint has none: scales begin anew."""
        fp8 = None
        if isinstance(state_dict, dict):
            fp8 = state_dict.get(KEY)
            state_dict = {key: value for key, value in state_dict.items() if key != KEY}
        super().load_state_dict(state_dict)
        self.load_fp8(fp8, "the checkpoint")


def _shard(key: str, state: bytes) -> ShardedObject:
    """Return what one rank of those that share the state saves, and each of them loads."""
    first = re.match(r"ranks?(\d+)", key)
    replica = dist.get_rank() - (int(first[1]) if first else 0)
    return ShardedObject(f"{KEY}.{key}", state, (1,), (0,), replica_id=replica)


def _expert_groups() -> dict[str, dist.ProcessGroup]:
    """Return the group for experts, unless all ranks of the stage hold the same ones."""
    if parallel_state.get_expert_model_parallel_world_size() == 1:
        return {}
    if parallel_state.get_expert_tensor_parallel_world_size() > 1:
        raise ConfigurationError(
            "Megatron-Core has no group of the ranks that share an expert if expert_tensor_parallel_size is above 1: "
            f'set it to 1, keep the experts in high precision, skip="{EXPERTS}", or give prepare groups='
        )
    return {EXPERTS: parallel_state.get_expert_data_parallel_group()}


def _require_supported(config: Any) -> None:
    """Raise ConfigurationError for what the configuration of a model has and FP8 cannot serve."""
    refused = {
        "fp8": None,
        "fp4": None,
        "cuda_graph_impl": "none",
        "defer_embedding_wgrad_compute": False,
        "tp_comm_overlap": False,
        "cpu_offloading": False,
    }
    for name, off in refused.items():
        value = getattr(config, name, off)
        if value not in (off, None, False):
            raise ConfigurationError(f"fp8dist does not support {name}={value!r} of Megatron-Core: set it to {off!r}")


def _require_trained(model: nn.Module, optimizer: Any) -> None:
    """Raise ConfigurationError unless the optimizer steps parameters of the model, or main parameters of theirs."""
    chunks = getattr(optimizer, "model_chunks", [])  # Megatron's distributed optimizer holds parts of parameters.
    unsupported = next((chunk for chunk in chunks if not has_base(chunk, "DistributedDataParallel")), None)
    if unsupported is not None:
        raise ConfigurationError(
            f"fp8dist does not support {type(unsupported).__name__} of Megatron-Core: use DistributedDataParallel"
        )
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    held |= {id(parameter) for chunk in chunks for parameter in chunk.parameters()}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not any(id(p) in held or id(getattr(p, "main_param", None)) in held for p in trainable):
        raise ConfigurationError("attach(manager, optimizer): the optimizer does not train the model that was prepared")
