"""``fp8dist.replay``: everything is as it was after it, and each planted cause gets its sentence."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import fp8dist
from fp8dist import Event, Fp8DistError, LossGuard, ReplayBuffer
from fp8dist.checks.outputs import Taken
from fp8dist.modules.parts import fp8_parts
from fp8dist.replays import model_replay, triggers
from fp8dist.replays.neighbours import from_next
from fp8dist.state.groups import SyncGroup, local_part
from tests.support.answers import flipping
from tests.support.logs import captured_log
from tests.support.ranks import RankPool, on_ranks, short_grace
from tests.support.replayed import Training
from tests.support.suite import few

pytestmark = pytest.mark.slow

KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"kind": "ddp"},
    "ddp, plain": {"kind": "ddp", "fp8": False},
    "fsdp2": {"kind": "fsdp2"},
    "fsdp2, fp8 gather": {"kind": "fsdp2", "gathers": True},
    "fsdp2, plain": {"kind": "fsdp2", "fp8": False},
    "tp": {"kind": "tp"},
    "compiled block": {"compiled": True},
    "compiled block, plain": {"compiled": True, "fp8": False},
}


def _trained(options: dict[str, Any], replays: bool) -> Any:
    """Train five steps. With replays: one in the middle of an accumulation, one that a spike of the loss starts, and
    one before the last step, which would not record the amax of a weight whose cast the replay had kept.

    Return everything at the end, what modules have counted, what the first replay found and left, and what
    ``replay_on`` reported.
    """
    training = Training(**options)
    of = training.manager or training.model
    buffer, guard, events = ReplayBuffer(of), LossGuard(min_history=3), list[Event]()
    data = training.data

    def kept(index: int) -> Any:
        batch = data(index)
        buffer.keep(batch, None if training.fp8 else training.steps + 1)
        return batch

    training.data = kept  # type: ignore[method-assign]
    if replays:
        own = {"group": training.group} if training.kind == "tp" else {}
        fp8dist.replay_on(of, buffer, training.step, ("spike",), guard=guard, callback=events.append, **own)
    found: list[Any] = []

    def inside(step: int) -> None:
        guard.observe(99.0 if step == 3 else 1.0)
        if step != 1 or not replays:
            return
        gradients = [parameter.grad for parameter in training.model.parameters()]
        before = training.everything()
        report = fp8dist.replay(training.model, training.step, data(6), group=training.group)
        same = all(g is p.grad for g, p in zip(gradients, training.model.parameters(), strict=True))
        found.append((report, _changed(before, training.everything()), same))

    with captured_log():
        training.train(4, inside)
        if replays:
            fp8dist.replay(training.model, training.step, data(6), group=training.group)
        monitors = [part.slots.monitor for part in fp8_parts(training.net)]
        counted = [(each._backwards, each._changes, each._look_at) for each in monitors]
        training.train(1, inside)
    replayed = [(event.step, event.replay[:3], event.replay.report.sentence) for event in events if event.replay]
    return training.everything(), counted, found, replayed


def _changed(before: dict[str, bytes], after: dict[str, bytes]) -> list[str]:
    return [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]


@pytest.mark.parametrize("kind", few(KINDS, "ddp", "fsdp2, fp8 gather"))
def test_training_goes_on_as_if_there_had_been_no_replay(kind: str, two_ranks: RankPool, four_ranks: RankPool) -> None:
    """With everything that could confuse a replay, and whoever asks for it."""
    ranks = four_ranks if kind == "tp" else two_ranks
    with_replays, plain = ranks.run(_trained, KINDS[kind], True), ranks.run(_trained, KINDS[kind], False)
    # Without FP8 the second replay comes as the guard looks, after the first of two microbatches.
    microbatch = 1 if KINDS[kind].get("fp8", True) else 0
    for (after, counted, found, replayed), (expected, counts, *none) in zip(with_replays, plain, strict=True):
        ((report, changed, same_gradients),) = found
        assert report.reproducible, str(report)
        assert not report.findings
        assert changed == []
        assert same_gradients
        ((step, place, sentence),) = replayed
        assert (step, place) == (4, ("spike", 4, microbatch))
        assert sentence.startswith("reproducible: ")
        assert _changed(expected, after) == []
        assert (counted, none) == (counts, [[], []])


def _put(y: Tensor) -> Tensor:
    """An op that torch's deterministic mode forbids, and that is not deterministic here."""
    place = torch.zeros(1, dtype=torch.int64)
    return y.flatten().put(place, torch.tensor([time.perf_counter() % 1]), accumulate=False).view_as(y)


