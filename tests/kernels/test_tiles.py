"""The choice of a tile for a product: the formula, the shipped tables, and the tuner that writes them."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8dist_kernels.reference.matmuls import Scaling
from fp8dist_kernels.triton import tables
from fp8dist_kernels.triton.tables import Entry, Tile, TileTable, bucket, file_name
from fp8dist_kernels.triton.tiles import Problem, best_of, candidates, faster_than_torch, tile_for
from scripts.benchmarks.gpu import tune_matmuls
from scripts.benchmarks.llama_shapes import Shape

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted(Path(tables.__file__).with_name("tables").glob("*.json"))
HOPPER, H200_PROCESSORS = (9, 0), 132
CPU = torch.device("cpu")
SQUARE = Tile(rows=128, columns=128, depth=128, warps=8, stages=5, group=8)
PROBLEM = Problem(4096, 4096, 4096, Scaling.TENSORWISE, True)


def _of_hopper(m: int, n: int, k: int, scaling: Scaling = Scaling.TENSORWISE, fast: bool = True) -> Tile:
    problem = Problem(m, n, k, scaling, fast)
    return best_of(candidates(problem, HOPPER), problem, H200_PROCESSORS)


# The formula -----------------------------------------------------------------------------------------


def test_large_products_get_the_widest_tile() -> None:
    layers = ((4096, 6144), (4096, 28672), (14336, 4096), (8192, 8192))
    for tokens, (features, outputs), fast in itertools.product((4096, 8192, 32768), layers, (True, False)):
        for m, n, k in ((tokens, outputs, features), (tokens, features, outputs), (outputs, features, tokens)):
            for scaling in Scaling:
                tile = _of_hopper(m, n, k, scaling, fast)
                assert (tile.rows, tile.columns) == (128, 128 if scaling is Scaling.BLOCKWISE_1D else 256)


def test_small_products_are_spread_over_the_processors() -> None:
    """Large tiles would leave most multiprocessors idle."""
    for m, n in ((64, 4096), (16, 8192), (1, 1024), (512, 512)):
        tile = _of_hopper(m, n, 4096)
        assert (tile.rows, tile.columns) == (64, 64)


def test_with_no_other_tile_the_busiest_program_reads_less() -> None:
    generator = random.Random(0)
    for _ in range(200):
        m, n, k = generator.randint(1, 9000), 16 * generator.randint(1, 900), 16 * generator.randint(1, 900)
        for scaling in Scaling:
            problem = Problem(m, n, k, scaling, True)
            chosen = best_of(candidates(problem, HOPPER), problem, H200_PROCESSORS)
            assert _busiest(problem, chosen) == min(_busiest(problem, tile) for tile in candidates(problem, HOPPER))


def _busiest(problem: Problem, tile: Tile) -> int:
    """Return the operand bytes that the busiest program reads; writing a tile counts as two steps."""
    tiles = math.ceil(problem.m / tile.rows) * math.ceil(problem.n / tile.columns)
    mine = max(len(range(program, tiles, H200_PROCESSORS)) for program in range(H200_PROCESSORS))
    return mine * (tile.rows + tile.columns) * 128 * (math.ceil(problem.k / 128) + 2)


def test_tiles_are_what_the_kernels_can_do() -> None:
    for capability in ((8, 9), (9, 0), (10, 0), (10, 3), (12, 0)):
        for scaling, fast in itertools.product(Scaling, (True, False)):
            chosen = candidates(Problem(4096, 4096, 4096, scaling, fast), capability)
            assert len(set(chosen)) == len(chosen) > 0
            for tile in chosen:
                assert tile.depth == 128  # The block size of scales and of slow accumulation.
                assert tile.rows >= 64  # The minimum of wgmma.
                assert not scaling.in_blocks or tile.columns in (64, 128, 256)
                assert scaling is not Scaling.BLOCKWISE_1D or tile.columns <= 128  # Wider tiles spill registers.


def test_the_choice_is_a_function() -> None:
    for m in (1, 100, 4096):
        problem = Problem(m, 4096, 4096, Scaling.TENSORWISE, True)
        again = Problem(m, 4096, 4096, Scaling.TENSORWISE, True)
        assert tile_for(problem, CPU) == tile_for(again, CPU)


# Tables ----------------------------------------------------------------------------------------------


def _file(*entries: Entry, **other: Any) -> str:
    return json.dumps({"format": 1, "device": "x", "entries": [entry.described() for entry in entries], **other})


def _entry(m: int = 4096, tile: Tile = SQUARE, vs_torch: float = 1.02, **other: Any) -> Entry:
    return Entry(**{"scaling": "tensorwise", "fast_accumulation": True, "m": m, "n": 4096, "k": 4096, "tile": tile,
                    "vs_torch": vs_torch, **other})  # fmt: skip


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


def test_a_measured_tile_is_taken(ship: Any) -> None:
    ship(_file())
    assert tile_for(PROBLEM, CPU) != SQUARE
    assert not faster_than_torch(PROBLEM, CPU)
    ship(_file(_entry()))
    assert tile_for(PROBLEM, CPU) == SQUARE
    assert faster_than_torch(PROBLEM, CPU)


@pytest.mark.parametrize(("ratio", "faster"), [(0.999, False), (1.0, True), (1.5, True)])
def test_auto_takes_triton_where_it_is_at_least_as_fast(ship: Any, ratio: float, faster: bool) -> None:
    ship(_file(_entry(vs_torch=ratio)))
    assert tile_for(PROBLEM, CPU) == SQUARE
    assert faster_than_torch(PROBLEM, CPU) is faster


def test_an_entry_counts_for_its_own_problem_only(ship: Any) -> None:
    ship(_file(_entry()))
    others = [
        Problem(4097, 4096, 4096, Scaling.TENSORWISE, True),
        Problem(2048, 4096, 4096, Scaling.TENSORWISE, True),
        Problem(4096, 4112, 4096, Scaling.TENSORWISE, True),
        Problem(4096, 4096, 4112, Scaling.TENSORWISE, True),
        Problem(4096, 4096, 4096, Scaling.ROWWISE, True),
        Problem(4096, 4096, 4096, Scaling.TENSORWISE, False),
    ]
    assert not any(faster_than_torch(problem, CPU) for problem in others)
    assert all(
        faster_than_torch(Problem(m, 4096, 4096, Scaling.TENSORWISE, True), CPU) for m in (2049, 3000, 4080, 4096)
    )


@pytest.mark.parametrize("scaling", [Scaling.BLOCKWISE, Scaling.BLOCKWISE_1D])
def test_block_scaled_products_have_one_speed(ship: Any, scaling: Scaling) -> None:
    ship(_file(_entry(scaling=scaling.value, fast_accumulation=False)))
    problems = [Problem(4096, 4096, 4096, which, fast) for which in Scaling for fast in (True, False)]
    assert [problem for problem in problems if faster_than_torch(problem, CPU)] == [
        Problem(4096, 4096, 4096, scaling, fast) for fast in (True, False)
    ]


def test_a_tile_that_is_not_shipped_is_not_taken(ship: Any) -> None:
    """A table of an older version may name a tile that no longer exists."""
    unknown = Tile(rows=128, columns=128, depth=64, warps=4, stages=7, group=8)
    ship(_file(_entry(tile=unknown)))
    assert tile_for(PROBLEM, CPU) in candidates(PROBLEM, HOPPER)
    assert not faster_than_torch(PROBLEM, CPU)


def test_bad_tables_are_refused() -> None:
    cases = [
        ('{"format": 2, "entries": []}', "format 1, found 2"),
        ("{}", "found None"),
        ('{"format": 1}', "bad entry"),
        ('{"format": 1, "entries": [{"tile": {}}]}', "bad entry"),
        ('{"format": 1, "entries": [{"tile": {"rows": 1, "new": 2}}]}', "bad entry"),
    ]
    for text, problem in cases:
        with pytest.raises(ValueError, match=problem):
            TileTable.from_json(text)


def test_a_device_without_a_table_has_an_empty_one() -> None:
    assert TileTable.of("No such GPU").entry(4096, 4096, 4096, "tensorwise", True) is None


def test_buckets_and_names() -> None:
    assert [bucket(m) for m in (0, 1, 2, 3, 4095, 4096, 4097)] == [1, 1, 2, 4, 4096, 4096, 8192]
    assert file_name("NVIDIA H200") == "nvidia-h200.json"
    assert file_name("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3.json"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_tables_hold_what_was_measured(path: Path) -> None:
    content = json.loads(path.read_text())
    assert path.name == file_name(content["device"])
    if not content["entries"]:
        assert content["measured"] is None
        assert content["commit"] is None
    else:
        assert content["measured"]
        assert content["commit"] or content["run"], "of which code?"
        assert {"torch", "triton", "cuda"} <= set(content["versions"])
    TileTable.of(content["device"])
    for one in content["entries"]:
        entry = Entry(**{**one, "tile": Tile(**one["tile"])})
        problem = Problem(entry.m, entry.n, entry.k, Scaling(entry.scaling), entry.fast_accumulation)
        assert entry.m == bucket(entry.m)
        assert entry.vs_torch > 0
        assert any(entry.tile in candidates(problem, capability) for capability in (HOPPER, (10, 0), (12, 0)))


def test_the_h200_has_a_file() -> None:
    assert "nvidia-h200" in [path.stem for path in SHIPPED]


# The tuner -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure for minutes")
def test_the_tuner_needs_a_gpu(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    command = [sys.executable, "-m", "scripts.benchmarks.gpu.tune_matmuls", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no GPU found" in done.stderr
    assert not out.exists()


class Tuner:
    """The tuner on a fake GPU. ``outcomes``: the successive results, a ratio or an exception to raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
        self.out = out
        self.outcomes: Iterator[float | BaseException] = iter(())
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
        monkeypatch.setattr(tune_matmuls, "stopwatch_of", lambda device: None)
        monkeypatch.setattr(tune_matmuls, "measured", self._measured)

    def _measured(self, shape: Shape, scaling: Scaling, fast: bool, repeats: int, stopwatch: Any) -> dict[str, Any]:
        outcome = next(self.outcomes, RuntimeError("no such product"))
        if isinstance(outcome, BaseException):
            raise outcome
        tile = candidates(Problem(shape.m, shape.n, shape.k, scaling, fast), HOPPER)[0]
        return Entry(scaling.value, fast, bucket(shape.m), shape.n, shape.k, tile, outcome).described()

    def run(
        self,
        *outcomes: float | BaseException,
        commit: str | None = "abc",
        scaling: str = "tensorwise",
        run: str | None = None,
    ) -> int:
        self.outcomes = iter(outcomes)
        options = ["--tokens", "4096", "--scalings", scaling, "--out", str(self.out)]
        options += ["--run", run] if run else []
        return tune_matmuls.main([*options, *(["--commit", commit] if commit else [])])

    @property
    def ratios(self) -> list[float]:
        """The ratios in the written table, in ascending order."""
        test_shipped_tables_hold_what_was_measured(self.out)
        return sorted(entry["vs_torch"] for entry in json.loads(self.out.read_text())["entries"])


