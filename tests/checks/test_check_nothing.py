"""A check with nothing to compare raises an error on several ranks. One that verifies nothing is not consistent."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import ConfigurationError
from fp8dist.cli.main import USAGE, main
from tests.support.logs import captured_log
from tests.support.ranks import on_ranks
from tests.support.training import make_net


def _refused(call: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        call()
    return str(caught.value)


@on_ranks(2)
def test_a_check_that_has_nothing_to_compare_says_what_to_pass() -> None:
    sharded = FullyShardedDataParallel(nn.Linear(16, 16), device_id=torch.device("cpu"), use_orig_params=True)
    unshared = make_net()
    manager = fp8dist.prepare(unshared, amax_sync=False).attach()
    switched_off = make_net()
    off = fp8dist.prepare(switched_off, group=dist.group.WORLD, enabled=False)
    never_attached = make_net()
    fp8dist.prepare(never_attached, group=dist.group.WORLD, enabled=False)
    with captured_log() as log:
        reports = [off.attach().check(), off.check()]
        reports += [fp8dist.check(never_attached), fp8dist.check(never_attached)]
    said = {
        "plain": _refused(lambda: fp8dist.check(nn.Linear(4, 4))),
        "no parameters": _refused(lambda: fp8dist.check(nn.ReLU(), group=dist.group.WORLD)),
        "shards": _refused(lambda: fp8dist.check(sharded)),
        "left out": _refused(lambda: fp8dist.check(nn.Linear(4, 4), group=dist.group.WORLD, groups={"*": None})),
        "state of its own": _refused(manager.check),
        "state alone": _refused(lambda: manager.check(parameters=False)),
        "module": _refused(lambda: fp8dist.check(unshared)),
        "switched off": [(report.consistent, dict(report.compared)) for report in reports],
        "logged": len(log),
    }
    assert (
        "2 parameters not known to be replicated: name their group or axes, as in fp8dist.check(model, group=…)): "
        "pass " in said["plain"]
    )
    assert "it has no parameters" in said["no parameters"]
    assert "parameters sharded by FSDP1" in said["shards"]
    assert "leave the check out" in said["shards"]
    assert "2 parameters matching *: left out" in said["left out"]
    assert "9 slots that this rank shares with no other" in said["state of its own"]
    assert "pass the DDP module to attach()" in said["state of its own"]
    assert "parameters" not in said["state alone"].split(":")[0]
    assert "9 slots that this rank shares with no other" in said["module"]
    assert said["switched off"] == [(False, {})] * 4
    assert said["logged"] == (2 if dist.get_rank() == 0 else 0)


@on_ranks(4)
def test_one_rank_with_replicas_is_enough_for_all() -> None:
    """Two of four ranks hold replicas, so no rank gets the error, and none is told that all is consistent."""
    rank = dist.get_rank()
    mine = [dist.new_group([0, 1]), dist.new_group([2]), dist.new_group([3])][max(0, rank - 1)]
    report = fp8dist.check(make_net(), groups={"*": mine})
    assert (report.consistent, report.compared) == (False, {"parameter": 6} if rank < 2 else {})
    alone = [dist.new_group([each]) for each in range(4)][rank]
    assert "shared with no other rank" in _refused(lambda: fp8dist.check(make_net(), groups={"*": alone}))


@on_ranks(2)
def test_check_every_says_it_as_well() -> None:
    net = make_net()
    manager = fp8dist.prepare(net, amax_sync=False, check_every=1).attach()
    manager.step()
    assert "otherwise do not use check() and check_every" in _refused(manager.step)


@on_ranks(2)
def test_a_kind_of_which_nothing_is_compared_is_not_consistent() -> None:
    world = dist.group.WORLD
    net, ignored, sharded = make_net(), make_net(), make_net()
    reports = [fp8dist.check(net, group=world, gradients=True)]
    optimizer = torch.optim.SGD(ignored.parameters(), lr=0.1, momentum=0.9)
    ignored(torch.ones(2, 32)).sum().backward()
    optimizer.step()
    reports.append(fp8dist.check(net, group=world, optimizer=optimizer))
    frozen = ignored.first.weight.requires_grad_(False)
    others = [name for name, parameter in ignored.named_parameters() if parameter is not frozen]
    reports.append(fp8dist.check(ignored, group=world, groups=dict.fromkeys(others)))
    manager = fp8dist.prepare(sharded, group=world)
    fully_shard(sharded)
    reports.append(manager.attach(sharded).check())
    gradients, states, frozen, shards = [
        (report.consistent, report.diverged, report.compared, dict(report.unverified)) for report in reports
    ]
    reason = "0 gradients exist now (there are none between zero_grad() and backward)"
    assert gradients == (False, False, {"parameter": 6}, {"gradient": reason})
    assert states[:2] == (False, False)
    assert "of parameters that are not the module's" in states[3]["optimizer"]
    assert frozen[:3] == (False, False, {"parameter": 1})  # The only one that is not trained.
    assert list(frozen[3]) == ["parameter"]
    assert shards[:3] == (False, False, {"slot": 9})
    assert "6 parameters that are DTensors without a Replicate axis" in shards[3]["parameter"]


@on_ranks(4)
def test_some_parameters_do_not_stand_for_all() -> None:
    """Ranks 0 and 1 hold all parameters alike, ranks 2 and 3 all but two. Then a check of the manager's."""
    pairs, alone = [dist.new_group([0, 1]), dist.new_group([2, 3])], [dist.new_group([rank]) for rank in range(4)]
    pair, rank = pairs[dist.get_rank() // 2], dist.get_rank()
    reports = [fp8dist.check(make_net(), groups={"first.*": pair if rank < 2 else alone[rank], "*": pair})]
    frozen = make_net()
    frozen.last.requires_grad_(False)
    reports.append(fp8dist.check(frozen, group=dist.group.WORLD, groups={"first.*": None}))
    net = make_net()
    manager = fp8dist.prepare(net, group=dist.group.WORLD)
    fully_shard(net.first)
    fully_shard(net.branch)
    net.last = DistributedDataParallel(net.last)
    reports.append(manager.attach(net, boundary="manual").check())
    assert manager.verified.last_check is not None
    assert "compared only 2 of 6 parameters" in manager.verified.last_check.text
    assert manager.verified.checked_step is None
    lone = "4 of 6 parameters" if rank >= 2 else "not all parameters on another rank"
    expected = [lone, "2 of 4 trainable parameters", "2 of 6 parameters"]
    assert [report.partial.get("parameter") for report in reports] == expected
    assert len([line for report in reports for line in str(report).splitlines() if "compared only" in line]) == 3


@pytest.mark.parametrize(
    ("which", "compared", "name"),
    [("model", {"parameter": 6, "slot": 9}, "first.weight"), ("part", {"parameter": 2}, "weight")],
)
@on_ranks(2)
def test_an_attached_model_is_compared_as_it_is_wrapped(which: str, compared: dict[str, int], name: str) -> None:
    net = make_net()
    manager = fp8dist.prepare(net, group=dist.group.WORLD)
    ddp = DistributedDataParallel(net)
    manager.attach(ddp)
    checked = net if which == "model" else net.first
    clean = fp8dist.check(checked)
    with torch.no_grad():
        net.first.weight[0, 0] += 5.0 * dist.get_rank()
    report = fp8dist.check(checked, policy="warn")
    assert (clean.consistent, dict(clean.compared), [(finding.kind, finding.name) for finding in report.findings]) == (
        True,
        compared,
        [("parameter", name)],
    )


def test_the_command_line_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / f"{i}.safetensors") for i in range(2)]
    for path in paths:
        save_file({}, path)
    assert main(["check", *paths]) == USAGE
    assert "nothing to compare" in capsys.readouterr().err


