"""How much of a model is in FP8, and the reason for the rest. The expected numbers are computed by hand."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.utils import parametrizations

import fp8dist
from fp8dist import BlockScaling, DelayedScaling
from fp8dist.errors import ConfigurationError
from fp8dist.modules.fp8_linear import FP8Linear
from tests.support.logs import captured_log
from tests.support.ranks import on_ranks


class MixtralExperts(nn.Module):
    """4 experts in two parameters: 4 x 96 x 32 + 4 x 32 x 48 = 18,432. Biases and scales are not matmul weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 96, 32))
        self.down_proj = nn.Parameter(torch.zeros(4, 32, 48))
        self.gate_up_bias = nn.Parameter(torch.zeros(4, 96))
        self.scales = nn.Parameter(torch.zeros(4, 96, 1))


class MixtralLayer(nn.Module):
    """Attention 4 x 1,024, router 4 x 32 = 128, experts 18,432."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({f"{name}_proj": nn.Linear(32, 32, bias=False) for name in "qkvo"})
        self.gate = nn.Linear(32, 4, bias=False)
        self.experts = MixtralExperts()


class Mixtral(nn.Module):
    """94,720 matmul parameters, 16,384 of them in FP8: 17.3 %."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(128, 32)
        self.layers = nn.ModuleList(MixtralLayer() for _ in range(4))
        self.norm = nn.RMSNorm(32)
        self.lm_head = nn.Linear(32, 128, bias=False)


class Conv1D(nn.Module):
    """Like transformers': a Linear whose weight is [in, out]."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))


class GPT2(nn.Module):
    """c_attn 3,072 and c_proj 1,024 per block; the head, 2,048, shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(64, 32)
        self.wpe = nn.Embedding(16, 32)
        self.h = nn.ModuleList(
            nn.ModuleDict({"c_attn": Conv1D(96, 32), "c_proj": Conv1D(32, 32), "ln": nn.LayerNorm(32)})
            for _ in range(2)
        )
        self.lm_head = nn.Linear(32, 64, bias=False)
        self.lm_head.weight = self.wte.weight


class Linear4bit(nn.Linear):
    """Like bitsandbytes': two values per byte, in a subclass of Parameter."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        weight = torch.zeros(in_features * out_features // 2, 1, dtype=torch.uint8)
        self.weight = type("Params4bit", (nn.Parameter,), {})(weight, False)


class Linear8bitLt(nn.Linear):
    """Like bitsandbytes'."""


class Int8Tensor(Tensor):
    """Like torchao's: a wrapper subclass, held by an nn.Linear as its Parameter."""

    @staticmethod
    def __new__(cls, size: tuple[int, int]) -> Int8Tensor:
        return Tensor._make_wrapper_subclass(cls, size, dtype=torch.float32)  # type: ignore[attr-defined, no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].shape)
        raise NotImplementedError(func)


def quantised(weight: Tensor) -> Callable[[], nn.Linear]:
    """Return a function that makes a Linear with this weight."""

    def make() -> nn.Linear:
        linear = nn.Linear(32, 64, bias=False)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        return linear

    return make


def empty_linear() -> nn.Module:
    with pytest.warns(UserWarning, match="zero-element"):
        return nn.Linear(0, 32)


def hooked_linear() -> nn.Linear:
    """Like accelerate's ``add_hook_to_module``: its forward calls the old class's."""
    linear = nn.Linear(32, 64)
    linear._old_forward = linear.forward
    linear.forward = lambda x: linear._old_forward(x)  # type: ignore[method-assign, operator]
    return linear


