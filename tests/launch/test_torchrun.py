"""launch/torchrun.sh: what it makes of its environment, what is written for each rank, and nodes that do not come."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from tests.support.main_job import ROOT, TINY, TORCHRUN, finish, start

RECORDER = """#!/bin/sh
# Python, but torchrun.py is not run: what it was to run with is written down.
case $1 in
    */torchrun.py) exec {python} -c '
import json, os, sys
open("{record}", "w").write(json.dumps([sys.argv[1:], dict(os.environ)]))
' "$@" ;;
    *) exec {python} "$@" ;;
esac
"""

CHOSEN = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
OURS = ("NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "MAX_RESTARTS", "JOIN_TIMEOUT", "LOGS", "IFNAME")
SET_BOTH = "set IFNAME and LOCAL_ADDR to this node's interface and address"
TWO_NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "localhost", "NPROC": "3"}


@dataclass(frozen=True)
class Started:
    """What torchrun.sh said, and how it was about to run torchrun.py."""

    done: subprocess.CompletedProcess[str]
    arguments: Any  # As torchrun itself reads them.
    environment: dict[str, str]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run torchrun.sh with these variables and no others of its own, up to where torchrun would start."""
    for name in (*CHOSEN, *OURS, "LOCAL_ADDR", "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"):
        monkeypatch.delenv(name, raising=False)
    record, python = tmp_path / "record.json", tmp_path / "python"
    python.write_text(RECORDER.format(python=sys.executable, record=record))
    python.chmod(0o755)

    def run(**variables: str) -> Started:
        record.unlink(missing_ok=True)
        environment = {**os.environ, "PYTHON": str(python), **variables}
        command = [*TORCHRUN, "--steps", "7"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment, check=False
        )
        if not record.exists():
            return Started(done, None, {})
        (script, *arguments), environment = json.loads(record.read_text())
        assert Path(script) == ROOT / "launch/torchrun.py"
        parsed = get_args_parser().parse_args(arguments)
        assert Path(parsed.training_script) == ROOT / "launch/train_gpt.py"
        assert parsed.training_script_args == ["--steps", "7"]
        return Started(done, parsed, environment)

    return run


