"""What a report, and the live view, say: soundness, precision, MFU, bit patterns, and where two runs part."""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8dist.runs.report import facts
from fp8dist.runs.report.cards import bits_of, checkpoint_table
from fp8dist.runs.report.checkpoints import saved_checkpoints
from fp8dist.runs.report.live import LiveRun
from fp8dist.runs.report.numbers import RunNumbers, read_run
from fp8dist.runs.report.parting import Digests, Parting, part
from fp8dist.runs.report.precision import use_of
from tests.support.runs import header, lines, made_run

GOOD = [{"step": 1, "loss": 2.0}, {"step": 9, "loss": 1.9, "proven": 8, "checked": 5}]
LAST = [{"step": 9, "loss": 1.9}]
SAVED = [{"step": step, "kind": "saved", "path": f"step{step}"} for step in (3, 6, 8)]


def _run(folder: Path, metrics: list[dict[str, Any]], events: list[dict[str, Any]] = [], **more: Any) -> RunNumbers:  # noqa: B006
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps(header(["a"], **more)))
    lines(folder / "metrics.jsonl", metrics)
    lines(folder / "events.jsonl", events)
    return read_run(folder)


def _back(step: int) -> dict[str, Any]:
    """Return the event of a resume after a step."""
    return {"step": step, "kind": "start", "resumed_after": step}


def _diverged(step: int, consistent: bool = False) -> dict[str, Any]:
    finding = {"kind": "scale", "name": "a:input", "ranks": [1], "hosts": ["node7"], "reference_rank": 0}
    report = {"consistent": consistent, "findings": [{**finding, "last_good_step": 4}]}
    return {"step": step, "kind": "diverged", "report": report}


def _unknown(step: int, repaired: bool = True) -> dict[str, Any]:
    """Return the event of a divergence whose last good step is not known."""
    event = _diverged(step, repaired)
    event["report"]["findings"][0]["last_good_step"] = None
    return event


def _checked(step: int, compared: Any = None, **fields: Any) -> dict[str, Any]:
    of = {"parameter": 6, "slot": 9} if compared is None else compared
    return {"step": step, "kind": "checked", "compared": of, "compared_bytes": {"parameter": 1_200_000}, **fields}


def _shards(step: int) -> dict[str, Any]:
    return _checked(step, {"slot": 9}, unverified={"parameter": "6 shards"})


NEW = {"step": 0, "kind": "start"}
OLD = {"step": 9, "kind": "checked"}
"""As of an earlier version."""
AUDITED = {"kind": "audit", "name": "a: wgrad", "ranks": [1], "detail": "rank 1 computes wrong repeatedly"}
AUDIT = {"step": 4, "kind": "diverged", "report": {"consistent": False, "findings": [AUDITED, AUDITED]}}
WRONG = "a result of a: wgrad is wrong: rank 1 computes wrong repeatedly, and 1 more"
DIVERGED = "in step 6 scale a:input differs on rank 1 (host node7), against rank 0; equal up to step 4"
AGAIN = (
    "proven to step 8, checked to step 9 (6 parameters of 1.2 MB, 9 slots), ranks differed in step 6, and are equal aga"
)


def test_steps_that_were_undone_are_not_unproven(tmp_path: Path) -> None:
    steps = (10, 20, 30, 40, 20, 30)
    lines(tmp_path / "scales.jsonl", [{"step": step, "slot": "a:input", "amax": 1.0} for step in steps])
    found = _run(tmp_path, [{"step": step, "proven": step} for step in steps])
    assert facts.goals(found) == {"proven": 30, "checked": None, "last": 30}
    assert "for the FP8 state, no step up to 30 is unproven" in facts.verdict(found).text


