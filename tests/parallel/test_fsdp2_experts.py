"""Experts under FSDP2: gathered in high precision and in FP8, by experts and by rows."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, Fallback, MXFP8Scaling
from fp8dist.errors import ConfigurationError
from fp8dist.modules.fp8_weight import FP8Weight
from tests.support.collectives import CountingAllGather, counted_collectives
from tests.support.experts import Experts
from tests.support.logs import captured_log
from tests.support.ranks import RankPool, on_ranks
from tests.support.sharded import full
from tests.support.sharded_experts import Job, Routed, build, routed_batch, step, train
from tests.support.states import state_of
from tests.support.suite import few
from tests.support.training import bits, saved_tensors

pytestmark = pytest.mark.slow

INLET = {"overrides": {"inlet": DelayedScaling(history_len=3)}}

JOBS = {
    "high": Job(fp8_all_gather=False),
    "uneven": Job(experts=5),
    "columns": Job(dim=2),
    "next_step, transposed": Job(
        recipe=DelayedScaling(history_len=3, update="next_step"),
        accumulate=2,
        options={"transposed": True, "bias": True, "interleaved": True},
    ),
    "rows, measured, kept": Job(
        dim=1, settings={"fallback": Fallback(saturated=0.9)}, shard={"reshard_after_forward": False}
    ),
    "current, rows": Job(recipe=CurrentScaling(), dim=1),
    "MX": Job(recipe=MXFP8Scaling(), settings={"overrides": {"inlet": CurrentScaling()}}, inner=64),
    "MX, transposed": Job(
        recipe=MXFP8Scaling(),
        settings={"overrides": {"inlet": CurrentScaling()}},
        inner=64,
        options={"transposed": True},
        accumulate=2,
    ),
    "blocks, transposed": Job(recipe=BlockScaling(), settings=INLET, options={"transposed": True}),
}


@pytest.mark.parametrize(
    "name", few(JOBS, *(JOBS.keys() - {"high", "columns", "rows, measured, kept", "current, rows", "MX"}))
)
def test_experts_are_bitwise_as_under_ddp(two_ranks: RankPool, name: str) -> None:
    """Losses, parameters and FP8 state."""
    job = JOBS[name]
    ours = two_ranks.run(train, job)
    theirs = two_ranks.run(train, replace(job, parallel="ddp"))
    # Under scales that follow each weight, only shards have them.
    compared = 2 if isinstance(job.recipe, (CurrentScaling, MXFP8Scaling)) else 4
    assert [mine[:compared] for mine in ours] == [other[:compared] for other in theirs]


def _whole(job: Job, ranks: int) -> Any:
    """Train on this rank's part of each batch. One process alone takes all parts in one batch. All sums are exact."""
    torch.manual_seed(0)
    model = Routed(job.experts, k=1, gate=False)
    model.experts.act_fn = nn.Identity()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randint(-3, 4, parameter.shape, generator=generator))
    with torch.no_grad():
        model.experts.down_proj[0] = 0  # Stays cold.
    alone = not dist.is_initialized()
    group, gathers = (None, False) if alone else (dist.group.WORLD, job.fp8_all_gather)
    recipe = DelayedScaling(history_len=3, power_of_two=True)
    manager = fp8dist.prepare(model, recipe, group=group, fp8_all_gather=gathers)
    if not alone:
        fully_shard(model.experts, shard_placement_fn=job.placement)
        fully_shard(model)
    manager.attach(model, boundary="manual")  # The weights stay: a step with a learning rate of 0 is no boundary.
    for index in range(5):
        mine = range(ranks) if alone else [dist.get_rank()]
        x = torch.cat([routed_batch(rank, index, job.experts, k=1) for rank in mine]).round()
        (model(x) * x[:, :32]).sum().backward()
        manager.step()
        model.zero_grad()
        if index == 2:  # The other experts' scales and windows stay.
            with torch.no_grad():
                weight = model.experts.down_proj
                factors = torch.ones(weight.shape)
                factors[1] = 8
                weight.mul_(factors if alone else distribute_tensor(factors, weight.device_mesh, weight.placements))
                if not gathers:
                    manager.refresh_weights()
    return state_of(manager)


@pytest.mark.parametrize(("experts", "gathers"), few([(3, True), (3, False), (6, True)], (3, True)))
def test_scales_of_four_ranks_equal_those_of_one_process(four_ranks: RankPool, experts: int, gathers: bool) -> None:
    """Also with fewer experts than ranks, with a weight of zeros, and after a write to one expert."""
    job = Job(experts=experts, fp8_all_gather=gathers)
    alone = _whole(replace(job, fp8_all_gather=False), 4)
    for state in four_ranks.run(_whole, job, 4):
        for slot, expected in alone.items():
            if not (gathers and slot[1] == "weight"):  # A refresh clears all windows, a gather only those that must.
                assert state[slot] == expected, slot
            assert state[slot]["scale"] == expected["scale"], slot


