"""Public names: exports, replacements for old names, and consistent defaults."""

from __future__ import annotations

import contextlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8dist
from fp8dist import errors
from fp8dist.common.foreign_names import INSTEAD
from fp8dist.exporters import TensorBoard
from fp8dist.job.manager import StateManager
from fp8dist.job.moved import MOVED

CHANGELOG = (Path(__file__).resolve().parents[1] / "CHANGELOG.md").read_text()

EXPORTS = """Attendance Axes BlockScaling Cause CheckpointError ConfigurationError Coverage CoverageRow CurrentScaling
DelayedScaling DivergenceError DivergenceReport Event Exporter FP8Experts Fallback Finding Fp8DistError ImportReport
LossAlarm LossDiverged LossGuard MXFP8Scaling ManifestMismatchError Monitor NVFP4Scaling NotAModelError Observation
RankTimes Recipe Recorder ReplayBuffer ReplayFinding ReplayReport Replayed RowwiseScaling ScaleJump Slot SlotState
SlotStatistics StateManager SyncError UnknownArgumentError Verification Verified check check_values ddp describe
errors export exported first_and_last fsdp get_manager grouped_linear load_transformer_engine prepare random_state
replay replay_on restore roll_call take_waits trace verify watch
"""

METHODS = """
attach calibrate check coverage detach load load_state_dict metrics no_fp8 on_event poll recording refresh_weights
register reset run_step save set_precision slot slots state_dict step steps swapped_weights verified
"""

_GONE, _MOVED = CHANGELOG.split("### Renamed")[1].split("These names stay")[0].split("These warn")
_MOVED, _OUTPUTS = _MOVED.split("One way carries numbers out")
RENAMED, MOVED_LINES, OUTPUTS = (
    re.findall(r"^\| `(.+)` \| `(.+)` \|$", text, re.M) for text in (_GONE, _MOVED, _OUTPUTS)
)


def _names() -> dict[str, Any]:
    prepared, model = nn.Sequential(nn.Linear(16, 16)), nn.Sequential(nn.Linear(16, 16))
    values = {"model": model, "recipe": fp8dist.DelayedScaling(), "group": None, "kept": prepared}
    return {"fp8dist": fp8dist, "manager": fp8dist.prepare(prepared), **values}


def test_exports() -> None:
    assert fp8dist.__all__ == EXPORTS.split()
    assert all(hasattr(fp8dist, name) for name in fp8dist.__all__)
    assert sorted(name for name in vars(StateManager) if not name.startswith("_")) == METHODS.split()
    assert len(METHODS.split()) <= 25
    assert not [name for name in fp8dist.__all__ if (Path(fp8dist.__file__).parent / name).is_dir()]
    family = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert family <= set(fp8dist.__all__)
    assert all(issubclass(getattr(fp8dist, name), fp8dist.Fp8DistError) for name in family)
    assert issubclass(fp8dist.ConfigurationError, ValueError)
    assert issubclass(fp8dist.SyncError, RuntimeError)


@pytest.mark.parametrize(("old", "new"), RENAMED)
def test_old_names_fail_and_new_ones_work(old: str, new: str) -> None:
    with pytest.raises((TypeError, AttributeError)):
        eval(old, _names())
    assert eval(new, _names()) is not None


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("fp8_autocast", "fp8dist.prepare(model, recipe, group=…) once"),
        ("Linear", "keep torch.nn.Linear"),
        ("LayerNormLinear", "of torch.nn modules"),
        ("fp8_model_init", "fp8_all_gather=True"),
        ("convert_to_float8_training", "fp8dist.prepare(model, recipe, group=…) once"),
        ("Float8LinearConfig", "fp8dist.CurrentScaling()"),
        ("DelayedScalling", "(did you mean 'DelayedScaling'?)"),
        ("qwertz", "no attribute 'qwertz'"),
    ],
)
def test_names_of_other_libraries_are_answered(name: str, advice: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(fp8dist, name)
    assert str(caught.value).startswith(f"module 'fp8dist' has no attribute '{name}'")
    assert advice in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_answers_name_what_exists() -> None:
    assert not INSTEAD.keys() & {*fp8dist.__all__}
    said = {name for text in INSTEAD.values() for name in re.findall(r"fp8dist\.(\w+)", text)}
    assert said <= {*fp8dist.__all__}
    of_manager = {name for text in INSTEAD.values() for name in re.findall(r"manager\.(\w+)", text)}
    assert of_manager <= {*METHODS.split()}


@pytest.mark.parametrize(("old", "new"), MOVED_LINES)
def test_moved_names_work_and_warn(old: str, new: str, tmp_path: Path) -> None:
    """Both give the same. Calls that write get a folder of their own."""
    values: list[Any] = []
    for place, call in (("old", old), ("new", new)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16))
        manager = fp8dist.prepare(model, skip=None)
        manager.register("mine", "input", "e4m3")
        names = {"fp8dist": fp8dist, "manager": manager, "folder": tmp_path / place, "x": torch.ones(3), "entries": {}}
        with contextlib.ExitStack() as stack:
            if place == "old":
                stack.enter_context(pytest.warns(FutureWarning, match=r"manager\.\w+ is now "))
            value = eval(call, names)
        values.append([str(one) for one in value] if call.startswith("list(") else str(value))
    assert values[0] == values[1]


