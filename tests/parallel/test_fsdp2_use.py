"""Uses of an FSDP2 model besides stepping: state dicts, copies, evaluation, ties, tensor parallelism, mistakes."""

from __future__ import annotations

import contextlib
import copy
import io
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import DelayedScaling
from fp8dist.errors import ConfigurationError
from fp8dist.modules.fp8_weight import FP8Weight, Gathered
from tests.support.meshes import mesh_of
from tests.support.quiet import mlp
from tests.support.ranks import RankPool, on_ranks
from tests.support.running import Running, take_steps
from tests.support.sharded import Job, TiedEmbedding, arena_bits, fp8_linears, full, seeded, shard
from tests.support.suite import few
from tests.support.training import batch, bits, saved_tensors, state_bits

pytestmark = pytest.mark.slow

prepared = partial(fp8dist.prepare, recipe=DelayedScaling(history_len=4), fp8_all_gather=True)


@on_ranks(2)
def test_saved_state_dicts_copies_and_sums_of_parameters_are_plain() -> None:
    run = Running(Job())
    run.step()
    called, weight = run.called, run.model.branch.weight
    for saved in (
        called.state_dict(),
        called.state_dict(keep_vars=True),
        get_model_state_dict(called),
        run.optimizer.state_dict(),
        dict(called.named_parameters()),
        {n: p.to_local() for n, p in called.named_parameters()},
        {n: p.detach().to_local() for n, p in called.named_parameters()},
    ):
        buffer = io.BytesIO()
        torch.save(saved, buffer)
        assert b"FP8Shard" not in buffer.getvalue()
        assert b"fp8dist" not in buffer.getvalue()
    ema = {name: p.detach().clone() for name, p in called.named_parameters()}
    for name, p in called.named_parameters():
        ema[name].lerp_(p.detach(), 0.1)
    optimizer, parameters = copy.deepcopy((run.optimizer, list(called.parameters())))
    assert len(optimizer.param_groups) == 1
    made = [
        *ema.values(),
        *parameters,
        copy.deepcopy(weight),
        copy.deepcopy(weight.to_local().detach()),
        torch.from_numpy(weight.to_local().detach().numpy().copy()),
        weight.detach().to(torch.bfloat16),
        torch.empty_like(weight),
        weight.to_local().detach().view(-1),
        torch.cat([p.to_local().detach().flatten() for p in called.parameters()]),
    ]
    locals_ = [each.to_local() if hasattr(each, "to_local") else each for each in made]
    assert {type(each) for each in locals_} <= {Tensor, nn.Parameter}
    assert repr(weight)
    whole = full(run.model)
    assert bits(weight.full_tensor()) == bits(whole["branch.weight"])
    total = sum(p.detach().float().sum() for p in called.parameters())
    expected = sum(float(value.float().sum()) for value in whole.values())
    assert float(total.full_tensor()) == pytest.approx(expected, rel=1e-4)  # type: ignore[union-attr]
    assert float(nn.utils.get_total_norm(called.parameters()).full_tensor()) > 0  # type: ignore[attr-defined]
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        copy.deepcopy(called)
    run.step()


# What does no harm: training goes on as if it had not been done. ---------------------------------


def _before(action: Callable[[Running], Any]) -> Callable[[Running], float]:
    def step(run: Running) -> float:
        action(run)
        return run.step()

    return step


def _moved(run: Running) -> None:
    for move in (lambda: run.called.to("cpu"), run.called.float, run.called.cpu):
        move()


def _refused_undo(run: Running) -> None:
    for how, undo in (("detach", run.manager.detach), ("restore", lambda: fp8dist.restore(run.called))):
        with pytest.raises(ConfigurationError, match=rf"^{how}\(\) cannot change what FSDP2 gathers") as refused:
            undo()
        assert "save the state_dict and build the model anew" in str(refused.value)


def _failed_forward(run: Running) -> None:
    """With the next batch, so its amaxes are not larger. FSDP2 itself does not recover from an error in backward."""

    def fail(*args: Any) -> None:
        raise ZeroDivisionError

    handle = run.model.branch.register_forward_pre_hook(fail)  # type: ignore[union-attr]
    with pytest.raises(ZeroDivisionError):
        run.called(batch(dist.get_rank(), run.index)[0])
    handle.remove()
    run.reshard()


