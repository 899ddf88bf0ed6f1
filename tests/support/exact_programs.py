"""Parallel programs that train the transformer of tests/support/exact.py, with faults to plant.

Each program takes (kind, shards, faults), runs on every rank, and returns the model, or a pipeline's stages, and the
function that computes a step. A fault is a word in ``faults``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fp8dist.exact.comparison import compare
from fp8dist.exact.reference import record
from fp8dist.exact.verdict import ExactReport
from tests.support.exact import Kind, Shard, Transformer, batch, count, loss_of, losses, own

Program = tuple[nn.Module | Sequence[nn.Module], Callable[[], Any]]


def report_of(
    program: str, kind: Kind, shards: int, path: Path, faults: Collection[str] = (), **options: Any
) -> ExactReport:
    """Record one step on rank 0, unless ``path`` has it, run it by a program on all ranks, and return what ``compare``
    finds."""
    data = batch(kind, shards)
    if dist.get_rank() == 0 and not path.exists():
        record(Transformer(kind), losses, data, path)
    dist.barrier()
    model, step = globals()[program](kind, data, faults, **options)
    return compare(model, step, path)


def divisor(shards: Sequence[Shard], mine: Sequence[Shard], faults: Collection[str]) -> float:
    """Return what a data-parallel rank divides its sum of losses by: ranks average gradients."""
    if "local tokens" in faults:
        return count(mine)
    return count(shards) / dist.get_world_size()


def ddp(kind: Kind, shards: Sequence[Shard], faults: Collection[str] = ()) -> Program:
    """DDP, with ``no_sync`` for all microbatches but the last."""
    plain = Transformer(kind)
    if "other weights" in faults and dist.get_rank() == 1:
        plain.layers["0"].mlp.up.weight.data[1, 2] += 1
    if "ignored" in faults:
        plain._ddp_params_and_buffers_to_ignore = ["layers.0.norm2.weight"]
    group = dist.group.WORLD
    if "pairs" in faults:
        pairs = [dist.new_group([rank, rank + 1]) for rank in range(0, dist.get_world_size(), 2)]
        group = pairs[dist.get_rank() // 2]
    model = DistributedDataParallel(plain, process_group=group, init_sync="other weights" not in faults)
    if "summed" in faults:
        model.register_comm_hook(None, _summing)
    mine = own(shards, 0) if "read twice" in faults and dist.get_rank() == 1 else own(shards)
    by = divisor(shards, mine, faults)
    if "unscaled" in faults:
        by /= len(mine)
    used = mine[:-1] if "dropped" in faults and dist.get_rank() == 1 else mine

    def step() -> None:
        for place, (tokens, targets) in enumerate(used):
            last = place + 1 == len(used)
            if last and "cleared" in faults:
                model.zero_grad()
            with contextlib.nullcontext() if last or "always" in faults else model.no_sync():
                loss_of((plain if "unwrapped" in faults else model)(tokens), targets, by).backward()

    return model, step


def _summing(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations.
    dist.all_reduce(bucket.buffer())
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def fsdp2(kind: Kind, shards: Sequence[Shard], faults: Collection[str] = (), mesh: Any = None) -> Program:
    """FSDP2, which reduces after the last microbatch."""
    model = Transformer(kind)
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    ignored = {model.layers["0"].norm2.weight} if "ignored" in faults else set()
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, ignored_params=ignored or None)
    fully_shard(model, mesh=mesh, ignored_params=ignored or None)
    if "undivided" in faults:
        for module in [model, *model.layers.values()]:
            module.set_gradient_divide_factor(1.0)
    mine = own(shards)
    by = divisor(shards, mine, faults)

    def step() -> None:
        for place, (tokens, targets) in enumerate(mine):
            last = place + 1 == len(mine)
            model.set_requires_gradient_sync(last)
            loss_of(model(tokens), targets, by).backward()

    return model, step


def hsdp(kind: Kind, shards: Sequence[Shard], faults: Collection[str] = ()) -> Program:
    """FSDP2 within groups of two ranks, replicated over the groups."""
    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return fsdp2(kind, shards, faults, mesh["shard"] if "shards alone" in faults else mesh)


def _plan(kind: Kind) -> dict[str, Any]:
    """Return torch's plan of tensor parallelism for a layer."""
    columns = [*(f"attention.{name}" for name in "qkv"), "mlp.up", *(["mlp.gate"] if kind.gated else [])]
    rows = ("attention.o", "mlp.down")
    return {**{name: ColwiseParallel() for name in columns}, **{name: RowwiseParallel() for name in rows}}


