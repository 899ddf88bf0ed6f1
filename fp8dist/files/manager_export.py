"""Exports of a model in training: as a folder for inference servers, or as a stream for an engine in the same job."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn

from fp8dist.common.names import check_keywords, require_int
from fp8dist.errors import ConfigurationError
from fp8dist.files.certificate import Origin
from fp8dist.files.export import config_of, export_of, write_folder
from fp8dist.files.export_files import destination
from fp8dist.job.manager import Internals, StateManager, require_held
from fp8dist.state.groups import SyncGroup, own_rank, world_size


@check_keywords("fp8dist.export")
def export(
    manager: StateManager,
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    format: str = "compressed-tensors",
    shard_bytes: int = 5_000_000_000,
    run: str | None = None,
) -> None:
    """Write the model as a folder for inference servers, with the FP8 bytes and scales with which an eval forward
    multiplies now. COLLECTIVE where weights are sharded (FSDP2, tensor parallelism). Otherwise only the lowest rank of
    the group needs to call this, and writes; calls of other ranks do nothing.

    Nothing is quantised again, and training continues as if nothing had been exported. The folder has
    ``model-…-of-….safetensors``, ``model.safetensors.index.json``, ``config.json`` and
    ``fp8dist-certificate.json``, with which ``fp8dist verify`` compares a served model. It gets its name only when it
    is complete. One module's tensors are in memory at a time.

    Args:
        manager: the StateManager of the model.
        path: the folder. It must not exist, or be empty.
        model: the model as the training loop calls it, or as you prepared it. None: the prepared model.
        format: "compressed-tensors" (a scale per tensor or per row; fixed ``input_scale`` with delayed scaling),
            "compressed-tensors-channel" (the same, always a scale per row), "compressed-tensors-mxfp8" (E8M0 per
            1 x 32, of ``MXFP8Scaling``), or "block" (128 x 128, as DeepSeek-V3).
        shard_bytes: largest size of the tensors in one file, in bytes. A larger tensor has a file of its own.
        run: a name of this run for the certificate, any text.

    Raises:
        ConfigurationError: a recipe has finer scales than the format; nothing is in FP8; weights are stored in a
            way for which no format has a place; or the folder exists or cannot be written. The message says what to do.
    """
    require_int("shard_bytes", shard_bytes, 1, what="a number of bytes")
    path = destination(path)
    cycle = Internals(manager).cycle
    whole = _exportable(manager, model)
    if len({group.identity for group in cycle.groups if group is not None}) > 1:
        raise ConfigurationError(
            "export(): several groups of ranks share FP8 state (groups=), so ranks may hold different modules, "
            "such as experts: collect fp8dist.exported(manager) of all ranks yourself"
        )
    found = export_of(cycle, whole, format)
    group = next((group for group in cycle.groups if group is not None), None)
    if found.sharded and group is None:
        group = SyncGroup(dist.group.WORLD)  # type: ignore[arg-type]
    writes = own_rank() == (0 if group is None else min(group.ranks))
    gather = group.gather if found.sharded and group is not None else None
    verified = manager.verified
    last = verified.last_check
    origin = Origin(
        manager.steps,
        None if run is None else str(run),
        world_size(),
        verified.proven_step,
        verified.checked_step,
        None if last is None else {"step": last.step, **last.fields()},
    )
    write_folder(path, found, config_of(whole), writes, gather, shard_bytes, origin)


@check_keywords("fp8dist.exported")
def exported(
    manager: StateManager, model: nn.Module | None = None, format: str = "compressed-tensors"
) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over (name, tensor) of all tensors that ``export`` writes, for an inference engine in the
    same job. COLLECTIVE where weights are sharded: iterate to the end on all ranks, between two steps.

    Every rank gets every tensor, whole and on its own device, in the same order. One module's tensors are in memory
    at a time. Tensors in high precision may be the model's own: copy them before you change them.

    Raises:
        ConfigurationError: as ``export``; or a step ended during the iteration.
    """
    found = export_of(Internals(manager).cycle, _exportable(manager, model), format)
    return ((tensor.name, value) for tensor, value in found.stream())


def _exportable(manager: StateManager, model: nn.Module | None) -> nn.Module:
    if model is None:
        return Internals(manager).model
    require_held(manager, model, "export(model)")
    return model
