"""Write the counts of pytest's report on a GPU into the results file.

python -m scripts.benchmarks.gpu.reports check.xml --out FOLDER
"""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks.gpu import environment, results

__all__ = ["counted", "main"]

NAMED = 20
"""Number of failed tests that are listed; the log has all."""


def counted(report: Path) -> dict[str, Any]:
    """Return {"passed", "failed", "skipped", "seconds", "failures"} of a junit report.

    Raises:
        ValueError: the file is not XML.
    """
    try:
        suites = ElementTree.parse(report).getroot().iter("testsuite")
    except ElementTree.ParseError as error:
        raise ValueError(f"{report}: {error}") from None
    total = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    seconds, failures = 0.0, []
    for suite in suites:
        for key in total:
            total[key] += int(suite.get(key, 0))
        seconds += float(suite.get("time", 0))
        for case in suite.iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                failures.append(f"{case.get('classname')}::{case.get('name')}")
    failed = total["failures"] + total["errors"]
    passed = total["tests"] - failed - total["skipped"]
    counts = {"passed": passed, "failed": failed, "skipped": total["skipped"]}
    return {**counts, "seconds": round(seconds, 1), "failures": failures[:NAMED]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the counts into the results file of this machine's GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--run", default="alone")
    parser.add_argument("--commit")
    parser.add_argument("--dirty", action="store_true")
    parser.add_argument("--cut-off", action="store_true", help="the tests were not run to the end")
    options = parser.parse_args(arguments)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    facts = environment.facts(device)
    path = results.file_of(options.out, facts["device"]["name"])
    new = results.empty(options.commit, options.dirty, options.run, smoke=device.type == "cpu")
    new |= {**facts, "tests": results.stamped({**counted(options.report), "cut_off": options.cut_off}, new)}
    results.write(path, results.merged(results.earlier(path), new))
    return 0


if __name__ == "__main__":
    sys.exit(main())
