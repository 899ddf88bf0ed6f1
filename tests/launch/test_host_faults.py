"""Hosts that are cut off, half cut off, slow, a day ahead, of another version, or restarted during the job.

Each host has its own address (``tests/support/hosts.py``) and is started as in docs/launching.md. Surviving ranks end
within ``--timeout`` plus MARGIN. Each writes one line with its position and the missing ranks. No process of the job
remains.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8dist.state.manifest import NUMERICS_VERSION
from tests.support.hosted_job import START, TIMEOUT, HostedJob, assert_same
from tests.support.hosts import Lab, lab_or_skip
from tests.support.main_job import ROOT, Run, metrics
from tests.support.suite import few

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("hosts")]  # They mostly wait, so others may run beside them.

SIZE = 3
MARGIN = 20
"""Seconds that a rank and its agent may need beyond ``--timeout``: ten for the roll call, the rest for torchrun."""


@pytest.fixture(scope="module")
def shared() -> Iterator[Lab]:
    with lab_or_skip(SIZE) as lab:
        yield lab


@pytest.fixture
def lab(shared: Lab) -> Iterator[Lab]:
    """Yield the lab. Afterwards, end all processes and reconnect all hosts."""
    yield shared
    for host in shared.hosts:
        host.kill_all()
        host.mend()
        host.drop_nothing()
        assert host.wait_until_idle(5) == []


@pytest.fixture(scope="module")
def undisturbed(shared: Lab, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on the same hosts without faults."""
    return HostedJob(shared, tmp_path_factory.mktemp("undisturbed")).start_all().finish()


IN_THE_SYNC = r"rank {}: StateManager of GPT: the FP8 sync of step 6 with ranks 0, 1, 2 failed after \d+\.\d s\. "
LATER = (
    r"rank {}: (?:StateManager of GPT: the FP8 sync of|step 7: \w+: FP8 manager of GPT|step 6: .*FP8 manager of GPT).*"
)
STORE = r"The job's store on host0:29500 cannot be reached: this host is cut off, or that one is gone"


LOST = [
    ("stop-update", 0, "both", IN_THE_SYNC),  # The store is there.
    ("stop-sync", 1, "others", LATER),
    ("stop-update", 2, "both", IN_THE_SYNC),
    ("stop-step", 2, "victim", LATER),
]


@pytest.mark.parametrize(("when", "victim", "lost_to", "where"), few(LOST, *LOST[:2]))
def test_the_others_say_who_is_missing(
    lab: Lab, tmp_path: Path, when: str, victim: int, lost_to: str, where: str
) -> None:
    """``lost_to``: who does not receive: the host's cable is cut, or packets are dropped in one direction."""
    kind = f"{when}:{victim}:6"
    job = HostedJob(lab, tmp_path, "--inject", kind).start_all()
    lost = lab.hosts[victim]
    stopped = job.await_stop(lost, kind)
    if lost_to == "both":
        lost.cut()
    for host in lab.hosts:
        if host is not lost and lost_to != "both":
            host.drop_from(lost) if lost_to == "others" else lost.drop_from(host)
    lost.do("kill", "-CONT", str(stopped))
    assert job.statuses(time.monotonic() + TIMEOUT + MARGIN) == [5] * SIZE
    job.assert_gone()
    missing = rf"Missing of 3 ranks: rank {victim} \(host{victim}\): gone, hung, or out of reach"
    alone = r"Missing of 3 ranks: rank 1 \(host1\), rank 2 \(host2\): gone, .+, or this host is cut off[ :]"
    for host in lab.hosts:
        words = job.last_words(host)
        # Of two ranks that wait, one may time out first. That ends the other's connection before its own time-out.
        cause = re.search(r"\(RuntimeError: .+", words)
        early = cause is not None and not re.search("timed out|timeout", cause[0], re.IGNORECASE)
        seen = missing + (", or waiting for one that is" if early else "") + "[ :]"
        if host is lost or victim == 0:  # The store is on host 0.
            seen = alone if host.index == 0 else STORE
        assert re.match(where.format(host.index), words), words
        assert re.search(seen, words), words
    assert not (tmp_path / "run/summary.json").exists()


