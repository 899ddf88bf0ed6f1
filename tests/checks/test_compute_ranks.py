"""check(compute=True) on real ranks: it names a device that computes otherwise, and no other."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp8dist
from fp8dist import DivergenceReport, Recipe, StateManager
from fp8dist.checks import inventory
from fp8dist.checks.computations import ComputedContent
from fp8dist.checks.contents import Digester
from fp8dist.errors import ConfigurationError, DivergenceError, ManifestMismatchError
from fp8dist_kernels import direct
from tests.checks.test_compute import RECIPES
from tests.support.answers import flipping
from tests.support.collectives import counted_collectives
from tests.support.logs import captured_log
from tests.support.meshes import Job, build
from tests.support.parallel import part_of
from tests.support.ranks import RankPool, on_ranks
from tests.support.suite import few
from tests.support.training import SmallJob, batch, state_bits, unwrapped

OUT, IN, TOKENS = 48, 32, 256
PADDED = 64  # ``OUT`` in whole blocks of MX.
CASTS = {"tensor": "quantize", "row": "quantize_rowwise", "block": "quantize_blocks", "mx": "quantize_mx"}
# The shape of the first argument, and what the name of the finding begins with.
PLACES: dict[str, tuple[tuple[int, int], str]] = {
    "input": ((TOKENS, IN), f"cast of input {TOKENS}x{IN} float32, "),
    "weight": ((OUT, IN), f"cast of weight {OUT}x{IN} float32, "),
    "grad_output": ((TOKENS, OUT), f"cast of grad_output {TOKENS}x{OUT} float32, "),
    "fprop": ((TOKENS, IN), f"fprop {TOKENS}x{OUT}x{IN} e4m3 e4m3 float32 with bias, "),
    "dgrad": ((TOKENS, OUT), f"dgrad {TOKENS}x{IN}x{OUT} "),
    "wgrad": ((OUT, TOKENS), f"wgrad {OUT}x{IN}x{TOKENS} "),
}
WIDTHS = {"input": IN, "weight": IN, "grad_output": OUT, "fprop": OUT, "dgrad": IN, "wgrad": IN}


def _attached(recipe: str = "delayed", **settings: Any) -> tuple[nn.Module, StateManager]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, OUT))
    settings = {"group": dist.group.WORLD, "backend": "auto" if recipe in ("block", "mx") else "torch", **settings}
    return model, fp8dist.prepare(model, RECIPES[recipe], **settings).attach()


def _faulty(recipe: Recipe, place: str, byte: int, bit: int, ranks: tuple[int, ...]) -> Any:
    """Flip a bit of the rows of a cast, or of a product, on these ranks."""
    shape = (TOKENS, PADDED) if recipe.by == "mx" and place == "dgrad" else PLACES[place][0]
    op = "matmul" if place in ("fprop", "dgrad", "wgrad") else CASTS[recipe.by]
    return flipping(op, shape, byte, bit) if dist.get_rank() in ranks else contextlib.nullcontext()


def _computed(manager: StateManager, **arguments: Any) -> DivergenceReport:
    return manager.check(parameters=False, compute=True, **arguments)


def _everywhere(
    recipe: str, odd: tuple[int, ...], likeness: dict[int, str] | None = None, places: Sequence[str] = (*PLACES,)
) -> list[Any]:
    """Plant a wrong bit into each computation in turn. Return (place, findings, what was skipped)."""
    _model, manager = _attached(recipe)
    found = []
    with captured_log(), _pretended(likeness):
        assert not _computed(manager).diverged
        for i, place in enumerate(places):
            with _faulty(RECIPES[recipe], place, _byte(i, place, recipe), i % 3, odd):
                report = _computed(manager, policy="warn")
            assert report.findings == () or str(report).startswith("results of equal computations differ between ranks")
            found.append((place, report.findings, report.skipped))
        assert not _computed(manager).diverged
    return found


def _byte(i: int, place: str, recipe: str) -> int:
    """Return the place of the byte: the lowest of an element."""
    if place in ("fprop", "dgrad", "wgrad"):
        return (7 + i) * 4 * WIDTHS[place] + (4 * i)
    return (7 + i) * (PADDED if recipe == "mx" and WIDTHS[place] == OUT else WIDTHS[place]) + (4 * i)


@contextlib.contextmanager
def _pretended(likeness: dict[int, str] | None) -> Iterator[None]:
    """Let the ranks take their hardware for other hardware."""
    with contextlib.ExitStack() as stack:
        if likeness is not None:
            mine = likeness[dist.get_rank()]
            stack.enter_context(mock.patch.object(inventory, "likeness", return_value=mine))
        yield


def _assert_named(
    found: list[Any], ranks: tuple[int, ...], reference: int | None, sides: Any, mx: bool = False
) -> None:
    for i, (place, findings, _) in enumerate(found):
        (finding,) = findings
        assert finding.kind == "computation"
        sizes = PLACES[place][1].replace(f"x{OUT} ", f"x{PADDED} ") if mx and place == "dgrad" else PLACES[place][1]
        assert finding.name.startswith(sizes)
        assert (finding.ranks, finding.reference_rank, finding.sides) == (ranks, reference, sides)
        product = place in ("fprop", "dgrad", "wgrad")
        assert finding.field == ("" if product else "rows")
        assert finding.index == (7 + i, i if product else 4 * i)
        bits = [int(text, 16) for text in re.findall(r"0x[0-9a-f]+", finding.detail)]
        assert bits[0] ^ bits[1] == 1 << i % 3
        if product:
            values = torch.tensor(bits, dtype=torch.int64).int().view(torch.float32)
            assert values.tolist() == [finding.value, finding.expected]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", few(["row", "block", "mx"], "mx"))
def test_of_three_ranks_the_odd_one_is_named(three_ranks: RankPool, recipe: str) -> None:
    results = three_ranks.run(_everywhere, recipe, (0,))
    for found in results:
        _assert_named(found, (0,), 1, ((1, 2), (0,)), recipe == "mx")
        assert found == results[0]
    names = " ".join(findings[0].name for _, findings, *_ in results[0])
    assert ("torch._scaled_mm" in names) == (recipe not in ("block", "mx"))


@pytest.mark.slow
@on_ranks(3)
def test_the_first_element_is_found_in_any_block() -> None:
    """A product of 512 KiB, with a wrong bit in its second block of 256 KiB, and one in the last element."""
    model = nn.Sequential(nn.Linear(256, 512))
    manager = fp8dist.prepare(model, group=dist.group.WORLD).attach()
    with contextlib.ExitStack() as stack, captured_log():
        if dist.get_rank() == 1:
            for row, column in ((300, 17), (511, 255)):
                stack.enter_context(flipping("matmul", (512, TOKENS), 4 * (256 * row + column), 0))
        report = _computed(manager, policy="warn")
    (finding,) = report.findings
    extent = "2 elements in the first of 1 differing blocks"
    assert (finding.index, finding.ulp, finding.detail.split(",")[0]) == ((300, 17), 1, extent)


@on_ranks(3)
def test_a_wrong_digest_is_told_from_a_wrong_result() -> None:
    _, manager = _attached()
    original = ComputedContent.digests

    def wrong(self: ComputedContent, digester: Digester) -> torch.Tensor:
        found = original(self, digester)
        found[3, 1] ^= dist.get_rank() == 1
        return found

    with captured_log(), mock.patch.object(ComputedContent, "digests", wrong):
        report = _computed(manager, policy="warn")
    found = [(f.name.split()[0], f.ranks, f.detail[:43]) for f in report.findings]
    assert found == [("fprop", (1,), "all elements are equal in host memory: the ")]


@pytest.mark.slow
def test_only_ranks_of_equal_hardware_are_compared(four_ranks: RankPool) -> None:
    """Ranks 0 and 2 compute otherwise. Rank 0 is of another kind, so what it computes is compared with nothing."""
    kinds, places = {0: "old", 1: "new", 2: "new", 3: "new"}, ("weight", "wgrad")
    alone = "6 computations that no other rank repeats on equal hardware, versions and shapes"
    for rank, found in enumerate(four_ranks.run(_everywhere, "row", (0, 2), kinds, places)):
        _assert_named(found, (2,), 1, ((1, 3), (2,)))
        assert [alone in skipped for *_, skipped in found] == [rank == 0] * 2


@pytest.mark.slow
@on_ranks(4)
def test_pipeline_stages_are_checked_apart() -> None:
    """Two pipeline stages: ranks 0 and 1, ranks 2 and 3."""
    torch.manual_seed(0)
    stage = dist.get_rank() // 2
    model = nn.Sequential(nn.Linear(IN, OUT) if stage == 0 else nn.Linear(OUT, 16))
    manager = fp8dist.prepare(model, group=part_of((0, 1), (2, 3))).attach()
    with captured_log(), _faulty(RECIPES["delayed"], "fprop", 0, 0, (1,)):
        report = _computed(manager, policy="warn")
    assert [(f.name.split()[0], f.ranks) for f in report.findings] == ([] if stage else [("fprop", (0, 1))])


@pytest.mark.slow
@on_ranks(3)
def test_it_costs_one_small_all_reduce() -> None:
    _, manager = _attached()
    seen = {}
    for name, kinds in (("one", None), ("two", {0: "old", 1: "new", 2: "new"})):
        with _pretended(kinds), counted_collectives() as calls:
            _computed(manager)
        seen[name] = list(zip(calls.names, calls.sizes))
    with counted_collectives() as calls:
        manager.check(parameters=False)
    seen["ordinary"] = list(zip(calls.names, calls.sizes))
    assert seen["ordinary"] == [("all_reduce", 120)]
    assert seen["one"] == [("all_reduce", 120), ("all_reduce", 72)]
    assert seen["two"] == [*seen["one"], ("all_gather_object", 0)]


@on_ranks(2)
def test_a_rank_that_does_not_ask_for_it_is_found() -> None:
    _, manager = _attached()
    with captured_log():
        report = manager.check(parameters=False, compute=dist.get_rank() == 0, policy="warn")
        with pytest.raises(ManifestMismatchError) as caught:
            manager.attach(compute=dist.get_rank() == 1)
    (finding,) = report.findings
    assert finding.kind == "layout"
    assert finding.detail == "rank 1: (); rank 0: ('computations',)"
    assert "settings.compute: None here, True there" in str(caught.value)
    # Nothing else is compared here, so one rank would go on where the other one raises.
    report = fp8dist.check(nn.Linear(8, 8), coherence=dist.get_rank() == 0, policy="warn")
    assert [f.detail for f in report.findings] == ["rank 1: (); rank 0: ('coherence',)"]


@on_ranks(2)
def test_a_device_that_cannot_compute_is_named() -> None:
    _, manager = _attached()

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal instruction was encountered")

    with captured_log(), contextlib.ExitStack() as stack:
        if dist.get_rank() == 1:
            stack.enter_context(mock.patch.object(direct, "matmul", broken))
        report = _computed(manager, policy="warn")
    assert [(f.kind, f.ranks, f.detail) for f in report.findings] == [
        ("error", (1,), "RuntimeError: CUDA error: an illegal instruction was encountered")
    ]
    assert _computed(manager).consistent


@pytest.mark.parametrize("policy", few(["raise", "warn", "repair"], "warn", "repair"))
@on_ranks(3)
def test_a_difference_at_attach_follows_the_policy(policy: Any) -> None:
    fault = _faulty(RECIPES["delayed"], "wgrad", 0, 7, (2,))
    model = nn.Sequential(nn.Linear(IN, OUT))
    manager = fp8dist.prepare(model, group=dist.group.WORLD, check_policy=policy, backend="torch")
    text = "computation 'wgrad 48x32x256 e5m2 e4m3 float32, tensorwise, torch._scaled_mm' of rank 2"
    raises = contextlib.nullcontext() if policy == "warn" else pytest.raises(DivergenceError, match=re.escape(text))
    with captured_log() as log, fault, raises:
        manager.attach(compute=True)
    assert fp8dist.describe(manager)["attached"]
    logged: list[Any] = [None] * 3
    dist.all_gather_object(logged, [" ".join(text.split()) for _, text in log])
    (said,) = (text for texts in logged for text in texts)
    no_copy = "nothing was copied: a copy does not repair a device that computes otherwise"
    assert (no_copy in said) == (policy == "repair")


@on_ranks(2)
def test_models_with_little_to_compute() -> None:
    """Attach without anything to compare with, and as each rank's own state."""
    plain, own, bare = nn.Sequential(nn.Linear(IN, OUT)), nn.Sequential(nn.Linear(IN, OUT)), nn.Module()
    switched_off = fp8dist.prepare(plain, group=dist.group.WORLD, enabled=False)
    unsynced = fp8dist.prepare(own, group=dist.group.WORLD, amax_sync=False)
    slots_only = fp8dist.prepare(bare, group=dist.group.WORLD)
    slots_only.register("a", "input", "e4m3")
    pair = nn.Sequential(nn.Linear(IN, OUT), nn.Linear(OUT, 16))
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    grouped = fp8dist.prepare(pair, group=dist.group.WORLD, groups={"1": alone})
    counts = []
    with captured_log() as log:
        for manager in (switched_off, unsynced, slots_only, grouped):
            manager.attach(compute=True)
        for manager in (switched_off, unsynced, slots_only, grouped):
            counts.append(manager.check(parameters=False, compute=True).compared.get("computation", 0))
    with pytest.raises(ConfigurationError, match="compute must be"):
        grouped.attach(compute=1)  # type: ignore[arg-type]
    assert (counts, len(log)) == ([0, 6, 0, 12], 0)


