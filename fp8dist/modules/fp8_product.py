"""fp8_product: x Wᵀ + b of a Linear, or of each expert with its own rows, in FP8 or in high precision.

The state of the job decides which precision. One autograd function computes the FP8 products of both kinds, and their
gradients. The three GEMMs of a module are *fprop* (x Wᵀ), *dgrad* (dy W, the input's gradient) and *wgrad* (dyᵀ x, the
weight's gradient). "Rows" and "columns" of a cast are its row-major copy and its transposed copy.
"""

from __future__ import annotations

import functools
import operator
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
from fp8dist.modules.outgrown import Outgrown
from fp8dist.modules.tensor_parallel import Multiply
from fp8dist.modules.unsupported import differentiable_once
from fp8dist_kernels.formats import Role


class _Call(NamedTuple):
    """How one forward of a module computes, and its backward. Autograd keeps it until then, so it must not hold the
    weight, which FSDP frees in between.

    Attributes:
        states: the states of the (input, weight, grad_output) slots.
        record: True if amaxes are recorded.
        recorded: for each of these tensors, the experts whose amaxes are recorded; True or False for a Linear.
        main_grad: the buffer to which the weight's gradient is added. None: autograd gets the gradient.
        step: the training step of its random numbers, int64 0-d. None: its casts draw none.
    """

    slots: LinearSlots
    mode: Mode
    states: States
    record: bool
    recorded: Records
    main_grad: MainGrad | None
    step: Tensor | None


def product_of(
    module: nn.Module,
    slots: LinearSlots,
    x: Tensor,
    parameter: Tensor,
    choice: Choice,
    offsets: Tensor | None = None,
    main_grad: MainGrad | None = None,
) -> Multiply:
    """Return a function f(x, weight, bias) that computes this forward of ``module`` on this rank. Local; commits a
    pending sync. For the shapes of f's arguments see ``in_high_precision``.

    The function is local, but COLLECTIVE in eval mode if ``parameter`` is a sharded DTensor: see
    ``WritePolicy.limits_of_parts``.

    Args:
        x: the module's input. With tensor parallelism, f gets this rank's part of it.
        parameter: stores the weight. f gets a view, or this rank's part.
        choice: which products run in high precision now.
        offsets: int32[E], the ends of the experts' rows. None: the module is a Linear.
        main_grad: the buffer to which a Linear's weight gradient is added. None: autograd gets the gradient.

    Raises:
        ConfigurationError: ``attach`` must be called first, or FP8 does not support ``x`` or the transform that calls
            the module. The function raises it for shapes that do not fit.
    """
    if slots.job.awaits_attach:
        raise ConfigurationError(f"{slots.fqn}: with fp8_all_gather=True attach() must come before the first forward")
    mode, record = slots.mode(module, x, parameter, choice)
    if not (mode.casts or mode.recording or (mode.observes and record)):
        compute = functools.partial(in_high_precision, offsets=offsets)
    else:
        recorded: Records = mode.choice.records if record and not mode.recording else (record, record, record)
        caster: Any = slots.caster  # NVFP4Caster, if it draws.
        step = caster.counted_step(parameter, module) if mode.casts and caster.draws else None
        call = _Call(slots, mode, slots.states(parameter.device), record, recorded, main_grad, step)
        compute = functools.partial(_in_fp8 if mode.casts else _observed, call, parameter, offsets)
    if main_grad is None or mode.casts:
        return compute
    return lambda x, weight, bias: compute(x, main_grad.through(weight), bias)


