"""A whole job against an oracle in plain Python: after every action, on every rank, state is what the oracle says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.support.oracle import FP8_MAX, Rules, SlotOracle, merged
from tests.support.ranks import RankPool
from tests.support.suite import HOURS
from tests.support.whole_job import HEAD, RANKS, Action, Amaxes, Job, Pass, Seen, SlotName, run

MODULES = ("again", "branch", "first", "frozen", "head", "second", "tied")
TIED, ALIAS = ("again", "weight"), ("tied", "weight")
"""The two names of the shared weight. Its slot has the first."""
FORMATS = {"input": "e4m3", "weight": "e4m3", "grad_output": "e5m2"}
OBSERVED_STEPS = 16


@dataclass
class _Precision:
    """How one module computes. ``left``: steps that a limited change still lasts."""

    lasting: bool = False
    left: int = 0
    unseen: bool = False

    @property
    def high(self) -> bool:
        return self.lasting or self.left > 0

    @property
    def records(self) -> bool:
        return not self.high or 0 < self.left <= OBSERVED_STEPS


@dataclass
class _Oracle:
    """State of the job, from what the ranks' tensors were."""

    job: Job
    slots: dict[SlotName, SlotOracle] = field(default_factory=dict)
    precisions: dict[str, _Precision] = field(default_factory=lambda: {name: _Precision() for name in MODULES})
    pending: list[dict[SlotName, float | None]] = field(default_factory=lambda: [{} for _ in range(RANKS)])
    steps: int = 0
    told: dict[tuple[str, int], set[SlotName]] = field(default_factory=dict)  # Of the last action.

    def __post_init__(self) -> None:
        for name in MODULES:
            for role, format in FORMATS.items():
                if (name, role) != ALIAS:
                    rules = self.job.head_rules if name == HEAD else self.job.rules
                    self.slots[name, role] = SlotOracle(FP8_MAX[format], rules)

    def record(self, ranks: Sequence[Seen]) -> None:
        """Merge what ranks have recorded into what waits for the next sync."""
        for number, seen in enumerate(ranks):
            counted = [(slot, amax) for slot, amax in seen.amaxes.items() if self.precisions[slot[0]].records]
            for (fqn, role), amax in (*counted, *seen.recorded.items()):
                rank = self.pending[number]
                for name, value in (((fqn, role), amax), (_slot(fqn, "weight"), seen.weights[_slot(fqn, "weight")])):
                    rank[name] = merged([value, rank.get(name)])

    def boundary(self, trains: bool) -> None:
        """Commit what waits."""
        if trains:
            for precision in self.precisions.values():
                precision.unseen = not precision.records
                precision.left = max(0, precision.left - 1)
            self._wake()
        tripped = set()
        for name, slot in self.slots.items():
            amax = merged(rank.get(name) for rank in self.pending)
            slot.commit(amax)
            if amax is not None and not math.isfinite(amax):
                tripped.add(name)
        self.pending, self.steps = [{} for _ in range(RANKS)], self.steps + 1
        if tripped:
            self.told["nonfinite", self.steps] = tripped
        if trains and self.job.fallback is not None:
            self._fall_back(tripped, self.job.fallback)

    def _fall_back(self, tripped: set[SlotName], steps: int) -> None:
        for fqn, precision in self.precisions.items():
            own = {_slot(fqn, role) for role in FORMATS}
            if own & tripped and (not precision.high or 0 < precision.left < steps):
                precision.left = steps
                self.told["fallback", self.steps] = tripped
                for name in own - {TIED}:
                    slot = self.slots[name]
                    slot.history, slot.amax = [0.0] * slot.rules.history_len, 0.0

    def set_precision(self, pattern: str, to: str, steps: int | None) -> None:
        """As ``manager.set_precision``."""
        for fqn, precision in self.precisions.items():
            if not fnmatchcase(fqn, pattern):
                continue
            if to == "fp8":
                precision.lasting, precision.left = False, 0
            elif steps is None:
                precision.lasting, precision.left = True, 0
            elif not precision.high or 0 < precision.left < steps:
                precision.left = steps
        self._wake()

    def _wake(self) -> None:
        """Make the slots of modules cold that cast again without a recent amax."""
        woken = {fqn for fqn, precision in self.precisions.items() if precision.unseen and not precision.high}
        for fqn in woken:
            for role in FORMATS:
                name = _slot(fqn, role)
                users = ("again", "tied") if name == TIED else (fqn,)
                if all(user in woken or self.precisions[user].unseen for user in users):
                    slot = self.slots[name]
                    slot.history, slot.amax = [0.0] * slot.rules.history_len, 0.0
                    slot.scale, slot.cold = 1.0, True
        for fqn in woken:
            self.precisions[fqn].unseen = False

    def attach(self, weights: Amaxes) -> None:
        """Derive the scales of cold weights."""
        for name, amax in weights.items():
            self.slots[name].derive(amax)

    def resume(self, history_len: int) -> None:
        """Load into a job with another history length."""
        self.pending = [{} for _ in range(RANKS)]
        for name, slot in self.slots.items():
            if name[0] != HEAD:
                self.slots[name] = slot.resized(replace(slot.rules, history_len=history_len))


