"""Bugs that are planted in parallel programs: the kind of the first finding, its culprit, and its sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.exact import Kind
from tests.support.exact_programs import report_of
from tests.support.ranks import POOLS, RankPool
from tests.support.suite import NIGHTLY

MISSING = "the reference is 1 x rank 0 + 1 x rank 1: the sum over these ranks is missing"
MEAN = "the reference is 1/2 x rank 0 + 1/2 x rank 1: the mean over these ranks is missing"
PAIRS = "(rank 0 stands for ranks 0, 1, rank 2 stands for ranks 2, 3)"


class Bug(NamedTuple):
    """A bug. ``culprit``: the first tensor or module that must be named; "": a sentence about every gradient."""

    program: str
    fault: str
    kind: str
    culprit: str
    sentence: str
    shards: int = 2
    model: dict[str, Any] = {}  # noqa: RUF012  (read only)
    ranks: int = 2


BUGS = [
    # Gradients are not reduced, reduced too often, by the wrong rule, or over the wrong ranks.
    Bug("ddp", "unwrapped", "ranks", "", MEAN, 4),
    Bug("ddp", "ignored", "ranks", "layers.0.norm2.weight", MEAN),
    Bug("ddp", "summed", "factor", "", "is 2/1 of the reference"),
    Bug("ddp", "pairs", "ranks", "", PAIRS, 4, ranks=4),
    Bug("fsdp2", "ignored", "ranks", "layers.0.norm2.weight", MEAN),
    Bug("fsdp2", "undivided", "factor", "", "is 2/1 of the reference"),
    Bug("hsdp", "shards alone", "ranks", "", PAIRS, 4, ranks=4),
    Bug("hand_sp", "norms alone", "ranks", "norm.weight", MISSING),
    Bug("hand_tp", "doubled norm", "factor", "layers.0.norm1.weight", "is 2/1 of the reference"),
    Bug("expert_parallel", "router alone", "ranks", "layers.0.mlp.router.weight", MISSING, model={"experts": 4}),
    Bug("pipeline", "tie alone", "ranks", "embed.weight", MISSING, model={"tied": True}),
    Bug("pipeline", "tie twice", "factor", "embed.weight", "is 2/1 of the reference", model={"tied": True}),
    # Divisors, and which shards count.
    Bug("ddp", "local tokens", "local tokens", "", "21/22 and 21/20 of the shards' contributions"),
    Bug("fsdp2", "local tokens", "local tokens", "", "the loss is divided by local tokens"),
    Bug("ddp", "unscaled", "factor", "", "is 2/1 of the reference", 4),
    Bug("pipeline", "scaled gradients", "factor", "", "is 1/4 of the reference", 4),
    Bug("ddp", "cleared", "shards", "", "shard 0 is missing, shard 2 is missing", 4),
    Bug("ddp", "dropped", "shards", "", "shard 3 is missing", 4),
    Bug("ddp", "read twice", "shards", "", "shard 0 is counted 2 times, shard 1 is missing"),
    # Collectives of tensor parallelism.
    Bug("hand_tp", "no backward sum", "ranks", "layers.0.norm1.weight", MISSING),
    Bug("hand_sp", "no backward sum", "unexplained", "layers.0.norm1.weight", "All outputs of modules are right"),
    Bug("hand_tp", "double backward", "factor", "layers.0.mlp.down.weight", "are 2/1 of the reference"),
    Bug("hand_tp", "early bias", "output", "layers.0.mlp.down", "plus the same vector in each row, as of a bias"),
    Bug("hand_tp", "no forward sum", "output", "layers.0.mlp.down", "the first wrong output"),
    Bug(
        *("hand_tp", "no forward sum", "output", "layers.0.mlp", "is 1 x rank 0 + 1 x rank 1, and layers.0 after it"),
        model={"bias": False},
    ),
    Bug("pipeline", "scaled stage", "output", "layers.1", "the output on rank 1 is 1/2 of the reference", 4),
    # Parameters.
    Bug("ddp", "other weights", "parameter", "layers.0.mlp.up.weight", "rank 1: 1 of 144 elements differ"),
    Bug(
        *("hand_tp", "wrong shard", "parameter", "layers.0.mlp.up.bias"),
        "no rank holds slices 6 to 11 of dim 0 of the parameter layers.0.mlp.up.bias: "
        "rank 0 holds 0 to 5 of dim 0, rank 1 holds 0 to 5 of dim 0",
    ),
    Bug(
        *("hand_tp", "swapped", "swapped", "layers.0.attention.k.bias"),
        "the parts lie on other ranks than those of most parameters (layers.0.attention.k.bias: "
        "rank 0 holds 6 to 11 of dim 0, rank 1 holds 0 to 5 of dim 0",
    ),
]

ALIKE = {
    *(("ddp", "ignored"), ("ddp", "unscaled"), ("ddp", "dropped")),
    *(("fsdp2", "ignored"), ("fsdp2", "undivided"), ("fsdp2", "local tokens"), ("hsdp", "shards alone")),
    *(("hand_tp", "doubled norm"), ("hand_tp", "double backward"), ("hand_tp", "no backward sum")),
    *(("expert_parallel", "router alone"), ("pipeline", "tie twice"), ("pipeline", "scaled gradients")),
    *(("hand_sp", "norms alone"), ("ddp", "summed"), ("ddp", "cleared"), ("pipeline", "scaled stage")),
}
"""Programs and bugs whose finding is as that of another one: they are nightly."""

CASES = [pytest.param(bug, marks=NIGHTLY if (bug.program, bug.fault) in ALIKE else ()) for bug in BUGS]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the references: bugs of equal models and data share one."""
    return tmp_path_factory.mktemp("references")


@pytest.mark.slow
@pytest.mark.parametrize("bug", CASES, ids=lambda bug: f"{bug.program}-{bug.fault}-{bug.shards}".replace(" ", "_"))
def test_a_planted_bug_is_named(request: pytest.FixtureRequest, bug: Bug, references: Path) -> None:
    layers = 2 if bug.program == "pipeline" else 1
    kind = Kind(**{"layers": layers, "head_dim": 1, "hidden": 12, "vocabulary": 24, **bug.model})
    pool: RankPool = request.getfixturevalue(POOLS[bug.ranks])
    report, *others = pool.run(
        report_of, bug.program, kind, bug.shards, references / f"{hash(kind)}-{bug.shards}", (bug.fault,)
    )
    assert others == [report] * (bug.ranks - 1)
    first = report.findings[0]
    assert (first.kind, first.names[0] if bug.culprit else "") == (bug.kind, bug.culprit)
    assert bug.sentence in first.sentence
    assert first.sentence.startswith("every gradient" if not bug.culprit else ("no rank", "the parameter", bug.culprit))
    assert str(report).startswith(first.sentence)
