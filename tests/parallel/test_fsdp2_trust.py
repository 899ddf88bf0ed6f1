"""When a sharded weight's scale is trusted: after loading, after another attach, after bad weights."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fp8dist
from fp8dist import DelayedScaling
from fp8dist.errors import ConfigurationError, ManifestMismatchError
from tests.support.ranks import RankPool
from tests.support.running import FITS, Running
from tests.support.sharded import Job, arena_bits, fp8_linears
from tests.support.training import batch

pytestmark = pytest.mark.slow


def _times(run: Running, factor: float) -> None:
    with torch.no_grad():
        for linear in fp8_linears(run.model).values():
            linear.weight.mul_(factor)


def _loaded_nothing() -> float:
    run = Running(Job())
    run.step()
    _times(run, 8)
    run.manager.load_state_dict({}, strict=False)
    return max(run.saturated().values())


def test_loading_nothing_vouches_for_nothing(two_ranks: RankPool) -> None:
    for share in two_ranks.run(_loaded_nothing):
        assert share < FITS


def _loaded(then_attach: bool) -> tuple[dict[str, bytes], float]:
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


def test_attaching_again_forgets_no_trust(two_ranks: RankPool) -> None:
    assert two_ranks.run(_loaded, True) == two_ranks.run(_loaded, False)


def _attach_fails_between() -> float:
    run = Running(Job())
    run.step()
    _times(run, 8)
    with (
        mock.patch("fp8dist.job.agreement.agree_on_manifests", side_effect=ManifestMismatchError("planted")),
        pytest.raises(ManifestMismatchError, match="planted"),
    ):
        run.manager.attach(run.called, optimizer=run.optimizer)
    run.manager.attach(run.called, optimizer=run.optimizer)
    return max(run.saturated().values())


def test_a_failed_attach_hides_no_write(two_ranks: RankPool) -> None:
    for share in two_ranks.run(_attach_fails_between):
        assert share < FITS


def _bad_weights_for_a_while() -> tuple[dict[str, float], dict[str, float]]:
    run = Running(Job(optimizer="sgd"))
    run.step()
    good = {name: value.clone() for name, value in run.called.state_dict().items()}
    _times(run, 1000)
    run.saturated()
    run.called.load_state_dict(good)
    run.saturated()
    return run.scales(), run.fitting()


def test_good_weights_after_bad_ones_have_a_scale_that_fits(two_ranks: RankPool) -> None:
    for scales, fitting in two_ranks.run(_bad_weights_for_a_while):
        assert scales == fitting


def _gathered_by_hand() -> tuple[str, list[float]]:
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
    return text, scales


def test_a_cold_weight_is_not_gathered_by_hand(two_ranks: RankPool) -> None:
    for text, scales in two_ranks.run(_gathered_by_hand):
        assert "1: it has no FP8 scale yet" in text
        assert "refresh_weights()" in text
        assert scales[0] == 1.0
        assert scales[1] > 1.0


def _failing(window: Any) -> Any:
    raise RuntimeError("planted")


def test_a_conversion_that_fails_changes_nothing() -> None:
    """The failing function is a user's callable."""

    def trained(algorithm: Any) -> fp8dist.StateManager:
        torch.manual_seed(0)
        model = nn.Linear(32, 32)
        manager = fp8dist.prepare(model, DelayedScaling(history_len=4, amax_algo=algorithm))
        manager._kept = model  # type: ignore[attr-defined]
        return manager

    saved, other = trained("max"), trained(_failing)
    saved._kept(torch.ones(2, 32)).sum().backward()  # type: ignore[attr-defined]
    saved.step()
    before = other.state_dict()
    with pytest.raises(RuntimeError, match="planted"):
        other.load_state_dict(saved.state_dict(), convert=True)
    assert other.state_dict() == before
