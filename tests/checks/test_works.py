"""Works: casts and products, of experts too, that are recorded and repeated bit for bit, whole or in parts."""

from __future__ import annotations

import itertools
import random
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fp8dist
from fp8dist.checks.contents import Digester
from fp8dist.checks.works import Work, describe_work, digest_of, part_of_call, part_of_lines, repeat_work, work_of_call
from fp8dist.modules.casters import SITES
from fp8dist_kernels import grouped_ops, ops
from fp8dist_kernels.formats import Role
from tests.support.audited import RECIPES, Heard, flip
from tests.support.experts import Experts, Mixture, routes, rows
from tests.support.suite import few

WIDTH = 144
LAYOUTS: dict[str, dict[str, Any]] = {
    "gated": {"hidden": 144, "inner": 80},
    "gpt-oss": {"hidden": 144, "inner": 80, "bias": True, "transposed": True, "interleaved": True},
}
"""Of experts. All widths are such that a product is cut: a block has 128 lines."""


class Blocks(nn.Module):
    """Linears with all that makes their calls differ: a tied weight, recomputation, a transposed gradient."""

    def __init__(self, checkpointed: bool = False, width: int = WIDTH, hidden: int = 160) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, width, bias=False)
        self.tied = nn.Linear(width, hidden)
        self.tied.weight = self.first.weight
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        if self.checkpointed:
            y: Tensor = checkpoint(self.second, h, use_reentrant=False)
        else:
            y = self.second(h)
        return self.tied(y) + self.first(y.t().contiguous().t())


def _assert_all_ran(heard: Heard, *fqns: str) -> None:
    """A work says where it was done."""
    ran = {f"{fqns[site // len(SITES)]} {SITES[site % len(SITES)]}" for site in heard.sites}
    assert ran == {f"{fqn} {kind}" for fqn in fqns for kind in (*Role, "fprop", "dgrad", "wgrad")}


@pytest.mark.slow
def test_a_product_is_repeated_with_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that lies sideways may be multiplied by another kernel, which gives other bits."""
    layouts, product = [], ops._product

    def noted(a: Tensor, b: Tensor, *rest: Any, **how: Any) -> Tensor:
        layouts.append(b.stride())
        return product(a, b, *rest, **how)

    monkeypatch.setattr(ops, "_product", noted)
    digester, one = Digester(), torch.ones(())
    a, b = torch.randn(48, 144).to(torch.float8_e4m3fn), torch.randn(144, 272).to(torch.float8_e4m3fn).t()
    options = {"fast_accumulation": False, "backend": "torch"}
    for limit in (1 << 26, 1):
        for given in (b, b.contiguous()):
            layouts.clear()
            result = ops.IMPLEMENTATIONS["matmul"](a, given, one, one, torch.bfloat16, **options)
            work = work_of_call(
                "matmul", 0, (a, given, one, one, torch.bfloat16), options, [result], limit, 3, digester
            )
            assert work is not None
            assert torch.equal(digest_of(repeat_work(work.message), digester), work.digest)
            assert layouts == [given.stride()] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    few(
        [*((name, "auto") for name in (*RECIPES, "mx", "nvfp4")), ("row", "torch")],
        *[(name, "auto") for name in ("delayed", "block", "nvfp4")],
    ),
)
def test_what_was_recorded_repeats(name: str, backend: str) -> None:
    """Whole and in blocks: values of all sizes, NaN, infinities, ragged batches, no tokens, recomputation,
    accumulation, autocast, several calls. Each bit of a result counts."""
    chance = random.Random(name + backend)
    more = {"mx": fp8dist.MXFP8Scaling(scale_rounding="up"), "nvfp4": fp8dist.NVFP4Scaling()}
    recipe = more.get(name) or RECIPES[name]
    heard = Heard(Blocks(True), recipe, backend=backend)
    heard.step(torch.randn(150, WIDTH))
    heard.spoils = False
    for index, (several, odd) in enumerate((((16, 0), None), ((1, 150), torch.nan), ((150, 16), torch.inf))):
        batches = [torch.randn(tokens, WIDTH) for tokens in several]
        batches[0] *= 10.0 ** chance.randrange(-30, 30, 5)
        if odd is not None:
            batches[1].view(-1)[chance.randrange(batches[1].numel())] = odd
        with torch.autocast("cpu", torch.bfloat16, enabled=index % 2 == 0):
            heard.step(*batches, calls=1 + index % 2)
    assert heard.wrong == []
    assert heard.shares[True] > 48
    assert heard.shares[False] > 24
    _assert_all_ran(heard, "first", "second", "tied")


class Mixed(nn.Module):
    """Three Linears, and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.delayed, self.row, self.block = (nn.Linear(32, 32) for _ in range(3))
        self.experts = Experts()

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = self.experts(self.block(self.row(self.delayed(x))), index, weights)
        return out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.long
