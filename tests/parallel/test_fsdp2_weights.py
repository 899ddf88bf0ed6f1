"""Sharded weights changed by something other than the optimizer: their scales adapt, or the user gets a warning."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import fp8dist
from fp8dist import CurrentScaling, DelayedScaling
from fp8dist.checks.checker import Event
from fp8dist.errors import ConfigurationError, ManifestMismatchError
from fp8dist.modules.fp8_weight import FP8Weight
from fp8dist.parallel.fsdp2 import LOOK_AHEAD
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.ranks import RankPool, on_ranks
from tests.support.running import FITS, Running
from tests.support.sharded import Job, arena_bits, fp8_linears, full, seeded
from tests.support.suite import few
from tests.support.training import batch, bits


def _times(factor: float) -> Callable[[Running], None]:
    def write(run: Running) -> None:
        with torch.no_grad():
            for linear in fp8_linears(run.model).values():
                linear.weight.mul_(factor)

    return write


def _foreach(run: Running) -> None:
    with torch.no_grad():
        for linear in fp8_linears(run.model).values():
            linear.weight.copy_(linear.weight * 8)


def _data_then_refresh(run: Running) -> None:
    for linear in fp8_linears(run.model).values():
        linear.weight.data.mul_(8)
    run.manager.refresh_weights()


def _local_then_refresh(run: Running) -> None:
    for linear in fp8_linears(run.model).values():
        linear.weight.to_local().data.mul_(8)  # type: ignore[operator]
    run.manager.refresh_weights()


def _load(run: Running, assign: bool = False) -> None:
    run.called.load_state_dict({k: v * 8 for k, v in run.called.state_dict().items()}, assign=assign)


def _load_and_attach(run: Running) -> None:
    _load(run)
    run.manager.attach(run.called, optimizer=run.optimizer)


def _replace_and_attach(run: Running) -> None:
    _load(run, assign=True)
    run.optimizer = torch.optim.SGD(run.called.parameters(), lr=1e-6)  # With 0, a step is no boundary.
    run.manager.attach(run.called, optimizer=run.optimizer)


def _before_the_step(run: Running) -> None:
    loss = run.loss()
    loss.backward()
    _times(8)(run)
    run.update(loss)


def _before_a_manual_step(run: Running) -> None:
    run.manager.attach(run.called, optimizer=run.optimizer, boundary="manual")
    loss = run.loss()
    loss.backward()
    run.update(loss)
    _times(8)(run)
    run.manager.step()


def _while_calibrating(run: Running) -> None:
    run.manager.attach(run.called)
    with run.manager.calibrate():
        run.called(batch(0, 0)[0])
        _times(8)(run)


def _before_setting_optimizer_state(run: Running) -> None:
    """torch steps a fresh optimizer once with a learning rate of 0, to create state for loading."""
    model = {k: v * 8 for k, v in run.called.state_dict().items()}
    fresh = torch.optim.AdamW(run.called.parameters(), lr=1e-3)
    run.manager.attach(run.called, optimizer=fresh)
    set_model_state_dict(run.called, model)
    set_optimizer_state_dict(run.called, fresh, get_optimizer_state_dict(run.called, run.optimizer))
    run.optimizer = fresh


def _before_loading_nothing(run: Running) -> None:
    _times(8)(run)
    run.manager.load_state_dict({}, strict=False)


def _before_an_attach_that_fails(run: Running) -> None:
    _times(8)(run)
    with (
        mock.patch("fp8dist.job.agreement.agree_on_manifests", side_effect=ManifestMismatchError("planted")),
        pytest.raises(ManifestMismatchError, match="planted"),
    ):
        run.manager.attach(run.called, optimizer=run.optimizer)
    run.manager.attach(run.called, optimizer=run.optimizer)


def _bad_for_a_while(run: Running) -> None:
    good = {name: value.clone() for name, value in run.called.state_dict().items()}
    _times(1000)(run)
    run.saturated()
    run.called.load_state_dict(good)


ADAMW, FUSED = Job(), Job(optimizer="adamw_fused", update="next_step", per_module=False)
WRITES: dict[str, tuple[Job, Callable[[Running], None]]] = {
    "times 8": (ADAMW, _times(8)),
    "by an eighth": (FUSED, _times(0.125)),
    "copy_": (ADAMW, _foreach),
    ".data, refresh": (FUSED, _data_then_refresh),
    "load_state_dict, times 8": (ADAMW, _load),
    "local, refresh": (FUSED, _local_then_refresh),
    "loaded, attached again": (ADAMW, _load_and_attach),
    "replaced, attached again": (ADAMW, _replace_and_attach),
    "before the optimizer's step": (ADAMW, _before_the_step),
    "before a manual step": (ADAMW, _before_a_manual_step),
    "while calibrating": (ADAMW, _while_calibrating),
    "before optimizer state is set": (ADAMW, _before_setting_optimizer_state),
    "before nothing is loaded": (ADAMW, _before_loading_nothing),
    "before an attach that fails": (ADAMW, _before_an_attach_that_fails),
    "bad weights for a while": (Job(optimizer="sgd"), _bad_for_a_while),
}


def _step_against_float32(run: Running) -> float:
    """Return a step's loss over the loss of the same weights in float32. E4M3 changes each number by at most 6 %."""
    plain = seeded(run.job.model)
    plain.load_state_dict(full(run.model))
    x, y = batch(dist.get_rank(), run.index)
    with torch.no_grad():
        expected = float(nn.functional.mse_loss(plain(x), y))
    return run.step() / expected


