"""Export on one process: an eval forward's own bytes and scales; formats, refusals, whole folders or none."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8dist
from fp8dist import ConfigurationError
from fp8dist.files import export_files
from fp8dist.files.export import Export, export_of
from fp8dist.job.manager import Internals
from tests.support.forked import ROOT
from tests.support.serving import NATIVE, RECIPES, as_bits, multiplied, read, served, tensor_bits
from tests.support.sharded import wide
from tests.support.training import batch, bits, state_bits

FORMATS = ("compressed-tensors", "compressed-tensors-channel", "block")


def trained(recipe: str = "delayed", steps: int = 3, model: nn.Module | None = None, **settings: Any) -> Any:
    """Return (model, manager, a function that takes a step)."""
    torch.manual_seed(0)
    net = wide() if model is None else model
    manager = fp8dist.prepare(net, RECIPES[recipe], **settings)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    manager.attach(optimizer=optimizer)

    def step(number: int) -> float:
        x, _ = batch(0, number)
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    for number in range(steps):
        step(number)
    return net, manager, step


def _exported(manager: Any, format: str = "compressed-tensors") -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in fp8dist.exported(manager, format=format)}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("steps", [0, 3])
def test_an_eval_forward_multiplies_with_the_exported_bytes_and_scales(recipe: str, steps: int) -> None:
    """Also before the first step, where slots of inputs are cold."""
    net, manager, _ = trained(recipe, steps)
    tensors = _exported(manager, NATIVE[recipe])
    assert served(tensors) == as_bits(multiplied(net, batch(0, 9)[0]))
    assert {name for name in tensors if name.endswith("bias")} == {f"layers.{i}.bias" for i in range(4)}
    assert all(bits(tensors[name]) == bits(value) for name, value in net.state_dict().items() if name.endswith("bias"))


@pytest.mark.parametrize(("recipe", "format"), [("delayed", f) for f in FORMATS] + [("current", f) for f in FORMATS])
def test_a_scale_for_the_whole_tensor_is_exact_in_each_format(recipe: str, format: str) -> None:
    net, manager, _ = trained(recipe)
    tensors = _exported(manager, format)
    assert served(tensors) == as_bits(multiplied(net, batch(0, 9)[0]))
    shapes = {"compressed-tensors": (1,), "compressed-tensors-channel": (512, 1), "block": (4, 2)}
    suffix = "weight_scale_inv" if format == "block" else "weight_scale"
    assert tensors[f"layers.1.{suffix}"].shape == shapes[format]


def test_input_scales_are_those_of_the_delayed_slots() -> None:
    _, manager, _ = trained()
    tensors = _exported(manager)
    for i in range(4):
        assert bits(tensors[f"layers.{i}.input_scale"]) == bits(
            1 / manager.slot(f"layers.{i}", "input").scale.reshape(1)
        )
    assert not any("input_scale" in name for name in _exported(manager, "block"))
    _, current, _ = trained("current")
    assert not any("input_scale" in name for name in _exported(current))


def test_a_weight_written_since_its_scale_was_derived() -> None:
    net, manager, _ = trained()
    with torch.no_grad():
        net.layers[1].weight.mul_(40)
    tensors = _exported(manager)
    assert served(tensors) == as_bits(multiplied(net, batch(0, 9)[0]))
    assert bits(tensors["layers.1.weight_scale"]) != bits(manager.slot("layers.1", "weight").inv_scale.reshape(1))


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("factor", [1.02, 1.2, 1.9, 2.5])
@pytest.mark.parametrize("write", [".data", "mul_", "load_state_dict"])
def test_an_export_saturates_no_weight(write: str, factor: float, swapped: bool) -> None:
    net, manager, _ = trained()
    manager.refresh_weights()
    with manager.swapped_weights() if swapped else contextlib.nullcontext():
        grown = {name: value * factor for name, value in net.state_dict().items()}
        if write == "load_state_dict":
            net.load_state_dict(grown)
        else:
            for name, parameter in net.named_parameters():
                with torch.no_grad():
                    (parameter.data if write == ".data" else parameter).copy_(grown[name])
        tensors = _exported(manager)
        assert served(tensors) == as_bits(multiplied(net, batch(0, 9)[0]))
    for name, rows in ((name, rows) for name, rows in tensors.items() if rows.dtype == torch.float8_e4m3fn):
        weight, value = grown[name], rows.float() * tensors[f"{name}_scale"]
        # Half a step of E4M3 at the top. Of uniform weights, those from 432 to 464 are there.
        assert float((value - weight).abs().max() / weight.abs().max()) < 0.0358, name
        assert float((rows.float().abs() == 448).float().mean()) < 0.08, name


def test_a_dequantised_export_is_exported_without_a_loss_with_powers_of_two() -> None:
    """Scales of powers of two are also what is left of them if a server rounds scales up to E8M0."""
    net, manager, step = trained("delayed 2^n")
    for number in range(3, 8):  # Weights decay, so a server's own scale would be another one.
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(0.7)
        step(number)
    first = _exported(manager)
    values = {n: t.float() * first[f"{n}_scale"] for n, t in first.items() if t.dtype == torch.float8_e4m3fn}
    for name in values:
        scale = first[f"{name}_scale"]
        assert bits(scale.to(torch.float8_e8m0fnu).float()) == bits(scale)
    other, again, _ = trained("delayed 2^n", steps=0)
    other.load_state_dict({**other.state_dict(), **values})
    again.refresh_weights()
    second = _exported(again)
    for name, value in values.items():
        assert bits(second[name].float() * second[f"{name}_scale"]) == bits(value)


def test_slots_that_are_cold_again_have_no_fixed_input_scale() -> None:
    net, manager, _ = trained()
    manager.reset()
    tensors = _exported(manager)
    assert served(tensors) == as_bits(multiplied(net, batch(0, 9)[0]))
    assert not any("input_scale" in name for name in tensors)


def test_an_export_changes_nothing() -> None:
    plain, manager, step = trained(steps=2)
    losses = [step(i) for i in range(2, 5)]
    expected = state_bits(manager), [bits(p) for p in plain.parameters()]
    other, manager, step = trained(steps=2)
    _exported(manager)
    state = state_bits(manager)
    _exported(manager, "block")
    assert state_bits(manager) == state
    assert [step(i) for i in range(2, 5)] == losses
    assert (state_bits(manager), [bits(p) for p in other.parameters()]) == expected


def test_modules_in_high_precision_are_exported_as_they_are() -> None:
    net, manager, _ = trained(overrides={"layers.3": "high"})
    manager.set_precision("layers.0", "high", gemms=("fprop",))
    manager.set_precision("layers.2", "high", gemms=("wgrad",))
    tensors = _exported(manager)
    for i in (0, 3):
        assert bits(tensors[f"layers.{i}.weight"]) == bits(net.layers[i].weight)
    assert served(tensors).keys() == {"layers.1", "layers.2"}
    config = _config(manager)
    assert config["ignore"] == ["layers.0", "layers.3"]


class Odd(nn.Module):
    """Weights and buffers as models have them: of several dtypes, empty, without dims, not contiguous, not saved."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48, dtype=dtype), nn.Linear(48, 32, bias=False, dtype=dtype)
        self.up.weight = nn.Parameter(self.up.weight.detach().t().contiguous().t())
        self.again = self.up  # One module under two names.
        self.down.weight.requires_grad_(False)
        for number, value in enumerate(BUFFERS):
            self.register_buffer(f"buffer{number}", value)
        self.register_buffer("unsaved", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x.to(self.up.weight.dtype)))

    def get_extra_state(self) -> Tensor:
        return torch.ones(3)

    def set_extra_state(self, state: Tensor) -> None:
        pass


