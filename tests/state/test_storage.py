"""State files: round trips, atomic writes, and an error for every kind of damage."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import re
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor, nn

import fp8dist
from fp8dist import DelayedScaling, StateManager
from fp8dist.errors import CheckpointError
from fp8dist.state import storage
from tests.support.ranks import on_ranks
from tests.support.states import saved_of, state_of


def _prepared(history_len: int = 3, layers: int = 2) -> tuple[nn.Module, StateManager]:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
    return model, fp8dist.prepare(model, DelayedScaling(history_len=history_len))


@pytest.fixture
def trained() -> Iterator[StateManager]:
    """The manager of a model after four steps, one with a NaN, one without its second layer."""
    model, manager = _prepared()
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        x = torch.randn(4, 16, generator=generator)
        if step == 2:
            x[0, 0] = float("nan")
        (model if step != 1 else model[0])(x).sum().backward()
        manager.step()
    yield manager
    del model  # A manager refers to its model weakly.


@pytest.fixture
def saved(trained: StateManager, tmp_path: Path) -> Path:
    path = tmp_path / "state.safetensors"
    trained.save(path)
    return path


@cache
def _used() -> tuple[nn.Module, StateManager]:
    """Return a model after a step. No failed load may change it."""
    model, manager = _prepared()
    model(torch.ones(2, 16)).sum().backward()
    manager.step()
    return model, manager


def _refused(path: Path, strict: bool = True) -> str:
    """Return the error of loading ``path``, and assert that it names the file and that nothing changed."""
    _, manager = _used()
    before, steps = state_of(manager), manager.steps
    with pytest.raises(CheckpointError) as caught:
        manager.load(path, strict=strict)
    assert state_of(manager) == before
    assert manager.steps == steps
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_round_trip(trained: StateManager, saved: Path) -> None:
    _model, other = _prepared()
    other.load(saved)
    assert state_of(other) == state_of(trained)
    assert other.steps == trained.steps == 4
    assert state_of(other)["1", "input"]["counters"] == [2, 1]
    other.load(str(saved))
    again = saved.with_name("again.safetensors")
    other.save(str(again))
    first, second = load_file(saved), load_file(again)
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)


def test_saving_makes_folders_and_overwrites(trained: StateManager, tmp_path: Path) -> None:
    """Without ranks, the rank is 0."""
    path = tmp_path / "a" / "{rank}" / "state"
    trained.save(path)
    trained.reset()
    trained.save(path)
    _model, other = _prepared()
    other.load(tmp_path / "a" / "0" / "state")
    assert state_of(other) == state_of(trained)
    assert os.listdir(tmp_path / "a" / "0") == ["state"]
    device = tmp_path / "null"
    device.symlink_to("/dev/null")
    trained.save(device)
    assert device.is_char_device()


@on_ranks(2)
def test_rank_is_substituted(tmp_path: Path) -> None:
    rank, model = torch.distributed.get_rank(), nn.Module()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=2), amax_sync=False)
    manager.register("a", "input", "e4m3")
    manager.slot("a", "input").record(torch.tensor([1.0 + rank]))
    manager.step()
    path = f"{tmp_path}/{{rank}}/state-{{rank}}.safetensors"
    manager.save(path)
    manager.reset()
    manager.load(path)
    assert manager.slot("a", "input").amax == 1.0 + rank
    assert os.listdir(tmp_path / str(rank)) == [f"state-{rank}.safetensors"]


def test_a_failed_write_leaves_the_old_file(
    trained: StateManager, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During the write, the name still refers to the old state. The new file is on the same file system."""
    old = saved.read_bytes()
    trained.reset()

    def fails(handle: int) -> None:
        assert len(os.listdir(saved.parent)) == 2
        raise OSError("disk full")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    for name, failure, error in (("fsync", fails, OSError), ("replace", killed, KeyboardInterrupt)):
        with monkeypatch.context() as patch:
            patch.setattr(storage.os, name, failure)
            with pytest.raises(error):
                trained.save(saved)
        assert saved.read_bytes() == old
        assert os.listdir(saved.parent) == [saved.name]
    written: list[bytes] = []
    replace = os.replace

    def watching(source: Any, target: Any) -> None:
        assert saved.read_bytes() == old
        assert Path(source).parent == saved.parent
        written.append(Path(source).read_bytes())
        replace(source, target)

    monkeypatch.setattr(storage.os, "replace", watching)
    trained.save(saved)
    assert written == [saved.read_bytes()] != [old]


def test_a_flipped_byte_anywhere_is_found(saved: Path) -> None:
    """Flips bytes in the length, the JSON header, the padding and the numbers."""
    content = saved.read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    rng = random.Random(0)
    places = [*range(12), *rng.sample(range(header), 50), header - 1, *rng.sample(range(header, len(content)), 40)]
    _model, manager = _prepared()
    before = state_of(manager)
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= rng.choice([1, 2, 4, 8, 16, 32, 64, 128, 255])
        saved.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=re.escape(str(saved))):
            manager.load(saved)
    assert state_of(manager) == before


