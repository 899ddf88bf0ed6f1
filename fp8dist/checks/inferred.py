"""Inferred copies: plain parameters that nobody declared, and that ranks keep equal while each of them trains them.

Equal values alone prove nothing: shards of a bias start as zeros, experts with equal seeds start alike. But tensors
that all ranks have non-zero gradients for, and that stay equal all the same, are copies whose gradients somebody
reduces. That was seen twice: then they are *adopted*, and a warning names them if they part. Never an error, because
nobody has said that they are copies.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from fp8dist.checks.contents import Digester, NamedTensor, TensorContent
from fp8dist.checks.report import sides_of, split
from fp8dist.common.text import first_few, ranks_text
from fp8dist.parallel.megatron import gradient_of
from fp8dist.state.groups import SyncGroup, maximum
from fp8dist.state.slots import clean_fqn

logger = logging.getLogger("fp8dist")

_LOOKS = 2
"""In so many looks all ranks must have a gradient."""


class Inferred:
    """What the ranks of a group seem to hold as copies of one another.

    Args:
        group: the ranks.
        equal: names of tensors that were equal on all ranks at the start, the same on all ranks.

    Attributes:
        size: bytes of the adopted parameters.
    """

    def __init__(self, group: SyncGroup, equal: Collection[str]) -> None:
        self._group, self._adopted = group, set[str]()
        self._looks = dict.fromkeys(sorted(equal), 0)  # The same on all ranks, as is what has been adopted.
        self.size = 0

    def look(self, module: nn.Module, step: int) -> None:
        """Compare, adopt what is ripe, and warn of what has parted. Call it while gradients exist, at the same time on
        all ranks. COLLECTIVE if there is anything to compare: one MAX with 24 bytes for each parameter. A gather more
        if adopted parameters have parted.

        Args:
            module: the model as the training loop calls it.
            step: for the warning.
        """
        if not self._looks:
            return
        held: dict[str, Tensor] = {}
        digests: dict[str, int] = {}
        trained: set[str] = set()
        try:
            plain = {name: one for name, one in _plain(module).items() if name in self._looks}
            held = {name: one for name, one in plain.items() if one.requires_grad or name in self._adopted}
            digests = _digests(held)
            trained = _trained({name: one for name, one in held.items() if name not in self._adopted})
            failed = False
        except Exception as error:  # Such as a lack of memory: the other ranks must not wait.
            failed = True
            logger.warning("fp8dist: rank %d: cannot look for copies, and no longer does: %s", self._group.rank, error)
        names, parted = list(self._looks), []
        sent = [(digests.get(name, 0), ~digests.get(name, 0), -int(name in trained)) for name in names]
        somewhere, *most = maximum(self._group, [int(failed), *(number for one in sent for number in one)])
        if somewhere:
            names, self._looks = [], {}
        for place, name in enumerate(names):
            highest, inverse, idle = most[3 * place : 3 * place + 3]
            if highest != ~inverse:
                del self._looks[name]
                parted += [name] if name in self._adopted else []
            elif not highest:  # No digest: no rank has such a parameter, or has it any longer.
                del self._looks[name]
            elif idle:
                self._looks[name] += 1
                self._adopted |= {name} if self._looks[name] >= _LOOKS else set()
        if parted:
            self._warn(parted, {name: digests.get(name, 0) for name in parted}, step)
        self._adopted &= self._looks.keys()
        self.size = sum(held[name].numel() * held[name].element_size() for name in self._adopted if name in held)

    def _warn(self, parted: list[str], digests: Mapping[str, int], step: int) -> None:
        """Warn, on the lowest rank, of parameters that have parted. COLLECTIVE: a gather."""
        by_rank = dict(zip(self._group.ranks, self._group.gather(digests)))
        if self._group.rank != min(self._group.ranks):
            return
        _, odd = split(sides_of({rank: tuple(of[name] for name in parted) for rank, of in by_rank.items()}))
        logger.warning(
            "fp8dist: step %d: no longer equal on all ranks, although all had gradients for it and kept it equal until "
            "now: %s (odd ranks: %s). If these are copies, say so, and checks raise: prepare(axes=…)",
            *(step, first_few(parted, 8), ranks_text(sorted(rank for side in odd for rank in side))),
        )


def _plain(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that are plain tensors with at least one dimension, by name."""
    named = ((clean_fqn(name), one) for name, one in module.named_parameters())
    return {name: one for name, one in named if type(one) is nn.Parameter and one.ndim}


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a digest of each tensor's name, shape, dtype and values."""
    if not tensors:
        return {}
    content = TensorContent("parameter", [NamedTensor(name, one.detach()) for name, one in tensors.items()])
    return dict(zip(tensors, content.digests(Digester())[:, 0].tolist()))


def _trained(parameters: Mapping[str, Tensor]) -> set[str]:
    """Return the names of parameters whose gradient has an element that is not zero, and whose elements are not all the
    same: zeros may be equal on ranks that have nothing to do with one another. Waits for the device."""
    flags = {
        name: gradient.any() & (one != one.reshape(-1)[0]).any()
        for name, one in parameters.items()
        if one.numel() and (gradient := gradient_of(one)) is not None
    }
    if not flags:
        return set()
    device = next(iter(flags.values())).device
    together = torch.stack([flag.to(device) for flag in flags.values()])  # One wait, not one for each.
    return {name for name, flag in zip(flags, together.tolist()) if flag}
