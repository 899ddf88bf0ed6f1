"""FP8Experts: conversion, DDP, recomputation, copies, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import io
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import fp8dist
from fp8dist import CurrentScaling, DelayedScaling, FP8Experts
from fp8dist.errors import ConfigurationError
from tests.support.collectives import counted_collectives
from tests.support.experts import Experts, Mixture, routes, rows
from tests.support.logs import captured_log
from tests.support.ranks import RankPool
from tests.support.states import state_of
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


def whole(net: Routed) -> Routed:
    """Give a net small whole numbers and linear experts, so that sums are exact in any order and for any batch size."""
    net.experts.act_fn = nn.Identity()
    generator = torch.Generator().manual_seed(1)
    for parameter in net.parameters():
        numbers = torch.randint(1, 4, parameter.shape, generator=generator).float()
        signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
        parameter.data.copy_(numbers * signs)
    return net


def batch(rank: int, step: int, ranks: int) -> Tensor:
    """Return rows whose routes differ per rank and step: some experts have no row on a rank, some on none."""
    alive = [e for e in range(EXPERTS) if (e + step) % 5 and (e % ranks == rank or (e + rank + step) % 3 == 0)]
    x = rows(12, 32, 100 * step + rank)
    index, _ = routes(12, 1, alive or [0], 100 * step + rank)
    return torch.cat([x, index.float()], 1)


def _train(ranks: int, steps: int, history: int) -> tuple[dict[Any, Any], bytes, list[str]]:
    """Train on this rank's part of each batch. One process alone (ranks > world) takes all parts in one batch."""
    world = dist.get_world_size()
    net = whole(Routed(gate=False))
    recipe = DelayedScaling(history_len=history, power_of_two=True)
    manager = fp8dist.prepare(net, recipe, group=dist.group.WORLD)
    model: nn.Module = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-30)
    manager.attach(model, optimizer=optimizer)
    with counted_collectives() as calls:
        for step in range(steps):
            parts = [batch(r, step, ranks) for r in range(dist.get_rank(), ranks, world)]
            x = torch.cat(parts).round()
            (model(x) * x[:, :32]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    names = [name for name in calls.names if name == "all_reduce"]
    return state_of(manager), bits(net.experts.down_proj), names


@pytest.mark.parametrize("pool", ["two_ranks", "four_ranks"])
def test_scales_of_ranks_equal_those_of_one_process_with_the_whole_batch(
    request: pytest.FixtureRequest, pool: str
) -> None:
    """Weights stand still, so that all amaxes are the same."""
    ranks: RankPool = request.getfixturevalue(pool)
    outcomes = ranks.run(_train, ranks.world_size, 7, 4)
    alone = _alone(ranks.world_size, 7, 4)
    for state, weights, _ in outcomes:
        assert weights == outcomes[0][1]
        assert state == outcomes[0][0]
    theirs = outcomes[0][0]
    for slot, expected in alone.items():
        assert theirs[slot] == expected, slot
    rolled = {entry["counters"][0] for slot, entry in alone.items() if slot[0].startswith("experts.")}
    assert len(rolled) > 1, "some experts did not run in some steps"


def _alone(ranks: int, steps: int, history: int) -> dict[Any, Any]:
    net = whole(Routed(gate=False))
    manager = fp8dist.prepare(net, DelayedScaling(history_len=history, power_of_two=True))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-30)
    manager.attach(net, optimizer=optimizer)
    for step in range(steps):
        x = torch.cat([batch(r, step, ranks) for r in range(ranks)]).round()
        (net(x) * x[:, :32]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return state_of(manager)


def test_one_collective_per_step_and_arena(two_ranks: RankPool) -> None:
    """Experts share the arena of the Linears if their histories are as long, else they have one of their own."""
    for history, arenas in ((4, 1), (64, 2)):
        few, many = (two_ranks.run(_train, 2, steps, history)[0][2] for steps in (2, 5))
        assert len(many) - len(few) == 3 * arenas


def test_default_history_of_experts_is_short() -> None:
    model = Routed()
    overrides = {"experts": DelayedScaling(history_len=20)}
    for given, expected in ((None, 16), (DelayedScaling(history_len=4), 4)):
        model = Routed()
        manager = fp8dist.prepare(model, given)
        assert manager.slot("experts.down.3", "weight").recipe.history_len == expected  # type: ignore[attr-defined]
        assert manager.slot("inlet", "weight").recipe.history_len == (4 if given else 1024)  # type: ignore[attr-defined]
    manager = fp8dist.prepare(Routed(), overrides=overrides)
    assert manager.slot("experts.down.3", "weight").recipe.history_len == 20  # type: ignore[attr-defined]


def _state_after(model: nn.Module, manager: fp8dist.StateManager, run: Any) -> tuple[dict[Any, Any], list[bytes]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.attach(model, optimizer=optimizer)
    seen = []
    for step in range(3):
        x = batch(0, step, 1).requires_grad_()
        out = run(model, x)
        out.pow(2).mean().backward()
        assert x.grad is not None
        seen += [bits(out), bits(x.grad), bits(model.experts.down_proj.grad)]  # type: ignore[union-attr, arg-type]
        optimizer.step()
        optimizer.zero_grad()
    return state_of(manager), seen


def test_recomputation_changes_nothing() -> None:
    outcomes = []
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        model = Routed()
        manager = fp8dist.prepare(model, DelayedScaling(history_len=4))

        def run(model: nn.Module, x: Tensor, reentrant: bool | None = reentrant) -> Any:
            return model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)

        outcomes.append(_state_after(model, manager, run))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_copies_pickles_and_restore() -> None:
    torch.manual_seed(0)
    model = Routed()
    plain = copy.deepcopy(model)
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4))
    assert list(model.state_dict()) == list(plain.state_dict())
    _state_after(model, manager, lambda model, x: model(x))
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    x = batch(0, 9, 1)
    expected = bits(model.eval()(x))
    copied, unpickled = copy.deepcopy(model), torch.load(stream, weights_only=False)
    for other in (copied, unpickled):
        assert isinstance(other.experts, FP8Experts)
        assert isinstance(other.experts, Experts)
        assert other.experts.fp8_products["down_proj"].owner() is other.experts
        assert state_of(fp8dist.get_manager(other)) == state_of(manager)
        assert other(x).isfinite().all()
    assert bits(copied(x)) == expected
    fp8dist.restore(model)
    assert type(model.experts) is Experts
    plain.load_state_dict(model.state_dict())
    assert bits(model(x)) == bits(plain(x))
    fp8dist.prepare(model)


