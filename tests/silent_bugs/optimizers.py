"""Optimizers that are out of step, masters, clipping."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import SGD, Optimizer

from fp8dist.state.groups import local_part
from tests.silent_bugs.job import Job, program
from tests.silent_bugs.models import batch, mlp, pipeline, started, train
from tests.support.by_hand import SHARDS, WIDTH, ByHand, add_up


class Masters(Optimizer):
    """SGD on float32 copies of bf16 weights, which are their ``main_param``, as in Megatron-Core. ``owner``: this rank,
    if every third weight is its own, which it sends to the others; None: all ranks have all."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, owner: int | None = None) -> None:
        super().__init__(parameters, {"lr": lr})
        self.owner = owner
        self.refresh()

    def refresh(self) -> None:
        """Make the masters from the weights."""
        self.put([p.detach().float().clone() for p in self.param_groups[0]["params"]])

    def put(self, masters: list[Tensor]) -> None:
        """Use these masters."""
        self.masters = masters
        for index, (master, p) in enumerate(zip(masters, self.param_groups[0]["params"], strict=True)):
            if self.owner in (None, index % 3):
                p.main_param = master

    def publish(self, send: bool = True) -> None:
        """Round the masters to weights: its own, if it has an owner. ``send``: also get the others'. COLLECTIVE."""
        for index, (master, p) in enumerate(zip(self.masters, self.param_groups[0]["params"], strict=True)):
            if self.owner in (None, index % 3):
                p.copy_(master)
            if self.owner is not None and send:
                dist.broadcast(sent := p.detach().clone(), index % 3)
                p.copy_(sent)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for master, p in zip(self.masters, self.param_groups[0]["params"], strict=True):
            master.add_(p.grad.float(), alpha=-self.param_groups[0]["lr"])
        self.publish()


def _loaded() -> dict[str, Any]:
    """Return the weights of a checkpoint."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)).bfloat16().state_dict()


@program("lr|weight|bias")
def state_on_one_rank(job: Job) -> None:
    """horovod/horovod 526, 2018. A resume in step 3: rank 0 loads the optimizer's state, and does not send it."""
    called, optimizer = started(job, mlp(), partial(SGD, momentum=0.9))
    job.values = lambda: {"lr": optimizer.param_groups[0]["lr"]}
    train(job, called, optimizer, steps=2)
    if job.rank == 0 or not job.bug:
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] = 0.01
        optimizer.load_state_dict(state)
    train(job, called, optimizer, steps=2)


@program("FP8 weights of 2 have not changed", alike=True)
def optimizer_of_old_tensors(job: Job) -> None:
    """deepspeedai/DeepSpeed 8354, 2026. A module is replaced between the making of the optimizer and the first step."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    model[2] = copy.deepcopy(model[2])
    if not job.bug:
        optimizer = SGD(model.parameters(), lr=0.1)
    called = job.prepare(model)
    job.attach(called, optimizer)
    train(job, called, optimizer, steps=5)


@program("weight|bias", alike=True)
def masters_not_refreshed(job: Job) -> None:
    """NovaSky-AI/SkyRL 2149, 2026. Weights are loaded after two steps, and the masters stay as they were."""
    model = mlp().bfloat16()
    called, optimizer = started(job, model, Masters)
    train(job, called, optimizer, steps=2, dtype=torch.bfloat16)
    model.load_state_dict(_loaded())
    if not job.bug:
        optimizer.refresh()
    train(job, called, optimizer, steps=3, dtype=torch.bfloat16)


@program("weight|bias")
def not_gathered_after_load(job: Job) -> None:
    """NVIDIA/Megatron-LM 6920, 2026. Each rank has masters of a third of the weights. A load sets the masters, and each
    rank rounds its own to weights; with the bug no rank gets those of the others."""
    model = mlp().bfloat16()
    called, optimizer = started(job, model, partial(Masters, owner=job.rank))
    train(job, called, optimizer, steps=2, dtype=torch.bfloat16)
    with torch.no_grad():
        optimizer.put([value.float() for value in _loaded().values()])
        optimizer.publish(send=not job.bug)
    train(job, called, optimizer, steps=2, dtype=torch.bfloat16)


@program("grad_norm", ranks=4)
def stages_clip_alone(job: Job) -> None:
    """pytorch/torchtitan 596, 2024. Two stages of two replicas: the norm is that of the stage's gradients."""
    norm = torch.zeros(())
    job.values = lambda: {"grad_norm": norm}
    called, optimizer, schedule = pipeline(job)
    for step in range(3):
        x, y = batch(step, job.rank % 2)
        schedule.step(x) if job.rank < 2 else schedule.step(target=y)
        norm = get_total_norm([p.grad for p in called.parameters() if p.grad is not None])
        if not job.bug:
            square = norm.square()
            dist.all_reduce(square)
            norm = (square / 2).sqrt()
        clip_grads_with_norm_(called.parameters(), 0.05, norm)
        job.step(optimizer)


