"""The doctor: its report on this machine, and on every kind of failure."""

from __future__ import annotations

import importlib.metadata
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from fp8dist.cli import doctor
from fp8dist.cli.doctor import Examination, Probe, examine
from fp8dist_kernels.backends import why_not_triton
from tests.support.forked import ROOT
from tests.support.slurm import free_ports
from tests.support.torchrun import torchrun


def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the all-reduce, which takes seconds."""
    monkeypatch.setattr(doctor, "_all_reduces", lambda *_: [])


def _by_name(examination: Examination) -> dict[str, Probe]:
    return {line.name: line for line in examination.observations}


@pytest.mark.slow
def test_this_machine_is_healthy() -> None:
    examination = examine()
    assert examination.healthy, str(examination)
    found = _by_name(examination)
    assert found["torch"].detail.startswith(torch.__version__)
    for name in ("cast to e4m3", "cast to e5m2", "gloo"):
        assert found[name].outcome == "ok"
    for name in ("cast to e5m2, Triton", "matmul e4m3 x e4m3, Triton", "matmul e5m2 x e4m3, Triton"):
        assert found[name].outcome == "ok"
    for name in ("matmul e4m3 x e4m3", "matmul e5m2 x e4m3"):
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
    found = _by_name(examine(given))
    assert found["FP8DIST_CHECK_POLICY"] == Probe("FP8DIST_CHECK_POLICY", "ok", "warn")
    assert found["FP8DIST_BACKEND"].outcome == "failed"
    assert "torhc" in found["FP8DIST_BACKEND"].detail
    assert "no such setting (did you mean 'FP8DIST_CHECK_POLICY'?)" in found["FP8DIST_CHECK_POLCY"].detail
    assert "PATH" not in found
    assert not examine(given).healthy


def test_triton_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    _quiet(monkeypatch)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    why_not_triton.cache_clear()
    examination = examine({})
    why_not_triton.cache_clear()
    found = _by_name(examination)
    assert found["triton"] == Probe("triton", "absent", "not installed")
    assert found["Triton kernels"] == Probe("Triton kernels", "absent", "Triton is not installed")
    assert examination.healthy


def test_triton_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _quiet(monkeypatch)
    monkeypatch.setattr(doctor, "_device", lambda: torch.device("cpu"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    why_not_triton.cache_clear()
    found = _by_name(examine({}))["Triton kernels"]
    why_not_triton.cache_clear()
    assert found.outcome == "absent"
    assert found.detail.startswith("it needs a GPU")


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
    assert "first" in _by_name(examination)


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
    found = _by_name(examine({}))
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


def test_a_rank_that_fails_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys, time\nif sys.argv[2] == '1': raise OSError('no network')\ntime.sleep(600)"
    found, seconds = _reduce(monkeypatch, program, 60.0)
    assert found == Probe("all-reduce, 2 local ranks", "failed", "OSError: no network")
    assert seconds < 20
    found, _ = _reduce(monkeypatch, "import os; os.abort()", 60.0)
    assert found.detail == "ended with exit code -6"
    found, _ = _reduce(monkeypatch, 'print(\'{"backend": "gloo", "right": false, "result": "[0.0]"}\')', 60.0)
    assert found.detail == "over gloo: wrong result [0.0]"


def test_a_rank_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_RANK_PROGRAM", "pass")
    found = _by_name(examine({"PATH": os.environ["PATH"]}))
    assert found["all-reduce"].outcome == "failed"


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


@pytest.mark.slow
def test_a_job_whose_other_rank_never_comes() -> None:
    (port,) = free_ports(1)
    job = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    found = _by_name(examine({**os.environ, **job}, timeout=4.0))
    assert found["all-reduce, 2 ranks"].outcome == "failed"
