"""``_extra_state`` entries of TransformerEngine's modules: the FP8 state of one module, read without unpickling it.

What ``get_extra_state`` makes of a module's state (TransformerEngine's ``pytorch/module/base.py``, earlier
``pytorch/module.py``):

===============  ======================================================================================
up to 0.2        a list: scale_fwd, amax_history_fwd, scale_bwd, amax_history_bwd, and more
0.x              a dict of them by name, with ``extra_fp8_variables``
0.x, 1.x         ``io.BytesIO`` of ``torch.save`` of the dict; for ONNX a uint8 tensor of its pickle
1.x              a uint8 tensor of the dict's pickle
2.x              the same with ``recipe``, an object of ``transformer_engine.common.recipe``
===============  ======================================================================================

A module that has not run in FP8 gives None, an empty tensor, or a pickle of None; a recipe without state, such as
current scaling, a dict without scales.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fp8dist.errors import CheckpointError
from fp8dist.offline.archives import LEGACY_MAGIC, Locate, legacy_content, zip_content
from fp8dist.offline.failures import reading
from fp8dist.offline.pickles import Builder, Record, Unpickler
from fp8dist.offline.slices import MemorySlice
from fp8dist.offline.values import TORCH_SAVE, Storage, StoredTensor
from fp8dist_kernels.formats import Role

__all__ = ["ExtraState", "SavedSlot", "read_extra_state"]

_SCALES = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
_STATELESS = ("recipe", "extra_fp8_variables")  # What is there besides, and all that is there of other recipes.
_RECIPES = "transformer_engine.common.recipe"
_CLASSES = (
    *("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "Float8BlockScaling", "NVFP4BlockScaling"),
    *("_OverrideLinearPrecision", "MMParams", "QParams"),
)
_SUBCLASSES = (
    "megatron.core.extensions.transformer_engine.TEDelayedScaling",
    "megatron.core.transformer.custom_layers.transformer_engine.TEDelayedScaling",
)
_MAXIMA: Mapping[str, tuple[float, float]] = MappingProxyType({"HYBRID": (448.0, 57344.0), "E4M3": (448.0, 448.0)})


@dataclass(frozen=True, eq=False)
class SavedSlot:
    """One scaled tensor of a module.

    Args:
        scale: positive; its inverse is finite.
        history: float32[any length], oldest first, zeros where nothing is known.
        due: the newest amax is not in the scale yet.
        fp8_max: largest finite value of the format that the scale is for, where the entry tells.
    """

    scale: float
    history: Tensor
    due: bool
    fp8_max: float | None


@dataclass(frozen=True, eq=False)
class ExtraState:
    """The FP8 state of a module of ``gemms`` GEMMs: ``slots`` by GEMM and role. ``margin``: None where it does not
    tell."""

    gemms: int
    slots: Mapping[tuple[int, Role], SavedSlot]
    margin: int | None


def read_extra_state(name: str, value: object) -> ExtraState | None:
    """The FP8 state in the ``_extra_state`` of one module; None if it has none.

    Args:
        name: what messages call it.
        value: as it is in a state_dict: a uint8 tensor, bytes, ``io.BytesIO``, None, or a dict or list as it was before
            there were bytes.

    Raises:
        CheckpointError: damaged, impossible, or more than data: nothing that a pickle names is imported or called.
    """
    with reading(name):
        content, load = _content(name, value)
        if isinstance(content, list):
            content = dict(zip(_SCALES, content))
        if content is None or content == {}:
            return None
        if not isinstance(content, dict):
            raise CheckpointError(f"holds a {type(content).__name__}, expected a dict of scales and amaxes")
        absent = [key for key in _SCALES if key not in content]
        if len(absent) == len(_SCALES) and any(key in content for key in _STATELESS):
            return None
        if absent:
            raise CheckpointError(f"lacks {', '.join(absent)}: not the state of a module such as te.Linear")
        return _state(content, load)


# What the bytes hold -------------------------------------------------------------------------------

_Load = Callable[[object], object]


def _content(name: str, value: object) -> tuple[Any, _Load]:
    """(what was saved, what turns its references to tensors into tensors)."""
    if isinstance(value, Tensor):
        if value.dtype != torch.uint8:
            raise CheckpointError(f"is a tensor of {value.dtype}, expected uint8")
        value = value.detach().cpu().contiguous().numpy().tobytes()
    elif isinstance(value, io.BytesIO):
        value = value.getvalue()
    if not isinstance(value, (bytes, bytearray)):
        if value is None or isinstance(value, (dict, list)):
            return value, lambda leaf: leaf
        raise CheckpointError(f"is of type {type(value).__name__}, expected a uint8 tensor, bytes or io.BytesIO")
    if not value:
        return None, lambda leaf: leaf
    file = MemorySlice(name, bytes(value))
    if value.startswith(b"PK"):
        content, _, locate = zip_content(file)
        return content, partial(_load, lambda storage: (file, locate))
    if value[:1] != b"\x80":
        raise CheckpointError(f"is no pickle: it starts with {bytes(value[:8])!r}")
    if value[2:].startswith(LEGACY_MAGIC):
        content, _, locate = legacy_content(file)
        return content, partial(_load, lambda storage: (file, locate))
    storages = _PickledStorages(name)
    vocabulary = {**_VOCABULARY, "torch.storage._load_from_bytes": Builder("torch.storage", storages.add)}
    return Unpickler(io.BytesIO(value), len(value), vocabulary).load(), partial(_load, storages.find)


class _PickledStorages:
    """Plain pickles hold each storage as bytes of torch.save, in the format before zip files."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._found: dict[str, tuple[MemorySlice, Locate, Storage]] = {}

    def add(self, data: object = None) -> Storage:
        """A reference to what ``data`` holds."""
        if not isinstance(data, bytes):
            raise CheckpointError("its pickle is damaged: a storage without bytes")
        file = MemorySlice(self._name, data)
        storage, _, locate = legacy_content(file)
        if not isinstance(storage, Storage):
            raise CheckpointError("its pickle is damaged: the bytes of a storage hold something else")
        key = str(len(self._found))
        self._found[key] = file, locate, storage
        return replace(storage, key=key)

    def find(self, storage: Storage) -> tuple[MemorySlice, Locate]:
        """The bytes that hold it, and where in them it is."""
        file, locate, inside = self._found[storage.key]
        return file, lambda _: locate(inside)


