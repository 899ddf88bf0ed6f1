"""Read pickles as data: an unpickler that imports nothing, and calls only the builders that it is given.

``torch.load(weights_only=True)`` is not enough for hostile files: it allocates what the pickle asks for
(``torch.FloatTensor(10**9)``), crashes the interpreter on deep dict keys, reads legacy files whole, and runs
everything in the process's list of safe globals.

The result may be nested without end, or contain one list many times. Check types before you print, compare or hash any
part of it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, BinaryIO

from fp8dist.errors import CheckpointError
from fp8dist.files.failures import Unsupported

# Above this, a claimed length is compared with the rest of the file before the read allocates memory for it.
_SMALL = 1 << 16
_SCALARS = (str, int, float, bool, bytes, type(None))


@dataclass(frozen=True)
class Builder:
    """A function that pickles may call under the name of a global. ``make`` validates its arguments."""

    name: str
    make: Callable[..., Any]


@dataclass(eq=False, repr=False)
class Record:
    """An object whose class is not imported: the class's name, "module.name", and the pickled state."""

    name: str
    state: Any = None


class Unpickler:
    """Reads one pickle from a file of ``size`` bytes.

    A pickle is a program for a stack machine (``pickletools`` describes it). ``_OPERATIONS`` maps its opcodes to the
    methods here.

    Args:
        file: positioned at the pickle.
        vocabulary: the globals that the pickle may name: {"module.name": a value, or a Builder}. A Builder is called
            with the pickle's arguments.
        storage: called with each persistent id, with which torch.save refers to storages; its result replaces the id.
            None: persistent ids are refused.
    """

    def __init__(
        self,
        file: BinaryIO,
        size: int,
        vocabulary: Mapping[str, object],
        storage: Callable[[Any], object] | None = None,
    ) -> None:
        self._file, self._size = file, size
        self._vocabulary, self._storage = vocabulary, storage
        # Limits copies: a call may copy its arguments, and a pickle can pass one long text to many calls.
        self._room = 1_000_000 + 64 * size
        self._memo: dict[int, Any] = {}
        self._outer: list[list[Any]] = []
        self._stack: list[Any] = []

    def load(self) -> Any:
        """Return the pickled value.

        Raises:
            Unsupported: the pickle needs a global or an opcode that is not for data.
            CheckpointError: the pickle is damaged.
        """
        try:
            while (code := self._read(1)) != b".":
                operation = _OPERATIONS.get(code)
                if operation is None:
                    raise Unsupported(f"its pickle uses opcode {code!r}, expected those of tensors, numbers and text")
                operation(self)
            return self._stack.pop()
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, struct.error) as error:
            raise CheckpointError(f"its pickle is damaged: {type(error).__name__}: {error}") from None

    def _read(self, count: int) -> bytes:
        if count > _SMALL and count > self._size - self._file.tell():
            raise CheckpointError("its pickle is truncated")
        data = self._file.read(count)
        if len(data) != count:
            raise CheckpointError("its pickle is truncated")
        return data

    def _number(self, layout: str) -> int:
        number: int = struct.unpack(layout, self._read(struct.calcsize(layout)))[0]
        return number

    def _line(self) -> str:
        line = self._file.readline(_SMALL)
        if not line.endswith(b"\n"):
            raise CheckpointError("its pickle is truncated")
        return line[:-1].decode()

    def _marked(self) -> list[Any]:
        """Return what was pushed since the last mark, and make what was there before it the stack again."""
        items = self._stack
        self._stack = self._outer.pop()
        return items

    def _mark(self) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def _name(self, module: str, name: str) -> None:
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if full not in self._vocabulary:
            raise Unsupported(f"its pickle names {full}, expected plain tensors, numbers and text only")
        self._stack.append(self._vocabulary[full])

    def _name_from_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise CheckpointError("its pickle is damaged: a global without a name")
        self._name(module, name)

    def _call(self) -> None:
        arguments, builder = self._stack.pop(), self._stack.pop()
        if not isinstance(builder, Builder) or not isinstance(arguments, tuple):
            raise CheckpointError("its pickle is damaged: it calls an object that is not a constructor")
        self._room -= sum(len(value) for value in arguments if isinstance(value, (str, bytes, list, tuple, dict)))
        if self._room < 0:
            raise CheckpointError("its pickle copies values too often for a checkpoint")
        self._stack.append(builder.make(*arguments))

    def _set_state(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, Record):
            target.state = state
        elif not isinstance(target, dict):  # Attributes of an OrderedDict (a state_dict's _metadata) are dropped.
            raise CheckpointError("its pickle is damaged: it sets the state of an object without state")

    def _persistent(self) -> None:
        if self._storage is None:
            raise Unsupported("its pickle refers to a storage, expected none")
        self._stack.append(self._storage(self._stack.pop()))

    def _append(self, items: list[Any]) -> None:
        if not isinstance(self._stack[-1], list):
            raise CheckpointError("its pickle is damaged: it appends to an object that is not a list")
        self._stack[-1].extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise CheckpointError("its pickle is damaged: it sets items of an object that is not a dict")
        for key, value in zip(items[::2], items[1::2]):
            target[_hashable(key)] = value

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_items([key, value])

    def _marked_tuple(self) -> None:
        items = tuple(self._marked())  # First, because it replaces the stack.
        self._stack.append(items)

    def _tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise CheckpointError("its pickle is damaged: a tuple lacks items")
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def _text(self, layout: str) -> None:
        self._stack.append(self._read(self._number(layout)).decode())

    def _bytes(self, layout: str) -> None:
        self._stack.append(self._read(self._number(layout)))

    def _keep(self, place: int) -> None:
        self._memo[place] = self._stack[-1]


