"""Repair: the minority gets the majority's values, bit for bit, or nothing changes."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fp8dist
from fp8dist import DelayedScaling, StateManager
from fp8dist.errors import DivergenceError
from tests.support.logs import captured_log
from tests.support.parallel import mesh_of, same_on_all_ranks
from tests.support.ranks import RankPool, on_ranks
from tests.support.training import SmallJob, batch, bits, make_net, parameter_bits, state_bits, unwrapped

HANG = 30.0
"""Seconds after which ranks count as hung."""


def _scramble(tensor: Tensor, seed: int) -> None:
    """Change all bits in place, for any strides."""
    tensor = tensor.detach()
    generator = torch.Generator().manual_seed(seed)
    if tensor.dtype is torch.bool:
        tensor.copy_(~tensor)
        return
    nbytes = tensor.numel() * tensor.dtype.itemsize
    noise = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    tensor.copy_(noise.view(tensor.dtype).reshape(tensor.shape))


class Varied(nn.Module):
    """Parameters of many types and layouts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = torch.arange(60.0)
        self.plain = nn.Parameter(torch.randn(5, 7))
        self.transposed = nn.Parameter(torch.randn(6, 4).t())
        self.sliced = nn.Parameter(self.base.view(6, 10)[1:5, 2:9:3])
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.narrow = nn.Parameter(torch.randn(3, 3).to(torch.bfloat16))
        self.channels_last = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        frozen = {
            "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn),
            "fp8_wide": torch.randn(4, 4).to(torch.float8_e5m2).t(),
            "whole": torch.arange(9),
            "yes": torch.tensor([True, False, True]),
            "imaginary": torch.randn(3, dtype=torch.complex64),
            "empty": torch.empty(0, 3),
            "large": torch.randn(100_000),
        }
        for name, value in frozen.items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        with torch.no_grad():
            self.plain[1, 1] = float("nan")
            self.plain.view(torch.int32)[1, 1] += 5  # Changes a NaN's payload.
            self.plain[0, 0] = -0.0


def _everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, bytes]:
    found = {name: bits(p) for name, p in model.named_parameters()}
    found |= {f"{name}.grad": bits(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    names = {id(p): name for name, p in model.named_parameters()}
    for p, state in optimizer.state.items():
        found |= {f"{names[id(p)]}.{key}": bits(value) for key, value in state.items()}
    return found


@pytest.mark.slow
@on_ranks(3)
def test_parameters_gradients_and_optimizer_state_are_repaired_bit_for_bit() -> None:
    odd, reference = 0, 1
    model = Varied()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    for i, p in enumerate(trained):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(p.dtype)
    optimizer.step()
    healthy = _everything(model, optimizer)
    before = {name: (p.data_ptr(), p.stride(), id(p)) for name, p in model.named_parameters()}
    untouched = model.base.clone()
    if dist.get_rank() == odd:
        for i, p in enumerate(model.parameters()):
            _scramble(p, i)
            if p.grad is not None:
                _scramble(p.grad, 100 + i)
        for i, state in enumerate(optimizer.state.values()):
            for j, value in enumerate(state.values()):
                _scramble(value, 1000 + 10 * i + j)
    damaged = _everything(model, optimizer)
    was_damaged = [name for name in healthy if healthy[name] != damaged[name]]
    assert len(was_damaged) == (12 + 6 + 18 if dist.get_rank() == odd else 0)
    with captured_log():
        report = fp8dist.check(model, group=dist.group.WORLD, gradients=True, optimizer=optimizer, policy="repair")
        again = fp8dist.check(model, group=dist.group.WORLD, gradients=True, optimizer=optimizer, policy="warn")
    assert (report.consistent, again.consistent, again.findings) == (True, True, ())
    assert _everything(model, optimizer) == healthy
    assert {name: (p.data_ptr(), p.stride(), id(p)) for name, p in model.named_parameters()} == before
    inside = torch.zeros(6, 10, dtype=torch.bool)
    inside[1:5, 2:9:3] = True
    assert torch.equal(model.base[~inside.view(-1)], untouched[~inside.view(-1)])
    names = {(f.kind, f.name) for f in report.findings}
    assert len(names) == 12 + 6 + 18
    assert {(f.ranks, f.reference_rank) for f in report.findings} == {((odd,), reference)}
    said = {"parameter": "parameter", "gradient": "gradient of", "optimizer": "optimizer state"}
    places = f"on rank {odd}, from rank {reference}"
    assert set(report.repaired) == {f"{said[kind]} '{name}' {places}" for kind, name in names}
    same_on_all_ranks(report.repaired)


def _slots(policy: str = "warn") -> tuple[nn.Module, StateManager]:
    model = nn.Module()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=5), group=dist.group.WORLD, check_policy=policy)
    for name in "abc":
        manager.register(name, "input", "e4m3")
    manager.attach()
    for step in range(7):
        for i, name in enumerate("abc"):
            manager.slot(name, "input").record(torch.tensor([1.0 + step + 10 * i]))
        manager.step()
    return model, manager


