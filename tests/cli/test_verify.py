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
from tests.support.serving import RECIPES

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


class Config:
    """Stands for a config of Transformers."""

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": "net", "hidden_size": 32}


def _made(folder: Path, recipe: str = "delayed", format: str = "compressed-tensors", config: bool = True) -> Path:
    """Train a step; save a checkpoint, and export it inside the job."""
    torch.manual_seed(0)
    net = Net()
    if config:
        net.config = Config()  # type: ignore[assignment]
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


def _verify(made: Path, *words: str) -> tuple[str, ...]:
    return ("verify", *words, str(made / "checkpoint"), str(made / "served"))


def _by_certificate(made: Path) -> tuple[str, ...]:
    return ("verify", "--certificate", str(made / "served" / CERTIFICATE), str(made / "served"))


def _says(capsys: pytest.CaptureFixture[str], code: int, words: Iterable[str]) -> str:
    """Run the command, assert its exit status, and return what it prints."""
    assert main(list(words)) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


def _findings(made: Path, capsys: pytest.CaptureFixture[str], code: int = DIVERGED) -> dict[str, dict[str, Any]]:
    """Return the findings by name, after a comparison with the checkpoint. The certificate finds the same names."""
    assert main([*_verify(made), "--json"]) == code
    found = json.loads(capsys.readouterr().out)["findings"]
    assert main([*_by_certificate(made), "--json"]) == code
    again = json.loads(capsys.readouterr().out)["findings"]
    assert {(f["kind"], f["name"]) for f in again} == {(f["kind"], f["name"]) for f in found}
    return {f["name"]: f for f in found}


def _file_of(made: Path, name: str) -> Path:
    served = made / "served"
    return served / json.loads((served / INDEX).read_text())["weight_map"][name]


def _edit(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata)


def _edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("recipe", "format"),
    [
        *((recipe, "compressed-tensors") for recipe in ("delayed", "current", "rowwise")),
        ("delayed", "compressed-tensors-channel"),
        *((recipe, "block") for recipe in ("delayed", "block")),
    ],
)
@pytest.mark.parametrize("config", [False, True])
def test_an_export_of_the_job_is_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str, format: str, config: bool
) -> None:
    """With the tied weight, which the checkpoint has twice and the export once. The format is that of the served
    tensors."""
    made = _made(tmp_path, recipe, format, config)
    for words, reference in ((_verify(made), "checkpoint"), (_by_certificate(made), f"served/{CERTIFICATE}")):
        assert main(list(words)) == CONSISTENT
        text = capsys.readouterr().out
        assert text.startswith(f"{made / 'served'}: the same bytes as {made / reference}\n")
        count = len(json.loads((made / "served" / INDEX).read_text())["weight_map"])
        assert f"{count} tensors, 3 in FP8, after step 1\nmodel " in text
        assert ("only quantization_config is compared" in text) is not config


def test_one_file_without_an_index(made: Path) -> None:
    """Other programs write small models so."""
    tensors = {
        name: tensor for path in (made / "served").glob("*.safetensors") for name, tensor in load_file(path).items()
    }
    for path in [*(made / "served").glob("*.safetensors"), made / "served" / INDEX]:
        path.unlink()
    save_file(tensors, made / "served" / "model.safetensors", {"format": "pt", "head.weight": "embedding.weight"})
    assert main([*_verify(made)]) == CONSISTENT
    assert main([*_by_certificate(made)]) == CONSISTENT