@program("grad_norm")
def shards_clip_alone(job: Job) -> None:
    """sgl-project/SpecForge 663, 2026. Each rank clips its shards by their own norm."""
    norm = torch.zeros(())
    job.values = lambda: {"grad_norm": norm}
    model = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 48))
    job.prepare(model, ddp=None)
    fully_shard(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    job.attach(model, optimizer)
    for step in range(3):
        x, _ = batch(step, job.rank)
        model(x).square().mean().backward()
        grads = [local_part(p.grad) for p in model.parameters() if p.grad is not None]
        norm = get_total_norm(grads)
        if not job.bug:
            square = norm.square()
            dist.all_reduce(square)
            norm = square.sqrt()
        for grad in grads:
            grad.mul_((0.05 / norm).clamp(max=1.0))
        job.step(optimizer)


@program(
    "grad_norm",
    ranks=2,
    alike=True,
    unseen="alike on all ranks; a comparison with the norm of one process would find it",
)
def copies_counted_in_the_norm(job: Job) -> None:
    """NVIDIA-NeMo/RL 3788, 2026. The squares of a rank's gradients are summed over the tensor-parallel ranks: those of
    its shards, and with the bug also those of the copies that all ranks have."""
    norm = torch.zeros(())
    job.values = lambda: {"grad_norm": norm}
    tp = {"ddp": None, "axes": {"tp": dist.group.WORLD}, "enabled": False}
    model, optimizer = started(job, ByHand(dist.group.WORLD), start=None, **tp)
    for step in range(3):
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
        (model(x) * torch.arange(WIDTH)).sum().backward()
        add_up(model)
        squares = {name: p.grad.square().sum() for name, p in model.named_parameters()}
        square = sum(s if name in SHARDS or job.bug else s / job.size for name, s in squares.items())
        dist.all_reduce(square)
        norm = square.sqrt()
        clip_grads_with_norm_(model.parameters(), 0.05, norm)
        job.step(optimizer)


class Preconditioned(Optimizer):
    """SGD with gradients divided by their size in every third step. One step count for all parameters, in the state of
    the first, as in Shampoo. ``skips``: a rank without gradients returns before it counts."""

    def __init__(self, parameters: Iterable[nn.Parameter], skips: bool) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.skips = skips
        self.state[self.param_groups[0]["params"][0]]["step"] = torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        mine = [p for p in parameters if p.grad is not None and local_part(p.grad).numel()]
        if self.skips and not mine:
            return
        count = self.state[parameters[0]]["step"]
        for parameter in mine:
            grad, state = local_part(parameter.grad), self.state[parameter]
            if count % 3 == 0 or "size" not in state:
                state["size"] = grad.abs() + 0.01
            local_part(parameter).sub_(grad / state["size"], alpha=self.param_groups[0]["lr"])
        count += 1


@program("step")
def step_skipped_without_gradient(job: Job) -> None:
    """facebookresearch/optimizers 149, 2025. The head has four rows, and rank 2 has none of them. In the first two
    steps the head trains alone, and the optimizer of rank 2 does not count them."""
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 4))
    job.prepare(model, ddp=None, enabled=False)
    fully_shard(model)
    optimizer = Preconditioned(model.parameters(), skips=job.bug)
    job.attach(model, optimizer)
    model[1].register_forward_hook(lambda module, args, out: out.detach() if job.done < 2 else out)
    for step in range(6):
        x, y = batch(step, job.rank)
        F.mse_loss(model(x), y[:, :4]).backward()
        job.step(optimizer)