def _repair_at_a_sync(odd: int | None) -> Any:
    """Policy "repair" in a running job: the sync finds a scale, and the check repairs two whole slots with it."""
    _model, manager = _slots(policy="repair")
    events: list[Any] = []
    manager.on_event(lambda event: events.append(event.report))
    arena = manager._syncs[0].arena
    if dist.get_rank() == odd:
        before = state_bits(manager)
        for i, tensor in enumerate((arena.scales, arena.cold, arena.amax, arena.history, arena.block_max)):
            _scramble(tensor[..., :2] if tensor is arena.scales else tensor[:2], i)
        _scramble(arena.counters[..., :2], 5)
        assert state_bits(manager) != before
    with captured_log() as log:
        for step in range(3):
            for name in "abc":
                manager.slot(name, "input").record(torch.tensor([2.0 + step]))
            manager.step()
        report = manager.check(policy="warn")
    return state_bits(manager), bits(arena.block_max), [r.repaired for r in events], report.consistent, len(log)


@pytest.mark.slow
def test_a_sync_that_fails_is_repaired_and_the_job_goes_on_as_if_nothing_had_been(three_ranks: RankPool) -> None:
    undisturbed = three_ranks.run(_repair_at_a_sync, None)
    for rank, (*state, repaired, consistent, logged) in enumerate(three_ranks.run(_repair_at_a_sync, 0)):
        assert state == list(undisturbed[0][:2])
        of_two = {f"{kind} of '{name}:input' on rank 0, from rank 1" for kind in ("scale", "history") for name in "ab"}
        assert [set(of_event) for of_event in repaired] == [of_two]
        assert consistent
        assert logged == (rank == 1)


def _refused(values: dict[str, list[float]], layout: str = "") -> Any:
    """Return what is left of parameters with one value per rank after a repair that must fail."""
    model = nn.Module()
    for name, of_ranks in values.items():
        model.register_parameter(name, nn.Parameter(torch.full((3,), float(of_ranks[dist.get_rank()]))))
    if layout == "extra" and dist.get_rank() == 1:
        model.extra = nn.Parameter(torch.ones(2))
    step = 5 + (layout == "step" and dist.get_rank() == 1)
    before = parameter_bits(model)
    with captured_log() as log:
        report, raised = _repaired(model, step=step)
    same_on_all_ranks(repr(report.findings))
    return raised, parameter_bits(model) == before, report.repaired, str(report), len(log)


REFUSED: dict[str, tuple[dict[str, list[float]], str]] = {
    "two against two": ({"a": [1, 1, 2, 2]}, ""),
    "one thing with, one without": ({"a": [1, 1, 1, 2], "b": [1, 2, 1, 2]}, ""),
    "behind a thousand with": ({**{f"p{i:04d}": [1.0, 1, 2, 1] for i in range(1030)}, "z": [1, 1, 2, 2]}, ""),
    "a parameter more": ({"a": [1, 1, 1, 2]}, "extra"),
    "another step": ({"a": [1, 1, 1, 2]}, "step"),
}
"""Values of parameters by rank. Without a majority for everything, or if ranks differ in more than content, nothing is
touched."""