BUFFERS = (
    torch.ones(()),
    torch.zeros(0, 3),
    torch.tensor([True, False]),
    torch.arange(12.0).reshape(3, 4).t(),
    torch.ones(4, 1).expand(4, 5),
    torch.ones(3, dtype=torch.complex64),
    torch.ones(3).to(torch.float8_e5m2),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_odd_tensors_are_exported_as_they_are(tmp_path: Path, recipe: str, dtype: torch.dtype) -> None:
    net, manager, _ = trained(recipe, model=Odd(dtype))
    fp8dist.export(manager, tmp_path / "out")
    tensors = read(tmp_path / "out")
    assert served(tensors) == as_bits(multiplied(net, batch(0, 9)[0]))
    buffers = {name: tensor for name, tensor in tensors.items() if "." not in name}
    assert tensor_bits(buffers) == tensor_bits({f"buffer{i}": value for i, value in enumerate(BUFFERS)})
    assert served(tensors).keys() == {"up", "down"}
    assert tensors["up.bias"].dtype == dtype


def test_swapped_weights_are_exported_while_they_are_in_place() -> None:
    net, manager, _ = trained()
    before = _exported(manager)
    with torch.no_grad(), manager.swapped_weights():
        for parameter in net.parameters():
            parameter.mul_(3)
        assert served(_exported(manager)) == as_bits(multiplied(net, batch(0, 9)[0])) != served(before)


def test_weights_that_are_not_finite() -> None:
    net, manager, _ = trained()
    with torch.no_grad():
        net.layers[0].weight[0, 0], net.layers[1].weight[0, 0] = torch.nan, torch.inf
    assert served(_exported(manager)) == as_bits(multiplied(net, batch(0, 9)[0]))


@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "block"])
def test_the_default_dtype_and_device_do_not_matter(recipe: str) -> None:
    _, manager, _ = trained(recipe, 0)
    expected = tensor_bits(_exported(manager, NATIVE[recipe]))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found = _exported(manager, NATIVE[recipe])
    finally:
        torch.set_default_dtype(torch.float32)
    assert tensor_bits(found) == expected


