"""Fill the made parts of README.md, ARCHITECTURE.md and docs/: tables of measured figures, and of what the code says.

    python -m scripts.pages                     make all parts but the outputs of commands
    python -m scripts.pages --check             say which pages are out of date (exit status 1: some are)
    python -m scripts.pages commands [NAME …]   run the commands whose output is shown, all or these, and show it
    python -m scripts.pages --summary DIR       print the goals with the GPU results in DIR

A part is what stands between ``<!-- made: NAME -->`` and ``<!-- end of NAME -->``. scripts/pages/parts.py has the
names, and scripts/pages/commands.py those of the commands (``<!-- made: command NAME -->``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from scripts.pages.filling import ROOT, Parts, filled, pages, problems

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """See the top of this file."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.pages", description="Fill the made parts of the pages.", allow_abbrev=False
    )
    add = parser.add_argument
    add("commands", nargs="*", metavar="commands [NAME …]", help="run the commands whose output is shown")
    add("--check", action="store_true", help="write nothing; exit status 1 if a page is out of date")
    add("--summary", type=Path, metavar="DIR", help="print the goals with the GPU results in this folder")
    options = parser.parse_args(arguments)
    if options.summary:
        from scripts.benchmarks.gpu.tables import summary  # On a machine that may have torch and Triton only.

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
