"""``compare``: a parallel job's step against the reference of one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8dist.common.text import first_few
from fp8dist.errors import ConfigurationError, Fp8DistError
from fp8dist.exact.modes import arithmetic, to_residues
from fp8dist.exact.outputs import judge_outputs
from fp8dist.exact.placement import HeldPart
from fp8dist.exact.reference import Reference, outputs_of, read_reference, replaced_by, stored
from fp8dist.exact.relations import UNEXPLAINED
from fp8dist.exact.shards import judge_parameters, swapped
from fp8dist.exact.verdict import ExactFinding, ExactReport, Holding, judge_gradients
from fp8dist.state.accord import Accord
from fp8dist.state.groups import SyncGroup, is_dtensor, own_rank, world_size
from fp8dist.state.slots import clean_fqn

T = TypeVar("T")

Computed = tuple[dict[str, Tensor | None], dict[str, list[Tensor]]]
"""What a rank sends after its step: gradients by parameter, and outputs by module."""


def compare(
    model: nn.Module | Sequence[nn.Module],
    step: Callable[[], Any],
    path: str | os.PathLike[str],
    *,
    rename: Callable[[str], str] | Sequence[Callable[[str], str]] = lambda name: name,
    surrogates: Mapping[Callable[..., Any], Callable[..., Any]] | None = None,
) -> ExactReport:
    """Run one step of a parallel job modulo P, and compare it with the reference. COLLECTIVE: all ranks of the job.

    Parameters are compared first. If they differ, the step does not run.

    Args:
        model: this rank's model, wrapped and sharded as in the job; for pipelines its stage or stages. Parameters
            become residues, so it is of no further use.
        step: forward and backward of one step, with accumulation or a pipeline's schedule as in the job, on the data of
            the reference; without clipping and without the optimizer.
        path: of the file that ``record`` wrote. Rank 0 reads it.
        rename: from a name of a parameter or module in ``model`` to its name in the reference, for stages whose names
            have other prefixes; or such a function for each model. Prefixes of DDP and of checkpoint wrappers are
            removed before.
        surrogates: as of ``arithmetic``, for the same functions as those that ``record`` got.

    Returns:
        The report, the same on all ranks. ``str(report)`` is the verdict in sentences.

    Raises:
        ConfigurationError: a parameter has a name or a shape that the reference has not; or ``record`` got surrogates
            for other functions; or another rank failed: the message says where. A rank whose ``step`` fails raises at
            once, and those that wait for it in a collective of the step wait as in the job.
        CheckpointError: the file cannot be read.
    """
    models = [model] if isinstance(model, nn.Module) else list(model)
    renames = [rename] * len(models) if callable(rename) else list(rename)
    accord = None
    if world_size() > 1:
        world = SyncGroup(dist.group.WORLD)  # type: ignore[arg-type]
        accord = Accord(world, "exact.compare()", world.timeout)
    named = _on_all_ranks(accord, "the conversion of the model", lambda: _converted(models, renames))
    reference: list[Reference] = []  # On rank 0 alone.
    parts: list[Mapping[str, HeldPart]] = []

    def judge_held(held: Sequence[tuple[list[str], Mapping[str, Tensor]]]) -> ExactReport:
        reference.append(read_reference(path))
        for rank, (replaced, _) in enumerate(held):
            if replaced != (recorded := reference[0].surrogates):
                raise ConfigurationError(
                    f"exact.record got surrogates for {first_few(recorded)}, and exact.compare on rank {rank} for "
                    f"{first_few(replaced)}: give both surrogates for the same functions, also for unused ones"
                )
        findings, placed = judge_parameters(reference[0], [parameters for _, parameters in held])
        parts.extend(placed)
        return ExactReport(tuple(findings), (), 0)

    whole = {name: _whole(parameter) for name, parameter in named.items()}
    report = _on_rank_0(judge_held, (replaced_by(surrogates), whole))
    if not report.equal:
        return report
    for parameter in named.values():
        parameter.grad = None
    with outputs_of(models, renames) as outputs, arithmetic(surrogates):
        _on_all_ranks(accord, "step", step)
    gradients = {name: _gradient(parameter) for name, parameter in named.items()}
    sent = {name: [stored(each) for each in calls] for name, calls in outputs.items()}
    return _on_rank_0(lambda computed: _judge(reference[0], parts, computed), (gradients, sent))


def _converted(models: Sequence[nn.Module], renames: Sequence[Callable[[str], str]]) -> dict[str, nn.Parameter]:
    """Turn models into residues, and return their parameters by the names of the reference."""
    named: dict[str, nn.Parameter] = {}
    for model, rename in zip(models, renames, strict=True):
        to_residues(model)
        for name, parameter in model.named_parameters():
            if (renamed := rename(clean_fqn(name))) in named:
                raise ConfigurationError(
                    f"two parameters have the name {renamed!r} in the reference: pass a rename= for each model"
                )
            named[renamed] = parameter
    return named


def _judge(reference: Reference, parts: Sequence[Mapping[str, HeldPart]], computed: Sequence[Computed]) -> ExactReport:
    held: dict[str, list[Holding]] = {}
    strays: dict[str, None] = {}
    for rank, ((gradients, _), places) in enumerate(zip(computed, parts, strict=True)):
        for name, gradient in gradients.items():
            copies = held.setdefault(whole := reference.ties.get(name, name), [])
            label = f"{rank} ({name})" if any(copy.rank == rank for copy in copies) else rank
            copies.append(Holding(label, places[name], None if gradient is None else gradient.long()))
            if whole not in reference.shards and gradient is not None and gradient.any():
                strays[whole] = None
    if strays:
        text = f"{first_few(list(strays))}: trained in the job, and frozen in the reference"
        return ExactReport((ExactFinding(UNEXPLAINED, tuple(strays), text),), (), len(reference.shards))
    report = judge_gradients(list(reference.shards), reference.shards, held)
    if report.equal or report.findings[0].kind != UNEXPLAINED:
        return report
    # No equation explains the gradient that is wrong first: look for wrong parts, and for a fault in the forward.
    culprit = swapped(reference, parts) or judge_outputs(reference.outputs, [outputs for _, outputs in computed])
    if culprit is None:
        first = report.findings[0]
        start = first.names[0] == next((name for name in reference.shards if name in held), None)
        where = "in the loss, in its targets, or in backward" if start else "in backward"
        text = f"{first.sentence}. All outputs of modules are right: the fault is {where}"
        return replace(report, findings=(replace(first, sentence=text), *report.findings[1:]))
    downstream = [name for finding in report.findings for name in finding.names] + list(report.downstream)
    return ExactReport((culprit,), tuple(name for name in reference.shards if name in downstream), report.compared)


def _on_all_ranks(accord: Accord | None, what: str, make: Callable[[], T]) -> T:
    """Return what ``make`` returns, as soon as it has on all ranks. COLLECTIVE, through the store: a rank that fails
    does not wait for others, which may wait for it."""
    failure = None
    try:
        made = make()
    except Exception as error:
        failure = error
    text = None if failure is None else f"{what} failed on rank {own_rank()}: {type(failure).__name__}: {failure}"
    outcome = text if accord is None else accord.reach(text)
    if failure is not None:
        raise failure
    if outcome is not None:
        raise ConfigurationError(outcome)
    return made


def _on_rank_0(judge: Callable[[Sequence[Any]], ExactReport], mine: Any) -> ExactReport:
    """Return on all ranks what ``judge`` makes of the objects of all ranks, or raise what it raises. COLLECTIVE."""
    gathered: list[Any] = [mine]
    if world_size() > 1:
        gathered = [None] * world_size()
        dist.gather_object(mine, gathered if own_rank() == 0 else None)
    box: list[Any] = [None]
    if own_rank() == 0:
        try:
            box = [judge(gathered)]
        except Exception as error:
            box = [error if isinstance(error, Fp8DistError) else RuntimeError(f"{type(error).__name__}: {error}")]
    if world_size() > 1:
        dist.broadcast_object_list(box)
    if isinstance(box[0], Exception):
        raise box[0]
    return box[0]


def _whole(tensor: Tensor) -> Tensor:
    """Return a DTensor gathered, any other tensor as it is, to be sent. COLLECTIVE over the mesh of a DTensor."""
    tensor = tensor.detach().double()  # Summands of a gradient may be sums of residues, which float32 cannot add.
    return stored(tensor.full_tensor() if is_dtensor(tensor) else tensor)


def _gradient(parameter: Tensor) -> Tensor | None:
    gradient = parameter.grad
    if gradient is None and is_dtensor(parameter):
        _whole(torch.zeros_like(parameter))  # Other ranks of its mesh may gather.
    return None if gradient is None else _whole(gradient)
