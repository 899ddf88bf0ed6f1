"""The benchmark's own logic: timing, checks before timing, time limits, and records of failures."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fp8dist
from fp8dist_kernels import GEMMS, direct
from fp8dist_kernels.reference.matmuls import Scaling, scaling_of
from scripts.benchmarks.gpu import environment, jobs, linears, matmuls, memory, sustained
from scripts.benchmarks.gpu import stopwatch as stopwatches
from scripts.benchmarks.gpu.kernels import run_part
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
    compare,
    compare_in_a_row,
    interval_of_median,
    issue_time,
    stopwatch_of,
    timing_of,
)
from scripts.benchmarks.llama_shapes import KINDS, LINEARS, RECIPES, Layer, Product, fast_everywhere, products_of
from scripts.results_files import write
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


CLOCK = FakeClock()


def test_a_timing_is_a_median_with_its_spread() -> None:
    timing = timing_of([5.0, 1.0, 2.0, 3.0, 100.0, 4.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    assert timing == {"median_us": 6.0, "low_us": 2.0, "high_us": 10.0, "count": 11}
    assert timing_of([3.0]) == {"median_us": 3.0, "low_us": 3.0, "high_us": 3.0, "count": 1}


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


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was called of torch.cuda, which is replaced: its events are of ``CLOCK``, its buffers are on no device."""
    found: list[str] = []
    properties = SimpleNamespace(
        name="Fake", major=9, minor=0, total_memory=1 << 30, multi_processor_count=4, clock_rate=2_000_000
    )
    stream = SimpleNamespace(wait_stream=lambda other: found.append("wait"))
    for name, value in {
        "synchronize": lambda device=None: None,
        "Event": lambda enable_timing, external: stopwatches._HostEvent(CLOCK),
        "_sleep": lambda cycles: found.append(f"sleep {cycles}"),
        "Stream": lambda device=None: stream,
        "current_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: found.append("replay")),
        "graph": lambda graph: contextlib.nullcontext(),
        "get_device_properties": lambda device: properties,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    buffer = SimpleNamespace(zero_=lambda: found.append("write"), amax=lambda: found.append("read"))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: buffer)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: buffer)
    return found


def test_the_gpu_stopwatch_times_what_is_between_its_events(done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch = stopwatch_of(torch.device("cuda", 0))
    slow, fast = CLOCK.taking(0.02), CLOCK.taking(0.01)
    times = stopwatch.rounds([slow, fast], 3, head_start=5.0)
    assert times == [pytest.approx([2e4] * 3), pytest.approx([1e4] * 3)]
    assert done == ["sleep 10000", "write", "read"] * 6
    done.clear()
    stopwatch.rounds([lambda: done.append("action")], 2, 1e9, before=lambda: done.append("before"))
    each = ["sleep 4000000", "before", "write", "read", "action"]
    assert done == each * 2, "no written line is left to be timed"
    done.clear()
    stopwatch.replay(lambda: done.append("run"), 4)()
    assert done == ["wait", *["run"] * 3, "wait", *["run"] * 4, "replay"]
    monkeypatch.setattr(stopwatches, "time", SimpleNamespace(perf_counter=CLOCK))
    assert stopwatch.now() == 1e6 * CLOCK.seconds
    assert issue_time(stopwatch, slow) == pytest.approx(2e4)
    timing = compare_in_a_row(stopwatch, {"": slow}, 0.0, 1).timings()[""]
    assert (timing["median_us"], timing["count"]) == (pytest.approx(2e4), FEWEST)


@pytest.mark.usefixtures("done")
def test_the_facts_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="580.1\n"))
    facts = environment.facts(torch.device("cuda", 0))
    device = {"name": "Fake", "capability": [9, 0], "driver": "580.1", "memory_gib": 1.0, "processors": 4}
    assert facts["device"] == device
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


GOOD: Case = {"name": "good", "timings": {"fp8dist": timing_of([1.0])}}


@pytest.mark.parametrize(
    ("outcomes", "status", "problem", "cases"),
    [
        ([GOOD, GOOD], "done", None, 2),
        ([ValueError("two\nlines"), GOOD], "done", "ValueError: two", 2),
        ([ImportError("no such module")] * 4, "failed", "ImportError: no such module", 4),
        ([GOOD, RuntimeError("CUDA error: lost"), GOOD], "failed", "RuntimeError: CUDA error: lost", 2),
        ([GOOD] * 10, "cut off", "out of time after 5 of 10 cases", 5),
    ],
)
def test_each_case_is_kept_as_soon_as_it_is_there(
    outcomes: list[Any], status: str, problem: str | None, cases: int
) -> None:
    """A case that raises has a problem, and the others go on, unless the device is lost or the time is up."""
    clock, kept = FakeClock(), []
    part, lab = FakePart(clock, *outcomes), Lab(Stopwatch(clock))
    result = run_part(part, lab, 4.5, lambda part: kept.append(len(part["cases"])), clock)
    assert (result["status"], result["problem"], len(result["cases"])) == (status, problem, cases)
    assert kept == [*range(cases + (status != "failed" or cases == 4)), cases]
    assert result["figures"] == {"measured": sum(outcome is GOOD for outcome in outcomes[:cases])}
    assert part.granted == pytest.approx([min(2.0, 0.6 * (4.5 - n) / (len(outcomes) - n)) for n in range(cases)])


E4M3 = torch.float8_e4m3fn


def _product(m: int, n: int, k: int, scaling: Scaling) -> Product:
    return Product("p", "fprop", m, n, k, scaling, True, E4M3, E4M3)


