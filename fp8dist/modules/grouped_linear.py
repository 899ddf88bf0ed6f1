"""grouped_linear: the rows of each expert times the weight of that expert, in FP8, with state for each expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8dist.errors import ConfigurationError
from fp8dist.modules.casters import ExpertMask, Request, count_tokens
from fp8dist.modules.fp8_weight import FP8Weight, dequantised
from fp8dist.modules.grouped_slots import Choice, GroupedSlots
from fp8dist.modules.linear_slots import States
from fp8dist.modules.needed_gradients import needed_gradients
from fp8dist.modules.observe_gradient import observe_gradient
from fp8dist.modules.outgrown import Outgrown
from fp8dist.modules.unsupported import differentiable_once, require_floating
from fp8dist.state.groups import is_dtensor
from fp8dist_kernels.formats import Role
from fp8dist_kernels.reference.grouped_shares import expert_of_rows

__all__ = ["grouped_linear", "high_product"]


class _Call(NamedTuple):
    """What a forward of a grouped product hands to its backward, beside tensors."""

    slots: GroupedSlots
    states: States
    choice: Choice
    record: bool
    recorded: Mapping[Role, ExpertMask]
    wants_weight_grad: bool
    outgrown: Outgrown


class _GroupedFunction(torch.autograd.Function):
    """y = x Wᵀ + b, dx = dy W, dW = dyᵀ x, for the rows of each expert. ``choice.high`` says which experts compute
    which product in high precision. If only some do, the product is computed both ways.

    ``call`` has the state of the slots: its ``pending`` is changed in place, so it must not be saved with
    save_for_backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [tokens, in_features], sorted by expert
        bias: Tensor | None,  # [E, out_features]; before the weight, so that gradients come in nn.Linear's order
        weight: Tensor,  # [E, out_features, in_features]; for its gradient, high-precision products, casts in backward
        weight_rows: Tensor,  # FP8 [E, out_features, in_features], empty if fprop is in high precision
        weight_rows_inv_scale: Tensor,
        weight_columns: Tensor,  # FP8 [E, in_features, out_features], empty with grad off or if cast in backward
        weight_columns_inv_scale: Tensor | None,  # None: the same tensor as for the rows
        offsets: Tensor,  # int32[E], ends of the experts' rows
        call: _Call,
    ) -> Tensor:
        slots, high = call.slots, call.choice.high
        fprop, wgrad = high["fprop"], high["wgrad"]
        columns = call.wants_weight_grad and wgrad is not True
        copies, recorded = (fprop is not True, columns), call.recorded[Role.INPUT]
        cast = slots.caster.cast(x, Request(call.states[0], Role.INPUT, *copies, recorded, call.outgrown, offsets))
        later = high["dgrad"] is not False or slots.casts_in_backward(weight)
        if weight_columns_inv_scale is None:
            weight_columns_inv_scale = weight_rows_inv_scale
        ctx.save_for_backward(
            cast.columns,
            cast.columns_inv_scale,
            weight_columns,
            weight_columns_inv_scale,
            weight if later else None,
            x if call.wants_weight_grad and wgrad is not False else None,
            offsets,
        )
        ctx.slots, ctx.call, ctx.input_dtype, ctx.weight_dtype = slots, call, x.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        bias = None if bias is None else bias.to(x.dtype)  # As autocast does.
        in_fp8 = in_high = None
        if fprop is not True:
            inv_scales = cast.rows_inv_scale, weight_rows_inv_scale
            in_fp8 = slots.grouped_matmul(cast.rows, weight_rows, *inv_scales, offsets, x.dtype, "fprop", bias)
        if fprop is not False:
            in_high = high_product(x, weight, offsets, bias)
        return _by_rows(in_fp8, in_high, fprop, offsets)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x_columns, x_inv_scale, weight_columns, weight_inv_scale, weight, x, offsets = ctx.saved_tensors
        call: _Call = ctx.call
        slots, high = call.slots, call.choice.high
        slots.settle()  # There may have been a boundary since the forward.
        wants_input_grad, wants_bias_grad, wants_weight_grad = needed_gradients(ctx)
        fp8_input_grad = wants_input_grad and high["dgrad"] is not True
        fp8_weight_grad = wants_weight_grad and high["wgrad"] is not True
        grad_input = grad_weight = in_fp8 = in_high = None
        if wants_input_grad or wants_weight_grad:  # Otherwise only the bias needs a gradient.
            if call.record and slots.job.measuring:
                count_tokens(offsets, call.states[2])
            how = fp8_input_grad, fp8_weight_grad, call.recorded[Role.GRAD_OUTPUT]
            limits = slots.policy.limits_in_backward(call.outgrown)
            request = Request(call.states[2], Role.GRAD_OUTPUT, *how, limits, offsets)
            cast = slots.caster.cast(grad_output, request)
        if fp8_input_grad:
            if weight is not None and slots.casts_in_backward(weight):
                weight_columns, weight_inv_scale = slots.backward_cast(weight, call.states[1], call.outgrown)
            inv_scales = cast.rows_inv_scale, weight_inv_scale
            in_fp8 = slots.grouped_matmul(cast.rows, weight_columns, *inv_scales, offsets, ctx.input_dtype, "dgrad")
            del weight_columns  # It may be a copy as large as the weight gradient, which comes next.
        if wants_input_grad:
            if high["dgrad"] is not False:
                in_high = high_product(grad_output, weight.mT, offsets, None).to(ctx.input_dtype)
            grad_input = _by_rows(in_fp8, in_high, high["dgrad"], offsets)
        if wants_weight_grad:
            in_fp8 = in_high = None
            if fp8_weight_grad:
                inv_scales = cast.columns_inv_scale, x_inv_scale
                in_fp8 = slots.grouped_matmul(cast.columns, x_columns, *inv_scales, offsets, ctx.weight_dtype, "wgrad")
            if high["wgrad"] is not False:
                in_high = _weight_grad(grad_output, x.to(grad_output.dtype), offsets).to(ctx.weight_dtype)
            grad_weight = _chosen(in_fp8, in_high, high["wgrad"], lambda mask: mask[:, None, None])
        grad_bias = _sums(grad_output, offsets).to(ctx.bias_dtype) if wants_bias_grad else None
        slots.monitor.count_backward(call.record)
        return (grad_input, grad_bias, grad_weight, *[None] * 6)


