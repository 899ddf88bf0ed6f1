"""Tensor parallelism: unsupported uses, high precision, and other training loops."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp8dist
from fp8dist import DelayedScaling, StateManager
from fp8dist.errors import ConfigurationError
from tests.support.linear import E4M3, amax, dequantised
from tests.support.parallel import assert_affine, mesh_of, watched_reductions, whole
from tests.support.ranks import on_ranks
from tests.support.tensor_parallel import (
    LAST,
    LAYOUTS,
    Pair,
    all_of,
    forward_backward,
    gradient_of,
    last_amaxes,
    parallel_pair,
    parallelize,
    x_of,
)
from tests.support.training import state_bits

pytestmark = pytest.mark.slow


class Inner(nn.Module):
    """A Linear inside a module."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.proj = nn.Linear(columns, rows)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


def _refusal(
    placements: tuple[Placement, Placement] | None = None,
    input: Placement | None = None,
    style: Any = None,
    rows: int = 32,
    columns: int = 32,
    group: Any = None,
) -> str:
    """Return the error of ``attach``, or of the first forward.

    Args:
        placements: of weight and bias. None: as ``style`` places them.
        input: the input's; None: a plain tensor.
    """
    mesh = mesh_of((2,), ("tp",))
    model = nn.ModuleDict({"inner": Inner(rows, columns)})
    manager = fp8dist.prepare(model, group=group or mesh)
    proj: Any = model["inner"].proj
    if style is not None:
        parallelize_module(model, mesh, {"inner.proj": style})
    for name, placement in zip(("weight", "bias"), placements or ()):
        setattr(proj, name, nn.Parameter(distribute_tensor(getattr(proj, name).detach(), mesh, [placement])))
    x = torch.randn(4, columns // 2 if input == Shard(1) else columns)
    with pytest.raises(ConfigurationError) as error:
        manager.attach(model) and proj(x if input is None else DTensor.from_local(x, mesh, [input]))
    return str(error.value)


@on_ranks(2)
def test_what_has_no_product_is_refused_by_name() -> None:
    """Parts that FP8 cannot multiply, plain inputs, a group without the tensor-parallel ranks, and placements that do
    not fit each other."""
    own = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    whole, columns = (Replicate(), Replicate()), (Shard(0), Shard(0))
    placements = [
        *((columns, Shard(1)), (columns, Partial()), ((Shard(1), Replicate()), Replicate())),
        *((whole, Partial()), (whole, Shard(1)), ((Shard(0), Replicate()), Replicate())),
    ]
    alone = f"by ranks 0, 1, but its FP8 state only by ranks {dist.get_rank()}:"
    refusals = [
        (_refusal(style=ColwiseParallel(), rows=48), "(24, 32)"),
        (_refusal(style=RowwiseParallel(), columns=48), "(32, 24)"),
        (_refusal(style=ColwiseParallel(), rows=16), "(8, 32)"),
        (_refusal(columns), "plain tensor"),
        (_refusal(style=ColwiseParallel(), group=own), alone),
        *((_refusal(of, input), "") for of, input in placements),
    ]
    assert len(refusals) == 11
    for text, named in refusals:
        assert "inner.proj" in text
        assert named in text


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("in by tokens", "eval"),
        ("default", "no_fp8"),
        ("default", "calibrate"),
        ("in by tokens", "calibrate"),
        ("in by tokens", "disabled"),
    ],
)
@on_ranks(2)
def test_high_precision_is_that_of_the_plain_model(name: str, how: str) -> None:
    layout = LAYOUTS[name]
    settings: dict[str, Any] = {"eval": {"eval_precision": "high"}, "disabled": {"enabled": False}}.get(how, {})
    model, manager, _ = parallel_pair(layout, **settings)
    plain = Pair(layout)
    parallelize(plain, layout)
    before = state_bits(manager)
    model.train(how != "eval")
    with {"no_fp8": manager.no_fp8, "calibrate": manager.calibrate}.get(how, contextlib.nullcontext)():
        x = forward_backward(model, layout, 0)
    expected = forward_backward(plain, layout, 0)
    pairs = [(model.z, plain.z), (model.y, plain.y), (x.grad, expected.grad)]
    if how != "calibrate":  # calibrate leaves parameter gradients unchanged: there were none.
        pairs += [(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters())]
    for mine, theirs in pairs:
        assert mine is not None
        assert theirs is not None
        assert type(mine) is type(theirs)
        torch.testing.assert_close(whole(mine), whole(theirs), rtol=1e-5, atol=1e-5)
    if how != "calibrate":
        if how != "disabled":
            assert state_bits(manager) == before
        return
    token = Shard(1) if layout.sequence else Replicate()
    seen = {
        ("up", "input"): all_of(model.n, token), ("down", "input"): all_of(model.h, layout.middle),
        ("up", "grad_output"): all_of(model.z.grad, layout.middle), ("down", "grad_output"): gradient_of(0),
        ("up", "weight"): whole(model.up.weight), ("down", "weight"): whole(model.down.weight),
    }  # fmt: skip
    assert last_amaxes(manager) == {slot: amax(tensor) for slot, tensor in seen.items()}


