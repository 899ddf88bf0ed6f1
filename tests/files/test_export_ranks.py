"""Export on several ranks: the bytes of one process, under each parallelism and recipe, on any number of ranks."""

from __future__ import annotations

import io
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import ConfigurationError
from fp8dist.files import export_casts, export_files
from tests.support.collectives import counted_collectives
from tests.support.parallel import mesh_of, same_on_all_ranks
from tests.support.ranks import on_ranks
from tests.support.serving import NATIVE, RECIPES, as_bits, exported, multiplied, read, served, spread, tensor_bits
from tests.support.sharded import Mlp, shard, wide
from tests.support.suite import few
from tests.support.training import batch, bits

pytestmark = pytest.mark.slow

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]

CERTIFICATE = "fp8dist-certificate.json"
SAME = ("export", "step", "recipes", "config", "tied", "tensors", "model")
"""Fields of a certificate that any number of ranks writes alike."""


class Tail(nn.Module):
    """``wide`` with a norm and a head in high precision."""

    def __init__(self) -> None:
        super().__init__()
        self.body = wide()
        self.norm = nn.LayerNorm(16)
        self.lm_head = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.norm(self.body(x)))


def _prepared(recipe: str, parallel: str) -> tuple[Tail, Any]:
    torch.manual_seed(0)
    model = Tail()
    last = {"block": fp8dist.CurrentScaling(), "mx": "high"}.get(recipe)  # It has no whole blocks.
    overrides: dict[str, Any] = {} if last is None else {"body.layers.3": last}
    group = None if parallel == "none" else dist.group.WORLD
    gather = parallel.endswith("gather")
    return model, fp8dist.prepare(model, RECIPES[recipe], group=group, overrides=overrides, fp8_all_gather=gather)


