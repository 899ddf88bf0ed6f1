"""Sharded weights changed by something other than the optimizer: their scales adapt, or the user gets a warning."""

from __future__ import annotations

import io
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
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import fp8dist
from fp8dist import CurrentScaling, DelayedScaling, Fallback, Recipe
from fp8dist.checks.events import Event
from fp8dist.errors import ConfigurationError, ManifestMismatchError
from fp8dist.modules.fp8_weight import FP8Weight
from fp8dist.modules.outgrown import OUTGROWN
from fp8dist.parallel.fsdp2 import LOOK_AHEAD
from tests.support.logs import captured_log
from tests.support.parallel import same_on_all_ranks
from tests.support.ranks import on_ranks
from tests.support.running import Running, take_steps
from tests.support.sharded import Job, arena_bits, fp8_linears, full, seeded
from tests.support.suite import few
from tests.support.training import batch


def _times(factor: float) -> Callable[[Running], None]:
    def write(run: Running) -> None:
        with torch.no_grad():
            for linear in fp8_linears(run.model).values():
                linear.weight.mul_(factor)

    return write


def _one(run: Running) -> None:
    with torch.no_grad():
        run.model.branch.weight.mul_(8)  # type: ignore[union-attr,operator]


def _one_and_fp8_state(run: Running) -> None:
    """Only delayed scales are trusted; others are derived from the weight."""
    _one(run)
    run.manager.load_state_dict(run.manager.state_dict())


def _local_then_refresh(run: Running) -> None:
    for linear in fp8_linears(run.model).values():
        linear.weight.to_local().data.mul_(8)  # type: ignore[operator]
    run.manager.refresh_weights()


def _by_another_optimizer(run: Running) -> None:
    for parameter in run.called.parameters():
        parameter.grad = parameter.detach().clone()
    torch.optim.SGD(run.called.parameters(), lr=0.5, foreach=True).step()
    run.optimizer.zero_grad()


def _larger(run: Running) -> dict[str, Any]:
    return {name: value * 8 for name, value in run.called.state_dict().items()}


def _load(run: Running) -> None:
    buffer = io.BytesIO()
    torch.save(_larger(run), buffer)
    buffer.seek(0)
    run.called.load_state_dict(torch.load(buffer, weights_only=False))


def _load_whole(run: Running) -> None:
    whole = {name: value.full_tensor() for name, value in _larger(run).items()}
    set_model_state_dict(run.called, whole, options=StateDictOptions(full_state_dict=True))


def _load_and_attach(run: Running) -> None:
    _load(run)
    run.manager.attach(run.called, optimizer=run.optimizer)


def _replace_and_attach(run: Running) -> None:
    run.called.load_state_dict(_larger(run), assign=True)
    run.optimizer = torch.optim.SGD(run.called.parameters(), lr=1e-6)  # With 0, a step is no boundary.
    run.manager.attach(run.called, optimizer=run.optimizer)


def _before_the_step(run: Running) -> None:
    loss = run.loss()
    loss.backward()
    _times(8)(run)
    run.update(loss)


def _before_a_manual_step(run: Running) -> None:
    run.manager.attach(run.called, optimizer=run.optimizer, boundary="manual")
    run.step()
    _times(8)(run)
    run.manager.step()


def _while_calibrating(run: Running) -> None:
    run.manager.attach(run.called)
    with run.manager.calibrate():
        run.called(batch(0, 0)[0])
        _times(8)(run)


def _before_setting_optimizer_state(run: Running) -> None:
    """torch steps a fresh optimizer once with a learning rate of 0, to create state for loading."""
    model = _larger(run)
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
    run.used()
    run.called.load_state_dict(good)


def _while_gathered(data: bool) -> Callable[[Running], None]:
    """After an evaluation, weights stay gathered with reshard_after_forward=False. The optimizer has the shards."""

    def write(run: Running) -> None:
        run.used()
        assert isinstance(run.model.branch.weight, FP8Weight)  # type: ignore[union-attr]
        with torch.no_grad():
            for group in run.optimizer.param_groups:
                for parameter in group["params"]:
                    (parameter.data if data else parameter).mul_(8)
        if data:
            run.manager.refresh_weights()

    return write