def _observed(
    call: _Call, parameter: Tensor, offsets: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Compute in high precision. Record the amaxes of the tensors that FP8 would cast, if the recipe uses amaxes of
    earlier steps (``every_step``). ``parameter`` is unused: the signature is that of ``_in_fp8``."""
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
    """Compute with at least one product in FP8. Casts the weight here, outside of the autograd function, so that the
    function's arguments are the casts, which several microbatches may share."""
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
    how = call, outgrown, wants_weight_grad
    output = _FP8Product.apply(rows, bias, weight, *_each_once(cast), offsets, how)
    # Like F.linear's output, this is no view to autograd: FSDP2 warns about modules that return views.
    return torch.ops.aten._unsafe_view(output, (*x.shape[:-1], weight.shape[-2]))


def _misfit(slots: LinearSlots, x: Tensor, weight: Tensor) -> ConfigurationError:
    return ConfigurationError(f"{slots.fqn}: expected [..., {weight.shape[-1]}], got {tuple(x.shape)}")


def _each_once(cast: Cast) -> tuple[Tensor | None, ...]:
    """Return the four tensors of ``cast``, with None for a tensor that repeats an earlier one: Dynamo rejects autograd
    functions that get a tensor twice."""
    rows, inv_scale, columns, columns_inv_scale = cast[:4]  # Compared one by one: this runs in every forward.
    if columns is rows or columns is inv_scale:
        columns = None  # type: ignore[assignment]
    if columns_inv_scale is inv_scale or columns_inv_scale is columns or columns_inv_scale is rows:
        columns_inv_scale = None  # type: ignore[assignment]
    return rows, None if inv_scale is rows else inv_scale, columns, columns_inv_scale


class _FP8Product(torch.autograd.Function):
    """y = x Wᵀ + b, dx = dy W, dW = dyᵀ x, for a Linear or for the rows of each expert.

    Each product runs in FP8 unless the call's choice puts it in high precision. If the choice does so for some experts
    only, the product is computed both ways, and each expert's result is selected. The bias is added before y is
    rounded.

    The slots' states are passed in the call, not saved with ``save_for_backward``: their recorded amaxes change in
    place, which autograd would reject. Arguments are bundled because each one costs ``apply`` two Python calls.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [tokens, in_features]; of experts, sorted by expert
        bias: Tensor | None,  # [(E,) out_features]; before the weight, so that gradients come in nn.Linear's order
        weight: Tensor,  # [(E,) out_features, in_features]; gets the gradient; used in high precision or to cast again
        weight_rows: Tensor,  # FP8 [(E,) out_features, in_features], empty if fprop is in high precision
        weight_rows_inv_scale: Tensor,
        weight_columns: Tensor,  # FP8 [(E,) in_features, out_features], empty with grad off or if cast in backward
        weight_columns_inv_scale: Tensor | None,  # None: the same tensor as for the rows; see _each_once
        offsets: Tensor | None,  # int32[E], the ends of the experts' rows
        how: tuple[_Call, Outgrown, bool],  # The call; limits of the casts; True if the weight gets a gradient.
    ) -> Tensor:
        call, outgrown, wants_weight_grad = how
        slots, (high, *_) = call.slots, call.mode.choice
        copies = high.fprop is not True, wants_weight_grad and high.wgrad is not True
        request = Request(call.states[0], Role.INPUT, *copies, call.recorded[0], outgrown, offsets, step=call.step)
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
        ctx.slots, ctx.call, ctx.outgrown, ctx.numbered = slots, call, outgrown, None
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
        slots.settle()  # A step may have ended since the forward, whose sync is then still pending.
        wants_input_grad, wants_bias_grad, wants_weight_grad = _needed_gradients(ctx)
        copies = wants_input_grad and high.dgrad is not True, wants_weight_grad and high.wgrad is not True
        grad_input = grad_weight = grad_bias = None
        if wants_input_grad or wants_weight_grad:  # Otherwise only the bias needs a gradient.
            if offsets is not None and call.record and slots.job.measuring:
                count_tokens(offsets, call.states[2])
            if wants_bias_grad and slots.adds_in_cast and True in copies:
                grad_bias = grad_output.new_empty(grad_output.shape[1], dtype=ctx.bias_dtype)
            limits = slots.policy.limits_in_backward(ctx.outgrown, call.record)
            request = Request(
                call.states[2],
                Role.GRAD_OUTPUT,
                *copies,
                call.recorded[2],
                limits,
                offsets,
                sums=grad_bias,
                step=call.step,
            )
            if slots.caster.draws and True in copies:
                request.number = _number_of(ctx, copies)
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


def _needed_gradients(ctx: Any) -> tuple[bool, bool, bool]:
    """Return, for the first three inputs of an autograd function, True if the backward that runs now uses the gradient.

    ``ctx.needs_input_grad`` shows what the forward knew. That is not enough for pipelines with split backward (zero
    bubble): they run each backward twice, first for the gradients of inputs, later for those of weights, and each run
    should compute its own part only. Every backward calls this, so the code makes few Python calls.

    Args:
        ctx: the autograd context, inside ``backward``.
    """
    needs: tuple[bool, bool, bool] = ctx.needs_input_grad[:3]
    if torch.compiler.is_compiling():
        return needs
    nodes = [node for node, _ in ctx.next_functions if node is not None]  # Of the inputs that need gradients, in order.
    used, first = [False, False, False], 0
    for place in range(3):
        if needs[place]:
            try:
                used[place] = torch._C._will_engine_execute_node(nodes[first])
            except (AttributeError, RuntimeError):  # A leaf whose gradient autograd.grad() returns; or another torch.
                used[place] = True
            first += 1
    return used[0], used[1], used[2]


def _number_of(ctx: Any, copies: tuple[bool, bool]) -> int:
    """Return the number of this backward for random numbers. The second half of a split one gets that of the first.

    Args:
        ctx: the autograd context. ``numbered``: the copies of the gradient that the last run made, and its number.
        copies: what this run makes.
    """
    before, ctx.numbered = ctx.numbered, None
    if before is None or any(map(operator.and_, copies, before[0])):
        before = ctx.numbered = copies, ctx.slots.caster.next_backward(ctx.call.recorded[2] is not False)
    return int(before[1])


Factor = tuple[Tensor | None, Tensor, Tensor]
"""What the forward saved of x or of the weight: the tensor itself if a product in high precision (or a new cast) needs
it, its transposed FP8 copy, and the copy's inverse scales."""


def _input_gradient(ctx: Any, grad_output: Tensor, cast: Cast, of_weight: Factor, offsets: Tensor | None) -> Tensor:
    slots, high = ctx.slots, ctx.call.mode.choice.high.dgrad
    weight, *columns = of_weight
    grad_input: Tensor | None = None
    if high is not True:
        # A new copy lives in this function only: freed before the weight's gradient, which is as large, is made.
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
    """Return each expert's result in its own precision.

    Args:
        in_fp8, in_high: both results: rows [tokens, features], or one matrix per expert [E, m, n]. ``in_fp8`` None: all
            of the product is in high precision.
        high: bool[E], True for experts in high precision.
    """
    if in_fp8 is None:
        return in_high
    assert isinstance(high, Tensor)
    assert offsets is not None
    if in_high.ndim == 2:
        return torch.where(of_rows(high, in_high, offsets)[:, None], in_high, in_fp8)
    return torch.where(high[:, None, None], in_high, in_fp8)


class _ObserveGradient(torch.autograd.Function):
    """Identity whose backward records the amax of the gradient, for a module that computes in high precision."""

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
