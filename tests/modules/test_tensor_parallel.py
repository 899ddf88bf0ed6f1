"""Tensor parallelism: products of parts equal the whole product, the ranks of the axis share its scales, and what has
no product is refused."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import fp8dist
from fp8dist import DelayedScaling, StateManager
from fp8dist.errors import ConfigurationError
from tests.support.collectives import counted_collectives
from tests.support.linear import E4M3, E5M2, amax, dequantised
from tests.support.parallel import (
    assert_affine,
    assert_sum_of_tokens,
    mesh_of,
    same_on_all_ranks,
    whole,
)
from tests.support.ranks import on_ranks
from tests.support.training import histories, state_bits

LAST = Shard(-1)


@dataclass(frozen=True)
class Layout:
    """How ``up`` and ``down`` are split, and the layouts of their inputs and outputs."""

    up: dict[str, Any] = field(default_factory=dict)
    down: dict[str, Any] = field(default_factory=dict)
    sequence: bool = False  # x is [batch, part of the sequence, features], and a norm runs on the part.
    bias: bool = True
    dtype: torch.dtype = torch.float32

    @property
    def middle(self) -> Placement:
        return self.up.get("output_layouts", LAST)

    @property
    def out(self) -> Placement:
        return self.down.get("output_layouts", Replicate())


class Pair(nn.Module):
    """norm → up → relu → down; keeps the intermediate tensors."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.LayerNorm(32) if layout.sequence else nn.Identity()
        self.up = nn.Linear(32, 64, bias=layout.bias)
        self.down = nn.Linear(64, 48, bias=layout.bias)

    def forward(self, x: Tensor) -> Tensor:
        self.n = self.norm(x)
        self.z = self.up(self.n)
        self.h = torch.relu(self.z)
        for kept in (self.n, self.z, self.h):
            if kept.requires_grad:
                kept.retain_grad()
        self.y = self.down(self.h)
        return self.y


def x_of(index: int) -> Tensor:
    return torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(index)) * (1 + index)


def gradient_of(index: int) -> Tensor:
    return torch.randn(2, 8, 48, generator=torch.Generator().manual_seed(100 + index))


def parallelize(model: Pair, layout: Layout) -> None:
    plan: dict[str, Any] = {"up": ColwiseParallel(**layout.up), "down": RowwiseParallel(**layout.down)}
    if layout.sequence:
        plan["norm"] = SequenceParallel()
    parallelize_module(model, mesh_of((2,), ("tp",)), plan)


def parallel_pair(layout: Layout, **settings: Any) -> tuple[Pair, StateManager, dict[str, Tensor]]:
    model = Pair(layout).to(layout.dtype)
    full = {name: p.detach().clone() for name, p in model.named_parameters()}
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4), group=mesh_of((2,), ("tp",)), **settings)
    parallelize(model, layout)
    manager.attach(model)
    return model, manager, full


def given(full: Tensor, placement: Placement) -> Tensor:
    return distribute_tensor(full.detach(), mesh_of((2,), ("tp",)), [placement]).to_local().clone()


def all_of(tensor: Tensor | None, placement: Placement) -> Tensor:
    """Return the whole of a module's output, which is a DTensor or this rank's part."""
    assert tensor is not None
    if isinstance(tensor, DTensor):
        assert not any(isinstance(p, Partial) for p in tensor.placements)
        return whole(tensor)
    return DTensor.from_local(tensor.detach(), mesh_of((2,), ("tp",)), [placement]).full_tensor()


def forward_backward(model: Pair, layout: Layout, index: int) -> Tensor:
    x = given(x_of(index).to(layout.dtype), Shard(1) if layout.sequence else Replicate()).requires_grad_()
    y = model(x)
    if y.requires_grad:
        g = given(gradient_of(index).to(layout.dtype), layout.out)
        (y.to_local() if isinstance(y, DTensor) else y).mul(g).sum().backward()
    return x


LAYOUTS = {
    "default": Layout(),
    "DTensors between, no bias": Layout({"use_local_output": False}, {"use_local_output": False}, bias=False),
    "middle replicated": Layout({"output_layouts": Replicate()}, {"input_layouts": Replicate()}),
    "middle by tokens": Layout({"output_layouts": Shard(1)}, {"input_layouts": Shard(1)}),
    "out by features, DTensor": Layout({}, {"output_layouts": LAST, "use_local_output": False}),
    "out by batch": Layout({"use_local_output": False}, {"output_layouts": Shard(0)}),
    "in by tokens": Layout({"input_layouts": Shard(1)}, {"output_layouts": Shard(1)}, sequence=True),
    "bfloat16": Layout({"input_layouts": Shard(1)}, {"output_layouts": Shard(1)}, sequence=True, dtype=torch.bfloat16),
}