def test_a_step_between_two_tensors_is_noticed() -> None:
    _, manager, step = trained()
    stream = fp8dist.exported(manager)
    next(stream)
    step(7)
    with pytest.raises(ConfigurationError, match="a step ended while weights were exported"):
        list(stream)


def _listed(manager: Any, format: str = "compressed-tensors") -> Export:
    return export_of(manager._cycle, Internals(manager).model, format)


def _config(manager: Any, format: str = "compressed-tensors") -> dict[str, Any]:
    return _listed(manager, format).quantization_config()


@pytest.mark.parametrize(
    ("recipe", "refused", "fitting"),
    [
        ("rowwise", "block", "compressed-tensors, compressed-tensors-channel"),
        ("block", "compressed-tensors", "block"),
        ("block", "compressed-tensors-channel", "block"),
    ],
)
def test_finer_scales_than_the_formats_are_refused(recipe: str, refused: str, fitting: str) -> None:
    _, manager, _ = trained(recipe, 0)
    with pytest.raises(ConfigurationError, match=rf"layers\.\d: \w+ has one scale for each .* fit: {fitting}$"):
        fp8dist.exported(manager, format=refused)


def test_two_recipes_that_no_format_holds() -> None:
    _, manager, _ = trained("block", 0, overrides={"layers.1": fp8dist.RowwiseScaling()})
    with pytest.raises(ConfigurationError, match="no format fits"):
        fp8dist.exported(manager, format="block")


def test_modules_of_two_recipes_are_two_groups() -> None:
    net, manager, _ = trained(overrides={"layers.1": fp8dist.RowwiseScaling()})
    assert served(_exported(manager)) == as_bits(multiplied(net, batch(0, 9)[0]))
    groups = _config(manager)["config_groups"].values()
    described = {
        tuple(g["targets"]): (g["weights"]["strategy"], *map(g["input_activations"].get, ("strategy", "dynamic")))
        for g in groups
    }
    assert described == {
        ("layers.0", "layers.2", "layers.3"): ("tensor", "tensor", False),
        ("layers.1",): ("channel", "token", True),
    }