@pytest.mark.parametrize(
    ("metrics", "events", "state", "text", "live"),
    [
        ([], [], "unknown", "Not known: the run has no step yet.", "unproven: nothing has compared the ranks yet"),
        (GOOD[:1], [], "unknown", "Not known: nothing in this folder proves", "unproven"),
        (GOOD, [], "sound",
         "up to step 8, after step 5 a check found equal what it compared (the run does not say what); step 9 is un",
         "proven to step 8, checked to step 5 (not recorded what)"),
        (GOOD, [_checked(9)], "sound", "after step 9 a check found 6 parameters of 1.2 MB, 9 slots equal; no step up",
         "proven to step 8, checked to step 9 (6 parameters of 1.2 MB, 9 slots)"),
        (GOOD, [_shards(9)], "sound",
         "after step 9 a check found 9 slots equal, parameters not verifiable; for the FP8 state, step 9 is unprove",
         "proven to step 8, parameters not verifiable, 9 slots equal to step 9"),
        (GOOD, [_checked(9, {"parameter": 1, "slot": 9}, partial={"parameter": "1 of 6 parameters"})], "sound",
         "equal, compared only 1 of 6 parameters; for the FP8 state, step 9 is unproven; the other parameters",
         "1 parameter of 1.2 MB, 9 slots equal to step 9, compared only 1 of 6 parameters"),
        (LAST, [_checked(9, nonfinite=["head"])], "unsound",
         "Not sound: a check after step 9 found 6 parameters of 1.2 MB, 9 slots equal, NaN or infinity in head.",
         "NOT FINITE after step 9: 6 parameters of 1.2 MB, 9 slots equal, NaN or infinity in head"),
        (LAST, [_checked(9, 7, unverified=[], nonfinite=7)], "sound", "", "checked to step 9 (not recorded what)"),
        (GOOD, [_diverged(6)], "unsound", f"Not sound: {DIVERGED}.", "DIVERGED in step 6: scale a:input differs on ra"),
        (GOOD, [_diverged(6), _checked(9)], "unsound", DIVERGED, AGAIN),
        (GOOD, [_diverged(3), _shards(4)], "unsound", "in step 3", "ranks differed in step 3, and are equal again"),
        (GOOD, [AUDIT, OLD], "unsound", f"in step 4 {WRONG}.", f"WRONG RESULT in step 4: {WRONG}"),
        (GOOD, [AUDIT, _back(3)], "sound", "Sound as far as", "proven to step 8"),
        (GOOD, [_diverged(6, True)], "sound", "Sound as far as it is proven", "proven to step 8"),
        (GOOD, [_diverged(6), _back(5)], "sound", "Sound as far as", "proven to step 8"),
        (GOOD, [_diverged(6), _back(6)], "unsound", DIVERGED, "DIVERGED in step 6"),
        (GOOD, [_diverged(6), NEW], "sound", "Sound as far as", "proven to step 8"),
        ([*GOOD, {"step": 10, "loss": "NaN"}], [], "unsound", "Not sound: the loss is not finite in step 10.",
         "NOT FINITE since step 10, proven to step 8, checked to step 5"),
        ([*GOOD, {"step": 10, "loss": None}, {"step": 11, "loss": []}], [], "sound", "steps 9 to 11 are unproven", ""),
        (LAST, [OLD, NEW], "unknown", "Not known: nothing", "unproven"),
        (LAST, [OLD, _back(8)], "unknown", "Not known: nothing", "unproven"),
        (LAST, [OLD, _back(9)], "sound", "no step up to 9 is unproven", "checked to step 9"),
        (GOOD, [{"step": 6, "kind": "diverged", "report": "no report"}], "unsound", "in step 6 ranks differ.",
         "DIVERGED in step 6: ranks differ"),
    ],
)  # fmt: skip
def test_soundness(metrics: list[Any], events: list[Any], state: str, text: str, live: str, tmp_path: Path) -> None:
    found = facts.verdict(_run(tmp_path, metrics, events))
    assert found.state == state
    assert text in found.text
    run = LiveRun(tmp_path)
    run.read()
    known = {"sound": True, "unsound": False, "unknown": None}[state]
    assert run.sound[0] is (known or "equal aga" in live or known)
    assert live in run.sound[1]


