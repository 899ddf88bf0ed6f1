"""The trial of products at attach: what a machine cannot multiply is one ConfigurationError, before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, MXFP8Scaling, RowwiseScaling
from fp8dist.errors import ConfigurationError
from fp8dist.job import trial
from fp8dist_kernels import ops
from fp8dist_kernels.multipliers import Machine
from fp8dist_kernels.reference import torch_matmuls
from tests.support.libtorch import Stand
from tests.support.ranks import on_ranks


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes the trial of this process see another machine."""

    def be(capability: tuple[int, int], cuda: tuple[int, int] = (13, 0)) -> Stand:
        stand, seen = Stand(capability, cuda, (2, 11)), Machine(capability, cuda, (2, 11))
        for module in (torch_matmuls, ops, trial):
            monkeypatch.setattr(module, "machine_of", lambda device: seen)
        monkeypatch.setattr(torch, "_scaled_mm", stand.scaled_mm)
        monkeypatch.setattr(torch, "_scaled_mm_v2", stand.scaled_mm_v2)
        monkeypatch.setattr(trial, "_is_gpu", lambda device: True)
        ops._multiplier.cache_clear()
        return stand

    yield be
    ops._multiplier.cache_clear()


def _attach(recipe: Any, dtype: torch.dtype = torch.bfloat16, backend: str = "torch", layers: int = 2) -> None:
    model = nn.Sequential(*(nn.Linear(144, 144, dtype=dtype) for _ in range(layers)))
    fp8dist.prepare(model, recipe, backend=backend).attach(model)


@pytest.mark.parametrize(
    "recipe",
    [DelayedScaling(), CurrentScaling(), RowwiseScaling(), BlockScaling(), MXFP8Scaling()],
    ids=lambda recipe: type(recipe).__name__,
)
def test_each_distinct_product_is_tried_once(recipe: Any, machine: Any) -> None:
    counts = []
    for layers in (1, 3):
        stand = machine((10, 0) if recipe.by == "mx" else (9, 0))
        _attach(recipe, layers=layers)
        counts.append(len(stand.calls))
    # Transposed copies of 141 and of 144 tokens have rows of the same length: one wgrad less.
    assert counts[0] == counts[1] == 3 * len(trial.TOKENS) - 1
    kinds = {"tensor": {"tensor"}, "row": {"row"}, "block": {"block", "row"}, "mx": {"mx"}}
    assert set(stand.calls) == kinds[recipe.by]


def test_gathered_weights_are_tried_as_they_lie(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blackwell multiplies them without a transposition, in another layout."""
    sideways = []
    check = Stand._check

    def noted(self: Stand, kind: str, m: int, n: int, k: int, a: Tensor, b: Tensor, *rest: Any) -> None:
        sideways.append(b.is_contiguous())
        check(self, kind, m, n, k, a, b, *rest)

    monkeypatch.setattr(Stand, "_check", noted)
    for capability, expected in (((9, 0), 0), ((10, 0), len(trial.TOKENS))):
        machine(capability)
        sideways.clear()
        model = nn.Sequential(nn.Linear(144, 144, dtype=torch.bfloat16))
        manager = fp8dist.prepare(model, DelayedScaling(), backend="torch")
        manager._job.gathers = True
        trial.try_products(model, {})
        assert sum(sideways) == expected


def test_a_gemm_in_high_precision_is_not_tried(machine: Any) -> None:
    stand = machine((9, 0))
    _attach(RowwiseScaling(high_precision=("wgrad", "dgrad")))
    assert len(stand.calls) == len(trial.TOKENS)


def test_float32_models_are_tried_as_under_autocast(machine: Any) -> None:
    stand = machine((8, 9))
    _attach(RowwiseScaling(), torch.float32)
    assert set(stand.calls) == {"row", "tensor"}, "results in bf16, and in float32 by a detour"


@pytest.mark.parametrize(
    ("capability", "cuda", "reason"),
    [((10, 0), (13, 0), "not a Hopper GPU"), ((9, 0), (12, 8), "torch built with CUDA before 12.9")],
)
def test_blocks_that_torch_does_not_have(
    capability: tuple[int, int], cuda: tuple[int, int], reason: str, machine: Any
) -> None:
    machine(capability, cuda)
    text = (
        rf"^0: fprop: torch does not multiply .*\[144, 144\] x .*\[144, 144\], blockwise.*{reason}.*backend=\"triton\""
    )
    with pytest.raises(ConfigurationError, match=text):
        _attach(BlockScaling())


def test_what_nobody_foresaw_is_met_at_attach(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal of the library that the table does not know; and a wrong result, which nobody would notice."""
    stand = machine((9, 0))

    def refuse(a: Tensor, *rest: Any, **options: Any) -> Tensor:
        if a.shape[0] % 2:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED\nmore lines")
        return stand.scaled_mm(a, *rest, **options)

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    with pytest.raises(
        ConfigurationError, match=r"^0: fprop: .*\[141, 144\].*: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED: "
    ):
        _attach(CurrentScaling())
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **options: stand.scaled_mm(*args, **options) * 2)
    with pytest.raises(ConfigurationError, match=r"^0: fprop: .*its result is wrong"):
        _attach(CurrentScaling())


def test_a_refusal_in_a_step_names_module_and_gemm(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine((9, 0))
    model = nn.Sequential(nn.Linear(144, 144, dtype=torch.bfloat16))
    fp8dist.prepare(model, CurrentScaling(), backend="torch").attach(model)

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("no")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    with pytest.raises(
        ConfigurationError, match=r"^0: fprop: torch does not multiply .*\[7, 144\].*: no: use backend="
    ):
        model(torch.ones(7, 144, dtype=torch.bfloat16))


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_gpu_without_fp8(backend: str, machine: Any) -> None:
    machine((8, 0))
    with pytest.raises(
        ConfigurationError, match=r"^0: .* compute capability 8\.0, and FP8 needs 8\.9: use a newer GPU"
    ):
        _attach(CurrentScaling(), backend=backend)
    _attach(CurrentScaling(), backend="reference")


def test_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8dist_kernels.backends import why_not_triton

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    why_not_triton.cache_clear()
    try:
        with pytest.raises(ConfigurationError, match="not available on cpu: it needs a GPU, and a torch with CUDA"):
            _attach(CurrentScaling(), backend="triton")
    finally:
        why_not_triton.cache_clear()


@on_ranks(2)
def test_a_group_without_a_backend_for_the_models_device() -> None:
    group = dist.new_group(backend="cuda:gloo")
    model = nn.Sequential(nn.Linear(32, 32))
    text = "^the FP8 state is on cpu, but its group has backends for cuda only: move the model, or "
    with pytest.raises(ConfigurationError, match=text):
        fp8dist.prepare(model, group=group).attach(model)  # type: ignore[arg-type]
