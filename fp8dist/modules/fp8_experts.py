"""FP8Experts: the experts of a mixture-of-experts layer, with products in FP8, and the conversion of modules to it.

Conversion is in place: only the module's class changes, and a ``GroupedSlots`` per product is attached.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fp8dist.modules.foreign import expert_products
from fp8dist.modules.fp8_module import FP8Module, convert_to
from fp8dist.modules.grouped_linear import grouped_linear
from fp8dist.modules.grouped_slots import GroupedSlots
from fp8dist.modules.linear_slots import LinearSlots


class FP8Experts(FP8Module):
    """The E experts of a mixture-of-experts layer. Their grouped products run in FP8, with state for each expert.

    ``fp8dist.prepare`` makes it from a module that has the attributes of Transformers' experts interface (see
    ``foreign.expert_products``); do not construct it yourself. The converted module's class inherits from this class
    and from the module's original class, ``converted_from``. Parameters and state_dict keys stay the same.

    Attributes:
        fp8_products: the FP8 state of each product, by the name of its weight. ``fp8dist.grouped_linear`` takes it.
    """

    fp8_products: dict[str, GroupedSlots]
    fp8_added: ClassVar[tuple[str, ...]] = ("fp8_products",)

    @property
    def fp8_weights(self) -> tuple[LinearSlots, ...]:
        """See ``FP8Module``."""
        return tuple(self.fp8_products.values())

    @staticmethod
    def fp8_members(original: type[nn.Module]) -> dict[str, Any]:
        """See ``FP8Module``."""
        return {} if hasattr(original, "_apply_gate") else {"_apply_gate": _gate}

    @property
    def fp8_enabled(self) -> bool:
        """False if FP8 is switched off for the whole model."""
        return all(slots.job.enabled for slots in self.fp8_products.values())

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs: [tokens, hidden]. Local; does not wait for the
        device.

        Args:
            hidden_states: [tokens, hidden].
            top_k_index: int64 [tokens, k], the experts of each token. Numbers >= E stand for experts on other ranks,
                which add nothing here.
            top_k_weights: [tokens, k], the factors of the experts' outputs.

        Raises:
            ConfigurationError: see ``grouped_linear``.
        """
        up, down = self.fp8_products.values()
        if not self.fp8_enabled and self.converted_from.forward is not nn.Module.forward:
            return self.converted_from.forward(self, hidden_states, top_k_index, top_k_weights)
        module: Any = self
        tokens, k = top_k_index.shape
        # Sort the (token, expert) pairs by expert. ``order``: the pair that each sorted row comes from.
        chosen, order = top_k_index.reshape(-1).sort(stable=True)
        experts = torch.arange(len(up.experts), device=chosen.device, dtype=chosen.dtype)
        offsets = torch.searchsorted(chosen, experts, right=True, out_int32=True)
        rows = self._product(up, hidden_states[order // k], offsets)
        rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
        rows = self._product(down, rows, offsets)
        if getattr(module, "has_post_expert_norm", False):
            ours = torch.arange(len(rows), device=rows.device) < offsets[-1]
            # A norm with a bias would turn the zero rows of other ranks' experts into its bias.
            rows = torch.where(ours[:, None], module.post_expert_norm(rows), 0)
        rows = rows * top_k_weights.reshape(-1)[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        # Not index_add: with several rows per token, its order of additions is not defined on a GPU.
        return rows[back].view(tokens, k, rows.shape[1]).sum(1).to(hidden_states.dtype)

    def _product(self, slots: GroupedSlots, rows: Tensor, offsets: Tensor) -> Tensor:
        weight: Any = getattr(self, slots.name)  # Read once: a parametrization recomputes it at each access.
        module: Any = self
        bias = getattr(self, f"{slots.name}_bias") if module.has_bias else None
        return grouped_linear(rows, weight.mT if module.is_transposed else weight, offsets, slots, bias)


def fp8_experts(model: nn.Module) -> Iterator[FP8Experts]:
    """Iterate over all FP8Experts of a model."""
    return (module for module in model.modules() if isinstance(module, FP8Experts))


def convert_experts(module: nn.Module, products: Mapping[str, GroupedSlots]) -> None:
    """Convert a module to an FP8Experts, in place.

    Args:
        module: has the attributes of Transformers' experts interface.
        products: the FP8 state of each product, by the name of its weight, in the order of ``expert_products``.
    """
    assert list(products) == list(expert_products(module) or ())
    module.fp8_products = dict(products)  # type: ignore[assignment]  # Before the class, as ``convert`` does.
    convert_to(FP8Experts, module)


def _gate(self: Any, rows: Tensor) -> Tensor:
    """Split rows [tokens, 2 n] into gate and up, concatenated or interleaved, and return act(gate) * up [tokens, n]."""
    concatenated = getattr(self, "is_concatenated", True)
    gate, up = rows.chunk(2, -1) if concatenated else (rows[..., ::2], rows[..., 1::2])
    gated: Tensor = self.act_fn(gate) * up
    return gated