def grouped_linear(
    x: Tensor, weight: Tensor, offsets: Tensor, slots: GroupedSlots, bias: Tensor | None = None
) -> Tensor:
    """Return x W[e]ᵀ + b[e] for the rows of each expert e: [tokens, out_features] in the input's dtype (under
    torch.autocast, in the autocast dtype). Local; commits a pending sync; does not wait for the device.

    Rows from ``offsets[-1]`` on belong to no expert, as under expert parallelism: they are not read, and are zeros in
    the output and in the gradient of ``x``. Gradients of experts without rows are zeros; their amaxes are not recorded.

    Args:
        x: [tokens, in_features], sorted by expert.
        weight: [E, out_features, in_features], any strides: a parameter of the module that ``slots`` belong to, or its
            transpose.
        offsets: int32[E] on the device: the ends of the experts' rows.
        slots: ``module.fp8_products[name]`` of an FP8Experts.
        bias: [E, out_features].

    Raises:
        ConfigurationError: shapes or dtypes that do not fit, a DTensor, a transform that FP8 does not support, or
            ``attach`` must be called first.
    """
    _require_shapes(x, weight, offsets, slots, bias)
    job, owner = slots.job, None if slots.owner is None else slots.owner()
    if owner is None:
        raise ConfigurationError(f"{slots.fqn}: its FP8Experts module does not exist any more")
    if not job.enabled:
        return _in_high_precision(x, weight, offsets, bias)
    if job.awaits_attach:
        raise ConfigurationError(f"{slots.fqn}: with fp8_all_gather=True attach() must come before the first forward")
    states, choice = slots.states(weight.device), slots.choice(weight.device)
    mode, record = slots.mode(owner, x, weight, choice, choice.all_high)
    recorded: Mapping[Role, ExpertMask] = mode.high.records
    if mode.recording or not record:
        recorded = {Role.INPUT: record, Role.WEIGHT: record, Role.GRAD_OUTPUT: record}
    if mode.casts:
        wants_weight_grad = torch.is_grad_enabled() and weight.requires_grad
        call = _Call(slots, states, mode.high, record, recorded, wants_weight_grad, mode.outgrown)
        return _in_fp8(x, weight, offsets, bias, owner, call)
    if not slots.sync.every_step or not (mode.recording or (mode.observes and record)):
        return _in_high_precision(x, weight, offsets, bias)
    slots.caster.observe(x.detach(), states[0], recorded[Role.INPUT], offsets)
    slots.record_weight(weight, None, offsets, states[1], recorded[Role.WEIGHT])
    output = _in_high_precision(x, weight, offsets, bias)
    if not output.requires_grad or recorded[Role.GRAD_OUTPUT] is False:
        return output
    return observe_gradient(output, slots, states[2], recorded[Role.GRAD_OUTPUT], offsets)


def _in_fp8(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, owner: nn.Module, call: _Call) -> Tensor:
    slots, high = call.slots, call.choice.high
    x = x.to(_compute_dtype(x))
    parameter = owner._parameters.get(slots.name)
    copies = high["fprop"] is not True, high["dgrad"] is not True
    request = Request(call.states[1], Role.WEIGHT, *copies, call.record, call.outgrown)
    cast = slots.weight_cast(weight, weight if parameter is None else parameter, request)
    if call.record:
        slots.record_weight(weight, cast, offsets, call.states[1], call.recorded[Role.WEIGHT])
    scales = cast.rows_inv_scale, None if cast.columns_inv_scale is cast.rows_inv_scale else cast.columns_inv_scale
    output = _GroupedFunction.apply(x, bias, weight, cast.rows, scales[0], cast.columns, scales[1], offsets, call)
    # Like F.linear's output, this is no view to autograd: FSDP2 warns about modules that return views.
    return torch.ops.aten._unsafe_view(output, output.shape)


