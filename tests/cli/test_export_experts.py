"""``fp8dist export`` and ``fp8dist verify`` of checkpoints with experts, against exports inside the job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling
from fp8dist.cli.main import DIVERGED, UNREADABLE, USAGE, main
from fp8dist.state.storage import from_bytes, to_bytes
from tests.support.experts import Experts, Mixture
from tests.support.lab.mixture import MixtureGPT
from tests.support.main_job import RANKS, TINY, finish
from tests.support.ranks import RankPool
from tests.support.serving import NATIVE, RECIPES, read, tensor_bits
from tests.support.sharded_experts import Job, Routed, build, routed_batch, step

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore::UserWarning")

INNER = 128
CONFIG = {"model_type": "mixtral", "hidden_size": 32}
OF_JOB = ("ranks", "proven", "checked", "last_check", "digest")
"""Fields of a certificate that a checkpoint cannot know, and the seal over them."""


class _Config:
    """Stands for a config of Transformers."""

    model_type = CONFIG["model_type"]

    def to_dict(self) -> dict[str, Any]:
        return dict(CONFIG)


def _trained(folder: Path, recipe: str, mixtral: bool = False, prepared: Any = None, **options: Any) -> Any:
    """Train three steps, and save a checkpoint. Return the manager."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": Routed(inner=INNER, **options)})
    if mixtral:
        model.config = _Config()  # type: ignore[assignment]
    manager = fp8dist.prepare(model, RECIPES[recipe], **(prepared or {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager.attach(model, optimizer=optimizer)
    for index in range(3):
        model["mlp"](routed_batch(0, index, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save({"model": model.state_dict(), "fp8": manager}, checkpoint_id=folder / "checkpoint")
    manager._tested = model
    return manager


def _exported(folder: Path, *words: str) -> int:
    return main(["export", str(folder / "checkpoint"), "--out", str(folder / "out"), *words])


def _assert_one_folder(job: Path, out: Path) -> None:
    """Assert that two exports have the same tensors, names, config and certificate."""
    assert tensor_bits(read(out)) == tensor_bits(read(job))
    index, other = (json.loads((folder / "model.safetensors.index.json").read_text()) for folder in (job, out))
    assert index == other
    assert (job / "config.json").read_bytes() == (out / "config.json").read_bytes()
    ours, theirs = (json.loads((folder / "fp8dist-certificate.json").read_text()) for folder in (job, out))
    assert {name for name in ours if ours[name] != theirs[name]} <= set(OF_JOB)


LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "transposed": {"transposed": True, "bias": True},
    "interleaved": {"interleaved": True, "bias": True},
    "without a gate": {"gate": False},
}


CASES = [(recipe, layout) for recipe in RECIPES for layout in LAYOUTS if (recipe, layout) != ("block", "interleaved")]


@pytest.mark.parametrize(("recipe", "layout"), CASES)
def test_a_checkpoint_is_exported_as_the_job_exports_it(tmp_path: Path, recipe: str, layout: str) -> None:
    manager = _trained(tmp_path, recipe, **LAYOUTS[layout])
    fp8dist.export(manager, tmp_path / "job", format=NATIVE[recipe])
    assert _exported(tmp_path, "--format", NATIVE[recipe]) == 0
    _assert_one_folder(tmp_path / "job", tmp_path / "out")
    assert main(["verify", str(tmp_path / "checkpoint"), str(tmp_path / "job")]) == 0


def test_names_and_config_of_a_mixtral(tmp_path: Path) -> None:
    manager = _trained(tmp_path, "delayed", mixtral=True)
    fp8dist.export(manager, tmp_path / "job")
    (tmp_path / "config.json").write_text(json.dumps(_Config().to_dict() | {"architectures": ["ModuleDict"]}))
    assert _exported(tmp_path, "--config", str(tmp_path / "config.json")) == 0
    _assert_one_folder(tmp_path / "job", tmp_path / "out")
    assert main(["verify", str(tmp_path / "checkpoint"), str(tmp_path / "job")]) == 0
    plain = ["export", str(tmp_path / "checkpoint"), "--out", str(tmp_path / "plain")]
    assert main(plain) == 0  # The state knows the model's type, too.
    assert tensor_bits(read(tmp_path / "plain")) == tensor_bits(read(tmp_path / "job"))
    assert "mlp.experts.3.w1.weight" in read(tmp_path / "plain")


def test_names_by_the_config_that_is_given(tmp_path: Path) -> None:
    """Of a model without a config. ``verify`` finds the same config in the certificate."""
    _trained(tmp_path, "delayed")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert _exported(tmp_path, "--config", str(tmp_path / "config.json")) == 0
    assert "mlp.experts.3.w1.weight" in read(tmp_path / "out")
    assert main(["verify", str(tmp_path / "checkpoint"), str(tmp_path / "out")]) == 0


def test_experts_in_high_precision(tmp_path: Path) -> None:
    """By ``set_precision``; and by ``skip``, so that they have no slots."""
    for case, prepared in (("set", None), ("skip", {"skip": "*.experts"})):
        folder = tmp_path / case
        manager = _trained(folder, "delayed", prepared=prepared)
        if case == "set":
            manager.set_precision("mlp.experts.*", "high")
            dcp.save({"model": manager._tested.state_dict(), "fp8": manager}, checkpoint_id=folder / "checkpoint")
        fp8dist.export(manager, folder / "job")
        assert _exported(folder) == 0
        _assert_one_folder(folder / "job", folder / "out")
        assert read(folder / "out")["mlp.experts.3.gate_proj.weight"].dtype == torch.float32


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_experts_without_tokens(tmp_path: Path, recipe: str) -> None:
    """One has no scale yet, and one a weight that outgrew its scale: both are cast with their own amaxes."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": Routed(inner=INNER)})
    manager = fp8dist.prepare(model, RECIPES[recipe])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager.attach(model, optimizer=optimizer)
    x = routed_batch(0, 0, 4)
    x[:, 32:] = x[:, 32:].clamp(max=2)
    model["mlp"](x).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        model["mlp"].experts.down_proj[1] *= 16
    dcp.save({"model": model.state_dict(), "fp8": manager}, checkpoint_id=tmp_path / "checkpoint")
    fp8dist.export(manager, tmp_path / "job")
    assert _exported(tmp_path) == 0
    _assert_one_folder(tmp_path / "job", tmp_path / "out")
    assert "mlp.experts.0.down_proj.input_scale" not in read(tmp_path / "out")


def _with_info(folder: Path, manager: Any, change: Any) -> None:
    """Save the checkpoint again, with other values beside its FP8 state."""
    ((name, data),) = manager.state_dict().items()
    state, info = from_bytes(data, "")
    change(info)
    fp8 = {name: to_bytes(state, info)}
    dcp.save({"model": manager._tested.state_dict(), "fp8": fp8}, checkpoint_id=folder / "checkpoint")


def test_a_state_that_does_not_say_how_experts_are_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It still loads."""
    manager = _trained(tmp_path, "delayed")
    _with_info(tmp_path, manager, lambda info: info.pop("experts"))
    assert _exported(tmp_path) == USAGE
    text = "mlp.experts.down_proj holds the weights of experts, but its FP8 state does not say in which layout: load it"
    assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    other = nn.ModuleDict({"mlp": Routed(inner=INNER)})
    loaded = fp8dist.prepare(other, RECIPES["delayed"])
    dcp.load({"model": other.state_dict(), "fp8": loaded}, checkpoint_id=tmp_path / "checkpoint")
    slot = "mlp.experts.gate_up.3", "weight"
    assert torch.equal(loaded.slot(*slot).scale, manager.slot(*slot).scale)
    loaded._tested = other
    _with_info(tmp_path, loaded, lambda info: None)  # Saved again, as the message says.
    assert _exported(tmp_path) == 0


@pytest.mark.parametrize(
    "described",
    [
        [],
        {"model_type": 3, "layouts": {}},
        {"model_type": None},
        {"model_type": None, "layouts": {"mlp.experts": {"has_gate": True}}},
        {"model_type": None, "layouts": {"mlp.experts": ["has_gate", "has_bias", "is_transposed", "is_concatenated"]}},
    ],
)
def test_malformed_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str], described: Any) -> None:
    manager = _trained(tmp_path, "delayed")
    _with_info(tmp_path, manager, lambda info: info.update(experts=described))
    assert _exported(tmp_path) == UNREADABLE
    assert "the FP8 state has malformed layouts of experts" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["has_gate", "has_bias"])
def test_layouts_that_the_tensors_contradict(tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str) -> None:
    manager = _trained(tmp_path, "delayed")
    layout = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    layout[wrong] = not layout[wrong]
    described = {"model_type": None, "layouts": {"mlp.experts": layout}}
    _with_info(tmp_path, manager, lambda info: info.update(experts=described))
    assert _exported(tmp_path) != 0
    assert "experts" in capsys.readouterr().err


class _Wide(Experts):
    """Experts with an activation of their own, which takes three parts."""

    def __init__(self) -> None:
        super().__init__(inner=INNER)
        self.gate_up_proj = nn.Parameter(torch.randn(4, 3 * INNER, 32) / 6)

    def _apply_gate(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up, more = rows.chunk(3, -1)
        return gate * up + more


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (Experts(inner=INNER), "the model is a mixture itself, which has no name: put it into a module"),
        (Mixture(_Wide()), "experts: its first product is no gate and up of the width that its down_proj takes"),
    ],
)
def test_mixtures_that_servers_cannot_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: nn.Module, text: str
) -> None:
    manager = fp8dist.prepare(model)
    dcp.save({"model": model.state_dict(), "fp8": manager}, checkpoint_id=tmp_path / "checkpoint")
    assert _exported(tmp_path) == USAGE
    assert text in capsys.readouterr().err
    with pytest.raises(fp8dist.ConfigurationError, match=text):
        fp8dist.export(manager, tmp_path / "job")


