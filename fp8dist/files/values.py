"""Values in the pickles of torch.save: tensors, read as references to their storages, and plain values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fp8dist.errors import CheckpointError
from fp8dist.files.failures import Unsupported
from fp8dist.files.pickles import Builder
from fp8dist.files.slices import FileSlice

_DEEPEST = 100
_LARGEST_DIM = 1 << 48
_NUMBERS = (
    "float64 float32 float16 bfloat16 complex32 complex64 complex128 int64 int32 int16 int8 uint64 uint32 uint16 uint8 "
    "bool float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
)
DTYPES: Mapping[str, torch.dtype] = MappingProxyType({f"torch.{n}": getattr(torch, n) for n in _NUMBERS.split()})
_STORAGES: Mapping[str, torch.dtype] = MappingProxyType(  # A class of storages is reduced to the dtype of its elements.
    {
        "DoubleStorage": torch.float64,
        "FloatStorage": torch.float32,
        "HalfStorage": torch.float16,
        "BFloat16Storage": torch.bfloat16,
        "ComplexDoubleStorage": torch.complex128,
        "ComplexFloatStorage": torch.complex64,
        "LongStorage": torch.int64,
        "IntStorage": torch.int32,
        "ShortStorage": torch.int16,
        "CharStorage": torch.int8,
        "ByteStorage": torch.uint8,
        "BoolStorage": torch.bool,
        "UntypedStorage": torch.uint8,
    }
)


@dataclass(frozen=True)
class Storage:
    """A reference to a flat array in the file. ``key``: its name there."""

    key: str
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class StoredTensor:
    """A reference to a tensor: a strided view of a storage. Offset and strides are in elements of ``dtype``."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    conjugated: bool = False
    negated: bool = False

    @classmethod
    def whole(cls, storage: Storage) -> StoredTensor:
        return cls(storage, 0, (storage.numel,), (1,), storage.dtype)

    def check(self, available: int, whole: int) -> None:
        """Raise CheckpointError unless the tensor lies inside its storage, of which the file has ``available`` bytes.

        A tensor whose strides repeat elements (``expand``) needs little storage, but may be huge. So no tensor may have
        more bytes than the file, which has ``whole``.
        """
        extent = self.offset + self._extent()
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        room = min(available, self.storage.nbytes)
        if extent * self.dtype.itemsize > room or nbytes > whole:
            raise CheckpointError(
                f"a tensor of shape {self.shape} needs more than its storage {self.storage.key} of {room} bytes"
            )

    def _extent(self) -> int:
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride))

    def read(self, file: FileSlice, start: int) -> Tensor:
        """Return the values, contiguous, on the CPU. ``start``: byte of ``file`` at which the storage begins. Call
        ``check`` first."""
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        size = self.dtype.itemsize
        flat = file.bytes_at(start + self.offset * size, self._extent() * size).view(self.dtype)
        tensor = flat.as_strided(self.shape, self.stride).contiguous()
        tensor = tensor.conj().resolve_conj() if self.conjugated else tensor
        return -tensor if self.negated else tensor


def sizes(value: Any) -> tuple[int, ...]:
    """Return a shape, offsets or strides from a pickle, validated.

    Raises:
        CheckpointError: the value is not a tuple of sizes.
    """
    fit = isinstance(value, tuple) and len(value) <= 64
    if not fit or not all(type(n) is int and 0 <= n < _LARGEST_DIM for n in value):
        raise CheckpointError("its pickle is damaged: a shape is not a tuple of sizes")
    return tuple(value)


def storage_of(identity: Any) -> Storage:
    """Return the storage to which a persistent id of torch.save refers. Raise CheckpointError for another id."""
    kind, storage_class, key, _location, numel, *view = identity
    if kind != "storage" or not isinstance(storage_class, torch.dtype) or not isinstance(key, str):
        raise CheckpointError("its pickle is damaged: it refers to an object that is not a storage")
    if any(view):
        raise Unsupported("it has views of storages as torch 0.3 wrote them, expected a later format")
    sizes((numel,))
    return Storage(key, storage_class, numel)


def _tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, dtype: Any = None, metadata: Mapping[str, bool] | None = None
) -> StoredTensor:
    dtype = storage.dtype if dtype is None else dtype
    shape, stride = sizes(shape), sizes(stride)
    sizes((offset,))
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype) or len(shape) != len(stride):
        raise CheckpointError("its pickle is damaged: a tensor without storage, dtype or strides")
    flags = metadata or {}
    return StoredTensor(storage, offset, shape, stride, dtype, bool(flags.get("conj")), bool(flags.get("neg")))


def _tensor_v2(s: Any, o: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, metadata: Any = None) -> StoredTensor:
    return _tensor(s, o, shape, stride, None, metadata)


def _tensor_v3(
    s: Any, o: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, metadata: Any = None
) -> StoredTensor:
    return _tensor(s, o, shape, stride, dtype, metadata)


