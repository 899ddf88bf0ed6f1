"""Manifests: what must be the same on all ranks that share an arena."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from fp8dist.state.arena import Arena
from fp8dist.state.slots import Slot

NUMERICS_VERSION = 2
"""Incremented whenever the same inputs would give other scales. See CHANGELOG, "Numerics"."""


def build_manifest(
    arenas: Sequence[Arena], weights: Mapping[Slot, dict[str, Any]], settings: dict[str, Any]
) -> dict[str, Any]:
    """Return the manifest of arenas that the same ranks share, as plain JSON values.

    Args:
        weights: by weight slot, the whole weight, regardless of the part that a rank holds: ``shape``, [out_features,
            in_features]; ``dtype``; ``users``, fqns of the modules that use it, several if it is tied.
        settings: what else must be equal on all ranks, as plain JSON values.
    """
    return {
        "numerics_version": NUMERICS_VERSION,
        "settings": settings,
        "arenas": [
            {
                "recipe": arena.recipe.describe(),
                "slots": [[spec.slot.fqn, spec.slot.role, spec.format.name] for spec in arena.specs],
                "weights": {slot.fqn: weight for slot, weight in sorted(weights.items()) if slot in arena.index},
            }
            for arena in arenas
        ],
    }


def manifest_digest(manifest: dict[str, Any]) -> str:
    """Return the SHA-256 of the manifest, as hex."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def digest_word(digest: str) -> int:
    """Return the first 32 bits of a hex digest as an int32, for the header."""
    word = int(digest[:8], 16)
    return word - (1 << 32) if word >= 1 << 31 else word


def first_difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Return one line that names the first difference. Order: version, settings, recipe of most modules; slots, with
    the recipes of single modules and formats; weights, with dtype, shape and the modules that share one."""
    if mine["numerics_version"] != theirs["numerics_version"]:
        return _against("numerics version", mine["numerics_version"], theirs["numerics_version"])
    differing = _different_value("settings.{}", mine["settings"], theirs["settings"])
    if mine["arenas"] and theirs["arenas"]:
        differing = differing or _different_value(
            "recipe.{}", mine["arenas"][0]["recipe"], theirs["arenas"][0]["recipe"]
        )
    if differing:
        return differing
    a_slots, b_slots = _slots(mine), _slots(theirs)
    for slot in sorted({*a_slots, *b_slots}):
        name = ":".join(slot)
        if slot not in b_slots:
            return f"slot {name}: present here, missing there"
        if slot not in a_slots:
            return f"slot {name}: missing here, present there"
        (a_format, a_recipe), (b_format, b_recipe) = a_slots[slot], b_slots[slot]
        if differing := _different_value(f"recipe.{{}} of slot {name}", a_recipe, b_recipe):
            return differing
        if a_format != b_format:
            return _against(f"format of slot {name}", a_format, b_format)
    a_weights, b_weights = _weights(mine), _weights(theirs)
    for fqn in sorted({*a_weights, *b_weights}):
        if differing := _different_value(
            f"{{}} of the weight of {fqn}", a_weights.get(fqn, {}), b_weights.get(fqn, {})
        ):
            return differing
    return "the manifests are equal"


def _different_value(what: str, mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Describe the first key that differs ("recipe" comes first), or return "". ``what`` has a place for the key."""
    for key in sorted({*mine, *theirs}, key=lambda key: (key != "recipe", key)):
        if mine.get(key) != theirs.get(key):
            return _against(what.format(key), mine.get(key), theirs.get(key))
    return ""


def _slots(manifest: dict[str, Any]) -> dict[tuple[str, str], tuple[str, dict[str, Any]]]:
    """(format, recipe) by slot."""
    return {
        (fqn, role): (format_name, arena["recipe"])
        for arena in manifest["arenas"]
        for fqn, role, format_name in arena["slots"]
    }


def _weights(manifest: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {fqn: weight for arena in manifest["arenas"] for fqn, weight in arena["weights"].items()}


def _against(what: str, mine: object, theirs: object) -> str:
    return f"{what}: {mine!r} here, {theirs!r} there"
