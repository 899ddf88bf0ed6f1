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
from fp8dist import DelayedScaling, Slot, StateManager
from fp8dist.errors import ConfigurationError
from tests.support.counted import no_garbage
from tests.support.parallel import same_on_all_ranks
from tests.support.ranks import on_ranks
from tests.support.states import bits, state_of
from tests.support.training import SmallJob, parameter_bits

UPDATES = pytest.mark.parametrize("update", ["same_step", "next_step"])


@UPDATES
@on_ranks(2)
def test_issue_814_two_models_in_one_job(update: str) -> None:
    """Trained in turns, and one that goes on when the other is dead: each as if it were alone."""
    alone, first, second = (
        SmallJob(DelayedScaling(history_len=4, update=update))  # type: ignore[arg-type]
        for _ in range(3)
    )
    for index in range(2):
        alone.step(index)
    kept = state_of(alone.manager), parameter_bits(alone.net), 2
    for index in range(2):
        first.step(index)
        second.step(index)
    for job in (alone, first, second):
        assert (state_of(job.manager), parameter_bits(job.net), job.manager.steps) == kept
    del first, job
    gc.collect()
    for each in (second, alone):
        each.step(2)
    assert state_of(second.manager) == state_of(alone.manager) != kept[0]
    assert parameter_bits(second.net) == parameter_bits(alone.net)
    same_on_all_ranks(state_of(second.manager))


def _model() -> nn.Sequential:
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    return model


def _train(model: nn.Module, manager: StateManager, data: list[Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
    part = copy.deepcopy(model[0])  # A part has no manager, and changes nothing.
    part(torch.randn(4, 32)).sum().backward()
    for make in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        copied = make(model)
        twins = fp8dist.get_manager(copied)
        before = state_of(manager)
        assert state_of(twins) == before
        assert (twins.recipe, twins.slots) == (manager.recipe, manager.slots)
        _train(copied, twins, _data(2))
        assert fp8dist.get_manager(model) is manager
        assert state_of(manager) == before
        assert (kept := state_of(twins)) != before
        _train(model, manager, _data(2))
        assert state_of(manager) == kept == state_of(twins)  # The same training gives the same state.
        assert [bits(p) for p in model.parameters()] == [bits(p) for p in copied.parameters()]


@UPDATES
@on_ranks(2)
def test_a_copy_in_mid_flight_syncs_only_once_attached(update: str) -> None:
    model = _model()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4, update=update), group=dist.group.WORLD)
    data = _data(10 + dist.get_rank(), 4)
    _train(model, manager, data[:1])
    twin = copy.deepcopy(model)  # Under next_step a sync is pending now.
    twins = fp8dist.get_manager(twin)
    at_copy = state_of(twins)
    assert state_of(manager) == at_copy
    assert at_copy["0", "input"]["counters"] == [1, 0]
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


@on_ranks(2)
def test_pickle_with_a_group_says_what_to_do_instead() -> None:
    job = SmallJob()
    for pickled in (job.net, job.called, job.manager):
        with pytest.raises(ConfigurationError, match=r"cannot be pickled: save manager\.state_dict\(\).*prepare\(\)"):
            pickle.dumps(pickled)


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


def test_prepare_changes_classes_alone_and_restore_gives_plain_linears_back() -> None:
    model = _model()
    keys, modules, parameters = list(model.state_dict()), list(model.modules()), dict(model.named_parameters())
    attributes, before = set(model[0].__dict__), parameter_bits(model)
    forwards: list[int] = []
    model[0].register_forward_hook(lambda *_: forwards.append(1))

    def assert_same() -> None:
        assert (list(model.state_dict()), list(model.modules()), list(model.buffers())) == (keys, modules, [])
        assert all(parameter is parameters[name] for name, parameter in model.named_parameters())

    manager = fp8dist.prepare(model)
    assert_same()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.attach(optimizer=optimizer)
    assert isinstance(model[0], nn.Linear)
    model(_data(1)[0]).sum().backward()
    assert parameter_bits(model) == before
    optimizer.step()
    assert optimizer._optimizer_step_pre_hooks
    assert fp8dist.restore(model) is model
    assert_same()
    assert type(model[0]) is type(model[2]) is nn.Linear
    assert set(model[0].__dict__) == attributes
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    x = _data(2)[0]
    hidden = torch.relu(nn.functional.linear(x, model[0].weight, model[0].bias))
    assert bits(model(x)) == bits(nn.functional.linear(hidden, model[2].weight, model[2].bias))
    assert forwards == [1, 1]
    with pytest.raises(ConfigurationError, match="was not prepared"):
        fp8dist.get_manager(model)
    again = fp8dist.prepare(model)
    assert again.slots == manager.slots
    assert again.steps == 0


