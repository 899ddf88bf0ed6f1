"""Works on rows that are sorted by expert: what is taken down of grouped casts and products, and how it is repeated.

Where the experts' rows end is known on the device only, and nothing here waits for it. So sizes follow from the number
of rows and experts alone, and places that depend on the ends travel as tensors:

- Of ``matmul_grouped``, a part is some rows of one expert and some rows of its matrix. A position among the rows that
  experts have is drawn, so an expert without rows is never chosen, and one with many is chosen often.
- Of a cast of rows, some rows, or some features of all rows. Of a weight, some columns of one expert's matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8dist.checks.work_parts import (
    ALIGNMENT,
    INTEGERS,
    OPERANDS,
    Taken,
    aligned,
    hash_of,
    lines_of,
    part_of_lines,
    text_of,
)
from fp8dist_kernels import BLOCK, grouped_ops, ops
from fp8dist_kernels.reference.groups import cut
from fp8dist_kernels.reference.magnitude import DID_NOT_RUN

__all__ = ["repeat_grouped", "take_grouped"]


def take_grouped(
    op: str, args: tuple[Any, ...], options: Mapping[str, Any], results: Sequence[Tensor], limit: int, at: int
) -> Taken:
    """Return what ``works.taken`` takes down of a grouped cast or product. Does not wait for the device."""
    if op == "matmul_grouped":
        return _take_product(args, options, results[0], limit, at)
    return _take_cast(op, args, options, results, limit, at)


def repeat_grouped(
    run: Callable[..., Any], header: dict[str, Any], dtype: torch.dtype, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Repeat what ``take_grouped`` has taken down, and return the results of its part by name."""
    if header["op"] == "matmul_grouped":
        return _repeat_product(run, header, dtype, tensors)
    return _repeat_cast(run, header, dtype, tensors)


# Products ----------------------------------------------------------------------------------


