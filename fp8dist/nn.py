"""FP8Linear, and turning a model's Linears into it and back.

A converted module keeps its identity: only its class changes, and a ``LinearSlots`` is attached. So
parameters, state_dict keys, hooks and everybody's references stay what they were.
"""

from __future__ import annotations

import fnmatch
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8dist import ops
from fp8dist.errors import ConfigurationError
from fp8dist.formats import Role
from fp8dist.gathered import FP8Weight
from fp8dist.graphs import capturing
from fp8dist.groups import has_base, is_dtensor, local_part
from fp8dist.kernels.matmuls import ALIGNMENT
from fp8dist.recipe import DelayedScaling
from fp8dist.state.arena import SlotState
from fp8dist.state.slots import Slot, clean_fqn
from fp8dist.sync import ArenaSync
from fp8dist.tensor_parallel import parallel_linear

__all__ = [
    "SHARDED_ALREADY",
    "FP8Linear",
    "LinearSlots",
    "Mode",
    "convert",
    "eligible_linears",
    "require_revertible",
    "revert",
]

logger = logging.getLogger("fp8dist")

SHARDED_ALREADY = "fully_shard() was called on it before prepare(): prepare first"

UNBOUNDED_BACKWARDS = 1000
"""Backwards of one module without a boundary after which something is probably wrong."""


States = tuple[SlotState, SlotState, SlotState]
"""The places of a module's input, weight and grad_output slots."""


@dataclass
class Mode:
    """What the modules of one manager do now. One object, shared by them all.

    ``generation`` counts everything after which a weight's cast must not be reused. ``awaits_attach``: no forward may
    come before ``attach``: FSDP would gather weights in high precision, and keep its buffers for them. ``unsynced``:
    ranks are to share state, and ``attach`` was not called yet. ``graphed``: a forward was captured into a CUDA graph.
    """

    allowed: bool
    backend: str
    eval_precision: str
    awaits_attach: bool = False
    unsynced: bool = False
    graphed: bool = False
    enabled: bool = True
    calibrating: bool = False
    reuse_casts: bool = False
    generation: int = 0
    boundaries: int = 0

    def __getstate__(self) -> dict[str, Any]:
        # Nothing tells a copy when its weights change; nor is it in a graph.
        return {**self.__dict__, "reuse_casts": False, "graphed": False}

    def invalidate_casts(self) -> None:
        """Weights may have changed: forget their casts."""
        self.generation += 1


@dataclass(frozen=True)
class WeightCast:
    """A weight in FP8: row-major for fprop, transposed for dgrad, and the inv_scale of both."""

    tensors: tuple[Tensor, Tensor, Tensor]
    weight: weakref.ref[Tensor]
    key: tuple[int, int, int]
    recorded: bool

    def serves(self, weight: Tensor, key: tuple[int, int, int], record: bool) -> bool:
        """Whether it may stand for a cast of ``weight`` now. A tensor at the same address need not be
        the same tensor: temporaries of functional_call or of a parametrization are not."""
        return self.weight() is weight and self.key == key and (self.recorded or not record)


