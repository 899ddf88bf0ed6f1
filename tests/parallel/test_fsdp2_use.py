"""Uses of an FSDP2 model besides stepping: state dicts, copies, evaluation, checkpointing, mistakes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import fp8dist
from fp8dist.errors import ConfigurationError
from tests.support.ranks import RankPool
from tests.support.sharded import OPTIMIZERS, Job, arena_bits, build, full
from tests.support.training import Net, batch, bits

pytestmark = pytest.mark.slow


def _started(job: Job = Job(), steps: int = 2) -> tuple[Any, Any, fp8dist.StateManager, torch.optim.Optimizer]:  # noqa: B008
    model, called, manager, optimizer = build(job)
    assert manager is not None
    for index in range(steps):
        _step(called, optimizer, index)
    return model, called, manager, optimizer


def _step(called: Any, optimizer: torch.optim.Optimizer, index: int) -> float:
    x, y = batch(dist.get_rank(), index)
    loss = nn.functional.mse_loss(called(x).float(), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _state_dicts() -> dict[str, Any]:
    _, called, _manager, optimizer = _started()
    found: dict[str, Any] = {}
    kinds: dict[str, Callable[[], Any]] = {
        "state_dict": called.state_dict,
        "keep_vars": lambda: called.state_dict(keep_vars=True),
        "get_model_state_dict": lambda: get_model_state_dict(called),
        "optimizer": optimizer.state_dict,
        "parameters": lambda: dict(called.named_parameters()),
        "local": lambda: {n: p.to_local() for n, p in called.named_parameters()},
        "detached": lambda: {n: p.detach().to_local() for n, p in called.named_parameters()},
    }
    for name, make in kinds.items():
        buffer = io.BytesIO()
        try:
            torch.save(make(), buffer)
            found[name] = b"FP8Shard" in buffer.getvalue() or b"fp8dist" in buffer.getvalue()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_saved_state_dicts_do_not_mention_fp8dist(two_ranks: RankPool) -> None:
    for found in two_ranks.run(_state_dicts):
        assert found == dict.fromkeys(found, False)


def _round_trip(kind: str) -> tuple[Any, ...]:
    model, called, manager, optimizer = _started()
    _plain_model, plain, plain_manager, plain_optimizer = _started()
    before = {name: bits(value) for name, value in full(model).items()}
    buffer = io.BytesIO()
    torch.save(called.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if kind == "full":
        whole = {name: value.full_tensor() for name, value in state.items()}
        set_model_state_dict(called, whole, options=StateDictOptions(full_state_dict=True))
    else:
        called.load_state_dict(state, assign=kind == "assign")
        if kind == "assign":
            optimizer = OPTIMIZERS["sgd"](called.parameters())
            plain_optimizer = OPTIMIZERS["sgd"](plain.parameters())
            manager.attach(called, optimizer=optimizer)
            plain_manager.attach(plain, optimizer=plain_optimizer)
    after = {name: bits(value) for name, value in full(model).items()}
    losses = [(_step(called, optimizer, i), _step(plain, plain_optimizer, i)) for i in range(2, 4)]
    locals_ = {type(p._local_tensor).__name__ for n, p in model.named_parameters() if n.endswith("weight")}
    return before, after, losses, locals_


@pytest.mark.parametrize("kind", ["load_state_dict", "assign", "full"])
def test_state_dicts_load_again(two_ranks: RankPool, kind: str) -> None:
    for before, after, losses, locals_ in two_ranks.run(_round_trip, kind):
        assert before == after
        # Not bitwise: the former scales came from older weights, the new ones come from these.
        assert [ours for ours, _ in losses] == pytest.approx([plain for _, plain in losses], rel=0.02)
        assert locals_ == {"FP8Shard"}


def _copies() -> dict[str, Any]:
    model, called, _manager, optimizer = _started()
    found: dict[str, Any] = {}
    ema = {name: p.detach().clone() for name, p in called.named_parameters()}
    for _ in range(2):
        for name, p in called.named_parameters():
            ema[name].lerp_(p.detach(), 0.1)
    found["ema"] = all(type(value.to_local()) is Tensor for value in ema.values())
    found["sum"] = float(sum(p.detach().float().sum() for p in called.parameters()).full_tensor())
    found["expected sum"] = float(sum(value.float().sum() for value in full(model).values()))
    weight = model.branch.weight
    found["full"] = bits(weight.full_tensor()) == bits(full(model)["branch.weight"])
    found["norm"] = float(nn.utils.get_total_norm(called.parameters()).full_tensor()) > 0
    for name, make in {
        "deepcopied parameter": lambda: copy.deepcopy(weight),
        "deepcopied local": lambda: copy.deepcopy(weight.to_local().detach()),
        "numpy": lambda: torch.from_numpy(weight.to_local().detach().numpy().copy()),
        "to": lambda: weight.detach().to(torch.bfloat16),
        "clone": lambda: weight.detach().clone().to_local(),
        "empty_like": lambda: torch.empty_like(weight).to_local(),
        "repr": lambda: torch.zeros(len(repr(weight))),
        "view": lambda: weight.to_local().detach().view(-1),
        "cat": lambda: torch.cat([p.to_local().detach().flatten() for p in called.parameters()]),
    }.items():
        try:
            made = make()
            local = made.to_local() if hasattr(made, "to_local") else made
            found[name] = type(local) in (Tensor, nn.Parameter)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    try:
        copy.deepcopy(called)
        found["deepcopied model"] = "copied"
    except Exception as error:
        found["deepcopied model"] = f"{type(error).__name__}: {error}"
    _step(called, optimizer, 2)
    return found


def test_copies_and_sums_of_parameters(two_ranks: RankPool) -> None:
    for found in two_ranks.run(_copies):
        assert found.pop("sum") == pytest.approx(found.pop("expected sum"), rel=1e-4)
        assert "FSDP does not support deepcopy" in found.pop("deepcopied model")
        assert found == dict.fromkeys(found, True)


def _evals(between: str) -> tuple[Any, Any, Any, Any]:
    runs = []
    for evaluate in (True, False):
        _model, called, manager, optimizer = _started(Job(update=between.partition(" ")[2] or "same_step"))
        losses = []
        for index in range(2, 5):
            if evaluate:
                called.eval()
                if "no_grad" in between:
                    with torch.no_grad():
                        called(batch(9, index)[0] * 100)
                else:
                    called(batch(9, index)[0] * 100)
                called.train()
            x, y = batch(dist.get_rank(), index)
            loss = nn.functional.mse_loss(called(x), y)
            if evaluate:
                with torch.no_grad():
                    called(batch(9, index)[0] * 100)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        runs += [losses, arena_bits(manager)]
    return tuple(runs)  # type: ignore[return-value]


@pytest.mark.parametrize("between", ["no_grad next_step", "grad same_step"])
def test_eval_passes_change_no_state(two_ranks: RankPool, between: str) -> None:
    for losses, state, plain_losses, plain_state in two_ranks.run(_evals, between):
        assert losses == plain_losses
        assert state == plain_state


def _manual(parallel: str) -> tuple[list[float], dict[str, bytes]]:
    _model, called, manager, optimizer = build(Job(parallel=parallel))
    assert manager is not None
    manager.attach(called, optimizer=optimizer, boundary="manual")
    losses = []
    for index in range(4):
        losses.append(_step(called, optimizer, index))
        if index >= 2:  # An evaluation of the updated weights, before the step ends.
            with torch.no_grad():
                called(batch(9, index)[0])
        manager.step()
    return losses, arena_bits(manager)


def test_manual_boundaries_as_under_ddp(two_ranks: RankPool) -> None:
    assert two_ranks.run(_manual, "fsdp2") == two_ranks.run(_manual, "ddp")


def _fails_in_forward(where: str) -> tuple[Any, Any, Any, Any]:
    results = []
    for failing in (True, False):
        model, called, _manager, optimizer = _started()
        if failing:
            if where == "forward":
                handle = model.branch.register_forward_pre_hook(_raise)
                with pytest.raises(ZeroDivisionError):
                    called(batch(0, 0)[0])
            else:
                handle = model.last.register_forward_hook(lambda m, a, out: _Raise.apply(out))
                loss = called(batch(0, 0)[0]).sum()
                with pytest.raises(ZeroDivisionError):
                    loss.backward()
            handle.remove()
            optimizer.zero_grad()
            for module in called.modules():
                if hasattr(module, "reshard"):
                    module.reshard()
        losses = [_step(called, optimizer, index) for index in range(2, 4)]
        results += [losses, {name: bits(value) for name, value in full(model).items()}]
    return tuple(results)  # type: ignore[return-value]


def _raise(*args: Any) -> None:
    raise ZeroDivisionError


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ZeroDivisionError


def test_an_exception_in_forward_and_going_on(two_ranks: RankPool) -> None:
    # FSDP2 itself does not recover from an error in backward (its training state stays PRE_BACKWARD).
    for losses, parameters, plain_losses, plain_parameters in two_ranks.run(_fails_in_forward, "forward"):
        assert losses == plain_losses
        assert parameters == plain_parameters


def _undoes() -> tuple[list[str], list[float], list[float]]:
    _, called, manager, optimizer = _started()
    _, plain, _, plain_optimizer = _started()
    messages = []
    for undo in (manager.detach, lambda: fp8dist.restore(called)):
        with pytest.raises(ConfigurationError) as refused:
            undo()
        messages.append(str(refused.value))
    return (
        messages,
        [_step(called, optimizer, index) for index in range(2, 4)],
        [_step(plain, plain_optimizer, index) for index in range(2, 4)],
    )


def test_detach_and_restore_are_refused_and_do_no_harm(two_ranks: RankPool) -> None:
    for messages, losses, plain in two_ranks.run(_undoes):
        for how, message in zip(("detach", "restore"), messages):
            assert message.startswith(f"{how}() cannot change what FSDP2 gathers")
            assert "save the state_dict and build the model anew" in message
        assert losses == plain


def _moves() -> tuple[list[float], list[float]]:
    job = Job(model="mlp")  # Uneven shards on three ranks: FSDP2 pads them again.
    _, called, _, optimizer = _started(job)
    _, plain, _, plain_optimizer = _started(job)
    for move in (lambda: called.to("cpu"), called.float, called.cpu, called.zero_grad):
        move()
    return (
        [_step(called, optimizer, index) for index in range(2, 4)],
        [_step(plain, plain_optimizer, index) for index in range(2, 4)],
    )


def test_moving_to_where_it_is_changes_nothing(three_ranks: RankPool) -> None:
    for losses, plain in three_ranks.run(_moves):
        assert losses == plain


def _attach_again() -> tuple[list[float], list[float]]:
    _model, called, manager, optimizer = _started()
    _other_model, other, _, other_optimizer = _started()
    manager.attach(called, optimizer=optimizer)
    return (
        [_step(called, optimizer, index) for index in range(2, 5)],
        [_step(other, other_optimizer, index) for index in range(2, 5)],
    )


def test_attach_again_changes_nothing(two_ranks: RankPool) -> None:
    for ours, other in two_ranks.run(_attach_again):
        assert ours == other


# Mistakes ----------------------------------------------------------------------------------------


def _without_fsdp2(kind: str) -> str:
    model = Net()
    manager = fp8dist.prepare(model, group=dist.group.WORLD, fp8_all_gather=True)
    called: nn.Module = model
    if kind == "ddp":
        called = nn.parallel.DistributedDataParallel(model)
    try:
        manager.attach(called)
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["plain", "ddp"])
def test_without_fsdp2_it_is_an_error(two_ranks: RankPool, kind: str) -> None:
    for message in two_ranks.run(_without_fsdp2, kind):
        assert "call fully_shard() before attach(), or leave fp8_all_gather out" in message


def test_settings_that_cannot_be() -> None:
    for settings, match in (({"amax_sync": False}, "amax_sync"), ({"eval_precision": "high"}, "eval_precision")):
        with pytest.raises(ConfigurationError, match=match):
            fp8dist.prepare(Net(), fp8_all_gather=True, **settings)  # type: ignore[arg-type]


def _small_group() -> str:
    from torch.distributed.fsdp import fully_shard

    groups = [dist.new_group([rank]) for rank in range(2)]
    model = Net()
    manager = fp8dist.prepare(model, group=groups[dist.get_rank()], fp8_all_gather=True)
    fully_shard(model)
    try:
        manager.attach(model)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_group_smaller_than_the_shard_mesh_is_an_error(two_ranks: RankPool) -> None:
    for message in two_ranks.run(_small_group):
        assert "ranks 0, 1," in message
        assert "whole mesh" in message


def _writes_in_forward() -> str:
    model, called, _manager, _optimizer = _started()

    def write(module: nn.Module, args: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(2)  # type: ignore[operator]

    handle = model.branch.register_forward_pre_hook(write)
    try:
        called(batch(0, 0)[0])
    except ConfigurationError as error:
        return str(error)
    finally:
        handle.remove()
    return ""


def test_writing_to_a_gathered_weight_is_an_error(two_ranks: RankPool) -> None:
    for message in two_ranks.run(_writes_in_forward):
        assert "write to the sharded parameter" in message


def _back_in_fp8() -> set[str]:
    _, called, manager, optimizer = _started()
    manager.set_precision("first", "high")
    _step(called, optimizer, 2)
    manager.set_precision("first", "fp8")
    return {slot.role for sync in manager._syncs for slot, cold in zip(sync.arena.index, sync.arena.cold) if cold}


def test_a_gathered_weight_that_comes_back_into_fp8_keeps_its_scale(two_ranks: RankPool) -> None:
    """The scale is checked whenever the weight is gathered."""
    assert two_ranks.run(_back_in_fp8) == [{"input", "grad_output"}] * 2