def _written(what: str) -> tuple[Any, ...]:
    job, write = WRITES[what]
    run = Running(job)
    for _ in range(2):
        run.step()
    write(run)
    shares = run.saturated()
    scales, fitting = run.scales(), run.fitting()
    windows = {n: run.manager.slot(n, "weight").amax_history.tolist() for n in fp8_linears(run.model)}
    before = run.counted
    loss = _step_against_float32(run)
    counted = run.counted - before
    inputs = run.manager.slot("first", "input").amax_history.tolist()
    return shares, scales, fitting, windows, inputs, loss, counted, arena_bits(run.manager)


@pytest.mark.parametrize("what", few(WRITES, *[*WRITES][1::2]))
def test_scales_follow_weights_that_were_written_to(two_ranks: RankPool, what: str) -> None:
    outcomes = two_ranks.run(_written, what)
    for shares, scales, fitting, windows, inputs, loss, counted, state in outcomes:
        assert max(shares.values()) < FITS
        assert scales == fitting
        assert all(not any(window) for window in windows.values())  # The window held amaxes of other weights.
        assert sum(1 for amax in inputs if amax) >= 3  # The windows of inputs stay.
        assert loss == pytest.approx(1, abs=0.1)
        assert counted == 0
        assert state == outcomes[0][-1]


def _unseen(job: Job) -> tuple[Any, ...]:
    run = Running(job)
    events: list[Event] = []
    run.manager.on_event(events.append)
    for _ in range(LOOK_AHEAD + 1):  # Until ranks no longer compare weights with their scales before forwards.
        run.step()
    before = run.counted
    assert not events
    for linear in fp8_linears(run.model).values():
        linear.weight.data.mul_(8)
    shares = run.saturated()
    with captured_log() as log:
        for _ in range(3):
            run.step()
        run.manager.check()
    return shares, run.counted - before, log, events, run.scales(), run.fitting()


def test_data_without_refresh_is_counted_and_told(two_ranks: RankPool) -> None:
    outcomes = two_ranks.run(_unseen, Job(update="next_step", optimizer="sgd"))
    for rank, (shares, counted, log, events, _scales, _fitting) in enumerate(outcomes):
        assert max(shares.values()) > 0.1  # Otherwise the test would prove nothing.
        assert counted == 3
        told = [entry for entry in log if "beyond" in entry[1]]
        assert len(told) == (rank == 0)  # One rank logs it.
        for level, message in told:
            assert level == logging.WARNING
            assert "branch" in message
            assert "refresh_weights" in message
        (event,) = [e for e in events if e.kind == "saturated"]
        assert event.step == LOOK_AHEAD + 2
        assert [slot.fqn for slot in event.slots] == ["branch", "first", "last"]
        assert {slot.role for slot in event.slots} == {"weight"}


