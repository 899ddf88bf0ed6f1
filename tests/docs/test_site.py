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
    pytest.mark.xdist_group("site"),  # The site is built once.
    pytest.mark.skipif(sys.version_info < (3, 11), reason="mkdocstrings needs Python 3.11"),
    needs_chromium,
]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


WORDS = ("ManifestMismatchError", "RNG", "DistributedSampler", "different data", "clipping", "NaN", "OOM", "Llama")

PLANTED = "no-such-page.md"
"""A link that is broken. With --strict, mkdocs builds the site and then counts its warnings."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Return the folder of the site, of pages with one broken link, and what mkdocs printed."""
    root = tmp_path_factory.mktemp("pages")
    for name in ("fp8dist", "kernels", "scripts"):
        (root / name).symlink_to(ROOT / name)
    for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml"):
        shutil.copy(ROOT / name, root)
    shutil.copytree(ROOT / "docs", root / "docs")
    with (root / "docs" / "ddp.md").open("a") as page:
        page.write(f"\n[planted]({PLANTED})\n")
    # --quiet would ignore warnings.
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(root / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return root / "site", subprocess.run(build, cwd=root, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(built: tuple[Path, subprocess.CompletedProcess[str]]) -> Iterator[str]:
    """Return the address of the built site."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=built[0])) as server:
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
            if target.startswith(site) and not target.endswith(PLANTED):
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


@pytest.mark.long
@pytest.mark.nightly
def test_a_broken_link_fails_the_build_and_nothing_else_is_warned_of(built: Any) -> None:
    _, done = built
    assert done.returncode == 1
    assert PLANTED in done.stderr
    assert "Aborted with 1 warnings" in done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.nightly
def test_the_search_finds_a_page(site: str, browser: Any) -> None:
    page = browser.new_page()
    page.goto(site)
    box = page.locator(".md-search__input").first
    for wanted in WORDS:
        box.fill("")
        box.press_sequentially(wanted)  # Typed, not filled in: the page searches when a key is released.
        found = page.locator(".md-search-result__list", has_text=wanted)  # In any case.
        found.locator(".md-search-result__item").first.wait_for(timeout=60_000)
    page.close()
