"""``fp8dist verify``: exports, damaged in every way, against their checkpoint and their certificate."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import checkpoint as dcp

import fp8dist
from fp8dist.cli.exit_codes import CONSISTENT, DIVERGED, UNREADABLE, USAGE
from fp8dist.cli.main import main
from fp8dist.files.certificate import Certified, model_digest
from tests.support.serving import RECIPES, Config

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

CERTIFICATE, INDEX = "fp8dist-certificate.json", "model.safetensors.index.json"


class Net(nn.Module):
    """Linears in FP8, two of one shape; a tied embedding and head, and a norm, in high precision."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(48, 32)
        self.a, self.b, self.c = nn.Linear(32, 160), nn.Linear(160, 32), nn.Linear(32, 160)
        self.norm = nn.LayerNorm(160)
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.c(self.b(self.a(x))))


def _made(folder: Path, recipe: str = "delayed", format: str = "compressed-tensors", config: bool = True) -> Path:
    """Train a step; save a checkpoint, and export it inside the job."""
    torch.manual_seed(0)
    net = Net()
    if config:
        net.config = Config(model_type="net", hidden_size=32)  # type: ignore[assignment]
    manager = fp8dist.prepare(net, RECIPES[recipe], overrides={"head": "high"})
    manager.attach(net)
    net(torch.randn(8, 32)).square().mean().backward()
    manager.step()
    dcp.save({"model": net, "fp8": manager}, checkpoint_id=folder / "checkpoint")
    fp8dist.export(manager, folder / "served", net, format=format, shard_bytes=20_000, run="r1")
    return folder


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _made(tmp_path_factory.mktemp("exported"))


@pytest.fixture
def made(exported: Path, tmp_path: Path) -> Path:
    """Return a copy of the export that a test may damage."""
    shutil.copytree(exported / "served", tmp_path / "served")
    (tmp_path / "checkpoint").symlink_to(exported / "checkpoint")
    return tmp_path


Capture = pytest.CaptureFixture[str]
Change = Callable[[dict[str, Any]], Any]


def _verify(made: Path, *words: str) -> tuple[str, ...]:
    return ("verify", *words, str(made / "checkpoint"), str(made / "served"))


def _by_certificate(made: Path) -> tuple[str, ...]:
    return ("verify", "--certificate", str(made / "served" / CERTIFICATE), str(made / "served"))


def _says(capsys: Capture, code: int, words: Iterable[str]) -> str:
    """Run the command, assert its exit status, and return what it prints. An error is one line."""
    assert main(list(words)) == code
    out, err = capsys.readouterr()
    assert code in (CONSISTENT, DIVERGED) or (out, err.count("\n")) == ("", 1)
    assert "\x1b" not in out + err
    return out + err


def _findings(capsys: Capture, words: Iterable[str]) -> dict[str, dict[str, Any]]:
    return {f["name"]: f for f in json.loads(_says(capsys, DIVERGED, [*words, "--json"]))["findings"]}


def _file_of(made: Path, name: str) -> Path:
    served = made / "served"
    return served / json.loads((served / INDEX).read_text())["weight_map"][name]


def _edit(path: Path, change: Change) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata)


