"""Draw the pictures of the documentation into docs/images.

.venv/bin/python -m scripts.pictures                   draw all pictures
.venv/bin/python -m scripts.pictures boxes slot        draw some
.venv/bin/python -m scripts.pictures report --rerun    rerun the ranks of the divergence report, then draw it
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

from scripts.pictures import boxes, losses, mesh, message, report, slot, step, tiers

__all__ = ["FOLDER", "PICTURES"]

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"

PICTURES: MappingProxyType[str, Callable[[], str]] = MappingProxyType(
    {
        "boxes": boxes.draw,
        "step": step.draw,
        "message": message.draw,
        "mesh": mesh.draw,
        "tiers": tiers.draw,
        "report": report.draw,
        "slot": slot.draw,
        "losses": losses.draw,
    }
)


def main() -> None:
    """Parse the command line and write the pictures."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.pictures", description="Draw the pictures of the documentation."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(PICTURES)}")
    parser.add_argument("--rerun", action="store_true", help="run three ranks and keep the report that they print")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in PICTURES]
    if unknown:
        parser.error(f"there is no picture {unknown[0]}; there are {', '.join(PICTURES)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    if arguments.rerun:
        report.rerun()
    for name in arguments.names or PICTURES:
        path = FOLDER / f"{name}.svg"
        path.write_text(PICTURES[name](), encoding="utf-8")
        print(path.relative_to(FOLDER.parents[1]))


if __name__ == "__main__":
    main()