def _hashable(key: Any) -> Any:
    """Return the key if it is a scalar, a Record or a short tuple of scalars. Raise Unsupported otherwise: hashing a
    deep tuple overflows the C stack, or never ends."""
    plain = isinstance(key, (*_SCALARS, Record))
    if not plain and not (isinstance(key, tuple) and len(key) < 64 and all(isinstance(k, _SCALARS) for k in key)):
        raise Unsupported(f"its pickle has a dict key of type {type(key).__name__}, expected text or numbers")
    return key


_Operation = Callable[[Unpickler], object]
_OPERATIONS: Mapping[bytes, _Operation] = MappingProxyType(
    {
        b"\x80": lambda u: u._read(1),  # PROTO
        b"\x95": lambda u: u._read(8),  # FRAME
        b"(": lambda u: u._mark(),  # MARK
        b"N": lambda u: u._stack.append(None),  # NONE
        b"\x88": lambda u: u._stack.append(True),  # NEWTRUE
        b"\x89": lambda u: u._stack.append(False),  # NEWFALSE
        b"K": lambda u: u._stack.append(u._number("<B")),  # BININT1
        b"M": lambda u: u._stack.append(u._number("<H")),  # BININT2
        b"J": lambda u: u._stack.append(u._number("<i")),  # BININT
        b"\x8a": lambda u: u._stack.append(int.from_bytes(u._read(u._number("<B")), "little", signed=True)),  # LONG1
        b"G": lambda u: u._stack.append(struct.unpack(">d", u._read(8))[0]),  # BINFLOAT
        b"X": lambda u: u._text("<I"),  # BINUNICODE
        b"\x8c": lambda u: u._text("<B"),  # SHORT_BINUNICODE
        b"\x8d": lambda u: u._text("<Q"),  # BINUNICODE8
        b"C": lambda u: u._bytes("<B"),  # SHORT_BINBYTES
        b"B": lambda u: u._bytes("<I"),  # BINBYTES
        b"\x8e": lambda u: u._bytes("<Q"),  # BINBYTES8
        b"\x96": lambda u: u._bytes("<Q"),  # BYTEARRAY8, read as bytes
        b")": lambda u: u._stack.append(()),  # EMPTY_TUPLE
        b"\x85": lambda u: u._tuple(1),  # TUPLE1
        b"\x86": lambda u: u._tuple(2),  # TUPLE2
        b"\x87": lambda u: u._tuple(3),  # TUPLE3
        b"t": lambda u: u._marked_tuple(),  # TUPLE
        b"]": lambda u: u._stack.append([]),  # EMPTY_LIST
        b"a": lambda u: u._append([u._stack.pop()]),  # APPEND
        b"e": lambda u: u._append(u._marked()),  # APPENDS
        b"}": lambda u: u._stack.append({}),  # EMPTY_DICT
        b"s": lambda u: u._set_item(),  # SETITEM
        b"u": lambda u: u._set_items(u._marked()),  # SETITEMS
        b"c": lambda u: u._name(u._line(), u._line()),  # GLOBAL
        b"\x93": lambda u: u._name_from_stack(),  # STACK_GLOBAL
        b"R": lambda u: u._call(),  # REDUCE
        b"\x81": lambda u: u._call(),  # NEWOBJ: like a call of the class.
        b"b": lambda u: u._set_state(),  # BUILD
        b"Q": lambda u: u._persistent(),  # BINPERSID
        b"q": lambda u: u._keep(u._number("<B")),  # BINPUT
        b"r": lambda u: u._keep(u._number("<I")),  # LONG_BINPUT
        b"\x94": lambda u: u._keep(len(u._memo)),  # MEMOIZE
        b"h": lambda u: u._stack.append(u._memo[u._number("<B")]),  # BINGET
        b"j": lambda u: u._stack.append(u._memo[u._number("<I")]),  # LONG_BINGET
    }
)
