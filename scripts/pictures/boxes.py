"""The parts of the project, and which uses which."""

from __future__ import annotations

from scripts.pictures.svg import arrow, document, rect, text

__all__ = ["draw"]


def draw() -> str:
    """Return the picture as SVG."""
    description = (
        "Your training program, launch/ and scripts/ use fp8dist/, which uses kernels/fp8dist_kernels/, "
        "which uses PyTorch and Triton. Nothing uses what is above it."
    )
    library = "keeps FP8 state the same on all ranks, checks it, hooks into DDP, FSDP and tensor parallelism"
    kernels = "casts, matrix products, updates of state arrays, digests: tensors only, no ranks, no modules"
    return document(
        "The parts of the project",
        description,
        262,
        [
            _box(24, 16, 224, "plain", "your training program", "model, data, optimizer, loop"),
            _box(268, 16, 224, "orange", "launch/", "starts ranks; an example job"),
            _box(512, 16, 224, "orange", "scripts/", "set up, test, measure, draw"),
            *(arrow((x, 76), (x, 100), "muted") for x in (136, 380, 624)),
            text(392, 93, "use", "muted"),
            _box(24, 104, 712, "blue", "fp8dist/", library),
            arrow((380, 164), (380, 188), "muted"),
            text(392, 181, "uses", "muted"),
            _box(24, 192, 712, "green", "kernels/fp8dist_kernels/", kernels),
        ],
    )


def _box(x: float, y: float, width: float, colour: str, name: str, what: str) -> str:
    return (
        rect(x, y, width, 56, colour)
        + text(x + 16, y + 23, name, colour, size=15, bold=True, mono=name.endswith("/"))
        + text(x + 16, y + 43, what)
    )
