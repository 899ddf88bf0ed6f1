"""What the integrations share: no trainer is imported unasked; the log of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8dist
from fp8dist.errors import ConfigurationError
from fp8dist.integrations.stacks import FP8Steps, RunLog, caller
from tests.support.training import batch, make_net


def _lines(folder: Path, name: str = "metrics") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def _attached(run: Any, **options: Any) -> tuple[RunLog, Any]:
    """Return the log of a new model, and a function that takes a step."""
    net = make_net()
    manager = fp8dist.prepare(net, **options)
    log = RunLog(run, manager)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    manager.attach(optimizer=optimizer)

    def step() -> None:
        net(batch(0, manager.run_step)[0]).sum().backward()
        optimizer.step()

    return log, step


def test_numbers_are_logged_under_their_names_at_the_step_of_the_state(tmp_path: Path) -> None:
    log, step = _attached(tmp_path)
    log.log({"eval_loss": 5.0}, 0)  # Before the first step.
    step()
    log.log({"train_loss": torch.tensor(2.0), "fp8/steps": 1, "step": 9, "note": "text", "n_tokens_seen": 64}, 7)
    log.log({"val_loss": 3.0}, 7)
    step()
    step()
    log.log({"loss": 1.0, "n_tokens_seen": 160}, 9)
    log.saved(tmp_path / "there", 9)
    log.close()
    kept = [{k: v for k, v in line.items() if k not in ("time", "step_ms")} for line in _lines(tmp_path)]
    first = {"step": 1, "loss": 2.0, "n_tokens_seen": 64, "tokens": 64.0}
    third = {"step": 3, "loss": 1.0, "n_tokens_seen": 160, "tokens": 48.0}
    assert kept == [first, {**first, "validation_loss": 3.0}, third]
    saved = _lines(tmp_path, "events")[1]
    assert (saved["kind"], saved["step"], saved["path"]) == ("saved", 3, str(tmp_path / "there"))


def test_without_fp8_the_steps_are_the_trainers(tmp_path: Path) -> None:
    log, _ = _attached(tmp_path, enabled=False)
    log.log({"loss": 2.0}, 7)
    log.close()
    assert [line["step"] for line in _lines(tmp_path)] == [7]


def test_what_ends_a_run_is_recorded(tmp_path: Path) -> None:
    log, step = _attached(lambda manager: fp8dist.Recorder(tmp_path, manager, every=1))
    step()
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        log.close()
    assert _lines(tmp_path, "events")[-1]["error"] == "ZeroDivisionError"
    assert {line["step"] for line in _lines(tmp_path, "scales")} == {1}


class Calling:
    """Calls, with a local variable."""

    def __call__(self) -> tuple[Any, dict[str, Any]]:
        local = 3
        return (lambda: caller(Calling))() if local else (None, {})


def test_a_caller_is_found_by_its_type() -> None:
    calling = Calling()
    found, names = calling()
    assert (found, names["local"]) == (calling, 3)
    with pytest.raises(ConfigurationError, match="this must be called by a tests Calling"):
        caller(Calling)


class Engine:
    """A trainer's engine: ``update`` is False in steps that it skips."""

    def step(self, update: bool) -> bool:
        return update


class EngineSteps(FP8Steps):
    def step(self: Any, update: bool) -> bool:
        updated = bool(super().step(update))  # type: ignore[misc]
        self.end_fp8_step(updated)
        return updated


def test_steps_of_an_engine_end_fp8_steps_until_it_is_detached(caplog: pytest.LogCaptureFixture) -> None:
    net, engine = make_net(), Engine()
    manager = fp8dist.prepare(net)
    manager.attach(boundary="manual")
    EngineSteps.add_to(engine, manager)
    kind = type(engine)
    EngineSteps.add_to(engine, manager)
    assert type(engine) is kind
    assert kind.__name__ == "FP8Engine"
    for update, steps in ((True, 1), (False, 1), (True, 2)):
        net(batch(0, 0)[0]).sum().backward()
        assert engine.step(update) is update
        assert manager.steps == steps
    saved: Any = manager.state_dict()
    manager.detach()
    assert engine.step(True)
    assert manager.steps == 2
    loaded: Any = engine
    loaded.load_fp8({}, "a checkpoint")
    assert manager.steps == 0
    assert "a checkpoint has no FP8 state: scales begin anew" in caplog.text
    loaded.load_fp8(saved, "a checkpoint")
    assert manager.steps == 2
