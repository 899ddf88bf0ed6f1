"""What goes wrong in a step under each wrapper: no rank is left alone, and training goes on as if it had not been."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from fp8dist.errors import DivergenceError
from tests.support.logs import captured_log
from tests.support.meshes import Job, build, clean_fqn
from tests.support.ranks import RankPool
from tests.support.states import state_of, without
from tests.support.suite import NIGHTLY
from tests.support.training import state_bits

pytestmark = pytest.mark.slow

JOBS = {
    "DDP, hook": Job("ddp", hook="ours", optimizer="sgd"),
    "DDP, hook, next_step": Job("ddp", hook="ours", optimizer="sgd", update="next_step"),
    "FSDP1": Job("fsdp1", optimizer="momentum"),
    "FSDP1, hook": Job("fsdp1", optimizer="momentum", hook="ours"),
    "FSDP1, hook, next_step": Job("fsdp1", optimizer="momentum", hook="ours", update="next_step"),
    "HSDP": Job("hsdp"),
    "TP": Job("tp", optimizer="sgd"),
    "warn": Job("ddp", hook="ours", optimizer="sgd", policy="warn"),
}


def _fail(module: nn.Module, args: Any) -> None:
    raise KeyError("interrupted")


def _interrupted(job: Job, how: str) -> Any:
    """Train for three steps. Between the first two: a forward that fails, or a calibration."""
    built = build(job)
    states = []

    def interrupted() -> None:
        last = next(module for name, module in built.module.named_modules() if clean_fqn(name) == "blocks.1.norm")
        if how == "calibration":
            with built.manager.calibrate():
                built.backward(2)
                raise KeyError
        handle = last.register_forward_pre_hook(_fail)
        try:
            built.backward(1)  # The next step's batch, so its amaxes are not larger.
        finally:
            handle.remove()

    for index in range(3):
        if how and index == 1:
            with pytest.raises(KeyError):
                interrupted()
            built.optimizer.zero_grad()
        losses = built.step(index)
        states.append((losses, state_bits(built.manager)))
    return states, built.parameter_bits()


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("HSDP", "forward"),
        ("DDP, hook, next_step", "calibration"),
        *(pytest.param(name, "forward", marks=NIGHTLY) for name in ("FSDP1", "TP")),
        pytest.param("FSDP1, hook", "calibration", marks=NIGHTLY),
    ],
)
def test_training_goes_on_after_an_error(four_ranks: RankPool, name: str, how: str) -> None:
    """A failed forward, and a calibration that is interrupted: under a hook after it has launched its sync."""
    assert four_ranks.run(_interrupted, JOBS[name], how) == four_ranks.run(_interrupted, JOBS[name], "")


def _damaged(job: Job, role: str) -> Any:
    """Run six steps. Before the third, damage one scale on rank 3."""
    built = build(job)
    reports: list[Any] = []
    built.manager.on_event(lambda event: reports.extend([event.report] if event.report else []))
    raised = []
    for index in range(6):
        if index == 2 and dist.get_rank() == 3:
            built.manager.slot("blocks.1.up", role).scale.mul_(2.0)
        try:
            with captured_log():
                built.step(index)
        except DivergenceError:
            raised.append(index)
            built.optimizer.zero_grad()
    findings = [(f.step, f.kind, f.name, f.ranks, f.reference_rank) for report in reports for f in report.findings]
    return findings, raised, without(state_of(built.manager), "saturated"), built.parameter_bits()


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("DDP, hook, next_step", "input"),
        ("TP", "input"),
        *(pytest.param(name, "weight", marks=NIGHTLY) for name in ("FSDP1", "FSDP1, hook, next_step", "HSDP")),
        ("warn", "input"),
    ],
)
def test_a_damaged_scale_is_reported_and_all_ranks_go_on_alike(four_ranks: RankPool, name: str, role: str) -> None:
    """Under next_step the next launch starts before the last sync's verdict is read."""
    results = four_ranks.run(_damaged, JOBS[name], role)
    for findings, raised, *shared in results:
        assert findings == [(3, "scale", f"blocks.1.up:{role}", (3,), 0)]
        assert raised == ([] if name == "warn" else [3 if JOBS[name].update == "next_step" else 2])
        assert shared == list(results[0][2:])
