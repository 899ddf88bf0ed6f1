"""The built site in a browser: every internal link has a target, and no page loads external resources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag, urljoin

import pytest

from tests.support.browser import needs_chromium, opened_browser
from tests.support.pages import ROOT, pages

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="mkdocstrings needs Python 3.11"),
    needs_chromium,
]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def _build(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the pages of a checkout. --quiet would ignore warnings."""
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(build, cwd=root, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of the built site."""
    folder = tmp_path_factory.mktemp("site")
    done = _build(ROOT, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


browser = pytest.fixture(scope="module")(opened_browser)


@pytest.mark.long
def test_every_link_leads_somewhere_and_nothing_comes_from_elsewhere(site: str, browser: Any) -> None:
    page = browser.new_page()
    trouble: list[str] = []
    page.on("console", lambda said: said.type == "error" and trouble.append(f"{page.url}: {said.text}"))
    page.on("pageerror", lambda error: trouble.append(f"{page.url}: {error}"))
    page.on("request", lambda request: request.url.startswith((site, "data:")) or trouble.append(request.url))
    page.on("response", lambda answer: answer.status < 400 or trouble.append(f"{answer.status} {answer.url}"))
    waiting, anchors, cited = [site], {}, []
    while waiting:
        address = waiting.pop()
        page.goto(address)
        anchors[address] = set(page.evaluate("[...document.querySelectorAll('[id]')].map(one => one.id)"))
        hidden = page.evaluate(
            "[...document.images].filter(one => !one.complete || !one.naturalWidth).map(one => one.src)"
        )
        trouble += [f"{address}: {image} does not show" for image in hidden]
        for link in page.evaluate("[...document.links].map(one => one.getAttribute('href'))"):
            target, anchor = urldefrag(urljoin(address, link))
            if target.startswith(site):
                cited.append((address, target, anchor))
                if not target.endswith(("/", ".html")):  # A file to download.
                    assert page.request.get(target).ok, (address, target)
                elif target not in anchors and target not in waiting:
                    waiting.append(target)
    broken = [
        (where, f"{target}#{anchor}") for where, target, anchor in cited if anchor and anchor not in anchors[target]
    ]
    assert (trouble, broken) == ([], [])
    assert len(anchors) == len(pages()) + 1  # All pages and the changelog.


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    for name in ("fp8dist", "kernels", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs" / "ddp.md").open("a") as page:
        page.write("\n[planted](no-such-page.md)\n")
    done = _build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    assert "no-such-page.md" in done.stderr
    assert "Aborted with 1 warnings" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "wanted",
    ["ManifestMismatchError", "RNG", "DistributedSampler", "different data", "clipping", "NaN", "OOM", "Llama"],
)
def test_the_search_finds_a_page(site: str, browser: Any, wanted: str) -> None:
    page = browser.new_page()
    page.goto(site)
    # Typed, not filled in: the page searches when a key is released, and reads the box once when it gets the focus.
    page.locator(".md-search__input").first.press_sequentially(wanted)
    page.locator(".md-search-result__item").first.wait_for(timeout=60_000)
    assert wanted.lower() in page.locator(".md-search-result__list").inner_text().lower()
    page.close()
