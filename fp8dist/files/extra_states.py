"""Read the FP8 state in ``_extra_state`` entries of TransformerEngine modules. Pickles in them are read as data:
nothing that they name is imported or called.

Formats that ``get_extra_state`` returns (TransformerEngine's ``pytorch/module/base.py``, earlier
``pytorch/module.py``):

===============  ======================================================================================
up to 0.2        a list: scale_fwd, amax_history_fwd, scale_bwd, amax_history_bwd, and more
0.3 to 0.7       a dict of these by name, with ``extra_fp8_variables``
0.8 to 0.11      a uint8 tensor of the dict's pickle
0.12 to 1.13     ``io.BytesIO`` of ``torch.save`` of the dict; for ONNX a uint8 tensor of its pickle
2.x              a uint8 tensor of its pickle, with ``recipe``, an object of ``transformer_engine.common.recipe``
===============  ======================================================================================

The entry of a module that has not run in FP8 is None, an empty tensor, or a pickle of None. With a recipe that has no
state, such as current scaling, the dict has no scales.
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
from fp8dist.files.archives import Locate, legacy_content, saved_content
from fp8dist.files.failures import reading
from fp8dist.files.pickles import Builder, Record, Unpickler
from fp8dist.files.slices import MemorySlice
from fp8dist.files.values import TORCH_SAVE, Storage, StoredTensor
from fp8dist_kernels.formats import Role

_SCALES = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
_STATELESS = ("recipe", "extra_fp8_variables")  # Other keys. Recipes without state have only these.
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
    """The saved state of one scaled tensor of a module.

    Args:
        scale: the factor by which values are multiplied before the cast. Positive; its inverse is finite.
        history: float32[any length], amaxes of steps, oldest first; zeros where nothing is known.
        due: True if the scale does not yet depend on the newest amax.
        fp8_max: largest finite value of the scale's format; None if the entry does not contain it.
        margin: the recipe's margin (scales are divided by 2**margin); None if the entry does not contain it.
    """

    scale: float
    history: Tensor
    due: bool
    fp8_max: float | None
    margin: int | None


Gemms = list[dict[Role, SavedSlot]]
"""The FP8 state of a module: for each of its GEMMs, the slots by role."""


def read_extra_state(name: str, value: object) -> Gemms | None:
    """Return the FP8 state in the ``_extra_state`` of one module, or None if it has none.

    Args:
        name: the entry's name in messages.
        value: the value in a state_dict: a uint8 tensor, bytes, ``io.BytesIO``, None, or a dict or list (early
            versions).

    Raises:
        CheckpointError: the entry is damaged, has impossible values, or holds more than data. Nothing that a pickle
            names is imported or called.
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


# From bytes to values ------------------------------------------------------------------------------

_Load = Callable[[object], object]


def _content(name: str, value: object) -> tuple[Any, _Load]:
    """Return (the saved value, with a ``StoredTensor`` for each pickled tensor; function that returns the tensor of a
    ``StoredTensor``, and any other value unchanged)."""
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
    saved = saved_content(file)
    if saved is not None:
        content, _, locate = saved
        return content, partial(_load, lambda storage: (file, locate))
    if value[:1] != b"\x80":
        raise CheckpointError(f"is no pickle: it starts with {bytes(value[:8])!r}")
    storages = _PickledStorages(name)
    vocabulary = {**_VOCABULARY, "torch.storage._load_from_bytes": Builder("torch.storage", storages.add)}
    return Unpickler(io.BytesIO(value), len(value), vocabulary).load(), partial(_load, storages.find)