@pytest.mark.parametrize(
    ("compiler", "experts"), few([("aot_eager", "delayed"), ("inductor", "block")], ("aot_eager", "delayed"))
)
def test_compiled_works_repeat_and_nothing_is_compiled_again(compiler: str, experts: str) -> None:
    """Products, and casts that no compiler has fused, are heard. Which site is wanted changes no graph."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Mixed()
    overrides = {"delayed": RECIPES["delayed"], "row": RECIPES["row"], "block": RECIPES["block"]}
    heard = Heard(model, RECIPES[experts], limits=(1 << 26, 1), overrides=overrides)
    compiled = torch.compile(model, backend=compiler, fullgraph=True)
    frames = []
    for index in range(8):
        among = (0, 1, 2, 3) if index % 2 else (1, 3)
        compiled(rows(12, 32, index).requires_grad_(), *routes(12, 2, among, index)).square().mean().backward()
        heard.optimizer.step()
        heard.optimizer.zero_grad()
        frames.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    assert heard.wrong == []
    assert len({*frames[2:]}) == 1
    casts = {"delayed": "quantize_grouped", "block": "quantize_blocks"}
    products = {"matmul", "matmul_grouped", "matmul_grouped_columns"}
    assert heard.ops >= {"quantize", "quantize_rowwise", "quantize_blocks", casts[experts], *products}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("way", few(["export", "strict export", "trace"], "export", "trace"))
def test_what_is_exported_has_no_listener(way: str) -> None:
    model = nn.Sequential(nn.Linear(32, 16))
    heard = Heard(model)
    x = torch.randn(8, 32)
    heard.step(x)
    model.eval()
    with torch.no_grad():
        expected = model(x)
        before = len(heard.sites)
        copy = (
            torch.jit.trace(model, x)  # type: ignore[no-untyped-call]
            if way == "trace"
            else torch.export.export(model, (x,), strict=way == "strict export").module()
        )
        assert torch.equal(copy(x), expected)
        if way != "trace":  # A trace is checked against the model, which is heard.
            assert len(heard.sites) == before


def test_nans_with_other_bits_are_equal() -> None:
    digester = Digester()
    for dtype, words in ((torch.float32, (0x7FC00000, 0x7FC00001)), (torch.bfloat16, (0x7FC0, 0x7FC1))):
        integers = torch.int32 if dtype == torch.float32 else torch.int16
        one, other = (torch.tensor([word, 5], dtype=integers).view(dtype) for word in words)
        assert torch.equal(digest_of({"": one}, digester), digest_of({"": other}, digester))
    for dtype, words in ((torch.float8_e4m3fn, (0x7F, 0xFF)), (torch.float8_e5m2, (0x7D, 0xFE))):
        one, other = (torch.tensor([word, 5], dtype=torch.uint8).view(dtype) for word in words)
        assert torch.equal(digest_of({"": one}, digester), digest_of({"": other}, digester))


def test_a_work_takes_the_bytes_that_it_may() -> None:
    limit = 1 << 19
    heard = Heard(nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 256)), limits=(limit,))
    heard.step(torch.randn(1024, 256))
    assert max(work.message.numel() for work in heard.works) <= limit + 4096  # Scales and the header come on top.
    assert {work.share < 1 for work in heard.works} == {True, False}


@pytest.mark.parametrize("stride", [1, 18, 1024])
def test_audits_reach_every_block(stride: int) -> None:
    """Whatever the number of steps between the audits of a site: each pair of rows and columns."""
    places = [part_of_lines(512, 512, 256, stride * index) for index in range(200)]
    firsts = range(0, 512, 128)
    assert {(rows[0], columns[0]) for rows, columns in places} == {*itertools.product(firsts, firsts)}


class Peak(TorchDispatchMode):
    """Counts the bytes of living tensors that operations have made."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {given.untyped_storage().data_ptr() for given in pytree.tree_leaves(args) if isinstance(given, Tensor)}
        for made in pytree.tree_leaves(result):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in known:
                size = made.untyped_storage().nbytes()
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(made, self._freed, size)
        return result

    def _freed(self, size: int) -> None:
        self.now -= size