ADAMW, FUSED = Job(), Job(optimizer="adamw_fused", update="next_step", per_module=False)
KEPT, CURRENT = Job(reshard=False, optimizer="sgd"), Job(recipe=CurrentScaling(), reshard=False)
WRITES: dict[str, tuple[Job, Callable[[Running], None]]] = {
    "by an eighth": (FUSED, _times(0.125)),
    "one weight": (Job(optimizer="sgd"), _one),
    "local, refresh": (FUSED, _local_then_refresh),
    "whole, times 8": (ADAMW, _load_whole),
    "loaded, attached again": (ADAMW, _load_and_attach),
    "replaced, attached again": (ADAMW, _replace_and_attach),
    "before the optimizer's step": (ADAMW, _before_the_step),
    "before a manual step": (ADAMW, _before_a_manual_step),
    "while calibrating": (ADAMW, _while_calibrating),
    "before optimizer state is set": (ADAMW, _before_setting_optimizer_state),
    "before nothing is loaded": (ADAMW, _before_loading_nothing),
    "before an attach that fails": (ADAMW, _before_an_attach_that_fails),
    "bad weights for a while": (Job(optimizer="sgd"), _bad_for_a_while),
    "while gathered": (KEPT, _while_gathered(False)),
    "while gathered, .data, refresh": (replace(KEPT, per_module=False), _while_gathered(True)),
    "current: one weight": (CURRENT, _one),
    "current: one weight, FP8 state": (CURRENT, _one_and_fp8_state),
    "current: another optimizer": (CURRENT, _by_another_optimizer),
}
"""Each leaves scales with which all weights that it wrote are cast as one process would: from their own amaxes."""
RARE = {
    *("by an eighth", "before a manual step", "before nothing is loaded", "loaded, attached again"),
    *("whole, times 8", "current: one weight", "current: another optimizer"),
}


def _step_against_float32(run: Running) -> float:
    """Return a step's loss over the loss of the same weights in float32. E4M3 changes each number by at most 6 %."""
    plain = seeded(run.job.model)
    plain.load_state_dict(full(run.model))
    x, y = batch(dist.get_rank(), run.index)
    with torch.no_grad():
        expected = float(nn.functional.mse_loss(plain(x), y))
    return run.step() / expected


@pytest.mark.parametrize("what", few(WRITES, *(WRITES.keys() - RARE)))
@on_ranks(2)
def test_scales_follow_weights_that_were_written_to(what: str) -> None:
    job, write = WRITES[what]
    run = Running(job)
    for _ in range(2):
        run.step()
    before = run.windows()
    write(run)
    used = run.used()
    run.reshard()
    derived = run.derived()
    if job.recipe is not None:
        assert used == derived
    else:
        written = ["branch"] if write is _one else [*derived]
        after = run.windows()
        for name in derived:  # The window of a written weight held amaxes of other weights. Others stay.
            assert (used[name] == derived[name] and not any(after[name])) or name not in written, name
            assert name in written or after[name] == before[name], name
        assert sum(1 for amax in run.manager.slot("first", "input").amax_history.tolist() if amax) >= 2
    counted = run.counted
    assert _step_against_float32(run) == pytest.approx(1, abs=0.1)
    assert run.counted == counted or job.recipe is not None  # No amax was beyond its scale.
    same_on_all_ranks(arena_bits(run.manager))
    assert not run.manager.check().diverged


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_a_scale_that_is_set_before_a_backward_keeps_the_meaning_of_gathered_bytes(reshard: bool) -> None:
    """Scaling by a power of two changes bytes only where subnormals are rounded."""
    gradients = []
    for change in (1.0, 0.25):
        run = Running(Job(reshard=reshard))
        loss = run.loss()
        slot = run.manager.slot("last", "weight")
        slot.set_scale(change * float(slot.scale))
        loss.backward()
        gradients.append(run.model.first.weight.grad.full_tensor())  # type: ignore[union-attr,operator]
    assert float((gradients[1] - gradients[0]).norm() / gradients[0].norm()) < 0.02


@pytest.mark.slow
@on_ranks(3)
def test_uneven_shards_share_a_scale() -> None:
    """16 rows are split into 6, 6 and 4; on 32 ranks the last part would be empty. With fallback each step syncs and
    commits the amaxes of its forwards, which must not change scales that are derived from the weights."""
    run = Running(replace(CURRENT, optimizer="adamw_fused", settings={"fallback": Fallback()}))
    run.manager.attach(run.called, optimizer=run.optimizer, boundary="manual")
    for write in (None, _one, None):
        run.step()
        if write is None:
            run.model.branch.unshard()  # type: ignore[union-attr,operator]  # Its scale fits at once.
            run.reshard()
        else:
            write(run)
        run.manager.step()
        used = run.used()
        run.reshard()
        assert used == run.derived()


@on_ranks(2)
def test_data_without_refresh_is_counted_and_told() -> None:
    run = Running(Job(update="next_step", optimizer="sgd"))
    events: list[Event] = []
    run.manager.on_event(events.append)
    for _ in range(LOOK_AHEAD + 1):  # Until ranks no longer compare weights with their scales before forwards.
        run.step()
    before = run.counted
    assert not events
    for linear in fp8_linears(run.model).values():
        linear.weight.data.mul_(8)
    assert run.used() != run.derived()  # Otherwise the test would prove nothing.
    with captured_log() as log:
        for _ in range(3):
            run.step()
        run.manager.check()
    assert run.counted - before == 3
    told = [entry for entry in log if "beyond" in entry[1]]
    assert len(told) == (dist.get_rank() == 0)  # One rank logs it.
    for level, message in told:
        assert level == logging.WARNING
        assert "branch" in message
        assert "refresh_weights" in message
    (event,) = [e for e in events if e.kind == "saturated"]
    assert event.step == LOOK_AHEAD + 2
    assert [(slot.fqn, slot.role) for slot in event.slots] == [(name, "weight") for name in ("branch", "first", "last")]


