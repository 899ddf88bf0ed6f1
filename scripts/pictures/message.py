"""The message of a sync, byte by byte. Its layout is read from the kernels."""

from __future__ import annotations

import struct
from types import MappingProxyType

from fp8dist_kernels.header import HEADER, WORD_MANIFEST, WORD_SCALE_HIGH, WORD_SCALE_LOW, WORD_STEP, WORDS
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN, DID_NOT_RUN_BITS
from scripts.pictures.svg import document, line, rect, text

__all__ = ["draw"]

BYTES = 4
"""Bytes per word."""

_NAMES = MappingProxyType(
    {
        WORD_MANIFEST: "manifest",
        WORD_STEP: "step",
        WORD_SCALE_LOW: "scales, low",
        WORD_SCALE_HIGH: "scales, high",
    }
)
SLOTS = 672
"""Slots in the example at the bottom: 224 Linears."""

LEFT, ACROSS, ROW = 28, 704, 46


def draw() -> str:
    """Return the picture as SVG."""
    total = BYTES * HEADER
    description = (
        f"An array of int32 words. Bytes 0 to {BYTES * WORDS}: {', '.join(_NAMES[word] for word in range(WORDS))}. "
        f"Bytes {BYTES * WORDS} to {total}: the complement of each of these words. From byte {total} on: one float32 "
        "amax for each slot. One integer MAX over all ranks reduces it."
    )
    notes = (
        "Amaxes: the bits of non-negative floats order as the floats do, and NaN is above Inf. A slot that\n"
        f"did not run sends {DID_NOT_RUN:g}, which is negative as an integer too, so any amax wins.\n"
        f"With {SLOTS} slots a message has {total} + {BYTES} * {SLOTS} = {total + BYTES * SLOTS} bytes."
    )
    return document(
        "The message of a sync",
        description,
        556,
        [
            text(LEFT, 32, f"send: int32[{HEADER} + n] for n slots", bold=True, mono=True, size=14),
            text(LEFT + ACROSS, 32, "byte offsets above the words", "muted", anchor="end"),
            *_words(66, 0, [_NAMES[word] for word in range(WORDS)], "blue"),
            *_words(142, WORDS, [f"~ {_NAMES[word]}" for word in range(WORDS)], "purple"),
            *_amaxes(218),
            text(LEFT, 300, "What one integer MAX over the ranks does to it", bold=True, size=14),
            *_example(
                316,
                "blue",
                "header word and its complement",
                [("rank 0", "7", "~7"), ("rank 1", "7", "~7"), ("MAX", "7", "~7")],
                "word = ~complement:\nall ranks sent the same",
            ),
            *_example(
                316 + 88,
                "red",
                "… where a rank differs",
                [("rank 0", "7", "~7"), ("rank 1", "8", "~8"), ("MAX", "8", "~7")],
                "word ≠ ~complement:\nthe ranks differ",
            ),
            text(LEFT, 500, notes),
        ],
    )


def _words(y: float, first: int, names: list[str], colour: str) -> list[str]:
    width = ACROSS / WORDS
    parts = []
    for place, name in enumerate(names):
        x = LEFT + place * width
        parts += [
            rect(x, y, width, ROW, colour, radius=0),
            text(x + width / 2, y + 28, name, colour, anchor="middle", bold=True),
            text(x + 2, y - 5, str(BYTES * (first + place)), "muted", mono=True, size=12),
        ]
    return parts


def _amaxes(y: float) -> list[str]:
    """Return the words of some slots, with an ellipsis for the others."""
    width = ACROSS / WORDS
    words = [
        (f"{BYTES * HEADER}", "amax of slot 0", f"3.25 = {_hex(_bits(3.25))}"),
        (f"{BYTES * (HEADER + 1)}", "amax of slot 1", f"{DID_NOT_RUN:g} = {_hex(DID_NOT_RUN_BITS)}"),
        ("…", "…", ""),
        (f"{BYTES * HEADER} + 4 (n - 1)", "amax of slot n - 1", f"0.5 = {_hex(_bits(0.5))}"),
    ]
    parts = []
    for place, (offset, name, example) in enumerate(words):
        x = LEFT + place * width
        parts += [
            rect(x, y, width, ROW, "orange", radius=0),
            text(x + width / 2, y + 19, name, "orange", anchor="middle", bold=True),
            text(x + 2, y - 5, offset, "muted", mono=True, size=12),
        ]
        if name == "…":
            continue
        parts.append(text(x + width / 2, y + 37, example, "orange", anchor="middle", mono=True, size=12))
    return parts


def _bits(value: float) -> int:
    """Return the bits of a float32."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


def _hex(bits: int) -> str:
    return f"0x{bits & 0xFFFFFFFF:08x}"


def _example(y: float, colour: str, title: str, rows: list[tuple[str, str, str]], outcome: str) -> list[str]:
    parts = [text(LEFT, y + 30, title, colour, bold=True)]
    for place, (who, word, complement) in enumerate(rows):
        top = y + 23 * place
        parts += [
            text(330, top + 16, who, "card" if who == "MAX" else "muted", anchor="end", bold=who == "MAX"),
            rect(342, top, 62, 21, "blue", radius=2),
            text(373, top + 15, word, "blue", anchor="middle", mono=True),
            rect(410, top, 62, 21, "purple", radius=2),
            text(441, top + 15, complement, "purple", anchor="middle", mono=True),
        ]
    parts.append(line((484, y + 57), (500, y + 57), colour))
    parts.append(text(508, y + 52, outcome, colour))
    return parts
