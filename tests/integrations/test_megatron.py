"""``fp8dist.integrations.megatron`` in a real GPT of Megatron-Core, with its DDP, optimizers, schedules and
checkpoints, against a loop by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8dist
from fp8dist.errors import ConfigurationError
from fp8dist.modules.fp8_linear import fp8_linears
from fp8dist.modules.linear_slots import LinearSlots
from tests.integrations.contract import Adapter, Ours, Trainee, diverged, needs, require_masters, same, undisturbed
from tests.support.logs import captured_log
from tests.support.megatron import forward, gpt, gradients, initialize, optimized, with_stand_ins
from tests.support.ranks import RankPool, on_ranks

pytestmark = needs("megatron")
integration = Ours("megatron")

STEPS, RATE = 12, 3e-3

DISTRIBUTED = {"use_distributed_optimizer": True}

BFLOAT16 = {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "bf16": True}
"""A model's configuration. Its optimizer has main parameters in float32."""


@dataclass
class Job(Trainee):
    """What a training script of Megatron holds."""

    chunks: list[Any]
    manager: Any
    optimizer: Any

    @property
    def model(self) -> Any:
        return self.chunks[0]

    def train(self, places: Iterable[int]) -> list[float]:
        return _train(self, places)

    def forward(self, place: int) -> Tensor:
        return forward(self.model, place)

    def parameters(self) -> list[Tensor]:
        return [parameter.detach().clone() for model in self.chunks for parameter in model.parameters()]


def _job(model: Any = None, wraps: dict[str, Any] | None = None, options: Any = None, **optimizer: Any) -> Job:
    """Return a job with an attached manager. ``wraps``: fields of DistributedDataParallelConfig."""
    chunks = model if isinstance(model, list) else [gpt() if model is None else model]
    manager = integration.prepare(chunks, **(options or {}))
    job = _unattached(chunks, manager, wraps, **optimizer)
    integration.attach(manager, job.optimizer)
    return job


def _unattached(chunks: list[Any], manager: Any, wraps: dict[str, Any] | None = None, **optimizer: Any) -> Job:
    from megatron.core.transformer.module import Float16Module

    if optimizer.get("bf16"):
        chunks = [Float16Module(chunk.config, chunk) for chunk in chunks]
    chunks, made = optimized(chunks, {"grad_reduce_in_fp32": True, **(wraps or {})}, **{"lr": RATE, **optimizer})
    return Job(chunks, manager, made)


def _train(job: Job, steps: Iterable[int], accumulate: int = 1, infinite: int | None = None) -> list[float]:
    """Train with Megatron's schedule. Return the losses of this rank's microbatches. ``infinite``: in this step rank 1
    has an infinite gradient."""
    losses = []
    for step in steps:
        blown_up = step == infinite and dist.get_rank() == 1
        if blown_up:
            handle = job.chunks[0].module.decoder.layers[0].register_full_backward_pre_hook(_blow_up)
        losses += gradients(job.chunks, job.optimizer, range(step * accumulate, (step + 1) * accumulate))
        if blown_up:
            handle.remove()
        updated, _, _ = job.optimizer.step()
        assert updated == (step != infinite)
    return losses