@pytest.mark.parametrize(
    ("kinds", "remark"),
    [
        (["start"], "The run has not ended"),
        (["start", "end"], ""),
        (["start", "end", "start"], "The run has not ended"),  # The resumed run was killed.
        (["start", "end", "checked", "saved", "checked"], ""),
    ],
)
def test_the_end_of_a_run(kinds: list[str], remark: str, tmp_path: Path) -> None:
    events = [{"step": 9, "kind": kind, "resumed_after": 9} for kind in kinds]
    more = facts.verdict(_run(tmp_path, GOOD, events)).more
    assert [text for text in more if "ended" in text] == ([f"{remark}: it goes on, or was killed."] if remark else [])
    run = _run(tmp_path, GOOD, [{"step": 9, "kind": "end", "error": "OutOfMemoryError"}])
    assert facts.verdict(run).more == ("An error ended the run: OutOfMemoryError.",)
    assert facts.story(run)[-1].text == "the run ends, error OutOfMemoryError"


def test_mfu_is_the_time_at_the_peaks_over_the_measured_time(tmp_path: Path) -> None:
    """2e9 FLOPs per token in each of 3 FP8 GEMMs, 4e9 in each of 3 others; 1e4 tokens in 0.5 s on 4 ranks."""
    step = {"tokens": 10_000, "step_ms": 500.0}
    use = use_of(_run(tmp_path, [{"step": i, **step} for i in range(9)] + [{"step": 9, "tokens": 1, "step_ms": 9e9}]))
    assert use.share == pytest.approx(2 / 6)
    assert use.mfu == pytest.approx(10_000 / 0.5 * 3 * (2e9 / 1979e12 + 4e9 / 989e12) / 4)
    use = use_of(_run(tmp_path, [{"step": 1, **step}], peaks=None, device="cpu"))
    assert use.mfu is None
    assert use.why == "the FP8 peak of the device (cpu) is not known"
    assert use_of(_run(tmp_path, [{"step": 1}])).why.startswith("metrics.jsonl has no tokens and step_ms")
    odd: Any = [{"module": 3}, {"module": "a", "flops": "NaN", "gemms": ["fp8"]}, "b"]
    assert use_of(_run(tmp_path, [], modules=odd)).share is None


def test_mfu_counts_the_experts_that_a_token_visits(tmp_path: Path) -> None:
    gemms = dict.fromkeys(("fprop", "dgrad", "wgrad"), "fp8")
    modules = [
        {"module": "in", "flops": 1e9, "gemms": gemms},
        {"module": "mlp.experts", "flops": 8e9, "gemms": gemms, "experts": 8},
    ]
    steps = [{"step": i, "tokens": 100, "step_ms": 10.0} for i in range(1, 5)]
    unknown = use_of(_run(tmp_path, steps, modules=modules))
    assert (unknown.share, unknown.mfu) == (None, None)
    assert unknown.why == "how many experts of mlp.experts a token visits is not known: watch the run"
    high = [modules[0], {**modules[1], "gemms": dict.fromkeys(gemms, "high")}]
    assert use_of(_run(tmp_path / "high", steps, modules=high)).why.endswith("high precision, which counts no tokens")
    seen = {"module": "mlp.experts", "idle": [0] * 8, "age": None}
    lines(tmp_path / "experts.jsonl", [{**seen, "step": 2 * n, "tokens": [10 * n + 10] * 8} for n in (1, 2)])
    use = use_of(read_run(tmp_path))  # 1e9 FLOPs of "in", and 1e9 of each of two experts on average.
    assert use.mfu == pytest.approx(1e4 * 3 * 3e9 / 1979e12 / 4)
    lines(tmp_path / "experts.jsonl", [{**seen, "step": 2, "tokens": [25] * 8, "ranks": 2}])
    use = use_of(read_run(tmp_path))  # Two of the four ranks share these experts: half of the tokens visit four.
    assert use.mfu == pytest.approx(1e4 * 3 * 5e9 / 1979e12 / 4)