def _edit_json(path: Path, change: Change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _values(made: Path, name: str) -> torch.Tensor:
    return load_file(_file_of(made, name))[name]


def _set(made: Path, name: str, value: torch.Tensor) -> None:
    _edit(_file_of(made, name), lambda tensors: tensors.update({name: value}))


@pytest.mark.parametrize(
    ("recipe", "format", "config"),
    [
        ("current", "compressed-tensors", False),
        ("delayed", "compressed-tensors-channel", True),
        ("delayed", "block", False),
        ("block", "block", True),
    ],
)
def test_an_export_of_the_job_is_the_checkpoint(
    tmp_path: Path, capsys: Capture, recipe: str, format: str, config: bool
) -> None:
    """With the tied weight, which the checkpoint has twice and the export once. The format is that of the served
    tensors. Of other recipes: tests/files/test_export_experts.py."""
    made = _made(tmp_path, recipe, format, config)
    for words, reference in ((_verify(made), "checkpoint"), (_by_certificate(made), f"served/{CERTIFICATE}")):
        text = _says(capsys, CONSISTENT, words)
        assert text.startswith(f"{made / 'served'}: the same bytes as {made / reference}\n")
        count = len(json.loads((made / "served" / INDEX).read_text())["weight_map"])
        assert f"{count} tensors, 3 in FP8, after step 1\nmodel " in text
        assert ("only quantization_config is compared" in text) is not config


def test_one_file_without_an_index_and_links(made: Path) -> None:
    """Other programs write small models so. Caches of models link to their files."""
    tensors = {
        name: tensor for path in (made / "served").glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    for path in [*(made / "served").glob("*.safetensors"), made / "served" / INDEX]:
        path.unlink()
    save_file(tensors, made / "served" / "model.safetensors", {"format": "pt", "head.weight": "embedding.weight"})
    for path in (made / "served").iterdir():
        path.rename(made / path.name)
        path.symlink_to(made / path.name)
    assert main([*_verify(made)]) == main([*_by_certificate(made)]) == CONSISTENT


def test_without_a_certificate_the_files_say_what_is_tied(made: Path, capsys: Capture) -> None:
    """Tied tensors must have the same bytes, and one of them must be there."""
    (made / "served" / CERTIFICATE).unlink()
    _says(capsys, CONSISTENT, _verify(made))
    path = _file_of(made, "b.bias")
    tensors = {name: tensor for name, tensor in load_file(path).items() if name != "b.bias"}
    save_file(tensors, path, {"head.weight": "embedding.weight", "b.bias": "a.bias"})
    _edit_json(made / "served" / INDEX, lambda content: content["weight_map"].pop("b.bias"))
    found = _findings(capsys, _verify(made))
    assert {name: finding["detail"] for name, finding in found.items()} == {"b.bias": "is missing"}
    save_file(tensors, path, {"head.weight": "embedding.weight", "embedding.weight": "head.weight"})
    _edit(_file_of(made, "embedding.weight"), lambda tensors: tensors.pop("embedding.weight"))
    _edit_json(made / "served" / INDEX, lambda content: content["weight_map"].pop("embedding.weight"))
    assert _findings(capsys, _verify(made)).keys() == {"b.bias", "embedding.weight", "head.weight"}


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_one_flipped_bit(made: Path, capsys: Capture, bit: int) -> None:
    weight = _values(made, "a.weight")
    before = float(weight[2, 5])
    weight.view(torch.uint8)[2, 5] ^= 1 << bit
    _set(made, "a.weight", weight)
    (finding,) = _findings(capsys, _verify(made)).values()
    assert (finding["kind"], finding["name"], finding["index"]) == ("parameter", "a.weight", [2, 5])
    assert (finding["value"], finding["expected"]) == (float(weight[2, 5]), before)
    if bit < 7:
        assert finding["ulp"] == 1 << bit
    assert _findings(capsys, _by_certificate(made)).keys() == {"a.weight"}
    assert "'a.weight'" in _says(capsys, DIVERGED, _verify(made))


EXTRA = "extra\n\x1b[2J"


def _swap_scales(made: Path) -> None:
    a, c = (_values(made, f"{name}.weight_scale") for name in "ac")
    _set(made, "a.weight_scale", c)
    _set(made, "c.weight_scale", a)


def _change_names(made: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["d.weight"] = tensors.pop("a.weight")
        tensors[EXTRA] = tensors["d.weight"].clone().float()

    def renamed(content: dict[str, Any]) -> None:
        places = content["weight_map"]
        places["d.weight"] = places[EXTRA] = places.pop("a.weight")
        del places["norm.bias"]

    _edit(_file_of(made, "a.weight"), change)
    _edit(_file_of(made, "norm.bias"), lambda tensors: tensors.pop("norm.bias"))
    _edit_json(made / "served" / INDEX, renamed)


def _change_layouts(made: Path) -> None:
    _set(made, "a.weight", _values(made, "a.weight").reshape(32, 160))
    _set(made, "norm.bias", _values(made, "norm.bias").bfloat16())


def _change_index(made: Path) -> None:
    other = _file_of(made, "norm.bias").name
    _edit_json(made / "served" / INDEX, lambda content: content["weight_map"].update({"a.weight": other}))


def _change_config(made: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config |= {"hidden_size": 64, "rope": 1}
        del config["quantization_config"]["ignore"]
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] = "channel"

    _edit_json(made / "served" / "config.json", change)


DAMAGES: dict[str, tuple[Callable[[Path], object], dict[str, tuple[str, str]]]] = {
    "swapped scales": (_swap_scales, {
        f"{one}.weight_scale": ("parameter", f"1 of 1 elements differ; it has the bytes of '{other}.weight_scale'")
        for one, other in ("ac", "ca")
    }),
    "a weight of another module": (lambda made: _set(made, "a.weight", _values(made, "c.weight")),
                                   {"a.weight": ("parameter", "it has the bytes of 'c.weight'")}),
    "missing, extra and renamed": (_change_names, {
        "a.weight": ("layout", "is called 'd.weight'"),
        EXTRA: ("layout", "float32[160, 32] is served, and was not exported"),
        "norm.bias": ("layout", "is missing"),
    }),
    "layouts": (_change_layouts, {
        "a.weight": ("layout", "is float8_e4m3fn[32, 160], expected float8_e4m3fn[160, 32]"),
        "norm.bias": ("layout", "is bfloat16[160], expected float32[160]"),
    }),
    "an index that names another file": (_change_index, {"a.weight": ("file", f", and {INDEX} says 'model-0")}),
    "a shard that no index names": (
        lambda made: save_file({"x": torch.zeros(1)}, made / "served" / "model-00009.safetensors"),
        {"model-00009.safetensors": ("file", "")},
    ),
    "config": (_change_config, {
        "hidden_size": ("config", "config.json has 64, expected 32"),
        "rope": ("config", "config.json has 1, expected nothing"),
        "quantization_config.ignore": ("config", 'config.json has nothing, expected ["embedding", "head"]'),
        "quantization_config.config_groups.group_0.weights.strategy":
            ("config", 'config.json has "channel", expected "tensor"'),
    }),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_found_by_the_checkpoint_and_by_the_certificate(made: Path, capsys: Capture, kind: str) -> None:
    damage, expected = DAMAGES[kind]
    damage(made)
    found, again = _findings(capsys, _verify(made)), _findings(capsys, _by_certificate(made))
    assert found.keys() == expected.keys()
    assert {f["name"]: f["kind"] for f in again.values()} == {f["name"]: f["kind"] for f in found.values()}
    for name, (of_kind, detail) in expected.items():
        assert found[name]["kind"] == of_kind
        assert detail in found[name]["detail"]
    _says(capsys, DIVERGED, _verify(made))


def test_a_missing_shard(made: Path, capsys: Capture) -> None:
    shard = _file_of(made, "b.weight")
    lost = set(load_file(shard))
    shard.unlink()
    findings = _findings(capsys, _verify(made))
    assert findings.keys() == {shard.name, *lost} == _findings(capsys, _by_certificate(made)).keys()
    assert findings[shard.name]["detail"] == f"is missing, with {len(lost)} tensors"
    assert findings["b.weight"]["detail"] == "is missing"


def test_half_the_scale_and_twice_the_bytes_are_the_same_values(tmp_path: Path, capsys: Capture) -> None:
    """By the checkpoint, and by exported files beside a certificate; a certificate in the changed folder has none."""
    made = _made(tmp_path, "delayed 2^n")
    shutil.copytree(made / "served", made / "kept")
    for name, factor in (("a.weight", 2.0), ("a.weight_scale", 0.5)):
        value = _values(made, name)
        _set(made, name, (value.float() * factor).to(value.dtype))
    kept = ("verify", "--certificate", str(made / "kept"), str(made / "served"))
    for words in (_verify(made), kept):
        text = _says(capsys, CONSISTENT, words)
        assert text.startswith(f"{made / 'served'}: the same values as ")
        assert text.splitlines()[-1].startswith("note: other bytes and scales, but the same values: a.weight")
    assert json.loads(_says(capsys, CONSISTENT, [*_verify(made), "--json"]))["rescaled"] == ["a.weight"]
    assert "how values differ is not known" in _says(capsys, DIVERGED, _by_certificate(made))


def test_another_checkpoint_config_and_format(made: Path, tmp_path: Path, capsys: Capture) -> None:
    (made / "own.json").write_text('{"model_type": "net", "hidden_size": 16}')
    assert "'hidden_size'" in _says(capsys, DIVERGED, _verify(made, "--config", str(made / "own.json")))
    current, block = _made(tmp_path / "current", "current"), _made(tmp_path / "block", "block", "block")
    served = str(made / "served")
    findings = _findings(capsys, ["verify", str(current / "checkpoint"), served])
    assert findings[CERTIFICATE]["kind"] == "certificate"
    assert findings["a.input_scale"]["detail"] == "float32[1] is served, and was not exported"
    _says(capsys, DIVERGED, ["verify", str(current / "checkpoint"), served, "--format", "block"])
    words = ["verify", str(block / "checkpoint"), served]
    (finding,) = _findings(capsys, words).values()
    assert finding["detail"].startswith("is compressed-tensors, but the checkpoint has no such export: b: BlockScaling")
    _says(capsys, USAGE, [*words, "--format", "compressed-tensors"])


def _resealed(path: Path, change: Change) -> None:
    """Change a certificate, and give it a digest that fits."""
    content = json.loads(path.read_text())
    change(content)
    content["digest"] = "0" * 64
    text = json.dumps(content)[:-1] + "\n}\n"
    path.write_text(text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest()))


def test_a_certificate_that_was_changed(made: Path, capsys: Capture) -> None:
    path = made / "served" / CERTIFICATE
    original = path.read_text()
    for dtype in ("F32", "\x1b[2J"):

        def change(content: dict[str, Any]) -> None:
            for tensor in content["tensors"]:
                tensor["dtype"] = dtype if tensor["name"] == "a.weight" else tensor["dtype"]  # noqa: B023
            content["model"] = model_digest(Certified(*map(t.get, Certified._fields)) for t in content["tensors"])

        _resealed(path, change)
        assert "'a.weight'" in _says(capsys, DIVERGED, _by_certificate(made))
        path.write_text(original)
    _resealed(path, lambda content: content.update(step=7))
    (finding,) = _findings(capsys, _verify(made)).values()
    assert "after step 7, expected " in finding["detail"]
    path.write_text(original.replace('"run": "r1"', '"run": "r2"'))
    text = _says(capsys, UNREADABLE, _by_certificate(made))
    assert "was changed after it was written: its digest does not match" in text
    path.write_text(original)
    empty = {"tensors": [], "tied": {}, "model": hashlib.sha256(b"fp8dist model 1\n").hexdigest()}
    _resealed(path, lambda content: content.update(empty))
    for shard in (made / "served").glob("*.safetensors"):
        shard.unlink()
    (made / "served" / INDEX).write_text('{"weight_map": {}}')
    assert "nothing to compare" in _says(capsys, USAGE, _by_certificate(made))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda c: c.update(version=2), "has version 2, this library reads version 1 only"),
        (lambda c: c.update(format="x"), "is not a certificate of an export"),
        (lambda c: c["tensors"].pop(), "contradicts itself: the digest of the model is not that of its tensors"),
        (lambda c: c["tensors"].append(c["tensors"][0]), "contradicts itself"),
        (lambda c: c["tensors"][0].update(shape=[-1]), "has a malformed tensor"),
        (lambda c: c["tensors"][0].update(sha256="x"), "has a malformed tensor"),
        (lambda c: c.update(tensors={}), "has a malformed field 'tensors'"),
        (lambda c: c.update(step="\x1b[2J"), "has a malformed field 'step'"),
    ],
)
def test_a_certificate_that_contradicts_itself(made: Path, capsys: Capture, change: Change, text: str) -> None:
    path = made / "served" / CERTIFICATE
    _resealed(path, change)
    assert f"{path}: {text}" in _says(capsys, UNREADABLE, _by_certificate(made))
    assert "'fp8dist-certificate.json'" in _says(capsys, DIVERGED, _verify(made))