def high_product(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W[e]ᵀ + b[e] in the dtype of x. Rows of nobody are zeros. Not differentiable."""
    with torch.no_grad():
        return _product(x, weight, offsets, bias)


def _in_high_precision(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    """Compute in the input's dtype, or in autocast's, whatever the weight's dtype. Differentiable."""
    x = x.to(_compute_dtype(x))
    # The gradient of rows of nobody is uninitialised otherwise.
    x = torch.where(_of_experts(len(x), offsets), x, 0)
    if not isinstance(weight, FP8Weight):
        return _product(x, weight, offsets, bias)
    # Recomputed in backward, as in an FP8Linear.
    return checkpoint(_dequantising, x, weight, offsets, bias, use_reentrant=False, preserve_rng_state=False)


def _dequantising(x: Tensor, weight: FP8Weight, offsets: Tensor, bias: Tensor | None) -> Tensor:
    return _product(x, dequantised(weight), offsets, bias)


def _product(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    weight = weight.to(x.dtype)
    if x.dtype is torch.float64:
        *parts, beyond = _split(x, offsets)
        made = [part @ matrix.mT for part, matrix in zip(parts, weight)]
        output = torch.cat([*made, beyond.new_zeros(len(beyond), weight.shape[1])])
    else:
        output = F.grouped_mm(_dense(x), _dense(weight).mT, offs=offsets)
    if bias is not None:
        output = output + bias.to(x.dtype)[expert_of_rows(len(x), offsets).clamp(max=len(offsets) - 1)]
    return torch.where(_of_experts(len(x), offsets), output, 0)


def _weight_grad(grad_output: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """Return dyᵀ x of each expert: [E, out_features, in_features]."""
    if x.dtype is torch.float64:
        parts = list(zip(_split(grad_output, offsets), _split(x, offsets)))[:-1]
        return torch.stack([left.mT @ right for left, right in parts])
    return F.grouped_mm(_dense(grad_output).t(), _dense(x), offs=offsets)


def _split(x: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of each expert, and those of nobody. Waits for the device: only for float64, which grouped_mm
    does not compute."""
    return torch.tensor_split(x, offsets.tolist())


def _dense(x: Tensor) -> Tensor:
    """Return x [..., m, n] with strides that grouped_mm takes. It refuses those of expanded and of strided tensors."""
    return x if x.is_contiguous() or x.mT.is_contiguous() else x.contiguous()


def _compute_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _of_experts(tokens: int, offsets: Tensor) -> Tensor:
    """Return bool[tokens, 1]: True for rows of an expert."""
    return (torch.arange(tokens, device=offsets.device) < offsets[-1])[:, None]


def _by_rows(in_fp8: Tensor | None, in_high: Tensor | None, high: ExpertMask, offsets: Tensor) -> Tensor:
    """Choose rows by their experts."""

    def rows(mask: Tensor) -> Tensor:
        assert in_fp8 is not None
        return mask[expert_of_rows(len(in_fp8), offsets).clamp(max=len(offsets) - 1)][:, None]

    return _chosen(in_fp8, in_high, high, rows)


def _chosen(in_fp8: Tensor | None, in_high: Tensor | None, high: ExpertMask, spread: Any) -> Tensor:
    """Return the product of each expert in its precision. ``spread``: gives a mask the product's shape."""
    if in_high is None or in_fp8 is None:
        made = in_high if in_fp8 is None else in_fp8
        assert made is not None
        return made
    assert isinstance(high, Tensor)
    return torch.where(spread(high), in_high, in_fp8)


def _sums(rows: Tensor, offsets: Tensor) -> Tensor:
    """Return float32[E, features]: the sum of each expert's rows."""
    bounds = torch.cat([offsets.new_zeros(1), offsets]).long()
    return torch.segment_reduce(rows.float(), "sum", offsets=bounds, axis=0, unsafe=True)


def _require_shapes(x: Tensor, weight: Tensor, offsets: Tensor, slots: GroupedSlots, bias: Tensor | None) -> None:
    fqn, experts = slots.fqn, len(slots.experts)
    require_floating(x, fqn)
    if is_dtensor(weight) or is_dtensor(x):
        raise ConfigurationError(f"{fqn}: grouped products take no DTensors: tensor parallel experts are not supported")
    if weight.ndim != 3 or len(weight) != experts:
        raise ConfigurationError(
            f"{fqn}: expected a weight of {experts} experts [E, out, in], as it was when prepare() was called, got "
            f"{tuple(weight.shape)}"
        )
    if x.ndim != 2 or x.shape[1] != weight.shape[2]:
        raise ConfigurationError(f"{fqn}: expected rows [tokens, {weight.shape[2]}], got {tuple(x.shape)}")
    if offsets.shape != (experts,) or offsets.dtype != torch.int32:
        raise ConfigurationError(
            f"{fqn}: offsets must be int32 [{experts}], the ends of the experts' rows, got {offsets.dtype} "
            f"{tuple(offsets.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:2]:
        raise ConfigurationError(f"{fqn}: expected a bias {tuple(weight.shape[:2])}, got {tuple(bias.shape)}")
