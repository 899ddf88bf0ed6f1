"""Export on one process: an eval forward's own bytes and scales; formats, refusals, whole folders or none."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable
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
from fp8dist_kernels.formats import E5M2
from tests.support import forked
from tests.support.serving import NATIVE, RECIPES, Config, as_bits, exported, multiplied, read, served, tensor_bits
from tests.support.sharded import wide
from tests.support.suite import crossed, few
from tests.support.training import batch, bits, state_bits


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


def assert_served(manager: Any, net: nn.Module, format: str = "compressed-tensors") -> dict[str, Tensor]:
    """Assert that an eval forward multiplies with the exported bytes and scales. Return the exported tensors."""
    tensors = exported(manager, format=format)
    assert served(tensors) == as_bits(multiplied(net, batch(0, 9)[0]))
    return tensors


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("steps", [0, 3])
def test_an_eval_forward_multiplies_with_the_exported_bytes_and_scales(recipe: str, steps: int) -> None:
    """Also before the first step, where slots of inputs are cold. Input scales are those of the delayed slots."""
    net, manager, _ = trained(recipe, steps)
    tensors = assert_served(manager, net, NATIVE[recipe])
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith("input_scale")}
    assert len(scales) == (4 if recipe.startswith("delayed") and steps else 0)
    for name, scale in scales.items():
        assert bits(scale) == bits(1 / manager.slot(name.removesuffix(".input_scale"), "input").scale.reshape(1))
    assert {name for name in tensors if name.endswith("bias")} == {f"layers.{i}.bias" for i in range(4)}
    assert all(bits(tensors[name]) == bits(value) for name, value in net.state_dict().items() if name.endswith("bias"))
    with torch.no_grad():
        net.layers[0].weight[0, 0], net.layers[1].weight[0, 0] = torch.nan, torch.inf
    assert_served(manager, net, NATIVE[recipe])


@pytest.mark.parametrize(
    ("format", "name", "shape"),
    [
        ("compressed-tensors", "weight_scale", (1,)),
        ("compressed-tensors-channel", "weight_scale", (512, 1)),
        ("block", "weight_scale_inv", (4, 2)),
    ],
)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_a_scale_for_the_whole_tensor_is_exact_in_each_format(
    recipe: str, format: str, name: str, shape: tuple[int, ...]
) -> None:
    net, manager, _ = trained(recipe)
    assert assert_served(manager, net, format)[f"layers.1.{name}"].shape == shape


@crossed(write=[".data", "mul_", "load_state_dict"], factor=[1.02, 1.2, 1.9, 2.5], swapped=[False, True])
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
        tensors = assert_served(manager, net)
    for name, rows in ((name, rows) for name, rows in tensors.items() if rows.dtype == torch.float8_e4m3fn):
        weight, value = grown[name], rows.float() * tensors[f"{name}_scale"]
        # Half a step of E4M3 at the top. Of uniform weights, those from 432 to 464 are there.
        assert float((value - weight).abs().max() / weight.abs().max()) < 0.0358, name
        assert float((rows.float().abs() == 448).float().mean()) < 0.08, name


def test_a_dequantised_export_is_exported_without_a_loss_with_powers_of_two() -> None:
    """Scales of powers of two are also what is left of them if a server rounds scales up to E8M0."""
    _net, manager, _ = trained("delayed 2^n")
    first = exported(manager)
    values = {n: t.float() * first[f"{n}_scale"] for n, t in first.items() if t.dtype == torch.float8_e4m3fn}
    for name in values:
        scale = first[f"{name}_scale"]
        assert bits(scale.to(torch.float8_e8m0fnu).float()) == bits(scale)
    other, again, _ = trained("delayed 2^n", steps=0)
    other.load_state_dict({**other.state_dict(), **values})
    again.refresh_weights()
    second = exported(again)
    assert all(bits(second[n].float() * second[f"{n}_scale"]) == bits(value) for n, value in values.items())


def test_an_export_changes_nothing() -> None:
    plain, manager, step = trained(steps=2)
    losses = [step(i) for i in range(2, 5)]
    expected = state_bits(manager), [bits(p) for p in plain.parameters()]
    other, manager, step = trained(steps=2)
    exported(manager)
    state = state_bits(manager)
    exported(manager, format="block")
    assert state_bits(manager) == state
    assert [step(i) for i in range(2, 5)] == losses
    assert (state_bits(manager), [bits(p) for p in other.parameters()]) == expected


def test_modules_in_high_precision_are_exported_as_they_are() -> None:
    net, manager, _ = trained(overrides={"layers.3": "high"})
    manager.set_precision("layers.0", "high", gemms=("fprop",))
    manager.set_precision("layers.2", "high", gemms=("wgrad",))
    tensors = exported(manager)
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


@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "block"])
def test_the_default_dtype_and_device_do_not_matter(recipe: str) -> None:
    _, manager, _ = trained(recipe, 0)
    expected = tensor_bits(exported(manager, format=NATIVE[recipe]))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found = exported(manager, format=NATIVE[recipe])
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


def _chain(*names: str) -> nn.Module:
    net = nn.Sequential()
    for name in names:
        net.add_module(name, nn.Linear(32, 32))
    return net


def test_names_with_any_letters(tmp_path: Path) -> None:
    """In compressed-tensors, an ignored name may also be the end of another."""
    net, manager, _ = trained(model=_chain("größe", "a b", "a/b", "c(d", "<b>", "\n", "x" * 3000, "proj", "q_proj"))
    fp8dist.export(manager, tmp_path / "out")
    assert served(read(tmp_path / "out")) == as_bits(multiplied(net, batch(0, 9)[0]))
    manager.set_precision("proj", "high")
    assert {"q_proj", "proj"} & served(exported(manager)).keys() == {"q_proj"}


def _renaming() -> nn.Module:
    net = _chain("a", "b")
    net._register_state_dict_hook(lambda module, state, *_: state.update({"c.weight": state.pop("a.weight")}))
    return net


def _with_buffer(module: str, name: str, value: Tensor) -> nn.Module:
    net = _chain("a", "b")
    net.get_submodule(module).register_buffer(name, value)
    return net


def _computed() -> Any:
    made = trained(steps=0)
    torch.nn.utils.parametrizations.weight_norm(made[0].layers[1])
    return made


def _in_e5m2() -> Any:
    made = trained(steps=0)
    made[0].layers[1].fp8_slots.states(torch.device("cpu"))[1].format = E5M2
    return made


def _ready(recipe: str = "delayed", high: str = "", **options: Any) -> Any:
    """Return a model and its manager before the first step. ``high``: modules that are then in high precision."""
    made = trained(recipe, 0, **options)
    if high:
        made[1].set_precision(high, "high")
    return made


FINER = r"layers\.\d: \w+ has one scale for each .* fit: "
COMPLEX, META = torch.ones(3, dtype=torch.complex128), torch.ones(3, device="meta")
ROWWISE = {"layers.1": fp8dist.RowwiseScaling()}


@pytest.mark.parametrize(
    ("made", "format", "why"),
    [
        (lambda: _ready("rowwise"), "block", f"{FINER}compressed-tensors, compressed-tensors-channel$"),
        (lambda: _ready("block"), "compressed-tensors", f"{FINER}block$"),
        (lambda: _ready("block"), "compressed-tensors-channel", f"{FINER}block$"),
        (lambda: _ready("block", overrides=ROWWISE), "block", "no format fits"),
        (lambda: _ready(model=Tied(embedded=True), skip="!second"), "compressed-tensors",
         "second is in FP8 and shares its weight with embedding"),
        (lambda: _ready(eval_precision="high"), "block", 'nothing to export in FP8.*eval_precision="high"'),
        (lambda: _ready(enabled=False), "block", "nothing to export in FP8.*enabled=False"),
        (lambda: _ready(high="*"), "block", "every module is in high precision"),
        (_in_e5m2, "compressed-tensors", r"layers\.1: its weight is cast to e5m2, and servers read e4m3 only"),
        (_computed, "block", r"layers\.1: its weight is computed by a parametrization"),
        # Transformers ignores every module whose name ends with an ignored name.
        (lambda: _ready(model=_chain("proj", "q_proj"), high="proj"), "block", "q_proj is in FP8 and proj is not"),
        # What files and readers would mistake.
        (lambda: _ready(model=_chain("a(b", "b"), high="a(b"), "block",
         r"names of ignored modules as regular expressions, and 'a\(b' is none"),
        (lambda: _ready(model=_chain("Linear", "b"), high="Linear"), "compressed-tensors",
         "takes the name of module 'Linear' for a class"),
        (lambda: _ready(model=_chain("re:x", "b"), high="b"), "compressed-tensors",
         "takes the name of module 're:x' for a regular expression"),
        (lambda: _ready(model=_chain("a\udc80", "b"), high="b"), "block", "safetensors needs names in UTF-8"),
        (lambda: _ready(model=nn.Linear(32, 32)), "block", "the model is a Linear itself"),
        (lambda: _ready(model=_renaming()), "block", r"a is in FP8, but state_dict\(\) has no a\.weight"),
        (lambda: _ready(model=_with_buffer("a", "weight_scale", torch.ones(3))), "compressed-tensors",
         r"'a\.weight_scale': .* to a scale"),
        (lambda: _ready(model=_with_buffer("", "__metadata__", torch.ones(3))), "block",
         "safetensors uses this name itself"),
        (lambda: _ready(model=_with_buffer("", "c", COMPLEX)), "block", "safetensors has no torch.complex128"),
        (lambda: _ready(model=_with_buffer("", "c", META)), "block", "c is on the meta device"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_exported_is_refused(made: Callable[[], Any], format: str, why: str) -> None:
    _net, manager, _ = made()
    with pytest.raises(ConfigurationError, match=why):
        fp8dist.exported(manager, format=format)


@pytest.mark.parametrize("shard_bytes", [1, 100_000, 10**9])
def test_a_folder_holds_the_stream(tmp_path: Path, shard_bytes: int) -> None:
    """Read with safetensors' own reader. A tensor that is larger than a file has one of its own."""
    _, manager, _ = trained()
    fp8dist.export(manager, tmp_path / "out", shard_bytes=shard_bytes)
    assert tensor_bits(read(tmp_path / "out")) == tensor_bits(exported(manager))
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == {1: 16, 100_000: 5, 10**9: 1}[shard_bytes]
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"quantization_config": _config(manager)}


