"""The lab of hosts: what no test of a job on it would notice. Names, addresses, cut cables and latency are those of
``test_host_faults.py`` and ``test_many_hosts.py``, which fail without them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import hosts
from tests.support.hosts import ROOT, Host, lab_or_skip, why_not

SERVE = """
import socket
server = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
while True:
    peer, _ = server.accept()
    with peer:
        while chunk := peer.recv(1 << 20):
            peer.sendall(chunk[:1])
"""

# Prints the seconds until two megabytes have arrived.
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000), timeout=20) as peer:
    start = time.perf_counter()
    peer.sendall(bytes(2_000_000))
    peer.shutdown(socket.SHUT_WR)
    while peer.recv(1 << 20):
        pass
print(time.perf_counter() - start)
"""


@pytest.mark.long
@pytest.mark.alone
def test_bandwidth() -> None:
    """Without a limit, a job on a slow host would be one like any other."""

    def seconds(host: Host, other: Host) -> float:
        return float(host.run([sys.executable, "-S", "-c", SEND, other.name]).stdout)

    with lab_or_skip(2) as lab:
        first, second = lab.hosts
        process = second.start([sys.executable, "-S", "-c", SERVE])
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        free = seconds(first, second)
        first.limit("8mbit")
        limited = seconds(first, second)
        first.unlimit()
        assert free < 0.5 < 1.2 < limited < 5


KEEP = """
import sys, time
sys.path.insert(0, {root!r})
from tests.support.hosts import Lab
lab = Lab(2, delayed=True)
lab.hosts[0].start(["sleep", "1000"])
print(*(host.pid for host in lab.hosts), lab._forwarder.pid, flush=True)
time.sleep(1000)
"""


def needs_hosts() -> None:
    """Skip the test if the machine cannot run any kind of lab."""
    reason = why_not(delayed=True)
    if reason is not None:
        pytest.skip(f"no lab of hosts: {reason}")


def test_what_the_machine_does_not_allow_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a delayed lab needs the TUN device."""
    needs_hosts()
    with monkeypatch.context() as patch:
        patch.setattr(hosts, "TUN", str(tmp_path / "tun"))
        assert why_not() is None
        assert str(why_not(delayed=True)).endswith("tun cannot be opened: No such file or directory")
    for program in ("iptables", "tc"):
        refused = tmp_path / program / program
        refused.parent.mkdir()
        refused.write_text("#!/bin/sh\necho not permitted >&2\nexit 3\n")
        refused.chmod(0o755)
        with monkeypatch.context() as patch:
            patch.setattr(hosts, "PATH", f"{refused.parent}:{hosts.PATH}")
            assert why_not() == "this kernel or container does not allow what hosts need: not permitted"


@pytest.mark.slow
def test_nothing_is_left_of_a_lab_whose_test_was_killed() -> None:
    needs_hosts()
    holder = subprocess.Popen([sys.executable, "-c", KEEP.format(root=str(ROOT))], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    pids = [int(pid) for pid in holder.stdout.readline().split()]
    assert len(pids) == 3
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    os.kill(holder.pid, signal.SIGKILL)
    holder.communicate()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
