"""Random state: the state of all generators of this process: Python's, numpy's, torch's on the CPU and on one GPU.

DTensor uses torch's generators. A state is a NamedTuple of tensors, so code that keeps or sends batches of tensors can
do the same with it.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor


class RandomState(NamedTuple):
    """States of all generators, as tensors on the CPU. ``device``: of the GPU's generator; empty without one."""

    python: Tensor  # int64[625]: the 624 words of the Mersenne Twister, and its position in them.
    python_gauss: Tensor  # float64[2]: 1 and the normal number that is drawn next, or zeros if none is stored.
    numpy: Tensor  # int64[625], like ``python``.
    numpy_gauss: Tensor  # float64[2], like ``python_gauss``.
    torch: Tensor  # uint8[n]
    device: Tensor  # uint8[n]


def random_state(device: torch.device | None = None) -> RandomState:
    """Return the states of all random number generators of this process: Python's, numpy's and torch's, on the CPU and
    on one GPU. Local; on a GPU it waits for the device.

    Args:
        device: the GPU whose generator to include, or a CPU. None: the current GPU, if this process uses one.
    """
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu")
    _, words, gauss = random.getstate()
    _, keys, place, has_gauss, cached = cast("tuple[str, Any, int, int, float]", np.random.get_state())
    return RandomState(
        torch.tensor(words, dtype=torch.int64, device="cpu"),
        torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64, device="cpu"),
        torch.tensor([*keys.tolist(), place], dtype=torch.int64, device="cpu"),
        torch.tensor([has_gauss, cached], dtype=torch.float64, device="cpu"),
        torch.get_rng_state(),
        torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.empty(0, dtype=torch.uint8, device="cpu"),
    )


def set_random_state(state: RandomState, device: torch.device) -> None:
    """Set all generators to a state, of this process or of another rank. Local.

    Args:
        device: the GPU whose generator to set, if the state has one.
    """
    has_gauss, gauss = state.python_gauss.tolist()
    random.setstate((random.getstate()[0], tuple(state.python.tolist()), gauss if has_gauss else None))
    *keys, place = state.numpy.tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), place, *state.numpy_gauss.tolist()))
    torch.set_rng_state(state.torch)
    if state.device.numel():
        torch.cuda.set_rng_state(state.device, device)
