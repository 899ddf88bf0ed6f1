"""The fault lab on a lab of hosts, started once on each host, as docs/launching.md says."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.hosts import ROOT, Host, Lab
from tests.support.main_job import TINY, Run, read_run

TIMEOUT = 10
"""Seconds of ``--timeout``."""

START = 90.0
"""Seconds for the job to start and to reach a fault, on a busy machine."""


class HostedJob:
    """The fault lab or another program, one rank on each host of a lab."""

    def __init__(
        self, lab: Lab, out: Path, *flags: str, program: Sequence[str] = (), cwd: Path | None = None, **variables: str
    ) -> None:
        """``flags``: of the fault lab; they override TINY and TIMEOUT. ``program``: what torchrun.sh starts instead,
        with its arguments. ``cwd``: default: the repository's root. ``variables``: of the environment on all hosts."""
        out.mkdir(exist_ok=True)
        self.lab, self.out, self._cwd = lab, out, cwd
        tiny = [*TINY, "--timeout", str(TIMEOUT), "--out", str(out / "run")]
        self._words, self._variables = program or ("-m", "tests.support.lab", *tiny, *flags), variables
        self._launchers: dict[str, subprocess.Popen[str]] = {}

    def start(self, host: Host, clone: Path = ROOT, **variables: str) -> None:
        """Start the job on one host, from this clone, with environment variables for this host only."""
        first, *_ = hosts = self.lab.hosts
        nodes = {"NNODES": str(len(hosts)), "NODE_RANK": str(host.index), "MASTER_ADDR": first.name, "NPROC": "1"}
        common = {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **nodes, **self._variables, **variables}
        command = [str(clone / "launch/torchrun.sh"), *self._words]
        script = f'cd "$0" && exec "$@" >>{self.log(host)} 2>&1'  # nsenter changes the working directory.
        self._launchers[host.name] = host.start(
            ["bash", "-c", script, str(self._cwd or clone), *command], TMPDIR=str(self.out), **common
        )

    def start_all(self) -> HostedJob:
        """Start the job on all hosts."""
        for host in self.lab.hosts:
            self.start(host)
        return self

    def log(self, host: Host) -> Path:
        """Return the path of the host's log."""
        return self.out / f"{host.name}.log"

    def said(self, host: Host) -> str:
        """Return the host's log so far."""
        return self.log(host).read_text() if self.log(host).exists() else ""

    def await_words(self, host: Host, pattern: str, seconds: float = START) -> re.Match[str]:
        """Wait until the host's log matches the pattern."""
        deadline = time.monotonic() + seconds
        while (found := re.search(pattern, self.said(host), re.MULTILINE)) is None:
            assert time.monotonic() < deadline, f"{host.name} did not say {pattern!r}:\n{self.said(host)}"
            time.sleep(0.1)
        return found

    def await_stop(self, host: Host, fault: str) -> int:
        """Wait until the fault has stopped the host's rank. Return its PID there."""
        return int(self.await_words(host, rf"--inject {fault}: SIGSTOP; kill -CONT (\d+)")[1])

    def statuses(self, deadline: float) -> list[int]:
        """Wait for the launchers on all hosts. Return their exit statuses."""
        ends = []
        for host in self.lab.hosts:
            try:
                ends.append(self._launchers[host.name].wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired as error:
                raise AssertionError(f"{host.name}: still running:\n{host.processes()}\n{self.said(host)}") from error
        return ends

    def finish(self, seconds: float = START) -> Run:
        """Wait for a clean end on all hosts. Return what rank 0 has written."""
        ends = self.statuses(time.monotonic() + seconds)
        said = "\n".join(map(self.said, self.lab.hosts))
        assert ends == [0] * len(ends), f"{ends}\n{said}"
        self.assert_gone()
        return read_run(self.out / "run", said)

    def assert_gone(self) -> None:
        """Assert that no process of the job is left, not even a zombie."""
        for host in self.lab.hosts:
            assert host.wait_until_idle(5) == [], host.name

    def last_words(self, host: Host) -> str:
        """Return the single line with which the host's rank ended."""
        lines = re.findall(rf"^rank {host.index}: .+$", self.said(host), re.MULTILINE)
        assert len(lines) == 1, self.said(host)
        assert "Traceback" not in self.said(host)
        return str(lines[0])


def assert_same(run: Run, other: Run) -> None:
    """Assert that two runs are bitwise equal."""
    assert run.losses == other.losses
    for key in ("validation_loss", "parameters_sha256"):
        assert run.summary[key] == other.summary[key]
    assert run.summary["fp8_state_identical"] is True
