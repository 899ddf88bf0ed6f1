"""What a Linear multiplies in FP8: the arguments of its products, as they are dispatched."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fp8dist import ops

__all__ = ["Gemm", "Gemms", "numbers"]


class Gemm(NamedTuple):
    """One product ``a @ b.T``: copies of its operands, and its result."""

    a: Tensor
    b: Tensor
    inv_scale_a: Tensor
    inv_scale_b: Tensor
    result: Tensor


class Gemms(TorchDispatchMode):
    """Notes all FP8 products that are computed inside, in their order: fprop, then dgrad, then wgrad."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Gemm] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is ops.matmul:
            self.seen.append(Gemm(*(tensor.clone() for tensor in (*args[:4], result))))
        return result


def numbers(x: Tensor) -> npt.NDArray[np.float32]:
    """The elements of a tensor of any float type, as float32 on the CPU."""
    array: npt.NDArray[np.float32] = x.detach().float().cpu().numpy()
    return array
