"""Models do not share state: two models in one job, copies, pickles, and restored models."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

import fp8dist
from fp8dist import DelayedScaling, Event, Slot, StateManager
from fp8dist.errors import ConfigurationError
from tests.support.counted import no_garbage
from tests.support.parallel import same_on_all_ranks
from tests.support.ranks import RankPool, on_ranks
from tests.support.states import bits, state_of

UPDATES = pytest.mark.parametrize("update", ["same_step", "next_step"])


class _OneLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)
        nn.init.ones_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class _Training:
    """Issue 814's script, one iteration at a time."""

    def __init__(self, update: str) -> None:
        self.model = _OneLinear()
        self.manager = fp8dist.prepare(self.model, DelayedScaling(history_len=4, update=update), group=dist.group.WORLD)
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=1e-3)
        self.manager.attach(self.ddp, optimizer=self.optimizer)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.data = torch.rand(16, 64, generator=generator) * (1 + dist.get_rank())
        self.losses: list[float] = []

    def iterate(self) -> None:
        loss = self.ddp(self.data).square().mean()
        self.losses.append(loss.item())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def result(self) -> Any:
        return state_of(self.manager), bits(self.model.linear.weight), self.losses, self.manager.steps


ORDERS = {"one after the other": (0, 0, 1, 1), "in turns": (0, 1, 0, 1), "the other is dead": (0, 0, 1, None, 1)}
"""Which of the two models takes a step, and when the first is deleted (None)."""


def _issue_814(way: str, update: str) -> list[Any]:
    jobs: dict[int, _Training] = {}
    results: dict[int, Any] = {}
    for which in ORDERS[way]:
        if which is None:
            results[0] = jobs.pop(0).result()
            gc.collect()
        else:
            if which not in jobs:
                jobs[which] = _Training(update)
            jobs[which].iterate()
    results |= {which: job.result() for which, job in jobs.items()}
    return [results[0], results[1]]


@UPDATES
@pytest.mark.parametrize("way", ORDERS)
def test_issue_814_two_models_in_one_job(two_ranks: RankPool, way: str, update: str) -> None:
    results = two_ranks.run(_issue_814, way, update)
    state, _weight, losses, steps = results[0][0]
    assert results[0][0] == results[0][1]
    assert results[1][0] == results[1][1]
    assert results[0][0][:2] == results[1][0][:2]
    assert steps == 2
    assert state["linear", "input"]["counters"] == [2, 0]
    amaxes = state["linear", "input"]["history"]
    assert amaxes[:2] == [0, 0]
    assert amaxes[2] == amaxes[3] != 0
    assert losses[0] != losses[1]
    assert losses != results[1][0][2]


def _whole_run(update: str, seed: int) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4, update=update), group=dist.group.WORLD)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    manager.attach(ddp, optimizer=optimizer)
    torch.manual_seed(seed + dist.get_rank())
    losses = []
    for _ in range(6):
        loss = ddp(torch.randn(16, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, state_of(manager), [bits(p) for p in model.parameters()]


@UPDATES
def test_two_runs_with_one_seed_are_equal(two_ranks: RankPool, update: str) -> None:
    first = two_ranks.run(_whole_run, update, 1)
    assert two_ranks.run(_whole_run, update, 1) == first
    assert two_ranks.run(_whole_run, update, 2) != first


def _model() -> nn.Sequential:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    return model


def _train(model: nn.Module, manager: StateManager, data: list[Tensor], attach: bool = True) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if attach:
        manager.attach(optimizer=optimizer)
    for x in data:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _data(seed: int, steps: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 32, generator=generator) for _ in range(steps)]


@UPDATES
def test_a_copy_has_its_own_state(update: str) -> None:
    model = _model()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4, update=update))
    _train(model, manager, _data(1))
    twin = copy.deepcopy(model)
    twins = fp8dist.get_manager(twin)
    assert twins is not manager
    assert fp8dist.get_manager(model) is manager
    before = state_of(manager)
    assert state_of(twins) == before
    _train(twin, twins, _data(2))
    assert state_of(manager) == before
    assert state_of(twins) != before
    kept = state_of(twins)
    _train(model, manager, _data(2))
    assert state_of(manager) == kept == state_of(twins)  # The same training gives the same state.
    for mine, theirs in zip(model.parameters(), twin.parameters()):
        assert bits(mine) == bits(theirs)


