"""Works: casts and products of a training step, recorded so that another rank can repeat them bit for bit.

A *work* is one call of an op (``fp8dist_kernels.ops``, ``grouped_ops``): what it was given, and the digest of its
results. What it was given is one message of bytes: a header in JSON, then the tensors. If the tensors take more bytes
than the limit, the work is a part of the call. A *line* is a row or a column of a matrix, whichever way it is cut:

=========================== =============================================== ==========================================
op                          what is sent                                    what is compared
=========================== =============================================== ==========================================
a cast                      lines of x, along a dim across which no scale   the same lines of each copy and its scales
                            reaches; of weights that are cast together,
                            those of one expert
matmul,                     some rows of a and some rows of b               a block of the result, or of each expert's
matmul_grouped_columns                                                      result
matmul_grouped              some rows of one expert, some rows of its       a block of the result of these rows
                            matrix
=========================== =============================================== ==========================================

A repetition of a product fills the rows that were not sent with zeros. So the same kernel runs with the same tiles: a
product of some rows alone may have other bits.

A grouped op gets ``offsets``, int32[E], where each expert's rows end. They are known on the device only, and recording
does not wait for the device. So the sizes of a message follow from the numbers of rows and experts alone, and a place
that depends on the offsets is sent as a tensor. The expert is that of a row drawn from all rows that experts have. So
an expert without rows is never drawn, and one with many rows often.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8dist.checks.contents import Digester
from fp8dist.common.text import dtype_name
from fp8dist_kernels import BLOCK, MX_BLOCK, grouped_ops, ops
from fp8dist_kernels.reference.groups import cut
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN
from fp8dist_kernels.reference.nvfp4 import COUNTERS

_IMPLEMENTATIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {**ops.IMPLEMENTATIONS, **grouped_ops.IMPLEMENTATIONS}
)

_OPERANDS = ("a", "b", "inv_scale_a", "inv_scale_b")

_ARGUMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "quantize": ("x", "scale", "cold", "pending", "dtype"),
        "quantize_rowwise": ("x", "dtype"),
        "quantize_blocks": ("x", "dtype"),
        "quantize_mx": ("x", "dtype"),
        "quantize_nvfp4": ("x", "encode", "draw", "dtype"),
        "quantize_grouped": ("x", "offsets", "scale", "cold", "pending", "dtype"),
        "quantize_grouped_lines": ("x", "offsets", "dtype"),
        "quantize_grouped_mx": ("x", "offsets", "dtype"),
        "matmul": (*_OPERANDS, "dtype"),
        "matmul_grouped": (*_OPERANDS, "offsets", "dtype"),
        "matmul_grouped_columns": (*_OPERANDS, "offsets", "dtype"),
    }
)
"""The positional arguments of each op."""

_OPTIONS = (
    *("rows", "columns", "power_of_two", "block", "in_blocks", "round_up", "fast_accumulation", "backend"),
    *("key", "square", "hadamard", "stochastic"),
)
"""The options of a call that its repetition gets as well. A bias is sent as a tensor. The options by which a cast chose
its scale are not needed, because the scale is sent."""

_CHOSEN: Mapping[str, Any] = MappingProxyType({"record": False, "just_in_time": False, "margin": 0})
"""Options that make a cast use the scale that it is given."""

_HEAD = 8
"""Bytes of a message that hold the length of its header."""

_ROOM = 160
"""Bytes in the header for each tensor: more than its name, dtype, shape and position take."""

ALIGNMENT = 256
"""Bytes. torch chooses kernels by the alignment of operands, so a repetition gets operands with the same alignment:
the same address modulo this number."""

INTEGERS: Mapping[int, torch.dtype] = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})
"""Integer dtypes by item size. Tensors are copied as integers, because some FP8 ops are missing in torch."""

PartOfCall = tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor], float]
"""The header, the tensors to send, the results to compare by name, and their share of the call's results (0 to 1)."""