@pytest.mark.parametrize("kind", [scaling.value for scaling in Scaling if scaling is not Scaling.NVFP4])
def test_the_reference_of_products(kind: str) -> None:
    """Compare with sums over plain Python floats."""
    torch.manual_seed(1)
    k, wide = (288, 32) if kind == "mx" else (260, 128)
    operands = Operands.random(_product(3, 130, k, Scaling(kind)), torch.device("cpu"))
    exact = operands.exactly(torch.tensor([0, 2]))
    a, b = operands.a.float().tolist(), operands.b.float().tolist()

    def scale_of(inv_scale: torch.Tensor, row: int, column: int, rows: int) -> float:
        if inv_scale.ndim == 0:
            return float(inv_scale)
        return float(inv_scale[row // rows, column // wide if kind != "rowwise" else 0])

    tall = 128 if kind == "blockwise" else 1
    for place, row in enumerate((0, 2)):
        for column in (0, 1, 127, 128, 129):
            terms = (
                a[row][i]
                * scale_of(operands.inv_scale_a, row, i, 1)
                * b[column][i]
                * scale_of(operands.inv_scale_b, column, i, tall)
                for i in range(k)
            )
            assert float(exact[place, column]) == pytest.approx(math.fsum(terms), rel=1e-6)


@pytest.mark.parametrize("kind", ["rowwise"])
@pytest.mark.parametrize("fault", few([None, "nan", "tile", "scale", "varies"], None, "nan", "tile"))
def test_a_wrong_product_is_not_timed(
    kind: str, fault: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = itertools.count()

    def product(of: Any, operands: Operands, backend: str) -> Callable[[], torch.Tensor]:
        # The other side is right.
        return functools.partial(computed, operands, fault if backend == TRITON else None)

    def computed(operands: Operands, fault: str | None) -> torch.Tensor:
        out = (operands.a.float() * operands.inv_scale_a) @ (operands.b.float() * operands.inv_scale_b).t()
        if fault == "nan":
            out[:, 3] = torch.nan  # In rows that are compared with float64, too.
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
    write(tmp_path / "case.json", case)  # JSON has no NaN.
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


@pytest.mark.parametrize(("kernel", "reference"), [("digest", "read by torch"), ("cast", "copy")])
def test_what_only_reads_is_compared_with_a_read(kernel: str, reference: str) -> None:
    lab = Lab(Stopwatch(), smoke=True, seconds=0.0)
    case = Memory().measure(lab, memory.Planned(kernel, 64, 48, 3 if kernel == "digest" else 1))
    assert (set(case["timings"]), case["reference"]) == ({"fp8dist", reference}, reference)


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
    more = [] if kind in ("blockwise", "mx") else [product for product in everywhere if product not in default]
    assert planned[len(default) :] == more


@pytest.mark.parametrize(("first", "found"), [(16, 16), (17, 64), (64, 64), (65, None)])
def test_the_crossover_needs_a_sure_win(first: int, found: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Compared:
        def __init__(self, tokens: int) -> None:
            self.tokens = tokens

        def timings(self) -> dict[str, Any]:
            return {"bf16": timing_of([1.0])}

        def ratio(self, of: str, to: str) -> Ratio:
            assert (of, to) == ("bf16", "fp8dist")
            return Ratio(1.05, 1.01 if self.tokens >= first else 0.99, 1.1)

    monkeypatch.setattr(linears, "_eagerly", lambda lab, bench, models, seconds: Compared(len(bench.x)))
    lab = Lab(Stopwatch(), smoke=True, seconds=0.0)
    (planned,) = linears.Crossover().plan(lab)
    case = linears.Crossover().measure(lab, planned)
    assert case["crossover"] == found
    assert linears.Crossover().figures([case, {"name": "x", "problem": "p"}]) == {case["name"]: found}


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
        poison((3, 5), dtype, torch.device("cpu"))
        assert torch.full((dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype).float().isnan().all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it itself.
@pytest.mark.parametrize(
    ("recipe", "mode"),
    few(
        [
            ("rowwise", "compiled"),
            ("delayed", "graph"),
            (jobs.BF16, "graph"),
            *((recipe, "eager") for recipe in RECIPES),
        ],
        ("rowwise", "compiled"),
        (jobs.BF16, "graph"),
    ),
)
def test_a_training_step_is_timed(recipe: str, mode: str) -> None:
    lab = Lab(Stopwatch(), smoke=True)
    case = jobs.Jobs().measure(lab, jobs.Planned(recipe, mode))
    assert ("sync" in case["timings"]) == (recipe != jobs.BF16)
    assert case["timings"]["step"]["count"] == len(case["step_us"]) == jobs.WINDOWS
    tokens = jobs.SMALL.batch * jobs.SMALL.context
    assert case["tokens_per_s"] == pytest.approx(1e6 * tokens / case["timings"]["step"]["median_us"])
    twice = {**case, "name": "x", "recipe": "x", "step_us": [2 * each for each in case["step_us"]]}
    plain = {**case, "recipe": jobs.BF16}
    assert jobs.Jobs().figures([plain, twice, {"name": "y", "problem": "p"}]) == {"x": (0.5, 0.5, 0.5)}


def test_a_captured_training_step_ends_with_its_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", EmulatedGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: graph.capture())
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    manager = fp8dist.prepare(model).attach(boundary="manual")

    def step() -> None:
        model(torch.ones(16, 32)).sum().backward()
        manager.step()

    step()
    replay = jobs.captured(step, manager)
    steps = manager.steps
    for _ in range(3):
        replay()
        manager.poll()
    assert manager.steps == steps + 3
