"""What fp8dist finds of forty published silent bugs, and of ten drawn afterwards: the programs of
``tests/silent_bugs``, run healthy and with the bug, and the tables of what was reported. ``scripts/silent-bugs`` runs
it, in about three minutes on two cores."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from scripts import results_files
from scripts.pages import silent_bugs as pages
from tests.silent_bugs.bugs import BUGS
from tests.silent_bugs.job import PROGRAMS
from tests.silent_bugs.outcomes import outcome
from tests.support.ranks import RankPool


def measured() -> list[dict[str, Any]]:
    """Run all programs, and return a row of each."""
    torch.set_num_threads(1)
    pools = {ranks: RankPool(ranks) for ranks in sorted({program.ranks for program in PROGRAMS.values()} - {1})}
    try:
        return [{"name": name, **outcome(pools, name)._asdict()} for name in BUGS]
    finally:
        for pool in pools.values():
            pool.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and publish if asked to."""
    parser = argparse.ArgumentParser(
        prog="scripts/silent-bugs", description="Count the public silent bugs that it finds."
    )
    parser.add_argument("--publish", action="store_true", help="replace the results of this checkout, and its pages")
    publish = parser.parse_args(arguments).publish
    results = {**results_files.about(), "rows": measured()}
    if publish:
        results_files.publish("silent_bugs", results)
    tables = (pages.of_bugs(results), pages.of_bugs(results, afterwards=True))
    print(*tables, pages.of_counts(results), pages.of_alike(results), sep="\n")
    first, second = pages.counts(results)
    print(first, f"{second} drawn afterwards", sep="\n")


if __name__ == "__main__":
    main()