def _with_attributes(function: Any, _kind: Any, arguments: Any, _state: Any) -> Any:
    """Return a tensor without its Python attributes. Its class is in the vocabulary, so it is a plain tensor."""
    return function.make(*arguments)


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _mapping(content: Any = ()) -> dict[Any, Any]:
    if isinstance(content, dict):
        return dict(content)
    if content:
        raise Unsupported("its pickle has an OrderedDict as Python 2 wrote it, expected a later format")
    return {}


def _set(content: Any = ()) -> list[Any]:
    """Return a set's items in an order that does not depend on the process that wrote them."""
    if not all(isinstance(item, (str, int, float, bytes)) for item in content):
        raise Unsupported("its pickle has a set of more than numbers and text")
    return sorted(content, key=lambda item: (type(item).__name__, item))


def _encode(content: Any = b"", encoding: str = "latin1") -> bytes:
    """Return bytes, which old protocols write as text. Refuses a number, which ``bytes`` would take as a size."""
    if not isinstance(content, (str, bytes)) or encoding not in ("latin1", "latin-1"):
        raise CheckpointError("its pickle is damaged: the content of bytes is neither bytes nor text")
    return content if isinstance(content, bytes) else content.encode("latin1")


def _text(*parts: Any) -> str:
    """Return a device or a layout as text, such as "cuda:0"."""
    return ":".join(str(part) for part in parts if isinstance(part, (str, int)))


def _builders(**functions: Any) -> dict[str, object]:
    return {name: Builder(name, function) for name, function in functions.items()}


COMMON: Mapping[str, object] = MappingProxyType(
    {
        **DTYPES,
        **_builders(
            **{
                "collections.OrderedDict": _mapping,
                "torch.Size": lambda content=(): tuple(content),
                "torch.serialization._get_layout": _text,
            }
        ),
    }
)
TORCH_SAVE: Mapping[str, object] = MappingProxyType(
    {
        **COMMON,
        **{f"{place}.{name}": dtype for place in ("torch", "torch.cuda") for name, dtype in _STORAGES.items()},
        "torch.storage.UntypedStorage": torch.uint8,
        "torch.Tensor": "tensor",
        "torch.nn.parameter.Parameter": "parameter",
        **_builders(
            **{
                "torch._utils._rebuild_tensor": _tensor,
                "torch._utils._rebuild_tensor_v2": _tensor_v2,
                "torch._utils._rebuild_tensor_v3": _tensor_v3,
                "torch._utils._rebuild_parameter": _parameter,
                "torch._utils._rebuild_parameter_with_state": _parameter,
                "torch._tensor._rebuild_from_type_v2": _with_attributes,
                "torch.device": _text,
                "collections.Counter": _mapping,
                "builtins.set": _set,
                "builtins.bytearray": _encode,
                "builtins.complex": lambda real, imaginary: complex(real, imaginary),
                "_codecs.encode": _encode,
            }
        ),
    }
)


def flatten(value: Any, size: int, prefix: str = "") -> list[tuple[str, Any]]:
    """Return (dotted name, leaf) of all leaves of nested dicts, lists and tuples.

    Args:
        value: the nested value. A value that is no dict, list or tuple is its own leaf, with the name ``prefix``, or
            "value" without a prefix.
        size: size of its pickle in bytes, in proportion to which the result is limited.
        prefix: put before all names.

    Raises:
        CheckpointError: the nesting is too deep, or the value contains itself.
    """
    leaves: list[tuple[str, Any]] = []
    waiting: list[tuple[str, Any, int]] = [(prefix, value, 0)]
    # A pickle may refer to one list many times, so the output is limited in proportion to the pickle's size.
    room = 1_000_000 + 64 * size
    while waiting:
        name, found, depth = waiting.pop()
        if not isinstance(found, (dict, list, tuple)):
            leaves.append((name or "value", found))
            continue
        children: Iterable[tuple[Any, Any]] = found.items() if isinstance(found, dict) else enumerate(found)
        for key, child in children:
            whole = f"{name}.{key}" if name else str(key)
            room -= 16 + len(whole) + (len(child) if isinstance(child, (str, bytes)) else 0)
            if depth >= _DEEPEST or room < 0:
                raise CheckpointError("its dicts and lists are nested too deep or contain themselves")
            waiting.append((whole, child, depth + 1))
    return leaves


def plain_tensor(value: Any) -> Tensor:
    """Return a leaf as a tensor on the CPU. Numbers become int64, float64, complex128 or bool of shape (); text (in
    UTF-8) and bytes become uint8[n]; None becomes uint8[0]. An int beyond int64 becomes its decimal text, a dtype its
    name.

    Raises:
        Unsupported: the leaf is another object.
    """
    if isinstance(value, torch.dtype):
        value = str(value)
    if isinstance(value, bool):
        return torch.tensor(value, dtype=torch.bool, device="cpu")
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return torch.tensor(value, dtype=torch.int64, device="cpu")
    if isinstance(value, (float, complex)):
        dtype = torch.float64 if isinstance(value, float) else torch.complex128
        return torch.tensor(value, dtype=dtype, device="cpu")
    if value is not None and not isinstance(value, (int, str, bytes)):
        raise Unsupported(f"it holds a {type(value).__name__}, expected tensors, numbers and text")
    data = value if isinstance(value, bytes) else b"" if value is None else str(value).encode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
