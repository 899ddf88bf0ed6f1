"""Offline reading of all kinds of checkpoints: the values equal those that torch reads; bad input is refused."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import pickle
import random
import socket
import struct
import tarfile
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fp8dist
from fp8dist import DelayedScaling
from fp8dist.errors import CheckpointError
from fp8dist.files import failures
from fp8dist.files.entries import SavedEntry
from fp8dist.files.sources import open_source
from tests.support import forked
from tests.support.pickles import HOSTILE, LEGACY_HEAD, Call
from tests.support.ranks import on_ranks
from tests.support.serving import tensor_bits
from tests.support.states import saved_of

TENSORS = {
    "a": torch.arange(12.0).reshape(3, 4),
    "bf16": torch.linspace(-1, 1, 6).bfloat16(),
    "empty": torch.zeros(0, 4),
    "fp8": torch.linspace(-9, 9, 8).to(torch.float8_e4m3fn).reshape(2, 4),
    "fp8_grad": torch.linspace(-9, 9, 7).to(torch.float8_e5m2),
    "ints": torch.tensor([1 << 40, -3]),
    "nan": torch.tensor([torch.nan, -0.0, torch.inf]),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "true": torch.tensor([True, False]),
}


def _all(path: Path | str) -> dict[str, Tensor]:
    """Return all tensors of a source by name, and assert that each matches its entry."""
    found = {}
    source = open_source(path)
    assert source.path == str(path)
    assert list(source.entries) == sorted(source.entries)
    for index, entry in enumerate(source.entries):
        tensor = source.read(index)
        assert entry == SavedEntry(entry.name, entry.kind, tuple(tensor.shape), str(tensor.dtype).split(".")[1])
        assert type(tensor) is Tensor
        assert not tensor.requires_grad
        found[entry.name if source.family == "parameters" else f"{entry.name}/{entry.kind}"] = tensor
    return found


def _same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert tensor_bits(found) == tensor_bits(expected)


def _refused(path: Path | str, *texts: str) -> str:
    """Return the error message of opening or reading ``path``; assert that it is one line and names the path."""
    with pytest.raises(CheckpointError) as caught:
        _all(path)
    text = str(caught.value)
    assert text.startswith(failures.one_line(str(path)))
    assert text.isprintable()
    assert all(part in text for part in texts), text
    return text


def _save(path: Path, value: Any, legacy: bool = False) -> Path:
    torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    return path


def _save_safetensors(path: Path, value: dict[str, Tensor]) -> Path:
    save_file(value, path)
    return path


def _save_state(path: Path, value: Any) -> Path:
    fp8dist.prepare(nn.Sequential(nn.Linear(16, 16)), DelayedScaling(history_len=3)).save(path)
    return path


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of DCP (no process group) and of tracing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _dcp(folder: Path, state: dict[str, Any], **options: Any) -> Path:
    with _quiet():
        dcp.save(state, storage_writer=FileSystemWriter(folder, **options))
    return folder


def _save_as_hugging_face(folder: Path, state: dict[str, Any]) -> Path:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    with _quiet():
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(folder)))
    return folder


TORCH_SAVE: dict[str, Callable[[Path, Any], Path]] = {"zip": _save, "legacy": partial(_save, legacy=True)}
DCP: dict[str, Callable[[Path, Any], Path]] = {
    "DCP": _dcp,
    "DCP, two threads": partial(_dcp, thread_count=2),
    "DCP, a file for each tensor": partial(_dcp, single_file_per_rank=False),
}
FILES = {**TORCH_SAVE, "safetensors": _save_safetensors, "state": _save_state}


def _trained() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4, dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125, betas=(0.5, 0.75))
    model(torch.randn(5, 8)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "rng": torch.get_rng_state()}


def _views() -> dict[str, Any]:
    base, attributed = torch.arange(24.0), torch.ones(2)
    attributed.note = "kept by torch, no content"  # type: ignore[attr-defined]
    return {
        **TENSORS,
        "attributed": attributed,
        "storage": torch.tensor([1 << 40, -3]).untyped_storage(),
        "conj": torch.tensor([1 + 2j]).conj(),
        "expanded": torch.ones(1).expand(3, 4),
        "part": base[5:9],
        "parameter": nn.Parameter(torch.ones(2)),
        "permuted": base.reshape(2, 3, 4).permute(2, 0, 1),
        "step": base[::3],
        "uint16": torch.tensor([65535, 1], dtype=torch.uint16),
    }


def _plain_values() -> dict[Any, Any]:
    return {
        "bytes": b"\x00\xff",
        "complex": 1 + 2j,
        "counter": Counter({"x": 3}),
        "empty": {},
        "false": False,
        "float": -0.0,
        "int": -(1 << 63),
        "nested": [{"deep": (1, (2.0, None))}],
        "ordered": OrderedDict(y=1),
        "shape": torch.Size([3, 4]),
        5: {True: "numbers are names too"},
    }


def _nested() -> dict[str, Any]:
    view = TENSORS["a"].t()
    return {**TENSORS, "nested": {"view": view, "lr": 0.5, "name": "x", "none": None, "list": [1, (2, "y")]}}


@pytest.mark.parametrize(
    ("save", "value"),
    [
        *((save, value) for save in TORCH_SAVE.values() for value in (_trained, _views, _plain_values)),
        *((save, _nested) for save in DCP.values()),
        (_save_safetensors, TENSORS.copy),
        (_save_as_hugging_face, lambda: {"a": TENSORS["a"], "b": TENSORS["ints"]}),
        (_save, lambda: {"value": torch.ones(3)}),
    ],
)
def test_what_was_saved_is_read(tmp_path: Path, save: Callable[[Path, Any], Path], value: Callable[[], Any]) -> None:
    """Sources of many ranks may be open at once, so they hold no file descriptors."""
    saved, before = value(), len(os.listdir("/proc/self/fd"))
    path = save(tmp_path / "saved", saved["value"] if [*saved] == ["value"] else saved)
    sources = [open_source(path) for _ in range(3)]
    assert len(os.listdir("/proc/self/fd")) == before
    _same(_all(path), dict(_flat(saved)))
    assert len(sources[0].entries) == len(sources[2].entries)


@pytest.mark.slow
@pytest.mark.parametrize("format", FILES)
def test_truncation_is_seen(tmp_path: Path, format: str) -> None:
    path = FILES[format](tmp_path / "a", {"a": torch.ones(4), "b": torch.arange(3)})
    data = path.read_bytes()
    for length in (*range(0, len(data) - 100, 11), *range(len(data) - 100, len(data))):
        path.write_bytes(data[:length])
        _refused(path)
    path.write_bytes(data + b"x")
    if format == "legacy":
        _refused(path, "1 bytes after its last storage")
    if format in ("safetensors", "state"):
        path.write_bytes(struct.pack("<Q", 1 << 60) + data[8:])
        _refused(path)


def test_state_files(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    manager = fp8dist.prepare(model, DelayedScaling(history_len=3))
    model(torch.randn(4, 16)).sum().backward()
    manager.step()
    path = tmp_path / "state.safetensors"
    manager.save(path)
    found = _all(path)
    state = saved_of(manager)
    expected = {"step/step": state["step"]}
    for place, (fqn, role) in enumerate(state["slots"]):
        for kind in ("scale", "amax", "cold", "history"):
            expected[f"{fqn}:{role}/{kind}"] = state[kind][place]
        expected[f"{fqn}:{role}/counters"] = state["counters"][:, place]
    _same(found, expected)
    assert found["0:input/scale"].item() == manager.slot("0", "input").scale.item()
    source = open_source(path)
    assert source.family == "state"
    renamed = path.rename(tmp_path / "state.bin")  # The content decides, not the name.
    _same(_all(renamed), expected)
    data = bytearray(renamed.read_bytes())
    data[-1] ^= 1
    renamed.write_bytes(data)
    assert _refused(renamed, "checksum").count(str(renamed)) == 1


def test_a_folder_of_safetensors(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    names = sorted(TENSORS)
    save_file({n: TENSORS[n] for n in names[:4]}, folder / "model-1-of-2.safetensors")
    save_file({n: TENSORS[n] for n in names[4:]}, folder / "model-2-of-2.safetensors")
    (folder / "config.json").write_text("{}")
    _same(_all(folder), TENSORS)
    save_file({"a": TENSORS["a"]}, folder / "other.safetensors")
    _refused(folder, "other.safetensors", "a is in model-1-of-2.safetensors as well")
    _save_state(folder / "other.safetensors", None)
    _refused(folder, "other.safetensors", "name the file itself")
    (folder / "other.safetensors").unlink()
    os.mkfifo(folder / "b.safetensors")
    _refused(folder, "b.safetensors", "a pipe")


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) pairs: an independent oracle."""
    if isinstance(value, Mapping) or type(value) in (list, tuple, torch.Size):
        children = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, child in children:
            yield from _flat(child, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, Tensor):
        yield prefix, value.detach().resolve_conj().resolve_neg()
    elif isinstance(value, torch.UntypedStorage):
        yield prefix, torch.tensor(value.tolist(), dtype=torch.uint8)
    elif value is None:
        yield prefix, torch.empty(0, dtype=torch.uint8)
    elif isinstance(value, (str, bytes)):
        data = value.encode() if isinstance(value, str) else value
        yield prefix, torch.tensor(list(data), dtype=torch.uint8)
    elif isinstance(value, float):
        yield prefix, torch.tensor(value, dtype=torch.float64)
    elif isinstance(value, complex):
        yield prefix, torch.tensor(value, dtype=torch.complex128)
    else:
        yield prefix, torch.tensor(value)


