"""The benchmark's own logic: timing, checks before timing, time limits, and records of failures."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import random
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fp8dist
import scripts.benchmarks.gpu.stopwatch
from fp8dist import BlockScaling, CurrentScaling
from fp8dist_kernels import GEMMS, direct
from fp8dist_kernels.reference.matmuls import FLOAT32_SCALINGS, Scaling, scaling_of
from scripts.benchmarks.gpu import environment, jobs, linears, matmuls, memory, results, sustained
from scripts.benchmarks.gpu.kernels import LIKE_THE_LAST, run_part
from scripts.benchmarks.gpu.lab import Case, Lab, geomean, poison, same_bits
from scripts.benchmarks.gpu.matmuls import AUTO, TRITON, Matmuls, Operands
from scripts.benchmarks.gpu.memory import Memory
from scripts.benchmarks.gpu.stopwatch import (
    FEWEST,
    MOST,
    NARROW,
    Comparison,
    Ratio,
    Stopwatch,
    Timing,
    compare,
    compare_in_a_row,
    interval_of_median,
    issue_time,
    stopwatch_of,
)
from scripts.benchmarks.llama_shapes import KINDS, LINEARS, RECIPES, Layer, Product, fast_everywhere, products_of
from tests.support.graphs import EmulatedGraph
from tests.support.suite import few


class FakeClock:
    """A clock that only advances when an action runs."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def taking(self, *seconds: float) -> Callable[[], None]:
        """Return an action that takes these durations in turn."""
        durations = itertools.cycle(seconds)

        def action() -> None:
            self.seconds += next(durations)

        return action


