"""Tensors inside a rank that must belong together: masters and weights, gathered weights and shards, casts, ties.

The optimizers here are small stand-ins that keep their masters under the names of the real ones; the contract of the
integrations (``tests/integrations``) runs the real ones of Megatron-Core and DeepSpeed.
"""

from __future__ import annotations

import copy
import logging
import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import fp8dist
from fp8dist.checks import coherence
from fp8dist.checks.checked import Checked
from fp8dist.checks.coherence import Asked, inside_of, stale_weights
from fp8dist.modules.linear_slots import LinearSlots
from fp8dist.modules.parts import fp8_parts
from tests.support.collectives import counted_collectives
from tests.support.experts import Experts, Mixture, routes, rows
from tests.support.logs import captured_log
from tests.support.ranks import RankPool, on_ranks
from tests.support.suite import few

BF16 = torch.bfloat16


class Tied(nn.Module):
    """An embedding whose weight is the head's, and a Linear. As a model of Transformers shows it, with ``config``."""

    def __init__(self, config: bool = False) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        if config:
            self.config = SimpleNamespace(tie_word_embeddings=True)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(self.embed(x)))


class Masters(torch.optim.SGD):
    """SGD on float32 copies of a BF16 model's weights, which are rounded into the model after each step.

    ``keep``: says under which names, and in which parts, the masters are kept.
    """

    def __init__(self, model: nn.Module, keep: str = "main_param") -> None:
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.masters = [nn.Parameter(p.detach().float()) for p in self.weights]
        super().__init__(self.masters, lr=0.05)
        _keep(self, keep)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for weight, master in zip(self.weights, self.masters):
            master.grad = None if weight.grad is None else weight.grad.float()
        super().step(closure)
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters):
                weight.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for weight in self.weights:
            weight.grad = None


def _of_this_rank(of: Masters, weights: str, masters: str) -> None:
    """As DeepSpeed: weights are views of a flat tensor, cut into one part per rank; a rank has the master of its
    part."""
    ranks, first = dist.get_world_size(), 0
    flat, flat_master = (torch.cat([p.detach().view(-1) for p in several]) for several in (of.weights, of.masters))
    for weight, master in zip(of.weights, of.masters):
        end = first + weight.numel()
        weight.data, master.data = flat[first:end].view_as(weight), flat_master[first:end].view_as(weight)
        first = end
    setattr(of, weights, [list(flat.tensor_split(ranks))])
    setattr(of, masters, [flat_master.tensor_split(ranks)[dist.get_rank()]])
    of.real_dp_process_group = [dist.group.WORLD]  # type: ignore[attr-defined]


def _keep(of: Any, how: str) -> None:
    """Keep the masters under the names of a library. Megatron's distributed optimizer has those of a part of each
    weight: here of all but the first three elements."""
    if how == "megatron":
        of.float16_groups, of.fp32_from_float16_groups = (
            [several[:1], several[1:]] for several in (of.weights, of.masters)
        )
    elif how == "megatron distributed":
        of.shard_float16_groups, of.shard_fp32_from_float16_groups = (
            [[one.detach().view(-1)[3:] for one in several]] for several in (of.weights, of.masters)
        )
    elif how == "deepspeed bf16":
        _of_this_rank(of, "bf16_partitioned_groups", "fp32_groups_flat_partition")
    elif how == "deepspeed zero":
        _of_this_rank(of, "parallel_partitioned_bit16_groups", "single_partition_of_fp32_groups")
    for weight, master in zip(of.weights, of.masters):
        if how == "main_param":
            weight.main_param = master
        elif how == "megatron distributed":
            weight.main_param, weight.main_param_sharded = master.view(-1)[3:], True
        elif how == "fused adam":
            of.state[weight] = {"master_param": master}


KEPT = ("main_param", "megatron", "megatron distributed", "deepspeed bf16", "deepspeed zero", "fused adam")


def _mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).to(BF16)


