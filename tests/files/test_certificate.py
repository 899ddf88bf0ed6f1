"""The certificate that an export writes: what it says, that it is the same from any number of ranks, and its digests:
those of the manual, computed by hashlib alone."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist.cli.main import main
from fp8dist.errors import CheckpointError
from fp8dist.files.certificate import Certified, model_digest, read_certificate, sealed
from fp8dist.files.safetensor_files import DTYPES
from fp8dist.files.verification import sha256_of
from tests.files.test_export import trained
from tests.support.pages import pages
from tests.support.ranks import RankPool
from tests.support.serving import NATIVE, RECIPES, read
from tests.support.sharded import shard, wide
from tests.support.training import batch, bits

SAME = ("export", "step", "recipes", "config", "tied", "tensors", "model")


def certificate_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "fp8dist-certificate.json").read_text())
    return content


def test_it_describes_the_export(tmp_path: Path) -> None:
    _, manager, _ = trained(overrides={"layers.3": "high", "layers.1": fp8dist.CurrentScaling()})
    fp8dist.export(manager, tmp_path / "out", run="lr 0.01", shard_bytes=100_000)
    found = certificate_of(tmp_path / "out")
    tensors = read(tmp_path / "out")
    digests = {name: hashlib.sha256(bits(tensor)).hexdigest() for name, tensor in tensors.items()}
    assert {tensor["name"]: tensor["sha256"] for tensor in found["tensors"]} == digests
    assert {tensor["name"]: tuple(tensor["shape"]) for tensor in found["tensors"]} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    assert (found["export"], found["step"], found["run"], found["ranks"]) == ("compressed-tensors", 3, "lr 0.01", 1)
    assert found["versions"]["torch"] == torch.__version__
    roles = {tensor["name"]: tensor["role"] for tensor in found["tensors"]}
    assert roles["layers.0.input_scale"] == "input_scale"
    assert roles["layers.3.weight"] == roles["layers.0.bias"] == "high"
    by_name = {t["name"]: found["recipes"][t["recipe"]]["recipe"] for t in found["tensors"] if "recipe" in t}
    assert by_name == {
        "layers.0.weight": "DelayedScaling",
        "layers.1.weight": "CurrentScaling",
        "layers.2.weight": "DelayedScaling",
    }


def _exported(folder: str, recipe: str, parallel: str) -> tuple[int | None, int | None]:
    """Train three steps with equal batches on all ranks; save a checkpoint, and export. Return what is proved."""
    torch.manual_seed(0)
    model: Any = wide()
    alone = parallel == "none"
    manager = fp8dist.prepare(model, RECIPES[recipe], group=None if alone else dist.group.WORLD)
    called = {"none": lambda m: m, "ddp": DistributedDataParallel, "fsdp2": shard}[parallel](model)
    optimizer = torch.optim.AdamW(called.parameters(), lr=0.01)
    manager.attach(called, optimizer=optimizer)
    for number in range(3):
        called(batch(0, number)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    manager.check()
    fp8dist.export(manager, Path(folder, parallel), called, format=NATIVE[recipe])
    if not alone:
        dist.barrier()
        dcp.save({"model": model, "fp8": manager}, checkpoint_id=Path(folder, "checkpoint"))
    return manager.verified.proven_step, manager.verified.checked_step


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "parallel"), [("delayed", "ddp"), ("block", "fsdp2")])
def test_two_ranks_one_rank_and_the_offline_export(
    two_ranks: RankPool, tmp_path: Path, recipe: str, parallel: str
) -> None:
    _exported(str(tmp_path), recipe, "none")
    ((proven, checked), *others) = two_ranks.run(_exported, str(tmp_path), recipe, parallel)
    assert others == [(proven, checked)]
    alone, found = certificate_of(tmp_path / "none"), certificate_of(tmp_path / parallel)
    assert (found["ranks"], found["proven"], found["checked"]) == (2, proven, checked)
    assert proven == (3 if recipe == "delayed" else None)  # Other recipes keep no state.
    assert checked == (None if parallel == "fsdp2" else 3)
    last = found["last_check"]
    assert (last["step"], "parameter" in last["compared"]) == (3, parallel != "fsdp2")
    assert list(last["unverified"]) == (["parameter"] if parallel == "fsdp2" else [])
    checkpoint, offline = str(tmp_path / "checkpoint"), tmp_path / "offline"
    assert main(["export", checkpoint, "--out", str(offline), "--format", NATIVE[recipe]]) == 0
    for each in (found, certificate_of(offline)):
        assert {key: each[key] for key in SAME} == {key: alone[key] for key in SAME}
    assert main(["verify", checkpoint, str(tmp_path / parallel)]) == 0


PAGE = pages()["docs/design/formats.md"]
VECTORS = re.findall(r"^\| `([^`]+)` \| `(\w+)` \| `([\w]+)` \|(?: `(\w+)`)? +\| `(\w{64})` \|$", PAGE, re.M)
(MODEL,) = re.findall(r"^`([0-9a-f]{64})`\.$", PAGE, re.M)


def test_the_digests_of_the_manual_are_those_of_hashlib_and_of_the_library() -> None:
    """As the page says it."""
    assert len(VECTORS) == 4
    model = hashlib.sha256(b"fp8dist model 1\n")
    for name, dtype, sizes, data, digest in sorted(VECTORS, key=lambda vector: vector[0].encode()):
        assert hashlib.sha256(bytes.fromhex(data)).hexdigest() == digest
        model.update(f"{len(name.encode())} {name} {dtype} {sizes} {digest}\n".encode())
    assert model.hexdigest() == MODEL
    tensors = []
    for name, dtype, sizes, data, _ in VECTORS:
        shape = () if sizes == "scalar" else tuple(map(int, sizes.split("x")))
        flat = torch.tensor(list(bytes.fromhex(data)), dtype=torch.uint8).view(getattr(torch, DTYPES[dtype]))
        tensors.append(Certified(name, dtype, shape, sha256_of(flat.reshape(shape))))
    assert [tensor.sha256 for tensor in tensors] == [vector[-1] for vector in VECTORS]
    assert model_digest(tensors) == model_digest(reversed(tensors)) == MODEL
    weight = torch.arange(6.0).reshape(2, 3)
    assert sha256_of(weight.t()) == hashlib.sha256(weight.t().contiguous().numpy().tobytes()).hexdigest()


def test_names_cannot_pretend_to_be_further_tensors() -> None:
    digest = hashlib.sha256(b"").hexdigest()
    two = [Certified("a", "F32", (0,), digest), Certified("b", "F32", (0,), digest)]
    one = [Certified(f"a F32 0 {digest}\n1 b", "F32", (0,), digest)]
    assert model_digest(two) != model_digest(one)


def test_the_digest_of_the_file(tmp_path: Path) -> None:
    content = {"format": "fp8dist certificate", "version": 1, "step": 3, "config": {}, "tied": {}, "tensors": []}
    path = tmp_path / "certificate"
    path.write_bytes(sealed({**content, "run": '"digest": "' + "1" * 64 + '"\n}\n', "model": model_digest([])}))
    data = path.read_bytes()
    digest = json.loads(data)["digest"]
    assert data.endswith(f'"digest": "{digest}"\n}}\n'.encode())
    assert hashlib.sha256(data.replace(digest.encode(), b"0" * 64)).hexdigest() == digest
    assert read_certificate(str(path)).step == 3
    path.write_bytes(data.replace(b'"step": 3', b'"step": 4'))
    with pytest.raises(CheckpointError, match="was changed after it was written"):
        read_certificate(str(path))