def _framed(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def _index(name: str) -> str:
    return json.dumps({"weight_map": {"w": name}})


ENTRY = '"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "above": ({INDEX: _index("../x.safetensors")}, "names '../x.safetensors', expected a .safetensors file"),
    "absolute": ({INDEX: _index("/x.safetensors")}, "names '/x.safetensors'"),
    "number": ({INDEX: '{"weight_map": {"w": 1}}'}, "names 1, expected"),
    "list": ({INDEX: '{"weight_map": []}'}, "has no weight_map"),
    "twice": ({INDEX: '{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}'}, "has w twice"),
    "deep": ({INDEX: "[" * 100_000}, "cannot be read: RecursionError"),
    "no object": ({"config.json": "[]"}, "is not a JSON object"),
    "no config": ({"config.json": None}, "No such file"),
    "config twice": ({"config.json": '{"a\\n": 1, "a\\n": 2}'}, "twice"),
    "header twice": ({"m.safetensors": _framed(f"{{{ENTRY}, {ENTRY}}}".encode(), bytes(4))}, "has w twice"),
    "huge header": ({"m.safetensors": (1 << 62).to_bytes(8, "little")}, "has a header of 4611686018427387904 bytes"),
    "long header": ({"m.safetensors": (1 << 20).to_bytes(8, "little")}, "is truncated or damaged"),
    "short": ({"m.safetensors": b"\0"}, "is truncated or damaged"),
    "truncated": ({"m.safetensors": _framed(f"{{{ENTRY}}}".encode())}, "m.safetensors: cannot be read"),
    "hole": ({"m.safetensors": _framed(f"{{{ENTRY}}}".encode(), bytes(8))}, "m.safetensors: cannot be read"),
    "huge shape": (
        {"m.safetensors": _framed(ENTRY.join("{}").replace("[1]", f"[{1 << 62}, {1 << 62}]").encode(), bytes(4))},
        "m.safetensors: cannot be read",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_folders(made: Path, tmp_path: Path, capsys: Capture, kind: str) -> None:
    folder = tmp_path / "hostile"
    folder.mkdir()
    files, text = HOSTILE[kind]
    plain = {"config.json": "{}", INDEX: _index("m.safetensors"), "m.safetensors": _framed(b"{}")}
    for name, content in {**plain, **files}.items():
        if content is not None:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    error = _says(capsys, UNREADABLE, ["verify", str(made / "checkpoint"), str(folder)])
    assert text in error
    assert str(folder) in error


def test_files_that_cannot_be_read(made: Path, capsys: Capture) -> None:
    path, config = _file_of(made, "b.weight"), made / "served" / "config.json"
    content = path.read_bytes()
    for target in ("nowhere", path):
        path.unlink()
        path.symlink_to(target)
        assert str(path) in _says(capsys, UNREADABLE, _by_certificate(made))
    path.unlink()
    path.write_bytes(content)
    config.write_bytes(config.read_text().encode("utf-16"))  # Servers read UTF-8.
    assert "config.json: cannot be read: UnicodeDecodeError" in _says(capsys, UNREADABLE, _by_certificate(made))
    config.unlink()
    os.mkfifo(config)
    assert "is a pipe, expected a file" in _says(capsys, UNREADABLE, _verify(made))


def test_wrong_usage(capsys: Capture) -> None:
    for words in (["x"], ["x", "y", "z"], ["--certificate", "c", "x", "y"]):
        text = _says(capsys, USAGE, ["verify", *words])
        assert "expected CHECKPOINT and SERVED_DIR, or --certificate FILE and SERVED_DIR" in text


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before
