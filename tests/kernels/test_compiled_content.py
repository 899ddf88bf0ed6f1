"""Machine code of the digest's kernel, compiled for GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import pytest

from tests.support.ahead_of_time import Compiled, compiled, table

pytestmark = [pytest.mark.long, pytest.mark.compiled]

WORDS_A_THREAD = 8
REGISTERS_FOR_THREE_PROGRAMS = 65536 // (3 * 256) // 8 * 8
WORDS_PER_CLOCK = 4.3e12 / 8 / (132 * 1.75e9)
"""Words that a multiprocessor of an H200 reads per clock at full memory bandwidth."""


@cache
def leaves(capability: int) -> Compiled:
    (kernel,) = compiled("tests.kernels.compiled.content", capability)
    return kernel


def loop_of(kernel: Compiled) -> list[str]:
    """Return the instructions of the innermost loop with 16-byte loads."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", kernel.sass)
    code = [(int(address, 16), text.strip()) for address, text in found]
    loops = []
    for end, text in code:
        jump = re.search(r"\bBRA(?:\.U)? (?:!?U?P\w+, )?(0x[0-9a-f]+)", text)
        if jump and int(jump[1], 16) < end:
            loops.append([t for address, t in code if int(jump[1], 16) <= address <= end])
    return min((loop for loop in loops if any("LDG.E.128" in t for t in loop)), key=len)


@pytest.mark.parametrize("capability", [90, 100])
def test_it_reads_16_bytes_at_a_time_and_adds_without_waiting(capability: int) -> None:
    kernel = leaves(capability)
    loop = loop_of(kernel)
    assert sum("LDG.E.128" in text for text in loop) * 2 == WORDS_A_THREAD
    assert sum("REDG.E.ADD.64" in text for text in loop) == 2
    assert not [text for text in loop if re.search(r"\bBAR\b|\bSTS\b|\bLDS\b", text)]
    assert kernel.shared <= 1 << 14  # 0, except that Triton 3.6 uses some for bytes at odd addresses.
    assert kernel.count(r"div\.full|\bMUFU\b", "ptx") == kernel.count(r"\bMUFU\b") == 0


@pytest.mark.parametrize("capability", [90, 100])
def test_three_programs_fit_and_nothing_is_spilled(
    capability: int, record_property: Callable[[str, object], None]
) -> None:
    kernel = leaves(capability)
    record_property("compiled", table([kernel]))
    assert kernel.registers <= REGISTERS_FOR_THREE_PROGRAMS
    assert kernel.stack == 0
    assert kernel.count(r"\bSTL\b|\bLDL\b") == 0


def test_a_word_takes_less_than_half_of_the_instructions_there_is_time_for() -> None:
    """Per clock, a multiprocessor issues for 128 threads. A multiplication takes 1/64 clock; a wide one counts
    as 1/32, to be safe."""
    loop = loop_of(leaves(90))
    per_word = len(loop) / WORDS_A_THREAD
    wide = sum("IMAD.WIDE" in text for text in loop)
    multiplications = (sum("IMAD" in text for text in loop) + wide) / WORDS_A_THREAD
    shuffles = sum("SHFL" in text for text in loop) / WORDS_A_THREAD
    print(f"a word: {per_word:.1f} instructions, {multiplications:.1f} of 1/64 clock, {shuffles:.1f} of 1/32 clock")
    assert per_word / 128 * WORDS_PER_CLOCK < 0.5
    assert multiplications / 64 * WORDS_PER_CLOCK < 0.75
    assert shuffles / 32 * WORDS_PER_CLOCK < 0.25