def test_checkpoints_match_experts_by_name() -> None:
    torch.manual_seed(0)
    model = Routed()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=4))
    _state_after(model, manager, lambda model, x: model(x))
    other = Routed()
    resumed = fp8dist.prepare(other, DelayedScaling(history_len=4))
    resumed.load_state_dict(manager.state_dict())
    assert state_of(resumed) == state_of(manager)


def test_two_mixtures_are_isolated() -> None:
    """What one mixture does leaves the state, the outputs and the gradients of another unchanged."""

    def trained(busy: bool) -> Any:
        torch.manual_seed(0)
        model = Routed()
        manager = fp8dist.prepare(model, DelayedScaling(history_len=4))
        other, disturbs = Routed(), contextlib.nullcontext()
        theirs = fp8dist.prepare(other, CurrentScaling() if busy else None)

        def run(model: nn.Module, x: Tensor) -> Any:
            out = model(x)
            if busy:
                theirs.set_precision("experts.gate_up.*", "high")
                other(batch(0, 5, 1) * 50).sum().backward()
                theirs.step()
            return out

        with disturbs:
            return _state_after(model, manager, run)

    assert trained(False) == trained(True)


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


def test_fallback_of_one_expert() -> None:
    """An expert whose input is not finite falls back on its own."""
    model = Mixture(Experts())
    manager = fp8dist.prepare(model, fallback=fp8dist.Fallback(steps=3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    manager.attach(model, optimizer=optimizer)
    index, weights = torch.arange(4)[:, None].repeat(4, 1), torch.ones(16, 1)
    x = rows(16, 32, 1)
    x[2, 0] = torch.inf
    with captured_log():
        model(x, index, weights).nan_to_num().sum().backward()
        optimizer.step()
        model(rows(16, 32, 1), index, weights).sum().backward()
        optimizer.step()
    high = {fqn for fqn, of in manager._cycle.precisions.by_fqn.items() if of.high}
    assert high == {"experts.gate_up.2", "experts.down.2"}
    assert "2 of 8 products of experts are high" in str(manager.coverage())
    assert fp8dist.describe(manager)["modules"][0]["gemms"]["fprop"] == "fp8"
    assert fp8dist.describe(manager)["modules"][0]["experts"] == 4
    manager.set_precision("*", "high", ("fprop",))
    assert fp8dist.describe(manager)["modules"][0]["gemms"]["fprop"] == "high"


def test_what_prepare_leaves_out() -> None:
    for change, reason in (
        ({"hidden": 40}, "dims of 4 x 96 x 40 are not multiples of 16"),
        ({"ep": True}, "expert parallelism is not supported yet"),
        ({"forward": True}, "its forward was replaced"),
        ({"skip": True}, "it matches skip"),
        ({"shared": True}, "another module uses its weights, too"),
    ):
        model = Mixture(Experts(hidden=change.get("hidden", 32)))
        experts: Any = model.experts
        if "ep" in change:
            experts._is_expert_parallel = True
        if "forward" in change:
            experts.forward = experts.forward
        if "shared" in change:
            model.more = Experts()
            model.more.down_proj = experts.down_proj
        with captured_log():
            manager = fp8dist.prepare(model, skip="experts" if "skip" in change else ())
        row = next(iter(manager.coverage()))
        assert not row.fp8
        assert reason in row.reason
        assert fp8dist.describe(manager)["modules"][0]["experts"] == 4  # The MFU must not count the FLOPs of all.


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("down_proj", (3, 32, 48), "gate_up_proj (4, 96, 32) and down_proj (3, 32, 48) do not fit each other"),
        ("down_proj", (4, 48, 32), "has_gate=True, is_transposed=False"),
        ("gate_up_proj", (4, 32, 96), "gate_up_proj (4, 32, 96) and down_proj (4, 32, 48) do not fit"),
        ("down_proj_bias", (4, 48), "down_proj_bias (4, 48) does not fit down_proj (4, 32, 48): expected (4, 32)"),
    ],
)
def test_experts_whose_shapes_contradict_each_other_stay_in_high_precision(
    name: str, shape: tuple[int, ...], reason: str
) -> None:
    model = Mixture(Experts(bias=True))
    setattr(model.experts, name, nn.Parameter(torch.randn(shape)))
    with captured_log():
        row = next(iter(fp8dist.prepare(model).coverage()))
    assert not row.fp8
    assert reason in row.reason


