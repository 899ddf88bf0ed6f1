"""docs/images/run-report.png: the first panels of ``fp8dist report``, of a made-up run, in headless Chromium.

.venv/bin/python -m scripts.pictures.run_report

Not one of PICTURES, because its bytes depend on the browser and its fonts.
"""

from __future__ import annotations

import io
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from fp8dist.runs.report.numbers import read_run
from fp8dist.runs.report.page import page_of
from scripts.pictures.__main__ import FOLDER
from tests.support.runs import made_run

SLOT = "blocks.1.down:input"
"""The slot with the planted outlier."""


def main() -> None:
    """Write the picture."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as started:
        path = Path(folder) / "report.html"
        path.write_text(page_of(read_run(made_run(Path(folder) / "run"))), encoding="utf-8")
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 1560})
        page.goto(path.as_uri())
        page.wait_for_function("document.documentElement.dataset.ready == 'yes'")
        page.select_option("#slot", label=SLOT)
        page.wait_for_timeout(1000)  # Milliseconds, to draw.
        picture = Image.open(io.BytesIO(page.screenshot())).convert("P", palette=Image.Palette.ADAPTIVE, colors=200)
        browser.close()
    picture.save(FOLDER / "run-report.png", optimize=True)


if __name__ == "__main__":
    main()