class Work(NamedTuple):
    """One recorded call, or a part of it.

    ``message``: uint8[bytes], what a repetition needs. ``digest``: int64[2], of the results. ``what``: the call in
    words. ``share``: of the call's results that are compared, 0 to 1.
    """

    message: Tensor
    digest: Tensor
    what: str
    share: float


def work_of_call(
    op: str,
    site: int,
    args: tuple[Any, ...],
    options: Mapping[str, Any],
    results: Sequence[Tensor],
    limit: int,
    at: int,
    digester: Digester,
) -> Work | None:
    """Record a call, with copies of its tensors. Local.

    Args:
        op: name of the op.
        site: number of the cast or product in the model, for the header.
        args, options, results: of the call: the positional and the named arguments, and what it returned.
        limit: the most bytes of tensors to send. At least one block of lines is sent.
        at: chooses which part is sent, such as the number of the step.

    Returns:
        The work; None if there is nothing to repeat, because the tensors are empty.
    """
    if any(not tensor.numel() for tensor in args[:2] if isinstance(tensor, Tensor)):
        return None
    header, tensors, found, share = part_of_call(op, args, options, results, limit, at)
    sizes = [x for x in args[:2] if isinstance(x, Tensor) and x.ndim > (op in grouped_ops.IMPLEMENTATIONS)]
    what = f"{op} of {' and '.join('x'.join(map(str, x.shape)) for x in sizes)}"
    return Work(_packed({**header, "site": site}, tensors), digest_of(found, digester), what, share)


def part_of_call(
    op: str, args: tuple[Any, ...], options: Mapping[str, Any], results: Sequence[Tensor], limit: int, at: int
) -> PartOfCall:
    """Return the part of a call that is recorded; for the arguments see ``work_of_call``. Local.

    Does not wait for the device, unless a cast chose its scale from the amax of x, which is then computed again.
    """
    given = {name: value for name, value in zip(_ARGUMENTS[op], args) if value is not None}
    kept = {"backend": "auto", **{name: options[name] for name in _OPTIONS if name in options}}
    header = {"op": op, "dtype": dtype_name(given["dtype"]), "options": kept}
    if "x" in given:
        return _part_of_cast(header, given, options, results, limit, at)
    del given["dtype"]
    if options.get("bias") is not None:
        given["bias"] = options["bias"]
    of_kind = _part_of_expert if op == "matmul_grouped" else _part_of_product
    return of_kind(header, given, results[0], limit, at)


def repeat_work(message: Tensor) -> dict[str, Tensor]:
    """Repeat the work of a message, uint8[bytes], on its device. Return the results to compare, by name. Local."""
    header, tensors = _unpacked(message)
    op, given, options = header["op"], dict(tensors), dict(header["options"])
    if "scale" in given:  # A cast with one scale for each tensor.
        scale = given["scale"]
        given |= {"cold": torch.zeros_like(scale, dtype=torch.bool), "pending": torch.zeros_like(scale)}
        options |= _CHOSEN
    elif "place" in given:  # A part of a product of one expert.
        given |= _expert_among_zeros(header, tensors)
    elif "where" in header and "x" not in given:  # A block of a product.
        given |= _block_among_zeros(header, tensors)
    if "bias" in given:
        options["bias"] = given["bias"]
    arguments = {**given, "dtype": getattr(torch, header["dtype"])}
    with torch.no_grad():
        results = _IMPLEMENTATIONS[op](*(arguments.get(name) for name in _ARGUMENTS[op]), **options)
        if "x" in given:
            return _lines_of_cast(results, header, 0, given["x"].shape[header["dim"]])
        if "place" in given:
            return {"": _rows_of_expert(results, given["place"], len(tensors["a"]), header["where"])}
        return {"": _block(results, header["where"]) if "where" in header else results}


def describe_work(work: Work) -> str:
    """Return the call in words, with the expert if the work is a part of one. Waits for the device."""
    header, tensors = _unpacked(work.message)
    expert = int(tensors["place"][0]) if "place" in tensors else header.get("expert")
    return work.what if expert is None else f"{work.what}, expert {expert}"