def test_what_is_no_whole_file_of_ours_is_refused(saved: Path, tmp_path: Path) -> None:
    content, path = saved.read_bytes(), tmp_path / "other"
    assert "no such file" in _refused(path)
    _refused(tmp_path)  # A folder.
    for part in (0.0, 0.01, 0.3, 0.6, 0.9, 0.999):
        path.write_bytes(content[: int(part * len(content))])
        _refused(path)
    for other in (content + b"\0" * 8, b"hello " * 100, random.Random(0).randbytes(1000)):
        path.write_bytes(other)
        _refused(path)
    for metadata in (None, {"format": "pt"}):
        save_file({"weight": torch.ones(3)}, path, metadata)
        assert "not an fp8dist state" in _refused(path)


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_no_pickle(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle is rejected without being executed; our own files need no unpickling."""
    bomb = tmp_path / "bomb"
    crater = tmp_path / "crater"
    bomb.write_bytes(pickle.dumps(_Bomb(crater)))
    _refused(bomb)
    torch.save(_Bomb(crater), bomb)
    _refused(bomb)
    assert not crater.exists()

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler", "dump", "dumps", "Pickler"):
        monkeypatch.setattr(pickle, name, forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    monkeypatch.setattr(torch, "save", forbidden)
    _model, manager = _prepared()
    manager.load(saved)
    manager.save(tmp_path / "again")
    assert set(load_file(tmp_path / "again")) == {"step", "scale", "amax", "cold", "counters", "history"}
    with safe_open(saved, "pt") as file:
        json.loads(file.metadata()["header"])


def _rewritten(manager: StateManager, path: Path, **changes: Any) -> Path:
    """Return a file with valid checksum and changed content."""
    path.write_bytes(_blob({**saved_of(manager), **changes}))
    return path


def _blob(state: dict[str, Any]) -> bytes:
    """Return a state as bytes with a valid checksum, for any content."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    text = json.dumps({name: value for name, value in state.items() if name not in tensors})
    checksum = storage._checksum(text, tensors)
    return save(tensors, {"format": "fp8dist-state", "header": text, "sha256": checksum})


def test_bytes_are_those_of_a_file_and_the_same_for_the_same_state(trained: StateManager, saved: Path) -> None:
    """Users who compare or merge checkpoints compare bytes; safetensors orders metadata at random."""
    blobs = {trained.state_dict()["shared"] for _ in range(20)}
    assert blobs == {saved.read_bytes()}
    _model, other = _prepared()
    other.load_state_dict({"shared": blobs.pop()})
    assert state_of(other) == state_of(trained)


def test_another_version_is_refused(trained: StateManager, tmp_path: Path) -> None:
    for version in (0, 1, 2, 4, "3", None):
        text = _refused(_rewritten(trained, tmp_path / "other", version=version))
        assert f"version {version!r}" in text
        assert "reads version 3" in text
    old = {name: value for name, value in saved_of(trained).items() if name not in ("formats", "recipes")}
    with pytest.raises(CheckpointError, match="has version 1, this library reads version 3"):
        trained.load_state_dict({**old, "version": 1})


def test_a_pickled_manager_is_no_state(trained: StateManager) -> None:
    """Its file holds the manager of another model, as ``torch.save({"fp8": manager})`` writes it in one process."""
    with pytest.raises(CheckpointError, match=r"what manager\.state_dict\(\) returned, a dict, got a StateManager"):
        trained.load_state_dict(trained)  # type: ignore[arg-type]


UNFIT: dict[str, tuple[Any, ...]] = {
    "scale": (
        *(torch.ones(5), torch.ones(6, dtype=torch.float64), torch.zeros(6), -torch.ones(6)),
        *(torch.full((6,), value) for value in (math.nan, math.inf)),
    ),
    "amax": (torch.ones(6, 1),),
    "cold": (torch.ones(6),),
    "counters": (torch.ones(2, 6, dtype=torch.int64),),
    "history": (torch.ones(6), torch.ones(6, 0), torch.ones(5, 3)),
    "step": (torch.ones(1, dtype=torch.int64),),
    "slots": ([["0", "input"]] * 6, [["0", "input"]], [1, 2, 3, 4, 5, 6], [["a", "b", "c"]] * 6, None, 7),
    "formats": (["e4m3"] * 5, "e4m3e5", [1] * 6, None),
    "recipes": (["margin"], {}),
    "recipe_of": ([0], "0"),
    "precision": (["fprop"],),
    "tripped": ([99], None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["version", *UNFIT])
def test_content_that_is_missing_or_does_not_fit_is_refused(name: str, trained: StateManager, tmp_path: Path) -> None:
    for value in UNFIT.get(name, ()):
        path = _rewritten(trained, tmp_path / "odd", **{name: value})
        for strict in (True, False):
            _refused(path, strict)
    _model, manager = _used()
    before, state = state_of(manager), saved_of(trained)
    del state[name]
    with pytest.raises(CheckpointError, match=name):
        manager.load_state_dict({"shared": _blob(state)})
    assert state_of(manager) == before


def test_a_window_that_no_run_could_have_is_refused(trained: StateManager) -> None:
    """A non-finite amax in the window would freeze the scale for history_len steps."""
    for value in (math.nan, math.inf):
        state = saved_of(trained)
        state["history"].view(-1)[0] = value
        with pytest.raises(CheckpointError, match="'shared': FP8 state: history"):
            trained.load_state_dict({"shared": _blob(state)})


def test_another_model_is_refused_unless_not_strict(saved: Path) -> None:
    _model, manager = _prepared(layers=3)
    before = state_of(manager)
    with pytest.raises(
        CheckpointError, match="missing slots: 2:grad_output, 2:input, 2:weight; unexpected slots: none"
    ):
        manager.load(saved)
    assert state_of(manager) == before
    manager.load(saved, strict=False)
    after = state_of(manager)
    assert all(after[slot] == before[slot] for slot in after if slot[0] == "2")
    assert all(after[slot] != before[slot] for slot in after if slot[0] == "0")
    _model, manager = _prepared(layers=1)
    with pytest.raises(CheckpointError, match="missing slots: none; unexpected slots: 1:grad_output, 1:input"):
        manager.load(saved)
    manager.load(saved, strict=False)
    assert manager.slot("0", "input").amax > 0