def test_timing_is_a_median_with_its_spread() -> None:
    timing = Timing.of([5.0, 1.0, 2.0, 3.0, 100.0, 4.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    assert timing == Timing(median=6.0, low=2.0, high=10.0, count=11)
    assert Timing.of([3.0]) == Timing(3.0, 3.0, 3.0, 1)


def test_actions_take_turns_in_being_first() -> None:
    clock, order = FakeClock(), []
    stopwatch = Stopwatch(clock)
    actions = [lambda name=name: order.append(name) for name in "abc"]
    times = stopwatch.rounds(actions, 3)
    assert "".join(order) == "abc" + "bca" + "cab"
    assert [len(one) for one in times] == [3, 3, 3]


def test_what_is_done_before_each_action_is_not_timed() -> None:
    clock = FakeClock()
    stopwatch = Stopwatch(clock)
    actions = {"slow": clock.taking(0.02), "fast": clock.taking(0.01)}
    assert stopwatch.rounds(list(actions.values()), 2, before=clock.taking(1.0))[0] == pytest.approx([2e4] * 2)
    assert clock.seconds == pytest.approx(4.06)
    assert compare(stopwatch, actions, 0.0, before=clock.taking(1.0)).ratio("slow", "fast").ratio == pytest.approx(2)


def test_compare_fits_into_the_time_it_has() -> None:
    clock = FakeClock()
    stopwatch = Stopwatch(clock)
    actions = {"slow": clock.taking(0.02, 0.024), "fast": clock.taking(0.01)}
    comparison = compare(stopwatch, actions, seconds=0.61)
    assert 15 <= len(comparison.samples["slow"]) <= 20
    assert comparison.ratio("slow", "fast").ratio == pytest.approx(2.2)
    assert comparison.timings()["slow"]["median_us"] == pytest.approx(2.2e4)
    assert len(compare(stopwatch, actions, seconds=0.0).samples["slow"]) == FEWEST
    assert len(compare(stopwatch, actions, seconds=1e3).samples["slow"]) == MOST
    in_a_row = compare_in_a_row(stopwatch, actions, 0.0, repeats=2)
    assert in_a_row.timings()["fast"]["median_us"] == pytest.approx(5e3)


def test_time_is_spent_where_a_ratio_is_not_known_well() -> None:
    clock = FakeClock()
    stopwatch = Stopwatch(clock)
    noise = random.Random(0)
    counts = []
    for spread in (0.0, 0.02, 0.2):
        durations = [0.01 * (1 + spread * noise.uniform(-1, 1)) for _ in range(MOST)]
        comparison = compare(stopwatch, {"noisy": clock.taking(*durations), "plain": clock.taking(0.02)}, seconds=1e3)
        counts.append(len(comparison.samples["noisy"]))
        _, low, high = comparison.ratio("plain", "noisy")
        assert high <= NARROW * low or counts[-1] == MOST
    assert counts[0] == FEWEST < counts[1] < counts[2] == MOST


@pytest.mark.parametrize("count", [5, 6, 9, 15, 16, 40])
def test_the_interval_of_a_median_holds_it_in_95_of_100_cases(count: int) -> None:
    """The true median lies above each sample with the chance of a coin: count all outcomes of the coins."""
    low, high = interval_of_median(list(range(count)))
    chance = {below: math.comb(count, below) / 2**count for below in range(count + 1)}
    if count == 5:
        assert (low, high) == (0.0, math.inf), "all 5 samples are on one side too often"
        return

    def coverage(first: int) -> float:
        # The first-th and the last but first-th sample hold the median if at least ``first`` are on either side.
        return sum(chance[below] for below in range(first, count - first + 1))

    first = int(low) + 1
    assert high == count - first
    assert coverage(first) >= 0.95 > coverage(first + 1), "none is narrower"


def test_intervals_hold_the_truth_also_with_the_stopping_rule() -> None:
    noise, holds = random.Random(1), {"ratio": 0, "mean": 0}
    clock = FakeClock()

    class Noisy(Stopwatch):
        def rounds(self, actions: Sequence[Any], count: int, *_: Any) -> list[list[float]]:
            clock.seconds += 1e-3 * count
            return [[action() * noise.lognormvariate(0, 0.006) for _ in range(count)] for action in actions]

    for _ in range(400):
        actions = {"ours": lambda: 1.0, "theirs": lambda: 1.02}
        ratios = [compare(Noisy(clock), actions, seconds=10.0).ratio("theirs", "ours") for _ in range(3)]
        holds["ratio"] += sum(low <= 1.02 <= high for _, low, high in ratios)
        _, low, high = geomean(ratios)
        holds["mean"] += low <= 1.02 <= high
    # 1200 and 400 trials of a chance of 0.95: 3 standard errors are 0.02 and 0.03.
    assert holds["ratio"] / 1200 >= 0.93
    assert holds["mean"] / 400 >= 0.92


def test_a_ratio_is_of_rounds_so_a_drifting_clock_does_not_matter() -> None:
    drift = [1.0, 1.1, 1.3, 1.7, 2.5]
    comparison = Comparison({"a": [3 * d for d in drift], "b": [2 * d for d in drift]})
    assert comparison.ratio("a", "b").ratio == pytest.approx(1.5)


class FakeEvent:
    """Stands in for a CUDA event on the fake clock."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.at = math.nan

    def record(self) -> None:
        self.at = self.clock.seconds

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1e3 * (end.at - self.at)


class FakeCuda:
    """The parts of torch.cuda that ``CudaStopwatch`` uses, on a fake clock and with CPU buffers."""

    def __init__(self, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        properties = SimpleNamespace(
            name="Fake", major=9, minor=0, total_memory=1 << 30, multi_processor_count=4, clock_rate=2_000_000
        )
        stream = SimpleNamespace(wait_stream=lambda other: self.done.append("wait"))
        for name, value in {
            "synchronize": lambda device=None: None,
            "Event": lambda enable_timing: FakeEvent(clock),
            "_sleep": lambda cycles: self.done.append(f"sleep {cycles}"),
            "Stream": lambda device=None: stream,
            "current_stream": lambda device=None: stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: self.done.append("replay")),
            "graph": lambda graph: contextlib.nullcontext(),
            "get_device_properties": lambda device: properties,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        written = SimpleNamespace(zero_=lambda: self.done.append("write"))
        clean = SimpleNamespace(amax=lambda: self.done.append("read"))
        monkeypatch.setattr(torch, "empty", lambda *_, **__: written)
        monkeypatch.setattr(torch, "zeros", lambda *_, **__: clean)


def test_the_gpu_stopwatch_times_what_is_between_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    cuda = FakeCuda(clock, monkeypatch)
    stopwatch = stopwatch_of(torch.device("cuda", 0))
    slow, fast = clock.taking(0.02), clock.taking(0.01)
    times = stopwatch.rounds([slow, fast], 3, head_start=5.0)
    assert times[0] == pytest.approx([2e4] * 3)
    assert times[1] == pytest.approx([1e4] * 3)
    assert cuda.done == ["sleep 10000", "write", "read"] * 6
    cuda.done.clear()
    stopwatch.rounds([slow], 1, head_start=1e9)
    assert cuda.done[0] == "sleep 4000000"
    cuda.done.clear()
    log = cuda.done.append
    stopwatch.rounds([lambda: log("action")], 2, before=lambda: log("before"))
    assert cuda.done == ["before", "write", "read", "action"] * 2, "no written line is left to be timed"
    cuda.done.clear()
    stopwatch.replay(lambda: cuda.done.append("run"), 4)()
    assert cuda.done == ["wait", *["run"] * 3, "wait", *["run"] * 4, "replay"]
    monkeypatch.setattr(scripts.benchmarks.gpu.stopwatch, "time", SimpleNamespace(perf_counter=clock))
    assert stopwatch.now() == 1e6 * clock.seconds
    assert issue_time(stopwatch, slow) == pytest.approx(2e4)
    timing = compare_in_a_row(stopwatch, {"": slow}, 0.0, 1).timings()[""]
    assert (timing["median_us"], timing["count"]) == (pytest.approx(2e4), FEWEST)


def test_the_facts_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(FakeClock(), monkeypatch)
    monkeypatch.setattr(environment.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="580.1\n"))
    facts = environment.facts(torch.device("cuda", 0))
    assert facts["device"] == {
        "name": "Fake",
        "capability": [9, 0],
        "driver": "580.1",
        "memory_gib": 1.0,
        "processors": 4,
    }
    assert facts["versions"]["torch"] == torch.__version__


def test_geomean() -> None:
    mean = geomean([Ratio(0.5, 0.4, 0.6), Ratio(2.0, 2.0, 2.0), Ratio(8.0, 4.0, 16.0)])
    assert mean.ratio == pytest.approx(2.0)
    assert mean.low == pytest.approx(2.0 / math.exp(math.sqrt(math.log(1.25) ** 2 + math.log(2.0) ** 2) / 3))
    assert mean.high == pytest.approx(2.0 * math.exp(math.sqrt(math.log(1.2) ** 2 + math.log(2.0) ** 2) / 3))
    same = Ratio(1.1, 1.0, 1.2)
    assert geomean([same]) == pytest.approx(same)


def test_same_bits() -> None:
    x = torch.tensor([[0.0, float("nan")], [1.0, 2.0]])
    assert same_bits(x, x.clone())
    assert same_bits(x[0, 0], torch.tensor(0.0))
    assert not same_bits(x, x * torch.tensor([[-1.0, 1.0], [1.0, 1.0]])), "-0.0 is not 0.0"
    assert not same_bits(x, x.double())
    assert not same_bits(x, x[:1])
    codes = torch.tensor([0x7F, 0xFF, 0x01], dtype=torch.uint8).view(torch.float8_e4m3fn)
    other = torch.tensor([0xFF, 0x7F, 0x01], dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert same_bits(codes, other), "both are NaN"


class FakePart:
    """A benchmark part whose cases take a second each; some raise."""

    name = "memory"

    def __init__(self, clock: FakeClock, *outcomes: Exception | Case) -> None:
        self.clock = clock
        self.outcomes = outcomes
        self.granted: list[float] = []

    def plan(self, lab: Lab) -> Sequence[Any]:
        return range(len(self.outcomes))

    def measure(self, lab: Lab, planned: Any) -> Case:
        self.clock.seconds += 1
        self.granted.append(lab.seconds)
        outcome = self.outcomes[planned]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def figures(self, cases: Sequence[Case]) -> dict[str, Any]:
        return {"measured": sum("problem" not in case for case in cases)}


GOOD: Case = {"name": "good", "timings": {"fp8dist": Timing.of([1.0]).as_dict()}}


def _run(seconds: float, *outcomes: Exception | Case) -> tuple[dict[str, Any], list[int], FakePart]:
    clock = FakeClock()
    part, kept = FakePart(clock, *outcomes), []
    lab = Lab(Stopwatch(clock))
    result = run_part(part, lab, seconds, lambda part: kept.append(len(part["cases"])), clock)
    assert results.problems_of({**_empty(), "parts": {"memory": results.stamped(result, _empty())}}) == []
    return result, kept, part


def _empty() -> dict[str, Any]:
    device = {"name": "none", "capability": None, "driver": None}
    versions = {"python": "3", "torch": "2", "triton": None}
    return {**results.empty(None, False, "test"), "device": device, "versions": versions}


def test_each_case_is_kept_as_soon_as_it_is_there() -> None:
    result, kept, _ = _run(100.0, GOOD, GOOD)
    assert kept == [0, 1, 2, 2]
    assert (result["status"], result["problem"], result["figures"]) == ("done", None, {"measured": 2})


def test_a_case_that_raises_is_told_and_the_others_go_on() -> None:
    result, _, _ = _run(100.0, ValueError("two\nlines"), GOOD)
    assert result["status"] == "done"
    assert result["cases"][0]["problem"] == result["problem"] == "ValueError: two"
    assert result["figures"] == {"measured": 1}


def test_a_lost_device_ends_a_part() -> None:
    result, _, _ = _run(100.0, GOOD, RuntimeError("CUDA error: an illegal memory access"), GOOD)
    assert (result["status"], len(result["cases"])) == ("failed", 2)


def test_a_part_that_only_fails_is_given_up() -> None:
    result, _, _ = _run(100.0, *[ImportError("no such module")] * 10)
    assert (result["status"], len(result["cases"])) == ("failed", LIKE_THE_LAST)


def test_a_part_out_of_time_is_cut_off() -> None:
    result, _, part = _run(2.5, *[GOOD] * 10)
    assert (result["status"], result["problem"]) == ("cut off", "out of time after 3 of 10 cases")
    assert part.granted == pytest.approx([0.6 * 2.5 / 10, 0.6 * 1.5 / 9, 0.6 * 0.5 / 8])


E4M3 = torch.float8_e4m3fn


def _product(m: int, n: int, k: int, scaling: Scaling) -> Product:
    return Product("p", "fprop", m, n, k, scaling, True, E4M3, E4M3)


@pytest.mark.parametrize("kind", [scaling.value for scaling in FLOAT32_SCALINGS])
def test_the_reference_of_products(kind: str) -> None:
    """Compare with sums over plain Python floats."""
    torch.manual_seed(1)
    operands = Operands.random(_product(3, 130, 260, Scaling(kind)), torch.device("cpu"))
    exact = operands.exactly(torch.tensor([0, 2]))
    a, b = operands.a.float().tolist(), operands.b.float().tolist()

    def scale_of(inv_scale: torch.Tensor, row: int, column: int, rows: int) -> float:
        if inv_scale.ndim == 0:
            return float(inv_scale)
        return float(inv_scale[row // rows, column // 128 if kind.startswith("blockwise") else 0])

    tall = 128 if kind == "blockwise" else 1
    for place, row in enumerate((0, 2)):
        for column in (0, 1, 127, 128, 129):
            terms = (
                a[row][i]
                * scale_of(operands.inv_scale_a, row, i, 1)
                * b[column][i]
                * scale_of(operands.inv_scale_b, column, i, tall)
                for i in range(260)
            )
            assert float(exact[place, column]) == pytest.approx(math.fsum(terms), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", few(["tensorwise", "rowwise"], "rowwise"))
@pytest.mark.parametrize("fault", [None, "nan", "tile", "scale", "varies"])
def test_a_wrong_product_is_not_timed(kind: str, fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def product(of: Any, operands: Operands, backend: str) -> Callable[[], torch.Tensor]:
        # The other side is right.
        return functools.partial(computed, operands, fault if backend == TRITON else None)

    def computed(operands: Operands, fault: str | None) -> torch.Tensor:
        out = (operands.a.float() * operands.inv_scale_a) @ (operands.b.float() * operands.inv_scale_b).t()
        if fault == "nan":
            out[17, 3] = torch.nan
        elif fault == "tile":
            out[40:48, 64:72] = 0
        elif fault == "scale":
            out *= 1.05
        elif fault == "varies" and next(calls) % 2:
            out[0, 0] *= 1.01
        return out.bfloat16()

    monkeypatch.setattr(matmuls, "ours", product)
    lab = Lab(Stopwatch(), smoke=True, seconds=0.0)
    case = Matmuls(kind).measure(lab, _product(300, 128, 256, Scaling(kind)))
    assert ("problem" in case) == (fault is not None), case
    assert ("ratios" in case) == (fault is None)
    assert set(Matmuls(kind).figures([case])) == (set() if fault else {AUTO, TRITON})


def test_figures_of_products() -> None:
    def case(name: str, gemm: str, fast: bool, default: bool, ratio: float) -> Case:
        ratios = {AUTO: [ratio, ratio, ratio], f"{AUTO} vs bf16": [2.0, 2.0, 2.0]}
        return {"name": name, "gemm": gemm, "fast": fast, "default": default, "ratios": ratios}

    refused: Case = {"name": "r", "gemm": "wgrad", "fast": False, "default": True, "refused_by_torch": "no"}
    cases = [case("a", "fprop", True, True, 0.5), case("b", "dgrad", False, True, 2.0), refused]
    figures = Matmuls("rowwise").figures(cases)
    assert figures["auto"]["geomean"].ratio == pytest.approx(1.0)
    assert (figures["auto"]["lowest"], figures["auto"]["lowest_case"], figures["auto"]["shapes"]) == (0.5, "a", 2)
    assert (figures["auto"]["wgrad"], figures["auto"]["bf16"].ratio) == (None, pytest.approx(2.0))
    assert figures["refused_by_torch"] == "no (1 shapes)"
    assert "auto, fast" not in figures, "fprop alone"
    figures = Matmuls("rowwise").figures([*cases, case("c", "dgrad", True, False, 8.0)])
    assert figures["auto"]["geomean"].ratio == pytest.approx(1.0)
    assert figures["auto, fast"]["geomean"].ratio == pytest.approx(2.0)


def test_figures_of_memory() -> None:
    def case(kernel: str, size: str, ratio: float) -> Case:
        return {"name": f"{kernel} {size}", "kernel": kernel, "ratios": {"fp8dist": [ratio, ratio, ratio]}}

    wrong = {"name": "amax s", "kernel": "amax", "problem": "wrong"}
    figures = Memory().figures([case("cast", "s", 0.8), case("cast", "l", 0.9), wrong, case("amax", "l", 0.9)])
    assert figures["cast"]["lowest_case"] == "cast s"
    assert "amax" not in figures, "one of its results was wrong"


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["digest", "cast"])
def test_what_only_reads_is_compared_with_a_read(kernel: str) -> None:
    lab = Lab(Stopwatch(), smoke=True, seconds=0.0)
    case = Memory().measure(lab, memory.Planned(kernel, 64, 48, 3 if kernel == "digest" else 1))
    references = set(memory.READS) if kernel == "digest" else {"copy"}
    assert set(case["timings"]) == {"fp8dist", *references}
    times = {side: case["timings"][side]["median_us"] for side in references}
    assert times[case["reference"]] == min(times.values())


def test_a_read_that_leaves_something_out_is_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    read = memory._read

    class Lazy:
        def __getitem__(self, grid: Any) -> Any:
            return lambda words, sums, count, block: read[grid](words, sums, count - 1, block)

    monkeypatch.setattr(memory, "_read", Lazy())
    with pytest.raises(RuntimeError, match="does not read all"):
        memory._references(memory.Planned("amax", 100, 48), torch.device("cpu"))


@pytest.mark.parametrize("name", RECIPES)
def test_the_plan_is_what_fp8_linear_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, tokens, layer = RECIPES[name], 200, Layer("l", 160, 272)
    calls = []

    def recorded(a: Any, b: Any, inv_scale_a: Any, inv_scale_b: Any, *rest: Any, **options: Any) -> torch.Tensor:
        scaling = scaling_of(a, b, inv_scale_a, inv_scale_b)
        calls.append((*a.shape, b.shape[0], scaling, options["fast_accumulation"], a.dtype, b.dtype))
        return matmul(a, b, inv_scale_a, inv_scale_b, *rest, **options)

    matmul = direct.matmul
    monkeypatch.setattr(direct, "matmul", recorded)
    for chosen in (recipe, fast_everywhere(recipe)):
        if chosen is None:
            continue
        calls.clear()
        model = torch.nn.Sequential(torch.nn.Linear(layer.in_features, layer.out_features))
        fp8dist.prepare(model, chosen)
        model(torch.randn(tokens, layer.in_features, requires_grad=True)).sum().backward()
        planned = products_of(chosen, layer, tokens)
        assert calls == [(p.m, p.k, p.n, p.scaling, p.fast, p.a_dtype, p.b_dtype) for p in planned]
        assert [product.fast for product in products_of(recipe, layer, tokens, ("dgrad",))] == [False, True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_the_benchmark_measures_what_training_runs(kind: str) -> None:
    recipe = KINDS[kind]
    planned = matmuls.planned_products(kind, [("8B", 8192)])
    default = [one for layer in LINEARS[:4] for one in products_of(recipe, layer, 8192)]
    everywhere = [one for layer in LINEARS[:4] for one in products_of(recipe, layer, 8192, GEMMS)]
    assert planned[: len(default)] == default, "what training runs comes first"
    assert len({product.name for product in planned}) == len(planned)
    more = [] if kind == "blockwise" else [product for product in everywhere if product not in default]
    assert planned[len(default) :] == more


def test_a_recipe_with_fast_accumulation_everywhere() -> None:
    fast = fast_everywhere(CurrentScaling())
    assert fast is not None
    assert fast.fast_accumulation == GEMMS
    assert fast_everywhere(BlockScaling()) is None


@pytest.mark.parametrize("truth", [1, 16, 100, 128, 129, 1024, 5000])
def test_the_crossover_is_found_by_bisection(truth: int) -> None:
    counts, asked = [16, 128, 512, 1024, 4096], []

    def beats(tokens: int) -> bool:
        asked.append(tokens)
        return tokens >= truth

    assert linears.first_that_beats(counts, beats) == next((count for count in counts if count >= truth), None)
    assert len(asked) == len(set(asked)) <= 3


def test_the_crossover_needs_a_sure_win(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compared:
        def __init__(self, tokens: int) -> None:
            self.tokens = tokens

        def timings(self) -> dict[str, Any]:
            return {"bf16": Timing.of([1.0]).as_dict()}

        def ratio(self, of: str, to: str) -> Ratio:
            assert (of, to) == ("bf16", "fp8dist")
            return Ratio(1.05, 0.99 if self.tokens < 64 else 1.01, 1.1)

    monkeypatch.setattr(linears, "_eagerly", lambda lab, bench, models, seconds: Compared(len(bench.x)))
    lab = Lab(Stopwatch(), smoke=True, seconds=0.0)
    (planned,) = linears.Crossover().plan(lab)
    case = linears.Crossover().measure(lab, planned)
    assert case["crossover"] == 64
    assert linears.Crossover().figures([case, {"name": "x", "problem": "p"}]) == {case["name"]: 64}


def test_a_sustained_run_has_no_pause_and_ends_in_time() -> None:
    clock = FakeClock()
    windows = sustained.sustained(Stopwatch(clock), clock.taking(0.001), 2.95)
    assert windows == pytest.approx([1e3] * 30), "of 100 ms each"
    assert clock.seconds == pytest.approx(3.002)
    assert len(sustained.sustained(Stopwatch(clock), clock.taking(0.001), 0.0)) == FEWEST


def test_a_sustained_speed_is_that_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 slows down to half, bf16 does not."""
    windows = {"bf16": [4.0] * 30, "auto": [1.0] * 15 + [2.0] * 15}
    order = iter(["bf16", "auto"])
    asked = []

    def sustain(stopwatch: Any, action: Any, seconds: float) -> list[float]:
        asked.append(seconds)
        return windows[next(order)]

    monkeypatch.setattr(sustained, "sustained", sustain)
    part, lab = sustained.Sustained(), Lab(Stopwatch(), smoke=True, seconds=0.0)
    plain, ours, *_ = part.plan(lab)
    cases = [part.measure(lab, plain), part.measure(Lab(Stopwatch(), seconds=0.0, share=12.0), ours)]
    assert asked == [0.0, 10.0], "the part's time is not exceeded"
    assert cases[1]["timings"]["sustained"]["median_us"] == 2.0
    assert cases[1]["ratios"]["sustained"] == (2.0, 2.0, 2.0)
    assert "ratios" not in cases[0]


def test_poison_is_nan_in_every_float_format() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        code = torch.full((dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype)
        assert code.float().isnan().all()
    poison((3, 5), torch.bfloat16, torch.device("cpu"))
    poison((0,), torch.bfloat16, torch.device("cpu"))


TIMED = [*itertools.product([jobs.BF16, *RECIPES], ["eager", "graph"]), ("rowwise", "compiled")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it itself.
@pytest.mark.parametrize(("recipe", "mode"), few(TIMED, TIMED[0], TIMED[-2]))
def test_a_training_step_is_timed(recipe: str, mode: str) -> None:
    case = jobs.trained(jobs.Planned(recipe, mode), jobs.SMALL, torch.device("cpu"))
    assert ("sync" in case["timings"]) == (recipe != jobs.BF16)
    assert case["timings"]["step"]["count"] == len(case["step_us"]) == jobs.WINDOWS
    tokens = jobs.SMALL.batch * jobs.SMALL.context
    assert case["tokens_per_s"] == pytest.approx(1e6 * tokens / case["timings"]["step"]["median_us"])


def test_a_captured_training_step_ends_with_its_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", EmulatedGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: graph.capture())
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    manager = fp8dist.prepare(model).attach(boundary="manual")

    def step() -> None:
        model(torch.ones(16, 32)).sum().backward()
        manager.step()

    step()
    replay = jobs._captured(step, manager)
    steps = manager.steps
    for _ in range(3):
        replay()
        manager.poll()
    assert manager.steps == steps + 3


def test_a_crash_of_a_training_run_loses_one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, outcomes = [], iter([1, subprocess.TimeoutExpired("", 1.0), 0])

    def run(command: list[str], timeout: float, **_: Any) -> Any:
        limits.append(timeout)
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        if outcome == 0:
            case = {"timings": {"step": Timing.of([2.0]).as_dict()}, "step_us": [2.0] * 6}
            Path(command[command.index("--out") + 1]).write_text(json.dumps(case))
        return SimpleNamespace(returncode=outcome, stderr="Traceback\nAcceleratorError: CUDA error: lost\n")

    monkeypatch.setattr(jobs.subprocess, "run", run)
    part, clock = jobs.Jobs(), FakeClock()
    monkeypatch.setattr(part, "plan", lambda lab: [jobs.Planned(r, "eager") for r in ("block", "delayed", jobs.BF16)])
    result = run_part(part, Lab(Stopwatch(clock)), 40.0, lambda part: None, clock)
    problems = [case.get("problem") for case in result["cases"]]
    assert problems == [
        "block, eager: status 1: AcceleratorError: CUDA error: lost",
        "delayed, eager: not done after 55 s",
        None,
    ]
    assert limits == [40.0 + jobs.GRACE] * 3
    fast = {"name": "delayed, eager", "recipe": "delayed", "mode": "eager", "step_us": [1.0] * 6}
    assert part.figures([*result["cases"], fast]) == {"delayed, eager": (2.0, 2.0, 2.0)}
