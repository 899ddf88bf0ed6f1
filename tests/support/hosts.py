"""A lab of hosts on one machine: each host has its own address, name, processes and network cable.

A host is a set of Linux namespaces (network, processes, mounts, name), held by its process 1. The namespaces have no
names in the file system, and the kernel removes them when process 1 ends, which happens when the test process ends,
even by a crash. veth pairs and a bridge, in a namespace that acts as the switch, connect the hosts. If packets must be
late, ``tests/support/forwarder.py`` and a TUN device on each host replace them.

    with Lab(3) as lab:
        lab.hosts[0].do("hostname")
        lab.hosts[2].cut()
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

import pytest

ROOT = Path(__file__).resolve().parents[2]
NETWORK = "10.87.0"
DEVICE = "eth0"
MTU = "9000"
PROGRAMS = ("ip", "iptables", "tc", "unshare", "nsenter", "ps")
TUN = "/dev/net/tun"
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

# Tries everything that a lab asks of the kernel, in temporary namespaces.
_TRY = """
ip link add port type veth &&
iptables -n -L INPUT &&
ip link set lo up &&
tc qdisc add dev lo root tbf rate 8mbit burst 256kb latency 1s
"""

# Process 1 of a host. Orphans become its children. The kernel reaps children of a parent that ignores SIGCHLD.
_HOLD = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("up", flush=True)
sys.stdin.read()
"""


def why_not(delayed: bool = False) -> str | None:
    """Return why this machine cannot run a ``Lab``; None if it can."""
    if sys.platform != "linux":
        return "namespaces are Linux's"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (scripts/setup-hosts)"
    tried = subprocess.run(
        ["unshare", "--net", "--pid", "--fork", "--mount", "--uts", "sh", "-c", _TRY],
        capture_output=True, text=True, check=False, env={**os.environ, "PATH": PATH},
    )  # fmt: skip
    if tried.returncode != 0:
        return f"this kernel or container does not allow what hosts need: {tried.stderr.strip()}"
    if delayed:
        try:
            os.close(os.open(TUN, os.O_RDWR))
        except OSError as error:
            return f"{TUN} cannot be opened: {error.strerror}"
    return None


@contextmanager
def lab_or_skip(count: int, delayed: bool = False) -> Iterator[Lab]:
    """Yield a lab for a fixture. Skip the test if the machine cannot run one."""
    reason = why_not(delayed)
    if reason is not None:
        pytest.skip(f"no lab of hosts: {reason}")
    with Lab(count, delayed) as lab:
        yield lab


