"""The public names of this room."""

from __future__ import annotations

from fp8dist.files.manager_export import export, exported
from fp8dist.files.model_trace import trace
from fp8dist.files.transformer_engine import ImportReport, load_transformer_engine

__all__ = ["ImportReport", "export", "exported", "load_transformer_engine", "trace"]
