"""``fp8dist report``: its flags, and the file that it writes."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import webbrowser
from pathlib import Path

from fp8dist.errors import ConfigurationError
from fp8dist.runs.report.numbers import read_run
from fp8dist.runs.report.parting import Digests, part
from fp8dist.state.storage import write_file


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    parser.add_argument("folder", metavar="RUN", type=Path, help="folder of a run, also while the job writes it")
    parser.add_argument("other", metavar="RUN2", type=Path, nargs="?", help="a second run: say where the two part")
    parser.add_argument("--out", metavar="FILE", type=Path, help="the HTML file to write; --open needs none")
    parser.add_argument("--open", action="store_true", help="show the file in a browser, and print its name")


def report(options: argparse.Namespace) -> None:
    """Write the report. A file that is there is replaced when the new one is complete.

    Without ``--out``, the file that a browser shows lies in a new folder for temporary files.

    Raises:
        ConfigurationError: a folder is not that of a run, Bokeh is not installed, or the file cannot be written.
    """
    if options.out is None and not options.open:
        raise ConfigurationError("give --out FILE for the HTML file, or --open to see it at once")
    try:
        from fp8dist.runs.report.page import page_of
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "bokeh":
            raise
        raise ConfigurationError("Bokeh draws the report: pip install 'fp8dist[report]'") from None
    if options.other is None:
        page = page_of(read_run(options.folder))
    else:
        digests = (Digests(), Digests())
        runs = (read_run(options.folder, digests[0].add), read_run(options.other, digests[1].add))
        page = page_of(*runs, part(runs, digests))
    out = options.out or Path(tempfile.mkdtemp(prefix="fp8dist-")) / "report.html"
    _write(out, page)
    if options.open:
        print(out)
        if not webbrowser.open(out.resolve().as_uri()):
            print("fp8dist report: found no browser: open this file yourself", file=sys.stderr)


def _write(path: Path, text: str) -> None:
    is_device = os.path.exists(path) and not os.path.isfile(path)
    target = path if is_device else Path(os.path.realpath(path))  # A link stays one.
    try:
        target.parent.stat()  # A folder that is missing is a mistake.
        write_file(target, text.encode("utf-8", errors="replace"))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from None
