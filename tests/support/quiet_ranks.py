"""Correct programs are silent and accurate on two ranks; see ``quiet.py``."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.optimizer import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fp8dist
from fp8dist import DelayedScaling
from tests.support.quiet import HISTORY, Loop, Trial, batch, fp8_bits, mlp, state_is_right, take
from tests.support.scenarios import Scenarios
from tests.support.sharded import full

SCENARIOS = Scenarios(ranks=2)
STEPS = 5


def world(net: nn.Module | None = None, recipe: Any = None, **settings: Any) -> Trial:
    return Trial(net, recipe, group=dist.group.WORLD, **settings)


def ddp_trial(kind: type[Optimizer] = AdamW, net: nn.Module | None = None) -> tuple[Trial, Optimizer]:
    """Return a trial of a net in DDP and its optimizer, attached."""
    trial = Trial(net, wrap=DistributedDataParallel)
    optimizer = kind(trial.parameters(), lr=0.01)  # type: ignore[call-arg]
    trial.attach(optimizer)
    return trial, optimizer


def in_ddp(update: str = "same_step", **parts: Any) -> Loop:
    recipe = DelayedScaling(history_len=HISTORY, update=update)  # type: ignore[arg-type]
    prepared = {"recipe": recipe, "wrap": DistributedDataParallel}
    return Loop(prepared=prepared, **{"steps": STEPS, **parts})


def me() -> int:
    return dist.get_rank()


def attach_hook(trial: Trial) -> None:
    trial.attach(trial.optimizer)
    trial.called.register_comm_hook(None, fp8dist.ddp.comm_hook(trial.manager))


def no_sync(trial: Trial, index: int) -> None:
    for micro in range(8):
        with contextlib.nullcontext() if micro == 7 else trial.called.no_sync():
            trial.backward(8 * index + micro, 1 / 8)


def zero_redundancy(trial: Trial) -> Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It uses torch.jit.
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(trial.parameters(), optimizer_class=AdamW, lr=0.01)


def first_frozen() -> nn.Module:
    """With an adapter behind it."""
    net = mlp()
    net[0].requires_grad_(False)
    net.add_module("lora_out", nn.Linear(16, 16))
    return net


def attach_averaged(trial: Trial) -> None:
    trial.attach(trial.optimizer)
    trial.average = AveragedModel(trial.net, multi_avg_fn=get_ema_multi_avg_fn(0.5))  # type: ignore[attr-defined]


def average_on_rank_0(trial: Trial, index: int) -> None:
    average: Any = trial.average  # type: ignore[attr-defined]
    average.update_parameters(trial.net)
    if me() == 0:
        average.eval()
        trial.evaluate(average)


IN_DDP = in_ddp()

SCENARIOS.table(
    {
        "DDP": IN_DDP,
        "DDP: next_step, with the hook": in_ddp("next_step", attach=attach_hook),
        "DDP: no_sync": in_ddp(backward=no_sync, steps=3),
        "ZeroRedundancyOptimizer": in_ddp(make=zero_redundancy, same=IN_DDP),
        "LoRA in DDP": in_ddp(
            net=first_frozen,
            make=lambda trial: AdamW([p for p in trial.parameters() if p.requires_grad], lr=0.01),
            ran=lambda fqn, role: role != "grad_output",
        ),
        "averaged in DDP, and evaluated on rank 0": in_ddp(attach=attach_averaged, after=average_on_rank_0),
    }
)


@SCENARIOS.program
def an_average_of_weights_is_attached_beside_ddp() -> Any:
    """DDP does not know the average."""
    trial = Trial(wrap=DistributedDataParallel)
    average, optimizer = mlp().requires_grad_(False), trial.adamw()
    both = nn.ModuleDict({"model": trial.called, "average": average})
    trial.manager.attach(both, optimizer=optimizer)
    for index in range(STEPS):
        trial.train(optimizer, 1, index)
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), trial.parameters(), 0.1)
    trial.right(STEPS)
    return trial.bits()


@SCENARIOS.program
def a_teacher_in_ddp_beside_a_net_of_this_rank() -> None:
    """The DDP says nothing about the net."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][me()]
    trial = Trial(group=alone)
    trial.manager.attach(nn.ModuleDict({"teacher": DistributedDataParallel(mlp()), "student": trial.net}))