def _reloaded(run: Running) -> None:
    state = {name: value.clone() for name, value in run.called.state_dict().items()}
    with torch.no_grad():
        for parameter in run.called.parameters():
            parameter.copy_(parameter * 1.01)
    run.called.load_state_dict(state)


def _all_reloaded(run: Running) -> None:
    """AdamW has made the weights outgrow their scales. Attaching again forgets no trust in loaded state."""
    run.called.load_state_dict({name: value.clone() for name, value in run.called.state_dict().items()})
    run.manager.load_state_dict(run.manager.state_dict())
    run.manager.attach(run.called, optimizer=run.optimizer)


def _validated(run: Running) -> None:
    """Weights stay gathered from here until the next step's backward."""
    with torch.inference_mode():
        run.called(batch(dist.get_rank(), 100)[0])


def _attached_while_gathered(run: Running) -> None:
    _validated(run)
    run.manager.attach(run.called, optimizer=run.optimizer)


def _evaluated(run: Running) -> float:
    """Evaluate much larger inputs before the forward, with grad on, and between forward and backward."""
    x = batch(9, run.index)[0] * 100
    run.called.eval()
    run.called(x)
    run.called.train()
    loss = run.loss()
    with torch.no_grad():
        run.called(x)
    return run.finish(loss)


def _handed_out(run: Running) -> None:
    """It is local, and does not count as a write."""
    if dist.get_rank() == 0:
        run.called.state_dict()


def _nan_for_a_while(run: Running) -> None:
    weight: Any = run.model.first.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
        run.called(batch(0, 0)[0])
        weight.copy_(kept)
        run.called(batch(0, 0)[0])


SGD, KEPT = Job(optimizer="sgd"), Job(reshard=False)
HARMLESS: dict[str, tuple[Job, Callable[[Running], float]]] = {
    "attach again": (Job(), _before(lambda run: run.manager.attach(run.called, optimizer=run.optimizer))),
    "attach while weights are gathered": (KEPT, _before(_attached_while_gathered)),
    "moved to where it is": (Job(), _before(_moved)),
    "detach and restore, which are refused": (Job(), _before(_refused_undo)),
    "a failed forward": (Job(), _before(_failed_forward)),
    "a reload of the same weights": (SGD, _before(_reloaded)),
    "a reload of all, and attach": (Job(), _before(_all_reloaded)),
    "a validation in inference mode": (KEPT, _before(_validated)),
    "evaluations with grad": (Job(), _evaluated),
    "a state dict on one rank": (Job(), _before(_handed_out)),
    "a state dict on one rank, high precision": (Job(fp8_all_gather=False), _before(_handed_out)),
    "a NaN in a weight for a while": (SGD, _before(_nan_for_a_while)),
}
RARE = {
    *("attach again", "moved to where it is", "a reload of the same weights", "a validation in inference mode"),
    "a state dict on one rank, high precision",
}


def _trained(job: Job, step: str) -> Any:
    """Return losses, FP8 state and parameters after a plain step and two of a kind; "": plain ones."""
    run = Running(job)
    losses = [run.step(), *(HARMLESS[step][1](run) if step else run.step() for _ in range(2))]
    return losses, run.bits()


@pytest.fixture(scope="module")
def plainly(two_ranks: RankPool) -> Callable[[Job], Any]:
    """Return the results without anything harmless in between."""
    known: dict[str, Any] = {}

    def results(job: Job) -> Any:
        if repr(job) not in known:
            known[repr(job)] = two_ranks.run(_trained, job, "")
        return known[repr(job)]

    return results


@pytest.mark.parametrize("what", few(HARMLESS, *(HARMLESS.keys() - RARE)))
def test_training_goes_on_as_without(two_ranks: RankPool, plainly: Callable[[Job], Any], what: str) -> None:
    job = HARMLESS[what][0]
    assert two_ranks.run(_trained, job, what) == plainly(job)