def dtensor_tp(kind: Kind, shards: Sequence[Shard], faults: Collection[str] = ()) -> Program:
    """Tensor parallelism by torch's plans. All ranks read all shards."""
    model = Transformer(kind)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers.values():
        parallelize_module(layer, mesh, _plan(kind))
    if not kind.tied:
        assert model.head is not None
        parallelize_module(model.head, mesh, ColwiseParallel(output_layouts=Replicate()))

    def step() -> None:
        for tokens, targets in shards:
            loss_of(model(tokens), targets, count(shards)).backward()

    return model, step


def fsdp2_tp(kind: Kind, shards: Sequence[Shard], faults: Collection[str] = ()) -> Program:
    """FSDP2 over pairs of ranks, and in each pair of the other axis tensor parallelism."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    model = Transformer(kind)
    for layer in model.layers.values():
        parallelize_module(layer, mesh["tensor"], _plan(kind))
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    ranks = mesh["data"].size()
    mine = own(shards, mesh["data"].get_local_rank(), ranks)

    def step() -> None:
        for tokens, targets in mine:
            loss_of(model(tokens), targets, count(shards) / ranks).backward()

    return model, step


class _Reduced(torch.autograd.Function):
    """The sum over ranks in forward, in backward, or in both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: bool, backward: bool) -> Tensor:
        ctx.backward_sums = backward
        return _summed(x) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (_summed(grad) if ctx.backward_sums else grad), None, None


