"""Correct programs are silent and accurate on two ranks; see ``quiet_loops.py``."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.optimizer import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from tests.support.pages import ROOT, blocks
from tests.support.parallel import mesh_of
from tests.support.quiet import HISTORY, Trial, attached, batch, fp8_bits, mlp, off, state_is_right, take, weight_bits
from tests.support.scenarios import Scenarios

SCENARIOS = Scenarios(ranks=2)
program, variants, cases = SCENARIOS.program, SCENARIOS.variants, SCENARIOS.cases
STEPS = 5


def world(net: nn.Module | None = None, recipe: Any = None, **settings: Any) -> Trial:
    return Trial(net, recipe, group=dist.group.WORLD, **settings)


def ddp_trial(kind: type[Optimizer] = AdamW, **settings: Any) -> tuple[Trial, Any, Optimizer]:
    """Return a net in DDP and its optimizer, attached."""
    trial = world(**settings)
    ddp = DistributedDataParallel(trial.net)
    optimizer = kind(ddp.parameters(), lr=0.01)  # type: ignore[call-arg]
    trial.manager.attach(ddp, optimizer=optimizer)
    return trial, ddp, optimizer


def me() -> int:
    return dist.get_rank()


# DDP ---------------------------------------------------------------------------------------------


@cases({"update": "same_step", "hook": False}, {"update": "next_step", "hook": True})
def ddp(update: str, hook: bool) -> Any:
    trial, net, optimizer = ddp_trial(recipe=DelayedScaling(history_len=HISTORY, update=update))  # type: ignore[arg-type]
    if hook:
        net.register_comm_hook(None, fp8dist.ddp.comm_hook(trial.manager))
    trial.train(optimizer, STEPS, net=net, rank=me())
    trial.right(STEPS)
    return trial.bits()


@variants(microbatches=[8])
def ddp_no_sync(microbatches: int) -> Any:
    trial, net, optimizer = ddp_trial()
    for step in range(3):
        for micro in range(microbatches):
            last = micro == microbatches - 1
            with contextlib.nullcontext() if last else net.no_sync():
                trial.backward(step * microbatches + micro, me(), 1 / microbatches, net)
        take(optimizer)
    trial.right(3)
    return trial.bits()


@program
def join_with_uneven_data() -> Any:
    trial, net, optimizer = ddp_trial(SGD)  # An optimizer with state would end differently on the rank without data.
    with Join([net, trial.manager]):
        trial.train(optimizer, 3 + 2 * me(), net=net, rank=me())
    trial.train(optimizer, 2, net=net, rank=me())
    trial.right(7)
    return trial.bits()


@variants(kind=["unfused", "fused"])
def gradscaler_skips_on_all_ranks(kind: str) -> Any:
    """One rank's loss is infinite."""
    trial = world()
    net = DistributedDataParallel(trial.net)
    optimizer = (
        SGD(net.parameters(), lr=0.1, foreach=False) if kind == "unfused" else AdamW(net.parameters(), fused=True)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=True)
    trial.manager.attach(net, optimizer=optimizer, scaler=scaler)
    for index in range(STEPS):
        x, y = batch(index, me())
        loss = nn.functional.mse_loss(net(x), y)
        scaler.scale(loss * (math.inf if index == 2 and me() else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    trial.right(STEPS - 1)
    return trial.bits()


@variants(attached=["outer", "manual"])
def zero_redundancy(attached: str) -> Any:
    """Bitwise equal to the plain optimizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It uses torch.jit.
        from torch.distributed.optim import ZeroRedundancyOptimizer
    trial, other = world(), world()
    net, plain = DistributedDataParallel(trial.net), DistributedDataParallel(other.net)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=AdamW, lr=0.01)
    expected = AdamW(plain.parameters(), lr=0.01)
    if attached == "manual":
        trial.manager.attach(net, boundary="manual")
    else:
        trial.manager.attach(net, optimizer=optimizer)
    other.manager.attach(plain, optimizer=expected)
    for index in range(STEPS):
        trial.train(optimizer, 1, index, net, me())
        if attached == "manual":
            trial.manager.step()
        other.train(expected, 1, index, plain, me())
    trial.right(STEPS)
    other.right(STEPS)
    assert trial.bits() == other.bits()
    return trial.bits()


@cases({"where": "all ranks", "kind": "AdamW"}, {"where": "rank 0", "kind": "SGD"})
def optimizer_state_is_read_before_the_first_step(where: str, kind: str) -> Any:
    """Reading the state steps the optimizer with lr 0. This must not communicate: rank 0 may be alone."""
    trial, net, optimizer = ddp_trial({"AdamW": AdamW, "SGD": SGD}[kind])
    if where == "all ranks" or me() == 0:
        get_optimizer_state_dict(net, optimizer)
    dist.barrier()
    assert trial.manager.steps == 0
    trial.train(optimizer, STEPS, net=net, rank=me())
    if where == "all ranks" or kind == "SGD":  # AdamW on rank 0 has counted one more step.
        trial.right(STEPS)
        return trial.bits()
    state_is_right(trial.manager, STEPS)
    return None


@variants(options=["whole", "plain"])
def optimizer_state_is_loaded_before_attach(options: str) -> Any:
    first, net, optimizer = ddp_trial()
    first.train(optimizer, 4, net=net, rank=me())
    how = StateDictOptions(full_state_dict=True) if options == "whole" else StateDictOptions()
    saved = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=how))
    weights, fp8 = copy.deepcopy(first.net.state_dict()), first.manager.state_dict()
    first.train(optimizer, 3, 4, net, me())
    trial = world()
    again = DistributedDataParallel(trial.net)
    fresh = AdamW(again.parameters(), lr=0.01)
    if not saved["state"]:  # Only rank 0 has the whole state.
        saved = {}
    set_optimizer_state_dict(
        again, fresh, saved, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    trial.net.load_state_dict(weights)
    trial.manager.attach(again, optimizer=fresh)
    trial.manager.load_state_dict(fp8)
    trial.train(fresh, 3, 4, again, me())
    trial.right(7)
    first.evaluate()
    assert trial.bits() == first.bits()
    return trial.bits()


@variants(kind=["two backwards"])
def gan_in_ddp(kind: str) -> Any:
    """Two managers; D takes two steps per step of G."""
    g, d = world(mlp(32, 64, 32)), world(mlp(32, 64, 16))
    net_g, net_d = DistributedDataParallel(g.net), DistributedDataParallel(d.net)
    of_g, of_d = g.adamw(0.003), d.adamw(0.003)
    g.manager.attach(net_g, optimizer=of_g)
    d.manager.attach(net_d, optimizer=of_d)
    for index in range(6):
        noise, real = batch(index, me())[0], batch(index + 1, me())[0]
        fake = net_g(noise).detach() if kind == "one backward" else g.net(noise).detach()
        if kind == "one backward":  # DDP allows one forward per backward.
            scores = net_d(torch.cat([fake, real]))
            (scores[:16].mean() - scores[16:].mean()).backward()
        else:
            net_d(fake).mean().backward()
            (-net_d(real).mean()).backward()
        take(of_d)
        if index % 2:
            (-d.net(net_g(noise)).mean()).backward()
            take(of_g)
            of_d.zero_grad()
    g.right(3)
    d.right(6)
    return [g.bits(), d.bits()]


@program
def lora_in_ddp() -> Any:
    torch.manual_seed(0)
    net = mlp()
    net[0].requires_grad_(False)
    net.add_module("lora_out", nn.Linear(16, 16))
    trial = world(net)
    called = DistributedDataParallel(trial.net)
    optimizer = AdamW([p for p in called.parameters() if p.requires_grad], lr=0.01)
    trial.manager.attach(called, optimizer=optimizer)
    trial.train(optimizer, STEPS, net=called, rank=me())
    trial.right(STEPS, lambda fqn, role: role != "grad_output")
    return trial.bits()


@program
def averaged_in_ddp_and_evaluated_on_rank_0() -> Any:
    trial, net, optimizer = ddp_trial()
    average = AveragedModel(trial.net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for index in range(STEPS):
        trial.train(optimizer, 1, index, net, me())
        average.update_parameters(trial.net)
        if me() == 0:
            average.eval()
            trial.evaluate(average)
    trial.right(STEPS)
    return trial.bits()


@variants(order=["warm-up from zero"])
def scheduler_in_ddp(order: str) -> Any:
    trial, net, optimizer = ddp_trial()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 3)
    trial.train(optimizer, STEPS, 0, net, me(), schedule.step)
    trial.right(STEPS - 1)
    return trial.bits()


@variants(attached=["inner", "manual"])
def local_sgd(attached: str) -> Any:
    """Ranks train separately, and average their weights every second step."""
    trial = world()
    optimizer = trial.sgd()
    if attached == "inner":
        trial.manager.attach(optimizer=optimizer)
    else:
        trial.manager.attach(boundary="manual")
    for index in range(STEPS):
        trial.train(optimizer, 1, index, rank=me())
        if index % 2:
            for p in trial.parameters():
                dist.all_reduce(p.data)
                p.data.div_(2)
        if attached == "manual":
            trial.manager.step()
    trial.right(STEPS)
    return fp8_bits(trial.manager)


# FSDP, tensor parallelism ------------------------------------------------------------------------


def whole_weights(net: nn.Module) -> dict[str, Tensor]:
    """Return the weights by the plain net's names. COLLECTIVE."""
    found = {}
    for name, p in net.named_parameters():
        value = p.detach()
        found[name] = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
    return found


def near(trial: Trial, output: Tensor, weights: dict[str, Tensor], x: Tensor) -> None:
    with torch.no_grad():
        trial.errors.append(off(output, functional_call(trial.twin, weights, x)))


@contextlib.contextmanager
def unsynced(net: Any, on: bool) -> Iterator[None]:
    """Use FSDP2's no_sync."""
    net.set_requires_gradient_sync(not on)
    yield
    net.set_requires_gradient_sync(True)


def fsdp2_trial(mesh: DeviceMesh | None = None, gather: bool = False, recipe: Any = None) -> tuple[Trial, Optimizer]:
    group = dist.group.WORLD if mesh is None else mesh
    trial = Trial(recipe=recipe, group=group, fp8_all_gather=gather, judged=False)
    for layer in (trial.net[0], trial.net[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(trial.net, mesh=mesh)
    optimizer = AdamW(trial.net.parameters(), lr=0.01)
    trial.manager.attach(trial.net, optimizer=optimizer)
    return trial, optimizer


def train_sharded(trial: Trial, optimizer: Optimizer, steps: int, microbatches: int = 1, start: int = 0) -> None:
    for step in range(start, start + steps):
        weights = whole_weights(trial.net)
        for micro in range(microbatches):
            x, y = batch(step * microbatches + micro, me())
            with unsynced(trial.net, micro < microbatches - 1):
                output = trial.net(x)
                near(trial, output, weights, x)
                (nn.functional.mse_loss(output, y) / microbatches).backward()
        nn.utils.clip_grad_norm_(trial.net.parameters(), 10.0)
        take(optimizer)


@cases({"gather": False, "microbatches": 3}, {"gather": True, "microbatches": 3}, {"gather": True, "microbatches": 1})
def fsdp2(gather: bool, microbatches: int) -> Any:
    trial, optimizer = fsdp2_trial(gather=gather)
    train_sharded(trial, optimizer, STEPS, microbatches)
    trial.accurate()
    state_is_right(trial.manager, STEPS)
    return fp8_bits(trial.manager)


@variants(recipe=["current", "rowwise", "block"])
def fsdp2_with_other_recipes(recipe: str) -> Any:
    trial, optimizer = fsdp2_trial(
        gather=recipe == "current",
        recipe={"current": CurrentScaling, "rowwise": RowwiseScaling, "block": BlockScaling}[recipe](),
    )
    train_sharded(trial, optimizer, STEPS)
    trial.accurate()
    assert trial.manager.steps == STEPS
    return None


@cases({"gather": False, "shape": (2, 1)}, {"gather": True, "shape": (1, 2)})
def hsdp(gather: bool, shape: tuple[int, int]) -> Any:
    trial, optimizer = fsdp2_trial(mesh_of(shape, ("replicate", "shard")), gather)
    train_sharded(trial, optimizer, STEPS)
    trial.accurate()
    state_is_right(trial.manager, STEPS)
    return fp8_bits(trial.manager)


@cases({"gather": False, "how": "copy_"}, {"gather": True, "how": "swapped_weights"})
def fsdp2_ema_swapped_in_and_out(gather: bool, how: str) -> Any:
    """Swap sharded parameters for an evaluation; training is not affected."""
    swapped, still = fsdp2_trial(gather=gather), fsdp2_trial(gather=gather)
    for trial, optimizer in (swapped, still):
        average = [p.detach().clone() for p in trial.net.parameters()]
        for step in range(STEPS):
            train_sharded(trial, optimizer, 1, start=step)
            with torch.no_grad():
                for mean, p in zip(average, trial.net.parameters()):
                    mean.lerp_(p.detach(), 0.5)
            context: Any = trial.manager.swapped_weights if how == "swapped_weights" else contextlib.nullcontext
            if trial is swapped[0]:
                with torch.no_grad(), context():
                    mine = [p.detach().clone() for p in trial.net.parameters()]
                    for mean, p in zip(average, trial.net.parameters()):
                        p.copy_(mean)
                    weights = whole_weights(trial.net)
                    trial.net.eval()
                    near(trial, trial.net(batch(0)[0]), weights, batch(0)[0])
                    trial.net.train()
                    for old, p in zip(mine, trial.net.parameters()):
                        p.copy_(old)
    emptied = gather and how == "copy_"  # docs/fsdp2.md: a gathered weight that was written to may get a new scale.
    for trial, _ in (swapped, still):
        trial.accurate()
        state_is_right(trial.manager, STEPS, lambda fqn, role: role != "weight" or not emptied)
    if not emptied:
        assert weight_bits(swapped[0].net) == weight_bits(still[0].net)
        assert fp8_bits(swapped[0].manager) == fp8_bits(still[0].manager)
    return fp8_bits(still[0].manager)


@cases({"gather": False, "where": "before attach"}, {"gather": True, "where": "after attach"})
def fsdp2_optimizer_state_is_read(gather: bool, where: str) -> Any:
    trial = Trial(group=dist.group.WORLD, fp8_all_gather=gather, judged=False)
    for layer in (trial.net[0], trial.net[2]):
        fully_shard(layer)
    fully_shard(trial.net)
    optimizer = AdamW(trial.net.parameters(), lr=0.01)
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


@variants(hook=[True])
def fsdp1(hook: bool) -> Any:
    trial = world(judged=False)
    net = FullyShardedDataParallel(trial.net, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = AdamW(net.parameters(), lr=0.01)
    trial.manager.attach(net, optimizer=optimizer)
    if hook:
        net.register_comm_hook(DefaultState(dist.group.WORLD), fp8dist.fsdp.comm_hook(trial.manager))
    for index in range(STEPS):
        with FullyShardedDataParallel.summon_full_params(net, writeback=False):
            weights = {
                name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in net.named_parameters()
            }
        x, y = batch(index, me())
        output = net(x)
        near(trial, output, weights, x)
        nn.functional.mse_loss(output, y).backward()
        net.clip_grad_norm_(10.0)
        take(optimizer)
    trial.accurate()
    state_is_right(trial.manager, STEPS)
    return fp8_bits(trial.manager)


@variants(foreach=[True])
def tensor_parallel(foreach: bool) -> Any:
    mesh = mesh_of((2,), ("tp",))
    trial = Trial(group=mesh, judged=False)
    parallelize_module(trial.net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = AdamW(trial.net.parameters(), lr=0.01, foreach=foreach)
    trial.manager.attach(trial.net, optimizer=optimizer)
    for index in range(STEPS):
        weights = whole_weights(trial.net)
        x, y = batch(index)
        output = trial.net(x)
        near(trial, output, weights, x)
        nn.functional.mse_loss(output, y).backward()
        take(optimizer)
    trial.accurate()
    state_is_right(trial.manager, STEPS)
    return fp8_bits(trial.manager)


# What the ranks start with -------------------------------------------------------------------------


def own(*parameters: Tensor) -> None:
    """Give each rank its own values."""
    generator = torch.Generator().manual_seed(50 + me())
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


@variants(
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
    trial.train(optimizer, STEPS, net=called, rank=me())
    trial.right(STEPS)
    return None


@program
def stages_of_a_pipeline() -> Any:
    """Each rank has another module, in a group of its own."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    net = nn.Sequential(nn.Linear(32, 16)) if me() else mlp()
    own(*net.parameters())
    trial, optimizer = attached(net, group=groups[me()])
    trial.train(optimizer, STEPS, rank=me())
    trial.right(STEPS)
    return None


@program
def fsdp2_ignores_a_parameter_of_each_rank() -> Any:
    trial = world(judged=False)
    own(trial.net[2].bias)
    fully_shard(trial.net, ignored_params={trial.net[2].bias})
    optimizer = SGD(trial.net.parameters(), lr=0.01, foreach=False)
    trial.manager.attach(trial.net, optimizer=optimizer)
    trial.train(optimizer, STEPS, rank=me())
    assert trial.manager.steps == STEPS
    return None


@variants(wrapped=[True, False])
def attached_again_with_statistics_of_each_rank(wrapped: bool) -> Any:
    """In the middle of a training, and in a job that resumes it with statistics and caches of each rank."""
    net = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
    net.register_buffer("cache", torch.zeros(3))
    resumed = copy.deepcopy(net)
    trial = world(net)
    called = DistributedDataParallel(net) if wrapped else net
    for attachment in range(2):
        optimizer = SGD(called.parameters(), lr=0.01)
        trial.manager.attach(called, optimizer=optimizer)
        for index in range(2):
            trial.backward(2 * attachment + index, me(), net=called)
            for p in net.parameters() if not wrapped else ():
                dist.all_reduce(p.grad)
            take(optimizer)
        net.cache.fill_(me())
    state = {**net.state_dict(), "cache": torch.zeros(3)}
    again = world(resumed)
    called = DistributedDataParallel(resumed) if wrapped else resumed
    resumed.load_state_dict(state)
    again.manager.load_state_dict(trial.manager.state_dict())
    again.manager.attach(called)
    mean = net[1].running_mean.clone()
    dist.all_reduce(mean)
    assert not torch.equal(mean / 2, net[1].running_mean), "the ranks' statistics are meant to differ"
    return None


@variants(broadcast=[True, False])
def buffers_of_each_rank_before_the_first_step_of_ddp(broadcast: bool) -> Any:
    """A seed of each rank, or statistics of a forward before attach that DDP makes equal in its next forward."""
    trial = world()
    trial.net.register_buffer("mine", torch.zeros(3))
    net = DistributedDataParallel(trial.net, broadcast_buffers=broadcast)
    net.module.mine.fill_(me())
    optimizer = SGD(net.parameters(), lr=0.01)
    trial.manager.attach(net, optimizer=optimizer)
    trial.train(optimizer, STEPS, net=net, rank=me())
    trial.right(STEPS)
    return {name: of for name, of in trial.bits().items() if name != "mine"}


@variants(missing=["meta", "lazy"])
def a_part_has_no_memory_yet(missing: str) -> Any:
    net = mlp()
    net.add_module("later", nn.LazyLinear(16) if missing == "lazy" else nn.Linear(4, 4, device="meta"))
    manager = fp8dist.prepare(net, group=dist.group.WORLD, skip="later")
    manager.attach()
    return None


@program
def weights_are_inference_tensors() -> Any:
    with torch.inference_mode():
        net = mlp()
    fp8dist.prepare(net, group=dist.group.WORLD).attach()
    return None


# Pages -------------------------------------------------------------------------------------------


@variants(which=["docs/quickstart.md", "docs/ddp.md", "docs/fsdp2.md"])
def page(which: str) -> Any:
    """Run the first program in FP8 for two ranks that a page shows."""
    programs = (block.text for block in blocks(which, (ROOT / which).read_text()) if block.how == "ranks=2")
    code = next(text for text in programs if "fp8dist.prepare(" in text)
    code = re.sub(r"dist\.(init|destroy)_process_group\(\)", "pass", code)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        exec(compile(code, which, "exec"), {"__name__": "readme"})
    return None
