"""FP8Experts: conversion, copies, state, and what is refused. Its numbers are in ``test_grouped_linear.py``."""

from __future__ import annotations

import copy
import io
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fp8dist
from fp8dist import CurrentScaling, DelayedScaling, FP8Experts
from fp8dist.errors import ConfigurationError
from tests.support.counted import Operations
from tests.support.experts import Experts, Mixture, routes, rows
from tests.support.logs import captured_log
from tests.support.sharded_experts import Routed, routed_batch
from tests.support.states import state_of
from tests.support.suite import few
from tests.support.training import bits


def run(model: nn.Module, seed: int = 1) -> Tensor:
    index, weights = routes(16, 2, range(4), seed)
    out: Tensor = model(rows(16, 32, seed), index, weights)
    return out


@pytest.mark.parametrize(("counted", "lr", "bound"), [(True, 0.1, 0.04), (False, 1e-4, 0.06)])
def test_a_written_weight_is_cast_with_its_own_amax(counted: bool, lr: float, bound: float) -> None:
    """For each expert: one that outgrew its scale is not saturated, and the others keep their scales."""
    model = Mixture(Experts())
    manager = fp8dist.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    manager.attach(model, optimizer=optimizer)
    run(model).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    experts: Any = model.experts
    with torch.no_grad():
        if counted:
            experts.gate_up_proj[2] *= 8
        else:
            experts.gate_up_proj.data *= 1.9
    ends = torch.tensor([4, 8, 12, 16], dtype=torch.int32)
    x = rows(16, 32, 1)
    out = fp8dist.grouped_linear(x, experts.gate_up_proj, ends, experts.fp8_products["gate_up_proj"])
    high = torch.cat([x[4 * e : 4 * e + 4] @ experts.gate_up_proj[e].t() for e in range(4)])
    # E4M3 has 4 bits of precision; sums of 32 products average the errors out. Saturated by 1.9, it is 0.11.
    assert float((out - high).detach().norm() / high.detach().norm()) < bound


def test_no_host_synchronisation() -> None:
    """The twins in plain torch read offsets on the host; nothing else does."""
    reads = ("_local_scalar_dense", "nonzero", "aten.equal", "is_nonzero")
    for recipe in (DelayedScaling(), CurrentScaling(), fp8dist.RowwiseScaling()):
        model = Mixture(Experts())
        manager = fp8dist.prepare(model, recipe)
        manager.attach(model)
        with Operations() as ops:  # The dispatcher then shows grouped ops, and not what is inside them.
            run(model).sum().backward()
        assert not [op for op in map(str, ops.seen) if any(part in op for part in reads)]


