"""``fp8dist.verify``: a toy engine in another process with every fault; scale forms; hostile iterators; cost."""

from __future__ import annotations

import gc
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import fp8dist
from fp8dist.files.value_comparison import compare_values
from tests.support import forked
from tests.support.serving import read, spread

Tensors = dict[str, Tensor]
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
RECIPES: dict[str, tuple[fp8dist.Recipe, str]] = {
    "tensor": (fp8dist.DelayedScaling(history_len=4), "compressed-tensors"),
    "row": (fp8dist.RowwiseScaling(), "compressed-tensors-channel"),
    "block": (fp8dist.BlockScaling(), "block"),
    "block 2^n": (fp8dist.BlockScaling(power_of_two=True), "block"),
    "tensor 2^n": (fp8dist.DelayedScaling(history_len=4, power_of_two=True), "block"),
}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(192, rows) for rows in (256, 128, 128))
        self.gate_proj, self.up_proj = (nn.Linear(512, 256, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(256, 192)
        self.norm = nn.LayerNorm(192)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        return self.norm(self.down_proj(torch.relu(self.gate_proj(h)) * self.up_proj(h)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])
        self.embedding, self.head = nn.Embedding(8, 192), nn.Linear(192, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers[0](x))


def _export(folder: Path, recipe: str) -> Path:
    """Export after each of two steps with weights of every magnitude, as "first" and "second"."""
    torch.manual_seed(0)
    net = Net()
    with torch.no_grad():
        for weight in net.layers.parameters():
            if weight.ndim == 2:
                weight.mul_(torch.exp2(torch.randn(len(weight), 1)))
    how, format = RECIPES[recipe]
    manager = fp8dist.prepare(net, how, overrides={"head": "high"})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    manager.attach(net, optimizer=optimizer)
    for name in ("first", "second"):
        net(torch.randn(64, 192)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        fp8dist.export(manager, folder / name, net, format=format)
    return folder


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {recipe: _export(tmp_path_factory.mktemp("exports"), recipe) for recipe in RECIPES}


# The engine ------------------------------------------------------------------------------------------


def _scale(tensors: Mapping[str, Tensor], weight: str) -> str:
    return next(name for name in (f"{weight}_scale", f"{weight}_scale_inv") if name in tensors)


def _weights(tensors: Mapping[str, Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn]


def _values(tensors: Mapping[str, Tensor], weight: str) -> Tensor:
    rows = tensors[weight]
    return rows.double() * spread(tensors[_scale(tensors, weight)], rows.shape).double()


def _rounded_up(scale: Tensor) -> Tensor:
    return torch.exp2(torch.ceil(torch.log2(scale)))


def _again(tensors: Tensors, powers: bool) -> None:
    """Quantise again from bfloat16 with scales from the amax of each part, as an engine does that is given weights."""
    for weight in _weights(tensors):
        value, scale = _values(tensors, weight).bfloat16().float(), tensors[_scale(tensors, weight)]
        high, wide = (-(-size // count) for size, count in zip(value.shape, (*scale.shape, 1)[:2]))
        high, wide = (128, 128) if "inv" in _scale(tensors, weight) else (high, wide)
        parts = [(r, c) for r in range(0, len(value), high) for c in range(0, value.shape[1], wide)]
        amaxes = [value[r : r + high, c : c + wide].abs().max() for r, c in parts]
        new = (torch.stack(amaxes) / 448).reshape(scale.shape)
        tensors[_scale(tensors, weight)] = new = _rounded_up(new) if powers else new
        tensors[weight] = (value / spread(new, value.shape)).to(torch.float8_e4m3fn)


DOWN = "layers.0.down_proj.weight"


def _rounds(tensors: Tensors, new: Tensors) -> None:
    for weight in _weights(tensors):
        tensors[_scale(tensors, weight)] = _rounded_up(tensors[_scale(tensors, weight)])


FAULTS: dict[str, Callable[[Tensors, Tensors], object]] = {
    "correct": lambda tensors, new: None,
    "forgets a scale": lambda tensors, new: tensors.pop(_scale(tensors, DOWN)),
    "leaves a scale at one": lambda tensors, new: tensors[_scale(tensors, DOWN)].fill_(1.0),
    "half an update": lambda tensors, new: tensors.update(list(new.items())[: len(new) // 2]),
    "half a tensor": lambda tensors, new: tensors[DOWN][96:].copy_(new[DOWN][96:]),
    "rounds scales up": _rounds,
    "quantises again": lambda tensors, new: _again(tensors, False),
    "quantises again by 2^n": lambda tensors, new: _again(tensors, True),
}


def _loaded(folder: str, fault: str) -> Tensors:
    """Return what the engine serves: merged, and in its own order."""
    tensors, new = read(Path(folder, "first")), read(Path(folder, "second"))
    FAULTS[fault](tensors, new)
    for name, parts in MERGED.items():
        for kind in ("weight", "weight_scale", "weight_scale_inv", "input_scale", "bias"):
            rows = [tensors.pop(f"layers.0.{part}.{kind}", None) for part in parts]
            if rows[0] is not None:
                shared = kind == "input_scale" and rows[0].equal(rows[1])  # As vLLM: one for the inputs of all.
                tensors[f"layers.0.{name}.{kind}"] = rows[0] if shared else torch.cat(rows)
    return tensors


def _engine(words: list[str]) -> int:
    """Load and verify, with each fault, against the exported files and against ``alone``; in a process of its own."""
    folder, alone, *faults = words
    for fault in faults:
        for certificate in (Path(folder, "first"), alone):
            report = fp8dist.verify(_loaded(folder, fault), certificate, merged=MERGED)
            print(json.dumps({**report.to_json(), "text": str(report)}))
    return 0


Reports = list[dict[str, Any]]


def _verified(folder: Path, tmp_path: Path, *faults: str) -> dict[str, Reports]:
    """Return for each fault the reports with the exported files, and with the certificate alone."""
    shutil.copy(folder / "first" / "fp8dist-certificate.json", tmp_path / "alone.json")
    done = forked.run([str(folder), str(tmp_path / "alone.json"), *faults], None, {}, main=_engine)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {fault: found[2 * place : 2 * place + 2] for place, fault in enumerate(faults)}


@pytest.mark.parametrize("recipe", ["tensor", "row", "block"])
def test_an_engine_in_another_process(exports: dict[str, Path], tmp_path: Path, recipe: str) -> None:
    for fault, reports in _verified(exports[recipe], tmp_path, *FAULTS).items():
        _assert_reported(exports[recipe], fault, *reports)


def _assert_reported(folder: Path, fault: str, full: dict[str, Any], alone: dict[str, Any]) -> None:
    """Assert what the reports say, by safetensors' reader and plain torch."""
    good, new, bad = read(folder / "first"), read(folder / "second"), read(folder / "first")
    FAULTS[fault](bad, new)
    found = {f["name"]: f for f in full["findings"]}
    # Served tensors whose bytes differ from the export.
    other = {n for n in good if n not in bad or not good[n].view(torch.uint8).equal(bad[n].view(torch.uint8))}
    assert {f["name"] for f in alone["findings"]} == set(found) == other, fault
    assert (full["consistent"], full["rescaled"]) == (not other, [])
    scales = {_scale(good, weight): weight for weight in _weights(good)}
    if fault == "correct":
        assert "the given tensors: the same bytes as" in full["text"]
    elif fault == "forgets a scale":
        assert [f["detail"] for f in found.values()] == ["is missing"]
    elif fault == "rounds scales up":
        assert set(found) <= set(scales)
        assert all(f["detail"].endswith("; rounded up to powers of two") for f in found.values())
    for name in other & set(scales) & set(bad):
        first = int((good[name] != bad[name]).flatten().nonzero()[0])
        assert found[name]["value"] == float(bad[name].flatten()[first])
        assert found[name]["expected"] == float(good[name].flatten()[first])
    for weight in other & set(scales.values()):
        mine, theirs = _values(bad, weight), _values(good, weight)
        detail, count = found[weight]["detail"], int((mine != theirs).sum())
        if _scale(good, weight) not in other:
            assert re.match(r"\d+ of \d+ elements differ|\d+ elements in the first of", detail)
        elif fault.startswith("quantises again"):
            text = f"{count} of {mine.numel()} values differ, as after quantising again with other scales"
            assert detail == text
        else:
            assert detail.startswith(f"{count} of {mine.numel()} values differ, ")
            assert detail.endswith(" of them by more than the sum of both ULPs")
            index = tuple(found[weight]["index"])
            assert (found[weight]["value"], found[weight]["expected"]) == (float(mine[index]), float(theirs[index]))
    noted = "no unchanged exported files are beside the certificate, so how values differ is not known"
    assert noted not in full["notes"]
    assert (noted in alone["notes"]) == any(f["kind"] == "parameter" for f in alone["findings"])


@pytest.mark.parametrize("recipe", ["block 2^n", "tensor 2^n"])
def test_a_round_trip_through_bfloat16_changes_bytes_and_no_value(
    exports: dict[str, Path], tmp_path: Path, recipe: str
) -> None:
    """A part whose largest byte is 224 or less gets half the scale, or less."""
    ((full, alone),) = _verified(exports[recipe], tmp_path, "quantises again by 2^n").values()
    good, bad = read(exports[recipe] / "first"), read(exports[recipe] / "first")
    _again(bad, True)
    other = [weight for weight in _weights(good) if not good[weight].float().equal(bad[weight].float())]
    assert other
    assert all(_values(good, weight).equal(_values(bad, weight)) for weight in other)
    assert (full["consistent"], sorted(full["rescaled"])) == (True, sorted(other))
    assert "the given tensors: the same values as" in full["text"]
    assert {f["name"] for f in alone["findings"]} == {*other, *(_scale(good, weight) for weight in other)}


def test_parts_that_are_merged_under_one_scale_were_quantised_again(exports: dict[str, Path]) -> None:
    """As vLLM merges q, k and v that have a scale each."""
    tensors, names = read(exports["tensor"] / "first"), [f"layers.0.{part}.weight" for part in MERGED["qkv_proj"]]
    values = torch.cat([_values(tensors, name) for name in names])
    scale = torch.stack([tensors[f"{name}_scale"] for name in names]).max()
    for name in names:
        del tensors[name], tensors[f"{name}_scale"]
    merged = {"weight": (values / scale).float().to(torch.float8_e4m3fn), "weight_scale": scale}
    served = {**tensors, **{f"layers.0.qkv_proj.{kind}": tensor for kind, tensor in merged.items()}}
    report = fp8dist.verify(served, exports["tensor"] / "first", merged=MERGED)
    details = {f.name: f.detail for f in report.findings}
    again = {name for name in names if details.get(name, "").endswith("after quantising again with other scales")}
    assert (len(again), details.keys()) == (2, again | {f"{name}_scale" for name in again})


@cache
def _number(byte: int) -> Fraction | None:
    """Return the number of a byte of E4M3, from the format's definition."""
    if byte & 127 == 127:
        return None
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    size = Fraction(8 + mantissa if exponent else mantissa) * Fraction(2) ** (max(exponent, 1) - 10)
    return -size if byte & 128 else size


@cache
def _ulp(byte: int) -> Fraction:
    return Fraction(2) ** (max((byte >> 3) & 15, 1) - 10)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor", "row", "block"])
def test_values_are_compared_exactly(layout: str) -> None:
    """All bytes and their neighbours, by fractions: which differ, which by more than both ULPs, the first of these."""
    generator = torch.Generator().manual_seed(1)
    rows = 130 if layout == "block" else 20
    a = torch.arange(256).repeat(rows, 1).to(torch.uint8)
    b = (a.int() + torch.randint(-2, 3, a.shape, generator=generator)).clamp(0, 255).to(torch.uint8)
    shape = {"tensor": (1,), "row": (rows, 1), "block": (2, 2)}[layout]
    s = torch.rand(shape, generator=generator) + 0.5
    t = torch.where(torch.rand(shape, generator=generator) < 0.5, s, s * torch.tensor([1.0, 2.0, 0.97])[1 + len(s) % 2])
    found = compare_values(a.view(torch.float8_e4m3fn), s, b.view(torch.float8_e4m3fn), t)
    exact = {x: Fraction(x) for each in (s, t) for x in each.flatten().tolist()}
    scales = [[exact[x] for x in spread(each, a.shape).flatten().tolist()] for each in (s, t)]
    differing, beyond = [], []
    for place, (x, y, p, q) in enumerate(zip(a.flatten().tolist(), b.flatten().tolist(), *scales)):
        m, n = _number(x), _number(y)
        if (m is None and n is None) or (m is not None and n is not None and m * p == n * q):
            continue
        differing.append(place)
        if p == q or m is None or n is None or abs(m * p - n * q) > _ulp(x) * p + _ulp(y) * q:
            beyond.append(place)
    assert (found.differing, found.beyond, found.place) == (len(differing), len(beyond), (beyond or differing)[0])


# Scale forms -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_export_says_which_form_its_scales_have(exports: dict[str, Path], recipe: str) -> None:
    folder = exports[recipe] / "first"
    tensors = read(folder)
    exact = all(math.frexp(x)[0] == 0.5 for w in _weights(tensors) for x in tensors[_scale(tensors, w)].flatten())
    assert exact == ("2^n" in recipe)
    certificate = json.loads((folder / "fp8dist-certificate.json").read_text())
    assert certificate["scales"] == ("power_of_two" if exact else "float32")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config.get("scale_fmt") == ("ue8m0" if exact and certificate["export"] == "block" else None)
    assert config["quant_method"] == ("fp8" if certificate["export"] == "block" else "compressed-tensors")
    as_ue8m0 = {n: t.to(torch.float8_e8m0fnu) if "weight_scale" in n else t for n, t in tensors.items()}
    assert fp8dist.verify(as_ue8m0, folder).consistent == exact


def test_one_scale_that_is_no_power_of_two_makes_the_form_float32(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    mixed = {"0": fp8dist.CurrentScaling()}
    manager = fp8dist.prepare(net, fp8dist.CurrentScaling(power_of_two=True), skip=None, overrides=mixed)
    fp8dist.export(manager, tmp_path / "out", format="block")
    assert json.loads((tmp_path / "out" / "fp8dist-certificate.json").read_text())["scales"] == "float32"
    assert "scale_fmt" not in json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]


# Hostile and wrong arguments -------------------------------------------------------------------------


def _ends(tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    yield from list(tensors.items())[:2]
    raise RuntimeError("connection lost\nby peer")


def _changed(name: str, value: Any) -> Callable[[Tensors], Any]:
    return lambda tensors: {**tensors, name: value}


def _freed() -> Tensor:
    tensor = torch.ones(192)
    tensor.untyped_storage().resize_(0)
    return tensor


BIAS, QKV = "layers.0.down_proj.bias", "layers.0.qkv_proj.bias"


def _with_qkv(bias: Tensor) -> Callable[[Tensors], Any]:
    """Merge the biases of q, k and v."""
    return lambda tensors: {n: x for n, x in tensors.items() if not re.search(r"[qkv]_proj\.bias", n)} | {QKV: bias}


def _with_negative_zeros(tensors: Tensors) -> Tensors:
    data = tensors[DOWN].view(torch.uint8)
    data[data & 127 == 0] = 128
    return tensors


FINDINGS: list[tuple[str, Callable[[Tensors], Any], dict[str, str]]] = [
    ("twice", lambda t: [*t.items(), (BIAS, t[BIAS])], {BIAS: "comes twice"}),
    ("early end", lambda t: iter([x for x in t.items() if x[0] != BIAS]), {BIAS: "is missing"}),
    ("no tensor", _changed(BIAS, [1.0]), {BIAS: "is of type list, expected a tensor"}),
    ("meta", _changed(BIAS, torch.ones(192, device="meta")), {BIAS: "cannot be read: Cannot copy out of meta tensor"}),
    ("wrapped, as a DTensor", _changed(BIAS, TwoTensor(torch.ones(192), torch.ones(192))),
     {BIAS: "is a TwoTensor, expected the whole tensor itself"}),
    ("freed", _changed(BIAS, _freed()), {BIAS: "cannot be read: setStorage"}),
    ("sparse parts", _with_qkv(torch.ones(512).to_sparse()),
     {QKV: "cannot be read", **{f"layers.0.{part}.bias": "is missing" for part in MERGED["qkv_proj"]}}),
    ("sparse", _changed(BIAS, torch.ones(192).to_sparse()), {BIAS: "cannot be read: "}),
    ("merged rows", _with_qkv(torch.ones(500)),
     {QKV: "is float32[500], expected 512 rows: those of q_proj, k_proj, v_proj"}),
    # Other bytes with the same scale are no other form of the same weight, though -0 = 0.
    ("sign of a zero", _with_negative_zeros, {DOWN: ""}),
    ("untied", _changed("head.weight", torch.zeros(8, 192)), {"head.weight": "elements differ"}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "change", "expected"), FINDINGS, ids=[row[0] for row in FINDINGS])
def test_what_is_wrong_with_a_tensor_is_one_finding(
    exports: dict[str, Path], kind: str, change: Callable[[Tensors], Any], expected: dict[str, str]
) -> None:
    folder = exports["tensor"] / "first"
    report = fp8dist.verify(change(read(folder)), folder, merged=MERGED)
    assert {f.name for f in report.findings} == set(expected)
    assert all(expected[f.name] in f.detail and "\n" not in f.detail for f in report.findings)
    with pytest.raises(fp8dist.DivergenceError) as caught:
        report.raise_if_diverged()
    assert caught.value.report is report


def test_a_tied_weight_may_come_twice_with_its_scales(exports: dict[str, Path], tmp_path: Path) -> None:
    folder = exports["tensor"] / "first"
    tensors = read(folder)
    report = fp8dist.verify({**tensors, "head.weight": tensors["embedding.weight"]}, folder)
    report.raise_if_diverged()
    assert (report.consistent, report.step, report.compared) == (True, 1, {"parameter": len(tensors)})
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    net[1].weight = net[0].weight
    manager = fp8dist.prepare(net, fp8dist.CurrentScaling(), skip=None)
    fp8dist.export(manager, tmp_path / "out")
    tensors = read(tmp_path / "out")
    assert set(tensors) == {"0.weight", "0.weight_scale"}
    tensors |= {name.replace("0", "1"): tensor.clone() for name, tensor in tensors.items()}
    assert fp8dist.verify(tensors, tmp_path / "out").consistent
    tensors["1.weight_scale"] *= 2
    (finding,) = fp8dist.verify(tensors, tmp_path / "out").findings
    assert (finding.name, finding.value, finding.expected) == (
        "1.weight_scale",
        *map(float, (tensors["1.weight_scale"], tensors["0.weight_scale"])),
    )


@pytest.mark.parametrize(
    ("given", "options", "error", "text"),
    [
        (_ends, {}, fp8dist.CheckpointError, "failed after 2: RuntimeError: connection lost"),
        (lambda t: [("x", torch.ones(1)), torch.ones(2)], {}, fp8dist.CheckpointError,
         "item 1 is Tensor, expected (name, "),
        (lambda t: [(3, torch.ones(1))], {}, fp8dist.CheckpointError, "item 0 is (int, Tensor), expected (name, "),
        (lambda t: nn.Linear(2, 2), {}, fp8dist.ConfigurationError, "got a model: pass model.state_dict()"),
        (lambda t: 3, {}, fp8dist.ConfigurationError, "a mapping or an iterator of (name, tensor), got int"),
        *((dict, {"merged": wrong}, fp8dist.ConfigurationError, "merged must map a served name to several")
          for wrong in ({"qkv_proj": 3}, {"qkv_proj": (1, 2)}, ["qkv_proj"], {"qkv_proj": "q_proj"})),
        (dict, {"certificate": {}}, fp8dist.ConfigurationError, "certificate must be a path, got dict"),
        *((dict, {"certificate": path}, fp8dist.CheckpointError, ".") for path in ("", "a\0b", b"none")),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_sentence(
    exports: dict[str, Path],
    given: Callable[[Tensors], Any],
    options: dict[str, Any],
    error: type[Exception],
    text: str,
) -> None:
    folder = exports["tensor"] / "first"
    with pytest.raises(error, match=text if text == "." else re.escape(text)) as caught:
        fp8dist.verify(given(read(folder)), **{"certificate": folder, **options})
    assert "\n" not in str(caught.value)


def test_reference_files_that_were_changed_are_no_reference(exports: dict[str, Path], tmp_path: Path) -> None:
    """The certificate decides: values from files with other bytes would accuse a correct engine, or excuse a wrong
    one."""
    shutil.copytree(exports["tensor"] / "first", tmp_path / "out")
    tensors = {name: tensor.clone() for name, tensor in read(tmp_path / "out").items()}
    path = next((tmp_path / "out").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-4096:] = bytes(4096)
    path.write_bytes(data)
    assert fp8dist.verify(tensors, tmp_path / "out").consistent
    changed = read(tmp_path / "out")
    report = fp8dist.verify(changed, tmp_path / "out")
    assert report.diverged
    assert all(f.detail == "its SHA-256 is another one" for f in report.findings)


# Cost ------------------------------------------------------------------------------------------------


class Stream:
    """Makes each tensor when it is asked for. ``most``: bytes of tensors alive at a time, beside those at the start."""

    def __init__(self, folder: Path, order: list[str], fault: bool) -> None:
        self.order, self.folder, self.fault = order, folder, fault
        self.files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        self.made: dict[str, int] = {}
        self.before = self._alive()
        self.most = 0

    def _alive(self) -> int:
        alive = [x for x in gc.get_objects() if type(x) is Tensor and x.device.type == "cpu"]
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in alive}.values())

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.order:
            self.most = max(self.most, self._alive() - self.before)
            with safe_open(self.folder / self.files[name], framework="pt") as opened:
                tensor = opened.get_tensor(name)
            self.made[name] = self.made.get(name, 0) + 1
            if self.fault:
                tensor.view(torch.uint8).bitwise_xor_(1)
            yield name, tensor
            del tensor


@pytest.mark.slow
def test_each_tensor_is_read_once_and_few_are_kept(tmp_path: Path) -> None:
    """Nothing is kept of equal tensors; of differing ones a pair each until its scales come, eight at most. Their
    digests take 1 MiB."""
    net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(9)))
    manager = fp8dist.prepare(net, fp8dist.RowwiseScaling(), skip=None)
    fp8dist.export(manager, tmp_path / "out")
    names = list(read(tmp_path / "out"))
    weights_first = sorted(names, key=lambda name: not name.endswith("weight"))
    for order, fault, bound in ((weights_first, False, 0), (names, True, 3), (weights_first, True, 17)):
        stream = Stream(tmp_path / "out", order, fault)
        report = fp8dist.verify(stream, tmp_path / "out")
        assert len(report.findings) == (len(names) if fault else 0)
        assert stream.made == dict.fromkeys(names, 1)
        assert stream.most <= bound * 1024 * 1024
