"""Exporters into TensorBoard, Weights & Biases, MLflow, Prometheus and OpenTelemetry. docs/exporters.md compares them.

Each needs its tool, which is an extra of this package, only when it is made.
"""

from __future__ import annotations

from fp8dist.runs.exporters.mlflow import MLflow
from fp8dist.runs.exporters.opentelemetry import OpenTelemetry
from fp8dist.runs.exporters.prometheus import Prometheus, PrometheusTextfile
from fp8dist.runs.exporters.tensorboard import TensorBoard
from fp8dist.runs.exporters.wandb import Wandb

__all__ = ["MLflow", "OpenTelemetry", "Prometheus", "PrometheusTextfile", "TensorBoard", "Wandb"]