def _evidence(folder: str) -> None:
    with mock.patch.dict("os.environ", FP8DIST_REPORT_DIR=folder):
        _, manager = _attached("row")
    with captured_log(), _faulty(RECIPES["row"], "grad_output", 3 * OUT + 5, 0, (1,)):
        _computed(manager, policy="warn")


def test_evidence_has_the_elements_around_the_first_difference(three_ranks: RankPool, tmp_path: Path) -> None:
    three_ranks.run(_evidence, str(tmp_path))
    files = {path.name: path for path in tmp_path.iterdir()}
    assert set(files) == {f"step00000000-{name}" for name in ("rank0.json", "rank1.json", "report.json", "report.txt")}
    (good,), (bad,) = (json.loads(files[f"step00000000-rank{rank}.json"].read_text()) for rank in (0, 1))
    for one in (good, bad):
        assert one["kind"] == "computation"
        assert [(field["field"], field["from"], len(field["values"])) for field in one["fields"]] == [
            ("rows", 3 * OUT + 5 - 16, 33)
        ]
    differs = [a != b for a, b in zip(good["fields"][0]["values"], bad["fields"][0]["values"])]
    assert [i for i, different in enumerate(differs) if different] == [16]
    report = json.loads(files["step00000000-report.json"].read_text())
    assert report["findings"][0]["index"] == [3, 5]


