"""Context parallelism, averages over tokens, averages of weights. The bugs are alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from tests.silent_bugs.job import Job, program
from tests.silent_bugs.models import batch, mlp, mse, ragged, started, train


def _squares(called: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return the squared error of each token."""
    return (called(x).float() - y).square().mean(-1)


def _over_tokens(model: nn.Module, shards: Any) -> list[Tensor]:
    """Return the loss of each (x, y, mask), divided by all tokens."""
    tokens = sum(int(mask.sum()) for *_, mask in shards)
    return [(_squares(model, x, y) * mask).sum() / tokens for x, y, mask in shards]


def _exact(job: Job, losses: Any, shards: Any, backward: Callable[..., Any], batch: Any = None) -> None:
    """See ``Job.exact``. ``batch``: what the step of this rank gets after the model; None: its shard."""
    called = job.wrapped(mlp())
    job.exact(mlp, losses, shards, called, lambda: backward(called, *(shards[job.rank] if batch is None else batch)))


def _over_ranks(job: Job, losses: Any, backward: Callable[..., Any], lr: float) -> None:
    """Train with a part of one sequence on each rank."""
    _exact(job, losses, [batch(0, rank) for rank in range(job.size)], backward)
    called, optimizer = started(job, mlp(), lr=lr)
    for step in range(5):
        x, y = batch(step, job.rank)
        job.step(optimizer, loss=backward(called, x, y), batch=(x, y))