def _repaired(model: nn.Module, **arguments: Any) -> tuple[fp8dist.DivergenceReport, bool]:
    """Return the report of a repair, and True if it raised."""
    try:
        return fp8dist.check(model, group=dist.group.WORLD, policy="repair", **arguments), False
    except DivergenceError as error:
        return error.report, True


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_repaired_is_left_as_it_is(four_ranks: RankPool, what: str) -> None:
    values, layout = REFUSED[what]
    results = four_ranks.run(_refused, values, layout, timeout=60)
    for raised, unchanged, repaired, text, _ in results:
        assert (raised, unchanged, repaired) == (True, True, ())
        assert "repaired" not in text
        assert layout or what.startswith("behind") or "no majority" in text  # The table ends before it.
    assert sum(logged for *_, logged in results) == 1


@pytest.mark.long
@pytest.mark.nightly
def test_more_than_a_thousand_tensors_are_all_repaired(three_ranks: RankPool) -> None:
    values: dict[str, list[float]] = {f"p{i:04d}": [1.0, 2.0, 1.0] for i in range(1300)}
    for rank, (raised, unchanged, repaired, *_) in enumerate(three_ranks.run(_refused, values, timeout=90)):
        assert (raised, unchanged, len(repaired)) == (False, rank != 1, 1300)


@on_ranks(3, timeout=HANG)
def test_a_repair_that_fails_on_a_rank_is_reported_by_all() -> None:
    """The odd rank's memory rejects the copy: the other ranks must not wait for it. Or two of its parameters share
    memory: each copy succeeds, and the second overwrites the first, so only a second check shows it."""
    odd = dist.get_rank() == 2
    shared = torch.full((3,), 9.0)
    unwritable, sharing = nn.Module(), nn.Module()
    unwritable.weight = nn.Parameter(torch.full((1,), 2.0 if odd else 1.0).expand(4))
    sharing.a = nn.Parameter(shared if odd else torch.full((3,), 1.0))
    sharing.b = nn.Parameter(shared[:2] if odd else torch.full((2,), 2.0))
    remain = "these differences remain after a repair of parameter 'a' on rank 2, from rank 0; parameter 'b' on rank 2"
    for model, name, note in ((unwritable, "weight", "'weight' of rank 2: "), (sharing, "a", remain)):
        with captured_log():
            report, raised = _repaired(model)
        assert raised
        assert [(f.name, f.ranks) for f in report.findings] == [(name, (2,))]
        assert report.repaired == ()
        assert report.notes[-1].startswith(note)


@on_ranks(3)
def test_numbers_lists_and_mappings_in_an_optimizers_state_are_compared_and_repaired() -> None:
    """As SOAP and LBFGS have them; there may be no tensor to write to. What cannot be read is named."""
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state, odd = optimizer.state[model.first.bias], dist.get_rank() == 1
    state |= {"Q": [torch.ones(2), torch.full((2,), 2.0 + odd)], "last": {"k": [7 + odd]}, "step": 3 + odd}
    state["projector"] = object()
    with captured_log():
        report, _ = _repaired(model, optimizer=optimizer)
        state["Q"][0][1] = torch.nan
        assert fp8dist.check(model, group=dist.group.WORLD, optimizer=optimizer).nonfinite == ("first.bias.Q.0",)
    assert {f.name for f in report.findings} == {f"first.bias.{name}" for name in ("Q.1", "last.k.0", "step")}
    assert (state["Q"][1].tolist(), state["last"], state["step"]) == ([2.0, 2.0], {"k": [7]}, 3)
    assert "1 optimizer states of type object" in report.skipped