class Tied(nn.Module):
    """Linears and an embedding, some of which share a weight."""

    def __init__(self, embedded: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 32)
        self.first, self.second = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        self.second.weight = self.embedding.weight if embedded else self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_a_tied_weight_is_exported_once(tmp_path: Path) -> None:
    net, manager, _ = trained(model=Tied(embedded=False))
    fp8dist.export(manager, tmp_path / "out")
    tensors = read(tmp_path / "out")
    assert {name for name in tensors if name.endswith("weight")} == {"embedding.weight", "first.weight"}
    products = as_bits(multiplied(net, batch(0, 9)[0]))
    assert served(tensors)["first"] == products["first"] == products["second"]


def test_a_weight_in_two_precisions_is_refused() -> None:
    _, manager, _ = trained(model=Tied(embedded=True), skip="!second")
    with pytest.raises(ConfigurationError, match="second is in FP8 and shares its weight with embedding"):
        fp8dist.exported(manager)


@pytest.mark.parametrize(
    ("settings", "why"), [({"eval_precision": "high"}, 'eval_precision="high"'), ({"enabled": False}, "enabled=False")]
)
def test_nothing_in_fp8_is_refused(settings: dict[str, Any], why: str) -> None:
    _, manager, _ = trained(steps=0, **settings)
    with pytest.raises(ConfigurationError, match=f"nothing to export in FP8.*{why}"):
        fp8dist.exported(manager)
    _, manager, _ = trained(steps=0)
    manager.set_precision("*", "high")
    with pytest.raises(ConfigurationError, match="every module is in high precision"):
        fp8dist.exported(manager)


def test_e5m2_weights_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    _, manager, _ = trained(steps=0)
    from fp8dist_kernels.formats import E5M2

    slots = manager._model().layers[1].fp8_slots
    monkeypatch.setattr(slots.states(torch.device("cpu"))[1], "format", E5M2)
    with pytest.raises(ConfigurationError, match=r"layers\.1: its weight is cast to e5m2, and servers read e4m3 only"):
        fp8dist.exported(manager)


def test_a_computed_weight_is_refused() -> None:
    net, manager, _ = trained(steps=0)
    torch.nn.utils.parametrizations.weight_norm(net.layers[1])
    with pytest.raises(ConfigurationError, match=r"layers\.1: its weight is computed by a parametrization"):
        fp8dist.exported(manager)


def test_ignored_names_that_also_match_modules_in_fp8() -> None:
    """Transformers ignores every module whose name ends with an ignored name."""
    net = nn.Sequential()
    net.add_module("proj", nn.Linear(32, 32))
    net.add_module("q_proj", nn.Linear(32, 32))
    _, manager, _ = trained(model=net, overrides={"proj": "high"})
    with pytest.raises(ConfigurationError, match="q_proj is in FP8 and proj is not"):
        fp8dist.exported(manager, format="block")
    assert served(_exported(manager)).keys() == {"q_proj"}


def _chain(*names: str) -> nn.Module:
    net = nn.Sequential()
    for name in names:
        net.add_module(name, nn.Linear(32, 32))
    return net


def _renaming() -> nn.Module:
    net = _chain("a", "b")
    net._register_state_dict_hook(lambda module, state, *_: state.update({"c.weight": state.pop("a.weight")}))
    return net


def _without_outputs() -> nn.Module:
    net = _chain("a", "b")
    net.add_module("c", nn.Linear(32, 1))
    net.c.weight, net.c.out_features = nn.Parameter(torch.ones(0, 32)), 0  # A new one warns.
    return net


def _with_buffer(module: str, name: str, value: Tensor) -> nn.Module:
    net = _chain("a", "b")
    net.get_submodule(module).register_buffer(name, value)
    return net


