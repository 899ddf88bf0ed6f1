"""Pickles that are made to do harm when they are loaded."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

LEGACY_HEAD = b"".join(pickle.dumps(v, 2) for v in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
"""How files begin that torch.save writes without a zip archive."""


class Call:
    """Pickles as a call of the given function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def bombs(marker: Path) -> dict[str, Any]:
    """Return objects whose pickles create the file ``marker``, or prepare it, by what calls them."""
    leave = f"touch '{marker}'"
    return {
        "os.system": Call(os.system, leave),
        "eval": Call(eval, f"__import__('os').system({leave!r})"),
        "exec": Call(exec, f"__import__('pathlib').Path({str(marker)!r}).touch()"),
        "getattr": Call(getattr, Call(__import__, "os"), "system"),
        "import": Call(__import__, "this"),
        "open": Call(open, str(marker), "w"),
        "nested": {"a": [(Call(os.system, leave),)]},
        "argument": Call(torch.Size, Call(os.system, leave)),
        "load": Call(torch.load, str(marker)),
        "rebuild": Call(torch._utils._rebuild_tensor, Call(os.system, leave), 0, (1,), (1,)),
        "from type": Call(torch._tensor._rebuild_from_type_v2, os.system, torch.Tensor, (leave,), {}),
        "inside a storage": Call(torch.storage._load_from_bytes, pickle.dumps(Call(os.system, leave))),
        "a storage of it": Call(torch.storage._load_from_bytes, Call(os.system, leave)),
    }


def _hostile() -> Iterator[tuple[str, bytes]]:
    lists = (b"](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]) for i in range(60))
    copied = (
        b"\x80\x02c_codecs\nencode\nq\x00X\x40\x42\x0f\x00" + b"x" * 1_000_000 + b"X\x06\x00\x00\x00latin1\x86q\x01"
    )
    yield "a deep key", b"\x80\x02})" + b"\x85" * 150_000 + b"K\x01s."
    yield "a deep tuple", b"\x80\x02)" + b"\x85" * 100_000 + b"."
    yield "a deep list", b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."
    yield "a list in itself", b"\x80\x02]q\x00h\x00a."
    yield "a billion lists", b"\x80\x02]q\x00" + b"".join(lists) + b"."
    yield "a huge memo", b"\x80\x02Nr\xff\xff\xff\xffNj\x00\x00\x00\x7f."
    yield "a huge text", b"\x80\x02X\xff\xff\xff\x7fabc."
    yield "huge bytes", b"\x80\x05\x8e" + struct.pack("<Q", 1 << 62) + b"abc."
    yield "a huge allocation", b"\x80\x02ctorch\nFloatTensor\nJ\xff\xff\xff\x7f\x85R."
    yield "a huge storage", b"\x80\x02ctorch\nFloatStorage\nJ\xff\xff\xff\x7f\x85R."
    yield "a huge bytearray", b"\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R."
    yield "many copies", copied + b"h\x00h\x01R" * 100_000 + b"."
    yield "nothing", b"."
    yield "no end", b"\x80\x02}"
    yield "no mark", b"\x80\x02}u."
    yield "half a dict", b"\x80\x02}(K\x01u."
    yield "state of a tensor class", b"\x80\x02ctorch\nFloatStorage\n}b."
    yield "a call of a dtype", b"\x80\x02ctorch\nfloat32\n)R."
    yield "a lone surrogate", b"\x80\x02X\x03\x00\x00\x00\xed\xa0\x80."
    yield "a name with a line break", b"\x80\x02cevil\x0b\x1b[31m\nx\n."


HOSTILE = tuple(_hostile())
"""(name, pickle): what takes all memory, never ends, or is none."""