def test_one_node_stays_for_itself(launch: Any) -> None:
    started = launch(NPROC="2")
    assert started.arguments.standalone
    assert (started.arguments.nproc_per_node, started.arguments.max_restarts) == ("2", 0)
    assert (started.arguments.log_dir, started.arguments.tee) == (None, "0")
    assert [name for name in CHOSEN if name in started.environment] == ["OMP_NUM_THREADS"]
    cores = len(os.sched_getaffinity(0))
    assert started.environment["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    assert launch(NPROC="2", OMP_NUM_THREADS="5").environment["OMP_NUM_THREADS"] == "5"


def test_several_nodes_meet_at_the_first(launch: Any) -> None:
    started = launch(**TWO_NODES)
    arguments = started.arguments
    assert (arguments.nnodes, arguments.node_rank, arguments.nproc_per_node) == ("2", 1, "3")
    assert (arguments.rdzv_backend, arguments.master_addr, arguments.master_port) == ("static", "localhost", 29500)
    assert (arguments.rdzv_conf, arguments.local_addr) == ("timeout=600", "127.0.0.1")
    assert started.environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert started.environment["NCCL_SOCKET_IFNAME"] == "=lo"
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in started.environment


@pytest.mark.parametrize(("node", "is_host"), [("0", "true"), ("1", "false")])
def test_nodes_that_may_meet_again(launch: Any, node: str, is_host: str) -> None:
    more = {"NODE_RANK": node, "MAX_RESTARTS": "3", "MASTER_PORT": "2345", "JOIN_TIMEOUT": "90"}
    started = launch(**{**TWO_NODES, **more})
    arguments = started.arguments
    assert (arguments.rdzv_backend, arguments.rdzv_endpoint, arguments.max_restarts) == ("c10d", "localhost:2345", 3)
    assert arguments.rdzv_conf == f"is_host={is_host},join_timeout=90,read_timeout=90"
    assert arguments.local_addr == "127.0.0.1"
    assert started.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_what_the_user_has_set_stays(launch: Any) -> None:
    own = {"GLOO_SOCKET_IFNAME": "ib0", "JOIN_TIMEOUT": "20", "LOCAL_ADDR": "10.1.2.3", "IFNAME": "lo,ib1"}
    started = launch(**TWO_NODES, **own)
    assert started.environment["GLOO_SOCKET_IFNAME"] == "ib0"
    assert started.environment["NCCL_SOCKET_IFNAME"] == "=lo,ib1"
    assert (started.arguments.local_addr, started.arguments.rdzv_conf) == ("10.1.2.3", "timeout=20")
    # With an interface and an address nothing is asked, nor is IPv6 refused.
    own = {"MASTER_ADDR": "fd00::9", "IFNAME": "ib0", "LOCAL_ADDR": "fd00::1"}
    started = launch(**{**TWO_NODES, **own})
    assert (started.arguments.master_addr, started.arguments.local_addr) == ("fd00::9", "fd00::1")
    assert [started.environment[name] for name in CHOSEN[:2]] == ["ib0", "=ib0"]
    # Where all is said, nothing is asked: this name has no address.
    said = {"MASTER_ADDR": "no-such-host.invalid", "NCCL_SOCKET_IFNAME": "ib", "LOCAL_ADDR": "fd00::1"}
    started = launch(**{**TWO_NODES, **said}, GLOO_SOCKET_IFNAME="ib0")
    assert started.environment["NCCL_SOCKET_IFNAME"] == "ib"
    assert (started.arguments.master_addr, started.arguments.local_addr) == ("no-such-host.invalid", "fd00::1")


def test_a_folder_for_the_logs_of_each_node(launch: Any) -> None:
    started = launch(**TWO_NODES, LOGS="logs of it")
    assert (started.arguments.log_dir, started.arguments.tee) == ("logs of it/node-1", "3")
    assert started.environment["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] == "[${rank}]: "
    assert launch(LOGS="logs").arguments.log_dir == "logs"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "status", "message"),
    [
        ({"JOIN_TIMEOUT": "soon"}, 2, "torchrun.sh: error: JOIN_TIMEOUT must be a whole number of seconds, got soon\n"),
        ({"IFNAME": "none0"}, 2, "train_gpt.py: error: IFNAME none0: this node has no none0 with an IPv4 address, but"),
        ({"MASTER_ADDR": "fd00::9"}, 2, f"train_gpt.py: error: MASTER_ADDR fd00::9 is an IPv6 address: {SET_BOTH}\n"),
        ({"NODE_RANK": ""}, 1, "set NODE_RANK to the number of this node, from 0\n"),
        ({"MASTER_ADDR": ""}, 1, "set MASTER_ADDR to the host of node 0\n"),
        ({"MASTER_ADDR": "no-such-host.invalid", "JOIN_TIMEOUT": "1"}, 5, "interface.py: MASTER_ADDR no-such-host"),
    ],
)
def test_nodes_that_cannot_start(launch: Any, variables: dict[str, str], status: int, message: str) -> None:
    started = launch(**{**TWO_NODES, **variables})
    assert started.done.returncode == status
    assert message in started.done.stderr
    assert started.arguments is None


