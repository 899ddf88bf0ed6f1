"""By what healthy ranks may get other results from equal data."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fp8dist.checks.likeness import unsteady_settings

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def _reasons(monkeypatch: pytest.MonkeyPatch, device: torch.device, model: nn.Module, **flags: Any) -> list[str]:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", flags.get("benchmark", False))
    inductor = SimpleNamespace(max_autotune=flags.get("max_autotune", False))
    monkeypatch.setitem(sys.modules, "torch._inductor.config", inductor)
    return [reason.split(" ")[0] for reason in unsteady_settings(device, model)]


def test_what_keeps_ranks_from_being_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, compiled = nn.Linear(2, 2), nn.Linear(2, 2)
    compiled.compile(backend="eager")
    syncs = nn.Sequential(nn.SyncBatchNorm(2))
    both = {"benchmark": True, "max_autotune": True}
    assert _reasons(monkeypatch, CPU, compiled) == []
    assert _reasons(monkeypatch, CUDA, plain, **both) == ["torch.backends.cudnn.benchmark=True"]
    assert _reasons(monkeypatch, CPU, compiled, **both) == ["Inductor's"]
    assert _reasons(monkeypatch, CPU, syncs) == ["SyncBatchNorm"]
    assert _reasons(monkeypatch, CPU, syncs.eval()) == []