class _Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def test_restore_under_a_parametrization_is_refused() -> None:
    model, x = _model(), _data(1)[0]
    manager = fp8dist.prepare(model)
    _train(model, manager, [x])
    parametrize.register_parametrization(model[2], "weight", _Halved())
    kind, before = type(model[2]), bits(model(x))
    with pytest.raises(ConfigurationError, match=r"undo that before restore\(\)"):
        fp8dist.restore(model)
    assert type(model[2]) is kind
    assert bits(model(x)) == before
    assert fp8dist.get_manager(model) is manager
    parametrize.remove_parametrizations(model[2], "weight")
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


def test_tied_weights_have_one_slot_with_two_names() -> None:
    """``test_whole_job.py`` compares its state with the oracle's."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    nn.init.constant_(model[0].weight, 0.25)
    model[1].weight = model[0].weight
    manager = fp8dist.prepare(model, DelayedScaling(history_len=2))
    assert [str(slot) for slot in manager.slots] == ["0:grad_output", "0:input", "0:weight", "1:grad_output", "1:input"]
    with pytest.raises(ConfigurationError, match="1:weight"):
        manager.register("1", "weight", "e4m3")
    assert manager.slot("0", "weight").scale.data_ptr() == manager.slot("1", "weight").scale.data_ptr()
    model(torch.ones(4, 32)).sum().backward()
    assert (model[0].weight.grad == 4 * (8 + 32 * 0.25)).all()  # Of both.


def test_register_and_record() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    manager = fp8dist.prepare(model, DelayedScaling(history_len=2))
    slot = manager.register("mine", "grad_output", "e5m2")
    assert slot == Slot("mine", "grad_output")
    assert slot in manager.slots
    with pytest.raises(ConfigurationError, match="mine:grad_output"):
        manager.register("mine", "grad_output", "e4m3")
    with pytest.raises(ConfigurationError, match="0:input"):
        manager.register("0", "input", "e4m3")
    assert len(manager.slots) == 4
    model(torch.full((2, 16), 3.0)).sum().backward()  # Modules find their slots in the larger arena.
    x = torch.tensor([1.0, -7.0], requires_grad=True)
    mine = manager.slot(*slot)
    mine.record(x)
    mine.record(x / 2)
    assert mine.amax == 0
    manager.step()
    assert (mine.amax, mine.scale) == (7, 57344 / 7)
    assert manager.slot("0", "input").amax == 3
    with pytest.raises(ConfigurationError, match=r"register\(\) must come before"):
        manager.register("late", "input", "e4m3")


@on_ranks(2)
def test_a_name_of_another_arena_is_taken() -> None:
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(16, 16)})
    manager = fp8dist.prepare(model, group=dist.group.WORLD, groups={"b": alone})
    with pytest.raises(ConfigurationError, match="b:input"):
        manager.register("b", "input", "e4m3")
    assert len(manager.slots) == len(set(manager.slots)) == 6


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
        with torch.no_grad():
            model[0].weight.mul_(3)
        model(torch.ones(16, 32)).sum().backward()
        watched = {"model": weakref.ref(model), "manager": weakref.ref(manager)}
        watched["arena"] = weakref.ref(manager._syncs[0].arena)
        del model, manager, optimizer
        assert [name for name, reference in watched.items() if reference() is not None] == []


def test_a_manager_does_not_keep_a_destroyed_process_group_alive(tmp_path: Path) -> None:
    """A group that outlives destroy_process_group() aborts the exit of about every second gloo job."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    model = nn.Sequential(nn.Linear(32, 32))
    manager = fp8dist.prepare(model, group=dist.group.WORLD)
    manager.step()  # In a group of one rank, also without attach().
    manager.attach()
    manager.step()
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    assert group() is None
    assert manager.steps == 2


def _fails(window: Any) -> Any:
    raise RuntimeError("planted")


def test_a_conversion_that_fails_changes_nothing() -> None:
    """The failing function is a user's callable."""

    models = [nn.Linear(32, 32) for _ in range(2)]
    saved, other = (
        fp8dist.prepare(model, DelayedScaling(history_len=4, amax_algo=algorithm))
        for model, algorithm in zip(models, ("max", _fails))
    )
    models[0](torch.ones(2, 32)).sum().backward()
    saved.step()
    before = other.state_dict()
    with pytest.raises(RuntimeError, match="planted"):
        other.load_state_dict(saved.state_dict(), convert=True)
    assert other.state_dict() == before