@pytest.mark.parametrize(("old", "new"), OUTPUTS)
def test_outputs_by_their_old_names_write_and_warn(old: str, new: str, tmp_path: Path) -> None:
    """Train one step with each, and compare the kinds of files."""
    kinds = []
    for place, call in (("old", old), ("new", new)):
        model = nn.Sequential(nn.Linear(16, 16))
        manager = fp8dist.prepare(model, skip=None)
        (tmp_path / place).mkdir()
        names = {"fp8dist": fp8dist, "manager": manager, "folder": tmp_path / place, "TensorBoard": TensorBoard}
        with contextlib.ExitStack() as stack:
            if place == "old":
                stack.enter_context(pytest.warns(FutureWarning, match=r"fp8dist\.\w+(\(\w+=…\))? is now "))
            made = [eval(each, names) for each in call.split("; ")][-1]
        if isinstance(made, fp8dist.Monitor):
            made.observe(1, [fp8dist.SlotStatistics(fp8dist.Slot("0", "input"), 1.0, 1.0)])
        else:
            manager.attach(optimizer=(optimizer := torch.optim.SGD(model.parameters(), 0.1)))
            model(torch.ones(16, 16)).sum().backward()
            optimizer.step()
        if hasattr(made, "close"):
            made.close()
        kinds.append({re.sub(r"events\.out.*", "board", path.name) for path in (tmp_path / place).rglob("*")})
    assert kinds[0] <= kinds[1]


def test_every_old_name_has_a_line_in_the_changelog() -> None:
    assert sorted(MOVED) == sorted({re.findall(r"manager\.(\w+)", old)[0] for old, _ in MOVED_LINES})
    assert len(RENAMED) >= 6
    assert len(OUTPUTS) >= 4


def test_defaults_are_consistent() -> None:
    kinds = [(p.name, p.kind) for p in inspect.signature(fp8dist.prepare).parameters.values()]
    assert [name for name, kind in kinds if kind is not inspect.Parameter.KEYWORD_ONLY] == ["model", "recipe"]
    for call in (fp8dist.check, StateManager.check):
        assert inspect.signature(call).parameters["policy"].default == "raise"
    model = nn.Sequential(nn.Linear(16, 16))
    assert fp8dist.prepare(model).settings.check_policy == "raise"
    with pytest.raises(fp8dist.ConfigurationError, match="policy must be one of raise, warn, repair, got None"):
        fp8dist.check(model, policy=None)  # type: ignore[arg-type]


def test_public_calls_say_whether_they_are_collective() -> None:
    public = [getattr(StateManager, name) for name in METHODS.split()]
    public += [fp8dist.prepare, fp8dist.restore, fp8dist.check, fp8dist.get_manager, fp8dist.roll_call]
    public += [fp8dist.describe, fp8dist.export, fp8dist.exported, fp8dist.take_waits, fp8dist.watch]
    methods = [call for call in public if not isinstance(call, property)]
    assert not [call.__name__ for call in methods if not re.search("COLLECTIVE|Local|local", call.__doc__ or "")]


def test_contexts_nest() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    manager = fp8dist.prepare(model)
    x = torch.randn(16, 16)
    expected = nn.functional.linear(x, model[0].weight, model[0].bias)
    with manager.recording(), manager.no_fp8(), torch.no_grad():
        with manager.no_fp8():
            assert torch.equal(model.eval()(x), expected)
        assert torch.equal(model(x), expected)
    assert not torch.equal(model(x), expected)
    manager.step()
    assert manager.slot("0", "input").amax == x.abs().max()
