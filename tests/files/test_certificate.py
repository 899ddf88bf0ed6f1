"""The certificate that an export writes: what it says, and its digests: those of the manual, computed by hashlib
alone."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fp8dist
from fp8dist.errors import CheckpointError
from fp8dist.files.certificate import Certified, model_digest, read_certificate, sealed
from fp8dist.files.safetensor_files import DTYPES
from fp8dist.files.verification import sha256_of
from tests.files.test_export import trained
from tests.support.pages import pages
from tests.support.ranks import on_ranks
from tests.support.serving import NATIVE, RECIPES, read
from tests.support.sharded import shard, wide
from tests.support.training import batch, bits


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


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "parallel"), [("delayed", "ddp"), ("block", "fsdp2")])
@on_ranks(2)
def test_it_says_what_was_proved_and_checked(tmp_path: Path, recipe: str, parallel: str) -> None:
    """That all else is the same from any number of ranks: test_export_ranks.py. And offline: test_export_experts.py."""
    torch.manual_seed(0)
    model: Any = wide()
    manager = fp8dist.prepare(model, RECIPES[recipe], group=dist.group.WORLD)
    called = DistributedDataParallel(model) if parallel == "ddp" else shard(model)
    optimizer = torch.optim.AdamW(called.parameters(), lr=0.01)
    manager.attach(called, optimizer=optimizer)
    for number in range(4):
        if number == 3:
            manager.check()
        called(batch(0, number)[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    fp8dist.export(manager, tmp_path / "out", called, format=NATIVE[recipe])
    dist.barrier()
    found = certificate_of(tmp_path / "out")
    proven, checked = manager.verified.proven_step, manager.verified.checked_step
    assert (found["ranks"], found["proven"], found["checked"]) == (2, proven, checked)
    assert proven == (4 if recipe == "delayed" else None)  # Other recipes keep no state.
    assert checked == (None if parallel == "fsdp2" else 3)
    last = found["last_check"]
    assert (last["step"], "parameter" in last["compared"]) == (3, parallel != "fsdp2")
    assert list(last["unverified"]) == (["parameter"] if parallel == "fsdp2" else [])


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
