"""``fp8dist export``: checkpoints of the example job, exported without the job, against exports inside it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import fp8dist
from fp8dist.cli.main import UNREADABLE, USAGE, main
from fp8dist.state.slots import plain_fqn
from fp8dist.state.storage import from_bytes, to_bytes
from launch.train_gpt.model import GPT
from tests.support.main_job import ALONE, RANKS, TINY, finish
from tests.support.serving import read, served, tensor_bits

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is")]

Capture = pytest.CaptureFixture[str]
FLAGS = [*TINY, "--steps", "4", "--save-every", "4"]


def _job(out: Path, command: Any, *flags: str) -> Path:
    finish(out, command, *FLAGS, *flags)
    return out / "checkpoints" / "step-00000004"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a job of one process."""
    return _job(tmp_path_factory.mktemp("alone") / "run", ALONE)


def _inside(checkpoint: Path) -> Any:
    """Return the manager of a job that has loaded the checkpoint."""
    model = GPT(layers=1, width=32, heads=2, context=32)
    manager = fp8dist.prepare(model, fp8dist.DelayedScaling())
    dcp.load({"model": model, "fp8": manager}, checkpoint_id=checkpoint)
    manager._tested = model
    return manager


def test_a_checkpoint_is_exported_as_the_job_would_export_it(tmp_path: Path) -> None:
    """Of other recipes: test_verify.py. Of other wrappers: tests/files/test_export_experts.py."""
    checkpoint, out = _job(tmp_path / "run", RANKS, "--parallel", "fsdp2", "--fp8-all-gather"), tmp_path / "out"
    assert main(["export", str(checkpoint), "--out", str(out)]) == 0
    assert tensor_bits(read(out)) == tensor_bits(dict(fp8dist.exported(_inside(checkpoint))))
    assert served(read(out)).keys() == {f"blocks.0.{name}" for name in ("attention_out", "mlp_in", "mlp_out", "qkv")}


def test_weights_that_are_stored_transposed(tmp_path: Path, capsys: Capture) -> None:
    """As by transformers' Conv1D. They are known by their biases, as the state does not say so."""
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))
    transposed = {**model.state_dict(), "0.weight": model[0].weight.detach().t().contiguous()}
    dcp.save({"model": transposed, "fp8": fp8dist.prepare(model).attach()}, checkpoint_id=tmp_path / "saved")
    assert main(["export", str(tmp_path / "saved"), "--out", str(tmp_path / "out")]) == USAGE
    assert "0: its weight is stored as [in_features, out_features]" in capsys.readouterr().err


