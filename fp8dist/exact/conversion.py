"""Models whose numbers become residues."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fp8dist.exact.field import residues


@torch.no_grad()
def to_residues(model: nn.Module) -> None:
    """Convert the parameters and float buffers of a model to residues, in place. Not collective.

    Each element's residue depends on its value alone, so a shard of a weight becomes the shard of its residues, in
    float32 and in float64. A second call changes nothing. Integers in buffers (a causal mask of zeros and ones) stay.
    """
    for tensors, weights in ((model.parameters(), True), (model.buffers(), False)):
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.is_floating_point():
                local.copy_(residues(local, weights))