class LinearSlots:
    """What an FP8Linear knows of the FP8 state: its three slots and how it may use them.

    ``resharded``: FSDP frees the weight between forward and backward. Then its casts are not kept: they would take the
    memory that sharding saves.
    """

    def __init__(
        self, sync: ArenaSync, weight_sync: ArenaSync, mode: Mode, recipe: DelayedScaling, slots: dict[Role, Slot]
    ) -> None:
        self.sync = sync
        self.weight_sync = weight_sync
        self.mode = mode
        self.recipe = recipe
        self.slots = slots
        self.resharded = False
        self._backwards = self._boundary = 0
        self._states: States | None = None
        self._cast: WeightCast | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_states": None, "_cast": None, "resharded": False}

    def settle(self) -> None:
        """Commit what is due, before a scale is read. Graphs cannot: then the optimizer's post-hook does (see
        ``StepCycle.weights_changed``)."""
        if torch.compiler.is_compiling():
            return
        if capturing(self.sync.arena.device):
            self.mode.graphed = True
        self.sync.settle()
        self.weight_sync.settle()

    def states(self, device: torch.device) -> States:
        """(input, weight, grad_output), committed as far as due. Places the arenas on first use."""
        self.settle()
        syncs = (self.sync, self.weight_sync, self.sync)
        for sync in syncs[:2]:
            if sync.arena.device != device or not sync.arena.placed:
                sync.arena.place(device)
        if self._states is None:
            input_, weight, grad = (
                SlotState(sync.arena, sync.arena.index[self.slots[role]])
                for role, sync in zip((Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT), syncs)
            )
            self._states = (input_, weight, grad)
        return self._states

    def forget_views(self) -> None:
        """The arena was rebuilt: take its views anew at the next use."""
        self._states = self._cast = None

    def quantize(
        self,
        x: Tensor,
        state: SlotState,
        record: bool,
        rows: bool,
        columns: bool,
        pending: Tensor | None = None,
        just_in_time: bool = True,
    ) -> tuple[Tensor, ...]:
        """``ops.quantize`` with this recipe's constants.

        Args:
            pending: where the amax goes; None: the slot's place.
            just_in_time: False: never with the amax of x alone, which is a part of what shares a scale.
        """
        recipe = self.recipe
        return ops.quantize(
            x,
            state.scale,
            state.cold,
            state.pending if pending is None else pending,
            state.format.dtype,
            record=record,
            just_in_time=just_in_time and recipe.warmup == "current",
            margin=recipe.margin,
            power_of_two=recipe.power_of_two,
            rows=rows,
            columns=columns,
            backend=self.mode.backend,
        )

    def observe(self, x: Tensor, state: SlotState) -> None:
        """``ops.observe`` with this manager's backend."""
        ops.observe(x.detach(), state.pending, backend=self.mode.backend)

    def matmul(
        self,
        a: Tensor,
        b: Tensor,
        inv_scale_a: Tensor,
        inv_scale_b: Tensor,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        fast: bool = False,
    ) -> Tensor:
        """``ops.matmul`` with this manager's backend. Only fprop may accumulate fast: gradients are
        sums over many more terms (TransformerEngine draws the same line)."""
        return ops.matmul(
            a, b, inv_scale_a, inv_scale_b, dtype, bias=bias, fast_accumulation=fast, backend=self.mode.backend
        )

    def weight_cast(
        self, weight: Tensor, parameter: Tensor, state: SlotState, record: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The weight in FP8, (rows, columns, inv_scale): as it was gathered, cast now, or taken from an earlier
        microbatch of this step. No columns where ``backward_cast`` will make them.

        No reuse of what FSDP frees, with grad off (a weight may be swapped for an eval, unseen), under torch.compile
        (a guard on it would break), during capture (the graph must contain the cast), or under a dispatch mode
        (selective checkpointing counts ops by position).
        """
        if isinstance(weight, FP8Weight):
            return weight.rows, weight.rows.new_empty(0), weight.inv_scale
        for_backward = torch.is_grad_enabled() and not self.resharded
        reuse = (
            self.mode.reuse_casts
            and for_backward
            and not torch.compiler.is_compiling()
            and torch._C._len_torch_dispatch_stack() == 0
            and not capturing(weight.device)
        )
        owner = local_part(parameter)  # A DTensor shows a new view of it at each access.
        key = (self.mode.generation, weight.data_ptr(), parameter._version) if reuse else (0, 0, 0)
        if reuse and self._cast is not None and self._cast.serves(owner, key, record):
            return self._cast.tensors
        rows, columns, inv_scale = self.quantize(weight.detach(), state, record, True, for_backward)
        if reuse:
            self._cast = WeightCast((rows, columns, inv_scale), weakref.ref(owner), key, record)
        return rows, columns, inv_scale

    def casts_in_backward(self, weight: Tensor) -> bool:
        """Whether the backward derives its copy of the weight anew."""
        return self.resharded or isinstance(weight, FP8Weight)

    def backward_cast(self, weight: Tensor, state: SlotState) -> tuple[Tensor, Tensor]:
        """(FP8 [in_features, out_features], inv_scale) of a weight that FSDP has just gathered again. Scales change at
        commits only, so within a step these are the forward's bytes."""
        if isinstance(weight, FP8Weight):
            return weight.rows.t().contiguous(), weight.inv_scale
        # Not the slot's own place: a compiled backward may not hold what the forward has written to.
        nowhere = torch.empty_like(state.scale)
        _, columns, inv_scale = self.quantize(weight.detach(), state, False, False, True, pending=nowhere)
        return columns, inv_scale

    def count_backward(self) -> None:
        """Warn once when backwards go on without a boundary."""
        if torch.compiler.is_compiling():
            return
        if self.mode.unsynced:
            self.mode.unsynced = False
            logger.warning(
                "%s is trained, but attach() was not called: FP8 state is not synchronised, and scales do not follow",
                self.slots[Role.INPUT].fqn,
            )
        if self._boundary != self.mode.boundaries:
            self._boundary, self._backwards = self.mode.boundaries, 0
        self._backwards += 1
        if self._backwards == UNBOUNDED_BACKWARDS:
            logger.warning(
                "%d backwards of %s without a boundary: its scales are not updated. A re-created "
                "optimizer has lost fp8dist's hook: call attach(optimizer=…) again, or manager.step() once a step",
                UNBOUNDED_BACKWARDS,
                self.slots[Role.INPUT].fqn,
            )


class _FP8LinearFunction(torch.autograd.Function):
    """y = x Wᵀ + b, dx = dy W, dW = dyᵀ x, each product in FP8; the bias is added before y is rounded.

    The places of the grad_output slot ride on ctx as attributes: ``pending`` is changed in place and
    must not be saved for backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [tokens, in_features]
        bias: Tensor
        | None,  # [out_features]. Before the weight: gradients come in this order, as those of nn.Linear do.
        weight: Tensor,  # [out_features, in_features], for its gradient, and where backward casts it anew
        weight_rows: Tensor,  # FP8 [out_features, in_features]
        weight_columns: Tensor,  # FP8 [in_features, out_features], empty with grad off or if cast in backward
        weight_inv_scale: Tensor,
        slots: LinearSlots,
        states: States,
        record: bool,
        wants_weight_grad: bool,
    ) -> Tensor:
        input_state, ctx.weight_state, ctx.grad_state = states
        x_rows, x_columns, x_inv_scale = slots.quantize(x, input_state, record, True, wants_weight_grad)
        again = weight if slots.casts_in_backward(weight) else None
        ctx.save_for_backward(x_columns, x_inv_scale, weight_columns, weight_inv_scale, again)
        ctx.slots, ctx.record = slots, record
        ctx.input_dtype, ctx.weight_dtype = x.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        bias = None if bias is None else bias.to(x.dtype)  # As autocast has it; and what cuBLASLt can add.
        return slots.matmul(x_rows, weight_rows, x_inv_scale, weight_inv_scale, x.dtype, bias, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x_columns, x_inv_scale, weight_columns, weight_inv_scale, again = ctx.saved_tensors
        slots: LinearSlots = ctx.slots
        slots.settle()  # A boundary may lie between this forward and this backward.
        wants_input_grad, wants_bias_grad, wants_weight_grad = ctx.needs_input_grad[:3]
        grad_input = grad_weight = grad_bias = None
        if wants_input_grad or wants_weight_grad:  # Else only the bias trains.
            rows, columns, inv_scale = slots.quantize(
                grad_output, ctx.grad_state, ctx.record, wants_input_grad, wants_weight_grad
            )
        if wants_input_grad:
            if again is not None:
                weight_columns, weight_inv_scale = slots.backward_cast(again, ctx.weight_state)
            grad_input = slots.matmul(rows, weight_columns, inv_scale, weight_inv_scale, ctx.input_dtype)
            del weight_columns  # Maybe a copy, of the size of the gradient that is next.
        if wants_weight_grad:
            grad_weight = slots.matmul(columns, x_columns, inv_scale, x_inv_scale, ctx.weight_dtype)
        if wants_bias_grad:
            grad_bias = grad_output.sum(0).to(ctx.bias_dtype)
        slots.count_backward()
        return grad_input, grad_bias, grad_weight, None, None, None, None, None, None, None


class _ObserveGradient(torch.autograd.Function):
    """Identity that records the amax of the gradient that flows back through it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, slots: LinearSlots, state: SlotState) -> Tensor:
        ctx.slots, ctx.state = slots, state
        return torch.ops.aten._unsafe_view(y, y.shape)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        ctx.slots.observe(grad_output, ctx.state)
        return grad_output, None, None