def test_without_a_certificate_the_files_say_what_is_tied(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tied tensors must have the same bytes, and one of them must be there."""
    (made / "served" / CERTIFICATE).unlink()
    assert main([*_verify(made)]) == CONSISTENT
    capsys.readouterr()
    path = _file_of(made, "b.bias")
    tensors = {name: tensor for name, tensor in load_file(path).items() if name != "b.bias"}
    save_file(tensors, path, {"head.weight": "embedding.weight", "b.bias": "a.bias"})
    _edit_json(made / "served" / INDEX, lambda content: content["weight_map"].pop("b.bias"))
    assert main([*_verify(made), "--json"]) == DIVERGED
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["name"], finding["detail"]) == ("b.bias", "is missing")
    save_file(tensors, path, {"head.weight": "embedding.weight", "embedding.weight": "head.weight"})
    _edit(_file_of(made, "embedding.weight"), lambda tensors: tensors.pop("embedding.weight"))
    _edit_json(made / "served" / INDEX, lambda content: content["weight_map"].pop("embedding.weight"))
    assert main([*_verify(made), "--json"]) == DIVERGED
    names = {finding["name"] for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert names == {"b.bias", "embedding.weight", "head.weight"}


def test_links_are_followed(made: Path) -> None:
    """Caches of models link to their files."""
    for path in (made / "served").iterdir():
        path.rename(made / path.name)
        path.symlink_to(made / path.name)
    assert main([*_verify(made)]) == CONSISTENT


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_one_flipped_bit(made: Path, capsys: pytest.CaptureFixture[str], bit: int) -> None:
    before = float(load_file(_file_of(made, "a.weight"))["a.weight"].float()[2, 5])

    def flip(tensors: dict[str, torch.Tensor]) -> None:
        tensors["a.weight"].view(torch.uint8)[2, 5] ^= 1 << bit

    _edit(_file_of(made, "a.weight"), flip)
    after = float(load_file(_file_of(made, "a.weight"))["a.weight"].float()[2, 5])
    (finding,) = _findings(made, capsys).values()
    assert (finding["kind"], finding["name"], finding["index"]) == ("parameter", "a.weight", [2, 5])
    assert (finding["value"], finding["expected"]) == (after, before)
    if bit < 7:
        assert finding["ulp"] == 1 << bit
    assert "'a.weight'" in _says(capsys, DIVERGED, _verify(made))


def test_a_swapped_scale(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["a.weight_scale", "c.weight_scale"]
    old = [load_file(_file_of(made, name))[name].clone() for name in names]
    for name, value in zip(names, reversed(old)):
        _edit(_file_of(made, name), lambda tensors: tensors[name].copy_(value))  # noqa: B023
    findings = _findings(made, capsys)
    assert findings.keys() == set(names)
    assert findings[names[0]]["detail"] == f"1 of 1 elements differ; it has the bytes of '{names[1]}'"
    assert findings[names[0]]["value"] == float(old[1])
    assert f"it has the bytes of '{names[1]}'" in _says(capsys, DIVERGED, _by_certificate(made))


def test_half_the_scale_and_twice_the_bytes_are_the_same_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the checkpoint, and by exported files beside a certificate; a certificate in the changed folder has none."""
    made = _made(tmp_path, "delayed 2^n")
    shutil.copytree(made / "served", made / "kept")
    for name, factor in (("a.weight", 2.0), ("a.weight_scale", 0.5)):
        _edit(_file_of(made, name), lambda t: t.update({name: (t[name].float() * factor).to(t[name].dtype)}))  # noqa: B023
    kept = ("verify", "--certificate", str(made / "kept"), str(made / "served"))
    for words in (_verify(made), kept):
        assert main(list(words)) == CONSISTENT
        text = capsys.readouterr().out
        assert text.startswith(f"{made / 'served'}: the same values as ")
        assert text.splitlines()[-1].startswith("note: other bytes and scales, but the same values: a.weight")
    assert main([*_verify(made), "--json"]) == CONSISTENT
    assert json.loads(capsys.readouterr().out)["rescaled"] == ["a.weight"]
    assert "how values differ is not known" in _says(capsys, DIVERGED, _by_certificate(made))


def test_swapped_weights_of_one_shape(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = {name: load_file(_file_of(made, name))[name].clone() for name in ("a.weight", "c.weight")}
    _edit(_file_of(made, "a.weight"), lambda tensors: tensors.update({"a.weight": old["c.weight"]}))
    (finding,) = _findings(made, capsys).values()
    assert finding["detail"].endswith("it has the bytes of 'c.weight'")


def test_a_missing_shard(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = _file_of(made, "b.weight")
    lost = set(load_file(shard))
    shard.unlink()
    findings = _findings(made, capsys)
    assert findings.keys() == {shard.name, *lost}
    assert findings[shard.name]["detail"] == f"is missing, with {len(lost)} tensors"
    assert findings["b.weight"]["detail"] == "is missing"


def test_a_shard_that_no_index_names(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"x": torch.zeros(1)}, made / "served" / "model-00009.safetensors")
    assert _findings(made, capsys)["model-00009.safetensors"]["kind"] == "file"


def test_missing_extra_and_renamed_tensors(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["d.weight"] = tensors.pop("a.weight")
        tensors["extra\n\x1b[2J"] = tensors["d.weight"].clone().float()

    path = _file_of(made, "a.weight")
    _edit(path, change)

    def renamed(content: dict[str, Any]) -> None:
        places = content["weight_map"]
        places["d.weight"] = places["extra\n\x1b[2J"] = places.pop("a.weight")
        del places["norm.bias"]

    norm = _file_of(made, "norm.bias")
    _edit(norm, lambda tensors: tensors.pop("norm.bias"))
    _edit_json(made / "served" / INDEX, renamed)
    findings = _findings(made, capsys)
    assert findings["a.weight"]["detail"] == "is called 'd.weight'"
    assert findings["extra\n\x1b[2J"]["detail"] == "float32[160, 32] is served, and was not exported"
    assert findings["norm.bias"]["detail"] == "is missing"
    assert len(findings) == 3
    assert main([*_verify(made)]) == DIVERGED
    assert "\x1b" not in capsys.readouterr().out


def test_another_shape_and_dtype(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _edit(_file_of(made, "a.weight"), lambda t: t.update({"a.weight": t["a.weight"].reshape(32, 160)}))
    _edit(_file_of(made, "norm.bias"), lambda t: t.update({"norm.bias": t["norm.bias"].bfloat16()}))
    findings = _findings(made, capsys)
    assert findings["a.weight"]["detail"] == "is float8_e4m3fn[32, 160], expected float8_e4m3fn[160, 32]"
    assert findings["norm.bias"]["detail"] == "is bfloat16[160], expected float32[160]"


def test_an_index_that_names_another_file(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = _file_of(made, "norm.bias").name
    real = _file_of(made, "a.weight").name
    assert other != real
    _edit_json(made / "served" / INDEX, lambda content: content["weight_map"].update({"a.weight": other}))
    assert _findings(made, capsys)["a.weight"]["detail"] == f"is in {real!r}, and {INDEX} says {other!r}"


@pytest.mark.parametrize(
    ("change", "name", "detail"),
    [
        (lambda c: c.update(hidden_size=64), "hidden_size", "config.json has 64, expected 32"),
        (lambda c: c.update(rope=1), "rope", "config.json has 1, expected nothing"),
        (lambda c: c["quantization_config"].pop("ignore"), "quantization_config.ignore",
         'config.json has nothing, expected ["embedding", "head"]'),
        (lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(strategy="channel"),
         "quantization_config.config_groups.group_0.weights.strategy", 'config.json has "channel", expected "tensor"'),
    ],
)  # fmt: skip
def test_another_config(
    made: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict[str, Any]], Any], name: str, detail: str
) -> None:
    _edit_json(made / "served" / "config.json", change)
    (finding,) = _findings(made, capsys).values()
    assert (finding["kind"], finding["name"], finding["detail"]) == ("config", name, detail)


def test_another_models_config_against_the_one_that_was_given(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = made / "own.json"
    own.write_text('{"model_type": "net", "hidden_size": 16}')
    assert "'hidden_size'" in _says(capsys, DIVERGED, [*_verify(made, "--config", str(own))])


def test_another_checkpoint(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = _made(tmp_path / "other", "current")
    assert main(["verify", str(other / "checkpoint"), str(made / "served"), "--json"]) == DIVERGED
    findings = {f["name"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert findings[CERTIFICATE]["kind"] == "certificate"
    assert findings["a.input_scale"]["detail"] == "float32[1] is served, and was not exported"
    assert main(["verify", str(other / "checkpoint"), str(made / "served"), "--format", "block"]) == DIVERGED


def test_a_format_that_the_checkpoint_does_not_fit(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = _made(tmp_path / "other", "block", "block")
    assert main(["verify", str(other / "checkpoint"), str(made / "served"), "--json"]) == DIVERGED
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["detail"].startswith("is compressed-tensors, but the checkpoint has no such export: b: BlockScaling")
    assert (
        main(["verify", *map(str, (other / "checkpoint", made / "served")), "--format", "compressed-tensors"]) == USAGE
    )


@pytest.mark.parametrize("dtype", ["F32", "\x1b[2J"])
def test_a_certificate_of_another_layout(made: Path, capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    def change(content: dict[str, Any]) -> None:
        for tensor in content["tensors"]:
            if tensor["name"] == "a.weight":
                tensor["dtype"] = dtype
        content["model"] = model_digest(Certified(*map(t.get, Certified._fields)) for t in content["tensors"])

    _resealed(made / "served" / CERTIFICATE, change)
    assert main([*_by_certificate(made)]) == DIVERGED
    text = capsys.readouterr().out
    assert "'a.weight'" in text
    assert "\x1b" not in text


def _resealed(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a certificate, and give it a digest that fits."""
    content = json.loads(path.read_text())
    change(content)
    content["digest"] = "0" * 64
    text = json.dumps(content)[:-1] + "\n}\n"
    path.write_text(text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest()))


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
def test_a_certificate_that_contradicts_itself(
    made: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict[str, Any]], Any], text: str
) -> None:
    path = made / "served" / CERTIFICATE
    _resealed(path, change)
    assert f"{path}: {text}" in _says(capsys, UNREADABLE, _by_certificate(made))
    assert "'fp8dist-certificate.json'" in _says(capsys, DIVERGED, _verify(made))


def test_a_certificate_that_was_changed(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made / "served" / CERTIFICATE
    path.write_text(path.read_text().replace('"run": "r1"', '"run": "r2"'))
    assert main([*_by_certificate(made)]) == UNREADABLE
    assert "was changed after it was written: its digest does not match" in capsys.readouterr().err


def test_a_certificate_of_another_step(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _resealed(made / "served" / CERTIFICATE, lambda content: content.update(step=7))
    assert main([*_verify(made), "--json"]) == DIVERGED
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert "after step 7, expected " in finding["detail"]


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
def test_hostile_folders(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    folder = tmp_path / "hostile"
    folder.mkdir()
    files, text = HOSTILE[kind]
    plain = {"config.json": "{}", INDEX: _index("m.safetensors"), "m.safetensors": _framed(b"{}")}
    for name, content in {**plain, **files}.items():
        if content is not None:
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    assert main(["verify", str(made / "checkpoint"), str(folder)]) == UNREADABLE
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1
    assert str(folder) in error


@pytest.mark.parametrize("target", ["nowhere", "itself"])
def test_a_link_that_leads_nowhere(made: Path, capsys: pytest.CaptureFixture[str], target: str) -> None:
    path = _file_of(made, "b.weight")
    path.unlink()
    path.symlink_to(path if target == "itself" else target)
    assert main([*_by_certificate(made)]) == UNREADABLE
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line


def test_a_config_that_servers_cannot_read(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They read UTF-8."""
    path = made / "served" / "config.json"
    path.write_bytes(path.read_text().encode("utf-16"))
    assert "config.json: cannot be read: UnicodeDecodeError" in _says(capsys, UNREADABLE, _by_certificate(made))


def test_a_pipe_in_place_of_a_file(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (made / "served" / "config.json").unlink()
    os.mkfifo(made / "served" / "config.json")
    assert "is a pipe, expected a file" in _says(capsys, UNREADABLE, _verify(made))


@pytest.mark.parametrize("words", [["x"], ["x", "y", "z"], ["--certificate", "c", "x", "y"]])
def test_wrong_usage(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(["verify", *words]) == USAGE
    assert "expected CHECKPOINT and SERVED_DIR, or --certificate FILE and SERVED_DIR" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def nothing_is_left_open() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_certificate_of_nothing_verifies_nothing(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = {"tensors": [], "tied": {}, "model": hashlib.sha256(b"fp8dist model 1\n").hexdigest()}
    _resealed(made / "served" / CERTIFICATE, lambda content: content.update(empty))
    for path in (made / "served").glob("*.safetensors"):
        path.unlink()
    (made / "served" / INDEX).write_text('{"weight_map": {}}')
    assert "nothing to compare" in _says(capsys, USAGE, _by_certificate(made))