class GroupedMLP(nn.Module):
    """Like Megatron-Core's: the weights of all experts of a rank, beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight1 = nn.Parameter(torch.zeros(16, 64))
        self.weight2 = nn.Parameter(torch.zeros(64, 16))


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """Return the (level, text) pairs logged about coverage."""
    return [(level, text) for _, level, text in caplog.record_tuples if "FP8: " in text]


def test_fused_experts_are_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    manager = fp8dist.prepare(Mixtral())
    assert told(caplog) == [
        (
            logging.WARNING,
            "fp8dist: FP8: 17.3 % of matmul weights; left out: 4 MixtralExperts (3-D parameters), lm_head (skip), "
            "4 Linear (dims not multiples of 16)",
        )
    ]
    assert len(caplog.record_tuples) == 1
    coverage = manager.coverage()
    assert coverage.share == coverage.fp8_parameters / coverage.parameters == 16_384 / 94_720
    rows = {row.fqn: row for row in coverage}
    assert rows["layers.2.experts"].parameters == 18_432
    assert rows["layers.2.experts"].flops == 18_432 / 94_720
    assert rows["layers.2.experts"].reason == "gate_up_proj, down_proj: 3-D parameters, not an nn.Linear"
    assert rows["layers.2.experts"].kind == "MixtralExperts"
    assert rows["layers.3.gate"].reason == "32 x 4 are not multiples of 16"
    assert rows["layers.0.attention.q_proj"].fp8
    assert sum(row.flops for row in coverage) == pytest.approx(1)
    assert len(coverage) == 4 * 6 + 1
    assert repr(manager).endswith("not attached, FP8: 17.3 % of matmul weights)")


def test_conv1d_is_what_is_said_of_gpt2(caplog: pytest.LogCaptureFixture) -> None:
    manager = fp8dist.prepare(GPT2())
    assert told(caplog) == [
        (
            logging.WARNING,
            "fp8dist: no Linear of this model is eligible: FP8: 0.0 % of matmul weights; "
            "left out: 4 Conv1D (not nn.Linear), lm_head (skip)",
        )
    ]
    rows = {row.fqn: row for row in manager.coverage()}
    parameters = {"h.0.c_attn": 3072, "h.0.c_proj": 1024, "h.1.c_attn": 3072, "h.1.c_proj": 1024, "lm_head": 2048}
    assert {fqn: row.parameters for fqn, row in rows.items()} == parameters
    assert str(rows["lm_head"]) == "high: it matches skip '*lm_head', a default; tied to wte"
    # Who named a module comes before the reason that it has itself.
    named = {"skip": ("h.0.*", "!*c_proj"), "overrides": {"h.1.c_attn": "high", "h.0.c_proj": BlockScaling()}}
    conv1d = "it is a Conv1D, whose weight is [in, out]: make it an nn.Linear"
    assert {row.fqn: row.reason for row in fp8dist.prepare(GPT2(), **named).coverage()} == {  # type: ignore[arg-type]
        "h.0.c_attn": "it matches skip 'h.0.*'",
        "h.0.c_proj": conv1d,
        "h.1.c_attn": "overrides say so ('h.1.c_attn')",
        "h.1.c_proj": conv1d,
        "lm_head": "it matches skip '*lm_head', a default",
    }


def test_a_tied_head_in_fp8_says_what_it_is_tied_to() -> None:
    (head,) = [row for row in fp8dist.prepare(GPT2(), skip="!lm_head").coverage() if row.fp8]
    assert (head.fqn, head.tied_to, head.reason) == ("lm_head", "wte", "")
    assert str(head) == "FP8: tied to wte"
    linears = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)])
    linears[1].weight = linears[0].weight
    manager = fp8dist.prepare(linears)
    assert [row.tied_to for row in manager.coverage()] == ["", "0", ""]
    assert [row.flops for row in manager.coverage()] == [1 / 3] * 3  # Each token uses the tied one twice.
    linears[1].weight = nn.Parameter(linears[0].weight.detach().clone())
    linears[2].weight = linears[1].weight
    assert [row.tied_to for row in manager.coverage()] == ["", "", "1"]  # As the model is now.


def nine_in_ten(linear: Callable[[], nn.Module]) -> nn.Module:
    """9 x 2,048 in FP8, and 2,048 in ``linear``: exactly nine tenths."""
    return nn.ModuleDict({"good": nn.ModuleList(nn.Linear(32, 64) for _ in range(9)), "other": linear()})


@pytest.mark.parametrize(
    ("linears", "arguments", "level"),
    [
        (9, {}, None),
        (8, {}, logging.WARNING),
        (8, {"skip": "lm_head"}, logging.INFO),
        (8, {"overrides": {"lm_*": "high"}}, logging.INFO),
        (8, {"skip": None, "filter_fn": lambda module, fqn: fqn != "lm_head"}, logging.INFO),
        (8, {"skip": "linears.0"}, logging.WARNING),  # The head was not named.
        (8, {"skip": ("linears.0", "lm_head")}, logging.INFO),
        (8, {"skip": "!lm_head"}, None),
        (8, {"skip": "*"}, logging.WARNING),  # Nothing is in FP8.
        (8, {"enabled": False}, None),  # This has its own warning.
    ],
)
def test_the_warning_is_for_what_the_caller_did_not_name(
    linears: int, arguments: dict[str, Any], level: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.ModuleDict(
        {"linears": nn.ModuleList(nn.Linear(32, 64) for _ in range(linears)), "lm_head": nn.Linear(32, 64)}
    )
    with caplog.at_level(logging.INFO, "fp8dist"):
        manager = fp8dist.prepare(model, **arguments)
    assert [found for found, _ in told(caplog)] == ([] if level is None else [level])
    if arguments.get("enabled") is False:
        assert manager.coverage().share == 0
        assert {row.reason.split(" (")[0] for row in manager.coverage()} == {
            "FP8 is switched off",
            "it matches skip '*lm_head', a default",
        }


def test_a_model_without_matmul_weights_is_said(caplog: pytest.LogCaptureFixture) -> None:
    coverage = fp8dist.prepare(nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16))).coverage()
    assert "no Linear of this model is eligible: it has no matmul weights" in caplog.text
    assert (len(coverage), coverage.share, coverage.summary) == (0, 0, "no matmul weights")


def test_many_kinds_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    own = {"forward": lambda self, x: x}
    model = nn.ModuleList(type(f"Linear{i}", (nn.Linear,), own)(16, 16 * (9 - i)) for i in range(8))
    fp8dist.prepare(model)
    assert "left out: 0 (own forward), 1 (own" in caplog.text
    assert caplog.text.rstrip().endswith("5 (own forward) and 2 more")


@pytest.mark.parametrize(
    ("linear", "parameters", "reason"),
    [
        (lambda: nn.Bilinear(16, 32, 4), 2048, "it is a Bilinear, not an nn.Linear"),
        (lambda: Linear4bit(32, 64), 2048, "it is a Linear4bit of bitsandbytes: its weight is quantised"),
        (lambda: Linear8bitLt(32, 64), 2048, "it is a Linear8bitLt of bitsandbytes: its weight is quantised"),
        (quantised(Int8Tensor((64, 32))), 2048, "its weight is a Int8Tensor, a tensor subclass (quantised?)"),
        (quantised(torch.zeros(64, 32, dtype=torch.int8)), 2048, "its weight is int8"),
        (quantised(torch.zeros(64, 32).to(torch.float8_e4m3fn)), 2048, "its weight is float8_e4m3fn"),
        (hooked_linear, 2048, "its forward was replaced (module.forward = …, as accelerate's hooks do)"),
        (GroupedMLP, 2048, "it is a GroupedMLP, not an nn.Linear"),
        (lambda: nn.LazyLinear(64), 0, "it is a LazyLinear: run a forward first, then prepare"),
        (lambda: nn.Linear(32, 65), 2080, "32 x 65 are not multiples of 16"),
        (empty_linear, 0, "0 x 32 are not multiples of 16, or 0"),
        (
            lambda: nn.utils.spectral_norm(nn.Linear(32, 64)),
            2048,
            "its weight is not a plain Parameter (an old-style weight_norm or spectral_norm)",
        ),
        (
            lambda: parametrizations.weight_norm(nn.Linear(32, 64)),
            2048,
            "it is a ParametrizedLinear, not exactly nn.Linear: it computes its weight",
        ),
    ],
)
def test_the_reason_is_the_true_one(linear: Callable[[], nn.Module], parameters: int, reason: str) -> None:
    manager = fp8dist.prepare(nine_in_ten(linear))
    (row,) = [row for row in manager.coverage() if not row.fp8]
    assert (row.fqn, row.parameters, row.reason) == ("other", parameters, reason)
    assert row.flops == parameters / (9 * 2048 + parameters)


class Counted(nn.Module):
    """Only ``linear``, ``attention`` and ``experts`` have matmul weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 64)
        self.pos_embed = nn.Parameter(torch.zeros(1, 16, 32))
        self.gamma = nn.Parameter(torch.zeros(32, 1, 1))
        self.rnn = nn.LSTM(32, 32)
        self.conv = parametrizations.weight_norm(nn.Conv1d(32, 32, 3))
        self.old_conv = nn.Conv3d(4, 4, 3)
        self.embed = nn.Embedding(80, 32)
        self.norm = nn.GroupNorm(2, 32)
        self.attention = nn.MultiheadAttention(32, 4, kdim=16)  # in_proj 32 x 32, 32 x 16, 32 x 32; out_proj 32 x 32.
        self.experts = nn.ParameterList([torch.zeros(2, 4, 16, 16), torch.zeros(7)])