@pytest.mark.parametrize("per_module", [True, False])
@on_ranks(2)
def test_a_gather_by_hand_needs_scales(per_module: bool) -> None:
    """A weight that was zero gets its scale in a forward, and one that was written to, another."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
    nn.init.zeros_(model[1].weight)
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4), group=dist.group.WORLD, fp8_all_gather=True)
    for part in (*model, model) if per_module else (model,):
        fully_shard(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    manager.attach(model, optimizer=optimizer)
    unit = model[1] if per_module else model
    take_steps(model, optimizer, [0])
    assert float(manager.slot("1", "weight").scale) == 1.0
    with pytest.raises(ConfigurationError, match=r"1: it has no FP8 scale yet.*refresh_weights\(\)"):
        unit.unshard()
    unit.reshard()
    take_steps(model, optimizer, [1])
    assert float(manager.slot("1", "weight").scale) > 1.0
    with torch.no_grad():
        model[1].weight.mul_(8)
    with pytest.raises(ConfigurationError, match=r"1: the weight was changed.*refresh_weights\(\)"):
        unit.unshard()
    manager.refresh_weights()
    unit.unshard()
    assert isinstance(model[1].weight, FP8Weight)
    unit.reshard()
    assert type(model[1].weight).__name__ == "DTensor"
    take_steps(model, optimizer, [2])  # The job continues.


LOADED = [
    (True, DelayedScaling(history_len=4), 1.6, "eval"),
    (True, DelayedScaling(history_len=4), 8.0, "check"),
    (True, CurrentScaling(), 1.6, "eval"),
    (True, CurrentScaling(), 1.1, "check"),
    (False, DelayedScaling(history_len=4), 8.0, "check"),
    (True, DelayedScaling(history_len=4), 8.0, "kept"),
    (False, DelayedScaling(history_len=4), 8.0, "kept"),
]


@pytest.mark.parametrize(("gather", "recipe", "factor", "first"), few(LOADED, *LOADED[:2], *LOADED[3:5], LOADED[6]))
@on_ranks(2)
def test_a_checkpoint_that_is_loaded_in_place(
    gather: bool, recipe: Recipe, factor: float, first: str, tmp_path: Path
) -> None:
    """``dcp.load`` writes to the shards in a way that no version counter shows. Errors against float32 of a forward and
    an export are those of FP8: E4M3 makes three Linears 8 % wrong. "kept": into a state dict of before the steps, as
    torchtitan does."""
    run = Running(Job(fp8_all_gather=gather, recipe=recipe, optimizer="sgd"))
    own = run.called.state_dict() if first == "kept" else {}
    for _ in range(LOOK_AHEAD + 1):
        run.step()
    own = own or run.called.state_dict()
    dcp.save({"model": {n: v * (factor if v.ndim > 1 else 1.0) for n, v in own.items()}}, checkpoint_id=tmp_path)
    versions = [value._version for value in run.called.parameters()]
    before = full(run.model)["branch.weight"]
    dcp.load({"model": own}, checkpoint_id=tmp_path)
    assert [value._version for value in run.called.parameters()] == versions  # Nothing shows the write.
    plain = seeded("net")
    plain.load_state_dict(full(run.model))
    torch.testing.assert_close(plain.get_parameter("branch.weight").detach(), before * factor)
    log: list[tuple[int, str]] = []
    if first == "check":
        with captured_log() as log:
            run.manager.check(parameters=False)
    x, _ = batch(dist.get_rank(), 0)

    def error(found: Tensor, right: Tensor) -> float:
        return float((found - right).norm() / right.norm())

    with torch.no_grad():
        assert error(run.called.train(first != "eval")(x), plain(x)) < 0.08
        tensors = {name: tensor.clone() for name, tensor in fp8dist.exported(run.manager, run.called)}
        for name, rows in tensors.items():
            if rows.dtype == torch.float8_e4m3fn:
                assert error(rows.float() * tensors[f"{name}_scale"], plain.get_parameter(name)) < 0.03
    told = [message for _, message in log if "outgrown" in message]
    assert len(told) == (gather and factor > OUTGROWN and first == "check" and dist.get_rank() == 0)
    assert all("refresh_weights()" in message and "dcp.load" in message for message in told)