@pytest.fixture
def tuner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tuner:
    return Tuner(monkeypatch, tmp_path / "nvidia-h200.json")


def test_the_tuner_writes_a_table_that_can_be_shipped(tuner: Tuner) -> None:
    assert tuner.run(1.01, RuntimeError("refused"), 0.97) == 0
    assert tuner.ratios == [0.97, 1.01]
    assert json.loads(tuner.out.read_text())["commit"] == "abc"


def test_without_git_the_commit_is_unknown_and_entries_are_of_a_run(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_git(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", no_git)
    assert tuner.run(1.01, commit=None, run="tree-1") == 0
    assert json.loads(tuner.out.read_text())["commit"] is None
    assert tuner.run(1.02, scaling="rowwise", commit=None, run="tree-1") == 0
    assert tuner.ratios == [1.01, 1.02]
    assert tuner.run(1.03, scaling="rowwise", commit=None, run="tree-2") == 0
    assert tuner.ratios == [1.03]
    assert "drops 2 entries of commit None" in capsys.readouterr().err


def test_what_the_tuner_measured_before_it_was_ended_is_there(tuner: Tuner) -> None:
    assert tuner.run(1.01, 1.02, KeyboardInterrupt()) == 130
    assert tuner.ratios == [1.01, 1.02]
    with pytest.raises(SystemExit):
        tuner.run(1.03, SystemExit())
    assert tuner.ratios == [1.02, 1.03], "the first was measured again"


def test_a_tuner_without_a_product_leaves_the_table_alone(tuner: Tuner, capsys: pytest.CaptureFixture[str]) -> None:
    assert tuner.run(1.01) == 0
    before = tuner.out.read_text()
    assert tuner.run() == 1
    assert "every product was skipped" in capsys.readouterr().err
    assert tuner.out.read_text() == before


def test_a_table_is_of_one_commit_and_its_versions(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tuner.run(1.01) == 0
    assert tuner.run(1.02, scaling="rowwise") == 0
    assert tuner.ratios == [1.01, 1.02]
    assert tuner.run(1.03, scaling="rowwise", commit="def-dirty") == 0
    assert tuner.ratios == [1.03]
    assert "drops 2 entries of commit abc" in capsys.readouterr().err
    assert tuner.run(1.04, commit="def-dirty") == 0
    assert tuner.ratios == [1.04], "the changed tree may have changed again"
    monkeypatch.setattr(tune_matmuls, "versions", lambda: {"torch": "99", "triton": "99", "cuda": "99"})
    assert tuner.run(1.05, scaling="rowwise", commit="def-dirty") == 0
    assert tuner.ratios == [1.05]