@SCENARIOS.variants(where=["all ranks", "rank 0"])
def optimizer_state_is_read_before_the_first_step(where: str) -> Any:
    """Reading the state steps the optimizer with lr 0. This must not communicate: rank 0 may be alone."""
    trial, optimizer = ddp_trial(AdamW if where == "all ranks" else SGD)  # AdamW on rank 0 would count one more step.
    if where == "all ranks" or me() == 0:
        get_optimizer_state_dict(trial.called, optimizer)
    dist.barrier()
    assert trial.manager.steps == 0
    trial.train(optimizer, STEPS)
    trial.right(STEPS)
    return trial.bits()


@SCENARIOS.program
def optimizer_state_is_loaded_before_attach() -> Any:
    first, optimizer = ddp_trial()
    first.train(optimizer, 4)
    how = StateDictOptions(full_state_dict=True)
    saved = copy.deepcopy(get_optimizer_state_dict(first.called, optimizer, options=how))
    weights, fp8 = copy.deepcopy(first.net.state_dict()), first.manager.state_dict()
    first.train(optimizer, 3, 4)
    trial = Trial(wrap=DistributedDataParallel)
    fresh = trial.adamw()
    if not saved["state"]:  # Only rank 0 has the whole state.
        saved = {}
    set_optimizer_state_dict(
        trial.called, fresh, saved, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    trial.net.load_state_dict(weights)
    trial.attach(fresh)
    trial.manager.load_state_dict(fp8)
    trial.train(fresh, 3, 4)
    for each in (trial, first):
        each.right(7)
    assert trial.bits() == first.bits()
    return trial.bits()


@SCENARIOS.variants(attached=["inner", "manual"])
def local_sgd(attached: str) -> Any:
    """Ranks train separately, and average their weights every second step."""
    trial = world()
    optimizer = trial.sgd()
    trial.attach(*([optimizer] if attached == "inner" else []))
    for index in range(STEPS):
        trial.train(optimizer, 1, index)
        if index % 2:
            for p in trial.parameters():
                dist.all_reduce(p.data)
                p.data.div_(2)
        if attached == "manual":
            trial.manager.step()
    trial.right(STEPS)
    return fp8_bits(trial.manager)


def sharded_trial() -> Trial:
    trial = Trial(group=dist.group.WORLD, fp8_all_gather=True, judged=False)
    for layer in (trial.net[0], trial.net[2], trial.net):
        fully_shard(layer)
    return trial


def train_sharded(trial: Trial, optimizer: Optimizer, steps: int, start: int = 0) -> None:
    for step in range(start, start + steps):
        weights = full(trial.net)
        x, y = batch(step, me())
        output = trial.net(x)
        trial.compare(output, x, weights)
        nn.functional.mse_loss(output, y).backward()
        nn.utils.clip_grad_norm_(trial.net.parameters(), 10.0)
        take(optimizer)


@SCENARIOS.variants(where=["before attach", "after attach"])
def fsdp2_optimizer_state_is_read(where: str) -> Any:
    trial = sharded_trial()
    optimizer = trial.adamw()
    for when in ("before attach", "attach", "after attach"):
        if when == "attach":
            trial.manager.attach(trial.net, optimizer=optimizer)
        elif when == where:
            saved = get_optimizer_state_dict(trial.net, optimizer)
            set_optimizer_state_dict(trial.net, optimizer, saved)
    assert trial.manager.steps == 0
    if where == "before attach":  # An optimizer with state looks like a resumed job without its FP8 state.
        with trial.manager.calibrate():
            for index in range(2):
                nn.functional.mse_loss(trial.net(batch(index, me())[0]), batch(index, me())[1]).backward()
        optimizer.zero_grad()
    before = trial.manager.steps
    train_sharded(trial, optimizer, STEPS)
    trial.accurate()
    assert trial.manager.steps == before + STEPS
    return fp8_bits(trial.manager)


@SCENARIOS.program
def fsdp2_ema_swapped_in_and_out() -> Any:
    """Swap sharded parameters for an evaluation. A gathered weight that was written to may get a new scale."""
    trial = sharded_trial()
    optimizer = trial.adamw()
    trial.manager.attach(trial.net, optimizer=optimizer)
    average = [p.detach().clone() for p in trial.net.parameters()]
    for step in range(STEPS):
        train_sharded(trial, optimizer, 1, step)
        with torch.no_grad():
            mine = [p.detach().clone() for p in trial.net.parameters()]
            for mean, p in zip(average, trial.net.parameters()):
                mean.lerp_(p.detach(), 0.5)
                p.copy_(mean)
            weights = full(trial.net)
            trial.net.eval()
            trial.compare(trial.net(batch(0)[0]), batch(0)[0], weights)
            trial.net.train()
            for old, p in zip(mine, trial.net.parameters()):
                p.copy_(old)
    trial.accurate()
    state_is_right(trial.manager, STEPS, lambda fqn, role: role != "weight")
    return fp8_bits(trial.manager)


def own(*parameters: Tensor) -> None:
    """Give each rank its own values."""
    generator = torch.Generator().manual_seed(50 + me())
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


@SCENARIOS.variants(
    how=[
        "ignored by DDP",
        "groups",
        "marked as an expert",
        "marked as shards",
        "marked as ZeRO's part",
        "Transformers' plan",
    ]
)
def ranks_hold_parameters_of_their_own(how: str) -> Any:
    """Experts, shards of tensor parallelism by hand, and parts that ZeRO's stage 3 leaves on a rank."""
    net, mine = mlp(), [dist.new_group([rank]) for rank in range(2)]
    own(*net[2].parameters())
    settings: dict[str, Any] = {"groups": {"2": mine[me()]}} if how == "groups" else {}
    trial = Trial(net, group=dist.group.WORLD, **settings)
    called: nn.Module = net
    if how == "ignored by DDP":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["2.weight", "2.bias"])
        called = DistributedDataParallel(net)
    elif how == "marked as an expert":
        net[2].weight.allreduce = False
    elif how == "marked as shards":
        net[2].weight.tensor_model_parallel = True
    elif how == "marked as ZeRO's part":
        net[2].bias.ds_tensor = net[2].bias.detach()
    elif how == "Transformers' plan":
        net[2]._hf_tp_plan = "colwise"
    optimizer = AdamW(called.parameters(), lr=0.01)
    trial.manager.attach(called, optimizer=optimizer)
    trial.train(optimizer, STEPS, net=called)
    trial.right(STEPS)
    return None


