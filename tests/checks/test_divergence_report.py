"""Divergence reports, for people and for programs."""

from __future__ import annotations

import json
import math
import pickle
import re
from typing import Any

import numpy as np
import pytest

from fp8dist import DivergenceReport, Finding
from fp8dist.checks.report import sides_of, split
from fp8dist.common.divergence import Participant
from fp8dist.errors import DivergenceError


def _finding(rank: int = 3, reference: int | None = 0, **more: Any) -> Finding:
    values: dict[str, Any] = {
        "step": 120,
        "kind": "parameter",
        "name": "blocks.0.norm.weight",
        "ranks": (rank,),
        "reference_rank": reference,
        "hosts": ("node7",),
        "mesh_coords": ({"dp": 1, "tp": 0},),
        "detail": "1 of 512 elements, 0x3f9d70a4 against 0x3f9d70a5",
        "last_good_step": 100,
        "sides": ((0, 1, 2), (rank,)),
        "local_ranks": (2,),
        "devices": ("cuda:2",),
        "index": (3, 17),
        "value": 1.25,
        "expected": 1.5,
        "ulp": 2097152,
    }
    return Finding(**{**values, **more})


def _many(count: int, **more: Any) -> DivergenceReport:
    return DivergenceReport(tuple(_finding(name=f"p{i:03d}", **more) for i in range(count)))


NAMES = ["step", "last", "kind", "name", "ranks", "reference", "index", "value", "expected", "ULP", "what"]


def _table(report: DivergenceReport) -> list[dict[str, list[str]]]:
    """Return the rows of a printed table: the lines of each cell, by the first word of its column's head. What stands
    below a row is the cell "below"."""
    lines = str(report).splitlines()[1:]
    starts = {name: match.start() for name in NAMES if (match := re.search(rf"\b{name}\b", lines[0]))}
    ends = [*list(starts.values())[1:], 200]
    rows: list[dict[str, list[str]]] = []
    for line in lines[1:]:
        if re.match(r"  \w+ \d+: |not compared|…|  …", line):
            break
        if line.startswith(" " * 4) and line[4] != " ":
            rows[-1].setdefault("below", []).append(line.strip())
            continue
        cells = {name: line[start:end].strip() for (name, start), end in zip(starts.items(), ends)}
        for start in list(starts.values())[1:]:
            assert line[start - 1 : start] in (" ", ""), line
        if not cells["step"] and not rows:
            continue  # The head's second line.
        if cells["step"]:
            rows.append({name: [] for name in starts})
        for name, cell in cells.items():
            rows[-1][name] += [cell] if cell else []
    return rows


def test_the_table_says_who_where_what_and_since_when() -> None:
    report = DivergenceReport((_finding(name="w"),), {"parameter": 7}, ("2 parameters sharded by FSDP1",))
    lines = str(report).splitlines()
    assert lines[0] == "parameters differ between ranks"
    (row,) = _table(report)
    assert {name: " ".join(cell) for name, cell in row.items()} == {
        "step": "120",
        "last": "100",
        "kind": "parameter",
        "name": "'w'",
        "ranks": "3",
        "reference": "0",
        "index": "3, 17",
        "value": "1.25",
        "expected": "1.5",
        "ULP": "2097152",
        "below": "1 of 512 elements, 0x3f9d70a4 against 0x3f9d70a5",
    }
    assert " ".join(lines[-2].split()) == "rank 3: host node7, local rank 2, cuda:2, mesh dp=1 tp=0"
    assert lines[-1] == "not compared: 2 parameters sharded by FSDP1"


def test_a_short_detail_stands_in_its_column_and_a_column_that_says_nothing_is_left_out() -> None:
    detail = "4 of 5 elements, 0x3 against 0x7"
    (row,) = _table(DivergenceReport((_finding(name="w", last_good_step=None, detail=detail, ulp=None),)))
    assert "below" not in row
    assert " ".join(row["what"]) == detail
    text = str(DivergenceReport((_finding(kind="step", name="step", index=None, ulp=None, detail="rank 3: 5"),)))
    assert "'step'" not in text
    assert {"ULP", "index"}.isdisjoint(text.splitlines()[1].split())
    assert "rank 3: 5" in text


LONG = "model.layers.17.mlp.experts.41.down_projection.weight"


