"""Casts and products of a training step, taken down so that another rank can repeat them bit for bit.

A work is what one call of an op was given, and the digest of what it computed. It is one message of bytes: a header in
JSON, then the tensors. If the tensors take more than the limit, a work is a part of the call:

- of a product, some rows of ``a`` and some rows of ``b``. The other rows are zeros when it is repeated, so the same
  kernel runs with the same tiles. Rows computed alone would have other bits. Of ``matmul_grouped_columns`` that is a
  block of each expert's result.
- of a cast, some lines of ``x``, along the dim in which scales do not reach across lines.

``grouped_works`` has the others on rows that are sorted by expert.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8dist.checks.contents import Digester
from fp8dist.checks.grouped_works import repeat_grouped, take_grouped
from fp8dist.checks.work_parts import (
    ALIGNMENT,
    INTEGERS,
    OPERANDS,
    Taken,
    among_zeros,
    hash_of,
    lines_of,
    message_of,
    part_of_product,
    text_of,
)
from fp8dist_kernels import grouped_ops, ops

__all__ = ["Work", "described", "digest_of", "repeated", "take", "taken"]

_IMPLEMENTATIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {**ops.IMPLEMENTATIONS, **grouped_ops.IMPLEMENTATIONS}
)

_PRODUCTS = ("matmul", "matmul_grouped_columns")

_HEAD = 8
"""Bytes of the header's length."""

_ROOM = 160
"""Bytes in the header for each tensor: more than a name, a dtype, a shape and a place take."""


class Work(NamedTuple):
    """One call that was taken down.

    ``message``: uint8[bytes]. ``digest``: int64[2], of the part's results. ``what``: the call in words. ``share``: the
    part's share of the call's results.
    """

    message: Tensor
    digest: Tensor
    what: str
    share: float


def taken(
    op: str,
    site: int,
    args: tuple[Any, ...],
    options: Mapping[str, Any],
    results: Sequence[Tensor],
    limit: int,
    at: int,
    digester: Digester,
) -> Work | None:
    """Take down a call; None if there is nothing to repeat, because the tensors are empty. Local; copies.

    Args:
        op: name of the op, with the arguments and results of its call.
        limit: bytes of tensors. At least one block of lines is taken.
        at: a number that chooses which part is taken.
    """
    if any(not tensor.numel() for tensor in args[:2] if isinstance(tensor, Tensor)):
        return None
    header, tensors, found, share = take(op, args, options, results, limit, at)
    header |= {"op": op, "site": site, "backend": options.get("backend", "auto")}
    sizes = [x for x in args[:2] if isinstance(x, Tensor) and x.ndim > (op in grouped_ops.IMPLEMENTATIONS)]
    what = f"{op} of {' and '.join('x'.join(map(str, x.shape)) for x in sizes)}"
    return Work(_packed(header, tensors), digest_of(found, digester), what, share)


def take(
    op: str, args: tuple[Any, ...], options: Mapping[str, Any], results: Sequence[Tensor], limit: int, at: int
) -> Taken:
    """Return what ``taken`` takes down of a call. Does not wait for the device, if the scales are known."""
    grouped = op in grouped_ops.IMPLEMENTATIONS
    of_kind = _take_product if op in _PRODUCTS else take_grouped if grouped else _take_cast
    return of_kind(op, args, options, results, limit, at)


def _take_product(
    op: str, args: tuple[Any, ...], options: Mapping[str, Any], results: Sequence[Tensor], limit: int, at: int
) -> Taken:
    *operands, dtype = args
    a, b = operands[:2]
    rows, columns = part_of_product(a, b, limit, at)
    tensors = {**dict(zip(OPERANDS, operands)), "a": a[slice(*rows)], "b": b[slice(*columns)]}
    if options.get("bias") is not None:
        tensors["bias"] = options["bias"]
    header = {
        "dtype": text_of(dtype),
        "where": [*rows, *columns],
        "sizes": [len(a), len(b)],
        "fast_accumulation": options["fast_accumulation"],
        "sideways": not b.is_contiguous(),  # The kernel may be another one.
    }
    part = results[0][..., slice(*rows), slice(*columns)]
    return header, tensors, {"": part}, part.numel() / results[0].numel()