IN_A_NAMESPACE = """
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
export PYTHON
ask() { "$PYTHON" launch/interface.py "$@" 2>&1; }
ask 10.9.1.9 0           # Another node.
ask 10.9.2.2 0           # Node 0, by its own address.
ask 10.9.1.7 0           # The same, the second of its interface.
ask 10.9.1.9 0 trunk01   # As the caller wants it.
ask 10.10.0.1 0          # Nothing leads there.
mount --bind "$HOSTS" /etc/hosts
mount --bind "$SWITCH" /etc/nsswitch.conf
ask node0 0              # Its own name is the loopback's, as Debian has it, and nothing leads elsewhere.
ip route add default via 10.9.2.1
ask node0 0
ask 127.0.0.1 0          # All ranks on one machine.
ask node6 60             # Its name has an IPv6 address, and no other.
ip address add 10.9.3.1/32 dev lo
ask 10.9.3.1 0           # As node 0 of a network whose routes lead to hosts.
ip route add 10.9.4.0/24 via 10.9.2.1 src 10.9.3.1
ask 10.9.4.1 0           # As another node of it.
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and iproute2")
def test_the_interface_is_the_one_that_leads_to_node_0(tmp_path: Path) -> None:
    hosts, switch = tmp_path / "hosts", tmp_path / "nsswitch.conf"
    hosts.write_text("127.0.0.1 localhost\n127.0.1.1 node0\nfd00::9 node6\n")
    switch.write_text("hosts: files\n")  # A name server that does not answer is no reason to give up.
    done = subprocess.run(
        ["unshare", "--net", "--mount", "bash", "-c", IN_A_NAMESPACE],
        env={**os.environ, "PYTHON": sys.executable, "HOSTS": str(hosts), "SWITCH": str(switch)},
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
        "interface.py: MASTER_ADDR 10.10.0.1 (10.10.0.1) cannot be reached: Network is unreachable",
        "train_gpt.py: error: MASTER_ADDR node0 is 127.0.1.1 on this node, where no other reaches it: set MASTER_ADDR "
        "to an address",
        "trunk01 10.9.2.2",
        "lo 127.0.0.1",
        f"train_gpt.py: error: MASTER_ADDR node6 has IPv6 addresses only: {SET_BOTH}",
        "train_gpt.py: error: MASTER_ADDR 10.9.3.1 (10.9.3.1) is reached from 10.9.3.1, which lo has: set IFNAME",
        "train_gpt.py: error: MASTER_ADDR 10.9.4.1 (10.9.4.1) is reached from 10.9.3.1, which lo has: set IFNAME",
    ]


def test_all_interfaces_with_an_address_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "launch"))
    interface = importlib.import_module("interface")
    assert interface.addresses()["127.0.0.1"] == "lo"
    if shutil.which("ip") is None:
        return
    shown = subprocess.run(["ip", "-json", "-4", "address"], capture_output=True, text=True, check=True).stdout
    expected = {address["local"]: link["ifname"] for link in json.loads(shown) for address in link.get("addr_info", [])}
    assert interface.addresses() == expected


@pytest.mark.slow
def test_each_rank_has_its_own_log(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    run = finish(tmp_path / "out", TORCHRUN, *TINY, LOGS=str(logs))
    (first,) = logs.glob("*/attempt_0/0/stdout.log")
    (second,) = logs.glob("*/attempt_0/1/stdout.log")
    assert second.read_text() == ""  # Rank 0 speaks for all.
    table = first.read_text().splitlines()
    assert any("FP8 state identical on all ranks" in line for line in table)
    assert all(f"[0]: {line}\n" in run.output for line in table)


@pytest.mark.slow
def test_with_logs_a_rank_that_is_killed_is_told_as_without(tmp_path: Path) -> None:
    flags = ["--inject", "kill-backward:1:3", "--out", str(tmp_path / "out")]
    done = start(TORCHRUN, *TINY, *flags, LOGS=str(tmp_path / "logs"))
    assert done.returncode == 128 + 9, done.stdout + done.stderr
    (said,) = (tmp_path / "logs").glob("*/attempt_0/0/stderr.log")
    (line,) = [line for line in said.read_text().splitlines() if line.startswith("rank 0: step 3: ")]
    assert f"[0]: {line}\n" in done.stderr
    (said,) = (tmp_path / "logs").glob("*/attempt_0/1/stderr.log")
    assert "--inject kill-backward:1:3: SIGKILL" in said.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("restarts", ["0", "1"])
@pytest.mark.parametrize("node", ["0", "1"])
def test_a_node_that_is_alone_gives_up(tmp_path: Path, node: str, restarts: str, free_port: str) -> None:
    variables = {**TWO_NODES, "NODE_RANK": node, "MAX_RESTARTS": restarts, "NPROC": "1", "MASTER_PORT": free_port}
    done = start(TORCHRUN, *TINY, "--out", str(tmp_path), JOIN_TIMEOUT="2", **variables)
    assert done.returncode == 5, done.stdout + done.stderr
    said = done.stderr.splitlines()[-1]
    assert said.startswith("torchrun.py: another node has ended the job, or cannot be reached: ")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("restarts", ["0", "1"])
def test_a_port_in_use_is_a_mistake_on_node_0(tmp_path: Path, restarts: str) -> None:
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        variables = {**TWO_NODES, "NODE_RANK": "0", "MAX_RESTARTS": restarts, "NPROC": "1", "MASTER_PORT": port}
        done = start(TORCHRUN, *TINY, "--out", str(tmp_path), JOIN_TIMEOUT="20", **variables)
    assert done.returncode == 2, done.stdout + done.stderr
    said = done.stderr.splitlines()[-1]
    assert said == f"train_gpt.py: error: MASTER_PORT {port} is in use on this node: set another on all nodes"
    assert "Traceback" not in done.stderr


@pytest.fixture
def free_port() -> str:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])