class _Counted:
    """State that a module hides in Python."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, y: Tensor) -> Tensor:
        self.calls += 1
        return y * (1 + self.calls / 64)


def _attended(y: Tensor) -> Tensor:
    heads = y.view(1, 4, -1, y.shape[1] // 4)
    return nn.functional.scaled_dot_product_attention(heads, heads, heads).reshape(y.shape)


def _caused(causes: tuple[str, ...], options: dict[str, Any], odd: int) -> list[fp8dist.ReplayReport]:
    """Train for two steps, and replay one for each of the causes, which rank ``odd`` alone has."""
    training = Training(**options)
    block, counted, reports = training.net.blocks[1], _Counted(), []
    block.fault = _attended
    training.train(2)
    faults = {"op": lambda y: _put(_attended(y)), "hidden": lambda y: counted(_attended(y))}
    for cause in causes:
        context: Any = contextlib.nullcontext()
        if dist.get_rank() == odd:
            block.fault = faults.get(cause, _attended)
            context = sdpa_kernel(SDPBackend.MATH) if cause == "flag" else context
            context = _bad_product(block.down) if cause == "product" else context
        with context:
            reports.append(training.replay())
    return reports


@contextlib.contextmanager
def _bad_product(linear: Any) -> Iterator[None]:
    """Flip a bit of what one FP8Linear multiplies, as a damaged multiplier would."""
    forward = linear.forward

    def faulty(x: Tensor) -> Tensor:
        with flipping("matmul", tuple(x.shape), byte=70, bit=3):
            return forward(x)

    linear.forward = faulty
    try:
        yield
    finally:
        del linear.forward


CAUSES = {
    "op": ("not deterministic", "blocks.1", "would forbid put_"),
    "hidden": ("not deterministic", "blocks.1", "state in Python"),
    "flag": ("ranks differ", "blocks.1", "ULP"),
    "product": ("ranks differ", "blocks.1.down", "ULP"),
}


IN_MODULES, IN_PRODUCTS = ("op", "hidden", "flag"), ("product",)


@pytest.mark.parametrize(
    ("kind", "causes"),
    few(
        [(kind, causes) for kind in ("ddp", "fsdp2, fp8 gather") for causes in (IN_MODULES, IN_PRODUCTS)],
        *[("ddp", IN_MODULES), ("fsdp2, fp8 gather", IN_PRODUCTS)],
    ),
)
def test_each_cause_has_its_sentence(
    causes: tuple[str, ...], kind: str, two_ranks: RankPool, three_ranks: RankPool
) -> None:
    """Ranks that differ need a third one to be told apart; what one rank does alone needs no other. Of data with a NaN:
    tests/launch/test_faults.py."""
    ranks, size = (two_ranks, 2) if kind == "ddp" else (three_ranks, 3)
    for cause, report, *others in zip(causes, *ranks.run(_caused, causes, KINDS[kind], 1)):
        wanted, module, words = CAUSES[cause]
        differ = wanted == "ranks differ"
        assert all(other == report for other in others)
        (first,) = report.findings
        assert (first.kind, first.module, first.what) == (wanted, module, "output"), str(report)
        assert first.ranks == ((0, 1) if differ and size == 2 else (1,)), str(report)
        assert words in report.sentence
        if differ:
            assert first.index is not None
            assert first.ulp
            assert first.reference_rank == (2 if size == 3 else None)
        assert not report.reproducible


def _raising(kind: str) -> list[str]:
    options = {**KINDS[kind], **({"timeout": timedelta(seconds=2)} if "fsdp2" in kind else {})}
    training = Training(**options)
    training.train(2)
    if dist.get_rank() == 1:
        training.net.blocks[1].fault = lambda y: y.no_such_attribute
    before = training.everything()
    with pytest.raises(Fp8DistError) as raised, short_grace(0.3):
        training.replay()
    after = before if "fsdp2" in kind else training.everything()  # FSDP2 was left in the middle of a forward.
    return [str(raised.value), *(name for name in before if before[name] != after.get(name))]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_step_that_raises_on_one_rank_is_one_error_on_all(kind: str, two_ranks: RankPool) -> None:
    first, second = two_ranks.run(_raising, kind)
    if kind == "fsdp2":
        two_ranks.close()
    assert first == second
    assert first[0].startswith("replay(): rank 1 raised in the first run: AttributeError: 'Tensor' object has no")
    assert first[1:] == []


def test_ops_are_those_of_warnings_between_two_places() -> None:
    taken = Taken((), torch.empty(0, 2), torch.empty(0), marks=(1, 3, 3))
    windows = [range(5)[model_replay._window(taken, index)] for index in range(4)]
    assert [list(window) for window in windows] == [[0], [1, 2], [], [3, 4]]


class _Folding(nn.Module):
    def forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        folded = y.mean(0, keepdim=True) if dist.get_rank() == 1 else y
        return folded, folded.to_sparse()


class _Folded(nn.Module):
    """A module has another shape on rank 1. It also returns a sparse tensor, of which no digest is taken."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear, self.fold = nn.Linear(8, 8), _Folding()

    def forward(self, x: Tensor) -> Tensor:
        return self.fold(self.linear(x))[0]


