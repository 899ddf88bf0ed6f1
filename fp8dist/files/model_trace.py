"""``fp8dist.trace``: write the digests of one forward and backward, in execution order, to a file."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fp8dist.checks.contents import ArenaContent, Digester, NamedTensor, TensorContent
from fp8dist.checks.likeness import kernel_flags, likeness
from fp8dist.checks.outputs import Outputs
from fp8dist.checks.random_state import random_state
from fp8dist.errors import ConfigurationError
from fp8dist.files.traces import Head, Plain, trace_bytes
from fp8dist.job.checkpoint import with_rank
from fp8dist.job.manager import Internals, managers_in
from fp8dist.state.groups import local_part, own_rank, world_size
from fp8dist.state.slots import clean_fqn
from fp8dist.state.storage import write_file


@contextlib.contextmanager
def trace(model: nn.Module, path: str | os.PathLike[str]) -> Iterator[None]:
    """Write the digests of the forward and backward in the block to a file, for ``fp8dist check``. Local.

    The file has a line for each output of a module and each gradient of an output, in execution order: module, call,
    shape, dtype, a digest of 128 bits, and a flag for NaN and infinity. Its head has the facts that select kernels
    (hardware, versions, flags), and digests of everything that the step starts from: the random state, parameters and
    buffers, the FP8 state and the inputs of the model. The block may have several microbatches.

    Works for any model, with or without FP8. For a DTensor or a shard of FSDP, the digest covers this rank's part.
    Modules inside a compiled module have no lines. Each tensor is read once more; its bits do not change.

    Args:
        model: the module to follow, also inside DDP, FSDP or torch.compile.
        path: file to write when the block ends, atomically. ``{rank}`` is replaced by the rank, because each rank that
            traces needs a file of its own. Equal steps give equal bytes.

    Raises:
        ConfigurationError: ``model`` is not a module, or no module of it was called in Python. Nothing was written.
        OSError: the file cannot be written.
    """
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"trace() takes the model (an nn.Module) that the step runs, got {model!r:.80}")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    digester = Digester()
    inputs: list[str | None] = []
    head = Head(
        own_rank(),
        world_size(),
        socket.gethostname(),
        likeness(device),
        {"training": model.training, **kernel_flags()},
        _start(model, device, digester),
    )
    outputs = Outputs(model, digester)
    with _inputs_into(inputs, model, digester), outputs.taking():
        yield
    start = {**head.start, "inputs": _joined(inputs)}
    write_file(with_rank(path), trace_bytes(head._replace(start=start), outputs.taken()))


def _start(model: nn.Module, device: torch.device, digester: Digester) -> dict[str, Plain]:
    """Return digests of all that the step starts from but its inputs: by name, None if there is none. Waits for the
    device."""
    kept = (*model.named_parameters(), *model.named_buffers())
    arenas = [sync.arena for manager in managers_in(model) for sync in Internals(manager).cycle.syncs]
    return {
        "random numbers": _digest("random", random_state(device)._asdict().items(), digester),
        "parameters and buffers": _digest("kept", kept, digester),
        "FP8 state": _joined([_hex(ArenaContent(arena).digests(digester)) for arena in arenas if len(arena)]),
    }


def _digest(kind: str, tensors: Sequence[tuple[str, Tensor]] | Any, digester: Digester) -> str | None:
    named = [NamedTensor(clean_fqn(name), local_part(tensor.detach())) for name, tensor in tensors]
    return _hex(TensorContent(kind, named).digests(digester)) if named else None


def _hex(digests: Tensor) -> str:
    return hashlib.blake2b(digests.numpy().astype("<i8").tobytes(), digest_size=16).hexdigest()


def _joined(digests: Sequence[str | None]) -> str | None:
    """Return one digest of several digests; None if there are none, or one of them is None."""
    if not digests or None in digests:
        return None
    return hashlib.blake2b("".join(map(str, digests)).encode(), digest_size=16).hexdigest()


@contextlib.contextmanager
def _inputs_into(found: list[str | None], model: nn.Module, digester: Digester) -> Iterator[None]:
    """In the block, append to ``found`` a digest of the input tensors of each call of the model."""
    if model._compiled_call_impl is not None:  # After model.compile(), the hook would be compiled with the model.
        yield
        return

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            found.append(_digest("input", [(str(i), leaf) for i, leaf in enumerate(leaves)], digester))

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
