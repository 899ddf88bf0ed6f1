"""Works: casts and products that are taken down and repeated bit for bit, whole or in blocks, by any program."""

from __future__ import annotations

import itertools
import json
import random
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fp8dist.checks.contents import Digester
from fp8dist.checks.work_parts import part_of_lines
from fp8dist.checks.works import digest_of, repeated, taken
from fp8dist.modules.linear_slots import SITES
from fp8dist_kernels import ops
from fp8dist_kernels.formats import Role
from tests.support.audited import RECIPES, Heard, flip

MASK = (1 << 64) - 1


class Blocks(nn.Module):
    """Linears with all that makes their calls differ: a tied weight, recomputation, a transposed gradient."""

    def __init__(self, checkpointed: bool = False, width: int = 272, hidden: int = 400) -> None:
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


def test_a_work_says_where_it_was_done() -> None:
    heard = Heard(Blocks(), limits=(1 << 26,))
    heard.step(torch.randn(48, 272))
    fqns = ("first", "second", "tied")
    ran = {f"{fqns[site // len(SITES)]} {SITES[site % len(SITES)]}" for site in heard.sites}
    kinds = [*(Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT), "fprop", "dgrad", "wgrad"]
    assert ran == {f"{fqn} {kind}" for fqn in fqns for kind in kinds}


