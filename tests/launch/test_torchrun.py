"""The launcher: its plan from environment variables, the logs of each rank, and nodes that do not join."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from fp8dist.cli.launcher import environment, interface
from fp8dist.cli.launcher.environment import BadVariable, Job
from fp8dist.cli.launcher.plan import Plan
from launch.train_gpt import exits
from tests.support.lab import exits as lab_exits
from tests.support.main_job import (
    EXAMPLE,
    LAUNCH,
    LESSON,
    ROOT,
    TINY,
    TORCHRUN,
    assert_launcher_refused,
    assert_refused,
    start,
)

CHOSEN = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
OURS = (
    "NPROC",
    "NNODES",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MAX_RESTARTS",
    "JOIN_TIMEOUT",
    "LOGS",
    "IFNAME",
    "LOCAL_ADDR",
)
SET_BOTH = "set IFNAME and LOCAL_ADDR to this node's interface and address"
TWO_NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "localhost", "NPROC": "3"}
PROGRAM = ["train.py", "--steps", "7"]


@dataclass(frozen=True)
class Planned:
    """The arguments and environment with which the launcher would start torchrun."""

    arguments: Any  # Parsed by torchrun itself.
    environment: dict[str, str]


def planned(program: Sequence[str] = PROGRAM, **variables: str) -> Planned:
    """Return the plan for ``variables``, without launcher variables from the environment of the tests."""
    own = {*CHOSEN, *OURS, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"}
    environment = {name: value for name, value in os.environ.items() if name not in own} | variables
    plan = Plan.of(Job.read(environment), program, environment)
    return Planned(get_args_parser().parse_args(plan.arguments), environment | plan.variables)


def test_the_program_has_all_that_follows_it() -> None:
    for words in [["--help"], ["-m", "x"], ["--", "--nproc-per-node", "9"], ["a", "--", "-m"], [""]]:
        arguments = planned(["folder/train.py", *words]).arguments
        assert (arguments.module, arguments.training_script) == (False, "folder/train.py")
        assert (arguments.training_script_args, arguments.nproc_per_node) == (words, "2")
        arguments = planned(["-m", "package.module", *words]).arguments
        assert (arguments.module, arguments.training_script) == (True, "package.module")
        assert arguments.training_script_args == words


def test_one_node_stays_for_itself() -> None:
    plan = planned(NPROC="2")
    assert plan.arguments.standalone
    assert (plan.arguments.training_script, plan.arguments.training_script_args) == ("train.py", ["--steps", "7"])
    assert (plan.arguments.nproc_per_node, plan.arguments.max_restarts) == ("2", 0)
    assert (plan.arguments.log_dir, plan.arguments.tee) == (None, "0")
    assert [name for name in CHOSEN if name in plan.environment] == ["OMP_NUM_THREADS"]
    cores = len(os.sched_getaffinity(0))
    assert plan.environment["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    assert planned(NPROC="2", OMP_NUM_THREADS="5").environment["OMP_NUM_THREADS"] == "5"


def test_several_nodes_meet_at_the_first() -> None:
    plan = planned(**TWO_NODES)
    arguments = plan.arguments
    assert (arguments.nnodes, arguments.node_rank, arguments.nproc_per_node) == ("2", 1, "3")
    assert (arguments.rdzv_backend, arguments.master_addr, arguments.master_port) == ("static", "localhost", 29500)
    assert (arguments.rdzv_conf, arguments.local_addr) == ("timeout=600", "127.0.0.1")
    assert plan.environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert plan.environment["NCCL_SOCKET_IFNAME"] == "=lo"
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in plan.environment


def test_nodes_that_may_meet_again() -> None:
    for node, is_host in [("0", "true"), ("1", "false")]:
        more = {"NODE_RANK": node, "MAX_RESTARTS": "3", "MASTER_PORT": "2345", "JOIN_TIMEOUT": "90"}
        plan = planned(**{**TWO_NODES, **more})
        arguments = plan.arguments
        assert (arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.max_restarts) == (
            "c10d",
            "localhost:2345",
            3,
        )
        assert arguments.rdzv_conf == f"is_host={is_host},join_timeout=90,read_timeout=90"
        assert arguments.local_addr == "127.0.0.1"
        assert plan.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_what_the_user_has_set_stays() -> None:
    own = {"GLOO_SOCKET_IFNAME": "ib0", "JOIN_TIMEOUT": "20", "LOCAL_ADDR": "10.1.2.3", "IFNAME": "lo,ib1"}
    plan = planned(**TWO_NODES, **own)
    assert plan.environment["GLOO_SOCKET_IFNAME"] == "ib0"
    assert plan.environment["NCCL_SOCKET_IFNAME"] == "=lo,ib1"
    assert (plan.arguments.local_addr, plan.arguments.rdzv_conf) == ("10.1.2.3", "timeout=20")
    # With IFNAME and LOCAL_ADDR set, nothing is looked up and IPv6 is accepted.
    own = {"MASTER_ADDR": "fd00::9", "IFNAME": "ib0", "LOCAL_ADDR": "fd00::1"}
    plan = planned(**{**TWO_NODES, **own})
    assert (plan.arguments.master_addr, plan.arguments.local_addr) == ("fd00::9", "fd00::1")
    assert [plan.environment[name] for name in CHOSEN[:2]] == ["ib0", "=ib0"]
    # With everything set, nothing is looked up: this name has no address.
    said = {"MASTER_ADDR": "no-such-host.invalid", "NCCL_SOCKET_IFNAME": "ib", "LOCAL_ADDR": "fd00::1"}
    plan = planned(**{**TWO_NODES, **said}, GLOO_SOCKET_IFNAME="ib0")
    assert plan.environment["NCCL_SOCKET_IFNAME"] == "ib"
    assert (plan.arguments.master_addr, plan.arguments.local_addr) == ("no-such-host.invalid", "fd00::1")


def test_a_folder_for_the_logs_of_each_node() -> None:
    plan = planned(**TWO_NODES, LOGS="logs of it")
    assert (plan.arguments.log_dir, plan.arguments.tee) == ("logs of it/node-1", "3")
    assert plan.environment["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] == "[${rank}]: "
    assert planned(LOGS="logs").arguments.log_dir == "logs"


def test_interfaces_are_asked_for_only_when_needed() -> None:
    """An IFNAME that does not exist is an error, unless LOCAL_ADDR is set too."""
    with pytest.raises(
        BadVariable, match=r"^IFNAME none0: this node has no none0 with an IPv4 address, only (.+, )?lo"
    ):
        planned(**TWO_NODES, IFNAME="none0")
    assert planned(**TWO_NODES, IFNAME="none0", LOCAL_ADDR="10.1.2.3").environment["GLOO_SOCKET_IFNAME"] == "none0"


def test_a_variable_that_cannot_be_used() -> None:
    for variables, message in [
        ({"JOIN_TIMEOUT": "soon"}, "JOIN_TIMEOUT must be a whole number of at least 1, got soon"),
        ({"NPROC": "0"}, "NPROC must be a whole number of at least 1, got 0"),
        ({"NPROC": "gpu"}, "NPROC must be a whole number of at least 1, got gpu"),
        ({"NNODES": "1:4"}, "NNODES must be a whole number of at least 1, got 1:4"),
        ({"MAX_RESTARTS": "-1"}, "MAX_RESTARTS must be a whole number of at least 0, got -1"),
        ({"NODE_RANK": "2"}, "NODE_RANK must be below NNODES, which is 2, got 2"),
        ({"NODE_RANK": ""}, "NNODES is 2: set NODE_RANK to the number of this node, from 0"),
        ({"MASTER_ADDR": ""}, "NNODES is 2: set MASTER_ADDR to the host of node 0"),
        ({"MASTER_ADDR": "fd00::9"}, f"MASTER_ADDR fd00::9 is an IPv6 address: {SET_BOTH}"),
    ]:
        with pytest.raises(BadVariable) as refused:
            planned(**{**TWO_NODES, **variables})
        assert str(refused.value) == message


def test_the_launcher_needs_no_torch_until_it_starts_the_agent() -> None:
    """The launcher's own modules do not import torch. ``import fp8dist`` does, but torchrun.sh must report a mistake
    without waiting for it."""
    folder = ROOT / "fp8dist/cli/launcher"
    bare = (
        "import sys, types\n"
        "for name in ('fp8dist', 'fp8dist.cli', 'fp8dist.cli.launcher'): sys.modules[name] = types.ModuleType(name)\n"
        f"sys.modules['fp8dist.cli.launcher'].__path__ = [{str(folder)!r}]\n"
        "import fp8dist.cli.launcher.plan\n"
    )
    for command in (["-c", bare], ["-m", "launch.train_gpt.options"]):
        without = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
        done = subprocess.run([sys.executable, *command], cwd=ROOT, env=without, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert " fp8dist.cli.launcher.plan\n" in done.stderr or "launch.train_gpt.data" in done.stderr
        assert "torch" not in {line.split("|")[-1].strip() for line in done.stderr.splitlines()}


def test_the_job_and_the_launcher_mean_the_same_by_a_status() -> None:
    assert lab_exits.FAILED_COLLECTIVE == interface.FAILED_COLLECTIVE
    assert exits.MISTAKE == environment.MISTAKE


@pytest.mark.parametrize(("listed", "ranks"), [("exit 9", 2), ("echo GPU 0; echo GPU 1; echo GPU 2", 3), ("", 2)])
def test_a_node_has_a_rank_per_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, ranks: int) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\n[ "$*" = --list-gpus ] || exit 1\n{listed}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert Job.read({}).nproc == ranks
    assert Job.read({"NPROC": "5", "NNODES": "3", "NODE_RANK": "0", "MASTER_ADDR": "a"}).ranks == 15


def test_flags_are_checked_for_the_ranks_of_all_nodes(tmp_path: Path) -> None:
    """The check comes before this node waits for the other one."""
    two_nodes = {**TWO_NODES, "NODE_RANK": "0", "NPROC": "1", "JOIN_TIMEOUT": "1"}
    done = start(EXAMPLE, "--parallel", "none", "--out", str(tmp_path), **two_nodes)
    assert_refused(done, "--parallel none is for one rank, got 2")


@pytest.mark.slow
def test_nodes_that_cannot_start(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path))
    assert_launcher_refused(start(EXAMPLE, *out, **{**TWO_NODES, "NODE_RANK": ""}), "NNODES is 2: set NODE_RANK to")
    program = str(LESSON)
    done = start(LAUNCH, program, **TWO_NODES, IFNAME="none0")
    assert_launcher_refused(done, "IFNAME none0: this node has no none0")
    done = start(LAUNCH, program, **{**TWO_NODES, "MASTER_ADDR": "no-such-host.invalid", "JOIN_TIMEOUT": "1"})
    assert done.returncode == 5
    assert done.stderr.splitlines()[-1].startswith("fp8dist launch: MASTER_ADDR no-such-host.invalid: ")


# Runs in its own network and mount namespaces, so it may change the network and /etc.
IN_A_NAMESPACE = """
import os, subprocess
from fp8dist.cli.launcher.interface import Unreachable, chosen

