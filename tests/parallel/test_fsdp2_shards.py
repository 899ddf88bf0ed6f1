"""FSDP2's all-gather: FP8 bytes of whole weights with shared scales, uneven and empty shards, bytes on the wire."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, Observation, Recipe
from fp8dist.errors import ConfigurationError
from fp8dist.modules.fp8_weight import FP8Weight, Gathered
from fp8dist.modules.linear_slots import LinearSlots
from fp8dist.state.groups import local_part
from tests.support.collectives import CountingAllGather, counted_collectives
from tests.support.ranks import RankPool, on_ranks
from tests.support.running import take_steps
from tests.support.sharded import HISTORY, Job, Mlp, arena_bits, build, fp8_linears, full, seeded, shard
from tests.support.suite import few
from tests.support.training import batch, bits

pytestmark = pytest.mark.slow


def expected_bytes(weight: Tensor, scale: Tensor) -> bytes:
    """Return the cast of a whole weight, from the formula alone."""
    return bits((weight.float() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn))


class Watch:
    """Records the weight that each FP8Linear uses, in forward and in backward."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: list[tuple[str, bytes, bytes, torch.dtype]] = []
        for name, linear in fp8_linears(model).items():
            linear.register_forward_pre_hook(lambda module, args, name=name: self._note(name, module.weight))
            self._watch_backward(name, linear.fp8_slots)

    def _note(self, name: str, weight: Any) -> None:
        assert isinstance(weight, FP8Weight)
        # Clones: numpy pins the memory of its arrays, and FSDP could not free it.
        self.seen.append((name, bits(weight.rows.clone()), bits(weight.inv_scale), weight.dtype))

    def _watch_backward(self, name: str, slots: LinearSlots) -> None:
        original = slots.backward_cast

        def watching(weight: Tensor, state: Any, outgrown: Any) -> Any:
            self._note(name, weight)
            columns, inv_scale = original(weight, state, outgrown)
            self._note(name, FP8Weight(Gathered(columns.t().contiguous(), inv_scale), weight.dtype))
            return columns, inv_scale

        slots.backward_cast = watching  # type: ignore[method-assign]


def _gathered(job: Job) -> None:
    """Train, and assert at every use of a weight that its bytes are the cast of the whole weight."""
    model, called, manager, optimizer = build(job)
    assert manager is not None
    watch = Watch(model)
    policy = job.shard.get("mp_policy") or MixedPrecisionPolicy(torch.float32)
    for step in range(2):
        weights = {name: whole for name, whole in full(model).items() if name.endswith(".weight")}
        x, y = batch(dist.get_rank(), step)
        output = called(x)
        scales = {name: manager.slot(name, "weight").scale.clone() for name in fp8_linears(model)}
        nn.functional.mse_loss(output.float(), y).backward()
        for name, rows, inv_scale, dtype in watch.seen:
            assert rows == expected_bytes(weights[f"{name}.weight"], scales[name])
            assert inv_scale == bits(torch.reciprocal(scales[name]))
            assert dtype == policy.param_dtype
        # The first layer's input needs no gradient, so backward does not use its weight.
        assert len(watch.seen) == len(scales) + 2 * (len(scales) - 1)
        watch.seen.clear()
        assert {(p.dtype, p.grad.dtype) for p in model.parameters() if p.grad is not None} == {(torch.float32,) * 2}
        optimizer.step()
        optimizer.zero_grad()


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OFFLOAD = CPUOffloadPolicy(pin_memory=False)
GATHERED = {
    "next_step, kept after forward": Job(model="deep", update="next_step", reshard=False),
    "bf16, root only": Job(model="mlp", shard={"mp_policy": BF16}, per_module=False, optimizer="adamw_fused"),
    "CPU offload": Job(model="mlp", shard={"offload_policy": OFFLOAD}),
}


@pytest.mark.parametrize("name", few(GATHERED, *(GATHERED.keys() - {"CPU offload"})))
def test_gathered_bytes_are_the_cast_of_the_whole_weight(two_ranks: RankPool, name: str) -> None:
    two_ranks.run(_gathered, GATHERED[name])


@on_ranks(3)
def test_gathered_bytes_of_uneven_shards() -> None:
    _gathered(Job(model="mlp"))


