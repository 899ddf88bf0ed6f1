"""A private SLURM for tests: Debian's munge, slurmctld and slurmd, with several nodes on this machine, in one
folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SERVERS = ("munged", "mungekey", "slurmctld", "slurmd")
CLIENTS = ("sbatch", "srun", "scancel", "scontrol", "sinfo", "squeue")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

GPUS = 2
"""GPUs per node that SLURM is told about."""

CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=10
GresTypes=gpu
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP
"""
NODE = "NodeName={name} NodeHostname={host} Port={port} CPUs=2 RealMemory=1000 Gres=gpu:{gpus}\n"


def why_not() -> str | None:
    """Return why this machine cannot run SLURM; None if it can."""
    if os.geteuid() != 0:
        return "SLURM's daemons need root"
    missing = [program for program in (*SERVERS, *CLIENTS) if shutil.which(program, path=PATH) is None]
    return f"scripts/setup-hosts installs what is missing: {', '.join(missing)}" if missing else None


@dataclass(frozen=True)
class Slurm:
    """A running SLURM. Its nodes are named by loopback addresses, so that the names resolve."""

    folder: Path
    nodes: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of its commands and of everything that they start."""
        return {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def command(self, *words: str, **more: str) -> list[str]:
        """Run a command. Return its output lines.

        Raises:
            CalledProcessError: the command failed.
        """
        environment = {**self.environment, **more}
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment, check=True)
        return done.stdout.splitlines()

    def state_of(self, job: str) -> dict[str, str]:
        """Return the output of ``scontrol show job``."""
        words = " ".join(self.command("scontrol", "show", "job", job)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job: str, *states: str, timeout: float = 60.0) -> dict[str, str]:
        """Wait until the job is in one of these states. Return its state."""
        _until(lambda: self.state_of(job)["JobState"] in states, timeout, f"job {job} is {' or '.join(states)}")
        return self.state_of(job)

    def processes(self) -> list[tuple[int, str]]:
        """Return all living processes that jobs of this SLURM started: PID and command line."""
        daemons = ("munged", "slurmctld", "slurmscriptd", "slurmd ")
        return [(pid, said) for pid, said in marked(self.folder) if not any(name in said for name in daemons)]


@contextlib.contextmanager
def running(nodes: int) -> Iterator[Slurm]:
    """Start SLURM, wait until its nodes are idle, and stop it at the end, with its jobs and all that they left.

    Raises:
        RuntimeError: it does not start; with the output of the daemons.
    """
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    slurm = Slurm(folder, tuple(f"127.0.0.{number}" for number in range(2, 2 + nodes)))
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        _configure(slurm)
        key = [f"--{kind}={folder}/munge.{kind.split('-')[0]}" for kind in ("key-file", "seed-file", "pid-file")]
        slurm.command("mungekey", "--create", f"--keyfile={folder}/munge.key")
        daemons.append(_daemon(slurm, "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *key))
        _until((folder / "munge.socket").exists, 30, "munged has its socket")
        daemons.append(_daemon(slurm, "slurmctld", "-D"))
        daemons += [_daemon(slurm, "slurmd", "-D", "-N", node) for node in slurm.nodes]
        _until(lambda: _all_idle(slurm), 60, "all nodes are idle")
        yield slurm
    except TimeoutError as error:
        said = "\n".join(f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(folder.glob("*.said")))
        raise RuntimeError(f"{error}\n{said}") from None
    finally:
        _take_down(slurm, daemons)
        shutil.rmtree(folder)


def _configure(slurm: Slurm) -> None:
    host = socket.gethostname().split(".")[0]
    controller, *ports = free_ports(1 + len(slurm.nodes))
    lines = [CONFIGURATION.format(host=host, port=controller, folder=slurm.folder)]
    for name, port in zip(slurm.nodes, ports, strict=True):
        lines.insert(1, NODE.format(name=name, host=host, port=port, gpus=GPUS))
    (slurm.folder / "slurm.conf").write_text("".join(lines))
    devices = [slurm.folder / f"gpu{number}" for number in range(GPUS)]
    for device in devices:
        device.touch()
    (slurm.folder / "gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in devices))
    (slurm.folder / "state").mkdir()


def free_ports(count: int) -> list[int]:
    """Return ports that no process listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("", 0))
        return [int(free.getsockname()[1]) for free in sockets]


def _daemon(slurm: Slurm, *command: str) -> subprocess.Popen[bytes]:
    """Start a daemon in the foreground. It ends with this process."""
    said = slurm.folder / f"{'-'.join(word for word in command if word[0] != '-')}.said"
    with said.open("wb") as log:
        bound = ["setpriv", "--pdeathsig", "TERM", "--", *command]
        return subprocess.Popen(
            bound, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=slurm.environment, start_new_session=True
        )


def _all_idle(slurm: Slurm) -> bool:
    with contextlib.suppress(subprocess.CalledProcessError):  # slurmctld may not listen yet.
        return slurm.command("sinfo", "--noheader", "--Node", "--format", "%T") == ["idle"] * len(slurm.nodes)
    return False


def _until(condition: Callable[[], bool], timeout: float, what: str) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"SLURM: timed out after {timeout:g} s waiting until {what}")
        time.sleep(0.1)


def marked(folder: Path) -> list[tuple[int, str]]:
    """Return PID and command line of all processes with this SLURM in their environment."""
    mark = f"SLURM_CONF={folder}/slurm.conf".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # The process has ended.
            if mark in (process / "environ").read_bytes().split(b"\0"):
                arguments = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                found.append((int(process.name), " ".join(arguments)))
    return found


def _take_down(slurm: Slurm, daemons: list[subprocess.Popen[bytes]]) -> None:
    for daemon in reversed(daemons):
        daemon.terminate()
    for daemon in daemons:
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(10)
    deadline = time.monotonic() + 30
    while (left := marked(slurm.folder)) and time.monotonic() < deadline:
        for pid, _ in left:  # Includes jobs that a test left behind.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for daemon in daemons:
            daemon.poll()
        time.sleep(0.1)
