"""Exact arithmetic modulo a prime, to prove that a parallel job computes what one process computes."""

from __future__ import annotations

from fp8dist.exact.comparison import compare
from fp8dist.exact.field import P
from fp8dist.exact.modes import arithmetic, to_residues
from fp8dist.exact.reference import record
from fp8dist.exact.verdict import ExactFinding, ExactReport

__all__ = ["ExactFinding", "ExactReport", "P", "arithmetic", "compare", "record", "to_residues"]