def test_batches_without_tokens() -> None:
    model = Mixture(Experts())
    fp8dist.prepare(model).attach(model)
    x = torch.zeros(0, 32, requires_grad=True)
    out = model(x, torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    out.sum().backward()
    assert out.shape == (0, 32)
    assert bits(model.experts.down_proj.grad) == bits(torch.zeros(4, 32, 48))


def test_switched_off_it_computes_what_it_did() -> None:
    """A module without a forward of its own computes nearly the same."""

    class Bare(Experts):
        forward = nn.Module.forward

    expected = run(Experts())
    for kind in (Experts, Bare):
        model = Mixture(kind())
        with captured_log():
            fp8dist.prepare(model, enabled=False)
        assert kind is Bare or bits(run(model)) == bits(expected)
        torch.testing.assert_close(run(model), expected)


def test_experts_of_other_ranks_add_nothing_through_a_norm() -> None:
    experts: Any = Experts()
    experts.has_post_expert_norm, experts.post_expert_norm = True, nn.LayerNorm(32)
    nn.init.ones_(experts.post_expert_norm.bias)
    model = Mixture(experts)
    fp8dist.prepare(model)
    assert not model(rows(3, 32, 1), torch.full((3, 2), 4), torch.ones(3, 2)).any()


def test_history_of_experts_is_short_by_default() -> None:
    """Experts share the arena of the Linears, and its collective, if their histories are as long."""
    for recipe, overrides, experts, inlet in (
        (None, None, 16, 1024),
        (DelayedScaling(history_len=4), None, 4, 4),
        (None, {"experts": DelayedScaling(history_len=20)}, 20, 1024),
    ):
        manager = fp8dist.prepare(Routed(), recipe, overrides=overrides)
        for fqn, length in (("experts.down.3", experts), ("inlet", inlet)):
            assert manager.slot(fqn, "weight").recipe.history_len == length
        assert len(manager._syncs) == (1 if experts == inlet else 2)


def _set(name: str, *value: Any) -> Any:
    """``value``: of an attribute, or the shape of a parameter."""
    parameter = len(value) > 1
    return lambda model: setattr(model.experts, name, nn.Parameter(torch.randn(value)) if parameter else value[0])


def _shared(model: Any) -> None:
    model.more = Experts(bias=True)
    model.more.down_proj = model.experts.down_proj


LEFT_OUT: list[tuple[Any, str]] = [
    (lambda model: setattr(model, "experts", Experts(hidden=40)), "dims of 4 x 96 x 40 are not multiples of 16"),
    (_set("_is_expert_parallel", True), "expert parallelism is not supported yet"),
    (_set("forward", torch.relu), "its forward was replaced"),
    (None, "it matches skip"),
    (_shared, "another module uses its weights, too"),
    (_set("down_proj", 3, 32, 48), "gate_up_proj (4, 96, 32) and down_proj (3, 32, 48) do not fit each other"),
    (_set("down_proj", 4, 48, 32), "has_gate=True, is_transposed=False"),
    (_set("gate_up_proj", 4, 32, 96), "gate_up_proj (4, 32, 96) and down_proj (4, 32, 48) do not fit"),
    (_set("down_proj_bias", 4, 48), "down_proj_bias (4, 48) does not fit down_proj (4, 32, 48): expected (4, 32)"),
]


@pytest.mark.parametrize(("change", "reason"), LEFT_OUT, ids=[reason for _, reason in LEFT_OUT])
def test_what_prepare_leaves_out(change: Any, reason: str) -> None:
    model = Mixture(Experts(bias=True))
    if change is not None:
        change(model)
    with captured_log():
        manager = fp8dist.prepare(model, skip="experts" if change is None else ())
    row = next(iter(manager.coverage()))
    assert not row.fp8
    assert reason in row.reason
    assert fp8dist.describe(manager)["modules"][0]["experts"] in (3, 4)  # The MFU must not count the FLOPs of all.


def test_mistakes_are_refused_with_what_to_do() -> None:
    model = Mixture(Experts())
    with pytest.raises(ConfigurationError, match="experts: fp8_all_gather=True does not work with RowwiseScaling"):
        fp8dist.prepare(model, overrides={"experts": fp8dist.RowwiseScaling()}, fp8_all_gather=True)
    assert type(model.experts) is Experts
    manager = fp8dist.prepare(model)
    with pytest.raises(ConfigurationError, match=r"single experts, such as 'experts\.down\.0'"):
        manager.set_precision("experts", "high")
    parametrize.register_parametrization(model.experts, "gate_up_proj", nn.Tanh())
    with pytest.raises(ConfigurationError, match="as after a parametrization: undo it, or leave them in high"):
        manager.attach()


def test_warnings_of_prepare() -> None:
    """Of a router in FP8, and of patterns: a group may be that of a product, other patterns are for modules."""

    def warned(model: nn.Module, **options: Any) -> list[str]:
        with captured_log() as log:
            fp8dist.prepare(model, **options)
        return [text for _, text in log]

    def mixture() -> nn.Module:
        modules = {"router": nn.Linear(32, 16), "up": nn.Linear(32, 48), "experts": Experts(16)}
        return nn.ModuleDict({"mlp": nn.ModuleDict(modules)})

    (text,) = warned(mixture())
    assert text.startswith("fp8dist: mlp.router: as many outputs as the mixture has experts.")
    assert warned(mixture(), skip=re.findall(r"skip='(.*)'", text)) == []
    (text,) = warned(Routed(), groups={"experts.gate_up": None}, skip="experts.down", amax_sync=False)
    assert "skip: no module with a matmul weight matches 'experts.down'" in text


def test_copies_pickles_checkpoints_and_restore() -> None:
    torch.manual_seed(0)
    model = Routed()
    plain, resumed = copy.deepcopy(model), copy.deepcopy(model)
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4))
    assert list(model.state_dict()) == list(plain.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.attach(model, optimizer=optimizer)
    for step in range(3):
        model(routed_batch(0, step, 4)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    x = routed_batch(0, 9, 4)
    expected = bits(model.eval()(x))
    of_resumed = fp8dist.prepare(resumed, DelayedScaling(history_len=4))
    of_resumed.load_state_dict(manager.state_dict())
    assert state_of(of_resumed) == state_of(manager)
    copied, unpickled = copy.deepcopy(model), torch.load(stream, weights_only=False)
    for other in (copied, unpickled):
        assert isinstance(other.experts, FP8Experts)
        assert isinstance(other.experts, Experts)
        products = other.experts.fp8_products["down_proj"]
        assert products.owner() is other.experts
        of_other = fp8dist.get_manager(other)
        assert state_of(of_other) == state_of(manager)
        assert bits(other.eval()(x)) == expected
        of_other.attach(other)
        of_other.set_precision("experts.down.*", "high")  # A compiled forward finds the choice that it cannot make.
        assert products._choice[2].all_high
    fp8dist.restore(model)
    assert type(model.experts) is Experts
    plain.load_state_dict(model.state_dict())
    assert bits(model(x)) == bits(plain(x))
    fp8dist.prepare(model)


def test_fallback_of_one_expert() -> None:
    model = Mixture(Experts())
    manager = fp8dist.prepare(model, fallback=fp8dist.Fallback(steps=3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    manager.attach(model, optimizer=optimizer)
    index, weights = torch.arange(4)[:, None].repeat(4, 1), torch.ones(16, 1)
    for poison in (torch.inf, 0.0):
        x = rows(16, 32, 1)
        x[2, 0] += poison
        with captured_log():
            model(x, index, weights).nan_to_num().sum().backward()
            optimizer.step()
    high = {fqn for fqn, of in manager._cycle.precisions.by_fqn.items() if of.high}
    assert high == {"experts.gate_up.2", "experts.down.2"}
    assert "2 of 8 products of experts are high" in str(manager.coverage())
    for fprop in ("fp8", "high"):
        described = fp8dist.describe(manager)["modules"][0]
        assert (described["gemms"]["fprop"], described["experts"]) == (fprop, 4)
        manager.set_precision("*", "high", ("fprop",))


def test_a_registered_slot_does_not_part_the_experts() -> None:
    model = Mixture(Experts())
    manager = fp8dist.prepare(model)
    for fqn in ("experts.gate_up.1.extra", "experts.gate_up"):
        manager.register(fqn, "input", "e4m3")
    manager.attach(model)
    run(model).sum().backward()
    manager.step()
    arena = manager._cycle.syncs[0].arena
    assert not arena.cold[arena.run_of([fp8dist.Slot(f"experts.gate_up.{e}", "input") for e in range(4)])].any()
    assert bool(manager.slot("experts.gate_up", "input").amax == 0)


COMPILED = (DelayedScaling(history_len=4), fp8dist.RowwiseScaling(), fp8dist.BlockScaling())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it itself.
@pytest.mark.parametrize(
    ("recipe", "changed"), few([*((recipe, None) for recipe in COMPILED), (COMPILED[0], 3)], (COMPILED[0], None))
)
def test_compiled_whole_without_recompiles(recipe: fp8dist.Recipe, changed: int | None) -> None:
    """As token counts change, and equal to eager training bit for bit. A changed precision compiles once more."""
    outcomes = []
    steps = 3 if changed is None else 5
    for compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = Mixture(Experts()).bfloat16()  # torch compiles grouped_mm in this dtype only.
        manager = fp8dist.prepare(model, recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        manager.attach(model, optimizer=optimizer)
        called = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager") if compiled else model
        for step in range(steps):
            if step == changed:
                manager.set_precision("experts.down.1", "high")
            index, weights = routes(17 + step, 2, range(4), step)
            called(rows(17 + step, 32, step).bfloat16(), index, weights.bfloat16()).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            assert graphs == (0 if not compiled else 1 if changed is None or step < changed else 2)
        outcomes.append((state_of(manager), bits(model.experts.down_proj)))
    assert outcomes[0] == outcomes[1]