def test_cells_are_wrapped_at_100_columns_and_nothing_is_cut() -> None:
    findings = (
        _finding(),
        _finding(name=f"{LONG}:input", kind="scale", field="scale", index=(), value=math.nan, expected=math.inf),
        _finding(name="a" * 300, ranks=(1, 2), hosts=("a" * 50, "b"), mesh_coords=(None, None), local_ranks=(None, 1)),
        _finding(name=LONG, kind="layout", index=None, value=None, expected=None, ulp=None, last_good_step=None),
        _finding(name=LONG, value=0.043141234567890123, expected=-1.2345678901234567e-101, detail="word " * 100),
    )
    report = DivergenceReport(findings, skipped=("5 parameters " + "because of reasons " * 20,), notes=("n " * 100,))
    assert max(map(len, str(report).splitlines())) <= 100
    rows = _table(report)
    assert len(rows) == len(findings)
    for row, f in zip(rows, findings):
        assert "".join(row["name"]).replace(" ", "") == f"'{f.name}'"
        assert row["kind"] == [f.kind]
        assert row["ranks"] == [", ".join(map(str, f.ranks))]
        assert "".join(row["value"]) == (repr(f.value) if f.index is not None else "")
        assert "".join(row["expected"]) == (repr(f.expected) if f.index is not None else "")
        assert " ".join(row["below"]) == f.detail.strip()
    assert rows[0]["name"] == ["'blocks.0.", "norm.weight'"], "broken after a separator"
    squeezed = "".join(str(report).split())
    assert "/folder" * 30 + "," in str(DivergenceReport((_finding(hosts=("/folder" * 30,)),), noun="file"))
    for text in (report.skipped[0], report.notes[0]):
        assert text.replace(" ", "") in squeezed


SIDES = ((2, 3), (0,), (1,))


def _torn(**more: Any) -> Finding:
    """Return a finding of four ranks without a majority."""
    given: dict[str, Any] = {
        "reference": None,
        "ranks": (0, 1, 2, 3),
        "sides": SIDES,
        "hosts": ("a", "b", "c", "d"),
        "local_ranks": (0,) * 4,
        "devices": ("cpu",) * 4,
        "mesh_coords": (None,) * 4,
        "values": (1.5, 1.25, math.nan),
        "detail": "first element: rank 0: 1.25; rank 1: nan; rank 2: 1.5",
    }
    return _finding(**{**given, **more})


def test_without_a_majority_each_side_has_a_row_with_its_value() -> None:
    report = DivergenceReport((_torn(),))
    (row,) = _table(report)
    assert row["ranks"] == ["2, 3", "0", "1"]
    assert row["value"] == ["1.5", "1.25", "nan"]
    assert " ".join(row["reference"]) == "no majority"
    assert "expected" not in row
    assert "first element" not in str(report)
    assert all(f"  rank {r}: host {host}, local rank 0, cpu" in str(report) for r, host in enumerate("abcd"))
    (row,) = _table(DivergenceReport((_torn(values=(1.5,)),)))
    assert (row["ranks"], row["value"]) == (["2, 3", "0, 1"], ["1.5", "…"])
    # Bits are shown if they alone tell sides apart.
    assert "0x7fc0" in str(DivergenceReport((_torn(values=(math.nan,) * 3, detail="first element: nan (0x7fc0)"),)))
    assert report.summary().split(": ", 1)[1] == (
        "parameter 'blocks.0.norm.weight', no majority: 1.5 on ranks 2, 3 (host c, local rank 0, cpu); "
        "1.25 on rank 0 (host a, local rank 0, cpu); nan on rank 1 (host b, local rank 0, cpu) at [3, 17], "
        "step 120, last good step 100"
    )


def test_numbers_of_float32_are_short_and_exact() -> None:
    for value, shown in {0.043145306408405304: "0.043145306", 0.1: "0.1", -0.0: "-0.0", 1e300: "1e+300"}.items():
        (row,) = _table(DivergenceReport((_finding(name="w", value=value, expected=0.043145306408405305e-99),)))
        assert row["value"] == [shown]
        assert "".join(row["expected"]) == "4.3145306408405305e-101"
        assert float(np.float32(float(shown))) == value or float(shown) == value


def test_names_of_things_are_quoted() -> None:
    subjects = {
        ("parameter", "2.weight"): "parameter '2.weight'",
        ("scale", "blocks.0.fc:input"): "scale of 'blocks.0.fc:input'",
        ("optimizer", "2.exp_avg"): "optimizer state '2.exp_avg'",
        ("layout", "2"): "layout of '2'",
        ("step", "step"): "step",
    }
    assert {of: _finding(kind=of[0], name=of[1]).subject for of in subjects} == subjects
    assert _finding(name="…", detail="7 more things differ").subject == "7 more things differ"


