"""Training gives the same bits as before the modules moved.

The modules moved into rooms, and some API names changed. Neither affects numerics, so 20 steps must give the same
losses, FP8 state and parameters, bit for bit. Commit 9a36b9e, the last one before the move, produced the digests in
``tests/data/same_as_before.json``: of five golden cases, from 19 with which the move was made.
``tests/support/reference_runs.py`` has the cases, and says how to recreate the file after an intended change of
numerics.

Another CPU or torch version may compute other bits. The canary detects this: it runs the same nets in plain torch, in a
process that never imports fp8dist, so no change in fp8dist can affect it. If its digest differs from the stored one,
the tests skip. Failing ranks are a failure on any machine.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.reference_runs import CASES, DATA, machine, run_all


@pytest.mark.long
def test_same_as_before() -> None:
    before: dict[str, Any] = json.loads(DATA.read_text())
    assert before["commit"] == "9a36b9e"
    assert list(before["cases"]) == list(CASES)
    now = run_all()
    if now.canary != before["canary"]:
        here = {"canary": now.canary, **machine()}
        places = [f"canary {p['canary'][:16]} (torch {p['torch']}, {p['cpu']})" for p in (here, before)]
        pytest.skip(f"plain torch computes other bits here: {places[0]}, stored {places[1]}")
    differ = [
        f"{case}, rank {rank}: {name}"
        for case in CASES
        for rank, (stored, found) in enumerate(zip(before["cases"][case], now.cases[case], strict=True))
        for name in ("losses", "state", "parameters")
        if found[name] != stored[name]
    ]
    assert not differ, f"not as in commit {before['commit']}:\n" + "\n".join(differ)