def test_a_copy_made_before_anything_ran() -> None:
    model = _model()
    fp8dist.prepare(model)
    twin = copy.deepcopy(model)
    _train(twin, fp8dist.get_manager(twin), _data(1))
    assert fp8dist.get_manager(twin).steps == 3
    assert fp8dist.get_manager(model).steps == 0


def test_a_copy_of_a_part_does_not_pretend() -> None:
    model = _model()
    manager = fp8dist.prepare(model)
    part = copy.deepcopy(model[0])
    part(torch.randn(4, 32)).sum().backward()
    manager.step()
    assert manager.slot("0", "input").amax == 0


@UPDATES
@on_ranks(2)
def test_a_copy_in_mid_flight_syncs_only_once_attached(update: str) -> None:
    model = _model()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4, update=update), group=dist.group.WORLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.attach(optimizer=optimizer)
    data = _data(10 + dist.get_rank(), 4)
    model(data[0]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    twin = copy.deepcopy(model)  # Under next_step a sync is pending now.
    twins = fp8dist.get_manager(twin)
    at_copy = state_of(twins)
    assert state_of(manager) == at_copy
    assert at_copy["0", "input"]["counters"] == [1, 0]
    with pytest.raises(ConfigurationError, match=r"attach\(\) first"):
        twins.step()
    twin(data[1]).sum().backward()  # Unsynced until attached, and without the original's hooks.
    with pytest.raises(ConfigurationError, match=r"attach\(\) first"):
        twins.step()
    assert (manager.steps, twins.steps) == (1, 1)
    twins.reset()
    twins.load_state_dict(manager.state_dict())
    for parameter in twin.parameters():
        parameter.grad = None
    _train(model, manager, data[2:])
    assert state_of(twins) == at_copy
    _train(twin, twins, data[2:])
    assert state_of(manager) == state_of(twins) != at_copy
    assert [bits(p) for p in twin.parameters()] == [bits(p) for p in model.parameters()]
    same_on_all_ranks((at_copy, state_of(manager)))


@UPDATES
def test_pickle_without_a_group(update: str) -> None:
    model = _model()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4, update=update))
    _train(model, manager, _data(1))
    twin = pickle.loads(pickle.dumps(model))
    twins = fp8dist.get_manager(twin)
    assert state_of(twins) == state_of(manager)
    assert twins.recipe == manager.recipe
    assert twins.slots == manager.slots
    _train(model, manager, _data(2))
    _train(twin, twins, _data(2))
    assert state_of(twins) == state_of(manager)
    with torch.no_grad():
        assert bits(twin(_data(3)[0])) == bits(model(_data(3)[0]))


@pytest.mark.parametrize("wraps", [False, True], ids=["model", "wrapper"])
@on_ranks(2)
def test_pickle_with_a_group_says_what_to_do_instead(wraps: bool) -> None:
    model = _model()
    manager = fp8dist.prepare(model, group=dist.group.WORLD)
    pickled = DistributedDataParallel(model) if wraps else model
    manager.attach(pickled, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigurationError) as caught:
        pickle.dumps(pickled)
    text = str(caught.value)
    assert "state_dict()" in text
    assert "prepare()" in text


@on_ranks(2)
def test_an_attached_wrapper_without_shared_state_is_saved_as_plain_ddp_is() -> None:
    model = _model()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4), amax_sync=False)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    manager.attach(ddp, optimizer=optimizer)
    ddp(_data(1)[0]).square().mean().backward()
    optimizer.step()
    twin, alone = (pickle.loads(pickle.dumps(saved)) for saved in (ddp, model))
    assert type(twin) is DistributedDataParallel
    assert state_of(fp8dist.get_manager(twin)) == state_of(manager)
    assert bits(twin(_data(3)[0])) == bits(alone(_data(3)[0]))