@pytest.mark.parametrize(
    ("value", "expected", "ulp", "text"),
    [
        (20.000001907348633, 20.0, 1, "float32 41a00001 against 41a00000"),
        (1.0078125, 1.0, 1, "bfloat16 3f81 against 3f80"),
        (1.0 + 2**-52, 1.0, 1, "float64 3ff0000000000001 against 3ff0000000000000"),
        (-0.0, 0.0, 0, "float32 80000000 against 00000000"),
        (2.0**-149, -(2.0**-149), 2, "float32 00000001 against 80000001"),
        (448.0, 2.0, None, "float32 43e00000 against 40000000"),
        ("NaN", 1.0, None, ""),
        (True, 1.0, None, ""),
    ],
)
def test_bits_of_both_values(value: Any, expected: Any, ulp: int | None, text: str) -> None:
    assert bits_of(value, expected, ulp) == text


def _parting(first: Path, second: Path) -> Parting:
    digests = (Digests(), Digests())
    return part((read_run(first, digests[0].add), read_run(second, digests[1].add)), digests)


def test_runs_part_at_one_ulp_of_one_scale(tmp_path: Path) -> None:
    def change(step: int, slot: str, line: dict[str, Any]) -> None:
        if step >= 180 and slot in ("blocks.1.up:weight", "blocks.2.up:weight"):
            line["scale"] = float(np.nextafter(np.float32(line["scale"]), np.float32(math.inf)))

    first = made_run(tmp_path / "first")
    found = _parting(first, made_run(tmp_path / "second", change=change))
    assert (found.compared, found.step, found.before, found.slots) == (40, 180, 170, 2)
    assert found.first is not None
    assert (found.first.slot, found.first.field) == ("blocks.1.up:weight", "scale")
    ours, theirs = (struct.unpack("<i", struct.pack("<f", value))[0] for value in found.first.values)
    assert theirs - ours == 1
    assert found.loss_step is None
    assert found.losses_compared == 400
    assert _parting(first, first).step is None


def test_runs_without_lines_of_slots_do_not_part(tmp_path: Path) -> None:
    for name in ("one", "two"):
        lines(_run(tmp_path / name, [{"step": 1, "loss": 1.0}]).folder.path / "scales.jsonl", [{"step": 1}])
    assert _parting(tmp_path / "one", tmp_path / "two").step is None


def test_runs_part_at_a_slot_that_one_lacks_and_by_their_losses(tmp_path: Path) -> None:
    line = {"step": 1, "slot": "a:input", "amax": "NaN", "scale": None}
    for name, slots, loss in (("one", ("a:input", "b:input"), 1.5), ("two", ("b:input",), 1.25)):
        run = _run(tmp_path / name, [{"step": 1, "loss": 1.0}, {"step": 2, "loss": loss}])
        lines(run.folder.path / "scales.jsonl", [{**line, "slot": slot} for slot in slots])
    found = _parting(tmp_path / "one", tmp_path / "two")
    assert (found.step, found.slots, found.loss_step, found.losses) == (1, 1, 2, (1.5, 1.25))
    assert found.first is not None
    assert found.first.slot == "a:input"


def test_steps_that_are_there_twice_count_once(tmp_path: Path) -> None:
    """A job that loads a checkpoint while it runs takes some steps again."""
    for name, steps in (("one", (10, 20, 30)), ("two", (10, 20, 10, 20, 30)), ("three", (10, 20, 30, 20, 30))):
        run = _run(tmp_path / name, [{"step": step} for step in steps])
        slots = [{"step": step, "slot": slot, "amax": step, "scale": 1.0} for step in steps for slot in ("b", "a")]
        if name == "two":
            slots[1]["amax"] = 7.0  # In a step that was undone.
        lines(run.folder.path / "scales.jsonl", slots)
    for other in ("two", "three"):
        found = _parting(tmp_path / "one", tmp_path / other)
        assert (found.compared, found.step, found.before) == (3, None, 30)


