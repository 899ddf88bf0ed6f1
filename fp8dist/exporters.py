"""Exporters of a run's numbers into other tools. docs/exporters.md compares them."""

from __future__ import annotations

from fp8dist.runs.exporters import MLflow, OpenTelemetry, Prometheus, PrometheusTextfile, TensorBoard, Wandb

__all__ = ["MLflow", "OpenTelemetry", "Prometheus", "PrometheusTextfile", "TensorBoard", "Wandb"]
