"""The exporters that ``--export`` asks for."""

from __future__ import annotations

from fp8dist import Exporter
from fp8dist.errors import ConfigurationError
from fp8dist.exporters import MLflow, OpenTelemetry, Prometheus, PrometheusTextfile, TensorBoard, Wandb
from launch.train_gpt.data import BadInput
from tests.support.lab.flags import Export
from tests.support.lab.options import Options

__all__ = ["exporters_of"]


def exporters_of(options: Options, resume_after: int | None = None) -> list[Exporter]:
    """Return an exporter for each ``--export``, in order. Local; they open nothing before their first call.

    Args:
        resume_after: the step that the run resumes from.

    Raises:
        BadInput: the tool of an exporter is not installed, or its argument is wrong.
    """
    made: list[Exporter] = []
    if options.tensorboard:
        made.append(TensorBoard(options.out / "tensorboard", resume_after=resume_after, images=0, slots=True))
    for export in options.export:
        try:
            made.append(_exporter(export, options, resume_after))
        except ConfigurationError as error:
            raise BadInput(f"--export {export.name}: {error}") from None
    return made


def _exporter(export: Export, options: Options, resume_after: int | None) -> Exporter:
    name, argument = export
    if name == "tensorboard":
        return TensorBoard(argument or options.out / "tensorboard", resume_after=resume_after)
    if name == "wandb":
        return Wandb(project=argument or "fp8dist", dir=str(options.out))
    if name == "mlflow":
        return MLflow(argument or None)
    if name == "prometheus":
        return Prometheus(int(argument))
    return PrometheusTextfile(argument) if name == "textfile" else OpenTelemetry()
