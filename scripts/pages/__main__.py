"""Fill the generated parts of README.md, ARCHITECTURE.md and docs/: tables of measurements, and reference tables.

    python -m scripts.pages                     generate all parts except the outputs of commands
    python -m scripts.pages --check             list the pages that are out of date (exit status 1 if any)
    python -m scripts.pages commands [NAME …]   run these commands (default: all), and fill in their output
    python -m scripts.pages --summary DIR       print the goals with the GPU results in DIR

A part lies between ``<!-- made: NAME -->`` and ``<!-- end of NAME -->``. scripts/pages/parts.py lists the names, and
scripts/pages/commands.py the names of the commands (``<!-- made: command NAME -->``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from scripts.pages.filling import ROOT, Parts, filled, pages, problems


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line that the top of this file describes; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.pages", description="Fill the made parts of the pages.", allow_abbrev=False
    )
    add = parser.add_argument
    add("commands", nargs="*", metavar="commands [NAME …]", help="run the commands whose output is shown")
    add("--check", action="store_true", help="write nothing; exit status 1 if a page is out of date")
    add("--summary", type=Path, metavar="DIR", help="print the goals with the GPU results in this folder")
    options = parser.parse_args(arguments)
    if options.summary:
        from scripts.benchmarks.gpu.tables import summary  # Must run with only torch and Triton.

        print(summary(options.summary))
        return 0
    if options.commands and (options.commands[0] != "commands" or options.check):
        parser.error(f"unknown: {' '.join(options.commands)}")
    return _fill(root, options.commands, options.check)


def _fill(root: Path, words: Sequence[str], check: bool) -> int:
    from scripts.pages.commands import COMMANDS, block
    from scripts.pages.parts import parts_of

    parts: Parts = parts_of(root)
    known = {*parts, *(f"command {name}" for name in COMMANDS)}
    if words:
        strangers = [name for name in words[1:] if name not in COMMANDS]
        if strangers:
            print(f"there is no command {strangers[0]!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
            return 2
        parts = {f"command {name}": partial(block, name) for name in words[1:] or COMMANDS}
    late, wrong = [], []
    for path in pages(root):
        page = path.read_text(encoding="utf-8")
        wrong += [f"{path.relative_to(root)}: {problem}" for problem in problems(page, known)]
        wanted = filled(page, parts)
        if wanted != page:
            late.append(str(path.relative_to(root)))
            if not check:
                path.write_text(wanted, encoding="utf-8")
    for problem in wrong:
        print(problem, file=sys.stderr)
    if late:
        print(f"{'out of date' if check else 'written'}: {', '.join(late)}")
    return int(bool(wrong) or (bool(late) and check))


if __name__ == "__main__":
    sys.exit(main())
