"""Outputs: digests of the outputs of all modules in one forward and backward, and of the gradients of these outputs; if
asked for, also of those of parameters.

The digests are in the order of computation. Two runs of the same batch, on one rank or two, must have the same; the
first difference shows where they part.

Gradients are read by hooks on the output tensors, because full backward hooks of modules would break in-place ops. A
recomputation (activation checkpointing) calls a module again, so the calls of a module are numbered.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fp8dist.checks.contents import Digester
from fp8dist.common.text import dtype_name
from fp8dist.errors import ConfigurationError
from fp8dist.state.groups import has_base, local_part
from fp8dist.state.slots import clean_fqn


class Place(NamedTuple):
    """What tensor of a forward and backward it is.

    ``module``: fqn. ``what``: "output", "gradient" (of the output), or "gradient of NAME", a parameter of the module.
    ``call``: number of the module's call, or of the parameter's gradient, from 0. ``part``: index of the tensor in an
    output that holds several. ``shape``, ``dtype``: of the tensor, under tensor parallelism of this rank's part.
    """

    module: str
    what: str
    call: int
    part: int
    shape: tuple[int, ...]
    dtype: str


class Taken(NamedTuple):
    """What ``Outputs`` recorded of n tensors, in order.

    ``digests``: int64[n, 2] on the CPU. ``nonfinite``: bool[n] on the CPU, True for a tensor with NaN or infinity.
    ``marks``: what the ``mark`` of ``Outputs`` returned for each tensor; empty if it came from another rank.
    """

    places: tuple[Place, ...]
    digests: Tensor
    nonfinite: Tensor
    marks: tuple[Any, ...]

    @property
    def first_nonfinite(self) -> int | None:
        """Index of the first tensor with a NaN or an infinity; None: there is none."""
        found = self.nonfinite.nonzero().flatten()
        return int(found[0]) if len(found) else None

    def first_difference(self, other: Taken) -> int | None:
        """Return the index of the first tensor that differs, in its digest or in its place; None if all are equal. If
        one run is the beginning of the other, it is the first index beyond its end."""
        both = min(len(self.places), len(other.places))
        # From some index on, other modules may have run. A digest may differ before.
        parted = next((i for i in range(both) if self.places[i] != other.places[i]), both)
        differ = (self.digests[:parted] != other.digests[:parted]).any(1).nonzero().flatten()
        if len(differ):
            return int(differ[0])
        return None if parted == len(self.places) == len(other.places) else parted


class Outputs:
    """Records the outputs of a model's modules, and their gradients, inside ``taking()``. All methods are local.

    Modules inside a compiled module are not recorded, only the compiled module itself. Nor are sparse and nested
    tensors.

    Args:
        parameters: record also the gradients that a backward adds to parameters, before DDP reduces them. Those of
            parameters that FSDP2 shards do not come.
        keep: index of a tensor that is copied into ``kept``; None: none is.
        mark: called for each tensor; its results become ``Taken.marks``.
    """

    def __init__(
        self,
        model: nn.Module,
        digester: Digester,
        keep: int | None = None,
        mark: Callable[[], Any] | None = None,
        parameters: bool = False,
    ) -> None:
        self._digester, self._keep, self._mark, self._parameters = digester, keep, mark, parameters
        self._modules = _visible(model)
        self._calls: Counter[str] = Counter()
        self._places: list[Place] = []
        self._leaves: list[Tensor] = []  # Of each tensor. Digests are made of all at the end: small ops are slow.
        self._nonfinite: list[Tensor] = []
        self._marks: list[Any] = []
        self._handles: list[Any] = []
        self.kept: Tensor | None = None

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        """Record what is computed in the block."""
        with contextlib.ExitStack() as stack:
            for fqn, module in self._modules.items():
                stack.enter_context(_after_forward(module, functools.partial(self._forward, fqn)))
                own = module.named_parameters(recurse=is_compiled(module)) if self._parameters else ()
                for name, parameter in own:
                    if parameter.requires_grad:
                        what = f"gradient of {clean_fqn(name)}"
                        self._handles.append(parameter.register_hook(functools.partial(self._gradient, fqn, what)))
            try:
                yield
            finally:
                for handle in self._handles:
                    handle.remove()
                self._handles.clear()

    def taken(self) -> Taken:
        """Return what was recorded. Waits for the device.

        Raises:
            ConfigurationError: no module was called in Python.
        """
        if not any(place.what == "output" for place in self._places):
            raise ConfigurationError(
                "no module of the model was called in Python. Pass what torch.compile(model) returned. If the whole "
                "step is compiled, pass the step that is not, with the model or its blocks compiled"
            )
        count = len(self._places)
        digests = torch.empty(count, 2, dtype=torch.int64, device="cpu")
        nonfinite = torch.empty(count, dtype=torch.bool, device="cpu")
        for device in {flag.device for flag in self._nonfinite}:
            here = [place for place, flag in enumerate(self._nonfinite) if flag.device == device]
            leaves = [self._leaves[place] for place in here]
            seeds = torch.zeros(len(here), 2, dtype=torch.int64, device="cpu")
            counts = [len(part) for part in leaves]
            digests[here] = self._digester.on(device).digests(torch.cat(leaves), counts, seeds).cpu()
            nonfinite[here] = torch.stack([self._nonfinite[place] for place in here]).cpu()
        return Taken(tuple(self._places), digests, nonfinite, tuple(self._marks))

    def _forward(self, fqn: str, output: Any) -> None:
        """Record the output of a module, and its gradient when it comes."""
        call = self._calls[fqn]
        self._calls[fqn] += 1
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and _is_dense(leaf)]
        for part, tensor in enumerate(tensors):
            self._take(fqn, "output", call, part, tensor)
            if tensor.requires_grad:
                self._handles.append(tensor.register_hook(functools.partial(self._take, fqn, "gradient", call, part)))

    def _gradient(self, fqn: str, what: str, gradient: Tensor) -> None:
        """Record a gradient of a parameter."""
        if _is_dense(gradient):
            call = self._calls[f"{fqn}.{what}"]
            self._calls[f"{fqn}.{what}"] += 1
            self._take(fqn, what, call, 0, gradient)

    @torch.no_grad()
    def _take(self, fqn: str, what: str, call: int, part: int, tensor: Tensor) -> None:
        local = local_part(tensor.detach())
        if self._keep == len(self._places):
            self.kept = local.clone()
        self._places.append(Place(fqn, what, call, part, tuple(local.shape), dtype_name(local.dtype)))
        self._leaves.append(self._digester.leaves(local))
        self._nonfinite.append(any_nonfinite(local))
        self._marks.append(None if self._mark is None else self._mark())


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def any_nonfinite(tensor: Tensor) -> Tensor:
    """Return bool[] (0-d) on the tensor's device, True if it holds a NaN or an infinity. False for integers."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.zeros((), dtype=torch.bool, device=tensor.device)
    if tensor.is_complex() or not tensor.numel():
        return ~torch.isfinite(tensor).all()
    wide = tensor.float() if tensor.itemsize == 1 else tensor
    return ~torch.isfinite(torch.stack(torch.aminmax(wide))).all()  # Needs no memory, unlike isfinite of all.


