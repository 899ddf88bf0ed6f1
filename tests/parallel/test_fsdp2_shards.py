"""FSDP2's all-gather: FP8 bytes of whole weights with shared scales, uneven and empty shards, bytes on the wire."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

import fp8dist
from fp8dist import DelayedScaling
from fp8dist.modules.fp8_weight import FP8Weight, Gathered
from fp8dist.modules.linear_slots import LinearSlots
from fp8dist.state.groups import local_part
from tests.support.collectives import CountingAllGather, counted_collectives
from tests.support.ranks import RankPool, on_ranks
from tests.support.sharded import HISTORY, Job, Mlp, build, fp8_linears, full, shard
from tests.support.training import batch, bits

pytestmark = pytest.mark.slow


def expected_bytes(weight: Tensor, scale: Tensor) -> bytes:
    """Return the cast of a whole weight, from the formula alone."""
    return bits((weight.float() * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn))


class Watch:
    """Records the weight that each FP8Linear uses, in forward and in backward."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[tuple[str, str], list[tuple[type, bytes, bytes, torch.dtype]]] = {}
        for name, linear in fp8_linears(model).items():
            linear.register_forward_pre_hook(self._before(name))
            self._watch_backward(name, linear.fp8_slots)

    def _note(self, name: str, when: str, weight: Any) -> None:
        if isinstance(weight, FP8Weight):
            # Clones: numpy pins the memory of its arrays, and FSDP could not free it.
            held = (FP8Weight, bits(weight.rows.clone()), bits(weight.inv_scale), weight.dtype)
        else:
            held = (type(weight), b"", b"", weight.dtype)
        self.seen.setdefault((name, when), []).append(held)

    def _before(self, name: str) -> Any:
        return lambda module, args: self._note(name, "forward", module.weight)

    def _watch_backward(self, name: str, slots: LinearSlots) -> None:
        original = slots.backward_cast

        def watching(weight: Tensor, state: Any, outgrown: Any) -> Any:
            self._note(name, "backward", weight)
            columns, inv_scale = original(weight, state, outgrown)
            self._note(name, "backward", FP8Weight(Gathered(columns.t().contiguous(), inv_scale), weight.dtype))
            return columns, inv_scale

        slots.backward_cast = watching  # type: ignore[method-assign]


def _gathered(job: Job) -> int:
    """Train, and assert at every use of a weight that its bytes are the cast of the whole weight."""
    model, called, manager, optimizer = build(job)
    assert manager is not None
    watch = Watch(model)
    checked = 0
    for step in range(job.steps):
        weights = {name: whole for name, whole in full(model).items() if name.endswith(".weight")}
        x, y = batch(dist.get_rank(), step)
        output = called(x)
        scales = {name: manager.slot(name, "weight").scale.clone() for name in fp8_linears(model)}
        nn.functional.mse_loss(output.float(), y).backward()
        for (name, _when), held in watch.seen.items():
            for kind, rows, inv_scale, dtype in held:
                assert kind is FP8Weight
                assert rows == expected_bytes(weights[f"{name}.weight"], scales[name])
                assert inv_scale == bits(torch.reciprocal(scales[name]))
                assert dtype == (job.shard.get("mp_policy") or MixedPrecisionPolicy(torch.float32)).param_dtype
                checked += 1
        # The first layer's input needs no gradient, so backward does not use its weight.
        assert len(watch.seen) == 2 * len(scales) - 1
        watch.seen.clear()
        optimizer.step()
        optimizer.zero_grad()
    return checked


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
GATHERED = [
    pytest.param(Job(model="deep", update="next_step", reshard=False), id="next_step, kept after forward"),
    pytest.param(Job(model="mlp", per_module=False, optimizer="adamw_fused"), id="root only"),
    pytest.param(Job(model="mlp", shard={"mp_policy": BF16}), id="bf16"),
    pytest.param(Job(model="mlp", shard={"offload_policy": CPUOffloadPolicy(pin_memory=False)}), id="CPU offload"),
]


@pytest.mark.parametrize("job", GATHERED)
def test_gathered_bytes_are_the_cast_of_the_whole_weight(two_ranks: RankPool, job: Job) -> None:
    for checked in two_ranks.run(_gathered, replace(job, steps=2)):
        assert checked >= 2 * (3 + 2 * 2)


def test_gathered_bytes_of_uneven_shards(three_ranks: RankPool) -> None:
    for checked in three_ranks.run(_gathered, Job(model="mlp", steps=2)):
        assert checked == 2 * (3 + 2 * 2)


