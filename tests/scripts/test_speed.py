"""The benchmark's own logic: timing, checks before timing, time limits, and records of failures."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import scripts.benchmarks.gpu.matmuls
import scripts.benchmarks.gpu.stopwatch
from scripts.benchmarks.gpu import environment, results
from scripts.benchmarks.gpu.kernels import LIKE_THE_LAST, run_part
from scripts.benchmarks.gpu.lab import Case, Lab, geomean, poison, same_bits
from scripts.benchmarks.gpu.matmuls import KINDS, Matmuls, Operands, Planned
from scripts.benchmarks.gpu.memory import Memory
from scripts.benchmarks.gpu.stopwatch import (
    FEWEST,
    MOST,
    Comparison,
    HostStopwatch,
    Timing,
    back_to_back,
    compare,
    issue_time,
    stopwatch_of,
)


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
    stopwatch = HostStopwatch(clock)
    actions = [lambda name=name: order.append(name) for name in "abc"]
    times = stopwatch.rounds(actions, 3)
    assert "".join(order) == "abc" + "bca" + "cab"
    assert [len(one) for one in times] == [3, 3, 3]


def test_what_is_done_before_each_action_is_not_timed() -> None:
    clock = FakeClock()
    stopwatch = HostStopwatch(clock)
    actions = {"slow": clock.taking(0.02), "fast": clock.taking(0.01)}
    assert stopwatch.rounds(list(actions.values()), 2, before=clock.taking(1.0))[0] == pytest.approx([2e4] * 2)
    assert clock.seconds == pytest.approx(4.06)
    assert compare(stopwatch, actions, 0.0, before=clock.taking(1.0)).ratio("slow", "fast") == pytest.approx(2.0)


def test_compare_fits_into_the_time_it_has() -> None:
    clock = FakeClock()
    stopwatch = HostStopwatch(clock)
    actions = {"slow": clock.taking(0.02), "fast": clock.taking(0.01)}
    comparison = compare(stopwatch, actions, seconds=0.61)
    assert len(comparison.samples["slow"]) == 20
    assert comparison.ratio("slow", "fast") == pytest.approx(2.0)
    assert comparison.timings()["slow"]["median_us"] == pytest.approx(2e4)
    assert len(compare(stopwatch, actions, seconds=0.0).samples["slow"]) == FEWEST
    assert len(compare(stopwatch, actions, seconds=1e3).samples["slow"]) == MOST


def test_a_ratio_is_of_rounds_so_a_drifting_clock_does_not_matter() -> None:
    drift = [1.0, 1.1, 1.3, 1.7, 2.5]
    comparison = Comparison({"a": [3 * d for d in drift], "b": [2 * d for d in drift]})
    assert comparison.ratio("a", "b") == pytest.approx(1.5)


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
    timing = back_to_back(stopwatch, slow, 2, 3)
    assert (timing.median, timing.count) == (pytest.approx(2e4), 3)


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
    assert geomean([0.5, 2.0, 8.0]) == pytest.approx(2.0)


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


# Parts ------------------------------------------------------------------------------------------------


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
    lab = Lab(HostStopwatch(clock))
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


# Checking before timing -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_of_products(kind: str) -> None:
    """Compare with sums over plain Python floats."""
    torch.manual_seed(1)
    operands = Operands.random(Planned("", "fprop", 3, 130, 260), kind, torch.device("cpu"))
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


@pytest.mark.parametrize("kind", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("fault", [None, "nan", "tile", "scale", "varies"])
def test_a_wrong_product_is_not_timed(kind: str, fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def product(a: Any, b: Any, inv_scale_a: Any, inv_scale_b: Any, dtype: Any, fast: bool) -> torch.Tensor:
        out = (a.float() * inv_scale_a) @ (b.float() * inv_scale_b).t()
        if fault == "nan":
            out[17, 3] = torch.nan
        elif fault == "tile":
            out[40:48, 64:72] = 0
        elif fault == "scale":
            out *= 1.05
        elif fault == "varies" and next(calls) % 2:
            out[0, 0] *= 1.01
        return out.to(dtype)

    monkeypatch.setattr(scripts.benchmarks.gpu.matmuls, "_ours", lambda: product)
    lab = Lab(HostStopwatch(), smoke=True, seconds=0.0)
    case = Matmuls(kind).measure(lab, Planned("p", "fprop", 300, 128, 256))
    assert ("problem" in case) == (fault is not None), case
    assert ("ratio" in case) == (fault is None)
    figures = Matmuls(kind).figures([case])
    assert ("geomean" in figures) == (fault is None)


def test_figures_of_products() -> None:
    cases = [
        {"name": "a", "use": "fprop", "ratio": 0.5},
        {"name": "b", "use": "dgrad", "ratio": 2.0},
        {"name": "c", "use": "dgrad", "refused_by_torch": "no"},
    ]
    figures = Matmuls("rowwise").figures(cases)
    assert figures["geomean"] == pytest.approx(1.0)
    assert (figures["lowest"], figures["lowest_case"], figures["shapes"]) == (0.5, "a", 2)
    assert "wgrad" not in figures
    assert figures["refused_by_torch"] == "no (1 shapes)"


def test_figures_of_memory() -> None:
    def case(kernel: str, size: str, ratio: float, speed: float) -> Case:
        name = f"{kernel} {size}"
        return {"name": name, "kernel": kernel, "ratio": ratio, "gb_per_s": {"fp8dist": speed, "copy": speed / ratio}}

    wrong = {"name": "amax s", "kernel": "amax", "problem": "wrong"}
    cases = [case("cast", "s", 0.8, 3200.0), case("cast", "l", 0.9, 3690.0), wrong, case("amax", "l", 0.9, 10.0)]
    figures = Memory().figures(cases)
    assert figures["copy_gb_per_s"] == pytest.approx(4100.0)
    assert figures["cast"]["lowest_case"] == "cast s"
    assert figures["cast"]["of_fastest_copy"] == pytest.approx(0.9)
    assert "amax" not in figures, "one of its results was wrong"


def test_poison_is_nan_in_every_float_format() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2):
        code = torch.full((dtype.itemsize,), 0xFF, dtype=torch.uint8).view(dtype)
        assert code.float().isnan().all()
    poison((3, 5), torch.bfloat16, torch.device("cpu"))
    poison((0,), torch.bfloat16, torch.device("cpu"))