def test_restore_gives_plain_linears_back() -> None:
    model = _model()
    names = list(model.state_dict())
    parameters = dict(model.named_parameters())
    attributes = set(model[0].__dict__)
    forwards: list[int] = []
    model[0].register_forward_hook(lambda *_: forwards.append(1))
    manager = fp8dist.prepare(model)
    assert type(model[0]) is not nn.Linear
    assert list(model.state_dict()) == names
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.attach(optimizer=optimizer)
    model(_data(1)[0]).sum().backward()
    optimizer.step()
    hooks = (len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks))
    assert fp8dist.restore(model) is model
    assert type(model[0]) is nn.Linear
    assert type(model[2]) is nn.Linear
    assert set(model[0].__dict__) == attributes
    assert list(model.state_dict()) == names
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert hooks == (1, 1)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    x = _data(2)[0]
    forwards.clear()
    hidden = torch.relu(nn.functional.linear(x, model[0].weight, model[0].bias))
    assert bits(model(x)) == bits(nn.functional.linear(hidden, model[2].weight, model[2].bias))
    assert forwards == [1]
    with pytest.raises(ConfigurationError, match="was not prepared"):
        fp8dist.get_manager(model)
    with pytest.raises(ConfigurationError, match="restore"):
        manager.attach()
    again = fp8dist.prepare(model)
    assert again.slots == manager.slots
    assert again.steps == 0


class _Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


@pytest.mark.parametrize("place", [0, 2])
def test_restore_under_a_parametrization_is_refused(place: int) -> None:
    model = _model()
    manager = fp8dist.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.attach(optimizer=optimizer)
    x = _data(1)[0]
    model(x).sum().backward()
    optimizer.step()
    parametrize.register_parametrization(model[place], "weight", _Halved())
    kind = type(model[place])
    with torch.no_grad():
        before = bits(model(x))
    with pytest.raises(ConfigurationError, match=r"undo that before restore\(\)"):
        fp8dist.restore(model)
    assert type(model[place]) is kind
    with torch.no_grad():
        assert bits(model(x)) == before
    assert fp8dist.get_manager(model) is manager
    parametrize.remove_parametrizations(model[place], "weight")
    fp8dist.restore(model)
    assert type(model[0]) is type(model[2]) is nn.Linear


def test_two_prepared_parts_have_one_manager_each() -> None:
    model = nn.ModuleList([nn.Sequential(nn.Linear(16, 16)), nn.Sequential(nn.Linear(16, 16))])
    managers = [fp8dist.prepare(part) for part in model]
    model[0](torch.ones(2, 16)).sum().backward()
    for manager in managers:
        manager.step()
    assert managers[0].slot("0", "input").amax == 1
    assert managers[1].slot("0", "input").amax == 0
    with pytest.raises(ConfigurationError, match="2 prepared models"):
        fp8dist.get_manager(model)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(32, 32, bias=False)
        self.a = nn.Linear(32, 32, bias=False)
        self.a.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.b(x))


def test_tied_weights_have_one_slot() -> None:
    model = _Tied()
    nn.init.constant_(model.a.weight, 0.25)
    manager = fp8dist.prepare(model, DelayedScaling(history_len=2))
    assert manager.slots == (
        Slot("a", "grad_output"),
        Slot("a", "input"),
        Slot("a", "weight"),
        Slot("b", "grad_output"),
        Slot("b", "input"),
    )
    manager.attach()
    model(torch.ones(4, 32)).sum().backward()
    manager.step()
    assert (
        manager.slot("a", "weight").amax_history.tolist()
        == [0.0, 0.25]
        == manager.slot("b", "weight").amax_history.tolist()
    )
    assert manager.slot("a", "weight").scale.data_ptr() == manager.slot("b", "weight").scale.data_ptr()
    assert manager.slot("b", "input").amax == 1
    assert manager.slot("a", "input").amax == 8


def test_register_and_record() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    manager = fp8dist.prepare(model, DelayedScaling(history_len=2))
    slot = manager.register("mine", "grad_output", "e5m2")
    assert slot == Slot("mine", "grad_output")
    assert slot in manager.slots
    assert len(manager.slots) == 4
    with pytest.raises(ConfigurationError, match="mine:grad_output"):
        manager.register("mine", "grad_output", "e4m3")
    with pytest.raises(ConfigurationError, match="0:input"):
        manager.register("0", "input", "e4m3")
    with pytest.raises(ConfigurationError, match="e4m3, e5m2, got 'fp8'"):
        manager.register("other", "input", "fp8")
    with pytest.raises(ConfigurationError, match="input, weight, grad_output, got 'output'"):
        manager.register("other", "output", "e4m3")
    assert len(manager.slots) == 4
    model(torch.full((2, 16), 3.0)).sum().backward()  # Modules find their slots in the larger arena.
    x = torch.tensor([1.0, -7.0], requires_grad=True)
    manager.slot("mine", "grad_output").record(x)
    manager.slot("mine", "grad_output").record(x / 2)
    assert manager.slot("mine", "grad_output").amax == 0
    manager.step()
    assert manager.slot("mine", "grad_output").amax == 7
    assert manager.slot("mine", "grad_output").scale == 57344 / 7
    assert manager.slot("0", "input").amax == 3
    with pytest.raises(ConfigurationError, match=r"register\(\) must come before"):
        manager.register("late", "input", "e4m3")
    with pytest.raises(ConfigurationError, match="nobody:input"):
        manager.slot("nobody", "input").record(x)
    with pytest.raises(ConfigurationError, match="got 'activation'"):
        manager.slot("mine", "activation")


