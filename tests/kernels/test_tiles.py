"""The choice of a tile for a product: the formula, the shipped tables, and the tuner that writes them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8dist_kernels.reference.matmuls import FLOAT32_SCALINGS, Scaling
from fp8dist_kernels.triton import tables
from fp8dist_kernels.triton.launching import processors
from fp8dist_kernels.triton.tables import FORMAT, Entry, Tile, TileTable, bucket, file_name
from fp8dist_kernels.triton.tiles import Problem, best_of, candidates, faster_than_torch, key_of, tile_for
from scripts.benchmarks.gpu import tune_matmuls
from scripts.benchmarks.llama_shapes import Layer, Product

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(Path(tables.__file__).with_name("tables").glob("*.json"))
HOPPER, H200_PROCESSORS = (9, 0), 132
CPU = torch.device("cpu")
SQUARE = Tile(rows=128, columns=128, depth=128, warps=8, stages=5, group=8)
SMALL = Tile(rows=64, columns=64, depth=128, warps=4, stages=4, group=8)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def _problem(m: int, n: int, k: int, scaling: Scaling, fast: bool) -> Problem:
    return Problem(m, n, k, scaling, fast, E4M3, E4M3, torch.bfloat16)


PROBLEM = _problem(4096, 4096, 4096, Scaling.TENSORWISE, True)


def _of_hopper(m: int, n: int, k: int, scaling: Scaling = Scaling.TENSORWISE, fast: bool = True) -> Tile:
    problem = _problem(m, n, k, scaling, fast)
    return best_of(candidates(problem, HOPPER), problem, H200_PROCESSORS)


def test_large_products_get_the_widest_tile_and_small_ones_all_processors() -> None:
    """A few large tiles would leave most multiprocessors idle."""
    layers = ((4096, 6144), (4096, 28672), (14336, 4096), (8192, 8192))
    for tokens, (features, outputs), fast in itertools.product((4096, 32768), layers, (True, False)):
        for m, n, k in ((tokens, outputs, features), (tokens, features, outputs), (outputs, features, tokens)):
            for scaling in FLOAT32_SCALINGS:
                tile = _of_hopper(m, n, k, scaling, fast)
                assert (tile.rows, tile.columns) == (128, 128 if scaling is Scaling.BLOCKWISE_1D else 256)
    for m, n in ((64, 4096), (16, 8192), (1, 1024), (512, 512)):
        tile = _of_hopper(m, n, 4096)
        assert (tile.rows, tile.columns) == (64, 64)


def test_tiles_are_what_the_kernels_can_do() -> None:
    for capability in ((8, 9), (9, 0), (10, 0), (10, 3), (12, 0)):
        for scaling, fast in itertools.product(FLOAT32_SCALINGS, (True, False)):
            chosen = candidates(_problem(4096, 4096, 4096, scaling, fast), capability)
            assert len(set(chosen)) == len(chosen) > 0
            for tile in chosen:
                assert tile.depth == 128  # The block size of scales and of slow accumulation.
                assert tile.rows >= 64  # The minimum of wgmma.
                assert not scaling.in_blocks or tile.columns in (64, 128, 256)
                assert scaling is not Scaling.BLOCKWISE_1D or tile.columns <= 128  # Wider tiles spill registers.


def _file(*entries: Entry, **other: Any) -> str:
    return json.dumps({"format": FORMAT, "device": "x", "entries": [entry.described() for entry in entries], **other})


def _entry(tile: Tile = SQUARE, vs_torch: float = 1.03, low: float = 1.01, **other: Any) -> Entry:
    interval = {"vs_torch": vs_torch, "low": low, "high": 2 * vs_torch - low}
    kind = {"scaling": "tensorwise", "fast_accumulation": True, "a": "e4m3", "b": "e4m3", "out": "bfloat16"}
    return Entry(**{**kind, "m": 4096, "n": 4096, "k": 4096, "tile": tile, **interval, **other})


@pytest.fixture
def ship(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that makes a JSON text the table of all devices."""

    def use(text: str) -> None:
        table = TileTable.from_json(text)
        monkeypatch.setattr(TileTable, "of", staticmethod(lambda device: table))
        tile_for.cache_clear()
        faster_than_torch.cache_clear()

    yield use
    tile_for.cache_clear()
    faster_than_torch.cache_clear()