def _step(model: nn.Module, optimizer: Any, x: Tensor | None = None) -> None:
    torch.manual_seed(1)
    model(torch.randn(16, 16, dtype=BF16) if x is None else x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def _found(report: fp8dist.DivergenceReport) -> list[tuple[str, str, tuple[int, ...], str]]:
    return [(f.kind, f.name, f.ranks, f.detail) for f in report.findings]


def _masters(keep: str) -> Any:
    """What checks find, healthy and with one element of the second weight changed on the last rank; what it must be,
    and the bytes that were compared."""
    model = _mlp()
    optimizer = Masters(model, keep)
    reports = []
    for spoil in (False, True):
        _step(model, optimizer)
        if spoil and dist.get_rank() == dist.get_world_size() - 1:
            model[2].weight.data[15, 7] = 3.0
        reports.append(fp8dist.check(model, coherence=True, optimizer=optimizer, policy="warn", step=7))
    healthy, spoiled = reports
    assert _found(healthy) == []
    assert not healthy.consistent  # The ranks were not compared with one another.
    expected = str(np.float32(float(optimizer.masters[2].detach()[15, 7].to(BF16))))
    return _found(spoiled), expected, healthy.compared_by["inside the rank"]


@pytest.mark.parametrize("keep", KEPT)
def test_a_weight_that_is_not_its_master_is_named_with_rank_and_element(two_ranks: RankPool, keep: str) -> None:
    whole = 2 * (16 * 16 + 16)
    numbers, elements = {
        "megatron distributed": (whole - 4 * 3, 253),
        "deepspeed bf16": (whole // 2, whole // 2),
        "deepspeed zero": (whole // 2, whole // 2),
    }.get(keep, (whole, 256))
    with captured_log():
        outcomes = two_ranks.run(_masters, keep)
    of = "main_param" if keep == "main_param" else "Masters"
    for found, _, size in outcomes:
        assert size == 2 * numbers
        assert found == [
            (
                *("coherence", "2.weight", (1,)),
                f"not its master weight ({of}) in bfloat16: 3.0 against {outcomes[1][1]} at [15, 7], "
                f"1 of {elements} elements",
            )
        ]


def test_what_wraps_optimizers_is_looked_into() -> None:
    model = _mlp()
    optimizer = Masters(model, "megatron")
    model[0].weight.data += 1
    chained = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=optimizer)])
    assert stale_weights(model, [chained]) == ["0.weight"]
    engine = type("DeepSpeedEngine", (nn.Module,), {})()
    engine.module, engine.optimizer = model, SimpleNamespace(optimizer=optimizer)
    assert stale_weights(engine, []) == ["0.weight"]


@pytest.mark.parametrize("kind", ["Masters", "SGD"])
def test_what_no_rule_can_read_is_named(kind: str) -> None:
    """Masters under no known name, in another format, as the remainders of weights: also of an optimizer that holds the
    model's own parameters."""
    model = _mlp()
    optimizer: Any = Masters(model) if kind == "Masters" else torch.optim.SGD(model.parameters(), lr=0.1)
    for weight in model.parameters():
        if kind == "Masters":
            del weight.main_param  # type: ignore[attr-defined]
        optimizer.state[weight] = {"master_param": torch.zeros(weight.shape, dtype=torch.int16)}
    report = fp8dist.check(model, coherence=True, optimizer=optimizer)
    assert report.compared_by == {"inside the rank": 0}
    assert report.skipped[-1] == f"4 tensors of {kind} that are not the model's parameters"


class _Odd:
    """A wrapper of an optimizer whose attributes cannot be read, and that takes no weak reference."""

    __slots__ = ("optimizer",)

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        raise RuntimeError("no state yet")

    param_groups = chained_optimizers = state