def do(commands):
    subprocess.run(["bash", "-euc", commands], check=True)

def ask(host, patience=0.0, name=None):
    try:
        print(*chosen(host, patience, name))
    except (ValueError, Unreachable) as error:
        print(f"{type(error).__name__}: {error}")

do('''
ip link set lo up
ip link add trunk0 type veth peer name end0
ip link add trunk01 type veth peer name end01
ip link set end0 up
ip link set end01 up
ip address add 10.9.1.2/24 dev trunk0
ip address add 10.9.1.7/24 dev trunk0
ip address add 10.9.2.2/24 dev trunk01
ip link set trunk0 up
ip link set trunk01 up
''')
ask("10.9.1.9")                   # Another node.
ask("10.9.2.2")                   # Node 0, by its own address.
ask("10.9.1.7")                   # The same, the second of its interface.
ask("10.9.1.9", 0.0, "trunk01")   # As the caller wants it.
ask("10.10.0.1")                  # Nothing leads there.
do('mount --bind "$HOSTS" /etc/hosts; mount --bind "$SWITCH" /etc/nsswitch.conf')
ask("node0")                      # Its own name is the loopback's, as Debian has it, and nothing leads elsewhere.
do("ip route add default via 10.9.2.1")
ask("node0")
ask("127.0.0.1")                  # All ranks on one machine.
ask("node6", 60.0)                # Its name has an IPv6 address, and no other.
do("ip address add 10.9.3.1/32 dev lo")
ask("10.9.3.1")                   # As node 0 of a network whose routes lead to hosts.
do("ip route add 10.9.4.0/24 via 10.9.2.1 src 10.9.3.1")
ask("10.9.4.1")                   # As another node of it.
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2")
def test_the_interface_is_the_one_that_leads_to_node_0(tmp_path: Path) -> None:
    hosts, switch = tmp_path / "hosts", tmp_path / "nsswitch.conf"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 node0\nfd00::9 node6\n")
    switch.write_text("hosts: files\n")  # No DNS: a name server that does not answer must not matter.
    done = subprocess.run(
        ["unshare", "--net", "--mount", sys.executable, "-c", IN_A_NAMESPACE],
        env={**os.environ, "HOSTS": str(hosts), "SWITCH": str(switch)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "trunk0 10.9.1.2",
        "trunk01 10.9.2.2",
        "trunk0 10.9.1.7",
        "trunk01 10.9.2.2",
        "Unreachable: MASTER_ADDR 10.10.0.1 (10.10.0.1) cannot be reached: Network is unreachable",
        "BadVariable: MASTER_ADDR node0 is 127.0.1.1 on this node, unreachable for others: set MASTER_ADDR "
        "to an IP address",
        "trunk01 10.9.2.2",
        "lo 127.0.0.1",
        f"BadVariable: MASTER_ADDR node6 has IPv6 addresses only: {SET_BOTH}",
        "BadVariable: MASTER_ADDR 10.9.3.1 (10.9.3.1) is reached from 10.9.3.1, an address of lo: set IFNAME",
        "BadVariable: MASTER_ADDR 10.9.4.1 (10.9.4.1) is reached from 10.9.3.1, an address of lo: set IFNAME",
    ]


def test_all_interfaces_with_an_address_are_known() -> None:
    assert interface.addresses()["127.0.0.1"] == "lo"
    if shutil.which("ip") is None:
        return
    shown = subprocess.run(["ip", "-json", "-4", "address"], capture_output=True, text=True, check=True).stdout
    expected = {address["local"]: link["ifname"] for link in json.loads(shown) for address in link.get("addr_info", [])}
    assert interface.addresses() == expected


@pytest.mark.long
def test_with_logs_a_rank_that_is_killed_is_told_as_without(tmp_path: Path) -> None:
    flags = ["--precision", "fp32", "--inject", "kill-backward:1:3", "--out", str(tmp_path / "out")]
    done = start(TORCHRUN, *TINY, *flags, LOGS=str(tmp_path / "logs"))
    assert done.returncode == 128 + 9, done.stdout + done.stderr
    (said,) = (tmp_path / "logs").glob("*/attempt_0/0/stderr.log")
    (line,) = [line for line in said.read_text().splitlines() if line.startswith("rank 0: step 3: ")]
    assert re.search(r": no FP8 manager \(GPT\): a collective failed", line)
    assert "Traceback" not in done.stderr
    assert f"[0]: {line}\n" in done.stderr
    (said,) = (tmp_path / "logs").glob("*/attempt_0/1/stderr.log")
    assert "--inject kill-backward:1:3: SIGKILL" in said.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("restarts", ["0", "1"])
@pytest.mark.parametrize("node", ["0", "1"])
def test_a_node_that_is_alone_gives_up(node: str, restarts: str, free_port: str) -> None:
    variables = {**TWO_NODES, "NODE_RANK": node, "MAX_RESTARTS": restarts, "NPROC": "1", "MASTER_PORT": free_port}
    done = start(LAUNCH, str(LESSON), JOIN_TIMEOUT="1", **variables)
    assert done.returncode == 5, done.stdout + done.stderr
    said = done.stderr.splitlines()[-1]
    assert said.startswith("fp8dist launch: another node has ended the job, or cannot be reached: ")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("restarts", ["0", "1"])
def test_a_port_in_use_is_a_mistake_on_node_0(restarts: str) -> None:
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        variables = {**TWO_NODES, "NODE_RANK": "0", "MAX_RESTARTS": restarts, "NPROC": "1", "MASTER_PORT": port}
        done = start(LAUNCH, str(LESSON), JOIN_TIMEOUT="20", **variables)
    assert done.returncode == 2, done.stdout + done.stderr
    said = done.stderr.splitlines()[-1]
    assert said == f"fp8dist launch: error: MASTER_PORT {port} is in use on this node: set another port on all nodes"
    assert "Traceback" not in done.stderr


@pytest.fixture
def free_port() -> str:
    """Return an unused port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["--steps", "3", "--help"]])
def test_the_scripts_help_has_both_of_its_lives(words: list[str]) -> None:
    """It starts programs, and without one the example job."""
    done = subprocess.run([ROOT / "launch/torchrun.sh", *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Start a training program on every rank of this node")
    for text in ("torchrun.sh train.py --its-flags", "-m package.module", "example job", "PYTHON ", "--save-every N"):
        assert text in done.stdout, text
    assert not re.search("^#|^set -", done.stdout, re.M)
