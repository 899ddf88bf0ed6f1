"""FP8Experts: conversion, copies, state, and what is refused. Its numbers are in ``test_grouped_linear.py``."""

from __future__ import annotations

import copy
import io
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize

import fp8dist
from fp8dist import CurrentScaling, DelayedScaling, FP8Experts
from fp8dist.errors import ConfigurationError
from tests.support.collectives import counted_collectives
from tests.support.experts import Experts, Mixture, routes, rows
from tests.support.logs import captured_log
from tests.support.ranks import RankPool
from tests.support.states import state_of
from tests.support.suite import few
from tests.support.training import bits

EXPERTS = 8


class Routed(nn.Module):
    """A mixture whose batch says which expert each row goes to: x [n, 33], the last column is the expert."""

    def __init__(self, gate: bool = True) -> None:
        super().__init__()
        self.inlet = nn.Linear(32, 32)
        self.experts: Any = Experts(EXPERTS, gate=gate)

    def forward(self, x: Tensor) -> Tensor:
        """Return the experts' outputs: [n, 32]."""
        index = x[:, 32:].long()
        out: Tensor = self.experts(self.inlet(x[:, :32]), index, torch.ones_like(index, dtype=x.dtype))
        return out


def batch(seed: int) -> Tensor:
    """Return rows and their routes; some experts have no row."""
    index, _ = routes(12, 1, [e for e in range(EXPERTS) if (e + seed) % 5], seed)
    return torch.cat([rows(12, 32, seed), index.float()], 1)


@pytest.mark.parametrize(("counted", "lr", "bound"), [(True, 0.1, 0.04), (False, 1e-4, 0.06)])
def test_a_written_weight_is_cast_with_its_own_amax(counted: bool, lr: float, bound: float) -> None:
    """For each expert: one that outgrew its scale is not saturated, and the others keep their scales."""
    model = Mixture(Experts())
    manager = fp8dist.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    manager.attach(model, optimizer=optimizer)
    index, weights = routes(16, 2, range(4), 1)
    model(rows(16, 32, 1), index, weights).sum().backward()
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


def test_groups_and_patterns_of_products() -> None:
    """A group may be that of a product. Other patterns are for modules, and one that matches none says so."""
    with captured_log() as log:
        manager = fp8dist.prepare(Routed(), groups={"experts.gate_up": None}, skip="experts.down", amax_sync=False)
    ((_, message),) = log
    assert "skip: no module with a matmul weight matches 'experts.down'" in message
    assert manager.coverage().share == 1


def test_no_host_synchronisation() -> None:
    """The twins in plain torch read offsets on the host; nothing else does."""
    read: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(func)
            if any(part in name for part in ("_local_scalar_dense", "nonzero", "aten.equal", "is_nonzero")):
                read.append(name)
            return func(*args, **(kwargs or {}))

    for recipe in (DelayedScaling(), CurrentScaling(), fp8dist.RowwiseScaling()):
        model = Mixture(Experts())
        manager = fp8dist.prepare(model, recipe)
        manager.attach(model)
        index, weights = routes(16, 2, range(4), 1)
        with Watch():  # The dispatcher then shows grouped ops, and not what is inside them.
            model(rows(16, 32, 1), index, weights).sum().backward()
        assert read == []


