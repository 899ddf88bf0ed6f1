"""The rules by which vLLM and Transformers read exported models, as data. Each rule says where it is written.

Sources: vLLM (github.com/vllm-project/vllm, below vllm/model_executor/: the schemes at commit de4766a, fp8 at
1436674, compressed_tensors at 004dadb, its scheme for MXFP8 at 109f2f2), Transformers 5.23 and compressed-tensors 0.20
(below the package). vLLM needs a GPU, so its rules are checked without it;
tests/integrations/test_transformers_export.py loads such folders with the other two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fp8dist
from tests.files.test_export import trained
from tests.support.serving import read

E4M3, F32 = torch.float8_e4m3fn, torch.float32


class Served(NamedTuple):
    """An exported folder as a reader sees it."""

    config: dict[str, Any]
    tensors: Mapping[str, Tensor]
    linears: Mapping[str, tuple[int, int]]  # [out_features, in_features] of all modules
    ignored: set[str]

    @property
    def quantization(self) -> dict[str, Any]:
        return self.config["quantization_config"]

    @property
    def quantised(self) -> list[str]:
        return [name for name in self.linears if name not in self.ignored]

    def scheme(self, name: str) -> dict[str, Any]:
        """Return the group that targets a module, by its own name or by its class."""
        groups = self.quantization["config_groups"].values()
        (found,) = [group for group in groups if name in group["targets"] or "Linear" in group["targets"]]
        return found

    def weights(self, name: str) -> dict[str, Any]:
        return self.scheme(name)["weights"]

    def inputs(self, name: str) -> dict[str, Any]:
        return self.scheme(name)["input_activations"]


Rule = tuple[str, str, Callable[[Served], bool]]


def _every(holds: Callable[[Served, str], bool]) -> Callable[[Served], bool]:
    return lambda served: bool(served.quantised) and all(holds(served, name) for name in served.quantised)


def _is(tensor: Tensor | None, dtype: torch.dtype, *shapes: tuple[int, ...]) -> bool:
    return tensor is not None and tensor.dtype == dtype and tuple(tensor.shape) in shapes


def _blocks(size: int) -> int:
    return -(-size // 128)


_SCHEMES = "layers/quantization/compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py"
_CT = "layers/quantization/compressed_tensors/compressed_tensors.py"
_FP8 = "layers/quantization/fp8.py"
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
SCALES = ("weight_scale", "weight_scale_inv")

OF_BOTH: list[Rule] = [
    ("the index names every tensor's file",
     "transformers/utils/hub.py get_checkpoint_shard_files; vLLM model_loader/weight_utils.py "
     "filter_duplicate_safetensors_files",
     lambda s: bool(s.tensors)),  # ``read`` goes by the index.
    ("weight: E4M3, [out_features, in_features]",
     f"vLLM {_SCHEMES} and {_FP8} create_weights: ModelWeightParameter",
     _every(lambda s, n: _is(s.tensors.get(f"{n}.weight"), E4M3, s.linears[n]))),
    ("an ignored module has a plain weight",
     f"vLLM {_CT} and {_FP8} get_quant_method: UnquantizedLinearMethod",
     lambda s: all(s.tensors[f"{n}.weight"].dtype == F32 for n in s.ignored)),
    ("an ignored module has no scale",
     f"vLLM {_CT} and {_FP8} get_quant_method: UnquantizedLinearMethod",
     lambda s: not any(f"{n}.{scale}" in s.tensors for n in s.ignored for scale in SCALES)),
]  # fmt: skip

COMPRESSED: list[Rule] = [
    ("quant_method chooses the reader",
     "transformers/quantizers/auto.py AUTO_QUANTIZER_MAPPING; vLLM layers/quantization/__init__.py",
     lambda s: s.quantization["quant_method"] == "compressed-tensors"),
    ("format is one that casts activations",
     "vLLM compressed_tensors/utils.py is_activation_quantization_format: naive-, int- and float-quantized",
     lambda s: s.quantization["format"] == "float-quantized"),
    ("quantization_status compressed: weights are in FP8",
     "transformers/utils/quantization_config.py CompressedTensorsConfig.is_quantization_compressed",
     lambda s: s.quantization["quantization_status"] == "compressed"),
    ("each group has targets, weights and input_activations; each module is in one group",
     f"vLLM {_CT} _quantization_scheme_map_from_config; compressed_tensors/utils/match.py is_match: a target is a "
     "class or a full name",
     _every(lambda s, n: {"targets", "weights", "input_activations"} <= s.scheme(n).keys())),
    ("weights: 8-bit symmetric float, not dynamic, per tensor or channel",
     f"vLLM {_CT} _is_fp8_w8a8",
     _every(lambda s, n: s.weights(n) in [
         {**FLOAT8, "dynamic": False, "strategy": strategy} for strategy in ("tensor", "channel")])),
    ("input_activations: 8-bit symmetric float",
     f"vLLM {_CT} _is_fp8_w8a8",
     _every(lambda s, n: FLOAT8.items() <= s.inputs(n).items())),
    ("static input_activations are per tensor, dynamic ones per tensor or token",
     f"vLLM {_CT} _is_fp8_w8a8; compressed_tensors/quantization/quant_args.py validate_model_after",
     _every(lambda s, n: s.inputs(n)["strategy"] in (("tensor", "token") if s.inputs(n)["dynamic"] else ("tensor",)))),
    ("weight_scale: float32, [1] per tensor, [out_features, 1] per channel",
     f"vLLM {_SCHEMES} create_weights: PerTensorScaleParameter, ChannelQuantScaleParameter (parameter.py loads a "
     "scale of shape [] or [1]); compressed_tensors/quantization/lifecycle/initialize.py initialize_qparams",
     _every(lambda s, n: _is(s.tensors.get(f"{n}.weight_scale"), F32,
                             (1,) if s.weights(n)["strategy"] == "tensor" else (s.linears[n][0], 1)))),
    ("input_scale: float32 [1], exactly if activations are static",
     f"vLLM {_SCHEMES} create_weights: is_static_input_scheme; initialize_qparams",
     _every(lambda s, n: f"{n}.input_scale" not in s.tensors if s.inputs(n)["dynamic"]
            else _is(s.tensors.get(f"{n}.input_scale"), F32, (1,)))),
    ("ignore has full names",
     "vLLM compressed_tensors/utils.py should_ignore_layer; compressed_tensors/utils/match.py match_name",
     lambda s: set(s.quantization["ignore"]) == s.ignored),
]  # fmt: skip

BLOCK: list[Rule] = [
    ("quant_method fp8 chooses the reader, and says that weights are in FP8",
     f"vLLM {_FP8} Fp8Config.from_config; transformers/quantizers/auto.py",
     lambda s: s.quantization["quant_method"] == "fp8"),
    ("weight_block_size has two sizes, and activations are then dynamic",
     f"vLLM {_FP8} Fp8Config.__init__; transformers/utils/quantization_config.py FineGrainedFP8Config.post_init",
     lambda s: (s.quantization["weight_block_size"], s.quantization["activation_scheme"]) == ([128, 128], "dynamic")),
    ("fmt e4m3",
     "config.json of deepseek-ai/DeepSeek-V3, and README_WEIGHTS.md there, section FP8 Weight Documentation",
     lambda s: s.quantization["fmt"] == "e4m3"),
    ("weight_scale_inv: float32, one per block; the weight is FP8 times it",
     f"vLLM {_FP8} create_weights: BlockQuantScaleParameter, rounded up; README_WEIGHTS.md of DeepSeek-V3",
     _every(lambda s, n: _is(s.tensors.get(f"{n}.weight_scale_inv"), F32, tuple(map(_blocks, s.linears[n]))))),
    ("no scale of inputs",
     f"vLLM {_FP8} create_weights: input_scale is registered for static activations only",
     lambda s: not any(name.endswith("input_scale") for name in s.tensors)),
    ("modules_to_not_convert has the ignored modules",
     f"vLLM {_FP8} from_config (ignored_layers first, then this key)",
     lambda s: set(s.quantization["modules_to_not_convert"]) == s.ignored),
    ("no name of an ignored module is the end or a dotted beginning of another",
     f"vLLM {_FP8} from_config; transformers/quantizers/quantizers_utils.py should_convert_module",
     lambda s: not any(name.endswith(other) or re.match(rf"(?:{other})(?:(?<=\.)|(?=\.|$))", name)
                       for other in s.ignored for name in s.quantised)),
]  # fmt: skip


_MXFP8 = "layers/quantization/compressed_tensors/schemes/compressed_tensors_w8a8_mxfp8.py"
OF_GROUPS = {**FLOAT8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
MXFP8: list[Rule] = [
    COMPRESSED[0],
    ("format mxfp8-quantized",
     "compressed_tensors/config/base.py CompressionFormat; compressors/mxfp8/base.py",
     lambda s: s.quantization["format"] == "mxfp8-quantized"),
    *COMPRESSED[2:4],
    ("weights and input_activations: the preset MXFP8, groups of 32 with scales in uint8; inputs dynamic",
     f"compressed_tensors/quantization/quant_scheme.py MXFP8; vLLM {_CT} _is_mxfp8",
     _every(lambda s, n: (s.weights(n), s.inputs(n)) == (
         {**OF_GROUPS, "dynamic": False}, {**OF_GROUPS, "dynamic": True}))),
    ("weight_scale: uint8 [out_features, in_features / 32], the exponent plus 127",
     f"vLLM {_MXFP8} create_weights: GroupQuantScaleParameter; compressed_tensors/compressors/mx_utils.py",
     _every(lambda s, n: _is(s.tensors.get(f"{n}.weight_scale"), torch.uint8,
                             (s.linears[n][0], s.linears[n][1] // 32)))),
    COMPRESSED[-1],
]  # fmt: skip
RULES = {"block": BLOCK, "compressed-tensors-mxfp8": MXFP8}


class Part(nn.Module):
    """Linears with the names of a Llama's, and one that is never in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, 256)
        self.up_proj = nn.Linear(256, 384, bias=False)
        self.down_proj = nn.Linear(384, 256)
        self.lm_head = nn.Linear(256, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.down_proj(self.up_proj(self.q_proj(x))))