def _train(called: nn.Module, manager: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        called(batch(0, step)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def expected(request: pytest.FixtureRequest, tmp_path: Path) -> Tensors:
    """What one process exports after training. Its weights and FP8 state, and its certificate, are in ``tmp_path``."""
    recipe = request.getfixturevalue("recipe") if "recipe" in request.fixturenames else "delayed"
    saved, certificate, tensors = _reference(recipe)
    (tmp_path / "saved").write_bytes(saved)
    (tmp_path / "certificate").write_bytes(certificate)
    return tensors


@cache
def _reference(recipe: str) -> tuple[bytes, bytes, Tensors]:
    model, manager = _prepared(recipe, "none")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager.attach(optimizer=optimizer)
    _train(model, manager, optimizer, range(3))
    saved = io.BytesIO()
    torch.save((model.state_dict(), manager.state_dict()), saved)
    tensors = exported(manager, format=NATIVE[recipe])
    assert served(tensors) == as_bits(multiplied(model, batch(0, 9)[0]))
    with tempfile.TemporaryDirectory() as folder:
        fp8dist.export(manager, Path(folder, "out"), format=NATIVE[recipe])
        return saved.getvalue(), Path(folder, "out", CERTIFICATE).read_bytes(), tensor_bits(tensors)


def _resumed(folder: Path, recipe: str, parallel: str) -> tuple[nn.Module, Any]:
    """Return (what the loop calls, manager) of a job that loads what ``expected`` saved."""
    model, manager = _prepared(recipe, parallel)
    weights, state = torch.load(folder / "saved", weights_only=True)
    model.load_state_dict(weights)
    called: nn.Module = model
    if parallel == "ddp":
        called = DistributedDataParallel(model)
    elif parallel in ("fsdp2", "gather"):
        called = shard(model, reshard="mixed")
    elif parallel.startswith("hsdp"):
        mesh = mesh_of((2, dist.get_world_size() // 2), ("replicate", "shard"))
        called = shard(model, mesh=mesh)
    manager.load_state_dict(state)
    manager.attach(called, optimizer=torch.optim.AdamW(called.parameters(), lr=0.01))
    return called, manager


def _assert_exported(folder: Path, recipe: str, parallel: str, expected: Tensors) -> None:
    """Assert that all ranks of a resumed job export the expected bytes, and one of them to a folder."""
    called, manager = _resumed(folder, recipe, parallel)
    tensors = exported(manager, called, format=NATIVE[recipe])
    assert tensor_bits(tensors) == expected
    if not parallel.endswith("gather"):  # Gathered weights are compared under FSDP2, below.
        assert served(tensors) == as_bits(multiplied(called, batch(dist.get_rank(), 9)[0]))
    out = folder / f"out of {parallel}"
    fp8dist.export(manager, out, called, format=NATIVE[recipe], shard_bytes=100_000)
    dist.barrier()  # Under DDP only one rank writes, and others do not wait.
    assert tensor_bits(read(out)) == expected
    found, alone = (json.loads(path.read_text()) for path in (out / CERTIFICATE, folder / "certificate"))
    assert {key: found[key] for key in SAME} == {key: alone[key] for key in SAME}


def _layouts(*parallels: str) -> list[tuple[str, str]]:
    """FSDP2 does not gather weights in FP8 whose casts for dgrad have scales of their own."""
    pairs = [(recipe, parallel) for parallel in parallels for recipe in RECIPES]
    return [
        (recipe, parallel) for recipe, parallel in pairs if not (RECIPES[recipe].ungathered and "gather" in parallel)
    ]


# Shards of 64 rows are not whole blocks: those of two ranks are, below.
ON_FOUR = [each for each in _layouts("ddp", "fsdp2", "gather", "hsdp", "hsdp+gather") if each != ("block", "gather")]


EACH = [("delayed", "ddp"), ("rowwise", "fsdp2"), ("mx", "hsdp"), ("current", "hsdp+gather")]


@pytest.mark.parametrize(("recipe", "parallel"), few(ON_FOUR, *EACH))
@on_ranks(4)
def test_four_ranks_export_the_bytes_of_one_process(
    tmp_path: Path, recipe: str, parallel: str, expected: Tensors
) -> None:
    _assert_exported(tmp_path, recipe, parallel, expected)


@pytest.mark.parametrize("recipe", ["block"])
@on_ranks(2)
def test_two_ranks_export_blocks_that_are_gathered_in_fp8(tmp_path: Path, recipe: str, expected: Tensors) -> None:
    _assert_exported(tmp_path, recipe, "gather", expected)


@on_ranks(3)
def test_uneven_shards_in_pieces(tmp_path: Path, expected: Tensors) -> None:
    """Some rows of each rank at a time, to save memory on a CPU; the last piece is smaller."""
    for parallel in ("fsdp2", "gather"):
        with mock.patch.object(export_casts, "_PIECE", 3000 if parallel == "gather" else 1 << 20):
            _assert_exported(tmp_path, "delayed", parallel, expected)


GATHERED = [
    *(("delayed", "gather", False), ("rowwise", "fsdp2", False), ("block", "gather", True)),
    *(("delayed", "fsdp2", True), ("current", "gather", True)),
]


@pytest.mark.parametrize(("recipe", "parallel", "bf16"), few(GATHERED, *GATHERED[:3]))
@on_ranks(2)
def test_an_eval_forward_under_fsdp2_multiplies_with_the_exported_bytes(recipe: str, parallel: str, bf16: bool) -> None:
    """Before the first step, after steps, after evals, after writes to weights; gathered in bfloat16 or not."""
    model, manager = _prepared(recipe, parallel)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if bf16 else MixedPrecisionPolicy()
    called = shard(model, reshard="mixed", mp_policy=policy)
    optimizer = torch.optim.AdamW(called.parameters(), lr=0.01)
    manager.attach(called, optimizer=optimizer)
    x = batch(dist.get_rank(), 9)[0]

    def compare() -> None:
        tensors = exported(manager, called, format=NATIVE[recipe])
        assert served(tensors) == as_bits(multiplied(called, x))

    compare()
    _train(called, manager, optimizer, range(1))
    compare()
    multiplied(called, x)  # Some modules now hold gathered weights.
    compare()
    for module in called.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    with torch.no_grad():
        for layer in model.body.layers:
            layer.weight.mul_(3)  # type: ignore[operator]
    compare()
    _train(called, manager, optimizer, range(3, 4))
    compare()


@on_ranks(2)
def test_a_module_in_high_precision_whose_weight_is_gathered_in_fp8() -> None:
    """Forwards multiply with the dequantised bytes, so these are exported."""
    model, manager = _prepared("delayed", "gather")
    called = shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    manager.attach(called, optimizer=torch.optim.AdamW(called.parameters(), lr=0.01))
    manager.set_precision("body.layers.1", "high")
    seen = {}
    handle = model.body.layers[1].register_forward_pre_hook(
        lambda module, args: seen.update(weight=module.weight.high_precision().clone())
    )
    with torch.no_grad():
        called.eval()(batch(dist.get_rank(), 9)[0])
    handle.remove()
    tensors = dict(fp8dist.exported(manager))
    assert tensors["body.layers.1.weight"].dtype == torch.bfloat16
    assert bits(tensors["body.layers.1.weight"]) == bits(seen["weight"])
    assert "body.layers.1.weight_scale" not in tensors


@pytest.mark.parametrize("parallel", few(["ddp", "fsdp2", "gather"], "gather"))
@on_ranks(2)
def test_training_goes_on_as_if_nothing_had_been_exported(parallel: str) -> None:
    def run(exports: bool) -> Any:
        model, manager = _prepared("delayed", parallel)
        called = DistributedDataParallel(model) if parallel == "ddp" else shard(model, reshard="mixed")
        optimizer = torch.optim.AdamW(called.parameters(), lr=0.01)
        manager.attach(called, optimizer=optimizer)
        for step in range(3):
            _train(called, manager, optimizer, range(step, step + 1))
            if exports:
                list(fp8dist.exported(manager, called))
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in called.parameters()]
        return manager.state_dict(), [bits(p) for p in whole]

    assert run(True) == run(False)


def _mlp(recipe: str, mesh: Any = None, styles: str = "") -> tuple[nn.Module, Any]:
    """Return a model and its manager. ``styles``: how layers are cut: by columns (c; w: whole outputs), rows or not."""
    torch.manual_seed(0)
    model = Mlp((256, 512, 256, 512))
    manager = fp8dist.prepare(model, RECIPES[recipe], group=mesh)
    plan = {"c": ColwiseParallel, "r": RowwiseParallel, "w": lambda: ColwiseParallel(output_layouts=Replicate())}
    if mesh is not None:
        cut = {f"layers.{i}": plan[style]() for i, style in enumerate(styles) if style in plan}
        parallelize_module(model, mesh, cut)
    return model, manager.attach(model)


def _assert_put_together(tensors: dict[str, Tensor], called: nn.Module, mesh: Any, styles: str) -> None:
    """Assert that an export holds what the ranks' parts make together that an eval forward multiplies with."""
    given = served(tensors)
    for name, (b, scale) in multiplied(called, batch(0, 9)[0]).items():
        placement = {"c": Shard(0), "w": Shard(0), "r": Shard(1)}.get(styles[int(name[-1])], Replicate())
        parts = [b.view(torch.uint8), spread(scale, b.shape).contiguous()]
        whole = [DTensor.from_local(part, mesh, [placement]).full_tensor() for part in parts]
        assert given[name] == tuple(map(bits, whole)), name


def _tensor_parallel(folder: Path, recipe: str, styles: str, format: str) -> Tensors:
    """Export under tensor parallelism, to a folder as well."""
    mesh = mesh_of((dist.get_world_size(),), ("tp",))
    model, manager = _mlp(recipe, mesh, styles)
    tensors = exported(manager, format=format)
    same_on_all_ranks(tensor_bits(tensors))
    fp8dist.export(manager, folder / "out", format=format)
    assert tensor_bits(read(folder / "out")) == tensor_bits(tensors)
    _assert_put_together(tensors, model, mesh, styles)
    return tensor_bits(tensors)


@pytest.fixture
def alone(recipe: str, format: str) -> Tensors:
    """What one process exports before its first step."""
    _model, manager = _mlp(recipe)
    return tensor_bits(exported(manager, format=format))


# Slots of inputs have no amax before the first step, and no scale to compare.
CUT = [
    *(("delayed", "crcr", "compressed-tensors"), ("delayed", "crcr", "block")),
    # Rows and blocks that are not cut.
    *(("rowwise", "w.w.", "compressed-tensors"), ("block", "crcr", "block")),
    # Each part has a scale of its own, and forwards multiply with other bytes than one process does. Parts by rows
    # fit a scale per row, and parts of whole blocks the block format.
    *(("current", "w.w.", "compressed-tensors"), ("current", "crcr", "block")),
]


@pytest.mark.parametrize(("recipe", "styles", "format"), few(CUT, CUT[0], CUT[2], CUT[3], CUT[5]))
@on_ranks(2)
def test_parts_of_tensor_parallelism_are_put_together(
    tmp_path: Path, recipe: str, styles: str, format: str, alone: Tensors
) -> None:
    found = _tensor_parallel(tmp_path, recipe, styles, format)
    if recipe == "current":
        shape = {"block": ("layers.1.weight_scale_inv", (4, 2))}.get(format, ("layers.0.weight_scale", (256, 1)))
        assert found[shape[0]][1] == shape[1]
    else:
        assert found == alone


@on_ranks(2)
def test_parts_of_which_one_has_outgrown_the_scale() -> None:
    """All ranks cast their parts with the scale of the whole weight, in an eval forward and in an export."""
    torch.manual_seed(0)
    model = Mlp((256, 512))
    mesh = mesh_of((2,), ("tp",))
    manager = fp8dist.prepare(model, RECIPES["delayed"], group=mesh)
    parallelize_module(model, mesh, {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()})
    manager.attach(model)
    with torch.no_grad():
        for layer, factor in zip(model.layers, (1.2, 30.0)):
            layer.weight.to_local().mul_(factor if dist.get_rank() else 1)  # type: ignore[operator]
    seen = multiplied(model, batch(0, 9)[0])
    tensors = exported(manager)
    for i, dim in enumerate((0, 1)):
        name = f"layers.{i}"
        rows, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
        weight = model.layers[i].weight.full_tensor()  # type: ignore[operator]
        assert bits(scale) == bits(weight.abs().max().reshape(1) / 448)
        assert bits(rows) == bits((weight * (448 / weight.abs().max())).to(rows.dtype))
        part, used = seen[name]
        assert bits(rows.chunk(2, dim)[dist.get_rank()].contiguous()) == bits(part)
        assert bits(used.reshape(1)) == bits(scale)


@pytest.mark.parametrize("bf16", few([False, True], True))
@pytest.mark.parametrize(
    ("recipe", "gather"), few([("delayed", False), ("delayed", True), ("block", False)], ("delayed", True))
)
@on_ranks(4)
def test_fsdp2_and_tensor_parallelism_together(recipe: str, gather: bool, bf16: bool) -> None:
    torch.manual_seed(0)
    model = Mlp((256, 512, 256, 512))
    mesh = mesh_of((2, 2), ("dp", "tp"))
    manager = fp8dist.prepare(model, RECIPES[recipe], group=mesh, fp8_all_gather=gather)
    parallelize_module(
        model, mesh["tp"], {f"layers.{i}": [ColwiseParallel, RowwiseParallel][i % 2]() for i in range(4)}
    )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if bf16 else MixedPrecisionPolicy()
    called = shard(model, mesh=mesh["dp"], mp_policy=policy)
    optimizer = torch.optim.AdamW(called.parameters(), lr=0.01)
    manager.attach(called, optimizer=optimizer)
    for step in range(2):
        called(batch(0, step)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    _assert_put_together(exported(manager, called, format=NATIVE[recipe]), called, mesh["tp"], "crcr")


@on_ranks(2)
def test_layouts_that_are_refused(tmp_path: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    for recipe, why in (
        ("current", r"has one scale for each 512 x 128 elements of its weight \(512, 256\).*that fit: block$"),
        ("rowwise", r"^layers\.1: tensor parallelism cuts its weight \(512, 256\) along dim 1 over 2 ranks"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            _tensor_parallel(tmp_path, recipe, "crcr", "compressed-tensors")

    model, manager = _prepared("delayed", "ddp")
    called = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    manager.attach(called, optimizer=torch.optim.SGD(called.parameters(), lr=0.01))
    with pytest.raises(ConfigurationError, match=r"FSDP1 keeps weights in flat parameters.*export a checkpoint"):
        fp8dist.exported(manager, called)
    other = Tail()
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    manager = fp8dist.prepare(other, group=dist.group.WORLD, groups={"body.layers.1": alone})
    manager.attach(other)
    with pytest.raises(ConfigurationError, match="several groups of ranks share FP8 state"):
        fp8dist.export(manager, "nowhere")


@pytest.mark.parametrize("parallel", few(["fsdp2", "gather"], "gather"))
@on_ranks(2)
def test_a_disk_that_is_full_in_the_middle(tmp_path: Path, parallel: str) -> None:
    """All ranks raise the one error, none waits, and the next export works."""
    model, manager = _prepared("delayed", parallel)
    called = shard(model)
    manager.attach(called, optimizer=torch.optim.SGD(called.parameters(), lr=0.01))
    written = []

    def write(self: Any, tensor: Any, value: Tensor) -> None:
        written.append(tensor.name)
        if len(written) == 5:
            raise OSError(28, "No space left on device", "model-00001")

    with (
        mock.patch.object(export_files.Folder, "write", write),
        pytest.raises(ConfigurationError, match=r"^model-00001 cannot be written: No space left on device$"),
    ):
        fp8dist.export(manager, tmp_path / "out", called)
    assert len(written) == (5 if dist.get_rank() == 0 else 0)
    dist.barrier()
    assert list(tmp_path.iterdir()) == []
    dist.barrier()
    fp8dist.export(manager, tmp_path / "out", called)
    dist.barrier()
    with counted_collectives() as calls:
        tensors = dict(fp8dist.exported(manager, called))
    same_on_all_ranks(calls.names)
    assert len(calls.names) <= 20  # One gather for each tensor that is sharded.
    assert tensor_bits(read(tmp_path / "out")) == tensor_bits(tensors)


@on_ranks(2)
def test_the_first_rank_of_ddp_may_export_alone(tmp_path: Path, expected: Tensors) -> None:
    called, manager = _resumed(tmp_path, "delayed", "ddp")
    if dist.get_rank() == 0:
        fp8dist.export(manager, tmp_path / "out", called)
        assert tensor_bits(read(tmp_path / "out")) == expected
