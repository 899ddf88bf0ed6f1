"""What an eval forward multiplies with, and what a server makes of an export. Shares no code with the export."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open
from torch import Tensor, nn

import fp8dist
from fp8dist.modules.linear_slots import LinearSlots
from fp8dist_kernels import Gemm
from tests.support.training import bits

RECIPES: dict[str, fp8dist.Recipe] = {
    "delayed": fp8dist.DelayedScaling(history_len=4),
    "delayed 2^n": fp8dist.DelayedScaling(history_len=4, power_of_two=True, margin=1),
    "current": fp8dist.CurrentScaling(),
    "rowwise": fp8dist.RowwiseScaling(),
    "block": fp8dist.BlockScaling(),
    "mx": fp8dist.MXFP8Scaling(),
}
NATIVE = {name: "compressed-tensors" for name in RECIPES} | {"block": "block", "mx": "compressed-tensors-mxfp8"}


class Config:
    """Stands for a config of Transformers."""

    def __init__(self, **content: Any) -> None:
        self.model_type = content.get("model_type")
        self.to_dict = lambda: dict(content)


Multiplied = dict[str, tuple[bytes, bytes]]
"""By module: its weight's FP8 bytes and, for each element, its inverse scale."""


def spread(scale: Tensor, shape: Iterable[int]) -> Tensor:
    """Return the scale of each element of a weight: from one scale, one per row, one per block of 128 x 128, or E8M0
    per 1 x 32."""
    rows, columns = shape
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        assert scale.shape == (rows, columns // 32)
        return torch.exp2(scale.view(torch.uint8).float() - 127).repeat_interleave(32, 1)
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(rows, columns)
    if tuple(scale.shape) == (rows, 1):
        return scale.expand(rows, columns)
    blocks = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    assert scale.shape == (-(-rows // 128), -(-columns // 128))
    return blocks


@contextlib.contextmanager
def watched_products() -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Collect (FP8 weight, inverse scales) of each module's forward product on this rank."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    original = LinearSlots.matmul

    def matmul(self: LinearSlots, a: Any, b: Any, dtype: torch.dtype, gemm: Gemm, *rest: Any) -> Tensor | None:
        if gemm == "fprop":
            seen[self.fqn] = b[0].clone(), b[1].clone()
        return original(self, a, b, dtype, gemm, *rest)

    with mock.patch.object(LinearSlots, "matmul", matmul):
        yield seen


def multiplied(called: nn.Module, *inputs: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Return (FP8 weight, inverse scales) of each product of an eval forward on this rank."""
    training = called.training
    with watched_products() as seen, torch.no_grad():
        called.eval()(*inputs)
    called.train(training)
    return seen


def as_bits(products: Mapping[str, tuple[Tensor, Tensor]]) -> Multiplied:
    return {name: (bits(b), bits(spread(scale, b.shape))) for name, (b, scale) in products.items()}


def served(tensors: Mapping[str, Tensor]) -> Multiplied:
    """Return what a server multiplies with: of each weight in FP8, its bytes and each element's factor."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            scale = tensors.get(f"{name}_scale", tensors.get(f"{name}_scale_inv"))
            assert scale is not None
            assert scale.dtype in (torch.float32, torch.uint8)
            found[name.removesuffix(".weight")] = bits(tensor), bits(spread(scale, tensor.shape))
    return found


def tensor_bits(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (str(t.dtype), tuple(t.shape), bits(t)) for name, t in tensors.items()}


def exported(
    manager: fp8dist.StateManager, *called: nn.Module, format: Any = "compressed-tensors"
) -> dict[str, Tensor]:
    """Return copies of the tensors that an export in the job yields. COLLECTIVE where the model is sharded."""
    return {name: tensor.clone() for name, tensor in fp8dist.exported(manager, *called, format=format)}


def read(folder: Path | str) -> dict[str, Tensor]:
    """Read an exported folder with safetensors' own reader, through its index."""
    index = json.loads(Path(folder, "model.safetensors.index.json").read_text())
    found = {}
    for name, file in index["weight_map"].items():
        with safe_open(Path(folder, file), framework="pt") as opened:
            found[name] = opened.get_tensor(name)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    files = {path.name for path in Path(folder).glob("*.safetensors")}
    assert files == set(index["weight_map"].values())
    return found