def test_rowwise_experts_have_no_fp8_all_gather() -> None:
    """Also if no Linear has that recipe."""
    model = Mixture(Experts())
    with pytest.raises(ConfigurationError, match="experts: fp8_all_gather=True does not work with RowwiseScaling"):
        fp8dist.prepare(model, overrides={"experts": fp8dist.RowwiseScaling()}, fp8_all_gather=True)
    assert type(model.experts) is Experts


def test_experts_parametrized_after_prepare_are_refused_with_what_to_do() -> None:
    model = Mixture(Experts())
    manager = fp8dist.prepare(model)
    parametrize.register_parametrization(model.experts, "gate_up_proj", nn.Tanh())
    with pytest.raises(ConfigurationError, match="as after a parametrization: undo it, or leave them in high"):
        manager.attach()


def test_a_router_in_fp8_is_warned_of() -> None:
    def told(skip: Any) -> list[str]:
        model = nn.ModuleDict({"router": nn.Linear(32, 16), "up": nn.Linear(32, 48), "experts": Experts(16)})
        with captured_log() as log:
            fp8dist.prepare(nn.ModuleDict({"mlp": model}), skip=skip)
        return [text for level, text in log if "outputs as" in text]

    (text,) = told(None)
    assert text.startswith("fp8dist: mlp.router: as many outputs as the mixture has experts.")
    assert told(re.findall(r"skip='(.*)'", text)) == []