def test_of_two_linears_with_one_name_the_second_stays_as_it_is() -> None:
    """Their names differ by a part called "module" alone, which wrappers add, too."""
    model = nn.ModuleDict({"fc": nn.Linear(32, 32), "module": nn.ModuleDict({"fc": nn.Linear(32, 32)})})
    manager = fp8dist.prepare(model)
    for _ in range(2):
        first, second = manager.coverage()
        assert (first.fqn, first.fp8, second.fqn, second.fp8) == ("fc", True, "fc", False)
        assert second.reason.startswith("another module has its name")
        manager.attach()


def test_what_is_no_matmul_weight_is_not_counted() -> None:
    multiplies = "nn.MultiheadAttention multiplies with"
    rows = {row.fqn: (row.kind, row.parameters, row.reason) for row in fp8dist.prepare(Counted()).coverage()}
    assert rows == {
        "linear": ("Linear", 2048, ""),
        "attention": ("MultiheadAttention", 2560, f"{multiplies} its input projections itself"),
        "attention.out_proj": (
            "NonDynamicallyQuantizableLinear",
            1024,
            f"{multiplies} its weight itself and never calls it",
        ),
        "experts": ("ParameterList", 2048, "0: 4-D parameters, not an nn.Linear"),
    }


def lm(embeddings: list[tuple[int, int]], *linears: tuple[str, int, int], tied: str = "") -> nn.Module:
    """Return a model with these embeddings (rows, features) and then these Linears (name, inputs, outputs)."""
    model = nn.Module()
    for i, (rows, features) in enumerate(embeddings):
        model.add_module(f"embed{i}", nn.Embedding(rows, features))
    for name, inputs, outputs in linears:
        model.add_module(name, nn.Linear(inputs, outputs))
    if tied:
        getattr(model, tied).weight = model.embed0.weight  # type: ignore[union-attr]
    return model