@pytest.mark.slow
@on_ranks(4)
def test_sharded_models_compute_alike() -> None:
    """Under tensor parallelism both Linears are 32 x 32. One has its bias added after the sum over ranks."""
    report = build(Job("tp")).manager.check(compute=True)
    assert dict(report.compared)["computation"] == 7
    assert not any("computation" in text for text in report.skipped)


def _trained(checked: bool, recipe: str, update: Any) -> Any:
    made = fp8dist.DelayedScaling(history_len=4, update=update) if recipe == "delayed" else RECIPES[recipe]
    job = SmallJob(made, wrap=unwrapped, optimizer=torch.optim.AdamW, attach={"compute": checked})
    torch.manual_seed(5)
    losses = []
    for step in range(4):
        x, y = batch(0, step)
        for part in range(2):
            loss = (job.net(torch.nn.functional.dropout(x, 0.1)) - y).square().mean()
            loss.backward()
            losses.append(loss.item().hex())
            if checked and part == 0:  # In the middle of an accumulation, with amaxes recorded and casts cached.
                _computed(job.manager)
        job.optimizer.step()
        job.optimizer.zero_grad()
    return losses, state_bits(job.manager), torch.get_rng_state().tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "update"), few([("delayed", "next_step"), ("block", "")], ("delayed", "next_step")))
def test_training_is_the_same_bit_for_bit(two_ranks: RankPool, recipe: str, update: str) -> None:
    assert two_ranks.run(_trained, True, recipe, update) == two_ranks.run(_trained, False, recipe, update)
