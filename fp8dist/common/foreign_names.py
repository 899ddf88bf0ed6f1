"""Names of TransformerEngine and torchao that a program asks ``fp8dist`` for, and what to write here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from fp8dist.common.names import did_you_mean

_PREPARE = "call fp8dist.prepare(model, recipe, group=…) once; it converts each nn.Linear in place"
_PARTS = "build it of torch.nn modules; fp8dist.prepare converts each nn.Linear in it"
_AUTOCAST = f"{_PREPARE}. manager.no_fp8() switches FP8 off inside, and manager.recording() calibrates"
_RECIPE = "pass fp8dist.prepare a recipe, such as fp8dist.CurrentScaling(), which is torchao's default"
_STEP = "leave it out: the optimizer's step does it"
_GEMMS = 'name the GEMMs that stay out of FP8 in the recipe, such as high_precision=("wgrad",)'

INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        # TransformerEngine.
        **dict.fromkeys(("fp8_autocast", "autocast", "FP8GlobalStateManager"), _AUTOCAST),
        **dict.fromkeys(("Linear", "pytorch"), f"keep torch.nn.Linear and {_PREPARE}"),
        **dict.fromkeys(("LayerNormLinear", "LayerNormMLP", "TransformerLayer", "MultiheadAttention"), _PARTS),
        "GroupedLinear": "call fp8dist.grouped_linear, or let fp8dist.prepare convert mixtures of experts",
        **dict.fromkeys(
            ("fp8_model_init", "quantized_model_init"),
            "parameters stay in high precision; with FSDP2, fp8dist.prepare(…, fp8_all_gather=True) gathers FP8",
        ),
        "fp8_checkpoint": "use torch.utils.checkpoint: FP8 modules know it",
        "Format": 'give the format by its name: fp8dist.DelayedScaling(format="hybrid")',
        "Float8CurrentScaling": "it is fp8dist.CurrentScaling here",
        "Float8BlockScaling": "it is fp8dist.BlockScaling here",
        "MXFP8BlockScaling": 'it is fp8dist.MXFP8Scaling(scale_rounding="up") here',
        "NVFP4BlockScaling": "it is fp8dist.NVFP4Scaling here (emulated: no GPU path)",
        # torchao.
        "convert_to_float8_training": _PREPARE,
        "Float8Linear": f"keep torch.nn.Linear and {_PREPARE}",
        **dict.fromkeys(("Float8LinearConfig", "Float8LinearRecipeName", "CastConfig", "Float8GemmConfig"), _RECIPE),
        **dict.fromkeys(("ScalingType", "ScalingGranularity"), f"{_RECIPE}; {_GEMMS}"),
        **dict.fromkeys(("precompute_float8_dynamic_scale_for_fsdp", "sync_float8_amax_and_scale_history"), _STEP),
    }
)
"""By a name of another library: what to write here."""


def advice_on(name: str, known: Iterable[str]) -> str:
    """Return what an error about a name that ``fp8dist`` does not have adds; "" if nothing is known.

    Args:
        known: the names that there are.
    """
    advice = INSTEAD.get(name)
    return did_you_mean(name, known) if advice is None else f": {advice}"