def test_a_product_is_repeated_with_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that lies sideways may be multiplied by another kernel, which gives other bits."""
    layouts, product = [], ops._product

    def noted(a: Tensor, b: Tensor, *rest: Any, **how: Any) -> Tensor:
        layouts.append(b.stride())
        return product(a, b, *rest, **how)

    monkeypatch.setattr(ops, "_product", noted)
    digester, one = Digester(), torch.ones(())
    a, b = torch.randn(48, 272).to(torch.float8_e4m3fn), torch.randn(272, 400).to(torch.float8_e4m3fn).t()
    options = {"fast_accumulation": False, "backend": "torch"}
    for limit in (1 << 26, 1):
        for given in (b, b.contiguous()):
            layouts.clear()
            result = ops.IMPLEMENTATIONS["matmul"](a, given, one, one, torch.bfloat16, **options)
            work = taken("matmul", 0, (a, given, one, one, torch.bfloat16), options, [result], limit, 3, digester)
            assert work is not None
            assert torch.equal(digest_of(repeated(work.message), digester), work.digest)
            assert layouts == [given.stride()] * 2


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("backend", ["auto", pytest.param("torch", marks=pytest.mark.long)])
def test_what_was_taken_down_repeats(name: str, backend: str) -> None:
    """Whole and in blocks: values of all sizes, NaN, infinities, ragged batches, no tokens, recomputation,
    accumulation, autocast, several calls."""
    if backend == "torch" and name == "block":
        return  # Refused on a CPU.
    chance = random.Random(name + backend)
    # torch multiplies FP8 on a CPU value by value: less of everything.
    few = backend == "torch"
    width, hidden, steps, tokens = (144, 272, 3, [0, 1, 16, 150]) if few else (272, 400, 6, [0, 1, 16, 150, 300])
    heard = Heard(Blocks(True, width, hidden), RECIPES[name], backend=backend)
    for index in range(steps):
        batches = [torch.randn(chance.choice(tokens), width) for _ in range(2)]
        batches[0] *= 10.0 ** chance.randrange(-30, 30, 5)
        if index % 3 == 2 and batches[1].numel():
            batches[1].view(-1)[chance.randrange(batches[1].numel())] = chance.choice([torch.nan, torch.inf])
        with torch.autocast("cpu", torch.bfloat16, enabled=index % 2 == 0):
            heard.step(*batches, calls=1 + index % 2)
    assert heard.wrong == []
    assert heard.shares[True] > 16 * steps
    assert heard.shares[False] > 8 * steps


@pytest.mark.long
@pytest.mark.nightly
def test_20_000_audits_raise_no_alarm() -> None:
    """The same for some time, over all recipes."""
    done, seed = 0, 0
    while done < 20_000:
        name = list(RECIPES)[seed % len(RECIPES)]
        chance = random.Random(seed)
        torch.manual_seed(seed)
        sizes = [16 * chance.randrange(1, 20) for _ in range(3)]
        model = nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.ReLU(), nn.Linear(sizes[1], sizes[2]))
        heard = Heard(
            model.to(chance.choice([torch.float32, torch.bfloat16])), RECIPES[name], limits=(1 << 26, 1 << 14)
        )
        dtype = next(model.parameters()).dtype
        for _ in range(8):
            x = torch.randn(chance.randrange(0, 200), sizes[0], dtype=dtype) * 10.0 ** chance.randrange(-20, 20)
            if x.numel() and chance.random() < 0.3:
                x.view(-1)[chance.randrange(x.numel())] = chance.choice([torch.nan, torch.inf, -torch.inf])
            heard.step(x)
        assert heard.wrong == [], (seed, name)
        done, seed = done + len(heard.works), seed + 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.parametrize("name", ["delayed", "row", "block"])
@pytest.mark.parametrize(
    "compiler", ["aot_eager", *(pytest.param(c, marks=pytest.mark.long) for c in ("eager", "inductor"))]
)
def test_compiled_works_repeat_and_nothing_is_compiled_again(name: str, compiler: str) -> None:
    """Products, and casts that no compiler has fused, are heard. Which site is wanted changes no graph."""
    torch._dynamo.reset()
    model = Blocks()
    heard = Heard(model, RECIPES[name], limits=(1 << 26,))
    compiled = torch.compile(model, backend=compiler, fullgraph=True)
    frames = []
    for _ in range(8):
        compiled(torch.randn(48, 272)).square().mean().backward()
        heard.optimizer.step()
        heard.optimizer.zero_grad()
        frames.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    assert heard.wrong == []
    assert len({*frames[2:]}) == 1
    ran = Counter(site % len(SITES) for site in heard.sites)
    products = range(3, 6)
    assert all(ran[product] for product in products)
    assert ran[SITES.index(Role.WEIGHT)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("way", ["export", "strict export", "trace"])
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


@pytest.mark.parametrize("name", RECIPES)
def test_one_wrong_bit_of_a_part_changes_the_digest(name: str) -> None:
    heard = Heard(Blocks(), RECIPES[name], limits=(1 << 26, 1))
    heard.step(torch.randn(300, 272))
    for work in heard.works:
        results = repeated(work.message)
        for result_name, result in results.items():
            spoiled = {**results, result_name: result.clone().contiguous()}
            flip(spoiled[result_name], random.Random(result_name).randrange(result.numel()))
            assert not torch.equal(digest_of(spoiled, heard.digester), work.digest), (work.what, result_name)


def test_nans_with_other_bits_are_equal() -> None:
    digester = Digester()
    for dtype, words in ((torch.float32, (0x7FC00000, 0x7FC00001)), (torch.bfloat16, (0x7FC0, 0x7FC1))):
        integers = torch.int32 if dtype == torch.float32 else torch.int16
        one, other = (torch.tensor([word, 5], dtype=integers).view(dtype) for word in words)
        assert torch.equal(digest_of({"": one}, digester), digest_of({"": other}, digester))
    for dtype, words in ((torch.float8_e4m3fn, (0x7F, 0xFF)), (torch.float8_e5m2, (0x7D, 0xFE))):
        one, other = (torch.tensor([word, 5], dtype=torch.uint8).view(dtype) for word in words)
        assert torch.equal(digest_of({"": one}, digester), digest_of({"": other}, digester))


@pytest.mark.parametrize("limit", [1 << 19, 1 << 20])
def test_a_work_takes_the_bytes_that_it_may(limit: int) -> None:
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


@pytest.mark.parametrize("op", ["matmul", "quantize"])
def test_memory_is_that_of_the_copies(op: str) -> None:
    """Of large tensors a block is taken: what is made meanwhile does not grow with them."""
    calls: dict[str, Any] = {}
    heard = Heard(nn.Sequential(nn.Linear(1024, 2048)), limits=())
    heard.manager._job.tap.listener = lambda name, *rest: calls.setdefault(name, rest)  # type: ignore[union-attr]
    heard.step(torch.randn(4096, 1024))
    site, args, options, results = calls[op]
    digest_of({"": torch.zeros(8)}, heard.digester)  # Makes its keys.
    with Peak() as peak:
        work = taken(op, site, args, options, results, 1 << 20, 0, heard.digester)
    assert work is not None
    assert args[0].numel() * args[0].element_size() >= 4 << 20
    assert peak.most < 5 << 20  # The message, the part of the results and its copy, and what a digest works with.


# Another program ------------------------------------------------------------------------------------


def _mix(x: int) -> int:
    """The finaliser of SplitMix64."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def _digest(data: bytes, keys: list[list[int]]) -> list[int]:
    """The digest of one result with seed 0, in Python's integers, for less than 256 KiB."""
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    found = []
    for lane in range(2):
        leaf = 0
        for j, word in enumerate(words):
            z = word * 0xD6E8FEB86659FD93 & MASK
            leaf += (z ^ z >> 32) * keys[lane][j]
        found.append(_mix(_mix((leaf & MASK) ^ keys[lane][0])))
    return found