# Not faketime: Debian's 0.9.10 breaks clock_nanosleep on the monotonic clock, and with it Python's time.sleep.
TOMORROW = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += 86400;
    return status;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec later;
    int status = clock_gettime(CLOCK_REALTIME, &later);
    *now = (struct timeval){later.tv_sec, later.tv_nsec / 1000};
    return status;
}

time_t time(time_t *now) {
    struct timespec later;
    clock_gettime(CLOCK_REALTIME, &later);
    if (now) *now = later.tv_sec;
    return later.tv_sec;
}
"""


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler to set a host's clock with")
def test_a_slow_host_and_one_a_day_ahead_change_no_bit(lab: Lab, tmp_path: Path, undisturbed: Run) -> None:
    library = tmp_path / "tomorrow.so"
    build = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(build, input=TOMORROW, text=True, check=True)
    _, slow, ahead = lab.hosts
    asked = [sys.executable, "-c", "import time; print(time.time())"]
    now, tomorrow = (float(ahead.start(asked, **how).communicate()[0]) for how in ({}, {"LD_PRELOAD": str(library)}))
    assert 86_400 <= tomorrow - now < 86_460
    job = HostedJob(lab, tmp_path, "--save-every", "6")
    slow.limit("8mbit")
    try:
        for host in lab.hosts:
            job.start(host, **({"LD_PRELOAD": str(library)} if host is ahead else {}))
        assert_same(job.finish(), undisturbed)
        assert slow.limited()
    finally:
        slow.unlimit()


def test_a_host_of_another_version_is_named(lab: Lab, tmp_path: Path) -> None:
    other = tmp_path / "other"
    for folder in ("fp8dist", "kernels", "launch", "tests/support/lab"):
        shutil.copytree(ROOT / folder, other / folder, ignore=shutil.ignore_patterns("__pycache__"))
    manifest = other / "fp8dist/state/manifest.py"
    text, changed = re.subn(
        r"^NUMERICS_VERSION = \d+", "NUMERICS_VERSION = 99", manifest.read_text(), flags=re.MULTILINE
    )
    assert changed == 1
    manifest.write_text(text)
    job = HostedJob(lab, tmp_path)
    for host in lab.hosts:
        job.start(host, clone=other if host.index == 2 else ROOT)
    assert job.statuses(time.monotonic() + START) == [2] * SIZE
    for host in lab.hosts:
        (said,) = re.findall(r"^train_gpt: error: .+$", job.said(host), re.MULTILINE)
        numerics = f"numerics version: {NUMERICS_VERSION} here, 99 there"
        assert f"rank 0 (host0) against rank(s) 2 (host2): {numerics}" in said, said
    job.assert_gone()


@pytest.mark.parametrize("comes_back", few([False, True], True))  # Else it was killed.
def test_a_host_that_is_started_again_resumes(lab: Lab, tmp_path: Path, undisturbed: Run, comes_back: bool) -> None:
    """The other hosts wait for it in torchrun's rendezvous. All resume from the checkpoint."""
    kind = "stop-step:2:7"
    job = HostedJob(lab, tmp_path, "--save-every", "4", "--inject", kind, MAX_RESTARTS="3").start_all()
    lost = lab.hosts[2]
    stopped = job.await_stop(lost, kind)
    if comes_back:
        lost.cut()
        lost.do("kill", "-CONT", str(stopped))
        job.await_words(lab.hosts[0], r"^rank 0: .+Missing of 3 ranks: rank 2 \(host2\)", TIMEOUT + MARGIN)
        job.await_words(lost, r"^rank 2: ", TIMEOUT + MARGIN)
        lost.mend()
    lost.kill_all()
    assert lost.wait_until_idle(5) == []
    job.start(lost)
    run = job.finish()
    seen = "" if comes_back else ", or waiting for one that is"  # A kill resets connections before the time-out.
    for host in lab.hosts[:2]:
        assert f"Missing of 3 ranks: rank 2 (host2): gone, hung, or out of reach{seen}: " in job.last_words(host)
    assert run.summary["resumed_after_step"] == 4
    assert run.summary["restarts"] >= 1
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 13))
    assert_same(run, undisturbed)