@pytest.mark.slow
@pytest.mark.parametrize("op", ["matmul", "quantize"])
def test_memory_is_that_of_the_copies(op: str) -> None:
    """Of large tensors a block is recorded: temporary tensors do not grow with them."""
    calls: dict[str, Any] = {}
    heard = Heard(nn.Sequential(nn.Linear(1024, 1024)), limits=())
    heard.manager._job.tap.listener = lambda name, *rest: calls.setdefault(name, rest)  # type: ignore[union-attr]
    heard.step(torch.randn(4096, 1024))
    site, args, options, results = calls[op]
    digest_of({"": torch.zeros(8)}, heard.digester)  # Makes its keys.
    with Peak() as peak:
        work = work_of_call(op, site, args, options, results, 1 << 20, 0, heard.digester)
    assert work is not None
    assert args[0].numel() * args[0].element_size() >= 4 << 20
    assert peak.most < 5 << 20  # The message, the part of the results and its copy, and what a digest works with.


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    few(
        [("delayed", "gated"), ("current", "gpt-oss"), ("row", "gpt-oss"), ("block", "gated"), ("mx", "gpt-oss")],
        *[("delayed", "gated"), ("row", "gpt-oss"), ("block", "gated"), ("mx", "gpt-oss")],
    ),
)
def test_what_was_recorded_of_experts_repeats(name: str, layout: str) -> None:
    """Whole and in parts: experts without tokens (cold ones too), with one, with all; values of all sizes, NaN, no
    tokens at all."""
    chance = random.Random(name)
    recipe = fp8dist.MXFP8Scaling() if name == "mx" else RECIPES[name]
    heard = Heard(Routed(Experts(**LAYOUTS[layout])), recipe)
    steps = ((20, (1, 3)), (200, (0, 1, 2, 3)), (0, (1, 3)), (150, (2,)), (1, (0, 1)))
    for seed, (tokens, among) in enumerate(steps):
        scale = 10.0 ** chance.randrange(-12, 12, 4) if seed > 1 else 1.0
        _stepped(heard, tokens, among, seed, torch.nan if seed == 3 else scale)
        heard.spoils = seed == 0
    assert heard.wrong == []
    assert heard.shares[True] > 60
    assert heard.shares[False] > 30
    _assert_all_ran(heard, "experts.down", "experts.gate_up")


@pytest.mark.slow
def test_what_triton_computes_repeats() -> None:
    model = Routed(Experts(experts=2, hidden=32, inner=80, bias=True))
    heard = Heard(model, RECIPES["row"], limits=(1,), backend="triton")
    heard.spoils = False
    _stepped(heard, 6, (0,), 0)
    assert heard.wrong == []
    assert heard.shares[True] >= 4  # The products of one expert.


def test_nothing_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded of a product, or of rows that are cast with known scales, never comes to the host."""
    heard = Heard(Routed(Experts(**LAYOUTS["gated"])), limits=())
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


@pytest.mark.slow
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


def test_a_part_of_many_experts_takes_the_bytes_that_it_may() -> None:
    """Of 64 experts with large weights, whichever the rows choose."""
    args, options, product = _product([16] * 64, k=256, n=512)
    limit = 1 << 17
    assert args[1].numel() > 60 * limit
    for at in range(2):
        work = work_of_call("matmul_grouped", 0, args, options, (product,), limit, at, Digester())
        assert work is not None
        assert limit // 2 < len(work.message) <= limit + 4096
        assert torch.equal(digest_of(repeat_work(work.message), Digester()), work.digest)