def _take_product(args: tuple[Any, ...], options: Mapping[str, Any], product: Tensor, limit: int, at: int) -> Taken:
    a, b, _, _, offsets, dtype = args
    tensors = dict(zip(OPERANDS, args))
    if options.get("bias") is not None:
        tensors["bias"] = options["bias"]
    header: dict[str, Any] = {"dtype": text_of(dtype), "fast_accumulation": options["fast_accumulation"]}
    if a.nbytes + b.nbytes <= limit:
        return header, tensors, {"": product}, 1.0
    tokens, (experts, n, k) = len(a), b.shape
    # Most experts have fewer rows than twice their share. Of one with more, other audits take other rows.
    likely = min(tokens, -(-2 * tokens // experts // BLOCK) * BLOCK)
    (first, end), columns = part_of_lines(likely, n, limit // (k * a.element_size()), at)
    place = _place(cut(offsets, tokens), end - first, at)
    rows = _rows(place, end - first, tokens)
    tensors |= {
        "a": _bytes(a).index_select(0, rows).view(a.dtype),
        "b": _bytes(b)[:, slice(*columns)].index_select(0, place[:1])[0].view(b.dtype),
        "place": place,
    }
    header |= {
        "where": columns,
        "sizes": [tokens, experts, n],
        "alignment": [operand.data_ptr() % ALIGNMENT for operand in (a, b)],
    }
    return header, tensors, {"": _part(product, rows, place, columns)}, (end - first) / tokens * _share(columns, n)


def _repeat_product(
    run: Callable[..., Any], header: dict[str, Any], dtype: torch.dtype, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    place, bias, operands = tensors.pop("place", None), tensors.pop("bias", None), dict(tensors)
    if place is not None:
        (tokens, experts, n), (first, end) = header["sizes"], header["where"]
        a, b = tensors["a"], tensors["b"]
        rows = _rows(place, len(a), tokens)
        operands["a"], operands["b"] = (
            _zeros(shape, part, like)
            for shape, part, like in zip(((tokens, a.shape[1]), (experts, n, b.shape[1])), (a, b), header["alignment"])
        )
        _bytes(operands["a"]).index_copy_(0, rows, _bytes(a))
        _bytes(operands["b"])[:, first:end].index_copy_(0, place[:1], _bytes(b)[None])
    given = [operands[name] for name in OPERANDS]
    product = run(*given, dtype, bias=bias, fast_accumulation=header["fast_accumulation"])
    return {"": product if place is None else _part(product, rows, place, header["where"])}


def _place(offsets: Tensor, height: int, at: int) -> Tensor:
    """Draw a row that an expert has, and return int64[3]: the expert, the first of at most ``height`` of its rows
    around the one drawn, and the end of its rows. So each row is taken at least half as often as any other one of its
    expert."""
    ends = offsets.long()
    drawn = ends[-1:] * (hash_of(at, "row") >> 2) >> 30  # At most 2**61.
    expert = torch.searchsorted(ends, drawn, right=True).clamp_(max=len(ends) - 1)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    start, end = starts.index_select(0, expert), ends.index_select(0, expert)
    first = torch.minimum(drawn - height // 2, end - height)
    return torch.cat([expert, torch.maximum(first, start), end])


def _rows(place: Tensor, height: int, tokens: int) -> Tensor:
    """Return int64[height]: the rows from the first one of ``place`` on. The last one stands for those beyond."""
    return (place[1] + torch.arange(height, device=place.device)).clamp_(max=tokens - 1)


def _part(product: Tensor, rows: Tensor, place: Tensor, columns: Sequence[int]) -> Tensor:
    """Return the part of a product [tokens, n] that is compared: 0 for rows of other experts."""
    ours = place[1] + torch.arange(len(rows), device=place.device) < place[2]
    return torch.where(ours[:, None], product[:, slice(*columns)].index_select(0, rows), 0)


def _bytes(fp8: Tensor) -> Tensor:
    """Return FP8 as integers, which torch can gather on every device."""
    return fp8.view(INTEGERS[fp8.itemsize])


def _zeros(shape: tuple[int, ...], part: Tensor, like: int) -> Tensor:
    """Return zeros of this shape in the dtype of ``part``, at an address that is aligned as ``like``."""
    count = torch.Size(shape).numel()
    return aligned(count * part.itemsize, like, part.device).zero_().view(part.dtype).view(shape)


def _share(lines: Sequence[int], count: int) -> float:
    return (lines[1] - lines[0]) / count


# Casts ----------------------------------------------------------------------------------------------


def _take_cast(
    op: str, args: tuple[Any, ...], options: Mapping[str, Any], results: Sequence[Tensor], limit: int, at: int
) -> Taken:
    x, offsets = args[:2]
    by_tensor = op == "quantize_grouped"
    experts, chosen = len(args[2]) if by_tensor else len(offsets), slice(None)
    header: dict[str, Any] = {"dtype": text_of(args[5 if by_tensor else 2]), "power_of_two": options["power_of_two"]}
    if offsets is None and x.nbytes > limit:
        header["expert"] = hash_of(at, "expert") % experts
        chosen = slice(header["expert"], header["expert"] + 1)
        x = x[chosen]
    # Scales of rows reach across features. Other scales are given, or reach across rows.
    dim = 0 if not by_tensor and options["rows"] and not options["in_blocks"] else x.ndim - 1
    count = x.shape[dim]
    first, end = lines_of(count, limit * count // x.nbytes, at)
    header |= {
        "where": [first, end],
        "dim": dim,
        "rows": options["rows"],
        "columns": options["columns"] and (dim > 0 or end - first == count),
    }
    tensors = {"x": x.narrow(dim, first, end - first)}
    if offsets is not None:
        tensors["offsets"] = offsets if dim else (offsets - first).clamp(0, end - first)
    if by_tensor:
        tensors["scale"] = _scales_of(args, options)[chosen]
    else:
        header["in_blocks"] = options["in_blocks"]
    share = _share((first, end), count) / (experts if "expert" in header else 1)
    return header, tensors, _results_of_cast(results, header, first, end, chosen), share


def _repeat_cast(
    run: Callable[..., Any], header: dict[str, Any], dtype: torch.dtype, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    x, offsets = tensors["x"], tensors.get("offsets")
    options = {name: header[name] for name in ("rows", "columns", "power_of_two")}
    slots: list[Any] = []
    if "scale" in tensors:
        scale = tensors["scale"]
        slots = [scale, torch.zeros_like(scale, dtype=torch.bool), torch.zeros_like(scale)]
        options |= {"record": False, "just_in_time": False, "margin": 0}
    else:
        options["in_blocks"] = header["in_blocks"]
    results = run(x, offsets, *slots, dtype, **options)
    return _results_of_cast(results, header, 0, x.shape[header["dim"]], slice(None))


def _scales_of(args: tuple[Any, ...], options: Mapping[str, Any]) -> Tensor:
    """Return the scales that ``quantize_grouped`` has cast with: float32[E], the slots', or from x's own amaxes."""
    x, offsets, scale, cold, _, dtype = args
    if not options["just_in_time"] and options.get("outgrown") is None:
        return scale
    how = {name: options.get(name) for name in ("just_in_time", "margin", "power_of_two", "outgrown", "backend")}
    amaxes = torch.full_like(scale, DID_NOT_RUN)
    looks = {**how, "record": True, "just_in_time": False, "outgrown": None, "rows": False, "columns": False}
    grouped_ops.IMPLEMENTATIONS["quantize_grouped"](x, offsets, scale, cold, amaxes, dtype, **looks)
    choose = ops.IMPLEMENTATIONS["choose_scale"]
    # An expert without rows has amax -1, and is cast as if it had zeros.
    slots = zip(amaxes.clamp(min=0), scale, cold, torch.zeros_like(scale))
    return torch.stack([choose(*slot, dtype, record=False, **how)[0] for slot in slots])


def _results_of_cast(
    results: Sequence[Tensor], header: Mapping[str, Any], first: int, end: int, chosen: slice
) -> dict[str, Tensor]:
    """Return the part of a cast's results that belongs to these lines of x, by name. ``chosen``: experts of it."""
    dim, part = header["dim"], slice(first, end)
    found: dict[str, Tensor] = {}
    if "in_blocks" not in header:
        rows, columns, inv_scale = results
        found["inv_scale"] = inv_scale[chosen]
    else:
        rows, row_scales, columns, column_scales = results
        blocks = slice(first // BLOCK, -(-end // BLOCK))
        if header["rows"]:
            found["inv_scale_rows"] = row_scales[:, blocks] if dim else row_scales[part]
        if header["columns"]:
            of_features = (part,) if header["in_blocks"] else (slice(None), part)
            found["inv_scale_columns"] = column_scales[of_features] if dim else column_scales
    if dim == 2:  # A weight [E, n, k].
        rows, columns = (copy[chosen] if copy.numel() else copy for copy in (rows, columns))
    if header["rows"]:
        found["rows"] = rows.narrow(dim, first, end - first)
    if header["columns"]:
        found["columns"] = columns.narrow(dim - 1, first, end - first) if dim else columns
    return found
