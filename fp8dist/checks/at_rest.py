"""AtRest: finds parameters and optimizer state that change between two steps, where nothing should write to them.

It needs no other rank, so it covers what exists once: the shards of FSDP2, the moments of Adam. A write that goes
through torch moves the tensor's version counter, and is not reported. A flipped bit does not, but neither does a write
through ``.data``: no digest can tell them apart, so a difference is a warning, never an error.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from fp8dist.checks.contents import Digester, NamedTensor, TensorContent
from fp8dist.common.text import first_few
from fp8dist.state.groups import local_part, own_rank
from fp8dist.state.slots import clean_fqn

__all__ = ["AtRest"]

logger = logging.getLogger("fp8dist")


@dataclass(frozen=True)
class _Seen:
    """A tensor at one moment. ``writes``: the address of its memory and its version counters, which torch changes when
    it writes. ``digest``: of its bytes, shape and dtype."""

    writes: tuple[int, ...]
    digest: tuple[int, int]


class AtRest:
    """Compares this rank's parameters and optimizer state after an optimizer's step with those before its next one.
    Local: no collective. A comparison reads them twice, and waits for the device.

    Args:
        every: number of an optimizer's steps from one comparison to the next; 0: never.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._seen: weakref.WeakKeyDictionary[Optimizer, dict[str, _Seen]] = weakref.WeakKeyDictionary()
        self._intervals: Counter[str] = Counter()  # Compared, by name of the tensor.
        self._changed: Counter[str] = Counter()  # Of these, those in which the tensor changed unseen.
        self._written: frozenset[str] = frozenset()  # Written to in the last interval, as torch's counters show.

    def after(self, optimizer: Optimizer, module: nn.Module, others: Collection[Optimizer] | None) -> None:
        """Take digests after a step, if the interval until the next step is to be compared.

        Args:
            module: the model, for names.
            others: include the frozen parameters of the model that these optimizers do not hold. None: do not.
        """
        if not self._every:
            return
        self._steps[optimizer] = steps = self._steps.get(optimizer, 0) + 1
        if steps % self._every == 0:
            self._seen[optimizer] = _read(dict(_tensors(optimizer, module, others)))

    def before(self, optimizer: Optimizer, module: nn.Module, others: Collection[Optimizer] | None, step: int) -> None:
        """Compare before the optimizer's next step, and log what has changed. For ``module`` and ``others`` see
        ``after``. ``step``: number of steps done."""
        then = self._seen.pop(optimizer, None)
        if then is None:
            return
        now = _read({name: tensor for name, tensor in _tensors(optimizer, module, others) if name in then})
        self._intervals.update(now.keys())
        apart = [name for name, seen in now.items() if seen.digest != then[name].digest]
        written = frozenset(name for name in apart if now[name].writes != then[name].writes)
        if written and written != self._written:
            logger.info(
                "fp8dist: rank %d: written to between steps %d and %d: %s",
                *(own_rank(), step, step + 1, first_few(sorted(written))),
            )
        self._written = written
        unseen = [name for name in apart if name not in written]
        # What is written so in each interval is the program's habit, of which the first warning was enough.
        new = [name for name in unseen if not self._changed[name] or self._changed[name] < self._intervals[name] - 1]
        self._changed.update(unseen)
        if new:
            logger.warning(
                "fp8dist: rank %d: changed between steps %d and %d, and torch counted no write: %s. Other code has "
                "written through .data or an address, or the memory is faulty. What changes so between all steps is "
                "reported once",
                *(own_rank(), step, step + 1, first_few(new)),
            )


def _tensors(
    optimizer: Optimizer, module: nn.Module, others: Collection[Optimizer] | None
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all parameters and tensors of state of an optimizer. For ``others`` see ``after``."""
    names = {id(parameter): clean_fqn(name) for name, parameter in module.named_parameters()}
    for g, group in enumerate(optimizer.param_groups):
        for p, parameter in enumerate(group["params"]):
            name = names.pop(id(parameter), f"group{g}.{p}")
            yield name, parameter
            state = optimizer.state.get(parameter)
            for key, value in state.items() if isinstance(state, Mapping) else ():
                if isinstance(value, Tensor):
                    yield f"{name}.{key}", value
    if others is not None:  # A fused optimizer, whose writes torch does not count, may change what is not frozen.
        held = {id(parameter) for one in others for group in one.param_groups for parameter in group["params"]}
        for parameter in module.parameters():
            if id(parameter) in names and id(parameter) not in held and not parameter.requires_grad:
                yield names[id(parameter)], parameter


def _read(tensors: Mapping[str, Tensor]) -> dict[str, _Seen]:
    """Return what is seen of tensors now. Leaves out those without bytes of their own, and tensor subclasses."""
    parts = {name: local_part(tensor) for name, tensor in tensors.items()}
    plain = {
        name: part
        for name, part in parts.items()
        if type(part) in (Tensor, nn.Parameter) and part.numel() and not (part.is_meta or part.is_inference())
    }
    if not plain:
        return {}
    content = TensorContent("at rest", [NamedTensor(name, part) for name, part in plain.items()])
    digests: list[list[int]] = content.digests(Digester()).tolist()
    # A write to a DTensor moves its own counter, a write to its local part that of the part.
    writes = [(part.data_ptr(), part._version, tensors[name]._version) for name, part in plain.items()]
    return {name: _Seen(of, (a, b)) for name, of, (a, b) in zip(plain, writes, digests)}