class _Gathered(torch.autograd.Function):
    """The sequence, dim 1, gathered. ``summed``: in backward each rank takes its part of the ranks' sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, summed: bool) -> Tensor:
        ctx.summed = summed
        return _all_of(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _part_of(_summed(grad) if ctx.summed else grad), None


class _Scattered(torch.autograd.Function):
    """This rank's part of the sequence. ``summed``: of the ranks' sum. In backward the sequence is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, summed: bool) -> Tensor:
        return _part_of(_summed(x) if summed else x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_of(grad), None


def _summed(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def _all_of(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


def _part_of(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone()


class RowLinear(nn.Module):
    """A Linear whose input features are cut. The ranks' outputs are added, then the bias."""

    def __init__(self, whole: nn.Linear, sequence: bool, faults: Collection[str]) -> None:
        super().__init__()
        self.weight = nn.Parameter(_cut(whole.weight.data, 1))
        self.bias = whole.bias
        self.sequence, self.faults = sequence, faults

    def forward(self, x: Tensor) -> Tensor:
        """``x``: this rank's features. Returns all features of the tokens, or of this rank's part of the sequence."""
        early = self.bias if "early bias" in self.faults else None
        out = F.linear(x, self.weight, early)
        if self.sequence:
            out = _Scattered.apply(out, True)
        elif "no forward sum" not in self.faults:
            out = _Reduced.apply(out, True, "double backward" in self.faults)
        return out if self.bias is None or early is not None else out + self.bias


def _cut(whole: Tensor, dim: int, rank: int | None = None) -> Tensor:
    return whole.chunk(dist.get_world_size(), dim)[dist.get_rank() if rank is None else rank].clone()


def hand_tp(kind: Kind, shards: Sequence[Shard], faults: Collection[str] = (), sequence: bool = False) -> Program:
    """Tensor parallelism written by hand, with plain tensors. Faults are planted in layer 0.

    Args:
        sequence: norms and residuals see a part of the sequence each (sequence parallelism).
    """
    model = Transformer(kind)
    assert model.embed is not None
    assert model.norm is not None
    for place, layer in model.layers.items():
        planted = faults if place == "0" else ()
        columns = [layer.attention.q, layer.attention.k, layer.attention.v, layer.mlp.up, layer.mlp.gate]
        for linear in filter(None, columns):
            rank = dist.get_rank()
            if linear is layer.attention.k and "swapped" in planted and rank < 2:
                rank = 1 - rank
            if linear is layer.mlp.up and "wrong shard" in planted and rank == 1:
                rank = 0
            linear.weight = nn.Parameter(_cut(linear.weight.data, 0, rank))
            if linear.bias is not None:
                linear.bias = nn.Parameter(_cut(linear.bias.data, 0, rank))
        layer.attention.o = RowLinear(layer.attention.o, sequence, ())
        layer.mlp.down = RowLinear(layer.mlp.down, sequence, planted)
        for block in (layer.attention, layer.mlp):
            summed = "no backward sum" not in planted or block is layer.mlp
            enter = (_Gathered, summed) if sequence else (_Reduced, False, summed)
            block.register_forward_pre_hook(lambda _, args, enter=enter: enter[0].apply(*args, *enter[1:]))
    if sequence:
        model.embed.register_forward_hook(lambda *args: _Scattered.apply(args[-1], False))
        model.norm.register_forward_hook(lambda *args: _Gathered.apply(args[-1], False))
    partial = [
        parameter
        for name, parameter in model.named_parameters()
        if sequence and ("norm" in name or name.endswith(("o.bias", "down.bias")))
        if not ("norms alone" in faults and "norm" in name)
    ]

    def step() -> None:
        for tokens, targets in shards:
            loss_of(model(tokens), targets, count(shards)).backward()
        for parameter in partial:
            dist.all_reduce(parameter.grad)
        if "doubled norm" in faults:
            dist.all_reduce(model.layers["0"].norm1.weight.grad)

    return model, step


def hand_sp(kind: Kind, shards: Sequence[Shard], faults: Collection[str] = ()) -> Program:
    """Tensor and sequence parallelism, written by hand."""
    return hand_tp(kind, shards, faults, sequence=True)


def expert_parallel(kind: Kind, shards: Sequence[Shard], faults: Collection[str] = ()) -> Program:
    """Experts are spread over the ranks, which all see every token."""
    model = Transformer(kind)
    for layer in model.layers.values():
        for place in list(layer.mlp.experts):
            if int(place) * dist.get_world_size() // kind.experts != dist.get_rank():
                del layer.mlp.experts[place]
        layer.mlp.register_forward_pre_hook(lambda _, args: _Reduced.apply(*args, False, True))
        layer.mlp.register_forward_hook(lambda *args: _Reduced.apply(args[-1], True, False))

    def step() -> None:
        for tokens, targets in shards:
            loss_of(model(tokens), targets, count(shards)).backward()
        for place, layer in model.layers.items():
            if place != "0" or "router alone" not in faults:
                dist.all_reduce(layer.mlp.router.weight.grad)

    return model, step


def stage_of(kind: Kind, stage: int, stages: int) -> Transformer:
    """Return a stage of a pipeline: a part of the layers, whose names stay."""
    model = Transformer(kind)
    for place in list(model.layers):
        if int(place) * stages // kind.layers != stage:
            del model.layers[place]
    if stage:
        model.embed = None
    if stage + 1 < stages:
        model.norm = model.head = None
    return model


def pipeline(
    kind: Kind, shards: Sequence[Shard], faults: Collection[str] = (), schedule: str = "ScheduleGPipe", chunks: int = 1
) -> Program:
    """A pipeline. The shards are its microbatches. ``chunks``: stages of each rank. A kind with ties has its embedding
    on the first stage and on the last."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    numbers = [rank + ranks * chunk for chunk in range(chunks)]
    if schedule in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"):
        numbers = [rank, 2 * ranks - 1 - rank]
    models = [stage_of(kind, number, ranks * chunks) for number in numbers]
    if "scaled stage" in faults:
        for number, model in zip(numbers, models):
            if number == 1:
                model.layers["1"].register_forward_hook(lambda *args: args[-1] / 2)
    stages = [
        PipelineStage(model, number, ranks * chunks, torch.device("cpu")) for number, model in zip(numbers, models)
    ]
    total = count(shards)
    runner: Any = getattr(torch_schedules, schedule)(
        stages if chunks > 1 else stages[0],
        n_microbatches=len(shards),
        loss_fn=lambda logits, targets: loss_of(logits, targets, total),
        scale_grads="scaled gradients" in faults,
    )
    tokens, targets = (torch.cat(each) for each in zip(*shards))
    group = dist.new_group(sorted({0, ranks - 1}))

    def step() -> None:
        arguments = (tokens,) if 0 in numbers else ()
        last = ranks * chunks - 1 in numbers
        runner.step(*arguments, **({"target": targets, "losses": []} if last else {}))
        if kind.tied:
            ends = [m.embed.weight for m in models if m.embed] + [m.head.weight for m in models if m.head]
            for _ in range(0 if "tie alone" in faults else 2 if "tie twice" in faults else 1):
                for weight in ends:
                    dist.all_reduce(weight.grad, group=group)

    return models, step