def _load(find: Callable[[Storage], tuple[MemorySlice, Locate]], leaf: object) -> object:
    if not isinstance(leaf, StoredTensor):
        return leaf
    file, locate = find(leaf.storage)
    start, available = locate(leaf.storage)
    leaf.check(available, file.length)
    return leaf.read(file, start)


def _member(of: object = None, name: object = None) -> Record:
    """An enum's member by name, as Python 3.11 began to pickle them. ``getattr`` of nothing else."""
    if not isinstance(of, Builder) or of.name != f"{_RECIPES}.Format" or not isinstance(name, str):
        raise CheckpointError("its pickle asks for an attribute of what is no format")
    return Record(of.name, name)


_VOCABULARY: Mapping[str, object] = MappingProxyType(
    {
        **TORCH_SAVE,
        **{
            name: Builder(name, partial(lambda name, *values: Record(name, values), name))
            for name in (*(f"{_RECIPES}.{n}" for n in _CLASSES), *_SUBCLASSES)
        },
        f"{_RECIPES}.Format": Builder(f"{_RECIPES}.Format", lambda value=None: Record(f"{_RECIPES}.Format", value)),
        f"{_RECIPES}._FormatHelper": Builder(f"{_RECIPES}._FormatHelper", lambda *maxima: maxima),
        "builtins.getattr": Builder("builtins.getattr", _member),
    }
)


# What it means -------------------------------------------------------------------------------------


def _state(content: Mapping[Any, Any], load: _Load) -> ExtraState:
    forward = _Columns("fwd", content, load)
    backward = _Columns("bwd", content, load)
    variables = content.get("extra_fp8_variables")
    variables = variables if isinstance(variables, dict) else {}
    gemms, per_forward, per_backward = _layout(len(forward), len(backward), variables.get("num_gemms"))
    gradients = _gradient_columns(gemms, per_backward, "recipe" in content, backward)
    recipe = _attributes(content.get("recipe"))
    fp8_max, gradient_max = _maxima(recipe, variables)
    slots = {}
    for gemm in range(gemms):
        slots[gemm, Role.INPUT] = forward.slot(per_forward * gemm, fp8_max)
        slots[gemm, Role.WEIGHT] = forward.slot(per_forward * gemm + 1, fp8_max)
        slots[gemm, Role.GRAD_OUTPUT] = backward.slot(gradients[gemm], gradient_max)
    margin = recipe.get("margin")
    return ExtraState(gemms, slots, margin if type(margin) is int and -64 <= margin <= 64 else None)