def test_hundreds_of_findings_and_ranks_are_counted() -> None:
    lines = str(_many(500)).splitlines()
    assert len(lines) < 80
    assert sum("'p0" in line for line in lines) == 32
    assert any("468 more" in line for line in lines)
    ranks, everyone = tuple(range(1, 256)), tuple(range(512))
    places: dict[str, Any] = {"hosts": ("h",) * 512, "local_ranks": (0,) * 512}
    places |= {"devices": ("cpu",) * 512, "mesh_coords": (None,) * 512}
    report = DivergenceReport((_finding(ranks=ranks, **{name: of[:255] for name, of in places.items()}),))
    assert "1,2,3,4,5,6,7,8and247more" in "".join("".join(_table(report)[0]["ranks"]).split())
    assert len(str(report).splitlines()) < 50
    assert "223 more" in str(report)  # 32 differing elements are shown.
    sides = (everyone[:256], everyone[256:])
    text = str(DivergenceReport((_torn(ranks=everyone, sides=sides, values=(1.0, 2.0), **places),)))
    assert "rank 0: " in text
    assert "rank 256: " in text  # Some of each side.


def test_a_clean_report_says_what_was_compared_and_what_was_not() -> None:
    ignored = "4 parameters that DDP was told to ignore"
    report = DivergenceReport((), {"parameter": 1, "slot": 12}, (ignored,), compared_bytes={"parameter": 1_250_000})
    assert str(report) == (f"consistent (1 parameter of 1.25 MB, 12 slots)\nnot compared: {ignored}")
    assert report.consistent
    assert report.summary() == str(report)
    report.raise_if_diverged()


@pytest.mark.parametrize(
    ("report", "head"),
    [
        (DivergenceReport(), "not verified: nothing was compared"),
        (DivergenceReport(compared={"parameter": 0}), "not verified: nothing was compared"),
        (
            DivergenceReport(compared={"slot": 3}, compared_bytes={"slot": 96}, unverified={"parameter": "6 shards"}),
            "not verified: parameters (equal: 3 slots of 96 B)\nnot compared: 6 shards",
        ),
        (
            DivergenceReport(compared={"parameter": 2}, unverified={"optimizer": "4 shards", "gradient": "2 shards"}),
            "not verified: optimizer states and gradients (equal: 2 parameters)",
        ),
        (
            DivergenceReport((_finding(),), {"slot": 3}, repaired=("it",), unverified={"parameter": "6 shards"}),
            "parameters differ between ranks",
        ),
    ],
)
def test_a_report_that_verified_nothing_is_neither_consistent_nor_diverged(report: DivergenceReport, head: str) -> None:
    assert not report.consistent
    assert not report.diverged
    assert str(report).startswith(head)
    assert (report.to_json()["consistent"], report.to_json()["diverged"]) == (False, False)
    report.raise_if_diverged()


def test_a_report_says_what_was_done_and_of_what() -> None:
    repaired = ("parameter 'w' on rank 3, from rank 0",)
    report = DivergenceReport((_finding(),), {"parameter": 4}, repaired=repaired)
    assert report.consistent
    report.raise_if_diverged()
    assert repaired[0] in str(report)
    report = DivergenceReport(compared={"parameter": 9}, nonfinite=tuple(f"blocks.{i}" for i in range(6)))
    assert str(report).splitlines()[1] == "not finite: blocks.0, blocks.1, blocks.2, blocks.3 and 2 more"
    report = DivergenceReport((_finding(kind="scale"), _finding(kind="history"), _finding()))
    assert str(report).splitlines()[0] == "FP8 state and parameters differ between ranks"


def test_a_summary_is_one_short_line_with_place_values_and_steps() -> None:
    summary = DivergenceReport((_finding(),)).summary()
    assert "\n" not in summary
    for part in (
        *("parameters differ between ranks", "blocks.0.norm.weight", "rank 3", "host node7", "local rank 2"),
        *("cuda:2", "dp=1", "against rank 0", "1.25 against 1.5", "[3, 17]", "step 120", "last good step 100"),
    ):
        assert part in summary
    summary = _many(500).summary()
    assert [name in summary for name in ("p000", "p002", "p003")] == [True, True, False]
    assert "497 more findings" in summary
    assert "more findings" not in _many(3).summary()
    assert len(summary) < 1000


