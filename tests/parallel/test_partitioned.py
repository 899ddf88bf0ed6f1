"""Parts of parameters under ZeRO's stage 3. tests/integrations/test_deepspeed.py has the real ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8dist.parallel.partitioned import is_partitioned, own_part


@pytest.mark.parametrize(("rank", "expected"), [(0, [1.0, 2.0]), (1, [3.0]), (2, [])])
def test_padding_is_no_part_of_a_parameter(monkeypatch: pytest.MonkeyPatch, rank: int, expected: list[float]) -> None:
    parameter = nn.Parameter(torch.empty(0))
    assert not is_partitioned(parameter)
    whole = torch.tensor([1.0, 2.0, 3.0, torch.nan, torch.nan, torch.nan])
    parameter.ds_tensor, parameter.ds_numel, parameter.ds_process_group = whole[2 * rank :][:2], 3, None
    monkeypatch.setattr(dist, "get_rank", lambda group: rank)
    assert is_partitioned(parameter)
    assert own_part(parameter).tolist() == expected