class Losing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 48), nn.Linear(48, 16)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if x.isnan().any():
            raise ZeroDivisionError
        return nn.functional.mse_loss(self.last(self.first(x).relu()), y)

    forward = loss


@pytest.mark.parametrize("root_alone", [False, True])
@on_ranks(2)
def test_a_method_that_is_registered_as_a_forward_is_one(root_alone: bool) -> None:
    """In training and evaluation, after weights were written to, and after a call that raised."""
    results: list[Any] = []
    for registered in (False, True):
        torch.manual_seed(0)
        model: Any = Losing()
        manager = prepared(model, group=dist.group.WORLD)
        called = fully_shard(model) if root_alone else shard(model, True)
        register_fsdp_forward_method(called, "loss")
        optimizer = torch.optim.AdamW(called.parameters(), lr=0.03)
        manager.attach(called, optimizer=optimizer)
        call, losses = called.loss if registered else called, []
        for index in range(5):
            x, y = batch(dist.get_rank(), index)
            called.eval()
            with torch.no_grad():
                losses.append(call(x, y).item())
            called.train()
            if index == 2:
                with pytest.raises(ZeroDivisionError):
                    call(x * torch.nan, y)
            loss = call(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if index == 1:
                with torch.no_grad():
                    model.last.weight.mul_(8)
        results.append((losses, arena_bits(manager)))
    assert results[0] == results[1]


class _Encoding(nn.Sequential):
    def encode(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ZeroDivisionError
        return self(x)  # type: ignore[no-any-return]


@on_ranks(2)
def test_a_registered_method_of_a_part_that_raised_does_not_hide_the_models_forward() -> None:
    results = []
    for raises in (False, True):
        torch.manual_seed(0)
        model: Any = nn.Sequential(_Encoding(nn.Linear(32, 48)), nn.Linear(48, 16))
        manager = prepared(model, group=dist.group.WORLD)
        for part in (model[0], model):
            fully_shard(part)
        register_fsdp_forward_method(model[0], "encode")
        manager.attach(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
        x = batch(dist.get_rank(), 0)[0]
        model(x).sum().backward()
        if raises:
            with pytest.raises(ZeroDivisionError):
                model[0].encode(x * torch.nan)
        with torch.no_grad():
            model[1].weight.mul_(8)
        results.append(bits(model(x)))
    assert results[0] == results[1]


@on_ranks(2)
def test_ranks_evaluate_on_their_own_while_weights_stay_gathered() -> None:
    """As in reinforcement learning, where each rank writes a text of another length."""
    net: Any = mlp()
    manager = prepared(net, group=dist.group.WORLD)
    fully_shard(net, reshard_after_forward=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    manager.attach(net, optimizer=optimizer)
    x, outputs = torch.randn(16, 32), []
    for step in range(2):
        net.train()(x).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            outputs += [bits(net.eval()(x)) for _ in range(1 + step + 2 * dist.get_rank())]
        net.reshard()
    assert len(set(outputs)) == 2
    assert manager.check(parameters=False).consistent


@on_ranks(2)
def test_a_gathered_weight_that_comes_back_into_fp8_keeps_its_scale() -> None:
    """The scale is checked whenever the weight is gathered."""
    run = Running(Job())
    run.step()
    run.manager.set_precision("first", "high")
    run.step()
    run.manager.set_precision("first", "fp8")
    found = {slot.role for sync in run.manager._syncs for slot, cold in zip(sync.arena.index, sync.arena.cold) if cold}
    assert found == {"input", "grad_output"}


@pytest.mark.parametrize(("gather", "high"), [(True, False), (True, True), (False, False)])
@on_ranks(2)
def test_no_weight_is_kept_whole_until_backward(gather: bool, high: bool) -> None:
    """Neither as it was gathered nor its cast."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 192, bias=False), nn.ReLU(), nn.Linear(192, 64, bias=False))
    manager = prepared(model, group=dist.group.WORLD, fp8_all_gather=gather)
    called = shard(model, True)
    manager.attach(called, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(16, 64, requires_grad=True)
    with manager.no_fp8() if high else contextlib.nullcontext(), saved_tensors() as saved:
        output = called(x)
    kept = [tensor for tensor in saved if type(tensor) is Tensor]
    output.sum().backward()
    assert not [tensor for tensor in kept if tensor.numel() == 64 * 192]
    casts = [tensor.numel() for tensor in kept if tensor.element_size() == 1 and tensor.dtype != torch.bool]
    assert sum(casts) == (0 if high else 16 * (64 + 192))  # The inputs.


@on_ranks(2)
def test_gradients_in_high_precision_are_right() -> None:
    """Compare gradients in no_fp8() with plain products of the dequantised weights."""
    run = Running(Job(model="mlp"))
    linears, weights = fp8_linears(run.model), []

    def note(module: nn.Module, args: Any) -> None:
        weights.append(module.weight.high_precision().requires_grad_())

    for linear in linears.values():
        linear.register_forward_pre_hook(note)
    x, y = batch(dist.get_rank(), 0)
    with run.manager.no_fp8():
        nn.functional.mse_loss(run.called(x), y).backward()
    h = x
    for i, (weight, linear) in enumerate(zip(weights, linears.values())):
        h = nn.functional.linear(h, weight, linear.bias.full_tensor().detach())
        h = torch.relu(h) if i < len(weights) - 1 else h
    nn.functional.mse_loss(h, y).backward()
    for weight, linear in zip(weights, linears.values()):
        expected = weight.grad
        dist.all_reduce(expected)
        error = (linear.weight.grad.full_tensor() - expected / 2).abs().max() / expected.abs().max()
        assert float(error) < 1e-6


@on_ranks(2)
def test_writes_to_a_gathered_weight_are_refused() -> None:
    run, refused = Running(Job()), []

    def hook(module: nn.Module, args: Any) -> None:
        weight, other = module.weight, torch.ones(())
        for write in (
            lambda: weight.mul_(3.0),
            lambda: torch._foreach_mul_([weight], 3.0),
            lambda: torch.mul(other, 3.0, out=weight),
        ):
            with torch.no_grad(), pytest.raises(ConfigurationError, match="cannot be written to"):
                write()
            refused.append(write)

    run.model.first.register_forward_pre_hook(hook)  # type: ignore[union-attr]
    run.loss()
    assert len(refused) == 3


def test_only_a_view_of_the_same_shape_stays_in_fp8() -> None:
    rows = torch.randn(4, 6).to(torch.float8_e4m3fn)
    weight = FP8Weight(Gathered(rows, torch.tensor(0.5)), torch.float32)
    for same in (weight.view(4, 6), weight.detach()):
        assert type(same) is FP8Weight
    for shape in ((-1,), (2, 12), (1, 4, 6)):
        view = weight.view(*shape)
        assert type(view) is Tensor
        assert torch.equal(view, (rows.float() * 0.5).view(*shape))


# Models in which something is outside, tied, or split otherwise. -----------------------------------------------------


@pytest.mark.parametrize("trouble", ["cold", "written"])
@on_ranks(2, timeout=40.0)
def test_an_expert_of_one_rank_leaves_no_rank_alone(trouble: str) -> None:
    """Rank 0's expert is cold or was written to; rank 1's is not."""
    mesh = mesh_of((2, 1), ("ep", "edp"))
    model: Any = mlp(32, 32, 16)
    if trouble == "cold" and dist.get_rank() == 0:
        nn.init.zeros_(model[0].weight)
    manager = prepared(model, group=dist.group.WORLD, groups={"0": mesh["edp"]})
    fully_shard(model[0], mesh=mesh["edp"])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.attach(model, optimizer=optimizer)
    for step in range(3):
        if trouble == "written" and step == 1 and dist.get_rank() == 0:
            with torch.no_grad():
                model[0].weight.mul_(8)
        assert math.isfinite(*take_steps(model, optimizer, [step]))


@on_ranks(2)
def test_a_copy_made_before_sharding_has_its_own_state() -> None:
    """FSDP2 cannot copy a sharded model."""
    model = seeded("net")
    manager = prepared(model, group=dist.group.WORLD)
    twin = copy.deepcopy(model)
    states = []
    for one in (model, twin):
        own: Any = fp8dist.get_manager(one)
        called = shard(one)
        own.attach(called, optimizer=(optimizer := torch.optim.SGD(called.parameters(), lr=0.1)))
        take_steps(called, optimizer, range(2))
        states.append(state_bits(own))
    assert fp8dist.get_manager(model) is manager
    assert states[0] == states[1] == state_bits(manager)


@on_ranks(2)
def test_mistakes_are_refused() -> None:
    for wrap in (DistributedDataParallel, nn.Identity):
        model: Any = nn.Sequential(nn.Linear(32, 32))
        manager = prepared(model, group=dist.group.WORLD)
        called = wrap(model) if wrap is DistributedDataParallel else model
        with pytest.raises(ConfigurationError, match=r"^fp8_all_gather=True needs FSDP2, but.*: call fully_shard\(\)"):
            manager.attach(called)
    for gather in (True, False):
        model = nn.Sequential(nn.Linear(32, 32))
        manager = prepared(model, group=dist.group.WORLD, fp8_all_gather=gather)
        nn.utils.parametrizations.weight_norm(model[0])
        with pytest.raises(ConfigurationError, match=r"^0: its weight is no Parameter, and FSDP shards what it is"):
            manager.attach(fully_shard(model))
    model = seeded("net")
    manager = prepared(model, group=dist.group.WORLD)
    shard(model)
    with pytest.raises(ConfigurationError, match=r"attach\(\) must come before the first forward"):
        model(batch(0, 0)[0])
    assert manager.steps == 0


@on_ranks(2)
def test_casts_are_reused_under_tensor_parallelism() -> None:
    mesh = mesh_of((2,), ("tp",))
    model: Any = mlp(32, 64, 32)
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4), group=mesh)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    manager.attach(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    casts = 0
    for linear in fp8_linears(model).values():
        slots, caster = linear.fp8_slots, linear.fp8_slots.caster

        def counting(x: Any, request: Any, of: Any = slots, original: Any = caster.cast) -> Any:
            nonlocal casts
            casts += request.state is of._states[1]
            return original(x, request)

        caster.cast = counting  # type: ignore[method-assign]
    for index in range(3):
        model(batch(0, index)[0]).sum().backward()
    assert casts == 2  # One of each weight.


@pytest.mark.parametrize("named", [True, False])
@on_ranks(2)
def test_a_root_outside_of_the_model_must_be_named(named: bool) -> None:
    model: Any = seeded("net")
    whole = nn.Sequential(model, nn.Linear(16, 16))
    manager = prepared(model, group=dist.group.WORLD)
    fully_shard(model.first)
    fully_shard(whole)
    if not named:
        with pytest.raises(ConfigurationError, match=r"pass it as attach\(module=…\)"):
            manager.attach()
        return
    manager.attach(whole)
    whole(batch(dist.get_rank(), 0)[0]).sum().backward()
    assert all(linear.fp8_slots.note.resharded for linear in fp8_linears(model).values())


class TiedOutside(nn.Module):
    """The prepared part shares a weight with an embedding outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))
        self.embedding = nn.Embedding(48, 32)
        self.embedding.weight = self.body[0].weight

    def forward(self, x: Any) -> Any:
        return self.body(x + self.embedding(torch.arange(8)))


@pytest.mark.parametrize("outside", [True, False])
@on_ranks(2)
def test_a_weight_that_is_tied_to_an_embedding_is_gathered_in_high_precision(outside: bool) -> None:
    model: Any = TiedOutside() if outside else TiedEmbedding()
    tied, other = (model.body[0], model.body[1]) if outside else (model.lm_head, model.inner)
    manager = prepared(model.body if outside else model, group=dist.group.WORLD, skip=None)
    fully_shard(model)
    manager.attach(model)
    seen: dict[nn.Module, bool] = {}
    for module in (tied, other, model.embedding):
        module.register_forward_pre_hook(lambda m, args: seen.update({m: isinstance(m.weight, FP8Weight)}))
    model(batch(0, 0)[0]).sum().backward()
    assert seen == {model.embedding: False, tied: False, other: True}