def _served(folder: Path, recipe: str, format: str, mixed: bool) -> Served:
    overrides = {"up_proj": fp8dist.CurrentScaling()} if mixed else {}
    model, manager, _ = trained(recipe, 1, Part(), overrides=overrides)
    manager.set_precision("down_proj", "high")
    fp8dist.export(manager, folder, format=format)
    config = json.loads((folder / "config.json").read_text())
    linears = {n: (m.out_features, m.in_features) for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    return Served(config, read(folder), linears, {"down_proj", "lm_head"})


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("recipe", "format"),
    [
        ("delayed", "compressed-tensors"),
        ("delayed", "compressed-tensors-channel"),
        ("current", "compressed-tensors"),
        ("rowwise", "compressed-tensors"),
        ("delayed", "block"),
        ("block", "block"),
        ("mx", "compressed-tensors-mxfp8"),
    ],
)
def test_an_export_obeys_its_readers_rules(tmp_path: Path, recipe: str, format: str, mixed: bool) -> None:
    if mixed and recipe == "mx":
        return  # Other recipes have no place in that format.
    served = _served(tmp_path / "out", recipe, format, mixed)
    rules = [*OF_BOTH, *RULES.get(format, COMPRESSED)]
    assert [f"{rule} ({source})" for rule, source, holds in rules if not holds(served)] == []


@pytest.mark.parametrize("format", ["compressed-tensors", "block", "compressed-tensors-mxfp8"])
def test_the_rules_notice_what_is_wrong(tmp_path: Path, format: str) -> None:
    """Each rule about tensors fails for a tensor of another dtype or shape."""
    served = _served(tmp_path / "out", "mx" if format.endswith("mxfp8") else "delayed", format, False)
    rules = [*OF_BOTH, *RULES.get(format, COMPRESSED)]
    for name, tensor in served.tensors.items():
        if not name.endswith("bias"):
            odd = served._replace(tensors={**served.tensors, name: tensor.float().reshape(-1)[:0].to(torch.bfloat16)})
            assert not all(holds(odd) for _, _, holds in rules), name