class _Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that is made, not as a view."""

    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if isinstance(out, Tensor) and out._base is None and not func.is_view:
            self.made = max(self.made, out.numel())
        return out


def test_large_weights_are_compared_in_pieces() -> None:
    weight = nn.Parameter(torch.zeros(50, 20, dtype=BF16))
    weight.main_param = torch.zeros(1000)  # type: ignore[attr-defined]
    weight.main_param[[450, 451, 999]] = 1  # type: ignore[attr-defined]
    with mock.patch.object(coherence, "_AT_ONCE", 100), _Largest() as largest, captured_log():
        (finding,) = inside_of(nn.ParameterList([weight]), Asked(), 1).findings
    assert finding.detail.endswith("in bfloat16: 0.0 against 1.0 at [22, 10], 3 of 1000 elements")
    assert largest.made == 100


@pytest.mark.parametrize(("value", "master", "differs"), [(torch.nan, torch.nan, 0), (0.0, -0.0, 1), (-0.0, -1e-45, 0)])
def test_bits_count_but_not_those_of_nan(value: float, master: float, differs: int) -> None:
    weight = nn.Parameter(torch.full((3,), value, dtype=BF16))
    weight.main_param = torch.full((3,), master)  # type: ignore[attr-defined]
    model = nn.ParameterList([weight])
    assert len(stale_weights(model, [])) == differs


def _stale(count: int) -> nn.ParameterList:
    model = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(count)])
    for weight in model.parameters():
        weight.main_param = weight.detach().float() + 1  # type: ignore[attr-defined]
    return model


@on_ranks(3)
def test_ranks_that_find_the_same_share_a_finding_and_the_rest_is_counted() -> None:
    with captured_log():
        report = fp8dist.check(_stale(20), coherence=True, policy="warn", group=dist.group.WORLD)
    assert [f.ranks for f in report.findings] == [(0, 1, 2)] * 17
    assert [len(f.hosts) for f in report.findings] == [3] * 17
    assert "4 further tensors that do not fit together" in str(report)
    assert str(report).startswith("tensors of a rank that must belong together differ")
    assert "no majority" not in str(report)
    assert "coherence of '0' on ranks 0, 1, 2 (" in report.summary()


# In passing, and before a load is undone ---------------------------------------------------------


def _job(check_policy: str = "raise", **options: Any) -> tuple[nn.Module, fp8dist.StateManager, Masters]:
    model = _mlp()
    manager = fp8dist.prepare(model, fp8dist.CurrentScaling(), check_every=2, check_policy=check_policy, **options)
    optimizer = Masters(model)
    manager.attach(model, optimizer=optimizer)
    return model, manager, optimizer


@pytest.mark.parametrize("enabled", [True, False])
def test_checks_of_check_every_compare_inside_the_rank(enabled: bool) -> None:
    """Also through wrappers whose attributes cannot be read."""
    model = _mlp()
    manager = fp8dist.prepare(model, fp8dist.CurrentScaling(), check_every=2, enabled=enabled)
    optimizer: Any = Masters(model)
    optimizer.float16_groups = optimizer.fp32_from_float16_groups = None
    odd = _Odd(optimizer)
    manager.attach(model, optimizer=odd)
    optimizer.chained_optimizers = [odd]
    for _ in range(6):
        _step(model, optimizer)
    with torch.no_grad():
        model[2].bias.add_(1)
    with captured_log(), pytest.raises(fp8dist.DivergenceError, match=r"coherence of '2.bias' on rank 0, step 7"):
        _step(model, optimizer)


def test_a_finding_that_stands_gets_one_line_until_it_is_over() -> None:
    model, manager, optimizer = _job("warn")
    _step(model, optimizer)
    optimizer.masters[0].data += 1
    with captured_log() as log:
        for _ in range(2):
            manager.check(coherence=True, policy="warn")
        _step(model, optimizer)
        manager.check(coherence=True, policy="warn")
    texts = [text for level, text in log if level == logging.WARNING]
    assert [text.partition("\n")[0] for text in texts] == [
        "tensors of a rank that must belong together differ",
        "fp8dist: step 1: still: coherence of '0.weight' on rank 0, since step 1",
        "fp8dist: equal again: coherence of '0.weight' on rank 0, different since step 1",
    ]


def test_a_load_that_masters_undo_is_named_before_the_step() -> None:
    for also_masters in (True, False):
        model, _, optimizer = _job()
        other = {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items() if "weight" in name}
        _step(model, optimizer)
        with captured_log() as log:
            model.load_state_dict(other, strict=False)
            if also_masters:
                for weight, master in zip(optimizer.weights, optimizer.masters):
                    master.data.copy_(weight)
            seen: list[int] = []
            optimizer.register_step_pre_hook(lambda *_, seen=seen, log=log: seen.append(len(log)))
            for _ in range(3):
                _step(model, optimizer)
        texts = [text for _, text in log]
        assert seen[0] == len(texts) == (not also_masters)
    assert texts[0].startswith(
        "fp8dist: the step of Masters that begins now undoes the load of 0.weight, 2.weight: it keeps copies of"
    )


def test_a_load_that_cannot_be_compared_does_not_stop_the_step() -> None:
    model, _, optimizer = _job()
    _step(model, optimizer)
    model.load_state_dict(model.state_dict())
    no_memory = mock.patch.object(coherence._Masters, "__init__", side_effect=RuntimeError("out of memory"))
    with captured_log() as log, no_memory:
        _step(model, optimizer)
    assert [text for _, text in log] == [
        "fp8dist: cannot compare the loaded weights with the optimizer's: out of memory"
    ]


@on_ranks(3)
def test_an_odd_weight_with_a_master_is_still_repaired() -> None:
    """An element of a weight changes on the last rank, which has its master; and then in the masters of all ranks."""
    model = _mlp()
    Masters(model)
    whole = DistributedDataParallel(model)
    if dist.get_rank() == 2:
        model[2].weight.data[1, 2] = 3.0
    with captured_log():
        report = fp8dist.check(whole, coherence=True, policy="repair")
        model[2].weight.main_param.data[1, 2] = 3.0  # type: ignore[union-attr]
        with pytest.raises(fp8dist.DivergenceError, match="nothing was copied"):
            fp8dist.check(whole, coherence=True, policy="repair")
    assert report.repaired == ("parameter '2.weight' on rank 2, from rank 0",)
    assert {f.kind for f in report.findings} == {"coherence", "parameter"}


# FP8 casts ---------------------------------------------------------------------------------------

RECIPES = {
    "delayed": fp8dist.DelayedScaling(),
    "current": fp8dist.CurrentScaling(),
    "row": fp8dist.RowwiseScaling(),
    "block": fp8dist.BlockScaling(),
    "mx": fp8dist.MXFP8Scaling(),
    "nvfp4": fp8dist.NVFP4Scaling(),
}


@pytest.mark.parametrize("name", RECIPES)
def test_casts_that_are_kept_for_a_step_fit_their_weights(name: str) -> None:
    """Healthy in each microbatch, also of weights that outgrew their scale; and after a write that torch does not
    count, or with columns of another weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128, bias=False))
    manager = fp8dist.prepare(model, RECIPES[name])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.attach(model, optimizer=optimizer)
    for step in range(3):
        if step == 2:
            with torch.no_grad():
                model[0].weight.mul_(1000)
        for _ in range(2):
            model(torch.randn(32, 128)).square().mean().backward()
            report = manager.check(coherence=True)
            assert report.compared_by["inside the rank"] > 0
        if step < 2:
            optimizer.step()
            optimizer.zero_grad()
    model[2].weight.data.mul_(0.5)
    with captured_log():
        found = {f.name for f in manager.check(coherence=True, policy="warn").findings}
        assert found & {"2 (rows)", "2 (rows_inv_scale)"}  # With a scale of its own, half a weight has the same bytes.
        model[2].weight.data.mul_(2)
        assert manager.check(coherence=True).findings == ()
    cache = next(fp8_parts(model)).slots.cache
    cast, *rest = cache._kept
    columns = cast.columns.view(torch.uint8).clone()
    columns[3, 4] ^= 1 << 3
    cache._kept = (cast._replace(columns=columns.view(cast.columns.dtype)), *rest)
    with captured_log():
        (finding,) = manager.check(coherence=True, policy="warn").findings
    assert finding.name == "0 (columns)"
    assert " at [3, 4], 1 of " in finding.detail