def test_a_step_counts_as_compared_if_both_runs_have_its_loss(tmp_path: Path) -> None:
    for name, losses in (("one", (1.0, None, "NaN", 2.0)), ("two", (1.0, 3.0, "NaN", None)), ("none", (None,) * 4)):
        _run(tmp_path / name, [{"step": step, "loss": loss} for step, loss in enumerate(losses)])
    for other, compared in (("two", 2), ("none", 0)):
        found = _parting(tmp_path / "one", tmp_path / other)
        assert (found.losses_compared, found.loss_step) == (compared, None)


def test_the_odd_rank_and_the_straggler(tmp_path: Path) -> None:
    run = read_run(made_run(tmp_path / "run"))
    held = facts.odd_rank(run)
    assert held is not None
    assert held.shares.sum(1).tolist() == pytest.approx([1.0] * 24)
    assert held.text.startswith("Rank 3 held the maximum most often: in 4")
    assert facts.straggler(run).startswith("The others wait for rank 2 (host node1): it waits 0.30 ms per step")


AFTER = "after NaN or infinity in step 5"
AFTER6, AFTER7 = (f"after NaN or infinity in step {step}" for step in (6, 7))
PART, PARTLY = {"parameter": "1 of 6 parameters"}, "good as far as compared: 1 of 6 parameters"
BAD = {"step": 5, "loss": 1.0, "grad_norm": "Infinity"}
TWO = [{"step": 6, "loss": "NaN"}, {"step": 7, "loss": "NaN"}]
DIFFERS = "after a divergence"


@pytest.mark.parametrize(
    ("metrics", "events", "states", "text"),
    [
        ([], [], ["unchecked"] * 3, "no check came after one and found parameters equal and finite"),
        ([], [_checked(6)], ["good", "good", "unchecked"], "After step 6 a check found 6 parameters of 1.2 MB"),
        ([], [_shards(9)], ["saved, not verifiable"] * 3,
         "not verifiable, because after step 9 a check found 9 slots equal, parameters not verifiable"),
        ([], [_checked(9, {"parameter": 6}, unverified={"optimizer": "2 shards"})], ["good"] * 3, "not verifiable."),
        ([], [_checked(9, partial=PART)], [PARTLY] * 3,
         "No checkpoint is known to be good: after step 9 a check found"),
        ([], [_checked(6, partial=PART), _checked(9)], ["good"] * 3, "After step 9"),
        ([], [OLD], ["checked, not recorded what"] * 3, "the run does not say what"),
        # All ranks are NaN alike.
        ([], [_checked(4), _checked(9, nonfinite=["a"])], ["good", "not finite", "not finite"], "step 3"),
        ([], [_checked(9, nonfinite=["a"]), _checked(10)], ["not finite"] * 3, "No checkpoint"),
        ([], [_checked(9, nonfinite=["a"]), _back(4), SAVED[1], _checked(6)], ["good"] * 2, "step 6"),
        # A load makes ranks equal. A check before it counts, also of a step that the resume undoes.
        ([], [_back(8), _checked(9)], ["loaded before a check"] * 3, "no check came between one and the next load"),
        ([], [_checked(4), _back(8), {**SAVED[2], "step": 9}, _checked(9)],
         ["good", *["loaded before a check"] * 2, "good"], "step 9"),
        ([], [_checked(10), _back(8), _checked(9)], ["good"] * 3, "step 8"),
        ([], [OLD, _back(8), _checked(9)], ["good"] * 3, "step 8"),
        ([], [_shards(9), _back(8), _checked(9)], ["loaded before a check"] * 3, "No checkpoint"),
        # A loss or gradient norm is not finite.
        ([{"step": 5, "loss": "NaN"}], [], ["unchecked", *[AFTER] * 2], "No checkpoint"),
        (TWO, [_checked(9)], ["good", AFTER6, "good"], "step 8"),
        (TWO, [_checked(6)], ["good", "good", AFTER7], "step 6"),
        ([BAD], [_checked(4)], ["good", *[AFTER] * 2], "step 3"),
        ([BAD], [_checked(9)], ["good"] * 3, "step 8"),  # A loss scaler has skipped the step.
        ([BAD], [_shards(9)], ["saved, not verifiable"] * 3, "No checkpoint"),
        ([BAD], [OLD], ["checked, not recorded what", *[AFTER] * 2], "No checkpoint"),
        ([BAD, {"step": 4}, {"step": 5}], [], ["unchecked"] * 3, "No checkpoint"),  # Rolled back.
        # A divergence is in it.
        ([], [_diverged(8), _checked(9)], ["good", *[DIFFERS] * 2], "step 3"),
        ([], [AUDIT, _checked(9)], ["good", *[DIFFERS] * 2], "step 3"),
        ([], [_diverged(6), {**SAVED[2], "step": 9}, _checked(9)], ["good", *[DIFFERS] * 3], "step 3"),  # Not over.
        # It is in step 6's, if it began at 5.
        ([], [_diverged(8), {**_back(6), "step": 5}, _checked(9)], ["good", DIFFERS], "step 3"),
        ([], [_diverged(8), _back(3), SAVED[2], _checked(9)], ["good"] * 2, "step 8"),
        ([], [_diverged(8, True), {**SAVED[2], "step": 9}, _checked(9)], ["good", *[DIFFERS] * 2, "good"], "step 9"),
        # When it began is not known: after the last check that found all parameters equal.
        ([], [_unknown(8), _checked(9)], [DIFFERS] * 3, "No checkpoint"),
        ([], [_shards(5), _unknown(8), _checked(9)], [DIFFERS] * 3, "No checkpoint"),
        ([], [_checked(3), _unknown(8), _checked(9)], ["good", *[DIFFERS] * 2], "step 3"),
        ([], [_checked(6), _unknown(6), _checked(9)], ["good", "good", DIFFERS], "step 6"),
        # It was in what a resume had loaded, and the next resume loaded anew.
        ([], [_checked(6), _back(6), _unknown(6, False), _back(6), SAVED[2], _checked(9)], ["good"] * 3, "step 8"),
    ],
)  # fmt: skip
def test_a_checkpoint_is_good_only_if_parameters_were_compared_and_are_equal_and_finite(
    metrics: list[Any], events: list[Any], states: list[str], text: str, tmp_path: Path
) -> None:
    page = "".join(checkpoint_table(_run(tmp_path, metrics, [*SAVED, *events])))
    rows = re.findall(r'<td class="number">\d+</td><td>([^<]*)</td>', page)
    assert rows[::-1] == states
    assert text in page