@SCENARIOS.program
def fsdp2_ignores_a_parameter_of_each_rank() -> Any:
    trial = world(judged=False)
    own(trial.net[2].bias)
    fully_shard(trial.net, ignored_params={trial.net[2].bias})
    optimizer = SGD(trial.net.parameters(), lr=0.01, foreach=False)
    trial.manager.attach(trial.net, optimizer=optimizer)
    trial.train(optimizer, STEPS)
    assert trial.manager.steps == STEPS
    return None


@SCENARIOS.program
def attached_again_with_statistics_of_each_rank() -> Any:
    """In the middle of a training, and in a job that resumes it with statistics and caches of each rank."""
    net = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
    net.register_buffer("cache", torch.zeros(3))
    resumed = copy.deepcopy(net)
    trial = world(net)
    called = DistributedDataParallel(net)
    for attachment in range(2):
        optimizer = SGD(called.parameters(), lr=0.01)
        trial.manager.attach(called, optimizer=optimizer)
        for index in range(2):
            trial.backward(2 * attachment + index, net=called)
            take(optimizer)
        net.cache.fill_(me())
    state = {**net.state_dict(), "cache": torch.zeros(3)}
    again = world(resumed)
    called = DistributedDataParallel(resumed)
    resumed.load_state_dict(state)
    again.manager.load_state_dict(trial.manager.state_dict())
    again.manager.attach(called)
    mean = net[1].running_mean.clone()
    dist.all_reduce(mean)
    assert not torch.equal(mean / 2, net[1].running_mean), "the ranks' statistics are meant to differ"
    return None


@SCENARIOS.variants(broadcast=[True, False])
def buffers_of_each_rank_before_the_first_step_of_ddp(broadcast: bool) -> Any:
    """A seed of each rank, or statistics of a forward before attach that DDP makes equal in its next forward."""
    trial = world()
    trial.net.register_buffer("mine", torch.zeros(3))
    net = DistributedDataParallel(trial.net, broadcast_buffers=broadcast)
    net.module.mine.fill_(me())
    optimizer = SGD(net.parameters(), lr=0.01)
    trial.manager.attach(net, optimizer=optimizer)
    trial.train(optimizer, STEPS, net=net)
    trial.right(STEPS)
    return {name: of for name, of in trial.bits().items() if name != "mine"}


@SCENARIOS.variants(missing=["meta", "lazy"])
def a_part_has_no_memory_yet(missing: str) -> Any:
    net = mlp()
    net.add_module("later", nn.LazyLinear(16) if missing == "lazy" else nn.Linear(4, 4, device="meta"))
    manager = fp8dist.prepare(net, group=dist.group.WORLD, skip="later")
    manager.attach()
    return None


@SCENARIOS.program
def weights_are_inference_tensors() -> Any:
    with torch.inference_mode():
        net = mlp()
    fp8dist.prepare(net, group=dist.group.WORLD).attach()
    return None
