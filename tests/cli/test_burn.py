"""fp8dist doctor --burn: it repeats casts and products, and sees each wrong bit."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fp8dist.checks.known_calls import ProductOf
from fp8dist.cli import burn as burning
from fp8dist.cli import doctor, main
from fp8dist.cli.burn import Burned, burn, burned_across_ranks, computations_on
from fp8dist.cli.doctor import Probe
from fp8dist.cli.exit_codes import CONSISTENT, DIVERGED, USAGE
from tests.support.answers import flipping
from tests.support.ranks import on_ranks
from tests.support.torchrun import torchrun

CPU = torch.device("cpu")
OUT, IN, TOKENS = 384, 256, 256
FPROPS = 8
"""Products of inputs: with a scale per tensor, row, block and MX block, and each of them with exact sums."""


def test_all_recipes_and_gemms_are_burned() -> None:
    found = computations_on(CPU)
    names = [one.name(CPU) for one in found]
    assert len(set(names)) == len(found) == 43
    for recipe in ("DelayedScaling", "CurrentScaling", "RowwiseScaling", "BlockScaling", "MXFP8Scaling"):
        assert sum(recipe in name for name in names) == 3
    products = [one for one in found if isinstance(one, ProductOf)]
    assert {one.gemm for one in products} == {"fprop", "dgrad", "wgrad"}
    assert sum(one.gemm == "fprop" for one in products) == FPROPS
    assert sum(one.exact for one in products) == len(products) // 2


@pytest.mark.slow
def test_a_sound_device_has_nothing_wrong() -> None:
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
    start = (
        "fprop 256x384x256 e4m3 e4m3 bfloat16, fast accumulation, tensorwise, reference differs from the first time, "
    )
    assert difference.startswith(start + "repetition 2: result at [5, 7]: ")
    assert difference.endswith(f", 1 of {TOKENS * OUT} elements")
    right, wrong = (int(part[: part.index(")")], 16) for part in reversed(difference.split("(")[1:]))
    assert right ^ wrong == 2
    assert burned.summary.endswith(" per s, 1 wrong")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "shape", "result", "where", "exact"),
    [
        ("quantize", (OUT, IN), 1, "columns at [1, 4]", "cast of weight 384x256 bfloat16, "),
        ("quantize_rowwise", (TOKENS, IN), 3, "columns_inv_scale at [97, 0]", "cast of input 256x256 bfloat16, Row"),
        ("quantize_blocks", (TOKENS, OUT), 0, "rows at [1, 4]", "cast of grad_output 256x384 bfloat16, Block"),
        ("matmul", (OUT, TOKENS), 0, "result at [0, 194]", "wgrad 384x256x256 e5m2 e4m3 bfloat16, exact"),
    ],
)
def test_what_is_always_wrong_differs_from_plain_torch(
    op: str, shape: tuple[int, int], result: int, where: str, exact: str
) -> None:
    with flipping(op, shape, byte=388, bit=6, result=result):
        burned = burn(CPU, 0.01)
    kinds = [difference for difference in burned.differences if difference.startswith(exact)]
    assert kinds
    assert all(f" differs from plain torch, repetition 1: {where}: " in difference for difference in burned.differences)
    # Other products have no plain twin with the same bits, and are equal each time.
    assert len(burned.differences) == burned.wrong == {"quantize": 2, "matmul": 5}.get(op, 1)


def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for check in ("_all_reduces", "_settings", "_fused", "_trainers"):
        monkeypatch.setattr(doctor, check, lambda *_: [])


@pytest.mark.slow
def test_the_exit_status_says_if_something_was_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _quiet(monkeypatch)
    assert main.main(["doctor", "--burn", "0.01", "--json"]) == CONSISTENT
    (line,) = [o for o in json.loads(capsys.readouterr().out)["observations"] if o["name"] == "burn on cpu"]
    assert line["outcome"] == "ok"
    with flipping("quantize_blocks", (TOKENS, IN), 0, 0):
        assert main.main(["doctor", "--burn", "0.01"]) == DIVERGED
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("burn on cpu")]
    assert ["failed" in line for line in lines] == [True, True]
    assert "cast of input 256x256 bfloat16, BlockScaling e4m3, torch differs from plain torch" in lines[0]
    assert main.main(["doctor", "--json"]) == CONSISTENT
    assert "burn" not in capsys.readouterr().out


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf", "ten"])
def test_the_time_is_a_number_above_0(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["doctor", "--burn", given])
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
    assert burning.computations_on(torch.device("cuda", 1)) == []


@pytest.mark.slow
@on_ranks(3)
def test_ranks_are_compared() -> None:
    bad = flipping("matmul", (TOKENS, IN), 0, 3) if dist.get_rank() == 2 else contextlib.nullcontext()
    good = burned_across_ranks(CPU)
    with bad:
        report = burned_across_ranks(CPU)
    assert dict(good.compared) == {"computation": 43}
    assert good.consistent
    assert [(f.name.split()[0], f.ranks, f.reference_rank) for f in report.findings] == [("fprop", (2,), 0)] * FPROPS


@pytest.mark.long
def test_under_torchrun(tmp_path: Path) -> None:
    done = torchrun(2, "-m", "fp8dist", "doctor", "--burn", "0.3", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    seen = {line["name"]: line for line in json.loads(done.stdout)["observations"]}
    assert seen["burn on cpu"]["outcome"] == "ok"
    assert seen["burn, all ranks"]["detail"] == "consistent (43 computations)"