@contextmanager
def _acting_as(rank: int, ranks: int) -> Iterator[None]:
    """Let this process act as one of many ranks; no data moves."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("rank", "ranks"), [(24, 32), (31, 32), (6, 7)])
def test_padded_shards_of_many_ranks(rank: int, ranks: int) -> None:
    with _acting_as(rank, ranks):
        model = Mlp((48, 80, 16))
        whole = {name: value.detach().clone() for name, value in model.named_parameters()}
        manager = fp8dist.prepare(model, DelayedScaling(history_len=2), group=dist.group.WORLD, fp8_all_gather=True)
        shard(model)
        manager._attachment._agree = lambda *a: setattr(manager._cycle, "attached", True)  # type: ignore[method-assign]
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        manager.attach(model, optimizer=optimizer)
        # No other rank answers: provide the scales that all ranks would give.
        for name in fp8_linears(model):
            manager.slot(name, "weight").set_scale(100.0)
        arena, held = manager._syncs[0].arena, set()
        for name, linear in fp8_linears(model).items():
            local = linear.weight._local_tensor  # type: ignore[attr-defined]
            size = linear.weight.shape
            (raw,), ((inv_scale,), shape, dtype) = local.fsdp_pre_all_gather(
                linear.weight.device_mesh, size, (size[1], 1), linear, None
            )
            rows = -(-size[0] // ranks)
            mine = whole[f"{name}.weight"][rank * rows : (rank + 1) * rows]
            padded = torch.zeros(rows, size[1], dtype=torch.uint8)
            padded[: len(mine)] = (mine * 100.0).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            assert raw.shape == padded.shape
            assert torch.equal(raw, padded)
            assert float(inv_scale) == pytest.approx(0.01)
            assert (shape, dtype) == (size, torch.float8_e4m3fn)
            place = arena.shard_slots.tolist().index(arena.index[fp8dist.Slot(name, "weight")])
            # An empty part records nothing: -1.
            assert float(arena.shards[place]) == (float(mine.abs().max()) if len(mine) else -1.0)
            held.add(len(mine))
        if (rank, ranks) == (31, 32):
            assert held == {0}
        model(torch.randn(4, 32)).sum().backward()
        optimizer.step()


@on_ranks(3)
def test_parts_that_fsdp2_moves_and_pads_keep_the_extension() -> None:
    """On this machine it moves none."""
    model = Mlp((16, 16, 16))
    manager = fp8dist.prepare(model, DelayedScaling(history_len=2), group=dist.group.WORLD, fp8_all_gather=True)
    shard(model)
    manager.attach(model)
    for linear in fp8_linears(model).values():
        part = local_part(linear.weight)
        assert len(part) == (6, 6, 4)[dist.get_rank()]
        for moved in (part.to("meta"), part.new_zeros(6, 16), part.narrow(0, 0, 1), part.cpu()):
            assert hasattr(moved, "fsdp_pre_all_gather")


ELEMENTS = 256 * 512
COSTS: dict[str, tuple[Recipe | None, int, list[int]]] = {
    # (recipe, bytes that a gather brings of a weight, bytes of each all-reduce of a step)
    "delayed": (DelayedScaling(history_len=2), ELEMENTS, [4 * (8 + 6)]),
    "current": (CurrentScaling(), ELEMENTS, [4 * 6]),
    "block": (BlockScaling(), ELEMENTS + 4 * ELEMENTS // 128**2, []),
    "none": (None, 2 * ELEMENTS, []),
}


@pytest.mark.parametrize("name", COSTS)
@on_ranks(2)
def test_what_is_sent(name: str) -> None:
    """Half of what BF16 gathers in a forward, and in a backward of all weights but the first. Forwards and backwards
    reduce nothing, and a step reduces all amaxes at once."""
    recipe, gathered, reduced = COSTS[name]
    model = nn.Sequential(nn.Linear(512, 256, bias=False), nn.ReLU(), nn.Linear(256, 512, bias=False))
    manager = None
    if recipe is not None:
        manager = fp8dist.prepare(model, recipe, group=dist.group.WORLD, fp8_all_gather=True)
    called: Any = shard(model, mp_policy=BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if manager is not None:
        manager.attach(called, optimizer=optimizer)
    log: list[int] = []
    for module in (model[0], model[2]):
        module.set_custom_all_gather(CountingAllGather(log))  # type: ignore[operator]
    for _ in range(2):
        log.clear()
        with counted_collectives() as calls:
            called(torch.randn(4, 512)).float().pow(2).mean().backward()
            assert "all_reduce" not in calls.names
            optimizer.step()
            optimizer.zero_grad()
        assert set(log) == {gathered}
        assert len(log) in (3, 4)
        assert [size for name, size in zip(calls.names, calls.sizes) if name == "all_reduce"] == reduced


@on_ranks(3)
def test_meta_initialisation_with_uneven_shards() -> None:
    found = []
    for device in ("meta", "cpu"):
        with torch.device(device):
            model = Mlp()
        recipe = DelayedScaling(history_len=HISTORY)
        manager = fp8dist.prepare(model, recipe, group=dist.group.WORLD, fp8_all_gather=True)
        for part in (*model.layers, model):
            fully_shard(part, mp_policy=BF16, offload_policy=OFFLOAD)
        if device == "meta":
            with pytest.raises(ConfigurationError, match="materialise"):
                manager.attach(model)
            model.to_empty(device="cpu")
        for i, parameter in enumerate(model.parameters()):
            whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) * 0.1
            with torch.no_grad():
                parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        manager.attach(model, optimizer=optimizer)
        found.append((take_steps(model, optimizer, range(2)), arena_bits(manager)))
    assert found[0] == found[1]


@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling(history_len=HISTORY)], ids=["current", "delayed"])
@on_ranks(2)
def test_a_watch_sees_gathered_weights(recipe: Recipe) -> None:
    model, plain = seeded("net"), seeded("net")
    manager = fp8dist.prepare(model, recipe, group=dist.group.WORLD, fp8_all_gather=True)
    seen: list[Observation] = []
    fp8dist.watch(manager, every=1, observer=seen.append)
    called: Any = shard(model)
    optimizer = torch.optim.SGD(called.parameters(), lr=0.1)
    manager.attach(called, optimizer=optimizer)
    called(batch(dist.get_rank(), 0)[0]).sum().backward()
    optimizer.step()
    manager.check()  # Commits a pending sync.
    found = {each.slot.fqn: each.amax for each in seen[0].slots if each.slot.role == "weight"}
    assert found == {n: float(plain.get_parameter(f"{n}.weight").detach().abs().max()) for n in fp8_linears(model)}


# Shards that cut blocks of 128 x 128. --------------------------------------------------------------------------------


def _attached(shape: tuple[int, int], dim: int, recipe: Recipe, gather: bool = True) -> str:
    """Attach a Linear of this shape, and return the error."""
    model = nn.Sequential(nn.Linear(*reversed(shape)))
    manager = fp8dist.prepare(model, recipe, group=dist.group.WORLD, fp8_all_gather=gather)
    fully_shard(model, shard_placement_fn=lambda parameter: Shard(dim if parameter.ndim > 1 else 0))
    try:
        manager.attach(model)
    except ConfigurationError as error:
        assert not manager._job.attached
        return str(error)
    model(torch.randn(16, shape[1])).sum().backward()
    return ""


SHARDED = r"is sharded along dim {} over 2 ranks.*".format


@pytest.mark.parametrize(
    ("shape", "dim", "recipe", "gather", "refused"),
    [
        ((384, 256), 0, BlockScaling(), True, SHARDED(0) + "192 rows each"),
        ((240, 256), 0, BlockScaling(), True, SHARDED(0) + "120 rows each"),
        ((256, 256), 1, BlockScaling(), True, SHARDED(1)),
        ((256, 256), 0, BlockScaling(), True, ""),
        ((384, 256), 0, BlockScaling(), False, ""),
        ((384, 256), 0, CurrentScaling(), True, ""),
        ((96, 64), 0, MXFP8Scaling(), True, SHARDED(0) + "48 rows each: each rank needs the same multiple of 32 rows"),
        ((80, 64), 0, MXFP8Scaling(), True, "has a dim that is no multiple of 32"),
        ((64, 48), 0, MXFP8Scaling(), True, "has a dim that is no multiple of 32"),
    ],
)
def test_shards_that_cut_blocks_are_refused_by_all_ranks(
    two_ranks: RankPool, shape: tuple[int, int], dim: int, recipe: Recipe, gather: bool, refused: str
) -> None:
    first, second = two_ranks.run(_attached, shape, dim, recipe, gather)
    assert first == second
    assert bool(first) == bool(refused)
    assert re.search(rf"^0: its weight {re.escape(str(shape))} {refused}.*overrides.*fp8_all_gather|^$", first)


@pytest.mark.parametrize(
    ("ranks", "shape", "dim", "refused"),
    [(17, (2160, 256), 0, "128 rows each, but 112 for the last"), (1, (2160, 256), 0, ""), (1, (256, 256), 1, "")],
    ids=["uneven", "one rank", "one rank along dim 1"],
)
def test_uneven_shards_are_refused_and_one_rank_cuts_nothing(
    ranks: int, shape: tuple[int, int], dim: int, refused: str
) -> None:
    """FSDP2 pads the data of short parts, but not their scales: 2160 rows on 17 ranks are 128 each, and 112 on the
    last."""
    with _acting_as(0, ranks):
        text = _attached(shape, dim, BlockScaling())
    assert refused in text
    assert bool(refused) == bool(text)