@pytest.mark.parametrize("save", TORCH_SAVE.values(), ids=TORCH_SAVE)
def test_values_that_are_read_as_text(tmp_path: Path, save: Callable[[Path, Any], Path]) -> None:
    others = {"big": 1 << 70, "dtype": torch.float8_e5m2, "set": {"b", "a"}, "device": torch.device("cuda:1")}
    found = _all(save(tmp_path / "a", others))
    texts = {name: bytes(tensor.tolist()).decode() for name, tensor in found.items()}
    expected = {"big": str(1 << 70), "dtype": "torch.float8_e5m2", "set.0": "a", "set.1": "b", "device": "cuda:1"}
    assert texts == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.eye(2).to_sparse(), "_rebuild_sparse_tensor"),
        (torch.empty(2, device="meta"), "_rebuild_meta_tensor_no_storage"),
        (numpy.float64(1.0), "numpy"),
        (Path("x"), "pathlib"),
        (nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        ({((("deep",),),): 1}, "dict key of type tuple"),
        ({"a.b": 1, "a": {"b": 2}}, "two tensors in it are called x.a.b"),
    ],
    ids=["sparse", "meta", "numpy", "object", "module", "key", "name"],
)
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_what_is_no_plain_tensor(tmp_path: Path, value: Any, text: str) -> None:
    for legacy in (False, True):
        _refused(_save(tmp_path / "a.pt", {"x": value}, legacy), text)