def test_groups_and_patterns_of_products() -> None:
    """A group may be that of a product. Other patterns are for modules, and one that matches none says so."""
    with captured_log() as log:
        manager = fp8dist.prepare(Routed(), groups={"experts.gate_up": None}, skip="experts.down", amax_sync=False)
    ((_, message),) = log
    assert "skip: no module with a matmul weight matches 'experts.down'" in message
    assert manager.coverage().share == 1


def test_a_registered_slot_does_not_part_the_experts() -> None:
    model = Mixture(Experts())
    manager = fp8dist.prepare(model)
    for fqn in ("experts.gate_up.1.extra", "experts.gate_up"):
        manager.register(fqn, "input", "e4m3")
    manager.attach(model)
    index, weights = routes(16, 2, range(4), 1)
    model(rows(16, 32, 1), index, weights).sum().backward()
    manager.step()
    assert not manager._cycle.syncs[0].arena.cold[manager._cycle.syncs[0].arena.run_of(_inputs())].any()
    assert bool(manager.slot("experts.gate_up", "input").amax == 0)


def _inputs() -> list[fp8dist.Slot]:
    return [fp8dist.Slot(f"experts.gate_up.{expert}", "input") for expert in range(4)]


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it itself.
@pytest.mark.parametrize("recipe", [DelayedScaling(history_len=4), fp8dist.RowwiseScaling(), fp8dist.BlockScaling()])
def test_compiled_whole_without_recompiles(recipe: fp8dist.Recipe) -> None:
    """As token counts change, and equal to eager training bit for bit. A changed precision compiles once more."""
    outcomes = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = Mixture(Experts()).bfloat16()  # torch compiles grouped_mm in this dtype only.
        manager = fp8dist.prepare(model, recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        manager.attach(model, optimizer=optimizer)
        run = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager") if compiled else model
        for step in range(6):
            if step == 4:
                manager.set_precision("experts.down.1", "high")
            index, weights = routes(17 + step, 2, range(4), step)
            run(rows(17 + step, 32, step).bfloat16(), index, weights.bfloat16()).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            assert graphs == (0 if not compiled else 1 if step < 4 else 2)
        outcomes.append((state_of(manager), bits(model.experts.down_proj)))  # type: ignore[arg-type]
    assert outcomes[0] == outcomes[1]


def test_a_copy_hears_of_changes_of_precision() -> None:
    """So that a compiled forward of a copy finds the choice that it cannot make."""
    torch.manual_seed(0)
    model = Routed()
    fp8dist.prepare(model)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for other in (copy.deepcopy(model), torch.load(stream, weights_only=False)):
        manager = fp8dist.get_manager(other)
        manager.attach(other)
        slots = other.experts.fp8_products["down_proj"]
        manager.set_precision("experts.down.*", "high")
        assert slots._choice[2].all_high


def test_batches_without_tokens() -> None:
    model = Mixture(Experts())
    fp8dist.prepare(model).attach(model)
    x = torch.zeros(0, 32, requires_grad=True)
    out = model(x, torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    out.sum().backward()
    assert out.shape == (0, 32)
    assert bits(model.experts.down_proj.grad) == bits(torch.zeros(4, 32, 48))  # type: ignore[arg-type, union-attr]


def test_a_mixture_of_one_expert_is_converted() -> None:
    model = Mixture(Experts(experts=1))
    assert fp8dist.prepare(model).coverage().share == 1
    assert isinstance(model.experts, FP8Experts)


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


def test_a_pattern_of_the_whole_mixture_says_what_experts_are_called() -> None:
    manager = fp8dist.prepare(Mixture(Experts()))
    with pytest.raises(fp8dist.ConfigurationError, match=r"single experts, such as 'experts\.down\.0'"):
        manager.set_precision("experts", "high")
