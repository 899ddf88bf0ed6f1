"""The launcher: its plan from environment variables, the logs of each rank, and nodes that do not join."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import get_args_parser

from fp8dist.cli.launcher import agent, environment, interface
from fp8dist.cli.launcher.environment import BadVariable, Job
from fp8dist.cli.launcher.plan import Plan
from launch.train_gpt import exits
from tests.support.lab import exits as lab_exits
from tests.support.main_job import EXAMPLE, LAUNCH, LESSON, ROOT, TINY, TORCHRUN, assert_launcher_refused, start
from tests.support.slurm import free_ports
from tests.support.suite import crossed

CHOSEN = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
SET_BOTH = "set IFNAME and LOCAL_ADDR to this node's interface and address"
TWO_NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "localhost", "NPROC": "3"}
PROGRAM = ["train.py", "--steps", "7"]


def planned(program: Sequence[str] = PROGRAM, **variables: str) -> tuple[Any, dict[str, str]]:
    """Return torchrun's arguments, parsed by torchrun itself, and its environment."""
    given = {"PATH": os.environ["PATH"], **variables}
    plan = Plan.of(Job.read(given), program, given)
    return get_args_parser().parse_args(plan.arguments), given | plan.variables


def test_the_program_has_all_that_follows_it() -> None:
    for words in [["--help"], ["-m", "x"], ["--", "--nproc-per-node", "9"], ["a", "--", "-m"], [""]]:
        arguments, _ = planned(["folder/train.py", *words])
        assert (arguments.module, arguments.training_script) == (False, "folder/train.py")
        assert (arguments.training_script_args, arguments.nproc_per_node) == (words, "2")
        arguments, _ = planned(["-m", "package.module", *words])
        assert (arguments.module, arguments.training_script) == (True, "package.module")
        assert arguments.training_script_args == words


RESTARTED = {**TWO_NODES, "MAX_RESTARTS": "3", "MASTER_PORT": "2345", "JOIN_TIMEOUT": "90"}
AGAIN = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:2345", "max_restarts": 3, "local_addr": "127.0.0.1"}
IPV6 = {"IFNAME": "ib0", "LOCAL_ADDR": "fd00::1"}
OWN: dict[str, Any] = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib"}
UNKNOWN = "no-such-host.invalid"

