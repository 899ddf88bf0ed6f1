"""A check with nothing to compare raises an error on several ranks; on one rank it is consistent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import fp8dist
from fp8dist import ConfigurationError
from fp8dist.cli.main import USAGE, main
from tests.support.logs import captured_log
from tests.support.ranks import RankPool
from tests.support.training import make_net


def _refused(call: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        call()
    return str(caught.value)


def _nothing() -> Any:
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
    return {
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


def test_a_check_that_has_nothing_to_compare_says_what_to_pass(two_ranks: RankPool) -> None:
    for rank, said in enumerate(two_ranks.run(_nothing)):
        assert "2 parameters not known to be replicated: name their group): pass group=" in said["plain"]
        assert "it has no parameters" in said["no parameters"]
        assert "parameters sharded by FSDP1" in said["shards"]
        assert "leave the check out" in said["shards"]
        assert "2 parameters matching *: left out" in said["left out"]
        assert "9 slots that this rank shares with no other" in said["state of its own"]
        assert "pass the DDP module to attach()" in said["state of its own"]
        assert "parameters" not in said["state alone"].split(":")[0]
        assert "9 slots that this rank shares with no other" in said["module"]
        assert said["switched off"] == [(True, {})] * 4
        assert said["logged"] == (2 if rank == 0 else 0)


def _some_ranks() -> Any:
    """Two of four ranks hold replicas, so no rank gets the error."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2]), dist.new_group([3])]
    mine = pairs[max(0, dist.get_rank() - 1)]
    report = fp8dist.check(make_net(), groups={"*": mine})
    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    return report.consistent, dict(report.compared), _refused(lambda: fp8dist.check(make_net(), groups={"*": alone}))


def test_one_rank_with_replicas_is_enough_for_all(four_ranks: RankPool) -> None:
    results = four_ranks.run(_some_ranks)
    assert [result[:2] for result in results] == [(True, {"parameter": 6})] * 2 + [(True, {})] * 2
    assert all("shared with no other rank" in text for *_, text in results)


def _check_every() -> str:
    net = make_net()
    manager = fp8dist.prepare(net, amax_sync=False, check_every=1).attach()
    manager.step()
    return _refused(manager.step)


def test_check_every_says_it_as_well(two_ranks: RankPool) -> None:
    assert all("otherwise do not use check() and check_every" in text for text in two_ranks.run(_check_every))


def _without_gradients() -> Any:
    net = make_net()
    report = fp8dist.check(net, group=dist.group.WORLD, gradients=True)
    return dict(report.compared), report.skipped


def test_a_report_tells_of_gradients_that_do_not_exist(two_ranks: RankPool) -> None:
    for compared, skipped in two_ranks.run(_without_gradients):
        assert compared == {"parameter": 6}
        assert skipped == ("0 gradients exist now (there are none between zero_grad() and backward)",)


def test_one_rank_is_consistent() -> None:
    report = fp8dist.check(make_net())
    assert report.consistent
    assert report.compared == {}
    assert str(report) == "consistent (nothing was compared)\nnot compared: there is one rank, or no process group"


def test_the_command_line_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / f"{i}.safetensors") for i in range(2)]
    for path in paths:
        save_file({}, path)
    assert main(["check", *paths]) == USAGE
    assert "nothing to compare" in capsys.readouterr().err