BLOCK = (("q", 64, 64), ("up", 64, 256), ("down", 256, 64))
GATED = tuple((f"w{i}", *sizes) for i, sizes in enumerate(2 * ((64, 256), (256, 64), (64, 256))))  # w1, w2, w3 twice.
BLOCKS = tuple((f"{name}{i}", a, b) for i in range(2) for name, a, b in BLOCK)


@pytest.mark.parametrize(
    ("model", "heads"),
    [
        (lambda: lm([(512, 64)], *BLOCKS, ("output", 64, 512)), {"output"}),
        (lambda: lm([(512, 64), (1024, 64)], *BLOCKS, ("head", 64, 512)), {"head"}),  # More positions than tokens.
        (lambda: lm([(512, 64), (64, 64)], *BLOCKS, ("head", 64, 512)), {"head"}),  # As many positions as features.
        (lambda: lm([(1024, 64), (256, 64)], *GATED, ("output", 64, 1024)), {"output"}),
        (lambda: lm([(512, 64)], *BLOCKS, ("output", 64, 512), ("value", 64, 16), tied="output"), {"output"}),
        (lambda: lm([(256, 64)], *GATED, ("output", 64, 256), tied="output"), {"output"}),
        (lambda: lm([(64, 64)], *BLOCKS, ("last", 64, 64), tied="last"), {"last"}),
        # Heads that are missed: each may as well be a projection of a block.
        (lambda: lm([(512, 64)], ("output", 64, 512), *BLOCKS, ("value", 64, 16)), set()),
        (lambda: lm([(512, 64)], *BLOCKS, *((f"head{i}", 64, 512) for i in range(3))), set()),
        (lambda: lm([(256, 64)], *BLOCKS, ("head", 64, 256)), set()),  # As wide as the MLP.
        # Projections of one block that are as wide as there are positions or classes.
        (lambda: lm([(512, 64)], ("qkv", 64, 192), ("gate", 64, 512), ("narrow", 256, 64)), set()),  # GEGLU.
        (lambda: lm([(192, 64)], ("qkv", 64, 192), *BLOCK), set()),
        (lambda: lm([(16, 64)], ("router", 64, 16), *BLOCK), set()),
        (lambda: lm([(256, 64)], ("down", 256, 64), ("up", 64, 256)), set()),
        (lambda: lm([(256, 64)], *GATED, ("output", 64, 256)), set()),
        (lambda: lm([(64, 64)], *BLOCKS, ("last", 64, 64)), set()),
        (lambda: lm([(512, 32)], *BLOCKS, ("output", 64, 512)), set()),  # It takes other features.
        (lambda: lm([(192, 64)], ("qkv0", 64, 192), *BLOCK, ("qkv1", 64, 192), ("last", 64, 64)), set()),
    ],
)
def test_what_is_taken_for_an_output_head(model: Callable[[], nn.Module], heads: set[str]) -> None:
    assert {row.fqn for row in fp8dist.prepare(model()).coverage() if not row.fp8} == heads