@on_ranks(2)
def test_eval_in_fp8_records_nothing() -> None:
    layout = LAYOUTS["default"]
    model, manager, full = parallel_pair(layout)
    forward_backward(model, layout, 0)
    manager.step()
    before = state_bits(manager)
    model.eval()
    with torch.no_grad():
        y = model(x_of(1))
    manager.step()
    after = state_bits(manager)
    assert {k: v for k, v in before.items() if k != "step"} == {k: v for k, v in after.items() if k != "step"}
    h = all_of(model.h, LAST)
    a = dequantised(h, E4M3, manager.slot("down", "input").scale)
    assert_affine(y, a, dequantised(full["down.weight"], E4M3, manager.slot("down", "weight").scale), full["down.bias"])


@on_ranks(2)
def test_accumulation() -> None:
    layout = LAYOUTS["in by tokens"]
    model = Pair(layout)
    recipe = DelayedScaling(history_len=4, update="next_step")
    manager = fp8dist.prepare(model, recipe, group=mesh_of((2,), ("tp",)))
    parallelize(model, layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    manager.attach(model, optimizer=optimizer)
    for step in range(3):
        inputs, gradients = [], []
        weights = {name: amax(whole(model.get_submodule(name).weight)) for name in ("up", "down")}
        with watched_reductions() as reductions:
            for micro in range(3):
                forward_backward(model, layout, (3 * step + micro) % 5)
                inputs.append((amax(all_of(model.n, Shard(1))), amax(all_of(model.h, LAST))))
                gradients.append((amax(all_of(model.z.grad, LAST)), amax(gradient_of((3 * step + micro) % 5))))
            optimizer.step()
            optimizer.zero_grad()
            last = last_amaxes(manager)
        assert reductions.of(manager) == [(0, 1)]
        for i, name in enumerate(("up", "down")):
            assert last[name, "input"] == max(seen[i] for seen in inputs)
            assert last[name, "grad_output"] == max(seen[i] for seen in gradients)
            assert last[name, "weight"] == weights[name]
    report = manager.check(parameters=True)
    assert report.consistent, str(report)
    assert report.compared["parameter"] == 3  # The norm's two parameters and the row-wise bias.


@on_ranks(2)
def test_a_copy_has_its_own_state() -> None:
    layout = LAYOUTS["default"]
    model, manager, _ = parallel_pair(layout)
    forward_backward(model, layout, 0)
    manager.step()
    for kept in ("n", "z", "h", "y"):
        delattr(model, kept)
    before = state_bits(manager)
    twin = copy.deepcopy(model)
    twins = fp8dist.get_manager(twin)
    assert twins is not manager
    assert state_bits(twins) == before
    twins.attach(twin)
    results = []
    runs: list[tuple[Pair, StateManager]] = [(twin, twins), (model, manager)]
    for one, of_one in runs:
        one.zero_grad()
        with watched_reductions() as reductions:
            forward_backward(one, layout, 1)
            of_one.step()
        assert reductions.of(of_one) == [(0, 1)]
        results.append((state_bits(of_one), [whole(p.grad).tolist() for p in one.parameters()]))  # type: ignore[arg-type]
        if one is twin:
            assert state_bits(manager) == before
    assert results[0] == results[1]
