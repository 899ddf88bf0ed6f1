"""scripts/gpu benchmark, without a GPU: figures are of what training runs, and of right results only."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8dist
from fp8dist_kernels import GEMMS, direct
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN
from fp8dist_kernels.reference.matmuls import Scaling, scaling_of
from scripts.benchmarks.gpu import jobs, linears, matmuls, memory
from scripts.benchmarks.gpu.kernels import run_part
from scripts.benchmarks.gpu.lab import Case, Lab, geomean, same_bits
from scripts.benchmarks.gpu.matmuls import AUTO, TRITON, Matmuls, Operands
from scripts.benchmarks.gpu.memory import Memory
from scripts.benchmarks.gpu.stopwatch import (
    FEWEST,
    MOST,
    Action,
    Comparison,
    Ratio,
    Stopwatch,
    compare,
    compare_in_a_row,
    timing_of,
)
from scripts.benchmarks.llama_shapes import KINDS, LINEARS, RECIPES, Layer, Product, fast_everywhere, products_of
from scripts.results_files import write
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


def test_a_comparison_takes_the_time_that_it_has() -> None:
    """What comes before an action is not timed, and a drifting clock cancels out."""
    clock = FakeClock()
    stopwatch = Stopwatch(clock)
    actions = {"slow": clock.taking(0.02, 0.024), "fast": clock.taking(0.01)}  # A round takes 32 ms.
    comparison = compare(stopwatch, actions, seconds=0.61)
    assert 15 <= len(comparison.samples["slow"]) <= 20
    assert comparison.ratio("slow", "fast").ratio == pytest.approx(2.2)
    assert comparison.timings()["slow"]["median_us"] == pytest.approx(2.2e4)
    assert len(compare(stopwatch, actions, seconds=0.0).samples["slow"]) == FEWEST
    assert len(compare(stopwatch, actions, seconds=1e3).samples["slow"]) == MOST
    assert len(compare(stopwatch, {"a": clock.taking(0.01), "b": clock.taking(0.02)}, 1e3).samples["a"]) == FEWEST
    assert compare(stopwatch, actions, 0.0, clock.taking(1.0)).ratio("slow", "fast").ratio == pytest.approx(2.2)
    in_a_row = compare_in_a_row(stopwatch, actions, 0.0, repeats=2)
    assert in_a_row.timings()["fast"]["median_us"] == pytest.approx(5e3)
    drift = [1.0, 1.1, 1.3, 1.7, 2.5]
    assert Comparison({"a": [3 * d for d in drift], "b": [2 * d for d in drift]}).ratio("a", "b").ratio == 1.5
    times = timing_of([5.0, 1.0, 2.0, 3.0, 100.0, 4.0, 6.0, 7.0, 8.0, 9.0, 10.0])
    assert times == {"median_us": 6.0, "low_us": 2.0, "high_us": 10.0, "count": 11}


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


def test_figures_of_products_and_of_memory() -> None:
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
    casts: list[Case] = [
        {"name": f"cast {size}", "kernel": "cast", "ratios": {"fp8dist": [ratio] * 3}}
        for size, ratio in (("s", 0.8), ("l", 0.9))
    ]
    wrong = {"name": "amax s", "kernel": "amax", "problem": "wrong"}
    figures = Memory().figures([*casts, wrong, {**casts[0], "name": "amax l", "kernel": "amax"}])
    assert figures["cast"]["lowest_case"] == "cast s"
    assert "amax" not in figures, "one of its results was wrong"


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
    for kind in (kind for kind, of in KINDS.items() if of is recipe):
        measured = matmuls.planned_products(kind, [("8B", 8192)])
        default, everywhere = (
            [one for layer in LINEARS[:4] for one in products_of(recipe, layer, 8192, fast)] for fast in (None, GEMMS)
        )
        more = [] if kind in ("blockwise", "mx") else [product for product in everywhere if product not in default]
        assert measured == [*default, *more], "what training runs comes first"
        assert len({product.name for product in measured}) == len(measured)


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
        ("delayed", "graph"),
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


@pytest.mark.parametrize(
    ("kernel", "reference"), [("digest", "read by torch"), ("cast", "copy"), ("cast_transpose_amax", "copy")]
)
def test_a_kernel_is_compared_with_what_moves_the_same_bytes(kernel: str, reference: str) -> None:
    planned = memory.Planned(kernel, 64, 48, 3 if kernel == "digest" else 1)
    case = Memory().measure(Lab(Stopwatch(), smoke=True, seconds=0.0), planned)
    assert (set(case["timings"]), case["reference"]) == ({"fp8dist", reference}, reference)


def test_same_bits_are_equal_but_for_codes_of_nan() -> None:
    x = torch.tensor([[0.0, float("nan")], [1.0, 2.0]])
    assert same_bits(x, x.clone())
    for other in (x * torch.tensor([[-1.0, 1.0], [1.0, 1.0]]), x.double(), x[:1]):
        assert not same_bits(x, other)
    codes = torch.tensor([0x7F, 0xFF, 0x01], dtype=torch.uint8)
    assert same_bits(codes.view(torch.float8_e4m3fn), codes[[1, 0, 2]].view(torch.float8_e4m3fn))


class Noting(Stopwatch):
    """Records the pending amaxes of the slots at the start of each action."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[torch.Tensor] = []
        self.noted: list[float] = []

    def rounds(self, actions: Sequence[Action], *arguments: Any, **options: Any) -> list[list[float]]:
        def noting(action: Action) -> None:
            self.noted += [float(pending.max()) for pending in self.pending]
            action()

        return super().rounds([functools.partial(noting, action) for action in actions], *arguments, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["cast_transpose_amax", "amax", "linears"])
def test_what_is_timed_records_its_amaxes(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel skips the recording if the amax is known: its times would be too short."""
    stopwatch = Noting()
    lab = Lab(stopwatch, smoke=True, seconds=0.0)
    module, name = (linears, "prepared") if kernel == "linears" else (memory, "_MEASURES")
    make = linears.prepared if kernel == "linears" else memory._MEASURES[kernel]

    def noted(*arguments: Any) -> Any:
        made = make(*arguments)  # type: ignore[operator]
        stopwatch.pending += made.pending if kernel == "linears" else arguments[1:]
        return made

    monkeypatch.setattr(module, name, noted if kernel == "linears" else {kernel: noted})
    if kernel == "linears":
        part = linears.Linears()
        case = part.measure(lab, part.plan(lab)[0])
    else:
        case = Memory().measure(lab, memory.Planned(kernel, 16, 32))
    assert "problem" not in case
    assert set(stopwatch.noted) == {DID_NOT_RUN}
