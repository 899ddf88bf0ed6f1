"""The reference: what one process computes modulo P, and its file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import resolve_name
from torch.utils._pytree import tree_leaves

from fp8dist.errors import CheckpointError, ConfigurationError
from fp8dist.exact.field import P, reduced
from fp8dist.exact.modes import arithmetic, to_residues
from fp8dist.state.groups import local_part
from fp8dist.state.slots import clean_fqn

_FORMAT = "fp8dist.exact 2"


class Reference(NamedTuple):
    """What one process computed. All tensors are canonical residues on the CPU: int32 in the file, int64 when read.

    ``parameters``: by name. ``shards``: by name of a parameter that is trained, each data shard's contribution to its
    gradient, a shard per row; in the order of the backward. ``outputs``: by module, in the order in which they end, the
    output of each call. ``ties``: further names of a parameter, and its name here. ``surrogates``: of the functions
    that the user's replace.
    """

    parameters: dict[str, Tensor]
    shards: dict[str, Tensor]
    outputs: dict[str, list[Tensor]]
    ties: dict[str, str]
    surrogates: list[str]


def record(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Sequence[Tensor]],
    shards: Any,
    path: str | os.PathLike[str],
    *,
    surrogates: Mapping[Callable[..., Any], Callable[..., Any]] | None = None,
) -> None:
    """Compute one step in this process modulo P, and write the reference that ``compare`` reads. Local.

    Args:
        model: the whole model, neither wrapped nor sharded, on any device. Its parameters become residues, so it is of
            no further use.
        loss: gets ``model`` and ``shards``. It returns a loss for each data shard, in order. Their sum is the loss of
            the step: each is divided by what the whole step is divided by, such as its number of tokens.
        shards: the batch, in any form that ``loss`` takes.
        path: of the file to write, safetensors.
        surrogates: as of ``arithmetic``.

    Raises:
        ConfigurationError: ``loss`` returns something else than scalars, or reaches no parameter, or all gradients are
            zero.
    """
    to_residues(model)
    named = {clean_fqn(name): parameter for name, parameter in model.named_parameters()}
    names = {id(parameter): name for name, parameter in named.items()}
    every = model.named_parameters(remove_duplicate=False)
    ties = {clean_fqn(name): names[id(each)] for name, each in every if names[id(each)] != clean_fqn(name)}
    parameters = {name: stored(parameter) for name, parameter in named.items()}
    with outputs_of([model], [str]) as outputs, arithmetic(surrogates):
        returned = loss(model, shards)
        losses = list(returned) if isinstance(returned, Iterable) and not isinstance(returned, Tensor) else []
        if not losses or any(not isinstance(each, Tensor) or each.numel() != 1 for each in losses):
            raise ConfigurationError(f"loss must return a list with a scalar tensor for each shard, got {returned!r}")
        gradients = _gradients(losses, {name: each for name, each in named.items() if each.requires_grad})
    if not any(gradients.values()):
        raise ConfigurationError("the backward of loss(model, shards) reaches no parameter of the model")
    shares = {
        name: torch.stack([stored(each.get(shard, torch.zeros_like(named[name]))) for shard in range(len(losses))])
        for name, each in gradients.items()
    }
    if not any(bool((each.sum(0) % P).any()) for each in shares.values()):
        raise ConfigurationError("the backward of loss(model, shards) gives zero for every parameter")
    sent = {name: list(map(stored, each)) for name, each in outputs.items()}
    _write(Reference(parameters, shares, sent, ties, replaced_by(surrogates)), path)


def _gradients(losses: Sequence[Tensor], trained: Mapping[str, nn.Parameter]) -> dict[str, dict[int, Tensor]]:
    """Return for each parameter, in the order of the backward, its gradient of each loss that reaches it."""
    found: dict[str, dict[int, Tensor]] = {}
    for parameter in trained.values():
        parameter.grad = None
    for shard, loss in enumerate(losses):

        def take(name: str, parameter: Tensor, shard: int = shard) -> None:
            assert parameter.grad is not None
            found.setdefault(name, {})[shard] = parameter.grad  # The last of several, with checkpoints of the old kind.

        hooks = [each.register_post_accumulate_grad_hook(partial(take, name)) for name, each in trained.items()]
        if loss.requires_grad:  # Not that of a shard without targets.
            loss.backward(retain_graph=shard + 1 < len(losses))
        for hook, parameter in zip(hooks, trained.values()):
            hook.remove()
            parameter.grad = None
    return found | {name: {} for name in trained if name not in found}


@contextmanager
def outputs_of(
    models: Sequence[nn.Module], renames: Sequence[Callable[[str], str]]
) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the outputs of all modules within the block: by module, in the order in which they first end, the first
    tensor of the output of each call (of a DTensor this rank's part). Repeated forwards of checkpoints do not count."""
    outputs: dict[str, list[Tensor]] = {}

    def keep(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # A backward runs, and a checkpoint in it.
            return
        first = next((local_part(each) for each in tree_leaves(output) if isinstance(each, Tensor)), None)
        shape = first is None or first.is_meta or isinstance(first, FakeTensor)  # Pipelines infer shapes.
        if first is not None and first.is_floating_point() and not shape:
            outputs.setdefault(name, []).append(first.detach().clone())

    hooks = [
        module.register_forward_hook(partial(keep, rename(clean_fqn(name))))
        for model, rename in zip(models, renames)
        for name, module in model.named_modules()
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


def stored(tensor: Tensor) -> Tensor:
    """Return residues as they are sent and written: canonical, int32, on the CPU, in memory of their own."""
    return reduced(tensor.detach().double()).to("cpu", torch.int32).contiguous().clone()


def replaced_by(surrogates: Mapping[Callable[..., Any], Callable[..., Any]] | None) -> list[str]:
    """Return the names of the functions that surrogates replace, sorted. What replaces them may differ: in a job it may
    communicate."""
    return sorted(resolve_name(each) or getattr(each, "__qualname__", str(each)) for each in surrogates or ())


def _write(reference: Reference, path: str | os.PathLike[str]) -> None:
    tensors = {f"parameter/{name}": tensor for name, tensor in reference.parameters.items()}
    tensors |= {f"shards/{name}": tensor for name, tensor in reference.shards.items()}
    for name, calls in reference.outputs.items():
        tensors |= {f"output/{call}/{name}": tensor for call, tensor in enumerate(calls)}
    index = {
        "order": list(reference.shards),
        "outputs": {name: len(calls) for name, calls in reference.outputs.items()},
        "ties": reference.ties,
        "surrogates": reference.surrogates,
    }
    save_file(tensors, path, {"format": _FORMAT, "prime": str(P), "index": json.dumps(index)})


def read_reference(path: str | os.PathLike[str]) -> Reference:
    """Read the file that ``record`` wrote. Local.

    Raises:
        CheckpointError: it cannot be read, is another file, or has another prime.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if (metadata.get("format"), metadata.get("prime")) != (_FORMAT, str(P)):
                raise CheckpointError(f"{path}: not written by fp8dist.exact.record of this version")
            index = json.loads(metadata["index"])
            tensors = {name: file.get_tensor(name).long() for name in file.keys()}  # noqa: SIM118 (it is no dict)
        outputs = index["outputs"].items()
        return Reference(
            {name.removeprefix("parameter/"): each for name, each in tensors.items() if name.startswith("parameter/")},
            {name: tensors[f"shards/{name}"] for name in index["order"]},
            {name: [tensors[f"output/{call}/{name}"] for call in range(count)] for name, count in outputs},
            index["ties"],
            index["surrogates"],
        )
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None