def test_the_first_trouble_is_told_with_its_replay(tmp_path: Path) -> None:
    nonfinite = {"step": 3, "kind": "nonfinite", "slots": ["loud:input", "m:input"], "module": "m", "role": "input"}
    replayed = {"step": 3, "kind": "replayed", "trigger": "nonfinite", "replayed_step": 3, "microbatch": 1}
    sentence = "the data of rank 1 gives the first non-finite value in module 'embedding', output"
    run = _run(tmp_path, [], [nonfinite, {**replayed, "sentence": sentence}, {**replayed, "step": 4}])
    first, replay, damaged = facts.story(run)
    assert first.text == "an amax is not finite, loud:input, m:input, first in m, input"
    assert replay.text == f"replay of step 3, microbatch 1, after nonfinite: {sentence}"
    assert damaged.text.endswith(": nothing is known of its result")
    assert facts.replayed_text(run, 3) == replay.text
    assert facts.replayed_text(run, 5) == ""
    assert facts.replayed_text(_run(tmp_path / "again", [], [replayed, _back(2)]), 3) == ""
    lost = _run(tmp_path / "lost", [{"step": 2, "loss": "NaN"}])  # Without a loss guard.
    assert [(event.step, event.kind) for event in facts.story(lost)] == [(2, "nonfinite_loss")]


def test_of_many_checks_the_last_before_a_load_is_kept(tmp_path: Path) -> None:
    checks = [[_checked(step) for step in range(begin, begin + 2500)] for begin in (1, 2501)]
    run = _run(tmp_path, [], [{"step": 2400, "kind": "saved"}, *checks[0], _back(2500), *checks[1]])
    assert len(run.events) == 2002
    assert [one.state for one in saved_checkpoints(run)] == ["good"]