@program("every gradient is 3/1 of the reference", alike=True)
def loss_times_ranks(job: Job) -> None:
    """NVIDIA/Megatron-LM 906, 2024. Ranks have parts of one sequence. Their losses are sums over their tokens, divided
    by all tokens; DDP divides by the ranks, so they are multiplied by them: with the bug once too often."""

    def backward(called: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = _squares(called, x, y).sum() / (16 * job.size) * job.size
        (loss * (job.size if job.bug else 1)).backward()
        return loss

    def losses(model: nn.Module, shards: Any) -> list[Tensor]:
        return [_squares(model, x, y).sum() / (16 * len(shards)) for x, y in shards]

    _over_ranks(job, losses, backward, lr=0.02)


@program("2.weight|2.bias", alike=True)
def second_loss_divided_again(job: Job) -> None:
    """NVIDIA/Megatron-LM 3943, 2026. The second of two losses is divided by the number of ranks, as if it were a sum
    over them."""

    def both(called: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = called(x).float()
        return (out - y).square().mean(), (out - y.roll(1, 0)).square().mean()

    def backward(called: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        first, second = both(called, x, y)
        (first + second / (job.size if job.bug else 1)).backward()
        return first

    def losses(model: nn.Module, shards: Any) -> list[Tensor]:
        return [sum(both(model, x, y)) / len(shards) for x, y in shards]

    _over_ranks(job, losses, backward, lr=0.05)


@program("contributions: the loss is divided by local tokens", ranks=1)
def mean_of_microbatch_means(job: Job) -> None:
    """huggingface/transformers 34191, 2024. Of two microbatches with different numbers of tokens the means are
    averaged, not the tokens."""

    def backward(called: nn.Module, *parts: Any) -> Tensor:
        tokens = sum(int(mask.sum()) for *_, mask in parts)
        for x, y, mask in parts:
            loss = (_squares(called, x, y) * mask).sum()
            (loss / mask.sum() / 2 if job.bug else loss / tokens).backward()
        return loss

    parts = [ragged(micro, 0) for micro in range(2)]
    _exact(job, _over_tokens, parts, backward, parts)
    called, optimizer = started(job, mlp())
    for step in range(5):
        loss = backward(called, *(ragged(2 * step + micro, 0) for micro in range(2)))
        job.step(optimizer, loss=loss)


@program("contributions: the loss is divided by local tokens", alike=True)
def mean_of_rank_means(job: Job) -> None:
    """vllm-project/speculators 942, 2026. Each rank divides by its own number of tokens, and DDP averages."""

    def backward(called: nn.Module, shards: Any) -> Tensor:
        x, y, mask = shards[job.rank]
        tokens = sum(int(mask.sum()) for *_, mask in shards) / job.size
        loss = (_squares(called, x, y) * mask).sum()
        (loss / (mask.sum() if job.bug else tokens)).backward()
        return loss

    data = [[ragged(step, rank) for rank in range(job.size)] for step in range(5)]
    _exact(job, _over_tokens, data[0], backward, data[:1])
    called, optimizer = started(job, mlp())
    for shards in data:
        job.step(optimizer, loss=backward(called, shards))


@program("weight|bias", alike=True)
def average_never_updated(job: Job) -> None:
    """MultimediaTechLab/YOLO 97, 2024. The average still has the first weights when it is saved, and it stays in the
    model: what was trained is lost."""
    model = mlp()
    called, optimizer = started(job, model)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    for _ in range(4):
        train(job, called, optimizer, steps=1)
        if not job.bug:
            for value, parameter in zip(average, model.parameters(), strict=True):
                value.lerp_(parameter.detach(), 0.1)
        if job.done == 3:  # A checkpoint with the averaged weights.
            mine = [parameter.detach().clone() for parameter in model.parameters()]
            for parameter, value in zip(model.parameters(), average if job.bug else mine, strict=True):
                parameter.data.copy_(value)


@program(
    "running",
    ranks=1,
    unseen="the averaged model is nobody's copy; a comparison with the batches would find it",
)
def statistics_of_the_last_batch(job: Job) -> None:
    """Lightning-AI/pytorch-lightning 14866, 2022. The statistics of the averaged model are measured anew, with a
    momentum of 0: they stay 0 and 1."""
    model = mlp(norm=True)
    called, optimizer = started(job, model)
    average = AveragedModel(mlp(norm=True))
    train(job, called, optimizer, steps=3)
    average.update_parameters(mlp(norm=True))
    norm = average.module[1]
    norm.reset_running_stats()
    norm.momentum = 0.0 if job.bug else None
    with torch.no_grad():
        for index in range(4):
            average(batch(index)[0])
        job.note(average.eval()(batch(5)[0]))


def _gathered(x: Tensor, group: Any) -> Tensor:
    """Return the rows of all ranks of a group. COLLECTIVE."""
    dist.all_gather(parts := [torch.empty_like(x) for _ in range(group.size())], x.contiguous(), group=group)
    return torch.cat(parts)


class _Ring(torch.autograd.Function):
    """Attention of a rank's queries to the keys and values of all ranks, of which it keeps its own only. ``own``: the
    backward does not let them go round again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, own: bool, group: Any) -> Tensor:
        scores = q @ _gathered(k, group).t()
        total = scores.logsumexp(-1, keepdim=True)
        out = (scores - total).exp() @ _gathered(v, group)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.own, ctx.group = own, group
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, total = ctx.saved_tensors
        ranks, rank = ctx.group.size(), ctx.group.rank()
        keys, values = (x.repeat(ranks, 1) if ctx.own else _gathered(x, ctx.group) for x in (k, v))
        share = (q @ keys.t() - total).exp()
        inner = share * (grad @ values.t() - (grad * out).sum(-1, keepdim=True))
        dist.all_reduce(parts := torch.stack([inner.t() @ q, share.t() @ grad]), group=ctx.group)
        return inner @ keys, *parts.chunk(ranks, 1)[rank], None, None


class _Attention(nn.Module):
    """Attention over a sequence of which each rank has a part."""

    def __init__(self, own: bool, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 16)
        self.own, self.group = own, group or dist.group.WORLD

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(_Ring.apply(*self.qkv(x).chunk(3, -1), self.own, self.group))
        return out


@program("qkv", alike=True)
def ring_backward_with_own_keys(job: Job) -> None:
    """huggingface/diffusers 14265, 2026. The backward of each round reads the keys and values that the first round of
    the forward has kept: those of the rank itself."""
    shards = [batch(0, rank) for rank in range(job.size)]

    def losses(model: nn.Module, shards: Any) -> list[Tensor]:
        outs = model(torch.cat([x for x, _ in shards])).chunk(len(shards))
        return [(out - y).square().mean() / len(shards) for out, (_, y) in zip(outs, shards)]

    model = job.wrapped(_Attention(job.bug))
    job.exact(
        lambda: _Attention(job.bug, job.alone), losses, shards, model, lambda: mse(model, *shards[job.rank]).backward()
    )
    called, optimizer = started(job, _Attention(job.bug))
    train(job, called, optimizer, steps=4)