def _rezip(path: Path, records: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    """Rewrite the archive with other records and valid checksums."""
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    folder = next(iter(content)).partition("/")[0]
    content.update({f"{folder}/{name}": data for name, data in records.items()})
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return path


def test_archives_that_cannot_be_read(tmp_path: Path) -> None:
    """With any flipped bit, without checksums, compressed, of another byte order, or with a short storage."""
    path = _save(tmp_path / "a.pt", {"a": torch.ones(4), "b": torch.arange(3)})
    data, chance = path.read_bytes(), random.Random(0)
    with zipfile.ZipFile(path) as archive:
        starts = {i.filename: (i.header_offset, i.file_size) for i in archive.infolist()}
    for name, (header, size) in starts.items():
        start = header + 30 + sum(struct.unpack("<HH", data[header + 26 : header + 30]))
        for place in range(start, start + size):
            broken = bytearray(data)
            broken[place] ^= 1 << chance.randrange(8)
            path.write_bytes(broken)
            _refused(path, f"record {name.partition('/')[2]} is damaged", "CRC", "set_crc32_options(False)")
    torch.serialization.set_crc32_options(False)
    try:
        _save(path, {"a": 1})
    finally:
        torch.serialization.set_crc32_options(True)
    _refused(path, "is damaged", "set_crc32_options(False)")
    tensor = {"a": torch.ones(100)}
    _refused(_rezip(_save(path, tensor), {}, zipfile.ZIP_DEFLATED), "compressed")
    _refused(_rezip(_save(path, tensor), {"byteorder": b"big"}), "big-endian")
    _refused(_rezip(_save(path, tensor), {"data/0": b"short"}), "more than its storage 0 of 5 bytes")


def test_a_file_that_changes_after_it_was_opened(tmp_path: Path) -> None:
    path = _save(tmp_path / "a.pt", {"a": torch.ones(4)})
    source = open_source(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"a\.pt: was changed while it was read"):
        source.read(0)
    source = open_source(_save(path, {"a": 1}))
    with pytest.raises(IndexError):
        source.read(1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pickled"), HOSTILE, ids=[name for name, _ in HOSTILE])
def test_hostile_pickles(tmp_path: Path, name: str, pickled: bytes) -> None:
    path = _rezip(_save(tmp_path / "a.pt", {}), {"data.pkl": pickled})
    text = _refused(path)
    assert "Recursion" not in text, name
    path.write_bytes(LEGACY_HEAD + pickled)
    _refused(path)
    folder = _dcp(tmp_path / "dcp", {"a": torch.ones(2)})
    (folder / ".metadata").write_bytes(pickled)
    _refused(folder, ".metadata")


def _laughs(pair: Callable[[list[Any]], Any]) -> Any:
    """Return nested pairs that unfold to 2**60 items: printing, hashing or comparing them never ends."""
    value: Any = "ha"
    for _ in range(60):
        value = pair([value, value])
    return value


@pytest.mark.parametrize("where", ["value", "set", "key"])
@pytest.mark.timeout(20)
def test_lists_that_unfold_without_end(tmp_path: Path, where: str) -> None:
    laughs = _laughs(tuple)
    value = {"value": {"x": laughs}, "set": {"x": Call(set, [laughs, _laughs(tuple)])}}.get(where)
    pickled = pickle.dumps(value, 2)
    if where == "key":  # A dict with this key would hash it, which never ends.
        pickled = b"\x80\x02}" + pickle.dumps(laughs, 2)[2:-1] + b"K\x01s."
    path = tmp_path / "a.pt"
    path.write_bytes(LEGACY_HEAD + pickled + pickle.dumps([], 2))
    _refused(path)
    _refused(_rezip(_save(path, {}), {"data.pkl": pickled}))
    for place in range(2 if where == "value" else 0):  # The version, and what the machine was.
        head = [pickle.dumps(v, 2) for v in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, {}, [])]
        head[1 + place] = pickle.dumps(laughs, 2)
        path.write_bytes(b"".join(head))
        _refused(path)


@pytest.mark.parametrize(
    "where", ["relative_path", "offset", "transform_descriptors", "fqn", "size", "dtype", "planner_data"]
)
@pytest.mark.timeout(20)
def test_indexes_that_unfold_without_end(tmp_path: Path, where: str) -> None:
    folder = _dcp(tmp_path, {"a": torch.ones(2), "b": 1})
    index = _index(folder)
    laughs = _laughs(list)
    (key, place), *_ = index.storage_data.items()
    described = index.state_dict_metadata["a"]
    held = {"fqn": key, "size": described, "dtype": described.properties, "planner_data": index}.get(where, place)
    object.__setattr__(held, where, laughs)  # Some are frozen.
    _write_index(folder, index)
    if where == "planner_data":  # The reader ignores planner_data.
        _all(folder)
    else:
        _refused(folder, ".metadata")


class _Stored:
    """Stands for a storage in a pickle."""


class _StoragePickler(pickle.Pickler):
    """Pickles ``_Stored`` as a storage with the key and the number of elements that it was given."""

    key, numel = "0", 4

    def persistent_id(self, found: Any) -> Any:
        stored = isinstance(found, _Stored)
        return ("storage", torch.FloatStorage, self.key, "cpu", self.numel) if stored else None


SIZES = "no tuple of sizes"


@pytest.mark.parametrize(
    ("shape", "stride", "offset", "stored", "text"),
    [
        ((1 << 40,), (1,), 0, {}, "needs more than its storage"),
        ((1 << 40,), (0,), 0, {}, "needs more than its storage"),
        ((1 << 62,) * 3, (0,) * 3, 0, {}, SIZES),
        ((-1,), (1,), 0, {}, SIZES),
        ((2,), (-1,), 0, {}, SIZES),
        ((2, 2), (1,), 0, {}, "a tensor without storage, dtype or strides"),
        ((4,), (1,), 1, {}, "needs more"),
        ((4,), (1,), -1, {}, SIZES),
        (("4",), (1,), 0, {}, SIZES),
        ((1,) * 65, (1,) * 65, 0, {}, SIZES),
        ((4,), (1,), 0, {"numel": 1 << 50}, SIZES),
        ((5,), (1,), 0, {"numel": 5}, "needs more"),
        ((4,), (1,), 0, {"key": "9"}, "no record data/9"),
        ((4,), (1,), 0, {"key": "../a"}, "no record"),
    ],
    ids=str,
)
def test_tensors_stay_inside_their_storage(
    tmp_path: Path, shape: Any, stride: Any, offset: int, stored: dict[str, Any], text: str
) -> None:
    stream = io.BytesIO()
    pickler = _StoragePickler(stream, 2)
    pickler.__dict__.update(stored)
    pickler.dump({"a": Call(torch._utils._rebuild_tensor_v2, _Stored(), offset, shape, stride, False, OrderedDict())})
    path = _save(tmp_path / "a.pt", {"a": torch.ones(4)})
    _refused(_rezip(path, {"data.pkl": stream.getvalue()}), *([] if text == SIZES else [text]))


def _index(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def _write_index(folder: Path, index: Any) -> Path:
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return folder


def test_tensors_inside_values(tmp_path: Path) -> None:
    """As of a dict that DCP does not flatten."""
    folder = _dcp(tmp_path, {"x": torch.ones(3), "h": 1})
    stream = io.BytesIO()
    torch.save({"inner": {"t": TENSORS["a"]}}, stream)
    index = _index(folder)
    (folder / "value").write_bytes(b"..." + stream.getvalue())
    place = index.storage_data[MetadataIndex("h")]
    index.storage_data[MetadataIndex("h")] = type(place)("value", 3, len(stream.getvalue()))
    _same(_all(_write_index(folder, index)), {"x": torch.ones(3), "h.inner.t": TENSORS["a"]})


@on_ranks(2)
def test_sharded_dcp_folders(tmp_path: Path) -> None:
    """Tensors sharded over either dim, sharded unevenly and replicated, and per-rank values."""
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    full = {
        "rows": torch.arange(20.0).reshape(5, 4),
        "columns": torch.arange(15).reshape(3, 5),
        "fp8": torch.linspace(-9, 9, 12).reshape(3, 4),
        "bf16": torch.arange(8.0),
        "one": torch.ones(1),
        "whole": torch.arange(3.0),
    }
    placed = dict.fromkeys(full, Shard(0)) | {"columns": Shard(1), "whole": Replicate()}
    dtypes = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}
    state = {n: distribute_tensor(t, mesh, [placed[n]]).to(dtypes.get(n, t.dtype)) for n, t in full.items()}
    _dcp(tmp_path, {"model": state, "rank": {f"of{rank}": rank}})
    expected = {f"model.{n}": t.to(dtypes.get(n, t.dtype)) for n, t in full.items()}
    _same(_all(tmp_path), expected | {"rank.of0": torch.tensor(0), "rank.of1": torch.tensor(1)})


def test_damaged_pieces(tmp_path: Path) -> None:
    folder = _dcp(tmp_path, {"a": torch.arange(100.0), "b": torch.ones(3), "c": "text"})
    index = _index(folder)
    place = index.storage_data[MetadataIndex("a", torch.Size([0]))]
    pieces = folder / "__0_0.distcp"
    data = pieces.read_bytes()
    where = data.index(struct.pack("<f", 77.0), place.offset)
    pieces.write_bytes(data[:where] + b"\xff" + data[where + 1 :])
    source = open_source(folder)
    assert source.read(1).tolist() == [1.0] * 3
    with pytest.raises(CheckpointError, match=r"the piece of a at \(0,\) \(byte \d+\): record data/0 is damaged"):
        source.read(0)
    pieces.write_bytes(data[: len(data) - 1])
    _refused(folder, "__0_0.distcp: is truncated")
    pieces.unlink()
    _refused(folder, "__0_0.distcp", "No such file")
    pieces.mkdir()
    _refused(folder, "__0_0.distcp", "a folder")


def _two_chunks(tmp_path: Path) -> tuple[Path, Any, list[Any]]:
    """Return a folder, its index, and the chunks of a tensor of shape (4,) in two pieces."""
    folder = _dcp(tmp_path, {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])})
    index = _index(folder)
    description = index.state_dict_metadata["a"]
    description.size = torch.Size([4])
    chunk = type(description.chunks[0])
    description.chunks.append(chunk(offsets=torch.Size([2]), sizes=torch.Size([2])))
    index.storage_data[MetadataIndex("a", [2])] = index.storage_data.pop(MetadataIndex("b", [0]))
    del index.state_dict_metadata["b"]
    return folder, index, description.chunks


