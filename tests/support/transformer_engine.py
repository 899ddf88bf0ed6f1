"""Imitates TransformerEngine's checkpoints without it: stand-ins for its classes and its rolling of histories.

Written after its sources (``pytorch/module/base.py``, ``pytorch/quantization.py``, ``common/recipe``), without copying.
"""

from __future__ import annotations

import collections
import enum
import io
import pickle
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.support.oracle import FP8_MAX, scale_for

RECIPES = "transformer_engine.common.recipe"
MEGATRON = "megatron.core.extensions.transformer_engine"


@dataclass
class Scaled:
    """One scaled tensor as TransformerEngine keeps it: row 0 is the current step."""

    fp8_max: float
    rows: list[float]
    margin: int = 0
    scale: float = 1.0
    seen: list[float] = field(default_factory=list)

    def record(self, amax: float) -> None:
        self.rows[0] = max(self.rows[0], amax)
        self.seen.append(amax)

    def update(self) -> None:
        self.scale = scale_for(max(self.rows), self.scale, self.fp8_max, self.margin)
        self.rows = self.rows[1:] + self.rows[:1]
        self.rows[0] = 0.0


class Module:
    """The forward and backward tensors of one module, by GEMM."""

    def __init__(
        self,
        gemms: int = 1,
        length: int = 5,
        margin: int = 0,
        format: str = "HYBRID",
        gradients: Sequence[int] = (0, 2),
    ) -> None:
        maxima = (FP8_MAX["e4m3"], FP8_MAX["e5m2" if format == "HYBRID" else "e4m3"])
        self.margin, self.format, self.maxima, self.gradients = margin, format, maxima, gradients
        self.forward = [Scaled(maxima[0], [0.0] * length, margin) for _ in range(3 * gemms)]
        self.backward = [Scaled(maxima[1], [0.0] * length, margin) for _ in range(2 * gemms)]

    def of(self, gemm: int, role: str) -> Scaled:
        """Return a tensor. ``gradients``: the backward tensor of each GEMM's grad_output."""
        if role == "grad_output":
            return self.backward[self.gradients[gemm]]
        return self.forward[3 * gemm + ("input", "weight").index(role)]

    def record(self, amaxes: Mapping[tuple[int, str], float]) -> None:
        for (gemm, role), amax in amaxes.items():
            self.of(gemm, role).record(amax)

    def update(self) -> None:
        for tensor in (*self.forward, *self.backward):
            tensor.update()

    def tensors(self, inverse: bool = True) -> dict[str, Tensor]:
        found = {}
        for direction, scaled in (("fwd", self.forward), ("bwd", self.backward)):
            found[f"scale_{direction}"] = torch.tensor([s.scale for s in scaled])
            if inverse:
                found[f"scale_inv_{direction}"] = 1 / found[f"scale_{direction}"]
            found[f"amax_history_{direction}"] = torch.tensor([s.rows for s in scaled]).T.contiguous()
        return found

    def variables(self) -> dict[str, Any]:
        return {
            "fp8_checkpoint": True,
            "num_gemms": len(self.backward) // 2,
            "fp8_max_fwd": int(self.maxima[0]),
            "fp8_max_bwd": int(self.maxima[1]),
            "global_fp8_buffer_pos_fwd": (1, "0:0"),
        }


@contextmanager
def stand_ins() -> Iterator[types.SimpleNamespace]:
    """Install stand-ins for TransformerEngine's recipes under their names, inside the context."""
    added: dict[str, types.ModuleType] = {}

    def module(name: str) -> types.ModuleType:
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            path = ".".join(parts[:i])
            assert path in added or path not in sys.modules
            added[path] = sys.modules[path] = added.get(path) or types.ModuleType(path)
        return added[name]

    def put(where: str, name: str, made: Any) -> Any:
        made.__module__, made.__qualname__ = where, name
        setattr(module(where), name, made)
        return made

    helper = put(RECIPES, "_FormatHelper", collections.namedtuple("_FormatHelper", "max_fwd max_bwd"))
    members = {"E4M3": helper(448, 448), "E5M2": helper(57344, 57344), "HYBRID": helper(448, 57344)}
    formats: Any = put(RECIPES, "Format", enum.Enum("Format", members, module=RECIPES))
    override = collections.namedtuple("_OverrideLinearPrecision", "fprop dgrad wgrad")
    classes = types.SimpleNamespace(
        Format=formats,
        Override=put(RECIPES, "_OverrideLinearPrecision", override),
        DelayedScaling=put(RECIPES, "DelayedScaling", type("DelayedScaling", (), {})),
        Float8CurrentScaling=put(RECIPES, "Float8CurrentScaling", type("Float8CurrentScaling", (), {})),
        TEDelayedScaling=put(MEGATRON, "TEDelayedScaling", type("TEDelayedScaling", (), {})),
    )
    try:
        yield classes
    finally:
        for name in added:
            del sys.modules[name]


def recipe_of(module: Module, kind: Any, classes: types.SimpleNamespace) -> Any:
    recipe = kind()
    recipe.__dict__.update(
        margin=module.margin,
        fp8_format=classes.Format[module.format],
        amax_history_len=len(module.forward[0].rows),
        amax_compute_algo="max",
        override_linear_precision=classes.Override(False, False, False),
        scaling_factor_compute_algo=None,
        reduce_amax=True,
    )
    return recipe


def as_bytes(value: Any, protocol: int = pickle.DEFAULT_PROTOCOL) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value, protocol)), dtype=torch.uint8)


def _saved(value: Any, zipped: bool) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=zipped)
    return stream


def entry_of(module: Module, version: str, protocol: int = pickle.DEFAULT_PROTOCOL) -> Any:
    """Return a module's ``_extra_state`` as this version writes it."""
    one = {**module.tensors(), "extra_fp8_variables": module.variables()}
    if version == "1.x":
        return as_bytes(one, protocol)
    if version == "1.x bytes":
        return pickle.dumps(one, protocol)
    if version == "1.x file":
        return _saved(one, zipped=True)
    if version == "1.x old file":
        return _saved(one, zipped=False)
    if version in ("0.2", "0.3"):  # Input and weight, and the gradient of the output.
        gemms = len(module.backward) // 2
        forward = [i for i in range(3 * gemms) if i % 3 < 2]
        backward = list(range(0, 2 * gemms, 2))
        columns = {"fwd": torch.tensor(forward), "bwd": torch.tensor(backward)}
        old = {k: v.index_select(-1, columns[k[-3:]]) for k, v in module.tensors(inverse=False).items()}
        if version == "0.3":
            return {**old, "global_fp8_buffer": {"FWD_AMAX_1": [torch.ones(4)]}, "extra_fp8_variables": {}}
        return [*(old[k] for k in ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")), {}, True, 0, 0]
    with stand_ins() as classes:
        kind = classes.TEDelayedScaling if version == "2.x Megatron" else classes.DelayedScaling
        two = {**module.tensors(inverse=False), "extra_fp8_variables": module.variables()}
        return as_bytes({"recipe": recipe_of(module, kind, classes), **two}, protocol)


VERSIONS = ("0.2", "0.3", "1.x", "1.x bytes", "1.x file", "1.x old file", "2.x", "2.x Megatron")
