"""Random numbers of this process: those of Python, numpy, torch's CPU and the current GPU. DTensor draws from torch's.

A state is a NamedTuple of tensors, so it can be kept on the host, and sent to another rank, as a batch can.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

__all__ = ["RandomState", "random_state", "set_random_state"]


class RandomState(NamedTuple):
    """States of all generators, on the CPU. ``device``: uint8 state of the GPU's generator; empty on a CPU."""

    python: Tensor  # int64[625]: the words of the Mersenne Twister, and its place in them.
    python_gauss: Tensor  # float64[2]: 1 and the next normal number, or zeros if there is none.
    numpy: Tensor  # int64[625]
    numpy_gauss: Tensor  # float64[2]
    torch: Tensor  # uint8
    device: Tensor  # uint8


def random_state(device: torch.device) -> RandomState:
    """Return the current state. Local; on a GPU it waits for the device.

    Args:
        device: the one that this process computes on.
    """
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
    """Go back to a state, or to that of another rank. Local."""
    has_gauss, gauss = state.python_gauss.tolist()
    random.setstate((random.getstate()[0], tuple(state.python.tolist()), gauss if has_gauss else None))
    *keys, place = state.numpy.tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), place, *state.numpy_gauss.tolist()))
    torch.set_rng_state(state.torch)
    if state.device.numel():
        torch.cuda.set_rng_state(state.device, device)