class _Columns:
    """The scaled tensors of one direction ("fwd" or "bwd"), in TransformerEngine's order.

    Raises:
        CheckpointError: shapes, dtypes or values are impossible.
    """

    def __init__(self, direction: str, content: Mapping[Any, Any], load: _Load) -> None:
        self._scale = _float32(f"scale_{direction}", content, load)
        self._history = _float32(f"amax_history_{direction}", content, load)
        scale, history = self._scale, self._history
        if scale.ndim != 1 or history.ndim != 2 or history.shape[1] != len(scale) or not len(history):
            raise CheckpointError(
                f"scale_{direction} has shape {tuple(scale.shape)} and amax_history_{direction} "
                f"{tuple(history.shape)}, expected [n] and [rows, n]"
            )
        if not bool(((scale > 0) & scale.isfinite() & scale.reciprocal().isfinite()).all()):
            raise CheckpointError(f"scale_{direction} holds a scale that is not positive and finite")
        if not bool(((history >= 0) & history.isfinite()).all()):
            raise CheckpointError(f"amax_history_{direction} holds an amax that is negative or not finite")

    def __len__(self) -> int:
        return len(self._scale)

    def slot(self, column: int, fp8_max: float | None) -> SavedSlot:
        """One of them.

        The amax of the present step grows in row 0. When a scale has been made of the window, it is rolled by -1, and
        row 0 becomes zero in place of the oldest amax (``_update_amax_history`` in TransformerEngine's
        ``pytorch/quantization.py``, earlier ``pytorch/fp8.py``). So from row 1 on they are oldest first, and row 0
        comes last, if there is anything in it.
        """
        rows = self._history[:, column]
        due = bool(rows[0] > 0)
        return SavedSlot(float(self._scale[column]), rows.roll(-1) if due else rows.clone(), due, fp8_max)

    def used(self, column: int) -> bool:
        """Whether the module has ever seen this tensor."""
        return bool(self._scale[column] != 1) or bool(self._history[:, column].any())


def _float32(name: str, content: Mapping[Any, Any], load: _Load) -> Tensor:
    tensor = load(content[name])
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise CheckpointError(f"{name} is of {kind}, expected a float32 tensor")
    return tensor.detach().cpu()


def _layout(forward: int, backward: int, claimed: object) -> tuple[int, int, int]:
    """(GEMMs, forward tensors per GEMM, backward tensors per GEMM).

    Input, weight and output, and the gradients of output and input; in early 0.x input and weight, and the gradient of
    the output (``FP8FwdTensors`` and ``FP8BwdTensors``).
    """
    for per_forward, per_backward in ((3, 2), (2, 1)):
        gemms = forward // per_forward
        if gemms and forward == gemms * per_forward and backward == gemms * per_backward:
            break
    else:
        raise CheckpointError(f"has {forward} scales forward and {backward} backward, which fits no number of GEMMs")
    if type(claimed) is int and claimed != gemms:
        raise CheckpointError(f"says that it has {claimed} GEMMs, but its scales are those of {gemms}")
    if gemms > 2:
        raise CheckpointError(
            f"has {gemms} GEMMs, as only a GroupedLinear has; versions order its scales differently and do not say how"
        )
    return gemms, per_forward, per_backward


def _gradient_columns(gemms: int, per_gemm: int, has_recipe: bool, backward: _Columns) -> list[int]:
    """Which backward tensor is the gradient of each GEMM's output.

    LayerNormMLP (``pytorch/module/layernorm_mlp.py``) has had three orders. Up to 1.x GRAD_OUTPUT1 is that of its
    second GEMM, GRAD_OUTPUT2 that of its first. In early 2.x that of its first is GRAD_INPUT1. Later GRAD_OUTPUT1 is
    that of its first, GRAD_OUTPUT2 that of its second. Which of the two 2.x is, is seen from what was never used.
    """
    if gemms == 1:
        return [0]
    if per_gemm == 1:
        return [1, 0]
    if not has_recipe:
        return [2, 0]
    return [1, 0] if backward.used(1) and not backward.used(2) else [0, 2]


def _attributes(recipe: object) -> Mapping[Any, Any]:
    """Of a recipe that was read as a Record, or that somebody else has unpickled."""
    state = recipe.state if isinstance(recipe, Record) else getattr(recipe, "__dict__", None)
    return state if isinstance(state, dict) else {}


def _maxima(recipe: Mapping[Any, Any], variables: Mapping[Any, Any]) -> tuple[float | None, float | None]:
    """Largest finite values of the formats forward and backward, as far as the entry tells."""
    format = recipe.get("fp8_format")
    value = format.state if isinstance(format, Record) else getattr(format, "value", None)
    if isinstance(value, str):
        value = _MAXIMA.get(value)
    if not isinstance(value, tuple) or len(value) != 2:
        value = (variables.get("fp8_max_fwd"), variables.get("fp8_max_bwd"))
    return _maximum(value[0]), _maximum(value[1])


def _maximum(value: object) -> float | None:
    if not isinstance(value, (int, float)) or not 1 < value < 1e6:
        return None
    return float(value)
