"""``record`` and ``compare`` in one process: what the file holds, names, mistakes. And mistakes on two ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from fp8dist import exact
from fp8dist.errors import CheckpointError, ConfigurationError
from fp8dist.exact.field import P
from fp8dist.exact.reference import read_reference
from tests.support.exact import Kind, Transformer, batch, losses
from tests.support.ranks import on_ranks

KIND = Kind(layers=1, head_dim=1, hidden=12, vocabulary=24, tied=True, checkpointed=True)


def small() -> nn.Sequential:
    """Return two Linears, the first of which is not trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3))
    model[0].requires_grad_(False)
    return model


def of_rows(model: nn.Module, rows: Tensor) -> list[Tensor]:
    """Return a loss for each row."""
    return [model(row[None]).sum() for row in rows]


ROWS = torch.arange(12.0).reshape(3, 4)


@pytest.mark.slow
def test_the_reference_of_a_transformer(tmp_path: Path) -> None:
    shards = batch(KIND, 3)
    exact.record(Transformer(KIND), losses, shards, tmp_path / "reference")
    found = read_reference(tmp_path / "reference")
    assert found.ties == {"head.weight": "embed.weight"}
    assert set(found.parameters) == set(found.shards) == {name for name, _ in Transformer(KIND).named_parameters()}
    order = list(found.shards)  # As the backward.
    assert (order[0], order[-1]) == ("norm.weight", "embed.weight")
    assert {len(shares) for shares in found.shards.values()} == {3}
    assert {len(calls) for calls in found.outputs.values()} == {3}  # Not those of the checkpoint's repeated forward.
    names = list(found.outputs)
    assert names.index("layers.0.norm1") < names.index("layers.0.attention") < names.index("layers.0")
    outputs = [output for calls in found.outputs.values() for output in calls]
    everything = [*found.parameters.values(), *found.shards.values(), *outputs]
    assert all(int(tensor.min()) >= 0 and int(tensor.max()) < P for tensor in everything)


def test_accumulation_in_one_process_is_equal(tmp_path: Path) -> None:
    exact.record(small(), of_rows, ROWS, tmp_path / "reference")
    model = small()

    def step() -> None:
        for loss in of_rows(model, ROWS):
            loss.backward()

    report = exact.compare(model, step, tmp_path / "reference")
    assert report.equal
    assert report.compared == 2  # The first Linear is not trained.
    left_out = small()
    report = exact.compare(left_out, lambda: of_rows(left_out, ROWS[1:])[0].backward(), tmp_path / "reference")
    assert report.findings[0].kind == "shards"
    assert str(report) == "every gradient: shard 0 is missing, shard 2 is missing"


def test_reentrant_checkpoints_add_to_a_gradient_twice(tmp_path: Path) -> None:
    shards = []
    for call in (lambda model, rows: model(rows), partial(checkpoint, use_reentrant=True)):

        def loss(model: nn.Module, rows: Tensor, call: Any = call) -> list[Tensor]:
            once = call(model, rows.requires_grad_())
            return [model(torch.cat([once, once[:, :1]], 1)).sum()]

        exact.record(small(), loss, ROWS.clone(), tmp_path / "reference")
        shards.append(read_reference(tmp_path / "reference").shards)
    assert all(bool((each == shards[0][name]).all()) for name, each in shards[1].items())


def test_a_tie_that_is_broken_in_the_job(tmp_path: Path) -> None:
    shards = batch(KIND, 1)
    exact.record(Transformer(KIND), losses, shards, tmp_path / "reference")
    model = Transformer(KIND)
    assert model.head is not None
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    report = exact.compare(model, lambda: losses(model, shards)[0].backward(), tmp_path / "reference")
    assert str(report) == (
        "embed.weight: the reference is 1 x rank 0 + 1 x rank 0 (head.weight): the sum over these ranks is missing"
    )


def test_what_is_frozen_on_one_side_alone_is_named(tmp_path: Path) -> None:
    exact.record(small(), of_rows, ROWS, tmp_path / "reference")
    model = small().requires_grad_()
    report = exact.compare(model, lambda: model(ROWS).sum().backward(), tmp_path / "reference")
    assert str(report) == "0.weight, 0.bias: trained in the job, and frozen in the reference"
    model = small()
    model[2].bias.requires_grad_(False)
    report = exact.compare(model, lambda: model(ROWS).sum().backward(), tmp_path / "reference")
    assert str(report) == "2.bias: no gradient on rank 0"


class Total(nn.Module):
    """The sum of its input, and ``more`` times that of its squares."""

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() + self.more * x.square().sum()


