"""Reading a damaged checkpoint succeeds, or raises CheckpointError with one line that names the checkpoint."""

from __future__ import annotations

import io
import itertools
import pickle
import shutil
import struct
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import fp8dist
from fp8dist import DelayedScaling
from fp8dist.errors import CheckpointError
from fp8dist.files.sources import open_source
from tests.support.pickles import LEGACY_HEAD, bombs

# A checkpoint as {file name: content}. A checkpoint of a single file has the name "".
Content = dict[str, bytes]
INTERESTING = [0, 1, 2, 0x7F, 0x80, 0x81, 0x8A, 0x93, 0x95, 0xFF, *b"(.)]}0bcegjqrstuNQRXK"]


def _value() -> dict[str, Any]:
    weight = torch.arange(12.0).reshape(3, 4)
    fp8 = torch.ones(5).to(torch.float8_e4m3fn)
    return {"w": weight, "t": weight.t(), "fp8": fp8, "lr": 0.5, "names": ["x", b"y"], "p": nn.Parameter(torch.ones(2))}


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Content]:
    """One small checkpoint of each kind."""
    folder = tmp_path_factory.mktemp("valid")
    torch.save(_value(), folder / "zip")
    torch.save(_value(), folder / "legacy", _use_new_zipfile_serialization=False)
    save_file({"w": torch.ones(3, 4), "b": torch.zeros(2, dtype=torch.bfloat16)}, folder / "safetensors")
    fp8dist.prepare(nn.Sequential(nn.Linear(16, 16)), DelayedScaling(history_len=2)).save(folder / "state")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(_value(), checkpoint_id=folder / "dcp")
    found = {name: {"": (folder / name).read_bytes()} for name in ("zip", "legacy", "safetensors", "state")}
    found["folder"] = {"a.safetensors": found["safetensors"][""], "config.json": b"{}"}
    found["dcp"] = {path.name: path.read_bytes() for path in (folder / "dcp").iterdir()}
    return found


def _read_all(content: Content, marker: Path | None = None) -> bool:
    """Return True if the checkpoint can be read, False for a proper CheckpointError; fail on any other outcome."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        if "" in content:
            path.write_bytes(content[""])
        else:
            path.mkdir()
            for name, data in content.items():
                (path / name).write_bytes(data)
        try:
            source = open_source(path)
            for index, entry in enumerate(source.entries):
                tensor = source.read(index)
                assert tuple(tensor.shape) == entry.shape
            return True
        except CheckpointError as error:
            text = str(error)
            assert text.startswith(str(path))
            assert text.isprintable()
            return False
        finally:
            assert marker is None or not marker.exists()
            shutil.rmtree(path, ignore_errors=True)


@st.composite
def _mutation(draw: st.DrawFn) -> Callable[[bytes, bytes], bytes]:
    """Draw a function (data, other) that changes some bytes of ``data``; a splice copies from ``other``."""
    kind = draw(st.sampled_from(["cut", "flip", "set", "insert", "delete", "double", "splice", "number"]))
    place, length = draw(st.floats(0, 1)), draw(st.integers(1, 40))
    byte = draw(st.one_of(st.sampled_from(INTERESTING), st.integers(0, 255)))
    size = draw(st.sampled_from([1, 2, 4, 8]))
    number = draw(st.sampled_from([0, 1, -1, 1 << 31, (1 << 63) - 1, 1 << 40, 255])) % (1 << 8 * size)

    def change(data: bytes, other: bytes) -> bytes:
        at = int(place * len(data))
        head, tail = data[:at], data[at:]
        if kind == "cut":
            return head
        if kind == "flip":
            return head + bytes(b ^ (1 << byte % 8) for b in tail[:1]) + tail[1:]
        if kind == "set":
            return head + bytes([byte]) + tail[1:]
        if kind == "insert":
            return head + bytes([byte]) * length + tail
        if kind == "delete":
            return head + tail[length:]
        if kind == "double":
            return head + tail[:length] + tail
        if kind == "splice":
            return head + other[int(place * len(other)) :]
        return head + number.to_bytes(size, "little") + tail[size:]

    return change


def _rezipped(data: bytes, change: Callable[[bytes], bytes], record: str = "data.pkl") -> bytes:
    """Return the archive with one record changed and valid checksums, so that the change reaches the unpickler."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, change(content) if name.partition("/")[2] == record else content)
    return stream.getvalue()


def _remade(content: Content, changes: dict[Any, Callable[[bytes], bytes]]) -> Content:
    """Return a DCP folder with some pieces changed and their offsets and lengths updated in the index."""
    index, data = pickle.loads(content[".metadata"]), b""
    for key, place in sorted(index.storage_data.items(), key=lambda item: item[1].offset):
        piece = content[place.relative_path][place.offset : place.offset + place.length]
        piece = changes[key.fqn](piece) if key.fqn in changes else piece
        index.storage_data[key] = type(place)("pieces", len(data), len(piece))
        data += piece
    return {".metadata": pickle.dumps(index), "pieces": data}


