"""Works of experts: grouped casts and products that are recorded, whole or in parts, and repeated bit for bit."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fp8dist
from fp8dist.checks.contents import Digester
from fp8dist.checks.works import Work, describe_work, digest_of, part_of_call, repeat_work, work_of_call
from fp8dist.modules.linear_slots import SITES
from fp8dist_kernels import grouped_ops
from fp8dist_kernels.formats import Role
from tests.support.audited import RECIPES, Heard, flip
from tests.support.experts import Experts, Mixture, routes, rows

LAYOUTS: dict[str, dict[str, Any]] = {
    "gated": {"hidden": 272, "inner": 144},
    "gpt-oss": {"hidden": 144, "inner": 160, "bias": True, "transposed": True, "interleaved": True},
}


class Routed(Mixture):
    """A mixture whose routes are an attribute."""

    index: Tensor
    weights: Tensor

    def route(self, tokens: int, among: Sequence[int], seed: int) -> None:
        """Choose the routes of the next forwards."""
        self.index, self.weights = routes(tokens, min(2, len(among)), among, seed)

    def forward(self, x: Tensor, *_: Any) -> Tensor:  # type: ignore[override]
        """Return the experts' outputs."""
        return super().forward(x, self.index, self.weights)


def _stepped(heard: Heard, tokens: int, among: Sequence[int], seed: int, scale: float = 1.0) -> None:
    model: Any = heard.model
    model.route(tokens, among, seed)
    hidden = model.experts.down_proj.shape[2 if model.experts.is_transposed else 1]
    heard.step(rows(tokens, hidden, seed).requires_grad_() * scale)


