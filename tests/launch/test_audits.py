"""Audits of the example job find faults inside its FP8 products, which replicas cannot show."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp8dist.runs.report import facts
from fp8dist.runs.report.folder import RunFolder
from fp8dist.runs.report.live import LiveRun
from fp8dist.runs.report.numbers import read_run
from tests.support.main_job import ALONE, RANKS, TINY, finish, stop
from tests.support.suite import NIGHTLY, few

LAST = "blocks.0.mlp_out"
"""Its wgrad and dgrad are the first of a step. The audits of this job visit them in these steps."""

WGRAD_STEP, DGRAD_STEP, FPROP_STEP = 1, 8, 21
AUDITS = ("--audit-every", "1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "parallel", "fault", "site", "verdict"),
    [
        (2, "ddp", f"product:1:{WGRAD_STEP}", f"{LAST}: wgrad", "transient on rank 1: repeated, it gets what rank 0"),
        pytest.param(
            *(3, "fsdp2", f"product:2:{DGRAD_STEP}:dgrad", f"{LAST}: dgrad"),
            "rank 2 computes wrong once (transient);",
            marks=NIGHTLY,
        ),
        pytest.param(
            *(4, "hsdp", f"product:0:{FPROP_STEP}:fprop", "blocks.0.qkv: fprop"),
            "rank 0 computes wrong once (transient);",
            marks=NIGHTLY,
        ),
    ],
)
def test_a_wrong_product_is_found_in_its_step_and_no_check_sees_it(
    ranks: int, parallel: str, fault: str, site: str, verdict: str, tmp_path: Path
) -> None:
    step = int(fault.split(":")[2])
    flags = ["--parallel", parallel, "--inject", fault, "--steps", str(step + 1)]
    stopped = stop(tmp_path, *flags, *AUDITS, NPROC=str(ranks))
    (finding,) = stopped.findings
    assert (finding["step"], finding["kind"], finding["name"]) == (step, "audit", site)
    assert finding["ranks"] == [int(fault.split(":")[1])]
    assert finding["detail"].startswith(verdict)
    (planted,) = re.findall(r"--inject product:.* is now \S+ instead of \S+", stopped.stderr)
    unseen = finish(tmp_path / "unseen", RANKS, *TINY, *flags, "--check-every", "1", NPROC=str(ranks))
    assert unseen.summary["divergences"] == 0
    assert unseen.summary["checks"] == step + 1
    assert planted in unseen.output  # The same bits of the same product.


DEVICES: dict[str, tuple[str, int, list[int], list[str]]] = {
    "a bad device is named by all that repeat its work": (
        "bad-device:1:1 --check-policy repair",  # Nothing can be repaired.
        3,
        [1],
        [
            "rank 1 computes wrong repeatedly; ranks 2 and 0 agree",
            "rank 1, which audits rank 0, computes wrong repeatedly; 0 and 2 agree",
        ],
    ),
    "of two ranks none is blamed": (
        *("bad-device:1:1", 2, [0, 1]),
        [f"ranks {pair} differ repeatedly; of two ranks, none can be blamed" for pair in ("0 and 1", "1 and 0")],
    ),
    # Rank 2 makes a tenth of its products wrong. Each audit of a product looks at one of them, and at one repeat.
    "a bad device that is wrong seldom is found in the end": (
        *("bad-device:2:0.1 --steps 100", 3, [2]),
        ["computes wrong once (transient)"],
    ),
    "a single rank repeats its own work": (
        *(f"product:0:{WGRAD_STEP}", 1, [0]),
        ["transient on rank 0, which repeated its own work"],
    ),
}
"""The fault with more flags, the number of ranks, those that are blamed, and the verdicts in order."""


@pytest.mark.slow
@pytest.mark.parametrize("name", few(DEVICES, next(iter(DEVICES)), "a single rank repeats its own work"))
def test_who_is_blamed(name: str, tmp_path: Path) -> None:
    fault, ranks, blamed, verdicts = DEVICES[name]
    command = ALONE if ranks == 1 else RANKS
    stopped = stop(tmp_path, *AUDITS, "--inject", *fault.split(), command=command, NPROC=str(ranks))
    found = sorted(stopped.findings, key=lambda finding: str(finding["detail"]))
    seldom = "seldom" in name
    for finding, verdict in zip(found, verdicts * len(found) if seldom else verdicts, strict=not seldom):
        assert (finding["ranks"], finding["kind"]) == (blamed, "audit")
        assert verdict in finding["detail"]
        assert seldom or finding["step"] == WGRAD_STEP
        assert ranks != 2 or finding["reference_rank"] is None


@pytest.mark.slow
def test_the_run_folder_tells_of_an_audit(tmp_path: Path) -> None:
    """With "warn" the run goes on. Later checks find its ranks equal, and that does not make it sound."""
    flags = ["--inject", f"product:1:{WGRAD_STEP}", "--check-policy", "warn", "--check-every", "2", *AUDITS]
    run = finish(tmp_path, RANKS, *TINY, *flags)
    assert run.summary["divergences"] == 1
    (event,) = [line for line in RunFolder(tmp_path).lines("events.jsonl").new() if line["kind"] == "diverged"]
    assert (event["step"], event["report"]["findings"][0]["kind"]) == (WGRAD_STEP, "audit")
    verdict = facts.verdict(read_run(tmp_path))
    assert verdict.text.startswith(f"Not sound: in step {WGRAD_STEP} a result of {LAST}: wgrad is wrong: transient on")
    live = LiveRun(tmp_path)
    live.read()
    known, text = live.sound
    assert known is False
    assert text.startswith(
        f"WRONG RESULT in step {WGRAD_STEP}: a result of {LAST}: wgrad is wrong: transient on rank 1"
    )
