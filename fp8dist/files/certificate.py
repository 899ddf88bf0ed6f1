"""The certificate of an export: a JSON file with the digests of its tensors, their recipes, and facts about the job."""

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
    """The job and the step that an export comes from. None: not known.

    Attributes:
        step: number of optimizer steps that the FP8 state has been through.
        run: the user's name for the run.
        ranks: number of ranks of the job.
        proven, checked: ``proven_step`` and ``checked_step`` of ``manager.verified``.
        last_check: the last check that found no difference: its step, and the fields of its result.
    """

    step: int
    run: str | None = None
    ranks: int | None = None
    proven: int | None = None
    checked: int | None = None
    last_check: Mapping[str, Any] | None = None


def certificate_of(
    layout: tuple[str, str],
    tensors: Sequence[ExportedTensor],
    recipes: Mapping[str, Recipe],
    tied: Mapping[str, str],
    config: Mapping[str, Any],
    origin: Origin,
    digests: Mapping[str, str],
) -> bytes:
    """Return the bytes of ``fp8dist-certificate.json``. docs/design/formats.md describes its fields.

    Args:
        layout: (the export's format, a key of ``FORMATS`` in ``export_formats.py``; "power_of_two" if all scales of
            weights are, else "float32").
        tensors: the exported tensors, in any order.
        recipes: the recipes of the modules whose weights are in FP8, by the module's name.
        tied: see ``Export.tied``.
        config: the content of config.json.
        origin: the job and the step.
        digests: the hexadecimal SHA-256 of each tensor's bytes, by the tensor's name.
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
            "export": layout[0],
            "scales": layout[1],
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