def test_config_json_has_the_models_own_config(tmp_path: Path) -> None:
    net, manager, _ = trained(steps=0)
    net.config = Config(hidden_size=32, architectures=None, quantization_config="of before")
    fp8dist.export(manager, tmp_path / "out", net)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["hidden_size"], config["architectures"]) == (32, ["Mlp"])
    assert config["quantization_config"] == _config(manager)
    net.config = Config(dtype=torch.float32)
    with pytest.raises(ConfigurationError, match="the model's config cannot be written as JSON"):
        fp8dist.export(manager, tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_folders_that_are_there_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the user, and those of an export that runs now, if the folder exists."""
    _, manager, _ = trained(steps=0)
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    partial.mkdir()
    (partial / "notes.json").touch()
    with pytest.raises(ConfigurationError, match=r"out\.partial exists and is not of an export: move it away"):
        fp8dist.export(manager, out)
    (partial / "notes.json").rename(partial / "model-00001-of-00001.safetensors")
    out.touch()
    with pytest.raises(ConfigurationError, match="exists: export to a new folder"):
        fp8dist.export(manager, out)
    assert len(list(partial.iterdir())) == 1
    out.unlink()
    (tmp_path / "link").symlink_to(out)
    (tmp_path / "a" / "b").mkdir(parents=True)  # Empty.
    left = tmp_path / f"out.partial.{os.getpid()}"  # By a process of this id that was killed.
    left.mkdir()
    (left / "model-00001-of-00001.safetensors").touch()
    fp8dist.export(manager, os.fsencode(tmp_path / "link"))
    fp8dist.export(manager, tmp_path / "a" / "b")
    written = [{path.name: path.read_bytes() for path in each.iterdir()} for each in (out, tmp_path / "a" / "b")]
    assert written[0] == written[1]
    with pytest.raises(ConfigurationError, match="exists: export to a new folder"):
        fp8dist.export(manager, out)
    for path in ("", ".", "/", "a\0b", 3, None):
        with pytest.raises(ConfigurationError, match="expected the name of a new folder, got"):
            fp8dist.export(manager, path)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"shard_bytes.* a number of bytes"):
        fp8dist.export(manager, tmp_path / "none", shard_bytes=0)

    def full(file: Any) -> None:
        raise OSError(28, "No space left on device", "model-00001")

    monkeypatch.setattr(export_files, "_sync", full)
    with pytest.raises(ConfigurationError, match="model-00001 cannot be written: No space left on device"):
        fp8dist.export(manager, tmp_path / "full")
    monkeypatch.undo()
    monkeypatch.setattr(export_files.Folder, "_created", lambda self, name: open("/dev/full", "wb"))  # noqa: SIM115
    with pytest.raises(ConfigurationError, match="the export cannot be written: No space left on device"):
        fp8dist.export(manager, tmp_path / "full")  # Its files fail again when they are closed.
    assert {path.name for path in tmp_path.iterdir()} == {"a", "link", "out"}


def test_two_exports_to_one_folder_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one removes what the first one has written, and the first one fails, also if it writes meanwhile. No
    folder is of both, or of a part of one."""
    _, manager, step = trained(steps=1)
    ones = [(tensor, value.clone()) for tensor, value in _listed(manager).stream()]
    step(2)
    twos = list(_listed(manager).stream())
    first, second = (export_files.Folder(tmp_path / "out", [one for one, _ in each], {}, 1) for each in (ones, twos))
    first.begin()
    first.write(*ones[0])
    remove = shutil.rmtree

    def removed(folder: Path, **options: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"out\.partial was removed: does another export write to .*out\?"):
            first.write(*ones[1])
        remove(folder, **options)

    monkeypatch.setattr(export_files.shutil, "rmtree", removed)
    second.begin()
    monkeypatch.undo()
    second.write(*twos[0])
    first.close()
    for each in twos[1:]:
        second.write(*each)
    second.finish({}, lambda digests: b"{}")
    second.close()
    assert tensor_bits(read(tmp_path / "out")) == tensor_bits({tensor.name: value for tensor, value in twos})
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def _killed(words: list[str]) -> int:
    """Export, and kill this process at the n-th write or fsync."""
    place, out = words
    calls = itertools.count(1)

    def kills(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if next(calls) == int(place):
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments)

        return call

    export_files.Folder.write = kills(export_files.Folder.write)  # type: ignore[method-assign]
    for name in ("_sync", "_sync_folder"):
        setattr(export_files, name, kills(getattr(export_files, name)))
    _, manager, _ = trained()
    fp8dist.export(manager, out, shard_bytes=100_000)
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("places", few([[1, 23, 24, 25], [9, 16]], [1, 23, 24, 25]))
def test_a_kill_leaves_no_folder_that_looks_whole(places: list[int], tmp_path: Path) -> None:
    """At each write and each fsync. The next export removes what was left. The last kill comes after the rename."""
    for place in places:  # 16 tensors, 5 files, index, config, certificate, and two folders.
        done = forked.run([str(place), str(tmp_path / "out")], None, {}, main=_killed)
        assert done.returncode == -signal.SIGKILL, done.stderr
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"out.partial"}
        assert not (place < 22 and (tmp_path / "out.partial" / "config.json").exists())
        assert (tmp_path / "out.partial" / "fp8dist-certificate.json").exists() is (place >= 24)
    _, manager, _ = trained()
    fp8dist.export(manager, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    assert tensor_bits(read(tmp_path / "out")) == tensor_bits(exported(manager))
