"""Gradients of copies, replicas, routers, LoRA, pipelines."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.distributed.pipelining import ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from tests.silent_bugs.job import Job, program
from tests.silent_bugs.models import add_gradients, batch, mlp, mse, pipeline, schedule_of, stage_of, started, train
from tests.support.by_hand import WIDTH, ByHand, add_up, whole_by_hand


def _by_hand(job: Job, forgotten: str = "", times: int = 1) -> None:
    """Train a block with tensor and sequence parallelism. From the second step on the loop does not sum the gradient of
    ``forgotten``, and multiplies that of the last norm."""

    data = [torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)) for step in range(4)]

    def losses(model: ByHand, inputs: list[Tensor]) -> list[Tensor]:
        return [(model(x) * torch.arange(WIDTH)).sum() for x in inputs]

    def backward(model: ByHand, step: int) -> None:
        losses(model, data[step : step + 1])[0].backward()
        add_up(model, forgotten if step else "")
        assert model.final_norm.weight.grad is not None
        model.final_norm.weight.grad *= times if step else 1

    exact = ByHand(dist.group.WORLD)
    job.exact(lambda: whole_by_hand(job.size, job.alone), losses, data[1:2], exact, lambda: backward(exact, 1))
    tp = {"ddp": None, "axes": {"tp": dist.group.WORLD}, "enabled": False}
    model, optimizer = started(job, ByHand(dist.group.WORLD), lr=0.01, start=None, **tp)
    for step in range(4):
        backward(model, step)
        job.step(optimizer)


@program("'final_norm.weight'", ranks=2)
def norm_not_summed(job: Job) -> None:
    """NVIDIA/Megatron-LM 1446, 2025. The loop forgets to sum the gradient of the last norm over the ranks."""
    _by_hand(job, "final_norm.weight" if job.bug else "")


@program("final_norm.weight is 2/1 of the reference", ranks=2, alike=True)
def norm_summed_twice(job: Job) -> None:
    """NVIDIA/Megatron-LM 1528, 2025. The gradient of the last norm is twice what it should be, on both ranks."""
    _by_hand(job, times=2 if job.bug else 1)


@program("'router.weight'", ranks=2)
def router_gets_a_part(job: Job) -> None:
    """pytorch/torchtitan 2416, 2026. The router's gradient is not summed over the ranks."""
    _by_hand(job, "router.weight" if job.bug else "")


@program("'first.(weight|bias)'")
def reduced_a_copy(job: Job) -> None:
    """NovaSky-AI/SkyRL 1886, 2026. The gradient that goes back from the shards of the head is transposed, and the sum
    over the ranks goes to a copy of it."""
    own = torch.Generator().manual_seed(job.rank)
    model = nn.ModuleDict({"first": nn.Linear(32, 16), "head": nn.Linear(16, 16, bias=False)})
    nn.init.normal_(model["head"].weight, std=0.1, generator=own)
    _, optimizer = started(job, model, ddp=None, axes={"tp": dist.group.WORLD}, start=None)

    def reduce(grad: Tensor) -> Tensor:
        turned = grad.t() if job.bug and job.done else grad
        dist.all_reduce(summed := turned.contiguous())
        return grad if turned is not grad else summed

    for step in range(4):
        hidden = model["first"](batch(step)[0])
        hidden.register_hook(reduce)
        (model["head"](hidden) - batch(step)[1]).square().mean().backward()
        job.step(optimizer)


@program("'lora_b'")
def factor_not_summed(job: Job) -> None:
    """modelscope/mcore-bridge 173, 2026. Each rank has a shard of the first factor and a copy of the second, which sees
    the tokens of its rank only: its gradient must be summed."""
    model = nn.Module()
    own = torch.Generator().manual_seed(1 + job.rank)
    model.lora_a = nn.Parameter(torch.randn(32, 4, generator=own) / 8)
    model.lora_b = nn.Parameter(torch.full((4, 16), 0.1))
    _, optimizer = started(job, model, ddp=None, axes={"tp": dist.group.WORLD}, enabled=False, start=None)
    for step in range(4):
        x, y = (torch.cat([t, t[:2]]).chunk(3) for t in batch(step))
        (
            all_reduce(torch.cat(x) @ model.lora_a).chunk(3)[job.rank] @ model.lora_b - y[job.rank]
        ).square().mean().backward()
        add_gradients([] if job.bug and step else [model.lora_b])
        job.step(optimizer)


@program("weight|bias", ranks=4)
def replicas_start_apart(job: Job) -> None:
    """mosaicml/llm-foundry 830, 2024. Hybrid sharding: two replicas of two shards, whose ranks begin with random
    numbers of their own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(job.rank if job.bug else 0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    job.prepare(model, ddp=None)
    fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters(), lr=0.01)
    job.attach(model, optimizer)
    train(job, model, optimizer, steps=2)


@program("contributions", ranks=4, alike=True)
def accumulated_gradients_scaled_again(job: Job) -> None:
    """pytorch/torchtitan 1733, 2025. Two stages of two replicas, three accumulation steps of two microbatches. The
    schedule divides what was accumulated so far, each time."""

    data = [batch(part, job.rank % 2) for part in range(9)]

    def backward(called: nn.Module, schedule: ScheduleGPipe, step: int) -> None:
        for x, y in data[3 * step : 3 * step + 3]:
            schedule.step(x) if job.rank < 2 else schedule.step(target=y)
        for parameter in called.parameters():
            assert parameter.grad is not None
            parameter.grad /= 3 if job.bug else 6

    def losses(model: nn.Module, shards: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [mse(model, x, y) / len(shards) for x, y in shards]

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    exact = DistributedDataParallel(stage_of(mlp(), mesh), process_group=mesh.get_group("dp"))
    parts = [(x, y) for of in range(6) for x, y in zip(*(t.chunk(2) for t in batch(of // 2, of % 2)))]
    job.exact(
        mlp,
        losses,
        parts,
        exact,
        lambda: backward(exact, schedule_of(exact, mesh, job.bug), 0),
        rename=lambda name: name if job.rank < 2 else name.replace("0.", "2.", 1),
    )
    called, optimizer, schedule = pipeline(job, scale_grads=job.bug)
    for step in range(3):
        backward(called, schedule, step)
        job.step(optimizer)


@program("weight|bias")
def last_microbatch_not_summed(job: Job) -> None:
    """modelscope/FunASR 3472, 2026. Of two microbatches the last should be synchronized, and with the bug the first
    is: the gradients of the last are added to the mean, on each rank its own."""
    called, optimizer = started(job, mlp())
    for step in range(3):
        for micro in range(2):
            x, y = batch(2 * step + micro, job.rank)
            synchronized = micro == (0 if job.bug else 1)
            with contextlib.nullcontext() if synchronized else called.no_sync():
                mse(called, x, y).backward()
        job.step(optimizer)