def test_batches_without_tokens() -> None:
    model = Mixture(Experts())
    fp8dist.prepare(model).attach(model)
    x = torch.zeros(0, 32, requires_grad=True)
    out = model(x, torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    out.sum().backward()
    assert out.shape == (0, 32)
    assert bits(model.experts.down_proj.grad) == bits(torch.zeros(4, 32, 48))  # type: ignore[arg-type, union-attr]


def test_switched_off_without_a_forward_of_its_own() -> None:
    class Bare(Experts):
        forward = nn.Module.forward

    index, weights = routes(9, 2, range(4), 1)
    model = Mixture(Bare())
    with captured_log():
        fp8dist.prepare(model, enabled=False)
    torch.testing.assert_close(model(rows(9, 32, 1), index, weights), Experts()(rows(9, 32, 1), index, weights))


def test_experts_of_other_ranks_add_nothing_through_a_norm() -> None:
    experts: Any = Experts()
    experts.has_post_expert_norm, experts.post_expert_norm = True, nn.LayerNorm(32)
    nn.init.ones_(experts.post_expert_norm.bias)
    model = Mixture(experts)
    fp8dist.prepare(model)
    assert not model(rows(3, 32, 1), torch.full((3, 2), 4), torch.ones(3, 2)).any()


def test_history_of_experts_is_short_by_default() -> None:
    for recipe, overrides, experts, inlet in (
        (None, None, 16, 1024),
        (DelayedScaling(history_len=4), None, 4, 4),
        (None, {"experts": DelayedScaling(history_len=20)}, 20, 1024),
    ):
        manager = fp8dist.prepare(Routed(), recipe, overrides=overrides)
        for fqn, length in (("experts.down.3", experts), ("inlet", inlet)):
            assert manager.slot(fqn, "weight").recipe.history_len == length


def _expert_parallel(model: Any) -> None:
    model.experts._is_expert_parallel = True


def _own_forward(model: Any) -> None:
    model.experts.forward = model.experts.forward


def _shared(model: Any) -> None:
    model.more = Experts(bias=True)
    model.more.down_proj = model.experts.down_proj


def _reshaped(name: str, *shape: int) -> Any:
    return lambda model: setattr(model.experts, name, nn.Parameter(torch.randn(shape)))


LEFT_OUT: list[tuple[Any, str]] = [
    (lambda model: setattr(model, "experts", Experts(hidden=40)), "dims of 4 x 96 x 40 are not multiples of 16"),
    (_expert_parallel, "expert parallelism is not supported yet"),
    (_own_forward, "its forward was replaced"),
    (None, "it matches skip"),
    (_shared, "another module uses its weights, too"),
    (_reshaped("down_proj", 3, 32, 48), "gate_up_proj (4, 96, 32) and down_proj (3, 32, 48) do not fit each other"),
    (_reshaped("down_proj", 4, 48, 32), "has_gate=True, is_transposed=False"),
    (_reshaped("gate_up_proj", 4, 32, 96), "gate_up_proj (4, 32, 96) and down_proj (4, 32, 48) do not fit"),
    (_reshaped("down_proj_bias", 4, 48), "down_proj_bias (4, 48) does not fit down_proj (4, 32, 48): expected (4, 32)"),
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


def test_a_router_in_fp8_is_warned_of() -> None:
    def warnings(skip: Any) -> list[str]:
        model = nn.ModuleDict({"router": nn.Linear(32, 16), "up": nn.Linear(32, 48), "experts": Experts(16)})
        with captured_log() as log:
            fp8dist.prepare(nn.ModuleDict({"mlp": model}), skip=skip)
        return [text for level, text in log if "outputs as" in text]

    (text,) = warnings(None)
    assert text.startswith("fp8dist: mlp.router: as many outputs as the mixture has experts.")
    assert warnings(re.findall(r"skip='(.*)'", text)) == []


def _collectives(history: int, steps: int) -> int:
    net = Routed()
    manager = fp8dist.prepare(net, DelayedScaling(history_len=history), group=dist.group.WORLD)
    manager.attach(net, boundary="manual")
    with counted_collectives() as calls:
        for step in range(steps):
            net(batch(step)).sum().backward()
            manager.step()
    return calls.names.count("all_reduce")


def test_one_collective_per_step_and_arena(two_ranks: RankPool) -> None:
    """Experts share the arena of the Linears if their histories are as long, else they have one of their own."""
    for history, arenas in ((4, 1), (64, 2)):
        few, many = (two_ranks.run(_collectives, history, steps)[0] for steps in (2, 5))
        assert many - few == 3 * arenas


def test_copies_pickles_checkpoints_and_restore() -> None:
    torch.manual_seed(0)
    model = Routed()
    plain, resumed = copy.deepcopy(model), copy.deepcopy(model)
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4))
    assert list(model.state_dict()) == list(plain.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.attach(model, optimizer=optimizer)
    for step in range(3):
        model(batch(step)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    x = batch(9)
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
    """An expert whose input is not finite falls back on its own."""
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
    index, weights = routes(16, 2, range(4), 1)
    model(rows(16, 32, 1), index, weights).sum().backward()
    manager.step()
    arena = manager._cycle.syncs[0].arena
    assert not arena.cold[arena.run_of([fp8dist.Slot(f"experts.gate_up.{e}", "input") for e in range(4)])].any()
    assert bool(manager.slot("experts.gate_up", "input").amax == 0)


COMPILED = (DelayedScaling(history_len=4), fp8dist.RowwiseScaling(), fp8dist.BlockScaling())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it itself.
@pytest.mark.parametrize("recipe", few(COMPILED, COMPILED[0]))
def test_compiled_whole_without_recompiles(recipe: fp8dist.Recipe) -> None:
    """As token counts change, and equal to eager training bit for bit. A changed precision compiles once more."""
    outcomes = []
    steps, changed = (5, 3) if recipe.delayed else (2, None)
    for compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = Mixture(Experts()).bfloat16()  # torch compiles grouped_mm in this dtype only.
        manager = fp8dist.prepare(model, recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        manager.attach(model, optimizer=optimizer)
        run = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager") if compiled else model
        for step in range(steps):
            if step == changed:
                manager.set_precision("experts.down.1", "high")
            index, weights = routes(17 + step, 2, range(4), step)
            run(rows(17 + step, 32, step).bfloat16(), index, weights.bfloat16()).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            assert graphs == (0 if not compiled else 1 if changed is None or step < changed else 2)
        outcomes.append((state_of(manager), bits(model.experts.down_proj)))
    assert outcomes[0] == outcomes[1]
