"""The doctor: its report on this machine, on every kind of failure, and with --burn on each wrong bit."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp8dist.checks.known_calls import ProductOf
from fp8dist.cli import doctor
from fp8dist.cli.burn import Burned, burn, burned_across_ranks, computations_on
from fp8dist.cli.doctor import Probe, examine
from fp8dist.cli.exit_codes import CONSISTENT, DIVERGED, USAGE
from fp8dist.cli.main import main
from fp8dist_kernels.backends import why_not_triton
from tests.support.answers import flipping
from tests.support.forked import ROOT
from tests.support.ranks import on_ranks
from tests.support.slurm import free_ports
from tests.support.torchrun import torchrun


def _quiet(monkeypatch: pytest.MonkeyPatch, *checks: str) -> None:
    """Skip the all-reduce, which takes seconds, and other checks."""
    for check in ("_all_reduces", *checks):
        monkeypatch.setattr(doctor, check, lambda *_: [])


def _found(*given: object, **options: Any) -> dict[str, Probe]:
    """Examine this machine, and return what is found by name."""
    return {line.name: line for line in examine(*given, **options).observations}


@pytest.mark.slow
def test_this_machine_is_healthy() -> None:
    examination = examine()
    assert examination.healthy, str(examination)
    found = {line.name: line for line in examination.observations}
    assert found["torch"].detail.startswith(torch.__version__)
    products = ("matmul e4m3 x e4m3", "matmul e5m2 x e4m3")
    for name in (
        "cast to e4m3",
        "cast to e5m2",
        "gloo",
        "cast to e5m2, Triton",
        *(f"{one}, Triton" for one in products),
    ):
        assert found[name].outcome == "ok"
    for name in products:
        assert found[name].outcome == "ok" or torch.cuda.is_available()
    assert found["all-reduce, 2 local ranks"].detail.startswith("int32 MAX over gloo, NaN kept")
    assert found.get("GPU", found.get("cuda:0")) is not None
    assert ("all-reduce, 1 rank" in found) == torch.cuda.is_available()
    assert json.loads(json.dumps(examination.as_dict()))["healthy"] is True
    lines = str(examination).splitlines()
    assert len(lines) == len(examination.observations)
    assert len({line.index(o.outcome, 15) for line, o in zip(lines, examination.observations)}) == 1


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    _quiet(monkeypatch)
    given = {"FP8DIST_BACKEND": "torhc", "FP8DIST_CHECK_POLICY": "warn", "FP8DIST_CHECK_POLCY": "warn", "PATH": "x"}
    examination = examine(given)
    found = {line.name: line for line in examination.observations}
    assert found["FP8DIST_CHECK_POLICY"] == Probe("FP8DIST_CHECK_POLICY", "ok", "warn")
    assert found["FP8DIST_BACKEND"].outcome == "failed"
    assert "torhc" in found["FP8DIST_BACKEND"].detail
    assert "no such setting (did you mean 'FP8DIST_CHECK_POLICY'?)" in found["FP8DIST_CHECK_POLCY"].detail
    assert "PATH" not in found
    assert not examination.healthy


def test_triton_may_be_missing_and_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _quiet(monkeypatch)
    why_not_triton.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(doctor.importlib.util, "find_spec", lambda name: None)
        examination = examine({})
    found = {line.name: line for line in examination.observations}
    assert found["triton"] == Probe("triton", "absent", "not installed")
    assert found["Triton kernels"] == Probe("Triton kernels", "absent", "Triton is not installed")
    assert examination.healthy
    why_not_triton.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(doctor, "_device", lambda: torch.device("cpu"))
        patched.delenv("TRITON_INTERPRET", raising=False)
        kernels = _found({})["Triton kernels"]
    why_not_triton.cache_clear()
    assert kernels.outcome == "absent"
    assert kernels.detail.startswith("it needs a GPU")


def test_nccl_is_asked_for_its_version_where_there_is_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    for gpu, said in ((False, "or no GPU"), (True, "2.27.3")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        assert said in {seen.name: seen.detail for seen in doctor._backends()}["nccl"]


def test_trainers_are_those_that_were_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = json.loads((ROOT / "scripts/results/stacks.json").read_text())
    known = ("stack", "python", "torch", "passed", "failed", "date")
    ran = {name: version for row in rows for name, version in row.items() if name not in known}
    assert all(row["failed"] == 0 < row["passed"] for row in rows)
    assert {name: version for name, version in ran.items() if name in doctor.TESTED} == doctor.TESTED
    assert all(row.keys() & doctor.TESTED.keys() for row in rows)  # Each stack has a package that the doctor knows.
    installed = dict(zip(doctor.TESTED, [None, *doctor.TESTED.values()]))  # The second has the first one's version.

    def version(name: str) -> str:
        if installed[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    first, second, *_ = doctor._trainers()
    assert first == Probe("transformers", "absent", "tested with 5.23.0")
    assert second == Probe("accelerate", "ok", "5.23.0, tested with 1.15.0")


@pytest.mark.parametrize(
    "name", ["_versions", "_trainers", "_devices", "_casts", "_products", "_fused", "_backends", "_settings"]
)
def test_it_never_raises(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _quiet(monkeypatch)

    def breaks(*_: object) -> Iterable[Probe]:
        yield Probe("first", "ok", "seen before")
        raise RuntimeError("CUDA error:\n  out of luck")

    monkeypatch.setattr(doctor, name, breaks)
    examination = examine({})
    assert not examination.healthy
    assert next(o for o in examination.observations if o.outcome == "failed").detail == (
        "RuntimeError: CUDA error: out of luck"
    )
    assert "first" in {line.name for line in examination.observations}


def test_wrong_casts_and_products_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    _quiet(monkeypatch)
    cast, product = doctor.saturating_cast, doctor.matmul_torch

    def truncates(x: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
        return cast(torch.where(x == 19.0, 18.0, x), *rest)  # type: ignore[arg-type]

    def off_by_one(*operands: object) -> torch.Tensor:
        found = product(*operands)  # type: ignore[arg-type]
        found[3, 5] += 1
        return found

    monkeypatch.setattr(doctor, "saturating_cast", truncates)
    monkeypatch.setattr(doctor, "matmul_torch", off_by_one)
    found = _found({})
    assert "became [0.0, -0.3125, 16.0, 18.0," in found["cast to e4m3"].detail
    assert found["matmul e5m2 x e4m3"].detail.endswith(f": 1 of {32 * 48} are wrong")


def _reduce(monkeypatch: pytest.MonkeyPatch, program: str, timeout: float) -> tuple[Probe, float]:
    monkeypatch.setattr(doctor, "_RANK_PROGRAM", program)
    start = time.monotonic()
    (found,) = doctor._all_reduces({"PATH": os.environ["PATH"]}, timeout)
    return found, time.monotonic() - start


@pytest.mark.slow
def test_an_all_reduce_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = f"import os, time; open('{tmp_path}/' + str(os.getpid()), 'w'); time.sleep(600)"
    found, seconds = _reduce(monkeypatch, program, 1.0)
    assert found == Probe("all-reduce, 2 local ranks", "failed", "no answer within 1 s")
    assert seconds < 10
    for pid in os.listdir(tmp_path):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


@pytest.mark.slow
def test_a_rank_that_fails_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys, time\nif sys.argv[2] == '1': raise OSError('no network')\ntime.sleep(600)"
    found, seconds = _reduce(monkeypatch, program, 60.0)
    assert found == Probe("all-reduce, 2 local ranks", "failed", "OSError: no network")
    assert seconds < 20
    found, _ = _reduce(monkeypatch, "import os; os.abort()", 60.0)
    assert found.detail == "ended with exit code -6"
    found, _ = _reduce(monkeypatch, 'print(\'{"backend": "gloo", "right": false, "result": "[0.0]"}\')', 60.0)
    assert found.detail == "over gloo: wrong result [0.0]"
    monkeypatch.setattr(doctor, "_RANK_PROGRAM", "pass")  # It says nothing.
    assert _found({"PATH": os.environ["PATH"]})["all-reduce"].outcome == "failed"


@pytest.mark.long
def test_under_torchrun(tmp_path: Path) -> None:
    """The all-reduce runs over the job's ranks, twice in one job."""
    script = tmp_path / "job.py"
    script.write_text(
        "import json, os\nfrom fp8dist.cli.doctor import examine\n"
        f"found = [examine().as_dict() for _ in range(2)]\n"
        f"json.dump(found, open({str(tmp_path)!r} + '/' + os.environ['RANK'], 'w'))\n"
    )
    done = torchrun(2, str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        for found in json.loads((tmp_path / str(rank)).read_text()):
            assert found["healthy"], found
            (line,) = (line for line in found["observations"] if line["name"].startswith("all-reduce"))
            assert line["name"] == "all-reduce, 2 ranks"
    done = torchrun(2, "-m", "fp8dist", "doctor", "--burn", "0.3", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    seen = {line["name"]: line for line in json.loads(done.stdout)["observations"]}
    assert seen["burn on cpu"]["outcome"] == "ok"
    assert seen["burn, all ranks"]["detail"] == "consistent (43 computations)"


@pytest.mark.long
@pytest.mark.nightly
def test_a_job_whose_other_rank_never_comes() -> None:
    (port,) = free_ports(1)
    job = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    found = _found({**os.environ, **job}, timeout=4.0)
    assert found["all-reduce, 2 ranks"].outcome == "failed"


CPU = torch.device("cpu")
OUT, IN, TOKENS = 384, 256, 256
FPROPS = 8
"""Products of inputs: with a scale per tensor, row, block and MX block, and each of them with exact sums."""


@pytest.mark.slow
def test_a_sound_device_has_nothing_wrong_with_any_recipe_and_gemm() -> None:
    found = computations_on(CPU)
    names = [one.name(CPU) for one in found]
    assert len(set(names)) == len(found) == 43
    for recipe in ("DelayedScaling", "CurrentScaling", "RowwiseScaling", "BlockScaling", "MXFP8Scaling"):
        assert sum(recipe in name for name in names) == 3
    products = [one for one in found if isinstance(one, ProductOf)]
    assert {one.gemm for one in products} == {"fprop", "dgrad", "wgrad"}
    assert sum(one.gemm == "fprop" for one in products) == FPROPS
    assert sum(one.exact for one in products) == len(products) // 2
    burned = burn(CPU, 0.05)
    assert (burned.wrong, burned.differences) == (0, [])
    assert burned.seconds >= 0.05
    assert burned.repetitions % 43 == 0 < burned.repetitions
    text = f"{burned.repetitions:,} casts and products of 43 kinds in {burned.seconds:.1f} s"
    assert burned.summary.startswith(text)
    assert burned.summary.endswith(" per s, none wrong")


@pytest.mark.slow
def test_one_wrong_bit_at_one_time_is_seen() -> None:
    with flipping("matmul", (TOKENS, IN), byte=2 * (5 * OUT + 7), bit=1, when=FPROPS + 1):
        burned = burn(CPU, 0.01)
    assert burned.wrong == 1
    (difference,) = burned.differences
    kind = "fprop 256x384x256 e4m3 e4m3 bfloat16, fast accumulation, tensorwise, reference"
    assert difference.startswith(f"{kind} differs from the first time, repetition 2: result at [5, 7]: ")
    assert difference.endswith(f", 1 of {TOKENS * OUT} elements")
    right, wrong = (int(part[: part.index(")")], 16) for part in reversed(difference.split("(")[1:]))
    assert right ^ wrong == 2
    assert burned.summary.endswith(" per s, 1 wrong")


WRONG = [
    ("quantize_rowwise", (TOKENS, IN), 3, "columns_inv_scale at [97, 0]", "cast of input 256x256 bfloat16, Row"),
    ("matmul", (OUT, TOKENS), 0, "result at [0, 194]", "wgrad 384x256x256 e5m2 e4m3 bfloat16, exact"),
    ("quantize", (OUT, IN), 1, "columns at [1, 4]", "cast of weight 384x256 bfloat16, "),
    ("quantize_blocks", (TOKENS, OUT), 0, "rows at [1, 4]", "cast of grad_output 256x384 bfloat16, Block"),
]


@pytest.mark.slow
def test_what_is_always_wrong_differs_from_plain_torch() -> None:
    with contextlib.ExitStack() as stack:
        for op, shape, result, _, _ in WRONG:
            stack.enter_context(flipping(op, shape, byte=388, bit=6, result=result))
        burned = burn(CPU, 0.01)
    for op, _, _, where, exact in WRONG:
        found = [text for text in burned.differences if f" differs from plain torch, repetition 1: {where}: " in text]
        assert any(text.startswith(exact) for text in found)
        # Other products have no plain twin with the same bits, and are equal each time.
        assert len(found) == {"quantize": 2, "matmul": 5}.get(op, 1)
    assert len(burned.differences) == burned.wrong == 9


@pytest.mark.slow
def test_the_exit_status_says_if_something_was_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _quiet(monkeypatch, "_settings", "_fused", "_trainers")
    with monkeypatch.context() as patched:
        patched.setattr(doctor, "burn", lambda device, seconds: Burned(device, 43, 86, seconds))
        assert main(["doctor", "--burn", "0.01", "--json"]) == CONSISTENT
    (line,) = [o for o in json.loads(capsys.readouterr().out)["observations"] if o["name"] == "burn on cpu"]
    assert line["outcome"] == "ok"
    with flipping("quantize_blocks", (TOKENS, IN), 0, 0):
        assert main(["doctor", "--burn", "0.01"]) == DIVERGED
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("burn on cpu")]
    assert ["failed" in line for line in lines] == [True, True]
    assert "cast of input 256x256 bfloat16, BlockScaling e4m3, torch differs from plain torch" in lines[0]
    assert main(["doctor", "--json"]) == CONSISTENT
    assert "burn" not in capsys.readouterr().out
    for given in ("0", "-1", "nan", "inf", "ten"):
        with pytest.raises(SystemExit) as caught:
            main(["doctor", "--burn", given])
        assert caught.value.code == USAGE
        assert f"argument --burn: must be a number of seconds above 0, got '{given}'" in capsys.readouterr().err


def test_all_gpus_are_burned_that_have_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0) if device.index == 1 else (9, 0))
    monkeypatch.setattr(doctor, "burn", lambda device, seconds: Burned(device, 34, 68, seconds))
    text = "68 casts and products of 34 kinds in 2.0 s, 34 per s, none wrong"
    assert list(doctor._burned({}, 2.0)) == [
        Probe("burn on cuda:1", "absent", "it has no FP8 tensor cores"),
        Probe("burn on cuda:0", "ok", text),
        Probe("burn on cuda:2", "ok", text),
    ]
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert [seen.name for seen in doctor._burned({"WORLD_SIZE": "8"}, 2.0)] == ["burn on cuda:2"]
    assert computations_on(torch.device("cuda", 1)) == []


@pytest.mark.slow
@on_ranks(3)
def test_ranks_are_compared() -> None:
    bad = flipping("matmul", (TOKENS, IN), 0, 3) if dist.get_rank() == 2 else contextlib.nullcontext()
    with bad:
        report = burned_across_ranks(CPU)
    assert dict(report.compared) == {"computation": 43}
    assert [(f.name.split()[0], f.ranks, f.reference_rank) for f in report.findings] == [("fprop", (2,), 0)] * FPROPS
