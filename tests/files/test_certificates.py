"""Digests of certificates: those of the manual, computed by hashlib alone."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch

from fp8dist.errors import CheckpointError
from fp8dist.files.certificate_reading import Certified, model_digest, read_certificate, sealed
from fp8dist.files.safetensor_files import DTYPES
from fp8dist.files.verification import sha256_of
from tests.support.pages import pages

PAGE = pages()["docs/design/formats.md"]
VECTORS = re.findall(r"^\| `([^`]+)` \| `(\w+)` \| `([\w]+)` \|(?: `(\w+)`)? +\| `(\w{64})` \|$", PAGE, re.M)
(MODEL,) = re.findall(r"^`([0-9a-f]{64})`\.$", PAGE, re.M)


def test_the_manual_has_the_digests_that_hashlib_computes() -> None:
    """As the page says it, without this library."""
    assert len(VECTORS) == 4
    model = hashlib.sha256(b"fp8dist model 1\n")
    for name, dtype, sizes, data, digest in sorted(VECTORS, key=lambda vector: vector[0].encode()):
        assert hashlib.sha256(bytes.fromhex(data)).hexdigest() == digest
        model.update(f"{len(name.encode())} {name} {dtype} {sizes} {digest}\n".encode())
    assert model.hexdigest() == MODEL


def test_the_library_computes_the_digests_of_the_manual() -> None:
    tensors = []
    for name, dtype, sizes, data, _ in VECTORS:
        shape = () if sizes == "scalar" else tuple(map(int, sizes.split("x")))
        flat = torch.tensor(list(bytes.fromhex(data)), dtype=torch.uint8).view(getattr(torch, DTYPES[dtype]))
        tensors.append(Certified(name, dtype, shape, sha256_of(flat.reshape(shape))))
    assert [tensor.sha256 for tensor in tensors] == [vector[-1] for vector in VECTORS]
    assert model_digest(tensors) == model_digest(reversed(tensors)) == MODEL


def test_strides_do_not_matter() -> None:
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
