"""torch.distributed.checkpoint (DCP): bitwise resumes, other numbers of ranks, keys, and blobs that do not fit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import DelayedScaling, StateManager
from fp8dist.errors import CheckpointError
from tests.support.ranks import RankPool, on_ranks
from tests.support.states import state_of
from tests.support.suite import few
from tests.support.training import batch, bits, make_net

# DCP warns if there is no process group.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is")]

States = dict[tuple[str, str], dict[str, Any]]


class _Training:
    """Model and optimizer as one Stateful, as DCP expects."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )


class _Job:
    """A net that trains under ``layout`` (DDP or FSDP2), or alone without a process group.

    ``source``: a folder to load from, before ``attach`` or (``late``) after it.
    """

    def __init__(
        self, source: str | None = None, update: str = "same_step", layout: str = "ddp", late: bool = False
    ) -> None:
        self.net = make_net(seed=5 if source else 0)
        shared = dist.is_initialized()
        recipe = DelayedScaling(history_len=6, update=cast(Any, update))
        group = dist.group.WORLD if shared else None
        self.manager = fp8dist.prepare(self.net, recipe, group=group)
        self.model: nn.Module = self.net
        if shared and layout == "ddp":
            self.model = DistributedDataParallel(self.net, find_unused_parameters=True)
        elif shared:
            self.model = fully_shard(self.net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if late:
            self._attach()
        if source is not None:
            self.load(source)
        if not late:
            self._attach()

    def _attach(self) -> None:
        self.manager.attach(self.model, optimizer=self.optimizer)

    def whole(self) -> dict[str, Any]:
        """Return the state to save or load."""
        return {"train": _Training(self.model, self.optimizer), "fp8": self.manager}

    def save(self, folder: str) -> None:
        dcp.save(self.whole(), checkpoint_id=folder)

    def load(self, folder: str) -> None:
        dcp.load(self.whole(), checkpoint_id=folder)

    def train(self, first: int, last: int) -> list[float]:
        """Train steps ``first`` to ``last - 1``. Return their losses."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        losses = []
        for step in range(first, last):
            x, y = batch(rank, step)
            loss = F.mse_loss(self.model(x, skip=step % 3 == 1), y)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def seen(self) -> tuple[int, States, dict[str, bytes]]:
        """Return (step, FP8 state, parameters) for exact comparison."""
        parameters = {name: bits(_whole(p)) for name, p in self.net.named_parameters()}
        return self.manager.steps, state_of(self.manager), parameters


def _whole(parameter: Tensor) -> Tensor:
    whole = getattr(parameter, "full_tensor", None)
    return parameter if whole is None else cast(Tensor, whole())


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("update", "late"), few([("next_step", True), ("next_step", False), ("same_step", True)], ("next_step", True))
)
@on_ranks(2)
def test_a_resumed_run_is_the_same_run(tmp_path: Path, update: str, late: bool) -> None:
    """14 steps, or 7, a checkpoint, new objects and 7 more: losses, weights and FP8 state bit for bit. An asynchronous
    save holds the state of its call."""
    straight = _Job(update=update)
    expected = straight.train(0, 14)
    first = _Job(update=update)
    losses = first.train(0, 7)
    before = first.seen()
    # A separate group: collectives of the saving thread must not mix with those of training.
    group = dist.new_group(backend="gloo")
    future = dcp.async_save(first.whole(), checkpoint_id=tmp_path, process_group=group)
    first.train(7, 11)
    assert first.seen() != before
    cast(Future[Any], future).result()
    del first
    second = _Job(tmp_path, update, late=late)
    assert second.seen() == before
    losses += second.train(7, 14)
    assert (losses, second.seen()) == (expected, straight.seen())


def _continued(source: str | None, target: str, layout: str, steps: int) -> tuple[Any, Any]:
    """Return the state (after loading, ``steps`` steps later when it was saved)."""
    job = _Job(source, layout=layout)
    loaded = job.seen()
    start = job.manager.steps
    job.train(start, start + steps)
    job.save(target)
    return loaded, job.seen()


def test_other_numbers_of_ranks_and_layouts_go_on(two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path) -> None:
    source: str | None = None
    before: Any = None
    stages = [(four_ranks, "ddp"), (two_ranks, "fsdp2"), (four_ranks, "fsdp2"), (None, ""), (two_ranks, "ddp")]
    for number, (pool, layout) in enumerate(stages):
        given = source, str(tmp_path / str(number)), layout, 2
        results = [_continued(*given)] if pool is None else pool.run(_continued, *given)
        loaded, after = results[0]
        assert all(result == (loaded, after) for result in results), "ranks differ"
        if source is not None:
            assert loaded == before, f"stage {number}"
        assert after[1] != loaded[1]
        source, before = given[1], after


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "amax_sync": lambda: {"group": dist.group.WORLD, "amax_sync": False},
    "groups": lambda: {"group": dist.group.WORLD, "groups": {"0": _pairs()[dist.get_rank() // 2]}},
    "stages": lambda: {"group": _pairs()[dist.get_rank() // 2]},
    "all share": lambda: {"group": dist.group.WORLD, "groups": {"0": dist.group.WORLD}},
}


def _pairs() -> list[Any]:
    return [dist.new_group([0, 1]), dist.new_group([2, 3])]


def _two_linears(kind: str) -> StateManager:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    manager = fp8dist.prepare(model, DelayedScaling(history_len=2), **KINDS[kind]())
    manager._tested = model
    return manager.attach()


APART = [[10.0, 10.0]] * 2 + [[11.0, 11.0]] * 2


def _of_pair(rank: int) -> str:
    """Return the key of the ranks 0 and 1, or 2 and 3."""
    return f"ranks{rank}-{hashlib.sha256(f'[{rank}, {rank + 1}]'.encode()).hexdigest()[:16]}"


STATES = [
    ("amax_sync", APART, [["rank0"], ["rank1"], ["rank2"], ["rank3"]]),
    ("groups", [[10.0, 11.0]] * 2 + [[11.0, 11.0]] * 2, [[_of_pair(rank), "shared"] for rank in (0, 0, 2, 2)]),
    ("stages", APART, [[_of_pair(rank)] for rank in (0, 0, 2, 2)]),
    ("all share", [[11.0, 11.0]] * 4, [["shared"]] * 4),
]


@pytest.mark.parametrize(("kind", "amaxes", "keys"), few(STATES, *STATES[:3]))
@on_ranks(4)
def test_states_of_ranks_and_groups_stay_apart(tmp_path: Path, kind: str, amaxes: Any, keys: list[list[str]]) -> None:
    """Inputs are 10 on ranks 0 and 1, 11 on ranks 2 and 3. DCP keeps one value per key, so a key names the ranks that
    share the state."""
    rank = dist.get_rank()
    manager, merged, stored = (_two_linears(kind) for _ in range(3))
    for module in manager._tested:
        module(torch.full((4, 16), 10.0 + rank // 2))
    manager.step()
    states: list[Any] = [None] * 4
    dist.all_gather_object(states, manager.state_dict())
    assert [sorted(state) for state in states] == keys
    merged.load_state_dict({key: value for state in states for key, value in state.items()})
    dcp.save({"fp8": manager}, checkpoint_id=tmp_path)
    dcp.load({"fp8": stored}, checkpoint_id=tmp_path)
    assert state_of(merged) == state_of(stored) == state_of(manager)
    for each in (manager, stored):
        assert [each.slot(name, "input").amax.item() for name in "01"] == amaxes[rank]
    in_files = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert set(in_files) == {f"fp8.{key}" for some in keys for key in some}


def test_missing_keys_and_another_history_length(caplog: pytest.LogCaptureFixture) -> None:
    """tests/state/test_storage.py has what does not fit, and damage."""
    managers = []
    for steps in (5, 1):
        model = nn.Sequential(nn.Linear(16, 16))
        managers.append(fp8dist.prepare(model, DelayedScaling(history_len=3)).attach())
        managers[-1]._tested = model  # type: ignore[attr-defined]
        for step in range(steps):
            model(torch.full((4, 16), 1.0 + step)).sum().backward()
            managers[-1].step()
    saved, manager = managers
    before = state_of(manager)
    blob = saved.state_dict()["shared"]
    others = {"rank1": blob, "rank0": blob}
    with pytest.raises(CheckpointError, match="has no FP8 state 'shared'; there is 'rank0', 'rank1'"):
        manager.load_state_dict(others)
    with pytest.raises(CheckpointError, match="there is nothing"):
        manager.load_state_dict({})
    manager.load_state_dict(others, strict=False)
    assert "has no FP8 state 'shared'; there is 'rank0', 'rank1'" in caplog.text
    assert state_of(manager) == before
    manager.load_state_dict({**others, "rank0": b"of another rank: not looked at", "shared": blob})
    assert state_of(manager) == state_of(saved)
    for length in (1, 2, 4, 7):  # The newest amaxes are kept.
        model = nn.Sequential(nn.Linear(16, 16))
        other = fp8dist.prepare(model, DelayedScaling(history_len=length)).attach()
        other.load_state_dict(saved.state_dict())
        assert other.slot("0", "input").amax_history.tolist() == ([0.0] * length + [3.0, 4.0, 5.0])[-length:]


@on_ranks(2)
def test_one_bad_blob_of_two_changes_nothing() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    manager = fp8dist.prepare(model, group=dist.group.WORLD, groups={"0": alone}).attach()
    early = manager.state_dict()
    model(torch.ones(4, 16)).sum().backward()
    manager.step()
    before = state_of(manager)
    (own,) = (key for key in early if key != "shared")
    texts = []
    for odd in ("shared", own):
        with pytest.raises(CheckpointError) as caught:
            manager.load_state_dict({**early, odd: early[odd][:-1]})
        texts.append(odd in str(caught.value))
    assert texts == [True, True]
    assert state_of(manager) == before
    manager.load_state_dict(early)
    assert state_of(manager) != before