def last_amaxes(manager: StateManager) -> dict[tuple[str, str], float]:
    return {slot: window[-1] for slot, window in histories(manager).items()}


@pytest.mark.parametrize("name", LAYOUTS)
@on_ranks(2)
def test_products_of_parts_are_those_of_the_whole(name: str) -> None:
    layout = LAYOUTS[name]
    model, manager, full = parallel_pair(layout)
    for index in range(2):
        scales = {(s.fqn, s.role): manager.slot(s.fqn, s.role).scale.clone() for s in manager.slots}
        model.zero_grad()
        with counted_collectives() as calls:
            forward_backward(model, layout, index)
            assert calls.reductions == []
            manager.step()
        assert calls.syncs(manager) == [(0, 1)]
        token = Shard(1) if layout.sequence else Replicate()
        places = ((model.n, token), (model.z, layout.middle), (model.h, layout.middle))
        n, z, h = (all_of(kept, place) for kept, place in places)
        dn, dz, dh = (all_of(kept.grad, place) for kept, place in places)
        g = gradient_of(index).to(layout.dtype)
        seen = {
            ("up", "input"): n, ("up", "weight"): full["up.weight"], ("up", "grad_output"): dz,
            ("down", "input"): h, ("down", "weight"): full["down.weight"], ("down", "grad_output"): g,
        }  # fmt: skip
        # Every slot's newest amax is the whole tensor's, whichever rank holds the largest element.
        assert last_amaxes(manager) == {slot: amax(tensor) for slot, tensor in seen.items()}
        if index == 0 or layout.dtype is not torch.float32:
            continue  # In the first step slots are cold: each rank casts by its own amax.
        for of, y, dx in (("up", z, dn), ("down", all_of(model.y, layout.out), dh)):
            a, w, d = (
                dequantised(seen[of, role], E5M2 if role == "grad_output" else E4M3, scales[of, role])
                for role in ("input", "weight", "grad_output")
            )
            layer: Any = model.get_submodule(of)
            assert_affine(y, a, w, full.get(f"{of}.bias"))
            assert_affine(dx, d, w.t())
            assert_affine(whole(layer.weight.grad), d.reshape(-1, d.shape[-1]).t(), a.reshape(-1, a.shape[-1]).t())
            if layout.bias:
                assert_sum_of_tokens(all_of(layer.bias.grad, Replicate()), seen[of, "grad_output"])
    same_on_all_ranks(state_bits(manager))
    if layout.sequence:
        report = manager.check(parameters=True)
        assert report.consistent, str(report)
        assert report.compared["parameter"] == 3  # The norm's two parameters and the row-wise bias.


@pytest.mark.parametrize("rows", [9, 1])
@pytest.mark.parametrize(
    ("weight", "bias", "input"),
    [
        (Shard(0), Shard(0), Replicate()),
        (Shard(1), Replicate(), Shard(1)),
        (Replicate(), Replicate(), Replicate()),
        (Replicate(), Replicate(), Shard(0)),
    ],
    ids=["columns", "rows", "replicated", "replicated, sharded tokens"],
)
@on_ranks(2)
def test_any_number_of_tokens(weight: Placement, bias: Placement, input: Placement, rows: int) -> None:
    """One token, sharded over two ranks: one rank has none."""
    mesh = mesh_of((2,), ("tp",))
    torch.manual_seed(4)
    linear = nn.Linear(32, 64)
    w, b = linear.weight.detach().clone(), linear.bias.detach().clone()
    model = nn.Sequential(linear)
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4), group=mesh)
    linear.weight = nn.Parameter(distribute_tensor(w, mesh, [weight]))
    linear.bias = nn.Parameter(distribute_tensor(b, mesh, [bias]))
    manager.attach(model)
    for index in range(2):
        model.zero_grad()
        generator = torch.Generator().manual_seed(index)
        full, g = torch.randn(rows, 32, generator=generator), torch.randn(rows, 64, generator=generator)
        sx, sw, sg = (manager.slot("0", role).scale.clone() for role in ("input", "weight", "grad_output"))
        x = distribute_tensor(full, mesh, [input]).requires_grad_()
        y = model(x)
        y.redistribute(mesh, [Replicate()]).backward(distribute_tensor(g, mesh, [Replicate()]))
        manager.step()
        assert [last_amaxes(manager)["0", role] for role in ("input", "weight", "grad_output")] == [
            amax(full), amax(w), amax(g),
        ]  # fmt: skip
    assert y.shape == g.shape
    a, v, d = dequantised(full, E4M3, sx), dequantised(w, E4M3, sw), dequantised(g, E5M2, sg)
    assert_affine(whole(y), a, v, b)
    assert_affine(whole(x.grad), d, v.t())
    assert_affine(whole(linear.weight.grad), d.t(), a.t())
    assert_sum_of_tokens(whole(linear.bias.grad), g)