def _huge(index: Any, chunks: list[Any]) -> None:
    index.state_dict_metadata["a"].size = chunks[0].sizes = torch.Size([1 << 40])
    chunks.pop()


def _transformed(index: Any, chunks: list[Any]) -> None:
    for place in index.storage_data.values():
        place.transform_descriptors = ["stream.zstd/1"]


def _placed(index: Any, chunks: list[Any], name: Any) -> None:
    for place in index.storage_data.values():
        place.relative_path = name


def _of(index: Any) -> Any:
    return index.state_dict_metadata["a"]


DAMAGES: dict[str, tuple[Callable[[Any, list[Any]], Any], str]] = {
    "gap": (lambda index, chunks: chunks.pop(), "do not fill (4,) exactly"),
    "overlap": (lambda index, chunks: setattr(chunks[1], "offsets", torch.Size([1])), "do not fill (4,) exactly"),
    "beyond": (lambda index, chunks: setattr(chunks[1], "sizes", torch.Size([3])), "do not fill (4,) exactly"),
    "shape": (lambda index, chunks: setattr(_of(index), "size", torch.Size([5])), "do not fill (5,) exactly"),
    "dtype": (lambda index, chunks: setattr(_of(index).properties, "dtype", torch.int32), "expected torch.int32"),
    "properties": (lambda index, chunks: setattr(_of(index), "properties", None), "does not say which dtype a has"),
    "missing": (lambda index, chunks: index.storage_data.pop(MetadataIndex("a", [2])),
                "does not say where a at (2,) is stored"),
    "huge": (_huge, "claims a piece of a"),
    "transform": (_transformed, "are transformed"),
    **{f"path {name!r}": (partial(_placed, name=name), "the file")
       for name in ("../secret", "/etc/passwd", "a/../../secret", "", "a\0b", 5)},
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_index_that_does_not_fit(tmp_path: Path, damage: str) -> None:
    folder, index, chunks = _two_chunks(tmp_path / "folder")
    (tmp_path / "secret").write_bytes((folder / "__0_0.distcp").read_bytes())
    _same(_all(_write_index(folder, index)), {"a": torch.tensor([1.0, 2.0, 3.0, 4.0])})
    change, text = DAMAGES[damage]
    change(index, chunks)
    _refused(_write_index(folder, index), text)


def test_old_indexes(tmp_path: Path) -> None:
    """torch before 2.3 pickles TensorProperties from another module; Python 3.13 pickles PosixPath from another."""
    folder = _dcp(tmp_path, {"a": torch.ones(2)})
    data = pickle.dumps(_index(folder), 2)
    new, old = b"ctorch.distributed.checkpoint.metadata\n", b"ctorch.distributed._shard.sharded_tensor.metadata\n"
    data = data.replace(new + b"TensorProperties\n", old + b"TensorProperties\n")
    data = data.replace(new + b"_MEM_FORMAT", old + b"MEM_FORMAT").replace(b"cpathlib\n", b"cpathlib._local\n")
    assert old in data
    assert b"_local" in data
    (folder / ".metadata").write_bytes(data)
    _same(_all(folder), {"a": torch.ones(2)})


def _listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def _traced(path: Path) -> None:
    with _quiet():
        torch.jit.trace(nn.Linear(1, 1), torch.ones(1, 1)).save(str(path))


def _archived(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.add(__file__, "storages")


def _zipped(path: Path, **files: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)


def _arrays(path: Path, save: Callable[..., None]) -> None:
    with path.open("wb") as file:
        save(file, numpy.ones(2))


def _folder(path: Path, name: str | None = None) -> None:
    path.mkdir()
    if name is not None:
        (path / name).write_bytes(b"x")


NO_CHECKPOINTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (str, "No such file"),
    "empty": (Path.touch, "is empty"),
    "text": (lambda path: path.write_text("hello\nworld\n"), "is text"),
    "lfs": (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid x\n"), "git lfs pull"),
    "npz": (partial(_arrays, save=numpy.savez), "NumPy .npz"),
    "npy": (partial(_arrays, save=numpy.save), "NumPy .npy"),
    "zip": (partial(_zipped, **{"a/b.txt": "hello"}), "foreign zip"),
    "empty zip": (_zipped, "foreign zip"),
    "tar": (_archived, "tar archive"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps({"a": 1})), "not opened"),
    "pipe": (os.mkfifo, "is a pipe"),
    "socket": (_listening, "is a socket"),
    "script": (_traced, "TorchScript"),
    "folder": (_folder, "neither .metadata nor"),
    "half a folder": (partial(_folder, name="__0_0.distcp"), "was not finished"),
    "ranks": (partial(_folder, name="__0.metadata"), "an index per rank (__0.metadata)"),
    "noise": (lambda path: path.write_bytes(random.Random(0).randbytes(600)), "no known kind"),
}


@pytest.mark.parametrize("kind", NO_CHECKPOINTS)
def test_what_is_no_checkpoint(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name = {"text": "is", "empty": "a\nb\x1b[31m"}.get(kind, "x")
    write, text = NO_CHECKPOINTS[kind]
    write(Path(name))
    assert _refused(name, text).startswith(f"{failures.one_line(name)}: ")


def test_strange_paths(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"\x00" * 20)
    piece = str(tmp_path / "__0_0.distcp")
    for path, text in (("/dev/zero", "is a device"), ("a\0b", ""), ("x" * 5000, ""), (piece, "name its folder")):
        _refused(path, text)
    data = os.fsencode(_save(tmp_path / "a.pt", {"a": 1}))
    assert open_source(data).path == os.fsdecode(data)  # type: ignore[arg-type]


def test_panics_are_caught_and_interrupts_are_not() -> None:
    class PanicException(BaseException):
        """Stands in for the exception that safetensors' Rust code raises."""

    with pytest.raises(CheckpointError, match="x: cannot be read: PanicException: oh no"), failures.reading("x"):
        raise PanicException("oh\nno")
    with pytest.raises(KeyboardInterrupt), failures.reading("x"):
        raise KeyboardInterrupt
    with pytest.raises(CheckpointError, match="x: cannot be read: MemoryError"), failures.reading("x"):
        raise MemoryError


def _read_and_tell_memory(words: list[str]) -> int:
    """Read a checkpoint. Print by how many bytes the memory without mapped pages grew, and how many tensors hold the
    number in their names."""

    def anonymous() -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.partition("RssAnon:")[2].split()[0]) * 1024

    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: return freed memory to the system at once.
    before, peak, right = anonymous(), 0, 0
    with contextlib.suppress(CheckpointError):
        source = open_source(words[0])
        for index, entry in enumerate(source.entries):
            tensor = source.read(index)
            right += float(tensor[-1]) == float(entry.name[1:])
            peak = max(peak, anonymous() - before)
    print(peak, right)
    return 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors", "DCP", "claims two terabytes"])
def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, kind: str) -> None:
    """Reading 5 tensors of 10 MB takes the memory of one, without mapped pages."""
    path, hostile = tmp_path / "saved", kind.startswith("claims")
    if hostile:
        with zipfile.ZipFile(_save(path, {"a": torch.ones(4)})) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
            pickled = archive.read(name)
        _rezip(path, {"data.pkl": pickled.replace(b"K\x04", b"\x8a\x06" + (1 << 40).to_bytes(6, "little"))})
    else:
        {**FILES, **DCP}[kind](path, {f"t{i}": torch.full((10 << 18,), float(i)) for i in range(5)})
    done = forked.run([str(path)], None, {}, main=_read_and_tell_memory)
    assert done.returncode == 0, done.stderr
    peak, right = map(int, done.stdout.split())
    assert right == (0 if hostile else 5)
    assert peak < 2 * 10 * 2**20