def _small(net: nn.Module, calls: int = 1) -> fp8dist.ReplayReport:
    def step(x: Tensor) -> None:
        for _ in range(calls):
            net(x).square().mean().backward()

    return fp8dist.replay(net, step, torch.ones(4, 8))


@on_ranks(2)
def test_ranks_that_are_not_alike() -> None:
    rank, net = dist.get_rank(), _Folded()
    assert _small(net).sentence == (
        "ranks 0, 1 differ on the same data, first in module 'fold', output "
        "(float32[4, 8] on rank 0, float32[1, 8] on rank 1)"
    )
    with mock.patch.dict(os.environ, {"MKL_CBWR": "COMPATIBLE"} if rank == 1 else {}):
        assert _small(net).sentence.endswith("; the ranks are not alike: MKL_CBWR=COMPATIBLE on rank 1)")
    # Ranks are not compared if one may choose other kernels.
    with mock.patch.object(model_replay, "unsteady_settings", return_value=["autotuning"] if rank == 1 else []):
        report = _small(net)
    assert report.reproducible
    assert report.sentence.endswith("are the same in two runs, bit for bit, and finite")
    assert report.skipped == ("ranks with each other: autotuning",)
    torch.manual_seed(3)
    two = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    assert "in module '0', output, call 2 (the run on rank 0 ends before)" in _small(two, 1 + rank).sentence
    if rank == 1:
        two.append(nn.Identity())
    assert "in module '2', output (rank 0 has the model's own forward, output there)" in _small(two).sentence


class _Gain(torch.autograd.Function):
    """The gradient of the weight is wrong on rank 1, in the last element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_weight = (grad * x).sum(0)
        of_weight[-1] += dist.get_rank() == 1
        return grad * weight, of_weight


class _Gains(nn.Module):
    """Two modules with a parameter, and one that uses both in a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        gained: Tensor = _Gain.apply(self.linear(x), self.gain)
        return self.norm(gained)  # type: ignore[no-any-return]


def _with_a_wrong_gradient(kind: str) -> tuple[str, str, tuple[int, ...] | None, str]:
    net = _Gains()
    called = DistributedDataParallel(net) if kind == "ddp" else net

    def step(x: Tensor) -> None:
        called(x).square().sum().backward()

    for _ in range(3):
        step(torch.ones(4, 8))
    (finding,) = fp8dist.replay(called, step, torch.arange(32.0).view(4, 8)).findings
    return finding.kind, finding.what, finding.index, finding.sentence


@pytest.mark.parametrize("kind", ["plain", "ddp"])
def test_a_wrong_gradient_of_a_parameter_is_named(kind: str, three_ranks: RankPool) -> None:
    """All outputs and their gradients are right, and DDP would spread it to all ranks alike."""
    for kind_of, what, index, sentence in three_ranks.run(_with_a_wrong_gradient, kind):
        assert (kind_of, what, index) == ("ranks differ", "gradient of gain", (7,))
        assert sentence.startswith("rank 1 differs from rank 2 on the same data, first in the model's own forward, ")


@pytest.mark.parametrize("kind", few(["ddp", "fsdp2, plain"], "ddp"))
@on_ranks(2)
def test_the_data_is_not_blamed_for_a_parameter(kind: str) -> None:
    training = Training(**KINDS[kind])
    training.train(2)
    with torch.no_grad():
        local_part(training.net.blocks[1].down.weight)[0, 0] = math.nan
    assert training.replay().sentence == (
        "a parameter gives ranks 0, 1 the first non-finite value in module 'blocks.1.down', output "
        "(the parameter blocks.1.down.weight is not finite)"
    )


