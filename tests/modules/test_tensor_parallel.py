"""Tensor parallelism: products of parts equal the whole product, and the ranks of the axis share its scales."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import fp8dist
from fp8dist import DelayedScaling
from tests.support.linear import E4M3, E5M2, amax, dequantised
from tests.support.parallel import (
    assert_affine,
    assert_sum_of_tokens,
    mesh_of,
    same_on_all_ranks,
    watched_reductions,
    whole,
)
from tests.support.ranks import on_ranks
from tests.support.tensor_parallel import (
    LAYOUTS,
    Pair,
    all_of,
    forward_backward,
    gradient_of,
    last_amaxes,
    parallel_pair,
    x_of,
)
from tests.support.training import state_bits


def _assert_gemms(
    model: Pair,
    full: dict[str, Tensor],
    fp8: dict[tuple[str, str], Tensor],
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, Tensor],
) -> None:
    """Compare outputs and gradients of up and down with products of the whole dequantised operands."""
    for name, y, dx, dy in zip(("up", "down"), results[:2], results[2:], gradients):
        a, w, g = (fp8[name, role] for role in ("input", "weight", "grad_output"))
        assert_affine(y, a, w, full.get(f"{name}.bias"))
        assert_affine(dx, g, w.t())
        layer = model.get_submodule(name)
        assert isinstance(layer.weight, DTensor)
        rows = g.reshape(-1, g.shape[-1]).t()
        assert_affine(whole(layer.weight.grad), rows, a.reshape(-1, a.shape[-1]).t())
        if layer.bias is not None:
            assert_sum_of_tokens(all_of(layer.bias.grad, Replicate()), dy)


@pytest.mark.parametrize("name", LAYOUTS)
@on_ranks(2)
def test_products_of_parts_are_those_of_the_whole(name: str) -> None:
    layout = LAYOUTS[name]
    model, manager, full = parallel_pair(layout)
    for index in range(3):
        scales = {(s.fqn, s.role): manager.slot(s.fqn, s.role).scale.clone() for s in manager.slots}
        model.zero_grad()
        with watched_reductions() as reductions:
            x = forward_backward(model, layout, index)
            assert reductions.seen == []
            manager.step()
        assert reductions.of(manager) == [(0, 1)]
        token = Shard(1) if layout.sequence else Replicate()
        n, z, h = all_of(model.n, token), all_of(model.z, layout.middle), all_of(model.h, layout.middle)
        dn, dz, dh = (
            all_of(kept.grad, place)
            for kept, place in ((model.n, token), (model.z, layout.middle), (model.h, layout.middle))
        )
        g = gradient_of(index).to(layout.dtype)
        seen = {
            ("up", "input"): n, ("up", "weight"): full["up.weight"], ("up", "grad_output"): dz,
            ("down", "input"): h, ("down", "weight"): full["down.weight"], ("down", "grad_output"): g,
        }  # fmt: skip
        # Every slot's newest amax is the whole tensor's, whichever rank holds the largest element.
        assert last_amaxes(manager) == {slot: amax(tensor) for slot, tensor in seen.items()}
        if (
            index and layout.dtype is torch.float32
        ):  # In the first step slots are cold: each rank casts by its own amax.
            fp8 = {s: dequantised(t, E5M2 if s[1] == "grad_output" else E4M3, scales[s]) for s, t in seen.items()}
            _assert_gemms(model, full, fp8, (z, all_of(model.y, layout.out), dn, dh), (dz, g))
    assert x.grad is not None
    same_on_all_ranks(state_bits(manager))


@on_ranks(2)
def test_first_step_has_the_amaxes_of_a_single_process() -> None:
    layout = LAYOUTS["default"]
    _, manager, _ = parallel = parallel_pair(layout)
    forward_backward(parallel[0], layout, 0)
    manager.step()
    alone = Pair(layout)
    own = fp8dist.prepare(alone, DelayedScaling(history_len=4), amax_sync=False)
    own.attach(alone)
    alone(x_of(0)).mul(gradient_of(0)).sum().backward()
    own.step()
    for slot in (("up", "input"), ("up", "weight"), ("down", "weight"), ("down", "grad_output")):
        assert manager.slot(*slot).amax_history.tolist() == own.slot(*slot).amax_history.tolist()
        assert float(manager.slot(*slot).scale) == float(own.slot(*slot).scale)
    # Of other slots each rank sees a part; cold casts of parts round slightly differently.
    torch.testing.assert_close(manager.slot("down", "input").amax, own.slot("down", "input").amax, rtol=0.1, atol=0)


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
    assert_affine(whole(x.grad), d, v.t())  # type: ignore[arg-type]
    assert_affine(whole(linear.weight.grad), d.t(), a.t())  # type: ignore[arg-type]
    assert_sum_of_tokens(whole(linear.bias.grad), g)  # type: ignore[arg-type]
