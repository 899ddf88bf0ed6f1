"""fp8_product: x Wᵀ + b of a Linear, or of the rows of each expert, in FP8 or as the state of the job wants it.

One autograd function computes both kinds of products, and their gradients.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8dist.errors import ConfigurationError
from fp8dist.modules.casters import Cast, ExpertMask, Request, count_tokens
from fp8dist.modules.fp8_weight import FP8Weight
from fp8dist.modules.high_precision import in_autocast, in_high_precision, of_rows, product, weight_gradient
from fp8dist.modules.linear_slots import LinearSlots, States
from fp8dist.modules.main_grad import MainGrad
from fp8dist.modules.modes import Choice, Mode, Records
from fp8dist.modules.needed_gradients import needed_gradients
from fp8dist.modules.outgrown import Outgrown
from fp8dist.modules.tensor_parallel import Multiply
from fp8dist.modules.unsupported import differentiable_once
from fp8dist_kernels.formats import Role

__all__ = ["product_of"]


class _Call(NamedTuple):
    """How one forward of a module computes, and its backward, which keeps this: it must not hold the weight.

    ``record``: True if the forward records amaxes; of experts, those of ``recorded``.
    """

    slots: LinearSlots
    mode: Mode
    states: States
    record: bool
    recorded: Records
    main_grad: MainGrad | None


def product_of(
    module: nn.Module,
    slots: LinearSlots,
    x: Tensor,
    parameter: Tensor,
    choice: Choice,
    offsets: Tensor | None = None,
    main_grad: MainGrad | None = None,
) -> Multiply:
    """Return the function that computes this forward of ``module`` from x, the weight and the bias on this rank: see
    ``in_high_precision`` for their shapes. Takes the notes of the forward. Local; commits a pending sync.

    Args:
        x: the input, from which the function's may be cut.
        parameter: stores the weight. The function's may be a view or a part of it.
        choice: what is in high precision now.
        offsets: int32[E], the ends of the experts' rows. None: of a Linear.
        main_grad: where a Linear's weight gradient goes. None: to autograd.

    Raises:
        ConfigurationError: ``attach`` must be called first, or FP8 does not support what calls the module.
    """
    if slots.job.awaits_attach:
        raise ConfigurationError(f"{slots.fqn}: with fp8_all_gather=True attach() must come before the first forward")
    mode, record = slots.mode(module, x, parameter, choice)
    if not (mode.casts or mode.recording or (mode.observes and record)):
        compute = functools.partial(in_high_precision, offsets=offsets)
    else:
        recorded: Records = mode.choice.records if record and not mode.recording else (record, record, record)
        call = _Call(slots, mode, slots.states(parameter.device), record, recorded, main_grad)
        compute = functools.partial(_in_fp8 if mode.casts else _observed, call, parameter, offsets)
    if main_grad is None or mode.casts:
        return compute
    return lambda x, weight, bias: compute(x, main_grad.through(weight), bias)


def _observed(
    call: _Call, parameter: Tensor, offsets: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Compute in high precision, and record the amaxes of the tensors that FP8 would cast, if steps sync amaxes."""
    slots: Any = call.slots  # GroupedSlots, if there are offsets.
    states, recorded = call.states, call.recorded
    if x.ndim == 0 or x.shape[-1] != weight.shape[-1]:
        raise _misfit(slots, x, weight)
    if not slots.sync.every_step:
        return in_high_precision(x, weight, bias, offsets)
    slots.caster.observe(x.detach(), states[0], recorded[0], offsets)
    if offsets is not None:
        slots.record_weight(weight, None, offsets, states[1], recorded[1])
    elif not isinstance(weight, FP8Weight):  # Otherwise its shards were recorded before the gather.
        slots.caster.observe(weight.detach(), states[1])
    output = in_high_precision(x, weight, bias, offsets)
    if output.requires_grad and recorded[2] is not False:
        output = _ObserveGradient.apply(output, offsets, call)
    return output


