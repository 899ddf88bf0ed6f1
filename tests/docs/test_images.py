"""docs/images: pages show each picture, a reader can read it, and its figures are those of runs.

The pictures are edited by hand.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from unittest import mock
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fp8dist
from scripts import results_files
from scripts.convergence.comparison import compare
from scripts.convergence.variants import VARIANTS
from tests.support.pages import ROOT, pages
from tests.support.ranks import RankPool

FOLDER = ROOT / "docs" / "images"
PICTURES = sorted(path.name for path in FOLDER.glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
ODD, STEPS = 2, 3


def test_pages_show_every_picture_and_describe_it() -> None:
    shown = {}
    for text in pages().values():
        shown.update({Path(path).name: alt for alt, path in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", text)})
    assert set(shown) == {path.name for path in FOLDER.iterdir()}
    assert min(map(len, shown.values())) > 10


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_loads_nothing_and_can_be_read(name: str) -> None:
    """Contrast is at least 4.5 (WCAG 2, AA), in the light and the dark variant."""
    content = (FOLDER / name).read_text(encoding="utf-8")
    root = ElementTree.fromstring(content)
    for tag in ("title", "desc"):
        found = root.find(SVG + tag)
        assert found is not None
        assert found.text
        assert found.get("id") in root.get("aria-labelledby", "").split()
    elsewhere = content.replace('xmlns="http://www.w3.org/2000/svg"', "", 1)
    assert not re.search(r"https?:|href|url\(|@import|@font-face|<(image|script|foreignObject)", elsewhere)
    style, texts = root.findtext(f"{SVG}style") or "", list(root.iter(f"{SVG}text"))
    assert "font-size" not in style
    assert texts
    for text in texts:
        assert float(text.get("font-size", 0)) >= 12, text.text
        assert 0 < float(text.get("x", 0)) < float(root.get("width", 0)), text.text
        assert 0 < float(text.get("y", 0)) < float(root.get("height", 0)), text.text
    variants = style.split("@media")
    assert len(variants) == 2
    for variant in variants:
        fills = dict(re.findall(r"\.([a-z]+) \{ fill: (#\w{6})", variant))
        inks = dict(re.findall(r"\.([a-z]+)-ink \{ fill: (#\w{6})", variant))
        assert len(fills) == len(inks) > 5
        for ink_name, ink in inks.items():
            own = [fills[other] for other in (ink_name, "card", "grid")]
            for fill in fills.values() if ink_name in ("card", "muted") else own:
                assert _contrast(ink, fill) >= 4.5, (ink_name, ink, fill)


def _contrast(one: str, other: str) -> float:
    dark, light = sorted(map(_luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_final_gaps_in_the_picture_of_losses_are_those_of_the_results() -> None:
    """If this fails, the curves are of other runs than the tables: draw the picture anew from the results."""
    data = results_files.load("convergence", ROOT)
    assert data is not None
    found = {VARIANTS[name].title: one.training_gap for name, one in compare(data["runs"]).items()}
    for name in ("mxfp8", "fp8-gradients"):  # Measured later, on another machine.
        found.pop(VARIANTS[name].title, None)
    gaps = {title: f"{gap.mean:+.3f} %" for title, gap in found.items() if gap is not None}
    root = ElementTree.parse(FOLDER / "losses.svg").getroot()
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    assert [text.removeprefix("final ") for text in texts if text.startswith("final ")] == list(gaps.values())
    assert [text for text in texts if text in gaps] == list(gaps)
    description = root.findtext(f"{SVG}desc") or ""
    assert all(f"{title} {gap}" in description for title, gap in gaps.items())


def _flipped() -> str:
    """Train for some steps, flip a bit of a weight on one rank, and return the report of the check."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).bfloat16()
    manager = fp8dist.prepare(model, fp8dist.DelayedScaling(history_len=16), group=dist.group.WORLD)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-2)
    manager.attach(parallel, optimizer=optimizer)
    report = None
    for step in range(1, STEPS + 1):
        parallel(torch.randn(32, 64, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == STEPS and dist.get_rank() == ODD:
            weight = model.get_parameter("0.weight").detach()
            weight[3, 5].view(torch.int16).bitwise_xor_(1 << 4)
        with mock.patch.dict(os.environ, LOCAL_RANK=str(dist.get_rank())):
            report = manager.check(policy="warn")
    return str(report).replace(socket.gethostname(), "host0")


@pytest.mark.slow
def test_the_report_in_the_picture_is_what_three_ranks_print(three_ranks: RankPool) -> None:
    printed = three_ranks.run(_flipped)
    root = ElementTree.parse(FOLDER / "report.svg").getroot()
    shown = [text.text or "" for text in root.iter(f"{SVG}text") if text.get("class", "") == "card-ink mono"]
    assert printed[0].splitlines() == shown