class Namespace:
    """Namespaces that live as long as their process 1. ``name``: their hostname."""

    def __init__(self, name: str) -> None:
        self.name = name
        unshare = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._holder = subprocess.Popen(
            [*unshare, sys.executable, "-S", "-c", _HOLD],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PATH": PATH},
            start_new_session=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "up\n", "the host did not come up"
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        self.pid = int(children[0])
        self.do("hostname", name)
        self.wire("ip", "link", "set", "lo", "up")

    def command(self, *words: str) -> list[str]:
        """Return the command that runs ``words`` in these namespaces."""
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount", "--pid", *words]

    def do(self, *words: str) -> str:
        """Run a system command in these namespaces. Return its output.

        Raises:
            RuntimeError: the command failed.
        """
        return self._done(self.command(*words))

    def wire(self, *words: str) -> str:
        """Like ``do``, for commands that change the network and name other namespaces by our PIDs."""
        return self._done(["nsenter", "--target", str(self.pid), "--net", *words])

    def _done(self, words: list[str]) -> str:
        done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, "PATH": PATH})
        if done.returncode != 0:
            raise RuntimeError(f"{self.name}: {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def close(self) -> None:
        """Kill all processes in these namespaces."""
        self._holder.kill()
        self._holder.wait()
        for pipe in (self._holder.stdin, self._holder.stdout):
            if pipe is not None:
                pipe.close()


class Host(Namespace):
    """A host. ``address``: its address in the lab's network."""

    def __init__(self, index: int, lab: Lab) -> None:
        super().__init__(f"host{index}")
        self.index, self.address = index, f"{NETWORK}.{index + 1}"
        self._lab = lab
        self._started: list[subprocess.Popen[str]] = []

    def start(self, command: Sequence[str], *, cwd: Path = ROOT, **variables: str) -> subprocess.Popen[str]:
        """Start a command with additional environment variables. Read its output with ``communicate``."""
        environment = {**os.environ, "PATH": PATH, **variables}
        process = subprocess.Popen(
            self.command(*command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, cwd=cwd, env=environment,
        )  # fmt: skip
        self._started.append(process)
        return process

    def close(self) -> None:
        """Kill all processes here, and the processes outside that started them."""
        super().close()
        for process in self._started:
            process.kill()
            process.communicate()

    def processes(self) -> list[str]:
        """Return all processes here, except process 1 and the observers: PID, state (Z: a zombie), command."""
        lines = self.do("ps", "-e", "-o", "pid=,stat=,args=").splitlines()
        return [line for line in lines if line.split()[0] != "1" and " ps -e" not in line]

    def wait_until_idle(self, seconds: float) -> list[str]:
        """Give the processes time to end. Return the ones that are left."""
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def kill_all(self) -> None:
        """SIGKILL all processes here, as in a power failure. Peers are not notified."""
        subprocess.run(self.command("kill", "-KILL", "-1"), check=False, capture_output=True)

    def cut(self) -> None:
        """Pull the network cable: no packets in or out, and no notification."""
        self._lab.plug(self, False)

    def mend(self) -> None:
        """Reconnect the network cable."""
        self._lab.plug(self, True)

    def drop_from(self, other: Host) -> None:
        """Drop packets from ``other`` to this host, but not in the other direction."""
        self.wire("iptables", "-A", "INPUT", "-s", other.address, "-j", "DROP")

    def drop_nothing(self) -> None:
        """Undo all ``drop_from``."""
        self.wire("iptables", "-F", "INPUT")

    def limit(self, rate: str) -> None:
        """Limit the send rate, in ``tc``'s units: "8mbit"."""
        self.wire(
            "tc", "qdisc", "replace", "dev", DEVICE, "root", "tbf", "rate", rate, "burst", "256kb", "latency", "1s"
        )

    def limited(self) -> bool:
        """Return True if packets had to wait because of ``limit``."""
        counted = self.wire("tc", "-s", "qdisc", "show", "dev", DEVICE)
        return int(counted.split("overlimits ")[1].split()[0]) > 0

    def unlimit(self) -> None:
        """Undo ``limit``."""
        self.wire("tc", "qdisc", "del", "dev", DEVICE, "root")


class Lab:
    """``count`` hosts on an isolated network.

    ``delayed``: packets go through a forwarder with a latency, see ``set_latency``.
    """

    def __init__(self, count: int, delayed: bool = False) -> None:
        self.hosts: list[Host] = []
        self._delayed = delayed
        self._stack = ExitStack()
        self._forwarder: subprocess.Popen[str] | None = None
        try:
            self._build(count)
        except BaseException:
            self.close()
            raise

    def _build(self, count: int) -> None:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="fp8dist-hosts-")))
        for index in range(count):
            host = Host(index, self)
            self._stack.callback(host.close)
            self.hosts.append(host)
        names = folder / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in self.hosts)]
        names.write_text("\n".join(lines) + "\n")
        for host in self.hosts:
            host.do("mount", "--bind", str(names), "/etc/hosts")
        if self._delayed:
            self._join_by_forwarder()
        else:
            self._join_by_bridge()
        for host in self.hosts:
            host.wire("ip", "address", "add", f"{host.address}/24", "dev", DEVICE)
            host.wire("ip", "link", "set", DEVICE, "mtu", MTU, "up")

    def _join_by_bridge(self) -> None:
        self._switch = Namespace("switch")
        self._stack.callback(self._switch.close)
        self._switch.wire("ip", "link", "add", "bridge", "type", "bridge")
        self._switch.wire("ip", "link", "set", "bridge", "up")
        for host in self.hosts:
            port = f"port{host.index}"
            peer = ("peer", "name", DEVICE, "netns", str(host.pid))
            self._switch.wire("ip", "link", "add", port, "mtu", MTU, "type", "veth", *peer)
            self._switch.wire("ip", "link", "set", port, "master", "bridge", "up")

    def _join_by_forwarder(self) -> None:
        script = str(ROOT / "tests/support/forwarder.py")
        self._forwarder = subprocess.Popen(
            [sys.executable, "-S", script, DEVICE, *(f"{host.pid}={host.address}" for host in self.hosts)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self._stack.callback(self._end_forwarder)
        self._heard("up")

    def _heard(self, expected: str) -> None:
        assert self._forwarder is not None, "this lab has no forwarder"
        assert self._forwarder.stdout is not None
        answer = self._forwarder.stdout.readline().strip()
        assert answer == expected, f"the forwarder said {answer!r}"

    def set_latency(self, seconds: float) -> None:
        """Set the one-way latency of packets between hosts, in addition to the machine's own. Only if ``delayed``."""
        assert self._forwarder is not None, "this lab has no forwarder"
        print(seconds, file=self._forwarder.stdin, flush=True)
        self._heard("done")

    def plug(self, host: Host, connected: bool) -> None:
        """Plug a host's cable in or out. Not if ``delayed``."""
        self._switch.wire("ip", "link", "set", f"port{host.index}", "up" if connected else "down")

    def _end_forwarder(self) -> None:
        assert self._forwarder is not None
        self._forwarder.kill()
        self._forwarder.communicate()

    def close(self) -> None:
        """Kill all processes on all hosts."""
        self._stack.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