def test_a_wrong_output_is_compared_with_the_nearest_call(tmp_path: Path) -> None:
    """A first call that learns shapes, as of a pipeline, is no fault. Summands, factors and biases are in
    test_planted_bugs.py."""

    def loss(model: nn.Module, shards: Tensor) -> list[Tensor]:
        return [model(rows) for rows in shards]

    shards = torch.arange(24.0).reshape(2, 3, 4)
    exact.record(small().append(Total()), loss, shards, tmp_path / "reference")
    for more, wrong, text in [
        (0, False, "all 2 gradients equal the reference"),
        (1, False, "3: the first wrong output, on rank 0"),
        (0, True, "1: the first wrong output, on rank 0 (1 of 18 elements differ: [1, 2]). All outputs before it are"),
    ]:
        model, calls = small().append(Total(more)), [0]

        def change(module: Any, args: Any, out: Tensor, calls: list[int] = calls, wrong: bool = wrong) -> Tensor:
            calls[0] += 1
            place = torch.zeros_like(out)
            place[1, 2] = wrong and calls[0] == 2
            return out + place

        def step(model: nn.Module = model, wrong: bool = wrong) -> None:
            if not wrong:
                with torch.no_grad():
                    model(torch.zeros(3, 4))
            torch.stack(loss(model, shards)).sum().backward()

        model[1].register_forward_hook(change)
        report = str(exact.compare(model, step, tmp_path / "reference"))
        assert report.startswith(text), report


def test_parameters_of_other_values_are_named(tmp_path: Path) -> None:
    exact.record(small(), of_rows, ROWS, tmp_path / "reference")
    rolled = small()
    rolled[2].weight.data = rolled[2].weight.data.roll(1, 0)
    for model, text in [
        (small()[:2], "no rank holds the parameter 2.weight"),
        (nn.Sequential(nn.Linear(4, 3)), "rank 0: it has slices of dim 0 that the reference has not"),
        (rolled, "rank 0: in place of slices 0 to 2 of dim 0 are the reference's slices 2, 0 to 1"),
    ]:
        report = exact.compare(model, lambda: None, tmp_path / "reference")
        assert report.findings[0].kind == "parameter"
        assert text in str(report)


def test_functions_translate_names(tmp_path: Path) -> None:
    """Of one model, of parts with names of their own, and of stages with the same names."""
    path = tmp_path / "reference"
    exact.record(small(), of_rows, ROWS, path)
    first, second = small()[:2], small()[2:]

    def step() -> None:
        second(first(ROWS)).sum().backward()

    one, other = (nn.ModuleDict({"linear": of[0]}) for of in (first, second))
    last = nn.ModuleDict({"last": second[0]})
    for model, words in [
        (nn.ModuleDict({"linear": small()[2]}), r"no parameter 'linear.weight'.* pass rename="),
        (nn.Sequential(small()[2]), r"0.weight has the shape \(3, 6\) on rank 0"),
        ([one, other], r"two parameters have the name 'linear\.weight'"),
    ]:
        with pytest.raises(ConfigurationError, match=words):
            exact.compare(model, step, path)
    names = {"linear": "0", "last": "2"}

    def rename(name: str) -> str:
        head, dot, rest = name.partition(".")
        return names.get(head, head) + dot + rest

    assert exact.compare([one, last], step, path, rename=rename).equal
    for part in (first, second):
        part.zero_grad()
    renames = [lambda name: name.replace("linear", "0"), lambda name: name.replace("linear", "2")]
    assert exact.compare([one, other], step, path, rename=renames).equal


def test_wrong_targets_are_no_fault_of_a_module(tmp_path: Path) -> None:
    def loss(model: nn.Module, targets: Tensor) -> list[Tensor]:
        return [cross_entropy(model(ROWS), targets)]

    exact.record(small(), loss, torch.tensor([0, 1, 2]), tmp_path / "reference")
    model = small()
    report = exact.compare(model, lambda: loss(model, torch.tensor([1, 1, 0]))[0].backward(), tmp_path / "reference")
    assert report.findings[0].sentence.endswith("the fault is in the loss, in its targets, or in backward")


def test_gradients_that_are_zero_prove_nothing(tmp_path: Path) -> None:
    def loss(model: nn.Module, rows: Tensor) -> list[Tensor]:
        return [model(rows).sum() - model[2].bias.sum() * len(rows), rows.sum() * 0]  # The second shard has no target.

    exact.record(small(), loss, ROWS, tmp_path / "reference")
    model = small()
    report = exact.compare(model, lambda: loss(model, ROWS)[0].backward(), tmp_path / "reference")
    assert report.equal
    assert str(report).endswith("not tested, because their gradients are zero: 2.bias")


