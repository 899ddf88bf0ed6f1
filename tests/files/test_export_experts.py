"""Export of experts: a tensor per expert under the names of checkpoints, with the bytes of an eval forward, in the job
and from its checkpoint (``fp8dist export``), and ``fp8dist verify`` of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import fp8dist
from fp8dist import BlockScaling, ConfigurationError, CurrentScaling, DelayedScaling
from fp8dist.cli.exit_codes import DIVERGED, UNREADABLE, USAGE
from fp8dist.cli.main import main
from fp8dist.state.storage import from_bytes, to_bytes
from tests.support.experts import Experts
from tests.support.parallel import same_on_all_ranks
from tests.support.ranks import RankPool
from tests.support.serving import (
    NATIVE,
    RECIPES,
    Config,
    Multiplied,
    exported,
    read,
    served,
    spread,
    tensor_bits,
    watched_products,
)
from tests.support.sharded_experts import Job, Routed, build, routed_batch, step
from tests.support.suite import few
from tests.support.training import bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore::UserWarning")

Capture = pytest.CaptureFixture[str]

INNER = 128
"""Rows of gate and of up: a whole block."""
CONFIG = {"model_type": "mixtral", "hidden_size": 32}
OF_JOB = ("ranks", "proven", "checked", "last_check", "digest")
"""Fields of a certificate that a checkpoint cannot know, and the seal over them."""


def _trained(recipe: str = "delayed", mixtral: bool = False, prepared: Any = None, **options: Any) -> Any:
    """Return the manager of a model after three steps, which it keeps as ``_tested``."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": Routed(inner=INNER, **options)})
    if mixtral:
        model.config = Config(**CONFIG)  # type: ignore[assignment]
    manager = fp8dist.prepare(model, RECIPES[recipe], **(prepared or {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager.attach(model, optimizer=optimizer)
    for index in range(3):
        model["mlp"](routed_batch(0, index, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    manager._tested = model
    return manager


def _save(folder: Path, manager: Any, model: nn.Module | None = None, fp8: Any = None) -> None:
    state = {"model": (model or manager._tested).state_dict(), "fp8": fp8 or manager}
    dcp.save(state, checkpoint_id=folder / "checkpoint")


def _saved(folder: Path, recipe: str = "delayed", **options: Any) -> Any:
    """Return the manager of a model after three steps, which is saved in ``folder/checkpoint``."""
    manager = _trained(recipe, **options)
    _save(folder, manager)
    return manager


def _offline(folder: Path, *words: str) -> int:
    return main(["export", str(folder / "checkpoint"), "--out", str(folder / "out"), *words])


def _verified(folder: Path, served: str) -> int:
    return main(["verify", str(folder / "checkpoint"), str(folder / served)])


def _assert_one_folder(job: Path, out: Path) -> None:
    """Assert that two exports have the same tensors, names, config and certificate."""
    assert tensor_bits(read(out)) == tensor_bits(read(job))
    index, other = (json.loads((folder / "model.safetensors.index.json").read_text()) for folder in (job, out))
    assert index == other
    assert (job / "config.json").read_bytes() == (out / "config.json").read_bytes()
    ours, theirs = (json.loads((folder / "fp8dist-certificate.json").read_text()) for folder in (job, out))
    assert {name for name in ours if ours[name] != theirs[name]} <= set(OF_JOB)


def _assert_multiplied(
    tensors: dict[str, Tensor], called: nn.Module, x: Tensor, interleaved: bool = False
) -> Multiplied:
    """Assert that an eval forward multiplies with the exported bytes and scales of each Linear of a served expert.
    Return them."""
    with watched_products() as seen, torch.no_grad():
        called.eval()(x)
    called.train()
    found: Multiplied = {}
    of_experts = {fqn: factors for fqn, factors in seen.items() if factors[0].ndim == 3}  # The inlet is a Linear.
    for fqn, (weights, scales) in of_experts.items():
        mixture, _, product = fqn.rpartition(".")
        for expert, (weight, scale) in enumerate(zip(weights, scales)):
            each = spread(scale, weight.shape)
            parts = {f"{product}_proj": (weight, each)}
            if product == "gate_up":
                rows = [slice(i, None, 2) if interleaved else slice(i * INNER, (i + 1) * INNER) for i in (0, 1)]
                parts = {name: (weight[of], each[of]) for name, of in zip(("gate_proj", "up_proj"), rows)}
            for name, (part, factors) in parts.items():
                found[f"{mixture}.{expert}.{name}"] = bits(part.contiguous()), bits(factors.contiguous())
    assert {name: each for name, each in served(tensors).items() if "experts." in name} == found
    return found


LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "transposed": {"transposed": True, "bias": True},
    "interleaved": {"interleaved": True, "bias": True},
    "without a gate": {"gate": False},
}


MIXED = [
    *(("delayed", "plain"), ("delayed 2^n", "without a gate"), ("current", "transposed"), ("rowwise", "interleaved")),
    *(("block", "transposed"), ("mx", "interleaved")),
    *(("delayed", "interleaved"), ("current", "interleaved"), ("rowwise", "plain"), ("block", "without a gate")),
    ("mx", "transposed"),
]


@pytest.mark.parametrize(("recipe", "layout"), few(MIXED, *MIXED[:6]))
def test_a_job_and_its_checkpoint_export_what_an_eval_forward_multiplies_with(
    tmp_path: Path, recipe: str, layout: str
) -> None:
    manager = _saved(tmp_path, recipe, **LAYOUTS[layout])
    fp8dist.export(manager, tmp_path / "job", format=NATIVE[recipe])
    assert _offline(tmp_path, "--format", NATIVE[recipe]) == 0
    _assert_one_folder(tmp_path / "job", tmp_path / "out")
    assert _verified(tmp_path, "job") == 0
    routed = manager._tested["mlp"]
    for tensors in (
        read(tmp_path / "job"),
        *([] if recipe in ("rowwise", "mx") else [exported(manager, format="block")]),
    ):
        _assert_multiplied(tensors, routed, routed_batch(0, 9, 4), layout == "interleaved")
        if LAYOUTS[layout].get("bias"):
            biases = routed.experts.gate_up_proj_bias[3]
            halves = (biases[::2], biases[1::2]) if layout == "interleaved" else biases.chunk(2)
            assert torch.equal(tensors["mlp.experts.3.gate_proj.bias"], halves[0])
            assert torch.equal(tensors["mlp.experts.3.up_proj.bias"], halves[1])
        assert not any("gate_up" in name for name in tensors)
    for expert in range(4 if recipe == "delayed" and layout == "plain" else 0):  # Gate and up share a scale.
        for name, fqn in (("gate_proj", "gate_up"), ("up_proj", "gate_up"), ("down_proj", "down")):
            expected = 1 / manager.slot(f"mlp.experts.{fqn}.{expert}", "input").scale.reshape(1)
            assert bits(read(tmp_path / "job")[f"mlp.experts.{expert}.{name}.input_scale"]) == bits(expected)


def test_what_is_refused(tmp_path: Any) -> None:
    manager = _trained()
    manager.set_precision("mlp.experts.down.2", "high")
    of_8 = r"of 8 products of experts, 1 are in high precision: mlp\.experts\.down\.2"
    with pytest.raises(ConfigurationError, match=of_8):
        fp8dist.exported(manager)
    manager.set_precision("mlp.experts.down.2", "fp8")
    for kind, why in (
        ("odd", ""),
        ("gpt_oss", r" \(Transformers 5\.23 reads no FP8 experts with biases, and .* only\)"),
    ):
        manager._tested.config = Config(model_type=kind)  # type: ignore[assignment]
        with pytest.raises(
            ConfigurationError, match=f"which names servers read for the experts of '{kind}'{why}: leave"
        ):
            fp8dist.export(manager, tmp_path / "served")
    for cut in (Routed(inner=192), Routed(interleaved=True)):
        other = fp8dist.prepare(cut, BlockScaling())
        with pytest.raises(ConfigurationError, match="has rows of gate and of up"):
            fp8dist.exported(other, format="block")
    whole = Routed(inner=256)
    other = fp8dist.prepare(whole, overrides={"experts": BlockScaling()})
    with pytest.raises(ConfigurationError, match=r"experts\.down: its weights have one scale for each 128 x 128"):
        fp8dist.exported(other)
    itself = Experts(inner=INNER)
    other = fp8dist.prepare(itself)
    with pytest.raises(ConfigurationError, match="the model is a mixture itself, which has no name: put it into a"):
        fp8dist.export(other, tmp_path / "served")
    tied = nn.ModuleList([Routed(), Routed()])
    tied[1].experts.down_proj = tied[0].experts.down_proj
    with pytest.raises(ConfigurationError, match="is the same tensor as"):
        fp8dist.exported(fp8dist.prepare(tied))


def test_an_own_gate_of_another_width() -> None:
    model, wide = Routed(inner=INNER), Routed(inner=INNER)
    for each in (model, wide):
        each.experts._apply_gate = lambda rows: rows[:, :INNER] * rows[:, INNER : 2 * INNER]
    wide.experts.gate_up_proj = nn.Parameter(torch.randn(4, 3 * INNER, 32))
    assert "experts.3.up_proj.weight" in dict(fp8dist.exported(fp8dist.prepare(model)))
    with pytest.raises(ConfigurationError, match="experts: its first product is no gate and up of the width that"):
        fp8dist.exported(fp8dist.prepare(wide))
    fp8dist.restore(wide)
    stored = dict(fp8dist.exported(fp8dist.prepare(wide, skip="experts")))
    assert torch.equal(stored["experts.gate_up_proj"], wide.experts.gate_up_proj)


def test_names_and_config_of_a_mixtral(tmp_path: Path) -> None:
    """Its own, or those that are given for a model without a config. ``verify`` finds the same in the certificate."""
    manager = _saved(tmp_path, mixtral=True)
    fp8dist.export(manager, tmp_path / "job")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["ModuleDict"]}))
    assert _offline(tmp_path, "--config", str(tmp_path / "config.json")) == 0
    _assert_one_folder(tmp_path / "job", tmp_path / "out")
    assert _verified(tmp_path, "job") == 0
    plain = ["export", str(tmp_path / "checkpoint"), "--out", str(tmp_path / "plain")]
    assert main(plain) == 0  # The state knows the model's type, too.
    assert tensor_bits(read(tmp_path / "plain")) == tensor_bits(read(tmp_path / "job"))
    assert "mlp.experts.3.w1.weight" in read(tmp_path / "plain")
    _saved(tmp_path / "without")
    given = ["export", str(tmp_path / "without" / "checkpoint"), "--out", str(tmp_path / "without" / "out")]
    assert main([*given, "--config", str(tmp_path / "config.json")]) == 0
    assert "mlp.experts.3.w1.weight" in read(tmp_path / "without" / "out")
    assert _verified(tmp_path / "without", "out") == 0
    model = nn.ModuleDict({"layer": nn.ModuleDict({"mlp": Routed(inner=INNER)})})
    model.config = Config(model_type="mixtral")  # type: ignore[assignment]
    names = {name for name, _ in fp8dist.exported(fp8dist.prepare(model))}  # The names in files of Transformers.
    weights = {f"layer.block_sparse_moe.experts.2.{each}.weight" for each in ("w1", "w2", "w3")}
    assert weights | {f"{name}_scale" for name in weights} <= names


@pytest.mark.parametrize("prepared", [{}, {"skip": "*.experts"}], ids=["set_precision", "skip: no slots"])
def test_experts_in_high_precision(tmp_path: Path, prepared: dict[str, Any]) -> None:
    manager = _trained(prepared=prepared)
    if not prepared:
        manager.set_precision("mlp.experts.*", "high")
    _save(tmp_path, manager)
    fp8dist.export(manager, tmp_path / "job")
    assert _offline(tmp_path) == 0
    _assert_one_folder(tmp_path / "job", tmp_path / "out")
    tensors = read(tmp_path / "out")
    for expert in range(4):
        gate, up = manager._tested["mlp"].experts.gate_up_proj[expert].chunk(2)
        assert torch.equal(tensors[f"mlp.experts.{expert}.gate_proj.weight"], gate)
        assert torch.equal(tensors[f"mlp.experts.{expert}.up_proj.weight"], up)
    assert not any("experts." in name for name in served(tensors))


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
    _save(tmp_path, manager, model)
    fp8dist.export(manager, tmp_path / "job")
    assert _offline(tmp_path) == 0
    _assert_one_folder(tmp_path / "job", tmp_path / "out")
    assert "mlp.experts.0.down_proj.input_scale" not in read(tmp_path / "out")


def _with_info(folder: Path, manager: Any, change: Any) -> None:
    """Save the checkpoint again, with other values beside its FP8 state."""
    ((name, data),) = manager.state_dict().items()
    state, info = from_bytes(data, "")
    change(info)
    _save(folder, manager, fp8={name: to_bytes(state, info)})


def test_a_state_that_does_not_say_how_experts_are_stored(tmp_path: Path, capsys: Capture) -> None:
    """It still loads."""
    manager = _saved(tmp_path)
    _with_info(tmp_path, manager, lambda info: info.pop("experts"))
    assert _offline(tmp_path) == USAGE
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
    assert _offline(tmp_path) == 0


LAYOUT = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}