def _flip(folder: Path, name: str) -> None:
    """Flip the lowest bit of a tensor's second-last byte."""
    served = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    with safe_open(served, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(served)
    tensors[name].view(-1).view(torch.uint8)[-2] ^= 1
    save_file(tensors, served, metadata)


@pytest.mark.parametrize("made", ["job", "out"])
@pytest.mark.parametrize("kind", ["weight", "weight_scale", "input_scale"])
def test_a_flipped_bit_of_one_expert_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], made: str, kind: str
) -> None:
    manager = _trained(tmp_path, "delayed", mixtral=True)
    if made == "job":
        fp8dist.export(manager, tmp_path / "job")
    else:
        assert _exported(tmp_path) == 0
    served, name = tmp_path / made, f"mlp.experts.2.w3.{kind}"
    certificate = ["verify", "--certificate", str(served / "fp8dist-certificate.json"), str(served)]
    checkpoint = ["verify", str(tmp_path / "checkpoint"), str(served)]
    assert main(certificate) == main(checkpoint) == 0
    _flip(served, name)
    for command in (certificate, checkpoint):
        capsys.readouterr()
        assert main([*command, "--json"]) == DIVERGED
        assert [found["name"] for found in json.loads(capsys.readouterr().out)["findings"]] == [name]


def _sharded(job: Job, folder: Path) -> None:
    """Export twice: with experts in FP8, and in high precision."""
    _, called, manager, optimizer = build(job)
    for index in range(2):
        step(job, called, optimizer, index)
    for case in ("fp8", "high"):
        if case == "high":
            manager.set_precision("experts.*", "high")
        fp8dist.export(manager, folder / case / "job", called, format=_format(job))
        dcp.save({"model": called.state_dict(), "fp8": manager}, checkpoint_id=folder / case / "checkpoint")


