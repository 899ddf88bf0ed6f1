"""The certificate of an export: what its writer says about tensors, recipes, the job and its sync."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fp8dist.common.versions import version_of
from fp8dist.files.certificate_reading import FORMAT, VERSION, Certified, model_digest, sealed
from fp8dist.files.export_tensors import ExportedTensor
from fp8dist.files.safetensor_files import dtype_text
from fp8dist.state.manifest import NUMERICS_VERSION
from fp8dist.state.recipe import Recipe

__all__ = ["Origin", "certificate_of"]


class Origin(NamedTuple):
    """Where an export comes from.

    ``step``: steps of the FP8 state. ``run``: a name of the user's. ``ranks``: number of ranks of the job. ``proven``,
    ``checked``: ``proven_step`` and ``checked_step`` of the manager. ``last_check``: step of its last check that found
    no difference, and what was compared. None: not known.
    """

    step: int
    run: str | None = None
    ranks: int | None = None
    proven: int | None = None
    checked: int | None = None
    last_check: Mapping[str, Any] | None = None


def certificate_of(
    layout: str,
    tensors: Sequence[ExportedTensor],
    recipes: Mapping[str, Recipe],
    tied: Mapping[str, str],
    config: Mapping[str, Any],
    origin: Origin,
    digests: Mapping[str, str],
) -> bytes:
    """Return the bytes of ``fp8dist-certificate.json``. docs/design/formats.md describes its fields.

    Args:
        layout: format of the export.
        recipes: by name, recipes of the modules whose weights are in FP8.
        tied: as ``Export.tied``.
        config: the content of config.json.
        digests: by name, SHA-256 of the bytes of each tensor.
    """
    ordered = sorted(tensors, key=lambda tensor: tensor.name)
    certified = [Certified(t.name, dtype_text(t.dtype), t.shape, digests[t.name]) for t in ordered]
    kinds = list(dict.fromkeys(recipe for _, recipe in sorted(recipes.items(), key=lambda item: item[0])))
    roles = [
        {"role": t.role, **({"recipe": kinds.index(recipes[t.module])} if t.role == "weight" else {})} for t in ordered
    ]
    return sealed(
        {
            "format": FORMAT,
            "version": VERSION,
            "export": layout,
            **origin._asdict(),
            "versions": {
                "fp8dist": version_of("fp8dist"),
                "torch": torch.__version__,
                "numerics": NUMERICS_VERSION,
            },
            "recipes": [recipe.describe() for recipe in kinds],
            "config": dict(config),
            "tied": dict(tied),
            "tensors": [{**one._asdict(), **role} for one, role in zip(certified, roles, strict=True)],
            "model": model_digest(certified),
        }
    )
