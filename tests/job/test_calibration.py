"""calibrate(): takes scales from high-precision passes and changes nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import CurrentScaling, DelayedScaling
from fp8dist.errors import ConfigurationError
from launch.train_gpt.data import read_text
from launch.train_gpt.model import GPT
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.ranks import RankPool, on_ranks
from tests.support.training import batch, bits, histories, make_net, parameter_bits


class Noisy(nn.Module):
    """Contains everything that a pass may change: a BatchNorm, dropout, a buffer that a forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 48), nn.BatchNorm1d(48), nn.Dropout(0.5), nn.Linear(48, 16))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.seen = x.detach()
        y: Tensor = self.net(x)
        return y


def everything(model: nn.Module) -> dict[str, Any]:
    """Return the bits of parameters, gradients and buffers, and the generators' states."""
    return {
        "parameters": parameter_bits(model),
        "gradients": {name: None if p.grad is None else bits(p.grad) for name, p in model.named_parameters()},
        "buffers": {name: bits(b) for name, b in model.named_buffers()},
        "random": bits(torch.get_rng_state()),
        "training": [m.training for m in model.modules()],
    }


def loss_of(model: nn.Module, index: int, rank: int = 0) -> Tensor:
    x, y = batch(rank, index)
    loss: Tensor = (model(x) - y).square().mean()
    return loss


@pytest.mark.parametrize("gradients", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("raises", [False, True], ids=["clean", "raises"])
def test_nothing_else_changes(gradients: bool, raises: bool) -> None:
    model = Noisy()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4))
    optimizer = torch.optim.AdamW(model.parameters())
    manager.attach(optimizer=optimizer)
    if gradients:
        loss_of(model, 0).backward()
        manager.reset()  # Drops the pending amaxes.
    before, held = everything(model), {name: p.grad for name, p in model.named_parameters()}
    cold = manager.metrics()["fp8/cold_slots"]
    buffer, state = model.calls, copy.deepcopy(optimizer.state_dict())
    try:
        with manager.calibrate():
            for index in range(3):
                loss_of(model, index).backward()
            if raises:
                raise KeyError("stop")
    except KeyError:
        pass
    assert everything(model) == before
    assert {name: p.grad for name, p in model.named_parameters()} == held  # The same tensors.
    assert model.calls is buffer
    assert str(optimizer.state_dict()) == str(state)
    assert manager.metrics()["fp8/cold_slots"] == (cold if raises else 0)
    assert manager.steps == (0 if raises else 1)


def test_amaxes_are_those_of_high_precision_passes() -> None:
    """Compares with an independent computation over three batches; the next forward uses FP8 with the new scales."""
    net, twin = make_net(), make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=4))
    manager.attach(optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    seen: dict[str, float] = {}

    def note(name: str, x: Tensor) -> None:
        seen[name] = max(seen.get(name, 0.0), float(x.detach().abs().max()))

    for name in ("first", "branch", "last"):
        module = getattr(twin, name)
        module.register_forward_pre_hook(lambda m, args, name=name: note(f"{name}:input", args[0]))
        module.register_forward_hook(
            lambda m, args, y, name=name: y.register_hook(lambda grad: note(f"{name}:grad_output", grad)) and None
        )
        seen[f"{name}:weight"] = float(module.weight.detach().abs().max())
    with manager.calibrate():
        for index in range(3):
            loss_of(net, index).backward()
    for index in range(3):
        loss_of(twin, index).backward()
    assert {str(slot): manager.slot(*slot).amax.item() for slot in manager.slots} == pytest.approx(seen, rel=0, abs=0)
    for slot in manager.slots:
        largest = 57344.0 if slot.role == "grad_output" else 448.0
        scale = torch.tensor(largest) / torch.tensor(seen[str(slot)])
        assert manager.slot(*slot).scale.item() == scale.item()


def test_it_counts_for_no_schedule_and_no_policy() -> None:
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=4))
    manager.attach(optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    manager.set_precision("*", "high", steps=1)
    with manager.calibrate():
        loss_of(net, 0).backward()
    assert manager.slot("first", "input").high_precision != ()
    assert manager.metrics()["fp8/cold_slots"] == 0


def test_recipes_without_state_have_nothing_to_calibrate() -> None:
    net = make_net()
    manager = fp8dist.prepare(net, CurrentScaling())
    manager.attach(optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    before = everything(net)
    with manager.calibrate():
        loss_of(net, 0).backward()
    assert everything(net) == before


def _on_ranks(how: str) -> tuple[bool, list[int], dict[Any, list[float]], bool]:
    rank = dist.get_rank()
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=4), group=dist.group.WORLD)
    module: Any = net
    if how == "fsdp2":
        fully_shard(net.first)
        fully_shard(net)
    else:
        module = DistributedDataParallel(net, gradient_as_bucket_view=how == "bucket views")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    manager.attach(module, optimizer=optimizer)
    loss_of(module, 0, rank).backward()  # These gradients wait for an optimizer step.
    manager.reset()
    before = everything(_local(module))
    with counted_collectives() as calls, manager.calibrate():
        for index in range(2):
            loss_of(module, index, rank).backward()
    same = everything(_local(module)) == before
    optimizer.step()  # Uses the gradients from before.
    expected = {name: 0 for name, p in module.named_parameters() if p.grad is None}
    fp8 = [size for name, size in zip(calls.names, calls.sizes) if name == "all_reduce" and size == 4 * (8 + 9)]
    return same, fp8, histories(manager), not expected