KINDS = ["zip", "legacy", "safetensors", "state", "folder", "dcp"]


def _fuzz(valid: dict[str, Content], data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([*KINDS, "pickle", "piece", "value", "record", "opcodes", "header"]))
    if kind == "header":
        header, length = data.draw(st.binary(max_size=60)), data.draw(st.integers(0, (1 << 64) - 1))
        _read_all({"": struct.pack("<Q", length) + b"{" + header})
        _read_all({"a.safetensors": struct.pack("<Q", len(header)) + header})
        return
    if kind == "opcodes":
        opcodes = data.draw(st.lists(st.sampled_from([bytes([i]) for i in INTERESTING]), max_size=40))
        pickled = b"\x80\x02" + b"".join(opcodes) + data.draw(st.binary(max_size=20))
        _read_all({"": _rezipped(valid["zip"][""], lambda _: pickled)})
        _read_all({**valid["dcp"], ".metadata": pickled})
        return
    changes = data.draw(st.lists(_mutation(), min_size=1, max_size=3))
    other = next(iter(valid[data.draw(st.sampled_from(KINDS))].values()))

    def change(content: bytes) -> bytes:
        for one in changes:
            content = one(content, other)
        return content

    if kind == "pickle":
        content = {"": _rezipped(valid["zip"][""], change)}
    elif kind == "record":
        record = data.draw(st.sampled_from(["data/0", "byteorder", "version", ".format_version", "data/1"]))
        content = {"": _rezipped(valid["zip"][""], change, record)}
    elif kind in ("piece", "value"):
        name = data.draw(st.sampled_from(["w", "fp8", "p"] if kind == "piece" else ["lr", "names"]))
        content = _remade(valid["dcp"], {name: lambda piece: _rezipped(piece, change)})
    else:
        content = dict(valid[kind])
        name = data.draw(st.sampled_from(sorted(content)))
        content[name] = change(content[name])
    _read_all(content)


@pytest.mark.slow
def test_a_flipped_bit_of_what_has_no_checksum(valid: dict[str, Content]) -> None:
    """An index has none. If it is still readable, reading it must be safe. The files themselves are valid."""
    for content in valid.values():
        assert _read_all(content)
    assert _read_all(_remade(valid["dcp"], {"w": lambda piece: _rezipped(piece, bytes)}))
    index = valid["dcp"][".metadata"]
    for place in range(0, len(index), 11):
        broken = bytearray(index)
        broken[place] ^= 1 << place % 8
        _read_all({**valid["dcp"], ".metadata": bytes(broken)})


_UNHURRIED = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@pytest.mark.slow
@settings(_UNHURRIED, max_examples=100)
@given(data=st.data())
def test_damaged_files(valid: dict[str, Content], data: st.DataObject) -> None:
    _fuzz(valid, data)


@pytest.mark.long
@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(4))  # Split, so that two workers can share the test.
@settings(_UNHURRIED, max_examples=7_500 // 4)
@given(data=st.data())
def test_damaged_files_at_length(valid: dict[str, Content], part: int, data: st.DataObject) -> None:
    _fuzz(valid, data)


@pytest.mark.parametrize(("name", "protocol"), [*zip(bombs(Path()), itertools.cycle((0, 2, 4))), ("nested", 5)])
def test_crafted_pickles(valid: dict[str, Content], name: str, protocol: int, tmp_path: Path) -> None:
    """A crafted pickle never runs: alone, appended, or in place of a pickle of any kind of checkpoint."""
    marker = tmp_path / "marker"
    if name in ("os.system", "eval", "exec", "nested"):  # They are what they seem.
        pickle.loads(pickle.dumps(bombs(tmp_path / "exploded")[name]))
        assert (tmp_path / "exploded").exists()
    bomb = pickle.dumps(bombs(marker)[name], protocol)
    index = valid["dcp"]
    assert not _read_all({"": bomb}, marker)
    assert not _read_all({"": LEGACY_HEAD + bomb}, marker)
    assert not _read_all({"": LEGACY_HEAD + pickle.dumps({}, 2) + bomb}, marker)
    assert not _read_all({"": _rezipped(valid["zip"][""], lambda _: bomb)}, marker)
    assert not _read_all({**index, ".metadata": bomb}, marker)
    assert not _read_all(_remade(index, {"w": lambda piece: _rezipped(piece, lambda _: bomb)}), marker)
    assert not _read_all(_remade(index, {"w": lambda _: bomb}), marker)
    # A non-tensor value is listed as its bytes; a CheckpointError is fine, too, if the reader cannot tell its kind.
    _read_all(_remade(index, {"lr": lambda piece: _rezipped(piece, lambda _: bomb)}), marker)
    assert _read_all(_remade(index, {"lr": lambda _: bomb}), marker)
    # Inside an otherwise valid index.
    metadata = pickle.loads(index[".metadata"])
    metadata.planner_data = bombs(marker)[name]
    assert not _read_all({**index, ".metadata": pickle.dumps(metadata, protocol)}, marker)