@pytest.mark.parametrize("per_module", [True, False])
@on_ranks(2)
def test_unshard_outside_of_a_forward_asks_for_refresh_weights(per_module: bool) -> None:
    run = Running(Job(per_module=per_module))
    run.step()
    with torch.no_grad():
        run.model.branch.weight.mul_(8)  # type: ignore[union-attr,operator]
    found = []
    module: Any = run.model.branch if per_module else run.called
    try:
        module.unshard()
    except ConfigurationError as error:
        found.append(str(error))
    run.manager.refresh_weights()
    module.unshard()
    weight = run.model.branch.weight
    assert isinstance(weight, FP8Weight)
    module.reshard()
    found.append(type(run.model.branch.weight).__name__)
    run.step()  # The job continues.
    message, kind = found
    assert "branch" in message
    assert "refresh_weights()" in message
    assert kind == "DTensor"


@on_ranks(2)
def test_only_what_was_changed_is_derived_anew() -> None:
    job = Job()
    run = Running(job)
    for _ in range(3):
        run.step()
    before = {n: run.manager.slot(n, "weight").amax_history.tolist() for n in fp8_linears(run.model)}
    with torch.no_grad():
        run.model.branch.weight.mul_(8)  # type: ignore[union-attr,operator]
    shares = run.saturated()
    after = {n: run.manager.slot(n, "weight").amax_history.tolist() for n in fp8_linears(run.model)}
    assert max(shares.values()) < FITS
    assert not any(after["branch"])
    assert {n: w for n, w in after.items() if n != "branch"} == {n: w for n, w in before.items() if n != "branch"}


def _zero_weights(job: Job) -> tuple[Any, ...]:
    torch.manual_seed(0)
    run = Running(job)
    weight = run.model.branch.weight
    with torch.no_grad():
        weight.zero_()  # type: ignore[union-attr,operator]
    run.manager.reset()
    run.manager.attach(run.called, optimizer=run.optimizer)
    found, scales = [], []
    # In a third step, DDP need not share its casts and gives outgrown weights their own scales.
    for _ in range(2):
        found.append(run.step())
        scales.append(run.scales()["branch"])
    return found, scales, arena_bits(run.manager), {n: bits(v) for n, v in full(run.model).items()}


@pytest.mark.slow
def test_zero_initialised_weights_are_cast_with_a_shared_scale(two_ranks: RankPool) -> None:
    job = Job(update="next_step")
    ours = two_ranks.run(_zero_weights, job)
    theirs = two_ranks.run(_zero_weights, replace(job, parallel="ddp"))
    for mine, other in zip(ours, theirs):
        assert mine[0] == other[0]  # Losses: the second depends on the cast after the first update.
        assert mine[3] == other[3]
        assert mine[1][1:] == other[1][1:]
        # The last header's words are of earlier scales: under DDP those of cold slots are never set.
        assert {n: b for n, b in mine[2].items() if n != "0.words"} == {
            n: b for n, b in other[2].items() if n != "0.words"
        }
        assert 1.0 not in mine[1][1:]


def _growing(job: Job, small: float) -> tuple[Any, ...]:
    """Return losses, parameters and log of a run whose weights grow by more than their scales allow, step by step."""
    model = seeded("net")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(small if parameter.ndim > 1 else 1)
    run = Running(replace(job, steps=0))
    run.called.load_state_dict(_like(run.called, model.state_dict()))
    run.manager.reset()
    run.manager.attach(run.called, optimizer=run.optimizer)
    with captured_log() as log, counted_collectives() as calls:
        losses = [run.step() for _ in range(15)]
        sent = calls.names.count("all_reduce")
        run.optimizer.param_groups[0]["lr"] = 1e-5
        losses += [run.step() for _ in range(2 * LOOK_AHEAD)]
        calls.names.clear()
        losses += [run.step() for _ in range(5)]
    return losses, {n: bits(v) for n, v in full(run.model).items()}, log, sent, calls.names.count("all_reduce")


