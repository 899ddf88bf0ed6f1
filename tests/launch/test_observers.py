"""An observer changes no bit: a record of each slot, audits, a loss guard, replays. That the
lab measures waits changes none either: test_train_gpt.py."""

from __future__ import annotations

import json
import re

import pytest

from fp8dist.cli.main import main
from tests.support.main_job import RANKS, TINY, Runs
from tests.support.suite import few

PLAIN = "--accumulate 2 --calibrate-steps 2"
WATCH = "--watch-every 4 --watch-ranks --save-every 12"
AUDITS = "--audit-every 4 --audit-bytes 4096"
SPIKE = "--layers 2 --steps 16 --loss-guard warn --inject spike:1:12"

OBSERVED = [
    ("fsdp2", "--accumulate 2", f"{WATCH} {AUDITS}"),  # The run without is that of test_train_gpt.py, too.
    ("ddp", PLAIN, WATCH),
    ("fsdp2", f"{PLAIN} {WATCH}", AUDITS),
    ("fsdp2", PLAIN, WATCH),
    ("ddp", f"{PLAIN} {WATCH}", "--audit-every 1"),
    ("fsdp2", "--experts 4 --steps 24", "--audit-every 1"),
    ("ddp", SPIKE, "--replay-on nonfinite,spike"),
    ("fsdp2", f"{SPIKE} --precision fp32", "--replay-on nonfinite,spike"),
]
"""The parallelism and the flags of a job, and those of its observer."""

TIMES = re.compile(r"_(?:ms|s|p50|p99|max)$|_ms_|^time$|wait|skew|last_rank|straggler|tokens_per_s")


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "flags", "more"), few(OBSERVED, OBSERVED[0]))
def test_an_observer_changes_no_bit(parallel: str, flags: str, more: str, runs: Runs) -> None:
    job = (*TINY, "--parallel", parallel, *flags.split())
    plain, observed = (runs(RANKS, *job, *each.split()) for each in ("", more))
    for one, other in zip(plain.lines, observed.lines, strict=True):
        same = {name for name in one if name in other and not TIMES.search(name)}
        assert {"loss", "grad_norm", "learning_rate"} <= same
        assert {name: other[name] for name in same} == {name: one[name] for name in same}
    for name in ("parameters_sha256", "validation_loss"):
        assert observed.summary[name] == plain.summary[name]
    assert observed.summary["divergences"] == 0
    if WATCH in flags:
        assert (observed.out / "scales.jsonl").read_text() == (plain.out / "scales.jsonl").read_text()
        folders = (str(run.out / "checkpoints/step-00000012") for run in (plain, observed))
        assert main(["check", *folders]) == 0
    if "replay" in more:
        events = [json.loads(line) for line in (observed.out / "events.jsonl").read_text().splitlines()]
        (said,) = [event["sentence"] for event in events if event["kind"] == "replayed"]
        # The fault is in the model of one rank, not in its data.
        assert said.startswith("ranks 0, 1 differ on the same data, first in module 'lm_head', output")