def _visible(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose outputs are recorded, by fqn. A wrapper and the module in it have the same fqn; the
    inner one is returned, because a recomputation calls that one again."""
    found: dict[str, nn.Module] = {}
    hidden: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module in hidden:
            continue
        if has_base(module, "ScriptModule"):  # It takes no hooks. The module that calls it is recorded.
            hidden.update(module.modules())
            continue
        found[clean_fqn(name)] = module
        if is_compiled(module):
            hidden.update(set(module.modules()) - {module})
    return found


def is_compiled(module: nn.Module) -> bool:
    """True if torch.compile has compiled the module, by ``torch.compile(module)`` or ``module.compile()``."""
    return has_base(module, "OptimizedModule") or module._compiled_call_impl is not None


@contextlib.contextmanager
def _after_forward(module: nn.Module, act: Callable[[Any], None]) -> Iterator[None]:
    """Call ``act`` with each output of the module, inside the block. Not while torch.compile traces the module."""
    compiled = module._compiled_call_impl
    if compiled is not None:  # Hooks are compiled with the module: a new one would not run.

        def call(*args: Any, **kwargs: Any) -> Any:
            output = compiled(*args, **kwargs)
            act(output)
            return output

        module._compiled_call_impl = call
        try:
            yield
        finally:
            module._compiled_call_impl = compiled
        return

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            act(output)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
