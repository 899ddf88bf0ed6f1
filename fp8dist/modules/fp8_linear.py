"""FP8Linear, and the conversion of nn.Linear modules to FP8Linear and back.

Conversion is in place: only the module's class changes, and a ``LinearSlots`` is attached. So parameters, state_dict
keys, hooks and references to the module stay valid.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from fp8dist.errors import ConfigurationError
from fp8dist.modules.casters import Cast, Request
from fp8dist.modules.foreign import gathered_input, is_parallel, is_transposed, linear_base
from fp8dist.modules.fp8_weight import FP8Weight, dequantised
from fp8dist.modules.linear_slots import LinearSlots, States
from fp8dist.modules.main_grad import MainGrad
from fp8dist.modules.modes import Mode
from fp8dist.modules.needed_gradients import needed_gradients
from fp8dist.modules.observe_gradient import observe_gradient
from fp8dist.modules.outgrown import Outgrown
from fp8dist.modules.tensor_parallel import Linear, parallel_linear
from fp8dist.modules.unsupported import FLOATING, differentiable_once, require_floating
from fp8dist.modules.weight_notes import stored_parameters
from fp8dist.state.groups import is_dtensor
from fp8dist.state.recipe import GEMMS, Gemm
from fp8dist_kernels.formats import Role

__all__ = ["FP8Linear", "convert", "fp8_linears", "require_revertible", "revert"]


class _FP8LinearFunction(torch.autograd.Function):
    """y = x Wᵀ + b, dx = dy W, dW = dyᵀ x. Each product runs in FP8 unless ``high`` names it; the bias is added before
    y is rounded.

    The state of the grad_output slot is an attribute of ctx: its ``pending`` is changed in place, so it must not be
    saved with save_for_backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [tokens, in_features]
        bias: Tensor | None,  # [out_features]; before the weight, so that gradients come in nn.Linear's order
        weight: Tensor,  # [out_features, in_features]; for its gradient, high-precision GEMMs, casts in backward
        weight_rows: Tensor,  # FP8 [out_features, in_features], empty if fprop is in high precision
        weight_rows_inv_scale: Tensor,
        weight_columns: Tensor,  # FP8 [in_features, out_features], empty with grad off or if cast in backward
        weight_columns_inv_scale: Tensor | None,  # None: the same tensor as for the rows; see _each_once
        slots: LinearSlots,
        states: States,
        record: bool,
        weight_grad: tuple[bool, MainGrad | None],  # if it is wanted; where it goes, if not to autograd
        high: tuple[Gemm, ...],
        outgrown: Outgrown,
    ) -> Tensor:
        input_state, ctx.weight_state, ctx.grad_state = states
        wants_weight_grad, ctx.main_grad = weight_grad  # One argument: each costs ``apply`` two calls.
        columns = wants_weight_grad and "wgrad" not in high
        cast = slots.caster.cast(x, Request(input_state, Role.INPUT, "fprop" not in high, columns, record, outgrown))
        later = "dgrad" in high or slots.casts_in_backward(weight)
        if weight_columns_inv_scale is None:
            weight_columns_inv_scale = weight_rows_inv_scale
        ctx.save_for_backward(
            cast.columns,
            cast.columns_inv_scale,
            weight_columns,
            weight_columns_inv_scale,
            weight if later else None,
            x if wants_weight_grad and "wgrad" in high else None,
        )
        ctx.slots, ctx.record, ctx.high, ctx.outgrown = slots, record, high, outgrown
        ctx.input_dtype, ctx.weight_dtype = x.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        bias = None if bias is None else bias.to(x.dtype)  # As autocast does. cuBLASLt can add a bias of this dtype.
        if "fprop" in high:
            return F.linear(x, weight.to(x.dtype), bias)
        inv_scales = cast.rows_inv_scale, weight_rows_inv_scale
        return slots.matmul(cast.rows, weight_rows, *inv_scales, x.dtype, "fprop", bias)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x_columns, x_inv_scale, weight_columns, weight_inv_scale, weight, x = ctx.saved_tensors
        slots: LinearSlots = ctx.slots
        main_grad: MainGrad | None = ctx.main_grad
        slots.settle()  # There may have been a boundary since the forward.
        wants_input_grad, wants_bias_grad, wants_weight_grad = needed_gradients(ctx)
        fp8_input_grad = wants_input_grad and "dgrad" not in ctx.high
        fp8_weight_grad = wants_weight_grad and "wgrad" not in ctx.high
        grad_input = grad_weight = grad_bias = None
        if wants_input_grad or wants_weight_grad:  # Otherwise only the bias needs a gradient.
            copies = fp8_input_grad, fp8_weight_grad
            if wants_bias_grad and slots.adds_in_cast and (fp8_input_grad or fp8_weight_grad):
                grad_bias = grad_output.new_empty(grad_output.shape[1], dtype=ctx.bias_dtype)
            limits = slots.policy.limits_in_backward(ctx.outgrown)
            request = Request(ctx.grad_state, Role.GRAD_OUTPUT, *copies, ctx.record, limits, sums=grad_bias)
            cast = slots.caster.cast(grad_output, request)
        if fp8_input_grad:
            if weight is not None:
                weight_columns, weight_inv_scale = slots.backward_cast(weight, ctx.weight_state, ctx.outgrown)
            inv_scales = cast.rows_inv_scale, weight_inv_scale
            grad_input = slots.matmul(cast.rows, weight_columns, *inv_scales, ctx.input_dtype, "dgrad")
            del weight_columns  # It may be a copy as large as the weight gradient, which comes next.
        elif wants_input_grad:
            grad_input = (grad_output @ weight.to(grad_output.dtype)).to(ctx.input_dtype)
        if fp8_weight_grad:
            operands = cast.columns, x_columns, cast.columns_inv_scale, x_inv_scale
            if main_grad is None:
                grad_weight = slots.matmul(*operands, ctx.weight_dtype, "wgrad")
            else:
                slots.matmul_into(*operands, main_grad.total, "wgrad")
                grad_weight = main_grad.added()
        elif wants_weight_grad:
            grad_weight = (grad_output.t() @ x.to(grad_output.dtype)).to(ctx.weight_dtype)
            grad_weight = grad_weight if main_grad is None else main_grad.add(grad_weight)
        if wants_bias_grad and grad_bias is None:
            grad_bias = slots.bias_gradient(grad_output, ctx.bias_dtype)
        slots.monitor.count_backward(ctx.record)
        return (grad_input, grad_bias, grad_weight, *[None] * 10)


