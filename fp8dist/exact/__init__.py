"""Exact arithmetic modulo a prime, to prove that a parallel job computes what one process computes."""

from __future__ import annotations

from fp8dist.exact.conversion import to_residues
from fp8dist.exact.field import P
from fp8dist.exact.modes import arithmetic

__all__ = ["P", "arithmetic", "to_residues"]