PLANS: dict[str, tuple[dict[str, str], dict[str, Any], dict[str, str | None]]] = {
    "one node stays for itself": (
        {"NPROC": "2"},
        {"standalone": True, "nproc_per_node": "2", "max_restarts": 0, "log_dir": None, "tee": "0"},
        {**dict.fromkeys(CHOSEN), "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2))},
    ),
    "the user's threads": ({"NPROC": "2", "OMP_NUM_THREADS": "5"}, {}, {"OMP_NUM_THREADS": "5"}),
    "several nodes meet at the first": (
        TWO_NODES,
        {
            **{"nnodes": "2", "node_rank": 1, "nproc_per_node": "3", "rdzv_backend": "static"},
            **{"master_addr": "localhost", "master_port": 29500, "rdzv_conf": "timeout=600", "local_addr": "127.0.0.1"},
        },
        {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": None},
    ),
    "node 0 that may meet the others again": (
        {**RESTARTED, "NODE_RANK": "0"},
        {**AGAIN, "rdzv_conf": "is_host=true,join_timeout=90,read_timeout=90"},
        {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    ),
    "another node that may": (RESTARTED, {**AGAIN, "rdzv_conf": "is_host=false,join_timeout=90,read_timeout=90"}, {}),
    "the user's interfaces": (
        {**TWO_NODES, "GLOO_SOCKET_IFNAME": "ib0", "JOIN_TIMEOUT": "20", "LOCAL_ADDR": "10.1.2.3", "IFNAME": "lo,ib1"},
        {"local_addr": "10.1.2.3", "rdzv_conf": "timeout=20"},
        {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=lo,ib1"},
    ),
    "the user's address": (
        {**TWO_NODES, "LOCAL_ADDR": "10.1.2.3"},
        {"local_addr": "10.1.2.3"},
        {"GLOO_SOCKET_IFNAME": "lo"},
    ),
    # With IFNAME and LOCAL_ADDR set, nothing is looked up and IPv6 is accepted.
    "IPv6": (
        {**TWO_NODES, **IPV6, "MASTER_ADDR": "fd00::9"},
        {"master_addr": "fd00::9", "local_addr": "fd00::1"},
        {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"},
    ),
    "an interface that does not exist": ({**TWO_NODES, "IFNAME": "none0", "LOCAL_ADDR": "10.1.2.3"}, {}, {}),
    "a host that has no address": (
        {**TWO_NODES, **OWN, "MASTER_ADDR": UNKNOWN, "LOCAL_ADDR": "fd00::1"},
        {"master_addr": UNKNOWN, "local_addr": "fd00::1"},
        OWN,
    ),
    "a folder for the logs of each node": (
        {**TWO_NODES, "LOGS": "logs of it"},
        {"log_dir": "logs of it/node-1", "tee": "3"},
        {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}]: "},
    ),
    "a folder for the logs of one node": ({"LOGS": "logs"}, {"log_dir": "logs"}, {}),
}
"""Variables, and what torchrun then gets: some of its arguments and of its environment."""


@pytest.mark.parametrize("name", PLANS)
def test_the_plan(name: str) -> None:
    variables, arguments, environment = PLANS[name]
    found, seen = planned(**variables)
    assert {of: getattr(found, of) for of in arguments} == arguments
    assert {of: seen.get(of) for of in environment} == environment


def test_a_variable_that_cannot_be_used() -> None:
    for variables, message in [
        ({"JOIN_TIMEOUT": "soon"}, "JOIN_TIMEOUT must be a whole number of at least 1, got soon"),
        ({"NPROC": "0"}, "NPROC must be a whole number of at least 1, got 0"),
        ({"NPROC": "gpu"}, "NPROC must be a whole number of at least 1, got gpu"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT must be at most 65535, got 70000"),
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
    unknown = r"^IFNAME none0: this node has no none0 with an IPv4 address, only (.+, )?lo"
    with pytest.raises(BadVariable, match=unknown):
        planned(**TWO_NODES, IFNAME="none0")


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


def test_a_signal_to_the_launcher_is_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(arguments: list[str]) -> None:
        raise SignalException("Process 7 got signal: 15", signal.SIGTERM)

    monkeypatch.setattr(agent, "main", stopped)
    assert agent.run([]) == 143


THREE = "echo GPU 0; echo '  MIG 1g.18gb'; echo GPU 1; echo GPU 2"


@pytest.mark.parametrize(
    ("listed", "visible", "ranks"),
    [
        ("exit 9", None, 2), (THREE, None, 3), ("", None, 2), ("exit 9", "0", 2),
        (THREE, "2", 1), (THREE, "0,2", 2), (THREE, "1,-1,2", 1), (THREE, "", 2), (THREE, "0,1,2,3", 3),
    ],
)  # fmt: skip
def test_a_node_has_a_rank_per_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, visible: str | None, ranks: int
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\n[ "$*" = --list-gpus ] || exit 1\n{listed}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert Job.read({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}).nproc == ranks
    assert Job.read({"NPROC": "5", "NNODES": "3", "NODE_RANK": "0", "MASTER_ADDR": "a"}).ranks == 15


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
@crossed(node=["0", "1"], restarts=["0", "1"])
def test_a_node_that_is_alone_gives_up(node: str, restarts: str) -> None:
    (port,) = free_ports(1)
    more = {"NODE_RANK": node, "MAX_RESTARTS": restarts, "NPROC": "1", "MASTER_PORT": str(port)}
    variables = {**TWO_NODES, **more}
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


def test_the_scripts_help_has_both_of_its_lives() -> None:
    """It starts programs, and without one the example job."""
    shown = set()
    for words in (["--help"], ["-h"], ["--steps", "3", "--help"]):
        done = subprocess.run([ROOT / "launch/torchrun.sh", *words], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        shown.add(done.stdout)
    assert len(shown) == 1
    assert done.stdout.startswith("Start a training program on every rank of this node")
    for text in ("torchrun.sh train.py --its-flags", "-m package.module", "example job", "PYTHON ", "--save-every N"):
        assert text in done.stdout, text
    assert not re.search("^#|^set -", done.stdout, re.M)