class FP8Linear(nn.Linear):
    """nn.Linear whose three GEMMs run in FP8. Created by ``fp8dist.prepare``; do not construct it yourself.

    Takes [..., in_features] and returns [..., out_features] in the input's dtype (under torch.autocast, in the autocast
    dtype). Accepts any number of tokens. The weight's gradient has the weight's dtype. Records no amaxes in ``eval()``
    or with grad disabled. Does not support double backward.

    A module of another class than nn.Linear gets a class that inherits from both, so ``isinstance`` still holds.
    ``converted_from`` is the class that it had. ``transposed``: its weight is stored as [in_features, out_features].
    """

    fp8_slots: LinearSlots
    converted_from: ClassVar[type[nn.Module]] = nn.Linear
    transposed: ClassVar[bool] = False

    def forward(self, input: Tensor) -> Tensor:
        """Return x Wᵀ + b: [..., in_features] to [..., out_features]. Local; commits a pending sync.

        Raises:
            ConfigurationError: the input does not fit the weight, or ``attach`` must be called first. Names the module.
        """
        if not self.fp8_slots.job.enabled:
            return F.linear(input, self.weight.t() if self.transposed else self.weight, self.bias)
        return self._multiply(input, self.bias)

    def _multiply(self, input: Tensor, bias: Tensor | None, main_grad: MainGrad | None = None) -> Tensor:
        """Return x Wᵀ + ``bias`` as the state of the job wants it. Local; commits a pending sync.

        Args:
            main_grad: where the weight's gradient goes. None: to autograd.
        """
        slots = self.fp8_slots
        if slots.job.awaits_attach:
            raise ConfigurationError(
                f"{slots.fqn}: with fp8_all_gather=True attach() must come before the first forward"
            )
        if input.dtype not in FLOATING:
            require_floating(input, slots.fqn)
        weight = self.weight  # Read once: a parametrization recomputes it at each access.
        compute = self._computation(input, weight, main_grad)
        weight = weight.t() if self.transposed else weight
        if is_dtensor(weight):
            return parallel_linear(compute, input, weight, bias, slots.fqn)
        if is_dtensor(input):
            raise ConfigurationError(
                f"{slots.fqn}: its input is a DTensor, its weight is not: parallelize the Linear, too"
            )
        return compute(input, weight, bias)

    def _computation(self, input: Tensor, weight: Tensor, main_grad: MainGrad | None) -> Linear:
        """Return the function for this forward: in FP8, or in high precision with or without recording amaxes."""
        slots = self.fp8_slots
        high = slots.precision.high
        mode, record = slots.mode(self, input, weight, high, high == GEMMS)
        if mode.casts:
            return functools.partial(self._in_fp8, weight, mode, record, main_grad)
        compute = self._observed if mode.recording or (mode.observes and record) else _in_high_precision
        return compute if main_grad is None else lambda x, w, bias: compute(x, main_grad.through(w), bias)

    def _in_fp8(
        self,
        parameter: Tensor,
        mode: Mode,
        record: bool,
        main_grad: MainGrad | None,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        """Compute the output with FP8 GEMMs. ``weight``: this rank's local tensor of ``parameter``."""
        slots = self.fp8_slots
        out_features, in_features = weight.shape  # Local sizes, under tensor parallelism.
        self._require_features(input, in_features)
        high, states = mode.high, slots.states(weight.device)
        outgrown = slots.policy.limits_of_parts(mode.outgrown, weight, parameter, states[1])
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        tokens = input.reshape(-1, in_features)
        fprop, dgrad = "fprop" not in high, "dgrad" not in high
        request = Request(states[1], Role.WEIGHT, fprop, dgrad, record, outgrown)
        cast = slots.weight_cast(weight, parameter, request)
        weight_grad = torch.is_grad_enabled() and weight.requires_grad, main_grad
        output = _FP8LinearFunction.apply(
            tokens, bias, weight, *_each_once(cast), slots, states, record, weight_grad, high, outgrown
        )
        # Like F.linear's output, this is no view to autograd: FSDP2 warns about modules that return views.
        return torch.ops.aten._unsafe_view(output, (*input.shape[:-1], out_features))

    def _observed(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute in high precision, and record the amaxes of the tensors that FP8 would cast, if steps sync amaxes."""
        self._require_features(input, weight.shape[1])
        slots = self.fp8_slots
        input_state, weight_state, grad_state = slots.states(weight.device)
        if not slots.sync.every_step:
            return _in_high_precision(input, weight, bias)
        slots.caster.observe(input.detach(), input_state)
        if not isinstance(weight, FP8Weight):  # Otherwise its shards were recorded before the gather.
            slots.caster.observe(weight.detach(), weight_state)
        output = _in_high_precision(input, weight, bias)
        return observe_gradient(output, slots, grad_state) if output.requires_grad else output

    def _require_features(self, input: Tensor, in_features: int) -> None:
        if input.ndim == 0 or input.shape[-1] != in_features:
            raise ConfigurationError(f"{self.fp8_slots.fqn}: expected [..., {in_features}], got {tuple(input.shape)}")

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load as nn.Module does. Also marks the weight as written, because FSDP may have replaced the parameter."""
        self.fp8_slots.note.sample_before_load(self, self.fp8_slots.job.loads)
        super()._load_from_state_dict(*args, **kwargs)
        self.fp8_slots.note.mark_written()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save as nn.Module does. Also notes that the weight may be written to."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            names = (name for name in self._parameters if name.startswith("weight"))
            self.fp8_slots.note.hand_out(destination[prefix + name] for name in names if prefix + name in destination)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.fp8_slots.note.belong_to(self)

    def train(self, mode: bool = True) -> FP8Linear:
        """Same as nn.Module.train. Also invalidates cached weight casts."""
        self.fp8_slots.job.invalidate_casts()
        return super().train(mode)


def _each_once(cast: Cast) -> tuple[Tensor | None, ...]:
    """Return the tensors of ``cast``, repeats as None: Dynamo rejects autograd functions that get a tensor twice."""
    rows, inv_scale, columns, columns_inv_scale = cast[:4]  # Compared one by one: this runs in every forward.
    if columns is rows or columns is inv_scale:
        columns = None  # type: ignore[assignment]
    if columns_inv_scale is inv_scale or columns_inv_scale is columns or columns_inv_scale is rows:
        columns_inv_scale = None  # type: ignore[assignment]
    return rows, None if inv_scale is rows else inv_scale, columns, columns_inv_scale


def _in_high_precision(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not isinstance(weight, FP8Weight):
        return _linear(input, weight, bias)
    # Recompute the dequantised weight in backward: saved for all layers, these would be a whole unsharded model.
    return torch.utils.checkpoint.checkpoint(
        _dequantising, input, weight, bias, use_reentrant=False, preserve_rng_state=False
    )


def _dequantising(input: Tensor, weight: FP8Weight, bias: Tensor | None) -> Tensor:
    return _linear(input, dequantised(weight), bias)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear in the input's dtype, whatever the weight's dtype, as in FP8: a fallback must accept mixed dtypes."""
    if input.dtype != weight.dtype and not torch.is_autocast_enabled(input.device.type):
        weight, bias = weight.to(input.dtype), None if bias is None else bias.to(input.dtype)
    return F.linear(input, weight, bias)


def fp8_linears(model: nn.Module) -> Iterator[FP8Linear]:
    """Iterate over all FP8Linears of a model."""
    return (module for module in model.modules() if isinstance(module, FP8Linear))


def convert(module: nn.Module, slots: LinearSlots) -> None:
    """Convert an nn.Linear, or a module that computes the same, to an FP8Linear, in place."""
    module.fp8_slots = slots  # type: ignore[assignment]  # Before the class: another thread may look for FP8Linears.
    made = _fp8_class(type(module))  # type: ignore[arg-type]
    if not isinstance(module, nn.Linear):
        shape = stored_parameters(module)[0].shape
        module.out_features, module.in_features = reversed(shape) if made.transposed else shape  # type: ignore[assignment]
    module.__class__ = made
    slots.note.remember(stored_parameters(module))


@functools.cache
def _fp8_class(original: type[nn.Module]) -> type[FP8Linear]:
    """Return the class of converted modules of a class, the same one for all of them."""
    if original is nn.Linear:
        return FP8Linear
    base = linear_base(original)
    assert base is not None

    def reduce(self: FP8Linear, protocol: Any) -> Any:
        """Pickle by the original class: this one has no importable name."""
        reduced: Any = super(FP8Linear, self).__reduce_ex__(protocol)
        return _without_init, (original,), *reduced[2:]

    members: dict[str, Any] = {"converted_from": original, "transposed": is_transposed(base)}
    members |= {"__reduce_ex__": reduce, "__module__": __name__}
    if is_parallel(base):
        members |= {"forward": original.forward, "_forward_impl": _parallel_forward}
    return types.new_class(f"FP8{original.__name__}", (FP8Linear, original), {}, lambda body: body.update(members))


def _parallel_forward(
    self: FP8Linear,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any,
    gradient_accumulation_fusion: bool = False,
    **options: Any,
) -> Tensor:
    """``_forward_impl`` of Megatron-Core's parallel Linears: x Wᵀ + b with this rank's part of the weight. COLLECTIVE,
    see ``gathered_input``.

    Args:
        gradient_accumulation_fusion: add the weight's gradient to ``main_grad``, if there is one. torch.compile leaves
            such a module out of its graphs: a compiled backward cannot mark the weight.
        options: what Megatron-Core calls it with beside that.
    """
    slots = self.fp8_slots
    if not slots.job.enabled:
        linked = {"allreduce_dgrad": allreduce_dgrad, "sequence_parallel": sequence_parallel, "tp_group": tp_group}
        linked["gradient_accumulation_fusion"] = gradient_accumulation_fusion
        return self.converted_from._forward_impl(self, input, weight, bias, **linked, **options)  # type: ignore[attr-defined]
    if weight is not self.weight:
        raise ConfigurationError(
            f"{slots.slots[Role.INPUT].fqn}: it was called with the weight of another module, for which it has no "
            "scale: name it in skip="
        )
    input = gathered_input(input, allreduce_dgrad, sequence_parallel, tp_group)
    if not gradient_accumulation_fusion:
        return self._multiply(input, bias)
    return (_multiply_in_eager if torch.compiler.is_compiling() else _multiply_fused)(self, input, bias)


def _multiply_fused(linear: FP8Linear, input: Tensor, bias: Tensor | None) -> Tensor:
    return linear._multiply(input, bias, MainGrad.of(linear.weight))


_multiply_in_eager = _disable_dynamo(_multiply_fused)


def _without_init(original: type[nn.Module]) -> FP8Linear:
    made = _fp8_class(original)  # type: ignore[arg-type]
    return made.__new__(made)


def require_revertible(module: FP8Linear) -> None:
    """Raise ConfigurationError if another tool has subclassed FP8Linear for this module, as parametrizations do."""
    if type(module) is not _fp8_class(module.converted_from):  # type: ignore[arg-type]
        raise ConfigurationError(f"{type(module).__name__} is a subclass of FP8Linear: undo that before restore()")


def revert(module: FP8Linear) -> None:
    """Convert an FP8Linear back to the class that it had, in place."""
    del module.fp8_slots
    if not issubclass(module.converted_from, nn.Linear):
        del module.in_features, module.out_features
    module.__class__ = module.converted_from  # type: ignore[assignment]