def _local(module: nn.Module) -> nn.Module:
    """Return this rank's part of a DTensor; other tensors unchanged."""
    plain = nn.Module()
    for number, parameter in enumerate(module.parameters()):
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        copied = nn.Parameter(local.detach().clone())
        if parameter.grad is not None:
            grad = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
            copied.grad = grad.detach().clone()
        plain.register_parameter(f"p{number}", copied)
    return plain


@pytest.mark.parametrize("how", ["ddp", "bucket views", "fsdp2"])
def test_ranks_share_the_amaxes_in_one_collective(two_ranks: RankPool, how: str) -> None:
    first, second = two_ranks.run(_on_ranks, how)
    assert first[0]
    assert second[0]
    assert first[1] == second[1] == [4 * (8 + 9)]
    assert first[2] == second[2]
    assert first[3]


@pytest.mark.parametrize("gather", [False, True], ids=["high precision", "FP8"])
@on_ranks(2)
def test_gradients_are_those_of_before_also_after_an_evaluation(gather: bool) -> None:
    """FSDP2 leaves its outermost module unsharded after a forward without a backward."""
    rank = dist.get_rank()
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=4), group=dist.group.WORLD, fp8_all_gather=gather)
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    manager.attach(net, optimizer=optimizer)
    same = []
    for waiting in (True, False):
        if waiting:
            loss_of(net, 0, rank).backward()
        before = everything(_local(net))
        with torch.no_grad():
            net(batch(rank, 1)[0])
        with manager.calibrate():
            loss_of(net, 1, rank).backward()
        same.append(everything(_local(net)) == before)
        optimizer.step()
        optimizer.zero_grad()
    assert (same[0], same[1]) == (True, True)


@on_ranks(2)
def test_gradients_that_wait_for_a_reduction_are_not_mixed_in() -> None:
    rank, told = dist.get_rank(), []
    net = make_net()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=4), group=dist.group.WORLD)
    fully_shard(net.first)
    fully_shard(net)
    manager.attach(net)
    for waits in (True, False):
        net.set_requires_gradient_sync(not waits)
        loss_of(net, 0, rank).backward()
        try:
            with manager.calibrate():
                pass
            told.append("")
        except ConfigurationError as error:
            told.append(str(error))
    waits, reduced = told
    assert "has not reduced yet" in waits
    assert reduced == ""


class Trained:
    """The example job's model after about a hundred FP32 steps on real text, and one more batch."""

    def __init__(self, steps: int = 200) -> None:
        text = torch.frombuffer(bytearray(read_text(None, 32).training), dtype=torch.uint8)
        self._text, self._random = text, torch.Generator().manual_seed(1)
        torch.manual_seed(0)
        self.model = GPT(layers=2, width=64, heads=2, context=32)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        for _ in range(steps):
            self.model(*self.batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
        self.batches = [self.batch() for _ in range(4)]

    def batch(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(0, len(self._text) - 33, (8,), generator=self._random)
        windows = self._text[starts[:, None] + torch.arange(33)].long()
        return windows[:, :-1], windows[:, 1:]


@pytest.fixture(scope="module")
def trained() -> Trained:
    return Trained()


def first_gradient(trained: Trained, manage: str) -> Tensor:
    """Return the gradient of the first step as one vector: in FP32 ("none"), in FP8 with scales of 1 ("unit") or
    calibrated.

    The loss is divided by 4096, so that gradients are as small as for a mean over many more tokens.
    """
    model = copy.deepcopy(trained.model)
    if manage != "none":
        manager = fp8dist.prepare(model, DelayedScaling(warmup="unit"))
        # Like a job resumed from a checkpoint without FP8 state: drop the weight amaxes of attach too.
        if manage == "calibrated":
            before = everything(model)
            with manager.calibrate():
                for tokens, targets in trained.batches[1:]:
                    (model(tokens, targets) / 4096).backward()
            assert everything(model) == before
    (model(*trained.batches[0]) / 4096).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.slow
def test_calibration_takes_away_the_error_of_the_first_step(trained: Trained) -> None:
    """With scales of 1, small gradients underflow in FP8."""
    with captured_log():
        exact, unit, calibrated = (first_gradient(trained, manage) for manage in ("none", "unit", "calibrated"))
    errors = [float((gradient - exact).norm() / exact.norm()) for gradient in (unit, calibrated)]
    print(f"\nfirst gradient: error with scales of 1 {errors[0]:.3f}, calibrated {errors[1]:.3f}")
    assert errors[0] > 0.3
    assert errors[1] < 0.06  # An E5M2 gradient, an E4M3 weight and input: each adds about 3 %.