@pytest.mark.parametrize(
    "arguments",
    [{"skip": "!output"}, {"skip": ("embed*", "!out*")}, {"skip": None}, {"overrides": {"out*": DelayedScaling()}}],
)
@pytest.mark.parametrize("tied", ["", "output"])
def test_a_head_is_put_into_fp8_by_name(tied: str, arguments: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fp8dist"):
        (row,) = [row for row in fp8dist.prepare(lm([(512, 64)], ("output", 64, 512), tied=tied)).coverage()]
    why = "it shares the weight of embed0" if tied else "it has an output for each row of embed0"
    assert row.reason == f"{why}, so it is taken for the output head: skip='!output' puts it into FP8"
    assert f"fp8dist: output stays in high precision: {row.reason}" in caplog.messages
    assert fp8dist.prepare(lm([(512, 64)], ("output", 64, 512), tied=tied), **arguments).coverage().share == 1
    fp8dist.prepare(lm([(512, 64)], *BLOCKS, ("output", 64, 512)), strict=True)  # A default names it.


def _stack(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


@pytest.mark.parametrize("attached", [False, True])
def test_a_replaced_module_is_not_called_fp8(attached: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = _stack(32, 32, 32, 32, 32)
    manager = fp8dist.prepare(model, skip="1")
    if attached:
        manager.attach(model)
    model[0] = nn.Linear(32, 64)
    model.append(nn.Linear(64, 64))
    model.append(nn.Linear(64, 20))
    del model[3]
    expected = {
        "0": "it came after prepare(): call fp8dist.restore(model), then prepare() again",
        "1": "it matches skip '1'",
        "2": "",
        "3": "it came after prepare(): call fp8dist.restore(model), then prepare() again",
        "4": "64 x 20 are not multiples of 16",
    }
    table = manager.coverage()
    assert {row.fqn: row.reason for row in table} == expected
    assert [row.fqn for row in table if row.fp8] == ["2"]
    assert table.fp8_parameters / table.parameters == 1024 / (2048 + 1024 + 1024 + 4096 + 1280)
    assert sum(row.flops for row in table) == pytest.approx(1)
    assert [(each["module"], each["gemms"]["fprop"]) for each in fp8dist.describe(manager)["modules"]] == [
        (fqn, "fp8" if fqn == "2" else "high") for fqn in expected
    ]
    for _ in range(2):
        manager.attach(model)
    assert caplog.messages == [
        "fp8dist: attach(): modules that came after prepare() stay in high precision: 0, 3. To convert them, call "
        "fp8dist.restore(model), then prepare() again; modules that prepare() converted are gone, and their slots stay "
        "unused: 0, 3"
    ]
    fp8dist.restore(model)
    assert [row.fqn for row in fp8dist.prepare(model, skip="1").coverage() if row.fp8] == ["0", "2", "3"]


def test_attach_warns_of_replacements_that_cannot_be_converted(caplog: pytest.LogCaptureFixture) -> None:
    """Such as Linears that another library has converted."""
    model = _stack(32, 32, 32)
    manager = fp8dist.prepare(model)
    model[1] = nn.Linear(32, 20)
    manager.attach(model)
    assert caplog.messages == [
        "fp8dist: attach(): modules that replaced converted ones stay in high precision: 1 (32 x 20 are not multiples "
        "of 16); modules that prepare() converted are gone, and their slots stay unused: 1"
    ]


def test_modules_that_are_gone_or_moved_are_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """As a pipeline's stage is cut from a model, and as adapters wrap a Linear."""
    model = _stack(32, 32, 32, 32)
    manager = fp8dist.prepare(model)
    del model[1]
    model[1] = nn.ModuleDict({"base_layer": model[1], "lora_A": nn.Linear(32, 16), "lora_B": nn.Linear(16, 32)})
    with caplog.at_level(logging.INFO, "fp8dist"):
        manager.attach(model)
    assert [str(row) for row in manager.coverage()] == [
        "FP8",
        "FP8",
        *["high: it matches skip '*lora_*', a default"] * 2,
    ]
    assert caplog.records[-1].levelno == logging.INFO
    gone = "fp8dist: attach(): modules that prepare() converted are gone, and their slots stay unused: 1"
    assert caplog.messages == [gone]
    manager.set_precision("2", "high")
    assert [row.fqn for row in manager.coverage() if row.fp8] == ["0"]


def test_a_copy_of_a_converted_module_is_refused() -> None:
    model = _stack(32, 32, 32)
    manager = fp8dist.prepare(model)
    assert fp8dist.get_manager(copy.deepcopy(model)).coverage() == manager.coverage()  # A copy of the whole is none.
    model.append(copy.deepcopy(model[1]))
    assert [row.fp8 for row in manager.coverage()] == [True, True, False]
    with pytest.raises(ConfigurationError, match=r"^2 is a copy of a converted module \(1\), with FP8 state"):
        manager.attach(model)
    fp8dist.restore(model)
    fp8dist.prepare(model).attach(model)


def test_strict_lists_what_nobody_named_and_changes_nothing() -> None:
    model = Mixtral()
    with pytest.raises(ConfigurationError) as caught:
        fp8dist.prepare(model, strict=True)
    text = str(caught.value)
    assert text.startswith("strict=True: 8 module(s) would stay in high precision, and no pattern names them: ")
    assert "layers.3.experts (gate_up_proj, down_proj: 3-D parameters, not an nn.Linear)" in text
    assert "lm_head" not in text
    assert not any(isinstance(module, FP8Linear) for module in model.modules())
    fp8dist.prepare(model, strict=True, skip=("*.experts", "*.gate"))


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ({"skip": "other"}, True),
        ({"overrides": {"other": "high"}}, True),
        ({"overrides": {"other": BlockScaling()}}, False),
        ({"skip": ("other", "!other")}, False),
        ({"filter_fn": lambda module, fqn: fqn != "other"}, False),  # The filter is called for eligible modules only.
    ],
)
def test_what_strict_takes_as_named(arguments: dict[str, Any], fits: bool) -> None:
    model = nine_in_ten(lambda: nn.Linear(32, 40))
    reason = r"1 module\(s\) .* other \(32 x 40 are not multiples of 16\)"
    with contextlib.nullcontext() if fits else pytest.raises(ConfigurationError, match=reason):
        fp8dist.prepare(model, strict=True, **arguments)
    if "filter_fn" in arguments:
        fp8dist.prepare(nine_in_ten(lambda: nn.Linear(32, 64)), strict=True, **arguments)


def test_the_table_is_aligned() -> None:
    model = nn.ModuleDict({"first": nn.Linear(32, 64), "experts": MixtralExperts(), "lm_head": nn.Linear(32, 128)})
    assert str(fp8dist.prepare(model).coverage()) == "\n".join(
        [
            "module   kind            parameters   FLOPs  computes in",
            "first    Linear               2,048   8.3 %  FP8",
            "experts  MixtralExperts      18,432  75.0 %  high: gate_up_proj, down_proj: 3-D parameters, not "
            "an nn.Linear",
            "lm_head  Linear               4,096  16.7 %  high: it matches skip '*lm_head', a default",
            "FP8: 8.3 % of matmul weights",
        ]
    )


def test_the_table_follows_set_precision_and_recipes() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    manager = fp8dist.prepare(model, DelayedScaling(high_precision=("dgrad",)))
    assert [str(row) for row in manager.coverage()] == ["FP8: dgrad high"] * 2
    manager.set_precision("0", "high")
    first, second = manager.coverage()
    assert (first.fp8, second.fp8) == (False, True)
    assert first.reason == "set_precision, a fallback or its recipe says so"
    assert "FP8: 50.0 % of matmul weights)" in repr(manager)
    manager.set_precision("0", "fp8")
    assert manager.coverage().share == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_on_the_meta_device_and_inside_wrappers() -> None:
    here = fp8dist.prepare(Mixtral()).coverage()
    with torch.device("meta"):
        model = Mixtral()
    assert fp8dist.prepare(model).coverage() == here
    model = Mixtral()
    for i in range(4):
        model.layers[i] = checkpoint_wrapper(torch.compile(model.layers[i]))
    assert fp8dist.prepare(model).coverage() == here


@pytest.mark.parametrize("how", ["fsdp1", "fsdp2"])
@on_ranks(2)
def test_sharding_does_not_change_the_table(how: str) -> None:
    model = Mixtral()
    with captured_log() as log:
        manager = fp8dist.prepare(model, group=dist.group.WORLD)
        before = str(manager.coverage())
        if how == "fsdp2":
            for layer in model.layers:
                fully_shard(layer)
            manager.attach(fully_shard(model))
        else:
            manager.attach(FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu")))
    assert str(manager.coverage()) == before
    # Only the lowest rank of the group warns.
    expected = ["fp8dist: FP8: 17.3 % of matmul weights"] if dist.get_rank() == 0 else []
    assert [text.split(";")[0] for _, text in log] == expected