def _format(job: Job) -> str:
    return "block" if isinstance(job.recipe, BlockScaling) else "compressed-tensors"


SHARDED = {
    "high": Job(inner=INNER, fp8_all_gather=False, experts=3),
    "experts": Job(inner=INNER, experts=3),
    "rows": Job(inner=INNER, dim=1),
    "current": Job(inner=INNER, recipe=CurrentScaling()),
    "bfloat16": Job(inner=INNER, fp8_all_gather=False, shard={"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}),
    "to bfloat16": Job(inner=INNER, shard={"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}),
    "transposed": Job(inner=INNER, options={"transposed": True, "bias": True}),
    "blocks": Job(
        inner=INNER,
        recipe=BlockScaling(),
        options={"transposed": True},
        settings={"overrides": {"inlet": DelayedScaling()}},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("job", SHARDED.values(), ids=SHARDED)
def test_a_checkpoint_of_sharded_experts(two_ranks: RankPool, tmp_path: Path, job: Job) -> None:
    """In high precision, forwards multiply with experts as they are stored, or as FSDP2 gathered them in FP8."""
    two_ranks.run(_sharded, job, tmp_path)
    flags = ["--gathered-in", "bfloat16"] if "mp_policy" in job.shard else []
    for case in ("fp8", "high"):
        assert _exported(tmp_path / case, "--format", _format(job), *flags) == 0
        _assert_one_folder(tmp_path / case / "job", tmp_path / case / "out")


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--parallel ddp", "--parallel fsdp2 --fp8-all-gather"])
def test_a_checkpoint_of_the_example_job(tmp_path: Path, flags: str) -> None:
    """After ``dcp.load`` into another process, the job exports the same."""
    words = f"--steps 4 --save-every 4 --experts 4 --top-k 2 {flags}"
    finish(tmp_path / "run", RANKS, *TINY, *words.split())
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000004"
    (tmp_path / "checkpoint").symlink_to(checkpoint)
    assert _exported(tmp_path) == 0
    model = MixtureGPT(layers=1, width=32, heads=2, context=32, experts=4, top_k=2)
    manager = fp8dist.prepare(model, skip=("lm_head", "*.router"))
    dcp.load({"model": model, "fp8": manager}, checkpoint_id=checkpoint)
    exported = read(tmp_path / "out")
    assert tensor_bits(exported) == tensor_bits(dict(fp8dist.exported(manager)))
    experts = {name for name in exported if ".experts." in name and name.endswith("weight")}
    assert len(experts) == 8
    assert {exported[name].dtype for name in experts} == {torch.float8_e4m3fn}
    assert main(["verify", str(checkpoint), str(tmp_path / "out")]) == 0
