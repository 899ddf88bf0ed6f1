"""Backend selection: Triton or plain torch."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

_LEAST_CAPABILITY = (8, 9)
"""FP8 conversions and products need compute capability 8.9 (Ada) or higher."""


def runs_fused(backend: str, device: torch.device) -> bool:
    """True if the Triton kernels handle tensors on ``device``: with backend "triton" always, with "auto" on GPUs that
    support FP8."""
    return backend == "triton" or (backend == "auto" and device.type == "cuda" and why_not_triton(device) is None)


@functools.cache
def nvidia_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an NVIDIA GPU, None for another device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


@functools.cache
def why_not_triton(device: torch.device) -> str | None:
    """Return why the Triton kernels cannot run on ``device``, as a phrase for an error, or None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cpu":  # Triton reads TRITON_INTERPRET once, at import, so caching this result is safe.
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if interpreted:
            return None
        built = torch.version.cuda is not None
        return f"it needs a GPU{'' if built else ', and a torch with CUDA'} (or TRITON_INTERPRET=1, for tests)"
    if device.type != "cuda":
        return f"it does not run on {device.type}"
    if torch.version.hip is not None:
        return "these kernels are for NVIDIA GPUs"
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return f"the GPU's compute capability is {capability[0]}.{capability[1]}; FP8 needs 8.9"
    return None