def _value(byte: int, name: str) -> float:
    """The number that a byte of OCP's FP8 formats stands for."""
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if name == "float8_e4m3fn" else (5, 2, 15)
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> mantissa_bits & (1 << exponent_bits) - 1, byte & (1 << mantissa_bits) - 1
    scale = 2.0 ** (max(exponent, 1) - bias - mantissa_bits)
    return sign * scale * (mantissa + (1 << mantissa_bits if exponent else 0))


def test_another_program_repeats_a_message_and_gets_the_digest() -> None:
    """It reads the message by its description: the length of the header, JSON, tensors at their places. Operands are
    small integers, so that all sums are exact, in any order."""
    heard = Heard(nn.Sequential(nn.Linear(64, 32, bias=False)), RECIPES["unit"], limits=(1 << 26,))
    with torch.no_grad():
        heard.model[0].weight.copy_(torch.randint(-3, 4, (32, 64)))  # type: ignore[index]
    heard.step(torch.randint(-3, 4, (16, 64)).float())
    index = heard.sites.index(SITES.index("fprop"))
    work = heard.works[index]
    data = bytes(work.message.tolist())
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    tensors = {name: (dtype, shape, data[begin:]) for name, dtype, shape, begin in header["tensors"]}
    assert (header["op"], header["dtype"], header["where"], header["sizes"]) == (
        "matmul", "float32", [0, 16, 0, 32], [16, 32],
    )  # fmt: skip
    values, scales = {}, {}
    for name in "ab":
        dtype, (rows, columns), raw = tensors[name]
        values[name] = [[_value(raw[columns * i + j], dtype) for j in range(columns)] for i in range(rows)]
        scales[name] = torch.frombuffer(bytearray(tensors[f"inv_scale_{name}"][2][:4]), dtype=torch.float32)[0]
    a, b = (torch.tensor(values[name], dtype=torch.float64) for name in "ab")
    dequantised = [(operand.float() * scales[name]).double() for name, operand in (("a", a), ("b", b))]
    product = (dequantised[0] @ dequantised[1].t()).float()
    from fp8dist_kernels.reference.digest import position_keys  # The keys are published constants.

    keys = [[int(key) & MASK for key in lane] for lane in position_keys(2 * 32768, torch.device("cpu")).view(2, -1)]
    found = _digest(product.numpy().tobytes(), keys)
    expected = [3 * half & MASK for half in found]  # One result: its digest, times 3.
    assert [int(half) & MASK for half in work.digest] == expected