@pytest.mark.parametrize("name", [name for name in RECIPES if RECIPES[name].casts_experts])
def test_casts_of_experts_that_are_stored_transposed_fit_their_weights(name: str) -> None:
    model = Mixture(Experts(transposed=True))
    manager = fp8dist.prepare(model, RECIPES[name])
    manager.attach(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    model(rows(16, 32, 1), *routes(16, 2, range(4), 1)).sum().backward()
    report = manager.check(coherence=True)
    assert (report.findings, report.compared_by["inside the rank"] > 0) == ((), True)
    model.experts.down_proj.data[1].mul_(0.3)  # type: ignore[operator,union-attr]
    with captured_log():
        found = [finding.name for finding in manager.check(coherence=True, policy="warn").findings]
    assert found[0].startswith("experts.down")


def test_a_cast_is_freed_before_the_next_weight_is_cast() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(5)))
    manager = fp8dist.prepare(model, fp8dist.CurrentScaling())
    manager.attach(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.randn(16, 16)).sum().backward()
    alive: list[int] = []
    made: list[weakref.ref[Tensor]] = []
    cast_weight = LinearSlots._cast_weight

    def counted(*of: Any) -> Any:
        cast = cast_weight(*of)
        made.append(weakref.ref(cast.rows))
        alive.append(sum(one() is not None for one in made))
        return cast

    with mock.patch.object(LinearSlots, "_cast_weight", counted):
        manager.check(coherence=True)
    assert alive == [1] * 5


