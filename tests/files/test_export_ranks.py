"""Export on several ranks: the bytes of one process, under each parallelism and recipe, on any number of ranks."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist import ConfigurationError
from fp8dist.files import export_casts, export_files
from tests.support.collectives import counted_collectives
from tests.support.parallel import mesh_of, same_on_all_ranks
from tests.support.ranks import RankPool, on_ranks
from tests.support.serving import NATIVE, RECIPES, as_bits, multiplied, read, served, spread, tensor_bits
from tests.support.sharded import Mlp, shard, wide
from tests.support.training import batch, bits

pytestmark = pytest.mark.slow

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


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
    overrides: dict[str, Any] = {"body.layers.3": fp8dist.CurrentScaling()} if recipe == "block" else {}
    group = None if parallel == "none" else dist.group.WORLD
    gather = parallel.endswith("gather")
    return model, fp8dist.prepare(model, RECIPES[recipe], group=group, overrides=overrides, fp8_all_gather=gather)


def _train(called: nn.Module, manager: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        called(batch(0, step)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def reference(folder: Path, recipe: str) -> Tensors:
    """Train on one process, save weights and FP8 state, and return what it exports."""
    saved, exported = _reference(recipe)
    (folder / "saved").write_bytes(saved)
    return exported


@cache
def _reference(recipe: str) -> tuple[bytes, Tensors]:
    model, manager = _prepared(recipe, "none")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    manager.attach(optimizer=optimizer)
    _train(model, manager, optimizer, range(3))
    saved = io.BytesIO()
    torch.save((model.state_dict(), manager.state_dict()), saved)
    tensors = {name: tensor.clone() for name, tensor in fp8dist.exported(manager, format=NATIVE[recipe])}
    assert served(tensors) == as_bits(multiplied(model, batch(0, 9)[0]))
    return saved.getvalue(), tensor_bits(tensors)


def _resumed(folder: str, recipe: str, parallel: str) -> tuple[nn.Module, Any, Any]:
    """Return (what the loop calls, manager, optimizer) of a job that loads what ``reference`` saved."""
    model, manager = _prepared(recipe, parallel)
    weights, state = torch.load(Path(folder, "saved"), weights_only=True)
    model.load_state_dict(weights)
    called: nn.Module = model
    if parallel == "ddp":
        called = DistributedDataParallel(model)
    elif parallel in ("fsdp2", "gather"):
        called = shard(model, reshard="mixed")
    elif parallel.startswith("hsdp"):
        mesh = mesh_of((2, dist.get_world_size() // 2), ("replicate", "shard"))
        called = shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(called.parameters(), lr=0.01)
    manager.load_state_dict(state)
    manager.attach(called, optimizer=optimizer)
    return called, manager, optimizer


def _after_resume(folder: str, recipe: str, parallel: str) -> Tensors:
    called, manager, _ = _resumed(folder, recipe, parallel)
    tensors = {name: tensor.clone() for name, tensor in fp8dist.exported(manager, called, format=NATIVE[recipe])}
    if not parallel.endswith("gather"):  # ``_during`` compares these.
        assert served(tensors) == as_bits(multiplied(called, batch(dist.get_rank(), 9)[0]))
    same_on_all_ranks(tensor_bits(tensors))
    out = Path(folder, "out")
    fp8dist.export(manager, out, called, format=NATIVE[recipe], shard_bytes=100_000)
    dist.barrier()  # Under DDP only one rank writes, and others do not wait.
    assert tensor_bits(read(out)) == tensor_bits(tensors)
    return tensor_bits(tensors)


def _layouts(*parallels: str) -> list[tuple[str, str]]:
    """FSDP2 does not gather weights with scales for each row in FP8."""
    pairs = [(recipe, parallel) for parallel in parallels for recipe in RECIPES]
    return [(recipe, parallel) for recipe, parallel in pairs if not (recipe == "rowwise" and "gather" in parallel)]


LAYOUTS = _layouts("ddp", "fsdp2", "gather")


@pytest.mark.parametrize(("recipe", "parallel"), LAYOUTS)
def test_two_ranks_export_the_bytes_of_one_process(
    two_ranks: RankPool, tmp_path: Path, recipe: str, parallel: str
) -> None:
    expected = reference(tmp_path, recipe)
    assert two_ranks.run(_after_resume, str(tmp_path), recipe, parallel) == [expected] * 2


@pytest.mark.parametrize(
    ("recipe", "parallel"),
    # Shards of 64 rows are not whole blocks.
    [each for each in [*LAYOUTS, *_layouts("hsdp", "hsdp+gather")] if each != ("block", "gather")],
)
def test_four_ranks_export_the_bytes_of_one_process(
    four_ranks: RankPool, tmp_path: Path, recipe: str, parallel: str
) -> None:
    expected = reference(tmp_path, recipe)
    assert four_ranks.run(_after_resume, str(tmp_path), recipe, parallel) == [expected] * 4


def test_uneven_shards(three_ranks: RankPool, tmp_path: Path) -> None:
    expected = reference(tmp_path, "delayed")
    for parallel in ("fsdp2", "gather"):
        assert three_ranks.run(_after_resume, str(tmp_path), "delayed", parallel) == [expected] * 3
        for path in (tmp_path / "out").iterdir():
            path.unlink()


def _in_pieces(folder: str, parallel: str) -> Tensors:
    with mock.patch.object(export_casts, "_PIECE", 3000):
        return _after_resume(folder, "delayed", parallel)


@pytest.mark.parametrize("parallel", ["fsdp2", "gather", "hsdp"])
def test_large_tensors_are_gathered_in_pieces(four_ranks: RankPool, tmp_path: Path, parallel: str) -> None:
    """Some rows of each rank at a time, to save memory on a CPU; the last piece is smaller."""
    expected = reference(tmp_path, "delayed")
    assert four_ranks.run(_in_pieces, str(tmp_path), parallel) == [expected] * 4


def _products(called: nn.Module, x: Tensor) -> Any:
    return as_bits(multiplied(called, x))


def _during(recipe: str, parallel: str, bf16: bool) -> None:
    model, manager = _prepared(recipe, parallel)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if bf16 else MixedPrecisionPolicy()
    called = shard(model, reshard="mixed", mp_policy=policy)
    optimizer = torch.optim.AdamW(called.parameters(), lr=0.01)
    manager.attach(called, optimizer=optimizer)
    x = batch(dist.get_rank(), 9)[0]

    def compare() -> None:
        tensors = {name: tensor.clone() for name, tensor in fp8dist.exported(manager, called, format=NATIVE[recipe])}
        assert served(tensors) == _products(called, x)

    compare()
    for step in range(2):
        _train(called, manager, optimizer, range(step, step + 1))
        compare()
    _products(called, x)  # Some modules now hold gathered weights.
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


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("recipe", "parallel"),
    [("delayed", "fsdp2"), ("delayed", "gather"), ("current", "gather"), ("rowwise", "fsdp2"), ("block", "gather")],
)
def test_an_eval_forward_under_fsdp2_multiplies_with_the_exported_bytes(
    two_ranks: RankPool, recipe: str, parallel: str, bf16: bool
) -> None:
    """Before the first step, after steps, after evals, after writes to weights; gathered in bfloat16 or not."""
    two_ranks.run(_during, recipe, parallel, bf16)


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


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2", "gather"])
@on_ranks(2)
def test_training_goes_on_as_if_nothing_had_been_exported(parallel: str) -> None:
    def run(exports: bool) -> Any:
        model, manager = _prepared("delayed", parallel)
        called = DistributedDataParallel(model) if parallel == "ddp" else shard(model, reshard="mixed")
        optimizer = torch.optim.AdamW(called.parameters(), lr=0.01)
        manager.attach(called, optimizer=optimizer)
        for step in range(4):
            _train(called, manager, optimizer, range(step, step + 1))
            if exports:
                list(fp8dist.exported(manager, called))
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in called.parameters()]
        return manager.state_dict(), [bits(p) for p in whole]

    assert run(True) == run(False)


def _tensor_parallel(recipe: str, folder: str, styles: str, format: str) -> Any:
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    model = Mlp((256, 512, 256, 512))
    mesh = mesh_of((ranks,), ("tp",))
    manager = fp8dist.prepare(model, RECIPES[recipe], group=mesh)
    plan = {"c": ColwiseParallel, "r": RowwiseParallel, "w": lambda: ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh, {f"layers.{i}": plan[style]() for i, style in enumerate(styles) if style in plan})
    manager.attach(model)
    try:
        tensors = {name: tensor.clone() for name, tensor in fp8dist.exported(manager, format=format)}
    except ConfigurationError as error:
        return str(error)
    same_on_all_ranks(tensor_bits(tensors))
    fp8dist.export(manager, Path(folder, "out"), format=format)
    assert tensor_bits(read(Path(folder, "out"))) == tensor_bits(tensors)
    given = served(tensors)
    for name, (b, scale) in multiplied(model, batch(0, 9)[0]).items():
        placement = {"c": Shard(0), "w": Shard(0), "r": Shard(1)}.get(styles[int(name[-1])], Replicate())
        each = scale.expand(b.shape) if scale.numel() == 1 or scale.shape[0] == b.shape[0] else scale
        if each.shape != b.shape:
            each = scale.repeat_interleave(128, 0)[: b.shape[0]].repeat_interleave(128, 1)[:, : b.shape[1]]
        parts = [b.view(torch.uint8), each.contiguous()]
        whole = [DTensor.from_local(part, mesh, [placement]).full_tensor() for part in parts]
        assert given[name] == tuple(map(bits, whole)), name
    return tensor_bits(tensors)


def _alone(recipe: str, format: str) -> Tensors:
    torch.manual_seed(0)
    model = Mlp((256, 512, 256, 512))
    manager = fp8dist.prepare(model, RECIPES[recipe])
    manager.attach(model)
    return tensor_bits({name: tensor.clone() for name, tensor in fp8dist.exported(manager, format=format)})


@pytest.mark.parametrize("format", ["compressed-tensors", "block"])
def test_parts_of_tensor_parallelism_are_put_together(two_ranks: RankPool, tmp_path: Path, format: str) -> None:
    expected = _alone("delayed", format)
    for tensors in two_ranks.run(_tensor_parallel, "delayed", str(tmp_path), "crcr", format):
        # Slots of inputs have no amax before the first step, and no scale to compare.
        assert tensors == expected


def test_tensor_parallelism_on_four_ranks(four_ranks: RankPool, tmp_path: Path) -> None:
    expected = _alone("delayed", "compressed-tensors")
    results = four_ranks.run(_tensor_parallel, "delayed", str(tmp_path), "crcr", "compressed-tensors")
    assert results == [expected] * 4


@pytest.mark.parametrize(("recipe", "format"), [("rowwise", "compressed-tensors"), ("block", "block")])
def test_rows_and_blocks_that_are_not_cut_are_those_of_one_process(
    two_ranks: RankPool, tmp_path: Path, recipe: str, format: str
) -> None:
    styles = {"rowwise": "w.w.", "block": "crcr"}[recipe]
    expected = _alone(recipe, format)
    assert two_ranks.run(_tensor_parallel, recipe, str(tmp_path), styles, format) == [expected] * 2


def test_each_part_of_a_weight_has_a_scale_of_its_own_with_current_scaling(two_ranks: RankPool, tmp_path: Path) -> None:
    """Its forwards multiply with other bytes than one process does. Parts by rows fit a scale per row, and parts of
    whole blocks the block format."""
    tensors = two_ranks.run(_tensor_parallel, "current", str(tmp_path), "w.w.", "compressed-tensors")[0]
    assert tensors["layers.0.weight_scale"][1] == (256, 1)
    assert tensors["layers.1.weight_scale"][1] == (1,)
    message = two_ranks.run(_tensor_parallel, "current", str(tmp_path), "crcr", "compressed-tensors")[0]
    assert "CurrentScaling has one scale for each 512 x 128 elements of its weight (512, 256)" in message
    assert message.endswith("formats that fit: block")


def test_the_block_format_holds_the_scales_of_parts(two_ranks: RankPool, tmp_path: Path) -> None:
    tensors = two_ranks.run(_tensor_parallel, "current", str(tmp_path), "crcr", "block")[0]
    assert tensors["layers.1.weight_scale_inv"][1] == (4, 2)


def test_rows_that_tensor_parallelism_cuts_are_refused(two_ranks: RankPool, tmp_path: Path) -> None:
    for message in two_ranks.run(_tensor_parallel, "rowwise", str(tmp_path), "crcr", "compressed-tensors"):
        assert message.startswith("layers.1: tensor parallelism cuts its weight (512, 256) along dim 1 over 2 ranks")


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
    tensors = {name: tensor.clone() for name, tensor in fp8dist.exported(manager)}
    for i, dim in enumerate((0, 1)):
        name = f"layers.{i}"
        rows, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
        weight = model.layers[i].weight.full_tensor()  # type: ignore[operator]
        assert bits(scale) == bits(weight.abs().max().reshape(1) / 448)
        assert bits(rows) == bits((weight * (448 / weight.abs().max())).to(rows.dtype))
        part, used = seen[name]
        assert bits(rows.chunk(2, dim)[dist.get_rank()].contiguous()) == bits(part)
        assert bits(used.reshape(1)) == bits(scale)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("recipe", "gather"), [("delayed", False), ("delayed", True), ("block", False)])
@on_ranks(4)
def test_fsdp2_and_tensor_parallelism_together(recipe: str, gather: bool, bf16: bool) -> None:
    torch.manual_seed(0)
    model = Mlp((256, 512, 256, 512))
    mesh = mesh_of((2, 2), ("dp", "tp"))
    manager = fp8dist.prepare(model, RECIPES[recipe], group=mesh, fp8_all_gather=gather)
    plan = {f"layers.{i}": [ColwiseParallel, RowwiseParallel][i % 2]() for i in range(4)}
    parallelize_module(model, mesh["tp"], plan)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if bf16 else MixedPrecisionPolicy()
    called = shard(model, mesh=mesh["dp"], mp_policy=policy)
    optimizer = torch.optim.AdamW(called.parameters(), lr=0.01)
    manager.attach(called, optimizer=optimizer)
    for step in range(2):
        called(batch(0, step)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    given = served({name: tensor.clone() for name, tensor in fp8dist.exported(manager, called, format=NATIVE[recipe])})
    for name, (b, scale) in multiplied(called, batch(0, 9)[0]).items():
        each = spread(scale, b.shape).contiguous()
        placement = Shard(int(name[-1]) % 2)
        parts = [DTensor.from_local(part, mesh["tp"], [placement]) for part in (b.view(torch.uint8), each)]
        assert given[name] == tuple(bits(part.full_tensor()) for part in parts), name


@on_ranks(2)
def test_layouts_that_are_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

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


@on_ranks(2)
def test_all_ranks_hear_of_a_failure_of_the_writing_one(tmp_path: Path) -> None:
    model, manager = _prepared("delayed", "fsdp2")
    called = fully_shard(model)
    assert isinstance(called, FSDPModule)
    manager.attach(called, optimizer=torch.optim.SGD(called.parameters(), lr=0.01))
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "something").touch()
    with pytest.raises(ConfigurationError, match="exists: export to a new folder"):
        fp8dist.export(manager, tmp_path / "out")
    with counted_collectives() as calls:
        list(fp8dist.exported(manager, called))
    same_on_all_ranks(calls.names)
    assert len(calls.names) <= 20  # One gather for each tensor that is sharded.


@pytest.mark.parametrize("parallel", ["fsdp2", "gather"])
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
    assert tensor_bits(read(tmp_path / "out")) == tensor_bits(dict(fp8dist.exported(manager, called)))


def _only_the_first(folder: str) -> None:
    called, manager, _ = _resumed(folder, "delayed", "ddp")
    if dist.get_rank() == 0:
        fp8dist.export(manager, Path(folder, "out"), called)
        read(Path(folder, "out"))


def test_the_first_rank_of_ddp_may_export_alone(two_ranks: RankPool, tmp_path: Path) -> None:
    reference(tmp_path, "delayed")
    two_ranks.run(_only_the_first, str(tmp_path))