def _slot(fqn: str, role: str) -> SlotName:
    return TIED if (fqn, role) == ALIAS else (fqn, role)


_rules = st.builds(
    Rules,
    history_len=st.integers(1, 5),
    amax_algo=st.sampled_from(["max", "most_recent"]),
    margin=st.integers(-1, 1),
    power_of_two=st.booleans(),
    warmup=st.sampled_from(["current", "unit"]),
)
_passes = st.lists(
    st.builds(
        Pass,
        kind=st.sampled_from(["train", "train", "train", "eval", "no_grad", "no_fp8", "recording"]),
        exponents=st.tuples(*[st.integers(-6, 6)] * RANKS),
        skips=st.tuples(*[st.booleans()] * RANKS),
    ),
    min_size=1,
    max_size=3,
).map(tuple)
_poisons = st.one_of(
    *[st.none()] * 4, st.tuples(st.integers(0, RANKS - 1), st.sampled_from([math.inf, -math.inf, math.nan]))
)
_step = st.builds(Action, kind=st.just("step"), passes=_passes, poison=_poisons)
_patterns = st.sampled_from(["*", "first", "branch", "t*", "again", "frozen", HEAD])
_actions = st.one_of(
    *[_step] * 5,
    st.builds(Action, kind=st.sampled_from(["drop", "calibrate"]), passes=_passes),
    st.builds(Action, kind=st.just("precision"), pattern=_patterns, steps=st.sampled_from([None, 1, 2, 3, 17])),
    st.builds(Action, kind=st.just("precision"), pattern=_patterns, to=st.just("fp8")),
    st.builds(Action, kind=st.just("attach")),
    st.builds(Action, kind=st.just("flip"), rank=st.integers(0, RANKS - 1)),
    st.builds(
        Action, kind=st.just("resume"), ranks=st.integers(1, RANKS), history_len=st.integers(1, 6)
    ),
)  # fmt: skip
jobs = st.builds(
    Job,
    wrapper=st.sampled_from(["none", "ddp", "fsdp2", "gather", "tp"]),
    ranks=st.integers(1, RANKS),
    rules=_rules,
    head_rules=_rules,
    update=st.sampled_from(["same_step", "next_step"]),
    fallback=st.sampled_from([None, None, 1, 3]),
    actions=st.lists(_actions, min_size=8, max_size=40).map(tuple),
)


_JOBS = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None, phases=(Phase.generate,))
"""Without shrinking, which would take an hour: the error has the whole job, and the action that went wrong."""


