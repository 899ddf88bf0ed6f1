"""Programs that tests need are installed wherever possible. Otherwise those tests would be skipped unnoticed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import exporting, hosts, slurm
from tests.support.main_job import ROOT

SCRIPT = ROOT / "scripts/setup-hosts"


def programs() -> list[str]:
    """Return the programs that scripts/setup-hosts installs."""
    return subprocess.run([SCRIPT, "--list"], capture_output=True, text=True, check=True).stdout.split()


def missing() -> list[str]:
    """Return the programs that are missing."""
    return [program for program in programs() if shutil.which(program, path=slurm.PATH) is None]


def test_the_list_has_what_tests_start() -> None:
    in_any_system = {"unshare", "nsenter"}  # Part of util-linux.
    assert {*slurm.SERVERS, *slurm.CLIENTS, *hosts.PROGRAMS} - in_any_system <= set(programs())


@pytest.mark.skipif("CI" not in os.environ or os.geteuid() != 0, reason="for continuous integration as root")
def test_nothing_is_skipped_where_it_can_be_installed() -> None:
    assert missing() == [], "scripts/setup-hosts should have installed these"


@pytest.mark.long
@pytest.mark.skipif("CI" not in os.environ, reason="for continuous integration")
def test_no_exporter_is_left_out_where_its_tool_can_be_fetched() -> None:
    assert (exporting.HOME / "stamp").exists(), "scripts/setup-exporters should have installed W&B and MLflow"
    if shutil.which("apt-get"):
        assert None not in (exporting.found("prometheus"), exporting.found("promtool"))


def without_daemons(command: str, path: str) -> subprocess.CompletedProcess[str]:
    """Run a command on the script, given as standard input, with an empty /usr/sbin."""
    hidden = f"mount -t tmpfs none /usr/sbin && exec {command}"
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", hidden],
        input=SCRIPT.read_text(),
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


NEEDED = "iproute2 iptables munge slurmctld slurmd"  # Packages with programs in /usr/sbin.


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or bool(missing()), reason="only root can hide programs, and they must be there"
)


@needs_root
def test_who_cannot_install_is_told_what_will_be_skipped() -> None:
    done = without_daemons("setpriv --reuid 65534 --clear-groups bash -s", os.environ["PATH"])
    assert (done.returncode, done.stdout) == (0, "")
    expected = f"setup-hosts: tests that need {NEEDED} will be skipped: only root can install them, with apt-get\n"
    assert done.stderr == expected


@needs_root
def test_an_installation_that_fails_is_not_passed_over(tmp_path: Path) -> None:
    apt_get, asked = tmp_path / "apt-get", tmp_path / "asked"
    apt_get.write_text(f'#!/bin/sh\necho "$@" >>{asked}\necho E: no network\nexit 100\n')
    apt_get.chmod(0o755)
    done = without_daemons("bash -s", f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout) == (1, f"setup-hosts: installing {NEEDED}\n")
    assert done.stderr == f"E: no network\nsetup-hosts: apt-get could not install {NEEDED}\n"
    install, update = asked.read_text().splitlines()
    assert install.endswith(f"install {NEEDED}")
    assert update.endswith("update")