def test_auto_takes_triton_where_it_is_surely_faster(ship: Any) -> None:
    """A measured tile is taken in any case."""
    ship(_file())
    assert tile_for(PROBLEM, CPU) != SQUARE
    assert not faster_than_torch(PROBLEM, CPU)
    for ratio, low, faster in (
        (0.9, 0.89, False),
        (1.01, 1.005, False),  # Certain, but not worth it.
        (1.019, 1.018, False),
        (1.02, 1.001, True),
        (1.03, 1.01, True),
        (1.03, 1.0, False),
        (1.05, 0.99, False),  # Maybe luck.
    ):
        ship(_file(_entry(vs_torch=ratio, low=low)))
        assert tile_for(PROBLEM, CPU) == SQUARE
        assert faster_than_torch(PROBLEM, CPU) is faster, (ratio, low)


def test_an_entry_counts_for_its_own_problem_only(ship: Any) -> None:
    ship(_file(_entry()))
    others = [
        *(replace(PROBLEM, m=m) for m in (4097, 2048)),
        *(replace(PROBLEM, **{name: 4112}) for name in ("n", "k")),
        *(replace(PROBLEM, **{name: E5M2}) for name in ("a_dtype", "b_dtype")),
        replace(PROBLEM, scaling=Scaling.ROWWISE),
        _problem(4096, 4096, 4096, Scaling.TENSORWISE, False),
        replace(PROBLEM, out_dtype=torch.float32),
    ]
    assert not any(faster_than_torch(problem, CPU) for problem in others)
    assert all(faster_than_torch(replace(PROBLEM, m=m), CPU) for m in (2049, 3000, 4080, 4096))
    problems = [_problem(4096, 4096, 4096, which, fast) for which in FLOAT32_SCALINGS for fast in (True, False)]
    for scaling in (Scaling.BLOCKWISE, Scaling.BLOCKWISE_1D):  # Both speeds are one kernel.
        ship(_file(_entry(scaling=scaling.value, fast_accumulation=False)))
        assert [faster_than_torch(problem, CPU) for problem in problems] == [
            which is scaling for which in FLOAT32_SCALINGS for _ in (True, False)
        ]
    # A table of an older version may name a tile that no longer exists.
    ship(_file(_entry(tile=Tile(rows=128, columns=128, depth=64, warps=4, stages=7, group=8))))
    assert tile_for(PROBLEM, CPU) in candidates(PROBLEM, HOPPER)
    assert not faster_than_torch(PROBLEM, CPU)