class _Residual(nn.Module):
    """A module with state of its own, which is no tensor of the model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.module(x)
        return result

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"seen": torch.ones(3)}

    def set_extra_state(self, state: object) -> None:
        pass


def test_a_module_of_the_program_that_is_called_module_keeps_its_name(tmp_path: Path) -> None:
    """Servers read the names of the model's state_dict. Of a wrapper, "module" is no part of these: a compiled model
    has other names in its checkpoint. Extra state is not exported."""
    model = nn.Sequential(_Residual(nn.Linear(32, 32)), _Residual(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32))))
    model.append(nn.Linear(32, 32, bias=False))
    manager = fp8dist.prepare(model, skip="2").attach()
    inside = dict(fp8dist.exported(manager))
    weights = {"0.module.weight", "1.module.1.weight"}
    names = {name for name, _ in model.named_parameters()}
    assert inside.keys() == names | {f"{name}_scale" for name in weights}
    compiled = {f"module._orig_mod.{name}": value for name, value in model.state_dict().items()}
    dcp.save({"model": compiled, "fp8": manager}, checkpoint_id=tmp_path / "saved")
    fp8dist.export(manager, tmp_path / "job")
    assert main(["export", str(tmp_path / "saved"), "--out", str(tmp_path / "out")]) == 0
    assert tensor_bits(read(tmp_path / "out")) == tensor_bits(inside) == tensor_bits(read(tmp_path / "job"))
    for folder in ("out", "job"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config["quantization_config"]["ignore"] == ["2"]
        assert main(["verify", str(tmp_path / "saved"), str(tmp_path / folder)]) == 0
    assert plain_fqn("module.a.module.b._orig_mod.module.c", {"a"}) == "a.b.module.c"


class _Normed(nn.Module):
    def __init__(self, norm: nn.Module, linear: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = norm, linear


def test_names_that_differ_by_a_part_called_module_alone(tmp_path: Path, capsys: Capture) -> None:
    """Those of tensors in high precision are told apart. That of a weight in FP8 is not, because slots have no such
    part."""
    for linear, code in ((nn.Identity(), 0), (nn.Linear(32, 32), UNREADABLE)):
        inner = _Residual(_Normed(nn.LayerNorm(32), nn.Linear(32, 32)))
        inner.norm, inner.linear = nn.LayerNorm(32), linear
        model = nn.Sequential(inner)
        manager = fp8dist.prepare(model).attach()
        dcp.save({"model": model.state_dict(), "fp8": manager}, checkpoint_id=tmp_path / str(code))
        assert main(["export", str(tmp_path / str(code)), "--out", str(tmp_path / f"out-{code}")]) == code
        if code == 0:
            assert tensor_bits(read(tmp_path / "out-0")) == tensor_bits(dict(fp8dist.exported(manager)))
            continue
        assert "has 0.linear.weight twice" in capsys.readouterr().err
        with pytest.raises(fp8dist.ConfigurationError, match=r"^0\.module\.linear\.weight and 0\.linear\.weight"):
            fp8dist.exported(manager)


def _with_settings(manager: fp8dist.StateManager, settings: object) -> dict[str, bytes]:
    """Return the FP8 state with other settings than the manager's."""
    ((name, data),) = manager.state_dict().items()
    state, info = from_bytes(data, "")  # type: ignore[arg-type]
    return {name: to_bytes(state, {**info, "settings": settings})}


@pytest.mark.parametrize(
    ("settings", "dtype", "code", "text"),
    [
        ([], torch.float32, UNREADABLE, "the FP8 state has malformed settings"),
        ({"enabled": False}, torch.float32, USAGE, "nothing to export in FP8: .*enabled=False"),
        ({"eval_precision": "high"}, torch.float32, USAGE, "nothing to export in FP8: .*eval_precision='high'"),
        ({}, torch.int32, UNREADABLE, "has FP8 state of type, but no floating-point weight of it"),
        ({}, torch.float8_e4m3fn, UNREADABLE, "has FP8 state of type, but no floating-point weight of it"),
        ({}, torch.float32, 0, "^$"),
    ],
)
def test_settings_and_dtypes_that_a_checkpoint_may_hold(
    tmp_path: Path, capsys: Capture, settings: object, dtype: torch.dtype, code: int, text: str
) -> None:
    """Of a module whose name is that of a method."""
    model = nn.Module()
    model.type = nn.Linear(32, 48)  # type: ignore[assignment]
    manager = fp8dist.prepare(model)
    weights = {"type.weight": model._modules["type"].weight.detach().to(dtype)}  # type: ignore[union-attr,operator]
    dcp.save({"model": weights, "fp8": _with_settings(manager, settings)}, checkpoint_id=tmp_path / "checkpoint")
    assert main(["export", str(tmp_path / "checkpoint"), "--out", str(tmp_path / "out")]) == code
    assert re.search(text, capsys.readouterr().err)