# FSDP2's gathered weights ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keeps", "half", "gather"),
    few(
        [(False, False, False), (True, False, False), (True, True, False), (True, False, True)],
        *[(False, False, False), (True, True, False), (True, False, True)],
    ),
)
@on_ranks(3)
def test_weights_that_stay_gathered_while_their_shards_change_are_named(keeps: bool, half: bool, gather: bool) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))  # Cut into 11, 11 and 10 rows.
    options: Any = {"group": dist.group.WORLD, "amax_sync": True, "check_every": 1, "fp8_all_gather": gather}
    manager = fp8dist.prepare(model, fp8dist.DelayedScaling(), check_policy="warn", **options)
    mixed = MixedPrecisionPolicy(param_dtype=BF16) if half else MixedPrecisionPolicy()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh, mp_policy=mixed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.attach(model, optimizer=optimizer)
    if keeps:
        model.set_reshard_after_backward(False)
    seen: list[Any] = []
    manager.on_event(lambda event: seen.append((event.step, _found(event.report))) if event.report else None)
    found: list[Any] = []
    with captured_log():
        for _ in range(3):
            model(torch.randn(16, 16)).float().square().mean().backward()
            manager.check(coherence=True)  # Between backward and step all is healthy, also if weights stay gathered.
            optimizer.step()
            optimizer.zero_grad()
            found = _found(manager.check(coherence=True, policy="warn"))
            if found:
                break
    if not keeps:
        assert (found, seen) == ([], [])
        return
    names = {"0.bias", "2.bias"} if gather else {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert {name for _, name, _, _ in found} == names
    assert {ranks for _, _, ranks, _ in found} == {(0, 1, 2)}
    assert all("gathered before its shard changed: " in text and text.endswith(" (rank 0)") for *_, text in found)


# Ties --------------------------------------------------------------------------------------------


def _untie(model: nn.Module) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def test_a_tie_that_a_load_has_cut_is_named() -> None:
    """Each of two prepared models, of which one is attached, and an unprepared one remember their ties."""
    pair = nn.ModuleDict({name: Tied() for name in ("attached", "prepared", "plain")})
    manager = fp8dist.prepare(pair["attached"], fp8dist.CurrentScaling()).attach(pair["attached"], start=None)
    fp8dist.prepare(pair["prepared"], fp8dist.CurrentScaling())
    assert fp8dist.check(pair, coherence=True).findings == ()
    fp8dist.check(copy.deepcopy(pair["plain"]), coherence=True)
    for model in pair.values():
        _untie(model)
    with captured_log():
        of_all, of_one = (
            fp8dist.check(pair, coherence=True, policy="warn"),
            manager.check(coherence=True, policy="warn"),
        )
    says = "no longer tied to '{}embed.weight', as at attach: another tensor"
    assert [(f.name, f.detail) for f in of_all.findings] == [
        (f"{name}.head.weight", says.format(f"{name}.")) for name in pair
    ]
    assert _found(of_one) == [("coherence", "head.weight", (0,), says.format(""))]


@pytest.mark.parametrize("how", ["assign=True", "to_empty()", "kept"])
def test_attach_warns_of_ties_that_are_lost_since_prepare(how: str) -> None:
    """A check cannot: it compares with ``attach``."""
    model = Tied().to("meta") if how == "to_empty()" else Tied()
    model.head.weight = model.embed.weight
    manager = fp8dist.prepare(model)
    if how == "to_empty()":
        model.to_empty(device="cpu")
        model.load_state_dict(Tied().state_dict())
    elif how == "assign=True":
        _untie(model)
    with captured_log() as log:
        copy.deepcopy(manager)
        for _ in range(2):
            manager.attach(model, start=None)
    texts = [text for _, text in log if "tied" in text]
    assert len(texts) == (how != "kept")
    assert all("each is trained apart: head.weight to embed.weight. " in text and how in text for text in texts)


def test_a_configuration_says_what_is_tied() -> None:
    model = Tied(config=True)
    assert fp8dist.check(nn.Sequential(model), coherence=True).findings == ()
    _untie(model)
    with captured_log():
        report = fp8dist.check(nn.Sequential(model), coherence=True, policy="warn")
    says = "not tied to '0.embed.weight' as config.tie_word_embeddings says: another tensor"
    assert _found(report) == [("coherence", "0.head.weight", (0,), says)]
    copied = nn.Module()  # A wrapper's embedding, which is trained as a copy.
    object.__setattr__(copied, "weight", model.head.weight)
    text = SimpleNamespace(tie_word_embeddings=False)
    silent: dict[str, Any] = {
        "config": property(lambda of: SimpleNamespace(get_text_config=lambda decoder: text)),
        "get_input_embeddings": mock.Mock(side_effect=NotImplementedError),
        "get_output_embeddings": lambda of: copied,
    }
    for name, value in (*silent.items(), ("config", property(mock.Mock(side_effect=RuntimeError)))):
        other = Tied(config=name != "config")
        _untie(other)
        other.__class__ = type("NotTied", (Tied,), {name: value})
        assert fp8dist.check(other, coherence=True).findings == (), name


def test_ties_of_names_that_wrappers_make_alike() -> None:
    model = nn.Module()
    model.module, model.head = nn.Linear(4, 4), nn.Linear(4, 4)
    model.weight = model.head.weight
    for _ in range(2):
        assert fp8dist.check(model, coherence=True).findings == ()


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
@on_ranks(2)
def test_ties_that_wrappers_keep_are_silent(how: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = Tied(config=True)
    manager = fp8dist.prepare(model, fp8dist.CurrentScaling(), group=dist.group.WORLD, check_every=1)
    whole = DistributedDataParallel(model) if how == "ddp" else fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.attach(whole, optimizer=optimizer)
    for _ in range(3):
        whole(torch.arange(32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert fp8dist.check(whole, coherence=True).findings == ()


# Cost, and the bytes by way ----------------------------------------------------------------------


@on_ranks(2)
def test_without_a_finding_it_sends_nothing_more() -> None:
    model = _mlp()
    optimizer = Masters(model)
    fp8dist.check(model, group=dist.group.WORLD)
    counts = []
    for asked in (False, True):
        with counted_collectives() as calls:
            fp8dist.check(model, group=dist.group.WORLD, coherence=asked, optimizer=optimizer)
        counts.append((calls.names, calls.sizes))
    assert counts[0] == counts[1]


@on_ranks(2)
def test_the_report_says_how_many_bytes_were_compared_by_which_way() -> None:
    """Of a model by hand: one parameter in DDP, one along an axis, one of this rank alone, and masters of all."""
    torch.manual_seed(0)
    inner = nn.Linear(8, 8, bias=False)
    model = nn.ModuleDict({"in_ddp": DistributedDataParallel(inner), "norm": nn.LayerNorm(8, bias=False)})
    model["own"] = nn.Linear(8, 2, bias=False)
    nn.init.constant_(model["own"].weight, dist.get_rank())
    for weight in model.parameters():
        weight.main_param = weight.detach().clone()  # type: ignore[attr-defined]
    report = fp8dist.check(model, axes={"tp": dist.group.WORLD}, coherence=True)
    ways = {"copies": 256, "axis tp": 32, "inside the rank": 256 + 32 + 64, "not compared": 64}
    assert list(report.compared_by.items()) == list(ways.items())
    told = "bytes by way: copies 256 B, axis tp 32 B, inside the rank 352 B, not compared 64 B\n"
    assert told in str(report)


def test_at_rest_is_a_way_too() -> None:
    model, manager, optimizer = _job(at_rest_every=1)
    for _ in range(3):
        _step(model, optimizer)
    weights = sum(master.numel() for master in optimizer.masters)
    report = manager.check(coherence=True)
    assert report.compared_by == {"at rest": 4 * weights, "inside the rank": 2 * weights}
    event = Checked.of(3, report)
    assert Checked.read({"step": 3, **event.fields()}) == event
    assert event.fields()["compared_by"] == report.compared_by
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(fp8dist.DivergenceError) as raised:
        manager.check(coherence=True)
    assert raised.value.report.compared_by["at rest"] == 4 * weights