def _like(called: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return plain tensors as the parameters of ``called`` are: sharded under FSDP2."""
    own = called.state_dict()
    named = {name: state[name.removeprefix("module.")] for name in own}
    return {
        name: distribute_tensor(named[name], value.device_mesh, value.placements)
        if isinstance(value, DTensor)
        else named[name]
        for name, value in own.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("update", "small"), few([("same_step", 0.02), ("next_step", 0.0)], ("next_step", 0.0)))
def test_weights_that_an_optimizer_makes_grow_fast_are_cast_as_under_ddp(
    two_ranks: RankPool, small: float, update: str
) -> None:
    """From zero or small initial values. Once they grow slowly, nothing is sent but the sync of each step."""
    job = Job(update=update, optimizer="adamw")
    ours = two_ranks.run(_growing, job, small)
    theirs = two_ranks.run(_growing, replace(job, parallel="ddp"), small)
    for mine, other in zip(ours, theirs):
        assert mine[0] == other[0]
        assert mine[1] == other[1]
        assert mine[2] == []  # No warning blames anybody.
        assert mine[3] > 15
        assert mine[4] == 5


FIRST = ("eval", "train", "check")


def _loaded_in_place(folder: str, gather: bool, recipe: fp8dist.Recipe, factor: float, first: str) -> tuple[Any, ...]:
    """Return errors against float32 after the standard loader wrote to the shards: of a forward, ``first`` in this
    mode, and of an export; and the log of a check."""
    run = Running(Job(fp8_all_gather=gather, recipe=recipe, optimizer="sgd"))
    for _ in range(LOOK_AHEAD + 1):
        run.step()
    plain = seeded("net", 1)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(factor if parameter.ndim > 1 else 1)
    x, _ = batch(dist.get_rank(), 0)
    own = run.called.state_dict()
    dcp.save({"model": _like(run.called, plain.state_dict())}, checkpoint_id=folder)
    versions = [value._version for value in run.called.parameters()]
    dcp.load({"model": own}, checkpoint_id=folder)
    assert [value._version for value in run.called.parameters()] == versions  # Nothing shows the write.
    log: list[tuple[int, str]] = []
    if first == "check":
        with captured_log() as log:
            run.manager.check(parameters=False)
    with torch.no_grad():
        expected = plain(x)

        def error(found: Tensor, right: Tensor) -> float:
            return float((found - right).norm() / right.norm())

        computed = error(run.called.train(first != "eval")(x), expected)
        tensors = {name: tensor.clone() for name, tensor in fp8dist.exported(run.manager, run.called)}
        exported = [
            error(rows.float() * tensors[f"{name}_scale"], plain.get_parameter(name))
            for name, rows in tensors.items()
            if rows.dtype == torch.float8_e4m3fn
        ]
    return computed, max(exported), [message for _, message in log]


LOADED = [
    *((True, DelayedScaling(history_len=4), factor, first) for factor in (1.6, 8.0) for first in FIRST),
    *((True, CurrentScaling(), factor, first) for factor, first in zip((1.6, 8.0, 8.0), FIRST)),
    *((False, DelayedScaling(history_len=4), factor, first) for factor, first in zip((8.0, 1.6, 8.0), FIRST)),
    (False, CurrentScaling(), 8.0, "eval"),
]


@pytest.mark.parametrize(("gather", "recipe", "factor", "first"), few(LOADED, *LOADED[2:11:3]))
def test_a_checkpoint_that_is_loaded_in_place(
    two_ranks: RankPool, tmp_path: Path, gather: bool, recipe: fp8dist.Recipe, factor: float, first: str
) -> None:
    """``dcp.load`` writes to the shards in a way that no version counter shows. E4M3 makes three Linears 8 % wrong."""
    results = two_ranks.run(_loaded_in_place, str(tmp_path), gather, recipe, factor, first)
    for rank, (computed, exported, log) in enumerate(results):
        assert computed < 0.08
        assert exported < 0.03
        told = [message for message in log if "outgrown" in message]
        assert len(told) == (gather and first == "check" and rank == 0)
        assert all("refresh_weights()" in message and "dcp.load" in message for message in told)


def _part_in_eval(run: Running) -> Tensor:
    run.called.train()
    run.model.branch.eval()  # type: ignore[union-attr,operator]
    return run.loss()


def _part_in_training(run: Running) -> Tensor:
    run.called.eval()
    run.model.branch.train()  # type: ignore[union-attr,operator]
    return run.loss()


def _evaluation_in_flight(grad: bool) -> Callable[[Running], Tensor]:
    def forwards(run: Running) -> Tensor:
        loss = run.loss()
        run.called.eval()
        with torch.set_grad_enabled(grad):
            evaluated = run.loss()
        run.called.train()
        assert evaluated.requires_grad is grad
        return loss

    return forwards


def _evaluation_first(run: Running) -> Tensor:
    run.called.eval()
    run.loss().backward()
    run.optimizer.zero_grad()
    run.called.train()
    return run.loss()


MODES: dict[str, Callable[[Running], Tensor]] = {
    "one Linear in eval": _part_in_eval,
    "one Linear in training": _part_in_training,
    "an evaluation between forward and backward": _evaluation_in_flight(False),
    "an evaluation with grad between forward and backward": _evaluation_in_flight(True),
    "an evaluation with its own backward before": _evaluation_first,
}


def _in_modes(job: Job, forwards: str) -> tuple[list[float], dict[str, bytes]]:
    run, losses = Running(job), []
    for _ in range(6):
        loss = MODES[forwards](run)
        loss.backward()
        losses.append(float(loss.detach()))
        run.optimizer.step()
        run.optimizer.zero_grad()
    return losses, {name: bits(value) for name, value in full(run.model).items()}


@pytest.mark.slow
@pytest.mark.parametrize("forwards", few(MODES, "one Linear in eval", "an evaluation with its own backward before"))
def test_weights_are_cast_as_under_ddp_in_whatever_mode(two_ranks: RankPool, forwards: str) -> None:
    """Weights that have outgrown their scales, as AdamW's steps here make them, are cast by mode."""
    expected = two_ranks.run(_in_modes, Job(parallel="ddp"), forwards)
    for reshard in (True, False):
        assert two_ranks.run(_in_modes, Job(reshard=reshard, per_module=reshard), forwards) == expected


def _handed_out(callers: tuple[int, ...], gather: bool) -> tuple[list[float], dict[str, bytes], int]:
    """Train while weights grow beyond their scales, so that a weight that counts as written would be cast otherwise."""
    run = Running(Job(fp8_all_gather=gather))
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(0.01)
    run.manager.refresh_weights()
    with counted_collectives() as calls:
        losses = []
        for _ in range(5):
            if dist.get_rank() in callers:
                run.called.state_dict()
            losses.append(run.step())
    return losses, arena_bits(run.manager), calls.names.count("all_reduce")


@pytest.mark.slow
@pytest.mark.parametrize("gather", [False, True])
def test_a_state_dict_changes_nothing(two_ranks: RankPool, gather: bool) -> None:
    """Neither a bit nor a collective of the training, nor does it hang if one rank alone calls it."""
    plain = two_ranks.run(_handed_out, (), gather)
    assert two_ranks.run(_handed_out, (0,), gather) == plain
    assert two_ranks.run(_handed_out, (0, 1), gather) == plain


# Writes while weights are gathered: after an evaluation with reshard_after_forward=False. ---------------------------


def _while_gathered(what: str) -> tuple[str, dict[str, float], dict[str, float], float]:
    run = Running(Job(reshard=False, per_module=False, optimizer="sgd"))
    run.step()
    with torch.no_grad():
        run.called(batch(0, 0)[0])
    assert isinstance(run.model.branch.weight, FP8Weight)
    failure = ""
    try:
        if what == "refresh":
            run.manager.refresh_weights()
        elif what == "write, refresh":
            for group in run.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.data.mul_(8)
            run.manager.refresh_weights()
        else:
            run.manager.attach(run.called, optimizer=run.optimizer)
    except ConfigurationError as error:
        failure = str(error)
    scales = run.scales()
    run.called.reshard()
    try:
        return failure, scales, run.fitting(), _step_against_float32(run)
    except RuntimeError as error:
        return f"{failure}; then {error}", scales, {}, 0.0


@pytest.mark.parametrize("what", ["refresh", "write, refresh"])
def test_refresh_weights_takes_the_sharded_weights_while_they_are_gathered(two_ranks: RankPool, what: str) -> None:
    for failure, scales, fitting, _ in two_ranks.run(_while_gathered, what):
        assert not failure
        assert scales == fitting


@on_ranks(2)
def test_gathered_weights_that_are_written_to_are_gathered_again() -> None:
    run = Running(Job(reshard=False, optimizer="sgd"))
    run.step()
    x, _ = batch(0, 0)
    seen, outputs = [], []
    for then in ("write", "reshard", ""):
        seen.append(run.saturated())
        with torch.no_grad():
            outputs.append(run.called(x))
        assert isinstance(run.model.branch.weight, FP8Weight)  # Still gathered.
        if then == "write":
            with torch.no_grad():
                for group in run.optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.mul_(8)
        elif then == "reshard":
            for module in run.called.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
    before, after, fresh = outputs
    assert max(max(shares.values()) for shares in seen) < FITS
    assert [torch.equal(before, after), torch.equal(after, fresh)] == [False, True]


def test_attach_again_while_weights_are_gathered(two_ranks: RankPool) -> None:
    for failure, _, _, loss in two_ranks.run(_while_gathered, "attach"):
        assert not failure
        assert loss == pytest.approx(1, abs=0.1)


def _loaded_and_attached(then_attach: bool) -> tuple[dict[str, bytes], float]:
    """Return the state of a job whose weights have outgrown their scales, in a new job, and the next loss."""
    first, second = Running(Job(optimizer="adamw")), Running(Job(optimizer="adamw"))
    for _ in range(2):
        first.step()
    weights = {name: value.clone() for name, value in first.called.state_dict().items()}
    second.index = first.index
    second.called.load_state_dict(weights)
    second.manager.load_state_dict(first.manager.state_dict())
    if then_attach:
        second.manager.attach(second.called, optimizer=torch.optim.SGD(second.called.parameters(), lr=0.0))
    loss = second.loss()
    return arena_bits(second.manager), float(loss.detach())


@pytest.mark.slow
def test_attaching_again_forgets_no_trust(two_ranks: RankPool) -> None:
    assert two_ranks.run(_loaded_and_attached, True) == two_ranks.run(_loaded_and_attached, False)


@on_ranks(2)
def test_a_cold_weight_is_not_gathered_by_hand() -> None:
    """A weight that was zero gets its scale in a forward. Gathered before that, it has none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
    nn.init.zeros_(model[1].weight)
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4), group=dist.group.WORLD, fp8_all_gather=True)
    for part in (*model, model):
        fully_shard(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    manager.attach(model, optimizer=optimizer)
    text, scales = "", []
    for step in range(2):
        x, y = batch(dist.get_rank(), step)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            try:
                model[1].unshard()  # type: ignore[operator]
            except ConfigurationError as error:
                text = str(error)
        scales.append(float(manager.slot("1", "weight").scale))
    assert "1: it has no FP8 scale yet" in text
    assert "refresh_weights()" in text
    assert scales[0] == 1.0
    assert scales[1] > 1.0