def _refusal(
    placements: Sequence[Placement] = (),
    input: Placement | None = None,
    style: Any = None,
    rows: int = 32,
    columns: int = 32,
    group: Any = None,
    dtype: torch.dtype = torch.float32,
) -> str:
    """Return the error of ``attach``, or of the first forward. ``placements``: of weight and bias, unless ``style``
    places them. ``input``: the input's; None: a plain tensor."""
    mesh = mesh_of((2,), ("tp",))
    model = nn.ModuleDict({"inner": nn.ModuleDict({"proj": nn.Linear(columns, rows)})})
    manager = fp8dist.prepare(model, group=group or mesh)
    proj: Any = model.get_submodule("inner.proj")
    if style is not None:
        parallelize_module(model, mesh, {"inner.proj": style})
    for name, placement in zip(("weight", "bias"), placements):
        setattr(proj, name, nn.Parameter(distribute_tensor(getattr(proj, name).detach(), mesh, [placement])))
    x = torch.randn(4, columns // 2 if input == Shard(1) else columns).to(dtype)
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
        (_refusal(columns, Replicate(), dtype=torch.int64), "expected an input in float32"),
        (_refusal(style=ColwiseParallel(), group=own), alone),
        *((_refusal(of, input), "") for of, input in placements),
    ]
    assert len(refusals) == 12
    for text, named in refusals:
        assert "inner.proj" in text
        assert named in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"), [("in by tokens", "eval"), ("default", "no_fp8"), ("in by tokens", "calibrate")]
)
@on_ranks(2)
def test_high_precision_is_that_of_the_plain_model(name: str, how: str) -> None:
    layout = LAYOUTS[name]
    model, manager, _ = parallel_pair(layout, eval_precision="high")
    plain = Pair(layout)
    parallelize(plain, layout)
    before = state_bits(manager)
    model.train(how != "eval")
    with {"no_fp8": manager.no_fp8, "calibrate": manager.calibrate}.get(how, contextlib.nullcontext)():
        x = forward_backward(model, layout, 0)
    expected = forward_backward(plain, layout, 0)
    pairs = [(model.z, plain.z), (model.y, plain.y), (x.grad, expected.grad)]
    if how != "calibrate":  # It leaves parameter gradients unchanged: there were none.
        pairs += [(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters())]
    for mine, theirs in pairs:
        assert type(mine) is type(theirs)
        torch.testing.assert_close(whole(mine), whole(theirs), rtol=1e-5, atol=1e-5)
    if how != "calibrate":
        assert state_bits(manager) == before
        return
    seen = {
        ("up", "input"): all_of(model.n, Shard(1)), ("down", "input"): all_of(model.h, layout.middle),
        ("up", "grad_output"): all_of(model.z.grad, layout.middle), ("down", "grad_output"): gradient_of(0),
        ("up", "weight"): whole(model.up.weight), ("down", "weight"): whole(model.down.weight),
    }  # fmt: skip
    assert last_amaxes(manager) == {slot: amax(tensor) for slot, tensor in seen.items()}


@pytest.mark.slow
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
    assert state_bits(twins) == before
    twins.attach(twin)
    results = []
    for one, of_one in ((twin, twins), (model, manager)):
        assert state_bits(manager) == before
        one.zero_grad()
        with counted_collectives() as calls:
            forward_backward(one, layout, 1)
            of_one.step()
        assert calls.syncs(of_one) == [(0, 1)]
        results.append((state_bits(of_one), [whole(p.grad).tolist() for p in one.parameters()]))
    assert results[0] == results[1]
