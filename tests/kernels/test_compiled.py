"""Machine code of the kernels for GPUs: required and forbidden instructions, no spills, tensor cores kept busy."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable

import pytest

from tests.support.ahead_of_time import HOPPER, SHARED_MEMORY_LIMIT, Compiled, compiled, table
from tests.support.suite import few

pytestmark = [pytest.mark.long, pytest.mark.compiled]

DATA_CENTRE = pytest.mark.parametrize("capability", few([90, 100], 90))
CONSUMER_SHARED_MEMORY_LIMIT = 101_376
"""Bytes of shared memory that a block may use on an Ada or consumer Blackwell GPU."""
REGISTERS = 64
"""Limit for 1024 threads on a multiprocessor. Fewer threads have too few loads in flight to saturate memory."""

Check = Callable[..., list[Compiled]]


@pytest.fixture
def checked(record_property: Callable[[str, object], None]) -> Check:
    """Compile the launches of a function of ``compiled.py``, of which none spills. ``names``: how many there must be of
    each kernel, or in all. ``casts``: no inexact division, and no instructions that break adjacent FP8 stores (triton
    issue 11111)."""

    def check(launches: str, capability: int, names: dict[str, int] | int, casts: bool = False) -> list[Compiled]:
        kernels = compiled(launches, capability)
        record_property("compiled", table(kernels))
        assert names == (len(kernels) if isinstance(names, int) else Counter(kernel.kernel for kernel in kernels))
        shared = SHARED_MEMORY_LIMIT if capability in (90, 100) else CONSUMER_SHARED_MEMORY_LIMIT
        for kernel in kernels:
            name = f"{kernel.kernel}, {kernel.case}"
            assert (kernel.stack, kernel.count(r"\b(STL|LDL)\b")) == (0, 0), name
            assert kernel.shared <= shared, name
            if casts:
                assert not kernel.count(r"div\.(full|approx)|(min|max)[a-z.]*\.NaN|\.ftz", of="ptx"), name
        return kernels

    return check


@DATA_CENTRE
def test_casts(checked: Check, capability: int) -> None:
    # A gradient that is transposed in memory is read again for its sums.
    counts = {"choose_kernel": 3, "transpose_kernel": 3, "sums_kernel": 4, "add_up_kernel": 8}
    counts |= {"cast_kernel": 34, "amax_kernel": 15} if capability == 90 else {"cast_kernel": 14, "amax_kernel": 6}
    for kernel in checked("casts", capability, counts, casts=True):
        if kernel.kernel == "transpose_kernel":  # 16-byte loads and stores, and no conversion.
            assert kernel.registers <= REGISTERS, kernel.case
            assert (kernel.count(r"LDG\.E\.128"), kernel.count(r"STG\.E\.128")) == (4, 4), kernel.case
            assert not kernel.count(r"\b(LDG|STG)\.E\.(U8|S8|U16|64)\b"), kernel.case
            assert not kernel.count(r"cvt\.[a-z.]*f32", of="ptx"), kernel.case
            continue
        if kernel.kernel in ("sums_kernel", "add_up_kernel", "choose_kernel"):
            assert kernel.registers <= REGISTERS, kernel.case
            assert kernel.kernel == "choose_kernel" or not kernel.count(r"\bFFMA\b"), kernel.case
            continue
        # All programs measure a tensor together only where its slot is cold: they take tiles, publish, and wait.
        jointly = "one launch" in kernel.case and kernel.kernel == "cast_kernel"
        for order in ("release", "acquire"):
            assert kernel.count(rf"\.gpu\.{order}\b", of="ptx") == jointly, kernel.case
        if kernel.kernel != "cast_kernel":
            if "outgrown" in kernel.case:  # This kernel reads whole weights.
                assert kernel.registers <= 80, kernel.case
                assert kernel.count(r"LDG\.E\.128") >= 4, kernel.case
            continue
        converts = kernel.count(r"cvt\.rn\.satfinite\.e(4m3|5m2)x2\.f32", of="ptx")
        assert converts, kernel.case
        assert converts == kernel.count(r"cvt\.rn\.[a-z.]*e(4m3|5m2)x2", of="ptx"), kernel.case
        assert bool(kernel.count(r"\b(atom|red)\.[a-z.]*max\.s32", of="ptx")) == ("amax" in kernel.case), kernel.case
        if any(name in kernel.case for name in ("odd", "one for all", "every second", "very far")):
            continue
        # With sums, ptxas takes 79 for Blackwell, which leaves three tiles at a time. With a limit of 64 it spills. It
        # takes 78 for Hopper if the tensor is float32 and its slot may be cold; with Triton 3.6 69 without sums too.
        cold = jointly and kernel.case.startswith("fp32")
        more = capability != 90 or cold if "sums" in kernel.case else cold and "TRITON" in os.environ
        limit = 80 if more else REGISTERS
        assert kernel.registers <= limit, kernel.case
        assert kernel.count(r"LDG\.E\.128") >= 4, kernel.case
        assert not kernel.count(r"LDG\.E\.(64|U16)"), kernel.case
        straight_only = ": rows" in kernel.case and "transposed" not in kernel.case
        straight_only |= ": columns" in kernel.case and "transposed" in kernel.case
        if not straight_only:
            assert kernel.count(r"STG\.E\.128") == 2, kernel.case
        if "both" in kernel.case or straight_only:  # A 16-byte load gives 8 values: a warp writes 256 in a row.
            assert kernel.count(r"STG\.E\.64") == 4, kernel.case
        assert not kernel.count(r"STG\.E\.(U8|U16)"), kernel.case


@DATA_CENTRE
def test_amaxes_and_shares(checked: Check, capability: int) -> None:
    for kernel in checked("magnitude", capability, {"amax_kernel": 12 if capability == 90 else 6}, casts=True):
        assert kernel.count(r"\b(atom|red)\.[a-z.]*max\.s32", of="ptx") == 1, kernel.case
        if "wide" in kernel.case:
            # Edges of odd sizes are read element by element, each with an address of its own.
            assert kernel.registers <= (96 if "odd" in kernel.case else 80), kernel.case
            assert kernel.count(r"LDG\.E\.128") >= 4, kernel.case
    for kernel in checked("shares", capability, {"shares_kernel": 23 if capability == 90 else 12}, casts=True):
        assert kernel.count(r"\b(atom|red)\.[a-z.]*max\.s32", of="ptx") == 2, kernel.case
        assert kernel.count(r"div\.rn\.f32", of="ptx") == 2, kernel.case
        if not kernel.case.startswith(("bf16 odd", "fp16 every second")):
            wide = "f32" in kernel.case
            # Each thread of 1x32 holds the limits of four elements.
            assert kernel.registers <= (128 if wide or "1x32" in kernel.case else 80), kernel.case
            assert kernel.count(r"LDG\.E\.128") == (16 if wide else 8), kernel.case  # Whole tiles and edges.


@DATA_CENTRE
def test_casts_with_many_scales(checked: Check, capability: int) -> None:
    names = {"lines_kernel": 6, "amax_kernel": 2, "squares_kernel": 2}
    for kernel in checked("blocks", capability, names, casts=True):
        assert kernel.registers <= 80, kernel.case  # Three tiles at a time.
        # One read per tile, or one per copy where the two copies have separate scales.
        reads = 2 if kernel.kernel == "lines_kernel" and "rows" not in kernel.case.split(", ") else 1
        assert kernel.count(r"LDG\.E\.128") >= reads * (8 if "f32" in kernel.case else 4), kernel.case
        assert not kernel.count(r"LDG\.E\.(U8|U16|64)"), kernel.case
        assert kernel.count(r"LDG\.E\b(?!\.)") <= 9, kernel.case  # Scales.
        if kernel.kernel != "amax_kernel":
            assert kernel.count(r"cvt\.rn\.satfinite\.e(4m3|5m2)x2\.f32", of="ptx"), kernel.case
            assert kernel.count(r"div\.rn\.f32", of="ptx"), kernel.case
            assert kernel.count(r"STG\.E\.(128|64)") >= 4, kernel.case
            assert not kernel.count(r"STG\.E\.(U8|U16)"), kernel.case


@DATA_CENTRE
def test_gradients_on_the_wire(checked: Check, capability: int) -> None:
    for kernel in checked("wire", capability, {"encode_kernel": 4, "decode_kernel": 8}, casts=True):
        assert kernel.registers <= REGISTERS, kernel.case
        if kernel.kernel == "encode_kernel":
            assert kernel.count(r"LDG\.E\.128") >= 2, kernel.case
            assert kernel.count(r"div\.rn\.f32", of="ptx"), kernel.case
        else:
            assert not kernel.count(r"\bFFMA\b"), kernel.case  # The bits of the twin.
            assert kernel.count(r"STG\.E\.128"), kernel.case


def test_one_kernel_serves_all_slots() -> None:
    """The position of a slot in its arena and its ``outgrown`` limit must not trigger a recompilation, which would
    stall the first steps."""
    kernels = compiled("slots")
    assert len(kernels) == 3 * 6
    # Two casts (with and without ``outgrown``), the amax kernel of each, a cast in one launch, and ``observe``.
    assert len({kernel.ptx for kernel in kernels}) == 6


def test_sizes_of_1() -> None:
    """The interpreter does not show what a kernel cannot do with a constant."""
    assert len({one.kernel for one in compiled("ones")}) == 19


@DATA_CENTRE
def test_launch_and_commit(checked: Check, capability: int) -> None:
    """Divisions are IEEE, as on the CPU; one atomic addition per kernel."""
    for kernel in checked("update", capability, 8):
        assert kernel.count(r"div\.full|div\.approx|rcp\.approx", "ptx") == 0, kernel.case
        assert kernel.count(r"\bATOMG\.E\.ADD\.64") == 1, "a ticket"
        assert kernel.kernel != "commit_kernel" or kernel.count(r"div\.rn\.f32", "ptx") > 0


MX_KERNELS = {"mx_kernel": 8, "mx_scaled_kernel": 2, "rows_kernel": 1, "columns_kernel": 1}


@DATA_CENTRE
def test_mx(checked: Check, capability: int) -> None:
    """Blackwell's tensor cores apply the scales; Hopper's multiply bfloat16, into which MX numbers fit."""
    for kernel in checked("mx", capability, MX_KERNELS, casts=True):
        if kernel.kernel != "mx_kernel":
            blocks = kernel.count(r"tcgen05\.mma\.[a-z0-9_:.]*mxf8f6f4[a-z0-9_:.]*block_scale", of="ptx")
            assert (blocks > 0, kernel.count(r"HGMMA.*BF16") > 0) == (capability == 100, capability == 90), kernel.case
            continue
        assert kernel.registers <= REGISTERS, kernel.case
        assert kernel.count(r"cvt\.rn\.satfinite\.e(4m3|5m2)x2\.f32", of="ptx") == 8, kernel.case
        if "odd" not in kernel.case:
            assert kernel.count(r"LDG\.E\.128") == 2, kernel.case
            assert not kernel.count(r"LDG\.E\.(U8|U16|64)"), kernel.case
            assert kernel.count(r"STG\.E\.128") == 1, kernel.case


@DATA_CENTRE
def test_grouped_casts(checked: Check, capability: int) -> None:
    counts = zip(("amax_kernel", "cast_kernel", "line_amax_kernel", "lines_kernel"), (8, 10, 3, 6), (3, 3, 2, 4))
    names = {name: hopper if capability == 90 else blackwell for name, hopper, blackwell in counts}
    for kernel in checked("grouped_casts", capability, names, casts=True):
        name = f"{kernel.kernel}, {kernel.case}"
        assert kernel.count(r"LDG\.E\.128") >= 4, name
        assert not kernel.count(r"STG\.E\.(U8|U16)"), name
        if kernel.kernel == "cast_kernel":
            assert kernel.registers <= 64, name  # Four tiles at a time, as in ``test_casts``.
            assert kernel.count(r"STG\.E\.128") == (0 if kernel.case.endswith(": rows") else 2), name
            assert kernel.count(r"\b(atom|red)\.[a-z.]*max\.s32", of="ptx") == 1, name
        else:
            assert kernel.registers <= 96, name


def test_the_tail_of_torchs_product(checked: Check) -> None:
    (kernel,) = checked("tail", HOPPER, 1)
    assert kernel.count(r"STG\.E\.128") >= 4


def assert_tensor_cores(one: Compiled) -> int:
    """Assert that a product for a data centre's GPU loads in the background and keeps its tensor cores busy. Return the
    number of groups of products on Hopper."""
    assert one.count(r"\b(HMMA|QMMA|IMMA)\b") == 0, one.case
    assert one.count("UTMALDG") > 0, one.case
    if one.capability != HOPPER:
        assert one.count(r"UTC\w*MMA") > 0, one.case  # tcgen05.
        return 0
    # If ptxas serialises QGMMAs, with a wait after each, all of a group end in gsb0; else only the last does.
    groups = one.count(r"wgmma\.commit_group", of="ptx")
    assert one.count(r"QGMMA[^;]*gsb0") == groups > 0, one.case
    assert one.count("QGMMA") >= 4 * groups, one.case
    return groups


def assert_overlap(one: Compiled) -> None:
    """With fast accumulation, the products of a step overlap the wait for the operands of the next step."""
    if one.capability == HOPPER and one.case.startswith("fast"):
        assert one.count(r"wgmma\.wait_group\.sync\.aligned\s+1", of="ptx") == 1, one.case


PRODUCTS = {90: {"rows_kernel": 16, "columns_kernel": 15}, 100: {"rows_kernel": 12, "columns_kernel": 11}}


@DATA_CENTRE
def test_grouped_products(checked: Check, capability: int) -> None:
    for kernel in checked("grouped_matmuls", capability, PRODUCTS[capability]):
        assert kernel.count(r"STG\.E\.128") >= 4, kernel.case
        groups = assert_tensor_cores(kernel)
        assert_overlap(kernel)
        if capability == HOPPER:  # wgrad's last step is apart.
            assert groups == (2 if kernel.kernel == "columns_kernel" else 1), kernel.case


def test_products_on_hopper(checked: Check) -> None:
    hopper = checked("matmuls", HOPPER, 40)
    for one in hopper:
        assert_tensor_cores(one)
        assert_overlap(one)
        assert one.count(r"mma\.sync", of="ptx") == 0, one.case
        assert one.count("UTMASTG") > 0, one.case
    for formats, pair in (("E5M2.E4M3", "e5m2 x e4m3fn"), ("E4M3.E5M2", "e4m3fn x e5m2")):
        ours = [found for found in hopper if found.case.endswith(pair)]
        assert len(ours) == 3, "fast and tensorwise, slow and row-wise, 1 x 128 by 1 x 128"
        for one in ours:
            assert one.count(rf"QGMMA\.64x\d+x32\.F32\.{formats}") == one.count("QGMMA")


@pytest.mark.nightly
def test_products_on_blackwell(checked: Check) -> None:
    by_case = {one.case: one for one in checked("matmuls", 100, 33)}
    for case, one in by_case.items():
        assert_tensor_cores(one)
        if case.endswith(" sideways"):  # The tensor cores read this layout: no tile is transposed on the way.
            upright = by_case[case.removesuffix(" sideways")]
            for moves in (r"UTC\w*MMA", "UTMALDG", r"\bLDS", r"\bSTS", r"\bSTSM", r"\bLDSM"):
                assert one.count(moves) == upright.count(moves), (case, moves)


@pytest.mark.parametrize("capability", few([89, 120], 89))
def test_products_on_consumer_gpus(checked: Check, capability: int) -> None:
    for one in checked("matmuls", capability, 6):
        assert one.count("QMMA") > 0, one.case


@pytest.mark.parametrize(("capability", "count"), few([(90, 27), (100, 24), (89, 5), (120, 5)], (90, 27)))
def test_sums_with_a_buffer(checked: Check, capability: int, count: int) -> None:
    """They keep the pipeline of the product. Scaling and addition are two roundings: no FFMA."""
    for one in checked("matmuls_into", capability, count):
        if "block" not in one.case:
            assert one.count(r"\bFFMA2?\b") == 0, one.case
            assert one.count(r"\bFADD2?\b") > 0, one.case
        if capability == 90:
            assert_tensor_cores(one)
            assert one.count("UTMALDG") > 2, one.case


WORDS_A_THREAD = 8
REGISTERS_FOR_THREE_PROGRAMS = 65536 // (3 * 256) // 8 * 8
WORDS_PER_CLOCK = 4.3e12 / 8 / (132 * 1.75e9)
"""Words that a multiprocessor of an H200 reads per clock at full memory bandwidth."""


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


@DATA_CENTRE
def test_a_digest_reads_16_bytes_at_a_time_and_adds_without_waiting(checked: Check, capability: int) -> None:
    """Three programs fit, and on Hopper a word takes less than half of the instructions that there is time for: per
    clock, a multiprocessor issues for 128 threads. A multiplication takes 1/64 clock; a wide one counts as 1/32."""
    (kernel,) = checked("content", capability, 1)
    loop = loop_of(kernel)
    assert sum("LDG.E.128" in text for text in loop) * 2 == WORDS_A_THREAD
    assert sum("REDG.E.ADD.64" in text for text in loop) == 2
    assert not [text for text in loop if re.search(r"\bBAR\b|\bSTS\b|\bLDS\b", text)]
    assert kernel.shared <= 1 << 14  # 0, except that Triton 3.6 uses some for bytes at odd addresses.
    assert kernel.count(r"div\.full|\bMUFU\b", "ptx") == kernel.count(r"\bMUFU\b") == 0
    assert kernel.registers <= REGISTERS_FOR_THREE_PROGRAMS
    if capability == HOPPER:
        wide = sum("IMAD.WIDE" in text for text in loop)
        multiplications = (sum("IMAD" in text for text in loop) + wide) / WORDS_A_THREAD
        shuffles = sum("SHFL" in text for text in loop) / WORDS_A_THREAD
        assert len(loop) / WORDS_A_THREAD / 128 * WORDS_PER_CLOCK < 0.5
        assert multiplications / 64 * WORDS_PER_CLOCK < 0.75
        assert shuffles / 32 * WORDS_PER_CLOCK < 0.25
