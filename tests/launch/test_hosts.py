"""The lab of hosts: the properties that other tests rely on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import hosts
from tests.support.hosts import ROOT, Host, Lab, lab_or_skip, why_not

SERVE = """
import socket
server = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
while True:
    peer, _ = server.accept()
    with peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while chunk := peer.recv(1 << 20):
            peer.sendall(chunk[:1])
"""

# Prints the round-trip time of one byte in seconds, the median of 20.
ASK = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[2])) as peer:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    took = []
    for _ in range(20):
        start = time.perf_counter()
        peer.sendall(b"x")
        peer.recv(1)
        took.append(time.perf_counter() - start)
print(sorted(took)[10])
"""

# Prints the seconds until two megabytes have arrived.
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[2])) as peer:
    start = time.perf_counter()
    peer.sendall(bytes(2_000_000))
    peer.shutdown(socket.SHUT_WR)
    while peer.recv(1 << 20):
        pass
print(time.perf_counter() - start)
"""


def serve(host: Host) -> subprocess.Popen[str]:
    process = host.start([sys.executable, "-S", "-c", SERVE])
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    return process


def ask(host: Host, other: Host, what: str = ASK) -> float:
    """Run the program ``what`` on ``host`` against ``other``. Return the seconds that it prints."""
    return float(host.run([sys.executable, "-S", "-c", what, other.name, "20"]).stdout)


def answers(other: Host, host: Host) -> bool:
    """Return True if ``other`` answers ``host`` within two seconds."""
    done = host.run([sys.executable, "-S", "-c", ASK, other.name, "2"])
    assert done.returncode == 0 or "TimeoutError" in done.stderr or "refused" in done.stderr, done.stderr
    return done.returncode == 0


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.long)], ids=["bridge", "forwarder"])
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    with lab_or_skip(3, delayed=request.param) as lab:
        yield lab


@pytest.mark.slow
def test_hosts_have_names_addresses_and_processes_of_their_own(lab: Lab) -> None:
    """Orphaned processes leave no zombie."""
    first, second, third = lab.hosts
    third.run(["bash", "-c", "sleep 0.2 & disown"])
    process = serve(second)
    assert [host.run(["hostname"]).stdout for host in lab.hosts] == ["host0\n", "host1\n", "host2\n"]
    assert len({host.address for host in lab.hosts}) == 3
    assert first.address in first.run(["ip", "address"]).stdout
    assert answers(second, first)
    assert first.processes() == []
    (found,) = second.processes()
    assert found.state != "Z"
    second.kill_all()
    assert process.wait(timeout=10) != 0
    assert second.processes() == []
    assert not answers(second, first)
    assert third.wait_until_idle(10) == []


@pytest.mark.long
def test_faults_of_the_network_and_their_end(lab: Lab) -> None:
    first, second, third = lab.hosts
    for host in lab.hosts:
        serve(host)
    second.cut()
    assert not answers(second, first)
    assert not answers(first, second)
    assert answers(third, first)
    second.mend()
    assert ask(first, second) < 1
    first.drop_from(second)  # Also drops the answers to its own requests.
    assert not answers(first, second)
    assert answers(first, third)
    first.drop_nothing()
    assert ask(second, first) < 1


@pytest.mark.long
@pytest.mark.alone
def test_bandwidth(lab: Lab) -> None:
    first, second, _ = lab.hosts
    serve(second)
    free = ask(first, second, SEND)
    first.limit("8mbit")
    limited = ask(first, second, SEND)
    first.unlimit()
    assert free < 0.5 < 1.2 < limited < 5


@pytest.mark.long
@pytest.mark.alone
def test_latency() -> None:
    with lab_or_skip(2, delayed=True) as lab:
        first, second = lab.hosts
        serve(second)
        for latency in (0.0, 0.005, 0.020):
            lab.set_latency(latency)
            best = min(ask(first, second) for _ in range(5))  # A busy machine makes answers late, never early.
            assert 2 * latency <= best <= 2 * latency + 0.003


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


@pytest.mark.parametrize("program", ["iptables", "tc"])
def test_what_the_kernel_does_not_allow_is_a_reason(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_hosts()
    refused = tmp_path / program
    refused.write_text("#!/bin/sh\necho not permitted >&2\nexit 3\n")
    refused.chmod(0o755)
    monkeypatch.setattr(hosts, "PATH", f"{tmp_path}:{hosts.PATH}")
    assert why_not() == "this kernel or container does not allow what hosts need: not permitted"


def test_only_a_delayed_lab_needs_the_tun_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_hosts()
    monkeypatch.setattr(hosts, "TUN", str(tmp_path / "tun"))
    assert why_not() is None
    with pytest.raises(pytest.skip.Exception, match="tun cannot be opened: No such file"), lab_or_skip(2, delayed=True):
        pass


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