@on_ranks(2)
def test_a_name_of_another_arena_is_taken() -> None:
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})
    manager = fp8dist.prepare(model, group=dist.group.WORLD, groups={"b": alone})
    with pytest.raises(ConfigurationError, match="b:input"):
        manager.register("b", "input", "e4m3")
    assert len(manager.slots) == len(set(manager.slots)) == 6


def test_a_tied_weights_other_name_is_taken() -> None:
    model = _Tied()
    manager = fp8dist.prepare(model)
    with pytest.raises(ConfigurationError, match="b:weight"):
        manager.register("b", "weight", "e4m3")


@UPDATES
@on_ranks(2)
def test_nonfinite_amaxes_are_told(update: str) -> None:
    model = nn.Module()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=2, update=update), group=dist.group.WORLD)
    manager.register("a", "input", "e4m3")
    manager.register("b", "weight", "e5m2")
    manager.attach()
    events: list[Event] = []
    manager.on_event(events.append)
    told = []
    for value in (1.0, float("nan") if dist.get_rank() else 1.0, float("-inf"), 2.0, None):
        if value is not None:
            manager.slot("b", "weight").record(torch.tensor([value]))
            manager.slot("a", "input").record(torch.ones(1))
        manager.step()
        told.append([(e.kind, e.step, e.slots) for e in events])
    slots = (Slot("b", "weight"),)
    second, third = ("nonfinite", 2, slots), ("nonfinite", 3, slots)
    at_once = [[], [second], [second, third], [second, third], [second, third]]
    one_later = [[], [], [second], [second, third], [second, third]]
    assert told == (at_once if update == "same_step" else one_later)
    assert manager.metrics()["fp8/nonfinite_amaxes"] == 2.0


@on_ranks(2)
def test_a_dead_model_takes_its_state_along_without_the_garbage_collector() -> None:
    """GPU memory must not wait for the garbage collector to find a cycle."""
    with no_garbage():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        manager = fp8dist.prepare(model, DelayedScaling(history_len=4), group=dist.group.WORLD)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        manager.attach(model, optimizer=optimizer)
        model(torch.ones(16, 32)).sum().backward()
        optimizer.step()
        watched = {"model": weakref.ref(model), "manager": weakref.ref(manager)}
        watched["arena"] = weakref.ref(manager._syncs[0].arena)
        del model, manager, optimizer
        assert [name for name, reference in watched.items() if reference() is not None] == []


def test_a_manager_does_not_keep_a_destroyed_process_group_alive(tmp_path: Path) -> None:
    """A group that outlives destroy_process_group() aborts the exit of about every second gloo job."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    model = nn.Sequential(nn.Linear(32, 32))
    manager = fp8dist.prepare(model, group=dist.group.WORLD)
    manager.attach()
    manager.step()
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    assert group() is None
    assert manager.steps == 1


def _fails(window: Any) -> Any:
    raise RuntimeError("planted")


def test_a_conversion_that_fails_changes_nothing() -> None:
    """The failing function is a user's callable."""

    def trained(algorithm: Any) -> fp8dist.StateManager:
        torch.manual_seed(0)
        model = nn.Linear(32, 32)
        manager = fp8dist.prepare(model, DelayedScaling(history_len=4, amax_algo=algorithm))
        manager._kept = model  # type: ignore[attr-defined]
        return manager

    saved, other = trained("max"), trained(_fails)
    saved._kept(torch.ones(2, 32)).sum().backward()  # type: ignore[attr-defined]
    saved.step()
    before = other.state_dict()
    with pytest.raises(RuntimeError, match="planted"):
        other.load_state_dict(saved.state_dict(), convert=True)
    assert other.state_dict() == before