# Casts ----------------------------------------------------------------------------------------------


def _part_of_cast(
    header: dict[str, Any],
    given: dict[str, Any],
    options: Mapping[str, Any],
    results: Sequence[Tensor],
    limit: int,
    at: int,
) -> PartOfCall:
    """See ``part_of_call``. ``given``: the positional arguments by name."""
    x, offsets, kept = given["x"], given.get("offsets"), header["options"]
    grouped = header["op"] in grouped_ops.IMPLEMENTATIONS
    scale, share = _scale_of(given, options) if "scale" in given else None, 1.0
    # Weights of several experts [E, m, n]: one expert is sent if they are too large, or if the op is not a grouped one,
    # because such an op casts a single matrix as well.
    if x.ndim == 3 and (x.nbytes > limit or not grouped):
        header["expert"] = hash_of(at, "expert") % len(x)
        share /= len(x)
        one = slice(header["expert"], header["expert"] + 1) if grouped else header["expert"]
        x, scale = x[one], None if scale is None else scale[one]
        results = [result[one] if result.numel() else result for result in results]
    # x is cut where no scale reaches across the cut. A scale of a row belongs to all its features, so x is cut between
    # rows. Other grouped casts are cut between features, because a block of the transposed copy has its scale from
    # several rows.
    dim = -2 if kept["rows"] and (not grouped or kept.get("in_blocks") is False) else -1
    count = x.shape[dim]
    first, end = lines_of(count, limit * count // x.nbytes, at)
    kept["columns"] = kept["columns"] and (dim == -1 or end - first == count)
    header |= {"where": [first, end], "dim": dim}
    tensors = {"x": x.narrow(dim, first, end - first)}
    if offsets is not None:
        tensors["offsets"] = offsets if dim == -1 else (offsets - first).clamp(0, end - first)
    if scale is not None:
        tensors["scale"] = scale
    if "draw" in given:  # Random numbers of elements by their place in the whole.
        tensors |= {"encode": given["encode"], "draw": given["draw"].clone()}
        tensors["draw"][COUNTERS.index("first_token" if dim == -2 else "first_feature")] += first
    return header, tensors, _lines_of_cast(results, header, first, end), share * (end - first) / count


def _lines_of_cast(results: Sequence[Tensor], header: Mapping[str, Any], first: int, end: int) -> dict[str, Tensor]:
    """Return, by name, the part of a cast's results that belongs to lines ``first`` to ``end`` of x."""
    options, dim = header["options"], header["dim"]
    if len(results) == 3:
        rows, columns, inv_scale = results
        named = {"rows": rows, "columns": columns}
        found = {"inv_scale": inv_scale}
    else:
        named, found = dict(zip(("rows", "rows_inv_scale", "columns", "columns_inv_scale"), results)), {}
    height, width = options.get("block", (1, MX_BLOCK if header["op"].endswith("_mx") else BLOCK))
    for name, result in named.items():
        copy = name.partition("_")[0]
        if not options[copy]:
            continue
        if copy == "columns" and dim == -2:  # Then x was not cut; see ``_part_of_cast``.
            found[name] = result
            continue
        along = -2 if copy == "columns" else dim  # Rows of the transposed copy are features of x.
        unit = 1 if name == copy else height if along == -2 else width  # Lines of x for each line of the result.
        found[name] = result.narrow(along, first // unit, -(-end // unit) - first // unit)
    return found


def _scale_of(given: Mapping[str, Any], options: Mapping[str, Any]) -> Tensor:
    """Return the scale that a cast with one scale for each tensor used: that of its slot, or one from the amax of x.
    float32, 0-d, or [E] of experts."""
    x, scale, cold = given["x"], given["scale"], given["cold"]
    if not options["just_in_time"] and options.get("outgrown") is None:
        return scale
    how = {name: options.get(name) for name in ("just_in_time", "margin", "power_of_two", "outgrown", "backend")}
    if scale.ndim:
        amaxes = torch.full_like(scale, DID_NOT_RUN)
        looks = {**how, **_CHOSEN, "record": True, "outgrown": None, "rows": False, "columns": False}
        grouped_ops.IMPLEMENTATIONS["quantize_grouped"](
            x, given.get("offsets"), scale, cold, amaxes, given["dtype"], **looks
        )
        amaxes.clamp_(min=0)  # An expert without rows is cast as if it had zeros.
    else:
        lowest, highest = torch.aminmax(x)  # Unlike x.abs(), no copy of x.
        amaxes = torch.maximum(-lowest, highest)
    choose, each = ops.IMPLEMENTATIONS["choose_scale"], (one.reshape(-1) for one in (amaxes, scale, cold))
    chosen = [choose(*slot, torch.zeros_like(slot[1]), given["dtype"], record=False, **how)[0] for slot in zip(*each)]
    return torch.stack(chosen).view(scale.shape)


# Products -------------------------------------------------------------------------------------------


def _part_of_product(
    header: dict[str, Any], given: dict[str, Tensor], product: Tensor, limit: int, at: int
) -> PartOfCall:
    """Record some rows of a [m, k] and of b [n, k], and the block of the product that they make. See
    ``part_of_call``."""
    a, b = given["a"], given["b"]
    rows, columns = part_of_product(a, b, limit, at)
    header |= {"where": [*rows, *columns], "sizes": [len(a), len(b)]}
    header["sideways"] = not b.is_contiguous()  # The kernel of a transposed operand may be another one.
    part = _block(product, header["where"])
    tensors = {**given, "a": a[slice(*rows)], "b": b[slice(*columns)]}
    return header, tensors, {"": part}, part.numel() / product.numel()


def _block(product: Tensor, where: Sequence[int]) -> Tensor:
    """Return the block of the product at ``where``: first row, end of rows, first column, end of columns."""
    return product[..., slice(*where[:2]), slice(*where[2:])]


def _block_among_zeros(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the operands of the whole product: the rows that were sent, and zeros."""
    (m, n), (first_row, _, first_column, _) = header["sizes"], header["where"]
    b = among_zeros(tensors["b"], n, first_column)
    if header["sideways"]:
        b = ops.IMPLEMENTATIONS["transpose"](b).t()
    return {"a": among_zeros(tensors["a"], m, first_row), "b": b}


def _part_of_expert(
    header: dict[str, Any], given: dict[str, Tensor], product: Tensor, limit: int, at: int
) -> PartOfCall:
    """Record some rows of one expert in a [tokens, k], and some rows of its matrix in b [E, n, k]; the whole call, if
    it is small enough. See ``part_of_call``."""
    a, b = given["a"], given["b"]
    if a.nbytes + b.nbytes <= limit:
        return header, given, {"": product}, 1.0
    tokens, (experts, n, k) = len(a), b.shape
    # Most experts have fewer rows than twice the mean. Of an expert with more, different audits record different rows.
    likely = min(tokens, -(-2 * tokens // experts // BLOCK) * BLOCK)
    (first, end), columns = part_of_lines(likely, n, limit // (k * a.element_size()), at)
    height = end - first
    place = _place(cut(given["offsets"], tokens), height, at)
    tensors = {
        **given,
        "a": _bytes(a).index_select(0, _rows(place, height, tokens)).view(a.dtype),
        "b": _bytes(b)[:, slice(*columns)].index_select(0, place[:1])[0].view(b.dtype),
        "place": place,
    }
    header |= {
        "where": columns,
        "sizes": [tokens, experts, n],
        "alignment": [operand.data_ptr() % ALIGNMENT for operand in (a, b)],
    }
    part, share = _rows_of_expert(product, place, height, columns), height / tokens * (columns[1] - columns[0]) / n
    return header, tensors, {"": part}, share


def _expert_among_zeros(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the operands of the whole product: the rows that were sent, and zeros."""
    (tokens, experts, n), (first, end) = header["sizes"], header["where"]
    a, b, place = tensors["a"], tensors["b"], tensors["place"]
    shapes = (tokens, a.shape[1]), (experts, n, b.shape[1])
    whole_a, whole_b = (
        aligned(math.prod(shape), like, a.device).zero_().view(shape)
        for shape, like in zip(shapes, header["alignment"])
    )  # Bytes: FP8 has one per element.
    whole_a.index_copy_(0, _rows(place, len(a), tokens), _bytes(a))
    whole_b[:, first:end].index_copy_(0, place[:1], _bytes(b)[None])
    return {"a": whole_a.view(a.dtype), "b": whole_b.view(b.dtype)}


def _place(offsets: Tensor, height: int, at: int) -> Tensor:
    """Draw one of the rows that experts have, and return int64[3]: its expert, the first of at most ``height`` rows of
    this expert around the row, and the end of the expert's rows. Does not wait for the device.

    The drawn row is in the middle, except near the expert's ends. So each row is recorded at least half as often as any
    other row of its expert.
    """
    ends = offsets.long()
    # A fraction below 1 of all rows, in 30 bits: int64 does not overflow.
    drawn = ends[-1:] * (hash_of(at, "row") >> 2) >> 30
    expert = torch.searchsorted(ends, drawn, right=True).clamp_(max=len(ends) - 1)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    start, end = starts.index_select(0, expert), ends.index_select(0, expert)
    first = torch.minimum(drawn - height // 2, end - height)
    return torch.cat([expert, torch.maximum(first, start), end])


def _rows(place: Tensor, height: int, tokens: int) -> Tensor:
    """Return int64[height]: the numbers of the rows from the first one of ``place`` on. ``height`` is chosen on the
    host, so it may reach beyond the last token; such rows become the last one."""
    return (place[1] + torch.arange(height, device=place.device)).clamp_(max=tokens - 1)


def _rows_of_expert(product: Tensor, place: Tensor, height: int, columns: Sequence[int]) -> Tensor:
    """Return the part of a product [tokens, n] that is compared, [height, columns]. Rows beyond the expert's are 0."""
    ours = place[1] + torch.arange(height, device=place.device) < place[2]
    rows = product[:, slice(*columns)].index_select(0, _rows(place, height, len(product)))
    return torch.where(ours[:, None], rows, 0)


def _bytes(fp8: Tensor) -> Tensor:
    """Return FP8 as uint8: torch can select rows of these on every device."""
    return fp8.view(torch.uint8)


# Lines and memory -----------------------------------------------------------------------------------


def part_of_product(a: Tensor, b: Tensor, limit: int, at: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (first, end) of the rows of a [m, k] and of b [n, k] that are sent: all, or what ``limit`` bytes hold.
    ``at``: see ``lines_of``."""
    return part_of_lines(a.shape[0], b.shape[0], limit // (a.shape[1] * a.element_size()), at)


def part_of_lines(m: int, n: int, allowed: int, at: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (first, end) of the lines that are sent of ``m`` and of ``n``: all, or about ``allowed`` lines together.
    ``at``: see ``lines_of``."""
    if m + n <= allowed:
        return (0, m), (0, n)
    of_a = min(m, max(allowed // 2, allowed - n))
    return lines_of(m, of_a, at), lines_of(n, allowed - of_a, at + 1)


def lines_of(count: int, allowed: int, at: int) -> tuple[int, int]:
    """Return (first, end) of the lines that are sent of ``count``: all if ``allowed`` is as many, else whole blocks of
    ``BLOCK`` lines, at least one.

    ``at``: chooses which blocks, such as the number of the step. Audits with different numbers visit all.
    """
    if count <= allowed:
        return 0, count
    blocks = max(1, allowed // BLOCK)
    places = math.ceil(count / BLOCK) - blocks + 1
    first = hash_of(at) % places * BLOCK
    return first, min(count, first + blocks * BLOCK)


def hash_of(at: int, of: str = "lines") -> int:
    """Return a number below 2**32 that depends on ``at``, and on ``of``, what it is for.

    The steps at which one module is audited have a fixed distance. A multiplicative hash of such numbers would never
    choose some of the lines, so all bits of this hash depend on all bits of ``at``.
    """
    return int.from_bytes(hashlib.blake2b(f"{at} {of}".encode(), digest_size=4).digest(), "little")


def among_zeros(part: Tensor, size: int, start: int) -> Tensor:
    """Return [size, k]: zeros, with ``part`` [lines, k] from row ``start`` on. Its alignment is such that ``part``
    could be a view of it. If ``part`` has all rows, it is returned itself."""
    if part.shape[0] == size:
        return part
    line = part.shape[1] * part.element_size()
    whole = aligned(size * line, part.data_ptr() - start * line, part.device)
    whole = whole.zero_().view(part.dtype).view(size, part.shape[1])
    whole.view(INTEGERS[part.itemsize])[start : start + part.shape[0]] = part.view(INTEGERS[part.itemsize])
    return whole


def aligned(nbytes: int, like: int, device: torch.device) -> Tensor:
    """Return uint8[nbytes], not initialised, at an address that equals ``like`` modulo ``ALIGNMENT``."""
    memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
    start = (like - memory.data_ptr()) % ALIGNMENT
    return memory[start : start + nbytes]


# Digests and messages -------------------------------------------------------------------------------


def digest_of(results: Mapping[str, Tensor], digester: Digester) -> Tensor:
    """Return one digest of all results: int64[2] on their device. All NaNs count as equal."""
    tensors = [_canonical(results[name]) for name in sorted(results)]
    leaves, counts = digester.many_leaves(tensors)
    seeds = torch.zeros(len(tensors), 2, dtype=torch.int64)
    own = digester.on(tensors[0].device).digests(leaves, counts, seeds)
    place = torch.arange(1, len(tensors) + 1, device=own.device)[:, None]
    # Weighted by an odd number for each place: results that change places give another sum.
    return (own * (2 * place + 1)).sum(0)


def _canonical(result: Tensor) -> Tensor:
    """Return the result with the same bits in all NaNs. Kernels may compute NaNs with different bits."""
    if result.itemsize > 1:
        return torch.where(result.isnan(), torch.nan, result)
    nan = result.float().isnan()
    return torch.where(nan, torch.full_like(result.view(torch.uint8), 0x7F), result.view(torch.uint8))


def _packed(header: dict[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the message, uint8[bytes]. Each tensor has the same alignment in it as in memory, because torch chooses
    kernels by alignment."""
    end = _HEAD + len(json.dumps(header)) + _ROOM * len(tensors)
    places: dict[str, slice] = {}
    for name, tensor in tensors.items():
        begin = end + (tensor.data_ptr() - end) % ALIGNMENT
        end = begin + tensor.numel() * tensor.element_size()
        places[name] = slice(begin, end)
    listed = [[name, dtype_name(t.dtype), list(t.shape), places[name].start] for name, t in tensors.items()]
    text = json.dumps({**header, "tensors": listed}).encode()
    head = len(text).to_bytes(_HEAD, "little") + text
    device = next(iter(tensors.values())).device
    message = aligned(end, 0, device).zero_()
    message[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8).to(device)
    for name, tensor in tensors.items():
        bits = tensor.detach().view(INTEGERS[tensor.element_size()])
        message[places[name]].view(bits.dtype).view(bits.shape).copy_(bits)
    return message


def _unpacked(message: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (header, views of the tensors by name) of a message. Waits for the device."""
    length = int.from_bytes(bytes(message[:_HEAD].tolist()), "little")
    header = json.loads(bytes(message[_HEAD : _HEAD + length].tolist()))
    tensors = {}
    for name, dtype, shape, begin in header.pop("tensors"):
        kind = getattr(torch, dtype)
        nbytes = math.prod(shape) * kind.itemsize
        tensors[name] = message[begin : begin + nbytes].view(kind).view(shape)
    return header, tensors