def _train(damaged: bool) -> Any:
    """Run six steps of DDP in FP8. After two of them, scramble and repair everything on one rank."""
    job = SmallJob(DelayedScaling(history_len=4), net=make_net(seed=3), optimizer=torch.optim.AdamW)
    repairs = {1: (0, job.manager.check), 3: (2, partial(fp8dist.check, job.called))}
    losses = []
    for step in range(6):
        losses.append(job.step(step))
        if damaged and step in repairs:
            odd, check = repairs[step]
            if dist.get_rank() == odd:
                for i, p in enumerate(job.net.parameters()):
                    _scramble(p, i)
                    for j, value in enumerate(job.optimizer.state[p].values()):
                        _scramble(value, 100 + 10 * i + j)
                _scramble(job.manager.slot("branch", "weight").scale, 7)
                _scramble(job.manager.slot("first", "input").amax, 8)
            with captured_log():
                report = check(optimizer=job.optimizer, policy="repair")
            assert report.consistent
            assert report.repaired
    return losses, parameter_bits(job.net), state_bits(job.manager)


@pytest.mark.slow
def test_training_after_repairs_equals_the_undisturbed_run_bitwise(three_ranks: RankPool) -> None:
    assert three_ranks.run(_train, True) == three_ranks.run(_train, False)


@on_ranks(3)
def test_a_repaired_weight_is_cast_anew() -> None:
    """The odd rank has already cast its wrong weight when it is repaired."""
    job = SmallJob(DelayedScaling(history_len=2))
    job.step(0, rank=0)
    net, (x, _) = job.net, batch(0, 0)
    if dist.get_rank() == 2:
        net.first.weight.data.mul_(-0.5)
    before = bits(net(x))
    with captured_log():
        report = fp8dist.check(net, group=dist.group.WORLD, policy="repair")
    assert report.repaired == ("parameter 'first.weight' on rank 2, from rank 0",)
    after = bits(net(x))
    assert (before != after) == (dist.get_rank() == 2)
    same_on_all_ranks(after)


@pytest.mark.slow
@on_ranks(4, timeout=60)
def test_replicas_of_shards_are_repaired() -> None:
    torch.manual_seed(0)
    model: Any = nn.Linear(16, 16)
    fully_shard(model, mesh=mesh_of((4, 1), ("replicate", "shard")))
    healthy = bits(model.weight.to_local())
    if dist.get_rank() == 1:
        _scramble(model.weight.to_local(), 5)
    with torch.no_grad():
        model(torch.ones(2, 16))  # FSDP2 keeps the gathered weight until a backward.
    with captured_log():
        report = fp8dist.check(model, policy="repair")
    same_on_all_ranks(bits(model(torch.ones(2, 16))))
    mended = ("parameter 'weight' on rank 1, from rank 0",)
    model.reshard()
    assert (report.repaired, bits(model.weight.to_local()) == healthy) == (mended, True)


@on_ranks(3, timeout=HANG)
def test_a_repair_that_some_ranks_ask_for_is_none() -> None:
    """Nor do only these free what FSDP2 keeps gathered: the next forward would wait for the others."""
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Linear(16, 16), mesh=mesh_of((3,), ("shard",)), reshard_after_forward=False)
    plain, x = nn.Linear(4, 4), torch.ones(2, 16)
    whole = nn.ModuleList([model, nn.parallel.DistributedDataParallel(plain)])
    for differs in (False, True):
        with torch.no_grad():
            model(x)
        if differs and dist.get_rank() == 1:
            _scramble(plain.weight, 5)
        policy: Any = "repair" if dist.get_rank() == 0 else "raise"
        with captured_log(), pytest.raises(DivergenceError, match=r"layout of rank 0.*\(rank 0: \('repair',\)"):
            fp8dist.check(whole, policy=policy)
        model(x)