class _PickledStorages:
    """Storages of a plain pickle, which holds each one as bytes of torch.save in the legacy format."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._found: dict[str, tuple[MemorySlice, Locate, Storage]] = {}

    def add(self, data: object = None) -> Storage:
        """Return a reference to the storage in ``data``."""
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
        """Return (bytes that hold a storage, function that returns the storage's place in these bytes)."""
        file, locate, inside = self._found[storage.key]
        return file, lambda _: locate(inside)


def _load(find: Callable[[Storage], tuple[MemorySlice, Locate]], leaf: object) -> object:
    """Return the tensor of a ``StoredTensor``; any other value unchanged. ``find``: as ``_PickledStorages.find``."""
    if not isinstance(leaf, StoredTensor):
        return leaf
    file, locate = find(leaf.storage)
    start, available = locate(leaf.storage)
    leaf.check(available, file.length)
    return leaf.read(file, start)


def _member(of: object = None, name: object = None) -> Record:
    """Replace the ``getattr`` with which pickles of Python 3.11 and later get a member of an enum. Refuses all objects
    but the recipes' ``Format``."""
    if not isinstance(of, Builder) or of.name != f"{_RECIPES}.Format" or not isinstance(name, str):
        raise CheckpointError("its pickle asks for an attribute of an object that is not a format")
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


# From values to slots ------------------------------------------------------------------------------


def _state(content: Mapping[Any, Any], load: _Load) -> Gemms:
    """Return the FP8 state in a dict with the keys ``_SCALES``. Raise CheckpointError for impossible values."""
    forward = _Direction("fwd", content, load)
    backward = _Direction("bwd", content, load)
    variables = content.get("extra_fp8_variables")
    variables = variables if isinstance(variables, dict) else {}
    gemms, per_forward, per_backward = _layout(len(forward), len(backward), variables.get("num_gemms"))
    gradients = _gradient_columns(gemms, per_backward, "recipe" in content, backward)
    recipe = _attributes(content.get("recipe"))
    fp8_max, gradient_max = _maxima(recipe, variables)
    given = recipe.get("margin")
    # Implausible numbers count as not given.
    margin = given if type(given) is int and -64 <= given <= 64 else None
    return [
        {
            Role.INPUT: forward.slot(per_forward * gemm, fp8_max, margin),
            Role.WEIGHT: forward.slot(per_forward * gemm + 1, fp8_max, margin),
            Role.GRAD_OUTPUT: backward.slot(gradients[gemm], gradient_max, margin),
        }
        for gemm in range(gemms)
    ]


class _Direction:
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
        if bool((history < 0).any()):
            raise CheckpointError(f"amax_history_{direction} holds a negative amax")
        # TransformerEngine keeps an amax that was not finite, and no scale is made of it.
        self._history = history.where(history.isfinite(), 0)

    def __len__(self) -> int:
        return len(self._scale)

    def slot(self, column: int, fp8_max: float | None, margin: int | None) -> SavedSlot:
        """Return one scaled tensor.

        Row 0 of the history collects the amax of the current step. After TransformerEngine has computed a scale, it
        rolls the rows by -1 and sets row 0 to zero in place of the oldest amax (``_update_amax_history`` in
        ``pytorch/quantization.py``, earlier ``pytorch/fp8.py``). So rows are oldest first from row 1 on, and row 0 is
        the newest, if it is not zero.
        """
        rows = self._history[:, column]
        due = bool(rows[0] > 0)
        history = rows.roll(-1) if due else rows.clone()
        return SavedSlot(float(self._scale[column]), history, due, fp8_max, margin)

    def used(self, column: int) -> bool:
        """Return True unless scale and history of the tensor still have their initial values, 1 and zeros."""
        return bool(self._scale[column] != 1) or bool(self._history[:, column].any())


def _float32(name: str, content: Mapping[Any, Any], load: _Load) -> Tensor:
    """Return a float32 tensor of the entry, on the CPU. Raise CheckpointError for anything else."""
    tensor = load(content[name])
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
        kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise CheckpointError(f"{name} is of {kind}, expected a float32 tensor")
    return tensor.detach().cpu()


def _layout(forward: int, backward: int, claimed: object) -> tuple[int, int, int]:
    """Return (number of GEMMs, forward tensors per GEMM, backward tensors per GEMM).

    Per GEMM, the forward tensors are input, weight and output, and the backward tensors the gradients of output and
    input. Early 0.x has only input and weight, and the gradient of the output (``FP8FwdTensors``, ``FP8BwdTensors``).

    Args:
        forward, backward: number of scales of each direction.
        claimed: number of GEMMs that the entry gives, if it is an int.

    Raises:
        CheckpointError: the numbers fit no layout, or there are more than two GEMMs.
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


def _gradient_columns(gemms: int, per_gemm: int, has_recipe: bool, backward: _Direction) -> list[int]:
    """Return, for each GEMM, the index of the backward tensor that holds the gradient of its output.

    With two GEMMs, as in LayerNormMLP (``pytorch/module/layernorm_mlp.py``), the names of these tensors for the first
    and the second GEMM are: up to 1.x GRAD_OUTPUT2, GRAD_OUTPUT1; in early 2.x GRAD_INPUT1, GRAD_OUTPUT1; later
    GRAD_OUTPUT1, GRAD_OUTPUT2. The entry has no version; in 2.x the tensors that were never used show the order.
    """
    if gemms == 1:
        return [0]
    if per_gemm == 1:
        return [1, 0]
    if not has_recipe:
        return [2, 0]
    return [1, 0] if backward.used(1) and not backward.used(2) else [0, 2]


def _attributes(recipe: object) -> Mapping[Any, Any]:
    """Return the attributes of a recipe: a ``Record``, or an object that the caller has unpickled; {} for others."""
    state = recipe.state if isinstance(recipe, Record) else getattr(recipe, "__dict__", None)
    return state if isinstance(state, dict) else {}


def _maxima(recipe: Mapping[Any, Any], variables: Mapping[Any, Any]) -> tuple[float | None, float | None]:
    """Return the largest finite values of the forward and backward formats, or None if unknown."""
    format = recipe.get("fp8_format")
    value = format.state if isinstance(format, Record) else getattr(format, "value", None)
    if isinstance(value, str):
        value = _MAXIMA.get(value)
    if not isinstance(value, tuple) or len(value) != 2:
        value = (variables.get("fp8_max_fwd"), variables.get("fp8_max_bwd"))
    return _maximum(value[0]), _maximum(value[1])


def _maximum(value: object) -> float | None:
    if not isinstance(value, (int, float)) or not 1 < value < 1e6:  # FP8 formats go up to 57344.
        return None
    return float(value)
