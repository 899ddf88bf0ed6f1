"""``fp8dist.check`` on models of Megatron-Core: which tensors are copies, and the classical bugs found by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp8dist
from tests.integrations.contract import needs
from tests.support.megatron import gpt, gradients, initialize, optimized, with_stand_ins
from tests.support.ranks import on_ranks

pytestmark = needs("megatron")

FINALIZE = "megatron.core.distributed.finalize_model_grads"

LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tp 2, dp 2": ({"tp": 2}, {"sequence_parallel": True}),
    "tp 2, pp 2, tied": ({"tp": 2, "pp": 2}, {"sequence_parallel": True}),
    "tp 2, ep 2": (
        {"tp": 2, "expert_model_parallel_size": 2},
        {"sequence_parallel": True, "experts": 4, "moe_router_enable_expert_bias": True},
    ),
    "ep 2, dp 4": ({"expert_model_parallel_size": 2}, {"experts": 4}),
    "pp 2, dp 2, untied": ({"pp": 2}, {"tied": False}),
    "tp 2, dp 2, loaded": ({"tp": 2}, {"perform_initialization": False}),
}
"""Sizes of groups, and fields of the model, for four ranks."""


class Job:
    """A model in Megatron's DDP, with Megatron's optimizer."""

    def __init__(
        self, layout: str, distributed: bool = False, overlap: bool = False, dtype: torch.dtype = torch.float32
    ) -> None:
        sizes, fields = LAYOUTS[layout]
        initialize(**sizes)
        extra = {"moe_router_score_function": "sigmoid"} if "moe_router_enable_expert_bias" in fields else {}
        self.model = gpt(**fields, **extra, params_dtype=dtype, pipeline_dtype=dtype)
        self.model.to(dtype)  # As Megatron's Float16Module does.
        (self.ddp,), self.optimizer = optimized(
            [self.model],
            {"overlap_param_gather": overlap, "overlap_grad_reduce": overlap},
            lr=1e-2,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            use_distributed_optimizer=distributed,
            overlap_param_gather=overlap,
        )

    @property
    def inner(self) -> list[Any]:
        """torch's optimizers."""
        return [one.optimizer for one in getattr(self.optimizer, "chained_optimizers", [self.optimizer])]

    def backward(self) -> None:
        """Make gradients of two microbatches, and let Megatron finalize them."""
        gradients([self.ddp], self.optimizer, range(2))


def _names(model: nn.Module, chosen: Callable[[Any], Any]) -> set[str]:
    return {name for name, parameter in model.named_parameters() if chosen(parameter)}


def _of_everybody(names: set[str]) -> set[str]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, names)
    return set().union(*gathered)


def by_kind(report: Any, kind: str) -> set[str]:
    return {finding.name for finding in report.findings if finding.kind == kind}