def _replayed_on() -> Any:
    """Events in the second and the third of four steps. In the first replay the part of rank 1 alone sees a gradient
    that is another in each run, in the second one rank 1 raises. No collective of tensor parallelism comes after that
    gradient. Return ((kind, sentence) that the callback gets, what is logged, the steps done)."""
    training = Training(kind="tp", accumulates=1)
    buffer, events = ReplayBuffer(training.manager), list[Any]()
    cause, factors = "", (1 + 1 / call for call in itertools.count(1))  # In a replay on rank 1.

    def step(batch: Any) -> None:
        nonlocal cause
        cause = {1: "unsteady", 2: "error"}[index] if dist.get_rank() == 1 else ""
        training.step(batch)
        if cause == "error":
            raise ValueError("no loss")
        cause = ""

    def other_gradient(gradient: Tensor) -> Tensor:
        return gradient * next(factors) if cause == "unsteady" else gradient

    training.net.norm.register_forward_hook(lambda module, args, y: y.register_hook(other_gradient) and None)
    options: Any = {"group": training.group, "callback": events.append, "at_most_every": 1}
    fp8dist.replay_on(training.manager, buffer, step, ("nonfinite",), **options)
    patient = partial(triggers.replay, timeout=timedelta(seconds=15))
    with captured_log() as log, mock.patch.object(triggers, "replay", patient):
        for index in range(4):
            batch = training.data(index)
            buffer.keep(batch)
            training.step(dict(batch))
            if index in (1, 2):
                training.manager._syncs[0].arena.pending[0] = math.inf
            training.end_step()
    reports = [event.replay.report for event in events]
    found = [(report.findings[0].kind, report.sentence) for report in reports]
    return found, [text for _, text in log if "replay" in text], training.steps


def test_what_one_part_finds_all_ranks_return_and_one_logs(four_ranks: RankPool) -> None:
    """Under tensor parallelism each data-parallel group has its own report, and the training one event. Ranks 1 and 3
    look closer, so ranks 0 and 2, which hold other parts, run with them."""
    results = four_ranks.run(_replayed_on, timeout=60)
    assert [(len(log), steps) for _, log, steps in results] == [(2, 4), (0, 4), (0, 4), (0, 4)]
    (((kind, sentence),), (found, failed), _), *others = results
    assert [(kind, sentence)] * 3 == [of for (of,), _, _ in others]
    assert kind == "not deterministic"
    assert "rank 1" in sentence
    assert "in module 'norm', gradient" in sentence
    assert sentence in found
    assert failed.endswith("failed: Fp8DistError: replay(): rank 1 raised in the first run: ValueError: no loss")


# Batches: a neighbour's, and of each run its own ----------------------------------------------------------


def _odd_batch(rank: int) -> dict[str, Any]:
    """Strides, dtypes and structure differ by rank."""
    x = torch.arange(24.0).view(2, 3, 4) + rank
    tensors: list[Tensor] = [
        x.transpose(0, 2),
        x.double()[:, ::2],
        x.bfloat16().permute(1, 2, 0),
        torch.complex(x, -x).conj().mT,
        x.to(torch.float8_e4m3fn).mT,
        x[:0].mT,
        x.sum(),
        x[..., 0].expand(3, 2, 3),
        (x > 3).mT,
    ]
    return {"x": tensors[rank:], "rank": rank, "nothing": () if rank else None}


def _described(batch: Any) -> list[Any]:
    """Return what a kernel could see of a batch."""
    seen: list[Any] = []
    for leaf in tree_leaves(batch):
        if not isinstance(leaf, Tensor):
            seen.append(leaf)
            continue
        clone = leaf.resolve_conj().clone()
        seen.append((clone.shape, clone.stride(), str(clone.dtype), str(clone.tolist()), leaf.requires_grad))
    return seen


@on_ranks(3)
def test_a_neighbour_s_batch_has_its_strides_dtypes_and_structure() -> None:
    group = SyncGroup(dist.group.WORLD)
    got = from_next(_odd_batch(dist.get_rank()), group, torch.device("cpu"))
    assert _described(got) == _described(_odd_batch((dist.get_rank() + 1) % group.size))


def test_each_run_gets_the_batch_as_it_was() -> None:
    """A step may write to its batch and take it apart."""
    net = nn.Linear(8, 8)
    batch = {"x": torch.randn(4, 8), "y": [torch.randn(4, 8)]}
    x, before = batch["x"], batch["x"].clone()

    def step(given: dict[str, Any]) -> None:
        x = given.pop("x").mul_(2)
        nn.functional.mse_loss(net(x), given["y"].pop()).backward()

    report = fp8dist.replay(net, step, batch)
    assert report.reproducible, str(report)
    assert batch["x"] is x
    assert torch.equal(x, before)
    assert len(batch["y"]) == 1