def test_surrogates_of_the_job_alone_or_of_the_reference_alone_are_refused(tmp_path: Path) -> None:
    """Otherwise a right program would be reported as wrong."""

    def erfinv(model: nn.Module, rows: Tensor) -> list[Tensor]:
        return [torch.erfinv(model(rows)).sum()]

    with pytest.raises(ConfigurationError, match="erfinv"):
        exact.record(small(), erfinv, ROWS, tmp_path / "reference")
    cubic = {torch.erfinv: lambda x: x * x * x}
    exact.record(small(), erfinv, ROWS, tmp_path / "reference", surrogates=cubic)
    alike = small()
    run = lambda: erfinv(alike, ROWS)[0].backward()  # noqa: E731
    assert exact.compare(alike, run, tmp_path / "reference", surrogates=cubic).equal

    def doubled(x: Tensor, **_: str) -> Tensor:
        return x + x

    def step() -> None:
        raise AssertionError("does not run")

    exact.record(small(), of_rows, ROWS, tmp_path / "plain")
    mine = {nn.functional.gelu: doubled, doubled: torch.neg}
    exact.record(small(), of_rows, ROWS, tmp_path / "changed", surrogates=mine)
    job = r"^exact\.record got surrogates for none, and exact\.compare on rank 0 for .*doubled, torch\..*gelu: give"
    with pytest.raises(ConfigurationError, match=job):
        exact.compare(small(), step, tmp_path / "plain", surrogates=mine)
    with pytest.raises(ConfigurationError, match=r"doubled, torch\.nn\.functional\.gelu, and .* on rank 0 for none:"):
        exact.compare(small(), step, tmp_path / "changed")
    model = small()
    other = {nn.functional.gelu: lambda x, **_: x, doubled: torch.neg}  # Each side may have its own replacement.
    assert not exact.compare(model, lambda: model(ROWS).sum().backward(), tmp_path / "changed", surrogates=other).equal


SCALARS = "must return a list with a scalar tensor for each shard"
REFUSED: list[tuple[Any, str]] = [
    (lambda model, rows: [], SCALARS),
    (lambda model, rows: [model(rows)], SCALARS),
    (lambda model, rows: model(rows).sum(), SCALARS),
    (lambda model, rows: None, "must return a list .* got None"),
    (lambda model, rows: [model[0](rows).sum().requires_grad_()], "reaches no parameter"),
    (lambda model, rows: [model[0](rows).sum()], "reaches no parameter"),
    (lambda model, rows: [model(rows).sum() * 0], "gives zero for every parameter"),
    (lambda model, rows: [cross_entropy(model(rows), torch.full((3,), -100))], "the mean loss of no targets"),
]


def test_losses_that_are_refused(tmp_path: Path) -> None:
    for loss, words in REFUSED:
        with pytest.raises(ConfigurationError, match=words):
            exact.record(small(), loss, ROWS, tmp_path / "reference")


def test_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        read_reference(tmp_path / "missing")
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(CheckpointError, match="text: "):
        read_reference(tmp_path / "text")
    exact.record(small(), of_rows, ROWS, tmp_path / "cut")
    with safe_open(tmp_path / "cut", framework="pt") as file:
        kept = {name: file.get_tensor(name) for name in list(file.keys())[1:]}
        save_file(kept, tmp_path / "cut", file.metadata())
    with pytest.raises(CheckpointError, match="cut: 'output/0/'"):
        read_reference(tmp_path / "cut")
    save_file({"x": ROWS}, tmp_path / "other", {"format": "fp8dist.exact 2", "prime": "7"})
    with pytest.raises(CheckpointError, match="not written by"):
        read_reference(tmp_path / "other")


@pytest.mark.slow
@on_ranks(2)
def test_all_ranks_raise_what_rank_0_finds(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        exact.compare(small(), lambda: None, tmp_path / "missing")
    if dist.get_rank() == 0:
        exact.record(small(), of_rows, ROWS, tmp_path / "reference")
    dist.barrier()
    stranger = nn.ModuleDict({"strange": nn.Linear(4, 6)}) if dist.get_rank() else small()
    with pytest.raises(ConfigurationError, match=r"no parameter 'strange.weight', which rank 1 holds"):
        exact.compare(stranger, lambda: None, tmp_path / "reference")
    # Also what fails on rank 1 alone: the conversion, a name, the step.
    last, model = dist.get_rank() == 1, small()

    def end() -> None:
        if last:
            raise ValueError("data ended")

    failures = [
        ("the conversion of the model failed on rank 1: Conf.*bfloat16", ConfigurationError, model, [str]),
        ("the conversion of the model failed on rank 1: KeyError: '0.weight'", KeyError, small(), {}.__getitem__),
        ("step failed on rank 1: ValueError: data ended", ValueError, small(), str),
    ]
    if last:
        model.bfloat16()
    for text, error, each, rename in failures:
        raised, words = (error, ".*") if last else (ConfigurationError, text)
        with pytest.raises(raised, match=words):
            exact.compare(each, end, tmp_path / "reference", rename=rename if last else str)