@pytest.mark.parametrize("distributed", [False, True], ids=["all-reduce", "distributed optimizer"])
@pytest.mark.parametrize(
    ("layout", "parameters", "alone"),
    [
        ("tp 2, dp 2", (28, 28), 0),
        ("tp 2, pp 2, tied", (8, 9), 7),  # The word embeddings are alone on their stage, and tied to the other's.
        ("tp 2, ep 2", (18, 18), 8),
        ("ep 2, dp 4", (26, 26), 0),
        ("pp 2, dp 2, untied", (14, 15), 0),
    ],
)
@on_ranks(4)
@with_stand_ins
def test_a_sound_job_has_no_differences(
    layout: str, parameters: tuple[int, int], alone: int, distributed: bool
) -> None:
    """``parameters`` of the first and of the second half of the ranks have copies. ``alone``: those that have none."""
    job = Job(layout, distributed)
    for _ in range(2):
        job.backward()
        before = fp8dist.check(job.ddp, gradients=True, buffers=True)
        job.optimizer.step()
        after = fp8dist.check(job.ddp, optimizer=job.inner)
    left = sum(int(text.split()[0]) for text in before.skipped if "parameters" in text)
    count = parameters[dist.get_rank() // 2]
    assert (before.compared["parameter"], after.compared["parameter"], left) == (count, count, alone)
    assert before.compared.get("buffer", 0) == (2 if layout == "tp 2, ep 2" else 0)  # A bias for each router.
    if not distributed:
        assert before.compared["gradient"] == count
        assert after.compared["optimizer"] == 3 * count  # Two moments and a step.


@on_ranks(4)
@with_stand_ins
def test_master_weights_and_their_states_are_compared_like_their_parameters() -> None:
    job = Job("tp 2, dp 2", dtype=torch.bfloat16)
    job.backward()
    job.optimizer.step()
    sound = fp8dist.check(job.ddp, optimizer=job.inner)
    norm = dict(job.model.named_parameters())["decoder.final_layernorm.weight"]
    if dist.get_rank() == 2:
        job.inner[0].state[norm.main_param]["exp_avg"][4] += 1
        norm.main_param.data[3] *= 1 + 2**-16  # Less than bfloat16 shows.
    found = fp8dist.check(job.ddp, optimizer=job.inner, policy="warn")
    assert sound.compared == {"optimizer": 112, "parameter": 28}
    assert [(f.kind, f.name, f.ranks) for f in found.findings] == [
        ("optimizer", "decoder.final_layernorm.weight.exp_avg", (2,)),
        ("optimizer", "decoder.final_layernorm.weight.main_param", (2,)),
    ]


@pytest.mark.parametrize(
    ("layout", "name", "rank", "ranks", "reference"),
    [
        ("tp 2, dp 2", "decoder.layers.1.pre_mlp_layernorm.weight", 3, (3,), 0),
        ("tp 2, dp 2", "decoder.layers.0.mlp.linear_fc2.bias", 1, (1,), 0),
        ("tp 2, dp 2", "decoder.layers.0.mlp.linear_fc1.weight", 3, (1, 3), None),
        ("tp 2, ep 2", "decoder.layers.1.mlp.router.weight", 2, (2,), 0),
        ("ep 2, dp 4", "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight", 3, (1, 3), None),
        ("tp 2, pp 2, tied", "output_layer.weight", 2, (0, 2), None),
        ("tp 2, pp 2, tied", "decoder.layers.0.input_layernorm.bias", 3, (2, 3), None),
    ],
)
@on_ranks(4)
@with_stand_ins
def test_a_difference_is_named(
    layout: str, name: str, rank: int, ranks: tuple[int, ...], reference: int | None
) -> None:
    """Copies of one tensor are compared, and no others. With two copies nobody is to blame."""
    job = Job(layout)
    job.backward()
    job.optimizer.step()
    if dist.get_rank() == rank:
        dict(job.model.named_parameters())[name].data.view(-1)[5] += 1e-3
    report = fp8dist.check(job.ddp, policy="warn")
    (finding,) = report.findings
    shown = "Megatron's tied embeddings" if name == "output_layer.weight" else name
    assert (finding.kind, finding.name, finding.ranks) == ("parameter", shown, ranks)
    assert finding.reference_rank == reference
    assert finding.index is not None
    assert ("tp" in str(report)) == ("tp" in layout)


@on_ranks(4)
@with_stand_ins
def test_states_of_tied_embeddings_are_told_apart() -> None:
    job = Job("tp 2, pp 2, tied")
    job.backward()
    job.optimizer.step()
    if dist.get_rank() == 2:
        job.inner[0].state[job.model.output_layer.weight]["exp_avg"][3, 5] += 1
    (found,) = fp8dist.check(job.ddp, optimizer=job.inner, policy="warn").findings
    tied = "Megatron's tied embeddings.exp_avg"
    assert (found.kind, found.name, found.ranks, found.index) == ("optimizer", tied, (0, 2), (3, 5))


def _forget(layout: str, function: str, distributed: bool = False) -> Any:
    """Train with one of Megatron's reductions left out."""
    job = Job(layout, distributed)
    with mock.patch(f"{FINALIZE}.{function}", return_value=None):
        job.backward()
    before = fp8dist.check(job.ddp, gradients=True, policy="warn")
    job.optimizer.step()
    after = fp8dist.check(job.ddp, policy="warn")
    marked = _of_everybody(_names(job.model, lambda p: getattr(p, "sequence_parallel", False)))
    return by_kind(before, "gradient"), by_kind(before, "parameter"), by_kind(after, "parameter"), marked


@pytest.mark.parametrize("distributed", [False, True], ids=["all-reduce", "distributed optimizer"])
@pytest.mark.parametrize("layout", ["tp 2, dp 2", "tp 2, ep 2"])
@on_ranks(4)
@with_stand_ins
def test_gradients_that_sequence_parallelism_left_partial(layout: str, distributed: bool) -> None:
    """LayerNorms, biases and routers have partial gradients until Megatron adds them up over the tensor parallel
    ranks."""
    forgotten = "_allreduce_non_tensor_model_parallel_grads"
    partial, before, after, marked = _forget(layout, forgotten, distributed)
    assert any("layernorm" in name for name in marked)
    assert ("decoder.layers.0.mlp.router.weight" in marked) == ("ep" in layout)
    assert partial == marked
    assert not before
    assert after == marked


@on_ranks(4)
@with_stand_ins
def test_tied_embeddings_that_drift_apart() -> None:
    partial, before, after, _ = _forget("tp 2, pp 2, tied", "_allreduce_word_embedding_grads")
    assert (partial, before, after) == ({"Megatron's tied embeddings"}, set(), {"Megatron's tied embeddings"})


@on_ranks(4)
@with_stand_ins
def test_a_check_over_one_of_megatrons_groups() -> None:
    """Shards are no differences between tensor parallel ranks, but LayerNorms are compared."""
    from megatron.core import parallel_state

    job = Job("tp 2, dp 2")
    norm = dict(job.model.named_parameters())["decoder.final_layernorm.weight"]
    over_tensor, over_data = (
        fp8dist.check(job.ddp, group=group)
        for group in (parallel_state.get_tensor_model_parallel_group(), parallel_state.get_data_parallel_group())
    )
    if dist.get_rank() == 1:
        norm.data[0] += 1
    found = fp8dist.check(job.ddp, group=parallel_state.get_tensor_model_parallel_group(), policy="warn")
    parameters = len(list(job.model.parameters()))
    shards = parameters - over_tensor.compared["parameter"]
    assert 0 < shards < parameters
    assert over_tensor.skipped == (
        f"{shards} parameters that are shared with ranks that do not take part in this check "
        "(Megatron's data parallel ranks)",
    )
    assert over_data.compared == {"parameter": parameters}
    expected = [("decoder.final_layernorm.weight", (0, 1))] if dist.get_rank() < 2 else []
    assert [(f.name, f.ranks) for f in found.findings] == expected


@on_ranks(4)
@with_stand_ins
def test_parameters_that_the_next_forward_gathers_are_not_compared() -> None:
    job = Job("tp 2, dp 2", distributed=True, overlap=True)
    job.backward()
    job.optimizer.step()
    early = fp8dist.check(job.ddp, gradients=True).skipped
    job.ddp.disable_forward_pre_hook()
    late, parameters = fp8dist.check(job.ddp), len(list(job.model.parameters()))
    assert any(text.startswith(f"{parameters} parameters that the next forward gathers") for text in early)
    assert (late.compared, late.skipped) == ({"parameter": parameters}, ())


@on_ranks(4)
@with_stand_ins
def test_weights_that_megatron_did_not_initialize() -> None:
    """Megatron marks no weight then. They are loaded."""
    from megatron.core import parallel_state

    job = Job("tp 2, dp 2, loaded")
    torch.manual_seed(parallel_state.get_tensor_model_parallel_rank())
    for name, parameter in job.model.named_parameters():
        split = "linear" in name or "word_embeddings" in name
        nn.init.normal_(parameter) if split and parameter.dim() > 1 else nn.init.ones_(parameter)
    assert fp8dist.check(job.ddp).compared == {"parameter": 28}


def _tied_on_one_side(case: str) -> Any:
    if case == "no group":
        initialize(pp=2, get_embedding_ranks=lambda ranks, *_: ranks[:1])
        return fp8dist.check(gpt(), policy="warn")
    if case == "left out":
        return fp8dist.check(Job("tp 2, pp 2, tied").ddp, groups={"output_layer.*": None}, policy="warn")
    initialize(pp=2, virtual_pipeline_model_parallel_size=2)
    chunks = [gpt(layers=4, vp_stage=stage) for stage in range(2)]
    fp8dist.check(nn.ModuleList(chunks))
    return fp8dist.check(chunks[0], policy="warn")


@pytest.mark.parametrize("case", ["left out", "one chunk", "no group"])
@on_ranks(4, timeout=40)
@with_stand_ins
def test_a_tied_embedding_that_only_one_stage_compares_is_not_waited_for(case: str) -> None:
    pairs = [] if case == "no group" else [(0, 2), (1, 3)]
    found = [(f.kind, f.name, f.ranks) for f in _tied_on_one_side(case).findings]
    assert found == [("layout", "Megatron's tied embeddings", pair) for pair in pairs]


@on_ranks(4)
@with_stand_ins
def test_megatrons_layers_in_a_module_of_ones_own() -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    initialize(2)
    config = gpt().config
    torch.manual_seed(dist.get_rank() % 2)  # As many shards as there are tensor parallel ranks.
    linear = ColumnParallelLinear(16, 32, config=config, init_method=nn.init.ones_, bias=False)
    linear.weight.data.normal_()
    norm = nn.ModuleDict({"linear": linear, "norm": nn.LayerNorm(4)})
    assert fp8dist.check(nn.Sequential(linear)).compared == {"parameter": 1}
    left_out = fp8dist.check(norm, groups={"linear.*": None})
    assert (left_out.compared, left_out.skipped) == ({"parameter": 2}, ("1 parameters matching linear.*: left out",))
