"""``fp8dist.integrations.megatron`` in a real GPT of Megatron-Core, with its DDP, optimizers, schedules and checkpoints,
against a loop by hand."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8dist
from fp8dist.errors import ConfigurationError, DivergenceError
from fp8dist.modules.fp8_linear import fp8_linears
from tests.support.megatron import LENGTH, VOCABULARY, gpt, initialize, mask, with_stand_ins
from tests.support.ranks import RankPool

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-Core is not installed"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.long,
]

STEPS = 12

OPTIMIZERS = {"whole": {}, "distributed": {"use_distributed_optimizer": True}}


@dataclass
class Job:
    """What a training script of Megatron holds."""

    chunks: list[Any]
    manager: fp8dist.StateManager
    optimizer: Any


def _job(model: Any = None, wraps: dict[str, Any] | None = None, options: Any = None, **optimizer: Any) -> Job:
    """Return a job with an attached manager. ``wraps``: fields of DistributedDataParallelConfig."""
    from fp8dist.integrations.megatron import attach, prepare

    chunks = model if isinstance(model, list) else [gpt() if model is None else model]
    manager = prepare(chunks, **(options or {}))
    job = _unattached(chunks, manager, wraps, **optimizer)
    attach(manager, job.optimizer)
    return job


def _unattached(chunks: list[Any], manager: Any, wraps: dict[str, Any] | None = None, **optimizer: Any) -> Job:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    distributed = optimizer.get("use_distributed_optimizer", False)
    config = DistributedDataParallelConfig(
        **{"grad_reduce_in_fp32": True, "use_distributed_optimizer": distributed, **(wraps or {})}
    )
    chunks = [DistributedDataParallel(chunk.config, config, chunk) for chunk in chunks]
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
    given = {"optimizer": "adam", "lr": 1e-2, "weight_decay": 0.0, "clip_grad": 0.0, **optimizer}
    made = get_megatron_optimizer(OptimizerConfig(**given), chunks, use_gloo_process_groups=False)
    return Job(chunks, manager, made)


def _tokens(place: int) -> tuple[Tensor, Tensor]:
    """Return microbatch ``place`` of this rank's data: those of a tensor-parallel group or a pipeline are the same."""
    from megatron.core import parallel_state

    made = torch.Generator().manual_seed(1000 * place + parallel_state.get_data_parallel_rank())
    tokens = (torch.randint(VOCABULARY, (2, 1), generator=made) + torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def _forward(model: Any, place: int) -> Tensor:
    inputs, labels = _tokens(place)
    return model(inputs, torch.arange(LENGTH).expand(2, LENGTH), mask(), labels=labels)


def _forward_step(places: Iterator[int], model: Any) -> tuple[Tensor, Any]:
    def loss(output: Tensor, infinite: bool = False) -> tuple[Tensor, dict[str, float]]:
        mean = output.mean()
        return mean, {"loss": mean.item()}

    return _forward(model, next(places)), loss


def _train(job: Job, steps: Sequence[int], accumulate: int = 1, infinite: int | None = None) -> list[float]:
    """Train with Megatron's schedule. Return the losses of this rank's microbatches. ``infinite``: in this step rank 1
    has an infinite gradient."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    losses = []
    for step in steps:
        for chunk in job.chunks:
            chunk.zero_grad_buffer()
        job.optimizer.zero_grad()
        places = range(step * accumulate, (step + 1) * accumulate)
        if step == infinite and dist.get_rank() == 1:
            handle = job.chunks[0].module.decoder.layers[0].register_full_backward_pre_hook(_blow_up)
        found = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[iter(places) for _ in job.chunks] if len(job.chunks) > 1 else iter(places),
            model=job.chunks if len(job.chunks) > 1 else job.chunks[0],
            num_microbatches=accumulate,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        if step == infinite and dist.get_rank() == 1:
            handle.remove()
        losses += [each["loss"] for each in found]
        updated, _, _ = job.optimizer.step()
        assert updated == (step != infinite)
    return losses


def _blow_up(module: Any, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(gradient * torch.inf for gradient in gradients)


def _parameters(*models: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for model in models for parameter in model.parameters()]


def _kept(job: Job) -> tuple[dict[str, bytes], list[Tensor]]:
    return job.manager.state_dict(), _parameters(*job.chunks)


def _equal(a: tuple[Any, list[Tensor]], b: tuple[Any, list[Tensor]]) -> bool:
    return a[0] == b[0] and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


# By hand -------------------------------------------------------------------------------------------


class _Exchange(torch.autograd.Function):
    """One collective in the forward, its transpose in the backward. The first dim is that of the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Any, back: Any) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _sum(group: Any, x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def _gather(group: Any, x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def _scatter(group: Any, x: Tensor) -> Tensor:
    return _sum(group, x).chunk(group.size())[group.rank()].clone()


def _by_hand(model: Any, sequence_parallel: bool) -> None:
    """Replace each parallel Linear by a plain one around which hooks communicate."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    group = parallel_state.get_tensor_model_parallel_group()
    gather, scatter, whole = partial(_gather, group), partial(_scatter, group), partial(_sum, group)
    for name, module in list(model.named_modules()):
        if not isinstance(module, (ColumnParallelLinear, RowParallelLinear)) or module.weight is None:
            continue
        row, later = isinstance(module, RowParallelLinear), module.skip_bias_add
        linear = nn.Linear(1, 1, bias=False)
        linear.weight, outer = module.weight, module.bias
        if not row:
            there, back = (gather, scatter) if sequence_parallel else (_same, whole)
            linear.register_forward_pre_hook(lambda _, x, t=there, b=back: (_Exchange.apply(x[0], t, b),))
            if not later:
                linear.bias, outer = module.bias, None
            linear.register_forward_hook(lambda _, x, y, o=outer: (y, o))
        else:
            assert later
            there, back = (scatter, gather) if sequence_parallel else (whole, _same)
            linear.register_forward_hook(lambda _, x, y, t=there, b=back, o=outer: (_Exchange.apply(y, t, b), o))
        linear.out_features, linear.in_features = linear.weight.shape
        linear.outer = outer
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, linear)


def _trained_by_hand(sequence_parallel: bool, accumulate: int) -> tuple[list[float], Any]:
    from megatron.core import parallel_state

    model = gpt(sequence_parallel=sequence_parallel)
    order = [id(parameter) for parameter in model.parameters()]
    _by_hand(model, sequence_parallel)
    parameters = sorted(model.parameters(), key=lambda parameter: order.index(id(parameter)))
    assert len(parameters) == len(order)
    manager = fp8dist.prepare(model, group=dist.group.WORLD)
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)
    manager.attach(model, optimizer=optimizer)
    data, tensor = parallel_state.get_data_parallel_group(), parallel_state.get_tensor_model_parallel_group()
    losses = []
    for step in range(STEPS):
        for place in range(step * accumulate, (step + 1) * accumulate):
            loss = _forward(model, place).mean()
            losses.append(loss.item())
            (loss / accumulate).backward()
        for parameter in parameters:
            parameter.grad /= data.size()
            dist.all_reduce(parameter.grad, group=data)
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad, group=tensor)
        optimizer.step()
        optimizer.zero_grad()
    return losses, (manager.state_dict(), [parameter.detach() for parameter in parameters])


@with_stand_ins
def _as_by_hand(tp: int, sequence_parallel: bool, accumulate: int, optimizer: dict[str, Any]) -> None:
    initialize(tp)
    job = _job(gpt(sequence_parallel=sequence_parallel), **optimizer)
    linears = list(fp8_linears(job.chunks[0]))
    assert len(linears) == 8
    before = job.manager.metrics()["fp8/collectives"]
    losses = _train(job, range(STEPS), accumulate)
    assert job.manager.metrics()["fp8/collectives"] - before == STEPS
    expected, kept = _trained_by_hand(sequence_parallel, accumulate)
    assert losses == expected
    assert losses[-1] < losses[0]
    assert _equal(_kept(job), kept)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("tp, sequence_parallel", [(2, False), (2, True), (1, False)], ids=["tp", "sp", "dp"])
def test_it_trains_as_a_loop_by_hand(
    two_ranks: RankPool, tp: int, sequence_parallel: bool, accumulate: int, optimizer: dict[str, Any]
) -> None:
    two_ranks.run(_as_by_hand, tp, sequence_parallel, accumulate, optimizer)
