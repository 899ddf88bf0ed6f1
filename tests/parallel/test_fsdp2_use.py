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
from torch.distributed.fsdp import FSDPModule

import fp8dist
from fp8dist.errors import ConfigurationError
from tests.support.ranks import RankPool, on_ranks
from tests.support.running import Running
from tests.support.sharded import OPTIMIZERS, Job, arena_bits, full
from tests.support.suite import few
from tests.support.training import Net, batch, bits

pytestmark = pytest.mark.slow


def _started() -> Running:
    run = Running(Job())
    for _ in range(2):
        run.step()
    return run


@on_ranks(2)
def test_saved_state_dicts_do_not_mention_fp8dist() -> None:
    run = _started()
    called, found = run.called, {}
    kinds: dict[str, Callable[[], Any]] = {
        "state_dict": called.state_dict,
        "keep_vars": lambda: called.state_dict(keep_vars=True),
        "get_model_state_dict": lambda: get_model_state_dict(called),
        "optimizer": run.optimizer.state_dict,
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
    assert found == dict.fromkeys(found, False)


@pytest.mark.parametrize("kind", ["load_state_dict", "assign", "full"])
@on_ranks(2)
def test_state_dicts_load_again(kind: str) -> None:
    run, plain = _started(), _started()
    model, called = run.model, run.called
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
        for each in (run, plain) if kind == "assign" else ():
            each.optimizer = OPTIMIZERS["sgd"](each.called.parameters())
            each.manager.attach(each.called, optimizer=each.optimizer)
    after = {name: bits(value) for name, value in full(model).items()}
    losses = [(run.step(), plain.step()) for _ in range(2)]
    locals_ = {type(p._local_tensor).__name__ for n, p in model.named_parameters() if n.endswith("weight")}
    assert before == after
    # Not bitwise: the former scales came from older weights, the new ones come from these.
    assert [ours for ours, _ in losses] == pytest.approx([plain for _, plain in losses], rel=0.02)
    assert locals_ == {"FP8Shard"}


@on_ranks(2)
def test_copies_and_sums_of_parameters() -> None:
    run = _started()
    model, called = run.model, run.called
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
    optimizers, parameters = copy.deepcopy((run.optimizer, list(called.parameters())))
    found["deepcopied with its optimizer"] = all(type(p._local_tensor) is Tensor for p in parameters) and (
        len(optimizers.param_groups) == 1
    )
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
    run.step()
    assert found.pop("sum") == pytest.approx(found.pop("expected sum"), rel=1e-4)
    assert "FSDP does not support deepcopy" in found.pop("deepcopied model")
    assert found == dict.fromkeys(found, True)


def _manual(parallel: str) -> tuple[list[float], dict[str, bytes]]:
    run = Running(Job(parallel=parallel))
    run.manager.attach(run.called, optimizer=run.optimizer, boundary="manual")
    losses = []
    for index in range(4):
        losses.append(run.step())
        if index >= 2:  # An evaluation of the updated weights, before the step ends.
            with torch.no_grad():
                run.called(batch(9, index)[0])
        run.manager.step()
    return losses, arena_bits(run.manager)


def test_manual_boundaries_as_under_ddp(two_ranks: RankPool) -> None:
    assert two_ranks.run(_manual, "fsdp2") == two_ranks.run(_manual, "ddp")


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
    for module in run.called.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _reloaded(run: Running) -> None:
    state = {name: value.clone() for name, value in run.called.state_dict().items()}
    with torch.no_grad():
        for parameter in run.called.parameters():
            parameter.copy_(parameter * 1.01)
    run.called.load_state_dict(state)
    with torch.no_grad():
        for name, parameter in run.called.named_parameters():
            parameter.copy_(state[name])


def _validated(run: Running) -> None:
    """Weights stay gathered from here until the next step's backward."""
    with torch.inference_mode():
        run.called(batch(dist.get_rank(), 100)[0])


def _evaluated(grad: bool) -> Callable[[Running], float]:
    """Evaluate much larger inputs before the forward, and between forward and backward."""

    def step(run: Running) -> float:
        x = batch(9, run.index)[0] * 100
        run.called.eval()
        with torch.set_grad_enabled(grad):
            run.called(x)
        run.called.train()
        loss = run.loss()
        with torch.no_grad():
            run.called(x)
        loss.backward()
        return run.update(loss)

    return step


def _other_weights_evaluated(run: Running) -> float:
    loss = run.loss()
    loss.backward()
    kept = [parameter.detach().clone() for parameter in run.called.parameters()]
    with torch.no_grad():
        for parameter in run.called.parameters():
            parameter.mul_(0.75)
        run.called(batch(dist.get_rank(), 50)[0])
        for parameter, value in zip(run.called.parameters(), kept):
            parameter.copy_(value)
    return run.update(loss)


def _nan_for_a_while(run: Running) -> None:
    weight: Any = run.model.first.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
        run.called(batch(0, 0)[0])
        weight.copy_(kept)
        run.called(batch(0, 0)[0])


HARMLESS: dict[str, tuple[Job, Callable[[Running], float]]] = {
    "attach again": (Job(), _before(lambda run: run.manager.attach(run.called, optimizer=run.optimizer))),
    "moved to where it is, with uneven shards": (Job(model="mlp"), _before(_moved)),
    "detach and restore, which are refused": (Job(), _before(_refused_undo)),
    "a failed forward": (Job(), _before(_failed_forward)),
    "a reload of the same weights": (Job(optimizer="sgd"), _before(_reloaded)),
    "a validation in inference mode": (Job(reshard=False), _before(_validated)),
    "evaluations": (Job(update="next_step"), _evaluated(False)),
    "evaluations with grad": (Job(), _evaluated(True)),
    "an evaluation of other weights": (Job(optimizer="sgd"), _other_weights_evaluated),
    "a NaN in a weight for a while": (Job(optimizer="sgd"), _before(_nan_for_a_while)),
}


def _trained(what: str, harmless: bool) -> tuple[list[float], dict[str, bytes], dict[str, bytes]]:
    """Return losses, FP8 state and parameters after a plain step and two of the kind ``what``."""
    job, step = HARMLESS[what]
    run = Running(job)
    losses = [run.step(), *(step(run) if harmless else run.step() for _ in range(2))]
    return losses, arena_bits(run.manager), {name: bits(value) for name, value in full(run.model).items()}


KEPT = ("attach again", "a failed forward", "evaluations with grad", "a NaN in a weight for a while")


@pytest.mark.parametrize("what", few(HARMLESS, *KEPT))
def test_training_goes_on_as_without(three_ranks: RankPool, what: str) -> None:
    assert three_ranks.run(_trained, what, True) == three_ranks.run(_trained, what, False)


@pytest.mark.parametrize("kind", ["plain", "ddp"])
@on_ranks(2)
def test_without_fsdp2_it_is_an_error(kind: str) -> None:
    model = Net()
    manager = fp8dist.prepare(model, group=dist.group.WORLD, fp8_all_gather=True)
    called = nn.parallel.DistributedDataParallel(model) if kind == "ddp" else model
    text = r"call fully_shard\(\) before attach\(\), or leave fp8_all_gather out"
    with pytest.raises(ConfigurationError, match=text):
        manager.attach(called)


def test_settings_that_cannot_be() -> None:
    for settings, match in (({"amax_sync": False}, "amax_sync"), ({"eval_precision": "high"}, "eval_precision")):
        with pytest.raises(ConfigurationError, match=match):
            fp8dist.prepare(Net(), fp8_all_gather=True, **settings)  # type: ignore[arg-type]


@on_ranks(2)
def test_a_gathered_weight_that_comes_back_into_fp8_keeps_its_scale() -> None:
    """The scale is checked whenever the weight is gathered."""
    run = _started()
    run.manager.set_precision("first", "high")
    run.step()
    run.manager.set_precision("first", "fp8")
    found = {slot.role for sync in run.manager._syncs for slot, cold in zip(sync.arena.index, sync.arena.cold) if cold}
    assert found == {"input", "grad_output"}