def _take_cast(
    op: str, args: tuple[Any, ...], options: Mapping[str, Any], results: Sequence[Tensor], limit: int, at: int
) -> Taken:
    x, dtype = args[0], args[4 if op == "quantize" else 1]
    if x.ndim == 3:  # Weights of experts, in one call. A part is of one of them.
        expert = hash_of(at, "expert") % len(x)
        of_one = [result[expert] if result.numel() else result for result in results]
        header, tensors, found, share = _take_cast(op, (x[expert], *args[1:]), options, of_one, limit, at)
        return {**header, "expert": expert}, tensors, found, share / len(x)
    dim = 0 if options["rows"] else 1
    count = x.shape[dim]
    first, end = lines_of(count, limit // (x.element_size() * x.shape[1 - dim]), at)
    header = {
        "dtype": text_of(dtype),
        "where": [first, end],
        "dim": dim,
        "rows": options["rows"],
        "columns": options["columns"] and (dim == 1 or end - first == count),
        "power_of_two": options["power_of_two"],
    }
    tensors = {"x": x.narrow(dim, first, end - first)}
    if op == "quantize":
        tensors["scale"] = _scale_of(x, args, options)
    elif op == "quantize_blocks":
        header["block"] = list(options["block"])
    return header, tensors, _results_of_cast(op, results, header, first, end), (end - first) / count


def described(work: Work) -> str:
    """Return the call in words, with the expert if the part is of one. Waits for the device."""
    header, tensors = _unpacked(work.message)
    expert = int(tensors["place"][0]) if "place" in tensors else header.get("expert")
    return work.what if expert is None else f"{work.what}, expert {expert}"


def repeated(message: Tensor) -> dict[str, Tensor]:
    """Repeat the work of a message, and return the results of its part by name. Local."""
    header, tensors = _unpacked(message)
    op = header["op"]
    run = functools.partial(_IMPLEMENTATIONS[op], backend=header["backend"])
    grouped = op in grouped_ops.IMPLEMENTATIONS
    repeat = _repeat_product if op in _PRODUCTS else repeat_grouped if grouped else _repeat_cast
    with torch.no_grad():
        return repeat(run, header, getattr(torch, header["dtype"]), tensors)


def _repeat_product(
    run: Callable[..., Any], header: dict[str, Any], dtype: torch.dtype, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    first_row, end_row, first_column, end_column = header["where"]
    b, bias = among_zeros(tensors["b"], header["sizes"][1], first_column), tensors.get("bias")
    if header["sideways"]:
        b = ops.IMPLEMENTATIONS["transpose"](b).t()
    rest = [tensors[name] for name in OPERANDS[2:] if name in tensors]
    how = {"fast_accumulation": header["fast_accumulation"], **({"bias": bias} if bias is not None else {})}
    product = run(among_zeros(tensors["a"], header["sizes"][0], first_row), b, *rest, dtype, **how)
    return {"": product[..., first_row:end_row, first_column:end_column]}


def _repeat_cast(
    run: Callable[..., Any], header: dict[str, Any], dtype: torch.dtype, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    x = tensors["x"]
    slot: list[Any] = []
    options = {name: header[name] for name in ("rows", "columns", "power_of_two")}
    if header["op"] == "quantize":
        cold = torch.zeros((), dtype=torch.bool, device=x.device)
        slot = [tensors["scale"], cold, torch.zeros((), device=x.device)]
        options |= {"record": False, "just_in_time": False, "margin": 0}
    elif header["op"] == "quantize_blocks":
        options["block"] = header["block"]
    results = run(x, *slot, dtype, **options)
    return _results_of_cast(header["op"], results, header, 0, x.shape[header["dim"]])


def digest_of(results: Mapping[str, Tensor], digester: Digester) -> Tensor:
    """Return the digest of results: int64[2] on their device. NaNs count as equal, whatever their bits."""
    tensors = [_canonical(results[name]) for name in sorted(results)]
    leaves, counts = digester.many_leaves(tensors)
    seeds = torch.zeros(len(tensors), 2, dtype=torch.int64)
    own = digester.on(tensors[0].device).digests(leaves, counts, seeds)
    place = torch.arange(1, len(tensors) + 1, device=own.device)[:, None]
    return (own * (2 * place + 1)).sum(0)


def _canonical(result: Tensor) -> Tensor:
    """Return the result with one bit pattern for all NaNs, whose bits depend on the order of the operands."""
    if result.itemsize > 1:
        return torch.where(result.isnan(), torch.nan, result)
    nan = result.float().isnan()
    return torch.where(nan, torch.full_like(result.view(torch.uint8), 0x7F), result.view(torch.uint8))


def _scale_of(x: Tensor, args: tuple[Any, ...], options: Mapping[str, Any]) -> Tensor:
    """Return the scale that ``quantize`` has cast with: the slot's, or one from x's own amax."""
    _, scale, cold, _, dtype = args
    lowest, highest = torch.aminmax(x)  # Unlike x.abs(), no copy of x.
    chosen = ops.IMPLEMENTATIONS["choose_scale"](
        torch.maximum(-lowest, highest),
        scale,
        cold,
        torch.zeros_like(scale),
        dtype,
        record=False,
        just_in_time=options["just_in_time"],
        margin=options["margin"],
        power_of_two=options["power_of_two"],
        outgrown=options.get("outgrown"),
        backend=options.get("backend", "auto"),
    )
    return chosen[0]


def _results_of_cast(
    op: str, results: Sequence[Tensor], header: Mapping[str, Any], first: int, end: int
) -> dict[str, Tensor]:
    """Return the part of a cast's results that belongs to these lines of x, by name."""
    of_rows, of_columns = slice(first, end), slice(first, end) if header["dim"] == 1 else slice(None)
    height = header.get("block", [1])[0]
    found = {}
    if op == "quantize":
        rows, columns, found["inv_scale"] = results
    else:
        rows, row_scales, columns, column_scales = results
        lines = slice(first // height, -(-end // height))
        if header["rows"]:
            found["inv_scale_rows"] = row_scales[lines]
        if header["columns"]:
            found["inv_scale_columns"] = column_scales[lines] if header["dim"] == 1 else column_scales
    if header["rows"]:
        found["rows"] = rows[of_rows]
    if header["columns"]:
        found["columns"] = columns[of_columns]
    return found


def _packed(header: dict[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the message. Each tensor has the alignment in it that it has in memory, because kernels depend on it."""
    end = _HEAD + len(json.dumps(header)) + _ROOM * len(tensors)
    places: dict[str, slice] = {}
    for name, tensor in tensors.items():
        begin = end + (tensor.data_ptr() - end) % ALIGNMENT
        end = begin + tensor.numel() * tensor.element_size()
        places[name] = slice(begin, end)
    described = [[name, text_of(t.dtype), list(t.shape), places[name].start] for name, t in tensors.items()]
    text = json.dumps({**header, "tensors": described}).encode()
    head = len(text).to_bytes(_HEAD, "little") + text
    device = next(iter(tensors.values())).device
    message = message_of(end, device)
    message.zero_()
    message[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8).to(device)
    for name, tensor in tensors.items():
        bits = tensor.detach().view(INTEGERS[tensor.element_size()])
        message[places[name]].view(bits.dtype).view(bits.shape).copy_(bits)
    return message


def _unpacked(message: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    length = int.from_bytes(bytes(message[:_HEAD].tolist()), "little")
    header = json.loads(bytes(message[_HEAD : _HEAD + length].tolist()))
    tensors = {}
    for name, dtype, shape, begin in header.pop("tensors"):
        kind = getattr(torch, dtype)
        nbytes = math.prod(shape) * kind.itemsize
        tensors[name] = message[begin : begin + nbytes].view(kind).view(shape)
    return header, tensors
