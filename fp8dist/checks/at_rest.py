"""AtRest: finds parameters and optimizer state that change between two steps, where nothing should write to them.

It needs no other rank, so it covers what exists once: the shards of FSDP2, the moments of Adam. A write by an operation
of torch moves the tensor's version counter, and is not reported. A flipped bit does not, but neither does a write
through ``.data`` or by a collective: no digest can tell them apart, so a difference is a warning, never an error.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fp8dist.checks.contents import Digester, NamedTensor, TensorContent
from fp8dist.checks.inventory import plain_tensors, states_of, values_in
from fp8dist.common.text import first_few
from fp8dist.state.groups import local_part, own_rank
from fp8dist.state.slots import clean_fqn

logger = logging.getLogger("fp8dist")


class _Seen(NamedTuple):
    """A tensor at one moment. ``writes``: the address of its memory and its version counters, which torch changes when
    it writes. ``digest``: of its bytes, shape and dtype. ``size``: in bytes."""

    writes: tuple[int, ...]
    digest: tuple[int, int]
    size: int


@dataclass
class _Interval:
    """From a step of an optimizer to its next one.

    ``steps``: number of its steps. ``seen``: its tensors after the last one, by name; None: this interval is not
    compared. ``written``, ``unseen``: names of those that changed in the last interval that was compared, with writes
    that torch counts and without.
    """

    steps: int = 0
    seen: dict[str, _Seen] | None = None
    written: frozenset[str] = frozenset()
    unseen: frozenset[str] = frozenset()


class AtRest:
    """Compares this rank's parameters and optimizer state after an optimizer's step with those before its next one.
    Local: no collective. A comparison reads them twice, and waits for the device.

    Args:
        every: number of an optimizer's steps from one comparison to the next. 0: never; do not call ``after`` then.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.size = 0
        """Bytes of the tensors of each optimizer that was compared last."""
        self._intervals: weakref.WeakKeyDictionary[Optimizer, _Interval] = weakref.WeakKeyDictionary()

    def after(self, optimizer: Optimizer, module: nn.Module, others: Collection[Optimizer] | None) -> None:
        """Take digests after a step, if the interval until the next step is to be compared.

        Args:
            module: the model, for names.
            others: include the frozen parameters of the model that these optimizers do not hold. None: do not.
        """
        interval = self._intervals.setdefault(optimizer, _Interval())
        interval.steps += 1
        due = interval.steps % self.every == 0
        interval.seen = self._read(dict(_tensors(optimizer, module, others))) if due else None

    def before(self, optimizer: Optimizer, module: nn.Module, others: Collection[Optimizer] | None, step: int) -> None:
        """Compare before the optimizer's next step, and log what has changed. For ``module`` and ``others`` see
        ``after``. ``step``: number of steps done."""
        interval = self._intervals.get(optimizer)
        if interval is None or interval.seen is None:
            return
        then, interval.seen = interval.seen, None
        now = self._read({name: tensor for name, tensor in _tensors(optimizer, module, others) if name in then})
        self.size = sum(seen.size for name, seen in now.items() if name in then)
        apart = [name for name, seen in now.items() if name in then and seen.digest != then[name].digest]
        written = frozenset(name for name in apart if now[name].writes != then[name].writes)
        if written and written != interval.written:
            logger.info(
                "fp8dist: rank %d: written to between steps %d and %d: %s",
                *(own_rank(), step, step + 1, first_few(sorted(written))),
            )
        unseen = [name for name in apart if name not in written]
        # What changes so in each interval is the program's habit, of which the first warning was enough.
        if new := [name for name in unseen if name not in interval.unseen]:
            logger.warning(
                "fp8dist: rank %d: changed between steps %d and %d, and torch counted no write: %s. Other code has "
                "written through .data, an address or a collective, or the memory is faulty. What changes so between "
                "all steps is reported once",
                *(own_rank(), step, step + 1, first_few(new)),
            )
        interval.written, interval.unseen = written, frozenset(unseen)

    def _read(self, tensors: Mapping[str, Tensor]) -> dict[str, _Seen]:
        """Return what is seen of tensors now, without those without bytes of their own. An error, such as a lack of
        memory, ends the comparisons, and not the training."""
        try:
            # A write to a DTensor moves its own counter, a write to its local part that of the part.
            parts = {
                name: (part, tensors[outer]._version)
                for outer, tensor in tensors.items()
                if not tensor.is_inference()
                for name, part in plain_tensors(outer, local_part(tensor))
                if part.numel() and not part.is_meta and part.layout is torch.strided and not part.is_quantized
            }
            content = TensorContent("at rest", [NamedTensor(name, part) for name, (part, _) in parts.items()])
            return {
                name: _Seen((part.data_ptr(), part._version, version), (a, b), part.numel() * part.element_size())
                for (name, (part, version)), (a, b) in zip(parts.items(), content.digests(Digester()).tolist())
            }
        except Exception as error:
            self.every = 0
            text = "fp8dist: rank %d: at_rest_every: cannot read the tensors, so they are compared no more: %s"
            logger.warning(text, own_rank(), error)
            return {}


def _tensors(
    optimizer: Optimizer, module: nn.Module, others: Collection[Optimizer] | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all parameters and tensors of state of an optimizer. For ``others`` see ``after``."""
    names = {id(parameter): clean_fqn(name) for name, parameter in module.named_parameters()}
    states, _ = states_of(optimizer)
    for g, group in enumerate(optimizer.param_groups):
        for p, parameter in enumerate(group["params"]):
            name = names.pop(id(parameter), f"group{g}.{p}")
            yield name, parameter
            for key, value, _ in values_in(states.get(parameter)):
                if isinstance(value, Tensor):
                    yield f"{name}.{key}", value
    if others is not None:  # A fused optimizer, whose writes torch does not count, may change what is not frozen.
        held = {id(parameter) for one in others for group in one.param_groups for parameter in group["params"]}
        for parameter in module.parameters():
            if id(parameter) in names and id(parameter) not in held and not parameter.requires_grad:
                yield names[id(parameter)], parameter