def _in_fake_world(rank: int, ranks: int) -> dict[str, Any]:
    """One process acts as one of many ranks; no data moves."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
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
        sizes, local_amax = {}, {}
        for name, linear in fp8_linears(model).items():
            local = linear.weight._local_tensor  # type: ignore[attr-defined]
            mesh = linear.weight.device_mesh
            size = linear.weight.shape
            (raw,), ((inv_scale,), shape, dtype) = local.fsdp_pre_all_gather(mesh, size, (size[1], 1), linear, None)
            rows = -(-size[0] // ranks)
            mine = whole[f"{name}.weight"][rank * rows : (rank + 1) * rows]
            padded = torch.zeros(rows, size[1], dtype=torch.uint8)
            padded[: len(mine)] = (mine * 100.0).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            assert raw.shape == padded.shape
            assert torch.equal(raw, padded)
            assert float(inv_scale) == pytest.approx(0.01)
            assert (shape, dtype) == (size, torch.float8_e4m3fn)
            sizes[name] = len(mine)
            arena = manager._syncs[0].arena
            place = arena.shard_slots.tolist().index(arena.index[fp8dist.Slot(name, "weight")])
            local_amax[name] = (float(arena.shards[place]), float(mine.abs().max()) if len(mine) else -1.0)
        output = model(torch.randn(4, 32))
        output.sum().backward()
        optimizer.step()
        return {"sizes": sizes, "amax": local_amax, "step": manager.steps}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("rank", "ranks"), [(0, 32), (24, 32), (31, 32), (6, 7)])
def test_padded_sizes_in_a_fake_world(rank: int, ranks: int) -> None:
    found = _in_fake_world(rank, ranks)
    for recorded, expected in found["amax"].values():
        assert recorded == expected  # An empty part records nothing: -1.
    if (rank, ranks) == (31, 32):
        assert set(found["sizes"].values()) == {0}


def _sixteen_rows() -> tuple[list[int], set[bool]]:
    model = Mlp((16, 16, 16))
    manager = fp8dist.prepare(model, DelayedScaling(history_len=2), group=dist.group.WORLD, fp8_all_gather=True)
    shard(model)
    manager.attach(model)
    parts = [local_part(linear.weight) for linear in fp8_linears(model).values()]
    # The operations that FSDP2 uses to move and pad parts. On this machine it moves none.
    moved = [part.to("meta") for part in parts] + [part.new_zeros(6, 16) for part in parts]
    moved += [part.narrow(0, 0, 1) for part in parts] + [part.cpu() for part in parts]
    model(torch.randn(4, 32)).sum().backward()
    manager.step()
    return [len(part) for part in parts], {hasattr(part, "fsdp_pre_all_gather") for part in moved}


def test_sixteen_rows_on_three_ranks(three_ranks: RankPool) -> None:
    outcomes = three_ranks.run(_sixteen_rows)
    assert [rows for rows, _ in outcomes] == [[6, 6, 6], [6, 6, 6], [4, 4, 4]]
    assert [kept for _, kept in outcomes] == [{True}] * 3


def _gathered_bytes(kind: str) -> tuple[int, list[int], list[int]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512))
    manager = None
    if kind == "fp8":
        recipe = DelayedScaling(history_len=2)
        manager = fp8dist.prepare(model, recipe, group=dist.group.WORLD, fp8_all_gather=True)
    policy = MixedPrecisionPolicy(param_dtype=None if kind == "fp32" else torch.bfloat16, reduce_dtype=torch.float32)
    called = shard(model, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if manager is not None:
        manager.attach(called, optimizer=optimizer)
    log: list[int] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(CountingAllGather(log))  # type: ignore[arg-type]
    with counted_collectives() as calls:
        for _ in range(2):
            called(torch.randn(4, 1024)).float().pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    slots = 0 if manager is None else len(manager.slots)
    reduces = [size for name, size in zip(calls.names, calls.sizes) if name == "all_reduce"]
    return sum(log), reduces, [4 * (8 + slots)] * 2


def test_fp8_gathers_half_of_bfloat16_and_a_quarter_of_float32(two_ranks: RankPool) -> None:
    moved = {}
    for kind in ("fp8", "bf16", "fp32"):
        for total, reduces, one_each_step in two_ranks.run(_gathered_bytes, kind):
            moved[kind] = total
            if kind == "fp8":
                assert reduces == one_each_step
            else:
                assert reduces == []
    assert 0.49 * moved["bf16"] < moved["fp8"] <= 0.51 * moved["bf16"]
    assert moved["fp8"] <= 0.26 * moved["fp32"]


@on_ranks(2)
def test_gradients_under_mixed_precision_are_those_of_the_shards() -> None:
    job = Job(shard={"mp_policy": BF16})
    model, called, _, optimizer = build(job)
    x, y = batch(dist.get_rank(), 0)
    nn.functional.mse_loss(called(x).float(), y).backward()
    found = {name: (p.dtype, p.grad.dtype) for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    assert len(found) == 6
    assert set(found.values()) == {(torch.float32, torch.float32)}


def _fill(model: nn.Module) -> None:
    """Set the same whole weights for any sharding."""
    for i, (_, parameter) in enumerate(model.named_parameters()):
        whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) * 0.1
        with torch.no_grad():
            if hasattr(parameter, "_local_tensor"):
                from torch.distributed.tensor import distribute_tensor

                parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
            else:
                parameter.copy_(whole)


def _materialised(meta: bool, options: dict[str, Any]) -> tuple[list[float], dict[str, bytes]]:
    from tests.support.sharded import arena_bits

    with torch.device("meta" if meta else "cpu"):
        model = Mlp()
    manager = fp8dist.prepare(model, DelayedScaling(history_len=HISTORY), group=dist.group.WORLD, fp8_all_gather=True)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    if meta:
        with pytest.raises(fp8dist.errors.ConfigurationError, match="materialise"):
            manager.attach(model)
        model.to_empty(device="cpu")
    _fill(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager.attach(model, optimizer=optimizer)
    losses = []
    for step in range(2):
        x, y = batch(dist.get_rank(), step)
        loss = nn.functional.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, arena_bits(manager)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"mp_policy": BF16, "offload_policy": CPUOffloadPolicy(pin_memory=False)}, id="bf16, CPU offload"),
    ],
)
def test_meta_initialisation_with_uneven_shards(three_ranks: RankPool, options: dict[str, Any]) -> None:
    late = three_ranks.run(_materialised, True, options)
    early = three_ranks.run(_materialised, False, options)
    assert late == early