def _blow_up(module: Any, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    return tuple(None if gradient is None else gradient * torch.inf for gradient in gradients)


class _Exchange(torch.autograd.Function):
    """One collective in the forward, its transpose in the backward. The first dim is that of the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Any, back: Any) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _sum(group: Any, x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def _gather(group: Any, x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def _scatter(group: Any, x: Tensor) -> Tensor:
    return _sum(group, x).chunk(group.size())[group.rank()].clone()


def _by_hand(model: Any, sequence_parallel: bool) -> None:
    """Replace each parallel Linear by a plain one around which hooks communicate."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    group = parallel_state.get_tensor_model_parallel_group()
    gather, scatter, whole = partial(_gather, group), partial(_scatter, group), partial(_sum, group)
    for name, module in list(model.named_modules()):
        if not isinstance(module, (ColumnParallelLinear, RowParallelLinear)) or module.weight is None:
            continue
        alone = getattr(module, "explicit_expert_comm", False)
        row, later = isinstance(module, RowParallelLinear), module.skip_bias_add
        linear = nn.Linear(1, 1, bias=False)
        linear.weight, outer = module.weight, module.bias
        if not row:
            there, back = (_same, _same) if alone else (gather, scatter) if sequence_parallel else (_same, whole)
            linear.register_forward_pre_hook(lambda _, x, t=there, b=back: (_Exchange.apply(x[0], t, b),))
            if not later:
                linear.bias, outer = module.bias, None
            linear.register_forward_hook(lambda _, x, y, o=outer: (y, o))
        else:
            assert later
            there, back = (_same, _same) if alone else (scatter, gather) if sequence_parallel else (whole, _same)
            linear.register_forward_hook(lambda _, x, y, t=there, b=back, o=outer: (_Exchange.apply(y, t, b), o))
        linear.out_features, linear.in_features = linear.weight.shape
        linear.outer = outer
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, linear)


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallelisms. The other ranks are data-parallel."""

    tp: int = 1
    sequence_parallel: bool = False
    ep: int = 1
    experts: int = 0


def _trained_by_hand(layout: Layout, accumulate: int) -> tuple[list[float], Any]:
    from megatron.core import parallel_state

    model = gpt(sequence_parallel=layout.sequence_parallel, experts=layout.experts)
    order = [id(parameter) for parameter in model.parameters()]
    _by_hand(model, layout.sequence_parallel)
    parameters = sorted(model.parameters(), key=lambda parameter: order.index(id(parameter)))
    assert len(parameters) == len(order)
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    groups = {"groups": {"*.experts.*": own}} if layout.experts else {}
    manager = fp8dist.prepare(model, group=dist.group.WORLD, **groups)
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    manager.attach(model, optimizer=optimizer)
    data, tensor = parallel_state.get_data_parallel_group(), parallel_state.get_tensor_model_parallel_group()
    losses = []
    for step in range(STEPS):
        for place in range(step * accumulate, (step + 1) * accumulate):
            loss = forward(model, place).mean()
            losses.append(loss.item())
            (loss / accumulate).backward()
        for parameter in parameters:
            parameter.grad /= data.size()
            if getattr(parameter, "allreduce", True):
                dist.all_reduce(parameter.grad, group=data)
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad, group=tensor)
        optimizer.step()
        optimizer.zero_grad()
    return losses, (manager.state_dict(), [parameter.detach() for parameter in parameters])


def _fuse(job: Job) -> None:
    """Let FP8Linears add their weights' gradients to main_grad. Megatron's own layers need a kernel of Apex for that,
    which is not installed."""
    for chunk in job.chunks:
        for linear in fp8_linears(chunk):
            linear.gradient_accumulation_fusion = True


@with_stand_ins
def _as_by_hand(folder: str, layout: Layout, accumulate: int, optimizer: dict[str, Any]) -> None:
    initialize(layout.tp, expert_model_parallel_size=layout.ep)
    job = _job(gpt(sequence_parallel=layout.sequence_parallel, experts=layout.experts), **optimizer)
    linears = list(fp8_linears(job.chunks[0]))
    assert len(linears) == (12 if layout.experts else 8)
    _fuse(job)
    before = job.manager.metrics()["fp8/collectives"]
    losses = _train(job, range(STEPS), accumulate)
    assert job.manager.metrics()["fp8/collectives"] - before == STEPS  # An expert has one rank.
    added = [linear.weight.grad_added_to_main_grad for linear in linears]
    assert all(added) if not layout.experts else any(added)  # An expert may get no tokens.
    expected, kept = _trained_by_hand(layout, accumulate)
    assert losses == expected
    assert losses[-1] < losses[0]
    assert same(job.kept(), kept)


def test_tensor_and_data_parallel_ranks_share_scales(four_ranks: RankPool) -> None:
    four_ranks.run(_as_by_hand, "", Layout(tp=2, sequence_parallel=True), 2, DISTRIBUTED)


def _of_all_stages(chunks: list[Any], layers: int) -> list[tuple[dict[str, Any], list[str]]]:
    """Return, per chunk of this rank, its parameters by their names in a model without a pipeline. Local."""
    from megatron.core import parallel_state

    stages, rank = parallel_state.get_pipeline_model_parallel_world_size(), dist.get_rank()
    each = layers // stages // len(chunks)
    found = []
    for place, chunk in enumerate(chunks):
        first = each * (place * stages + rank)
        found.append({_shifted(name, first): p.detach().clone() for name, p in chunk.named_parameters()})
    return found


def _shifted(name: str, first: int) -> str:
    before, found, after = name.partition("decoder.layers.")
    layer, _, rest = after.partition(".")
    return f"{before}{found}{int(layer) + first}.{rest}" if found else name


@pytest.mark.parametrize(("chunks", "layers", "accumulate"), [(1, 2, 3), (2, 4, 4)], ids=["stages", "virtual stages"])
@on_ranks(2)
@with_stand_ins
def test_pipeline_stages_train_as_a_model_without(chunks: int, layers: int, accumulate: int) -> None:
    virtual = {"virtual_pipeline_model_parallel_size": chunks} if chunks > 1 else {}
    initialize(pp=2, **virtual)
    models = [
        gpt(tied=False, layers=layers, vp_stage=place if chunks > 1 else None, seed=10 * dist.get_rank() + place)
        for place in range(chunks)
    ]
    begun, every = _of_all_stages(models, layers), [None, None]
    dist.all_gather_object(every, begun)
    job = _job(models, options={"skip": "!*output_layer"}, **DISTRIBUTED)
    losses = _train(job, range(STEPS), accumulate)
    ended = _of_all_stages(models, layers)

    initialize()  # The same data on both ranks: the mean of equal gradients is exact.
    whole = gpt(tied=False, layers=layers)
    whole.load_state_dict(
        {name: value for part in every for each in part for name, value in each.items()}, strict=False
    )
    alone = _job(whole, options={"skip": "!*output_layer"})
    with mock.patch("megatron.core.parallel_state.get_data_parallel_rank", return_value=0):
        expected = _train(alone, range(STEPS), accumulate)
    if dist.get_rank() == 1:
        assert losses == expected
    parameters = dict(whole.named_parameters())
    assert all(torch.equal(value, parameters[name]) for each in ended for name, value in each.items())
    scales = {slot: alone.manager.slot(slot.fqn, slot.role).scale for slot in alone.manager.slots}
    assert len(job.manager.slots) * 2 in (len(scales) - 3, len(scales) + 3)
    for slot in job.manager.slots:
        place, _, fqn = slot.fqn.partition(".") if chunks > 1 else (0, "", slot.fqn)
        first = layers // 2 // chunks * (int(place) * 2 + dist.get_rank())
        assert job.manager.slot(slot.fqn, slot.role).scale == alone.manager.slot(_shifted(fqn, first), slot.role).scale


def _state(job: Job, is_loading: bool = False) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    metadata = {
        "distrib_optim_sharding_type": "dp_reshardable",
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    model = unwrap_model(job.chunks[0]).sharded_state_dict(metadata=metadata)
    optimizer = job.optimizer.sharded_state_dict(model, is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


@with_stand_ins
def _resumed(folder: str, tp: int, pp: int, optimizer: dict[str, Any], options: dict[str, Any]) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.utils import unwrap_model

    initialize(tp, pp)
    dtype = BFLOAT16 if optimizer.get("bf16") else {}
    whole = _job(gpt(**dtype), options=options, **optimizer)
    _train(whole, range(6), 2)
    dist_checkpointing.save(_state(whole), folder)
    _train(whole, range(6, STEPS), 2)
    resumed = _job(gpt(seed=6, **dtype), options=options, **optimizer)
    # Megatron's distributed optimizer loads into torch's Adam only if that has stepped, and keeps its count of steps.
    _train(resumed, range(6), 2)
    loaded = dist_checkpointing.load(_state(resumed, True), folder)
    unwrap_model(resumed.chunks[0]).load_state_dict(loaded["model"])
    resumed.optimizer.load_state_dict(loaded["optimizer"])
    for state in resumed.optimizer.chained_optimizers[0].optimizer.state.values():
        state["step"] = state["step"].clone()  # Megatron gives all parameters the same counter, which each one raises.
    assert resumed.manager.steps == 6
    _train(resumed, range(6, STEPS), 2)
    assert same(whole.kept(), resumed.kept())


@on_ranks(2)
@with_stand_ins
def test_scales_begin_anew_with_a_checkpoint_without_fp8(tmp_path: Path) -> None:
    from megatron.core import dist_checkpointing

    folder = str(tmp_path)
    initialize(2)
    plain = _unattached([gpt()], None)
    _train(plain, range(2))
    dist_checkpointing.save(_state(plain), folder)
    job = _job(gpt(seed=6))
    _train(job, range(3))
    loaded = dist_checkpointing.load(_state(job, True), folder, strict="log_all")
    job.chunks[0].module.load_state_dict(loaded["model"])
    job.optimizer.load_state_dict(loaded["optimizer"])
    assert job.manager.steps == 0
    weight = job.chunks[0].module.decoder.layers[0].mlp.linear_fc1.weight.abs().max()
    dist.all_reduce(weight := weight.detach().clone(), op=dist.ReduceOp.MAX)
    fits = job.manager.slot("decoder.layers.0.mlp.linear_fc1", "weight").scale * weight / 448
    assert 0.999 < fits < 1.001
    _train(job, range(3))


@with_stand_ins
def _diverged(folder: str, optimizer: dict[str, Any]) -> str:
    initialize(2)
    return diverged(_job(**optimizer), _damage)


def _damage(trainee: Trainee) -> None:
    trainee.manager.slot("decoder.layers.1.mlp.linear_fc2", "input").set_scale(3.0)


@on_ranks(2)
@with_stand_ins
def test_a_step_that_megatron_skips_is_no_boundary() -> None:
    initialize(2)
    job = _job(loss_scale=1.0, **DISTRIBUTED)
    _train(job, range(7))
    before = job.parameters()
    _train(job, [7], infinite=7)
    assert job.manager.steps == 7
    assert same((0, before), (0, job.parameters()))
    losses = _train(job, range(8, STEPS))
    assert job.manager.steps == STEPS - 1
    assert job.manager.metrics()["fp8/nonfinite_amaxes"] == 0
    assert all(map(math.isfinite, losses))


@with_stand_ins
def _in_bfloat16(optimizer: dict[str, Any], fused: bool = False) -> tuple[list[float], Any, list[float]]:
    initialize()
    job = _job(gpt(**BFLOAT16), bf16=True, options={"check_every": 2}, **optimizer)
    if fused:
        _fuse(job)
    model, manager = job.chunks[0], job.manager
    losses = _train(job, range(STEPS))
    fits = []
    for linear in fp8_linears(model):
        fqn = linear.fp8_slots.slots["weight"].fqn
        fits.append((manager.slot(fqn, "weight").scale * linear.weight.abs().max() / 448).item())
    kept = job.kept()
    require_masters(manager, linear.weight, fqn)
    return losses, kept, fits


def test_scales_follow_weights_that_main_parameters_are_copied_to(two_ranks: RankPool) -> None:
    whole = two_ranks.run(_in_bfloat16, {})
    distributed = two_ranks.run(_in_bfloat16, DISTRIBUTED)
    fused = [losses for losses, *_ in two_ranks.run(_in_bfloat16, DISTRIBUTED, True)]
    assert fused != [losses for losses, *_ in whole], "gradients are not rounded to bfloat16 before they are added"
    for losses, (others, *_) in zip(fused, whole, strict=True):
        assert losses == pytest.approx(others, rel=0.05)
    for (losses, kept, fits), (others, theirs, _) in zip(whole, distributed, strict=True):
        assert losses[-1] < losses[0]
        assert losses == others
        assert same(kept, theirs)
        assert all(0.9 < fit < 1.2 for fit in fits)  # They follow the weight of one step ago.


@on_ranks(2)
@with_stand_ins
def test_weights_are_cast_once_a_step() -> None:
    initialize(2)
    job, cast = _job(**DISTRIBUTED), LinearSlots._cast_weight
    with mock.patch.object(LinearSlots, "_cast_weight", autospec=True, side_effect=cast) as casts:
        _train(job, range(2), 3)
    assert casts.call_count == 2 * 8


@on_ranks(2)
@with_stand_ins
def test_weights_that_are_gathered_in_the_forward_are_cast_after_that() -> None:
    initialize()
    plain = _job(**DISTRIBUTED)
    expected = _train(plain, range(STEPS), 2)
    job = _job(wraps={"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20000}, **DISTRIBUTED)
    assert len(job.chunks[0].bucket_groups) > 2
    _fuse(job)  # Reductions begin in hooks on weights, whose gradients the layers have added.
    assert _train(job, range(STEPS), 2) == expected
    job.chunks[0].disable_forward_pre_hook()  # Gathers what the next forward would.
    assert same(job.kept(), plain.kept())


@on_ranks(2)
@with_stand_ins
def test_recomputed_activations_have_the_same_bits() -> None:
    initialize(2)
    kept = _job(gpt(sequence_parallel=True))
    expected = _train(kept, range(STEPS), 2)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    job = _job(gpt(sequence_parallel=True, **full))
    assert _train(job, range(STEPS), 2) == expected
    assert same(job.kept(), kept.kept())


@with_stand_ins
def _undisturbed(folder: str) -> None:
    initialize(2)
    undisturbed(_job)


@with_stand_ins
def _recorded(folder: str, name: str, end: str) -> tuple[str, dict[int, float], int]:
    initialize(2)
    model = gpt(sequence_parallel=True)
    manager = integration.prepare(model)
    recorder = fp8dist.Recorder(f"{folder}/run-{name}", manager, every=4)
    job = _unattached([model], manager)
    integration.attach(manager, job.optimizer)
    losses = {}
    with recorder:
        for step in range(1, STEPS + 1):
            losses[step] = _train(job, [step])[0]
            recorder.log(manager.run_step, loss=losses[step], grad_norm=1.0)
    return "", losses, len(manager.slots)


@on_ranks(2)
@with_stand_ins
def test_modules_stay_megatrons() -> None:
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    initialize(2)
    plain, model, off = gpt(), gpt(), gpt()
    keys, attributes = list(plain.state_dict()), [p.__dict__ for p in plain.parameters()]
    manager = _job(model).manager
    fc1 = model.decoder.layers[0].mlp.linear_fc1
    assert isinstance(fc1, ColumnParallelLinear)
    assert list(model.state_dict()) == keys
    for mine, theirs in zip((p.__dict__ for p in model.parameters()), attributes, strict=True):
        assert {**mine, **theirs} == mine
    with manager.no_fp8():
        assert torch.equal(forward(model, 0), forward(plain, 0))
    assert not torch.equal(forward(model, 0), forward(plain, 0))
    fp8dist.restore(model)
    assert type(fc1) is ColumnParallelLinear
    assert vars(fc1).keys() == vars(plain.decoder.layers[0].mlp.linear_fc1).keys()
    assert torch.equal(forward(model, 0), forward(plain, 0))
    _job(off, options={"enabled": False})
    assert torch.equal(forward(off, 0), forward(plain, 0))


@with_stand_ins
def _misused(folder: str) -> None:
    from megatron.core import parallel_state

    initialize()
    first = _job(options={"skip": None})
    with pytest.raises(ConfigurationError, match="attached already"):
        integration.attach(first.manager, first.optimizer)
    with pytest.raises(ConfigurationError, match="the optimizer that get_megatron_optimizer"):
        integration.attach(integration.prepare(gpt()), torch.optim.SGD(gpt().parameters()))
    wrapped = first.chunks[0]
    with pytest.raises(ConfigurationError, match="before the model is wrapped"):
        integration.prepare(wrapped)
    for optimizer in ({}, DISTRIBUTED):
        model, other = gpt(), _unattached([gpt()], None, **optimizer)
        with pytest.raises(ConfigurationError, match="does not train the model that was prepared"):
            integration.attach(integration.prepare(model), other.optimizer)
    early = gpt()
    manager = integration.prepare(early)
    manager.attach(boundary="manual")
    with pytest.raises(ConfigurationError, match=r"leave out manager.attach\(\)"):
        integration.attach(manager, _unattached([early], manager).optimizer)
    other.optimizer.model_chunks = [model]
    with pytest.raises(ConfigurationError, match="does not support GPTModel of Megatron-Core: use Distributed"):
        integration.attach(fp8dist.get_manager(model), other.optimizer)
    parallel_state.destroy_model_parallel()
    with pytest.raises(ConfigurationError, match=r"call Megatron-Core's initialize_model_parallel\(\)"):
        integration.prepare(model)
    initialize()
    for name, value in (("fp8", "hybrid"), ("cuda_graph_impl", "local"), ("tp_comm_overlap", True)):
        model = gpt()
        setattr(model.config, name, value)
        with pytest.raises(ConfigurationError, match=f"does not support {name}={value!r} of Megatron-Core"):
            integration.prepare(model)
    untied = integration.prepare(gpt(tied=False)).coverage()
    assert [row.fqn for row in untied if not row.fp8] == ["output_layer"]
    first.manager.detach()
    integration.attach(first.manager, first.optimizer)
    _train(first, range(2))
    assert first.manager.steps == 2


@with_stand_ins
def _forgotten(folder: str) -> None:
    initialize()
    model = gpt()
    job = _unattached([model], integration.prepare(model))
    with pytest.raises(ConfigurationError, match="no step of FP8 state has ended since the first"):
        _train(job, range(3))


@on_ranks(2)
@with_stand_ins
def test_attaching_to_an_optimizer_that_was_loaded_is_told() -> None:
    initialize()
    model = gpt()
    job = _unattached([model], integration.prepare(model, enabled=False))
    _train(job, range(1))
    with captured_log() as log:
        integration.attach(job.manager, job.optimizer)
    assert len([text for _, text in log if "before attach()" in text]) == 1


@on_ranks(4)
@with_stand_ins
def test_experts_with_tensor_parallelism_need_a_group() -> None:
    initialize(2, expert_model_parallel_size=2, expert_tensor_parallel_size=2)
    model = gpt(experts=4, sequence_parallel=True)
    with pytest.raises(ConfigurationError, match="no group of the ranks that share an expert"):
        integration.prepare(model)
    kept = integration.prepare(model, skip="*.experts.*").coverage()
    assert {".experts." in row.fqn for row in kept if row.fp8} == {False}
    fp8dist.restore(model)
    own = [dist.new_group([2 * pair, 2 * pair + 1]) for pair in range(2)][dist.get_rank() // 2]
    assert integration.prepare(model, groups={"*.experts.*": own}).coverage().share == 1


@pytest.mark.parametrize("overlap", [False, True], ids=["distributed optimizer", "overlap_param_gather"])
@on_ranks(4)
@with_stand_ins
def test_a_manager_knows_what_the_distributed_optimizer_keeps_in_parts(overlap: bool) -> None:
    initialize(2)
    late = {"overlap_grad_reduce": True, "overlap_param_gather": True} if overlap else {}
    job = _job(wraps=late, options={"check_every": 1}, **DISTRIBUTED)
    _train(job, range(2))
    report = job.manager.check(gradients=True)
    assert ("parameter" in report.compared) != overlap
    assert report.compared["slot"] > 0
    assert any("reduces another part" in text for text in report.skipped)


@on_ranks(4)
@with_stand_ins
def test_a_check_of_all_chunks_compares_their_fp8_state() -> None:
    initialize(pp=2, virtual_pipeline_model_parallel_size=2)
    job = _job([gpt(layers=4, vp_stage=stage) for stage in range(2)])
    if dist.get_rank() == 3:
        job.manager._syncs[0].arena.scale[0] *= 2
    report = fp8dist.check(nn.ModuleList(job.chunks), policy="warn")
    with pytest.raises(ConfigurationError, match="is prepared already"):
        integration.prepare([chunk.module for chunk in job.chunks])
    assert [(f.kind, f.ranks) for f in report.findings] == [("scale", (2, 3))]


_LAYOUTS: dict[str, tuple[Layout, int, dict[str, Any]]] = {
    "tp": (Layout(tp=2), 1, DISTRIBUTED),
    "tp, accumulated": (Layout(tp=2), 3, {}),
    "sequence parallel": (Layout(tp=2, sequence_parallel=True), 1, {}),
    "sequence parallel, accumulated": (Layout(tp=2, sequence_parallel=True), 3, DISTRIBUTED),
    "dp": (Layout(), 1, {}),
    "dp, accumulated": (Layout(), 3, DISTRIBUTED),
    "experts": (Layout(ep=2, experts=4), 1, {}),
}

ADAPTER = Adapter(
    by_hand={name: (_as_by_hand, *layout) for name, layout in _LAYOUTS.items()},
    resumed={
        "tp": (_resumed, 2, 1, {}, {}),
        "dp": (_resumed, 1, 1, {**DISTRIBUTED, "bf16": True}, {}),
        "stages": (_resumed, 1, 2, {**DISTRIBUTED, "bf16": True}, {}),
        "own state": (_resumed, 1, 1, {}, {"amax_sync": False}),
    },
    diverged={
        name: ("decoder.layers.1.mlp.linear_fc2:input", (_diverged, optimizer))
        for name, optimizer in (("whole", {}), ("distributed", DISTRIBUTED))
    },
    undisturbed={"evaluations, other models": (_undisturbed,)},
    refused={"misuse": (_misused,), "a forgotten attach": (_forgotten,)},
    recorded=_recorded,
    resumes=False,  # Its loop saves, and keeps its own count.
    prints="FP8: 92.3 %",
    through=("-m", "tests.support.megatron"),
    lines=0,
)