def test_tables() -> None:
    for text, problem in (
        ('{"format": 1, "entries": []}', "format 2, found 1"),
        ("{}", "found None"),
        ('{"format": 2}', "bad entry"),
        ('{"format": 2, "entries": [{"tile": {}}]}', "bad entry"),
        ('{"format": 2, "entries": [{"tile": {"rows": 1, "new": 2}}]}', "bad entry"),
    ):
        with pytest.raises(ValueError, match=problem):
            TileTable.from_json(text)
    assert TileTable.of("No such GPU").entry(key_of(PROBLEM)) is None
    assert [bucket(m) for m in (0, 1, 2, 3, 4095, 4096, 4097)] == [1, 1, 2, 4, 4096, 4096, 8192]
    assert file_name("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3.json"
    assert file_name("NVIDIA H200") in [path.name for path in SHIPPED]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_tables_hold_what_was_measured(path: Path) -> None:
    content = json.loads(path.read_text())
    assert path.name == file_name(content["device"])
    if content["measured"] is None:
        assert content["commit"] is None
        assert content["entries"] == []
    else:
        assert content["commit"] or content["run"], "of which code?"
        assert {"torch", "triton", "cuda"} <= set(content["versions"])
    TileTable.of(content["device"])
    for one in content["entries"]:
        entry = Entry(**{**one, "tile": Tile(**one["tile"])})
        problem = _problem(entry.m, entry.n, entry.k, Scaling(entry.scaling), entry.fast_accumulation)
        assert entry.m == bucket(entry.m)
        assert entry.faster
        assert entry.low <= entry.vs_torch <= entry.high
        assert any(entry.tile in candidates(problem, capability) for capability in (HOPPER, (10, 0), (12, 0)))


def test_the_tuner_measures_tiles_near_the_best() -> None:
    for scaling in FLOAT32_SCALINGS:
        problem = _problem(8192, 6144, 4096, scaling, True)
        near = tune_matmuls.near_best(problem, CPU)
        assert best_of(candidates(problem, HOPPER), problem, processors(CPU)) in near
        assert SMALL not in near, "it reads more than twice as much"


class Tuner:
    """The tuner on a fake GPU. ``outcomes``: successive ratios, or (ratio, lower end), or exceptions to raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
        self.out = out
        self.outcomes: Iterator[Any] = iter(())
        self.seconds: list[float] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
        monkeypatch.setattr(tune_matmuls, "stopwatch_of", lambda device: None)
        monkeypatch.setattr(tune_matmuls, "measured", self._measured)

    def _measured(self, product: Product, seconds: float, stopwatch: Any) -> Entry:
        self.seconds.append(seconds)
        outcome = next(self.outcomes, RuntimeError("no such product"))
        if isinstance(outcome, BaseException):
            raise outcome
        ratio, low = outcome if isinstance(outcome, tuple) else (outcome, outcome - 0.005)
        p = product
        problem = Problem(p.m, p.n, p.k, p.scaling, p.fast, p.a_dtype, p.b_dtype, torch.bfloat16)
        return Entry(*key_of(problem), candidates(problem, HOPPER)[0], ratio, low, 2 * ratio - low)

    def run(self, *outcomes: Any, commit: str | None = "abc", seconds: float = 200.0) -> int:
        self.outcomes = iter(outcomes)
        options = ["--tokens", "4096", "--kinds", "tensorwise", "--out", str(self.out), "--seconds", str(seconds)]
        return tune_matmuls.main([*options, *(["--commit", commit] if commit else [])])

    @property
    def ratios(self) -> list[float]:
        """The ratios in the written table, in ascending order."""
        test_shipped_tables_hold_what_was_measured(self.out)
        return sorted(entry["vs_torch"] for entry in json.loads(self.out.read_text())["entries"])


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tuner:
    return Tuner(monkeypatch, tmp_path / "nvidia-h200.json")


def test_the_tuner_writes_what_is_surely_faster(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table is of one run. One that is ended keeps what it has measured; one without a product changes nothing."""

    def commit() -> str | None:
        return json.loads(tuner.out.read_text())["commit"]

    assert tuner.run((1.01, 1.005), RuntimeError("refused"), (1.05, 0.99), (1.03, 1.01), 0.97) == 0
    assert (tuner.ratios, commit()) == ([1.03], "abc")
    assert tuner.run((1.0, 0.99), (1.0, 0.99), (1.0, 0.99), (1.0, 0.99)) == 0
    assert tuner.ratios == [], "the product is no longer faster"
    assert tuner.run(1.03, 1.04, KeyboardInterrupt(), commit="def") == 130
    assert (tuner.ratios, commit()) == ([1.03, 1.04], "def")
    with pytest.raises(SystemExit):
        tuner.run(1.05, SystemExit())
    assert tuner.ratios == [1.05]
    assert tuner.run() == 1
    assert "every product was skipped" in capsys.readouterr().err
    assert tuner.ratios == [1.05]
    monkeypatch.setenv("PATH", "")
    assert tuner.run(1.03, commit=None) == 0
    assert commit() is None, "without git it is not known"


@pytest.mark.parametrize(("seconds", "count"), [(35.0, 3), (480.0, 19)])
def test_the_tuner_ends_in_time(
    seconds: float, count: int, tuner: Tuner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After 200 s, whatever it is given."""
    clock = itertools.count(0.0, 10.0)  # Each look at the clock is 10 s later.
    monkeypatch.setattr(tune_matmuls, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert tuner.run(*[1.5] * 99, seconds=seconds) == 0
    assert len(tuner.ratios) == count
    assert f"out of time after {count} of " in capsys.readouterr().out
    assert all(0 < one <= 2 for one in tuner.seconds)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_the_tuner_runs_at_tiny_sizes_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune_matmuls, "SMOKE", Layer("smoke", 48, 32))  # torch's FP8 products are slow on a CPU.
    out = tmp_path / "cpu.json"
    assert tune_matmuls.main(["--out", str(out)]) == 2
    assert capsys.readouterr().err == "tune_matmuls: no GPU found; nothing was measured or written\n"
    assert not out.exists()
    with pytest.raises(SystemExit):
        tune_matmuls.main(["--smoke", "--commit", "abc"])
    assert tune_matmuls.main(["--smoke", "--kinds", "tensorwise", "--commit", "abc", "--out", str(out)]) == 0
    assert capsys.readouterr().out.count(" TFLOP/s ") == 3
    test_shipped_tables_hold_what_was_measured(out)
