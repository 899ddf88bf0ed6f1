"""The public names of this room."""

from __future__ import annotations

from fp8dist.files.manager_export import export, exported
from fp8dist.files.model_trace import trace
from fp8dist.files.transformer_engine import ImportReport, load_transformer_engine
from fp8dist.files.verified_tensors import Verification, verify

__all__ = ["ImportReport", "Verification", "export", "exported", "load_transformer_engine", "trace", "verify"]
