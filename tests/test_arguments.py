"""A wrong argument raises at once and names the right one, never a bare TypeError or AttributeError."""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import BlockScaling, CurrentScaling, DelayedScaling, Fallback, RowwiseScaling, StateManager
from fp8dist.errors import ConfigurationError, NotAModelError, UnknownArgumentError
from fp8dist.modules.fp8_linear import FP8Linear
from tests.support.ranks import RankPool
from tests.support.training import make_net


def prepared() -> tuple[nn.Module, StateManager]:
    """Return a prepared model and its manager, which refers to the model only weakly."""
    net = make_net()
    return net, fp8dist.prepare(net)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def message(call: Callable[..., object], *args: Any, **options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        call(*args, **options)
    return str(caught.value)


KEYWORDS: list[tuple[Callable[..., object], str, str]] = [
    # TransformerEngine's recipes
    (DelayedScaling, "amax_history_len", "DelayedScaling(): amax_history_len is called history_len here"),
    (DelayedScaling, "fp8_format", 'fp8_format is called format here: it is "hybrid" or "e4m3"'),
    (DelayedScaling, "reduce_amax", "reduce_amax is an argument of another call: prepare(amax_sync=…)"),
    (DelayedScaling, "interval", "interval: it is not needed: every step updates the scales"),
    (DelayedScaling, "scaling_factor_compute_algo", "scaling_factor_compute_algo: it is not offered"),
    (CurrentScaling, "use_power_2_scales", "use_power_2_scales is called power_of_two here"),
    (CurrentScaling, "amax_history_len", "is an argument of another call: DelayedScaling(history_len=…)"),
    (CurrentScaling, "fp8_gemm_fprop", "fp8_gemm_fprop is called fast_accumulation here: it names the GEMMs"),
    (DelayedScaling, "fp8_gemm_wgrad", 'such as ("wgrad",)'),
    (DelayedScaling, "use_split_accumulator", "is called fast_accumulation here: it is the opposite"),
    (BlockScaling, "fast_accumulation", "BlockScaling does not have it"),
    (BlockScaling, "x_block_scaling_dim", "it is fixed: BlockScaling has blocks of 1 x 128 in inputs"),
    (BlockScaling, "use_f32_scales", "it is the opposite: power_of_two=False is the default"),
    (RowwiseScaling, "margin", "RowwiseScaling(): margin is an argument of another call: DelayedScaling(margin=…)"),
    # torchao's configuration
    (CurrentScaling, "cast_config_input", "cast_config_input: it is not offered"),
    (CurrentScaling, "enable_fsdp_float8_all_gather", "argument of another call: prepare(fp8_all_gather=…)"),
    (CurrentScaling, "force_recompute_fp8_weight_in_bwd", "it is not needed: under FSDP weights are cast again"),
    (RowwiseScaling, "gemm_config_grad_input", 'such as ("dgrad",)'),
    (CurrentScaling, "pad_inner_dim", "pad_inner_dim: it is not offered: dims must be multiples of 16"),
    (CurrentScaling, "emulate", 'prepare(backend=…): use backend="reference"'),
    # Typing mistakes
    (DelayedScaling, "histroy_len", "there is no argument 'histroy_len' (did you mean 'history_len'?). It takes"),
    (DelayedScaling, "zzz", "there is no argument 'zzz'. It takes history_len, amax_algo, margin, format, update"),
    (Fallback, "step", "Fallback(): there is no argument 'step' (did you mean 'steps'?)"),
]
OF_PREPARE = [
    ("fp8_recipe", "prepare(): fp8_recipe is called recipe here"),
    ("reduce_amax", "reduce_amax is called amax_sync here"),
    ("calibrating", "calibrating: it is a context manager here: `with manager.no_fp8(), manager.recording():`"),
    ("emulate", 'emulate is called backend here: use backend="reference"'),
    ("history_len", "history_len is an argument of another call: DelayedScaling(history_len=…)"),
    ("optimizer", "optimizer is an argument of another call: manager.attach(optimizer=…)"),
    ("overides", "there is no argument 'overides' (did you mean 'overrides'?). It takes model, recipe, group"),
]
OF_MANAGER: list[tuple[str, str, str]] = [
    ("attach", "optim", "manager.attach(): optim is called optimizer here"),
    ("attach", "grad_scaler", "grad_scaler is called scaler here"),
    ("attach", "group", "group is an argument of another call: prepare(group=…)"),
    ("attach", "modul", "there is no argument 'modul' (did you mean 'module'?). It takes module, optimizer"),
    ("set_precision", "step", "manager.set_precision(): there is no argument 'step' (did you mean 'steps'?)"),
    ("set_precision", "gemm", "(did you mean 'gemms'?)"),
]


def test_an_unknown_keyword() -> None:
    for call, name, said in KEYWORDS:
        assert said in message(call, **{name: 1})
    for name, said in OF_PREPARE:
        net = make_net()
        assert said in message(fp8dist.prepare, net, **{name: None})
        assert not any(isinstance(module, FP8Linear) for module in net.modules())
    _net, manager = prepared()
    for method, name, said in OF_MANAGER:
        assert said in message(getattr(manager, method), **{name: 1})
    assert "interval: it is not needed" in message(fp8dist.watch, manager, interval=1)
    text = message(lambda: DelayedScaling(amax_history_len=16, fp8_mha=True, marign=1))  # type: ignore[call-arg]
    assert all(name in text for name in ("history_len here", "fp8_mha: it is not offered", "mean 'margin'?"))


def test_unknown_keywords_are_type_errors_too_and_signatures_stay() -> None:
    assert issubclass(UnknownArgumentError, TypeError)
    assert issubclass(UnknownArgumentError, ConfigurationError)
    assert list(inspect.signature(DelayedScaling).parameters)[:2] == ["history_len", "amax_algo"]
    assert inspect.signature(fp8dist.prepare).parameters["skip"].default == ()
    recipe = DelayedScaling(history_len=4)
    assert dataclasses.replace(recipe, margin=1) == DelayedScaling(history_len=4, margin=1)
    assert pickle.loads(pickle.dumps(recipe)) == copy.deepcopy(recipe) == recipe
    assert pickle.loads(pickle.dumps(fp8dist.prepare)) is fp8dist.prepare
    assert "did you mean 'margin'?" in message(lambda: dataclasses.replace(recipe, margn=1))  # type: ignore[call-arg]


class Format(enum.Enum):
    """TransformerEngine's."""

    HYBRID = "hybrid"


def foreign(name: str, library: str) -> object:
    return type(name, (), {"__module__": f"{library}.recipe"})()


def test_what_is_no_recipe() -> None:
    for recipe, said in [
        ("delayed", "got 'delayed': write fp8dist.DelayedScaling()"),
        ("RowwiseScaling", "write fp8dist.RowwiseScaling()"),
        ("rowwise_with_gw_hp", 'write fp8dist.RowwiseScaling(power_of_two=True, high_precision=("wgrad",))'),
        ("blockwize", "write fp8dist.BlockScaling()"),
        ("nonsense", "got 'nonsense'"),
        (DelayedScaling, "got the class DelayedScaling: write DelayedScaling()"),
        ({"margin": 1}, "write DelayedScaling(**mapping)"),
        (foreign("DelayedScaling", "transformer_engine"), "DelayedScaling of transformer_engine: use fp8dist.Delayed"),
        (foreign("Float8CurrentScaling", "transformer_engine"), "use fp8dist.CurrentScaling()"),
        (foreign("Float8LinearConfig", "torchao"), "use fp8dist.CurrentScaling() or RowwiseScaling(power_of_two=True)"),
        (16, "got 16"),
    ]:
        text = message(fp8dist.prepare, make_net(), recipe)
        assert text.startswith("recipe must be a recipe such as DelayedScaling(), got ")
        assert said in text
        text = message(fp8dist.prepare, make_net(), overrides={"first": recipe})
        assert text.startswith("overrides['first'] must be a recipe, or \"high\" for high precision, got ")
        assert said in text


def test_a_wrong_value_in_a_recipe() -> None:
    for fields, said in [
        ({"amax_algo": "maximum"}, "amax_algo must be one of max, most_recent (did you mean 'max'?), got 'maximum'"),
        ({"amax_algo": ["max"]}, "amax_algo must be one of max, most_recent (did you mean 'max'?), got ['max']"),
        ({"format": Format.HYBRID}, "format must be one of hybrid, e4m3 (did you mean 'hybrid'?), got <Format.HYBRID"),
        ({"high_precision": "wgrad"}, "(write high_precision=('wgrad',)), got 'wgrad'"),
        ({"high_precision": ("w_grad",)}, "(write high_precision=('wgrad',))"),
        ({"high_precision": (False, False, True)}, "high_precision must be a tuple of fprop, dgrad, wgrad, got (Fal"),
        ({"power_of_two": "yes"}, "power_of_two must be True or False, got 'yes'"),
    ]:
        assert said in message(DelayedScaling, **fields)


PREPARE: list[tuple[Callable[[], object], str]] = [
    (lambda: fp8dist.prepare(None), "got None"),  # type: ignore[arg-type]
    (lambda: fp8dist.prepare(nn.Linear), "got the class Linear: pass an instance of it"),  # type: ignore[arg-type]
    (lambda: fp8dist.prepare(make_net().parameters()), "not its parameters"),  # type: ignore[arg-type]
    (lambda: fp8dist.prepare([make_net()]), "nn.ModuleList"),  # type: ignore[arg-type]
    (lambda: fp8dist.prepare(sgd(make_net())), "got SGD"),  # type: ignore[arg-type]
    (lambda: fp8dist.prepare(prepared()[1]), "got StateManager"),  # type: ignore[arg-type]
    (
        lambda: fp8dist.prepare(torch.compile(make_net())),  # type: ignore[arg-type]
        "got OptimizedModule: call prepare(model) with the plain model first, then model = torch.compile(model)",
    ),
    (lambda: fp8dist.prepare(nn.DataParallel(make_net())), "got DataParallel: call prepare(model)"),
    (lambda: fp8dist.prepare(make_net(), group=[0, 1]), "dist.new_group([0, 1])"),  # type: ignore[arg-type]
    (lambda: fp8dist.prepare(make_net(), group="dp"), "mesh['dp']"),  # type: ignore[arg-type]
    (
        lambda: fp8dist.prepare(make_net(), group=dist.GroupMember.NON_GROUP_MEMBER),  # type: ignore[arg-type]
        "this rank is not in the group that new_group() made",
    ),
    (lambda: fp8dist.prepare(make_net(), group=True), "got bool True"),  # type: ignore[arg-type]
    (lambda: fp8dist.prepare(make_net(), groups=[("*", None)]), "groups must be a mapping"),  # type: ignore[arg-type]
    (lambda: fp8dist.prepare(make_net(), groups={"*": [0]}), "dist.new_group([0])"),  # type: ignore[dict-item]
    (lambda: fp8dist.prepare(make_net(), groups={0: None}), "groups must hold patterns"),  # type: ignore[dict-item]
    (lambda: fp8dist.prepare(make_net(), overrides=["first"]), "overrides must be a mapping"),  # type: ignore[arg-type]
    (lambda: fp8dist.prepare(make_net(), filter_fn="first"), "filter_fn must be a function of (module"),  # type: ignore[arg-type]
    (
        lambda: fp8dist.prepare(make_net(), filter_fn=lambda module: True),  # type: ignore[arg-type, misc]
        "filter_fn is called as filter_fn(module, fqn), got one that takes (module)",
    ),
    (lambda: fp8dist.prepare(make_net(), filter_fn=lambda a, b, c: True), "that takes (a, b, c)"),  # type: ignore[arg-type, misc]
    (lambda: fp8dist.prepare(make_net(), skip=3), "skip must hold patterns of module names"),  # type: ignore[arg-type]
    (lambda: fp8dist.prepare(make_net(), skip=[nn.Linear]), "got <class 'torch.nn"),  # type: ignore[list-item]
    (lambda: fp8dist.prepare(make_net(), enabled="yes"), "enabled must be True or False, got 'yes'"),  # type: ignore[arg-type]
    (lambda: fp8dist.prepare(make_net(), backend="tritn"), "(did you mean 'triton'?), got 'tritn'"),
    (lambda: fp8dist.prepare(make_net(), check_policy="raize"), "(did you mean 'raise'?)"),
    (lambda: fp8dist.prepare(make_net(), backend=["torch"]), "backend must be one of"),  # type: ignore[arg-type]
    (lambda: fp8dist.prepare(make_net(), fallback=True), "fallback must be a Fallback or None"),  # type: ignore[arg-type]
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_prepare() -> None:
    for call, said in PREPARE:
        assert said in message(call)


def test_a_type_error_inside_filter_fn_stays_the_callers() -> None:
    def filter_fn(module: nn.Module, fqn: str) -> bool:
        return fqn < 3  # type: ignore[operator]

    with pytest.raises(TypeError, match="'<' not supported"):
        fp8dist.prepare(make_net(), filter_fn=filter_fn)
    net = make_net()
    fp8dist.prepare(net, filter_fn=lambda *both: both[1] == "first")
    assert [fqn for fqn, module in net.named_modules() if isinstance(module, FP8Linear)] == ["first"]


def scheduler(net: nn.Module) -> Any:
    return torch.optim.lr_scheduler.StepLR(sgd(net), 1)


ATTACH: list[tuple[Callable[[nn.Module, StateManager], object], str]] = [
    (lambda net, m: m.attach(sgd(net)), "got SGD: pass the optimizer by name, attach(optimizer"),  # type: ignore[arg-type]
    (lambda net, m: m.attach(scheduler(net)), "attach(optimizer=…)"),
    (lambda net, m: m.attach(net.parameters()), "not its parameters"),  # type: ignore[arg-type]
    (lambda net, m: m.attach(torch.amp.GradScaler("cpu")), "attach(scaler=…)"),  # type: ignore[arg-type]
    (lambda net, m: m.attach(nn.Linear), "got the class Linear"),  # type: ignore[arg-type]
    (lambda net, m: m.attach(make_net()), "does not hold the model that was prepared: pass the model that prepare"),
    (
        lambda net, m: m.attach(optimizer=torch.optim.AdamW),
        "got the class AdamW: make one: AdamW(model.parameters(), …)",
    ),
    (lambda net, m: m.attach(optimizer=scheduler(net)), "got StepLR: pass the optimizer that the"),
    (
        lambda net, m: m.attach(optimizer=torch.optim.lr_scheduler.ReduceLROnPlateau(sgd(net))),
        "got ReduceLROnPlateau",
    ),
    (lambda net, m: m.attach(optimizer=[]), "no optimizer in it"),
    (lambda net, m: m.attach(optimizer=net), "got Net: the model is the first argument"),
    (lambda net, m: m.attach(optimizer=net.parameters()), "the optimizer that trains these"),
    (lambda net, m: m.attach(optimizer="adamw"), "got 'adamw': pass the optimizer itself"),
    (lambda net, m: m.attach(optimizer={"a": sgd(net)}), "got dict: pass a list of optimizers"),
    (lambda net, m: m.attach(optimizer={sgd(net)}), "got set: pass one optimizer, or a list"),
    (lambda net, m: m.attach(optimizer=torch.amp.GradScaler("cpu")), "attach(scaler=…)"),
    (lambda net, m: m.attach(scaler=True), "takes a GradScaler, or None, got True"),
    (lambda net, m: m.attach(scaler=torch.amp.GradScaler), "got the class GradScaler"),
    (lambda net, m: m.attach(scaler=sgd(net)), "takes a GradScaler, or None, got SGD"),
    (lambda net, m: m.attach(boundary="manul"), "(did you mean 'manual'?), got 'manul'"),  # type: ignore[arg-type]
    (lambda net, m: m.attach(timeout=300), "write datetime.timedelta(seconds=300)"),  # type: ignore[arg-type]
]


def test_attach() -> None:
    for call, said in ATTACH:
        net, manager = prepared()
        assert said in message(call, net, manager)
        manager.attach(net, optimizer=sgd(net), scaler=torch.amp.GradScaler("cpu"), timeout=timedelta(seconds=5))


def test_the_manager_is_not_the_model() -> None:
    _net, manager = prepared()
    text = r"prepare.. changes the model in place and returns its manager"
    for name in ("parameters", "named_parameters", "forward", "train", "eval", "to", "cuda", "modules", "half"):
        with pytest.raises(NotAModelError, match=text) as caught:
            getattr(manager, name)
        assert f"no {name!r}" in str(caught.value)
        assert not hasattr(manager, name)
    assert "keep using the model" in message(lambda: manager(torch.zeros(2, 32)))
    assert "keep using the model" in message(lambda: torch.optim.SGD(manager.parameters()))  # type: ignore[attr-defined]
    for name in ("nothing", "_parameters", "__deepcopy__", "scales"):
        with pytest.raises(AttributeError) as plain:
            getattr(manager, name)
        assert not isinstance(plain.value, ConfigurationError)
        assert not hasattr(manager, name)
    assert isinstance(manager, Joinable)


def test_names_that_there_are_not() -> None:
    net = make_net()
    net.head = nn.Linear(16, 16)
    manager = fp8dist.prepare(net, skip="head")
    for call, said in [
        (lambda m: m.slot("frist", "input").scale, "there is no slot frist:input (did you mean 'first'?)"),
        (lambda m: m.slot("module.first", "input").amax, "(did you mean 'first'?)"),
        (lambda m: m.slot("first", "wieght").amax_history, "(did you mean 'weight'?), got 'wieght'"),
        (lambda m: m.slot("first", ["input"]).scale, "role must be one of input, weight, grad_output, got ['input']"),
        (lambda m: m.slot(None, "input").scale, "there is no slot None:input"),
        (lambda m: m.slot("brnch", "input").set_scale(1.0), "(did you mean 'branch'?)"),
        (lambda m: m.slot("branch", "input").set_scale("big"), "scale must be a number, got 'big'"),
        (lambda m: m.slot("branch", "input").record(3), "expected a tensor to record, got 3"),
        (lambda m: m.register("x", "inputs", "e4m3"), "(did you mean 'input'?)"),
        (lambda m: m.register("x", "input", "e4m3fn"), "(did you mean 'e4m3'?), got 'e4m3fn'"),
        (lambda m: m.register("x", "input", []), "format must be one of e4m3, e5m2, got []"),
        (lambda m: m.register(3, "input", "e4m3"), "fqn must be a string, got 3"),
        (lambda m: m.slot("frst", "input").high_precision, "there is no slot frst:input (did you mean 'first'?)"),
        (lambda m: m.set_precision("frst", "high"), "no FP8Linear matches 'frst' (nearest: 'first')"),
        (lambda m: m.set_precision("head", "high"), "head stays in high precision, it matches skip 'head'"),
        (lambda m: m.set_precision(["first"], "high"), "pattern must be a string"),
        (lambda m: m.set_precision("first", "hgih"), 'precision must be "high" or "fp8" (did you mean'),
        (lambda m: m.set_precision("first", "high", gemms="dgrad"), "(write gemms=('dgrad',)), got 'dgrad'"),
        (lambda m: m.check(policy="raize"), "policy must be one of raise, warn, repair (did you mean 'raise'?)"),
        (lambda m: m.on_event("print"), "callback must be a function of an Event, got 'print'"),
        (lambda m: m.check(policy=None), "policy must be one of raise, warn, repair, got None"),
        (lambda m: fp8dist.watch(m, 10, jump="8"), "jump must be a factor above 1, or None for no alarms, got '8'"),
        (lambda m: fp8dist.watch(m, 10, jump=math.inf), "a factor above 1, or None for no alarms, got inf"),
    ]:
        assert said in message(call, manager)


def _of_wrapped(how: str) -> str:
    net: Any = nn.Sequential(OrderedDict(inner=make_net(), head=nn.Linear(16, 16)))
    given: nn.Module = net
    if how == "DDP":
        given = DistributedDataParallel(net)
    elif how.startswith("FSDP1"):
        original = not how.endswith("flat")
        wrapped = FullyShardedDataParallel(net, use_orig_params=original, device_id=torch.device("cpu"))
        given = net.inner if "inside" in how else wrapped
    elif how == "FSDP2":
        given = fully_shard(net)
    elif how == "FSDP2 inside":
        fully_shard(net)
        given = net.inner
    elif how == "FSDP2 of a Linear":
        fully_shard(net.inner.first)
    elif how == "None":
        return message(lambda: fp8dist.prepare(net))
    elif how == "skipped":
        fully_shard(net.inner)
        return str(fp8dist.prepare(net, group=dist.group.WORLD, skip="inner.*").slots[0].fqn)
    text = message(lambda: fp8dist.prepare(given, group=dist.group.WORLD))
    assert not any(isinstance(module, FP8Linear) for module in net.modules())
    return text


def test_prepare_comes_first(two_ranks: RankPool) -> None:
    for how, said in [
        ("DDP", "got DistributedDataParallel: call prepare(model) with the plain model first, then model = Distrib"),
        ("FSDP1", "got FullyShardedDataParallel: call prepare(model) with the plain model first"),
        ("FSDP1 inside", "inner.first is managed by FSDP or ZeRO already: call prepare(model) first"),
        ("FSDP1 inside flat", "first is managed by FSDP or ZeRO already"),
        ("FSDP2", "got FSDPModule: call prepare(model) with the plain model first, then fully_shard(model)"),
        ("FSDP2 inside", "first is managed by FSDP or ZeRO already: call prepare(model) first"),
        ("FSDP2 of a Linear", "inner.first is managed by FSDP or ZeRO already"),
        ("None", "2 ranks and no group: pass prepare(group=…)"),
        ("skipped", "head"),
    ]:
        for text in two_ranks.run(_of_wrapped, how):
            assert said.removeprefix("inner.") in text