@pytest.mark.parametrize(
    ("net", "high", "format", "why"),
    [
        (_chain("a(b", "b"), "a(b", "block", r"names of ignored modules as regular expressions, and 'a\(b' is none"),
        (_chain("Linear", "b"), "Linear", "compressed-tensors", "takes the name of module 'Linear' for a class"),
        (_chain("re:x", "b"), "b", "compressed-tensors", "takes the name of module 're:x' for a regular expression"),
        (_chain("a\udc80", "b"), "b", "block", "safetensors needs names in UTF-8"),
        (nn.Linear(32, 32), "", "block", "the model is a Linear itself"),
        (_renaming(), "", "block", r"a is in FP8, but state_dict\(\) has no a\.weight"),
        (_without_outputs(), "", "compressed-tensors", r"c\.weight \(0, 32\) has no elements to cast"),
        (
            _with_buffer("a", "weight_scale", torch.ones(3)),
            "",
            "compressed-tensors",
            r"'a\.weight_scale': .* to a scale",
        ),
        (_with_buffer("", "__metadata__", torch.ones(3)), "", "block", "safetensors uses this name itself"),
        (
            _with_buffer("", "c", torch.ones(3, dtype=torch.complex128)),
            "",
            "block",
            "safetensors has no torch.complex128",
        ),
        (_with_buffer("", "c", torch.ones(3, device="meta")), "", "block", "c is on the meta device"),
    ],
)
def test_what_files_and_readers_would_mistake_is_refused(net: nn.Module, high: str, format: str, why: str) -> None:
    _, manager, _ = trained(steps=0, model=net)
    if high:
        manager.set_precision(high, "high")
    with pytest.raises(ConfigurationError, match=why):
        fp8dist.exported(manager, format=format)


def test_names_with_any_other_letters(tmp_path: Path) -> None:
    net, manager, _ = trained(model=_chain("größe", "a b", "a/b", "c(d", "<b>", "\n", "x" * 3000))
    fp8dist.export(manager, tmp_path / "out")
    assert served(read(tmp_path / "out")) == as_bits(multiplied(net, batch(0, 9)[0]))


@pytest.mark.parametrize("shard_bytes", [1, 100_000, 10**9])
def test_a_folder_holds_the_stream(tmp_path: Path, shard_bytes: int) -> None:
    """Read with safetensors' own reader. A tensor that is larger than a file has one of its own."""
    _, manager, _ = trained()
    fp8dist.export(manager, tmp_path / "out", shard_bytes=shard_bytes)
    assert tensor_bits(read(tmp_path / "out")) == tensor_bits(_exported(manager))
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == {1: 16, 100_000: 5, 10**9: 1}[shard_bytes]
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"quantization_config": _config(manager)}


def test_config_json_has_the_models_own_config(tmp_path: Path) -> None:
    class Config:
        def to_dict(self) -> dict[str, Any]:
            return {"hidden_size": 32, "architectures": None, "quantization_config": "of before"}

    net, manager, _ = trained(steps=0)
    net.config = Config()
    fp8dist.export(manager, tmp_path / "out", net)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["hidden_size"], config["architectures"]) == (32, ["Mlp"])
    assert config["quantization_config"] == _config(manager)


