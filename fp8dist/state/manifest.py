"""Manifests: what must be the same on all ranks that share an arena."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from fp8dist.state.slots import SlotSpec

__all__ = ["NUMERICS_VERSION", "build_manifest", "digest_word", "first_difference", "manifest_digest"]

NUMERICS_VERSION = 1
"""Goes up whenever the same inputs would give other scales. See CHANGELOG, "Numerics"."""


def build_manifest(specs: Sequence[SlotSpec], recipe: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Plain JSON values: slots with formats, recipe, settings, numerics version."""
    return {
        "numerics_version": NUMERICS_VERSION,
        "settings": settings,
        "recipe": recipe,
        "slots": [[spec.slot.fqn, spec.slot.role, spec.format.name] for spec in specs],
    }


def manifest_digest(manifest: dict[str, Any]) -> str:
    """SHA-256 of the manifest, as hex."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def digest_word(digest: str) -> int:
    """The first 32 bits of a hex digest as an int32, for the header."""
    word = int(digest[:8], 16)
    return word - (1 << 32) if word >= 1 << 31 else word


def first_difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """One line that says what differs first: version, a setting, the recipe, then slots."""
    if mine["numerics_version"] != theirs["numerics_version"]:
        return _against("numerics version", mine["numerics_version"], theirs["numerics_version"])
    for section in ("settings", "recipe"):
        a, b = mine[section], theirs[section]
        for key in sorted({*a, *b}):
            if a.get(key) != b.get(key):
                return _against(f"{section}.{key}", a.get(key), b.get(key))
    a_slots = {(fqn, role): fmt for fqn, role, fmt in mine["slots"]}
    b_slots = {(fqn, role): fmt for fqn, role, fmt in theirs["slots"]}
    for slot in sorted({*a_slots, *b_slots}):
        name = ":".join(slot)
        if slot not in b_slots:
            return f"slot {name}: present here, missing there"
        if slot not in a_slots:
            return f"slot {name}: missing here, present there"
        if a_slots[slot] != b_slots[slot]:
            return _against(f"format of slot {name}", a_slots[slot], b_slots[slot])
    return "the manifests are equal"


def _against(what: str, mine: object, theirs: object) -> str:
    return f"{what}: {mine!r} here, {theirs!r} there"