def test_errors_carry_the_report_and_the_summary_and_pickle() -> None:
    report = DivergenceReport((_finding(), _finding(value=1j)), {"parameter": 2}, ("x",))
    assert not report.consistent
    with pytest.raises(DivergenceError) as caught:
        report.raise_if_diverged()
    assert caught.value.report is report
    for each in (report, DivergenceReport((_finding(),), {"parameter": 2}, ("x",), ("y",))):
        assert pickle.loads(pickle.dumps(each)) == each
    for error in (caught.value, pickle.loads(pickle.dumps(DivergenceError(report)))):
        assert isinstance(error, DivergenceError)
        assert error.report == report
        assert str(error) == report.summary()


VALUES = [1.5, math.nan, math.inf, -math.inf, -0.0, 1 + 2j, complex(math.nan, math.inf), True, 7, None, 2**63]


def test_json_has_every_attribute_and_takes_any_value() -> None:
    for value in VALUES:
        report = DivergenceReport((_finding(value=value, expected=value),), {"parameter": 2})
        plain = json.loads(json.dumps(report.to_json(), allow_nan=False))
        (finding,) = plain["findings"]
        odd = isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value))
        assert finding["value"] == (repr(value) if odd else value)
    assert (plain["consistent"], plain["compared"]) == (False, [["parameter", 2]])
    assert (finding["index"], finding["sides"], finding["hosts"]) == ([3, 17], [[0, 1, 2], [3]], ["node7"])
    assert finding["mesh_coords"] == [{"dp": 1, "tp": 0}]
    assert set(plain) == {"consistent", "diverged", *DivergenceReport.__dataclass_fields__}
    assert set(finding) == set(Finding.__dataclass_fields__)
    assert DivergenceReport(compared={"slot": 1}).to_json()["consistent"] is True


@pytest.mark.parametrize(
    ("findings", "speaker"),
    [
        ([((0,), 1, ((1, 2, 3), (0,)))], 1),
        ([((2, 3), None, ((2,), (3,)))], 2),
        # Rank 0 is wrong in one tensor, rank 1 in another: rank 2 is right in both.
        ([((0,), 1, ((1, 2, 3), (0,))), ((1,), 0, ((0, 2, 3), (1,)))], 2),
        # Rank 0 differs in one tensor, and the rest has no majority.
        ([((0,), 1, ((1, 2), (0,))), ((0, 1, 2), None, ((0,), (1,), (2,)))], 1),
        ([], 0),
    ],
)
def test_the_lowest_rank_of_the_majority_speaks(findings: list[Any], speaker: int) -> None:
    report = DivergenceReport(
        tuple(_finding(ranks=ranks, reference=reference, sides=sides) for ranks, reference, sides in findings)
    )
    assert report.reporting_rank == speaker


@pytest.mark.parametrize(
    ("values", "sides", "majority"),
    [
        ({0: "a", 1: "a", 2: "b"}, ((0, 1), (2,)), (0, [(2,)])),
        ({0: "a", 1: "b"}, ((0,), (1,)), (None, [(0, 1)])),
        ({0: "a", 1: "b", 2: "b", 3: "a"}, ((0, 3), (1, 2)), (None, [(0, 1, 2, 3)])),
        ({0: "a", 1: "b", 2: "c", 3: "c"}, ((2, 3), (0,), (1,)), (None, [(0, 1, 2, 3)])),
        ({0: "a", 1: "b", 2: "c", 3: "c", 4: "c"}, ((2, 3, 4), (0,), (1,)), (2, [(0,), (1,)])),
        ({7: "x", 5: "x", 6: "y"}, ((5, 7), (6,)), (5, [(6,)])),
    ],
)
def test_a_majority_is_more_than_half(values: dict[int, str], sides: Any, majority: Any) -> None:
    assert sides_of(values) == sides
    assert split(sides) == majority


def test_a_finding_learns_where_its_ranks_are() -> None:
    everyone = [Participant(rank, f"host{rank}", rank % 2, f"cuda:{rank}", None) for rank in range(4)]
    found = Finding(1, "parameter", "w", (3, 0), 1).located(everyone)
    assert (found.hosts, found.local_ranks, found.devices) == (("host3", "host0"), (1, 0), ("cuda:3", "cuda:0"))