def _in_fp8(
    call: _Call, parameter: Tensor, offsets: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    slots: Any = call.slots  # GroupedSlots, if there are offsets.
    high = call.mode.choice.high
    if x.ndim == 0 or x.shape[-1] != weight.shape[-1]:
        raise _misfit(slots, x, weight)
    state, outgrown = call.states[1], call.mode.outgrown
    if outgrown.once and offsets is None:
        outgrown = slots.policy.limits_of_parts(outgrown, weight, parameter, state)
    x = in_autocast(x)
    copies = high.fprop is not True, high.dgrad is not True
    cast = slots.weight_cast(weight, parameter, Request(state, Role.WEIGHT, *copies, call.record, outgrown))
    if offsets is not None and call.record:
        slots.record_weight(weight, cast, offsets, state, call.recorded[1])
    rows = x.reshape(-1, x.shape[-1]) if offsets is None else x
    wants_weight_grad = torch.is_grad_enabled() and weight.requires_grad
    output = _FP8Product.apply(rows, bias, weight, *_each_once(cast), offsets, (call, outgrown, wants_weight_grad))
    # Like F.linear's output, this is no view to autograd: FSDP2 warns about modules that return views.
    return torch.ops.aten._unsafe_view(output, (*x.shape[:-1], weight.shape[-2]))


def _misfit(slots: LinearSlots, x: Tensor, weight: Tensor) -> ConfigurationError:
    return ConfigurationError(f"{slots.fqn}: expected [..., {weight.shape[-1]}], got {tuple(x.shape)}")


def _each_once(cast: Cast) -> tuple[Tensor | None, ...]:
    """Return the tensors of ``cast``, repeats as None: Dynamo rejects autograd functions that get a tensor twice."""
    rows, inv_scale, columns, columns_inv_scale = cast[:4]  # Compared one by one: this runs in every forward.
    if columns is rows or columns is inv_scale:
        columns = None  # type: ignore[assignment]
    if columns_inv_scale is inv_scale or columns_inv_scale is columns or columns_inv_scale is rows:
        columns_inv_scale = None  # type: ignore[assignment]
    return rows, None if inv_scale is rows else inv_scale, columns, columns_inv_scale


class _FP8Product(torch.autograd.Function):
    """y = x Wᵀ + b, dx = dy W, dW = dyᵀ x, of a Linear or of the rows of each expert. Each product runs in FP8 unless
    the call's choice has it in high precision. If only some experts do, it is computed both ways. The bias is added
    before y is rounded.

    The call has the states of the slots: their ``pending`` is changed in place, so it must not be saved with
    save_for_backward. Each argument costs ``apply`` two calls.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [tokens, in_features]; of experts, sorted by expert
        bias: Tensor | None,  # [(E,) out_features]; before the weight, so that gradients come in nn.Linear's order
        weight: Tensor,  # [(E,) out_features, in_features]; for its gradient, high precision, casts in backward
        weight_rows: Tensor,  # FP8 [(E,) out_features, in_features], empty if fprop is in high precision
        weight_rows_inv_scale: Tensor,
        weight_columns: Tensor,  # FP8 [(E,) in_features, out_features], empty with grad off or if cast in backward
        weight_columns_inv_scale: Tensor | None,  # None: the same tensor as for the rows; see _each_once
        offsets: Tensor | None,  # int32[E], the ends of the experts' rows
        how: tuple[_Call, Outgrown, bool],  # True: the weight gets a gradient
    ) -> Tensor:
        call, outgrown, wants_weight_grad = how
        slots, (high, *_) = call.slots, call.mode.choice
        copies = high.fprop is not True, wants_weight_grad and high.wgrad is not True
        request = Request(call.states[0], Role.INPUT, *copies, call.recorded[0], outgrown, offsets)
        cast = slots.caster.cast(x, request)
        ctx.casts_again = slots.casts_in_backward(weight)
        if weight_columns_inv_scale is None:
            weight_columns_inv_scale = weight_rows_inv_scale
        ctx.save_for_backward(
            cast.columns,
            cast.columns_inv_scale,
            weight_columns,
            weight_columns_inv_scale,
            weight if ctx.casts_again or high.dgrad is not False else None,
            x if wants_weight_grad and high.wgrad is not False else None,
            offsets,
        )
        ctx.slots, ctx.call, ctx.outgrown = slots, call, outgrown
        ctx.input_dtype, ctx.weight_dtype = x.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        bias = None if bias is None else bias.to(x.dtype)  # As autocast does. cuBLASLt can add a bias of this dtype.
        if high.fprop is True:
            return product(x, weight, bias, offsets)
        output = slots.matmul(cast[:2], (weight_rows, weight_rows_inv_scale), x.dtype, "fprop", offsets, bias)
        assert output is not None
        return output if high.fprop is False else _mixed(output, product(x, weight, bias, offsets), high.fprop, offsets)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x_columns, x_inv_scale, weight_columns, weight_inv_scale, weight, x, offsets = ctx.saved_tensors
        call: _Call = ctx.call
        slots, (high, *_) = call.slots, call.mode.choice
        slots.settle()  # There may have been a boundary since the forward.
        wants_input_grad, wants_bias_grad, wants_weight_grad = needed_gradients(ctx)
        copies = wants_input_grad and high.dgrad is not True, wants_weight_grad and high.wgrad is not True
        grad_input = grad_weight = grad_bias = None
        if wants_input_grad or wants_weight_grad:  # Otherwise only the bias needs a gradient.
            if offsets is not None and call.record and slots.job.measuring:
                count_tokens(offsets, call.states[2])
            if wants_bias_grad and slots.adds_in_cast and True in copies:
                grad_bias = grad_output.new_empty(grad_output.shape[1], dtype=ctx.bias_dtype)
            limits = slots.policy.limits_in_backward(ctx.outgrown)
            request = Request(
                call.states[2], Role.GRAD_OUTPUT, *copies, call.recorded[2], limits, offsets, sums=grad_bias
            )
            cast = slots.caster.cast(grad_output, request)
        if wants_input_grad:
            of_weight = weight, weight_columns, weight_inv_scale
            grad_input = _input_gradient(ctx, grad_output, cast, of_weight, offsets)
        if wants_weight_grad:
            grad_weight = _weight_gradient(ctx, grad_output, cast, (x, x_columns, x_inv_scale), offsets)
        if wants_bias_grad and grad_bias is None:
            grad_bias = slots.bias_gradient(grad_output, ctx.bias_dtype, offsets)
        slots.monitor.count_backward(call.record)
        return (grad_input, grad_bias, grad_weight, *[None] * 6)


Factor = tuple[Tensor | None, Tensor, Tensor]
"""What the forward has kept of a tensor: itself, if it is needed; its columns in FP8, and their inverse scales."""


def _input_gradient(ctx: Any, grad_output: Tensor, cast: Cast, of_weight: Factor, offsets: Tensor | None) -> Tensor:
    slots, high = ctx.slots, ctx.call.mode.choice.high.dgrad
    weight, *columns = of_weight
    grad_input: Tensor | None = None
    if high is not True:
        # The copy may be as large as the weight's gradient: it is freed before that.
        operand = slots.backward_cast(weight, ctx.call.states[1], ctx.outgrown) if ctx.casts_again else columns
        grad_input = slots.matmul(cast[:2], operand, ctx.input_dtype, "dgrad", offsets)
    if high is not False:
        assert weight is not None
        in_high = product(grad_output, weight.mT, None, offsets).to(ctx.input_dtype)
        grad_input = _mixed(grad_input, in_high, high, offsets)
    assert grad_input is not None
    return grad_input


def _weight_gradient(
    ctx: Any, grad_output: Tensor, cast: Cast, of_input: Factor, offsets: Tensor | None
) -> Tensor | None:
    slots, high, main_grad = ctx.slots, ctx.call.mode.choice.high.wgrad, ctx.call.main_grad
    x, *columns = of_input
    grad_weight: Tensor | None = None
    if high is not True:
        into = None if main_grad is None else main_grad.total
        grad_weight = slots.matmul(cast[2:4], columns, ctx.weight_dtype, "wgrad", offsets, None, into)
    if high is not False:
        assert x is not None
        in_high = weight_gradient(grad_output, x.to(grad_output.dtype), offsets).to(ctx.weight_dtype)
        grad_weight = _mixed(grad_weight, in_high, high, offsets)
    if main_grad is not None:
        grad_weight = main_grad.added() if grad_weight is None else main_grad.add(grad_weight)
    return grad_weight


def _mixed(in_fp8: Tensor | None, in_high: Tensor, high: ExpertMask, offsets: Tensor | None) -> Tensor:
    """Return each expert's product in its precision: of rows [tokens, features], or of experts [E, m, n]."""
    if in_fp8 is None:
        return in_high
    assert isinstance(high, Tensor)
    assert offsets is not None
    if in_high.ndim == 2:
        return torch.where(of_rows(high, in_high, offsets)[:, None], in_high, in_fp8)
    return torch.where(high[:, None, None], in_high, in_fp8)


class _ObserveGradient(torch.autograd.Function):
    """Identity whose backward records the amax of a gradient that no product in FP8 takes."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, offsets: Tensor | None, call: _Call) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(offsets)
        return torch.ops.aten._unsafe_view(y, y.shape)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (offsets,), call = ctx.saved_tensors, ctx.call
        call.slots.monitor.note_backward()
        if offsets is not None and call.slots.job.measuring:
            count_tokens(offsets, call.states[2])
        call.slots.caster.observe(grad_output.detach(), call.states[2], call.recorded[2], offsets)
        return grad_output, None, None