def test_a_folder_that_exists_stays(tmp_path: Path) -> None:
    _, manager, _ = trained(steps=0)
    (tmp_path / "out").mkdir()
    fp8dist.export(manager, tmp_path / "out")  # Empty.
    before = sorted(path.name for path in (tmp_path / "out").iterdir())
    with pytest.raises(ConfigurationError, match="exists: export to a new folder"):
        fp8dist.export(manager, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == before


@pytest.mark.parametrize("path", ["", ".", "/", "a\0b", 3, None])
def test_paths_that_name_no_folder(path: Any) -> None:
    _, manager, _ = trained(steps=0)
    with pytest.raises(ConfigurationError, match="expected the name of a new folder, got"):
        fp8dist.export(manager, path)


def test_through_a_link_and_into_folders_that_are_made(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b")
    _, manager, _ = trained(steps=0)
    fp8dist.export(manager, os.fsencode(tmp_path / "link"))
    fp8dist.export(manager, tmp_path / "c")
    assert {path.name: path.read_bytes() for path in (tmp_path / "a" / "b").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "c").iterdir()
    }


def test_other_folders_called_partial_stay(tmp_path: Path) -> None:
    """Those of the user, and those of an export that runs now, if the folder exists."""
    _, manager, _ = trained(steps=0)
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "notes.json").touch()
    with pytest.raises(ConfigurationError, match=r"out\.partial exists and is not of an export: move it away"):
        fp8dist.export(manager, tmp_path / "out")
    (tmp_path / "out.partial" / "notes.json").rename(tmp_path / "out.partial" / "model-00001-of-00001.safetensors")
    (tmp_path / "out").touch()
    with pytest.raises(ConfigurationError, match="exists: export to a new folder"):
        fp8dist.export(manager, tmp_path / "out")
    assert len(list((tmp_path / "out.partial").iterdir())) == 1


def test_two_exports_to_one_folder_at_once(tmp_path: Path) -> None:
    """The second one removes what the first one has written, and the first one fails. No folder is of both."""
    _, manager, step = trained(steps=1)
    ones = [(tensor, value.clone()) for tensor, value in _listed(manager).stream()]
    step(2)
    twos = list(_listed(manager).stream())
    first, second = (export_files.Folder(tmp_path / "out", [one for one, _ in each], {}, 1) for each in (ones, twos))
    first.begin()
    first.write(*ones[0])
    second.begin()
    second.write(*twos[0])
    with pytest.raises(ConfigurationError, match=r"out\.partial was removed: does another export write to .*out\?"):
        first.write(*ones[1])
    first.close()
    for each in twos[1:]:
        second.write(*each)
    second.finish({}, lambda digests: b"{}")
    second.close()
    assert tensor_bits(read(tmp_path / "out")) == tensor_bits({tensor.name: value for tensor, value in twos})
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_a_config_that_is_not_json(tmp_path: Path) -> None:
    class Config:
        def to_dict(self) -> dict[str, Any]:
            return {"dtype": torch.float32}

    net, manager, _ = trained(steps=0)
    net.config = Config()
    with pytest.raises(ConfigurationError, match="the model's config cannot be written as JSON"):
        fp8dist.export(manager, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: Any) -> None:
        raise OSError(28, "No space left on device", "model-00001")

    _, manager, _ = trained(steps=0)
    monkeypatch.setattr(export_files, "_sync", full)
    with pytest.raises(ConfigurationError, match="model-00001 cannot be written: No space left on device"):
        fp8dist.export(manager, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
import fp8dist
from pathlib import Path
from fp8dist.files import export_files
from fp8dist.files.export import Export, export_of
from tests.files.test_export import trained

place, out = sys.argv[1:]
counted = [0]
def killed(function):
    def call(*args):
        counted[0] += 1
        if counted[0] == int(place):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)
    return call

_, manager, _ = trained()
export_files.Folder.write = killed(export_files.Folder.write)
export_files._sync = killed(export_files._sync)
export_files._sync_folder = killed(export_files._sync_folder)
fp8dist.export(manager, out, shard_bytes=100_000)
"""


@pytest.mark.long
def test_a_kill_leaves_no_folder_that_looks_whole(tmp_path: Path) -> None:
    """At each write and each fsync. The next export removes what was left. The last kill comes after the rename."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
    for place in (1, 9, 16, 23, 24, 25):  # 16 tensors, 5 files, index, config, certificate, and two folders.
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(place), str(tmp_path / "out")],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"out.partial"}
        assert not (place < 22 and (tmp_path / "out.partial" / "config.json").exists())
        assert (tmp_path / "out.partial" / "fp8dist-certificate.json").exists() is (place >= 24)
    _, manager, _ = trained()
    fp8dist.export(manager, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert tensor_bits(read(tmp_path / "out")) == tensor_bits(_exported(manager))
