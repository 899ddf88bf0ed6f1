"""Models whose numbers become residues."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fp8dist.errors import ConfigurationError
from fp8dist.exact.field import residues


@torch.no_grad()
def to_residues(model: nn.Module) -> None:
    """Convert the parameters and float buffers of a model to residues, in place. Not collective.

    Each element's residue depends on its value alone, so a shard of a weight becomes the shard of its residues, in
    float32 and in float64. A second call changes nothing. Integers in buffers stay (a causal mask of zeros and ones).

    Raises:
        ConfigurationError: a tensor of less than float32.
    """
    for named, weights in ((model.named_parameters(), True), (model.named_buffers(), False)):
        for name, tensor in named:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            local = torch.view_as_real(local) if local.is_complex() else local
            if local.is_floating_point():
                if local.dtype not in (torch.float32, torch.float64):
                    raise ConfigurationError(
                        f"exact arithmetic cannot compute with {name} in {local.dtype}: use float32 or float64."
                    )
                local.copy_(residues(local, weights))