class FP8Linear(nn.Linear):
    """nn.Linear whose three GEMMs run in FP8. Made by ``fp8dist.prepare``, not by hand.

    Takes [..., in_features], returns [..., out_features] in the input's dtype (under torch.autocast:
    in autocast's). Any number of tokens. Gradients of the weight come in the weight's dtype. Nothing
    is recorded in ``eval()`` or with grad off. It can be differentiated once.
    """

    fp8_slots: LinearSlots

    def forward(self, input: Tensor) -> Tensor:
        slots = self.fp8_slots
        mode = slots.mode
        use_fp8 = mode.enabled and (self.training or mode.eval_precision == "fp8")
        if not mode.allowed:
            return F.linear(input, self.weight, self.bias)
        fqn = slots.slots[Role.INPUT].fqn
        if mode.awaits_attach:
            raise ConfigurationError(f"{fqn}: with fp8_all_gather=True attach() must come before the first forward")
        weight = self.weight  # Once: a parametrization computes it anew at each access.
        in_fp8 = functools.partial(self._in_fp8, weight)
        compute = in_fp8 if use_fp8 else self._calibrating if mode.calibrating else _in_high_precision
        if is_dtensor(weight):
            return parallel_linear(compute, input, weight, self.bias, fqn)
        if is_dtensor(input):
            raise ConfigurationError(f"{fqn}: its input is a DTensor, its weight is not: parallelize the Linear, too")
        return compute(input, weight, self.bias)

    def _in_fp8(self, parameter: Tensor, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``weight``: what this rank has of ``parameter``."""
        slots = self.fp8_slots
        out_features, in_features = weight.shape  # Of this rank, under tensor parallelism.
        self._require_features(input, in_features)
        record = slots.mode.calibrating or (self.training and torch.is_grad_enabled())
        states = slots.states(weight.device)
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        tokens = input.reshape(-1, in_features)
        cast = slots.weight_cast(weight, parameter, states[1], record)
        wants_weight_grad = torch.is_grad_enabled() and weight.requires_grad
        output = _FP8LinearFunction.apply(tokens, bias, weight, *cast, slots, states, record, wants_weight_grad)
        # A new tensor for autograd, as F.linear's: FSDP2 warns of modules that return views.
        return torch.ops.aten._unsafe_view(output, (*input.shape[:-1], out_features))

    def _calibrating(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """In high precision, recording what FP8 would cast."""
        self._require_features(input, weight.shape[1])
        input_state, weight_state, grad_state = self.fp8_slots.states(weight.device)
        slots = self.fp8_slots
        slots.observe(input, input_state)
        if not isinstance(weight, FP8Weight):  # Else its shards were recorded before they were gathered.
            slots.observe(weight, weight_state)
        output = _in_high_precision(input, weight, bias)
        return _ObserveGradient.apply(output, slots, grad_state) if output.requires_grad else output

    def _require_features(self, input: Tensor, in_features: int) -> None:
        if input.ndim == 0 or input.shape[-1] != in_features:
            fqn = self.fp8_slots.slots[Role.INPUT].fqn
            raise ConfigurationError(f"{fqn}: expected [..., {in_features}], got {tuple(input.shape)}")

    def train(self, mode: bool = True) -> FP8Linear:
        """As nn.Module.train; also ends the reuse of weight casts."""
        self.fp8_slots.mode.invalidate_casts()
        return super().train(mode)


class _Dequantise(torch.autograd.Function):
    """A gathered weight in high precision; its gradient passes."""

    @staticmethod
    def forward(ctx: Any, weight: FP8Weight) -> Tensor:
        return weight.high_precision()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _in_high_precision(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not isinstance(weight, FP8Weight):
        return F.linear(input, weight, bias)
    # The dequantised weight is made again in backward: of all layers it would be the whole model.
    return torch.utils.checkpoint.checkpoint(
        _dequantising, input, weight, bias, use_reentrant=False, preserve_rng_state=False
    )


def _dequantising(input: Tensor, weight: FP8Weight, bias: Tensor | None) -> Tensor:
    return F.linear(input, _Dequantise.apply(weight), bias)


def eligible_linears(
    model: nn.Module, skip: Sequence[str], filter_fn: Callable[[nn.Module, str], bool] | None
) -> Iterator[tuple[str, nn.Linear, str | None]]:
    """(clean fqn, module, why it is skipped or None) of every Linear-like module in the model."""
    for raw, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        fqn = clean_fqn(raw)
        yield fqn, module, _why_not(module, fqn, skip, filter_fn)


def _why_not(
    module: nn.Linear, fqn: str, skip: Sequence[str], filter_fn: Callable[[nn.Module, str], bool] | None
) -> str | None:
    if isinstance(module, FP8Linear):
        raise ConfigurationError(f"{fqn or 'the model'} is prepared already: detach() its manager first")
    if has_base(module, "FSDPModule"):
        return SHARDED_ALREADY
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}, not exactly nn.Linear"
    if not isinstance(module._parameters.get("weight"), nn.Parameter):
        return "its weight is not a plain Parameter (an old-style weight_norm or spectral_norm)"
    if any(fnmatch.fnmatchcase(fqn, pattern) for pattern in skip):
        return "it matches skip"
    if module.in_features % ALIGNMENT or module.out_features % ALIGNMENT:
        return f"{module.in_features} x {module.out_features} are not multiples of {ALIGNMENT}"
    if filter_fn is not None and not filter_fn(module, fqn):
        return "filter_fn said no"
    return None


def convert(module: nn.Linear, slots: LinearSlots) -> None:
    """Make an nn.Linear an FP8Linear, in place."""
    module.__class__ = FP8Linear
    module.fp8_slots = slots  # type: ignore[assignment]


def require_revertible(module: FP8Linear) -> None:
    """Raise ConfigurationError for a class that something else made of FP8Linear."""
    if type(module) is not FP8Linear:
        raise ConfigurationError(f"{type(module).__name__} was built on an FP8Linear: take that off before detach()")


def revert(module: FP8Linear) -> None:
    """Make it a plain nn.Linear again, in place."""
    del module.fp8_slots
    module.__class__ = nn.Linear  # type: ignore[assignment]