@pytest.mark.parametrize(("dim", "experts"), [(1, 4), (0, 2)])
@on_ranks(4)
def test_bytes_of_a_gather_under_mixed_precision(dim: int, experts: int) -> None:
    """Shards are cast from their own dtype. Along experts, fewer experts than ranks are padded."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    job = Job(experts=experts, dim=dim, shard={"mp_policy": policy})
    with captured_log() as lines:
        model, called, manager, optimizer = build(job)
    padded = [line for _, line in lines if "gathers 4 of them with padding" in line]
    assert len(padded) == (dim == 0 and dist.get_rank() == 0)  # It is logged once.
    log: list[int] = []
    step(job, called, optimizer, 0)
    model.experts.set_custom_all_gather(CountingAllGather(log))
    with counted_collectives() as calls:
        step(job, called, optimizer, 1)
    assert sum(log) == 2 * 4 * (96 * 32 + 32 * 48)  # In forward and in backward.
    assert calls.names.count("all_reduce") == 1
    for name in ("gate_up_proj", "down_proj"):
        stored = getattr(model.experts, name).full_tensor()
        model.experts.unshard()
        weight = getattr(model.experts, name)
        assert weight.dtype == torch.bfloat16
        for expert in range(experts):
            scale = manager.slot(f"experts.{name.removesuffix('_proj')}.{expert}", "weight").scale
            expected = (stored[expert] * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert bits(weight.rows[expert].clone()) == bits(expected)
            assert weight.inv_scale[expert] == 1 / scale
        model.experts.reshard()


@pytest.mark.parametrize("fp8_all_gather", [True, False])
@on_ranks(2)
def test_no_cast_of_experts_is_kept_for_backward(fp8_all_gather: bool) -> None:
    model, called, *_ = build(Job(fp8_all_gather=fp8_all_gather))
    with saved_tensors() as saved:
        output = called(routed_batch(0, 0, 4))
    kept = [each for each in saved if not isinstance(each, FP8Weight) and each.ndim == 3]
    output.sum().backward()
    assert all(slots.cache.empty for slots in model.experts.fp8_products.values())
    assert not any(each.numel() for each in kept if each.dtype == torch.float8_e4m3fn)


@on_ranks(2)
def test_high_precision_multiplies_with_dequantised_weights() -> None:
    """Another order of sums changes the last bits of float32."""
    job = Job(recipe=DelayedScaling(history_len=3, power_of_two=True))
    model, called, manager, optimizer = build(job)
    step(job, called, optimizer, 0)
    x = routed_batch(dist.get_rank(), 1, 4)
    manager.set_precision("*", "high")
    seen: list[Tensor] = []
    model.inlet.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    out = called(x)
    out.sum().backward()
    assert model.experts.gate_up_proj.grad.full_tensor().abs().sum() > 0
    model.experts.unshard()
    plain = Experts(4)
    for name in ("gate_up_proj", "down_proj"):
        setattr(plain, name, nn.Parameter(getattr(model.experts, name).high_precision()))
    again = plain(seen[0], x[:, 32:].long(), torch.full((len(x), 2), 0.5))
    assert float((out - again).norm() / again.norm()) < 1e-6


@pytest.mark.parametrize(
    ("experts", "dim", "why"),
    [(3, 0, "as many experts as any other"), (4, 1, "gathers blocks along dim 0 only"), (4, 0, "")],
)
@on_ranks(2)
def test_blocks_of_uneven_or_cut_experts_are_refused(experts: int, dim: int, why: str) -> None:
    job = Job(experts=experts, dim=dim, inner=64, recipe=BlockScaling(), settings=INLET)
    with pytest.raises(ConfigurationError, match=why) if why else contextlib.nullcontext():
        build(job)


def _parts(model: nn.Module, optimizer: torch.optim.Optimizer, manager: fp8dist.StateManager) -> dict[str, Any]:
    parameters, state = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": state, "fp8": manager}


def _saved_or_loaded(job: Job, folder: str, saves: bool) -> tuple[list[float], Any, Any, bytes]:
    """Return (losses of a step from the checkpoint on; state, parameters and an eval output at the checkpoint)."""
    model, called, manager, optimizer = build(job)
    if saves:
        for index in range(2):
            step(job, called, optimizer, index)
        dcp.save(_parts(called, optimizer, manager), checkpoint_id=folder)
    else:
        parts = _parts(called, optimizer, manager)
        dcp.load(parts, checkpoint_id=folder)
        set_state_dict(called, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    parameters = {name: bits(p) for name, p in full(model).items()}
    with torch.no_grad():
        output = bits(called.eval()(routed_batch(0, 9, job.experts)))
    called.train()
    found = state_of(manager), parameters, output
    return step(job, called, optimizer, 2), *found


def test_a_checkpoint_resumes_on_other_numbers_of_ranks(
    four_ranks: RankPool, two_ranks: RankPool, tmp_path: Path
) -> None:
    """Experts are found by their global index, whatever part of them a rank has."""
    job, folder = Job(experts=6), str(tmp_path / "checkpoint")
    saved = four_ranks.run(_saved_or_loaded, job, folder, True)
    assert four_ranks.run(_saved_or_loaded, job, folder, False) == saved
    for _, *found in two_ranks.run(_saved_or_loaded, replace(job, dim=1, fp8_all_gather=False), folder, False):
        assert found == list(saved[0][1:])