def compare(pool: RankPool, folder: Path, job: Job) -> None:
    """Run the job, and compare every rank with the oracle after every action. ``folder``: empty, for this job alone:
    ranks that find the store of another job hang."""
    oracle, saved, start = _Oracle(job), None, Action("start", ranks=job.ranks, history_len=job.rules.history_len)
    for life, (first, *actions) in enumerate(_lives(start, job.actions)):
        rules = replace(job.rules, history_len=first.history_len)
        returned = pool.run(run, job, rules, first.ranks, actions, saved, str(folder / f"store-{life}"), timeout=200)
        lives = [seen for seen, _ in returned[: first.ranks]]
        assert returned[first.ranks :] == [None] * (RANKS - first.ranks)
        saved = returned[0][1]
        for number, action in enumerate((first, *actions)):
            here = [seen[number] for seen in lives]
            _follow(oracle, action, here)
            what = f"after action {number} of life {life} of {job}: {action}"
            for rank, each in enumerate(here):
                assert each.steps == oracle.steps, f"{each.steps} steps, not {oracle.steps}: {what}"
                high = {fqn: of.high for fqn, of in oracle.precisions.items()}
                assert each.high == high, f"{each.high}, not {high}: {what}"
                assert each.told == oracle.told, f"{each.told}, not {oracle.told}: {what}"
                assert each.state.keys() == oracle.slots.keys()
                for name, slot in oracle.slots.items():
                    assert each.state[name] == slot.state(), (
                        f"rank {rank}, {name}: {each.state[name]}, not {slot.state()}: {what}"
                    )
                _assert_verdict(job, first.ranks, action, each.trouble, what)


def _lives(start: Action, actions: Sequence[Action]) -> list[list[Action]]:
    """Cut the actions before each that resumes."""
    lives = [[start]]
    for action in actions:
        if action.kind == "resume":
            lives.append([])
        lives[-1].append(action)
    return lives


def _follow(oracle: _Oracle, action: Action, here: list[Seen]) -> None:
    oracle.told = {}
    if action.kind in ("start", "attach"):
        oracle.attach(here[0].weights)
    elif action.kind == "precision":
        oracle.set_precision(action.pattern, action.to, action.steps)
    elif action.kind == "resume":
        oracle.resume(action.history_len)
    elif action.kind != "flip":
        oracle.record(here)
        if action.kind != "drop":
            oracle.boundary(trains=action.kind == "step")


def _assert_verdict(job: Job, ranks: int, action: Action, trouble: str | None, what: str) -> None:
    """A flipped bit of a replicated parameter is named, with its rank where others are a majority. All else is fine."""
    if action.kind == "flip" and job.wrapper == "none":  # Nothing says that these ranks should be equal.
        return
    replicated = job.wrapper in ("ddp", "tp") and ranks > 1
    if action.kind != "flip" or not replicated or action.rank >= ranks:
        assert trouble is None, f"{trouble}: {what}"
        return
    assert trouble is not None, what
    assert "second.bias" in trouble, what
    assert ranks < 3 or f"rank {action.rank}" in trouble, what


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Four ranks of this file's own: its jobs leave them without a process group."""
    ranks = RankPool(RANKS)
    yield ranks
    ranks.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
@seed(848)
@settings(_JOBS, max_examples=3)
@given(job=jobs)
def test_some_whole_jobs(pool: RankPool, tmp_path_factory: pytest.TempPathFactory, job: Job) -> None:
    """This seed draws one rank, an FP8 gather on four, and DDP on two with a fallback; and all kinds of actions."""
    compare(pool, tmp_path_factory.mktemp("stores"), job)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=HOURS) for part in range(1, 50))])
def test_whole_jobs(pool: RankPool, tmp_path_factory: pytest.TempPathFactory, part: int) -> None:
    """150 jobs with about 2,000 actions in each part: always the same, so that a failure is that of a change."""

    @seed(part)
    @settings(_JOBS, max_examples=150)
    @given(job=jobs)
    def run_them(job: Job) -> None:
        compare(pool, tmp_path_factory.mktemp("stores"), job)

    run_them()