@pytest.mark.parametrize("again", [False, True])
@on_ranks(2)
def test_a_wrapper_that_is_gone_is_not_taken_for_equal_parameters(again: bool) -> None:
    model = make_net()
    manager = fp8dist.prepare(model, group=dist.group.WORLD)
    manager.attach(DistributedDataParallel(model))  # Nobody keeps it.
    gc.collect()
    if again:
        wrapper = DistributedDataParallel(model)
        manager.attach(wrapper)
    with torch.no_grad():
        model.first.weight[3, 5] += dist.get_rank()
    with captured_log() as log:
        report, state = manager.check(policy="warn", buffers=True), manager.check(parameters=False)
    found = [(f.kind, f.name, f.index) for f in report.findings]
    assert found == ([("parameter", "first.weight", (3, 5))] if again else [])
    assert (report.consistent, state.consistent) == (False, True)
    gone = "can be found: the module that attach() was given is gone. Keep it, or call attach() with another one"
    unverified = {} if again else {"buffer": f"0 buffers {gone}", "parameter": f"0 parameters {gone}"}
    assert dict(report.unverified) == unverified
    logged = [f"fp8dist: no parameters are compared: 0 parameters {gone}"] if dist.get_rank() == 0 else []
    assert again or [text for _, text in log] == logged