def test_a_work_says_where_it_was_done() -> None:
    heard = Heard(Routed(Experts()), limits=(1 << 26,))
    _stepped(heard, 48, range(4), 0)
    fqns = ("experts.down", "experts.gate_up")
    ran = {(fqns[site // len(SITES)], SITES[site % len(SITES)]) for site in heard.sites}
    assert ran == {(fqn, work) for fqn in fqns for work in (*Role, "fprop", "dgrad", "wgrad")}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", RECIPES)
def test_what_was_recorded_repeats(name: str, layout: str) -> None:
    """Whole and in parts: experts without tokens, with one, with all; values of all sizes, NaN, no tokens at all."""
    chance = random.Random(name)
    heard = Heard(Routed(Experts(**LAYOUTS[layout])), RECIPES[name])
    for seed in range(8):
        among = ((0, 1, 2, 3), (1, 3), (2,), (0, 1))[seed % 4]
        scale = 10.0 ** chance.randrange(-12, 12, 4)
        _stepped(heard, chance.choice([0, 1, 70, 200, 300]), among, seed, torch.nan if seed == 5 else scale)
    assert heard.wrong == []
    assert heard.shares[True] > 100
    assert heard.shares[False] > 50


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delayed", "row", "block"])
def test_what_triton_computes_repeats(name: str) -> None:
    heard = Heard(Routed(Experts(hidden=32, inner=80, bias=True)), RECIPES[name], limits=(1,), backend="triton")
    _stepped(heard, 12, (0, 1, 3), 0)
    assert heard.wrong == []
    assert heard.shares[True] >= 4  # The products of one expert.


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded of a product, or of rows that are cast with known scales, never comes to the host."""
    heard = Heard(Routed(Experts(hidden=272, inner=144)), limits=())
    calls: list[tuple[Any, ...]] = []
    tap = heard.manager._job.tap
    assert tap is not None
    _stepped(heard, 300, range(4), 0)  # Then scales are known.
    tap.listener = lambda *call: calls.append(call)  # type: ignore[attr-defined]
    _stepped(heard, 300, range(4), 1)
    watched = [call for call in calls if SITES[call[1] % len(SITES)] is not Role.WEIGHT]
    for name in ("item", "tolist", "nonzero", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy"):
        monkeypatch.setattr(Tensor, name, mock.Mock(side_effect=AssertionError(name)))
    with _NoReads():
        for op, _, args, options, results in watched:
            for limit in (1 << 26, 1):
                part_of_call(op, args, options, results, limit, 3)
    assert {op for op, *_ in watched} == {"quantize_grouped", "matmul_grouped", "matmul_grouped_columns"}


class _NoReads(TorchDispatchMode):
    """Fails if an operation needs the values of a tensor on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(part in str(func) for part in ("_local_scalar_dense", "nonzero", "aten.equal"))
        assert (kwargs or {}).get("device") is None or func is not torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", RECIPES)
def test_one_wrong_bit_of_a_part_changes_the_digest(name: str) -> None:
    heard = Heard(Routed(Experts(hidden=272, inner=144)), RECIPES[name], limits=(1 << 26, 1))
    _stepped(heard, 300, range(4), 0)
    for work in heard.works:
        results = repeat_work(work.message)
        for result_name, result in results.items():
            spoiled = {**results, result_name: result.clone().contiguous()}
            flip(spoiled[result_name], random.Random(result_name).randrange(result.numel()))
            assert not torch.equal(digest_of(spoiled, heard.digester), work.digest), (work.what, result_name)


def _product(counts: Sequence[int], tail: int = 0, k: int = 256, n: int = 256) -> tuple[Any, ...]:
    """Return what the tap hears of a grouped product."""
    torch.manual_seed(0)
    offsets = torch.tensor(counts).cumsum(0).int()
    a = torch.randn(sum(counts) + tail, k).to(torch.float8_e4m3fn)
    b = torch.randn(len(counts), n, k).to(torch.float8_e4m3fn)
    scales = torch.rand(len(counts)) + 0.5, torch.rand(len(counts)) + 0.5
    args = a, b, *scales, offsets, torch.float32
    options = {"fast_accumulation": False, "bias": None, "backend": "reference"}
    return args, options, grouped_ops.matmul_grouped(*args, **options)


def test_parts_of_a_product_reach_every_row_of_experts_with_rows() -> None:
    """A wrong element is found by some audits, which name its expert. Rows of nobody are not looked at."""
    counts, digester = (130, 0, 7, 400, 0), Digester()
    args, options, product = _product(counts, tail=60)

    def work_of(results: Tensor, at: int) -> Work:
        work = work_of_call("matmul_grouped", 0, args, options, (results,), 1, at, digester)
        assert work is not None
        return work

    sound = [work_of(product, at) for at in range(60)]
    experts = [describe_work(work).rpartition(", expert ")[2] for work in sound]
    assert Counter(experts).most_common() == sorted(Counter(experts).items(), key=lambda each: -counts[int(each[0])])
    assert {*experts} == {"0", "2", "3"}
    for row, of in ((0, "0"), (129, "0"), (130, "2"), (136, "2"), (137, "3"), (536, "3"), (537, None)):
        wrong = product.clone()
        flip(wrong[row], 200)
        works = [work_of(wrong, at) for at in range(len(sound))]
        found = {expert for expert, one, other in zip(experts, works, sound) if not one.digest.equal(other.digest)}
        assert found == ({of} if of else set()), row


def test_an_expert_without_rows_is_not_chosen() -> None:
    args, options, product = _product([0, 1, 0, 1])
    works = [work_of_call("matmul_grouped", 0, args, options, (product,), 1, at, Digester()) for at in range(8)]
    assert {describe_work(work).rpartition(" ")[2] for work in works if work is not None} == {"1", "3"}


@pytest.mark.slow
def test_products_with_offsets_that_kernels_cut_repeat() -> None:
    """Decreasing, and beyond the 140 rows: the experts have 130, no, and 10 of them."""
    args, _, _ = _product([130, 0, 10], k=16, n=144)
    args = *args[:4], torch.tensor([130, 20, 900], dtype=torch.int32), args[5]
    options = {"fast_accumulation": False, "bias": None, "backend": "triton"}
    product, experts = grouped_ops.matmul_grouped(*args, **options), set()
    for at in range(8):
        work = work_of_call("matmul_grouped", 0, args, options, (product,), 1, at, Digester())
        assert work is not None
        assert torch.equal(digest_of(repeat_work(work.message), Digester()), work.digest)
        experts.add(describe_work(work).rpartition(" ")[2])
    assert experts <= {"0", "2"}


def test_cold_experts_without_rows_repeat() -> None:
    heard = Heard(Routed(Experts()), fp8dist.DelayedScaling(), limits=(1 << 26,))
    _stepped(heard, 20, (1, 3), 0)
    assert heard.wrong == []


def test_a_part_takes_the_bytes_that_it_may() -> None:
    """Of 64 experts with large weights, whichever the rows choose."""
    args, options, product = _product([32] * 64, k=512, n=1024)
    limit = 1 << 18
    assert args[1].numel() > 100 * limit
    for at in range(4):
        work = work_of_call("matmul_grouped", 0, args, options, (product,), limit, at, Digester())
        assert work is not None
        assert limit // 2 < len(work.message) <= limit + 4096
        assert torch.equal(digest_of(repeat_work(work.message), Digester()), work.digest)