@pytest.mark.parametrize(
    ("described", "code", "text"),
    [
        *(
            (wrong, UNREADABLE, "the FP8 state has malformed layouts of experts")
            for wrong in (
                *([], {"model_type": 3, "layouts": {}}, {"model_type": None}),
                {"model_type": None, "layouts": {"mlp.experts": {"has_gate": True}}},
                {"model_type": None, "layouts": {"mlp.experts": list(LAYOUT)}},
            )
        ),
        # Which the tensors contradict.
        ({"model_type": None, "layouts": {"mlp.experts": {**LAYOUT, "has_gate": False}}}, None, "experts"),
        ({"model_type": None, "layouts": {"mlp.experts": {**LAYOUT, "has_bias": True}}}, None, "experts"),
    ],
)
def test_wrong_layouts(tmp_path: Path, capsys: Capture, described: Any, code: int | None, text: str) -> None:
    manager = _saved(tmp_path)
    _with_info(tmp_path, manager, lambda info: info.update(experts=described))
    found = _offline(tmp_path)
    assert found == code or (code is None and found != 0)
    assert text in capsys.readouterr().err


def _flip(folder: Path, name: str) -> None:
    """Flip the lowest bit of a tensor's second-last byte."""
    served = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
    with safe_open(served, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(served)
    tensors[name].view(-1).view(torch.uint8)[-2] ^= 1
    save_file(tensors, served, metadata)


def test_a_flipped_bit_of_one_expert_is_named(tmp_path: Path, capsys: Capture) -> None:
    _saved(tmp_path, mixtral=True)
    assert _offline(tmp_path) == 0
    served = tmp_path / "out"
    certificate = ["verify", "--certificate", str(served / "fp8dist-certificate.json"), str(served)]
    checkpoint = ["verify", str(tmp_path / "checkpoint"), str(served)]
    assert main(certificate) == main(checkpoint) == 0
    for name in (f"mlp.experts.2.w3.{kind}" for kind in ("weight", "weight_scale", "input_scale")):
        _flip(served, name)
        for command in (certificate, checkpoint):
            capsys.readouterr()
            assert main([*command, "--json"]) == DIVERGED
            assert [found["name"] for found in json.loads(capsys.readouterr().out)["findings"]] == [name]
        _flip(served, name)  # Back.


def _format(job: Job) -> str:
    return "block" if isinstance(job.recipe, BlockScaling) else "compressed-tensors"


def _sharded(job: Job, folder: Path) -> None:
    """Export twice: with experts in FP8, and in high precision."""
    _, called, manager, optimizer = build(job)
    for index in range(2):
        step(job, called, optimizer, index)
    for case in ("fp8", "high"):
        if case == "high":
            manager.set_precision("experts.*", "high")
        else:
            tensors = exported(manager, called, format=_format(job))
            found = _assert_multiplied(tensors, called, routed_batch(0, 9, job.experts))
            same_on_all_ranks(found)
            assert len(found) == 3 * job.experts
        fp8dist.export(manager, folder / case / "job", called, format=_format(job))
        dcp.save({"model": called.state_dict(), "fp8": manager}, checkpoint_id=folder / case / "checkpoint")


SHARDED = {
    "rows, high": Job(inner=INNER, fp8_all_gather=False, dim=1),
    "experts": Job(inner=INNER, experts=3),
    "rows": Job(inner=INNER, dim=1),
    "current": Job(inner=INNER, recipe=CurrentScaling()),
    "bfloat16": Job(inner=INNER, fp8_all_gather=False, shard={"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}),
    "to bfloat16": Job(inner=INNER, shard={"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}),
    "transposed": Job(inner=INNER, options={"transposed": True, "bias": True}),
    "blocks": Job(inner=INNER, recipe=BlockScaling(), options={"transposed": True},
                  settings={"overrides": {"inlet": DelayedScaling()}}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", few(SHARDED, "rows, high", "experts", "to bfloat16", "transposed", "blocks"))
def test_sharded_experts_are_exported_whole_and_from_their_checkpoint(
    two_ranks: RankPool, tmp_path: Path, name: str
) -> None:
    """In high precision, forwards multiply with experts as they are stored, or as FSDP2 gathered them in FP8."""
    job = SHARDED[name]
    two_ranks.run(_sharded, job, tmp_path)
    flags = ["--gathered-in", "bfloat16"] if "mp_policy" in job.shard else []
    for case in ("fp8", "high"):
        assert _offline(tmp_path / case, "--format", _format(job), *flags) == 0
        _assert_one_folder(tmp_path / case / "job", tmp_path / case / "out")