@pytest.mark.parametrize("entry", ["fp8dist.check", "manager.check"])
@on_ranks(3, timeout=HANG)
def test_the_least_limit_of_all_ranks_counts(entry: str) -> None:
    """A rank may have another one, or count other checks, as the stages of a pipeline do."""
    job, limit = SmallJob(), 1 if dist.get_rank() == 2 else None
    of: Any = job.manager.check if entry == "manager.check" else partial(fp8dist.check, job.called)
    check = partial(of, policy="repair", max_repairs=limit)
    _nudge(job.net, "last.bias")
    with captured_log():
        assert check().repaired
        _nudge(job.net, "last.bias")
        with pytest.raises(DivergenceError, match=r"repaired in 1 checks in a row \(max_repairs\)"):
            check()


PERSISTS = "the cause persists: "


def _nudge(net: nn.Module, name: str) -> None:
    """Change a parameter on rank 1."""
    if dist.get_rank() == 1:
        with torch.no_grad():
            net.get_parameter(name).view(-1)[3] += 1


@pytest.mark.slow
@pytest.mark.parametrize("prepared", [True, False])
@on_ranks(3)
def test_a_repair_that_repeats_says_that_its_cause_persists(prepared: bool) -> None:
    net = make_net()
    manager = fp8dist.prepare(net, group=dist.group.WORLD) if prepared else None
    called = nn.parallel.DistributedDataParallel(net)
    if manager is not None:
        manager.attach(called)

    def check(policy: Any) -> Any:
        return fp8dist.check(called, policy=policy) if manager is None else manager.check(policy=policy)

    found = []
    for names in (["first.bias"], ["first.bias"], ["first.bias", "last.bias"], ["last.bias"], [], ["last.bias"]):
        for name in names:
            _nudge(net, name)
        if manager is not None:
            manager.check(parameters=False)  # Compares no parameters, so forgets none.
        with captured_log() as log:
            report = check("repair" if names else "warn")
        assert len(report.repaired) == len(names)
        said = [note.removeprefix(PERSISTS) for note in report.notes]
        logged = " ".join(" ".join(text.split()) for _, text in log)
        assert all(note in logged for note in said) or dist.get_rank()
        found.append([note.split(":")[0] for note in said])
    third = ["first.bias repaired in 3 checks in a row"]
    assert found == [[], [], third, [], [], []]


@pytest.mark.slow
@on_ranks(3)
def test_a_number_of_repairs_after_which_all_ranks_raise() -> None:
    settings: dict[str, Any] = {"check_every": 1, "check_policy": "repair", "max_repairs": 2}
    job = SmallJob(optimizer=partial(torch.optim.SGD, lr=0.0001), **settings)
    text = r"nothing was copied: the cause persists: last\.bias repaired in 2 checks in a row \(max_repairs\)"
    for index in range(4):
        job.backward(index)
        with captured_log(), pytest.raises(DivergenceError, match=text) if index == 3 else contextlib.nullcontext():
            job.optimizer.step()
            _nudge(job.net, "last.bias")
    biases: list[Any] = [None] * 3
    dist.all_gather_object(biases, bits(job.net.last.bias))
    assert biases[0] != biases[1]


@on_ranks(3)
def test_scales_that_each_sync_repairs_count_too() -> None:
    """Set a scale on rank 1 before each step, so that each sync finds and repairs it."""
    recipe, sgd = DelayedScaling(history_len=3), partial(torch.optim.SGD, lr=0.0001)
    job = SmallJob(recipe, wrap=unwrapped, optimizer=sgd, check_policy="repair", max_repairs=3)
    noted: list[bool] = []
    job.manager.on_event(lambda event: noted.append(bool(event.report.notes)))  # type: ignore[union-attr]
    text = r"the cause persists: first:weight repaired in 3 checks in a row \(max_repairs\)"
    for step in range(4):
        job.backward(step, rank=0)
        job.manager.slot("first", "weight").scale.mul_(1 + (dist.get_rank() == 1))
        with captured_log(), pytest.raises(DivergenceError, match=text) if step == 3 else contextlib.nullcontext():
            job.optimizer.step()
    assert noted == [False, False, True, True]