def test_what_is_printed_and_written(alone: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "own.json").write_text('{"model_type": "gpt", "hidden_size": 32}')
    out = tmp_path / "out"
    words = ["export", str(alone), "--out", str(out), "--config", str(tmp_path / "own.json"), "--shard-bytes"]
    assert main([*words, "20000"]) == 0
    assert capsys.readouterr().out == f"{out}: 25 tensors, 4 weights in FP8, after step 4\n"
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["hidden_size"]) == ("gpt", 32)
    assert set(config["quantization_config"]["ignore"]) == {"embedding", "lm_head"}
    assert len(list(out.glob("*.safetensors"))) == 4
    assert main([*words, "20000"]) == USAGE
    assert "exists: export to a new folder" in capsys.readouterr().err
    assert main([*words, "0"]) == USAGE
    assert tensor_bits(read(out)) == tensor_bits(dict(fp8dist.exported(_inside(alone))))


def test_weights_that_fsdp_gathered_in_bfloat16(alone: Path, tmp_path: Path) -> None:
    """They are cast from bfloat16. The example job notes it; other jobs say it by a flag."""
    manager = _inside(alone)
    noted = {"model": manager._tested, "fp8": manager, "run": {"step": 4, "gathered_in": "bfloat16"}}
    dcp.save(noted, checkpoint_id=tmp_path / "noted")
    for out, source, words in (
        ("out", alone, ["--gathered-in", "bfloat16"]),
        ("plain", alone, []),
        ("of noted", tmp_path / "noted", []),
    ):
        assert main(["export", str(source), "--out", str(tmp_path / out), *words]) == 0
    with torch.no_grad():
        for name, parameter in manager._tested.named_parameters():
            if name.endswith("weight") and parameter.ndim == 2:
                parameter.copy_(parameter.bfloat16())
    expected = served(dict(fp8dist.exported(manager)))
    assert served(read(tmp_path / "out")) == expected
    assert served(read(tmp_path / "plain")) != expected
    assert tensor_bits(read(tmp_path / "of noted")) == tensor_bits(read(tmp_path / "out"))


def test_what_cannot_be_exported(alone: Path, tmp_path: Path, capsys: Capture) -> None:
    net = nn.Sequential(nn.Linear(32, 48))
    dcp.save({"model": net.state_dict()}, checkpoint_id=tmp_path / "plain")
    manager = fp8dist.prepare(net, fp8dist.RowwiseScaling()).attach()
    dcp.save({"model": net.state_dict(), "fp8": manager}, checkpoint_id=tmp_path / "rowwise")
    for checkpoint, words, code, text in (
        (tmp_path / "plain", [], UNREADABLE, "expected one FP8 state that all ranks share, found none"),
        (tmp_path / "rowwise", ["--format", "block"], USAGE, "formats that fit: compressed-tensors"),
        (alone, ["--model", "weights"], UNREADABLE,
         "has no tensors of 'weights', its keys are 'model', 'optimizer', 'run': --model names"),
        (alone, ["--config", "/nowhere"], USAGE, "--config /nowhere cannot be read"),
        (tmp_path, [], UNREADABLE, "no checkpoint"),
    ):  # fmt: skip
        assert main(["export", str(checkpoint), "--out", str(tmp_path / "out"), *words]) == code
        assert text in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_a_file_of_torch_save_with_slots_that_are_no_linears(tmp_path: Path, capsys: Capture) -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    manager = fp8dist.prepare(model)
    for name, role in (("mine", "input"), ("other", "weight")):
        manager.register(name, role, "e5m2")
    manager.attach()
    model(torch.randn(4, 32)).sum().backward()
    manager.step()
    torch.save({"net": model.state_dict(), "fp8": manager.state_dict(), "step": 1}, tmp_path / "saved.pt")
    words = ["export", str(tmp_path / "saved.pt"), "--out", str(tmp_path / "out")]
    assert main(words) == UNREADABLE
    assert "has no tensors of 'model', its keys are 'net', 'step': --model names the key" in capsys.readouterr().err
    assert main([*words, "--model", "net"]) == 0
    assert tensor_bits(read(tmp_path / "out")) == tensor_bits(dict(fp8dist.exported(manager)))
