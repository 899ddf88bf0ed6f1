"""Exact arithmetic in a real GPT of Megatron-Core: tensor and sequence parallelism, its fused loss and its hand-written
backward compute what one process computes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fp8dist.exact import arithmetic, to_residues
from fp8dist.exact.field import reduced
from tests.integrations.contract import needs
from tests.support.megatron import LENGTH, VOCABULARY, causal_mask, gpt, initialize, with_stand_ins
from tests.support.ranks import on_ranks

pytestmark = needs("megatron")


def _gradients(tp: int, sequence_parallel: bool = False) -> tuple[Tensor, dict[str, tuple[Tensor, int | None]]]:
    """Return the losses, and by parameter its gradient and the dim that tensor parallelism cuts."""
    initialize(tp)
    model = gpt(sequence_parallel=sequence_parallel)
    to_residues(model)
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    with arithmetic():
        losses = model(tokens[:, :-1], torch.arange(LENGTH).expand(2, LENGTH), causal_mask(), labels=tokens[:, 1:])
        losses.mean().backward()
        for parameter in model.parameters():
            if getattr(parameter, "sequence_parallel", False) and tp > 1:
                dist.all_reduce(parameter.grad)
    found = {}
    for name, parameter in model.named_parameters():
        cut = tp > 1 and getattr(parameter, "tensor_model_parallel", False)
        found[name] = (reduced(parameter.grad), parameter.partition_dim if cut else None)
    return reduced(losses.detach()), found


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2, timeout=200)
@with_stand_ins
def test_tensor_parallel_layers_of_megatron_are_equal(sequence_parallel: bool) -> None:
    expected, whole = _gradients(1)
    losses, parts = _gradients(2, sequence_parallel)
    assert torch.equal(losses, expected)
    assert parts.keys() == whole.keys()
    for name, (grad, dim) in parts.items():
        complete = whole[name][0]
        assert torch.equal(grad, complete if dim is None else complete.chunk(2, dim)[dist.get_rank()]), name
    assert sum(dim is not None for _, dim in parts.values()) == 13
